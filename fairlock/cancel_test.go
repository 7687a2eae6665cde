package fairlock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// cancellation is one case of TestCancelledAnywhereLeavesNoPlace.
type cancellation struct {
	*testing.T
	s        *testserver.Server
	c, other *redlatch.Client
	g        *harness.Gate // before c
	named    bool
	held     lock.Hold // by other, or by c
	before   []*caller // of c
	w        *caller   // to be cancelled
	begin    func()    // starts it
}

func (x *cancellation) lock() *fairlock.Lock { return x.c.FairLock("orders") }

// keep keeps the reply to the n-th request from now that is of that kind.
func (x *cancellation) keep(match string, n int) <-chan struct{} {
	return x.g.Arm(harness.KeepReply, match, n)
}

func (x *cancellation) attempt() string { return harness.SHA(x, acquireOf(x.named)) }

func (x *cancellation) reached(c <-chan struct{}) {
	x.Helper()
	select {
	case <-c:
	case <-time.After(soon):
		require.FailNow(x, "the request was not sent")
	}
}

// asleep starts the call and returns when it sleeps, after so many attempts.
func (x *cancellation) asleep(attempts int) {
	x.Helper()
	reached := x.keep(x.attempt(), attempts)
	x.begin()
	x.reached(reached)
	require.NoError(x, x.g.Open())
	harness.Eventually(x, soon, "it sleeps", func() bool {
		return harness.GoroutinesIn("(*Waiter).wait") > 0 && harness.GoroutinesIn("(*Waiter).attempt") == 0
	})
}

// another is a waiter of the same process that sleeps.
func (x *cancellation) another() *caller {
	x.Helper()
	reached := x.keep(harness.SHA(x, acquireOf(false)), 2)
	w := start(x, context.Background(), x.lock())
	x.reached(reached)
	require.NoError(x, x.g.Open())
	harness.Eventually(x, soon, "it sleeps", func() bool { return harness.GoroutinesIn("(*Waiter).attempt") == 0 })
	return w
}

// TestCancelledAnywhereLeavesNoPlace cancels an acquisition at every point where it
// waits for something. Whoever is behind it gets the lock as if it had not been there.
func TestCancelledAnywhereLeavesNoPlace(t *testing.T) {
	const atOnce = 2 * time.Second // well under any timeout of the connection
	points := []struct {
		name  string
		where string // the lock is held: "", "here" or "there"
		// at brings the acquisition to its point.
		at            func(x *cancellation)
		indeterminate bool // whether a request for it alone is under way
		unnamed       bool // it does not happen to named owners
		beats         bool // it waits for a sign of life, else nothing lives as long as a test
	}{
		{name: "first attempt, which succeeds", indeterminate: true, at: func(x *cancellation) {
			reached := x.keep(x.attempt(), 1)
			x.begin()
			x.reached(reached)
		}},
		{name: "first attempt, which fails", where: "there", indeterminate: true, at: func(x *cancellation) {
			reached := x.keep(x.attempt(), 1)
			x.begin()
			x.reached(reached)
		}},
		{name: "first attempt, which is lost", where: "there", indeterminate: true, at: func(x *cancellation) {
			harness.Do(x, x.s.Addr, "CLIENT", "PAUSE", "500", "WRITE")
			x.begin()
			harness.Eventually(x, soon, "it is sent", func() bool { return harness.GoroutinesIn("(*hold).Try") == 1 })
		}},
		{name: "subscription", where: "there", at: func(x *cancellation) {
			reached := x.keep("\r\nSUBSCRIBE", 1)
			x.begin()
			x.reached(reached)
		}},
		{name: "second attempt, after the subscription", where: "there", indeterminate: true, at: func(x *cancellation) {
			reached := x.keep(x.attempt(), 2)
			x.begin()
			x.reached(reached)
		}},
		{name: "wait for a message", where: "there", at: func(x *cancellation) { x.asleep(2) }},
		{name: "attempt after a message, which succeeds", where: "there", indeterminate: true, at: func(x *cancellation) {
			x.asleep(2)
			reached := x.keep(x.attempt(), 1)
			require.NoError(x, x.held.Unlock(context.Background()))
			x.reached(reached)
		}},
		{name: "wait behind a waiter of the same process", where: "there", at: func(x *cancellation) {
			x.before = []*caller{x.another()}
			x.asleep(1)
		}},
		{name: "first attempt behind a waiter of the same process", where: "there", indeterminate: true, at: func(x *cancellation) {
			x.before = []*caller{x.another()}
			reached := x.keep(x.attempt(), 1)
			x.begin()
			x.reached(reached)
		}},
		{name: "attempt that another makes for it", where: "there", unnamed: true, at: func(x *cancellation) {
			first, several := together(x.T, x.g, x.lock(), 1)
			x.begin()
			harness.Eventually(x, soon, "it waits", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == 2 })
			x.before = []*caller{first, several[0]}
			// What holds up the answer is the server.
			harness.Do(x, x.s.Addr, "CLIENT", "PAUSE", "300", "WRITE")
			require.NoError(x, x.g.Open())
			harness.Eventually(x, soon, "it is tried for", func() bool { return harness.GoroutinesIn("(*hold).TryAll") == 1 })
		}},
		{name: "wait behind a holder of the same process", where: "here", at: func(x *cancellation) { x.asleep(1) }},
		{name: "hand-off, or the release in its place", where: "here", at: func(x *cancellation) {
			x.asleep(1)
			file := "release.lua"
			reached := x.keep(harness.SHA(x, file), 1)
			go func() { _ = x.held.Unlock(context.Background()) }()
			x.reached(reached)
		}},
		{name: "sign of life", where: "there", beats: true, at: func(x *cancellation) {
			x.asleep(2)
			x.reached(x.keep(harness.SHA(x, "beat.lua"), 1))
		}},
		{name: "sign of life, which arrives when it has left", where: "there", beats: true, at: func(x *cancellation) {
			x.asleep(2)
			x.reached(x.g.Arm(harness.DelayRequest, harness.SHA(x, "beat.lua"), 1))
		}},
	}
	for _, p := range points {
		t.Run(p.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				for _, named := range []bool{false, true} {
					if named && p.unnamed {
						continue
					}
					harness.Do(t, s.Addr, "FLUSHALL")
					harness.WarmUp(t, s.Addr)
					t.Run(map[bool]string{false: "unnamed", true: "named"}[named], func(t *testing.T) {
						timeout := redlatch.WithWatchdogTimeout(time.Minute)
						if p.beats {
							timeout = redlatch.WithWatchdogTimeout(processTimeout)
						}
						c, g := harness.GatedClient(t, s, timeout)
						x := &cancellation{T: t, s: s, c: c, other: harness.Client(t, s, timeout), g: g, named: named}
						switch p.where {
						case "here":
							x.held = mustLock(t, x.lock())
						case "there":
							x.held = mustLock(t, x.other.FairLock("orders"))
						}
						ctx := context.Background()
						if named {
							ctx = lock.WithOwner(ctx, c.NewOwner())
						}
						x.begin = func() { x.w = start(t, ctx, x.lock()) }
						p.at(x)
						var last *caller
						if x.held != nil {
							last = start(t, context.Background(), x.other.FairLock("orders"))
						}
						gone := errors.New("gone")
						x.w.cancel(gone)
						select {
						case <-x.w.ended:
						case <-time.After(atOnce):
							require.Fail(t, "the call did not return")
						}
						require.ErrorIs(t, x.w.err, gone)
						require.ErrorIs(t, x.w.err, lock.ErrNotAcquired)
						require.Equal(t, p.indeterminate, errors.Is(x.w.err, lock.ErrIndeterminate), "%v", x.w.err)
						require.NoError(t, g.Open())
						begin := time.Now()
						if x.held != nil {
							_ = x.held.Unlock(context.Background())
						}
						inOrder(t, x.before...)
						if last != nil {
							inOrder(t, last)
						}
						harness.NothingLeft(t, s.Addr)
						if !named { // the tickets of others stay for a while
							require.Less(t, time.Since(begin), 4*time.Second) // well before any poll
						}
						harness.Eventually(t, atOnce, "nobody listens", func() bool { return c.PubSub().Listeners == 0 })
						require.NoError(t, x.lock().Do(context.Background(), nothing))
					})
				}
			})
		})
	}
}
