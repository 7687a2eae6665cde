package multilock_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
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

// redxLock returns the red lock of a process: its first client is another one than that
// of the process before.
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
		for err != nil && time.Since(begun) < 20*time.Second { // the machine may be busy for longer than a lease
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

// redxJudge is a server that does not fail, on which holders work, and which sees whether they
// do that one at a time. What a holder asks for says until when the hold is certain. The judge
// has the same clock, and refuses what comes later: a process that was stopped between a look
// at Remaining and its write, as any process can be, breaks no promise.
type redxJudge struct {
	conn    rueidis.Client
	process string
}

// Keys of the judge.
const (
	redxInside     = "inside"     // who is, for as long as that is certain
	redxCounter    = "counter"    // what holders read, and then write
	redxWrites     = "writes"     // how many writes were let pass
	redxShares     = "shares"     // the same, by process
	redxViolations = "violations" // what was seen
	redxGo         = "go"
	redxStop       = "stop"
	redxBye        = "bye"
)

var (
	// KEYS: inside, counter, violations. ARGV: claim, until (µs). Reply: the counter, or nil if it
	// is too late.
	redxLook = rueidis.NewLuaScript(`
local now = redis.call('time')
if now[1] * 1000000 + now[2] >= tonumber(ARGV[2]) then
  return false
end
local other = redis.call('get', KEYS[1])
if other and other ~= ARGV[1] then
  redis.call('rpush', KEYS[3], ARGV[1] .. ' came in while ' .. other .. ' was there')
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

// redxUntil returns until when a hold is certain, by the clock of all processes in µs: 0 if it is
// not any more.
func redxUntil(h lock.Hold) string {
	now := time.Now() // before: it is not certain for longer than this makes it
	left := h.Remaining()
	if left == 0 || h.Context().Err() != nil {
		return "0"
	}
	return strconv.FormatInt(now.Add(left).UnixMicro(), 10)
}

// work adds one to the counter under a hold, by reading it and writing it, and reports whether
// there was time for that.
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

// leave says that a holder is done.
func (j redxJudge) leave(ctx context.Context, claim string) error {
	return redxLeave.Exec(ctx, j.conn, []string{redxInside}, []string{claim}).Error()
}

// await blocks until a key is there.
func (j redxJudge) await(ctx context.Context, key string) error {
	for {
		if n, err := j.conn.Do(ctx, j.conn.B().Exists().Key(key).Build()).AsInt64(); err != nil || n == 1 {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// redxJob is what a process has to do.
type redxJob struct {
	Servers    []string // of the members, as this process reaches them
	Judge      string
	Kind       string
	Number     int
	Goroutines int
	Seed       uint64
	Lease      time.Duration
	Long       int           // how many of 1000 holds go on through some renewals
	Rest       time.Duration // that each hold lasts at least
	// MayFail is set where Lock may fail: a majority may be away, or the process may sleep
	// through its lease.
	MayFail bool
}

// redxReport is what it says about that.
type redxReport struct {
	Holds, Late    int
	Unlock         time.Duration // the longest
	Losses, Errors []string
}

// redxContend is a worker whose goroutines contend for the lock until they are told to stop.
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
	time.Sleep(100 * time.Millisecond) // for what the collection has found
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

// redxWorker is what the goroutines of a process share.
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

// longest is for how long the lock is held at most.
func (j redxJob) longest() time.Duration { return j.Lease + j.Lease/2 }

func redxBetween(rng *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(rng.Int64N(int64(to-from)))
}

// hold takes the lock, works under it, and gives it back.
func (w *redxWorker) hold(ctx context.Context, rng *rand.Rand) {
	var opts []lock.Option
	if rng.IntN(4) == 0 {
		opts = append(opts, lock.Lease(redxBetween(rng, w.Lease/2, w.Lease)))
	}
	h, err := w.lock.Lock(ctx, opts...)
	if err != nil {
		if ctx.Err() == nil && !(w.MayFail && errors.Is(err, lock.ErrNotAcquired)) {
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

// redxWorld is five servers, the judge, and processes.
type redxWorld struct {
	t       *testing.T
	judge   *testserver.Server
	servers []*testserver.Server
	gates   [][]*harness.Gate // of each process, and one set for the test; nil if there are none
	procs   []*harness.Process
	job     redxJob
	seed    uint64
	late    time.Duration // how late the test itself was at most: how busy the machine is
}

// redxSettings returns for how long a test runs, in a short run and in a full one, and its
// seed.
func redxSettings(t *testing.T, short, full time.Duration) (time.Duration, uint64) {
	seed := rand.Uint64N(1_000_000)
	runFor := time.Duration(harness.Size(int(short), int(full)))
	var err error
	if s := os.Getenv("REDLATCH_RED_FOR"); s != "" {
		runFor, err = time.ParseDuration(s)
		require.NoError(t, err)
	}
	if s := os.Getenv("REDLATCH_RED_SEED"); s != "" {
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Log("seed", seed)
	return runFor, seed
}

// redxStart runs the servers. With gates set, every process reaches each of them by a gate of
// its own. In a short run there are fewer to contend, who rest under the lock, so that there
// is something left of the machine for other tests.
func redxStart(t *testing.T, judge *testserver.Server, gates bool, job redxJob) *redxWorld {
	job.Goroutines, job.Rest = harness.Size(4, 16), time.Duration(harness.Size(3, 0))*time.Millisecond
	w := &redxWorld{t: t, judge: judge, job: job, seed: job.Seed}
	harness.Do(t, judge.Addr, "FLUSHALL")
	for range redxServers {
		w.servers = append(w.servers, harness.Own(t, judge.Program))
	}
	for range redxProcesses + 1 {
		var set []*harness.Gate
		for _, s := range w.servers {
			if gates {
				set = append(set, harness.NewGate(t, s))
			}
		}
		w.gates = append(w.gates, set)
	}
	w.job.Judge = judge.Addr
	w.procs = make([]*harness.Process, redxProcesses)
	return w
}

// addrs returns how a process reaches the servers.
func (w *redxWorld) addrs(process int) []string {
	var addrs []string
	for i, s := range w.servers {
		if set := w.gates[process]; set != nil {
			addrs = append(addrs, set[i].Addr)
		} else {
			addrs = append(addrs, s.Addr)
		}
	}
	return addrs
}

// spawn starts a process, which works as soon as it is told to.
func (w *redxWorld) spawn(process int) {
	w.t.Helper()
	job := w.job
	job.Servers, job.Number = w.addrs(process), process
	text, err := json.Marshal(job)
	require.NoError(w.t, err)
	w.procs[process] = harness.Spawn(w.t, "red-contend", string(text))
	require.Equal(w.t, "ready", w.procs[process].Line(30*time.Second))
}

// begin starts all processes and lets them work.
func (w *redxWorld) begin() {
	w.t.Helper()
	for i := range w.procs {
		w.spawn(i)
	}
	harness.Do(w.t, w.judge.Addr, "SET", redxGo, "1")
}

// shares returns how often each process has written, and the test.
func (w *redxWorld) shares() (shares [redxProcesses + 1]int) {
	reply, err := testserver.Query(w.judge.Addr, "HGETALL", redxShares)
	require.NoError(w.t, err)
	for i := 0; i+1 < len(reply); i += 2 {
		process, errProcess := strconv.Atoi(reply[i])
		n, err := strconv.Atoi(reply[i+1])
		require.NoError(w.t, errors.Join(errProcess, err))
		shares[process] = n
	}
	return shares
}

// all returns when every process has had the lock, from now on.
func (w *redxWorld) all() {
	w.t.Helper()
	before := w.shares()
	harness.Eventually(w.t, 5*w.job.longest()+multiSlack, "all processes get on", func() bool {
		shares := w.shares()
		for i, n := range shares[:redxProcesses] {
			if n == before[i] {
				return false
			}
		}
		return true
	})
}

// watch passes the time until done is closed, or until the judge has seen something, and returns
// for how long nobody, and each process, has had nothing at most. What the machine had no time for
// is in w.late.
func (w *redxWorld) watch(done <-chan struct{}) (nobody time.Duration, each [redxProcesses]time.Duration) {
	const pause = 20 * time.Millisecond
	shares := w.shares()
	var last [redxProcesses]time.Time
	lastOfAll := time.Now()
	for i := range last {
		last[i] = lastOfAll
	}
	for over := false; !over; {
		looked := time.Now()
		select {
		case <-done:
			over = true
		case <-time.After(pause):
		}
		now, next := time.Now(), w.shares()
		w.late = max(w.late, time.Since(looked)-pause)
		nobody = max(nobody, now.Sub(lastOfAll))
		for i := range each {
			each[i] = max(each[i], now.Sub(last[i]))
			if next[i] != shares[i] {
				last[i], lastOfAll = now, now
			}
		}
		shares = next
		if harness.Do(w.t, w.judge.Addr, "LLEN", redxViolations) != ":0" {
			break
		}
	}
	return nobody, each
}

// verdict fails the test if the judge has seen something, or a write was lost.
func (w *redxWorld) verdict() {
	w.t.Helper()
	seen, err := testserver.Query(w.judge.Addr, "LRANGE", redxViolations, "0", "9")
	require.NoError(w.t, err)
	require.Empty(w.t, seen, "two holders at once, seed %d", w.seed)
	get := func(key string) string {
		reply, err := testserver.Query(w.judge.Addr, "GET", key)
		require.NoError(w.t, err)
		return reply[0]
	}
	require.Equal(w.t, get(redxWrites), get(redxCounter))
	require.NotEqual(w.t, "0", get(redxWrites))
}

// end stops all processes and returns what they say. Nothing may be left then.
func (w *redxWorld) end() []redxReport {
	w.t.Helper()
	harness.Do(w.t, w.judge.Addr, "SET", redxStop, "1")
	reports := make([]redxReport, len(w.procs))
	for i, p := range w.procs {
		require.NoError(w.t, json.Unmarshal([]byte(p.Line(30*time.Second)), &reports[i]))
		assert.Empty(w.t, reports[i].Errors, "process %d", i)
	}
	// While they are still there: what has been left to their background is done too.
	for _, s := range w.servers {
		harness.NothingStays(w.t, s.Addr)
	}
	harness.Do(w.t, w.judge.Addr, "SET", redxBye, "1")
	for _, p := range w.procs {
		p.Ended(30 * time.Second)
	}
	return reports
}

// The lease is longer than it takes to see that nothing is left: what somebody has forgotten to
// release would be.
func TestRedProcessesIncrementACounterExactly(t *testing.T) {
	harness.EachBusy(t, func(t *testing.T, judge *testserver.Server) {
		for _, kind := range []string{"lock", "fair"} {
			t.Run(kind, func(t *testing.T) {
				runFor, seed := redxSettings(t, 500*time.Millisecond, 3*time.Second)
				w := redxStart(t, judge, false, redxJob{Kind: kind, Seed: seed, Lease: 30 * time.Second})
				w.begin()
				done := make(chan struct{})
				time.AfterFunc(runFor, func() { close(done) })
				nobody, each := w.watch(done)
				w.all()
				shares := w.shares()
				reports := w.end()
				w.verdict()
				sum := 0
				for i, r := range reports {
					sum += shares[i]
					assert.Empty(t, r.Losses)
					assert.Zero(t, r.Late)
				}
				// Who has split the votes pauses for half a second at most.
				assert.Less(t, nobody, 2*time.Second+2*w.late)
				t.Logf("%.0f a second, shares %v, gaps %v %v, reports %+v", float64(sum)/runFor.Seconds(), shares, nobody, each, reports)
			})
		}
	})
}

// redxNemesis lets servers fail, two of them at once at most. A server that is back counts as away
// for one more lease: for two renewals at least, one that finds out what is missing and one that
// takes it again.
type redxNemesis struct {
	w       *redxWorld
	recover time.Duration
	lease   time.Duration
	end     time.Time

	mu   sync.Mutex
	away map[int]bool
	log  []string
	errs []error
}

// redxFaults are what it chooses from. Each returns how it is undone.
var redxFaults = []struct {
	name  string
	wipes bool // so that it must last for longer than any lease
	wreck func(w *redxWorld, s, process int) (undo func() error)
}{
	{"kill", true, func(w *redxWorld, s, _ int) func() error {
		w.servers[s].Kill()
		return w.servers[s].Restart
	}},
	{"stop", false, func(w *redxWorld, s, _ int) func() error {
		w.servers[s].Pause()
		return func() error { w.servers[s].Resume(); return nil }
	}},
	{"cut off", false, func(w *redxWorld, s, _ int) func() error {
		return redxCut(w.gates, s)
	}},
	{"cut one process off", false, func(w *redxWorld, s, process int) func() error {
		return redxCut(w.gates[process:process+1], s)
	}},
}

func redxCut(gates [][]*harness.Gate, s int) func() error {
	for _, set := range gates {
		set[s].Stall()
	}
	return func() (err error) {
		for _, set := range gates {
			err = errors.Join(err, set[s].Open())
		}
		return err
	}
}

// run lets servers fail until the end.
func (n *redxNemesis) run() {
	n.away = map[int]bool{}
	began := time.Now()
	var both sync.WaitGroup
	for slot := range 2 {
		both.Go(func() {
			rng := rand.New(rand.NewPCG(n.w.seed, uint64(1000+slot)))
			for {
				time.Sleep(redxBetween(rng, 0, n.lease/4))
				f := redxFaults[rng.IntN(len(redxFaults))]
				lasts := redxBetween(rng, n.lease/10, n.lease/3)
				if f.wipes || rng.IntN(3) == 0 {
					lasts = redxBetween(rng, n.lease+n.lease/10, n.lease+n.lease/2)
				}
				s, process := rng.IntN(redxServers), rng.IntN(redxProcesses)
				if time.Now().Add(lasts + n.recover).After(n.end) {
					return
				}
				n.mu.Lock()
				for n.away[s] {
					s = (s + 1) % redxServers
				}
				n.away[s] = true
				n.log = append(n.log, fmt.Sprintf("%.2fs %s %d/%d %.2fs", time.Since(began).Seconds(), f.name, s, process, lasts.Seconds()))
				n.mu.Unlock()
				undo := f.wreck(n.w, s, process)
				time.Sleep(lasts)
				err := undo()
				time.Sleep(n.recover)
				n.mu.Lock()
				n.away[s] = false
				if err != nil {
					n.errs = append(n.errs, err)
				}
				n.mu.Unlock()
			}
		})
	}
	both.Wait()
}

// redxProbe takes and gives back a lock that nobody else wants, until done is closed, and returns
// the longest that each has taken.
func redxProbe(r *multilock.Red, done <-chan struct{}) (n int, locked, unlocked time.Duration, err error) {
	for ; ; n++ {
		select {
		case <-done:
			return n, locked, unlocked, nil
		case <-time.After(10 * time.Millisecond):
		}
		began := time.Now()
		h, err := r.Lock(context.Background())
		if err != nil {
			return n, locked, unlocked, err
		}
		between := time.Now()
		locked = max(locked, between.Sub(began))
		err = h.Unlock(context.Background())
		unlocked = max(unlocked, time.Since(between))
		if err != nil {
			return n, locked, unlocked, err
		}
	}
}

func TestRedKeepsItsPromisesWhileServersFail(t *testing.T) {
	const (
		lease   = 2 * time.Second
		timeout = lease / 20 // for each server: what Red makes of the lease
		slack   = 3 * time.Second
	)
	harness.EachBusy(t, func(t *testing.T, judge *testserver.Server) {
		runFor, seed := redxSettings(t, 3*lease, 6*lease)
		w := redxStart(t, judge, true, redxJob{Kind: "lock", Seed: seed, Lease: lease, Long: 10})
		clients, closeAll, err := redxClients(t.Context(), w.addrs(redxProcesses), redlatch.WithWatchdogTimeout(lease))
		require.NoError(t, err)
		defer closeAll()
		w.begin()

		n := &redxNemesis{w: w, lease: lease, recover: lease, end: time.Now().Add(runFor)}
		done := make(chan struct{})
		go func() {
			n.run()
			close(done)
		}()
		probed := make(chan error, 1)
		var locked, unlocked time.Duration
		go func() {
			n, lock, unlock, err := redxProbe(redxLock("lock", "probe", 0, clients), done)
			t.Logf("probe: %d times, Lock took %v at most, Unlock %v", n, lock, unlock)
			locked, unlocked = lock, unlock
			probed <- err
		}()
		nobody, each := w.watch(done)
		<-done
		shares := w.shares()
		assert.NoError(t, <-probed)
		bound := timeout + slack + 2*w.late
		assert.Less(t, locked, bound)
		assert.Less(t, unlocked, bound)
		reports := w.end()
		t.Logf("%d faults: %s", len(n.log), strings.Join(n.log, ", "))
		t.Logf("shares %v, gaps %v %v, late %v, reports %+v", shares, nobody, each, w.late, reports)
		w.verdict()
		require.NoError(t, errors.Join(n.errs...))
		// Others wait for the longest hold, and for what somebody could not give back until its lease
		// is over. Then it is a matter of luck who is next, but not for long.
		assert.Less(t, nobody, w.job.longest()+lease+bound)
		for i, r := range reports {
			assert.Less(t, each[i], 5*w.job.longest()+bound, "process %d", i)
			assert.Less(t, r.Unlock, bound)
		}
	})
}

// Who is cut off from a majority of the servers has lost the lock, and others get it.
func TestRedIsNotHeldByWhoIsCutOffFromAMajority(t *testing.T) {
	const lease = time.Second
	harness.Full(t) // TestARedHolderThatFailsLosesItsLock has one that is cut off
	harness.EachBusy(t, func(t *testing.T, judge *testserver.Server) {
		runFor, seed := redxSettings(t, 0, 6*time.Second)
		w := redxStart(t, judge, true, redxJob{Kind: "lock", Seed: seed, Lease: lease, Long: 500, MayFail: true})
		w.begin()
		rng := rand.New(rand.NewPCG(seed, 0))
		for end := time.Now().Add(runFor); time.Now().Before(end); {
			i := rng.IntN(redxProcesses)
			before := w.shares()
			// It has the lock most of the time that it wants it.
			harness.Eventually(t, 10*w.job.longest(), "it has the lock", func() bool { return w.shares()[i] > before[i] })
			away := rng.Perm(redxServers)[:redxServers/2+1]
			for _, s := range away {
				w.gates[i][s].Stall()
			}
			// Until its lease is over and the longest hold of another, if it had given up its own.
			before = w.shares()
			harness.Eventually(t, 2*lease+w.job.longest()+multiSlack, "others get the lock", func() bool {
				shares := w.shares()
				shares[i] = before[i]
				return shares != before
			})
			time.Sleep(redxBetween(rng, 0, lease))
			for _, s := range away {
				require.NoError(t, w.gates[i][s].Open())
			}
			if harness.Do(t, judge.Addr, "LLEN", redxViolations) != ":0" {
				break
			}
		}
		reports := w.end()
		t.Logf("shares %v, reports %+v", w.shares(), reports)
		w.verdict()
	})
}

// A process that is killed leaves its hold to the lease, one that is stopped for longer than that
// has lost it.
func TestRedKeepsItsPromisesWhileProcessesFail(t *testing.T) {
	const lease = time.Second
	harness.EachBusy(t, func(t *testing.T, judge *testserver.Server) {
		runFor, seed := redxSettings(t, 5*lease/2, 8*lease)
		w := redxStart(t, judge, false, redxJob{Kind: "lock", Seed: seed, Lease: lease, Long: 20, MayFail: true})
		w.begin()
		rng := rand.New(rand.NewPCG(seed, 0))
		faults := map[string]int{}
		for end := time.Now().Add(runFor); time.Now().Before(end); {
			time.Sleep(redxBetween(rng, 0, lease/5))
			i := rng.IntN(redxProcesses)
			if faults["kill"] == 0 || rng.IntN(4) == 0 {
				faults["kill"]++
				w.procs[i].Kill()
				w.spawn(i)
				continue
			}
			faults["stop"]++
			lasts := redxBetween(rng, lease/10, lease+lease/2)
			if faults["stop"] == 1 {
				lasts = lease + lease/4
			}
			w.procs[i].Signal(syscall.SIGSTOP)
			time.Sleep(lasts)
			w.procs[i].Signal(syscall.SIGCONT)
			if harness.Do(t, judge.Addr, "LLEN", redxViolations) != ":0" {
				break
			}
		}
		w.all()
		reports := w.end()
		t.Logf("%v, shares %v, reports %+v", faults, w.shares(), reports)
		w.verdict()
	})
}

// redxHold is a worker that holds the lock and works until it is over, and says so.
func redxHold(args []string) error {
	var job redxJob
	if err := json.Unmarshal([]byte(args[0]), &job); err != nil {
		return err
	}
	ctx := context.Background()
	clients, closeAll, err := redxClients(ctx, job.Servers, redlatch.WithWatchdogTimeout(job.Lease))
	if err != nil {
		return err
	}
	defer closeAll()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{job.Judge}, DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	h, err := redxLock(job.Kind, redxName, job.Number, clients).Lock(ctx)
	if err != nil {
		return err
	}
	judge := redxJudge{conn, strconv.Itoa(job.Number)}
	if _, err := judge.work(ctx, "held", h); err != nil {
		return err
	}
	fmt.Println("holding")
	var working sync.WaitGroup
	working.Go(func() {
		for ok := true; ok && err == nil; time.Sleep(time.Millisecond) {
			ok, err = judge.work(ctx, "held", h)
		}
	})
	<-h.Context().Done()
	fmt.Printf("%q\n", fmt.Sprint(context.Cause(h.Context()))) // which may be of several lines
	fmt.Printf("%q\n", fmt.Sprint(h.Unlock(ctx)))
	working.Wait()
	if ok, err := judge.work(ctx, "held", h); ok || err != nil {
		return fmt.Errorf("work under a hold that is over: %v, %w", ok, err)
	}
	return err
}

// redxHolder starts a process that holds the lock.
func redxHolder(w *redxWorld) *harness.Process {
	job := w.job
	job.Servers, job.Number = w.addrs(0), 0
	text, err := json.Marshal(job)
	require.NoError(w.t, err)
	p := harness.Spawn(w.t, "red-hold", string(text))
	require.Equal(w.t, "holding", p.Line(30*time.Second))
	return p
}

// Who holds the lock and is killed, stopped for longer than its lease, or cut off from a
// majority of the servers, loses it. Another process has it after the lease, the holder does
// nothing after that, and hears of it if it can.
func TestARedHolderThatFailsLosesItsLock(t *testing.T) {
	const lease = 2 * time.Second
	cut := func(w *redxWorld) []*harness.Gate { return w.gates[0][1:4] }
	type row struct {
		name       string
		gates      bool
		fail, heal func(w *redxWorld, p *harness.Process)
	}
	rows := []row{
		{"killed", false, func(_ *redxWorld, p *harness.Process) { p.Kill() }, nil},
		{
			"stopped", false, func(_ *redxWorld, p *harness.Process) { p.Signal(syscall.SIGSTOP) },
			func(_ *redxWorld, p *harness.Process) { p.Signal(syscall.SIGCONT) },
		},
		{
			"cut off", true, func(w *redxWorld, _ *harness.Process) {
				for _, g := range cut(w) {
					g.Stall()
				}
			},
			func(w *redxWorld, _ *harness.Process) {
				for _, g := range cut(w) {
					require.NoError(w.t, g.Open())
				}
			},
		},
	}
	harness.EachOf(t, rows, func(r row) string { return r.name }, func(t *testing.T, judge *testserver.Server, r row) {
		w := redxStart(t, judge, r.gates, redxJob{Kind: "lock", Lease: lease})
		clients, closeAll, err := redxClients(t.Context(), w.addrs(1))
		require.NoError(t, err)
		defer closeAll()
		next := redxLock("lock", redxName, 1, clients)
		p := redxHolder(w)

		// It is renewed past its first lease.
		_, err = next.Lock(t.Context(), lock.Wait(lease*5/4))
		require.ErrorIs(t, err, lock.ErrNotAcquired)

		r.fail(w, p)
		began := time.Now()
		h, err := next.Lock(t.Context())
		require.NoError(t, err)
		// The longest pause between two tries is half a second.
		require.Less(t, time.Since(began), lease+multiSlack)
		before := w.shares()
		require.Greater(t, before[0], 1)
		hears := func() { require.Contains(t, p.Line(5*time.Second), lock.ErrLost.Error()) }
		switch r.name {
		case "stopped":
			r.heal(w, p)
			hears()
		case "cut off":
			hears() // two servers have renewed it, and that was not enough
			r.heal(w, p)
		}
		if r.heal != nil {
			hears() // from Unlock
			p.Ended(30 * time.Second)
		}
		require.Equal(t, before, w.shares(), "it has written after its lease")

		// Whoever has it now has noticed nothing.
		require.Greater(t, redExists(t, w.servers, redxName), redxServers/2)
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(t.Context()))
		w.verdict()
		redNothingStays(t, w.servers)
	})
}

// A hold that goes on for long outlives every server, two at a time, while others want its lock.
func TestARedHoldOutlivesItsServersOneAfterTheOther(t *testing.T) {
	const (
		lease = 2500 * time.Millisecond
		// soon is how long it may take to have all members again: each renewal asks for them, and
		// may come upon the attempt of somebody else.
		soon = 3 * lease
	)
	harness.EachBusy(t, func(t *testing.T, judge *testserver.Server) {
		_, seed := redxSettings(t, 0, 0)
		w := redxStart(t, judge, false, redxJob{Kind: "lock", Seed: seed, Lease: lease})
		clients, closeAll, err := redxClients(t.Context(), w.addrs(redxProcesses), redlatch.WithWatchdogTimeout(lease))
		require.NoError(t, err)
		defer closeAll()
		h, err := redxLock("lock", redxName, 0, clients).Lock(t.Context())
		require.NoError(t, err)
		w.begin()

		done := make(chan struct{})
		worked := make(chan error, 1)
		go func() {
			j := redxJudge{harness.Conn(t, judge.Addr), strconv.Itoa(redxProcesses)}
			for {
				select {
				case <-done:
					worked <- j.leave(context.Background(), "held")
					return
				case <-time.After(5 * time.Millisecond):
				}
				if ok, err := j.work(context.Background(), "held", h); err != nil || !ok {
					worked <- errors.Join(errors.New("the hold is over"), err)
					return
				}
			}
		}()
		whole := func() bool {
			for i, s := range w.servers {
				owners, err := testserver.Query(s.Addr, "HKEYS", redxName)
				if err != nil || len(owners) != 1 || !strings.HasPrefix(owners[0], clients[i].ID()) {
					return false
				}
			}
			return true
		}
		harness.Eventually(t, soon, "all members are there", whole)
		for i := 0; i < harness.Size(1, redxServers) && h.Context().Err() == nil; i++ {
			one, other := w.servers[i], w.servers[(i+1)%redxServers]
			one.Kill()
			other.Pause()
			time.Sleep(lease + lease/10) // one that has lost its data stays away until no lease is left
			require.NoError(t, one.Restart())
			other.Resume()
			began := time.Now()
			harness.Eventually(t, soon, "all members are there again", func() bool { return whole() || h.Context().Err() != nil })
			t.Log("whole after", time.Since(began))
		}
		require.NoError(t, context.Cause(h.Context()))
		close(done)
		require.NoError(t, <-worked)
		shares := w.shares()
		require.Equal(t, make([]int, redxProcesses), shares[:redxProcesses])
		require.NoError(t, h.Unlock(t.Context()))
		harness.Eventually(t, 5*lease, "the others get on", func() bool { return w.shares()[0] > 0 })
		w.end()
		w.verdict()
	})
}
