package semaphore_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// departure is a wait for permits that ends before it has them.
type departure struct {
	*testing.T
	kind        string
	c           *redlatch.Client // behind the gate
	g           *harness.Gate
	mine, other *taker // the other client is not behind the gate
	ctx         context.Context
	opts        []lock.Option
	waits       []wait // those that are to end
	stays       []wait // others of the same process
	releasing   chan error
}

// wait is a wait that was started.
type wait struct {
	k    *taker
	done <-chan error
}

const departureTotal = 4 // permits

func (d *departure) script(file string) string {
	if d.kind == expirableKind {
		file = "permit_" + file
	}
	return nameOf(d, file)
}

// start begins a wait for two permits that is to end.
func (d *departure) start() {
	k := takerOf(d.c, &testserver.Server{Addr: d.mine.addr}, d.kind, d.mine.name)
	d.waits = append(d.waits, wait{k, k.start(d.ctx, 2, d.opts...)})
}

// stay begins a wait for a permit that goes on.
func (d *departure) stay() {
	k := takerOf(d.c, &testserver.Server{Addr: d.mine.addr}, d.kind, d.mine.name)
	d.stays = append(d.stays, wait{k, k.start(context.Background(), 1)})
}

// queued waits until all that was started waits in the queue of the process.
func (d *departure) queued() {
	n := len(d.waits) + len(d.stays)
	harness.Eventually(d, faultSoon, "all wait", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == n })
}

// hold keeps back the reply to the n-th request of that kind from now, which begin
// brings about, and returns when it is there.
func (d *departure) hold(match string, n int, begin func()) {
	reached := d.g.Arm(harness.KeepReply, match, n)
	begin()
	select {
	case <-reached:
	case <-time.After(faultSoon):
		require.FailNow(d, "the request was not sent")
	}
}

// release has a client give back what it has.
func (d *departure) release(k *taker) {
	go func() { d.releasing <- k.release(context.Background()) }()
}

// Departures, at every point where a wait for permits waits for something.
var departures = []struct {
	name          string
	taken         string // who has all permits: "", "other", "mine"
	indeterminate bool   // whether a request for it alone is under way
	at            func(d *departure)
}{
	{"first attempt, which succeeds", "", true, func(d *departure) {
		d.hold(d.script("acquire.lua"), 1, d.start)
	}},
	{"first attempt, which fails", "other", true, func(d *departure) {
		d.hold(d.script("acquire.lua"), 1, d.start)
	}},
	{"subscription", "other", false, func(d *departure) {
		d.hold("\r\nSUBSCRIBE", 1, d.start)
	}},
	{"second attempt, after the subscription", "other", true, func(d *departure) {
		d.hold(d.script("acquire.lua"), 2, d.start)
	}},
	{"attempt that puts it in line", "other", true, func(d *departure) {
		d.hold(d.script("acquire.lua"), 3, d.start)
		require.Equal(d, ":1", standsInLine(d, d.mine.addr, d.mine.name))
	}},
	{"in line", "other", false, func(d *departure) {
		d.start()
		awaitPlace(d, d.mine.addr, d.mine.name)
	}},
	{"first in line, others behind it", "other", false, func(d *departure) {
		d.start()
		awaitPlace(d, d.mine.addr, d.mine.name)
		d.stay()
		d.queued()
	}},
	{"behind another", "other", false, func(d *departure) {
		d.stay()
		awaitPlace(d, d.mine.addr, d.mine.name)
		d.start()
		d.queued()
	}},
	{"attempt after a message, which succeeds", "other", true, func(d *departure) {
		d.start()
		awaitPlace(d, d.mine.addr, d.mine.name)
		d.hold(d.script("acquire.lua"), 1, func() { d.release(d.other) })
	}},
	{"attempt for several, its own first", "other", false, func(d *departure) {
		d.start()
		awaitPlace(d, d.mine.addr, d.mine.name)
		d.stay()
		d.queued()
		d.hold(d.script("acquire.lua"), 1, func() { d.release(d.other) })
	}},
	{"attempt for several, its own behind", "other", false, func(d *departure) {
		d.stay()
		awaitPlace(d, d.mine.addr, d.mine.name)
		d.start()
		d.stay()
		d.queued()
		d.hold(d.script("acquire.lua"), 1, func() { d.release(d.other) })
	}},
	{"attempt for several, all of which leave", "other", false, func(d *departure) {
		d.start()
		awaitPlace(d, d.mine.addr, d.mine.name)
		d.start()
		d.start()
		d.queued()
		d.hold(d.script("acquire.lua"), 1, func() { d.release(d.other) })
	}},
	{"release of this process", "mine", false, func(d *departure) {
		d.start()
		awaitPlace(d, d.mine.addr, d.mine.name)
		d.hold(d.script("release.lua"), 1, func() { d.release(d.mine) })
	}},
	{"release of this process, for several", "mine", false, func(d *departure) {
		d.stay()
		awaitPlace(d, d.mine.addr, d.mine.name)
		d.start()
		d.stay()
		d.queued()
		d.hold(d.script("release.lua"), 1, func() { d.release(d.mine) })
	}},
}

// eachDeparture runs a test for both kinds of semaphore at every point. The test calls
// at, which brings the wait there.
func eachDeparture(t *testing.T, waits [][]lock.Option, test func(d *departure, at func(), indeterminate bool)) {
	for _, p := range departures {
		t.Run(p.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				for _, kind := range faultKinds {
					for _, opts := range waits {
						harness.Do(t, s.Addr, "FLUSHALL")
						loadScripts(t, s.Addr)
						c, g := gatedFor(t, s)
						other := harness.Client(t, s)
						d := &departure{
							T: t, kind: kind, c: c, g: g,
							mine: takerOf(c, s, kind, "pool"), other: takerOf(other, s, kind, "pool"),
							ctx: context.Background(), opts: opts, releasing: make(chan error, 1),
						}
						_, err := d.other.set(t.Context(), departureTotal)
						require.NoError(t, err)
						switch p.taken {
						case "mine":
							require.NoError(t, d.mine.try(t.Context(), departureTotal))
						case "other":
							require.NoError(t, d.other.try(t.Context(), departureTotal))
						}
						test(d, func() { p.at(d) }, p.indeterminate)
						c.Close()
						other.Close()
					}
				}
			})
		})
	}
}

// letGo lets everybody who is left end, and checks that every permit is where it should
// be, that nobody stands in line any more, and that nobody listens.
func (d *departure) letGo() {
	d.Helper()
	ctx := context.Background()
	all := []*taker{d.mine, d.other}
	if n, _ := d.other.held(); n > 0 {
		require.NoError(d, d.other.release(ctx))
	}
	for _, w := range d.stays {
		all = append(all, w.k)
	}
	settled(d)
	requireExact(d, departureTotal, all...)
	require.Equal(d, ":0", standsInLine(d, d.mine.addr, d.mine.name), "clients in line")
	harness.Eventually(d, faultSoon, "nobody listens", func() bool { return d.c.PubSub().Listeners == 0 })
}

func TestLeavingAnywhereCostsNoPermits(t *testing.T) {
	const soon = 2 * time.Second
	waits := [][]lock.Option{nil, {lock.Wait(time.Minute)}}
	eachDeparture(t, waits, func(d *departure, at func(), indeterminate bool) {
		gone := errors.New("gone")
		ctx, cancel := context.WithCancelCause(d.ctx)
		d.ctx = ctx
		at()
		cancel(gone)
		for _, w := range d.waits {
			select {
			case err := <-w.done:
				require.ErrorIs(d, err, gone)
				require.ErrorIs(d, err, lock.ErrNotAcquired)
				require.Equal(d, indeterminate, errors.Is(err, lock.ErrIndeterminate), "%v", err)
			case <-time.After(soon):
				require.FailNow(d, "the call did not return")
			}
		}
		require.NoError(d, d.g.Open())
		if n, _ := d.other.held(); n > 0 {
			d.release(d.other)
		}
		for _, w := range d.stays {
			require.NoError(d, await(d, w.done))
		}
		d.letGo()
		for _, w := range d.stays {
			require.NoError(d, w.k.release(context.Background()))
		}
		// And the semaphore works as if nothing had been.
		for _, k := range []*taker{d.mine, d.other} {
			require.NoError(d, k.try(context.Background(), departureTotal))
			require.NoError(d, k.release(context.Background()))
		}
	})
}

// Close ends all waits, and gives back what they may have got, before it returns.
func TestClosingAnywhereCostsNoPermits(t *testing.T) {
	eachDeparture(t, [][]lock.Option{nil}, func(d *departure, at func(), _ bool) {
		at()
		began := time.Now()
		d.c.Close()
		// A connection that is silent is given up after a second or two; then one more
		// request gives back.
		require.Less(d, time.Since(began), faultSoon)
		for _, w := range append(d.waits, d.stays...) {
			if err := await(d, w.done); err != nil {
				require.ErrorIs(d, err, lock.ErrClosed)
				require.NotErrorIs(d, err, lock.ErrNotAcquired)
			}
			d.stays = append(d.stays, w)
		}
		require.NoError(d, d.g.Open())
		settled(d)
		d.letGo()
	})
}

// The request that gives something back in the background is lost just when the client
// is closed.
func TestCloseGivesBackWhatIsInDoubt(t *testing.T) {
	tests := []struct {
		name   string
		script string // that gives back
		begin  func(d *departure)
	}{
		{"an attempt", "undo.lua", func(d *departure) {
			d.hold(d.script("acquire.lua"), 1, d.start)
		}},
		{"a place in line", "leave.lua", func(d *departure) {
			require.NoError(d, d.other.try(d.ctx, departureTotal))
			d.start()
			awaitPlace(d, d.mine.addr, d.mine.name)
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				for _, kind := range faultKinds {
					harness.Do(t, s.Addr, "FLUSHALL")
					loadScripts(t, s.Addr)
					c, g := gatedFor(t, s)
					ctx, cancel := context.WithCancel(t.Context())
					d := &departure{
						T: t, kind: kind, c: c, g: g, ctx: ctx,
						mine: takerOf(c, s, kind, "pool"), other: takerOf(harness.Client(t, s), s, kind, "pool"),
					}
					_, err := d.other.set(ctx, departureTotal)
					require.NoError(t, err)
					tt.begin(d)
					script := nameOf(t, tt.script)
					if tt.script != "leave.lua" {
						script = d.script(tt.script)
					}
					reached := g.Arm(harness.LoseRequest, script, 1)
					cancel()
					<-reached
					c.Close()
					require.Error(t, await(t, d.waits[0].done))
					require.NoError(t, g.Open())
					d.letGo()
				}
			})
		})
	}
}

// A place in line is that of all who wait in a process: when the first of them leaves,
// the next has one of its own, whichever the server hears of first.
func TestWhoLeavesTheLineLeavesItToTheNext(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range faultKinds {
			c := harness.Client(t, s)
			ctx := t.Context()
			other := takerOf(harness.Client(t, s), s, kind, kind)
			_, err := other.set(ctx, 1)
			require.NoError(t, err)
			require.NoError(t, other.try(ctx, 1))
			place := func() string {
				line, err := testserver.Query(s.Addr, "ZRANGE", wire.SemaphoreWaiting(kind), "0", "0", "WITHSCORES")
				require.NoError(t, err)
				return strings.Join(line, " ")
			}
			first, leave := context.WithCancel(ctx)
			leaving := takerOf(c, s, kind, kind).start(first, 1)
			awaitPlace(t, s.Addr, kind)
			for range 10 {
				before := place()
				next, leaveNext := context.WithCancel(ctx)
				waiter := takerOf(c, s, kind, kind).start(next, 1)
				harness.Eventually(t, faultSoon, "both wait", func() bool { return harness.GoroutinesIn("(*Waiter).wait") == 2 })
				leave()
				require.ErrorIs(t, await(t, leaving), lock.ErrNotAcquired)
				settled(t)
				// Signs of life are given every 3 s.
				harness.Eventually(t, time.Second, "the next has a place", func() bool { return place() != "" && place() != before })
				leave, leaving = leaveNext, waiter
			}
			leave()
			require.ErrorIs(t, await(t, leaving), lock.ErrNotAcquired)
			settled(t)
			require.Empty(t, place())
			require.NoError(t, other.release(ctx))
		}
	})
}

// An attempt is sent before a request may come into line, and answered after.
func TestAnAnswerThatIsLateDelaysThePlaceInLineByNoMore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		loadScripts(t, s.Addr)
		for _, kind := range faultKinds {
			c, g := gatedFor(t, s)
			elsewhere := harness.Client(t, s)
			d := &departure{
				T: t, kind: kind, c: c, g: g, ctx: t.Context(), releasing: make(chan error, 1),
				mine: takerOf(c, s, kind, kind), other: takerOf(elsewhere, s, kind, kind),
			}
			rest := takerOf(elsewhere, s, kind, kind)
			_, err := d.other.set(t.Context(), 2)
			require.NoError(t, err)
			require.NoError(t, d.other.try(t.Context(), 1))
			require.NoError(t, rest.try(t.Context(), 1))
			d.stay()
			awaitPlace(t, s.Addr, kind)
			d.hold(d.script("acquire.lua"), 1, func() {
				d.start()
				d.queued()
				d.release(d.other)
			})
			<-time.After(150 * time.Millisecond) // others may overtake for 100
			require.Equal(t, ":0", standsInLine(t, s.Addr, kind))
			require.NoError(t, g.Open())
			require.NoError(t, await(t, d.stays[0].done))
			harness.Eventually(t, time.Second, "the next is in line", func() bool { return standsInLine(t, s.Addr, kind) == ":1" })
			require.NoError(t, rest.release(t.Context()))
			require.NoError(t, d.stays[0].k.release(t.Context()))
			require.NoError(t, await(t, d.waits[0].done))
			require.NoError(t, d.waits[0].k.release(t.Context()))
		}
	})
}

// Close waits for a release that the server has not answered.
func TestCloseWaitsForReleases(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range faultKinds {
			for _, n := range []int{1, 2} {
				harness.Do(t, s.Addr, "DEL", kind)
				c := harness.Client(t, s)
				k := takerOf(c, s, kind, kind)
				_, err := k.set(t.Context(), n)
				require.NoError(t, err)
				require.NoError(t, k.try(t.Context(), n))
				harness.Do(t, s.Addr, "CLIENT", "PAUSE", "30000", "WRITE")
				released := make(chan error, 1)
				go func() { released <- k.release(context.Background()) }()
				harness.Eventually(t, faultSoon, "it is under way", func() bool { return blocked(t, s.Addr) })
				closed := make(chan struct{})
				go func() {
					c.Close()
					close(closed)
				}()
				harness.Eventually(t, faultSoon, "the client is being closed", func() bool { return harness.GoroutinesIn("(*Session).Close") == 1 })
				harness.Do(t, s.Addr, "CLIENT", "UNPAUSE")
				<-closed
				require.NoError(t, await(t, released))
				requireExact(t, n, k)
			}
		}
	})
}

// Whoever was served when it had left gives the permits back, but not to a semaphore
// that was deleted meanwhile: that would make another one.
func TestWhatIsGivenBackMakesNoSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		loadScripts(t, s.Addr)
		c, g := gatedFor(t, s)
		mine, other := takerOf(c, s, plainKind, "pool"), takerOf(harness.Client(t, s), s, plainKind, "pool")
		made, err := other.set(t.Context(), 0)
		require.NoError(t, err)
		require.True(t, made)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		waits := []<-chan error{mine.start(ctx, 1), mine.start(ctx, 1)}
		awaitPlace(t, s.Addr, "pool")
		reached := g.Arm(harness.KeepReply, nameOf(t, "acquire.lua"), 1)
		require.NoError(t, other.plain.Release(t.Context(), 2))
		<-reached
		cancel()
		for _, done := range waits {
			require.ErrorIs(t, await(t, done), context.Canceled)
		}
		harness.Do(t, s.Addr, "DEL", "pool")
		require.NoError(t, g.Open())
		harness.Eventually(t, faultSoon, "the attempt is over", func() bool { return harness.GoroutinesIn("(*Waiter).attempt") == 0 })
		settled(t)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "pool"))
	})
}
