package harness

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

// TestMember tests a lock on another store as a member of a multi-lock, beside a lock on Redis. bar is the lock of another
// client that excludes it.
func TestMember(t *testing.T, member, bar lock.Locker) {
	t.Helper()
	s := redlatchtest.NewServer(t)
	c := redlatchtest.NewClient(t, s)
	here := redlatchtest.NewClient(t, s).Lock("here")
	nothing := func(context.Context) error { return nil }
	multi := c.MultiLock(c.Lock("here"), member)
	h, err := multi.Lock(t.Context(), lock.Wait(callTimeout))
	require.NoError(t, err)
	for _, l := range []lock.Locker{here, bar} {
		_, err := l.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
	}
	require.NoError(t, h.Unlock(t.Context()))

	// If the member is held, the other one is free after the call.
	held, err := bar.Lock(t.Context(), lock.Wait(callTimeout))
	require.NoError(t, err)
	_, err = multi.Lock(t.Context(), lock.Wait(time.Second))
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	require.NoError(t, here.Do(t.Context(), nothing, lock.Wait(callTimeout)))
	require.NoError(t, held.Unlock(t.Context()))

	// The loss of the other one ends the hold, and Unlock releases the member.
	h, err = multi.Lock(t.Context(), lock.Lease(time.Minute))
	require.NoError(t, err)
	_, err = here.ForceUnlock(t.Context())
	require.NoError(t, err)
	require.ErrorIs(t, h.Extend(t.Context(), time.Hour), lock.ErrLost)
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	require.NoError(t, bar.Do(t.Context(), nothing, lock.Wait(callTimeout)))
}
