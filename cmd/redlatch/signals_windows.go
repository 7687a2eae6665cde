package main

import (
	"os"
	"syscall"
)

// forwarded are the signals that end redlatch: Ctrl-C, and the end of the session or of the system.
var forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM}

// interrupt does nothing: no process ends by a signal here, so the exit status says it all.
func interrupt() {}
