package grouplock_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redlatch/redlatch/grouplock"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	clientID = "11111111-2222-3333-4444-555555555555"
	key      = "seats"
)

// The scripts do what the model does, in any order of steps, and no claim loses a value before its lease is over.
func TestLockstep(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		lockstep.Test[step]{
			Steps: lockstep.Size(60_000), Length: 60, Kinds: stepKinds,
			Outcomes: []string{
				"acquired", "acquired again", "refused", "dead owners", "released 0", "released 2", "released in part", "extended true", "extended false",
				"renewed true", "renewed false", "moved 0", "moved 1", "moved 2", "forced true", "forced false",
			},
			Start: func(worker int) lockstep.Begin[step] {
				conn := lockstep.Connect(t, s.Addr, worker)
				sess := session.New(session.Config{
					Client: conn, ID: clientID, WatchdogTimeout: 30 * time.Second, MapName: func(name string) string { return name },
				})
				t.Cleanup(sess.Close)
				return func(_ uint64, seen lockstep.Seen) lockstep.Walk[step] { return newWalk(t, conn, sess, seen) }
			},
		}.Run(t)
	})
}

// stepKinds are the kinds of steps.
var stepKinds = lockstep.Weights{
	{"acquire", 30}, {"release", 20}, {"extend", 4}, {"renew", 6}, {"transfer", 5}, {"status", 5}, {"force", 2},
	{"again", 6}, // the last request is delivered again
	{"time passes", 12}, {"java locks", 5}, {"java unlocks", 4},
}

// lease is what an owner has of a value.
type lease struct {
	ends  int64
	count int
}

// world is the model of a group. Times are in ms.
type world struct {
	now    int64
	owners map[string]string           // by value
	leases map[string]map[string]lease // by value and owner
	until  int64                       // when the key expires
	told   []string
}

func (w *world) left(value, owner string) int64 { return max(w.leases[value][owner].ends-w.now, 0) }

func (w *world) stands(claim string, values []string) bool {
	return !slices.ContainsFunc(values, func(v string) bool { return w.owners[v] != claim || w.left(v, claim) == 0 })
}

func (w *world) give(claim string, values []string, ms int64) {
	for _, v := range values {
		if w.leases[v] == nil {
			w.leases[v] = map[string]lease{}
		}
		w.owners[v] = claim
		w.leases[v][claim] = lease{max(w.leases[v][claim].ends, w.now+ms), 1}
	}
	w.until = max(w.until, w.now+ms)
}

// drop reports whether the owner had the value.
func (w *world) drop(value, owner string) bool {
	delete(w.leases[value], owner)
	if w.owners[value] != owner {
		return false
	}
	delete(w.owners, value)
	return true
}

func (w *world) publish() {
	for _, payload := range []string{"0", "1"} {
		w.told = append(w.told, "redisson_lock__channel:{seats} "+payload)
	}
}

// content is the hash.
func (w *world) content() (fields []string) {
	for v, owner := range w.owners {
		fields = append(fields, v, owner)
	}
	for v, leases := range w.leases {
		for owner, l := range leases {
			fields = append(fields, v+":"+owner+":expire_time", strconv.FormatInt(l.ends, 10), v+":"+owner+":lock_count", strconv.Itoa(l.count))
		}
	}
	return fields
}

func (w *world) pass(ms int64) {
	w.now += ms
	if w.until < w.now {
		w.clear()
	}
}

func (w *world) clear() {
	w.owners, w.leases, w.until = map[string]string{}, map[string]map[string]lease{}, 0
}

func (w *world) state() (s lockstep.State) {
	if len(w.content()) == 0 {
		w.clear()
	}
	s.Put(key, "hash", w.until, w.content()...)
	s.Told, w.told = w.told, nil
	return s
}

// slot makes claims to a lock, one after the other.
type slot struct {
	p      grouplock.Protocol
	values []string
	claim  *engine.Claim
	// until when the claim is promised to stand
	promise int64
}

// walk is a model and protocols of several sets of values.
type walk struct {
	t     *testing.T
	conn  *lockstep.Client
	w     *world
	slots []*slot
	ids   uint64
	last  lockstep.Request
	seen  lockstep.Seen
}

func newWalk(t *testing.T, conn *lockstep.Client, sess *session.Session, seen lockstep.Seen) *walk {
	x := &walk{t: t, conn: conn, w: &world{now: 1_700_000_000_000}, seen: seen}
	x.w.clear()
	conn.Reset(x.w.now)
	for _, set := range []string{"a", "a b", "b c", "a b c", "d"} {
		var values []string
		for v := range strings.FieldsSeq(set) {
			values = append(values, grouplock.FieldOf(v))
		}
		for range 2 {
			s := &slot{p: grouplock.NewProtocol(sess, values), values: values}
			s.claim = &engine.Claim{Key: key, ID: x.fresh(), Lease: time.Second}
			x.slots = append(x.slots, s)
		}
	}
	return x
}

func (x *walk) fresh() lock.Owner {
	x.ids++
	o, err := lock.NewOwner(clientID, x.ids)
	lockstep.Check(err)
	return o
}

// step is a step. What it does depends on the state that it meets.
type step struct {
	lockstep.Kind
	slots []int
	lease time.Duration // also how much time passes
}

// Draw implements lockstep.Walk. It mostly prefers slots with a claim that stands.
func (x *walk) Draw(r *rand.Rand) step {
	s := step{Kind: stepKinds.Draw(r), lease: time.Duration(1+r.IntN(30)) * time.Second}
	anySlot := s.Kind == "acquire" || s.Kind == "again" || r.IntN(3) == 0
	for range 3 {
		n := r.IntN(len(x.slots))
		for tries := 0; tries < 10 && !anySlot && x.slots[n].promise <= x.w.now; tries++ {
			n = r.IntN(len(x.slots))
		}
		s.slots = append(s.slots, n)
	}
	return s
}

// End implements lockstep.Walk.
func (x *walk) End() {}

// Take implements lockstep.Walk.
func (x *walk) Take(s step) bool {
	first := x.slots[s.slots[0]]
	switch s.Kind {
	case "time passes":
		x.w.pass(s.lease.Milliseconds() / 2)
		x.conn.Wait(x.w.now)
		x.conn.Compare(x.w.state())
		return true
	case "again":
		if x.last == nil {
			return false
		}
	case "renew":
		x.last = x.renew(s)
	default:
		x.last = x.request(s.Kind, first, s.lease)
	}
	x.last.Send()
	x.conn.Compare(x.w.state())
	for n, s := range x.slots {
		if s.promise > x.w.now && !(x.w.stands(s.claim.ID.String(), s.values) && x.w.until >= s.promise) {
			lockstep.Failf("the claim of slot %d is gone", n)
		}
	}
	return true
}

// java has the owner of Java and the values that it locks.
var java = struct {
	owner  string
	values []string
}{"99999999-2222-3333-4444-555555555555:1", []string{grouplock.FieldOf("b"), grouplock.FieldOf("c")}}

// request returns what a step sends.
func (x *walk) request(kind lockstep.Kind, s *slot, d time.Duration) lockstep.Request {
	ctx, w, ms := context.Background(), x.w, d.Milliseconds()
	if kind == "acquire" && s.promise <= w.now {
		s.claim = &engine.Claim{Key: key, ID: x.fresh(), Lease: d}
	}
	c := s.claim
	id := c.ID.String()
	switch kind {
	case "acquire":
		return func() (any, any, error) {
			real, err := s.p.Acquire(ctx, c)
			return real, x.acquire(s, c), err
		}
	case "release":
		return func() (any, any, error) {
			real, err := s.p.Release(ctx, c)
			stood, had := w.stands(id, s.values), 0
			for _, v := range s.values {
				if w.drop(v, id) {
					had++
				}
			}
			if had > 0 {
				w.publish()
			}
			if had > 0 && had < len(s.values) {
				x.seen.See("released in part")
			}
			want := engine.Release{}
			if stood {
				want = engine.ReleasedBy(int64(engine.Free)+lockstep.Subscribers, false)
			}
			x.seen.See("released", int(want.State))
			s.promise = min(s.promise, w.now)
			return real, want, err
		}
	case "extend":
		return func() (any, any, error) {
			real, err := s.p.Extend(ctx, c, d)
			return real, x.extend(s, c, d), err
		}
	case "transfer":
		to := x.fresh()
		return func() (any, any, error) {
			real, err := s.p.Transfer(ctx, c, to, d)
			want := engine.Missing
			switch {
			case w.stands(id, s.values):
				want = engine.Moved
				w.give(to.String(), s.values, ms)
				for _, v := range s.values {
					w.drop(v, id)
				}
				w.publish()
				s.claim, s.promise = &engine.Claim{Key: key, ID: to, Lease: d}, w.now+ms
			case w.stands(to.String(), s.values):
				want = engine.MovedBefore
			}
			x.seen.See("moved", int(want))
			return real, want, err
		}
	case "force":
		return func() (any, any, error) {
			real, err := s.p.Force(ctx, key)
			want := false
			for _, v := range s.values {
				owner, ok := w.owners[v]
				want = want || ok && w.left(v, owner) > 0
				w.drop(v, owner)
			}
			if want {
				w.publish()
			}
			for _, other := range x.slots {
				if slices.ContainsFunc(other.values, func(v string) bool { return slices.Contains(s.values, v) }) {
					other.promise = min(other.promise, w.now)
				}
			}
			x.seen.See("forced", want)
			return real, want, err
		}
	case "status":
		return func() (any, any, error) {
			left, count, err := s.p.Status(ctx, key, id)
			most, least := int64(0), 1
			for _, v := range s.values {
				most = max(most, w.left(v, w.owners[v]))
				if w.owners[v] != id || w.left(v, id) == 0 {
					least = 0
				}
			}
			return fmt.Sprint(left, count), fmt.Sprint(time.Duration(most)*time.Millisecond, least), err
		}
	case "java locks":
		return func() (any, any, error) {
			real, err := wire.Number(javaLock.Exec(ctx, x.conn, []string{key},
				append([]string{java.owner, itoa(w.now), itoa(ms)}, java.values...)), wire.Flags)
			return real, x.javaLocks(ms), err
		}
	case "java unlocks":
		return func() (any, any, error) {
			err := javaUnlock.Exec(ctx, x.conn, []string{key}, append([]string{java.owner, itoa(w.now)}, java.values...)).Error()
			x.javaUnlocks()
			return nil, nil, err
		}
	}
	panic(kind)
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

func (x *walk) acquire(s *slot, c *engine.Claim) engine.Answer {
	w, id, dead := x.w, c.ID.String(), map[string]string{}
	taken := int64(0)
	for _, v := range s.values {
		if owner := w.owners[v]; owner != "" && owner != id {
			dead[v] = owner
			taken = max(taken, w.left(v, owner))
		}
	}
	if taken > 0 {
		x.seen.See("refused")
		return engine.Answer{FreeIn: time.Duration(taken) * time.Millisecond}
	}
	if w.stands(id, s.values) {
		x.seen.See("acquired again")
	}
	w.give(id, s.values, c.Lease.Milliseconds())
	for v, owner := range dead {
		x.seen.See("dead owners")
		w.drop(v, owner)
	}
	x.seen.See("acquired")
	if c == s.claim {
		s.promise = max(s.promise, w.now+c.Lease.Milliseconds())
	}
	return engine.Answer{Acquired: true}
}

func (x *walk) extend(s *slot, c *engine.Claim, d time.Duration) bool {
	stands := x.w.stands(c.ID.String(), s.values)
	if stands {
		x.w.give(c.ID.String(), s.values, d.Milliseconds())
		s.promise = max(s.promise, x.w.now+d.Milliseconds())
	}
	x.seen.See("extended", stands)
	return stands
}

func (x *walk) renew(s step) lockstep.Request {
	var batch []watchdog.Subject
	var slots []*slot
	var claims []*engine.Claim
	for _, n := range s.slots {
		slot := x.slots[n]
		slots, claims = append(slots, slot), append(claims, slot.claim)
		batch = append(batch, watchdog.Subject{Key: key, Owner: slot.claim.ID.String() + slot.p.Kind().Renewed})
	}
	return func() (any, any, error) {
		real := slots[0].p.Renewer().Renew(context.Background(), [][]watchdog.Subject{batch}, s.lease, true)[0]
		var want []bool
		for i, slot := range slots {
			stands := x.extend(slot, claims[i], s.lease)
			want = append(want, stands)
			x.seen.See("renewed", stands)
		}
		return real.Held, want, real.Err
	}
}

// javaLock and javaUnlock do what the scripts of Redisson do. An owner whose lease is over leaves two of its fields.
var (
	javaLock = wire.NewScript(`
		local owner, now, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
		local existed = redis.call('EXISTS', KEYS[1])
		for i = 4, #ARGV do
			local other = redis.call('HGET', KEYS[1], ARGV[i])
			local ends = other and redis.call('HGET', KEYS[1], ARGV[i] .. ':' .. other .. ':expire_time')
			if other ~= owner and ends and tonumber(ends) > now then
				return 0
			end
		end
		for i = 4, #ARGV do
			local of = ARGV[i] .. ':' .. owner
			redis.call('HSET', KEYS[1], ARGV[i], owner)
			if tonumber(redis.call('HGET', KEYS[1], of .. ':expire_time') or 0) < now + lease then
				redis.call('HSET', KEYS[1], of .. ':expire_time', now + lease)
			end
			redis.call('HINCRBY', KEYS[1], of .. ':lock_count', 1)
		end
		if existed == 0 or redis.call('PTTL', KEYS[1]) > 0 and redis.call('PTTL', KEYS[1]) < lease then
			redis.call('PEXPIRE', KEYS[1], lease)
		end
		return 1`)
	javaUnlock = wire.NewScript(`
		local now = tonumber(ARGV[2])
		for i = 3, #ARGV do
			local of = ARGV[i] .. ':' .. ARGV[1]
			local ends = redis.call('HGET', KEYS[1], of .. ':expire_time')
			if ends and tonumber(ends) >= now and redis.call('HINCRBY', KEYS[1], of .. ':lock_count', -1) <= 0 then
				redis.call('HDEL', KEYS[1], of .. ':expire_time', of .. ':lock_count', ARGV[i])
			end
		end
		return 1`)
)

func (x *walk) javaLocks(ms int64) int64 {
	w := x.w
	for _, v := range java.values {
		if owner := w.owners[v]; owner != java.owner && w.left(v, owner) > 0 {
			return 0
		}
	}
	existed, until := len(w.content()) > 0, w.until
	counts := map[string]int{}
	for _, v := range java.values {
		counts[v] = w.leases[v][java.owner].count
	}
	w.give(java.owner, java.values, ms)
	for v, n := range counts {
		w.leases[v][java.owner] = lease{w.leases[v][java.owner].ends, n + 1}
	}
	if existed && until == w.now { // such a key keeps its expiry
		w.until = until
	}
	return 1
}

func (x *walk) javaUnlocks() {
	w := x.w
	for _, v := range java.values {
		l, ok := w.leases[v][java.owner]
		if !ok || l.ends < w.now {
			continue
		}
		if l.count--; l.count > 0 {
			w.leases[v][java.owner] = l
			continue
		}
		delete(w.leases[v], java.owner)
		if w.owners[v] != java.owner {
			x.javaFrees(v)
		}
		delete(w.owners, v)
	}
}

// javaFrees is when Java frees a value that another owner has locked since Java's lease has ended at this moment.
func (x *walk) javaFrees(value string) {
	for _, s := range x.slots {
		if slices.Contains(s.values, value) {
			s.promise = min(s.promise, x.w.now)
		}
	}
}
