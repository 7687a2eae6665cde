package fairlock_test

import (
	"context"
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
	// soon is enough for a few round trips on a busy machine.
	soon = 10 * time.Second
	// slack is how late timers may be on a busy machine.
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

// ask sends a read-only command on a connection of its own. It pauses before each one: the
// server drops connections that come too fast, also those of the clients under test, which
// reconnect only after seconds.
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

// waiting returns the owners in the queue of a lock on the server.
func waiting(t testing.TB, addr, name string) []string {
	t.Helper()
	return ask(t, addr, "LRANGE", listKey(name), "0", "-1")
}

// noTrace verifies that an owner soon has nothing in the queue of a lock.
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

// caller is a call of Lock in the background.
type caller = harness.Call[lock.Hold]

// queue calls Lock and returns when the caller is at the end of the queue. The lock is
// held, and no other caller comes meanwhile.
func queue(t testing.TB, ctx context.Context, addr string, l *fairlock.Lock, opts ...lock.Option) *caller {
	t.Helper()
	before := waiting(t, addr, l.Name())
	w := harness.StartLock(t, ctx, l, opts...)
	harness.Eventually(t, soon, "it is in the queue", func() bool {
		owners := waiting(t, addr, l.Name())
		if len(owners) == 0 || slices.Contains(before, owners[len(owners)-1]) {
			return false
		}
		w.Owner = owners[len(owners)-1]
		return true
	})
	return w
}

// asleep is queue for the first waiter of a client that does not hold the lock. It returns
// when the waiter has made its second attempt, after its subscription, and sleeps. No other
// client sends requests meanwhile.
func asleep(t testing.TB, ctx context.Context, addr string, c *redlatch.Client, opts ...lock.Option) *caller {
	t.Helper()
	conn := harness.Conn(t, addr)
	defer conn.Close()
	before := harness.Commands(t, conn)["evalsha"]
	w := queue(t, ctx, addr, c.FairLock("orders"), opts...)
	harness.Eventually(t, soon, "it sleeps", func() bool {
		return harness.Commands(t, conn)["evalsha"] >= before+2 && c.Stats().Attempting == 0
	})
	return w
}

// clients returns n clients on one server.
func clients(t testing.TB, s *testserver.Server, n int, opts ...redlatch.Option) []*redlatch.Client {
	all := make([]*redlatch.Client, n)
	for i := range all {
		all[i] = harness.Client(t, s, opts...)
	}
	return all
}

func TestForceUnlockKeepsTheOrder(t *testing.T) {
	const timeout = 3 * time.Second // of the watchdog
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := clients(t, s, 2, redlatch.WithWatchdogTimeout(timeout))
		c := all[0]
		for _, waiting := range all {
			for _, forcing := range all {
				h := mustLock(t, c.FairLock("orders"))
				first := queue(t, t.Context(), s.Addr, waiting.FairLock("orders"))
				second := queue(t, t.Context(), s.Addr, c.FairLock("orders"))
				begin := time.Now()
				forced, err := forcing.FairLock("orders").ForceUnlock(t.Context())
				require.NoError(t, err)
				require.True(t, forced)
				harness.InOrder(t, first, second)
				// Well before any poll: a waiter behind a holder of its own client gets no message,
				// but learns of it from its next heartbeat, and the holder a third of its lease later.
				require.Less(t, time.Since(begin), timeout/3+slack)
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
				harness.NothingLeft(t, s.Addr)
			}
		}
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

		// The lock is free, but its first waiter has not taken it yet.
		o := other.NewOwner().String()
		far := strconv.FormatInt(time.Now().Add(time.Minute).UnixMilli(), 10)
		harness.Do(t, s.Addr, "RPUSH", listKey("orders"), o)
		harness.Do(t, s.Addr, "ZADD", deadlinesKey("orders"), far, o)
		harness.Do(t, s.Addr, "ZADD", aliveKey("orders"), far, o)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		refused(":3")
		require.Equal(t, []string{o}, waiting(t, s.Addr, "orders"))
	})
}

// Every second waiter has a named owner.
func TestArrivalOrder(t *testing.T) {
	const waiters = 8
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, n := range []int{1, 2, waiters} { // clients
			all := clients(t, s, n)
			h := mustLock(t, all[0].FairLock("orders"))
			var line []*caller
			for i := range waiters {
				c, ctx := all[i/2%n], t.Context()
				if i%2 == 0 {
					ctx = lock.WithOwner(ctx, c.NewOwner())
				}
				line = append(line, queue(t, ctx, s.Addr, c.FairLock("orders")))
			}
			require.NoError(t, h.Unlock(t.Context()))
			harness.InOrder(t, line...)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// Two goroutines of one owner wait. When the first of them is granted the lock, the other
// gets a hold of the same claim and leaves the queue.
func TestTwoGoroutinesOfOneNamedOwnerWait(t *testing.T) {
	const timeout = 3 * time.Second // of the watchdog
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		o := c.NewOwner()
		ctx := lock.WithOwner(t.Context(), o)
		h := mustLock(t, other.FairLock("orders"))
		w1 := queue(t, ctx, s.Addr, c.FairLock("orders"))
		w2 := queue(t, ctx, s.Addr, c.FairLock("orders"))
		last := queue(t, t.Context(), s.Addr, other.FairLock("orders"))
		require.NoError(t, h.Unlock(t.Context()))
		h1, h2 := w1.Got(), w2.Got()
		require.Equal(t, w1.Owner, h1.Owner().String())
		require.Equal(t, h1.Owner(), h2.Owner())
		noTrace(t, s.Addr, "orders", w2.Owner)
		require.Equal(t, 2, harness.HoldCount(t, c.FairLock("orders"), o))
		require.True(t, last.Running())
		require.NoError(t, h1.Unlock(ctx))
		require.True(t, last.Running())
		require.NoError(t, h2.Unlock(ctx))
		harness.InOrder(t, last)
		harness.NothingLeft(t, s.Addr)
	})
}

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
			require.ErrorContains(t, w.End(), "WRONGTYPE")
			noTrace(t, s.Addr, "orders", w.Owner)
		}
		require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"))
		require.Equal(t, "$8", harness.Do(t, s.Addr, "GET", "orders"))
	})
}

// Two Java clients wait in the same queue. Each gets a message when it is first and the
// lock is free, and not before.
func TestJavaWaitsInTheSameQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, there := harness.Client(t, s), harness.Client(t, s)
		first, last := newJava(t, harness.Conn(t, s.Addr), 1, redlatch.DefaultFairWaitTimeout), newJava(t, harness.Conn(t, s.Addr), 2, redlatch.DefaultFairWaitTimeout)
		messagesFirst := harness.Messages(t, s.Addr, "redisson_lock__channel:{orders}:"+first.owner)
		messagesLast := harness.Messages(t, s.Addr, "redisson_lock__channel:{orders}:"+last.owner)
		for _, ctx := range []context.Context{t.Context(), lock.WithOwner(t.Context(), c.NewOwner())} {
			h, err := c.FairLock("orders").Lock(ctx)
			require.NoError(t, err)
			require.False(t, first.acquire())
			here := queue(t, t.Context(), s.Addr, c.FairLock("orders"))
			there := queue(t, t.Context(), s.Addr, there.FairLock("orders"))
			require.False(t, last.acquire())
			require.Equal(t, []string{first.owner, here.Owner, there.Owner, last.owner}, waiting(t, s.Addr, "orders"))

			// A waiter of this process is not the first.
			require.NoError(t, h.Unlock(ctx))
			require.Equal(t, "0", harness.Receive(t, soon, "the first gets its message", messagesFirst))
			require.False(t, last.acquire())
			_, err = c.FairLock("orders").TryLock(ctx)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.True(t, here.Running())
			require.True(t, first.acquire())
			begin := time.Now()
			first.release()
			h = here.Got()
			require.Less(t, here.At.Sub(begin), 3*time.Second) // by its message, well before any poll
			require.Empty(t, messagesLast)
			require.NoError(t, h.Unlock(t.Context()))
			harness.InOrder(t, there)
			require.Equal(t, "0", harness.Receive(t, soon, "the last gets its message", messagesLast))
			require.True(t, last.acquire())
			last.release()
			require.Empty(t, messagesFirst)
			harness.NothingLeft(t, s.Addr)
		}
	})
}
