package semaphore_test

import (
	"context"
	_ "embed"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/semaphore"
)

//go:embed testdata/java.lua
var javaLua string

var javaScript = wire.NewScript(javaLua)

// The scripts do what the model does, in any order of steps, whatever happens to the
// requests, and keep the promises of a semaphore.
func TestLockstep(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		lockstep.Test[step]{
			Steps: lockstep.Size(40_000), Length: 80, Kinds: stepKinds,
			Outcomes: []string{
				"acquire 0", "acquire 1", "acquire 2", "acquire unanswered", "acquire delayed", "undo 0", "undo 1",
				"release 1", "release 0", "release -1", "release unanswered", "release delayed", "set 0", "set 1", "add 1", "add -1",
				"drain 0", "drain 2", "leave 1", "permit_acquire 0", "permit_acquire 1", "permit_acquire 2", "permit_acquire refused",
				"permit_undo 0", "permit_undo 1", "permit_release 0", "permit_release 1", "permit_set 0", "permit_set 1",
				"permit_extend 0", "permit_extend 1", "permit_left -2", "permit_left -1", "permit_renew 1",
				"party split", "placed", "served by a release", "again at once",
				"copy of acquire", "copy of release", "copy of undo", "copy of permit_acquire", "copy of permit_release", "copy of permit_undo",
				"copy of set", "copy of add", "copy of drain", "copy of permit_set",
			},
			Start: func(lane int) lockstep.Begin[step] {
				conn := lockstep.Connect(t, s.Addr, lane)
				return func(seed uint64, seen lockstep.Seen) lockstep.Walk[step] {
					return newWalk(t.Context(), conn, seed, seen)
				}
			},
		}.Run(t)
	})
}

// stepKinds are the kinds of steps.
var stepKinds = lockstep.Weights{
	{"wish", 18}, {"attempt", 22}, {"attempt woken", 8}, {"give up", 3}, {"try", 4}, {"settle", 9}, {"copy", 14},
	{"release", 20}, {"release foreign", 9}, {"time passes", 14}, {"add", 3}, {"set", 4}, {"drain", 4},
	{"java acquire", 4}, {"java release", 3}, {"java add", 1}, {"java drain", 1}, {"java sweep", 2},
	{"permit set", 5}, {"extend", 4}, {"renew", 4}, {"look", 7},
	{"set for", 2}, {"delete", 3}, {"expire", 3},
}

// Some kinds of steps are for one kind of semaphore only. Wild walks alone have those by
// which permits are lost on purpose.
var (
	ofPlain     = []lockstep.Kind{"drain", "java drain"}
	ofExpirable = []lockstep.Kind{"permit set", "extend", "renew", "look", "java sweep", "expire"}
	wildly      = []lockstep.Kind{"set for", "delete", "expire"}
)

// step is a step. What it does depends on the state that it meets.
type step struct {
	lockstep.Kind
	client int
	which  int
	n      int64
	size   int // of a party
	waits  bool
	fault  fault
	ms     int64
	lease  int64
}

// fault is what happens to a request.
type fault string

const (
	answered   fault = "answered"
	unanswered fault = "unanswered"
	delayed    fault = "delayed" // until a copy of it is delivered, if ever
	refused    fault = "refused" // for want of a right
)

// Draw implements lockstep.Walk.
func (x *walk) Draw(r *rand.Rand) step {
	s := step{
		Kind: stepKinds.Only(func(kind lockstep.Kind) bool {
			return (x.wild || !slices.Contains(wildly, kind)) &&
				!slices.Contains(map[bool][]lockstep.Kind{true: ofPlain, false: ofExpirable}[x.expirable], kind)
		}).Draw(r),
		client: r.IntN(clients), which: r.IntN(1000), n: 1 + r.Int64N(3), size: 1 + r.IntN(4), waits: r.IntN(8) > 0, fault: answered,
		ms:    []int64{0, 1, 30, 70, 99, 100, 101, 500, 999, 1000, 1001, 3000, 3333, 5000, 10_000, 10_001}[r.IntN(16)],
		lease: []int64{0, 0, 0, 1, 500, 1000, 1000, 5000, 10_000, 30_000}[r.IntN(10)],
	}
	if r.IntN(8) == 0 || s.Kind == "release foreign" && r.IntN(4) == 0 {
		s.n = []int64{6, 10, mostPermits, mostPermits - 3}[r.IntN(4)]
	}
	if r.IntN(40) == 0 {
		s.ms = []int64{30_000, 60_000, 60_001, 3_600_000}[r.IntN(4)]
	}
	if !x.w.exists && !x.expirable && r.IntN(10) == 0 {
		s.Kind = "release foreign" // nothing else is refused then
	}
	switch n := r.IntN(12); {
	case n < 3:
		s.fault = unanswered
	case n < 5:
		s.fault = delayed
	case n < 10 && x.wild:
		s.fault = refused
	}
	return s
}

const clients = 3

// client is a process of ours.
type client struct {
	id     string
	place  int64
	lanes  int
	idle   []numbered
	wishes []*pending
	held   []wish
	// Of the last attempt for those who wait.
	wakeAt int64 // 0: a message has to
	woken  bool
	placed bool
	blind  bool // somebody was served since, who may let permits expire
}

// pending is somebody who waits for permits.
type pending struct {
	permits int64
	began   int64
	lease   int64
	ids     []string
}

// request is something that was sent, perhaps, and can be again.
type request struct {
	script string
	client *client
	call   numbered
	keys   []string
	args   []string
	apply  func() []int64
	ask    ask
	party  []*pending // who asks
	reply  []int64    // to the first that took effect
	doubt  bool       // whether its reply is still to come
	over   bool       // whether it was called off
	at     int64      // when it was sent
	back   int64      // how many permits of its client it releases
}

func (r *request) acquires() bool { return strings.HasSuffix(r.script, "acquire") }

// served is how many of its wishes a reply says it has granted.
func (r *request) served(reply []int64) int {
	switch {
	case len(reply) == 0 || len(r.party) == 0:
	case r.acquires():
		return int(max(0, reply[0]))
	case strings.HasSuffix(r.script, "release") && reply[0] == 1:
		return int(reply[2])
	}
	return 0
}

// walk is a model and the scripts.
type walk struct {
	ctx       context.Context
	conn      *lockstep.Client
	w         *world
	expirable bool
	wild      bool
	clients   []*client
	sent      []*request
	ids       int
	total     int64 // permits that there are, taken and free
	seen      lockstep.Seen
}

func newWalk(ctx context.Context, conn *lockstep.Client, seed uint64, seen lockstep.Seen) *walk {
	x := &walk{ctx: ctx, conn: conn, w: newWorld(), expirable: seed%2 == 0, wild: seed%3 == 2, seen: seen}
	x.w.now = 1_700_000_000_000
	for n := range clients {
		x.clients = append(x.clients, &client{id: fmt.Sprintf("client-%c", 'c'-n), place: []int64{3_000, 1_000, 2_000}[n]})
	}
	conn.Reset(x.w.now)
	return x
}

func (x *walk) see(what ...any) { x.seen.See(what...) }

// newIDs returns permits with all bytes there are.
func (x *walk) newIDs(n int64) []string {
	if !x.expirable {
		return nil
	}
	ids := make([]string, n)
	for i := range ids {
		x.ids++
		b := []byte(fmt.Sprintf("%016d", x.ids))
		for j := range 8 {
			b[j] = byte((x.ids*37 + j*59) * 31)
		}
		ids[i] = string(b)
	}
	return ids
}

// next returns a number for a new request.
func (c *client) next() numbered {
	if n := len(c.idle); n > 0 {
		last := c.idle[n-1]
		c.idle = c.idle[:n-1]
		last.number++
		return last
	}
	c.lanes++
	return numbered{wire.SemaphoreRequest(key, c.id, c.lanes), 1}
}

func (c *client) answered(last numbered) { c.idle = append(c.idle, last) }

// request returns one with a number.
func (x *walk) request(script string, c *client, args ...string) *request {
	return x.requestAs(script, c, c.next(), args...)
}

func (x *walk) requestAs(script string, c *client, n numbered, args ...string) *request {
	r := &request{script: script, client: c, call: n}
	r.keys = []string{key, n.ticket, wire.SemaphoreWaiting(key), wire.SemaphoreAlive(key)}
	if x.expirable {
		r.keys = append(r.keys, wire.PermitTimeouts(key))
	}
	r.args = append([]string{itoa(n.number), itoa(int64(ticketLife)), "PUBLISH", wire.SemaphoreChannel(key)}, args...)
	return r
}

// kindOf is the script that does something to this kind of semaphore.
func (x *walk) kindOf(script string) string {
	if x.expirable {
		return "permit_" + script
	}
	return script
}

// asks adds a party to a request.
func (x *walk) asks(r *request, party []*pending, waits bool) ask {
	party = slices.Clone(party)
	a := ask{place: r.client.place}
	if waits {
		a.client = r.client.id
	}
	r.party = party
	r.args = append(r.args, a.client, itoa(int64(toTheLine)), itoa(a.place), itoa(len(party)))
	var ids []string
	for _, p := range party {
		if p.ids == nil {
			p.ids = x.newIDs(p.permits)
		}
		w := wish{p.permits, x.w.now - p.began, p.lease, p.ids}
		a.wishes = append(a.wishes, w)
		r.args = append(r.args, itoa(w.permits), itoa(w.waited))
		if x.expirable {
			r.args = append(r.args, leaseArg(w.lease))
		}
		ids = append(ids, p.ids...)
	}
	r.args, r.ask = append(r.args, ids...), a
	return a
}

func leaseArg(lease int64) string {
	if lease == 0 {
		return "forever"
	}
	return itoa(lease)
}

// deliver has the server and the model do a request, and compares the two.
func (x *walk) deliver(r *request, denied string) []int64 {
	before := x.w.clone()
	script := semaphore.Scripts[r.script]
	if script == nil {
		script = javaScript
	}
	x.conn.Denied = denied
	result := script.Exec(x.ctx, x.conn, r.keys, r.args)
	x.conn.Denied = ""
	real, err := result.AsIntSlice()
	if n, bare := result.AsInt64(); bare == nil {
		real, err = []int64{n}, nil
	}
	x.w.denied, x.w.failed = denied, false
	_, repeated := x.w.known(r.call)
	want := r.apply()
	x.w.denied = ""
	switch {
	case x.w.failed && err == nil:
		lockstep.Failf("the server replies %v, and ought to fail", real)
	case x.w.failed:
	case err != nil:
		lockstep.Check(err)
	case !slices.Equal(real, want):
		lockstep.Failf("the server replies %v, and ought to reply %v", real, want)
	}
	_, noted := x.w.known(r.call)
	if !repeated && (noted || r.call.ticket == "") && r.reply == nil && !x.w.failed {
		r.reply = want
		x.counted(r)
	}
	told := len(x.w.told) > 0
	for _, n := range x.w.told {
		if n <= 0 && !strings.HasPrefix(r.script, "java") {
			lockstep.Failf("%d permits were told of", n)
		}
	}
	// Whoever makes a semaphore anew whose permits have outlived it may not know that
	// they have expired.
	anew := x.wild && !before.exists && x.w.exists
	for _, c := range x.clients {
		c.woken = c.woken || told || denied != "" || anew
		c.blind = c.blind || x.expirable && c != r.client && r.served(want) > 0
	}
	x.inOrder(before, r, want)
	return want
}

// counted notes what a request has done to the number of permits.
func (x *walk) counted(r *request) {
	n := func(i int) int64 { n, _ := strconv.ParseInt(r.args[i], 10, 64); return n }
	switch {
	case r.reply[0] == 0:
	case r.script == "set", r.script == "add" && r.reply[0] == 1:
		x.total += n(4)
	case strings.HasSuffix(r.script, "drain"):
		x.total -= r.reply[0]
	case r.script == "release" && r.back == 0 && r.reply[0] == 1:
		x.total += n(4)
	case r.script == "permit_set":
		x.total = n(4)
	case r.script == "java_acquire":
		x.total -= n(2)
	case r.script == "java_release" || r.script == "java_add":
		x.total += n(2)
	}
}

// inOrder fails the walk if a client was served before the first that is alive.
func (x *walk) inOrder(before *world, r *request, reply []int64) {
	if _, known := before.known(r.call); known || r.client == nil {
		return
	}
	me := r.ask.client
	for served := range r.served(reply) {
		if first := before.first(); first != "" && first != me && before.line.scores[first] < before.now-r.ask.wishes[served].waited {
			lockstep.Failf("wish %d of %q was granted, but %q was first", served, me, first)
		}
		before.stepOut(me)
	}
}

func (x *walk) compare() { x.conn.Compare(x.w.state()) }

// Take implements lockstep.Walk.
func (x *walk) Take(s step) bool {
	did := x.do(s)
	x.compare()
	if sum := x.sum(); sum != x.total && !x.wild {
		lockstep.Failf("there are %d permits, and ought to be %d", sum, x.total)
	}
	x.awake()
	return did
}

// sum is how many permits there are: those that are free, and those that a client has, or
// may have.
func (x *walk) sum() int64 {
	if x.expirable {
		return x.w.sum()
	}
	sum := x.w.free
	for _, c := range x.clients {
		for _, g := range c.held {
			sum += g.permits
		}
	}
	for _, r := range x.sent {
		switch {
		case !r.doubt || r.over:
			continue
		case r.reply == nil:
			sum += r.back // not yet given back
		}
		for _, g := range r.ask.wishes[:r.served(r.reply)] {
			sum += g.permits
		}
	}
	return sum
}

// attempt is what an ask comes to in a world.
func (x *walk) attempt(w *world, a ask) (served, again int64) {
	do := w.acquire
	if x.expirable {
		do = w.permitAcquire
	}
	reply := do(numbered{"probe", 1}, a)
	delete(w.tickets, "probe")
	return reply[0], reply[1]
}

func (x *walk) wishOf(p *pending) wish {
	ids := make([]string, p.permits)
	for i := range ids {
		ids[i] = fmt.Sprint("probe ", i)
	}
	return wish{p.permits, x.w.now - p.began, p.lease, ids}
}

// due reports whether a client knows that it ought to try.
func (x *walk) due(c *client) bool {
	return len(c.wishes) > 0 && (c.woken || c.wakeAt != 0 && c.wakeAt <= x.w.now)
}

// awake fails the walk if a client sleeps that could be served. It need not know of permits
// that expire and were taken since its last attempt, if it looks again by itself.
func (x *walk) awake() {
	for _, c := range x.clients {
		if len(c.wishes) == 0 || x.due(c) {
			continue
		}
		a := ask{client: c.id, place: c.place, wishes: []wish{x.wishOf(c.wishes[0])}}
		if served, _ := x.attempt(x.w.clone(), a); served > 0 && !(c.blind && c.wakeAt != 0) {
			lockstep.Failf("%s could be served, and sleeps", c.id)
		}
	}
}

// settled is what a client makes of the reply to a request for waiters: how many were
// served, when to look again, and whether the next stands in line.
func (x *walk) settled(r *request, reply []int64) {
	c, n := r.client, int(reply[0])
	c.held = append(c.held, r.ask.wishes[:n]...)
	c.wishes = slices.DeleteFunc(c.wishes, func(p *pending) bool { return slices.Contains(r.party[:n], p) })
	if len(r.party) == 0 {
		return
	}
	c.placed, c.woken, c.blind, c.wakeAt = reply[2] == 1, n == len(r.party), false, 0
	if c.woken {
		return // the next is to try
	}
	again := int64(-1)
	if waited := x.w.now - r.party[n].began; c.placed {
		again = c.place / 3
	} else if waited < toTheLine {
		again = toTheLine - waited
	}
	if reply[1] >= 0 && (again < 0 || reply[1] < again) {
		again = reply[1]
	}
	if again >= 0 {
		c.wakeAt = x.w.now + again
	}
	if again > 0 {
		return
	}
	x.see("again at once")
	w := x.w.clone()
	w.told = nil
	before := w.state()
	a := ask{client: c.id, place: c.place}
	for _, p := range r.party[n:] {
		a.wishes = append(a.wishes, x.wishOf(p))
	}
	if served, again := x.attempt(w, a); served == 0 && again == 0 && reflect.DeepEqual(w.state(), before) {
		lockstep.Failf("%s looks again at once, and will for ever", c.id)
	}
}

// send makes a request, to which a fault may happen. It returns the reply, nil if there is
// none.
func (x *walk) send(r *request, f fault) []int64 {
	r.at = x.w.now
	x.sent = append(x.sent, r)
	if f == delayed {
		r.doubt = true
		x.see(r.script, f)
		return nil
	}
	denied := ""
	if f == refused {
		denied = "PUBLISH"
		if r.acquires() {
			denied = "INCRBY"
		}
	}
	reply := x.deliver(r, denied)
	switch {
	case f == unanswered:
		r.doubt = true
		x.see(r.script, f)
		return nil
	case reply == nil:
		x.see(r.script, refused)
	default:
		x.see(r.script, max(-2, min(2, reply[0])))
	}
	if r.client != nil {
		r.client.answered(r.call)
	}
	return reply
}

// unknown is for waiters of whose request nothing is known.
func (x *walk) unknown(r *request) {
	r.client.woken = true
	for _, p := range r.party {
		p.ids = nil
	}
}

// acquire asks for permits for a party.
func (x *walk) acquire(c *client, party []*pending, waits bool, f fault) {
	r := x.request(x.kindOf("acquire"), c)
	a := x.asks(r, party, waits)
	r.apply = func() []int64 {
		if x.expirable {
			return x.w.permitAcquire(r.call, a)
		}
		return x.w.acquire(r.call, a)
	}
	reply := x.send(r, f)
	switch {
	case reply == nil:
		x.unknown(r)
		return
	case !waits:
		c.held = append(c.held, a.wishes[:reply[0]]...)
		return
	}
	if len(r.party) > 1 && reply[0] > 0 && reply[0] < int64(len(r.party)) {
		x.see("party split")
	}
	if reply[2] == 1 {
		x.see("placed")
	}
	x.settled(r, reply)
}

// release gives permits back that a client has, or that others have.
func (x *walk) release(c *client, g wish, foreign, ifExists bool, party []*pending, f fault) {
	r := x.request(x.kindOf("release"), c, itoa(g.permits))
	if !foreign {
		r.back = g.permits
	}
	if x.expirable {
		r.args = append(r.args, g.ids...)
		a := x.asks(r, party, true)
		r.apply = func() []int64 { return x.w.permitRelease(r.call, g.ids, a) }
	} else {
		r.args = append(r.args, wire.Flag(ifExists))
		a := x.asks(r, party, true)
		r.apply = func() []int64 { return x.w.release(r.call, g.permits, ifExists, a) }
	}
	reply := x.send(r, f)
	switch {
	case reply == nil:
		x.unknown(r)
		return
	case reply[0] != 1:
		c.woken = true
		if !foreign && reply[0] < 0 {
			c.held = append(c.held, g)
		}
		return
	}
	x.settled(r, reply[2:])
	if reply[2] > 0 {
		x.see("served by a release")
	}
	if reply[1] == 0 {
		c.woken = true
	}
}

// settle finds out what became of a request.
func (x *walk) settle(r *request, f fault) {
	c := r.client
	if !r.acquires() {
		if reply := x.deliver(r, ""); f != answered {
			return
		} else if reply[0] == 1 {
			c.held = append(c.held, r.ask.wishes[:reply[2]]...)
		} else if reply[0] < 0 && r.back > 0 {
			c.held = append(c.held, wish{permits: r.back})
		}
	} else {
		var args []string
		var permits []int64
		for _, g := range r.ask.wishes {
			permits = append(permits, g.permits)
			if x.expirable {
				args = append(args, g.ids...)
			} else {
				args = append(args, itoa(g.permits))
			}
		}
		u := x.requestAs(x.kindOf("undo"), c, r.call, args...)
		u.apply = func() []int64 {
			if x.expirable {
				return x.w.permitUndo(r.call, args)
			}
			return x.w.undo(r.call, permits)
		}
		x.sent = append(x.sent, u)
		x.see(u.script, min(1, x.deliver(u, "")[0]))
		r.over = true
	}
	if f == answered {
		r.doubt = false
		c.answered(r.call)
	}
}

// giveUp ends a wait.
func (x *walk) giveUp(c *client, n int) {
	c.wishes = slices.Delete(c.wishes, n, n+1)
	if n > 0 {
		return
	}
	c.woken = true
	if !c.placed {
		return
	}
	c.placed = false
	r := x.request("leave", c, c.id)
	r.keys = r.keys[:4]
	x.plain(r, func() []int64 { return x.w.leave(c.id) })
}

// plain makes a request that only has a reply.
func (x *walk) plain(r *request, apply func() []int64) {
	r.apply = apply
	x.send(r, answered)
}

// apart is a request without a number.
func apart(script string, keys []string, args ...string) *request {
	return &request{script: script, keys: keys, args: args}
}

// some returns one of the permits that are taken, if any is, often one that expires
// just now; or else one that is not.
func (x *walk) some(which int) string {
	ids := x.w.taken.order()
	for _, id := range ids {
		if x.w.taken.scores[id] == x.w.now && which%2 == 0 {
			return id
		}
	}
	if len(ids) > 0 && which%5 > 0 {
		return ids[which%len(ids)]
	}
	return fmt.Sprintf("nobody has this%d", which%2)
}

// do takes a step and returns whether there was anything to do. The caller compares.
func (x *walk) do(s step) bool {
	c := x.clients[s.client]
	both := []string{key, wire.PermitTimeouts(key)}
	javaNow := x.w.now + []int64{0, 0, 2000, -2000}[s.which%4]
	size := min(s.size, len(c.wishes))
	switch s.Kind {
	case "wish":
		if len(c.wishes) == 4 {
			return false
		}
		c.wishes = append(c.wishes, &pending{permits: min(s.n, 10), began: x.w.now, lease: s.lease})
		c.woken = c.woken || len(c.wishes) == 1
	case "attempt woken":
		n := slices.IndexFunc(x.clients, x.due)
		if n < 0 {
			return false
		}
		x.acquire(x.clients[n], x.clients[n].wishes, true, answered)
	case "attempt":
		if size == 0 {
			return false
		}
		x.acquire(c, c.wishes[:size], true, s.fault)
	case "give up":
		if size == 0 {
			return false
		}
		x.giveUp(c, s.which%2*(size-1))
	case "try":
		if s.n > 10 {
			return false
		}
		began := x.w.now - int64(s.which%2)*s.ms // it may have been held up on its way
		x.acquire(c, []*pending{{permits: s.n, began: began, lease: s.lease}}, false, s.fault)
	case "settle":
		var doubts []*request
		for _, r := range x.sent {
			if r.doubt {
				doubts = append(doubts, r)
			}
		}
		if len(doubts) == 0 {
			return false
		}
		x.settle(doubts[s.which%len(doubts)], s.fault)
	case "copy":
		// What had no effect may have one the second time; so may what is forgotten.
		var safe []*request
		for _, r := range x.sent[max(0, len(x.sent)-20):] {
			_, known := x.w.known(r.call)
			if r.client != nil && (known || x.wild || r.doubt && !r.over || r.script == "leave") {
				safe = append(safe, r)
			}
		}
		if len(safe) == 0 {
			return false
		}
		r := safe[s.which%len(safe)]
		x.see("copy of", r.script)
		x.deliver(r, "")
	case "release":
		if len(c.held) == 0 {
			return false
		}
		n := s.which % len(c.held)
		g := c.held[n]
		c.held = slices.Delete(c.held, n, n+1)
		if keep := g.permits - s.n; keep > 0 && s.which%3 == 0 {
			rest := wish{permits: keep}
			if x.expirable {
				g.ids, rest.ids = g.ids[:s.n], g.ids[s.n:]
			}
			g.permits = s.n
			c.held = append(c.held, rest)
		}
		if !s.waits {
			size = 0
		}
		x.release(c, g, false, s.which%4 == 0, c.wishes[:size], s.fault)
	case "release foreign":
		g := wish{permits: s.n}
		if x.expirable {
			g = wish{permits: 1, ids: []string{x.some(s.which)}}
			if other := x.some(s.which + 1); s.n == 2 && other != g.ids[0] {
				g = wish{permits: 2, ids: []string{g.ids[0], other}}
			}
		}
		x.release(c, g, true, s.which%2 == 0, c.wishes[:size], s.fault)
	case "time passes":
		// Often just until something ends.
		for _, ends := range []*set{&x.w.taken, &x.w.alive} {
			for _, at := range ends.scores {
				if left := at - x.w.now; s.which%3 == 0 && left > 0 && left < s.ms {
					s.ms = left
				}
			}
		}
		for _, r := range x.sent { // its background has given up by then, or knows
			if r.doubt && x.w.now+s.ms-r.at >= ticketLife && !x.wild {
				x.settle(r, answered)
				x.compare()
			}
		}
		x.w.pass(s.ms)
		x.conn.Wait(x.w.now)
	case "set", "set for":
		ttl, life := int64(0), ""
		if s.Kind == "set for" {
			ttl = s.ms + 1
			life = itoa(ttl)
		}
		n := s.n - 1
		r := x.request("set", c, itoa(n), life)
		x.plain(r, func() []int64 { return x.w.set(r.call, n, ttl) })
	case "add":
		n, told := x.signed(s), "total"
		if x.expirable {
			told = "delta"
		}
		r := x.request("add", c, itoa(n), told)
		x.plain(r, func() []int64 { return x.w.add(r.call, n, x.expirable) })
	case "drain":
		r := x.request("drain", c)
		x.plain(r, func() []int64 { return x.w.drain(r.call) })
	case "permit set":
		n := min(2*s.n-1, mostPermits)
		if s.which%3 == 0 {
			n = max(0, x.w.sum()) // as many as there are
		}
		r := x.request("permit_set", c, itoa(n))
		x.plain(r, func() []int64 { return x.w.permitSet(r.call, n) })
	case "extend":
		id := x.some(s.which)
		how := []string{"least", "just"}[s.size%2]
		if how == "just" {
			for _, c := range x.clients {
				c.woken = true // for it may come back sooner, and nobody is told
			}
		}
		x.plain(apart("permit_extend", both, id, leaseArg(s.lease), how),
			func() []int64 { return x.w.permitExtend(id, s.lease, how == "least") })
	case "renew":
		lease := max(1, s.lease)
		r := apart("permit_renew", nil, itoa(lease))
		var ids []string
		for i := range s.size {
			ids = append(ids, x.some(s.which+i))
			r.keys = append(r.keys, wire.PermitTimeouts(key))
			r.args = append(r.args, ids[i], "0")
		}
		x.plain(r, func() []int64 { return x.w.permitRenew(ids, lease) })
	case "look":
		x.plain(apart("permit_counts", both), x.w.permitCounts)
		id := x.some(s.which)
		x.plain(apart("permit_left", both, id), func() []int64 { return x.w.permitLeft(id) })
	case "java acquire":
		ids, deadline := x.newIDs(min(3, s.n)), javaNow+s.lease
		if s.lease == 0 {
			deadline = neverExpires
		}
		if x.expirable {
			x.plain(java("permit_acquire", javaNow, append([]string{itoa(deadline)}, ids...)...),
				func() []int64 { return x.w.javaPermitAcquire(javaNow, deadline, ids) })
		} else {
			x.plain(java("acquire", s.n), func() []int64 { return x.w.javaAcquire(s.n) })
		}
	case "java release":
		if id, n := x.some(s.which), min(3, s.n); x.expirable {
			x.plain(java("permit_release", javaNow, id), func() []int64 { return x.w.javaPermitRelease(javaNow, id) })
		} else {
			x.plain(java("release", n), func() []int64 { return x.w.javaRelease(n) })
		}
	case "java sweep":
		x.plain(java("permit_sweep", javaNow), func() []int64 { return x.w.javaPermitSweep(javaNow) })
	case "java add":
		n, told := x.signed(s), "total"
		if x.expirable {
			told = "delta"
		}
		if max(n, -n) >= 10 {
			return false
		}
		x.plain(java("add", n, told), func() []int64 { return x.w.javaAdd(n, x.expirable) })
	case "java drain":
		x.plain(java("drain", 0), x.w.javaDrain)
	case "delete", "expire":
		x.fault(s)
	}
	return true
}

// java is a request of a Java client.
func java(what string, n int64, more ...string) *request {
	return apart("java_"+what, []string{key, wire.PermitTimeouts(key)},
		append([]string{what, wire.SemaphoreChannel(key), itoa(n)}, more...)...)
}

// signed is how many permits to add, sometimes just too many.
func (x *walk) signed(s step) int64 {
	switch {
	case s.which%20 == 0:
		return -mostPermits - x.w.free - 1
	case s.which%20 == 1:
		return mostPermits - x.w.free + 1
	case s.which%40 == 2:
		return -mostPermits - x.w.free // as many as can be taken away
	}
	if s.which%3 == 0 {
		return -s.n
	}
	return s.n
}

// fault deletes a key by hand, or lets the semaphore end.
func (x *walk) fault(s step) {
	for _, c := range x.clients {
		c.woken = true
	}
	keys, del := []string{key, wire.PermitTimeouts(key)}, s.Kind == "delete"
	if del {
		all := append(keys, key, wire.SemaphoreWaiting(key), wire.SemaphoreAlive(key), wire.SemaphoreRequest(key, x.clients[s.client].id, 1))
		keys = all[s.which%len(all):][:1]
	} else {
		keys = keys[s.which%3/2:] // or only those that are taken
	}
	for _, k := range keys {
		cmd := x.conn.B().Del().Key(k).Build()
		if !del {
			cmd = x.conn.B().Pexpire().Key(k).Milliseconds(s.ms + 1).Build()
		}
		lockstep.Check(x.conn.Do(x.ctx, cmd).Error())
		x.w.fault(k, s.ms+1, del)
	}
}

// End implements lockstep.Walk. It ends everything that is under way: then all permits
// can be acquired.
func (x *walk) End() {
	for _, c := range x.clients {
		for len(c.wishes) > 0 {
			x.giveUp(c, 0)
		}
	}
	for _, r := range x.sent {
		if r.doubt {
			x.settle(r, answered)
		}
	}
	for _, c := range x.clients {
		for _, g := range slices.Clone(c.held) {
			c.held = c.held[1:]
			x.release(c, g, false, false, nil, answered)
		}
	}
	x.compare()
	if x.wild {
		return
	}
	x.Take(step{Kind: "time passes", which: 1, ms: 3_600_000})
	rest := x.total
	for _, at := range x.w.taken.scores {
		if at == neverExpires {
			rest--
		}
	}
	if rest < 1 || rest > 100 {
		return
	}
	c := x.clients[0]
	x.acquire(c, []*pending{{permits: rest, began: x.w.now}}, false, answered)
	if len(c.held) != 1 {
		lockstep.Failf("%d permits cannot be acquired", rest)
	}
	x.compare()
}
