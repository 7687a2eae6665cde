package harness

import (
	"context"
	"crypto/tls"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
)

// VirtualServer is an embedded server in a bubble of virtual time. Its Miniredis is for
// a test that looks at the keys or changes them.
type VirtualServer struct {
	*miniredis.Miniredis
	// Latency is how long requests are on their way. It is set before a client connects.
	Latency time.Duration

	mu    sync.Mutex
	calls map[string]int
}

// Virtual runs a test in a bubble of virtual time (testing/synctest) with an embedded
// server whose keys expire by the same time, in parallel with other tests. An hour passes
// in a second or less, and the result does not depend on how busy the machine is:
// synctest.Wait returns when every goroutine of every client is asleep.
//
// It is for tests whose subject is time. ACLs, clusters, outages and faults of the
// network need a real server.
func Virtual(t *testing.T, test func(t *testing.T, s *VirtualServer)) {
	t.Helper()
	inParallel(t)
	VirtualAlone(t, test)
}

// VirtualAlone is Virtual for a test during which no other test of the package runs: see
// EachAlone.
func VirtualAlone(t *testing.T, test func(t *testing.T, s *VirtualServer)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &VirtualServer{Miniredis: miniredis.NewMiniRedis(), calls: map[string]int{}}
		conn, err := s.Dial() // starts it without a listener
		require.NoError(t, err)
		require.NoError(t, conn.Close())
		t.Cleanup(s.Close)
		s.ClockTTL(true)
		s.Server().SetPreHook(s.count)
		test(t, s)
	})
}

func (s *VirtualServer) count(_ *server.Peer, command string, _ ...string) (handled bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[strings.ToLower(command)]++
	return false
}

// option is for clients of the server.
func (s *VirtualServer) option() rueidis.ClientOption {
	return rueidis.ClientOption{
		InitAddress: []string{"virtual:0"}, ForceSingleClient: true, DisableCache: true,
		DialCtxFn: func(context.Context, string, *net.Dialer, *tls.Config) (net.Conn, error) {
			conn, err := s.Dial()
			if err != nil {
				return nil, err
			}
			return newBufferedConn(conn, s.Latency), nil
		},
		// A connection that is idle is asked for a sign of life that often.
		Dialer: net.Dialer{KeepAlive: time.Hour},
	}
}

// Client returns a client of the server, closed when the test ends.
func (s *VirtualServer) Client(t testing.TB, opts ...redlatch.Option) *redlatch.Client {
	t.Helper()
	c, err := redlatch.New(t.Context(), s.option(), opts...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// Conn returns a bare connection to the server, closed when the test ends.
func (s *VirtualServer) Conn(t testing.TB) rueidis.Client {
	t.Helper()
	conn, err := rueidis.NewClient(s.option())
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return conn
}

// Reset begins to count commands anew.
func (s *VirtualServer) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.calls)
}

// Calls returns how often a command was called since Reset, by clients or scripts.
func (s *VirtualServer) Calls(command string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[command]
}

// NothingLeft fails the test unless the server is empty once the tickets of releases
// with a lost reply have expired.
func (s *VirtualServer) NothingLeft(t testing.TB) {
	t.Helper()
	time.Sleep(20 * time.Second)
	synctest.Wait()
	require.Empty(t, s.Keys(), "keys are left")
}

// bufferedConn buffers what is written, as a socket does: without that the two ends of a
// net.Pipe that write a lot at the same time wait for each other.
type bufferedConn struct {
	net.Conn
	latency time.Duration

	mu      sync.Mutex
	more    sync.Cond
	pending []byte
	err     error // of the writer, once it has ended
}

func newBufferedConn(conn net.Conn, latency time.Duration) *bufferedConn {
	c := &bufferedConn{Conn: conn, latency: latency}
	c.more.L = &c.mu
	go c.pass()
	return c
}

// pass writes what is pending until the connection is closed.
func (c *bufferedConn) pass() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.err == nil {
		if len(c.pending) == 0 {
			c.more.Wait()
			continue
		}
		b := c.pending
		c.pending = nil
		c.mu.Unlock()
		time.Sleep(c.latency)
		_, err := c.Conn.Write(b)
		c.mu.Lock()
		if err != nil {
			c.err = err
		}
	}
}

func (c *bufferedConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	c.pending = append(c.pending, b...)
	c.more.Signal()
	return len(b), nil
}

func (c *bufferedConn) Close() error {
	err := c.Conn.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = net.ErrClosed
	c.more.Signal()
	return err
}
