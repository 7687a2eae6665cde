package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
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

// redAnswer is what a fake member makes of an attempt.
type redAnswer struct {
	after time.Duration
	err   error // nil: yes
	deaf  bool  // it answers even if nobody waits for that any more
}

const (
	redQuick = time.Millisecond
	redSlow  = 30 * time.Millisecond
	// redPatience is what is waited for a member of a lease of a second.
	redPatience = 50 * time.Millisecond
	redLate     = 80 * time.Millisecond
	redLease    = time.Second
	redValid    = redLease - redLease/100 - 2*time.Millisecond
)

var (
	errRedTaken = fmt.Errorf("%w: somebody has it", lock.ErrNotAcquired)
	errRedBoom  = errors.New("boom")

	redYes     = redAnswer{after: redQuick}
	redTaken   = redAnswer{after: redQuick, err: errRedTaken}
	redFails   = redAnswer{after: redQuick, err: errRedBoom}
	redSlowYes = redAnswer{after: redSlow}
	redSlowErr = redAnswer{after: redSlow, err: errRedBoom}
	redHangs   = redAnswer{after: time.Hour}
	redLateYes = redAnswer{after: redLate, deaf: true}

	redAnswers = []redAnswer{redYes, redTaken, redFails, redSlowYes, redSlowErr, redHangs, redLateYes}
)

// redFake is a member of which nothing is known.
type redFake struct {
	t    *testing.T
	name string

	mu      sync.Mutex
	answers []redAnswer // one for each attempt; the last one for all that follow
	asked   []time.Time
	leases  []time.Duration
	holds   []*redFakeHold
	trying  int    // attempts under way
	given   func() // called with each yes; may be nil
	alone   bool   // it knows by itself who has it

	// Of its holds from now on.
	extend redAnswer
	unlock redAnswer
}

func (f *redFake) Name() string { return f.name }

func (f *redFake) Lock(context.Context, ...lock.Option) (lock.Hold, error) { panic("not for members") }

func (f *redFake) Do(context.Context, func(context.Context) error, ...lock.Option) error {
	panic("not for members")
}

func (a redAnswer) wait(ctx context.Context) error {
	if a.deaf {
		ctx = context.WithoutCancel(ctx)
	}
	if a.after == 0 {
		return a.err
	}
	select {
	case <-time.After(a.after):
		return a.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (f *redFake) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := lock.Resolve(opts...)
	require.NoError(f.t, err)
	f.mu.Lock()
	f.asked, f.leases = append(f.asked, time.Now()), append(f.leases, o.Lease)
	a := f.answers[0]
	if len(f.answers) > 1 {
		f.answers = f.answers[1:]
	}
	f.trying++
	f.mu.Unlock()
	err = a.wait(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.trying--
	if err != nil {
		return nil, err
	}
	if f.alone && f.heldNow() > 0 {
		return nil, errRedTaken
	}
	if f.given != nil {
		f.given()
	}
	h := &redFakeHold{f: f, until: time.Now().Add(o.Lease)}
	f.holds = append(f.holds, h)
	return *h.self(), nil
}

// heldNow is called with f.mu held.
func (f *redFake) heldNow() (n int) {
	for _, h := range f.holds {
		if h.unlocked == 0 {
			n++
		}
	}
	return n
}

// held returns how many holds it has given out that are not given back.
func (f *redFake) held() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.heldNow()
}

func (f *redFake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *redFake) attempts() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.asked)
}

// redFakeHold is one that a fake has given out.
type redFakeHold struct {
	f        *redFake
	until    time.Time
	unlocked int
	gone     bool
	extended []time.Duration
}

// redFakeHandle cannot be compared, as a user's hold need not.
type redFakeHandle struct {
	*redFakeHold
	_ []int
}

func (h *redFakeHold) self() *redFakeHandle { return &redFakeHandle{redFakeHold: h} }

func (h redFakeHandle) Name() string             { return h.f.name }
func (h redFakeHandle) Owner() lock.Owner        { return lock.Owner{} }
func (h redFakeHandle) Token() int64             { return 0 }
func (h redFakeHandle) Context() context.Context { panic("nobody asks a member for that") }
func (h redFakeHandle) Remaining() time.Duration { return time.Until(h.until) }

func (h redFakeHandle) Extend(ctx context.Context, lease time.Duration) error {
	h.f.mu.Lock()
	a := h.f.extend
	h.f.mu.Unlock()
	if err := a.wait(ctx); err != nil {
		return err
	}
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	if h.gone || h.unlocked > 0 || time.Now().After(h.until) {
		return &lock.LostError{Name: h.f.name, Reason: lock.ReasonGone}
	}
	h.extended = append(h.extended, lease)
	if until := time.Now().Add(lease); until.After(h.until) {
		h.until = until
	}
	return nil
}

func (h redFakeHandle) Unlock(ctx context.Context) error {
	h.f.mu.Lock()
	a := h.f.unlock
	h.f.mu.Unlock()
	err := a.wait(context.WithoutCancel(ctx))
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	h.unlocked++
	if err == nil && (h.gone || time.Now().After(h.until)) {
		return &lock.LostError{Name: h.f.name, Reason: lock.ReasonGone}
	}
	return err
}

// redConn is a connection to no server.
type redConn struct{ rueidis.Client }

func (redConn) Mode() rueidis.ClientMode { return rueidis.ClientModeStandalone }

const redID = "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11"

func redSession(log *harness.Log, watchdog time.Duration) *session.Session {
	return session.New(session.Config{
		Client: redConn{}, ID: redID, WatchdogTimeout: watchdog, FairWait: time.Minute, HandOffs: 16,
		MapName: func(s string) string { return s }, Logger: log.Logger(),
	})
}

// redWorld is a session without servers, and fakes.
type redWorld struct {
	t   *testing.T
	s   *session.Session
	log *harness.Log
}

// redRun runs a test with a watchdog timeout of redLease.
func redRun(t *testing.T, test func(t *testing.T, w *redWorld)) {
	synctest.Test(t, func(t *testing.T) {
		log := &harness.Log{}
		w := &redWorld{t: t, s: redSession(log, redLease), log: log}
		defer synctest.Wait()
		defer w.s.Close()
		test(t, w)
	})
}

func (w *redWorld) fakes(answers ...redAnswer) []*redFake {
	fakes := make([]*redFake, len(answers))
	for i, a := range answers {
		fakes[i] = &redFake{t: w.t, name: "orders", answers: []redAnswer{a}}
	}
	return fakes
}

func (w *redWorld) red(fakes []*redFake) *multilock.Red {
	members := make([]lock.Locker, len(fakes))
	for i, f := range fakes {
		members[i] = f
	}
	return multilock.NewRed(w.s, members...)
}

// settled waits until everything that was begun has ended, and checks that every hold that
// a fake gave out was given back once.
func (w *redWorld) settled(fakes []*redFake, what ...any) {
	w.t.Helper()
	redSleep(time.Minute)
	for i, f := range fakes {
		require.Zero(w.t, f.trying, "attempts of member %d: %v", i, what)
		for _, h := range f.holds {
			require.Equal(w.t, 1, h.unlocked, "member %d: %v", i, what)
		}
	}
}

// redSleep sleeps until whatever is to happen meanwhile has happened.
func redSleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// redOutcome is what a round with those answers comes to, and when.
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

// TestRedDecides plays a round for every combination of answers of three members, and for
// many of five.
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
				require.ErrorIs(t, err, lock.ErrNotAcquired, "%v", answers)
				if took != at {
					at += redQuick // to give back what it has got
				}
				require.Equal(t, at, took, "%v", answers)
				w.settled(fakes, answers)
				continue
			}
			require.NoError(t, err, "%v", answers)
			require.Equal(t, at, took, "%v", answers)
			require.Equal(t, redValid-took, h.Remaining())
			time.Sleep(redLate)
			for i, a := range answers {
				want := 0
				if a.err == nil && a.after <= redLate {
					want = 1 // also what came after the majority
				}
				require.Equal(t, want, fakes[i].held(), "member %d: %v", i, answers)
				require.Equal(t, []time.Duration{redLease}, fakes[i].leases)
			}
			began = time.Now()
			require.NoError(t, h.Unlock(t.Context()), "%v", answers)
			require.Equal(t, redQuick, time.Since(began), "%v", answers)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
			require.Zero(t, h.Remaining())
			w.settled(fakes, answers)
		}
	})
}

// TestRedLateYesAfterUnlock has a member answer when the hold is over.
func TestRedLateYesAfterUnlock(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redLateYes)
		h, err := w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
		w.settled(fakes)
		require.Len(t, fakes[2].holds, 1)
	})
}

// TestRedValidity has the majority arrive at the moment when nothing is left of the lease,
// and just before.
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
					require.ErrorIs(t, err, lock.ErrNotAcquired)
				}
				w.settled(fakes)
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
			w.settled(fakes)
		})
	}
}

// TestRedLeaseOfNothing wants a lease that is over before it begins.
func TestRedLeaseOfNothing(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redYes)
		for _, lease := range []time.Duration{time.Millisecond, 2 * time.Millisecond, 2020 * time.Microsecond} {
			_, err := w.red(fakes).Lock(t.Context(), lock.Lease(lease))
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		require.Zero(t, fakes[0].attempts())
	})
}

// TestRedServerTimeout looks at how long a member that hangs is waited for.
func TestRedServerTimeout(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for _, test := range []struct{ timeout, lease, want time.Duration }{
			{0, 40 * time.Millisecond, 40*time.Millisecond - 2400*time.Microsecond},
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
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.Equal(t, test.want, time.Since(began))
			w.settled(fakes)
		}
	})
}

// TestRedWaits has a majority only in the fourth round, or the third. The pauses in between are random
// and bounded by what doubles.
func TestRedWaits(t *testing.T) {
	for _, refusal := range []redAnswer{redTaken, redFails} { // the first of which others are in the way
		redRun(t, func(t *testing.T, w *redWorld) {
			fakes := w.fakes(redYes, redYes, redYes)
			for _, f := range fakes[:2] {
				f.answers = []redAnswer{refusal, refusal, refusal, redYes}
				if refusal == redFails {
					f.answers = f.answers[1:] // not for so long that it gives up
				}
			}
			h, err := w.red(fakes).Lock(t.Context())
			require.NoError(t, err)
			require.NoError(t, h.Unlock(t.Context()))
			for n, longest := range []time.Duration{8, 16, 32}[:fakes[0].attempts()-1] {
				pause := fakes[0].asked[n+1].Sub(fakes[0].asked[n])
				longest = longest*time.Millisecond + 20*time.Millisecond // the round, and a tick
				if refusal == redFails && n > 0 {
					longest = time.Second + 20*time.Millisecond // as for any server that is away
				}
				require.GreaterOrEqual(t, pause, redQuick)
				require.LessOrEqual(t, pause, longest, "%d", n)
			}
			w.settled(fakes)
		})
	}
}

// TestRedPausesGrow looks at the mean of many pauses.
func TestRedPausesGrow(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		const rounds, times = 9, 40
		var sum [rounds]time.Duration
		for range times {
			fakes := w.fakes(redTaken, redTaken, redTaken)
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				_, err := w.red(fakes).Lock(ctx)
				assert.ErrorIs(t, err, lock.ErrNotAcquired)
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
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.LessOrEqual(t, time.Since(began), 26*time.Millisecond) // to a tick of the wheel
		w.settled(fakes)

		fakes = w.fakes(redTaken, redTaken, redTaken)
		began = time.Now()
		_, err = w.red(fakes).Lock(t.Context(), lock.Wait(700*time.Millisecond))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.InDelta(t, 700*time.Millisecond, time.Since(began), float64(6*time.Millisecond))
	})
}

// TestRedServersAway has no majority to be had because of errors. Lock rides that out for
// a watchdog timeout, unless they will not pass.
func TestRedServersAway(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for _, a := range []redAnswer{redFails, redHangs, {after: redQuick, err: errors.Join(lock.ErrNotAcquired, context.DeadlineExceeded)},
			{after: redQuick, err: errors.Join(lock.ErrNotAcquired, lock.ErrIndeterminate)}} {
			fakes := w.fakes(redYes, a, a)
			began := time.Now()
			_, err := w.red(fakes).Lock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.ErrorContains(t, err, "server 2")
			require.ErrorContains(t, err, "server 3")
			require.Greater(t, time.Since(began), redLease)
			require.Less(t, time.Since(began), 3*redLease)
			require.Greater(t, fakes[0].attempts(), 2)
			w.settled(fakes)

			_, err = w.red(fakes).TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.ErrorContains(t, err, "server 2")

			// A minority, and others that are taken: it goes on.
			fakes = w.fakes(redYes, a, redTaken)
			_, err = w.red(fakes).Lock(t.Context(), lock.Wait(5*redLease))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.Greater(t, fakes[0].attempts(), 10)
			w.settled(fakes)
		}
		for _, final := range []error{lock.ErrInvalid, lock.ErrClosed, lock.ErrReentered, lock.ErrUpgrade, lock.ErrUnsupported} {
			a := redAnswer{after: redQuick, err: final}
			fakes := w.fakes(redYes, a, a)
			_, err := w.red(fakes).Lock(t.Context())
			require.ErrorIs(t, err, final)
			require.Equal(t, 1, fakes[0].attempts())
			w.settled(fakes)

			fakes = w.fakes(redYes, a, redYes)
			h, err := w.red(fakes).Lock(t.Context())
			require.NoError(t, err)
			require.NoError(t, h.Unlock(t.Context()))

			// One that is final and one that is not: it may pass.
			fakes = w.fakes(redYes, a, redFails)
			_, err = w.red(fakes).Lock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.Greater(t, fakes[0].attempts(), 2)
			w.settled(fakes)
		}
	})
}

// What decides a round is one server that somebody else has and two that are away. Those whose
// answer nobody has waited for are not away.
func TestARedLockIsWaitedForWhileAMinorityIsAway(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		late := redAnswer{after: 10 * redQuick, err: errRedTaken}
		fakes := w.fakes(redFails, redFails, redTaken, late, late)
		began := time.Now()
		_, err := w.red(fakes).Lock(t.Context(), lock.Wait(5*redLease))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.GreaterOrEqual(t, time.Since(began), 5*redLease)
	})
}

// TestRedSlowRelease has members that answer no release. Nobody waits for a minority, and
// for a majority no longer than it takes.
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
			w.settled(fakes)
		}

		// Slightly slower ones are waited for, so that the next finds them free.
		fakes := w.fakes(redYes, redYes, redYes)
		fakes[0].unlock.after = redQuick
		h, err := w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		require.NoError(t, h.Unlock(t.Context()))
		require.Zero(t, fakes[0].held())

		// What is not held needs not be given back: with three of five, one that is slow.
		fakes = w.fakes(redYes, redYes, redYes, redTaken, redFails)
		fakes[0].unlock = slow
		h, err = w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		began := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.LessOrEqual(t, time.Since(began), 2*time.Millisecond)
		w.settled(fakes)

		// A majority that is slow is waited for.
		fakes = w.fakes(redYes, redYes, redYes)
		fakes[0].unlock, fakes[1].unlock = redAnswer{after: time.Second / 2}, slow
		h, err = w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		began = time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, time.Second/2+2*time.Millisecond, time.Since(began))
		w.settled(fakes)

		// And one that cannot tell is an error.
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

		// A round that was lost does not wait for them for longer than for a member.
		later := redAnswer{after: 2 * redQuick, err: errRedTaken}
		fakes = w.fakes(redYes, later, later)
		fakes[0].unlock = slow
		began = time.Now()
		_, err = w.red(fakes).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Equal(t, 2*redQuick+redPatience, time.Since(began))
		w.settled(fakes)
	})
}

// TestRedUnlockBelowQuorum finds at Unlock that members are gone.
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
				w.settled(fakes)
			}
		}
	})
}

// TestRedRenews looks at what a renewal makes of every combination of two answers for a hold on
// three members: it takes anew what is gone, and waits for nobody who hangs.
func TestRedRenews(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redFails)
		fakes[2].answers = []redAnswer{redFails, redYes}
		h, err := w.red(fakes).Lock(t.Context())
		require.NoError(t, err)
		require.Zero(t, fakes[2].held())
		redSleep(redLease/3 + 20*time.Millisecond)
		require.Equal(t, 1, fakes[2].held(), "what was missing is taken with the first renewal")
		require.Len(t, fakes[0].holds[0].extended, 1)
		require.Equal(t, redLease, fakes[0].holds[0].extended[0], "the members have the whole lease")
		require.Less(t, h.Remaining(), redValid)
		require.Greater(t, h.Remaining(), redValid-30*time.Millisecond)

		// One that hangs delays nothing.
		fakes[1].set(func() { fakes[1].extend = redHangs })
		for range 30 {
			time.Sleep(redLease / 10)
			require.Greater(t, h.Remaining(), redLease/2)
		}
		require.NoError(t, h.Context().Err())
		// It has lost its hold meanwhile, which is found, given back and taken anew.
		fakes[1].set(func() { fakes[1].extend = redAnswer{} })
		redSleep(2*redLease/3 + 20*time.Millisecond) // it may be heard too late for one renewal
		require.Equal(t, 1, fakes[1].held())
		require.Len(t, fakes[1].holds, 2)

		// So is one that somebody has deleted.
		fakes[0].set(func() { fakes[0].holds[0].gone = true })
		redSleep(2*redLease/3 + 20*time.Millisecond)
		require.Len(t, fakes[0].holds, 2)
		require.Equal(t, 1, fakes[0].held())
		redSleep(5 * redLease)
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(t.Context()))
		w.settled(fakes)
	})
}

// TestRedMissingStaysMissing has a member that is taken by somebody else for good, and one that
// answers a top-up when the hold is over.
func TestRedMissingStaysMissing(t *testing.T) {
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
		w.settled(fakes)
		require.Len(t, fakes[2].holds, 1)
	})
}

// TestRedIsLost loses a hold in every way.
func TestRedIsLost(t *testing.T) {
	type fate struct {
		name   string
		opts   []lock.Option
		befall func(fakes []*redFake)
		reason lock.Reason
		within time.Duration
		not    time.Duration // before
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
	for _, f := range []fate{
		{"gone on three", nil, gone(3), lock.ReasonGone, redLease/3 + 20*time.Millisecond, redLease / 4},
		{"gone on all", nil, gone(5), lock.ReasonGone, redLease/3 + 20*time.Millisecond, redLease / 4},
		{"three hang", nil, answers(redHangs), lock.ReasonExpired, redValid, redValid - 10*time.Millisecond},
		{"three fail", nil, answers(redFails), lock.ReasonExpired, redValid, redValid - 10*time.Millisecond},
		{"two hang and one is gone", nil, func(fakes []*redFake) {
			answers(redHangs)(fakes)
			fakes[0].set(func() {
				fakes[0].extend, fakes[0].holds[0].gone = redAnswer{}, true
				fakes[0].answers = []redAnswer{redTaken} // else it is taken anew, and nothing is lost
			})
		}, lock.ReasonExpired, redValid, redValid - 10*time.Millisecond},
		{"a lease", []lock.Option{lock.Lease(redLease)}, gone(0), lock.ReasonExpired, redValid, redValid - 10*time.Millisecond},
		{"held too long", []lock.Option{lock.MaxHold(2 * redLease)}, gone(0), lock.ReasonMaxHold, 2 * redLease, 2*redLease - 10*time.Millisecond},
	} {
		t.Run(f.name, func(t *testing.T) {
			redRun(t, func(t *testing.T, w *redWorld) {
				fakes := w.fakes(redYes, redYes, redYes, redYes, redYes)
				red := w.red(fakes)
				began := time.Now()
				h, err := red.Lock(t.Context(), f.opts...)
				require.NoError(t, err)
				synctest.Wait()
				f.befall(fakes)
				<-h.Context().Done()
				took := time.Since(began)
				require.LessOrEqual(t, took, f.within+10*time.Millisecond) // two ticks
				require.GreaterOrEqual(t, took, f.not)
				var lostErr *lock.LostError
				require.ErrorAs(t, context.Cause(h.Context()), &lostErr)
				require.Equal(t, f.reason, lostErr.Reason)
				if f.name == "three fail" {
					require.ErrorIs(t, lostErr, errRedBoom)
				}
				require.Zero(t, h.Remaining())
				require.ErrorIs(t, h.Extend(t.Context(), time.Hour), lock.ErrLost)
				synctest.Wait()
				if f.reason == lock.ReasonMaxHold {
					for _, f := range fakes {
						require.Equal(t, 1, f.held(), "until Unlock")
					}
				} else {
					for _, f := range fakes {
						require.Zero(t, f.held())
					}
				}
				// Those of this process who wait need not wait for Unlock.
				for _, f := range fakes {
					f.set(func() { f.extend, f.answers = redAnswer{}, []redAnswer{redYes} })
				}
				h2, err := red.Lock(t.Context(), lock.Wait(20*time.Millisecond))
				require.NoError(t, err)
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
				require.NoError(t, h2.Unlock(t.Context()))
				w.settled(fakes)
			})
		})
	}
}

// TestRedOverByTheClock unlocks and extends a hold whose time is over, before the watchdog
// has come to it.
func TestRedOverByTheClock(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for range 2 {
			fakes := w.fakes(redYes, redYes, redYes)
			h, err := w.red(fakes).Lock(t.Context(), lock.Lease(redLease+777*time.Microsecond)) // not on a tick
			require.NoError(t, err)
			time.Sleep(h.Remaining())
			require.NoError(t, h.Context().Err())
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			w.settled(fakes)

			h, err = w.red(fakes).Lock(t.Context(), lock.Lease(redLease+777*time.Microsecond))
			require.NoError(t, err)
			time.Sleep(h.Remaining())
			require.ErrorIs(t, h.Extend(t.Context(), time.Hour), lock.ErrLost)
			require.Error(t, h.Context().Err())
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			w.settled(fakes)
		}
	})
}

// TestRedBatch renews holds on different members together. What becomes of one is not the
// others' business.
func TestRedBatch(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		healthy, hung, gone := w.fakes(redYes, redYes, redYes), w.fakes(redYes, redYes, redYes), w.fakes(redYes, redYes, redYes)
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
		// The renewal ends a sixth of the lease after it began, for want of an answer; what it has
		// brought for the others counts.
		time.Sleep(redLease/3 + redLease/6 + 20*time.Millisecond)
		require.Greater(t, holds[0].Remaining(), redValid-redLease/6-30*time.Millisecond)
		<-holds[2].Context().Done()
		require.Less(t, time.Since(began), redLease*3/4, "one that is gone is found although another gives no answer")
		require.ErrorIs(t, holds[2].Unlock(t.Context()), lock.ErrLost)
		<-holds[1].Context().Done()
		require.InDelta(t, redValid, time.Since(began), float64(20*time.Millisecond))
		require.ErrorIs(t, holds[1].Unlock(t.Context()), lock.ErrLost)
		time.Sleep(3 * redLease)
		require.Greater(t, holds[0].Remaining(), redLease/2)
		require.NoError(t, holds[0].Unlock(t.Context()))
		for _, fakes := range [][]*redFake{healthy, hung, gone} {
			w.settled(fakes)
		}
	})
}

// TestRedExtend extends a hold by hand.
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

		// It never shortens, and does not need all of them.
		fakes[0].set(func() { fakes[0].extend = redHangs })
		for _, lease := range []time.Duration{time.Millisecond, redLease} {
			began := time.Now()
			require.NoError(t, h.Extend(t.Context(), lease))
			require.Equal(t, began, time.Now())
			require.Equal(t, valid, h.Remaining())
		}
		// A short one has time for an answer all the same.
		fakes[1].set(func() { fakes[1].extend.after = 10 * time.Millisecond })
		require.NoError(t, h.Extend(t.Context(), 12*time.Millisecond))
		// But a majority. Without one it stays what it was.
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

		require.ErrorIs(t, h.Extend(t.Context(), 0), lock.ErrInvalid)
		var none context.Context
		require.ErrorIs(t, h.Extend(none, long), lock.ErrInvalid)
		// Those that are gone cannot be extended.
		for _, f := range fakes[:2] {
			f.set(func() { f.extend = redAnswer{}; f.holds[0].gone = true })
		}
		require.ErrorIs(t, h.Extend(t.Context(), long), lock.ErrLost)
		require.Error(t, h.Context().Err())
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		require.ErrorIs(t, h.Extend(t.Context(), long), lock.ErrNotHeld)
		w.settled(fakes)
	})
}

// TestRedExtendLastsOnNewMembers has a member taken anew after the hold was extended: a
// majority has to last for as long as the hold says.
func TestRedExtendLastsOnNewMembers(t *testing.T) {
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
		w.settled(fakes)
	})
}

// TestRedCancelled ends the context at every point of a round.
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
						require.ErrorIs(t, err, lock.ErrNotAcquired)
					default:
						require.ErrorIs(t, err, lock.ErrNotAcquired)
						require.ErrorIs(t, err, gone, "%v after %d", answers, after)
						require.Equal(t, time.Duration(after)*time.Millisecond+time.Microsecond, time.Since(began))
					}
					cancel(nil)
					w.settled(fakes, answers, after)
				}
			}
		}
	})
}

// TestRedCancelledWithTheMajority ends the context in the moment when a majority is there.
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
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.ErrorIs(t, err, gone)
			w.settled(fakes)
		}
	})
}

// TestRedSlowTopUp has a member take longer to answer than it is to the next renewal. It is
// not asked again meanwhile.
func TestRedSlowTopUp(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		fakes := w.fakes(redYes, redYes, redAnswer{after: redLease * 9 / 10})
		h, err := w.red(fakes).WithTimeout(time.Hour).Lock(t.Context())
		require.NoError(t, err)
		redSleep(redLease * 4 / 5)
		require.Equal(t, 1, fakes[2].attempts())
		redSleep(redLease)
		require.Equal(t, 1, fakes[2].held())
		require.NoError(t, h.Unlock(t.Context()))
		w.settled(fakes)
	})
}

// TestRedClientCloses closes the client at every point of a round, and under a hold.
func TestRedClientCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, answers := range [][]redAnswer{
			{redYes, redSlowYes, redLateYes},
			{redTaken, redTaken, redTaken},
			{redHangs, redHangs, redYes},
		} {
			for after := range 45 {
				for _, once := range []bool{false, true} {
					w := &redWorld{t: t, log: &harness.Log{}}
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
					closed := w.s.Err() != nil
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
					w.settled(fakes, answers, after)
					_, err = red.TryLock(t.Context())
					require.ErrorIs(t, err, lock.ErrClosed)
				}
			}
		}
	})
}

// TestRedDropped has a hold collected that was not unlocked.
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
	harness.Eventually(t, 10*time.Second, "it is released", func() bool {
		runtime.GC()
		return fakes[0].held()+fakes[1].held()+fakes[2].held() == 0
	})
	require.Contains(t, log.String(), "dropped without Unlock")
	require.Contains(t, log.String(), "red_test.go")
	require.Contains(t, log.String(), "orders")
}

// TestRedContendersDoNotLivelock plays contenders in sessions of their own, over members with
// random delays, so that votes are split.
func TestRedContendersDoNotLivelock(t *testing.T) {
	for _, contenders := range []int{2, 3, 5} {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(7, uint64(contenders)))
			var sum, longest time.Duration
			rounds := 0
			seeds := harness.Size(40, 200)
			for range seeds {
				w := &redWorld{t: t, log: &harness.Log{}}
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
				w.settled(fakes)
			}
			t.Logf("%d contenders: all were served in %v on average, %v at most, with %.1f rounds each", contenders, sum/time.Duration(seeds), longest, float64(rounds)/float64(seeds*contenders))
			// Each loser pauses for half of 8 ms in the mean, then 16, 32 and so on: that two
			// meet again has a chance of some 2 ms in that, and less each time.
			require.Less(t, sum/time.Duration(seeds), time.Duration(contenders)*30*time.Millisecond)
			require.Less(t, longest, time.Second/2)
		})
	}
}

// TestRedTurns has two processes want the lock all the time. Neither hears the other.
func TestRedTurns(t *testing.T) {
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
		w.settled(fakes)
	})
}

func TestRedNeedsMembers(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		f := w.fakes(redYes, redYes, redYes)
		var none *redFake
		bad := map[string]*multilock.Red{
			"none":         multilock.NewRed(w.s),
			"nil":          multilock.NewRed(w.s, f[0], nil, f[2]),
			"typed nil":    multilock.NewRed(w.s, f[0], none, f[2]),
			"twice":        multilock.NewRed(w.s, f[0], f[1], f[0]),
			"a multi lock": multilock.NewRed(w.s, f[0], f[1], multilock.New(w.s, f[2])),
			"a red lock":   multilock.NewRed(w.s, f[0], f[1], multilock.NewRed(w.s, f[2])),
			"timeout 0":    multilock.NewRed(w.s, f[0], f[1], f[2]).WithTimeout(0),
			"timeout -1":   multilock.NewRed(w.s, f[0], f[1], f[2]).WithTimeout(-1),
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
		w.settled(f)
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

// TestRedLocalQueue has many of one process want the lock: they split no votes.
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
				h, err := w.red(fakes).Lock(t.Context()) // each makes the lock anew
				assert.NoError(t, err)
				before := n
				time.Sleep(time.Millisecond)
				n = before + 1
				assert.NoError(t, h.Unlock(t.Context()))
			})
		}
		done.Wait()
		require.Equal(t, callers, n)
		require.Equal(t, (callers+16)/17, fakes[0].attempts(), "it is passed on 16 times in a row")
		// A millisecond each for the attempt, the work and the release, and some for those
		// of other processes, who are let pass after every 16.
		require.LessOrEqual(t, time.Since(began), callers*3*time.Millisecond+callers/16*25*time.Millisecond)
		w.settled(fakes)
	})
}

func redCount(s, part string) int { return strings.Count(s, part) }

// TestRedIsPassedOn has the members passed on as they are, and answer in every way when
// they are asked for afterwards.
func TestRedIsPassedOn(t *testing.T) {
	for what, c := range map[string]struct {
		gone, failed int // members
		lost         bool
	}{
		"all are there":                      {},
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
				require.Empty(t, unlocked, "the answer comes later")
				require.NoError(t, second.Context().Err())
				redSleep(2 * redQuick)
				require.Equal(t, c.failed < 2, len(unlocked) == 1, "a minority is not waited for")
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
				w.settled(fakes, what)
			})
		})
	}
}

// TestRedIsNotPassedOn has holds or waiters with something of their own, and holds that
// were confirmed too long ago: the members are given back, and taken again.
func TestRedIsNotPassedOn(t *testing.T) {
	for what, c := range map[string]struct {
		first, second []lock.Option
		use           func(h lock.Hold)
	}{
		"it has a lease":         {first: []lock.Option{lock.Lease(redLease)}},
		"the next wants a lease": {second: []lock.Option{lock.Lease(redLease)}},
		"it was extended":        {use: func(h lock.Hold) { _ = h.Extend(context.Background(), time.Hour) }},
		"it has held for long":   {use: func(lock.Hold) { time.Sleep(20 * time.Millisecond) }},
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
				w.settled(fakes, what)
			})
		})
	}
}

// TestRedThatIsLostEndsAfterThoseBefore has one that holds to the end of its MaxHold while
// those who have passed it on wait for their answers: they have lost nothing, and MaxHold
// counts from when it was passed on.
func TestRedThatIsLostEndsAfterThoseBefore(t *testing.T) {
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
		w.settled(fakes)
	})
}
