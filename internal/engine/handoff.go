package engine

import (
	"context"
	"errors"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// handOff gives the claim, of which h was the last hold, to the next waiter of this process, or releases
// it. Its requests end by the given time.
func (c *claim) handOff(ctx context.Context, by time.Time, h *Hold) error {
	key := c.lock.queue
	for checked := false; ; checked = true {
		p := passing{claim: c, last: h, by: by, checked: checked}
		if c.lock.e.Pass(key, c, p.give) {
			c.lock.s.Telemetry.HandedOver(ctx, c.lock.id, 1)
			p.removeTraces()
			if checked {
				return nil
			}
			// Only now the server is asked whether it still had the claim. Unlock returns the answer.
			return c.confirm(ctx, p.check)
		}
		if !p.needsCheck || checked {
			return c.end(ctx, by, p.needsCheck)
		}

		err := c.confirm(ctx, c.cohort.Enqueue(by))
		if errors.Is(err, lock.ErrLost) {
			c.repeatRelease()
			c.lock.e.Ended(key, c)
			return err
		}
		if err != nil {
			return c.end(ctx, by, false)
		}
	}
}

// end releases the claim, and answers for the holds that have passed it on.
func (c *claim) end(ctx context.Context, by time.Time, elsewhere bool) error {
	if c.cohort == nil { // no closure
		return c.release(ctx, by, elsewhere, false)
	}
	return c.cohort.Release(by, func(by time.Time) error { return c.release(ctx, by, elsewhere, false) })
}

// passing is an attempt to give a claim to the next waiter of the process.
type passing struct {
	claim   *claim
	last    *Hold // of the claim, which has ended
	by      time.Time
	checked bool // the server has just confirmed the claim

	// give sets the rest: whether the waiter can have the claim only after a check, and if it has the
	// claim, the check that follows, and what removes the waiter's traces on the server.
	needsCheck   bool
	check        *Batch
	removeTraces func()
}

// give gives the claim to a waiter that wants the same, and reports whether it has.
func (p *passing) give(waiter Acquirer) bool {
	c := p.claim
	next := waiter.(*claim)
	if !c.suits(p.last, next) {
		return false
	}

	token, ready := c.readyFor(next, p.checked)
	if !ready {
		p.needsCheck = true
		return false
	}

	if !p.checked {
		p.check = c.cohort.Enqueue(p.by) // before the claim is passed on: the next hold may end before this one asks
	}
	p.removeTraces = c.giveTo(next, token, p.checked)
	return true
}

// suits reports whether a waiter can go on with the claim as it is.
func (c *claim) suits(last *Hold, next *claim) bool {
	to := &next.first
	if !c.lock.kind.HandOff || !c.lock.sameKind(next.lock) || last.Member || to.Member || last.Fixed != to.Fixed || c.Lease != next.Lease {
		return false
	}

	c.mu.Lock()
	defer c.mu.Unlock()

	if c.noHandOff {
		return false
	}
	if c.cohort == nil {
		c.cohort = NewCohort(c.first.sent)
	}
	return true
}

// readyFor reports whether the claim can be passed on to a waiter without a check, and with what token.
func (c *claim) readyFor(next *claim, checked bool) (token int64, ok bool) {
	_, valid := c.cohort.Valid()
	if !checked && (!valid || next.first.Fixed) { // a fixed lease counts from an answer
		return 0, false
	}

	if c.lock.kind.Ordered {
		next.mu.Lock()
		defer next.mu.Unlock()
		return 0, next.ready
	}
	if c.lock.kind.Checker != nil {
		return c.cohort.draw()
	}

	return 0, true
}

// giveTo gives the claim to a waiter. It returns what removes the waiter's own traces.
func (c *claim) giveTo(next *claim, token int64, checked bool) (removeTraces func()) {
	sent, _ := c.cohort.Valid()
	c.mu.Lock()
	mayHaveRun := c.mayHaveRun
	c.mu.Unlock()

	next.mu.Lock()
	defer next.mu.Unlock()

	removeTraces = func() {}
	waited := next.Claim
	if next.mayHaveRun || next.queued {
		c.cohort.passedOn(next.ID) // with the next check, or the release
	}
	if next.mayHaveRun {
		removeTraces = func() { c.lock.releaseUnknown(waited, true) }
	} else if next.queued && checked { // the next check may be long after
		removeTraces = func() { c.lock.leaveQueue(waited) }
	}

	next.ID = c.ID
	next.mayHaveRun = mayHaveRun
	next.cohort = c.cohort
	next.acquiredLocked(sent, token)
	return removeTraces
}

// confirm asks whether the claim was held. If not, the holds that it has now are lost too.
func (c *claim) confirm(ctx context.Context, batch *Batch) error {
	err := c.cohort.Confirm(batch, func(by time.Time) error {
		ok, err := c.checkOwnership(ctx, by)
		if ok {
			return nil
		}
		return c.releaseError(Release{State: NotHeld}, err)
	})

	if errors.Is(err, lock.ErrLost) {
		for _, other := range c.lock.holders() {
			if other.holdsAs(c.ID) {
				other.Lost(lock.ReasonGone, nil)
			}
		}
	}

	return err
}

// checkOwnership asks the server whether it has the claim, which lasts for its lease from then on, and
// prepares for passing it on.
func (c *claim) checkOwnership(ctx context.Context, by time.Time) (held bool, err error) {
	l := c.lock
	var check OwnershipCheck
	var next []*claim
	check.Passed, check.Tokens = c.cohort.pending()
	if l.kind.Checker != nil {
		next = As[*claim](l.e.Waiters(l.queue))
		check.Next = make([]lock.Owner, len(next))
	}
	for i, w := range next {
		w.mu.Lock()
		check.Next[i] = w.ID
		w.mu.Unlock()
	}

	var result OwnershipResult
	err = RetryUntil(ctx, by, l.s, func(ctx context.Context) (err error) {
		if l.kind.Checker != nil {
			result, err = l.kind.Checker.Confirm(ctx, &c.Claim, check)
		} else {
			result.Held, err = l.p.Extend(ctx, &c.Claim, c.Lease)
		}
		return err
	}, wire.IsRefused)
	if err != nil || !result.Held {
		return false, err
	}

	c.cohort.checked(check, result)
	for i, w := range next[:result.Ready] {
		w.mu.Lock()
		w.ready = w.ready || w.ID == check.Next[i]
		w.mu.Unlock()
	}

	return true, nil
}
