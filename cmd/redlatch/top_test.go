package main

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

func samplerOf(t *testing.T, s *testserver.Server, pattern string) *sampler {
	conn, err := rueidis.NewClient(rueidis.ClientOption{
		InitAddress: []string{s.Addr}, DisableCache: true, ClientSetInfo: rueidis.DisableClientSetInfo, // its commands are counted
	})
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return &sampler{reader: &inspect.Reader{Conn: conn}, pattern: pattern, budget: patience}
}

// take takes a sample and returns its rows by name.
func take(t *testing.T, s *sampler) (sample, map[string]row) {
	t.Helper()
	got := s.sample(t.Context())
	require.NoError(t, got.err)
	rows := map[string]row{}
	for _, r := range got.rows {
		rows[r.Name] = r
	}
	require.Len(t, rows, len(got.rows))
	return got, rows
}

// Samples follow what is held, waited for and released, without KEYS and MONITOR.
func TestSamples(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		c, other := harness.Client(t, s), harness.Client(t, s)
		from := samplerOf(t, s, "a*")
		_, rows := take(t, from)
		require.Empty(t, rows)

		h := mustLock(t, c.Lock("a"))
		fenced := c.FencedLock("a/fenced")
		mustLock(t, c.Lock("b"))
		require.NoError(t, mustLock(t, fenced).Unlock(t.Context()))
		ctx, stop := context.WithCancel(t.Context())
		waiter := harness.StartLock(t, ctx, other.Lock("a"))
		harness.Eventually(t, patience, "it waits", func() bool { return other.Stats().PubSub.Subscribed == 1 })
		from.budget = 0 // the channel is enough
		_, rows = take(t, from)
		require.Contains(t, rows, "a")
		require.Equal(t, 1, waiting(rows["a"].Object))
		from.budget = patience
		got, rows := take(t, from)
		require.True(t, got.scanned)
		require.Zero(t, got.skipped)
		require.Len(t, rows, 2)
		require.Zero(t, rows["a"].rate)

		for range 10 {
			require.NoError(t, fenced.Do(t.Context(), func(context.Context) error { return nil }))
		}
		stop()
		require.ErrorIs(t, waiter.End(), context.Canceled)
		require.NoError(t, h.Unlock(t.Context()))
		_, rows = take(t, from)
		require.NotContains(t, rows, "a", "it is free")
		require.Positive(t, rows["a/fenced"].rate)
		harness.Do(t, s.Addr, "DEL", "b")
		commands := harness.Commands(t, harness.Conn(t, s.Addr))
		require.NotContains(t, commands, "keys")
		require.NotContains(t, commands, "monitor")
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// Of very many names those that are contended are always read.
func TestSamplesOfVeryManyNames(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const names = maxRead + 200
		harness.Do(t, s.Addr, "EVAL", "for i = 1, ARGV[1] do redis.call('SET', 'redisson_lock_token:{n' .. i .. '}', '1') end", "0", strconv.Itoa(names))
		from := samplerOf(t, s, "*")
		got, _ := take(t, from)
		require.Equal(t, names-maxRead, got.skipped)
		require.Len(t, got.rows, maxRead)
		c, other := harness.Client(t, s), harness.Client(t, s)
		h := mustLock(t, c.FencedLock("z"))
		ctx, stop := context.WithCancel(t.Context())
		waiter := harness.StartLock(t, ctx, other.FencedLock("z"))
		harness.Eventually(t, patience, "it waits", func() bool { return other.Stats().PubSub.Subscribed == 1 })
		for range 3 {
			got, rows := take(t, from)
			require.True(t, rows["z"].Held)
			require.LessOrEqual(t, len(got.rows), names+1)
		}
		got, _ = take(t, from)
		require.Len(t, got.rows, names+1, "in the end every name was read")
		stop()
		require.ErrorIs(t, waiter.End(), context.Canceled)
		require.NoError(t, h.Unlock(t.Context()))
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// Rates count the hand-overs that were seen, and fade.
func TestRates(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	object := func(after time.Duration, token int64, holder string) inspect.Object {
		o := inspect.Object{Kind: inspect.Lock, At: at.Add(after), Holders: []inspect.Holder{{Owner: inspect.Owner{ID: holder}}}}
		if token > 0 {
			o.Token = &token
		}
		return o
	}
	first := row{Object: object(0, 10, "a")}
	require.Zero(t, row{}.rateAfter(first.Object), "it is new")
	require.InDelta(t, 5.0/2, first.rateAfter(object(2*time.Second, 15, "a")), 1e-9)
	require.Zero(t, first.rateAfter(object(time.Second, 9, "a")), "the token was reset")
	require.InDelta(t, 1, first.rateAfter(object(time.Second, 0, "b")), 1e-9, "the token is gone")
	plain := row{object(0, 0, "a"), 1}
	require.InDelta(t, 0.7+0.3/2, plain.rateAfter(object(2*time.Second, 0, "b")), 1e-9)
	require.InDelta(t, 0.7, plain.rateAfter(object(2*time.Second, 0, "a")), 1e-9)
	require.InDelta(t, 1, plain.rateAfter(object(0, 0, "b")), 1e-9, "the clock stands still")
}

// A person looks for a contended lock, looks at its holder, and unlocks it.
func TestTopInATerminal(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h := mustLock(t, harness.Client(t, s).Lock("orders"))
		other := harness.Client(t, s)
		waiter := harness.StartLock(t, t.Context(), other.Lock("orders"))
		mustLock(t, harness.Client(t, s).Lock("jobs"))
		harness.Eventually(t, patience, "it waits", func() bool { return other.Stats().PubSub.Subscribed == 1 })

		p := panes(t, s, 1)[0]
		until := func(like string) { p.until(regexp.MustCompile(like)) }
		p.run("redlatch top --interval 100ms")
		until(`(?m)^redlatch top +redis://\S+ +2 names, 2 held, 1 contended$`)
		until(`(?m)^> orders +lock +held +1 .*` + regexp.QuoteMeta(lock.OwnerOf(h).String()) + `\n  jobs `)
		p.keys("Down")
		until(`(?m)^> jobs `)
		p.keys("/", "r", "d", "Enter")
		until(`(?m)^> orders `)
		require.NotContains(t, p.screen(), "jobs")
		p.keys("Enter")
		until(`(?m)^subscribers +1\n\nHOLDER.*\n` + regexp.QuoteMeta(lock.OwnerOf(h).String()))
		p.keys("u")
		until(`Unlock orders although its holder may be working\? y/n`)
		p.keys("y")
		until(`orders is unlocked`)
		next := waiter.Got() // it was told
		until(regexp.QuoteMeta(lock.OwnerOf(next).String()))
		require.ErrorIs(t, h.Unlock(context.Background()), lock.ErrLost)

		s.Pause()
		p.keys("Escape")
		until(`as of \d\d:\d\d:\d\d: `)
		s.Resume()
		harness.Eventually(t, 2*patience, "the error is gone", func() bool { return !strings.Contains(p.screen(), "as of") })
		p.keys("C-z")
		p.prompt()
		p.keys("f", "g", "Enter")
		until(`(?m)^> orders `)
		p.keys("q")
		p.number++
		require.Equal(t, "0", p.prompt())
		require.False(t, slices.ContainsFunc(strings.Split(p.screen(), "\n"), func(line string) bool {
			return strings.HasPrefix(line, "> orders")
		}), "the screen is restored")
		require.NoError(t, next.Unlock(t.Context()))
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// A signal ends top as it ends other commands, and the terminal is as before.
func TestTopEndsBySignals(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		mustLock(t, harness.Client(t, s).Lock("orders"))
		p := panes(t, s, 1)[0]
		for name, sig := range map[string]syscall.Signal{"QUIT": syscall.SIGQUIT, "USR1": syscall.SIGUSR1} {
			p.run(`sh -c 'echo $$ >pid; exec redlatch top --interval 100ms'`)
			p.until(regexp.MustCompile(`(?m)^> orders `))
			pid, err := os.ReadFile(filepath.Join(p.dir, "pid"))
			require.NoError(t, err)
			n, err := strconv.Atoi(strings.TrimSpace(string(pid)))
			require.NoError(t, err)
			require.NoError(t, syscall.Kill(n, sig), name)
			require.Equal(t, strconv.Itoa(128+int(sig)), p.prompt(), name)
			require.NotRegexp(t, `(?m)^> orders|goroutine`, p.screen(), name)
			p.enter("stty -a | grep -o ' icanon'")
			p.number++
			p.until(regexp.MustCompile(`(?m)^ ?icanon$`))
			p.prompt()
		}
	})
}
