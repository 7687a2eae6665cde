package countdown_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
)

// A count expires at its time, which counting down does not change. The waiters learn of it
// then, although the server sends no message, and not at the next safety poll.
func TestExpiryReleasesWaiters(t *testing.T) {
	for _, ttl := range []time.Duration{time.Millisecond, time.Second, safetyPoll, time.Hour} {
		t.Run(ttl.String(), func(t *testing.T) {
			harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
				c, other := s.Client(t), s.Client(t)
				l := other.CountDownLatch(key)
				begin := time.Now()
				set, err := l.TrySetCountFor(t.Context(), 3, ttl)
				require.NoError(t, err)
				require.True(t, set)
				done := wait(t.Context(), c.CountDownLatch(key))
				synctest.Wait()
				time.Sleep(ttl / 2)
				countDown(t, l, 2)
				set, err = l.TrySetCountFor(t.Context(), 9, 10*ttl)
				require.NoError(t, err)
				require.False(t, set)
				require.NoError(t, <-done)
				require.GreaterOrEqual(t, time.Since(begin), ttl)
				require.Less(t, time.Since(begin), ttl+10*time.Millisecond) // with a tick of the wheel
				requireCount(t, l, 0)
				countDown(t, l, 0)
				require.NoError(t, l.Wait(t.Context()))

				// A new round has no time to live of the old one.
				setCount(t, l, 1)
				time.Sleep(2 * ttl)
				requireCount(t, l, 1)
			})
		})
	}
}
