//go:build unix

package supervise

import (
	"os"
	"syscall"
)

// change is that a command has stopped or ended.
type change struct {
	state syscall.WaitStatus
	err   error
}

func (c change) stopped() bool { return c.err == nil && c.state.Stopped() }

// wait waits until a child has stopped or ended. As process 1, which is the parent of all orphans, it reaps
// the others that end meanwhile.
func wait(pid int) change {
	which := pid
	if os.Getpid() == 1 {
		which = -1
	}
	for {
		var state syscall.WaitStatus
		got, err := syscall.Wait4(which, &state, syscall.WUNTRACED, nil)
		if err == syscall.EINTR || err == nil && got != pid {
			continue
		}
		return change{state, os.NewSyscallError("wait", err)}
	}
}

// attributes are those of a command in a process group of its own.
func attributes(t *terminal) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setpgid: true}
	if t.isAlone() {
		a.Foreground, a.Ctty = true, int(t.file.Fd())
	}
	dieWithParent(a)
	return a
}
