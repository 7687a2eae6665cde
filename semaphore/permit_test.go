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

// expire makes the lease of a permit end on the server.
func expire(t testing.TB, s *testserver.Server, p *semaphore.Permit) {
	t.Helper()
	harness.Do(t, s.Addr, "ZADD", timeoutsKey(p.Name()), "XX", "1", raw(t, p.ID()))
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

// Whoever asks for the context first when the permit has ended finds it ended.
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
		const timeout, permits = 2 * time.Second, 150
		e := permitSemaphore(t, s, permits, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s).PermitSemaphore("orders")
		all := take(t, e, permits)
		for begin := time.Now(); time.Since(begin) < timeout*5/4; time.Sleep(50 * time.Millisecond) {
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

// leased is a way to take a permit.
type leased struct {
	name string
	opts []lock.Option
}

func (l leased) String() string { return l.name }

var leases = []leased{{"renewed", nil}, {"fixed", []lock.Option{lock.Lease(time.Hour)}}, {"forever", []lock.Option{semaphore.Forever}}}

func TestWaysToLoseAPermit(t *testing.T) {
	const timeout = time.Second
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
			e := limited(t, expirable{c.PermitSemaphore("orders")}, 2).Expirable
			p := take(t, e, 1, l.opts...)[0]
			require.NoError(t, p.Context().Err())
			w.do(t, s, c, p)
			if l.opts == nil || w.gone == lock.ReasonClosed {
				lost := lostFor(t, p, timeout/3+slack, w.gone)
				require.Equal(t, w.gone == lock.ReasonClosed, errors.Is(lost, lock.ErrClosed))
				require.ErrorIs(t, p.Extend(t.Context(), time.Minute), lock.ErrLost)
				require.Equal(t, error(lost), p.Release(t.Context()))
			} else {
				// Nobody asks the server before the end.
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
		renewed, fixed, forever := take(t, e, 1)[0], take(t, e, 1, lock.Lease(lease))[0], take(t, e, 1, semaphore.Forever)[0]
		w := startBehind(t, c, expirable{e}, 1)
		c.Close()
		require.ErrorIs(t, w.End(), lock.ErrClosed)
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
		const timeout = 2 * time.Second
		e := permitSemaphore(t, s, 3, redlatch.WithWatchdogTimeout(timeout))
		p := take(t, e, 1)[0]
		released, err := e.TryRelease(t.Context(), p.ID(), unknown)
		require.NoError(t, err)
		require.False(t, released)
		time.Sleep(timeout * 5 / 4) // it is renewed meanwhile
		require.NoError(t, p.Context().Err())
		require.Equal(t, counts{3, 2, 1}, countsOf(t, e))
		harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.ID()))
		lostFor(t, p, timeout+slack, lock.ReasonGone)
	})
}

func TestUpdateLeaseTimeOfAPermitOfThisClient(t *testing.T) {
	harness.EachOf(t, leases, leased.String, func(t *testing.T, s *testserver.Server, l leased) {
		const timeout, lease = 500 * time.Millisecond, 600 * time.Millisecond
		e := permitSemaphore(t, s, 1, redlatch.WithWatchdogTimeout(timeout))
		update := func(p *semaphore.Permit, lease time.Duration) {
			t.Helper()
			taken, err := e.UpdateLeaseTime(t.Context(), p.ID(), lease)
			require.NoError(t, err)
			require.True(t, taken)
		}
		p := take(t, e, 1, l.opts...)[0]
		begin := time.Now()
		update(p, lease)
		require.LessOrEqual(t, p.Remaining(), lease)
		lost := lostFor(t, p, lease+slack, lock.ReasonExpired)
		require.GreaterOrEqual(t, lost.When.Sub(begin), lease-5*time.Millisecond)
		harness.Eventually(t, slack, "it is back", func() bool { return available(t, e) == 1 })

		p = take(t, e, 1, l.opts...)[0]
		update(p, lock.NoExpiry)
		require.Equal(t, lock.NoExpiry, p.Remaining())
		time.Sleep(timeout) // a lease that was not updated would be renewed, or end
		require.NoError(t, p.Context().Err())
		require.Equal(t, lock.NoExpiry, leaseTime(t, e, p.ID()))
		update(p, time.Hour)
		require.InDelta(t, time.Hour, p.Remaining(), float64(slack))
		require.NoError(t, p.Release(t.Context()))

		p = take(t, e, 1, l.opts...)[0]
		harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.ID()))
		taken, err := e.UpdateLeaseTime(t.Context(), p.ID(), time.Hour)
		require.NoError(t, err)
		require.False(t, taken)
		lostFor(t, p, soon, lock.ReasonGone)
	})
}

func TestUpdateLeaseTimeOfAPermitOfAnotherClient(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout = 2 * time.Second
		e := permitSemaphore(t, s, 2, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s).PermitSemaphore("orders")
		renewed, fixed := take(t, e, 1)[0], take(t, e, 1, lock.Lease(time.Hour))[0]
		for _, p := range []*semaphore.Permit{renewed, fixed} {
			taken, err := other.UpdateLeaseTime(t.Context(), p.ID(), 2*time.Hour)
			require.NoError(t, err)
			require.True(t, taken)
		}
		time.Sleep(timeout * 5 / 4) // one is renewed meanwhile
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
			time.Sleep(10 * time.Millisecond)
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
		const timeout = 2 * time.Second
		e := permitSemaphore(t, s, 1, redlatch.WithWatchdogTimeout(timeout))
		p := take(t, e, 1)[0]
		boom := errors.New("boom")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(boom)
		_, err := e.UpdateLeaseTime(ctx, p.ID(), time.Millisecond)
		require.ErrorIs(t, err, boom)
		time.Sleep(timeout * 5 / 4) // it is renewed meanwhile
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
		c, g := harness.GatedClient(t, s)
		e := limited(t, expirable{c.PermitSemaphore("orders")}, 1).Expirable
		p := take(t, e, 1, lock.Lease(time.Minute))[0]
		extend := harness.Load(t, s.Addr, "permits.lua", "permit_extend.lua")
		id := p.ID()
		changes := []func(ctx context.Context) error{
			func(ctx context.Context) error { return p.Extend(ctx, time.Hour) },
			func(ctx context.Context) error {
				_, err := e.UpdateLeaseTime(ctx, id, 30*time.Minute)
				return err
			},
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
