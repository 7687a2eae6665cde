package contract_test

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

// watchdogTimeout is that of the clients. A renewal that is lost in silence is repeated
// before the lease is over, on a busy machine, too.
const watchdogTimeout = 12 * time.Second

// files returns what a script is made of.
func files(path string) []string {
	all := []string{path}
	switch dir, name, _ := strings.Cut(path, "/"); {
	case dir == "countdown" && name != "read":
		all = []string{"countdown/count", path}
	case dir != "semaphore":
	case strings.HasPrefix(name, "fast_"):
		all = []string{"semaphore/fast", path}
	case name == "permit_extend":
		all = []string{"semaphore/permits", path}
	case strings.HasPrefix(name, "permit_") && name != "permit_renew":
		all = []string{"semaphore/pool", "semaphore/permits", path}
	}
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

// ask sends a command apart from the clients under test.
func (s *scene) ask(t testing.TB, words ...string) rueidis.RedisResult {
	t.Helper()
	reply := s.conn.Do(context.Background(), s.conn.B().Arbitrary(words...).Build())
	if !rueidis.IsRedisNil(reply.Error()) {
		require.NoError(t, reply.Error(), "%v", words)
	}
	return reply
}

// number returns the reply to a command that is a number, list one that is a list.
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

// load makes the server know a script and returns its SHA.
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

// prepare makes the gate, the client and the object.
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

// call is a call of Lock in the background.
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

// joined starts a waiter behind others of its client, which makes no attempt of its own,
// and returns when it is parked.
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
		harness.Eventually(t, soon, "nobody listens: "+x.name, func() bool { return x.c.PubSub().Listeners == 0 })
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
	return c.PlainLock(name, rlock.WithBackoff(rlock.ConstantBackoff(time.Minute)))
}
