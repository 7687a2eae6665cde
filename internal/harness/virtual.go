package harness

import (
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
	"github.com/redlatch/redlatch/internal/testserver"
)

// VirtualServer is an embedded server in a bubble of virtual time. Tests use its Miniredis to inspect
// or change keys.
type VirtualServer struct {
	*miniredis.Miniredis
	// Latency is the latency of the requests of clients that are made from now on.
	Latency time.Duration

	mu    sync.Mutex
	calls map[string]int
}

// Virtual runs a test in a bubble of virtual time (testing/synctest), in parallel with other tests. The
// keys of its embedded server expire by the same clock. An hour takes at most a second, and the load
// of the machine does not affect the result: synctest.Wait returns when every goroutine of every
// client is blocked.
//
// It is for tests of timing. ACLs, clusters, outages and network faults need a real server.
func Virtual(t *testing.T, test func(t *testing.T, s *VirtualServer)) {
	t.Helper()
	inParallel(t)
	VirtualAlone(t, test)
}

// VirtualAlone is Virtual without other tests of the package in parallel: see EachAlone.
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

// option returns the options of a client of the server.
func (s *VirtualServer) option() rueidis.ClientOption { return testserver.InMemory(s.Dial, s.Latency) }

// Client returns a client of the server. The end of the test closes it.
func (s *VirtualServer) Client(t testing.TB, opts ...redlatch.Option) *redlatch.Client {
	t.Helper()
	c, err := redlatch.New(t.Context(), s.option(), opts...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// Conn returns a rueidis client of the server. The end of the test closes it.
func (s *VirtualServer) Conn(t testing.TB) rueidis.Client {
	t.Helper()
	conn, err := rueidis.NewClient(s.option())
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return conn
}

// Reset resets the counts of Calls.
func (s *VirtualServer) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.calls)
}

// Calls returns the number of calls of a command since Reset, by clients or scripts.
func (s *VirtualServer) Calls(command string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[command]
}

// NothingLeft fails the test unless the server is empty after the cached replies of releases have
// expired.
func (s *VirtualServer) NothingLeft(t testing.TB) {
	t.Helper()
	time.Sleep(20 * time.Second)
	synctest.Wait()
	require.Empty(t, s.Keys(), "leftover keys")
}
