package semaphore_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// Every kind of request creates the semaphore, in the same script, each time that it is gone.
func TestRequestsCreateSemaphore(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		ctx, conn := t.Context(), harness.Conn(t, s.Addr)
		loadScripts(t, s.Addr)
		for what, r := range map[string]struct {
			do   func(sem anySemaphore) error
			free int
		}{
			"TryAcquire": {func(sem anySemaphore) error { return only(sem.tryAcquire(ctx, 2)) }, 1},
			"Acquire":    {func(sem anySemaphore) error { return only(sem.acquire(ctx, 1)) }, 2},
			"TryAcquire of too many": {func(sem anySemaphore) error {
				require.Error(t, only(sem.tryAcquire(ctx, 4)))
				return nil
			}, 3},
			"AddPermits": {func(sem anySemaphore) error { return sem.AddPermits(ctx, -1) }, 2},
		} {
			harness.Do(t, s.Addr, "FLUSHDB")
			sem := of(harness.Client(t, s), "orders", semaphore.Permits(3))
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			require.NoError(t, r.do(sem), what)
			require.Equal(t, 1, harness.Commands(t, conn)["evalsha"], what)
			require.Equal(t, r.free, available(t, sem), what)
		}

		// The client has used the semaphore before the server loses it.
		sem := of(harness.Client(t, s), "orders", semaphore.Permits(3))
		mustAcquire(t, sem, 1)
		harness.Do(t, s.Addr, "FLUSHDB")
		mustAcquire(t, sem, 2)
		require.Equal(t, 1, available(t, sem))

		// An existing semaphore keeps its size.
		mustAcquire(t, of(harness.Client(t, s), "orders", semaphore.Permits(7)), 1)
		require.Zero(t, available(t, sem))
	})
}

// What creates the semaphore wakes those that wait for one.
func TestCreationWakesWaiters(t *testing.T) {
	ways := map[string]func(ctx context.Context, sem anySemaphore) error{
		"Permits": func(ctx context.Context, sem anySemaphore) error {
			return sem.do(ctx, func(context.Context) error { return nil })
		},
		"TrySetPermits": func(ctx context.Context, sem anySemaphore) error { return only(sem.TrySetPermits(ctx, 2)) },
		"SetPermits":    func(ctx context.Context, sem anySemaphore) error { return sem.SetPermits(ctx, 2) },
		"AddPermits to fewer than none": func(ctx context.Context, sem anySemaphore) error {
			return errors.Join(sem.AddPermits(ctx, -3), sem.AddPermits(ctx, 5))
		},
	}
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		for way, create := range ways {
			t.Run(way, func(t *testing.T) {
				t.Parallel()
				here := harness.Client(t, s)
				w := startBehind(t, here, of(here, way), 1)
				// It has found that it cannot join the wait queue: its next attempt is the poll.
				harness.Eventually(t, soon, "it is parked", func() bool { return time.Since(w.Begun) > 2*bargingTime && harness.Waiting(1, here) })
				var opts []semaphore.Option
				if way == "Permits" {
					opts = append(opts, semaphore.Permits(2))
				}
				begin := time.Now()
				requireMessages(t, here, 1, func() { require.NoError(t, create(t.Context(), of(harness.Client(t, s), way, opts...))) })
				w.Got().release(t)
				require.Less(t, w.At.Sub(begin), slack)
			})
		}
	})
}

// Without a semaphore clients do not queue. No message tells of one that is created by hand.
func TestPollFindsSemaphoreCreatedByHand(t *testing.T) {
	eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, of semaphoreOf) {
		w := start(t, of(s.Client(t), "orders"), 1)
		time.Sleep(time.Minute)
		require.NoError(t, s.Set("orders", "1"))
		begin := time.Now()
		w.Got()
		require.LessOrEqual(t, time.Since(begin), 5*time.Second)
	})
}

func TestMissingSemaphore(t *testing.T) {
	// matches fails the test unless err matches want, and none of the others.
	matches := func(t *testing.T, want, err error) {
		t.Helper()
		for _, kind := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate, lock.ErrClosed, semaphore.ErrNotFound} {
			require.Equal(t, kind == want, errors.Is(err, kind), "%v matches %v", err, kind)
		}
	}
	eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, of semaphoreOf) {
		const warning = "does not exist"
		var log harness.Log
		c := s.Client(t, redlatch.WithLogger(log.Logger()))
		sem := of(c, "orders")
		_, err := sem.tryAcquire(t.Context(), 1)
		matches(t, semaphore.ErrNotFound, err)
		require.ErrorContains(t, err, `"orders"`)
		_, err = sem.acquire(t.Context(), 1, lock.Wait(0))
		matches(t, semaphore.ErrNotFound, err)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = sem.tryAcquire(ctx, 1)
		matches(t, lock.ErrNotAcquired, err)
		require.NotContains(t, log.String(), warning)

		for range 2 {
			_, err = of(c, "orders").acquire(t.Context(), 1, lock.Wait(500*time.Millisecond))
			matches(t, lock.ErrNotAcquired, err)
			require.ErrorContains(t, err, "did not exist; semaphore.Permits or TrySetPermits creates it")
		}
		require.Equal(t, 1, strings.Count(log.String(), warning), log.String())

		// No free permit is something else.
		withPermits(t, of(s.Client(t), "orders"), 0)
		_, err = sem.tryAcquire(t.Context(), 1)
		matches(t, lock.ErrNotAcquired, err)
		require.NotContains(t, err.Error(), "exist")
		exists, err := sem.Exists(t.Context())
		require.NoError(t, err)
		require.True(t, exists)
	})
}

// A client logs each name once, and remembers at most 1,000 names.
func TestWarningsAreBounded(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		var log harness.Log
		c := s.Client(t, redlatch.WithLogger(log.Logger()))
		warnings := func(name int) int {
			harness.NotAcquired(t, c.Semaphore(fmt.Sprint(name)).Acquire(t.Context(), 1, lock.Wait(time.Millisecond)))
			return strings.Count(log.String(), "does not exist")
		}
		for name := range 1001 {
			require.Equal(t, name+1, warnings(name))
		}
		require.Equal(t, 1001, warnings(1000))
		require.Equal(t, 1002, warnings(0), "it is forgotten")
	})
}

// The permits of a release that creates the semaphore are among its permits. A release that releases
// nothing creates none.
func TestReleaseCreatesSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		sem := plain{c.Semaphore("plain", semaphore.Permits(8))}
		held := mustAcquire(t, sem, 3)
		harness.Do(t, s.Addr, "FLUSHDB")
		held.release(t)
		require.Equal(t, 8, available(t, sem))

		harness.Do(t, s.Addr, "FLUSHDB")
		released, err := sem.ReleaseIfExists(t.Context(), 1)
		require.NoError(t, err)
		require.False(t, released)
		released, err = c.PermitSemaphore("none", semaphore.Permits(8)).TryRelease(t.Context(), unknown)
		require.NoError(t, err)
		require.False(t, released)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "plain", "none"))

		n, err := sem.Drain(t.Context())
		require.NoError(t, err)
		require.Equal(t, 8, n)
		released, err = sem.ReleaseIfExists(t.Context(), 1)
		require.NoError(t, err)
		require.True(t, released)
	})
}

// Acquired permits that outlive their number of free permits are among those of the semaphore that is created
// again, and no longer expire with it.
func TestOutlivingPermitsCount(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		e := c.PermitSemaphore("orders", semaphore.Permits(8))
		held := take(t, e, 3, semaphore.Forever())
		for _, tt := range []struct {
			what string
			do   func() error
			want counts
		}{
			{"add", func() error { return e.AddPermits(t.Context(), 1) }, counts{9, 6, 3}},
			{"set", func() error { return e.SetPermits(t.Context(), 7) }, counts{7, 4, 3}},
			{"remove", func() error { return e.AddPermits(t.Context(), -6) }, counts{2, -1, 3}},
			{"add without Permits", func() error { return c.PermitSemaphore("orders").AddPermits(t.Context(), 2) }, counts{5, 2, 3}},
			{"acquire", func() error { return only(e.Acquire(t.Context(), 2, semaphore.Forever())) }, counts{8, 3, 5}},
			{"release", func() error { return held.Release(t.Context()) }, counts{8, 6, 2}},
		} {
			s.Del("orders")
			s.SetTTL(timeoutsKey("orders"), time.Minute)
			require.NoError(t, tt.do(), tt.what)
			require.Equal(t, tt.want, countsOf(t, e), tt.what)
			require.Zero(t, s.TTL(timeoutsKey("orders")), tt.what)
		}
	})
}

// Callers that wait for a semaphore that is deleted go on waiting.
func TestDelete(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c := harness.Client(t, s)
		sem := of(c, "orders")
		del := func(want bool) {
			t.Helper()
			deleted, err := sem.Delete(t.Context())
			require.NoError(t, err)
			require.Equal(t, want, deleted)
			require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders", timeoutsKey("orders"), queueKey("orders"), heartbeatKey("orders")))
		}
		del(false)
		withPermits(t, sem, 2)
		mustAcquire(t, sem, 2)
		waiter := start(t, sem, 1)
		requireQueue(t, s.Addr, "orders", c)
		del(true)
		del(false)
		withPermits(t, of(harness.Client(t, s), "orders"), 1)
		waiter.Got()
		del(true)
		harness.NothingStays(t, s.Addr)
	})
}

func TestStats(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c := harness.Client(t, s)
		sem := of(c, "orders")
		requireStats := func(total, free, waiting int) {
			t.Helper()
			if e, ok := sem.(permitSem); ok {
				stats, err := e.Stats(t.Context())
				require.NoError(t, err)
				require.Equal(t, semaphore.PermitStats{Total: total, Available: free, Taken: total - free, Waiting: waiting}, stats)
				return
			}
			stats, err := sem.(plain).Stats(t.Context())
			require.NoError(t, err)
			require.Equal(t, semaphore.Stats{Available: free, Waiting: waiting}, stats)
		}
		requireStats(0, 0, 0)
		withPermits(t, sem, 3)
		requireStats(3, 3, 0)
		held := mustAcquire(t, sem, 3)
		waiter, second := start(t, sem, 1), start(t, sem, 1)
		requireQueue(t, s.Addr, "orders", c)
		requireStats(3, 0, 1)
		held.release(t)
		waiter.Got()
		second.Got()
		requireStats(3, 1, 0)
	})
}

// Do holds a permit while fn runs, whose error it returns, and releases it however fn ends.
func TestDo(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c, ctx := harness.Client(t, s), t.Context()
		sem, boom := of(c, "orders", semaphore.Permits(1)), errors.New("boom")
		_, leased := sem.(permitSem)
		require.ErrorIs(t, sem.do(ctx, nil), lock.ErrInvalid)
		var inside context.Context
		require.Equal(t, boom, sem.do(ctx, func(inner context.Context) error {
			inside = inner
			require.NoError(t, inner.Err())
			require.ErrorIs(t, sem.do(ctx, nil), lock.ErrInvalid)
			require.ErrorIs(t, only(sem.tryAcquire(ctx, 1)), lock.ErrNotAcquired)

			waits := harness.Start(t, ctx, func(ctx context.Context) (any, error) {
				return nil, sem.do(ctx, func(context.Context) error { return nil })
			})
			harness.Waits(t, 1, c)
			for _, h := range c.Holds() {
				require.Regexp(t, `semaphore_test\.\w+\.do \(\S+semaphore_test.go:\d+\)$`, h.Site, "the line that has called Do")
			}
			waits.Leave()
			return boom
		}))
		require.Equal(t, leased, inside.Err() != nil, "it ends with the permit, or is that of the caller")
		require.Panics(t, func() { _ = sem.do(ctx, func(context.Context) error { panic("boom") }) })
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = sem.do(ctx, func(context.Context) error { runtime.Goexit(); return nil })
		}()
		<-done
		require.Equal(t, 1, available(t, sem))

		// A semaphore that is gone when fn returns is not created again.
		err := sem.do(ctx, func(ctx context.Context) error { return only(sem.Delete(ctx)) })
		if leased {
			require.ErrorIs(t, err, lock.ErrLost)
		} else {
			require.NoError(t, err)
		}
		exists, err := sem.Exists(ctx)
		require.NoError(t, err)
		require.False(t, exists)

		err = sem.do(ctx, func(context.Context) error {
			harness.Do(t, s.Addr, "DEL", "orders", timeoutsKey("orders"))
			harness.Do(t, s.Addr, "SET", "orders", "precious")
			return boom
		})
		var both *lock.DoError
		require.ErrorAs(t, err, &both)
		require.Equal(t, boom, both.Func)
		require.Error(t, both.Unlock)
	})
}
