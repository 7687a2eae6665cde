// Package supervise runs a command for as long as a lease lasts.
package supervise

import (
	"context"
	"errors"
	"os"
	"os/exec"
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

// ErrExpires is the cause of a Result if the lease was about to end.
var ErrExpires = errors.New("the lease was about to end without a renewal")

// margin is what is left of a lease when the command is killed, for the kernel to do so.
const margin = 50 * time.Millisecond

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
// On Linux the command is killed if this process dies. For that, the calling goroutine must be
// locked to a thread that lives as long as the process (runtime.LockOSThread in an init function).
//
// Run returns an error if the command cannot be started. cmd must read and write files only.
func Run(cmd *exec.Cmd, lease Lease, grace time.Duration, signals <-chan os.Signal) (Result, error) {
	terminal := foreground()
	cmd.SysProcAttr = attributes(terminal)
	if err := cmd.Start(); err != nil {
		terminal.close()
		return Result{}, err
	}
	s := &supervisor{group: cmd.Process.Pid, lease: lease, grace: grace, terminal: terminal}
	terminal.started(s.group)
	defer cmd.Process.Release() //nolint:errcheck // it was waited for
	defer terminal.close()
	return s.run(signals)
}

// supervisor runs one command.
type supervisor struct {
	group    int // the process id of the command too
	lease    Lease
	grace    time.Duration
	terminal *terminal

	lost  error     // why the command is being ended, or nil
	end   time.Time // of the lease, as last seen
	check *time.Timer
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
				s.terminal.suspend(s.resume)
				continue
			}
			if s.lost != nil {
				s.signal(syscall.SIGKILL) // what is left of the group
			}
			return Result{c.state, s.lost}, c.err
		case sig := <-signals:
			s.signal(sig.(syscall.Signal))
		case <-over:
			over = nil
			s.look()
		case <-s.check.C:
			s.look()
		}
	}
}

// look ends the command if the lease is lost or about to end, and kills it when its time is over.
func (s *supervisor) look() {
	left := s.lease.Remaining()
	if left > 0 {
		s.end = time.Now().Add(left)
	}
	switch cause := context.Cause(s.lease.Context()); {
	case s.lost != nil:
		s.signal(syscall.SIGKILL)
		return
	case cause != nil:
		s.lost = cause
	case left <= s.grace:
		s.lost = ErrExpires
	default:
		s.check.Reset(left - s.grace)
		return
	}
	patience := min(s.grace, time.Until(s.end)-margin)
	if patience > 0 {
		s.signal(syscall.SIGTERM)
		s.signal(syscall.SIGCONT) // a stopped process would not get the other
	}
	s.check.Reset(max(patience, 0))
}

// resume continues a command after this process was stopped with it, unless the lease is over.
func (s *supervisor) resume() {
	if s.look(); s.lost == nil {
		s.signal(syscall.SIGCONT)
	}
}

// signal sends a signal to the group.
func (s *supervisor) signal(sig syscall.Signal) { _ = syscall.Kill(-s.group, sig) }
