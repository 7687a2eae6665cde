package semaphore_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// idleTTL is the IdleTTL of the tests; a use sets a tenth more.
const idleTTL = 2 * time.Hour

// idleTest is the semaphore "orders" with 9 permits.
type idleTest struct {
	*testing.T
	server *testserver.Server
	addr   string
	leased bool
}

// lifetimes returns the lifetimes of the keys of the semaphore that exist, in ms, -1 for one without an end.
func (x idleTest) lifetimes() (all []int64) {
	x.Helper()
	for _, key := range []string{"orders", timeoutsKey("orders")} {
		if ttl := harness.PTTL(x, x.addr, key); ttl != -2 {
			all = append(all, ttl)
		}
	}
	return all
}

// requireLifetime fails the test unless all keys expire after least, or up to a tenth of idleTTL later.
func (x idleTest) requireLifetime(least time.Duration, what string) {
	x.Helper()
	all := x.lifetimes()
	require.NotEmpty(x, all, what)
	for _, ttl := range all {
		require.Greater(x, ttl, (least + idleTTL/10 - soon).Milliseconds(), what)
		require.LessOrEqual(x, ttl, (least + idleTTL/10 + 2*time.Millisecond).Milliseconds(), what)
	}
}

// limit gives all keys a minute.
func (x idleTest) limit() {
	for _, key := range []string{"orders", timeoutsKey("orders")} {
		harness.Do(x, x.addr, "PEXPIRE", key, "60000")
	}
}

func eachIdle(t *testing.T, test func(x idleTest, c *redlatch.Client, of semaphoreOf)) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c := harness.Client(t, s)
		_, leased := of(c, "orders").(permitSem)
		test(idleTest{t, s, s.Addr, leased}, c, of)
	})
}

var idleOptions = []semaphore.Option{semaphore.Permits(9), semaphore.IdleTTL(idleTTL)}

// Each use begins the lifetime of all keys again. Without the option a use leaves it, whatever it is.
func TestUsesKeepSemaphore(t *testing.T) {
	eachIdle(t, func(x idleTest, c *redlatch.Client, of semaphoreOf) {
		ctx := x.Context()
		mustAcquire(x, of(c, "orders", idleOptions...), 1)
		x.requireLifetime(idleTTL, "creation")
		var held, more acquired
		var permit *semaphore.Permit
		var detached string
		uses := []struct {
			what   string
			leased bool
			do     func(sem anySemaphore) error
		}{
			{"acquire", false, func(sem anySemaphore) (err error) { held, err = sem.acquire(ctx, 2); return err }},
			{"acquire one", false, func(sem anySemaphore) (err error) { more, err = sem.tryAcquire(ctx, 1); return err }},
			{"acquire too many", false, func(sem anySemaphore) error {
				require.ErrorIs(x, only(sem.tryAcquire(ctx, 7)), lock.ErrNotAcquired)
				return nil
			}},
			{"release one", false, func(sem anySemaphore) error { return sem.giveBack(ctx, more) }},
			{"release", false, func(sem anySemaphore) error { return sem.giveBack(ctx, held) }},
			{"create what exists", false, func(sem anySemaphore) error { return only(sem.TrySetPermits(ctx, 3)) }},
			{"add", false, func(sem anySemaphore) error { return sem.AddPermits(ctx, 1) }},
			{"set", false, func(sem anySemaphore) error { return sem.SetPermits(ctx, 9) }},
			{"acquire a permit", true, func(sem anySemaphore) (err error) {
				permit, err = sem.(permitSem).Acquire(ctx, 1, lock.Lease(time.Minute))
				return err
			}},
			{"extend", true, func(anySemaphore) error { return permit.Extend(ctx, 2*time.Minute) }},
			{"set a lease", true, func(sem anySemaphore) error {
				return only(sem.(permitSem).SetTTL(ctx, permit.ID(), time.Minute))
			}},
			{"detach", true, func(anySemaphore) (err error) { detached, err = permit.Detach(ctx, time.Minute); return err }},
			{"adopt", true, func(sem anySemaphore) (err error) { permit, err = sem.(permitSem).Adopt(ctx, detached); return err }},
			{"release a permit", true, func(anySemaphore) error { return permit.Release(ctx) }},
		}
		for _, opts := range [][]semaphore.Option{nil, idleOptions} {
			sem := of(c, "orders", opts...)
			for _, use := range uses {
				if use.leased && !x.leased {
					continue
				}
				x.limit()
				require.NoError(x, use.do(sem), use.what)
				if opts != nil {
					x.requireLifetime(idleTTL, use.what)
					continue
				}
				for _, ttl := range x.lifetimes() {
					require.True(x, 0 < ttl && ttl <= 60_000, "%s leaves %v", use.what, ttl)
				}
			}
		}
		if sem, ok := of(c, "orders", idleOptions...).(plain); ok {
			x.limit()
			require.NoError(x, only(sem.Drain(ctx)))
			x.requireLifetime(idleTTL, "drain")
		}

		// What is created again gets a lifetime, too. A read is no use.
		for what, create := range map[string]func(sem anySemaphore) error{
			"TrySetPermits": func(sem anySemaphore) error { return only(sem.TrySetPermits(ctx, 2)) },
			"SetPermits":    func(sem anySemaphore) error { return sem.SetPermits(ctx, 2) },
			"AddPermits":    func(sem anySemaphore) error { return sem.AddPermits(ctx, 2) },
			"Acquire":       func(sem anySemaphore) error { return only(sem.acquire(ctx, 1)) },
		} {
			sem := of(c, "orders", idleOptions...)
			require.NoError(x, only(sem.Delete(ctx)))
			require.NoError(x, create(sem), what)
			x.requireLifetime(idleTTL, what)
			x.limit()
			require.NoError(x, only(sem.Available(ctx)))
			require.NoError(x, only(sem.Exists(ctx)))
			require.LessOrEqual(x, x.lifetimes()[0], int64(60_000))
		}
	})
}

// The lifetime is set at most once in a tenth of it, while no permit is held for longer.
func TestUsesSetLifetimeOnce(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		loadScripts(t, s.Addr)
		sem, conn := of(harness.Client(t, s), "orders", idleOptions...), harness.Conn(t, s.Addr)
		first := mustAcquire(t, sem, 1)
		mustAcquire(t, sem, 1).release(t) // the slot of a request has another lifetime to set
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		for n := range 5 {
			mustAcquire(t, sem, 1+n%2).release(t)
		}
		first.release(t)
		commands := harness.Commands(t, conn)
		require.Equal(t, 11, commands["evalsha"])
		// The requests of a slot have a lifetime, which a new hundred seconds of the server's clock set.
		require.LessOrEqual(t, commands["pexpire"], 2)
	})
}

// The keys last as long as the permits that are held, and both have the same lifetime.
func TestHeldPermitsKeepSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		ctx, x := t.Context(), idleTest{t, s, s.Addr, true}
		e := harness.Client(t, s).PermitSemaphore("orders", idleOptions...)
		short, long := take(t, e, 1), take(t, e, 1, lock.Lease(5*time.Hour))
		x.requireLifetime(5*time.Hour, "a longer lease")
		require.NoError(t, short.Release(ctx))
		x.requireLifetime(5*time.Hour, "the release of another permit")
		require.NoError(t, long.Extend(ctx, 7*time.Hour))
		x.requireLifetime(7*time.Hour, "an extension")
		require.NoError(t, only(e.SetTTL(ctx, long.ID(), time.Minute)))
		x.requireLifetime(idleTTL, "a shorter lease")

		forever := take(t, e, 1, semaphore.Forever())
		require.Equal(t, []int64{-1, -1}, x.lifetimes())
		require.NoError(t, long.Release(ctx))
		require.Equal(t, []int64{-1, -1}, x.lifetimes())
		require.NoError(t, forever.Release(ctx))
		x.requireLifetime(idleTTL, "the release of a permit without an end")

		// The key of acquired permits is created again.
		require.NoError(t, take(t, e, 1).Release(ctx))
		again := take(t, e, 2, lock.Lease(time.Minute))
		x.requireLifetime(idleTTL, "new permits")
		require.Len(t, x.lifetimes(), 2)
		require.NoError(t, again.Release(ctx))

		// As Redisson does without a lease: it leaves the lifetimes, until the next use.
		harness.Do(t, s.Addr, "DECR", "orders")
		harness.Do(t, s.Addr, "ZADD", timeoutsKey("orders"), "922337203685477", "0123456789abcdef")
		x.limit()
		take(t, e, 1)
		require.Equal(t, []int64{-1, -1}, x.lifetimes())
		harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), "0123456789abcdef")
		harness.Do(t, s.Addr, "SET", "orders", "8") // as Redisson's addPermits, which drops the lifetime
		take(t, e, 1)
		x.requireLifetime(idleTTL, "a number of permits without a lifetime")
	})
}

// Renewals are uses, for one permit and for several, of semaphores with and without the option.
func TestRenewalsKeepSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(3*time.Second))
		take(t, c.PermitSemaphore("others", semaphore.Permits(9)), 2)
		for _, n := range []int{1, 3} {
			x := idleTest{t, s, s.Addr, true}
			p := take(t, c.PermitSemaphore("orders", idleOptions...), n)
			x.limit()
			harness.Eventually(t, soon, "a renewal", func() bool { return harness.PTTL(t, s.Addr, "orders") > 60_000 })
			x.requireLifetime(idleTTL, fmt.Sprint("a renewal of ", n))
			require.NoError(t, p.Context().Err())
			require.NoError(t, p.Release(t.Context()))
		}
		require.Equal(t, int64(-1), harness.PTTL(t, s.Addr, "others"))
	})
}

// A request counts as a use, with the option of its object, even if another object of the client sends it.
func TestBatchKeepsSemaphore(t *testing.T) {
	eachIdle(t, func(x idleTest, c *redlatch.Client, of semaphoreOf) {
		other := withPermits(x, of(c, "orders"), 2)
		held, more := mustAcquire(x, other, 1), mustAcquire(x, other, 1)
		w := startBehind(x, c, of(c, "orders", idleOptions...), 1)
		harness.Do(x, x.addr, "PERSIST", "orders")
		held.release(x)
		w.Got()
		x.requireLifetime(idleTTL, "a release that serves a waiter")

		head := startBehind(x, c, other, 1)
		w = startBehind(x, c, of(c, "orders", idleOptions...), 1)
		harness.Do(x, x.addr, "PERSIST", "orders")
		away := of(harness.Client(x, x.server), "orders")
		require.NoError(x, away.AddPermits(x.Context(), 2))
		head.Got()
		w.Got()
		x.requireLifetime(idleTTL, "an attempt for several waiters")
		more.release(x)
	})
}

// A semaphore that nobody uses expires, and the next use creates it again. One whose permit is held does not.
func TestUnusedSemaphoreExpires(t *testing.T) {
	eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, of semaphoreOf) {
		sem := of(s.Client(t), "orders", semaphore.Permits(3), semaphore.IdleTTL(10*time.Minute))
		for range 3 {
			mustAcquire(t, sem, 1).release(t)
			time.Sleep(10 * time.Minute)
			require.True(t, s.Exists("orders"))
		}
		held := mustAcquire(t, sem, 2)
		if _, leased := sem.(permitSem); leased {
			time.Sleep(5 * time.Hour)
			require.Equal(t, 1, available(t, sem))
		}
		held.release(t)
		time.Sleep(11*time.Minute + time.Second)
		require.Empty(t, s.Keys(), "nothing stays")

		mustAcquire(t, sem, 1)
		require.Equal(t, 2, available(t, sem))
		require.NoError(t, only(sem.Delete(t.Context())))
	})
}

func TestInvalidIdleTTL(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		for _, d := range []time.Duration{0, -time.Hour, 10*time.Minute - 1, lock.MaxLease + 1} {
			for _, k := range kinds {
				err := only(k.of(c, "orders", semaphore.IdleTTL(d)).tryAcquire(context.Background(), 1))
				require.ErrorIs(t, err, lock.ErrInvalid)
				require.ErrorContains(t, err, "semaphore.IdleTTL")
			}
		}
		longest := c.PermitSemaphore("longest", semaphore.Permits(1), semaphore.IdleTTL(lock.MaxLease))
		take(t, longest, 1, lock.Lease(lock.MaxLease))

		_, err := c.Semaphore("orders", idleOptions...).TrySetPermitsFor(t.Context(), 1, time.Hour)
		require.ErrorIs(t, err, lock.ErrInvalid)
		require.False(t, s.Exists("orders"))
	})
}

// In a cluster, too, the keys have one lifetime. While they are on either side of a slot that moves, a permit is renewed
// without it.
func TestIdleTTLInCluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		const timeout = 3 * time.Second
		cluster := harness.Cluster(t, shared.Program)
		c := harness.ClientAt(t, cluster.Addrs(), redlatch.WithWatchdogTimeout(timeout), quiet)
		owner := cluster.Owner("orders")
		sem := plain{c.Semaphore("orders", idleOptions...)}
		mustAcquire(t, sem, 2).release(t)
		idleTest{t, owner, owner.Addr, false}.requireLifetime(idleTTL, "a semaphore")
		require.NoError(t, only(sem.Delete(t.Context())))

		p := take(t, c.PermitSemaphore("orders", idleOptions...), 1)
		x := idleTest{t, owner, owner.Addr, true}
		x.requireLifetime(idleTTL, "a permit semaphore")
		x.limit()
		harness.Eventually(t, soon, "a renewal", func() bool { return harness.PTTL(t, owner.Addr, "orders") > 60_000 })

		move, err := cluster.BeginMove("orders")
		require.NoError(t, err)
		require.NoError(t, move.Migrate(timeoutsKey("orders")))
		select {
		case <-p.Context().Done():
			require.FailNow(t, "the permit was not renewed", "%v", context.Cause(p.Context()))
		case <-time.After(timeout + timeout/2):
		}
		require.NoError(t, move.MigrateAll())
		require.NoError(t, move.Finish())
		require.NoError(t, p.Release(t.Context()))
	})
}
