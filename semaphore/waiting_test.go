package semaphore_test

import (
	"context"
	"log/slog"
	"math"
	"strconv"
	"strings"
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
	// overtaking is for how long others may be served before an older request.
	overtaking = 100 * time.Millisecond
	// placeTime is for how long a client that died keeps its place in the line,
	// with the watchdog timeout that these tests have where it matters.
	placeTime       = time.Second
	watchdogTimeout = 3 * placeTime
	// heartbeat is how often a client in the line makes an attempt by itself, with the
	// default watchdog timeout.
	heartbeat = time.Second
)

// waiter is a call of Acquire in the background.
type waiter = harness.Call[taken]

func start(t testing.TB, sem anySemaphore, n int, opts ...lock.Option) *waiter {
	return harness.Start(t, context.Background(), func(ctx context.Context) (taken, error) { return sem.acquire(ctx, n, opts...) })
}

// startBehind is start for a semaphore of client c. It returns when the call waits,
// behind those of this client that were under way before.
func startBehind(t testing.TB, c *redlatch.Client, sem anySemaphore, n int, opts ...lock.Option) *waiter {
	t.Helper()
	before := c.Stats()
	w := start(t, sem, n, opts...)
	harness.Waits(t, before.Waiting+before.Attempting+1, c)
	return w
}

// unplaced returns when the only waiter of a client, which is for a semaphore that does
// not exist, has seen that it cannot go into the line. It looks by itself once more only
// when the poll is due.
func unplaced(t testing.TB, w *waiter, c *redlatch.Client) {
	t.Helper()
	harness.Eventually(t, soon, "a waiter for long", func() bool {
		return time.Since(w.Begun) > 2*overtaking && harness.Waiting(1, c)
	})
}

// The keys of the line before a semaphore.
func lineKey(name string) string  { return "redlatch_sc_waiting:{" + name + "}" }
func aliveKey(name string) string { return "redlatch_sc_alive:{" + name + "}" }
func channel(name string) string  { return "redisson_sc:{" + name + "}" }

// inLine returns when the line of a semaphore is of these clients.
func inLine(t testing.TB, addr, name string, clients ...*redlatch.Client) {
	t.Helper()
	var want []string
	for _, c := range clients {
		want = append(want, c.ID())
	}
	// Well before a place ends by itself.
	harness.Eventually(t, slack, "the line is right", func() bool {
		// The server drops connections that come too fast.
		time.Sleep(5 * time.Millisecond)
		got, err := testserver.Query(addr, "ZRANGE", lineKey(name), "0", "-1")
		return err == nil && strings.Join(got, " ") == strings.Join(want, " ")
	})
}

// told fails the test unless a client hears n messages of what happens. Its waiters look
// too soon by themselves for the time to tell why they were served.
func told(t testing.TB, c *redlatch.Client, n uint64, happens func()) {
	t.Helper()
	harness.Eventually(t, soon, "it listens", func() bool {
		hub := c.PubSub()
		return hub.Channels > 0 && hub.Subscribed == hub.Channels
	})
	before := c.PubSub().Messages
	happens()
	harness.Eventually(t, soon, "messages", func() bool { return c.PubSub().Messages >= before+n })
}

// attempts returns how many scripts the server has run since the function was
// called last.
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

// heartbeats returns how many attempts a client in the line may have made by itself.
func heartbeats(since time.Time) int { return 1 + int(time.Since(since)/heartbeat) }

func TestFirstComeFirstServedInAProcess(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits = 10
		c := harness.Client(t, s)
		sem := limited(t, of(c, "orders"), permits)
		var held []taken
		for range permits {
			held = append(held, mustAcquire(t, sem, 1))
		}
		one := startBehind(t, c, sem, 1)
		all := startBehind(t, c, of(c, "orders"), permits)
		late := startBehind(t, c, sem, 1)

		held[0].back(t)
		first := one.Got()
		for _, h := range held[1:] {
			h.back(t)
		}
		require.Equal(t, permits-1, available(t, sem))
		harness.Waits(t, 2, c) // one of them for all, the other behind it
		require.True(t, all.Running() && late.Running())
		first.back(t)
		big := all.Got()
		require.True(t, late.Running())
		big.back(t)
		late.Got().back(t)
		require.Equal(t, permits, available(t, sem))
	})
}

func TestAReleaseServesAsManyAsItCan(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits, clients, each = 5, 3, 4
		holder := limited(t, of(harness.Client(t, s), "orders"), permits)
		held := []taken{mustAcquire(t, holder, permits)}
		var waiting []*redlatch.Client
		served := make(chan taken, clients*each)
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
			for _, give := range held {
				give.back(t)
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
		for _, give := range held {
			give.back(t)
		}
		require.Equal(t, permits, available(t, holder))
	})
}

func TestOneAttemptAtATime(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const waiters, messages = 30, 20
		holder := limited(t, of(harness.Client(t, s), "orders"), 1)
		held := mustAcquire(t, holder, 1)
		c, g := harness.GatedClient(t, s)
		for range waiters {
			start(t, of(c, "orders"), 1)
		}
		inLine(t, s.Addr, "orders", c)
		harness.Waits(t, waiters, c)

		kept := g.Arm(harness.KeepReply, lineKey("orders"), 1)
		since := attempts(t, s.Addr)
		told(t, c, messages, func() {
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
		require.LessOrEqual(t, since(), heartbeats(opened), "one look is enough for all that happened meanwhile")
		held.back(t)
	})
}

// Where there is no semaphore nobody stands in line, and gives no signs of life.
func TestASemaphoreMadeByHandIsFoundByThePoll(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		w := startBehind(t, c, plain{c.Semaphore("orders")}, 1)
		unplaced(t, w, c)
		begin := time.Now()
		harness.Do(t, s.Addr, "SET", "orders", "1")
		w.Got()
		require.Less(t, w.At.Sub(begin), 5*time.Second+slack)
	})
}

// Also if a release of its own process, which is not enough for it, comes in between.
func TestTheNearestExpiryWakesAWaiterWithoutAMessage(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		// A waiter looks by itself 0.8 s later, once it is in the line.
		const lease, times = 300 * time.Millisecond, 5
		e := permitSemaphore(t, s, 4)
		take(t, e, 1, semaphore.Forever)
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
				w := start(t, expirable{deaf}, wanted)
				if wanted == 2 {
					inLine(t, s.Addr, "orders", c)
					harness.Waits(t, 1, c)
					require.NoError(t, other.Release(t.Context()))
				}
				w.Got().back(t)
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

// A process of which nothing is left but permits with a lease keeps nobody waiting
// for longer than that, however many there are.
func TestExpiredPermitsServeWaitersElsewhere(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease, permits = time.Second, 6
		e := permitSemaphore(t, s, permits)
		var sems []anySemaphore
		for range permits {
			sems = append(sems, expirable{harness.Client(t, s).PermitSemaphore("orders")})
		}
		begin := time.Now()
		take(t, e, permits, lock.Lease(lease))
		var all []*waiter
		for _, sem := range sems {
			all = append(all, start(t, sem, 1))
		}
		for _, w := range all {
			give := w.Got()
			require.GreaterOrEqual(t, w.At.Sub(begin), lease-5*time.Millisecond)
			require.Less(t, w.At.Sub(begin), lease+slack)
			defer give.back(t)
		}
		require.Equal(t, counts{permits, 0, permits}, countsOf(t, e))
	})
}

// Between processes an older request is not overtaken once it has waited for 100 ms,
// however little the younger ones want.
func TestAnOldRequestIsNotOvertaken(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits = 10
		old, young := harness.Client(t, s), harness.Client(t, s)
		holder := limited(t, of(harness.Client(t, s), "orders"), permits)
		held := mustAcquire(t, holder, 1)

		all := start(t, of(old, "orders"), permits)
		back, err := of(young, "orders").tryAcquire(t.Context(), 1)
		if time.Since(all.Begun) < overtaking {
			require.NoError(t, err, "for so long nobody waits for anybody's turn")
		}
		if err == nil {
			back.back(t)
		}
		inLine(t, s.Addr, "orders", old)
		require.GreaterOrEqual(t, time.Since(all.Begun), overtaking)

		require.Equal(t, permits-1, available(t, holder))
		for _, sem := range []anySemaphore{of(young, "orders"), holder, of(old, "orders")} {
			_, err := sem.tryAcquire(t.Context(), 1)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			_, err = sem.acquire(t.Context(), 1, lock.Wait(0))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
		}
		one := startBehind(t, young, of(young, "orders"), 1)
		inLine(t, s.Addr, "orders", old, young)
		held.back(t)
		got := all.Got()
		require.True(t, one.Running())
		told(t, young, 1, func() { got.back(t) })
		one.Got().back(t)
		inLine(t, s.Addr, "orders")
		require.Equal(t, permits, available(t, holder))
	})
}

// A younger request, which found the older one before it, is told when that is served.
func TestWhoIsServedFirstLetsOthersPass(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits = 10
		young := harness.Client(t, s)
		holder := limited(t, of(harness.Client(t, s), "orders"), permits)
		held := mustAcquire(t, holder, 6)
		old, g := harness.GatedClient(t, s)
		g.Mute()
		many := start(t, of(old, "orders"), 5)
		inLine(t, s.Addr, "orders", old)
		one := startBehind(t, young, of(young, "orders"), 1)
		var got taken
		// The release, of which the younger one alone hears; and the service of the older.
		told(t, young, 2, func() {
			held.back(t)
			got = many.Got()
		})
		one.Got().back(t)
		got.back(t)
		require.Equal(t, permits, available(t, holder))
	})
}

// Those who want one permit each take turns without end; one that wants all of them
// gets them nevertheless.
func TestABigRequestIsNotStarvedBySmallOnes(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits, small = 4, 3
		big := limited(t, of(harness.Client(t, s), "orders"), permits)
		done := make(chan struct{})
		ended := make(chan error, small*permits)
		for range small {
			sem := of(harness.Client(t, s), "orders")
			for range permits {
				go func() {
					ended <- func() error {
						for {
							back, err := sem.acquire(context.Background(), 1)
							if err != nil {
								return err
							}
							time.Sleep(5 * time.Millisecond)
							if err := back(context.Background()); err != nil {
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
			back, err := big.acquire(t.Context(), permits)
			require.NoError(t, err)
			require.Less(t, time.Since(begin), overtaking+slack)
			back.back(t)
		}
		close(done)
		for range small * permits {
			require.NoError(t, <-ended)
		}
		require.Equal(t, permits, available(t, big))
	})
}

// A client that is in the line and gives no sign of life any more is one that died.
func TestTheDeadLoseTheirPlaceInTheLine(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const dead = "5d1f7a52-31c4-4c1b-8f0e-7f2a9f4f3d02"
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(watchdogTimeout))
		sem := limited(t, of(c, "orders"), 2)
		now := time.Now()
		harness.Do(t, s.Addr, "ZADD", lineKey("orders"), strconv.FormatInt(now.Add(-time.Minute).UnixMilli(), 10), dead)
		harness.Do(t, s.Addr, "ZADD", aliveKey("orders"), strconv.FormatInt(now.Add(placeTime).UnixMilli(), 10), dead)
		_, err := sem.tryAcquire(t.Context(), 1)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		got := mustAcquire(t, sem, 1)
		require.GreaterOrEqual(t, time.Since(now), placeTime-5*time.Millisecond)
		require.Less(t, time.Since(now), placeTime+slack)
		_, err = sem.tryAcquire(t.Context(), 1)
		require.NoError(t, err)
		got.back(t)
		inLine(t, s.Addr, "orders")
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", aliveKey("orders")))
	})
}

// The keys of the line expire soon after the last sign of life, also if nobody comes.
func TestTheLineGoesByItself(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		holder := limited(t, of(harness.Client(t, s), "orders"), 1)
		held := mustAcquire(t, holder, 1)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(watchdogTimeout))
		start(t, of(c, "orders"), 1)
		inLine(t, s.Addr, "orders", c)
		for begin := time.Now(); time.Since(begin) < placeTime*3/2; time.Sleep(placeTime / 20) {
			for _, key := range []string{lineKey("orders"), aliveKey("orders")} {
				left := harness.PTTL(t, s.Addr, key)
				require.Positive(t, left, "a live one keeps its place")
				require.LessOrEqual(t, left, placeTime.Milliseconds())
			}
		}
		held.back(t)
	})
}

func TestWhoLeavesTheLineLetsOthersPass(t *testing.T) {
	ways := map[string]func(t *testing.T, w *waiter, c *redlatch.Client){
		"cancelled": func(_ *testing.T, w *waiter, _ *redlatch.Client) { w.Leave() },
		"waited":    func(t *testing.T, w *waiter, _ *redlatch.Client) { require.ErrorIs(t, w.End(), lock.ErrNotAcquired) },
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
				holder := limited(t, of(harness.Client(t, s), way), 2)
				held := mustAcquire(t, holder, 1)
				var opts []lock.Option
				if way == "waited" {
					opts = append(opts, lock.Wait(time.Second))
				}
				both := start(t, of(old, way), 2, opts...)
				inLine(t, s.Addr, way, old)
				one := start(t, of(young, way), 1)
				inLine(t, s.Addr, way, old, young)
				told(t, young, 1, func() { leaves(t, both, old) })
				one.Got().back(t)
				inLine(t, s.Addr, way)
				back, err := holder.tryAcquire(t.Context(), 1)
				require.NoError(t, err)
				back.back(t)
				held.back(t)
			})
		}
	})
}

func TestWhateverBringsPermitsWakesWaiters(t *testing.T) {
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
			e, ok := sem.(expirable)
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
				unplaced(t, w1, a)
				unplaced(t, w2, b)
				begin := time.Now()
				told(t, a, 1, func() { told(t, b, 1, func() { comes(t, of(harness.Client(t, s), way)) }) })
				for _, w := range []*waiter{w1, w2} {
					defer w.Got().back(t)
					require.Less(t, w.At.Sub(begin), slack)
				}
			})
		}
	})
}

func TestWhatOnlyReadsWritesNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		sem := limited(t, plain{c.Semaphore("plain")}, 2)
		e := permitSemaphore(t, s, 2)
		expired := takeExpired(t, e)
		live := take(t, e, 1, lock.Lease(time.Hour))[0]
		harness.Eventually(t, slack, "one has expired", func() bool { return available(t, e) == 1 })
		changes := func() string {
			info, err := testserver.Info(s.Addr, "persistence")
			require.NoError(t, err)
			return info["rdb_changes_since_last_save"]
		}
		conn := harness.Conn(t, s.Addr)
		before := changes()
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		for _, e := range []*semaphore.Expirable{e, c.PermitSemaphore("never set")} {
			countsOf(t, e)
			for _, id := range []string{expired.ID(), live.ID(), unknown} {
				_, err := e.LeaseTime(t.Context(), id)
				if err != nil {
					require.ErrorIs(t, err, lock.ErrNotHeld)
				}
			}
		}
		available(t, sem)
		available(t, c.Semaphore("never set"))
		calls := harness.Commands(t, conn)
		require.Positive(t, calls["evalsha"])
		require.Zero(t, calls["publish"])
		require.Equal(t, before, changes())
	})
}

// Waiters that come and go leave nothing in the line, on the server, or in the
// process.
func TestWaitersThatComeAndGo(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const clients, each = 3, 10
		holder := limited(t, of(harness.Client(t, s), "orders"), 2)
		held := mustAcquire(t, holder, 1)
		var all []*waiter
		for range clients {
			c := harness.Client(t, s)
			for i := range each {
				// Around the time when they step into the line.
				wait := overtaking + time.Duration(i-each/2)*2*time.Millisecond
				all = append(all, start(t, of(c, "orders"), 2, lock.Wait(wait)))
			}
		}
		for _, w := range all {
			require.ErrorIs(t, w.End(), lock.ErrNotAcquired)
		}
		inLine(t, s.Addr, "orders")
		held.back(t)
		require.Equal(t, 2, available(t, holder))
	})
}

// It leaves while the attempt is under way that puts it into the line.
func TestWhoLeavesWhileItStepsIntoTheLineLetsOthersPass(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		holder := limited(t, of(harness.Client(t, s), "orders"), 2)
		held := mustAcquire(t, holder, 1)
		_, err := holder.acquire(t.Context(), 2, lock.Wait(2*overtaking)) // the server knows the scripts
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		c, g := harness.GatedClient(t, s)
		// It tries when it comes, when it listens, and when it has waited.
		kept := g.Arm(harness.KeepReply, lineKey("orders"), 3)
		w := start(t, of(c, "orders"), 2)
		<-kept
		inLine(t, s.Addr, "orders", c)
		w.Leave()
		begin := time.Now()
		mustAcquire(t, holder, 1).back(t)
		require.Less(t, time.Since(begin), slack)
		require.NoError(t, g.Open())
		inLine(t, s.Addr, "orders")
		held.back(t)
	})
}

// The place in the line is the client's. When the waiter it was for leaves, the next
// of that client gets one of its own.
func TestThePlaceOfWhoLeavesIsNotThatOfTheNext(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		holder := limited(t, of(harness.Client(t, s), "orders"), 2)
		held := mustAcquire(t, holder, 2) // so there is nothing to tell the others
		c, other := harness.Client(t, s), harness.Client(t, s)
		const times = 4
		var took time.Duration
		for range times {
			first := start(t, of(c, "orders"), 2)
			inLine(t, s.Addr, "orders", c)
			between := start(t, of(other, "orders"), 2)
			inLine(t, s.Addr, "orders", c, other)
			next := startBehind(t, c, of(c, "orders"), 2)
			time.Sleep(overtaking) // then it wants one at once
			first.Leave()
			begin := time.Now()
			inLine(t, s.Addr, "orders", other, c)
			took += time.Since(begin)
			between.Leave()
			inLine(t, s.Addr, "orders", c)
			next.Leave()
			inLine(t, s.Addr, "orders")
		}
		require.Less(t, took, times*heartbeat/2)
		held.back(t)
	})
}

// Where there is no semaphore any more nobody stands in line.
func TestALineEndsWithItsSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const ttl, placeTime = 700 * time.Millisecond, 5 * time.Second
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(3*placeTime))
		sem := plain{c.Semaphore("orders")}
		made, err := sem.TrySetPermitsFor(t.Context(), 1, ttl)
		require.NoError(t, err)
		require.True(t, made)
		mustAcquire(t, sem, 1)
		w := start(t, sem, 2)
		inLine(t, s.Addr, "orders", c)
		inLine(t, s.Addr, "orders") // when it has looked after the end of the semaphore
		other := harness.Client(t, s)
		limited(t, plain{other.Semaphore("orders")}, 1)
		inLine(t, s.Addr, "orders", c) // again
		require.ErrorIs(t, other.Semaphore("orders").TryAcquire(t.Context(), 1), lock.ErrNotAcquired)

		harness.Do(t, s.Addr, "DEL", "orders")
		inLine(t, s.Addr, "orders")
		w.Leave()
		limited(t, plain{other.Semaphore("orders")}, 1)
		require.NoError(t, other.Semaphore("orders").TryAcquire(t.Context(), 1))
	})
}

// What is given back goes to the next of the same process in the same request.
func TestAReleaseToTheNextOfThisProcessIsOneRequest(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const waiters = 10
		c := harness.Client(t, s)
		sem := limited(t, of(c, "orders"), 1)
		held := mustAcquire(t, sem, 1)
		var all []*waiter
		for range waiters {
			all = append(all, startBehind(t, c, sem, 1))
		}
		time.Sleep(overtaking) // then nobody has to ask for its place in the line
		inLine(t, s.Addr, "orders", c)
		harness.Waits(t, waiters, c)
		since, begin := attempts(t, s.Addr), time.Now()
		for i, w := range all {
			held.back(t)
			held = w.Got()
			harness.Waits(t, waiters-1-i, c)
		}
		// Besides them, signs of life of whoever is the first to wait.
		require.LessOrEqual(t, since(), waiters+heartbeats(begin))
		held.back(t)
	})
}

// A user that may neither publish nor subscribe shares a semaphore all the same.
// Those of its own process do not even have to poll.
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
				sem := limited(t, k.of(here, k.name), 1)
				held := mustAcquire(t, sem, 1)
				const times = 5
				var took time.Duration
				for range times {
					w := startBehind(t, here, sem, 1)
					inLine(t, s.Addr, k.name, here)
					begin := time.Now()
					held.back(t)
					held = w.Got()
					took += w.At.Sub(begin)
				}
				require.Less(t, took, times*heartbeat/2)

				w := start(t, k.of(there, k.name), 1)
				inLine(t, s.Addr, k.name, there)
				begin := time.Now()
				held.back(t)
				w.Got().back(t)
				require.Less(t, w.At.Sub(begin), placeTime/3+slack)
			})
		}
	})
}

// Requests that are too much for one script together are made one after the other.
func TestLargeRequestsThatWaitTogetherAreAllServed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const each, waiters = semaphore.MaxBatch/2 + 1, 2
		c := harness.Client(t, s)
		e, other := limited(t, expirable{c.PermitSemaphore("orders")}, 1), harness.Client(t, s).PermitSemaphore("orders")
		require.NoError(t, other.AddPermits(t.Context(), -1)) // the server knows the script now
		var all []*waiter
		for range waiters {
			all = append(all, startBehind(t, c, e, each))
		}
		since := attempts(t, s.Addr)
		require.NoError(t, other.AddPermits(t.Context(), waiters*each))
		var got []taken
		for _, w := range all {
			got = append(got, w.Got())
		}
		require.Greater(t, since(), waiters) // and that one
		for _, give := range got {
			give.back(t)
		}
		require.Equal(t, waiters*each, available(t, e))
	})
}

// A release tells the server of those who may be served by it, however many wait: what
// it says and how often is the same for a hundred.
func TestAReleaseDoesNotSpeakForAllWhoWait(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const waiters, releases = 100, 10
		c := harness.Client(t, s)
		sem := limited(t, of(c, "orders"), 1)
		held := mustAcquire(t, sem, 1)
		got := make(chan taken, waiters)
		for range waiters {
			go func() {
				if back, err := sem.acquire(t.Context(), 1); err == nil {
					got <- back
				}
			}()
		}
		inLine(t, s.Addr, "orders", c)
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
			held.back(t)
			held = <-got
			least = min(least, bytes()-before) // the first shows signs of life besides
		}
		require.LessOrEqual(t, since(), releases+1+heartbeats(begin))
		require.Less(t, least, 1500)
		held.back(t)
		for range waiters - releases {
			(<-got).back(t)
		}
		require.Equal(t, 1, available(t, sem))
	})
}
