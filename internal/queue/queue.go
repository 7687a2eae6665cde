// Package queue is the acquire loop that every lock and semaphore shares: try;
// join the queue of that key in this process; subscribe; try again; wait for a
// message, an expiry or the next poll; repeat.
//
// The queue is first in, first out, and one attempt is in flight per key and
// process: only the head of a queue talks to the server, and a message wakes
// nobody else. What it says can be said for several waiters at once (Grouped).
// Whoever gives something back while others of the same process wait can pass it
// straight to the next of them (Successors): no message, no gap, one round trip.
//
// Where the server itself keeps the order of all waiters (Request.Ordered) each
// makes an attempt when it comes, which gives it its place there, and from then on
// this queue has the same order.
package queue

import (
	"context"
	"errors"
	"hash/maphash"
	"math/rand/v2"
	"runtime"
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

	// A key that others poll for is left open to them for openFor when it was not
	// for openEvery: longer than those pause who are in common use, and before they
	// give up. Nothing tells that there are any.
	openEvery = 3 * time.Second
	openFor   = 300 * time.Millisecond

	minRetry = 100 * time.Millisecond
	maxRetry = time.Second

	shardCount = 32
	// maxFree is how many unused entries a shard keeps for the next keys.
	maxFree = 64
	// maxGroup is how many waiters one attempt or hand-off is for at most: it
	// bounds for how long a script keeps the server.
	maxGroup = 100
)

// Key names a queue. Objects of different kinds do not share one.
type Key struct{ Kind, Name string }

// Verdict is the server's answer to an attempt.
type Verdict struct {
	Acquired bool
	// FreeIn is when trying again may help, less than 0 if only a message can
	// tell. It means nothing when Acquired is set.
	FreeIn time.Duration
	// Moved is set if the waiter's place on the server is now behind all others of
	// this process. It is for requests that are Ordered.
	Moved bool

	poll time.Duration // when to try again where others release without a message
}

// Result is what became of an attempt for one of several.
type Result struct {
	Verdict
	Err error
}

// Acquirer makes attempts.
type Acquirer interface {
	// Try makes one attempt. An error that is an *Unavailable is not the last
	// word for a waiter; any other ends its wait. A failed attempt leaves
	// nothing behind, or sees to it itself.
	Try(ctx context.Context) (Verdict, error)
}

// Grouped is an Acquirer that can make one attempt for several, and is one if
// its request says Group.
type Grouped interface {
	Acquirer
	// TryAll makes one attempt for all of them, of which it is one, and returns
	// the result for each. ctx is of none of them.
	TryAll(ctx context.Context, all []Acquirer) []Result
	// Abandon gives back, in the background, what an attempt that another has made
	// for it may have got it: it does not wait any more. It blocks for a request only
	// if everything is being closed.
	Abandon()
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
	// Channel, or others release without a message. It may be the user's.
	Backoff func(n int) time.Duration
	// LeftOpen is the message of a release after which nobody who hears of it tries
	// for a while, so that others can who poll; "" where there are none.
	LeftOpen string
	// Deadline ends the wait; zero for none.
	Deadline time.Time
	// Once makes one attempt, at once, whoever waits.
	Once bool
	// MayHold is set when the requester may hold the key already and would wait
	// for itself in the queue. Its first attempt is made at once.
	MayHold bool
	// NoHandOff is set where nobody but the server may choose who is next.
	NoHandOff bool
	// Eager is set if an attempt is of use although this process holds the key.
	Eager bool
	// Shared is set if others may get in beside it once it has acquired.
	Shared bool
	// Unheld is set if the queue has no more to do with it once it has acquired: what
	// it acquires is not the key, but some of what others have, too.
	Unheld bool
	// Group is set if it can be tried for together with others. Its Acquirer is
	// Grouped then.
	Group bool
	// Ordered is set if the server keeps the order of the waiters. Its Channel is
	// its own then.
	Ordered bool
	// OnWake is called on the waiter's goroutine whenever it is about to try
	// again, or was handed the key. It may be nil.
	OnWake func(Cause)
}

// Config is what Queues needs to know.
type Config struct {
	Wheel *watchdog.Wheel
	// Subscribe is the hub's, and returns how to end the subscription. A channel
	// that is own to a waiter will not be needed again.
	Subscribe func(channel string, l pubsub.Listener, own bool) (unsubscribe func(), confirmed bool)
	// HandOffs is how often in a row a key may be passed on within the process
	// before other processes get a chance.
	HandOffs int
	// Go runs f in the background, unless everything is being closed. The context
	// ends then.
	Go func(f func(ctx context.Context)) bool
	// Patience is for how long a waiter rides out a server that is Unavailable.
	Patience time.Duration
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

// keyState is small, as there is one for every key that is held.
type keyState struct {
	key     Key
	holders []Acquirer // several if one owner holds more than once
	refs    int32      // holders, waiters, and attempts outside the queue

	strangers   int32 // waiters that are Ordered and have no place on the server yet
	failed      int32 // waiters whose attempt to get one has failed; the timer makes them strangers
	handOffs    int32 // in a row
	first, last *Waiter
	unsubscribe func()  // nil: not subscribed
	subscriber  *Waiter // whose own channel it is; nil: the channel of all
	attempting  bool
	again       bool  // something has happened since the last attempt began
	cause       Cause // what it was, the first of several
	passed      bool  // a message was let pass since the last attempt began
	leaves      bool  // the release that comes is to leave the key open
	armed       bool  // whether the timer is set, to pollAt
	pollAt      time.Time

	turns turns
	open  *opening // nil where it never had to be
}

// opening is about a key that is left open from time to time, to those who poll.
type opening struct {
	last  time.Time // when it was, or began to be waited for
	until time.Time // until when nobody here tries
}

// Waiter is a place in a queue. It is claimed while somebody else tries for it or
// passes something on to it. Its states:
//
//	waiting ◀──▶ claimed ──▶ granted, or ended with err
//	   │             └─────▶ gone (gave up meanwhile)
//	   └─▶ granted, ended, gone
type Waiter struct {
	entry      *entry
	next, prev *Waiter
	req        Request
	wake       chan struct{}
	timer      watchdog.Timer
	state      waiterState
	place      place
	handed     bool // granted without an attempt
	tries      int
	troubled   time.Time // since when the server is Unavailable
	err        error     // of the last attempt, if it had no answer
}

// place is what the server knows of a waiter that is Ordered.
type place uint8

const (
	placed   place = iota // it has a place, or needs none
	stranger              // it has to make an attempt
	unplaced              // its attempt has failed
)

type waiterState uint8

const (
	waiting waiterState = iota
	claimed
	granted
	ended
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
	idle := e.idle(&req)
	if !idle && !req.Once && !req.MayHold {
		w := newWaiter(e, &req)
		if req.Ordered {
			w.place = stranger
		}
		e.pushBack(w)
		return w.wait(ctx)
	}

	inTurn := idle && !req.Once
	if inTurn {
		e.begin()
	}
	s.mu.Unlock()
	v, err := req.try(ctx, 1)
	s.mu.Lock()
	if inTurn {
		e.attempting = false
	}
	if err == nil && v.Acquired {
		if inTurn || !req.Unheld {
			e.joined(&req)
		}
		e.enlist(&req)
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
	w := newWaiter(e, &req)
	w.tries = 1
	if inTurn {
		e.pushFront(w)
	} else {
		e.pushBack(w)
	}
	if e.first == w {
		e.busy(v)
	}
	e.wakeStranger()
	return w.wait(ctx)
}

// idle reports whether nobody in this process is in the way of req. The mutex is held.
func (e *entry) idle(req *Request) bool {
	return e.first == nil && !e.attempting && (len(e.holders) == 0 || req.Eager)
}

// begin begins an attempt of somebody who does not wait yet. The mutex is held.
func (e *entry) begin() {
	e.attempting, e.again, e.passed, e.turns.yielding = true, false, false, false
}

// Together makes one attempt for requests of different keys: in their order, for those
// before the first that somebody in this process is in the way of, or for all of them
// if they say Once. It calls try with how many these are, unless there are none, and try
// returns a result for each, those that have acquired first. It returns how many
// these are: their requesters are holders, until Released.
func (q *Queues) Together(reqs []Request, try func(n int) []Result) (acquired int) {
	entries := make([]*entry, 0, len(reqs))
	for i := range reqs {
		req := &reqs[i]
		s := q.shardOf(req.Key)
		s.mu.Lock()
		e := s.enter(q, req.Key)
		free := req.Once || e.idle(req)
		switch {
		case !free:
			e.leave()
		case !req.Once:
			e.begin()
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
	results := try(len(entries))
	for i, e := range entries {
		req, r := &reqs[i], results[i]
		e.shard.mu.Lock()
		if !req.Once {
			e.attempting = false
		}
		if r.Err == nil && r.Acquired {
			acquired++
			e.joined(req)
			e.enlist(req)
		} else {
			if !req.Once {
				e.nudge(Local) // whoever came meanwhile has waited for this attempt
			}
			e.leave()
		}
		e.shard.mu.Unlock()
	}
	return acquired
}

func newWaiter(e *entry, req *Request) *Waiter {
	return &Waiter{entry: e, req: *req, wake: make(chan struct{}, 1)} // not the request itself, which most never need
}

// wait is the life of a waiter. The shard's mutex is held, and released.
func (w *Waiter) wait(ctx context.Context) error {
	e := w.entry
	q, mu := e.queues, &e.shard.mu
	if !w.req.Deadline.IsZero() {
		q.cfg.Wheel.Schedule(&w.timer, w.req.Deadline, w)
		defer q.cfg.Wheel.Cancel(&w.timer)
	}
	for {
		switch w.state {
		case granted:
			mu.Unlock()
			if w.handed {
				w.req.woken(HandedOver)
			}
			return nil
		case ended:
			mu.Unlock()
			return w.err
		}
		if err := q.over(ctx, &w.req); err != nil {
			err = errors.Join(err, w.err)
			w.giveUp()
			mu.Unlock()
			return err
		}
		if w.state == waiting {
			if w.due() {
				w.attempt(ctx)
				continue
			}
			if e.first == w {
				if e.wantsChannel() {
					e.subscribe()
					continue
				}
				e.arm()
			}
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

// due reports whether w should make an attempt now.
func (w *Waiter) due() bool {
	e := w.entry
	return !e.attempting && (w.place == stranger || e.first == w && e.again && !e.isOpen())
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

// attempt asks the server, for w and perhaps others. The mutex is held on entry
// and on return, not in between; they stay where they are meanwhile.
func (w *Waiter) attempt(ctx context.Context) {
	e := w.entry
	var cause Cause // none: it has just come
	party := e.party(w)
	if slices.Contains(party, e.first) {
		if e.again {
			cause = e.cause
		}
		e.again, e.passed = false, false
	}
	e.claim(party)
	for _, other := range party {
		other.tries++
	}
	e.shard.mu.Unlock()
	if cause != 0 {
		w.req.woken(cause)
	}
	if len(party) == 1 && party[0] == w {
		v, err := w.req.try(ctx, w.tries)
		e.shard.mu.Lock()
		e.attempted(party, []Result{{v, err}}, cause)
		return
	}
	// Not here: if w left, nobody would know what became of the others.
	all := acquirers(party)
	began := e.queues.cfg.Go(func(ctx context.Context) {
		results := w.req.Acquirer.(Grouped).TryAll(ctx, all)
		e.shard.mu.Lock()
		left := e.attempted(party, results, cause)
		e.shard.mu.Unlock()
		for _, a := range left {
			a.(Grouped).Abandon()
		}
	})
	if !began {
		runtime.Gosched() // every wait is about to be ended
	}
	e.shard.mu.Lock()
	if !began {
		e.attempted(party, make([]Result, len(party)), cause)
	}
}

// claim begins an attempt for party. The mutex is held.
func (e *entry) claim(party []*Waiter) {
	e.attempting = true
	for _, w := range party {
		w.state = claimed
	}
}

func acquirers(party []*Waiter) []Acquirer {
	all := make([]Acquirer, len(party))
	for i, w := range party {
		all[i] = w.req.Acquirer
	}
	return all
}

// attempted is called after an attempt for party, and returns those who have left
// meanwhile. The mutex is held.
func (e *entry) attempted(party []*Waiter, results []Result, cause Cause) (left []Acquirer) {
	e.attempting = false
	acquired, shared := false, false
	for i, r := range results {
		switch w := party[i]; {
		case w.state == gone:
			left = append(left, w.req.Acquirer)
			e.unlink(w)
			e.leave()
		case w.take(r):
			acquired, shared = true, shared || w.req.Shared
			w.handed = cause == HandedOver
		}
	}
	e.turns.attempted(cause == Timer, acquired)
	if shared && !slices.Contains(party, e.first) {
		e.nudge(Local)
	}
	if e.first != nil {
		if i := slices.Index(party, e.first); i >= 0 && results[i].Err == nil {
			e.busy(results[i].Verdict)
		} else if e.again {
			e.first.signal()
		}
	}
	e.wakeStranger()
	return left
}

// party returns those for whom w makes an attempt, in their order.
func (e *entry) party(w *Waiter) []*Waiter {
	party := []*Waiter{w}
	switch {
	case !w.req.Group:
	case w.req.Ordered:
		// The head, if it has a reason, and those who came since: they are at the end.
		party = party[:0]
		for other, n := e.last, e.strangers; other != nil && n > 0; other = other.prev {
			if other.place == stranger {
				n--
				if other.req.Group && other != e.first {
					party = append(party, other)
				}
			}
		}
		if e.first.req.Group && (e.again || e.first.place == stranger) {
			party = append(party, e.first)
		}
		slices.Reverse(party)
		party = party[:min(len(party), maxGroup)]
	default:
		n := 1
		for other := w.next; other != nil && other.req.Group && n < maxGroup; other = other.next {
			n++
		}
		party = slices.Grow(party, n-1)
		for other := w.next; len(party) < n; other = other.next {
			party = append(party, other)
		}
	}
	return party
}

// take gives a waiter the result of an attempt and reports whether that was
// acquired. The mutex is held.
func (w *Waiter) take(r Result) bool {
	e := w.entry
	w.state, w.err = waiting, nil
	switch {
	case r.Err == nil && r.Acquired:
		e.unlink(w)
		e.enlist(&w.req)
		w.state = granted
	case r.Err == nil:
		w.troubled = time.Time{}
		w.setPlace(placed)
		if r.Moved {
			e.unlink(w)
			e.pushBack(w)
			e.first.signal() // to subscribe, if it is another now
		}
	default:
		w.failed(r.Err)
	}
	w.signal()
	return w.state == granted
}

// failed is called when an attempt has come to an error. The mutex is held.
func (w *Waiter) failed(err error) {
	e := w.entry
	var unavailable *Unavailable
	if !errors.As(err, &unavailable) {
		w.end(err)
		return
	}
	now := time.Now()
	if w.troubled.IsZero() {
		w.troubled = now
	}
	if now.Sub(w.troubled) >= e.queues.cfg.Patience {
		w.end(unavailable.Err)
		return
	}
	w.err = unavailable.Err
	if w.req.Ordered {
		w.setPlace(unplaced)
	}
	e.lookAt(now.Add(minRetry + rand.N(maxRetry-minRetry)))
}

// enlist puts who has acquired on record, unless there is no need. The mutex is
// held.
func (e *entry) enlist(req *Request) {
	if req.Unheld {
		e.leave()
	} else {
		e.holders = append(e.holders, req.Acquirer)
	}
}

// joined is called when somebody has acquired who did not wait. The mutex is held.
func (e *entry) joined(req *Request) {
	if req.Shared {
		e.nudge(Local)
	}
	e.wakeStranger()
}

// end ends the wait with an error. The mutex is held.
func (w *Waiter) end(err error) {
	w.giveUp()
	w.state, w.err = ended, err
}

// setPlace notes what the server knows of a waiter in the list. The mutex is held.
func (w *Waiter) setPlace(p place) {
	w.entry.count(w, -1)
	w.place = p
	w.entry.count(w, 1)
}

// count counts w by its place: n is 1 when it comes into the list, -1 when it
// leaves it.
func (e *entry) count(w *Waiter, n int32) {
	switch w.place {
	case stranger:
		e.strangers += n
	case unplaced:
		e.failed += n
	}
}

// wakeStranger makes the first stranger try. The mutex is held.
func (e *entry) wakeStranger() {
	if e.strangers == 0 || e.attempting {
		return
	}
	for w := e.first; w != nil; w = w.next {
		if w.place == stranger {
			w.signal()
			return
		}
	}
}

// wantsChannel reports whether the head should subscribe. Where the server
// chooses who is next, nobody is told while this process holds: it will know.
// The mutex is held.
func (e *entry) wantsChannel() bool {
	req := &e.first.req
	return e.unsubscribe == nil && req.Channel != "" &&
		(!req.Ordered || len(e.holders) == 0 && e.first.place == placed)
}

// subscribe gives the entry its subscription. The mutex is held: the hub calls
// nobody back from here.
func (e *entry) subscribe() {
	req := &e.first.req
	if req.Ordered {
		e.subscriber = e.first
	}
	var confirmed bool
	e.unsubscribe, confirmed = e.queues.cfg.Subscribe(req.Channel, e, req.Ordered)
	if confirmed && (len(e.holders) == 0 || req.Eager) {
		// A message may have passed between the last attempt and now.
		e.mark(Subscribed)
	}
}

// unsubscribeUnused ends a subscription that nobody needs. The mutex is held.
func (e *entry) unsubscribeUnused() {
	if e.unsubscribe != nil && (e.first == nil || e.subscriber != nil && e.subscriber != e.first) {
		e.unsubscribe()
		e.unsubscribe, e.subscriber = nil, nil
	}
}

// giveUp takes the waiter out. Whoever has claimed it finds out. The mutex is
// held.
func (w *Waiter) giveUp() {
	e := w.entry
	if w.state == claimed {
		w.state = gone
		return
	}
	wasHead := e.first == w
	w.state = gone
	e.unlink(w)
	if w.place == stranger {
		e.wakeStranger() // it may have been woken to try for all
	}
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
	if err == nil && !v.Acquired && r.Backoff != nil {
		if pause := r.Backoff(n); r.Channel == "" {
			v.FreeIn = pause
		} else {
			v.poll = max(pause, time.Millisecond)
		}
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
	if v.poll > 0 && len(e.holders) == 0 { // else this process will know
		pause = min(pause, v.poll)
	}
	if e.passed {
		// The message may have been of that very holder.
		pause = min(pause, e.turns.patience())
	}
	at := time.Now().Add(pause)
	if e.failed > 0 && e.armed && e.pollAt.Before(at) {
		return // others are to try again before
	}
	e.lookAt(at)
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
	for w := e.first; w != nil && e.failed > 0; w = w.next {
		if w.place == unplaced {
			w.setPlace(stranger)
		}
	}
	e.nudge(Timer)
	e.wakeStranger()
}

// Notify is called by the hub.
func (e *entry) Notify(ev pubsub.Event) {
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	switch {
	case ev.Subscribed:
		e.nudge(Subscribed)
	case e.first != nil && e.first.req.LeftOpen != "" && ev.Payload == e.first.req.LeftOpen:
		e.leaveOpen()
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

// nudge makes the head try, later if the key is left open. The mutex is held.
func (e *entry) nudge(c Cause) {
	if e.attempting || e.first != nil {
		e.mark(c)
	}
	switch {
	case e.first == nil:
	case e.isOpen():
		e.lookAt(e.open.until)
	default:
		e.first.signal()
	}
}

// leaveOpen keeps this process from trying for a while. The mutex is held.
func (e *entry) leaveOpen() {
	now := time.Now()
	e.open = &opening{last: now, until: now.Add(openFor)}
	e.turns.yielding = false
	if e.first != nil {
		e.lookAt(e.open.until)
	}
}

// isOpen reports whether the key is left open. The mutex is held.
func (e *entry) isOpen() bool { return e.open != nil && time.Now().Before(e.open.until) }

func (e *entry) pushBack(w *Waiter) {
	e.count(w, 1)
	w.prev, w.next = e.last, nil
	if e.last != nil {
		e.last.next = w
	} else {
		e.first = w
	}
	e.last = w
}

func (e *entry) pushFront(w *Waiter) {
	e.count(w, 1)
	w.prev, w.next = nil, e.first
	if e.first != nil {
		e.first.prev = w
	} else {
		e.last = w
	}
	e.first = w
	e.unsubscribeUnused()
}

// unlink takes w out of the list; with the last waiter goes the subscription.
func (e *entry) unlink(w *Waiter) {
	e.count(w, -1)
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
	}
	e.unsubscribeUnused()
}

// Successors claims the waiters to whom the only holder of key can pass it on:
// one, or several that wait behind one another and can have it together. It
// returns none if it has to be released for all; passable says whether it may be
// passed on at all. The caller tells how that went with Grant or Return.
func (q *Queues) Successors(key Key, passable bool) []*Waiter {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		return nil
	}
	w := e.first
	if w == nil || len(e.holders) != 1 {
		return nil
	}
	// An attempt may acquire what is to be passed on; not so where the server keeps
	// the order, unless it is for this waiter itself.
	if e.attempting && !(w.req.Ordered && w.state == waiting) {
		return nil
	}
	if w.req.LeftOpen != "" {
		now := time.Now()
		if e.open == nil {
			e.open = &opening{last: now}
		}
		if e.leaves = now.Sub(e.open.last) >= openEvery; e.leaves {
			return nil
		}
	}
	if !w.req.Ordered {
		if !passable || w.req.NoHandOff || int(e.handOffs) >= q.cfg.HandOffs {
			e.turns.begin()
			return nil
		}
		e.handOffs++
	} else if !passable || w.req.NoHandOff {
		return nil
	}
	heirs := []*Waiter{w}
	for other := w.next; w.req.Shared && other != nil && other.req.Group && len(heirs) < maxGroup; other = other.next {
		heirs = append(heirs, other)
	}
	for _, heir := range heirs {
		e.unlink(heir)
		heir.state = claimed
	}
	return heirs
}

// Turn is called before the release of what nobody can pass on. The next waiter of this
// process may have it at once, as by a hand-off, but not more often in a row.
func (q *Queues) Turn(key Key) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil && e.first != nil {
		if e.handOffs++; int(e.handOffs) >= q.cfg.HandOffs {
			e.handOffs = 0
			e.turns.begin()
		}
	}
}

// LeavesOpen reports whether the release that follows leaves the key to those who
// poll: its message is to be LeftOpen.
func (q *Queues) LeavesOpen(key Key) bool {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	return e != nil && e.leaves
}

// Acquirer returns what the waiter wants to acquire with.
func (w *Waiter) Acquirer() Acquirer { return w.req.Acquirer }

// Grant makes the heirs holders in the place of from. It returns those who have
// given up meanwhile. If that is all of them, from is still on record, and what
// they were given still has to be passed on or given back.
func (q *Queues) Grant(heirs []*Waiter, from Acquirer) (gave []Acquirer) {
	e := heirs[0].entry
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	shared := false
	for _, w := range heirs {
		if w.state == gone {
			gave = append(gave, w.req.Acquirer)
			e.leave()
			continue
		}
		e.holders = append(e.holders, w.req.Acquirer)
		w.state, w.handed = granted, true
		w.signal()
		shared = shared || w.req.Shared
	}
	if len(gave) == len(heirs) {
		return gave
	}
	e.drop(from)
	if shared {
		e.nudge(Local)
	}
	e.leave()
	return gave
}

// Return puts the heirs back in front after a hand-off that did not happen, and
// returns those who have given up meanwhile. It is followed by Released.
func (q *Queues) Return(heirs []*Waiter) (gave []Acquirer) {
	e := heirs[0].entry
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	for _, w := range slices.Backward(heirs) {
		if w.state == gone {
			gave = append(gave, w.req.Acquirer)
			e.leave()
			continue
		}
		w.state = waiting
		e.pushFront(w)
	}
	switch {
	case e.first == nil:
	case e.first.req.Ordered:
		e.first.signal() // to subscribe
	default:
		e.nudge(Local) // a message may have come that was for them
	}
	return gave
}

// Offer has try make an attempt for those at the head of key's queue, on behalf of
// somebody who gives back some of what they wait for: one request can do both. It
// reports false, and does not call try, if nobody waits whom it could be made for,
// an attempt is under way, or it is time to release for all. Requests of that key
// are Grouped and Unheld.
func (q *Queues) Offer(key Key, try func(all []Acquirer) []Result) bool {
	s := q.shardOf(key)
	s.mu.Lock()
	e := s.entries[key]
	if e == nil || e.first == nil || e.attempting || int(e.handOffs) >= q.cfg.HandOffs {
		if e != nil {
			e.handOffs = 0
		}
		s.mu.Unlock()
		return false
	}
	e.handOffs++
	e.again, e.passed = false, false
	party := e.party(e.first)
	e.claim(party)
	s.mu.Unlock()
	results := try(acquirers(party))
	s.mu.Lock()
	left := e.attempted(party, results, HandedOver)
	s.mu.Unlock()
	for _, a := range left {
		a.(Grouped).Abandon()
	}
	return true
}

// Stats is what the callers of a client are doing at one moment.
type Stats struct {
	// Waiting is how many wait for a reason to make an attempt.
	Waiting int
	// Attempting is how many make an attempt, are about to, or are being handed a key.
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

// Next returns the head of the queue of key, nil if nobody waits.
func (q *Queues) Next(key Key) Acquirer {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil && e.first != nil {
		return e.first.req.Acquirer
	}
	return nil
}

// Waits reports whether anybody in the queue of key is as asked for.
func (q *Queues) Waits(key Key, is func(Acquirer) bool) bool {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil {
		for w := e.first; w != nil; w = w.next {
			if is(w.req.Acquirer) {
				return true
			}
		}
	}
	return false
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

// Release is how a hold has ended.
type Release struct {
	// Told is how many subscribers of all processes have heard of it, less than 0
	// if that is not known.
	Told int
	// Kept is set if others still hold, so that there is nothing to be had.
	Kept bool
	// Elsewhere is set if the server has chosen somebody of another process.
	Elsewhere bool
	// Turn is set if Turn was called before.
	Turn bool
}

// Released ends a's hold on key, given back or lost. If others may be waiting and
// this process has had its share, its own head stands back; otherwise it tries at
// once, if that can be of use.
func (q *Queues) Released(key Key, a Acquirer, how Release) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		return
	}
	e.drop(a)
	if e.leaves {
		e.leaves = false
		e.leaveOpen()
	}
	switch {
	case how.Kept:
		e.turns.yielding = false // there is no message to let pass
	case !how.Turn:
		e.handOffs = 0
	}
	switch {
	case how.Kept || e.first != nil && len(e.holders) > 0 && !e.first.req.Eager:
		// The same owner holds on, or others beside it.
	case how.Elsewhere:
		e.turns.yielding = false
		if e.first != nil {
			e.first.signal() // to subscribe
		}
	case e.first != nil && !e.attempting && e.turns.released(how.Told):
		e.lookAt(time.Now().Add(e.turns.patience()))
	default:
		e.turns.yielding = false
		e.nudge(Local)
	}
	e.leave()
}

// Displaced tells that a waiter may have lost its place on the server.
func (q *Queues) Displaced(key Key, a Acquirer) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		return
	}
	for w := e.first; w != nil; w = w.next {
		if w.req.Acquirer == a {
			if w.state == waiting {
				w.setPlace(stranger)
				w.signal()
			}
			return
		}
	}
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
