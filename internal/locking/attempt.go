package locking

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Try implements acquire.Acquirer.
func (c *claim) Try(ctx context.Context) (acquire.Verdict, error) {
	if err := c.lock.s.Err(); err != nil {
		return acquire.Verdict{}, err
	}
	c.needsID()
	sent := time.Now()
	a, err := c.lock.p.Acquire(ctx, &c.Claim)
	return c.answered(sent, a, err)
}

// TryAll implements acquire.Acquirer.
func (c *claim) TryAll(ctx context.Context, all []*claim) []acquire.Result {
	if err := c.lock.s.Err(); err != nil {
		return slices.Repeat([]acquire.Result{{Err: err}}, len(all))
	}
	// Close leaves it to this request to give back what it acquires.
	ctx, cancel := c.lock.s.Bounded(context.WithoutCancel(ctx))
	defer cancel()
	return attempt(all, func(claims []*Claim) ([]Answer, error) {
		return c.lock.p.(Grouped).AcquireAll(ctx, claims)
	})
}

// attempt makes one attempt for several claims, except those whose waits are over.
func attempt(all []*claim, request func(claims []*Claim) ([]Answer, error)) []acquire.Result {
	results := make([]acquire.Result, len(all))
	asked, claims := make([]int, 0, len(all)), make([]*Claim, 0, len(all))
	done := make(chan struct{})
	defer close(done)
	for i, c := range all {
		c.needsID()
		c.mu.Lock()
		if !c.over {
			c.asking = done
			asked, claims = append(asked, i), append(claims, &c.Claim)
		}
		c.mu.Unlock()
	}
	if len(claims) == 0 {
		return results
	}
	sent := time.Now()
	answers, err := request(claims)
	if err != nil {
		answers = make([]Answer, len(claims))
	}
	for n, i := range asked {
		results[i].Verdict, results[i].Err = all[i].answered(sent, answers[n], err)
	}
	return results
}

// answered says what the outcome of an attempt means for the wait.
func (c *claim) answered(sent time.Time, a Answer, err error) (acquire.Verdict, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.attempts++
	c.asking = nil
	switch {
	case err != nil:
		return acquire.Verdict{}, c.failed(err)
	case !a.Acquired:
		c.waited, c.Waits = true, true
		c.ready = c.ready && !a.Moved
		if a.Queued {
			c.keepPosition(sent)
		}
		return acquire.Verdict{FreeIn: a.FreeIn, Moved: a.Moved}, nil
	case time.Since(sent) < c.Lease:
		c.acquired(sent, a)
		return acquire.Verdict{Acquired: true}, nil
	case c.lock.p.Traits().Ordered:
		c.mayHaveRun = true // and retire gives it back
		return acquire.Verdict{}, errLate
	default:
		// The lease was over before its confirmation came.
		c.abandon()
		return acquire.Verdict{FreeIn: 0}, nil
	}
}

// errLate is for a lease that was over before its confirmation came.
var errLate = fmt.Errorf("%w: the lease was over before its confirmation came", lock.ErrNotAcquired)

// acquired notes the success of a request. c.mu is held.
func (c *claim) acquired(sent time.Time, a Answer) {
	c.sent, c.token = sent, a.Token
	c.forgetPosition()
}

// failed turns the error of an attempt into what it means for the wait. c.mu is held.
func (c *claim) failed(err error) error {
	if c.lock.s.Err() != nil {
		c.mayHaveRun = c.mayHaveRun || wire.IsUnknown(err) // and retire gives it back
		return errors.Join(lock.ErrClosed, err)
	}
	switch wire.OutcomeOf(err) {
	case wire.Refused:
		return err
	case wire.Unknown:
		c.outcomeUnknown()
	}
	return &acquire.Unavailable{Err: wire.Classify(err)}
}

// outcomeUnknown is called when a request for the claim may have run. A claim that may
// have a queue position keeps its id, and with it the position: the next attempt finds out,
// and its release is repeated in case the request arrives after it. c.mu is held.
func (c *claim) outcomeUnknown() {
	if c.lock.p.Traits().Ordered {
		c.mayHaveRun = true
		return
	}
	c.abandon()
}

// abandon has the claim undone in the background, whatever became of it, and goes on under
// another id. c.mu is held.
func (c *claim) abandon() {
	c.lock.cleanUp(c.Claim, true)
	c.freshID()
}

// Abandon implements acquire.Acquirer.
func (c *claim) Abandon() {
	c.mu.Lock()
	c.forgetPosition()
	asked := c.Claim
	c.mu.Unlock()
	c.lock.cleanUp(asked, true)
}

// farewell bounds how long the end of a wait is delayed until the server has answered that the
// claim has left its queue. After that it leaves in the background.
const farewell = 25 * time.Millisecond

// retire gives back what a wait that is over may have left on the server. asked is set if an
// attempt for several claims may have left something that Abandon will remove, but later. The
// result is closed after the first request.
func (c *claim) retire(asked bool) (left <-chan struct{}) {
	c.mu.Lock()
	queued, mayHaveRun, claim := c.queued, c.mayHaveRun, c.Claim
	c.forgetPosition()
	c.mu.Unlock()
	switch {
	case mayHaveRun:
		return c.lock.cleanUp(claim, true)
	case asked:
		return c.lock.cleanUp(claim, false)
	case queued:
		return c.lock.leave(claim)
	}
	return ended
}

// ended is a channel that is closed.
var ended = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// leave is retire for a wait that has failed. A caller that is told so has left the server's
// queue, if the server answers soon: others may try at once.
func (c *claim) leave() {
	c.mu.Lock()
	c.over = true // no attempt begins any more
	asking := c.asking
	c.mu.Unlock()
	timer := time.NewTimer(farewell)
	defer timer.Stop()
	if asking != nil {
		select {
		case <-asking:
		case <-timer.C:
			return // Abandon does it
		}
	}
	select {
	case <-c.retire(asking != nil):
	case <-timer.C:
	}
}
