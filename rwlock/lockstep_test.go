package rwlock_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
)

// The scripts do what the model does, in any order of steps, and keep the promises of
// the lock.
func TestLockstep(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		lockstep.Test[step]{
			Steps: lockstep.Size(100_000), Length: 80, Kinds: stepKinds,
			Outcomes: []string{
				"read acquired", "read refused", "read named acquired", "read named refused",
				"write acquired", "write refused", "write placed", "write named acquired", "write named upgrade",
				"read free", "read still", "read shared", "read none", "write free", "write still", "write shared", "write none",
				"read passed", "read passed on released free", "read passed on released still", "read passed on nothing",
				"write passed", "write passed on released free", "write passed on nothing",
				"downgrade", "zombies", "renewed true", "renewed false", "extended true", "extended false", "forced true", "forced false",
				"group", "group split",
			},
			Start: func(lane int) lockstep.Begin[step] {
				conn := lockstep.Connect(t, s.Addr, lane)
				l := newLabOf(t, s, conn, "PUBLISH")
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
	{"acquire all", 6}, {"release", 17}, {"undo", 3}, {"release any", 2}, {"hand off", 12}, {"leave", 3},
	{"renew", 7}, {"extend", 4},
	{"again", 6}, // the last request is delivered again
	{"time passes", 11}, {"force", 2}, {"is locked", 2},
	{"java read", 2}, {"java write", 1}, {"java unread", 2}, {"java unwrite", 1}, {"java renew", 1}, {"java delete", 1},
}

// slot takes holds, one after the other, each with a new claim.
type slot struct {
	kind    string
	named   int // which named owner it has; 0: a new owner for each claim
	like    int // whose claim's owner it names, plus 1
	claim   *locking.Claim
	promise int64 // until when the hold is promised to last; 0 if there is none
	doubt   bool  // whether another may have released it
	placed  int64 // until when it was promised to keep readers out
}

// The first slots of each kind are the unnamed ones.
const (
	unnamed      = 5
	unnamedWrite = 11
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
	last  lockstep.Request
	seen  lockstep.Seen
}

func newWalk(l *lab, conn *lockstep.Client, java bool, seen lockstep.Seen) *walk {
	x := &walk{l: l, conn: conn, java: java, w: newWorld(), seen: seen}
	for _, kind := range []string{"read", "write"} {
		for range unnamed {
			x.slots = append(x.slots, &slot{kind: kind})
		}
		for _, named := range []int{1, 1, 1, 2} {
			x.slots = append(x.slots, &slot{kind: kind, named: named})
		}
		for _, like := range []int{0, unnamedWrite} {
			x.slots = append(x.slots, &slot{kind: kind, like: like + 1})
		}
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
	case "acquire":
		s.slots = []int{member()}
		if r.IntN(5) < 2 {
			s.slots[0] = x.companion(held(20, live), r)
		}
	case "acquire late", "is locked", "force":
		s.slots = []int{member()}
	case "acquire all":
		s.slots = r.Perm(unnamed)[:1+r.IntN(unnamed)]
	case "hand off":
		s.slots = []int{held(100, func(s *slot) bool { return live(s) && s.unnamed() })}
		if r.IntN(2) == 0 {
			s.slots = append(s.slots, unnamedWrite+r.IntN(unnamed))
		} else {
			for range 1 + r.IntN(3) {
				s.slots = append(s.slots, r.IntN(unnamed))
			}
		}
	case "leave":
		s.slots = []int{unnamedWrite + r.IntN(unnamed)}
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
	// An unnamed claim, and one that names its owner.
	for _, pair := range []struct{ first, like, odds int }{{0, 9, 20}, {unnamedWrite, 10, 5}, {unnamedWrite, 21, 25}} {
		switch n := r.IntN(pair.odds); {
		case !live(pair.first):
		case !live(pair.like) && n == 0:
			return "acquire", []int{pair.like}
		case live(pair.like) && n == 0:
			return "release", []int{pair.first}
		case live(pair.like) && n < 3:
			return "hand off", []int{pair.first, unnamedWrite + 1}
		}
	}
	if x.w.mode == "" && r.IntN(10) == 0 {
		return "acquire", []int{unnamedWrite}
	}
	// The last reader, before a writer that waits.
	for n := range unnamed {
		if live(n) && len(x.w.counts) == 1 && len(x.w.writers) > 0 && r.IntN(2) == 0 {
			return "hand off", []int{n, (n + 1) % unnamed}
		}
	}
	return "", nil
}

// companion returns a slot that may use the same owner as another.
func (x *walk) companion(n int, r *rand.Rand) int {
	var found []int
	for i, s := range x.slots {
		if i != n && (s.like == n+1 || s.named > 0 && s.named == x.slots[n].named) {
			found = append(found, i)
		}
	}
	if len(found) == 0 {
		return n
	}
	return found[r.IntN(len(found))]
}

// over is a promise that has ended: the claim is not used again.
const over = -1

// lost ends a promise, if there is one.
func (s *slot) lost() {
	if s.promise != 0 {
		s.promise, s.doubt = over, true // its ticket does not know
	}
}

func (s *slot) unnamed() bool { return s.named == 0 && s.like == 0 }

// live reports whether a slot has a hold that is promised to be there.
func (x *walk) live(s *slot) bool { return s.promise > x.w.now }

// fresh gives a slot a new claim.
func (x *walk) fresh(s *slot) {
	x.ids++
	s.promise, s.placed, s.doubt = 0, 0, false
	s.claim = &locking.Claim{Key: key, Kind: s.kind, Owner: owner(100 + x.ids), Lease: 20 * time.Second}
	switch {
	case s.named > 0:
		s.claim.Owner = owner(s.named)
	case s.like > 0 && x.live(x.slots[s.like-1]): // otherwise nobody can know it
		s.claim.Owner = x.slots[s.like-1].claim.Owner
	}
	if !s.unnamed() {
		s.claim.Ticket = fmt.Sprintf("%032x", x.ids)
	}
}

// claimed returns the claim of a slot.
func (x *walk) claimed(s *slot) *locking.Claim {
	if s.claim == nil {
		x.fresh(s)
	}
	return s.claim
}

// trying gives a slot a new claim unless it holds by the one it has, or tries still.
func (x *walk) trying(s *slot) *locking.Claim {
	if s.claim == nil || s.promise != 0 && !x.live(s) {
		x.fresh(s)
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
		if c == nil || !c.Named() && x.w.counts[c.Owner.String()]+x.w.counts[wire.WriteOwner(c.Owner)] > 0 {
			return nil
		}
		return x.attempt(first, c)
	case "acquire all":
		return x.acquireAll(slots, s.lease)
	case "release", "undo":
		return x.release(first, s.Kind == "undo", false)
	case "release any":
		if first.unnamed() {
			return nil
		}
		return x.release(first, false, true)
	case "hand off":
		if !first.unnamed() {
			return nil
		}
		return x.handOff(first, slots[1:], s.lease)
	case "leave":
		if first.claim == nil {
			return nil
		}
		c := first.claim
		return func() (any, any, error) {
			x.w.leave(c)
			x.left(c)
			return nil, nil, x.l.write.(locking.Placed).Leave(x.l.t.Context(), c)
		}
	case "renew":
		return x.renew(slots, s.lease)
	case "extend":
		c := x.claimed(first)
		return func() (any, any, error) {
			real, err := x.l.of(c).Extend(x.l.t.Context(), c, s.lease)
			want := x.w.extend(c, s.lease)
			x.see("extended", want)
			x.renewed(first, c, want, s.lease)
			return real, want, err
		}
	case "force":
		return func() (any, any, error) {
			real, err := x.l.of(&locking.Claim{Kind: first.kind}).Force(x.l.t.Context(), key)
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
			real, err := x.l.of(&locking.Claim{Kind: first.kind}).IsLocked(x.l.t.Context(), key)
			return real, x.w.isLocked(first.kind), err
		}
	}
}

func (x *walk) see(what ...any) { x.seen.See(what...) }

func kindOf(c *locking.Claim) string {
	if c.Named() {
		return c.Kind + " named"
	}
	return c.Kind
}

// acquired notes what an attempt has come to.
func (x *walk) acquired(s *slot, c *locking.Claim, a locking.Answer) {
	switch {
	case a.Acquired:
		x.see(kindOf(c), "acquired")
		s.placed = 0
		if s.claim == c && !s.doubt { // otherwise the hold may be of another claim
			s.promise = max(s.promise, x.w.now+ms(c.Lease))
		}
		if c.Kind == "write" {
			for _, s := range x.slots {
				s.placed = 0
			}
		}
	case a.Upgrade:
		x.see(kindOf(c), "upgrade")
	case a.Placed:
		x.see(kindOf(c), "placed")
		s.placed = x.w.now + ms(5*time.Second)
	default:
		x.see(kindOf(c), "refused")
	}
}

func (x *walk) attempt(s *slot, c *locking.Claim) lockstep.Request {
	return func() (any, any, error) {
		real, err := x.l.of(c).Acquire(x.l.t.Context(), c)
		want := x.w.acquire(c)
		x.acquired(s, c, want)
		return real, want, err
	}
}

func (x *walk) acquireAll(slots []*slot, lease time.Duration) lockstep.Request {
	var claims []*locking.Claim
	for i, s := range slots {
		c := x.trying(s)
		c.Lease, c.Waits = unlike(lease, i), true
		claims = append(claims, c)
	}
	return func() (any, any, error) {
		real, err := x.l.read.(locking.Grouped).AcquireAll(x.l.t.Context(), claims)
		var want []locking.Answer
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

// unlike returns a lease for the i-th of several, which are not in order.
func unlike(lease time.Duration, i int) time.Duration {
	return lease + time.Duration((3-2*i)*(i%2))*time.Second
}

func (x *walk) released(c *locking.Claim, what string, r locking.Released) {
	x.see(c.Kind, what+map[locking.ReleaseState]string{
		locking.Free: "free", locking.StillHeld: "still", locking.Shared: "shared", locking.NotHeld: "none"}[r.State])
	if c.Kind == "write" && r.State == locking.Free && x.w.mode != "" {
		x.see("downgrade")
	}
}

func (x *walk) release(s *slot, undo, anyHold bool) lockstep.Request {
	c := x.claimed(s)
	if anyHold {
		x.ids++
		other := *c
		other.Ticket, other.AnyHold = fmt.Sprintf("%032x", x.ids), true
		c = &other
	}
	return func() (any, any, error) {
		for field, count := range x.w.counts {
			if !isWriter(field) && x.w.keys[holdKeyOf(field, count)] == 0 {
				x.see("zombies")
			}
		}
		real, err := x.l.of(c).Release(x.l.t.Context(), c, undo)
		want := x.w.release(c, undo)
		x.released(c, "", want)
		if anyHold {
			x.lostWith(c)
		}
		x.takenFor(s, c)
		if s.claim == c && want.State != locking.Shared {
			s.promise = over
		}
		x.left(c)
		return real, want, err
	}
}

// lostWith ends the promises to a claim's owner: one of its holds is gone, and it is not
// known which.
func (x *walk) lostWith(c *locking.Claim) {
	for _, s := range x.slots {
		if s.claim != nil && s.claim.Owner == c.Owner && s.kind == c.Kind {
			s.lost()
		}
	}
}

// takenFor is for the release of a claim that has no hold any more and does not know: it
// takes another hold of its owner for its own. It happens to an unnamed claim whose owner
// has been named since, and to a claim whose hold another one has released.
func (x *walk) takenFor(s *slot, c *locking.Claim) {
	if s.claim != c || s.doubt || !c.Named() && !x.live(s) {
		x.lostWith(c)
	}
}

// left notes that a claim's owner keeps readers out no more.
func (x *walk) left(c *locking.Claim) {
	for _, s := range x.slots {
		if s.claim != nil && s.claim.Owner == c.Owner && c.Kind == "write" {
			s.placed = 0
		}
	}
}

func (x *walk) handOff(from *slot, to []*slot, lease time.Duration) lockstep.Request {
	f := x.claimed(from)
	var claims []*locking.Claim
	var next []*slot
	for _, s := range to {
		if s == from || x.live(s) || slices.Contains(next, s) {
			continue
		}
		c := x.trying(s)
		c.Lease = unlike(lease, len(claims))
		claims, next = append(claims, c), append(next, s)
	}
	if len(claims) == 0 {
		return nil
	}
	return func() (any, any, error) {
		real, err := x.l.of(f).HandOff(x.l.t.Context(), f, claims)
		want := x.w.handOff(f, claims)
		x.takenFor(from, f)
		switch {
		case want.Acquired:
			x.see(f.Kind, "passed")
			for i, s := range next {
				x.acquired(s, claims[i], locking.Answer{Acquired: true})
			}
			from.promise = over
		case want.State == locking.NotHeld:
			x.see(f.Kind, "passed on nothing")
		default:
			x.released(f, "passed on released ", want.Released)
			from.promise = over
		}
		return real, want, err
	}
}

func (x *walk) renew(slots []*slot, lease time.Duration) lockstep.Request {
	var batch []*watchdog.Lease
	var claims []*locking.Claim
	for _, s := range slots {
		c := x.claimed(s)
		claims = append(claims, c)
		one := &watchdog.Lease{Key: key, Owner: c.Owner.String()}
		if c.Named() {
			one.Ticket = wire.UnlockLatch(key, c.Ticket)
		}
		batch = append(batch, one)
	}
	return func() (any, any, error) {
		real := x.l.of(claims[0]).Renewer().Renew(x.l.t.Context(), [][]*watchdog.Lease{batch}, lease, true)[0]
		var want []bool
		for i, c := range claims {
			held := x.w.extend(c, lease)
			want = append(want, held)
			x.see("renewed", held)
			x.renewed(slots[i], c, held, lease)
		}
		return real.Held, want, real.Err
	}
}

// renewed notes that a claim may have been given more time.
func (x *walk) renewed(s *slot, c *locking.Claim, held bool, lease time.Duration) {
	if held && s.claim == c && x.live(s) {
		s.promise = max(s.promise, x.w.now+ms(lease))
	}
}

// peer is a step of a Java client. The model takes over what the server has then.
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
			s.promise, s.doubt = x.w.until, true
		}
		if s.placed > 0 && !x.w.writers[s.claim.Owner.String()] {
			s.placed = 0
		}
	}
}

// promises fails the walk if a promise of the lock is broken. It looks at the model, which
// the server is equal to.
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
		if w.mode == "write" && !isWriter(field) && field != writer {
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
	// Every hold that was promised has its own key that lasts as long.
	promised := map[string][]int64{}
	for n, s := range x.slots {
		if x.live(s) {
			f := fieldOf(s.claim)
			promised[f] = append(promised[f], s.promise)
			if w.counts[f] < len(promised[f]) {
				lockstep.Failf("the hold of slot %d is gone", n)
			}
			if w.until < s.promise {
				lockstep.Failf("the hold of slot %d was promised %d ms, and the lock lasts %d", n, s.promise-w.now, w.until-w.now)
			}
		}
		if s.placed > w.now && w.mode == "read" && !w.writers[s.claim.Owner.String()] {
			lockstep.Failf("slot %d waits to write, and does not keep readers out", n)
		}
	}
	for field, promises := range promised {
		if isWriter(field) {
			continue
		}
		var untils []int64
		for n := range w.counts[field] {
			untils = append(untils, w.keys[holdKeyOf(field, n+1)])
		}
		slices.Sort(untils)
		slices.Sort(promises)
		for i, until := range untils[len(untils)-len(promises):] {
			if until < promises[i] {
				lockstep.Failf("a read hold of %s was promised %d ms, and its key lasts %d", field, promises[i]-w.now, until-w.now)
			}
		}
	}
	x.othersUntouched(before, o)
}

// othersUntouched fails the walk if a step has cut short a live hold of another owner.
func (x *walk) othersUntouched(before *world, s step) {
	if s.Kind == "force" || s.Kind == "again" {
		return
	}
	mine := func(name string) bool {
		for _, n := range s.slots {
			if c := x.slots[n].claim; c != nil && strings.HasPrefix(name, wire.ReadHoldTimeouts(key)+c.Owner.String()+":") {
				return true
			}
		}
		return false
	}
	for name, until := range before.keys {
		if until > x.w.now && !mine(name) && x.w.keys[name] < until && x.w.mode != "" {
			lockstep.Failf("%q was cut short", name)
		}
	}
}

// An owner has three holds: the key of the first is gone, the second is released when its
// own time is nearly over, and the third must keep its time.
func TestALiveReadHoldKeepsItsKey(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		conn := lockstep.Connect(t, s.Addr, 0)
		x := newWalk(newLabOf(t, s, conn, "PUBLISH"), conn, false, lockstep.Seen{})
		for _, s := range []step{
			{"acquire", []int{5}, 10 * time.Second, true},
			{"acquire", []int{6}, 20 * time.Second, true},
			{"acquire", []int{7}, 40 * time.Second, true},
			{"time passes", nil, 20 * time.Second, true},
			{"release", []int{6}, 0, true},
		} {
			require.NotPanics(t, func() { require.True(t, x.Take(s)) })
		}
	})
}
