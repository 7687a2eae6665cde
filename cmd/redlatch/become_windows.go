package main

import (
	"errors"
	"os"
	"os/exec"
)

// become runs a command to its end, with the standard streams of this process, and returns the error for its status.
func become(cmd *exec.Cmd) error {
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err := cmd.Run()
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		return exit{status: ended.ExitCode()}
	}
	if err != nil {
		return notStarted(err)
	}
	return nil
}
