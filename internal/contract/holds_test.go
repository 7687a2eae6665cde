package contract_test

import (
	"context"
	"encoding/json"
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
var callSite = regexp.MustCompile(`^github.com/redlatch/redlatch/internal/contract_test\.\S+ \(\S*(holds|kinds)_test.go:\d+\)$`)

// A client lists what it holds and waits for, with the line of the caller, and nothing else.
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
	})
}

// hold holds l until release is closed.
func hold(ctx context.Context, l lock.Locker, how string, release chan struct{}) error {
	wait := func(context.Context) error { <-release; return nil }
	if how == "Do" {
		return l.Do(ctx, wait)
	}
	take := l.Lock
	if how == "TryLock" {
		take = l.TryLock
	}
	h, err := take(ctx)
	if err != nil {
		return err
	}
	_ = wait(ctx)
	return h.Unlock(ctx)
}

// Holds that are lost are not listed.
func TestLostHoldsAreNotListed(t *testing.T) {
	eachVirtually(t, leased, func(t *testing.T, s *harness.VirtualServer, k kind) {
		c := s.Client(t)
		h := mustLock(t, t.Context(), k.of(c, "orders"), lock.Lease(time.Second))
		require.Len(t, c.Holds(), 1)
		time.Sleep(2 * time.Second)
		require.Empty(t, c.Holds(), "its lease is over")
		_ = h.Unlock(t.Context())
		require.NoError(t, k.of(c, "orders").Do(t.Context(), nothing), "and a permit that has expired comes back")
		if k.free != "" {
			return
		}
		h = mustLock(t, t.Context(), k.of(c, "orders"))
		require.Len(t, c.Holds(), 1)
		s.Del(k.key("orders"))
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Empty(t, c.Holds(), "it is gone")
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	})
}

// An owner that re-enters has several holds.
func TestHoldsOfAnOwner(t *testing.T) {
	eachVirtually(t, reentrant, func(t *testing.T, s *harness.VirtualServer, k kind) {
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
		require.Empty(t, c.Holds())
	})
}

// The handler shows the list to people and to programs.
func TestDebugHandler(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		get := func(url, accept string) (contentType, body string) {
			r, w := httptest.NewRequest("GET", url, nil), httptest.NewRecorder()
			r.Header.Set("Accept", accept)
			c.DebugHandler().ServeHTTP(w, r)
			require.Equal(t, 200, w.Code)
			return w.Header().Get("Content-Type"), w.Body.String()
		}
		kind, body := get("/?format=json", "")
		require.Equal(t, "application/json", kind)
		require.JSONEq(t, `[]`, body)

		h, err := c.Lock("orders\n").Lock(t.Context(), lock.Lease(time.Minute))
		require.NoError(t, err)
		e := c.PermitSemaphore("permits")
		require.NoError(t, e.SetPermits(t.Context(), 1))
		p, err := e.Acquire(t.Context(), semaphore.Forever())
		require.NoError(t, err)
		time.Sleep(time.Millisecond)
		waiting := async(func() error { return c.Lock("orders\n").Do(t.Context(), nothing) })
		harness.Eventually(t, soon, "it waits", func() bool { return harness.Waiting(1, c) })
		time.Sleep(10 * time.Second)

		kind, body = get("/", "text/html")
		require.Equal(t, "text/plain; charset=utf-8", kind)
		lines := strings.Split(strings.TrimSpace(body), "\n")
		require.Equal(t, "client "+c.ID()+": 2 held, 1 waiting", lines[0])
		require.Len(t, lines, 6)
		require.Regexp(t, `(?m)^held +10\.?\d*s +(49|50)\.?\d*s +lock +"orders\\n" +`+h.Owner().String()+` +\S+TestDebugHandler\S+ \(\S+holds_test.go:\d+\)$`, body)
		require.Regexp(t, `(?m)^held +\S+ +forever +permit-semaphore +"permits" +`+p.ID(), body)
		require.Regexp(t, `(?m)^waiting +\S+ +- +lock +"orders\\n" +`, body)

		for _, r := range [][2]string{{"/?format=json", ""}, {"/", "application/json"}} {
			kind, body = get(r[0], r[1])
			require.Equal(t, "application/json", kind)
			var all []map[string]any
			require.NoError(t, json.Unmarshal([]byte(body), &all))
			require.Len(t, all, 3)
			require.Equal(t, "orders\n", all[0]["name"])
			require.Equal(t, false, all[0]["waiting"])
			require.InDelta(t, 10, all[0]["seconds"], 1)
			require.InDelta(t, 50, all[0]["remaining_seconds"], 1)
			require.NotContains(t, all[1], "remaining_seconds")
			require.Equal(t, true, all[2]["waiting"])
			require.NotContains(t, all[2], "remaining_seconds")
		}
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, ends(t, waiting, soon))
		require.NoError(t, p.Release(t.Context()))
	})
}

// A dropped hold with a fixed lease lasts until its end, and is neither logged nor waited for.
func TestADroppedFixedLeaseRunsToItsEnd(t *testing.T) {
	const lease = 15 * time.Second // collections of many tests at once take long
	eachKind(t, leased, func(t *testing.T, s *testserver.Server, k kind) {
		var log harness.Log
		c, other := harness.Client(t, s, redlatch.WithLogger(log.Logger())), harness.Client(t, s)
		began := time.Now()
		func() { mustLock(t, t.Context(), k.of(c, "orders"), lock.Lease(lease)) }()
		shutdown := async(func() error { return c.Shutdown(t.Context()) })
		harness.Eventually(t, lease, "the client does not wait for it", func() bool {
			runtime.GC()
			return len(shutdown) > 0
		})
		require.NoError(t, <-shutdown)
		require.Less(t, time.Since(began), lease)
		isTaken(t, k.rival(other, "orders"))
		require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(lease+soon)))
		require.GreaterOrEqual(t, time.Since(began), lease-10*time.Millisecond)
		require.NotContains(t, log.String(), "dropped")
	})
}
