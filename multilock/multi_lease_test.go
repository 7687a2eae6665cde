package multilock_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// The leases of all members count from the acquisition of the last one, and a fixed lease is
// not renewed.
func TestMultiLeaseCountsFromTheLast(t *testing.T) {
	const lease = 2 * time.Second
	name := func(name string) string { return name }
	harness.EachOf(t, []string{"lock", "lock too", "fair", "read", "second server's lock"}, name, func(t *testing.T, s *testserver.Server, name string) {
		second := harness.Server(t, s.Program)
		// The watchdog timeout differs from the lease: the lease counts.
		clients, all := multiOfAll(t, s, second, redlatch.WithWatchdogTimeout(time.Minute))
		// A Redlock is not renewed during the wait.
		all = slices.DeleteFunc(all, func(m multiMember) bool { return m.name == "redlock" })
		held := all[slices.IndexFunc(all, func(m multiMember) bool { return m.name == name })]
		theirs := multiMust(t, held.bar)
		got := multiStart(t, clients[0].MultiLock(multiLockers(all)...), lock.Lease(lease))
		multiWaits(t, clients...)
		before := make(map[string][]string)
		for _, m := range all {
			if fields := multiFields(t, m.addr, m.name); m.name != held.name && len(fields) > 0 {
				before[m.name] = fields
			}
		}
		time.Sleep(lease * 5 / 4) // longer than the lease of the members already held
		require.Empty(t, got)
		begin := time.Now()
		require.NoError(t, theirs.Unlock(t.Context()))
		h := multiGot(t, got)
		taken, left := time.Now(), h.Remaining()
		for _, m := range all {
			if fields := before[m.name]; fields != nil {
				require.Equal(t, fields, multiFields(t, m.addr, m.name), "%s was acquired again", m.name)
			}
		}
		require.LessOrEqual(t, left, lease)
		require.Greater(t, left, lease-lease/100-time.Since(begin), "the lease counts from too early")
		certain := func() {
			for _, m := range all {
				longest := lease - time.Since(taken)
				ttl := time.Duration(harness.PTTL(t, m.addr, m.name)) * time.Millisecond
				if h.Remaining() > 0 {
					require.LessOrEqual(t, ttl, longest+time.Millisecond, "%s was renewed", m.name)
					require.GreaterOrEqual(t, ttl, h.Remaining()-time.Millisecond, "%s expires before the hold", m.name)
				}
			}
		}
		certain()
		time.Sleep(lease / 2) // a renewal would be due by then
		certain()
		require.Equal(t, lock.ReasonExpired, multiLost(t, h, lease+multiSlack).Reason)
		require.GreaterOrEqual(t, time.Since(begin), lease-lease/100) // clocks may differ in rate
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		multiFree(t, all, -1)
		multiEmpty(t, s, second)
	})
}

// A long wait for a Redlock, which is acquired first, does not use up the lease.
func TestMultiLeaseAfterAWaitForARedlock(t *testing.T) {
	const lease = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		theirs := multiMust(t, other.Lock("z"))
		got := multiStart(t, c.MultiLock(c.FencedLock("a"), c.RedLock(c.Lock("z")), c.Lock("b")), lock.Lease(lease))
		multiWaits(t, c)
		require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"), "it holds others")
		time.Sleep(lease * 5 / 4)
		require.NoError(t, theirs.Unlock(t.Context()))
		h := multiGot(t, got)
		require.Positive(t, h.Remaining())
		require.NoError(t, h.Unlock(t.Context()))
		multiEmpty(t, s)
	})
}

func TestMultiMaxHoldCountsFromTheLast(t *testing.T) {
	const most = 600 * time.Millisecond
	name := func(name string) string { return name }
	harness.EachOf(t, []string{"a", "c", "d"}, name, func(t *testing.T, s *testserver.Server, held string) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		theirs := multiMust(t, other.Lock(held))
		got := multiStart(t, c.MultiLock(c.FencedLock("a"), c.Lock("b"), c.Lock("c"), c.FencedLock("d")), lock.MaxHold(most))
		multiWaits(t, c)
		var before [2][]string
		for i, name := range []string{"a", "b"} {
			before[i] = multiFields(t, s.Addr, name)
		}
		time.Sleep(most * 5 / 4)
		begin := time.Now()
		require.NoError(t, theirs.Unlock(t.Context()))
		h := multiGot(t, got)
		for i, name := range []string{"a", "b"} {
			if held != "a" {
				require.Equal(t, before[i], multiFields(t, s.Addr, name), "%s was acquired again", name)
			}
		}
		left := h.Remaining()
		require.LessOrEqual(t, left, most)
		require.Greater(t, left, most-time.Since(begin)-time.Millisecond)
		require.Equal(t, lock.ReasonMaxHold, multiLost(t, h, most+multiSlack).Reason)
		require.GreaterOrEqual(t, time.Since(begin), most)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		multiEmpty(t, s)
	})
}

func TestMultiIsRenewed(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Server(t, s.Program)
		clients, all := multiOfAll(t, s, second, redlatch.WithWatchdogTimeout(timeout))
		h := multiMust(t, clients[0].MultiLock(multiLockers(all)...))
		time.Sleep(timeout * 5 / 4)
		require.NoError(t, context.Cause(h.Context()))
		for _, m := range all {
			_, err := m.bar.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired, m.name)
		}
		require.NoError(t, h.Extend(t.Context(), time.Minute))
		require.Greater(t, h.Remaining(), 50*time.Second)
		for _, m := range all {
			require.Greater(t, harness.PTTL(t, m.addr, m.name), (50 * time.Second).Milliseconds(), m.name)
		}
		require.NoError(t, h.Unlock(t.Context()))
		multiEmpty(t, s, second)
	})
}

// Remaining is the minimum of all members: two clients have different timeouts.
func TestMultiRemainingIsTheLeast(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Hour))
		brief := harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Minute))
		for _, members := range [][]lock.Locker{{c.Lock("a"), brief.Lock("b")}, {brief.Lock("a"), c.Lock("b")}} {
			h := multiMust(t, c.MultiLock(members...))
			require.LessOrEqual(t, h.Remaining(), time.Minute)
			require.Greater(t, h.Remaining(), 50*time.Second)
			require.NoError(t, h.Extend(t.Context(), 5*time.Minute))
			require.LessOrEqual(t, h.Remaining(), 5*time.Minute)
			require.Greater(t, h.Remaining(), 4*time.Minute)
			require.NoError(t, h.Unlock(t.Context()))
		}
	})
}
