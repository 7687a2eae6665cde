package fairlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
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

var workers = map[string]func(args []string) error{
	"wait": waitWorker,
	"hold": holdWorker,
}

// What waitWorker reads and writes.
const (
	ordersKey = "orders for " // and the number of the worker: a list of orders
	logKey    = "log"         // a list of owners, each written while it held the lock
	leftKey   = "left"        // a list of the numbers of waiters that gave up
)

// order is what a worker is told to do: to wait for the lock.
type order struct {
	number int
	hold   time.Duration // for how long to hold it
	giveUp time.Duration // for how long to wait for it; 0: as long as it takes
	times  int           // how many waiters do so; 0: one
}

func (o order) String() string {
	return fmt.Sprint(o.number, " ", int64(o.hold), " ", int64(o.giveUp), " ", max(o.times, 1))
}

// waitWorker waits for the lock as often as it is told to, in a goroutine each, until
// it is told to quit.
func waitWorker(args []string) error {
	addr, number := args[0], args[1]
	timeout, err := time.ParseDuration(args[2])
	if err != nil {
		return err
	}
	fairWait, err := time.ParseDuration(args[3])
	if err != nil {
		return err
	}
	ctx := context.Background()
	c, err := redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{addr}},
		redlatch.WithWatchdogTimeout(timeout), redlatch.WithFairWaitTimeout(fairWait))
	if err != nil {
		return err
	}
	defer c.Close()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}, DisableCache: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	fmt.Println("ready")

	push := func(key, value string) error {
		return conn.Do(ctx, conn.B().Rpush().Key(key).Element(value).Build()).Error()
	}
	wait := func(o order) error {
		ctx := ctx
		if o.giveUp > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, o.giveUp)
			defer cancel()
		}
		h, err := c.FairLock("orders").Lock(ctx)
		if err != nil {
			if ctx.Err() == nil || !errors.Is(err, lock.ErrNotAcquired) {
				return err
			}
			return push(leftKey, strconv.Itoa(o.number))
		}
		if err := push(logKey, h.Owner().String()); err != nil {
			return err
		}
		time.Sleep(o.hold)
		return h.Unlock(ctx)
	}
	var waiters, watcher sync.WaitGroup
	quit := make(chan struct{})
	listeners, channels := 0, 0
	watcher.Go(func() {
		for {
			stats := c.PubSub()
			listeners, channels = max(listeners, stats.Listeners), max(channels, stats.Channels)
			select {
			case <-quit:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
	failures := make(chan error, 1)
	for {
		reply, err := conn.Do(ctx, conn.B().Blpop().Key(ordersKey+number).Timeout(0).Build()).AsStrSlice()
		if err != nil {
			return err
		}
		if reply[1] == "quit" {
			break
		}
		var o order
		if _, err := fmt.Sscan(reply[1], &o.number, (*int64)(&o.hold), (*int64)(&o.giveUp), &o.times); err != nil {
			return err
		}
		for range o.times {
			waiters.Go(func() {
				if err := wait(o); err != nil {
					select {
					case failures <- err:
					default:
					}
				}
			})
		}
	}
	waiters.Wait()
	close(quit)
	watcher.Wait()
	select {
	case err := <-failures:
		return err
	default:
	}
	fmt.Println(listeners, channels)
	return nil
}

// crowd is processes that wait for one lock, and who is in its queue.
type crowd struct {
	*testing.T
	s     *testserver.Server
	conn  rueidis.Client
	procs []*harness.Process

	sent     int
	arrivals []string        // owners, in the order in which they came
	known    map[string]bool // they are
	numbers  map[int]string  // owner by the number of the order
}

func newCrowd(t *testing.T, s *testserver.Server, n int, timeout, fairWait time.Duration) *crowd {
	c := &crowd{T: t, s: s, conn: harness.Conn(t, s.Addr), known: map[string]bool{}, numbers: map[int]string{}}
	for i := range n {
		c.procs = append(c.procs, harness.Spawn(t, "wait", s.Addr, strconv.Itoa(i), timeout.String(), fairWait.String()))
	}
	for _, p := range c.procs {
		require.Equal(t, "ready", p.Line(30*time.Second))
	}
	return c
}

// tell gives a process an order.
func (c *crowd) tell(process int, words string) {
	c.Helper()
	require.NoError(c, c.conn.Do(c.Context(), c.conn.B().Rpush().Key(ordersKey+strconv.Itoa(process)).Element(words).Build()).Error())
}

// latest returns who is last in the queue and who had the lock lately, and whether the
// waiter of a number has left.
var latest = rueidis.NewLuaScriptReadOnly(`
	local owners = redis.call('LRANGE', KEYS[2], -64, -1)
	owners[#owners + 1] = redis.call('LINDEX', KEYS[1], -1) or ''
	return {owners, redis.call('LPOS', KEYS[3], ARGV[1]) and 1 or 0}`)

// queue makes a process wait and returns once the server has its waiter, or it has
// left again.
func (c *crowd) queue(process int, o order) {
	c.Helper()
	c.sent++
	o.number = c.sent
	c.tell(process, o.String())
	harness.Eventually(c, soon, "the next one comes", func() bool {
		reply, err := latest.Exec(c.Context(), c.conn, []string{listKey("orders"), logKey, leftKey}, []string{strconv.Itoa(o.number)}).ToArray()
		require.NoError(c, err)
		owners, err := reply[0].AsStrSlice()
		require.NoError(c, err)
		for _, owner := range owners {
			if owner != "" && !c.known[owner] {
				c.arrivals, c.known[owner], c.numbers[o.number] = append(c.arrivals, owner), true, owner
				return true
			}
		}
		left, err := reply[1].AsInt64()
		require.NoError(c, err)
		return left == 1
	})
}

// list returns a list that the workers write.
func (c *crowd) list(key string) []string {
	c.Helper()
	all, err := c.conn.Do(c.Context(), c.conn.B().Lrange().Key(key).Start(0).Stop(-1).Build()).AsStrSlice()
	require.NoError(c, err)
	return all
}

// length returns how many are in a list that the workers write.
func (c *crowd) length(key string) int {
	c.Helper()
	n, err := c.conn.Do(c.Context(), c.conn.B().Llen().Key(key).Build()).AsInt64()
	require.NoError(c, err)
	return int(n)
}

// finish ends those processes that have not been killed, and checks that nothing but
// what the test itself has written is left.
func (c *crowd) finish(killed ...int) {
	c.Helper()
	for i := range c.procs {
		if !slices.Contains(killed, i) {
			c.tell(i, "quit")
		}
	}
	for i, p := range c.procs {
		if !slices.Contains(killed, i) {
			var listeners, channels int
			_, err := fmt.Sscan(p.Line(soon), &listeners, &channels)
			require.NoError(c, err)
			require.LessOrEqual(c, listeners, 1, "however many wait, one listens")
			require.LessOrEqual(c, channels, 2, "that one, and one that is being given up")
		}
	}
	for i, p := range c.procs {
		if !slices.Contains(killed, i) {
			p.Ended(soon)
		}
	}
	harness.Do(c, c.s.Addr, "DEL", logKey, leftKey)
	harness.NothingLeft(c, c.s.Addr)
}

// Whoever comes first has the lock first, whatever process it is in, while others
// come, hold and leave all the time.
func TestProcessesHaveTheLockInTheOrderOfTheirArrival(t *testing.T) {
	const (
		processes, goroutines = 8, 8
		arrivals              = 1200
		maxHold               = 2 * time.Millisecond
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newCrowd(t, s, processes, redlatch.DefaultWatchdogTimeout, redlatch.DefaultFairWaitTimeout)
		seed := uint64(time.Now().UnixNano())
		t.Log("seed", seed)
		random := rand.New(rand.NewPCG(seed, 0))
		h := mustLock(t, harness.Client(t, s).FairLock("orders"))
		begin := time.Now()
		for i := range arrivals {
			o := order{hold: time.Duration(random.Int64N(int64(maxHold)))}
			if random.IntN(8) == 0 {
				o.giveUp = time.Duration(random.Int64N(int64(100 * time.Millisecond)))
			}
			if i == processes*goroutines {
				require.NoError(t, h.Unlock(t.Context()))
				begin = time.Now()
			}
			if i >= processes*goroutines {
				harness.Eventually(t, soon, "somebody has had the lock", func() bool {
					return c.sent-c.length(logKey)-c.length(leftKey) < processes*goroutines
				})
			}
			c.queue(random.IntN(processes), o)
		}
		harness.Eventually(t, soon, "everybody has had the lock, or left", func() bool {
			return c.length(logKey)+c.length(leftKey) == arrivals
		})
		had, took := c.list(logKey), time.Since(begin)

		left := map[string]bool{}
		for _, number := range c.list(leftKey) {
			n, err := strconv.Atoi(number)
			require.NoError(t, err)
			left[c.numbers[n]] = true
		}
		want := slices.DeleteFunc(slices.Clone(c.arrivals), func(owner string) bool { return left[owner] })
		t.Logf("%d had the lock, %v each; %d left", len(had), took/time.Duration(len(had)), len(left))
		require.GreaterOrEqual(t, len(had), 1000)
		require.NotEmpty(t, left)
		require.Equal(t, want, had)
		c.finish()
	})
}

const (
	processTimeout = 4500 * time.Millisecond // of the watchdog
	// placeTime is for how long the place of a waiter that is dead is kept. Those
	// behind it hear of its end with their next sign of life.
	placeTime = processTimeout / 3
	deadFor   = placeTime + placeTime/3
)

// Processes are killed at the head of the queue, in its middle and at its tail. The
// others wait for each that has become the head until its place is gone, and keep
// their order.
func TestKilledProcessesLoseTheirPlaces(t *testing.T) {
	const (
		head, first, middle, second, tail = 0, 1, 2, 3, 4 // processes
		hold                              = 300 * time.Millisecond
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newCrowd(t, s, 5, processTimeout, redlatch.DefaultFairWaitTimeout)
		l := harness.Client(t, s, redlatch.WithWatchdogTimeout(processTimeout)).FairLock("orders")
		h := mustLock(t, l)
		var survivors []string
		for _, p := range []int{head, head, first, middle, second, middle, first, head, second, tail, tail} {
			o := order{}
			if len(survivors) == 0 {
				o.hold = hold
			}
			c.queue(p, o)
			if p == first || p == second {
				survivors = append(survivors, c.arrivals[len(c.arrivals)-1])
			}
		}
		c.procs[head].Kill()
		c.procs[tail].Kill()
		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		harness.Eventually(t, deadFor+slack, "the first survivor has the lock", func() bool { return c.length(logKey) > 0 })
		t.Logf("the head was dead for %v", time.Since(begin))
		c.procs[middle].Kill()
		begin = time.Now()
		harness.Eventually(t, hold+deadFor+slack, "the second survivor has the lock", func() bool { return c.length(logKey) > 1 })
		t.Logf("those in the middle were dead for %v", time.Since(begin))
		harness.Eventually(t, slack, "all have had it", func() bool { return c.length(logKey) == len(survivors) })
		require.Equal(t, survivors, c.list(logKey))

		// Whoever comes next has nobody to wait for but the dead.
		begin = time.Now()
		require.NoError(t, l.Do(t.Context(), nothing))
		require.Less(t, time.Since(begin), deadFor+slack)
		c.finish(head, middle, tail)
	})
}

// If nobody comes any more the queue of the dead goes by itself.
func TestTheQueueOfTheDeadExpires(t *testing.T) {
	const fairWait = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newCrowd(t, s, 1, time.Second, fairWait)
		h := mustLock(t, harness.Client(t, s).FairLock("orders"), lock.Lease(time.Second))
		c.queue(0, order{})
		c.queue(0, order{})
		c.procs[0].Kill()
		require.NoError(t, h.Unlock(t.Context()))
		require.Len(t, line(t, s.Addr, "orders"), 2)
		c.finish(0)
	})
}

// A process that was stopped for longer than its place is kept loses that, no more:
// it queues anew when it goes on.
func TestAStoppedProcessQueuesAnew(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newCrowd(t, s, 1, processTimeout, redlatch.DefaultFairWaitTimeout)
		timeout := redlatch.WithWatchdogTimeout(processTimeout)
		l := harness.Client(t, s, timeout).FairLock("orders")
		h := mustLock(t, l)
		c.queue(0, order{})
		w2 := asleep(t, t.Context(), s.Addr, harness.Client(t, s, timeout).FairLock("orders"))
		before := harness.Commands(t, c.conn)
		c.procs[0].Signal(syscall.SIGSTOP)
		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		h2 := w2.acquired()
		after := harness.Commands(t, c.conn)
		require.Less(t, w2.at.Sub(begin), deadFor+slack)
		require.GreaterOrEqual(t, w2.at.Sub(begin), placeTime/3) // the last sign of life may have been a while ago
		// One release; a sign of life every third of the place's time; an attempt when
		// the dead may be so, one when told that the place is free, and none besides.
		asked := after["evalsha"] + after["eval"] - before["evalsha"] - before["eval"]
		t.Logf("got in after %v, with %d scripts", w2.at.Sub(begin), asked)
		require.LessOrEqual(t, asked, 1+int(deadFor/(placeTime/3))+1+3)

		w3 := queue(t, t.Context(), s.Addr, l)
		c.procs[0].Signal(syscall.SIGCONT)
		harness.Eventually(t, soon, "it has queued anew", func() bool { return len(line(t, s.Addr, "orders")) == 2 })
		require.Equal(t, w3.owner, line(t, s.Addr, "orders")[0])
		require.Zero(t, c.length(logKey))
		require.NoError(t, h2.Unlock(t.Context()))
		h3 := w3.acquired()
		require.Zero(t, c.length(logKey))
		require.NoError(t, h3.Unlock(t.Context()))
		harness.Eventually(t, soon, "it has the lock", func() bool { return c.length(logKey) == 1 })
		c.finish()
	})
}

// java does what a client in Java would do about the lock "orders".
type java struct {
	t     testing.TB
	conn  rueidis.Client
	owner string
	wait  time.Duration // of its call, which is what its arithmetic uses
}

func newJava(t testing.TB, addr string, number int, wait time.Duration) *java {
	return &java{t, harness.Conn(t, addr), fmt.Sprintf("5d1f7a52-31c4-4c1b-8f0e-7f2a9f4f3d02:%d", number), wait}
}

// javaEvict is the beginning of what Java says: a head whose deadline has passed, by
// the clock of the client, goes.
const javaEvict = `
	local lock, list, deadlines, me, now = KEYS[1], KEYS[2], KEYS[3], ARGV[1], tonumber(ARGV[2])
	while true do
		local head = redis.call('LINDEX', list, 0)
		local deadline = head and redis.call('ZSCORE', deadlines, head)
		if not deadline or tonumber(deadline) > now then
			break
		end
		redis.call('ZREM', deadlines, head)
		redis.call('LPOP', list)
	end`

var peerAcquire = rueidis.NewLuaScript(javaEvict + `
	local lease, wait = ARGV[3], tonumber(ARGV[4])
	local head = redis.call('LINDEX', list, 0)
	if redis.call('EXISTS', lock) == 0 and (not head or head == me) then
		redis.call('LPOP', list)
		redis.call('ZREM', deadlines, me)
		for _, other in ipairs(redis.call('ZRANGE', deadlines, 0, -1)) do
			redis.call('ZINCRBY', deadlines, -wait, other)
		end
		redis.call('HSET', lock, me, 1)
		redis.call('PEXPIRE', lock, lease)
		return 1
	end
	if not redis.call('ZSCORE', deadlines, me) then
		local last = redis.call('LINDEX', list, -1)
		local ttl = last and redis.call('ZSCORE', deadlines, last) - now or redis.call('PTTL', lock)
		redis.call('ZADD', deadlines, now + ttl + wait, me)
		redis.call('RPUSH', list, me)
	end
	return 0`)

var peerRelease = rueidis.NewLuaScript(javaEvict + `
	redis.call('DEL', lock)
	local head = redis.call('LINDEX', list, 0)
	return head and redis.call('PUBLISH', 'redisson_lock__channel:{' .. lock .. '}:' .. head, '0') or 0`)

func (j *java) exec(script *rueidis.Lua, more ...string) int64 {
	j.t.Helper()
	args := append([]string{j.owner, strconv.FormatInt(time.Now().UnixMilli(), 10)}, more...)
	n, err := script.Exec(context.Background(), j.conn, []string{"orders", listKey("orders"), deadlinesKey("orders")}, args).AsInt64()
	require.NoError(j.t, err)
	return n
}

// acquire takes the lock if it is its turn, and queues otherwise.
func (j *java) acquire() bool {
	j.t.Helper()
	const lease = "30000"
	return j.exec(peerAcquire, lease, strconv.FormatInt(j.wait.Milliseconds(), 10)) == 1
}

func (j *java) release() {
	j.t.Helper()
	j.exec(peerRelease)
}

// listen returns what waits for the next message that is published for it.
func (j *java) listen() (heard chan string, next func() string) {
	j.t.Helper()
	heard = make(chan string, 10)
	confirmed := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	j.t.Cleanup(cancel)
	ctx = rueidis.WithOnSubscriptionHook(ctx, func(rueidis.PubSubSubscription) { close(confirmed) })
	go func() {
		_ = j.conn.Receive(ctx, j.conn.B().Subscribe().Channel("redisson_lock__channel:{orders}:"+j.owner).Build(),
			func(m rueidis.PubSubMessage) { heard <- m.Message })
	}()
	<-confirmed
	return heard, func() string {
		j.t.Helper()
		select {
		case message := <-heard:
			return message
		case <-time.After(soon):
			require.FailNow(j.t, "Java is not told")
			return ""
		}
	}
}

func TestJavaWaitsInTheSameQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		j1 := newJava(t, s.Addr, 1, redlatch.DefaultFairWaitTimeout)
		j2 := newJava(t, s.Addr, 2, redlatch.DefaultFairWaitTimeout)
		heard1, next1 := j1.listen()
		heard2, next2 := j2.listen()
		for _, ctx := range []context.Context{t.Context(), lock.WithOwner(t.Context(), c.NewOwner())} {
			h, err := c.FairLock("orders").Lock(ctx)
			require.NoError(t, err)
			require.False(t, j1.acquire())
			here := queue(t, t.Context(), s.Addr, c.FairLock("orders"))
			there := queue(t, t.Context(), s.Addr, harness.Client(t, s).FairLock("orders"))
			require.False(t, j2.acquire())
			require.Equal(t, []string{j1.owner, here.owner, there.owner, j2.owner}, line(t, s.Addr, "orders"))

			// One of this process waits, and is not the first.
			require.NoError(t, h.Unlock(ctx))
			require.Equal(t, "0", next1())
			require.False(t, j2.acquire())
			_, err = c.FairLock("orders").TryLock(ctx)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.True(t, here.waiting())
			require.True(t, j1.acquire())
			begin := time.Now()
			j1.release()
			h = here.acquired()
			require.Less(t, here.at.Sub(begin), 3*time.Second) // it was told: well before any poll
			require.Empty(t, heard2)
			require.NoError(t, h.Unlock(t.Context()))
			h = there.acquired()
			require.NoError(t, h.Unlock(t.Context()))
			require.Equal(t, "0", next2())
			require.True(t, j2.acquire())
			j2.release()
			require.Empty(t, heard1)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// A client in Java that died at the head holds up the others until its deadline, and
// no longer; they do not poll hot meanwhile.
func TestADeadJavaWaiterHoldsUpTheOthersUntilItsDeadline(t *testing.T) {
	const wait = 1500 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		conn := harness.Conn(t, s.Addr)
		h := mustLock(t, c.FairLock("orders"), lock.Lease(500*time.Millisecond))
		dead := newJava(t, s.Addr, 1, wait)
		require.False(t, dead.acquire())
		ours := asleep(t, t.Context(), s.Addr, harness.Client(t, s).FairLock("orders"))
		queued, err := c.FairLock("orders").Queue(t.Context())
		require.NoError(t, err)
		require.Len(t, queued, 2)
		require.Equal(t, dead.owner, queued[0].Owner.String())
		require.NoError(t, h.Unlock(t.Context()))
		before := harness.Commands(t, conn)["evalsha"]
		next := ours.acquired()
		asked := harness.Commands(t, conn)["evalsha"] - before
		late := ours.at.Sub(queued[0].Deadline)
		t.Logf("%v after its deadline, with %d scripts", late, asked)
		require.GreaterOrEqual(t, late, -5*time.Millisecond)
		require.Less(t, late, slack)
		require.LessOrEqual(t, asked, 3)
		require.NoError(t, next.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// A Java client takes its wait back from all who queue when it acquires. Those of
// ours survive that, and what ours take back leaves a Java client its place.
func TestAJavaAcquirerEvictsNobody(t *testing.T) {
	const fairWait = 5 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := clients(t, s, 2, redlatch.WithFairWaitTimeout(fairWait), redlatch.WithWatchdogTimeout(processTimeout))
		h := mustLock(t, all[0].FairLock("orders"), lock.Lease(time.Minute))
		j1, j2, last := newJava(t, s.Addr, 1, fairWait), newJava(t, s.Addr, 2, fairWait), newJava(t, s.Addr, 3, fairWait)
		require.False(t, j1.acquire())
		require.False(t, j2.acquire())
		var ours []*caller
		for i := range 4 {
			ours = append(ours, queue(t, t.Context(), s.Addr, all[i%2].FairLock("orders")))
		}
		require.False(t, last.acquire())
		want := line(t, s.Addr, "orders")
		require.Len(t, want, 7)
		require.NoError(t, h.Unlock(t.Context()))
		for i, j := range []*java{j1, j2} {
			require.True(t, j.acquire())
			require.False(t, last.acquire()) // and evicts whom it finds in the past
			require.Equal(t, want[i+1:], line(t, s.Addr, "orders"))
			<-time.After(placeTime) // the lock is held for a while, and signs of life are given
			require.False(t, last.acquire())
			require.Equal(t, want[i+1:], line(t, s.Addr, "orders"))
			j.release()
		}
		for i, w := range ours {
			h := w.acquired()
			require.False(t, last.acquire())
			require.Equal(t, want[i+3:], line(t, s.Addr, "orders"))
			require.NoError(t, h.Unlock(t.Context()))
		}
		require.True(t, last.acquire())
		last.release()
		harness.NothingLeft(t, s.Addr)
	})
}

// With a wait longer than theirs a Java client pushes our waiters into the past, and
// evicts them. With their next sign of life they are back at the head. They need not
// have the order there in which their client has them, and get in all the same, each
// with a sign of life at the latest.
func TestEvictedWaitersComeBack(t *testing.T) {
	const fairWait = 5 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, n := range []int{1, 2} { // clients
			all := clients(t, s, n, redlatch.WithFairWaitTimeout(fairWait), redlatch.WithWatchdogTimeout(processTimeout))
			h := mustLock(t, harness.Client(t, s).FairLock("orders"))
			j1, j2 := newJava(t, s.Addr, 1, time.Hour), newJava(t, s.Addr, 2, fairWait)
			require.False(t, j1.acquire())
			var ours []*caller
			var owners []string
			for i := range 4 {
				enter := asleep // the first of a process
				if i >= n {
					enter = queue
				}
				w := enter(t, t.Context(), s.Addr, all[i%n].FairLock("orders"))
				ours, owners = append(ours, w), append(owners, w.owner)
			}
			require.NoError(t, h.Unlock(t.Context()))
			require.True(t, j1.acquire())
			require.False(t, j2.acquire())
			t.Logf("%d of %d are evicted", 1+len(owners)-len(line(t, s.Addr, "orders")), len(owners))
			harness.Eventually(t, placeTime/3+slack, "they are back", func() bool { return len(line(t, s.Addr, "orders")) == len(owners)+1 })
			back := line(t, s.Addr, "orders")
			require.Equal(t, j2.owner, back[len(owners)])
			require.ElementsMatch(t, owners, back[:len(owners)])
			begin := time.Now()
			j1.release()
			var wg sync.WaitGroup
			for _, w := range ours {
				wg.Go(func() { inOrder(t, w) })
			}
			wg.Wait()
			require.Less(t, time.Since(begin), time.Duration(len(ours))*placeTime/3+slack)
			require.True(t, j2.acquire())
			j2.release()
			harness.NothingLeft(t, s.Addr)
		}
	})
}
