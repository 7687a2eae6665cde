package etcdlock

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/redlatch/redlatch/lock"
)

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
