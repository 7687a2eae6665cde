package redlatchtest_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/fairlock"
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

// The embedded server supports what locks need: expiry, renewal, messages, re-entry and
// tokens.
func TestEmbedded(t *testing.T) {
	t.Parallel()
	const lease, timeout = 200 * time.Millisecond, 1500 * time.Millisecond
	for name, of := range map[string]func(c *redlatch.Client) lock.Locker{
		"lock":   func(c *redlatch.Client) lock.Locker { return c.Lock("orders") },
		"fenced": func(c *redlatch.Client) lock.Locker { return c.FencedLock("orders") },
		"plain":  func(c *redlatch.Client) lock.Locker { return c.PlainLock("orders") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := embedded(t)
			c, other := redlatchtest.NewClient(t, s, redlatch.WithWatchdogTimeout(timeout)), redlatchtest.NewClient(t, s)
			begin := time.Now()
			h, err := of(c).Lock(t.Context(), lock.Lease(lease))
			require.NoError(t, err)
			require.Equal(t, name == "fenced", h.Token() == 1)
			require.NoError(t, of(other).Do(t.Context(), nothing))
			require.GreaterOrEqual(t, time.Since(begin), lease-10*time.Millisecond)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

			h, err = of(c).Lock(t.Context())
			require.NoError(t, err)
			_, err = of(other).Lock(t.Context(), lock.Wait(timeout+timeout/3))
			require.ErrorIs(t, err, lock.ErrNotAcquired)

			waited := make(chan error, 2)
			for _, waiting := range []*redlatch.Client{c, other} { // by hand-off, and by message
				go func() { waited <- of(waiting).Do(context.Background(), nothing) }()
				require.Eventually(t, func() bool { return waiting.PubSub().Subscribed == 1 && waiting.Stats().Waiting == 1 }, 5*time.Second, time.Millisecond)
			}
			require.NoError(t, h.Unlock(t.Context()))
			require.NoError(t, <-waited)
			require.NoError(t, <-waited)
		})
	}
	t.Run("re-entry", func(t *testing.T) {
		t.Parallel()
		s := embedded(t)
		c := redlatchtest.NewClient(t, s)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		require.NoError(t, c.Lock("orders").Do(ctx, func(ctx context.Context) error { return c.Lock("orders").Do(ctx, nothing) }))
		locked, err := redlatchtest.NewClient(t, s).Lock("orders").IsLocked(t.Context())
		require.NoError(t, err)
		require.False(t, locked)
		c.Close()
		s.Close()
		s.Close()
	})
}

// The embedded server supports fair locks and read-write locks.
func TestEmbeddedOtherKinds(t *testing.T) {
	t.Parallel()
	t.Run("fair", func(t *testing.T) {
		t.Parallel()
		embeddedFairLock(t)
	})
	t.Run("read-write", func(t *testing.T) {
		t.Parallel()
		embeddedReadWriteLock(t)
	})
}

func embeddedFairLock(t *testing.T) {
	s := embedded(t)
	c, other := redlatchtest.NewClient(t, s), redlatchtest.NewClient(t, s)
	ctx := t.Context()
	fair := c.FairLock("orders")
	h, err := fair.Lock(ctx)
	require.NoError(t, err)
	// Waiters are served in order of arrival. Heartbeats keep their queue positions.
	var queue []fairlock.Waiter
	served := make(chan int, 4)
	var wg sync.WaitGroup
	for i := range cap(served) {
		from := []*redlatch.Client{c, other}[i%2].FairLock("orders")
		wg.Go(func() {
			assert.NoError(t, from.Do(ctx, func(context.Context) error { served <- i; return nil }))
		})
		require.Eventually(t, func() bool {
			queue, err = fair.Queue(ctx)
			return err == nil && len(queue) == i+1
		}, 5*time.Second, 5*time.Millisecond)
	}
	last := len(queue) - 1
	require.Eventually(t, func() bool {
		later, err := fair.Queue(ctx)
		return err == nil && len(later) == len(queue) && later[last].Deadline.After(queue[last].Deadline)
	}, 10*time.Second, 50*time.Millisecond)
	_, err = fair.Lock(ctx, lock.Wait(100*time.Millisecond))
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	require.NoError(t, h.Unlock(ctx))
	wg.Wait()
	for i := range cap(served) {
		require.Equal(t, i, <-served)
	}
	named := lock.WithOwner(ctx, c.NewOwner())
	require.NoError(t, fair.Do(named, func(ctx context.Context) error { return fair.Do(ctx, nothing) }))
}

func embeddedReadWriteLock(t *testing.T) {
	const timeout = 3 * time.Second
	s := embedded(t)
	c := redlatchtest.NewClient(t, s, redlatch.WithWatchdogTimeout(timeout))
	other := redlatchtest.NewClient(t, s, redlatch.WithWatchdogTimeout(timeout))
	ctx := t.Context()
	var wg sync.WaitGroup
	// Readers share the lock and are renewed. A waiting writer blocks new readers.
	rw := c.RWLock("catalogue")
	first, err := rw.Read().Lock(ctx)
	require.NoError(t, err)
	second, err := other.RWLock("catalogue").Read().Lock(ctx)
	require.NoError(t, err)
	before, err := rw.Read().TTL(ctx)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		ttl, err := rw.Read().TTL(ctx)
		longer := ttl > before
		before = ttl
		return err == nil && longer
	}, 10*time.Second, 10*time.Millisecond)
	_, err = rw.Write().Lock(ctx, lock.Wait(100*time.Millisecond))
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	wg.Go(func() { assert.NoError(t, rw.Write().Do(ctx, nothing)) })
	require.Eventually(t, func() bool {
		h, err := other.RWLock("catalogue").Read().TryLock(ctx)
		if err == nil {
			assert.NoError(t, h.Unlock(ctx))
		}
		return errors.Is(err, lock.ErrNotAcquired)
	}, 5*time.Second, 5*time.Millisecond)
	require.NoError(t, first.Unlock(ctx))
	require.NoError(t, second.Unlock(ctx))
	wg.Wait()

	// A downgrade.
	named := lock.WithOwner(ctx, c.NewOwner())
	h, err := rw.Write().Lock(named)
	require.NoError(t, err)
	require.NoError(t, rw.Read().Do(named, func(ctx context.Context) error {
		require.NoError(t, h.Unlock(ctx))
		_, err := rw.Write().TryLock(ctx)
		require.ErrorIs(t, err, lock.ErrUpgrade)
		return other.RWLock("catalogue").Read().Do(t.Context(), nothing)
	}))
	locked, err := rw.Read().IsLocked(ctx)
	require.NoError(t, err)
	require.False(t, locked)
}

// The embedded server supports count-down latches.
func TestEmbeddedLatch(t *testing.T) {
	t.Parallel()
	s := embedded(t)
	c, other := redlatchtest.NewClient(t, s), redlatchtest.NewClient(t, s)
	ctx := t.Context()
	l, theirs := c.CountDownLatch("import"), other.CountDownLatch("import")
	require.NoError(t, l.Wait(ctx))
	for range 20 {
		set, err := l.TrySetCount(ctx, 2)
		require.NoError(t, err)
		require.True(t, set)
		set, err = theirs.TrySetCount(ctx, 3)
		require.NoError(t, err)
		require.False(t, set)
		waited := make(chan error, 10)
		for i := range cap(waited) {
			go func() { waited <- []*countdown.Latch{l, theirs}[i%2].Wait(context.Background()) }()
		}
		require.Eventually(t, func() bool { return other.PubSub().Listeners == 1 }, 5*time.Second, time.Millisecond)
		left, err := l.CountDown(ctx)
		require.NoError(t, err)
		require.Equal(t, 1, left)
		_, err = theirs.CountDown(ctx)
		require.NoError(t, err)
		for range cap(waited) {
			require.NoError(t, <-waited)
		}
	}
	deleted, err := l.Delete(ctx)
	require.NoError(t, err)
	require.False(t, deleted)
}

// The embedded server supports multi-locks and Redlocks.
func TestEmbeddedSeveralLocks(t *testing.T) {
	t.Parallel()
	const n = 3
	var (
		servers []*redlatchtest.Server
		clients []*redlatch.Client
		members []lock.Locker
	)
	for range n {
		s := embedded(t)
		c := redlatchtest.NewClient(t, s)
		servers, clients, members = append(servers, s), append(clients, c), append(members, c.Lock("report"))
	}
	ctx := t.Context()
	var wg sync.WaitGroup
	counters := map[string]*int{}
	for kind, l := range map[string]lock.Locker{
		"multi": clients[0].MultiLock(clients[0].Lock("a"), clients[0].Lock("b"), clients[1].Lock("a")),
		"red":   clients[0].RedLock(members...),
	} {
		h, err := l.TryLock(ctx)
		require.NoError(t, err, kind)
		_, err = l.TryLock(ctx)
		require.ErrorIs(t, err, lock.ErrNotAcquired, kind)
		require.NoError(t, h.Unlock(ctx), kind)
		counters[kind] = new(int)
		for range 10 {
			wg.Go(func() {
				assert.NoError(t, l.Do(ctx, func(context.Context) error { *counters[kind]++; return nil }), kind)
			})
		}
		wg.Wait()
		require.Equal(t, 10, *counters[kind], kind)
	}
	// Two clients of one server, which identifies neither itself nor the database.
	twin := clients[0].RedLock(members[0], redlatchtest.NewClient(t, servers[0]).Lock("report"), members[1])
	require.ErrorIs(t, twin.Do(ctx, nothing), lock.ErrInvalid)
}
