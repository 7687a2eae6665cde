package contract_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
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
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// workers are what processes of this test program do.
var workers = map[string]func(args []string) error{
	"hold": holdWorker,
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
					require.Equal(t, 1, harness.HoldCount(t, k.rivalLock(c, k.name), lock.OwnerOf(h)))
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

// Clients, each of which is like a process, have to share a lock: each passes it on to its own waiters for a
// turn, and then releases it for all. One that is alone for a while releases it more rarely.
func TestAProcessDoesNotKeepALock(t *testing.T) {
	const clients, goroutines = 4, 16
	window := time.Duration(harness.Size(400, 2000)) * time.Millisecond
	channels := map[string]string{
		"lock": wire.LockChannel("lock"), "fenced": wire.LockChannel("fenced"), "plain": wire.PlainChannel("plain"), "write": wire.RWChannel("write"),
	}
	harness.EachBusy(t, func(t *testing.T, s *testserver.Server) {
		var all []*redlatch.Client
		for range clients {
			all = append(all, harness.Client(t, s))
		}
		together(t, s, func(k kind) bool { return channels[k.name] != "" }, func(t *testing.T, k kind) {
			var released atomic.Int64
			messages := harness.Messages(t, s.Addr, channels[k.name])
			go func() {
				for {
					select {
					case <-messages:
						released.Add(1)
					case <-t.Context().Done():
						return
					}
				}
			}()
			begin := make(chan struct{})
			sum, had, over := 0, make([]int, clients), false // protected by the lock alone
			turns := int64(window / redlatch.DefaultTurn)
			var end, latest time.Time
			var callers sync.WaitGroup
			for i, c := range all {
				for range goroutines {
					callers.Go(func() {
						<-begin
						for more := true; more; {
							assert.NoError(t, k.of(c, k.name).Do(context.Background(), func(context.Context) error {
								sum++
								had[i]++
								// A turn lasts longer on a busy machine, but it ends, and the others have theirs.
								few := released.Load() < turns/4 || slices.Min(had) <= sum/clients/5
								over = over || time.Now().After(latest) || time.Now().After(end) && !few
								more = !over
								return nil
							}))
						}
					})
				}
			}
			end = time.Now().Add(window)
			latest = end.Add(soon)
			close(begin)
			callers.Wait()
			require.GreaterOrEqual(t, released.Load(), turns/4, "it was released for all")
			total := 0
			for _, n := range had {
				total += n
				// The shares are not equal: clients also compete for time on the machine.
				require.Greater(t, n, sum/clients/10, "%v", had)
			}
			require.Equal(t, sum, total)
		})
	})
}
