package multilock_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// The leases of all members, and MaxHold, count from the acquisition of the last one. Those that are held
// before that stay so, and a fixed lease is not renewed after it.
func TestMultiTermsCountFromTheLast(t *testing.T) {
	const term, slack = 2 * time.Second, 100 * time.Millisecond
	type row struct {
		opt    lock.Option
		reason lock.Reason
	}
	for name, row := range map[string]row{
		"lease": {lock.Lease(term), lock.ReasonExpired}, "max hold": {lock.MaxHold(term), lock.ReasonMaxHold},
	} {
		for _, last := range []string{"lock", "lock too", "fair", "read", "another client's lock"} {
			t.Run(name+"/"+last, func(t *testing.T) {
				harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
					// The watchdog timeout differs from the lease: the lease counts.
					option := redlatch.WithWatchdogTimeout(time.Minute)
					c, same, other := s.Client(t, option), s.Client(t, option), s.Client(t)
					// A Redlock, which is last, is not renewed during the wait.
					all := append(multiMembers("", c, other, len(multiKinds)-1), multiMembers("another client's ", same, other, 2)...)
					fields := func() map[string][]string {
						owners := make(map[string][]string)
						for _, m := range all {
							if found, err := s.HKeys(m.name); err == nil && m.name != last {
								owners[m.name] = found
							}
						}
						return owners
					}
					theirs := multiMust(t, all[slices.IndexFunc(all, func(m multiMember) bool { return m.name == last })].bar)

					w := harness.StartLock(t, t.Context(), c.MultiLock(multiLockers(all)...), row.opt)
					synctest.Wait()
					before := fields()
					time.Sleep(term * 5 / 4)
					require.True(t, w.Running())
					began := time.Now()
					require.NoError(t, theirs.Unlock(t.Context()))
					h := w.Got()

					after := fields()
					for name, owners := range before {
						require.Equal(t, owners, after[name], "%s was acquired again", name)
					}
					require.LessOrEqual(t, h.Remaining(), term)
					require.Greater(t, h.Remaining(), term-slack)
					conn := s.Conn(t)
					for range 2 {
						for _, m := range all {
							ms, err := conn.Do(t.Context(), conn.B().Pttl().Key(m.name).Build()).AsInt64()
							require.NoError(t, err)
							ttl := time.Duration(ms) * time.Millisecond
							require.GreaterOrEqual(t, ttl, h.Remaining()-time.Millisecond, "%s expires before the hold", m.name)
							if name == "lease" {
								require.LessOrEqual(t, ttl, time.Until(began.Add(term+slack)), "%s was renewed", m.name)
							}
						}
						time.Sleep(term / 2)
					}
					require.Equal(t, row.reason, multiLost(t, h, term).Reason)
					require.GreaterOrEqual(t, time.Since(began), term)
					require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
					virtuallyEmpty(t, s)
				})
			})
		}
	}
}

// A long wait for a Redlock, which is acquired first, does not use up the lease.
func TestMultiLeaseAfterAWaitForARedlock(t *testing.T) {
	const lease = time.Second
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		theirs := multiMust(t, s.Client(t).Lock("z"))
		w := harness.StartLock(t, t.Context(), c.MultiLock(c.FencedLock("a"), c.RedLock([]lock.Locker{c.Lock("z")}), c.Lock("b")), lock.Lease(lease))
		time.Sleep(lease * 5 / 4)
		require.False(t, s.Exists("a") || s.Exists("b"), "it holds others")
		require.NoError(t, theirs.Unlock(t.Context()))
		h := w.Got()
		require.Positive(t, h.Remaining())
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// Members of any client are renewed, each in time for the timeout of its client. Remaining is the least of
// all.
func TestMultiRemainingIsTheLeast(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t, redlatch.WithWatchdogTimeout(time.Hour))
		brief := s.Client(t, redlatch.WithWatchdogTimeout(time.Minute))
		for _, members := range [][]lock.Locker{
			{c.Lock("a"), brief.Lock("b")}, {brief.Lock("a"), c.Lock("b")}, {c.Lock("a"), brief.RedLock([]lock.Locker{brief.Lock("b")})},
		} {
			h := multiMust(t, c.MultiLock(members...))
			for range 10 {
				require.LessOrEqual(t, h.Remaining(), time.Minute)
				require.Greater(t, h.Remaining(), 30*time.Second)
				time.Sleep(45 * time.Second)
			}
			require.NoError(t, h.Extend(t.Context(), 5*time.Minute))
			require.LessOrEqual(t, h.Remaining(), 5*time.Minute)
			require.Greater(t, h.Remaining(), 4*time.Minute)
			require.NoError(t, h.Unlock(t.Context()))
		}
	})
}
