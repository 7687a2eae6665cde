package semaphore_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
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

// limit is the number of permits.
const limit = 10

func init() { workers["share"] = shareWorker }

// enter adds to the number of permits in use by one process and returns the total. It ignores the
// processes in the set "dead", which the test maintains.
var enter = rueidis.NewLuaScript(`
redis.call('HINCRBY', 'inuse', ARGV[1], ARGV[2])
local all, sum = redis.call('HGETALL', 'inuse'), 0
for i = 1, #all, 2 do
	if redis.call('SISMEMBER', 'dead', all[i]) == 0 then
		sum = sum + all[i + 1]
	end
end
return sum`)

// job is the task of a process of shareWorker.
type job struct {
	Addr, Kind string
	ID         string // of the process
	Sizes      []int  // of requests
	Goroutines int
	Longest    time.Duration // time for which a goroutine holds permits
	Watchdog   time.Duration
}

// spawn starts a process and returns when it is ready.
func (j job) spawn(t *testing.T) *harness.Process {
	t.Helper()
	text, err := json.Marshal(j)
	require.NoError(t, err)
	p := harness.Spawn(t, "share", string(text))
	require.Equal(t, "ready", p.Line(30*time.Second))
	return p
}

// acquirer returns a function that acquires n permits of the semaphore "permits" and returns a
// function that releases them.
func (j job) acquirer(c *redlatch.Client) func(ctx context.Context, n int) (func() error, error) {
	if j.Kind == "semaphore" {
		s := c.Semaphore("permits")
		return func(ctx context.Context, n int) (func() error, error) {
			return func() error { return s.Release(ctx, n) }, s.Acquire(ctx, n)
		}
	}
	e := c.PermitSemaphore("permits")
	return func(ctx context.Context, n int) (func() error, error) {
		p, err := e.AcquireN(ctx, n)
		return func() error { return p.Release(ctx) }, err
	}
}

// tally is the statistics of a process.
type tally struct {
	mu     sync.Mutex
	served map[int]int
	waited time.Duration // the longest
	kept   time.Duration // the longest
	enough bool          // each size was served once per goroutine
}

// shareWorker is a worker whose goroutines acquire and release permits until the key "stop"
// exists. It prints "enough" when each size was served often, and its statistics in the end. It
// fails if more than limit permits are in use.
func shareWorker(args []string) error {
	var j job
	if err := json.Unmarshal([]byte(args[0]), &j); err != nil {
		return err
	}
	ctx := context.Background()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{j.Addr}, DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	c, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{j.Addr}}, redlatch.WithWatchdogTimeout(j.Watchdog))
	if err != nil {
		return err
	}
	defer c.Close()
	take := j.acquirer(c)
	t := tally{served: map[int]int{}}
	fmt.Println("ready")
	errs := make(chan error, j.Goroutines)
	for g := range j.Goroutines {
		go func() {
			errs <- func() error {
				for size := g; ; size++ {
					if n, err := conn.Do(ctx, conn.B().Exists().Key("stop").Build()).AsInt64(); err != nil || n > 0 {
						return err
					}
					if err := t.round(ctx, conn, j, take, j.Sizes[size%len(j.Sizes)]); err != nil {
						return err
					}
				}
			}()
		}()
	}
	for range j.Goroutines {
		if err := <-errs; err != nil {
			return err
		}
	}
	sum := 0
	for _, n := range t.served {
		sum += n
	}
	fmt.Println(sum, t.waited, t.kept)
	return nil
}

// round acquires permits, holds them for a while, and releases them.
func (t *tally) round(ctx context.Context, conn rueidis.Client, j job, take func(context.Context, int) (func() error, error), n int) error {
	began := time.Now()
	release, err := take(ctx, n)
	if err != nil {
		return fmt.Errorf("acquire: %w", err)
	}
	acquired := time.Now()
	inUse, err := enter.Exec(ctx, conn, nil, []string{j.ID, strconv.Itoa(n)}).AsInt64()
	if err != nil {
		return err
	}
	if inUse > limit {
		return fmt.Errorf("%d permits are in use, of %d", inUse, limit)
	}
	time.Sleep(rand.N(j.Longest))
	if err := conn.Do(ctx, conn.B().Hincrby().Key("inuse").Field(j.ID).Increment(int64(-n)).Build()).Error(); err != nil {
		return err
	}
	if err := release(); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.served[n]++
	t.waited = max(t.waited, acquired.Sub(began))
	t.kept = max(t.kept, time.Since(acquired))
	for _, size := range j.Sizes {
		if t.served[size] < j.Goroutines {
			return nil
		}
	}
	if !t.enough {
		fmt.Println("enough")
	}
	t.enough = true
	return nil
}

// freePermits returns the number of free permits of a semaphore of either kind.
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

// Requests of every size are served, no process starves, and the limit holds.
func TestRequestsOfEverySizeAreServed(t *testing.T) {
	const (
		processes = 4
		// The time to learn of a release on a busy machine.
		message = 20 * time.Millisecond
	)
	type row struct {
		kind  string
		sizes []int
	}
	var rows []row
	for _, kind := range []string{"semaphore", "permit-semaphore"} {
		rows = append(rows, row{kind, []int{1, 3, limit}})
		if !testing.Short() {
			rows = append(rows, row{kind, []int{1}})
		}
	}
	share := func(t *testing.T, s *testserver.Server, r row) {
		harness.Do(t, s.Addr, "FLUSHALL")
		harness.Do(t, s.Addr, "SET", "permits", strconv.Itoa(limit))
		j := job{
			Addr: s.Addr, Kind: r.kind, Sizes: r.sizes, Watchdog: 30 * time.Second, Goroutines: harness.Size(8, 64),
			Longest: time.Duration(harness.Size(10, 3)) * time.Millisecond,
		}
		var procs []*harness.Process
		for i := range processes {
			j.ID = strconv.Itoa(i)
			procs = append(procs, j.spawn(t))
		}
		for _, p := range procs {
			require.Equal(t, "enough", p.Line(time.Minute))
		}
		time.Sleep(time.Duration(harness.Size(0, 8)) * time.Second)
		harness.Do(t, s.Addr, "SET", "stop", "1")
		var waited, kept time.Duration
		least, sum := math.MaxInt, 0
		for _, p := range procs {
			p.Ended(30 * time.Second)
			words := strings.Fields(p.Line(time.Second))
			require.Len(t, words, 3)
			served, err := strconv.Atoi(words[0])
			require.NoError(t, err)
			w, err := time.ParseDuration(words[1])
			require.NoError(t, err)
			k, err := time.ParseDuration(words[2])
			require.NoError(t, err)
			waited, kept, least, sum = max(waited, w), max(kept, k), min(least, served), sum+served
		}
		// The bound of the package documentation, with all other requests older.
		bound := 100*time.Millisecond + time.Duration(processes*j.Goroutines)*(kept+message)
		t.Logf("served %d, at least %d per process; longest wait %v, longest hold %v, bound %v", sum, least, waited, kept, bound)
		assert.Less(t, waited, bound)
		assert.Greater(t, least, sum/20, "a fair share is a quarter")
		assert.Equal(t, limit, freePermits(t, harness.Client(t, s), r.kind))
	}
	harness.EachBusy(t, func(t *testing.T, s *testserver.Server) {
		for _, r := range rows {
			t.Run(fmt.Sprint(r.kind, r.sizes), func(t *testing.T) { share(t, s, r) })
		}
	})
}

func TestPermitsOfKilledProcessesBecomeFree(t *testing.T) {
	const processes = 4
	// Long enough for processes that share two cores to renew in time.
	watchdog := time.Duration(harness.Size(3, 6)) * time.Second
	harness.EachBusy(t, func(t *testing.T, s *testserver.Server) {
		harness.Do(t, s.Addr, "SET", "permits", strconv.Itoa(limit))
		c := harness.Client(t, s)
		var procs []*harness.Process
		var ids []string
		spawned := 0
		spawn := func() *harness.Process {
			spawned++
			ids = append(ids, strconv.Itoa(spawned))
			return job{
				Addr: s.Addr, Kind: "permit-semaphore", ID: strconv.Itoa(spawned), Sizes: []int{1}, Watchdog: watchdog,
				Goroutines: harness.Size(8, 64), Longest: time.Duration(harness.Size(30, 3)) * time.Millisecond,
			}.spawn(t)
		}
		for range processes {
			procs = append(procs, spawn())
		}
		for range harness.Size(2, 6) {
			time.Sleep(300*time.Millisecond + rand.N(600*time.Millisecond))
			i := rand.N(processes)
			procs[i].Kill()
			harness.Do(t, s.Addr, "SADD", "dead", ids[i])
			procs[i] = spawn()
			ids[i], ids = ids[len(ids)-1], ids[:len(ids)-1]
		}
		// All processes die while they hold permits.
		harness.Eventually(t, watchdog+2*time.Second, "permits in use", func() bool {
			return freePermits(t, c, "permit-semaphore") < limit
		})
		for _, p := range procs {
			p.Kill()
		}
		died := time.Now()
		harness.Eventually(t, watchdog+2*time.Second, "all permits are free", func() bool {
			return freePermits(t, c, "permit-semaphore") == limit
		})
		t.Logf("free after %v", time.Since(died))
		p, err := c.PermitSemaphore("permits").AcquireN(t.Context(), limit, lock.Wait(watchdog))
		require.NoError(t, err, "the dead clients time out of the wait queue")
		require.NoError(t, p.Release(t.Context()))
	})
}
