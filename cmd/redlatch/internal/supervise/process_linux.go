package supervise

import "syscall"

// dieWithParent has the kernel kill the command when the thread that starts it dies.
func dieWithParent(a *syscall.SysProcAttr) { a.Pdeathsig = syscall.SIGKILL }
