// Package engine is what happens between Lock and Unlock, for every kind of lock. A kind brings its
// scripts as a [Protocol] and says nothing about when they are sent. Semaphores and Redlocks use the
// queues and the state of holds too.
//
// The path of an acquisition is in lock.go, from the call to the hold that it returns. The other files
// have the queue of callers that wait for one key (request.go, queue.go, waiter.go, wake.go, turn.go), what
// is held (claim.go, hold.go, state.go, handle.go, nested.go), how it ends (unlock.go, handoff.go, cohort.go,
// transfer.go), several locks in one attempt (group.go, member.go), the other methods of a lock (object.go),
// and what a kind has to bring (kind.go).
//
// Mutexes are locked in this order: a shard of the queues, a claim, its lease or its cohort, the state of a
// hold. A method that has to be called with the mutex of its receiver locked has a name that ends in Locked;
// an entry and a waiter have the mutex of their shard, and a Hold has the mutex of its claim.
package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// call is a call that acquires a lock.
type call struct {
	site   callsite.Site
	opts   lock.Options
	once   bool // it does not wait
	member bool // the hold is for a group
}

// Lock is lock.Locker's.
func (l *Lock) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := Resolve(l.kind.Shared, opts)
	if err != nil {
		return nil, l.Object().Refused("acquire", err)
	}
	return l.handle(ctx, &call{site: callsite.Of(o.Site), opts: o, once: o.Bounded && o.Wait == 0})
}

// TryLock is lock.Locker's.
func (l *Lock) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	o, err := Resolve(l.kind.Shared, opts)
	if err != nil {
		return nil, l.Object().Refused("acquire", err)
	}
	return l.handle(ctx, &call{site: callsite.Of(o.Site), opts: o, once: true})
}

// handle acquires the lock and returns the handle of the caller.
func (l *Lock) handle(ctx context.Context, call *call) (lock.Hold, error) {
	h, err := l.acquire(ctx, call)
	if err != nil {
		return nil, err
	}

	h.KeepUntil(KeptUntil(call.opts))
	h.Given(call.site)
	return NewHandle(h), nil
}

// acquire acquires the lock: it makes an attempt, or waits for its turn.
func (l *Lock) acquire(ctx context.Context, call *call) (*Hold, error) {
	if err := l.Refuses(ctx, "acquire"); err != nil {
		return nil, err
	}
	if !call.once && !call.member {
		l.e.WarnNested(ctx, l.id, l.ID())
	}
	began := time.Now()
	if ctx.Err() != nil {
		return nil, l.failed(ctx, "acquire", began, lock.ErrNotAcquired)
	}

	if !l.s.Enter() {
		// During a shutdown an owner may re-enter what it holds; Try refuses the others.
		if _, named := lock.OwnerFrom(ctx); !named || !l.s.Stay() {
			return nil, l.Object().Refused("acquire", lock.ErrClosed)
		}
	}
	defer l.s.Leave()

	reqCtx, span := l.s.Telemetry.StartAcquire(ctx, l.id)
	req := Request{Waiting: l.kind.Waiting, Key: l.queue, Once: call.once, Site: call.site, Span: span}
	req.SetWait(&call.opts, began)

	for {
		c := new(claim)
		c.init(ctx, l, &call.opts, call.member)
		c.Waits = !call.once
		req.Acquirer = c
		req.Owned = !c.owner.IsZero()
		err := l.e.Acquire(reqCtx, &req)

		h, err := c.granted(ctx, HoldParent(ctx, call.opts), err)
		if err == errGone {
			continue // the claim that the caller was to share or take over ended before it had a hold of it
		}

		if err != nil {
			err = l.failed(ctx, "acquire", began, err)
		}
		c.endSpan(ctx, span, h, err)
		return h, err
	}
}

// Acquire blocks until the request has acquired: by an attempt, by joining a holder of the same owner,
// or because the key was passed on to it. Otherwise the error matches lock.ErrNotAcquired or
// lock.ErrClosed, or it is the error of an attempt. If ctx ends while the last attempt has no answer, the
// error includes the error of that attempt. A requester that has acquired is a holder until Released,
// unless it has joined one or is Counting.
func (q *Queues) Acquire(ctx context.Context, req *Request) error {
	req.Ctx = ctx
	pause := req.pause(1) // it may be user code, so it comes before there is anything to undo

	s := q.shard(&req.Key)
	s.mu.Lock()
	e := s.entryLocked(q, &req.Key)

	// An owner that holds the key already joins that hold, or makes an attempt beside it.
	relation, err := e.relationLocked(req)
	if err != nil || relation == Reentrant {
		e.unrefLocked()
		s.mu.Unlock()
		return err
	}

	// Others make an attempt only if no caller of this process is ahead of them, and it is the turn of this
	// process.
	yields := e.yieldsLocked(req)
	inTurn := !yields && e.startFirstLocked(req)
	if yields || !inTurn && !req.Once && relation != SameOwner && !(req.Counting && e.first == nil) {
		if err := e.deniesLocked(req); err != nil {
			e.unrefLocked()
			s.mu.Unlock()
			return err
		}
		w := e.waiterLocked(req)
		w.unregistered = req.Ordered
		e.pushBackLocked(w)
		if yields {
			e.lookAtLocked(time.Now().Add(e.turn.freeFor()))
		}
		s.mu.Unlock()
		return w.wait()
	}

	s.mu.Unlock()
	answer, err := req.try(pause)
	s.mu.Lock()

	var denied error
	if !answer.Acquired {
		denied = e.deniesLocked(req)
	}
	if answer.Acquired || err != nil && req.ends(err) || req.Once || denied != nil {
		e.finishLocked(req, inTurn, answer.Acquired)
		s.mu.Unlock()
		return q.firstResult(req, answer, err, denied)
	}

	// The key is taken, or the server has not answered: the caller waits, at the head if it was its turn.
	w := e.waiterLocked(req)
	w.tries = 1
	w.beside = relation == SameOwner
	e.queueLocked(w, inTurn, answer, err)
	s.mu.Unlock()
	return w.wait()
}

// firstResult returns the result of a call that ends with its first attempt, which had that outcome.
func (q *Queues) firstResult(req *Request, answer Answer, err, denied error) error {
	if answer.Acquired {
		return nil
	}
	if err == nil && denied != nil {
		return denied
	}
	if err == nil {
		return lock.ErrNotAcquired
	}

	if u := (*Unavailable)(nil); errors.As(err, &u) {
		err = u.Err
	}
	return errors.Join(q.over(req), err)
}

// relationLocked returns the relation of a request to the holders.
func (e *entry) relationLocked(req *Request) (relation Relation, err error) {
	if !req.Owned {
		return Conflict, nil
	}

	for _, holder := range e.holders {
		r, err := req.Acquirer.Join(holder)
		if r == Reentrant || err != nil {
			return r, err
		}
		relation = max(relation, r)
	}

	return relation, nil
}

// startFirstLocked begins an attempt of a caller that does not wait. It reports false if it makes one
// Once, or callers of this process are ahead of it.
func (e *entry) startFirstLocked(req *Request) bool {
	if req.Once || e.first != nil || e.attempting || len(e.holders) > 0 && !req.Shareable {
		return false
	}
	e.attempting = true
	e.cause = 0
	return true
}

// deniesLocked returns the error of a request that may not wait, because too many others do, or because they
// wait for the server; otherwise nil.
func (e *entry) deniesLocked(req *Request) error {
	if head := e.first; req.FailFast && head != nil && head.err != nil {
		return wire.NotAsked(head.err)
	}
	if req.MaxWaiters == 0 {
		return nil
	}

	n := 0
	for w := e.first; w != nil && n < req.MaxWaiters; w = w.next {
		n++
	}
	if n < req.MaxWaiters {
		return nil
	}

	return Crowded(n)
}

// Crowded is the error of a call that does not wait, because so many others do.
func Crowded(n int) error {
	return errors.Join(lock.ErrNotAcquired, fmt.Errorf("too many callers of this client wait already: %d (MaxWaiters)", n))
}

// finishLocked ends the attempt of a caller that does not wait. inTurn is set if startFirstLocked preceded
// it: callers that came meanwhile have waited for it.
func (e *entry) finishLocked(req *Request, inTurn, acquired bool) {
	if inTurn {
		e.attempting = false
	}
	if !acquired {
		if inTurn {
			e.nudgeLocked(telemetry.Local)
		}
		e.unrefLocked()
		return
	}

	e.turn.acquired()
	if inTurn || !req.Counting {
		if req.Shared {
			e.nudgeLocked(telemetry.Local)
		}
		e.wakeUnregisteredLocked()
	}

	e.enlistLocked(req)
}

// enlistLocked records a requester that has acquired as a holder.
func (e *entry) enlistLocked(req *Request) {
	if req.Counting {
		e.unrefLocked()
	} else {
		e.holders = append(e.holders, req.Acquirer)
	}
}

// try makes an attempt. pause is the pause after it, where the server does not say how long to wait.
func (r *Request) try(pause time.Duration) (Answer, error) {
	ctx := r.Ctx
	if !r.Deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, r.Deadline)
		defer cancel()
	}

	a, err := r.Acquirer.Try(ctx)
	if wire.NotSent(ctx, err) { // the wait is over
		return Answer{FreeIn: -1, unsent: true}, nil
	}
	if err != nil {
		return Answer{}, err
	}

	if r.Backoff != nil {
		if r.Acquirer.Channel() == "" {
			a.FreeIn = pause
		} else {
			a.poll = max(pause, time.Millisecond)
		}
	}

	return a, nil
}

// Try implements Acquirer.
func (c *claim) Try(ctx context.Context) (Answer, error) {
	if err := c.lock.s.Stopped(); err != nil {
		return Answer{}, err
	}

	sent := time.Now()
	a, err := c.lock.p.Acquire(ctx, &c.Claim)
	return c.answered(sent, a, err)
}

// answered notes the answer to an attempt that was sent then, or its error, and returns what that means
// for the wait.
func (c *claim) answered(sent time.Time, a Answer, err error) (Answer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.attempts++

	if err != nil {
		return Answer{}, c.failedLocked(err)
	}

	if !a.Acquired {
		c.waited = true
		c.ready = c.ready && !a.Requeued
		c.noteForeverLocked(a.NoExpiry)
		if a.Queued {
			c.keepPositionLocked(sent)
		}
		return a, nil
	}

	if time.Since(sent) >= watchdog.Certain(c.Lease) {
		// The lease was over before its confirmation came.
		if c.lock.kind.Ordered || c.lock.s.Err() != nil {
			c.mayHaveRun = true // and cancel releases it
			return Answer{}, Late(1, false, c.Lease, sent)
		}
		c.releaseUnknownLocked()
		c.late++
		return Answer{}, Late(c.late, c.Waits, c.Lease, sent)
	}

	c.acquiredLocked(sent, a.Token)
	return a, nil
}

// acquiredLocked notes that a request sent then has given the claim the lock.
func (c *claim) acquiredLocked(sent time.Time, token int64) {
	c.first.sent = sent
	c.token = token
	c.forgetPositionLocked()
}

// granted returns the hold of the caller of Queues.Acquire, which has returned err. The hold may be one
// of another claim of the same owner. parent is the parent of its context. The error is errGone if the
// claim is gone before the caller has a hold of it.
func (c *claim) granted(ctx, parent context.Context, err error) (*Hold, error) {
	c.mu.Lock()
	joined := c.joined
	forever := c.forever
	c.mu.Unlock()

	if err != nil {
		err = c.cancelUnder(ctx, err)
		if forever && errors.Is(err, lock.ErrNotAcquired) {
			err = errors.Join(err, errForever)
		}
		return nil, err
	}

	if joined != nil {
		c.cancel() // it may have a queue position
		return joined.reenter(ctx, parent, c)
	}

	return c.hold(ctx, parent)
}

// hold makes an acquired claim one that is held, and returns the first hold of it, whose context is a
// child of parent.
func (c *claim) hold(ctx, parent context.Context) (*Hold, error) {
	h := &c.first
	started := false
	defer func() {
		if !started { // an exporter has panicked
			c.lock.e.Ended(c.lock.queue, c)
			c.Abandon()
		}
	}()
	h.Begin(c.lock.s.Telemetry.StartHold(parent, c.lock.id, c.ID, "", c.token))
	started = true

	sent := h.sent
	terms := watchdog.Terms{Sent: sent, TTL: c.Lease}
	if !h.Fixed {
		terms.Renewer = c.lock.p.Renewer()
	}

	// In one step: a claim that is held is watched.
	c.mu.Lock()
	c.noHandOff = c.noHandOff || h.Member
	c.lock.s.Watchdog.Watch(&c.lease, c, terms) // unless the client is closing, see returned
	lost := c.state == claimGone
	c.state = claimHeld
	c.addLocked(h)
	if h.own != nil {
		h.endByItselfLocked(sent)
	}
	c.mu.Unlock()
	if !c.owner.IsZero() {
		c.lock.e.Admit(c.lock.queue, c)
	}

	if lost || c.cohort.Gone() {
		c.Lost(lock.ReasonGone, nil)
		c.lock.e.lost.remove(h) // no caller has had it
		return nil, errGone
	}
	if time.Since(sent) >= watchdog.Certain(c.Lease) {
		// This process slept through the lease.
		return nil, errors.Join(Late(1, false, c.Lease, sent), h.undo(ctx))
	}

	return h.returned(ctx)
}

// returned returns a hold just made. It unlocks the hold if the client is being closed, or its caller has
// left. A member stays held then, because its group unlocks it.
func (h *Hold) returned(ctx context.Context) (*Hold, error) {
	if h.claim.lock.s.Err() != nil { // Close waits for this
		return nil, errors.Join(lock.ErrClosed, h.Unlock(ctx))
	}
	if ctx.Err() != nil && !h.Member {
		return nil, errors.Join(lock.ErrNotAcquired, h.undo(ctx))
	}
	return h, nil
}

// undo unlocks a hold that its caller does not get, in the background if that takes long.
func (h *Hold) undo(ctx context.Context) error {
	return h.claim.lock.s.Undo(ctx, UnlockTimeout, func() error { return h.Unlock(ctx) })
}

// endSpan ends the span of an acquisition, which returns the hold or the error.
func (c *claim) endSpan(ctx context.Context, span *telemetry.Acquire, h *Hold, err error) {
	ended := false
	defer func() {
		if !ended && h != nil { // an exporter has panicked
			_ = h.Unlock(ctx)
		}
	}()

	c.mu.Lock()
	attempts, waited := int(c.attempts), c.waited || c.attempts == 0 && c.joined == nil
	c.mu.Unlock()
	span.End(ctx, attempts, waited, err)
	ended = true
}
