package multilock_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// Unlock does not wait for a minority that does not answer a release, and for a majority only as long as
// necessary.
func TestRedSlowRelease(t *testing.T) {
	const grace = 2 * time.Millisecond // for members slower than the majority, so that the next caller finds them free
	quick, slow := redAnswer{after: redQuick}, redAnswer{after: 10 * time.Second}
	unknown := redAnswer{after: redQuick, err: errors.New("no answer")}
	for what, row := range map[string]struct {
		answers []redAnswer
		unlocks []redAnswer // of the first members; the others answer at once
		early   bool        // Unlock begins before the last members have answered the acquisition
		took    time.Duration
		err     error
	}{
		"all are quick":                     {answers: []redAnswer{redYes, redYes, redYes}, unlocks: []redAnswer{quick, quick, quick}, took: redQuick},
		"one is a little slower":            {answers: []redAnswer{redYes, redYes, redYes}, unlocks: []redAnswer{quick}, took: redQuick},
		"one of three is silent":            {answers: []redAnswer{redYes, redYes, redYes}, unlocks: []redAnswer{slow}, took: grace},
		"two of five are silent":            {answers: []redAnswer{redYes, redYes, redYes, redYes, redYes}, unlocks: []redAnswer{slow, slow, quick, quick, quick}, took: redQuick + grace},
		"others need no release":            {answers: []redAnswer{redYes, redYes, redYes, redTaken, redFails}, unlocks: []redAnswer{slow}, took: grace},
		"one may yet be granted":            {answers: []redAnswer{redYes, redYes, {after: 10 * redQuick}}, unlocks: []redAnswer{{after: 5 * redQuick}}, early: true, took: 5 * redQuick},
		"one is granted, and released":      {answers: []redAnswer{redYes, redYes, {after: 3 * redQuick}}, unlocks: []redAnswer{slow}, early: true, took: 2*redQuick + grace},
		"one is refused meanwhile":          {answers: []redAnswer{redYes, redYes, {after: 3 * redQuick, err: errRedTaken}}, unlocks: []redAnswer{unknown}, early: true, took: 2*redQuick + grace},
		"a majority is slow":                {answers: []redAnswer{redYes, redYes, redYes}, unlocks: []redAnswer{{after: time.Second / 2}, slow}, took: time.Second/2 + grace},
		"a majority gives no answer":        {answers: []redAnswer{redYes, redYes, redYes}, unlocks: []redAnswer{unknown, unknown}, err: lock.ErrIndeterminate},
		"a majority is silent for too long": {answers: []redAnswer{redYes, redYes, redYes}, unlocks: []redAnswer{slow, slow}, err: lock.ErrIndeterminate},
	} {
		t.Run(what, func(t *testing.T) {
			redRun(t, func(t *testing.T, w *redWorld) {
				fakes := w.fakes(row.answers...)
				for i, unlock := range row.unlocks {
					fakes[i].unlock = unlock
				}
				h, err := w.red(fakes).Lock(t.Context())
				require.NoError(t, err)
				if !row.early {
					synctest.Wait()
				}
				began := time.Now()
				err = h.Unlock(t.Context())
				require.ErrorIs(t, err, row.err)
				if row.err != nil {
					require.WithinRange(t, time.Now(), began, began.Add(engine.UnlockTimeout))
				} else {
					require.Equal(t, row.took, time.Since(began))
				}
				w.drain(fakes)
			})
		})
	}
}

// A failed round waits for releases no longer than for a member, and no longer than a moment after its caller
// has left.
func TestRedFailsDespiteASlowRelease(t *testing.T) {
	later := redAnswer{after: 2 * redQuick, err: errRedTaken}
	redRun(t, func(t *testing.T, w *redWorld) {
		for _, wait := range []time.Duration{time.Minute, 3 * redQuick} {
			fakes := w.fakes(redYes, later, later)
			fakes[0].unlock.after = 10 * time.Second
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			defer cancel()
			began := time.Now()
			_, err := w.red(fakes).TryLock(ctx)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.Equal(t, min(2*redQuick+redPatience, wait+session.Grace), time.Since(began))
			w.drain(fakes)
		}
	})
}

// TestRedUnlockBelowQuorum has Unlock find that members are gone.
func TestRedUnlockBelowQuorum(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for gone := range 4 {
			for _, held := range []int{3, 5} {
				answers := []redAnswer{redYes, redYes, redYes, redTaken, redTaken}
				if held == 5 {
					answers[3], answers[4] = redYes, redYes
				}
				fakes := w.fakes(answers...)
				h, err := w.red(fakes).Lock(t.Context())
				require.NoError(t, err)
				synctest.Wait()
				for _, f := range fakes[:gone] {
					f.holds[0].gone = true
				}
				err = h.Unlock(t.Context())
				if held-gone >= 3 {
					require.NoError(t, err)
				} else {
					var lostErr *lock.LostError
					require.ErrorAs(t, err, &lostErr)
					require.Equal(t, lock.ReasonGone, lostErr.Reason)
					require.Equal(t, "orders", lostErr.Name)
				}
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
				w.drain(fakes)
			}
		}
	})
}

// TestRedIsPassedOn has the members passed on, and answer in every way when they are asked for
// confirmation.
func TestRedIsPassedOn(t *testing.T) {
	for what, c := range map[string]struct {
		gone, failed int // members
		lost         bool
	}{
		"all are held":                       {},
		"one is gone":                        {gone: 1},
		"one does not answer":                {failed: 1},
		"two are gone":                       {gone: 2, lost: true},
		"two do not answer at first":         {failed: 2},
		"one is gone, one does not answer":   {gone: 1, failed: 1},
		"two are gone, one does not answer":  {gone: 2, failed: 1, lost: true},
		"one is gone, two do not answer yet": {gone: 1, failed: 2},
	} {
		t.Run(what, func(t *testing.T) {
			redRun(t, func(t *testing.T, w *redWorld) {
				fakes := w.fakes(redYes, redYes, redYes)
				for _, f := range fakes {
					f.alone = true
				}
				first, err := w.red(fakes).Lock(t.Context())
				require.NoError(t, err)
				next := harness.StartLock(t, t.Context(), w.red(fakes))
				synctest.Wait()
				for i, f := range fakes {
					f.set(func() {
						f.extend.after = redQuick
						switch {
						case i < c.gone:
							f.holds[0].gone = true
						case i < c.gone+c.failed:
							f.extend.err = errRedBoom
						}
					})
				}
				unlocked := make(chan error, 1)
				go func() { unlocked <- first.Unlock(t.Context()) }()
				second := next.Got()
				require.Empty(t, unlocked, "the answer comes late")
				require.NoError(t, second.Context().Err())
				redSleep(2 * redQuick)
				require.Equal(t, c.failed < 2, len(unlocked) == 1, "no wait for a minority")
				for _, f := range fakes {
					f.set(func() { f.extend.err = nil })
				}
				err = <-unlocked
				synctest.Wait()
				require.Equal(t, c.lost, errors.Is(err, lock.ErrLost), err)
				require.Equal(t, c.lost, err != nil, err)
				require.Equal(t, c.lost, second.Context().Err() != nil)
				require.Equal(t, 1, fakes[2].attempts())
				err = second.Unlock(t.Context())
				require.Equal(t, c.lost, errors.Is(err, lock.ErrLost), err)
				w.drain(fakes, what)
			})
		})
	}
}

// TestRedIsNotPassedOn has holds or waiters with their own terms, and holds that were
// confirmed too long ago: the members are released and acquired again.
func TestRedIsNotPassedOn(t *testing.T) {
	for what, c := range map[string]struct {
		first, second []lock.Option
		use           func(h lock.Hold)
	}{
		"it has a lease":            {first: []lock.Option{lock.Lease(redLease)}},
		"the next requests a lease": {second: []lock.Option{lock.Lease(redLease)}},
		"it was extended":           {use: func(h lock.Hold) { _ = h.Extend(context.Background(), time.Hour) }},
		"it was held for long":      {use: func(lock.Hold) { time.Sleep(20 * time.Millisecond) }},
	} {
		t.Run(what, func(t *testing.T) {
			redRun(t, func(t *testing.T, w *redWorld) {
				fakes := w.fakes(redYes, redYes, redYes)
				for _, f := range fakes {
					f.alone = true
				}
				first, err := w.red(fakes).Lock(t.Context(), c.first...)
				require.NoError(t, err)
				if c.use != nil {
					c.use(first)
				}
				next := harness.StartLock(t, t.Context(), w.red(fakes), c.second...)
				synctest.Wait()
				require.NoError(t, first.Unlock(t.Context()))
				require.NoError(t, next.Got().Unlock(t.Context()))
				require.GreaterOrEqual(t, fakes[0].attempts(), 2)
				w.drain(fakes, what)
			})
		})
	}
}

// TestRedMaxHoldDuringConfirmation has a hold reach its MaxHold while earlier holds of the
// cohort wait for confirmation: these have lost nothing, and MaxHold counts from the hand-off.
func TestRedMaxHoldDuringConfirmation(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		const slow, maxHold = 15 * time.Millisecond, 10 * time.Millisecond
		fakes := w.fakes(redYes, redYes, redYes)
		for _, f := range fakes {
			f.alone = true
		}
		r := w.red(fakes)
		first, err := r.Lock(t.Context())
		require.NoError(t, err)
		second := harness.StartLock(t, t.Context(), r)
		synctest.Wait()
		third := harness.StartLock(t, t.Context(), r, lock.MaxHold(maxHold))
		synctest.Wait()
		redSleep(slow) // it is trusted for longer
		for _, f := range fakes {
			f.set(func() { f.extend.after = slow })
		}
		unlocked := make(chan error, 2)
		unlock := func(h lock.Hold) { go func() { unlocked <- h.Unlock(context.Background()) }() }
		unlock(first)
		unlock(second.Got())
		last := third.Got()
		began := time.Now()
		<-last.Context().Done()
		require.GreaterOrEqual(t, time.Since(began), maxHold)
		require.ErrorIs(t, last.Unlock(t.Context()), lock.ErrLost)
		require.NoError(t, <-unlocked)
		require.NoError(t, <-unlocked)
		w.drain(fakes)
	})
}

// TestRedSettlesForWaiters has a member that answers after the majority. Unlock waits for it a moment if
// callers of this process wait for the lock, so that the member is released with the others.
func TestRedSettlesForWaiters(t *testing.T) {
	const late, grace = redQuick + time.Millisecond, 2 * time.Millisecond
	for name, row := range map[string]struct {
		third  redAnswer
		waits  bool
		lasted time.Duration
		asked  int // how often the third member has answered yes when Unlock returns
	}{
		"nobody waits":     {redAnswer{after: late}, false, 0, 0},
		"a caller waits":   {redAnswer{after: late}, true, time.Millisecond, 1},
		"it never answers": {redHangs, true, grace, 0},
	} {
		t.Run(name, func(t *testing.T) {
			redRun(t, func(t *testing.T, w *redWorld) {
				fakes := w.fakes(redYes, redYes, row.third)
				r := w.red(fakes)
				h, err := r.Lock(t.Context(), lock.Lease(redLease)) // which is not passed on
				require.NoError(t, err)
				var waiter *harness.Call[lock.Hold]
				if row.waits {
					waiter = harness.StartLock(t, t.Context(), r)
					synctest.Wait()
				}
				began := time.Now()
				require.NoError(t, h.Unlock(t.Context()))
				require.Equal(t, row.lasted, time.Since(began))
				fakes[2].mu.Lock()
				require.Len(t, fakes[2].holds, row.asked)
				fakes[2].mu.Unlock()
				if row.waits {
					waiter.Leave()
				}
				w.drain(fakes)
			})
		})
	}
}
