package semaphore_test

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// The keys of the wait queue of a semaphore, and its channel.
func queueKey(name string) string     { return "redlatch_sc_waiting:{" + name + "}" }
func heartbeatKey(name string) string { return "redlatch_sc_alive:{" + name + "}" }
func channel(name string) string      { return "redisson_sc:{" + name + "}" }

// requireQueue returns when the wait queue of a semaphore consists of these clients.
func requireQueue(t testing.TB, addr, name string, clients ...*redlatch.Client) {
	t.Helper()
	var want []string
	for _, c := range clients {
		want = append(want, c.ID())
	}
	// Well before a position times out.
	harness.Eventually(t, slack, "the wait queue", func() bool {
		// The server drops connections if there are too many at once.
		time.Sleep(5 * time.Millisecond)
		got, err := testserver.Query(addr, "ZRANGE", queueKey(name), "0", "-1")
		return err == nil && strings.Join(got, " ") == strings.Join(want, " ")
	})
}

// A request of another process does not barge past a request that has waited for 100 ms, even
// if enough permits for it are free.
func TestYoungRequestsDoNotBarge(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits = 10
		old, young := harness.Client(t, s), harness.Client(t, s)
		holder := withPermits(t, of(harness.Client(t, s), "orders"), permits)
		held := mustAcquire(t, holder, 1)

		all := start(t, of(old, "orders"), permits)
		early, err := of(young, "orders").tryAcquire(t.Context(), 1)
		if time.Since(all.Begun) < bargingTime {
			require.NoError(t, err, "until then any request may be served")
		}
		if err == nil {
			early.release(t)
		}
		requireQueue(t, s.Addr, "orders", old)
		require.GreaterOrEqual(t, time.Since(all.Begun), bargingTime)

		require.Equal(t, permits-1, available(t, holder))
		for _, sem := range []anySemaphore{of(young, "orders"), holder, of(old, "orders")} {
			_, err := sem.tryAcquire(t.Context(), 1)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			_, err = sem.acquire(t.Context(), 1, lock.Wait(0))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
		}
		one := startBehind(t, young, of(young, "orders"), 1)
		requireQueue(t, s.Addr, "orders", old, young)
		held.release(t)
		got := all.Got()
		require.True(t, one.Running())
		requireMessages(t, young, 1, func() { got.release(t) })
		one.Got().release(t)
		requireQueue(t, s.Addr, "orders")
		require.Equal(t, permits, available(t, holder))
	})
}

// A client behind the first one in the wait queue is notified when that one is served.
func TestServedWaiterAdmitsNext(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits = 10
		young := harness.Client(t, s)
		holder := withPermits(t, of(harness.Client(t, s), "orders"), permits)
		held := mustAcquire(t, holder, 6)
		old, g := harness.GatedClient(t, s)
		g.Mute()
		many := start(t, of(old, "orders"), 5)
		requireQueue(t, s.Addr, "orders", old)
		one := startBehind(t, young, of(young, "orders"), 1)
		var got acquired
		// One message of the release, which only the younger client receives, and one of the
		// older client's acquisition.
		requireMessages(t, young, 2, func() {
			held.release(t)
			got = many.Got()
		})
		one.Got().release(t)
		got.release(t)
		require.Equal(t, permits, available(t, holder))
	})
}

// A request for all permits is served despite an endless series of requests for one.
func TestLargeRequestDoesNotStarve(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits, small = 4, 3
		big := withPermits(t, of(harness.Client(t, s), "orders"), permits)
		done := make(chan struct{})
		ended := make(chan error, small*permits)
		for range small {
			sem := of(harness.Client(t, s), "orders")
			for range permits {
				go func() {
					ended <- func() error {
						for {
							got, err := sem.acquire(context.Background(), 1)
							if err != nil {
								return err
							}
							time.Sleep(5 * time.Millisecond)
							if err := got(context.Background()); err != nil {
								return err
							}
							select {
							case <-done:
								return nil
							default:
							}
						}
					}()
				}()
			}
		}
		for range 5 {
			begin := time.Now()
			got, err := big.acquire(t.Context(), permits)
			require.NoError(t, err)
			require.Less(t, time.Since(begin), bargingTime+slack)
			got.release(t)
		}
		close(done)
		for range small * permits {
			require.NoError(t, <-ended)
		}
		require.Equal(t, permits, available(t, big))
	})
}

// A client in the wait queue whose heartbeat is overdue is removed.
func TestDeadClientLosesQueuePosition(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const dead = "5d1f7a52-31c4-4c1b-8f0e-7f2a9f4f3d02"
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(watchdogTimeout))
		sem := withPermits(t, of(c, "orders"), 2)
		now := time.Now()
		harness.Do(t, s.Addr, "ZADD", queueKey("orders"), strconv.FormatInt(now.Add(-time.Minute).UnixMilli(), 10), dead)
		harness.Do(t, s.Addr, "ZADD", heartbeatKey("orders"), strconv.FormatInt(now.Add(heartbeatTimeout).UnixMilli(), 10), dead)
		_, err := sem.tryAcquire(t.Context(), 1)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		got := mustAcquire(t, sem, 1)
		require.GreaterOrEqual(t, time.Since(now), heartbeatTimeout-5*time.Millisecond)
		require.Less(t, time.Since(now), heartbeatTimeout+slack)
		_, err = sem.tryAcquire(t.Context(), 1)
		require.NoError(t, err)
		got.release(t)
		requireQueue(t, s.Addr, "orders")
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", heartbeatKey("orders")))
	})
}

// The keys of the wait queue expire soon after the last heartbeat.
func TestWaitQueueExpires(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		holder := withPermits(t, of(harness.Client(t, s), "orders"), 1)
		held := mustAcquire(t, holder, 1)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(watchdogTimeout))
		start(t, of(c, "orders"), 1)
		requireQueue(t, s.Addr, "orders", c)
		for begin := time.Now(); time.Since(begin) < heartbeatTimeout*3/2; time.Sleep(heartbeatTimeout / 20) {
			for _, key := range []string{queueKey("orders"), heartbeatKey("orders")} {
				left := harness.PTTL(t, s.Addr, key)
				require.Positive(t, left, "heartbeats keep the position")
				require.LessOrEqual(t, left, heartbeatTimeout.Milliseconds())
			}
		}
		held.release(t)
	})
}

func TestLeavingWaitQueueAdmitsNext(t *testing.T) {
	ways := map[string]func(t *testing.T, w *waiter, c *redlatch.Client){
		"cancelled": func(_ *testing.T, w *waiter, _ *redlatch.Client) { w.Leave() },
		"waited":    func(t *testing.T, w *waiter, _ *redlatch.Client) { harness.NotAcquired(t, w.End()) },
		"closed": func(t *testing.T, w *waiter, c *redlatch.Client) {
			c.Close()
			require.ErrorIs(t, w.End(), lock.ErrClosed)
		},
	}
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		for way, leaves := range ways {
			t.Run(way, func(t *testing.T) {
				t.Parallel()
				old, young := harness.Client(t, s), harness.Client(t, s)
				holder := withPermits(t, of(harness.Client(t, s), way), 2)
				held := mustAcquire(t, holder, 1)
				var opts []lock.Option
				if way == "waited" {
					opts = append(opts, lock.Wait(time.Second))
				}
				both := start(t, of(old, way), 2, opts...)
				requireQueue(t, s.Addr, way, old)
				one := start(t, of(young, way), 1)
				requireQueue(t, s.Addr, way, old, young)
				requireMessages(t, young, 1, func() { leaves(t, both, old) })
				one.Got().release(t)
				requireQueue(t, s.Addr, way)
				got, err := holder.tryAcquire(t.Context(), 1)
				require.NoError(t, err)
				got.release(t)
				held.release(t)
			})
		}
	})
}

func TestTransientWaitersLeaveNothing(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const clients, each = 3, 10
		holder := withPermits(t, of(harness.Client(t, s), "orders"), 2)
		held := mustAcquire(t, holder, 1)
		var all []*waiter
		for range clients {
			c := harness.Client(t, s)
			for i := range each {
				// Around the time when the client joins the wait queue.
				wait := bargingTime + time.Duration(i-each/2)*2*time.Millisecond
				all = append(all, start(t, of(c, "orders"), 2, lock.Wait(wait)))
			}
		}
		for _, w := range all {
			harness.NotAcquired(t, w.End())
		}
		requireQueue(t, s.Addr, "orders")
		held.release(t)
		require.Equal(t, 2, available(t, holder))
	})
}

// The waiter leaves during the attempt that adds its client to the wait queue.
func TestLeavingWhileJoiningWaitQueueAdmitsNext(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		holder := withPermits(t, of(harness.Client(t, s), "orders"), 2)
		held := mustAcquire(t, holder, 1)
		_, err := holder.acquire(t.Context(), 2, lock.Wait(2*bargingTime)) // loads the scripts
		harness.NotAcquired(t, err)
		c, g := harness.GatedClient(t, s)
		// The attempts are: at once, after the subscription, and after bargingTime.
		kept := g.Arm(harness.KeepReply, queueKey("orders"), 3)
		w := start(t, of(c, "orders"), 2)
		<-kept
		requireQueue(t, s.Addr, "orders", c)
		w.Leave()
		begin := time.Now()
		mustAcquire(t, holder, 1).release(t)
		require.Less(t, time.Since(begin), slack)
		require.NoError(t, g.Open())
		requireQueue(t, s.Addr, "orders")
		held.release(t)
	})
}

// A queue position belongs to the client. When the waiter it was for leaves, the next waiter of
// that client gets a new one.
func TestNextWaiterGetsOwnQueuePosition(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		holder := withPermits(t, of(harness.Client(t, s), "orders"), 2)
		held := mustAcquire(t, holder, 2) // so leaving publishes nothing
		c, other := harness.Client(t, s), harness.Client(t, s)
		const times = 4
		var took time.Duration
		for range times {
			first := start(t, of(c, "orders"), 2)
			requireQueue(t, s.Addr, "orders", c)
			between := start(t, of(other, "orders"), 2)
			requireQueue(t, s.Addr, "orders", c, other)
			next := startBehind(t, c, of(c, "orders"), 2)
			time.Sleep(bargingTime) // then it joins the queue at once
			first.Leave()
			begin := time.Now()
			requireQueue(t, s.Addr, "orders", other, c)
			took += time.Since(begin)
			between.Leave()
			requireQueue(t, s.Addr, "orders", c)
			next.Leave()
			requireQueue(t, s.Addr, "orders")
		}
		require.Less(t, took, times*heartbeat/2)
		held.release(t)
	})
}

// The next waiter of a client has its position as soon as the first one has left it: a younger request of
// another client does not overtake it in between.
func TestNextWaiterIsNotOvertaken(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		loadScripts(t, s.Addr)
		holder := withPermits(t, of(harness.Client(t, s), "orders"), 2)
		held := mustAcquire(t, holder, 2) // so leaving publishes nothing
		sum := sha1.Sum([]byte(harness.Source(t, "lua/pool.lua", "lua/leave.lua")))
		for range 4 {
			c, g := harness.GatedClient(t, s)
			other := harness.Client(t, s)
			first := start(t, of(c, "orders"), 2)
			requireQueue(t, s.Addr, "orders", c)
			next := startBehind(t, c, of(c, "orders"), 2)
			time.Sleep(2 * bargingTime)
			younger := start(t, of(other, "orders"), 2)
			requireQueue(t, s.Addr, "orders", c, other)
			left := g.Arm(harness.KeepReply, hex.EncodeToString(sum[:]), 1)
			first.Leave()
			harness.Reached(t, left)
			got, err := testserver.Query(s.Addr, "ZRANGE", queueKey("orders"), "0", "-1")
			require.NoError(t, err)
			require.Equal(t, []string{c.ID(), other.ID()}, got)
			require.NoError(t, g.Open())
			next.Leave()
			requireQueue(t, s.Addr, "orders", other)
			younger.Leave()
			requireQueue(t, s.Addr, "orders")
		}
		held.release(t)
	})
}

// Clients leave the wait queue of a semaphore that no longer exists.
func TestWaitQueueEndsWithSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const ttl, heartbeatTimeout = 700 * time.Millisecond, 5 * time.Second
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(3*heartbeatTimeout))
		sem := plain{c.Semaphore("orders")}
		made, err := sem.TrySetPermitsFor(t.Context(), 1, ttl)
		require.NoError(t, err)
		require.True(t, made)
		mustAcquire(t, sem, 1)
		w := start(t, sem, 2)
		requireQueue(t, s.Addr, "orders", c)
		requireQueue(t, s.Addr, "orders") // after the next heartbeat
		other := harness.Client(t, s)
		withPermits(t, plain{other.Semaphore("orders")}, 1)
		requireQueue(t, s.Addr, "orders", c) // again
		require.ErrorIs(t, other.Semaphore("orders").TryAcquire(t.Context(), 1), lock.ErrNotAcquired)

		harness.Do(t, s.Addr, "DEL", "orders")
		requireQueue(t, s.Addr, "orders")
		w.Leave()
		withPermits(t, plain{other.Semaphore("orders")}, 1)
		require.NoError(t, other.Semaphore("orders").TryAcquire(t.Context(), 1))
	})
}

// A request for more permits than the semaphore has fails at once and delays no other, also if
// the total shrinks while it waits.
func TestOversizedRequestBlocksNobody(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		here, elsewhere := harness.Client(t, s), harness.Client(t, s)
		e := withPermits(t, permitSem{elsewhere.PermitSemaphore("orders")}, 3)
		fails := func(w *waiter) {
			t.Helper()
			require.ErrorIs(t, w.End(), lock.ErrInvalid)
		}
		began := time.Now()
		fails(start(t, permitSem{here.PermitSemaphore("orders")}, 5))
		_, err := here.PermitSemaphore("orders").TryAcquireN(t.Context(), 4)
		require.ErrorIs(t, err, lock.ErrInvalid)
		require.Less(t, time.Since(began), slack)

		for _, c := range []*redlatch.Client{here, elsewhere} {
			held := mustAcquire(t, e, 2)
			large := start(t, permitSem{here.PermitSemaphore("orders")}, 3)
			requireQueue(t, s.Addr, "orders", here)
			small := startBehind(t, c, permitSem{c.PermitSemaphore("orders")}, 1)
			larger := start(t, permitSem{here.PermitSemaphore("orders")}, 7)
			fails(larger)
			require.NoError(t, e.SetPermits(t.Context(), 2))
			fails(large)
			held.release(t)
			small.Got().release(t)
			requireQueue(t, s.Addr, "orders")
			require.NoError(t, e.SetPermits(t.Context(), 3))
		}

		// Without any permit nobody can be blocked, and requests wait.
		require.NoError(t, e.SetPermits(t.Context(), 0))
		large := start(t, e, 5)
		requireQueue(t, s.Addr, "orders", elsewhere)
		small := start(t, permitSem{here.PermitSemaphore("orders")}, 1)
		requireQueue(t, s.Addr, "orders", elsewhere, here)
		require.NoError(t, e.SetPermits(t.Context(), 3))
		fails(large)
		small.Got().release(t)
	})
}
