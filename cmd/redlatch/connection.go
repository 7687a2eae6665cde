package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/lock"
)

const localhost = "redis://127.0.0.1:6379"

// connection is how to reach the server.
type connection struct{ url, prefix string }

// address returns the URL of the server.
func (c *connection) address() string {
	return cmp.Or(c.url, os.Getenv("REDLATCH_URL"), os.Getenv("REDIS_URL"), localhost)
}

// open returns a client of the server at that URL. Its warnings go to the standard error.
func (c *connection) open(ctx context.Context, url string, opts ...redlatch.Option) (*redlatch.Client, error) {
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	opts = append([]redlatch.Option{redlatch.WithLogger(logger), redlatch.WithoutStartupChecks()}, opts...)
	client, err := redlatch.Open(ctx, url, append(opts, c.names()...)...)
	return client, c.from(url, err)
}

// from adds to the error of an invalid URL the variable that it is from.
func (c *connection) from(url string, err error) error {
	if !errors.Is(err, lock.ErrInvalid) || c.url != "" {
		return err
	}
	for _, variable := range []string{"REDLATCH_URL", "REDIS_URL"} {
		if value := os.Getenv(variable); value != "" && value == url {
			return fmt.Errorf("$%s: %w", variable, err)
		}
	}
	return err
}

// names returns the option for the prefix, if there is one.
func (c *connection) names() []redlatch.Option {
	if c.prefix == "" {
		return nil
	}
	return []redlatch.Option{redlatch.WithNameMapper(func(name string) string { return c.prefix + name })}
}

// do runs f with a client of the server. A signal ends the program at once.
func (c *connection) do(f func(ctx context.Context, client *redlatch.Client) error) error {
	return interruptible(0, func(ctx context.Context) error {
		client, err := c.open(ctx, c.address())
		if err != nil {
			return err
		}
		defer client.Close()
		return f(ctx, client)
	})
}

// interruptible returns the result of f, or the error for a signal. After a signal it ends ctx, waits
// for f for that time at most, or until the next signal, and leaves f behind: a request of f may last
// for seconds if the server does not answer.
func interruptible(patience time.Duration, f func(ctx context.Context) error) error {
	signals := notify()
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	result := make(chan error, 1)
	go func() { result <- f(ctx) }()
	select {
	case err := <-result:
		return err
	case sig := <-signals:
		cancel()
		select {
		case <-result: //nolint:errcheck // the signal says why
		case <-time.After(patience):
		case <-signals:
		}
		return exitBy(sig)
	}
}

// options returns the options of a connection to the server.
func (c *connection) options() (rueidis.ClientOption, error) {
	opt, err := redlatch.ParseURL(c.address())
	return opt, c.from(c.address(), err)
}

// reader returns a reader of the server's objects, over a connection that the caller closes.
func (c *connection) reader() (*inspect.Reader, error) {
	opt, err := c.options()
	if err != nil {
		return nil, err
	}
	const timeout = 3 * time.Second // as that of redlatch.Open
	opt.ConnWriteTimeout = cmp.Or(opt.ConnWriteTimeout, timeout)
	opt.Dialer.Timeout = cmp.Or(opt.Dialer.Timeout, timeout)
	opt.DisableCache = true
	conn, err := rueidis.NewClient(opt)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", place(c.address()), err)
	}
	return &inspect.Reader{Conn: conn, Prefix: c.prefix}, nil
}
