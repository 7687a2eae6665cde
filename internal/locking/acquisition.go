package locking

import (
	"context"
	"errors"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/callsite"
	holds "github.com/redlatch/redlatch/internal/hold"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/lock"
)

// acquisition is a call that acquires a lock.
//
// Thousands of callers may wait for locks, each with a stack of its own. A goroutine starts with a
// stack of 2 KiB, of which the runtime reserves 928 bytes, and a stack that has grown hardly ever
// shrinks again. So the frames between the user's call and the wait are small: methods share
// the acquisition instead of passing its parts on, and what needs a larger frame is in a function
// that returns before the wait or is called after it. The same holds for package acquire.
// TestWaitersHaveSmallStacks in benchmarks verifies it.
type acquisition struct {
	lock   *Lock
	ctx    context.Context // of the call
	opts   lock.Options
	once   bool // it does not wait
	member bool // the hold is for a group
	gone   bool // the claim is, before the caller has a hold of it
	began  instant
	site   callsite.Site
	span   *span // nil if nobody reads it
	claim  *claim
}

// span is the span of an acquisition.
type span struct {
	telemetry.Acquire
	ctx context.Context // of the requests
}

// resolve sets the options of Lock.
func (a *acquisition) resolve(opts []lock.Option) (err error) {
	if a.opts, err = lock.Resolve(opts...); err != nil {
		return err
	}
	a.once = a.opts.Bounded && a.opts.Wait == 0
	return a.lock.check(&a.opts)
}

// warnNested warns of a nested acquisition by Lock.
func (a *acquisition) warnNested() {
	if l := a.lock; !a.once && l.Check(a.ctx) == nil {
		holds.WarnNested(a.ctx, l.s, l.described(), l.On())
	}
}

// acquire acquires the lock: it makes an attempt or waits, again if the claim is gone by then.
func (a *acquisition) acquire() (*hold, error) {
	if err := a.begin(); err != nil {
		return nil, err
	}
	defer a.leave()
	a.startSpan()
	for {
		h, err := a.outcome(a.prepare().Acquire())
		if !a.gone {
			return h, err
		}
	}
}

// begin begins the acquisition, unless the result says why not. The session must be left after it.
func (a *acquisition) begin() error {
	l := a.lock
	a.began, a.site = instantOf(time.Now()), callsite.Here()
	if err := l.Check(a.ctx); err != nil {
		return err
	}
	if a.ctx.Err() != nil {
		return a.failed(lock.ErrNotAcquired)
	}
	if !l.s.Enter() {
		// During a shutdown an owner may re-enter what it holds; Try refuses the others.
		if _, named := lock.OwnerFrom(a.ctx); !named || !l.s.Stay() {
			return lock.ErrClosed
		}
	}
	return nil
}

func (a *acquisition) leave() { a.lock.s.Leave() }

// failed returns the error that the caller gets.
func (a *acquisition) failed(err error) error {
	return a.lock.failed(a.ctx, "acquire", a.began.time(), err)
}

// startSpan begins the span of the acquisition.
func (a *acquisition) startSpan() {
	if t := a.lock.s.Telemetry; t != nil {
		ctx, acquire := t.StartAcquire(a.ctx, a.lock.described())
		a.span = &span{acquire, ctx}
	}
}

// prepare makes a claim, and returns what requests it.
func (a *acquisition) prepare() *acquire.Waiter {
	a.claim = a.lock.newClaim(a.ctx, &a.opts, a.member)
	w := a.lock.q.Prepare()
	a.describe(w.Request())
	return w
}

// describe sets the request for the claim.
func (a *acquisition) describe(req *acquire.Request) {
	c, traits := a.claim, a.lock.p.Traits()
	c.Waits = !a.once
	*req = acquire.Request{
		Ctx:      a.ctx,
		Policy:   traits.Policy,
		Key:      acquire.Key{Kind: traits.Queue, Name: a.lock.key},
		Acquirer: c,
		Once:     a.once,
		Owned:    c.rare != nil, // only an owner can be known yet

		MaxWaiters: a.opts.MaxWaiters,
		Site:       a.site,
	}
	if a.opts.Bounded && !a.once {
		req.Deadline = a.began.time().Add(a.opts.Wait)
	}
	if a.span != nil { // a method value is an allocation
		req.Ctx, req.OnWake = a.span.ctx, a.span.Woken
	}
}

// outcome returns what the caller gets after a request with that result, unless the claim is gone.
func (a *acquisition) outcome(err error) (*hold, error) {
	h, err := a.granted(err)
	if a.gone = err == errGone; a.gone {
		return nil, nil
	}
	return h, a.ended(h, err)
}

// granted returns the hold of the caller after a request with that result. It may be one of another
// claim of the same owner.
func (a *acquisition) granted(err error) (*hold, error) {
	c := a.claim
	c.mu.Lock()
	joined, forever := c.known().joined, c.known().forever
	c.mu.Unlock()
	switch {
	case err != nil:
		if err = c.leave(a.ctx, err); forever && errors.Is(err, lock.ErrNotAcquired) {
			err = errors.Join(err, errForever)
		}
		return nil, err
	case joined != nil:
		c.retire() // it may have a queue position
		return joined.reenter(a.ctx, a.opts.HoldParent(a.ctx), c)
	default:
		return c.stand(a.ctx, a.opts.HoldParent(a.ctx))
	}
}

// ended ends the span of the acquisition, which has the hold or the error as its result. It returns
// the error that the caller gets.
func (a *acquisition) ended(h *hold, err error) error {
	c := a.claim
	err = a.failed(err)
	if a.span == nil {
		return err
	}
	ended := false
	defer func() {
		if !ended && h != nil { // an exporter has panicked
			_ = h.Unlock(a.ctx)
		}
	}()
	c.mu.Lock()
	attempts, waited, joined := int(c.attempts), c.waited, c.known().joined != nil
	c.mu.Unlock()
	a.span.End(a.ctx, attempts, waited || attempts == 0 && !joined, err)
	ended = true
	return err
}

// handle returns the handle that the caller of Lock or TryLock gets.
//
//go:noinline
func (a *acquisition) handle(h *hold) lock.Hold {
	h.KeepUntil(a.opts.KeepUntil())
	h.Given(a.site)
	return holds.NewHandle(h)
}
