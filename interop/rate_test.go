package interop

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
)

// limiter is a rate limiter as one side sees it.
type limiter struct {
	id     string // of the client
	set    func(c ratelimit.Config) bool
	config func() ratelimit.Config // without KeepAlive, which Redisson does not tell
	free   func() int
	try    func(permits int) bool
	// take starts to acquire permits, as in view.
	take   func(permits int, wait time.Duration) *entry
	delete func() bool
}

func limiterOf(t testing.TB, s side, name string) limiter {
	t.Helper()
	if java, is := s.(javaSide); is {
		return javaLimiter(t, java, name)
	}
	ctx, l := context.Background(), s.(goSide).c.RateLimiter(name)
	return limiter{
		id: s.id(),
		set: func(c ratelimit.Config) bool {
			set, err := l.TrySetRate(ctx, c)
			require.NoError(t, err)
			return set
		},
		config: func() ratelimit.Config {
			c, err := l.Config(ctx)
			require.NoError(t, err)
			c.KeepAlive = 0
			return c
		},
		free: func() int {
			n, err := l.Available(ctx)
			require.NoError(t, err)
			return n
		},
		try: func(n int) bool {
			r, err := l.Take(ctx, n)
			require.NoError(t, err)
			return r.Taken
		},
		take: func(n int, wait time.Duration) *entry {
			var opts []lock.WaitOption
			if wait > 0 {
				opts = append(opts, lock.Wait(wait))
			}
			return begun(t, ctx, func(ctx context.Context) error { return l.Acquire(ctx, n, opts...) })
		},
		delete: func() bool {
			deleted, err := l.Delete(ctx)
			require.NoError(t, err)
			return deleted
		},
	}
}

// rateType is the value of RateType.
func rateType(c ratelimit.Config) string {
	if c.PerClient {
		return "PER_CLIENT"
	}
	return "OVERALL"
}

// rateArgs returns a configuration as Redisson's methods take it.
func rateArgs(c ratelimit.Config) []any {
	args := []any{rateType(c), c.Rate, c.Per.Milliseconds(), "MILLISECONDS"}
	if c.KeepAlive > 0 {
		duration := func(d time.Duration) any { return map[string]any{"ms": d.Milliseconds()} }
		args = append(args[:2], duration(c.Per), duration(c.KeepAlive))
	}
	return args
}

func javaLimiter(t testing.TB, s javaSide, name string) limiter {
	call := func(method string, args ...any) *call { return s.c.on(t, "rate", name, method, args...) }
	return limiter{
		id: s.id(),
		set: func(c ratelimit.Config) (set bool) {
			call("trySetRateAsync", rateArgs(c)...).must(t, &set)
			return set
		},
		config: func() ratelimit.Config {
			var c struct {
				RateType           string
				RateInterval, Rate int
			}
			call("getConfigAsync").must(t, &c)
			return ratelimit.Config{Rate: c.Rate, Per: time.Duration(c.RateInterval) * time.Millisecond, PerClient: c.RateType == "PER_CLIENT"}
		},
		free: func() (n int) { call("availablePermitsAsync").must(t, &n); return n },
		try:  func(n int) (got bool) { call("tryAcquireAsync", n).must(t, &got); return got },
		take: func(n int, wait time.Duration) *entry {
			method, args := "tryAcquireAsync", []any{n, wait.Milliseconds(), ms}
			if wait < 0 {
				method, args = "acquireAsync", args[:1]
			}
			return call(method, args...).entry(t, func(value json.RawMessage) bool { return string(value) != "false" })
		},
		delete: func() (deleted bool) { call("deleteAsync").must(t, &deleted); return deleted },
	}
}

// Both sides write the same bytes, except for the random id of an entry and its time, and share the permits.
func TestSidesShareARate(t *testing.T) {
	eachEnv(t, func(t *testing.T, p *env) {
		conn := p.conn(t)
		p.eachOrder(t, func(t *testing.T, first, second side) {
			for _, perClient := range []bool{false, true} {
				name := fmt.Sprint("orders of ", t.Name(), perClient)
				mine, theirs := limiterOf(t, first, name), limiterOf(t, second, name)
				c := ratelimit.Config{Rate: 5, Per: time.Hour, PerClient: perClient}
				require.True(t, mine.set(c))
				require.False(t, theirs.set(ratelimit.Config{Rate: 7, Per: time.Hour}))
				require.Equal(t, c, mine.config())
				require.Equal(t, c, theirs.config())
				fields, err := do(t, conn, "HGETALL", name).AsStrMap()
				require.NoError(t, err)
				want := map[string]string{"rate": "5", "interval": "3600000", "type": wire.Flag(perClient), "keepAliveTime": "0"}
				if p.version == latchless && first.String() != goSide.String(goSide{}) {
					delete(want, "keepAliveTime")
				}
				require.Equal(t, want, fields)

				require.True(t, mine.try(2))
				require.True(t, theirs.try(1))
				values, permits := wire.RateValue(name), wire.RatePermits(name)
				left := "2"
				if perClient {
					values, permits = wire.RateValueOf(name, mine.id), wire.RatePermitsOf(name, mine.id)
					left = "3"
				}
				value, err := do(t, conn, "GET", values).ToString()
				require.NoError(t, err)
				require.Equal(t, left, value)
				entries, err := do(t, conn, "ZRANGE", permits, "0", "-1").AsStrSlice()
				require.NoError(t, err)
				for i, entry := range entries {
					require.Len(t, entry, 21)
					require.Equal(t, "\x10", entry[:1])
					if perClient {
						require.Equal(t, "\x02\x00\x00\x00", entry[17:])
					}
					require.Less(t, i, 2)
				}

				if perClient {
					require.Equal(t, []int{3, 4}, []int{mine.free(), theirs.free()})
					require.False(t, mine.try(4))
					require.True(t, theirs.try(4))
					continue
				}
				require.Equal(t, []int{2, 2}, []int{mine.free(), theirs.free()})
				require.False(t, mine.try(3))
				require.False(t, theirs.try(3))
				theirs.take(3, shortly).failsAfter(t, shortly)
				harness.Eventually(t, answers, "the turn of the waiter ends", func() bool {
					n, err := do(t, conn, "EXISTS", wire.RateTurn(name)).AsInt64()
					return err == nil && n == 0
				})
				require.True(t, theirs.try(2))
				require.False(t, mine.try(1))
				require.True(t, theirs.delete())
				require.False(t, mine.delete())
				exist, err := do(t, conn, "EXISTS", name, values, permits).AsInt64()
				require.NoError(t, err)
				require.Zero(t, exist)
			}
		})
	})
}

// Permits that one side has acquired come back for the other one after the interval.
func TestWaitsForPermitsOfTheOtherSide(t *testing.T) {
	eachEnv(t, func(t *testing.T, p *env) {
		p.eachOrder(t, func(t *testing.T, first, second side) {
			name := "orders of " + t.Name()
			mine, theirs := limiterOf(t, first, name), limiterOf(t, second, name)
			const per = 2 * time.Second
			require.True(t, mine.set(ratelimit.Config{Rate: 3, Per: per}))
			for range 2 {
				began := time.Now()
				require.True(t, mine.try(3))
				at := theirs.take(2, forever).gets(t, answers)
				require.GreaterOrEqual(t, at.Sub(began), per-10*time.Millisecond)
				mine.take(1, forever).gets(t, answers)
				mine, theirs = theirs, mine
				time.Sleep(per + 100*time.Millisecond)
			}
		})
	})
}

// Redisson keeps what redlatch has set, and its time to live.
func TestSetRateBesideJava(t *testing.T) {
	eachEnv(t, func(t *testing.T, p *env) {
		name := "orders of " + t.Name()
		ours, java := p.ours(t).RateLimiter(name), javaSide{p.theirs(t)}
		theirs := javaLimiter(t, java, name)
		require.NoError(t, ours.SetRate(t.Context(), ratelimit.Config{Rate: 5, Per: time.Minute, KeepAlive: time.Hour}))
		require.True(t, theirs.try(4))

		// Too much was acquired for the new rate.
		require.NoError(t, ours.SetRate(t.Context(), ratelimit.Config{Rate: 2, Per: time.Minute, KeepAlive: time.Hour}))
		require.False(t, theirs.try(1))
		require.NoError(t, ours.SetRate(t.Context(), ratelimit.Config{Rate: 6, Per: time.Minute, KeepAlive: time.Hour}))
		require.True(t, theirs.try(2))
		require.False(t, theirs.try(1))
		require.ErrorContains(t, func() error {
			_, err := java.c.on(t, "rate", name, "tryAcquireAsync", 7).within(t, answers)
			return err
		}(), "exceed")

		if p.version != latchless {
			// Redisson's configuration with a time to live is the same.
			name := name + " of Java"
			config := ratelimit.Config{Rate: 5, Per: time.Minute, KeepAlive: time.Hour}
			require.True(t, javaLimiter(t, java, name).set(config))
			got, err := p.ours(t).RateLimiter(name).Config(t.Context())
			require.NoError(t, err)
			require.Equal(t, config, got)
		}

		conn := p.conn(t)
		for _, key := range []string{name, wire.RateValue(name), wire.RatePermits(name)} {
			require.NoError(t, do(t, conn, "PEXPIRE", key, "100000").Error())
		}
		theirs.try(1)
		for _, key := range []string{name, wire.RateValue(name), wire.RatePermits(name)} {
			ttl, err := do(t, conn, "PTTL", key).AsInt64()
			require.NoError(t, err)
			if p.version == latchless {
				require.LessOrEqual(t, ttl, int64(100_000)) // that version does not know keepAliveTime
				continue
			}
			require.Greater(t, ttl, int64(3_000_000), key)
		}
	})
}

// Released permits: redlatch's come back once.
func TestReleaseBesideJava(t *testing.T) {
	eachEnv(t, func(t *testing.T, p *env) {
		if p.version == latchless {
			t.Skip("it has no release")
		}
		name := "orders of " + t.Name()
		ours, theirs := p.ours(t).RateLimiter(name), javaLimiter(t, javaSide{p.theirs(t)}, name)
		require.True(t, theirs.set(ratelimit.Config{Rate: 5, Per: time.Hour}))
		require.True(t, theirs.try(5))
		n, err := ours.Release(t.Context(), 2)
		require.NoError(t, err)
		require.Equal(t, 2, n)
		require.Equal(t, 2, theirs.free())
		require.True(t, theirs.try(2))
		require.False(t, theirs.try(1))
	})
}
