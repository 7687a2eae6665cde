package rlock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

const (
	plainChannel = "redlatch_plain__channel:{orders}"
	plainCap     = 250 * time.Millisecond // of the pauses
)

// plainQuiet is a plain lock whose waiters do not poll.
func plainQuiet(c *redlatch.Client, name string) *rlock.Plain {
	return c.PlainLock(name, rlock.ConstantBackoff(time.Hour))
}

// plainValue returns what is stored under a name, "" if nothing is.
func plainValue(t *testing.T, conn rueidis.Client, name string) string {
	t.Helper()
	value, err := conn.Do(t.Context(), conn.B().Get().Key(name).Build()).ToString()
	if !rueidis.IsRedisNil(err) {
		require.NoError(t, err)
	}
	return value
}

// The attempts that a waiter makes before it sleeps: it has one when it comes, unless
// somebody here holds the lock, and one after its subscription.
const (
	behindHere  = 1
	behindThere = 2
)

// plainWaiter starts a waiter and returns once it sleeps, after so many attempts.
func plainWaiter(t *testing.T, s *testserver.Server, c *redlatch.Client, l *rlock.Plain, attempts int) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
	go func() { done <- l.Do(context.Background(), func(context.Context) error { return nil }) }()
	asleep(t, s, attempts, c)
	return done
}

// plainGetsIn fails the test unless the waiter has had the lock within d.
func plainGetsIn(t *testing.T, d time.Duration, waiter <-chan error) {
	t.Helper()
	require.NoError(t, harness.Receive(t, d, "the waiter gets in", waiter))
}

// eachOwner runs a test on every server for an owner made for each acquisition, and
// for one with a name.
func eachOwner(t *testing.T, test func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context)) {
	harness.EachOf(t, []bool{false, true}, func(named bool) string { return map[bool]string{false: "unnamed", true: "named"}[named] },
		func(t *testing.T, s *testserver.Server, named bool) {
			test(t, s, func(c *redlatch.Client) context.Context {
				if named {
					return lock.WithOwner(t.Context(), c.NewOwner())
				}
				return t.Context()
			})
		})
}

func TestPlainOnTheServer(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		l := c.PlainLock("orders")
		messages := harness.Messages(t, s.Addr, plainChannel)
		told := func() { require.Equal(t, "0", harness.Receive(t, soon, "a message", messages)) }
		for range 2 {
			h := mustLock(t, l, lock.Lease(time.Minute))
			require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"))
			require.Equal(t, "+string", harness.Do(t, s.Addr, "TYPE", "orders"))
			require.Equal(t, lock.OwnerOf(h).String(), plainValue(t, conn, "orders"))
			ttl := harness.PTTL(t, s.Addr, "orders")
			require.LessOrEqual(t, ttl, int64(60_000))
			require.Greater(t, ttl, int64(50_000))
			require.NoError(t, h.Unlock(t.Context()))
			told()
			require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
		}
		h := mustLock(t, l)
		forced, err := l.ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
		told()
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	})
}

// ForceUnlock leaves what belongs to another object as it is.
func TestPlainForceUnlockOfAnotherObject(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ran, err := c.Once("{app}report").Run(t.Context(), "monday", func(context.Context) error { return nil })
		require.NoError(t, err)
		require.True(t, ran)
		require.NoError(t, c.Semaphore("slots").SetPermits(t.Context(), 3))
		_, err = c.CountDownLatch("import").TrySetCount(t.Context(), 3)
		require.NoError(t, err)
		keys, err := testserver.Query(s.Addr, "KEYS", "*")
		require.NoError(t, err)
		require.GreaterOrEqual(t, len(keys), 5, "%q", keys)
		for _, key := range keys {
			before := harness.Do(t, s.Addr, "DUMP", key)
			forced, err := c.PlainLock(key).ForceUnlock(t.Context())
			require.Error(t, err, key)
			require.False(t, forced)
			require.Equal(t, before, harness.Do(t, s.Addr, "DUMP", key))
			isHelper := strings.Contains(key, ":") && harness.Do(t, s.Addr, "TYPE", key) == "+string"
			require.Equal(t, isHelper, errors.Is(err, lock.ErrInvalid), "%q: %v", key, err)
		}

		// A number that expires may be the lock of another library.
		harness.Do(t, s.Addr, "SET", "orders", "1", "PX", "60000")
		forced, err := c.PlainLock("orders").ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

func TestPlainHandOffLeavesNoGap(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		l := plainQuiet(c, "orders")
		h, next := mustLock(t, l, lock.Lease(time.Minute)), make(chan lock.Hold, 1)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		go func() {
			h, err := l.Lock(context.Background(), lock.Lease(time.Minute))
			assert.NoError(t, err)
			next <- h
		}()
		asleep(t, s, behindHere, c)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		harness.Do(t, s.Addr, "PEXPIRE", "orders", "30000")
		require.NoError(t, h.Unlock(t.Context()))
		h = harness.Receive(t, soon, "the next hold", next)
		require.NotNil(t, h)
		calls := harness.Commands(t, conn)
		require.Zero(t, calls["set"]+calls["del"]+calls["publish"])
		require.Equal(t, lock.OwnerOf(h).String(), plainValue(t, conn, "orders"))
		require.InDelta(t, 60_000, harness.PTTL(t, s.Addr, "orders"), 10_000)
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// Strangers release without a message. Neither the lease nor the safety poll is of help.
func TestPlainReleaseByAStrangerIsFoundByPolling(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		harness.Do(t, s.Addr, "SET", "orders", "another's", "PX", "3600000")
		// By then its pauses are the longest: they double from 10 ms.
		w := plainWaiter(t, s, c, c.PlainLock("orders"), behindThere+6)
		begin := time.Now()
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		const polls = 3
		harness.Eventually(t, polls*plainCap+3*time.Second, "it polls", func() bool { return harness.Commands(t, conn)["evalsha"] >= polls })
		require.GreaterOrEqual(t, time.Since(begin), (polls-1)*plainCap-10*time.Millisecond, "no more often than that")
		require.Empty(t, w)
		harness.Do(t, s.Addr, "DEL", "orders")
		plainGetsIn(t, 3*time.Second, w)
	})
}

// A caller that waits behind a holder of its own process sends nothing.
func TestPlainWaiterBehindAHolderHereDoesNotPoll(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const pause = 10 * time.Millisecond
		c := harness.Client(t, s)
		l := c.PlainLock("orders", rlock.ConstantBackoff(pause))
		h := mustLock(t, l)
		w := plainWaiter(t, s, c, l, behindHere)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		time.Sleep(10 * pause)
		require.Zero(t, harness.Commands(t, harness.Conn(t, s.Addr))["evalsha"])
		require.NoError(t, h.Unlock(t.Context()))
		plainGetsIn(t, 3*time.Second, w)
	})
}

// Whatever becomes of one lock, the others of its batch are renewed, and what
// another holder has put in its place is neither extended nor deleted.
func TestPlainRenewal(t *testing.T) {
	const timeout = 3 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), harness.Conn(t, s.Addr)
		holds := map[string]lock.Hold{}
		for _, name := range []string{"kept", "listed", "deleted", "taken", "extended", "kept too"} {
			holds[name] = mustLock(t, c.PlainLock(name))
		}
		require.NoError(t, holds["extended"].Extend(t.Context(), time.Hour))
		for _, name := range []string{"listed", "deleted"} {
			harness.Do(t, s.Addr, "DEL", name)
		}
		harness.Do(t, s.Addr, "RPUSH", "listed", "precious")
		harness.Do(t, s.Addr, "SET", "taken", lock.OwnerOf(holds["taken"]).String()+"7", "PX", "60000")
		first, seen := time.Now().Add(timeout), time.Now()
		for name, h := range holds {
			harness.Eventually(t, timeout, name+" is renewed, or lost", func() bool {
				return h.Context().Err() != nil || time.Now().Add(h.Remaining()).After(first.Add(timeout/4))
			})
		}
		// What was extended is renewed with the rest.
		passed := time.Since(seen).Milliseconds()
		for name, h := range holds {
			if strings.HasPrefix(name, "kept") || name == "extended" {
				require.NoError(t, context.Cause(h.Context()), name)
				continue
			}
			var lost *lock.LostError
			require.ErrorAs(t, context.Cause(h.Context()), &lost, name)
			require.Equal(t, lock.ReasonGone, lost.Reason, name)
			require.ErrorIs(t, h.Extend(t.Context(), time.Hour), lock.ErrLost)
			require.ErrorIs(t, h.Unlock(t.Context()), lost)
			delete(holds, name)
		}
		require.Greater(t, harness.PTTL(t, s.Addr, "extended"), (59 * time.Minute).Milliseconds())
		for _, h := range holds {
			require.NoError(t, h.Unlock(t.Context()))
		}
		harness.Idle(t, c) // the releases of what was lost
		require.Equal(t, ":1", harness.Do(t, s.Addr, "LLEN", "listed"))
		require.Equal(t, int64(-1), harness.PTTL(t, s.Addr, "listed"))
		require.True(t, strings.HasSuffix(plainValue(t, conn, "taken"), "7"))
		require.LessOrEqual(t, harness.PTTL(t, s.Addr, "taken"), 60_000-passed)
		require.Equal(t, ":2", harness.Do(t, s.Addr, "DEL", "listed", "taken"))
		harness.NothingLeft(t, s.Addr)
	})
}

// Another holder has the lock now, and a request for the hold that was is no use and does
// no harm: not of a hold whose lease is fixed, which hears of it so.
func TestPlainRequestsOfAHoldThatIsGone(t *testing.T) {
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		for what, end := range map[string]func(h lock.Hold) error{
			"Unlock": func(h lock.Hold) error { return h.Unlock(t.Context()) },
			"Extend": func(h lock.Hold) error { return h.Extend(t.Context(), time.Hour) },
			"hand-off": func(h lock.Hold) error {
				w := plainWaiter(t, s, c, plainQuiet(c, "orders"), behindHere)
				defer func() {
					harness.Do(t, s.Addr, "DEL", "orders")
					harness.Do(t, s.Addr, "PUBLISH", plainChannel, "0")
					plainGetsIn(t, 3*time.Second, w)
				}()
				err := h.Unlock(t.Context())
				require.Empty(t, w)
				require.Equal(t, "another's", plainValue(t, conn, "orders"))
				return err
			},
		} {
			h, err := c.PlainLock("orders").Lock(owner(c), lock.Lease(time.Minute))
			require.NoError(t, err)
			harness.Do(t, s.Addr, "SET", "orders", "another's", "PX", "30000")
			require.ErrorIs(t, end(h), lock.ErrLost, what)
			if what != "hand-off" {
				require.Equal(t, "another's", plainValue(t, conn, "orders"))
				require.LessOrEqual(t, harness.PTTL(t, s.Addr, "orders"), int64(30_000))
				harness.Do(t, s.Addr, "DEL", "orders")
			}
			require.Error(t, h.Unlock(t.Context()))
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// A plain lock is not reentrant, and its value is the whole claim.
func TestPlainOwners(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		o := c.NewOwner()
		named := lock.WithOwner(t.Context(), o)
		h, err := c.PlainLock("orders").Lock(named)
		require.NoError(t, err)
		_, err = c.PlainLock("orders").TryLock(named)
		require.ErrorIs(t, err, lock.ErrReentered)
		require.Equal(t, 1, harness.HoldCount(t, c.PlainLock("orders"), o))
		require.Equal(t, 1, harness.HoldCount(t, harness.Client(t, s).PlainLock("orders"), lock.OwnerOf(h)))
		require.NoError(t, h.Unlock(t.Context()))
		for _, value := range []string{o.String() + "7", o.String() + ":x", o.String()[1:], "x" + o.String(), ""} {
			harness.Do(t, s.Addr, "SET", "orders", value)
			require.Zero(t, harness.HoldCount(t, c.PlainLock("orders"), o), value)
			_, err := c.PlainLock("orders").TryLock(named)
			require.ErrorIs(t, err, lock.ErrNotAcquired, value)
			require.NotErrorIs(t, err, lock.ErrReentered, value)
		}
	})
}

// A request that is delivered a second time, for a lease that has been extended or has
// run on since, gives it what it asked for at least.
func TestPlainRequestsDeliveredTwice(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		deliver := func(file string, args ...string) {
			harness.Do(t, s.Addr, append([]string{"EVAL", harness.Source(t, file), "1", "orders"}, args...)...)
		}
		for what, request := range map[string]func(){
			"acquire": func() { deliver("plain_acquire.lua", "60000", "next") },
			"extend":  func() { deliver("plain_extend.lua", "next", "60000") },
		} {
			for ttl, want := range map[string]int64{"10000": 60_000, "900000": 900_000} {
				harness.Do(t, s.Addr, "SET", "orders", "next", "PX", ttl)
				request()
				require.InDelta(t, want, harness.PTTL(t, s.Addr, "orders"), 5000, what)
			}
		}
	})
}
