package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// UnlockTimeout bounds Unlock.
const UnlockTimeout = 5 * time.Second

// Unlock implements lock.Hold.
func (h *Hold) Unlock(ctx context.Context) error {
	e, err := h.startUnlock(ctx, release)
	if err != nil {
		h.releaseAfterLoss(ctx, err)
		return err
	}

	if e.last {
		c := h.claim
		if c.lock.e.Waited(c.lock.queue) {
			err = c.handOff(e.ctx, e.by, h)
		} else {
			err = c.end(e.ctx, e.by, false)
		}
	}

	return e.done(err)
}

// ending is a hold that is being unlocked.
type ending struct {
	*Hold
	op       string
	last     bool // hold of its claim, which is to be released
	began    time.Time
	ctx      context.Context // of its requests
	by       time.Time       // when Unlock has to return
	released func(error)     // ends the span of the release
	over     time.Time       // when the lease ends that the hold leaves behind
}

// What ends a hold.
const (
	release = "release"
	detach  = "detach"
)

// startUnlock ends a hold for op, or returns why there is nothing to end. For detach it is an error that
// the claim has other holds.
func (h *Hold) startUnlock(ctx context.Context, op string) (ending, error) {
	h.check()
	c := h.claim
	over := time.Time{}

	c.mu.Lock()
	if op == detach && h.Held() && (len(c.holdsLocked()) > 1 || c.joining > 0) {
		c.mu.Unlock()
		return ending{}, h.Object().Refused(op, fmt.Errorf("%w: the owner has other holds", lock.ErrInvalid))
	}

	began := time.Now()
	err := h.End(op, h.Object())
	if err != nil {
		c.lock.e.lost.remove(h)
		c.mu.Unlock()
		return ending{}, err
	}
	last := c.dropLocked(h)
	if last {
		left := c.lease.Remaining()
		over = began.Add(left)
		c.Lease = max(c.Lease, left) // for as long the server may have it
		c.state = claimReleased
		c.lease.Forget()
	}
	c.mu.Unlock()

	ctx, end := h.StartRelease(ctx)
	return ending{h, op, last, began, ctx, began.Add(UnlockTimeout), end, over}, nil
}

// done ends the release, with that result.
func (e ending) done(err error) error {
	return e.Released(e.released, e.claim.lock.failed(e.ctx, e.op, e.began, err))
}

// releaseAfterLoss releases what the server may still have of a lost hold, of which Unlock has returned
// that loss.
func (h *Hold) releaseAfterLoss(ctx context.Context, err error) {
	var loss *lock.LostError
	if !errors.As(err, &loss) {
		return
	}

	c := h.claim
	c.mu.Lock()
	left := c.state == claimGone && !time.Now().Before(c.keepUntil)
	c.mu.Unlock()
	if !left || c.lock.s.Err() != nil {
		return
	}
	if loss.Reason == lock.ReasonMaxHold { // the server has it for sure, and most likely answers
		c.releaseLost(context.WithoutCancel(ctx))
		return
	}

	c.lock.s.Go(c.releaseLost)
}

// releaseLost releases a claim that was lost, should the server still have it, for all holds that have
// had it. It blocks for UnlockTimeout at most. Several holds of an owner may do that at once.
func (c *claim) releaseLost(ctx context.Context) {
	_ = c.cohort.Release(time.Now().Add(UnlockTimeout), func(by time.Time) error {
		c.repeatRelease()
		c.mu.Lock()
		lost := c.Claim
		c.mu.Unlock()
		return c.releaseError(c.lock.release(ctx, by, &lost, false))
	})
}

// release releases the claim. With elsewhere set a waiter of another process comes next, if the server keeps the
// queue. With mayHaveRun set an earlier request may have released the claim.
func (c *claim) release(ctx context.Context, by time.Time, elsewhere, mayHaveRun bool) error {
	l := c.lock
	if until, ok := c.kept(); ok {
		return c.transferTo(ctx, by, l.s.NewOwner(), until, until)
	}

	if l.kind.LeftOpen != "" {
		c.LeftOpen = l.e.LeavesOpen(l.queue)
	}
	if passed, _ := c.cohort.pending(); len(passed) > 0 {
		c.Passed = passed
	}
	released, err := l.release(ctx, by, &c.Claim, mayHaveRun)
	c.repeatRelease()
	if err != nil {
		released.Receivers = -1
	}
	c.mu.Lock()
	c.receivers = int32(released.Receivers)
	c.mu.Unlock()

	how := released
	how.elsewhere = elsewhere && l.kind.Ordered
	how.leftOpen = c.LeftOpen
	l.e.Released(l.queue, c, how)
	return c.releaseError(released, err)
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
		c.lock.releaseUnknown(claim, true)
	}
}

// releaseError returns what a release that found that, or failed, says of the claim.
func (c *claim) releaseError(found Release, err error) error {
	if err == nil && found.State == NotHeld {
		return c.first.lostError(lock.ReasonGone, nil)
	}
	if wire.IsWrongType(err) {
		return c.first.lostError(lock.ReasonGone, err) // whatever is there now is not this lock
	}
	return err
}

// release releases a claim, again and again until by if the server does not answer: it can be repeated. With
// mayHaveRun set an earlier try may have done it. If GoesOn(err), the background does the rest. The error
// matches ErrIndeterminate if a try may have run or may still run, also if a later one does not find the
// claim: an earlier one may have released it, or it was gone before.
func (l *Lock) release(ctx context.Context, by time.Time, c *Claim, mayHaveRun bool) (Release, error) {
	var found Release
	tried, err := l.repeat(ctx, by, func(ctx context.Context) (err error) {
		found, err = l.p.Release(ctx, c)
		return err
	})

	if GoesOn(err) {
		l.releaseUnknown(*c, false)
	}
	if err == nil && found.State == NotHeld && (mayHaveRun || tried) {
		return Release{State: Free, Receivers: -1}, errNoReply
	}

	return found, err
}

// errNoReply is for a claim that is not there after a request without a reply, which may have ended it.
var errNoReply = fmt.Errorf("%w: a request had no reply, and the lock is gone now", lock.ErrIndeterminate)

// repeat is RetryUntil for a request that ends a claim. mayHaveRun reports whether a try has an unknown outcome.
func (l *Lock) repeat(ctx context.Context, by time.Time, request func(ctx context.Context) error) (mayHaveRun bool, err error) {
	err = RetryUntil(ctx, by, l.s, func(ctx context.Context) error {
		err := request(ctx)
		mayHaveRun = mayHaveRun || wire.IsUnknown(err)
		return err
	}, func(err error) bool { return l.s.Err() == nil && wire.IsRefused(err) })
	return mayHaveRun, err
}

// RetryUntil makes a request that can be repeated, again and again if it fails, until it is by. An
// error that is final is returned at once; otherwise it matches lock.ErrIndeterminate, or
// lock.ErrClosed if the client is closing. If the server has rejected every attempt because it rejects
// all writes, RetryUntil gives up sooner, and returns what the server says.
func RetryUntil(ctx context.Context, by time.Time, s *session.Session, request func(ctx context.Context) error,
	final func(error) bool) error {
	rejected, err := s.RetryWrite(ctx, by, request, final)
	if err == nil || final(err) || errors.Is(err, lock.ErrClosed) {
		return err
	}
	if rejected {
		return wire.Classify(err)
	}
	return errors.Join(lock.ErrIndeterminate, err)
}

// GoesOn reports whether a request that has failed with that error of RetryUntil has to be made in the
// background.
func GoesOn(err error) bool { return errors.Is(err, lock.ErrIndeterminate) || wire.IsTurnedAway(err) }

// repetitionPauses are the pauses before further releases of a claim that was not found: its
// acquisition may still be on its way, on a connection that was given up.
var repetitionPauses = []time.Duration{50 * time.Millisecond, 250 * time.Millisecond, time.Second, 3 * time.Second}

// releaseUnknown releases a claim with an unknown outcome in the background, until its lease ends at
// the latest. With again set it goes on after a release that found nothing, because an
// acquisition may run after it. While the client is closing it blocks for one request. The
// result is closed when no acquisition that was sent before can run any more.
func (l *Lock) releaseUnknown(c Claim, again bool) (undone <-chan struct{}) {
	misses := len(repetitionPauses)
	if again {
		misses = 0
	}
	return l.undo(c.Lease, misses, func(ctx context.Context) (bool, error) {
		released, err := l.p.Release(ctx, &c)
		return released.State != NotHeld, err
	})
}

// undo makes a request in the background that undoes another one with an unknown outcome, for d at
// most. If it finds nothing to undo, it is repeated after the pauses, but for the first misses of
// them. The result is as for releaseUnknown.
func (l *Lock) undo(d time.Duration, misses int, request func(ctx context.Context) (found bool, err error)) (undone <-chan struct{}) {
	return l.s.CleanUp(d, func(ctx context.Context) (time.Duration, error) {
		found, err := request(ctx)
		if err != nil || found {
			return -1, err
		}
		if misses == len(repetitionPauses) {
			return d, nil // when its time is over: a late acquisition may run yet, so it is not done
		}
		misses++
		return repetitionPauses[misses-1], nil
	})
}

// leaveQueue removes the queue position of a claim that no longer waits, in the background. It is
// retried for as long as the position may block others. The result is closed when it is removed.
func (l *Lock) leaveQueue(c Claim) (left <-chan struct{}) {
	return l.s.CleanUp(l.s.FairWait, func(ctx context.Context) (time.Duration, error) {
		return -1, l.kind.Positions.Leave(ctx, &c)
	})
}
