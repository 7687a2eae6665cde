package semaphore_test

import (
	"context"
	"encoding/hex"
	"fmt"
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
func detached(t testing.TB, id string, n int) (ids []string) {
	t.Helper()
	digits, count, _ := strings.Cut(id, "#")
	require.Equal(t, fmt.Sprint(n), count)
	first, err := hex.DecodeString(digits)
	require.NoError(t, err)
	require.Len(t, first, 16)
	for range n {
		ids = append(ids, hex.EncodeToString(first))
		for at := 15; at >= 12; at-- {
			if first[at]++; first[at] != 0 {
				break
			}
		}
	}
	return ids
}

// All permits of a Permit move to another one, and nobody else gets one meanwhile.
func TestSeveralPermitsAreDetachedAndAdopted(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e, other := permitSemaphore(t, s, 5), harness.Client(t, s).PermitSemaphore("orders")
		p := takeN(t, e, 4, lock.Lease(time.Minute))
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
			_, err = e.LeaseTime(t.Context(), before[0])
			require.ErrorIs(t, err, lock.ErrNotHeld)
			p, err = other.Adopt(t.Context(), id, semaphore.Forever())
			require.NoError(t, err)
			require.Equal(t, "4", harness.Receive(t, soon, "and after that", messages))
			keep(t, p)
			require.Equal(t, counts{5, 1, 4}, countsOf(t, e))
			require.Len(t, p.IDs(), 4)
			require.Equal(t, lock.NoExpiry, p.Remaining())
			require.Equal(t, lock.NoExpiry, leaseTime(t, e, p.IDs()[3]))
			_, err = e.Adopt(t.Context(), id)
			require.ErrorIs(t, err, lock.ErrNotHeld)
		}
		require.NoError(t, p.Release(t.Context()))
		require.Equal(t, counts{5, 5, 0}, countsOf(t, e))
	})
}

// What was detached can be released by its ids.
func TestDetachedPermitsAreReleasedByID(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e, other := permitSemaphore(t, s, 5), harness.Client(t, s).PermitSemaphore("orders")
		for _, n := range []int{1, 5} {
			id, err := takeN(t, e, n).Detach(t.Context(), time.Hour)
			require.NoError(t, err)
			require.NoError(t, other.Release(t.Context(), detached(t, id, n)...))
			require.Equal(t, counts{5, 5, 0}, countsOf(t, e))
			_, err = e.Adopt(t.Context(), id)
			require.ErrorIs(t, err, lock.ErrNotHeld)
		}
	})
}

// All permits are detached or adopted, or none. An expired one does not come back.
func TestDetachAndAdoptRevivesNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 3)
		for what, end := range map[string]func(id string){
			"expired": func(id string) { harness.Do(t, s.Addr, "ZADD", timeoutsKey("orders"), "XX", "1", raw(t, id)) },
			"released": func(id string) {
				require.NoError(t, harness.Client(t, s).PermitSemaphore("orders").Release(t.Context(), id))
			},
		} {
			p := takeN(t, e, 3)
			end(p.IDs()[1])
			id, err := p.Detach(t.Context(), time.Hour)
			require.ErrorIs(t, err, lock.ErrLost, what)
			require.Empty(t, id, what)
			harness.Eventually(t, soon, "all are free", func() bool { return countsOf(t, e) == counts{3, 3, 0} })
			again := takeN(t, e, 3)

			id, err = again.Detach(t.Context(), time.Hour)
			require.NoError(t, err)
			ids := detached(t, id, 3)
			end(ids[1])
			_, err = e.Adopt(t.Context(), id)
			require.ErrorIs(t, err, lock.ErrNotHeld, what)
			require.NoError(t, e.Release(t.Context(), ids[0], ids[2]))
			all := takeN(t, e, 3) // reclaims the expired one
			require.NoError(t, all.Release(t.Context()))
		}
	})
}

// A permit keeps the time to live of its semaphore, even if it is the last thing left of that.
func TestDetachKeepsTimeToLive(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 1)
		harness.Do(t, s.Addr, "PEXPIRE", "orders", "60000")
		held := takeN(t, e, 1)
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
		e, other := c.PermitSemaphore("orders"), permitSemaphore(t, s, 2)
		id, err := takeN(t, other, 2).Detach(t.Context(), time.Hour)
		require.NoError(t, err)
		script := harness.Load(t, s.Addr, "pool.lua", "permits.lua", "permit_transfer.lua")
		require.NoError(t, c.Ping(t.Context()))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		reached := g.Arm(harness.DelayRequest, script, 1)
		failed := make(chan error, 1)
		go func() { _, err := e.Adopt(ctx, id, semaphore.Forever()); failed <- err }()
		harness.Reached(t, reached)
		cancel()
		require.ErrorIs(t, await(t, failed), lock.ErrIndeterminate)
		harness.Idle(t, c) // it is undone
		require.NoError(t, g.Open())
		p, err := other.Adopt(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, counts{2, 0, 2}, countsOf(t, other))
		require.NoError(t, p.Release(t.Context()))
		require.Equal(t, counts{2, 2, 0}, countsOf(t, other))
	})
}
