package locking

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Patience bounds Unlock.
const Patience = 5 * time.Second

// release passes the claim on to the next waiter of this process, or gives it back, when h,
// its last hold, has ended. All of its requests together end by then.
func (c *claim) release(ctx context.Context, by time.Time, h *hold) error {
	if !c.lock.q.Waited(c.lock.queueKey()) {
		return c.end(ctx, by, false)
	}
	return c.passOn(ctx, by, h)
}

// passOn gives the claim to a waiter first, and then asks the server whether it stood, unless
// the question has to come first.
func (c *claim) passOn(ctx context.Context, by time.Time, h *hold) error {
	var (
		batch *Batch
		left  func() // removes what the waiter has left on the server
	)
	for confirmed := false; ; confirmed = true {
		ask := false
		passed := c.lock.q.Pass(c.lock.queueKey(), c, func(waiter acquire.Acquirer) bool {
			next := waiter.(*claim)
			if !c.canPassTo(h, next) {
				return false
			}
			token, ready := c.readyFor(next, confirmed)
			if !ready {
				ask = true
				return false
			}
			if !confirmed {
				batch = c.cohort.Enqueue(by)
			}
			left = c.passTo(next, token, confirmed)
			return true
		})
		switch {
		case passed:
			c.lock.s.Telemetry.HandedOver(ctx, c.lock.described(), 1)
			left()
			if confirmed {
				return nil
			}
			return c.confirm(ctx, batch)
		case !ask || confirmed:
			return c.end(ctx, by, ask)
		}
		if err := c.confirm(ctx, c.cohort.Enqueue(by)); errors.Is(err, lock.ErrLost) {
			c.repeatRelease()
			c.lock.q.Released(c.lock.queueKey(), c, acquire.Release{})
			return err
		} else if err != nil {
			return c.end(ctx, by, false)
		}
	}
}

// end gives the claim back, and answers for the holds that have passed it on.
func (c *claim) end(ctx context.Context, by time.Time, elsewhere bool) error {
	if c.cohort == nil { // no closure
		return c.giveBack(ctx, by, elsewhere, false)
	}
	return c.cohort.Release(by, func(by time.Time) error { return c.giveBack(ctx, by, elsewhere, false) })
}

// canPassTo reports whether a waiter can go on with the claim as it is: it wants the same.
func (c *claim) canPassTo(h *hold, next *claim) bool {
	to := &next.first
	if !c.lock.traits.Cohorts || !c.lock.sameKind(next.lock) ||
		h.Member || to.Member || h.Fixed != to.Fixed || c.Lease != next.Lease {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pinned {
		return false
	}
	if c.cohort == nil {
		c.cohort = NewCohort(c.first.sent)
	}
	return true
}

// readyFor reports whether the claim can be passed on to a waiter without a question, and
// with what token.
func (c *claim) readyFor(next *claim, confirmed bool) (token int64, ok bool) {
	switch _, trusted := c.cohort.Trusted(); {
	case !confirmed && (!trusted || next.first.Fixed): // a fixed lease counts from an answer
		return 0, false
	case c.lock.traits.Ordered:
		next.mu.Lock()
		defer next.mu.Unlock()
		return 0, next.ready
	}
	if _, counts := c.lock.p.(Prepared); counts {
		return c.cohort.draw()
	}
	return 0, true
}

// passTo gives the claim to a waiter. It returns what removes the waiter's own traces.
func (c *claim) passTo(next *claim, token int64, confirmed bool) (left func()) {
	sent, _ := c.cohort.Trusted()
	c.mu.Lock()
	mayHaveRun := c.mayHaveRun
	c.mu.Unlock()
	next.mu.Lock()
	defer next.mu.Unlock()
	left = func() {}
	switch waited := next.Claim; {
	case next.mayHaveRun:
		c.cohort.leaves(next.ID) // with the next question, or the release
		left = func() { c.lock.cleanUp(waited, true) }
	case next.queued:
		c.cohort.leaves(next.ID)
		if confirmed { // that may be long after
			left = func() { c.lock.leave(waited) }
		}
	}
	next.ID, next.mayHaveRun, next.cohort = c.ID, mayHaveRun, c.cohort
	next.acquired(sent, Answer{Token: token})
	return left
}

// confirm asks whether the claim stands. If not, the holds that it has now are lost too.
func (c *claim) confirm(ctx context.Context, batch *Batch) error {
	err := c.cohort.Confirm(batch, func(by time.Time) error {
		ok, err := c.ask(ctx, by)
		if ok {
			return nil
		}
		return c.releaseError(Released{State: NotHeld}, err)
	})
	if errors.Is(err, lock.ErrLost) {
		for _, other := range c.lock.holders() {
			if other.standsAs(c.ID) {
				other.Lost(lock.ReasonGone, nil)
			}
		}
	}
	return err
}

// ask asks the server whether the claim stands, which lasts for its lease from then on, and
// prepares for passing it on.
func (c *claim) ask(ctx context.Context, by time.Time) (ok bool, err error) {
	l := c.lock
	var q Question
	q.Passed, q.Tokens = c.cohort.left()
	var next []*claim
	prepared, _ := l.p.(Prepared)
	if prepared != nil {
		next = acquire.As[*claim](l.q.Waiters(l.queueKey()))
		q.Next = make([]lock.Owner, len(next))
		for i, w := range next {
			w.mu.Lock()
			q.Next[i] = w.ID
			w.mu.Unlock()
		}
	}
	var a Confirmation
	err = Insist(ctx, by, l.s, func(ctx context.Context) (err error) {
		if prepared != nil {
			a, err = prepared.Confirm(ctx, &c.Claim, q)
		} else {
			a.Stands, err = l.p.Extend(ctx, &c.Claim, c.Lease)
		}
		return err
	}, wire.IsRefused)
	if err != nil || !a.Stands {
		return false, err
	}
	c.cohort.answered(q, a)
	for i, w := range next[:a.Ready] {
		w.mu.Lock()
		w.ready = w.ready || w.ID == q.Next[i]
		w.mu.Unlock()
	}
	return true, nil
}

// giveBack releases the claim. With elsewhere set a waiter of another process comes next.
// With mayHaveRun set an earlier request may have released it.
func (c *claim) giveBack(ctx context.Context, by time.Time, elsewhere, mayHaveRun bool) error {
	l := c.lock
	if until, ok := c.kept(); ok {
		return c.leaveTo(ctx, by, l.s.NewOwner(), until, until)
	}
	if l.traits.LeftOpen != "" {
		c.LeftOpen = l.q.LeavesOpen(l.queueKey())
	}
	if passed, _ := c.cohort.left(); len(passed) > 0 {
		c.Passed = passed
	}
	freed, err := l.release(ctx, by, &c.Claim, mayHaveRun)
	c.repeatRelease()
	if err == nil {
		c.mu.Lock()
		c.receivers = int32(freed.Receivers)
		c.mu.Unlock()
	}
	l.q.Released(l.queueKey(), c, acquire.Release{
		Receivers: freed.Receivers, Kept: freed.State == StillHeld, Elsewhere: elsewhere && l.traits.Ordered,
		LeftOpen: c.LeftOpen,
	})
	return c.releaseError(freed, err)
}

// free releases a claim that was lost, should the server still have it. Several holds of an owner may do
// that at once.
func (c *claim) free(ctx context.Context, by time.Time) error {
	c.repeatRelease()
	c.mu.Lock()
	lost := c.Claim
	c.mu.Unlock()
	return c.releaseError(c.lock.release(ctx, by, &lost, false))
}

// freeLost is free for all holds that have had the claim. It blocks for Patience at most.
func (c *claim) freeLost(ctx context.Context) {
	_ = c.cohort.Release(time.Now().Add(Patience), func(by time.Time) error { return c.free(ctx, by) })
}

// repeatRelease has the release of a claim repeated in the background if one of its attempts
// may still be on its way.
func (c *claim) repeatRelease() {
	c.mu.Lock()
	mayHaveRun := c.mayHaveRun
	c.mayHaveRun = false
	claim := c.Claim
	c.mu.Unlock()
	if mayHaveRun {
		c.lock.cleanUp(claim, true)
	}
}

// releaseError returns what a release that found that, or failed, says of the claim.
func (c *claim) releaseError(freed Released, err error) error {
	switch {
	case err == nil && freed.State == NotHeld:
		return c.first.lostError(lock.ReasonGone, nil)
	case wire.IsWrongType(err):
		return c.first.lostError(lock.ReasonGone, err) // whatever is there now is not this lock
	}
	return err
}

// release frees a claim, again and again if the server does not answer: it can be repeated.
// With mayHaveRun set an earlier try may have done it. When it gives up it leaves the rest
// to the background, and the error matches ErrIndeterminate: even if no try has worked so
// far, one may at any time. So it does if a later try does not find the claim, because an
// earlier one may have released it, or it was gone before.
func (l *Lock) release(ctx context.Context, by time.Time, c *Claim, mayHaveRun bool) (Released, error) {
	var freed Released
	err := Insist(ctx, by, l.s, func(ctx context.Context) (err error) {
		freed, err = l.p.Release(ctx, c)
		mayHaveRun = mayHaveRun || wire.IsUnknown(err)
		return err
	}, func(err error) bool { return l.s.Err() == nil && wire.IsRefused(err) })
	if GoesOn(err) {
		l.cleanUp(*c, false)
	}
	if err == nil && freed.State == NotHeld && mayHaveRun {
		return Released{State: Free, Receivers: -1}, errNoReply
	}
	return freed, err
}

// errNoReply is for a claim that is not there after a request without a reply, which may have ended it.
var errNoReply = fmt.Errorf("%w: a request had no reply, and the lock is gone now", lock.ErrIndeterminate)

// Insist makes a request that can be repeated, again and again if it fails, until it is by. An
// error that is final is returned at once; otherwise it matches lock.ErrIndeterminate, or
// lock.ErrClosed if the client is closing. If the server has rejected every attempt because it rejects
// all writes, Insist gives up sooner, and returns what the server says.
func Insist(ctx context.Context, by time.Time, s *session.Session, request func(ctx context.Context) error,
	final func(error) bool) error {
	rejected, err := s.RetryWrite(ctx, by, request, final)
	switch {
	case err == nil || final(err) || errors.Is(err, lock.ErrClosed):
		return err
	case rejected:
		return wire.Classify(err)
	default:
		return errors.Join(lock.ErrIndeterminate, err)
	}
}

// GoesOn reports whether a request that has failed with that error of Insist has to be made in the
// background.
func GoesOn(err error) bool { return errors.Is(err, lock.ErrIndeterminate) || wire.IsTurnedAway(err) }

// cleanupPauses are the pauses before further releases of a claim that was not found: its
// acquisition may still be on its way, on a connection that was given up.
var cleanupPauses = []time.Duration{50 * time.Millisecond, 250 * time.Millisecond, time.Second, 3 * time.Second}

// cleanUp releases a claim with an unknown outcome in the background, until its lease ends at
// the latest. With again set it goes on after a release that found nothing, because an
// acquisition may run after it. While the client is closing it blocks for one request. The
// result is closed when no acquisition that was sent before can run any more.
func (l *Lock) cleanUp(c Claim, again bool) (undone <-chan struct{}) {
	misses := len(cleanupPauses)
	if again {
		misses = 0
	}
	return l.undo(c.Lease, misses, func(ctx context.Context) (bool, error) {
		freed, err := l.p.Release(ctx, &c)
		return freed.State != NotHeld, err
	})
}

// undo makes a request in the background that undoes another one with an unknown outcome, for d at
// most. If it finds nothing to undo, it is repeated after the pauses, but for the first misses of
// them. The result is as for cleanUp.
func (l *Lock) undo(d time.Duration, misses int, request func(ctx context.Context) (found bool, err error)) (undone <-chan struct{}) {
	done := newSignal()
	l.s.CleanUp(d, func(ctx context.Context) (time.Duration, error) {
		found, err := request(ctx)
		if err == nil && (found || l.s.Ordered) {
			done.send()
		}
		if err != nil || found || misses == len(cleanupPauses) {
			return -1, err
		}
		misses++
		return cleanupPauses[misses-1], nil
	})
	return done.c
}

// leave removes the queue position of a claim that no longer waits, in the background. It is
// retried for as long as the position may block others. The result is closed when it is removed.
func (l *Lock) leave(c Claim) (left <-chan struct{}) {
	done := newSignal()
	l.s.CleanUp(l.s.FairWait, func(ctx context.Context) (time.Duration, error) {
		err := l.p.(Positioned).Leave(ctx, &c)
		if err == nil {
			done.send()
		}
		return -1, err
	})
	return done.c
}

// signal is a channel that is closed once.
type signal struct {
	c    chan struct{}
	send func()
}

func newSignal() signal {
	c := make(chan struct{})
	return signal{c, sync.OnceFunc(func() { close(c) })}
}
