package interop

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// locker acquires the lock orders, waiting for it, and holds it for lease unless it is
// released.
type locker interface {
	name() string
	lock(ctx context.Context, lease time.Duration) (held, error)
	try(ctx context.Context, lease time.Duration) (held, error) // a held lock is an error
}

// held is a hold. Its methods return an error if the lock is no longer held.
type held interface {
	unlock(ctx context.Context) error
	extend(ctx context.Context) error
}

type ours struct{ c *redlatch.Client }

type ourHold struct{ lock.Hold }

func (o ours) name() string { return "redlatch" }

func (o ours) lock(ctx context.Context, lease time.Duration) (held, error) {
	h, err := o.c.PlainLock("orders").Lock(ctx, lock.Lease(lease))
	return ourHold{h}, err
}

func (o ours) try(ctx context.Context, lease time.Duration) (held, error) {
	h, err := o.c.PlainLock("orders").TryLock(ctx, lock.Lease(lease))
	return ourHold{h}, err
}

func (h ourHold) unlock(ctx context.Context) error { return h.Unlock(ctx) }
func (h ourHold) extend(ctx context.Context) error { return h.Extend(ctx, long) }

type syncs struct{ rs *redsync.Redsync }

type syncHold struct{ m *redsync.Mutex }

func (s syncs) name() string { return "redsync" }

func (s syncs) lock(ctx context.Context, lease time.Duration) (held, error) {
	m := s.rs.NewMutex("orders", redsync.WithExpiry(lease))
	return syncHold{m}, m.LockContext(ctx)
}

func (s syncs) try(ctx context.Context, lease time.Duration) (held, error) {
	m := s.rs.NewMutex("orders", redsync.WithExpiry(lease))
	return syncHold{m}, m.TryLockContext(ctx)
}

func (h syncHold) unlock(ctx context.Context) error { return said(h.m.UnlockContext(ctx)) }
func (h syncHold) extend(ctx context.Context) error { return said(h.m.ExtendContext(ctx)) }

// said converts a negative answer into an error.
func said(ok bool, err error) error {
	if err == nil && !ok {
		return errors.New("no")
	}
	return err
}

type redislocks struct{ c *redislock.Client }

type redislockHold struct{ l *redislock.Lock }

func (r redislocks) name() string { return "redislock" }

func (r redislocks) lock(ctx context.Context, lease time.Duration) (held, error) {
	l, err := r.c.Obtain(ctx, "orders", lease, &redislock.Options{RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)})
	return redislockHold{l}, err
}

func (r redislocks) try(ctx context.Context, lease time.Duration) (held, error) {
	l, err := r.c.Obtain(ctx, "orders", lease, nil)
	return redislockHold{l}, err
}

func (h redislockHold) unlock(ctx context.Context) error { return h.l.Release(ctx) }
func (h redislockHold) extend(ctx context.Context) error { return h.l.Refresh(ctx, long, nil) }

// conn returns a connection of the other libraries' driver.
func conn(t *testing.T, s *testserver.Server) *redis.Client {
	t.Helper()
	c := redis.NewClient(&redis.Options{Addr: s.Addr})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// foreignLocks returns the locks of other libraries.
func foreignLocks(t *testing.T, s *testserver.Server) []locker {
	c := conn(t, s)
	return []locker{syncs{redsync.New(goredis.NewPool(c))}, redislocks{redislock.New(c)}}
}

// eachPair runs a test with a redlatch lock and a foreign one, both ways round.
func eachPair(t *testing.T, test func(t *testing.T, s *testserver.Server, first, second locker)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, theirs := range foreignLocks(t, s) {
			pair := [2]locker{ours{harness.Client(t, s)}, theirs}
			for i := range pair {
				first, second := pair[i], pair[1-i]
				t.Run(first.name()+", then "+second.name(), func(t *testing.T) {
					test(t, s, first, second)
					harness.NothingLeft(t, s.Addr)
				})
			}
		}
	})
}
