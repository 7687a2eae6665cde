package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// forwarded are the signals that the command gets.
var forwarded = []os.Signal{
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2,
}

// notify returns a channel of the signals that are to be forwarded. A signal that this process
// ignores, for example under nohup(1), stays ignored.
func notify() chan os.Signal {
	// A warning for a reader that has gone does not end redlatch, and so the command.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	signals := make(chan os.Signal, 16)
	for _, sig := range forwarded {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig)
		}
	}
	return signals
}

// cancelBySignal returns a context that ends at the first signal, and a function that returns this
// signal, or nil, and leaves all others on the channel.
func cancelBySignal(signals <-chan os.Signal) (ctx context.Context, stop func() os.Signal) {
	ctx, cancel := context.WithCancel(context.Background())
	got, end := make(chan os.Signal, 1), make(chan struct{})
	go func() {
		select {
		case sig := <-signals:
			got <- sig
			cancel()
		case <-end:
			got <- nil
		}
	}()
	return ctx, func() os.Signal {
		close(end)
		cancel()
		return <-got
	}
}
