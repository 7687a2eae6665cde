package contract_test

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

func TestTTL(t *testing.T) {
	eachKind(t, owned, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l := k.lock(c, "orders")
		ttl := func() time.Duration {
			ttl, err := l.TTL(t.Context())
			require.NoError(t, err)
			return ttl
		}
		leases := map[time.Duration][]lock.Option{
			time.Hour: {lock.Lease(time.Hour)}, lock.MaxLease: {lock.Lease(lock.MaxLease), lock.Lease(lock.MaxLease)}, redlatch.DefaultWatchdogTimeout: nil,
		}
		for _, ctx := range k.owners(t, c) {
			for want, opts := range leases {
				begin := time.Now()
				h := mustLock(t, ctx, l, opts...)
				isTaken(t, k.rival(c, "orders"))
				got := ttl()
				require.LessOrEqual(t, got, want)
				require.Greater(t, got, want-time.Since(begin)-10*time.Millisecond)
				require.NoError(t, h.Unlock(ctx))
				require.Zero(t, ttl())
			}
			require.NoError(t, l.Do(ctx, nothing, lock.Wait(math.MaxInt64), lock.MaxHold(math.MaxInt64)))
		}
	})
}

func TestExtend(t *testing.T) {
	eachKind(t, andInMemory(leased), func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l := k.of(c, "orders")
		for _, ctx := range k.owners(t, c) {
			h := mustLock(t, ctx, l, lock.Lease(10*time.Second))
			require.LessOrEqual(t, h.Remaining(), 10*time.Second)
			for _, lease := range []time.Duration{time.Minute, time.Second} { // at least, not at most
				require.NoError(t, h.Extend(t.Context(), lease))
				require.Greater(t, h.Remaining(), 30*time.Second)
				require.LessOrEqual(t, h.Remaining(), time.Minute)
				if k.owned {
					require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(30_000))
					require.LessOrEqual(t, harness.PTTL(t, s.Addr, "orders"), int64(60_000))
				}
			}
			for _, lease := range []time.Duration{0, -time.Second, math.MaxInt64} {
				require.ErrorIs(t, h.Extend(t.Context(), lease), lock.ErrInvalid)
			}
			var none context.Context
			require.ErrorIs(t, h.Extend(none, time.Second), lock.ErrInvalid)
			require.ErrorIs(t, h.Unlock(none), lock.ErrInvalid)
			require.NoError(t, h.Unlock(t.Context()))
			require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrNotHeld)

			h = mustLock(t, ctx, l)
			k.forgotten(t, s.Addr, h.Context())
			require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
			require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
	})
}

// The owner whose lease is over does not get away with its late Unlock, which spares the next hold. Real
// servers and processes show it in TestAHolderIsKilledOrStopped.
func TestAWaiterGetsInWhenTheLeaseIsOver(t *testing.T) {
	const lease = 500 * time.Millisecond
	eachVirtually(t, andInMemory(leased), func(t *testing.T, s *harness.VirtualServer, k kind) {
		c, other := s.Client(t), s.Client(t)
		for i, next := range []lock.Locker{k.rival(c, "orders"), k.rival(other, "orders"), k.of(c, "orders")} {
			begin := time.Now()
			h1 := mustLock(t, t.Context(), k.of(c, "orders"), lock.Lease(lease))
			if k.shared && i == 2 { // which would get in beside it
				time.Sleep(lease)
			}
			h2 := mustLock(t, t.Context(), next)
			require.GreaterOrEqual(t, time.Since(begin), lease-lease/50) // of which a red lock leaves some to clocks
			if !k.polls {
				require.Less(t, time.Since(begin), lease+100*time.Millisecond)
			}
			synctest.Wait() // both happen at the same time
			require.ErrorIs(t, context.Cause(h1.Context()), lock.ErrLost)
			require.Zero(t, h1.Remaining())
			require.ErrorIs(t, h1.Unlock(t.Context()), lock.ErrLost)
			harness.Idle(t, c)
			require.NoError(t, h2.Context().Err())
			isTaken(t, k.rival(other, "orders"))
			require.NoError(t, h2.Unlock(t.Context()))
		}
	})
}

// What ends a hold is its time, not when somebody notices.
func TestAHoldWhoseTimeIsOverIsLostAtOnce(t *testing.T) {
	eachVirtually(t, andInMemory(leased), func(t *testing.T, s *harness.VirtualServer, k kind) {
		c := s.Client(t)
		for what, end := range map[string]func(lock.Hold) error{
			"Unlock": func(h lock.Hold) error { return h.Unlock(context.Background()) },
			"Extend": func(h lock.Hold) error { return h.Extend(context.Background(), time.Second) },
		} {
			h := mustLock(t, t.Context(), k.of(c, "orders"), lock.Lease(250*time.Millisecond))
			time.Sleep(h.Remaining() - time.Nanosecond)
			require.NoError(t, h.Context().Err())
			time.Sleep(time.Nanosecond)
			require.ErrorIs(t, end(h), lock.ErrLost, what)
			require.Error(t, h.Context().Err())
			time.Sleep(time.Second)
			require.NoError(t, k.rival(c, "orders").Do(t.Context(), nothing, lock.Wait(0)))
		}
	})
}

// The last lease of a hold goes on after its MaxHold, until Unlock, also by the owner, releases what the
// server still has.
func TestMaxHold(t *testing.T) {
	const timeout, most = redlatch.DefaultWatchdogTimeout, 45 * time.Second
	eachVirtually(t, andInMemory(leased), func(t *testing.T, s *harness.VirtualServer, k kind) {
		c, other := s.Client(t, redlatch.WithWatchdogTimeout(timeout)), s.Client(t)
		hold := func(ctx context.Context) (h lock.Hold, next <-chan error) {
			begin := time.Now()
			h = mustLock(t, ctx, k.of(c, "orders"), lock.MaxHold(most))
			time.Sleep(most - time.Second) // a waiter may poll
			next = async(func() error { return k.rival(other, "orders").Do(context.Background(), nothing) })
			<-h.Context().Done()
			require.Equal(t, most, time.Since(begin).Round(10*time.Millisecond))
			require.Empty(t, next, "the last lease is not over")
			return h, next
		}
		h, next := hold(t.Context())
		require.NoError(t, ends(t, next, timeout+time.Second)) // some poll
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

		h, next = hold(t.Context())
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		getsIn(t, next)
		if byOwner(k) {
			l, ctx := k.of(c, "orders").(unlocker), lock.WithOwner(t.Context(), c.NewOwner())
			_, next = hold(ctx)
			var loss *lock.LostError
			require.ErrorAs(t, l.UnlockOwner(ctx), &loss)
			require.Equal(t, lock.ReasonMaxHold, loss.Reason)
			getsIn(t, next)
			require.ErrorIs(t, l.UnlockOwner(ctx), lock.ErrNotHeld)
		}
	})
}

// Holds are renewed for as long as they last, and so is what is held several times, in every way, also on a
// server that is nearly half of the watchdog timeout away. TestEveryKindInACluster shows it on real servers.
func TestEveryKindIsRenewed(t *testing.T) {
	const timeout = time.Second
	latencies := []time.Duration{0, timeout * 12 / 25, timeout / 10, timeout / 40, timeout / 5, timeout / 3, timeout * 9 / 20}
	eachVirtually(t, andInMemory(leased), func(t *testing.T, s *harness.VirtualServer, k kind) {
		other := s.Client(t)
		names := []string{"orders 0", "orders 1", "orders 2"}
		k.prepareIn(s, names...)
		for _, latency := range latencies[:harness.Size(2, len(latencies))] {
			s.Latency = latency
			c := s.Client(t, redlatch.WithWatchdogTimeout(timeout), quiet)
			// The first requests load the scripts, and those of a Redlock also ask which server that is.
			isReleased(t, k.holdAll(t, c, names, lock.Lease(time.Minute)))
			holds := k.holdAll(t, c, names)
			for range harness.Size(5, 10) {
				time.Sleep(timeout + timeout/2)
				for _, name := range names {
					isTaken(t, k.rival(other, name))
				}
			}
			isReleased(t, holds)
			for _, name := range names {
				require.NoError(t, k.rival(other, name).Do(t.Context(), nothing, lock.Wait(0)), latency)
			}
			c.Close()
		}
	})
}

// holdAll takes the objects of these names, each in another way.
func (k kind) holdAll(t testing.TB, c *redlatch.Client, names []string, opts ...lock.Option) (holds []lock.Hold) {
	t.Helper()
	for i, name := range names {
		ctx := t.Context()
		if i%2 > 0 && k.owned {
			ctx = lock.WithOwner(ctx, c.NewOwner())
		}
		holds = append(holds, mustLock(t, ctx, k.of(c, name), opts...))
		if i%2 > 0 && k.owned && !k.once {
			holds = append(holds, mustLock(t, ctx, k.of(c, name), opts...))
		}
		if i%2 > 0 && k.name == "write" { // and goes on as a reader
			holds = append(holds, mustLock(t, ctx, c.RWLock(name).Read(), opts...))
		}
	}
	return holds
}

// isReleased releases holds, none of which may have been lost.
func isReleased(t testing.TB, holds []lock.Hold) {
	t.Helper()
	for _, h := range holds {
		require.NoError(t, context.Cause(h.Context()), h.Name())
		require.NoError(t, h.Unlock(t.Context()), h.Name())
	}
}

// way is a way to lose holds.
type way struct {
	name           string
	opts           []lock.Option
	renewed, fixed lock.Reason // of such holds; "": it does not happen to them
	cause          bool        // it is known why a hold could not be renewed
	wiped          bool        // objects have to be made again
	memory         bool        // it can happen to a lock in memory
	wanted         func(kind) bool
	// happens returns how to undo it, or nil.
	happens func(a *wayLost, k kind, name string, h lock.Hold) (undo func())
	// outage happens to a real server, and returns the same.
	outage func(t testing.TB, s *testserver.Server) (undo func())
}

// wayLost is where holds are lost.
type wayLost struct {
	*testing.T
	c, other *redlatch.Client // the holder's, and another
	do       func(words ...string)
}

// Leases of what is lost, which a busy machine has time to renew.
const (
	wayLease   = 6 * time.Second // where it is fixed
	wayTimeout = 8 * time.Second // of the watchdog
)

var ways = []way{
	{name: "lease over", fixed: lock.ReasonExpired, memory: true},
	{name: "held for too long", opts: []lock.Option{lock.MaxHold(wayLease / 2)}, renewed: lock.ReasonMaxHold, memory: true},
	{
		name: "by redlatchtest", renewed: lock.ReasonMaxHold, fixed: lock.ReasonMaxHold, memory: true,
		happens: func(a *wayLost, k kind, name string, h lock.Hold) func() {
			// Another owner has the lock before the Unlock of the hold, which spares it.
			require.True(a, redlatchtest.Lose(a, h.Context(), lock.ReasonMaxHold))
			require.ErrorIs(a, context.Cause(h.Context()), lock.ErrLost)
			theirs, err := k.rival(a.other, name).TryLock(a.Context())
			require.NoError(a, err)
			return func() { isReleased(a, []lock.Hold{theirs}) }
		},
	},
	{
		name: "client closed", renewed: lock.ReasonClosed, fixed: lock.ReasonClosed,
		happens: func(a *wayLost, _ kind, name string, _ lock.Hold) func() {
			if strings.HasSuffix(name, "last") {
				a.c.Close()
			}
			return nil
		},
	},
	{
		name: "key deleted", renewed: lock.ReasonGone, fixed: lock.ReasonExpired, wiped: true,
		happens: func(a *wayLost, k kind, name string, _ lock.Hold) func() {
			a.do("DEL", k.key(name))
			return nil
		},
	},
	{
		name: "key of another type", renewed: lock.ReasonGone, fixed: lock.ReasonExpired, wiped: true,
		happens: func(a *wayLost, k kind, name string, _ lock.Hold) func() {
			a.do("DEL", k.key(name))
			a.do("RPUSH", k.key(name), "precious")
			return func() {
				a.do("LSET", k.key(name), "0", "still there")
				a.do("DEL", k.key(name))
			}
		},
	},
	{
		name: "taken by another after it had expired", renewed: lock.ReasonGone, fixed: lock.ReasonExpired, wanted: owned,
		happens: func(a *wayLost, k kind, name string, _ lock.Hold) func() {
			a.do("PEXPIRE", name, "1")
			l := k.rivalLock(a.other, name)
			theirs := mustLock(a, a.Context(), l)
			return func() {
				require.Equal(a, 1, harness.HoldCount(a, l, lock.OwnerOf(theirs)))
				isReleased(a, []lock.Hold{theirs})
			}
		},
	},
	{
		name: "forced open here", renewed: lock.ReasonGone, fixed: lock.ReasonGone, wanted: owned,
		happens: func(a *wayLost, k kind, name string, _ lock.Hold) func() {
			require.NoError(a, only(k.lock(a.c, name).ForceUnlock(a.Context())))
			return nil
		},
	},
	{
		name: "forced open elsewhere", renewed: lock.ReasonGone, fixed: lock.ReasonExpired, wanted: owned,
		happens: func(a *wayLost, k kind, name string, _ lock.Hold) func() {
			require.NoError(a, only(k.lock(a.other, name).ForceUnlock(a.Context())))
			return nil
		},
	},
	{
		name: "server killed", renewed: lock.ReasonExpired, fixed: lock.ReasonExpired, cause: true, wiped: true,
		outage: func(t testing.TB, s *testserver.Server) func() {
			s.Kill()
			return func() { assert.NoError(t, s.Restart()) }
		},
	},
	{
		name: "server stopped", renewed: lock.ReasonExpired, fixed: lock.ReasonExpired, cause: true,
		outage: func(_ testing.TB, s *testserver.Server) func() { s.Pause(); return s.Resume },
	},
	{
		name: "server restarted empty", renewed: lock.ReasonGone, fixed: lock.ReasonExpired, wiped: true,
		outage: func(t testing.TB, s *testserver.Server) func() { s.Kill(); assert.NoError(t, s.Restart()); return nil },
	},
}

// TestEveryWayToLoseAHold ends holds early in every way there is, and checks that each of
// them says so, and why.
func TestEveryWayToLoseAHold(t *testing.T) {
	t.Parallel()
	for _, w := range ways {
		for _, k := range choose(andInMemory(leased)) {
			if w.outage != nil || k.memory && !w.memory || w.wanted != nil && !w.wanted(k) {
				continue
			}
			t.Run(w.name+"/"+k.name, func(t *testing.T) {
				virtually(t, k, func(t *testing.T, s *harness.VirtualServer, k kind) {
					conn := s.Conn(t)
					a := &wayLost{T: t, c: s.Client(t, redlatch.WithWatchdogTimeout(wayTimeout), quiet), other: s.Client(t, quiet)}
					a.do = func(words ...string) {
						require.NoError(t, conn.Do(context.Background(), conn.B().Arbitrary(words...).Build()).Error())
					}
					w.loses(t, a, k, 0, func() {}, func() {})
				})
			})
		}
	}
}

// TestEveryHoldIsLostInAnOutage is TestEveryWayToLoseAHold where the server is the reason.
func TestEveryHoldIsLostInAnOutage(t *testing.T) {
	var outages []way
	for _, w := range ways {
		if w.outage != nil {
			outages = append(outages, w)
		}
	}
	harness.EachOf(t, outages, func(w way) string { return w.name }, func(t *testing.T, shared *testserver.Server, w way) {
		s := harness.Own(t, shared.Program)
		a := &wayLost{c: harness.Client(t, s, redlatch.WithWatchdogTimeout(wayTimeout), quiet), other: harness.Client(t, s, quiet)}
		a.do = func(words ...string) { harness.Do(t, s.Addr, words...) }
		var undo func()
		happens := barrierOf(len(choose(leased)), func() { undo = w.outage(t, s) })
		over := barrierOf(len(choose(leased)), func() {
			if undo != nil {
				undo()
			}
		})
		together(t, s, leased, func(t *testing.T, k kind) {
			w.loses(t, a, k, soon, happens.join(t), over.join(t))
		})
	})
}

// loses has holds of a kind lost in that way, each within its time and slack.
func (w way) loses(t *testing.T, a *wayLost, k kind, slack time.Duration, happen, over func()) {
	type victim struct {
		lock.Hold
		name    string
		renewed bool
		want    lock.Reason
	}
	var victims []victim
	var undo []func()
	began := time.Now()
	for what, ctx := range k.owners(t, a.c) {
		for _, v := range []victim{
			{name: fmt.Sprintf("%s %s renewed", k.name, what), renewed: true, want: w.renewed},
			{name: fmt.Sprintf("%s %s fixed", k.name, what), want: w.fixed},
		} {
			if v.want == "" {
				continue
			}
			if len(victims) == 2*len(k.owners(t, a.c))-1 {
				v.name += ", last"
			}
			opts := w.opts
			if !v.renewed {
				opts = []lock.Option{lock.Lease(wayLease)}
			}
			if k.free != "" {
				a.do("SET", v.name, k.free)
			}
			v.Hold = mustLock(t, ctx, k.of(a.c, v.name), opts...)
			victims = append(victims, v)
			if w.happens != nil {
				if f := w.happens(a, k, v.name, v.Hold); f != nil {
					undo = append(undo, f)
				}
			}
		}
	}
	happen()
	for _, v := range victims {
		select {
		case <-v.Context().Done():
		case <-time.After(wayTimeout + slack):
			require.FailNow(t, "the hold does not end", v.name)
		}
	}
	noticed := time.Now()
	for _, v := range victims {
		require.Zero(t, v.Remaining())
		var lost *lock.LostError
		require.ErrorAs(t, context.Cause(v.Context()), &lost)
		require.ErrorIs(t, lost, lock.ErrLost)
		require.Equal(t, v.want, lost.Reason, v.name)
		require.Equal(t, v.Name(), lost.Name)
		require.Equal(t, lock.OwnerOf(v.Hold), lost.Owner)
		if p, ok := v.Hold.(permitHold); ok {
			require.Equal(t, p.ID(), lost.Permit)
		}
		require.WithinRange(t, lost.When, began, noticed)
		require.Equal(t, lost.Reason == lock.ReasonClosed, lost.Is(lock.ErrClosed))
		require.False(t, slices.ContainsFunc(a.c.Holds(), func(h redlatch.HoldInfo) bool { return h.Name == v.Name() }), "it is listed")
		if v.renewed && w.cause {
			require.Error(t, lost.Err)
		} else if k.name != "multi" { // which says how it lost a member
			require.NoError(t, lost.Err)
		}
		require.ErrorIs(t, v.Extend(t.Context(), time.Minute), lock.ErrLost)
		require.ErrorIs(t, v.Unlock(t.Context()), lost)
		require.ErrorIs(t, v.Unlock(t.Context()), lock.ErrNotHeld)
	}
	for _, f := range undo {
		f()
	}
	over()
	harness.Eventually(t, soon, "the server answers", func() bool { return a.other.Ping(t.Context()) == nil })
	if w.wiped {
		victims = append(victims, victim{name: k.name})
	}
	for _, v := range victims {
		if w.wiped && k.free != "" {
			a.do("SET", v.name, k.free)
		}
		require.NoError(t, ends(t, async(func() error { return k.rival(a.other, v.name).Do(t.Context(), nothing) }), wayTimeout+2*soon))
		if v.Hold != nil && k.free != "" {
			a.do("DEL", v.name)
		}
		if k.stays != "" {
			a.do("DEL", fmt.Sprintf(k.stays, v.name))
		}
	}
}

// A hold that nobody can end is logged with where it was acquired, and lasts until its lease ends. So does one with a
// fixed lease. No Shutdown waits for them. The hold of an owner that has a name and can unlock without the handle
// stays renewed.
func TestADroppedHoldEndsWithItsLease(t *testing.T) {
	const lease = 15 * time.Second // collections of many tests at once take long
	const watchdog = 5 * time.Second
	type dropped struct {
		kind
		name string
		log  harness.Log
		c    *redlatch.Client
		ctx  context.Context
		shut <-chan error
	}
	lockIt := func(ctx context.Context, l lock.Locker) error { return only(l.Lock(ctx)) }
	ways := map[string]func(ctx context.Context, l lock.Locker) error{
		"Lock":        lockIt,
		"TryLock":     func(ctx context.Context, l lock.Locker) error { return only(l.TryLock(ctx)) },
		"the context": func(ctx context.Context, l lock.Locker) error { _ = mustLock(t, ctx, l).Context(); return nil },
	}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		other := harness.Client(t, s)
		var all, released, fixed, owned []*dropped
		drop := func(k kind, what string, named bool, take func(ctx context.Context, l lock.Locker) error) *dropped {
			d := &dropped{kind: k, name: k.name + " " + what, ctx: t.Context()}
			d.c = harness.Client(t, s, redlatch.WithLogger(d.log.Logger()), redlatch.WithWatchdogTimeout(watchdog)) // each logs one of them a second
			if named {
				d.name += ", named"
				d.ctx = lock.WithOwner(d.ctx, d.c.NewOwner())
			}
			k.prepare(t, s.Addr, d.name)
			require.NoError(t, take(d.ctx, k.of(d.c, d.name)), d.name)
			all = append(all, d)
			return d
		}
		for _, k := range choose(leased) {
			for what, take := range ways {
				released = append(released, drop(k, what, false, take))
				if !byOwner(k) {
					released = append(released, drop(k, what, true, take))
				}
			}
			if byOwner(k) {
				owned = append(owned, drop(k, "owned", true, lockIt))
			}
		}

		harness.Eventually(t, 2*soon, "handles are collected", func() bool {
			runtime.GC()
			return !slices.ContainsFunc(released, func(d *dropped) bool { return !strings.Contains(d.log.String(), "dropped without") })
		})
		for _, d := range released {
			require.Regexp(t, `acquired="github.com/redlatch/redlatch/internal/contract_test\.\S+ \(\S*(lease|kinds)_test.go:\d+\)"`, d.log.String())
			require.NoError(t, ends(t, async(func() error { return d.rival(other, d.name).Do(t.Context(), nothing) }), watchdog+soon), d.name)
			require.NoError(t, d.c.Shutdown(t.Context()), d.name)
		}
		for _, d := range owned {
			isTaken(t, d.rival(other, d.name))
			require.NoError(t, d.of(d.c, d.name).(unlocker).UnlockOwner(d.ctx))
			require.NoError(t, d.rival(other, d.name).Do(t.Context(), nothing, lock.Wait(0)))
			require.Empty(t, d.log.String())
		}

		began := time.Now()
		for _, k := range choose(leased) {
			d := drop(k, "fixed", false, func(ctx context.Context, l lock.Locker) error { return only(l.Lock(ctx, lock.Lease(lease))) })
			d.shut = async(func() error { return d.c.Shutdown(t.Context()) })
			fixed = append(fixed, d)
		}
		harness.Eventually(t, lease, "handles of holds with a lease are collected", func() bool {
			runtime.GC()
			return !slices.ContainsFunc(fixed, func(d *dropped) bool { return len(d.shut) == 0 })
		})
		for _, d := range fixed {
			require.NoError(t, <-d.shut)
			isTaken(t, d.rival(other, d.name))
		}
		require.Less(t, time.Since(began), lease)
		for _, d := range fixed {
			require.NoError(t, d.rival(other, d.name).Do(t.Context(), nothing, lock.Wait(lease+soon)))
			require.GreaterOrEqual(t, time.Since(began), lease-10*time.Millisecond)
			require.NotContains(t, d.log.String(), "dropped")
		}
		for _, d := range all {
			d.unmake(t, s.Addr, d.name)
		}
		harness.NothingStays(t, s.Addr)
	})
}

// Remaining is 0 as soon as the context of a lost hold has ended.
func TestNothingRemainsWhenTheContextEnds(t *testing.T) {
	eachKind(t, leased, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s, quiet)
		for range harness.Size(5, 200) {
			h := mustLock(t, t.Context(), k.of(c, "orders"))
			remains := make(chan time.Duration)
			go func() {
				for ctx := h.Context(); ctx.Err() == nil; { // the end is to be seen at once
					runtime.Gosched()
				}
				remains <- h.Remaining()
			}()
			harness.Do(t, s.Addr, "DEL", k.key("orders"))
			require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
			require.Zero(t, <-remains)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			k.forgotten(t, s.Addr, t.Context())
		}
	})
}
