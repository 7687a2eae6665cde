package main

import (
	"cmp"
	"context"
	"log/slog"
	"os"

	"github.com/redlatch/redlatch"
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
	if c.prefix != "" {
		opts = append(opts, redlatch.WithNameMapper(func(name string) string { return c.prefix + name }))
	}
	return redlatch.Open(ctx, url, opts...)
}
