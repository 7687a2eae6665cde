package multilock_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
)

// TestRedRenews checks a renewal for every combination of two answers for a hold on three
// members: it acquires missing members and does not wait for members that hang.
func TestRedRenews(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redFails)
		fakes[2].answers = []redAnswer{redFails, redYes}
		h, err := w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		require.Zero(t, fakes[2].held())
		redSleep(redLease/3 + 20*time.Millisecond)
		require.Equal(t, 1, fakes[2].held(), "the first renewal acquires missing members")
		require.Len(t, fakes[0].holds[0].extended, 1)
		require.Equal(t, redLease, fakes[0].holds[0].extended[0], "the members have the full lease")
		require.Less(t, h.Remaining(), redValid)
		require.Greater(t, h.Remaining(), redValid-30*time.Millisecond)

		// A member that hangs delays nothing.
		fakes[1].set(func() { fakes[1].extend = redHangs })
		for range 30 {
			time.Sleep(redLease / 10)
			require.Greater(t, h.Remaining(), redLease/2)
		}
		require.NoError(t, h.Context().Err())
		// It has lost its hold meanwhile, which is detected, released and acquired again.
		fakes[1].set(func() { fakes[1].extend = redAnswer{} })
		redSleep(2*redLease/3 + 20*time.Millisecond) // the answer may arrive too late for one renewal
		require.Equal(t, 1, fakes[1].held())
		require.Greater(t, len(fakes[1].holds), 1)

		// So is a deleted member.
		fakes[0].set(func() { fakes[0].holds[0].gone = true })
		redSleep(2*redLease/3 + 20*time.Millisecond)
		require.Len(t, fakes[0].holds, 2)
		require.Equal(t, 1, fakes[0].held())
		redSleep(5 * redLease)
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(t.Context()))
		w.drain(fakes)
	})
}

// TestRedMemberStaysMissing has one member that another owner holds for good, and one that
// answers a renewal's request after the end of the hold.
func TestRedMemberStaysMissing(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redTaken)
		h, err := w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		redSleep(10 * redLease)
		require.NoError(t, h.Context().Err())
		require.InDelta(t, 30, fakes[2].attempts(), 4, "once for each renewal")
		require.Empty(t, fakes[2].holds)

		fakes[2].set(func() { fakes[2].answers = []redAnswer{redLateYes} })
		n := fakes[2].attempts()
		for fakes[2].attempts() == n {
			time.Sleep(time.Millisecond)
		}
		require.NoError(t, h.Unlock(t.Context()))
		w.drain(fakes)
		require.Len(t, fakes[2].holds, 1)
	})
}

// A hold is lost without a majority. Its members are released at once.
func TestRedIsLost(t *testing.T) {
	type fault struct {
		name   string
		inject func(fakes []*redFake)
		reason lock.Reason
		within time.Duration
		not    time.Duration // not before
	}
	gone := func(n int) func(fakes []*redFake) {
		return func(fakes []*redFake) {
			for _, f := range fakes[:n] {
				f.set(func() { f.holds[0].gone = true })
			}
		}
	}
	answers := func(a redAnswer) func(fakes []*redFake) {
		return func(fakes []*redFake) {
			for _, f := range fakes[:3] {
				f.set(func() { f.extend = a })
			}
		}
	}
	for _, f := range []fault{
		{"gone on three", gone(3), lock.ReasonGone, redLease/3 + 20*time.Millisecond, redLease / 4},
		{"gone on all", gone(5), lock.ReasonGone, redLease/3 + 20*time.Millisecond, redLease / 4},
		{"three hang", answers(redHangs), lock.ReasonExpired, redValid, redValid - 10*time.Millisecond},
		{"three fail", answers(redFails), lock.ReasonExpired, redValid, redValid - 10*time.Millisecond},
		{"two hang and one is gone", func(fakes []*redFake) {
			answers(redHangs)(fakes)
			fakes[0].set(func() {
				fakes[0].extend, fakes[0].holds[0].gone = redAnswer{}, true
				fakes[0].answers = []redAnswer{redTaken} // otherwise it is acquired again, and nothing is lost
			})
		}, lock.ReasonExpired, redValid, redValid - 10*time.Millisecond},
	} {
		t.Run(f.name, func(t *testing.T) {
			redRun(t, func(t *testing.T, w *redWorld) {
				fakes := w.fakes(redYes, redYes, redYes, redYes, redYes)
				red := w.red(fakes)
				began := time.Now()
				h, err := red.Lock(t.Context())
				require.NoError(t, err)
				synctest.Wait()
				f.inject(fakes)
				<-h.Context().Done()
				took := time.Since(began)
				require.LessOrEqual(t, took, f.within+10*time.Millisecond) // two ticks
				require.GreaterOrEqual(t, took, f.not)
				var lostErr *lock.LostError
				require.ErrorAs(t, context.Cause(h.Context()), &lostErr)
				require.Equal(t, f.reason, lostErr.Reason)
				if f.name == "three fail" {
					require.ErrorContains(t, lostErr, "boom")
				}
				require.Zero(t, h.Remaining())
				require.ErrorIs(t, h.Extend(t.Context(), time.Hour), lock.ErrLost)
				synctest.Wait()
				// Local waiters need not wait for Unlock.
				for _, f := range fakes {
					require.Zero(t, f.held())
					f.set(func() { f.extend, f.answers = redAnswer{}, []redAnswer{redYes} })
				}
				h2, err := red.Lock(t.Context(), lock.Wait(20*time.Millisecond))
				require.NoError(t, err)
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
				require.NoError(t, h2.Unlock(t.Context()))
				w.drain(fakes)
			})
		})
	}
}

// TestRedBatch renews holds on different members together. The result of one does not affect
// the others.
func TestRedBatch(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		apart := func() []*redFake { // with clients of their own
			return (&redWorld{t: t, log: w.log}).fakes(redYes, redYes, redYes)
		}
		healthy, hung, gone := apart(), apart(), apart()
		var holds []lock.Hold
		for _, fakes := range [][]*redFake{healthy, hung, gone} {
			h, err := w.red(fakes).Lock(t.Context())
			require.NoError(t, err)
			holds = append(holds, h)
		}
		synctest.Wait()
		began := time.Now()
		for i := range 2 {
			hung[i].set(func() { hung[i].extend = redHangs })
			gone[i].set(func() { gone[i].holds[0].gone = true })
		}
		// The renewal ends after a sixth of the lease, for want of an answer; the answers for
		// the other holds count.
		time.Sleep(redLease/3 + redLease/6 + 20*time.Millisecond)
		require.Greater(t, holds[0].Remaining(), redValid-redLease/6-30*time.Millisecond)
		<-holds[2].Context().Done()
		require.Less(t, time.Since(began), redLease*3/4, "a lost hold is detected although another gives no answer")
		require.ErrorIs(t, holds[2].Unlock(t.Context()), lock.ErrLost)
		<-holds[1].Context().Done()
		require.InDelta(t, redValid, time.Since(began), float64(20*time.Millisecond))
		require.ErrorIs(t, holds[1].Unlock(t.Context()), lock.ErrLost)
		time.Sleep(3 * redLease)
		require.Greater(t, holds[0].Remaining(), redLease/2)
		require.NoError(t, holds[0].Unlock(t.Context()))
		for _, fakes := range [][]*redFake{healthy, hung, gone} {
			w.drain(fakes)
		}
	})
}

// TestRedExtend extends a hold.
func TestRedExtend(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redYes)
		h, err := w.red(fakes).Lock(t.Context(), lock.Lease(redLease))
		require.NoError(t, err)
		synctest.Wait()
		const long = 10 * time.Second
		valid := long - long/100 - 2*time.Millisecond
		require.NoError(t, h.Extend(t.Context(), long))
		require.Equal(t, valid, h.Remaining())
		synctest.Wait()
		require.Equal(t, []time.Duration{long}, fakes[0].holds[0].extended)

		// Extend never shortens the lease, and does not need all members.
		fakes[0].set(func() { fakes[0].extend = redHangs })
		for _, lease := range []time.Duration{time.Millisecond, redLease} {
			began := time.Now()
			require.NoError(t, h.Extend(t.Context(), lease))
			require.Equal(t, began, time.Now())
			require.Equal(t, valid, h.Remaining())
		}
		// A short lease still leaves time for an answer.
		fakes[1].set(func() { fakes[1].extend.after = 10 * time.Millisecond })
		require.NoError(t, h.Extend(t.Context(), 12*time.Millisecond))
		// Extend needs a majority. Without one the lease stays as it was.
		fakes[1].set(func() { fakes[1].extend = redFails })
		err = h.Extend(t.Context(), 2*long)
		require.ErrorIs(t, err, errRedBoom)
		require.NotErrorIs(t, err, lock.ErrLost)
		require.Less(t, h.Remaining(), valid)
		require.Greater(t, h.Remaining(), valid-3*time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		fakes[1].set(func() { fakes[1].extend = redHangs })
		began := time.Now()
		require.ErrorIs(t, h.Extend(ctx, 2*long), context.DeadlineExceeded)
		require.Equal(t, 10*time.Millisecond, time.Since(began))

		// Lost members cannot be extended.
		for _, f := range fakes[:2] {
			f.set(func() { f.extend = redAnswer{}; f.holds[0].gone = true })
		}
		require.ErrorIs(t, h.Extend(t.Context(), long), lock.ErrLost)
		require.Error(t, h.Context().Err())
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		require.ErrorIs(t, h.Extend(t.Context(), long), lock.ErrNotHeld)
		w.drain(fakes)
	})
}

// TestRedExtendedLeaseAppliesToNewMembers has a member acquired again after Extend: a majority
// must last as long as the hold claims.
func TestRedExtendedLeaseAppliesToNewMembers(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redTaken)
		h, err := w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		const long = time.Minute
		require.NoError(t, h.Extend(t.Context(), long))
		fakes[2].set(func() { fakes[2].answers = []redAnswer{redYes} })
		redSleep(redLease)
		require.Equal(t, 1, fakes[2].held())
		require.Greater(t, fakes[2].holds[0].until, time.Now().Add(h.Remaining()-time.Second))
		require.NoError(t, h.Unlock(t.Context()))
		w.drain(fakes)
	})
}

// TestRedSlowReacquisition has a member take longer to answer than until the next renewal. It
// is not asked again meanwhile.
func TestRedSlowReacquisition(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redAnswer{after: redLease * 9 / 10})
		h, err := w.red(fakes, multilock.Timeout(time.Hour)).Lock(t.Context())
		require.NoError(t, err)
		redSleep(redLease * 4 / 5)
		require.Equal(t, 1, fakes[2].attempts())
		redSleep(redLease)
		require.Equal(t, 1, fakes[2].held())
		require.NoError(t, h.Unlock(t.Context()))
		w.drain(fakes)
	})
}
