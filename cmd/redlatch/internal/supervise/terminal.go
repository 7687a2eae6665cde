//go:build unix

package supervise

import (
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// terminal is the controlling terminal of this process. nil is no terminal.
type terminal struct {
	file  *os.File
	own   int // process group of this process
	group int // of the command
}

// openTerminal returns the controlling terminal, or nil.
func openTerminal() *terminal {
	file, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	return &terminal{file: file, own: unix.Getpgrp()}
}

// isForeground reports whether a process group is in the foreground.
func (t *terminal) isForeground(group int) bool {
	foreground, err := unix.IoctlGetInt(int(t.file.Fd()), unix.TIOCGPGRP)
	return err == nil && foreground == group
}

// isAlone reports whether this process is a job in the foreground by itself. Its command then gets the
// terminal at once. If other processes belong to the job, as in a pipeline or a script, they need
// the signals of the terminal as well, so that the command gets it when it asks for it.
func (t *terminal) isAlone() bool {
	if t == nil || !t.isForeground(t.own) || t.own != os.Getpid() {
		return false
	}
	for _, file := range []*os.File{os.Stdin, os.Stdout, os.Stderr} {
		if info, err := file.Stat(); err == nil && info.Mode()&(os.ModeNamedPipe|os.ModeSocket) != 0 {
			return false
		}
	}
	return true
}

// started is called after the start of the command. It has no group if that failed.
func (t *terminal) started(group int) {
	if t == nil {
		return
	}
	t.group = group
	// The terminal stops a process in the background that changes its foreground, and all of a job
	// that reads in the background, while the command would run on. Commands inherit what is ignored,
	// so this comes after the start.
	signal.Ignore(syscall.SIGTTOU, syscall.SIGTTIN)
}

// give moves a process group to the foreground.
func (t *terminal) give(group int) {
	_ = unix.IoctlSetPointerInt(int(t.file.Fd()), unix.TIOCSPGRP, group)
}

// take moves this process to the foreground if the command is there, and reports whether it was.
func (t *terminal) take() bool {
	had := t.isForeground(t.group)
	if had {
		t.give(t.own)
	}
	return had
}

// suspend stops the job of this process, and returns when it continues. The kernel does not stop a
// job that no shell could continue; suspend then returns after a while. With seen set the shell has taken the terminal
// since the job began to stop: if it has given the terminal back it continues the job, which then must not stop again.
func (t *terminal) suspend(seen bool) {
	had := t.take()
	continued := make(chan os.Signal, 1)
	signal.Notify(continued, syscall.SIGCONT)
	defer signal.Stop(continued)
	if seen && t.isForeground(t.own) {
		return
	}
	stopJob()
	select {
	case <-continued:
	case <-time.After(100 * time.Millisecond):
	}
	if had && t.isForeground(t.own) { // after fg, not bg
		t.give(t.group)
	}
}

// close takes the terminal back.
func (t *terminal) close() {
	if t == nil {
		return
	}
	t.take()
	_ = t.file.Close()
}
