// Package acquire is the acquire loop of every lock and semaphore: try; join the queue of
// that key in this process; subscribe; try again; wait for a message, an expiry or the next
// poll; repeat.
//
// A queue is first in, first out, and one attempt is in flight per key and process: only
// the head sends requests, and a message wakes only the head. One attempt can be made for
// several waiters (Request.Group). A holder can pass the key on to the next waiter of the
// process (Pass): no attempt, no message, no gap.
//
// Where the server keeps the queue (Request.Ordered), each waiter makes an attempt when it
// comes, which registers it there, and this queue has the same order.
//
// The loop is in this file. The others have the state of a key (entry.go), its list of
// waiters (waiter.go), the reasons to try again (wake.go), the ways to pass a key on
// (handoff.go) and to leave it to other processes (yield.go), the waiters that the server
// orders (position.go), and attempts for several keys (batch.go).
package acquire

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/telemetry"
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
func (q *Queues[A]) Acquire(ctx context.Context, req Request[A]) error {
	pause := req.pause(1)
	s := q.shardOf(req.Key)
	s.mu.Lock()
	e := s.enter(q, req.Key)
	relation, err := e.join(&req)
	if err != nil || relation == Joined {
		e.leave()
		s.mu.Unlock()
		return err
	}
	idle := e.idle(&req)
	if !idle && !req.Once && relation != Beside {
		w := newWaiter(e, &req)
		if req.Ordered {
			w.registration = unregistered
		}
		e.pushBack(w)
		return w.wait(ctx)
	}

	inTurn := idle && !req.Once
	if inTurn {
		e.begin()
	}
	s.mu.Unlock()
	v, err := req.try(ctx, pause)
	s.mu.Lock()
	if inTurn {
		e.attempting = false
	}
	if err == nil && v.Acquired {
		if inTurn || !req.Untracked {
			e.joined(&req)
		}
		e.enlist(&req)
		s.mu.Unlock()
		return nil
	}
	if err != nil || req.Once {
		if inTurn {
			e.nudge(telemetry.Local) // callers that came meanwhile have waited for this attempt
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
	if relation, err := e.join(&req); err != nil || relation == Joined {
		if inTurn {
			e.nudge(telemetry.Local)
		}
		e.leave()
		s.mu.Unlock()
		return err
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
	e.wakeUnregistered()
	return w.wait(ctx)
}

// wait is the loop of a waiter. The mutex is held on entry, and released.
func (w *waiter[A]) wait(ctx context.Context) error {
	if !w.req.Deadline.IsZero() {
		wheel := w.entry.queues.cfg.Wheel
		wheel.Schedule(&w.timer, w.req.Deadline, w)
		defer wheel.Cancel(&w.timer)
	}
	over := false
	defer func() {
		if !over {
			w.abort()
		}
	}()
	err := w.loop(ctx)
	over = true
	return err
}

func (w *waiter[A]) loop(ctx context.Context) error {
	e := w.entry
	q, mu := e.queues, &e.shard.mu
	for {
		switch w.state {
		case granted:
			mu.Unlock()
			if w.handed {
				w.req.woken(telemetry.HandedOver)
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
		case <-q.cfg.Closed:
		}
		mu.Lock()
	}
}

// abort removes a waiter whose OnWake or Backoff has panicked. The mutex is not held then.
func (w *waiter[A]) abort() {
	e := w.entry
	e.shard.mu.Lock()
	if w.state != granted {
		w.giveUp()
		e.shard.mu.Unlock()
		return
	}
	e.shard.mu.Unlock()
	e.queues.Released(e.key, w.req.Acquirer, Release{Receivers: -1})
	w.req.Acquirer.Abandon()
}

// due reports whether w should make an attempt now. The mutex is held.
func (w *waiter[A]) due() bool {
	e := w.entry
	return !e.attempting && (w.registration == unregistered || e.first == w && e.again && !e.isOpen())
}

// over returns the reason to stop waiting, or nil.
func (q *Queues[A]) over(ctx context.Context, req *Request[A]) error {
	select {
	case <-q.cfg.Closed:
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

// attempt makes an attempt for w and, in one request, for others. The mutex is held on entry
// and on return, and released in between; the waiters keep their positions.
func (w *waiter[A]) attempt(ctx context.Context) {
	e := w.entry
	cause, n := w.cause(), w.tries+1
	e.shard.mu.Unlock()
	// User code, while w only waits: a panic leaves nothing to undo but the wait.
	if cause != 0 {
		w.req.woken(cause)
	}
	pause := w.req.pause(n)
	e.shard.mu.Lock()
	if w.state != waiting || !w.due() {
		return
	}
	batch := e.batch(w)
	if slices.Contains(batch, e.first) {
		e.again, e.yield.echo = false, false
	}
	e.claim(batch)
	for _, other := range batch {
		other.tries++
	}
	e.shard.mu.Unlock()
	if len(batch) == 1 && batch[0] == w {
		v, err := w.req.try(ctx, pause)
		e.shard.mu.Lock()
		e.attempted(batch, []Result{{v, err}}, cause)
		return
	}
	// On another goroutine, because w may leave before the others have their results.
	all := acquirers(batch)
	began := e.queues.cfg.Go(func(ctx context.Context) {
		results := w.req.Acquirer.TryAll(ctx, all)
		e.shard.mu.Lock()
		left := e.attempted(batch, results, cause)
		e.shard.mu.Unlock()
		for _, a := range left {
			a.Abandon()
		}
	})
	if !began {
		runtime.Gosched() // every wait is about to be ended
	}
	e.shard.mu.Lock()
	if !began {
		e.attempted(batch, make([]Result, len(batch)), cause)
	}
}

// cause returns the reason for an attempt of w, none if it is new. The mutex is held.
func (w *waiter[A]) cause() telemetry.Cause {
	if e := w.entry; e.again && slices.Contains(e.batch(w), e.first) {
		return e.cause
	}
	return 0
}

// claim begins an attempt for a batch. The mutex is held.
func (e *entry[A]) claim(batch []*waiter[A]) {
	e.attempting = true
	for _, w := range batch {
		w.state = claimed
	}
}

// batch returns the waiters for which w makes an attempt, in their order. The mutex is held.
func (e *entry[A]) batch(w *waiter[A]) []*waiter[A] {
	batch := []*waiter[A]{w}
	switch {
	case !w.req.Group:
	case w.req.Ordered:
		// The head, if it has a reason, and new waiters, which are at the end.
		batch = batch[:0]
		for other, n := e.last, e.unregistered; other != nil && n > 0; other = other.prev {
			if other.registration == unregistered {
				n--
				if other.req.Group && other != e.first {
					batch = append(batch, other)
				}
			}
		}
		if e.first.req.Group && (e.again || e.first.registration == unregistered) {
			batch = append(batch, e.first)
		}
		slices.Reverse(batch)
		batch = batch[:min(len(batch), maxGroup)]
	default:
		n := 1
		for other := w.next; other != nil && other.req.Group && n < maxGroup; other = other.next {
			n++
		}
		batch = slices.Grow(batch, n-1)
		for other := w.next; len(batch) < n; other = other.next {
			batch = append(batch, other)
		}
	}
	return batch
}

func acquirers[A Acquirer[A]](batch []*waiter[A]) []A {
	all := make([]A, len(batch))
	for i, w := range batch {
		all[i] = w.req.Acquirer
	}
	return all
}

// attempted applies the results of an attempt, and returns the acquirers that have left
// meanwhile. The mutex is held.
func (e *entry[A]) attempted(batch []*waiter[A], results []Result, cause telemetry.Cause) (left []A) {
	e.attempting = false
	acquired, shared := false, false
	for i, r := range results {
		switch w := batch[i]; {
		case w.state == gone:
			left = append(left, w.req.Acquirer)
			e.unlink(w)
			e.leave()
		case w.take(r):
			acquired, shared = true, shared || w.req.Shared
			w.handed = cause == telemetry.HandedOver
		}
	}
	e.yield.end(!acquired)
	if shared && !slices.Contains(batch, e.first) {
		e.nudge(telemetry.Local)
	}
	if e.first != nil {
		if i := slices.Index(batch, e.first); i >= 0 && results[i].Err == nil {
			e.busy(results[i].Verdict)
		} else if e.again {
			e.first.signal()
		}
	}
	e.wakeUnregistered()
	return left
}

// take applies the result of an attempt and reports whether it acquired. The mutex is held.
func (w *waiter[A]) take(r Result) bool {
	e := w.entry
	w.state, w.err = waiting, nil
	switch {
	case r.Err == nil && r.Acquired:
		e.unlink(w)
		e.enlist(&w.req)
		w.state = granted
	case r.Err == nil:
		w.failingSince = time.Time{}
		w.setRegistration(registered)
		if r.Moved {
			e.unlink(w)
			e.pushBack(w)
			e.first.signal() // to subscribe, if it is another now
		}
		if w.req.Owned {
			w.admit()
		}
	default:
		w.failed(r.Err)
	}
	w.signal()
	return w.state == granted
}

// failed applies the error of an attempt. The mutex is held.
func (w *waiter[A]) failed(err error) {
	e := w.entry
	var unavailable *Unavailable
	if !errors.As(err, &unavailable) {
		w.end(err)
		return
	}
	now := time.Now()
	if w.failingSince.IsZero() {
		w.failingSince = now
	}
	if now.Sub(w.failingSince) >= e.queues.cfg.MaxOutage {
		w.end(unavailable.Err)
		return
	}
	w.err = unavailable.Err
	if w.req.Ordered {
		w.setRegistration(registrationFailed)
	}
	e.lookAt(now.Add(minRetry + rand.N(maxRetry-minRetry)))
}

// try makes an attempt. pause is the pause after it, where that is not for the server to say.
func (r *Request[A]) try(ctx context.Context, pause time.Duration) (Verdict, error) {
	if !r.Deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, r.Deadline)
		defer cancel()
	}
	v, err := r.Acquirer.Try(ctx)
	switch {
	case err != nil || v.Acquired || r.Backoff == nil:
	case r.Channel == "":
		v.FreeIn = pause
	default:
		v.poll = max(pause, time.Millisecond)
	}
	return v, err
}

// pause returns the pause after the n-th attempt.
func (r *Request[A]) pause(n int) time.Duration {
	if r.Backoff == nil {
		return 0
	}
	return r.Backoff(n)
}

func (r *Request[A]) woken(c telemetry.Cause) {
	if r.OnWake != nil {
		r.OnWake(c)
	}
}
