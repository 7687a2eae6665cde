package acquire

import (
	"context"
	"iter"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
)

// Key identifies a queue. Objects of different kinds do not share one.
type Key struct{ Kind, Name string }

// Policy is what the loop has to know of a kind of lock or semaphore.
type Policy struct {
	// TryWhileHeld is set if an attempt can succeed while this process holds the key.
	TryWhileHeld bool
	// Shared is set if others may acquire beside it.
	Shared bool
	// Untracked is set if a requester is no holder of the key once it has acquired: it takes
	// a part of something, and others may have parts of it too.
	Untracked bool
	// Group is set if one attempt can be made for several waiters.
	Group bool
	// Ordered is set if the server keeps the queue: each waiter has to make an attempt when
	// it comes, and has a channel of its own.
	Ordered bool
	// Backoff returns the pause after the n-th attempt, counted from 1, where there is no
	// channel or where some release without a message. It may be user code.
	Backoff func(n int) time.Duration
	// LeftOpen is the payload of a release after which waiters that receive it pause, so
	// that others, which poll and release without a message, can acquire; "" if there are
	// none.
	LeftOpen string
}

// Request describes an acquisition.
type Request struct {
	Policy
	Ctx      context.Context // its end ends the wait
	Key      Key
	Acquirer Acquirer
	// Deadline ends the wait; zero for none.
	Deadline time.Time
	// MaxWaiters is the most callers that may wait before this one; 0 means no bound.
	MaxWaiters int
	// Site is the call site of the caller.
	Site callsite.Site
	// Once makes a single attempt, at once, even if others wait.
	Once bool
	// Owned is set if the requester has an owner that may hold the key already, and would
	// wait for itself.
	Owned bool
	// OnWake is called on the waiter's goroutine before each further attempt, and when the
	// key was passed on to it. It may be nil.
	OnWake func(telemetry.Cause)
}

// Acquirer makes attempts. Those for one key are of one type.
type Acquirer interface {
	// Try makes one attempt. An *Unavailable error does not end the wait; any other error
	// does. A failed attempt leaves nothing on the server, or arranges for its removal.
	Try(ctx context.Context) (Verdict, error)
	// TryAll makes one attempt for all, including itself, and returns a result for each.
	// ctx belongs to none of them. It is called for requests with Group.
	TryAll(ctx context.Context, all []Acquirer) []Result
	// Join returns the relation to a holder. The mutex of the queue is held. It is called
	// for requests with Owned.
	Join(holder Acquirer) (Relation, error)
	// Channel returns the channel of releases, "" if there is none. It is called after an attempt,
	// and with the mutex of the queue held.
	Channel() string
	// Describe returns the kind, the name and the owner of what a waiter waits for.
	Describe() session.Hold
	// Holds yields what callers have of a holder, or a zero value if that is not acquired yet, or
	// being released. The mutex of the queue is held.
	Holds() iter.Seq[session.Hold]
	// Abandon gives back, in the background, what another caller may have acquired for it,
	// because its wait is over. It blocks for one request if the client is closing.
	Abandon()
}

// As returns acquirers of one type.
func As[A Acquirer](all []Acquirer) []A {
	of := make([]A, len(all))
	for i, a := range all {
		of[i] = a.(A)
	}
	return of
}

// Verdict is the server's answer to an attempt.
type Verdict struct {
	Acquired bool
	// FreeIn is the time after which another attempt may succeed, negative if only a
	// message can tell. It is meaningless if Acquired is set.
	FreeIn time.Duration
	// Moved is set if the server's queue has the waiter behind all others of this
	// process. It is for Ordered requests.
	Moved bool

	unsent bool          // the wait was over before
	poll   time.Duration // pause before the next attempt where some release without a message; 0: none
}

// Result is the outcome of an attempt for one of several.
type Result struct {
	Verdict
	Err error
}

// Relation is the relation of an Acquirer to a holder.
type Relation uint8

const (
	Unrelated Relation = iota
	Joined             // same owner: it shares what the holder has
	Beside             // same owner: it makes an attempt although others wait
)

// Unavailable wraps the error of an attempt that failed for a transient reason, such as a
// lost connection.
type Unavailable struct{ Err error }

func (u *Unavailable) Error() string { return u.Err.Error() }

func (u *Unavailable) Unwrap() error { return u.Err }
