package contract_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// What arrives late, or is undone late, ends no other hold: these are the tests of
// tickets, and of owners made for one acquisition.

var (
	withOwners  = []requests{lockRow, plainRow, fairRow, readRow, writeRow}
	withTickets = []requests{lockRow, fairRow, readRow, writeRow}
)

// eachSite runs a test for each row at a site of its own, with an owner made for each
// acquisition, a named one, or both.
func eachSite(t *testing.T, rows []requests, timeout time.Duration, owners []bool, test func(x *site)) {
	t.Helper()
	harness.EachOf(t, rows, func(r requests) string { return r.name }, func(t *testing.T, s *testserver.Server, r requests) {
		for _, named := range owners {
			t.Run(map[bool]string{false: "unnamed", true: "named"}[named], func(t *testing.T) {
				if timeout > 0 {
					r.timeout = timeout
				}
				x := &site{T: t, requests: r, scene: newScene(t, s, r.timeout), name: "orders", named: named}
				x.settle()
				test(x)
				x.unmake(t, s.Addr, x.name)
				harness.NothingStays(t, s.Addr)
			})
		}
	})
}

var (
	anyOwner   = []bool{false, true}
	namedOwner = []bool{true}
)

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
			eachSite(t, []requests{lockRow, plainRow, readRow, writeRow}, 0, anyOwner, func(x *site) {
				first := mustLock(x, x.Context(), x.theirs())
				sha := x.load(x, x.acquire.of(x.named))
				reached := x.g.Arm(harness.Echo, sha, x.there.of(x.named))
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

// A second acquisition by the same owner, with an unknown outcome, does not cost the owner
// its first.
func TestAnUnknownReentryLeavesTheFirstHold(t *testing.T) {
	eachSite(t, withTickets, 0, namedOwner, func(x *site) {
		h := mustLock(x, x.ctx, x.mine())
		for _, fault := range []harness.Fault{harness.LoseReply, harness.LoseRequest} {
			x.g.Arm(fault, x.load(x, x.acquire.named), 1)
			_, err := x.mine().TryLock(x.ctx)
			require.ErrorIs(x, err, lock.ErrIndeterminate)
			harness.Idle(x, x.c) // it is being undone
			require.Equal(x, 1, x.holds(h))
		}
		require.NoError(x, h.Unlock(x.ctx))
	})
}

func TestAnUnknownAttemptIsNotMistakenForReentry(t *testing.T) {
	once := lockRow
	once.kind = ofKind("non-reentrant")
	eachSite(t, []requests{once}, 0, namedOwner, func(x *site) {
		theirs := mustLock(x, x.Context(), x.theirs())
		w := x.parked(2)
		x.g.During(x, harness.LoseReply, x.load(x, x.acquire.named), func() { require.NoError(x, theirs.Unlock(x.Context())) })
		require.NoError(x, w.Got().Unlock(x.ctx))
	})
}

// The release that was sent first arrives when another was answered long ago.
func TestAReleaseThatArrivesLateEndsNoOtherHold(t *testing.T) {
	eachSite(t, withOwners, 0, anyOwner, func(x *site) {
		h := mustLock(x, x.ctx, x.mine())
		x.g.During(x, harness.DelayRequest, x.load(x, x.release.of(x.named)), func() { require.NoError(x, h.Unlock(x.ctx)) })
		next := mustLock(x, x.ctx, x.mine())
		harness.Eventually(x, soon, "nothing is under way", func() bool { return x.c.Stats().Background == 0 })
		x.open()
		require.Equal(x, 1, x.holds(next))
		require.NoError(x, next.Unlock(x.ctx))
	})
}

// The release of a named owner arrives when its hold is over and the owner has another,
// which the server cannot tell from the first but by its ticket.
func TestAReleaseThatArrivesAfterItsHoldEndsNoOtherHold(t *testing.T) {
	const timeout, lease = 4 * time.Second, time.Second
	eachSite(t, withTickets, timeout, namedOwner, func(x *site) {
		h := mustLock(x, x.ctx, x.mine(), lock.Lease(lease))
		x.g.During(x, harness.DelayRequest, x.load(x, x.release.named), func() {
			// What is sent in the place of the delayed request waits for the lease's end.
			x.ask(x, "CLIENT", "PAUSE", strconv.FormatInt((lease+lease/4).Milliseconds(), 10), "WRITE")
			require.ErrorIs(x, h.Unlock(x.ctx), lock.ErrLost)
		})
		require.Zero(x, x.number(x, "EXISTS", x.name))

		next := mustLock(x, x.ctx, x.mine())
		first := time.Now().Add(next.Remaining())
		x.open()
		require.Equal(x, 1, x.holds(next))
		isTaken(x, x.theirs())
		harness.Eventually(x, timeout, "the lease is renewed", func() bool {
			return time.Now().Add(next.Remaining()).After(first.Add(timeout / 4))
		})
		require.NoError(x, context.Cause(next.Context()))
		require.NoError(x, next.Unlock(x.ctx))
	})
}

// ticket returns the key of the only ticket on the server.
func (x *site) ticket() string {
	x.Helper()
	tickets := x.list(x, "KEYS", wire.UnlockLatch(x.name, "*"))
	require.Len(x, tickets, 1)
	return tickets[0]
}

func TestAHoldIsLostWithItsTicket(t *testing.T) {
	const timeout = 2 * time.Second
	eachSite(t, withTickets, timeout, namedOwner, func(x *site) {
		h := mustLock(x, x.ctx, x.mine())
		x.ask(x, "DEL", x.ticket())
		select {
		case <-h.Context().Done():
		case <-time.After(timeout + soon):
			require.FailNow(x, "the hold does not end")
		}
		var lost *lock.LostError
		require.ErrorAs(x, context.Cause(h.Context()), &lost)
		require.Equal(x, lock.ReasonGone, lost.Reason)
		require.Equal(x, error(lost), h.Unlock(x.ctx))
	})
}

func TestATicketLivesAsLongAsItsHold(t *testing.T) {
	const timeout = 4 * time.Second
	eachSite(t, withTickets, timeout, namedOwner, func(x *site) {
		h := mustLock(x, x.ctx, x.mine())
		ticket := x.ticket()
		<-time.After(timeout + timeout/4) // for which it would not last
		require.NoError(x, context.Cause(h.Context()))
		require.Equal(x, ticket, x.ticket())
		require.NoError(x, h.Extend(x.ctx, time.Hour))
		<-time.After(timeout / 2) // in which it is renewed
		require.Greater(x, x.number(x, "PTTL", ticket), (59 * time.Minute).Milliseconds())
		require.NoError(x, h.Unlock(x.ctx))
		require.NoError(x, x.theirs().Do(x.Context(), nothing))

		h = mustLock(x, x.ctx, x.mine(), lock.Lease(timeout))
		harness.Idle(x, x.c) // the first ticket is being removed
		require.NoError(x, h.Extend(x.ctx, time.Minute))
		require.Greater(x, x.number(x, "PTTL", x.ticket()), (50 * time.Second).Milliseconds())
		require.NoError(x, h.Unlock(x.ctx))
		require.NoError(x, x.theirs().Do(x.Context(), nothing))
	})
}

func TestUnlockOfANamedHoldThatIsOverdueFreesTheLock(t *testing.T) {
	eachSite(t, withOwners, 0, namedOwner, func(x *site) {
		h := mustLock(x, x.ctx, x.mine(), lock.MaxHold(100*time.Millisecond))
		<-h.Context().Done()
		var lost *lock.LostError
		require.ErrorAs(x, context.Cause(h.Context()), &lost)
		require.Equal(x, lock.ReasonMaxHold, lost.Reason)
		require.Equal(x, error(lost), h.Unlock(x.ctx))
		// Well before its lease is over.
		require.NoError(x, x.theirs().Do(x.Context(), nothing, lock.Wait(x.timeout/2)))
	})
}

func TestUnlockOfALostHoldSparesTheNextHoldOfItsOwner(t *testing.T) {
	eachSite(t, withOwners, 0, namedOwner, func(x *site) {
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

func TestUnlockByOwnerEndsAnUnnamedHoldToo(t *testing.T) {
	eachKind(t, owned, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		h := mustLock(t, t.Context(), k.of(c, "orders"))
		require.NoError(t, k.lock(c, "orders").Unlock(lock.WithOwner(t.Context(), h.Owner())))
		require.Error(t, h.Context().Err())
		require.Zero(t, h.Remaining())
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
	})
}

// A waiter of a fair lock whose attempt had no answer keeps its owner while it waits, and
// that is released until nothing of it can be under way any more. The hold has another
// owner, so that it can be used as a name meanwhile.
func TestAHoldAfterALostAnswerIsOfAFreshOwner(t *testing.T) {
	eachSite(t, []requests{fairRow}, 0, []bool{false}, func(x *site) {
		first := mustLock(x, x.ctx, x.mine())
		var w *call
		x.g.During(x, harness.LoseReply, x.load(x, x.acquire.unnamed), func() { w = harness.StartLock(x, x.ctx, x.mine()) })
		harness.Eventually(x, soon, "it queues, under the same owner", func() bool { return len(x.queue()) == 1 })
		before := x.queue()[0]
		require.NoError(x, first.Unlock(x.ctx))
		h := w.Got()
		require.NotEqual(x, before, h.Owner().String())

		as := lock.WithOwner(x.ctx, h.Owner())
		inner := mustLock(x, as, x.mine())
		require.NoError(x, h.Unlock(x.ctx))
		again := mustLock(x, as, x.mine())
		harness.Eventually(x, 2*soon, "the old owner is not released any more", func() bool {
			require.Equal(x, 2, x.holds(h))
			return x.c.Stats().Background == 0
		})
		require.NoError(x, inner.Unlock(x.ctx))
		require.NoError(x, again.Unlock(x.ctx))
	})
}

// The request of a waiter of a fair lock arrives late, when one that came after it to the
// same client has its position. The client has them in another order than the server, and
// both get in.
func TestARequestForAPositionArrivesLate(t *testing.T) {
	eachSite(t, []requests{fairRow}, 0, []bool{false}, func(x *site) {
		h := mustLock(x, x.Context(), x.theirs())
		first := x.parked(2)
		var late *call
		x.g.During(x, harness.DelayRequest, x.load(x, x.acquire.unnamed), func() { late = harness.StartLock(x, x.ctx, x.mine()) })
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

// The request that gives something back in the background is lost just when the client of
// a semaphore is closed.
func TestCloseGivesBackWhatIsUnknown(t *testing.T) {
	eachSite(t, []requests{permitRow, numberRow}, 0, []bool{false}, func(x *site) {
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
		x.g.Keep(x, x.load(x, x.acquire.unnamed), 1, func() { w = harness.StartLock(x, x.ctx, x.mine()) })
		check(undo, w)
		h := mustLock(x, x.Context(), x.theirs()) // the only permit
		check("semaphore/leave", x.parked(x.there.unnamed))
		require.Zero(x, x.number(x, "ZCARD", wire.SemaphoreWaiting(x.name)))
		require.NoError(x, h.Unlock(x.Context()))
	})
}
