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

// startQueued starts to acquire a permit and returns when the client is in the wait queue.
func (k *taker) startQueued(t testing.TB, ctx context.Context, c *redlatch.Client) <-chan error {
	t.Helper()
	done := k.start(ctx, 1)
	harness.Eventually(t, soon, "the client is queued", func() bool { return queueLength(t, k.addr, k.name) == ":1" })
	harness.Waits(t, 1, c)
	return done
}

// All waiters of a process share one queue position. When the first waiter leaves, the next
// one gets its own, in whatever order the requests arrive.
func TestNextWaiterJoinsWaitQueueAfterLeave(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range takerKinds {
			c := harness.Client(t, s)
			ctx := t.Context()
			other := takerOf(harness.Client(t, s), s, kind, kind)
			_, err := other.set(ctx, 1)
			require.NoError(t, err)
			require.NoError(t, other.try(ctx, 1))
			position := func() string {
				queue, err := testserver.Query(s.Addr, "ZRANGE", wire.SemaphoreWaiting(kind), "0", "0", "WITHSCORES")
				require.NoError(t, err)
				return strings.Join(queue, " ")
			}
			first, leave := context.WithCancel(ctx)
			leaving := takerOf(c, s, kind, kind).startQueued(t, first, c)
			for range 10 {
				before := position()
				next, leaveNext := context.WithCancel(ctx)
				waiter := takerOf(c, s, kind, kind).start(next, 1)
				harness.Waits(t, 2, c)
				leave()
				harness.NotAcquired(t, await(t, leaving))
				// Well before its next heartbeat.
				harness.Eventually(t, 3*time.Second, "the next waiter is queued", func() bool { return position() != "" && position() != before })
				harness.Waits(t, 1, c)
				leave, leaving = leaveNext, waiter
			}
			leave()
			harness.NotAcquired(t, await(t, leaving))
			harness.Idle(t, c)
			require.Empty(t, position())
			require.NoError(t, other.release(ctx))
		}
	})
}

// An attempt is sent before the request may join the wait queue, and answered after that.
func TestLateReplyDoesNotDelayQueueing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		loadScripts(t, s.Addr)
		ctx := t.Context()
		for kind, script := range map[string]string{plainKind: "acquire.lua", permitKind: "permit_acquire.lua"} {
			c, g := harness.GatedClient(t, s)
			elsewhere := harness.Client(t, s)
			one, rest := takerOf(elsewhere, s, kind, kind), takerOf(elsewhere, s, kind, kind)
			_, err := one.set(ctx, 2)
			require.NoError(t, err)
			require.NoError(t, one.try(ctx, 1))
			require.NoError(t, rest.try(ctx, 1))
			first, second := takerOf(c, s, kind, kind), takerOf(c, s, kind, kind)
			served := first.startQueued(t, ctx, c)
			var next <-chan error
			g.Keep(t, sha(t, script), 1, func() {
				next = second.start(ctx, 1)
				harness.Waits(t, 2, c)
				require.NoError(t, one.release(ctx))
			})
			<-time.After(150 * time.Millisecond) // longer than bargingTime
			require.Equal(t, ":0", queueLength(t, s.Addr, kind))
			require.NoError(t, g.Open())
			require.NoError(t, await(t, served))
			harness.Eventually(t, time.Second, "the next waiter is queued", func() bool { return queueLength(t, s.Addr, kind) == ":1" })
			require.NoError(t, rest.release(ctx))
			require.NoError(t, first.release(ctx))
			require.NoError(t, await(t, next))
			require.NoError(t, second.release(ctx))
		}
	})
}

// Close waits for a release without a reply.
func TestCloseWaitsForReleases(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range takerKinds {
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
				harness.Eventually(t, soon, "the request is in progress", func() bool { return blocked(t, s.Addr) })
				closed := make(chan struct{})
				go func() {
					c.Close()
					close(closed)
				}()
				over, cancel := context.WithCancel(t.Context())
				cancel() // the server does not answer
				harness.Eventually(t, soon, "the client is closing", func() bool {
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

// Permits of a waiter that was served after it had left are released, unless the semaphore was
// deleted meanwhile: the release would create it again.
func TestGiveBackDoesNotCreateSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		loadScripts(t, s.Addr)
		c, g := harness.GatedClient(t, s)
		mine, other := takerOf(c, s, plainKind, "pool"), takerOf(harness.Client(t, s), s, plainKind, "pool")
		made, err := other.set(t.Context(), 0)
		require.NoError(t, err)
		require.True(t, made)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		waits := []<-chan error{mine.startQueued(t, ctx, c), mine.start(ctx, 1)}
		harness.Waits(t, 2, c)
		g.Keep(t, sha(t, "acquire.lua"), 1, func() { require.NoError(t, other.plain.Release(t.Context(), 2)) })
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
