package rlock

import (
	"errors"
	"fmt"
	"sync"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// ErrStaleToken means that a fencing token is older than one already seen: its holder has
// lost the lock, and may not know it yet.
var ErrStaleToken = errors.New("redlatch: stale fencing token")

// Guard protects a resource from late holders: it rejects a fencing token that is older than
// one it has accepted. The zero Guard has seen no token.
//
// A Guard protects resources of its own process. Another resource, such as a database, must
// make the same comparison in the transaction that writes, and must remember the highest
// token across restarts.
type Guard struct {
	mu      sync.Mutex
	highest int64
}

// NewGuard returns a guard that rejects tokens older than floor, the highest token that the
// resource has recorded, or 0.
func NewGuard(floor int64) *Guard { return &Guard{highest: floor} }

// Check accepts a token that is not older than the highest seen, and remembers it. The error
// matches ErrStaleToken for an older one, and lock.ErrInvalid for a token below 1.
func (g *Guard) Check(token int64) error {
	if token <= 0 {
		return refused(fmt.Errorf("%w: %d is not a fencing token", lock.ErrInvalid, token))
	}

	g.mu.Lock()
	defer g.mu.Unlock()

	if token < g.highest {
		return refused(fmt.Errorf("%w: %d, after %d was seen", ErrStaleToken, token, g.highest))
	}

	g.highest = token
	return nil
}

func refused(err error) error { return wire.Object{Kind: "guard"}.Refused("check token", err) }

// Highest returns the highest token seen, which the resource should record.
func (g *Guard) Highest() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.highest
}
