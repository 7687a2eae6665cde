package semaphore_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/wire"
)

const clients = 3

// The clocks of clients are ahead of the server's by so many ms. The last two are too wrong.
var skews = []int64{0, clockError - 1, -clockError, clockError, -clockError - 1}

// client models a redlatch client.
type client struct {
	id      string
	timeout int64
	skew    int64 // of its clock
	slots   int
	free    []sequence
	idle    int64 // its IdleTTL, 0 if it has none
	waiting []*pending
	held    []request
	// The fields below are results of the last attempt.
	wakeAt        int64 // 0: only a message wakes the client
	woken         bool
	queued        bool
	mayMissExpiry bool // permits were acquired since, and may expire
	polls         bool // there was no semaphore at the last attempt, and its creation may wake nobody
}

// pending is a request that waits for permits.
type pending struct {
	permits int64
	began   int64
	lease   int64
	ids     []string
}

// command is a script call that may have been sent, and may be delivered again.
type command struct {
	script   string
	client   *client
	seq      sequence
	keys     []string
	args     []string
	apply    func() []int64
	batch    batch
	waiters  []*pending // the requests of the batch
	reply    []int64    // to the first delivery that took effect
	unknown  bool       // no reply yet
	undone   bool
	sentAt   int64
	releases request // permits of its client
	creates  int64   // size of the semaphore if it does not exist
	idle     int64   // IdleTTL of its client
}

func (r *command) acquires() bool { return strings.HasSuffix(r.script, "acquire") }

// served returns the number of requests that a reply serves.
func (r *command) served(reply []int64) int {
	switch {
	case len(reply) == 0 || len(r.waiters) == 0:
	case r.acquires():
		return int(max(0, reply[0]))
	case strings.HasSuffix(r.script, "release") && reply[0] >= 1:
		return int(reply[2])
	}
	return 0
}

// walk is one sequence of steps on the model and the server.
type walk struct {
	ctx       context.Context
	conn      *lockstep.Client
	scripts   map[string]*wire.Script
	w         *world
	permitSem bool
	lossy     bool
	size      int64 // with which this step creates a missing semaphore, 0 if it does not
	clients   []*client
	sent      []*command
	ids       int
	total     int64 // expected number of permits, free and acquired
	seen      lockstep.Seen
}

func newWalk(ctx context.Context, conn *lockstep.Client, scripts map[string]*wire.Script, seed uint64, seen lockstep.Seen) *walk {
	x := &walk{ctx: ctx, conn: conn, scripts: scripts, w: newWorld(), permitSem: seed%2 == 0, lossy: seed%3 == 2, seen: seen}
	x.w.now = 1_700_000_000_000
	for n := range clients {
		x.clients = append(x.clients, &client{id: fmt.Sprintf("client-%c", 'c'-n), timeout: []int64{3_000, 1_000, 2_000}[n], skew: skews[n]})
	}
	if x.lossy && seed/6%2 == 0 {
		x.clients[0].idle, x.clients[1].idle = 7_000, 60_000
	}
	conn.Reset(x.w.now)
	return x
}

func (x *walk) see(what ...any) { x.seen.See(what...) }

// newIDs returns ids that contain all byte values.
func (x *walk) newIDs(n int64) []string {
	if !x.permitSem {
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

// next returns the sequence number of a new command.
func (c *client) next() sequence {
	if n := len(c.free); n > 0 {
		last := c.free[n-1]
		c.free = c.free[:n-1]
		last.n++
		return last
	}
	c.slots++
	return sequence{key: wire.SemaphoreRequests(key, c.id), slot: strconv.Itoa(c.slots), n: 1}
}

func (c *client) done(last sequence) { c.free = append(c.free, last) }

// command returns a command with a new sequence number.
func (x *walk) command(script string, c *client, args ...string) *command {
	seq := c.next()
	seq.notAfter, seq.least = x.w.now+c.skew+retryTime, retryTime-clockError
	return x.commandAs(script, c, seq, args...)
}

func (x *walk) commandAs(script string, c *client, n sequence, args ...string) *command {
	r := &command{script: script, client: c, seq: n, creates: x.size, idle: c.idle}
	r.keys = []string{key, n.key, wire.SemaphoreWaiting(key), wire.SemaphoreAlive(key), createdKey}
	if x.permitSem {
		r.keys = append(r.keys, wire.PermitTimeouts(key))
	}
	r.args = append([]string{itoa(n.n), n.slot, "", "", "PUBLISH", wire.SemaphoreChannel(key)}, args...)
	return r.accepted(n.notAfter, n.least)
}

// accepted sets the time after which the request must not run, of which least must be left.
func (r *command) accepted(notAfter, least int64) *command {
	r.seq.notAfter, r.seq.least = notAfter, least
	r.args[2] = itoa(notAfter)
	r.args[3] = itoa(least)
	return r
}

// kindOf returns the name of a script for this kind of semaphore.
func (x *walk) kindOf(script string) string {
	if x.permitSem {
		return "permit_" + script
	}
	return script
}

// addBatch adds a batch to a command.
func (x *walk) addBatch(r *command, waiters []*pending, waits bool) batch {
	waiters = slices.Clone(waiters)
	b := batch{timeout: r.client.timeout, size: r.creates}
	if waits {
		b.client = r.client.id
	}
	r.waiters = waiters
	r.args = append(r.args, b.client, itoa(int64(bargingMillis)), itoa(b.timeout), itoa(b.size), itoa(len(waiters)))
	var ids []string
	for _, p := range waiters {
		if p.ids == nil {
			p.ids = x.newIDs(p.permits)
		}
		w := request{p.permits, x.w.now - p.began, p.lease, p.ids}
		b.requests = append(b.requests, w)
		r.args = append(r.args, itoa(w.permits), itoa(w.waited))
		if x.permitSem {
			r.args = append(r.args, leaseArg(w.lease))
		}
		ids = append(ids, p.ids...)
	}
	r.args, r.batch = append(r.args, ids...), b
	return b
}

func leaseArg(lease int64) string {
	if lease == 0 {
		return "forever"
	}
	return itoa(lease)
}

// deliver runs a command on the server and in the model, and compares the replies.
func (x *walk) deliver(r *command, denied string) []int64 {
	before := x.w.clone()
	script := x.scripts[r.script]
	if script == nil {
		script = javaScript
	}
	keys, args := r.keys, r.args
	x.w.idle = 0
	if with := x.scripts["keeping "+r.script]; r.idle > 0 && with != nil {
		script, x.w.idle, args = with, r.idle, append(slices.Clip(args), itoa(r.idle))
		if r.script == "permit_renew" {
			keys = append(slices.Clip(keys), slices.Repeat([]string{key}, len(keys))...)
		}
	}
	x.conn.Denied = denied
	result := script.Exec(x.ctx, x.conn, keys, args)
	x.conn.Denied = ""
	real, err := result.AsIntSlice()
	if n, bare := result.AsInt64(); bare == nil {
		real, err = []int64{n}, nil
	}
	x.w.denied, x.w.failed = denied, false
	_, duplicate := x.w.last(r.seq)
	want := r.apply()
	if !x.w.failed && (r.script != "permit_renew" || slices.Contains(want, 1)) {
		if x.w.keep(); x.w.idle > 0 && x.w.exists {
			x.see("kept", x.w.kept)
		}
	}
	x.w.denied, x.w.idle = "", 0
	switch {
	case x.w.failed && err == nil:
		lockstep.Failf("the server replies %v, want an error", real)
	case x.w.failed:
	case err != nil:
		lockstep.Check(err)
	case !slices.Equal(real, want):
		lockstep.Failf("the server replies %v, want %v", real, want)
	}
	_, cached := x.w.last(r.seq)
	if !duplicate && (cached || r.seq.key == "") && r.reply == nil && !x.w.failed {
		r.reply = want
		x.account(r, before)
	}
	published := len(x.w.messages) > 0
	for _, n := range x.w.messages {
		if n <= 0 && !strings.HasPrefix(r.script, "java") {
			lockstep.Failf("the message is %d", n)
		}
	}
	// A recreated semaphore may have permits that outlived it and have expired.
	recreated := x.lossy && !before.exists && x.w.exists
	// By any client, also of Java, and by one that does not wait.
	acquired := slices.ContainsFunc(x.w.taken.order(), func(id string) bool { return !before.taken.has(id) })
	for _, c := range x.clients {
		c.woken = c.woken || published || denied != "" || recreated
		c.mayMissExpiry = c.mayMissExpiry || acquired
	}
	x.checkOrder(before, r, want)
	return want
}

// account updates the expected number of permits. before is the world before the command.
func (x *walk) account(r *command, before *world) {
	if !before.exists && x.w.exists && r.creates > 0 && r.script != "set" && r.script != "resize" && r.client != nil {
		x.see("created by", r.script)
		x.total += r.creates
		if r.script == "release" {
			return // its permits are among them
		}
	}
	n := func(i int) int64 { n, _ := strconv.ParseInt(r.args[i], 10, 64); return n }
	switch {
	case r.reply[0] == 0:
	case r.script == "set", r.script == "add" && r.reply[0] == 1:
		x.total += n(6)
	case strings.HasSuffix(r.script, "drain"):
		x.total -= r.reply[0]
	case r.script == "release" && r.releases.permits == 0 && r.reply[0] == 1:
		x.total += n(6)
	case r.script == "resize":
		x.total += n(6) - before.total()
	case r.script == "java_acquire":
		x.total -= n(2)
	case r.script == "java_release" || r.script == "java_add":
		x.total += n(2)
	}
}

// checkOrder fails the walk if a client barged past the first client of the wait queue.
func (x *walk) checkOrder(before *world, r *command, reply []int64) {
	if _, duplicate := before.last(r.seq); duplicate || r.client == nil {
		return
	}
	me := r.batch.client
	for served := range r.served(reply) {
		if first := before.first(); first != "" && first != me && before.queue.scores[first] < before.now-r.batch.requests[served].waited {
			lockstep.Failf("request %d of %q was served, but %q was first", served, me, first)
		}
		before.dequeue(me)
	}
}

func (x *walk) compare() { x.conn.Compare(x.w.state()) }

// Take implements lockstep.Walk.
func (x *walk) Take(s step) bool {
	did := x.do(s)
	x.compare()
	if sum := x.count(); sum != x.total && !x.lossy {
		lockstep.Failf("there are %d permits, want %d", sum, x.total)
	}
	x.checkAwake()
	return did
}

// count returns the number of permits: free, held by a client, and possibly held.
func (x *walk) count() int64 {
	if x.permitSem {
		return x.w.total()
	}
	sum := x.w.free
	for _, c := range x.clients {
		for _, g := range c.held {
			sum += g.permits
		}
	}
	for _, r := range x.sent {
		switch {
		case !r.unknown || r.undone:
			continue
		case r.reply == nil || r.reply[0] < 0:
			sum += r.releases.permits // not yet released
		}
		for _, g := range r.batch.requests[:r.served(r.reply)] {
			sum += g.permits
		}
	}
	return sum
}

// attempt returns the result of a batch in a copy of the model.
func (x *walk) attempt(w *world, b batch) (served, retryIn int64) {
	do := w.acquire
	if x.permitSem {
		do = w.permitAcquire
	}
	reply := do(sequence{key: "probe", n: 1, notAfter: w.now}, b)
	delete(w.memory, "probe")
	return reply[0], reply[1]
}

func (x *walk) requestOf(p *pending) request {
	ids := make([]string, p.permits)
	for i := range ids {
		ids[i] = fmt.Sprint("probe ", i)
	}
	return request{p.permits, x.w.now - p.began, p.lease, ids}
}

// due reports whether a client knows of a reason to retry.
func (x *walk) due(c *client) bool {
	return len(c.waiting) > 0 && (c.woken || c.wakeAt != 0 && c.wakeAt <= x.w.now)
}

// checkAwake fails the walk if a client sleeps that could be served. A client with a timer may
// miss the expiry of permits acquired since its last attempt, and so may one that found no semaphore.
func (x *walk) checkAwake() {
	for _, c := range x.clients {
		if len(c.waiting) == 0 || x.due(c) {
			continue
		}
		b := batch{client: c.id, timeout: c.timeout, requests: []request{x.requestOf(c.waiting[0])}}
		if served, _ := x.attempt(x.w.clone(), b); served > 0 && !(c.mayMissExpiry && (c.wakeAt != 0 || c.polls)) {
			lockstep.Failf("%s sleeps although it could be served", c.id)
		}
	}
}
