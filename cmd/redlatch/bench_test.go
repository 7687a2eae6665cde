package main

import (
	"encoding/json"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// benchRows are the beginnings of the lines that bench prints.
var benchRows = []string{
	"round trip", "lock + unlock lock", "lock + unlock fair", "lock + unlock read", "lock + unlock write", "lock + unlock fenced",
	"lock + unlock plain", "lock + unlock spin", "contended lock", "contended fair", "hand-over lock", "hand-over fair",
}

func TestBench(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var got struct {
			Goroutines   int
			Measurements []measurement
		}
		text := succeeds(t, s.Addr, "bench", "--for", "8s", "--json", "--goroutines", "3")
		require.NoError(t, json.Unmarshal([]byte(text), &got))
		require.Equal(t, 3, got.Goroutines)
		require.Len(t, got.Measurements, len(benchRows))
		for i, m := range got.Measurements {
			row := benchRows[i]
			require.Equal(t, row, strings.TrimSpace(m.What+" "+m.Kind))
			require.Positive(t, m.Count, row)
			require.Positive(t, m.Rate, row)
			require.Positive(t, m.Median, row)
			require.GreaterOrEqual(t, m.P99, m.Median, row)
			require.InDelta(t, m.Median/got.Measurements[0].Median, m.RoundTrips, 1e-9, row)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// Bench ends when nobody reads its output, and leaves nothing behind.
func TestBenchWithoutReader(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		r, w, err := os.Pipe()
		require.NoError(t, err)
		defer w.Close()
		c := newCommand(t, s.Addr, "bench", "--for", "1h")
		c.cmd.Stdout = w
		r.Close()
		require.Error(t, c.cmd.Run())
		require.Equal(t, statusFailed, c.cmd.ProcessState.ExitCode())
		require.Contains(t, c.stderr.String(), "broken pipe")
		harness.NothingLeft(t, s.Addr)
	})
}

// A signal ends bench in any measurement, and nothing stays on the server.
func TestBenchInterrupted(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, rows := range []int{5, 8, 9, 11}[harness.Size(2, 0):] { // fenced, contended, hand-over
			c := start(t, s.Addr, "bench", "--for", "6s")
			require.Contains(t, c.line(), "per second")
			for _, row := range benchRows[:rows] {
				require.Equal(t, strings.Fields(row), strings.Fields(c.line())[:len(strings.Fields(row))])
			}
			c.signal(syscall.SIGTERM)
			r := c.result()
			require.Equal(t, 128+15, r.status, r.stderr)
			require.Empty(t, r.stderr)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// Without a server a measurement fails.
func TestBenchWithoutServer(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := start(t, s.Addr, "bench", "--for", "1h")
		require.Contains(t, c.line(), "per second")
		s.Kill()
		r := c.result()
		require.Equal(t, statusFailed, r.status, r.stderr)
		require.Contains(t, r.stderr, "round trip: ")
	})
}
