package ratelimit_test

import (
	"context"
	"encoding/binary"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
)

func TestMain(m *testing.M) { harness.Main(m, workers) }

// key is the name of the limiter in most tests.
const key = "mails"

// long is an interval that does not end during a test.
const long = time.Hour

func setRate(t testing.TB, l *ratelimit.Limiter, n int, per time.Duration) {
	t.Helper()
	require.NoError(t, l.SetRate(t.Context(), ratelimit.Config{Rate: n, Per: per}))
}

func requireFree(t testing.TB, l *ratelimit.Limiter, want int) {
	t.Helper()
	free, err := l.Available(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, free)
}

// entries returns the entries of a sorted set as pairs of permits and the time in ms.
func entries(t testing.TB, s *testserver.Server, set string) (all [][2]int64) {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	scores, err := conn.Do(context.Background(), conn.B().Zrange().Key(set).Min("0").Max("-1").Withscores().Build()).AsZScores()
	require.NoError(t, err)
	for _, entry := range scores {
		require.Len(t, entry.Member, 21)
		require.EqualValues(t, 16, entry.Member[0])
		permits := binary.LittleEndian.Uint32([]byte(entry.Member[17:]))
		all = append(all, [2]int64{int64(permits), int64(entry.Score)})
	}
	return all
}

// numbers returns the number of free permits and the permits of all entries, of one moment.
const numbers = `local n = 0
for _, entry in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do n = n + struct.unpack('I', entry, #entry - 3) end
return {redis.call('GET', KEYS[1]) or '', n}`

// requireSound fails the test unless the number of free permits and the entries add up to the rate.
func requireSound(t testing.TB, s *testserver.Server, rate int) {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	reply, err := conn.Do(context.Background(), conn.B().Eval().Script(numbers).Numkeys(2).
		Key(wire.RateValue(key), wire.RatePermits(key)).Build()).ToArray()
	require.NoError(t, err)
	free, err := reply[0].ToString()
	require.NoError(t, err)
	sum, err := reply[1].AsInt64()
	require.NoError(t, err)
	if free == "" {
		require.Zero(t, sum)
		return
	}
	require.Equal(t, strconv.FormatInt(int64(rate)-sum, 10), free)
}

// The format is Redisson's.
func TestFormat(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.RateLimiter(key)
		set, err := l.TrySetRate(t.Context(), ratelimit.Config{Rate: 10, Per: time.Minute})
		require.NoError(t, err)
		require.True(t, set)
		keys, err := testserver.Query(s.Addr, "KEYS", "*")
		require.NoError(t, err)
		require.Equal(t, []string{key}, keys)
		fields, err := testserver.Query(s.Addr, "HGETALL", key)
		require.NoError(t, err)
		require.Equal(t, []string{"rate", "10", "interval", "60000", "keepAliveTime", "0", "type", "0"}, fields)

		before := time.Now().UnixMilli()
		require.NoError(t, l.TryAcquire(t.Context(), 3))
		require.NoError(t, l.Acquire(t.Context(), 300/100+1))
		require.Equal(t, "3", testValue(t, s, wire.RateValue(key)))
		got := entries(t, s, wire.RatePermits(key))
		require.Len(t, got, 2)
		require.ElementsMatch(t, []int64{3, 4}, []int64{got[0][0], got[1][0]})
		require.InDelta(t, before, got[0][1], 5000)
		for _, k := range []string{key, wire.RateValue(key), wire.RatePermits(key)} {
			require.EqualValues(t, -1, harness.PTTL(t, s.Addr, k), k)
		}

		require.NoError(t, l.SetRate(t.Context(), ratelimit.Config{Rate: 5, Per: time.Second, PerClient: true, KeepAlive: time.Minute}))
		require.NoError(t, l.TryAcquire(t.Context(), 2))
		keys, err = testserver.Query(s.Addr, "KEYS", "*")
		require.NoError(t, err)
		require.ElementsMatch(t, []string{key, "{mails}:value:" + c.ID(), "{mails}:permits:" + c.ID()}, keys)
		for _, k := range keys {
			require.InDelta(t, 60_000, harness.PTTL(t, s.Addr, k), 10_000, k)
		}
	})
}

func testValue(t testing.TB, s *testserver.Server, key string) string {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	value, err := conn.Do(context.Background(), conn.B().Get().Key(key).Build()).ToString()
	require.NoError(t, err)
	return value
}

func TestConfig(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).RateLimiter(key)
		for _, c := range []ratelimit.Config{
			{Rate: 1, Per: time.Millisecond},
			{Rate: ratelimit.MaxRate, Per: lock.MaxLease, PerClient: true, KeepAlive: lock.MaxLease},
			{Rate: 7, Per: time.Minute, KeepAlive: time.Minute},
		} {
			set, err := l.TrySetRate(t.Context(), c)
			require.NoError(t, err)
			require.True(t, set)
			got, err := l.Config(t.Context())
			require.NoError(t, err)
			require.Equal(t, c, got)

			set, err = l.TrySetRate(t.Context(), ratelimit.Config{Rate: 2, Per: time.Second})
			require.NoError(t, err)
			require.False(t, set)
			got, err = l.Config(t.Context())
			require.NoError(t, err)
			require.Equal(t, c, got)

			deleted, err := l.Delete(t.Context())
			require.NoError(t, err)
			require.True(t, deleted)
			deleted, err = l.Delete(t.Context())
			require.NoError(t, err)
			require.False(t, deleted)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// A limiter without a configuration has the same error everywhere, and nothing is written.
func TestNotFound(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.RateLimiter(key)
		_, available := l.Available(t.Context())
		_, config := l.Config(t.Context())
		_, release := l.Release(t.Context(), 1)
		_, take := l.Take(t.Context(), 1)
		for what, err := range map[string]error{
			"Available": available, "Config": config, "Release": release, "Take": take,
			"TryAcquire": l.TryAcquire(t.Context(), 1), "Acquire": l.Acquire(t.Context(), 1),
			"Do": l.Do(t.Context(), func(context.Context) error { return nil }),
		} {
			require.ErrorIs(t, err, ratelimit.ErrNotFound, what)
			require.NotErrorIs(t, err, lock.ErrNotAcquired, what)
			require.NotErrorIs(t, err, lock.ErrIndeterminate, what)
			var e *lock.Error
			require.ErrorAs(t, err, &e, what)
			require.Equal(t, key, e.Name)
			require.Equal(t, "rate-limiter", e.Kind)
		}
		harness.NothingLeft(t, s.Addr)

		free, err := c.RateLimiter(key, ratelimit.Rate(3, time.Second)).Available(t.Context())
		require.NoError(t, err)
		require.Equal(t, 3, free)
		harness.NothingLeft(t, s.Addr)
	})
}

// The option Rate creates the limiter, with an expiry.
func TestRateCreates(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.RateLimiter(key, ratelimit.Rate(3, time.Minute), ratelimit.PerClient())
		require.NoError(t, l.TryAcquire(t.Context(), 1))
		config, err := l.Config(t.Context())
		require.NoError(t, err)
		require.Equal(t, ratelimit.Config{Rate: 3, Per: time.Minute, PerClient: true, KeepAlive: 24 * time.Hour}, config)
		for _, k := range []string{key, wire.RateValueOf(key, c.ID()), wire.RatePermitsOf(key, c.ID())} {
			require.Positive(t, harness.PTTL(t, s.Addr, k), k)
		}

		// An existing one keeps its rate.
		other := c.RateLimiter(key, ratelimit.Rate(100, time.Minute))
		require.ErrorIs(t, other.TryAcquire(t.Context(), 3), lock.ErrNotAcquired)
		requireFree(t, other, 2)

		// The server loses its data.
		harness.Do(t, s.Addr, "FLUSHALL")
		require.NoError(t, l.Acquire(t.Context(), 3))
		requireFree(t, l, 0)
	})
}

func TestInvalid(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var none context.Context
		c := harness.Client(t, s)
		set := func(c ratelimit.Config) func(l *ratelimit.Limiter) error {
			return func(l *ratelimit.Limiter) error {
				_, err := l.TrySetRate(t.Context(), c)
				return errors.Join(err, l.SetRate(t.Context(), c))
			}
		}
		acquire := func(n int, opts ...lock.WaitOption) func(l *ratelimit.Limiter) error {
			return func(l *ratelimit.Limiter) error { return l.Acquire(t.Context(), n, opts...) }
		}
		option := func(opts ...ratelimit.Option) func(l *ratelimit.Limiter) error {
			return func(*ratelimit.Limiter) error { return c.RateLimiter(key, opts...).TryAcquire(t.Context(), 1) }
		}
		l := c.RateLimiter(key, ratelimit.Rate(5, time.Minute))
		require.NoError(t, l.TryAcquire(t.Context(), 1))
		requireFree(t, l, 4)
		for what, call := range map[string]func(l *ratelimit.Limiter) error{
			"rate 0":               set(ratelimit.Config{Per: time.Second}),
			"rate too high":        set(ratelimit.Config{Rate: ratelimit.MaxRate + 1, Per: time.Second}),
			"no interval":          set(ratelimit.Config{Rate: 1}),
			"interval too long":    set(ratelimit.Config{Rate: 1, Per: lock.MaxLease + 1}),
			"keep alive too short": set(ratelimit.Config{Rate: 1, Per: time.Second, KeepAlive: time.Second - 1}),
			"keep alive negative":  set(ratelimit.Config{Rate: 1, Per: time.Second, KeepAlive: -1}),
			"permits -1":           acquire(-1),
			"permits too many":     acquire(ratelimit.MaxRate + 1),
			"more than the rate":   acquire(6),
			"negative wait":        acquire(1, lock.Wait(-1)),
			"nil option of a call": acquire(1, nil),
			"try too many":         func(l *ratelimit.Limiter) error { return l.TryAcquire(t.Context(), 6) },
			"try a nil context":    func(l *ratelimit.Limiter) error { return l.TryAcquire(none, 1) },
			"no function":          func(l *ratelimit.Limiter) error { return l.Do(t.Context(), nil) },
			"release -1":           func(l *ratelimit.Limiter) error { _, err := l.Release(t.Context(), -1); return err },
			"nil option":           option(nil),
			"option rate 0":        option(ratelimit.Rate(0, time.Second)),
			"option keep alive":    option(ratelimit.Rate(1, time.Second), ratelimit.KeepAlive(time.Millisecond)),
			"only keep alive":      option(ratelimit.KeepAlive(time.Second)),
			"only per client":      option(ratelimit.PerClient()),
			"no name":              func(*ratelimit.Limiter) error { return c.RateLimiter("").TryAcquire(t.Context(), 1) },
		} {
			err := call(l)
			require.ErrorIs(t, err, lock.ErrInvalid, what)
			require.NotErrorIs(t, err, lock.ErrNotAcquired, what)
		}
		requireFree(t, l, 4)
		requireSound(t, s, 5)
		require.NoError(t, l.Acquire(t.Context(), 0))
		require.NoError(t, l.TryAcquire(t.Context(), 0))
		requireFree(t, l, 4)
	})
}

// Keys of other types are errors, and stay as they are.
func TestWrongType(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.RateLimiter(key, ratelimit.Rate(5, time.Minute))
		calls := map[string]func() error{
			"TryAcquire": func() error { return l.TryAcquire(t.Context(), 1) },
			"Acquire":    func() error { return l.Acquire(t.Context(), 1) },
			"Available":  func() error { _, err := l.Available(t.Context()); return err },
			"Release":    func() error { _, err := l.Release(t.Context(), 1); return err },
		}
		for what, words := range map[string][]string{
			"configuration":     {"SET", key, "1"},
			"rate":              {"HSET", key, "rate", "many"},
			"value":             {"RPUSH", wire.RateValue(key), "1"},
			"no number":         {"SET", wire.RateValue(key), "many"},
			"permits":           {"SET", wire.RatePermits(key), "1"},
			"permits, used":     {"SET", wire.RatePermits(key), "1"},
			"turn of no client": {"RPUSH", wire.RateTurn(key), "1"},
		} {
			harness.Do(t, s.Addr, "FLUSHALL")
			if what != "configuration" {
				_, err := l.TrySetRate(t.Context(), ratelimit.Config{Rate: 5, Per: time.Minute})
				require.NoError(t, err)
			}
			if what == "permits, used" {
				harness.Do(t, s.Addr, "SET", wire.RateValue(key), "4")
			}
			harness.Do(t, s.Addr, words...)
			before := harness.Do(t, s.Addr, "DUMP", words[1])
			for name, call := range calls {
				if what == "turn of no client" && name != "TryAcquire" && name != "Acquire" {
					continue
				}
				err := call()
				require.Error(t, err, "%s %s", what, name)
				for _, kind := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate, lock.ErrInvalid} {
					require.NotErrorIs(t, err, kind, "%s %s", what, name)
				}
			}
			if what == "configuration" {
				require.Error(t, second(l.Delete(t.Context())))
				require.Error(t, second(l.TrySetRate(t.Context(), ratelimit.Config{Rate: 1, Per: time.Second})))
				require.Error(t, l.SetRate(t.Context(), ratelimit.Config{Rate: 1, Per: time.Second}))
				require.Error(t, second(l.Config(t.Context())))
			}
			require.Equal(t, before, harness.Do(t, s.Addr, "DUMP", words[1]), what)
			if what == "permits, used" {
				require.Equal(t, "4", testValue(t, s, wire.RateValue(key)))
			}
		}
	})
}

func second[T any](_ T, err error) error { return err }

func TestScriptFlush(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).RateLimiter(key, ratelimit.Rate(5, time.Minute))
		for range 2 {
			require.NoError(t, l.TryAcquire(t.Context(), 1))
			harness.Do(t, s.Addr, "SCRIPT", "FLUSH")
		}
		requireFree(t, l, 3)
	})
}

// Take says what is left, and when to come again.
func TestTake(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).RateLimiter(key, ratelimit.Rate(5, time.Minute))
		r, err := l.Take(t.Context(), 3)
		require.NoError(t, err)
		require.Equal(t, ratelimit.Result{Taken: true, Rate: 5, Per: time.Minute, Free: 2}, r)
		r, err = l.Take(t.Context(), 3)
		require.NoError(t, err)
		require.InDelta(t, time.Minute, r.RetryAfter, float64(10*time.Second))
		r.RetryAfter = 0
		require.Equal(t, ratelimit.Result{Rate: 5, Per: time.Minute, Free: 2}, r)

		_, err = l.Take(t.Context(), 6)
		require.ErrorIs(t, err, lock.ErrInvalid)
		r, err = l.Take(t.Context(), 0)
		require.NoError(t, err)
		require.Zero(t, r)
	})
}

// Permits come back an interval after they were acquired, and Acquire waits for that, no longer.
func TestSlidingWindow(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		const per, slack = 400 * time.Millisecond, 3 * time.Millisecond
		l := s.Client(t).RateLimiter(key, ratelimit.Rate(3, per))
		began := time.Now()
		at := func(want time.Duration) {
			t.Helper()
			require.InDelta(t, want+slack/2, time.Since(began), float64(slack/2+time.Millisecond))
		}
		require.NoError(t, l.TryAcquire(t.Context(), 2))
		time.Sleep(per / 2)
		require.NoError(t, l.TryAcquire(t.Context(), 1))
		harness.NotAcquired(t, l.TryAcquire(t.Context(), 1))
		require.NoError(t, l.Acquire(t.Context(), 2))
		at(per)
		require.NoError(t, l.Acquire(t.Context(), 1))
		at(per * 3 / 2)
		harness.NotAcquired(t, l.Acquire(t.Context(), 1, lock.Wait(per/4)))
		require.NoError(t, l.Acquire(t.Context(), 1, lock.Wait(per)))
		at(per * 2)
	})
}

// SetRate keeps what was acquired.
func TestSetRate(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.RateLimiter(key)
		setRate(t, l, 10, long)
		require.NoError(t, l.TryAcquire(t.Context(), 6))
		setRate(t, l, 4, long)
		requireFree(t, l, 0)
		requireSound(t, s, 4)
		harness.NotAcquired(t, l.TryAcquire(t.Context(), 1))

		// A waiter learns of a higher rate at once, also from another client.
		waits := harness.Start(t, t.Context(), func(ctx context.Context) (any, error) { return nil, l.Acquire(ctx, 3) })
		harness.Waits(t, 1, c)
		setRate(t, harness.Client(t, s).RateLimiter(key), 9, long)
		require.NoError(t, waits.EndWithin(3*time.Second))
		requireFree(t, l, 0)

		// A shorter interval frees what is older.
		time.Sleep(2 * time.Millisecond)
		setRate(t, l, 9, time.Millisecond)
		requireFree(t, l, 9)
		require.EqualValues(t, -1, harness.PTTL(t, s.Addr, key))

		// An expiry comes and goes with the configuration.
		require.NoError(t, l.SetRate(t.Context(), ratelimit.Config{Rate: 9, Per: time.Minute, KeepAlive: time.Hour}))
		require.NoError(t, l.TryAcquire(t.Context(), 9))
		require.Positive(t, harness.PTTL(t, s.Addr, wire.RatePermits(key)))
		setRate(t, l, 9, time.Minute)
		for _, k := range []string{key, wire.RateValue(key), wire.RatePermits(key)} {
			require.EqualValues(t, -1, harness.PTTL(t, s.Addr, k), k)
		}
		requireFree(t, l, 0)

		// Another type begins anew.
		require.NoError(t, l.SetRate(t.Context(), ratelimit.Config{Rate: 9, Per: time.Minute, PerClient: true}))
		requireFree(t, l, 9)
	})
}

// Released permits can be acquired again, and do not come back twice.
func TestRelease(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.RateLimiter(key)
		release := func(n, want int) {
			t.Helper()
			released, err := l.Release(t.Context(), n)
			require.NoError(t, err)
			require.Equal(t, want, released)
			requireSound(t, s, 10)
		}
		setRate(t, l, 10, long)
		release(3, 0)
		require.NoError(t, l.TryAcquire(t.Context(), 6))
		time.Sleep(2 * time.Millisecond)
		require.NoError(t, l.TryAcquire(t.Context(), 2))
		release(1, 1)
		requireFree(t, l, 3)

		// The oldest entry has lost the permit.
		got := entries(t, s, wire.RatePermits(key))
		require.Equal(t, []int64{5, 2}, []int64{got[0][0], got[1][0]})
		require.Less(t, got[0][1], got[1][1])

		waits := harness.Start(t, t.Context(), func(ctx context.Context) (any, error) { return nil, l.Acquire(ctx, 9) })
		harness.Waits(t, 1, c)
		release(6, 6)
		require.NoError(t, waits.EndWithin(3*time.Second))
		requireFree(t, l, 0)
		release(100, 10)
		requireFree(t, l, 10)
		released, err := l.Release(t.Context(), 0)
		require.NoError(t, err)
		require.Zero(t, released)
	})
}

func TestPerClient(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		option := []ratelimit.Option{ratelimit.Rate(2, long), ratelimit.PerClient()}
		a, b := harness.Client(t, s).RateLimiter(key, option...), harness.Client(t, s).RateLimiter(key, option...)
		require.NoError(t, a.TryAcquire(t.Context(), 2))
		harness.NotAcquired(t, a.TryAcquire(t.Context(), 1))
		requireFree(t, b, 2)
		require.NoError(t, b.TryAcquire(t.Context(), 2))
		harness.NotAcquired(t, b.TryAcquire(t.Context(), 1))

		deleted, err := a.Delete(t.Context())
		require.NoError(t, err)
		require.True(t, deleted)
		require.NoError(t, a.TryAcquire(t.Context(), 2))
		harness.NotAcquired(t, b.TryAcquire(t.Context(), 1))
	})
}

// Another client follows a new rate at once, although nobody else knows what it has acquired.
func TestSetRatePerClient(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		const per = time.Second
		l, other := s.Client(t).RateLimiter(key), s.Client(t).RateLimiter(key)
		for _, rate := range []int{15, 5, 25, 1} {
			require.NoError(t, l.SetRate(t.Context(), ratelimit.Config{Rate: rate, Per: per, PerClient: true}))
			// Permits of the rate before are in its first window.
			for window := range 3 {
				n := 0
				for began := time.Now(); time.Since(began) < per; time.Sleep(per / 50) {
					if other.TryAcquire(t.Context(), 1) == nil {
						n++
					}
				}
				require.LessOrEqual(t, n, rate)
				if window > 0 {
					require.GreaterOrEqual(t, n, rate-1, "the rate %d in window %d", rate, window)
				}
			}
		}
	})
}

// Permits are missing, or too many, because a key was lost or others have written it.
func TestRepair(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).RateLimiter(key)
		begin := func() {
			t.Helper()
			harness.Do(t, s.Addr, "FLUSHALL")
			setRate(t, l, 5, long)
			require.NoError(t, l.TryAcquire(t.Context(), 3))
		}
		for what, words := range map[string][]string{
			"no value":      {"DEL", wire.RateValue(key)},
			"too high":      {"SET", wire.RateValue(key), "6"},
			"too low":       {"SET", wire.RateValue(key), "-1"},
			"far too low":   {"SET", wire.RateValue(key), "-100"},
			"nothing wrong": {"PING"},
		} {
			begin()
			harness.Do(t, s.Addr, words...)
			harness.NotAcquired(t, l.TryAcquire(t.Context(), 3))
			require.NoError(t, l.TryAcquire(t.Context(), 2), what)
			harness.NotAcquired(t, l.TryAcquire(t.Context(), 1))
			requireSound(t, s, 5)
		}

		begin()
		harness.Do(t, s.Addr, "DEL", wire.RatePermits(key))
		require.NoError(t, l.TryAcquire(t.Context(), 5))
		requireSound(t, s, 5)
	})
}

// An entry of the future blocks its permits for an interval from now, not until the clock has caught up.
func TestClockAhead(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).RateLimiter(key)
		setRate(t, l, 2, 200*time.Millisecond)
		harness.Do(t, s.Addr, "SET", wire.RateValue(key), "0")
		ahead := strconv.FormatInt(time.Now().Add(time.Hour).UnixMilli(), 10)
		harness.Do(t, s.Addr, "ZADD", wire.RatePermits(key), ahead, ratelimit.NewEntry(2))
		began := time.Now()
		require.NoError(t, l.Acquire(t.Context(), 2))
		require.GreaterOrEqual(t, time.Since(began), 199*time.Millisecond)
		require.Less(t, time.Since(began), 5*time.Second)
	})
}

// Many expired entries cost a request only as much as it needs.
func TestManyExpired(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const rate = 1000
		l := harness.Client(t, s).RateLimiter(key)
		setRate(t, l, rate, time.Minute)
		conn := harness.Conn(t, s.Addr)
		add := conn.B().Zadd().Key(wire.RatePermits(key)).ScoreMember()
		old := time.Now().Add(-2 * time.Minute).UnixMilli()
		for i := range rate {
			add = add.ScoreMember(float64(old+int64(i)), ratelimit.NewEntry(1))
		}
		require.NoError(t, conn.Do(t.Context(), add.Build()).Error())
		harness.Do(t, s.Addr, "SET", wire.RateValue(key), "0")

		requireFree(t, l, rate)
		require.NoError(t, l.TryAcquire(t.Context(), 1))
		requireSound(t, s, rate)
		require.Greater(t, len(entries(t, s, wire.RatePermits(key))), rate/2)
		require.NoError(t, l.TryAcquire(t.Context(), rate-1))
		harness.NotAcquired(t, l.TryAcquire(t.Context(), 1))
		requireSound(t, s, rate)
	})
}

func TestDo(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).RateLimiter(key, ratelimit.Rate(1, long))
		mine := errors.New("mine")
		require.ErrorIs(t, l.Do(t.Context(), func(context.Context) error { return mine }), mine)
		err := l.Do(t.Context(), func(context.Context) error { panic("not called") }, lock.Wait(time.Second))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
	})
}

func TestCluster(t *testing.T) {
	for _, program := range harness.Programs(t) {
		c := harness.Cluster(t, program)
		client := harness.ClientAt(t, c.Addrs())
		for _, name := range []string{"a", "{b}", "c:{d}:e"} {
			l := client.RateLimiter(name, ratelimit.Rate(2, 200*time.Millisecond))
			require.NoError(t, l.TryAcquire(t.Context(), 2))
			require.NoError(t, l.Acquire(t.Context(), 1))
			_, err := l.Release(t.Context(), 1)
			require.NoError(t, err)
			require.NoError(t, l.SetRate(t.Context(), ratelimit.Config{Rate: 3, Per: time.Second}))
			_, err = l.Delete(t.Context())
			require.NoError(t, err)
		}
		require.ErrorIs(t, client.RateLimiter("a}b{").TryAcquire(t.Context(), 1), lock.ErrInvalid)
	}
}

func TestClosed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, err := redlatch.Open(t.Context(), s.URL())
		require.NoError(t, err)
		l := c.RateLimiter(key, ratelimit.Rate(1, long))
		require.NoError(t, l.TryAcquire(t.Context(), 1))
		waits := harness.Start(t, t.Context(), func(ctx context.Context) (any, error) { return nil, l.Acquire(ctx, 1) })
		harness.Waits(t, 1, c)
		c.Close()
		require.ErrorIs(t, waits.End(), lock.ErrClosed)
		require.ErrorIs(t, l.TryAcquire(t.Context(), 1), lock.ErrClosed)
		require.ErrorIs(t, l.SetRate(t.Context(), ratelimit.Config{Rate: 1, Per: time.Second}), lock.ErrClosed)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", wire.RateTurn(key)))
	})
}
