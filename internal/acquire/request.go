package acquire

import (
	"context"
	"time"
)

// Key identifies a queue. Objects of different kinds do not share one.
type Key struct{ Kind, Name string }

// Request describes an acquisition.
type Request struct {
	Key      Key
	Acquirer Acquirer
	// Channel is the channel of releases; "" if there is none.
	Channel string
	// Backoff returns the pause after the n-th attempt, counted from 1, where there is no
	// Channel or where some release without a message. It may be user code.
	Backoff func(n int) time.Duration
	// LeftOpen is the payload of a release after which waiters that receive it pause, so
	// that pollers can acquire; "" if there are no pollers.
	LeftOpen string
	// Deadline ends the wait; zero for none.
	Deadline time.Time
	// Once makes a single attempt, at once, even if others wait.
	Once bool
	// Owned is set if the requester has an owner that may hold the key already, and would
	// wait for itself. Its Acquirer is a Joiner.
	Owned bool
	// NoHandOff is set if the key must not be passed on to it within the process.
	NoHandOff bool
	// TryWhileHeld is set if an attempt can succeed while this process holds the key.
	TryWhileHeld bool
	// Shared is set if others may acquire beside it.
	Shared bool
	// Untracked is set if it is no holder of the key once it has acquired: it takes a part
	// of something, and others may have parts of it too.
	Untracked bool
	// Group is set if one attempt can be made for it and others. Its Acquirer is Grouped.
	Group bool
	// Ordered is set if the server keeps the queue. Its Channel is its own.
	Ordered bool
	// OnWake is called on the waiter's goroutine before each further attempt, and when the
	// key was passed on to it. It may be nil.
	OnWake func(Cause)
}

// Acquirer makes attempts.
type Acquirer interface {
	// Try makes one attempt. An *Unavailable error does not end the wait; any other error
	// does. A failed attempt leaves nothing on the server, or arranges for its removal.
	Try(ctx context.Context) (Verdict, error)
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

	poll time.Duration // pause before the next attempt where some release without a message
}

// Grouped is an Acquirer that can make one attempt for several. Requests with Group set
// have one.
type Grouped interface {
	Acquirer
	// TryAll makes one attempt for all, including itself, and returns a result for each.
	// ctx belongs to none of them.
	TryAll(ctx context.Context, all []Acquirer) []Result
	// Abandon gives back, in the background, what an attempt by another may have acquired
	// for it, because its wait is over. It blocks for one request if the client is closing.
	Abandon()
}

// Result is the outcome of an attempt for one of several.
type Result struct {
	Verdict
	Err error
}

// Joiner is an Acquirer of an owner that may hold the key already. Requests with Owned set
// have one.
type Joiner interface {
	Acquirer
	// Join returns the relation of the acquirer to a holder. The mutex of the queue is
	// held.
	Join(holder Acquirer) (Relation, error)
}

// Relation is the relation of a Joiner to a holder.
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

// Cause is the reason for an attempt.
type Cause uint8

// The causes of an attempt after the first.
const (
	Subscribed Cause = iota + 1 // the subscription is confirmed; earlier messages may have been missed
	Message                     // a message of a release
	Local                       // a release in this process, or the previous head left
	Timer                       // an expiry reported by the server, or the safety poll
	HandedOver                  // no attempt: the key was passed on within the process
)

// String returns the cause as it appears in traces.
func (c Cause) String() string {
	return [...]string{"", "subscribed", "message", "local", "timer", "hand-off"}[c]
}
