package semaphore_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
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

const (
	limit      = 10
	goroutines = 64
	longest    = 3 * time.Millisecond // that a worker means to keep permits
)

// enter counts permits that come into use in one process and returns how many are in
// use in all. The test keeps in the set "dead" the processes that do not run any more.
var enter = rueidis.NewLuaScript(`
redis.call('HINCRBY', 'inuse', ARGV[1], ARGV[2])
local all, sum = redis.call('HGETALL', 'inuse'), 0
for i = 1, #all, 2 do
	if redis.call('SISMEMBER', 'dead', all[i]) == 0 then
		sum = sum + all[i + 1]
	end
end
return sum`)

// job is what a process of shareWorker has to do.
type job struct {
	addr     string
	kind     string
	id       string // of the process, among all
	sizes    []int  // of requests
	watchdog time.Duration
}

func (j job) args() []string {
	sizes := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(j.sizes)), ","), "[]")
	return []string{j.addr, j.kind, j.id, sizes, j.watchdog.String()}
}

func parseJob(args []string) (j job, err error) {
	j = job{addr: args[0], kind: args[1], id: args[2]}
	for s := range strings.SplitSeq(args[3], ",") {
		n, err := strconv.Atoi(s)
		if err != nil {
			return j, err
		}
		j.sizes = append(j.sizes, n)
	}
	j.watchdog, err = time.ParseDuration(args[4])
	return j, err
}

// taker returns what takes n permits of the semaphore "permits" and returns how they
// are given back.
func (j job) taker(c *redlatch.Client) func(ctx context.Context, n int) (func() error, error) {
	if j.kind == "semaphore" {
		s := c.Semaphore("permits")
		return func(ctx context.Context, n int) (func() error, error) {
			return func() error { return s.Release(ctx, n) }, s.Acquire(ctx, n)
		}
	}
	e := c.PermitSemaphore("permits")
	return func(ctx context.Context, n int) (func() error, error) {
		permits, err := e.AcquireN(ctx, n)
		return func() error {
			ids := make([]string, len(permits))
			for i, p := range permits {
				ids[i] = p.ID()
			}
			return e.Release(ctx, ids...)
		}, err
	}
}

// tally is what a process has seen.
type tally struct {
	mu     sync.Mutex
	served map[int]int
	waited map[int]time.Duration // the longest
	kept   time.Duration         // the longest
}

// shareWorker takes and gives back permits with many goroutines, until there is a key
// "stop". It fails as soon as more are in use than there are.
func shareWorker(args []string) error {
	j, err := parseJob(args)
	if err != nil {
		return err
	}
	ctx := context.Background()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{j.addr}, DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	c, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{j.addr}}, redlatch.WithWatchdogTimeout(j.watchdog))
	if err != nil {
		return err
	}
	defer c.Close()
	take := j.taker(c)
	t := tally{served: map[int]int{}, waited: map[int]time.Duration{}}
	fmt.Println("ready")
	errs := make(chan error, goroutines)
	for g := range goroutines {
		go func() {
			errs <- func() error {
				for size := g; ; size++ {
					if n, err := conn.Do(ctx, conn.B().Exists().Key("stop").Build()).AsInt64(); err != nil || n > 0 {
						return err
					}
					if err := t.round(ctx, conn, j.id, take, j.sizes[size%len(j.sizes)]); err != nil {
						return err
					}
				}
			}()
		}()
	}
	for range goroutines {
		if err := <-errs; err != nil {
			return err
		}
	}
	for _, size := range j.sizes {
		fmt.Println(size, t.served[size], t.waited[size], t.kept)
	}
	return nil
}

// round takes permits, keeps them for a while, and gives them back.
func (t *tally) round(ctx context.Context, conn rueidis.Client, id string, take func(context.Context, int) (func() error, error), n int) error {
	began := time.Now()
	release, err := take(ctx, n)
	if err != nil {
		return fmt.Errorf("acquire: %w", err)
	}
	taken := time.Now()
	inUse, err := enter.Exec(ctx, conn, nil, []string{id, strconv.Itoa(n)}).AsInt64()
	if err != nil {
		return err
	}
	if inUse > limit {
		return fmt.Errorf("%d permits are in use, of %d", inUse, limit)
	}
	time.Sleep(rand.N(longest))
	if err := conn.Do(ctx, conn.B().Hincrby().Key("inuse").Field(id).Increment(int64(-n)).Build()).Error(); err != nil {
		return err
	}
	if err := release(); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.served[n]++
	t.waited[n] = max(t.waited[n], taken.Sub(began))
	t.kept = max(t.kept, time.Since(taken))
	return nil
}

// freePermits asks a semaphore of either kind how many permits are free.
func freePermits(t *testing.T, c *redlatch.Client, kind string) int {
	t.Helper()
	var n int
	var err error
	if kind == "semaphore" {
		n, err = c.Semaphore("permits").Available(t.Context())
	} else {
		n, err = c.PermitSemaphore("permits").Available(t.Context())
	}
	require.NoError(t, err)
	return n
}

func stop(t *testing.T, addr string) { harness.Do(t, addr, "SET", "stop", "1") }

func TestProcessesNeverHaveMoreThanTheirShareOfPermits(t *testing.T) {
	const processes, duration = 4, 4 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range []string{"semaphore", "permit-semaphore"} {
			t.Run(kind, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				harness.Do(t, s.Addr, "SET", "permits", strconv.Itoa(limit))
				c := harness.Client(t, s)
				var procs []*harness.Process
				for i := range processes {
					j := job{s.Addr, kind, strconv.Itoa(i), []int{1}, 30 * time.Second}
					p := harness.Spawn(t, "share", j.args()...)
					require.Equal(t, "ready", p.Line(30*time.Second))
					procs = append(procs, p)
				}
				time.Sleep(duration)
				stop(t, s.Addr)
				least, sum := 1<<30, 0
				for _, p := range procs {
					p.Ended(30 * time.Second)
					size, served, waited, _ := report(t, p)
					require.Equal(t, 1, size)
					least, sum = min(least, served), sum+served
					t.Logf("served %d, the longest wait %v", served, waited)
				}
				// With everything else equal each would have a quarter.
				assert.Greater(t, least, sum/20, "a process starved")
				assert.Equal(t, limit, freePermits(t, c, kind))
			})
		}
	})
}

// report reads a line that a process prints at its end.
func report(t *testing.T, p *harness.Process) (size, served int, waited, kept time.Duration) {
	t.Helper()
	words := strings.Fields(p.Line(time.Second))
	require.Len(t, words, 4)
	var errs [4]error
	size, errs[0] = strconv.Atoi(words[0])
	served, errs[1] = strconv.Atoi(words[1])
	waited, errs[2] = time.ParseDuration(words[2])
	kept, errs[3] = time.ParseDuration(words[3])
	require.NoError(t, errors.Join(errs[:]...))
	return size, served, waited, kept
}

func TestPermitsOfKilledProcessesComeBack(t *testing.T) {
	const (
		processes = 4
		kills     = 6
		// Long enough for processes that share two cores to renew in time.
		watchdog = 6 * time.Second
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.Do(t, s.Addr, "SET", "permits", strconv.Itoa(limit))
		c := harness.Client(t, s)
		var procs []*harness.Process
		var ids []string
		spawned := 0
		spawn := func() *harness.Process {
			spawned++
			ids = append(ids, strconv.Itoa(spawned))
			j := job{s.Addr, "permit-semaphore", strconv.Itoa(spawned), []int{1}, watchdog}
			p := harness.Spawn(t, "share", j.args()...)
			require.Equal(t, "ready", p.Line(30*time.Second))
			return p
		}
		for range processes {
			procs = append(procs, spawn())
		}
		for range kills {
			time.Sleep(300*time.Millisecond + rand.N(600*time.Millisecond))
			i := rand.N(processes)
			procs[i].Kill()
			harness.Do(t, s.Addr, "SADD", "dead", ids[i])
			procs[i] = spawn()
			ids[i], ids = ids[len(ids)-1], ids[:len(ids)-1]
		}
		// Now all die, while they have permits.
		harness.Eventually(t, watchdog+2*time.Second, "some are in use", func() bool {
			return freePermits(t, c, "permit-semaphore") < limit
		})
		for _, p := range procs {
			p.Kill()
		}
		died := time.Now()
		harness.Eventually(t, watchdog+2*time.Second, "all permits are back", func() bool {
			return freePermits(t, c, "permit-semaphore") == limit
		})
		t.Logf("back after %v", time.Since(died))
		p, err := c.PermitSemaphore("permits").AcquireN(t.Context(), limit, lock.Wait(watchdog))
		require.NoError(t, err, "they can be had, too, once the dead are out of the line")
		for _, p := range p {
			require.NoError(t, p.Release(t.Context()))
		}
	})
}

func TestRequestsOfEverySizeAreServed(t *testing.T) {
	const (
		processes = 4
		duration  = 8 * time.Second
		// What it takes to hear of a release, on a machine that is busy.
		message = 20 * time.Millisecond
	)
	sizes := []int{1, 3, limit}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range []string{"semaphore", "permit-semaphore"} {
			t.Run(kind, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				harness.Do(t, s.Addr, "SET", "permits", strconv.Itoa(limit))
				var procs []*harness.Process
				for i := range processes {
					j := job{s.Addr, kind, strconv.Itoa(i), sizes, 30 * time.Second}
					p := harness.Spawn(t, "share", j.args()...)
					require.Equal(t, "ready", p.Line(30*time.Second))
					procs = append(procs, p)
				}
				time.Sleep(duration)
				stop(t, s.Addr)
				var waited, kept time.Duration
				for _, p := range procs {
					p.Ended(30 * time.Second)
					for range sizes {
						size, served, longest, k := report(t, p)
						assert.Greater(t, served, goroutines, "requests for %d", size)
						waited, kept = max(waited, longest), max(kept, k)
						t.Logf("%d permits: served %d, the longest wait %v", size, served, longest)
					}
				}
				// As the package documentation derives it: all others may be older.
				bound := 100*time.Millisecond + processes*goroutines*(kept+message)
				t.Logf("the longest wait %v, kept for up to %v, bound %v", waited, kept, bound)
				assert.Less(t, waited, bound)
				assert.Equal(t, limit, freePermits(t, harness.Client(t, s), kind))
			})
		}
	})
}
