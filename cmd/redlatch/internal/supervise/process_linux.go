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
	var byDefault, handler [8]uintptr // at least a struct sigaction
	action := func(set, got *[8]uintptr) {
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(syscall.SIGTSTP),
			uintptr(unsafe.Pointer(set)), uintptr(unsafe.Pointer(got)), 8, 0, 0)
	}
	action(&byDefault, &handler)
	_ = syscall.Kill(0, syscall.SIGTSTP)
	action(&handler, nil)
}
