// Package lock is the contract that every lock of redlatch keeps: how it is
// taken, what holding it means, how a hold can end, and which errors say so.
//
// A lock here is a lease on a key of a Redis or Valkey server. While a hold's
// own monotonic clock says that the lease runs, no other client holds the
// lock, as long as the server keeps its data. Past that point the hold says so
// itself: its context ends with a [*LostError]. A lease is not a proof of
// exclusion. A process can be paused between looking at the clock and acting
// on it, and a failover can forget a lock that was acknowledged. Work that must
// stay correct then needs a fencing token that the resource checks (see
// package rlock).
package lock

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Locker takes a lock by name. Every kind of lock in redlatch is one; of a
// read-write lock, each side is. A Locker is an immutable value: it can be shared,
// copied and made anew at will, and all its methods may be called concurrently.
// What belongs to one acquisition lives in the [Hold].
type Locker interface {
	// Name returns the name the lock was asked for with.
	Name() string

	// Lock takes the lock, waiting until it is free. It blocks until it has
	// the lock, ctx ends, or [Wait] runs out.
	//
	// On failure nothing stays behind on the server. The error matches
	// ErrNotAcquired when the wait ended first, joined with context.Cause(ctx)
	// if ctx ended it, or when the process was stopped for so long that the
	// lease was over before the call could return; ErrIndeterminate when a
	// request was sent and its outcome never came back; ErrClosed when the client
	// was closed; ErrInvalid for a bad name or option. Other errors come from the
	// connection or the server.
	//
	// ctx bounds the wait and is also the parent of the hold's context. To
	// bound the wait alone, use [Wait].
	Lock(ctx context.Context, opts ...Option) (Hold, error)

	// TryLock makes one attempt and does not wait. If somebody else holds the
	// lock, the error matches ErrNotAcquired; otherwise errors are those of
	// Lock. Wait is not a valid option here.
	TryLock(ctx context.Context, opts ...Option) (Hold, error)

	// Do takes the lock as Lock does, runs fn under the hold's context, and
	// releases the lock whatever fn does: return, panic (which goes on
	// afterwards) or runtime.Goexit. It returns fn's error joined with the
	// error of the release; the latter matches ErrLost when the lock was lost
	// while fn ran.
	Do(ctx context.Context, fn func(ctx context.Context) error, opts ...Option) error
}

// Hold is one acquisition of a lock. It must be given back with Unlock, once.
// A hold that becomes unreachable without Unlock is logged, no longer renewed,
// and released. All methods may be called concurrently, from any goroutine.
type Hold interface {
	// Name returns the name of the lock.
	Name() string

	// Owner returns the owner the lock is held by on the server. Asked for only after
	// Unlock it may be one that never held anything.
	Owner() Owner

	// Context returns a child of the context given to Lock that ends when the
	// hold ends. context.Cause says why: a *LostError when the lock was lost,
	// context.Canceled when Unlock was called (before the release is sent: by the
	// time somebody else has the lock, the context has ended), the parent's cause
	// when the parent ended. The end of the parent does not release the lock:
	// Unlock does. It never blocks and returns the same context at every call.
	//
	// The context does not keep the hold alive: keep the Hold itself for as
	// long as the lock is needed.
	Context() context.Context

	// Remaining returns for how long ownership is still certain, by the
	// local monotonic clock; 0 once the hold has ended. The lease counts from
	// when the last confirmed request was sent, not from its reply.
	Remaining() time.Duration

	// Token returns the fencing token of this acquisition, fixed for its whole
	// life and at least 1, or 0 where the kind of lock issues none.
	Token() int64

	// Extend makes the hold last at least lease from now; it never shortens
	// it. It blocks for one round trip. It returns an error that matches
	// ErrLost if the lock is no longer held, ErrNotHeld after Unlock,
	// ErrInvalid if lease is under a millisecond, or the error of the
	// connection, in which case the hold is as certain as before.
	Extend(ctx context.Context, lease time.Duration) error

	// Unlock ends the hold and releases the lock. It always tries, also when
	// ctx has ended already, and blocks until the server has answered. While it
	// does not, Unlock begins tries for 5 s, and each may take as long as the
	// connection allows (3 s where the client made it). If others of this process
	// had the lock just before, or wait for it, that may be three times as long: they
	// share their requests, one after the other.
	//
	// It returns ErrNotHeld if this hold was unlocked before, an error that
	// matches ErrLost (a *LostError) if the lock was lost before, and one that
	// matches ErrIndeterminate if the server never answered; the release is
	// then tried further in the background, and the lease bounds it, unless the next
	// waiter of this process has the lock by then.
	Unlock(ctx context.Context) error
}

// NoExpiry is what TTL of the kinds of lock returns for one that never expires.
// No client of redlatch or Redisson leaves one like that.
const NoExpiry time.Duration = -1

// Do runs fn while holding l: it is what [Locker.Do] promises, for those who
// implement a Locker. A nil fn is an error that matches ErrInvalid, and the
// lock is not taken.
func Do(ctx context.Context, l Locker, fn func(ctx context.Context) error, opts ...Option) (err error) {
	if fn == nil {
		return fmt.Errorf("%w: Do %q: the function is nil", ErrInvalid, l.Name())
	}
	h, err := l.Lock(ctx, opts...)
	if err != nil {
		return err
	}
	// Deferred, not recovered: a panic or Goexit in fn passes through with its
	// own stack once the lock is free.
	defer func() { err = errors.Join(err, h.Unlock(ctx)) }()
	return fn(h.Context())
}
