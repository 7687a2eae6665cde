package multilock_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
)

// A majority that has restarted without its data grants a lock that is held. With a restart
// delay it has no vote until the delay is over, for callers old and new.
func TestRedRestartDelay(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		const delay = 5 * time.Second
		late := multilock.RestartDelay(delay)
		before := redOf(redClients(t, servers), "orders", late)
		h, err := before.Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err, "waits until the servers have been up for the delay")
		restarted := time.Now()
		for _, s := range servers[:2] {
			s.Kill()
			require.NoError(t, s.Restart())
		}
		clients := redClients(t, servers)
		after := redOf(clients, "orders")
		second, err := after.TryLock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err, "this is what the delay prevents")
		require.NoError(t, second.Unlock(t.Context()))
		returned := func() bool { return redExists(t, servers[:2], "orders") == 0 } // the last after the decision
		harness.Eventually(t, redSlack, "the votes are returned", returned)

		after = redOf(clients, "orders", late)
		_, err = after.TryLock(t.Context())
		if time.Since(restarted) < delay {
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.ErrorContains(t, err, "up for too short a time")
			harness.Eventually(t, redSlack, "the votes are returned", returned)
		}
		second, err = after.Lock(t.Context())
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(restarted), delay)
		require.NoError(t, second.Unlock(t.Context()))
		_ = h.Unlock(t.Context())
	})
}

// A server that has replaced another counts as started when the client notices, however long it
// has been up.
func TestRedRestartDelayAfterAFailover(t *testing.T) {
	redEach(t, 2, func(t *testing.T, servers []*testserver.Server) {
		const delay = 5 * time.Second
		c, g := harness.GatedClient(t, servers[0])
		red := c.RedLock([]lock.Locker{c.Lock("orders")}, multilock.RestartDelay(delay))
		require.NoError(t, red.Do(t.Context(), multiNothing))
		harness.Eventually(t, 4*delay, "the second server has been up for long", func() bool {
			info, err := testserver.Info(servers[1].Addr, "server")
			uptime, _ := strconv.Atoi(info["uptime_in_seconds"])
			return err == nil && uptime > int(delay/time.Second)
		})
		replaced := time.Now()
		g.Redirect(servers[1])
		require.NoError(t, red.Do(t.Context(), multiNothing))
		require.GreaterOrEqual(t, time.Since(replaced), delay)
	})
}

// A server that does not tell its uptime has no vote.
func TestRedRestartDelayIsChecked(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "-info")
		defer harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "+@all")
		_, err := c.RedLock([]lock.Locker{c.Lock("orders")}, multilock.RestartDelay(time.Second)).Lock(t.Context())
		require.ErrorIs(t, err, lock.ErrUnsupported)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"))
	})
}
