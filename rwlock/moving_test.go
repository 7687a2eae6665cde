package rwlock_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
)

// While the slot moves, a renewal fails for those claims only whose keys are on either side.
func TestRenewalsWhileASlotMoves(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		l := newLabOf(t, shared, harness.ConnAt(t, cluster.Addrs()), "PUBLISH")
		var batch []watchdog.Subject
		for _, name := range []string{"{moving} split", "{moving} moved", "{moving} unmoved"} {
			c := l.claim(l.read, time.Minute)
			c.Key = name
			l.take(c)
			batch = append(batch, watchdog.Subject{Key: c.Key, Owner: c.ID.String()})
		}
		move, err := cluster.BeginMove("{moving}")
		require.NoError(t, err)
		for _, key := range []string{batch[0].Key, batch[1].Key, wire.ReadHoldTimeout(batch[1].Key, batch[1].Owner, 1)} {
			require.NoError(t, move.Migrate(key))
		}
		for _, dedicated := range []bool{true, false} {
			r := l.read.Renewer().Renew(t.Context(), [][]watchdog.Subject{batch}, time.Minute, !dedicated)[0]
			require.True(t, wire.IsMoving(r.ErrOf(0)), r)
			for i := 1; i < len(batch); i++ {
				require.NoError(t, r.ErrOf(i))
				require.True(t, r.Held[i])
			}
		}
		require.NoError(t, move.MigrateAll())
	})
}
