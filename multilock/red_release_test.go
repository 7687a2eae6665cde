package multilock_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// TestRedSlowRelease has members that do not answer a release. Unlock does not wait for a
// minority, and for a majority only as long as necessary.
func TestRedSlowRelease(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		slow := redAnswer{after: 10 * time.Second}
		for away := range 3 {
			fakes := w.fakes(redYes, redYes, redYes, redYes, redYes)
			for _, f := range fakes[:away] {
				f.unlock = slow
			}
			for _, f := range fakes[away:] {
				f.unlock.after = redQuick
			}
			h, err := w.red(fakes).Lock(t.Context())
			require.NoError(t, err)
			synctest.Wait()
			began := time.Now()
			require.NoError(t, h.Unlock(t.Context()))
			require.LessOrEqual(t, time.Since(began), redQuick+2*time.Millisecond)
			w.drain(fakes)
		}

		// Unlock waits for slightly slower members, so that the next caller finds them free.
		fakes := w.fakes(redYes, redYes, redYes)
		fakes[0].unlock.after = redQuick
		h, err := w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		require.NoError(t, h.Unlock(t.Context()))
		require.Zero(t, fakes[0].held())

		// Members that are not held need no release: three of five are held, and one is slow.
		fakes = w.fakes(redYes, redYes, redYes, redTaken, redFails)
		fakes[0].unlock = slow
		h, err = w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		began := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.LessOrEqual(t, time.Since(began), 2*time.Millisecond)
		w.drain(fakes)

		// A member that may yet be granted is not free: Unlock waits for a majority of the others.
		fakes = w.fakes(redYes, redYes, redAnswer{after: 10 * redQuick})
		fakes[0].unlock.after = 5 * redQuick
		h, err = w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		began = time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, 5*redQuick, time.Since(began))
		w.drain(fakes)

		// A member that is granted meanwhile counts when it is released.
		fakes = w.fakes(redYes, redYes, redAnswer{after: 3 * redQuick})
		fakes[0].unlock = slow
		h, err = w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		began = time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, 2*redQuick+2*time.Millisecond, time.Since(began))
		w.drain(fakes)

		// So does one that is refused.
		fakes = w.fakes(redYes, redYes, redAnswer{after: 3 * redQuick, err: errRedTaken})
		fakes[0].unlock = redAnswer{after: redQuick, err: errors.Join(lock.ErrIndeterminate, errRedBoom)}
		h, err = w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		began = time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, 2*redQuick, time.Since(began))
		w.drain(fakes)

		// Unlock waits for a slow majority.
		fakes = w.fakes(redYes, redYes, redYes)
		fakes[0].unlock, fakes[1].unlock = redAnswer{after: time.Second / 2}, slow
		h, err = w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		began = time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, time.Second/2+2*time.Millisecond, time.Since(began))
		w.drain(fakes)

		// Without an answer from a majority, Unlock returns an error.
		fakes = w.fakes(redYes, redYes, redYes)
		for _, f := range fakes[:2] {
			f.unlock = redAnswer{after: redQuick, err: errors.Join(lock.ErrIndeterminate, errRedBoom)}
		}
		h, err = w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		err = h.Unlock(t.Context())
		require.ErrorIs(t, err, lock.ErrIndeterminate)
		require.ErrorIs(t, err, errRedBoom)

		// A failed round waits for releases no longer than for a member.
		later := redAnswer{after: 2 * redQuick, err: errRedTaken}
		fakes = w.fakes(redYes, later, later)
		fakes[0].unlock = slow
		began = time.Now()
		_, err = w.red(fakes).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Equal(t, 2*redQuick+redPatience, time.Since(began))
		w.drain(fakes)

		// Nor longer than a moment after its caller has left.
		fakes = w.fakes(redYes, later, later)
		fakes[0].unlock = slow
		ctx, cancel := context.WithTimeout(t.Context(), 3*redQuick)
		defer cancel()
		began = time.Now()
		_, err = w.red(fakes).TryLock(ctx)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Equal(t, 3*redQuick+session.Grace, time.Since(began))
		w.drain(fakes)

		// Unlock ends although a majority is silent.
		fakes = w.fakes(redYes, redYes, redYes)
		fakes[0].unlock, fakes[1].unlock = slow, slow
		h, err = w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		began = time.Now()
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrIndeterminate)
		require.Equal(t, engine.UnlockTimeout, time.Since(began))
		w.drain(fakes)
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
				next := make(chan lock.Hold)
				go func() {
					h, err := w.red(fakes).Lock(t.Context())
					assert.NoError(t, err)
					next <- h
				}()
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
				second := <-next
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
				next := make(chan error, 1)
				go func() {
					h, err := w.red(fakes).Lock(t.Context(), c.second...)
					next <- errors.Join(err, h.Unlock(t.Context()))
				}()
				synctest.Wait()
				require.NoError(t, first.Unlock(t.Context()))
				require.NoError(t, <-next)
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
		next := make(chan lock.Hold)
		wait := func(opts ...lock.Option) {
			go func() {
				h, err := r.Lock(context.Background(), opts...)
				assert.NoError(t, err)
				next <- h
			}()
			synctest.Wait()
		}
		wait()
		first := <-next
		wait()
		wait(lock.MaxHold(maxHold))
		redSleep(slow) // it is trusted for longer
		for _, f := range fakes {
			f.set(func() { f.extend.after = slow })
		}
		unlocked := make(chan error, 2)
		unlock := func(h lock.Hold) { go func() { unlocked <- h.Unlock(context.Background()) }() }
		unlock(first)
		unlock(<-next)
		last := <-next
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
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if row.waits {
					go func() {
						_, err := r.Lock(ctx)
						assert.ErrorIs(t, err, lock.ErrNotAcquired)
					}()
					synctest.Wait()
					defer synctest.Wait()
					defer cancel()
				}
				began := time.Now()
				require.NoError(t, h.Unlock(t.Context()))
				require.Equal(t, row.lasted, time.Since(began))
				fakes[2].mu.Lock()
				require.Len(t, fakes[2].holds, row.asked)
				fakes[2].mu.Unlock()
				cancel()
				w.drain(fakes)
			})
		})
	}
}
