package contract_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// workers are what processes of this test program do.
var workers = map[string]func(args []string) error{
	"hold":      holdWorker,
	"increment": incrementWorker,
}

// spawnTime is how long a process may take to begin, on a busy machine.
const spawnTime = 30 * time.Second

// holdWorker holds an object of every kind that has a lease, says so, and waits to be
// killed. Of each that it loses it says which, when, and how. Its arguments are the address
// of the server and the watchdog timeout.
func holdWorker(args []string) error {
	timeout, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	ctx := context.Background()
	c, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: args[:1]}, redlatch.WithWatchdogTimeout(timeout), quiet)
	if err != nil {
		return err
	}
	var lost sync.WaitGroup
	var out sync.Mutex
	for _, k := range choose(leased) {
		h, err := k.of(c, k.name).Lock(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", k.name, err)
		}
		lost.Go(func() {
			<-h.Context().Done()
			now := time.Now().UnixNano()
			told, unlocked := context.Cause(h.Context()), h.Unlock(ctx)
			out.Lock()
			defer out.Unlock()
			fmt.Printf("%s\t%d\t%v\t%v\n", k.name, now, errors.Is(told, lock.ErrLost), errors.Is(unlocked, lock.ErrLost))
		})
	}
	fmt.Println("holding")
	lost.Wait()
	return nil
}

// A process that holds objects of every kind is killed, or stopped for longer than its
// leases. Who waits gets in when these are over, and a process that goes on hears at once
// that it holds nothing any more.
func TestAHolderIsKilledOrStopped(t *testing.T) {
	const (
		timeout = 2 * time.Second
		slack   = 2500 * time.Millisecond
		// heard is how soon a holder that goes on hears that its lease is over. All it takes
		// is one turn of its scheduler. Where the machine has no time for that, another try is as good.
		heard = 100 * time.Millisecond
		tries = 5
	)
	harness.EachOf(t, []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP}, syscall.Signal.String, func(t *testing.T, s *testserver.Server, how syscall.Signal) {
		c := harness.Client(t, s)
		best := time.Duration(math.MaxInt64)
		for try := 0; try < tries && (how == syscall.SIGSTOP && best > heard || try == 0); try++ {
			for _, k := range choose(leased) {
				k.prepare(t, s.Addr, k.name)
			}
			p := harness.Spawn(t, "hold", s.Addr, timeout.String())
			require.Equal(t, "holding", p.Line(spawnTime))
			var begin, resumed time.Time
			interrupted := barrierOf(len(choose(leased)), func() {
				<-time.After(timeout) // they are renewed past their first leases
				p.Signal(how)
				begin = time.Now()
			})
			var mu sync.Mutex
			told := map[string][]string{}
			goesOn := barrierOf(len(choose(leased)), func() {
				resumed = time.Now()
				p.Signal(syscall.SIGCONT)
				if how == syscall.SIGSTOP {
					for range choose(leased) {
						line := strings.Split(p.Line(2*soon), "\t")
						told[line[0]] = line[1:]
					}
					p.Ended(soon)
				}
			})
			together(t, s, leased, func(t *testing.T, k kind) {
				happen, goOn := interrupted.join(t), goesOn.join(t)
				type result struct {
					h   lock.Hold
					err error
				}
				got := make(chan result, 1)
				go func() {
					h, err := k.rival(c, k.name).Lock(context.Background())
					got <- result{h, err}
				}()
				happen()
				require.Empty(t, got)
				var h lock.Hold
				select {
				case r := <-got:
					require.NoError(t, r.err)
					h = r.h
				case <-time.After(timeout + slack - time.Since(begin)):
					require.FailNow(t, "the waiter does not get in")
				}
				var ttl int64
				measured := time.Now()
				if k.owned {
					ttl = harness.PTTL(t, s.Addr, k.name)
				}
				goOn()
				if how == syscall.SIGSTOP {
					mu.Lock()
					defer mu.Unlock()
					require.Len(t, told[k.name], 3)
					nanos, err := strconv.ParseInt(told[k.name][0], 10, 64)
					require.NoError(t, err)
					require.Positive(t, time.Unix(0, nanos).Sub(resumed))
					best = min(best, time.Unix(0, nanos).Sub(resumed))
					require.Equal(t, []string{"true", "true"}, told[k.name][1:])
				}
				// The present holder has noticed nothing.
				require.NoError(t, h.Context().Err())
				isTaken(t, k.rival(c, k.name))
				if k.owned {
					now := harness.PTTL(t, s.Addr, k.name)
					require.GreaterOrEqual(t, now, ttl-time.Since(measured).Milliseconds()-2) // both are rounded
					require.Equal(t, 1, harness.HoldCount(t, k.rivalLock(c, k.name), h.Owner()))
				}
				require.NoError(t, h.Unlock(t.Context()))
			})
			if t.Failed() {
				return
			}
		}
		if how == syscall.SIGSTOP {
			t.Logf("told %v after it went on", best)
			require.LessOrEqual(t, best, heard)
		}
	})
}

// counter is what processes increment under a lock of that kind.
func counterOf(k kind) string { return "counter of " + k.name }

// incrementWorker adds one to the counters under the locks of the kinds, with several
// goroutines for each, until they have reached the goal, and says how often it did. Under
// a shared lock the counter must stay as it is. Its arguments are the address of the server,
// the goal, the number of goroutines, and the kinds.
func incrementWorker(args []string) error {
	goal, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	goroutines, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	c, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: args[:1]}, quiet)
	if err != nil {
		return err
	}
	defer c.Close()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: args[:1], DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	get := func(key string) (int, error) {
		n, err := conn.Do(ctx, conn.B().Get().Key(key).Build()).AsInt64()
		return int(n), err
	}
	fmt.Println("ready")
	// All processes are ready before the first of them may win.
	for n := 0; n == 0; time.Sleep(time.Millisecond) {
		if n, err = get("go"); err != nil {
			return err
		}
	}

	increment := func(k kind, ctx context.Context, mine *atomic.Int64) (done bool, err error) {
		err = k.rival(c, k.name).Do(ctx, func(context.Context) error {
			n, err := get(counterOf(k))
			if err != nil || n >= goal {
				done = true
				return err
			}
			mine.Add(1)
			return conn.Do(ctx, conn.B().Set().Key(counterOf(k)).Value(strconv.Itoa(n+1)).Build()).Error()
		})
		if err != nil || !k.shared {
			return done, err
		}
		return done, k.of(c, k.name).Do(ctx, func(context.Context) error {
			before, err := get(counterOf(k))
			after, err2 := get(counterOf(k))
			if before != after {
				return fmt.Errorf("the counter went from %d to %d", before, after)
			}
			return errors.Join(err, err2)
		})
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for _, name := range args[3:] {
		k, mine := ofKind(name), new(atomic.Int64)
		var ofKind sync.WaitGroup
		for g := range goroutines {
			ofKind.Go(func() {
				ctx := ctx
				if g == 0 && k.owned {
					ctx = lock.WithOwner(ctx, c.NewOwner())
				}
				for done := false; !done; {
					var err error
					if done, err = increment(k, ctx, mine); err != nil {
						mu.Lock()
						errs = append(errs, fmt.Errorf("%s: %w", k.name, err))
						mu.Unlock()
						return
					}
				}
			})
		}
		wg.Go(func() {
			ofKind.Wait()
			mu.Lock()
			defer mu.Unlock()
			fmt.Printf("%s\t%d\n", name, mine.Load())
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// shares has processes increment counters and returns the share that each has had of each.
func shares(t *testing.T, s *testserver.Server, processes, goal, goroutines int, of ...kind) map[string][]int {
	t.Helper()
	harness.Do(t, s.Addr, "SET", "go", "0")
	args := []string{s.Addr, strconv.Itoa(goal), strconv.Itoa(goroutines)}
	for _, k := range of {
		k.prepare(t, s.Addr, k.name)
		harness.Do(t, s.Addr, "SET", counterOf(k), "0")
		args = append(args, k.name)
	}
	var all []*harness.Process
	for range processes {
		all = append(all, harness.Spawn(t, "increment", args...))
	}
	for _, p := range all {
		require.Equal(t, "ready", p.Line(spawnTime))
	}
	harness.Do(t, s.Addr, "SET", "go", "1")
	had := map[string][]int{}
	for _, p := range all {
		for range of {
			name, share, _ := strings.Cut(p.Line(3*time.Minute), "\t")
			n, err := strconv.Atoi(share)
			require.NoError(t, err)
			had[name] = append(had[name], n)
		}
		p.Ended(soon)
	}
	for _, k := range of {
		sum := 0
		for _, n := range had[k.name] {
			sum += n
		}
		// An increment that was lost would have had to be made again.
		require.Equal(t, goal, sum, "%s: %v", k.name, had[k.name])
		value, err := testserver.Query(s.Addr, "GET", counterOf(k))
		require.NoError(t, err)
		require.Equal(t, []string{strconv.Itoa(goal)}, value, k.name)
		harness.Do(t, s.Addr, "DEL", counterOf(k))
		k.unmake(t, s.Addr, k.name)
	}
	harness.Do(t, s.Addr, "DEL", "go")
	harness.NothingStays(t, s.Addr)
	t.Logf("shares: %v", had)
	return had
}

func TestProcessesIncrementACounterExactly(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		shares(t, s, harness.Size(3, 4), harness.Size(60, 2000), harness.Size(2, 8), kinds...)
	})
}

// The processes have to share a lock: each passes it on to its own waiters 16 times in a
// row, and then releases it for all. A process that is alone for a while, as the first to start
// is, releases it more rarely.
func TestAProcessDoesNotKeepALock(t *testing.T) {
	const processes, goroutines, handOffs = 4, 16, 16
	wanted := func(k kind) bool {
		return k.name == "lock" || k.name == "fenced" || k.name == "plain" || k.name == "write"
	}
	eachKind(t, wanted, func(t *testing.T, s *testserver.Server, k kind) {
		goal := harness.Size(1500, 10_000)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		had := shares(t, s, processes, goal, goroutines, k)[k.name]
		released := harness.Commands(t, harness.Conn(t, s.Addr))["publish"]
		t.Logf("released for all %d times", released)
		require.GreaterOrEqual(t, released, goal/(handOffs+1)/4)
		for _, n := range had {
			// The shares are not equal: a process also competes for time on the machine.
			require.Greater(t, n, goal/processes/10)
		}
	})
}
