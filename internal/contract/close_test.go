package contract_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// A client that is closed ends its waits, behind holders here and elsewhere, and nothing of
// its waiters is left when Close returns. Its holds are lost, and free when their leases are over.
func TestCloseEndsWaitsAndHolds(t *testing.T) {
	const timeout = time.Second
	eachVirtually(t, all, func(t *testing.T, s *harness.VirtualServer, k kind) {
		other := s.Client(t)
		theirs := mustLock(t, t.Context(), k.of(other, "orders"))
		keys := len(s.Keys())
		c := s.Client(t, redlatch.WithWatchdogTimeout(timeout))
		var waiters []<-chan error
		for _, ctx := range k.owners(t, c) {
			for range 3 {
				waiters = append(waiters, async(func() error { return only(k.rival(c, "orders").Lock(ctx)) }))
			}
		}
		harness.Eventually(t, soon, "they wait", func() bool { return k.waiting(len(waiters), c) })
		closed := func() {
			t.Helper()
			c.Close()
			c.Close()
			for _, w := range waiters {
				err := ends(t, w, time.Millisecond)
				require.ErrorIs(t, err, lock.ErrClosed)
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
			}
			require.Zero(t, c.Stats())
			require.Zero(t, c.PubSub().Listeners)
			for what, call := range k.calls(k.of(c, "new"), t.Context(), c.NewOwner()) {
				require.ErrorIs(t, call(), lock.ErrClosed, what)
			}
			require.ErrorIs(t, c.Ping(t.Context()), lock.ErrClosed)
		}
		closed()
		if k.owned {
			require.Len(t, s.Keys(), keys, "but for the holder nothing is left")
		}
		isReleased(t, []lock.Hold{theirs})
		require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(time.Second)))
		if !k.leased {
			return
		}

		for _, opts := range [][]lock.Option{nil, {lock.Lease(timeout)}} {
			c = s.Client(t, redlatch.WithWatchdogTimeout(timeout))
			hold := mustLock(t, t.Context(), k.of(c, "orders"), opts...)
			waiters = []<-chan error{async(func() error { return only(k.rival(c, "orders").Lock(t.Context())) })}
			harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(1, c) })
			closed()
			require.ErrorIs(t, context.Cause(hold.Context()), lock.ErrClosed)
			require.ErrorIs(t, context.Cause(hold.Context()), lock.ErrLost)
			require.ErrorIs(t, hold.Unlock(t.Context()), lock.ErrClosed)
			require.Zero(t, hold.Remaining())
			isTaken(t, k.rival(other, "orders"))
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(timeout+time.Second)))
		}
	})
}

// A client is closed at any moment of an acquisition: the call says so, or has a hold
// that is lost and left to its lease.
func TestCloseDuringAcquisitionsLeavesNothing(t *testing.T) {
	const timeout = 300 * time.Millisecond
	eachKind(t, leased, func(t *testing.T, s *testserver.Server, k kind) {
		other := harness.Client(t, s)
		conn := harness.Conn(t, s.Addr) // shared, since connecting takes the longest
		for i := range harness.Size(8, 50) {
			c, err := redlatch.Wrap(t.Context(), conn, redlatch.WithWatchdogTimeout(timeout), redlatch.WithoutStartupChecks())
			require.NoError(t, err)
			owners := k.owners(t, c)
			ctx := owners["unnamed"]
			if named := owners["named"]; named != nil && i%2 == 0 {
				ctx = named
			}
			var theirs lock.Hold
			if i%4 >= 2 {
				theirs = mustLock(t, t.Context(), k.rival(other, "orders"))
			}
			done := make(chan lock.Hold, 1)
			began := make(chan struct{})
			go func() {
				close(began)
				h, err := k.of(c, "orders").Lock(ctx)
				if err != nil && !errors.Is(err, lock.ErrClosed) {
					t.Errorf("Lock: %v", err)
				}
				done <- h
			}()
			<-began
			for end := time.Now().Add(time.Duration(i/4%5) * 200 * time.Microsecond); time.Now().Before(end); {
				// Sleeping is not that exact.
			}
			c.Close()
			h := <-done
			if h != nil {
				require.Nil(t, theirs)
				require.ErrorIs(t, context.Cause(h.Context()), lock.ErrClosed)
			}
			if theirs != nil {
				require.NoError(t, theirs.Unlock(t.Context()))
			}
			wait := 5 * time.Second
			if h == nil && k.owned {
				wait = 0 // it was given back when Close returned
			}
			require.NoError(t, k.rival(other, "orders").Do(t.Context(), nothing, lock.Wait(wait)))
		}
	})
}
