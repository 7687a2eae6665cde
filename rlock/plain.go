package rlock

import (
	"context"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Plain is the lock that most others make of one key: a string with a value of its
// own for each acquisition, set if there is none (SET NX PX), deleted and extended
// by whoever has that value. So do redsync, redislock and most locks that are
// written by hand: it excludes theirs of the same name, and they exclude it. The
// other locks of this package are of another type on the server; of the same name
// each is an error of the other (WRONGTYPE). It is not Redisson's, and an owner
// holds it once: another acquisition is an error that matches lock.ErrReentered.
//
// Others release without a message. Waiters hear of releases by redlatch, and look
// when the lease is over and after pauses that grow to a quarter of a second; see
// WithBackoff.
//
// Others also wait without hearing of a release. They would hardly ever find the lock
// free while many of a process want it. So after every 3 s of passing it on, a process
// leaves the lock free for 0.3 s, in which no waiter of redlatch tries for it. Who
// makes its first attempt then, does. Whoever asks every 0.25 s, as redsync does, finds
// the lock free in that time.
type Plain struct {
	object
	s *session.Session
	p *plainProtocol
}

// NewPlain returns the plain lock of that name. It is called by the client.
func NewPlain(s *session.Session, name string, opts ...Option) *Plain {
	settings := &protocol{backoff: ExponentialBackoff(10*time.Millisecond, 250*time.Millisecond, 2)}
	for _, opt := range opts {
		if opt != nil {
			opt(settings)
		}
	}
	p := &plainProtocol{s: s, backoff: settings.backoff}
	return &Plain{newObject(locking.New(s, p, name)), s, p}
}

// Unlock gives back the hold of the owner that ctx names (see lock.WithOwner),
// wherever it was taken: by this client, where it ends, or anywhere else, where its
// holder hears of it at its next renewal. It blocks until the server has answered. It
// returns an error that matches lock.ErrInvalid if ctx names no owner, lock.ErrNotHeld
// if that owner does not hold the lock, and otherwise those of Hold.Unlock.
func (l *Plain) Unlock(ctx context.Context) error { return l.l.UnlockOwner(ctx) }

// ForceUnlock opens the lock, whoever holds it, redlatch or others, and tells the
// waiters of redlatch. It reports whether the lock was held. Any string under the name
// is a lock to it. The hold that this client had ends at once, as lost. Any other
// holder of redlatch hears of it at its next renewal, a third of its lease later at
// most, or, if its lease is fixed, when that is over; until then it believes that it
// holds the lock. It blocks for one round trip; a key that is no string is left alone
// and is an error.
func (l *Plain) ForceUnlock(ctx context.Context) (bool, error) {
	key := l.l.Key()
	return l.l.Force(ctx, func() (bool, error) {
		return plainForceUnlockScript.Exec(ctx, l.s.Client, []string{key},
			[]string{l.s.Publish, wire.PlainChannel(key), wire.PayloadUnlocked}).AsBool()
	})
}

// IsHeldBy reports whether owner holds the lock. It blocks for one round trip.
func (l *Plain) IsHeldBy(ctx context.Context, owner lock.Owner) (bool, error) {
	if err := l.l.Check(ctx); err != nil {
		return false, err
	}
	if owner.IsZero() {
		return false, fmt.Errorf("%w: the zero owner holds nothing", lock.ErrInvalid)
	}
	value, err := l.p.value(ctx, l.l.Key())
	if err != nil {
		return false, fmt.Errorf("redlatch: look at %q: %w", l.Name(), err)
	}
	_, held := ticketOf(owner, value)
	return held, nil
}

// HoldCount returns 1 if owner holds the lock, 0 if it does not. It blocks for one
// round trip.
func (l *Plain) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	held, err := l.IsHeldBy(ctx, owner)
	if held {
		return 1, err
	}
	return 0, err
}
