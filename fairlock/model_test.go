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

// never is when a key without expiry ends.
const never = 0

// model is what a server with fair locks on it should be like. Times are in ms.
type model struct {
	now     int64
	wait    int64 // fairLockWaitTimeout
	life    int64 // of a queue position after a heartbeat
	latch   int64 // how long the result of a release is kept
	locks   map[string]*lockModel
	tickets map[string]*ticketModel
	told    []string // channels and payloads
	seen    lockstep.Seen
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

type ticketModel struct {
	says string
	ends int64
}

func newModel(names ...string) *model {
	m := &model{locks: map[string]*lockModel{}, tickets: map[string]*ticketModel{}, seen: lockstep.Seen{}}
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
	for key, ticket := range m.tickets {
		if over(ticket.ends) {
			delete(m.tickets, key)
		}
	}
}

// tidy is called whenever something was removed: an empty key does not exist, and has
// no expiry.
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

// ttl is what is left of the lease, 0 if there is none or it does not end.
func (m *model) ttl(l *lockModel) int64 {
	if l.ends == never {
		return 0
	}
	return l.ends - m.now
}

func (m *model) hold(l *lockModel, c *locking.Claim) {
	l.counts = map[string]int{c.Owner.String(): 1}
	l.ends = m.now + c.Lease.Milliseconds()
}

func (m *model) atLeast(l *lockModel, c *locking.Claim) {
	if lease := c.Lease.Milliseconds(); m.ttl(l) < lease {
		l.ends = m.now + lease
	}
}

// remove takes the n-th out of the queue.
func (l *lockModel) remove(n int) {
	owner := l.queue[n]
	l.queue = slices.Delete(l.queue, n, n+1)
	delete(l.deadlines, owner)
	delete(l.alive, owner)
	l.tidy()
}

// dies is when a waiter counts as dead, if that is known.
func (l *lockModel) dies(owner string) (at int64, known bool) {
	if at, ours := l.alive[owner]; ours {
		return at, true
	}
	at, known = l.deadlines[owner]
	return at, known
}

// takeBack lowers the deadlines of Java's waiters from the n-th on.
func (m *model) takeBack(l *lockModel, waits int64, n int) {
	if len(l.deadlines) == len(l.alive) {
		return
	}
	least := m.now + m.ttl(l) + m.wait
	for _, owner := range l.queue[n:] {
		_, ours := l.alive[owner]
		if deadline := l.deadlines[owner]; !ours && deadline > least {
			m.seen.See("deadline taken back")
			l.deadlines[owner] = max(least, deadline-waits*m.wait)
		}
	}
}

// purge takes the dead off the head and reports whether there were any.
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
		m.takeBack(l, ours, 0)
	}
	return dead > 0
}

// beatOf is a heartbeat of the n-th of the queue.
func (m *model) beatOf(l *lockModel, n int) {
	owner := l.queue[n]
	l.alive[owner] = m.now + m.life
	l.deadlines[owner] = m.now + m.ttl(l) + int64(n+1)*m.wait
}

// restore puts an evicted waiter back and reports whether it did.
func (m *model) restore(l *lockModel, owner string) bool {
	if slices.Contains(l.queue, owner) || l.alive[owner] <= m.now {
		return false
	}
	m.seen.See("restored")
	l.queue = slices.Insert(l.queue, 0, owner)
	m.beatOf(l, 0)
	return true
}

// leave reports whether the first has left.
func (m *model) leave(l *lockModel, owner string) bool {
	n := slices.Index(l.queue, owner)
	if n < 0 {
		delete(l.alive, owner)
		delete(l.deadlines, owner)
		l.tidy()
		return false
	}
	l.remove(n)
	m.takeBack(l, 1, n)
	return n == 0
}

// end ends an operation of ours: stated says whether there was a heartbeat, moved
// whether the head has changed. A new head that does not have to wait for long is told.
// It returns how many were told.
func (m *model) end(l *lockModel, stated, moved bool) int {
	if len(l.queue) == 0 {
		clear(l.deadlines)
		clear(l.alive)
		l.tidy()
		return 0
	}
	if stated {
		ends := m.now + int64(len(l.queue)+1)*m.wait + m.ttl(l)
		l.queueEnds, l.deadlinesEnds, l.aliveEnds = never, never, ends
		if len(l.deadlines) == len(l.alive) {
			l.queueEnds, l.deadlinesEnds = ends, ends
		}
		l.tidy()
	}
	if moved && (l.free() || l.ends != never && m.ttl(l) < 5_000) {
		m.tell(l)
		return lockstep.Subscribers
	}
	return 0
}

// tell tells the first of the queue that the lock is free.
func (m *model) tell(l *lockModel) {
	m.seen.See("told")
	m.told = append(m.told, wire.LockChannel(l.name)+":"+l.queue[0]+" "+wire.PayloadUnlocked)
}

func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// turn is how long it takes until the n-th may be the first, less than 0 if unknown.
func (m *model) turn(l *lockModel, n int) time.Duration {
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

// attend is an attempt that does not get the lock.
func (m *model) attend(l *lockModel, c *locking.Claim) locking.Answer {
	if !c.Waits {
		if l.free() || l.ends == never {
			return locking.Answer{FreeIn: millis(-1)}
		}
		return locking.Answer{FreeIn: millis(m.ttl(l))}
	}
	owner := c.Owner.String()
	n := slices.Index(l.queue, owner)
	moved := n < 0
	if moved {
		n = len(l.queue)
		l.queue = append(l.queue, owner)
	}
	m.beatOf(l, n)
	return locking.Answer{Placed: true, Moved: moved, FreeIn: m.turn(l, n)}
}

func (m *model) acquire(l *lockModel, claims []*locking.Claim) []locking.Answer {
	holder, stated, moved := -1, false, false
	for i, c := range claims {
		if l.counts[c.Owner.String()] > 0 {
			holder = i
			m.atLeast(l, c)
		}
	}
	moved = m.purge(l)
	for _, c := range slices.Backward(claims) {
		if c.Waits && m.restore(l, c.Owner.String()) {
			stated, moved = true, true
		}
	}
	if l.free() {
		holder = 0
		if len(l.queue) > 0 {
			holder = slices.IndexFunc(claims, func(c *locking.Claim) bool { return c.Owner.String() == l.queue[0] })
		}
		if holder >= 0 {
			m.hold(l, claims[holder])
		}
	}
	if holder >= 0 {
		moved = m.leave(l, claims[holder].Owner.String()) || moved
	}
	answers := make([]locking.Answer, len(claims))
	for i, c := range claims {
		if i == holder {
			answers[i].Acquired = true
			continue
		}
		answers[i] = m.attend(l, c)
		stated = stated || c.Waits
	}
	m.end(l, stated, moved)
	return answers
}

// ticket is that of a claim, nil if there is none.
func (m *model) ticket(c *locking.Claim) *ticketModel {
	return m.tickets[wire.UnlockLatch(c.Key, c.Ticket)]
}

func (m *model) setTicket(c *locking.Claim, says string, life int64) {
	m.tickets[wire.UnlockLatch(c.Key, c.Ticket)] = &ticketModel{says, m.now + life}
}

func (m *model) dropTicket(c *locking.Claim) { delete(m.tickets, wire.UnlockLatch(c.Key, c.Ticket)) }

func (m *model) acquireNamed(l *lockModel, c *locking.Claim, reentrant bool) locking.Answer {
	owner, ticket := c.Owner.String(), m.ticket(c)
	if ticket != nil && ticket.says != "held" {
		return locking.Answer{FreeIn: millis(-1)}
	}
	holds := l.counts[owner] > 0
	again := holds && ticket != nil
	if holds && !again && !reentrant {
		return locking.Answer{Reentered: true}
	}
	moved, stated := m.purge(l), false
	if c.Waits && m.restore(l, owner) {
		moved, stated = true, true
	}
	if !holds && !(l.free() && (len(l.queue) == 0 || l.queue[0] == owner)) {
		answer := m.attend(l, c)
		m.end(l, stated || c.Waits, moved)
		return answer
	}
	m.setTicket(c, "held", c.Lease.Milliseconds())
	if !again {
		l.counts[owner]++
	}
	m.atLeast(l, c)
	moved = m.leave(l, owner) || moved
	m.end(l, stated, moved)
	return locking.Answer{Acquired: true}
}

// open frees the lock.
func (m *model) open(l *lockModel) locking.Released {
	m.purge(l)
	clear(l.counts)
	l.tidy()
	return locking.Released{State: locking.Free, Told: m.end(l, false, true)}
}

func (m *model) release(l *lockModel, c *locking.Claim) locking.Released {
	switch l.counts[c.Owner.String()] {
	case 0:
		m.giveUp(l, c.Owner.String())
		return locking.Released{}
	case 1:
		return m.open(l)
	default:
		return locking.Released{State: locking.Shared}
	}
}

func (m *model) handOff(l *lockModel, from, to *locking.Claim) locking.Passed {
	passedOn, next := locking.Passed{Answer: locking.Answer{Acquired: true}}, to.Owner.String()
	switch had := l.counts[from.Owner.String()]; {
	case had == 0 && l.counts[next] > 0:
		m.atLeast(l, to)
		return passedOn
	case had > 1:
		m.seen.See("shared")
		return locking.Passed{}
	case had == 0:
		return locking.Passed{}
	}
	moved := m.purge(l)
	stated := m.restore(l, next)
	if len(l.queue) > 0 && l.queue[0] != next {
		return locking.Passed{Released: m.open(l)}
	}
	m.hold(l, to)
	moved = m.leave(l, next) || moved
	m.end(l, stated, moved)
	return passedOn
}

func (m *model) releaseNamed(l *lockModel, c *locking.Claim, undo bool) locking.Released {
	owner, ticket := c.Owner.String(), m.ticket(c)
	switch {
	case ticket != nil && ticket.says == "0":
		return locking.Released{State: locking.StillHeld}
	case ticket != nil && ticket.says == "1":
		return locking.Released{State: locking.Free}
	case ticket == nil && !c.AnyHold:
		return locking.Released{}
	case l.counts[owner] == 0:
		m.dropTicket(c)
		return locking.Released{}
	}
	note := func(result string) {
		if undo && !c.AnyHold {
			m.dropTicket(c)
		} else {
			m.setTicket(c, result, m.latch)
		}
	}
	if l.counts[owner] > 1 {
		l.counts[owner]--
		note("0")
		return locking.Released{State: locking.StillHeld}
	}
	note("1")
	return m.open(l)
}

func (m *model) extend(l *lockModel, c *locking.Claim) bool {
	ticket := m.ticket(c)
	if l.counts[c.Owner.String()] == 0 || c.Named() && (ticket == nil || ticket.says != "held") {
		return false
	}
	m.atLeast(l, c)
	if c.Named() {
		ticket.ends = max(ticket.ends, m.now+c.Lease.Milliseconds())
	}
	return true
}

func (m *model) giveUp(l *lockModel, owner string) {
	moved := m.purge(l)
	moved = m.leave(l, owner) || moved
	m.end(l, false, moved)
}

func (m *model) force(l *lockModel) bool {
	held := !l.free()
	m.open(l)
	return held
}

// beat is a heartbeat of owners. It returns which have a queue position and have to wait
// on.
func (m *model) beat(l *lockModel, owners []string) []bool {
	moved, stated := m.purge(l), false
	for _, owner := range slices.Backward(owners) {
		moved = m.restore(l, owner) || moved
	}
	last := map[string]int{} // position, by owner
	for n, owner := range l.queue {
		last[owner] = n
	}
	kept := make([]bool, len(owners))
	for i, owner := range owners {
		if n, waits := last[owner]; waits {
			m.beatOf(l, n)
			kept[i], stated = n > 0 || !l.free(), true
		}
	}
	for owner, dies := range l.alive {
		if dies <= m.now && !slices.Contains(l.queue, owner) {
			delete(l.alive, owner)
		}
	}
	l.tidy()
	m.end(l, stated, moved)
	return kept
}

// waiters are those that are alive.
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

// What Redisson does. now is the time by the clock of its client.

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
		m.tell(l)
	}
	return int64(1)
}

func (m *model) javaLeave(l *lockModel, owner string, wait int64) {
	if n := slices.Index(l.queue, owner); n >= 0 {
		for _, other := range l.queue[n+1:] {
			// ZINCRBY makes what is not there.
			l.deadlines[other] -= wait
		}
	}
	delete(l.deadlines, owner)
	l.queue = slices.DeleteFunc(l.queue, func(other string) bool { return other == owner })
	l.tidy()
}

// state is everything the server should have, and the messages since the last call.
func (m *model) state() (s lockstep.State) {
	for _, l := range m.locks {
		s.Put(l.name, "hash", l.ends, lockstep.Pairs(l.counts)...)
		s.Put(wire.FairQueue(l.name), "list", l.queueEnds, l.queue...)
		s.Put(wire.FairTimeouts(l.name), "zset", l.deadlinesEnds, lockstep.Pairs(l.deadlines)...)
		s.Put(wire.FairAlive(l.name), "zset", l.aliveEnds, lockstep.Pairs(l.alive)...)
	}
	for key, ticket := range m.tickets {
		s.Put(key, "string", ticket.ends, ticket.says)
	}
	s.Told, m.told = m.told, nil
	return s
}
