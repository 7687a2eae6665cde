package multilock_test

import (
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
)

// redOutcome computes the result of a round with those answers, and its duration.
func redOutcome(answers []redAnswer) (acquired bool, at time.Duration) {
	quorum := len(answers)/2 + 1
	for at := range redPatience / time.Millisecond {
		at *= time.Millisecond
		yes, open := 0, 0
		for _, a := range answers {
			switch {
			case a.after > at:
				open++
			case a.err == nil:
				yes++
			}
		}
		if yes >= quorum {
			return true, at
		}
		if yes+open < quorum {
			return false, at
		}
	}
	return false, redPatience
}

// TestRedDecides runs a round for every combination of answers of three members, and for many
// of five.
func TestRedDecides(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		rnd := rand.New(rand.NewPCG(1, 2))
		var all [][]redAnswer
		for _, a := range redAnswers {
			for _, b := range redAnswers {
				for _, c := range redAnswers {
					all = append(all, []redAnswer{a, b, c})
				}
			}
		}
		for range harness.Size(300, 1500) {
			five := make([]redAnswer, 5)
			for i := range five {
				five[i] = redAnswers[rnd.IntN(len(redAnswers))]
			}
			all = append(all, five)
		}
		for _, answers := range all {
			fakes := w.fakes(answers...)
			for i := range fakes {
				fakes[i].unlock.after = redQuick
			}
			red := w.red(fakes)
			acquired, at := redOutcome(answers)
			began := time.Now()
			var h lock.Hold
			var err error
			if rnd.IntN(2) == 0 {
				h, err = red.TryLock(t.Context(), lock.Lease(redLease))
			} else {
				h, err = red.Lock(t.Context(), lock.Lease(redLease), lock.Wait(0))
			}
			took := time.Since(began)
			if !acquired {
				require.Equal(t, 1, redKinds(err), "%v", err)
				if took != at {
					at += redQuick // to release the acquired members
				}
				require.Equal(t, at, took, "%v", answers)
				w.drain(fakes, answers)
				continue
			}
			require.NoError(t, err, "%v", answers)
			require.Equal(t, at, took, "%v", answers)
			require.Equal(t, redValid-took, h.Remaining())
			time.Sleep(redLate + 10*redQuick)
			for i, a := range answers {
				want := 0
				if a.err == nil && a.after <= redPatience {
					want = 1 // including grants after the majority
				}
				require.Equal(t, want, fakes[i].held(), "member %d: %v", i, answers)
				require.Equal(t, []time.Duration{redLease}, fakes[i].leases)
			}
			began = time.Now()
			require.NoError(t, h.Unlock(t.Context()), "%v", answers)
			require.Equal(t, redQuick, time.Since(began), "%v", answers)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
			require.Zero(t, h.Remaining())
			w.drain(fakes, answers)
		}
	})
}

// TestRedValidity has the majority arrive when the lease has just run out, and just before.
func TestRedValidity(t *testing.T) {
	for _, lease := range []time.Duration{3 * time.Millisecond, 100 * time.Millisecond, time.Second, time.Minute} {
		redRun(t, func(t *testing.T, w *redWorld) {
			valid := lease - lease/100 - 2*time.Millisecond
			for _, test := range []struct {
				after    time.Duration
				acquired bool
			}{{valid - time.Microsecond, true}, {valid, false}, {valid + time.Microsecond, false}} {
				slow := redAnswer{after: test.after}
				fakes := w.fakes(redYes, slow, slow)
				h, err := w.red(fakes, multilock.Timeout(time.Hour)).TryLock(t.Context(), lock.Lease(lease))
				if test.acquired {
					require.NoError(t, err)
					require.Equal(t, time.Microsecond, h.Remaining())
					require.NoError(t, h.Unlock(t.Context()))
				} else {
					harness.NotAcquired(t, err)
				}
				w.drain(fakes)
			}
			// Lock tries again.
			fakes := w.fakes(redYes, redYes, redYes)
			for _, f := range fakes[1:] {
				f.answers = []redAnswer{{after: valid}, {after: valid / 3}}
			}
			h, err := w.red(fakes, multilock.Timeout(time.Hour)).Lock(t.Context(), lock.Lease(lease))
			require.NoError(t, err)
			require.Equal(t, 2, fakes[0].attempts())
			require.NoError(t, h.Unlock(t.Context()))
			w.drain(fakes)
		})
	}
}

// TestRedServerTimeout measures the wait for a member that hangs.
func TestRedServerTimeout(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for _, test := range []struct{ timeout, lease, want time.Duration }{
			{0, 40 * time.Millisecond, 50 * time.Millisecond},
			{time.Minute, 40 * time.Millisecond, 90 * time.Millisecond},
			{0, 100 * time.Millisecond, 50 * time.Millisecond},
			{0, 2 * time.Second, 100 * time.Millisecond},
			{0, time.Minute, time.Second},
			{70 * time.Millisecond, time.Minute, 70 * time.Millisecond},
			{3 * time.Second, time.Minute, 3 * time.Second},
		} {
			fakes := w.fakes(redYes, redHangs, redHangs)
			var opts []multilock.Option
			if test.timeout > 0 {
				opts = append(opts, multilock.Timeout(test.timeout))
			}
			red := w.red(fakes, opts...)
			began := time.Now()
			_, err := red.TryLock(t.Context(), lock.Lease(test.lease))
			harness.NotAcquired(t, err)
			require.Equal(t, test.want, time.Since(began))
			w.drain(fakes)
		}
	})
}

// TestRedServersAway has no majority because of errors. Lock retries for a watchdog timeout,
// unless the errors are final.
func TestRedServersAway(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for _, row := range []struct {
			answer redAnswer
			want   error
		}{{redFails, lock.ErrUnavailable}, {redHangs, lock.ErrIndeterminate}, {redAnswer{after: redQuick, err: errors.New("no answer")}, lock.ErrIndeterminate}} {
			fakes := w.fakes(redYes, row.answer, row.answer)
			began := time.Now()
			_, err := w.red(fakes).Lock(t.Context(), lock.Wait(5*redLease))
			require.ErrorIs(t, err, row.want)
			require.Equal(t, 1, redKinds(err), "%v", err)
			require.ErrorContains(t, err, "server 2")
			require.ErrorContains(t, err, "server 3")
			require.GreaterOrEqual(t, time.Since(began), 5*redLease)
			require.Greater(t, fakes[0].attempts(), 2)
			w.drain(fakes)

			fakes = w.fakes(redYes, row.answer, row.answer)
			_, err = w.red(fakes).Lock(t.Context(), lock.FailFast())
			require.ErrorIs(t, err, row.want)
			require.Equal(t, 1, fakes[0].attempts())
			w.drain(fakes)

			_, err = w.red(fakes).TryLock(t.Context())
			require.ErrorIs(t, err, row.want)
			require.ErrorContains(t, err, "server 2")

			// A minority is unavailable and others are held: Lock continues.
			fakes = w.fakes(redYes, row.answer, redTaken)
			_, err = w.red(fakes).Lock(t.Context(), lock.Wait(5*redLease))
			harness.NotAcquired(t, err)
			require.Greater(t, fakes[0].attempts(), 10)
			w.drain(fakes)
		}
		for _, final := range []error{lock.ErrInvalid, lock.ErrClosed, lock.ErrReentered, lock.ErrUpgrade} {
			a := redAnswer{after: redQuick, err: final}
			fakes := w.fakes(redYes, a, a)
			_, err := w.red(fakes).Lock(t.Context())
			require.ErrorIs(t, err, final)
			require.Equal(t, 1, fakes[0].attempts())
			w.drain(fakes)

			fakes = w.fakes(redYes, a, redYes)
			h, err := w.red(fakes).Lock(t.Context())
			require.NoError(t, err)
			require.NoError(t, h.Unlock(t.Context()))

			// A final error and a temporary one: another attempt may succeed.
			fakes = w.fakes(redYes, a, redFails)
			_, err = w.red(fakes).Lock(t.Context(), lock.Wait(5*redLease))
			require.Equal(t, 1, redKinds(err), "%v", err)
			require.Greater(t, fakes[0].attempts(), 2)
			w.drain(fakes)
		}
	})
}

// One server that is held and two that are unavailable decide a round. Servers whose answers
// were not awaited do not count as unavailable.
func TestARedLockIsWaitedForWhileAMinorityIsAway(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		late := redAnswer{after: 10 * redQuick, err: errRedTaken}
		fakes := w.fakes(redFails, redFails, redTaken, late, late)
		began := time.Now()
		_, err := w.red(fakes).Lock(t.Context(), lock.Wait(5*redLease))
		harness.NotAcquired(t, err)
		require.GreaterOrEqual(t, time.Since(began), 5*redLease)
	})
}

// TestRedContendersDoNotLivelock has contenders in sessions of their own, over members with
// random delays, so that votes are split.
func TestRedContendersDoNotLivelock(t *testing.T) {
	for _, contenders := range []int{2, 3, 5} {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(7, uint64(contenders)))
			var sum, longest time.Duration
			rounds := 0
			w := &redWorld{t: t, log: &harness.Log{}}
			seeds := harness.Size(40, 200)
			for range seeds {
				fakes := w.fakes(redFails, redFails, redFails, redFails, redFails)
				for _, f := range fakes[1:] { // of four, two and two
					f.alone = true
					f.answers = nil
					for range 1000 {
						f.answers = append(f.answers, redAnswer{after: time.Duration(rnd.IntN(int(2 * time.Millisecond)))})
					}
				}
				var sessions []*session.Session
				var done sync.WaitGroup
				began := time.Now()
				for range contenders {
					s := redSession(w.log, rueidis.ClientModeStandalone)
					sessions = append(sessions, s)
					red := (&redWorld{t: t, s: s, log: w.log}).red(fakes)
					done.Go(func() {
						h, err := red.Lock(t.Context())
						assert.NoError(t, err)
						assert.NoError(t, h.Unlock(t.Context()))
					})
				}
				done.Wait()
				took := time.Since(began)
				sum, longest, rounds = sum+took, max(longest, took), rounds+fakes[1].attempts()
				for _, s := range sessions {
					s.Close()
				}
				w.drain(fakes)
			}
			t.Logf("%d contenders: served in %v on average, %v at most, with %.1f rounds each", contenders, sum/time.Duration(seeds), longest, float64(rounds)/float64(seeds*contenders))
			// Each loser pauses for 4 ms in the mean, then 8, 16 and so on. Two collide again
			// with a chance of about 2 ms in that, which shrinks each time.
			require.Less(t, sum/time.Duration(seeds), time.Duration(contenders)*30*time.Millisecond)
			require.Less(t, longest, time.Second/2)
		})
	}
}
