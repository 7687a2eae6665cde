package rlock

import (
	"errors"
	"fmt"
	"sync"

	"github.com/redlatch/redlatch/lock"
)

// ErrStaleToken says that a fencing token is older than one already seen: its
// holder has lost the lock and may not know.
var ErrStaleToken = errors.New("redlatch: stale fencing token")

// Guard stands before a resource and lets nobody pass who comes with an older
// fencing token than somebody before. The zero Guard has seen no token.
//
// A Guard protects what lives in its own process. A resource elsewhere, such as
// a database, has to make the same comparison itself, in the transaction that
// writes; when it restarts it must remember the highest token.
type Guard struct {
	mu      sync.Mutex
	highest int64
}

// NewGuard returns a guard that accepts no token older than floor, the highest
// one the resource has recorded so far; 0 if none.
func NewGuard(floor int64) *Guard { return &Guard{highest: floor} }

// Check accepts a token that is not older than the highest seen, and remembers
// it. It returns an error that matches ErrStaleToken for an older one, and
// lock.ErrInvalid for one that no fenced lock issues (0 or less).
func (g *Guard) Check(token int64) error {
	if token <= 0 {
		return fmt.Errorf("%w: %d is not a fencing token", lock.ErrInvalid, token)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if token < g.highest {
		return fmt.Errorf("%w: %d, after %d was seen", ErrStaleToken, token, g.highest)
	}
	g.highest = token
	return nil
}

// Highest returns the highest token seen, for the resource to record.
func (g *Guard) Highest() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.highest
}
