package rwlock_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
)

// The scripts and the model take the same random steps. After each, replies and
// everything on the server are compared, and what a lock promises is checked. The keys
// have the model's time: after every step their expiries are set to what they are in
// the model, so that only the duration of that one step is between the two.
//
// REDLATCH_MODEL_SEED repeats a run, REDLATCH_MODEL_STEPS makes it longer.

const (
	modelSteps  = 100_000
	walkSteps   = 80
	javaStarts  = 2 // every second walk has Java peers
	tooSlow     = 500 * time.Millisecond
	shrinkTries = 2000
)

func itoa(n int) string { return strconv.Itoa(n) }

func TestScriptsKeepStepWithTheModel(t *testing.T) {
	steps, seed := modelSteps, rand.Uint64()
	if s := os.Getenv("REDLATCH_MODEL_STEPS"); s != "" {
		var err error
		steps, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	if s := os.Getenv("REDLATCH_MODEL_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("REDLATCH_MODEL_SEED=%d", seed)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := newLab(t, s)
		counts := map[string]int{}
		for n := range uint64(steps / walkSteps) {
			w := newWalk(l, n%javaStarts == 0)
			ops, err := w.random(rand.New(rand.NewPCG(seed, n)))
			if err != nil {
				ops, err = shrink(l, ops, err)
				var list strings.Builder
				for _, o := range ops {
					fmt.Fprintln(&list, o)
				}
				require.FailNow(t, err.Error(), "REDLATCH_MODEL_SEED=%d, walk %d, shrunk to\n%s", seed, n, list.String())
			}
			for what, n := range w.seen {
				counts[what] += n
			}
		}
		t.Logf("seen: %v", counts)
		for _, what := range mustSee {
			if steps < modelSteps {
				break
			}
			require.Positive(t, counts[what], "never seen: %s", what)
		}
	})
}

// mustSee is what a run is worth nothing without.
var mustSee = []string{
	"read acquired", "read refused", "read named acquired", "read named refused",
	"write acquired", "write refused", "write placed", "write named acquired", "write named upgrade",
	"read free", "read still", "read shared", "read none", "write free", "write still", "write shared", "write none",
	"read passed", "read passed on released free", "read passed on released still", "read passed on nothing",
	"write passed", "write passed on released free", "write passed on nothing",
	"downgrade", "zombies", "held renewed", "lost renewed", "extended", "not extended", "forced", "not forced",
	"group", "group split", "again",
}

// slot is somebody who takes holds, one after the other, each with a new claim.
type slot struct {
	kind    string
	named   int // of which named owner; 0: a new owner for each claim
	like    int // named as the owner of that slot's claim, plus 1
	claim   *locking.Claim
	promise int64 // until when the hold is promised to last; 0 if there is none
	doubt   bool  // whether another may have released it
	placed  int64 // until when its place was promised to keep readers out
}

// walk is one sequence of steps.
type walk struct {
	l     *lab
	java  bool
	w     *world
	slots []*slot
	cast  []int // which of them most steps are for
	ids   int
	at    int64 // the server's clock when the expiries were set last
	took  int64 // how long the last step took, by that clock, in ms
	last  func() error
	seen  map[string]int
}

func newWalk(l *lab, java bool) *walk {
	x := &walk{l: l, java: java, w: newWorld(), seen: map[string]int{}}
	for _, kind := range []string{"read", "write"} {
		for range 5 {
			x.slots = append(x.slots, &slot{kind: kind})
		}
		for _, named := range []int{1, 1, 1, 2} {
			x.slots = append(x.slots, &slot{kind: kind, named: named})
		}
		for _, like := range []int{0, unnamedWrite} {
			x.slots = append(x.slots, &slot{kind: kind, like: like + 1})
		}
	}
	x.w.now = 1_000_000
	return x
}

// The first slots of each kind are the unnamed ones.
const (
	unnamed      = 5
	unnamedWrite = 11
)

// op is one step. What it means depends on what was before, so that it means
// something in any sequence.
type op struct {
	do    string
	slots []int
	lease int // in seconds; also how much time passes
	waits bool
}

func (o op) String() string {
	return fmt.Sprintf("%-12s %v %ds waits=%v", o.do, o.slots, o.lease, o.waits)
}

// random takes random steps until one fails.
func (x *walk) random(r *rand.Rand) (ops []op, err error) {
	if err := x.reset(); err != nil {
		return nil, err
	}
	// Few are more likely to meet.
	x.cast = r.Perm(len(x.slots))[:4+r.IntN(len(x.slots)-3)]
	for range walkSteps {
		o := x.choose(r)
		ops = append(ops, o)
		if err := x.step(o); errors.Is(err, errSlow) {
			return ops, nil
		} else if err != nil {
			return ops, err
		}
	}
	return ops, nil
}

// choose prefers what has an effect.
func (x *walk) choose(r *rand.Rand) op {
	o := op{lease: 10 + r.IntN(30), waits: r.IntN(2) == 0}
	any := func() int { return x.cast[r.IntN(len(x.cast))] }
	held := func() int { // perhaps
		n := any()
		for range 20 {
			if x.live(x.slots[n]) {
				break
			}
			n = any()
		}
		return n
	}
	switch n := r.IntN(100); {
	case n < 30 && x.live(x.slots[unnamedWrite]) && x.live(x.slots[unnamedWrite-1]):
		// A writer whose owner reads.
		o.do, o.slots = "hand off", []int{unnamedWrite, unnamedWrite + 1}
	case n < 10:
		o.do, o.slots = "acquire", []int{x.companion(held(), r)}
	case n < 25:
		o.do, o.slots = "acquire", []int{any()}
	case n < 26:
		o.do, o.slots = "acquire late", []int{any()}
	case n < 29:
		o.do, o.waits = "acquire all", true
		for n := range unnamed {
			if r.IntN(2) == 0 {
				o.slots = append(o.slots, n)
			}
		}
		if len(o.slots) == 0 {
			o.slots = []int{0}
		}
	case n < 46:
		o.do, o.slots = "release", []int{held()}
	case n < 49:
		o.do, o.slots = "undo", []int{held()}
	case n < 51:
		o.do, o.slots = "release any", []int{held()}
	case n < 60:
		o.do = "hand off"
		from := held()
		for range 5 {
			if x.slots[from].unnamed() {
				break
			}
			from = held()
		}
		o.slots = []int{from}
		if r.IntN(2) == 0 {
			o.slots = append(o.slots, unnamedWrite+r.IntN(unnamed))
		} else {
			for range 1 + r.IntN(3) {
				o.slots = append(o.slots, r.IntN(unnamed))
			}
		}
	case n < 63:
		o.do, o.slots = "leave", []int{unnamedWrite + r.IntN(unnamed)}
	case n < 70:
		o.do = "renew"
		first := held()
		for range 1 + r.IntN(4) {
			if n := held(); x.slots[n].kind == x.slots[first].kind {
				o.slots = append(o.slots, n)
			}
		}
		o.slots = append(o.slots, first)
	case n < 74:
		o.do, o.slots = "extend", []int{held()}
	case n < 80:
		o.do = "again"
	case n < 90:
		o.do, o.lease = "time passes", 1+r.IntN(12)
	case n < 91:
		o.do, o.lease = "time passes", 40
	case n < 92:
		o.do, o.slots = "force", []int{any()}
	case x.java:
		o.do, o.slots = "java "+[]string{"read", "read", "write", "unread", "unread", "unwrite", "renew", "delete"}[r.IntN(8)], []int{r.IntN(2)}
	default:
		o.do, o.slots = "is locked", []int{any()}
	}
	return o
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

// over is a promise that is no more: the claim is not used again.
const over = -1

// lost ends a promise, if there is one.
func (s *slot) lost() {
	if s.promise != 0 {
		s.promise, s.doubt = over, true // and its ticket does not know
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
	case s.like > 0 && x.live(x.slots[s.like-1]): // or nobody can know it
		s.claim.Owner = x.slots[s.like-1].claim.Owner
	}
	if !s.unnamed() {
		s.claim.Ticket = fmt.Sprintf("%032x", x.ids)
	}
}

// trying gives a slot a new claim unless the one it has is held or tries still.
func (x *walk) trying(s *slot) *locking.Claim {
	if s.claim == nil || s.promise != 0 && !x.live(s) {
		x.fresh(s)
	}
	return s.claim
}

var errSlow = errors.New("the machine is too slow for this walk")

// step takes one step in both worlds and compares them.
func (x *walk) step(o op) error {
	before := x.w.clone()
	if err := x.do(o); err != nil {
		if _, slow := x.sync(nil); errors.Is(slow, errSlow) {
			return slow
		}
		return fmt.Errorf("%v: %w", o, err)
	}
	if o.do == "time passes" || strings.HasPrefix(o.do, "java") {
		return nil
	}
	if err := x.compare(); err != nil {
		return fmt.Errorf("%v: %w", o, err)
	}
	if err := x.promises(before, o); err != nil {
		return fmt.Errorf("%v: %w\n%v", o, err, x.w.entries())
	}
	x.w.told = nil
	return nil
}

func (x *walk) do(o op) error {
	lease := time.Duration(o.lease) * time.Second
	var slots []*slot
	for _, n := range o.slots {
		slots = append(slots, x.slots[n])
	}
	switch {
	case o.do == "acquire":
		return x.request(x.acquire(slots[0], lease, o.waits))
	case o.do == "acquire late": // a copy of an attempt
		c := slots[0].claim
		if c == nil || !c.Named() && x.w.counts[c.Owner.String()]+x.w.counts[wire.WriteOwner(c.Owner)] > 0 {
			return nil
		}
		return x.request(x.attempt(slots[0], c))
	case o.do == "acquire all":
		return x.request(x.acquireAll(slots, lease))
	case o.do == "release":
		return x.request(x.release(slots[0], false, false))
	case o.do == "undo":
		return x.request(x.release(slots[0], true, false))
	case o.do == "release any":
		if slots[0].unnamed() {
			return nil
		}
		return x.request(x.release(slots[0], false, true))
	case o.do == "hand off":
		if !slots[0].unnamed() {
			return nil
		}
		return x.request(x.handOff(slots[0], slots[1:], lease))
	case o.do == "leave":
		return x.request(x.leave(slots[0]))
	case o.do == "renew":
		return x.request(x.renew(slots, lease))
	case o.do == "extend":
		return x.request(x.extend(slots[0], lease))
	case o.do == "force":
		return x.request(x.force(slots[0].kind))
	case o.do == "is locked":
		return x.request(x.isLocked(slots[0].kind))
	case o.do == "again":
		if x.last == nil {
			return nil
		}
		x.see("again")
		return x.last()
	case o.do == "time passes":
		gone := map[string]bool{}
		for name := range x.w.entries() {
			gone[name] = true
		}
		x.w.pass(ms(lease))
		for name := range x.w.entries() {
			delete(gone, name)
		}
		_, err := x.sync(slices.Collect(maps.Keys(gone)))
		return err
	default:
		return x.peer(o.do, slots[0], o.slots[0])
	}
}

// request sends a request, which can be sent again.
func (x *walk) request(send func() error) error {
	if send == nil {
		return nil
	}
	x.last = send
	return send()
}

func (x *walk) see(what ...any) { x.seen[strings.TrimSpace(fmt.Sprintln(what...))]++ }

func kindOf(c *locking.Claim) string {
	if c.Named() {
		return c.Kind + " named"
	}
	return c.Kind
}

func differ(what string, got, want any, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		return fmt.Errorf("%s is %+v, and ought to be %+v", what, got, want)
	}
	return nil
}

// answered compares an answer to an acquisition.
func answered(got, want locking.Answer, err error) error {
	// The key it was read from may have been set up to tooSlow ago.
	if d := want.FreeIn - got.FreeIn; want.FreeIn >= 0 && d >= 0 && d < tooSlow {
		got.FreeIn = want.FreeIn
	}
	return differ("the answer", got, want, err)
}

func (x *walk) acquired(s *slot, c *locking.Claim, a locking.Answer) {
	switch {
	case a.Acquired:
		x.see(kindOf(c), "acquired")
		s.placed = 0
		if s.claim == c && !s.doubt { // what it has may be of another claim
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

func (x *walk) acquire(s *slot, lease time.Duration, waits bool) func() error {
	c := x.trying(s)
	c.Lease, c.Waits = lease, waits
	return x.attempt(s, c)
}

func (x *walk) attempt(s *slot, c *locking.Claim) func() error {
	return func() error {
		got, err := x.l.of(c).Acquire(x.l.t.Context(), c)
		want := x.w.acquire(c)
		x.acquired(s, c, want)
		return answered(got, want, err)
	}
}

func (x *walk) acquireAll(slots []*slot, lease time.Duration) func() error {
	var claims []*locking.Claim
	for i, s := range slots {
		c := x.trying(s)
		c.Lease, c.Waits = unlike(lease, i), true
		claims = append(claims, c)
	}
	return func() error {
		got, err := x.l.read.(locking.Grouped).AcquireAll(x.l.t.Context(), claims)
		if err == nil && len(got) != len(claims) {
			return fmt.Errorf("%d answers for %d claims", len(got), len(claims))
		}
		some := 0
		for i, c := range claims {
			want := x.w.acquire(c)
			x.acquired(slots[i], c, want)
			if want.Acquired {
				some++
			}
			if err != nil {
				return err
			}
			if err := answered(got[i], want, err); err != nil {
				return fmt.Errorf("claim %d: %w", i, err)
			}
		}
		if len(claims) > 1 {
			x.see("group")
			if some > 0 && some < len(claims) {
				x.see("group split")
			}
		}
		return nil
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

func (x *walk) release(s *slot, undo, anyHold bool) func() error {
	if s.claim == nil {
		x.fresh(s)
	}
	c := s.claim
	if anyHold {
		x.ids++
		any := *c
		any.Ticket, any.AnyHold = fmt.Sprintf("%032x", x.ids), true
		c = &any
	}
	return func() error {
		for field, count := range x.w.counts {
			if !isWriter(field) && x.w.keys[holdKeyOf(field, count)] == 0 {
				x.see("zombies")
			}
		}
		got, err := x.l.of(c).Release(x.l.t.Context(), c, undo)
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
		return differ("the result", got, want, err)
	}
}

// lostWith ends the promises to a claim's owner: one of its holds is gone, and whose
// it was is not known.
func (x *walk) lostWith(c *locking.Claim) {
	for _, s := range x.slots {
		if s.claim != nil && s.claim.Owner == c.Owner && s.kind == c.Kind {
			s.lost()
		}
	}
}

// takenFor is for a release of a claim that has no hold any more and does not know: it
// takes another of its owner for its own. It is of an unnamed one whose owner has been
// used as a name since, or of one whose hold was released by another.
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

func (x *walk) handOff(from *slot, to []*slot, lease time.Duration) func() error {
	if from.claim == nil {
		x.fresh(from)
	}
	f := from.claim
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
	return func() error {
		got, err := x.l.of(f).HandOff(x.l.t.Context(), f, claims)
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
		return differ("the result", got, want, err)
	}
}

func (x *walk) leave(s *slot) func() error {
	if s.claim == nil {
		return nil
	}
	c := s.claim
	return func() error {
		x.w.leave(c)
		x.left(c)
		return x.l.write.(locking.Placed).Leave(x.l.t.Context(), c)
	}
}

func (x *walk) renew(slots []*slot, lease time.Duration) func() error {
	var batch []*watchdog.Lease
	var claims []*locking.Claim
	for _, s := range slots {
		if s.claim == nil {
			x.fresh(s)
		}
		claims = append(claims, s.claim)
		one := &watchdog.Lease{Key: key, Owner: s.claim.Owner.String()}
		if s.claim.Named() {
			one.Ticket = wire.UnlockLatch(key, s.claim.Ticket)
		}
		batch = append(batch, one)
	}
	return func() error {
		got := x.l.of(claims[0]).Renewer().Renew(context.Background(), [][]*watchdog.Lease{batch}, lease, true)[0]
		var want []bool
		for i, c := range claims {
			held := x.w.holds(c)
			if held {
				x.w.atLeast(c, lease)
			}
			want = append(want, held)
			x.see(map[bool]string{true: "held", false: "lost"}[held], "renewed")
			if s := slots[i]; held && s.claim == c && x.live(s) {
				s.promise = max(s.promise, x.w.now+ms(lease))
			}
		}
		return differ("what is held", got.Held, want, got.Err)
	}
}

func (x *walk) extend(s *slot, lease time.Duration) func() error {
	if s.claim == nil {
		x.fresh(s)
	}
	c := s.claim
	return func() error {
		got, err := x.l.of(c).Extend(x.l.t.Context(), c, lease)
		want := x.w.extend(c, lease)
		if want {
			x.see("extended")
		} else {
			x.see("not extended")
		}
		if want && s.claim == c && x.live(s) {
			s.promise = max(s.promise, x.w.now+ms(lease))
		}
		return differ("whether it is held", got, want, err)
	}
}

func (x *walk) force(kind string) func() error {
	return func() error {
		got, err := x.of(kind).Force(x.l.t.Context(), key)
		want := x.w.force(kind)
		if want {
			x.see("forced")
			for _, s := range x.slots {
				s.lost()
			}
		} else {
			x.see("not forced")
		}
		return differ("whether it was held", got, want, err)
	}
}

func (x *walk) of(kind string) interface {
	Force(context.Context, string) (bool, error)
	IsLocked(context.Context, string) (bool, error)
} {
	if kind == "read" {
		return x.l.read
	}
	return x.l.write
}

func (x *walk) isLocked(kind string) func() error {
	return func() error {
		got, err := x.of(kind).IsLocked(x.l.t.Context(), key)
		return differ("whether it is locked", got, x.w.isLocked(kind), err)
	}
}

// peer is a step of a Java client. It is not compared: the model takes what the server
// has then.
func (x *walk) peer(do string, _ *slot, n int) error {
	x.last = nil
	if err := x.compareless(); err != nil {
		return err
	}
	me := clientID[:35] + "9:" + itoa(n+1)
	if err := java(x.l, do, me); err != nil {
		return err
	}
	found, err := x.sync(nil)
	if err != nil {
		return err
	}
	x.adopt(found)
	_, err = x.sync(nil)
	for _, s := range x.slots {
		switch {
		case s.claim == nil || !x.live(s):
		case x.w.counts[fieldOf(s.claim)] == 0:
			s.lost()
		case s.promise > x.w.until: // a peer has cut it short
			s.promise, s.doubt = x.w.until, true
		}
		if s.placed > 0 && !x.w.writers[s.claim.Owner.String()] {
			s.placed = 0
		}
	}
	x.w.told = nil
	return err
}

// compareless does nothing to the server but set the expiries.
func (x *walk) compareless() error {
	_, err := x.sync(nil)
	return err
}

// adopt makes the model what was found. Times are whole seconds in the model.
func (x *walk) adopt(found map[string]entry) {
	w := newWorld()
	w.now = x.w.now
	for name, e := range found {
		until := w.now + max((e.until+500)/1000*1000, 1000)
		switch {
		case name == key:
			w.until = until
			for field := range strings.FieldsSeq(e.value) {
				name, value, _ := strings.Cut(field, "=")
				if name == "mode" {
					w.mode = value
				} else {
					w.counts[name], _ = strconv.Atoi(value)
				}
			}
		case name == wire.WriterWaits(key):
			w.kept = until
			for o := range strings.FieldsSeq(e.value) {
				w.writers[o] = true
			}
		case strings.Contains(name, ":rwlock_timeout:"):
			w.keys[name] = until
		case strings.HasPrefix(name, "redisson_unlock_latch"):
			w.tickets[name] = ticket{e.value, until}
		}
	}
	x.w = w
}

// compare fails unless the server has what the model has.
func (x *walk) compare() error {
	found, err := x.sync(nil)
	if err != nil {
		return err
	}
	took, again := x.took, x.renumber(found)
	want := x.w.entries()
	for name, e := range found {
		if _, ok := want[name]; !ok {
			return fmt.Errorf("%q = %q is there, and ought not to be", name, e.value)
		}
	}
	for name, e := range want {
		got, ok := found[name]
		if !ok {
			return fmt.Errorf("%q = %q is not there", name, e.value)
		}
		if got.value != e.value {
			return fmt.Errorf("%q is %q, and ought to be %q", name, got.value, e.value)
		}
		ttl := int64(-1)
		if e.until != 0 {
			ttl = e.until - x.w.now
		}
		if d := ttl - got.until; max(d, -d) > took+1 {
			return fmt.Errorf("%q has %d ms left, and ought to have %d (the step took %d ms)", name, got.until, ttl, took)
		}
	}
	if again { // and so have other expiries
		x.w.told = nil
		_, err = x.sync(nil)
	}
	return err
}

// renumber gives the read holds of an owner the numbers that they have on the server, by
// their time: where some are alike, it is not told which is ended. It reports whether
// that changes any.
func (x *walk) renumber(found map[string]entry) (changed bool) {
	for owner, count := range x.w.counts {
		var there []string
		var untils []int64
		for n := range count {
			name := holdKeyOf(owner, n+1)
			if _, ok := found[name]; ok {
				there = append(there, name)
			}
			if until, ok := x.w.keys[name]; ok {
				untils = append(untils, until)
			}
		}
		if len(there) != len(untils) {
			continue // and compare will tell
		}
		slices.SortStableFunc(there, func(a, b string) int { return int(found[a].until - found[b].until) })
		slices.Sort(untils)
		renumbered := maps.Clone(x.w.keys)
		for n := range count {
			delete(renumbered, holdKeyOf(owner, n+1))
		}
		for i, name := range there {
			renumbered[name] = untils[i]
		}
		if !maps.Equal(renumbered, x.w.keys) {
			x.w.keys, changed = renumbered, true
		}
	}
	return changed
}

// promises fails if a lock would break its promise. It looks at the model, which the
// server is equal to.
func (x *walk) promises(before *world, o op) error {
	w := x.w
	var writer string
	for field := range w.counts {
		if isWriter(field) {
			if writer != "" || w.mode != "write" {
				return errors.New("there are two writers, or one among readers")
			}
			writer = strings.TrimSuffix(field, wire.WriteSuffix)
		}
	}
	for field := range w.counts {
		if w.mode == "write" && !isWriter(field) && field != writer {
			return errors.New("somebody reads while another writes")
		}
	}
	if (w.mode == "write") != (writer != "") {
		return errors.New("the mode is wrong")
	}
	if w.mode == "" && !x.java && len(w.keys) > 0 {
		return errors.New("the lock is free, and read holds are left")
	}
	// Every hold that was promised has its own key that lasts as long.
	promised := map[string][]int64{}
	for n, s := range x.slots {
		if x.live(s) {
			f := fieldOf(s.claim)
			promised[f] = append(promised[f], s.promise)
			if w.counts[f] < len(promised[f]) {
				return fmt.Errorf("the hold of slot %d is gone", n)
			}
			if w.until < s.promise {
				return fmt.Errorf("the hold of slot %d is to last %d ms, and the lock lasts %d", n, s.promise-w.now, w.until-w.now)
			}
		}
		if s.placed > w.now && w.mode == "read" && !w.writers[s.claim.Owner.String()] {
			return fmt.Errorf("slot %d waits to write, and does not keep readers out", n)
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
				return fmt.Errorf("a read hold of %s is to last %d ms, and its key lasts %d", field, promises[i]-w.now, until-w.now)
			}
		}
	}
	return x.othersUntouched(before, o)
}

// othersUntouched fails if a step has cut short a live hold of somebody it was not
// for.
func (x *walk) othersUntouched(before *world, o op) error {
	if o.do == "force" || o.do == "again" {
		return nil
	}
	mine := func(name string) bool {
		for _, n := range o.slots {
			if c := x.slots[n].claim; c != nil && strings.HasPrefix(name, wire.ReadHoldTimeouts(key)+c.Owner.String()+":") {
				return true
			}
		}
		return false
	}
	for name, until := range before.keys {
		if until > x.w.now && !mine(name) && x.w.keys[name] < until && x.w.mode != "" {
			return fmt.Errorf("%q was cut short", name)
		}
	}
	return nil
}

// syncScript returns the clock and everything there is, as lists of name, value and
// ms left. Then it deletes the list of messages, the first ARGV[1] of the names that
// follow, and gives the rest the ms that follow each.
var syncScript = wire.NewScript(`
local found = {'the clock'}
for _, key in ipairs(redis.call('KEYS', '*')) do
	local kind, value = redis.call('TYPE', key).ok, nil
	if kind == 'hash' then
		local fields, all = redis.call('HGETALL', key), {}
		for i = 1, #fields, 2 do
			all[#all + 1] = fields[i] .. '=' .. fields[i + 1]
		end
		table.sort(all)
		value = table.concat(all, ' ')
	elseif kind == 'set' then
		local all = redis.call('SMEMBERS', key)
		table.sort(all)
		value = table.concat(all, ' ')
	elseif kind == 'list' then
		value = table.concat(redis.call('LRANGE', key, 0, -1), ' ')
	else
		value = redis.call('GET', key)
	end
	found[#found + 1] = key
	found[#found + 1] = value
	found[#found + 1] = string.format('%d', redis.call('PTTL', key))
end
local now = redis.call('TIME') -- after all has been looked at
now = now[1] * 1000 + math.floor(now[2] / 1000)
found[1] = string.format('%d', now)
redis.call('DEL', KEYS[1])
local gone = tonumber(ARGV[1])
for i = 2, gone + 1 do
	redis.call('DEL', ARGV[i])
end
for i = gone + 2, #ARGV, 2 do
	redis.call('PEXPIREAT', ARGV[i], string.format('%d', now + ARGV[i + 1]))
end
return found`)

// sync returns what there is, with the ms it has left as its until, and sets all
// expiries to those of the model.
func (x *walk) sync(gone []string) (map[string]entry, error) {
	args := append([]string{itoa(len(gone))}, gone...)
	for name, e := range x.w.entries() {
		if e.until != 0 {
			args = append(args, name, strconv.FormatInt(e.until-x.w.now, 10))
		}
	}
	reply, err := syncScript.Exec(context.Background(), x.l.conn, []string{wire.RWChannel(key)}, args).AsStrSlice()
	if err != nil {
		return nil, err
	}
	at, err := strconv.ParseInt(reply[0], 10, 64)
	if err != nil {
		return nil, err
	}
	x.took, x.at = at-x.at, at
	if x.took > ms(tooSlow) {
		return nil, errSlow
	}
	found := map[string]entry{}
	for i := 1; i < len(reply); i += 3 {
		left, err := strconv.ParseInt(reply[i+2], 10, 64)
		if err != nil {
			return nil, err
		}
		found[reply[i]] = entry{reply[i+1], left}
	}
	return found, nil
}

// reset empties the server.
func (x *walk) reset() error {
	if err := x.l.conn.Do(context.Background(), x.l.conn.B().Flushdb().Build()).Error(); err != nil {
		return err
	}
	_, err := x.sync(nil)
	if errors.Is(err, errSlow) { // it has counted from 1970
		err = nil
	}
	return err
}

// shrink leaves out steps for as long as some still fail.
func shrink(l *lab, ops []op, err error) ([]op, error) {
	java := slices.ContainsFunc(ops, func(o op) bool { return strings.HasPrefix(o.do, "java") })
	fails := func(ops []op) error {
		x := newWalk(l, java)
		if err := x.reset(); err != nil {
			return nil
		}
		for _, o := range ops {
			if err := x.step(o); errors.Is(err, errSlow) {
				return nil
			} else if err != nil {
				return err
			}
		}
		return nil
	}
	tries := 0
	for size := len(ops) / 2; size > 0; {
		smaller := false
		for at := 0; at+size <= len(ops) && tries < shrinkTries; {
			tries++
			rest := slices.Concat(ops[:at], ops[at+size:])
			if failure := fails(rest); failure != nil {
				ops, err, smaller = rest, failure, true
			} else {
				at += size
			}
		}
		if !smaller || size > 1 {
			size /= 2
		}
		if tries >= shrinkTries {
			break
		}
	}
	return ops, err
}
