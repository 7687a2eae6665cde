// Package lock defines the contract of all locks: how a lock is taken, what holding it
// means, how a hold can end, and which errors report it.
//
// A lock is a lease on a key of a Redis or Valkey server. While the lease runs by the
// hold's own monotonic clock, no other client holds the lock, as long as the server
// keeps its data. When the lease is lost, the hold reports it: its context ends with a
// [*LostError]. A lease is not a proof of exclusion. A process can be paused between
// checking the clock and acting on it, and a failover can forget an acknowledged lock.
// Work that must stay correct then needs a fencing token that the resource checks (see
// package rlock). While a machine is suspended its monotonic clock stands still, so a hold
// cannot tell afterwards that its lease is over until the server answers a renewal.
//
// # Cohorts
//
// Waiters of one process pass a lock on without releasing it. The holds that have it one
// after another are a cohort: they share a key on the server. When one is unlocked, its
// Unlock asks the server whether the lock stood, and a hold begins without a request of its
// own if the last such answer is at most 20 ms old. If the key was removed in between (by
// ForceUnlock, by hand, or by a failover), the holds that began within those 20 ms did not
// have the lock. Each of them reports the loss: its context ends, or its Unlock returns
// ErrLost.
//
// # Nested locks
//
// Each acquisition has an owner of its own, so a caller that holds a lock and acquires it
// again waits for itself, as with a sync.Mutex. A second read lock of a read-write lock waits
// only if a writer waits in between. [WithOwner] enables re-entry. Lock logs a warning, once
// for each pair of call sites, if its context comes from a hold on the same lock: unless
// another goroutine unlocks that hold, the call waits for itself.
//
// # Errors
//
// The errors of all objects, for errors.Is:
//
//	error             meaning                                            HTTP  what to do
//	ErrNotAcquired    others hold the lock until the wait is over         409  try again later
//	ErrUnavailable    the server could not be asked; nothing has changed  503  try again later
//	ErrIndeterminate  a request was sent, and its outcome is unknown      503  from Lock: try again later;
//	                                                                           from Unlock: the lease ends;
//	                                                                           of numbers: see the package
//	ErrLost           the hold ended before its Unlock                    500  check the work done under it
//	ErrClosed         the client is closed                                503  the process is shutting down
//	ErrNotHeld, ErrReentered, ErrUpgrade, ErrInvalid, ErrUnsupported      500  correct the program
//	another error     the server has refused, in its own words            500  correct rights, keys, memory
//
// Each is the cause of an [*Error], which says which call of which object has failed. Do returns the error of
// its function unchanged, or a [DoError] if Unlock returned one.
//
// An error matches at most one of the first three. It also matches context.Cause(ctx) if ctx has
// ended, and never context.Canceled or context.DeadlineExceeded because of a timeout of the client
// itself. READONLY, LOADING, BUSY, CLUSTERDOWN, MASTERDOWN, TRYAGAIN, NOAUTH, WRONGPASS and similar replies
// are ErrUnavailable: the request had no effect, and another one may. NOPERM, WRONGTYPE, OOM, MISCONF and
// NOREPLICAS are returned as a *rueidis.RedisError: an operator has to act.
//
// A message is one line, with the cause, the object's name and the time that the call took. That of a
// group of locks names the lock that others hold, or counts the servers by answer:
//
//	redlatch: lock not acquired: acquire "a,b" (waited 300ms): "b" is held by others
//	redlatch: outcome unknown: acquire "orders" (waited 1s): 3 of 5 servers: 1 held by others, 2 silent (...)
package lock

import (
	"context"
	"time"
)

// Locker is a lock of any kind; each side of a read-write lock is one. A Locker is an
// immutable value: it can be shared, copied and created again at will. Its methods are
// safe for concurrent use. The state of one acquisition is in its [Hold].
//
// Every method that takes a context returns when that ends, even if the server does not
// answer, and leaves the rest to the background. Only Unlock and the releases of
// semaphores try for up to 5 s more.
type Locker interface {
	// Name returns the name that was passed to the client.
	Name() string

	// Lock acquires the lock. It blocks until it has the lock, ctx ends, or Wait runs
	// out. It waits for a server that cannot be reached as it waits for the lock, unless FailFast is given.
	//
	// After a failure nothing stays on the server. The error matches ErrNotAcquired if
	// the wait ended while others held the lock, before the server's answer (the request is
	// undone then), or because the lease was over before the answer came: the process was
	// paused, or the lease is shorter than a round trip;
	// ErrUnavailable if the server could not be asked when the wait ended; ErrIndeterminate if the reply to a
	// request was lost, which is then undone in the background; ErrClosed if the client was
	// closed; ErrInvalid for an invalid name or option. If ctx ended the wait, it also
	// matches context.Cause(ctx). Other errors are refusals of the server.
	//
	// ctx bounds the wait and is also the parent of the hold's context. To bound only
	// the wait, use Wait or Parent.
	Lock(ctx context.Context, opts ...Option) (Hold, error)

	// TryLock makes one attempt and does not wait. If the lock is held elsewhere, the
	// error matches ErrNotAcquired; other errors are the errors of Lock.
	TryLock(ctx context.Context, opts ...HoldOption) (Hold, error)

	// Do acquires the lock like Lock, runs fn under the hold's context, and releases
	// the lock when fn returns, panics (the panic continues) or calls runtime.Goexit.
	// It returns the error of Lock, or the error of fn, unchanged. If Unlock returns an error, which
	// matches ErrLost if the lock was lost while fn ran, Do returns a *DoError with both.
	//
	// An error of the lock is an *Error, which errors.As finds, and so is the error of a lock that fn uses:
	// Name and Kind tell which one has failed. In a *DoError, Func is the error of fn and of the locks
	// inside, and Unlock the error of this lock. If this lock is lost while fn waits for another one, the error
	// of that wait matches ErrLost too, because the context of fn has ended.
	Do(ctx context.Context, fn func(ctx context.Context) error, opts ...Option) error
}

// Hold is one acquisition of a lock. Release it with one call of Unlock. A renewed hold that
// becomes unreachable without Unlock is no longer renewed. It lasts until its lease ends, because work may go on under it;
// so does one with a fixed [Lease]. The client logs the first, at most once a second,
// with the number of such holds that it has not logged. The hold of an owner named
// by [WithOwner] stays renewed if the lock has a method UnlockOwner: such an owner need not keep the hold. The methods of a Hold are safe for concurrent use, from any goroutine.
type Hold interface {
	// Name returns the name of the lock.
	Name() string

	// Context returns a child of the context passed to Lock, or to Parent. It ends when
	// the hold ends, and context.Cause reports why: a *LostError if the lock was lost,
	// context.Canceled after Unlock (before the release is sent, so the context has
	// ended by the time another client has the lock), or the parent's cause. The end of
	// the parent does not release the lock; only Unlock does. Context never blocks and
	// always returns the same context.
	//
	// The context does not keep the hold alive: keep the Hold itself while you need the
	// lock.
	Context() context.Context

	// Remaining returns the time for which ownership is certain by the local monotonic
	// clock, 0 once the hold has ended. A lease counts from the time its last confirmed
	// request was sent, not from the reply.
	Remaining() time.Duration

	// Token returns the fencing token of the lock, which never changes and is at least 1, or
	// 0 if the kind of lock has none. The holds of one owner share it.
	Token() int64

	// Extend extends the hold to at least lease from now; it never shortens it. It
	// blocks for one round trip. The error matches ErrLost if the lock is no longer
	// held, ErrNotHeld after Unlock, and ErrInvalid if lease is less than a
	// millisecond. After another error, such as ErrUnavailable or ErrIndeterminate, the
	// hold is as certain as before.
	Extend(ctx context.Context, lease time.Duration) error

	// Unlock ends the hold and releases the lock, unless AtLeast keeps it. It tries even if ctx is
	// done, and blocks until the server has answered, for 5 s at most.
	//
	// It returns ErrNotHeld if this hold was already unlocked. The error matches
	// ErrLost (a *LostError) if the lock was lost before, and ErrIndeterminate if that
	// is unknown: the server never answered, or a reply was lost and the lock is gone
	// now. If the server rejects all writes for a second, because it is not the primary (the error
	// then matches ErrUnavailable), lacks replicas, or cannot store anything, Unlock returns what it
	// says. If the server never answered or rejects all writes, the release is retried in the
	// background until the lease ends, unless the next waiter of this process has the lock by then.
	Unlock(ctx context.Context) error
}

// Detach ends a hold but leaves its lock held, for lease from now, and returns an id with
// which the lock's Adopt, in any process, returns a new hold on it. So work under the lock can
// go on in another process, or after a restart. Detach tries even if ctx is done, and blocks
// until the server has answered, for 5 s at most.
//
// The error matches ErrInvalid if lease is less than a millisecond or the owner has other holds
// on the lock, and ErrUnsupported if the lock has no Adopt, such as a lock of several; the hold goes on then. Other errors are
// the errors of Unlock. If the outcome is unknown, which ErrIndeterminate and ErrClosed report, or the
// server rejects all writes, Detach returns the id too, and goes on in the background until the lease that the hold had is
// over. If Adopt does not find the lock, it becomes free when that lease ends, or, if the first request arrives
// before that after all, when lease is over.
func Detach(ctx context.Context, h Hold, lease time.Duration) (id string, err error) {
	if h, ok := h.(interface {
		Detach(ctx context.Context, lease time.Duration) (string, error)
	}); ok {
		return h.Detach(ctx, lease)
	}
	if h == nil {
		return "", &Error{Op: "detach", Err: invalid("the hold is nil")}
	}
	return "", &Error{Op: "detach", Name: h.Name(), Err: ErrUnsupported}
}

// NoExpiry is returned by TTL methods for a lock that never expires. Neither redlatch
// nor Redisson creates such a lock.
const NoExpiry time.Duration = -1

// Do runs fn while holding l. It implements [Locker.Do] for implementations of Locker.
// If fn is nil, the error matches ErrInvalid and the lock is not acquired.
func Do(ctx context.Context, l Locker, fn func(ctx context.Context) error, opts ...Option) (err error) {
	if fn == nil {
		return &Error{Op: "acquire", Name: l.Name(), Err: invalid("the function is nil")}
	}

	h, err := l.Lock(ctx, opts...)
	if err != nil {
		return err
	}

	// Deferred instead of recovered: a panic or Goexit in fn continues with its own
	// stack after the release.
	defer func() {
		if unlockErr := h.Unlock(ctx); unlockErr != nil {
			err = &DoError{Func: err, Unlock: unlockErr}
		}
	}()
	return fn(h.Context())
}
