// Package acquire is the acquire loop of every lock and semaphore: try; join the queue of
// that key in this process; subscribe; try again; wait for a message, an expiry or the next
// poll; repeat.
//
// A queue is first in, first out, and one attempt is in flight per key and process: only
// the head sends requests, and a message wakes only the head. First attempts for parts of
// something (Request.Untracked) run beside each other while nobody waits. One attempt can be
// made for several waiters (Request.Group). A holder can pass the key on to the next waiter of
// the process (Pass): no attempt, no message, no gap.
//
// Where the server keeps the queue (Request.Ordered), each waiter makes an attempt when it
// comes, which registers it there, and this queue has the same order.
//
// A mutex guards the keys of a shard. The methods of entry and waiter are called with it held,
// unless they say otherwise.
//
// The loop is in this file. The others have the state of a key (entry.go), its list of
// waiters (waiter.go), the reasons to try again (wake.go), the ways to pass a key on
// (handoff.go) and to leave it to other processes (yield.go), the waiters that the server
// orders (position.go), and attempts for several keys (batch.go).
package acquire

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// safetyPoll bounds the time for which a lost message or a key deleted by hand goes
	// unnoticed. An idle queue costs one attempt in that time.
	safetyPoll = 5 * time.Second

	// Pauses between attempts while the server is unavailable.
	minRetry = 100 * time.Millisecond
	maxRetry = time.Second

	shardCount = 32
	// maxFree is the number of unused entries that a shard keeps for reuse.
	maxFree = 64
	// maxGroup is the largest batch: it bounds the time for which a script blocks the
	// server.
	maxGroup = 100
)

// Acquire blocks until the request has acquired: by an attempt, by joining a holder of the
// same owner, or because the key was passed on to it. Otherwise the error matches
// lock.ErrNotAcquired or lock.ErrClosed, or it is that of an attempt. If ctx ends while the
// last attempt has no answer, the error includes that of the attempt. A requester that has
// acquired is a holder until Released, unless it has joined one or is Untracked.
func (q *Queues) Acquire(ctx context.Context, req *Request) error {
	// Most callers do not have to wait, and their waiters are used again.
	w, ok := q.unused.Get().(*waiter)
	if !ok {
		w = &waiter{queues: q, wake: make(chan struct{}, 1)}
	}
	w.req = *req
	w.req.Ctx = ctx

	if !w.begin() {
		err := w.result
		w.entry, w.result = nil, nil
		w.req = Request{}
		q.unused.Put(w)
		return err
	}

	// A waiter that was in a queue may still be a part of an attempt, or of a timer that fires, so it is not
	// used again.
	for !w.step() {
		select {
		case <-w.wake:
		case <-ctx.Done():
		}
	}
	return w.result
}

// begin makes an attempt, unless others are ahead. It reports whether the caller has to wait. If not, the
// result is set.
func (w *waiter) begin() (waits bool) {
	req := &w.req
	pause := req.pause(1)
	e := w.queues.enter(&req.Key)
	w.entry = e
	var relation Relation
	if relation, w.result = e.join(req); w.result != nil || relation == Joined {
		e.leave()
		e.shard.mu.Unlock()
		return false
	}
	inTurn := e.begin(req)
	if inTurn || req.Once || relation == Beside || req.Untracked && e.first == nil {
		return w.attemptFirst(relation, inTurn, pause)
	}
	if w.result = e.crowded(req); w.result != nil {
		e.leave()
	} else {
		w.waits()
		w.unregistered = req.Ordered
		e.pushBack(w)
	}
	e.shard.mu.Unlock()
	return w.result == nil
}

// attemptFirst makes the first attempt, before the caller waits. inTurn is set if entry.begin preceded
// it. The mutex is held, and released.
func (w *waiter) attemptFirst(relation Relation, inTurn bool, pause time.Duration) (waits bool) {
	e, req := w.entry, &w.req
	mu := &e.shard.mu
	mu.Unlock()
	v, err := req.try(pause)
	mu.Lock()
	// While a cluster moves the keys, the caller waits.
	var crowded error
	if !v.Acquired {
		crowded = e.crowded(req)
	}
	if v.Acquired || err != nil && !moving(err) || req.Once || crowded != nil {
		e.finish(req, inTurn, v.Acquired)
		mu.Unlock()
		w.result = w.unqueuedResult(v, err, crowded)
		return false
	}
	defer mu.Unlock()
	w.waits()
	w.tries, w.beside = 1, relation == Beside
	w.queueAfter(inTurn, v, err)
	return true
}

// unqueuedResult returns the result of a call that does not wait, after an attempt with that outcome.
func (w *waiter) unqueuedResult(v Verdict, err, crowded error) error {
	switch {
	case v.Acquired:
		return nil
	case err == nil:
		return cmp.Or(crowded, lock.ErrNotAcquired)
	}
	if u := (*Unavailable)(nil); errors.As(err, &u) {
		err = u.Err
	}
	return errors.Join(w.queues.over(&w.req), err)
}

// queueAfter makes a caller wait whose first attempt had that outcome. inTurn is set if entry.begin
// preceded it.
func (w *waiter) queueAfter(inTurn bool, v Verdict, err error) {
	e := w.entry
	if inTurn {
		e.attempting = false
		e.pushFront(w)
	} else {
		e.pushBack(w)
	}
	switch {
	case err != nil:
		w.failed(err)
	case e.first == w:
		e.busy(v)
	}
	e.wakeUnregistered()
	w.admit() // an owner that has acquired meanwhile
}

// moving reports whether an attempt failed only because a cluster moves the keys.
func moving(err error) bool { return errors.As(err, new(*Unavailable)) && wire.IsMoving(err) }

// step does what there is to do for w, until it has to wait or its wait is over, and reports
// whether that is so.
func (w *waiter) step() (over bool) {
	over = true // if user code panics, too
	defer func() {
		if over {
			w.finish()
		}
	}()
	e := w.entry
	mu := &e.shard.mu
	mu.Lock()
	for {
		if w.state > claimed { // granted, ended or gone
			mu.Unlock()
			if w.handed {
				w.req.woken(telemetry.HandedOver)
			}
			w.over = true
			return true
		}
		if err := w.queues.over(&w.req); err != nil {
			w.leave(err)
			continue
		}
		if w.state == waiting {
			if w.due() {
				w.attempt()
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
		return false
	}
}

// finish ends the wait, also if user code has panicked.
func (w *waiter) finish() {
	if !w.req.Deadline.IsZero() {
		w.queues.cfg.Wheel.Cancel(&w.timer)
	}
	if !w.over {
		w.abort()
	}
}

// abort locks the mutex and removes a waiter whose OnWake or Backoff has panicked.
func (w *waiter) abort() {
	q, mu := w.queues, &w.entry.shard.mu
	mu.Lock()
	wasGranted := w.state == granted
	if !wasGranted {
		w.giveUp()
	}
	mu.Unlock()
	if wasGranted {
		if !w.req.Untracked {
			q.Released(w.req.Key, w.req.Acquirer, Release{Receivers: -1})
		}
		w.req.Acquirer.Abandon()
	}
}

// due reports whether w should make an attempt now.
func (w *waiter) due() bool {
	e := w.entry
	return !e.attempting && (w.unregistered && !e.outage || e.first == w && e.cause != 0 && !e.isOpen())
}

// over returns the reason to stop waiting, or nil.
func (q *Queues) over(req *Request) error {
	if q.cfg.Open.Err() != nil {
		return lock.ErrClosed
	}
	if d := req.Deadline; req.Ctx.Err() != nil || !d.IsZero() && !time.Now().Before(d) {
		return lock.ErrNotAcquired
	}
	return nil
}

// attempt makes an attempt for w and, in one request, for others. It releases the mutex
// meanwhile; the waiters keep their positions.
func (w *waiter) attempt() {
	e := w.entry
	mu := &e.shard.mu
	cause, n := telemetry.Cause(0), int(w.tries)+1
	if e.first == w {
		cause = e.cause
	}
	mu.Unlock()
	// User code, while w only waits: a panic leaves nothing to undo but the wait.
	if cause != 0 {
		w.req.woken(cause)
	}
	pause := w.req.pause(n)
	mu.Lock()
	if w.state != waiting || !w.due() {
		return
	}
	batch := e.claim(w)
	mu.Unlock()
	if len(batch) == 1 {
		v, err := w.req.try(pause)
		e.attempted(batch, []Result{{v, err}}, false)
	} else if !e.queues.cfg.Go(func(ctx context.Context) {
		// In the background, because w may leave before the others have their results.
		e.attempted(batch, w.req.Acquirer.TryAll(ctx, acquirers(batch)), false)
	}) {
		runtime.Gosched() // every wait is about to be ended
		e.attempted(batch, make([]Result, len(batch)), false)
	}
	mu.Lock()
}

// claim begins an attempt of w and returns the waiters that it is for.
func (e *entry) claim(w *waiter) []*waiter {
	batch := e.batch(w)
	if slices.Contains(batch, e.first) {
		e.cause, e.yield.echo = 0, false
	}
	e.attempting = true
	for _, w := range batch {
		w.state, w.again = claimed, false
		w.tries++
	}
	return batch
}

// batch returns the waiters for which w makes an attempt, in their order.
func (e *entry) batch(w *waiter) []*waiter {
	if !w.req.Group {
		return []*waiter{w}
	}
	if !w.req.Ordered {
		n := 0
		for next := w; next != nil && next.req.Group && n < maxGroup; next = next.next {
			n++
		}
		batch := make([]*waiter, 0, n)
		for ; len(batch) < n; w = w.next {
			batch = append(batch, w)
		}
		return batch
	}
	// The head, if it has a reason, and new waiters, which are at the end.
	var batch []*waiter
	for other, n := e.last, e.unregistered; other != e.first && n > 0; other = other.prev {
		if other.unregistered {
			n--
			if other.req.Group {
				batch = append(batch, other)
			}
		}
	}
	if e.first.req.Group && (e.cause != 0 || e.first.unregistered) {
		batch = append(batch, e.first)
	}
	slices.Reverse(batch)
	return batch[:min(len(batch), maxGroup)]
}

func acquirers(batch []*waiter) []Acquirer {
	all := make([]Acquirer, len(batch))
	for i, w := range batch {
		all[i] = w.req.Acquirer
	}
	return all
}

// attempted locks the mutex and applies the results of an attempt. With handed set it was made
// for what a caller of this process gave back.
func (e *entry) attempted(batch []*waiter, results []Result, handed bool) {
	e.shard.mu.Lock()
	e.attempting = false
	acquired, shared := false, false
	var left []Acquirer // its waiters have left meanwhile
	for i, w := range batch {
		switch {
		case w.state == gone:
			left = append(left, w.req.Acquirer)
			e.remove(w)
			e.leave()
		case w.take(results[i]):
			acquired, shared = true, shared || w.req.Shared
			w.handed = handed
		}
	}
	e.yield.end(!acquired)
	switch i := slices.Index(batch, e.first); {
	case e.first == nil:
	case i >= 0 && results[i].Err == nil:
		e.busy(results[i].Verdict)
	case i < 0 && shared:
		e.nudge(telemetry.Local)
	case e.cause != 0:
		e.first.signal()
	}
	e.wakeUnregistered()
	e.shard.mu.Unlock()
	for _, a := range left {
		a.Abandon()
	}
}

// take applies the result of an attempt and reports whether it acquired.
func (w *waiter) take(r Result) bool {
	e := w.entry
	w.state = waiting
	switch {
	case r.Err != nil:
		w.failed(r.Err)
	case r.Acquired:
		e.remove(w)
		e.enlist(&w.req)
		w.state = granted
	case r.unsent:
	default:
		w.failingSince, w.err = 0, nil
		w.register(!w.again)
		if r.Moved {
			e.unlink(w)
			e.pushBack(w)
			e.first.signal() // to subscribe, if it is another now
		}
		w.admit()
	}
	w.signal()
	return w.state == granted
}

// failed applies the error of an attempt.
func (w *waiter) failed(err error) {
	e := w.entry
	var unavailable *Unavailable
	if !errors.As(err, &unavailable) {
		w.end(err)
		return
	}
	if errors.Is(w.err, lock.ErrIndeterminate) { // that request still has no answer
		w.err = errors.Join(errNoAnswer, unavailable.Err)
	} else {
		w.err = unavailable.Err
	}
	now := time.Since(started)
	if w.failingSince == 0 {
		w.failingSince = now
	}
	if now-w.failingSince >= e.queues.cfg.MaxOutage {
		w.end(w.err)
		return
	}
	if w.req.Ordered || w.beside {
		w.register(false)
	}
	e.outage = true
	e.lookAt(time.Now().Add(minRetry + rand.N(maxRetry-minRetry)))
}

// try makes an attempt. pause is the pause after it, where that is not for the server to say.
func (r *Request) try(pause time.Duration) (Verdict, error) {
	ctx := r.Ctx
	if !r.Deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, r.Deadline)
		defer cancel()
	}
	v, err := r.Acquirer.Try(ctx)
	switch {
	case wire.NotSent(ctx, err): // the wait is over
		return Verdict{FreeIn: -1, unsent: true}, nil
	case err != nil:
		return Verdict{}, err
	case r.Backoff == nil:
	case r.Acquirer.Channel() == "":
		v.FreeIn = pause
	default:
		v.poll = max(pause, time.Millisecond)
	}
	return v, nil
}

// pause returns the pause after the n-th attempt.
func (r *Request) pause(n int) time.Duration {
	if r.Backoff == nil {
		return 0
	}
	return r.Backoff(n)
}

func (r *Request) woken(c telemetry.Cause) {
	if r.OnWake != nil {
		r.OnWake(c)
	}
}
