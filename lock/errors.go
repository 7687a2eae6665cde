package lock

import (
	"errors"
	"fmt"
	"time"
)

// The errors of every lock. They are matched with errors.Is and come joined
// with their cause.
var (
	// ErrNotAcquired says that somebody else has the lock and the caller did
	// not want to wait (longer).
	ErrNotAcquired = errors.New("redlatch: lock not acquired")

	// ErrNotHeld says that the caller does not hold the lock: the hold was
	// unlocked before, or the owner has none.
	ErrNotHeld = errors.New("redlatch: lock not held")

	// ErrLost says that a hold ended before its Unlock. The error is a
	// *LostError that says how.
	ErrLost = errors.New("redlatch: lock lost")

	// ErrReentered says that the owner holds the lock already and the lock
	// does not allow re-entry.
	ErrReentered = errors.New("redlatch: lock is held by this owner and not reentrant")

	// ErrUpgrade says that a reader asked for the write lock, which would wait
	// for itself.
	ErrUpgrade = errors.New("redlatch: a read lock cannot be upgraded to the write lock")

	// ErrIndeterminate says that a request was sent and its outcome is not
	// known. A lock that it may have taken is being given back in the
	// background, and its lease bounds how long that can take. What it may have
	// done to something that is no lock stays.
	ErrIndeterminate = errors.New("redlatch: outcome unknown")

	// ErrClosed says that the client was closed.
	ErrClosed = errors.New("redlatch: client closed")

	// ErrUnsupported says that the server cannot do what was asked.
	ErrUnsupported = errors.New("redlatch: not supported by the server")

	// ErrInvalid says that a name, an option or another argument is wrong.
	// Nothing was sent to the server.
	ErrInvalid = errors.New("redlatch: invalid argument")
)

// Reason says how a hold was lost.
type Reason string

// The reasons of a LostError.
const (
	// ReasonExpired: the lease ran out by the local clock, because it was
	// fixed, or because no renewal was confirmed in time.
	ReasonExpired Reason = "lease expired"

	// ReasonGone: the server says that the owner does not hold the lock. It
	// expired there, was deleted or forced open, or the server lost its data.
	ReasonGone Reason = "gone from the server"

	// ReasonMaxHold: the bound given with MaxHold was reached.
	ReasonMaxHold Reason = "held longer than MaxHold"

	// ReasonClosed: the client was closed while the lock was held. The error
	// matches ErrClosed too.
	ReasonClosed Reason = "client closed"
)

// LostError is how a hold ended before its Unlock. It is the cause of the
// hold's context and matches ErrLost.
type LostError struct {
	Name   string
	Owner  Owner  // of a lock; zero where each of several locks has its own
	Permit string // of a semaphore: its id
	Reason Reason
	// When is when the loss was noticed.
	When time.Time
	// Err is what kept the lease from being renewed, if that is known.
	Err error
}

// Error describes the loss.
func (e *LostError) Error() string {
	s := fmt.Sprintf("%v: %q", ErrLost, e.Name)
	switch {
	case e.Permit != "":
		s += " (permit " + e.Permit + ")"
	case !e.Owner.IsZero():
		s += " (owner " + e.Owner.String() + ")"
	}
	s += ": " + string(e.Reason)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Is reports whether target is ErrLost, or ErrClosed if that is the reason.
func (e *LostError) Is(target error) bool {
	return target == ErrLost || target == ErrClosed && e.Reason == ReasonClosed
}

// Unwrap returns what kept the lease from being renewed, or nil.
func (e *LostError) Unwrap() error { return e.Err }
