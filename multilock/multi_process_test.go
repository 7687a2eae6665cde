package multilock_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

func init() {
	workers["multi increment"] = multiIncrementWorker
	workers["multi hold"] = multiHoldWorker
}

// multiOn returns the locks a, b and c, each of the next of these clients.
func multiOn(ctx context.Context, addrs []string, opts ...redlatch.Option) (clients []*redlatch.Client, members []lock.Locker, err error) {
	for _, addr := range addrs {
		c, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{addr}}, opts...)
		if err != nil {
			return nil, nil, err
		}
		clients = append(clients, c)
	}
	for i, name := range []string{"a", "b", "c"} {
		members = append(members, clients[i%len(clients)].Lock(name))
	}
	return clients, members, nil
}

// multiIncrementWorker increments the counter on the first server under all three locks until
// it reaches the goal. Each time it acquires them in a random order. It prints the number of
// its increments and its longest wait in milliseconds.
func multiIncrementWorker(args []string) error {
	goal, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	const goroutines = 4
	ctx := context.Background()
	clients, members, err := multiOn(ctx, args[1:])
	if err != nil {
		return err
	}
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: args[1:2], DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	fmt.Println("ready")
	for { // until all are done
		if n, err := conn.Do(ctx, conn.B().Exists().Key("go").Build()).AsInt64(); err != nil {
			return err
		} else if n == 1 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	type result struct {
		mine    int
		longest time.Duration
		err     error
	}
	results := make(chan result)
	for range goroutines {
		go func() {
			mine, longest := 0, time.Duration(0)
			for done := false; !done; {
				mixed := make([]lock.Locker, len(members))
				for i, j := range rand.Perm(len(members)) {
					mixed[i] = members[j]
				}
				begin := time.Now()
				err := clients[0].MultiLock(mixed...).Do(ctx, func(ctx context.Context) error {
					longest = max(longest, time.Since(begin))
					n, err := conn.Do(ctx, conn.B().Get().Key("counter").Build()).AsInt64()
					if err != nil {
						return err
					}
					if done = n >= int64(goal); done {
						return nil
					}
					mine++
					return conn.Do(ctx, conn.B().Set().Key("counter").Value(strconv.FormatInt(n+1, 10)).Build()).Error()
				})
				if err != nil {
					results <- result{err: err}
					return
				}
			}
			results <- result{mine: mine, longest: longest}
		}()
	}
	mine, longest := 0, time.Duration(0)
	for range goroutines {
		r := <-results
		if r.err != nil {
			return r.err
		}
		mine, longest = mine+r.mine, max(longest, r.longest)
	}
	for _, c := range clients {
		c.Close()
	}
	fmt.Println(mine, longest.Milliseconds())
	return nil
}

// Processes that acquire the same locks in any order all make progress, without a deadlock.
func TestMultiProcessesIncrementACounterExactly(t *testing.T) {
	// Two processes that block each other are idle for 5 s until one gives up. If that
	// happened once in a hundred rounds, the test would take ten times as long.
	const perRound, start = 10 * time.Millisecond, 20 * time.Second
	processes := harness.Size(3, 8)
	harness.EachBusy(t, func(t *testing.T, s *testserver.Server) {
		several := []string{s.Addr, harness.Server(t, s.Program).Addr, harness.Server(t, s.Program).Addr}
		for _, run := range []struct {
			goal  int
			addrs []string
		}{{harness.Size(600, 10_000), several[:1]}, {harness.Size(200, 2_000), several}} {
			t.Run(fmt.Sprint(len(run.addrs), " servers"), func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				harness.Do(t, s.Addr, "SET", "counter", "0")
				var procs []*harness.Process
				for range processes {
					p := harness.Spawn(t, "multi increment", append([]string{strconv.Itoa(run.goal)}, run.addrs...)...)
					require.Equal(t, "ready", p.Line(30*time.Second))
					procs = append(procs, p)
				}
				begin := time.Now()
				harness.Do(t, s.Addr, "SET", "go", "1")
				bound := start + time.Duration(run.goal)*perRound
				sum, longest := 0, 0
				for _, p := range procs {
					var n, wait int
					_, err := fmt.Sscan(p.Line(bound), &n, &wait)
					require.NoError(t, err)
					sum, longest = sum+n, max(longest, wait)
				}
				t.Logf("%d rounds in %v, longest wait %d ms", run.goal, time.Since(begin), longest)
				require.Less(t, time.Since(begin), bound)
				// A lost increment would have needed another round.
				require.Equal(t, run.goal, sum)
				counter, err := testserver.Query(s.Addr, "GET", "counter")
				require.NoError(t, err)
				require.Equal(t, []string{strconv.Itoa(run.goal)}, counter)
				harness.Do(t, s.Addr, "DEL", "counter", "go")
				for _, addr := range run.addrs {
					harness.NothingLeft(t, addr)
				}
			})
		}
	})
}

// multiHoldWorker acquires the locks and waits to be killed.
func multiHoldWorker(args []string) error {
	timeout, err := time.ParseDuration(args[0])
	if err != nil {
		return err
	}
	clients, members, err := multiOn(context.Background(), args[1:], redlatch.WithWatchdogTimeout(timeout))
	if err != nil {
		return err
	}
	h, err := clients[0].MultiLock(members...).Lock(context.Background())
	if err != nil {
		return err
	}
	<-h.Context().Done()
	return context.Cause(h.Context())
}

// If a process is killed while it waits for its last lock, the others are free when their
// leases expire.
func TestMultiProcessKilledDuringAcquisition(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		m := c.MultiLock(c.Lock("c"), c.Lock("b"), c.Lock("a"))
		theirs := multiMust(t, c.Lock("c"))
		p := harness.Spawn(t, "multi hold", timeout.String(), s.Addr)
		harness.Eventually(t, 30*time.Second, "it holds two of them", func() bool {
			return harness.IsLocked(t, c.Lock("a")) && harness.IsLocked(t, c.Lock("b"))
		})
		// The locks that it holds are renewed past the first lease.
		time.Sleep(timeout * 5 / 4)
		for _, name := range []string{"a", "b"} {
			_, err := c.Lock(name).TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
		}
		p.Kill()
		begin := time.Now()
		require.NoError(t, theirs.Unlock(t.Context()))
		require.NoError(t, m.Do(t.Context(), multiNothing, lock.Wait(10*time.Second)))
		require.Less(t, time.Since(begin), timeout+multiSlack)
		harness.NothingLeft(t, s.Addr)
	})
}
