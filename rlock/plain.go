package rlock

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Plain is the lock that most other libraries implement: a string with a unique value for
// each acquisition, which is set if the key does not exist (SET NX PX), and deleted and
// extended by the holder of that value. It excludes the locks of redsync, redislock and most
// hand-written locks with the same name. The other locks of this package have another type on
// the server; with the same name, each is an error for the other (WRONGTYPE). Redisson has no
// such lock. It is not reentrant: another acquisition by its owner is an error that matches
// lock.ErrReentered.
//
// Other libraries release without a message. Waiters receive the releases of redlatch, and
// try when the lease ends and after pauses that grow to a quarter of a second; see
// WithBackoff.
//
// Other libraries also poll. While many callers of a process contend, pollers would hardly
// ever find the lock free. So after every 3 s of passing it on, a process leaves the lock free
// for 0.3 s, in which no waiter of redlatch tries; a first attempt does. A client that polls
// every 0.25 s, as redsync does, finds the lock free in that time.
type Plain struct {
	object
	s *session.Session
}

// NewPlain returns the plain lock of that name. The client calls it.
func NewPlain(s *session.Session, name string, opts ...Option) *Plain {
	settings := &protocol{backoff: ExponentialBackoff(10*time.Millisecond, 250*time.Millisecond, 2)}
	for _, opt := range opts {
		if opt != nil {
			opt(settings)
		}
	}
	p := &plainProtocol{s: s, backoff: settings.backoff}
	return &Plain{newObject(locking.New(s, p, name)), s}
}

// Unlock ends the latest hold that the owner of ctx (see lock.WithOwner) has in this
// process, and releases the lock with the last of them. It blocks like Hold.Unlock. The
// error matches lock.ErrInvalid if ctx has no owner, and lock.ErrNotHeld if the owner has
// no hold in this process; other errors are those of Hold.Unlock.
func (l *Plain) Unlock(ctx context.Context) error { return l.l.UnlockOwner(ctx) }

// ForceUnlock opens the lock, regardless of its holder, and wakes the waiters of redlatch. It
// reports whether the lock was held. Any string with that name counts as a lock. This client's
// hold is lost at once. Any other hold of redlatch is lost at its next renewal, after at most a
// third of its lease, or, if its lease is fixed, at the end of the lease; until then its holder
// assumes to hold the lock. ForceUnlock blocks for one round trip. It returns an error and has
// no effect if the key is not a string.
func (l *Plain) ForceUnlock(ctx context.Context) (bool, error) {
	key := l.l.Key()
	return l.l.Force(ctx, func() (bool, error) {
		return plainForceUnlockScript.Exec(ctx, l.s.Client, []string{key},
			[]string{l.s.Publish, wire.PlainChannel(key), wire.PayloadUnlocked}).AsBool()
	})
}

// IsHeldBy reports whether owner holds the lock. It blocks like HoldCount.
func (l *Plain) IsHeldBy(ctx context.Context, owner lock.Owner) (bool, error) {
	if err := l.l.Check(ctx); err != nil {
		return false, err
	}
	if owner.IsZero() {
		return false, fmt.Errorf("%w: the zero owner holds nothing", lock.ErrInvalid)
	}
	if l.l.Holds(owner) > 0 {
		return true, nil
	}
	value, err := wire.Read(ctx, l.s.Client, "GET", l.l.Key()).ToString()
	if err != nil && !rueidis.IsRedisNil(err) {
		return false, fmt.Errorf("redlatch: look at %q: %w", l.Name(), err)
	}
	return value == owner.String(), nil
}

// HoldCount returns 1 if owner has a hold in this process or is the value on the server, and
// 0 otherwise. For an owner with a hold in this process it does not block; otherwise it
// blocks for one round trip.
func (l *Plain) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	held, err := l.IsHeldBy(ctx, owner)
	if held {
		return 1, err
	}
	return 0, err
}
