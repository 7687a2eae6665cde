// Package rlock implements the reentrant lock of Redisson and its variations: the lock
// itself, the fenced lock, the spin lock, and the lock that refuses re-entry. Java services
// on the same server contend for the same locks. The plain lock is for contention with
// redsync, redislock, and hand-written locks.
//
// A client creates the objects:
//
//	hold, err := client.Lock("orders").Lock(ctx)
//	if err != nil {
//		return err
//	}
//	return errors.Join(ship(hold.Context()), hold.Unlock(ctx))
//
// By default every acquisition has an owner of its own, so a caller that acquires a lock twice
// waits for itself, as with a sync.Mutex. lock.WithOwner enables re-entry.
//
// Waiters of one process are served first come, first served. The lock passes to the next of
// them without a release if that waiter wants the same kind of lock with the same lease. After
// a turn of 10 ms the process leaves the lock to others for as long (see redlatch.WithTurn). A caller that finds the
// lock free does not queue, so a process that acquires a lock again right after its release
// competes with the waiters of other processes at random. Spin locks publish no releases, so
// the order between processes is random for them.
package rlock

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Option configures a Lock or a Fenced. If an option is nil, all
// methods of the object except Name return an error that matches lock.ErrInvalid.
type Option func(*settings) error

// settings are what options set.
type settings struct {
	nonReentrant bool
	backoff      Backoff // nil unless waiters poll
}

// NonReentrant makes a second acquisition by the same owner fail with an error that matches
// lock.ErrReentered. On the server the lock equals a reentrant lock, and excludes one of the
// same name.
func NonReentrant() Option {
	return func(s *settings) error {
		s.nonReentrant = true
		return nil
	}
}

// Lock is a reentrant lock. Client.Lock returns it.
type Lock struct{ base }

// New returns the reentrant lock of that name. Client.Lock calls it.
func New(e *engine.Engine, name string, opts ...Option) *Lock {
	m := &struct {
		Lock
		parts
	}{}
	m.base = m.assemble(e, "lock", name, session.Configure(&m.p.settings, opts))
	return &m.Lock
}

// Fenced is a lock with fencing tokens: each acquisition gets a number higher than the numbers of all
// earlier ones. Some numbers may be skipped. The token belongs to the hold (Hold.Token) and is
// at least 1; re-entry shares it. A resource that remembers the highest token it has seen can
// reject late holders; see Guard.
//
// The counter is a separate key without expiry, which outlives the lock. It is as durable as
// the server: after a failover to a replica that missed the last increments, a token can be
// issued twice, and without its data the server begins again at 1. RaiseTokens lets the tokens
// continue above those that a resource remembers.
//
// Tokens are below 2^53, which JSON and JavaScript know exactly. If another program has set the counter such that the next
// one would not be from 1 to 2^53-1, or is no number at all, acquisitions fail with an error that says so, and the
// lock stays free. ResetTokens removes the counter.
type Fenced struct{ base }

// NewFenced returns the fenced lock of that name. Client.FencedLock calls it.
func NewFenced(e *engine.Engine, name string, opts ...Option) *Fenced {
	m := &struct {
		Fenced
		parts
	}{}
	m.p.fenced = true
	m.base = m.assemble(e, "fenced", name, session.Configure(&m.p.settings, opts))
	return &m.Fenced
}

// ResetTokens removes the counter unless the lock is held, and reports whether it did. It is
// for names that are no longer used: otherwise the counters of generated names, such as one per
// order, accumulate. The next token is 1 again, and resources that remember a higher
// one reject it. ResetTokens blocks for one round trip.
func (l *Fenced) ResetTokens(ctx context.Context) (bool, error) {
	if err := l.l.Refuses(ctx, "reset tokens"); err != nil {
		return false, err
	}

	began := time.Now()
	reset, err := wire.Bool(resetTokensScript.Exec(ctx, l.s.Client, []string{l.l.Key(), wire.FencingToken(l.l.Key())}, nil))
	if err != nil {
		return false, l.l.Object().Failed(ctx, "reset tokens", began, err)
	}

	return reset, nil
}

// RaiseTokens raises the counter to floor, the highest token that a resource remembers, unless it is
// that high already, and returns the counter. It never lowers the counter, so it can be called at any
// time, and repeated. It is for a server that has lost its data, whose tokens begin again at 1. floor is
// from 0 to 2^53-2, so that another token follows.
//
// The lock may be held. Its holder keeps its token. The next acquisition gets a token above floor, with
// one exception: a process that passes the lock on among its own callers draws their tokens ahead, and
// uses these for another 20 ms and a round trip. They are in order, too.
//
// RaiseTokens blocks for one round trip. While the server does not answer, it tries again until ctx ends,
// for 5 s at most. The error matches lock.ErrInvalid for another floor, lock.ErrUnavailable if the counter
// is unchanged, lock.ErrIndeterminate if it may have been raised or may still be, and lock.ErrClosed if
// the client is closed. Other errors are refusals of the server, for example of a counter that is no
// number.
func (l *Fenced) RaiseTokens(ctx context.Context, floor int64) (int64, error) {
	if err := l.l.Refuses(ctx, "raise tokens"); err != nil {
		return 0, err
	}
	if floor < 0 || floor >= wire.MaxToken {
		return 0, l.l.Object().Refused("raise tokens",
			fmt.Errorf("%w: %d: must be from 0 to %d", lock.ErrInvalid, floor, wire.MaxToken-1))
	}

	began := time.Now()
	keys := []string{wire.FencingToken(l.l.Key())}
	args := []string{strconv.FormatInt(floor, 10)}
	var last int64
	unknown := false // an attempt without an answer may have raised it
	err := l.s.Retry(ctx, began.Add(engine.UnlockTimeout), func(ctx context.Context) (err error) {
		last, err = wire.Number(raiseTokensScript.Exec(ctx, l.s.Client, keys, args), wire.Tokens)
		unknown = unknown || wire.IsUnknown(err)
		return err
	}, wire.IsRefused)
	if err != nil && unknown {
		err = errors.Join(lock.ErrIndeterminate, err)
	}
	if err != nil {
		return 0, l.l.Object().Failed(ctx, "raise tokens", began, err)
	}

	return last, nil
}

// Spin is a lock without pub/sub: its release publishes nothing, and waiters try again after
// growing pauses. It suits locks that are held briefly, on servers where publishing is
// expensive. The waiters of a process still queue, and only the first one tries.
type Spin struct{ base }

// NewSpin returns the spin lock of that name. Client.SpinLock calls it.
func NewSpin(e *engine.Engine, name string, backoff ...Backoff) *Spin {
	m := &struct {
		Spin
		parts
	}{}
	m.p.silent = true
	var err error
	m.p.backoff, err = lastOf(backoff, ExponentialBackoff(time.Millisecond, 128*time.Millisecond, 2))
	m.base = m.assemble(e, "spin", name, err)
	return &m.Spin
}

// NewAt returns the lock of a run of a Once, with that key. Package once calls it.
func NewAt(e *engine.Engine, name, key string) lock.Locker {
	m := &struct {
		Lock
		parts
	}{}
	m.p = protocol{e: e, s: e.Session, kind: "once", settings: settings{nonReentrant: true}, channel: wire.LockChannel(key)}
	m.l = engine.NewLockAt(e, &m.p, name, key, nil)
	m.base = base{newObject(&m.l), e.Session, &m.p}
	return &m.Lock
}

type member = engine.Member

// object is common to all kinds.
type object struct {
	member
	l *engine.Lock
}

func newObject(l *engine.Lock) object { return object{l.Member(), l} }

// base is common to the kinds that are a hash.
type base struct {
	object
	s *session.Session
	p *protocol
}

// parts are allocated together with their base, because many locks are made for one
// acquisition.
type parts struct {
	p protocol
	l engine.Lock
}

// assemble returns the base of the parts. err is the error of an option.
func (m *parts) assemble(e *engine.Engine, kind, name string, err error) base {
	m.p.e = e
	m.p.s = e.Session
	m.p.kind = kind
	m.l = engine.NewLock(e, &m.p, name, err)
	if !m.p.silent {
		m.p.channel = wire.LockChannel(m.l.Key())
	}
	return base{newObject(&m.l), e.Session, &m.p}
}

// Name returns the name that was passed to the client.
func (l object) Name() string { return l.l.Name() }

// Lock acquires the lock. It blocks until it has the lock, ctx ends, or lock.Wait runs out. See
// lock.Locker for its errors. With NonReentrant, and for a plain lock, it fails at once with
// lock.ErrReentered if the owner already holds the lock.
func (l object) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return l.l.Lock(ctx, opts...)
}

// TryLock makes one attempt, which blocks for one round trip. The error matches
// lock.ErrNotAcquired if the lock is held elsewhere. See lock.Locker for other errors.
func (l object) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return l.l.TryLock(ctx, opts...)
}

// Adopt returns a hold on a lock that lock.Detach has left held under that id, in this process or
// another one. The hold has the fencing token of the detached one, if any, but another owner.
// Exactly one of several callers succeeds. For the others, and after the lease of the detached hold,
// the error matches lock.ErrNotHeld. For a malformed id it matches lock.ErrInvalid. ctx and the
// options have the same meaning as for TryLock. Adopt blocks for one round trip. If the error matches
// lock.ErrIndeterminate, the lock can soon be adopted under the same id again, for the lease that
// this call requested, unless that is over.
func (l object) Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (lock.Hold, error) {
	return l.l.Adopt(ctx, id, opts...)
}

// Do runs fn while holding the lock. See lock.Locker.
func (l object) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return engine.Do(ctx, l.l.Object(), l, fn, opts...)
}

// UnlockOwner ends the latest hold that the owner of ctx (see lock.WithOwner) has in this process,
// and releases the lock if it was the only one. It blocks like Hold.Unlock. The error matches
// lock.ErrInvalid if ctx has no owner, and lock.ErrNotHeld if the owner has no hold in this
// process. Other errors are the errors of Hold.Unlock. A lost hold counts as held until
// Unlock or UnlockOwner has returned its loss.
func (l object) UnlockOwner(ctx context.Context) error { return l.l.UnlockOwner(ctx) }

// ForceUnlock opens the lock, regardless of its holder, and wakes the waiters. It reports
// whether the lock was held. Holds of this client are lost at once. Any other hold is lost at
// its next renewal, after at most a third of its lease, or, if its lease is fixed, at the end
// of the lease. Until then its context does not end. ForceUnlock blocks for one round trip. It
// returns an error and has no effect if the key is not a lock.
func (l base) ForceUnlock(ctx context.Context) (bool, error) {
	return l.l.Force(ctx, func() (bool, error) {
		return forceUnlockScript.Exec(ctx, l.s.Client, []string{l.l.Key()},
			[]string{l.p.publish(), wire.LockChannel(l.l.Key()), wire.PayloadUnlocked}).AsBool()
	})
}

// IsLocked reports whether the lock is held. It blocks for one round trip.
func (l object) IsLocked(ctx context.Context) (bool, error) {
	ttl, err := l.l.TTL(ctx)
	return ttl != 0, err
}

// TTL returns the time after which the lock becomes free if it is neither renewed nor
// released: 0 if it is free now, lock.NoExpiry if never. It blocks for one round trip.
func (l object) TTL(ctx context.Context) (time.Duration, error) { return l.l.TTL(ctx) }

// HoldCount returns the number of holds of owner: those in this process or, if there are none,
// the number on the server, which is above 1 for Java threads only. It blocks for one round trip
// unless owner has a hold in this process.
func (l base) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	return l.l.HashCount(ctx, owner, owner.String())
}
