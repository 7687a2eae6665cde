package redlatchtest_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/redlatchtest"
	"github.com/redlatch/redlatch/semaphore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A test and another library use the same server, which ends with the test.
func TestNewServer(t *testing.T) {
	var addr string
	t.Run("server", func(t *testing.T) {
		s := redlatchtest.NewServer(t)
		require.Contains(t, s.Kind(), "-server")
		addr = strings.TrimPrefix(s.URL(), "redis://")
		h, err := redlatchtest.NewClient(t, s, redlatch.WithWatchdogTimeout(time.Second)).Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		require.Equal(t, ":1", harness.Do(t, addr, "EXISTS", "orders"))
		require.NoError(t, h.Unlock(t.Context()))
	})
	_, err := testserver.Command(addr, "PING")
	require.Error(t, err)
}

// The message of an installed server that does not start is that of the server.
func TestServerDoesNotStart(t *testing.T) {
	bin := t.TempDir()
	script := []byte("#!/bin/sh\necho out of memory\nexit 1\n")
	require.NoError(t, os.WriteFile(filepath.Join(bin, testserver.Redis), script, 0o700))
	t.Setenv("PATH", bin)
	failed(t, func(tb testing.TB) bool {
		redlatchtest.NewServer(tb)
		return true
	}, "redlatchtest: cannot start a server: redis-server exited at once:\nout of memory\n")
}

func nothing(context.Context) error { return nil }

// An embedded server has an address, as any other, and its keys expire. What internal/contract tests in virtual
// time runs on such a server, with all kinds of objects.
func TestEmbedded(t *testing.T) {
	t.Parallel()
	const lease = time.Second
	s := redlatchtest.NewEmbedded(t)
	require.Equal(t, "embedded server", s.Kind())
	c := redlatchtest.NewClient(t, s)
	other, err := redlatch.Open(t.Context(), s.URL())
	require.NoError(t, err)
	defer other.Close()
	begin := time.Now()
	h, err := c.FencedLock("orders").Lock(t.Context(), lock.Lease(lease))
	require.NoError(t, err)
	require.EqualValues(t, 1, h.Token())
	require.NoError(t, other.FencedLock("orders").Do(t.Context(), nothing))
	require.GreaterOrEqual(t, time.Since(begin), lease-10*time.Millisecond)
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

	s.Close()
	s.Close()
	for _, c := range []*redlatch.Client{c, other} {
		require.Error(t, c.Ping(t.Context()))
		_, err := c.Lock("orders").TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrUnavailable)
	}
}

// In a bubble a test of permits, latches, rates and work that runs once takes no time.
func TestEmbeddedInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := redlatchtest.NewEmbedded(t)
		c, elsewhere := redlatchtest.NewClient(t, s), redlatchtest.NewClient(t, s)
		begin := time.Now()

		_, err := elsewhere.PermitSemaphore("encoders", semaphore.Permits(1)).Acquire(t.Context(), 1, lock.Lease(time.Hour))
		require.NoError(t, err)
		encoders := c.PermitSemaphore("encoders")
		_, err = encoders.Acquire(t.Context(), 1, lock.Wait(time.Minute))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Equal(t, time.Minute, time.Since(begin))
		permit, err := encoders.Acquire(t.Context(), 1)
		require.NoError(t, err)
		require.WithinDuration(t, begin.Add(time.Hour), time.Now(), 10*time.Millisecond)

		job := c.Once("report")
		ran, err := job.Run(t.Context(), "today", func(ctx context.Context) error {
			redlatchtest.Lose(t, ctx, lock.ReasonGone)
			return context.Cause(ctx)
		})
		require.True(t, ran)
		require.ErrorIs(t, err, lock.ErrLost)
		_, err = elsewhere.Once("report").MarkDone(t.Context(), "today")
		require.NoError(t, err)
		ran, err = job.Run(t.Context(), "today", nothing)
		require.NoError(t, err)
		require.False(t, ran)

		latch := c.CountDownLatch("import")
		_, err = latch.TrySetCount(t.Context(), 1)
		require.NoError(t, err)
		opens := latch.WaitChan(t.Context())
		synctest.Wait()
		require.Empty(t, opens)
		_, err = elsewhere.CountDownLatch("import").CountDown(t.Context())
		require.NoError(t, err)
		require.NoError(t, <-opens)

		rate := ratelimit.Rate(2, time.Hour)
		require.NoError(t, elsewhere.RateLimiter("mails", rate).TryAcquire(t.Context(), 2))
		mails := c.RateLimiter("mails", rate)
		require.ErrorIs(t, mails.TryAcquire(t.Context(), 1), lock.ErrNotAcquired)
		begin = time.Now()
		require.NoError(t, mails.Acquire(t.Context(), 1))
		require.WithinDuration(t, begin.Add(time.Hour), time.Now(), 10*time.Millisecond)
		_, err = mails.Release(t.Context(), 1)
		require.NoError(t, err)
		require.NoError(t, elsewhere.RateLimiter("mails").TryAcquire(t.Context(), 2))

		require.NoError(t, permit.Release(t.Context()))
		s.Close()
		synctest.Wait() // until the clients have noticed
		_, err = encoders.Acquire(t.Context(), 1, lock.Wait(time.Minute))
		require.ErrorIs(t, err, lock.ErrUnavailable)
	})
}

// Two clients of one embedded server, which identifies neither itself nor the database, are no two servers
// of a Redlock.
func TestEmbeddedServersOfARedLock(t *testing.T) {
	t.Parallel()
	var members []lock.Locker
	var servers []*redlatchtest.Server
	for range 3 {
		s := redlatchtest.NewEmbedded(t)
		servers, members = append(servers, s), append(members, redlatchtest.NewClient(t, s).Lock("report"))
	}
	c := redlatchtest.NewClient(t, servers[0])
	require.NoError(t, c.RedLock(members).Do(t.Context(), nothing))
	require.ErrorIs(t, c.RedLock([]lock.Locker{members[0], c.Lock("report"), members[1]}).Do(t.Context(), nothing), lock.ErrInvalid)
}
