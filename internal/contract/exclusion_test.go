package contract_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// room is what an object guards. It notices if somebody is inside beside whom nobody, or
// nobody of another kind, may be.
type room struct {
	k       kind
	inside  atomic.Int32
	entries atomic.Int32
	writes  int          // protected by the object alone: by its rival
	written atomic.Int32 // the same
}

const writer = 1 << 16

// enter goes in and out under a hold.
func (r *room) enter(t testing.TB, rival bool) {
	me := int32(1)
	if rival || !r.k.shared {
		me = writer
		r.writes++
		r.written.Add(1)
	}
	if now := r.inside.Add(me); me == writer {
		assert.Equal(t, int32(writer), now, "somebody else is inside")
	} else {
		assert.Less(t, now, int32(writer), "a writer is inside")
	}
	r.entries.Add(1)
	r.inside.Add(-me)
}

// pass waits for the object and goes in and out.
func (r *room) pass(t testing.TB, l lock.Locker, rival bool) error {
	return l.Do(context.Background(), func(context.Context) error {
		r.enter(t, rival)
		return nil
	})
}

// Both clients find it held, by its owner and nobody else, who cannot unlock it either.
func TestLockedWhileItIsHeld(t *testing.T) {
	eachKind(t, andInMemory(all), func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		l := k.of(c, "orders")
		require.Contains(t, l.Name(), "orders")
		holds := func(owner lock.Owner, n int) {
			t.Helper()
			for _, from := range []*redlatch.Client{c, other} {
				if k.owned {
					seen := k.lock(from, "orders")
					for _, another := range []lock.Owner{c.NewOwner(), other.NewOwner()} {
						require.Zero(t, harness.HoldCount(t, seen, another))
						require.ErrorIs(t, seen.UnlockOwner(lock.WithOwner(t.Context(), another)), lock.ErrNotHeld)
					}
					require.Equal(t, n > 0, harness.IsLocked(t, seen))
					require.Equal(t, n, harness.HoldCount(t, seen, owner))
				}
				if n > 0 {
					isTaken(t, k.rival(from, "orders"))
				}
			}
		}
		for range 2 {
			h := mustLock(t, t.Context(), l)
			var owner lock.Owner
			if k.leased {
				owner = lock.OwnerOf(h)
				require.Equal(t, k.tokens, h.Token() > 0)
			}
			require.Equal(t, l.Name(), h.Name())
			holds(owner, 1)
			require.NoError(t, h.Unlock(t.Context()))
			holds(owner, 0)
			if k.leased {
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
				require.Equal(t, context.Canceled, context.Cause(h.Context()))
			}
		}
		// What one finds taken, another finds free as soon as it is.
		require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing))
	})
}

// Also two goroutines with one Locker and one context never hold it together. With several names callers
// have little patience, but for the first, which gets in every time.
func TestManyExcludeEachOther(t *testing.T) {
	type crowd struct{ clients, goroutines, passes, names int }
	crowds := []crowd{{1, 15, 20, 1}, {50, 1, 2, 1}, {8, 2, 25, 1}, {1, 20, 500, 50}}
	if testing.Short() {
		crowds = []crowd{{2, 4, 6, 1}, {1, 10, 15, 5}}
	}
	eachKind(t, andInMemory(all), func(t *testing.T, s *testserver.Server, k kind) {
		for _, m := range crowds {
			rooms := make([]room, m.names)
			var names []string
			for i := range rooms {
				rooms[i].k = k
				names = append(names, fmt.Sprint("orders-", i))
			}
			k.prepare(t, s.Addr, names...)
			var clients []*redlatch.Client
			var wg sync.WaitGroup
			for range m.clients {
				c := harness.Client(t, s)
				clients = append(clients, c)
				for g := range m.goroutines {
					of, rival, patient, opts := k.of, k.shared && g%3 == 0, m.names == 1 || g == 0, []lock.Option(nil)
					if rival {
						of = k.rival
					}
					if !patient {
						opts = []lock.Option{lock.Wait(time.Duration(g%10) * time.Millisecond)}
					}
					wg.Go(func() {
						for i := range m.passes {
							err := of(c, names[i%m.names]).Do(t.Context(), func(context.Context) error {
								rooms[i%m.names].enter(t, rival)
								return nil
							}, opts...)
							// On a busy machine the server may be silent for a moment.
							over := errors.Is(err, lock.ErrNotAcquired) || errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate)
							if patient || !over {
								assert.NoError(t, err)
							}
						}
					})
				}
			}
			wg.Wait()
			if m.names > 1 { // what the impatient have left is undone in the background
				harness.Idle(t, clients...)
			}
			for i := range rooms {
				entries := int(rooms[i].entries.Load())
				require.GreaterOrEqual(t, entries, m.passes/m.names, "%v", m)
				require.True(t, m.names > 1 || entries == m.clients*m.goroutines*m.passes, "%v: %d", m, entries)
				require.Equal(t, int(rooms[i].written.Load()), rooms[i].writes, "%v", m)
				require.NoError(t, k.of(clients[0], names[i]).Do(t.Context(), nothing, lock.Wait(0)), "free at once")
			}
			harness.Idle(t, clients...)
			noListeners(t, clients...)
			k.unmake(t, s.Addr, names...)
		}
	})
}

// noListeners verifies that clients that do not use their objects any more soon listen to nothing.
func noListeners(t *testing.T, clients ...*redlatch.Client) {
	t.Helper()
	for _, c := range clients {
		harness.Eventually(t, 3*hub.DefaultKeepWarm, "nobody listens", func() bool { return c.Stats().PubSub.Listeners == 0 })
	}
}

func TestWaitIsBounded(t *testing.T) {
	const wait = 300 * time.Millisecond
	eachVirtually(t, andInMemory(all), func(t *testing.T, s *harness.VirtualServer, k kind) {
		c := s.Client(t)
		for _, roles := range k.roles() {
			h := mustLock(t, t.Context(), roles.held(c, "orders"))
			keys := len(s.Keys())
			for _, waiting := range []*redlatch.Client{c, s.Client(t)} {
				l := roles.waits(waiting, "orders")
				begin := time.Now()
				_, err := l.Lock(t.Context(), lock.Wait(wait))
				harness.NotAcquired(t, err)
				require.ErrorIs(t, err, lock.ErrNotAcquired)
				require.GreaterOrEqual(t, time.Since(begin), wait)
				require.Less(t, time.Since(begin), wait+100*time.Millisecond)
				require.ErrorIs(t, only(l.Lock(t.Context(), lock.Wait(0))), lock.ErrNotAcquired)
				if k.name != "latch" {
					fails(t, l, lock.ErrNotAcquired)
				}

				boom := errors.New("boom")
				ctx, cancel := context.WithCancelCause(t.Context())
				done := async(func() error { return only(l.Lock(ctx)) })
				harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(1, waiting) })
				cancel(boom)
				for _, err := range []error{ends(t, done, time.Second), only(l.Lock(ctx))} {
					require.ErrorIs(t, err, boom)
					if k.name != "latch" {
						require.ErrorIs(t, err, lock.ErrNotAcquired)
					}
				}
				harness.Idle(t, waiting)
				if k.owned {
					require.Len(t, s.Keys(), keys, "nothing of a waiter is left")
				}
				noListeners(t, waiting)
			}
			require.NoError(t, h.Unlock(t.Context()))
		}
	})
}

func TestForceUnlock(t *testing.T) {
	const (
		timeout = 3 * time.Second // of the watchdog
		heard   = 2 * timeout / 3 // by the holder, at its next renewal
	)
	eachVirtually(t, owned, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c, other := s.Client(t, redlatch.WithWatchdogTimeout(timeout)), s.Client(t)
		forced, err := k.lock(c, "orders").ForceUnlock(t.Context())
		require.NoError(t, err)
		require.False(t, forced)
		for _, m := range []struct{ waits, forces *redlatch.Client }{{c, c}, {other, other}, {other, c}, {c, other}} {
			h := mustLock(t, t.Context(), k.of(c, "orders"))
			w := k.waits(t, k.rival(m.waits, "orders"), m.waits)
			forced, err = k.lock(m.forces, "orders").ForceUnlock(t.Context())
			require.NoError(t, err)
			require.True(t, forced)
			if m.forces == c {
				require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
			}
			if m.forces != c && m.waits == c { // some hear of it from the holder
				require.NoError(t, ends(t, w, heard))
			} else {
				require.NoError(t, ends(t, w, time.Second))
			}
			require.False(t, harness.IsLocked(t, k.lock(c, "orders")))
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
	})
}

// Locks are forced open all the time while they are taken and given back: a hold that is
// told it is lost is not kept alive, and nothing is left.
func TestForcedOpenInALoop(t *testing.T) {
	const timeout = 3 * time.Second // of the watchdog: a busy machine confirms a lock before that is over
	eachKind(t, func(k kind) bool { return k.owned && !k.shared }, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout), quiet)
		l := k.lock(c, "orders")
		ctx, stop := context.WithCancel(t.Context())
		var forced, lost atomic.Int32
		var forcers, lockers sync.WaitGroup
		for range 2 {
			forcers.Go(func() {
				for ctx.Err() == nil {
					was, err := l.ForceUnlock(t.Context())
					assert.NoError(t, err)
					if was {
						forced.Add(1)
					}
				}
			})
		}
		for range 2 {
			lockers.Go(func() {
				for range harness.Size(40, 2000) {
					h, err := l.Lock(t.Context())
					if !assert.NoError(t, err) {
						return
					}
					if err := h.Unlock(t.Context()); err != nil {
						assert.ErrorIs(t, err, lock.ErrLost)
						lost.Add(1)
					}
					assert.Zero(t, h.Remaining())
				}
			})
		}
		lockers.Wait()
		stop()
		forcers.Wait()
		t.Logf("forced open %d times, %d holds were told", forced.Load(), lost.Load())
		require.Positive(t, forced.Load())
		harness.Idle(t, c)
	})
}

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
