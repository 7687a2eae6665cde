package semaphore_test

import (
	"context"
	"errors"
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
			{[]lock.Option{semaphore.Forever()}, lock.NoExpiry},
		} {
			p := take(t, e, 1, c.opts...)[0]
			if c.want == lock.NoExpiry {
				require.Equal(t, lock.NoExpiry, p.Remaining())
				require.Equal(t, lock.NoExpiry, leaseTime(t, e, p.ID()))
			} else {
				require.InDelta(t, watchdog.Certain(c.want), p.Remaining(), float64(slack))
				require.LessOrEqual(t, p.Remaining(), c.want)
				// The local lease must not exceed that of the server.
				remaining := p.Remaining()
				require.LessOrEqual(t, remaining, leaseTime(t, e, p.ID())+slack)
			}
			require.NoError(t, p.Release(t.Context()))
			require.Zero(t, p.Remaining())
		}
	})
}

// A permit lasts on the server for at least as long as its holder counts on it, although its time
// to expire is in whole milliseconds.
func TestServerKeepsPermitForItsLease(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		client := harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Second))
		conn := harness.Conn(t, s.Addr)
		e := client.PermitSemaphore("orders")
		_, err := e.TrySetPermits(t.Context(), 1)
		require.NoError(t, err)
		check := func(what string, p *semaphore.Permit) (at float64) {
			t.Helper()
			now, err := conn.Do(t.Context(), conn.B().Time().Build()).AsIntSlice()
			require.NoError(t, err)
			left := p.Remaining() // now or later
			require.Positive(t, left, "the holder counts on it")
			at, err = conn.Do(t.Context(), conn.B().Zscore().Key(timeoutsKey("orders")).Member(raw(t, p.ID())).Build()).AsFloat64()
			require.NoError(t, err)
			const drift = 100 // of the server's clock, in microseconds
			require.GreaterOrEqual(t, int64(at)*1000+drift, now[0]*1_000_000+now[1]+left.Microseconds(), what)
			return at
		}
		for range 20 {
			p := take(t, e, 1, lock.Lease(time.Minute))[0]
			check("acquired", p)
			require.NoError(t, p.Extend(t.Context(), time.Hour))
			check("extended", p)
			require.NoError(t, p.Release(t.Context()))
		}
		p := take(t, e, 1)[0]
		for range 4 {
			before := check("renewed", p)
			harness.Eventually(t, 10*time.Second, "a renewal", func() bool { return check("renewed", p) > before })
		}
		require.NoError(t, p.Release(t.Context()))
	})
}

func TestExtend(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 1)
		p := take(t, e, 1, lock.Lease(time.Second))[0]
		require.LessOrEqual(t, p.Remaining(), time.Second)
		for _, lease := range []time.Duration{time.Minute, time.Second} { // Extend never shortens a lease
			require.NoError(t, p.Extend(t.Context(), lease))
			require.Greater(t, p.Remaining(), 50*time.Second)
			require.LessOrEqual(t, p.Remaining(), time.Minute)
			require.Greater(t, leaseTime(t, e, p.ID()), 50*time.Second)
		}
		require.NoError(t, p.Release(t.Context()))
		require.ErrorIs(t, p.Extend(t.Context(), time.Minute), lock.ErrNotHeld)

		forever := take(t, e, 1, semaphore.Forever())[0]
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

func TestFixedLeaseIsNotRenewed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease = 700 * time.Millisecond
		e := permitSemaphore(t, s, 1, redlatch.WithWatchdogTimeout(200*time.Millisecond))
		begin := time.Now()
		p := take(t, e, 1, lock.Lease(lease))[0]
		lost := lostFor(t, p, lease+slack, lock.ReasonExpired)
		require.NoError(t, lost.Err)
		require.GreaterOrEqual(t, lost.When.Sub(begin), lease-5*time.Millisecond)
		require.Equal(t, error(lost), p.Release(t.Context()))
		harness.Eventually(t, slack, "the permit is free", func() bool { return countsOf(t, e) == counts{1, 1, 0} })
	})
}

// leased is a kind of lease.
type leased struct {
	name string
	opts []lock.Option
}

func (l leased) String() string { return l.name }

var leases = []leased{{"renewed", nil}, {"fixed", []lock.Option{lock.Lease(time.Hour)}}, {"forever", []lock.Option{semaphore.Forever()}}}

func TestUpdateLeaseTimeOfOwnPermit(t *testing.T) {
	harness.EachOf(t, leases, leased.String, func(t *testing.T, s *testserver.Server, l leased) {
		const timeout, lease = 500 * time.Millisecond, 600 * time.Millisecond
		e := permitSemaphore(t, s, 1, redlatch.WithWatchdogTimeout(timeout))
		update := func(p *semaphore.Permit, lease time.Duration) {
			t.Helper()
			acquired, err := e.UpdateLeaseTime(t.Context(), p.ID(), lease)
			require.NoError(t, err)
			require.True(t, acquired)
		}
		p := take(t, e, 1, l.opts...)[0]
		begin := time.Now()
		update(p, lease)
		require.LessOrEqual(t, p.Remaining(), lease)
		lost := lostFor(t, p, lease+slack, lock.ReasonExpired)
		require.GreaterOrEqual(t, lost.When.Sub(begin), lease-5*time.Millisecond)
		harness.Eventually(t, slack, "the permit is free", func() bool { return available(t, e) == 1 })

		p = take(t, e, 1, l.opts...)[0]
		update(p, lock.NoExpiry)
		require.Equal(t, lock.NoExpiry, p.Remaining())
		time.Sleep(timeout) // long enough to renew or expire the old lease
		require.NoError(t, p.Context().Err())
		require.Equal(t, lock.NoExpiry, leaseTime(t, e, p.ID()))
		update(p, time.Hour)
		require.InDelta(t, time.Hour, p.Remaining(), float64(slack+time.Hour/500))
		require.NoError(t, p.Release(t.Context()))

		p = take(t, e, 1, l.opts...)[0]
		harness.Do(t, s.Addr, "ZREM", timeoutsKey("orders"), raw(t, p.ID()))
		acquired, err := e.UpdateLeaseTime(t.Context(), p.ID(), time.Hour)
		require.NoError(t, err)
		require.False(t, acquired)
		lostFor(t, p, soon, lock.ReasonGone)
	})
}

func TestUpdateLeaseTimeOfOtherClientsPermit(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout = 2 * time.Second
		e := permitSemaphore(t, s, 2, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s).PermitSemaphore("orders")
		renewed, fixed := take(t, e, 1)[0], take(t, e, 1, lock.Lease(time.Hour))[0]
		for _, p := range []*semaphore.Permit{renewed, fixed} {
			acquired, err := other.UpdateLeaseTime(t.Context(), p.ID(), 2*time.Hour)
			require.NoError(t, err)
			require.True(t, acquired)
		}
		time.Sleep(timeout * 5 / 4) // long enough for a renewal
		for _, p := range []*semaphore.Permit{renewed, fixed} {
			require.NoError(t, p.Context().Err())
			require.Greater(t, leaseTime(t, e, p.ID()), time.Hour, "renewals do not shorten a lease")
		}
		require.LessOrEqual(t, fixed.Remaining(), time.Hour, "this client does not know of the update")
		for _, p := range []*semaphore.Permit{renewed, fixed} {
			acquired, err := other.UpdateLeaseTime(t.Context(), p.ID(), time.Millisecond)
			require.NoError(t, err)
			require.True(t, acquired)
		}
		lostFor(t, renewed, timeout/3+slack, lock.ReasonGone)
		harness.Eventually(t, soon, "both have expired", func() bool { return available(t, e) == 2 })
		var lost *lock.LostError
		require.ErrorAs(t, fixed.Release(t.Context()), &lost)
		require.Equal(t, lock.ReasonGone, lost.Reason)
		require.Equal(t, counts{2, 2, 0}, countsOf(t, e))
	})
}

func TestUnsentUpdateLeaseTimeKeepsLease(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const timeout = 2 * time.Second
		e := permitSemaphore(t, s, 1, redlatch.WithWatchdogTimeout(timeout))
		p := take(t, e, 1)[0]
		boom := errors.New("boom")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(boom)
		_, err := e.UpdateLeaseTime(ctx, p.ID(), time.Millisecond)
		require.ErrorIs(t, err, boom)
		time.Sleep(timeout * 5 / 4) // long enough for a renewal
		require.NoError(t, p.Context().Err(), "the permit is still renewed")
		require.NoError(t, p.Release(t.Context()))
	})
}

// Without a reply either lease may be the current one.
func TestUpdateLeaseTimeWithoutReply(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const lease = 300 * time.Millisecond
		c, g := harness.GatedClient(t, s)
		e := withPermits(t, permitSem{c.PermitSemaphore("orders")}, 2).PermitSemaphore
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

// Two changes of a lease run one after the other: this client must process the replies in the
// order in which the server ran the requests.
func TestLeaseChangesAreSerialized(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		e := withPermits(t, permitSem{c.PermitSemaphore("orders")}, 1).PermitSemaphore
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
			require.Equal(t, at, harness.Do(t, s.Addr, "ZSCORE", timeoutsKey("orders"), raw(t, id)), "a canceled call has sent nothing")
			left := leaseTime(t, e, id) // in whole milliseconds
			require.Less(t, p.Remaining(), left+2*time.Millisecond)
		}
	})
}
