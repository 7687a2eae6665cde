package acquire

import (
	"context"
	"hash/maphash"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/pubsub"
)

// Config is the configuration of Queues.
type Config struct {
	Wheel *watchdog.Wheel
	// Subscribe is the hub's, and returns how to end the subscription. A channel that is
	// own belongs to one waiter and will not be needed again.
	Subscribe func(channel string, l pubsub.Listener, own bool) (unsubscribe func(), confirmed bool)
	// HandOffs is the number of consecutive times a key may be passed on within the process
	// before other processes get a chance.
	HandOffs int
	// Go runs f in the background and reports whether it does; it does not while the client
	// is closing. The context ends then.
	Go func(f func(ctx context.Context)) bool
	// MaxOutage bounds how long a waiter keeps trying while the server is Unavailable.
	MaxOutage time.Duration
}

// Queues are the queues of one client, by key.
type Queues struct {
	cfg    Config
	seed   maphash.Seed
	shards [shardCount]shard
	closed chan struct{}
}

type shard struct {
	mu      sync.Mutex
	entries map[Key]*entry
	free    []*entry
}

// New returns empty queues.
func New(cfg Config) *Queues {
	q := &Queues{cfg: cfg, seed: maphash.MakeSeed(), closed: make(chan struct{})}
	for i := range q.shards {
		q.shards[i].entries = make(map[Key]*entry)
	}
	return q
}

// Close ends every wait with lock.ErrClosed. Call it once.
func (q *Queues) Close() { close(q.closed) }

// entry is the state of one key while callers of this process hold it, wait for it or try
// to acquire it. The mutex of its shard guards it.
type entry struct {
	queues *Queues
	shard  *shard
	timer  watchdog.Timer
	keyState
}

// keyState is small because each held key has one.
type keyState struct {
	key     Key
	holders []Acquirer
	refs    int32 // holders, waiters, and attempts outside the queue

	unregistered int32 // waiters that the server's queue does not have yet
	unavailable  int32 // waiters whose registration has failed; the timer repeats it
	handOffs     int32 // consecutive
	first, last  *Waiter
	unsubscribe  func()  // nil: not subscribed
	subscriber   *Waiter // whose own channel it is; nil: a channel for all
	attempting   bool
	again        bool  // there is a reason for another attempt
	cause        Cause // the first such reason
	passed       bool  // a message was left to other processes since the last attempt began
	leaves       bool  // the coming release leaves the key open
	armed        bool  // whether the timer is set, to pollAt
	pollAt       time.Time

	turns turns
	open  *opening // nil if it was never left open
}

func (q *Queues) shardOf(key Key) *shard {
	return &q.shards[maphash.Comparable(q.seed, key)%shardCount]
}

// enter returns the entry of key with one more reference. s.mu is held.
func (s *shard) enter(q *Queues, key Key) *entry {
	e := s.entries[key]
	if e == nil {
		if n := len(s.free); n > 0 {
			e, s.free = s.free[n-1], s.free[:n-1]
		} else {
			e = &entry{queues: q, shard: s}
		}
		e.key = key
		s.entries[key] = e
	}
	e.refs++
	return e
}

// leave drops a reference. The mutex is held.
func (e *entry) leave() {
	e.refs--
	if e.refs > 0 {
		return
	}
	if e.armed {
		e.queues.cfg.Wheel.Cancel(&e.timer)
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

// idle reports whether no caller of this process is ahead of req. The mutex is held.
func (e *entry) idle(req *Request) bool {
	return e.first == nil && !e.attempting && (len(e.holders) == 0 || req.TryWhileHeld)
}

// begin begins an attempt of a caller that does not wait. The mutex is held.
func (e *entry) begin() {
	e.attempting, e.again, e.passed, e.turns.yielding = true, false, false, false
}

// enlist records a requester that has acquired as a holder. The mutex is held.
func (e *entry) enlist(req *Request) {
	if req.Untracked {
		e.leave()
	} else {
		e.holders = append(e.holders, req.Acquirer)
	}
}

// joined is called when a caller that did not wait has acquired. The mutex is held.
func (e *entry) joined(req *Request) {
	if req.Shared {
		e.nudge(Local)
	}
	e.wakeUnregistered()
}

// drop removes a holder. The mutex is held.
func (e *entry) drop(a Acquirer) {
	if i := slices.Index(e.holders, a); i >= 0 {
		e.holders = slices.Delete(e.holders, i, i+1)
	}
}

// Holders returns the holders of key in this process, the latest last.
func (q *Queues) Holders(key Key) []Acquirer {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil {
		return slices.Clone(e.holders)
	}
	return nil
}

// Stats counts the callers of a client at one moment.
type Stats struct {
	// Waiting callers have no reason for an attempt.
	Waiting int
	// Attempting callers make an attempt, are about to, or have a key passed on to them.
	Attempting int
}

// Stats counts the callers of all queues.
func (q *Queues) Stats() Stats {
	var sum Stats
	for i := range q.shards {
		s := &q.shards[i]
		s.mu.Lock()
		for _, e := range s.entries {
			parked := 0
			for w := e.first; w != nil; w = w.next {
				if w.state == waiting && !w.due() {
					parked++
				}
			}
			sum.Waiting += parked
			sum.Attempting += int(e.refs) - len(e.holders) - parked
		}
		s.mu.Unlock()
	}
	return sum
}
