package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

func TestLatch(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		require.Empty(t, succeeds(t, s.Addr, "latch", "wait", "import"))
		require.Equal(t, "0\n", succeeds(t, s.Addr, "latch", "down", "import"))
		require.Equal(t, "import was open\n", succeeds(t, s.Addr, "latch", "delete", "import"))

		require.Equal(t, "4\n", succeeds(t, s.Addr, "latch", "set", "import", "4"))
		fails(t, s.Addr, statusNo, "has a count already", "latch", "set", "import", "9")
		require.EqualValues(t, -1, harness.PTTL(t, s.Addr, "import"))
		fails(t, s.Addr, statusNotAcquired, "not open after 1s", "latch", "wait", "--wait", "1s", "import")
		require.Equal(t, "3\n", succeeds(t, s.Addr, "latch", "down", "import"))

		waiting := []*command{start(t, s.Addr, "latch", "wait", "import"), start(t, s.Addr, "latch", "wait", "--wait", "1h", "import")}
		waitForSubscribers(t, s, "redisson_countdownlatch__channel__{import}", 2)
		require.Equal(t, "1\n", succeeds(t, s.Addr, "latch", "down", "import", "2"))
		require.Equal(t, "0\n", succeeds(t, s.Addr, "latch", "down", "import", "2"))
		for _, c := range waiting {
			require.Equal(t, result{}, c.result())
		}

		succeeds(t, s.Addr, "latch", "set", "--ttl", "1h", "import", "1")
		require.InDelta(t, time.Hour.Milliseconds(), harness.PTTL(t, s.Addr, "import"), 60_000)
		c := start(t, s.Addr, "latch", "wait", "import")
		waitForSubscribers(t, s, "redisson_countdownlatch__channel__{import}", 1)
		require.Equal(t, "import is open now\n", succeeds(t, s.Addr, "latch", "delete", "import"))
		require.Equal(t, result{}, c.result())
	})
}

// waitForSubscribers waits until a channel has n subscribers.
func waitForSubscribers(t *testing.T, s *testserver.Server, channel string, n int) {
	t.Helper()
	harness.Eventually(t, patience, "subscribers", func() bool {
		reply, err := testserver.Query(s.Addr, "PUBSUB", "NUMSUB", channel)
		require.NoError(t, err)
		return len(reply) == 2 && reply[1] == string(rune('0'+n))
	})
}

// A wait that ends while the server does not answer says so: the latch may be open.
func TestLatchWaitWithoutServer(t *testing.T) {
	harness.Full(t)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		succeeds(t, s.Addr, "latch", "set", "import", "1")
		gate := harness.NewGate(t, s)
		c := start(t, gate.Addr, "latch", "wait", "--wait", "12s", "import")
		waitForSubscribers(t, s, "redisson_countdownlatch__channel__{import}", 1)
		gate.Stall()
		require.Equal(t, statusFailed, c.status(2*patience))
		require.Contains(t, c.stderr.String(), "unavailable")
		require.NoError(t, gate.Open())
	})
}
