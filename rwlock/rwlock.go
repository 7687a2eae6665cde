// Package rwlock implements Redisson's read-write lock: many readers or one writer, in the
// wire format that Java services use.
//
//	rw := client.RWLock("catalogue")
//	err := rw.Read().Do(ctx, func(ctx context.Context) error { ... })
//	err = rw.Write().Do(ctx, func(ctx context.Context) error { ... })
//
// Both sides implement lock.Locker. By default every acquisition has an owner of its own. An
// owner named with lock.WithOwner can hold the read lock several times, the write lock
// several times, and the read lock in addition to the write lock. It can downgrade: while it
// holds the write lock it acquires the read lock, releases the write lock and goes on
// reading, and no other writer enters in between. The opposite is impossible, because the
// owner would wait for itself: it gets lock.ErrUpgrade at once.
//
// # Order
//
// Readers and writers of a process wait in one queue, first come, first served. Consecutive
// readers enter together, and a waiting writer blocks the readers behind it. Only a writer
// passes the lock on without a release, and only to a writer.
//
// Across processes of redlatch, a writer that waits for readers registers on the server.
// It blocks new readers until it has had the lock or gives up, so a stream of readers cannot
// starve it. It enters when the last reader that held the lock at that time releases it,
// unless another writer is faster. If the message of that release is lost, it enters up to two
// seconds later. The registration of a writer that dies ends within five seconds. Writers of
// several processes, and a writer and readers that wait for the release of another writer,
// compete at random. A process that has passed the lock on between its writers
// for a turn leaves it to others (see redlatch.WithTurn).
//
// A goroutine that holds the read lock must not acquire it again without an owner. If a writer
// waits in between, the second acquisition waits for the writer, and the writer waits for the
// first acquisition, as with a [sync.RWMutex]. Where reads nest, use lock.WithOwner for both. Lock
// logs a warning when its context comes from a hold on the same lock.
//
// The lock has at most 10,000 owners at a time, and 65,535 holds, like ReentrantReadWriteLock in Java. Another reader
// gets an error, and so does every call that would have to look at more: no script occupies the server for long.
//
// Java clients ignore the registration. Their readers enter whenever the lock is in read mode
// and can starve any writer. Readers of either side can starve a Java writer.
package rwlock

import (
	"context"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// RWLock is a read-write lock. Client.RWLock returns one.
type RWLock struct {
	read, write base
}

// New returns the read-write lock of that name. Client.RWLock calls it.
func New(e *engine.Engine, name string) *RWLock {
	r, w := newProtocols(e.Session)
	return &RWLock{
		read:  newBase(engine.NewLock(e, r, name, nil), &r.protocol),
		write: newBase(engine.NewLock(e, w, name, nil), &w.protocol),
	}
}

// Name returns the name passed to Client.RWLock.
func (rw *RWLock) Name() string { return rw.read.Name() }

// Read returns the read lock, which many owners can hold at once while there is no writer.
func (rw *RWLock) Read() *ReadLock { return &ReadLock{rw.read} }

// Write returns the write lock, which one owner can hold while no other holds either side.
func (rw *RWLock) Write() *WriteLock { return &WriteLock{rw.write} }

// ReadLock is the read side of an RWLock.
type ReadLock struct{ base }

// WriteLock is the write side of an RWLock. For an owner that holds the read lock but not the
// write lock, Lock and TryLock return an error that matches lock.ErrUpgrade: the owner would
// wait for itself.
type WriteLock struct{ base }

type member = engine.Member

// base is the common part of both sides.
type base struct {
	member
	l *engine.Lock
	p *protocol
}

func newBase(l engine.Lock, p *protocol) base { return base{l.Member(), &l, p} }

// Name returns the name passed to Client.RWLock.
func (b base) Name() string { return b.l.Name() }

// Lock acquires this side of the lock. It blocks until it has the lock, ctx ends, or lock.Wait
// runs out. See lock.Locker for its errors.
func (b base) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return b.l.Lock(ctx, opts...)
}

// TryLock makes one attempt, which blocks for one round trip. The error matches
// lock.ErrNotAcquired if another owner is in the way: for a reader one that writes or waits to
// write, for a writer any. See lock.Locker for other errors.
func (b base) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return b.l.TryLock(ctx, opts...)
}

// Adopt returns a hold on a lock that lock.Detach has left held under that id, in this process or
// another one. The hold has the fencing token of the detached one, if any, but another owner.
// Exactly one of several callers succeeds. For the others, and after the lease of the detached hold,
// the error matches lock.ErrNotHeld. For a malformed id it matches lock.ErrInvalid. ctx and the
// options have the same meaning as for TryLock. Adopt blocks for one round trip. If the error matches
// lock.ErrIndeterminate, the lock can soon be adopted under the same id again, for the lease that
// this call requested, unless that is over.
func (b base) Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (lock.Hold, error) {
	return b.l.Adopt(ctx, id, opts...)
}

// Do runs fn while holding this side of the lock. See lock.Locker.
func (b base) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return engine.Do(ctx, b.l.Object(), b, fn, opts...)
}

// UnlockOwner ends the latest hold that the owner named by ctx (see lock.WithOwner) has on this side
// in this process. It blocks like Hold.Unlock. The error matches lock.ErrInvalid if ctx names no
// owner, and lock.ErrNotHeld if that owner has no such hold here. Other errors are the errors of
// Hold.Unlock. A lost hold counts as held until Unlock or UnlockOwner has returned its loss.
func (b base) UnlockOwner(ctx context.Context) error { return b.l.UnlockOwner(ctx) }

// ForceUnlock opens the lock if this side of it is held, by any owner, and wakes the waiters.
// It reports whether this side was held. On the read lock it has no effect while a writer holds
// the lock, and on the write lock while only readers do. The writer's own read holds end with
// the write lock. This client's holds on this side are lost at once. Any other hold is lost at
// its next renewal, after at most a third of its lease, or, if its lease is fixed, at the end
// of the lease. ForceUnlock blocks for one round trip. It returns an error and has no effect if
// the key is not a lock.
func (b base) ForceUnlock(ctx context.Context) (bool, error) {
	return b.l.Force(ctx, func() (bool, error) { return b.p.force(ctx, b.l.Key()) })
}

// IsLocked reports whether this side of the lock is held. It blocks for one round trip.
func (b base) IsLocked(ctx context.Context) (bool, error) {
	if err := b.l.Refuses(ctx, "read"); err != nil {
		return false, err
	}
	began := time.Now()
	locked, err := b.p.isLocked(ctx, b.l.Key())
	return locked && err == nil, b.l.Object().ReadFailed(ctx, "read", began, err)
}

// TTL returns the time after which both sides of the lock are free if it is neither renewed nor
// released: 0 if it is free now, lock.NoExpiry if never. It blocks for one round trip.
func (b base) TTL(ctx context.Context) (time.Duration, error) { return b.l.TTL(ctx) }

// HoldCount returns the number of holds that owner has on this side of the lock: those in this
// process or, if there are none, the number on the server. It blocks for one round trip unless
// owner has a hold in this process.
func (b base) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	if b.p.kind == kindWrite {
		return b.l.HashCount(ctx, owner, wire.WriteOwner(owner))
	}
	return b.l.HashCount(ctx, owner, owner.String())
}
