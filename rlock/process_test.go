package rlock_test

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
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

var workers = map[string]func(args []string) error{
	"increment": incrementWorker,
	"hold":      harness.HoldWorker(func(kind string, c *redlatch.Client) lock.Locker { return ofKind(kind)(c, "orders") }),
}

const goroutinesPerProcess = 64

// incrementWorker adds one to the counter under the lock, with many goroutines,
// until it has reached the goal, and prints how often it did.
func incrementWorker(args []string) error {
	addr, kind := args[0], args[1]
	goal, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	ctx := context.Background()
	c, err := redlatch.Open(ctx, "redis://"+addr)
	if err != nil {
		return err
	}
	defer c.Close()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}, DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	l := ofKind(kind)(c, "counter:lock")
	fmt.Println("ready")

	// All processes are ready before the first of them may win.
	for {
		if n, err := conn.Do(ctx, conn.B().Exists().Key("go").Build()).AsInt64(); err != nil {
			return err
		} else if n == 1 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	var mine atomic.Int64
	errs := make(chan error, goroutinesPerProcess)
	var wg sync.WaitGroup
	for range goroutinesPerProcess {
		wg.Go(func() {
			for done := false; !done; {
				err := l.Do(ctx, func(ctx context.Context) error {
					n, err := conn.Do(ctx, conn.B().Get().Key("counter").Build()).AsInt64()
					if err != nil {
						return err
					}
					if n >= int64(goal) {
						done = true
						return nil
					}
					mine.Add(1)
					return conn.Do(ctx, conn.B().Set().Key("counter").Value(strconv.FormatInt(n+1, 10)).Build()).Error()
				})
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		return err
	}
	fmt.Println(mine.Load())
	return nil
}

func TestProcessesIncrementACounterExactly(t *testing.T) {
	const processes = 4
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, k := range []struct {
			kind string
			goal int
			fair bool // whether every process gets its share
		}{{"lock", 20_000, true}, {"fenced", 4_000, true}, {"spin", 2_000, false}, {"plain", 20_000, true}} {
			t.Run(k.kind, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				harness.Do(t, s.Addr, "SET", "counter", "0")
				var procs []*harness.Process
				for range processes {
					p := harness.Spawn(t, "increment", s.Addr, k.kind, strconv.Itoa(k.goal))
					require.Equal(t, "ready", p.Line(30*time.Second))
					procs = append(procs, p)
				}
				harness.Do(t, s.Addr, "SET", "go", "1")
				sum, least, most := 0, k.goal, 0
				for _, p := range procs {
					n, err := strconv.Atoi(p.Line(3 * time.Minute))
					require.NoError(t, err)
					sum, least, most = sum+n, min(least, n), max(most, n)
				}
				t.Logf("shares of %d: from %d to %d", k.goal, least, most)
				// An increment that was lost would have had to be made again.
				assert.Equal(t, k.goal, sum)
				conn := harness.Conn(t, s.Addr)
				n, err := conn.Do(t.Context(), conn.B().Get().Key("counter").Build()).AsInt64()
				require.NoError(t, err)
				assert.Equal(t, int64(k.goal), n)
				if k.fair {
					assert.LessOrEqual(t, most, 2*least, "the processes' shares")
				}
				locked, err := conn.Do(t.Context(), conn.B().Exists().Key("counter:lock").Build()).AsInt64()
				require.NoError(t, err)
				assert.Zero(t, locked)
			})
		}
	})
}

func TestAWaiterGetsInWhenTheHolderWasKilled(t *testing.T) {
	const timeout = 2 * time.Second
	eachKind(t, func(t *testing.T, s *testserver.Server, of func(*redlatch.Client, string) harness.Lock) {
		_, kind := splitName(t.Name())
		p := harness.Spawn(t, "hold", s.Addr, kind, timeout.String())
		require.Equal(t, "holding", p.Line(30*time.Second))
		l := of(harness.Client(t, s), "orders")

		// It is renewed past its first lease.
		_, err := l.Lock(t.Context(), lock.Wait(timeout+timeout/2))
		require.ErrorIs(t, err, lock.ErrNotAcquired)

		p.Signal(syscall.SIGKILL)
		begin := time.Now()
		h := mustLock(t, l)
		assert.Less(t, time.Since(begin), timeout+time.Second)
		require.NoError(t, h.Unlock(t.Context()))
	})
}

func TestAHolderStoppedPastItsLeaseHearsOfIt(t *testing.T) {
	const (
		timeout = time.Second
		// bound is how soon a holder that goes on hears that its lease is over. All
		// it takes is one turn of its scheduler; where the machine has no time for
		// that, another try is as good.
		bound = 100 * time.Millisecond
		tries = 5
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).Lock("orders")
		best := time.Duration(math.MaxInt64)
		for try := 0; try < tries && best > bound; try++ {
			p := harness.Spawn(t, "hold", s.Addr, "lock", timeout.String())
			require.Equal(t, "holding", p.Line(30*time.Second))
			p.Signal(syscall.SIGSTOP)
			h := mustLock(t, l)
			before := harness.PTTL(t, s.Addr, "orders")
			began := time.Now()
			p.Signal(syscall.SIGCONT)
			told, err := strconv.ParseInt(p.Line(5*time.Second), 10, 64)
			require.NoError(t, err)
			heard := time.Unix(0, told).Sub(began)
			require.Positive(t, heard)
			best = min(best, heard)
			require.Contains(t, p.Line(5*time.Second), lock.ErrLost.Error())
			require.Contains(t, p.Line(5*time.Second), lock.ErrLost.Error())
			// Whoever has it now has noticed nothing.
			after, passed := harness.PTTL(t, s.Addr, "orders"), time.Since(began)
			require.LessOrEqual(t, after, before)
			require.GreaterOrEqual(t, after, before-passed.Milliseconds()-2) // both are rounded
			require.Equal(t, ":1", harness.Do(t, s.Addr, "HLEN", "orders"))
			require.Equal(t, 1, harness.HoldCount(t, l, h.Owner()))
			require.NoError(t, h.Context().Err())
			require.NoError(t, h.Unlock(t.Context()))
		}
		t.Logf("told %v after it went on", best)
		require.LessOrEqual(t, best, bound)
	})
}
