// Package grouplock implements Redisson's lock of several values of a group, as RedissonClient.getMultiLock(group,
// values) returns it: one acquisition locks all of the values or none.
//
//	hold, err := client.GroupLock("seats of flight 17", "12A", "12B").Lock(ctx)
//
// Locks of the same group exclude each other if they have a value in common. All values are locked by one request, so no
// order of values leads to a deadlock, and a waiter holds none of them. The group is one key on the server, a hash. In a
// cluster one primary serves the whole group.
//
// # Values
//
// A value is a sequence of bytes. A client of Redisson makes them with the codec of its configuration, and both sides
// have to agree, because other bytes are another value, which excludes nobody:
//
//   - StringCodec: a string of Java is the same string in Go, and a number is its decimal digits, as [Longs] returns them.
//   - LongCodec: as for StringCodec.
//   - Kryo5Codec, the default: a string is what [Kryo5] returns. Objects of other classes are not supported.
//
// Redisson 3.52 and 4.7 have the same bytes; 3.38 introduced this lock. For another codec, or class, pass the bytes that
// its encoder makes.
//
// # Waiting
//
// Waiters of a process for the same values are served first come, first served, like the waiters of package rlock.
// There is no order among waiters for different values: one that wants many values can starve beside others that want
// some of them.
//
// An owner named with lock.WithOwner re-enters a lock of the same values. If it holds some of the values of a lock and
// wants that lock, it waits for itself, so bound such a wait with lock.Wait, or lock all values at once.
//
// # Time
//
// Each value has a lease of its own, whose end is stored as a time. redlatch uses the server's clock, and Redisson that
// of each client. A Java client whose clock is ahead takes values of others too early, and one whose clock is behind
// loses its own too early, if the difference is more than what is left of a lease: 20 s at least of those that are
// renewed every 10 s.
package grouplock

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/lock"
)

// maxValues bounds how long a script occupies the server.
const maxValues = 1000

type member = engine.Member

// Lock is the lock of some values of a group. Client.GroupLock returns it.
type Lock struct {
	member
	l engine.Lock
	p protocol
}

// New returns the lock of these values of the group of that name. Client.GroupLock calls it.
func New(e *engine.Engine, name string, values ...string) *Lock {
	fields := make([]string, len(values))
	for i, v := range values {
		fields[i] = fieldOf(v)
	}
	slices.Sort(fields)
	fields = slices.Compact(fields)

	var err error
	if len(fields) == 0 || len(fields) > maxValues {
		err = fmt.Errorf("%w: %d values: must be from 1 to %d", lock.ErrInvalid, len(fields), maxValues)
	}
	l := &Lock{p: protocol{e.Session, fields}}
	l.l = engine.NewLock(e, &l.p, name, err)
	l.member = l.l.Member()
	return l
}

// Name returns the name of the group, which was passed to the client.
func (l *Lock) Name() string { return l.l.Name() }

// Lock acquires all values. It blocks until it has them, ctx ends, or lock.Wait runs out. See lock.Locker for its errors.
func (l *Lock) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return l.l.Lock(ctx, opts...)
}

// TryLock makes one attempt, which blocks for one round trip. The error matches lock.ErrNotAcquired if one of the values
// is locked elsewhere. See lock.Locker for other errors.
func (l *Lock) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return l.l.TryLock(ctx, opts...)
}

// Adopt returns a hold on a lock of these values that lock.Detach has left held under that id, in this process or another
// one. The hold has another owner than the detached one. Exactly one of several callers succeeds. For the others, and
// after the lease of the detached hold, the error matches lock.ErrNotHeld. For a malformed id it matches lock.ErrInvalid.
// ctx and the options have the same meaning as for TryLock. Adopt blocks for one round trip. If the error matches
// lock.ErrIndeterminate, the lock can soon be adopted under the same id again, for the lease that this call requested,
// unless that is over.
func (l *Lock) Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (lock.Hold, error) {
	return l.l.Adopt(ctx, id, opts...)
}

// Do runs fn while holding the lock. See lock.Locker.
func (l *Lock) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return engine.Do(ctx, l.l.Object(), l, fn, opts...)
}

// UnlockOwner ends the latest hold that the owner of ctx (see lock.WithOwner) has on a lock of the same values in this
// process, and releases the values if it was the only one. It blocks like Hold.Unlock. The error matches
// lock.ErrInvalid if ctx has no owner, and lock.ErrNotHeld if the owner has no such hold in this process. Other errors
// are the errors of Hold.Unlock. A lost hold counts as held until Unlock or UnlockOwner has returned its loss.
func (l *Lock) UnlockOwner(ctx context.Context) error { return l.l.UnlockOwner(ctx) }

// ForceUnlock frees all of the values, regardless of their holders, and wakes the waiters. It reports whether one of
// them was locked. A hold that loses one of its values is lost as a whole: holds of this client on the same values at
// once, and any other at its next renewal, after at most a third of its lease, or, if its lease is fixed, at the end of
// the lease. Until then its context does not end. Its other values stay locked until it is unlocked, or their leases
// end. ForceUnlock blocks for one round trip. It returns an error and has no effect if the key is no group.
func (l *Lock) ForceUnlock(ctx context.Context) (bool, error) {
	return l.l.Force(ctx, func() (bool, error) { return l.p.force(ctx, l.l.Key()) })
}

// IsLocked reports whether one of the values is locked. It blocks for one round trip.
func (l *Lock) IsLocked(ctx context.Context) (bool, error) {
	left, err := l.TTL(ctx)
	return left != 0, err
}

// TTL returns the time after which all of the values are free if they are neither renewed nor released, 0 if they are
// free now. It blocks for one round trip.
func (l *Lock) TTL(ctx context.Context) (time.Duration, error) {
	if err := l.l.Refuses(ctx, "read"); err != nil {
		return 0, err
	}
	began := time.Now()
	left, _, err := l.p.status(ctx, l.l.Key(), "")
	return left, l.l.Object().ReadFailed(ctx, "read", began, err)
}

// HoldCount returns the number of holds of owner on a lock of the same values: those in this process or, if there are
// none, how often it has locked all of the values on the server, which is above 1 for Java threads only. It blocks for
// one round trip unless owner has a hold in this process.
func (l *Lock) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	return l.l.HoldCount(ctx, owner, func() (int64, error) {
		_, count, err := l.p.status(ctx, l.l.Key(), owner.String())
		return count, err
	})
}
