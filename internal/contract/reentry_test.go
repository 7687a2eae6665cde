package contract_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

// An owner can lock what it holds, also before others that wait, and has as many holds as it has not unlocked,
// with the hold or with Unlock of the lock, which ends the latest of this process. None of that shortens the lease.
func TestReentryIsCounted(t *testing.T) {
	eachKind(t, func(k kind) bool { return k.owned || k.memory }, func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		l, o := k.of(c, "orders"), c.NewOwner()
		ctx := lock.WithOwner(t.Context(), o)
		most := 3
		if k.once {
			most = 1
		}
		for _, byOwner := range []bool{false, true} {
			if byOwner && !k.owned {
				continue
			}
			holds := []lock.Hold{mustLock(t, ctx, l, lock.Lease(10*time.Minute))}
			w := k.waits(t, k.rival(c, "orders"), c)
			for len(holds) < most {
				h, err := k.of(c, "orders").TryLock(ctx)
				if len(holds) == 1 {
					require.NoError(t, err)
					require.NoError(t, h.Unlock(ctx))
					h, err = l.Lock(ctx, lock.Wait(time.Minute), lock.Lease(30*time.Second))
				}
				require.NoError(t, err)
				holds = append(holds, h)
			}
			for len(holds) > 0 {
				n := len(holds)
				if k.owned {
					require.Equal(t, n, harness.HoldCount(t, k.lock(c, "orders"), o))
					require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(590_000))
					require.ErrorIs(t, k.lock(other, "orders").UnlockOwner(ctx), lock.ErrNotHeld)
				}
				isTaken(t, k.rival(other, "orders"))
				require.Empty(t, w)
				end := holds[0]
				if byOwner {
					end, holds = holds[n-1], holds[:n-1]
					require.NoError(t, k.lock(c, "orders").UnlockOwner(ctx))
				} else {
					holds = holds[1:]
					require.NoError(t, end.Unlock(ctx))
				}
				require.ErrorIs(t, context.Cause(end.Context()), context.Canceled)
				require.Zero(t, end.Remaining())
				require.ErrorIs(t, end.Unlock(ctx), lock.ErrNotHeld)
				for _, h := range holds {
					require.NoError(t, h.Context().Err())
				}
			}
			getsIn(t, w)
			if k.owned {
				require.Zero(t, harness.HoldCount(t, k.lock(c, "orders"), o))
				require.ErrorIs(t, k.lock(c, "orders").UnlockOwner(ctx), lock.ErrNotHeld)
			}
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

// Lock under a hold on the same lock logs once that it may wait for itself.
func TestLockUnderItsOwnHoldWarns(t *testing.T) {
	locks := func(k kind) bool { return k.owned || k.name == "multi" || k.name == "red" }
	eachKind(t, locks, func(t *testing.T, s *testserver.Server, k kind) {
		var log harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		l := k.of(c, "orders")
		under := func(ctx context.Context) {
			for range 2 {
				h, err := l.Lock(ctx, lock.Wait(time.Millisecond))
				if err == nil {
					require.NoError(t, h.Unlock(ctx))
				} else {
					harness.NotAcquired(t, err)
				}
			}
		}
		const warning = "wait for itself"
		outer := mustLock(t, t.Context(), l)
		require.ErrorIs(t, only(k.rival(c, "orders").TryLock(outer.Context())), lock.ErrNotAcquired)
		other := mustLock(t, outer.Context(), c.Lock("another"))
		under(t.Context())
		require.NotContains(t, log.String(), warning)
		under(other.Context())
		require.Equal(t, 1, strings.Count(log.String(), warning), log.String())
		require.Contains(t, log.String(), "orders")
		require.Regexp(t, `held=.*kinds_test\.go:.*called=.*reentry_test\.go:`, log.String()) // mustLock, and under
		require.NoError(t, outer.Unlock(t.Context()))
		under(other.Context())
		if k.rival(c, "orders").Name() == "orders" && !k.once {
			owned := lock.WithOwner(t.Context(), c.NewOwner())
			h := mustLock(t, owned, l)
			again := mustLock(t, h.Context(), l)
			require.NoError(t, again.Unlock(owned))
			require.NoError(t, h.Unlock(owned))
		}
		require.Equal(t, 1, strings.Count(log.String(), warning), log.String())
		require.NoError(t, other.Unlock(t.Context()))
	})
}

// Holds of one owner end each at its own time. The server keeps the lock for as long as the
// longest of them, and not longer than the last Unlock.
func TestHoldsOfOneOwnerEndEachAtItsOwnTime(t *testing.T) {
	eachVirtually(t, andInMemory(reentrant), func(t *testing.T, s *harness.VirtualServer, k kind) {
		orders := map[string][]int{"in order": {0, 1, 2}, "in reverse": {2, 1, 0}, "the middle first": {1, 0, 2}}
		for _, order := range orders {
			c, other := s.Client(t), s.Client(t)
			ctx := lock.WithOwner(t.Context(), c.NewOwner())
			opts := [][]lock.Option{{lock.Lease(20 * time.Second)}, {lock.Lease(90 * time.Second)}, {lock.MaxHold(50 * time.Second)}}
			ends := []time.Duration{20 * time.Second, 90 * time.Second, 50 * time.Second}
			begin := time.Now()
			holds := make([]lock.Hold, len(opts))
			for _, i := range order {
				holds[i] = mustLock(t, ctx, k.of(c, "orders"), opts[i]...)
			}
			for _, i := range []int{0, 2, 1} {
				time.Sleep(time.Until(begin.Add(ends[i] - time.Second)))
				require.NoError(t, context.Cause(holds[i].Context()), "hold %d", i)
				require.Positive(t, holds[i].Remaining())
				isTaken(t, k.rival(other, "orders"))
				time.Sleep(2 * time.Second)
				require.ErrorIs(t, context.Cause(holds[i].Context()), lock.ErrLost, "hold %d", i)
				require.Zero(t, holds[i].Remaining())
			}
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(time.Minute)))
			for _, h := range holds {
				require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
			}

			// However the other holds have ended.
			first := mustLock(t, ctx, k.of(c, "orders"), lock.Lease(time.Second))
			last := mustLock(t, ctx, k.of(c, "orders"), lock.Lease(time.Hour))
			gone := mustLock(t, ctx, k.of(c, "orders"), lock.MaxHold(time.Second))
			time.Sleep(2 * time.Second)
			require.ErrorIs(t, first.Unlock(ctx), lock.ErrLost)
			require.NoError(t, last.Unlock(ctx))
			require.NoError(t, only(k.rival(other, "orders").TryLock(t.Context(), lock.Lease(time.Second))))
			require.ErrorIs(t, gone.Unlock(ctx), lock.ErrLost)
			time.Sleep(2 * time.Second)
			c.Close()
			other.Close()
		}
	})
}

// A lease on the server never gets shorter: the lock outlasts the last hold of an owner if another one had a
// longer lease, because the work under it may go on. Unlock frees it.
func TestALongerLeaseOfAnEndedHoldStays(t *testing.T) {
	eachVirtually(t, andInMemory(reentrant), func(t *testing.T, s *harness.VirtualServer, k kind) {
		c, other := s.Client(t), s.Client(t)
		for _, longer := range [][]lock.Option{nil, {lock.Lease(20 * time.Second)}, {lock.MaxHold(time.Minute)}} {
			ctx := lock.WithOwner(t.Context(), c.NewOwner())
			first := mustLock(t, ctx, k.of(c, "orders"), longer...)
			last := mustLock(t, ctx, k.of(c, "orders"), lock.Lease(2*time.Second))
			require.NoError(t, first.Unlock(ctx))
			<-last.Context().Done()
			require.ErrorIs(t, context.Cause(last.Context()), lock.ErrLost)
			time.Sleep(time.Second)
			isTaken(t, k.rival(other, "orders"))
			require.ErrorIs(t, last.Unlock(ctx), lock.ErrLost)
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(time.Second)))
		}
		// Without that Unlock it becomes free when the longer lease ends.
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		first := mustLock(t, ctx, k.of(c, "orders"))
		mustLock(t, ctx, k.of(c, "orders"), lock.Lease(2*time.Second))
		require.NoError(t, first.Unlock(ctx))
		require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(time.Minute)))
	})
}

// A second Lock of an owner sends nothing, unless it is to last for longer than the server
// knows.
func TestReentrySendsNothing(t *testing.T) {
	eachKind(t, reentrant, func(t *testing.T, s *testserver.Server, k kind) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		warm := mustLock(t, ctx, k.of(c, "orders")) // loads the scripts
		require.NoError(t, warm.Extend(ctx, time.Minute))
		require.NoError(t, warm.Unlock(ctx))
		first := mustLock(t, ctx, k.of(c, "orders"))
		sent := func() int { calls := harness.Commands(t, conn); return calls["evalsha"] + calls["eval"] }
		before := sent()
		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Second)}, {lock.MaxHold(time.Minute)}} {
			h := mustLock(t, ctx, k.of(c, "orders"), opts...)
			require.NoError(t, h.Unlock(ctx))
		}
		require.Equal(t, before, sent())
		long := mustLock(t, ctx, k.of(c, "orders"), lock.Lease(time.Hour))
		require.Equal(t, before+1, sent())
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), (59 * time.Minute).Milliseconds())
		require.NoError(t, first.Unlock(ctx))
		require.Equal(t, before+1, sent())
		isTaken(t, k.rival(c, "orders"))
		require.NoError(t, long.Unlock(ctx))
	})
}

// byOwner is for choose: an owner can unlock without a hold.
func byOwner(k kind) bool { return k.owned || k.name == "multi" }

// unlocker is a Locker of such a kind.
type unlocker interface {
	lock.Locker
	UnlockOwner(ctx context.Context) error
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
			err := l.UnlockOwner(ctx)
			var loss *lock.LostError
			require.ErrorAs(t, err, &loss)
			require.ErrorIs(t, err, context.Cause(h.Context()))
			require.ErrorIs(t, l.UnlockOwner(ctx), lock.ErrNotHeld)
			require.ErrorIs(t, h.Unlock(ctx), lock.ErrNotHeld)

			h = loses(lose)
			require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
			require.ErrorIs(t, l.UnlockOwner(ctx), lock.ErrNotHeld)
		}

		loses(gone)
		time.Sleep(time.Minute) // until what a group has left has expired
		mustLock(t, ctx, l)
		require.ErrorIs(t, k.of(c, "another").(unlocker).UnlockOwner(ctx), lock.ErrNotHeld)
		require.ErrorIs(t, l.UnlockOwner(lock.WithOwner(ctx, c.NewOwner())), lock.ErrNotHeld)
		require.NoError(t, l.UnlockOwner(ctx))
		require.ErrorIs(t, l.UnlockOwner(ctx), lock.ErrLost)
		require.ErrorIs(t, l.UnlockOwner(ctx), lock.ErrNotHeld)
	})
}
