package multilock_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// TestRedLateVotes has the request for the third of three members go wrong in every way, while the
// others decide: they are granted and released, or other callers hold them. The call returns before it
// knows of the third vote, which a server may have given by then. No vote stays.
func TestRedLateVotes(t *testing.T) {
	type row struct {
		harness.Fault
		refused bool
	}
	var rows []row
	for _, f := range harness.Faults {
		rows = append(rows, row{f, false}, row{f, true})
	}
	name := func(r row) string { return fmt.Sprint(r.Fault, map[bool]string{true: ", refused"}[r.refused]) }
	redEachOf(t, 3, rows, name, func(t *testing.T, servers []*testserver.Server, r row) {
		// The leases exceed the time limit of the check that nothing is left.
		clients := redClients(t, servers[:2], redlatch.WithWatchdogTimeout(time.Minute))
		third, g := harness.GatedClient(t, servers[2], redlatch.WithWatchdogTimeout(time.Minute))
		// Nothing waits for that long.
		red := redOf(append(clients, third), "orders").WithTimeout(20 * time.Second)
		require.NoError(t, red.Do(t.Context(), multiNothing))
		redEventually(t, servers, "orders", 0, redSlack)
		var others []lock.Hold
		if r.refused {
			for _, c := range redClients(t, servers[:2]) {
				h, err := c.Lock("orders").Lock(t.Context())
				require.NoError(t, err)
				others = append(others, h)
			}
		}

		reached := g.Arm(r.Fault, "EVALSHA", 1)
		began := time.Now()
		h, err := red.TryLock(t.Context())
		if r.refused {
			require.ErrorIs(t, err, lock.ErrNotAcquired)
		} else {
			require.NoError(t, errors.Join(err, h.Unlock(t.Context())))
		}
		require.Less(t, time.Since(began), redSlack)
		harness.Reached(t, reached)
		if r.Fault == harness.KeepReply {
			require.Equal(t, 1, redExists(t, servers[2:], "orders"), "the vote that no reply tells of")
		}
		require.NoError(t, g.Open())
		for _, h := range others {
			require.NoError(t, h.Unlock(t.Context()))
		}
		redNothingStays(t, servers)
	})
}
