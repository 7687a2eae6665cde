// Package fairlock is the fair lock of Redisson: waiters of all processes get it
// in the order in which they came. Java services on the same server stand in the
// same queue.
//
// The server keeps the queue. A waiter takes its place with its first attempt and
// keeps it for as long as it waits, whatever its lock.Wait: its client gives signs
// of life, and a waiter whose process died or hangs loses its place within
// seconds (10 s, or a third of the watchdog timeout, or the fair wait timeout, if
// that is less), so that the next one is served. A waiter that leaves, because its context ended or its time
// was over, gives its place up at once. One whose process was stopped for longer
// than that has lost its place and queues anew, at the end.
//
// Java waiters give no signs of life. They keep their place until a deadline that
// Redisson computes when they come: some five minutes for each place, unless
// fairLockWaitTimeout says otherwise. One that died holds up those behind it for
// that long. The same is true the other way round while only Java clients use the
// lock: they do not read signs of life. Give both sides the same
// fairLockWaitTimeout (redlatch.WithFairWaitTimeout here).
//
// TryLock never queues, and fails while anybody does.
package fairlock

import (
	"context"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

type member = locking.Member

// Lock is a fair lock. It is made by Client.FairLock.
type Lock struct {
	member
	l *locking.Lock
	p *protocol
}

// New returns the fair lock of that name. It is called by the client.
func New(s *session.Session, name string, opts ...Option) *Lock {
	p := newProtocol(s)
	for _, opt := range opts {
		if opt != nil {
			opt(p)
		}
	}
	l := locking.New(s, p, name)
	p.own = p.about(l.Key())
	return &Lock{l.Member(), l, p}
}

// Name returns the name the lock was asked for with.
func (l *Lock) Name() string { return l.l.Name() }

// Lock takes the lock when it is its turn: it waits until those who came before
// have had it, ctx ends, or lock.Wait runs out. See lock.Locker for its errors.
// With NonReentrant it fails at once with lock.ErrReentered if the owner holds the
// lock already.
func (l *Lock) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return l.l.Lock(ctx, opts...)
}

// TryLock makes one attempt, which blocks for one round trip, and returns an
// error that matches lock.ErrNotAcquired if somebody else holds the lock or waits
// for it. See lock.Locker for other errors.
func (l *Lock) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return l.l.TryLock(ctx, opts...)
}

// Do runs fn while it holds the lock. See lock.Locker.
func (l *Lock) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, l, fn, opts...)
}

// Unlock gives back one hold of the owner that ctx names (see lock.WithOwner),
// wherever it was taken: by this client, where the latest such hold ends, or
// anywhere else, where its holder hears of it at its next renewal. It blocks until
// the server has answered. It returns an error that matches lock.ErrInvalid if ctx
// names no owner, lock.ErrNotHeld if that owner does not hold the lock, and
// otherwise those of Hold.Unlock.
func (l *Lock) Unlock(ctx context.Context) error { return l.l.UnlockOwner(ctx) }

// ForceUnlock opens the lock, whoever holds it, and tells the first waiter. It
// reports whether the lock was held. Holds of this client end at once, as lost;
// any other hears of it at its next renewal, a third of its lease later at most,
// or, if its lease is fixed, when that is over; until then its holder believes
// that it holds the lock. It blocks for one round trip; a key that is no lock is
// left alone and is an error.
func (l *Lock) ForceUnlock(ctx context.Context) (bool, error) {
	return l.l.Force(ctx, func() (bool, error) { return l.p.Force(ctx, l.l.Key()) })
}

// IsLocked reports whether anybody holds the lock. It blocks for one round trip.
func (l *Lock) IsLocked(ctx context.Context) (bool, error) {
	ttl, err := l.l.TTL(ctx)
	return ttl != 0, err
}

// TTL returns after what time the lock will be free if nobody renews or releases
// it: 0 if it is free now, lock.NoExpiry if never. It blocks for one round trip.
func (l *Lock) TTL(ctx context.Context) (time.Duration, error) { return l.l.TTL(ctx) }

// HoldCount returns how often owner holds the lock, 0 if it does not. It blocks
// for one round trip.
func (l *Lock) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	return l.l.HoldCount(ctx, owner)
}

// IsHeldBy reports whether owner holds the lock. It blocks for one round trip.
func (l *Lock) IsHeldBy(ctx context.Context, owner lock.Owner) (bool, error) {
	n, err := l.l.HoldCount(ctx, owner)
	return n > 0, err
}

// Queue returns those who wait, in the order in which they will get the lock. It
// is a snapshot, blocks for one round trip and changes nothing.
func (l *Lock) Queue(ctx context.Context) ([]Waiter, error) {
	if err := l.l.Check(ctx); err != nil {
		return nil, err
	}
	waiters, err := l.p.Queue(ctx, l.l.Key())
	if err != nil {
		return nil, fmt.Errorf("redlatch: look at the queue of %q: %w", l.Name(), err)
	}
	return waiters, nil
}
