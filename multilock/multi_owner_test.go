package multilock_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
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
		a, d := c.Lock("a"), c.RWLock("d").Write()
		m := c.MultiLock(a, c.FencedLock("b"), c.FairLock("c"), d)
		mine := c.NewOwner()
		ctx := lock.WithOwner(t.Context(), mine)
		counts := func(want int) {
			t.Helper()
			require.Equal(t, want, harness.HoldCount(t, a, mine))
			require.Equal(t, want, harness.HoldCount(t, d, mine))
		}
		counts(0)
		first, err := m.Lock(ctx, lock.Lease(10*time.Second))
		require.NoError(t, err)
		require.Equal(t, mine, lock.OwnerOf(first))
		counts(1)
		again, err := m.TryLock(ctx)
		require.NoError(t, err)
		counts(2)
		require.NoError(t, first.Extend(t.Context(), time.Hour))
		require.NoError(t, again.Unlock(t.Context()))
		counts(1)
		require.NoError(t, first.Unlock(t.Context()))
		counts(0)
		require.ErrorIs(t, m.UnlockOwner(ctx), lock.ErrNotHeld)
		require.ErrorIs(t, m.UnlockOwner(t.Context()), lock.ErrInvalid)

		// Unlock ends the latest of several holds with the same members, even through a new
		// Multi with another order.
		first, err = m.Lock(ctx)
		require.NoError(t, err)
		single, err := c.MultiLock(c.Lock("a"), c.FencedLock("b")).Lock(ctx)
		require.NoError(t, err)
		last, err := c.MultiLock(d, c.FairLock("c"), c.FencedLock("b"), a).Lock(ctx)
		require.NoError(t, err)
		for _, h := range []lock.Hold{last, first} {
			require.NoError(t, h.Context().Err())
			require.NoError(t, m.UnlockOwner(ctx))
			require.ErrorIs(t, context.Cause(h.Context()), context.Canceled)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
		}
		require.NoError(t, single.Context().Err())
		require.NoError(t, single.Unlock(t.Context()))

		// Invalid arguments.
		var none context.Context
		require.ErrorIs(t, m.UnlockOwner(none), lock.ErrInvalid)
		unknown := c.MultiLock(a, c.RedLock([]lock.Locker{c.Lock("z")}))
		require.ErrorIs(t, unknown.UnlockOwner(ctx), lock.ErrUnsupported)
		multiEmpty(t, s)
	})
}

// Unlock by owner knows a hold by its members, also if the locks of two servers have one name.
func TestMultiUnlockIgnoresTheOrderOfClients(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, other := s.Client(t), virtualServer(t).Client(t)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h, err := c.MultiLock(c.Lock("a"), other.Lock("a")).Lock(ctx)
		require.NoError(t, err)
		require.ErrorIs(t, c.MultiLock(c.Lock("a"), c.Lock("b")).UnlockOwner(ctx), lock.ErrNotHeld)
		require.NoError(t, c.MultiLock(other.Lock("a"), c.Lock("a")).UnlockOwner(ctx))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
	})
}

// A forbidden upgrade or re-entry is an error without a wait and leaves the owner's holds
// untouched.
func TestMultiForbiddenReentry(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		rw, once := c.RWLock("b"), c.Lock("n", rlock.NonReentrant())
		reads, err := rw.Read().Lock(ctx)
		require.NoError(t, err)
		_, err = c.MultiLock(c.Lock("a"), rw.Write(), c.Lock("c")).Lock(ctx)
		require.ErrorIs(t, err, lock.ErrUpgrade)
		first, err := once.Lock(ctx)
		require.NoError(t, err)
		_, err = c.MultiLock(c.Lock("a"), once).Lock(ctx)
		require.ErrorIs(t, err, lock.ErrReentered)
		require.False(t, s.Exists("a"))
		require.NoError(t, first.Unlock(t.Context()))
		require.NoError(t, reads.Unlock(t.Context()))
		virtuallyEmpty(t, s)
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
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, conn := s.Client(t, redlatch.WithWatchdogTimeout(timeout)), s.Conn(t)
		names := []string{"a", "b", "c", "d", "e"}
		held := []lock.Locker{c.Lock("a"), c.FencedLock("b"), c.FairLock("c"), c.RWLock("d").Read(), c.RWLock("e").Write()}
		same := c.MultiLock(held...)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		first, err := same.Lock(ctx)
		require.NoError(t, err)
		time.Sleep(before)
		for _, m := range []*multilock.Multi{same, c.MultiLock(append([]lock.Locker{c.Lock("f")}, held...)...)} {
			for _, opt := range []lock.HoldOption{lock.Lease(term), lock.MaxHold(term), lock.Lease(time.Minute)} {
				again, err := m.TryLock(ctx, opt)
				require.NoError(t, err)
				require.GreaterOrEqual(t, again.Remaining(), term-term/100)
				for _, name := range names {
					ttl, err := conn.Do(t.Context(), conn.B().Pttl().Key(name).Build()).AsInt64()
					require.NoError(t, err)
					require.GreaterOrEqual(t, ttl, again.Remaining().Milliseconds()-1, "%s: %s expires before the hold", m.Name(), name)
				}
				require.NoError(t, again.Unlock(t.Context()))
			}
		}
		require.NoError(t, first.Unlock(t.Context()))
		virtuallyEmpty(t, s)
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

// A lock that a MultiLock releases may have been passed on within the process before. The holders that have passed
// it on learn that they had it, although their checks come late.
func TestMultiReleasesWhatWasPassedOn(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		owner := lock.WithOwner(t.Context(), c.NewOwner())
		results := make(chan error, 3)
		unlock := func(h lock.Hold) { go func() { results <- h.Unlock(t.Context()) }() }

		first := multiMust(t, c.Lock("a"))
		second := harness.StartLock(t, t.Context(), c.Lock("a"))
		synctest.Wait()
		third := harness.StartLock(t, owner, c.Lock("a"))
		synctest.Wait()
		answers := make(chan struct{})
		s.Server().SetPreHook(func(*server.Peer, string, ...string) bool { <-answers; return false })
		unlock(first)
		unlock(second.Got()) // its check waits for the check before it
		last := third.Got()
		group, err := c.MultiLock(c.Lock("a")).Lock(owner)
		require.NoError(t, err)
		require.NoError(t, last.Unlock(t.Context()))
		unlock(group)
		synctest.Wait()
		require.Empty(t, results)

		close(answers)
		for range cap(results) {
			require.NoError(t, <-results)
		}
		virtuallyEmpty(t, s)
	})
}
