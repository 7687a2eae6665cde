package contract_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

// byOwner is for choose: an owner can unlock without a hold.
func byOwner(k kind) bool { return k.owned || k.name == "multi" }

// unlocker is a Locker of such a kind.
type unlocker interface {
	lock.Locker
	Unlock(ctx context.Context) error
}

// The hold of an owner is not released with its handle, because the owner can unlock without that.
func TestAnOwnerNeedsNoHandle(t *testing.T) {
	eachKind(t, byOwner, func(t *testing.T, s *testserver.Server, k kind) {
		var log, later harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		l, ctx := k.of(c, "orders").(unlocker), lock.WithOwner(t.Context(), c.NewOwner())
		require.NoError(t, only(l.Lock(ctx)))
		require.NoError(t, only(harness.Client(t, s, redlatch.WithLogger(later.Logger())).Lock("another").Lock(t.Context())))
		harness.Eventually(t, soon, "handles are collected", func() bool {
			runtime.GC()
			return later.String() != ""
		})
		runtime.GC()
		isTaken(t, k.rival(c, "orders"))
		require.NoError(t, l.Unlock(ctx))
		require.NoError(t, k.rival(c, "orders").Do(t.Context(), nothing, lock.Wait(0)))
		require.Empty(t, log.String())
	})
}

// What an owner hears of losses by Lock.Unlock is what its holds would say, in the order in which it
// has acquired them.
func TestAnOwnerHearsOfItsLosses(t *testing.T) {
	eachVirtually(t, byOwner, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c := s.Client(t)
		l, ctx := k.of(c, "orders").(unlocker), lock.WithOwner(t.Context(), c.NewOwner())
		loses := func(lose func(h lock.Hold)) lock.Hold {
			h := mustLock(t, ctx, l)
			lose(h)
			require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
			return h
		}
		gone := func(h lock.Hold) {
			require.True(t, s.Del("orders"))
			require.ErrorIs(t, h.Extend(ctx, time.Minute), lock.ErrLost)
		}
		for _, lose := range []func(h lock.Hold){
			gone,
			func(h lock.Hold) { redlatchtest.Lose(t, h.Context(), lock.ReasonClosed) },
		} {
			h := loses(lose)
			err := l.Unlock(ctx)
			var loss *lock.LostError
			require.ErrorAs(t, err, &loss)
			require.Equal(t, context.Cause(h.Context()), err)
			require.ErrorIs(t, l.Unlock(ctx), lock.ErrNotHeld)
			require.ErrorIs(t, h.Unlock(ctx), lock.ErrNotHeld)

			h = loses(lose)
			require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
			require.ErrorIs(t, l.Unlock(ctx), lock.ErrNotHeld)
		}

		loses(gone)
		time.Sleep(time.Minute) // until what a group has left has expired
		mustLock(t, ctx, l)
		require.ErrorIs(t, k.of(c, "another").(unlocker).Unlock(ctx), lock.ErrNotHeld)
		require.ErrorIs(t, l.Unlock(lock.WithOwner(ctx, c.NewOwner())), lock.ErrNotHeld)
		require.NoError(t, l.Unlock(ctx))
		require.ErrorIs(t, l.Unlock(ctx), lock.ErrLost)
		require.ErrorIs(t, l.Unlock(ctx), lock.ErrNotHeld)
	})
}

// After MaxHold, Lock.Unlock releases what the server still has.
func TestAnOwnerUnlocksAfterMaxHold(t *testing.T) {
	eachVirtually(t, byOwner, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c := s.Client(t)
		l, ctx := k.of(c, "orders").(unlocker), lock.WithOwner(t.Context(), c.NewOwner())
		h := mustLock(t, ctx, l, lock.MaxHold(time.Second))
		<-h.Context().Done()
		isTaken(t, k.rival(c, "orders"))
		var loss *lock.LostError
		require.ErrorAs(t, l.Unlock(ctx), &loss)
		require.Equal(t, lock.ReasonMaxHold, loss.Reason)
		require.NoError(t, k.rival(c, "orders").Do(t.Context(), nothing, lock.Wait(0)))
		require.ErrorIs(t, l.Unlock(ctx), lock.ErrNotHeld)
	})
}
