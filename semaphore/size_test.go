package semaphore_test

import (
	"context"
	"errors"
	"runtime"
	"strconv"
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

// Every kind of request creates the semaphore, as TrySetPermits does and in the same script, each
// time that it is gone.
func TestRequestsCreateSemaphore(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c := harness.Client(t, s)
		sem, ctx := of(c, "orders", semaphore.Permits(3)), t.Context()
		loadScripts(t, s.Addr)
		conn := harness.Conn(t, s.Addr)
		requests := []struct {
			what string
			do   func() (acquired, error)
			free int
		}{
			{"TryAcquire", func() (acquired, error) { return sem.tryAcquire(ctx, 2) }, 1},
			{"Acquire", func() (acquired, error) { return sem.acquire(ctx, 1) }, 2},
			{"TryAcquire of too many", func() (acquired, error) {
				_, err := sem.tryAcquire(ctx, 4)
				require.Error(t, err)
				return nil, nil
			}, 3},
			{"AddPermits", func() (acquired, error) { return nil, sem.AddPermits(ctx, -1) }, 2},
		}
		for _, r := range requests {
			harness.Do(t, s.Addr, "FLUSHDB")
			sem = of(harness.Client(t, s), "orders", semaphore.Permits(3))
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			_, err := r.do()
			require.NoError(t, err, r.what)
			require.Equal(t, 1, harness.Commands(t, conn)["evalsha"], r.what)
			require.Equal(t, r.free, available(t, sem), r.what)
			require.EqualValues(t, -1, harness.PTTL(t, s.Addr, "orders"), r.what)
		}
		harness.Do(t, s.Addr, "FLUSHDB")
		mustAcquire(t, sem, 2).release(t)
		dump := func(key string) []string {
			reply, err := testserver.Query(s.Addr, "DUMP", key)
			require.NoError(t, err)
			return reply
		}
		withPermits(t, of(c, "set"), 3)
		require.Equal(t, dump("set"), dump("orders"), "the same bytes as TrySetPermits")

		// An existing semaphore keeps its size.
		mustAcquire(t, of(c, "orders", semaphore.Permits(7)), 1)
		require.Equal(t, 2, available(t, sem))
	})
}

// A request that creates the semaphore wakes those that wait for one.
func TestCreationWakesWaiters(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		here, there := harness.Client(t, s), harness.Client(t, s)
		waiter := start(t, of(here, "orders"), 1)
		notQueued(t, waiter, here)
		requireMessages(t, here, 1, func() {
			_, err := of(there, "orders", semaphore.Permits(2)).tryAcquire(t.Context(), 1)
			require.NoError(t, err)
			waiter.Got()
		})
	})
}

func TestInvalidSizes(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		check := noRequests(t, s)
		for what, opt := range map[string]semaphore.Option{
			"0": semaphore.Permits(0), "negative": semaphore.Permits(-1), "too large": semaphore.Permits(semaphore.MaxPermits + 1), "nil": nil,
		} {
			eachCall(t.Context(), c.Semaphore("orders", opt), c.PermitSemaphore("orders", opt), func(name string, _ bool, err error) {
				require.ErrorIs(t, err, lock.ErrInvalid, "%s with %s", name, what)
			})
		}
		check()
	})
}

// kindsOfErrors are those of which an error matches at most one.
var kindsOfErrors = []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate, lock.ErrClosed, semaphore.ErrNotFound}

func requireOnly(t testing.TB, want, err error) {
	t.Helper()
	for _, kind := range kindsOfErrors {
		require.Equal(t, kind == want, errors.Is(err, kind), "%v matches %v", err, kind)
	}
}

func TestMissingSemaphore(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		var log harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		sem := of(c, "orders")
		exists, err := sem.Exists(t.Context())
		require.NoError(t, err)
		require.False(t, exists)
		_, err = sem.tryAcquire(t.Context(), 1)
		requireOnly(t, semaphore.ErrNotFound, err)
		require.ErrorContains(t, err, `"orders"`)
		_, err = sem.acquire(t.Context(), 1, lock.Wait(0))
		requireOnly(t, semaphore.ErrNotFound, err)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = sem.tryAcquire(ctx, 1)
		requireOnly(t, lock.ErrNotAcquired, err)
		const warning = "does not exist"
		require.NotContains(t, log.String(), warning)

		for range 2 {
			_, err = of(c, "orders").acquire(t.Context(), 1, lock.Wait(500*time.Millisecond))
			requireOnly(t, lock.ErrNotAcquired, err)
			require.ErrorContains(t, err, "did not exist; semaphore.Permits or TrySetPermits creates it")
		}
		waiter := start(t, sem, 1)
		harness.Waits(t, 1, c)
		require.Equal(t, 1, strings.Count(log.String(), warning), log.String())
		withPermits(t, of(harness.Client(t, s), "orders"), 1)
		waiter.Got()

		// No free permit is something else.
		_, err = sem.tryAcquire(t.Context(), 1)
		requireOnly(t, lock.ErrNotAcquired, err)
		require.NotContains(t, err.Error(), "exist")
		exists, err = sem.Exists(t.Context())
		require.NoError(t, err)
		require.True(t, exists)
	})
}

// The permits of a release that creates the semaphore are among its permits.
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
		unknownReleased, err := c.PermitSemaphore("none", semaphore.Permits(8)).TryRelease(t.Context(), unknown)
		require.NoError(t, err)
		require.False(t, unknownReleased)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "plain", "none"))
		n, err := sem.Drain(t.Context())
		require.NoError(t, err)
		require.Equal(t, 8, n)

		// Permits that outlive their semaphore count.
		e := c.PermitSemaphore("orders", semaphore.Permits(8))
		several, err := e.AcquireN(t.Context(), 3)
		require.NoError(t, err)
		other := take(t, e, 1)[0]
		harness.Do(t, s.Addr, "PEXPIRE", timeoutsKey("orders"), "60000")
		harness.Do(t, s.Addr, "DEL", "orders")
		require.NoError(t, several.Release(t.Context()))
		require.Equal(t, counts{8, 7, 1}, countsOf(t, e))
		harness.Do(t, s.Addr, "DEL", "orders")
		last := take(t, e, 1)[0]
		require.Equal(t, counts{8, 6, 2}, countsOf(t, e))
		require.EqualValues(t, -1, harness.PTTL(t, s.Addr, timeoutsKey("orders")))
		require.NoError(t, e.Release(t.Context(), other.ID(), last.ID()))
	})
}

// Acquired permits that outlive their number of free permits count for a change of size, and no
// longer expire with it.
func TestResizeCountsPermitsThatOutliveTheirNumber(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := harness.Client(t, s).PermitSemaphore("orders", semaphore.Permits(8))
		take(t, e, 3)
		for _, tt := range []struct {
			what  string
			do    func() error
			total int
		}{
			{"add", func() error { return e.AddPermits(t.Context(), 1) }, 9},
			{"set", func() error { return e.SetPermits(t.Context(), 7) }, 7},
			{"remove", func() error { return e.AddPermits(t.Context(), -6) }, 2},
			{"add without Permits", func() error {
				return harness.Client(t, s).PermitSemaphore("orders").AddPermits(t.Context(), 2)
			}, 5},
		} {
			harness.Do(t, s.Addr, "PEXPIRE", timeoutsKey("orders"), "60000")
			harness.Do(t, s.Addr, "DEL", "orders")
			require.NoError(t, tt.do(), tt.what)
			require.Equal(t, counts{tt.total, tt.total - 3, 3}, countsOf(t, e), tt.what)
			require.EqualValues(t, -1, harness.PTTL(t, s.Addr, timeoutsKey("orders")), tt.what)
		}
	})
}

func TestDelete(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c := harness.Client(t, s)
		sem := of(c, "orders")
		del := func(want bool) {
			t.Helper()
			deleted, err := sem.Delete(t.Context())
			require.NoError(t, err)
			require.Equal(t, want, deleted)
			require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders", timeoutsKey("orders"),
				"redlatch_sc_waiting:{orders}", "redlatch_sc_alive:{orders}"))
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

// A Semaphore cannot tell the permits of the one before from its own.
func TestReleaseAfterDelete(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		sem := withPermits(t, plain{harness.Client(t, s).Semaphore("orders")}, 3)
		held := mustAcquire(t, sem, 2)
		deleted, err := sem.Delete(t.Context())
		require.NoError(t, err)
		require.True(t, deleted)
		withPermits(t, sem, 3)
		released, err := sem.ReleaseIfExists(t.Context(), 1)
		require.NoError(t, err)
		require.True(t, released)
		held.release(t)
		require.Equal(t, 6, available(t, sem))
	})
}

func TestWarningsAreBounded(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		for i := range 2500 {
			require.LessOrEqual(t, c.Semaphore(strconv.Itoa(i)).WarnMissing(), 1000)
		}
		require.Equal(t, 2500, strings.Count(log.String(), "does not exist"))
		c.Semaphore("2499").WarnMissing()
		require.Equal(t, 2500, strings.Count(log.String(), "does not exist"))
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
				require.Equal(t, semaphore.PermitStats{Total: total, Free: free, Taken: total - free, Waiting: waiting}, stats)
				return
			}
			stats, err := sem.(plain).Stats(t.Context())
			require.NoError(t, err)
			require.Equal(t, semaphore.Stats{Free: free, Waiting: waiting}, stats)
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
		harness.Do(t, s.Addr, "ZADD", "redlatch_sc_alive:{orders}", "1", "dead")
		requireStats(3, 1, 0)
		harness.Do(t, s.Addr, "ZADD", "redlatch_sc_alive:{orders}", "1e15", "alive")
		harness.Do(t, s.Addr, "DEL", "orders")
		requireStats(2, 0, 1)
		_, err := sem.Delete(t.Context())
		require.NoError(t, err)
		requireStats(0, 0, 0)
	})
}

// SetPermits of a Semaphore sets the number of free permits and wakes waiters.
func TestSetFreePermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		here := harness.Client(t, s)
		sem, theirs := plain{here.Semaphore("orders")}, plain{harness.Client(t, s).Semaphore("orders")}
		for _, n := range []int{4, 4, 0, 2} {
			require.NoError(t, theirs.SetPermits(t.Context(), n))
			require.Equal(t, n, available(t, sem))
		}
		mustAcquire(t, sem, 2)
		waiter := startBehind(t, here, sem, 3)
		requireMessages(t, here, 1, func() {
			require.NoError(t, theirs.SetPermits(t.Context(), 5))
			waiter.Got()
		})
		require.Equal(t, 2, available(t, sem))
	})
}

func TestDo(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		sem, ctx := of(harness.Client(t, s), "orders", semaphore.Permits(1)), t.Context()
		boom := errors.New("boom")
		require.ErrorIs(t, sem.Do(ctx, nil), lock.ErrInvalid)
		require.Equal(t, boom, sem.Do(ctx, func(inner context.Context) error {
			_, err := sem.tryAcquire(ctx, 1)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.NoError(t, inner.Err())
			require.ErrorIs(t, sem.Do(ctx, nothing, lock.Wait(0)), lock.ErrNotAcquired)
			return boom
		}))
		require.Panics(t, func() { _ = sem.Do(ctx, func(context.Context) error { panic("boom") }) })
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = sem.Do(ctx, func(context.Context) error { runtime.Goexit(); return nil })
		}()
		<-done
		require.Equal(t, 1, available(t, sem), "all have released their permit")

		err := sem.Do(ctx, func(context.Context) error {
			harness.Do(t, s.Addr, "DEL", "orders", timeoutsKey("orders"))
			harness.Do(t, s.Addr, "SET", "orders", "precious")
			return boom
		})
		var both *lock.DoError
		require.ErrorAs(t, err, &both)
		require.Equal(t, boom, both.Func)
		require.Error(t, both.Unlock)
		if _, leased := sem.(permitSem); leased {
			require.ErrorIs(t, err, lock.ErrLost)
		}
	})
}

// Do does not create a semaphore again that is gone when fn returns.
func TestDoDoesNotCreateSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		created := c.Semaphore("orders", semaphore.Permits(3))
		set := withPermits(t, plain{c.Semaphore("set")}, 3).Semaphore
		for _, sem := range []*semaphore.Semaphore{created, set} {
			require.NoError(t, sem.Do(t.Context(), func(ctx context.Context) error {
				deleted, err := sem.Delete(ctx)
				require.True(t, deleted)
				return err
			}), sem.Name())
			exists, err := sem.Exists(t.Context())
			require.NoError(t, err)
			require.False(t, exists, sem.Name())
		}
		require.NoError(t, created.Do(t.Context(), nothing))
		require.Equal(t, 3, available(t, plain{created}), "the next request creates it in full")
	})
}

// The list of waiters names the line that called Do.
func TestSiteOfWaitingDo(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c := harness.Client(t, s)
		sem := withPermits(t, of(c, "orders"), 0)
		for _, wait := range []func(ctx context.Context) error{
			func(ctx context.Context) error { return sem.Do(ctx, nothing) },
			func(ctx context.Context) error { _, err := sem.acquire(ctx, 1); return err },
		} {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- wait(ctx) }()
			var holds []redlatch.HoldInfo
			harness.Eventually(t, 10*time.Second, "the waiter is listed", func() bool {
				holds = c.Holds()
				return len(holds) == 1
			})
			require.Regexp(t, `semaphore_test\.\S+ \(\S+_test\.go:\d+\)$`, holds[0].Site)
			cancel()
			require.ErrorIs(t, <-done, lock.ErrNotAcquired)
		}
	})
}

// Do of a PermitSemaphore ends its context when the permit is lost. Do of a Semaphore passes the
// caller's context.
func TestContextOfDo(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(500*time.Millisecond))
		require.ErrorIs(t, c.PermitSemaphore("permits", semaphore.Permits(1)).Do(t.Context(), func(ctx context.Context) error {
			harness.Do(t, s.Addr, "DEL", timeoutsKey("permits"))
			<-ctx.Done()
			return context.Cause(ctx)
		}), lock.ErrLost)
		require.NoError(t, c.Semaphore("plain", semaphore.Permits(1)).Do(t.Context(), func(ctx context.Context) error {
			require.Equal(t, t.Context(), ctx)
			return nil
		}))
	})
}
