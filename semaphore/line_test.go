package semaphore_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// parks starts to wait for a permit and returns when the client stands in line with it.
func (k *taker) parks(t testing.TB, ctx context.Context, c *redlatch.Client) <-chan error {
	t.Helper()
	done := k.start(ctx, 1)
	harness.Eventually(t, faultSoon, "it is in line", func() bool { return standsInLine(t, k.addr, k.name) == ":1" })
	harness.Waits(t, 1, c)
	return done
}

// A place in line is that of all who wait in a process: when the first of them leaves,
// the next has one of its own, whichever the server hears of first.
func TestWhoLeavesTheLineLeavesItToTheNext(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range faultKinds {
			c := harness.Client(t, s)
			ctx := t.Context()
			other := takerOf(harness.Client(t, s), s, kind, kind)
			_, err := other.set(ctx, 1)
			require.NoError(t, err)
			require.NoError(t, other.try(ctx, 1))
			place := func() string {
				line, err := testserver.Query(s.Addr, "ZRANGE", wire.SemaphoreWaiting(kind), "0", "0", "WITHSCORES")
				require.NoError(t, err)
				return strings.Join(line, " ")
			}
			first, leave := context.WithCancel(ctx)
			leaving := takerOf(c, s, kind, kind).parks(t, first, c)
			for range 10 {
				before := place()
				next, leaveNext := context.WithCancel(ctx)
				waiter := takerOf(c, s, kind, kind).start(next, 1)
				harness.Waits(t, 2, c)
				leave()
				require.ErrorIs(t, await(t, leaving), lock.ErrNotAcquired)
				// Well before it tries again by itself.
				harness.Eventually(t, 3*time.Second, "the next has a place", func() bool { return place() != "" && place() != before })
				harness.Waits(t, 1, c)
				leave, leaving = leaveNext, waiter
			}
			leave()
			require.ErrorIs(t, await(t, leaving), lock.ErrNotAcquired)
			harness.Idle(t, c)
			require.Empty(t, place())
			require.NoError(t, other.release(ctx))
		}
	})
}

// An attempt is sent before a request may come into line, and answered after.
func TestAnAnswerThatIsLateDelaysThePlaceInLineByNoMore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		loadScripts(t, s.Addr)
		ctx := t.Context()
		for kind, script := range map[string]string{plainKind: "acquire.lua", expirableKind: "permit_acquire.lua"} {
			c, g := harness.GatedClient(t, s)
			elsewhere := harness.Client(t, s)
			one, rest := takerOf(elsewhere, s, kind, kind), takerOf(elsewhere, s, kind, kind)
			_, err := one.set(ctx, 2)
			require.NoError(t, err)
			require.NoError(t, one.try(ctx, 1))
			require.NoError(t, rest.try(ctx, 1))
			first, second := takerOf(c, s, kind, kind), takerOf(c, s, kind, kind)
			served := first.parks(t, ctx, c)
			var next <-chan error
			g.Keep(t, nameOf(t, script), 1, func() {
				next = second.start(ctx, 1)
				harness.Waits(t, 2, c)
				require.NoError(t, one.release(ctx))
			})
			<-time.After(150 * time.Millisecond) // others may overtake for 100
			require.Equal(t, ":0", standsInLine(t, s.Addr, kind))
			require.NoError(t, g.Open())
			require.NoError(t, await(t, served))
			harness.Eventually(t, time.Second, "the next is in line", func() bool { return standsInLine(t, s.Addr, kind) == ":1" })
			require.NoError(t, rest.release(ctx))
			require.NoError(t, first.release(ctx))
			require.NoError(t, await(t, next))
			require.NoError(t, second.release(ctx))
		}
	})
}

// Close waits for a release that the server has not answered.
func TestCloseWaitsForReleases(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range faultKinds {
			for _, n := range []int{1, 2} {
				harness.Do(t, s.Addr, "DEL", kind)
				c := harness.Client(t, s)
				k := takerOf(c, s, kind, kind)
				_, err := k.set(t.Context(), n)
				require.NoError(t, err)
				require.NoError(t, k.try(t.Context(), n))
				harness.Do(t, s.Addr, "CLIENT", "PAUSE", "30000", "WRITE")
				released := make(chan error, 1)
				go func() { released <- k.release(context.Background()) }()
				harness.Eventually(t, faultSoon, "it is under way", func() bool { return blocked(t, s.Addr) })
				closed := make(chan struct{})
				go func() {
					c.Close()
					close(closed)
				}()
				over, cancel := context.WithCancel(t.Context())
				cancel() // the server does not answer
				harness.Eventually(t, faultSoon, "the client is being closed", func() bool {
					return errors.Is(c.Ping(over), lock.ErrClosed)
				})
				select {
				case <-closed:
					require.FailNow(t, "Close did not wait")
				default:
				}
				harness.Do(t, s.Addr, "CLIENT", "UNPAUSE")
				<-closed
				require.NoError(t, await(t, released))
				requireExact(t, n, k)
			}
		}
	})
}

// Whoever was served when it had left gives the permits back, but not to a semaphore
// that was deleted meanwhile: that would make another one.
func TestWhatIsGivenBackMakesNoSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		loadScripts(t, s.Addr)
		c, g := harness.GatedClient(t, s)
		mine, other := takerOf(c, s, plainKind, "pool"), takerOf(harness.Client(t, s), s, plainKind, "pool")
		made, err := other.set(t.Context(), 0)
		require.NoError(t, err)
		require.True(t, made)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		waits := []<-chan error{mine.parks(t, ctx, c), mine.start(ctx, 1)}
		harness.Waits(t, 2, c)
		g.Keep(t, nameOf(t, "acquire.lua"), 1, func() { require.NoError(t, other.plain.Release(t.Context(), 2)) })
		cancel()
		for _, done := range waits {
			require.ErrorIs(t, await(t, done), context.Canceled)
		}
		harness.Do(t, s.Addr, "DEL", "pool")
		require.NoError(t, g.Open())
		harness.Idle(t, c)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "pool"))
	})
}
