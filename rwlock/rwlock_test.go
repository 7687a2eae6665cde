package rwlock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rwlock"
)

func reading(c *redlatch.Client, name string) harness.Lock { return c.RWLock(name).Read() }
func writing(c *redlatch.Client, name string) harness.Lock { return c.RWLock(name).Write() }

// sideOf returns one side of a lock.
type sideOf func(c *redlatch.Client, name string) harness.Lock

type side struct {
	name string
	of   sideOf
}

var sides = []side{{"read", reading}, {"write", writing}}

// eachSide runs a test for both sides on every server.
func eachSide(t *testing.T, test func(t *testing.T, s *testserver.Server, of sideOf)) {
	harness.EachOf(t, sides, func(x side) string { return x.name }, func(t *testing.T, s *testserver.Server, x side) { test(t, s, x.of) })
}

// eachPlace runs a test on every server for a waiter in the holder's process, and for one in
// another process.
func eachPlace(t *testing.T, test func(t *testing.T, s *testserver.Server, holder, waiter *redlatch.Client)) {
	harness.EachOf(t, []string{"here", "elsewhere"}, strings.Clone, func(t *testing.T, s *testserver.Server, place string) {
		holder := harness.Client(t, s)
		waiter := holder
		if place == "elsewhere" {
			waiter = harness.Client(t, s)
		}
		test(t, s, holder, waiter)
	})
}

const (
	// soon bounds what takes a few round trips, on a busy machine.
	soon = 10 * time.Second
	// beforePolls ends before any waiter polls: a writer that waits for readers polls after
	// 2 s, other waiters after 5 s.
	beforePolls = rwlock.WriterPause - 300*time.Millisecond
)

func nothing(context.Context) error { return nil }

// mustLock acquires a lock for an owner of its own.
func mustLock(t *testing.T, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	return mustLockAs(t, t.Context(), l, opts...)
}

// mustLockAs acquires a lock for the owner of ctx.
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

// tries makes one attempt and reports whether it succeeded, after releasing the lock.
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

// inBackground acquires a lock in a goroutine and releases it when leave is closed. It sends the
// outcome of the acquisition to entered.
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
	require.NoError(t, harness.Receive(t, d, "the acquisition", entered))
}

// quiet waits until there were so many requests since the server's statistics were reset, and so
// many callers of the clients wait without an attempt due.
func quiet(t *testing.T, s *testserver.Server, waiters, requests int, clients ...*redlatch.Client) {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	defer conn.Close()
	harness.Eventually(t, soon, fmt.Sprintf("%d wait after %d requests", waiters, requests), func() bool {
		return harness.Commands(t, conn)["evalsha"] >= requests && harness.Waiting(waiters, clients...)
	})
}

const writerWaits = "redlatch_rwlock_writer:{orders}"

func exists(t *testing.T, s *testserver.Server, key string) bool {
	t.Helper()
	return harness.Do(t, s.Addr, "EXISTS", key) == ":1"
}

func TestReadersShareAndAWriterExcludes(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		ctx := named(t, c)
		holds := []lock.Hold{mustLockAs(t, ctx, reading(c, "orders"))}
		for _, c := range []*redlatch.Client{c, c, other, other} {
			h, err := reading(c, "orders").TryLock(t.Context())
			require.NoError(t, err)
			holds = append(holds, h)
		}
		for _, h := range holds {
			require.Equal(t, 1, harness.HoldCount(t, reading(other, "orders"), h.Owner()))
			require.Zero(t, harness.HoldCount(t, writing(other, "orders"), h.Owner()))
			for _, c := range []*redlatch.Client{c, other} {
				require.False(t, tries(t, t.Context(), writing(c, "orders")))
				require.False(t, harness.IsLocked(t, writing(c, "orders")))
			}
			require.False(t, exists(t, s, writerWaits), "the writer does not wait")
			unlock(t, h)
		}
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

// Redisson publishes nothing at a downgrade: its waiters sleep until the end of the lease.
func TestReadersHearOfADowngrade(t *testing.T) {
	eachPlace(t, func(t *testing.T, s *testserver.Server, c, waits *redlatch.Client) {
		ctx := named(t, c)
		w := mustLockAs(t, ctx, writing(c, "orders"), lock.Lease(time.Minute))
		r := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(time.Minute))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		readers := newCrowd(t)
		readers.add(3, reading(waits, "orders"))
		quiet(t, s, 3, 2, waits)
		unlock(t, w)
		readers.allIn(beforePolls)
		readers.out()
		unlock(t, r)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestAReaderThatWantsToWriteFailsAtOnce(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		ctx := named(t, c)
		for _, others := range []bool{false, true} {
			if others {
				h := mustLock(t, reading(other, "orders"))
				defer h.Unlock(t.Context())
			}
			r := mustLockAs(t, ctx, reading(c, "orders"))
			begin := time.Now()
			_, err := writing(c, "orders").TryLock(ctx)
			require.ErrorIs(t, err, lock.ErrUpgrade)
			_, err = writing(c, "orders").Lock(ctx)
			require.ErrorIs(t, err, lock.ErrUpgrade)
			_, err = writing(c, "orders").Lock(ctx, lock.Wait(time.Minute))
			require.ErrorIs(t, err, lock.ErrUpgrade)
			require.NotErrorIs(t, err, lock.ErrNotAcquired)
			require.Less(t, time.Since(begin), soon)
			require.False(t, exists(t, s, writerWaits))
			require.Equal(t, 1, harness.HoldCount(t, reading(c, "orders"), r.Owner()))
			unlock(t, r)
		}
	})
}

// A holder that reads again does not wait behind a waiting writer of its process.
func TestReentryDoesNotWaitBehindTheQueue(t *testing.T) {
	eachSide(t, func(t *testing.T, s *testserver.Server, of sideOf) {
		c := harness.Client(t, s)
		ctx := named(t, c)
		h := mustLockAs(t, ctx, of(c, "orders"))
		entered, leave := inBackground(t.Context(), writing(c, "orders"))
		harness.Waits(t, 1, c)
		read, err := reading(c, "orders").Lock(ctx, lock.Wait(beforePolls))
		require.NoError(t, err)
		for _, h := range []lock.Hold{h, read} {
			require.Empty(t, entered)
			unlock(t, h)
		}
		enters(t, entered, beforePolls)
		close(leave)
		harness.NothingLeft(t, s.Addr)
	})
}

// A second read lock waits behind a waiting writer, which waits for the first, as with a
// sync.RWMutex. One owner for both reads ends that.
func TestANestedReadWaitsForItself(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		h := mustLockAs(t, named(t, c), reading(c, "orders"))
		entered, leave := inBackground(t.Context(), writing(c, "orders"))
		harness.Waits(t, 1, c)
		ctx, cancel := context.WithCancel(lock.WithOwner(h.Context(), lock.Owner{}))
		nested := harness.StartLock(t, ctx, reading(c, "orders"))
		harness.Waits(t, 2, c)
		again, err := reading(c, "orders").Lock(h.Context())
		require.NoError(t, err)
		require.True(t, nested.Running())
		cancel()
		require.ErrorIs(t, nested.EndWithin(soon), lock.ErrNotAcquired)
		unlock(t, again)
		require.Empty(t, entered)
		unlock(t, h)
		enters(t, entered, beforePolls)
		close(leave)
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

// lives requires that the server has these keys and no others, with that time left, less the
// time that the test has taken.
func lives(t *testing.T, s *testserver.Server, want map[string]time.Duration) {
	t.Helper()
	const slack = 10 * time.Second
	keys, err := testserver.Query(s.Addr, "KEYS", "*")
	require.NoError(t, err)
	for key, ttl := range want {
		require.Contains(t, keys, key)
		got := time.Duration(harness.PTTL(t, s.Addr, key)) * time.Millisecond
		require.LessOrEqual(t, got, ttl, key)
		require.Greater(t, got, ttl-slack, key)
	}
	require.Len(t, keys, len(want), "%v", keys)
}

// holdKey is the key of a read hold.
func holdKey(h lock.Hold) string { return "{orders}:" + h.Owner().String() + ":rwlock_timeout:1" }

type (
	hash = map[string]string
	ttls = map[string]time.Duration
)

func TestWhatRedissonSees(t *testing.T) {
	const short, medium, long = 20 * time.Second, 40 * time.Second, 60 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := named(t, c)
		sees := func(h hash, keys ttls) {
			t.Helper()
			require.Equal(t, h, fields(t, s))
			lives(t, s, keys)
		}
		r1 := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(short))
		o := r1.Owner().String()
		sees(hash{"mode": "read", o: "1"}, ttls{"orders": short, holdKey(r1): short})
		value, err := testserver.Query(s.Addr, "GET", holdKey(r1))
		require.NoError(t, err)
		require.Equal(t, []string{"1"}, value)
		r2 := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(medium))
		sees(hash{"mode": "read", o: "1"}, ttls{"orders": medium, holdKey(r1): medium})
		other := mustLock(t, reading(c, "orders"), lock.Lease(long))
		sees(hash{"mode": "read", o: "1", other.Owner().String(): "1"}, ttls{"orders": long, holdKey(r1): medium, holdKey(other): long})
		unlock(t, r1)
		unlock(t, other)
		sees(hash{"mode": "read", o: "1"}, ttls{"orders": medium, holdKey(r2): medium})
		unlock(t, r2)
		sees(hash{}, ttls{})

		w1 := mustLockAs(t, ctx, writing(c, "orders"), lock.Lease(long))
		o = w1.Owner().String()
		sees(hash{"mode": "write", o + ":write": "1"}, ttls{"orders": long})
		w2 := mustLockAs(t, ctx, writing(c, "orders"), lock.Lease(short))
		sees(hash{"mode": "write", o + ":write": "1"}, ttls{"orders": long})
		r := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(medium))
		p := r.Owner().String()
		sees(hash{"mode": "write", o + ":write": "1", p: "1"}, ttls{"orders": long, holdKey(r): medium})
		unlock(t, w2)
		sees(hash{"mode": "write", o + ":write": "1", p: "1"}, ttls{"orders": long, holdKey(r): medium})
		unlock(t, w1)
		sees(hash{"mode": "read", p: "1"}, ttls{"orders": medium, holdKey(r): medium})
		unlock(t, r)
		sees(hash{}, ttls{})

		// A name can have braces of its own.
		h := mustLock(t, reading(c, "{a}b"))
		require.True(t, exists(t, s, "{a}b:"+h.Owner().String()+":rwlock_timeout:1"))
		unlock(t, h)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestTheLockLastsAsLongAsTheRemainingHold(t *testing.T) {
	const short, long = 700 * time.Millisecond, time.Minute
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		stays := mustLock(t, reading(c, "orders"), lock.Lease(short))
		h := mustLock(t, reading(c, "orders"), lock.Lease(long))
		require.Greater(t, harness.PTTL(t, s.Addr, "orders"), short.Milliseconds())
		unlock(t, h)
		require.LessOrEqual(t, harness.PTTL(t, s.Addr, "orders"), short.Milliseconds())
		begin := time.Now()
		require.NoError(t, writing(other, "orders").Do(t.Context(), nothing))
		require.Less(t, time.Since(begin), short+beforePolls)
		runtime.KeepAlive(stays) // or it would be released
		harness.NothingLeft(t, s.Addr)
	})
}

func TestReadersGetInWhenTheLeaseOfAWriterIsOver(t *testing.T) {
	const lease = 1200 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		begin := time.Now()
		h := mustLock(t, writing(c, "orders"), lock.Lease(lease))
		_, err := reading(other, "orders").Lock(t.Context(), lock.Wait(lease/10))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		readers := newCrowd(t)
		readers.add(2, reading(c, "orders"))
		readers.add(2, reading(other, "orders"))
		readers.allIn(lease + beforePolls)
		require.GreaterOrEqual(t, time.Since(begin), lease-5*time.Millisecond)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		readers.out()
		harness.NothingLeft(t, s.Addr)
	})
}

// holdsFor fails the test unless the keys live on for d.
func holdsFor(t *testing.T, s *testserver.Server, d time.Duration, keys ...string) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		for _, key := range keys {
			require.Positive(t, harness.PTTL(t, s.Addr, key), key)
		}
	}
}

// In Redisson the end of either hold can end the renewal of the other.
func TestAWriterThatReadsIsRenewedOnEitherSide(t *testing.T) {
	const timeout, watch = 2 * time.Second, 2500 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		ctx := named(t, c)
		w1, r1 := mustLockAs(t, ctx, writing(c, "one")), mustLockAs(t, ctx, reading(c, "one"))
		w2, r2 := mustLockAs(t, ctx, writing(c, "two")), mustLockAs(t, ctx, reading(c, "two"))
		unlock(t, w1)
		unlock(t, r2)
		holdsFor(t, s, watch, "one", "two", "{one}:"+r1.Owner().String()+":rwlock_timeout:1")
		for _, h := range []lock.Hold{r1, w2} {
			require.NoError(t, h.Context().Err())
			unlock(t, h)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

func TestManyReadersAreRenewed(t *testing.T) {
	const timeout, readers = 1500 * time.Millisecond, 50
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
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
			keys = append(keys, holdKey(h))
		}
		holdsFor(t, s, 3*timeout/2, append(keys, "orders")...)
		for _, h := range holds {
			require.NoError(t, context.Cause(h.Context()))
			unlock(t, h)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// The renewal of a hold does not prolong the hold of a client that has died.
func TestADeadReaderIsNotRenewed(t *testing.T) {
	const timeout = 3 * time.Second // so that a busy machine renews the other hold
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		dead := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		zombie := mustLock(t, reading(dead, "orders"))
		h := mustLock(t, reading(c, "orders"))
		dead.Close()
		harness.Eventually(t, soon, "its key is gone", func() bool { return !exists(t, s, holdKey(zombie)) })
		require.NoError(t, h.Context().Err())
		waits := harness.Client(t, s)
		entered, leave := inBackground(t.Context(), writing(waits, "orders"))
		harness.Waits(t, 1, waits)
		// The field of the dead reader still exists, and must not block the writer.
		require.Equal(t, "1", fields(t, s)[zombie.Owner().String()])
		unlock(t, h)
		enters(t, entered, beforePolls)
		close(leave)
		harness.NothingLeft(t, s.Addr)
	})
}

// An owner's holds on one side are not those on the other, and only this process can end
// them.
func TestUnlockByOwnerIsOfItsSide(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		ctx := named(t, c)
		w := mustLockAs(t, ctx, writing(c, "orders"))
		r := mustLockAs(t, ctx, reading(c, "orders"))
		for _, side := range sides {
			require.ErrorIs(t, side.of(other, "orders").Unlock(ctx), lock.ErrNotHeld)
		}
		require.NoError(t, reading(c, "orders").Unlock(ctx))
		require.ErrorIs(t, reading(c, "orders").Unlock(ctx), lock.ErrNotHeld)
		require.NoError(t, w.Context().Err())
		require.Equal(t, 1, harness.HoldCount(t, writing(other, "orders"), w.Owner()))
		r2 := mustLockAs(t, ctx, reading(c, "orders"))
		require.NoError(t, writing(c, "orders").Unlock(ctx))
		require.ErrorIs(t, writing(c, "orders").Unlock(ctx), lock.ErrNotHeld)
		require.NoError(t, r2.Context().Err())
		require.Equal(t, 1, harness.HoldCount(t, reading(other, "orders"), r2.Owner()))
		unlock(t, r2)
		for _, h := range []lock.Hold{r, w} {
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

func TestForceUnlockIsOfItsSide(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		messages := harness.Messages(t, s.Addr, wire.RWChannel("orders"))
		force := func(of sideOf, from *redlatch.Client) bool {
			t.Helper()
			forced, err := of(from, "orders").ForceUnlock(t.Context())
			require.NoError(t, err)
			return forced
		}
		for i, side := range sides {
			for _, from := range []*redlatch.Client{c, other} {
				require.False(t, force(side.of, from))
				ctx := t.Context()
				if side.name == "write" { // and reads
					ctx = named(t, c)
				}
				holds := []lock.Hold{mustLockAs(t, ctx, side.of(c, "orders")), mustLockAs(t, ctx, reading(c, "orders"))}
				before := fields(t, s)
				require.False(t, force(sides[1-i].of, from))
				require.Equal(t, before, fields(t, s))
				require.NoError(t, errors.Join(holds[0].Context().Err(), holds[1].Context().Err()))
				require.True(t, force(side.of, from))
				require.Equal(t, []string{"0", "1"}[i], harness.Receive(t, soon, "a message", messages))
				require.False(t, harness.IsLocked(t, side.of(from, "orders")))
				if from == c {
					require.Error(t, holds[0].Context().Err(), "a hold of the same client ends at once")
				}
				for _, h := range holds {
					require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
				}
				harness.NothingLeft(t, s.Addr)
			}
		}
		require.Empty(t, messages)
	})
}

// A restarted server is empty: the holds are lost, and the watchdog renews holds acquired
// afterwards.
func TestWatchdogAfterARestart(t *testing.T) {
	const timeout = 1500 * time.Millisecond
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
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
			harness.Receive(t, soon, "the end of the hold", h.Context().Done())
			require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
		harness.Eventually(t, soon, "the connection is back", func() bool { return c.Ping(t.Context()) == nil })
		holds = lockAll()
		holdsFor(t, s, 3*timeout/2, "read", "write")
		for _, h := range holds {
			require.NoError(t, context.Cause(h.Context()))
			unlock(t, h)
		}
		harness.NothingLeft(t, s.Addr)
	})
}
