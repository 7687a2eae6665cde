package multilock_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
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
		for range 1500 {
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
				harness.NotAcquired(t, err)
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
			time.Sleep(redLate)
			for i, a := range answers {
				want := 0
				if a.err == nil && a.after <= redLate {
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

// TestRedLateYesAfterUnlock has a member answer after the end of the hold.
func TestRedLateYesAfterUnlock(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redLateYes)
		h, err := w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
		w.drain(fakes)
		require.Len(t, fakes[2].holds, 1)
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
				h, err := w.red(fakes).WithTimeout(time.Hour).TryLock(t.Context(), lock.Lease(lease))
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
			h, err := w.red(fakes).WithTimeout(time.Hour).Lock(t.Context(), lock.Lease(lease))
			require.NoError(t, err)
			require.Equal(t, 2, fakes[0].attempts())
			require.NoError(t, h.Unlock(t.Context()))
			w.drain(fakes)
		})
	}
}

// TestRedLeaseTooShort requests a lease that drift uses up.
func TestRedLeaseTooShort(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redYes)
		for _, lease := range []time.Duration{time.Millisecond, 2 * time.Millisecond, 2020 * time.Microsecond} {
			_, err := w.red(fakes).Lock(t.Context(), lock.Lease(lease))
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		require.Zero(t, fakes[0].attempts())
	})
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
			red := w.red(fakes)
			if test.timeout > 0 {
				red = red.WithTimeout(test.timeout)
			}
			began := time.Now()
			_, err := red.TryLock(t.Context(), lock.Lease(test.lease))
			harness.NotAcquired(t, err)
			require.Equal(t, test.want, time.Since(began))
			w.drain(fakes)
		}
	})
}

// TestRedWaits has a majority only in the third or fourth round. The pauses in between are
// random, with a bound that doubles.
func TestRedWaits(t *testing.T) {
	for _, refusal := range []redAnswer{redTaken, redFails} { // the first rounds find members held
		redRun(t, func(t *testing.T, w *redWorld) {
			fakes := w.fakes(redYes, redYes, redYes)
			for _, f := range fakes[:2] {
				f.answers = []redAnswer{refusal, refusal, refusal, redYes}
				if refusal == redFails {
					f.answers = f.answers[1:] // short enough not to give up
				}
			}
			h, err := w.red(fakes).Lock(t.Context())
			require.NoError(t, err)
			require.NoError(t, h.Unlock(t.Context()))
			for n, longest := range []time.Duration{8, 16, 32}[:fakes[0].attempts()-1] {
				pause := fakes[0].asked[n+1].Sub(fakes[0].asked[n])
				longest = longest*time.Millisecond + 20*time.Millisecond // the round, and a tick
				if refusal == redFails && n > 0 {
					longest = time.Second + 20*time.Millisecond // as for any unavailable server
				}
				require.GreaterOrEqual(t, pause, redQuick)
				require.LessOrEqual(t, pause, longest, "%d", n)
			}
			w.drain(fakes)
		})
	}
}

// TestRedPausesGrow checks the mean of many pauses.
func TestRedPausesGrow(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		const rounds, times = 9, 40
		var sum [rounds]time.Duration
		for range times {
			fakes := w.fakes(redTaken, redTaken, redTaken)
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				_, err := w.red(fakes).Lock(ctx)
				harness.NotAcquired(t, err)
				assert.ErrorIs(t, err, context.Canceled)
			}()
			for fakes[0].attempts() <= rounds {
				time.Sleep(time.Millisecond)
			}
			cancel()
			synctest.Wait()
			for n := range rounds {
				sum[n] += fakes[0].asked[n+1].Sub(fakes[0].asked[n])
			}
		}
		for n := range rounds - 3 {
			require.Greater(t, sum[n+3], sum[n], "%v", sum)
		}
		require.Less(t, sum[rounds-1]/times, 400*time.Millisecond)
	})
}

// TestRedWaitIsBounded has members that hang for longer than the caller waits.
func TestRedWaitIsBounded(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redHangs, redHangs)
		began := time.Now()
		_, err := w.red(fakes).Lock(t.Context(), lock.Wait(20*time.Millisecond))
		harness.NotAcquired(t, err)
		require.LessOrEqual(t, time.Since(began), 20*time.Millisecond+2*session.Grace) // for answers, and for the release
		w.drain(fakes)

		soon := redAnswer{after: 20*time.Millisecond + session.Grace/2, err: lock.ErrNotAcquired}
		fakes = w.fakes(soon, soon, soon)
		_, err = w.red(fakes).Lock(t.Context(), lock.Wait(20*time.Millisecond))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		w.drain(fakes)

		fakes = w.fakes(redTaken, redTaken, redTaken)
		began = time.Now()
		_, err = w.red(fakes).Lock(t.Context(), lock.Wait(700*time.Millisecond))
		harness.NotAcquired(t, err)
		require.InDelta(t, 700*time.Millisecond, time.Since(began), float64(6*time.Millisecond))
	})
}

// TestRedServersAway has no majority because of errors. Lock retries for a watchdog timeout,
// unless the errors are final.
func TestRedServersAway(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for _, a := range []redAnswer{redFails, redHangs, {after: redQuick, err: errors.Join(lock.ErrNotAcquired, context.DeadlineExceeded)},
			{after: redQuick, err: errors.Join(lock.ErrNotAcquired, lock.ErrIndeterminate)}} {
			fakes := w.fakes(redYes, a, a)
			began := time.Now()
			_, err := w.red(fakes).Lock(t.Context())
			harness.NotAcquired(t, err)
			require.ErrorContains(t, err, "server 2")
			require.ErrorContains(t, err, "server 3")
			require.Greater(t, time.Since(began), redLease)
			require.Less(t, time.Since(began), 3*redLease)
			require.Greater(t, fakes[0].attempts(), 2)
			w.drain(fakes)

			_, err = w.red(fakes).TryLock(t.Context())
			harness.NotAcquired(t, err)
			require.ErrorContains(t, err, "server 2")

			// A minority is unavailable and others are held: Lock continues.
			fakes = w.fakes(redYes, a, redTaken)
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
			_, err = w.red(fakes).Lock(t.Context())
			harness.NotAcquired(t, err)
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
					s := redSession(w.log, redLease)
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
