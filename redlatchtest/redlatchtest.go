// Package redlatchtest is for tests of code that uses redlatch. NewLocker returns a lock in memory,
// for unit tests of code that takes a lock.Locker:
//
//	orders := redlatchtest.NewLocker("orders")
//	release := orders.HoldElsewhere() // another process holds the lock until release
//
// New provides a test with its own server and a client for it:
//
//	func TestShipping(t *testing.T) {
//		client := redlatchtest.New(t)
//		...
//	}
//
// Lose, AssertFree and AssertHeld are for both: for the locks of a client and those in memory.
//
// The server is redis-server or valkey-server if one is installed. It runs on a free
// port of the loopback interface with its data in memory. Otherwise it is an embedded
// server (miniredis) in the test's process, which suffices for what an application does
// with locks, but clusters are not supported, and scripts run in another Lua implementation.
//
// Run "go mod tidy" after the first import of this package: the embedded server is a module
// that package redlatch does not import.
package redlatchtest

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/alicebob/miniredis/v2"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/testserver"
)

// Server is a running server.
type Server struct {
	url  string
	kind string
	stop func()
	once sync.Once
}

// Start runs a server and blocks until it answers. It fails if an installed server does
// not start. The server runs until Close.
func Start() (*Server, error) {
	if found := testserver.Find(); len(found) > 0 {
		s, err := testserver.Start(found[0])
		if err != nil {
			return nil, fmt.Errorf("redlatchtest: %w", err)
		}
		return &Server{url: s.URL(), kind: s.Program, stop: s.Stop}, nil
	}
	return StartEmbedded()
}

// StartEmbedded runs the embedded server even if a real one is installed.
func StartEmbedded() (*Server, error) {
	m := miniredis.NewMiniRedis()
	if err := m.StartAddr("127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("redlatchtest: %w", err)
	}
	m.ClockTTL(true) // keys expire
	return &Server{url: "redis://" + m.Addr(), kind: "embedded server", stop: m.Close}, nil
}

// URL returns the server's address in the form that redlatch.Open accepts.
func (s *Server) URL() string { return s.url }

// Kind returns "redis-server", "valkey-server" or "embedded server".
func (s *Server) Kind() string { return s.kind }

// Close stops the server. Repeated calls have no effect.
func (s *Server) Close() { s.once.Do(s.stop) }

// New returns a client with its own server. Both are closed when the test ends. The
// test fails if the server does not start.
func New(tb testing.TB, opts ...redlatch.Option) *redlatch.Client {
	tb.Helper()
	s, err := Start()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Close)
	return NewClient(tb, s, opts...)
}

// NewClient returns another client of a server, like a client in another process. It is
// closed when the test ends.
func NewClient(tb testing.TB, s *Server, opts ...redlatch.Option) *redlatch.Client {
	tb.Helper()
	opt, err := redlatch.ParseURL(s.URL())
	if err != nil {
		tb.Fatal(err)
	}
	opt.ForceSingleClient = true // the embedded server looks like a cluster of one node
	c, err := redlatch.New(context.Background(), opt, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(c.Close)
	return c
}
