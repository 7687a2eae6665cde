package fairlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
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

// Keys that waitWorker reads and writes.
const (
	ordersKey = "orders for " // and the number of the worker: a list of orders
	logKey    = "log"         // a list of numbers of waiters, or of owners for those without, written while they held the lock
	leftKey   = "left"        // a list of the numbers of waiters that gave up
)

// order makes a worker wait for the lock.
type order struct {
	number int
	hold   time.Duration // for how long to hold it
	giveUp time.Duration // for how long to wait for it; 0: as long as it takes
	times  int           // how many waiters do so; 0: one
}

func (o order) String() string {
	return fmt.Sprint(o.number, " ", int64(o.hold), " ", int64(o.giveUp), " ", max(o.times, 1))
}

// waitWorker waits for the lock in a goroutine for each order, until the order is "quit".
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
			if ctx.Err() == nil || !errors.Is(err, lock.ErrNotAcquired) && !errors.Is(err, lock.ErrIndeterminate) {
				return err
			}
			return push(leftKey, strconv.Itoa(o.number))
		}
		entry := strconv.Itoa(o.number)
		if o.number == 0 {
			entry = h.Owner().String()
		}
		if err := push(logKey, entry); err != nil {
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

// crowd is a number of processes that wait for one lock, and the waiters in its queue.
type crowd struct {
	*testing.T
	s     *testserver.Server
	conn  rueidis.Client
	procs []*harness.Process

	sent  int
	known map[string]bool // owners that have been in the queue
}

func newCrowd(t *testing.T, s *testserver.Server, n int, timeout, fairWait time.Duration) *crowd {
	c := &crowd{T: t, s: s, conn: harness.Conn(t, s.Addr), known: map[string]bool{}}
	for i := range n {
		c.procs = append(c.procs, harness.Spawn(t, "wait", s.Addr, strconv.Itoa(i), timeout.String(), fairWait.String()))
	}
	for _, p := range c.procs {
		require.Equal(t, "ready", p.Line(30*time.Second))
	}
	return c
}

// send gives a process an order.
func (c *crowd) send(process int, words string) {
	c.Helper()
	require.NoError(c, c.conn.Do(c.Context(), c.conn.B().Rpush().Key(ordersKey+strconv.Itoa(process)).Element(words).Build()).Error())
}

// latest returns the last owners in the queue, and whether the waiter of a number has had the
// lock or has left.
var latest = rueidis.NewLuaScript(`
	local over = redis.call('LPOS', KEYS[2], ARGV[1]) or redis.call('LPOS', KEYS[3], ARGV[1])
	return {redis.call('LRANGE', KEYS[1], -64, -1), over and 1 or 0}`)

// queue makes a process wait, and returns once its waiter is in the queue, or has left it.
func (c *crowd) queue(process int, o order) {
	c.Helper()
	c.sent++
	o.number = c.sent
	c.send(process, o.String())
	harness.Eventually(c, soon, "the next one comes", func() bool {
		reply, err := latest.Exec(c.Context(), c.conn, []string{listKey("orders"), logKey, leftKey}, []string{strconv.Itoa(o.number)}).ToArray()
		require.NoError(c, err)
		owners, err := reply[0].AsStrSlice()
		require.NoError(c, err)
		for _, owner := range owners {
			if !c.known[owner] {
				c.known[owner] = true
				return true
			}
		}
		over, err := reply[1].AsInt64()
		require.NoError(c, err)
		return over == 1
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

// finish ends the processes that have not been killed, and verifies that only the keys of
// the test are left.
func (c *crowd) finish(killed ...int) {
	c.Helper()
	for i := range c.procs {
		if !slices.Contains(killed, i) {
			c.send(i, "quit")
		}
	}
	for i, p := range c.procs {
		if !slices.Contains(killed, i) {
			var listeners, channels int
			_, err := fmt.Sscan(p.Line(soon), &listeners, &channels)
			require.NoError(c, err)
			require.LessOrEqual(c, listeners, 1, "one waiter of a process listens")
			require.LessOrEqual(c, channels, listeners+129, "these channels, and those that are unsubscribed together")
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

// processesOf returns the clients of owners. Within a process, holds share the owner of the
// claim that they pass on.
func processesOf(owners []string) []string {
	clients := make([]string, len(owners))
	for i, o := range owners {
		clients[i], _, _ = strings.Cut(o, ":")
	}
	return clients
}

// The order of arrival is the order of holds across processes, while waiters come, hold and
// leave all the time.
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
				harness.Eventually(t, soon, "the lock has changed hands", func() bool {
					return c.sent-c.length(logKey)-c.length(leftKey) < processes*goroutines
				})
			}
			c.queue(random.IntN(processes), o)
		}
		harness.Eventually(t, soon, "all have had the lock, or left", func() bool {
			return c.length(logKey)+c.length(leftKey) == arrivals
		})
		had := c.list(logKey)
		left := c.list(leftKey)
		var want []string
		for n := range arrivals {
			if number := strconv.Itoa(n + 1); !slices.Contains(left, number) {
				want = append(want, number)
			}
		}
		t.Logf("%d had the lock, %d left", len(had), len(left))
		require.GreaterOrEqual(t, len(had), arrivals*3/4)
		require.NotEmpty(t, left)
		require.Equal(t, want, had)
		c.finish()
	})
}

const (
	processTimeout = 4500 * time.Millisecond // of the watchdog
	// positionTTL is how long a dead waiter keeps its queue position. The waiters behind it
	// learn of its end from their next heartbeat.
	positionTTL = processTimeout / 3
	deadFor     = positionTTL + positionTTL/3
)

// Processes are killed at the head of the queue, in its middle and at its tail. The other
// waiters keep their order. A dead head delays them until its queue position ends.
func TestKilledProcessesLoseTheirPositions(t *testing.T) {
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
				survivors = append(survivors, strconv.Itoa(c.sent))
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

		// Only the dead are left in the queue.
		require.NoError(t, l.Do(t.Context(), nothing, lock.Wait(deadFor+slack)))
		c.finish(head, middle, tail)
	})
}

// The queue of dead waiters expires even if no other client comes.
func TestTheQueueOfTheDeadExpires(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newCrowd(t, s, 1, redlatch.DefaultWatchdogTimeout, time.Second)
		h := mustLock(t, harness.Client(t, s).FairLock("orders"), lock.Lease(5*time.Second))
		c.queue(0, order{})
		c.queue(0, order{})
		c.procs[0].Kill()
		require.Len(t, waiting(t, s.Addr, "orders"), 2)
		c.finish(0)
		runtime.KeepAlive(h) // and not released: that would read the queue
	})
}

// A process that was stopped for longer than positionTTL enters the queue again, at the
// end, when it continues.
func TestAStoppedProcessQueuesAgain(t *testing.T) {
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
		require.GreaterOrEqual(t, took, positionTTL/3) // the last heartbeat may have been a while ago
		// One release, a heartbeat every third of positionTTL, and attempts because of that and
		// of the message that the head has changed.
		asked := after["evalsha"] + after["eval"] - before["evalsha"] - before["eval"]
		t.Logf("acquired after %v, with %d scripts", took, asked)
		require.LessOrEqual(t, asked, 1+int(took/(positionTTL/3))+1+3)

		w3 := queue(t, t.Context(), s.Addr, l)
		c.procs[0].Signal(syscall.SIGCONT)
		harness.Eventually(t, soon, "it has entered the queue again", func() bool { return len(waiting(t, s.Addr, "orders")) == 2 })
		require.Equal(t, w3.Owner, waiting(t, s.Addr, "orders")[0])
		require.Zero(t, c.length(logKey))
		require.NoError(t, h2.Unlock(t.Context()))
		h3 := w3.Got()
		require.Zero(t, c.length(logKey))
		require.NoError(t, h3.Unlock(t.Context()))
		harness.Eventually(t, soon, "it has the lock", func() bool { return c.length(logKey) == 1 })
		c.finish()
	})
}
