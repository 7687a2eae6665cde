package contract_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// Waiters beyond a maximum fail at once, and others wait.
func TestMaxWaiters(t *testing.T) {
	eachVirtually(t, func(k kind) bool { return k.name != "latch" }, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c, other := s.Client(t), s.Client(t)
		l := k.rival(c, "orders")
		if k.name == "multi" {
			require.ErrorIs(t, only(l.Lock(t.Context(), lock.MaxWaiters(1))), lock.ErrInvalid)
			return
		}
		for _, n := range []int{0, -1} {
			require.ErrorIs(t, only(l.Lock(t.Context(), lock.MaxWaiters(n))), lock.ErrInvalid)
		}
		if k.leased {
			require.ErrorIs(t, only(l.TryLock(t.Context(), lock.MaxWaiters(1))), lock.ErrInvalid)
		}
		theirs := mustLock(t, t.Context(), k.of(other, "orders"))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var waiters []<-chan error
		for n := range 2 {
			began := time.Now()
			if n > 0 {
				err := only(l.Lock(t.Context(), lock.MaxWaiters(n)))
				require.ErrorIs(t, err, lock.ErrNotAcquired)
				require.ErrorContains(t, err, "too many callers of this client wait already: 1 (MaxWaiters)")
				require.Zero(t, time.Since(began))
			}
			waiters = append(waiters, async(func() error { return only(l.Lock(ctx, lock.MaxWaiters(n+1))) }))
			harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(n+1, c) })
			synctest.Wait() // a lock that polls counts its first attempts, too
		}
		require.ErrorIs(t, only(l.Lock(t.Context(), lock.MaxWaiters(2))), lock.ErrNotAcquired)
		third := async(func() error { return only(l.Lock(ctx)) }) // without a maximum
		harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(3, c) })
		cancel()
		for _, w := range append(waiters, third) {
			require.ErrorIs(t, ends(t, w, time.Second), lock.ErrNotAcquired)
		}
		synctest.Wait()
		getsIt := async(func() error { return l.Do(t.Context(), nothing, lock.MaxWaiters(1)) })
		harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(1, c) })
		require.NoError(t, theirs.Unlock(t.Context()))
		getsIn(t, getsIt)
		require.NoError(t, l.Do(t.Context(), nothing, lock.MaxWaiters(1)), "nobody waits")
	})
}
