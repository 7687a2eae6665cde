package multilock_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// multiWarmUp loads the scripts that acquire and release locks.
func multiWarmUp(t *testing.T, s *testserver.Server) {
	t.Helper()
	c := harness.Client(t, s)
	several := multiMust(t, c.MultiLock(c.Lock("warm"), c.Lock("up")))
	require.NoError(t, several.Extend(t.Context(), time.Minute))
	require.NoError(t, several.Unlock(t.Context()))
	require.NoError(t, c.Lock("warm").Do(t.Context(), multiNothing))
	require.NoError(t, c.FencedLock("warm").Do(t.Context(), multiNothing))
	h := multiMust(t, c.Lock("warm"))
	require.NoError(t, h.Extend(t.Context(), time.Minute))
	require.NoError(t, h.Unlock(t.Context()))
	multiEmpty(t, s)
	c.Close()
}

func TestMultiIsOneScript(t *testing.T) {
	ones := map[string]int{"evalsha": 1}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		multiWarmUp(t, s)
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		scripts := func(do func()) map[string]int {
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			do()
			calls := harness.Commands(t, conn)
			for name := range calls {
				if !strings.HasPrefix(name, "eval") {
					delete(calls, name)
				}
			}
			return calls
		}
		m := c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c"))
		for _, take := range []func(ctx context.Context, opts ...lock.Option) (lock.Hold, error){m.Lock, m.TryLock} {
			for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Minute)}, {lock.MaxHold(time.Hour)}} {
				var h lock.Hold
				var err error
				sent := scripts(func() { h, err = take(t.Context(), opts...) })
				require.NoError(t, err)
				require.Equal(t, ones, sent, "acquire")
				for _, name := range []string{"a", "b", "c"} {
					require.Positive(t, harness.PTTL(t, s.Addr, name))
				}
				sent = scripts(func() { err = h.Extend(t.Context(), time.Hour) })
				require.NoError(t, err)
				require.Equal(t, ones, sent, "extend")
				sent = scripts(func() { err = h.Unlock(t.Context()) })
				require.NoError(t, err)
				require.Equal(t, ones, sent, "release")
			}
		}
		theirs := multiMust(t, harness.Client(t, s).Lock("c"))
		var err error
		sent := scripts(func() { _, err = m.TryLock(t.Context()) })
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Equal(t, ones, sent, "failed attempt")
		require.NoError(t, theirs.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestMultiInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		c, other := harness.ClientAt(t, cluster.Addrs()), harness.ClientAt(t, cluster.Addrs())
		scripts := func() (n int) {
			for _, node := range cluster.Primaries {
				stats, err := testserver.Info(node.Addr, "commandstats")
				require.NoError(t, err)
				var calls int
				if _, err := fmt.Sscanf(stats["cmdstat_evalsha"], "calls=%d,", &calls); err == nil {
					n += calls
				}
			}
			return n
		}
		reset := func() {
			for _, node := range cluster.Primaries {
				harness.Do(t, node.Addr, "CONFIG", "RESETSTAT")
			}
		}
		tagged := c.MultiLock(c.Lock("{order-7}:c"), c.Lock("{order-7}:b"), c.Lock("{order-7}:a"))
		require.NoError(t, tagged.Do(t.Context(), multiNothing)) // loads the scripts
		reset()
		h := multiMust(t, tagged)
		require.Equal(t, 1, scripts())
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, 2, scripts())

		var names []string
		for i := range 9 {
			names = append(names, fmt.Sprint("name-", i))
		}
		names = append(names, "{order-7}:a", "{order-7}:b")
		of := func(c *redlatch.Client) (members []lock.Locker) {
			for _, name := range names {
				members = append(members, c.Lock(name))
			}
			return members
		}
		m := c.MultiLock(of(c)...)
		h = multiMust(t, m, lock.Lease(time.Minute))
		for _, l := range of(other) {
			_, err := l.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
		}
		require.NoError(t, h.Extend(t.Context(), time.Hour))
		next := make(chan error, 1)
		go func() { next <- other.MultiLock(of(other)...).Do(context.Background(), multiNothing) }()
		multiSleeps(t, other)
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, <-next)
		theirs := multiMust(t, other.Lock(names[3]))
		_, err := m.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, theirs.Unlock(t.Context()))
		// Members of two clients on the same cluster are found to be the same lock.
		_, err = c.MultiLock(c.Lock("a"), other.Lock("a")).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrInvalid)
		for _, node := range cluster.Primaries {
			harness.NothingLeft(t, node.Addr)
		}
	})
}
