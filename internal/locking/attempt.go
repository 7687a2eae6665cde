package locking

import (
	"context"
	"errors"
	"iter"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Try implements acquire.Acquirer.
func (c *claim) Try(ctx context.Context) (acquire.Verdict, error) {
	if err := c.lock.s.Stopped(); err != nil {
		return acquire.Verdict{}, err
	}
	c.needsID()
	sent := time.Now()
	a, err := c.lock.p.Acquire(ctx, &c.Claim)
	return c.answered(sent, a, err)
}

// Channel implements acquire.Acquirer.
func (c *claim) Channel() string { return c.lock.p.Channel(&c.Claim) }

// Describe implements acquire.Acquirer.
func (c *claim) Describe() session.Hold {
	c.mu.Lock()
	defer c.mu.Unlock()
	return session.Hold{Kind: c.lock.traits.Kind, Name: c.lock.name, Owner: c.ID.String()}
}

// Holds implements acquire.Acquirer.
func (c *claim) Holds() iter.Seq[session.Hold] {
	return func(yield func(session.Hold) bool) {
		described := c.Describe()
		c.mu.Lock()
		defer c.mu.Unlock()
		holds := c.holds()
		for _, h := range holds {
			listed := described
			listed.Remaining = h.remaining()
			if !yield(h.Listed(listed)) {
				return
			}
		}
		if len(holds) == 0 {
			yield(session.Hold{})
		}
	}
}

// TryAll implements acquire.Acquirer.
func (c *claim) TryAll(ctx context.Context, all []acquire.Acquirer) []acquire.Result {
	if err := c.lock.s.Stopped(); err != nil {
		return slices.Repeat([]acquire.Result{{Err: err}}, len(all))
	}
	// Close leaves it to this request to give back what it acquires.
	ctx, cancel := c.lock.s.Bounded(context.WithoutCancel(ctx))
	defer cancel()
	return attempt(acquire.As[*claim](all), func(claims []*Claim) ([]Answer, error) {
		return c.lock.p.(Grouped).AcquireAll(ctx, claims)
	})
}

// attempt makes one attempt for several claims.
func attempt(all []*claim, request func(claims []*Claim) ([]Answer, error)) []acquire.Result {
	results, claims := make([]acquire.Result, len(all)), make([]*Claim, len(all))
	for i, c := range all {
		c.needsID()
		claims[i] = &c.Claim
	}
	sent := time.Now()
	answers, err := request(claims)
	if err != nil {
		answers = make([]Answer, len(claims))
	}
	for i, c := range all {
		results[i].Verdict, results[i].Err = c.answered(sent, answers[i], err)
	}
	return results
}

// answered says what the outcome of an attempt means for the wait.
func (c *claim) answered(sent time.Time, a Answer, err error) (acquire.Verdict, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.attempts++
	switch {
	case err != nil:
		return acquire.Verdict{}, c.failed(err)
	case !a.Acquired:
		c.waited, c.Waits = true, true
		c.ready = c.ready && !a.Moved
		c.heldForever(a.NoExpiry)
		if a.Queued {
			c.keepPosition(sent)
		}
		return acquire.Verdict{FreeIn: a.FreeIn, Moved: a.Moved}, nil
	case time.Since(sent) < watchdog.Certain(c.Lease):
		c.acquired(sent, a)
		return acquire.Verdict{Acquired: true}, nil
	case c.lock.traits.Ordered:
		c.mayHaveRun = true // and retire gives it back
		return acquire.Verdict{}, acquire.Late(1, false, c.Lease, sent)
	default:
		// The lease was over before its confirmation came.
		c.abandon()
		c.late++
		return acquire.Verdict{FreeIn: 0}, acquire.Late(c.late, c.Waits, c.Lease, sent)
	}
}

// heldForever notes whether what keeps the lock has no expiry, which is logged once. c.mu is held.
func (c *claim) heldForever(is bool) {
	c.forever = is
	if l := c.lock; is && session.Of[session.Warnings](l.s).First(l.described()) {
		l.s.Go(func(context.Context) { // a logger may block
			l.s.Logger.Warn("redlatch: Lock finds a key without an expiry, which only a deletion frees; it may not be a lock",
				"name", text.Safe(l.name), "kind", l.traits.Kind, "key", text.Safe(l.key))
		})
	}
}

// errForever is a part of the error of a wait for a key without an expiry.
var errForever = errors.New("the key has no expiry: a deletion frees it, and it may not be a lock")

// acquired notes the success of a request. c.mu is held.
func (c *claim) acquired(sent time.Time, a Answer) {
	c.first.sent, c.token = sent, a.Token
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
	if c.lock.traits.Ordered {
		c.mayHaveRun = true
		return
	}
	c.abandon()
}

// abandon has the claim undone in the background, whatever became of it, and goes on under
// another id. c.mu is held.
func (c *claim) abandon() {
	c.undone = c.lock.cleanUp(c.Claim, true)
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

// retire gives back what a wait that is over may have left on the server. The result is closed when
// it is gone, and nil if there is nothing.
func (c *claim) retire() (undone <-chan struct{}) {
	c.mu.Lock()
	queued, mayHaveRun, claim := c.queued, c.mayHaveRun, c.Claim
	undone = c.undone
	c.forgetPosition()
	c.mu.Unlock()
	switch {
	case mayHaveRun:
		return c.lock.cleanUp(claim, true)
	case queued:
		return c.lock.leave(claim)
	}
	return undone
}

// leave is retire for a wait under ctx that has failed with err. A caller that gets the result has
// left the server's queue, if the server answers soon: others may try at once.
func (c *claim) leave(ctx context.Context, err error) error {
	if session.Await(c.retire()) {
		err = wire.Undone(ctx, err)
	}
	return err
}
