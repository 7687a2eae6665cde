package contract_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// point is where a call of Lock waits for something.
type point struct {
	name string
	held place
	// inFlight is set if a request for this call alone is under way, so that nobody
	// knows its outcome.
	inFlight bool
	// at brings the call to its point.
	at func(x *departure)
	// once is set if the call makes one attempt, and takes no options.
	once bool
}

type place int

const (
	nowhere place = iota
	there         // by another client
	here          // by the client of the call
)

type departure struct {
	site
	p       point
	opts    []lock.Option
	leaving []*call
	staying []*call // of the same client, in their order
	closed  bool    // the client is
	// give gives back what keeps the call waiting, once.
	give func() error
}

type who bool

const (
	leaver who = true  // whose call is to end
	stayer who = false // whose call goes on
)

func (x *departure) begin() { x.start(leaver) }

func (x *departure) start(w who) {
	if w == leaver {
		opts := slices.Concat(x.forever(), x.opts)
		if keeps(x.kind) { // a caller that does not get the lock does not keep it
			opts = append(opts, lock.AtLeast(time.Hour))
		}
		x.leaving = append(x.leaving, harness.StartLock(x, x.ctx, x.mine(), opts...))
	} else {
		x.staying = append(x.staying, harness.StartLock(x, context.Background(), x.mine(), x.forever()...))
	}
}

// keep keeps back the reply to an attempt of the owner, of which begin brings about the
// n-th.
func (x *departure) keep(n int, begin func()) {
	x.Helper()
	x.g.Keep(x, x.load(x, x.acquire), n, begin)
}

// parks starts a call and returns when it is parked, the first of its client.
func (x *departure) parks(w who) {
	x.Helper()
	attempts := x.there
	if x.p.held == here {
		attempts = x.here
	}
	x.g.Keep(x, x.load(x, x.acquire), attempts, func() { x.start(w) })
	x.open()
	x.areParked()
}

func (x *departure) queues(w who) {
	x.Helper()
	x.start(w)
	x.areParked()
}

func (x *departure) areParked() {
	x.Helper()
	n := len(x.leaving) + len(x.staying)
	harness.Eventually(x, soon, "all wait", func() bool { return x.waiting(n, x.c) })
}

// release gives back what keeps the call waiting, in the background.
func (x *departure) release() {
	give := x.give
	go func() { _ = give() }()
}

const lostHandOff = "hand-off whose answer is lost"

// points are those of the kind.
func (r requests) points() []point {
	if r.there == 0 {
		return r.own
	}
	first := func(x *departure) { x.keep(1, x.begin) }
	all := []point{
		{name: "first attempt, which fails", held: there, inFlight: true, at: first},
		{name: "first attempt, which arrives late", held: map[bool]place{true: there}[r.ordered], inFlight: true, at: func(x *departure) {
			sent := x.g.Scripts()
			x.g.Stall()
			x.begin()
			harness.Eventually(x, soon, "it is sent", func() bool { return x.g.Scripts() > sent })
		}},
		{name: "subscription", held: there, at: func(x *departure) { x.g.Keep(x, "\r\nSUBSCRIBE", 1, x.begin) }},
		{name: "second attempt", held: there, inFlight: true, at: func(x *departure) { x.keep(2, x.begin) }},
		{name: "attempt after one whose answer is lost", held: there, inFlight: true, at: func(x *departure) {
			reached := x.g.Arm(harness.LoseReply, x.load(x, x.acquire), x.there)
			x.begin()
			harness.Reached(x, reached)
			x.keep(1, func() {})
		}},
		{name: "parked", held: there, at: func(x *departure) { x.parks(leaver) }},
	}
	if r.there > 2 {
		all = append(all, point{name: "third attempt, which enters the line", held: there, inFlight: true, at: func(x *departure) { x.keep(3, x.begin) }})
	}
	all = append(all, r.own...)
	if r.kind.name == "latch" { // which nobody holds
		return all
	}
	return append(all, []point{
		{name: "first attempt, which succeeds", inFlight: true, at: first},
		{name: "attempt after a message, which succeeds", held: there, inFlight: true, at: func(x *departure) {
			x.parks(leaver)
			x.keep(1, x.release)
		}},
		{name: "first of several", held: there, at: func(x *departure) {
			x.parks(leaver)
			x.queues(stayer)
		}},
		{name: "behind another", held: there, at: func(x *departure) {
			x.parks(stayer)
			x.queues(leaver)
			x.queues(stayer)
		}},
		{name: "parked behind a holder of the same client", held: here, at: func(x *departure) { x.parks(leaver) }},
		{name: "hand-off, or the release in its place", held: here, at: func(x *departure) {
			x.parks(leaver)
			x.g.Keep(x, "EVALSHA", 1, x.release)
		}},
		{name: lostHandOff, held: here, at: func(x *departure) {
			x.parks(leaver)
			reached := x.g.Arm(harness.Silence, "EVALSHA", 1)
			x.release()
			harness.Reached(x, reached)
		}},
	}...)
}

var groupPoints = []point{
	{name: "attempt for several, its own first", held: there, at: func(x *departure) {
		x.parks(leaver)
		x.queues(stayer)
		x.keep(1, x.release)
	}},
	{name: "attempt for several, its own behind", held: there, at: func(x *departure) {
		x.parks(stayer)
		x.queues(leaver)
		x.queues(stayer)
		x.keep(1, x.release)
	}},
	{name: "attempt for several, all of which leave", held: there, at: func(x *departure) {
		x.parks(leaver)
		x.queues(leaver)
		x.queues(leaver)
		x.keep(1, x.release)
	}},
	{name: "hand-off to several", held: here, at: func(x *departure) {
		x.parks(stayer)
		x.queues(leaver)
		x.queues(stayer)
		x.g.Keep(x, "EVALSHA", 1, x.release)
	}},
}

var fairPoints = []point{
	{name: "first attempt behind another", held: there, inFlight: true, at: func(x *departure) {
		x.parks(stayer)
		x.keep(1, x.begin)
	}},
	{name: "attempt that another makes for it", held: there, at: func(x *departure) {
		outer := harness.NewGate(x.t, &testserver.Server{Addr: x.g.Addr})
		x.dial(outer)
		outer.Keep(x, x.load(x, x.acquire), 1, func() { x.start(stayer) })
		for n, w := range []who{stayer, leaver} {
			x.start(w)
			harness.Eventually(x, soon, "it waits", func() bool { return x.c.Stats().Waiting == n+1 })
		}
		x.keep(1, func() { require.NoError(x, outer.Open()) })
	}},
	{name: "heartbeat", held: there, at: func(x *departure) {
		x.parks(leaver)
		x.g.Keep(x, x.load(x, "fairlock/heartbeat"), 1, func() {})
	}},
	{name: "heartbeat that arrives when it has left", held: there, at: func(x *departure) {
		x.parks(leaver)
		harness.Reached(x, x.g.Arm(harness.DelayRequest, x.load(x, "fairlock/heartbeat"), 1))
	}},
}

// cancelTable has a row for each kind that waits in a way of its own.
var cancelTable = func() []requests {
	own := func(r requests, points ...[]point) requests {
		r.own = slices.Concat(points...)
		return r
	}
	behindReader, permit, number := writeRow, own(permitRow, groupPoints), own(numberRow, groupPoints)
	behindReader.name = "write behind a reader"
	writes := own(writeRow)
	writes.held = writing
	permit.free, number.free = "4", "4"
	return []requests{
		lockRow, plainRow, own(fairRow, fairPoints), own(readRow, groupPoints), writes, behindReader, permit, number, latchRow, multiRow,
	}
}()

var latchRow = func() requests {
	r := requestsOf("latch", requests{acquire: "countdown/read", there: 2, own: []point{
		{name: "look after a message", held: there, at: func(x *departure) {
			x.parks(leaver)
			x.keep(1, func() { x.ask(x, "PUBLISH", wire.LatchChannel(x.name), "what is this") })
		}},
	}})
	r.of = func(c *redlatch.Client, name string) lock.Locker { return opening{latched{c.CountDownLatch(name)}} }
	return r
}()

type opening struct{ latched }

func (l opening) Lock(ctx context.Context, _ ...lock.Option) (lock.Hold, error) {
	return bareHold{unlock: func(context.Context) error { return nil }}, l.Wait(ctx)
}

// multiRow is a lock of several locks. One script takes those of one client, if nobody
// has any, and another the rest.
var multiRow = func() requests {
	const eachScript, restScript = "rlock/acquire_each", "rlock/acquire"
	r := requestsOf("multi", requests{acquire: eachScript})
	r.of = func(c *redlatch.Client, name string) lock.Locker {
		return c.MultiLock(c.Lock(name+" a"), c.Lock(name+" b"), c.FencedLock(name+" c"), c.Lock(name+" d"), c.Lock(name+" e"))
	}
	r.stays = "redisson_lock_token:{%s c}"
	// ofTwo makes the members those of two clients, of which each is taken by itself.
	ofTwo := func(x *departure) {
		first := x.c
		x.dial(x.g)
		second := x.c
		x.c = first
		x.of = func(c *redlatch.Client, name string) lock.Locker {
			return c.MultiLock(c.Lock(name+" a"), second.Lock(name+" b"))
		}
	}
	taken := func(x *departure, c *redlatch.Client, member string) {
		h := mustLock(x, context.Background(), c.Lock(x.name+" "+member))
		x.give = func() error { return h.Unlock(context.Background()) }
	}
	parked := func(x *departure, begin func()) {
		begin()
		harness.Eventually(x, soon, "it waits", func() bool { return harness.Waiting(1, x.c) && x.c.Stats().PubSub.Subscribed > 0 })
	}
	for _, once := range []bool{false, true} {
		name, begin := "", (*departure).begin
		if once {
			name, begin = " (one attempt)", func(x *departure) {
				of := x.of
				x.of = func(c *redlatch.Client, name string) lock.Locker { return tries{of(c, name)} }
				x.begin()
				x.of = of
			}
		}
		keep := func(path string, prepare func(x *departure)) func(x *departure) {
			return func(x *departure) {
				prepare(x)
				match := "\r\nINFO\r\n"
				if path != "" {
					match = x.load(x, path)
				}
				x.g.Keep(x, match, 1, func() { begin(x) })
			}
		}
		nobody := func(*departure) {}
		r.own = append(r.own,
			point{name: "who the servers are" + name, once: once, at: keep("", ofTwo)},
			point{name: "script of several" + name, once: once, inFlight: true, at: keep(eachScript, nobody)},
			point{name: "script of several, one of which is taken" + name, once: once, inFlight: true, at: keep(eachScript, func(x *departure) { taken(x, x.other, "b") })},
			point{name: "script of the rest" + name, once: once, inFlight: true, at: keep(restScript, ofTwo)},
		)
	}
	r.own = append(r.own,
		point{name: "wait for the first", at: func(x *departure) { taken(x, x.other, "a"); parked(x, x.begin) }},
		point{name: "wait for the last", at: func(x *departure) { taken(x, x.other, "e"); parked(x, x.begin) }},
		point{name: "wait for one of this client", at: func(x *departure) { taken(x, x.c, "b"); parked(x, x.begin) }},
		point{name: "end of a lease", inFlight: true, at: func(x *departure) {
			taken(x, x.other, "d")
			parked(x, x.begin)
			x.g.Keep(x, x.load(x, hashRenew), 1, x.release)
		}},
	)
	return r
}()

type tries struct{ lock.Locker }

func (l tries) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return harness.Take(l.Locker, true)(ctx, opts...)
}

func (x *departure) hold() {
	var once sync.Once
	c := x.other
	give := func(context.Context) error { return nil }
	switch {
	case x.p.held == nowhere:
	case x.kind.name == "latch":
		x.count(1)
		give = func(ctx context.Context) error { return only(c.CountDownLatch(x.name).CountDown(ctx)) }
	case x.free != "":
		if x.p.held == here {
			c = x.c
		}
		all := x.taker(c, x.leased)
		n, err := strconv.Atoi(x.free)
		require.NoError(x, err)
		require.NoError(x, all.take(x.Context(), n, true))
		give = func(ctx context.Context) error {
			if x.closed {
				left := x.taker(x.other, x.leased)
				left.out, left.ids = all.out, all.ids
				return left.giveBack(ctx)
			}
			return all.giveBack(ctx)
		}
	default:
		of := x.held
		if x.p.held == here {
			c = x.c
		}
		h := mustLock(x, context.Background(), of(c, x.name))
		_ = lock.OwnerOf(h) // an owner that nobody knows is passed on without the server
		give = h.Unlock
	}
	x.give = func() (err error) {
		once.Do(func() { err = give(context.Background()) })
		return err
	}
}

// leave runs a test at each point of each kind, or at those that are drawn.
func leave(t *testing.T, rows []requests, impatient, wanted func(r requests, p point) bool, end func(x *departure)) {
	harness.EachOf(t, rows, func(r requests) string { return r.name }, func(t *testing.T, s *testserver.Server, r requests) {
		scene := newScene(t, s, r.timeout)
		for _, path := range []string{r.release, r.handOff, "rwlock/release_read", "rwlock/release_write"} {
			if path != "" {
				scene.load(t, path)
			}
		}
		t.Logf("a short run draws with %d", shift)
		var all []*departure
		batch := newBatch(t, casesAtATime)
		for i, p := range r.points() {
			if !wanted(r, p) {
				continue
			}
			for _, opts := range [][]lock.Option{nil, {lock.Wait(time.Minute)}} {
				// Rows with names of different lengths have different points.
				if opts != nil && (p.once || testing.Short()) || !drawn(i+len(r.name), 3) {
					continue
				}
				x := &departure{site: site{requests: r, scene: scene}, p: p, opts: opts}
				x.name = p.name + map[bool]string{true: ", bounded"}[opts != nil]
				all = append(all, x)
				batch.run(x.name, func(t *testing.T) {
					x.T, x.impatient = t, impatient(r, p)
					x.prepare()
					x.hold()
					p.at(x)
					end(x)
				})
			}
		}
		batch.running.Wait()
		if t.Failed() {
			return
		}
		var sites []*site
		var names []string
		for _, x := range all {
			if x.T != nil {
				sites, names = append(sites, &x.site), append(names, x.name)
			}
		}
		idle(t, sites)
		r.unmake(t, s.Addr, names...)
		harness.NothingStays(t, s.Addr)
	})
}

// TestCancelledAnywhereLeavesNothing cancels a call of Lock at every point where it waits
// for something. It returns at once, and the callers beside and behind it acquire as if it
// had not been there.
func TestCancelledAnywhereLeavesNothing(t *testing.T) {
	gone := errors.New("gone")
	every := func(requests, point) bool { return true }
	leave(t, cancelTable, func(_ requests, p point) bool { return p.name == lostHandOff }, every, func(x *departure) {
		if x.kind.name == "latch" {
			x.start(stayer) // and does not notice
		}
		var last []*call
		if x.ordered && x.p.held != nowhere {
			last = append(last, harness.StartLock(x, context.Background(), x.theirs()))
		}
		for _, w := range x.leaving {
			w.Cancel(gone)
		}
		for _, w := range x.leaving {
			err := w.EndWithin(5 * time.Second) // well under any timeout of the connection
			require.ErrorIs(x, err, gone)
			if x.kind.name == "latch" {
				continue
			}
			if x.p.inFlight || errors.Is(err, lock.ErrIndeterminate) { // after a message or a poll, too
				failure{lock.ErrIndeterminate, nil}.check(x, err, x.name)
			} else {
				failure{lock.ErrNotAcquired, nil}.check(x, err, x.name)
			}
		}
		x.open()
		_ = x.give()
		if x.ordered {
			// Well before the queue position of the dead ends.
			for _, w := range slices.Concat(x.staying, last) {
				require.NoError(x, w.EndWithin(6*time.Second))
				harness.InOrder(x, w)
			}
		} else {
			inAnyOrder(x, x.staying...)
		}
		if x.free != "" {
			harness.Idle(x, x.c)
			require.Zero(x, x.number(x, "ZCARD", wire.SemaphoreWaiting(x.name)), "clients in line")
		}
		// And the object works as if nothing had been.
		for _, c := range []*redlatch.Client{x.c, x.other} {
			require.NoError(x, x.of(c, x.name).Do(context.Background(), nothing, lock.Wait(soon)))
		}
	})
}

// TestClosedAnywhereLeavesNothing closes the client at every such point. Close ends all
// waits, and gives back what they may have got before it returns. What the client holds is
// left to its lease.
func TestClosedAnywhereLeavesNothing(t *testing.T) {
	rows := slices.DeleteFunc(slices.Clone(cancelTable), func(r requests) bool { return r.name == "multi" })
	every := func(requests, point) bool { return true }
	leave(t, rows, every, func(r requests, p point) bool {
		// What the client of a lock holds is left to its lease, and nobody is left to
		// undo what arrives when it is closed.
		return (p.held != here || r.free != "") && p.name != "first attempt, which arrives late"
	}, func(x *departure) {
		closed := make(chan struct{})
		go func() { x.c.Close(); close(closed) }()
		select {
		case <-closed:
		case <-time.After(2 * soon):
			require.FailNow(x, "Close hangs")
		}
		for _, w := range slices.Concat(x.leaving, x.staying) {
			err := w.End()
			require.ErrorIs(x, err, lock.ErrClosed)
			require.NotErrorIs(x, err, lock.ErrNotAcquired)
		}
		x.closed = true
		x.open()
		_ = x.give()
		require.NoError(x, x.of(x.other, x.name).Do(context.Background(), nothing, lock.Wait(soon)))
	})
}

// inAnyOrder has callers get in, one after the other or together.
func inAnyOrder(t testing.TB, waiters ...*call) {
	t.Helper()
	var done sync.WaitGroup
	for _, w := range waiters {
		done.Go(func() {
			<-w.Ended
			if assert.NoError(t, w.Err) {
				assert.NoError(t, w.Value.Unlock(context.Background()))
			}
		})
	}
	done.Wait()
}
