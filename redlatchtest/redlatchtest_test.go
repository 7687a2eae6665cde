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

func TestNewFindsARealServer(t *testing.T) {
	s, err := redlatchtest.Start()
	require.NoError(t, err)
	defer s.Close()
	require.Contains(t, s.Kind(), "-server")
	c := redlatchtest.New(t, redlatch.WithWatchdogTimeout(time.Second))
	require.NoError(t, c.Ping(t.Context()))
}

// The embedded server does what the locks need: waiting by message, expiry by
// its own clock, renewal, re-entry, tokens.
func TestEmbedded(t *testing.T) {
	s, err := redlatchtest.StartEmbedded()
	require.NoError(t, err)
	defer s.Close()
	require.Equal(t, "embedded server", s.Kind())
	const timeout = 500 * time.Millisecond
	c := redlatchtest.NewClient(t, s, redlatch.WithWatchdogTimeout(timeout))
	other := redlatchtest.NewClient(t, s)
	nothing := func(context.Context) error { return nil }

	// Expiry.
	h, err := c.FencedLock("orders").Lock(t.Context(), lock.Lease(200*time.Millisecond))
	require.NoError(t, err)
	require.Equal(t, int64(1), h.Token())
	begin := time.Now()
	require.NoError(t, other.FencedLock("orders").Do(t.Context(), nothing))
	require.GreaterOrEqual(t, time.Since(begin), 150*time.Millisecond)
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

	// Renewal.
	h, err = c.Lock("orders").Lock(t.Context())
	require.NoError(t, err)
	_, err = other.Lock("orders").Lock(t.Context(), lock.Wait(3*timeout))
	require.ErrorIs(t, err, lock.ErrNotAcquired)

	// A message.
	waited := make(chan error, 1)
	go func() { waited <- other.Lock("orders").Do(context.Background(), nothing) }()
	require.Eventually(t, func() bool { return other.PubSub().Subscribed == 1 }, 5*time.Second, time.Millisecond)
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, <-waited)

	// Re-entry.
	ctx := lock.WithOwner(t.Context(), c.NewOwner())
	h1, err := c.Lock("orders").Lock(ctx)
	require.NoError(t, err)
	h2, err := c.Lock("orders").Lock(ctx)
	require.NoError(t, err)
	require.NoError(t, h1.Unlock(ctx))
	require.NoError(t, h2.Unlock(ctx))
	locked, err := other.Lock("orders").IsLocked(t.Context())
	require.NoError(t, err)
	require.False(t, locked)
	other.Close()
	c.Close()
	s.Close()
	s.Close()
}
