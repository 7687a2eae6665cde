// Package redlatchtest is for tests of code that uses redlatch.
//
// # A lock
//
// NewLocker returns a lock in memory, without a client, for code that takes a lock.Locker. A test can
// cause what a real lock does only at bad times:
//
//	orders := redlatchtest.NewLocker("orders")
//	release := orders.HoldElsewhere() // another process holds the lock until release
//	orders.FailLock(lock.ErrUnavailable)
//
// # Permits, latches, rates, and work that runs once
//
// NewEmbedded returns a server in the test's process. Clients of NewClient reach it in memory, so a test
// needs no installed server and no port, and works under testing/synctest. The objects are those of
// production, with all of their promises. Another client is like another process:
//
//	server := redlatchtest.NewEmbedded(t)
//	client := redlatchtest.NewClient(t, server)
//	elsewhere := redlatchtest.NewClient(t, server)
//
//	permit, err := elsewhere.PermitSemaphore("encoders", semaphore.Permits(1)).Acquire(ctx, 1)
//	...
//	err = encode(ctx, client.PermitSemaphore("encoders", semaphore.Permits(1))) // no permit is free
//
// Under testing/synctest the interval of a rate limiter, or the lease of a lock, takes no time.
//
// An embedded server suffices for what an application does with redlatch, but does not support clusters,
// and runs scripts in another implementation of Lua (miniredis).
//
// # A server
//
// New returns a client with a server of its own: redis-server or valkey-server if one is installed, on a
// free port of the loopback interface with its data in memory, and otherwise an embedded server.
//
//	func TestShipping(t *testing.T) {
//		client := redlatchtest.New(t)
//		...
//	}
//
// NewServer returns the server alone, for several clients, or for other libraries on the same server. With
// go-redis for example:
//
//	server := redlatchtest.NewServer(t)
//	client := redlatchtest.NewClient(t, server)
//	options, err := redis.ParseURL(server.URL())
//	...
//	cache := redis.NewClient(options)
//	defer cache.Close()
//
// # Losses
//
// Lose takes a lock, a permit or a run from its holder, so that a test sees how the work ends. AssertFree and
// AssertHeld look at a lock. All three are for objects of a client and for locks in memory.
//
// # The module
//
// Run "go mod tidy" after the first import of this package: the embedded server is a module
// that package redlatch does not import.
package redlatchtest

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/testserver"
)

// Server is a running server. Its methods are safe for concurrent use.
type Server struct {
	kind   string
	option rueidis.ClientOption // of clients
	url    func() string
	stop   func()
	once   sync.Once
}

// Start runs a server, embedded if none is installed, and blocks until it answers. It fails if an
// installed server does not start. The server runs until Close. Tests use NewServer.
func Start() (*Server, error) {
	found := testserver.Find()
	if len(found) == 0 {
		return startEmbedded()
	}

	s, err := testserver.Start(found[0])
	if err != nil {
		return nil, fmt.Errorf("redlatchtest: cannot start a server: %w", err)
	}
	option := rueidis.ClientOption{InitAddress: []string{s.Addr}, ForceSingleClient: true}
	return &Server{kind: s.Program, option: option, url: s.URL, stop: s.Stop}, nil
}

func startEmbedded() (*Server, error) {
	e, err := listen()
	if err != nil {
		return nil, fmt.Errorf("redlatchtest: cannot start the embedded server: %w", err)
	}
	return &Server{kind: "embedded server", option: testserver.InMemory(e.dial, 0), url: e.url, stop: e.close}, nil
}

// NewServer is Start for a test. The end of the test closes the server. If the server does not start, the
// test fails at once.
func NewServer(tb testing.TB) *Server {
	tb.Helper()
	s, err := Start()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Close)
	return s
}

// NewEmbedded is NewServer for an embedded server, even if another one is installed.
//
// In a bubble of testing/synctest the server and its clients use the virtual time of the bubble, so that
// leases of hours end at once, and synctest.Wait returns when they are idle. The URL is of no use there: a
// connection to it is a connection of a network, for which time stands still.
func NewEmbedded(tb testing.TB) *Server {
	tb.Helper()
	s, err := startEmbedded()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Close)
	return s
}

// URL returns the address of the server in the form that redlatch.Open and other libraries accept.
func (s *Server) URL() string { return s.url() }

// Kind returns "redis-server", "valkey-server" or "embedded server".
func (s *Server) Kind() string { return s.kind }

// Close stops the server. Requests of its clients fail from then on, as those to a server that is down.
// Repeated calls have no effect.
func (s *Server) Close() { s.once.Do(s.stop) }

// New returns a client with its own server: NewClient of NewServer.
func New(tb testing.TB, opts ...redlatch.Option) *redlatch.Client {
	tb.Helper()
	return NewClient(tb, NewServer(tb), opts...)
}

// NewClient returns another client of a server, like a client in another process. It is
// closed when the test ends. The test fails at once if the client cannot connect or an option is invalid.
func NewClient(tb testing.TB, s *Server, opts ...redlatch.Option) *redlatch.Client {
	tb.Helper()
	c, err := redlatch.New(context.Background(), s.option, opts...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(c.Close)
	return c
}
