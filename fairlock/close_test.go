package fairlock_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// A client is closed while one attempt is under way for several of its waiters.
func TestCloseDuringAnAttemptForSeveral(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		h := mustLock(t, harness.Client(t, s).FairLock("orders"))
		c, g := harness.GatedClient(t, s)
		first, several := together(t, g, c.FairLock("orders"), 3)
		harness.Do(t, s.Addr, "CLIENT", "PAUSE", "300", "WRITE")
		require.NoError(t, g.Open())
		harness.Eventually(t, soon, "they are tried for", func() bool { return harness.GoroutinesIn("(*hold).TryAll") == 1 })
		c.Close()
		for _, w := range append(several, first) {
			require.ErrorIs(t, w.end(), lock.ErrClosed)
		}
		require.Empty(t, line(t, s.Addr, "orders"))
		require.NoError(t, h.Unlock(context.Background()))
	})
}
