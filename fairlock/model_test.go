package fairlock_test

import (
	"fmt"
	"slices"
	"strings"

	"github.com/redlatch/redlatch/internal/wire"
)

// never is when a key without expiry ends.
const never = 0

// model is what a server with fair locks on it should be like. Times are in ms.
type model struct {
	now     int64
	wait    int64 // fairLockWaitTimeout
	life    int64 // of a place after a sign of life
	latch   int64 // for how long the result of a release is kept
	locks   map[string]*lockModel
	tickets map[string]*ticketModel
	told    []string // channels and payloads
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

// claimModel is a claim as the server sees it.
type claimModel struct {
	owner  string
	lease  int64
	waits  bool
	ticket string
	any    bool
}

// said is what an attempt came to.
type said struct {
	acquired, reentered, placed, moved bool
	freeIn                             int64
}

func newModel(names ...string) *model {
	m := &model{locks: map[string]*lockModel{}, tickets: map[string]*ticketModel{}}
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

// tidy is called whenever something was removed: what is empty is not there, and
// has no expiry.
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

// ttl is what is left of the lease, 0 if that does not end or there is none.
func (m *model) ttl(l *lockModel) int64 {
	if l.ends == never {
		return 0
	}
	return l.ends - m.now
}

func (m *model) hold(l *lockModel, owner string, lease int64) {
	l.counts = map[string]int{owner: 1}
	l.ends = m.now + lease
}

func (m *model) atLeast(l *lockModel, lease int64) {
	if m.ttl(l) < lease {
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

// dies is when a waiter is taken for dead, if that is known.
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
		l.remove(0)
		dead++
	}
	if ours > 0 {
		m.takeBack(l, ours, 0)
	}
	return dead > 0
}

// state gives a sign of life for the n-th of the queue.
func (m *model) state(l *lockModel, n int) {
	owner := l.queue[n]
	l.alive[owner] = m.now + m.life
	l.deadlines[owner] = m.now + m.ttl(l) + int64(n+1)*m.wait
}

// restore puts an evicted waiter back and reports whether it did.
func (m *model) restore(l *lockModel, owner string) bool {
	if slices.Contains(l.queue, owner) || l.alive[owner] <= m.now {
		return false
	}
	l.queue = slices.Insert(l.queue, 0, owner)
	m.state(l, 0)
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

// end ends an operation of ours: stated says whether somebody gave a sign of life,
// moved whether the head is another one, which is told if it has not long to wait. It
// returns how many were told.
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
		return m.tell(l)
	}
	return 0
}

// tell tells the first of the queue that the lock is free.
func (m *model) tell(l *lockModel) int {
	m.told = append(m.told, wire.LockChannel(l.name)+":"+l.queue[0]+" "+wire.PayloadUnlocked)
	return 1
}

// turn is in what time it may be the turn of the n-th.
func (m *model) turn(l *lockModel, n int) int64 {
	if n >= 8 || !l.free() && l.ends == never {
		return -1
	}
	at := m.now + m.ttl(l)
	for _, owner := range l.queue[:n] {
		dies, known := l.dies(owner)
		if !known {
			return -1
		}
		at = max(at, dies)
	}
	return at - m.now
}

// attend is an attempt of who does not get the lock.
func (m *model) attend(l *lockModel, c claimModel) said {
	if !c.waits {
		if l.free() || l.ends == never {
			return said{freeIn: -1}
		}
		return said{freeIn: m.ttl(l)}
	}
	n := slices.Index(l.queue, c.owner)
	moved := n < 0
	if moved {
		n = len(l.queue)
		l.queue = append(l.queue, c.owner)
	}
	m.state(l, n)
	return said{placed: true, moved: moved, freeIn: m.turn(l, n)}
}

func (m *model) acquire(l *lockModel, claims []claimModel) []said {
	holder, stated, moved := -1, false, false
	for i, c := range claims {
		if l.counts[c.owner] > 0 {
			holder = i
			m.atLeast(l, c.lease)
		}
	}
	moved = m.purge(l)
	for _, c := range slices.Backward(claims) {
		if c.waits && m.restore(l, c.owner) {
			stated, moved = true, true
		}
	}
	if l.free() {
		holder = 0
		if len(l.queue) > 0 {
			holder = slices.IndexFunc(claims, func(c claimModel) bool { return c.owner == l.queue[0] })
		}
		if holder >= 0 {
			m.hold(l, claims[holder].owner, claims[holder].lease)
		}
	}
	if holder >= 0 {
		moved = m.leave(l, claims[holder].owner) || moved
	}
	answers := make([]said, len(claims))
	for i, c := range claims {
		if i == holder {
			answers[i].acquired = true
			continue
		}
		answers[i] = m.attend(l, c)
		stated = stated || c.waits
	}
	m.end(l, stated, moved)
	return answers
}

func (m *model) acquireNamed(l *lockModel, c claimModel, reentrant bool) said {
	ticket := m.tickets[c.ticket]
	if ticket != nil && ticket.says != "held" {
		return said{freeIn: -1}
	}
	holds := l.counts[c.owner] > 0
	again := holds && ticket != nil
	if holds && !again && !reentrant {
		return said{reentered: true}
	}
	moved, stated := m.purge(l), false
	if c.waits && m.restore(l, c.owner) {
		moved, stated = true, true
	}
	if !holds && !(l.free() && (len(l.queue) == 0 || l.queue[0] == c.owner)) {
		answer := m.attend(l, c)
		m.end(l, stated || c.waits, moved)
		return answer
	}
	m.tickets[c.ticket] = &ticketModel{"held", m.now + c.lease}
	if !again {
		l.counts[c.owner]++
	}
	m.atLeast(l, c.lease)
	moved = m.leave(l, c.owner) || moved
	m.end(l, stated, moved)
	return said{acquired: true}
}

// What a release or a hand-off comes to.

func freed(told int) string { return fmt.Sprintf("free, %d told", told) }

const (
	notHeld   = "not held"
	stillHeld = "still held"
	shared    = "shared"
	passedOn  = "passed on"
)

// open frees the lock.
func (m *model) open(l *lockModel) string {
	m.purge(l)
	clear(l.counts)
	l.tidy()
	return freed(m.end(l, false, true))
}

func (m *model) release(l *lockModel, c claimModel) string {
	switch l.counts[c.owner] {
	case 0:
		moved := m.purge(l)
		moved = m.leave(l, c.owner) || moved
		m.end(l, false, moved)
		return notHeld
	case 1:
		return m.open(l)
	default:
		return shared
	}
}

func (m *model) handOff(l *lockModel, from, to claimModel) string {
	switch {
	case l.counts[from.owner] > 1:
		return notHeld
	case l.counts[from.owner] == 0 && l.counts[to.owner] > 0:
		m.atLeast(l, to.lease)
		return passedOn
	case l.counts[from.owner] == 0:
		return notHeld
	}
	moved := m.purge(l)
	stated := m.restore(l, to.owner)
	if len(l.queue) > 0 && l.queue[0] != to.owner {
		return m.open(l)
	}
	m.hold(l, to.owner, to.lease)
	moved = m.leave(l, to.owner) || moved
	m.end(l, stated, moved)
	return passedOn
}

func (m *model) releaseNamed(l *lockModel, c claimModel, undo bool) string {
	ticket := m.tickets[c.ticket]
	switch {
	case ticket != nil && ticket.says == "0":
		return stillHeld
	case ticket != nil && ticket.says == "1":
		return freed(0)
	case ticket == nil && !c.any:
		return notHeld
	case l.counts[c.owner] == 0:
		delete(m.tickets, c.ticket)
		return notHeld
	}
	note := func(result string) {
		if undo && !c.any {
			delete(m.tickets, c.ticket)
		} else {
			m.tickets[c.ticket] = &ticketModel{result, m.now + m.latch}
		}
	}
	if l.counts[c.owner] > 1 {
		l.counts[c.owner]--
		note("0")
		return stillHeld
	}
	note("1")
	return m.open(l)
}

func (m *model) extend(l *lockModel, c claimModel, lease int64) bool {
	ticket := m.tickets[c.ticket]
	if l.counts[c.owner] == 0 || c.ticket != "" && (ticket == nil || ticket.says != "held") {
		return false
	}
	m.atLeast(l, lease)
	if ticket != nil && ticket.ends-m.now < lease {
		ticket.ends = m.now + lease
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

// beat gives signs of life for owners and tells which have a place and have to wait
// on.
func (m *model) beat(l *lockModel, owners []string) []bool {
	moved, stated := m.purge(l), false
	for _, owner := range slices.Backward(owners) {
		moved = m.restore(l, owner) || moved
	}
	kept := make([]bool, len(owners))
	for i, owner := range owners {
		if n := lastIndex(l.queue, owner); n >= 0 {
			m.state(l, n)
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

func lastIndex(s []string, v string) int {
	for n := len(s) - 1; n >= 0; n-- {
		if s[n] == v {
			return n
		}
	}
	return -1
}

// waiters is who waits and is alive, and until when.
func (m *model) waiters(l *lockModel) string {
	var b strings.Builder
	for _, owner := range l.queue {
		at, known := l.dies(owner)
		if !known {
			at = m.now + m.wait
		}
		if at > m.now {
			fmt.Fprintf(&b, "%s until %d, ", owner, at)
		}
	}
	return b.String()
}

// What Redisson does; now is by its client's clock.

func (m *model) javaEvict(l *lockModel, now int64) {
	for len(l.queue) > 0 {
		deadline, known := l.deadlines[l.queue[0]]
		if !known || deadline > now {
			return
		}
		delete(l.deadlines, l.queue[0])
		l.queue = l.queue[1:]
		l.tidy()
	}
}

func (m *model) javaAcquire(l *lockModel, owner string, lease, wait, now int64, waits bool) string {
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
		m.hold(l, owner, lease)
		return "acquired"
	case l.counts[owner] > 0:
		l.counts[owner]++
		l.ends = m.now + lease
		return "acquired"
	case !waits:
		return "1"
	}
	ttl := int64(-2)
	if !l.free() {
		ttl = -1
		if l.ends != never {
			ttl = m.ttl(l)
		}
	}
	if _, there := l.deadlines[owner]; there {
		return fmt.Sprint(max(0, ttl))
	}
	if n := len(l.queue); n > 0 && l.queue[n-1] != owner {
		if deadline, known := l.deadlines[l.queue[n-1]]; known {
			ttl = deadline - now
		}
	}
	l.deadlines[owner] = ttl + wait + now
	l.queue = append(l.queue, owner)
	return fmt.Sprint(ttl)
}

func (m *model) javaRelease(l *lockModel, owner string, lease, now int64) string {
	m.javaEvict(l, now)
	tell := func() string {
		if len(l.queue) > 0 {
			m.tell(l)
		}
		return "1"
	}
	switch {
	case l.free():
		return tell()
	case l.counts[owner] == 0:
		return "nil"
	case l.counts[owner] > 1:
		l.counts[owner]--
		l.ends = m.now + lease
		return "0"
	}
	clear(l.counts)
	l.tidy()
	return tell()
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

// dump is the state as dump.lua tells it.
func (m *model) dump() string {
	var lines []string
	line := func(key, kind string, items []string, ends int64) {
		if len(items) == 0 {
			return
		}
		until := "ever"
		if ends != never {
			until = fmt.Sprint(ends)
		}
		lines = append(lines, fmt.Sprintf("%s %s %s until %s", key, kind, strings.Join(items, " "), until))
	}
	for _, l := range m.locks {
		line(l.name, "hash", pairs(l.counts), l.ends)
		line(wire.FairQueue(l.name), "list", l.queue, l.queueEnds)
		line(wire.FairTimeouts(l.name), "zset", pairs(l.deadlines), l.deadlinesEnds)
		line(wire.FairAlive(l.name), "zset", pairs(l.alive), l.aliveEnds)
	}
	for key, ticket := range m.tickets {
		line(key, "string", []string{ticket.says}, ticket.ends)
	}
	slices.Sort(lines)
	for _, told := range m.told {
		lines = append(lines, "told "+told)
	}
	m.told = nil
	return strings.Join(lines, "\n")
}

func pairs[V int | int64](of map[string]V) []string {
	var all []string
	for k, v := range of {
		all = append(all, fmt.Sprintf("%s=%d", k, v))
	}
	slices.Sort(all)
	return all
}
