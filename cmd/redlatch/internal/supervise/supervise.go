// Package supervise runs a command for as long as a lease lasts.
package supervise

import (
	"context"
	"errors"
	"syscall"
	"time"
)

// Lease is what the command depends on, such as a lock.Hold.
type Lease interface {
	// Context ends with the lease, and its cause says why.
	Context() context.Context
	// Remaining returns the time for which the lease is certain.
	Remaining() time.Duration
}

var (
	// ErrExpires is the cause of a Result if the lease was about to end.
	ErrExpires = errors.New("the lease was about to end")
	// ErrLate is the error of Run if the lease was over before.
	ErrLate = errors.New("too late to start the command")
)

// Bounds are the times of a command.
type Bounds struct {
	// Grace is the time between SIGTERM and SIGKILL.
	Grace time.Duration
	// End is when the command must have ended, whatever its lease. Zero is never.
	End time.Time
	// Over is the Lost of a Result because of End.
	Over error
}

// Result says how a command ended.
type Result struct {
	State syscall.WaitStatus
	// Lost is the reason for which the command was ended, or nil.
	Lost error
	// Left is whether processes of the command go on although it was to be ended, because this process may not
	// signal them. State is then zero if the command itself goes on.
	Left bool
}
