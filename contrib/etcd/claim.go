package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// The kinds of claims are the first letters of their keys after the stem of the name. So the claims that exclude
// a claim are a range of keys, which ends before beyond at the latest.
const (
	permit = "p"
	read   = "r"
	write  = "w"
	beyond = "x"
)

// claim is a key, which is in the queue of its name by its create revision. It is granted when fewer than permits of its
// rivals are ahead of it.
type claim struct {
	s       *store
	r       driver.Request
	home    *lease // the session whose slot the key is
	slot    slot
	key     string
	permits int
	rivals  rivals
	moving  chan struct{} // full while attach runs

	// These fields change while the claim is acquired, and mod also while moving is full.
	sent    bool  // the key may exist
	unknown bool  // a request that makes or deletes the key may arrive yet
	rev     int64 // the create revision, and the fencing token
	mod     int64 // the revision of the last known change

	// The mutex of the store guards what follows.
	leases []*lease  // that the key has: one, or several while the outcome of attach is unknown
	ends   time.Time // of a claim that is not kept, or zero
	held   bool      // from when it is granted until it is released or over: its client is told if it is lost
	over   bool      // it was released, lost, or given up
	left   bool      // the slot is not its own any more, because the key is gone for good, or the slot is retired
}

// newClaim returns a claim that has the lease of a session.
func (s *store) newClaim(r driver.Request, l *lease) *claim {
	stem := s.stem(r.Name)
	c := &claim{s: s, r: r, home: l, permits: max(1, r.Permits), leases: []*lease{l}, moving: make(chan struct{}, 1)}
	kind := write
	c.rivals = rivals{stem + read, stem + beyond}
	if r.Permits > 0 {
		kind = permit
		c.rivals = rivals{stem + permit, stem + read}
	} else if r.Shared {
		kind = read
		c.rivals.from = stem + write
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	c.slot = l.slots.take(stem + kind)
	c.key = c.slot.key(l.id)
	s.owners[r.Owner] = c
	l.claims[c] = struct{}{}
	return c
}

// dropLocked ends a claim: its lease may end without anybody being told. Leases of its own are revoked.
func (c *claim) dropLocked() {
	if c.over {
		return
	}
	c.over = true
	c.held = false
	if c.s.owners[c.r.Owner] == c {
		delete(c.s.owners, c.r.Owner)
	}
	for _, l := range c.leases {
		c.leaveLocked(l)
	}
}

// leaveLocked notes that the claim does not need a lease.
func (c *claim) leaveLocked(l *lease) {
	delete(l.claims, c)
	if l.own && l.ctx.Err() == nil {
		c.s.revokeLocked(l)
	}
}

// abandon ends a claim, whose key may exist, and removes that in the background.
func (c *claim) abandon() {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.dropLocked()
	if c.sent {
		c.removeLocked()
	} else {
		c.leaveSlotLocked(false)
	}
}

// lateAttempts is how often removeLocked looks for a key that a request may make yet. The pauses add up to a second.
const lateAttempts = 8

// removeLocked removes the key in the background, while its session lasts. A request that was left when the caller left may be
// on its way to make it. One that is even later is left to audit.
func (c *claim) removeLocked() {
	c.s.goLocked(func() {
		pause := 4 * time.Millisecond
		for range lateAttempts {
			deleted, _, err := c.delete(c.home.ctx)
			if err != nil || deleted || !c.unknown {
				break
			}
			if !sleep(c.home.ctx, pause) {
				return
			}
			pause *= 2
		}
		c.leaveSlot()
	})
}

// delete deletes the key, and reports whether it existed, and whether that is unknown because a reply was lost. etcd executes
// such a request even while it has no space.
func (c *claim) delete(ctx context.Context) (existed, unknown bool, err error) {
	request := func(ctx context.Context) (*clientv3.DeleteResponse, error) { return c.s.c.Delete(ctx, c.key) }
	resp, err := ask(ctx, c.s, false, c.s.timeout, 1, request)
	if err == nil {
		return resp.Deleted > 0, false, nil
	}
	c.unknown = true
	if !again(err) {
		return false, false, err
	}

	// The first answer to two deletions at once may come from the one that found nothing, so look before.
	unknown = errors.Is(err, lock.ErrIndeterminate)
	own, _, err := attempts(ctx, c.s, false, 2, func(ctx context.Context) (*clientv3.GetResponse, error) {
		return c.s.c.Get(ctx, c.key, clientv3.WithCountOnly())
	})
	if err == nil && own.Count > 0 {
		existed = true
		_, _, err = attempts(ctx, c.s, false, 2, request)
	}
	return existed, unknown, err
}

// leaveSlot has another claim use the slot, unless a request may yet arrive that makes or deletes the key.
func (c *claim) leaveSlot() {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.leaveSlotLocked(c.unknown)
}

func (c *claim) leaveSlotLocked(retire bool) {
	if c.left {
		return
	}
	c.left = true
	if retire {
		c.home.slots.retire(c.slot)
		c.home.retired[c.key] = struct{}{}
	} else {
		c.home.slots.give(c.slot)
	}
}

// errAgain means that the claim lost its place before it was granted: its lease has ended, or its key was removed.
var errAgain = errors.New("the claim was lost while it waited")

// Acquire implements driver.Driver.
func (s *store) Acquire(ctx context.Context, r driver.Request) (driver.Claim, error) {
	for {
		l, err := s.current(ctx, r.FailFast)
		if err != nil {
			return nil, err
		}
		c := s.newClaim(r, l)
		if err = c.acquire(ctx); err == nil {
			return c, nil
		}
		c.abandon()
		if err != errAgain {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, lock.ErrNotAcquired
		}
	}
}

// acquire makes the key and waits until the claim is granted.
func (c *claim) acquire(ctx context.Context) error {
	var err error
	if c.r.Try && c.permits > 1 {
		err = c.tryPermit(ctx)
	} else if c.r.Try {
		err = c.try(ctx)
	} else {
		err = c.wait(ctx)
	}
	if err == nil && c.r.Lease > 0 {
		err = c.attach(ctx, c.r.FailFast, c.r.Lease)
	}
	if errors.Is(err, lock.ErrLost) {
		return errAgain
	}
	if err != nil {
		return err
	}

	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.over || c.home.ctx.Err() != nil {
		return errAgain
	}
	c.held = true
	return nil
}

// Token implements driver.Claim.
func (c *claim) Token() int64 { return c.rev }

// Until implements driver.Claim.
func (c *claim) Until() time.Time {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	until := c.ends
	for _, l := range c.leases {
		if until.IsZero() || l.until.Before(until) {
			until = l.until
		}
	}
	return until
}

// errRemoved is the error of a loss without one of etcd.
var errRemoved = errors.New("its key does not exist any more")

// confirm ends the claim if its key does not exist.
func (c *claim) confirm() {
	exists, err := c.exists(c.s.ctx, true)
	if err != nil || exists {
		return
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.goneLocked()
}

// goneLocked ends a claim whose key does not exist any more.
func (c *claim) goneLocked() {
	if c.held {
		c.r.Lost(lock.ReasonGone, errRemoved)
	}
	c.dropLocked()
	c.leaveSlotLocked(true)
}

// Release implements driver.Claim.
func (c *claim) Release(ctx context.Context) error {
	c.s.mu.Lock()
	over := c.over
	c.held = false
	c.s.mu.Unlock()
	if over {
		return lock.ErrLost
	}

	existed, doubt, err := c.delete(ctx)
	c.s.mu.Lock()
	c.dropLocked()
	if err != nil {
		c.removeLocked()
	}
	c.s.mu.Unlock()
	if err != nil {
		return as(lock.ErrIndeterminate, err)
	}
	c.leaveSlot()
	if existed {
		return nil
	}
	if doubt {
		return fmt.Errorf("%w: a reply was lost, and the lock is gone now", lock.ErrIndeterminate)
	}
	return lock.ErrLost
}
