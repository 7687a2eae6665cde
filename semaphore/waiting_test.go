package semaphore_test

import (
	"context"
	"log/slog"
	"math"
	"strconv"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

const (
	// bargingTime is how long younger requests may barge past a request.
	bargingTime = 100 * time.Millisecond
	// heartbeatTimeout is how long a dead client stays in the wait queue, with the
	// watchdogTimeout of these tests.
	heartbeatTimeout = time.Second
	watchdogTimeout  = 3 * heartbeatTimeout
	// heartbeat is the heartbeat interval with the default watchdog timeout.
	heartbeat = time.Second
)

// waiter is a background call of Acquire.
type waiter = harness.Call[acquired]

func start(t testing.TB, sem anySemaphore, n int, opts ...lock.Option) *waiter {
	return harness.Start(t, context.Background(), func(ctx context.Context) (acquired, error) { return sem.acquire(ctx, n, opts...) })
}

// startBehind is start for a semaphore of client c. It returns when the call waits, behind
// earlier calls of this client.
func startBehind(t testing.TB, c *redlatch.Client, sem anySemaphore, n int, opts ...lock.Option) *waiter {
	t.Helper()
	before := c.Stats()
	w := start(t, sem, n, opts...)
	harness.Waits(t, before.Waiting+before.Attempting+1, c)
	return w
}

// notQueued returns when the only waiter of a client has found that its semaphore does not
// exist, so that it cannot join the wait queue. Its next attempt is the poll.
func notQueued(t testing.TB, w *waiter, c *redlatch.Client) {
	t.Helper()
	harness.Eventually(t, soon, "a waiter that has found no semaphore", func() bool {
		return time.Since(w.Begun) > 2*bargingTime && harness.Waiting(1, c)
	})
}

// requireMessages fails the test unless a client receives n messages from f. Heartbeats are
// too frequent for the time alone to show the reason of an attempt.
func requireMessages(t testing.TB, c *redlatch.Client, n uint64, f func()) {
	t.Helper()
	harness.Eventually(t, soon, "the subscription", func() bool {
		hub := c.PubSub()
		return hub.Channels > 0 && hub.Subscribed == hub.Channels
	})
	before := c.PubSub().Messages
	f()
	harness.Eventually(t, soon, "messages", func() bool { return c.PubSub().Messages >= before+n })
}

// attempts returns a function that returns the number of scripts run since its last call.
func attempts(t testing.TB, addr string) (since func() int) {
	t.Helper()
	conn := harness.Conn(t, addr)
	scripts := func() int {
		calls := harness.Commands(t, conn)
		return calls["evalsha"] + calls["eval"]
	}
	last := scripts()
	return func() int {
		n := scripts() - last
		last += n
		return n
	}
}

// heartbeats returns the number of attempts that a client in the wait queue may have made.
func heartbeats(since time.Time) int { return 1 + int(time.Since(since)/heartbeat) }

func TestFirstComeFirstServed(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits = 10
		c := harness.Client(t, s)
		sem := withPermits(t, of(c, "orders"), permits)
		var held []acquired
		for range permits {
			held = append(held, mustAcquire(t, sem, 1))
		}
		one := startBehind(t, c, sem, 1)
		all := startBehind(t, c, of(c, "orders"), permits)
		late := startBehind(t, c, sem, 1)

		held[0].release(t)
		first := one.Got()
		for _, h := range held[1:] {
			h.release(t)
		}
		require.Equal(t, permits-1, available(t, sem))
		harness.Waits(t, 2, c) // the request for all permits, and the one behind it
		require.True(t, all.Running() && late.Running())
		first.release(t)
		big := all.Got()
		require.True(t, late.Running())
		big.release(t)
		late.Got().release(t)
		require.Equal(t, permits, available(t, sem))
	})
}

func TestReleaseServesAllItCan(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits, clients, each = 5, 3, 4
		holder := withPermits(t, of(harness.Client(t, s), "orders"), permits)
		held := []acquired{mustAcquire(t, holder, permits)}
		var waiting []*redlatch.Client
		served := make(chan acquired, clients*each)
		for range clients {
			c := harness.Client(t, s)
			waiting = append(waiting, c)
			for range each {
				w := startBehind(t, c, of(c, "orders"), 1)
				go func() {
					<-w.Ended
					served <- w.Value
				}()
			}
		}
		for left := clients * each; left > 0; {
			for _, a := range held {
				a.release(t)
			}
			held = nil
			for range min(left, permits) {
				held = append(held, <-served)
			}
			left -= len(held)
			harness.Waits(t, left, waiting...)
			require.Empty(t, served)
			require.Equal(t, permits-len(held), available(t, holder))
		}
		for _, a := range held {
			a.release(t)
		}
		require.Equal(t, permits, available(t, holder))
	})
}

func TestOneAttemptAtATime(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const waiters, messages = 30, 20
		holder := withPermits(t, of(harness.Client(t, s), "orders"), 1)
		held := mustAcquire(t, holder, 1)
		c, g := harness.GatedClient(t, s)
		for range waiters {
			start(t, of(c, "orders"), 1)
		}
		requireQueue(t, s.Addr, "orders", c)
		harness.Waits(t, waiters, c)

		kept := g.Arm(harness.KeepReply, queueKey("orders"), 1)
		since := attempts(t, s.Addr)
		requireMessages(t, c, messages, func() {
			for range messages {
				harness.Do(t, s.Addr, "PUBLISH", channel("orders"), "1")
			}
		})
		harness.Reached(t, kept)
		require.Positive(t, c.Stats().Attempting)
		require.LessOrEqual(t, since(), 1)
		opened := time.Now()
		require.NoError(t, g.Open())
		harness.Waits(t, waiters, c)
		require.LessOrEqual(t, since(), heartbeats(opened), "one attempt for all messages")
		held.release(t)
	})
}

// Without a semaphore clients do not queue, and send no heartbeats.
func TestPollFindsSemaphoreCreatedByHand(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		w := startBehind(t, c, plain{c.Semaphore("orders")}, 1)
		notQueued(t, w, c)
		begin := time.Now()
		harness.Do(t, s.Addr, "SET", "orders", "1")
		w.Got()
		require.Less(t, w.At.Sub(begin), 5*time.Second+slack)
	})
}

// The expiry sends no message. A release of the own process that does not suffice may precede
// it.
func TestNextExpiryWakesWaiter(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		// The heartbeat of a queued waiter comes 0.8 s later.
		const lease, times = 300 * time.Millisecond, 5
		e := permitSemaphore(t, s, 4)
		take(t, e, 1, semaphore.Forever())
		take(t, e, 1, lock.Lease(time.Hour))
		c, g := harness.GatedClient(t, s)
		g.Mute()
		deaf := c.PermitSemaphore("orders")
		for _, wanted := range []int{1, 2} {
			var late time.Duration
			for range times {
				other := take(t, deaf, 1)[0]
				begin := time.Now()
				take(t, e, 1, lock.Lease(lease))
				w := start(t, permitSem{deaf}, wanted)
				if wanted == 2 {
					requireQueue(t, s.Addr, "orders", c)
					harness.Waits(t, 1, c)
					require.NoError(t, other.Release(t.Context()))
				}
				w.Got().release(t)
				require.GreaterOrEqual(t, w.At.Sub(begin), lease-5*time.Millisecond)
				late += w.At.Sub(begin) - lease
				if wanted == 1 {
					require.NoError(t, other.Release(t.Context()))
				}
			}
			require.Less(t, late, times*heartbeat/2, "%d permits", wanted)
		}
	})
}

// All permits of a process that is gone become free when their leases expire.
func TestExpiredPermitsServeWaitersElsewhere(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease, permits = time.Second, 6
		e := permitSemaphore(t, s, permits)
		var sems []anySemaphore
		for range permits {
			sems = append(sems, permitSem{harness.Client(t, s).PermitSemaphore("orders")})
		}
		begin := time.Now()
		take(t, e, permits, lock.Lease(lease))
		var all []*waiter
		for _, sem := range sems {
			all = append(all, start(t, sem, 1))
		}
		for _, w := range all {
			a := w.Got()
			require.GreaterOrEqual(t, w.At.Sub(begin), lease-5*time.Millisecond)
			require.Less(t, w.At.Sub(begin), lease+slack)
			defer a.release(t)
		}
		require.Equal(t, counts{permits, 0, permits}, countsOf(t, e))
	})
}

func TestNewPermitsWakeWaiters(t *testing.T) {
	type bring func(t *testing.T, sem anySemaphore)
	ways := map[string]bring{
		"TrySetPermits": func(t *testing.T, sem anySemaphore) {
			made, err := sem.TrySetPermits(t.Context(), 2)
			require.NoError(t, err)
			require.True(t, made)
		},
		"AddPermits": func(t *testing.T, sem anySemaphore) { require.NoError(t, sem.AddPermits(t.Context(), 2)) },
		"AddPermits to fewer than none": func(t *testing.T, sem anySemaphore) {
			require.NoError(t, sem.AddPermits(t.Context(), -3))
			require.NoError(t, sem.AddPermits(t.Context(), 5))
		},
		"SetPermits": func(t *testing.T, sem anySemaphore) {
			e, ok := sem.(permitSem)
			if !ok {
				require.NoError(t, sem.(plain).Release(t.Context(), 2))
				return
			}
			require.NoError(t, e.SetPermits(t.Context(), 2))
		},
	}
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		for way, comes := range ways {
			t.Run(way, func(t *testing.T) {
				t.Parallel()
				a, b := harness.Client(t, s), harness.Client(t, s)
				w1, w2 := startBehind(t, a, of(a, way), 1), startBehind(t, b, of(b, way), 1)
				notQueued(t, w1, a)
				notQueued(t, w2, b)
				begin := time.Now()
				requireMessages(t, a, 1, func() { requireMessages(t, b, 1, func() { comes(t, of(harness.Client(t, s), way)) }) })
				for _, w := range []*waiter{w1, w2} {
					defer w.Got().release(t)
					require.Less(t, w.At.Sub(begin), slack)
				}
			})
		}
	})
}

// A release serves the next waiter of the same process in the same request.
func TestReleaseToLocalWaiterIsOneRequest(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const waiters = 10
		c := harness.Client(t, s)
		sem := withPermits(t, of(c, "orders"), 1)
		held := mustAcquire(t, sem, 1)
		var all []*waiter
		for range waiters {
			all = append(all, startBehind(t, c, sem, 1))
		}
		time.Sleep(bargingTime) // then no further attempt is needed to join the queue
		requireQueue(t, s.Addr, "orders", c)
		harness.Waits(t, waiters, c)
		since, begin := attempts(t, s.Addr), time.Now()
		for i, w := range all {
			held.release(t)
			held = w.Got()
			harness.Waits(t, waiters-1-i, c)
		}
		// The first waiter sends heartbeats as well.
		require.LessOrEqual(t, since(), waiters+heartbeats(begin))
		held.release(t)
	})
}

// Users without the right to publish and subscribe can use a semaphore. Waiters of the releasing
// process do not have to poll.
func TestWithoutMessages(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "quiet", "on", ">secret", "~*", "+@all", "resetchannels")
		quiet := func(opts ...redlatch.Option) *redlatch.Client {
			opts = append(opts, redlatch.WithLogger(slog.New(slog.DiscardHandler)))
			c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}, Username: "quiet", Password: "secret"}, opts...)
			require.NoError(t, err)
			t.Cleanup(c.Close)
			return c
		}
		for _, k := range kinds {
			t.Run(k.name, func(t *testing.T) {
				t.Parallel()
				here, there := quiet(redlatch.WithHandOffLimit(0)), quiet(redlatch.WithWatchdogTimeout(watchdogTimeout))
				sem := withPermits(t, k.of(here, k.name), 1)
				held := mustAcquire(t, sem, 1)
				const times = 5
				var took time.Duration
				for range times {
					w := startBehind(t, here, sem, 1)
					requireQueue(t, s.Addr, k.name, here)
					begin := time.Now()
					held.release(t)
					held = w.Got()
					took += w.At.Sub(begin)
				}
				require.Less(t, took, times*heartbeat/2)

				w := start(t, k.of(there, k.name), 1)
				requireQueue(t, s.Addr, k.name, there)
				begin := time.Now()
				held.release(t)
				w.Got().release(t)
				require.Less(t, w.At.Sub(begin), heartbeatTimeout/3+slack)
			})
		}
	})
}

// Requests that exceed MaxBatch together are sent one after the other.
func TestLargeBatchIsSplit(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const each, waiters = semaphore.MaxBatch/2 + 1, 2
		c := harness.Client(t, s)
		e, other := withPermits(t, permitSem{c.PermitSemaphore("orders")}, 1), harness.Client(t, s).PermitSemaphore("orders")
		require.NoError(t, other.AddPermits(t.Context(), -1)) // loads the script
		var all []*waiter
		for range waiters {
			all = append(all, startBehind(t, c, e, each))
		}
		since := attempts(t, s.Addr)
		require.NoError(t, other.AddPermits(t.Context(), waiters*each))
		var got []acquired
		for _, w := range all {
			got = append(got, w.Got())
		}
		require.Greater(t, since(), waiters) // and AddPermits
		for _, a := range got {
			a.release(t)
		}
		require.Equal(t, waiters*each, available(t, e))
	})
}

// The size and number of requests for a release do not depend on the number of waiters.
func TestReleaseSizeIsIndependentOfWaiters(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const waiters, releases = 100, 10
		c := harness.Client(t, s)
		sem := withPermits(t, of(c, "orders"), 1)
		held := mustAcquire(t, sem, 1)
		got := make(chan acquired, waiters)
		for range waiters {
			go func() {
				if a, err := sem.acquire(t.Context(), 1); err == nil {
					got <- a
				}
			}()
		}
		requireQueue(t, s.Addr, "orders", c)
		harness.Waits(t, waiters, c)
		bytes := func() int {
			info, err := testserver.Info(s.Addr, "stats")
			require.NoError(t, err)
			n, err := strconv.Atoi(info["total_net_input_bytes"])
			require.NoError(t, err)
			return n
		}
		since, begin, least := attempts(t, s.Addr), time.Now(), math.MaxInt
		for range releases {
			before := bytes()
			held.release(t)
			held = <-got
			least = min(least, bytes()-before) // a heartbeat adds some
		}
		require.LessOrEqual(t, since(), releases+1+heartbeats(begin))
		require.Less(t, least, 1500)
		held.release(t)
		for range waiters - releases {
			(<-got).release(t)
		}
		require.Equal(t, 1, available(t, sem))
	})
}
