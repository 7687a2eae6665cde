package engine

import (
	"context"
	"hash/maphash"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
)

const (
	shardCount = 32
	// maxFree is the number of unused entries that a shard keeps for reuse.
	maxFree = 64
	// maxTurns is the number of turns that a shard remembers.
	maxTurns = 256
)

// Config is the configuration of Queues.
type Config struct {
	Wheel *watchdog.Wheel
	// Subscribe is the hub's, and returns how to end the subscription.
	Subscribe func(channel string, l hub.Listener) (unsubscribe func(), confirmed bool)
	// Subscribed reports whether the server counts this process among the subscribers of a channel.
	Subscribed func(channel string) bool
	// SubscribeOwn is Subscribe for a channel that will not be needed again.
	SubscribeOwn func(channel string, l hub.Listener) (unsubscribe func())
	// Turn is how long the process may keep a key that others may wait for.
	Turn time.Duration
	// Go runs f in the background and reports whether it does; it does not while the client
	// is closing. The context ends then.
	Go func(f func(ctx context.Context)) bool
	// OnWait is called when a caller begins to wait.
	OnWait func()
	// Open ends every wait with lock.ErrClosed when it ends.
	Open context.Context
}

// Queues are the queues of one client, by key.
//
// A queue is first in, first out, and one attempt is in flight per key and process: only the head sends
// requests, and a message wakes only the head. First attempts for parts of something (Waiting.Counting)
// run beside each other while nobody waits. One attempt can be made for several waiters (Waiting.Group).
// A holder can pass the key on to the next waiter of the process (Pass): no attempt, no message, no gap.
//
// Where the server keeps the queue (Waiting.Ordered), each waiter makes an attempt when it comes, which
// registers it there, and this queue has the same order.
type Queues struct {
	cfg    Config
	seed   maphash.Seed
	shards [shardCount]shard
}

type shard struct {
	mu      sync.Mutex
	entries map[Key]*entry
	free    []*entry
	turns   map[Key]pastTurn // of keys without an entry that other processes may wait for
}

// init makes the zero Queues ready for use.
func (q *Queues) init(cfg Config) {
	q.cfg = cfg
	q.seed = maphash.MakeSeed()

	// It wakes all waiters, so that each waits for two channels instead of three.
	context.AfterFunc(q.cfg.Open, func() {
		for i := range q.shards {
			s := &q.shards[i]
			s.mu.Lock()
			for _, e := range s.entries {
				for w := e.first; w != nil; w = w.next {
					w.signal()
				}
			}
			s.mu.Unlock()
		}
	})
}

// entry is the state of one key while callers of this process hold it, wait for it or try
// to acquire it. The mutex of its shard guards it.
type entry struct {
	queues *Queues
	shard  *shard
	timer  watchdog.Timer
	keyState
}

// keyState is the part of an entry that is zero when the entry is reused.
type keyState struct {
	key     Key
	holders []Acquirer
	refs    int32 // holders, waiters, and attempts outside the queue

	unregistered int32 // waiters that have to make an attempt wherever they are in the list
	first, last  *waiter
	unsubscribe  func() // nil: not subscribed to the channel of all waiters
	attempting   bool
	outage       bool            // an attempt has failed: unregistered waiters wait for the timer
	cause        telemetry.Cause // the first reason for another attempt of the head, if any

	tryAt  time.Time // of the next attempt of the head that nothing else causes, if the timer is set
	turn   turn
	opened time.Duration // since started: when the key was left open, or its schedule began; 0: never
}

// shard returns the shard of key.
func (q *Queues) shard(key *Key) *shard {
	return &q.shards[maphash.Comparable(q.seed, *key)%shardCount]
}

// entryLocked returns the entry of key with one more reference.
func (s *shard) entryLocked(q *Queues, key *Key) *entry {
	e := s.entries[*key]
	if e == nil {
		if n := len(s.free); n > 0 {
			e = s.free[n-1]
			s.free = s.free[:n-1]
		} else {
			e = &entry{queues: q, shard: s}
		}
		if s.entries == nil {
			s.entries = make(map[Key]*entry)
		}
		e.key = *key
		s.entries[e.key] = e
		if past, ok := s.turns[e.key]; ok {
			delete(s.turns, e.key)
			e.turn = past.turn
			if time.Since(started)-past.at > loopGap {
				e.turn.since = 0
				e.turn.ahead = 0
				e.turn.yielded = 0
			}
		}
	}

	e.refs++
	return e
}

// with calls f with the entry of key, with its mutex locked, unless no caller of this process has to do
// with the key.
func (q *Queues) with(key Key, f func(e *entry)) {
	s := q.shard(&key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil {
		f(e)
	}
}

// unrefLocked drops a reference.
func (e *entry) unrefLocked() {
	e.refs--
	if e.refs > 0 {
		return
	}

	if !e.tryAt.IsZero() {
		e.queues.cfg.Wheel.Cancel(&e.timer)
	}
	s := e.shard
	delete(s.entries, e.key)
	if e.turn.others > 0 {
		if s.turns == nil || len(s.turns) >= maxTurns {
			s.turns = make(map[Key]pastTurn)
		}
		s.turns[e.key] = pastTurn{e.turn, time.Since(started)}
	}

	// A late event may find the entry in use for another key, where it costs an attempt.
	clear(e.holders[:cap(e.holders)])
	e.keyState = keyState{holders: e.holders[:0]}
	if len(s.free) < maxFree {
		s.free = append(s.free, e)
	}
}

// Holders returns the holders of key in this process, the latest last.
func (q *Queues) Holders(key Key) (holders []Acquirer) {
	q.with(key, func(e *entry) { holders = slices.Clone(e.holders) })
	return holders
}

// Together makes one attempt for requests of different keys: in their order, for those before the first
// key that this process holds, waits for or leaves to others, or for all of them if they say Once. It calls try with their
// number, unless that is 0, and try returns how many of them have acquired, from the first on. Together
// returns the same number; these are holders until Released.
func (q *Queues) Together(reqs []Request, try func(n int) (acquired int)) (acquired int) {
	entries := make([]*entry, 0, 4) // more are rare, and take an allocation
	for i := range reqs {
		req := &reqs[i]
		s := q.shard(&req.Key)
		s.mu.Lock()
		e := s.entryLocked(q, &req.Key)
		free := req.Once || !e.yieldsLocked(req) && e.startFirstLocked(req)
		if !free {
			e.unrefLocked()
		}
		s.mu.Unlock()
		if !free {
			break
		}
		entries = append(entries, e)
	}

	if len(entries) == 0 {
		return 0
	}

	acquired = try(len(entries))
	for i, e := range entries {
		e.shard.mu.Lock()
		e.finishLocked(&reqs[i], !reqs[i].Once, i < acquired)
		e.shard.mu.Unlock()
	}

	return acquired
}

// Pass makes the first waiter of key a holder in the place of from, its only holder, and reports whether
// it did. It calls give, with the mutex of the queue locked, which reports whether that waiter can have
// what from has. If Pass reports false, the caller asks the server again, or releases the key and calls
// Released.
func (q *Queues) Pass(key Key, from Acquirer, give func(next Acquirer) bool) (passed bool) {
	q.with(key, func(e *entry) { passed = e.passLocked(from, give) })
	return passed
}

func (e *entry) passLocked(from Acquirer, give func(next Acquirer) bool) (passed bool) {
	w := e.nextLocked(from)
	if w == nil {
		return false
	}

	length := e.queues.cfg.Turn
	if !w.req.Ordered && e.turn.yieldIfOver(length, true) {
		return false
	}
	if !w.req.Ordered && length == 0 || !give(w.req.Acquirer) {
		return false
	}

	e.turn.acquired()
	e.removeLocked(w)
	w.state = granted
	w.handed = true
	w.signal()
	e.holders[0] = w.req.Acquirer
	e.unrefLocked()
	return true
}

// EndTurn is called before a holder releases key without Pass: if the turn of this process is over, it leaves
// the key to others.
func (q *Queues) EndTurn(key Key, from Acquirer) {
	q.with(key, func(e *entry) {
		if w := e.nextLocked(from); w != nil && !w.req.Ordered {
			e.turn.yieldIfOver(q.cfg.Turn, true)
		}
	})
}

// nextLocked returns the waiter that can have what from has, or nil.
func (e *entry) nextLocked(from Acquirer) *waiter {
	if len(e.holders) != 1 || e.holders[0] != from || e.turn.yielded != 0 {
		return nil
	}
	w := e.first
	if w == nil || w.state != waiting || w.unregistered || e.opensLocked() {
		return nil
	}
	return w
}

// Waited reports whether a caller of this process waits for key.
func (q *Queues) Waited(key Key) (waited bool) {
	q.with(key, func(e *entry) { waited = e.first != nil })
	return waited
}

// Waiters returns up to maxGroup waiters of key that the server has in its queue, the first first.
func (q *Queues) Waiters(key Key) (waiters []Acquirer) {
	q.with(key, func(e *entry) {
		for w := e.first; w != nil && !w.unregistered && len(waiters) < maxGroup; w = w.next {
			waiters = append(waiters, w.req.Acquirer)
		}
	})
	return waiters
}

// LeavesOpen reports whether it is time for a release that leaves the key open to pollers, with the
// payload LeftOpen.
func (q *Queues) LeavesOpen(key Key) (open bool) {
	q.with(key, func(e *entry) { open = e.opensLocked() })
	return open
}

// Offer lets try make an attempt for the waiters at the head of a queue, in the request that gives back a
// part of what they wait for. It reports false, without a call of try, if there are no waiters, an attempt
// is under way, or it is time to release for all processes. The requests of that key have Group and
// Counting set.
func (q *Queues) Offer(key Key, try func(all []Acquirer) []Answer) bool {
	s := q.shard(&key)
	s.mu.Lock()
	e := s.entries[key]
	if e != nil && e.first != nil {
		e.turn.yieldIfOver(q.cfg.Turn, true)
	}
	if e == nil || e.first == nil || e.attempting || e.turn.yielded != 0 {
		if e != nil {
			e.turn.echo = e.unsubscribe != nil
		}
		s.mu.Unlock()
		return false
	}

	batch := e.startAttemptLocked(e.first)
	s.mu.Unlock()

	answers := make([]Answer, len(batch))
	defer func() { e.attempted(batch, answers, true) }() // an exporter may panic
	answers = try(acquirers(batch))
	return true
}

// Released ends the hold of a, whether released or lost. If this process leaves the key to others that may
// wait, its waiters pause; otherwise its head tries at once if that can succeed.
func (q *Queues) Released(key Key, a Acquirer, how Release) {
	q.with(key, func(e *entry) { e.releasedLocked(a, how) })
}

// Ended is Released for a hold that was lost, or ends without a release that counts who hears of it.
func (q *Queues) Ended(key Key, a Acquirer) { q.Released(key, a, Release{Receivers: -1}) }

func (e *entry) releasedLocked(a Acquirer, how Release) {
	if i := slices.Index(e.holders, a); i >= 0 {
		e.holders = slices.Delete(e.holders, i, i+1)
	}
	if how.leftOpen {
		e.leaveOpenLocked()
	}
	e.turn.heardBy(how.Receivers, how.Receivers > 0 && e.queues.cfg.Subscribed(a.Channel()))

	if how.State == StillHeld || e.first != nil && len(e.holders) > 0 && !e.first.req.Shareable {
		e.turn.yielded = 0 // there are other holders, and no message to wait for
	} else if how.elsewhere {
		if e.first != nil {
			e.first.signal() // to subscribe
		}
	} else if !e.waitsLocked() {
		e.nudgeLocked(telemetry.Local)
	}

	e.unrefLocked()
}

// Gave is called when a caller has given back a part of what others take, in a request that made no attempt
// for waiters, and whose message so many subscribers have heard.
func (q *Queues) Gave(key Key, channel string, receivers int) {
	s := q.shard(&key)
	s.mu.Lock()
	defer s.mu.Unlock()

	e := s.entryLocked(q, &key)
	yielded := e.turn.yielded != 0
	e.turn.heardBy(receivers, receivers > 0 && q.cfg.Subscribed(channel))
	if !e.waitsLocked() && (yielded || receivers == 0) {
		e.nudgeLocked(telemetry.Local) // no message comes, or it was ignored as the own one
	}
	e.unrefLocked()
}

// Holds yields what callers of this process hold and wait for. The mutex of a shard is held
// meanwhile.
func (q *Queues) Holds() iter.Seq[session.Hold] {
	return func(yield func(session.Hold) bool) {
		for i := range q.shards {
			if !q.shards[i].holds(yield) {
				return
			}
		}
	}
}

// holds yields the holds of a shard, and reports false if yield did.
func (s *shard) holds(yield func(session.Hold) bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	for _, e := range s.entries {
		for _, a := range e.holders {
			for h := range a.Holds() {
				if !yield(h) {
					return false
				}
			}
		}
		for w := e.first; w != nil; w = w.next {
			h := w.req.Acquirer.Describe()
			h.Waiting = true
			h.Since = started.Add(w.since)
			h.Site = w.req.Site
			if w.state <= trying && !yield(h) {
				return false
			}
		}
	}

	return true
}

// Stats returns the number of callers that have no reason for an attempt, and of those that
// make one, are about to, or have a key passed on to them.
func (q *Queues) Stats() (parked, attempting int) {
	for i := range q.shards {
		s := &q.shards[i]
		s.mu.Lock()
		for _, e := range s.entries {
			attempting += int(e.refs) - len(e.holders)
			for w := e.first; w != nil; w = w.next {
				if w.state == waiting && !w.dueLocked() {
					parked++
					attempting--
				}
			}
		}
		s.mu.Unlock()
	}

	return parked, attempting
}

// registerLocked notes whether the server's queue has a waiter of the list, or need not have it. If
// not, an attempt has to register it.
func (w *waiter) registerLocked(done bool) {
	w.entry.countLocked(w, -1)
	w.unregistered = !done
	w.entry.countLocked(w, 1)
}

// countLocked adds n to the number of unregistered waiters if w is one.
func (e *entry) countLocked(w *waiter, n int32) {
	if w.unregistered {
		e.unregistered += n
	}
}

// wakeUnregisteredLocked makes the first unregistered waiter try.
func (e *entry) wakeUnregisteredLocked() {
	if e.unregistered == 0 || e.attempting {
		return
	}

	for w := e.first; w != nil; w = w.next {
		if w.unregistered {
			w.signal()
			return
		}
	}
}

// Displaced is called when a waiter may have lost its position in the server's queue, or may be the
// first there.
func (q *Queues) Displaced(key Key, a Acquirer) {
	q.with(key, func(e *entry) {
		for w := e.first; w != nil; w = w.next {
			if w.req.Acquirer != a {
				continue
			}
			if w.state == trying {
				w.again = true // the attempt may have been too early
			}
			if w.state == waiting {
				w.registerLocked(false)
				w.signal()
			}
			return
		}
	})
}

// linkLocked makes b follow a in the list. nil stands for either end of it.
func (e *entry) linkLocked(a, b *waiter) {
	if a != nil {
		a.next = b
	} else {
		e.first = b
	}
	if b != nil {
		b.prev = a
	} else {
		e.last = a
	}
}

func (e *entry) pushBackLocked(w *waiter) {
	e.countLocked(w, 1)
	e.linkLocked(e.last, w)
	e.linkLocked(w, nil)
}

func (e *entry) pushFrontLocked(w *waiter) {
	e.countLocked(w, 1)
	e.linkLocked(w, e.first)
	e.linkLocked(nil, w)
}

// removeLocked removes w from the list for good, and ends its subscription.
func (e *entry) removeLocked(w *waiter) {
	e.unlinkLocked(w)
	if w.unsubscribe != nil {
		w.unsubscribe()
	}
}

// unlinkLocked removes w from the list, and ends the subscription with the last waiter.
func (e *entry) unlinkLocked(w *waiter) {
	e.countLocked(w, -1)
	e.linkLocked(w.prev, w.next)
	w.prev = nil
	w.next = nil
	if e.first != nil {
		e.armLocked() // the next head is not woken
	}
	e.unsubscribeUnusedLocked()
}
