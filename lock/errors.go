package lock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/text"
)

// Causes of an [Error], for all locks. They are matched with errors.Is. The package documentation has
// a table of them.
var (
	// ErrNotAcquired means that others hold the lock, and the wait is over or the call does
	// not wait. It is also the error of a wait that was too short for the server's answer.
	ErrNotAcquired = errors.New("redlatch: lock not acquired")

	// ErrUnavailable means that the server could not be asked, or did not answer a
	// question: nothing has changed there.
	ErrUnavailable = errors.New("redlatch: server unavailable")

	// ErrNotHeld means that the caller does not hold the lock: the hold was already
	// unlocked, or the owner has none.
	ErrNotHeld = errors.New("redlatch: lock not held")

	// ErrLost means that a hold ended before its Unlock. The error is a *LostError with
	// the reason.
	ErrLost = errors.New("redlatch: lock lost")

	// ErrReentered means that the owner already holds the lock, which is not reentrant.
	ErrReentered = errors.New("redlatch: lock is held by this owner and not reentrant")

	// ErrUpgrade means that a reader requested the write lock, which would wait for
	// itself.
	ErrUpgrade = errors.New("redlatch: a read lock cannot be upgraded to the write lock")

	// ErrIndeterminate means that a request was sent, or continues to be sent in the
	// background, and its outcome is unknown. If it may have taken a lock, the client
	// releases that lock in the background, at the latest when its lease ends. Effects on
	// objects other than locks are not undone.
	ErrIndeterminate = errors.New("redlatch: outcome unknown")

	// ErrClosed means that the client is closed, or shuts down and acquires nothing more.
	ErrClosed = errors.New("redlatch: client closed")

	// ErrUnsupported means that the server, or the kind of object, does not support the operation.
	ErrUnsupported = errors.New("redlatch: not supported")

	// ErrInvalid means that a name, an option or another argument is invalid. Nothing
	// was sent to the server.
	ErrInvalid = errors.New("redlatch: invalid argument")
)

// sentinels are the errors with which the text of an Error begins.
var sentinels = []error{
	ErrNotAcquired, ErrUnavailable, ErrNotHeld, ErrLost, ErrReentered, ErrUpgrade, ErrIndeterminate, ErrClosed, ErrUnsupported,
	ErrInvalid,
}

// Error is the error of a call that has failed, of every object and of the client. Only the error of a
// function that the call has run is returned as it is. errors.As finds an Error, also in a [DoError], and
// the fields tell which of several locks has failed. Match the cause with errors.Is.
type Error struct {
	// Op is what failed:
	//
	//	acquire, extend, detach, adopt, release                  of locks and permits
	//	force unlock                                             of locks
	//	set permits, add permits, drain, change lease            of semaphores
	//	set count, count down, wait                              of latches
	//	set rate                                                 of rate limiters
	//	run, campaign, observe                                   of elections
	//	run, mark done, forget                                   of once-only work
	//	raise tokens, reset tokens, check token                  of fencing tokens
	//	read                                                     each question, such as IsLocked and Stats
	//	delete                                                   of semaphores, latches and rate limiters
	//	connect, ping, probe, shut down                          of the client
	//	configure                                                of the adapters in contrib
	//	parse                                                    of the text of an Owner
	//
	// Do fails with acquire or release. A call that does several things fails with the one that has failed:
	// Once.Run also with acquire, read and mark done, for example.
	Op string

	// Kind is the kind of the object, as in logs and telemetry: lock, fenced, spin, plain, fair, read, write,
	// multi, red, semaphore, permit-semaphore, rate-limiter, latch, election, once, client, adapter, guard or owner. It is
	// "" if the function Do of this package gets no function to run: it does not know its Locker.
	Kind string

	// Name is the name that was passed to the client, or the names of the members of a group. Of an adapter
	// it is the package, and of the client the addresses of the servers if a connection fails, and otherwise
	// "".
	Name string

	// Waited is how long the call took, 0 if its arguments or the state of the object ruled it out.
	Waited time.Duration

	// Err is the cause, never nil: an error of this package, or one that matches such an error, or a
	// refusal of the server. It also matches context.Cause(ctx) if the context of the call has ended.
	Err error
}

// Error returns one line: the error of this package that Err matches, Op and Name, Waited, and what else
// Err says. The text of a loss names the lock and its owner instead.
func (e *Error) Error() string {
	cause := strings.ReplaceAll(e.Err.Error(), "\n", "; ")
	if _, lost := e.Err.(*LostError); lost {
		return cause
	}

	head := "redlatch"
	for _, sentinel := range sentinels {
		if rest, ok := strings.CutPrefix(cause, sentinel.Error()); ok {
			head = sentinel.Error()
			cause = rest
			break
		}
	}

	call := e.Op
	if e.Name != "" {
		call += fmt.Sprintf(" %q", text.Cut(e.Name))
	}
	if e.Waited > 0 {
		call += fmt.Sprintf(" (waited %v)", e.Waited.Round(time.Millisecond))
	}

	cause = strings.TrimPrefix(strings.TrimPrefix(cause, ": "), "redlatch: ")
	if cause == "" {
		return head + ": " + call
	}
	return head + ": " + call + ": " + cause
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// DoError is the error of Do if Unlock has returned one. If it matches ErrLost, another owner may have
// had the lock during the work.
type DoError struct {
	Func   error // of the function, nil if it has succeeded
	Unlock error
}

// Error returns the texts of both errors, or only the text of Func if it contains the text of Unlock: a
// function that fails because the lock was lost may return the cause of its context.
func (e *DoError) Error() string {
	unlock := e.Unlock.Error()
	if e.Func == nil {
		return unlock
	}

	work := e.Func.Error()
	if strings.Contains(work, unlock) {
		return work
	}

	return work + "; " + unlock
}

// Unwrap returns the errors that are not nil.
func (e *DoError) Unwrap() []error {
	if e.Func == nil {
		return []error{e.Unlock}
	}
	return []error{e.Func, e.Unlock}
}

// Reason is the reason for the loss of a hold.
type Reason string

// Reasons of a LostError.
const (
	// ReasonExpired: the lease ran out by the local clock. It was not to be renewed, or
	// no renewal was confirmed in time.
	ReasonExpired Reason = "lease expired"

	// ReasonGone: the server reports that the owner does not hold the lock. It expired
	// there, was deleted or forced open, or the server lost its data.
	ReasonGone Reason = "gone from the server"

	// ReasonMaxHold: the bound set with MaxHold was reached.
	ReasonMaxHold Reason = "held longer than MaxHold"

	// ReasonClosed: the client was closed while the lock was held. The error also
	// matches ErrClosed.
	ReasonClosed Reason = "client closed"
)

// LostError describes the loss of a hold before its Unlock. It is the cause of the
// hold's context and matches ErrLost.
type LostError struct {
	Name   string
	Owner  Owner  // of a lock; zero for a group of locks
	Permit string // the permit's id, for a semaphore
	Reason Reason
	// When is the time at which the loss was noticed.
	When time.Time
	// Err is the error that prevented the renewal, if known.
	Err error
}

// Error returns a description of the loss.
func (e *LostError) Error() string {
	s := fmt.Sprintf("%v: %q", ErrLost, text.Cut(e.Name))
	if e.Permit != "" {
		s += " (permit " + e.Permit + ")"
	} else if !e.Owner.IsZero() {
		s += " (owner " + e.Owner.String() + ")"
	}
	s += ": " + string(e.Reason)
	if e.Err != nil {
		s += ": " + text.Safe(strings.ReplaceAll(e.Err.Error(), "\n", "; "))
	}
	return s
}

// Is reports whether target is ErrLost, or ErrClosed if that is the reason.
func (e *LostError) Is(target error) bool {
	return target == ErrLost || target == ErrClosed && e.Reason == ReasonClosed
}

// Unwrap returns Err, unless that matches the end of a context or another error of this
// package: a timeout of a renewal is not the caller's, and a loss is nothing else.
func (e *LostError) Unwrap() error {
	for _, other := range []error{
		context.DeadlineExceeded, context.Canceled, os.ErrDeadlineExceeded, ErrNotAcquired, ErrUnavailable, ErrIndeterminate,
	} {
		if errors.Is(e.Err, other) {
			return nil
		}
	}
	return e.Err
}
