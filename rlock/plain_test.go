package rlock_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
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
	plainCap   = 250 * time.Millisecond // of the pauses
	plainSlack = 2500 * time.Millisecond
)

// plainQuiet is a plain lock whose waiters do not poll.
func plainQuiet(c *redlatch.Client, name string) *rlock.Plain {
	return c.PlainLock(name, rlock.WithBackoff(rlock.ConstantBackoff(time.Hour)))
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

// plainWaiter starts a waiter and returns once it listens and sleeps.
func plainWaiter(t *testing.T, c *redlatch.Client, l *rlock.Plain) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	before := c.PubSub().Listeners
	go func() { done <- l.Do(context.Background(), nothing) }()
	harness.Eventually(t, 5*time.Second, "it listens and sleeps", func() bool {
		now := c.PubSub()
		return now.Listeners > before && now.Subscribed == now.Channels && harness.GoroutinesIn("(*hold).Try") == 0
	})
	return done
}

// plainWithin fails the test unless the waiter gets in within d.
func plainWithin(t *testing.T, d time.Duration, done <-chan error) {
	t.Helper()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(d):
		require.FailNow(t, "the waiter did not get in within "+d.String())
	}
}

func TestPlainOnTheServer(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		l := c.PlainLock("orders")
		listening, stop := context.WithCancel(t.Context())
		payloads := make(chan string, 10)
		var wg sync.WaitGroup
		wg.Go(func() {
			_ = conn.Receive(listening, conn.B().Subscribe().Channel("redlatch_plain__channel:{orders}").Build(),
				func(m rueidis.PubSubMessage) { payloads <- m.Message })
		})
		harness.Eventually(t, 5*time.Second, "it listens", func() bool {
			n, err := conn.Do(t.Context(), conn.B().PubsubNumsub().Channel("redlatch_plain__channel:{orders}").Build()).AsIntMap()
			return err == nil && n["redlatch_plain__channel:{orders}"] == 1
		})
		told := func() {
			select {
			case payload := <-payloads:
				require.Equal(t, "0", payload)
			case <-time.After(plainSlack):
				require.FailNow(t, "nothing was published")
			}
		}
		owner := c.NewOwner()
		for _, named := range []bool{false, true} {
			ctx := t.Context()
			if named {
				ctx = lock.WithOwner(ctx, owner)
			}
			h, err := l.Lock(ctx, lock.Lease(time.Minute))
			require.NoError(t, err)
			require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"))
			require.Equal(t, "+string", harness.Do(t, s.Addr, "TYPE", "orders"))
			if named {
				require.Equal(t, owner, h.Owner())
				require.Regexp(t, "^"+regexp.QuoteMeta(owner.String())+":[0-9a-f]{32}$", plainValue(t, conn, "orders"))
			} else {
				require.Equal(t, h.Owner().String(), plainValue(t, conn, "orders"))
			}
			ttl := harness.PTTL(t, s.Addr, "orders")
			require.LessOrEqual(t, ttl, int64(60_000))
			require.Greater(t, ttl, int64(55_000))
			require.NoError(t, h.Unlock(ctx))
			told()
			require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
		}
		h := mustLock(t, l)
		forced, err := l.ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
		told()
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		stop()
		wg.Wait()
	})
}

func TestPlainHandOffLeavesNoGap(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		l := plainQuiet(c, "orders")
		h, next := mustLock(t, l), make(chan lock.Hold, 1)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		go func() {
			h, err := l.Lock(context.Background(), lock.Lease(time.Minute))
			assert.NoError(t, err)
			next <- h
		}()
		asleep(t, s, 1) // after its subscription
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		require.NoError(t, h.Unlock(t.Context()))
		h = <-next
		require.NotNil(t, h)
		calls := harness.Commands(t, conn)
		require.Equal(t, 1, calls["set"])
		require.Zero(t, calls["del"]+calls["publish"])
		require.Equal(t, h.Owner().String(), plainValue(t, conn, "orders"))
		require.InDelta(t, 60_000, harness.PTTL(t, s.Addr, "orders"), 5000)
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestPlainReleaseWakesByMessage(t *testing.T) {
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		here, there := harness.Client(t, s), harness.Client(t, s)
		h, err := here.PlainLock("orders").Lock(owner(here), lock.Lease(time.Hour))
		require.NoError(t, err)
		w := plainWaiter(t, there, plainQuiet(there, "orders"))
		require.NoError(t, h.Unlock(t.Context()))
		plainWithin(t, plainSlack, w)
		require.Positive(t, there.PubSub().Messages)
		harness.NothingLeft(t, s.Addr)
	})
}

// Strangers release without a message. The lease is no help, nor is the safety poll.
func TestPlainReleaseByAStrangerIsFoundByPolling(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		harness.Do(t, s.Addr, "SET", "orders", "a stranger's", "PX", "3600000")
		w := plainWaiter(t, c, c.PlainLock("orders"))
		time.Sleep(2 * plainCap) // so that its pauses are the longest
		require.Empty(t, w)
		harness.Do(t, s.Addr, "DEL", "orders")
		plainWithin(t, plainCap+time.Second, w)

		// No more often than that, and at an even pace.
		harness.Do(t, s.Addr, "SET", "orders", "a stranger's")
		w = plainWaiter(t, c, c.PlainLock("orders"))
		time.Sleep(2 * plainCap)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		time.Sleep(4 * plainCap)
		polls := harness.Commands(t, harness.Conn(t, s.Addr))["evalsha"]
		require.LessOrEqual(t, polls, 5)
		require.Positive(t, polls)
		harness.Do(t, s.Addr, "DEL", "orders")
		plainWithin(t, plainCap+time.Second, w)
	})
}

// Who waits behind a holder of its own process asks for nothing.
func TestPlainWaiterBehindAHolderHereDoesNotPoll(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.PlainLock("orders", rlock.WithBackoff(rlock.ConstantBackoff(10*time.Millisecond)))
		h := mustLock(t, l)
		w := plainWaiter(t, c, l)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		time.Sleep(300 * time.Millisecond)
		require.LessOrEqual(t, harness.Commands(t, harness.Conn(t, s.Addr))["evalsha"], 1, "that after the subscription")
		require.NoError(t, h.Unlock(t.Context()))
		plainWithin(t, plainSlack, w)
	})
}

func TestPlainLeaseOfAStranger(t *testing.T) {
	const lease = 700 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		for _, renewed := range []bool{false, true} {
			until := time.Now().Add(lease)
			harness.Do(t, s.Addr, "SET", "orders", "a stranger's", "PX", fmt.Sprint(lease.Milliseconds()))
			w := plainWaiter(t, c, plainQuiet(c, "orders"))
			if renewed {
				until = time.Now().Add(2 * lease)
				harness.Do(t, s.Addr, "PEXPIRE", "orders", fmt.Sprint((2 * lease).Milliseconds()))
			}
			plainWithin(t, 2*lease+plainSlack, w)
			require.Greater(t, time.Now(), until.Add(-5*time.Millisecond))
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// Whatever becomes of one lock, the others of its batch are renewed, and what a
// stranger has put in its place is neither extended nor deleted.
func TestPlainRenewal(t *testing.T) {
	const timeout = 3 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), harness.Conn(t, s.Addr)
		for _, named := range []bool{false, true} {
			holds := map[string]lock.Hold{}
			for _, name := range []string{"kept", "listed", "deleted", "taken", "extended", "kept too"} {
				ctx := t.Context()
				if named {
					ctx = lock.WithOwner(ctx, c.NewOwner())
				}
				h, err := c.PlainLock(name).Lock(ctx)
				require.NoError(t, err)
				holds[name] = h
			}
			require.NoError(t, holds["extended"].Extend(t.Context(), time.Hour))
			for _, name := range []string{"listed", "deleted"} {
				harness.Do(t, s.Addr, "DEL", name)
			}
			harness.Do(t, s.Addr, "RPUSH", "listed", "precious")
			harness.Do(t, s.Addr, "SET", "taken", holds["taken"].Owner().String()+"7", "PX", "60000")
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
				require.Equal(t, error(lost), h.Unlock(t.Context()))
				delete(holds, name)
			}
			require.Greater(t, harness.PTTL(t, s.Addr, "extended"), (59 * time.Minute).Milliseconds())
			for _, h := range holds {
				require.NoError(t, h.Unlock(t.Context()))
			}
			harness.Eventually(t, 5*time.Second, "no release is under way", func() bool { return harness.GoroutinesIn("(*Lock).release") == 0 })
			require.Equal(t, ":1", harness.Do(t, s.Addr, "LLEN", "listed"))
			require.Equal(t, int64(-1), harness.PTTL(t, s.Addr, "listed"))
			require.True(t, strings.HasSuffix(plainValue(t, conn, "taken"), "7"))
			require.LessOrEqual(t, harness.PTTL(t, s.Addr, "taken"), 60_000-passed)
			require.Equal(t, ":2", harness.Do(t, s.Addr, "DEL", "listed", "taken"))
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// A stranger has the lock now, and a request for the hold that was is no use and does
// no harm: not of a hold whose lease is fixed, which hears of it so.
func TestPlainRequestsOfAHoldThatIsGone(t *testing.T) {
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		for what, end := range map[string]func(h lock.Hold) error{
			"Unlock": func(h lock.Hold) error { return h.Unlock(t.Context()) },
			"Extend": func(h lock.Hold) error { return h.Extend(t.Context(), time.Hour) },
			"hand-off": func(h lock.Hold) error {
				w := plainWaiter(t, c, plainQuiet(c, "orders"))
				defer func() {
					harness.Do(t, s.Addr, "DEL", "orders")
					harness.Do(t, s.Addr, "PUBLISH", "redlatch_plain__channel:{orders}", "0")
					plainWithin(t, plainSlack, w)
				}()
				err := h.Unlock(t.Context())
				require.Empty(t, w)
				require.Equal(t, "a stranger's", plainValue(t, conn, "orders"))
				return err
			},
		} {
			h, err := c.PlainLock("orders").Lock(owner(c), lock.Lease(time.Minute))
			require.NoError(t, err)
			harness.Do(t, s.Addr, "SET", "orders", "a stranger's", "PX", "30000")
			require.ErrorIs(t, end(h), lock.ErrLost, what)
			if what != "hand-off" {
				require.Equal(t, "a stranger's", plainValue(t, conn, "orders"))
				require.LessOrEqual(t, harness.PTTL(t, s.Addr, "orders"), int64(30_000))
				harness.Do(t, s.Addr, "DEL", "orders")
			}
			require.Error(t, h.Unlock(t.Context()))
		}
		harness.NothingLeft(t, s.Addr)
	})
}

func TestPlainAfterTheServerForgotItsScripts(t *testing.T) {
	const timeout = time.Second
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		ctx := owner(c)
		forget := func() { harness.Do(t, s.Addr, "SCRIPT", "FLUSH") }
		forget()
		h, err := c.PlainLock("orders").Lock(ctx)
		require.NoError(t, err)
		forget()
		first := time.Now().Add(h.Remaining())
		harness.Eventually(t, timeout, "the lease is renewed", func() bool {
			return time.Now().Add(h.Remaining()).After(first.Add(timeout / 4))
		})
		forget()
		require.NoError(t, h.Extend(ctx, time.Minute))
		w := plainWaiter(t, c, plainQuiet(c, "orders"))
		forget()
		require.NoError(t, h.Unlock(ctx))
		plainWithin(t, plainSlack, w)
		h, err = c.PlainLock("orders").Lock(ctx)
		require.NoError(t, err)
		forget()
		forced, err := c.PlainLock("orders").ForceUnlock(ctx)
		require.NoError(t, err)
		require.True(t, forced)
		require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
		harness.NothingLeft(t, s.Addr)
	})
}

// A plain lock and any other of the same name are errors of each other, and do each
// other no harm.
func TestPlainAndOtherLocksOfOneName(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		others := []harness.Lock{c.Lock("orders"), c.FencedLock("orders"), c.SpinLock("orders")}
		for _, other := range others {
			for _, pair := range [][2]harness.Lock{{c.PlainLock("orders"), other}, {other, c.PlainLock("orders")}} {
				h := mustLock(t, pair[0])
				named := lock.WithOwner(t.Context(), c.NewOwner())
				for what, do := range map[string]func() error{
					"TryLock": func() error { _, err := pair[1].TryLock(t.Context()); return err },
					"Lock":    func() error { _, err := pair[1].Lock(named); return err },
					"Unlock":  func() error { return pair[1].Unlock(named) },
					"Force":   func() error { _, err := pair[1].ForceUnlock(t.Context()); return err },
					"Count":   func() error { _, err := pair[1].HoldCount(t.Context(), h.Owner()); return err },
				} {
					err := do()
					require.ErrorContains(t, err, "WRONGTYPE", what)
					require.NotErrorIs(t, err, lock.ErrNotAcquired)
				}
				require.NoError(t, h.Unlock(t.Context()))
			}
		}
		harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{orders}")
		harness.NothingLeft(t, s.Addr)
	})
}

// An owner made for one hold can be used as a name; and no other owner begins like
// one.
func TestPlainOwners(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		h := mustLock(t, c.PlainLock("orders"))
		named := lock.WithOwner(t.Context(), h.Owner())
		for _, from := range []*redlatch.Client{c, other} {
			_, err := from.PlainLock("orders").TryLock(named)
			require.ErrorIs(t, err, lock.ErrReentered)
		}
		require.NoError(t, other.PlainLock("orders").Unlock(named))
		h2, err := other.PlainLock("orders").Lock(named)
		require.NoError(t, err)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		require.Equal(t, 1, harness.HoldCount(t, c.PlainLock("orders"), h.Owner()))
		require.NoError(t, h2.Unlock(t.Context()))

		o := c.NewOwner()
		for _, value := range []string{o.String() + "7", o.String() + "7:x", o.String()[1:], "x" + o.String(), ""} {
			harness.Do(t, s.Addr, "SET", "orders", value)
			require.Zero(t, harness.HoldCount(t, c.PlainLock("orders"), o), value)
			require.ErrorIs(t, c.PlainLock("orders").Unlock(lock.WithOwner(t.Context(), o)), lock.ErrNotHeld, value)
			_, err := c.PlainLock("orders").TryLock(lock.WithOwner(t.Context(), o))
			require.ErrorIs(t, err, lock.ErrNotAcquired, value)
			require.NotErrorIs(t, err, lock.ErrReentered, value)
		}
	})
}

// Unlock by owner looks first, and what becomes of that look is no release.
func TestPlainUnlockByOwnerWithoutAnswers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		for _, fate := range []harness.Fate{harness.LoseRequest, harness.LoseReply, harness.Repeat, harness.Resend} {
			for what, match := range map[string]string{"look": "\r\nGET\r\n", "release": harness.SHA(t, "plain_release.lua")} {
				for _, held := range []bool{true, false} {
					if !held && what == "release" {
						continue // which is not sent
					}
					c, g := harness.GatedClient(t, s)
					other := harness.Client(t, s)
					named := lock.WithOwner(t.Context(), c.NewOwner())
					var theirs lock.Hold
					if held {
						var err error
						theirs, err = other.PlainLock("orders").Lock(named)
						require.NoError(t, err)
					}
					reached := g.Arm(fate, match, 1)
					err := c.PlainLock("orders").Unlock(named)
					<-reached
					switch {
					case !held, what == "release" && fate == harness.Resend:
						require.ErrorIs(t, err, lock.ErrNotHeld, "%v of %s", fate, what)
					default:
						require.NoError(t, err, "%v of %s", fate, what)
					}
					require.False(t, harness.IsLocked(t, other.PlainLock("orders")))
					require.NoError(t, g.Open())
					if held {
						require.ErrorIs(t, theirs.Unlock(named), lock.ErrLost)
					}
				}
			}
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// The release that was sent first arrives when the same owner has the lock again.
func TestPlainReleaseThatArrivesLateEndsNoOtherHold(t *testing.T) {
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		c, g := harness.GatedClient(t, s)
		harness.WarmUp(t, s.Addr)
		ctx := owner(c)
		l := c.PlainLock("orders")
		h, err := l.Lock(ctx)
		require.NoError(t, err)
		reached := g.Arm(harness.DelayRequest, "EVALSHA", 1)
		require.NoError(t, h.Unlock(ctx))
		<-reached
		next, err := l.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, g.Open())
		require.Equal(t, 1, harness.HoldCount(t, l, next.Owner()))
		require.NoError(t, next.Unlock(ctx))
		harness.NothingLeft(t, s.Addr)
	})
}

// An acquisition whose reply was lost is undone, and the same owner can try again
// meanwhile: what it meets is itself.
func TestPlainOwnerMeetsItsAbandonedAttempt(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		other := harness.Client(t, s)
		harness.WarmUp(t, s.Addr)
		theirs := mustLock(t, other.PlainLock("orders"))
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		l := plainQuiet(c, "orders")
		next := make(chan lock.Hold, 1)
		go func() {
			h, err := l.Lock(ctx)
			assert.NoError(t, err)
			next <- h
		}()
		harness.Eventually(t, 5*time.Second, "it listens and sleeps", func() bool {
			return c.PubSub().Subscribed == 1 && harness.GoroutinesIn("(*hold).Try") == 0
		})
		reached := g.Arm(harness.LoseReply, harness.SHA(t, "plain_acquire.lua"), 1)
		require.NoError(t, theirs.Unlock(t.Context()))
		<-reached
		select {
		case h := <-next:
			require.NotNil(t, h)
			require.Equal(t, 1, harness.HoldCount(t, l, h.Owner()))
			require.NoError(t, h.Unlock(ctx))
		case <-time.After(10 * time.Second):
			require.FailNow(t, "the waiter waits for itself")
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// A request that is delivered a second time, for a lease that has been extended or has
// run on since, gives it what it asked for at least.
func TestPlainRequestsDeliveredTwice(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		deliver := func(file string, args ...string) {
			source, err := os.ReadFile(file)
			require.NoError(t, err)
			harness.Do(t, s.Addr, append([]string{"EVAL", string(source), "1", "orders"}, args...)...)
		}
		for what, request := range map[string]func(){
			"acquire":   func() { deliver("plain_acquire.lua", "60000", "next", "next") },
			"hand over": func() { deliver("plain_hand_off.lua", "first", "next", "60000") },
		} {
			for ttl, want := range map[string]int64{"1000": 60_000, "900000": 900_000} {
				harness.Do(t, s.Addr, "SET", "orders", "next", "PX", ttl)
				request()
				require.InDelta(t, want, harness.PTTL(t, s.Addr, "orders"), 900, what)
			}
		}
	})
}
