//go:build unix && !linux

package supervise

import (
	"os/signal"
	"syscall"
)

// dieWithParent does nothing: only Linux can do that.
func dieWithParent(*syscall.SysProcAttr) {}

// dieTogether does nothing: only Linux can do that.
func dieTogether(int) (disarm func()) { return func() {} }

// stopJob stops the process group of this process.
func stopJob() { _ = syscall.Kill(0, syscall.SIGSTOP) }

// isIgnored reports whether this process ignores a signal.
func isIgnored(sig syscall.Signal) bool { return signal.Ignored(sig) }
