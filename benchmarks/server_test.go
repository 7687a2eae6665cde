package benchmarks

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

// The benchmarks of this file measure the time that the server spends on scripts, as INFO
// commandstats reports it: usec/script is its mean. They write the keys of very many waiters or
// readers by themselves, with the names that redlatch and Redisson give them.

// scripts returns the number of scripts that the server has run, and the time that took.
func scripts(b *testing.B, c rueidis.Client) (calls, usec float64) {
	b.Helper()
	info, err := c.Do(context.Background(), c.B().Info().Section("commandstats").Build()).ToString()
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(info) {
		if rest, ok := strings.CutPrefix(line, "cmdstat_evalsha:"); ok {
			var n, t float64
			if _, err := fmt.Sscanf(rest, "calls=%f,usec=%f,", &n, &t); err != nil {
				b.Fatal(err)
			}
			return n, t
		}
	}
	return 0, 0
}

// measure runs a step b.N times and reports the server's time for each of its scripts.
func measure(b *testing.B, c rueidis.Client, step func() error) {
	b.Helper()
	calls, usec := scripts(b, c)
	for b.Loop() {
		if err := step(); err != nil {
			b.Fatal(err)
		}
	}
	after, took := scripts(b, c)
	if after > calls {
		b.ReportMetric((took-usec)/(after-calls), "usec/script")
	}
}

// fill runs a script that fills the keys, after it has deleted them.
func fill(b *testing.B, c rueidis.Client, script string, keys []string, args ...string) {
	b.Helper()
	ctx := context.Background()
	if err := c.Do(ctx, c.B().Del().Key(keys...).Build()).Error(); err != nil {
		b.Fatal(err)
	}
	if err := rueidis.NewLuaScript(script).Exec(ctx, c, keys, args).Error(); !rueidis.IsRedisNil(err) {
		b.Fatal(err)
	}
}

// queueOf fills the queue of the fair lock "queue" with waiters of redlatch, and one of Java.
const queueOf = `for i = 1, tonumber(ARGV[1]) do
	local owner, java = ARGV[2] .. ':' .. i, i == tonumber(ARGV[3])
	redis.call('RPUSH', KEYS[1], owner)
	redis.call('ZADD', KEYS[2], ARGV[4] + i, owner)
	if not java then
		redis.call('ZADD', KEYS[3], ARGV[4], owner)
		redis.call('ZADD', KEYS[4], i, owner)
	end
end`

var queueKeys = []string{
	"redisson_lock_queue:{queue}", "redisson_lock_timeout:{queue}", "redlatch_lock_alive:{queue}", "redlatch_lock_order:{queue}",
}

const otherID = "5d1f7a52-31c4-4c1b-8f0e-7f2a9f4f3d02"

// fillQueue fills the queue with n waiters that stay alive, one of them Java's.
func fillQueue(b *testing.B, c rueidis.Client, n int) {
	later := strconv.FormatInt(time.Now().Add(time.Hour).UnixMilli(), 10)
	fill(b, c, queueOf, queueKeys, strconv.Itoa(n), otherID, strconv.Itoa(n/2), later)
}

// sizes are the numbers of waiters or readers.
var sizes = []int{100, 10_000}

// BenchmarkServerHandOver measures how a fair lock passes from one process to another, with one
// Java waiter among the others in the queue: an attempt that enters the queue, the release, and
// the attempt of the first waiter.
func BenchmarkServerHandOver(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("waiters=%d", n), func(b *testing.B) {
			c, ctx := conn(b), context.Background()
			fillQueue(b, c, 0)
			holder, waiter := open(b).FairLock("queue"), open(b).FairLock("queue")
			held, err := holder.Lock(ctx)
			if err != nil {
				b.Fatal(err)
			}
			fillQueue(b, c, n)
			measure(b, c, func() error {
				got := make(chan lock.Hold, 1)
				go func() {
					h, err := waiter.Lock(ctx)
					if err != nil {
						b.Error(err)
					}
					got <- h
				}()
				if err := lastToHead(ctx, c); err != nil {
					return err
				}
				if err := held.Unlock(ctx); err != nil {
					return err
				}
				held, holder, waiter = <-got, waiter, holder
				return nil
			})
			if err := held.Unlock(ctx); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// lastToHead waits for a waiter other than those of fillQueue, and makes it the first.
func lastToHead(ctx context.Context, c rueidis.Client) error {
	for {
		last, err := c.Do(ctx, c.B().Lindex().Key(queueKeys[0]).Index(-1).Build()).ToString()
		if err != nil {
			return err
		}
		if strings.HasPrefix(last, otherID) {
			continue
		}
		for _, reply := range c.DoMulti(ctx,
			c.B().Lmove().Source(queueKeys[0]).Destination(queueKeys[0]).Right().Left().Build(),
			c.B().Zadd().Key(queueKeys[3]).ScoreMember().ScoreMember(0.5, last).Build(),
		) {
			if err := reply.Error(); err != nil {
				return err
			}
		}
		return nil
	}
}

// BenchmarkServerHeartbeat measures the heartbeats of 100 waiters of a fair lock.
func BenchmarkServerHeartbeat(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("waiters=%d", n), func(b *testing.B) {
			const mine = 100
			c, ctx := conn(b), context.Background()
			fillQueue(b, c, n)
			if err := c.Do(ctx, c.B().Hset().Key("queue").FieldValue().FieldValue(otherID+":0", "1").Build()).Error(); err != nil {
				b.Fatal(err)
			}
			// A short timeout of the watchdog, and so of the heartbeats: ten a second.
			client, err := redlatch.New(ctx, option(b), redlatch.WithWatchdogTimeout(time.Second))
			if err != nil {
				b.Fatal(err)
			}
			defer client.Close()
			waits, stop := context.WithCancel(ctx)
			done := make(chan error, mine)
			for range mine {
				go func() {
					_, err := client.FairLock("queue").Lock(waits)
					done <- err
				}()
			}
			for queued := int64(0); queued < int64(n+mine); {
				select {
				case err := <-done:
					b.Fatalf("a call does not wait: %v", err)
				default:
				}
				if queued, err = c.Do(ctx, c.B().Llen().Key(queueKeys[0]).Build()).AsInt64(); err != nil {
					b.Fatal(err)
				}
			}
			measure(b, c, func() error {
				time.Sleep(time.Second / 9)
				return nil
			})
			stop()
			for range mine {
				<-done
			}
		})
	}
}

// readersOf fills the read-write lock "readers" with readers whose leases have been renewed at
// any time of a third of them.
const readersOf = `redis.call('HSET', KEYS[1], 'mode', 'read')
local n, lease = tonumber(ARGV[1]), tonumber(ARGV[3])
for i = 1, n do
	local owner = ARGV[2] .. ':' .. i
	redis.call('HSET', KEYS[1], owner, 1)
	redis.call('SET', '{readers}:' .. owner .. ':rwlock_timeout:1', 1, 'PX', math.floor(lease - lease / 3 * i / n))
end
redis.call('PEXPIRE', KEYS[1], lease)`

// BenchmarkServerReadRelease measures the acquisition and the release of a read lock beside other
// readers. It lasts for as long as the longest of them.
func BenchmarkServerReadRelease(b *testing.B) {
	for _, n := range []int{100, 9_999} { // and one more: a lock has 10,000 readers at most
		b.Run(fmt.Sprintf("readers=%d", n), func(b *testing.B) {
			const lease = 10 * time.Minute
			c, ctx := conn(b), context.Background()
			fill(b, c, readersOf, []string{"readers"}, strconv.Itoa(n), otherID, strconv.FormatInt(lease.Milliseconds(), 10))
			l := open(b).RWLock("readers").Read()
			measure(b, c, func() error {
				h, err := l.Lock(ctx, lock.Lease(lease))
				if err != nil {
					return err
				}
				return h.Unlock(ctx)
			})
		})
	}
}
