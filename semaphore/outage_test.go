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

// Clients take and give back several permits at once, and some give up, while connections
// are killed, or requests overtake one another and the server forgets its scripts. No more
// permits are out than there are, and in the end the sum is exact. What one permit can show
// of an outage is tested for all kinds, in internal/contract.
func TestPermitsAreExactInTrouble(t *testing.T) {
	const total, goroutines = 5, 4
	type row struct {
		kind, name string
		opt        rueidis.ClientOption
		trouble    [][]string
	}
	kill := [][]string{{"CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"}, {"CLIENT", "KILL", "TYPE", "pubsub"}}
	flush := [][]string{{"SCRIPT", "FLUSH"}}
	var rows []row
	for _, kind := range faultKinds {
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
			c, err := redlatch.Wrap(t.Context(), conn, faultQuietly)
			require.NoError(t, err)
			t.Cleanup(c.Close)
			clients = append(clients, c)
		}
		first := takerOf(clients[0], s, r.kind, "pool")
		_, err := first.set(t.Context(), total)
		require.NoError(t, err)
		patient, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		over := make(chan struct{})
		var troubling, wg sync.WaitGroup
		troubling.Go(func() {
			for {
				select {
				case <-over:
					return
				case <-time.After(20 * time.Millisecond):
					for _, words := range r.trouble {
						_, _ = testserver.Command(s.Addr, words...)
					}
				}
			}
		})
		var mu sync.Mutex
		out, most, got := 0, 0, 0
		for _, c := range clients {
			for range goroutines {
				wg.Go(func() {
					k := takerOf(c, s, r.kind, "pool")
					for range rounds {
						n := 1 + rand.N(total)
						ctx, cancel := patient, context.CancelFunc(func() {})
						if rand.N(3) == 0 {
							ctx, cancel = context.WithTimeout(ctx, rand.N(20*time.Millisecond))
						}
						err := k.acquire(ctx, n)
						cancel()
						if err != nil {
							continue
						}
						mu.Lock()
						out, got = out+n, got+1
						most = max(most, out)
						mu.Unlock()
						time.Sleep(rand.N(2 * time.Millisecond)) // others try meanwhile
						mu.Lock()
						out -= n
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
		troubling.Wait()
		t.Logf("%d of %d acquisitions succeeded, with %d permits out at most", got, len(clients)*goroutines*rounds, most)
		require.Positive(t, got)
		require.LessOrEqual(t, most, total)
		require.NoError(t, patient.Err(), "a waiter hangs")
		harness.Idle(t, clients...)
		requireExact(t, total, first)
		// Who could not leave the line is out of it in time.
		harness.Eventually(t, 10*time.Second+faultSlack, "all can be had", func() bool { return first.try(t.Context(), total) == nil })
		require.NoError(t, first.release(t.Context()))
		requireExact(t, total, first)
	})
}

// outageTimeout is the watchdog timeout of the workers. The place time is a third of it.
const outageTimeout = 3 * time.Second

// permitWaiter waits for permits, gives them back, and says so.
func permitWaiter(args []string) error {
	c, err := redlatch.New(context.Background(), rueidis.ClientOption{InitAddress: args[:1]},
		redlatch.WithWatchdogTimeout(outageTimeout), faultQuietly)
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

// The process whose request is first in line is stopped, or killed: others are served
// when its place time is over, and it is served when it goes on.
func TestTheFirstInLineIsStopped(t *testing.T) {
	const place = outageTimeout / 3
	type row struct {
		kind string
		how  syscall.Signal
	}
	var rows []row
	for _, kind := range faultKinds {
		rows = append(rows, row{kind, syscall.SIGSTOP}, row{kind, syscall.SIGKILL})
	}
	harness.EachOf(t, rows, func(r row) string { return r.kind + "/" + r.how.String() }, func(t *testing.T, s *testserver.Server, r row) {
		k := takerOf(harness.Client(t, s, faultQuietly), s, r.kind, "pool")
		_, err := k.set(t.Context(), 2)
		require.NoError(t, err)
		require.NoError(t, k.try(t.Context(), 2))
		p := harness.Spawn(t, "permit waiter", s.Addr, r.kind)
		require.Equal(t, "waiting", p.Line(30*time.Second))
		harness.Eventually(t, faultSoon, "it is in line", func() bool { return standsInLine(t, s.Addr, "pool") == ":1" })
		p.Signal(r.how)
		began := time.Now()
		require.NoError(t, k.release(t.Context()))
		require.NoError(t, k.acquire(t.Context(), 1))
		require.Less(t, time.Since(began), place+faultSlack)
		requireExact(t, 2, k)
		require.NoError(t, k.release(t.Context()))
		if r.how == syscall.SIGSTOP {
			p.Signal(syscall.SIGCONT)
			require.Equal(t, "done", p.Line(faultSoon))
			p.Ended(faultSoon)
		}
		requireExact(t, 2, k)
	})
}
