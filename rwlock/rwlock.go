// Package rwlock is the read-write lock of Redisson: many readers or one writer,
// on the server as Java services see it.
//
//	rw := client.RWLock("catalogue")
//	err := rw.Read().Do(ctx, func(ctx context.Context) error { ... })
//	err = rw.Write().Do(ctx, func(ctx context.Context) error { ... })
//
// Both locks are a lock.Locker. By default every acquisition is an owner of its
// own. One that was named (lock.WithOwner) can hold the read lock several times,
// the write lock several times, and the read lock besides the write lock: it
// writes, takes the read lock, gives the write lock back and goes on reading, with
// no writer in between (downgrade). The other way round it would wait for itself,
// and gets lock.ErrUpgrade at once.
//
// # Who is next
//
// In a process readers and writers stand in one queue, first come, first served:
// readers that follow one another go in together, and a waiting writer keeps out
// the readers that come after it.
//
// Between processes of redlatch, a writer that waits while readers hold the lock
// puts up a sign on the server, and new readers stay out until it had its turn or
// gave up: a stream of readers does not starve it. It gets in at the latest when
// the last of those who held the lock at that time has released it, unless another
// writer was quicker; for two seconds more if the message of that release was lost.
// The sign of a writer that died goes within five seconds. Among several writers
// of different processes, and between a writer and readers that wait for the same
// release of a writer, it is as with rlock: processes take turns, by chance at the
// first attempt.
//
// Java clients do not know the sign. Their readers go in whenever the lock is in
// read mode and can starve a writer, in Java or here, and their writers can be
// starved by readers of either side.
package rwlock

import (
	"context"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// RWLock is a read-write lock. It is made by Client.RWLock.
type RWLock struct {
	read, write base
}

// New returns the read-write lock of that name. It is called by the client.
func New(s *session.Session, name string) *RWLock {
	r, w := newReadProtocol(s), newWriteProtocol(s)
	return &RWLock{
		read:  newBase(locking.New(s, r, name), &r.protocol),
		write: newBase(locking.New(s, w, name), &w.protocol),
	}
}

// Name returns the name the lock was asked for with.
func (rw *RWLock) Name() string { return rw.read.Name() }

// Read returns the read lock, which many can hold at once while nobody writes.
func (rw *RWLock) Read() *ReadLock { return &ReadLock{rw.read} }

// Write returns the write lock, which one can hold while nobody else holds either.
func (rw *RWLock) Write() *WriteLock { return &WriteLock{rw.write} }

// ReadLock is the side of an RWLock for those who read.
type ReadLock struct{ base }

// WriteLock is the side of an RWLock for those who write. For an owner who holds
// the read lock and not the write lock, Lock and TryLock return an error that
// matches lock.ErrUpgrade: it would wait for itself.
type WriteLock struct{ base }

type member = locking.Member

// base is what both sides have in common.
type base struct {
	member
	l *locking.Lock
	p *protocol
}

func newBase(l *locking.Lock, p *protocol) base { return base{l.Member(), l, p} }

// Name returns the name the lock was asked for with.
func (b base) Name() string { return b.l.Name() }

// Lock takes this side of the lock, waiting until that is possible, ctx ends, or
// lock.Wait runs out. See lock.Locker for its errors.
func (b base) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return b.l.Lock(ctx, opts...)
}

// TryLock makes one attempt, which blocks for one round trip, and returns an
// error that matches lock.ErrNotAcquired if others are in the way: of a reader,
// somebody who writes or waits to write; of a writer, anybody. See lock.Locker for
// other errors.
func (b base) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return b.l.TryLock(ctx, opts...)
}

// Do runs fn while it holds this side of the lock. See lock.Locker.
func (b base) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, b, fn, opts...)
}

// Unlock gives back one hold that the owner whom ctx names (see lock.WithOwner)
// has on this side, wherever it was taken: by this client, where the latest such
// hold ends, or anywhere else, where its holder hears of it at its next renewal.
// It blocks until the server has answered. It returns an error that matches
// lock.ErrInvalid if ctx names no owner, lock.ErrNotHeld if that owner has no such
// hold, and otherwise those of Hold.Unlock.
func (b base) Unlock(ctx context.Context) error { return b.l.UnlockOwner(ctx) }

// ForceUnlock opens the lock if this side of it is held, whoever holds it, and
// tells the waiters. It reports whether it was: that of the read lock leaves a lock
// alone that somebody writes under, that of the write lock one that is only read
// under. A writer's own read holds go with the write lock. Holds that this client
// had on this side end at once, as lost; any other hears of it at its next renewal,
// a third of its lease later at most, or, if its lease is fixed, when that is over.
// It blocks for one round trip; a key that is no lock is left alone and is an error.
func (b base) ForceUnlock(ctx context.Context) (bool, error) {
	return b.l.Force(ctx, func() (bool, error) { return b.p.force(ctx, b.l.Key()) })
}

// IsLocked reports whether anybody holds this side of the lock. It blocks for one
// round trip.
func (b base) IsLocked(ctx context.Context) (bool, error) {
	if err := b.l.Check(ctx); err != nil {
		return false, err
	}
	locked, err := b.p.isLocked(ctx, b.l.Key())
	if err != nil {
		return false, fmt.Errorf("redlatch: look at %q: %w", b.Name(), err)
	}
	return locked, nil
}

// TTL returns after what time the lock, whichever side of it is held, will be
// free if nobody renews or releases it: 0 if it is free now, lock.NoExpiry if
// never. It blocks for one round trip.
func (b base) TTL(ctx context.Context) (time.Duration, error) { return b.l.TTL(ctx) }

// HoldCount returns how often owner holds this side of the lock, 0 if it does
// not. It blocks for one round trip.
func (b base) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	if b.p.kind == kindWrite {
		return b.l.Count(ctx, owner, wire.WriteOwner(owner))
	}
	return b.l.HoldCount(ctx, owner)
}

// IsHeldBy reports whether owner holds this side of the lock. It blocks for one
// round trip.
func (b base) IsHeldBy(ctx context.Context, owner lock.Owner) (bool, error) {
	n, err := b.HoldCount(ctx, owner)
	return n > 0, err
}
