package engine

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Cohort is a claim that holds of this process have one after another. A hold that ends
// passes the claim on, and asks only then whether the server still had it, before its Unlock
// returns. If the last answer is older than validityWindow, it asks first. One request answers for all
// holds that passed the claim on before it was sent. So the lock changes hands as often as
// goroutines can, and each hold learns of a loss. See Dice, Marathe and Shavit, "Lock
// Cohorting" (PPoPP 2012); databases call the shared request group commit.
//
// A claim that no waiter could have taken over has a nil Cohort.
type Cohort struct {
	mu        sync.Mutex
	confirmed time.Time // when the last request that found the claim was sent
	gone      bool      // a request did not find it
	asking    bool      // a request is in flight, or about to be sent
	next      *Batch    // of the next request, if any hold waits for it

	token  int64        // for the next hold
	tokens int          // drawn, from token on, and not used
	passed []lock.Owner // waiters that have had the claim, and may have a queue position
}

// Batch is the holds that share one request.
type Batch struct {
	ask  func(by time.Time) error
	by   time.Time     // when the first of them has to have an answer
	lead chan struct{} // has room for one; its receiver sends the request
	done chan struct{} // closed when err is the answer
	err  error
}

// validityWindow is the time for which an answer is believed: several round trips to a near server.
// If the server is far, the check comes before a claim is passed on.
const validityWindow = 20 * time.Millisecond

// NewCohort returns the cohort of a claim that was last confirmed by a request sent at confirmed.
func NewCohort(confirmed time.Time) *Cohort { return &Cohort{confirmed: confirmed} }

// Enqueue adds a hold that has to have an answer by then to the next request. It is called
// before the claim is passed on, because the next hold may end before this one asks.
func (c *Cohort) Enqueue(by time.Time) *Batch {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.enqueueLocked(by)
}

func (c *Cohort) enqueueLocked(by time.Time) *Batch {
	if c.next == nil {
		c.next = &Batch{by: by, lead: make(chan struct{}, 1), done: make(chan struct{})}
	}
	if by.Before(c.next.by) {
		c.next.by = by
	}
	return c.next
}

// Confirm returns nil if the claim was held, and an error that matches lock.ErrLost if it was
// gone. It calls ask, with the time by which that has to return, unless another hold of the
// batch does. It blocks for two requests at most.
func (c *Cohort) Confirm(b *Batch, ask func(by time.Time) error) error {
	c.mu.Lock()
	if b.ask == nil {
		b.ask = ask
	}
	c.mu.Unlock()
	return c.run(b)
}

// Release is Confirm for the last hold: release releases the claim, and its result answers
// for the holds that passed it on before.
func (c *Cohort) Release(by time.Time, release func(by time.Time) error) error {
	if c == nil {
		return release(by)
	}

	c.mu.Lock()
	b := c.enqueueLocked(by)
	b.ask = release
	c.mu.Unlock()
	return c.run(b)
}

// run sends the request of b, or waits until another hold of b has.
func (c *Cohort) run(b *Batch) error {
	c.mu.Lock()
	asking := c.asking
	c.mu.Unlock()
	if asking {
		// The end of the request in flight makes one hold of b its leader.
		select {
		case <-b.done:
			return b.err
		case <-b.lead:
		}
	}

	c.mu.Lock()
	first := b == c.next
	if first {
		c.asking = true
		c.next = nil
	}
	c.mu.Unlock()
	if !first { // another was faster
		<-b.done
		return b.err
	}

	c.request(b)
	return b.err
}

// request makes the request of b.
func (c *Cohort) request(b *Batch) {
	sent := time.Now()
	b.err = errPanicked
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if b.err == nil {
			c.confirmed = sent
		} else if errors.Is(b.err, lock.ErrLost) {
			c.gone = true
		}
		if c.next != nil {
			c.next.lead <- struct{}{}
		} else {
			c.asking = false
		}
		close(b.done)
	}()
	b.err = b.ask(b.by)
}

// errPanicked is for the other holds of a batch whose request has panicked in user code.
var errPanicked = fmt.Errorf("%w: a shared request has panicked", lock.ErrIndeterminate)

// Valid reports whether the claim can be passed on without a check, and when the last request that
// confirmed it was sent.
func (c *Cohort) Valid() (confirmed time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.confirmed, !c.gone && time.Since(c.confirmed) < validityWindow
}

// draw returns the token of the next hold, if one was drawn for it.
func (c *Cohort) draw() (token int64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tokens == 0 {
		return 0, false
	}
	token = c.token
	c.token++
	c.tokens--
	return token, true
}

// passedOn notes that a waiter that has a queue position has got the claim.
func (c *Cohort) passedOn(waiter lock.Owner) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.passed = append(c.passed, waiter)
}

// pending returns the waiters whose queue positions are still to be removed, and the number of
// tokens that are not used.
func (c *Cohort) pending() (passed []lock.Owner, tokens int) {
	if c == nil {
		return nil, 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.passed), c.tokens
}

// checked notes the result of a check. While the claim is held only its checks draw tokens, so new ones
// follow those that are left, unless the counter was raised meanwhile: then those that are left are too low.
func (c *Cohort) checked(check OwnershipCheck, result OwnershipResult) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.passed = slices.Delete(c.passed, 0, len(check.Passed)) // one request is in flight at a time
	if c.token+int64(c.tokens) == result.Token {
		c.tokens += result.Tokens
	} else {
		c.token = result.Token
		c.tokens = result.Tokens
	}
}

// Gone reports whether the server no longer had the claim.
func (c *Cohort) Gone() bool {
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gone
}
