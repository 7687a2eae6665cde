package semaphore_test

import (
	"context"
	"fmt"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// detached returns the ids of n permits that Detach has left under that id.
func detached(t testing.TB, left string, n int) (ids []string) {
	t.Helper()
	digits, count, _ := strings.Cut(left, "#")
	require.Equal(t, fmt.Sprint(n), count)
	id, isHex := new(big.Int).SetString(digits, 16)
	require.True(t, isHex)
	for range n {
		ids = append(ids, fmt.Sprintf("%032x", id))
		id.Add(id, big.NewInt(1))
	}
	return ids
}

// All permits of a Permit move to another one, and nobody else gets one meanwhile.
func TestSeveralPermitsAreDetachedAndAdopted(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e, other := permitSemaphore(t, harness.Client(t, s), 5), harness.Client(t, s).PermitSemaphore("orders")
		p := take(t, e, 4, lock.Lease(time.Minute))
		messages := harness.Messages(t, s.Addr, channel("orders"))
		for _, lease := range []time.Duration{time.Hour, 30 * time.Minute} {
			before := p.IDs()
			id, err := p.Detach(t.Context(), lease)
			require.NoError(t, err)
			require.Equal(t, "4", harness.Receive(t, soon, "waiters in Java learn the new expiry", messages))
			require.Equal(t, counts{5, 1, 4}, countsOf(t, e))
			for _, left := range detached(t, id, 4) {
				require.NotContains(t, before, left)
				require.InDelta(t, lease, leaseTime(t, other, left), float64(slack))
			}
			require.ErrorIs(t, only(e.TTL(t.Context(), before[0])), lock.ErrNotHeld)
			p, err = other.Adopt(t.Context(), id, semaphore.Forever())
			require.NoError(t, err)
			require.Equal(t, "4", harness.Receive(t, soon, "and after that", messages))
			require.Equal(t, counts{5, 1, 4}, countsOf(t, e))
			require.Len(t, p.IDs(), 4)
			require.Equal(t, lock.NoExpiry, p.Remaining())
			require.Equal(t, lock.NoExpiry, leaseTime(t, e, p.IDs()[3]))
			require.ErrorIs(t, only(e.Adopt(t.Context(), id)), lock.ErrNotHeld)
		}

		// What was detached can be released by its ids.
		id, err := p.Detach(t.Context(), time.Hour)
		require.NoError(t, err)
		require.NoError(t, e.Release(t.Context(), detached(t, id, 4)...))
		require.Equal(t, counts{5, 5, 0}, countsOf(t, e))
		require.ErrorIs(t, only(other.Adopt(t.Context(), id)), lock.ErrNotHeld)
	})
}

// All permits are detached or adopted, or none. An expired one does not come back.
func TestDetachAndAdoptRevivesNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, harness.Client(t, s), 3)
		for what, end := range map[string]func(id string){
			"expired": func(id string) { expire(t, s, id) },
			"released": func(id string) {
				require.NoError(t, harness.Client(t, s).PermitSemaphore("orders").Release(t.Context(), id))
			},
		} {
			p := take(t, e, 3)
			end(p.IDs()[1])
			id, err := p.Detach(t.Context(), time.Hour)
			require.ErrorIs(t, err, lock.ErrLost, what)
			require.Empty(t, id, what)
			harness.Eventually(t, soon, "all are free", func() bool { return countsOf(t, e) == counts{3, 3, 0} })
			again := take(t, e, 3)

			id, err = again.Detach(t.Context(), time.Hour)
			require.NoError(t, err)
			ids := detached(t, id, 3)
			end(ids[1])
			require.ErrorIs(t, only(e.Adopt(t.Context(), id)), lock.ErrNotHeld, what)
			require.NoError(t, e.Release(t.Context(), ids[0], ids[2]))
			all := take(t, e, 3) // reclaims the expired one
			require.NoError(t, all.Release(t.Context()))
		}
	})
}

// A permit keeps the time to live of its semaphore, even if it is the last thing left of that.
func TestDetachKeepsTimeToLive(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, harness.Client(t, s), 1)
		harness.Do(t, s.Addr, "PEXPIRE", "orders", "60000")
		held := take(t, e, 1)
		harness.Do(t, s.Addr, "DEL", "orders")
		id, err := held.Detach(t.Context(), time.Hour)
		require.NoError(t, err)
		p, err := e.Adopt(t.Context(), id)
		require.NoError(t, err)
		require.Positive(t, harness.PTTL(t, s.Addr, timeoutsKey("orders")))
		require.NoError(t, p.Release(t.Context()))
	})
}

// The request of an adoption that was undone has no effect, however late it arrives.
func TestLateAdoptionTakesNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		e, other := c.PermitSemaphore("orders"), permitSemaphore(t, harness.Client(t, s), 2)
		id, err := take(t, other, 2).Detach(t.Context(), time.Hour)
		require.NoError(t, err)
		script := load(t, s.Addr, "permit_transfer")
		require.NoError(t, c.Ping(t.Context()))
		reached := g.Arm(harness.DelayRequest, script, 1)
		adoption := harness.Start(t, t.Context(), func(ctx context.Context) (*semaphore.Permit, error) { return e.Adopt(ctx, id, semaphore.Forever()) })
		harness.Reached(t, reached)
		adoption.Cancel(nil)
		require.ErrorIs(t, adoption.End(), lock.ErrIndeterminate)
		harness.Idle(t, c) // it is undone
		require.NoError(t, g.Open())
		p, err := other.Adopt(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, counts{2, 0, 2}, countsOf(t, other))
		require.NoError(t, p.Release(t.Context()))
		require.Equal(t, counts{2, 2, 0}, countsOf(t, other))
	})
}
