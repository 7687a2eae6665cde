package rlock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
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

func TestLockAndUnlockAgainAndAgain(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		l := of(harness.Client(t, s), "orders")
		for range 3 {
			require.False(t, harness.IsLocked(t, l))
			h := mustLock(t, l)
			require.True(t, harness.IsLocked(t, l))
			require.Equal(t, 1, harness.HoldCount(t, l, h.Owner()))
			require.NoError(t, h.Unlock(t.Context()))
			require.Zero(t, harness.HoldCount(t, l, h.Owner()))
		}
		require.False(t, harness.IsLocked(t, l))
	})
}

func TestTheHoldIsOfNobodyElse(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		h := mustLock(t, of(c, "orders"))
		defer h.Unlock(t.Context())
		for _, stranger := range []lock.Owner{c.NewOwner(), other.NewOwner()} {
			assert.Zero(t, harness.HoldCount(t, of(other, "orders"), stranger))
			assert.ErrorIs(t, of(other, "orders").Unlock(lock.WithOwner(t.Context(), stranger)), lock.ErrNotHeld)
		}
		for _, c := range []*redlatch.Client{c, other} {
			assert.True(t, harness.IsLocked(t, of(c, "orders")))
			_, err := of(c, "orders").TryLock(t.Context())
			assert.ErrorIs(t, err, lock.ErrNotAcquired)
		}
		assert.Equal(t, 1, harness.HoldCount(t, of(c, "orders"), h.Owner()))
	})
}

func TestReentry(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		c := harness.Client(t, s)
		l := of(c, "orders")
		o := c.NewOwner()
		ctx := lock.WithOwner(t.Context(), o)

		h1, err := l.TryLock(ctx)
		require.NoError(t, err)
		require.Equal(t, o, h1.Owner())
		h2, err := of(c, "orders").TryLock(ctx)
		if _, kind := splitName(t.Name()); kind == "non-reentrant" {
			require.ErrorIs(t, err, lock.ErrReentered)
			_, err = l.Lock(ctx)
			require.ErrorIs(t, err, lock.ErrReentered)
			_, err = l.Lock(ctx, lock.Wait(time.Minute))
			require.ErrorIs(t, err, lock.ErrReentered)
			require.Equal(t, 1, harness.HoldCount(t, l, o))
			require.NoError(t, h1.Unlock(ctx))
			require.False(t, harness.IsLocked(t, l))
			return
		}
		require.NoError(t, err)
		require.Equal(t, 2, harness.HoldCount(t, l, o))
		require.NoError(t, h2.Unlock(ctx))
		require.Equal(t, 1, harness.HoldCount(t, l, o))
		_, err = l.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, h1.Unlock(ctx))
		require.False(t, harness.IsLocked(t, l))
		require.ErrorIs(t, h1.Unlock(ctx), lock.ErrNotHeld)
	})
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

func TestReentryNeitherShortensTheLeaseNorDoesItsUnlock(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h1, err := c.Lock("orders").Lock(ctx, lock.Lease(10*time.Minute))
		require.NoError(t, err)
		h2, err := c.Lock("orders").Lock(ctx, lock.Lease(time.Second))
		require.NoError(t, err)
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(590_000))
		require.NoError(t, h2.Unlock(ctx))
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(590_000))
		require.NoError(t, h1.Unlock(ctx))
	})
}

func TestUnlockByOwnerInAnotherProcess(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		here, there := harness.Client(t, s), harness.Client(t, s)
		h := mustLock(t, of(here, "orders"), lock.Lease(time.Minute))
		o, err := lock.ParseOwner(h.Owner().String())
		require.NoError(t, err)
		require.NoError(t, of(there, "orders").Unlock(lock.WithOwner(t.Context(), o)))
		require.False(t, harness.IsLocked(t, of(here, "orders")))
		var lost *lock.LostError
		require.ErrorAs(t, h.Unlock(t.Context()), &lost)
		require.Equal(t, lock.ReasonGone, lost.Reason)
		require.ErrorIs(t, of(there, "orders").Unlock(t.Context()), lock.ErrInvalid)
	})
}

func TestUnlockByOwnerEndsTheLatestHoldOfThisProcess(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.Lock("orders")
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h1, err := l.Lock(ctx)
		require.NoError(t, err)
		h2, err := l.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, l.Unlock(ctx))
		require.ErrorIs(t, context.Cause(h2.Context()), context.Canceled)
		require.NoError(t, h1.Context().Err())
		require.ErrorIs(t, h2.Unlock(ctx), lock.ErrNotHeld)
		require.NoError(t, l.Unlock(ctx))
		require.ErrorIs(t, l.Unlock(ctx), lock.ErrNotHeld)
		harness.NothingLeft(t, s.Addr)
	})
}

// An owner made for one acquisition can be taken over as a name. Its first hold
// then shares the lock and must not take the second one's share with it.
func TestAnOwnerUsedAgainIsCounted(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.Lock("orders")
		h1 := mustLock(t, l)
		h2, err := l.Lock(lock.WithOwner(t.Context(), h1.Owner()))
		require.NoError(t, err)
		require.Equal(t, 2, harness.HoldCount(t, l, h1.Owner()))
		require.NoError(t, h1.Unlock(t.Context()))
		require.Equal(t, 1, harness.HoldCount(t, l, h1.Owner()))
		require.NoError(t, h2.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestTTL(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		l := of(harness.Client(t, s), "orders")
		h := mustLock(t, l, lock.Lease(time.Hour))
		ttl, err := l.TTL(t.Context())
		require.NoError(t, err)
		assert.InDelta(t, time.Hour, ttl, float64(time.Second))
		assert.LessOrEqual(t, ttl, time.Hour)
		require.NoError(t, h.Unlock(t.Context()))
		ttl, err = l.TTL(t.Context())
		require.NoError(t, err)
		assert.Zero(t, ttl)
		h = mustLock(t, l)
		ttl, err = l.TTL(t.Context())
		require.NoError(t, err)
		assert.InDelta(t, redlatch.DefaultWatchdogTimeout, ttl, float64(time.Second))
		require.NoError(t, h.Unlock(t.Context()))
	})
}

func TestAKeyWithoutExpiryIsNotMistakenForSuccess(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		l := of(harness.Client(t, s), "orders")
		harness.Do(t, s.Addr, "HSET", "orders", "somebody", "1")
		_, err := l.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		_, err = l.Lock(t.Context(), lock.Wait(50*time.Millisecond))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		ttl, err := l.TTL(t.Context())
		require.NoError(t, err)
		require.Equal(t, lock.NoExpiry, ttl)
	})
}

func TestAWaiterGetsInWhenTheLeaseIsOver(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		const lease = 700 * time.Millisecond
		l, other := of(harness.Client(t, s), "orders"), of(harness.Client(t, s), "orders")
		begin := time.Now()
		h1 := mustLock(t, l, lock.Lease(lease))
		h2 := mustLock(t, other)
		waited := time.Since(begin)
		assert.GreaterOrEqual(t, waited, lease-5*time.Millisecond)
		assert.Less(t, waited, lease+time.Second)
		harness.Eventually(t, time.Second, "the first hold knows", func() bool { return h1.Context().Err() != nil })
		assert.ErrorIs(t, context.Cause(h1.Context()), lock.ErrLost)
		assert.Zero(t, h1.Remaining())
		assert.ErrorIs(t, h1.Unlock(t.Context()), lock.ErrLost)
		assert.NoError(t, h2.Unlock(t.Context()))
	})
}

func TestWaitIsBounded(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		l := of(harness.Client(t, s), "orders")
		h := mustLock(t, l)
		for _, l := range []harness.Lock{l, of(harness.Client(t, s), "orders")} {
			const wait = 300 * time.Millisecond
			begin := time.Now()
			_, err := l.Lock(t.Context(), lock.Wait(wait))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			assert.GreaterOrEqual(t, time.Since(begin), wait)
			assert.Less(t, time.Since(begin), wait+time.Second)

			_, err = l.Lock(t.Context(), lock.Wait(0))
			require.ErrorIs(t, err, lock.ErrNotAcquired)

			boom := errors.New("boom")
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(50*time.Millisecond, func() { cancel(boom) })
			_, err = l.Lock(ctx)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.ErrorIs(t, err, boom)
			_, err = l.Lock(ctx)
			require.ErrorIs(t, err, boom)
		}
		require.NoError(t, h.Unlock(t.Context()))
		require.False(t, harness.IsLocked(t, l))
	})
}

func TestForceUnlock(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		c := harness.Client(t, s)
		l := of(c, "orders")
		forced, err := l.ForceUnlock(t.Context())
		require.NoError(t, err)
		require.False(t, forced)
		h := mustLock(t, l)
		waiter := make(chan error, 1)
		go func() { waiter <- l.Do(context.Background(), func(context.Context) error { return nil }) }()
		forced, err = l.ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
		require.NoError(t, <-waiter)
		require.False(t, harness.IsLocked(t, l))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

		harness.Do(t, s.Addr, "SET", "orders", "precious")
		_, err = l.ForceUnlock(t.Context())
		require.ErrorContains(t, err, "WRONGTYPE")
		require.Equal(t, ":1", harness.Do(t, s.Addr, "EXISTS", "orders"))
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
		harness.Do(t, s.Addr, "SET", "orders", "precious")
		for _, ctx := range []context.Context{t.Context(), lock.WithOwner(t.Context(), c.NewOwner())} {
			_, err := l.TryLock(ctx)
			require.ErrorContains(t, err, "WRONGTYPE")
		}
		_, err := of(harness.Client(t, s), "orders").Lock(t.Context())
		require.ErrorContains(t, err, "WRONGTYPE")
		require.NotErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		require.Equal(t, "$8", harness.Do(t, s.Addr, "GET", "orders"))
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

func TestTwoGoroutinesWithOneLockAndOneContextNeverHoldTogether(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		l := of(harness.Client(t, s), "orders")
		ctx := t.Context()
		var inside, entered atomic.Int32
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 25 {
					h, err := l.Lock(ctx)
					if !assert.NoError(t, err) {
						return
					}
					assert.Equal(t, int32(1), inside.Add(1))
					entered.Add(1)
					inside.Add(-1)
					assert.NoError(t, h.Unlock(ctx))
				}
			})
		}
		wg.Wait()
		require.Equal(t, int32(200), entered.Load())
		require.False(t, harness.IsLocked(t, l))
	})
}

func TestManyClientsExcludeEachOther(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		const clients, passes = 16, 25
		counter := 0 // protected by the lock alone
		var wg sync.WaitGroup
		for range clients {
			c := harness.Client(t, s)
			wg.Go(func() {
				for range passes {
					assert.NoError(t, of(c, "orders").Do(context.Background(), func(context.Context) error {
						counter++
						return nil
					}))
				}
			})
		}
		wg.Wait()
		require.Equal(t, clients*passes, counter)
	})
}

func TestDo(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).Lock("orders")
		boom := errors.New("boom")

		require.NoError(t, l.Do(t.Context(), func(ctx context.Context) error {
			require.True(t, harness.IsLocked(t, l))
			return ctx.Err()
		}))
		require.ErrorIs(t, l.Do(t.Context(), func(context.Context) error { return boom }), boom)
		require.False(t, harness.IsLocked(t, l))

		require.PanicsWithValue(t, "boom", func() {
			_ = l.Do(t.Context(), func(context.Context) error { panic("boom") })
		})
		require.False(t, harness.IsLocked(t, l))

		// A loss while fn ran is joined to what fn returned.
		err := l.Do(t.Context(), func(context.Context) error {
			harness.Do(t, s.Addr, "DEL", "orders")
			return boom
		})
		require.ErrorIs(t, err, boom)
		require.ErrorIs(t, err, lock.ErrLost)

		require.ErrorIs(t, l.Do(t.Context(), nil), lock.ErrInvalid)
		require.False(t, harness.IsLocked(t, l))
	})
}

func TestHoldContext(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).Lock("orders")
		type key struct{}
		parent, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
		defer cancel()

		h, err := l.Lock(parent)
		require.NoError(t, err)
		require.Equal(t, "value", h.Context().Value(key{}))
		require.Same(t, h.Context(), h.Context())
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(parent))
		require.Equal(t, context.Canceled, context.Cause(h.Context()))

		// The end of the parent ends the context, not the hold; Unlock still works.
		h, err = l.Lock(parent)
		require.NoError(t, err)
		cancel()
		require.Error(t, h.Context().Err())
		require.Greater(t, h.Remaining(), 20*time.Second)
		require.True(t, harness.IsLocked(t, l))
		require.NoError(t, h.Unlock(parent))
		require.False(t, harness.IsLocked(t, l))
		require.ErrorIs(t, h.Unlock(parent), lock.ErrNotHeld)
		require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrNotHeld)
	})
}

func TestExtend(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).Lock("orders")
		h := mustLock(t, l, lock.Lease(time.Second))
		require.LessOrEqual(t, h.Remaining(), time.Second)
		require.NoError(t, h.Extend(t.Context(), time.Minute))
		require.Greater(t, h.Remaining(), 50*time.Second)
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(50_000))
		require.NoError(t, h.Extend(t.Context(), time.Second)) // at least, not at most
		require.Greater(t, h.Remaining(), 50*time.Second)
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(50_000))
		require.ErrorIs(t, h.Extend(t.Context(), 0), lock.ErrInvalid)
		require.ErrorIs(t, h.Extend(t.Context(), -time.Second), lock.ErrInvalid)

		harness.Do(t, s.Addr, "DEL", "orders")
		require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
		require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	})
}

// What ends a hold is its time, not when somebody notices.
func TestAHoldWhoseTimeIsOverIsLostAtOnce(t *testing.T) {
	for what, end := range map[string]func(lock.Hold) error{
		"Unlock": func(h lock.Hold) error { return h.Unlock(context.Background()) },
		"Extend": func(h lock.Hold) error { return h.Extend(context.Background(), time.Second) },
	} {
		t.Run(what, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				c := harness.Client(t, s)
				for range 20 {
					h := mustLock(t, c.Lock("orders"), lock.Lease(20*time.Millisecond))
					for h.Remaining() > 0 {
						runtime.Gosched()
					}
					require.ErrorIs(t, end(h), lock.ErrLost)
					require.Error(t, h.Context().Err())
				}
			})
		})
	}
}

func TestMaxHold(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Second))
		h := mustLock(t, c.Lock("orders"), lock.MaxHold(1500*time.Millisecond))
		<-h.Context().Done()
		var lost *lock.LostError
		require.ErrorAs(t, context.Cause(h.Context()), &lost)
		require.Equal(t, lock.ReasonMaxHold, lost.Reason)
		require.Equal(t, "orders", lost.Name)
		require.Equal(t, h.Owner(), lost.Owner)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		harness.NothingLeft(t, s.Addr)
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
