package main

import (
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/ratelimit"
)

// rated is a command of redlatch rate that runs a script.
func rated(script string, flags ...string) []string {
	return append(append([]string{"rate"}, flags...), "mails", "--", "sh", "-c", script)
}

// The command runs as often as the rate permits, in the process of redlatch.
func TestRate(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const hourly = "--rate=5/1h"
		c := start(t, s.Addr, rated("echo $$; exec sleep 60", hourly, "--take", "2")...)
		require.Equal(t, strconv.Itoa(c.cmd.Process.Pid), c.line())
		c.end() // by a signal that the command gets

		require.Equal(t, 7, finish(t, s.Addr, rated("exit 7")...).status)
		limiter := harness.Client(t, s).RateLimiter("mails")
		config, err := limiter.Config(t.Context())
		require.NoError(t, err)
		require.Equal(t, ratelimit.Config{Rate: 5, Per: time.Hour, KeepAlive: 24 * time.Hour}, config)
		free, err := limiter.Available(t.Context())
		require.NoError(t, err)
		require.Equal(t, 2, free)

		fails(t, s.Addr, statusNotAcquired, "not acquired", rated("true", "--try", "--take", "3", "--rate", "100/1s")...)
		fails(t, s.Addr, statusNotAcquired, "not acquired", rated("true", "--wait", "20ms", "--take", "3")...)
		fails(t, s.Addr, 3, "not acquired", rated("true", "--try", "--take", "3", "--conflict-status", "3")...)
		r := finish(t, s.Addr, rated("echo it runs", "--try", "--take", "3", "--quiet", "--conflict-status", "0")...)
		require.Equal(t, result{}, r)
		fails(t, s.Addr, statusFailed, "the rate is 5", rated("true", "--take", "6")...)
		fails(t, s.Addr, statusFailed, "there is no rate limiter calls: --rate creates it", "rate", "calls", "--", "true")
		fails(t, unreachable, statusFailed, "connection refused", rated("true", "--try", "--quiet")...)

		// What cannot run uses no permit, as far as redlatch can know.
		fails(t, s.Addr, statusNotFound, "not found", "rate", "mails", "--", "no-such-command")
		require.Equal(t, "2", line(t, s, "rate", "--take=2", "mails", "--", "echo", "2"))
		fails(t, s.Addr, statusNotAcquired, "not acquired", rated("true", "--try")...)
	})
}

// The wait is as long as it must be, and a signal ends it. Then nobody has the turn.
func TestRateWaits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		began := time.Now()
		succeeds(t, s.Addr, rated("true", "--rate", "1/500ms")...)
		succeeds(t, s.Addr, rated("true")...)
		require.GreaterOrEqual(t, time.Since(began), 500*time.Millisecond)

		succeeds(t, s.Addr, "rate", "--rate", "1/1h", "calls", "--", "true")
		turn := wire.RateTurn("calls")
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
			c := start(t, s.Addr, "rate", "calls", "--", "echo", "it runs")
			harness.Eventually(t, patience, "it waits", func() bool { return harness.Do(t, s.Addr, "EXISTS", turn) == ":1" })
			c.signal(sig)
			require.Equal(t, statusSignal+int(sig), c.status(patience))
			require.Empty(t, c.lines)
			require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", turn))
		}
	})
}

// The command has the environment of redlatch, but for what may have passwords.
func TestEnvironmentOfRate(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		url := "redis://" + s.Addr
		for _, row := range []struct {
			flags  []string
			prints string
		}{{nil, "none none 7\n"}, {[]string{"--keep-url"}, url + " x 7\n"}} {
			args := append(row.flags, "--rate", "9/1h", "--name", "--try", "--", "sh", "-c", "echo ${REDLATCH_URL-none} ${REDLATCH_RED-none} $REDLATCH_TOKEN")
			c := newCommand(t, s.Addr, append([]string{"rate"}, args...)...)
			c.cmd.Env = append(c.cmd.Env, "REDLATCH_URL="+url, "REDLATCH_RED=x", "REDLATCH_TOKEN=7") // of a lock around this
			c.start()
			r := c.result()
			require.Zero(t, r.status, r.stderr)
			require.Equal(t, row.prints, r.stdout)
		}
		require.Equal(t, ":1", harness.Do(t, s.Addr, "EXISTS", "--try"))
	})
}
