package redlatch_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

// What all locks promise is tested here, for every kind; what only one does, in its
// package.

type lockOf func(c *redlatch.Client, name string) harness.Lock

// kind is a kind of lock.
type kind struct {
	name string
	of   lockOf
	// rival is of a lock that no other owner can have meanwhile.
	rival  lockOf
	shared bool // but of this kind others can
	once   bool // an owner cannot hold it more than once
	// stored is the command that stores a lock that somebody holds.
	stored []string
}

// kindOf returns a kind of lock that is a hash of owners, of which one holds it.
func kindOf(name string, once bool, of lockOf) kind {
	return kind{name: name, of: of, rival: of, once: once, stored: []string{"HSET", "orders", "somebody", "1"}}
}

func reading(c *redlatch.Client, name string) harness.Lock { return c.RWLock(name).Read() }
func writing(c *redlatch.Client, name string) harness.Lock { return c.RWLock(name).Write() }
func plain(c *redlatch.Client, name string) harness.Lock   { return c.PlainLock(name) }

var kinds = []kind{
	kindOf("lock", false, func(c *redlatch.Client, name string) harness.Lock { return c.Lock(name) }),
	kindOf("non-reentrant", true, func(c *redlatch.Client, name string) harness.Lock { return c.Lock(name, rlock.NonReentrant()) }),
	kindOf("fenced", false, func(c *redlatch.Client, name string) harness.Lock { return c.FencedLock(name) }),
	kindOf("spin", false, func(c *redlatch.Client, name string) harness.Lock { return c.SpinLock(name) }),
	kindOf("fair", false, func(c *redlatch.Client, name string) harness.Lock { return c.FairLock(name) }),
	kindOf("non-reentrant fair", true, func(c *redlatch.Client, name string) harness.Lock {
		return c.FairLock(name, fairlock.NonReentrant())
	}),
	{name: "read", of: reading, rival: writing, shared: true, stored: []string{"HSET", "orders", "mode", "read", "somebody", "1"}},
	{name: "write", of: writing, rival: writing, stored: []string{"HSET", "orders", "mode", "write", "somebody:write", "1"}},
	{name: "plain", of: plain, rival: plain, once: true, stored: []string{"SET", "orders", "somebody"}},
}

// eachKind runs a test for every kind that is asked for, on every server. The test
// uses the name orders and leaves nothing on the server.
func eachKind(t *testing.T, wanted func(kind) bool, test func(t *testing.T, s *testserver.Server, k kind)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, k := range kinds {
			if !wanted(k) {
				continue
			}
			t.Run(k.name, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				test(t, s, k)
				harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{orders}") // which outlives a fenced lock
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

func all(kind) bool         { return true }
func reentrant(k kind) bool { return !k.once }
func alone(k kind) bool     { return !k.shared }

// owners are contexts of an owner made for each acquisition and of one with a name.
func owners(t *testing.T, c *redlatch.Client) map[string]context.Context {
	return map[string]context.Context{"unnamed": t.Context(), "named": lock.WithOwner(t.Context(), c.NewOwner())}
}

func mustLock(t *testing.T, ctx context.Context, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(ctx, opts...)
	require.NoError(t, err)
	return h
}

// isTaken fails the test unless an attempt of a new owner finds the lock taken.
func isTaken(t *testing.T, l lock.Locker) {
	t.Helper()
	_, err := l.TryLock(t.Context())
	require.ErrorIs(t, err, lock.ErrNotAcquired)
}

// waits takes a lock in the background and gives it back. It returns when that has
// to wait.
func waits(t *testing.T, l lock.Locker) <-chan error {
	t.Helper()
	before := harness.GoroutinesIn("(*Waiter).wait")
	done := make(chan error, 1)
	go func() { done <- l.Do(context.Background(), nothing) }()
	harness.Eventually(t, 5*time.Second, "it waits", func() bool { return harness.GoroutinesIn("(*Waiter).wait") > before })
	return done
}

// getsIn fails the test unless a waiter has the lock well before it looks again
// without a reason.
func getsIn(t *testing.T, waiter <-chan error) {
	t.Helper()
	select {
	case err := <-waiter:
		require.NoError(t, err)
	case <-time.After(3 * time.Second):
		require.FailNow(t, "the waiter was not told")
	}
}

func TestLockedWhileItIsHeld(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		l := k.of(c, "orders")
		require.Equal(t, "orders", l.Name())
		for range 3 {
			for _, c := range []*redlatch.Client{c, other} {
				require.False(t, harness.IsLocked(t, k.of(c, "orders")))
			}
			h := mustLock(t, t.Context(), l)
			require.Equal(t, "orders", h.Name())
			require.Equal(t, k.name == "fenced", h.Token() > 0)
			for _, c := range []*redlatch.Client{c, other} {
				require.True(t, harness.IsLocked(t, k.of(c, "orders")))
				require.Equal(t, 1, harness.HoldCount(t, k.of(c, "orders"), h.Owner()))
			}
			require.NoError(t, h.Unlock(t.Context()))
			require.Zero(t, harness.HoldCount(t, l, h.Owner()))
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
			require.Equal(t, context.Canceled, context.Cause(h.Context()))
		}
		require.False(t, harness.IsLocked(t, l))
	})
}

func TestTheHoldIsOfNobodyElse(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		h := mustLock(t, t.Context(), k.of(c, "orders"))
		for _, from := range []*redlatch.Client{c, other} {
			for _, stranger := range []lock.Owner{c.NewOwner(), other.NewOwner()} {
				require.Zero(t, harness.HoldCount(t, k.of(from, "orders"), stranger))
				require.ErrorIs(t, k.of(from, "orders").Unlock(lock.WithOwner(t.Context(), stranger)), lock.ErrNotHeld)
			}
			require.True(t, harness.IsLocked(t, k.of(from, "orders")))
			isTaken(t, k.rival(from, "orders"))
			require.Equal(t, 1, harness.HoldCount(t, k.of(from, "orders"), h.Owner()))
		}
		require.NoError(t, h.Unlock(t.Context()))
	})
}

func TestReentryIsCounted(t *testing.T) {
	eachKind(t, reentrant, func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		l, o := k.of(c, "orders"), c.NewOwner()
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
	eachKind(t, func(k kind) bool { return k.once }, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l, o := k.of(c, "orders"), c.NewOwner()
		ctx := lock.WithOwner(t.Context(), o)
		h := mustLock(t, ctx, l)
		for _, l := range []harness.Lock{l, k.of(c, "orders")} {
			begin := time.Now()
			_, err := l.TryLock(ctx)
			require.ErrorIs(t, err, lock.ErrReentered)
			_, err = l.Lock(ctx)
			require.ErrorIs(t, err, lock.ErrReentered)
			_, err = l.Lock(ctx, lock.Wait(time.Minute))
			require.ErrorIs(t, err, lock.ErrReentered)
			require.Less(t, time.Since(begin), 10*time.Second)
			require.Equal(t, 1, harness.HoldCount(t, l, o))
		}
		require.NoError(t, h.Unlock(ctx)) // one is enough
		require.False(t, harness.IsLocked(t, l))
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

func TestUnlockByOwnerInAnotherProcess(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		here, there := harness.Client(t, s), harness.Client(t, s)
		for name, ctx := range owners(t, here) {
			h := mustLock(t, ctx, k.of(here, "orders"), lock.Lease(time.Minute))
			w := waits(t, k.rival(harness.Client(t, s), "orders"))
			o, err := lock.ParseOwner(h.Owner().String())
			require.NoError(t, err)
			require.NoError(t, k.of(there, "orders").Unlock(lock.WithOwner(t.Context(), o)), name)
			getsIn(t, w)
			require.False(t, harness.IsLocked(t, k.of(here, "orders")))
			var lost *lock.LostError
			require.ErrorAs(t, h.Unlock(t.Context()), &lost)
			require.Equal(t, lock.ReasonGone, lost.Reason)
		}
	})
}

func TestUnlockByOwnerEndsTheLatestHoldOfThisProcess(t *testing.T) {
	eachKind(t, reentrant, func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		l := k.of(c, "orders")
		for name, ctx := range owners(t, c) {
			h1 := mustLock(t, ctx, l)
			ctx = lock.WithOwner(t.Context(), h1.Owner())
			h2 := mustLock(t, ctx, l)
			require.NoError(t, l.Unlock(ctx), name)
			require.ErrorIs(t, context.Cause(h2.Context()), context.Canceled)
			require.ErrorIs(t, h2.Unlock(ctx), lock.ErrNotHeld)
			require.NoError(t, h1.Context().Err())
			require.Equal(t, 1, harness.HoldCount(t, k.of(other, "orders"), h1.Owner()))
			require.NoError(t, l.Unlock(ctx))
			require.ErrorIs(t, l.Unlock(ctx), lock.ErrNotHeld)
			require.ErrorIs(t, h1.Unlock(ctx), lock.ErrNotHeld)
		}
	})
}

// An owner made for one acquisition can be taken over as a name. Its first hold
// then shares the lock and must not take the second one's share with it, nor pass
// the lock on.
func TestAnOwnerUsedAgainIsCounted(t *testing.T) {
	eachKind(t, reentrant, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l := k.of(c, "orders")
		for _, first := range []int{0, 1} {
			h := mustLock(t, t.Context(), l)
			w := waits(t, k.rival(c, "orders"))
			holds := []lock.Hold{h, mustLock(t, lock.WithOwner(t.Context(), h.Owner()), l)}
			require.Equal(t, 2, harness.HoldCount(t, l, h.Owner()))
			require.NoError(t, holds[first].Unlock(t.Context()))
			require.Equal(t, 1, harness.HoldCount(t, l, h.Owner()))
			isTaken(t, k.rival(c, "orders"))
			require.Empty(t, w)
			require.NoError(t, holds[1-first].Unlock(t.Context()))
			getsIn(t, w)
		}
	})
}

func TestTTL(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		l := k.of(harness.Client(t, s), "orders")
		ttl := func() time.Duration {
			ttl, err := l.TTL(t.Context())
			require.NoError(t, err)
			return ttl
		}
		h := mustLock(t, t.Context(), l, lock.Lease(time.Hour))
		require.InDelta(t, time.Hour, ttl(), float64(time.Second))
		require.LessOrEqual(t, ttl(), time.Hour)
		require.NoError(t, h.Unlock(t.Context()))
		require.Zero(t, ttl())
		h = mustLock(t, t.Context(), l)
		require.InDelta(t, redlatch.DefaultWatchdogTimeout, ttl(), float64(time.Second))
		require.NoError(t, h.Unlock(t.Context()))
	})
}

func TestAKeyWithoutExpiryIsNotMistakenForSuccess(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		harness.Do(t, s.Addr, k.stored...)
		isTaken(t, k.rival(c, "orders"))
		_, err := k.rival(c, "orders").Lock(t.Context(), lock.Wait(50*time.Millisecond))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		ttl, err := k.of(c, "orders").TTL(t.Context())
		require.NoError(t, err)
		require.Equal(t, lock.NoExpiry, ttl)
		forced, err := k.of(c, "orders").ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
	})
}

// The owner whose lease is over does not get away with its late Unlock.
func TestAWaiterGetsInWhenTheLeaseIsOver(t *testing.T) {
	const (
		lease = 500 * time.Millisecond
		slack = 2500 * time.Millisecond // less than until the safety poll
	)
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		for _, waiting := range []*redlatch.Client{c, harness.Client(t, s)} {
			begin := time.Now()
			h1 := mustLock(t, t.Context(), k.of(c, "orders"), lock.Lease(lease))
			h2 := mustLock(t, t.Context(), k.rival(waiting, "orders"))
			waited := time.Since(begin)
			require.GreaterOrEqual(t, waited, lease-5*time.Millisecond)
			require.Less(t, waited, lease+slack)
			harness.Eventually(t, time.Second, "the first hold knows", func() bool { return h1.Context().Err() != nil })
			require.ErrorIs(t, context.Cause(h1.Context()), lock.ErrLost)
			require.Zero(t, h1.Remaining())
			require.ErrorIs(t, h1.Unlock(t.Context()), lock.ErrLost)
			require.Equal(t, 1, harness.HoldCount(t, k.rival(c, "orders"), h2.Owner()))
			require.NoError(t, h2.Unlock(t.Context()))
		}
	})
}

func TestWaitIsBounded(t *testing.T) {
	const wait = 300 * time.Millisecond
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		h := mustLock(t, t.Context(), k.of(c, "orders"))
		keys := harness.Do(t, s.Addr, "DBSIZE")
		for _, waiting := range []*redlatch.Client{c, harness.Client(t, s)} {
			l := k.rival(waiting, "orders")
			begin := time.Now()
			_, err := l.Lock(t.Context(), lock.Wait(wait))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.NotErrorIs(t, err, lock.ErrIndeterminate)
			require.GreaterOrEqual(t, time.Since(begin), wait)
			require.Less(t, time.Since(begin), wait+2500*time.Millisecond)

			_, err = l.Lock(t.Context(), lock.Wait(0))
			require.ErrorIs(t, err, lock.ErrNotAcquired)

			boom := errors.New("boom")
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(50*time.Millisecond, func() { cancel(boom) })
			_, err = l.Lock(ctx)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.ErrorIs(t, err, boom)
			_, err = l.Lock(ctx)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.ErrorIs(t, err, boom)
			harness.Eventually(t, 10*time.Second, "nothing of a waiter is left", func() bool { return harness.Do(t, s.Addr, "DBSIZE") == keys })
		}
		require.NoError(t, h.Unlock(t.Context()))
	})
}

func TestForceUnlock(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l := k.of(c, "orders")
		forced, err := l.ForceUnlock(t.Context())
		require.NoError(t, err)
		require.False(t, forced)
		for _, waiting := range []*redlatch.Client{c, harness.Client(t, s)} {
			h := mustLock(t, t.Context(), l)
			w := waits(t, k.rival(waiting, "orders"))
			forced, err = l.ForceUnlock(t.Context())
			require.NoError(t, err)
			require.True(t, forced)
			require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
			getsIn(t, w)
			require.False(t, harness.IsLocked(t, l))
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
	})
}

func TestBadInputIsAnErrorOfTheCall(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		c, gone := harness.Client(t, s), harness.Client(t, s)
		gone.Close()
		var none context.Context
		for name, bad := range map[string]struct {
			l    harness.Lock
			ctx  context.Context
			want error
		}{
			"no name":       {k.of(c, ""), t.Context(), lock.ErrInvalid},
			"open brace":    {k.of(c, "a{b"), t.Context(), lock.ErrInvalid},
			"empty braces":  {k.of(c, "a{}b"), t.Context(), lock.ErrInvalid},
			"early brace":   {k.of(c, "x}y"), t.Context(), lock.ErrInvalid},
			"first a brace": {k.of(c, "}a"), t.Context(), lock.ErrInvalid},
			"no context":    {k.of(c, "orders"), none, lock.ErrInvalid},
			"closed client": {k.of(gone, "orders"), t.Context(), lock.ErrClosed},
		} {
			owned := bad.ctx
			if owned != nil {
				owned = lock.WithOwner(owned, c.NewOwner())
			}
			for what, do := range map[string]func() error{
				"Lock":        func() error { return second(bad.l.Lock(bad.ctx)) },
				"Lock, named": func() error { return second(bad.l.Lock(owned)) },
				"TryLock":     func() error { return second(bad.l.TryLock(bad.ctx)) },
				"Do":          func() error { return bad.l.Do(bad.ctx, nothing) },
				"Unlock":      func() error { return bad.l.Unlock(owned) },
				"ForceUnlock": func() error { return second(bad.l.ForceUnlock(bad.ctx)) },
				"IsLocked":    func() error { return second(bad.l.IsLocked(bad.ctx)) },
				"TTL":         func() error { return second(bad.l.TTL(bad.ctx)) },
				"HoldCount":   func() error { return second(bad.l.HoldCount(bad.ctx, c.NewOwner())) },
				"IsHeldBy":    func() error { return second(bad.l.IsHeldBy(bad.ctx, c.NewOwner())) },
			} {
				require.ErrorIs(t, do(), bad.want, "%s: %s", name, what)
			}
		}

		l := k.of(c, "orders")
		for _, opts := range [][]lock.Option{
			{lock.Lease(0)}, {lock.Lease(-time.Second)}, {lock.Lease(time.Microsecond)}, {lock.Lease(lock.MaxLease + 1)},
			{lock.Wait(-1)}, {lock.MaxHold(0)}, {lock.MaxHold(-1)}, {{}},
			{lock.Lease(time.Second), lock.MaxHold(time.Second)},
		} {
			require.ErrorIs(t, second(l.Lock(t.Context(), opts...)), lock.ErrInvalid, "%v", opts)
		}
		require.ErrorIs(t, second(l.TryLock(t.Context(), lock.Wait(time.Second))), lock.ErrInvalid)
		require.ErrorIs(t, l.Unlock(t.Context()), lock.ErrInvalid, "nobody is named")
		require.ErrorIs(t, second(l.HoldCount(t.Context(), lock.Owner{})), lock.ErrInvalid)
		require.ErrorIs(t, l.Do(t.Context(), nil), lock.ErrInvalid)
		ended, cancel := context.WithCancelCause(t.Context())
		boom := errors.New("boom")
		cancel(boom)
		err := second(l.Lock(ended))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorIs(t, err, boom)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
		require.NoError(t, k.of(c, "{orders}").Do(t.Context(), nothing))
	})
}

func TestDo(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		l := k.of(harness.Client(t, s), "orders")
		boom := errors.New("boom")
		require.NoError(t, l.Do(t.Context(), func(ctx context.Context) error {
			require.True(t, harness.IsLocked(t, l))
			return ctx.Err()
		}))
		require.ErrorIs(t, l.Do(t.Context(), func(context.Context) error { return boom }), boom)
		require.False(t, harness.IsLocked(t, l))
		require.PanicsWithValue(t, "boom", func() {
			_ = l.Do(t.Context(), func(context.Context) error { panic("boom") })
		})
		require.False(t, harness.IsLocked(t, l))

		// A loss while fn ran is joined to what fn returned.
		err := l.Do(t.Context(), func(context.Context) error {
			harness.Do(t, s.Addr, "FLUSHALL")
			return boom
		})
		require.ErrorIs(t, err, boom)
		require.ErrorIs(t, err, lock.ErrLost)
	})
}

func TestHoldContext(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		l := k.of(harness.Client(t, s), "orders")
		type key struct{}
		parent, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
		defer cancel()

		h := mustLock(t, parent, l)
		require.Equal(t, "value", h.Context().Value(key{}))
		require.Same(t, h.Context(), h.Context())
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(parent))
		require.Equal(t, context.Canceled, context.Cause(h.Context()))

		// The end of the parent ends the context, not the hold; Unlock still works.
		h = mustLock(t, parent, l)
		cancel()
		require.Error(t, h.Context().Err())
		require.Greater(t, h.Remaining(), 20*time.Second)
		require.True(t, harness.IsLocked(t, l))
		require.NoError(t, h.Unlock(parent))
		require.False(t, harness.IsLocked(t, l))
		require.ErrorIs(t, h.Unlock(parent), lock.ErrNotHeld)
		require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrNotHeld)
	})
}

func TestExtend(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l := k.of(c, "orders")
		for _, ctx := range owners(t, c) {
			h := mustLock(t, ctx, l, lock.Lease(time.Second))
			require.LessOrEqual(t, h.Remaining(), time.Second)
			for _, lease := range []time.Duration{time.Minute, time.Second} { // at least, not at most
				require.NoError(t, h.Extend(t.Context(), lease))
				require.Greater(t, h.Remaining(), 50*time.Second)
				require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(50_000))
				require.LessOrEqual(t, harness.PTTL(t, s.Addr, "orders"), int64(60_000))
			}
			require.ErrorIs(t, h.Extend(t.Context(), 0), lock.ErrInvalid)
			require.ErrorIs(t, h.Extend(t.Context(), -time.Second), lock.ErrInvalid)
			var none context.Context
			require.ErrorIs(t, h.Extend(none, time.Second), lock.ErrInvalid)
			require.ErrorIs(t, h.Unlock(none), lock.ErrInvalid)
			require.NoError(t, h.Unlock(t.Context()))
			require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrNotHeld)

			h = mustLock(t, ctx, l)
			harness.Do(t, s.Addr, "FLUSHALL")
			require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
			require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
	})
}

// What ends a hold is its time, not when somebody notices.
func TestAHoldWhoseTimeIsOverIsLostAtOnce(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		for what, end := range map[string]func(lock.Hold) error{
			"Unlock": func(h lock.Hold) error { return h.Unlock(context.Background()) },
			"Extend": func(h lock.Hold) error { return h.Extend(context.Background(), time.Second) },
		} {
			for range 2 {
				h := mustLock(t, t.Context(), k.of(c, "orders"), lock.Lease(250*time.Millisecond))
				for h.Remaining() > 0 {
					runtime.Gosched()
				}
				require.ErrorIs(t, end(h), lock.ErrLost, what)
				require.Error(t, h.Context().Err())
			}
		}
	})
}

func TestMaxHold(t *testing.T) {
	const (
		timeout = time.Second
		most    = 1500 * time.Millisecond
		slack   = 2500 * time.Millisecond
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), harness.Client(t, s)
		var kindsEnd sync.WaitGroup
		for _, k := range kinds {
			kindsEnd.Go(func() {
				begin := time.Now()
				h, err := k.of(c, k.name).Lock(t.Context(), lock.MaxHold(most))
				if !assert.NoError(t, err, k.name) {
					return
				}
				next := make(chan error, 1)
				go func() { next <- k.rival(other, k.name).Do(context.Background(), nothing) }()
				<-h.Context().Done()
				assert.GreaterOrEqual(t, time.Since(begin), most-10*time.Millisecond, k.name)
				var lost *lock.LostError
				if assert.ErrorAs(t, context.Cause(h.Context()), &lost) {
					assert.Equal(t, lock.ReasonMaxHold, lost.Reason)
					assert.Equal(t, k.name, lost.Name)
					assert.Equal(t, h.Owner(), lost.Owner)
				}
				assert.NoError(t, <-next, k.name) // when the last lease is over
				assert.Less(t, time.Since(begin), most+timeout+slack, k.name)
				assert.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost, k.name)
			})
		}
		kindsEnd.Wait()
		harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{fenced}")
		harness.NothingLeft(t, s.Addr)
	})
}

// Also two goroutines with one lock and one context never hold it together.
func TestManyExcludeEachOther(t *testing.T) {
	for _, m := range []struct{ clients, goroutines, passes int }{{1, 15, 20}, {50, 1, 2}, {8, 2, 25}} {
		t.Run(fmt.Sprintf("%d clients, %d goroutines", m.clients, m.goroutines), func(t *testing.T) {
			eachKind(t, alone, func(t *testing.T, s *testserver.Server, k kind) {
				counter := 0 // protected by the lock alone
				var inside atomic.Int32
				var wg sync.WaitGroup
				for range m.clients {
					l := k.of(harness.Client(t, s), "orders")
					for range m.goroutines {
						wg.Go(func() {
							for range m.passes {
								assert.NoError(t, l.Do(t.Context(), func(context.Context) error {
									assert.Equal(t, int32(1), inside.Add(1))
									counter++
									inside.Add(-1)
									return nil
								}))
							}
						})
					}
				}
				wg.Wait()
				require.Equal(t, m.clients*m.goroutines*m.passes, counter)
				require.False(t, harness.IsLocked(t, k.of(harness.Client(t, s), "orders")))
			})
		})
	}
}
