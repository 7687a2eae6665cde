package redlatchtest_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/locktest"
	"github.com/redlatch/redlatch/redlatchtest"
)

// What every lock promises is tested by TestLockerConformance, and in internal/contract, also for a Locker. The others are
// the tests of what only a Locker does.

// lockers are what the clients of a test share.
type lockers struct{ *sync.Map }

func (all lockers) Lock(name string) lock.Locker {
	l, _ := all.LoadOrStore(name, redlatchtest.NewLocker(name))
	return l.(lock.Locker)
}

func (lockers) Close() {}

func TestLockerConformance(t *testing.T) {
	all := lockers{new(sync.Map)}
	locktest.Run(t, locktest.Suite{
		NewClient: func(testing.TB) locktest.Client { return all },
		Kind:      "lock",
		Fenced:    true, Fair: true, Reentrant: true, Leased: true, Extends: true, AtLeast: true,
		Settle: 100 * time.Millisecond,
		Left: func(t testing.TB, name string) (left []string) {
			l := all.Lock(name).(*redlatchtest.Locker)
			if held, err := l.IsLocked(t.Context()); err != nil || held {
				left = append(left, "a hold")
			}
			return append(left, make([]string, l.Waiting())...)
		},
		Around: func(t *testing.T, test func(t *testing.T)) { synctest.Test(t, test) },
	})
}

func mustLock(t *testing.T, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(t.Context(), opts...)
	require.NoError(t, err)
	return h
}

// isFree fails the test unless l is free, nobody waits, and an acquisition works.
func isFree(t *testing.T, l *redlatchtest.Locker) {
	t.Helper()
	require.True(t, redlatchtest.AssertFree(t, l))
	require.Zero(t, l.Waiting())
	require.NoError(t, l.Do(t.Context(), nothing, lock.Wait(0)))
}

// waits starts n calls of Lock, one after the other, and returns when they wait.
func waits(t *testing.T, l *redlatchtest.Locker, n int) (calls []*harness.Call[lock.Hold]) {
	t.Helper()
	for range n {
		before := l.Waiting()
		calls = append(calls, harness.StartLock(t, t.Context(), l))
		synctest.Wait()
		require.Equal(t, before+1, l.Waiting())
	}
	return calls
}

func TestWaitersAcquireInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := redlatchtest.NewLocker("orders")
		h := mustLock(t, l)
		calls := waits(t, l, 3)
		elsewhere := l.HoldElsewhere() // behind them
		last := waits(t, l, 1)[0]
		calls[1].Leave()
		require.NoError(t, h.Unlock(t.Context()))
		harness.InOrder(t, calls[0], calls[2])
		synctest.Wait()
		require.True(t, last.Running())
		elsewhere()
		harness.InOrder(t, last)
		isFree(t, l)
	})
}

// A call whose context has ended before it gets the lock does not keep it.
func TestACallLeavesWhenItGetsTheLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := redlatchtest.NewLocker("orders")
		for range 20 {
			release := l.HoldElsewhere()
			call := waits(t, l, 1)[0]
			call.Cancel(nil)
			release()
			require.ErrorIs(t, call.End(), lock.ErrNotAcquired)
			isFree(t, l)
		}
	})
}

func TestHoldElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := redlatchtest.NewLocker("orders")
		release := l.HoldElsewhere()
		redlatchtest.AssertHeld(t, l)
		_, err := l.Lock(t.Context(), lock.Wait(time.Minute))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		release()
		isFree(t, l)

		h := mustLock(t, l)
		release() // has no effect any more
		waiting := l.HoldElsewhere()
		require.Equal(t, 1, l.Waiting())
		waiting()
		require.Zero(t, l.Waiting())
		require.NoError(t, h.Unlock(t.Context()))
		isFree(t, l)
	})
}

func TestLoseTheCurrentHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := redlatchtest.NewLocker("orders")
		require.False(t, l.Lose(lock.ReasonGone))
		owner, err := lock.NewOwner("8d0f8c5e-3f62-4d0f-9f0b-2b1a4a5b6c7d", 1)
		require.NoError(t, err)
		ctx := lock.WithOwner(t.Context(), owner)
		first, err := l.Lock(ctx)
		require.NoError(t, err)
		second, err := l.Lock(ctx, lock.Lease(time.Minute))
		require.NoError(t, err)
		require.Equal(t, lock.OwnerOf(first), lock.OwnerOf(second))
		require.False(t, lock.OwnerOf(first).IsZero())
		next := waits(t, l, 1)[0]

		require.True(t, l.Lose(lock.ReasonClosed))
		for _, h := range []lock.Hold{first, second} {
			var lost *lock.LostError
			require.ErrorAs(t, context.Cause(h.Context()), &lost)
			require.ErrorIs(t, lost, lock.ErrClosed)
			require.Equal(t, "orders", lost.Name)
			require.Equal(t, lock.OwnerOf(h), lost.Owner)
			require.Zero(t, h.Remaining())
			require.Equal(t, &lock.Error{Op: "release", Kind: "lock", Name: "orders", Err: lost}, h.Unlock(t.Context()))
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
		}
		harness.InOrder(t, next)
		release := l.HoldElsewhere()
		require.True(t, l.Lose(lock.ReasonGone))
		release()
		isFree(t, l)
	})
}

// The lock outlasts MaxHold, because the work under it may go on: until Unlock.
func TestUnlockAfterMaxHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := redlatchtest.NewLocker("orders")
		h := mustLock(t, l, lock.MaxHold(time.Second))
		<-h.Context().Done()
		redlatchtest.AssertHeld(t, l)
		require.False(t, l.Lose(lock.ReasonGone))
		next := waits(t, l, 1)[0]
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		harness.InOrder(t, next)
		isFree(t, l)
	})
}

func TestAtLeastKeepsTheLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := redlatchtest.NewLocker("orders")
		begin := time.Now()
		h := mustLock(t, l, lock.AtLeast(time.Minute))
		_, err := lock.Detach(t.Context(), h, time.Minute)
		require.ErrorIs(t, err, lock.ErrUnsupported)
		require.NoError(t, h.Unlock(t.Context()))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
		redlatchtest.AssertHeld(t, l)
		require.NoError(t, l.Do(t.Context(), nothing))
		require.Equal(t, time.Minute, time.Since(begin))
		isFree(t, l)
	})
}

func TestDelayLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := redlatchtest.NewLocker("orders")
		l.DelayLock(time.Second)
		begin := time.Now()
		h, err := l.TryLock(t.Context(), lock.Lease(time.Second))
		require.NoError(t, err)
		require.Equal(t, time.Second, time.Since(begin))
		require.Equal(t, time.Second, h.Remaining())
		require.NoError(t, h.Unlock(t.Context()))

		begin = time.Now()
		require.ErrorIs(t, l.Do(t.Context(), nothing, lock.Wait(time.Millisecond)), lock.ErrNotAcquired)
		boom := errors.New("boom")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Millisecond, boom)
		defer cancel()
		err = l.Do(ctx, nothing)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorIs(t, err, boom)
		require.Equal(t, 2*time.Millisecond, time.Since(begin))
		l.DelayLock(0)
		isFree(t, l)
		require.Equal(t, 2*time.Millisecond, time.Since(begin))
	})
}

func TestFailLock(t *testing.T) {
	l, boom := redlatchtest.NewLocker("orders"), errors.New("boom")
	l.FailLock(lock.ErrUnavailable, nil)
	l.FailLock(boom)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	var none context.Context
	require.ErrorIs(t, l.Do(ended, nothing), lock.ErrNotAcquired)
	require.ErrorIs(t, l.Do(none, nothing), lock.ErrInvalid)
	require.ErrorIs(t, l.Do(t.Context(), nothing, lock.Lease(0)), lock.ErrInvalid)

	_, err := l.Lock(t.Context())
	require.Equal(t, &lock.Error{Op: "acquire", Kind: "lock", Name: "orders", Err: lock.ErrUnavailable}, err)
	redlatchtest.AssertFree(t, l)
	h := mustLock(t, l)
	_, err = l.TryLock(t.Context())
	require.ErrorIs(t, err, boom)
	own := &lock.Error{Op: "acquire", Kind: "fair", Name: "stock", Err: lock.ErrNotAcquired}
	l.FailLock(own)
	_, err = l.TryLock(t.Context())
	require.Same(t, own, err)
	_, err = l.TryLock(t.Context())
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	require.NoError(t, h.Unlock(t.Context()))
	isFree(t, l)
}

func TestFailUnlock(t *testing.T) {
	l := redlatchtest.NewLocker("orders")
	h := mustLock(t, l)
	l.FailUnlock(lock.ErrIndeterminate)
	lost := mustLock(t, redlatchtest.NewLocker("others"), lock.Lease(time.Millisecond))
	<-lost.Context().Done()
	require.ErrorIs(t, lost.Unlock(t.Context()), lock.ErrLost)
	require.Equal(t, &lock.Error{Op: "release", Kind: "lock", Name: "orders", Err: lock.ErrIndeterminate}, h.Unlock(t.Context()))
	require.Equal(t, context.Canceled, context.Cause(h.Context()))
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
	isFree(t, l)

	l.FailUnlock(nil, lock.ErrUnavailable)
	require.NoError(t, l.Do(t.Context(), nothing))
	h = mustLock(t, l)
	l.Lose(lock.ReasonGone)
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost) // and leaves the error to the next
	var both *lock.DoError
	require.ErrorAs(t, l.Do(t.Context(), nothing), &both)
	require.ErrorIs(t, both.Unlock, lock.ErrUnavailable)
	isFree(t, l)
}

func TestTokensRise(t *testing.T) {
	l := redlatchtest.NewLocker("orders")
	for _, want := range []int64{1, 3} {
		h := mustLock(t, l)
		require.Equal(t, want, h.Token())
		require.NoError(t, h.Unlock(t.Context()))
		l.HoldElsewhere()()
	}
}

func TestExtendWhatEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := redlatchtest.NewLocker("orders")
		h := mustLock(t, l, lock.Lease(time.Second))
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		err := h.Extend(ended, time.Hour)
		require.ErrorIs(t, err, lock.ErrUnavailable)
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, time.Second, h.Remaining())
		require.NoError(t, h.Extend(t.Context(), time.Minute))
		begin := time.Now()
		<-h.Context().Done()
		require.Equal(t, time.Minute, time.Since(begin))
		isFree(t, l)

		h = mustLock(t, l, lock.MaxHold(time.Minute))
		require.Equal(t, 30*time.Second, h.Remaining())
		require.NoError(t, h.Extend(t.Context(), time.Hour))
		require.Equal(t, time.Minute, h.Remaining())
		require.NoError(t, h.Unlock(t.Context()))
		isFree(t, l)
	})
}

// A hold that the caller drops is a bug that AssertFree finds.
func TestADroppedHoldStaysHeld(t *testing.T) {
	l := redlatchtest.NewLocker("orders")
	_ = mustLock(t, l)
	for range 3 {
		runtime.GC()
	}
	redlatchtest.AssertHeld(t, l)
}

// recorder is a testing.TB that notes failures.
type recorder struct {
	testing.TB
	failures []string
}

func (*recorder) Helper() {}

func (r *recorder) Errorf(format string, _ ...any) { r.failures = append(r.failures, format) }

func (r *recorder) Fatal(args ...any) {
	r.failures = append(r.failures, fmt.Sprint(args...))
	runtime.Goexit()
}

// failed fails the test unless an assertion does.
func failed(t *testing.T, assertion func(tb testing.TB) bool, text string) {
	t.Helper()
	r := &recorder{TB: t}
	passed := false
	var end sync.WaitGroup
	end.Go(func() { passed = assertion(r) }) // which may end its goroutine
	end.Wait()
	require.False(t, passed)
	require.Len(t, r.failures, 1)
	require.Contains(t, r.failures[0], text)
}

func TestLoseNeedsAHold(t *testing.T) {
	lose := func(ctx context.Context) func(tb testing.TB) bool {
		return func(tb testing.TB) bool { return redlatchtest.Lose(tb, ctx, lock.ReasonGone) }
	}
	var none context.Context
	failed(t, lose(t.Context()), "does not come from a hold")
	failed(t, lose(none), "does not come from a hold")
	client := redlatchtest.NewClient(t, redlatchtest.NewEmbedded(t))
	for _, l := range []lock.Locker{
		redlatchtest.NewLocker("orders"), client.Lock("orders"), client.RWLock("catalogue").Read(),
		client.MultiLock(client.Lock("orders"), client.FairLock("queue")), client.RedLock([]lock.Locker{client.Lock("orders")}),
	} {
		outer := mustLock(t, l)
		inner := redlatchtest.NewLocker("inner")
		require.NoError(t, outer.Context().Err())
		err := inner.Do(outer.Context(), func(ctx context.Context) error {
			assert.True(t, redlatchtest.Lose(t, context.WithValue(ctx, &inner, 1), lock.ReasonGone))
			assert.ErrorIs(t, context.Cause(ctx), lock.ErrLost)
			return nil
		})
		require.ErrorIs(t, err, lock.ErrLost)
		require.NoError(t, outer.Context().Err(), "the innermost alone")
		require.NoError(t, outer.Unlock(t.Context()))
		failed(t, lose(outer.Context()), "ended")
		require.ErrorIs(t, outer.Unlock(t.Context()), lock.ErrNotHeld)
	}
	printers := client.PermitSemaphore("printers")
	_, err := printers.TrySetPermits(t.Context(), 1)
	require.NoError(t, err)
	permit, err := printers.Acquire(t.Context(), 1)
	require.NoError(t, err)
	require.NoError(t, permit.Release(t.Context()))
	failed(t, lose(permit.Context()), "ended")
	require.ErrorIs(t, printers.Do(t.Context(), func(ctx context.Context) error {
		assert.True(t, redlatchtest.Lose(t, ctx, lock.ReasonGone))
		assert.ErrorIs(t, context.Cause(ctx), lock.ErrLost)
		return nil
	}), lock.ErrLost)
}

func TestAssertions(t *testing.T) {
	client := redlatchtest.NewClient(t, redlatchtest.NewEmbedded(t))
	type wrapped struct{ lock.Locker }
	for name, l := range map[string]lock.Locker{
		"memory": redlatchtest.NewLocker("orders"), "lock": client.Lock("orders"), "wrapped": wrapped{client.Lock("orders")},
		"fair": client.FairLock("queue"), "read": client.RWLock("catalogue").Read(), "write": client.RWLock("catalogue").Write(),
		"multi": client.MultiLock(client.Lock("a"), client.Lock("b")), "red": client.RedLock([]lock.Locker{client.Lock("orders")}),
	} {
		free := func(tb testing.TB) bool { return redlatchtest.AssertFree(tb, l) }
		held := func(tb testing.TB) bool { return redlatchtest.AssertHeld(tb, l) }
		require.True(t, free(t), name)
		failed(t, held, "")
		h := mustLock(t, l)
		require.True(t, held(t), name)
		failed(t, free, "")
		require.NoError(t, h.Unlock(t.Context()))
		require.True(t, free(t), name)
	}
	failed(t, func(tb testing.TB) bool { return redlatchtest.AssertFree(tb, nil) }, "nil")
	failed(t, func(tb testing.TB) bool { return redlatchtest.AssertHeld(tb, redlatchtest.NewLocker("")) }, "cannot tell")
	client.Close()
	failed(t, func(tb testing.TB) bool { return redlatchtest.AssertFree(tb, client.Lock("orders")) }, "cannot tell")
	failed(t, func(tb testing.TB) bool {
		return redlatchtest.AssertHeld(tb, client.MultiLock(client.Lock("orders")))
	}, "cannot tell")
	var none context.Context
	_, err := redlatchtest.NewLocker("orders").IsLocked(none)
	require.ErrorIs(t, err, lock.ErrInvalid)
}
