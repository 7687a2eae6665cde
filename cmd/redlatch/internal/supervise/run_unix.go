//go:build unix

package supervise

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
)

// Supported is whether Run can run commands on this system.
const Supported = true

// margin is what is left of a lease when the command is killed: time for this process to run, and for the
// kernel to kill.
func margin(grace time.Duration) time.Duration { return max(grace/5, 50*time.Millisecond) }

// killed is the time for which processes are looked for that were killed: they end, and their parents wait for
// them.
const killed = 200 * time.Millisecond

// shellTime is how long a shell is given to see that its job has stopped.
const shellTime = 100 * time.Millisecond

// Run runs cmd in a process group of its own, and returns when it has ended. Signals that arrive are
// forwarded to the group. When the lease is lost, or less than the grace time is left of it or until the
// end of the bounds, the group gets SIGTERM, and SIGKILL after the grace time or just before the end,
// whichever is earlier.
//
// If the command stops, as after Ctrl-Z, the job of this process stops with the command, because a
// stopped process does not renew the lease. The command goes on after the job if the lease is not over.
// The terminal is for whichever of the two needs it, and with this process in the end.
//
// On Linux the group is killed if this process dies, and so is the command if it has left the group. For
// that, the calling goroutine must be locked to a thread that lives as long as the process
// (runtime.LockOSThread in an init function).
//
// If this process has the process id 1, it reaps all processes that end while the command runs. Nothing else
// may wait for children then.
//
// Run returns an error if the command cannot be started, which matches ErrLate if the lease was over.
// cmd must read and write files only.
func Run(cmd *exec.Cmd, lease Lease, bounds Bounds, signals <-chan os.Signal) (Result, error) {
	s := &supervisor{lease: lease, bounds: bounds, jobs: make(chan os.Signal, 4), terminal: openTerminal()}
	s.bounds.Grace = max(bounds.Grace, margin(bounds.Grace))
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
	defer dieTogether(s.group)()
	s.terminal.started(s.group)
	return s.run(signals)
}

// supervisor runs one command.
type supervisor struct {
	group    int // the process id of the command too
	lease    Lease
	bounds   Bounds
	jobs     chan os.Signal // the signals that notify lists
	terminal *terminal

	lost  error     // why the command is being ended, or nil
	end   time.Time // of the lease, as last seen, or of the bounds
	left  bool      // as in Result
	check *time.Timer

	stopping bool // Ctrl-Z has stopped the rest of the job
}

// notify has the signals of job control sent to s.jobs.
func (s *supervisor) notify() {
	for _, sig := range []syscall.Signal{syscall.SIGTSTP, syscall.SIGWINCH, syscall.SIGCONT} {
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
				s.kill() // what is left of the group
			}
			return Result{c.state, s.lost, s.left}, c.err
		case sig := <-signals:
			s.signal(sig.(syscall.Signal))
		case sig := <-s.jobs:
			stopped, continued := s.arrived(sig)
			if continued {
				s.resume()
			}
			if stopped {
				s.stopping = true
				s.signal(syscall.SIGTSTP)
			}
		case <-over:
			over = nil
			if s.lost == nil { // else the command has its grace time
				s.look()
			}
		case <-s.check.C:
			s.look()
		}

		// The command itself may not be signalled, so nothing is gained by waiting for its end.
		if s.left {
			return Result{Lost: s.lost, Left: true}, nil
		}
	}
}

// arrived takes the signals of job control that have arrived, and the given ones. It reports whether the job is to stop
// or was continued, and forwards changes of the window. Package os/signal does not keep the order of signals: of
// both, the stop counts as the earlier one.
func (s *supervisor) arrived(signals ...os.Signal) (stopped, continued bool) {
	for len(s.jobs) > 0 {
		signals = append(signals, <-s.jobs)
	}
	for _, sig := range signals {
		switch sig {
		case syscall.SIGTSTP:
			stopped = true
		case syscall.SIGCONT:
			continued = true
		default:
			s.signal(sig.(syscall.Signal))
		}
	}
	return stopped && !continued, continued
}

// over returns the reason why the lease or the time of the command is over or about to end, or nil.
func (s *supervisor) over() error {
	now := time.Now() // before the lease is read, so that its end is not late
	left := s.lease.Remaining()
	if left > 0 {
		s.end = now.Add(left)
	}
	limited := !s.bounds.End.IsZero()
	if limited && s.bounds.End.Before(s.end) {
		s.end = s.bounds.End
	}

	if cause := context.Cause(s.lease.Context()); cause != nil {
		return cause
	}
	if limited && time.Until(s.bounds.End) <= s.bounds.Grace {
		return s.bounds.Over
	}
	if left <= s.bounds.Grace {
		return ErrExpires
	}
	return nil
}

// look ends the command if the lease is lost or about to end, and kills it when its time is over.
func (s *supervisor) look() {
	if s.lost != nil {
		s.kill()
		return
	}
	if s.lost = s.over(); s.lost == nil {
		s.check.Reset(time.Until(s.end) - s.bounds.Grace)
		return
	}
	patience := min(s.bounds.Grace, time.Until(s.end)-margin(s.bounds.Grace))
	if patience > 0 {
		s.signal(syscall.SIGTERM)
		s.signal(syscall.SIGCONT) // a stopped process would not get the other
	}
	s.check.Reset(max(patience, 0))
}

// suspend is called when the command was stopped by a signal.
func (s *supervisor) suspend(by syscall.Signal) {
	t := s.terminal
	if t == nil || s.lost != nil {
		return
	}

	stopped, continued := s.arrived()
	s.stopping = !continued && (stopped || s.stopping)
	asks := by == syscall.SIGTTIN || by == syscall.SIGTTOU
	if asks && !s.stopping && t.isForeground(t.own) {
		t.give(s.group)
	} else if !continued { // else the job goes on: this process learns of Ctrl-Z and of "fg" or "bg" now
		s.stop()
	}
	s.stopping = false
	s.resume()
}

// stop stops the command and the job, and returns when the job goes on.
func (s *supervisor) stop() {
	seen, continued := s.awaitShell()
	if continued {
		return
	}
	s.signal(syscall.SIGSTOP) // what is not stopped: nothing of it may go on without renewals
	s.terminal.suspend(seen)
	s.arrived() // the stop is over, and each Ctrl-Z before its end
}

// awaitShell waits a moment until the shell has seen that Ctrl-Z has stopped the rest of the job: it takes the terminal
// then. The job may be continued already: then this process must not stop it once more.
func (s *supervisor) awaitShell() (seen, continued bool) {
	t := s.terminal
	for end := time.Now().Add(shellTime); s.stopping && time.Now().Before(end); time.Sleep(time.Millisecond) {
		if _, continued := s.arrived(); continued {
			return false, true
		}
		if !t.isForeground(t.own) && !t.isForeground(t.group) {
			return true, false
		}
	}
	return false, false
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

// kill kills the group, and sets s.left if processes of it go on because they may not be signalled.
func (s *supervisor) kill() {
	s.signal(syscall.SIGKILL)

	// EPERM is the answer only if there is no process that may be signalled, and those that are dying may be.
	for end := time.Now().Add(killed); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		err := syscall.Kill(-s.group, 0)
		s.left = err == syscall.EPERM
		if err == syscall.ESRCH {
			return
		}
	}
}

// signal sends a signal to the group.
func (s *supervisor) signal(sig syscall.Signal) { _ = syscall.Kill(-s.group, sig) }
