package etcdlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
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
	unknown bool  // a request that makes the key may arrive yet
	rev     int64 // the create revision, and the fencing token
	mod     int64 // the revision of the last known change

	// The mutex of the store guards what follows.
	leases []*lease  // that the key has: one, or several while the outcome of attach is unknown
	ends   time.Time // of a claim that is not kept, or zero
	held   bool      // it is granted, and its client is told if it is lost
	over   bool
	left   bool // the slot is not its own any more
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
			select {
			case <-time.After(pause):
			case <-c.home.ctx.Done():
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

// with makes the key with a lease, or gives it that lease.
func (c *claim) with(l *lease) clientv3.Op {
	return clientv3.OpPut(c.key, c.r.Owner.String(), clientv3.WithLease(l.id))
}

// put makes the key if all conditions are met, and reports whether it exists: a request whose reply was lost may have made it,
// too. answer is the answer to question, of just before; it is nil if question is, or if it was such a request.
func (c *claim) put(ctx context.Context, question *clientv3.Op, conditions ...clientv3.Cmp) (exists bool, answer *queue, err error) {
	then := make([]clientv3.Op, 0, 2)
	if question != nil {
		then = append(then, *question)
	}
	then = append(then, c.with(c.home))
	all := append(conditions, clientv3.Compare(clientv3.CreateRevision(c.key), "=", 0))

	resp, unknown, err := call(ctx, c.s, c.r.FailFast, func(ctx context.Context) (*clientv3.TxnResponse, error) {
		return c.s.c.Txn(ctx).If(all...).Then(then...).Commit()
	})
	if unknown {
		c.sent = true
		c.unknown = true
	}
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		c.s.gone(c.home, err)
		return false, nil, errAgain
	}
	if err != nil {
		return false, nil, err
	}
	if !resp.Succeeded {
		if len(conditions) == 0 || c.unknown {
			exists, err = c.made(ctx)
		}
		return exists, nil, err
	}

	c.sent = true
	c.rev = resp.Header.Revision
	c.mod = c.rev
	if question != nil {
		q := c.queue(resp.Responses[0].GetResponseRange().Kvs, c.rev)
		answer = &q
	}
	return true, answer, nil
}

// made reports whether the key exists before put has made it for certain.
func (c *claim) made(ctx context.Context) (bool, error) {
	own, _, err := call(ctx, c.s, c.r.FailFast, func(ctx context.Context) (*clientv3.GetResponse, error) {
		return c.s.c.Get(ctx, c.key, clientv3.WithKeysOnly())
	})
	if err != nil {
		return false, as(lock.ErrIndeterminate, err)
	}
	if len(own.Kvs) == 0 {
		return false, nil
	}
	c.sent = true
	c.rev = own.Kvs[0].CreateRevision
	c.mod = own.Kvs[0].ModRevision
	return true, nil
}

// try makes the key unless rivals exist, which would be ahead of it.
func (c *claim) try(ctx context.Context) error {
	free := clientv3.Compare(clientv3.CreateRevision(c.rivals.from), "=", 0).WithRange(c.rivals.to)
	exists, _, err := c.put(ctx, nil, free)
	if err == nil && !exists {
		return lock.ErrNotAcquired
	}
	return err
}

// tryPermit makes the key if fewer rivals than there are permits exist: it counts them, and makes the key if none was made
// since.
func (c *claim) tryPermit(ctx context.Context) error {
	for {
		others, _, err := call(ctx, c.s, c.r.FailFast, func(ctx context.Context) (*clientv3.GetResponse, error) {
			return c.s.c.Get(ctx, c.rivals.from, clientv3.WithRange(c.rivals.to), clientv3.WithKeysOnly(),
				clientv3.WithLimit(int64(c.permits)))
		})
		if err != nil {
			return as(lock.ErrUnavailable, err)
		}
		if len(others.Kvs) >= c.permits {
			return lock.ErrNotAcquired
		}

		same := clientv3.Compare(clientv3.CreateRevision(c.rivals.from), "<", others.Header.Revision+1).WithRange(c.rivals.to)
		exists, _, err := c.put(ctx, nil, same)
		if exists || err != nil {
			return err
		}
	}
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

// Extend implements driver.Claim.
func (c *claim) Extend(ctx context.Context, lease time.Duration) error {
	err := c.extend(ctx, lease)
	if errors.Is(err, lock.ErrLost) {
		c.s.mu.Lock()
		c.goneLocked()
		c.s.mu.Unlock()
	}
	return err
}

func (c *claim) extend(ctx context.Context, lease time.Duration) error {
	enough := time.Until(c.Until()) >= lease
	c.s.mu.Lock()
	over := c.over
	l := c.leases[0]
	renew := l.kept && len(c.leases) == 1 && l.ttl >= lease
	c.s.mu.Unlock()
	if over {
		return lock.ErrLost
	}
	if !enough && !renew {
		return c.attach(ctx, false, lease)
	}

	if !enough {
		r, _, err := call(ctx, c.s, false, c.s.keepAlive(l))
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			c.s.gone(l, err)
			return lock.ErrLost
		}
		if err != nil {
			return err
		}
		c.s.prolong(l, r)
	}
	if exists, err := c.exists(ctx, false); err != nil || !exists {
		return cmp.Or(err, lock.ErrLost)
	}
	return nil
}

// exists asks whether the key exists.
func (c *claim) exists(ctx context.Context, failFast bool) (bool, error) {
	own, _, err := call(ctx, c.s, failFast, func(ctx context.Context) (*clientv3.GetResponse, error) {
		return c.s.c.Get(ctx, c.key, clientv3.WithCountOnly())
	})
	if err != nil {
		return false, as(lock.ErrUnavailable, err)
	}
	return own.Count > 0, nil
}

// attach gives the key a lease of its own, which is renewed if the claim is kept. Until the outcome is known the claim has
// the old lease and the new one.
func (c *claim) attach(ctx context.Context, failFast bool, d time.Duration) error {
	select {
	case c.moving <- struct{}{}:
		defer func() { <-c.moving }()
	case <-ctx.Done():
		return errors.Join(lock.ErrUnavailable, errNoAnswer)
	}

	ttl := d
	if c.r.Lease == 0 {
		ttl = max(d, c.s.ttl)
	}
	l, err := c.s.grant(ctx, failFast, ttl)
	if err != nil {
		return err
	}
	l.own = true
	l.kept = c.r.Lease == 0
	c.s.mu.Lock()
	if c.over {
		c.s.revokeLocked(l)
		c.s.mu.Unlock()
		return lock.ErrLost
	}
	c.s.leases[l] = struct{}{}
	c.leases = append(c.leases, l)
	l.claims[c] = struct{}{}
	c.s.mu.Unlock()

	unknown, err := c.move(ctx, failFast, l)
	if errors.Is(err, rpctypes.ErrLeaseNotFound) { // it was over before the key had it
		err = errors.Join(lock.ErrUnavailable, err)
		if unknown {
			err = as(lock.ErrIndeterminate, err)
		}
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.over {
		return cmp.Or(err, lock.ErrLost)
	}
	if err == nil {
		for _, old := range c.leases {
			if old != l {
				c.leaveLocked(old)
			}
		}
		c.leases = []*lease{l}
		if !l.kept {
			c.ends = l.until.Add(d - l.ttl)
		}
	} else if !unknown {
		c.leases = slices.DeleteFunc(c.leases, func(other *lease) bool { return other == l })
		c.leaveLocked(l)
	}
	return err
}

// move attaches the key to a lease. Each attempt has the revision of the last change as a condition, so that one that
// arrives late has no effect.
func (c *claim) move(ctx context.Context, failFast bool, l *lease) (unknown bool, err error) {
	for {
		resp, doubt, err := call(ctx, c.s, failFast, func(ctx context.Context) (*clientv3.TxnResponse, error) {
			return c.s.c.Txn(ctx).If(
				clientv3.Compare(clientv3.CreateRevision(c.key), "=", c.rev),
				clientv3.Compare(clientv3.ModRevision(c.key), "=", c.mod),
			).Then(c.with(l)).Else(clientv3.OpGet(c.key)).Commit()
		})
		unknown = unknown || doubt
		if err != nil {
			return unknown, err
		}
		if resp.Succeeded {
			c.mod = resp.Header.Revision
			return unknown, nil
		}

		kvs := resp.Responses[0].GetResponseRange().Kvs
		if len(kvs) == 0 || kvs[0].CreateRevision != c.rev {
			return false, lock.ErrLost
		}
		c.mod = kvs[0].ModRevision
		if clientv3.LeaseID(kvs[0].Lease) == l.id {
			return unknown, nil
		}
	}
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
	if c.held && !c.over {
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
