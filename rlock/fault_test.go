package rlock_test

import (
	"context"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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

func nothing(context.Context) error { return nil }

// waitFor starts a waiter behind a holder and returns once it is asleep, after
// that many attempts: one after the subscription, and one before if the holder
// is elsewhere.
func waitFor(t *testing.T, s *testserver.Server, l harness.Lock, attempts int) <-chan error {
	t.Helper()
	harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
	done := make(chan error, 1)
	go func() { done <- l.Do(context.Background(), nothing) }()
	asleep(t, s, attempts)
	return done
}

// eachOwner runs a test with an owner made for the acquisition and with one that
// the caller names.
func eachOwner(t *testing.T, test func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for name, owner := range map[string]func(*redlatch.Client) context.Context{
			"unnamed": func(*redlatch.Client) context.Context { return t.Context() },
			"named":   func(c *redlatch.Client) context.Context { return lock.WithOwner(t.Context(), c.NewOwner()) },
		} {
			t.Run(name, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				test(t, s, owner)
			})
		}
	})
}

// A second acquisition by the same owner whose fate is unknown must not cost the
// owner its first.
func TestAnUnknownReentryLeavesTheFirstHold(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, fate := range []harness.Fate{harness.LoseReply, harness.LoseRequest} {
			c, g := harness.GatedClient(t, s)
			harness.WarmUp(t, s.Addr)
			l := c.Lock("orders")
			ctx := lock.WithOwner(t.Context(), c.NewOwner())
			h, err := l.Lock(ctx)
			require.NoError(t, err)
			g.Arm(fate, "EVALSHA", 1)
			_, err = l.TryLock(ctx)
			require.ErrorIs(t, err, lock.ErrIndeterminate)
			harness.Eventually(t, 10*time.Second, "one hold is left, and no attempt to undo the other is", func() bool {
				return harness.HoldCount(t, l, h.Owner()) == 1 && harness.GoroutinesIn("settle") == 0
			})
			require.NoError(t, h.Unlock(ctx))
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// The release that was sent first arrives when another was answered long ago.
func TestAReleaseThatArrivesLateEndsNoOtherHold(t *testing.T) {
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		c, g := harness.GatedClient(t, s)
		harness.WarmUp(t, s.Addr)
		ctx := owner(c)
		l := c.Lock("orders")
		h, err := l.Lock(ctx)
		require.NoError(t, err)
		reached := g.Arm(harness.DelayRequest, "EVALSHA", 1)
		require.NoError(t, h.Unlock(ctx))
		<-reached
		next, err := l.Lock(ctx)
		require.NoError(t, err)
		harness.Eventually(t, 5*time.Second, "nothing is under way", func() bool { return harness.GoroutinesIn("forget") == 0 })
		require.NoError(t, g.Open())
		require.Equal(t, 1, harness.HoldCount(t, l, next.Owner()))
		require.NoError(t, next.Unlock(ctx))
		harness.NothingStays(t, s.Addr)
	})
}

// The release of a named owner arrives when its hold is over and the owner has
// another, which the server cannot tell from the first but by its ticket.
func TestAReleaseThatArrivesAfterItsHoldEndsNoOtherHold(t *testing.T) {
	const timeout, lease = 2 * time.Second, time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s)
		harness.WarmUp(t, s.Addr)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		l := c.Lock("orders")
		h, err := l.Lock(ctx, lock.Lease(lease))
		require.NoError(t, err)
		reached := g.Arm(harness.DelayRequest, harness.SHA(t, "release_named.lua"), 1)
		// What is sent in the place of the delayed request waits for the lease's end.
		harness.Do(t, s.Addr, "CLIENT", "PAUSE", strconv.FormatInt((lease+lease/4).Milliseconds(), 10), "WRITE")
		require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
		<-reached
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"))

		next, err := l.Lock(ctx)
		require.NoError(t, err)
		first := time.Now().Add(next.Remaining())
		require.NoError(t, g.Open())
		require.Equal(t, 1, harness.HoldCount(t, l, next.Owner()))
		_, err = other.Lock("orders").TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		harness.Eventually(t, timeout, "the lease is renewed", func() bool {
			return time.Now().Add(next.Remaining()).After(first.Add(timeout / 4))
		})
		require.NoError(t, context.Cause(next.Context()))
		require.NoError(t, next.Unlock(ctx))
		harness.NothingStays(t, s.Addr)
	})
}

// ticketOf returns the key of the only ticket on the server.
func ticketOf(t *testing.T, s *testserver.Server, name string) string {
	t.Helper()
	tickets, err := testserver.Query(s.Addr, "KEYS", "redisson_unlock_latch:{"+name+"}:*")
	require.NoError(t, err)
	require.Len(t, tickets, 1)
	return tickets[0]
}

func TestAHoldIsLostWithItsTicket(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h, err := c.Lock("orders").Lock(ctx)
		require.NoError(t, err)
		harness.Do(t, s.Addr, "DEL", ticketOf(t, s, "orders"))
		select {
		case <-h.Context().Done():
		case <-time.After(timeout + time.Second):
			require.FailNow(t, "the hold does not end")
		}
		var lost *lock.LostError
		require.ErrorAs(t, context.Cause(h.Context()), &lost)
		require.Equal(t, lock.ReasonGone, lost.Reason)
		require.Equal(t, error(lost), h.Unlock(ctx))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestATicketLivesAsLongAsItsHold(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h, err := c.Lock("orders").Lock(ctx)
		require.NoError(t, err)
		ticket := ticketOf(t, s, "orders")
		<-time.After(3 * timeout)
		require.NoError(t, context.Cause(h.Context()))
		require.Equal(t, ticket, ticketOf(t, s, "orders"))
		require.NoError(t, h.Extend(ctx, time.Hour))
		<-time.After(timeout) // it is renewed meanwhile
		require.Greater(t, harness.PTTL(t, s.Addr, ticket), (59 * time.Minute).Milliseconds())
		require.NoError(t, h.Unlock(ctx))
		require.False(t, harness.IsLocked(t, c.Lock("orders")))

		h, err = c.Lock("orders").Lock(ctx, lock.Lease(timeout))
		require.NoError(t, err)
		harness.Eventually(t, 5*time.Second, "the first ticket is removed", func() bool { return harness.GoroutinesIn("forget") == 0 })
		require.NoError(t, h.Extend(ctx, time.Minute))
		require.Greater(t, harness.PTTL(t, s.Addr, ticketOf(t, s, "orders")), (50 * time.Second).Milliseconds())
		require.NoError(t, h.Unlock(ctx))
		require.False(t, harness.IsLocked(t, c.Lock("orders")))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestUnlockOfANamedHoldThatIsOverdueFreesTheLock(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h, err := c.Lock("orders").Lock(ctx, lock.MaxHold(100*time.Millisecond))
		require.NoError(t, err)
		<-h.Context().Done()
		var lost *lock.LostError
		require.ErrorAs(t, context.Cause(h.Context()), &lost)
		require.Equal(t, lock.ReasonMaxHold, lost.Reason)
		require.Equal(t, error(lost), h.Unlock(ctx))
		// Well before its lease of 30 s is over.
		harness.Eventually(t, 10*time.Second, "the lock is free", func() bool { return !harness.IsLocked(t, c.Lock("orders")) })
		harness.NothingLeft(t, s.Addr)
	})
}

func TestUnlockOfALostHoldSparesTheNextHoldOfItsOwner(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.Lock("orders")
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h1, err := l.Lock(ctx, lock.Lease(100*time.Millisecond))
		require.NoError(t, err)
		<-h1.Context().Done()
		h2, err := l.Lock(ctx)
		require.NoError(t, err)
		harness.Eventually(t, 5*time.Second, "the first lease is over on the server", func() bool {
			return harness.HoldCount(t, l, h2.Owner()) == 1 || h2.Owner() != h1.Owner()
		})
		require.ErrorIs(t, h1.Unlock(ctx), lock.ErrLost)
		harness.Eventually(t, 10*time.Second, "no release is under way", func() bool { return harness.GoroutinesIn("(*Lock).release") == 0 })
		_, err = harness.Client(t, s).Lock("orders").TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, h2.Unlock(ctx))
	})
}

func TestUnlockByOwnerEndsAnUnnamedHoldToo(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		c := harness.Client(t, s)
		h := mustLock(t, of(c, "orders"))
		require.NoError(t, of(c, "orders").Unlock(lock.WithOwner(t.Context(), h.Owner())))
		require.Error(t, h.Context().Err())
		require.Zero(t, h.Remaining())
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
	})
}

func TestTheContextEndsBeforeTheReleaseIsSent(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		harness.WarmUp(t, s.Addr)
		h := mustLock(t, c.Lock("orders"))
		ctx := h.Context()
		reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
		done := make(chan error, 1)
		go func() { done <- h.Unlock(context.Background()) }()
		<-reached
		require.ErrorIs(t, ctx.Err(), context.Canceled)
		require.Zero(t, h.Remaining())
		require.NoError(t, g.Open())
		require.NoError(t, <-done)
	})
}

func TestHugeLeases(t *testing.T) {
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		c := harness.Client(t, s)
		l, ctx := c.Lock("orders"), owner(c)
		for _, d := range []time.Duration{math.MaxInt64, lock.MaxLease + 1} {
			_, err := l.TryLock(ctx, lock.Lease(d))
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		h, err := l.TryLock(ctx, lock.Lease(lock.MaxLease), lock.Lease(lock.MaxLease))
		require.NoError(t, err)
		require.ErrorIs(t, h.Extend(ctx, math.MaxInt64), lock.ErrInvalid)
		_, err = l.Lock(t.Context(), lock.Wait(0))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(99*365*24)*3_600_000)
		require.NoError(t, h.Unlock(ctx))
		h, err = l.Lock(ctx, lock.Wait(math.MaxInt64), lock.MaxHold(math.MaxInt64))
		require.NoError(t, err)
		require.NoError(t, h.Unlock(ctx))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestPublishingForbidden(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "mute", "on", ">secret", "+@all", "allkeys", "resetchannels")
		c, err := redlatch.Open(t.Context(), "redis://mute:secret@"+s.Addr)
		require.NoError(t, err)
		defer c.Close()
		for _, ctx := range []context.Context{t.Context(), lock.WithOwner(t.Context(), c.NewOwner())} {
			require.NoError(t, c.Lock("orders").Do(ctx, nothing))
			h, err := c.Lock("orders").Lock(ctx)
			require.NoError(t, err)
			forced, err := c.Lock("orders").ForceUnlock(ctx)
			require.NoError(t, err)
			require.True(t, forced)
			require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// Who may not set an expiry must not take a lock for ever.
func TestExpiryForbidden(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "timeless", "on", ">secret", "+@all", "allkeys", "allchannels", "-pexpire")
		c, err := redlatch.Open(t.Context(), "redis://timeless:secret@"+s.Addr)
		require.NoError(t, err)
		defer c.Close()
		for _, ctx := range []context.Context{t.Context(), lock.WithOwner(t.Context(), c.NewOwner())} {
			for _, l := range []harness.Lock{c.Lock("orders"), c.FencedLock("orders")} {
				_, err := l.TryLock(ctx)
				require.Error(t, err)
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
				require.NotErrorIs(t, err, lock.ErrIndeterminate)
				harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{orders}") // it has counted all the same
				require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
			}
		}
	})
}

func TestOutOfMemory(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s)
		harness.WarmUp(t, s.Addr)
		named := lock.WithOwner(t.Context(), c.NewOwner())
		h1, err := c.Lock("one").Lock(t.Context())
		require.NoError(t, err)
		h2, err := c.Lock("two").Lock(named)
		require.NoError(t, err)
		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory-policy", "noeviction")
		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "1")
		for _, ctx := range []context.Context{t.Context(), named} {
			_, err := c.Lock("three").TryLock(ctx)
			require.ErrorContains(t, err, "OOM")
			require.NotErrorIs(t, err, lock.ErrIndeterminate)
		}
		require.NoError(t, h1.Extend(t.Context(), time.Minute))
		require.NoError(t, h1.Unlock(t.Context()))
		require.NoError(t, h2.Unlock(named))
		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0")
		harness.NothingLeft(t, s.Addr)
	})
}

func TestABadFencingCounterTakesNothing(t *testing.T) {
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		c := harness.Client(t, s)
		const counter = "redisson_lock_token:{orders}"
		for _, set := range [][]string{{"SET", counter, "9223372036854775807"}, {"SET", counter, "x"}, {"RPUSH", counter, "x"}} {
			harness.Do(t, s.Addr, "DEL", counter)
			harness.Do(t, s.Addr, set...)
			_, err := c.FencedLock("orders").TryLock(owner(c))
			require.Error(t, err)
			require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"))
		}
	})
}

// What one caller's deadline does to the connection must not fail another's
// call.
func TestADeadlineFailsNobodyElse(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		conn, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{s.Addr}, DisableCache: true, PipelineMultiplex: -1,
		})
		require.NoError(t, err)
		defer conn.Close()
		c, err := redlatch.Wrap(context.Background(), conn) // no context so far that could end
		require.NoError(t, err)
		defer c.Close()
		ctx := context.Background()
		require.NoError(t, c.Lock("warm").Do(ctx, nothing))
		harness.Do(t, s.Addr, "CLIENT", "PAUSE", "400")
		short := make(chan error, 1)
		go func() {
			_, err := c.Lock("a").Lock(ctx, lock.Wait(100*time.Millisecond))
			short <- err
		}()
		harness.Eventually(t, time.Second, "the first call is under way", func() bool { return harness.GoroutinesIn("(*hold).Try") == 1 })
		h, err := c.Lock("b").Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, h.Unlock(ctx))
		err = <-short
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestCloseAndRenewalWithAnExhaustedPool(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		conn, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{s.Addr}, DisableCache: true, BlockingPoolSize: 1,
		})
		require.NoError(t, err)
		defer conn.Close()
		c, err := redlatch.Wrap(t.Context(), conn, redlatch.WithWatchdogTimeout(timeout))
		require.NoError(t, err)
		h := mustLock(t, c.Lock("orders"))
		blocked := make(chan error, 1)
		go func() {
			blocked <- conn.Do(context.Background(), conn.B().Blpop().Key("never").Timeout(0).Build()).Error()
		}()
		harness.Eventually(t, 5*time.Second, "the pool is exhausted", func() bool {
			info, err := conn.Do(t.Context(), conn.B().Info().Section("clients").Build()).ToString()
			return err == nil && strings.Contains(info, "blocked_clients:1")
		})
		select {
		case <-h.Context().Done():
			require.Fail(t, "lost", context.Cause(h.Context()))
		case <-time.After(3 * timeout):
		}
		require.NoError(t, h.Unlock(t.Context()))

		theirs := mustLock(t, harness.Client(t, s).Lock("theirs"))
		ctx, cancel := context.WithCancel(t.Context())
		waiter := make(chan error, 1)
		go func() {
			_, err := c.Lock("theirs").Lock(ctx)
			waiter <- err
		}()
		harness.Eventually(t, 5*time.Second, "the waiter wants to subscribe", func() bool { return c.PubSub().Listeners == 1 })
		closed := make(chan struct{})
		go func() {
			c.Close()
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(5 * time.Second):
			require.Fail(t, "Close hangs")
		}
		require.ErrorIs(t, <-waiter, lock.ErrClosed)
		cancel()
		harness.Do(t, s.Addr, "RPUSH", "never", "ever")
		require.NoError(t, <-blocked)
		require.NoError(t, theirs.Unlock(t.Context()))
	})
}

func TestCloseDuringAcquisitionsLeavesNothing(t *testing.T) {
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		for range 50 {
			c, err := redlatch.Open(t.Context(), s.URL())
			require.NoError(t, err)
			ctx := owner(c)
			started, done := make(chan struct{}), make(chan lock.Hold, 1)
			go func() {
				close(started)
				h, err := c.Lock("orders").Lock(ctx)
				if err != nil {
					assert.ErrorIs(t, err, lock.ErrClosed)
				}
				done <- h
			}()
			<-started
			c.Close()
			if h := <-done; h != nil {
				// Acquired before: then it is lost, and left to its lease.
				require.ErrorIs(t, context.Cause(h.Context()), lock.ErrClosed)
				harness.Do(t, s.Addr, "FLUSHALL")
			}
			require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"))
		}
	})
}

func TestAnUnknownAttemptIsNotMistakenForReentry(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		harness.WarmUp(t, s.Addr)
		theirs := mustLock(t, harness.Client(t, s).Lock("orders"))
		l := c.Lock("orders", rlock.NonReentrant())
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		done := make(chan error, 1)
		go func() { done <- l.Do(ctx, nothing) }()
		asleep(t, s, 2)
		reached := g.Arm(harness.LoseReply, "EVALSHA", 1)
		require.NoError(t, theirs.Unlock(t.Context()))
		<-reached
		require.NoError(t, <-done)
		harness.NothingLeft(t, s.Addr)
	})
}

// Connections are killed all the time, of every kind. Calls may fail, and say
// so; nobody holds together with another, no waiter hangs, and nothing is left.
func TestConnectionsKilledInALoop(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const clients, goroutines, rounds = 4, 4, 60
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		all := make([]*redlatch.Client, clients)
		for i := range all {
			all[i] = harness.Client(t, s, redlatch.WithLogger(slog.New(slog.DiscardHandler)))
		}
		stop := make(chan struct{})
		var killer, wg sync.WaitGroup
		killer.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(15 * time.Millisecond):
					_, _ = testserver.Command(s.Addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
					_, _ = testserver.Command(s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
				}
			}
		})
		var inside atomic.Int32
		var held atomic.Int32
		for _, c := range all {
			for g := range goroutines {
				wg.Go(func() {
					for range rounds {
						ctx := ctx
						if g == 0 {
							ctx = lock.WithOwner(ctx, c.NewOwner())
						}
						h, err := c.Lock("orders").Lock(ctx)
						if err != nil {
							assert.NoError(t, ctx.Err(), "a waiter hangs")
							continue
						}
						assert.Equal(t, int32(1), inside.Add(1))
						held.Add(1)
						inside.Add(-1)
						if err := h.Unlock(ctx); err != nil {
							assert.ErrorIs(t, err, lock.ErrIndeterminate)
						}
					}
				})
			}
		}
		wg.Wait()
		close(stop)
		killer.Wait()
		t.Logf("%d of %d acquisitions succeeded", held.Load(), clients*goroutines*rounds)
		assert.Positive(t, held.Load())
		harness.NothingStays(t, s.Addr)
	})
}

// Many goroutines, many names, little patience.
func TestLoad(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		var wg sync.WaitGroup
		for g := range 20 {
			wg.Go(func() {
				for i := range 500 {
					err := c.Lock("orders-"+strconv.Itoa(i%50)).Do(t.Context(), nothing, lock.Wait(time.Duration(g%10)*time.Millisecond))
					if err != nil {
						assert.ErrorIs(t, err, lock.ErrNotAcquired)
					}
				}
			})
		}
		wg.Wait()
		harness.NothingLeft(t, s.Addr)
		assert.Zero(t, c.PubSub().Listeners)
	})
}

// Locks are forced open all the time while they are taken and given back: a hold
// that is told it is lost is not kept alive, and nothing is left.
func TestForcedOpenInALoop(t *testing.T) {
	const timeout = 300 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		l := c.Lock("orders")
		stop := make(chan struct{})
		var forcers, lockers sync.WaitGroup
		for range 2 {
			forcers.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						_, err := l.ForceUnlock(t.Context())
						assert.NoError(t, err)
					}
				}
			})
		}
		for range 2 {
			lockers.Go(func() {
				for range 2000 {
					h, err := l.Lock(t.Context())
					if !assert.NoError(t, err) {
						return
					}
					if err := h.Unlock(t.Context()); err != nil {
						assert.ErrorIs(t, err, lock.ErrLost)
					}
					assert.Zero(t, h.Remaining())
				}
			})
		}
		lockers.Wait()
		close(stop)
		forcers.Wait()
		harness.NothingLeft(t, s.Addr)
	})
}
