package redlatchtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNewStartsRealServer(t *testing.T) {
	t.Parallel()
	s, err := redlatchtest.Start()
	require.NoError(t, err)
	defer s.Close()
	require.Contains(t, s.Kind(), "-server")
	c := redlatchtest.New(t, redlatch.WithWatchdogTimeout(time.Second))
	require.NoError(t, c.Ping(t.Context()))
}

func nothing(context.Context) error { return nil }

// embedded returns an embedded server that is closed when the test ends.
func embedded(t *testing.T) *redlatchtest.Server {
	t.Helper()
	s, err := redlatchtest.StartEmbedded()
	require.NoError(t, err)
	require.Equal(t, "embedded server", s.Kind())
	t.Cleanup(s.Close)
	return s
}

// What internal/contract tests in virtual time runs on such a server, with all kinds of objects. Clients
// connect to it as to any other, and its keys expire.
func TestEmbedded(t *testing.T) {
	t.Parallel()
	const lease = 200 * time.Millisecond
	s := embedded(t)
	c, other := redlatchtest.NewClient(t, s), redlatchtest.NewClient(t, s)
	begin := time.Now()
	h, err := c.FencedLock("orders").Lock(t.Context(), lock.Lease(lease))
	require.NoError(t, err)
	require.EqualValues(t, 1, h.Token())
	require.NoError(t, other.FencedLock("orders").Do(t.Context(), nothing))
	require.GreaterOrEqual(t, time.Since(begin), lease-10*time.Millisecond)
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

	c.Close()
	s.Close()
	s.Close()
	require.Error(t, other.Ping(t.Context()))
}

// Two clients of one embedded server, which identifies neither itself nor the database, are no two servers
// of a Redlock.
func TestEmbeddedServersOfARedLock(t *testing.T) {
	t.Parallel()
	var members []lock.Locker
	var servers []*redlatchtest.Server
	for range 3 {
		s := embedded(t)
		servers, members = append(servers, s), append(members, redlatchtest.NewClient(t, s).Lock("report"))
	}
	c := redlatchtest.NewClient(t, servers[0])
	require.NoError(t, c.RedLock(members...).Do(t.Context(), nothing))
	require.ErrorIs(t, c.RedLock(members[0], c.Lock("report"), members[1]).Do(t.Context(), nothing), lock.ErrInvalid)
}
