package fairlock_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// The scripts do what the model does, in any order of steps.
func TestLockstep(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		lockstep.Test[step]{
			Steps: lockstep.Size(100_000), Length: 100, Kinds: stepKinds,
			Outcomes: []string{
				"acquired", "refused", "queued", "queued behind all",
				"free", "not held",
				"extended true", "extended false", "forced true", "forced false",
				"heartbeat true", "heartbeat false", "java acquires true", "java acquires false", "java releases <nil>", "java releases 0", "java releases 1",
				"published", "dead purged", "evicted", "restored", "forgotten", "patient", "far from the head",
				"confirmed [0 0]", "confirmed [1 0]", "confirmed [1 1]", "confirmed [1 2]",
			},
			Start: func(lane int) lockstep.Begin[step] {
				conn := lockstep.Connect(t, s.Addr, lane)
				sessions := map[int64]*session.Session{}
				for _, wait := range waits {
					sessions[wait] = newSession(t, conn, time.Duration(wait)*time.Millisecond)
				}
				return func(seed uint64, seen lockstep.Seen) lockstep.Walk[step] {
					return newWalk(t.Context(), conn, sessions, seed, seen)
				}
			},
		}.Run(t)
	})
}

// stepKinds are the kinds of steps.
var stepKinds = lockstep.Weights{
	{"acquire", 26}, {"acquire all", 8}, {"release", 20}, {"leave", 4},
	{"confirm", 24},
	{"heartbeat of all", 14}, {"heartbeat of some", 4}, {"extend", 4}, {"force", 1}, {"look", 2},
	{"renew claim", 4}, // a claim gets another id
	{"again", 7},       // the last request is delivered again
	{"time passes", 18}, {"java acquire", 16}, {"java release", 7}, {"java leave", 3},
	{"fault", 24}, // only of wild walks
}

// faults begin with the deletion of each key.
var faults = []string{
	"delete lock", "delete queue", "delete deadlines", "delete heartbeats", "delete order", "persist", "push", "remove",
}

// step is a step. Its numbers are drawn without regard to the state.
type step struct {
	lockstep.Kind
	lock  int
	who   int // a claim or a Java thread, or one of the next two
	to    int
	some  int // bits: which of several
	few   int // bits, hardly any
	once  bool
	lease int64
	time  int64
	fault string
}

const (
	theHolder = -1
	theFirst  = -2
)

const (
	claims  = 8 // on a lock
	threads = 3 // of Java, on a lock

	begin = 1_700_000_000_000
)

var (
	lockNames = []string{"orders", "{app}:stock"}
	waits     = []int64{300_000, 20_000, 5_000}
)

// walk is a model and the protocol.
type walk struct {
	ctx   context.Context
	conn  *lockstep.Client
	p     [2]*fairlock.Protocol // of lockNames
	model *model
	seen  lockstep.Seen
	wait  int64
	wild  bool // Java clients have wrong clocks and wait for long, and keys are deleted
	// The claims and the Java threads of each lock.
	claims     [][]*engine.Claim
	javas      [][]string
	generation int
	again      lockstep.Request // the last one

	// Of the last step, for the invariants.
	before  map[string]*lockModel
	gone    map[string]bool // owners that the step itself removes or moves
	foreign bool            // a Java client or a fault acts
}

func newWalk(ctx context.Context, conn *lockstep.Client, sessions map[int64]*session.Session, seed uint64, seen lockstep.Seen) *walk {
	x := &walk{ctx: ctx, conn: conn, seen: seen, wild: seed%3 == 0, wait: waits[seed/3%3]}
	for i, name := range lockNames {
		x.p[i] = fairlock.NewProtocol(sessions[x.wait], name)
	}
	x.model = newModel(lockNames...)
	x.model.wait, x.model.positionTTL = x.wait, x.p[0].PositionTTL().Milliseconds()
	x.model.now, x.model.seen = begin, seen
	for n := range lockNames {
		var all []*engine.Claim
		for i := range claims {
			all = append(all, x.newClaim(n, i))
		}
		var javas []string
		for i := range threads {
			javas = append(javas, fmt.Sprintf("%s:%d", javaID, 10*n+i))
		}
		x.claims, x.javas = append(x.claims, all), append(x.javas, javas)
	}
	conn.Reset(begin)
	return x
}

// Draw implements lockstep.Walk.
func (x *walk) Draw(r *rand.Rand) step {
	life := min(10_000, x.wait)
	times := []int64{0, 0, 1, 1, 7, 7, 100, 500, 500, 1000, life / 3, life / 3, life / 3, life - 1, life, life + 1, x.wait, 31_000, 61_000, 4 * x.wait}
	s := step{
		Kind: stepKinds.Only(func(kind lockstep.Kind) bool { return x.wild || kind != "fault" }).Draw(r),
		who:  r.IntN(claims), to: r.IntN(claims), some: r.IntN(1 << claims), few: r.IntN(1<<claims) & r.IntN(1<<claims) & r.IntN(1<<claims),
		once: r.IntN(5) == 0, lease: []int64{4_000, 30_000, 60_000}[r.IntN(3)],
		time: times[r.IntN(len(times))], fault: faults[r.IntN(len(faults))],
	}
	if r.IntN(6) == 0 {
		s.lock = 1
	}
	switch s.Kind {
	case "release", "confirm", "java release", "extend":
		if r.IntN(4) > 0 {
			s.who = theHolder
		}
	case "acquire", "java acquire", "leave":
		switch r.IntN(8) {
		case 0, 1:
			s.who = theFirst
		case 2:
			s.who = theHolder
		}
	case "fault":
		s.who = []int{theFirst, theHolder, s.who}[r.IntN(3)]
	}
	return s
}

// newClaim returns the i-th claim of the n-th lock, with a new id.
func (x *walk) newClaim(n, i int) *engine.Claim {
	x.generation++
	id, err := lock.NewOwner(clientID, uint64(1000*x.generation+10*n+i))
	lockstep.Check(err)
	return &engine.Claim{Key: lockNames[n], ID: id, Waits: true, Lease: lease}
}

// ownerOf returns the owner in a role, "" if there is none.
func (l *lockModel) ownerOf(who int) string {
	switch {
	case who == theHolder && !l.free():
		return slices.Min(slices.Collect(maps.Keys(l.counts)))
	case who == theFirst && len(l.queue) > 0:
		return l.queue[0]
	}
	return ""
}

// claimOf returns the index of the claim that a step is about, or otherwise if that is
// Java's.
func (x *walk) claimOf(n, who, otherwise int) int {
	if who >= 0 {
		return who
	}
	owner := x.model.locks[lockNames[n]].ownerOf(who)
	if i := slices.IndexFunc(x.claims[n], func(c *engine.Claim) bool { return c.ID.String() == owner }); i >= 0 {
		return i
	}
	return otherwise
}

func (x *walk) javaOf(n, who int) int {
	if who >= 0 {
		return who % threads
	}
	return max(0, slices.Index(x.javas[n], x.model.locks[lockNames[n]].ownerOf(who)))
}

// request returns what a step sends, nil if nothing.
func (x *walk) request(s step) lockstep.Request {
	name := lockNames[s.lock]
	m, l := x.model, x.model.locks[name]
	i := x.claimOf(s.lock, s.who, max(s.to, 0))
	c := *x.claims[s.lock][i]
	c.Lease = millis(s.lease)
	c.Waits = !s.once
	owner := c.ID.String()
	switch s.Kind {
	case "acquire", "acquire all":
		some := []*engine.Claim{&c}
		for i, other := range x.claims[s.lock] {
			if s.Kind == "acquire all" && s.some&(1<<i) != 0 && other.ID != c.ID {
				other := *other
				other.Lease = c.Lease
				some = append(some, &other)
			}
		}
		return func() (any, any, error) {
			for _, c := range some {
				x.leave(c.ID.String())
			}
			real, err := x.p[s.lock].AcquireAll(x.ctx, some)
			want := m.acquire(l, some)
			x.answered(want)
			return real, want, err
		}
	case "release":
		had, _ := x.cohort(s)
		return func() (any, any, error) {
			x.leave(append(had, owner)...)
			real, err := fairlock.ReleaseAfter(x.ctx, x.p[s.lock], &c, had)
			want := m.release(l, &c, had)
			x.seen.See(map[engine.ReleaseState]string{engine.Free: "free", engine.NotHeld: "not held"}[want.State])
			return real, want, err
		}
	case "confirm":
		had, waiting := x.cohort(s)
		return func() (any, any, error) {
			x.leave(had...)
			real, err := fairlock.ConfirmClaim(x.ctx, x.p[s.lock], &c, had, waiting)
			want := m.confirm(l, &c, had, waiting)
			x.seen.See("confirmed", want)
			return real, want, err
		}
	case "leave":
		return func() (any, any, error) {
			x.leave(owner)
			m.giveUp(l, owner)
			return nil, nil, x.p[s.lock].Leave(x.ctx, &c)
		}
	case "heartbeat of all", "heartbeat of some":
		return x.heartbeat(func(i int) bool { return s.Kind == "heartbeat of all" || s.some&(1<<i) != 0 })
	case "extend":
		return func() (any, any, error) {
			real, err := x.p[s.lock].Extend(x.ctx, &c, c.Lease)
			want := m.extend(l, &c)
			x.seen.See("extended", want)
			return real, want, err
		}
	case "force":
		return func() (any, any, error) {
			real, err := x.p[s.lock].Force(x.ctx)
			want := m.force(l)
			x.seen.See("forced", want)
			return real, want, err
		}
	case "look":
		return func() (any, any, error) {
			real, err := x.p[s.lock].Queue(x.ctx)
			return real, m.waiters(l), err
		}
	case "fault":
		return x.fault(s, l, owner)
	}
	return x.java(s, l)
}

// cohort returns a few claims that have had the lock, and the others, mostly in the order of
// the queue.
func (x *walk) cohort(s step) (had, waiting []string) {
	for i, c := range x.claims[s.lock] {
		if s.few&(1<<i) != 0 {
			had = append(had, c.ID.String())
		} else {
			waiting = append(waiting, c.ID.String())
		}
	}
	if queue := x.model.locks[lockNames[s.lock]].queue; !s.once {
		slices.SortStableFunc(waiting, func(a, b string) int {
			return cmp.Compare(uint(slices.Index(queue, a)), uint(slices.Index(queue, b)))
		})
	}
	return had, waiting
}

// leave records that the step may remove or move owners in the queue.
func (x *walk) leave(owners ...string) {
	for _, owner := range owners {
		x.gone[owner] = true
	}
}

// heartbeat is one of some claims of both locks, alternately.
func (x *walk) heartbeat(of func(i int) bool) lockstep.Request {
	var leases []watchdog.Subject
	owners := map[string][]string{}
	for i := range claims {
		for n, name := range lockNames {
			if of(i) {
				owner := x.claims[n][i].ID.String()
				leases = append(leases, watchdog.Subject{Key: name, Owner: owner})
				owners[name] = append(owners[name], owner)
			}
		}
	}
	if len(leases) == 0 {
		return nil
	}
	return func() (any, any, error) {
		renewed := x.p[0].HeartbeatRenewer().Renew(x.ctx, [][]watchdog.Subject{leases}, lease, true)[0]
		kept, want := map[string][]bool{}, make([]bool, len(leases))
		for _, name := range lockNames {
			kept[name] = x.model.heartbeat(x.model.locks[name], owners[name])
		}
		for i, l := range leases {
			want[i], kept[l.Key] = kept[l.Key][0], kept[l.Key][1:]
			x.seen.See("heartbeat", want[i])
		}
		return renewed.Held, want, renewed.Err
	}
}

func (x *walk) answered(answers []engine.Answer) {
	for _, a := range answers {
		switch {
		case a.Acquired:
			x.seen.See("acquired")
		case a.Requeued:
			x.seen.See("queued behind all")
		case a.Queued:
			x.seen.See("queued")
		default:
			x.seen.See("refused")
		}
	}
}

// java is a step of a Java client. Each thread has a wait of its own, and in a wild walk a
// clock of its own.
func (x *walk) java(s step, l *lockModel) lockstep.Request {
	m, i, name := x.model, x.javaOf(s.lock, s.who), l.name
	owner, wait, ahead := x.javas[s.lock][i], []int64{x.wait, min(7_000, x.wait), 1_000}[i], int64(0)
	if x.wild {
		wait = []int64{x.wait, 7_000, 20 * x.wait}[i]
		ahead = []int64{0, 60_000, -60_000}[i]
	}
	return func() (real, want any, err error) {
		x.foreign = true
		x.leave(owner)
		now := m.now + ahead
		var reply rueidis.RedisResult
		switch s.Kind {
		case "java acquire":
			reply = peerAcquire.Exec(x.ctx, x.conn, javaKeys(name),
				[]string{itoa(s.lease), owner, itoa(wait), itoa(now), wire.Flag(!s.once)})
			want = m.javaAcquire(l, owner, s.lease, wait, now, !s.once)
			x.seen.See("java acquires", want == nil)
		case "java release":
			reply = peerRelease.Exec(x.ctx, x.conn, javaKeys(name), []string{itoa(s.lease), owner, itoa(now), wire.LockChannel(name)})
			want = m.javaRelease(l, owner, s.lease, now)
			x.seen.See("java releases", want)
		default:
			reply = peerLeave.Exec(x.ctx, x.conn, javaKeys(name), []string{owner, itoa(wait)})
			m.javaLeave(l, owner, wait)
		}
		n, err := reply.AsInt64()
		if rueidis.IsRedisNil(err) {
			return nil, want, nil
		}
		return n, want, err
	}
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

func javaKeys(name string) []string {
	return []string{name, wire.FairQueue(name), wire.FairTimeouts(name)}
}

// fault changes the keys of a lock.
func (x *walk) fault(s step, l *lockModel, owner string) lockstep.Request {
	if s.fault == "push" {
		owner = x.javas[s.lock][x.javaOf(s.lock, s.who)]
		if slices.Contains(l.queue, owner) {
			return nil
		}
	}
	return func() (any, any, error) {
		x.foreign = true
		keys := keysOf(l.name)
		do := []string{"DEL", ""}
		switch s.fault {
		case "persist":
			do = []string{"PERSIST", l.name}
			l.ends[lockAt] = never
		case "push":
			do = []string{"RPUSH", keys[queueAt], owner}
			l.queue = append(l.queue, owner)
		case "remove":
			do = []string{"LREM", keys[queueAt], "0", owner}
			l.queue = slices.DeleteFunc(l.queue, func(other string) bool { return other == owner })
		default:
			key := slices.Index(faults, s.fault)
			do[1] = keys[key]
			l.drop(key)
		}
		l.tidy()
		return nil, nil, x.conn.Do(x.ctx, x.conn.B().Arbitrary(do...).Build()).Error()
	}
}

// Take implements lockstep.Walk.
func (x *walk) Take(s step) bool {
	x.before, x.gone, x.foreign = map[string]*lockModel{}, map[string]bool{}, false
	switch s.Kind {
	case "time passes":
		x.model.pass(s.time)
		x.conn.Wait(x.model.now)
	case "renew claim":
		x.claims[s.lock][max(s.who, 0)] = x.newClaim(s.lock, max(s.who, 0))
		return true
	default:
		if s.Kind != "again" {
			send := x.request(s)
			if send == nil {
				return false
			}
			x.again = send
		}
		if x.again == nil {
			return false
		}
		for name, l := range x.model.locks {
			x.before[name] = l.clone()
		}
		x.again.Send()
	}
	x.conn.Compare(x.model.state())
	x.promises()
	return true
}

func (l *lockModel) clone() *lockModel {
	c := *l
	c.counts, c.deadlines, c.alive, c.order = maps.Clone(l.counts), maps.Clone(l.deadlines), maps.Clone(l.alive), maps.Clone(l.order)
	c.queue = slices.Clone(l.queue)
	return &c
}

// promises fails the walk if the last step has broken a promise. It checks the model, which
// equals the server.
func (x *walk) promises() {
	now := x.model.now
	for name, before := range x.before {
		after := x.model.locks[name]
		if len(after.counts) > 1 && !x.wild {
			lockstep.Failf("%s has %d holders", name, len(after.counts))
		}
		// Only a request that reads the queue cleans up after Java.
		if !x.foreign && len(after.queue) == 0 && before.queueState() != after.queueState() && len(after.deadlines)+len(after.alive)+len(after.order) > 0 {
			lockstep.Failf("%s: an empty queue leaves keys", name)
		}
		for owner, deadline := range after.deadlines {
			if was := before.deadlines[owner]; strings.HasPrefix(owner, javaID) && !x.foreign && deadline < was {
				lockstep.Failf("%s: the deadline of %s is nearer", name, owner)
			}
		}
		if x.wild {
			continue
		}
		var order []string // of live waiters, and of ours while the lock is held
		held := !before.free() && !after.free()
		for _, owner := range before.queue {
			_, ours := before.alive[owner]
			if at, known := before.dies(owner); known && at > now || ours && held && !x.foreign {
				order = append(order, owner)
			}
		}
		for owner := range after.counts {
			if before.counts[owner] > 0 || held || len(order) == 0 {
				continue
			}
			at := slices.Index(before.queue, owner)
			if at < 0 || slices.Index(before.queue, order[0]) < at {
				lockstep.Failf("%s: %s has the lock, but %s was first", name, owner, order[0])
			}
		}
		rank := int64(0)
		for _, owner := range after.queue {
			if came, ours := after.order[owner]; ours && came <= rank {
				lockstep.Failf("%s: %s has overtaken one that came before it", name, owner)
			} else if ours {
				rank = came
			}
		}
		at := -1
		for _, owner := range order {
			n := slices.Index(after.queue, owner)
			_, ours := before.alive[owner]
			switch {
			case n < 0 && (x.gone[owner] || !ours && x.foreign):
			case n < 0:
				lockstep.Failf("%s: %s has lost its queue position", name, owner)
			case n <= at:
				lockstep.Failf("%s: %s has been overtaken", name, owner)
			case ours && before.alive[owner] > now && after.deadlines[owner] <= now:
				lockstep.Failf("%s: Java may evict %s, which is alive", name, owner)
			}
			at = max(at, n)
		}
	}
}

// queueState returns the queue as text.
func (l *lockModel) queueState() string {
	return fmt.Sprint(l.queue, l.deadlines, l.alive, l.order)
}

// End implements lockstep.Walk. It lets all owners die, and acquires and releases the lock.
// That must be possible and leave nothing.
func (x *walk) End() {
	for n, name := range lockNames {
		c := x.newClaim(n, 0)
		x.claims[n][0] = c
		l := x.model.locks[name]
		if l.ends[lockAt] == never {
			x.Take(step{Kind: "force", lock: n})
		}
		for tries := 0; ; tries++ {
			x.Take(step{Kind: "acquire", lock: n, lease: 30_000})
			if l.counts[c.ID.String()] > 0 {
				break
			}
			pass := int64(3_000)
			if tries > 30 && tries%2 == 0 { // a Java client that has died wanted to wait for long
				pass = x.wait
			}
			if tries > 300 {
				lockstep.Failf("the lock cannot be acquired")
			}
			x.Take(step{Kind: "time passes", time: pass})
		}
		x.Take(step{Kind: "release", lock: n})
		if len(l.queue)+len(l.alive)+len(l.deadlines)+len(l.order)+len(l.counts) > 0 {
			lockstep.Failf("%v is left, and %v", l.counts, l.queueState())
		}
	}
}
