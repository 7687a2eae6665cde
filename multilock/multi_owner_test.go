package multilock_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/rlock"
)

func TestMultiOfANamedOwner(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		m := c.MultiLock(c.Lock("a"), c.FencedLock("b"), c.FairLock("c"), c.RWLock("d").Write())
		mine := c.NewOwner()
		ctx := lock.WithOwner(t.Context(), mine)
		isHeldBy := func(o lock.Owner) bool {
			held, err := m.IsHeldBy(t.Context(), o)
			require.NoError(t, err)
			return held
		}
		require.False(t, isHeldBy(mine))
		first, err := m.Lock(ctx, lock.Lease(10*time.Second))
		require.NoError(t, err)
		require.Equal(t, mine, first.Owner())
		require.True(t, isHeldBy(mine))
		require.False(t, isHeldBy(c.NewOwner()))
		again, err := m.TryLock(ctx)
		require.NoError(t, err)
		require.NoError(t, again.Unlock(t.Context()))
		require.True(t, isHeldBy(mine))
		require.NoError(t, first.Unlock(t.Context()))
		require.False(t, isHeldBy(mine))

		h, err := m.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, m.Unlock(ctx))
		require.False(t, isHeldBy(mine))
		select { // the hold notices, because it belongs to this client
		case <-h.Context().Done():
		case <-time.After(5 * time.Second):
			require.FailNow(t, "the hold remains")
		}
		require.ErrorIs(t, context.Cause(h.Context()), context.Canceled)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
		require.ErrorIs(t, m.Unlock(ctx), lock.ErrNotHeld)
		require.ErrorIs(t, m.Unlock(t.Context()), lock.ErrInvalid)

		// Unlock ends the latest of several holds with the same members, even through a new
		// Multi with another order.
		first, err = m.Lock(ctx)
		require.NoError(t, err)
		single, err := c.MultiLock(c.Lock("a"), c.FencedLock("b")).Lock(ctx)
		require.NoError(t, err)
		last, err := c.MultiLock(c.RWLock("d").Write(), c.FairLock("c"), c.FencedLock("b"), c.Lock("a")).Lock(ctx)
		require.NoError(t, err)
		for _, h := range []lock.Hold{last, first} {
			require.NoError(t, h.Context().Err())
			require.NoError(t, m.Unlock(ctx))
			require.ErrorIs(t, context.Cause(h.Context()), context.Canceled)
		}
		require.NoError(t, single.Context().Err())
		require.NoError(t, single.Unlock(t.Context()))
		_, err = m.IsHeldBy(t.Context(), lock.Owner{})
		require.ErrorIs(t, err, lock.ErrInvalid)

		unknown := c.MultiLock(c.Lock("a"), c.RedLock(c.Lock("z")))
		require.ErrorIs(t, unknown.Unlock(ctx), lock.ErrUnsupported)
		_, err = unknown.IsHeldBy(t.Context(), mine)
		require.ErrorIs(t, err, lock.ErrUnsupported)
		multiEmpty(t, s)
	})
}

// Unlock by owner knows a hold by its members, also if the locks of two servers have one name.
func TestMultiUnlockIgnoresTheOrderOfClients(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, harness.Server(t, s.Program))
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h, err := c.MultiLock(c.Lock("a"), other.Lock("a")).Lock(ctx)
		require.NoError(t, err)
		require.ErrorIs(t, c.MultiLock(c.Lock("a"), c.Lock("b")).Unlock(ctx), lock.ErrNotHeld)
		require.NoError(t, c.MultiLock(other.Lock("a"), c.Lock("a")).Unlock(ctx))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
		multiEmpty(t, s)
	})
}

// A batch of locks counts the holds of an owner like single locks do.
func TestMultiOfANamedOwnerIsCounted(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		all := []*rlock.Lock{c.Lock("a"), c.Lock("b"), c.Lock("c")}
		m := c.MultiLock(all[0], all[1], all[2])
		owner := c.NewOwner()
		ctx := lock.WithOwner(t.Context(), owner)
		counts := func(want int) {
			for _, l := range all {
				require.Equal(t, want, harness.HoldCount(t, l, owner))
			}
		}
		first, err := m.Lock(ctx, lock.Lease(time.Minute))
		require.NoError(t, err)
		counts(1)
		again, err := m.TryLock(ctx)
		require.NoError(t, err)
		counts(2)
		require.NoError(t, first.Extend(t.Context(), time.Hour))
		require.NoError(t, first.Unlock(t.Context()))
		counts(1)
		require.NoError(t, again.Unlock(t.Context()))
		counts(0)
		harness.NothingStays(t, s.Addr)
	})
}

// A forbidden upgrade or re-entry is an error without a wait and leaves the owner's holds
// untouched.
func TestMultiForbiddenReentry(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		rw := c.RWLock("b")
		reads, err := rw.Read().Lock(ctx)
		require.NoError(t, err)
		_, err = c.MultiLock(c.Lock("a"), rw.Write(), c.Lock("c")).Lock(ctx)
		require.ErrorIs(t, err, lock.ErrUpgrade)
		first, err := c.Lock("n", rlock.NonReentrant()).Lock(ctx)
		require.NoError(t, err)
		_, err = c.MultiLock(c.Lock("a"), c.Lock("n", rlock.NonReentrant())).Lock(ctx)
		require.ErrorIs(t, err, lock.ErrReentered)
		require.False(t, harness.IsLocked(t, c.Lock("a")))
		require.NoError(t, first.Unlock(t.Context()))
		require.NoError(t, reads.Unlock(t.Context()))
		harness.NothingStays(t, s.Addr)
	})
}

// The lease and MaxHold of a hold that an owner adds to others count from that call, and not from when
// the members were acquired.
func TestMultiTermsOfReentry(t *testing.T) {
	const (
		timeout = 2 * time.Second
		before  = 1200 * time.Millisecond // since the members were acquired
		term    = time.Second
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		held := []lock.Locker{c.Lock("a"), c.FencedLock("b"), c.FairLock("c"), c.RWLock("d").Read(), c.RWLock("e").Write()}
		groups := map[string]*multilock.Multi{
			"the same members": c.MultiLock(held...),
			"another member":   c.MultiLock(append([]lock.Locker{c.Lock("f")}, held...)...),
		}
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		first, err := groups["the same members"].Lock(ctx)
		require.NoError(t, err)
		time.Sleep(before)
		for name, m := range groups {
			for _, opt := range []lock.Option{lock.Lease(term), lock.MaxHold(term), lock.Lease(time.Minute)} {
				begin := time.Now()
				again, err := m.TryLock(ctx, opt)
				require.NoError(t, err, name)
				left := again.Remaining()
				require.Greater(t, left, term-term/100-time.Since(begin), name)
				for _, key := range []string{"a", "b", "c", "d", "e"} {
					ttl := time.Duration(harness.PTTL(t, s.Addr, key)) * time.Millisecond
					require.GreaterOrEqual(t, ttl, again.Remaining()-time.Millisecond, "%s: %s expires before the hold", name, key)
				}
				require.NoError(t, again.Unlock(t.Context()))
			}
		}
		require.NoError(t, first.Unlock(t.Context()))
		multiEmpty(t, s)
	})
}

// Without an answer of the server, no hold claims a longer lease than the server has given: neither the
// one that is refused, nor the one that its owner had before.
func TestMultiReentryWithoutAServer(t *testing.T) {
	const timeout = 4 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, gate := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(timeout))
		for _, m := range []*multilock.Multi{c.MultiLock(c.Lock("a")), c.MultiLock(c.Lock("a"), c.FencedLock("b"))} {
			ctx := lock.WithOwner(t.Context(), c.NewOwner())
			first, err := m.Lock(ctx)
			require.NoError(t, err)
			gate.Stall()
			waitCtx, cancel := context.WithTimeout(ctx, time.Second)
			again, err := m.Lock(waitCtx, lock.Lease(10*timeout))
			cancel()
			if err == nil {
				require.LessOrEqual(t, again.Remaining(), timeout, "the server was not asked")
			}
			require.LessOrEqual(t, first.Remaining(), timeout, "the server was not asked")
			require.NoError(t, gate.Open())
			require.Error(t, err)
			require.NoError(t, first.Unlock(t.Context()))
		}
		multiEmpty(t, s)
	})
}
