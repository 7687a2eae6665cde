package fairlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
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
		goroutines = 8
		maxHold    = 2 * time.Millisecond
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		processes, arrivals := harness.Size(4, 8), harness.Size(200, 1200)
		c := newCrowd(t, s, processes, redlatch.DefaultWatchdogTimeout, redlatch.DefaultFairWaitTimeout)
		seed := uint64(time.Now().UnixNano())
		t.Log("seed", seed)
		random := rand.New(rand.NewPCG(seed, 0))
		h := mustLock(t, harness.Client(t, s).FairLock("orders"))
		for i := range arrivals {
			o := order{hold: time.Duration(random.Int64N(int64(maxHold)))}
			if random.IntN(8) == 0 {
				o.giveUp = time.Duration(random.Int64N(int64(100 * time.Millisecond)))
			}
			if i == processes*goroutines {
				require.NoError(t, h.Unlock(t.Context()))
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
		had := c.list(logKey)
		left := map[string]bool{}
		for _, number := range c.list(leftKey) {
			n, err := strconv.Atoi(number)
			require.NoError(t, err)
			left[c.numbers[n]] = true
		}
		want := slices.DeleteFunc(slices.Clone(c.arrivals), func(owner string) bool { return left[owner] })
		t.Logf("%d had the lock, %d left", len(had), len(left))
		require.GreaterOrEqual(t, len(had), arrivals*3/4)
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
		require.NoError(t, h.Unlock(t.Context()))
		harness.Eventually(t, deadFor+slack, "the first survivor has the lock", func() bool { return c.length(logKey) > 0 })
		c.procs[middle].Kill()
		harness.Eventually(t, hold+deadFor+slack, "the second survivor has the lock", func() bool { return c.length(logKey) > 1 })
		harness.Eventually(t, slack, "all have had it", func() bool { return c.length(logKey) == len(survivors) })
		require.Equal(t, survivors, c.list(logKey))

		// Whoever comes next has nobody to wait for but the dead.
		require.NoError(t, l.Do(t.Context(), nothing, lock.Wait(deadFor+slack)))
		c.finish(head, middle, tail)
	})
}

// If nobody comes any more the queue of the dead goes by itself.
func TestTheQueueOfTheDeadExpires(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newCrowd(t, s, 1, redlatch.DefaultWatchdogTimeout, time.Second)
		h := mustLock(t, harness.Client(t, s).FairLock("orders"), lock.Lease(time.Second))
		c.queue(0, order{})
		c.queue(0, order{})
		c.procs[0].Kill()
		require.Len(t, line(t, s.Addr, "orders"), 2)
		c.finish(0)
		runtime.KeepAlive(h) // which is not given back: that would look at the queue
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
		w2 := asleep(t, t.Context(), s.Addr, harness.Client(t, s, timeout))
		before := harness.Commands(t, c.conn)
		c.procs[0].Signal(syscall.SIGSTOP)
		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		h2 := w2.Got()
		after, took := harness.Commands(t, c.conn), w2.At.Sub(begin)
		require.Less(t, took, deadFor+slack)
		require.GreaterOrEqual(t, took, placeTime/3) // the last heartbeat may have been a while ago
		// One release; a sign of life every third of the place's time; an attempt when
		// the dead may be so, one when told that the place is free, and none besides.
		asked := after["evalsha"] + after["eval"] - before["evalsha"] - before["eval"]
		t.Logf("got in after %v, with %d scripts", took, asked)
		require.LessOrEqual(t, asked, 1+int(took/(placeTime/3))+1+3)

		w3 := queue(t, t.Context(), s.Addr, l)
		c.procs[0].Signal(syscall.SIGCONT)
		harness.Eventually(t, soon, "it has queued anew", func() bool { return len(line(t, s.Addr, "orders")) == 2 })
		require.Equal(t, w3.Owner, line(t, s.Addr, "orders")[0])
		require.Zero(t, c.length(logKey))
		require.NoError(t, h2.Unlock(t.Context()))
		h3 := w3.Got()
		require.Zero(t, c.length(logKey))
		require.NoError(t, h3.Unlock(t.Context()))
		harness.Eventually(t, soon, "it has the lock", func() bool { return c.length(logKey) == 1 })
		c.finish()
	})
}
