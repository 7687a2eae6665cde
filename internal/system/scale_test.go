package system_test

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

const (
	// few is the number of goroutines that a client and its connections may have.
	few = 64
	// warmth bounds the time until unused channels are unsubscribed.
	warmth = hub.DefaultKeepWarm + patience
)

// noise is the tolerance between two measurements of the heap in the same state.
func noise() int64 { return int64(harness.Size(256<<10, 1<<20)) }

// parallel runs f(0) to f(n-1) on that many goroutines.
func parallel(goroutines, n int, f func(i int)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				f(int(i))
			}
		})
	}
	wg.Wait()
}

// names returns n names of locks.
func names(n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = "lock " + strconv.Itoa(i)
	}
	return all
}

// takeAll acquires a lock of each name.
func takeAll(t *testing.T, c *redlatch.Client, names []string, opts ...lock.Option) []lock.Hold {
	t.Helper()
	all := make([]lock.Hold, len(names))
	parallel(64, len(names), func(i int) {
		var err error
		all[i], err = c.Lock(names[i]).Lock(context.Background(), opts...)
		assert.NoError(t, err)
	})
	require.NotContains(t, all, nil)
	return all
}

func unlockAll(t *testing.T, all []lock.Hold) {
	t.Helper()
	parallel(64, len(all), func(i int) { assert.NoError(t, all[i].Unlock(context.Background())) })
}

// subscribed returns the channels with subscribers.
func subscribed(t *testing.T, conn rueidis.Client) []string {
	t.Helper()
	all, err := conn.Do(context.Background(), conn.B().PubsubChannels().Build()).AsStrSlice()
	require.NoError(t, err)
	return all
}

// crowded is a server whose clients have very many waiters.
type crowded struct {
	client      func(t testing.TB) *redlatch.Client
	conn        rueidis.Client
	reset       func()                   // resets the command counters
	calls       func(command string) int // number of commands since reset
	nothingLeft func(t testing.TB)
}

// eachCrowded runs a test alone on every server. In short mode it runs in virtual time,
// because the test waits for long.
func eachCrowded(t *testing.T, test func(t *testing.T, s crowded)) {
	if testing.Short() {
		harness.VirtualAlone(t, func(t *testing.T, s *harness.VirtualServer) {
			s.Latency = time.Millisecond
			client := func(t testing.TB) *redlatch.Client { return s.Client(t) }
			test(t, crowded{client, s.Conn(t), s.Reset, s.Calls, s.NothingLeft})
		})
		return
	}
	harness.EachAlone(t, func(t *testing.T, s *testserver.Server) {
		conn := harness.Conn(t, s.Addr)
		test(t, crowded{
			client:      func(t testing.TB) *redlatch.Client { return harness.Client(t, s) },
			conn:        conn,
			reset:       func() { harness.Do(t, s.Addr, "CONFIG", "RESETSTAT") },
			calls:       func(command string) int { return harness.Commands(t, conn)[command] },
			nothingLeft: func(t testing.TB) { harness.NothingLeft(t, s.Addr) },
		})
	})
}

func TestManyWaitersOnOneLock(t *testing.T) {
	waiters := harness.Size(2000, 10_000)
	eachCrowded(t, func(t *testing.T, s crowded) {
		holder, c := s.client(t), s.client(t)
		checkLock(t, c, "other") // loads the scripts and connects the subscriber
		harness.Eventually(t, warmth, "no channel", func() bool { return c.Stats().PubSub.Channels == 0 })
		received := c.Stats().PubSub.Messages
		h := mustLock(t, holder.Lock("orders"), lock.Lease(time.Hour))
		before := currentUsage(waiters)

		// polls bounds the number of polls of the first waiter.
		polls := func(since time.Time) int { return 1 + int(time.Since(since)/safetyPoll) }
		s.reset()
		began := time.Now()
		leave := enqueue(t, c, waiters, func(int) string { return "orders" })
		waitForWaiters := func(attempts int) {
			t.Helper()
			harness.Eventually(t, patience, "all wait after the attempt", func() bool {
				return s.calls("evalsha") >= attempts && harness.Waiting(waiters, c)
			})
		}
		waitForWaiters(2) // the first, and one after the subscription
		require.LessOrEqual(t, s.calls("evalsha"), 2+polls(began))
		require.Equal(t, pubsub.Stats{Listeners: 1, Channels: 1, Subscribed: 1, Connections: 1, Messages: received}, c.Stats().PubSub)
		require.Equal(t, []string{"redisson_lock__channel:{orders}"}, subscribed(t, s.conn))
		require.LessOrEqual(t, runtime.NumGoroutine(), before.goroutines+waiters+few)

		s.reset()
		began = time.Now()
		time.Sleep(safetyPoll + time.Second)
		require.LessOrEqual(t, s.calls("evalsha"), polls(began))
		require.Zero(t, s.calls("eval")+s.calls("subscribe")+s.calls("publish"))

		// A message triggers only the first waiter.
		s.reset()
		const messages = 20
		began = time.Now()
		for i := range messages {
			publish := s.conn.B().Publish().Channel("redisson_lock__channel:{orders}").Message("0").Build()
			require.NoError(t, s.conn.Do(t.Context(), publish).Error())
			waitForWaiters(i + 1)
		}
		require.LessOrEqual(t, s.calls("evalsha"), messages+polls(began))

		leave()
		requireNoLeak(t, c, s.conn, before)
		require.NoError(t, h.Unlock(t.Context()))
		s.nothingLeft(t)
	})
}

func TestManyWaitersOnManyLocks(t *testing.T) {
	waiters := harness.Size(500, 10_000)
	eachCrowded(t, func(t *testing.T, s crowded) {
		holder, c := s.client(t), s.client(t)
		before := currentUsage(waiters)
		held := takeAll(t, holder, names(2*waiters), lock.Lease(time.Hour))
		require.LessOrEqual(t, runtime.NumGoroutine(), before.goroutines+few, "holds need no goroutines")
		for round := range 2 {
			// Maps keep their size, and the queues keep some entries for the next
			// locks. Only the second round, with other locks, must cost nothing more.
			if before = currentUsage(waiters); round == 0 {
				before.heap = math.MaxInt64 - noise()
			}
			leave := enqueue(t, c, waiters, func(i int) string { return held[round*waiters+i].Name() })
			harness.Eventually(t, 3*patience, "all are subscribed and wait", func() bool {
				return c.Stats().PubSub.Subscribed == waiters && harness.Waiting(waiters, c)
			})
			require.Equal(t, pubsub.Stats{Listeners: waiters, Channels: waiters, Subscribed: waiters, Connections: 1}, c.Stats().PubSub)
			require.Len(t, subscribed(t, s.conn), waiters)
			require.LessOrEqual(t, runtime.NumGoroutine(), before.goroutines+waiters+few)
			leave()
			requireNoLeak(t, c, s.conn, before)
		}
		unlockAll(t, held)
		s.nothingLeft(t)
	})
}

// enqueue starts n goroutines that wait for locks, every second one with a deadline.
// leave cancels them and waits until they have left.
func enqueue(t *testing.T, c *redlatch.Client, n int, name func(i int) string) (leave func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			var opts []lock.Option
			if i%2 == 0 {
				opts = append(opts, lock.Wait(time.Hour))
			}
			_, err := c.Lock(name(i)).Lock(ctx, opts...)
			assert.ErrorIs(t, err, context.Canceled)
		})
	}
	leave = func() {
		cancel()
		all.Wait()
	}
	t.Cleanup(leave)
	return leave
}

// usage is the resource usage of this process.
type usage struct {
	heap       int64
	goroutines int
}

// currentUsage returns the usage after n goroutines have slept together, because the
// runtime keeps what it allocated for them.
func currentUsage(n int) usage {
	var waitForWaiters, all sync.WaitGroup
	wake := make(chan struct{})
	waitForWaiters.Add(n)
	for range n {
		all.Go(func() {
			waitForWaiters.Done()
			<-wake
		})
	}
	waitForWaiters.Wait()
	close(wake)
	all.Wait()
	return usage{harness.HeapInUse(), runtime.NumGoroutine()}
}

// requireNoLeak fails the test if the waiters of a client, which have all left, have
// left a channel, a goroutine or memory.
func requireNoLeak(t *testing.T, c *redlatch.Client, conn rueidis.Client, before usage) {
	t.Helper()
	require.Zero(t, c.Stats().PubSub.Listeners)
	harness.Eventually(t, warmth, "no channel", func() bool {
		return c.Stats().PubSub.Channels == 0 && len(subscribed(t, conn)) == 0
	})
	harness.Idle(t, c)
	harness.Eventually(t, patience, "no goroutine", func() bool { return runtime.NumGoroutine() <= before.goroutines+few })
	harness.Eventually(t, patience, "no memory", func() bool { return harness.HeapInUse() <= before.heap+noise() })
}

// A million waits end early, at the head of a queue or behind it, and some get the
// lock.
func TestManyShortWaits(t *testing.T) {
	waits := harness.Size(10_000, 1_000_000)
	const (
		callers = 1000
		longest = 20 * time.Millisecond
		locks   = 400
		// atOnce is the number of locks wanted at a time. It is small, so that most
		// waits end before an attempt.
		atOnce = 20
	)
	eachCrowded(t, func(t *testing.T, s crowded) {
		holder, c := s.client(t), s.client(t)
		all := names(locks)
		held := takeAll(t, holder, all, lock.Lease(time.Hour))
		var acquired, timedOut, cancelled atomic.Int64
		wait := func(n int) usage {
			parallel(callers, n, func(i int) {
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				name := all[(i*locks/n+rand.N(atOnce))%locks]
				var opts []lock.Option
				switch {
				case i%50 == 0:
					name = "free " + name
				case i%2 == 0:
					defer time.AfterFunc(rand.N(longest), cancel).Stop()
				default:
					opts = append(opts, lock.Wait(1+rand.N(longest)))
				}
				h, err := c.Lock(name).Lock(ctx, opts...)
				switch {
				case err == nil:
					acquired.Add(1)
					assert.NoError(t, h.Unlock(context.Background()))
				case !errors.Is(err, lock.ErrNotAcquired) && !errors.Is(err, lock.ErrIndeterminate) && !errors.Is(err, lock.ErrUnavailable):
					assert.NoError(t, err)
				case ctx.Err() != nil:
					cancelled.Add(1)
				default:
					timedOut.Add(1)
				}
			})
			harness.Idle(t, c) // attempts in flight when their caller left are undone
			return usage{harness.HeapInUse(), runtime.NumGoroutine()}
		}
		before := wait(waits / 5)
		after := wait(waits - waits/5)
		// A replaced connection counts twice for a while.
		harness.Eventually(t, patience, "no memory leak", func() bool { return harness.HeapInUse() <= before.heap+2*noise() })
		require.LessOrEqual(t, after.goroutines, before.goroutines+few)
		require.EqualValues(t, waits/50, acquired.Load())
		require.Greater(t, timedOut.Load(), int64(waits/3))
		require.Greater(t, cancelled.Load(), int64(waits/3))
		t.Logf("heap %d and %d KiB, %d goroutines", before.heap>>10, after.heap>>10, after.goroutines)

		unlockAll(t, held)
		s.nothingLeft(t)
		requireNoLeak(t, c, s.conn, after)
	})
}

// A client holds very many locks for more than three watchdog timeouts: undisturbed,
// then while its connections are flooded, then while some of the keys are overwritten.
func TestManyHolds(t *testing.T) {
	holds := harness.Size(2000, 100_000)
	timeout := time.Duration(harness.Size(3, 20)) * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		conn := harness.Conn(t, s.Addr)
		c, err := redlatch.Wrap(t.Context(), conn, redlatch.WithWatchdogTimeout(timeout))
		require.NoError(t, err)
		defer c.Close()
		all := takeAll(t, c, names(holds))

		// keep checks for a watchdog timeout that no hold is lost.
		keep := func(all []lock.Hold) {
			t.Helper()
			least := timeout
			for end := time.Now().Add(timeout); time.Now().Before(end); <-time.After(timeout / 10) {
				for _, h := range all {
					least = min(least, h.Remaining())
				}
			}
			t.Logf("of %d holds the shortest had %v left", len(all), least)
			require.Positive(t, least, "a hold was lost")
		}

		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		keep(all)
		calls := harness.Commands(t, conn)
		require.GreaterOrEqual(t, calls["hexists"], 2*holds, "keys renewed")
		require.Greater(t, calls["hexists"]/calls["evalsha"], harness.Size(4, 90), "keys renewed by one script")

		flood, cancel := context.WithCancel(context.Background())
		defer cancel()
		var flooding sync.WaitGroup
		for range 16 {
			flooding.Go(func() {
				for flood.Err() == nil {
					cmds := make(rueidis.Commands, 200)
					for i := range cmds {
						cmds[i] = conn.B().Incr().Key("flood").Build()
					}
					for _, reply := range conn.DoMulti(context.Background(), cmds...) {
						if !assert.NoError(t, reply.Error()) {
							return
						}
					}
				}
			})
		}
		keep(all)
		cancel()
		flooding.Wait()

		var others, kept []lock.Hold
		for i, h := range all {
			if i%100 == 0 {
				others = append(others, h)
				require.NoError(t, conn.Do(t.Context(), conn.B().Set().Key(h.Name()).Value("precious").Build()).Error())
			} else {
				kept = append(kept, h)
			}
		}
		keep(kept)
		for _, h := range others {
			var lost *lock.LostError
			require.ErrorAs(t, context.Cause(h.Context()), &lost)
			require.Equal(t, lock.ReasonGone, lost.Reason)
			require.ErrorIs(t, h.Unlock(t.Context()), lost)
		}

		unlockAll(t, kept)
		require.Equal(t, ":"+strconv.Itoa(len(others)+1), harness.Do(t, s.Addr, "DBSIZE"), "and the counter of the flood")
	})
}
