package engine

import (
	"context"
	"errors"
	"iter"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Key identifies a queue: Kind is the Queue of a Kind, and Name is the key on the server.
type Key struct{ Kind, Name string }

// Waiting is how callers wait for a kind of lock or semaphore.
type Waiting struct {
	// Shareable is set if an attempt can succeed while this process holds the key.
	Shareable bool
	// Shared is set if others may acquire beside it.
	Shared bool
	// Counting is set if a requester is no holder of the key once it has acquired: it takes a part of
	// something, and others may have parts of it too.
	Counting bool
	// Group is set if one attempt can be made for several waiters. NewLock sets it for a lock.
	Group bool
	// Ordered is set if the server keeps the queue: each waiter has to make an attempt when it comes, and
	// has a channel of its own.
	Ordered bool
	// Backoff returns the pause after the n-th attempt, counted from 1, where there is no channel or where
	// some release without a message. It may be user code.
	Backoff func(n int) time.Duration
	// LeftOpen is the payload of a release after which waiters that receive it pause, so that others,
	// which poll and release without a message, can acquire; "" if there are none.
	LeftOpen string
}

// Request describes an acquisition.
type Request struct {
	Waiting
	Ctx      context.Context // its end ends the wait; set by Acquire
	Key      Key
	Acquirer Acquirer
	// Deadline ends the wait; zero for none.
	Deadline time.Time
	// MaxWaiters is the most callers that may wait before this one; 0 means no bound.
	MaxWaiters int
	// FailFast has the error of an attempt without an answer end the wait.
	FailFast bool
	// Site is the call site of the caller.
	Site callsite.Site
	// Once makes a single attempt, at once, even if others wait.
	Once bool
	// Owned is set if the requester has an owner that may hold the key already, and would wait for
	// itself.
	Owned bool
	// Span is told, on the waiter's goroutine, why each further attempt is made, or that the key was passed
	// on to it. It may be nil.
	Span *telemetry.Acquire
}

// SetWait has the request wait as the options of a call that began then say.
func (r *Request) SetWait(o *lock.Options, began time.Time) {
	r.MaxWaiters = o.MaxWaiters
	r.FailFast = o.FailFast
	if o.Bounded && !r.Once {
		r.Deadline = began.Add(o.Wait)
	}
}

// ends reports whether an attempt that has failed with err ends the wait. One that a cluster could not serve
// because it moves the key says nothing about the server.
func (r *Request) ends(err error) bool {
	if !errors.As(err, new(*Unavailable)) {
		return true
	}
	return r.FailFast && !wire.IsMoving(err)
}

// pause returns the pause after the n-th attempt.
func (r *Request) pause(n int) time.Duration {
	if r.Backoff == nil {
		return 0
	}
	return max(r.Backoff(n), 0)
}

// Acquirer makes attempts. Those for one key are of one type.
type Acquirer interface {
	// Try makes one attempt. An *Unavailable error does not end the wait; any other error does. A failed
	// attempt leaves nothing on the server, or arranges for its removal.
	Try(ctx context.Context) (Answer, error)
	// TryAll makes one attempt for all, including itself, and returns an answer for each. ctx belongs to
	// none of them. It is called for requests with Group.
	TryAll(ctx context.Context, all []Acquirer) []Answer
	// Join returns the relation to a holder. The mutex of the queue is locked. It is called for requests
	// with Owned.
	Join(holder Acquirer) (Relation, error)
	// Channel returns the channel of releases, "" if there is none. It is called after an attempt, and
	// with the mutex of the queue locked.
	Channel() string
	// Describe returns the kind, the name and the owner of what a waiter waits for.
	Describe() session.Hold
	// Holds yields what callers have of a holder, or a zero value if that is not acquired yet, or being
	// released. The mutex of the queue is locked.
	Holds() iter.Seq[session.Hold]
	// Abandon releases, in the background, what an attempt for several may have acquired for it after its
	// wait was over. It blocks for one request if the client is closing.
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

// Relation is the relation of an Acquirer to a holder.
type Relation uint8

const (
	Conflict  Relation = iota // it waits for the end of the hold
	Reentrant                 // same owner: it shares what the holder has
	SameOwner                 // same owner: it makes an attempt although others wait
)

// Unavailable wraps the error of an attempt that failed for a transient reason, such as a lost
// connection.
type Unavailable struct{ Err error }

func (u *Unavailable) Error() string { return u.Err.Error() }

func (u *Unavailable) Unwrap() error { return u.Err }
