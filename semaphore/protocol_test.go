package semaphore_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

const key = "orders"

func itoa[T int | int64](n T) string { return strconv.FormatInt(int64(n), 10) }

const clientID = "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11"

// wireTest is a session on a server. Messages are appended to a list with the name of the channel
// instead of being published, so that the test sees all of them.
type wireTest struct {
	t    *testing.T
	ctx  context.Context
	addr string
	conn rueidis.Client
	sess *session.Session
	all  *semaphore.Shared
}

func newWireTest(t *testing.T, s *testserver.Server) *wireTest {
	x := &wireTest{t: t, ctx: t.Context(), addr: s.Addr, conn: harness.Conn(t, s.Addr)}
	x.sess = session.New(session.Config{
		Client: x.conn, ID: clientID, WatchdogTimeout: 30 * time.Second, HandOffs: 16,
		MapName: func(name string) string { return name }, Logger: slog.New(slog.DiscardHandler),
	})
	t.Cleanup(x.sess.Close)
	x.sess.Publish = "RPUSH"
	x.all = semaphore.NewShared(engine.New(x.sess))
	return x
}

// reply returns the reply to a command as text.
func (x *wireTest) reply(words ...string) string {
	x.t.Helper()
	m, err := x.conn.Do(x.ctx, x.conn.B().Arbitrary(words...).Build()).ToMessage()
	if rueidis.IsRedisNil(err) {
		return "nil"
	}
	require.NoError(x.t, err)
	if list, err := m.AsStrSlice(); err == nil {
		return strings.Join(list, " ")
	}
	if n, err := m.ToInt64(); err == nil {
		return itoa(n)
	}
	text, err := m.ToString()
	require.NoError(x.t, err)
	return text
}

func (x *wireTest) number(words ...string) int64 {
	x.t.Helper()
	n, err := strconv.ParseInt(x.reply(words...), 10, 64)
	require.NoError(x.t, err)
	return n
}

// now returns the server's time in ms.
func (x *wireTest) now() int64 {
	x.t.Helper()
	seconds, micros, _ := strings.Cut(x.reply("TIME"), " ")
	s, err := strconv.ParseInt(seconds, 10, 64)
	require.NoError(x.t, err)
	us, err := strconv.ParseInt(micros, 10, 64)
	require.NoError(x.t, err)
	return 1000*s + us/1000
}

// keys returns the types of all keys except cached replies.
func (x *wireTest) keys() map[string]string {
	x.t.Helper()
	all, err := x.conn.Do(x.ctx, x.conn.B().Keys().Pattern("*").Build()).AsStrSlice()
	require.NoError(x.t, err)
	types := map[string]string{}
	for _, k := range all {
		if !strings.HasPrefix(k, "redlatch_sc_request") {
			types[k] = x.reply("TYPE", k)
		}
	}
	return types
}

func empty(t *testing.T, s *testserver.Server) *testserver.Server {
	harness.Do(t, s.Addr, "FLUSHALL")
	return s
}

func only(_ any, err error) error { return err }

// lua returns the script that consists of some files.
func lua(t *testing.T, files ...string) *wire.Script {
	t.Helper()
	return wire.NewScript(harness.Source(t, files...))
}

func TestAcquiredPermitsExpireWithSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := newWireTest(t, s)
		timeouts := "{" + key + "}:timeout"
		e := semaphore.NewPermitSemaphore(x.all, key)
		require.NoError(t, e.SetPermits(x.ctx, 5))
		first, err := e.Acquire(x.ctx, lock.Lease(time.Minute))
		require.NoError(t, err)
		require.EqualValues(t, -1, x.number("PTTL", timeouts))
		harness.Do(t, s.Addr, "PEXPIRE", key, "40000")
		_, err = e.Acquire(x.ctx, lock.Lease(time.Minute))
		require.NoError(t, err)
		bound := func() {
			t.Helper()
			of, at := x.number("PTTL", key), x.number("PTTL", timeouts)
			require.InDelta(t, of, at, 1000, "the semaphore has %d ms, the permits %d", of, at)
		}
		bound()

		// The same applies to permits that a release acquires for a waiter.
		harness.Do(t, s.Addr, "PERSIST", timeouts)
		waited := make(chan error)
		go func() { _, err := e.AcquireN(x.ctx, 4, lock.Lease(time.Minute)); waited <- err }()
		harness.Eventually(t, 5*time.Second, "the client is queued", func() bool { return x.keys()["redlatch_sc_waiting:{"+key+"}"] != "" })
		require.NoError(t, e.Release(x.ctx, first.ID()))
		require.NoError(t, <-waited)
		bound()
	})
}

func TestCachedRepliesAndWaitQueueExpire(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := newWireTest(t, s)
		queue, heartbeats, channel := "redlatch_sc_waiting:{"+key+"}", "redlatch_sc_alive:{"+key+"}", "redisson_sc:{"+key+"}"
		sem := semaphore.New(x.all, key)
		require.NoError(t, only(sem.TrySetPermits(x.ctx, 3)))
		require.NoError(t, sem.Acquire(x.ctx, 2))
		harness.Do(t, s.Addr, "DEL", channel)
		cache := "redlatch_sc_request:{" + key + "}:" + clientID
		require.Regexp(t, `^2 \d+ \d+$`, x.reply("HGET", cache, "1"))
		require.EqualValues(t, 1, x.number("HLEN", cache))
		ttl := x.number("PTTL", cache)
		require.True(t, 710_000 < ttl && ttl <= 720_000, "the cached replies have %d ms", ttl)

		ctx, leave := context.WithCancel(x.ctx)
		waited := make(chan error)
		began := x.now()
		go func() { waited <- sem.Acquire(ctx, 2) }()
		harness.Eventually(t, 5*time.Second, "the client is queued", func() bool { return x.keys()[queue] != "" })
		joined := x.now()
		require.Equal(t, map[string]string{key: "string", queue: "zset", heartbeats: "zset"}, x.keys())
		since, until := x.number("ZSCORE", queue, clientID), x.number("ZSCORE", heartbeats, clientID)
		require.True(t, began-1 <= since && since <= joined-99, "%d is not since %d to %d", since, began, joined-100)
		require.True(t, since+3_100 <= until && until <= joined+3_000, "%d is not 3 s after %d", until, joined)
		for _, k := range []string{queue, heartbeats} {
			ttl := x.number("PTTL", k)
			require.True(t, 500 < ttl && ttl <= 3_000, "%s has %d ms", k, ttl)
		}
		leave()
		require.ErrorIs(t, <-waited, context.Canceled)
		harness.Eventually(t, 5*time.Second, "the client has left", func() bool { return x.keys()[queue] == "" })
		require.Equal(t, map[string]string{key: "string", channel: "list"}, x.keys())
		require.Equal(t, "1", x.reply("LRANGE", channel, "0", "-1"))
	})
}

// expired adds n expired permits.
func (x *wireTest) expired(n int) {
	x.t.Helper()
	words := []string{"ZADD", "{" + key + "}:timeout"}
	for i := range n {
		words = append(words, itoa(1_000_000+i), fmt.Sprintf("%016d", i))
	}
	x.reply(words...)
}

func TestManyExpiredPermits(t *testing.T) {
	many := harness.Size(2_500, semaphore.MaxBatch)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := newWireTest(t, s)
		timeouts, channel := "{"+key+"}:timeout", "redisson_sc:{"+key+"}"
		harness.Do(t, s.Addr, "SET", key, "0")
		x.expired(many)
		e := semaphore.NewPermitSemaphore(x.all, key)
		n, err := e.Available(x.ctx)
		require.NoError(t, err)
		require.Equal(t, many, n)

		// One script frees some of them and publishes the number of free permits.
		p, err := e.TryAcquire(x.ctx)
		require.NoError(t, err)
		require.EqualValues(t, many-1000+1, x.number("ZCARD", timeouts))
		require.Equal(t, "999", x.reply("GET", key))
		require.Equal(t, "999", x.reply("LRANGE", channel, "0", "-1"))
		require.NoError(t, p.Release(x.ctx))

		// It frees as many as the request wants.
		all, err := e.TryAcquireN(x.ctx, many, semaphore.Forever())
		require.NoError(t, err)
		require.Equal(t, "0", x.reply("GET", key))
		require.EqualValues(t, many, x.number("ZCARD", timeouts))
		require.NoError(t, all.Release(x.ctx))
		require.Equal(t, itoa(many), x.reply("GET", key))
	})
}

// attempts returns the number of scripts run within d.
func (x *wireTest) attempts(d time.Duration) int {
	x.t.Helper()
	harness.Do(x.t, x.addr, "CONFIG", "RESETSTAT")
	time.Sleep(d)
	calls := harness.Commands(x.t, x.conn)
	return calls["evalsha"] + calls["eval"]
}

// startAcquire acquires a permit in the background.
func (x *wireTest) startAcquire(e *semaphore.PermitSemaphore) <-chan error {
	done := make(chan error, 1)
	go func() { done <- only(e.Acquire(x.ctx, lock.Lease(time.Minute))) }()
	return done
}

// enqueue adds another client to the wait queue for some time.
func (x *wireTest) enqueue(since int64, life time.Duration) {
	x.t.Helper()
	queue, heartbeats := "redlatch_sc_waiting:{"+key+"}", "redlatch_sc_alive:{"+key+"}"
	until := itoa(x.now() + life.Milliseconds())
	for _, words := range [][]string{
		{"ZADD", queue, itoa(since), "another"}, {"ZADD", heartbeats, until, "another"},
		{"PEXPIREAT", queue, until}, {"PEXPIREAT", heartbeats, until},
	} {
		x.reply(words...)
	}
}

func TestExpiredPermitsCauseNoRetryLoop(t *testing.T) {
	const long = 500 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Run("behind another client in the wait queue", func(t *testing.T) {
			x := newWireTest(t, empty(t, s))
			harness.Do(t, s.Addr, "SET", key, "1")
			x.expired(1)
			x.enqueue(1, 2*time.Second)
			done := x.startAcquire(semaphore.NewPermitSemaphore(x.all, key))
			require.Less(t, x.attempts(long), 10)
			require.Equal(t, "2", x.reply("GET", key), "expired permits are free")
			require.NoError(t, <-done)
		})
		t.Run("without a semaphore", func(t *testing.T) {
			x := newWireTest(t, empty(t, s))
			x.expired(1)
			x.sess.Publish = "PUBLISH"
			e := semaphore.NewPermitSemaphore(x.all, key)
			done := x.startAcquire(e)
			require.Less(t, x.attempts(long), 10)
			require.NoError(t, e.AddPermits(x.ctx, 1))
			require.NoError(t, <-done)
		})
	})
}

// A request that is older than all requests in the wait queue is served without joining it.
func TestOldestRequestIsServedOutsideWaitQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := newWireTest(t, s)
		harness.Do(t, s.Addr, "SET", key, "1")
		x.enqueue(x.now()+60_000, 10*time.Second)
		began := time.Now()
		require.NoError(t, semaphore.New(x.all, key).Acquire(x.ctx, 1))
		require.Less(t, time.Since(began), 500*time.Millisecond) // its next heartbeat would be at 1 s
	})
}

// An undo changes neither a deleted semaphore nor one of the same name created after it.
func TestUndoOfDeletedSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		keys := []string{key, "redlatch_sc_request:{" + key + "}:another",
			"redlatch_sc_waiting:{" + key + "}", "redlatch_sc_alive:{" + key + "}",
			"redlatch_sc_request:{" + key + "}:created", "{" + key + "}:timeout"}
		for n, kind := range []struct {
			acquire, undo []string
			asks, gives   string
		}{
			{[]string{"pool.lua", "acquire.lua"}, []string{"pool.lua", "undo.lua"}, "2 0", "2"},
			{
				[]string{"pool.lua", "permits.lua", "permit_acquire.lua"}, []string{"pool.lua", "permits.lua", "permit_undo.lua"},
				"2 0 forever 0123456789abcdef fedcba9876543210", "0123456789abcdef fedcba9876543210",
			},
		} {
			for _, then := range []string{"nothing", "deleted", "recreated", "replaced by Java"} {
				x := newWireTest(t, empty(t, s))
				harness.Do(t, s.Addr, "SET", key, "3")
				args := []string{itoa(n + 1), "1", itoa(x.now() + 300_000), "0", "RPUSH", "messages"}
				do := func(script []string, more ...string) []int64 {
					reply, err := lua(t, script...).Exec(x.ctx, x.conn, keys[:5+n], append(slices.Clone(args), more...)).AsIntSlice()
					require.NoError(t, err)
					return reply
				}
				require.Equal(t, int64(1), do(kind.acquire, append([]string{"", "100", "10000", "0", "1"}, strings.Fields(kind.asks)...)...)[0])
				require.Equal(t, "1", x.reply("GET", key))
				if then != "nothing" {
					harness.Do(t, s.Addr, "DEL", key, keys[5])
				}
				acquired := x.now()
				harness.Eventually(t, time.Second, "the clock has moved", func() bool { return x.now() > acquired })
				switch then {
				case "recreated":
					require.NoError(t, only(semaphore.New(x.all, key).TrySetPermits(x.ctx, 3)))
					harness.Do(t, s.Addr, "DEL", "messages")
				case "replaced by Java":
					harness.Do(t, s.Addr, "SET", key, "1") // the state before
					require.NoError(t, only(semaphore.NewPermitSemaphore(x.all, key).Delete(x.ctx)))
					harness.Do(t, s.Addr, "SET", key, "3")
				}
				undone := do(kind.undo, strings.Fields(kind.gives)...)
				switch then {
				case "deleted":
					require.Empty(t, x.keys(), kind.undo)
				case "recreated", "replaced by Java":
					require.Equal(t, []int64{0}, undone)
					require.Equal(t, "3", x.reply("GET", key))
				default:
					require.Equal(t, []int64{2}, undone)
					require.Equal(t, "3", x.reply("GET", key))
					require.Equal(t, "3", x.reply("LRANGE", "messages", "0", "-1"))
				}
				require.Equal(t, []int64{0}, do(kind.undo, strings.Fields(kind.gives)...), "again")
			}
		}
	})
}

func TestBadKeyDoesNotFailBatchRenewal(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := newWireTest(t, s)
		bad, good := "{"+key+"}:bad", "{"+key+"}:timeout"
		harness.Do(t, s.Addr, "SET", bad, "1")
		at := x.now()
		x.reply("ZADD", good, itoa(at+60_000), "long", itoa(at+10_000), "short", itoa(at), "expired")
		held, err := lua(t, "permit_renew.lua").Exec(x.ctx, x.conn, []string{bad, good, good, good, good},
			[]string{"30000", "short", "long", "short", "expired", "absent"}).AsIntSlice()
		require.NoError(t, err)
		require.Equal(t, []int64{0, 1, 1, 0, 0}, held)
		require.Equal(t, itoa(at+60_000), x.reply("ZSCORE", good, "long"))
		require.InDelta(t, at+30_000, x.number("ZSCORE", good, "short"), 1000)
		require.Equal(t, itoa(at), x.reply("ZSCORE", good, "expired"))
		require.EqualValues(t, 3, x.number("ZCARD", good))
	})
}
