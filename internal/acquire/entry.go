package acquire

import (
	"context"
	"hash/maphash"
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
	// Closed ends every wait with lock.ErrClosed once it is closed.
	Closed <-chan struct{}
}

// Queues are the queues of one client for acquirers of one type, by key.
type Queues[A Acquirer[A]] struct {
	cfg    Config
	seed   maphash.Seed
	shards [shardCount]shard[A]
}

type shard[A Acquirer[A]] struct {
	mu      sync.Mutex
	entries map[Key]*entry[A]
	free    []*entry[A]
}

// New returns empty queues.
func New[A Acquirer[A]](cfg Config) *Queues[A] {
	q := &Queues[A]{cfg: cfg, seed: maphash.MakeSeed()}
	for i := range q.shards {
		q.shards[i].entries = make(map[Key]*entry[A])
	}
	return q
}

// shared is the Queues of a session.
type shared[A Acquirer[A]] struct {
	once   sync.Once
	queues *Queues[A]
}

// Of returns the queues that the objects of a client share for acquirers of one type.
func Of[A Acquirer[A]](s *session.Session) *Queues[A] {
	of := session.Of[shared[A]](s)
	of.once.Do(func() {
		of.queues = New[A](Config{
			Wheel:     s.Watchdog.Wheel(),
			Subscribe: s.Subscribe,
			HandOffs:  s.HandOffs,
			Go:        s.Go,
			MaxOutage: s.WatchdogTimeout,
			Closed:    s.Done(),
		})
		s.CountCallers(of.queues.Stats)
	})
	return of.queues
}

// entry is the state of one key while callers of this process hold it, wait for it or try
// to acquire it. The mutex of its shard guards it.
type entry[A Acquirer[A]] struct {
	queues *Queues[A]
	shard  *shard[A]
	timer  watchdog.Timer
	keyState[A]
}

// keyState is small because each held key has one.
type keyState[A Acquirer[A]] struct {
	key     Key
	holders []A
	refs    int32 // holders, waiters, and attempts outside the queue

	unregistered int32 // waiters that the server's queue does not have yet
	unavailable  int32 // waiters whose registration has failed; the timer repeats it
	first, last  *waiter[A]
	unsubscribe  func()     // nil: not subscribed
	subscriber   *waiter[A] // whose own channel it is; nil: a channel for all
	attempting   bool
	again        bool            // there is a reason for another attempt
	cause        telemetry.Cause // the first such reason
	leaves       bool            // the coming release leaves the key open
	armed        bool            // whether the timer is set, to pollAt
	pollAt       time.Time

	yield yield
	open  *opening // nil if it was never left open
}

func (q *Queues[A]) shardOf(key Key) *shard[A] {
	return &q.shards[maphash.Comparable(q.seed, key)%shardCount]
}

// enter returns the entry of key with one more reference. s.mu is held.
func (s *shard[A]) enter(q *Queues[A], key Key) *entry[A] {
	e := s.entries[key]
	if e == nil {
		if n := len(s.free); n > 0 {
			e, s.free = s.free[n-1], s.free[:n-1]
		} else {
			e = &entry[A]{queues: q, shard: s}
		}
		e.key = key
		s.entries[key] = e
	}
	e.refs++
	return e
}

// leave drops a reference. The mutex is held.
func (e *entry[A]) leave() {
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
	e.keyState = keyState[A]{holders: e.holders[:0]}
	if len(s.free) < maxFree {
		s.free = append(s.free, e)
	}
}

// idle reports whether no caller of this process is ahead of req. The mutex is held.
func (e *entry[A]) idle(req *Request[A]) bool {
	return e.first == nil && !e.attempting && (len(e.holders) == 0 || req.TryWhileHeld)
}

// begin begins an attempt of a caller that does not wait. The mutex is held.
func (e *entry[A]) begin() {
	e.attempting, e.again, e.yield.active = true, false, false
}

// enlist records a requester that has acquired as a holder. The mutex is held.
func (e *entry[A]) enlist(req *Request[A]) {
	if req.Untracked {
		e.leave()
	} else {
		e.holders = append(e.holders, req.Acquirer)
	}
}

// joined is called when a caller that did not wait has acquired. The mutex is held.
func (e *entry[A]) joined(req *Request[A]) {
	if req.Shared {
		e.nudge(telemetry.Local)
	}
	e.wakeUnregistered()
}

// drop removes a holder. The mutex is held.
func (e *entry[A]) drop(a A) {
	if i := slices.Index(e.holders, a); i >= 0 {
		e.holders = slices.Delete(e.holders, i, i+1)
	}
}

// Holders returns the holders of key in this process, the latest last.
func (q *Queues[A]) Holders(key Key) []A {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil {
		return slices.Clone(e.holders)
	}
	return nil
}

// Stats returns the number of callers that have no reason for an attempt, and of those that
// make one, are about to, or have a key passed on to them.
func (q *Queues[A]) Stats() (parkedCallers, attempting int) {
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
			parkedCallers += parked
			attempting += int(e.refs) - len(e.holders) - parked
		}
		s.mu.Unlock()
	}
	return parkedCallers, attempting
}
