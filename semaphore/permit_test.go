package semaphore_test

import (
	"context"
	"encoding/hex"
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
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

// timeoutsKey returns the key of the acquired permits.
func timeoutsKey(name string) string { return "{" + name + "}:timeout" }

// raw returns an id in the form of the server.
func raw(t testing.TB, id string) string {
	t.Helper()
	b, err := hex.DecodeString(id)
	require.NoError(t, err)
	return string(b)
}

// expire lets the lease of a permit expire on the server.
func expire(t testing.TB, s *testserver.Server, p *semaphore.Permit) {
	t.Helper()
	harness.Do(t, s.Addr, "ZADD", timeoutsKey(p.Name()), "XX", "1", raw(t, p.ID()))
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
	require.Equal(t, p.Name(), lost.Name)
	require.ErrorContains(t, lost, p.ID())
	require.Zero(t, p.Remaining())
	return lost
}

// A context created after the end of the permit is canceled.
func TestPermitContext(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 1)
		p, err := e.Acquire(t.Context())
		require.NoError(t, err)
		require.NoError(t, p.Release(t.Context()))
		require.Equal(t, context.Canceled, context.Cause(p.Context()))
		p = takeExpired(t, e)
		require.ErrorIs(t, p.Extend(t.Context(), time.Second), lock.ErrLost)
		require.ErrorIs(t, context.Cause(p.Context()), lock.ErrLost)
	})
}

func TestPermitIsReleasedOnce(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 2)
		p := take(t, e, 1)[0]
		var released atomic.Int32
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				if err := p.Release(context.Background()); err == nil {
					released.Add(1)
				} else {
					assert.ErrorIs(t, err, lock.ErrNotHeld)
				}
			})
		}
		wg.Wait()
		require.Equal(t, int32(1), released.Load())
		require.ErrorIs(t, p.Release(t.Context()), lock.ErrNotHeld)
		require.Equal(t, counts{2, 2, 0}, countsOf(t, e))
		require.Equal(t, "$1", harness.Do(t, s.Addr, "GET", "orders"))
	})
}

func TestLostPermit(t *testing.T) {
	const timeout = 3 * time.Second // so that no renewal is late
	type way struct {
		name string
		gone lock.Reason
		do   func(t *testing.T, s *testserver.Server, c *redlatch.Client, p *semaphore.Permit)
	}
	ways := []way{
		{"removed by hand", lock.ReasonGone, func(t *testing.T, s *testserver.Server, _ *redlatch.Client, p *semaphore.Permit) {
			require.Equal(t, ":1", harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.ID())))
		}},
		{"deleted", lock.ReasonGone, func(t *testing.T, s *testserver.Server, _ *redlatch.Client, _ *semaphore.Permit) {
			require.Equal(t, ":2", harness.Do(t, s.Addr, "DEL", "orders", timeoutsKey("orders")))
		}},
		{"another type", lock.ReasonGone, func(t *testing.T, s *testserver.Server, _ *redlatch.Client, _ *semaphore.Permit) {
			harness.Do(t, s.Addr, "SET", timeoutsKey("orders"), "precious")
		}},
		{"released elsewhere", lock.ReasonGone, func(t *testing.T, s *testserver.Server, _ *redlatch.Client, p *semaphore.Permit) {
			require.NoError(t, harness.Client(t, s).PermitSemaphore("orders").Release(t.Context(), p.ID()))
		}},
		{"expired on the server", lock.ReasonGone, func(t *testing.T, s *testserver.Server, _ *redlatch.Client, p *semaphore.Permit) {
			expire(t, s, p)
		}},
		{"client closed", lock.ReasonClosed, func(_ *testing.T, _ *testserver.Server, c *redlatch.Client, _ *semaphore.Permit) {
			c.Close()
		}},
	}
	harness.EachOf(t, ways, func(w way) string { return w.name }, func(t *testing.T, s *testserver.Server, w way) {
		for _, l := range leases {
			harness.Do(t, s.Addr, "FLUSHALL")
			c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
			e := withPermits(t, permitSem{c.PermitSemaphore("orders")}, 2).PermitSemaphore
			p := take(t, e, 1, l.opts...)[0]
			require.NoError(t, p.Context().Err())
			w.do(t, s, c, p)
			if l.opts == nil || w.gone == lock.ReasonClosed {
				lost := lostFor(t, p, timeout/3+slack, w.gone)
				require.Equal(t, w.gone == lock.ReasonClosed, errors.Is(lost, lock.ErrClosed))
				require.ErrorIs(t, p.Extend(t.Context(), time.Minute), lock.ErrLost)
				require.Equal(t, error(lost), p.Release(t.Context()))
			} else {
				// Only the release finds out.
				err := p.Release(t.Context())
				var lost *lock.LostError
				require.ErrorAs(t, err, &lost)
				require.Equal(t, lock.ReasonGone, lost.Reason)
				require.Equal(t, p.ID(), lost.Permit)
			}
			require.ErrorIs(t, p.Release(t.Context()), lock.ErrNotHeld)
		}
	})
}

func TestCloseLeavesPermitsToTheirLeases(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout, lease = 2 * time.Second, time.Minute
		other := permitSemaphore(t, s, 3)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		e := c.PermitSemaphore("orders")
		renewed, fixed, forever := take(t, e, 1)[0], take(t, e, 1, lock.Lease(lease))[0], take(t, e, 1, semaphore.Forever())[0]
		w := startBehind(t, c, permitSem{e}, 1)
		c.Close()
		require.ErrorIs(t, w.End(), lock.ErrClosed)
		for _, p := range []*semaphore.Permit{renewed, fixed, forever} {
			require.ErrorIs(t, lostFor(t, p, soon, lock.ReasonClosed), lock.ErrClosed)
			require.ErrorIs(t, p.Release(t.Context()), lock.ErrClosed)
		}
		harness.Eventually(t, timeout+slack, "the renewed permit is free", func() bool {
			return countsOf(t, other) == counts{3, 1, 2}
		})
		require.Greater(t, leaseTime(t, other, fixed.ID()), lease/2)
		require.Equal(t, lock.NoExpiry, leaseTime(t, other, forever.ID()))
		require.NoError(t, other.Release(t.Context(), forever.ID(), fixed.ID()))
		require.Equal(t, counts{3, 3, 0}, countsOf(t, other))
	})
}

func TestReleaseByID(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 3)
		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Hour)}, {semaphore.Forever()}} {
			permits := take(t, e, 3, opts...)
			ctx := permits[0].Context()
			require.NoError(t, e.Release(t.Context(), idsOf(permits)...))
			require.Equal(t, context.Canceled, context.Cause(ctx))
			for _, p := range permits {
				require.Equal(t, context.Canceled, context.Cause(p.Context()))
				require.Zero(t, p.Remaining())
				require.ErrorIs(t, p.Release(t.Context()), lock.ErrNotHeld)
				require.ErrorIs(t, p.Extend(t.Context(), time.Minute), lock.ErrNotHeld)
			}
			require.Equal(t, counts{3, 3, 0}, countsOf(t, e))
		}
	})
}

// A permit whose release by id failed is still held and renewed.
func TestFailedReleaseKeepsPermit(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout = 2 * time.Second
		e := permitSemaphore(t, s, 3, redlatch.WithWatchdogTimeout(timeout))
		p := take(t, e, 1)[0]
		released, err := e.TryRelease(t.Context(), p.ID(), unknown)
		require.NoError(t, err)
		require.False(t, released)
		time.Sleep(timeout * 5 / 4) // long enough for a renewal
		require.NoError(t, p.Context().Err())
		require.Equal(t, counts{3, 2, 1}, countsOf(t, e))
		harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.ID()))
		lostFor(t, p, timeout+slack, lock.ReasonGone)
	})
}

// While permits are released by their ids, one that is missing may be released or lost. Only the
// last answer tells.
func TestMissingDuringReleases(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 1)
		for _, c := range []struct {
			name            string
			first, released bool // the first release succeeded; a later one
			cause           error
		}{
			{"no release succeeds", false, false, lock.ErrLost},
			{"the first succeeds", true, false, context.Canceled},
			{"the last succeeds", false, true, context.Canceled},
		} {
			p := take(t, e, 1)[0]
			id := p.ID()
			p.StartRelease()
			p.StartRelease()
			p.Gone()
			require.NoError(t, p.Context().Err(), c.name)
			p.EndRelease(c.first)
			require.Equal(t, c.first, p.Context().Err() != nil, c.name)
			p.EndRelease(c.released)
			require.ErrorIs(t, context.Cause(p.Context()), c.cause, c.name)
			require.NoError(t, e.Release(t.Context(), id), c.name)
		}
		p := take(t, e, 1)[0]
		p.StartRelease()
		p.EndRelease(false)
		require.NoError(t, p.Context().Err(), "it is not missing")
		p.Gone()
		require.ErrorIs(t, context.Cause(p.Context()), lock.ErrLost)
	})
}

// A renewed permit that is unreachable would never become free.
func TestDroppedPermitIsReleasedAndLogged(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		e := permitSemaphore(t, s, 8, redlatch.WithLogger(log.Logger()))
		ids := map[string]string{}
		func() {
			for kind, opts := range map[string][]lock.Option{"fixed": {lock.Lease(time.Hour)}, "forever": {semaphore.Forever()}} {
				p, err := e.Acquire(t.Context(), opts...)
				require.NoError(t, err)
				require.NotNil(t, p.Context())
				ids[kind] = p.ID()
			}
			_, err := e.Acquire(t.Context(), lock.Lease(time.Hour))
			require.NoError(t, err)
			updated, err := e.Acquire(t.Context())
			require.NoError(t, err)
			_, err = e.UpdateLeaseTime(t.Context(), updated.ID(), time.Hour)
			require.NoError(t, err)
			ids["updated"] = updated.ID()
			p, err := e.Acquire(t.Context())
			require.NoError(t, err)
			require.NotNil(t, p.Context()) // without a call of ID
			p, err = e.Acquire(t.Context())
			require.NoError(t, err)
			ids["known"] = p.ID()
			p, err = e.Acquire(t.Context())
			require.NoError(t, err)
			id, err := p.Detach(t.Context(), time.Hour)
			require.NoError(t, err)
			ids["detached"], _, _ = strings.Cut(id, "#")
			p, err = e.Acquire(t.Context())
			require.NoError(t, err)
			require.NoError(t, e.Release(t.Context(), p.ID()))
		}()
		harness.Eventually(t, soon, "one permit is free", func() bool {
			runtime.GC()
			return countsOf(t, e) == counts{8, 2, 6}
		})
		for range 5 {
			runtime.GC()
			time.Sleep(10 * time.Millisecond)
		}
		require.Equal(t, 1, strings.Count(log.String(), "dropped without Release"))
		require.Contains(t, log.String(), "permit_test.go")
		for kind := range ids {
			require.NotContains(t, log.String(), ids[kind])
			require.NoError(t, e.Release(t.Context(), ids[kind]), kind)
		}
		require.Equal(t, counts{8, 7, 1}, countsOf(t, e))
	})
}

// A permit that the server no longer has is lost when this client finds out.
func TestPermitReleasedElsewhereIsLost(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 1)
		p := take(t, e, 1)[0]
		require.NoError(t, harness.Client(t, s).PermitSemaphore("orders").Release(t.Context(), p.ID()))
		require.NoError(t, p.Context().Err())
		require.ErrorIs(t, e.Release(t.Context(), p.ID()), lock.ErrNotHeld)
		require.ErrorIs(t, context.Cause(p.Context()), lock.ErrLost)
		require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost)
	})
}
