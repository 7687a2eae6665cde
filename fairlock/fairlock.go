// Package fairlock implements Redisson's fair lock: the waiters of all processes acquire it
// in the order of their arrival. Java services on the same server share the queue.
//
// The server keeps the queue. A waiter enters it with its first attempt and keeps its
// position for as long as it waits, because its client sends heartbeats. If the process of
// a waiter dies or hangs, the waiter counts as dead 10 s after its last heartbeat (or a
// third of the watchdog timeout, or the fair wait timeout, if that is less). Once the lock
// is free, the next heartbeat of a waiter behind it, at most a third of that time later,
// drops it from the head of the queue. A waiter that gives up leaves the queue before Lock
// returns if the server answers soon. A process that was paused for too long may have lost
// its queue positions; its waiters enter the queue again, at the end. An outage of the
// server does not change the order: afterwards no waiter is dropped until all have had time
// to send a heartbeat.
//
// Within a process the lock passes on without a release while the waiters of that process are
// next in the server's queue and want the same lease.
//
// Java waiters send no heartbeats. They keep their position until a deadline that Redisson
// computes when they arrive: fairLockWaitTimeout, by default five minutes, for each position.
// A Java waiter that died delays the waiters behind it for that long, and for another
// fairLockWaitTimeout for each waiter of this package that left the queue before it. A dead
// waiter of this package causes the same delay while only Java clients use the lock, because
// they do not read heartbeats. Far from the head it has the deadline of the end of the queue.
// Both sides need the same fairLockWaitTimeout (redlatch.WithFairWaitTimeout here).
//
// TryLock never enters the queue, and fails while the queue has waiters.
//
// The queue has room for 65,535 waiters of all processes. While it is longer every method but IsLocked, TTL and
// HoldCount returns an error, so that no script occupies the server for long.
package fairlock

import (
	"context"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

type member = engine.Member

// Lock is a fair lock. Client.FairLock returns it.
type Lock struct {
	member
	l *engine.Lock
	p *protocol
}

// New returns the fair lock of that name. Client.FairLock calls it.
func New(e *engine.Engine, name string, opts ...Option) *Lock {
	p := &protocol{e: e, s: e.Session, kind: "fair"}
	return p.lock(name, session.Configure(p, opts))
}

// NewCandidacy returns the fair lock for which the candidates of an election wait. Each of its holds
// has an owner of its own. Package election calls it.
func NewCandidacy(e *engine.Engine, name string) lock.Locker {
	p := &protocol{e: e, s: e.Session, kind: "election", candidacy: true, nonReentrant: true}
	return p.lock(name, nil)
}

// lock returns the lock of that name. A bad name, or else err, is an error of every operation.
func (p *protocol) lock(name string, err error) *Lock {
	l := engine.NewLock(p.e, p, name, err)
	p.prepare(l.Key())
	return &Lock{l.Member(), &l, p}
}

// Name returns the name that was passed to the client.
func (l *Lock) Name() string { return l.l.Name() }

// Lock acquires the lock, after all waiters that arrived before. It blocks until it has the
// lock, ctx ends, or lock.Wait runs out. See lock.Locker for its errors. With NonReentrant it
// fails at once with lock.ErrReentered if the owner already holds the lock.
func (l *Lock) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return l.l.Lock(ctx, opts...)
}

// TryLock makes one attempt, which blocks for one round trip. The error matches
// lock.ErrNotAcquired if the lock is held or has waiters. See lock.Locker for other errors.
func (l *Lock) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return l.l.TryLock(ctx, opts...)
}

// Adopt returns a hold on a lock that lock.Detach has left held under that id, in this process or
// another one. The hold has the fencing token of the detached one, if any, but another owner.
// Exactly one of several callers succeeds. For the others, and after the lease of the detached hold,
// the error matches lock.ErrNotHeld. For a malformed id it matches lock.ErrInvalid. ctx and the
// options have the same meaning as for TryLock. Adopt blocks for one round trip. If the error matches
// lock.ErrIndeterminate, the lock can soon be adopted under the same id again, for the lease that
// this call requested, unless that is over.
func (l *Lock) Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (lock.Hold, error) {
	return l.l.Adopt(ctx, id, opts...)
}

// Do runs fn while it holds the lock. See lock.Locker.
func (l *Lock) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return engine.Do(ctx, l.l.Object(), l, fn, opts...)
}

// UnlockOwner ends the latest hold that the owner of ctx (see lock.WithOwner) has in this process,
// and releases the lock if it was the only one. It blocks like Hold.Unlock. The error matches
// lock.ErrInvalid if ctx names no owner, and lock.ErrNotHeld if that owner has no hold in this
// process. Other errors are the errors of Hold.Unlock. A lost hold counts as held until
// Unlock or UnlockOwner has returned its loss.
func (l *Lock) UnlockOwner(ctx context.Context) error { return l.l.UnlockOwner(ctx) }

// ForceUnlock opens the lock, regardless of its holder, and wakes the first waiter. It reports
// whether the lock was held. Holds of this client are lost at once. Any other hold is lost at
// its next renewal, after at most a third of its lease, or, if its lease is fixed, at the end
// of the lease. Until then its context does not end. ForceUnlock blocks for one round trip. It
// returns an error and has no effect if the key is not a lock.
func (l *Lock) ForceUnlock(ctx context.Context) (bool, error) {
	return l.l.Force(ctx, func() (bool, error) { return l.p.Force(ctx) })
}

// IsLocked reports whether the lock is held by any client. It blocks for one round trip.
func (l *Lock) IsLocked(ctx context.Context) (bool, error) {
	ttl, err := l.l.TTL(ctx)
	return ttl != 0, err
}

// TTL returns the time after which the lock becomes free if it is neither renewed nor
// released: 0 if it is free now, lock.NoExpiry if never. It blocks for one round trip.
func (l *Lock) TTL(ctx context.Context) (time.Duration, error) { return l.l.TTL(ctx) }

// HoldCount returns the number of holds of owner: those in this process or, if there are none,
// the number on the server, which is above 1 for Java threads only. It blocks for one round
// trip unless owner has a hold in this process.
func (l *Lock) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	return l.l.HashCount(ctx, owner, owner.String())
}

// Queue returns the waiters in the order in which they will acquire the lock, the first 10,000 of them. It is a
// snapshot, blocks for one round trip and changes nothing. A waiter that has just acquired
// the lock from another one of its process may still be listed, until its Unlock at most.
func (l *Lock) Queue(ctx context.Context) ([]Waiter, error) {
	if err := l.l.Refuses(ctx, "read"); err != nil {
		return nil, err
	}

	began := time.Now()
	waiters, err := l.p.Queue(ctx)
	if err != nil {
		return nil, l.l.Object().ReadFailed(ctx, "read", began, err)
	}

	return waiters, nil
}
