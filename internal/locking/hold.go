package locking

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/queue"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// hold is the state of one acquisition, from the first attempt on:
//
//	acquiring ──begin──▶ held ──Unlock──▶ ended
//	                      │                 ▲
//	                      └─Lost──▶ lost ───┘ (Unlock reports the loss)
//
// The caller has a *handle, which nothing here points to, so that one that is
// dropped can be noticed.
type hold struct {
	lock    *Lock
	s       *session.Session
	p       Protocol
	claim   Claim
	named   bool
	fixed   bool
	maxHold time.Duration

	// Of the acquisition, and not changed after begin.
	deadline time.Time // of Wait
	sent     time.Time // when the request that succeeded was sent
	token    int64
	attempts int
	waited   bool
	left     time.Time // when a claim was abandoned last
	site     [siteDepth]uintptr

	lease watchdog.Lease

	mu     sync.Mutex
	state  holdState
	lost   *lock.LostError
	parent context.Context // Context is a child of it, made when asked for
	ctx    context.Context // what Context returns
	cancel context.CancelCauseFunc
	span   telemetry.Hold
}

type holdState uint8

const (
	acquiring holdState = iota
	held
	lost
	ended
)

// freshClaim gives the claim an identity that no earlier request has used.
func (h *hold) freshClaim() {
	if h.named {
		h.claim.Ticket = wire.NewRequestID()
	} else {
		h.claim.Owner = h.s.NewOwner()
	}
}

// Try implements queue.Acquirer.
func (h *hold) Try(ctx context.Context) (queue.Verdict, error) {
	if err := h.s.Err(); err != nil {
		return queue.Verdict{}, err
	}
	if !h.deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, h.deadline)
		defer cancel()
	}
	h.attempts++
	sent := time.Now()
	a, err := h.p.Acquire(ctx, &h.claim)
	switch {
	case err != nil:
		return queue.Verdict{}, h.failed(err)
	case a.Reentered && time.Since(h.left) < settleTime:
		// What holds may be the claim that was abandoned, on its way out.
		return queue.Verdict{FreeIn: minReleaseWait}, nil
	case a.Reentered:
		return queue.Verdict{}, fmt.Errorf("%w: %q by owner %v", lock.ErrReentered, h.lock.name, h.claim.Owner)
	case !a.Acquired:
		h.waited, h.left = true, time.Time{}
		return queue.Verdict{FreeIn: a.FreeIn}, nil
	case time.Since(sent) >= h.claim.Lease:
		// The lease was over before its confirmation came.
		h.abandon()
		return queue.Verdict{FreeIn: 0}, nil
	}
	h.sent, h.token = sent, a.Token
	return queue.Verdict{Acquired: true}, nil
}

// failed turns the error of an attempt into what it means for the wait.
func (h *hold) failed(err error) error {
	if h.s.Err() != nil {
		return errors.Join(lock.ErrClosed, err)
	}
	switch outcomeOf(err) {
	case refused:
		return fmt.Errorf("redlatch: acquire %q: %w", h.lock.name, err)
	case passing:
		return &queue.Unavailable{Err: fmt.Errorf("redlatch: acquire %q: %w", h.lock.name, err)}
	default:
		h.abandon()
		return &queue.Unavailable{Err: fmt.Errorf("%w: acquire %q: %w", lock.ErrIndeterminate, h.lock.name, err)}
	}
}

// abandon gives up the claim as it stands, whatever became of it on the server,
// and goes on under a new one.
func (h *hold) abandon() {
	h.left = time.Now()
	h.lock.settle(h.claim, true)
	h.freshClaim()
}

// begin makes a hold of an acquisition that the queue says has succeeded.
func (h *hold) begin(ctx context.Context) error {
	h.parent, h.span = h.s.Telemetry.StartHold(ctx, h.lock.described(), h.claim.Owner, h.token)
	h.lease.Key, h.lease.Owner = h.claim.Key, h.claim.Owner.String()
	if h.named {
		h.lease.Ticket = wire.UnlockLatch(h.claim.Key, h.claim.Ticket)
	}
	terms := watchdog.Terms{Sent: h.sent, TTL: h.claim.Lease, MaxHold: h.maxHold}
	if !h.fixed {
		terms.Renewer = h.p.Renewer()
	}
	runtime.Callers(siteSkip, h.site[:])
	// In one step: whoever finds this hold by its owner finds it watched, or not
	// yet held.
	h.mu.Lock()
	watched := h.s.Dog.Watch(&h.lease, h, terms)
	h.state = held
	h.mu.Unlock()
	switch {
	case !watched || h.s.Err() != nil: // the client is being closed, and waits for this
		return errors.Join(lock.ErrClosed, h.unlock(ctx))
	case ctx.Err() != nil:
		// Handed over in the moment the caller left.
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx), h.unlock(ctx))
	case time.Since(h.sent) >= h.claim.Lease:
		// This process slept through the lease.
		return errors.Join(lock.ErrNotAcquired, h.unlock(ctx))
	}
	return nil
}

// isOf reports whether h is held now, by that owner.
func (h *hold) isOf(o lock.Owner) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state == held && h.claim.Owner == o
}

// Lost implements watchdog.Holder.
func (h *hold) Lost(reason lock.Reason, cause error) {
	h.mu.Lock()
	if h.state != held {
		h.mu.Unlock()
		return
	}
	h.state = lost
	h.lease.Forget()
	h.lost = h.lostError(reason, cause)
	h.endContext(h.lost)
	lostErr := h.lost
	h.mu.Unlock()
	h.s.Queues.Released(h.lock.queueKey(), h, 0)
	// Not here: this may be the watchdog's goroutine, and an exporter may block.
	if !h.s.Go(func(context.Context) { h.span.End(lostErr) }) {
		h.span.End(lostErr)
	}
}

// RenewalFailed implements watchdog.Holder.
func (h *hold) RenewalFailed(err error, left time.Duration) { h.span.RenewalFailed(err, left) }

func (h *hold) lostError(reason lock.Reason, cause error) *lock.LostError {
	return &lock.LostError{Name: h.lock.name, Owner: h.claim.Owner, Reason: reason, When: time.Now(), Err: cause}
}

// endContext ends the hold's context. h.mu is held.
func (h *hold) endContext(lost *lock.LostError) {
	if h.cancel != nil {
		h.cancel(endCause(lost))
	}
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
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ctx == nil {
		h.ctx, h.cancel = context.WithCancelCause(h.parent)
		if h.state != held {
			h.cancel(endCause(h.lost))
		}
	}
	return h.ctx
}

func (h *hold) extend(ctx context.Context, lease time.Duration) error {
	if err := lock.CheckLease(lease); err != nil {
		return err
	}
	h.lease.Check()
	h.mu.Lock()
	state, lostErr := h.state, h.lost
	h.mu.Unlock()
	switch state {
	case held:
	case lost:
		return lostErr
	default:
		return fmt.Errorf("%w: Extend %q", lock.ErrNotHeld, h.lock.name)
	}
	sent := time.Now()
	ok, err := h.p.Extend(ctx, &h.claim, lease)
	if err != nil {
		return fmt.Errorf("redlatch: extend %q: %w", h.lock.name, err)
	}
	if ok {
		h.lease.Extended(sent, lease)
	} else {
		h.Lost(lock.ReasonGone, nil)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.lost != nil:
		return h.lost
	case h.state != held: // unlocked meanwhile
		return fmt.Errorf("%w: Extend %q", lock.ErrNotHeld, h.lock.name)
	default:
		return nil
	}
}

func (h *hold) unlock(ctx context.Context) error {
	// A named owner may have taken the lock again the moment this lease was over:
	// what the server has then is not this hold's to release.
	h.lease.Check()
	h.mu.Lock()
	switch h.state {
	case held:
		h.state = ended
		h.endContext(nil) // before anybody else can have the lock
		h.mu.Unlock()
	case lost:
		h.state = ended
		err := h.lost
		h.mu.Unlock()
		// Should the server still keep it.
		h.s.Go(func(ctx context.Context) { _, _ = h.lock.release(ctx, &h.claim) })
		return err
	default:
		h.mu.Unlock()
		return fmt.Errorf("%w: Unlock %q", lock.ErrNotHeld, h.lock.name)
	}
	h.lease.Forget()
	ctx, done := h.span.StartRelease(ctx)
	err := h.release(context.WithoutCancel(ctx))
	done(err)
	var lostErr *lock.LostError
	errors.As(err, &lostErr)
	h.span.End(lostErr)
	return err
}

// release passes the lock on to the next waiter of this process, or frees it.
// What it returns is about this hold alone.
func (h *hold) release(ctx context.Context) error {
	from := h // who holds the lock on the server, and is done with it
	var passedOn bool
	for {
		w := h.s.Queues.Successor(h.lock.queueKey(), !from.named)
		if w == nil {
			break
		}
		to := w.Acquirer().(*hold)
		sent := time.Now()
		reqCtx, cancel := h.lock.bounded(ctx)
		a, err := h.p.HandOff(reqCtx, &from.claim, []*Claim{&to.claim})
		cancel()
		if err == nil && a.Acquired {
			to.sent, to.token = sent, a.Token
			h.span.HandOff(ctx)
			if w.Grant(h) {
				return nil
			}
			from = to // who has left: pass it on in that name
			continue
		}
		if err != nil && outcomeOf(err) == unknown {
			passedOn = true // perhaps
			to.abandon()
		}
		w.Return()
		break
	}

	released, err := h.lock.release(ctx, &from.claim)
	h.s.Queues.Released(h.lock.queueKey(), h, released.Told)
	switch {
	case from != h, passedOn && err == nil:
		return nil // what became of the lock after this hold is not its business
	case err == nil && released.State == NotHeld:
		return h.lostError(lock.ReasonGone, nil)
	case isWrongType(err):
		return h.lostError(lock.ReasonGone, err) // whatever is there now is not this lock
	case err != nil:
		return fmt.Errorf("redlatch: unlock %q: %w", h.lock.name, err)
	}
	return nil
}

// handle is what the caller holds.
type handle struct {
	h       *hold
	cleanup runtime.Cleanup
}

func newHandle(h *hold) *handle {
	hd := &handle{h: h}
	hd.cleanup = runtime.AddCleanup(hd, dropped, h)
	return hd
}

// dropped runs when a handle was collected.
func dropped(h *hold) {
	h.mu.Lock()
	state := h.state
	h.mu.Unlock()
	if state != held {
		return
	}
	h.s.Logger.Error("redlatch: a hold was dropped without Unlock; releasing it",
		"name", h.lock.name, "kind", h.p.Traits().Kind, "owner", h.claim.Owner.String(), "acquired", h.acquiredAt())
	h.s.Go(func(ctx context.Context) { _ = h.unlock(ctx) })
}

func (hd *handle) Name() string             { return hd.h.lock.name }
func (hd *handle) Owner() lock.Owner        { return hd.h.claim.Owner }
func (hd *handle) Token() int64             { return hd.h.token }
func (hd *handle) Context() context.Context { return hd.h.context() }

func (hd *handle) Remaining() time.Duration {
	d := hd.h.lease.Remaining()
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
	hd.cleanup.Stop()
	err := hd.h.unlock(ctx)
	runtime.KeepAlive(hd)
	return err
}

const (
	siteDepth = 8
	siteSkip  = 4 // runtime.Callers, begin, acquire, Lock or TryLock
)

// acquiredAt returns the first line outside this module on the stack of the
// acquisition.
func (h *hold) acquiredAt() string {
	n := 0
	for n < siteDepth && h.site[n] != 0 {
		n++
	}
	if n == 0 {
		return "unknown"
	}
	frames := runtime.CallersFrames(h.site[:n])
	for {
		f, more := frames.Next()
		if !strings.HasPrefix(f.Function, "github.com/redlatch/redlatch/") || strings.HasSuffix(f.File, "_test.go") || !more {
			return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
		}
	}
}
