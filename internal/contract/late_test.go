package contract_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// A request that arrives late, or is undone late, ends no other hold.

var withOwners = []requests{lockRow, plainRow, fairRow, readRow, writeRow}

// eachSite runs a test for each row at a site of its own.
func eachSite(t *testing.T, rows []requests, timeout time.Duration, test func(x *site)) {
	t.Helper()
	harness.EachOf(t, rows, func(r requests) string { return r.name }, func(t *testing.T, s *testserver.Server, r requests) {
		if timeout > 0 {
			r.timeout = timeout
		}
		x := &site{T: t, requests: r, scene: newScene(t, s, r.timeout), name: "orders"}
		x.prepare()
		test(x)
		x.unmake(t, s.Addr, x.name)
		harness.NothingStays(t, s.Addr)
	})
}

// held returns how many holds an owner has.
func (x *site) holds(h lock.Hold) int {
	x.Helper()
	return harness.HoldCount(x, x.lock(x.other, x.name), h.Owner())
}

// An attempt was answered: somebody else has the lock. A copy of it that arrives later
// takes the lock for a waiter that does not know. When the waiter tries again it must not
// be more certain of its lease than the server, nor believe that it has the lock when that
// was lost in between.
func TestACopyOfAnAttemptArrivesLate(t *testing.T) {
	wakes := map[string]struct{ channel, payload string }{
		"lock": {wire.LockChannel("orders"), wire.PayloadUnlocked}, "plain": {wire.PlainChannel("orders"), wire.PayloadUnlocked},
		"read": {wire.RWChannel("orders"), wire.PayloadWriteFree}, "write": {wire.RWChannel("orders"), wire.PayloadWriteFree},
	}
	for _, lost := range []bool{false, true} {
		t.Run(map[bool]string{false: "kept", true: "lost"}[lost], func(t *testing.T) {
			eachSite(t, []requests{lockRow, plainRow, readRow, writeRow}, 0, func(x *site) {
				first := mustLock(x, x.Context(), x.theirs())
				sha := x.load(x, x.acquire)
				reached := x.g.Arm(harness.Echo, sha, x.there)
				w := harness.StartLock(x, x.ctx, x.mine())
				harness.Reached(x, reached)
				harness.Waits(x, 1, x.c)
				x.ask(x, "DEL", x.name)
				x.open()
				require.EqualValues(x, 1, x.number(x, "EXISTS", x.name))
				wake := func() { x.ask(x, "PUBLISH", wakes[x.kind.name].channel, wakes[x.kind.name].payload) }
				if lost {
					x.ask(x, "DEL", x.name)
					second := mustLock(x, x.Context(), x.theirs())
					x.g.Keep(x, sha, 1, wake)
					x.open()
					harness.Waits(x, 1, x.c)
					require.True(x, w.Running())
					require.NoError(x, second.Unlock(x.Context())) // and wakes it
				} else {
					copied := x.number(x, "PTTL", x.name)
					harness.Eventually(x, soon, "time passes", func() bool { return x.number(x, "PTTL", x.name) < copied-200 })
					wake()
				}
				h := w.Got()
				ttl := time.Duration(x.number(x, "PTTL", x.name)) * time.Millisecond
				require.LessOrEqual(x, h.Remaining(), ttl+time.Millisecond)
				require.Equal(x, 1, x.holds(h))
				require.NoError(x, h.Unlock(x.ctx))
				require.ErrorIs(x, first.Unlock(x.Context()), lock.ErrLost)
			})
		})
	}
}

// The release that was sent first arrives when another was answered long ago.
func TestAReleaseThatArrivesLateEndsNoOtherHold(t *testing.T) {
	eachSite(t, withOwners, 0, func(x *site) {
		h := mustLock(x, x.ctx, x.mine())
		x.g.During(x, harness.DelayRequest, x.load(x, x.release), func() { require.NoError(x, h.Unlock(x.ctx)) })
		next := mustLock(x, x.ctx, x.mine())
		harness.Eventually(x, soon, "nothing is under way", func() bool { return x.c.Stats().Background == 0 })
		x.open()
		require.Equal(x, 1, x.holds(next))
		require.NoError(x, next.Unlock(x.ctx))
	})
}

func TestUnlockOfAnOverdueHoldFreesTheLock(t *testing.T) {
	eachSite(t, withOwners, 0, func(x *site) {
		h := mustLock(x, x.ctx, x.mine(), lock.MaxHold(100*time.Millisecond))
		<-h.Context().Done()
		var lost *lock.LostError
		require.ErrorAs(x, context.Cause(h.Context()), &lost)
		require.Equal(x, lock.ReasonMaxHold, lost.Reason)
		require.Equal(x, error(lost), h.Unlock(x.ctx))
		require.NoError(x, x.theirs().Do(x.Context(), nothing, lock.Wait(0)), "Unlock has returned before")
	})
}

func TestUnlockOfALostHoldSparesTheNextHold(t *testing.T) {
	eachSite(t, withOwners, 0, func(x *site) {
		h1 := mustLock(x, x.ctx, x.mine(), lock.Lease(time.Second))
		<-h1.Context().Done()
		harness.Eventually(x, soon, "its lease is over on the server", func() bool { return !harness.IsLocked(x, x.lock(x.c, x.name)) })
		h2 := mustLock(x, x.ctx, x.mine())
		require.ErrorIs(x, h1.Unlock(x.ctx), lock.ErrLost)
		harness.Eventually(x, soon, "no release is under way", func() bool { return x.c.Stats().Background == 0 })
		require.Equal(x, 1, x.holds(h2))
		isTaken(x, x.theirs())
		require.NoError(x, h2.Unlock(x.ctx))
	})
}

// The request of a waiter of a fair lock arrives late, when one that came after it to the
// same client has its position. The client has them in another order than the server, and
// both get in.
func TestARequestForAPositionArrivesLate(t *testing.T) {
	eachSite(t, []requests{fairRow}, 0, func(x *site) {
		h := mustLock(x, x.Context(), x.theirs())
		first := x.parked(2)
		var late *call
		x.g.During(x, harness.DelayRequest, x.load(x, x.acquire), func() { late = harness.StartLock(x, x.ctx, x.mine()) })
		next := harness.StartLock(x, x.ctx, x.mine())
		harness.Eventually(x, soon, "it has a position", func() bool { return len(x.queue()) >= 2 })
		x.open()
		harness.Eventually(x, soon, "all have a position", func() bool { return len(x.queue()) == 3 })
		require.NoError(x, h.Unlock(x.ctx))
		harness.InOrder(x, first)
		begin := time.Now()
		inAnyOrder(x, next, late)
		heartbeat := x.timeout / 9 // which tells it
		require.Less(x, time.Since(begin), heartbeat+3*time.Second)
	})
}

// copied returns a hold of a fair lock, and the next waiter of its client. A copy of the request that acquired
// the hold arrives when the gate opens.
func (x *site) copied() (first lock.Hold, next *call) {
	x.Helper()
	theirs := mustLock(x, x.Context(), x.theirs())
	w := x.parked(x.there)
	x.g.During(x, harness.DelayRequest, x.load(x, x.acquire), func() {
		require.NoError(x, theirs.Unlock(x.Context()))
		first = w.Got()
	})
	return first, x.joined()
}

// Holds of one client have a fair lock one after the other. A copy of the request that took it arrives when
// the last of them has released it, and is undone.
func TestACopyOfAnAcquisitionArrivesAfterAHandOff(t *testing.T) {
	eachSite(t, []requests{fairRow}, time.Hour, func(x *site) {
		first, next := x.copied()
		require.NoError(x, first.Unlock(x.ctx))
		h := next.Got()
		require.Equal(x, first.Owner(), h.Owner(), "the lock was handed over")
		require.NoError(x, h.Unlock(x.ctx))
		x.open()
		harness.Eventually(x, soon, "the lock is free", func() bool { return !harness.IsLocked(x, x.lock(x.other, x.name)) })
	})
}

// A copy of the request that took a fair lock arrives when Unlock has learned that the lock was lost, before
// it could hand the lock over, and is undone.
func TestACopyOfAnAcquisitionArrivesAfterALoss(t *testing.T) {
	eachSite(t, []requests{fairRow}, time.Hour, func(x *site) {
		first, next := x.copied()
		x.ask(x, "DEL", x.name)
		require.ErrorIs(x, first.Unlock(x.ctx), lock.ErrLost)
		require.NoError(x, next.Got().Unlock(x.ctx))
		x.open()
		harness.Eventually(x, soon, "the lock is free", func() bool { return !harness.IsLocked(x, x.lock(x.other, x.name)) })
	})
}

// The request that gives something back in the background is lost just when the client of
// a semaphore is closed.
func TestCloseGivesBackWhatIsUnknown(t *testing.T) {
	eachSite(t, []requests{permitRow, numberRow}, 0, func(x *site) {
		undo := "semaphore/undo"
		if x.leased {
			undo = "semaphore/permit_undo"
		}
		check := func(script string, w *call) {
			x.g.During(x, harness.LoseRequest, x.load(x, script), func() { w.Cancel(nil) })
			x.c.Close()
			require.Error(x, w.End())
			x.open()
			x.dial(x.g)
		}
		var w *call
		x.g.Keep(x, x.load(x, x.acquire), 1, func() { w = harness.StartLock(x, x.ctx, x.mine()) })
		check(undo, w)
		h := mustLock(x, x.Context(), x.theirs()) // the only permit
		check("semaphore/leave", x.parked(x.there))
		require.Zero(x, x.number(x, "ZCARD", wire.SemaphoreWaiting(x.name)))
		require.NoError(x, h.Unlock(x.Context()))
	})
}
