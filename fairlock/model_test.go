package fairlock_test

import (
	"slices"
	"time"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/lockstep"
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

func (m *model) hold(l *lockModel, c *engine.Claim) {
	l.counts = map[string]int{c.ID.String(): 1}
	l.ends[lockAt] = m.now + c.Lease.Milliseconds()
}

func (m *model) atLeast(l *lockModel, c *engine.Claim) {
	if lease := c.Lease.Milliseconds(); m.ttl(l) < lease {
		l.ends[lockAt] = m.now + lease
	}
}

func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// told sets what an answer says about the lease.
func (m *model) told(l *lockModel, a engine.Answer) engine.Answer {
	a.FreeIn = millis(m.ttl(l))
	if l.free() {
		a.FreeIn = millis(-1)
	} else if l.ends[lockAt] == never {
		a.FreeIn, a.NoExpiry = millis(-2), true
	}
	return a
}

// enqueue is an attempt that does not acquire the lock.
func (m *model) enqueue(l *lockModel, c *engine.Claim) engine.Answer {
	if !c.Waits {
		return m.told(l, engine.Answer{})
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
	a := engine.Answer{Queued: true, Requeued: moved, FreeIn: millis(-1)}
	if l.first() == owner || !l.free() && l.ends[lockAt] == never {
		return m.told(l, a)
	}
	return a
}

func (m *model) acquire(l *lockModel, claims []*engine.Claim) []engine.Answer {
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
			holder = slices.IndexFunc(claims, func(c *engine.Claim) bool { return c.ID.String() == next })
		}
		if holder >= 0 {
			m.hold(l, claims[holder])
		}
	}
	if holder >= 0 {
		l.leave(claims[holder].ID.String())
	}
	answers := make([]engine.Answer, len(claims))
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
func (m *model) open(l *lockModel) engine.Release {
	l.drop(lockAt)
	l.freed = true
	m.refresh(l)
	return engine.Release{State: engine.Free, Receivers: m.end(l)}
}

// release is that of a claim. The waiters in had leave the queue.
func (m *model) release(l *lockModel, c *engine.Claim, had []string) engine.Release {
	m.begin(l)
	l.leave(had...)
	if l.counts[c.ID.String()] > 0 {
		return m.open(l)
	}
	l.leave(c.ID.String())
	m.refresh(l)
	m.end(l)
	return engine.Release{}
}

// confirm returns whether the claim holds the lock, and how many of the waiting are the first.
func (m *model) confirm(l *lockModel, c *engine.Claim, had, waiting []string) [2]int64 {
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

func (m *model) extend(l *lockModel, c *engine.Claim) bool {
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
