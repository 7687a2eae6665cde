package fairlock_test

import (
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
	name   string
	counts map[string]int
	ends   int64

	queue         []string
	deadlines     map[string]int64
	alive         map[string]int64
	queueEnds     int64
	deadlinesEnds int64
	aliveEnds     int64
}

func newModel(names ...string) *model {
	m := &model{locks: map[string]*lockModel{}, seen: lockstep.Seen{}}
	for _, name := range names {
		m.locks[name] = &lockModel{name: name, counts: map[string]int{}, deadlines: map[string]int64{}, alive: map[string]int64{}}
	}
	return m
}

// pass lets time pass.
func (m *model) pass(d int64) {
	m.now += d
	over := func(ends int64) bool { return ends != never && ends < m.now }
	for _, l := range m.locks {
		if over(l.ends) {
			clear(l.counts)
		}
		if over(l.queueEnds) {
			l.queue = nil
		}
		if over(l.deadlinesEnds) {
			clear(l.deadlines)
		}
		if over(l.aliveEnds) {
			clear(l.alive)
		}
		l.tidy()
	}
}

// tidy is called after every removal: an empty key does not exist and has no expiry.
func (l *lockModel) tidy() {
	if len(l.counts) == 0 {
		l.ends = never
	}
	if len(l.queue) == 0 {
		l.queueEnds = never
	}
	if len(l.deadlines) == 0 {
		l.deadlinesEnds = never
	}
	if len(l.alive) == 0 {
		l.aliveEnds = never
	}
}

func (l *lockModel) free() bool { return len(l.counts) == 0 }

// ttl returns the rest of the lease, 0 if there is none or it does not end.
func (m *model) ttl(l *lockModel) int64 {
	if l.ends == never {
		return 0
	}
	return l.ends - m.now
}

func (m *model) hold(l *lockModel, c *locking.Claim) {
	l.counts = map[string]int{c.ID.String(): 1}
	l.ends = m.now + c.Lease.Milliseconds()
}

func (m *model) atLeast(l *lockModel, c *locking.Claim) {
	if lease := c.Lease.Milliseconds(); m.ttl(l) < lease {
		l.ends = m.now + lease
	}
}

// remove removes the n-th waiter from the queue.
func (l *lockModel) remove(n int) {
	owner := l.queue[n]
	l.queue = slices.Delete(l.queue, n, n+1)
	delete(l.deadlines, owner)
	delete(l.alive, owner)
	l.tidy()
}

// dies returns when a waiter counts as dead, if that is known.
func (l *lockModel) dies(owner string) (at int64, known bool) {
	if at, ours := l.alive[owner]; ours {
		return at, true
	}
	at, known = l.deadlines[owner]
	return at, known
}

// subtractWaits lowers the deadlines of Java's waiters from the n-th on.
func (m *model) subtractWaits(l *lockModel, waits int64, n int) {
	if len(l.deadlines) == len(l.alive) {
		return
	}
	least := m.now + m.ttl(l) + m.wait
	for _, owner := range l.queue[n:] {
		_, ours := l.alive[owner]
		if deadline := l.deadlines[owner]; !ours && deadline > least {
			m.seen.See("waits subtracted")
			l.deadlines[owner] = max(least, deadline-waits*m.wait)
		}
	}
}

// purge removes dead waiters from the head and reports whether there were any.
func (m *model) purge(l *lockModel) bool {
	dead, ours := 0, int64(0)
	for len(l.queue) > 0 {
		first := l.queue[0]
		at, known := l.dies(first)
		if !known {
			l.deadlines[first] = m.now + m.wait
			break
		}
		if at > m.now {
			break
		}
		if _, is := l.alive[first]; is {
			ours++
		}
		m.seen.See("dead purged")
		l.remove(0)
		dead++
	}
	if ours > 0 {
		m.subtractWaits(l, ours, 0)
	}
	return dead > 0
}

// renew records a heartbeat of the n-th waiter.
func (m *model) renew(l *lockModel, n int) {
	owner := l.queue[n]
	l.alive[owner] = m.now + m.positionTTL
	l.deadlines[owner] = m.now + m.ttl(l) + int64(n+1)*m.wait
}

// restore puts an evicted waiter back and reports whether it did.
func (m *model) restore(l *lockModel, owner string) bool {
	if slices.Contains(l.queue, owner) || l.alive[owner] <= m.now {
		return false
	}
	m.seen.See("restored")
	l.queue = slices.Insert(l.queue, 0, owner)
	m.renew(l, 0)
	return true
}

// leave removes a waiter and reports whether it was the head.
func (m *model) leave(l *lockModel, owner string) bool {
	n := slices.Index(l.queue, owner)
	if n < 0 {
		delete(l.alive, owner)
		delete(l.deadlines, owner)
		l.tidy()
		return false
	}
	l.remove(n)
	m.subtractWaits(l, 1, n)
	return n == 0
}

// end ends an operation of ours. renewed is set if there was a heartbeat, newHead if the
// head has changed. A new head that need not wait for long gets a message. end returns the
// number of receivers.
func (m *model) end(l *lockModel, renewed, newHead bool) int {
	if len(l.queue) == 0 {
		clear(l.deadlines)
		clear(l.alive)
		l.tidy()
		return 0
	}
	if renewed {
		ends := m.now + int64(len(l.queue)+1)*m.wait + m.ttl(l)
		l.queueEnds, l.deadlinesEnds, l.aliveEnds = never, never, ends
		if len(l.deadlines) == len(l.alive) {
			l.queueEnds, l.deadlinesEnds = ends, ends
		}
		l.tidy()
	}
	if newHead && (l.free() || l.ends != never && m.ttl(l) < 5_000) {
		m.publish(l)
		return lockstep.Subscribers
	}
	return 0
}

// publish sends the message that the lock is free to the head of the queue.
func (m *model) publish(l *lockModel) {
	m.seen.See("published")
	m.published = append(m.published, wire.LockChannel(l.name)+":"+l.queue[0]+" "+wire.PayloadUnlocked)
}

func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// eta returns how long it takes until the n-th waiter may be first, less than 0 if unknown.
func (m *model) eta(l *lockModel, n int) time.Duration {
	if n >= 8 || !l.free() && l.ends == never {
		return millis(-1)
	}
	at := m.now + m.ttl(l)
	for _, owner := range l.queue[:n] {
		dies, known := l.dies(owner)
		if !known {
			return millis(-1)
		}
		at = max(at, dies)
	}
	return millis(at - m.now)
}

// enqueue is an attempt that does not acquire the lock.
func (m *model) enqueue(l *lockModel, c *locking.Claim) locking.Answer {
	if !c.Waits {
		if l.free() || l.ends == never {
			return locking.Answer{FreeIn: millis(-1)}
		}
		return locking.Answer{FreeIn: millis(m.ttl(l))}
	}
	owner := c.ID.String()
	n := slices.Index(l.queue, owner)
	moved := n < 0
	if moved {
		n = len(l.queue)
		l.queue = append(l.queue, owner)
	}
	m.renew(l, n)
	return locking.Answer{Queued: true, Moved: moved, FreeIn: m.eta(l, n)}
}

func (m *model) acquire(l *lockModel, claims []*locking.Claim) []locking.Answer {
	holder, renewed, newHead := -1, false, false
	for i, c := range claims {
		if l.counts[c.ID.String()] > 0 {
			holder = i
			m.atLeast(l, c)
		}
	}
	newHead = m.purge(l)
	for _, c := range slices.Backward(claims) {
		if c.Waits && m.restore(l, c.ID.String()) {
			renewed, newHead = true, true
		}
	}
	if l.free() {
		holder = 0
		if len(l.queue) > 0 {
			holder = slices.IndexFunc(claims, func(c *locking.Claim) bool { return c.ID.String() == l.queue[0] })
		}
		if holder >= 0 {
			m.hold(l, claims[holder])
		}
	}
	if holder >= 0 {
		newHead = m.leave(l, claims[holder].ID.String()) || newHead
	}
	answers := make([]locking.Answer, len(claims))
	for i, c := range claims {
		if i == holder {
			answers[i].Acquired = true
			continue
		}
		answers[i] = m.enqueue(l, c)
		renewed = renewed || c.Waits
	}
	m.end(l, renewed, newHead)
	return answers
}

// open frees the lock.
func (m *model) open(l *lockModel) locking.Released {
	m.purge(l)
	clear(l.counts)
	l.tidy()
	return locking.Released{State: locking.Free, Receivers: m.end(l, false, true)}
}

func (m *model) release(l *lockModel, c *locking.Claim) locking.Released {
	if l.counts[c.ID.String()] == 0 {
		m.giveUp(l, c.ID.String())
		return locking.Released{}
	}
	return m.open(l)
}

func (m *model) handOff(l *lockModel, from, to *locking.Claim) locking.Passed {
	passedOn, next := locking.Passed{Answer: locking.Answer{Acquired: true}}, to.ID.String()
	if l.counts[from.ID.String()] == 0 {
		if l.counts[next] == 0 {
			return locking.Passed{}
		}
		m.atLeast(l, to)
		return passedOn
	}
	newHead := m.purge(l)
	renewed := m.restore(l, next)
	if len(l.queue) > 0 && l.queue[0] != next {
		return locking.Passed{Released: m.open(l)}
	}
	m.hold(l, to)
	newHead = m.leave(l, next) || newHead
	m.end(l, renewed, newHead)
	return passedOn
}

func (m *model) extend(l *lockModel, c *locking.Claim) bool {
	if l.counts[c.ID.String()] == 0 {
		return false
	}
	m.atLeast(l, c)
	return true
}

func (m *model) giveUp(l *lockModel, owner string) {
	newHead := m.purge(l)
	newHead = m.leave(l, owner) || newHead
	m.end(l, false, newHead)
}

func (m *model) force(l *lockModel) bool {
	held := !l.free()
	m.open(l)
	return held
}

// heartbeat is one of some owners. It reports which are in the queue and must keep waiting.
func (m *model) heartbeat(l *lockModel, owners []string) []bool {
	newHead, renewed := m.purge(l), false
	for _, owner := range slices.Backward(owners) {
		newHead = m.restore(l, owner) || newHead
	}
	last := map[string]int{} // position, by owner
	for n, owner := range l.queue {
		last[owner] = n
	}
	kept := make([]bool, len(owners))
	for i, owner := range owners {
		if n, waits := last[owner]; waits {
			m.renew(l, n)
			kept[i], renewed = n > 0 || !l.free(), true
		}
	}
	for owner, dies := range l.alive {
		if dies <= m.now && !slices.Contains(l.queue, owner) {
			delete(l.alive, owner)
		}
	}
	l.tidy()
	m.end(l, renewed, newHead)
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
		l.counts, l.ends = map[string]int{owner: 1}, m.now+lease
		return nil
	case l.counts[owner] > 0:
		l.counts[owner]++
		l.ends = m.now + lease
		return nil
	case !waits:
		return int64(1)
	}
	ttl := int64(-2)
	if !l.free() {
		ttl = -1
		if l.ends != never {
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
		l.ends = m.now + lease
		return int64(0)
	}
	clear(l.counts)
	l.tidy()
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
		s.Put(l.name, "hash", l.ends, lockstep.Pairs(l.counts)...)
		s.Put(wire.FairQueue(l.name), "list", l.queueEnds, l.queue...)
		s.Put(wire.FairTimeouts(l.name), "zset", l.deadlinesEnds, lockstep.Pairs(l.deadlines)...)
		s.Put(wire.FairAlive(l.name), "zset", l.aliveEnds, lockstep.Pairs(l.alive)...)
	}
	s.Told, m.published = m.published, nil
	return s
}
