package fairlock_test

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

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
	//go:embed testdata/java_leave.lua
	javaLeaveLua string

	dumpScript        = wire.NewScript(virtualLua + dumpLua)
	harmScript        = wire.NewScript(virtualLua + harmLua)
	javaAcquireScript = wire.NewScript(virtualLua + javaAcquireLua)
	javaReleaseScript = wire.NewScript(virtualLua + javaReleaseLua)
	javaLeaveScript   = wire.NewScript(virtualLua + javaLeaveLua)
)

// What can happen. The numbers of a step are drawn without knowing the state it
// will meet, so that a sequence means something with any of its steps left out.
type deed int

const (
	acquireOne deed = iota
	acquireAll
	release
	undo
	handOff
	leave
	beatAll
	beatSome
	extend
	force
	lookAtQueue
	renewClaim // whoever had it goes on under a new one
	repeat     // the last request is delivered again
	pass
	javaAcquire
	javaRelease
	javaLeave
	harm
	deeds
)

var deedNames = [deeds]string{
	"acquire", "acquire for several", "release", "undo", "hand off", "leave", "beat for all", "beat for some", "extend",
	"force", "look at the queue", "new claim", "again", "time passes", "Java acquires", "Java releases", "Java leaves", "harm",
}

// step is a deed and what was drawn for it.
type step struct {
	deed   deed
	lock   int
	who    int // a claim or a Java thread, or one of the next two
	to     int
	some   int // bits: which of several
	once   bool
	lease  int64
	time   int64
	amount int // which kind of harm
}

const (
	theHolder = -1
	theFirst  = -2
)

func (s step) String() string {
	who := func(n int) string {
		switch n {
		case theHolder:
			return "the holder"
		case theFirst:
			return "the first"
		}
		return fmt.Sprint("#", n)
	}
	text := fmt.Sprintf("%s, lock %d", deedNames[s.deed], s.lock)
	switch s.deed {
	case pass:
		return fmt.Sprintf("%s: %d ms", deedNames[s.deed], s.time)
	case acquireOne:
		return fmt.Sprintf("%s: %s, once %t, lease %d", text, who(s.who), s.once, s.lease)
	case acquireAll, beatSome:
		return fmt.Sprintf("%s: %b, lease %d", text, s.some, s.lease)
	case handOff:
		return fmt.Sprintf("%s: %s to %s, lease %d", text, who(s.who), who(s.to), s.lease)
	case harm:
		return fmt.Sprintf("%s: %s with %s", text, harms[s.amount], who(s.who))
	}
	return fmt.Sprintf("%s: %s, lease %d, once %t", text, who(s.who), s.lease, s.once)
}

const (
	unnamed = 6 // claims of a lock with an owner of their own, the first so many
	named   = 4 // and behind them those with two owners
	threads = 3 // of Java, on a lock
)

// harms are what harm.lua can do.
var harms = []string{"1", "2", "3", "4", "persist", "push", "take out", "twice"}

// rules are how wild a sequence is: Java clients with clocks that are wrong and long
// waits, and somebody who deletes keys, or not.
type rules struct {
	wild      bool
	reentrant bool
	wait      int64
}

func rulesOf(seed uint64) rules {
	return rules{wild: seed%3 == 0, reentrant: seed%5 != 0, wait: []int64{300_000, 20_000, 5_000}[seed/3%3]}
}

// draw returns a sequence of steps.
func draw(seed uint64, n int) []step {
	rng := rand.New(rand.NewPCG(seed, seed))
	r := rulesOf(seed)
	weights := [deeds]int{
		acquireOne: 26, acquireAll: 8, release: 8, undo: 3, handOff: 9, leave: 4, beatAll: 14, beatSome: 4, extend: 2,
		force: 1, lookAtQueue: 2, renewClaim: 2, repeat: 7, pass: 18, javaAcquire: 16, javaRelease: 7, javaLeave: 3,
	}
	if r.wild {
		weights[harm] = 4
	}
	total := 0
	for _, w := range weights {
		total += w
	}
	life := min(10_000, r.wait)
	times := []int64{0, 1, 7, 500, 500, life / 3, life / 3, life / 3, life - 1, life, life + 1, r.wait, 31_000, 61_000, 4 * r.wait}
	steps := make([]step, n)
	for i := range steps {
		s := step{
			who: rng.IntN(unnamed + named), to: rng.IntN(unnamed), some: rng.IntN(1 << (unnamed + named)),
			once: rng.IntN(5) == 0, lease: []int64{4_000, 30_000, 60_000}[rng.IntN(3)],
			time: times[rng.IntN(len(times))], amount: rng.IntN(len(harms)),
		}
		for pick := rng.IntN(total); pick >= weights[s.deed]; s.deed++ {
			pick -= weights[s.deed]
		}
		if rng.IntN(6) == 0 {
			s.lock = 1
		}
		switch {
		case s.deed == release || s.deed == handOff || s.deed == javaRelease || s.deed == extend:
			if rng.IntN(4) > 0 {
				s.who = theHolder
			}
		case s.deed == acquireOne || s.deed == javaAcquire || s.deed == leave:
			if rng.IntN(3) == 0 {
				s.who = theFirst
			}
		case s.deed == harm && rng.IntN(2) == 0:
			s.who = theFirst
		}
		if s.deed == handOff && rng.IntN(3) > 0 {
			s.to = theFirst
		}
		steps[i] = s
	}
	return steps
}

// lockstep is the model and the real thing, side by side.
type lockstep struct {
	rules
	ctx   context.Context
	conn  rueidis.Client
	p     *fairlock.Protocol
	model *model
	names []string
	// Of each lock, its claims and Java's threads.
	claims      [][]*locking.Claim
	javas       [][]string
	generation  int
	again       func() (real, want string) // the last request
	expectation                            // of what the next step may change
}

// expectation is what the invariants are checked against.
type expectation struct {
	before map[string]*lockModel
	// gone are the owners that the step takes out or moves itself.
	gone   map[string]bool
	javaly bool // it is Java who acts
}

// locksteps returns what plays a sequence by its seed.
func locksteps(t *testing.T, s *testserver.Server) func(seed uint64) *lockstep {
	conn := harness.Conn(t, s.Addr)
	sessions := map[int64]*session.Session{}
	return func(seed uint64) *lockstep {
		l := &lockstep{rules: rulesOf(seed), ctx: t.Context(), conn: conn}
		if sessions[l.wait] == nil {
			sessions[l.wait] = newSession(t, conn, time.Duration(l.wait)*time.Millisecond)
		}
		var opts []fairlock.Option
		if !l.reentrant {
			opts = append(opts, fairlock.NonReentrant())
		}
		l.p = fairlock.NewProtocol(sessions[l.wait], opts...)
		return l
	}
}

const begin = 1_700_000_000_000

// reset begins a sequence.
func (l *lockstep) reset() {
	l.names = []string{"orders", "{app}:stock"}
	l.model = newModel(l.names...)
	l.model.wait, l.model.life = l.wait, l.p.PlaceTime().Milliseconds()
	l.model.latch = locking.LatchLife.Milliseconds()
	l.model.now = begin
	l.claims, l.javas, l.generation, l.again = nil, nil, 0, nil
	for n := range l.names {
		var claims []*locking.Claim
		for i := range unnamed + named {
			claims = append(claims, l.newClaim(n, i))
		}
		var javas []string
		for i := range threads {
			javas = append(javas, fmt.Sprintf("%s:%d", javaID, 10*n+i))
		}
		l.claims, l.javas = append(l.claims, claims), append(l.javas, javas)
	}
	must(l.conn.Do(l.ctx, l.conn.B().Flushall().Build()).Error())
	l.setClock()
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func (l *lockstep) setClock() {
	must(l.conn.Do(l.ctx, l.conn.B().Set().Key("test:clock").Value(strconv.FormatInt(l.model.now, 10)).Build()).Error())
}

// newClaim returns the i-th of the n-th lock, with an identity it has not had.
func (l *lockstep) newClaim(n, i int) *locking.Claim {
	l.generation++
	c := &locking.Claim{Key: l.names[n], Waits: true, Lease: lease}
	number := 1000*l.generation + 10*n + i
	if i >= unnamed {
		number = 10*n + (i-unnamed)/2
		c.Ticket = fmt.Sprintf("ticket-%d", l.generation)
	}
	var err error
	c.Owner, err = lock.NewOwner(clientID, uint64(number))
	must(err)
	return c
}

// claimOf returns whom a step means, and its number: -1 if it is none of ours.
func (l *lockstep) claimOf(n, who, otherwise int) int {
	m := l.model.locks[l.names[n]]
	owner := ""
	switch {
	case who == theHolder && !m.free():
		owner = slices.Collect(maps.Keys(m.counts))[0]
	case who == theFirst && len(m.queue) > 0:
		owner = m.queue[0]
	case who >= 0:
		return who
	}
	for i, c := range l.claims[n] {
		if c.Owner.String() == owner {
			return i
		}
	}
	return otherwise
}

func (l *lockstep) javaOf(n, who int) int {
	m := l.model.locks[l.names[n]]
	owner := ""
	switch {
	case who == theHolder && !m.free():
		owner = slices.Collect(maps.Keys(m.counts))[0]
	case who == theFirst && len(m.queue) > 0:
		owner = m.queue[0]
	case who >= 0:
		return who % threads
	}
	return max(0, slices.Index(l.javas[n], owner))
}

// javaWait is how long a Java thread is ready to wait: each has its own.
func (l *lockstep) javaWait(i int) int64 {
	wait := []int64{l.wait, min(7_000, l.wait), 1_000}[i]
	if l.wild {
		wait = []int64{l.wait, 7_000, 20 * l.wait}[i]
	}
	return wait
}

// javaNow is the clock of a Java client.
func (l *lockstep) javaNow(i int) int64 {
	if l.wild {
		return l.model.now + []int64{0, 60_000, -60_000}[i]
	}
	return l.model.now
}

func (l *lockstep) modelOf(c locking.Claim) claimModel {
	m := claimModel{owner: c.Owner.String(), lease: c.Lease.Milliseconds(), waits: c.Waits, any: c.AnyHold}
	if c.Named() {
		m.ticket = wire.UnlockLatch(c.Key, c.Ticket)
	}
	return m
}

func fromAnswer(a locking.Answer) said {
	return said{a.Acquired, a.Reentered, a.Placed, a.Moved, a.FreeIn.Milliseconds()}
}

func fromReleased(r locking.Released) string {
	switch r.State {
	case locking.NotHeld:
		return notHeld
	case locking.StillHeld:
		return stillHeld
	case locking.Shared:
		return shared
	default:
		return freed(r.Told)
	}
}

func result(v any, err error) string {
	if err != nil {
		return "error: " + err.Error()
	}
	return fmt.Sprint(v)
}

// request returns what a step sends, as something that can be repeated: it tells
// the replies of the server and of the model.
func (l *lockstep) request(s step) func() (real, want string) {
	name := l.names[s.lock]
	m, ml := l.model, l.model.locks[name]
	i := l.claimOf(s.lock, s.who, max(s.to, 0))
	c := *l.claims[s.lock][i]
	c.Lease = time.Duration(s.lease) * time.Millisecond
	c.Waits = !s.once
	switch s.deed {
	case acquireOne:
		return func() (string, string) {
			l.gone[c.Owner.String()] = true
			real, err := l.p.Acquire(l.ctx, &c)
			if c.Named() {
				return result(fromAnswer(real), err), fmt.Sprint(m.acquireNamed(ml, l.modelOf(c), l.reentrant))
			}
			return result(fromAnswer(real), err), fmt.Sprint(m.acquire(ml, []claimModel{l.modelOf(c)})[0])
		}
	case acquireAll:
		var claims []*locking.Claim
		var models []claimModel
		for i := range unnamed {
			if s.some&(1<<i) != 0 {
				c := *l.claims[s.lock][i]
				c.Lease = time.Duration(s.lease) * time.Millisecond
				claims, models = append(claims, &c), append(models, l.modelOf(c))
			}
		}
		if len(claims) == 0 {
			return nil
		}
		return func() (string, string) {
			for _, c := range claims {
				l.gone[c.Owner.String()] = true
			}
			answers, err := l.p.AcquireAll(l.ctx, claims)
			real := make([]said, len(answers))
			for i := range answers {
				real[i] = fromAnswer(answers[i])
			}
			return result(real, err), fmt.Sprint(m.acquire(ml, models))
		}
	case release, undo:
		c.AnyHold = c.Named() && s.once
		if c.AnyHold {
			l.generation++
			c.Ticket = fmt.Sprintf("ticket-%d", l.generation)
		}
		return func() (string, string) {
			l.gone[c.Owner.String()] = !c.Named()
			real, err := l.p.Release(l.ctx, &c, s.deed == undo)
			if c.Named() {
				return result(fromReleased(real), err), m.releaseNamed(ml, l.modelOf(c), s.deed == undo)
			}
			return result(fromReleased(real), err), m.release(ml, l.modelOf(c))
		}
	case handOff:
		j := l.claimOf(s.lock, s.to, 0)
		to := *l.claims[s.lock][j]
		if c.Named() || to.Named() || i == j {
			return nil
		}
		to.Lease = c.Lease
		return func() (string, string) {
			l.gone[to.Owner.String()] = true
			passed, err := l.p.HandOff(l.ctx, &c, []*locking.Claim{&to})
			real := fromReleased(passed.Released)
			if passed.Acquired {
				real = passedOn
			}
			return result(real, err), m.handOff(ml, l.modelOf(c), l.modelOf(to))
		}
	case leave:
		return func() (string, string) {
			l.gone[c.Owner.String()] = true
			err := l.p.Leave(l.ctx, &c)
			m.giveUp(ml, c.Owner.String())
			return result("left", err), "left"
		}
	case beatAll, beatSome:
		var leases []*watchdog.Lease
		of := map[int][]string{}
		var which []int // lock of each lease
		for i := range unnamed + named {
			for n := range l.names {
				if s.deed == beatAll || s.some&(1<<i) != 0 {
					owner := l.claims[n][i].Owner.String()
					leases = append(leases, &watchdog.Lease{Key: l.names[n], Owner: owner})
					of[n], which = append(of[n], owner), append(which, n)
				}
			}
		}
		if len(leases) == 0 {
			return nil
		}
		return func() (string, string) {
			renewed := l.p.PlaceKeeper().Renew(l.ctx, [][]*watchdog.Lease{leases}, lease, true)[0]
			said, want := map[int][]bool{}, make([]bool, len(leases))
			for n, name := range l.names {
				if len(of[n]) > 0 {
					said[n] = m.beat(m.locks[name], of[n])
				}
			}
			for i, n := range which {
				want[i], said[n] = said[n][0], said[n][1:]
			}
			return result(renewed.Held, renewed.Err), fmt.Sprint(want)
		}
	case extend:
		return func() (string, string) {
			real, err := l.p.Extend(l.ctx, &c, c.Lease)
			return result(real, err), fmt.Sprint(m.extend(ml, l.modelOf(c), s.lease))
		}
	case force:
		return func() (string, string) {
			real, err := l.p.Force(l.ctx, name)
			return result(real, err), fmt.Sprint(m.force(ml))
		}
	case lookAtQueue:
		return func() (string, string) {
			waiters, err := l.p.Queue(l.ctx, name)
			var b strings.Builder
			for _, w := range waiters {
				fmt.Fprintf(&b, "%s until %d, ", w.Owner, w.Deadline.UnixMilli())
			}
			return result(b.String(), err), m.waiters(ml)
		}
	case javaAcquire, javaRelease, javaLeave:
		return l.javaRequest(s, name, ml)
	case harm:
		return l.harmRequest(s, name, ml)
	}
	return nil
}

func (l *lockstep) javaRequest(s step, name string, ml *lockModel) func() (string, string) {
	m := l.model
	i := l.javaOf(s.lock, s.who)
	owner, wait := l.javas[s.lock][i], l.javaWait(i)
	leaseMs := strconv.FormatInt(s.lease, 10)
	return func() (string, string) {
		l.javaly = true
		l.gone[owner] = true
		now := l.javaNow(i)
		switch s.deed {
		case javaAcquire:
			waits := "1"
			if s.once {
				waits = "0"
			}
			real := javaAcquireScript.Exec(l.ctx, l.conn, javaKeys(name), []string{leaseMs, owner, fmt.Sprint(wait), fmt.Sprint(now), waits})
			return plain(real, "acquired"), m.javaAcquire(ml, owner, s.lease, wait, now, !s.once)
		case javaRelease:
			real := javaReleaseScript.Exec(l.ctx, l.conn, javaKeys(name), []string{leaseMs, owner, fmt.Sprint(now), wire.LockChannel(name)})
			return plain(real, "nil"), m.javaRelease(ml, owner, s.lease, now)
		default:
			real := javaLeaveScript.Exec(l.ctx, l.conn, javaKeys(name), []string{owner, fmt.Sprint(wait)})
			m.javaLeave(ml, owner, wait)
			return plain(real, "left"), "left"
		}
	}
}

func javaKeys(name string) []string {
	return []string{name, wire.FairQueue(name), wire.FairTimeouts(name)}
}

// plain returns a reply as text, and what nil stands for.
func plain(reply rueidis.RedisResult, null string) string {
	n, err := reply.AsInt64()
	if rueidis.IsRedisNil(err) {
		return null
	}
	return result(n, err)
}

func (l *lockstep) harmRequest(s step, name string, ml *lockModel) func() (string, string) {
	what, owner := harms[s.amount], l.claims[s.lock][l.claimOf(s.lock, s.who, max(s.to, 0))].Owner.String()
	switch what {
	case "push":
		owner = l.javas[s.lock][l.javaOf(s.lock, s.who)]
		if slices.Contains(ml.queue, owner) {
			return nil
		}
	case "twice":
		if ml.counts[owner] == 0 {
			return nil
		}
	}
	return func() (string, string) {
		l.javaly = true
		real := harmScript.Exec(l.ctx, l.conn, append(javaKeys(name), wire.FairAlive(name)), []string{what, owner, strconv.FormatInt(s.lease, 10)})
		switch what {
		case "1":
			clear(ml.counts)
		case "2":
			ml.queue = nil
		case "3":
			clear(ml.deadlines)
		case "4":
			clear(ml.alive)
		case "persist":
			ml.ends = never
		case "push":
			ml.queue = append(ml.queue, owner)
		case "take out":
			ml.queue = slices.DeleteFunc(ml.queue, func(other string) bool { return other == owner })
		case "twice":
			if ml.counts[owner] > 0 { // also when it is repeated
				ml.counts[owner] = 2
			} else {
				ml.counts = map[string]int{owner: 2}
			}
			ml.ends = l.model.now + s.lease
		}
		ml.tidy()
		return plain(real, "done"), "done"
	}
}

// play does a step on both sides and returns what is wrong then, "" if nothing is.
func (l *lockstep) play(s step) string {
	l.expectation = expectation{before: map[string]*lockModel{}, gone: map[string]bool{}}
	switch s.deed {
	case pass:
		l.model.pass(s.time)
		l.setClock()
	case renewClaim:
		l.claims[s.lock][max(s.who, 0)] = l.newClaim(s.lock, max(s.who, 0))
		return ""
	default:
		do := l.again
		if s.deed != repeat {
			do = l.request(s)
		}
		if do == nil {
			return ""
		}
		l.again = do
		for name, ml := range l.model.locks {
			l.before[name] = ml.clone()
		}
		if real, want := do(); real != want {
			return fmt.Sprintf("the server says:\n\t%s\nthe model:\n\t%s", real, want)
		}
	}
	real, err := dumpScript.Exec(l.ctx, l.conn, nil, nil).ToString()
	must(err)
	if want := l.model.dump(); real != want {
		return fmt.Sprintf("at %d the server has:\n%s\nthe model:\n%s", l.model.now, indent(real), indent(want))
	}
	return l.broken()
}

func indent(s string) string { return "\t" + strings.ReplaceAll(s, "\n", "\n\t") }

func (l *lockModel) clone() *lockModel {
	c := *l
	c.counts, c.deadlines, c.alive = maps.Clone(l.counts), maps.Clone(l.deadlines), maps.Clone(l.alive)
	c.queue = slices.Clone(l.queue)
	return &c
}

// broken returns which promise the last step has broken, "" if none. What the
// server has is what the model has, so the model is looked at.
func (l *lockstep) broken() string {
	now := l.model.now
	for name, before := range l.before {
		after := l.model.locks[name]
		if len(after.counts) > 1 && !l.wild {
			return fmt.Sprintf("%s has %d holders", name, len(after.counts))
		}
		// What Java's clients have left is not for those who do not look at the queue.
		if !l.javaly && len(after.queue) == 0 && before.places() != after.places() && len(after.deadlines)+len(after.alive) > 0 {
			return fmt.Sprintf("%s: an empty queue leaves keys", name)
		}
		for owner, deadline := range after.deadlines {
			_, ours := after.alive[owner]
			_, wasOurs := before.alive[owner]
			if was, there := before.deadlines[owner]; there && !ours && !wasOurs && !l.javaly && deadline < min(was, now+l.wait) {
				return fmt.Sprintf("%s: %s is nearer to its eviction than it need be", name, owner)
			}
		}
		if l.wild {
			continue
		}
		live := func(owner string) bool { at, known := before.dies(owner); return known && at > now }
		var order []string // of live waiters
		for _, owner := range before.queue {
			if live(owner) {
				order = append(order, owner)
			}
		}
		for owner := range after.counts {
			if before.counts[owner] == 0 && len(order) > 0 && order[0] != owner {
				return fmt.Sprintf("%s: %s has the lock, but %s was first", name, owner, order[0])
			}
		}
		at := -1
		for _, owner := range order {
			n := slices.Index(after.queue, owner)
			_, ours := before.alive[owner]
			switch {
			case n < 0 && (l.gone[owner] || !ours && l.javaly):
			case n < 0:
				return fmt.Sprintf("%s: %s has lost its place", name, owner)
			case n <= at:
				return fmt.Sprintf("%s: %s has been overtaken", name, owner)
			case ours && after.deadlines[owner] <= now:
				return fmt.Sprintf("%s: Java may evict %s, which is alive", name, owner)
			}
			at = max(at, n)
		}
	}
	return ""
}

// places is the queue as text.
func (l *lockModel) places() string {
	return fmt.Sprint(l.queue, pairs(l.deadlines), pairs(l.alive))
}

// drained lets everybody die and takes the lock as the next one would: it must come
// to that, and nothing be left.
func (l *lockstep) drained() string {
	for n := range l.names {
		l.generation++
		c := l.newClaim(n, 0)
		l.claims[n][0] = c
		if l.model.locks[l.names[n]].ends == never {
			if what := l.play(step{deed: force, lock: n}); what != "" {
				return what
			}
		}
		for tries := 0; ; tries++ {
			if what := l.play(step{deed: acquireOne, lock: n, lease: 30_000}); what != "" {
				return what
			}
			if l.model.locks[l.names[n]].counts[c.Owner.String()] > 0 {
				break
			}
			time := int64(3_000)
			switch {
			case tries > 300:
				return "the lock is not to be had"
			case tries > 30: // a Java client that has died wanted to wait for long
				time = l.wait
			}
			if what := l.play(step{deed: pass, time: time}); what != "" {
				return what
			}
		}
		if what := l.play(step{deed: release, lock: n}); what != "" {
			return what
		}
		if left := l.model.locks[l.names[n]]; len(left.queue)+len(left.alive)+len(left.deadlines)+len(left.counts) > 0 {
			return fmt.Sprint("something is left: ", left.counts, left.places())
		}
	}
	return ""
}

// run plays a sequence and returns which step went wrong and how, "" if none.
func (l *lockstep) run(steps []step) (at int, what string) {
	l.reset()
	for i, s := range steps {
		if what := l.play(s); what != "" {
			return i, what
		}
	}
	return len(steps), l.drained()
}

// shrink returns a sequence with fewer steps that goes wrong too.
func (l *lockstep) shrink(steps []step) []step {
	at, _ := l.run(steps)
	steps = steps[:min(at+1, len(steps))]
	for size := len(steps) / 2; size > 0; {
		shorter := false
		for from := 0; from < len(steps); {
			rest := slices.Delete(slices.Clone(steps), from, min(from+size, len(steps)))
			if at, what := l.run(rest); what != "" {
				steps, shorter = rest[:min(at+1, len(rest))], true
			} else {
				from += size
			}
		}
		if !shorter || size > 1 {
			size /= 2
		}
	}
	return steps
}

const sequence = 250 // steps

// settings are what the environment asks for.
func settings(t *testing.T) (seed uint64, steps int) {
	seed, steps = uint64(time.Now().UnixMilli()), 100_000
	var err error
	if s := os.Getenv("REDLATCH_MODEL_SEED"); s != "" {
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	if s := os.Getenv("REDLATCH_MODEL_STEPS"); s != "" {
		steps, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	return seed, steps
}

// The scripts do what a model of them does, whatever happens in whatever order:
// random sequences are played on both, and compared after every step.
// REDLATCH_MODEL_SEED repeats a sequence, REDLATCH_MODEL_STEPS plays more.
func TestScriptsAreInStepWithTheModel(t *testing.T) {
	defer fairlock.Preceded(virtualLua)()
	first, steps := settings(t)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Logf("seed %d", first)
		of := locksteps(t, s)
		for n := range uint64(max(1, steps/sequence)) {
			seed := first + n
			l := of(seed)
			all := draw(seed, sequence)
			if _, what := l.run(all); what == "" {
				continue
			}
			short := l.shrink(all)
			_, what := l.run(short)
			var b strings.Builder
			for i, s := range short {
				fmt.Fprintf(&b, "%3d  %v\n", i, s)
			}
			require.Failf(t, "the scripts and the model disagree", "REDLATCH_MODEL_SEED=%d, %+v, after\n%s%s", seed, l.rules, b.String(), what)
		}
	})
}
