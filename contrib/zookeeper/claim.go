package zklock

import (
	"context"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// claim is a node that waits for its turn, or has it: a driver.Claim.
type claim struct {
	s       *store
	r       driver.Request
	in      string // path of its folder
	session uint64 // number of its session
	end     func() // ends the context of the call that waits

	own   place
	path  string
	token int64
	alone bool // it was granted when it was created

	// mu of the store guards these.
	held  bool
	until time.Time // end of its lease, or zero
	err   error     // why it has ended, if that was not Release
}

// add notes a claim whose node was created.
func (s *store) add(c *claim) error {
	now, _ := s.session.state()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return lock.ErrClosed
	}
	if now.number != c.session {
		return errRemoved
	}

	s.claims[c.path] = c
	if len(s.claims) == 1 {
		s.look()
	}
	return nil
}

// look has keep look at the claims.
func (s *store) look() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// forget notes that the node of a claim is about to be removed. It reports false if the claim has ended before.
func (s *store) forget(c *claim) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.claims[c.path] != c {
		return false
	}
	delete(s.claims, c.path)
	return true
}

// endLocked ends a claim whose node is gone, or not certain any more.
func (c *claim) endLocked(cause error) {
	delete(c.s.claims, c.path)
	c.err = cause
	c.end()
}

// cause returns why a claim has ended, or nil.
func (c *claim) cause() error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return c.err
}

// hold makes the claim one that is held, unless it has ended.
func (c *claim) hold() error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	c.held = true
	if c.r.Lease > 0 {
		c.until = time.Now().Add(c.r.Lease)
	}
	return nil
}

// confirm notes that a write of a session that was sent then is confirmed.
func (s *store) confirm(number uint64, sent time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if number > s.number || number == s.number && sent.After(s.confirmed) {
		s.number = number
		s.confirmed = sent
	}
}

// certainLocked returns the time until which a session is certain. See the package documentation for the quarter.
func (s *store) certainLocked(now sessionState) time.Time {
	if s.number != now.number {
		return time.Time{}
	}
	return s.confirmed.Add(now.timeout - now.timeout/4)
}

// Token implements driver.Claim.
func (c *claim) Token() int64 { return c.token }

// Until implements driver.Claim. It does not look at err: Lost follows, and has the reason.
func (c *claim) Until() time.Time {
	now, _ := c.s.session.state()
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if now.number != c.session {
		return time.Time{}
	}
	certain := c.s.certainLocked(now)
	if !c.until.IsZero() && c.until.Before(certain) {
		return c.until
	}
	return certain
}

// Extend implements driver.Claim. The server does not know of leases: Extend asks whether the node is there, again and
// again until ctx ends or the claim is over.
func (c *claim) Extend(ctx context.Context, lease time.Duration) error {
	s := c.s
	for {
		sent := time.Now()
		now, err := s.ready(ctx, true)
		if now.number != c.session || c.cause() != nil {
			return lock.ErrLost
		}
		var missing []int
		if err == nil {
			missing, err = s.check(ctx, now, c.path)
		}
		if missing != nil {
			s.missing(c.path)
			return lock.ErrLost
		}

		if err == nil {
			return c.extend(sent.Add(lease))
		}
		if isRefusal(err) {
			return err
		}
		if ctx.Err() != nil {
			return unavailable(err)
		}
		pause(ctx, retryPause)
	}
}

// extend has the lease of the claim last until then at least.
func (c *claim) extend(until time.Time) error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.err != nil {
		return lock.ErrLost
	}
	if !c.until.IsZero() && until.After(c.until) {
		c.until = until
	}
	return nil
}

// errNoReply is returned if a release may have removed the node, or somebody else has.
var errNoReply = fmt.Errorf("%w: a request had no reply, and the node is gone now", lock.ErrIndeterminate)

// Release implements driver.Claim.
func (c *claim) Release(ctx context.Context) error {
	s := c.s
	if !s.forget(c) {
		return lock.ErrLost
	}

	lost := lock.ErrLost
	for {
		now, err := s.ready(ctx, false)
		if err == errDisconnected || err == nil && now.number != c.session {
			return lost
		}
		there := false
		if err == nil {
			there, err = s.remove(ctx, c.path)
		}
		if err == nil && there {
			return nil
		}
		if err == nil {
			return lost
		}

		if isRefusal(err) {
			s.leave(leftover{path: c.path, session: c.session})
			return err
		}
		if ctx.Err() != nil {
			s.leave(leftover{path: c.path, session: c.session})
			return indeterminate(err)
		}
		if !isWithoutEffect(err) {
			lost = errNoReply
		}
		pause(ctx, retryPause)
	}
}
