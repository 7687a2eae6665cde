// Package rlock is the reentrant lock of Redisson and its variations: the lock
// itself, the fenced lock, the spin lock, and the lock that refuses re-entry.
// Java services on the same server contend for the same locks. Besides there is the
// plain lock, for which others contend: redsync, redislock, and locks written by hand.
//
// Objects are made by a client:
//
//	h, err := client.Lock("orders").Lock(ctx)
//	if err != nil {
//		return err
//	}
//	defer h.Unlock(ctx)
//
// By default every acquisition is an owner of its own and a lock taken twice
// waits for itself, like a sync.Mutex. Re-entry is asked for with
// lock.WithOwner.
//
// Waiters of one process are served first come, first served, and a lock passes
// on inside a process a bounded number of times; then processes take turns. Whoever
// asks for a lock just when it is free does not queue, though: a process that
// takes a lock again at once after it gave it back competes with the waiters of
// other processes by chance. Spin locks do not hear of each other's releases, so
// between processes theirs is by chance altogether.
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

// Option changes a lock object.
type Option func(*protocol)

// NonReentrant makes a second acquisition by the same owner fail with an error
// that matches lock.ErrReentered, instead of counting it. It is on the server
// what a reentrant lock is, and excludes one of the same name.
func NonReentrant() Option {
	return func(p *protocol) { p.nonReentrant = true }
}

// Lock is a reentrant lock. It is made by Client.Lock.
type Lock struct{ base }

// New returns the lock of that name. It is called by the client.
func New(s *session.Session, name string, opts ...Option) *Lock {
	m := &struct {
		Lock
		parts
	}{}
	m.base = m.assemble(s, "lock", name, opts)
	return &m.Lock
}

// Fenced is a lock whose every acquisition gets a fencing token: a number one
// higher than that of the acquisition before, re-entries included. The token
// belongs to the hold (Hold.Token) and is at least 1. A resource that remembers
// the highest token it has seen can refuse whoever comes late; see Guard.
//
// The counter is a key of its own without expiry, which outlives the lock. It
// is as durable as the server: a failover to a replica that has not seen the
// last increments can issue a token twice.
type Fenced struct{ base }

// NewFenced returns the fenced lock of that name. It is called by the client.
func NewFenced(s *session.Session, name string, opts ...Option) *Fenced {
	m := &struct {
		Fenced
		parts
	}{}
	m.p.fenced = true
	m.base = m.assemble(s, "fenced", name, opts)
	return &m.Fenced
}

// ResetTokens removes the counter, unless the lock is held, and reports whether
// it did. It is for names that are not used any more: the counters of locks
// whose names are made up, such as one per order, would otherwise add up. The
// next token is 1 again, so whatever remembers a higher one refuses it. It
// blocks for one round trip.
func (f *Fenced) ResetTokens(ctx context.Context) (bool, error) {
	if err := f.l.Check(ctx); err != nil {
		return false, err
	}
	reset, err := resetTokensScript.Exec(ctx, f.s.Client, []string{f.l.Key(), wire.FencingToken(f.l.Key())}, nil).AsBool()
	if err != nil {
		return false, fmt.Errorf("redlatch: reset the tokens of %q: %w", f.Name(), err)
	}
	return reset, nil
}

// Spin is a lock without pub/sub: its release tells nobody, and waiters try
// again after a pause that grows. It suits locks that are held very briefly on
// servers where publishing is dear. Within a process waiters still queue, and
// only the first one tries.
type Spin struct{ base }

// NewSpin returns the spin lock of that name. It is called by the client.
func NewSpin(s *session.Session, name string, opts ...Option) *Spin {
	m := &struct {
		Spin
		parts
	}{}
	m.p.silent = true
	m.p.backoff = ExponentialBackoff(time.Millisecond, 128*time.Millisecond, 2)
	m.base = m.assemble(s, "spin", name, opts)
	return &m.Spin
}

type member = locking.Member

// object is what all kinds have in common.
type object struct {
	member
	l *locking.Lock
}

func newObject(l *locking.Lock) object { return object{l.Member(), l} }

// base is what those have in common that are a hash.
type base struct {
	object
	s *session.Session
	p *protocol
}

// parts are what a base points to. They are allocated with it: a lock is often made for
// one acquisition.
type parts struct {
	p protocol
	l locking.Lock
}

// assemble returns the base of the parts.
func (m *parts) assemble(s *session.Session, kind, name string, opts []Option) base {
	m.p.s, m.p.kind = s, kind
	for _, opt := range opts {
		if opt != nil {
			opt(&m.p)
		}
	}
	m.l = locking.Make(s, &m.p, name)
	if !m.p.silent {
		m.p.channel = wire.LockChannel(m.l.Key())
	}
	return base{newObject(&m.l), s, &m.p}
}

// Name returns the name the lock was asked for with.
func (o object) Name() string { return o.l.Name() }

// Lock takes the lock, waiting until it is free, ctx ends, or lock.Wait runs
// out. See lock.Locker for its errors. With NonReentrant, and a plain lock, it fails
// at once with lock.ErrReentered if the owner holds the lock already.
func (o object) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return o.l.Lock(ctx, opts...)
}

// TryLock makes one attempt, which blocks for one round trip, and returns an
// error that matches lock.ErrNotAcquired if somebody else holds the lock. See
// lock.Locker for other errors.
func (o object) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return o.l.TryLock(ctx, opts...)
}

// Do runs fn while it holds the lock. See lock.Locker.
func (o object) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, o, fn, opts...)
}

// Unlock gives back one hold of the owner that ctx names (see lock.WithOwner),
// wherever it was taken: by this client through a lock of the same kind, where
// the latest such hold ends, or anywhere else, where its holder hears of it at
// its next renewal. The server counts the holds of an owner and does not tell
// them apart. It blocks until the server has answered. It returns an error that
// matches lock.ErrInvalid if ctx names no owner, lock.ErrNotHeld if that owner
// does not hold the lock, and otherwise those of Hold.Unlock.
func (b base) Unlock(ctx context.Context) error { return b.l.UnlockOwner(ctx) }

// ForceUnlock opens the lock, whoever holds it, and tells the waiters. It
// reports whether the lock was held. Holds that this client had taken through a
// lock of the same kind end at once, as lost. Any other hears of it at its next
// renewal, a third of its lease later at most, or, if its lease is fixed, when
// that is over; until then its holder believes that it holds the lock. It blocks
// for one round trip; a key that is no lock is left alone and is an error.
func (b base) ForceUnlock(ctx context.Context) (bool, error) {
	return b.l.Force(ctx, func() (bool, error) {
		return forceUnlockScript.Exec(ctx, b.s.Client, []string{b.l.Key()},
			[]string{b.p.publish(), wire.LockChannel(b.l.Key()), wire.PayloadUnlocked}).AsBool()
	})
}

// IsLocked reports whether anybody holds the lock. It blocks for one round
// trip.
func (o object) IsLocked(ctx context.Context) (bool, error) {
	ttl, err := o.l.TTL(ctx)
	return ttl != 0, err
}

// TTL returns after what time the lock will be free if nobody renews or
// releases it: 0 if it is free now, lock.NoExpiry if never. It blocks for one
// round trip.
func (o object) TTL(ctx context.Context) (time.Duration, error) { return o.l.TTL(ctx) }

// HoldCount returns how often owner holds the lock, 0 if it does not. It blocks
// for one round trip.
func (b base) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	return b.l.HoldCount(ctx, owner)
}

// IsHeldBy reports whether owner holds the lock. It blocks for one round trip.
func (b base) IsHeldBy(ctx context.Context, owner lock.Owner) (bool, error) {
	n, err := b.l.HoldCount(ctx, owner)
	return n > 0, err
}
