package contract_test

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
	"github.com/redlatch/redlatch/semaphore"
)

// kindOf is the name of the kind in a list of holds, and of what it waits for.
func (k kind) kindOf() string {
	switch k.name {
	case "non-reentrant":
		return "lock"
	case "non-reentrant fair":
		return "fair"
	case "permit semaphore":
		return "permit-semaphore"
	}
	return k.name
}

// callSite matches the site of a call in a test of this package.
var callSite = regexp.MustCompile(`^github.com/redlatch/redlatch/internal/contract_test\.\S+ \(\S*(client|kinds)_test.go:\d+\)$`)

// A client lists what it holds and waits for, with the line of the caller, and nothing else. An owner that
// re-enters has several holds. TestEveryWayToLoseAHold shows that what is lost is not listed.
func TestHolds(t *testing.T) {
	eachVirtually(t, all, func(t *testing.T, s *harness.VirtualServer, k kind) {
		for _, how := range []string{"Lock", "TryLock", "Do"} {
			c := s.Client(t, redlatch.WithWatchdogTimeout(30*time.Second))
			require.Empty(t, c.Holds())
			l, began := k.of(c, "orders"), time.Now()
			release := make(chan struct{})
			done := async(func() error { return hold(t.Context(), l, how, release) })
			synctest.Wait()
			time.Sleep(time.Second)
			if k.leased {
				held := c.Holds()
				require.Len(t, held, 1)
				require.Equal(t, k.kindOf(), held[0].Kind)
				require.Equal(t, l.Name(), held[0].Name)
				require.Equal(t, began, held[0].Since)
				require.InDelta(t, 29*time.Second, held[0].Remaining, float64(time.Second))
				require.Regexp(t, callSite, held[0].Site)
				require.False(t, held[0].Waiting)
				if k.owned || k.kindOf() == "permit-semaphore" {
					require.NotEmpty(t, held[0].Owner)
				}
			}

			waiting := async(func() error { return k.rival(c, "orders").Do(t.Context(), nothing) })
			harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(1, c) })
			synctest.Wait() // until its line is known
			waits := slices.DeleteFunc(c.Holds(), func(h redlatch.HoldInfo) bool { return !h.Waiting })
			require.Len(t, waits, 1)
			require.Regexp(t, callSite, waits[0].Site)
			require.Zero(t, waits[0].Remaining)
			require.WithinDuration(t, began.Add(time.Second), waits[0].Since, time.Second)
			require.True(t, strings.HasPrefix(waits[0].Name, "orders"))

			close(release)
			require.NoError(t, ends(t, done, soon))
			require.NoError(t, ends(t, waiting, soon))
			require.Empty(t, c.Holds())
		}
		if !reentrant(k) {
			return
		}
		c := s.Client(t)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		first := mustLock(t, ctx, k.of(c, "orders"))
		time.Sleep(time.Second)
		second := mustLock(t, ctx, k.of(c, "orders"))
		both := c.Holds()
		require.Len(t, both, 2)
		require.Equal(t, both[0].Owner, both[1].Owner)
		require.Equal(t, time.Second, both[1].Since.Sub(both[0].Since))
		require.NoError(t, first.Unlock(t.Context()))
		require.Equal(t, both[1:], c.Holds())
		require.NoError(t, second.Unlock(t.Context()))
	})
}

// adapter sets up an adapter.
func adapter() lock.Option { return lock.Site(0) }

// A hold and a wait of an adapter show the line that has set it up.
func TestHoldsOfAdapters(t *testing.T) {
	eachVirtually(t, leased, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c, site := s.Client(t), adapter()
		release := make(chan struct{})
		done := async(func() error {
			return k.of(c, "orders").Do(t.Context(), func(context.Context) error { <-release; return nil }, site)
		})
		synctest.Wait()
		waiting := async(func() error { return k.rival(c, "orders").Do(t.Context(), nothing, site) })
		harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(1, c) })
		synctest.Wait() // until its line is known
		all := c.Holds()
		require.NotEmpty(t, all)
		for _, h := range all {
			require.Regexp(t, `/contract_test\.adapter \(\S+/client_test\.go:\d+\)$`, h.Site)
		}
		close(release)
		require.NoError(t, ends(t, done, soon))
		require.NoError(t, ends(t, waiting, soon))
	})
}

// hold holds l until release is closed.
func hold(ctx context.Context, l lock.Locker, how string, release chan struct{}) error {
	wait := func(context.Context) error { <-release; return nil }
	if how == "Do" {
		return l.Do(ctx, wait)
	}
	h, err := harness.Take(l, how == "TryLock")(ctx)
	if err != nil {
		return err
	}
	_ = wait(ctx)
	return h.Unlock(ctx)
}

// The handler shows the list to people and to programs.
func TestDebugHandler(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		get := func(url, accept, contentType string) string {
			r, w := httptest.NewRequest(http.MethodGet, url, nil), httptest.NewRecorder()
			r.Header.Set("Accept", accept)
			c.DebugHandler().ServeHTTP(w, r)
			require.Equal(t, 200, w.Code)
			require.Equal(t, contentType, w.Header().Get("Content-Type"))
			return w.Body.String()
		}
		require.JSONEq(t, `[]`, get("/?format=json", "", "application/json"))

		h := mustLock(t, t.Context(), c.Lock("orders\n"), lock.Lease(time.Minute))
		p, err := c.PermitSemaphore("permits", semaphore.Permits(1)).Acquire(t.Context(), 1, semaphore.Forever())
		require.NoError(t, err)
		time.Sleep(time.Millisecond)
		waiting := async(func() error { return c.Lock("orders\n").Do(t.Context(), nothing) })
		harness.Eventually(t, soon, "it waits", func() bool { return harness.Waiting(1, c) })
		time.Sleep(10 * time.Second)

		body := get("/", "text/html", "text/plain; charset=utf-8")
		require.True(t, strings.HasPrefix(body, "client "+c.ID()+": 2 held, 1 waiting\n"), body)
		require.Equal(t, 6, strings.Count(body, "\n"))
		require.Regexp(t, `(?m)^held +10\.?\d*s +(49|50)\.?\d*s +lock +"orders\\n" +`+lock.OwnerOf(h).String()+` +\S+mustLock\S* \(\S+kinds_test.go:\d+\)$`, body)
		require.Regexp(t, `(?m)^held +\S+ +forever +permit-semaphore +"permits" +`+p.ID(), body)
		require.Regexp(t, `(?m)^waiting +\S+ +- +lock +"orders\\n" +`, body)
		for _, r := range [][2]string{{"/?format=json", ""}, {"/", "application/json"}} {
			var all []map[string]any
			require.NoError(t, json.Unmarshal([]byte(get(r[0], r[1], "application/json")), &all))
			require.Len(t, all, 3)
			require.Equal(t, "orders\n", all[0]["name"])
			require.Equal(t, false, all[0]["waiting"])
			require.InDelta(t, 10, all[0]["seconds"], 1)
			require.InDelta(t, 50, all[0]["remaining_seconds"], 1)
			require.NotContains(t, all[1], "remaining_seconds")
			require.Equal(t, true, all[2]["waiting"])
			require.NotContains(t, all[2], "remaining_seconds")
		}
		isReleased(t, []lock.Hold{h, permitHold{p}})
		require.NoError(t, ends(t, waiting, soon))
	})
}

// A client that is closed ends its waits, behind holders here and elsewhere, and nothing of
// its waiters is left when Close returns. Its holds are lost, and free when their leases are over.
func TestCloseEndsWaitsAndHolds(t *testing.T) {
	const timeout = time.Second
	eachVirtually(t, all, func(t *testing.T, s *harness.VirtualServer, k kind) {
		other := s.Client(t)
		closed := func(c *redlatch.Client, ctxs ...context.Context) {
			t.Helper()
			var waiters []<-chan error
			for _, ctx := range ctxs {
				waiters = append(waiters, async(func() error { return only(k.rival(c, "orders").Lock(ctx)) }))
			}
			harness.Eventually(t, soon, "they wait", func() bool { return k.waiting(len(waiters), c) })
			c.Close()
			c.Close()
			for _, w := range waiters {
				err := ends(t, w, time.Millisecond)
				require.ErrorIs(t, err, lock.ErrClosed)
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
			}
			stats := c.Stats()
			stats.PubSub = pubsub.Stats{} // its counters go on
			require.Zero(t, stats)
			require.Zero(t, c.Stats().PubSub.Listeners)
			for what, call := range k.calls(k.of(c, "new"), t.Context(), c.NewOwner()) {
				require.ErrorIs(t, call(), lock.ErrClosed, what)
			}
			require.ErrorIs(t, c.Ping(t.Context()), lock.ErrClosed)
		}
		theirs := mustLock(t, t.Context(), k.of(other, "orders"))
		keys, c := len(s.Keys()), s.Client(t)
		closed(c, slices.Repeat(slices.Collect(maps.Values(k.owners(t, c))), 3)...)
		if k.owned {
			require.Len(t, s.Keys(), keys, "but for the holder nothing is left")
		}
		isReleased(t, []lock.Hold{theirs})
		require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(time.Second)))
		for _, opts := range [][]lock.Option{nil, {lock.Lease(timeout)}} {
			if !k.leased {
				return
			}
			c := s.Client(t, redlatch.WithWatchdogTimeout(timeout))
			hold := mustLock(t, t.Context(), k.of(c, "orders"), opts...)
			closed(c, t.Context())
			require.ErrorIs(t, context.Cause(hold.Context()), lock.ErrClosed)
			require.ErrorIs(t, context.Cause(hold.Context()), lock.ErrLost)
			require.ErrorIs(t, hold.Unlock(t.Context()), lock.ErrClosed)
			require.Zero(t, hold.Remaining())
			isTaken(t, k.rival(other, "orders"))
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(timeout+time.Second)))
		}
	})
}

// running fails the test if a call ends within d.
func running(t testing.TB, done <-chan error, d time.Duration) {
	t.Helper()
	select {
	case err := <-done:
		require.FailNow(t, "a call has ended", "%v", err)
	case <-time.After(d):
	}
}

// A client that shuts down takes nothing more, and closes when what it holds is released, or detached.
// Meanwhile an owner can go on with what it holds.
func TestShutdownWaitsForHolds(t *testing.T) {
	eachVirtually(t, all, func(t *testing.T, s *harness.VirtualServer, k kind) {
		other := s.Client(t)
		for _, detaches := range []bool{false, true} {
			if detaches && !detachable(k) {
				continue
			}
			c, ctx, id := s.Client(t), t.Context(), ""
			if k.owned {
				ctx = lock.WithOwner(ctx, c.NewOwner())
			}
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
				require.ErrorIs(t, only(k.of(c, "new").Lock(ctx)), lock.ErrClosed)
				require.ErrorIs(t, only(k.of(c, "new").TryLock(ctx)), lock.ErrClosed)
				require.ErrorIs(t, only(k.of(c, "orders").TryLock(t.Context())), lock.ErrClosed, "another owner")
				running(t, shutdown, redlatch.DefaultWatchdogTimeout+time.Second)
				require.NoError(t, context.Cause(h.Context()), "it is renewed")
				require.NoError(t, h.Extend(t.Context(), time.Hour))
				require.NoError(t, c.Ping(t.Context()))
			}
			if reentrant(k) {
				for _, opts := range [][]lock.Option{nil, {lock.Lease(2 * time.Hour)}} {
					require.NoError(t, mustLock(t, ctx, k.of(c, "orders"), opts...).Unlock(t.Context()))
				}
				second := mustLock(t, ctx, k.of(c, "orders"))
				require.NoError(t, h.Unlock(t.Context()))
				running(t, shutdown, time.Second)
				h = second
			}
			if detaches {
				require.ErrorIs(t, only(k.of(c, "orders").(adopter).Adopt(t.Context(), unknownID(k, c))), lock.ErrClosed)
				var err error
				id, err = lock.Detach(t.Context(), h, time.Hour)
				require.NoError(t, err)
			} else if k.leased {
				require.NoError(t, h.Unlock(t.Context()))
			}

			require.NoError(t, ends(t, shutdown, time.Second))
			require.NoError(t, c.Shutdown(t.Context()), "it is closed")
			require.ErrorIs(t, c.Ping(t.Context()), lock.ErrClosed)
			require.ErrorIs(t, only(k.of(c, "orders").Lock(ctx)), lock.ErrClosed)
			stats := c.Stats()
			stats.PubSub = pubsub.Stats{} // its counters go on
			require.Zero(t, stats)
			require.Empty(t, c.Holds())
			if detaches {
				h, err := k.of(other, "orders").(adopter).Adopt(t.Context(), id)
				require.NoError(t, err)
				require.NoError(t, h.Unlock(t.Context()))
			}
			switch k.name { // another client releases what has no holder
			case "latch":
				require.NoError(t, only(other.CountDownLatch("orders").CountDown(t.Context())))
			case "semaphore":
				require.NoError(t, other.Semaphore("orders").Release(t.Context(), 1))
			}
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(time.Second)))
		}
	})
}

// Calls of Shutdown end with the last hold, and else say what was lost: when their context ends, or when the
// client is closed meanwhile.
func TestShutdownGivesUp(t *testing.T) {
	const patience, timeout = 5 * time.Second, 30 * time.Second
	boom := errors.New("boom")
	eachVirtually(t, leased, func(t *testing.T, s *harness.VirtualServer, k kind) {
		other := s.Client(t)
		for _, want := range []error{boom, lock.ErrClosed, nil} {
			c := s.Client(t, redlatch.WithWatchdogTimeout(timeout))
			h := mustLock(t, t.Context(), k.of(c, "orders"))
			ctx, cancel := context.WithTimeoutCause(t.Context(), patience, boom)
			began := time.Now()
			shutdowns := []<-chan error{async(func() error { return c.Shutdown(ctx) }), async(func() error { return c.Shutdown(ctx) })}
			running(t, shutdowns[0], patience/2)
			switch want {
			case lock.ErrClosed:
				c.Close()
			case nil:
				require.NoError(t, h.Unlock(t.Context()))
			}
			for _, shutdown := range shutdowns {
				err := ends(t, shutdown, patience)
				require.ErrorIs(t, err, want)
				if want != nil {
					require.Equal(t, want == lock.ErrClosed, errors.Is(err, lock.ErrClosed))
					require.ErrorContains(t, err, "holds left: 1)")
				}
			}
			require.LessOrEqual(t, time.Since(began), patience)
			cancel()
			if want != nil {
				var loss *lock.LostError
				require.ErrorAs(t, context.Cause(h.Context()), &loss)
				require.Equal(t, lock.ReasonClosed, loss.Reason)
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrClosed)
				isTaken(t, k.rival(other, "orders"))
			}
			require.NoError(t, c.Shutdown(ctx))
			c.Close()
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(timeout+time.Second)))
		}
		var none context.Context
		require.ErrorIs(t, other.Shutdown(none), lock.ErrInvalid)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		time.Sleep(time.Second) // the last releases
		require.NoError(t, other.Shutdown(ended), "nothing is held")
	})
}

// A dropped permit that is not renewed remains acquired, and does not delay a shutdown.
func TestShutdownLeavesDroppedPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		var shutdowns []<-chan error
		var ids []string
		for _, opt := range []lock.Option{lock.Lease(time.Hour), semaphore.Forever()} {
			c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
			func() {
				p, err := c.PermitSemaphore("orders", semaphore.Permits(3)).Acquire(t.Context(), 1, opt)
				require.NoError(t, err)
				ids = append(ids, p.ID())
			}()
			shutdowns = append(shutdowns, async(func() error { return c.Shutdown(t.Context()) }))
		}
		harness.Eventually(t, soon, "the clients do not wait for it", func() bool {
			runtime.GC()
			return !slices.ContainsFunc(shutdowns, func(shutdown <-chan error) bool { return len(shutdown) == 0 })
		})
		for _, shutdown := range shutdowns {
			require.NoError(t, <-shutdown)
		}
		require.NotContains(t, log.String(), "dropped")
		require.NoError(t, harness.Client(t, s).PermitSemaphore("orders").Release(t.Context(), ids...))
	})
}

// A permit delays a shutdown until it is released, by its id or otherwise.
func TestShutdownWaitsForPermits(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		e := c.PermitSemaphore("orders", semaphore.Permits(2))
		renewed, err := e.Acquire(t.Context(), 1)
		require.NoError(t, err)
		forever, err := e.Acquire(t.Context(), 1, semaphore.Forever())
		require.NoError(t, err)
		ids := append(renewed.IDs(), forever.ID())
		shutdown := async(func() error { return c.Shutdown(t.Context()) })
		running(t, shutdown, redlatch.DefaultWatchdogTimeout+time.Second)
		require.NoError(t, c.Semaphore("numbers").Release(t.Context(), 1))
		require.ErrorIs(t, c.Semaphore("numbers").TryAcquire(t.Context(), 1), lock.ErrClosed)
		require.NoError(t, e.Release(t.Context(), ids[0]))
		running(t, shutdown, time.Second)
		require.NoError(t, forever.Release(t.Context()))
		require.NoError(t, ends(t, shutdown, time.Second))
		require.ErrorIs(t, renewed.Release(t.Context()), lock.ErrNotHeld)
	})
}

// The context of a hold ends before its release is sent, and a client that shuts down does not close the
// connection of a release that is under way.
func TestShutdownWaitsForReleases(t *testing.T) {
	const latency = 200 * time.Millisecond
	eachVirtually(t, leased, func(t *testing.T, s *harness.VirtualServer, k kind) {
		s.Latency = latency
		c := s.Client(t)
		h := mustLock(t, t.Context(), k.of(c, "orders"))
		began := time.Now()
		unlock := async(func() error { return h.Unlock(t.Context()) })
		synctest.Wait()
		require.ErrorIs(t, h.Context().Err(), context.Canceled)
		require.Zero(t, h.Remaining())
		require.NoError(t, c.Shutdown(t.Context()))
		require.GreaterOrEqual(t, time.Since(began), latency)
		require.NoError(t, ends(t, unlock, time.Second))
	})
}

// A client waits for the holds of groups that have members of its own, and for its own groups, whose
// members are not its own.
func TestShutdownWaitsForGroups(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		for _, red := range []bool{false, true} {
			mine, theirs := s.Client(t), s.Client(t)
			var group lock.Locker = mine.MultiLock(theirs.Lock("a"), theirs.Lock("b"))
			if red {
				group = mine.RedLock([]lock.Locker{theirs.Lock("a")})
			}
			h := mustLock(t, t.Context(), group)
			require.Len(t, mine.Holds(), 1)
			require.Empty(t, theirs.Holds(), "a part")
			shutdowns := []<-chan error{
				async(func() error { return mine.Shutdown(t.Context()) }), async(func() error { return theirs.Shutdown(t.Context()) }),
			}
			running(t, shutdowns[0], redlatch.DefaultWatchdogTimeout+time.Second)
			running(t, shutdowns[1], time.Second)
			require.NoError(t, context.Cause(h.Context()))
			require.NoError(t, h.Unlock(t.Context()))
			for _, shutdown := range shutdowns {
				require.NoError(t, ends(t, shutdown, time.Second))
			}
			require.False(t, s.Exists("a") || s.Exists("b"))
		}
	})
}

// A client shuts down, or is closed, at any moment of acquisitions and releases: nothing that it reports as
// released is left, and nothing that a caller has is lost, except by Close, to its lease.
func TestShutdownDuringAcquisitions(t *testing.T) {
	const timeout = time.Second // less, and a busy machine may lose a hold
	eachKind(t, leased, func(t *testing.T, s *testserver.Server, k kind) {
		other, conn := harness.Client(t, s), harness.Conn(t, s.Addr) // shared, since connecting takes the longest
		for i := range harness.Size(6, 50) {
			closes := i%2 == 0
			opts := []redlatch.Option{redlatch.WithoutStartupChecks()}
			if closes {
				opts = append(opts, redlatch.WithWatchdogTimeout(timeout))
			}
			c, err := redlatch.Wrap(t.Context(), conn, opts...)
			require.NoError(t, err)
			owners := k.owners(t, c)
			var done []<-chan error
			for range 3 {
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
			wait := time.Duration(0) // it is free
			if closes {
				c.Close()
				wait = soon
			} else {
				require.NoError(t, c.Shutdown(t.Context()))
			}
			for _, d := range done {
				err := ends(t, d, soon)
				if !k.once || !errors.Is(err, lock.ErrReentered) {
					require.ErrorIs(t, err, lock.ErrClosed)
					require.True(t, closes || !errors.Is(err, lock.ErrLost))
				}
			}
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(wait)))
		}
	})
}
