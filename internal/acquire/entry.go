package acquire

import (
	"context"
	"hash/maphash"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/pubsub"
)

// Config is the configuration of Queues.
type Config struct {
	Wheel *watchdog.Wheel
	// Subscribe is the hub's, and returns how to end the subscription.
	Subscribe func(channel string, l pubsub.Listener) (unsubscribe func(), confirmed bool)
	// SubscribeOwn is Subscribe for a channel that will not be needed again.
	SubscribeOwn func(channel string, l pubsub.Listener) (unsubscribe func())
	// HandOffs is the number of consecutive times a key may be passed on within the process
	// before other processes get a chance.
	HandOffs int
	// Go runs f in the background and reports whether it does; it does not while the client
	// is closing. The context ends then.
	Go func(f func(ctx context.Context)) bool
	// MaxOutage bounds how long a waiter keeps trying while the server is Unavailable.
	MaxOutage time.Duration
	// OnWait is called when a caller begins to wait.
	OnWait func()
	// Open ends every wait with lock.ErrClosed when it ends.
	Open context.Context
}

// Queues are the queues of one client, by key.
type Queues struct {
	once   sync.Once
	cfg    Config
	seed   maphash.Seed
	shards [shardCount]shard
	unused sync.Pool // of waiters that have not waited
}

type shard struct {
	mu      sync.Mutex
	entries map[Key]*entry
	free    []*entry
}

// Of returns the queues that the objects of a client share.
func Of(s *session.Session) *Queues {
	q := session.Of[Queues](s)
	q.once.Do(func() {
		q.cfg, q.seed = Config{
			Wheel:        s.Watchdog.Wheel(),
			Subscribe:    s.Subscribe,
			SubscribeOwn: s.SubscribeOwn,
			HandOffs:     s.HandOffs,
			Go:           s.Go,
			MaxOutage:    s.WatchdogTimeout,
			OnWait:       s.Contended,
			Open:         s.StopContext(),
		}, maphash.MakeSeed()
		q.wakeAtEnd()
	})
	return q
}

// wakeAtEnd wakes all waiters when Open ends, so that each waits for two channels instead of three.
func (q *Queues) wakeAtEnd() {
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
	poll   *poll // nil: nobody has waited yet
	keyState
}

// poll is the time of the next attempt that nothing else causes.
type poll struct {
	timer watchdog.Timer
	at    time.Time // to which the timer is set, if it is
}

// keyState is small because each held key has one.
type keyState struct {
	key     Key
	holders []Acquirer
	refs    int32 // holders, waiters, and attempts outside the queue

	unregistered int32 // waiters that are
	first, last  *waiter
	unsubscribe  func() // nil: not subscribed to the channel of all waiters
	attempting   bool
	outage       bool            // an attempt has failed: unregistered waiters wait for the timer
	cause        telemetry.Cause // the first reason for another attempt of the head, if any

	yield  yield
	opened time.Duration // since started: when the key was left open, or its schedule began; 0: never
}

// shard returns the shard of key.
func (q *Queues) shard(key *Key) *shard {
	return &q.shards[maphash.Comparable(q.seed, *key)%shardCount]
}

// lock locks the shard of key, and returns it and the entry of key, or nil.
func (q *Queues) lock(key Key) (*shard, *entry) {
	s := q.shard(&key)
	s.mu.Lock()
	return s, s.entries[key]
}

// enter locks the shard of key, and returns the entry of key with one more reference.
func (q *Queues) enter(key *Key) *entry {
	s := q.shard(key)
	s.mu.Lock()
	e := s.entries[*key]
	if e == nil {
		if n := len(s.free); n > 0 {
			e, s.free = s.free[n-1], s.free[:n-1]
		} else {
			e = &entry{queues: q, shard: s}
		}
		if s.entries == nil {
			s.entries = make(map[Key]*entry)
		}
		e.key = *key
		s.entries[e.key] = e
	}
	e.refs++
	return e
}

// leave drops a reference.
func (e *entry) leave() {
	e.refs--
	if e.refs > 0 {
		return
	}
	if e.polls() {
		e.queues.cfg.Wheel.Cancel(&e.poll.timer)
		e.poll.at = time.Time{}
	}
	s := e.shard
	delete(s.entries, e.key)
	// A late event may find the entry in use for another key, where it costs an attempt.
	clear(e.holders[:cap(e.holders)])
	e.keyState = keyState{holders: e.holders[:0]}
	if len(s.free) < maxFree {
		s.free = append(s.free, e)
	}
}

// begin begins an attempt of a caller that does not wait. It reports false if it makes one
// Once, or callers of this process are ahead of it.
func (e *entry) begin(req *Request) bool {
	if req.Once || e.first != nil || e.attempting || len(e.holders) > 0 && !req.TryWhileHeld {
		return false
	}
	e.attempting, e.cause, e.yield.active = true, 0, false
	return true
}

// finish ends the attempt of a caller that does not wait. inTurn is set if begin preceded it:
// callers that came meanwhile have waited for it.
func (e *entry) finish(req *Request, inTurn, acquired bool) {
	if inTurn {
		e.attempting = false
	}
	switch {
	case !acquired:
		if inTurn {
			e.nudge(telemetry.Local)
		}
		e.leave()
		return
	case inTurn || !req.Untracked:
		if req.Shared {
			e.nudge(telemetry.Local)
		}
		e.wakeUnregistered()
	}
	e.enlist(req)
}

// enlist records a requester that has acquired as a holder.
func (e *entry) enlist(req *Request) {
	if req.Untracked {
		e.leave()
	} else {
		e.holders = append(e.holders, req.Acquirer)
	}
}

// Holders returns the holders of key in this process, the latest last.
func (q *Queues) Holders(key Key) []Acquirer {
	s, e := q.lock(key)
	defer s.mu.Unlock()
	if e != nil {
		return slices.Clone(e.holders)
	}
	return nil
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

// holds yields those of a shard, and reports false if yield did.
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
			if w.state <= claimed && !yield(h) {
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
				if w.state == waiting && !w.due() {
					parked++
					attempting--
				}
			}
		}
		s.mu.Unlock()
	}
	return parked, attempting
}
