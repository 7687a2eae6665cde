package semaphore_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

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

// wireTest is semaphores on a server. What they publish is appended to a list of the
// channel's name instead of told to subscribers, so that every message can be seen.
type wireTest struct {
	t    *testing.T
	ctx  context.Context
	addr string
	conn rueidis.Client
	sess *session.Session
}

func newWireTest(t *testing.T, s *testserver.Server) *wireTest {
	x := &wireTest{t: t, ctx: t.Context(), addr: s.Addr, conn: harness.Conn(t, s.Addr)}
	x.sess = session.New(session.Config{
		Client: x.conn, ID: clientID, WatchdogTimeout: 30 * time.Second, HandOffs: 16,
		MapName: func(name string) string { return name }, Logger: slog.New(slog.DiscardHandler),
	})
	t.Cleanup(x.sess.Close)
	x.sess.Publish = "RPUSH"
	return x
}

// reply returns what a command says, flat and as text.
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

// now is the server's time in ms.
func (x *wireTest) now() int64 {
	x.t.Helper()
	seconds, micros, _ := strings.Cut(x.reply("TIME"), " ")
	s, err := strconv.ParseInt(seconds, 10, 64)
	require.NoError(x.t, err)
	us, err := strconv.ParseInt(micros, 10, 64)
	require.NoError(x.t, err)
	return 1000*s + us/1000
}

// keys are all that there are but tickets, and their types.
func (x *wireTest) keys() map[string]string {
	x.t.Helper()
	all, err := x.conn.Do(x.ctx, x.conn.B().Keys().Pattern("*").Build()).AsStrSlice()
	require.NoError(x.t, err)
	types := map[string]string{}
	for _, k := range all {
		if !strings.HasPrefix(k, "redlatch_sc_request:") {
			types[k] = x.reply("TYPE", k)
		}
	}
	return types
}

// fact is what an operation does to the number of free permits, and what it tells.
type fact struct {
	what string
	do   func() error
	free string // nil: the key is not there
	told string // the payloads of all messages
}

func (x *wireTest) play(name, channel string, facts []fact) {
	x.t.Helper()
	for _, f := range facts {
		require.NoError(x.t, f.do(), f.what)
		require.Equal(x.t, f.free, x.reply("GET", name), f.what)
		require.Equal(x.t, f.told, x.reply("LRANGE", channel, "0", "-1"), f.what)
		harness.Do(x.t, x.addr, "DEL", channel)
	}
}

func empty(t *testing.T, s *testserver.Server) *testserver.Server {
	harness.Do(t, s.Addr, "FLUSHALL")
	return s
}

func only(_ any, err error) error { return err }

// lua returns the script of some files, one after the other.
func lua(t *testing.T, files ...string) *wire.Script {
	t.Helper()
	var all strings.Builder
	for _, file := range files {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		all.Write(source)
	}
	return wire.NewScript(all.String())
}

func eachName(t *testing.T, test func(x *wireTest, name, channel, timeouts string)) {
	for _, n := range [][3]string{
		{"orders", "redisson_sc:{orders}", "{orders}:timeout"},
		{"{app}:orders", "redisson_sc:{app}:orders", "{app}:orders:timeout"},
	} {
		t.Run(n[0], func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) { test(newWireTest(t, s), n[0], n[1], n[2]) })
		})
	}
}

func TestWhatASemaphoreIsOnTheWire(t *testing.T) {
	eachName(t, func(x *wireTest, name, channel, _ string) {
		ctx, s := x.ctx, semaphore.New(x.sess, name)
		x.play(name, channel, []fact{
			{"release if exists, and it does not", func() error { return only(s.ReleaseIfExists(ctx, 3)) }, "nil", ""},
			{"drain nothing", func() error { return only(s.Drain(ctx)) }, "nil", ""},
			{"set", func() error { return only(s.TrySetPermits(ctx, 10)) }, "10", "10"},
			{"set again", func() error { return only(s.TrySetPermits(ctx, 20)) }, "10", ""},
			{"acquire", func() error { return s.Acquire(ctx, 4) }, "6", ""},
			{"release", func() error { return s.Release(ctx, 1) }, "7", "7"},
			{"release some", func() error { return s.Release(ctx, 2) }, "9", "9"},
			{"release if exists", func() error { return only(s.ReleaseIfExists(ctx, 1)) }, "10", "10"},
			{"add", func() error { return s.AddPermits(ctx, 5) }, "15", "15"},
			{"take away", func() error { return s.AddPermits(ctx, -5) }, "10", "10"},
			{"take away all and more", func() error { return s.AddPermits(ctx, -15) }, "-5", ""},
			{"release and have none still", func() error { return s.Release(ctx, 2) }, "-3", ""},
			{"release and have none just so", func() error { return s.Release(ctx, 3) }, "0", ""},
			{"take away of none", func() error { return s.AddPermits(ctx, -3) }, "-3", ""},
			{"drain less than none", func() error { return only(s.Drain(ctx)) }, "0", ""},
			{"drain none", func() error { return only(s.Drain(ctx)) }, "0", ""},
			{"release to none", func() error { return s.Release(ctx, 7) }, "7", "7"},
			{"drain", func() error { return only(s.Drain(ctx)) }, "0", ""},
			{"fill up", func() error { return s.Release(ctx, semaphore.MaxPermits) }, "2147483647", "2147483647"},
			{"take all", func() error { return s.Acquire(ctx, semaphore.MaxPermits) }, "0", ""},
		})
		require.Equal(x.t, map[string]string{name: "string"}, x.keys())
		require.EqualValues(x.t, -1, x.number("PTTL", name))
		harness.Do(x.t, x.addr, "DEL", name)
		x.play(name, channel, []fact{
			{"release what is not there", func() error { return s.Release(ctx, 2) }, "2", "2"},
			{"delete", func() error { harness.Do(x.t, x.addr, "DEL", name); return nil }, "nil", ""},
			{"add to what is not there", func() error { return s.AddPermits(ctx, -2) }, "-2", ""},
		})
	})
}

// taken are the permits that are taken and when they expire, as the server has them.
func (x *wireTest) taken(timeouts string) map[string]string {
	x.t.Helper()
	all, err := x.conn.Do(x.ctx, x.conn.B().Zrange().Key(timeouts).Min("0").Max("-1").Withscores().Build()).AsZScores()
	require.NoError(x.t, err)
	scores := map[string]string{}
	for _, z := range all {
		require.Len(x.t, z.Member, 16)
		scores[hex.EncodeToString([]byte(z.Member))] = x.reply("ZSCORE", timeouts, z.Member)
	}
	return scores
}

func TestWhatAnExpirableSemaphoreIsOnTheWire(t *testing.T) {
	eachName(t, func(x *wireTest, name, channel, timeouts string) {
		ctx, e := x.ctx, semaphore.NewExpirable(x.sess, name)
		var ids []string
		take := func(n int, opts ...lock.Option) func() error {
			return func() error {
				permits, err := e.AcquireN(ctx, n, opts...)
				for _, p := range permits {
					ids = append(ids, p.ID())
				}
				return err
			}
		}
		give := func(n int) func() error {
			return func() error {
				err := e.Release(ctx, ids[:n]...)
				ids = ids[n:]
				return err
			}
		}
		x.play(name, channel, []fact{
			{"set", func() error { return only(e.TrySetPermits(ctx, 10)) }, "10", "10"},
			{"set again", func() error { return only(e.TrySetPermits(ctx, 11)) }, "10", ""},
			{"acquire", take(1, lock.Lease(time.Minute)), "9", ""},
			{"acquire some", take(3, lock.Lease(time.Minute)), "6", ""},
			{"release", give(1), "7", "7"},
			{"release a list", give(2), "9", "2"},
			{"release the last", give(1), "10", "10"},
			{"add", func() error { return e.AddPermits(ctx, 5) }, "15", "5"},
			{"take away", func() error { return e.AddPermits(ctx, -5) }, "10", ""},
			{"acquire to change the total", take(4, lock.Lease(time.Minute)), "6", ""},
			{"set the total", func() error { return e.SetPermits(ctx, 20) }, "16", "20"},
			{"set the same total", func() error { return e.SetPermits(ctx, 20) }, "16", ""},
			{"set a smaller total", func() error { return e.SetPermits(ctx, 5) }, "1", "5"},
			{"set a total that is taken", func() error { return e.SetPermits(ctx, 2) }, "-2", ""},
			{"add to less than none", func() error { return e.AddPermits(ctx, 2) }, "0", ""},
			{"take away of none", func() error { return e.AddPermits(ctx, -3) }, "-3", ""},
			{"release and have none still", give(3), "0", ""},
			{"release a last one", give(1), "1", "1"},
		})
		require.Equal(x.t, map[string]string{name: "string"}, x.keys())

		// Leases are by the clock of the server.
		before := x.now()
		a, err := e.Acquire(ctx, lock.Lease(20*time.Second))
		require.NoError(x.t, err)
		after := x.now()
		require.Equal(x.t, map[string]string{name: "string", timeouts: "zset"}, x.keys())
		require.EqualValues(x.t, -1, x.number("PTTL", timeouts))
		taken := x.taken(timeouts)
		at, err := strconv.ParseInt(taken[a.ID()], 10, 64)
		require.NoError(x.t, err, taken)
		require.True(x.t, before+20_000 <= at && at <= after+20_000, "%d is not 20 s after %d to %d", at, before, after)
		require.NoError(x.t, e.AddPermits(ctx, 2))
		b, err := e.Acquire(ctx, semaphore.Forever)
		require.NoError(x.t, err)
		c, err := e.Acquire(ctx)
		require.NoError(x.t, err)
		taken = x.taken(timeouts)
		require.ElementsMatch(x.t, []string{a.ID(), b.ID(), c.ID()}, slices.Collect(maps.Keys(taken)))
		require.Equal(x.t, "922337203685477", taken[b.ID()])
		left, err := e.LeaseTime(ctx, c.ID())
		require.NoError(x.t, err)
		require.True(x.t, left > 20*time.Second && left <= 30*time.Second, "%v", left)

		// Read as Redisson reads it.
		id, err := hex.DecodeString(a.ID())
		require.NoError(x.t, err)
		require.Equal(x.t, taken[a.ID()], x.reply("ZSCORE", timeouts, string(id)))
		for _, p := range []*semaphore.Permit{a, b, c} {
			require.NoError(x.t, p.Release(ctx))
		}
		harness.Do(x.t, x.addr, "DEL", channel)
		require.Equal(x.t, map[string]string{name: "string"}, x.keys())
	})
}

func TestPermitsThatAreTakenGoWithTheSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := newWireTest(t, s)
		timeouts := "{" + key + "}:timeout"
		e := semaphore.NewExpirable(x.sess, key)
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
			require.InDelta(t, of, at, 1000, "the time of the semaphore is %d ms, of the permits %d", of, at)
		}
		bound()

		// Also those that are taken by a release.
		harness.Do(t, s.Addr, "PERSIST", timeouts)
		waited := make(chan error)
		go func() { _, err := e.AcquireN(x.ctx, 4, lock.Lease(time.Minute)); waited <- err }()
		harness.Eventually(t, 5*time.Second, "it waits", func() bool { return x.keys()["redlatch_sc_waiting:{"+key+"}"] != "" })
		require.NoError(t, e.Release(x.ctx, first.ID()))
		require.NoError(t, <-waited)
		bound()
	})
}

func TestTicketsAndTheLineAreOursAndGo(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := newWireTest(t, s)
		line, alive, channel := "redlatch_sc_waiting:{"+key+"}", "redlatch_sc_alive:{"+key+"}", "redisson_sc:{"+key+"}"
		sem := semaphore.New(x.sess, key)
		require.NoError(t, only(sem.TrySetPermits(x.ctx, 3)))
		require.NoError(t, sem.Acquire(x.ctx, 2))
		harness.Do(t, s.Addr, "DEL", channel)
		ticket := "redlatch_sc_request:{" + key + "}:" + clientID + ":1"
		require.Equal(t, "2 1 -1 0", x.reply("GET", ticket))
		ttl := x.number("PTTL", ticket)
		require.True(t, 50_000 < ttl && ttl <= 60_000, "the ticket has %d ms", ttl)

		ctx, leave := context.WithCancel(x.ctx)
		waited := make(chan error)
		began := x.now()
		go func() { waited <- sem.Acquire(ctx, 2) }()
		harness.Eventually(t, 5*time.Second, "it stands in line", func() bool { return x.keys()[line] != "" })
		placed := x.now()
		require.Equal(t, map[string]string{key: "string", line: "zset", alive: "zset"}, x.keys())
		since, until := x.number("ZSCORE", line, clientID), x.number("ZSCORE", alive, clientID)
		require.True(t, began-1 <= since && since <= placed-99, "%d is not since %d to %d", since, began, placed-100)
		require.True(t, since+3_100 <= until && until <= placed+3_000, "%d is not 3 s after %d", until, placed)
		for _, k := range []string{line, alive} {
			ttl := x.number("PTTL", k)
			require.True(t, 500 < ttl && ttl <= 3_000, "%s has %d ms", k, ttl)
		}
		leave()
		require.ErrorIs(t, <-waited, context.Canceled)
		harness.Eventually(t, 5*time.Second, "it has left", func() bool { return x.keys()[line] == "" })
		require.Equal(t, map[string]string{key: "string", channel: "list"}, x.keys())
		require.Equal(t, "1", x.reply("LRANGE", channel, "0", "-1"))
	})
}

// expired puts permits on the server that have expired, in its own order.
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
		e := semaphore.NewExpirable(x.sess, key)
		n, err := e.Available(x.ctx)
		require.NoError(t, err)
		require.Equal(t, many, n)

		// One script takes back a part of them, and says how many others can have.
		p, err := e.TryAcquire(x.ctx)
		require.NoError(t, err)
		require.EqualValues(t, many-1000+1, x.number("ZCARD", timeouts))
		require.Equal(t, "999", x.reply("GET", key))
		require.Equal(t, "999", x.reply("LRANGE", channel, "0", "-1"))
		require.NoError(t, p.Release(x.ctx))

		// It takes back as many as are wanted, and one attempt has all of them.
		permits, err := e.TryAcquireN(x.ctx, many, semaphore.Forever)
		require.NoError(t, err)
		require.Equal(t, "0", x.reply("GET", key))
		require.EqualValues(t, many, x.number("ZCARD", timeouts))
		ids := make([]string, many)
		for i, p := range permits {
			ids[i] = p.ID()
		}
		require.NoError(t, e.Release(x.ctx, ids...))
		require.Equal(t, itoa(many), x.reply("GET", key))
	})
}

// attempts counts the scripts that run meanwhile.
func (x *wireTest) attempts(d time.Duration) int {
	x.t.Helper()
	harness.Do(x.t, x.addr, "CONFIG", "RESETSTAT")
	time.Sleep(d)
	calls := harness.Commands(x.t, x.conn)
	return calls["evalsha"] + calls["eval"]
}

// waits has somebody wait for a permit, and returns how to learn of the end.
func (x *wireTest) waits(e *semaphore.Expirable) <-chan error {
	done := make(chan error, 1)
	go func() { done <- only(e.Acquire(x.ctx, lock.Lease(time.Minute))) }()
	return done
}

// stands puts another client in the line, for some time.
func (x *wireTest) stands(since int64, life time.Duration) {
	x.t.Helper()
	line, alive := "redlatch_sc_waiting:{"+key+"}", "redlatch_sc_alive:{"+key+"}"
	until := itoa(x.now() + life.Milliseconds())
	for _, words := range [][]string{
		{"ZADD", line, itoa(since), "another"}, {"ZADD", alive, until, "another"},
		{"PEXPIREAT", line, until}, {"PEXPIREAT", alive, until},
	} {
		x.reply(words...)
	}
}

func TestNobodyLooksForExpiredPermitsAgainAndAgain(t *testing.T) {
	const long = 500 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Run("behind somebody in line", func(t *testing.T) {
			x := newWireTest(t, empty(t, s))
			harness.Do(t, s.Addr, "SET", key, "1")
			x.expired(1)
			x.stands(1, 2*time.Second)
			done := x.waits(semaphore.NewExpirable(x.sess, key))
			require.Less(t, x.attempts(long), 10)
			require.Equal(t, "2", x.reply("GET", key), "what has expired is free")
			require.NoError(t, <-done)
		})
		t.Run("of a semaphore that is gone", func(t *testing.T) {
			x := newWireTest(t, empty(t, s))
			x.expired(1)
			x.sess.Publish = "PUBLISH"
			e := semaphore.NewExpirable(x.sess, key)
			done := x.waits(e)
			require.Less(t, x.attempts(long), 10)
			require.NoError(t, e.AddPermits(x.ctx, 1))
			require.NoError(t, <-done)
		})
	})
}

// Only older requests count: one that is older than all in the line is served although it
// is not in it.
func TestTheEldestIsServedThoughItIsNotInTheLine(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := newWireTest(t, s)
		harness.Do(t, s.Addr, "SET", key, "1")
		x.stands(x.now()+60_000, 10*time.Second)
		began := time.Now()
		require.NoError(t, semaphore.New(x.sess, key).Acquire(x.ctx, 1))
		require.Less(t, time.Since(began), 500*time.Millisecond) // its next sign of life is due at 1 s
	})
}

func TestWhatIsCalledOffDoesNotBringASemaphoreBack(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		keys := []string{key, "redlatch_sc_request:{" + key + "}:" + clientID + ":1",
			"redlatch_sc_waiting:{" + key + "}", "redlatch_sc_alive:{" + key + "}", "{" + key + "}:timeout"}
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
			for _, deleted := range []string{"nothing", key} {
				x := newWireTest(t, empty(t, s))
				harness.Do(t, s.Addr, "SET", key, "3")
				args := []string{itoa(n + 1), "60000", "RPUSH", "told"}
				do := func(script []string, more ...string) []int64 {
					reply, err := lua(t, script...).Exec(x.ctx, x.conn, keys, append(slices.Clone(args), more...)).AsIntSlice()
					require.NoError(t, err)
					return reply
				}
				require.Equal(t, int64(1), do(kind.acquire, append([]string{"", "100", "10000", "1"}, strings.Fields(kind.asks)...)...)[0])
				require.Equal(t, "1", x.reply("GET", key))
				harness.Do(t, s.Addr, "DEL", deleted)
				undone := do(kind.undo, strings.Fields(kind.gives)...)
				if deleted == key {
					require.Empty(t, x.keys(), kind.undo)
				} else {
					require.Equal(t, []int64{2}, undone)
					require.Equal(t, "3", x.reply("GET", key))
					require.Equal(t, "3", x.reply("LRANGE", "told", "0", "-1"))
				}
				require.Equal(t, []int64{0}, do(kind.undo, strings.Fields(kind.gives)...), "again")
			}
		}
	})
}

func TestABadKeyDoesNotFailTheRenewalOfOthers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		x := newWireTest(t, s)
		bad, good := "{"+key+"}:bad", "{"+key+"}:timeout"
		harness.Do(t, s.Addr, "SET", bad, "1")
		at := x.now()
		x.reply("ZADD", good, itoa(at+60_000), "long", itoa(at+10_000), "short", itoa(at), "expired")
		held, err := lua(t, "permit_renew.lua").Exec(x.ctx, x.conn, []string{bad, good, good, good, good},
			[]string{"30000", "short", "0", "long", "0", "short", "0", "expired", "0", "absent", "0"}).AsIntSlice()
		require.NoError(t, err)
		require.Equal(t, []int64{0, 1, 1, 0, 0}, held)
		require.Equal(t, itoa(at+60_000), x.reply("ZSCORE", good, "long"))
		require.InDelta(t, at+30_000, x.number("ZSCORE", good, "short"), 1000)
		require.Equal(t, itoa(at), x.reply("ZSCORE", good, "expired"))
		require.EqualValues(t, 3, x.number("ZCARD", good))
	})
}
