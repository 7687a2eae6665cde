package contract_test

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// running fails the test if a call ends within d.
func running(t testing.TB, done <-chan error, d time.Duration) {
	t.Helper()
	select {
	case err := <-done:
		require.FailNow(t, "a call has ended", "%v", err)
	case <-time.After(d):
	}
}

// A client that shuts down takes nothing more, and closes when what it holds is released.
func TestShutdownWaitsForHolds(t *testing.T) {
	eachVirtually(t, all, func(t *testing.T, s *harness.VirtualServer, k kind) {
		other := s.Client(t)
		for _, ctx := range k.owners(t, other) { // their numbers matter only
			c := s.Client(t)
			h := mustLock(t, ctx, k.of(c, "orders"))
			waiters := []<-chan error{
				async(func() error { return only(k.rival(c, "orders").Lock(t.Context())) }),
				async(func() error { return only(k.rival(c, "orders").Lock(t.Context())) }),
			}
			harness.Eventually(t, soon, "they wait", func() bool { return k.waiting(len(waiters), c) })
			shutdown := async(func() error { return c.Shutdown(t.Context()) })
			for _, w := range waiters {
				err := ends(t, w, time.Second)
				require.ErrorIs(t, err, lock.ErrClosed)
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
			}
			if k.leased {
				require.ErrorIs(t, only(k.of(c, "new").Lock(t.Context())), lock.ErrClosed)
				require.ErrorIs(t, only(k.of(c, "new").TryLock(t.Context())), lock.ErrClosed)
				running(t, shutdown, 2*time.Minute)
				require.NoError(t, context.Cause(h.Context()), "it is renewed")
				require.NoError(t, h.Extend(t.Context(), time.Hour))
				require.NoError(t, c.Ping(t.Context()))
				require.NoError(t, h.Unlock(t.Context()))
			}
			require.NoError(t, ends(t, shutdown, time.Second))
			require.NoError(t, c.Shutdown(t.Context()), "it is closed")
			require.ErrorIs(t, c.Ping(t.Context()), lock.ErrClosed)
			require.Zero(t, c.Stats())
			require.Empty(t, c.Holds())
			if !k.leased { // another client releases what has no holder
				theirs := s.Client(t)
				switch k.name {
				case "latch":
					require.NoError(t, only(theirs.CountDownLatch("orders").CountDown(t.Context())))
				default:
					require.NoError(t, theirs.Semaphore("orders").Release(t.Context(), 1))
				}
			}
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(time.Second)))
		}
	})
}

// A shutdown that takes too long closes the client.
func TestShutdownGivesUp(t *testing.T) {
	const patience, timeout = 5 * time.Second, 30 * time.Second
	eachVirtually(t, leased, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c, other := s.Client(t, redlatch.WithWatchdogTimeout(timeout)), s.Client(t)
		h := mustLock(t, t.Context(), k.of(c, "orders"))
		boom := errors.New("boom")
		ctx, cancel := context.WithTimeoutCause(t.Context(), patience, boom)
		defer cancel()
		began := time.Now()
		err := c.Shutdown(ctx)
		require.ErrorIs(t, err, boom)
		require.NotErrorIs(t, err, lock.ErrClosed)
		require.ErrorContains(t, err, "holds left: 1)")
		require.Equal(t, patience, time.Since(began))
		var loss *lock.LostError
		require.ErrorAs(t, context.Cause(h.Context()), &loss)
		require.Equal(t, lock.ReasonClosed, loss.Reason)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrClosed)
		require.NoError(t, c.Shutdown(ctx))
		isTaken(t, k.rival(other, "orders"))
		require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(timeout+time.Second)))

		cancel()
		time.Sleep(time.Second) // the last releases
		require.NoError(t, other.Shutdown(ctx), "nothing is held")
	})
}

// Close and other calls of Shutdown end a shutdown, which says what was lost.
func TestShutdownAndCloseTogether(t *testing.T) {
	eachVirtually(t, leased, func(t *testing.T, s *harness.VirtualServer, k kind) {
		for _, held := range []bool{true, false} {
			c := s.Client(t, redlatch.WithWatchdogTimeout(time.Second))
			h := mustLock(t, t.Context(), k.of(c, "orders"))
			shutdowns := []<-chan error{
				async(func() error { return c.Shutdown(t.Context()) }), async(func() error { return c.Shutdown(t.Context()) }),
			}
			running(t, shutdowns[0], time.Second)
			if !held {
				require.NoError(t, h.Unlock(t.Context()))
			} else {
				c.Close()
			}
			for _, shutdown := range shutdowns {
				err := ends(t, shutdown, time.Second)
				if !held {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, lock.ErrClosed)
					require.ErrorContains(t, err, "holds left: 1)")
				}
			}
			c.Close()
			time.Sleep(2 * time.Second)
		}
		var none context.Context
		c := s.Client(t)
		require.ErrorIs(t, c.Shutdown(none), lock.ErrInvalid)
		require.NoError(t, k.of(c, "orders").Do(t.Context(), nothing))
	})
}

// An owner can go on with what it holds while the client shuts down.
func TestReentryDuringShutdown(t *testing.T) {
	eachVirtually(t, reentrant, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c := s.Client(t)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h := mustLock(t, ctx, k.of(c, "orders"))
		shutdown := async(func() error { return c.Shutdown(t.Context()) })
		running(t, shutdown, time.Second)
		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Hour)}} {
			again := mustLock(t, ctx, k.of(c, "orders"), opts...)
			require.NoError(t, again.Unlock(t.Context()))
		}
		second := mustLock(t, ctx, k.of(c, "orders"))
		require.ErrorIs(t, only(k.of(c, "new").Lock(ctx)), lock.ErrClosed)
		require.ErrorIs(t, only(k.of(c, "new").TryLock(ctx)), lock.ErrClosed)
		require.ErrorIs(t, only(k.of(c, "orders").TryLock(t.Context())), lock.ErrClosed, "another owner")
		require.NoError(t, h.Unlock(t.Context()))
		running(t, shutdown, time.Minute)
		require.NoError(t, second.Unlock(t.Context()))
		require.NoError(t, ends(t, shutdown, time.Second))
		require.ErrorIs(t, only(k.of(c, "orders").Lock(ctx)), lock.ErrClosed)
	})
}

// What was detached does not delay a shutdown, during which a hold can still be detached.
func TestShutdownLeavesWhatIsDetached(t *testing.T) {
	eachVirtually(t, detachable, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c, other := s.Client(t), s.Client(t)
		h := mustLock(t, t.Context(), k.of(c, "orders"))
		shutdown := async(func() error { return c.Shutdown(t.Context()) })
		running(t, shutdown, time.Minute)
		_, err := k.of(c, "orders").(adopter).Adopt(t.Context(), unknownID(k, c))
		require.ErrorIs(t, err, lock.ErrClosed)
		id, err := h.Detach(t.Context(), time.Hour)
		require.NoError(t, err)
		require.NoError(t, ends(t, shutdown, time.Second))
		h, err = k.of(other, "orders").(adopter).Adopt(t.Context(), id)
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// A dropped permit whose id is known remains acquired, and does not delay a shutdown.
func TestShutdownLeavesDroppedPermitsWithKnownIDs(t *testing.T) {
	for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Hour)}, {semaphore.Forever()}} {
		harness.Each(t, func(t *testing.T, s *testserver.Server) {
			var log harness.Log
			c, other := harness.Client(t, s, redlatch.WithLogger(log.Logger())), harness.Client(t, s)
			id := func() string {
				p, err := c.PermitSemaphore("orders", semaphore.Permits(1)).Acquire(t.Context(), opts...)
				require.NoError(t, err)
				return p.ID()
			}()
			shutdown := async(func() error { return c.Shutdown(t.Context()) })
			harness.Eventually(t, soon, "the client does not wait for it", func() bool {
				runtime.GC()
				return len(shutdown) > 0
			})
			require.NoError(t, <-shutdown)
			require.NotContains(t, log.String(), "dropped")
			require.NoError(t, other.PermitSemaphore("orders").Release(t.Context(), id))
		})
	}
}

// A permit whose id is known delays a shutdown until it is released, by its id or otherwise.
func TestShutdownWaitsForPermitsWithKnownIDs(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		e := c.PermitSemaphore("orders", semaphore.Permits(2))
		renewed, err := e.Acquire(t.Context())
		require.NoError(t, err)
		forever, err := e.Acquire(t.Context(), semaphore.Forever())
		require.NoError(t, err)
		ids := append(renewed.IDs(), forever.ID())
		shutdown := async(func() error { return c.Shutdown(t.Context()) })
		running(t, shutdown, time.Minute)
		require.NoError(t, c.Semaphore("numbers").Release(t.Context(), 1))
		require.ErrorIs(t, c.Semaphore("numbers").TryAcquire(t.Context(), 1), lock.ErrClosed)
		require.NoError(t, e.Release(t.Context(), ids[0]))
		running(t, shutdown, time.Minute)
		require.NoError(t, forever.Release(t.Context()))
		require.NoError(t, ends(t, shutdown, time.Second))
		require.ErrorIs(t, renewed.Release(t.Context()), lock.ErrNotHeld)
	})
}

// A client that shuts down does not close the connection of a release that is under way.
func TestShutdownWaitsForReleases(t *testing.T) {
	const latency = 200 * time.Millisecond
	eachVirtually(t, leased, func(t *testing.T, s *harness.VirtualServer, k kind) {
		s.Latency = latency
		c := s.Client(t)
		h := mustLock(t, t.Context(), k.of(c, "orders"))
		began := time.Now()
		unlock := async(func() error { return h.Unlock(t.Context()) })
		synctest.Wait()
		require.NoError(t, c.Shutdown(t.Context()))
		require.GreaterOrEqual(t, time.Since(began), latency)
		require.NoError(t, ends(t, unlock, time.Second))
	})
}

// A client waits for the holds of groups that have members of its own, and for its own groups, whose
// members are not its own.
func TestShutdownWaitsForGroups(t *testing.T) {
	for name, group := range map[string]func(c *redlatch.Client, members ...lock.Locker) lock.Locker{
		"multi": func(c *redlatch.Client, members ...lock.Locker) lock.Locker { return c.MultiLock(members...) },
		"red": func(c *redlatch.Client, members ...lock.Locker) lock.Locker {
			return c.RedLock(members[0])
		},
	} {
		t.Run(name, func(t *testing.T) {
			harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
				mine, theirs := s.Client(t), s.Client(t)
				h := mustLock(t, t.Context(), group(mine, theirs.Lock("a"), theirs.Lock("b")))
				require.Len(t, mine.Holds(), 1)
				require.Empty(t, theirs.Holds(), "a part")
				shutdowns := []<-chan error{
					async(func() error { return mine.Shutdown(t.Context()) }), async(func() error { return theirs.Shutdown(t.Context()) }),
				}
				running(t, shutdowns[0], time.Minute)
				running(t, shutdowns[1], time.Minute)
				require.NoError(t, context.Cause(h.Context()))
				require.NoError(t, h.Unlock(t.Context()))
				for _, shutdown := range shutdowns {
					require.NoError(t, ends(t, shutdown, time.Second))
				}
				require.Empty(t, s.Keys())
			})
		})
	}
}

// A client shuts down at any moment of acquisitions and releases: nothing that it reports as released
// is left, and nothing that a caller has is lost.
func TestShutdownDuringAcquisitions(t *testing.T) {
	eachKind(t, leased, func(t *testing.T, s *testserver.Server, k kind) {
		other, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		for i := range harness.Size(6, 50) {
			c, err := redlatch.Wrap(t.Context(), conn, redlatch.WithoutStartupChecks())
			require.NoError(t, err)
			owners := k.owners(t, c)
			var done []<-chan error
			for range 4 {
				for _, ctx := range owners {
					done = append(done, async(func() error {
						for {
							h, err := k.of(c, "orders").Lock(ctx)
							if err != nil {
								return err
							}
							if cause := context.Cause(h.Context()); cause != nil {
								return cause
							}
							if err := h.Unlock(ctx); err != nil {
								return err
							}
						}
					}))
				}
			}
			time.Sleep(time.Duration(i%10) * time.Millisecond)
			require.NoError(t, c.Shutdown(t.Context()))
			for _, d := range done {
				err := ends(t, d, soon)
				if !k.once || !errors.Is(err, lock.ErrReentered) {
					require.ErrorIs(t, err, lock.ErrClosed)
					require.NotErrorIs(t, err, lock.ErrLost)
				}
			}
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(0)), "it is free")
		}
	})
}
