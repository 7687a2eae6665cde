package semaphore_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// Clients acquire and release several permits at once, and some give up, while connections are
// killed, requests are reordered and scripts flushed. The number of acquired permits never
// exceeds the total, and the number of free permits is exact in the end. internal/contract has
// the tests of outages with one permit.
func TestPermitsAreExactDuringFaults(t *testing.T) {
	const total, goroutines = 5, 4
	type row struct {
		kind, name string
		opt        rueidis.ClientOption
		faults     [][]string
	}
	kill := [][]string{{"CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"}, {"CLIENT", "KILL", "TYPE", "pubsub"}}
	flush := [][]string{{"SCRIPT", "FLUSH"}}
	var rows []row
	for _, kind := range takerKinds {
		rows = append(rows,
			row{kind, "connections killed", rueidis.ClientOption{PipelineMultiplex: -1, DisableRetry: true}, kill},
			row{kind, "multiplexed", rueidis.ClientOption{PipelineMultiplex: 3}, flush},
			row{kind, "RESP2", rueidis.ClientOption{AlwaysRESP2: true}, flush},
		)
	}
	rounds := harness.Size(6, 25)
	harness.EachOf(t, rows, func(r row) string { return r.kind + "/" + r.name }, func(t *testing.T, s *testserver.Server, r row) {
		var clients []*redlatch.Client
		for range 3 {
			opt := r.opt
			opt.InitAddress, opt.DisableCache = []string{s.Addr}, true
			conn, err := rueidis.NewClient(opt)
			require.NoError(t, err)
			t.Cleanup(conn.Close)
			c, err := redlatch.Wrap(t.Context(), conn, quiet)
			require.NoError(t, err)
			t.Cleanup(c.Close)
			clients = append(clients, c)
		}
		first := takerOf(clients[0], s, r.kind, "pool")
		_, err := first.set(t.Context(), total)
		require.NoError(t, err)
		bounded, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		over := make(chan struct{})
		var faulting, wg sync.WaitGroup
		faulting.Go(func() {
			for {
				select {
				case <-over:
					return
				case <-time.After(20 * time.Millisecond):
					for _, words := range r.faults {
						_, _ = testserver.Command(s.Addr, words...)
					}
				}
			}
		})
		var mu sync.Mutex
		acquired, most, got := 0, 0, 0
		for _, c := range clients {
			for range goroutines {
				wg.Go(func() {
					k := takerOf(c, s, r.kind, "pool")
					for range rounds {
						n := 1 + rand.N(total)
						ctx, cancel := bounded, context.CancelFunc(func() {})
						if rand.N(3) == 0 {
							ctx, cancel = context.WithTimeout(ctx, rand.N(20*time.Millisecond))
						}
						err := k.acquire(ctx, n)
						cancel()
						if err != nil {
							continue
						}
						mu.Lock()
						acquired, got = acquired+n, got+1
						most = max(most, acquired)
						mu.Unlock()
						time.Sleep(rand.N(2 * time.Millisecond))
						mu.Lock()
						acquired -= n
						mu.Unlock()
						if err := k.release(context.Background()); err != nil {
							assert.ErrorIs(t, err, lock.ErrIndeterminate)
						}
					}
				})
			}
		}
		wg.Wait()
		close(over)
		faulting.Wait()
		t.Logf("%d of %d acquisitions succeeded, with at most %d permits acquired", got, len(clients)*goroutines*rounds, most)
		require.Positive(t, got)
		require.LessOrEqual(t, most, total)
		require.NoError(t, bounded.Err(), "a waiter hangs")
		harness.Idle(t, clients...)
		requireExact(t, total, first)
		// A client that could not leave the wait queue times out.
		harness.Eventually(t, 10*time.Second+outageSlack, "all permits can be acquired", func() bool { return first.try(t.Context(), total) == nil })
		require.NoError(t, first.release(t.Context()))
		requireExact(t, total, first)
	})
}

// outageTimeout is the watchdog timeout of the workers, and three times their heartbeat timeout.
const outageTimeout = 3 * time.Second

// permitWaiter is a worker that acquires and releases two permits.
func permitWaiter(args []string) error {
	c, err := redlatch.New(context.Background(), rueidis.ClientOption{InitAddress: args[:1]},
		redlatch.WithWatchdogTimeout(outageTimeout), quiet)
	if err != nil {
		return err
	}
	defer c.Close()
	k := takerOf(c, &testserver.Server{Addr: args[0]}, args[1], "pool")
	fmt.Println("waiting")
	if err := k.acquire(context.Background(), 2); err != nil {
		return err
	}
	if err := k.release(context.Background()); err != nil {
		return err
	}
	fmt.Println("done")
	return nil
}

// The process of the first request in the wait queue is stopped or killed. Others are served after
// its heartbeat timeout, and it is served after it resumes.
func TestFirstInWaitQueueIsStopped(t *testing.T) {
	const heartbeatTimeout = outageTimeout / 3
	type row struct {
		kind string
		how  syscall.Signal
	}
	var rows []row
	for _, kind := range takerKinds {
		rows = append(rows, row{kind, syscall.SIGSTOP}, row{kind, syscall.SIGKILL})
	}
	harness.EachOf(t, rows, func(r row) string { return r.kind + "/" + r.how.String() }, func(t *testing.T, s *testserver.Server, r row) {
		k := takerOf(harness.Client(t, s, quiet), s, r.kind, "pool")
		_, err := k.set(t.Context(), 2)
		require.NoError(t, err)
		require.NoError(t, k.try(t.Context(), 2))
		p := harness.Spawn(t, "permit waiter", s.Addr, r.kind)
		require.Equal(t, "waiting", p.Line(30*time.Second))
		harness.Eventually(t, soon, "the client is queued", func() bool { return queueLength(t, s.Addr, "pool") == ":1" })
		p.Signal(r.how)
		began := time.Now()
		require.NoError(t, k.release(t.Context()))
		require.NoError(t, k.acquire(t.Context(), 1))
		require.Less(t, time.Since(began), heartbeatTimeout+outageSlack)
		requireExact(t, 2, k)
		require.NoError(t, k.release(t.Context()))
		if r.how == syscall.SIGSTOP {
			p.Signal(syscall.SIGCONT)
			require.Equal(t, "done", p.Line(soon))
			p.Ended(soon)
		}
		requireExact(t, 2, k)
	})
}
