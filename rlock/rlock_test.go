package rlock_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

func TestMain(m *testing.M) { harness.Main(m, workers) }

type kind struct {
	name string
	of   func(c *redlatch.Client, name string) harness.Lock
}

var kinds = []kind{
	{"lock", func(c *redlatch.Client, name string) harness.Lock { return c.Lock(name) }},
	{"non-reentrant", func(c *redlatch.Client, name string) harness.Lock { return c.Lock(name, rlock.NonReentrant()) }},
	{"fenced", func(c *redlatch.Client, name string) harness.Lock { return c.FencedLock(name) }},
	{"spin", func(c *redlatch.Client, name string) harness.Lock { return c.SpinLock(name) }},
	{"plain", func(c *redlatch.Client, name string) harness.Lock { return c.PlainLock(name) }},
}

// ofKind returns how to get at a lock of that kind.
func ofKind(name string) func(c *redlatch.Client, name string) harness.Lock {
	return kinds[slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })].of
}

// eachKind runs a test for every kind on every server.
func eachKind(t *testing.T, test func(t *testing.T, s *testserver.Server, of func(c *redlatch.Client, name string) harness.Lock)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, k := range kinds {
			t.Run(k.name, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				test(t, s, k.of)
			})
		}
	})
}

func mustLock(t *testing.T, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(t.Context(), opts...)
	require.NoError(t, err)
	return h
}

func TestReentryDoesNotWaitBehindTheQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.Lock("orders")
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h1, err := l.Lock(ctx)
		require.NoError(t, err)
		waited := make(chan error, 1)
		go func() { waited <- l.Do(t.Context(), func(context.Context) error { return nil }) }()
		harness.Eventually(t, 5*time.Second, "the waiter has subscribed", func() bool { return c.PubSub().Subscribed == 1 })
		h2, err := l.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, h2.Unlock(ctx))
		require.NoError(t, h1.Unlock(ctx))
		require.NoError(t, <-waited)
	})
}

func TestForceUnlockElsewhereWakesTheWaiterBehindAHolderHere(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		h := mustLock(t, c.Lock("orders"))
		waiter := make(chan error, 1)
		begin := time.Now()
		go func() {
			waiter <- c.Lock("orders").Do(context.Background(), func(context.Context) error { return nil })
		}()
		harness.Eventually(t, 5*time.Second, "the waiter listens", func() bool { return c.PubSub().Listeners == 1 })
		forced, err := harness.Client(t, s).Lock("orders").ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
		require.NoError(t, <-waiter)
		require.Less(t, time.Since(begin), 3*time.Second) // well before any poll
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	})
}

func TestAKeyOfTheWrongType(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		c := harness.Client(t, s)
		l := of(c, "orders")
		h := mustLock(t, l)
		harness.Do(t, s.Addr, "DEL", "orders")
		harness.Do(t, s.Addr, "RPUSH", "orders", "precious")
		for _, ctx := range []context.Context{t.Context(), lock.WithOwner(t.Context(), c.NewOwner())} {
			_, err := l.TryLock(ctx)
			require.ErrorContains(t, err, "WRONGTYPE")
		}
		_, err := of(harness.Client(t, s), "orders").Lock(t.Context())
		require.ErrorContains(t, err, "WRONGTYPE")
		require.NotErrorIs(t, err, lock.ErrNotAcquired)
		_, err = l.ForceUnlock(t.Context())
		require.ErrorContains(t, err, "WRONGTYPE")
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		require.Equal(t, ":1", harness.Do(t, s.Addr, "LLEN", "orders"))
	})
}

func TestFencingTokens(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.FencedLock("orders")
		var want int64
		check := func(h lock.Hold, err error) lock.Hold {
			t.Helper()
			require.NoError(t, err)
			want++
			require.Equal(t, want, h.Token())
			return h
		}
		for _, opts := range [][]lock.Option{nil, {lock.Lease(10 * time.Second)}, {lock.Wait(time.Second)}} {
			h := check(l.Lock(t.Context(), opts...))
			require.NoError(t, h.Unlock(t.Context()))
			require.Equal(t, want, h.Token())
		}
		h := check(l.TryLock(t.Context()))
		_, err := l.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, h.Unlock(t.Context()))

		// Re-entry bumps the counter; each hold keeps its own token.
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h1 := check(l.Lock(ctx))
		h2 := check(l.Lock(ctx))
		require.Equal(t, want-1, h1.Token())
		require.NoError(t, h2.Unlock(ctx))
		require.NoError(t, h1.Unlock(ctx))

		// Being handed over counts too.
		h = check(l.Lock(t.Context()))
		next := make(chan lock.Hold)
		go func() {
			h, _ := l.Lock(context.Background())
			next <- h
		}()
		harness.Eventually(t, 5*time.Second, "the waiter has subscribed", func() bool { return c.PubSub().Subscribed == 1 })
		require.NoError(t, h.Unlock(t.Context()))
		h = check(<-next, nil)
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, fmt.Sprintf("$%d", len(fmt.Sprint(want))), harness.Do(t, s.Addr, "GET", "redisson_lock_token:{orders}"))
		require.Equal(t, int64(-1), harness.PTTL(t, s.Addr, "redisson_lock_token:{orders}"))
		require.Zero(t, mustLock(t, c.Lock("plain")).Token())

		h = check(l.Lock(t.Context()))
		reset, err := l.ResetTokens(t.Context())
		require.NoError(t, err)
		require.False(t, reset, "of a lock that is held")
		require.NoError(t, h.Unlock(t.Context()))
		reset, err = l.ResetTokens(t.Context())
		require.NoError(t, err)
		require.True(t, reset)
		want = 0
		check(l.TryLock(t.Context()))
	})
}

func TestGuard(t *testing.T) {
	var g rlock.Guard
	require.NoError(t, g.Check(3))
	require.NoError(t, g.Check(3))
	require.ErrorIs(t, g.Check(2), rlock.ErrStaleToken)
	require.NoError(t, g.Check(7))
	require.ErrorIs(t, g.Check(6), rlock.ErrStaleToken)
	require.ErrorIs(t, g.Check(0), lock.ErrInvalid)
	require.ErrorIs(t, g.Check(-1), lock.ErrInvalid)
	require.Equal(t, int64(7), g.Highest())
	require.ErrorIs(t, rlock.NewGuard(g.Highest()).Check(6), rlock.ErrStaleToken)
}

func TestBackoff(t *testing.T) {
	exponential := rlock.ExponentialBackoff(10*time.Millisecond, 100*time.Millisecond, 3)
	for range 100 {
		for i, bounds := range [][2]time.Duration{{10, 10}, {30, 31}, {90, 92}, {100, 100}, {100, 100}, {100, 100}} {
			pause := exponential(i + 1)
			require.GreaterOrEqual(t, pause, bounds[0]*time.Millisecond)
			require.LessOrEqual(t, pause, bounds[1]*time.Millisecond)
			require.Equal(t, 30*time.Millisecond, rlock.ConstantBackoff(30*time.Millisecond)(i+1))
		}
	}
	require.Equal(t, 100*time.Millisecond, exponential(1_000_000))
	require.Equal(t, time.Millisecond, rlock.ExponentialBackoff(-1, -1, -1)(5))
	require.Equal(t, time.Millisecond, rlock.ConstantBackoff(0)(1))
}

// asleep waits until n attempts were made since the server's statistics were
// reset, and none is under way.
func asleep(t *testing.T, s *testserver.Server, n int) {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	defer conn.Close()
	harness.Eventually(t, 5*time.Second, fmt.Sprintf("%d attempts, and then quiet", n), func() bool {
		calls := harness.Commands(t, conn)
		return calls["evalsha"] >= n && harness.GoroutinesIn("(*hold).Try") == 0
	})
}

// splitName cuts the name of a subtest of eachKind into the server's and the
// kind's.
func splitName(name string) (server, kind string) {
	parts := strings.Split(name, "/")
	return parts[1], parts[2]
}
