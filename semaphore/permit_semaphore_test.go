package semaphore_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// unknown is an id without a permit.
const unknown = "0123456789abcdef0123456789abcdef"

// counts are the numbers of permits of a PermitSemaphore.
type counts struct{ permits, free, acquired int }

func countsOf(t testing.TB, e *semaphore.PermitSemaphore) (n counts) {
	t.Helper()
	stats, err := e.Stats(context.Background())
	require.NoError(t, err)
	return counts{stats.Total, stats.Free, stats.Taken}
}

// permitSemaphore creates a semaphore of a new client with this number of permits.
func permitSemaphore(t testing.TB, s *testserver.Server, permits int, opts ...redlatch.Option) *semaphore.PermitSemaphore {
	t.Helper()
	return withPermits(t, permitSem{harness.Client(t, s, opts...).PermitSemaphore("orders")}, permits).PermitSemaphore
}

// take acquires permits one by one.
func take(t testing.TB, e *semaphore.PermitSemaphore, n int, opts ...lock.Option) []*semaphore.Permit {
	t.Helper()
	var permits []*semaphore.Permit
	for range n {
		p, err := e.Acquire(context.Background(), patient(opts)...)
		require.NoError(t, err)
		permits = append(permits, p)
	}
	keep(t, permits...)
	return permits
}

// takeExpired acquires a permit and returns it as soon as it has expired.
func takeExpired(t testing.TB, e *semaphore.PermitSemaphore) *semaphore.Permit {
	t.Helper()
	for lease := 20 * time.Millisecond; ; lease *= 2 {
		p, err := e.TryAcquire(context.Background(), lock.Lease(lease))
		if errors.Is(err, lock.ErrNotAcquired) {
			continue // the reply took longer than the lease
		}
		require.NoError(t, err)
		keep(t, p)
		for left := p.Remaining(); left > 0; left = p.Remaining() {
			time.Sleep(left)
		}
		return p
	}
}

// keep keeps permits reachable until the test ends.
func keep(t testing.TB, permits ...*semaphore.Permit) {
	t.Cleanup(func() { runtime.KeepAlive(permits) })
}

func leaseTime(t testing.TB, e *semaphore.PermitSemaphore, id string) time.Duration {
	t.Helper()
	left, err := e.LeaseTime(context.Background(), id)
	require.NoError(t, err)
	return left
}

func TestNewPermitSemaphoreIsEmpty(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := harness.Client(t, s).PermitSemaphore("orders")
		require.Equal(t, counts{}, countsOf(t, e))
		released, err := e.TryRelease(t.Context(), unknown)
		require.NoError(t, err)
		require.False(t, released)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"))
	})
}

func TestPermitIDs(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 10)
		permits := take(t, e, 6)
		seen := map[string]bool{}
		for _, p := range permits {
			require.Len(t, p.ID(), 32)
			require.Empty(t, strings.Trim(p.ID(), "0123456789abcdef"))
			require.Equal(t, "orders", p.Name())
			seen[p.ID()] = true
		}
		require.Len(t, seen, 6)
		require.Equal(t, counts{10, 4, 6}, countsOf(t, e))
		require.NoError(t, e.Release(t.Context(), idsOf(permits)...))
		require.Equal(t, counts{10, 10, 0}, countsOf(t, e))
		require.ErrorIs(t, e.Release(t.Context(), idsOf(permits)...), lock.ErrNotHeld)
		require.Equal(t, counts{10, 10, 0}, countsOf(t, e))

		permits = take(t, e, 6)
		require.NoError(t, e.Release(t.Context(), idsOf(permits[:4])...))
		require.Equal(t, 8, available(t, e))
		released, err := e.TryRelease(t.Context(), idsOf(permits[4:])...)
		require.NoError(t, err)
		require.True(t, released)
		require.Equal(t, 10, available(t, e))

		a, err := e.TryAcquireN(t.Context(), 4)
		require.NoError(t, err)
		require.Len(t, a.IDs(), 4)
		b, err := e.TryAcquireN(t.Context(), 5)
		require.NoError(t, err)
		require.Len(t, b.IDs(), 5)
		_, err = e.TryAcquireN(t.Context(), 2)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		p, err := e.TryAcquire(t.Context())
		require.NoError(t, err)
		require.NotNil(t, p)
		keep(t, a, b, p)
		require.Equal(t, counts{10, 0, 10}, countsOf(t, e))
	})
}

func TestExpiredPermitsBecomeFree(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease = 700 * time.Millisecond
		e := permitSemaphore(t, s, 2)
		other := harness.Client(t, s).PermitSemaphore("orders")
		begin := time.Now()
		permits := take(t, e, 2, lock.Lease(lease))
		_, err := e.Acquire(t.Context(), lock.Wait(100*time.Millisecond))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Equal(t, counts{2, 0, 2}, countsOf(t, e))

		// An expiry sends no message.
		p, err := other.Acquire(t.Context(), lock.Lease(lease))
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(begin), lease-5*time.Millisecond)
		require.Less(t, time.Since(begin), lease+slack)
		for _, expired := range permits {
			released, err := other.TryRelease(t.Context(), expired.ID())
			require.NoError(t, err)
			require.False(t, released)
		}
		require.Equal(t, counts{2, 1, 1}, countsOf(t, e))
		harness.Eventually(t, lease+slack, "the permit of the other client has expired", func() bool {
			return countsOf(t, e) == counts{2, 2, 0}
		})
		require.ErrorIs(t, other.Release(t.Context(), p.ID()), lock.ErrNotHeld)
		require.Equal(t, counts{2, 2, 0}, countsOf(t, e))
		require.Len(t, take(t, e, 2), 2)
	})
}

// Six permits have expired. The acquisition needs only some of them, or none.
func TestExpiredPermitsAreGrantedOnce(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 10)
		for _, p := range take(t, e, 6, lock.Lease(time.Hour)) {
			expire(t, s, p)
		}
		require.Equal(t, counts{10, 10, 0}, countsOf(t, e))
		p := take(t, e, 1, lock.Lease(time.Minute))[0]
		require.Equal(t, counts{10, 9, 1}, countsOf(t, e))
		require.NoError(t, p.Release(t.Context()))
		require.Equal(t, counts{10, 10, 0}, countsOf(t, e))
		permits := take(t, e, 10)
		_, err := e.TryAcquire(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, e.Release(t.Context(), idsOf(permits)...))
		require.Equal(t, counts{10, 10, 0}, countsOf(t, e))
	})
}

func TestReleaseOfSeveralPermitsIsAtomic(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 10)
		expired := takeExpired(t, e)
		released := take(t, e, 1)[0]
		require.NoError(t, released.Release(t.Context()))
		ours := take(t, e, 4)
		theirs := take(t, harness.Client(t, s).PermitSemaphore("orders"), 1)
		harness.Eventually(t, slack, "the permit has expired", func() bool { return available(t, e) == 5 })
		for what, id := range map[string]string{"expired": expired.ID(), "released": released.ID(), "unknown": unknown} {
			for at := range len(ours) + 1 { // at any position of the list
				list := append(idsOf(ours[:at]), id)
				list = append(list, idsOf(ours[at:])...)
				list = append(list, idsOf(theirs)...)
				ok, err := e.TryRelease(t.Context(), list...)
				require.NoError(t, err, what)
				require.False(t, ok, what)
				require.ErrorIs(t, e.Release(t.Context(), list...), lock.ErrNotHeld, what)
			}
		}
		require.Equal(t, counts{10, 5, 5}, countsOf(t, e))
		for _, p := range append(ours, theirs...) {
			require.NoError(t, p.Context().Err())
			require.Positive(t, p.Remaining())
		}
		require.NoError(t, e.Release(t.Context(), append(idsOf(ours), idsOf(theirs)...)...))
		require.Equal(t, counts{10, 10, 0}, countsOf(t, e))
	})
}

func TestLeaseTime(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease = time.Minute
		e := permitSemaphore(t, s, 3)
		_, err := e.LeaseTime(t.Context(), unknown)
		require.ErrorIs(t, err, lock.ErrNotHeld)

		forever := take(t, e, 1, semaphore.Forever())[0]
		require.Equal(t, lock.NoExpiry, leaseTime(t, e, forever.ID()))
		renewed := take(t, e, 1)[0]
		require.InDelta(t, redlatch.DefaultWatchdogTimeout, leaseTime(t, e, renewed.ID()), float64(slack))

		p := take(t, e, 1, lock.Lease(lease))[0]
		before := leaseTime(t, e, p.ID())
		require.LessOrEqual(t, before, lease)
		require.Positive(t, before)
		harness.Eventually(t, slack, "the lease decreases", func() bool { return leaseTime(t, e, p.ID()) < before })
		expire(t, s, p)
		require.Equal(t, 1, available(t, e))
		_, err = e.LeaseTime(t.Context(), p.ID())
		require.ErrorIs(t, err, lock.ErrNotHeld)
		require.NoError(t, forever.Release(t.Context()))
		_, err = e.LeaseTime(t.Context(), forever.ID())
		require.ErrorIs(t, err, lock.ErrNotHeld)
	})
}

func TestUpdateLeaseTime(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 1)
		update := func(id string, lease time.Duration) bool {
			updated, err := e.UpdateLeaseTime(t.Context(), id, lease)
			require.NoError(t, err)
			return updated
		}
		require.False(t, update(unknown, time.Second))
		p := take(t, e, 1, lock.Lease(time.Minute))[0]
		require.True(t, update(p.ID(), time.Hour))
		require.InDelta(t, time.Hour, leaseTime(t, e, p.ID()), float64(slack))
		require.True(t, update(p.ID(), time.Minute)) // a shorter lease
		require.InDelta(t, time.Minute, leaseTime(t, e, p.ID()), float64(slack))
		require.True(t, update(p.ID(), lock.NoExpiry))
		require.Equal(t, lock.NoExpiry, leaseTime(t, e, p.ID()))
		require.True(t, update(p.ID(), 50*time.Millisecond))
		harness.Eventually(t, slack, "the permit is free", func() bool { return available(t, e) == 1 })
		require.False(t, update(p.ID(), time.Minute))
		require.Equal(t, 1, available(t, e))
	})
}

func TestSetPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := harness.Client(t, s).PermitSemaphore("orders")
		for _, n := range []int{10, 15, 15, 5, 0, 5} {
			require.NoError(t, e.SetPermits(t.Context(), n))
			require.Equal(t, counts{n, n, 0}, countsOf(t, e))
		}
		permits := take(t, e, 3)
		require.Equal(t, counts{5, 2, 3}, countsOf(t, e))
		require.NoError(t, e.SetPermits(t.Context(), 3))
		require.Equal(t, counts{3, 0, 3}, countsOf(t, e))
		require.NoError(t, e.SetPermits(t.Context(), 2))
		require.Equal(t, counts{2, -1, 3}, countsOf(t, e))
		require.NoError(t, permits[0].Release(t.Context()))
		require.Equal(t, counts{2, 0, 2}, countsOf(t, e))
		require.NoError(t, permits[1].Release(t.Context()))
		require.Equal(t, counts{2, 1, 1}, countsOf(t, e))
		require.NoError(t, permits[2].Release(t.Context()))

		made, err := e.TrySetPermits(t.Context(), 7)
		require.NoError(t, err)
		require.False(t, made)
		require.NoError(t, harness.Client(t, s).PermitSemaphore("none").SetPermits(t.Context(), 0))
		require.Equal(t, ":1", harness.Do(t, s.Addr, "EXISTS", "none"))
	})
}

func TestPermitSemaphoreAddPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := harness.Client(t, s).PermitSemaphore("orders")
		sum := 0
		for _, n := range []int{10, 5, -10, 0, -10} {
			require.NoError(t, e.AddPermits(t.Context(), n))
			sum += n
			require.Equal(t, counts{sum, sum, 0}, countsOf(t, e))
		}
		require.Equal(t, -5, sum)
		_, err := e.TryAcquire(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
	})
}

// Names are mapped, and all keys of a semaphore are in one hash slot.
func TestSemaphoresInCluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		mapped := redlatch.WithNameMapper(func(name string) string { return "test::" + name })
		here := harness.ClientAt(t, cluster.Addrs(), mapped)
		there := harness.ClientAt(t, cluster.Addrs(), mapped)
		for _, k := range kinds {
			for _, name := range []string{"a", "b", "c", "d", "{tag}e"} { // on different primaries
				ours, theirs := withPermits(t, k.of(here, k.name+name), 3), k.of(there, k.name+name)
				require.Equal(t, k.name+name, ours.Name())
				held := mustAcquire(t, ours, 3)
				require.Zero(t, available(t, theirs))
				w := startBehind(t, there, theirs, 2)
				requireMessages(t, there, 1, func() { held.release(t) })
				w.Got().release(t)
				require.Equal(t, 3, available(t, ours))
			}
		}
		e := here.PermitSemaphore(kinds[1].name + "a")
		p := take(t, e, 1, lock.Lease(time.Minute))[0]
		require.Equal(t, counts{3, 2, 1}, countsOf(t, e))
		updated, err := e.UpdateLeaseTime(t.Context(), p.ID(), time.Hour)
		require.NoError(t, err)
		require.True(t, updated)
		assert.Greater(t, leaseTime(t, e, p.ID()), 50*time.Minute)
		require.NoError(t, e.SetPermits(t.Context(), 5))
		require.NoError(t, e.AddPermits(t.Context(), 1))
		require.NoError(t, p.Release(t.Context()))
		require.Equal(t, counts{6, 6, 0}, countsOf(t, e))
	})
}

func TestReadsWriteNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		sem := withPermits(t, plain{c.Semaphore("plain")}, 2)
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
		for _, e := range []*semaphore.PermitSemaphore{e, c.PermitSemaphore("never set")} {
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
