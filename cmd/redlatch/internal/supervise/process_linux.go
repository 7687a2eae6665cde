package supervise

import (
	"cmp"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// dieWithParent has the kernel kill the command when the thread that starts it dies.
func dieWithParent(a *syscall.SysProcAttr) { a.Pdeathsig = syscall.SIGKILL }

// dieTogether has the kernel kill a process group when this process ends, however it ends, until the caller
// calls disarm. The signal of dieWithParent is for the command only: its children do not inherit it. Before this
// call, though, right after the start, it is all there is.
//
// Only this process has the two ends of a pipe. If it dies, the kernel closes one of them first, and tells
// the owner of the other end, which is the group, with the signal of that end. In contrast to a process that
// watches the pipe, nobody can kill the kernel, and it does not take a later group with the same number for
// this one.
func dieTogether(group int) (disarm func()) {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return notTogether(err)
	}
	each := func(command, arg int) error {
		_, first := unix.FcntlInt(uintptr(pipe[0]), command, arg)
		_, second := unix.FcntlInt(uintptr(pipe[1]), command, arg)
		return cmp.Or(first, second)
	}
	disarm = func() {
		_ = each(unix.F_SETFL, 0)
		_ = unix.Close(pipe[0])
		_ = unix.Close(pipe[1])
	}

	owner, sig := each(unix.F_SETOWN, -group), each(unix.F_SETSIG, int(unix.SIGKILL))
	if err := cmp.Or(owner, sig, each(unix.F_SETFL, unix.O_ASYNC)); err != nil {
		disarm()
		return notTogether(err)
	}
	return disarm
}

// notTogether warns that the kernel kills the command alone. That is no reason not to run the command: it only
// matters if this process is killed.
func notTogether(err error) (disarm func()) {
	fmt.Fprintln(os.Stderr, "redlatch: the children of the command will go on if redlatch is killed:", err)
	return func() {}
}

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
