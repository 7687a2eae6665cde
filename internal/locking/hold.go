package locking

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

// hold is what a caller has of a claim:
//
//	(acquiring) ──▶ held ──Unlock──▶ ended
//	                 │                 ▲
//	                 └──lose──▶ lost ──┘ (Unlock reports the loss)
//
// The caller has a *handle, which nothing here points to, so that one that is
// dropped can be noticed. The mutex of the claim is that of its holds, too.
type hold struct {
	claim   *claim
	ttl     time.Duration // the lease that it asked for
	maxHold time.Duration
	own     *watchdog.Lease // nil while it ends with its claim
	site    callsite.Site
	fixed   bool // not renewed
	member  bool // of several that are taken as one
	state   holdState

	lost   *lock.LostError
	parent context.Context // Context is a child of it, made when asked for
	ctx    context.Context // what Context returns
	cancel context.CancelCauseFunc
	span   *telemetry.Hold
	group  Group // what it is part of, if anything
}

type holdState uint8

const (
	acquiring holdState = iota
	held
	lost
	ended
)

// alone is the watchdog.Holder of a hold that may end before its claim.
type alone hold

// Lost implements watchdog.Holder.
func (a *alone) Lost(reason lock.Reason, cause error) {
	h := (*hold)(a)
	c := h.claim
	c.mu.Lock()
	if h.state != held {
		c.mu.Unlock()
		return
	}
	h.lose(reason, cause)
	last := c.drop(h)
	c.mu.Unlock()
	h.endSpan()
	if last {
		// The work under it may not have noticed yet: the server's lease is left to end.
		c.Lost(reason, cause)
	}
}

// RenewalFailed implements watchdog.Holder.
func (*alone) RenewalFailed(error, time.Duration) {}

// endsAlone has the hold end by itself, as of a request sent then. The mutex of the claim
// is held.
func (h *hold) endsAlone(sent time.Time) {
	terms := watchdog.Terms{Sent: sent, TTL: h.ttl, MaxHold: h.maxHold}
	if !h.fixed {
		terms.TTL = h.maxHold
	}
	h.own = &watchdog.Lease{}
	h.claim.lock.s.Watchdog.Watch(h.own, (*alone)(h), terms)
}

// separate moves the end that the claim's lease has for the sake of this hold to a lease of
// the hold's own. The mutex of the claim is held.
func (h *hold) separate() {
	if h.own == nil && (h.fixed || h.maxHold > 0) {
		h.own = h.claim.lease.Separate((*alone)(h))
	}
}

// ends returns the lease by which the hold ends. The mutex of the claim is held.
func (h *hold) ends() *watchdog.Lease {
	if h.own != nil {
		return h.own
	}
	return &h.claim.lease
}

// lose ends the hold as lost. The mutex of the claim is held.
func (h *hold) lose(reason lock.Reason, cause error) {
	h.state = lost
	if h.own != nil {
		h.own.Forget()
	}
	h.lost = h.lostError(reason, cause)
	h.endContext(h.lost)
}

// endSpan ends the span of a hold that was lost.
func (h *hold) endSpan() {
	if !h.claim.lock.s.Go(func(context.Context) { h.span.End(h.lost) }) {
		h.span.End(h.lost)
	}
}

func (h *hold) lostError(reason lock.Reason, cause error) *lock.LostError {
	return &lock.LostError{Name: h.claim.lock.name, Owner: h.claim.ID, Reason: reason, When: time.Now(), Err: cause}
}

// endContext ends the hold's context. The mutex of the claim is held.
func (h *hold) endContext(lost *lock.LostError) {
	if h.cancel != nil {
		h.cancel(endCause(lost))
	}
	h.notifyGroup(lost)
}

func endCause(lost *lock.LostError) error {
	if lost == nil {
		return context.Canceled
	}
	return lost
}

// context returns what Hold.Context promises. It is made when first asked for:
// most short critical sections never do.
func (h *hold) context() context.Context {
	h.claim.mu.Lock()
	defer h.claim.mu.Unlock()
	if h.ctx == nil {
		h.ctx, h.cancel = context.WithCancelCause(h.parent)
		if h.state != held {
			h.cancel(endCause(h.lost))
		}
	}
	return h.ctx
}

// check ends the hold if its time is over and the watchdog has not come to it yet.
func (h *hold) check() {
	h.claim.lease.Check()
	h.claim.mu.Lock()
	own := h.own
	h.claim.mu.Unlock()
	if own != nil {
		own.Check()
	}
}

// current returns nil if h is held now, and else why it is not.
func (h *hold) current(op string) error {
	h.check()
	h.claim.mu.Lock()
	defer h.claim.mu.Unlock()
	switch h.state {
	case held:
		return nil
	case lost:
		return h.lost
	default:
		return fmt.Errorf("%w: %s %q", lock.ErrNotHeld, op, h.claim.lock.name)
	}
}

func (h *hold) remaining() time.Duration {
	c := h.claim
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case h.state != held:
		return 0
	case h.own != nil:
		return min(h.own.Remaining(), c.lease.Remaining())
	default:
		return c.lease.Remaining()
	}
}

func (h *hold) extend(ctx context.Context, lease time.Duration) error {
	if err := lock.CheckLease(lease); err != nil {
		return err
	}
	if err := h.current("Extend"); err != nil {
		return err
	}
	c := h.claim
	c.mu.Lock()
	c.stretched = true
	c.mu.Unlock()
	sent := time.Now()
	ok, err := c.lock.p.Extend(ctx, &c.Claim, lease)
	if err != nil {
		return fmt.Errorf("redlatch: extend %q: %w", c.lock.name, err)
	}
	if ok {
		h.extended(sent, lease)
	} else {
		c.Lost(lock.ReasonGone, nil)
	}
	return h.current("Extend") // it may have been unlocked meanwhile
}

// extended notes that a request sent then gave the claim at least ttl, for the sake of h.
func (h *hold) extended(sent time.Time, ttl time.Duration) {
	h.claim.mu.Lock()
	own := h.own
	h.claim.mu.Unlock()
	h.claim.lease.Extended(sent, ttl)
	if own != nil {
		own.Extended(sent, ttl)
	}
}

// fix makes the lease of the hold end ttl after sent, when a request was sent that gave
// the claim that much. It is not renewed any more.
func (h *hold) fix(sent time.Time, ttl time.Duration) {
	c := h.claim
	c.lease.Extended(sent, ttl)
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.state != held {
		return
	}
	h.fixed, h.ttl = true, ttl
	if len(c.holds) == 1 && h.own == nil {
		c.lease.Fix(sent, ttl)
		return
	}
	if h.own == nil {
		h.endsAlone(sent)
	} else {
		h.own.Fix(sent, ttl)
	}
	c.align()
}

// endAt ends the hold at that time, whatever is renewed until then.
func (h *hold) endAt(at time.Time) {
	c := h.claim
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case h.state != held:
	case h.own == nil && len(c.holds) > 1:
		h.maxHold = time.Until(at)
		h.endsAlone(time.Now())
	default:
		h.maxHold = time.Until(at)
		h.ends().EndAt(at)
	}
}

// end ends the hold here, and returns whether that leaves its claim to be released, or why
// there is nothing to end.
func (h *hold) end() (last bool, err error) {
	h.check()
	c := h.claim
	c.mu.Lock()
	defer c.mu.Unlock()
	switch h.state {
	case held:
		h.state = ended
		h.endContext(nil) // before anybody else can have the lock
		last = c.drop(h)
		if last {
			c.state = released
			c.lease.Forget()
		}
		return last, nil
	case lost:
		h.state = ended
		if c.state == gone {
			// Should the server still keep it.
			c.lock.s.Go(func(ctx context.Context) { _ = c.cohort.Release(func() error { return c.free(ctx) }) })
		}
		return false, h.lost
	default:
		return false, fmt.Errorf("%w: Unlock %q", lock.ErrNotHeld, c.lock.name)
	}
}

func (h *hold) unlock(ctx context.Context) error {
	e, err := h.startUnlock(ctx)
	if err != nil {
		return err
	}
	if !e.last {
		return e.done(nil)
	}
	return e.done(h.claim.release(e.ctx, h))
}

// ending is a hold that is being unlocked.
type ending struct {
	*hold
	last     bool            // hold of its claim
	ctx      context.Context // of its requests
	released func(error)     // ends the span of the release
}

// startUnlock ends a hold, of which at most the release is left, or returns why there is
// nothing to end.
func (h *hold) startUnlock(ctx context.Context) (ending, error) {
	last, err := h.end()
	if err != nil {
		return ending{}, err
	}
	ctx, released := h.span.StartRelease(ctx)
	if ctx.Done() != nil {
		ctx = context.WithoutCancel(ctx)
	}
	return ending{h, last, ctx, released}, nil
}

// done is called with what became of the release, and returns it.
func (e ending) done(err error) error {
	e.released(err)
	if err == nil {
		e.span.End(nil)
		return nil
	}
	var lostErr *lock.LostError
	errors.As(err, &lostErr)
	e.span.End(lostErr)
	return err
}

// handle is what the caller has.
type handle struct{ h *hold }

func newHandle(h *hold, site callsite.Site) *handle {
	h.site = site
	hd := &handle{h: h}
	runtime.SetFinalizer(hd, (*handle).dropped) // a cleanup would be two more allocations
	return hd
}

// givenBack is called when the hold is unlocked: it will not be dropped.
func (hd *handle) givenBack() { runtime.SetFinalizer(hd, nil) }

// dropped runs when the handle was collected. Finalizers run one after the other, so it does
// not block.
func (hd *handle) dropped() {
	h, c := hd.h, hd.h.claim
	c.mu.Lock()
	state := h.state
	c.mu.Unlock()
	if state != held {
		return
	}
	c.lock.s.Go(func(ctx context.Context) {
		c.lock.s.Logger.Error("redlatch: a hold was dropped without Unlock; releasing it",
			"name", c.lock.name, "kind", c.lock.p.Traits().Kind, "owner", c.ID.String(), "acquired", h.site.String())
		_ = h.unlock(ctx)
	})
}

func (hd *handle) Name() string             { return hd.h.claim.lock.name }
func (hd *handle) Owner() lock.Owner        { return hd.h.claim.ID }
func (hd *handle) Token() int64             { return hd.h.claim.token }
func (hd *handle) Context() context.Context { return hd.h.context() }

func (hd *handle) Remaining() time.Duration {
	d := hd.h.remaining()
	runtime.KeepAlive(hd)
	return d
}

func (hd *handle) Extend(ctx context.Context, lease time.Duration) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	err := hd.h.extend(ctx, lease)
	runtime.KeepAlive(hd)
	return err
}

func (hd *handle) Unlock(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	hd.givenBack()
	err := hd.h.unlock(ctx)
	runtime.KeepAlive(hd)
	return err
}
