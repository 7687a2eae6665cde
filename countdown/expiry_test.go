package countdown_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
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

// Java counts a latch down without changing its time to live.
func TestTimeToLiveOnServer(t *testing.T) {
	const ttl = time.Hour
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).CountDownLatch(key)
		set, err := l.TrySetCountFor(t.Context(), 5, ttl)
		require.NoError(t, err)
		require.True(t, set)
		kept := func() {
			t.Helper()
			left := harness.PTTL(t, s.Addr, key)
			require.LessOrEqual(t, left, ttl.Milliseconds())
			require.Greater(t, left, ttl.Milliseconds()-60_000)
		}
		kept()
		countDown(t, l, 4)
		kept()
		require.EqualValues(t, 3, java(t, s, "down", 0))
		kept()
		require.Zero(t, java(t, s, "set", 7))
		kept()
		_, err = l.CountDownN(t.Context(), 3)
		require.NoError(t, err)
		nothingLeft(t, s)

		// A count of zero needs no time to live.
		set, err = l.TrySetCountFor(t.Context(), 0, ttl)
		require.NoError(t, err)
		require.True(t, set)
		nothingLeft(t, s)
	})
}
