package rwlock_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/rwlock"
)

// The scripts do what the model does, in any order of steps, and keep the guarantees of
// the lock.
func TestLockstep(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		lockstep.Test[step]{
			Steps: lockstep.Size(100_000), Length: 80, Kinds: stepKinds,
			Outcomes: []string{
				"read acquired", "read refused", "write acquired", "write refused", "write placed",
				"read free", "read still", "read none", "write free", "write none",
				"downgrade", "zombies", "renewed true", "renewed false", "extended true", "extended false", "forced true", "forced false",
				"group", "group split",
			},
			Start: func(worker int) lockstep.Begin[step] {
				conn := lockstep.Connect(t, s.Addr, worker)
				l := newLabOf(t, s, conn)
				return func(seed uint64, seen lockstep.Seen) lockstep.Walk[step] {
					return newWalk(l, conn, seed%2 == 0, seen)
				}
			},
		}.Run(t)
	})
}

// stepKinds are the kinds of steps. Those of Java are not in every walk.
var stepKinds = lockstep.Weights{
	{"acquire", 25},
	{"acquire late", 2}, // a copy of an attempt
	{"acquire all", 6}, {"release", 32}, {"leave", 3},
	{"renew", 7}, {"extend", 4},
	{"again", 6}, // the last request is delivered again
	{"time passes", 11}, {"force", 2}, {"is locked", 2},
	{"java read", 2}, {"java write", 1}, {"java unread", 2}, {"java unwrite", 1}, {"java renew", 1}, {"java delete", 1},
}

// slot makes claims, one after the other.
type slot struct {
	kind    string
	writer  *slot // of the same owner, beside which the claim is requested
	claim   *engine.Claim
	promise int64 // until when the claim is promised to stand; 0 if it never stood
	blocks  int64 // until when it is promised to block new readers
}

// The slots are readers, then writers, then readers of the owners of the first writers.
const (
	readers, writers, both = 5, 5, 2

	firstWriter = readers
	firstBoth   = readers + writers
)

// walk is a model and the protocols.
type walk struct {
	l     *lab
	conn  *lockstep.Client
	java  bool
	w     *world
	slots []*slot
	cast  []int // the slots of most steps
	ids   int
	// The writers beside which read claims were requested, by id.
	beside map[string]string
	last   lockstep.Request
	seen   lockstep.Seen
}

func newWalk(l *lab, conn *lockstep.Client, java bool, seen lockstep.Seen) *walk {
	x := &walk{l: l, conn: conn, java: java, w: newWorld(), seen: seen, beside: map[string]string{}}
	for range readers {
		x.slots = append(x.slots, &slot{kind: "read"})
	}
	for range writers {
		x.slots = append(x.slots, &slot{kind: "write"})
	}
	for n := range both {
		x.slots = append(x.slots, &slot{kind: "read", writer: x.slots[firstWriter+n]})
	}
	x.w.now = 1_700_000_000_000
	conn.Reset(x.w.now)
	return x
}

// step is a step. What it does depends on the state that it meets.
type step struct {
	lockstep.Kind
	slots []int
	lease time.Duration // also how much time passes
	waits bool
}

func isJava(kind lockstep.Kind) bool { return strings.HasPrefix(string(kind), "java") }

// Draw implements lockstep.Walk. It prefers steps that have an effect.
func (x *walk) Draw(r *rand.Rand) step {
	if x.cast == nil { // a few are more likely to meet
		x.cast = r.Perm(len(x.slots))[:4+r.IntN(len(x.slots)-3)]
	}
	kinds := stepKinds.Only(func(kind lockstep.Kind) bool { return x.java || !isJava(kind) })
	s := step{Kind: kinds.Draw(r), lease: time.Duration(10+r.IntN(30)) * time.Second, waits: r.IntN(2) == 0}
	member := func() int { return x.cast[r.IntN(len(x.cast))] }
	held := func(tries int, is func(s *slot) bool) int { // perhaps
		n := member()
		for ; tries > 0 && !is(x.slots[n]); tries-- {
			n = member()
		}
		return n
	}
	live := func(s *slot) bool { return x.live(s) }
	if kind, slots := x.rare(r); kind != "" {
		return step{kind, slots, s.lease, s.waits}
	}
	switch s.Kind {
	case "acquire", "acquire late", "is locked", "force":
		s.slots = []int{member()}
	case "acquire all":
		s.slots = r.Perm(readers)[:1+r.IntN(readers)]
	case "leave":
		s.slots = []int{firstWriter + r.IntN(writers)}
	case "renew":
		s.slots = []int{held(20, live)}
		for range 1 + r.IntN(4) {
			if n := held(20, live); x.slots[n].kind == x.slots[s.slots[0]].kind {
				s.slots = append(s.slots, n)
			}
		}
	case "time passes":
		s.lease = time.Duration(1+r.IntN(12)) * time.Second
		if r.IntN(11) == 0 {
			s.lease = 40 * time.Second
		}
	case "again":
	default:
		s.slots = []int{held(20, live)}
		if isJava(s.Kind) {
			s.slots[0] = r.IntN(2)
		}
	}
	return s
}

// rare returns a step that has an effect only in states that random steps seldom reach,
// or "".
func (x *walk) rare(r *rand.Rand) (kind lockstep.Kind, slots []int) {
	live := func(n int) bool { return x.live(x.slots[n]) }
	// A writer that also reads.
	for n := range both {
		writer, reader := firstWriter+n, firstBoth+n
		switch odds := r.IntN(10); {
		case !live(writer):
		case !live(reader) && odds < 3:
			return "acquire", []int{reader}
		case live(reader) && odds == 0:
			return "release", []int{writer}
		}
	}
	if x.w.mode == "" && r.IntN(10) == 0 {
		return "acquire", []int{firstWriter}
	}
	return "", nil
}

// over is a promise that has ended.
const over = -1

// lost ends a promise, if there is one.
func (s *slot) lost() {
	if s.promise != 0 {
		s.promise = over
	}
}

// live reports whether the claim of a slot is promised to stand now.
func (x *walk) live(s *slot) bool { return s.promise > x.w.now }

// claimed returns the claim of a slot.
func (x *walk) claimed(s *slot) *engine.Claim {
	if s.claim == nil {
		return x.fresh(s)
	}
	return s.claim
}

// trying gives a slot a new claim unless the one it has stands or never did.
func (x *walk) trying(s *slot) *engine.Claim {
	if s.claim == nil || s.promise != 0 && !x.live(s) || s.writer != nil && x.live(s.writer) && !x.live(s) {
		return x.fresh(s)
	}
	return s.claim
}

// fresh gives a slot a new claim.
func (x *walk) fresh(s *slot) *engine.Claim {
	x.ids++
	s.promise, s.blocks = 0, 0
	s.claim = newClaim(s.kind, engine.Claim{Key: key, ID: owner(100 + x.ids), Lease: 20 * time.Second})
	if s.writer != nil && x.live(s.writer) {
		s.claim.Writer = s.writer.claim.ID
		x.beside[s.claim.ID.String()] = s.writer.claim.ID.String()
	}
	return s.claim
}

// Take implements lockstep.Walk.
func (x *walk) Take(s step) bool {
	before := x.w.clone()
	switch {
	case s.Kind == "time passes":
		x.w.pass(ms(s.lease))
		x.conn.Wait(x.w.now)
		x.conn.Compare(x.w.state())
		return true
	case isJava(s.Kind):
		x.peer(string(s.Kind), s.slots[0])
		return true
	case s.Kind != "again":
		send := x.request(s)
		if send == nil {
			return false
		}
		x.last = send
	case x.last == nil:
		return false
	}
	x.last.Send()
	x.conn.Compare(x.w.state())
	x.promises(before, s)
	return true
}

// End implements lockstep.Walk.
func (x *walk) End() {}

// request returns what a step sends, nil if nothing.
func (x *walk) request(s step) lockstep.Request {
	var slots []*slot
	for _, n := range s.slots {
		slots = append(slots, x.slots[n])
	}
	first := slots[0]
	switch s.Kind {
	case "acquire":
		c := x.trying(first)
		c.Lease, c.Waits = s.lease, s.waits
		return x.attempt(first, c)
	case "acquire late":
		c := first.claim
		if c == nil {
			return nil
		}
		return x.attempt(first, c)
	case "acquire all":
		return x.acquireAll(slots, s.lease)
	case "release":
		return x.release(first)
	case "leave":
		if first.claim == nil {
			return nil
		}
		c := first.claim
		return func() (any, any, error) {
			x.w.leave(c)
			first.blocks = 0
			return nil, nil, x.l.write.(engine.Positions).Leave(x.l.t.Context(), c)
		}
	case "renew":
		return x.renew(slots, s.lease)
	case "extend":
		c := x.claimed(first)
		return func() (any, any, error) {
			real, err := x.l.of(c).Extend(x.l.t.Context(), c, s.lease)
			want := x.w.extend(c, s.lease)
			x.see("extended", want)
			x.renewed(first, want, s.lease)
			return real, want, err
		}
	case "force":
		return func() (any, any, error) {
			real, err := x.l.of(newClaim(first.kind, engine.Claim{})).Force(x.l.t.Context(), key)
			want := x.w.force(first.kind)
			x.see("forced", want)
			for _, s := range x.slots {
				if want {
					s.lost()
				}
			}
			return real, want, err
		}
	default:
		return func() (any, any, error) {
			real, err := x.l.of(newClaim(first.kind, engine.Claim{})).IsLocked(x.l.t.Context(), key)
			return real, x.w.isLocked(first.kind), err
		}
	}
}

func (x *walk) see(what ...any) { x.seen.See(what...) }

// acquired records the outcome of an attempt.
func (x *walk) acquired(s *slot, c *engine.Claim, a engine.Answer) {
	switch {
	case a.Acquired:
		x.see(kindOf(c), "acquired")
		s.promise = max(s.promise, x.w.now+ms(c.Lease))
		if kindOf(c) == "write" {
			for _, s := range x.slots {
				s.blocks = 0
			}
		}
	case a.Queued:
		x.see(kindOf(c), "placed")
		s.blocks = x.w.now + ms(rwlock.WriterLife)
	default:
		x.see(kindOf(c), "refused")
	}
}

func (x *walk) attempt(s *slot, c *engine.Claim) lockstep.Request {
	return func() (any, any, error) {
		real, err := x.l.of(c).Acquire(x.l.t.Context(), c)
		want := x.w.acquire(c)
		x.acquired(s, c, want)
		return real, want, err
	}
}

func (x *walk) acquireAll(slots []*slot, lease time.Duration) lockstep.Request {
	var claims []*engine.Claim
	for i, s := range slots {
		c := x.trying(s)
		c.Lease, c.Waits = unlike(lease, i), true
		claims = append(claims, c)
	}
	return func() (any, any, error) {
		real, err := x.l.read.(engine.Grouped).AcquireAll(x.l.t.Context(), claims)
		var want []engine.Answer
		some := 0
		for i, c := range claims {
			a := x.w.acquire(c)
			x.acquired(slots[i], c, a)
			if a.Acquired {
				some++
			}
			want = append(want, a)
		}
		if len(claims) > 1 {
			x.see("group")
			if some > 0 && some < len(claims) {
				x.see("group split")
			}
		}
		return real, want, err
	}
}

// unlike returns the i-th of several different leases, which are not in order.
func unlike(lease time.Duration, i int) time.Duration {
	return lease + time.Duration((3-2*i)*(i%2))*time.Second
}

func (x *walk) released(c *engine.Claim, what string, r engine.Release) {
	x.see(kindOf(c), what+map[engine.ReleaseState]string{
		engine.Free: "free", engine.StillHeld: "still", engine.NotHeld: "none"}[r.State])
	if kindOf(c) == "write" && r.State == engine.Free && x.w.mode != "" {
		x.see("downgrade")
	}
}

func (x *walk) release(s *slot) lockstep.Request {
	c := x.claimed(s)
	return func() (any, any, error) {
		for field, count := range x.w.counts {
			if !isWriter(field) && x.w.keys[holdKeyOf(field, count)] == 0 {
				x.see("zombies")
			}
		}
		real, err := x.l.of(c).Release(x.l.t.Context(), c)
		want := x.w.release(c)
		x.released(c, "", want)
		s.promise, s.blocks = over, 0
		return real, want, err
	}
}

func (x *walk) renew(slots []*slot, lease time.Duration) lockstep.Request {
	var batch []watchdog.Subject
	var claims []*engine.Claim
	for _, s := range slots {
		c := x.claimed(s)
		claims = append(claims, c)
		batch = append(batch, watchdog.Subject{Key: key, Owner: c.ID.String()})
	}
	return func() (any, any, error) {
		real := x.l.of(claims[0]).Renewer().Renew(x.l.t.Context(), [][]watchdog.Subject{batch}, lease, true)[0]
		var want []bool
		for i, c := range claims {
			held := x.w.extend(c, lease)
			want = append(want, held)
			x.see("renewed", held)
			x.renewed(slots[i], held, lease)
		}
		return real.Held, want, real.Err
	}
}

// renewed records that a claim may have more time.
func (x *walk) renewed(s *slot, held bool, lease time.Duration) {
	if held && x.live(s) {
		s.promise = max(s.promise, x.w.now+ms(lease))
	}
}

// peer is a step of a Java client. Then the model copies the state of the server.
func (x *walk) peer(do string, n int) {
	x.last = nil
	lease := "30000"
	if do == "java write" {
		lease = "60000"
	}
	lockstep.Check(javaScripts[do].Exec(x.l.t.Context(), x.conn, []string{key, wire.RWChannel(key)},
		[]string{wire.ReadHoldTimeouts(key), clientID[:35] + "9:" + itoa(n+1), lease}).Error())
	x.w.adopt(x.conn.State())
	for _, s := range x.slots {
		switch {
		case s.claim == nil || !x.live(s):
		case x.w.counts[fieldOf(s.claim)] == 0:
			s.lost()
		case s.promise > x.w.until: // Java has cut it short
			s.promise = x.w.until
		}
		if s.blocks > 0 && !x.w.writers[s.claim.ID.String()] {
			s.blocks = 0
		}
	}
}

// promises fails the walk if a guarantee of the lock is violated. It checks the model, which
// equals the server.
func (x *walk) promises(before *world, o step) {
	w := x.w
	var writer string
	for field := range w.counts {
		if isWriter(field) {
			if writer != "" || w.mode != "write" {
				lockstep.Failf("there are two writers, or one among readers")
			}
			writer = strings.TrimSuffix(field, wire.WriteSuffix)
		}
	}
	for field := range w.counts {
		if w.mode == "write" && !isWriter(field) && field != writer && x.beside[field] != writer {
			lockstep.Failf("an owner reads while another writes")
		}
	}
	if (w.mode == "write") != (writer != "") {
		lockstep.Failf("the mode is wrong")
	}
	for _, until := range w.keys {
		if w.mode == "" && !x.java && until > w.now {
			lockstep.Failf("the lock is free, and read holds are left")
		}
	}
	for n, s := range x.slots {
		if x.live(s) {
			switch left := s.promise - w.now; {
			case !w.holds(s.claim):
				lockstep.Failf("the claim of slot %d is gone", n)
			case w.until < s.promise:
				lockstep.Failf("the claim of slot %d was promised %d ms, and the lock lasts %d", n, left, w.until-w.now)
			case s.kind == "read" && w.keys[holdKeyOf(s.claim.ID.String(), 1)] < s.promise:
				lockstep.Failf("the claim of slot %d was promised %d ms, and its key ends before", n, left)
			}
		}
		if s.blocks > w.now && w.mode == "read" && !w.writers[s.claim.ID.String()] {
			lockstep.Failf("slot %d waits to write and does not block readers", n)
		}
	}
	x.othersUntouched(before, o)
}

// othersUntouched fails the walk if a step has cut short a live read hold of another owner.
func (x *walk) othersUntouched(before *world, s step) {
	if s.Kind == "force" || s.Kind == "again" {
		return
	}
	mine := func(name string) bool {
		return slices.ContainsFunc(s.slots, func(n int) bool {
			c := x.slots[n].claim
			return c != nil && name == holdKeyOf(c.ID.String(), 1)
		})
	}
	for name, until := range before.keys {
		if until > x.w.now && !mine(name) && x.w.keys[name] < until && x.w.mode != "" {
			lockstep.Failf("%q was cut short", name)
		}
	}
}
