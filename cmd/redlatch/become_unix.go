//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// become has a command take the place of this process, with its standard streams. It returns only if that fails.
func become(cmd *exec.Cmd) error {
	return notStarted(syscall.Exec(cmd.Path, cmd.Args, cmd.Env))
}
