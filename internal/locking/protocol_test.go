package locking_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/locking"
)

func TestReleaseReply(t *testing.T) {
	for n, want := range map[int64]locking.Released{
		-1: {State: locking.Shared},
		0:  {State: locking.NotHeld},
		1:  {State: locking.StillHeld},
		2:  {State: locking.Free},
		5:  {State: locking.Free, Told: 3},
	} {
		require.Equal(t, want, locking.ReleaseReply(n, false), n)
		if want.State == locking.Free {
			want.Told = -1
		}
		require.Equal(t, want, locking.ReleaseReply(n, true), n)
	}
}

func TestWhatATicketAdds(t *testing.T) {
	c := &locking.Claim{Key: "orders"}
	require.Equal(t, []string{"orders"}, c.Keys("orders"))
	c.Ticket = "id"
	require.Equal(t, []string{"orders", "other", "redisson_unlock_latch:{orders}:id"}, c.Keys("orders", "other"))
	require.Equal(t, []string{"16000", "hold"}, c.ReleaseArgs(false))
	require.Equal(t, []string{"16000", "undo"}, c.ReleaseArgs(true))
	c.AnyHold = true
	require.Equal(t, []string{"16000", "any"}, c.ReleaseArgs(false))
	require.Equal(t, []string{"16000", "any"}, c.ReleaseArgs(true))
}
