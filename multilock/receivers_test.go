package multilock_test

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// A Redlock yields to other processes only if subscribers received the messages of its
// members. Their number is known only for kinds whose waiters all use one channel.
func TestUnlockCountsReceivers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for kind, k := range map[string]struct {
			of        func(c *redlatch.Client) lock.Locker
			receivers int
		}{
			"lock":  {func(c *redlatch.Client) lock.Locker { return c.Lock("orders") }, 1},
			"write": {func(c *redlatch.Client) lock.Locker { return c.RWLock("orders").Write() }, 1},
			"fair":  {func(c *redlatch.Client) lock.Locker { return c.FairLock("orders") }, -1},
			"spin":  {func(c *redlatch.Client) lock.Locker { return c.SpinLock("orders") }, -1},
			"plain": {func(c *redlatch.Client) lock.Locker { return c.PlainLock("orders") }, -1},
		} {
			t.Run(kind, func(t *testing.T) {
				holder, waiter := harness.Client(t, s), harness.Client(t, s)
				h, err := engine.Find(k.of(holder)).TryMember(t.Context(), time.Minute)
				require.NoError(t, err)
				var waits sync.WaitGroup
				waits.Go(func() {
					assert.NoError(t, k.of(waiter).Do(t.Context(), func(context.Context) error { return nil }))
				})
				if kind != "spin" {
					harness.Eventually(t, 5*time.Second, "the waiter is subscribed", func() bool { return waiter.PubSub().Subscribed == 1 })
				}
				require.NoError(t, h.Unlock(t.Context()))
				require.Equal(t, k.receivers, h.Receivers())
				waits.Wait()
			})
		}
	})
}

// A Redlock may release a member when the same owner has already acquired it again. The lock is
// still held then, and its waiters are not counted.
func TestReceiversOfTwoHoldsOfAnOwner(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		hold := func() engine.MemberHold {
			h, err := engine.Find(c.Lock("orders")).TryMember(ctx, time.Minute)
			require.NoError(t, err)
			return h
		}
		first, second := hold(), hold()
		require.NoError(t, first.Unlock(t.Context()))
		require.Equal(t, -1, first.Receivers())
		require.NoError(t, second.Unlock(t.Context()))
		require.Zero(t, second.Receivers())

		var ends sync.WaitGroup
		for _, h := range []engine.MemberHold{hold(), hold()} {
			ends.Go(func() {
				assert.NoError(t, h.Unlock(t.Context()))
				for h.Receivers() != 0 { // nothing else orders it after the release by the other
					runtime.Gosched()
				}
			})
		}
		ends.Wait()
	})
}
