// Package redlatchtest gives tests a server of their own, and a client on it:
//
//	func TestShipping(t *testing.T) {
//		client := redlatchtest.New(t)
//		...
//	}
//
// The server is redis-server or valkey-server where one is installed, on a free
// port of the loopback interface, with its data in memory. Elsewhere it is an
// embedded one (miniredis) in the test's own process: good enough for what an
// application does with locks, but not the real thing. It keeps expiry to
// within some milliseconds, knows no cluster, and runs scripts in its own Lua.
package redlatchtest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

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

// Start runs a server and blocks until it answers. It fails if a program is
// installed and does not start. The server runs until Close.
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

// StartEmbedded runs the embedded server even where a real one is installed.
func StartEmbedded() (*Server, error) {
	m := miniredis.NewMiniRedis()
	if err := m.StartAddr("127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("redlatchtest: %w", err)
	}
	stop := make(chan struct{})
	var clock sync.WaitGroup
	clock.Go(func() { drive(m, stop) })
	return &Server{
		url:  "redis://" + m.Addr(),
		kind: "embedded server",
		stop: func() {
			close(stop)
			clock.Wait()
			m.Close()
		},
	}, nil
}

// clockTick is how late a key may expire on the embedded server.
const clockTick = 5 * time.Millisecond

// drive makes the keys of m expire as time passes, which they do not do by
// themselves.
func drive(m *miniredis.Miniredis, stop <-chan struct{}) {
	ticker := time.NewTicker(clockTick)
	defer ticker.Stop()
	for last := time.Now(); ; {
		select {
		case now := <-ticker.C:
			m.SetTime(now)
			m.FastForward(now.Sub(last))
			last = now
		case <-stop:
			return
		}
	}
}

// URL returns the server's address as redlatch.Open takes it.
func (s *Server) URL() string { return s.url }

// Kind returns what runs: "redis-server", "valkey-server" or "embedded server".
func (s *Server) Kind() string { return s.kind }

// Close ends the server; calling it again does nothing.
func (s *Server) Close() { s.once.Do(s.stop) }

// New returns a client on a server of its own. Both are closed when the test
// ends. A server that does not start fails the test.
func New(tb testing.TB, opts ...redlatch.Option) *redlatch.Client {
	tb.Helper()
	s, err := Start()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Close)
	return NewClient(tb, s, opts...)
}

// NewClient returns one more client on a server, as another process would have
// it. It is closed when the test ends.
func NewClient(tb testing.TB, s *Server, opts ...redlatch.Option) *redlatch.Client {
	tb.Helper()
	opt, err := redlatch.ParseURL(s.URL())
	if err != nil {
		tb.Fatal(err)
	}
	opt.ForceSingleClient = true // the embedded server answers as a cluster of one would
	c, err := redlatch.New(context.Background(), opt, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(c.Close)
	return c
}
