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

// wait waits until a child has stopped or ended.
func wait(pid int) change {
	for {
		var state syscall.WaitStatus
		if _, err := syscall.Wait4(pid, &state, syscall.WUNTRACED, nil); err != syscall.EINTR {
			return change{state, os.NewSyscallError("wait", err)}
		}
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
