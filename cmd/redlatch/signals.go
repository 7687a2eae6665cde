package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

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

// untilSignal returns a context that ends at the first signal that notify would report.
func untilSignal() (ctx context.Context, cancel func()) {
	ctx, cancel = context.WithCancel(context.Background())
	signals := notify()
	go func() {
		defer signal.Stop(signals)
		select {
		case <-signals:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}
