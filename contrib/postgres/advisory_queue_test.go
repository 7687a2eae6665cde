package pglock_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// Clients get an advisory lock in the order in which they came.
func TestAdvisoryQueue(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	const name = "advisory-queue"
	h := acquire(t, advisory.make(t, newPool(t, s.addr())).Lock(name))
	var waiting []*harness.Call[lock.Hold]
	for i := range 4 {
		c := advisory.make(t, newPool(t, s.addr()))
		waiting = append(waiting, harness.StartLock(t, t.Context(), c.Lock(name)))
		harness.Eventually(t, soon, "it waits", func() bool { return len(left(t, s, name)) == i+2 })
	}
	for i, w := range waiting {
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, w.EndWithin(soon))
		for _, later := range waiting[i+1:] {
			require.True(t, later.Running(), "it has overtaken another one")
		}
		h = w.Value
	}
	require.NoError(t, h.Unlock(t.Context()))
}
