package multilock_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
			of        lockOf
			receivers int
		}{
			"lock": {plainLock, 1}, "write": {writeLock, 1}, "fair": {fairLock, -1}, "spin": {spinLock, -1}, "plain": {keyLock, -1},
		} {
			holder, waiter := harness.Client(t, s), harness.Client(t, s)
			h, err := engine.Find(k.of(holder, kind)).TryMember(t.Context(), time.Minute)
			require.NoError(t, err)
			w := harness.StartLock(t, t.Context(), k.of(waiter, kind))
			if kind != "spin" {
				harness.Eventually(t, 5*time.Second, "the waiter is subscribed", func() bool { return waiter.Stats().PubSub.Subscribed == 1 })
			}
			require.NoError(t, h.Unlock(t.Context()))
			require.Equal(t, k.receivers, h.Receivers(), kind)
			require.NoError(t, w.Got().Unlock(t.Context()))
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
	})
}
