package multilock_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/rlock"
)

// TestRedCancelled cancels the context at every point of a round.
func TestRedCancelled(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		gone := errors.New("gone")
		for _, answers := range [][]redAnswer{
			{redYes, redSlowYes, redLateYes},
			{redYes, redSlowYes, redSlowErr},
			{redLateYes, redLateYes, redLateYes},
			{redYes, redTaken, redHangs},
			{redTaken, redTaken, redTaken},
		} {
			for after := range 45 {
				for _, once := range []bool{false, true} {
					fakes := w.fakes(answers...)
					red := w.red(fakes)
					ctx, cancel := context.WithCancelCause(t.Context())
					began := time.Now()
					time.AfterFunc(time.Duration(after)*time.Millisecond+time.Microsecond, func() { cancel(gone) })
					var h lock.Hold
					var err error
					if once {
						h, err = red.TryLock(ctx)
					} else {
						h, err = red.Lock(ctx)
					}
					ended := ctx.Err() != nil
					switch {
					case err == nil:
						require.False(t, ended)
						require.NoError(t, h.Unlock(ctx))
					case once && !ended:
						harness.NotAcquired(t, err)
					default:
						harness.NotAcquired(t, err)
						require.ErrorIs(t, err, gone, "%v after %d", answers, after)
						late := time.Since(began) - time.Duration(after)*time.Millisecond - time.Microsecond
						require.LessOrEqual(t, late, 2*session.Grace) // for answers, and for the release
					}
					cancel(nil)
					w.drain(fakes, answers, after)
				}
			}
		}
	})
}

// TestRedCancelledWithTheMajority cancels the context at the moment of the majority.
func TestRedCancelledWithTheMajority(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for i := range 200 {
			fakes := w.fakes(redYes, redSlowYes, redHangs)
			gone := errors.New("gone")
			ctx, cancel := context.WithCancelCause(t.Context())
			fakes[1].given = func() { cancel(gone) }
			var err error
			if i%2 == 0 {
				_, err = w.red(fakes).TryLock(ctx)
			} else {
				_, err = w.red(fakes).Lock(ctx)
			}
			harness.NotAcquired(t, err)
			require.ErrorIs(t, err, gone)
			w.drain(fakes)
		}
	})
}

// TestRedClientCloses closes the client at every point of a round and during a hold.
func TestRedClientCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &redWorld{t: t, log: &harness.Log{}}
		for _, answers := range [][]redAnswer{
			{redYes, redSlowYes, redLateYes},
			{redTaken, redTaken, redTaken},
			{redHangs, redHangs, redYes},
		} {
			for after := range 45 {
				for _, once := range []bool{false, true} {
					w.s = redSession(w.log, redLease)
					fakes := w.fakes(answers...)
					red := w.red(fakes)
					time.AfterFunc(time.Duration(after)*time.Millisecond+time.Microsecond, w.s.Close)
					var h lock.Hold
					var err error
					if once {
						h, err = red.TryLock(t.Context())
					} else {
						h, err = red.Lock(t.Context())
					}
					closed := w.s.Stopped() != nil
					switch {
					case err == nil:
						<-h.Context().Done()
						require.ErrorIs(t, context.Cause(h.Context()), lock.ErrClosed)
						require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrClosed)
					case closed:
						require.ErrorIs(t, err, lock.ErrClosed, "%v after %d", answers, after)
					default:
						require.ErrorIs(t, err, lock.ErrNotAcquired)
					}
					w.s.Close()
					w.drain(fakes, answers, after)
					_, err = red.TryLock(t.Context())
					require.ErrorIs(t, err, lock.ErrClosed)
				}
			}
		}
	})
}

// TestRedDropped has a hold collected without Unlock.
func TestRedDropped(t *testing.T) {
	log := &harness.Log{}
	w := &redWorld{t: t, log: log, s: redSession(log, time.Minute)}
	defer w.s.Close()
	fakes := w.fakes(redYes, redYes, redYes)
	func() {
		h, err := w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		require.Positive(t, h.Remaining())
	}()
	harness.Eventually(t, 10*time.Second, "the lock is released", func() bool {
		runtime.GC()
		return fakes[0].held()+fakes[1].held()+fakes[2].held() == 0
	})
	require.Contains(t, log.String(), "dropped without Unlock")
	require.Contains(t, log.String(), "red_test.go")
	require.Contains(t, log.String(), "orders")
}

// TestRedProcessesAlternate has two processes contend for the lock. Neither hears the other.
func TestRedProcessesAlternate(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redYes)
		for _, f := range fakes {
			f.alone = true
			f.unlock.after = redQuick
		}
		const rounds = 1000
		var got [2]int
		var mu sync.Mutex
		var done sync.WaitGroup
		for i := range got {
			s := redSession(w.log, redLease)
			defer s.Close()
			red := (&redWorld{t: t, s: s, log: w.log}).red(fakes)
			for range 8 {
				done.Go(func() {
					for more := true; more; {
						h, err := red.Lock(t.Context())
						if !assert.NoError(t, err) {
							return
						}
						mu.Lock()
						got[i]++
						more = got[0]+got[1] < rounds
						mu.Unlock()
						assert.NoError(t, h.Unlock(t.Context()))
					}
				})
			}
		}
		done.Wait()
		t.Log(got)
		for _, n := range got {
			require.GreaterOrEqual(t, n, rounds/40) // more where they hear of each other
		}
		w.drain(fakes)
	})
}

func TestRedInvalidMembers(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		f := w.fakes(redYes, redYes, redYes)
		of := func(i int) *rlock.Lock { return rlock.New(engine.New(w.member(i)), "orders") }
		var none *rlock.Lock
		bad := map[string]*multilock.Red{
			"none":         multilock.NewRed(w.groups()),
			"nil":          multilock.NewRed(w.groups(), of(0), nil, of(2)),
			"typed nil":    multilock.NewRed(w.groups(), of(0), none, of(2)),
			"zero":         multilock.NewRed(w.groups(), of(0), &rlock.Lock{}, of(2)),
			"twice":        multilock.NewRed(w.groups(), of(0), of(1), of(0)),
			"a Multi":      multilock.NewRed(w.groups(), of(0), of(1), multilock.New(w.groups(), of(2))),
			"a Red":        multilock.NewRed(w.groups(), of(0), of(1), multilock.NewRed(w.groups(), of(2))),
			"foreign":      multilock.NewRed(w.groups(), of(0), of(1), multiForeign{of(2)}),
			"embeds":       multilock.NewRed(w.groups(), of(0), of(1), multiEmbeds{of(2)}),
			"points to it": multilock.NewRed(w.groups(), of(0), of(1), &multiEmbeds{of(2)}),
			"timeout 0":    multilock.NewRed(w.groups(), of(0), of(1), of(2)).WithTimeout(0),
			"timeout -1":   multilock.NewRed(w.groups(), of(0), of(1), of(2)).WithTimeout(-1),
		}
		for what, red := range bad {
			for _, red := range []*multilock.Red{red, red.WithTimeout(time.Second)} {
				_, err := red.Lock(t.Context())
				require.ErrorIs(t, err, lock.ErrInvalid, what)
				_, err = red.TryLock(t.Context())
				require.ErrorIs(t, err, lock.ErrInvalid, what)
				require.ErrorIs(t, red.Do(t.Context(), func(context.Context) error { return nil }), lock.ErrInvalid, what)
			}
		}
		red := w.red(f)
		require.Equal(t, "orders", red.Name())
		f[1].name = "others"
		require.Equal(t, "orders,others", w.red(f).Name())
		for _, opts := range [][]lock.Option{{lock.Lease(-1)}, {lock.Wait(-1)}, {{}}, {lock.MaxHold(0)}, {lock.Lease(time.Second), lock.MaxHold(time.Second)}} {
			_, err := red.Lock(t.Context(), opts...)
			require.ErrorIs(t, err, lock.ErrInvalid)
			_, err = red.TryLock(t.Context(), opts...)
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		_, err := red.TryLock(t.Context(), lock.Wait(time.Second))
		require.ErrorIs(t, err, lock.ErrInvalid)
		var noContext context.Context
		_, err = red.Lock(noContext)
		require.ErrorIs(t, err, lock.ErrInvalid)
		_, err = red.TryLock(noContext)
		require.ErrorIs(t, err, lock.ErrInvalid)
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errRedBoom)
		_, err = red.Lock(ctx)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorIs(t, err, errRedBoom)
		require.Zero(t, f[0].attempts())

		h, err := red.Lock(t.Context())
		require.NoError(t, err)
		require.ErrorIs(t, h.Unlock(noContext), lock.ErrInvalid)
		require.Equal(t, "orders", h.Name())
		require.Zero(t, h.Token())
		require.True(t, h.Owner().IsZero())
		require.NoError(t, h.Unlock(t.Context()))
		require.ErrorIs(t, context.Cause(h.Context()), context.Canceled)
		w.drain(f)
		require.NotContains(t, w.log.String(), "even")
	})
}

func TestRedEvenNumberIsLoggedOnce(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for n, quorum := range map[int]int{2: 2, 4: 3, 6: 4} {
			for range 3 {
				answers := make([]redAnswer, n)
				for i := range answers {
					if answers[i] = redYes; i >= quorum {
						answers[i] = redTaken
					}
				}
				fakes := w.fakes(answers...)
				h, err := w.red(fakes).TryLock(t.Context())
				require.NoError(t, err)
				require.NoError(t, h.Unlock(t.Context()))
				answers[0] = redTaken
				_, err = w.red(w.fakes(answers...)).TryLock(t.Context())
				require.ErrorIs(t, err, lock.ErrNotAcquired)
			}
		}
		require.Equal(t, 3, redCount(w.log.String(), "even number"))
	})
}

// Servers without a member count for the majority.
func TestRedWithAbsentServers(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for _, c := range []struct {
			answers []redAnswer
			absent  int
			want    error
		}{
			{[]redAnswer{redYes, redYes}, 1, nil},
			{[]redAnswer{redYes, redTaken}, 1, lock.ErrNotAcquired},
			{[]redAnswer{redYes, redYes, redTaken}, 0, nil},
			{[]redAnswer{redYes, redYes, redTaken}, 2, lock.ErrNotAcquired},
			{[]redAnswer{redYes, redYes, redYes}, 2, nil},
			{[]redAnswer{redYes, redYes, redYes, redTaken}, 3, lock.ErrNotAcquired},
			{[]redAnswer{redYes, redYes}, 2, lock.ErrUnavailable},
			{[]redAnswer{redYes}, -1, lock.ErrInvalid},
		} {
			h, err := w.red(w.fakes(c.answers...)).WithAbsent(c.absent).TryLock(t.Context())
			require.ErrorIs(t, err, c.want, "%v and %d", c.answers, c.absent)
			if err == nil {
				require.NoError(t, h.Unlock(t.Context()))
			}
		}
		require.NotContains(t, w.log.String(), "even number", "of all servers")
	})
}

// TestRedLocalQueue has many goroutines of one process contend for the lock: they split no
// votes.
func TestRedLocalQueue(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redYes)
		for _, f := range fakes {
			f.alone = true
			f.unlock.after = redQuick
		}
		began := time.Now()
		var done sync.WaitGroup
		const callers = 64
		n := 0
		for range callers {
			done.Go(func() {
				h, err := w.red(fakes).Lock(t.Context()) // each creates the lock anew
				assert.NoError(t, err)
				before := n
				time.Sleep(time.Millisecond)
				n = before + 1
				assert.NoError(t, h.Unlock(t.Context()))
			})
		}
		done.Wait()
		require.Equal(t, callers, n)
		require.Equal(t, 3, fakes[0].attempts(), "the first one, after 16 hand-offs, and after 25 ms more; then not for 100 ms, because no other process came")
		// A millisecond each for the attempt, the work and the release, and some for the
		// yield to other processes.
		require.LessOrEqual(t, time.Since(began), callers*3*time.Millisecond+25*time.Millisecond)
		w.drain(fakes)
	})
}

func redCount(s, sub string) int { return strings.Count(s, sub) }
