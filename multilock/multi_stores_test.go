package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/memstore"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// storeClient returns a client of another store, which the end of the test closes.
func storeClient(t *testing.T, s *memstore.Store) *driver.Client {
	c := driver.NewClient(s.Driver(), driver.WithLogger(slog.New(slog.DiscardHandler)))
	t.Cleanup(c.Close)
	return c
}

// virtualStores runs a test with a server and another store in virtual time, after which both are empty.
func virtualStores(t *testing.T, test func(t *testing.T, s *harness.VirtualServer, m *memstore.Store)) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		m := memstore.New()
		test(t, s, m)
		s.NothingLeft(t)
		for _, name := range []string{"a", "b", "c"} {
			require.Empty(t, m.Left(name))
		}
	})
}

// Processes that name locks of two stores in different orders exclude each other, and do not deadlock.
func TestMultiOnTwoStores(t *testing.T) {
	virtualStores(t, func(t *testing.T, s *harness.VirtualServer, m *memstore.Store) {
		m.Latency = time.Millisecond
		var all sync.WaitGroup
		inside, rounds := 0, 0
		for i := range 4 {
			c, other := s.Client(t), storeClient(t, m)
			members := []lock.Locker{c.Lock("a"), other.Lock("b"), c.FairLock("c"), other.RWLock("c").Write()}
			both := c.MultiLock(append(members[i:], members[:i]...)...)
			all.Go(func() {
				for range 5 {
					assert.NoError(t, both.Do(t.Context(), func(context.Context) error {
						inside++
						assert.Equal(t, 1, inside)
						time.Sleep(time.Millisecond)
						rounds++
						inside--
						return nil
					}))
				}
			})
		}
		all.Wait()
		require.Equal(t, 4*5, rounds)
	})
}

// Locks of one name on two stores of one kind have no order. One of those that wait for each other starts over.
func TestMultiOnTwoStoresOfAKind(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		stores := []*memstore.Store{memstore.New(), memstore.New()}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		var all sync.WaitGroup
		for i := range 2 {
			first := storeClient(t, stores[i]).Lock("b")
			both := s.Client(t).MultiLock(first, storeClient(t, stores[1-i]).Lock("b"))
			all.Go(func() {
				for range 3 {
					h, err := first.Lock(ctx) // both hold one of the locks then
					if assert.NoError(t, err) {
						time.AfterFunc(time.Second, func() { assert.NoError(t, h.Unlock(ctx)) })
					}
					assert.NoError(t, both.Do(ctx, func(context.Context) error { time.Sleep(time.Second); return nil }))
				}
			})
		}
		all.Wait()
		for _, m := range stores {
			require.Empty(t, m.Left("b"))
		}
	})
}

// If one member is held, the others are free after the call.
func TestMultiFailsOnTwoStores(t *testing.T) {
	virtualStores(t, func(t *testing.T, s *harness.VirtualServer, m *memstore.Store) {
		c, there := s.Client(t), storeClient(t, m)
		both := c.MultiLock(c.Lock("a"), there.Lock("b"))
		for _, held := range []lock.Locker{s.Client(t).Lock("a"), storeClient(t, m).Lock("b")} {
			h := multiMust(t, held)
			_, err := both.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.ErrorContains(t, err, fmt.Sprintf("%q is held by others", held.Name()))
			_, err = both.Lock(t.Context(), lock.Wait(time.Second))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err = both.Lock(ctx)
			cancel()
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.ErrorIs(t, err, context.DeadlineExceeded)

			time.AfterFunc(time.Second, func() { assert.NoError(t, h.Unlock(context.Background())) })
			require.NoError(t, both.Do(t.Context(), multiNothing))
		}
	})
}

// The loss of a member on either store ends the hold. The others are held until Unlock, or until what the other store
// has confirmed is over.
func TestMultiIsLostOnEitherStore(t *testing.T) {
	const timeout = 30 * time.Second // of the watchdog
	for _, unlocked := range []bool{true, false} {
		for name, lose := range map[string]func(t *testing.T, s *harness.VirtualServer, d *memstore.Driver){
			"b": func(t *testing.T, _ *harness.VirtualServer, d *memstore.Driver) { t.Cleanup(d.Cut()) },
			"a": func(t *testing.T, s *harness.VirtualServer, _ *memstore.Driver) { require.True(t, s.Del("a")) },
		} {
			t.Run(fmt.Sprintf("%s, unlocked %v", name, unlocked), func(t *testing.T) {
				virtualStores(t, func(t *testing.T, s *harness.VirtualServer, m *memstore.Store) {
					c, d := s.Client(t, redlatch.WithWatchdogTimeout(timeout)), m.Driver()
					there := driver.NewClient(d)
					t.Cleanup(there.Close)
					h := multiMust(t, c.MultiLock(c.Lock("a"), there.Lock("b")))
					lose(t, s, d)

					lost := multiLost(t, h, timeout/3+time.Second)
					require.Equal(t, "a,b", lost.Name)
					var member *lock.LostError
					require.ErrorAs(t, lost.Err, &member)
					require.Equal(t, name, member.Name)
					require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
					others := []lock.Locker{s.Client(t).Lock("a"), storeClient(t, m).Lock("b")}
					wait := timeout + time.Second
					if unlocked {
						require.ErrorIs(t, h.Unlock(t.Context()), lost)
						wait = m.TTL + time.Second // of what is cut off
					}
					for _, l := range others {
						require.NoError(t, l.Do(t.Context(), multiNothing, lock.Wait(wait)))
					}
				})
			})
		}
	}
}

// The leases of members on two stores end together, and so do those that MaxHold bounds.
func TestMultiEndsOnTwoStores(t *testing.T) {
	virtualStores(t, func(t *testing.T, s *harness.VirtualServer, m *memstore.Store) {
		m.Leases = true
		m.TTL = 10 * time.Second
		c, there := s.Client(t), storeClient(t, m)
		both := c.MultiLock(c.Lock("a"), there.Lock("b"))
		alone := c.MultiLock(there.Lock("c"), there.Lock("b"))
		for _, row := range []struct {
			l      lock.Locker
			opt    lock.Option
			reason lock.Reason
		}{
			{both, lock.Lease(4 * time.Second), lock.ReasonExpired}, {both, lock.MaxHold(4 * time.Second), lock.ReasonMaxHold},
			{alone, lock.Lease(4 * time.Second), lock.ReasonExpired}, {alone, lock.MaxHold(4 * time.Second), lock.ReasonMaxHold},
		} {
			h, reason := multiMust(t, row.l, row.opt), row.reason
			require.InDelta(t, 4*time.Second, h.Remaining(), float64(time.Second))
			if reason == lock.ReasonExpired {
				require.NoError(t, h.Extend(t.Context(), time.Minute))
				time.Sleep(55 * time.Second)
			} else {
				time.Sleep(3 * time.Second)
			}
			require.NoError(t, h.Context().Err())
			require.Equal(t, reason, multiLost(t, h, 6*time.Second).Reason)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			for _, l := range []lock.Locker{c.Lock("a"), there.Lock("b")} {
				require.NoError(t, l.Do(t.Context(), multiNothing, lock.Wait(time.Second)))
			}
		}

		// The lease of the first member is over while the second is waited for.
		held := multiMust(t, s.Client(t).Lock("a"))
		time.AfterFunc(3*time.Second, func() { assert.NoError(t, held.Unlock(context.Background())) })
		h := multiMust(t, both, lock.Lease(time.Second))
		require.Positive(t, h.Remaining())
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// Extend says what a store cannot do, and a refusal is no unknown outcome.
func TestMultiIsRefusedByAStore(t *testing.T) {
	virtualStores(t, func(t *testing.T, s *harness.VirtualServer, m *memstore.Store) {
		m.Refuses = errors.New("no right to lock")
		c, there := s.Client(t), storeClient(t, m)
		_, err := c.MultiLock(c.Lock("a"), there.Lock("b")).Lock(t.Context())
		require.ErrorIs(t, err, m.Refuses)
		for _, kind := range []error{lock.ErrIndeterminate, lock.ErrUnavailable, lock.ErrNotAcquired} {
			require.NotErrorIs(t, err, kind)
		}
		require.ErrorContains(t, err, `acquire "b": no right to lock`)
	})
}

// A wait ends with the client of any member.
func TestMultiEndsWithTheClientOfAStore(t *testing.T) {
	virtualStores(t, func(t *testing.T, s *harness.VirtualServer, m *memstore.Store) {
		c, there := s.Client(t), driver.NewClient(m.Driver())
		both := c.MultiLock(c.Lock("a"), there.Lock("b"))
		held := multiMust(t, s.Client(t).Lock("a"))
		w := harness.StartLock(t, t.Context(), both)
		time.Sleep(time.Second)
		require.Len(t, there.Holds(), 1)
		there.Close()
		require.ErrorIs(t, w.EndWithin(100*time.Millisecond), lock.ErrClosed)
		_, err := both.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrClosed)
		require.NoError(t, held.Unlock(t.Context()))

		there = driver.NewClient(m.Driver())
		h := multiMust(t, c.MultiLock(c.Lock("a"), there.Lock("b")))
		there.Close()
		require.Equal(t, lock.ReasonClosed, multiLost(t, h, time.Second).Reason)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	})
}

// The least time applies to each member.
func TestMultiIsKeptOnTwoStores(t *testing.T) {
	virtualStores(t, func(t *testing.T, s *harness.VirtualServer, m *memstore.Store) {
		c, there := s.Client(t), storeClient(t, m)
		h := multiMust(t, c.MultiLock(c.Lock("a"), there.Lock("b")), lock.AtLeast(5*time.Second))
		require.NoError(t, h.Unlock(t.Context()))
		for _, l := range []lock.Locker{c.Lock("a"), there.Lock("b")} {
			_, err := l.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
		}
		time.Sleep(6 * time.Second)
		for _, l := range []lock.Locker{c.Lock("a"), there.Lock("b")} {
			require.NoError(t, l.Do(t.Context(), multiNothing, lock.Wait(0)))
		}
	})
}

// An owner holds the members again, and only its holds can end them.
func TestMultiOwnersOnTwoStores(t *testing.T) {
	virtualStores(t, func(t *testing.T, s *harness.VirtualServer, m *memstore.Store) {
		c, there := s.Client(t), storeClient(t, m)
		both := c.MultiLock(c.Lock("a"), there.Lock("b"))
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h, err := both.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, both.Do(ctx, multiNothing))
		require.ErrorIs(t, both.UnlockOwner(ctx), lock.ErrUnsupported)
		require.NoError(t, h.Unlock(ctx))
		require.NoError(t, both.Do(t.Context(), multiNothing, lock.Wait(0)))
	})
}

func TestMultiBadMembersOnStores(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, there := s.Client(t), storeClient(t, memstore.New())
		for _, l := range []lock.Locker{
			c.MultiLock(there.Lock("a"), there.RWLock("a").Read()),
			c.MultiLock(there.Lock("")),
			c.MultiLock(there.Semaphore("a", 2)),
			c.MultiLock((*driver.Lock)(nil)),
			c.RedLock([]lock.Locker{there.Lock("a")}),
		} {
			_, err := l.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		_, err := c.MultiLock(c.Lock("a"), there.RWLock("b").Read()).Lock(t.Context(), lock.AtLeast(time.Second))
		require.ErrorIs(t, err, lock.ErrInvalid)
	})
}
