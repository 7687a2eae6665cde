package multilock_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

// RedLock of a name combines the locks of that name and passes the options on to them.
func TestRedLockOfClients(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		red := redlatch.RedLock("orders", clients, rlock.NonReentrant()).WithTimeout(redWatchdog / 2)
		require.Equal(t, "orders", red.Name())
		h, err := red.Lock(t.Context())
		require.NoError(t, err)
		require.LessOrEqual(t, h.Remaining(), redWatchdog)
		for _, c := range clients {
			locked := func() bool {
				yes, err := c.Lock("orders").IsLocked(t.Context())
				require.NoError(t, err)
				return yes
			}
			harness.Eventually(t, redSlack, "the member is acquired", locked)
		}
		_, err = redOf(redClients(t, servers), "orders").TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, h.Unlock(t.Context()))
		redNothingStays(t, servers)

		owner := lock.WithOwner(t.Context(), clients[0].NewOwner())
		h, err = red.Lock(owner)
		require.NoError(t, err)
		_, err = red.TryLock(owner)
		require.ErrorIs(t, err, lock.ErrReentered)
		require.NoError(t, h.Unlock(t.Context()))
		redNothingStays(t, servers)
	})
}

// The first client renews and loses the hold. The end of another one costs one vote.
func TestRedLockBelongsToItsFirstClient(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		red := redlatch.RedLock("orders", clients).WithTimeout(redWatchdog / 2)
		clients[2].Close()
		h, err := red.Lock(t.Context())
		require.NoError(t, err)
		clients[0].Close()
		require.ErrorIs(t, context.Cause(h.Context()), lock.ErrLost)
		var lost *lock.LostError
		require.ErrorAs(t, context.Cause(h.Context()), &lost)
		require.Equal(t, lock.ReasonClosed, lost.Reason)
		_, err = red.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrClosed)
	})
}

func TestRedLockOfBadClients(t *testing.T) {
	redEach(t, 2, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		for name, bad := range map[string]struct {
			name    string
			clients []*redlatch.Client
			says    string
		}{
			"no list":      {"orders", nil, "without members"},
			"empty list":   {"orders", []*redlatch.Client{}, "without members"},
			"only nil":     {"orders", []*redlatch.Client{nil, nil}, "member 1"},
			"first is nil": {"orders", []*redlatch.Client{nil, clients[0], clients[1]}, "member 1"},
			"last is nil":  {"orders", []*redlatch.Client{clients[0], clients[1], nil}, "member 3"},
			"duplicate":    {"orders", []*redlatch.Client{clients[0], clients[1], clients[0]}, `"orders" (number 3)`},
			"no name":      {"", clients, "name"},
		} {
			t.Run(name, func(t *testing.T) {
				red := redlatch.RedLock(bad.name, bad.clients)
				for _, red := range []lock.Locker{red, red.WithTimeout(redTimeout), red.WithRestartDelay(redTimeout), red.WithAbsent(1)} {
					_ = red.Name()
					_, err := red.Lock(t.Context())
					require.ErrorIs(t, err, lock.ErrInvalid)
					require.ErrorContains(t, err, bad.says)
					_, err = red.TryLock(t.Context())
					require.ErrorIs(t, err, lock.ErrInvalid)
					err = red.Do(t.Context(), func(context.Context) error { panic("not held") })
					require.ErrorIs(t, err, lock.ErrInvalid)
					_, err = clients[0].MultiLock(red, clients[0].Lock("stock")).TryLock(t.Context())
					require.ErrorIs(t, err, lock.ErrInvalid)
				}
				redNothingStays(t, servers)
			})
		}
	})
}
