package semaphore_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/wire"
)

// world is the model of one semaphore: what the server should have and reply. It says
// what the scripts do, and not how. Times are in ms; what ends at a time is gone when that
// is past, and 0 stands for what does not end.
type world struct {
	now     int64
	exists  bool
	free    int64
	until   int64
	taken   set // when each permit expires
	line    set // since when each client waits
	alive   set // until when each is taken to be alive
	tickets map[string]ticket
	told    []int64
	// denied is a command that the next script may not use; failed, whether it has tried.
	denied string
	failed bool
}

// set is a sorted set, and when it ends.
type set struct {
	scores map[string]int64
	until  int64
}

type ticket struct {
	number int64
	reply  []int64
	until  int64
}

const (
	neverExpires = 922337203685477
	mostPermits  = 1<<31 - 1
	ticketLife   = 60_000
)

func newSet() set { return set{scores: map[string]int64{}} }

func newWorld() *world {
	return &world{taken: newSet(), line: newSet(), alive: newSet(), tickets: map[string]ticket{}}
}

func (s set) clone() set { return set{maps.Clone(s.scores), s.until} }

func (w *world) clone() *world {
	c := *w
	c.taken, c.line, c.alive = w.taken.clone(), w.line.clone(), w.alive.clone()
	c.tickets, c.told = maps.Clone(w.tickets), slices.Clone(w.told)
	return &c
}

// order is what is in a set, the lowest score first.
func (s *set) order() []string {
	return slices.SortedFunc(maps.Keys(s.scores), func(a, b string) int {
		return cmp.Or(cmp.Compare(s.scores[a], s.scores[b]), strings.Compare(a, b))
	})
}

func (s *set) has(member string) bool { _, ok := s.scores[member]; return ok }

// drop takes something out and reports whether it was there. An empty set is none.
func (s *set) drop(members ...string) (n int64) {
	for _, m := range members {
		if s.has(m) {
			delete(s.scores, m)
			n++
		}
	}
	if len(s.scores) == 0 {
		s.until = 0
	}
	return n
}

func (s *set) clear() { s.scores, s.until = map[string]int64{}, 0 }

// pass lets time pass.
func (w *world) pass(ms int64) {
	w.now += ms
	over := func(until int64) bool { return until != 0 && until < w.now }
	if over(w.until) {
		w.forget()
	}
	for _, s := range []*set{&w.taken, &w.line, &w.alive} {
		if over(s.until) {
			s.clear()
		}
	}
	maps.DeleteFunc(w.tickets, func(_ string, t ticket) bool { return over(t.until) })
}

// forget deletes the number of permits.
func (w *world) forget() { w.exists, w.free, w.until = false, 0, 0 }

// fault deletes a key, or lets it end after some ms.
func (w *world) fault(k string, ms int64, del bool) {
	if del {
		delete(w.tickets, k)
	}
	if k == key {
		if del {
			w.forget()
		} else if w.exists {
			w.until = w.now + ms
		}
	}
	for name, s := range map[string]*set{wire.PermitTimeouts(key): &w.taken, wire.SemaphoreWaiting(key): &w.line, wire.SemaphoreAlive(key): &w.alive} {
		switch {
		case name != k:
		case del:
			s.clear()
		case len(s.scores) > 0:
			s.until = w.now + ms
		}
	}
}

// put changes the number of free permits.
func (w *world) put(n int64) { w.exists, w.free = true, w.free+n }

func (w *world) tell(n int64) int64 {
	if n <= 0 || w.denied == "PUBLISH" {
		return 0
	}
	w.told = append(w.told, n)
	return lockstep.Subscribers
}

// numbered is a request with its number.
type numbered struct {
	ticket string
	number int64
}

// known returns the reply to a request that was delivered before: none, if a later one of
// its lane was.
func (w *world) known(c numbered) (reply []int64, known bool) {
	t, ok := w.tickets[c.ticket]
	if !ok || t.number < c.number {
		return nil, false
	}
	if t.number > c.number {
		return []int64{}, true
	}
	return t.reply, true
}

func (w *world) note(c numbered, reply ...int64) []int64 {
	w.tickets[c.ticket] = ticket{c.number, slices.Clone(reply), w.now + ticketLife}
	return reply
}

// refused reports whether the user may not change the number of permits. Then the
// request has not run.
func (w *world) refused(c numbered) bool {
	w.failed = w.denied == "INCRBY"
	if w.failed {
		w.note(numbered{c.ticket, c.number - 1})
	}
	return w.failed
}

// wish is one of several requests for permits that wait behind one another.
type wish struct {
	permits int64
	waited  int64
	lease   int64 // 0: never expires
	ids     []string
}

// ask is what one client asks for at once: nobody, if it does not wait.
type ask struct {
	client string
	place  int64
	wishes []wish
}

const toTheLine = 100 // ms after which others let one pass

// granted is what an ask came to.
type granted struct {
	n      int64
	taken  int64
	again  int64
	placed int64
	left   bool
}

// first is the client that has waited for the longest and lives. The dead before it are
// removed.
func (w *world) first() string {
	for _, client := range w.line.order() {
		if w.alive.scores[client] > w.now {
			return client
		}
		w.stepOut(client)
	}
	return ""
}

func (w *world) stepOut(client string) bool {
	w.alive.drop(client)
	return w.line.drop(client) > 0
}

// serve grants free permits in the order of the wishes, but none before the first in line
// if that has waited for longer. There is no line where there is no semaphore.
func (w *world) serve(a ask, free int64, exists bool) granted {
	g := granted{again: -1}
	first := w.first()
	for _, wish := range a.wishes {
		if first != "" && first != a.client && w.line.scores[first] < w.now-wish.waited {
			g.again = w.alive.scores[first] - w.now
			break
		}
		if g.taken+wish.permits > free {
			break
		}
		if first != "" && w.stepOut(a.client) {
			g.left = true
			first = w.first()
		}
		g.n, g.taken = g.n+1, g.taken+wish.permits
	}
	switch {
	case exists:
		g.placed = w.place(a, g.n)
	case a.client != "" && g.n < int64(len(a.wishes)):
		w.stepOut(a.client)
	}
	return g
}

// place puts a client in the line if its next wish has waited for long, or keeps it
// there.
func (w *world) place(a ask, next int64) (placed int64) {
	if a.client == "" || next == int64(len(a.wishes)) || a.wishes[next].waited < toTheLine {
		return 0
	}
	if !w.line.has(a.client) {
		w.line.scores[a.client] = w.now - a.wishes[next].waited
	}
	w.alive.scores[a.client] = w.now + a.place
	w.line.until, w.alive.until = max(w.line.until, w.now+a.place), max(w.alive.until, w.now+a.place)
	return 1
}

func (w *world) acquire(c numbered, a ask) []int64 {
	if reply, known := w.known(c); known {
		return reply
	}
	g := w.serve(a, w.free, w.exists)
	if g.n > 0 {
		if w.refused(c) {
			return nil
		}
		w.note(c, g.n, g.again, g.placed)
		w.put(-g.taken)
		if g.left {
			w.tell(w.free)
		}
	}
	return []int64{g.n, g.again, g.placed}
}

func (w *world) undo(c numbered, permits []int64) []int64 {
	before, known := w.known(c)
	if known && (len(before) == 0 || before[0] < 0) {
		return []int64{0}
	}
	w.note(c, -1)
	var n int64
	if known {
		for _, permits := range permits[:before[0]] {
			n += permits
		}
	}
	if n == 0 || !w.exists {
		return []int64{0}
	}
	w.put(n)
	w.tell(w.free)
	return []int64{n}
}

func (w *world) release(c numbered, n int64, ifExists bool, a ask) []int64 {
	if reply, known := w.known(c); known {
		return reply
	}
	if !w.exists && ifExists {
		return []int64{0}
	}
	if w.free+n > mostPermits {
		return []int64{-1}
	}
	g := w.serve(a, w.free+n, true)
	w.note(c, 1, 0, g.n, g.again, g.placed)
	w.put(n - g.taken)
	return []int64{1, w.tell(w.free), g.n, g.again, g.placed}
}

func (w *world) set(c numbered, n, ttl int64) []int64 {
	if reply, known := w.known(c); known {
		return reply
	}
	if w.exists {
		return []int64{0}
	}
	w.note(c, 1)
	w.put(n)
	if ttl > 0 {
		w.until = w.now + ttl
	}
	w.tell(n)
	return []int64{1}
}

func (w *world) add(c numbered, n int64, delta bool) []int64 {
	if reply, known := w.known(c); known {
		return reply
	}
	if w.free+n > mostPermits || w.free+n < -mostPermits {
		return []int64{-1}
	}
	w.note(c, 1)
	w.put(n)
	switch {
	case w.free <= 0:
	case delta:
		w.tell(n)
	default:
		w.tell(w.free)
	}
	return []int64{1}
}

func (w *world) drain(c numbered) []int64 {
	if reply, known := w.known(c); known {
		return reply
	}
	n := w.free
	if n != 0 {
		w.note(c, n)
		w.put(-n)
	}
	return []int64{n}
}

func (w *world) leave(client string) []int64 {
	if !w.stepOut(client) {
		return []int64{0}
	}
	w.tell(w.free)
	return []int64{1}
}

// expired are the permits that have expired and are still taken, for all that is known.
func (w *world) expired() (ids []string) {
	for id, at := range w.taken.scores {
		if at <= w.now {
			ids = append(ids, id)
		}
	}
	return ids
}

func (w *world) sweep() {
	w.put(w.taken.drop(w.expired()...))
}

func (w *world) held(id string) bool { return w.taken.scores[id] > w.now }

func (w *world) deadline(lease int64) int64 {
	if lease == 0 {
		return neverExpires
	}
	return w.now + lease
}

// give takes note of the permits of the first n wishes.
func (w *world) give(wishes []wish) {
	for _, wish := range wishes {
		for _, id := range wish.ids {
			w.taken.scores[id] = w.deadline(wish.lease)
		}
	}
	if len(wishes) > 0 {
		w.bind()
	}
}

// bind makes the permits that are taken last no longer than the semaphore.
func (w *world) bind() {
	if len(w.taken.scores) > 0 && w.until > w.now {
		w.taken.until = w.until
	}
}

// soon is when trying again may help a client that was not served.
func (w *world) soon(g granted, a ask) int64 {
	again := g.again
	if !w.exists || g.n == int64(len(a.wishes)) {
		return again
	}
	for _, at := range w.taken.scores {
		if left := max(0, at-w.now); at < neverExpires && (again < 0 || left < again) {
			again = left
		}
	}
	return again
}

func (w *world) permitAcquire(c numbered, a ask) []int64 {
	if reply, known := w.known(c); known {
		return reply
	}
	had := w.free
	if w.exists {
		if len(w.expired()) > 0 && w.denied == "INCRBY" {
			w.failed = true
			return nil
		}
		w.sweep()
	}
	g := w.serve(a, w.free, w.exists)
	if g.n > 0 {
		w.bind()
		if w.refused(c) {
			return nil
		}
		w.note(c, g.n, g.again, g.placed)
		w.put(-g.taken)
		w.give(a.wishes[:g.n])
	}
	if w.exists && (g.left || w.free+g.taken > had) {
		w.tell(w.free)
	}
	return []int64{g.n, w.soon(g, a), g.placed}
}

func (w *world) permitUndo(c numbered, ids []string) []int64 {
	before, known := w.known(c)
	if known && (len(before) == 0 || before[0] < 0) {
		return []int64{0}
	}
	w.note(c, -1)
	n := w.taken.drop(ids...)
	if n > 0 && w.exists {
		w.put(n)
		w.tell(w.free)
	}
	return []int64{n}
}

func (w *world) permitRelease(c numbered, ids []string, a ask) []int64 {
	if reply, known := w.known(c); known {
		return reply
	}
	for _, id := range ids {
		if !w.held(id) {
			return []int64{0}
		}
	}
	n := int64(len(ids))
	g := w.serve(a, w.free+n, true)
	w.note(c, 1, 0, g.n, 0, g.placed)
	if g.n > 0 {
		w.bind()
	}
	w.taken.drop(ids...)
	w.put(n - g.taken)
	w.give(a.wishes[:g.n])
	told := w.free
	if told > 0 && n > 1 && g.n == 0 {
		told = n
	}
	again := int64(0)
	if g.n < int64(len(a.wishes)) {
		again = w.soon(g, a)
	}
	return []int64{1, w.tell(told), g.n, again, g.placed}
}

func (w *world) permitSet(c numbered, wanted int64) []int64 {
	if reply, known := w.known(c); known {
		return reply
	}
	change := wanted - w.free - int64(len(w.taken.scores))
	if w.exists && change == 0 {
		return []int64{0}
	}
	w.note(c, 1)
	w.put(change)
	if w.free > 0 {
		w.tell(wanted)
	}
	return []int64{1}
}

func (w *world) permitCounts() []int64 {
	expired := int64(len(w.expired()))
	return []int64{w.free + expired, int64(len(w.taken.scores)) - expired}
}

func (w *world) permitLeft(id string) []int64 {
	switch at := w.taken.scores[id]; {
	case !w.held(id):
		return []int64{-2}
	case at == neverExpires:
		return []int64{-1}
	default:
		return []int64{at - w.now}
	}
}

func (w *world) permitExtend(id string, lease int64, least bool) []int64 {
	if !w.held(id) {
		return []int64{0}
	}
	if at := w.deadline(lease); !least || at > w.taken.scores[id] {
		w.taken.scores[id] = at
	}
	return []int64{1}
}

func (w *world) permitRenew(ids []string, lease int64) (held []int64) {
	for _, id := range ids {
		held = append(held, w.permitExtend(id, lease, true)...)
	}
	return held
}

// What Redisson does.

func (w *world) javaTell(n int64) { w.told = append(w.told, n) }

func (w *world) javaAcquire(n int64) []int64 {
	if !w.exists || w.free < n {
		return []int64{0}
	}
	w.put(-n)
	return []int64{1}
}

func (w *world) javaRelease(n int64) []int64 {
	w.put(n)
	w.javaTell(w.free)
	return []int64{1}
}

func (w *world) javaDrain() []int64 {
	if !w.exists {
		return []int64{0}
	}
	n := w.free
	w.free, w.until = 0, 0
	return []int64{n}
}

func (w *world) javaAdd(n int64, delta bool) []int64 {
	w.put(n)
	w.until = 0
	if !delta {
		w.javaTell(w.free)
	} else if n > 0 {
		w.javaTell(n)
	}
	return []int64{1}
}

// javaSweep takes back what has expired by the clock of a client, at most so many.
func (w *world) javaSweep(now int64, most int) {
	var ids []string
	for _, id := range w.taken.order() {
		if w.taken.scores[id] <= now && len(ids) < most {
			ids = append(ids, id)
		}
	}
	if len(ids) > 0 {
		w.put(w.taken.drop(ids...))
		if w.free > 0 {
			w.javaTell(w.free)
		}
	}
}

func (w *world) javaPermitAcquire(now, deadline int64, ids []string) []int64 {
	w.javaSweep(now, len(ids))
	if !w.exists || w.free < int64(len(ids)) {
		return []int64{0}
	}
	w.put(-int64(len(ids)))
	for _, id := range ids {
		w.taken.scores[id] = deadline
	}
	if w.until > w.now {
		w.taken.until = w.until
	}
	return []int64{1}
}

func (w *world) javaPermitRelease(now int64, id string) []int64 {
	if !w.taken.has(id) {
		return []int64{0}
	}
	at := w.taken.scores[id]
	w.taken.drop(id)
	w.javaRelease(1)
	if at > now {
		return []int64{1}
	}
	return []int64{0}
}

func (w *world) javaPermitSweep(now int64) []int64 {
	w.javaSweep(now, len(w.taken.scores))
	return []int64{w.free}
}

// sum is how many permits there are.
func (w *world) sum() int64 { return w.free + int64(len(w.taken.scores)) }

// state is everything the server should have, and the messages since the last call.
func (w *world) state() (s lockstep.State) {
	if w.exists {
		s.Put(key, "string", w.until, itoa(w.free))
	}
	s.Put(wire.PermitTimeouts(key), "zset", w.taken.until, lockstep.Pairs(w.taken.scores)...)
	s.Put(wire.SemaphoreWaiting(key), "zset", w.line.until, lockstep.Pairs(w.line.scores)...)
	s.Put(wire.SemaphoreAlive(key), "zset", w.alive.until, lockstep.Pairs(w.alive.scores)...)
	for name, t := range w.tickets {
		s.Put(name, "string", t.until, strings.Trim(fmt.Sprint(append([]int64{t.number}, t.reply...)), "[]"))
	}
	for _, n := range w.told {
		s.Told = append(s.Told, fmt.Sprint(wire.SemaphoreChannel(key), " ", n))
	}
	w.told = nil
	return s
}
