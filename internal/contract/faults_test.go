package contract_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

// watchdogTimeout is that of the clients. A renewal that is lost in silence is repeated
// before the lease is over, on a busy machine, too.
const watchdogTimeout = 12 * time.Second

// files returns the files of a script.
func files(path string) []string {
	dir, name, _ := strings.Cut(path, "/")
	shared := []string{}
	if dir == "countdown" && name != "read" {
		shared = []string{"countdown/count"}
	}
	if dir == "semaphore" && (strings.HasSuffix(name, "acquire") || strings.HasSuffix(name, "release")) {
		shared = []string{"semaphore/usual", path + "_usual"}
	}
	if dir == "semaphore" && name != "permit_extend" && name != "permit_renew" {
		shared = append(shared, "semaphore/pool")
	}
	if dir == "semaphore" && strings.HasPrefix(name, "permit_") && name != "permit_renew" {
		shared = append(shared, "semaphore/permits")
	}

	all := append(shared, path)
	for i := range all {
		all[i] = "../../" + all[i] + ".lua"
	}
	return all
}

// requests are what the clients of a kind send.
type requests struct {
	kind
	// the scripts, by the paths of their files
	acquire, release, handOff, renew, extend, transfer string
	// held returns who keeps waiters waiting.
	held lockOf
	// there and here are how many attempts a caller makes until it is parked: behind a
	// holder elsewhere, and behind one of the same client.
	there, here int
	// numbered is set if the server knows a release again that is sent twice.
	numbered bool
	// ordered is set if the server keeps all waiters in order.
	ordered bool
	// timeout is that of the watchdog, watchdogTimeout unless the row says otherwise.
	timeout time.Duration
	// steps and own are the requests, and the points to leave at, that only this kind has.
	steps []step
	own   []point
}

// requestsOf returns the row of that kind, with what all rows have in common.
func requestsOf(name string, r requests) requests {
	r.kind = ofKind(name)
	if r.held == nil {
		r.held = r.rival
	}
	if r.timeout == 0 {
		r.timeout = watchdogTimeout
	}
	return r
}

const (
	hashRenew  = "internal/engine/renew"
	hashExtend = "internal/engine/extend"
)

// scene is a server, with what all cases of a table have in common. Their clients live
// until t ends.
type scene struct {
	t      *testing.T
	s      *testserver.Server
	other  *redlatch.Client // not behind a gate
	conn   rueidis.Client   // a server drops connections that come too fast
	loaded sync.Map         // SHAs by path
}

func newScene(t *testing.T, s *testserver.Server, timeout time.Duration) *scene {
	t.Helper()
	return &scene{
		t: t, s: s, conn: harness.Conn(t, s.Addr),
		other: harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout), quiet),
	}
}

func (s *scene) ask(t testing.TB, words ...string) rueidis.RedisResult {
	t.Helper()
	reply := s.conn.Do(context.Background(), s.conn.B().Arbitrary(words...).Build())
	if !rueidis.IsRedisNil(reply.Error()) {
		require.NoError(t, reply.Error(), "%v", words)
	}
	return reply
}

func (s *scene) number(t testing.TB, words ...string) int64 {
	t.Helper()
	n, err := s.ask(t, words...).AsInt64()
	require.NoError(t, err)
	return n
}

func (s *scene) list(t testing.TB, words ...string) []string {
	t.Helper()
	list, err := s.ask(t, words...).AsStrSlice()
	require.NoError(t, err)
	return list
}

func (s *scene) load(t testing.TB, path string) string {
	t.Helper()
	sha, ok := s.loaded.Load(path)
	if !ok {
		s.ask(t, "SCRIPT", "LOAD", harness.Source(t, files(path)...))
		sha, _ = s.loaded.LoadOrStore(path, harness.SHA(t, files(path)...))
	}
	return sha.(string)
}

// site is where a case of a table takes place: a name of its own, and a client behind a
// gate of its own.
type site struct {
	*testing.T
	requests
	*scene
	c    *redlatch.Client
	g    *harness.Gate
	name string
	ctx  context.Context
	// impatient is set if the client notices soon that a server is silent.
	impatient bool
}

func (x *site) prepare() {
	x.g = harness.NewGate(x.t, x.s)
	x.dial(x.g)
	if x.free != "" {
		x.ask(x, "SET", x.name, x.free)
	}
}

var connecting sync.Mutex

// dial makes the client behind a gate.
func (x *site) dial(g *harness.Gate) {
	opt := rueidis.ClientOption{
		InitAddress: []string{g.Addr}, ForceSingleClient: true,
		RingScaleEachConn: 5, ReadBufferEachConn: 1 << 12, WriteBufferEachConn: 1 << 12, // there are many clients
	}
	if x.impatient {
		opt.ConnWriteTimeout, opt.Dialer = 1500*time.Millisecond, net.Dialer{KeepAlive: 300 * time.Millisecond}
	}
	connecting.Lock() // one after the other: they are impatient
	var c *redlatch.Client
	harness.Eventually(x, soon, "it connects", func() (ok bool) {
		var err error
		c, err = redlatch.New(x.t.Context(), opt, redlatch.WithWatchdogTimeout(x.timeout), quiet)
		return err == nil
	})
	connecting.Unlock()
	x.t.Cleanup(c.Close)
	x.t.Cleanup(func() { _ = g.Open() })
	x.c = c
	x.ctx = context.Background()
}

// mine and theirs are the object in the hands of the clients.
func (x *site) mine() lock.Locker   { return x.of(x.c, x.name) }
func (x *site) theirs() lock.Locker { return x.rival(x.other, x.name) }

// forever is a lease that outlives the test, so that what is not given back stays.
func (x *site) forever() []lock.Option {
	if !x.leased {
		return nil
	}
	return []lock.Option{lock.Lease(time.Hour)}
}

func (x *site) open() {
	x.Helper()
	require.NoError(x, x.g.Open())
}

type call = harness.Call[lock.Hold]

// batch runs subtests together, a few at a time: they wait most of the time.
type batch struct {
	t       *testing.T
	running sync.WaitGroup
	places  chan struct{}
}

func newBatch(t *testing.T, atATime int) *batch {
	return &batch{t: t, places: make(chan struct{}, atATime)}
}

func (b *batch) run(name string, test func(t *testing.T)) {
	b.running.Go(func() {
		b.places <- struct{}{}
		defer func() { <-b.places }()
		b.t.Run(name, test)
	})
}

// parked starts a waiter of the client behind the gate and returns when it has made so
// many attempts and is parked.
func (x *site) parked(attempts int, opts ...lock.Option) (w *call) {
	x.Helper()
	n := x.c.Stats().Waiting + 1
	sha := x.load(x, x.acquire)
	x.g.Keep(x, sha, attempts, func() { w = harness.StartLock(x, x.ctx, x.mine(), opts...) })
	x.open()
	harness.Waits(x, n, x.c)
	return w
}

func (x *site) joined(opts ...lock.Option) *call {
	x.Helper()
	n := x.c.Stats().Waiting + 1
	w := harness.StartLock(x, x.ctx, x.mine(), opts...)
	harness.Waits(x, n, x.c)
	return w
}

// idle opens the gates of the sites and waits until their clients do nothing any more,
// neither for a caller nor in the background, and listen to nothing.
func idle(t testing.TB, sites []*site) {
	t.Helper()
	for _, x := range sites {
		require.NoError(t, x.g.Open())
	}
	for _, x := range sites {
		harness.Idle(t, x.c)
		harness.Eventually(t, soon, "nobody listens: "+x.name, func() bool { return x.c.Stats().PubSub.Listeners == 0 })
	}
}

// renewNothing fails the test if the clients of the sites renew anything.
func renewNothing(t testing.TB, sites []*site) {
	t.Helper()
	period := time.Duration(0)
	sent := make([]int, len(sites))
	for i, x := range sites {
		period = x.timeout / 3
		sent[i] = x.g.Scripts()
	}
	<-time.After(period + period/4)
	for i, x := range sites {
		require.Equal(t, sent[i], x.g.Scripts(), "something is renewed: %s", x.name)
	}
}

// quietly is a plain lock that does not poll.
func quietly(c *redlatch.Client, name string) lock.Locker {
	return c.PlainLock(name, rlock.ConstantBackoff(time.Minute))
}

// step is a request, and what sends it.
type step struct {
	name   string
	script string
	// run has the fault happen to the request, and checks what holds then.
	run func(x *faultCase)
}

// faultCase is a case of TestEveryFaultOfEveryRequest.
type faultCase struct {
	site
	fault  harness.Fault
	script string // whose request the fault happens to
	sha    string
	// after is called when the client has come to rest, if it is set.
	after  func(t *testing.T)
	failed bool
}

// faultTable has a row for each kind that sends requests of its own.
var faultTable = []requests{
	lockRow,
	requestsOf("fenced", requests{ // no more than what a token comes with
		acquire: lockRow.acquire, handOff: "rlock/confirm_fenced", transfer: "rlock/transfer", there: lockRow.there, here: lockRow.here,
	}),
	plainRow, fairRow, electionRow, readRow, writeRow, severalRow, permitRow, numberRow,
	requestsOf("latch", requests{steps: latchSteps}),
}

var (
	lockRow = requestsOf("lock", requests{
		acquire: "rlock/acquire", release: "rlock/release",
		handOff: hashExtend, renew: hashRenew, extend: hashExtend, transfer: "rlock/transfer",
		there: 2, here: 1,
	})
	readRow = requestsOf("read", requests{
		acquire: "rwlock/acquire_read", release: "rwlock/release_read",
		handOff: "rwlock/release_write", renew: "rwlock/renew_read", extend: "rwlock/extend", transfer: "rwlock/transfer",
		there: 2, here: 2, steps: readSteps,
	})
	writeRow = requestsOf("write", requests{
		acquire: "rwlock/acquire_write", release: "rwlock/release_write",
		handOff: "rwlock/extend", renew: hashRenew, extend: "rwlock/extend", transfer: "rwlock/transfer",
		held: reading, there: 2, here: 2, steps: writeSteps,
	})
	permitRow = requestsOf("permit semaphore", requests{
		acquire: "semaphore/permit_acquire", release: "semaphore/permit_release",
		handOff: "semaphore/permit_release", renew: "semaphore/permit_renew", extend: "semaphore/permit_extend",
		transfer: "semaphore/permit_transfer",
		there:    3, here: 3, numbered: true, steps: slices.Concat(permitSteps(true), leasedPermitSteps),
	})
	numberRow = requestsOf("semaphore", requests{
		acquire: "semaphore/acquire", release: "semaphore/release", handOff: "semaphore/release",
		there: 3, here: 3, numbered: true, steps: permitSteps(false),
	})
)

var plainRow = func() requests {
	r := requestsOf("plain", requests{
		acquire: "rlock/plain_acquire", release: "rlock/plain_release", handOff: "rlock/plain_extend",
		renew: "rlock/plain_renew", extend: "rlock/plain_extend", transfer: "rlock/plain_transfer",
		there: 2, here: 1,
	})
	r.of, r.rival, r.held = quietly, quietly, quietly
	return r
}()

// common returns the steps of all kinds.
func (r requests) common() []step {
	all := []step{
		{"try", r.acquire, (*faultCase).try},
		{"wait", r.acquire, func(x *faultCase) { x.wait(1) }},
		{"hand-off", r.handOff, func(x *faultCase) { x.passOn(x.rival, 1) }},
		{"release", r.release, (*faultCase).unlock},
		{"renewal", r.renew, (*faultCase).renewal},
		{"extension", r.extend, (*faultCase).extension},
		{"detachment", r.transfer, (*faultCase).detachment},
		{"adoption", r.transfer, (*faultCase).adoption},
	}
	if r.shared {
		all = append(all, step{"wait together", r.acquire, func(x *faultCase) { x.wait(3) }},
			step{"hand-off to several", r.handOff, func(x *faultCase) { x.passOn(x.rival, 3) }})
	}
	return all
}

// casesAtATime is how many cases of a row run at the same time.
const casesAtATime = 14

// shift is added to the numbers of cases that a short run draws, so that each run has others.
var shift = rand.IntN(100)

// drawn has the first tier run one of several cases of the large tables, by their numbers.
func drawn(n, of int) bool { return !testing.Short() || (n+shift)%of == 0 }

// TestEveryFaultOfEveryRequest has everything happen to every request of every kind that
// can happen to it. The caller hears what is known, nobody holds what it does not know of,
// and in the end nothing is left.
func TestEveryFaultOfEveryRequest(t *testing.T) {
	harness.EachOf(t, faultTable, func(r requests) string { return r.name }, func(t *testing.T, s *testserver.Server, r requests) {
		scene := newScene(t, s, r.timeout)
		t.Logf("a short run draws with %d", shift)
		var cases []*faultCase
		batch := newBatch(t, casesAtATime)
		for i, step := range slices.Concat(r.common(), r.steps) {
			for j, fault := range harness.Faults {
				// A short run has one fault for each step, and nearly each fault for each row.
				if step.script == "" || !drawn(i+j, len(harness.Faults)) {
					continue
				}
				x := &faultCase{fault: fault, site: site{requests: r, scene: scene}}
				x.name = fmt.Sprintf("%s, %v", step.name, fault)
				cases = append(cases, x)
				batch.run(x.name, func(t *testing.T) {
					defer func() { x.failed = t.Failed() }()
					x.T, x.impatient = t, x.fault == harness.Silence
					x.prepare()
					x.script, x.sha = step.script, x.load(x, step.script)
					step.run(x)
				})
			}
		}
		batch.running.Wait()
		var sites []*site
		var names []string
		for _, x := range cases {
			if x.T == nil || x.failed {
				continue // it was not asked for, or the server may have anything
			}
			sites, names = append(sites, &x.site), append(names, x.name)
		}
		idle(t, sites)
		for _, x := range cases {
			if x.after != nil && !x.failed {
				x.after(t)
			}
		}
		for _, x := range sites {
			for _, c := range []*redlatch.Client{x.other, x.c} {
				h, err := r.rival(c, x.name).TryLock(t.Context())
				require.NoError(t, err, "not free: %s", x.name)
				require.NoError(t, h.Unlock(t.Context()), x.name)
			}
		}
		renewNothing(t, sites)
		if !t.Failed() {
			r.unmake(t, s.Addr, names...)
			harness.NothingStays(t, s.Addr)
		}
	})
}

func (x *faultCase) during(operation func()) {
	x.Helper()
	x.g.During(x, x.fault, x.sha, operation)
}

// reports fails the test unless a request that nothing is known of was reported as such.
func (x *faultCase) reports(err error) {
	x.Helper()
	if !x.fault.Unknown() {
		require.NoError(x, err)
		return
	}
	require.ErrorIs(x, err, lock.ErrIndeterminate)
	require.NotErrorIs(x, err, lock.ErrNotAcquired)
}

func (x *faultCase) try() {
	var h lock.Hold
	var err error
	x.during(func() { h, err = harness.Take(x.mine(), true)(x.ctx, x.forever()...) })
	x.reports(err)
	x.open()
	if err == nil {
		x.released(h)
	}
}

func (x *faultCase) wait(n int) {
	theirs := mustLock(x, x.Context(), x.held(x.other, x.name), x.forever()...)
	waiters := x.line(x.there, n)
	last := x.behind()
	x.during(func() { require.NoError(x, theirs.Unlock(x.Context())) })
	if last == nil {
		x.open()
		x.getIn(waiters...)
		return
	}
	require.True(x, last.Running(), "one has overtaken another")
	x.open()
	x.getIn(waiters...)
	harness.InOrder(x, last)
}

// behind returns a waiter elsewhere behind all others, if the kind keeps them in order.
func (x *faultCase) behind() *call {
	x.Helper()
	if !x.ordered {
		return nil
	}
	n := len(x.queue())
	w := harness.StartLock(x, x.Context(), x.theirs())
	harness.Eventually(x, soon, "it has a place", func() bool { return len(x.queue()) == n+1 })
	w.Owner = x.queue()[n]
	return w
}

// passOn has a holder pass on what it has to waiters of its client.
func (x *faultCase) passOn(held lockOf, n int) {
	h := mustLock(x, x.ctx, held(x.c, x.name), x.forever()...)
	waiters := x.line(x.here, n)
	last := x.behind()
	var err error
	x.during(func() { err = h.Unlock(x.ctx) })
	x.ended(err)
	x.open()
	x.getIn(waiters...)
	if last != nil {
		harness.InOrder(x, last)
	}
}

// line returns waiters, of which the first is parked after so many attempts.
func (x *faultCase) line(attempts, n int) []*call {
	x.Helper()
	all := []*call{x.parked(attempts, x.forever()...)}
	for range n - 1 {
		all = append(all, x.joined(x.forever()...))
	}
	return all
}

func (x *faultCase) getIn(waiters ...*call) {
	x.Helper()
	var holds []lock.Hold
	for _, w := range waiters {
		holds = append(holds, w.Got())
	}
	x.released(holds...)
}

// ended checks the error of an Unlock. All that the client learns from a release that was sent
// twice is that it does not hold the lock, and from one that has run without a reply, not even
// whether it did before.
func (x *faultCase) ended(err error) {
	x.Helper()
	switch release := strings.Contains(x.script, "release") && !x.numbered; {
	case release && x.fault == harness.Resend:
		require.ErrorIs(x, err, lock.ErrLost)
	case release && (x.fault == harness.LoseReply || x.fault == harness.Silence):
		require.ErrorIs(x, err, lock.ErrIndeterminate)
		require.NotErrorIs(x, err, lock.ErrLost)
	default:
		require.NoError(x, err)
	}
}

func (x *faultCase) unlock() {
	h := mustLock(x, x.ctx, x.mine())
	last := x.behind()
	var err error
	x.during(func() { err = h.Unlock(x.ctx) })
	x.ended(err)
	x.open()
	if last != nil {
		require.NoError(x, last.EndWithin(4*time.Second), "before any poll")
		harness.InOrder(x, last)
	}
}

func (x *faultCase) renewal() {
	h := mustLock(x, x.ctx, x.mine())
	first := time.Now().Add(h.Remaining())
	x.during(func() {
		harness.Eventually(x, x.timeout, "the lease is renewed", func() bool {
			return time.Now().Add(h.Remaining()).After(first.Add(x.timeout / 4))
		})
	})
	x.open()
	x.released(h)
}

func (x *faultCase) extension() {
	h := mustLock(x, x.ctx, x.mine(), lock.Lease(30*time.Second))
	var err error
	x.during(func() { err = h.Extend(x.ctx, time.Minute) })
	x.open()
	if x.fault.Unknown() {
		require.Error(x, err)
		require.NotErrorIs(x, err, lock.ErrLost)
		require.NotErrorIs(x, err, lock.ErrNotHeld)
		x.exactly(h)
		err = h.Extend(x.ctx, time.Minute)
	}
	require.NoError(x, err)
	require.Greater(x, h.Remaining(), 40*time.Second)
	x.released(h)
}

func (x *faultCase) detachment() {
	h := mustLock(x, x.ctx, x.mine())
	var id string
	var err error
	x.during(func() { id, err = lock.Detach(x.ctx, h, time.Hour) })
	require.NoError(x, err)
	x.open()
	require.ErrorIs(x, h.Unlock(x.ctx), lock.ErrNotHeld)
	isTaken(x, x.theirs())
	adopted, err := x.of(x.other, x.name).(adopter).Adopt(x.ctx, id)
	require.NoError(x, err)
	x.released(adopted)
}

func (x *faultCase) adoption() {
	id, err := lock.Detach(x.ctx, mustLock(x, x.ctx, x.of(x.other, x.name)), time.Hour)
	require.NoError(x, err)
	var h lock.Hold
	x.during(func() { h, err = x.mine().(adopter).Adopt(x.ctx, id) })
	require.NoError(x, err)
	x.open()
	x.released(h)
}

// released checks that these are all holds there are, and gives them back.
func (x *faultCase) released(holds ...lock.Hold) {
	x.Helper()
	x.exactly(holds...)
	for _, h := range holds {
		require.NoError(x, h.Unlock(x.ctx))
	}
}

// exactly checks that the object has these holds in the end, and no others, and that none
// is more certain of its lease than the server.
func (x *faultCase) exactly(holds ...lock.Hold) {
	x.Helper()
	isTaken(x, x.theirs())
	for _, h := range holds {
		require.NotNil(x, h)
		require.NoError(x, h.Context().Err())
		if x.owned {
			x.owns(h, len(holds))
		}
		if p, ok := h.(permitHold); ok {
			asked, remaining := time.Now(), p.Remaining()
			left, err := x.other.PermitSemaphore(x.name).TTL(x.ctx, p.ID())
			require.NoError(x, err)
			// Both have come down meanwhile, and have the same clock.
			require.LessOrEqual(x, remaining, left+time.Since(asked)+10*time.Millisecond)
			require.Positive(x, remaining)
		}
	}
}

func (x *faultCase) owns(h lock.Hold, n int) {
	x.Helper()
	seen := x.lock(x.other, x.name)
	keys := []string{x.name}
	switch x.kind.name {
	case "read":
		keys = append(keys, wire.ReadHoldTimeout(x.name, lock.OwnerOf(h).String(), 1))
		n++ // the mode
	case "write":
		n++
	}
	harness.Eventually(x, soon, "these holds are there, each once", func() bool {
		return harness.HoldCount(x, seen, lock.OwnerOf(h)) == 1 &&
			(x.kind.name == "plain" || x.number(x, "HLEN", x.name) == int64(n))
	})
	x.certain(h, keys...)
	if x.kind.name == "fenced" {
		require.Positive(x, h.Token())
		require.LessOrEqual(x, h.Token(), x.number(x, "GET", wire.FencingToken(x.name)), "some tokens are not used")
	}
}

// certain checks that a hold is no more certain of its lease than the server.
func (x *faultCase) certain(h lock.Hold, keys ...string) {
	x.Helper()
	for _, key := range keys {
		ttl := time.Duration(x.number(x, "PTTL", key)) * time.Millisecond
		require.LessOrEqual(x, h.Remaining(), ttl+time.Millisecond, key)
	}
}

var readSteps = []step{
	{"downgrade", "rwlock/release_write", func(x *faultCase) {
		ctx := lock.WithOwner(x.ctx, x.c.NewOwner())
		w := mustLock(x, ctx, writing(x.c, x.name))
		r := mustLock(x, ctx, x.mine())
		var err error
		x.during(func() { err = w.Unlock(x.ctx) })
		x.ended(err)
		x.open()
		x.exactly(r)
		require.NoError(x, x.of(x.other, x.name).Do(x.Context(), nothing, lock.Wait(2*time.Second)))
		x.released(r)
	}},
}

var writeSteps = []step{
	{"release of a reader", "rwlock/release_read", func(x *faultCase) { x.passOn(reading, 1) }},
	{"release of one of several readers", "rwlock/release_read", func(x *faultCase) {
		theirs := mustLock(x, x.Context(), reading(x.other, x.name))
		h := mustLock(x, x.ctx, reading(x.c, x.name))
		waiter := x.line(x.here, 1)
		var err error
		x.during(func() { err = h.Unlock(x.ctx) })
		x.ended(err)
		x.open()
		require.NoError(x, theirs.Context().Err())
		require.True(x, waiter[0].Running())
		require.NoError(x, theirs.Unlock(x.Context()))
		x.getIn(waiter...)
	}},
	{"a writer leaves", "rwlock/leave", func(x *faultCase) {
		theirs := mustLock(x, x.Context(), reading(x.other, x.name))
		w := x.line(x.there, 1)[0]
		x.during(func() {
			w.Cancel(nil)
			harness.NotAcquired(x, w.End())
		})
		x.open()
		// Well before the sign of one that died would go.
		require.NoError(x, reading(x.other, x.name).Do(x.Context(), nothing, lock.Wait(3*time.Second)))
		require.Zero(x, x.number(x, "EXISTS", wire.WriterWaits(x.name)))
		require.NoError(x, theirs.Unlock(x.Context()))
	}},
}

var severalRow = func() requests {
	names := func(name string) []string { return []string{name, name + " 2", name + " 3"} }
	several := func(c *redlatch.Client, name string) lock.Locker {
		var members []lock.Locker
		for _, name := range names(name) {
			members = append(members, c.Lock(name))
		}
		return c.MultiLock(members...)
	}
	// all checks that a hold has every lock, and gives them back.
	all := func(x *faultCase, h lock.Hold) {
		x.Helper()
		for _, name := range names(x.name) {
			isTaken(x, x.other.Lock(name))
			require.EqualValues(x, 1, x.number(x, "HLEN", name))
		}
		x.certain(h, names(x.name)...)
		x.released(h)
	}
	r := requestsOf("multi", requests{
		acquire: "rlock/acquire_each", release: "rlock/release_each",
		steps: []step{
			{"lock", "rlock/acquire_each", func(x *faultCase) {
				var h lock.Hold
				var err error
				x.during(func() { h, err = x.mine().Lock(x.ctx, x.forever()...) })
				require.NoError(x, err)
				x.open()
				all(x, h)
			}},
			{"lock the rest", "rlock/acquire_each", func(x *faultCase) {
				theirs := mustLock(x, x.Context(), x.other.Lock(x.name))
				var w *call
				x.g.Keep(x, x.load(x, "rlock/acquire"), 1, func() { w = harness.StartLock(x, x.ctx, x.mine(), x.forever()...) })
				x.open()
				x.during(func() { require.NoError(x, theirs.Unlock(x.Context())); <-w.Ended })
				x.open()
				all(x, w.Got())
			}},
			{"the end of a lease", hashRenew, func(x *faultCase) {
				theirs := mustLock(x, x.Context(), x.other.Lock(names(x.name)[2]), lock.Lease(2*time.Second))
				var h lock.Hold
				var err error
				x.during(func() { h, err = x.mine().Lock(x.ctx, lock.Lease(10*time.Second)) })
				x.open()
				if x.fault.Unknown() {
					require.Error(x, err)
					require.NotErrorIs(x, err, lock.ErrLost)
				} else {
					require.NoError(x, err)
					all(x, h)
				}
				require.ErrorIs(x, theirs.Unlock(x.Context()), lock.ErrLost)
			}},
		},
	})
	r.of, r.rival = several, several
	return r
}()

// A request that arrives late, or is undone late, ends no other hold.

var withOwners = []requests{lockRow, plainRow, fairRow, readRow, writeRow}

// eachSite runs a test for each row at a site of its own.
func eachSite(t *testing.T, rows []requests, timeout time.Duration, test func(x *site)) {
	t.Helper()
	harness.EachOf(t, rows, func(r requests) string { return r.name }, func(t *testing.T, s *testserver.Server, r requests) {
		if timeout > 0 {
			r.timeout = timeout
		}
		x := &site{T: t, requests: r, scene: newScene(t, s, r.timeout), name: "orders"}
		x.prepare()
		test(x)
		x.unmake(t, s.Addr, x.name)
		harness.NothingStays(t, s.Addr)
	})
}

// held returns how many holds an owner has.
func (x *site) holds(h lock.Hold) int {
	x.Helper()
	return harness.HoldCount(x, x.lock(x.other, x.name), lock.OwnerOf(h))
}

// An attempt was answered: somebody else has the lock. A copy of it that arrives later
// takes the lock for a waiter that does not know. When the waiter tries again it must not
// be more certain of its lease than the server, nor believe that it has the lock when that
// was lost in between.
func TestACopyOfAnAttemptArrivesLate(t *testing.T) {
	wakes := map[string]struct{ channel, payload string }{
		"lock": {wire.LockChannel("orders"), wire.PayloadUnlocked}, "plain": {wire.PlainChannel("orders"), wire.PayloadUnlocked},
		"read": {wire.RWChannel("orders"), wire.PayloadWriteFree}, "write": {wire.RWChannel("orders"), wire.PayloadWriteFree},
	}
	for _, lost := range []bool{false, true} {
		t.Run(map[bool]string{false: "kept", true: "lost"}[lost], func(t *testing.T) {
			eachSite(t, []requests{lockRow, plainRow, readRow, writeRow}, 0, func(x *site) {
				first := mustLock(x, x.Context(), x.theirs())
				sha := x.load(x, x.acquire)
				reached := x.g.Arm(harness.Echo, sha, x.there)
				w := harness.StartLock(x, x.ctx, x.mine())
				harness.Reached(x, reached)
				harness.Waits(x, 1, x.c)
				x.ask(x, "DEL", x.name)
				x.open()
				require.EqualValues(x, 1, x.number(x, "EXISTS", x.name))
				wake := func() { x.ask(x, "PUBLISH", wakes[x.kind.name].channel, wakes[x.kind.name].payload) }
				if lost {
					x.ask(x, "DEL", x.name)
					second := mustLock(x, x.Context(), x.theirs())
					x.g.Keep(x, sha, 1, wake)
					x.open()
					harness.Waits(x, 1, x.c)
					require.True(x, w.Running())
					require.NoError(x, second.Unlock(x.Context())) // and wakes it
				} else {
					copied := x.number(x, "PTTL", x.name)
					harness.Eventually(x, soon, "time passes", func() bool { return x.number(x, "PTTL", x.name) < copied-200 })
					wake()
				}
				h := w.Got()
				ttl := time.Duration(x.number(x, "PTTL", x.name)) * time.Millisecond
				require.LessOrEqual(x, h.Remaining(), ttl+time.Millisecond)
				require.Equal(x, 1, x.holds(h))
				require.NoError(x, h.Unlock(x.ctx))
				require.ErrorIs(x, first.Unlock(x.Context()), lock.ErrLost)
			})
		})
	}
}

// The release that was sent first arrives when another was answered long ago.
func TestAReleaseThatArrivesLateEndsNoOtherHold(t *testing.T) {
	eachSite(t, withOwners, 0, func(x *site) {
		h := mustLock(x, x.ctx, x.mine())
		x.g.During(x, harness.DelayRequest, x.load(x, x.release), func() { require.NoError(x, h.Unlock(x.ctx)) })
		next := mustLock(x, x.ctx, x.mine())
		harness.Eventually(x, soon, "nothing is under way", func() bool { return x.c.Stats().Background == 0 })
		x.open()
		require.Equal(x, 1, x.holds(next))
		require.NoError(x, next.Unlock(x.ctx))
	})
}

// The request of a waiter of a fair lock arrives late, when one that came after it to the
// same client has its position. The client has them in another order than the server, and
// both get in.
func TestARequestForAPositionArrivesLate(t *testing.T) {
	eachSite(t, []requests{fairRow}, 0, func(x *site) {
		h := mustLock(x, x.Context(), x.theirs())
		first := x.parked(2)
		var late *call
		x.g.During(x, harness.DelayRequest, x.load(x, x.acquire), func() { late = harness.StartLock(x, x.ctx, x.mine()) })
		next := harness.StartLock(x, x.ctx, x.mine())
		harness.Eventually(x, soon, "it has a position", func() bool { return len(x.queue()) >= 2 })
		x.open()
		harness.Eventually(x, soon, "all have a position", func() bool { return len(x.queue()) == 3 })
		require.NoError(x, h.Unlock(x.ctx))
		harness.InOrder(x, first)
		begin := time.Now()
		inAnyOrder(x, next, late)
		heartbeat := x.timeout / 9 // which tells it
		require.Less(x, time.Since(begin), heartbeat+3*time.Second)
	})
}

// A copy of the request that took a fair lock arrives when the last hold of the client has released it, or when
// Unlock has learned that the lock was lost before it could hand it over. It is undone.
func TestACopyOfAnAcquisitionArrivesAfterAHandOff(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprint("lost=", lost), func(t *testing.T) {
			eachSite(t, []requests{fairRow}, time.Hour, func(x *site) {
				var first lock.Hold
				theirs := mustLock(x, x.Context(), x.theirs())
				w := x.parked(x.there)
				x.g.During(x, harness.DelayRequest, x.load(x, x.acquire), func() {
					require.NoError(x, theirs.Unlock(x.Context()))
					first = w.Got()
				})
				next := x.joined()
				if lost {
					x.ask(x, "DEL", x.name)
					require.ErrorIs(x, first.Unlock(x.ctx), lock.ErrLost)
				} else {
					require.NoError(x, first.Unlock(x.ctx))
				}
				h := next.Got()
				require.True(x, lost || lock.OwnerOf(first) == lock.OwnerOf(h), "the lock was handed over")
				require.NoError(x, h.Unlock(x.ctx))
				x.open()
				harness.Eventually(x, soon, "the lock is free", func() bool { return !harness.IsLocked(x, x.lock(x.other, x.name)) })
			})
		})
	}
}

// The request that gives something back in the background is lost just when the client of
// a semaphore is closed.
func TestCloseGivesBackWhatIsUnknown(t *testing.T) {
	eachSite(t, []requests{permitRow, numberRow}, 0, func(x *site) {
		undo := "semaphore/undo"
		if x.leased {
			undo = "semaphore/permit_undo"
		}
		check := func(script string, w *call) {
			x.g.During(x, harness.LoseRequest, x.load(x, script), func() { w.Cancel(nil) })
			x.c.Close()
			require.Error(x, w.End())
			x.open()
			x.dial(x.g)
		}
		var w *call
		x.g.Keep(x, x.load(x, x.acquire), 1, func() { w = harness.StartLock(x, x.ctx, x.mine()) })
		check(undo, w)
		h := mustLock(x, x.Context(), x.theirs()) // the only permit
		check("semaphore/leave", x.parked(x.there))
		require.Zero(x, x.number(x, "ZCARD", wire.SemaphoreWaiting(x.name)))
		require.NoError(x, h.Unlock(x.Context()))
	})
}
