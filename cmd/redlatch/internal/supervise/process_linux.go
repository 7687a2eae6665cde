package supervise

import (
	"syscall"
	"unsafe"
)

// dieWithParent has the kernel kill the command when the thread that starts it dies.
func dieWithParent(a *syscall.SysProcAttr) { a.Pdeathsig = syscall.SIGKILL }

// stopJob stops the process group of this process if a shell can continue it. Only the default action
// of SIGTSTP depends on that, and signal.Reset does not restore it.
func stopJob() {
	var byDefault, handler action
	sigaction(syscall.SIGTSTP, &byDefault, &handler)
	_ = syscall.Kill(0, syscall.SIGTSTP)
	sigaction(syscall.SIGTSTP, &handler, nil)
}

// isIgnored reports whether this process ignores a signal. signal.Ignored does not know what it has
// inherited of the signals of job control.
func isIgnored(sig syscall.Signal) bool {
	var got action
	sigaction(sig, nil, &got)
	return got[0] == 1 // SIG_IGN
}

// action is at least a struct sigaction of the kernel, which begins with the handler.
type action [8]uintptr

func sigaction(sig syscall.Signal, set, got *action) {
	_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(sig),
		uintptr(unsafe.Pointer(set)), uintptr(unsafe.Pointer(got)), 8, 0, 0)
}
