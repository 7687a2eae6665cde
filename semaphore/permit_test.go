package semaphore_test

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// counts are the numbers of permits of a PermitSemaphore.
type counts struct{ permits, free, acquired int }

func countsOf(t testing.TB, e *semaphore.PermitSemaphore) counts {
	t.Helper()
	stats, err := e.Stats(context.Background())
	require.NoError(t, err)
	return counts{stats.Total, stats.Available, stats.Taken}
}

// permitSemaphore creates the semaphore "orders" with this number of permits.
func permitSemaphore(t testing.TB, c *redlatch.Client, permits int) *semaphore.PermitSemaphore {
	t.Helper()
	return withPermits(t, permitSem{c.PermitSemaphore("orders")}, permits).PermitSemaphore
}

// take acquires n permits in one Permit, which stays reachable until the test ends.
func take(t testing.TB, e *semaphore.PermitSemaphore, n int, opts ...lock.Option) *semaphore.Permit {
	t.Helper()
	p, err := e.Acquire(context.Background(), n, append([]lock.Option{lock.Wait(2 * soon)}, opts...)...)
	require.NoError(t, err)
	require.Len(t, p.IDs(), n)
	require.Equal(t, p.IDs()[0], p.ID())
	t.Cleanup(func() { runtime.KeepAlive(p) })
	return p
}

func leaseTime(t testing.TB, e *semaphore.PermitSemaphore, id string) time.Duration {
	t.Helper()
	left, err := e.TTL(context.Background(), id)
	require.NoError(t, err)
	return left
}

// raw returns an id in the form of the server.
func raw(t testing.TB, id string) string {
	t.Helper()
	b, err := hex.DecodeString(id)
	require.NoError(t, err)
	return string(b)
}

// expire lets the lease of a permit expire on the server.
func expire(t testing.TB, s *testserver.Server, id string) {
	t.Helper()
	harness.Do(t, s.Addr, "ZADD", timeoutsKey("orders"), "XX", "1", raw(t, id))
}

// lostFor returns the loss of a permit, which must occur within d.
func lostFor(t testing.TB, p *semaphore.Permit, d time.Duration, reason lock.Reason) *lock.LostError {
	t.Helper()
	select {
	case <-p.Context().Done():
	case <-time.After(d):
		require.FailNow(t, "the permit does not end")
	}
	var lost *lock.LostError
	require.ErrorAs(t, context.Cause(p.Context()), &lost)
	require.Equal(t, reason, lost.Reason)
	require.Equal(t, p.ID(), lost.Permit)
	require.ErrorContains(t, lost, p.ID())
	require.Zero(t, p.Remaining())
	return lost
}

// A Permit of several has one context, one lease, and one release. All of its ids at once are a
// release, too.
func TestPermitOfSeveral(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, harness.Client(t, s), 10)
		p := take(t, e, 4, lock.Lease(time.Minute))
		require.Equal(t, "orders", p.Name())
		require.Equal(t, counts{10, 6, 4}, countsOf(t, e))
		require.NoError(t, p.Extend(t.Context(), time.Hour))
		require.Greater(t, p.Remaining(), 50*time.Minute)
		seen := map[string]bool{}
		for _, id := range p.IDs() {
			require.Regexp(t, "^[0-9a-f]{32}$", id)
			require.Greater(t, leaseTime(t, e, id), 50*time.Minute)
			seen[id] = true
		}
		require.Len(t, seen, 4)

		loadScripts(t, s.Addr)
		conn := harness.Conn(t, s.Addr)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		require.NoError(t, p.Release(t.Context()))
		require.Equal(t, 1, harness.Commands(t, conn)["evalsha"], "one request")

		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Hour)}, {semaphore.Forever()}} {
			p := take(t, e, 3, opts...)
			require.NoError(t, e.Release(t.Context(), p.IDs()...))
			require.Equal(t, context.Canceled, context.Cause(p.Context()))
			require.Zero(t, p.Remaining())
			require.ErrorIs(t, p.Release(t.Context()), lock.ErrNotHeld)
			require.ErrorIs(t, p.Extend(t.Context(), time.Minute), lock.ErrNotHeld)
			require.Equal(t, counts{10, 10, 0}, countsOf(t, e))
		}
	})
}

// A list with a permit that nobody has, at any position, is not released. The others are still held.
func TestReleaseOfSeveralPermitsIsAtomic(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, harness.Client(t, s), 10)
		expired, released := take(t, e, 1, lock.Lease(time.Hour)), take(t, e, 1)
		expire(t, s, expired.ID())
		require.NoError(t, released.Release(t.Context()))
		p := take(t, e, 4)
		ours, theirs := p.IDs(), take(t, harness.Client(t, s).PermitSemaphore("orders"), 1).IDs()
		require.Equal(t, counts{10, 5, 5}, countsOf(t, e))

		for what, id := range map[string]string{"expired": expired.ID(), "released": released.ID(), "unknown": unknown} {
			for at := range len(ours) + 1 {
				list := slices.Concat(ours[:at], []string{id}, ours[at:], theirs)
				ok, err := e.TryRelease(t.Context(), list...)
				require.NoError(t, err, what)
				require.False(t, ok, what)
				require.ErrorIs(t, e.Release(t.Context(), list...), lock.ErrNotHeld, what)
			}
		}
		require.Equal(t, counts{10, 5, 5}, countsOf(t, e))
		require.NoError(t, p.Context().Err())
		require.Positive(t, p.Remaining())

		ok, err := e.TryRelease(t.Context(), slices.Concat(ours, theirs)...)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, counts{10, 10, 0}, countsOf(t, e))
		require.ErrorIs(t, e.Release(t.Context(), ours...), lock.ErrNotHeld)
	})
}

// While a permit is released by its id, a renewal that does not find it is a loss only if the release
// fails.
func TestRenewalDuringReleaseByID(t *testing.T) {
	type row struct {
		name   string
		others []string // that are released together with it
		want   error
	}
	rows := []row{{"alone", nil, nil}, {"with an unknown one", []string{unknown}, lock.ErrNotHeld}}
	harness.EachOf(t, rows, func(r row) string { return r.name }, func(t *testing.T, s *testserver.Server, r row) {
		const timeout = 4500 * time.Millisecond // so that the renewal comes before the release is sent again
		c, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(timeout))
		e := permitSemaphore(t, c, 1)
		p, began := take(t, e, 1), time.Now()
		ids, released := append(r.others, p.ID()), make(chan error, 1)
		g.Keep(t, load(t, s.Addr, "permit_release"), 1, func() { go func() { released <- e.Release(context.Background(), ids...) }() })
		harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.ID())) // unless it is released

		harness.Eventually(t, soon, "the renewal finds nothing", func() bool { return p.Remaining() == 0 })
		require.Less(t, time.Since(began), timeout, "the lease is not over")
		require.NoError(t, context.Cause(p.Context()))

		require.NoError(t, g.Open())
		require.ErrorIs(t, harness.Receive(t, soon, "the release", released), r.want)
		if r.want == nil {
			require.Equal(t, context.Canceled, context.Cause(p.Context()))
		} else {
			lostFor(t, p, time.Second, lock.ReasonGone)
		}
	})
}

// A permit whose release by id failed is renewed, and lost when the server does not have it.
func TestFailedReleaseKeepsPermit(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		e := permitSemaphore(t, c, 1)
		p := take(t, e, 1)
		require.ErrorIs(t, e.Release(t.Context(), p.ID(), unknown), lock.ErrNotHeld)
		time.Sleep(time.Hour)
		require.NoError(t, p.Context().Err())
		require.Equal(t, counts{1, 0, 1}, countsOf(t, e))
		require.NoError(t, s.Client(t).PermitSemaphore("orders").Release(t.Context(), p.ID()))
		lostFor(t, p, redlatch.DefaultWatchdogTimeout, lock.ReasonGone)

		// Its own release finds out at once.
		p = take(t, e, 1)
		require.NoError(t, s.Client(t).PermitSemaphore("orders").Release(t.Context(), p.ID()))
		require.NoError(t, p.Context().Err())
		require.ErrorIs(t, e.Release(t.Context(), p.ID()), lock.ErrNotHeld)
		require.ErrorIs(t, context.Cause(p.Context()), lock.ErrLost)
		require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost)
	})
}

// The loss of one permit is the loss of all: Release then releases the others.
func TestLossOfOneOfSeveral(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, harness.Client(t, s, redlatch.WithWatchdogTimeout(3*time.Second)), 5)
		for how, lose := range map[string]func(p *semaphore.Permit){
			"renewal":        func(*semaphore.Permit) {},
			"extension":      func(p *semaphore.Permit) { require.ErrorIs(t, p.Extend(t.Context(), time.Minute), lock.ErrLost) },
			"release":        func(p *semaphore.Permit) { require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost) },
			"release by ids": func(p *semaphore.Permit) { require.ErrorIs(t, e.Release(t.Context(), p.IDs()...), lock.ErrNotHeld) },
		} {
			p := take(t, e, 4)
			harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.IDs()[2]))
			harness.Do(t, s.Addr, "INCR", "orders")
			lose(p)
			if how == "release" {
				require.Equal(t, counts{5, 5, 0}, countsOf(t, e), "it releases the others at once")
				continue
			}
			lostFor(t, p, soon, lock.ReasonGone)
			require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost)
			harness.Eventually(t, soon, "the others are released after "+how, func() bool { return countsOf(t, e) == counts{5, 5, 0} })
		}

		p := take(t, e, 3)
		require.NoError(t, e.Release(t.Context(), p.IDs()[:2]...))
		lostFor(t, p, soon, lock.ReasonGone)
		require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost)
		harness.Eventually(t, soon, "the last one is released", func() bool { return countsOf(t, e) == counts{5, 5, 0} })
	})
}

// A Permit of several is renewed as a whole, in scripts of a bounded size.
func TestSeveralAreRenewed(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		const many, renewal = 250, redlatch.DefaultWatchdogTimeout / 3
		e := permitSemaphore(t, s.Client(t), many+1)
		one, all := take(t, e, 1), take(t, e, many)
		time.Sleep(3*renewal + renewal/2)
		s.Reset()
		time.Sleep(renewal)
		require.GreaterOrEqual(t, s.Calls("evalsha"), 3, "each of at most 100 permits")
		for _, id := range all.IDs() {
			require.Greater(t, leaseTime(t, e, id), renewal)
		}
		require.NoError(t, all.Context().Err())

		_, err := s.ZRem(timeoutsKey("orders"), raw(t, all.IDs()[many-1]))
		require.NoError(t, err)
		lostFor(t, all, 2*renewal, lock.ReasonGone)
		require.NoError(t, one.Context().Err())
		require.NoError(t, one.Release(t.Context()))
	})
}

// A semaphore whose key has another type does not fail the renewals that are sent together with its own.
func TestBadKeyDoesNotFailBatchRenewal(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		var permits []*semaphore.Permit
		for _, name := range []string{"a", "orders", "z"} {
			permits = append(permits, take(t, c.PermitSemaphore(name, semaphore.Permits(1)), 1))
		}
		s.Del(timeoutsKey("orders"))
		require.NoError(t, s.Set(timeoutsKey("orders"), "precious"))
		time.Sleep(time.Minute)
		lostFor(t, permits[1], time.Second, lock.ReasonGone)
		require.NoError(t, permits[0].Release(t.Context()))
		require.NoError(t, permits[2].Release(t.Context()))
		s.Del(timeoutsKey("orders"))
	})
}

func TestDroppedPermitOfSeveralEnds(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		e := permitSemaphore(t, harness.Client(t, s, redlatch.WithLogger(log.Logger()), redlatch.WithWatchdogTimeout(2*time.Second)), 3)
		require.NoError(t, only(e.Acquire(t.Context(), 3)))
		harness.Eventually(t, soon, "all are free", func() bool {
			runtime.GC()
			return countsOf(t, e) == counts{3, 3, 0}
		})
		require.Equal(t, 1, strings.Count(log.String(), "dropped without Release"))
	})
}

// Remaining is what the holder can count on, and LeaseTime what the server keeps.
func TestLeases(t *testing.T) {
	const renewed = redlatch.DefaultWatchdogTimeout
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		e := permitSemaphore(t, c, 1)
		require.ErrorIs(t, only(e.TTL(t.Context(), unknown)), lock.ErrNotHeld)
		for _, tt := range []struct {
			opts          []lock.Option
			here, there   time.Duration
			extendedToOne time.Duration // by Extend to an hour
		}{
			{nil, watchdog.Certain(renewed), renewed, time.Hour},
			{[]lock.Option{lock.Lease(time.Minute)}, watchdog.Certain(time.Minute), time.Minute, time.Hour},
			{[]lock.Option{lock.Lease(2 * time.Hour)}, watchdog.Certain(2 * time.Hour), 2 * time.Hour, 2 * time.Hour},
			{[]lock.Option{lock.MaxHold(10 * time.Second)}, 10 * time.Second, renewed, time.Hour},
			{[]lock.Option{semaphore.Forever()}, lock.NoExpiry, lock.NoExpiry, lock.NoExpiry},
		} {
			p := take(t, e, 1, tt.opts...)
			require.InDelta(t, tt.here, p.Remaining(), float64(10*time.Millisecond), "%v", tt)
			require.InDelta(t, tt.there, leaseTime(t, e, p.ID()), float64(10*time.Millisecond), "%v", tt)
			require.LessOrEqual(t, p.Remaining(), leaseTime(t, e, p.ID()))
			require.NoError(t, p.Extend(t.Context(), time.Hour))
			require.InDelta(t, tt.extendedToOne, leaseTime(t, e, p.ID()), float64(10*time.Millisecond), "%v", tt)
			require.NoError(t, p.Release(t.Context()))
			require.Zero(t, p.Remaining())
			require.ErrorIs(t, only(e.TTL(t.Context(), p.ID())), lock.ErrNotHeld)
		}

		p := take(t, e, 1, lock.Lease(time.Minute))
		time.Sleep(time.Minute + 10*time.Millisecond)
		require.ErrorIs(t, only(e.TTL(t.Context(), p.ID())), lock.ErrNotHeld)
	})
}

// UpdateLeaseTime sets any kind of lease, which is not renewed any more.
func TestUpdateLeaseTime(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		const lease = 7 * time.Second
		e := permitSemaphore(t, s.Client(t), 1)
		update := func(id string, lease time.Duration) bool {
			t.Helper()
			acquired, err := e.SetTTL(t.Context(), id, lease)
			require.NoError(t, err)
			return acquired
		}
		require.False(t, update(unknown, time.Second))
		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Hour)}, {semaphore.Forever()}} {
			p := take(t, e, 1, opts...)
			require.True(t, update(p.ID(), lease))
			require.LessOrEqual(t, p.Remaining(), lease)
			require.InDelta(t, lease, leaseTime(t, e, p.ID()), float64(10*time.Millisecond))
			began := time.Now()
			lost := lostFor(t, p, lease, lock.ReasonExpired)
			require.GreaterOrEqual(t, lost.When.Sub(began), watchdog.Certain(lease))
			time.Sleep(lease / 10)
			require.Equal(t, 1, available(t, e))
			require.False(t, update(p.ID(), time.Minute))

			p = take(t, e, 1, opts...)
			require.True(t, update(p.ID(), lock.NoExpiry))
			require.Equal(t, lock.NoExpiry, p.Remaining())
			time.Sleep(2 * time.Hour)
			require.NoError(t, p.Context().Err())
			require.Equal(t, lock.NoExpiry, leaseTime(t, e, p.ID()))
			require.True(t, update(p.ID(), time.Hour))
			require.InDelta(t, watchdog.Certain(time.Hour), p.Remaining(), float64(10*time.Millisecond))
			require.NoError(t, p.Release(t.Context()))

			p = take(t, e, 1, opts...)
			require.NoError(t, s.Client(t).PermitSemaphore("orders").Release(t.Context(), p.ID()))
			require.False(t, update(p.ID(), time.Hour))
			lostFor(t, p, time.Second, lock.ReasonGone)
		}

		// What is not sent changes nothing.
		p, boom := take(t, e, 1), errors.New("boom")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(boom)
		require.ErrorIs(t, only(e.SetTTL(ctx, p.ID(), time.Millisecond)), boom)
		time.Sleep(time.Hour)
		require.NoError(t, p.Release(t.Context()))
	})
}

// The holder does not know that another client has set the lease, and does not shorten it.
func TestUpdateLeaseTimeOfOtherClientsPermit(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		e, other := permitSemaphore(t, s.Client(t), 2), s.Client(t).PermitSemaphore("orders")
		renewed, fixed := take(t, e, 1), take(t, e, 1, lock.Lease(time.Hour))
		update := func(lease time.Duration) {
			for _, p := range []*semaphore.Permit{renewed, fixed} {
				acquired, err := other.SetTTL(t.Context(), p.ID(), lease)
				require.NoError(t, err)
				require.True(t, acquired)
			}
		}

		update(2 * time.Hour)
		time.Sleep(61 * time.Second) // between two renewals
		for _, p := range []*semaphore.Permit{renewed, fixed} {
			require.NoError(t, p.Context().Err())
			require.Greater(t, leaseTime(t, e, p.ID()), time.Hour)
		}
		require.LessOrEqual(t, fixed.Remaining(), time.Hour)

		update(time.Millisecond)
		lostFor(t, renewed, redlatch.DefaultWatchdogTimeout/2, lock.ReasonGone)
		require.Equal(t, 2, available(t, e))
		var lost *lock.LostError
		require.ErrorAs(t, fixed.Release(t.Context()), &lost)
		require.Equal(t, lock.ReasonGone, lost.Reason)
		require.Equal(t, counts{2, 2, 0}, countsOf(t, e))
	})
}

// With the lease of one permit set, a Permit of several is no longer renewed, and ends with the first.
func TestUpdateLeaseTimeOfOneOfSeveral(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		e := permitSemaphore(t, s.Client(t), 3)
		for lease, ends := range map[time.Duration]time.Duration{5 * time.Second: 5 * time.Second, time.Hour: redlatch.DefaultWatchdogTimeout} {
			p := take(t, e, 3)
			updated, err := e.SetTTL(t.Context(), p.IDs()[1], lease)
			require.NoError(t, err)
			require.True(t, updated)
			lostFor(t, p, ends, lock.ReasonExpired)
			require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost)
			time.Sleep(time.Minute)
			require.Equal(t, counts{3, 3, 0}, countsOf(t, e), "%v", lease)
		}
	})
}

// Two changes of a lease run one after the other: this client must process the replies in the
// order in which the server ran the requests.
func TestLeaseChangesAreSerialized(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		e := permitSemaphore(t, c, 1)
		p := take(t, e, 1, lock.Lease(time.Minute))
		extend, id := load(t, s.Addr, "permit_extend"), p.ID()
		changes := []func(ctx context.Context) error{
			func(ctx context.Context) error { return p.Extend(ctx, time.Hour) },
			func(ctx context.Context) error { return only(e.SetTTL(ctx, id, 30*time.Minute)) },
		}
		for i, first := range changes {
			done := make(chan error, 1)
			g.Keep(t, extend, 1, func() { go func() { done <- first(t.Context()) }() })
			at := harness.Do(t, s.Addr, "ZSCORE", timeoutsKey("orders"), raw(t, id))
			for _, next := range changes {
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				require.ErrorIs(t, next(ctx), context.DeadlineExceeded, i)
				cancel()
			}
			require.NoError(t, g.Open())
			require.NoError(t, <-done)
			require.Equal(t, at, harness.Do(t, s.Addr, "ZSCORE", timeoutsKey("orders"), raw(t, id)), "a canceled call has sent nothing")
			left := leaseTime(t, e, id) // in whole milliseconds
			require.Less(t, p.Remaining(), left+2*time.Millisecond)
		}
	})
}

// A script makes a bounded number of expired permits free, or as many as a request wants.
func TestManyExpiredPermits(t *testing.T) {
	many := harness.Size(2_500, semaphore.MaxBatch)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := harness.Client(t, s).PermitSemaphore("orders")
		harness.Do(t, s.Addr, "SET", "orders", "0")
		words := []string{"ZADD", timeoutsKey("orders")}
		for i := range many {
			words = append(words, "1000000", fmt.Sprintf("%016d", i))
		}
		harness.Do(t, s.Addr, words...)
		require.Equal(t, many, available(t, e))

		messages := harness.Messages(t, s.Addr, channel("orders"))
		p, err := e.TryAcquire(t.Context(), 1)
		require.NoError(t, err)
		require.Equal(t, "999", harness.Receive(t, soon, "the number of free permits", messages))
		require.Equal(t, fmt.Sprint(":", many-1000+1), harness.Do(t, s.Addr, "ZCARD", timeoutsKey("orders")))
		require.NoError(t, p.Release(t.Context()))

		all, err := e.TryAcquire(t.Context(), many, semaphore.Forever())
		require.NoError(t, err)
		require.Equal(t, counts{many, 0, many}, countsOf(t, e))
		require.NoError(t, all.Release(t.Context()))
		require.Equal(t, counts{many, many, 0}, countsOf(t, e))
	})
}
