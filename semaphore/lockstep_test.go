package semaphore_test

import (
	_ "embed"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

//go:embed testdata/java.lua
var javaLua string

var javaScript = wire.NewScript(javaLua)

// TestLockstep compares the scripts with a model after each step of random sequences with
// random faults, and checks the guarantees of a semaphore.
func TestLockstep(t *testing.T) {
	scripts := map[string]*wire.Script{}
	for _, name := range scriptNames(t) {
		scripts[name] = wire.NewScript(harness.Source(t, files(name)...))
		if last := keeps(name); last != "" {
			scripts["keeping "+name] = wire.NewScript("local function operation()\n" + harness.Source(t, files(name)...) + "end\n" +
				harness.Source(t, "idle.lua", last))
		}
	}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		lockstep.Test[step]{
			Steps: lockstep.Size(40_000), Length: 80, Kinds: stepKinds,
			Outcomes: []string{
				"acquire 0", "acquire 1", "acquire 2", "acquire unanswered", "acquire delayed", "undo 0", "undo 1", "release 1", "release 0",
				"release -1", "release unanswered", "release delayed", "set 0", "set 1", "add 1", "add -1", "drain 0", "drain 2", "leave 1", "leave 2",
				"permit_acquire 0", "permit_acquire 1", "permit_acquire 2", "permit_acquire refused", "permit_undo 0", "permit_undo 1",
				"permit_release 0", "permit_release 1", "permit_release 2", "resize 0", "resize 1", "delete 0", "delete 1", "stats 0",
				"created by acquire", "created by permit_acquire", "created by release", "created by add", "created by drain", "permit_extend 0",
				"permit_extend 1", "permit_left -2", "permit_left -1", "permit_renew 1", "batch split", "queued", "served by a release",
				"immediate retry", "request too large", "wrong clock", "late duplicate", "duplicate of acquire", "duplicate of release",
				"duplicate of undo", "duplicate of permit_acquire", "duplicate of permit_release", "duplicate of permit_undo", "duplicate of set", "duplicate of add", "duplicate of drain", "duplicate of resize",
				"duplicate of delete",
				"kept for idle time", "kept for lease", "kept for ever", "kept already", "expired unused",
			},
			Start: func(worker int) lockstep.Begin[step] {
				conn := lockstep.Connect(t, s.Addr, worker)
				return func(seed uint64, seen lockstep.Seen) lockstep.Walk[step] {
					return newWalk(t.Context(), conn, scripts, seed, seen)
				}
			},
		}.Run(t)
	})
}

// keeps returns the last file of the script that also sets the lifetime of a semaphore, "" if there is none.
func keeps(script string) string {
	switch script {
	case "permit_renew":
		return "idle_renew.lua"
	case "undo", "delete", "stats", "leave", "permit_left":
		return ""
	}
	return "idle_use.lua"
}

func itoa[T int | int64](n T) string { return strconv.FormatInt(int64(n), 10) }

var stepKinds = lockstep.Weights{
	{"request", 18}, {"attempt", 22}, {"attempt woken", 8}, {"give up", 3}, {"try", 4}, {"confirm", 9}, {"duplicate", 14},
	{"release", 20}, {"release foreign", 9}, {"time passes", 14}, {"add", 3}, {"set", 4}, {"drain", 4},
	{"java acquire", 4}, {"java release", 3}, {"java add", 1}, {"java drain", 1}, {"java sweep", 2},
	{"resize", 3}, {"extend", 4}, {"renew", 4}, {"read", 7},
	{"set for", 2}, {"delete semaphore", 2}, {"delete", 3}, {"expire", 3},
}

// Kinds of steps that not every walk has: those of one kind of semaphore, and those that lose
// permits.
var (
	ofPlain   = []lockstep.Kind{"drain", "java drain"}
	ofPermits = []lockstep.Kind{"extend", "renew", "java sweep", "expire"}
	ofLossy   = []lockstep.Kind{"set for", "delete semaphore", "delete", "expire"}
)

// step is one step. Its effect depends on the state.
type step struct {
	lockstep.Kind
	client int
	which  int
	n      int64
	size   int // of a batch
	waits  bool
	fault  fault
	ms     int64
	lease  int64
	create int64 // 0: a missing semaphore is not created
}

// fault is what happens to a request.
type fault string

const (
	answered   fault = "answered"
	unanswered fault = "unanswered"
	delayed    fault = "delayed" // until a duplicate is delivered, if ever
	refused    fault = "refused" // because the user lacks a right
)

// Draw implements lockstep.Walk.
func (x *walk) Draw(r *rand.Rand) step {
	s := step{
		Kind: stepKinds.Only(func(kind lockstep.Kind) bool {
			return (x.lossy || !slices.Contains(ofLossy, kind)) &&
				!slices.Contains(map[bool][]lockstep.Kind{true: ofPlain, false: ofPermits}[x.permitSem], kind)
		}).Draw(r),
		client: r.IntN(clients), which: r.IntN(1000), n: 1 + r.Int64N(3), size: 1 + r.IntN(4), waits: r.IntN(8) > 0, fault: answered,
		ms:    []int64{0, 1, 30, 70, 99, 100, 101, 500, 999, 1000, 1001, 3000, 3333, 5000, 10_000, 10_001}[r.IntN(16)],
		lease: []int64{0, 0, 0, 1, 500, 1000, 1000, 5000, 10_000, 30_000}[r.IntN(10)], create: []int64{0, 4}[r.IntN(2)],
	}
	if r.IntN(8) == 0 || s.Kind == "release foreign" && r.IntN(4) == 0 {
		s.n = []int64{6, 10, maxPermits, maxPermits - 3}[r.IntN(4)]
	}
	if r.IntN(40) == 0 {
		s.ms = []int64{30_000, cacheTTL - 1, cacheTTL, cacheTTL + 1, 3_600_000}[r.IntN(5)]
	}
	if !x.w.exists && !x.permitSem { // for a short time, because most steps create it
		switch n := r.IntN(100); {
		case n < 10:
			s.Kind = "release foreign" // the only step that may be rejected in this state
		case n == 10:
			s.Kind, s.create = "drain", 4
		case n == 11:
			s.Kind = "delete semaphore"
		case n == 12:
			s.Kind = "read"
		}
	}
	switch n := r.IntN(12); {
	case n < 3:
		s.fault = unanswered
	case n < 5:
		s.fault = delayed
	case n < 10 && x.lossy:
		s.fault = refused
	}
	return s
}

// do takes a step and reports whether it was possible.
func (x *walk) do(s step) bool {
	c := x.clients[s.client]
	x.size = s.create
	both := []string{key, wire.PermitTimeouts(key)}
	javaNow := x.w.now + []int64{0, 0, 2000, -2000}[s.which%4]
	size := min(s.size, len(c.waiting))
	switch s.Kind {
	case "request":
		if len(c.waiting) == 4 {
			return false
		}
		c.waiting = append(c.waiting, &pending{permits: min(s.n, 10), began: x.w.now, lease: s.lease})
		c.woken = c.woken || len(c.waiting) == 1
	case "attempt woken":
		n := slices.IndexFunc(x.clients, x.due)
		if n < 0 {
			return false
		}
		x.acquire(x.clients[n], x.clients[n].waiting, true, answered)
	case "attempt":
		if size == 0 {
			return false
		}
		x.acquire(c, c.waiting[:size], true, s.fault)
	case "give up":
		if size == 0 {
			return false
		}
		x.giveUp(c, s.which%2*(size-1))
	case "try":
		if s.n > 10 {
			return false
		}
		began := x.w.now - int64(s.which%2)*s.ms // a delay before the attempt
		x.acquire(c, []*pending{{permits: s.n, began: began, lease: s.lease}}, false, s.fault)
	case "confirm":
		var unknown []*command
		for _, r := range x.sent {
			if r.unknown {
				unknown = append(unknown, r)
			}
		}
		if len(unknown) == 0 {
			return false
		}
		x.confirm(unknown[s.which%len(unknown)], s.fault)
	case "duplicate":
		var all []*command
		for _, r := range x.sent[max(0, len(x.sent)-20):] {
			if r.client != nil {
				all = append(all, r)
			}
		}
		if len(all) == 0 {
			return false
		}
		r := all[s.which%len(all)]
		x.see("duplicate of", r.script)
		if x.w.now > r.seq.notAfter {
			x.see("late duplicate")
		}
		x.deliver(r, "")
	case "release":
		if len(c.held) == 0 {
			return false
		}
		n := s.which % len(c.held)
		g := c.held[n]
		c.held = slices.Delete(c.held, n, n+1)
		if keep := g.permits - s.n; keep > 0 && s.which%3 == 0 {
			rest := request{permits: keep}
			if x.permitSem {
				g.ids, rest.ids = g.ids[:s.n], g.ids[s.n:]
			}
			g.permits = s.n
			c.held = append(c.held, rest)
		}
		if !s.waits {
			size = 0
		}
		x.release(c, g, false, s.which%2 == 0, c.waiting[:size], s.fault)
	case "release foreign":
		g := request{permits: s.n}
		if x.permitSem {
			g = request{permits: 1, ids: []string{x.pick(s.which)}}
			if other := x.pick(s.which + 1); s.n > 1 && other != g.ids[0] {
				g = request{permits: 2, ids: []string{g.ids[0], other}}
			}
		}
		x.release(c, g, true, s.which%2 == 0, c.waiting[:size], s.fault)
	case "time passes":
		// Often exactly until something expires.
		for _, ends := range []*set{&x.w.taken, &x.w.heartbeats} {
			for _, at := range ends.scores {
				if left := at - x.w.now; s.which%3 == 0 && left > 0 && left < s.ms {
					s.ms = left
				}
			}
		}
		c.skew = skews[s.which%len(skews)]
		for _, r := range x.sent { // the background retries end before the cached reply expires
			if r.unknown && x.w.now+s.ms-r.sentAt >= cacheTTL && !x.lossy {
				x.confirm(r, answered)
				x.compare()
			}
		}
		if x.w.advance(s.ms); x.w.unused {
			x.see("expired unused")
		}
		x.conn.Wait(x.w.now)
	case "set", "set for":
		ttl, life := int64(0), ""
		if s.Kind == "set for" {
			ttl = s.ms + 1
			life = itoa(ttl)
		}
		n := s.n - 1
		r := x.command("set", c, itoa(n), life)
		x.run(r, func() []int64 { return x.w.set(r.seq, n, ttl) })
	case "add":
		n, payload := x.delta(s), "total"
		if x.permitSem {
			payload = "delta"
		}
		r := x.command("add", c, itoa(n), payload, itoa(s.create))
		x.run(r, func() []int64 { return x.w.add(r.seq, n, s.create, x.permitSem) })
	case "drain":
		r := x.command("drain", c, itoa(s.create))
		x.run(r, func() []int64 { return x.w.drain(r.seq, s.create) })
	case "delete semaphore":
		for _, c := range x.clients {
			c.woken = true
		}
		r := x.command("delete", c)
		x.run(r, func() []int64 { return x.w.delete(r.seq) })
	case "resize":
		n := min(2*s.n-1, maxPermits)
		if s.which%3 == 0 {
			n = max(0, x.w.total()) // no change
		}
		r := x.command("resize", c, itoa(n))
		x.run(r, func() []int64 { return x.w.resize(r.seq, n) })
	case "extend":
		ids := slices.Compact([]string{x.pick(s.which), x.pick(s.which + s.client)})
		how := []string{"least", "just"}[s.size%2]
		if how == "just" {
			for _, c := range x.clients {
				c.woken = true // the permit may expire earlier, without a message
			}
		}
		r := unsequenced("permit_extend", both, append([]string{leaseArg(s.lease), how}, ids...)...)
		r.idle = c.idle
		x.run(r, func() []int64 { return x.w.permitExtend(ids, s.lease, how == "least") })
	case "renew":
		lease := max(1, s.lease)
		r := unsequenced("permit_renew", nil, itoa(lease))
		r.idle = c.idle
		var ids []string
		for i := range s.size {
			ids = append(ids, x.pick(s.which+i))
			r.keys = append(r.keys, wire.PermitTimeouts(key))
			r.args = append(r.args, ids[i])
		}
		x.run(r, func() []int64 { return x.w.permitRenew(ids, lease) })
	case "read":
		keys := []string{key, wire.SemaphoreAlive(key)}
		if x.permitSem {
			keys = append(keys, wire.PermitTimeouts(key))
		}
		x.run(unsequenced("stats", keys), x.w.stats)
		if !x.permitSem {
			break
		}
		id := x.pick(s.which)
		x.run(unsequenced("permit_left", both, id), func() []int64 { return x.w.permitLeft(id) })
	case "java acquire":
		ids, deadline := x.newIDs(min(3, s.n)), javaNow+s.lease
		if s.lease == 0 {
			deadline = noExpiry
		}
		if x.permitSem {
			x.run(java("permit_acquire", javaNow, append([]string{itoa(deadline)}, ids...)...),
				func() []int64 { return x.w.javaPermitAcquire(javaNow, deadline, ids) })
		} else {
			x.run(java("acquire", s.n), func() []int64 { return x.w.javaAcquire(s.n) })
		}
	case "java release":
		if id, n := x.pick(s.which), min(3, s.n); x.permitSem {
			x.run(java("permit_release", javaNow, id), func() []int64 { return x.w.javaPermitRelease(javaNow, id) })
		} else {
			x.run(java("release", n), func() []int64 { return x.w.javaRelease(n) })
		}
	case "java sweep":
		x.run(java("permit_sweep", javaNow), func() []int64 { return x.w.javaPermitSweep(javaNow) })
	case "java add":
		n, payload := x.delta(s), "total"
		if x.permitSem {
			payload = "delta"
		}
		if max(n, -n) >= 10 {
			return false
		}
		x.run(java("add", n, payload), func() []int64 { return x.w.javaAdd(n, x.permitSem) })
	case "java drain":
		x.run(java("drain", 0), x.w.javaDrain)
	case "delete", "expire":
		x.fault(s)
	}
	return true
}
