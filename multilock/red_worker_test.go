package multilock_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
)

func init() {
	workers["red-contend"] = redxContend
	workers["red-hold"] = redxHold
}

const (
	redxServers   = 5
	redxProcesses = 3
	redxName      = "orders"
)

// redxLock returns the Redlock of a process. Each process has a different first client.
func redxLock(kind, name string, number int, clients []*redlatch.Client) *multilock.Red {
	member := map[string]func(c *redlatch.Client) lock.Locker{
		"lock": func(c *redlatch.Client) lock.Locker { return c.Lock(name) },
		"fair": func(c *redlatch.Client) lock.Locker { return c.FairLock(name) },
		"spin": func(c *redlatch.Client) lock.Locker { return c.SpinLock(name) },
	}[kind]
	members := make([]lock.Locker, len(clients))
	for i := range clients {
		members[i] = member(clients[(i+number)%len(clients)])
	}
	return clients[number%len(clients)].RedLock(members...)
}

// redxClients connects to all servers.
func redxClients(ctx context.Context, addrs []string, opts ...redlatch.Option) (clients []*redlatch.Client, closeAll func(), err error) {
	closeAll = func() {
		for _, c := range clients {
			c.Close()
		}
	}
	begun := time.Now()
	for _, addr := range addrs {
		c, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{addr}}, opts...)
		for err != nil && time.Since(begun) < 20*time.Second { // a busy machine may exceed a lease
			c, err = redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{addr}}, opts...)
		}
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		clients = append(clients, c)
	}
	return clients, closeAll, nil
}

// redxJudge is a server that does not fail. Holders work on it, and it detects two holders at
// once. A request says until when its hold is certain, and the judge, whose clock is the same,
// refuses later requests. A process may be stopped between its check of Remaining and its
// write, which breaks no promise.
type redxJudge struct {
	conn    rueidis.Client
	process string
}

// The keys of the judge.
const (
	redxInside     = "inside"     // the holder, for as long as its hold is certain
	redxCounter    = "counter"    // the value that holders read and then write
	redxWrites     = "writes"     // the number of accepted writes
	redxShares     = "shares"     // the same for each process
	redxViolations = "violations" // the violations that were detected
	redxGo         = "go"
	redxStop       = "stop"
	redxBye        = "bye"
)

var (
	// KEYS: inside, counter, violations. ARGV: claim, until (µs). Reply: the counter, or nil
	// if it is too late.
	redxLook = rueidis.NewLuaScript(`
local now = redis.call('time')
if now[1] * 1000000 + now[2] >= tonumber(ARGV[2]) then
  return false
end
local other = redis.call('get', KEYS[1])
if other and other ~= ARGV[1] then
  redis.call('rpush', KEYS[3], ARGV[1] .. ' entered while ' .. other .. ' was inside')
end
redis.call('set', KEYS[1], ARGV[1], 'pxat', math.floor(ARGV[2] / 1000))
return redis.call('get', KEYS[2]) or '0'`)
	// KEYS: counter, writes, shares, violations. ARGV: claim, until (µs), value, process. Reply: 1,
	// or 0 if it is too late.
	redxWrite = rueidis.NewLuaScript(`
local now = redis.call('time')
if now[1] * 1000000 + now[2] >= tonumber(ARGV[2]) then
  return 0
end
redis.call('set', KEYS[1], ARGV[3])
redis.call('hincrby', KEYS[3], ARGV[4], 1)
local writes = redis.call('incr', KEYS[2])
if writes ~= tonumber(ARGV[3]) then
  redis.call('rpush', KEYS[4], ARGV[1] .. ' wrote ' .. ARGV[3] .. ' as number ' .. writes)
  redis.call('set', KEYS[1], writes)
end
return 1`)
	// KEYS: inside. ARGV: claim.
	redxLeave = rueidis.NewLuaScript(`
if redis.call('get', KEYS[1]) == ARGV[1] then
  redis.call('del', KEYS[1])
end
return 1`)
)

// redxUntil returns until when a hold is certain, in µs of the clock of all processes, or 0 if
// it no longer is.
func redxUntil(h lock.Hold) string {
	now := time.Now() // read first, so that the result is never too late
	left := h.Remaining()
	if left == 0 || h.Context().Err() != nil {
		return "0"
	}
	return strconv.FormatInt(now.Add(left).UnixMicro(), 10)
}

// work increments the counter under a hold by reading and writing it. It reports whether there
// was enough time.
func (j redxJudge) work(ctx context.Context, claim string, h lock.Hold) (bool, error) {
	n, err := redxLook.Exec(ctx, j.conn, []string{redxInside, redxCounter, redxViolations}, []string{claim, redxUntil(h)}).AsInt64()
	if rueidis.IsRedisNil(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	value := strconv.FormatInt(n+1, 10)
	return redxWrite.Exec(ctx, j.conn, []string{redxCounter, redxWrites, redxShares, redxViolations},
		[]string{claim, redxUntil(h), value, j.process}).AsBool()
}

// leave tells the judge that a holder is done.
func (j redxJudge) leave(ctx context.Context, claim string) error {
	return redxLeave.Exec(ctx, j.conn, []string{redxInside}, []string{claim}).Error()
}

// await blocks until a key exists.
func (j redxJudge) await(ctx context.Context, key string) error {
	for {
		if n, err := j.conn.Do(ctx, j.conn.B().Exists().Key(key).Build()).AsInt64(); err != nil || n == 1 {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// redxJob is the task of a process.
type redxJob struct {
	Servers    []string // of the members, as this process reaches them
	Judge      string
	Kind       string
	Number     int
	Goroutines int
	Seed       uint64
	Lease      time.Duration
	Long       int           // how many of 1000 holds span several renewals
	Rest       time.Duration // the least duration of a hold
	// MayFail is set if Lock may fail: a majority may be unavailable, or the process may be
	// stopped for its complete lease.
	MayFail bool
}

// redxReport is the result of a process.
type redxReport struct {
	Holds, Late    int
	Unlock         time.Duration // the longest
	Losses, Errors []string
}

// redxContend is a worker whose goroutines contend for the lock until the process is told to
// stop.
func redxContend(args []string) error {
	var job redxJob
	if err := json.Unmarshal([]byte(args[0]), &job); err != nil {
		return err
	}
	var (
		log harness.Log
		bg  = context.Background()
	)
	clients, closeAll, err := redxClients(bg, job.Servers, redlatch.WithWatchdogTimeout(job.Lease), redlatch.WithLogger(log.Logger()))
	if err != nil {
		return err
	}
	defer closeAll()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{job.Judge}, DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	w := &redxWorker{redxJob: job, judge: redxJudge{conn, strconv.Itoa(job.Number)}}
	w.lock = redxLock(job.Kind, redxName, job.Number, clients)
	fmt.Println("ready")
	if err := w.judge.await(bg, redxGo); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(bg)
	defer cancel()
	var wg sync.WaitGroup
	for g := range job.Goroutines {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(job.Seed, uint64(job.Number*job.Goroutines+g)))
			for ctx.Err() == nil {
				w.hold(ctx, rng)
			}
		})
	}
	if err := w.judge.await(bg, redxStop); err != nil {
		return err
	}
	cancel()
	wg.Wait()
	runtime.GC()
	time.Sleep(100 * time.Millisecond) // the releases that the collection started
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "dropped without Unlock") {
			w.failed(errors.New(line))
		}
	}
	report, err := json.Marshal(w.report)
	if err != nil {
		return err
	}
	fmt.Println(string(report))
	return w.judge.await(bg, redxBye)
}

// redxWorker is the state shared by the goroutines of a process.
type redxWorker struct {
	redxJob
	judge  redxJudge
	lock   *multilock.Red
	claims atomic.Int64

	mu     sync.Mutex
	report redxReport
}

func (w *redxWorker) failed(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.report.Errors) < 10 {
		w.report.Errors = append(w.report.Errors, err.Error())
	}
}

// longest is the longest duration of a hold.
func (j redxJob) longest() time.Duration { return j.Lease + j.Lease/2 }

func redxBetween(rng *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(rng.Int64N(int64(to-from)))
}

// hold acquires the lock, works under it, and releases it.
func (w *redxWorker) hold(ctx context.Context, rng *rand.Rand) {
	var opts []lock.Option
	if rng.IntN(4) == 0 {
		opts = append(opts, lock.Lease(redxBetween(rng, w.Lease/2, w.Lease)))
	}
	h, err := w.lock.Lock(ctx, opts...)
	if err != nil {
		if ctx.Err() == nil && !(w.MayFail && (errors.Is(err, lock.ErrNotAcquired) ||
			errors.Is(err, lock.ErrIndeterminate) || errors.Is(err, lock.ErrUnavailable))) {
			w.failed(err)
		}
		return
	}
	claim := fmt.Sprintf("%s#%d", w.judge.process, w.claims.Add(1))
	until, got := time.Now(), time.Now()
	if opts == nil && rng.IntN(1000) < w.Long {
		until = until.Add(redxBetween(rng, w.Lease/2, w.longest()))
	}
	late := 0
	for {
		ok, err := w.judge.work(context.Background(), claim, h)
		if err != nil {
			w.failed(err)
		}
		if !ok && ctx.Err() == nil { // the hold's context ends with ctx
			late++
		}
		if !ok {
			break
		}
		if !time.Now().Before(until) || ctx.Err() != nil {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	time.Sleep(w.Rest)
	if err := w.judge.leave(context.Background(), claim); err != nil {
		w.failed(err)
	}
	began := time.Now()
	err = h.Unlock(context.Background())
	took := time.Since(began)
	w.mu.Lock()
	defer w.mu.Unlock()
	r := &w.report
	r.Holds++
	r.Late += late
	r.Unlock = max(r.Unlock, took)
	switch {
	case errors.Is(err, lock.ErrLost):
		r.Losses = append(r.Losses, fmt.Sprintf("%s after %v: %v", claim, time.Since(got), err))
	case err != nil && len(r.Errors) < 10:
		r.Errors = append(r.Errors, err.Error())
	}
}
