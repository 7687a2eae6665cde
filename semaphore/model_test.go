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

// world models one semaphore: the expected keys and replies of the server. Times are in ms.
// A value exists until its time has passed; 0 means that it does not expire.
type world struct {
	now        int64
	exists     bool
	free       int64
	until      int64
	taken      set                 // acquired permits, by expiry
	queue      set                 // clients, by the time since when they wait
	heartbeats set                 // clients, by the time at which the heartbeat is overdue
	memory     map[string]requests // last requests, by the key of the client
	created    int64               // until when the server knows that the semaphore is new
	messages   []int64
	// denied is a command that the next script may not use; failed reports that it has tried.
	denied string
	failed bool
	// idle is what the next script asks for as the lifetime of a semaphore that is not used, 0 if for nothing.
	// kept says what a script last did about it, and unused that the semaphore has just expired.
	idle   int64
	kept   string
	unused bool
}

// set is a sorted set and its expiry.
type set struct {
	scores map[string]int64
	until  int64
}

// requests are the last requests of a client, by slot.
type requests struct {
	slots map[string]cachedReply
	until int64
}

// cachedReply is the last request of a slot.
type cachedReply struct {
	n     int64 // sequence number
	at    int64 // when it ran
	reply []int64
}

const (
	noExpiry       = 922337203685477
	maxPermits     = 1<<31 - 1
	retryTime      = 300_000
	clockError     = 60_000
	cacheTTL       = retryTime + clockError
	lifetime       = cacheTTL + 120_000 // of the cached replies
	hundredSeconds = 100_000            // the first request of a slot in them extends the life of the cached replies
	bargingMillis  = 100                // ms after which a request is no longer overtaken
)

var createdKey = wire.SemaphoreCreated(key)

func newSet() set { return set{scores: map[string]int64{}} }

func newWorld() *world {
	return &world{taken: newSet(), queue: newSet(), heartbeats: newSet(), memory: map[string]requests{}}
}

func (s set) clone() set { return set{maps.Clone(s.scores), s.until} }

func (w *world) clone() *world {
	c := *w
	c.taken, c.queue, c.heartbeats = w.taken.clone(), w.queue.clone(), w.heartbeats.clone()
	c.memory, c.messages = map[string]requests{}, slices.Clone(w.messages)
	for k, m := range w.memory {
		c.memory[k] = requests{maps.Clone(m.slots), m.until}
	}
	return &c
}

// order returns the members of a set, the lowest score first.
func (s *set) order() []string {
	return slices.SortedFunc(maps.Keys(s.scores), func(a, b string) int {
		return cmp.Or(cmp.Compare(s.scores[a], s.scores[b]), strings.Compare(a, b))
	})
}

func (s *set) has(member string) bool { _, ok := s.scores[member]; return ok }

// drop removes members and returns how many existed. An empty set is deleted.
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

// advance advances the clock.
func (w *world) advance(ms int64) {
	w.now += ms
	over := func(until int64) bool { return until != 0 && until < w.now }
	w.unused = over(w.until) && w.kept != ""
	if over(w.until) {
		w.remove()
	}
	for _, s := range []*set{&w.taken, &w.queue, &w.heartbeats} {
		if over(s.until) {
			s.clear()
		}
	}
	if over(w.created) {
		w.created = 0
	}
	maps.DeleteFunc(w.memory, func(_ string, m requests) bool { return over(m.until) })
}

// remove deletes the number of free permits.
func (w *world) remove() { w.exists, w.free, w.until = false, 0, 0 }

// fault deletes a key, or limits its life to some ms.
func (w *world) fault(k string, ms int64, del bool) {
	if del {
		delete(w.memory, k)
	}
	if k == key {
		if del {
			w.remove()
		} else if w.exists {
			w.until = w.now + ms
		}
	}
	for name, s := range map[string]*set{wire.PermitTimeouts(key): &w.taken, wire.SemaphoreWaiting(key): &w.queue, wire.SemaphoreAlive(key): &w.heartbeats} {
		switch {
		case name != k:
		case del:
			s.clear()
		case len(s.scores) > 0:
			s.until = w.now + ms
		}
	}
}

// change changes the number of free permits by n.
func (w *world) change(n int64) { w.exists, w.free = true, w.free+n }

func (w *world) publish(n int64) int64 {
	if n <= 0 || w.denied == "PUBLISH" {
		return 0
	}
	w.messages = append(w.messages, n)
	return lockstep.Subscribers
}

// create changes the number of free permits by n, and notes whether the semaphore is new.
func (w *world) create(n int64) {
	if !w.exists {
		w.created = w.now + cacheTTL
	}
	w.change(n)
}

// sequence is the sequence number of a request, the key and the slot of its cached reply, and the
// time after which it must not run, of which least must be left.
type sequence struct {
	key, slot       string
	n               int64
	notAfter, least int64
}

// cached returns the reply to a request that must not run: a duplicate or a late one.
func (w *world) cached(seq sequence) ([]int64, bool) {
	if reply, duplicate := w.last(seq); duplicate {
		return reply, true
	}
	if left := seq.notAfter - w.now; left < seq.least || left >= cacheTTL {
		return []int64{-1, w.now}, true
	}
	return nil, false
}

// last returns the reply to a duplicate, which is empty if a later request of the slot was
// delivered.
func (w *world) last(seq sequence) (reply []int64, duplicate bool) {
	r, ok := w.memory[seq.key].slots[seq.slot]
	if !ok || r.n < seq.n {
		return nil, false
	}
	if r.n > seq.n {
		return []int64{}, true
	}
	return r.reply, true
}

func (w *world) cacheReply(seq sequence, reply ...int64) []int64 {
	if m := w.memory[seq.key]; m.slots[seq.slot].at/hundredSeconds != w.now/hundredSeconds {
		w.memory[seq.key] = requests{m.slots, w.now + lifetime}
	}
	w.note(seq, w.now, reply...)
	return reply
}

// note notes that a request has run.
func (w *world) note(seq sequence, at int64, reply ...int64) {
	m := w.memory[seq.key]
	if m.slots == nil {
		m.slots = map[string]cachedReply{}
	}
	m.slots[seq.slot] = cachedReply{seq.n, at, slices.Clone(reply)}
	w.memory[seq.key] = m
}

// refused reports whether the user may not change the number of permits, in which case the
// request has not run.
func (w *world) refused(seq sequence) bool {
	w.failed = w.denied == "INCRBY"
	if w.failed {
		w.cacheReply(sequence{key: seq.key, slot: seq.slot, n: seq.n - 1}, -1)
	}
	return w.failed
}

// request is one request of a batch.
type request struct {
	permits int64
	waited  int64
	lease   int64 // 0: never expires
	ids     []string
}

// batch is the requests that one client sends at once. The client is "" if they do not wait,
// and timeout is the ms until its next heartbeat is overdue.
// A semaphore that does not exist is created with size permits, unless that is 0.
type batch struct {
	client   string
	timeout  int64
	size     int64
	requests []request
}

// result is the result of a batch.
type result struct {
	n       int64
	taken   int64
	retryIn int64
	queued  int64
	left    bool
}

// first returns the first client of the wait queue whose heartbeat is not overdue, and removes
// those before it.
func (w *world) first() string {
	for _, client := range w.queue.order() {
		if w.heartbeats.scores[client] > w.now {
			return client
		}
		w.dequeue(client)
	}
	return ""
}

func (w *world) dequeue(client string) bool {
	w.heartbeats.drop(client)
	return w.queue.drop(client) > 0
}

// serve serves a batch, in order, but no request before an older one in the wait queue.
// Without a semaphore, or for more than the most permits, clients do not join the queue.
func (w *world) serve(b batch, free int64, exists bool, most int64) result {
	g := result{retryIn: -1}
	if !exists {
		g.queued = -1
	}
	first := w.first()
	for _, request := range b.requests {
		if first != "" && first != b.client && w.queue.scores[first] < w.now-request.waited {
			g.retryIn = w.heartbeats.scores[first] - w.now
			break
		}
		if g.taken+request.permits > free {
			break
		}
		if first != "" && w.dequeue(b.client) {
			g.left = true
			first = w.first()
		}
		g.n, g.taken = g.n+1, g.taken+request.permits
	}
	switch {
	case g.n == int64(len(b.requests)):
	case exists && b.requests[g.n].permits <= most:
		g.queued = w.enqueue(b, g.n)
	case b.client != "":
		g.left = w.dequeue(b.client) || g.left
	}
	return g
}

// enqueue adds a client to the wait queue, or keeps it there, if its next request has waited
// for long.
func (w *world) enqueue(b batch, next int64) (queued int64) {
	if b.client == "" || b.requests[next].waited < bargingMillis {
		return 0
	}
	if !w.queue.has(b.client) {
		w.queue.scores[b.client] = w.now - b.requests[next].waited
	}
	w.heartbeats.scores[b.client] = w.now + b.timeout
	w.queue.until, w.heartbeats.until = max(w.queue.until, w.now+b.timeout), max(w.heartbeats.until, w.now+b.timeout)
	return 1
}

func (w *world) acquire(seq sequence, b batch) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	created := w.createMissing(b.size)
	if w.failed {
		return nil
	}
	g := w.serve(b, w.free, w.exists, maxPermits)
	if g.n > 0 {
		if w.refused(seq) {
			return nil
		}
		w.change(-g.taken)
	}
	if created || g.n > 0 && g.left {
		w.publish(w.free)
	}
	return w.cacheReply(seq, g.n, g.retryIn, g.queued)
}

func (w *world) undo(seq sequence, permits []int64) []int64 {
	before, duplicate := w.last(seq)
	if duplicate && (len(before) == 0 || before[0] < 0) {
		return []int64{0}
	}
	recreated := w.created-cacheTTL > w.memory[seq.key].slots[seq.slot].at
	w.cacheReply(seq, -1)
	var n int64
	if duplicate {
		for _, permits := range permits[:before[0]] {
			n += permits
		}
	}
	if n == 0 || !w.exists || recreated {
		return []int64{0}
	}
	w.change(n)
	w.publish(w.free)
	return []int64{n}
}

func (w *world) release(seq sequence, n int64, ifExists bool, b batch) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	if !w.exists && ifExists {
		return w.cacheReply(seq, 0)
	}
	if !w.exists && b.size > 0 {
		n = b.size
	}
	if w.free+n > maxPermits {
		return w.cacheReply(seq, -1)
	}
	g := w.serve(b, w.free+n, true, maxPermits)
	w.cacheReply(seq, 1, 0, g.n, g.retryIn, g.queued)
	w.create(n - g.taken)
	return []int64{1, w.publish(w.free), g.n, g.retryIn, g.queued}
}

func (w *world) set(seq sequence, n, ttl int64) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	if w.exists {
		return w.cacheReply(seq, 0)
	}
	w.cacheReply(seq, 1)
	w.create(n)
	if ttl > 0 {
		w.until = w.now + ttl
	}
	w.publish(n)
	return []int64{1}
}

func (w *world) add(seq sequence, n, size int64, delta bool) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	if !w.exists && size > 0 {
		n += size - int64(len(w.taken.scores))
	}
	if w.free+n > maxPermits || w.free+n < -maxPermits {
		return w.cacheReply(seq, -1)
	}
	w.keepTaken()
	w.cacheReply(seq, 1)
	w.create(n)
	switch {
	case w.free <= 0:
	case delta:
		w.publish(n)
	default:
		w.publish(w.free)
	}
	return []int64{1}
}

func (w *world) drain(seq sequence, size int64) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	w.createMissing(size)
	n := w.free
	if n != 0 {
		w.change(-n)
	}
	return w.cacheReply(seq, n)
}

// leave removes a client from the queue, or moves it to the place of its next request, unless that has
// not waited for long.
func (w *world) leave(client string, next *batch) []int64 {
	switch {
	case next == nil:
		if !w.dequeue(client) {
			return []int64{0}
		}
	case !w.queue.has(client):
		return []int64{0}
	default:
		w.queue.scores[client] = max(w.queue.scores[client], w.now-next.requests[0].waited)
		w.enqueue(*next, 0)
	}
	w.publish(w.free)
	return []int64{1}
}

// total returns the number of permits, free and acquired.
func (w *world) total() int64 { return w.free + int64(len(w.taken.scores)) }

// state returns the expected keys of the server and the messages since the last call.
func (w *world) state() (s lockstep.State) {
	if w.exists {
		s.Put(key, "string", w.until, itoa(w.free))
	}
	s.Put(wire.PermitTimeouts(key), "zset", w.taken.until, lockstep.Pairs(w.taken.scores)...)
	s.Put(wire.SemaphoreWaiting(key), "zset", w.queue.until, lockstep.Pairs(w.queue.scores)...)
	s.Put(wire.SemaphoreAlive(key), "zset", w.heartbeats.until, lockstep.Pairs(w.heartbeats.scores)...)
	for name, m := range w.memory {
		var fields []string
		for slot, r := range m.slots {
			entry := append([]int64{r.n}, timeOf(r.at)...)
			fields = append(fields, slot, numbers(append(entry, r.reply...)))
		}
		s.Put(name, "hash", m.until, fields...)
	}
	if w.created != 0 {
		s.Put(createdKey, "string", w.created, numbers(timeOf(w.created-cacheTTL)))
	}
	for _, n := range w.messages {
		s.Told = append(s.Told, fmt.Sprint(wire.SemaphoreChannel(key), " ", n))
	}
	w.messages = nil
	return s
}

// keep sets the lifetime of a semaphore that is not used.
func (w *world) keep() {
	if w.idle == 0 || !w.exists {
		return
	}
	least, apart := w.idle, false
	w.kept = "for idle time"
	if n := len(w.taken.scores); n > 0 {
		last := w.taken.scores[w.taken.order()[n-1]]
		if last == noExpiry {
			w.kept, w.until, w.taken.until = "for ever", 0, 0
			return
		}
		if left := last - w.now; left > least {
			w.kept, least = "for lease", left
		}
		apart = w.taken.until < w.until || w.taken.until > w.until+1000
	}
	until := w.now + least
	if !apart && until <= w.until && w.until <= until+w.idle/10 {
		w.kept = "already"
		return
	}
	w.until = until + w.idle/10
	if len(w.taken.scores) > 0 {
		w.taken.until = w.until
	}
}

// timeOf returns a time as TIME does; 0 stands for none.
func timeOf(ms int64) []int64 {
	if ms == 0 {
		return []int64{0, 0}
	}
	return []int64{ms / 1000, ms%1000*1000 + 999}
}

func numbers(list []int64) string { return strings.Trim(fmt.Sprint(list), "[]") }

// createMissing creates the semaphore with this total if it does not exist, unless that is 0, and
// reports whether it did. Acquired permits that have outlived a semaphore are among them.
func (w *world) createMissing(total int64) bool {
	if w.exists || total == 0 {
		return false
	}
	w.keepTaken()
	w.created = w.now + cacheTTL
	if w.failed = w.denied == "INCRBY"; !w.failed {
		w.change(total - int64(len(w.taken.scores)))
	}
	return !w.failed
}

// keepTaken keeps acquired permits that have outlived their semaphore from expiring with it.
func (w *world) keepTaken() {
	if !w.exists {
		w.taken.until = 0
	}
}

// resize sets the total number of permits.
func (w *world) resize(seq sequence, wanted int64) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	delta := wanted - w.total()
	if w.exists && delta == 0 {
		return w.cacheReply(seq, 0)
	}
	w.keepTaken()
	w.cacheReply(seq, 1)
	w.create(delta)
	if w.free > 0 {
		w.publish(wanted)
	}
	return []int64{1}
}

func (w *world) delete(seq sequence) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	w.queue.clear()
	w.heartbeats.clear()
	if !w.exists && len(w.taken.scores) == 0 {
		return w.cacheReply(seq, 0)
	}
	w.created = w.now + cacheTTL
	w.remove()
	w.taken.clear()
	return w.cacheReply(seq, 1)
}

// stats returns the numbers of free and acquired permits and of waiting clients.
func (w *world) stats() []int64 {
	waiting := int64(0)
	for _, until := range w.heartbeats.scores {
		if until > w.now {
			waiting++
		}
	}
	expired := int64(len(w.expired()))
	return []int64{w.free + expired, int64(len(w.taken.scores)) - expired, waiting}
}
