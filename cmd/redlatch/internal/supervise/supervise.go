// Package supervise runs a command for as long as a lease lasts.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
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

// margin is what is left of a lease when the command is killed: time for this process to run, and for the
// kernel to kill.
func margin(grace time.Duration) time.Duration { return max(grace/5, 50*time.Millisecond) }

// Result says how a command ended.
type Result struct {
	State syscall.WaitStatus
	// Lost is the reason for which the command was ended, or nil.
	Lost error
}

// Run runs cmd in a process group of its own, and returns when it has ended. Signals that arrive are
// forwarded to the group. When the lease is lost, or less than grace of it is left, the group gets
// SIGTERM, and SIGKILL after grace or just before the end of the lease, whichever is earlier.
//
// If the command stops, as after Ctrl-Z, the job of this process stops with the command, because a
// stopped process does not renew the lease. The command goes on after the job if the lease is not over.
// The terminal is for whichever of the two needs it, and with this process in the end.
//
// On Linux the command is killed if this process dies. For that, the calling goroutine must be
// locked to a thread that lives as long as the process (runtime.LockOSThread in an init function).
//
// Run returns an error if the command cannot be started, which matches ErrLate if the lease was over.
// cmd must read and write files only.
func Run(cmd *exec.Cmd, lease Lease, grace time.Duration, signals <-chan os.Signal) (Result, error) {
	s := &supervisor{lease: lease, grace: max(grace, margin(grace)), jobs: make(chan os.Signal, 4), terminal: openTerminal()}
	defer s.terminal.close()
	s.notify()
	defer signal.Stop(s.jobs)
	if cause := s.over(); cause != nil { // for example after a stop
		return Result{}, fmt.Errorf("%w: %w", ErrLate, cause)
	}
	cmd.SysProcAttr = attributes(s.terminal)
	if err := cmd.Start(); err != nil {
		s.terminal.started(0) // the terminal may be with a process that never was; the shell takes it back
		return Result{}, err
	}
	defer cmd.Process.Release() //nolint:errcheck // it was waited for
	s.group = cmd.Process.Pid
	s.terminal.started(s.group)
	return s.run(signals)
}

// supervisor runs one command.
type supervisor struct {
	group    int // the process id of the command too
	lease    Lease
	grace    time.Duration
	jobs     chan os.Signal // the signals that notify lists
	terminal *terminal

	lost  error     // why the command is being ended, or nil
	end   time.Time // of the lease, as last seen
	check *time.Timer
}

// notify has the signals of job control sent to s.jobs. With a terminal, SIGCONT ends a suspend.
func (s *supervisor) notify() {
	all := []syscall.Signal{syscall.SIGTSTP, syscall.SIGWINCH, syscall.SIGCONT}
	if s.terminal != nil {
		all = all[:2]
	}
	for _, sig := range all {
		if !isIgnored(sig) {
			signal.Notify(s.jobs, sig)
		}
	}
}

func (s *supervisor) run(signals <-chan os.Signal) (Result, error) {
	changes := make(chan change)
	go func() {
		for stopped := true; stopped; {
			c := wait(s.group)
			changes <- c
			stopped = c.stopped()
		}
	}()
	s.check = time.NewTimer(0)
	defer s.check.Stop()
	over := s.lease.Context().Done()
	for {
		select {
		case c := <-changes:
			if c.stopped() {
				s.suspend(c.state.StopSignal())
				continue
			}
			if s.lost != nil {
				s.signal(syscall.SIGKILL) // what is left of the group
			}
			return Result{c.state, s.lost}, c.err
		case sig := <-signals:
			s.signal(sig.(syscall.Signal))
		case sig := <-s.jobs:
			if sig == syscall.SIGCONT {
				s.resume()
			} else {
				s.signal(sig.(syscall.Signal))
			}
		case <-over:
			over = nil
			s.look()
		case <-s.check.C:
			s.look()
		}
	}
}

// over returns the reason why the lease is over or about to end, or nil.
func (s *supervisor) over() error {
	left := s.lease.Remaining()
	if left > 0 {
		s.end = time.Now().Add(left)
	}
	if cause := context.Cause(s.lease.Context()); cause != nil {
		return cause
	}
	if left <= s.grace {
		return ErrExpires
	}
	return nil
}

// look ends the command if the lease is lost or about to end, and kills it when its time is over.
func (s *supervisor) look() {
	if s.lost != nil {
		s.signal(syscall.SIGKILL)
		return
	}
	if s.lost = s.over(); s.lost == nil {
		s.check.Reset(time.Until(s.end) - s.grace)
		return
	}
	patience := min(s.grace, time.Until(s.end)-margin(s.grace))
	if patience > 0 {
		s.signal(syscall.SIGTERM)
		s.signal(syscall.SIGCONT) // a stopped process would not get the other
	}
	s.check.Reset(max(patience, 0))
}

// suspend is called when the command was stopped by a signal.
func (s *supervisor) suspend(by syscall.Signal) {
	switch t := s.terminal; {
	case t == nil, s.lost != nil:
		return
	case (by == syscall.SIGTTIN || by == syscall.SIGTTOU) && t.isForeground(t.own):
		t.give(s.group)
	default:
		s.signal(syscall.SIGSTOP) // what is not stopped: nothing of it may go on without renewals
		t.suspend()
	}
	s.resume()
}

// resume continues the command unless the lease is over.
func (s *supervisor) resume() {
	if s.lost == nil {
		s.look()
	}
	if s.lost == nil {
		s.signal(syscall.SIGCONT)
	}
}

// signal sends a signal to the group.
func (s *supervisor) signal(sig syscall.Signal) { _ = syscall.Kill(-s.group, sig) }
