package fairlock_test

import (
	"context"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

const (
	// soon is enough for what takes a few round trips, on a busy machine.
	soon = 10 * time.Second
	// slack is how late a busy machine does what has a time.
	slack = 2500 * time.Millisecond
)

func nothing(context.Context) error { return nil }

func mustLock(t testing.TB, l *fairlock.Lock, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(context.Background(), opts...)
	require.NoError(t, err)
	return h
}

// The keys of the queue of a lock.
func listKey(name string) string      { return "redisson_lock_queue:{" + name + "}" }
func deadlinesKey(name string) string { return "redisson_lock_timeout:{" + name + "}" }
func aliveKey(name string) string     { return "redlatch_lock_alive:{" + name + "}" }

// ask sends a command that only reads, on a connection of its own. Whoever asks again
// and again leaves the server time in between: it drops connections that come too
// fast, those of the clients under test too, and they try again after seconds.
func ask(t testing.TB, addr string, words ...string) (reply []string) {
	t.Helper()
	harness.Eventually(t, soon, "the server answers", func() bool {
		time.Sleep(5 * time.Millisecond)
		var err error
		reply, err = testserver.Query(addr, words...)
		return err == nil
	})
	return reply
}

// line returns the owners in the queue of a lock, as the server has them.
func line(t testing.TB, addr, name string) []string {
	t.Helper()
	return ask(t, addr, "LRANGE", listKey(name), "0", "-1")
}

// noTrace fails the test unless an owner soon has nothing in the queue of a lock.
func noTrace(t testing.TB, addr, name, owner string) {
	t.Helper()
	harness.Eventually(t, soon, "no trace of it in the queue", func() bool {
		for _, look := range [][]string{
			{"LRANGE", listKey(name), "0", "-1"}, {"ZRANGE", deadlinesKey(name), "0", "-1"}, {"ZRANGE", aliveKey(name), "0", "-1"},
		} {
			if slices.Contains(ask(t, addr, look...), owner) {
				return false
			}
		}
		return true
	})
}

// caller is a call of Lock that is under way.
type caller struct {
	t     testing.TB
	owner string // that has the place

	cancel context.CancelCauseFunc
	ended  chan struct{}
	hold   lock.Hold // what the call came to
	err    error
	at     time.Time // when it did
}

// start calls Lock.
func start(t testing.TB, ctx context.Context, l *fairlock.Lock, opts ...lock.Option) *caller {
	w := &caller{t: t, ended: make(chan struct{})}
	ctx, w.cancel = context.WithCancelCause(ctx)
	go func() {
		defer close(w.ended)
		w.hold, w.err = l.Lock(ctx, opts...)
		w.at = time.Now()
	}()
	t.Cleanup(func() { w.cancel(nil) })
	return w
}

// queue calls Lock and returns when the caller has a place behind all others. The
// lock is held, and nobody else comes meanwhile.
func queue(t testing.TB, ctx context.Context, addr string, l *fairlock.Lock, opts ...lock.Option) *caller {
	t.Helper()
	before := len(line(t, addr, l.Name()))
	w := start(t, ctx, l, opts...)
	harness.Eventually(t, soon, "it has a place", func() bool {
		owners := line(t, addr, l.Name())
		if len(owners) <= before {
			return false
		}
		w.owner = owners[len(owners)-1]
		return true
	})
	return w
}

// asleep is queue for a waiter that is the first of its process, which does not
// hold the lock: it returns when that has made its second attempt, after its
// subscription, and sleeps. Nobody else asks the server meanwhile.
func asleep(t testing.TB, ctx context.Context, addr string, l *fairlock.Lock, opts ...lock.Option) *caller {
	t.Helper()
	conn := harness.Conn(t, addr)
	defer conn.Close()
	before := harness.Commands(t, conn)["evalsha"]
	w := queue(t, ctx, addr, l, opts...)
	harness.Eventually(t, soon, "it sleeps", func() bool {
		return harness.Commands(t, conn)["evalsha"] >= before+2 && harness.GoroutinesIn("(*hold).Try") == 0
	})
	return w
}

// end waits for the end of the call.
func (w *caller) end() error {
	w.t.Helper()
	select {
	case <-w.ended:
		return w.err
	case <-time.After(2 * soon):
		require.FailNow(w.t, "a waiter hangs")
		return nil
	}
}

// acquired waits until the waiter has the lock.
func (w *caller) acquired() lock.Hold {
	w.t.Helper()
	require.NoError(w.t, w.end())
	return w.hold
}

// waiting reports whether the call goes on.
func (w *caller) waiting() bool {
	select {
	case <-w.ended:
		return false
	default:
		return true
	}
}

// inOrder checks that the waiters get the lock one after the other, and gives it
// back for each.
func inOrder(t testing.TB, waiters ...*caller) {
	t.Helper()
	for i, w := range waiters {
		h := w.acquired()
		for _, later := range waiters[i+1:] {
			require.True(t, later.waiting(), "one has overtaken another")
		}
		if w.owner != "" {
			require.Equal(t, w.owner, h.Owner().String())
		}
		require.NoError(t, h.Unlock(context.Background()))
	}
}

// clients returns n clients on one server.
func clients(t testing.TB, s *testserver.Server, n int, opts ...redlatch.Option) []*redlatch.Client {
	all := make([]*redlatch.Client, n)
	for i := range all {
		all[i] = harness.Client(t, s, opts...)
	}
	return all
}

func TestReentryDoesNotWaitBehindTheQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		l := c.FairLock("orders")
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h1, err := l.Lock(ctx)
		require.NoError(t, err)
		w1 := queue(t, t.Context(), s.Addr, l)
		w2 := queue(t, t.Context(), s.Addr, other.FairLock("orders"))
		h2, err := l.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, h2.Unlock(ctx))
		require.NoError(t, h1.Unlock(ctx))
		inOrder(t, w1, w2)
		harness.NothingLeft(t, s.Addr)
	})
}

// Others wait as ever, and the owner itself where others do.
func TestNonReentrant(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		l := c.FairLock("orders", fairlock.NonReentrant(), nil)
		h, err := l.Lock(ctx)
		require.NoError(t, err)
		w := queue(t, t.Context(), s.Addr, l)
		_, err = l.Lock(ctx)
		require.ErrorIs(t, err, lock.ErrReentered)
		require.Equal(t, []string{w.owner}, line(t, s.Addr, "orders"))
		require.NoError(t, h.Unlock(ctx))
		inOrder(t, w)
		harness.NothingLeft(t, s.Addr)
	})
}

// The holders never unlock: each of the waiters gets in when the lease before it is
// over, and they do so in their order.
func TestLeasesRunOutOneAfterTheOther(t *testing.T) {
	const waiters, first, lease = 6, 500 * time.Millisecond, 200 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for name, all := range map[string][]*redlatch.Client{
			"one process": clients(t, s, 1), "several": clients(t, s, waiters),
		} {
			t.Run(name, func(t *testing.T) {
				var line []*caller
				begin := time.Now()
				holder := mustLock(t, all[0].FairLock("orders"), lock.Lease(first))
				for i := range waiters {
					line = append(line, queue(t, t.Context(), s.Addr, all[i%len(all)].FairLock("orders"),
						lock.Lease(lease), lock.Wait(time.Minute)))
				}
				for i, w := range line {
					h := w.acquired()
					require.Equal(t, w.owner, h.Owner().String())
					require.GreaterOrEqual(t, w.at.Sub(begin), first+time.Duration(i)*lease-10*time.Millisecond)
				}
				require.Less(t, line[waiters-1].at.Sub(begin), first+(waiters-1)*lease+2*slack)
				require.ErrorIs(t, holder.Unlock(t.Context()), lock.ErrLost)
				for _, w := range line[:waiters-1] {
					require.ErrorIs(t, w.hold.Unlock(t.Context()), lock.ErrLost)
				}
				harness.NothingLeft(t, s.Addr)
				runtime.KeepAlive(line)
			})
		}
	})
}

// Whoever was behind a waiter that has left goes by the lease, too.
func TestTheLeaseRunsOutWhenTheFirstWaiterHasLeft(t *testing.T) {
	const lease = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := clients(t, s, 3)
		begin := time.Now()
		h := mustLock(t, all[0].FairLock("orders"), lock.Lease(lease))
		first := asleep(t, t.Context(), s.Addr, all[1].FairLock("orders"))
		second := asleep(t, t.Context(), s.Addr, all[2].FairLock("orders"))
		first.cancel(nil)
		require.ErrorIs(t, first.end(), lock.ErrNotAcquired)
		next := second.acquired()
		require.Less(t, second.at.Sub(begin), lease+slack)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		require.NoError(t, next.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestTheLockIsFreeWhenTheHoldersClientIsClosed(t *testing.T) {
	const timeout = time.Second // of the watchdog
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		h := mustLock(t, c.FairLock("orders"))
		w := queue(t, t.Context(), s.Addr, harness.Client(t, s).FairLock("orders"))
		<-time.After(timeout + timeout/2) // it is renewed past its first lease
		require.True(t, w.waiting())
		require.NoError(t, h.Context().Err())
		begin := time.Now()
		c.Close()
		next := w.acquired()
		require.Less(t, w.at.Sub(begin), timeout+slack)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrClosed)
		require.NoError(t, next.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// Whoever waits for a short time leaves when that is over, and costs nobody else
// the place: neither those who wait for long beside it nor, as Redisson reckons, those
// behind it.
func TestWaitsOfDifferentLengthsSideBySide(t *testing.T) {
	const short, long = 300 * time.Millisecond, 30 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := clients(t, s, 3)
		h := mustLock(t, all[0].FairLock("orders"))
		var stay, leave []*caller
		for i := range 9 {
			l := all[i%len(all)].FairLock("orders")
			if i%2 == 0 {
				stay = append(stay, queue(t, t.Context(), s.Addr, l, lock.Wait(long)))
			} else {
				leave = append(leave, queue(t, t.Context(), s.Addr, l, lock.Wait(short)))
			}
		}
		for _, w := range leave {
			require.ErrorIs(t, w.end(), lock.ErrNotAcquired)
			noTrace(t, s.Addr, "orders", w.owner)
		}
		var want []string
		for _, w := range stay {
			require.True(t, w.waiting())
			want = append(want, w.owner)
		}
		require.Equal(t, want, line(t, s.Addr, "orders"))
		// Nobody has a deadline that a client in Java would find in the past.
		scores, err := testserver.Query(s.Addr, "ZCOUNT", deadlinesKey("orders"), "-inf", strconv.FormatInt(time.Now().Add(time.Minute).UnixMilli(), 10))
		require.NoError(t, err)
		require.Equal(t, []string{"0"}, scores)
		require.NoError(t, h.Unlock(t.Context()))
		inOrder(t, stay...)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestForceUnlockKeepsTheOrder(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.FairLock("orders")
		for _, waiting := range []*redlatch.Client{c, harness.Client(t, s)} {
			h := mustLock(t, l)
			first := queue(t, t.Context(), s.Addr, waiting.FairLock("orders"))
			second := queue(t, t.Context(), s.Addr, l)
			begin := time.Now()
			forced, err := l.ForceUnlock(t.Context())
			require.NoError(t, err)
			require.True(t, forced)
			inOrder(t, first, second)
			require.Less(t, time.Since(begin), 3*time.Second) // well before any poll
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

func TestForceUnlockElsewhereWakesTheWaiterBehindAHolderHere(t *testing.T) {
	const timeout = 3 * time.Second // of the watchdog: the holder hears of it a third later
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		h := mustLock(t, c.FairLock("orders"))
		w := queue(t, t.Context(), s.Addr, c.FairLock("orders"))
		begin := time.Now()
		forced, err := harness.Client(t, s).FairLock("orders").ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
		next := w.acquired()
		require.Less(t, w.at.Sub(begin), timeout/3*2+slack)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		require.NoError(t, next.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestTryLockNeverQueuesNorOvertakes(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other, conn := harness.Client(t, s), harness.Client(t, s), harness.Conn(t, s.Addr)
		h := mustLock(t, c.FairLock("orders"))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		refused := func(keys string) {
			t.Helper()
			for _, c := range []*redlatch.Client{c, other} {
				for _, ctx := range []context.Context{t.Context(), lock.WithOwner(t.Context(), c.NewOwner())} {
					_, err := c.FairLock("orders").TryLock(ctx)
					require.ErrorIs(t, err, lock.ErrNotAcquired)
					_, err = c.FairLock("orders").Lock(ctx, lock.Wait(0))
					require.ErrorIs(t, err, lock.ErrNotAcquired)
				}
			}
			require.Equal(t, keys, harness.Do(t, s.Addr, "DBSIZE"))
			require.Zero(t, harness.Commands(t, conn)["rpush"], "not even for a moment")
		}
		refused(":1")
		_, err := c.FairLock("orders").TryLock(t.Context(), lock.Wait(time.Second))
		require.ErrorIs(t, err, lock.ErrInvalid)
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)

		// The lock is free, and its first waiter has not come yet.
		o := other.NewOwner().String()
		far := strconv.FormatInt(time.Now().Add(time.Minute).UnixMilli(), 10)
		harness.Do(t, s.Addr, "RPUSH", listKey("orders"), o)
		harness.Do(t, s.Addr, "ZADD", deadlinesKey("orders"), far, o)
		harness.Do(t, s.Addr, "ZADD", aliveKey("orders"), far, o)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		refused(":3")
		require.Equal(t, []string{o}, line(t, s.Addr, "orders"))
	})
}

func TestQueue(t *testing.T) {
	const timeout = 9 * time.Second // of the watchdog
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := clients(t, s, 3, redlatch.WithWatchdogTimeout(timeout))
		l := all[0].FairLock("orders")
		queued := func(want ...*caller) {
			t.Helper()
			var owners []string
			for _, w := range want {
				owners = append(owners, w.owner)
			}
			waiters, err := l.Queue(t.Context())
			require.NoError(t, err)
			var got []string
			for _, w := range waiters {
				got = append(got, w.Owner.String())
				// A place is kept for a third of the timeout after each sign of life, which is
				// given every third of that.
				require.WithinRange(t, w.Deadline, time.Now().Add(timeout/3-timeout/9-slack), time.Now().Add(timeout/3+slack))
			}
			require.Equal(t, owners, got)
		}
		queued()
		require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
		h := mustLock(t, l)
		queued()
		var line []*caller
		for i := range 5 {
			ctx := t.Context()
			if i == 3 {
				ctx = lock.WithOwner(ctx, all[i%3].NewOwner())
			}
			line = append(line, queue(t, ctx, s.Addr, all[i%3].FairLock("orders")))
		}
		queued(line...)
		line[1].cancel(nil)
		require.ErrorIs(t, line[1].end(), lock.ErrNotAcquired)
		noTrace(t, s.Addr, "orders", line[1].owner)
		queued(line[0], line[2], line[3], line[4])
		<-time.After(timeout / 3) // for longer than a place is kept without a sign of life
		queued(line[0], line[2], line[3], line[4])
		require.NoError(t, h.Unlock(t.Context()))
		inOrder(t, line[0])
		line[2].acquired()
		queued(line[3], line[4])
		inOrder(t, line[2:]...)
		harness.NothingLeft(t, s.Addr)
	})
}

// Those who wait in Java have a deadline, those who have lost their place are left
// out, and an owner of another form is nobody.
func TestQueueWithOthersInIt(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).FairLock("orders")
		java, err := lock.ParseOwner("7f6f6f5e-0f0a-4d8e-a6c4-6b7a4d0a2c11:42")
		require.NoError(t, err)
		later := time.UnixMilli(time.Now().Add(5 * time.Minute).UnixMilli())
		at := func(t time.Time) string { return strconv.FormatInt(t.UnixMilli(), 10) }
		for owner, deadline := range map[string]time.Time{java.String(): later, "somebody": later, "dead": time.Now().Add(-time.Second)} {
			harness.Do(t, s.Addr, "ZADD", deadlinesKey("orders"), at(deadline), owner)
		}
		harness.Do(t, s.Addr, "RPUSH", listKey("orders"), "dead", java.String(), "somebody")
		queued, err := l.Queue(t.Context())
		require.NoError(t, err)
		require.Equal(t, []fairlock.Waiter{{Owner: java, Deadline: later}, {Deadline: later}}, queued)
		require.Equal(t, []string{"dead", java.String(), "somebody"}, line(t, s.Addr, "orders"), "it changes nothing")
	})
}

func TestNamedOwnersWait(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := clients(t, s, 2)
		h := mustLock(t, all[0].FairLock("orders"))
		var line []*caller
		for i := range 6 {
			c := all[i/2%2]
			ctx := t.Context()
			if i%2 == 0 {
				o := c.NewOwner()
				ctx = lock.WithOwner(ctx, o)
				line = append(line, queue(t, ctx, s.Addr, c.FairLock("orders")))
				require.Equal(t, o.String(), line[i].owner)
			} else {
				line = append(line, queue(t, ctx, s.Addr, c.FairLock("orders")))
			}
		}
		require.NoError(t, h.Unlock(t.Context()))
		inOrder(t, line...)
		harness.NothingLeft(t, s.Addr)
	})
}

// Two goroutines of one owner wait: they have one place, and have the lock together
// when its turn has come.
func TestTwoGoroutinesOfOneNamedOwnerWait(t *testing.T) {
	const timeout = 3 * time.Second // of the watchdog
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		o := c.NewOwner()
		ctx := lock.WithOwner(t.Context(), o)
		h := mustLock(t, other.FairLock("orders"))
		w1 := queue(t, ctx, s.Addr, c.FairLock("orders"))
		w2 := start(t, ctx, c.FairLock("orders"))
		harness.Eventually(t, soon, "both wait", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == 2 })
		last := queue(t, t.Context(), s.Addr, other.FairLock("orders"))
		require.Equal(t, []string{o.String(), last.owner}, line(t, s.Addr, "orders"))
		require.NoError(t, h.Unlock(t.Context()))
		h1, h2 := w1.acquired(), w2.acquired()
		require.Equal(t, 2, harness.HoldCount(t, c.FairLock("orders"), o))
		require.True(t, last.waiting())
		require.NoError(t, h1.Unlock(ctx))
		require.True(t, last.waiting())
		require.NoError(t, h2.Unlock(ctx))
		inOrder(t, last)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestAKeyOfTheWrongType(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.FairLock("orders")
		for _, key := range []string{"orders", listKey("orders"), deadlinesKey("orders"), aliveKey("orders")} {
			harness.Do(t, s.Addr, "SET", key, "precious")
			for _, ctx := range []context.Context{t.Context(), lock.WithOwner(t.Context(), c.NewOwner())} {
				for what, do := range map[string]func() error{
					"TryLock": func() error {
						_, err := l.TryLock(ctx)
						return err
					},
					"Lock": func() error {
						_, err := l.Lock(ctx)
						return err
					},
					"Lock for a while": func() error {
						_, err := l.Lock(ctx, lock.Wait(time.Minute))
						return err
					},
				} {
					err := do()
					require.ErrorContains(t, err, "WRONGTYPE", "%s of %s", what, key)
					require.NotErrorIs(t, err, lock.ErrNotAcquired)
					require.NotErrorIs(t, err, lock.ErrIndeterminate)
				}
			}
			_, err := l.ForceUnlock(t.Context())
			require.ErrorContains(t, err, "WRONGTYPE")
			if key != "orders" {
				_, err = l.Queue(t.Context())
				require.ErrorContains(t, err, "WRONGTYPE")
			}
			require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"), key)
			require.Equal(t, "$8", harness.Do(t, s.Addr, "GET", key))
			harness.Do(t, s.Addr, "DEL", key)
			require.NoError(t, l.Do(t.Context(), nothing))
		}
	})
}

// The lock becomes something else while it is held and others wait.
func TestAKeyBecomesTheWrongType(t *testing.T) {
	const timeout = 3 * time.Second // of the watchdog
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		h := mustLock(t, c.FairLock("orders"))
		here := queue(t, t.Context(), s.Addr, c.FairLock("orders"))
		there := queue(t, t.Context(), s.Addr, harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)).FairLock("orders"))
		harness.Do(t, s.Addr, "SET", "orders", "precious")
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		for _, w := range []*caller{here, there} {
			require.ErrorContains(t, w.end(), "WRONGTYPE")
			noTrace(t, s.Addr, "orders", w.owner)
		}
		require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"))
		require.Equal(t, "$8", harness.Do(t, s.Addr, "GET", "orders"))
	})
}

func TestBadInputOfQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, gone := harness.Client(t, s), harness.Client(t, s)
		gone.Close()
		var none context.Context
		_, err := c.FairLock("").Queue(t.Context())
		require.ErrorIs(t, err, lock.ErrInvalid)
		_, err = c.FairLock("orders").Queue(none)
		require.ErrorIs(t, err, lock.ErrInvalid)
		_, err = gone.FairLock("orders").Queue(t.Context())
		require.ErrorIs(t, err, lock.ErrClosed)
	})
}

// A waiter keeps its place, and gets in after all.
func TestExtendWhileOthersWait(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.FairLock("orders")
		for _, ctx := range []context.Context{t.Context(), lock.WithOwner(t.Context(), c.NewOwner())} {
			h, err := l.Lock(ctx, lock.Lease(time.Minute))
			require.NoError(t, err)
			w := queue(t, t.Context(), s.Addr, l)
			require.NoError(t, h.Extend(ctx, 2*time.Minute))
			require.NoError(t, h.Unlock(ctx))
			inOrder(t, w)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

func TestADroppedHoldIsReleasedToTheFirstWaiter(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		l := c.FairLock("orders")
		h := mustLock(t, l)
		w1 := queue(t, t.Context(), s.Addr, harness.Client(t, s).FairLock("orders"))
		w2 := queue(t, t.Context(), s.Addr, l)
		runtime.KeepAlive(h) // until here
		harness.Eventually(t, soon, "the hold is collected", func() bool {
			runtime.GC()
			return !w1.waiting()
		})
		inOrder(t, w1, w2)
		require.Contains(t, log.String(), "dropped without Unlock")
		require.Contains(t, log.String(), "kind=fair")
		require.Contains(t, log.String(), "fairlock_test.go")
		harness.NothingLeft(t, s.Addr)
	})
}

func TestNameMapper(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithNameMapper(func(name string) string { return "test::" + name }))
		l := c.FairLock("lock")
		h := mustLock(t, l)
		require.Equal(t, "lock", l.Name())
		require.Equal(t, "lock", h.Name())
		w := start(t, t.Context(), l)
		harness.Eventually(t, soon, "it waits", func() bool { return len(line(t, s.Addr, "test::lock")) == 1 })
		keys, err := testserver.Query(s.Addr, "KEYS", "*")
		require.NoError(t, err)
		require.ElementsMatch(t, []string{"test::lock", listKey("test::lock"), deadlinesKey("test::lock"), aliveKey("test::lock")}, keys)
		queued, err := l.Queue(t.Context())
		require.NoError(t, err)
		require.Len(t, queued, 1)
		require.NoError(t, h.Unlock(t.Context()))
		inOrder(t, w)
		harness.NothingLeft(t, s.Addr)
	})
}

// Waiters come one after the other and hold the lock for a while.
func TestArrivalOrder(t *testing.T) {
	const waiters = 2 * 4
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, n := range []int{1, 2, waiters} { // clients
			all := clients(t, s, n)
			h := mustLock(t, all[0].FairLock("orders"))
			var line []*caller
			for i := range waiters {
				line = append(line, queue(t, t.Context(), s.Addr, all[i%n].FairLock("orders")))
			}
			require.NoError(t, h.Unlock(t.Context()))
			for i, w := range line {
				h := w.acquired()
				<-time.After(20 * time.Millisecond)
				for _, later := range line[i+1:] {
					require.True(t, later.waiting())
				}
				require.NoError(t, h.Unlock(t.Context()))
			}
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// The server forgets everything: the hold is lost, and the lock works on.
func TestAfterTheServerWasRestarted(t *testing.T) {
	const timeout = time.Second // of the watchdog
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		h := mustLock(t, c.FairLock("orders"))
		s.Kill()
		begin := time.Now()
		_, err := c.FairLock("orders").Lock(t.Context(), lock.Wait(5*time.Second), lock.Lease(10*time.Second))
		require.Error(t, err)
		require.NotErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, s.Restart())
		<-time.After(time.Until(begin.Add(2 * timeout)))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		harness.Eventually(t, soon, "the server answers", func() bool { return c.Ping(t.Context()) == nil })
		h = mustLock(t, c.FairLock("orders"))
		<-time.After(2 * timeout)
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		here, there := harness.ClientAt(t, cluster.Addrs()), harness.ClientAt(t, cluster.Addrs())
		for i := range 6 {
			name := "orders " + strconv.Itoa(i)
			l := here.FairLock(name)
			h := mustLock(t, l)
			require.True(t, harness.IsLocked(t, l))
			var line []*caller
			for n, c := range []*redlatch.Client{there, here, there} {
				line = append(line, start(t, t.Context(), c.FairLock(name)))
				harness.Eventually(t, soon, "it has a place", func() bool {
					queued, err := l.Queue(t.Context())
					require.NoError(t, err)
					return len(queued) == n+1
				})
			}
			begin := time.Now()
			require.NoError(t, h.Unlock(t.Context()))
			inOrder(t, line...)
			require.Less(t, time.Since(begin), 3*time.Second) // messages arrive: well before any poll
			require.False(t, harness.IsLocked(t, l))
		}
	})
}
