package inspect

import (
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/semaphore"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

// soon is for what needs some round trips.
const soon = 10 * time.Second

const (
	java  = "6ba7b810-9dad-41d1-80b4-00c04fd430c8:47" // an owner of Redisson
	stray = "6ba7b811-9dad-41d1-80b4-00c04fd430c8:48" // another
)

func readerOf(t testing.TB, addrs ...string) *Reader {
	t.Helper()
	conn, err := rueidis.NewClient(rueidis.ClientOption{
		InitAddress: addrs, DisableCache: true, ClientSetInfo: rueidis.DisableClientSetInfo, // its commands are counted
	})
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return &Reader{Conn: conn}
}

// read reads the object jobs.
func read(t testing.TB, r *Reader) Object {
	t.Helper()
	o, err := r.Read(context.Background(), "jobs")
	require.NoError(t, err)
	return o
}

// waits starts fn and returns when it waits as the check says. The result ends it.
func waits(t *testing.T, check func() bool, fn func(ctx context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- fn(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.ErrorIs(t, <-done, context.Canceled)
	})
	t.Cleanup(stop)
	harness.Eventually(t, soon, "it waits", check)
	return stop
}

func locked(l lock.Locker) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		_, err := l.Lock(ctx)
		return err
	}
}

// Each kind is recognized by its keys, with its holders and waiters.
func TestKinds(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r, c := readerOf(t, s.Addr), harness.Client(t, s)
		must := func(l lock.Locker) lock.Hold {
			h, err := l.Lock(t.Context())
			require.NoError(t, err)
			return h
		}
		other := harness.Client(t, s)
		unlock := func(h lock.Hold) { require.NoError(t, h.Unlock(t.Context())) }
		isHolder := func(o Object, h lock.Hold) {
			t.Helper()
			require.True(t, o.Held)
			require.Len(t, o.Holders, 1)
			holder := o.Holders[0]
			require.Equal(t, lock.OwnerOf(h).String(), holder.ID)
			require.Equal(t, c.ID(), holder.Client)
			require.Equal(t, c.ID()+":"+strconv.FormatUint(holder.Number, 10), holder.ID)
			require.Equal(t, "redlatch", holder.Library)
			require.WithinDuration(t, time.Now(), *holder.Started, time.Minute)
			require.InDelta(t, redlatch.DefaultWatchdogTimeout, time.Duration(*holder.Lease), float64(5*time.Second))
			require.InDelta(t, redlatch.DefaultWatchdogTimeout, time.Duration(*o.Expires), float64(5*time.Second))
		}
		ok := func(o Object, kind Kind) {
			t.Helper()
			require.Equal(t, kind, o.Kind)
			require.Empty(t, o.Anomalies)
			require.False(t, o.Truncated)
			require.Equal(t, "jobs", o.Key)
			require.WithinDuration(t, time.Now(), o.At, time.Minute)
		}

		o := read(t, r)
		ok(o, None)
		require.False(t, o.Held)
		require.Nil(t, o.Expires)

		t.Run("counter", func(t *testing.T) {
			harness.Do(t, s.Addr, "SET", "jobs", "17")
			o := read(t, r)
			ok(o, Counter)
			require.EqualValues(t, 17, *o.Count)
			require.False(t, o.Held)
			harness.Do(t, s.Addr, "FLUSHALL")
		})
		t.Run("lock", func(t *testing.T) {
			h := must(c.Lock("jobs"))
			isHolder(read(t, r), h)
			stop := waits(t, func() bool { return read(t, r).Subscribers == 1 }, locked(other.Lock("jobs")))
			ok(read(t, r), Lock)
			require.EqualValues(t, 1, read(t, r).Holders[0].Count)
			stop()
			unlock(h)
		})
		t.Run("plain", func(t *testing.T) {
			h := must(c.PlainLock("jobs"))
			isHolder(read(t, r), h)
			stop := waits(t, func() bool { return read(t, r).Subscribers == 1 }, locked(other.PlainLock("jobs")))
			ok(read(t, r), Plain)
			stop()
			unlock(h)
		})
		t.Run("plain lock of another library", func(t *testing.T) {
			harness.Do(t, s.Addr, "SET", "jobs", "t0ken", "PX", "9000")
			o := read(t, r)
			ok(o, Plain)
			require.Equal(t, "other", o.Holders[0].Library)
			require.Equal(t, "t0ken", o.Holders[0].ID)
			harness.Do(t, s.Addr, "DEL", "jobs")
		})
		t.Run("lock of Redisson", func(t *testing.T) {
			harness.Do(t, s.Addr, "HSET", "jobs", java, "2")
			harness.Do(t, s.Addr, "PEXPIRE", "jobs", "9000")
			o := read(t, r)
			ok(o, Lock)
			require.Equal(t, "Redisson", o.Holders[0].Library)
			require.Nil(t, o.Holders[0].Started)
			require.EqualValues(t, 47, o.Holders[0].Number)
			require.EqualValues(t, 2, o.Holders[0].Count)
			harness.Do(t, s.Addr, "DEL", "jobs")
		})
		t.Run("read-write", func(t *testing.T) {
			l := c.RWLock("jobs")
			a, b := must(l.Read()), must(other.RWLock("jobs").Read())
			stop := waits(t, func() bool { return read(t, r).Waiting == 1 }, locked(other.RWLock("jobs").Write()))
			o := read(t, r)
			ok(o, RWLock)
			require.Len(t, o.Holders, 2)
			for _, h := range o.Holders {
				require.Equal(t, "read", h.Mode)
				require.InDelta(t, redlatch.DefaultWatchdogTimeout, time.Duration(*h.Lease), float64(5*time.Second))
			}
			stop()
			unlock(a)
			unlock(b)
			w := must(l.Write())
			o = read(t, r)
			ok(o, RWLock)
			isHolder(o, w)
			require.Equal(t, "write", o.Holders[0].Mode)
			unlock(w)
		})
		t.Run("fair", func(t *testing.T) {
			h := must(c.FairLock("jobs"))
			ok(read(t, r), Lock) // nobody waits
			third := harness.Client(t, s)
			stop := waits(t, func() bool { return len(read(t, r).Queue) == 1 }, locked(other.FairLock("jobs")))
			stopThird := waits(t, func() bool { return len(read(t, r).Queue) == 2 }, locked(third.FairLock("jobs")))
			o := read(t, r)
			require.Equal(t, Fair, o.Kind)
			isHolder(o, h)
			require.Equal(t, other.ID(), o.Queue[0].Client)
			require.Equal(t, third.ID(), o.Queue[1].Client)
			for _, w := range o.Queue {
				require.Positive(t, *w.Alive)
				require.LessOrEqual(t, time.Duration(*w.Alive), 10*time.Second)
				require.Positive(t, *w.Deadline)
			}
			harness.Eventually(t, soon, "both listen", func() bool { return read(t, r).Subscribers == 2 })
			o = read(t, r)
			ok(o, Fair)
			require.True(t, o.Queue[0].Listens)
			stop()
			stopThird()
			unlock(h)
		})
		harness.Do(t, s.Addr, "FLUSHALL")
		t.Run("fenced", func(t *testing.T) {
			h := must(c.FencedLock("jobs"))
			o := read(t, r)
			ok(o, Fenced)
			isHolder(o, h)
			require.Equal(t, h.Token(), *o.Token)
			unlock(h)
			o = read(t, r)
			ok(o, Fenced)
			require.False(t, o.Held)
			require.Equal(t, h.Token(), *o.Token)
			harness.Do(t, s.Addr, "FLUSHALL")
		})
		t.Run("permits", func(t *testing.T) {
			sem := c.PermitSemaphore("jobs", semaphore.Permits(2))
			p, err := sem.Acquire(t.Context(), 1)
			require.NoError(t, err)
			forever, err := sem.Acquire(t.Context(), 1, semaphore.Forever())
			require.NoError(t, err)
			waits(t, func() bool { return read(t, r).Subscribers == 1 }, func(ctx context.Context) error {
				_, err := sem.Acquire(ctx, 1)
				return err
			})
			o := read(t, r)
			ok(o, Semaphore)
			require.True(t, o.Held)
			require.Equal(t, PermitNumbers{Free: 0, Held: 2}, *o.Permits)
			leases := map[string]*Millis{}
			for _, h := range o.Holders {
				leases[h.ID] = h.Lease
				require.Empty(t, h.Library)
			}
			require.InDelta(t, redlatch.DefaultWatchdogTimeout, time.Duration(*leases[p.ID()]), float64(5*time.Second))
			require.Contains(t, leases, forever.ID())
			require.Nil(t, leases[forever.ID()])
			harness.Eventually(t, soon, "the wait queue has the client", func() bool { return read(t, r).Waiting == 1 })
		})
		harness.Do(t, s.Addr, "FLUSHALL")
		t.Run("semaphore", func(t *testing.T) {
			sem := c.Semaphore("jobs", semaphore.Permits(3))
			require.NoError(t, sem.Acquire(t.Context(), 1))
			o := read(t, r)
			ok(o, Semaphore)
			require.Equal(t, PermitNumbers{Free: 2, Held: -1}, *o.Permits)
			harness.Do(t, s.Addr, "FLUSHALL")
		})
		t.Run("semaphore that was not created", func(t *testing.T) {
			stop := waits(t, func() bool { return len(read(t, r).Anomalies) == 1 }, func(ctx context.Context) error {
				return c.Semaphore("jobs").Acquire(ctx, 1)
			})
			o := read(t, r)
			require.Equal(t, Semaphore, o.Kind)
			require.Equal(t, "no-number", o.Anomalies[0].Code)
			stop()
			harness.Do(t, s.Addr, "FLUSHALL")
		})
		t.Run("latch", func(t *testing.T) {
			l := c.CountDownLatch("jobs")
			_, err := l.TrySetCount(t.Context(), 2)
			require.NoError(t, err)
			waits(t, func() bool { return read(t, r).Subscribers == 1 }, l.Wait)
			o := read(t, r)
			ok(o, Latch)
			require.False(t, o.Held, "a latch has no holders")
			require.EqualValues(t, 2, *o.Count)
			require.Nil(t, o.Expires)
		})
		harness.Do(t, s.Addr, "FLUSHALL")
		t.Run("rate limiter", func(t *testing.T) {
			l := c.RateLimiter("jobs", ratelimit.Rate(5, time.Hour))
			require.NoError(t, l.TryAcquire(t.Context(), 2))
			require.NoError(t, l.TryAcquire(t.Context(), 3))
			waits(t, func() bool { return read(t, r).Subscribers == 1 }, func(ctx context.Context) error { return l.Acquire(ctx, 1) })
			o := read(t, r)
			ok(o, Rate)
			require.EqualValues(t, 5, *o.Limit.Used)
			require.InDelta(t, time.Hour, time.Duration(*o.Limit.NextFree), float64(time.Minute))
			o.Limit.Used, o.Limit.NextFree = nil, nil
			require.Equal(t, Limit{Rate: 5, Per: Millis(time.Hour)}, *o.Limit)
		})
		harness.Do(t, s.Addr, "FLUSHALL")
		t.Run("election", func(t *testing.T) {
			term, err := c.Election("jobs").Campaign(t.Context(), "host-1")
			require.NoError(t, err)
			o := read(t, r)
			ok(o, Election)
			require.Equal(t, Term{Token: term.Token(), Value: "host-1", Current: true}, *o.Leader)
			require.Equal(t, term.Owner().String(), o.Holders[0].ID)
			stop := waits(t, func() bool { return len(read(t, r).Queue) == 1 }, func(ctx context.Context) error {
				_, err := other.Election("jobs").Campaign(ctx, "host-2")
				return err
			})
			ok(read(t, r), Election)
			stop()
			require.NoError(t, term.Resign(t.Context()))
			o = read(t, r)
			ok(o, Election)
			require.Equal(t, Term{Token: term.Token(), Value: "host-1"}, *o.Leader)
		})
	})
}

// What keeps waiters out, or does not belong there, is an anomaly.
func TestAnomalies(t *testing.T) {
	far := strconv.FormatInt(time.Now().Add(time.Hour).UnixMilli(), 10)
	past := strconv.FormatInt(time.Now().Add(-time.Hour).UnixMilli(), 10)
	id, err := hex.DecodeString("00112233445566778899aabbccddeeff")
	require.NoError(t, err)
	held := [][]string{{"HSET", "jobs", java, "1"}, {"PEXPIRE", "jobs", "9000"}}
	type anomaly struct {
		name  string
		given [][]string
		codes []string
	}
	anomalies := []anomaly{
		{"nothing", held, nil},
		{"no expiry", held[:1], []string{"no-expiry"}},
		{"plain without expiry", [][]string{{"SET", "jobs", java}}, []string{"no-expiry"}},
		{"two holders", append([][]string{{"HSET", "jobs", stray, "1"}}, held...), []string{"several-holders"}},
		{"list", [][]string{{"RPUSH", "jobs", "a"}}, []string{"wrong-type"}},
		{"text", [][]string{{"SET", "jobs", "a"}}, []string{"wrong-type"}},
		{"hash of another kind", [][]string{{"HSET", "jobs", "color", "red"}}, []string{"wrong-type"}},
		{"token of another type", append([][]string{{"RPUSH", wire.FencingToken("jobs"), "1"}}, held...), []string{"token", "wrong-type"}},
		{"token without digits", append([][]string{{"SET", wire.FencingToken("jobs"), "x"}}, held...), []string{"token"}},
		{"evicted waiter", append([][]string{{"RPUSH", wire.FairQueue("jobs"), stray}}, held...), []string{"no-deadline"}},
		{"expired waiter", append([][]string{
			{"RPUSH", wire.FairQueue("jobs"), stray}, {"ZADD", wire.FairTimeouts("jobs"), past, stray},
		}, held...), []string{"dead-waiter"}},
		{"dead waiter", append([][]string{
			{"RPUSH", wire.FairQueue("jobs"), stray}, {"ZADD", wire.FairTimeouts("jobs"), far, stray},
			{"ZADD", wire.FairAlive("jobs"), past, stray},
		}, held...), []string{"dead-waiter"}},
		{"silent waiter", append([][]string{
			{"RPUSH", wire.FairQueue("jobs"), stray}, {"ZADD", wire.FairTimeouts("jobs"), far, stray},
		}, held...), []string{"silent-waiter"}},
		{"waiter of the deadlines alone", append([][]string{{"ZADD", wire.FairTimeouts("jobs"), far, stray}}, held...), []string{"stray-deadline"}},
		{"expired reader", [][]string{
			{"HSET", "jobs", "mode", "read", java, "1", stray, "1"}, {"PEXPIRE", "jobs", "9000"},
			{"SET", wire.ReadHoldTimeout("jobs", java, 1), "1", "PX", "9000"},
		}, []string{"expired-reader"}},
		{"strange mode", [][]string{{"HSET", "jobs", "mode", "x", java + ":write", "1"}, {"PEXPIRE", "jobs", "9000"}}, []string{"wrong-type"}},
		{"negative", [][]string{{"SET", "jobs", "-2"}, {"ZADD", wire.PermitTimeouts("jobs"), far, string(id)}}, []string{"negative"}},
		{"drained", [][]string{{"SET", "jobs", "-1"}, {"ZADD", wire.PermitTimeouts("jobs"), far, string(id)}}, nil},
		{"negative without ids", [][]string{{"SET", "jobs", "-1"}, {"SET", wire.SemaphoreCreated("jobs"), "1 1"}}, []string{"negative"}},
		{"permits without a number", [][]string{{"ZADD", wire.PermitTimeouts("jobs"), far, string(id)}}, []string{"no-number"}},
		{"queue of a read-write lock", [][]string{
			{"HSET", "jobs", "mode", "write", java + ":write", "1"}, {"PEXPIRE", "jobs", "9000"},
			{"RPUSH", wire.FairQueue("jobs"), stray},
		}, []string{"mixed-kinds"}},
		{"term without a number", append([][]string{{"HSET", wire.ElectionTerm("jobs"), "token", "x"}}, held...), []string{"token"}},
	}
	harness.EachOf(t, anomalies, func(a anomaly) string { return a.name }, func(t *testing.T, s *testserver.Server, a anomaly) {
		for _, words := range a.given {
			harness.Do(t, s.Addr, words...)
		}
		var codes []string
		for _, found := range read(t, readerOf(t, s.Addr)).Anomalies {
			codes = append(codes, found.Code)
			require.NotContains(t, found.Text, "%!")
		}
		slices.Sort(codes)
		require.Equal(t, a.codes, codes)
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// Expired permits are free, and are not shown.
func TestExpiredPermitsAreFree(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.Do(t, s.Addr, "SET", "jobs", "1")
		harness.Do(t, s.Addr, "ZADD", wire.PermitTimeouts("jobs"), "1", "aaaaaaaaaaaaaaaa", "922337203685477", "bbbbbbbbbbbbbbbb")
		o := read(t, readerOf(t, s.Addr))
		require.Equal(t, PermitNumbers{Free: 2, Held: 1}, *o.Permits)
		require.Len(t, o.Holders, 1)
		require.Nil(t, o.Holders[0].Lease)
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// Of very many holders and waiters some are read, and the mode of the lock is known.
func TestManyHoldersAreTruncated(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		queue, readers := []string{"RPUSH", wire.FairQueue("jobs")}, []string{"HSET", "jobs", "mode", "read"}
		for i := range 3 * most {
			owner := fmt.Sprintf("%s%d", java, i)
			queue, readers = append(queue, owner), append(readers, owner, "1")
		}
		harness.Do(t, s.Addr, queue...)
		o := read(t, readerOf(t, s.Addr))
		require.Len(t, o.Queue, most)
		require.True(t, o.Truncated)
		require.Empty(t, o.Anomalies, "deadlines were not looked for")

		harness.Do(t, s.Addr, "FLUSHALL")
		harness.Do(t, s.Addr, readers...)
		o = read(t, readerOf(t, s.Addr))
		require.Equal(t, RWLock, o.Kind)
		require.GreaterOrEqual(t, len(o.Holders), most/2)
		require.True(t, o.Truncated)
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// A user who may not count subscribers sees everything else.
func TestUserWithoutPubSub(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.Do(t, s.Addr, "HSET", "jobs", java, "1")
		harness.Do(t, s.Addr, "ACL", "SETUSER", "reader", "on", "nopass", "~*", "&*", "+@all", "-pubsub")
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.Addr}, Username: "reader", Password: "x", DisableCache: true})
		require.NoError(t, err)
		defer conn.Close()
		o := read(t, &Reader{Conn: conn})
		require.Equal(t, -1, o.Subscribers)
		require.True(t, o.Held)
		harness.Do(t, s.Addr, "ACL", "DELUSER", "reader")
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// The hash of an application, with large numbers in many fields, costs no more than a lock, and large values
// stay on the server.
func TestLargeHashOfAnApplication(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "EVAL", "for i = 1, 10000 do redis.call('HSET', 'jobs', 'user:' .. i, 1000000) end", "0")
		read(t, readerOf(t, s.Addr))
		require.LessOrEqual(t, harness.Commands(t, harness.Conn(t, s.Addr))["pttl"], most+numKeys)

		harness.Do(t, s.Addr, "DEL", "jobs")
		large := strings.Repeat("x", 10_000_000)
		harness.Do(t, s.Addr, "HSET", "jobs", "body", large, large, "1")
		harness.Do(t, s.Addr, "RPUSH", wire.FairQueue("jobs"), large)
		r := readerOf(t, s.Addr)
		before := statOf(t, s.Addr, "total_net_output_bytes")
		read(t, r)
		require.Less(t, statOf(t, s.Addr, "total_net_output_bytes")-before, 100_000)
	})
}

func statOf(t *testing.T, addr, name string) int {
	stats, err := testserver.Info(addr, "stats")
	require.NoError(t, err)
	n, err := strconv.Atoi(stats[name])
	require.NoError(t, err, stats)
	return n
}

// Keys that no object can have, or that the user may not read, are left out.
func TestScanOfOddKeys(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, key := range []string{"app:", "app:jobs", "secret", "app:secret"} {
			harness.Do(t, s.Addr, "HSET", key, java+"1", "1")
		}
		harness.Do(t, s.Addr, "ACL", "SETUSER", "reader", "on", "nopass", "~app:", "~app:j*", "~*{app:*", "&*", "+@all")
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.Addr}, Username: "reader", Password: "x", DisableCache: true})
		require.NoError(t, err)
		defer conn.Close()
		r := &Reader{Conn: conn, Prefix: "app:"}
		require.Equal(t, []string{"jobs"}, names(t, r, "*"))
		objects, err := r.ReadSome(t.Context(), []string{"jobs", "secret"})
		require.NoError(t, err)
		require.Len(t, objects, 1)
		_, err = r.ReadAll(t.Context(), []string{"jobs", "secret"})
		require.ErrorContains(t, err, "secret")
		harness.Do(t, s.Addr, "ACL", "DELUSER", "reader")
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// Times are rounded to what a person reads.
func TestTimes(t *testing.T) {
	for text, d := range map[string]time.Duration{
		"0s": 0, "999ms": 999 * time.Millisecond, "1s": 1049 * time.Millisecond, "59.9s": 59_900 * time.Millisecond,
		"1m0s": time.Minute, "1h0m1s": time.Hour + 1400*time.Millisecond, "-1m1s": -61 * time.Second,
	} {
		require.Equal(t, text, Millis(d).String())
	}
}

// names returns the names that a scan finds.
func names(t testing.TB, r *Reader, pattern string) (all []string) {
	t.Helper()
	s, err := r.Scan(t.Context(), pattern)
	require.NoError(t, err)
	for more := true; more; {
		var some []string
		some, more, err = s.Next(t.Context())
		require.NoError(t, err)
		for _, name := range some {
			if !slices.Contains(all, name) {
				all = append(all, name)
			}
		}
	}
	slices.Sort(all)
	return all
}

// A scan finds every object among other keys, by its own key or by those beside it.
func TestScan(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r, c := readerOf(t, s.Addr), harness.Client(t, s)
		for i := range 3 * batch {
			harness.Do(t, s.Addr, "SET", fmt.Sprint("cache:", i), "x")
			harness.Do(t, s.Addr, "HSET", fmt.Sprint("user:", i), "name", "x")
		}
		all := map[string]lock.Locker{
			"a/lock": c.Lock("a/lock"), "a/plain": c.PlainLock("a/plain"), "a/fenced": c.FencedLock("a/fenced"),
			"b/read": c.RWLock("b/read").Read(), "b/write": c.RWLock("b/write").Write(), "b{tag}": c.FencedLock("b{tag}"),
		}
		for _, l := range all {
			h, err := l.Lock(t.Context())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, h.Unlock(context.Background())) })
		}
		for _, name := range []string{"c/permits", "c/{permits}"} {
			permit, err := c.PermitSemaphore(name, semaphore.Permits(2)).Acquire(t.Context(), 1)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, permit.Release(context.Background())) })
		}
		require.NoError(t, c.Semaphore("c/semaphore", semaphore.Permits(2)).Acquire(t.Context(), 1))
		_, err := c.CountDownLatch("c/latch").TrySetCount(t.Context(), 2)
		require.NoError(t, err)
		term, err := c.Election("c/election").Campaign(t.Context(), "x")
		require.NoError(t, err)
		require.NoError(t, term.Resign(t.Context()))

		require.Equal(t, []string{
			"a/fenced", "a/lock", "a/plain", "b/read", "b/write", "b{tag}",
			"c/election", "c/latch", "c/permits", "c/semaphore", "c/{permits}",
		}, names(t, r, "*"))
		require.Equal(t, []string{"a/fenced", "a/lock", "a/plain"}, names(t, r, "a/*"))
		require.Equal(t, []string{"b/read"}, names(t, r, "b?re[a-c]d"))
		require.Equal(t, []string{"b/read", "b/write"}, names(t, r, "[^ac]/*"))
		require.Equal(t, []string{"b{tag}"}, names(t, r, `b\{*`))
		require.Empty(t, names(t, r, "lock"))
		r.Prefix = "c/"
		require.Equal(t, []string{"election", "latch", "permits", "semaphore", "{permits}"}, names(t, r, "*"))
		_, err = r.Scan(t.Context(), "[")
		require.ErrorContains(t, err, `pattern "["`)
	})
}

// The names with waiters are known without a scan.
func TestContended(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r, c := readerOf(t, s.Addr), harness.Client(t, s)
		contended := func() []string {
			names, err := r.Contended(t.Context())
			require.NoError(t, err)
			slices.Sort(names)
			return names
		}
		require.Empty(t, contended())
		var want []string
		other := harness.Client(t, s)
		for name, of := range map[string]func(c *redlatch.Client, name string) lock.Locker{
			"lock":      func(c *redlatch.Client, name string) lock.Locker { return c.Lock(name) },
			"fair":      func(c *redlatch.Client, name string) lock.Locker { return c.FairLock(name) },
			"a:fair{x}": func(c *redlatch.Client, name string) lock.Locker { return c.FairLock(name) },
			"plain":     func(c *redlatch.Client, name string) lock.Locker { return c.PlainLock(name) },
			"write":     func(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Write() },
			"fenced":    func(c *redlatch.Client, name string) lock.Locker { return c.FencedLock(name) },
		} {
			h, err := of(c, name).Lock(t.Context())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, h.Unlock(context.Background())) })
			waits(t, func() bool { return slices.Contains(contended(), name) }, locked(of(other, name)))
			want = append(want, name)
		}
		slices.Sort(want)
		require.Equal(t, want, contended())
		r.Prefix = "f"
		require.Equal(t, []string{"air", "enced"}, contended())
	})
}

func clientOf(t testing.TB, cluster *testserver.Cluster, opts ...redlatch.Option) *redlatch.Client {
	t.Helper()
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: cluster.Addrs()}, opts...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// In a cluster every primary is scanned, and a name is read from its own. Its subscribers are connected
// to that one, or with plain pub/sub to any node.
func TestCluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.ReplicatedCluster(t, shared.Program)
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: cluster.Addrs(), DisableCache: true})
		require.NoError(t, err)
		defer conn.Close()
		c := clientOf(t, cluster)
		r := &Reader{Conn: conn}
		var want []string
		for i := range 12 {
			name := fmt.Sprintf("job-%02d", i)
			h, err := c.FencedLock(name).Lock(t.Context())
			require.NoError(t, err)
			defer func() { require.NoError(t, h.Unlock(context.Background())) }()
			want = append(want, name)
		}
		require.Equal(t, want, names(t, r, "*"))
		objects, err := r.ReadAll(t.Context(), want)
		require.NoError(t, err)
		for i, o := range objects {
			require.Equal(t, want[i], o.Name)
			require.Equal(t, Fenced, o.Kind)
			require.True(t, o.Held)
		}

		r.Identify(t.Context(), objects)
		for _, o := range objects {
			require.Empty(t, o.Unidentified)
			require.NotNil(t, o.Holders[0].Connection, o.Name)
			require.Equal(t, os.Getpid(), o.Holders[0].Connection.PID)
		}

		for _, mode := range harness.PubSubModes(t, cluster) {
			other := clientOf(t, cluster, redlatch.WithPubSubMode(mode))
			var stops []func()
			for _, name := range want {
				stops = append(stops, waits(t, func() bool {
					o, err := r.Read(t.Context(), name)
					require.NoError(t, err)
					return o.Subscribers == 1
				}, locked(other.FencedLock(name))))
				contended, err := r.Contended(t.Context())
				require.NoError(t, err)
				slices.Sort(contended)
				require.Equal(t, want[:len(stops)], contended)
			}
			h, err := c.FairLock("fair").Lock(t.Context())
			require.NoError(t, err)
			stops = append(stops, waits(t, func() bool {
				o, err := r.Read(t.Context(), "fair")
				require.NoError(t, err)
				return len(o.Queue) == 1 && o.Queue[0].Listens
			}, locked(other.FairLock("fair"))))
			for _, stop := range stops {
				stop()
			}
			require.NoError(t, h.Unlock(t.Context()))
			other.Close() // no channel is kept warm
		}
		_, err = c.Once("report").MarkDone(t.Context(), "1")
		require.NoError(t, err)
		slot, err := r.Read(t.Context(), wire.OnceRun("report", "1"))
		require.NoError(t, err)
		require.Equal(t, Once, slot.Kind)
		require.Equal(t, []string{slot.Name}, names(t, r, "report"))
		_, err = r.Read(t.Context(), "a{b")
		require.ErrorIs(t, err, lock.ErrInvalid)
	})
}
