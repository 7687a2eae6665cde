package countdown_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

// A reset that a read can detect releases all waiters, however soon the next round begins.
func TestResetReleasesWaiters(t *testing.T) {
	const waiters, rounds = 5, 10
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s).CountDownLatch(key)
		l := c.CountDownLatch(key)
		for _, how := range []struct {
			name  string
			reset func()
		}{
			{"counted down by Java and set", func() { java(t, s, "down", 0); java(t, s, "down", 0); setCount(t, other, 2) }},
			{"deleted by Java and set", func() { java(t, s, "delete", 0); setCount(t, other, 2) }},
			{"counted down and set", func() {
				_, err := other.CountDownN(t.Context(), 10)
				require.NoError(t, err)
				setCount(t, other, 2)
			}},
			{"deleted and set", func() {
				_, err := other.Delete(t.Context())
				require.NoError(t, err)
				setCount(t, other, 2)
			}},
		} {
			t.Run(how.name, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				setCount(t, other, 2)
				for range rounds {
					var all []<-chan error
					for range waiters {
						all = append(all, wait(t.Context(), l))
					}
					waitForParked(t, c, key, waiters)
					begin := time.Now()
					how.reset()
					for _, done := range all {
						requireReleased(t, done, soon)
					}
					require.Less(t, time.Since(begin), soon, "released by the safety poll")
				}
			})
		}
	})
}

func TestKeyReplacedDuringWait(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.CountDownLatch(key)
		for _, words := range [][]string{{"RPUSH", key, "1"}, {"SET", key, "one"}} {
			setCount(t, l, 1)
			done := wait(t.Context(), l)
			waitForParked(t, c, key, 1)
			harness.Do(t, s.Addr, "DEL", key)
			harness.Do(t, s.Addr, words...)
			harness.Do(t, s.Addr, "PUBLISH", wire.LatchChannel(key), "2")
			require.Error(t, ended(t, done, soon))
			harness.Do(t, s.Addr, "DEL", key)
		}
	})
}

// A foreign value under the key of the round id makes no difference.
func TestForeignRoundKey(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.CountDownLatch(key)
		java(t, s, "set", 2)
		harness.Do(t, s.Addr, "RPUSH", wire.LatchRound(key), "1")
		done := wait(t.Context(), l)
		waitForParked(t, c, key, 1)
		set, err := l.TrySetCount(t.Context(), 3)
		require.NoError(t, err)
		require.False(t, set)
		countDown(t, l, 1)
		countDown(t, l, 0)
		requireReleased(t, done, soon)
		nothingLeft(t, s)
	})
}

// A message triggers a read, whatever it says. It releases no waiter while the latch is closed.
func TestMessagesAreHints(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		warmUp(t, s)
		c, g := harness.GatedClient(t, s)
		l := c.CountDownLatch(key)
		setCount(t, l, 3)
		done := wait(t.Context(), l)
		waitForParked(t, c, key, 1)
		publish := func(payload string) { harness.Do(t, s.Addr, "PUBLISH", wire.LatchChannel(key), payload) }
		for _, payload := range []string{"0", "1", "2", ""} {
			g.Keep(t, sha(t, readLua), 1, func() { publish(payload) })
			require.NoError(t, g.Open())
			waitForParked(t, c, key, 1)
			requireWaiting(t, done)
		}

		requireCount(t, l, 3)
		harness.Do(t, s.Addr, "DEL", key)
		publish("2")
		requireReleased(t, done, soon)
	})
}
