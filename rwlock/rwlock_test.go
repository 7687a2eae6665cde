package rwlock_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

// A writer reads, once or twice, and goes on as a reader.
func TestDowngrade(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		ctx := named(t, c)
		o, _ := lock.OwnerFrom(ctx)
		locked := func(reads, writes bool) {
			t.Helper()
			for _, c := range []*redlatch.Client{c, other} {
				require.Equal(t, reads, harness.IsLocked(t, reading(c, "orders")))
				require.Equal(t, writes, harness.IsLocked(t, writing(c, "orders")))
				require.False(t, tries(t, t.Context(), writing(c, "orders")))
			}
		}
		w := mustLockAs(t, ctx, writing(c, "orders"))
		locked(false, true)
		r, again := mustLockAs(t, ctx, reading(c, "orders")), mustLockAs(t, ctx, reading(c, "orders"))
		locked(true, true)
		require.False(t, tries(t, t.Context(), reading(other, "orders")))

		unlock(t, w)
		unlock(t, again)
		locked(true, false)
		require.Zero(t, harness.HoldCount(t, writing(c, "orders"), o))
		require.Equal(t, 1, harness.HoldCount(t, reading(c, "orders"), o))
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
		r := mustLockAs(t, ctx, reading(c, "orders"))
		upgrade := func() {
			t.Helper()
			begin := time.Now()
			_, err := writing(c, "orders").TryLock(ctx)
			require.ErrorIs(t, err, lock.ErrUpgrade)
			for _, opts := range [][]lock.Option{nil, {lock.Wait(time.Minute)}} {
				_, err = writing(c, "orders").Lock(ctx, opts...)
				require.ErrorIs(t, err, lock.ErrUpgrade)
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
			}
			require.Less(t, time.Since(begin), soon)
			require.False(t, exists(t, s, writerWaits))
			require.Equal(t, 1, harness.HoldCount(t, reading(c, "orders"), lock.OwnerOf(r)))
		}
		upgrade()
		h := mustLock(t, reading(other, "orders"))
		upgrade()
		unlock(t, r)
		unlock(t, h)
		harness.NothingLeft(t, s.Addr)
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

// holdKey is the key of a read hold.
func holdKey(h lock.Hold) string { return "{orders}:" + lock.OwnerOf(h).String() + ":rwlock_timeout:1" }

func TestWhatRedissonSees(t *testing.T) {
	const short, medium, long = 20 * time.Second, 40 * time.Second, 60 * time.Second
	type (
		hash = map[string]string
		ttls = map[string]time.Duration
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := named(t, c)
		// sees requires the hash, and that the server has these keys and no others, with that time left, less
		// the time that the test has taken.
		sees := func(h hash, want ttls) {
			t.Helper()
			const slack = 10 * time.Second
			require.Equal(t, h, fields(t, s))
			keys, err := testserver.Query(s.Addr, "KEYS", "*")
			require.NoError(t, err)
			require.ElementsMatch(t, slices.Collect(maps.Keys(want)), keys)
			for key, ttl := range want {
				got := time.Duration(harness.PTTL(t, s.Addr, key)) * time.Millisecond
				require.LessOrEqual(t, got, ttl, key)
				require.Greater(t, got, ttl-slack, key)
			}
		}
		r1 := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(short))
		o := lock.OwnerOf(r1).String()
		sees(hash{"mode": "read", o: "1"}, ttls{"orders": short, holdKey(r1): short})
		value, err := testserver.Query(s.Addr, "GET", holdKey(r1))
		require.NoError(t, err)
		require.Equal(t, []string{"1"}, value)
		r2 := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(medium))
		other := mustLock(t, reading(c, "orders"), lock.Lease(long))
		sees(hash{"mode": "read", o: "1", lock.OwnerOf(other).String(): "1"}, ttls{"orders": long, holdKey(r1): medium, holdKey(other): long})
		unlock(t, r1)
		unlock(t, other)
		sees(hash{"mode": "read", o: "1"}, ttls{"orders": medium, holdKey(r2): medium})
		unlock(t, r2)
		sees(hash{}, ttls{})

		w1 := mustLockAs(t, ctx, writing(c, "orders"), lock.Lease(long))
		o = lock.OwnerOf(w1).String()
		w2 := mustLockAs(t, ctx, writing(c, "orders"), lock.Lease(short))
		sees(hash{"mode": "write", o + ":write": "1"}, ttls{"orders": long})
		r := mustLockAs(t, ctx, reading(c, "orders"), lock.Lease(medium))
		p := lock.OwnerOf(r).String()
		unlock(t, w2)
		sees(hash{"mode": "write", o + ":write": "1", p: "1"}, ttls{"orders": long, holdKey(r): medium})
		unlock(t, w1)
		sees(hash{"mode": "read", p: "1"}, ttls{"orders": medium, holdKey(r): medium})
		unlock(t, r)
		sees(hash{}, ttls{})

		// A name can have braces of its own.
		h := mustLock(t, reading(c, "{a}b"))
		require.True(t, exists(t, s, "{a}b:"+lock.OwnerOf(h).String()+":rwlock_timeout:1"))
		unlock(t, h)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestReadersGetInWhenTheLeaseOfAWriterIsOver(t *testing.T) {
	const lease = 1200 * time.Millisecond
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, other := s.Client(t), s.Client(t)
		begin := time.Now()
		h := mustLock(t, writing(c, "orders"), lock.Lease(lease))
		readers := newCrowd(t)
		readers.add(2, reading(c, "orders"))
		readers.add(2, reading(other, "orders"))
		readers.allIn(lease + 100*time.Millisecond)
		require.GreaterOrEqual(t, time.Since(begin), lease)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		readers.out()
	})
}

// In Redisson the end of either hold can end the renewal of the other.
func TestAWriterThatReadsIsRenewedOnEitherSide(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		ctx := named(t, c)
		w1, r1 := mustLockAs(t, ctx, writing(c, "one")), mustLockAs(t, ctx, reading(c, "one"))
		w2, r2 := mustLockAs(t, ctx, writing(c, "two")), mustLockAs(t, ctx, reading(c, "two"))
		unlock(t, w1)
		unlock(t, r2)
		hold := "{one}:" + lock.OwnerOf(r1).String() + ":rwlock_timeout:1"
		for range 10 {
			time.Sleep(redlatch.DefaultWatchdogTimeout / 2)
			for _, key := range []string{"one", "two", hold} {
				require.Positive(t, s.TTL(key), key)
			}
		}
		for _, h := range []lock.Hold{r1, w2} {
			require.NoError(t, h.Context().Err())
			unlock(t, h)
		}
		s.NothingLeft(t)
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
			require.ErrorIs(t, side.of(other, "orders").UnlockOwner(ctx), lock.ErrNotHeld)
		}
		require.NoError(t, reading(c, "orders").UnlockOwner(ctx))
		require.ErrorIs(t, reading(c, "orders").UnlockOwner(ctx), lock.ErrNotHeld)
		require.NoError(t, w.Context().Err())
		require.Equal(t, 1, harness.HoldCount(t, writing(other, "orders"), lock.OwnerOf(w)))
		r2 := mustLockAs(t, ctx, reading(c, "orders"))
		require.NoError(t, writing(c, "orders").UnlockOwner(ctx))
		require.ErrorIs(t, writing(c, "orders").UnlockOwner(ctx), lock.ErrNotHeld)
		require.NoError(t, r2.Context().Err())
		require.Equal(t, 1, harness.HoldCount(t, reading(other, "orders"), lock.OwnerOf(r2)))
		unlock(t, r2)
		for _, h := range []lock.Hold{r, w} {
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// The holds of one side are lost when that side is forced open, and with the write side the writer's read
// holds.
func TestForceUnlockIsOfItsSide(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		messages := harness.Messages(t, s.Addr, wire.RWChannel("orders"))
		force := func(of sideOf) bool {
			t.Helper()
			forced, err := of(c, "orders").ForceUnlock(t.Context())
			require.NoError(t, err)
			return forced
		}
		for i, side := range sides {
			require.False(t, force(side.of))
			ctx := t.Context()
			if side.name == "write" { // and reads
				ctx = named(t, c)
			}
			holds := []lock.Hold{mustLockAs(t, ctx, side.of(c, "orders")), mustLockAs(t, ctx, reading(c, "orders"))}
			before := fields(t, s)
			require.False(t, force(sides[1-i].of))
			require.Equal(t, before, fields(t, s))
			require.NoError(t, errors.Join(holds[0].Context().Err(), holds[1].Context().Err()))

			require.True(t, force(side.of))
			require.Equal(t, []string{"0", "1"}[i], harness.Receive(t, soon, "a message", messages))
			require.False(t, harness.IsLocked(t, side.of(c, "orders")))
			require.Error(t, holds[0].Context().Err(), "a hold of the same client ends at once")
			for _, h := range holds {
				require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
			}
			harness.NothingLeft(t, s.Addr)
		}
		require.Empty(t, messages)
	})
}
