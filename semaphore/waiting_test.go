package semaphore_test

import (
	"context"
	"errors"
	"fmt"
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
)

// waiter is a call of Acquire that is under way.
type waiter struct {
	t     testing.TB
	begun time.Time

	cancel context.CancelCauseFunc
	ended  chan struct{}
	give   taken // what the call came to
	err    error
	at     time.Time // when it did
}

func start(t testing.TB, sem anySemaphore, n int, opts ...lock.Option) *waiter {
	w := &waiter{t: t, ended: make(chan struct{}), begun: time.Now()}
	ctx, cancel := context.WithCancelCause(context.Background())
	w.cancel = cancel
	go func() {
		defer close(w.ended)
		w.give, w.err = sem.acquire(ctx, n, opts...)
		w.at = time.Now()
	}()
	t.Cleanup(func() { w.cancel(nil) })
	return w
}

// startBehind is start for one that comes behind n others who wait in the processes
// of this test.
func startBehind(t testing.TB, n int, sem anySemaphore, permits int, opts ...lock.Option) *waiter {
	t.Helper()
	w := start(t, sem, permits, opts...)
	queued(t, n+1)
	return w
}

// queued returns when that many wait in the processes of this test.
func queued(t testing.TB, n int) {
	t.Helper()
	harness.Eventually(t, soon, fmt.Sprint(n, " wait"), func() bool {
		return harness.GoroutinesIn("(*Waiter).wait") == n && harness.GoroutinesIn("(*pool).attempt") == 0
	})
}

// end waits for the end of the call.
func (w *waiter) end() error {
	w.t.Helper()
	select {
	case <-w.ended:
		return w.err
	case <-time.After(2 * soon):
		require.FailNow(w.t, "a waiter hangs")
		return nil
	}
}

// got waits until the waiter has its permits.
func (w *waiter) got() taken {
	w.t.Helper()
	require.NoError(w.t, w.end())
	return w.give
}

// waiting reports whether the call goes on.
func (w *waiter) waiting() bool {
	select {
	case <-w.ended:
		return false
	default:
		return true
	}
}

// leave ends the wait.
func (w *waiter) leave() {
	w.t.Helper()
	left := errors.New("left")
	w.cancel(left)
	err := w.end()
	require.ErrorIs(w.t, err, lock.ErrNotAcquired)
	require.ErrorIs(w.t, err, left)
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
	var got []string
	// Well before a place ends by itself.
	harness.Eventually(t, slack, "the line is right", func() bool {
		// The server drops connections that come too fast.
		time.Sleep(5 * time.Millisecond)
		var err error
		got, err = testserver.Query(addr, "ZRANGE", lineKey(name), "0", "-1")
		return err == nil && strings.Join(got, " ") == strings.Join(want, " ")
	})
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

func TestFirstComeFirstServedInAProcess(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		const permits = 10
		c := harness.Client(t, s)
		sem := limited(t, of(c, "orders"), permits)
		var held []taken
		for range permits {
			held = append(held, mustAcquire(t, sem, 1))
		}
		one := startBehind(t, 0, sem, 1)
		all := startBehind(t, 1, of(c, "orders"), permits)
		late := startBehind(t, 2, sem, 1)

		held[0].back(t)
		first := one.got()
		for _, h := range held[1:] {
			h.back(t)
		}
		require.Equal(t, permits-1, available(t, sem))
		queued(t, 2) // one of them for all, the other behind it
		require.True(t, all.waiting() && late.waiting())
		first.back(t)
		big := all.got()
		require.True(t, late.waiting())
		big.back(t)
		late.got().back(t)
		require.Equal(t, permits, available(t, sem))
	})
}

func TestAReleaseServesAsManyAsItCan(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		const permits, clients, each = 5, 3, 4
		holder := limited(t, of(harness.Client(t, s), "orders"), permits)
		held := mustAcquire(t, holder, permits)
		var waiters []*waiter
		for range clients {
			sem := of(harness.Client(t, s), "orders")
			for range each {
				waiters = append(waiters, startBehind(t, len(waiters), sem, 1))
			}
		}
		begin := time.Now()
		for left := len(waiters); left > 0; {
			held.back(t)
			served := min(left, permits)
			left -= served
			queued(t, left)
			var all []taken
			var waiting []*waiter
			for _, w := range waiters {
				if w.waiting() && len(all) < served {
					// Whoever has got it may not have said so yet.
					select {
					case <-w.ended:
					case <-time.After(20 * time.Millisecond):
					}
				}
				if w.waiting() {
					waiting = append(waiting, w)
				} else {
					all = append(all, w.got())
				}
			}
			waiters = waiting
			require.Len(t, all, served)
			require.Equal(t, permits-served, available(t, holder))
			held = func(ctx context.Context) error {
				for _, give := range all {
					if err := give(ctx); err != nil {
						return err
					}
				}
				return nil
			}
		}
		require.Less(t, time.Since(begin), soon)
		held.back(t)
		require.Equal(t, permits, available(t, holder))
	})
}

func TestOneAttemptAtATime(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		const waiters = 30
		holder := limited(t, of(harness.Client(t, s), "orders"), 1)
		held := mustAcquire(t, holder, 1)
		c, g := harness.GatedClient(t, s)
		for i := range waiters {
			startBehind(t, i, of(c, "orders"), 1)
		}
		inLine(t, s.Addr, "orders", c)
		queued(t, waiters)

		// The time until the next sign of life is enough for what follows.
		since := attempts(t, s.Addr)
		kept := g.Arm(harness.KeepReply, lineKey("orders"), 1)
		for range 20 {
			harness.Do(t, s.Addr, "PUBLISH", channel("orders"), "1")
		}
		<-kept
		harness.Eventually(t, soon, "the messages have come", func() bool { return harness.GoroutinesIn("(*pool).attempt") == 1 })
		require.Equal(t, 1, since())
		require.NoError(t, g.Open())
		queued(t, waiters)
		require.LessOrEqual(t, since(), 1, "one look is enough for all that happened meanwhile")
		held.back(t)
	})
}

func TestALostMessageIsMadeUpForByThePoll(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		holder := limited(t, of(harness.Client(t, s, redlatch.WithWatchdogTimeout(watchdogTimeout)), "orders"), 1)
		held := mustAcquire(t, holder, 1)
		c, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(watchdogTimeout))
		g.Mute()
		w := start(t, of(c, "orders"), 1)
		inLine(t, s.Addr, "orders", c)
		begin := time.Now()
		held.back(t)
		w.got().back(t)
		require.Less(t, w.at.Sub(begin), placeTime/3+slack)
	})
}

// Where there is no semaphore nobody stands in line, and gives no signs of life.
func TestASemaphoreMadeByHandIsFoundByThePoll(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		w := start(t, plain{harness.Client(t, s).Semaphore("orders")}, 1)
		<-time.After(2 * overtaking)
		queued(t, 1)
		begin := time.Now()
		harness.Do(t, s.Addr, "SET", "orders", "1")
		w.got()
		require.Less(t, w.at.Sub(begin), 5*time.Second+slack)
	})
}

func TestTheNearestExpiryWakesAWaiterWithoutAMessage(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease = 500 * time.Millisecond
		e := permitSemaphore(t, s, 3)
		take(t, e, 1, semaphore.Forever)
		take(t, e, 1, lock.Lease(time.Hour))
		begin := time.Now()
		take(t, e, 1, lock.Lease(lease))
		c, g := harness.GatedClient(t, s)
		g.Mute()
		got := mustAcquire(t, expirable{c.PermitSemaphore("orders")}, 1)
		require.GreaterOrEqual(t, time.Since(begin), lease-5*time.Millisecond)
		require.Less(t, time.Since(begin), lease+slack)
		got.back(t)
	})
}

// A process of which nothing is left but permits with a lease keeps nobody waiting
// for longer than that, however many there are.
func TestExpiredPermitsServeWaitersElsewhere(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease, permits = 2 * time.Second, 6 // all of them wait before it is over
		e := permitSemaphore(t, s, permits)
		var sems []anySemaphore
		for range permits {
			sems = append(sems, expirable{harness.Client(t, s).PermitSemaphore("orders")})
		}
		begin := time.Now()
		take(t, e, permits, lock.Lease(lease))
		var all []*waiter
		for i, sem := range sems {
			all = append(all, startBehind(t, i, sem, 1))
		}
		for _, w := range all {
			give := w.got()
			require.Less(t, w.at.Sub(begin), lease+slack)
			defer give.back(t)
		}
		require.Equal(t, counts{permits, 0, permits}, countsOf(t, e))
	})
}

// Between processes an older request is not overtaken once it has waited for 100 ms,
// however little the younger ones want.
func TestAnOldRequestIsNotOvertaken(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		const permits = 10
		old, young := harness.Client(t, s), harness.Client(t, s)
		holder := limited(t, of(harness.Client(t, s), "orders"), permits)
		held := mustAcquire(t, holder, 1)

		all := start(t, of(old, "orders"), permits)
		back, err := of(young, "orders").tryAcquire(t.Context(), 1)
		if time.Since(all.begun) < overtaking {
			require.NoError(t, err, "for so long nobody waits for anybody's turn")
		}
		if err == nil {
			back.back(t)
		}
		inLine(t, s.Addr, "orders", old)
		require.GreaterOrEqual(t, time.Since(all.begun), overtaking)

		require.Equal(t, permits-1, available(t, holder))
		for _, sem := range []anySemaphore{of(young, "orders"), holder, of(old, "orders")} {
			_, err := sem.tryAcquire(t.Context(), 1)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			_, err = sem.acquire(t.Context(), 1, lock.Wait(0))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
		}
		one := startBehind(t, 1, of(young, "orders"), 1)
		inLine(t, s.Addr, "orders", old, young)
		held.back(t)
		got := all.got()
		require.True(t, one.waiting())
		begin := time.Now()
		got.back(t)
		one.got().back(t)
		require.Less(t, one.at.Sub(begin), slack)
		inLine(t, s.Addr, "orders")
		require.Equal(t, permits, available(t, holder))
	})
}

// Who looked before it was their turn are told when it is.
func TestWhoIsServedFirstLetsOthersPass(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		// A poll of the first one comes a third of its place time after the last, one of
		// the other a pause later.
		const permits, pause = 10, 2 * time.Second
		young := of(harness.Client(t, s), "orders")
		holder := limited(t, of(harness.Client(t, s), "orders"), permits)
		held := mustAcquire(t, holder, 6)
		old, g := harness.GatedClient(t, s)
		g.Mute()
		many := start(t, of(old, "orders"), 5)
		inLine(t, s.Addr, "orders", old)
		<-time.After(pause)
		one := startBehind(t, 1, young, 1)
		held.back(t) // the younger one alone hears of it
		got := many.got()
		back := one.got()
		require.Less(t, one.at.Sub(many.at), pause*3/4)
		back.back(t)
		got.back(t)
		require.Equal(t, permits, available(t, holder))
	})
}

// Those who want one permit each take turns without end; one that wants all of them
// gets them nevertheless.
func TestABigRequestIsNotStarvedBySmallOnes(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
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
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
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

// The keys of the line go when all who were in it have died, also if nobody comes.
func TestTheLineGoesByItself(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		holder := limited(t, of(harness.Client(t, s), "orders"), 1)
		held := mustAcquire(t, holder, 1)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(watchdogTimeout))
		start(t, of(c, "orders"), 1)
		inLine(t, s.Addr, "orders", c)
		for begin := time.Now(); time.Since(begin) < 2*placeTime; time.Sleep(20 * time.Millisecond) {
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
	ways := map[string]func(w *waiter, c *redlatch.Client){
		"cancelled": func(w *waiter, _ *redlatch.Client) { w.leave() },
		"waited":    func(w *waiter, _ *redlatch.Client) { require.ErrorIs(w.t, w.end(), lock.ErrNotAcquired) },
		"closed": func(w *waiter, c *redlatch.Client) {
			c.Close()
			require.ErrorIs(w.t, w.end(), lock.ErrClosed)
		},
	}
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		for way, leaves := range ways {
			t.Run(way, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				old, young := harness.Client(t, s), harness.Client(t, s)
				holder := limited(t, of(harness.Client(t, s), "orders"), 2)
				held := mustAcquire(t, holder, 1)
				var opts []lock.Option
				if way == "waited" {
					opts = append(opts, lock.Wait(time.Second))
				}
				both := start(t, of(old, "orders"), 2, opts...)
				inLine(t, s.Addr, "orders", old)
				one := start(t, of(young, "orders"), 1)
				inLine(t, s.Addr, "orders", old, young)
				leaves(both, old)
				begin := time.Now()
				one.got().back(t)
				require.Less(t, one.at.Sub(begin), slack)
				inLine(t, s.Addr, "orders")
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
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		for way, comes := range ways {
			t.Run(way, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				a, b := harness.Client(t, s), harness.Client(t, s)
				w1 := startBehind(t, 0, of(a, "orders"), 1)
				w2 := startBehind(t, 1, of(b, "orders"), 1)
				listening := func(c *redlatch.Client) bool { return c.PubSub().Subscribed == 1 }
				harness.Eventually(t, soon, "they listen", func() bool { return listening(a) && listening(b) })
				<-time.After(2 * overtaking) // when they have looked for the last time before the poll
				queued(t, 2)
				begin := time.Now()
				comes(t, of(harness.Client(t, s), "orders"))
				for _, w := range []*waiter{w1, w2} {
					defer w.got().back(t)
					require.Less(t, w.at.Sub(begin), slack)
				}
			})
		}
	})
}

func TestWhatOnlyReadsWritesNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease = 50 * time.Millisecond
		c := harness.Client(t, s)
		sem := limited(t, plain{c.Semaphore("plain")}, 2)
		e := permitSemaphore(t, s, 2)
		expired := take(t, e, 1, lock.Lease(lease))[0]
		live := take(t, e, 1, lock.Lease(time.Hour))[0]
		harness.Eventually(t, lease+slack, "one has expired", func() bool { return available(t, e) == 1 })
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
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
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
			require.ErrorIs(t, w.end(), lock.ErrNotAcquired)
		}
		inLine(t, s.Addr, "orders")
		held.back(t)
		require.Equal(t, 2, available(t, holder))
	})
}

// It leaves while the attempt is under way that puts it into the line.
func TestWhoLeavesWhileItStepsIntoTheLineLetsOthersPass(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
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
		w.leave()
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
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		holder := limited(t, of(harness.Client(t, s), "orders"), 2)
		held := mustAcquire(t, holder, 2) // so there is nothing to tell the others
		c, other := harness.Client(t, s), harness.Client(t, s)
		for range 5 {
			first := start(t, of(c, "orders"), 2)
			inLine(t, s.Addr, "orders", c)
			between := start(t, of(other, "orders"), 2)
			inLine(t, s.Addr, "orders", c, other)
			next := startBehind(t, 2, of(c, "orders"), 2)
			<-time.After(overtaking)
			first.leave()
			inLine(t, s.Addr, "orders", other, c)
			between.leave()
			inLine(t, s.Addr, "orders", c)
			next.leave()
			inLine(t, s.Addr, "orders")
		}
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
		w.leave()
		limited(t, plain{other.Semaphore("orders")}, 1)
		require.NoError(t, other.Semaphore("orders").TryAcquire(t.Context(), 1))
	})
}

// What is given back goes to the next of the same process in the same request.
func TestAReleaseToTheNextOfThisProcessIsOneRequest(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		const waiters = 10
		c := harness.Client(t, s)
		sem := limited(t, of(c, "orders"), 1)
		held := mustAcquire(t, sem, 1)
		var all []*waiter
		for i := range waiters {
			all = append(all, startBehind(t, i, sem, 1))
		}
		<-time.After(overtaking) // then nobody has to ask for its place in the line
		inLine(t, s.Addr, "orders", c)
		queued(t, waiters)
		since := attempts(t, s.Addr)
		for i, w := range all {
			held.back(t)
			held = w.got()
			queued(t, waiters-1-i)
		}
		// Besides them, signs of life of whoever is the first to wait.
		require.LessOrEqual(t, since(), waiters+2)
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
				here, there := quiet(redlatch.WithHandOffLimit(0)), quiet(redlatch.WithWatchdogTimeout(watchdogTimeout))
				sem := limited(t, k.of(here, k.name), 1)
				held := mustAcquire(t, sem, 1)
				w := startBehind(t, 0, sem, 1)
				inLine(t, s.Addr, k.name, here)
				begin := time.Now()
				held.back(t)
				held = w.got()
				require.Less(t, w.at.Sub(begin), slack)

				w = start(t, k.of(there, k.name), 1)
				inLine(t, s.Addr, k.name, there)
				begin = time.Now()
				held.back(t)
				w.got().back(t)
				require.Less(t, w.at.Sub(begin), placeTime/3+slack)
			})
		}
	})
}

// Requests that are too much for one script together are made one after the other.
func TestLargeRequestsThatWaitTogetherAreAllServed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const each, waiters = semaphore.MaxBatch/2 + 1, 3
		e := limited(t, expirable{harness.Client(t, s).PermitSemaphore("orders")}, waiters*each)
		var held []taken
		for range waiters {
			held = append(held, mustAcquire(t, e, each))
		}
		var all []*waiter
		for i := range waiters {
			all = append(all, startBehind(t, i, e, each))
		}
		for _, h := range held {
			h.back(t)
		}
		for _, w := range all {
			w.got().back(t)
		}
		require.Equal(t, waiters*each, available(t, e))
	})
}

// A release tells the server of those who may be served by it, however many wait: what
// it says and how often is the same for a hundred.
func TestAReleaseDoesNotSpeakForAllWhoWait(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) anySemaphore) {
		const waiters, releases = 100, 10
		sem := limited(t, of(harness.Client(t, s), "orders"), 1)
		held := mustAcquire(t, sem, 1)
		got := make(chan taken, waiters)
		for range waiters {
			go func() {
				if back, err := sem.acquire(t.Context(), 1); err == nil {
					got <- back
				}
			}()
		}
		harness.Eventually(t, soon, "all wait", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == waiters })
		<-time.After(2 * overtaking) // the first is in the line
		bytes := func() int {
			info, err := testserver.Info(s.Addr, "stats")
			require.NoError(t, err)
			n, err := strconv.Atoi(info["total_net_input_bytes"])
			require.NoError(t, err)
			return n
		}
		since, least := attempts(t, s.Addr), math.MaxInt
		for range releases {
			before := bytes()
			held.back(t)
			held = <-got
			least = min(least, bytes()-before) // the first shows signs of life besides
		}
		require.LessOrEqual(t, since(), releases+3)
		require.Less(t, least, 1500)
		held.back(t)
		for range waiters - releases {
			(<-got).back(t)
		}
		require.Equal(t, 1, available(t, sem))
	})
}
