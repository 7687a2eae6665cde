package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/redlatch/redlatch/lock"
)

// The exit statuses of redlatch itself. timeout(1) and env(1) use the same for the same.
const (
	statusLeft        = 122
	statusLost        = 123
	statusNotAcquired = 124
	statusFailed      = 125
	statusNotRunnable = 126
	statusNotFound    = 127
	statusSignal      = 128 // plus the number of the signal
)

const statusHelp = `Exit status:
  that of COMMAND, if it ran to its end
  122      the same as 123, but the command, or a part of it, goes on: redlatch may not signal it
  123      the lock was lost, so the command was ended
  124      the lock was not acquired: another process holds it, and the wait is over
  125      redlatch failed, for example because the server is unreachable
  126      COMMAND cannot be run
  127      COMMAND was not found
  128 + n  signal n ended COMMAND, or redlatch while it waited`

// exit is an error with an exit status. Its error may be nil, if there is nothing to print.
type exit struct {
	status int
	err    error
}

func (e exit) Error() string { return fmt.Sprint(e.err) }
func (e exit) Unwrap() error { return e.err }

// errInterrupted is the error of an exit because of SIGINT.
var errInterrupted = errors.New("interrupted")

// exitBy returns the error of an exit because of a signal.
func exitBy(sig os.Signal) error {
	e := exit{status: statusSignal + int(sig.(syscall.Signal))}
	if sig == syscall.SIGINT {
		e.err = errInterrupted
	}
	return e
}

// statusOf prints an error of the program, and returns the exit status.
func statusOf(root *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	e := exit{statusFailed, err}
	if !errors.As(err, &e) && errors.Is(err, lock.ErrNotAcquired) {
		e.status = statusNotAcquired
	}
	if e.err == errInterrupted {
		if os.Getpid() != 1 { // which no signal ends
			interrupt()
		}
	} else if e.err != nil {
		fmt.Fprintln(os.Stderr, root.Name()+":", message(e.err))
	}
	return e.status
}

// message returns the text of an error without the prefixes of the errors that it wraps, and without
// characters of names that a terminal interprets.
func message(err error) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, strings.ReplaceAll(err.Error(), "redlatch: ", ""))
}

// exitOf returns the error of a command that has ended, or nil.
func exitOf(state syscall.WaitStatus) error {
	switch {
	case state.Signaled():
		return exitBy(state.Signal())
	case state.ExitStatus() != 0:
		return exit{status: state.ExitStatus()}
	}
	return nil
}

// notStarted returns the error of a command that cannot be started.
func notStarted(err error) error {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		return exit{statusNotFound, err}
	}
	return exit{statusNotRunnable, err}
}
