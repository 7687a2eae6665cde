package supervise

import (
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// terminal is the controlling terminal of a process in the foreground. nil is no terminal.
type terminal struct {
	file  *os.File
	own   int // process group
	group int // of the command
}

// foreground returns the terminal in whose foreground this process runs, or nil.
func foreground() *terminal {
	file, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	t := &terminal{file: file, own: unix.Getpgrp()}
	if !t.isForeground() {
		_ = file.Close()
		return nil
	}
	return t
}

func (t *terminal) isForeground() bool {
	group, err := unix.IoctlGetInt(int(t.file.Fd()), unix.TIOCGPGRP)
	return err == nil && group == t.own
}

// started is called when the command runs.
func (t *terminal) started(group int) {
	if t == nil {
		return
	}
	t.group = group
	// The terminal stops a process in the background that changes its foreground. Commands inherit
	// what is ignored, so this comes after the start.
	signal.Ignore(syscall.SIGTTOU)
}

// give moves a process group to the foreground.
func (t *terminal) give(group int) {
	_ = unix.IoctlSetPointerInt(int(t.file.Fd()), unix.TIOCSPGRP, group)
}

// suspend stops this process after the command was stopped, as the shell expects, and calls resume
// when it continues.
func (t *terminal) suspend(resume func()) {
	if t == nil {
		return
	}
	t.give(t.own)
	_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	if t.isForeground() { // after fg, not bg
		t.give(t.group)
	}
	resume()
}

// close takes the terminal back.
func (t *terminal) close() {
	if t == nil {
		return
	}
	if t.group != 0 {
		t.give(t.own)
		signal.Reset(syscall.SIGTTOU)
	}
	_ = t.file.Close()
}
