package semaphore_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

const (
	key      = "orders"
	clientID = "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11"
)

// loss is the fault of a script call without a reply.
type loss struct {
	request bool // it does not run
	pause   time.Duration
	then    func()
}

// lossyConn is a connection to a server with a virtual clock.
type lossyConn struct {
	*lockstep.Client
	mu   sync.Mutex
	next *loss // of the next script call
	runs int
}

// Do implements rueidis.Client.
func (c *lossyConn) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !strings.HasPrefix(cmd.Commands()[0], "EVAL") {
		return c.Client.Do(ctx, cmd)
	}
	next := c.next
	if next == nil || !next.request {
		reply := c.Client.Do(ctx, cmd)
		if err, ok := rueidis.IsRedisErr(reply.Error()); ok && err.IsNoScript() {
			return reply
		}
		c.runs++
		if next == nil {
			return reply
		}
	}
	c.next = nil
	c.Now += next.pause.Milliseconds()
	if next.then != nil {
		next.then()
	}
	late, cancel := context.WithDeadline(ctx, time.Now())
	defer cancel()
	return c.Client.Client.Do(late, c.B().Ping().Build())
}

// DoMulti implements rueidis.Client.
func (c *lossyConn) DoMulti(ctx context.Context, cmds ...rueidis.Completed) []rueidis.RedisResult {
	replies := make([]rueidis.RedisResult, len(cmds))
	for i, cmd := range cmds {
		replies[i] = c.Do(ctx, cmd)
	}
	return replies
}

// onceTest is a session on a server with a virtual clock, and a semaphore with 3 permits.
type onceTest struct {
	*lossyConn
	t    *testing.T
	sess *session.Session
	all  *semaphore.Shared
	sem  *semaphore.Semaphore
}

func eachOnce(t *testing.T, test func(x *onceTest)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := &onceTest{t: t, lossyConn: &lossyConn{Client: lockstep.Connect(t, s.Addr, 0)}}
		x.Reset(1_700_000_000_000)
		x.sess = session.New(session.Config{
			Client: x.lossyConn, ID: clientID, WatchdogTimeout: 30 * time.Second, Turn: 10 * time.Millisecond,
			MapName: func(name string) string { return name }, Logger: slog.New(slog.DiscardHandler),
		})
		t.Cleanup(x.sess.Close)
		x.sess.Publish = "PUBLISH"
		x.all = semaphore.NewShared(engine.New(x.sess))
		x.sem = semaphore.New(x.all, key)
		require.NoError(t, only(x.sem.TrySetPermits(t.Context(), 3)))
		test(x)
	})
}

// lose determines the fault of the next script call.
func (x *onceTest) lose(next loss) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.next = &next
}

func (x *onceTest) pass(d time.Duration) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.Now += d.Milliseconds()
}

// requireFree waits for the requests in the background and checks the number of free permits.
func (x *onceTest) requireFree(want int) {
	x.t.Helper()
	harness.Eventually(x.t, soon, "the background is idle", func() bool { return x.sess.Running() == 0 })
	free, err := x.sem.Available(x.t.Context())
	require.NoError(x.t, err)
	require.Equal(x.t, want, free)
}

// The process is stopped between two attempts of a release.
func TestReleaseCountsOnceHoweverLateItsRetry(t *testing.T) {
	eachOnce(t, func(x *onceTest) {
		for _, row := range []struct {
			loss
			known bool
			free  int
		}{
			{loss{pause: 0}, true, 3},
			{loss{pause: 70 * time.Second}, true, 3},
			{loss{pause: 5*time.Minute + 30*time.Second}, true, 3},
			{loss{pause: 7 * time.Minute}, true, 3},
			{loss{pause: 13 * time.Minute}, false, 3},
			{loss{pause: time.Hour}, false, 3},
			{loss{request: true, pause: 70 * time.Second}, true, 3},
			{loss{request: true, pause: 7 * time.Minute}, false, 2},
		} {
			require.NoError(x.t, x.sem.Acquire(x.t.Context(), 1))
			x.lose(row.loss)
			err := x.sem.Release(x.t.Context(), 1)
			if row.known {
				require.NoError(x.t, err)
			} else {
				require.ErrorIs(x.t, err, lock.ErrIndeterminate)
			}
			x.requireFree(row.free)
		}
	})
}

func TestLateUndoReturnsPermits(t *testing.T) {
	eachOnce(t, func(x *onceTest) {
		for _, pause := range []time.Duration{0, 70 * time.Second, 5 * time.Minute} {
			for _, request := range []bool{false, true} {
				x.lose(loss{request: request, pause: pause})
				require.ErrorIs(x.t, x.sem.TryAcquire(x.t.Context(), 2), lock.ErrIndeterminate)
				x.requireFree(3)
			}
		}
	})
}

// Only the first request after a change of a clock takes more round trips.
func TestWrongClockTakesMoreRoundTripsOnce(t *testing.T) {
	eachOnce(t, func(x *onceTest) {
		require.NoError(x.t, x.sem.Release(x.t.Context(), 1)) // loads the script
		for _, step := range []struct {
			change time.Duration
			runs   int
		}{{0, 1}, {50 * time.Second, 1}, {10 * time.Minute, 2}, {0, 1}, {-10 * time.Minute, 2}, {0, 1}} {
			x.pass(step.change)
			before := x.runs
			require.NoError(x.t, x.sem.Release(x.t.Context(), 1))
			require.Equal(x.t, step.runs, x.runs-before, "after %v", step.change)
		}
		x.requireFree(10)
	})
}

func TestUnansweredRequestsUseOneSlot(t *testing.T) {
	eachOnce(t, func(x *onceTest) {
		for range 5 {
			ctx, cancel := context.WithCancel(x.t.Context())
			x.lose(loss{then: cancel})
			require.ErrorIs(x.t, x.sem.AddPermits(ctx, 1), lock.ErrIndeterminate)
			x.lose(loss{})
			require.ErrorIs(x.t, x.sem.TryAcquire(x.t.Context(), 1), lock.ErrIndeterminate)
			x.requireFree(4)
			require.NoError(x.t, x.sem.AddPermits(x.t.Context(), -1))
		}
		x.Wait(x.Now)
		requests := x.State().Keys[wire.SemaphoreRequests(key, clientID)]
		require.Regexp(x.t, `^hash 1=[-0-9 ]*$`, requests.Is)
	})
}

// Goroutines of a client share a key for each semaphore, which expires.
func TestRequestsOfClientUseOneKey(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const goroutines, semaphores = 16, 3
		c := harness.Client(t, s)
		var wg sync.WaitGroup
		for range goroutines {
			wg.Go(func() {
				for n := range semaphores {
					sem := c.Semaphore(fmt.Sprint("orders", n), semaphore.Permits(goroutines))
					assert.NoError(t, errors.Join(sem.Acquire(t.Context(), 1), sem.Release(t.Context(), 1)))
				}
			})
		}
		wg.Wait()
		keys, err := testserver.Query(s.Addr, "KEYS", "redlatch_sc_request:*")
		require.NoError(t, err)
		require.Len(t, keys, 2*semaphores, "requests, and times of creation")
		for _, key := range keys {
			require.Positive(t, harness.PTTL(t, s.Addr, key), key)
		}
	})
}
