package contract_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

// room is what an object guards. It notices if somebody is inside beside whom nobody, or
// nobody of another kind, may be.
type room struct {
	k       kind
	inside  atomic.Int32
	entries atomic.Int32
	writes  int // protected by the object alone: by its rival
}

const writer = 1 << 16

// enter goes in and out under a hold.
func (r *room) enter(t testing.TB, rival bool) {
	me := int32(1)
	if rival || !r.k.shared {
		me = writer
		r.writes++
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

func TestLockedWhileItIsHeld(t *testing.T) {
	eachKind(t, andInMemory(all), func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		l := k.of(c, "orders")
		name := l.Name()
		require.Contains(t, name, "orders")
		isLocked := func(want bool) {
			t.Helper()
			for _, c := range []*redlatch.Client{c, other} {
				if k.owned {
					require.Equal(t, want, harness.IsLocked(t, k.lock(c, "orders")))
				}
				if want {
					isTaken(t, k.rival(c, "orders"))
				}
			}
		}
		for range 3 {
			isLocked(false)
			h := mustLock(t, t.Context(), l)
			require.Equal(t, name, h.Name())
			isLocked(true)
			if k.leased {
				require.Equal(t, k.tokens, h.Token() > 0)
			}
			if k.owned {
				for _, c := range []*redlatch.Client{c, other} {
					require.Equal(t, 1, harness.HoldCount(t, k.lock(c, "orders"), h.Owner()))
				}
			}
			require.NoError(t, h.Unlock(t.Context()))
			if k.owned {
				require.Zero(t, harness.HoldCount(t, k.lock(c, "orders"), h.Owner()))
			}
			if k.leased {
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
				require.Equal(t, context.Canceled, context.Cause(h.Context()))
			}
		}
		isLocked(false)
		// What one finds taken, another finds free as soon as it is.
		require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing))
	})
}

func TestTheHoldIsOfNobodyElse(t *testing.T) {
	eachKind(t, owned, func(t *testing.T, s *testserver.Server, k kind) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		h := mustLock(t, t.Context(), k.of(c, "orders"))
		for _, from := range []*redlatch.Client{c, other} {
			l := k.lock(from, "orders")
			for _, another := range []lock.Owner{c.NewOwner(), other.NewOwner()} {
				require.Zero(t, harness.HoldCount(t, l, another))
				require.ErrorIs(t, l.Unlock(lock.WithOwner(t.Context(), another)), lock.ErrNotHeld)
			}
			require.True(t, harness.IsLocked(t, l))
			isTaken(t, k.rival(from, "orders"))
			require.Equal(t, 1, harness.HoldCount(t, l, h.Owner()))
		}
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// Also two goroutines with one Locker and one context never hold it together.
func TestManyExcludeEachOther(t *testing.T) {
	type crowd struct{ clients, goroutines, passes int }
	crowds := []crowd{{1, 15, 20}, {50, 1, 2}, {8, 2, 25}}
	if testing.Short() {
		crowds = []crowd{{3, 3, 6}}
	}
	eachKind(t, andInMemory(all), func(t *testing.T, s *testserver.Server, k kind) {
		for _, m := range crowds {
			r := &room{k: k}
			wantWrites := 0
			var wg sync.WaitGroup
			for range m.clients {
				c := harness.Client(t, s)
				for g := range m.goroutines {
					rival, l := k.shared && g%3 == 0, k.of(c, "orders")
					if rival {
						l = k.rival(c, "orders")
					}
					if rival || !k.shared {
						wantWrites += m.passes
					}
					wg.Go(func() {
						for range m.passes {
							assert.NoError(t, l.Do(t.Context(), func(context.Context) error {
								r.enter(t, rival)
								return nil
							}))
						}
					})
				}
			}
			wg.Wait()
			require.Equal(t, m.clients*m.goroutines*m.passes, int(r.entries.Load()), "%v", m)
			require.Equal(t, wantWrites, r.writes, "%v", m)
		}
	})
}

// Many goroutines, many names, little patience. Who is patient gets in every time.
func TestLoad(t *testing.T) {
	names, passes := harness.Size(5, 50), harness.Size(20, 500)
	eachKind(t, andInMemory(all), func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		rooms := make([]room, names)
		var all []string
		for i := range rooms {
			rooms[i].k = k
			all = append(all, fmt.Sprint("orders-", i))
		}
		k.prepare(t, s.Addr, all...)
		var wg sync.WaitGroup
		for g := range harness.Size(10, 20) {
			opts := []lock.Option{lock.Wait(time.Duration(g%10) * time.Millisecond)}
			if g == 0 {
				opts = []lock.Option{lock.Wait(time.Minute)}
			}
			wg.Go(func() {
				for i := range passes {
					err := k.of(c, all[i%names]).Do(t.Context(), func(context.Context) error {
						rooms[i%names].enter(t, false)
						return nil
					}, opts...)
					// On a busy machine the server may be silent for a moment.
					over := errors.Is(err, lock.ErrNotAcquired) || errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate)
					if g == 0 || err != nil && !over {
						assert.NoError(t, err)
					}
				}
			})
		}
		wg.Wait()
		for i := range rooms {
			require.GreaterOrEqual(t, int(rooms[i].entries.Load()), passes/names)
			require.NoError(t, k.of(c, all[i]).Do(t.Context(), nothing, lock.Wait(0)), "free at once")
		}
		harness.Idle(t, c)
		noListeners(t, c)
		k.unmake(t, s.Addr, all...)
	})
}

// noListeners verifies that a client that does not use its objects any more soon listens to nothing.
func noListeners(t *testing.T, c *redlatch.Client) {
	t.Helper()
	harness.Eventually(t, 3*pubsub.DefaultKeepWarm, "nobody listens", func() bool { return c.PubSub().Listeners == 0 })
}

func TestWaitIsBounded(t *testing.T) {
	const wait = 300 * time.Millisecond
	eachVirtually(t, andInMemory(all), func(t *testing.T, s *harness.VirtualServer, k kind) {
		c := s.Client(t)
		h := mustLock(t, t.Context(), k.of(c, "orders"))
		keys := len(s.Keys())
		for _, waiting := range []*redlatch.Client{c, s.Client(t)} {
			l := k.rival(waiting, "orders")
			begin := time.Now()
			_, err := l.Lock(t.Context(), lock.Wait(wait))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.NotErrorIs(t, err, lock.ErrIndeterminate)
			require.GreaterOrEqual(t, time.Since(begin), wait)
			require.Less(t, time.Since(begin), wait+100*time.Millisecond)

			_, err = l.Lock(t.Context(), lock.Wait(0))
			require.ErrorIs(t, err, lock.ErrNotAcquired)

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
				for range harness.Size(100, 2000) {
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

func TestDo(t *testing.T) {
	eachKind(t, andInMemory(all), func(t *testing.T, s *testserver.Server, k kind) {
		l := k.of(harness.Client(t, s), "orders")
		taken := func(want bool) {
			t.Helper()
			h, err := k.rival(harness.Client(t, s), "orders").TryLock(t.Context())
			if want {
				require.ErrorIs(t, err, lock.ErrNotAcquired)
				return
			}
			require.NoError(t, err)
			require.NoError(t, h.Unlock(t.Context()))
		}
		boom := errors.New("boom")
		require.NoError(t, l.Do(t.Context(), func(ctx context.Context) error {
			taken(true)
			return ctx.Err()
		}))
		require.Equal(t, boom, l.Do(t.Context(), func(context.Context) error { return boom }), "unchanged")
		taken(false)
		require.PanicsWithValue(t, "boom", func() {
			_ = l.Do(t.Context(), func(context.Context) error { panic("boom") })
		})
		taken(false)
		if !k.leased {
			return
		}
		err := l.Do(t.Context(), func(ctx context.Context) error {
			k.forgotten(t, s.Addr, ctx)
			return boom
		})
		lost := l.Do(t.Context(), func(ctx context.Context) error {
			k.forgotten(t, s.Addr, ctx)
			return context.Cause(ctx)
		})
		require.Equal(t, 1, strings.Count(lost.Error(), lock.ErrLost.Error()), lost)
		var both *lock.DoError
		require.ErrorAs(t, err, &both)
		require.Equal(t, boom, both.Func)
		require.ErrorIs(t, both.Unlock, lock.ErrLost)
	})
}
