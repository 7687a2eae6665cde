package contract_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

func TestReentryIsCounted(t *testing.T) {
	eachKind(t, reentrant, func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		l, o := k.lock(c, "orders"), c.NewOwner()
		ctx := lock.WithOwner(t.Context(), o)
		for _, holds := range []int{1, 2, 3} {
			var taken []lock.Hold
			for n := range holds {
				take := func() (lock.Hold, error) { return k.of(c, "orders").TryLock(ctx) }
				if n == 1 {
					take = func() (lock.Hold, error) { return l.Lock(ctx, lock.Wait(time.Minute)) }
				}
				h, err := take()
				require.NoError(t, err)
				require.Equal(t, o, h.Owner())
				taken = append(taken, h)
				require.Equal(t, n+1, harness.HoldCount(t, l, o))
			}
			for n, h := range taken {
				isTaken(t, k.rival(c, "orders"))
				isTaken(t, k.rival(other, "orders"))
				require.NoError(t, h.Unlock(ctx))
				require.Equal(t, holds-n-1, harness.HoldCount(t, l, o))
			}
			require.False(t, harness.IsLocked(t, l))
			require.ErrorIs(t, taken[0].Unlock(ctx), lock.ErrNotHeld)
		}
	})
}

func TestReentryIsRefused(t *testing.T) {
	eachKind(t, func(k kind) bool { return k.owned && k.once }, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l, o := k.lock(c, "orders"), c.NewOwner()
		ctx := lock.WithOwner(t.Context(), o)
		h := mustLock(t, ctx, l)
		for _, l := range []harness.Lock{l, k.lock(c, "orders")} {
			begin := time.Now()
			for _, err := range []error{
				only(l.TryLock(ctx)), only(l.Lock(ctx)), only(l.Lock(ctx, lock.Wait(time.Minute))),
			} {
				require.ErrorIs(t, err, lock.ErrReentered)
			}
			require.Less(t, time.Since(begin), 10*time.Second)
			require.Equal(t, 1, harness.HoldCount(t, l, o))
		}
		require.NoError(t, h.Unlock(ctx)) // one is enough
		require.False(t, harness.IsLocked(t, l))
	})
}

func TestReentryDoesNotWaitBehindTheQueue(t *testing.T) {
	eachKind(t, reentrant, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l := k.of(c, "orders")
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h1 := mustLock(t, ctx, l)
		w := k.waits(t, k.rival(c, "orders"), c)
		h2 := mustLock(t, ctx, l)
		require.NoError(t, h2.Unlock(ctx))
		require.Empty(t, w)
		require.NoError(t, h1.Unlock(ctx))
		getsIn(t, w)
	})
}

func TestReentryNeitherShortensTheLeaseNorDoesItsUnlock(t *testing.T) {
	eachKind(t, reentrant, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h1 := mustLock(t, ctx, k.of(c, "orders"), lock.Lease(10*time.Minute))
		h2 := mustLock(t, ctx, k.of(c, "orders"), lock.Lease(time.Second))
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(590_000))
		require.NoError(t, h2.Unlock(ctx))
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(590_000))
		require.NoError(t, h1.Unlock(ctx))
	})
}

func TestUnlockByOwnerEndsTheLatestHoldOfThisProcess(t *testing.T) {
	eachKind(t, owned, func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		l := k.lock(c, "orders")
		for name, ctx := range k.owners(t, c) {
			holds := []lock.Hold{mustLock(t, ctx, l)}
			ctx = lock.WithOwner(t.Context(), holds[0].Owner())
			if !k.once {
				holds = append(holds, mustLock(t, ctx, l))
			}
			for n := len(holds) - 1; n >= 0; n-- {
				require.NoError(t, l.Unlock(ctx), name)
				require.ErrorIs(t, context.Cause(holds[n].Context()), context.Canceled)
				require.Zero(t, holds[n].Remaining())
				require.ErrorIs(t, holds[n].Unlock(ctx), lock.ErrNotHeld)
				require.Equal(t, n, harness.HoldCount(t, k.lock(other, "orders"), holds[0].Owner()))
				if n > 0 {
					require.NoError(t, holds[0].Context().Err())
				}
			}
			require.ErrorIs(t, l.Unlock(ctx), lock.ErrNotHeld)
		}
	})
}

// An owner made for one acquisition can be taken over as a name. Its first hold then shares
// the lock. It must not take the second one's share with it, nor pass the lock on.
func TestAnOwnerUsedAgainIsCounted(t *testing.T) {
	eachKind(t, reentrant, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l := k.lock(c, "orders")
		for _, first := range []int{0, 1} {
			h := mustLock(t, t.Context(), l)
			w := k.waits(t, k.rival(c, "orders"), c)
			holds := []lock.Hold{h, mustLock(t, lock.WithOwner(t.Context(), h.Owner()), l)}
			require.Equal(t, 2, harness.HoldCount(t, l, h.Owner()))
			require.NoError(t, holds[first].Unlock(t.Context()))
			require.Equal(t, 1, harness.HoldCount(t, l, h.Owner()))
			isTaken(t, k.rival(c, "orders"))
			require.Empty(t, w)
			require.NoError(t, holds[1-first].Unlock(t.Context()))
			getsIn(t, w)
			harness.Idle(t, c)
		}
	})
}
