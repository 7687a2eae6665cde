//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"
)

// forwarded are the signals that the command gets.
var forwarded = []os.Signal{
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2,
}

// interrupt ends this process by SIGINT, whose status is the same. A shell ends a loop or a script after
// Ctrl-C only if the signal has ended the command that it waits for.
func interrupt() {
	signal.Reset(syscall.SIGINT)
	_ = syscall.Kill(os.Getpid(), syscall.SIGINT)
}
