package supervise

import (
	"errors"
	"os"
	"os/exec"
)

// Supported is whether Run can run commands on this system. Windows has neither the process groups nor the
// signals with which a command ends before its lease.
const Supported = false

// Run fails.
func Run(*exec.Cmd, Lease, Bounds, <-chan os.Signal) (Result, error) {
	return Result{}, errors.ErrUnsupported
}
