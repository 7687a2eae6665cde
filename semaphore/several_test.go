package semaphore_test

import (
	"context"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// takeN acquires n permits in one Permit.
func takeN(t testing.TB, e *semaphore.PermitSemaphore, n int, opts ...lock.Option) *semaphore.Permit {
	t.Helper()
	p, err := e.AcquireN(context.Background(), n, patient(opts)...)
	require.NoError(t, err)
	require.Len(t, p.IDs(), n)
	require.Equal(t, p.IDs()[0], p.ID())
	keep(t, p)
	return p
}

func TestPermitOfSeveral(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 10)
		p := takeN(t, e, 4, lock.Lease(time.Minute))
		require.Equal(t, counts{10, 6, 4}, countsOf(t, e))
		require.NoError(t, p.Extend(t.Context(), time.Hour))
		require.Greater(t, p.Remaining(), 50*time.Minute)
		for _, id := range p.IDs() {
			require.Greater(t, leaseTime(t, e, id), 50*time.Minute)
		}
		loadScripts(t, s.Addr)
		conn := harness.Conn(t, s.Addr)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		require.NoError(t, p.Release(t.Context()))
		require.Equal(t, 1, harness.Commands(t, conn)["evalsha"], "one request")
		require.ErrorIs(t, context.Cause(p.Context()), context.Canceled)
		require.Equal(t, counts{10, 10, 0}, countsOf(t, e))
		require.ErrorIs(t, p.Release(t.Context()), lock.ErrNotHeld)

		// All ids at once are a release of the Permit.
		p = takeN(t, e, 3)
		require.NoError(t, e.Release(t.Context(), p.IDs()...))
		require.ErrorIs(t, context.Cause(p.Context()), context.Canceled)
		require.ErrorIs(t, p.Release(t.Context()), lock.ErrNotHeld)
	})
}

// Other processes can release the permits one by one.
func TestPermitsOfSeveralAreReleasedOneByOne(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 5)
		other := harness.Client(t, s).PermitSemaphore("orders")
		for i, id := range takeN(t, e, 5, semaphore.Forever()).IDs() {
			require.NoError(t, other.Release(t.Context(), id))
			require.Equal(t, counts{5, i + 1, 4 - i}, countsOf(t, e))
		}
	})
}

// The loss of one permit is the loss of all: Release then releases the others.
func TestLossOfOneOfSeveral(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Second))
		e := withPermits(t, permitSem{c.PermitSemaphore("orders")}, 5).PermitSemaphore
		steal := func(p *semaphore.Permit, n int) {
			harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.IDs()[n]))
			harness.Do(t, s.Addr, "INCR", "orders")
		}
		loses := map[string]func(p *semaphore.Permit){
			"renewal":        func(*semaphore.Permit) {},
			"extension":      func(p *semaphore.Permit) { require.ErrorIs(t, p.Extend(t.Context(), time.Minute), lock.ErrLost) },
			"release":        func(p *semaphore.Permit) { require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost) },
			"release by ids": func(p *semaphore.Permit) { require.ErrorIs(t, e.Release(t.Context(), p.IDs()...), lock.ErrNotHeld) },
		}
		for how, lose := range loses {
			p := takeN(t, e, 4)
			steal(p, 2)
			lose(p)
			if how == "release" {
				require.Equal(t, counts{5, 5, 0}, countsOf(t, e), "it releases the others at once")
				continue
			}
			lostFor(t, p, soon, lock.ReasonGone)
			require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost)
			harness.Eventually(t, soon, "the others are released after "+how, func() bool { return countsOf(t, e) == counts{5, 5, 0} })
		}

		p := takeN(t, e, 3)
		require.NoError(t, e.Release(t.Context(), p.IDs()[:2]...))
		lostFor(t, p, soon, lock.ReasonGone)
		require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost)
		harness.Eventually(t, soon, "the last one is released", func() bool { return countsOf(t, e) == counts{5, 5, 0} })
	})
}

// A Permit of several is renewed as a whole, in scripts of a bounded size.
func TestSeveralAreRenewed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const many, timeout = 250, time.Second
		e := permitSemaphore(t, s, many+1, redlatch.WithWatchdogTimeout(timeout))
		one, all := take(t, e, 1)[0], takeN(t, e, many)
		require.Equal(t, 1, one.Weight())
		require.Equal(t, many, all.Weight())
		before := time.Now()
		for _, id := range all.IDs() {
			harness.Eventually(t, soon, "each is renewed", func() bool { return time.Since(before)+leaseTime(t, e, id) > timeout+10*time.Millisecond })
		}
		require.Positive(t, all.Remaining())
		require.NoError(t, all.Context().Err())
		require.NoError(t, one.Context().Err())
		harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, all.IDs()[many-1]))
		lostFor(t, all, soon, lock.ReasonGone)
		require.NoError(t, one.Context().Err())
		require.NoError(t, one.Release(t.Context()))
	})
}

// With the lease of one permit set, a Permit of several is no longer renewed, and ends with the first.
func TestUpdateLeaseTimeOfOneOfSeveral(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout = 10 * time.Second
		e := permitSemaphore(t, s, 6, redlatch.WithWatchdogTimeout(timeout))
		shorter, longer := takeN(t, e, 3), takeN(t, e, 3)
		for p, lease := range map[*semaphore.Permit]time.Duration{shorter: 300 * time.Millisecond, longer: time.Hour} {
			updated, err := e.UpdateLeaseTime(t.Context(), p.IDs()[1], lease)
			require.NoError(t, err)
			require.True(t, updated)
			require.LessOrEqual(t, p.Remaining(), min(lease, timeout))
		}
		lostFor(t, shorter, soon, lock.ReasonExpired)
		require.ErrorIs(t, shorter.Release(t.Context()), lock.ErrLost)
		require.NoError(t, longer.Release(t.Context()))
		harness.Eventually(t, soon, "all are free", func() bool { return countsOf(t, e) == counts{6, 6, 0} })
	})
}

func TestDroppedPermitOfSeveralIsReleased(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		e := permitSemaphore(t, s, 3, redlatch.WithLogger(log.Logger()))
		_, err := e.AcquireN(t.Context(), 3)
		require.NoError(t, err)
		harness.Eventually(t, soon, "all are released", func() bool {
			runtime.GC()
			return countsOf(t, e) == counts{3, 3, 0}
		})
		require.Equal(t, 1, strings.Count(log.String(), "dropped without Release"))
	})
}
