package rwlock_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

func reading(c *redlatch.Client, name string) harness.Lock { return c.RWLock(name).Read() }
func writing(c *redlatch.Client, name string) harness.Lock { return c.RWLock(name).Write() }

// sideOf is how to get at one side of a lock.
type sideOf func(c *redlatch.Client, name string) harness.Lock

var sides = []struct {
	name string
	of   sideOf
}{{"read", reading}, {"write", writing}}

// ofSide returns the side of the lock orders that is told.
func ofSide(name string, c *redlatch.Client) lock.Locker {
	if name == "read" {
		return reading(c, "orders")
	}
	return writing(c, "orders")
}

// eachSide runs a test for both sides on every server.
func eachSide(t *testing.T, test func(t *testing.T, s *testserver.Server, of sideOf)) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, side := range sides {
			t.Run(side.name, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				test(t, s, side.of)
			})
		}
	})
}

func nothing(context.Context) error { return nil }

// mustLock takes a lock for an owner of its own.
func mustLock(t *testing.T, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	return mustLockAs(t, t.Context(), l, opts...)
}

// mustLockAs takes a lock for the owner of ctx.
func mustLockAs(t *testing.T, ctx context.Context, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(ctx, opts...)
	require.NoError(t, err)
	return h
}

func unlock(t *testing.T, h lock.Hold) {
	t.Helper()
	require.NoError(t, h.Unlock(t.Context()))
}

// tries makes one attempt and reports whether it succeeded, after giving the lock
// back.
func tries(t *testing.T, ctx context.Context, l lock.Locker) bool {
	t.Helper()
	h, err := l.TryLock(ctx)
	if err == nil {
		unlock(t, h)
		return true
	}
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	return false
}

// named returns a context with an owner of its own.
func named(t *testing.T, c *redlatch.Client) context.Context {
	return lock.WithOwner(t.Context(), c.NewOwner())
}

// inBackground takes a lock in a goroutine and gives it back when the channel that
// it returns second is closed. The first is told about the acquisition.
func inBackground(ctx context.Context, l lock.Locker, opts ...lock.Option) (entered <-chan error, leave chan<- struct{}) {
	in, out := make(chan error, 1), make(chan struct{})
	go func() {
		h, err := l.Lock(ctx, opts...)
		in <- err
		if err == nil {
			<-out
			_ = h.Unlock(context.WithoutCancel(ctx))
		}
	}()
	return in, out
}

// enters fails the test unless the acquisition succeeds within d.
func enters(t *testing.T, entered <-chan error, d time.Duration) {
	t.Helper()
	select {
	case err := <-entered:
		require.NoError(t, err)
	case <-time.After(d):
		require.FailNow(t, "not acquired within "+d.String())
	}
}

// quiet waits until that many waiters of this process wait, after that many
// requests since the server's statistics were reset, and no attempt is under way.
func quiet(t *testing.T, s *testserver.Server, waiters, requests int) {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	defer conn.Close()
	harness.Eventually(t, 5*time.Second, fmt.Sprintf("%d wait after %d requests", waiters, requests), func() bool {
		return harness.GoroutinesIn("(*Waiter).wait") == waiters && harness.Commands(t, conn)["evalsha"] >= requests &&
			harness.GoroutinesIn("(*Waiter).attempt") == 0 && harness.GoroutinesIn("(*hold).Try") == 0
	})
}

const writerWaits = "redlatch_rwlock_writer:{orders}"

func exists(t *testing.T, s *testserver.Server, key string) bool {
	t.Helper()
	return harness.Do(t, s.Addr, "EXISTS", key) == ":1"
}

func TestTheHoldIsOfNobodyElse(t *testing.T) {
	eachSide(t, func(t *testing.T, s *testserver.Server, of sideOf) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		h := mustLock(t, of(c, "orders"))
		before := fields(t, s)
		for _, stranger := range []lock.Owner{c.NewOwner(), other.NewOwner()} {
			for _, side := range sides {
				require.Zero(t, harness.HoldCount(t, side.of(other, "orders"), stranger))
				require.ErrorIs(t, side.of(other, "orders").Unlock(lock.WithOwner(t.Context(), stranger)), lock.ErrNotHeld)
				require.ErrorIs(t, side.of(c, "orders").Unlock(lock.WithOwner(t.Context(), stranger)), lock.ErrNotHeld)
			}
		}
		require.Equal(t, before, fields(t, s))
		for _, c := range []*redlatch.Client{c, other} {
			require.Equal(t, 1, harness.HoldCount(t, of(c, "orders"), h.Owner()))
			require.False(t, tries(t, t.Context(), writing(c, "orders")))
		}
		require.ErrorIs(t, of(c, "orders").Unlock(t.Context()), lock.ErrInvalid)
		unlock(t, h)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestReadersShareAndKeepWritersOut(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		var holds []lock.Hold
		for _, c := range []*redlatch.Client{c, c, other, other} {
			h, err := reading(c, "orders").TryLock(t.Context())
			require.NoError(t, err)
			holds = append(holds, h)
		}
		h := mustLockAs(t, named(t, c), reading(c, "orders"))
		holds = append(holds, h)
		for _, h := range holds {
			require.Equal(t, 1, harness.HoldCount(t, reading(other, "orders"), h.Owner()))
			require.Zero(t, harness.HoldCount(t, writing(other, "orders"), h.Owner()))
			for _, c := range []*redlatch.Client{c, other} {
				require.False(t, tries(t, t.Context(), writing(c, "orders")))
				require.False(t, harness.IsLocked(t, writing(c, "orders")))
			}
			require.False(t, exists(t, s, writerWaits), "of a writer that does not wait")
			unlock(t, h)
		}
		require.True(t, tries(t, t.Context(), writing(c, "orders")))
		require.True(t, tries(t, t.Context(), writing(other, "orders")))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestAWriterIsAlone(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		ctx := named(t, c)
		w := mustLockAs(t, ctx, writing(c, "orders"))
		for _, c := range []*redlatch.Client{c, other} {
			require.True(t, harness.IsLocked(t, writing(c, "orders")))
			require.False(t, harness.IsLocked(t, reading(c, "orders")), "the write lock alone is held")
			for _, ctx := range []context.Context{t.Context(), named(t, c)} {
				require.False(t, tries(t, ctx, reading(c, "orders")))
				require.False(t, tries(t, ctx, writing(c, "orders")))
			}
		}
		require.True(t, tries(t, ctx, writing(c, "orders")))
		require.True(t, tries(t, ctx, reading(c, "orders")))
		unlock(t, w)
		require.True(t, tries(t, t.Context(), reading(other, "orders")))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestDowngrade(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		ctx := named(t, c)
		o, _ := lock.OwnerFrom(ctx)
		w := mustLockAs(t, ctx, writing(c, "orders"))
		require.False(t, harness.IsLocked(t, reading(c, "orders")))
		r := mustLockAs(t, ctx, reading(c, "orders"))
		require.True(t, harness.IsLocked(t, reading(c, "orders")), "a writer reads")
		require.True(t, harness.IsLocked(t, writing(other, "orders")))
		require.False(t, tries(t, t.Context(), reading(other, "orders")))
		unlock(t, w)

		require.False(t, harness.IsLocked(t, writing(other, "orders")))
		require.True(t, harness.IsLocked(t, reading(other, "orders")))
		require.Zero(t, harness.HoldCount(t, writing(c, "orders"), o))
		require.Equal(t, 1, harness.HoldCount(t, reading(c, "orders"), o))
		require.False(t, tries(t, t.Context(), writing(c, "orders")))
		require.False(t, tries(t, t.Context(), writing(other, "orders")))
		require.True(t, tries(t, t.Context(), reading(other, "orders")))
		_, err := writing(c, "orders").TryLock(ctx)
		require.ErrorIs(t, err, lock.ErrUpgrade)
		require.NoError(t, r.Context().Err())
		unlock(t, r)
		require.True(t, tries(t, ctx, writing(c, "orders")))
		harness.NothingLeft(t, s.Addr)
	})
}

// Redisson's waiters sleep until the lease would be over: its writer tells nobody.
func TestReadersHearOfADowngrade(t *testing.T) {
	const readers = 3
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, where := range []string{"here", "elsewhere"} {
			c := harness.Client(t, s)
			waits := c
			if where == "elsewhere" {
				waits = harness.Client(t, s)
			}
			ctx := named(t, c)
			w := mustLockAs(t, ctx, writing(c, "orders"), lock.Lease(time.Minute))
			r := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(time.Minute))
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			leave := make(chan struct{})
			entered := make(chan error, readers)
			for range readers {
				go func() {
					entered <- reading(waits, "orders").Do(context.Background(), func(context.Context) error {
						entered <- nil
						<-leave
						return nil
					})
				}()
			}
			quiet(t, s, readers, 2)
			begin := time.Now()
			unlock(t, w)
			for range readers {
				enters(t, entered, 2*time.Second)
			}
			require.Less(t, time.Since(begin), 2*time.Second, where)
			close(leave)
			for range readers {
				enters(t, entered, 5*time.Second)
			}
			unlock(t, r)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

func TestAReaderThatWantsToWriteIsToldAtOnce(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		ctx := named(t, c)
		for _, others := range []bool{false, true} {
			if others {
				h := mustLock(t, reading(other, "orders"))
				defer h.Unlock(t.Context())
			}
			r := mustLockAs(t, ctx, reading(c, "orders"))
			for _, c := range []*redlatch.Client{c, other} { // an owner is the same anywhere
				begin := time.Now()
				_, err := writing(c, "orders").TryLock(ctx)
				require.ErrorIs(t, err, lock.ErrUpgrade)
				_, err = writing(c, "orders").Lock(ctx)
				require.ErrorIs(t, err, lock.ErrUpgrade)
				_, err = writing(c, "orders").Lock(ctx, lock.Wait(time.Minute))
				require.ErrorIs(t, err, lock.ErrUpgrade)
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
				require.Less(t, time.Since(begin), 2*time.Second)
			}
			require.False(t, exists(t, s, writerWaits))
			require.Equal(t, 1, harness.HoldCount(t, reading(c, "orders"), r.Owner()))
			unlock(t, r)
		}
	})
}

// A reader of a process in which somebody waits to write is not behind it.
func TestReentryDoesNotWaitBehindTheQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, first := range sides {
			c := harness.Client(t, s)
			ctx := named(t, c)
			h := mustLockAs(t, ctx, first.of(c, "orders"))
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			entered, leave := inBackground(t.Context(), writing(c, "orders"))
			quiet(t, s, 1, 2)
			again, err := first.of(c, "orders").Lock(ctx, lock.Wait(2*time.Second))
			require.NoError(t, err)
			read, err := reading(c, "orders").Lock(ctx, lock.Wait(2*time.Second))
			require.NoError(t, err)
			for _, h := range []lock.Hold{again, h, read} {
				require.Empty(t, entered)
				unlock(t, h)
			}
			enters(t, entered, 2*time.Second)
			close(leave)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// fields returns the hash of the lock orders.
func fields(t *testing.T, s *testserver.Server) map[string]string {
	t.Helper()
	all, err := testserver.Query(s.Addr, "HGETALL", "orders")
	require.NoError(t, err)
	hash := map[string]string{}
	for pair := range slices.Chunk(all, 2) {
		hash[pair[0]] = pair[1]
	}
	return hash
}

// lives requires that the server has these keys and no others but tickets, with
// that time left, less what the test has taken.
func lives(t *testing.T, s *testserver.Server, want map[string]time.Duration) {
	t.Helper()
	const slack = 3 * time.Second
	keys, err := testserver.Query(s.Addr, "KEYS", "*")
	require.NoError(t, err)
	keys = slices.DeleteFunc(keys, func(key string) bool { return strings.HasPrefix(key, "redisson_unlock_latch:{orders}:") })
	for key, ttl := range want {
		require.Contains(t, keys, key)
		got := time.Duration(harness.PTTL(t, s.Addr, key)) * time.Millisecond
		require.LessOrEqual(t, got, ttl, key)
		require.Greater(t, got, ttl-slack, key)
	}
	require.Len(t, keys, len(want), "%v", keys)
}

// holdKey is the key of an owner's n-th read hold.
func holdKey(o lock.Owner, n int) string {
	return "{orders}:" + o.String() + ":rwlock_timeout:" + strconv.Itoa(n)
}

type (
	hash = map[string]string
	ttls = map[string]time.Duration
)

func TestWhatRedissonSees(t *testing.T) {
	const short, medium, long = 10 * time.Second, 30 * time.Second, 60 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := named(t, c)
		o, _ := lock.OwnerFrom(ctx)

		r1 := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(short))
		require.Equal(t, hash{"mode": "read", o.String(): "1"}, fields(t, s))
		lives(t, s, ttls{"orders": short, holdKey(o, 1): short})
		value, err := testserver.Query(s.Addr, "GET", holdKey(o, 1))
		require.NoError(t, err)
		require.Equal(t, []string{"1"}, value)
		r2 := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(long))
		require.Equal(t, hash{"mode": "read", o.String(): "2"}, fields(t, s))
		lives(t, s, ttls{"orders": long, holdKey(o, 1): short, holdKey(o, 2): long})
		other := mustLock(t, reading(c, "orders"), lock.Lease(medium))
		p := other.Owner()
		require.Equal(t, hash{"mode": "read", o.String(): "2", p.String(): "1"}, fields(t, s))
		lives(t, s, ttls{"orders": long, holdKey(o, 1): short, holdKey(o, 2): long, holdKey(p, 1): medium})
		unlock(t, r2)
		require.Equal(t, hash{"mode": "read", o.String(): "1", p.String(): "1"}, fields(t, s))
		lives(t, s, ttls{"orders": medium, holdKey(o, 1): short, holdKey(p, 1): medium})
		unlock(t, other)
		require.Equal(t, hash{"mode": "read", o.String(): "1"}, fields(t, s))
		lives(t, s, ttls{"orders": short, holdKey(o, 1): short})
		unlock(t, r1)
		lives(t, s, ttls{})

		w1 := mustLockAs(t, ctx, writing(c, "orders"), lock.Lease(long))
		require.Equal(t, hash{"mode": "write", o.String() + ":write": "1"}, fields(t, s))
		lives(t, s, ttls{"orders": long})
		w2 := mustLockAs(t, ctx, writing(c, "orders"), lock.Lease(short))
		require.Equal(t, hash{"mode": "write", o.String() + ":write": "2"}, fields(t, s))
		lives(t, s, ttls{"orders": long})
		r := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(medium))
		require.Equal(t, hash{"mode": "write", o.String() + ":write": "2", o.String(): "1"}, fields(t, s))
		lives(t, s, ttls{"orders": long, holdKey(o, 1): medium})
		unlock(t, w2)
		require.Equal(t, hash{"mode": "write", o.String() + ":write": "1", o.String(): "1"}, fields(t, s))
		lives(t, s, ttls{"orders": long, holdKey(o, 1): medium})
		unlock(t, w1)
		require.Equal(t, hash{"mode": "read", o.String(): "1"}, fields(t, s))
		lives(t, s, ttls{"orders": medium, holdKey(o, 1): medium})
		unlock(t, r)
		lives(t, s, ttls{})

		// A name with braces brings its own.
		h := mustLock(t, reading(c, "{a}b"))
		require.True(t, exists(t, s, "{a}b:"+h.Owner().String()+":rwlock_timeout:1"))
		unlock(t, h)
		harness.NothingLeft(t, s.Addr)
	})
}

// Two holds of one owner with different leases end in either order, and neither
// takes anything from the other.
func TestHoldsOfANamedOwnerEndInAnyOrder(t *testing.T) {
	const short, long = 10 * time.Second, 60 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, holds := range []struct {
			name   string
			of     [2]sideOf
			leases [2]time.Duration
		}{
			{"read, short and long", [2]sideOf{reading, reading}, [2]time.Duration{short, long}},
			{"read, long and short", [2]sideOf{reading, reading}, [2]time.Duration{long, short}},
			{"write, short and long", [2]sideOf{writing, writing}, [2]time.Duration{short, long}},
			{"write, long and short", [2]sideOf{writing, writing}, [2]time.Duration{long, short}},
			{"write for long, read", [2]sideOf{writing, reading}, [2]time.Duration{long, short}},
			{"write, read for long", [2]sideOf{writing, reading}, [2]time.Duration{short, long}},
		} {
			for _, first := range []int{0, 1} {
				t.Run(fmt.Sprintf("%s, number %d first", holds.name, first+1), func(t *testing.T) {
					c, other := harness.Client(t, s), harness.Client(t, s)
					ctx := named(t, c)
					var all [2]lock.Hold
					for i := range all {
						all[i] = mustLockAs(t, ctx, holds.of[i](c, "orders"), lock.Lease(holds.leases[i]))
					}
					ttl := harness.PTTL(t, s.Addr, "orders")
					require.Greater(t, ttl, (long - 3*time.Second).Milliseconds())
					unlock(t, all[first])
					rest := 1 - first
					ttl = harness.PTTL(t, s.Addr, "orders")
					require.GreaterOrEqual(t, time.Duration(ttl+1)*time.Millisecond, all[rest].Remaining())
					require.NoError(t, all[rest].Context().Err())
					require.Equal(t, 1, harness.HoldCount(t, holds.of[rest](other, "orders"), all[rest].Owner()))
					require.False(t, tries(t, t.Context(), writing(other, "orders")))
					require.NoError(t, all[rest].Extend(t.Context(), 2*long))
					require.Greater(t, harness.PTTL(t, s.Addr, "orders"), (2*long - 3*time.Second).Milliseconds())
					unlock(t, all[rest])
					require.True(t, tries(t, t.Context(), writing(other, "orders")))
					harness.NothingLeft(t, s.Addr)
				})
			}
		}
	})
}

func TestTheLockIsAsShortAsWhatIsStillHeld(t *testing.T) {
	const short, long = 700 * time.Millisecond, time.Minute
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Parallel()
		c, other := harness.Client(t, s), harness.Client(t, s)
		for _, ctx := range []context.Context{t.Context(), named(t, c)} {
			mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(short))
			h := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(long))
			require.Greater(t, harness.PTTL(t, s.Addr, "orders"), short.Milliseconds())
			unlock(t, h)
			require.LessOrEqual(t, harness.PTTL(t, s.Addr, "orders"), short.Milliseconds())
			begin := time.Now()
			require.NoError(t, writing(other, "orders").Do(t.Context(), nothing))
			require.Less(t, time.Since(begin), short+time.Second)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

func TestReentryDoesNotShortenTheLease(t *testing.T) {
	eachSide(t, func(t *testing.T, s *testserver.Server, of sideOf) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		ctx := named(t, c)
		h1 := mustLockAs(t, ctx, of(c, "orders"), lock.Lease(10*time.Second))
		h2 := mustLockAs(t, ctx, of(c, "orders"), lock.Lease(300*time.Millisecond))
		_, err := writing(other, "orders").Lock(t.Context(), lock.Wait(600*time.Millisecond))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(6_000))
		require.ErrorIs(t, h2.Unlock(ctx), lock.ErrLost) // its own lease is over
		require.NoError(t, h1.Context().Err())
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), int64(6_000))
		require.NoError(t, h1.Unlock(ctx))
	})
}

func TestWaitersGetInWhenTheLeaseOfAWriterIsOver(t *testing.T) {
	const lease = 700 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Parallel()
		for _, next := range []struct {
			name    string
			of      sideOf
			waiters int
		}{{"readers", reading, 4}, {"a writer", writing, 1}} {
			t.Run(next.name, func(t *testing.T) {
				c, other := harness.Client(t, s), harness.Client(t, s)
				begin := time.Now()
				h := mustLock(t, writing(c, "orders"), lock.Lease(lease))
				results := make(chan error, next.waiters)
				for i := range next.waiters {
					waits := []*redlatch.Client{other, c}[i%2]
					go func() { results <- next.of(waits, "orders").Do(context.Background(), nothing) }()
				}
				for range next.waiters {
					enters(t, results, lease+2*time.Second)
				}
				require.GreaterOrEqual(t, time.Since(begin), lease-5*time.Millisecond)
				require.Less(t, time.Since(begin), lease+time.Second)
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
				require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

func TestAReaderBesideOneWhoNeverUnlocks(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		first := mustLock(t, reading(c, "orders"), lock.Lease(5*time.Second))
		begin := time.Now()
		second := mustLock(t, reading(other, "orders"))
		require.Less(t, time.Since(begin), time.Second)
		unlock(t, second)
		require.Equal(t, 1, harness.HoldCount(t, reading(c, "orders"), first.Owner()))
		require.False(t, tries(t, t.Context(), writing(other, "orders")))
		require.NoError(t, first.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// holdsFor fails the test unless the keys live on for d, with ttl left of each at
// any time.
func holdsFor(t *testing.T, s *testserver.Server, d, ttl time.Duration, keys ...string) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); <-time.After(50 * time.Millisecond) {
		for _, key := range keys {
			require.Greater(t, harness.PTTL(t, s.Addr, key), ttl.Milliseconds(), key)
		}
	}
}

// With Redisson the end of either hold can end the renewal of the other.
func TestAWriterThatReadsIsRenewedOnEitherSide(t *testing.T) {
	const timeout, watch, least = 1500 * time.Millisecond, 2500 * time.Millisecond, 300 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Parallel()
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		ctx := named(t, c)
		o, _ := lock.OwnerFrom(ctx)
		w1, r1 := mustLockAs(t, ctx, writing(c, "one")), mustLockAs(t, ctx, reading(c, "one"))
		w2, r2 := mustLockAs(t, ctx, writing(c, "two")), mustLockAs(t, ctx, reading(c, "two"))
		read := "{one}:" + o.String() + ":rwlock_timeout:1"
		holdsFor(t, s, watch, least, "one", "two", read)
		unlock(t, w1)
		unlock(t, r2)
		holdsFor(t, s, watch, least, "one", "two", read)
		for _, h := range []lock.Hold{r1, w2} {
			require.NoError(t, h.Context().Err())
			unlock(t, h)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

func TestManyReadersAreRenewed(t *testing.T) {
	const timeout, readers = 1200 * time.Millisecond, 50
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Parallel()
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		ctx := named(t, c)
		var holds []lock.Hold
		for i := range readers {
			if i%10 == 0 {
				holds = append(holds, mustLockAs(t, ctx, reading(c, "orders")))
			} else {
				holds = append(holds, mustLock(t, reading(c, "orders")))
			}
		}
		var keys []string
		for _, h := range holds {
			keys = append(keys, holdKey(h.Owner(), 1))
		}
		holdsFor(t, s, 2*timeout, 0, append(keys, "orders", holdKey(holds[0].Owner(), readers/10))...)
		for _, h := range holds {
			require.NoError(t, context.Cause(h.Context()))
			unlock(t, h)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// Nobody renews the hold of somebody who has died by renewing another.
func TestTheDeadAreNotRenewed(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Parallel()
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		dead := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		zombie := mustLock(t, reading(dead, "orders"))
		h := mustLock(t, reading(c, "orders"))
		dead.Close()
		harness.Eventually(t, timeout+time.Second, "its key is gone", func() bool { return !exists(t, s, holdKey(zombie.Owner(), 1)) })
		require.NoError(t, h.Context().Err())
		entered, leave := inBackground(t.Context(), writing(harness.Client(t, s), "orders"))
		harness.Eventually(t, 5*time.Second, "a writer waits", func() bool { return exists(t, s, writerWaits) })
		// The field of the dead is still there, and must not be in the way.
		require.Equal(t, "1", fields(t, s)[zombie.Owner().String()])
		unlock(t, h)
		enters(t, entered, time.Second)
		close(leave)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestFreeWhenTheHoldersClientIsClosed(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Parallel()
		c, other := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), harness.Client(t, s)
		var wg sync.WaitGroup
		holds := map[string]lock.Hold{}
		for _, side := range sides {
			holds[side.name] = mustLock(t, side.of(c, side.name))
			wg.Go(func() { // it is renewed past its first lease
				_, err := writing(other, side.name).Lock(context.Background(), lock.Wait(timeout+timeout/2))
				assert.ErrorIs(t, err, lock.ErrNotAcquired)
			})
		}
		wg.Wait()
		c.Close()
		begin := time.Now()
		for _, side := range sides {
			require.NoError(t, writing(other, side.name).Do(t.Context(), nothing))
			require.Less(t, time.Since(begin), timeout+time.Second)
		}
		for _, side := range sides {
			h := holds[side.name]
			require.ErrorIs(t, context.Cause(h.Context()), lock.ErrClosed)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrClosed)
			l := side.of(c, "orders")
			_, err := l.Lock(t.Context())
			require.ErrorIs(t, err, lock.ErrClosed)
			_, err = l.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrClosed)
			require.ErrorIs(t, l.Do(t.Context(), nothing), lock.ErrClosed)
			require.ErrorIs(t, l.Unlock(lock.WithOwner(t.Context(), h.Owner())), lock.ErrClosed)
			_, err = l.ForceUnlock(t.Context())
			require.ErrorIs(t, err, lock.ErrClosed)
			_, err = l.IsLocked(t.Context())
			require.ErrorIs(t, err, lock.ErrClosed)
			_, err = l.TTL(t.Context())
			require.ErrorIs(t, err, lock.ErrClosed)
			_, err = l.HoldCount(t.Context(), h.Owner())
			require.ErrorIs(t, err, lock.ErrClosed)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// Close ends waits, and what they have on the server.
func TestCloseEndsWaits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		h := mustLock(t, reading(other, "orders"), lock.Lease(time.Minute))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		var waits []<-chan error
		for _, of := range []sideOf{writing, reading, writing} {
			entered, _ := inBackground(t.Context(), of(c, "orders"))
			waits = append(waits, entered)
			quiet(t, s, len(waits), 2)
		}
		c.Close()
		for _, entered := range waits {
			require.ErrorIs(t, <-entered, lock.ErrClosed)
		}
		require.True(t, tries(t, t.Context(), reading(other, "orders")))
		unlock(t, h)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestMixedContention(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, load := range []struct{ clients, goroutines, passes int }{{1, 15, 1}, {100, 1, 1}, {16, 1, 25}, {4, 8, 10}} {
			t.Run(fmt.Sprintf("%d clients, %d goroutines, %d passes", load.clients, load.goroutines, load.passes), func(t *testing.T) {
				counter := 0 // protected by the lock alone
				var reads, writes atomic.Int64
				var wg sync.WaitGroup
				for range load.clients {
					c := harness.Client(t, s)
					for range load.goroutines {
						wg.Go(func() {
							for range load.passes {
								ctx := context.Background()
								if rand.N(4) == 0 {
									ctx = lock.WithOwner(ctx, c.NewOwner())
								}
								if rand.N(2) == 0 {
									assert.NoError(t, writing(c, "orders").Do(ctx, func(context.Context) error {
										counter++
										writes.Add(1)
										return nil
									}))
								} else {
									assert.NoError(t, reading(c, "orders").Do(ctx, func(context.Context) error {
										before := counter
										runtime.Gosched()
										assert.Equal(t, before, counter)
										reads.Add(1)
										return nil
									}))
								}
							}
						})
					}
				}
				wg.Wait()
				require.Equal(t, writes.Load(), int64(counter))
				require.Equal(t, int64(load.clients*load.goroutines*load.passes), reads.Load()+writes.Load())
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

// An owner's holds on one side are not those on the other.
func TestUnlockByOwnerIsOfItsSide(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		here, there := harness.Client(t, s), harness.Client(t, s)
		for _, c := range []*redlatch.Client{here, there} {
			ctx := named(t, here)
			w := mustLockAs(t, ctx, writing(here, "orders"))
			r := mustLockAs(t, ctx, reading(here, "orders"))
			require.NoError(t, reading(c, "orders").Unlock(ctx))
			require.ErrorIs(t, reading(c, "orders").Unlock(ctx), lock.ErrNotHeld)
			require.NoError(t, w.Context().Err())
			require.Equal(t, 1, harness.HoldCount(t, writing(there, "orders"), w.Owner()))
			r2 := mustLockAs(t, ctx, reading(here, "orders"))
			require.NoError(t, writing(c, "orders").Unlock(ctx))
			require.ErrorIs(t, writing(c, "orders").Unlock(ctx), lock.ErrNotHeld)
			require.NoError(t, r2.Context().Err())
			require.Equal(t, 1, harness.HoldCount(t, reading(there, "orders"), w.Owner()))
			unlock(t, r2)
			for _, h := range []lock.Hold{r, w} {
				if c == here {
					require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
				} else {
					require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
				}
			}
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// An owner made for one acquisition can be taken over as a name, on the other side
// too. Its first hold then shares the lock and must not take the second one's share
// with it.
func TestAnOwnerUsedAgainOnTheOtherSideIsCounted(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		pair := []sideOf{writing, reading}
		for _, first := range []int{0, 1} {
			c := harness.Client(t, s)
			h := mustLock(t, writing(c, "orders"))
			again := mustLockAs(t, lock.WithOwner(t.Context(), h.Owner()), reading(c, "orders"))
			holds := []lock.Hold{h, again}
			unlock(t, holds[first])
			require.Equal(t, 1, harness.HoldCount(t, pair[1-first](c, "orders"), h.Owner()))
			require.False(t, tries(t, t.Context(), writing(c, "orders")))
			unlock(t, holds[1-first])
			harness.NothingLeft(t, s.Addr)
		}
	})
}

func forceUnlock(t *testing.T, l harness.Lock) bool {
	t.Helper()
	forced, err := l.ForceUnlock(t.Context())
	require.NoError(t, err)
	return forced
}

func TestForceUnlockIsOfItsSide(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		for i, side := range sides {
			opposite := sides[1-i].of
			for _, from := range []*redlatch.Client{c, other} {
				require.False(t, forceUnlock(t, side.of(from, "orders")))
				h := mustLock(t, side.of(c, "orders"))
				require.False(t, forceUnlock(t, opposite(from, "orders")))
				require.True(t, harness.IsLocked(t, side.of(from, "orders")))
				require.NoError(t, h.Context().Err())
				require.True(t, forceUnlock(t, side.of(from, "orders")))
				require.False(t, harness.IsLocked(t, side.of(from, "orders")))
				if from == c {
					require.Error(t, h.Context().Err(), "a hold of the same client ends at once")
				}
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
				harness.NothingLeft(t, s.Addr)
			}
		}
	})
}

func TestForceUnlockOfAWriterThatReads(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := named(t, c)
		w, r := mustLockAs(t, ctx, writing(c, "orders")), mustLockAs(t, ctx, reading(c, "orders"))
		require.False(t, forceUnlock(t, reading(c, "orders")), "somebody writes")
		require.NoError(t, r.Context().Err())
		require.True(t, forceUnlock(t, writing(c, "orders")))
		require.Error(t, w.Context().Err())
		require.ErrorIs(t, w.Unlock(ctx), lock.ErrLost)
		require.ErrorIs(t, r.Unlock(ctx), lock.ErrLost)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestForceUnlockWakesWaiters(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, held := range sides {
			c, waits := harness.Client(t, s), harness.Client(t, s)
			h := mustLock(t, held.of(c, "orders"), lock.Lease(time.Minute))
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			here, leaveHere := inBackground(t.Context(), writing(c, "orders"))
			quiet(t, s, 1, 2)
			there, leaveThere := inBackground(t.Context(), writing(waits, "orders"))
			quiet(t, s, 2, 4)
			require.True(t, forceUnlock(t, held.of(harness.Client(t, s), "orders")))
			close(leaveHere)
			close(leaveThere)
			enters(t, here, 2*time.Second)
			enters(t, there, 2*time.Second)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

func TestAKeyOfTheWrongType(t *testing.T) {
	eachSide(t, func(t *testing.T, s *testserver.Server, of sideOf) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		h, r := mustLock(t, of(c, "orders")), named(t, c)
		harness.Do(t, s.Addr, "SET", "orders", "precious")
		for _, c := range []*redlatch.Client{c, other} {
			for _, side := range sides {
				for _, ctx := range []context.Context{t.Context(), r} {
					_, err := side.of(c, "orders").TryLock(ctx)
					require.ErrorContains(t, err, "WRONGTYPE")
					_, err = side.of(c, "orders").Lock(ctx)
					require.ErrorContains(t, err, "WRONGTYPE")
					require.NotErrorIs(t, err, lock.ErrNotAcquired)
					require.NotErrorIs(t, err, lock.ErrIndeterminate)
				}
				_, err := side.of(c, "orders").ForceUnlock(t.Context())
				require.ErrorContains(t, err, "WRONGTYPE")
				_, err = side.of(c, "orders").IsLocked(t.Context())
				require.ErrorContains(t, err, "WRONGTYPE")
				_, err = side.of(c, "orders").HoldCount(t.Context(), h.Owner())
				require.ErrorContains(t, err, "WRONGTYPE")
				require.Error(t, side.of(c, "orders").Unlock(r))
			}
		}
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		value, err := testserver.Query(s.Addr, "GET", "orders")
		require.NoError(t, err)
		require.Equal(t, []string{"precious"}, value)
		harness.Do(t, s.Addr, "DEL", "orders")
		if key := holdKey(h.Owner(), 1); exists(t, s, key) {
			require.Positive(t, harness.PTTL(t, s.Addr, key))
			harness.Do(t, s.Addr, "DEL", key) // of the hold that was overwritten
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// A lock of another kind, or one that never expires, is taken by nobody.
func TestAHashThatIsNoReadWriteLock(t *testing.T) {
	eachSide(t, func(t *testing.T, s *testserver.Server, of sideOf) {
		c := harness.Client(t, s)
		for _, set := range [][]string{{"HSET", "orders", "somebody", "1"}, {"HSET", "orders", "mode", "write", "somebody:write", "1"}} {
			harness.Do(t, s.Addr, "FLUSHALL")
			harness.Do(t, s.Addr, set...)
			before := fields(t, s)
			for _, ctx := range []context.Context{t.Context(), named(t, c)} {
				require.False(t, tries(t, ctx, of(c, "orders")))
				_, err := of(c, "orders").Lock(ctx, lock.Wait(50*time.Millisecond))
				require.ErrorIs(t, err, lock.ErrNotAcquired)
			}
			ttl, err := of(c, "orders").TTL(t.Context())
			require.NoError(t, err)
			require.Equal(t, lock.NoExpiry, ttl)
			require.Equal(t, before, fields(t, s))
			require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"))
		}
		h := mustLock(t, c.Lock("plain")) // a plain lock of redlatch
		require.False(t, tries(t, t.Context(), of(c, "plain")))
		unlock(t, h)
	})
}

func TestTheWaitOfReadersIsBounded(t *testing.T) {
	const wait = 200 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		h := mustLock(t, writing(c, "orders"))
		for _, c := range []*redlatch.Client{c, harness.Client(t, s)} {
			begin := time.Now()
			_, err := reading(c, "orders").Lock(t.Context(), lock.Wait(wait))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.GreaterOrEqual(t, time.Since(begin), wait)
			require.Less(t, time.Since(begin), wait+time.Second)
			_, err = reading(c, "orders").Lock(t.Context(), lock.Wait(0))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
		}
		unlock(t, h)
		harness.NothingLeft(t, s.Addr)
	})
}

// The key of a read hold is extended with the lock.
func TestExtendOfAReadHold(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		for _, ctx := range []context.Context{t.Context(), named(t, c)} {
			h := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(time.Second))
			for _, lease := range []time.Duration{time.Minute, time.Second} { // at least, not at most
				require.NoError(t, h.Extend(t.Context(), lease))
				require.Greater(t, harness.PTTL(t, s.Addr, holdKey(h.Owner(), 1)), int64(50_000))
			}
			unlock(t, h)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

func TestADroppedHoldIsReleased(t *testing.T) {
	eachSide(t, func(t *testing.T, s *testserver.Server, of sideOf) {
		var log harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		func() { require.NotNil(t, mustLock(t, of(c, "orders")).Context()) }()
		harness.Eventually(t, 10*time.Second, "the lock is free", func() bool {
			runtime.GC()
			return !harness.IsLocked(t, of(c, "orders"))
		})
		require.Contains(t, log.String(), "dropped without Unlock")
		require.Contains(t, log.String(), "rwlock_test.go")
		harness.NothingLeft(t, s.Addr)
	})
}

func TestNameMapper(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithNameMapper(func(name string) string { return "test::" + name }))
		h := mustLock(t, reading(c, "orders"))
		require.Equal(t, "orders", h.Name())
		require.Equal(t, ":2", harness.Do(t, s.Addr, "HLEN", "test::orders"))
		require.True(t, exists(t, s, "{test::orders}:"+h.Owner().String()+":rwlock_timeout:1"))
		entered, leave := inBackground(t.Context(), writing(c, "orders"))
		harness.Eventually(t, 5*time.Second, "a writer waits", func() bool { return exists(t, s, "redlatch_rwlock_writer:{test::orders}") })
		unlock(t, h)
		enters(t, entered, 2*time.Second)
		close(leave)
		harness.NothingLeft(t, s.Addr)

		c = harness.Client(t, s, redlatch.WithNameMapper(func(string) string { return "}" }))
		for _, side := range sides {
			_, err := side.of(c, "orders").TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
	})
}

// A restarted server is empty: what was held is lost, and the watchdog renews what
// is taken afterwards, again and again.
func TestWatchdogAfterARestart(t *testing.T) {
	const timeout = 800 * time.Millisecond
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		t.Parallel()
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		lockAll := func() (holds []lock.Hold) {
			for _, side := range sides {
				holds = append(holds, mustLock(t, side.of(c, side.name)))
			}
			return holds
		}
		holds := lockAll()
		s.Kill()
		require.NoError(t, s.Restart())
		for _, h := range holds {
			select {
			case <-h.Context().Done():
			case <-time.After(timeout + time.Second):
				require.FailNow(t, "the hold does not end")
			}
			require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
		harness.Eventually(t, 10*time.Second, "the connection is back", func() bool { return c.Ping(t.Context()) == nil })
		for range 2 {
			holds = lockAll()
			<-time.After(2 * timeout)
			for _, h := range holds {
				require.NoError(t, context.Cause(h.Context()))
				require.Positive(t, h.Remaining())
				unlock(t, h)
			}
			<-time.After(timeout) // the watchdog has nothing to do meanwhile
		}
		harness.NothingLeft(t, s.Addr)
	})
}
