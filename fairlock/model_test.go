package fairlock_test

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// never is the end of a key without expiry.
const never = 0

// model is the state that a server with fair locks should have. Times are in ms.
type model struct {
	now         int64
	wait        int64 // fairLockWaitTimeout
	positionTTL int64 // how long a heartbeat keeps a queue position
	locks       map[string]*lockModel
	published   []string // channels and payloads
	seen        lockstep.Seen
}

type lockModel struct {
	name      string
	counts    map[string]int
	queue     []string
	deadlines map[string]int64
	alive     map[string]int64
	order     map[string]int64
	ends      [5]int64 // of the keys, as keysOf returns them

	// Of one script.
	head                    string // of the queue before
	intact, silent, patient bool
	changed, freed          bool
}

// The keys of a lock, as indices.
const (
	lockAt = iota
	queueAt
	deadlinesAt
	aliveAt
	orderAt
)

func newModel(names ...string) *model {
	m := &model{locks: map[string]*lockModel{}, seen: lockstep.Seen{}}
	for _, name := range names {
		m.locks[name] = &lockModel{
			name: name, counts: map[string]int{}, deadlines: map[string]int64{}, alive: map[string]int64{}, order: map[string]int64{},
		}
	}
	return m
}

// pass lets time pass.
func (m *model) pass(d int64) {
	m.now += d
	for _, l := range m.locks {
		for key, ends := range l.ends {
			if ends != never && ends < m.now {
				l.drop(key)
			}
		}
	}
}

// drop deletes a key.
func (l *lockModel) drop(key int) {
	switch key {
	case lockAt:
		clear(l.counts)
	case queueAt:
		l.queue = nil
	case deadlinesAt:
		clear(l.deadlines)
	case aliveAt:
		clear(l.alive)
	case orderAt:
		clear(l.order)
	}
	l.tidy()
}

// tidy is called after every removal: an empty key does not exist and has no expiry.
func (l *lockModel) tidy() {
	for key, size := range []int{len(l.counts), len(l.queue), len(l.deadlines), len(l.alive), len(l.order)} {
		if size == 0 {
			l.ends[key] = never
		}
	}
}

func (l *lockModel) free() bool { return len(l.counts) == 0 }

// ttl returns the rest of the lease, 0 if there is none or it does not end.
func (m *model) ttl(l *lockModel) int64 {
	if l.ends[lockAt] == never {
		return 0
	}
	return l.ends[lockAt] - m.now
}

func (m *model) hold(l *lockModel, c *locking.Claim) {
	l.counts = map[string]int{c.ID.String(): 1}
	l.ends[lockAt] = m.now + c.Lease.Milliseconds()
}

func (m *model) atLeast(l *lockModel, c *locking.Claim) {
	if lease := c.Lease.Milliseconds(); m.ttl(l) < lease {
		l.ends[lockAt] = m.now + lease
	}
}

// begin is called before each script of ours.
func (m *model) begin(l *lockModel) {
	l.head, l.changed, l.freed = l.first(), false, false
	l.intact = len(l.queue) == len(l.deadlines)
	l.silent = false
	l.patient = -l.order[""] > m.now
}

// next returns the waiter that the lock is for, "" if there is none.
func (l *lockModel) next() string {
	if l.silent {
		return ""
	}
	return l.first()
}

// first returns the head of the queue, "" if there is none.
func (l *lockModel) first() string {
	if len(l.queue) == 0 {
		return ""
	}
	return l.queue[0]
}

// queued reports whether a waiter is in the queue. One that is has a deadline, unless a fault
// has deleted it.
func (l *lockModel) queued(owner string) bool {
	if l.intact {
		_, is := l.deadlines[owner]
		return is
	}
	return slices.Contains(l.queue, owner)
}

// dies returns when a waiter counts as dead, if that is known.
func (l *lockModel) dies(owner string) (at int64, known bool) {
	if at, ours := l.alive[owner]; ours {
		return at, true
	}
	at, known = l.deadlines[owner]
	return at, known
}

// refresh brings the queue up to date, in a request of live waiters.
func (m *model) refresh(l *lockModel, live ...string) {
	back := m.evicted(l, live)
	m.listen(l, live)
	m.restore(l, back)
	m.purge(l)
}

// listen is told the waiters of a request.
func (m *model) listen(l *lockModel, live []string) {
	l.silent = len(l.alive) > 0 && len(l.alive) >= len(l.deadlines)
	for _, dies := range l.alive {
		l.silent = l.silent && dies <= m.now
	}
	late := l.silent
	for _, owner := range live {
		at, ours := l.alive[owner]
		late = late || ours && at <= m.now
	}
	if late && len(live) > 0 {
		m.seen.See("patient")
		l.order[""] = -(m.now + m.positionTTL/4)
		l.silent, l.patient, l.changed = false, true, true
	}
}

// purge removes dead waiters from the head, if the lock is free.
func (m *model) purge(l *lockModel) {
	for ; len(l.queue) > 0; l.queue = l.queue[1:] {
		first := l.queue[0]
		at, known := l.dies(first)
		if !known {
			l.deadlines[first] = m.now + m.wait
		}
		if !l.free() || l.silent || l.patient || !known || at > m.now {
			break
		}
		m.seen.See("dead purged")
		delete(l.deadlines, first)
		delete(l.alive, first)
		delete(l.order, first)
		l.tidy() // before a deadline is added: the key would be a new one
	}
	l.tidy()
}

// renew records heartbeats of waiters.
func (m *model) renew(l *lockModel, owners ...string) {
	for _, owner := range owners {
		n := slices.Index(l.queue, owner)
		if n >= 8 {
			m.seen.See("far from the head")
		}
		if n < 0 || n >= 8 {
			n = len(l.queue)
		}
		l.alive[owner] = m.now + m.positionTTL
		l.deadlines[owner] = m.now + m.ttl(l) + int64(n+1)*m.wait
		l.changed = true
	}
}

// ranked returns our waiters in the order in which they came.
func (l *lockModel) ranked() (owners []string) {
	for owner := range l.order {
		if owner != "" {
			owners = append(owners, owner)
		}
	}
	slices.SortFunc(owners, func(a, b string) int { return cmp.Compare(l.order[a], l.order[b]) })
	return owners
}

// evicted returns live waiters that were evicted: those of a request, and the first others. It
// forgets dead ones.
func (m *model) evicted(l *lockModel, live []string) map[string]bool {
	back := map[string]bool{}
	add := func(owner string) bool {
		at, known := l.dies(owner)
		if !known || at <= m.now {
			return false
		}
		back[owner] = true
		return true
	}
	for _, owner := range live {
		if !l.queued(owner) {
			add(owner)
		}
	}
	const some = 16
	for forgotten := some; forgotten == some; {
		forgotten = 0
		first := l.ranked()
		for _, owner := range first[:min(some, len(first))] {
			if l.queued(owner) {
				break
			}
			if !add(owner) {
				m.seen.See("forgotten")
				forgotten++
				delete(l.order, owner)
				delete(l.alive, owner)
			}
		}
	}
	l.tidy()
	return back
}

// restore puts them back.
func (m *model) restore(l *lockModel, back map[string]bool) {
	if len(back) == 0 {
		return
	}
	m.seen.See("restored")
	var last int64
	for owner := range back {
		last = max(last, l.order[owner])
	}
	for len(l.queue) > 0 && l.order[l.queue[0]] > 0 && l.order[l.queue[0]] < last {
		back[l.queue[0]] = true
		l.queue = l.queue[1:]
		m.seen.See("restored before another")
	}
	l.tidy()
	head := slices.SortedFunc(maps.Keys(back), func(a, b string) int {
		return cmp.Or(cmp.Compare(l.order[a], l.order[b]), cmp.Compare(a, b))
	})
	for i, owner := range head {
		l.deadlines[owner] = m.now + m.ttl(l) + int64(i+1)*m.wait
	}
	l.queue = append(head, l.queue...)
	l.changed = true
}

// leave removes waiters.
func (l *lockModel) leave(owners ...string) {
	before := len(l.deadlines)
	for _, owner := range owners {
		delete(l.alive, owner)
		delete(l.deadlines, owner)
		delete(l.order, owner)
	}
	if len(l.deadlines) < before || !l.intact {
		for _, owner := range owners {
			if n := slices.Index(l.queue, owner); n >= 0 {
				l.queue = slices.Delete(l.queue, n, n+1)
			}
		}
	}
	l.tidy()
}

// end is called after each script of ours that may change the queue. A new head that need not
// wait for long gets a message. end returns the number of receivers.
func (m *model) end(l *lockModel) int {
	if len(l.queue) == 0 {
		l.drop(deadlinesAt)
		l.drop(aliveAt)
		l.drop(orderAt)
		return 0
	}
	if len(l.alive) == 0 {
		l.drop(orderAt)
	}
	switch ends := l.ends[queueAt]; {
	case l.silent && l.free():
		if ends != never && ends-m.now > m.positionTTL {
			m.expire(l, m.positionTTL)
		}
	case l.changed || len(l.alive) == 0:
		m.expire(l, int64(len(l.queue)+1)*m.wait+m.ttl(l))
	}
	newHead := l.freed || l.head != "" && l.head != l.queue[0]
	if newHead && (l.free() || l.ends[lockAt] != never && m.ttl(l) < 5_000) {
		m.publish(l)
		return lockstep.Subscribers
	}
	return 0
}

// expire gives the keys of the queue an expiry, but not to those that have a Java waiter.
func (m *model) expire(l *lockModel, ttl int64) {
	ends := m.now + ttl
	l.ends[queueAt], l.ends[deadlinesAt], l.ends[aliveAt], l.ends[orderAt] = never, never, ends, ends
	if len(l.deadlines) == len(l.alive) {
		l.ends[queueAt], l.ends[deadlinesAt] = ends, ends
	}
	l.tidy()
}

// publish sends the message that the lock is free to the head of the queue.
func (m *model) publish(l *lockModel) {
	m.seen.See("published")
	m.published = append(m.published, wire.LockChannel(l.name)+":"+l.queue[0]+" "+wire.PayloadUnlocked)
}

func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// leaseEnds returns how long the lease lasts, less than 0 if there is none or it does not end.
func (m *model) leaseEnds(l *lockModel) time.Duration {
	if l.free() || l.ends[lockAt] == never {
		return millis(-1)
	}
	return millis(m.ttl(l))
}

// enqueue is an attempt that does not acquire the lock.
func (m *model) enqueue(l *lockModel, c *locking.Claim) locking.Answer {
	if !c.Waits {
		return locking.Answer{FreeIn: m.leaseEnds(l)}
	}
	owner := c.ID.String()
	moved := !l.queued(owner)
	m.renew(l, owner)
	if moved {
		last := int64(0)
		for _, rank := range l.order {
			last = max(last, rank)
		}
		l.order[owner] = last + 1
		l.queue = append(l.queue, owner)
	}
	a := locking.Answer{Queued: true, Moved: moved, FreeIn: millis(-1)}
	if l.first() == owner {
		a.FreeIn = m.leaseEnds(l)
	}
	return a
}

func (m *model) acquire(l *lockModel, claims []*locking.Claim) []locking.Answer {
	m.begin(l)
	holder := -1
	var live []string
	for i, c := range claims {
		if c.Waits {
			live = append(live, c.ID.String())
		}
		if l.counts[c.ID.String()] > 0 {
			holder = i
			m.atLeast(l, c)
		}
	}
	m.refresh(l, live...)
	if l.free() {
		holder = 0
		if next := l.next(); next != "" {
			holder = slices.IndexFunc(claims, func(c *locking.Claim) bool { return c.ID.String() == next })
		}
		if holder >= 0 {
			m.hold(l, claims[holder])
		}
	}
	if holder >= 0 {
		l.leave(claims[holder].ID.String())
	}
	answers := make([]locking.Answer, len(claims))
	for i, c := range claims {
		if i == holder {
			answers[i].Acquired = true
		} else {
			answers[i] = m.enqueue(l, c)
		}
	}
	m.end(l)
	return answers
}

// open frees the lock.
func (m *model) open(l *lockModel) locking.Released {
	l.drop(lockAt)
	l.freed = true
	m.refresh(l)
	return locking.Released{State: locking.Free, Receivers: m.end(l)}
}

// release is that of a claim. The waiters in had leave the queue.
func (m *model) release(l *lockModel, c *locking.Claim, had []string) locking.Released {
	m.begin(l)
	l.leave(had...)
	if l.counts[c.ID.String()] > 0 {
		return m.open(l)
	}
	l.leave(c.ID.String())
	m.refresh(l)
	m.end(l)
	return locking.Released{}
}

// confirm returns whether the claim holds the lock, and how many of the waiting are the first.
func (m *model) confirm(l *lockModel, c *locking.Claim, had, waiting []string) [2]int64 {
	m.begin(l)
	held := l.counts[c.ID.String()] > 0
	if held {
		m.atLeast(l, c)
	}
	l.leave(had...)
	m.refresh(l)
	n := 0
	for held && n < min(len(waiting), len(l.queue)) && waiting[n] == l.queue[n] {
		n++
	}
	m.end(l)
	if !held {
		return [2]int64{}
	}
	return [2]int64{1, int64(n)}
}

func (m *model) extend(l *lockModel, c *locking.Claim) bool {
	if l.counts[c.ID.String()] == 0 {
		return false
	}
	m.atLeast(l, c)
	return true
}

func (m *model) giveUp(l *lockModel, owner string) {
	m.begin(l)
	l.leave(owner)
	m.refresh(l)
	m.end(l)
}

func (m *model) force(l *lockModel) bool {
	m.begin(l)
	held := !l.free()
	m.open(l)
	return held
}

// heartbeat is one of some owners. It reports which are in the queue and must keep waiting.
func (m *model) heartbeat(l *lockModel, owners []string) []bool {
	m.begin(l)
	m.refresh(l, owners...)
	kept := make([]bool, len(owners))
	for i, owner := range owners {
		if l.queued(owner) {
			m.renew(l, owner)
			kept[i] = !l.free() || owner != l.first()
		}
	}
	m.end(l)
	return kept
}

// waiters returns the live waiters.
func (m *model) waiters(l *lockModel) []fairlock.Waiter {
	waiters := []fairlock.Waiter{}
	for _, name := range l.queue {
		at, known := l.dies(name)
		if !known {
			at = m.now + m.wait
		}
		if at > m.now {
			owner, _ := lock.ParseOwner(name)
			waiters = append(waiters, fairlock.Waiter{Owner: owner, Deadline: time.UnixMilli(at)})
		}
	}
	return waiters
}

// The next methods are Redisson's. now is the time by the clock of its client.

func (m *model) javaEvict(l *lockModel, now int64) {
	for len(l.queue) > 0 {
		deadline, known := l.deadlines[l.queue[0]]
		if !known || deadline > now {
			return
		}
		if _, ours := l.alive[l.queue[0]]; ours {
			m.seen.See("evicted")
		}
		delete(l.deadlines, l.queue[0])
		l.queue = l.queue[1:]
		l.tidy()
	}
}

// javaAcquire returns nil, or how long to sleep.
func (m *model) javaAcquire(l *lockModel, owner string, lease, wait, now int64, waits bool) any {
	m.javaEvict(l, now)
	switch {
	case l.free() && (len(l.queue) == 0 || l.queue[0] == owner):
		if len(l.queue) > 0 {
			l.queue = l.queue[1:]
		}
		delete(l.deadlines, owner)
		for other := range l.deadlines {
			l.deadlines[other] -= wait
		}
		l.tidy()
		l.counts, l.ends[lockAt] = map[string]int{owner: 1}, m.now+lease
		return nil
	case l.counts[owner] > 0:
		l.counts[owner]++
		l.ends[lockAt] = m.now + lease
		return nil
	case !waits:
		return int64(1)
	}
	ttl := int64(-2)
	if !l.free() {
		ttl = -1
		if l.ends[lockAt] != never {
			ttl = m.ttl(l)
		}
	}
	if _, there := l.deadlines[owner]; there {
		return max(0, ttl)
	}
	if n := len(l.queue); n > 0 && l.queue[n-1] != owner {
		if deadline, known := l.deadlines[l.queue[n-1]]; known {
			ttl = deadline - now
		}
	}
	l.deadlines[owner] = ttl + wait + now
	l.queue = append(l.queue, owner)
	return ttl
}

// javaRelease returns 1 for free, 0 for still held, and nil for not held.
func (m *model) javaRelease(l *lockModel, owner string, lease, now int64) any {
	m.javaEvict(l, now)
	switch {
	case l.free():
	case l.counts[owner] == 0:
		return nil
	case l.counts[owner] > 1:
		l.counts[owner]--
		l.ends[lockAt] = m.now + lease
		return int64(0)
	}
	l.drop(lockAt)
	if len(l.queue) > 0 {
		m.publish(l)
	}
	return int64(1)
}

func (m *model) javaLeave(l *lockModel, owner string, wait int64) {
	if n := slices.Index(l.queue, owner); n >= 0 {
		for _, other := range l.queue[n+1:] {
			// ZINCRBY creates a missing member.
			l.deadlines[other] -= wait
		}
	}
	delete(l.deadlines, owner)
	l.queue = slices.DeleteFunc(l.queue, func(other string) bool { return other == owner })
	l.tidy()
}

// state returns all that the server should have, and the messages since the last call.
func (m *model) state() (s lockstep.State) {
	for _, l := range m.locks {
		keys := keysOf(l.name)
		s.Put(keys[lockAt], "hash", l.ends[lockAt], lockstep.Pairs(l.counts)...)
		s.Put(keys[queueAt], "list", l.ends[queueAt], l.queue...)
		s.Put(keys[deadlinesAt], "zset", l.ends[deadlinesAt], lockstep.Pairs(l.deadlines)...)
		s.Put(keys[aliveAt], "zset", l.ends[aliveAt], lockstep.Pairs(l.alive)...)
		s.Put(keys[orderAt], "zset", l.ends[orderAt], lockstep.Pairs(l.order)...)
	}
	s.Told, m.published = m.published, nil
	return s
}
