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

// call is a call that acquires a lock.
type call struct {
	site   callsite.Site
	opts   lock.Options
	once   bool // it does not wait
	member bool // the hold is for a group
}

// Lock is lock.Locker's.
func (l *Lock) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := l.checked(lock.Resolve(opts...))
	if err != nil {
		return nil, err
	}

	once := o.Bounded && o.Wait == 0
	if !once && l.Check(ctx) == nil {
		holds.WarnNested(ctx, l.s, l.described(), l.On())
	}
	return l.handle(ctx, &call{site: callsite.Here(), opts: o, once: once})
}

// TryLock is lock.Locker's.
func (l *Lock) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := l.checked(TryOptions(lock.Resolve(opts...)))
	if err != nil {
		return nil, err
	}
	return l.handle(ctx, &call{site: callsite.Here(), opts: o, once: true})
}

// handle acquires the lock and returns the handle of the caller.
func (l *Lock) handle(ctx context.Context, call *call) (lock.Hold, error) {
	h, err := l.acquire(ctx, call)
	if err != nil {
		return nil, err
	}
	h.KeepUntil(call.opts.KeepUntil())
	h.Given(call.site)
	return holds.NewHandle(h), nil
}

// acquire acquires the lock: it makes an attempt, or waits for its turn.
func (l *Lock) acquire(ctx context.Context, call *call) (*hold, error) {
	began := time.Now()
	if err := l.Check(ctx); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, l.failed(ctx, "acquire", began, lock.ErrNotAcquired)
	}

	if !l.s.Enter() {
		// During a shutdown an owner may re-enter what it holds; Try refuses the others.
		if _, named := lock.OwnerFrom(ctx); !named || !l.s.Stay() {
			return nil, lock.ErrClosed
		}
	}
	defer l.s.Leave()

	reqCtx, span := l.s.Telemetry.StartAcquire(ctx, l.described())
	req := acquire.Request{
		Policy:     l.traits.Policy,
		Key:        l.queueKey(),
		Once:       call.once,
		MaxWaiters: call.opts.MaxWaiters,
		Site:       call.site,
	}
	if call.opts.Bounded && !call.once {
		req.Deadline = began.Add(call.opts.Wait)
	}
	if span != nil { // a method value is an allocation
		req.OnWake = span.Woken
	}

	for {
		c := l.newClaim(ctx, &call.opts, call.member)
		c.Waits = !call.once
		req.Acquirer, req.Owned = c, !c.owner.IsZero()
		err := l.q.Acquire(reqCtx, &req)
		h, err := c.granted(ctx, call.opts.HoldParent(ctx), err)
		if err == errGone {
			continue // the claim that the caller was to share or take over ended before it had a hold of it
		}

		err = l.failed(ctx, "acquire", began, err)
		c.endSpan(ctx, span, h, err)
		return h, err
	}
}

// granted returns the hold of the caller of Acquire, which has returned err. It may be one of another
// claim of the same owner. parent is the parent of its context. The error is errGone if the claim is gone
// before the caller has a hold of it.
func (c *claim) granted(ctx, parent context.Context, err error) (*hold, error) {
	c.mu.Lock()
	joined, forever := c.joined, c.forever
	c.mu.Unlock()

	if err != nil {
		err = c.leave(ctx, err)
		if forever && errors.Is(err, lock.ErrNotAcquired) {
			err = errors.Join(err, errForever)
		}
		return nil, err
	}
	if joined != nil {
		c.retire() // it may have a queue position
		return joined.reenter(ctx, parent, c)
	}
	return c.stand(ctx, parent)
}

// endSpan ends the span of an acquisition, which returns the hold or the error.
func (c *claim) endSpan(ctx context.Context, span *telemetry.Acquire, h *hold, err error) {
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
