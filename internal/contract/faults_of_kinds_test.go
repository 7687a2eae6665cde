package contract_test

import (
	"context"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

var fairRow = requestsOf("fair", requests{
	acquire: "fairlock/acquire", release: "fairlock/release",
	handOff: "fairlock/confirm", extend: hashExtend, transfer: "fairlock/transfer",
	there: 2, here: 1, ordered: true,
	timeout: 30 * time.Second, // which keeps a position for 10 s without a heartbeat
	steps: []step{
		{"first attempt", "fairlock/acquire", (*faultCase).enqueue},
		{"first attempt behind a waiter of the same client", "fairlock/acquire", (*faultCase).enqueueBehind},
		{"attempt for several", "fairlock/acquire", (*faultCase).enqueueSeveral},
		{"heartbeat", "fairlock/heartbeat", func(x *faultCase) {
			h := mustLock(x, x.Context(), x.theirs())
			w := x.parked(2)
			last := x.behind()
			x.during(func() {})
			<-time.After(x.timeout / 3) // for which a position is kept without another
			x.open()
			require.Len(x, x.queue(), 2)
			require.NoError(x, h.Unlock(x.ctx))
			harness.InOrder(x, w, last)
		}},
		{"leaving the queue", "fairlock/leave", func(x *faultCase) {
			h := mustLock(x, x.Context(), x.theirs())
			w := x.parked(2)
			w.Owner = x.queue()[0]
			last := x.behind()
			x.during(func() {
				w.Cancel(nil)
				err := w.End()
				require.ErrorIs(x, err, lock.ErrNotAcquired)
				require.NotErrorIs(x, err, lock.ErrIndeterminate)
			})
			harness.Eventually(x, soon, "it has left", func() bool { return !x.queued(w.Owner) })
			x.open()
			require.Equal(x, []string{last.Owner}, x.queue())
			require.NoError(x, h.Unlock(x.ctx))
			harness.InOrder(x, last)
		}},
	},
})

var electionRow = requestsOf("election", requests{
	steps: []step{{"beginning of a term", "election/begin", func(x *faultCase) {
		var h lock.Hold
		var err error
		x.during(func() { h, err = x.mine().TryLock(x.ctx) })
		require.NoError(x, err)
		require.EqualValues(x, 1, h.Token(), "it begins once")
		x.open()
		leader, err := x.other.Election(x.name).Leader(x.ctx)
		require.NoError(x, err)
		require.Equal(x, election.Leader{Token: 1, Owner: lock.OwnerOf(h)}, leader)
		x.released(h)
		_, err = x.other.Election(x.name).Leader(x.ctx)
		require.ErrorIs(x, err, election.ErrNoLeader)
	}}},
})

func (x *site) queue() []string {
	x.Helper()
	return x.list(x, "LRANGE", wire.FairQueue(x.name), "0", "-1")
}

func (x *site) queued(owner string) bool {
	x.Helper()
	for _, key := range []string{wire.FairTimeouts(x.name), wire.FairAlive(x.name)} {
		if slices.Contains(x.list(x, "ZRANGE", key, "0", "-1"), owner) {
			return true
		}
	}
	return slices.Contains(x.queue(), owner)
}

// acts reports whether the server sees the request in time.
func (x *faultCase) acts() bool {
	return x.fault != harness.LoseRequest && x.fault != harness.DelayRequest
}

func (x *faultCase) enqueue() {
	h := mustLock(x, x.Context(), x.theirs())
	var w *call
	x.during(func() {
		if !x.fault.Unknown() {
			w = harness.StartLock(x, x.ctx, x.mine())
			return
		}
		x.reports(harness.StartLock(x, x.ctx, x.mine(), lock.FailFast()).End())
	})
	if x.fault.Unknown() {
		x.open()
		harness.Eventually(x, soon, "its position is given up, or nobody keeps it", func() bool {
			waiters, err := x.other.FairLock(x.name).Queue(x.Context())
			return err == nil && len(waiters) == 0
		})
		require.Empty(x, x.queue())
		require.NoError(x, h.Unlock(x.ctx))
		return
	}
	harness.Eventually(x, soon, "it has a position", func() bool { return len(x.queue()) == 1 })
	last := x.behind()
	require.NoError(x, h.Unlock(x.ctx))
	harness.InOrder(x, w, last)
}

func (x *faultCase) enqueueBehind() {
	h := mustLock(x, x.Context(), x.theirs())
	sha := x.load(x, x.acquire)
	var first, w *call
	x.g.Keep(x, sha, 2, func() { first = harness.StartLock(x, context.Background(), x.mine()) })
	x.open()
	harness.Waits(x, 1, x.c)
	x.during(func() { w = harness.StartLock(x, x.ctx, x.mine()) })
	var last *call
	if x.acts() {
		require.Len(x, x.queue(), 2)
		last = x.behind()
	} else {
		last = harness.StartLock(x, x.Context(), x.theirs())
	}
	x.open()
	harness.Eventually(x, soon, "all have a position", func() bool { return len(x.queue()) == 3 })
	require.NoError(x, h.Unlock(x.ctx))
	if x.acts() {
		harness.InOrder(x, first, w, last)
		return
	}
	harness.InOrder(x, first) // one that may not have been heard yet may come later
	inAnyOrder(x, w, last)
}

// several starts n waiters while the reply to the attempt of a first one is kept back by
// the gate. When that opens, one attempt is made for all of them.
func (x *site) several(g *harness.Gate, n int) (all []*call) {
	x.Helper()
	g.Keep(x, x.load(x, x.acquire), 1, func() { all = []*call{harness.StartLock(x, x.Context(), x.mine())} })
	for i := range n {
		all = append(all, harness.StartLock(x, x.Context(), x.mine()))
		harness.Eventually(x, soon, "it waits", func() bool { return x.c.Stats().Waiting == i+1 })
	}
	return all
}

func (x *faultCase) enqueueSeveral() {
	outer := harness.NewGate(x.t, &testserver.Server{Addr: x.g.Addr})
	x.dial(outer)
	h := mustLock(x, x.Context(), x.theirs())
	all := x.several(outer, 3)
	x.during(func() { require.NoError(x, outer.Open()) })
	last := harness.StartLock(x, x.Context(), x.theirs())
	position := -1 // of the last
	harness.Eventually(x, soon, "the last has a position", func() bool {
		position = slices.IndexFunc(x.queue(), func(owner string) bool { return strings.HasPrefix(owner, x.other.ID()) })
		return position >= 0
	})
	x.open()
	// After a pause, but before any poll of the first.
	harness.Eventually(x, 4*time.Second, "all have a position", func() bool { return len(x.queue()) == 5 })
	require.NoError(x, h.Unlock(x.Context()))
	if x.acts() || position != 1 { // the next attempt of the others may be as fast
		require.Equal(x, 4, position)
	}
	harness.InOrder(x, slices.Insert(all, position, last)...)
}

// taker is a semaphore of either kind in the hands of one client, with the permits that
// this has taken through it.
type taker struct {
	*scene
	sizes
	name      string
	plain     *semaphore.Semaphore
	permitSem *semaphore.PermitSemaphore // nil: the other

	mu      sync.Mutex
	out     int
	ids     []string
	permits []*semaphore.Permit // which would not be renewed if they were dropped
}

// sizes are the methods of both kinds.
type sizes interface {
	AddPermits(ctx context.Context, delta int) error
	TrySetPermits(ctx context.Context, permits int) (bool, error)
}

func (x *site) taker(c *redlatch.Client, permitSem bool) *taker {
	if permitSem {
		e := c.PermitSemaphore(x.name)
		return &taker{scene: x.scene, name: x.name, sizes: e, permitSem: e}
	}
	e := c.Semaphore(x.name)
	return &taker{scene: x.scene, name: x.name, sizes: e, plain: e}
}

// take acquires n permits, with one attempt if once is set.
func (k *taker) take(ctx context.Context, n int, once bool) error {
	var p *semaphore.Permit
	var err error
	switch {
	case k.permitSem != nil && once:
		p, err = k.permitSem.TryAcquire(ctx, n)
	case k.permitSem != nil:
		p, err = k.permitSem.Acquire(ctx, n)
	case once:
		err = k.plain.TryAcquire(ctx, n)
	default:
		err = k.plain.Acquire(ctx, n)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil {
		k.out += n
	}
	if p != nil {
		k.ids, k.permits = append(k.ids, p.IDs()...), append(k.permits, p)
	}
	return err
}

func (k *taker) giveBack(ctx context.Context) error {
	k.mu.Lock()
	n, ids := k.out, k.ids
	k.out, k.ids = 0, nil
	k.mu.Unlock()
	switch {
	case n == 0:
		return nil
	case k.permitSem != nil:
		return k.permitSem.Release(ctx, ids...)
	default:
		return k.plain.Release(ctx, n)
	}
}

// exact fails the test unless the server has so many permits, of which those that the
// clients know of are taken, and no others.
func exact(t testing.TB, permits int, all ...*taker) {
	t.Helper()
	k, out, ids := all[0], 0, []string{}
	for _, k := range all {
		out, ids = out+k.out, append(ids, k.ids...)
	}
	require.EqualValues(t, permits-out, k.number(t, "GET", k.name), "%s: free permits", k.name)
	if k.permitSem == nil {
		return
	}
	taken := []string{}
	for _, m := range k.list(t, "ZRANGE", wire.PermitTimeouts(k.name), "0", "-1") {
		taken = append(taken, hex.EncodeToString([]byte(m)))
	}
	require.ElementsMatch(t, ids, taken, "%s: permits that are taken", k.name)
}

func permitSteps(permitSem bool) []step {
	const total = 10
	of := func(name string) string {
		if permitSem {
			name = "permit_" + name
		}
		return "semaphore/" + name
	}
	// stepOf is a step that run begins with so many permits, and that comes to as many
	// as it returns. The takers are of the client behind the gate and of the other.
	stepOf := func(name, script string, run func(x *faultCase, mine, other *taker) int) step {
		return step{name, script, func(x *faultCase) {
			mine, other := x.taker(x.c, permitSem), x.taker(x.other, permitSem)
			x.ask(x, "SET", x.name, strconv.Itoa(total))
			permits := run(x, mine, other)
			if x.fault == harness.DelayRequest { // it arrives when all is over, but while the server knows it
				harness.Idle(x, x.c)
				x.open()
			}
			x.after = func(t *testing.T) {
				exact(t, permits, mine, other)
				require.NoError(t, mine.giveBack(t.Context()))
				require.NoError(t, other.giveBack(t.Context()))
				exact(t, permits, mine, other)
				x.ask(t, "SET", x.name, x.free)
			}
		}}
	}
	// line starts so many waiters for a permit, of which the first is parked in line.
	line := func(x *faultCase, k *taker, n int) (getIn func()) {
		var waiters []<-chan error
		one := func() {
			waiters = append(waiters, async(func() error { return k.take(x.Context(), 1, false) }))
		}
		x.g.Keep(x, x.load(x, of("acquire")), x.there, one)
		x.open()
		for range n - 1 {
			one()
		}
		harness.Waits(x, n, x.c)
		return func() {
			for _, w := range waiters {
				require.NoError(x, ends(x, w, time.Minute))
			}
		}
	}
	return []step{
		stepOf("wait of several", of("acquire"), func(x *faultCase, mine, other *taker) int {
			require.NoError(x, other.take(x.Context(), total, true))
			getIn := line(x, mine, 4)
			x.during(func() { require.NoError(x, other.giveBack(x.Context())) })
			getIn()
			return total
		}),
		stepOf("release of several", of("release"), func(x *faultCase, mine, _ *taker) int {
			kept := x.taker(x.c, permitSem)
			require.NoError(x, kept.take(x.Context(), 2, true))
			require.NoError(x, mine.take(x.Context(), 4, true))
			x.during(func() { require.NoError(x, mine.giveBack(x.Context())) })
			mine.out, mine.ids = kept.out, kept.ids
			return total
		}),
		stepOf("release for others of the client", of("release"), func(x *faultCase, mine, _ *taker) int {
			require.NoError(x, mine.take(x.Context(), total, true))
			next := x.taker(x.c, permitSem)
			getIn := line(x, next, 3)
			x.during(func() { require.NoError(x, mine.giveBack(x.Context())) })
			getIn()
			mine.out, mine.ids = next.out, next.ids
			return total
		}),
		stepOf("set", "semaphore/set", func(x *faultCase, mine, _ *taker) int {
			x.ask(x, "DEL", x.name)
			var made bool
			var err error
			x.during(func() { made, err = mine.TrySetPermits(x.Context(), 7) })
			require.NoError(x, err)
			require.True(x, made)
			return 7
		}),
		stepOf("add", "semaphore/add", func(x *faultCase, mine, _ *taker) int {
			x.during(func() { require.NoError(x, mine.AddPermits(x.Context(), 5)) })
			return total + 5
		}),
		stepOf("take away", "semaphore/add", func(x *faultCase, mine, _ *taker) int {
			x.during(func() { require.NoError(x, mine.AddPermits(x.Context(), -4)) })
			return total - 4
		}),
		stepOf("drain or set the sum", map[bool]string{false: "semaphore/drain", true: "semaphore/resize"}[permitSem],
			func(x *faultCase, mine, _ *taker) int {
				if permitSem {
					require.NoError(x, mine.take(x.Context(), 4, true))
					x.during(func() { require.NoError(x, mine.permitSem.SetPermits(x.Context(), 6)) })
					return 6
				}
				var n int
				var err error
				x.during(func() { n, err = mine.plain.Drain(x.Context()) })
				require.NoError(x, err)
				require.Equal(x, total, n)
				return 0
			}),
		stepOf("calling off", of("undo"), func(x *faultCase, mine, _ *taker) int {
			// The attempt is under way when its caller leaves, and has run when it is called off.
			ctx, cancel := context.WithCancel(x.Context())
			inner := x.g
			outer := harness.NewGate(x.t, &testserver.Server{Addr: inner.Addr})
			x.dial(outer)
			mine = x.taker(x.c, permitSem)
			x.during(func() {
				var attempt <-chan error
				outer.Keep(x, x.load(x, of("acquire")), 1, func() { attempt = async(func() error { return mine.take(ctx, 3, true) }) })
				cancel()
				err := ends(x, attempt, time.Minute)
				require.ErrorIs(x, err, lock.ErrIndeterminate)
				require.ErrorIs(x, err, context.Canceled)
				require.NoError(x, outer.Open())
			})
			return total
		}),
		stepOf("leaving the line", "semaphore/leave", func(x *faultCase, mine, other *taker) int {
			require.NoError(x, other.take(x.Context(), total, true))
			w := x.parked(x.there)
			x.during(func() {
				w.Cancel(nil)
				harness.NotAcquired(x, w.End())
			})
			require.NoError(x, other.giveBack(x.Context()))
			return total
		}),
	}
}

var leasedPermitSteps = func() (steps []step) {
	for name, lease := range map[string]time.Duration{"a longer lease": time.Minute, "a shorter lease": 20 * time.Second} {
		steps = append(steps, step{name, "semaphore/permit_extend", func(x *faultCase) {
			const first = 30 * time.Second
			h := mustLock(x, x.ctx, x.mine(), lock.Lease(first))
			var taken bool
			var err error
			x.during(func() {
				taken, err = x.c.PermitSemaphore(x.name).SetTTL(x.ctx, h.(permitHold).ID(), lease)
			})
			if x.fault.Unknown() {
				require.Error(x, err)
				require.LessOrEqual(x, h.Remaining(), min(lease, first))
			} else {
				require.NoError(x, err)
				require.True(x, taken)
				require.Greater(x, h.Remaining(), lease-soon)
			}
			x.exactly(h)
			x.open()
			x.released(h)
		}})
	}
	return steps
}()

// latchSteps are those of a latch. A request takes effect once, and its caller gets the reply.
var latchSteps = func() []step {
	const before = 5
	var steps []step
	// change is a request that changes a count: from what, to what, and the reply.
	change := func(name, file string, from, to, reply int, do func(ctx context.Context, l *countdown.Latch) (int, error)) {
		steps = append(steps, step{name, "countdown/" + file, func(x *faultCase) {
			x.count(from)
			sent := x.g.Scripts()
			var got int
			var err error
			x.during(func() { got, err = do(x.ctx, x.c.CountDownLatch(x.name)) })
			require.NoError(x, err)
			require.Equal(x, reply, got)
			if !x.fault.Unknown() {
				require.Equal(x, sent+1, x.g.Scripts(), "it is not sent again")
			}
			now := func() int {
				n, err := x.other.CountDownLatch(x.name).Count(x.ctx)
				require.NoError(x, err)
				return n
			}
			require.Equal(x, to, now())
			x.open()
			require.Equal(x, to, now())
			x.count(0)
		}})
	}
	number := func(b bool, err error) (int, error) {
		if b {
			return 1, err
		}
		return 0, err
	}
	change("set", "try_set_count", 0, before, 1, func(ctx context.Context, l *countdown.Latch) (int, error) {
		return number(l.TrySetCount(ctx, before))
	})
	change("set for", "try_set_count", 0, before, 1, func(ctx context.Context, l *countdown.Latch) (int, error) {
		return number(l.TrySetCountFor(ctx, before, time.Hour))
	})
	down := func(n int) func(ctx context.Context, l *countdown.Latch) (int, error) {
		return func(ctx context.Context, l *countdown.Latch) (int, error) { return l.CountDownN(ctx, n) }
	}
	change("count down", "count_down", before, 4, 4, down(1))
	change("count down by more", "count_down", before, 3, 3, down(2))
	change("count down to zero", "count_down", 1, 0, 0, down(1))
	change("delete", "delete", before, 0, 1, func(ctx context.Context, l *countdown.Latch) (int, error) {
		return number(l.Delete(ctx))
	})

	// wait has the fault happen to the n-th request that contains what match returns, and
	// then opens the latch.
	wait := func(name string, n int, match func(x *faultCase) string) {
		steps = append(steps, step{name, "countdown/read", func(x *faultCase) {
			x.count(1)
			reached := x.g.Arm(x.fault, match(x), n)
			w := async(func() error { return x.c.CountDownLatch(x.name).Wait(x.ctx) })
			harness.Reached(x, reached)
			x.open()
			x.count(0)
			require.NoError(x, ends(x, w, time.Minute))
		}})
	}
	look := func(x *faultCase) string { return x.sha }
	wait("look before the subscription", 1, look)
	wait("look after the subscription", 2, look)
	wait("subscription", 1, func(*faultCase) string { return "\r\nSUBSCRIBE" })
	return append(steps, step{"read", "countdown/read", func(x *faultCase) {
		x.count(3)
		x.sha = "\r\nGET\r\n"
		var n int
		var err error
		x.during(func() { n, err = x.c.CountDownLatch(x.name).Count(x.ctx) })
		require.NoError(x, err) // it asks again if the connection is lost
		require.Equal(x, 3, n)
		x.count(0)
	}})
}()

// count has the other client set the count of a latch, 0 for none.
func (x *site) count(n int) {
	x.Helper()
	l := x.other.CountDownLatch(x.name)
	if n == 0 {
		require.NoError(x, only(l.Delete(x.Context())))
		return
	}
	set, err := l.TrySetCount(x.Context(), n)
	require.NoError(x, err)
	require.True(x, set)
}
