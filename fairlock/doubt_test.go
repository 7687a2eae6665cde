package fairlock_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// settled is longer than releases of a claim in doubt are repeated.
const settled = 5 * time.Second

// A waiter whose attempt had no answer keeps its owner while it waits, and that is
// released until nothing of it can be under way any more. The hold has another owner,
// so that it can be used as a name meanwhile.
func TestAHoldAfterADoubtIsOfAFreshOwner(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, gate := harness.GatedClient(t, s)
		elsewhere := harness.Client(t, s).FairLock("doubt")
		l := c.FairLock("doubt")
		first := mustLock(t, l)
		reached := gate.Arm(harness.LoseReply, listKey("doubt"), 1)
		got := make(chan lock.Hold, 1)
		go func() {
			h, _ := l.Lock(context.Background())
			got <- h
		}()
		<-reached
		var before []lock.Owner
		harness.Eventually(t, 10*time.Second, "it queues, under the same owner", func() bool {
			waiters, err := elsewhere.Queue(t.Context())
			if err == nil && len(waiters) == 1 {
				before = append(before, waiters[0].Owner)
			}
			return len(before) > 0
		})
		require.NoError(t, first.Unlock(t.Context()))
		h := <-got
		require.NotNil(t, h)
		require.NotEqual(t, before[0], h.Owner())

		inner, err := l.Lock(lock.WithOwner(t.Context(), h.Owner()))
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
		again, err := l.Lock(lock.WithOwner(t.Context(), h.Owner()))
		require.NoError(t, err)
		for end := time.Now().Add(settled); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			require.Equal(t, 2, harness.HoldCount(t, elsewhere, h.Owner()))
		}
		require.NoError(t, inner.Unlock(t.Context()))
		require.NoError(t, again.Unlock(t.Context()))
		harness.NothingStays(t, s.Addr)
	})
}

// The waiter to whom the lock was passed leaves before anybody knows of it, and the
// answer to the hand-off never comes.
func TestAHandOffInDoubtToWhoHasLeftIsUndone(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, gate := harness.GatedClient(t, s)
		elsewhere := harness.Client(t, s).FairLock("left")
		l := c.FairLock("left")
		h := mustLock(t, l)
		ctx, cancel := context.WithCancel(t.Context())
		heir := make(chan error, 1)
		go func() {
			_, err := l.Lock(ctx, lock.Lease(time.Hour))
			heir <- err
		}()
		harness.Eventually(t, 10*time.Second, "it queues", func() bool {
			waiters, err := elsewhere.Queue(t.Context())
			return err == nil && len(waiters) == 1
		})
		reached := gate.Arm(harness.LoseReply, listKey("left"), 1)
		unlocked := make(chan error, 1)
		go func() { unlocked <- h.Unlock(context.Background()) }()
		<-reached
		cancel()
		require.ErrorIs(t, <-heir, lock.ErrNotAcquired)
		require.NoError(t, <-unlocked)
		next, err := elsewhere.Lock(t.Context(), lock.Wait(settled+10*time.Second))
		require.NoError(t, err, "nobody has it")
		require.NoError(t, next.Unlock(t.Context()))
		harness.NothingStays(t, s.Addr)
	})
}

func TestCloseTakesAWaiterInDoubtOutOfTheQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, gate := harness.GatedClient(t, s)
		l := c.FairLock("closed")
		mustLock(t, l) // left to its lease
		reached := gate.Arm(harness.LoseReply, listKey("closed"), 1)
		waited := make(chan error, 1)
		go func() {
			_, err := l.Lock(context.Background())
			waited <- err
		}()
		<-reached
		harness.Eventually(t, 10*time.Second, "it has a place and asks again", func() bool {
			waiters, err := l.Queue(t.Context())
			return err == nil && len(waiters) == 1
		})
		c.Close()
		require.ErrorIs(t, <-waited, lock.ErrClosed)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "LLEN", listKey("closed")))
	})
}
