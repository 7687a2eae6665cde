package fairlock_test

import (
	"context"
	"math"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/wire"
)

const (
	// mostWaiters is the most waiters of a queue, and mostRemoved how many one request removes or moves.
	mostWaiters, mostRemoved = 65_535, 1000
	// prompt bounds the reply of a script that does as much as it may.
	prompt = 5 * time.Second
)

// eachOwn runs a test on a server of its own, which would not answer again if a script had no bound.
func eachOwn(t *testing.T, test func(t *testing.T, w *world)) {
	for _, program := range harness.Programs(t) {
		t.Run(program, func(t *testing.T) { test(t, newWorld(t, harness.Own(t, program))) })
	}
}

// fill adds n waiters of nobody to the queue. Their scores in the sorted sets are in the order of their positions
// from first on; a set whose name is missing does not get them.
func (w *world) fill(n int, first map[string]int64) {
	w.t.Helper()
	const atOnce = 5000 // a script for all would keep the server busy for seconds
	sets, args := []string{wire.FairQueue(orders)}, []string{"", ""}
	for name, score := range first {
		sets, args = append(sets, name), append(args, strconv.FormatInt(score, 10))
	}
	const script = `
		for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do
			redis.call('RPUSH', KEYS[1], 'waiter ' .. i)
			for set = 2, #KEYS do
				redis.call('ZADD', KEYS[set], ARGV[1 + set] + i, 'waiter ' .. i)
			end
		end`
	for i := 1; i <= n; i += atOnce {
		args[0], args[1] = strconv.Itoa(i), strconv.Itoa(min(n, i+atOnce-1))
		harness.Do(w.t, w.addr, slices.Concat([]string{"EVAL", script, strconv.Itoa(len(sets))}, sets, args)...)
	}
}

// alive are the scores of waiters of redlatch whose heartbeats count for an hour.
func alive() map[string]int64 {
	late := time.Now().Add(time.Hour).UnixMilli()
	return map[string]int64{wire.FairTimeouts(orders): late, wire.FairAlive(orders): late, wire.FairOrder(orders): 1}
}

// within returns a context that ends after a bounded time.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), prompt)
	t.Cleanup(cancel)
	return ctx
}

// Every script fails on a queue that is too long, and changes nothing.
func TestAQueueThatIsTooLong(t *testing.T) {
	eachOwn(t, func(t *testing.T, w *world) {
		holder, waiters := w.held(orders, 1)
		waiter := waiters[0]
		w.fill(mostWaiters+5000, map[string]int64{wire.FairOrder(orders): 0})
		before := w.dump()
		for name, do := range map[string]func(ctx context.Context) error{
			"acquire":             func(ctx context.Context) error { _, err := w.p.Acquire(ctx, w.claim()); return err },
			"acquire again":       func(ctx context.Context) error { _, err := w.p.Acquire(ctx, waiter); return err },
			"release":             func(ctx context.Context) error { _, err := w.p.Release(ctx, holder); return err },
			"release of a waiter": func(ctx context.Context) error { _, err := w.p.Release(ctx, waiter); return err },
			"leave":               func(ctx context.Context) error { return w.p.Leave(ctx, waiter) },
			"force":               func(ctx context.Context) error { _, err := w.p.Force(ctx); return err },
			"queue":               func(ctx context.Context) error { _, err := w.p.Queue(ctx); return err },
			"transfer":            func(ctx context.Context) error { _, err := w.p.Transfer(ctx, holder, waiter.ID, lease); return err },
			"confirm for a waiter": func(ctx context.Context) error {
				_, err := fairlock.ConfirmClaim(ctx, w.p, holder, nil, ids(waiter))
				return err
			},
		} {
			require.ErrorContains(t, do(within(t)), "65535 waiters", name)
			require.Equal(t, before, w.dump(), name)
		}

		// A heartbeat sends its waiters to an attempt, which fails. Waiters of other locks keep their positions.
		_, good := w.held("good", 1)
		require.Equal(t, []bool{false, true}, w.heartbeat(waiter, good[0]))
	})
}

// A script reads the list of a queue whose keys do not fit together once, and forgets so many dead waiters.
func TestALongQueueWithoutTimes(t *testing.T) {
	eachOwn(t, func(t *testing.T, w *world) {
		holder, waiters := w.held(orders, 1)
		w.fill(9_500, map[string]int64{wire.FairOrder(orders): 0})
		// Dead waiters, before the waiters of the list in the order.
		harness.Do(t, w.addr, "EVAL", `for i = 1, 100000 do redis.call('ZADD', KEYS[1], 0, 'dead ' .. i) end`, "1", wire.FairOrder(orders))
		_, err := w.p.Acquire(within(t), waiters[0])
		require.NoError(t, err)
		for range 100 {
			waiters = append(waiters, w.claim())
		}
		_, err = w.p.AcquireAll(within(t), waiters)
		require.NoError(t, err)

		released, err := w.p.Release(within(t), holder)
		require.NoError(t, err)
		require.Equal(t, engine.Free, released.State)
		a, err := w.p.Acquire(within(t), waiters[0])
		require.NoError(t, err)
		require.True(t, a.Acquired)
	})
}

// A queue has a last place. Waiters that have one keep it.
func TestAFullQueue(t *testing.T) {
	eachOwn(t, func(t *testing.T, w *world) {
		w.held(orders, 1)
		w.fill(mostWaiters-2, alive())
		last, once := w.claim(), w.claim()
		once.Waits = false
		require.True(t, w.acquire(last).Requeued)

		before := w.dump()
		_, err := w.p.Acquire(within(t), w.claim())
		require.ErrorContains(t, err, "65535 waiters")
		require.Equal(t, before, w.dump())
		require.True(t, w.acquire(last).Queued)
		require.False(t, w.acquire(once).Acquired)

		require.Equal(t, engine.NotHeld, w.release(last).State)
		require.True(t, w.acquire(w.claim()).Requeued)
	})
}

// A request removes so many dead waiters, and the next goes on.
func TestManyDeadWaiters(t *testing.T) {
	const dead = 20 * mostRemoved
	eachOwn(t, func(t *testing.T, w *world) {
		conn := harness.Conn(t, w.addr)
		w.fill(dead, map[string]int64{wire.FairTimeouts(orders): 1})
		waiter := w.claim()
		for attempt := 0; ; attempt++ {
			before := harness.Commands(t, conn)["lpop"]
			a, err := w.p.Acquire(within(t), waiter)
			require.NoError(t, err)
			require.LessOrEqual(t, harness.Commands(t, conn)["lpop"]-before, mostRemoved)
			if a.Acquired {
				require.Equal(t, dead/mostRemoved-1, attempt+1, "and one heartbeat")
				break
			}
			require.Equal(t, time.Millisecond, a.FreeIn, "the next attempt follows at once")
			if attempt == 0 { // a heartbeat goes on as well, and sends the waiter for another attempt
				require.Equal(t, []bool{false}, w.heartbeat(waiter))
			}
		}
	})
}

// A waiter that Java has evicted goes behind so many that came earlier.
func TestManyEarlierWaiters(t *testing.T) {
	eachOwn(t, func(t *testing.T, w *world) {
		conn := harness.Conn(t, w.addr)
		w.held(orders, 0)
		w.fill(20*mostRemoved, alive())
		evicted := w.claim()
		harness.Do(t, w.addr, "ZADD", wire.FairOrder(orders), "inf", evicted.ID.String())
		harness.Do(t, w.addr, "ZADD", wire.FairAlive(orders), strconv.FormatInt(time.Now().Add(time.Hour).UnixMilli(), 10), evicted.ID.String())

		before := harness.Commands(t, conn)["lpop"]
		a, err := w.p.Acquire(within(t), evicted)
		require.NoError(t, err)
		require.True(t, a.Queued)
		require.LessOrEqual(t, harness.Commands(t, conn)["lpop"]-before, mostRemoved)
	})
}

// Queue returns the first waiters.
func TestTheFirstWaitersOfALongQueue(t *testing.T) {
	eachOwn(t, func(t *testing.T, w *world) {
		w.fill(mostWaiters, map[string]int64{wire.FairTimeouts(orders): math.MaxInt32 * int64(1000)})
		waiters, err := w.p.Queue(within(t))
		require.NoError(t, err)
		require.Len(t, waiters, 10_000)
		require.Equal(t, time.UnixMilli(math.MaxInt32*1000+1), waiters[0].Deadline)
	})
}
