package fairlock_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// ambiguityTimeout is that of the watchdog: a sign of life that is lost in silence is
// given again before the place is gone.
const ambiguityTimeout = 12 * time.Second

// gatedClient returns a client behind a gate that soon notices a server that is
// silent. Its logs are of no interest.
func gatedClient(t testing.TB, s *testserver.Server) (*redlatch.Client, *harness.Gate) {
	t.Helper()
	g := harness.NewGate(t, s)
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{
		InitAddress: []string{g.Addr}, ConnWriteTimeout: time.Second, Dialer: net.Dialer{KeepAlive: 200 * time.Millisecond},
	}, redlatch.WithWatchdogTimeout(ambiguityTimeout), redlatch.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(c.Close)
	t.Cleanup(func() { _ = g.Open() })
	return c, g
}

// ambiguity is one case of TestEveryFateOfEveryRequestInTheQueue.
type ambiguity struct {
	*testing.T
	s     *testserver.Server
	c     *redlatch.Client // behind the gate
	g     *harness.Gate
	l     *fairlock.Lock   // of c
	other *redlatch.Client // not behind the gate
	ctx   context.Context
	named bool
	fate  harness.Fate
	file  string // of the script whose request meets the fate
}

// acts reports whether the server sees the request in time.
func (a *ambiguity) acts() bool {
	return a.fate != harness.LoseRequest && a.fate != harness.DelayRequest
}

// theirs is the same lock for the client that is not behind the gate.
func (a *ambiguity) theirs() *fairlock.Lock { return a.other.FairLock(a.l.Name()) }

// doubted is called for a waiter who may have the lock without having heard of it:
// then it has it under another owner than it waited with.
func (a *ambiguity) doubted(w *caller) {
	if a.fate.Unknown() {
		w.owner = ""
	}
}

// behind queues a waiter of the other client.
func (a *ambiguity) behind() *caller {
	a.Helper()
	return queue(a, context.Background(), a.s.Addr, a.theirs())
}

// asleep queues a waiter of the client behind the gate, the first one of it, and
// returns when that has made its second attempt, after its subscription.
func (a *ambiguity) asleep(named bool) *caller {
	a.Helper()
	ctx := context.Background()
	if named {
		ctx = a.ctx
	}
	reached := a.g.Arm(harness.KeepReply, harness.SHA(a, acquireOf(named)), 2)
	w := queue(a, ctx, a.s.Addr, a.l)
	a.after(reached)
	require.NoError(a, a.g.Open())
	a.quiet()
	return w
}

// quiet waits until the attempts of waiters that the server has seen are over.
func (a *ambiguity) quiet() {
	a.Helper()
	harness.Eventually(a, soon, "no attempt is under way", func() bool { return harness.GoroutinesIn("(*Waiter).attempt") == 0 })
}

func acquireOf(named bool) string {
	if named {
		return "acquire_named.lua"
	}
	return "acquire.lua"
}

// arm marks the next request of the script.
func (a *ambiguity) arm() (reached <-chan struct{}) {
	return a.g.Arm(a.fate, harness.SHA(a, a.file), 1)
}

// after waits until the request has met its fate.
func (a *ambiguity) after(reached <-chan struct{}) {
	a.Helper()
	select {
	case <-reached:
	case <-time.After(2 * soon):
		require.FailNow(a, "the request was not sent")
	}
}

// during runs what sends the request, and opens the gate: after it, or once a
// reply is kept back that it waits for.
func (a *ambiguity) during(operation func()) {
	a.Helper()
	reached := a.arm()
	done := make(chan struct{})
	go func() {
		defer close(done)
		operation()
	}()
	a.after(reached)
	if a.fate == harness.KeepReply {
		require.NoError(a, a.g.Open())
	}
	<-done
	require.NoError(a, a.g.Open())
}

// ambiguities are the requests of a fair lock.
var ambiguities = []struct {
	name           string
	unnamed, named string // the script; "" where none is sent
	run            func(a *ambiguity)
}{
	{"the first attempt", "acquire.lua", "acquire_named.lua", func(a *ambiguity) {
		h := mustLock(a, a.theirs())
		reached := a.arm()
		w := start(a, a.ctx, a.l)
		a.after(reached)
		if a.fate == harness.KeepReply {
			require.NoError(a, a.g.Open())
		}
		if a.fate.Unknown() {
			require.ErrorIs(a, w.end(), lock.ErrIndeterminate)
			require.NotErrorIs(a, w.err, lock.ErrNotAcquired)
			require.NoError(a, a.g.Open())
			harness.Eventually(a, soon, "its place is given up, or nobody keeps it", func() bool {
				waiters, err := a.theirs().Queue(context.Background())
				return err == nil && len(waiters) == 0
			})
			if a.fate != harness.DelayRequest || !a.named {
				require.Empty(a, line(a, a.s.Addr, a.l.Name()))
			}
			require.NoError(a, h.Unlock(a.ctx))
			inOrder(a, start(a, context.Background(), a.theirs()))
			return
		}
		harness.Eventually(a, soon, "it has a place", func() bool { return len(line(a, a.s.Addr, a.l.Name())) == 1 })
		last := a.behind()
		require.NoError(a, h.Unlock(a.ctx))
		inOrder(a, w, last)
	}},
	{"the first attempt behind a waiter of the same process", "acquire.lua", "acquire_named.lua", func(a *ambiguity) {
		h := mustLock(a, a.theirs())
		first := a.asleep(false)
		reached := a.arm()
		w := start(a, a.ctx, a.l)
		a.after(reached)
		var last *caller
		if a.acts() {
			require.Len(a, line(a, a.s.Addr, a.l.Name()), 2)
			last = a.behind()
		} else {
			last = start(a, context.Background(), a.theirs())
		}
		require.NoError(a, a.g.Open())
		harness.Eventually(a, soon, "all have a place", func() bool { return len(line(a, a.s.Addr, a.l.Name())) == 3 })
		require.NoError(a, h.Unlock(a.ctx))
		if a.acts() {
			inOrder(a, first, w, last)
			return
		}
		inOrder(a, first)
		var wg sync.WaitGroup
		for _, w := range []*caller{w, last} {
			wg.Go(func() { assert.NoError(a, w.acquired().Unlock(a.ctx)) })
		}
		wg.Wait()
	}},
	{"the attempt that succeeds", "acquire.lua", "acquire_named.lua", func(a *ambiguity) {
		h := mustLock(a, a.theirs())
		w := a.asleep(a.named)
		last := a.behind()
		reached := a.arm()
		require.NoError(a, h.Unlock(a.ctx))
		a.after(reached)
		if !a.fate.Unknown() || !a.named {
			require.True(a, last.waiting(), "one has overtaken another")
		}
		require.NoError(a, a.g.Open())
		if !a.fate.Unknown() || !a.named {
			a.doubted(w)
			inOrder(a, w, last)
			return
		}
		// A named owner gives back what it may have got, and queues anew.
		var wg sync.WaitGroup
		for _, w := range []*caller{w, last} {
			wg.Go(func() { assert.NoError(a, w.acquired().Unlock(a.ctx)) })
		}
		wg.Wait()
	}},
	{"the hand-off", "release.lua", "", func(a *ambiguity) {
		h := mustLock(a, a.l)
		w := queue(a, a.ctx, a.s.Addr, a.l)
		last := a.behind()
		a.quiet()
		a.during(func() { assert.NoError(a, h.Unlock(a.ctx)) })
		a.doubted(w)
		inOrder(a, w, last)
	}},
	{"the release", "release.lua", "release_named.lua", func(a *ambiguity) {
		h, err := a.l.Lock(a.ctx)
		require.NoError(a, err)
		last := a.behind()
		begin := time.Now()
		a.during(func() { err = h.Unlock(a.ctx) })
		if a.fate == harness.Resend && !a.named {
			// All that the client hears is that its owner does not hold the lock.
			require.ErrorIs(a, err, lock.ErrLost)
		} else {
			require.NoError(a, err)
		}
		next := last.acquired()
		require.Less(a, last.at.Sub(begin), 5*time.Second)
		require.NoError(a, next.Unlock(a.ctx))
	}},
	{"a sign of life", "beat.lua", "beat.lua", func(a *ambiguity) {
		h := mustLock(a, a.theirs())
		w := a.asleep(a.named)
		last := a.behind()
		reached := a.arm()
		a.after(reached)
		if a.fate == harness.KeepReply {
			require.NoError(a, a.g.Open())
		}
		<-time.After(ambiguityTimeout / 3) // for as long as a place is kept without
		require.NoError(a, a.g.Open())
		waiters, err := a.theirs().Queue(context.Background())
		require.NoError(a, err)
		require.Len(a, waiters, 2)
		require.NoError(a, h.Unlock(a.ctx))
		inOrder(a, w, last)
	}},
	{"the leave", "leave.lua", "leave.lua", func(a *ambiguity) {
		h := mustLock(a, a.theirs())
		w := a.asleep(a.named)
		last := a.behind()
		reached := a.arm()
		w.cancel(nil)
		require.ErrorIs(a, w.end(), lock.ErrNotAcquired)
		require.NotErrorIs(a, w.err, lock.ErrIndeterminate)
		a.after(reached)
		if a.fate == harness.KeepReply {
			require.NoError(a, a.g.Open())
		}
		noTrace(a, a.s.Addr, a.l.Name(), w.owner)
		require.NoError(a, a.g.Open())
		require.Equal(a, []string{last.owner}, line(a, a.s.Addr, a.l.Name()))
		require.NoError(a, h.Unlock(a.ctx))
		inOrder(a, last)
	}},
	{"the extension", "../internal/locking/extend.lua", "../internal/locking/extend.lua", func(a *ambiguity) {
		h, err := a.l.Lock(a.ctx, lock.Lease(30*time.Second))
		require.NoError(a, err)
		last := a.behind()
		a.during(func() { err = h.Extend(a.ctx, time.Minute) })
		if a.fate.Unknown() {
			require.Error(a, err)
			require.NotErrorIs(a, err, lock.ErrLost)
			require.NotErrorIs(a, err, lock.ErrNotHeld)
			require.NoError(a, h.Extend(a.ctx, time.Minute))
		} else {
			require.NoError(a, err)
		}
		require.Greater(a, h.Remaining(), 40*time.Second)
		require.Equal(a, 1, harness.HoldCount(a, a.theirs(), h.Owner()))
		require.NoError(a, h.Unlock(a.ctx))
		inOrder(a, last)
	}},
}

// Whatever becomes of a request, nobody loses the place, nobody has the lock who does
// not know it, and nothing is left. Who may not have been heard yet may come later.
func TestEveryFateOfEveryRequestInTheQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		other := harness.Client(t, s, redlatch.WithWatchdogTimeout(ambiguityTimeout))
		for _, op := range ambiguities {
			t.Run(op.name, func(t *testing.T) {
				var cases sync.WaitGroup // they wait most of the time
				for _, fate := range harness.Fates {
					for _, named := range []bool{false, true} {
						owner, file := "unnamed", op.unnamed
						if named {
							owner, file = "named", op.named
						}
						if file == "" {
							continue
						}
						name := fmt.Sprintf("%s, %v, %s", op.name, fate, owner)
						c, g := gatedClient(t, s) // one by one: it is impatient
						cases.Go(func() {
							t.Run(fmt.Sprintf("%v, %s", fate, owner), func(t *testing.T) {
								a := &ambiguity{
									T: t, s: s, c: c, g: g, l: c.FairLock(name), other: other,
									ctx: context.Background(), named: named, fate: fate, file: file,
								}
								if named {
									a.ctx = lock.WithOwner(a.ctx, c.NewOwner())
								}
								op.run(a)
								require.NoError(t, a.g.Open())
								// Whatever is still there is given back well before its lease is over.
								harness.Eventually(t, soon, "the lock is free", func() bool { return !harness.IsLocked(t, a.theirs()) })
								require.NoError(t, a.theirs().Do(context.Background(), nothing))
								noQueue(t, s, name)
							})
						})
					}
				}
				cases.Wait()
			})
		}
		harness.Eventually(t, 20*time.Second, "nothing is under way", func() bool { return harness.GoroutinesIn("(*Lock).settle") == 0 })
		harness.NothingStays(t, s.Addr)
	})
}

// noQueue fails the test unless there soon is no queue of the lock.
func noQueue(t testing.TB, s *testserver.Server, name string) {
	t.Helper()
	harness.Eventually(t, soon, "there is no queue", func() bool {
		return len(line(t, s.Addr, name)) == 0 && len(ask(t, s.Addr, "ZRANGE", deadlinesKey(name), "0", "-1")) == 0 &&
			len(ask(t, s.Addr, "ZRANGE", aliveKey(name), "0", "-1")) == 0
	})
}

// One attempt is for several waiters.
func TestEveryFateOfAnAttemptForSeveral(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		other := harness.Client(t, s)
		for _, fate := range harness.Fates {
			t.Run(fate.String(), func(t *testing.T) {
				name := "orders, " + fate.String()
				inner := harness.NewGate(t, s)
				c, outer := gatedClient(t, &testserver.Server{Addr: inner.Addr})
				h := mustLock(t, other.FairLock(name))
				first, several := together(t, outer, c.FairLock(name), 3)
				reached := inner.Arm(fate, harness.SHA(t, "acquire.lua"), 1)
				require.NoError(t, outer.Open())
				<-reached
				harness.Eventually(t, soon, "the first has its place", func() bool { return len(line(t, s.Addr, name)) > 0 })
				last := start(t, context.Background(), other.FairLock(name))
				harness.Eventually(t, soon, "the last has its place", func() bool {
					return strings.HasPrefix(strings.Join(tail(line(t, s.Addr, name)), ""), other.ID())
				})
				before := len(line(t, s.Addr, name))
				require.NoError(t, inner.Open())
				// After a pause, but well before any poll of the first.
				harness.Eventually(t, 3*time.Second, "all have", func() bool { return len(line(t, s.Addr, name)) == 5 })
				require.NoError(t, h.Unlock(t.Context()))
				if fate != harness.LoseRequest && fate != harness.DelayRequest {
					require.Equal(t, 5, before)
					inOrder(t, slices.Concat([]*caller{first}, several, []*caller{last})...)
				} else {
					require.Equal(t, 2, before)
					inOrder(t, slices.Concat([]*caller{first, last}, several)...)
				}
				noQueue(t, s, name)
			})
		}
		harness.Eventually(t, 20*time.Second, "nothing is under way", func() bool { return harness.GoroutinesIn("(*Lock).settle") == 0 })
		harness.NothingLeft(t, s.Addr)
	})
}

func tail(owners []string) []string { return owners[max(len(owners)-1, 0):] }

// together starts n waiters while the reply to the attempt of a first one is kept back
// by the gate. When that opens, one attempt is made for all of them.
func together(t *testing.T, g *harness.Gate, l *fairlock.Lock, n int) (first *caller, several []*caller) {
	t.Helper()
	reached := g.Arm(harness.KeepReply, harness.SHA(t, "acquire.lua"), 1)
	first = start(t, context.Background(), l)
	<-reached
	for i := range n {
		several = append(several, start(t, context.Background(), l))
		harness.Eventually(t, soon, "it waits", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == i+1 })
	}
	return first, several
}

// The request of a waiter arrives late, when one that came after it to the same
// process has its place. The process has them in another order than the server, and
// both get in.
func TestARequestForAPlaceArrivesLate(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		c, g := gatedClient(t, s)
		l := c.FairLock("orders")
		h := mustLock(t, harness.Client(t, s).FairLock("orders"))
		first := asleep(t, t.Context(), s.Addr, l)
		reached := g.Arm(harness.DelayRequest, harness.SHA(t, "acquire.lua"), 1)
		late := start(t, t.Context(), l)
		<-reached
		next := queue(t, t.Context(), s.Addr, l)
		require.NoError(t, g.Open())
		harness.Eventually(t, soon, "all have a place", func() bool { return len(line(t, s.Addr, "orders")) == 3 })
		owners := line(t, s.Addr, "orders")
		// Usually. It may have asked again before.
		t.Log("the late one is the last:", owners[1] == next.owner)
		require.NoError(t, h.Unlock(t.Context()))
		inOrder(t, first)
		begin := time.Now()
		var wg sync.WaitGroup
		for _, w := range []*caller{next, late} {
			wg.Go(func() { assert.NoError(t, w.acquired().Unlock(context.Background())) })
		}
		wg.Wait()
		// At the next sign of life.
		require.Less(t, time.Since(begin), ambiguityTimeout/9+slack)
		harness.NothingLeft(t, s.Addr)
	})
}
