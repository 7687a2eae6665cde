// Package queue is the acquire loop that every lock and semaphore shares: try;
// join the queue of that key in this process; subscribe; try again; wait for a
// message, an expiry or the next poll; repeat.
//
// The queue is first in, first out, and one attempt is in flight per key and
// process: only the head of a queue talks to the server, and a message wakes
// nobody else. Whoever gives something back while others of the same process
// wait can pass it straight to the head (Successor): no message, no gap, one
// round trip.
package queue

import (
	"context"
	"errors"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

const (
	// safetyPoll bounds how long a lost message, or a key deleted by hand, can
	// go unnoticed. An idle queue costs one attempt in that time.
	safetyPoll = 5 * time.Second
	// yieldFor is for how long a process that stands back waits for a sign that
	// another one has the key or had it.
	yieldFor = 20 * time.Millisecond
	// maxDoubt bounds how rarely standing back is tried after it was in vain.
	maxDoubt = 64

	minRetry = 100 * time.Millisecond
	maxRetry = time.Second

	shardCount = 32
	// maxFree is how many unused entries a shard keeps for the next keys.
	maxFree = 64
)

// Key names a queue. Objects of different kinds do not share one.
type Key struct{ Kind, Name string }

// Verdict is the server's answer to an attempt.
type Verdict struct {
	Acquired bool
	// FreeIn is when trying again may help, less than 0 if only a message can
	// tell. It means nothing when Acquired is set.
	FreeIn time.Duration
}

// Acquirer makes attempts.
type Acquirer interface {
	// Try makes one attempt. An error that is an *Unavailable is not the last
	// word for a waiter; any other ends its wait. A failed attempt leaves
	// nothing behind, or sees to it itself.
	Try(ctx context.Context) (Verdict, error)
}

// Unavailable wraps the error of an attempt that failed for a reason that may
// pass, such as a lost connection.
type Unavailable struct{ Err error }

func (u *Unavailable) Error() string { return u.Err.Error() }
func (u *Unavailable) Unwrap() error { return u.Err }

// Cause is why a waiter tries again.
type Cause uint8

// The causes of an attempt after the first.
const (
	Subscribed Cause = iota + 1 // the subscription stands: messages before it may have been missed
	Message                     // something was released elsewhere, or perhaps
	Local                       // something was released here, or the waiter before left
	Timer                       // an expiry that the server told, or the safety poll
	HandedOver                  // no attempt: it was passed on within the process
)

// String returns the cause as it stands in traces.
func (c Cause) String() string {
	return [...]string{"", "subscribed", "message", "local", "timer", "hand-off"}[c]
}

// Request is one wish to acquire something.
type Request struct {
	Key      Key
	Acquirer Acquirer
	// Channel is where releases are published; "" if they are not.
	Channel string
	// Backoff gives the pause after the n-th attempt, from 1, where there is no
	// Channel. It may be the user's.
	Backoff func(n int) time.Duration
	// Deadline ends the wait; zero for none.
	Deadline time.Time
	// Once makes one attempt, at once, whoever waits.
	Once bool
	// MayHold is set when the requester may hold the key already and would wait
	// for itself in the queue. Its first attempt is made at once.
	MayHold bool
	// NoHandOff is set where nobody but the server may choose who is next.
	NoHandOff bool
	// OnWake is called on the waiter's goroutine whenever it is about to try
	// again, or was handed the key. It may be nil.
	OnWake func(Cause)
}

// Config is what Queues needs to know.
type Config struct {
	Wheel *watchdog.Wheel
	// Subscribe is the hub's, and returns how to end the subscription.
	Subscribe func(channel string, l pubsub.Listener) (unsubscribe func(), confirmed bool)
	// HandOffs is how often in a row a key may be passed on within the process
	// before other processes get a chance.
	HandOffs int
	// Patience is for how long a waiter rides out a server that is Unavailable.
	Patience time.Duration
	// OnPoll is called when the head of a queue tries because of the safety poll
	// or an expiry, not a message. It may be nil and must not block.
	OnPoll func(Key)
}

// Queues is the queues of one client, by key.
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

// Close ends every wait with lock.ErrClosed. It is called once.
func (q *Queues) Close() { close(q.closed) }

// entry is the state of one key while somebody in this process holds it,
// waits for it, or tries. Everything in it belongs to the shard's mutex.
type entry struct {
	queues *Queues
	shard  *shard
	timer  watchdog.Timer
	keyState
}

type keyState struct {
	key     Key
	refs    int        // holders, waiters, and attempts outside the queue
	holders []Acquirer // several if one owner holds more than once

	first, last *Waiter
	unsubscribe func() // nil: not subscribed
	attempting  bool
	again       bool  // something has happened since the last attempt began
	cause       Cause // what it was, the first of several
	passed      bool  // a message was let pass since the last attempt began
	pollAt      time.Time
	armed       bool // whether the timer is set, to pollAt

	handOffs int // in a row
	turns    turns
}

// Waiter is a place in a queue. Its states:
//
//	waiting ──Successor──▶ claimed ──Grant──▶ granted
//	   ▲                      │ │
//	   └───────Return─────────┘ └─(gives up)─▶ gone
type Waiter struct {
	entry      *entry
	next, prev *Waiter
	req        *Request
	wake       chan struct{}
	timer      watchdog.Timer
	state      waiterState
	tries      int
	troubled   time.Time // since when the server is Unavailable
}

type waiterState uint8

const (
	waiting waiterState = iota
	claimed
	granted
	gone
)

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

// leave gives one reference back. The shard's mutex is held.
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
	// An event still on its way to this entry may find it in use for another
	// key: it costs an attempt there and does no harm.
	clear(e.holders[:cap(e.holders)])
	e.keyState = keyState{holders: e.holders[:0]}
	if len(s.free) < maxFree {
		s.free = append(s.free, e)
	}
}

// Acquire makes the request come true: it returns nil once an attempt has
// succeeded or the key was handed over. Otherwise the error matches
// lock.ErrNotAcquired or lock.ErrClosed, or is that of an attempt. When ctx ends
// while the last attempt has no answer yet, the error is that of the attempt
// too. After nil the requester is a holder, until Released.
func (q *Queues) Acquire(ctx context.Context, req Request) error {
	s := q.shardOf(req.Key)
	s.mu.Lock()
	e := s.enter(q, req.Key)
	idle := len(e.holders) == 0 && e.first == nil && !e.attempting
	var w *Waiter
	if idle || req.Once || req.MayHold {
		inTurn := idle && !req.Once
		if inTurn {
			e.attempting, e.again, e.passed, e.turns.yielding = true, false, false, false
		}
		s.mu.Unlock()
		v, err := req.try(ctx, 1)
		s.mu.Lock()
		if inTurn {
			e.attempting = false
		}
		if err == nil && v.Acquired {
			e.holders = append(e.holders, req.Acquirer)
			s.mu.Unlock()
			return nil
		}
		if err != nil || req.Once {
			if inTurn {
				e.nudge(Local) // whoever came meanwhile has waited for this attempt
			}
			e.leave()
			s.mu.Unlock()
			if err == nil {
				return lock.ErrNotAcquired
			}
			if u := (*Unavailable)(nil); errors.As(err, &u) {
				err = u.Err
			}
			return errors.Join(q.over(ctx, &req), err)
		}
		w = newWaiter(e, &req)
		w.tries = 1
		if inTurn {
			e.pushFront(w)
		} else {
			e.pushBack(w)
		}
		if e.first == w {
			e.busy(v)
		}
	} else {
		w = newWaiter(e, &req)
		e.pushBack(w)
	}
	return w.wait(ctx)
}

func newWaiter(e *entry, req *Request) *Waiter {
	return &Waiter{entry: e, req: req, wake: make(chan struct{}, 1)}
}

// wait is the life of a waiter. The shard's mutex is held, and released.
func (w *Waiter) wait(ctx context.Context) error {
	e := w.entry
	q, mu := e.queues, &e.shard.mu
	if !w.req.Deadline.IsZero() {
		q.cfg.Wheel.Schedule(&w.timer, w.req.Deadline, w)
		defer q.cfg.Wheel.Cancel(&w.timer)
	}
	var attemptErr error
	for {
		if w.state == granted {
			mu.Unlock()
			w.req.woken(HandedOver)
			return nil
		}
		if err := q.over(ctx, w.req); err != nil {
			w.giveUp()
			mu.Unlock()
			return errors.Join(err, attemptErr)
		}
		if w.state == waiting && e.first == w {
			switch {
			case e.again && !e.attempting:
				var done bool
				if done, attemptErr = w.attempt(ctx); done {
					mu.Unlock()
					return attemptErr
				}
				continue
			case e.unsubscribe == nil && w.req.Channel != "":
				e.subscribe(w.req.Channel)
				continue
			}
			e.arm()
		}
		mu.Unlock()
		select {
		case <-w.wake:
		case <-ctx.Done():
		case <-q.closed:
		}
		mu.Lock()
	}
}

// over returns why there is no more time for req, if there is none.
func (q *Queues) over(ctx context.Context, req *Request) error {
	select {
	case <-q.closed:
		return lock.ErrClosed
	default:
	}
	if ctx.Err() != nil {
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx))
	}
	if d := req.Deadline; !d.IsZero() && !time.Now().Before(d) {
		return lock.ErrNotAcquired
	}
	return nil
}

// attempt asks the server. The mutex is held on entry and on return, not in
// between; the waiter stays the head meanwhile. It reports whether the wait is
// over, acquired if err is nil. If it is not, err is what an attempt whose
// outcome matters to the caller has failed with.
func (w *Waiter) attempt(ctx context.Context) (done bool, err error) {
	e := w.entry
	key, cause := e.key, e.cause
	e.attempting, e.again, e.passed = true, false, false
	e.shard.mu.Unlock()
	if cause == Timer && e.queues.cfg.OnPoll != nil {
		e.queues.cfg.OnPoll(key)
	}
	w.req.woken(cause)
	w.tries++
	v, err := w.req.try(ctx, w.tries)
	e.shard.mu.Lock()
	e.attempting = false
	e.turns.attempted(cause == Timer, err == nil && v.Acquired)
	var unavailable *Unavailable
	switch {
	case err == nil && v.Acquired:
		e.unlink(w)
		e.holders = append(e.holders, w.req.Acquirer)
		return true, nil
	case err == nil:
		w.troubled = time.Time{}
		e.busy(v)
		return false, nil
	case !errors.As(err, &unavailable):
		w.giveUp()
		return true, err
	}
	now := time.Now()
	if w.troubled.IsZero() {
		w.troubled = now
	}
	if now.Sub(w.troubled) >= e.queues.cfg.Patience {
		w.giveUp()
		return true, unavailable.Err
	}
	e.lookAt(now.Add(minRetry + rand.N(maxRetry-minRetry)))
	return false, unavailable.Err
}

// subscribe gives the entry its subscription. The mutex is held: the hub calls
// nobody back from here.
func (e *entry) subscribe(channel string) {
	var confirmed bool
	e.unsubscribe, confirmed = e.queues.cfg.Subscribe(channel, e)
	if confirmed && len(e.holders) == 0 {
		// A message may have passed between the last attempt and now.
		e.mark(Subscribed)
	}
}

// giveUp takes the waiter out. If a hand-off to it is under way, whoever runs
// that finds out at Grant. The mutex is held.
func (w *Waiter) giveUp() {
	e := w.entry
	if w.state == claimed {
		w.state = gone
		return
	}
	wasHead := e.first == w
	w.state = gone
	e.unlink(w)
	if wasHead {
		// What woke this waiter, or would have, is now for the next one.
		e.nudge(Local)
	}
	e.leave()
}

// Expire is called by the wheel at the waiter's deadline.
func (w *Waiter) Expire(time.Time) { w.signal() }

func (w *Waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// try makes the n-th attempt. No lock is held: what it calls is not ours.
func (r *Request) try(ctx context.Context, n int) (Verdict, error) {
	v, err := r.Acquirer.Try(ctx)
	if err == nil && !v.Acquired && r.Channel == "" && r.Backoff != nil {
		v.FreeIn = r.Backoff(n)
	}
	return v, err
}

func (r *Request) woken(c Cause) {
	if r.OnWake != nil {
		r.OnWake(c)
	}
}

// busy decides when to look again after the server said that the key is taken.
func (e *entry) busy(v Verdict) {
	pause := safetyPoll
	if v.FreeIn >= 0 {
		pause = min(pause, v.FreeIn)
	}
	if e.passed {
		// The message may have been of that very holder.
		pause = min(pause, e.turns.patience())
	}
	e.lookAt(time.Now().Add(pause))
}

// lookAt makes the head look again at the given time.
func (e *entry) lookAt(at time.Time) {
	e.pollAt, e.armed = at, true
	e.queues.cfg.Wheel.Schedule(&e.timer, at, e)
}

// arm sees to it that whoever is head looks again some time. The mutex is held.
func (e *entry) arm() {
	if !e.armed {
		e.lookAt(time.Now().Add(safetyPoll))
	}
}

// Expire is called by the wheel.
func (e *entry) Expire(now time.Time) {
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	if !e.armed || now.Before(e.pollAt) {
		return
	}
	e.armed = false
	e.nudge(Timer)
}

// Notify is called by the hub.
func (e *entry) Notify(ev pubsub.Event) {
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	switch {
	case ev.Subscribed:
		e.nudge(Subscribed)
	case !e.turns.letPass():
		e.nudge(Message)
	default:
		e.passed = true
		if e.first != nil && !e.attempting {
			e.lookAt(time.Now().Add(e.turns.patience()))
		}
	}
}

// mark notes that there is a reason to try. The mutex is held.
func (e *entry) mark(c Cause) {
	if !e.again {
		e.again, e.cause = true, c
	}
}

// nudge makes the head try. The mutex is held.
func (e *entry) nudge(c Cause) {
	if e.attempting || e.first != nil {
		e.mark(c)
	}
	if e.first != nil {
		e.first.signal()
	}
}

func (e *entry) pushBack(w *Waiter) {
	w.prev, w.next = e.last, nil
	if e.last != nil {
		e.last.next = w
	} else {
		e.first = w
	}
	e.last = w
}

func (e *entry) pushFront(w *Waiter) {
	w.prev, w.next = nil, e.first
	if e.first != nil {
		e.first.prev = w
	} else {
		e.last = w
	}
	e.first = w
}

// unlink takes w out of the list; with the last waiter goes the subscription.
func (e *entry) unlink(w *Waiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		e.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		e.last = w.prev
	}
	w.next, w.prev = nil, nil
	if e.first != nil {
		e.arm() // the next head sleeps through its promotion
	} else if e.unsubscribe != nil {
		e.unsubscribe()
		e.unsubscribe = nil
	}
}

// Successor claims the waiter to whom the only holder of key can pass it on, or
// returns nil if it has to be released for all; passable says whether it may be
// passed on at all. The caller tells how that went with Grant or Return.
func (q *Queues) Successor(key Key, passable bool) *Waiter {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		return nil
	}
	w := e.first
	if w == nil || len(e.holders) != 1 || e.attempting {
		return nil
	}
	if !passable || w.req.NoHandOff || e.handOffs >= q.cfg.HandOffs {
		e.turns.begin()
		return nil
	}
	e.unlink(w)
	w.state = claimed
	e.handOffs++
	return w
}

// Acquirer returns what the waiter wants to acquire with.
func (w *Waiter) Acquirer() Acquirer { return w.req.Acquirer }

// Grant makes w the holder in the place of from. It reports false if w has
// given up meanwhile: then the key is still from's to pass on, under w's name.
func (w *Waiter) Grant(from Acquirer) bool {
	e := w.entry
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	defer e.leave() // from's reference, or that of the waiter who left
	if w.state == gone {
		return false
	}
	e.drop(from)
	e.holders = append(e.holders, w.req.Acquirer)
	w.state = granted
	w.signal()
	return true
}

// Return puts w back at the head after a hand-off that did not happen. It is
// followed by Released.
func (w *Waiter) Return() {
	e := w.entry
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	if w.state == gone {
		e.leave()
		return
	}
	w.state = waiting
	e.pushFront(w)
}

// drop takes a holder off the list.
func (e *entry) drop(a Acquirer) {
	if i := slices.Index(e.holders, a); i >= 0 {
		e.holders = slices.Delete(e.holders, i, i+1)
	}
}

// Holders returns those of this process who hold key, the latest last.
func (q *Queues) Holders(key Key) []Acquirer {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil {
		return slices.Clone(e.holders)
	}
	return nil
}

// Released ends a's hold on key, given back or lost. told is how many
// subscribers of all processes have heard of it, less than 0 if that is not
// known. If others may be waiting and this process has had its share, its own
// head stands back; otherwise it tries at once.
func (q *Queues) Released(key Key, a Acquirer, told int) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		return
	}
	e.drop(a)
	e.handOffs = 0
	switch {
	case len(e.holders) > 0:
		// The same owner holds on.
	case e.first != nil && !e.attempting && e.turns.released(told):
		e.lookAt(time.Now().Add(e.turns.patience()))
	default:
		e.turns.yielding = false
		e.nudge(Local)
	}
	e.leave()
}

// Wake makes the head of a queue look again, for whatever reason the caller
// has.
func (q *Queues) Wake(key Key) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil {
		e.nudge(Local)
	}
}
