package locking

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// unlockPatience bounds Unlock's retries.
	unlockPatience = 5 * time.Second
	minReleaseWait = 20 * time.Millisecond
	maxReleaseWait = time.Second
)

// release passes the lock on within the process, or frees it, when h, the last hold of the
// claim, has ended.
func (c *claim) release(ctx context.Context, h *hold) error {
	queues, key := c.lock.s.Queues, c.lock.queueKey()
	for {
		successors := queues.Successors(key, true)
		if !c.canPassTo(h, successors) {
			return c.cohort.Release(func() error { return c.handOff(ctx, h, successors, false) })
		}
		batch := c.cohort.Enqueue()
		if c.passTo(successors) {
			h.span.HandOff(ctx)
			return c.confirmPassed(ctx, batch)
		}
	}
}

// canPassTo reports whether the successors can go on with the claim as it is: they want the
// same.
func (c *claim) canPassTo(h *hold, successors []*acquire.Waiter) bool {
	if len(successors) != 1 || !c.lock.p.Traits().Cohorts || !h.plain() {
		return false
	}
	if next := successors[0].Acquirer().(*claim); !next.first.plain() {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stretched {
		return false
	}
	if c.cohort == nil {
		c.cohort = NewCohort(c.sent)
	}
	_, ok := c.cohort.Trusted()
	return ok
}

// passTo gives the claim to a successor as it is. It reports false if that has left.
func (c *claim) passTo(successors []*acquire.Waiter) bool {
	next := successors[0].Acquirer().(*claim)
	confirmed, _ := c.cohort.Trusted()
	next.mu.Lock()
	next.ID, next.cohort = c.ID, c.cohort
	next.acquired(confirmed, Answer{})
	next.mu.Unlock()
	return len(c.lock.s.Queues.Grant(successors, c)) == 0
}

// confirmPassed asks whether the claim stood when it was passed on. If not, the holds that
// it has now are lost too.
func (c *claim) confirmPassed(ctx context.Context, batch *Batch) error {
	err := c.cohort.Confirm(batch, func() error {
		ok, err := c.lock.confirm(ctx, &c.Claim)
		if ok {
			return nil
		}
		return c.releaseError(Released{State: NotHeld}, err)
	})
	if lost := (*lock.LostError)(nil); errors.As(err, &lost) {
		for _, a := range c.lock.s.Queues.Holders(c.lock.queueKey()) {
			if other := a.(*claim); other.standsAs(c.ID) {
				other.Lost(lock.ReasonGone, nil)
			}
		}
	}
	return err
}

// handOff has the server pass the lock on to the successors, or frees it if there are none.
// With mayHaveRun set an earlier request may have freed it. What it returns is about c
// alone.
func (c *claim) handOff(ctx context.Context, h *hold, successors []*acquire.Waiter, mayHaveRun bool) error {
	queues, key := c.lock.s.Queues, c.lock.queueKey()
	from := c // that the server has
	passedOn := false
	for successors != nil {
		to := make([]*Claim, len(successors))
		for i, w := range successors {
			to[i] = &w.Acquirer().(*claim).Claim
		}
		sent := time.Now()
		reqCtx, cancel := c.lock.s.Bounded(ctx)
		passed, err := from.lock.p.HandOff(reqCtx, &from.Claim, to)
		cancel()
		from.repeatRelease()
		if err == nil && passed.Acquired {
			h.span.HandOff(ctx)
			if from = c.grant(successors, sent, passed.Answer); from == nil {
				return nil
			}
			// To others, in the name of one that has left.
			successors = queues.Successors(key, true)
			continue
		}
		if unknown(err) {
			passedOn = true // perhaps
			for _, w := range successors {
				w.Acquirer().(*claim).handOffUnknown()
			}
		}
		for _, left := range queues.Return(successors) {
			if passedOn {
				left.(*claim).Abandon()
			}
		}
		if err == nil && passed.State != NotHeld {
			queues.Released(key, c, acquire.Release{
				Receivers: passed.Receivers, Kept: passed.State == StillHeld, Elsewhere: c.lock.p.Traits().Ordered,
			})
			return nil
		}
		break
	}

	if c.lock.p.Traits().HasPollers {
		from.LeftOpen = queues.LeavesOpen(key)
	}
	freed, err := from.lock.release(ctx, &from.Claim, mayHaveRun)
	from.repeatRelease()
	c.receivers = int32(freed.Receivers)
	queues.Released(key, c, acquire.Release{Receivers: freed.Receivers, Kept: freed.State == StillHeld})
	if from != c || passedOn && err == nil {
		return nil // what became of the lock after this claim is not its business
	}
	return c.releaseError(freed, err)
}

// free releases the claim without a hand-off.
func (c *claim) free(ctx context.Context) error {
	c.repeatRelease()
	return c.releaseError(c.lock.release(ctx, &c.Claim, false))
}

// repeatRelease has the release of a claim repeated in the background if one of its attempts
// may still be on its way.
func (c *claim) repeatRelease() {
	c.mu.Lock()
	mayHaveRun := c.mayHaveRun
	c.mayHaveRun = false
	c.mu.Unlock()
	if mayHaveRun {
		c.lock.cleanUp(c.Claim, true)
	}
}

// releaseError returns what a release that found that, or failed, says of the claim.
func (c *claim) releaseError(freed Released, err error) error {
	switch {
	case err == nil && freed.State == NotHeld:
		return c.first.lostError(lock.ReasonGone, nil)
	case wire.IsWrongType(err):
		return c.first.lostError(lock.ReasonGone, err) // whatever is there now is not this lock
	case err != nil:
		return fmt.Errorf("redlatch: unlock %q: %w", c.lock.name, err)
	}
	return nil
}

// grant makes the successors holders of what the server has passed on to them. It returns
// the claim of one that has left, from which the lock is to be passed on or released, or
// nil.
func (c *claim) grant(successors []*acquire.Waiter, sent time.Time, a Answer) *claim {
	for _, w := range successors {
		next := w.Acquirer().(*claim)
		next.mu.Lock()
		next.acquired(sent, a)
		next.mu.Unlock()
	}
	left := c.lock.s.Queues.Grant(successors, c)
	if len(left) == 1 && len(successors) == 1 {
		return left[0].(*claim)
	}
	for _, a := range left {
		a.(*claim).Abandon()
	}
	if len(left) == len(successors) {
		c.lock.s.Queues.Released(c.lock.queueKey(), c, acquire.Release{Kept: true})
	}
	return nil
}

// handOffUnknown is outcomeUnknown for a claim that another has made a request for.
func (c *claim) handOffUnknown() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outcomeUnknown()
}

// release frees a claim, again and again if the server does not answer: it can be repeated.
// With mayHaveRun set an earlier try may have done it. When it gives up it leaves the rest
// to the background, and the error matches ErrIndeterminate: even if no try has worked so
// far, one may at any time.
func (l *Lock) release(ctx context.Context, c *Claim, mayHaveRun bool) (Released, error) {
	var freed Released
	err := Insist(l.s, func() (err error) {
		ctx, cancel := l.s.Bounded(ctx)
		defer cancel()
		freed, err = l.p.Release(ctx, c)
		mayHaveRun = mayHaveRun || unknown(err)
		return err
	}, func(err error) bool { return l.s.Err() == nil && wire.OutcomeOf(err) == wire.Refused })
	if errors.Is(err, lock.ErrIndeterminate) {
		l.cleanUp(*c, false)
	}
	if err == nil && freed.State == NotHeld && mayHaveRun {
		return Released{State: Free, Receivers: -1}, nil
	}
	return freed, err
}

// confirm reports whether the server has a claim. The claim lasts for its lease from then
// on.
func (l *Lock) confirm(ctx context.Context, c *Claim) (ok bool, err error) {
	err = Insist(l.s, func() (err error) {
		ctx, cancel := l.s.Bounded(ctx)
		defer cancel()
		ok, err = l.p.Extend(ctx, c, c.Lease)
		return err
	}, func(err error) bool { return wire.OutcomeOf(err) == wire.Refused })
	return ok, err
}

// Insist makes a request that can be repeated, again and again if it fails, for as long as a
// release is tried. An error that is final is returned at once.
func Insist(s *session.Session, request func() error, final func(error) bool) error {
	began := time.Now()
	for pause := minReleaseWait; ; pause = min(2*pause, maxReleaseWait) {
		err := request()
		switch {
		case err == nil || final(err):
			return err
		case s.Err() != nil:
			return errors.Join(lock.ErrClosed, err)
		case time.Since(began)+pause > unlockPatience:
			return errors.Join(lock.ErrIndeterminate, err)
		}
		time.Sleep(pause)
	}
}
