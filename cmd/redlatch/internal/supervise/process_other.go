//go:build !linux

package supervise

import "syscall"

// dieWithParent does nothing: only Linux can do that.
func dieWithParent(*syscall.SysProcAttr) {}
