// Package driver makes locks of package lock on a store other than Redis: etcd, ZooKeeper, a database. A module for a
// store implements [Driver], which makes the requests, and hands out the objects of a [Client], which do everything
// that is the same on each store: options, waits, contexts and losses of holds, re-entry, errors, shutdown and
// telemetry. Package locktest checks the result.
package driver

import (
	"context"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Driver makes the requests of a store. Its methods are safe for concurrent use.
type Driver interface {
	// Store names the store in errors, logs and telemetry, for example "etcd".
	Store() string
	// CheckName returns an error that matches lock.ErrInvalid for a name that the store cannot have.
	CheckName(name string) error
	// Acquire requests a claim and blocks until the store grants it or ctx ends. With r.Try it does not wait for
	// others. Waiters are served in the order in which they came, as far as the store can do that.
	//
	// The error matches lock.ErrNotAcquired if others have the name, or had it when ctx ended; lock.ErrUnavailable if
	// the store could not be asked; lock.ErrIndeterminate if a request was sent and its outcome is unknown; or it is
	// what the store says if it refuses. It may include the error of the library of the store, but matches
	// context.Canceled and context.DeadlineExceeded only if ctx has ended. Without r.FailFast, Acquire waits for a
	// store that cannot be reached. After an error nothing stays on the store: what is left is removed in the
	// background.
	Acquire(ctx context.Context, r Request) (Claim, error)
	// Close ends the work in the background, after a last attempt to remove what is left on the store. Claims end
	// with it. It blocks for a few seconds at most.
	Close()
}

// Request describes a claim.
type Request struct {
	Name string
	// Owner identifies the claim among all claims of all clients. The store shows it to operators.
	Owner lock.Owner
	// Shared claims exclude only claims that are not shared.
	Shared bool
	// Permits is how many claims can be granted at once, for a semaphore; 0 for a lock. A semaphore has nothing to do with
	// the lock of that name.
	Permits int
	// Lease is after what time the claim ends, 0 if it is kept until Release. The client calls Release at the end of the
	// lease, so a store that cannot end a claim by itself may ignore it.
	Lease time.Duration
	// Try is set if the call does not wait for others.
	Try bool
	// FailFast is set if the call does not wait for a store that cannot be reached. It is set if Try is.
	FailFast bool
	// Lost is called once, from any goroutine, when the claim ends before its Release is called: with the reason, and
	// the error that shows it, or nil. It may be called before Acquire has returned the claim. It does not block. Release
	// is not called then: the driver removes what is left on the store afterwards, because others may have the lock then.
	Lost func(reason lock.Reason, err error)
}

// Claim is what a store has granted.
type Claim interface {
	// Token returns the fencing token, which is larger than those of all earlier claims of that name that exclude
	// this one, and at least 1; or 0 if the store has none.
	Token() int64
	// Until returns the time until which the claim is certain, by the monotonic clock of this process. It moves on
	// while the claim is kept. When that time is over the client ends the holds, and calls Release unless Lost was called.
	Until() time.Time
	// Extend has the claim last for at least lease from now. The error matches lock.ErrLost if the store does not
	// have the claim, and lock.ErrUnsupported if the store cannot do it. Other errors are the errors of Acquire. After
	// lock.ErrLost the client calls Release, unless Lost was called, for what the driver still knows of the claim.
	Extend(ctx context.Context, lease time.Duration) error
	// Release ends the claim on the store. It tries until ctx ends; then the error matches lock.ErrIndeterminate, and
	// the background goes on until the claim ends by itself. The error matches lock.ErrLost if the store did not have
	// the claim any more.
	Release(ctx context.Context) error
}
