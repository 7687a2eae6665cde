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

// timeoutsKey is where the permits of a semaphore are that are taken.
func timeoutsKey(name string) string { return "{" + name + "}:timeout" }

// raw is an id as the server has it.
func raw(t testing.TB, id string) string {
	t.Helper()
	b, err := hex.DecodeString(id)
	require.NoError(t, err)
	return string(b)
}

// lostFor returns the loss of a permit, which has to come within d.
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

func TestPermitContext(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 1)
		type key struct{}
		boom := errors.New("boom")
		parent, cancel := context.WithCancelCause(context.WithValue(t.Context(), key{}, "value"))
		defer cancel(nil)

		p, err := e.Acquire(parent)
		require.NoError(t, err)
		require.Equal(t, "value", p.Context().Value(key{}))
		require.Same(t, p.Context(), p.Context())
		require.NoError(t, p.Context().Err())
		require.NoError(t, p.Release(parent))
		require.Equal(t, context.Canceled, context.Cause(p.Context()))

		// Whoever asks for it first when the permit has ended finds it ended.
		p, err = e.Acquire(parent)
		require.NoError(t, err)
		require.NoError(t, p.Release(parent))
		require.Equal(t, context.Canceled, context.Cause(p.Context()))
		p, err = e.Acquire(parent, lock.Lease(10*time.Millisecond))
		require.NoError(t, err)
		harness.Eventually(t, slack, "its time is over", func() bool { return p.Remaining() == 0 })
		require.ErrorIs(t, p.Extend(t.Context(), time.Second), lock.ErrLost)
		require.ErrorIs(t, context.Cause(p.Context()), lock.ErrLost)

		// The end of the parent ends the context, not the permit.
		p, err = e.Acquire(parent)
		require.NoError(t, err)
		cancel(boom)
		require.Equal(t, boom, context.Cause(p.Context()))
		require.Greater(t, p.Remaining(), 20*time.Second)
		require.Equal(t, counts{1, 0, 1}, countsOf(t, e))
		require.NoError(t, p.Release(parent))
		require.Equal(t, counts{1, 1, 0}, countsOf(t, e))
	})
}

func TestAPermitEndsBeforeSomebodyElseHasIt(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		here := permitSemaphore(t, s, 1)
		for _, there := range []*semaphore.Expirable{here, harness.Client(t, s).PermitSemaphore("orders")} {
			for range 20 {
				p := take(t, here, 1)[0]
				ctx := p.Context()
				w := start(t, expirable{there}, 1)
				released := make(chan error, 1)
				go func() { released <- p.Release(context.Background()) }()
				give := w.got()
				require.Error(t, ctx.Err())
				require.NoError(t, <-released)
				give.back(t)
			}
		}
	})
}

func TestRemaining(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 3)
		for _, c := range []struct {
			opts []lock.Option
			want time.Duration
		}{
			{nil, redlatch.DefaultWatchdogTimeout},
			{[]lock.Option{lock.Lease(time.Hour)}, time.Hour},
			{[]lock.Option{lock.MaxHold(10 * time.Second)}, 10 * time.Second},
			{[]lock.Option{semaphore.Forever}, lock.NoExpiry},
		} {
			p := take(t, e, 1, c.opts...)[0]
			if c.want == lock.NoExpiry {
				require.Equal(t, lock.NoExpiry, p.Remaining())
				require.Equal(t, lock.NoExpiry, leaseTime(t, e, p.ID()))
			} else {
				require.InDelta(t, c.want, p.Remaining(), float64(slack))
				require.LessOrEqual(t, p.Remaining(), c.want)
				// What is certain here is not more than what the server keeps.
				remaining := p.Remaining()
				require.LessOrEqual(t, remaining, leaseTime(t, e, p.ID())+slack)
			}
			require.NoError(t, p.Release(t.Context()))
			require.Zero(t, p.Remaining())
		}
	})
}

func TestExtend(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 1)
		p := take(t, e, 1, lock.Lease(time.Second))[0]
		require.LessOrEqual(t, p.Remaining(), time.Second)
		for _, lease := range []time.Duration{time.Minute, time.Second} { // at least, not at most
			require.NoError(t, p.Extend(t.Context(), lease))
			require.Greater(t, p.Remaining(), 50*time.Second)
			require.LessOrEqual(t, p.Remaining(), time.Minute)
			require.Greater(t, leaseTime(t, e, p.ID()), 50*time.Second)
		}
		require.NoError(t, p.Release(t.Context()))
		require.ErrorIs(t, p.Extend(t.Context(), time.Minute), lock.ErrNotHeld)

		forever := take(t, e, 1, semaphore.Forever)[0]
		require.NoError(t, forever.Extend(t.Context(), time.Second))
		require.Equal(t, lock.NoExpiry, forever.Remaining())
		require.Equal(t, lock.NoExpiry, leaseTime(t, e, forever.ID()))

		harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, forever.ID()))
		require.ErrorIs(t, forever.Extend(t.Context(), time.Minute), lock.ErrLost)
		lostFor(t, forever, soon, lock.ReasonGone)
		require.ErrorIs(t, forever.Release(t.Context()), lock.ErrLost)
		require.ErrorIs(t, forever.Release(t.Context()), lock.ErrNotHeld)
	})
}

// What ends a permit is its time, not when somebody notices.
func TestAPermitWhoseTimeIsOverIsLostAtOnce(t *testing.T) {
	for what, end := range map[string]func(*semaphore.Permit) error{
		"Release": func(p *semaphore.Permit) error { return p.Release(context.Background()) },
		"Extend":  func(p *semaphore.Permit) error { return p.Extend(context.Background(), time.Second) },
	} {
		t.Run(what, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				e := permitSemaphore(t, s, 50)
				for range 20 {
					p := take(t, e, 1, lock.Lease(20*time.Millisecond))[0]
					for p.Remaining() > 0 {
						runtime.Gosched()
					}
					require.ErrorIs(t, end(p), lock.ErrLost)
					require.Error(t, p.Context().Err())
				}
				harness.Eventually(t, slack, "they are back", func() bool { return available(t, e) == 50 })
			})
		})
	}
}

func TestAPermitIsReleasedOnce(t *testing.T) {
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

func TestPermitsAreRenewed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout, permits = time.Second, 150
		e := permitSemaphore(t, s, permits, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s).PermitSemaphore("orders")
		all := take(t, e, permits)
		for begin := time.Now(); time.Since(begin) < 2*timeout; time.Sleep(50 * time.Millisecond) {
			require.Equal(t, counts{permits, 0, permits}, countsOf(t, other))
		}
		for _, p := range all {
			require.NoError(t, p.Context().Err())
			require.Positive(t, p.Remaining())
			require.LessOrEqual(t, p.Remaining(), timeout)
		}
		require.NoError(t, other.Release(t.Context(), idsOf(all[1:])...))
		require.NoError(t, all[0].Release(t.Context()))
		require.Equal(t, counts{permits, permits, 0}, countsOf(t, e))
	})
}

func TestAFixedLeaseIsNotRenewed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease = 700 * time.Millisecond
		e := permitSemaphore(t, s, 1, redlatch.WithWatchdogTimeout(200*time.Millisecond))
		begin := time.Now()
		p := take(t, e, 1, lock.Lease(lease))[0]
		lost := lostFor(t, p, lease+slack, lock.ReasonExpired)
		require.NoError(t, lost.Err)
		require.GreaterOrEqual(t, lost.When.Sub(begin), lease-5*time.Millisecond)
		require.Equal(t, error(lost), p.Release(t.Context()))
		harness.Eventually(t, slack, "it is back", func() bool { return countsOf(t, e) == counts{1, 1, 0} })
	})
}

func TestMaxHold(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout, most = 500 * time.Millisecond, 700 * time.Millisecond
		e := permitSemaphore(t, s, 1, redlatch.WithWatchdogTimeout(timeout))
		begin := time.Now()
		p := take(t, e, 1, lock.MaxHold(most))[0]
		lost := lostFor(t, p, most+slack, lock.ReasonMaxHold)
		require.GreaterOrEqual(t, lost.When.Sub(begin), most-5*time.Millisecond)
		harness.Eventually(t, timeout+slack, "it comes back", func() bool { return available(t, e) == 1 })
		require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost)
	})
}

func TestWaysToLoseAPermit(t *testing.T) {
	const timeout = time.Second
	ways := map[string]struct {
		gone lock.Reason
		do   func(t *testing.T, s *testserver.Server, c *redlatch.Client, p *semaphore.Permit)
	}{
		"removed by hand": {gone: lock.ReasonGone, do: func(t *testing.T, s *testserver.Server, _ *redlatch.Client, p *semaphore.Permit) {
			require.Equal(t, ":1", harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.ID())))
		}},
		"deleted": {gone: lock.ReasonGone, do: func(t *testing.T, s *testserver.Server, _ *redlatch.Client, _ *semaphore.Permit) {
			require.Equal(t, ":2", harness.Do(t, s.Addr, "DEL", "orders", timeoutsKey("orders")))
		}},
		"another type": {gone: lock.ReasonGone, do: func(t *testing.T, s *testserver.Server, _ *redlatch.Client, _ *semaphore.Permit) {
			harness.Do(t, s.Addr, "SET", timeoutsKey("orders"), "precious")
		}},
		"released elsewhere": {gone: lock.ReasonGone, do: func(t *testing.T, s *testserver.Server, _ *redlatch.Client, p *semaphore.Permit) {
			require.NoError(t, harness.Client(t, s).PermitSemaphore("orders").Release(t.Context(), p.ID()))
		}},
		"expired on the server": {gone: lock.ReasonGone, do: func(t *testing.T, s *testserver.Server, _ *redlatch.Client, p *semaphore.Permit) {
			harness.Do(t, s.Addr, "ZADD", timeoutsKey("orders"), "XX", "1", raw(t, p.ID()))
		}},
		"client closed": {gone: lock.ReasonClosed, do: func(_ *testing.T, _ *testserver.Server, c *redlatch.Client, _ *semaphore.Permit) {
			c.Close()
		}},
	}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for name, way := range ways {
			t.Run(name, func(t *testing.T) {
				for kind, opts := range map[string][]lock.Option{
					"renewed": nil, "fixed": {lock.Lease(time.Hour)}, "forever": {semaphore.Forever},
				} {
					harness.Do(t, s.Addr, "FLUSHALL")
					c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
					e := limited(t, expirable{c.PermitSemaphore("orders")}, 2).Expirable
					p := take(t, e, 1, opts...)[0]
					require.NoError(t, p.Context().Err())
					way.do(t, s, c, p)
					if kind == "renewed" || way.gone == lock.ReasonClosed {
						lost := lostFor(t, p, timeout/3+slack, way.gone)
						require.Equal(t, way.gone == lock.ReasonClosed, errors.Is(lost, lock.ErrClosed))
						require.ErrorIs(t, p.Extend(t.Context(), time.Minute), lock.ErrLost)
						require.Equal(t, error(lost), p.Release(t.Context()))
					} else {
						// Nobody asks the server before the end.
						err := p.Release(t.Context())
						require.ErrorIs(t, err, lock.ErrLost)
						var lost *lock.LostError
						require.ErrorAs(t, err, &lost)
						require.Equal(t, lock.ReasonGone, lost.Reason)
						require.Equal(t, p.ID(), lost.Permit)
					}
					require.ErrorIs(t, p.Release(t.Context()), lock.ErrNotHeld)
				}
			})
		}
	})
}

func TestCloseLeavesPermitsToTheirLeases(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout, lease = 700 * time.Millisecond, time.Minute
		other := permitSemaphore(t, s, 3)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		e := c.PermitSemaphore("orders")
		renewed, fixed, forever := take(t, e, 1)[0], take(t, e, 1, lock.Lease(lease))[0], take(t, e, 1, semaphore.Forever)[0]
		w := start(t, expirable{e}, 1)
		queued(t, 1)
		c.Close()
		require.ErrorIs(t, w.end(), lock.ErrClosed)
		for _, p := range []*semaphore.Permit{renewed, fixed, forever} {
			require.ErrorIs(t, lostFor(t, p, soon, lock.ReasonClosed), lock.ErrClosed)
			require.ErrorIs(t, p.Release(t.Context()), lock.ErrClosed)
		}
		harness.Eventually(t, timeout+slack, "the one that was renewed is back", func() bool {
			return countsOf(t, other) == counts{3, 1, 2}
		})
		require.Greater(t, leaseTime(t, other, fixed.ID()), lease/2)
		require.Equal(t, lock.NoExpiry, leaseTime(t, other, forever.ID()))
		require.NoError(t, other.Release(t.Context(), forever.ID(), fixed.ID()))
		require.Equal(t, counts{3, 3, 0}, countsOf(t, other))
	})
}

func TestReleaseByIDHere(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 3)
		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Hour)}, {semaphore.Forever}} {
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

// A permit that could not be given back by its id is held and renewed as before.
func TestAReleaseThatFailsChangesNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout = time.Second
		e := permitSemaphore(t, s, 3, redlatch.WithWatchdogTimeout(timeout))
		p := take(t, e, 1)[0]
		released, err := e.TryRelease(t.Context(), p.ID(), unknown)
		require.NoError(t, err)
		require.False(t, released)
		<-time.After(timeout * 3 / 2)
		require.NoError(t, p.Context().Err())
		require.Equal(t, counts{3, 2, 1}, countsOf(t, e))
		harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.ID()))
		lostFor(t, p, timeout+slack, lock.ReasonGone)
	})
}

func TestUpdateLeaseTimeOfAPermitOfThisClient(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout, lease = 500 * time.Millisecond, 600 * time.Millisecond
		e := permitSemaphore(t, s, 1, redlatch.WithWatchdogTimeout(timeout))
		update := func(p *semaphore.Permit, lease time.Duration) {
			t.Helper()
			taken, err := e.UpdateLeaseTime(t.Context(), p.ID(), lease)
			require.NoError(t, err)
			require.True(t, taken)
		}
		for kind, opts := range map[string][]lock.Option{
			"renewed": nil, "fixed": {lock.Lease(time.Hour)}, "forever": {semaphore.Forever},
		} {
			p := take(t, e, 1, opts...)[0]
			begin := time.Now()
			update(p, lease)
			require.LessOrEqual(t, p.Remaining(), lease, kind)
			require.Greater(t, p.Remaining(), time.Duration(0), kind)
			lost := lostFor(t, p, lease+slack, lock.ReasonExpired)
			require.GreaterOrEqual(t, lost.When.Sub(begin), lease-5*time.Millisecond)
			harness.Eventually(t, slack, "it is back", func() bool { return available(t, e) == 1 })

			p = take(t, e, 1, opts...)[0]
			update(p, lock.NoExpiry)
			require.Equal(t, lock.NoExpiry, p.Remaining(), kind)
			<-time.After(2 * timeout)
			require.NoError(t, p.Context().Err(), kind)
			require.Equal(t, lock.NoExpiry, leaseTime(t, e, p.ID()), kind)
			update(p, time.Hour)
			require.InDelta(t, time.Hour, p.Remaining(), float64(slack))
			require.NoError(t, p.Release(t.Context()))
		}

		p := take(t, e, 1, lock.Lease(time.Hour))[0]
		harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.ID()))
		taken, err := e.UpdateLeaseTime(t.Context(), p.ID(), time.Hour)
		require.NoError(t, err)
		require.False(t, taken)
		lostFor(t, p, soon, lock.ReasonGone)
	})
}

func TestUpdateLeaseTimeOfAPermitOfAnotherClient(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout = 700 * time.Millisecond
		e := permitSemaphore(t, s, 2, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s).PermitSemaphore("orders")
		renewed, fixed := take(t, e, 1)[0], take(t, e, 1, lock.Lease(time.Hour))[0]
		for _, p := range []*semaphore.Permit{renewed, fixed} {
			taken, err := other.UpdateLeaseTime(t.Context(), p.ID(), 2*time.Hour)
			require.NoError(t, err)
			require.True(t, taken)
		}
		<-time.After(2 * timeout)
		for _, p := range []*semaphore.Permit{renewed, fixed} {
			require.NoError(t, p.Context().Err())
			require.Greater(t, leaseTime(t, e, p.ID()), time.Hour, "renewals do not shorten a lease")
		}
		require.LessOrEqual(t, fixed.Remaining(), time.Hour, "what others do is not certain here")
		for _, p := range []*semaphore.Permit{renewed, fixed} {
			taken, err := other.UpdateLeaseTime(t.Context(), p.ID(), time.Millisecond)
			require.NoError(t, err)
			require.True(t, taken)
		}
		lostFor(t, renewed, timeout/3+slack, lock.ReasonGone)
		harness.Eventually(t, soon, "both have expired", func() bool { return available(t, e) == 2 })
		var lost *lock.LostError
		require.ErrorAs(t, fixed.Release(t.Context()), &lost)
		require.Equal(t, lock.ReasonGone, lost.Reason)
		require.Equal(t, counts{2, 2, 0}, countsOf(t, e))
	})
}

// A renewed permit that nobody can reach any more would never come back.
func TestADroppedPermitIsReleasedAndLogged(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		e := permitSemaphore(t, s, 6, redlatch.WithLogger(log.Logger()))
		ids := map[string]string{}
		func() {
			for kind, opts := range map[string][]lock.Option{"fixed": {lock.Lease(time.Hour)}, "forever": {semaphore.Forever}} {
				p, err := e.Acquire(t.Context(), opts...)
				require.NoError(t, err)
				require.NotNil(t, p.Context())
				ids[kind] = p.ID()
			}
			updated, err := e.Acquire(t.Context())
			require.NoError(t, err)
			_, err = e.UpdateLeaseTime(t.Context(), updated.ID(), time.Hour)
			require.NoError(t, err)
			ids["updated"] = updated.ID()
			p, err := e.Acquire(t.Context())
			require.NoError(t, err)
			require.NotNil(t, p.Context()) // and nobody asks for its id
			p, err = e.Acquire(t.Context())
			require.NoError(t, err)
			ids["known"] = p.ID()
			p, err = e.Acquire(t.Context())
			require.NoError(t, err)
			require.NoError(t, e.Release(t.Context(), p.ID()))
		}()
		harness.Eventually(t, soon, "one comes back", func() bool {
			runtime.GC()
			return countsOf(t, e) == counts{6, 2, 4}
		})
		for range 5 {
			runtime.GC()
			<-time.After(10 * time.Millisecond)
		}
		require.Equal(t, 1, strings.Count(log.String(), "dropped without Release"))
		require.Contains(t, log.String(), "permit_test.go")
		for _, kind := range []string{"fixed", "forever", "updated", "known"} {
			require.NotContains(t, log.String(), ids[kind])
			require.NoError(t, e.Release(t.Context(), ids[kind]), kind)
		}
		require.Equal(t, counts{6, 6, 0}, countsOf(t, e))
	})
}

// What has not been sent changes nothing.
func TestUpdateLeaseTimeThatIsNotSentLeavesThePermitAlone(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout = time.Second
		e := permitSemaphore(t, s, 1, redlatch.WithWatchdogTimeout(timeout))
		p := take(t, e, 1)[0]
		boom := errors.New("boom")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(boom)
		_, err := e.UpdateLeaseTime(ctx, p.ID(), time.Millisecond)
		require.ErrorIs(t, err, boom)
		<-time.After(timeout * 3 / 2)
		require.NoError(t, p.Context().Err(), "it is renewed as before")
		require.NoError(t, p.Release(t.Context()))
	})
}

// As long as the server has not answered, either lease may be the right one.
func TestUpdateLeaseTimeWithoutAnAnswer(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease = 300 * time.Millisecond
		c, g := harness.GatedClient(t, s)
		e := limited(t, expirable{c.PermitSemaphore("orders")}, 2).Expirable
		shorter, longer := take(t, e, 1)[0], take(t, e, 1, lock.Lease(time.Minute))[0]
		for p, lease := range map[*semaphore.Permit]time.Duration{shorter: lease, longer: time.Hour} {
			kept := g.Arm(harness.KeepReply, timeoutsKey("orders"), 1)
			updated := make(chan error, 1)
			go func() {
				_, err := e.UpdateLeaseTime(context.Background(), p.ID(), lease)
				updated <- err
			}()
			<-kept
			require.LessOrEqual(t, p.Remaining(), min(lease, time.Minute))
			if p == shorter {
				lostFor(t, p, lease+slack, lock.ReasonExpired)
			}
			require.NoError(t, g.Open())
			require.NoError(t, <-updated)
		}
		require.Greater(t, longer.Remaining(), 50*time.Minute)
		require.ErrorIs(t, context.Cause(shorter.Context()), lock.ErrLost)
		require.NoError(t, longer.Release(t.Context()))
	})
}

// Of two who change when a permit expires one waits for the other: this client must not
// take the answers in another order than the server has had the requests.
func TestChangesOfALeaseTakeTurns(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := gatedFor(t, s)
		e := c.PermitSemaphore("orders")
		_, err := e.TrySetPermits(t.Context(), 1)
		require.NoError(t, err)
		p, err := e.TryAcquire(t.Context(), lock.Lease(time.Minute))
		require.NoError(t, err)
		keep(t, p)
		loadScripts(t, s.Addr)
		id := p.ID()
		changes := []func(ctx context.Context) error{
			func(ctx context.Context) error { return p.Extend(ctx, time.Hour) },
			func(ctx context.Context) error {
				_, err := e.UpdateLeaseTime(ctx, id, 30*time.Minute)
				return err
			},
		}
		for i, first := range changes {
			reached := g.Arm(harness.KeepReply, nameOf(t, "permit_extend.lua"), 1)
			done := make(chan error, 1)
			go func() { done <- first(t.Context()) }()
			<-reached
			at := harness.Do(t, s.Addr, "ZSCORE", timeoutsKey("orders"), raw(t, id))
			for _, next := range changes {
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				require.ErrorIs(t, next(ctx), context.DeadlineExceeded, i)
				cancel()
			}
			require.NoError(t, g.Open())
			require.NoError(t, await(t, done))
			require.Equal(t, at, harness.Do(t, s.Addr, "ZSCORE", timeoutsKey("orders"), raw(t, id)), "who did not wait for its turn has sent nothing")
			left := leaseTime(t, e, id) // in whole milliseconds
			require.Less(t, p.Remaining(), left+2*time.Millisecond)
		}
	})
}

// A permit that the server does not have any more ends here when somebody learns of it.
func TestAPermitThatSomebodyElseHasReleasedIsLost(t *testing.T) {
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
