package semaphore_test

import (
	"context"
	_ "embed"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

// The scripts and the model take the same random steps. After each, replies and
// everything on the server are compared, and what a semaphore promises is checked.
//
// REDLATCH_MODEL_SEED repeats a run, REDLATCH_MODEL_STEPS makes it longer.

var (
	//go:embed testdata/virtual.lua
	virtualLua string
	//go:embed testdata/dump.lua
	dumpLua string
	//go:embed testdata/harm.lua
	harmLua string
	//go:embed testdata/java_acquire.lua
	javaAcquireLua string
	//go:embed testdata/java_release.lua
	javaReleaseLua string
	//go:embed testdata/java_drain.lua
	javaDrainLua string
	//go:embed testdata/java_add.lua
	javaAddLua string
	//go:embed testdata/java_permit_acquire.lua
	javaPermitAcquireLua string
	//go:embed testdata/java_permit_release.lua
	javaPermitReleaseLua string
	//go:embed testdata/java_permit_sweep.lua
	javaPermitSweepLua string

	//go:embed pool.lua
	poolLua string
	//go:embed permits.lua
	permitsLua string
	//go:embed acquire.lua
	acquireLua string
	//go:embed undo.lua
	undoLua string
	//go:embed release.lua
	releaseLua string
	//go:embed set.lua
	setLua string
	//go:embed add.lua
	addLua string
	//go:embed drain.lua
	drainLua string
	//go:embed leave.lua
	leaveLua string
	//go:embed permit_acquire.lua
	permitAcquireLua string
	//go:embed permit_undo.lua
	permitUndoLua string
	//go:embed permit_release.lua
	permitReleaseLua string
	//go:embed permit_set.lua
	permitSetLua string
	//go:embed permit_counts.lua
	permitCountsLua string
	//go:embed permit_left.lua
	permitLeftLua string
	//go:embed permit_extend.lua
	permitExtendLua string
	//go:embed permit_renew.lua
	permitRenewLua string
)

// sources are the scripts as they are sent.
var sources = map[string]string{
	"acquire":        poolLua + acquireLua,
	"undo":           poolLua + undoLua,
	"release":        poolLua + releaseLua,
	"set":            poolLua + setLua,
	"add":            poolLua + addLua,
	"drain":          poolLua + drainLua,
	"leave":          poolLua + leaveLua,
	"permit_acquire": poolLua + permitsLua + permitAcquireLua,
	"permit_undo":    poolLua + permitsLua + permitUndoLua,
	"permit_release": poolLua + permitsLua + permitReleaseLua,
	"permit_set":     poolLua + permitsLua + permitSetLua,
	"permit_counts":  permitCountsLua,
	"permit_left":    permitsLua + permitLeftLua,
	"permit_extend":  permitsLua + permitExtendLua,
	"permit_renew":   permitRenewLua,

	"java_acquire":        javaAcquireLua,
	"java_release":        javaReleaseLua,
	"java_drain":          javaDrainLua,
	"java_add":            javaAddLua,
	"java_permit_acquire": javaPermitAcquireLua,
	"java_permit_release": javaPermitReleaseLua,
	"java_permit_sweep":   javaPermitSweepLua,
	"harm":                harmLua,
}

const (
	modelSteps = 20_000
	walkSteps  = 80
	beginning  = 1_700_000_000_000
)

// lab is a server whose time only the test moves.
type lab struct {
	ctx     context.Context
	conn    rueidis.Client
	scripts map[string]*wire.Script
	dump    *wire.Script
}

func newLab(t *testing.T, s *testserver.Server) *lab {
	l := &lab{t.Context(), harness.Conn(t, s.Addr), map[string]*wire.Script{}, wire.NewScript(virtualLua + dumpLua)}
	for name, source := range sources {
		l.scripts[name] = wire.NewScript(virtualLua + source)
	}
	return l
}

func (l *lab) do(words ...string) {
	if err := l.conn.Do(l.ctx, l.conn.B().Arbitrary(words...).Build()).Error(); err != nil {
		panic(err)
	}
}

// op is one step. What it means depends on what was before, so that it means
// something in any sequence.
type op struct {
	do     string
	client int
	which  int
	n      int64
	size   int // of a party
	waits  bool
	fate   fate
	ms     int64
	lease  int64
}

// fate is what becomes of a request.
type fate int

const (
	answered fate = iota
	unanswered
	delayed // until a copy of it is delivered, if ever
	refused // for want of a right
)

func (f fate) String() string {
	return [...]string{"answered", "unanswered", "delayed", "refused"}[f]
}

func (o op) String() string {
	return fmt.Sprintf("%-16s client %d, which %d, n %d, size %d, waits %t, %v, %d ms, lease %d",
		o.do, o.client, o.which, o.n, o.size, o.waits, o.fate, o.ms, o.lease)
}

var weights = []struct {
	do        string
	n         int
	expirable bool // only for such; otherwise for both
}{
	{"wish", 12, false}, {"attempt", 20, false}, {"attempt woken", 8, false}, {"give up", 3, false},
	{"try", 4, false}, {"settle", 9, false}, {"copy", 6, false}, {"release", 20, false}, {"release foreign", 5, false},
	{"time passes", 14, false}, {"add", 3, false}, {"set", 2, false}, {"drain", 2, false},
	{"java acquire", 4, false}, {"java release", 3, false}, {"java add", 1, false}, {"java drain", 1, false},
	{"set for", 2, false}, {"delete", 3, false},
	{"permit set", 3, true}, {"extend", 4, true}, {"renew", 4, true}, {"look", 5, true}, {"java sweep", 2, true}, {"expire", 1, true},
}

// What only wild walks do: there permits are lost because somebody wants them to be.
var wildly = []string{"set for", "delete", "expire"}

func draw(r *rand.Rand, expirable, wild bool) op {
	total := 0
	possible := func(i int) bool {
		w := weights[i]
		return (expirable || !w.expirable) && (wild || !slices.Contains(wildly, w.do))
	}
	for i, w := range weights {
		if possible(i) {
			total += w.n
		}
	}
	o := op{
		client: r.IntN(clients), which: r.IntN(1000), n: 1 + r.Int64N(3), size: 1 + r.IntN(4), waits: r.IntN(8) > 0,
		ms:    []int64{0, 1, 30, 70, 99, 100, 101, 500, 999, 1000, 1001, 3000, 3333, 5000, 10_000, 10_001}[r.IntN(16)],
		lease: []int64{0, 1, 500, 1000, 1000, 5000, 10_000, 30_000}[r.IntN(8)],
	}
	if r.IntN(8) == 0 {
		o.n = []int64{6, 10, mostPermits, mostPermits - 3}[r.IntN(4)]
	}
	if r.IntN(40) == 0 {
		o.ms = []int64{30_000, 60_000, 60_001, 3_600_000}[r.IntN(4)]
	}
	switch n := r.IntN(8); {
	case n < 1:
		o.fate = unanswered
	case n < 2:
		o.fate = delayed
	case n < 4 && wild:
		o.fate = refused
	}
	pick := r.IntN(total)
	for i, w := range weights {
		if !possible(i) {
			continue
		}
		if pick < w.n {
			o.do = w.do
			return o
		}
		pick -= w.n
	}
	panic("unreachable")
}

const clients = 3

// client is a process of ours.
type client struct {
	id     string
	place  int64
	lanes  int
	idle   []numbered
	wishes []*pending
	held   []grant
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

// grant is permits that somebody has.
type grant struct {
	permits int64
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
	waiter string     // who asks, if that waits
	wishes []*pending // what it asks for
	waited []int64    // for how long each has
	grants []grant    // what they would get
	reply  []int64    // to the first that took effect
	doubt  bool       // whether its reply is still to come
	over   bool       // whether it was called off
	at     int64      // when it was sent
	// Of a release.
	back    int64 // how many of those that its client has
	foreign bool
}

func (r *request) acquires() bool { return strings.HasSuffix(r.script, "acquire") }

// served is how many of its wishes a reply says it has granted.
func (r *request) served(reply []int64) int {
	switch {
	case len(reply) == 0 || r.wishes == nil:
	case r.acquires():
		return int(max(0, reply[0]))
	case strings.HasSuffix(r.script, "release") && reply[0] == 1:
		return int(reply[2])
	}
	return 0
}

// walk is one sequence of steps.
type walk struct {
	l         *lab
	w         *world
	expirable bool
	wild      bool
	clients   []*client
	sent      []*request
	ids       int
	total     int64 // permits that there are, taken and free
	seen      map[string]int
}

func newWalk(l *lab, expirable, wild bool) *walk {
	x := &walk{l: l, w: newWorld(), expirable: expirable, wild: wild, seen: map[string]int{}}
	x.w.now = beginning
	for n := range clients {
		x.clients = append(x.clients, &client{id: fmt.Sprintf("client-%c", 'c'-n), place: []int64{3_000, 1_000, 2_000}[n]})
	}
	l.do("FLUSHALL")
	x.setClock()
	return x
}

func (x *walk) setClock() { x.l.do("SET", "test:clock", itoa(x.w.now)) }

func (x *walk) see(what string) { x.seen[what]++ }

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
	a := ask{place: r.client.place}
	if waits {
		a.client = r.client.id
	}
	r.waiter = a.client
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
		r.wishes, r.waited, r.grants = append(r.wishes, p), append(r.waited, w.waited), append(r.grants, grant{p.permits, p.ids})
	}
	r.args = append(r.args, ids...)
	return a
}

func leaseArg(lease int64) string {
	if lease == 0 {
		return "forever"
	}
	return itoa(lease)
}

// deliver has the server and the model do a request, and compares the two.
func (x *walk) deliver(r *request, denied string) ([]int64, error) {
	before := x.w.clone()
	if denied != "" {
		x.l.do("SET", "test:denied", denied)
		defer x.l.do("DEL", "test:denied")
	}
	result := x.l.scripts[r.script].Exec(x.l.ctx, x.l.conn, r.keys, r.args)
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
		return nil, fmt.Errorf("the server says %v, and ought to fail", real)
	case x.w.failed:
	case err != nil:
		return nil, err
	case !slices.Equal(real, want):
		return nil, fmt.Errorf("the server says %v, the model %v", real, want)
	}
	_, noted := x.w.known(r.call)
	if !repeated && (noted || r.call.ticket == "") && r.reply == nil && !x.w.failed {
		r.reply = want
		x.counted(r)
	}
	told := len(x.w.told) > 0
	for _, n := range x.w.told {
		if n <= 0 && !strings.HasPrefix(r.script, "java") {
			return nil, fmt.Errorf("%d permits were told of", n)
		}
	}
	// Whoever makes a semaphore anew whose permits have outlived it may not know that
	// they have expired.
	anew := x.wild && !before.exists && x.w.exists
	for _, c := range x.clients {
		c.woken = c.woken || told || denied != "" || anew
		c.blind = c.blind || x.expirable && c != r.client && r.served(want) > 0
	}
	return want, x.inOrder(before, r, want)
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
	case r.script == "release" && r.foreign && r.reply[0] == 1:
		x.total += n(4)
	case r.script == "permit_set":
		x.total = n(4)
	case r.script == "java_acquire":
		x.total -= n(0)
	case r.script == "java_release" || r.script == "java_add":
		x.total += n(0)
	}
}

// inOrder fails if somebody was served before the first who lives.
func (x *walk) inOrder(before *world, r *request, reply []int64) error {
	if _, known := before.known(r.call); known || r.client == nil {
		return nil
	}
	me := r.waiter
	for served := range r.served(reply) {
		if first := before.first(); first != "" && first != me && before.line.scores[first] < before.now-r.waited[served] {
			return fmt.Errorf("wish %d of %q was granted, but %q was first", served, me, first)
		}
		before.stepOut(me)
	}
	return nil
}

// compare fails unless the server has what the model has.
func (x *walk) compare() error {
	real, err := x.l.dump.Exec(x.l.ctx, x.l.conn, nil, nil).ToString()
	if err != nil {
		return err
	}
	if want := x.w.dump(); real != want {
		return fmt.Errorf("the server has\n%s\nthe model\n%s", indent(real), indent(want))
	}
	return nil
}

func indent(s string) string { return "\t" + strings.ReplaceAll(s, "\n", "\n\t") }

// step takes one step in both worlds and compares them.
func (x *walk) step(o op) error {
	if err := x.do(o); err != nil {
		return err
	}
	if err := x.compare(); err != nil {
		return err
	}
	if err := x.counts(); err != nil {
		return err
	}
	return x.awake()
}

// counts fails if permits were made or lost: those that are free, and those that
// somebody has, or may have, are all there are.
func (x *walk) counts() error {
	if x.expirable {
		return x.adds(x.w.sum())
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
		for _, g := range r.grants[:r.served(r.reply)] {
			sum += g.permits
		}
	}
	return x.adds(sum)
}

func (x *walk) adds(sum int64) error {
	if sum != x.total && !x.wild {
		return fmt.Errorf("there are %d permits, and ought to be %d", sum, x.total)
	}
	return nil
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

// awake fails if somebody sleeps who could be served. When permits expire that were
// taken since its last attempt it need not know, if it looks again by itself.
func (x *walk) awake() error {
	for _, c := range x.clients {
		if len(c.wishes) == 0 || x.due(c) {
			continue
		}
		a := ask{client: c.id, place: c.place, wishes: []wish{x.wishOf(c.wishes[0])}}
		if served, _ := x.attempt(x.w.clone(), a); served > 0 && !(c.blind && c.wakeAt != 0) {
			return fmt.Errorf("%s could be served, and sleeps", c.id)
		}
	}
	return nil
}

// settled is what a client makes of the answer to a request for some who wait:
// how many were served, when to look again, and whether the next stands in line.
func (x *walk) settled(r *request, reply []int64) error {
	c, n := r.client, int(reply[0])
	c.held = append(c.held, r.grants[:n]...)
	c.wishes = slices.DeleteFunc(c.wishes, func(p *pending) bool { return slices.Contains(r.wishes[:n], p) })
	if len(r.wishes) == 0 {
		return nil
	}
	c.placed, c.woken, c.blind, c.wakeAt = reply[2] == 1, n == len(r.wishes), false, 0
	if c.woken {
		return nil // the next is to try
	}
	again := int64(-1)
	if waited := x.w.now - r.wishes[n].began; c.placed {
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
		return nil
	}
	x.see("again at once")
	w := x.w.clone()
	w.dump()
	before := w.dump()
	a := ask{client: c.id, place: c.place}
	for _, p := range r.wishes[n:] {
		a.wishes = append(a.wishes, x.wishOf(p))
	}
	if served, again := x.attempt(w, a); served == 0 && again == 0 && w.dump() == before {
		return fmt.Errorf("%s looks again at once, and will for ever", c.id)
	}
	return nil
}

// send makes a request, with a fate, and returns its reply if there is one.
func (x *walk) send(r *request, f fate) ([]int64, error) {
	r.at = x.w.now
	x.sent = append(x.sent, r)
	if f == delayed {
		r.doubt = true
		x.see(r.script + " delayed")
		return nil, nil
	}
	denied := ""
	if f == refused {
		denied = "PUBLISH"
		if r.acquires() {
			denied = "INCRBY"
		}
	}
	reply, err := x.deliver(r, denied)
	if err != nil {
		return nil, err
	}
	if f == unanswered {
		r.doubt = true
		x.see(r.script + " unanswered")
		return nil, nil
	}
	if reply == nil {
		x.see(r.script + " refused")
	} else {
		x.see(fmt.Sprint(r.script, " ", min(2, reply[0])))
	}
	if r.client != nil {
		r.client.answered(r.call)
	}
	return reply, nil
}

// unknown is for those of whose request nothing is known.
func (x *walk) unknown(r *request) {
	r.client.woken = true
	for _, p := range r.wishes {
		p.ids = nil
	}
}

// acquire asks for permits for a party.
func (x *walk) acquire(c *client, party []*pending, waits bool, f fate) error {
	r := x.request(x.kindOf("acquire"), c)
	a := x.asks(r, party, waits)
	r.apply = func() []int64 {
		if x.expirable {
			return x.w.permitAcquire(r.call, a)
		}
		return x.w.acquire(r.call, a)
	}
	reply, err := x.send(r, f)
	switch {
	case err != nil:
		return err
	case reply == nil:
		x.unknown(r)
		return nil
	case !waits:
		c.held = append(c.held, r.grants[:reply[0]]...)
		return nil
	}
	if len(party) > 1 && reply[0] > 0 && reply[0] < int64(len(party)) {
		x.see("party split")
	}
	if reply[2] == 1 {
		x.see("placed")
	}
	return x.settled(r, reply)
}

// release gives permits back that a client has, or that others have.
func (x *walk) release(c *client, g grant, foreign, ifExists bool, party []*pending, f fate) error {
	r := x.request(x.kindOf("release"), c, itoa(g.permits))
	r.foreign = foreign
	if !foreign {
		r.back = g.permits
	}
	if x.expirable {
		r.args = append(r.args, g.ids...)
		a := x.asks(r, party, true)
		r.apply = func() []int64 { return x.w.permitRelease(r.call, g.ids, a) }
	} else {
		r.args = append(r.args, map[bool]string{false: "0", true: "1"}[ifExists])
		a := x.asks(r, party, true)
		r.apply = func() []int64 { return x.w.release(r.call, g.permits, ifExists, a) }
	}
	reply, err := x.send(r, f)
	switch {
	case err != nil:
		return err
	case reply == nil:
		x.unknown(r)
		return nil
	case reply[0] != 1:
		c.woken = true
		if !foreign && reply[0] < 0 {
			c.held = append(c.held, g)
		}
		return nil
	}
	if err := x.settled(r, reply[2:]); err != nil {
		return err
	}
	if reply[2] > 0 {
		x.see("served by a release")
	}
	if reply[1] == 0 {
		c.woken = true
	}
	return nil
}

// settle finds out what became of a request.
func (x *walk) settle(r *request, f fate) error {
	c := r.client
	if !r.acquires() {
		reply, err := x.deliver(r, "")
		if err != nil || f != answered {
			return err
		}
		r.doubt = false
		c.answered(r.call)
		if reply[0] == 1 {
			c.held = append(c.held, r.grants[:reply[2]]...)
		} else if reply[0] < 0 && !r.foreign {
			c.held = append(c.held, grant{permits: r.back})
		}
		return nil
	}
	var args []string
	var permits []int64
	for _, g := range r.grants {
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
	reply, err := x.deliver(u, "")
	if err != nil {
		return err
	}
	x.see(fmt.Sprint(u.script, " ", min(1, reply[0])))
	r.over = true
	if f == answered {
		r.doubt = false
		c.answered(r.call)
	}
	return nil
}

// giveUp ends a wait.
func (x *walk) giveUp(c *client, n int) error {
	c.wishes = slices.Delete(c.wishes, n, n+1)
	if n > 0 {
		return nil
	}
	c.woken = true
	if !c.placed {
		return nil
	}
	c.placed = false
	r := x.request("leave", c, c.id)
	r.keys = r.keys[:4]
	r.apply = func() []int64 { return x.w.leave(c.id) }
	_, err := x.send(r, answered)
	return err
}

// plain makes a request that only has a reply.
func (x *walk) plain(r *request, apply func() []int64) error {
	r.apply = apply
	_, err := x.send(r, answered)
	return err
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

func (x *walk) do(o op) error {
	c := x.clients[o.client]
	both := []string{key, wire.PermitTimeouts(key)}
	channel := wire.SemaphoreChannel(key)
	javaNow := x.w.now + []int64{0, 0, 2000, -2000}[o.which%4]
	size := min(o.size, len(c.wishes))
	switch o.do {
	case "wish":
		if len(c.wishes) < 4 {
			c.wishes = append(c.wishes, &pending{permits: min(o.n, 10), began: x.w.now, lease: o.lease})
			c.woken = c.woken || len(c.wishes) == 1
		}
	case "attempt woken":
		for _, other := range x.clients {
			if x.due(other) {
				return x.acquire(other, other.wishes, true, answered)
			}
		}
	case "attempt":
		if size > 0 {
			return x.acquire(c, c.wishes[:size], true, o.fate)
		}
	case "give up":
		if size > 0 {
			return x.giveUp(c, o.which%2*(size-1))
		}
	case "try":
		if o.n <= 10 {
			began := x.w.now - int64(o.which%2)*o.ms // it may have been held up on its way
			return x.acquire(c, []*pending{{permits: o.n, began: began, lease: o.lease}}, false, o.fate)
		}
	case "settle":
		var doubts []*request
		for _, r := range x.sent {
			if r.doubt {
				doubts = append(doubts, r)
			}
		}
		if len(doubts) > 0 {
			return x.settle(doubts[o.which%len(doubts)], o.fate)
		}
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
			return nil
		}
		r := safe[o.which%len(safe)]
		x.see("copy of " + r.script)
		_, err := x.deliver(r, "")
		return err
	case "release":
		if len(c.held) == 0 {
			return nil
		}
		n := o.which % len(c.held)
		g := c.held[n]
		c.held = slices.Delete(c.held, n, n+1)
		if keep := g.permits - o.n; keep > 0 && o.which%3 == 0 {
			rest := grant{permits: keep}
			if x.expirable {
				g.ids, rest.ids = g.ids[:o.n], g.ids[o.n:]
			}
			g.permits = o.n
			c.held = append(c.held, rest)
		}
		if !o.waits {
			size = 0
		}
		return x.release(c, g, false, o.which%4 == 0, c.wishes[:size], o.fate)
	case "release foreign":
		g := grant{permits: o.n}
		if x.expirable {
			g = grant{1, []string{x.some(o.which)}}
			if other := x.some(o.which + 1); o.n == 2 && other != g.ids[0] {
				g = grant{2, []string{g.ids[0], other}}
			}
		}
		return x.release(c, g, true, o.which%2 == 0, c.wishes[:size], o.fate)
	case "time passes":
		// Often just until something ends.
		for _, ends := range []*set{&x.w.taken, &x.w.alive} {
			for _, at := range ends.scores {
				if left := at - x.w.now; o.which%3 == 0 && left > 0 && left < o.ms {
					o.ms = left
				}
			}
		}
		for _, r := range x.sent { // its background has given up by then, or knows
			if r.doubt && x.w.now+o.ms-r.at >= ticketLife && !x.wild {
				if err := x.settle(r, answered); err != nil {
					return err
				}
				if err := x.compare(); err != nil {
					return err
				}
			}
		}
		x.w.pass(o.ms)
		x.setClock()
	case "set", "set for":
		ttl, life := int64(0), ""
		if o.do == "set for" {
			ttl = o.ms + 1
			life = itoa(ttl)
		}
		n := o.n - 1
		r := x.request("set", c, itoa(n), life)
		return x.plain(r, func() []int64 { return x.w.set(r.call, n, ttl) })
	case "add":
		n, told := x.signed(o), "total"
		if x.expirable {
			told = "delta"
		}
		r := x.request("add", c, itoa(n), told)
		return x.plain(r, func() []int64 { return x.w.add(r.call, n, x.expirable) })
	case "drain":
		if !x.expirable {
			r := x.request("drain", c)
			return x.plain(r, func() []int64 { return x.w.drain(r.call) })
		}
	case "permit set":
		r := x.request("permit_set", c, itoa(o.n-1))
		return x.plain(r, func() []int64 { return x.w.permitSet(r.call, o.n-1) })
	case "extend":
		id := x.some(o.which)
		how := []string{"least", "just"}[o.size%2]
		if how == "just" {
			for _, c := range x.clients {
				c.woken = true // for it may come back sooner, and nobody is told
			}
		}
		return x.plain(apart("permit_extend", both, id, leaseArg(o.lease), how),
			func() []int64 { return x.w.permitExtend(id, o.lease, how == "least") })
	case "renew":
		lease := max(1, o.lease)
		r := apart("permit_renew", nil, itoa(lease))
		var ids []string
		for i := range o.size {
			ids = append(ids, x.some(o.which+i))
			r.keys = append(r.keys, wire.PermitTimeouts(key))
			r.args = append(r.args, ids[i], "0")
		}
		return x.plain(r, func() []int64 { return x.w.permitRenew(ids, lease) })
	case "look":
		if err := x.plain(apart("permit_counts", both), x.w.permitCounts); err != nil {
			return err
		}
		id := x.some(o.which)
		return x.plain(apart("permit_left", both, id), func() []int64 { return x.w.permitLeft(id) })
	case "java acquire":
		if !x.expirable {
			return x.plain(apart("java_acquire", both[:1], itoa(o.n)), func() []int64 { return x.w.javaAcquire(o.n) })
		}
		ids, deadline := x.newIDs(min(3, o.n)), javaNow+o.lease
		if o.lease == 0 {
			deadline = neverExpires
		}
		return x.plain(apart("java_permit_acquire", both, append([]string{itoa(javaNow), itoa(deadline), channel}, ids...)...),
			func() []int64 { return x.w.javaPermitAcquire(javaNow, deadline, ids) })
	case "java release":
		if !x.expirable {
			n := min(3, o.n)
			return x.plain(apart("java_release", both[:1], itoa(n), channel), func() []int64 { return x.w.javaRelease(n) })
		}
		id := x.some(o.which)
		return x.plain(apart("java_permit_release", both, itoa(javaNow), channel, id),
			func() []int64 { return x.w.javaPermitRelease(javaNow, id) })
	case "java sweep":
		return x.plain(apart("java_permit_sweep", both, itoa(javaNow), channel), func() []int64 { return x.w.javaPermitSweep(javaNow) })
	case "java add":
		n, told := x.signed(o), "total"
		if x.expirable {
			told = "delta"
		}
		if max(n, -n) < 10 {
			return x.plain(apart("java_add", both[:1], itoa(n), channel, told), func() []int64 { return x.w.javaAdd(n, x.expirable) })
		}
	case "java drain":
		if !x.expirable {
			return x.plain(apart("java_drain", both[:1]), x.w.javaDrain)
		}
	case "delete", "expire":
		return x.harm(o)
	}
	return nil
}

// signed is how many permits to add, sometimes just too many.
func (x *walk) signed(o op) int64 {
	switch {
	case o.which%20 == 0:
		return -mostPermits - x.w.free - 1
	case o.which%20 == 1:
		return mostPermits - x.w.free + 1
	case o.which%40 == 2:
		return -mostPermits - x.w.free // as many as can be taken away
	}
	if o.which%3 == 0 {
		return -o.n
	}
	return o.n
}

// harm deletes a key by hand, or lets the semaphore end.
func (x *walk) harm(o op) error {
	for _, c := range x.clients {
		c.woken = true
	}
	keys, how := []string{key, wire.PermitTimeouts(key)}, "del"
	if o.do == "expire" {
		how = itoa(o.ms + 1)
		keys = keys[o.which%3/2:] // or only those that are taken
	} else {
		all := append(keys, key, wire.SemaphoreWaiting(key), wire.SemaphoreAlive(key), wire.SemaphoreRequest(key, x.clients[o.client].id, 1))
		keys = all[o.which%len(all):][:1]
	}
	return x.plain(apart("harm", keys, how), func() []int64 {
		for _, k := range keys {
			x.w.harm(k, o.ms+1, how == "del")
		}
		return []int64{1}
	})
}

// mustSee is what a run is worth nothing without.
var mustSee = []string{
	"acquire 0", "acquire 1", "acquire 2", "acquire unanswered", "acquire delayed", "undo 0", "undo 1",
	"release 1", "release 0", "release -1", "release unanswered", "release delayed", "set 0", "set 1", "add 1", "add -1",
	"drain 0", "drain 2", "leave 1", "permit_acquire 0", "permit_acquire 1", "permit_acquire 2", "permit_acquire refused",
	"permit_undo 0", "permit_undo 1", "permit_release 0", "permit_release 1", "permit_set 0", "permit_set 1",
	"permit_extend 0", "permit_extend 1", "permit_left -2", "permit_left -1", "permit_renew 1",
	"party split", "placed", "served by a release", "again at once",
	"copy of acquire", "copy of release", "copy of undo", "copy of permit_acquire", "copy of permit_release", "copy of permit_undo",
	"copy of set", "copy of add", "copy of drain", "copy of permit_set",
}

// run plays a sequence and returns how many steps of it, and what was wrong then.
func run(l *lab, expirable, wild bool, ops []op) (x *walk, n int, err error) {
	x = newWalk(l, expirable, wild)
	for n, o := range ops {
		if err := x.step(o); err != nil {
			return x, n + 1, err
		}
	}
	return x, len(ops), x.drained()
}

// drained ends everything that is under way: then all permits can be had.
func (x *walk) drained() error {
	for _, c := range x.clients {
		for len(c.wishes) > 0 {
			if err := x.giveUp(c, 0); err != nil {
				return err
			}
		}
	}
	for _, r := range x.sent {
		if r.doubt {
			if err := x.settle(r, answered); err != nil {
				return err
			}
		}
	}
	for _, c := range x.clients {
		for _, g := range slices.Clone(c.held) {
			c.held = c.held[1:]
			if err := x.release(c, g, false, false, nil, answered); err != nil {
				return err
			}
		}
	}
	if x.wild {
		return x.compare()
	}
	if err := x.step(op{do: "time passes", which: 1, ms: 3_600_000}); err != nil {
		return err
	}
	rest := x.total
	for _, at := range x.w.taken.scores {
		if at == neverExpires {
			rest--
		}
	}
	if rest < 1 || rest > 100 {
		return x.compare()
	}
	c := x.clients[0]
	if err := x.acquire(c, []*pending{{permits: rest, began: x.w.now}}, false, answered); err != nil {
		return err
	}
	if len(c.held) != 1 {
		return fmt.Errorf("%d permits are not to be had", rest)
	}
	return x.compare()
}

// shrink leaves out steps for as long as some still fail.
func shrink(l *lab, expirable, wild bool, ops []op) ([]op, error) {
	_, n, err := run(l, expirable, wild, ops)
	ops = ops[:n]
	for size := len(ops) / 2; size > 0; {
		shorter := false
		for at := 0; at < len(ops); {
			rest := slices.Delete(slices.Clone(ops), at, min(at+size, len(ops)))
			if _, n, failure := run(l, expirable, wild, rest); failure != nil {
				ops, err, shorter = rest[:n], failure, true
			} else {
				at += size
			}
		}
		if !shorter || size > 1 {
			size /= 2
		}
	}
	return ops, err
}

func TestScriptsKeepStepWithTheModel(t *testing.T) {
	steps, seed := modelSteps, rand.Uint64()
	var err error
	if s := os.Getenv("REDLATCH_MODEL_STEPS"); s != "" {
		steps, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	if s := os.Getenv("REDLATCH_MODEL_SEED"); s != "" {
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("REDLATCH_MODEL_SEED=%d", seed)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := newLab(t, s)
		seen := map[string]int{}
		for n := range uint64(steps / walkSteps) {
			r := rand.New(rand.NewPCG(seed, n))
			expirable, wild := n%5 > 1, n%3 == 2
			ops := make([]op, walkSteps)
			for i := range ops {
				ops[i] = draw(r, expirable, wild)
			}
			x, _, err := run(l, expirable, wild, ops)
			if err != nil {
				ops, err = shrink(l, expirable, wild, ops)
				var list strings.Builder
				for _, o := range ops {
					fmt.Fprintln(&list, o)
				}
				require.FailNow(t, "the scripts are out of step", "%v\nREDLATCH_MODEL_SEED=%d, walk %d, expirable %t, shrunk to\n%s",
					err, seed, n, expirable, list.String())
			}
			for what, n := range x.seen {
				seen[what] += n
			}
		}
		t.Logf("seen: %v", seen)
		for _, what := range mustSee {
			if steps >= modelSteps {
				require.Positive(t, seen[what], "never seen: %s", what)
			}
		}
	})
}
