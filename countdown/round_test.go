package countdown_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

// A reset that a read can detect releases all waiters, however soon the next round begins.
func TestResetReleasesWaiters(t *testing.T) {
	const waiters, rounds = 5, 40
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

// Java writes no round id. Only a higher count shows that it has reset a latch.
func TestResetByJava(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		for _, tt := range []struct {
			to       int
			released bool
		}{{1, false}, {2, false}, {3, true}} {
			java(t, s, "set", 2)
			done := wait(t.Context(), c.CountDownLatch(key))
			waitForParked(t, c, key, 1)
			duringRead(t, g, func() { java(t, s, "reset", tt.to) })
			if !tt.released {
				waitForParked(t, c, key, 1)
				requireWaiting(t, done)
				java(t, s, "delete", 0)
			}
			requireReleased(t, done, soon)
			java(t, s, "delete", 0)
		}
		nothingLeft(t, s)
	})
}

// duringRead does what makes a waiter of the gate's client read the latch. It returns when
// the server has replied.
func duringRead(t testing.TB, g *harness.Gate, do func()) {
	t.Helper()
	g.Keep(t, sha(t, readLua), 1, do)
	require.NoError(t, g.Open())
}

// Waiters arrive at any time while redlatch keeps resetting the latch.
func TestWaitersOfEveryRoundAreReleased(t *testing.T) {
	const waiters, rounds = 8, 300
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s).CountDownLatch(key)
		l := c.CountDownLatch(key)
		setCount(t, other, 2)
		var over atomic.Bool
		results := make(chan error, waiters)
		for range waiters {
			go func() {
				var err error
				for err == nil && !over.Load() {
					err = l.Wait(context.Background())
				}
				results <- err
			}()
		}
		for range rounds {
			countDown(t, other, 1)
			countDown(t, other, 0)
			setCount(t, other, 2)
		}
		over.Store(true)
		_, err := other.Delete(t.Context())
		require.NoError(t, err)
		for range waiters {
			requireReleased(t, results, soon)
		}
	})
}

// Without messages, the next read shows that the round has ended, even if another has
// begun, as long as the two can be distinguished.
func TestLostMessages(t *testing.T) {
	for _, tt := range []struct {
		name  string
		first func(t *testing.T, s *testserver.Server, l *countdown.Latch)
		over  func(t *testing.T, s *testserver.Server, l *countdown.Latch)
	}{
		{
			"counted down", func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { setCount(t, l, 1) },
			func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { countDown(t, l, 0) },
		},
		{
			"deleted", func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { setCount(t, l, 1) },
			func(t *testing.T, _ *testserver.Server, l *countdown.Latch) {
				_, err := l.Delete(t.Context())
				require.NoError(t, err)
			},
		},
		{
			"counted down and set again", func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { setCount(t, l, 1) },
			func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { countDown(t, l, 0); setCount(t, l, 1) },
		},
		{
			"counted down by Java and set again", func(t *testing.T, s *testserver.Server, _ *countdown.Latch) { java(t, s, "set", 1) },
			func(t *testing.T, s *testserver.Server, l *countdown.Latch) { java(t, s, "down", 0); setCount(t, l, 1) },
		},
		{
			"set again after the round id has expired", func(t *testing.T, s *testserver.Server, l *countdown.Latch) {
				setCount(t, l, 1)
				harness.Do(t, s.Addr, "DEL", wire.LatchRound(key))
			},
			func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { countDown(t, l, 0); setCount(t, l, 1) },
		},
		{
			"set by Java to a higher count", func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { setCount(t, l, 1) },
			func(t *testing.T, s *testserver.Server, _ *countdown.Latch) { java(t, s, "reset", 2) },
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, shared *testserver.Server) {
				t.Parallel()
				s := harness.Own(t, shared.Program)
				c, g := harness.GatedClient(t, s)
				g.Mute()
				other := harness.Client(t, s).CountDownLatch(key)
				tt.first(t, s, other)
				done := wait(t.Context(), c.CountDownLatch(key))
				waitForParked(t, c, key, 1)
				tt.over(t, s, other)
				requireReleased(t, done, safetyPoll+slack)
				require.Zero(t, c.PubSub().Messages)
			})
		})
	}
}

// A message triggers a read, whatever it says. It releases no waiter while the latch is
// closed.
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
			duringRead(t, g, func() { publish(payload) })
			waitForParked(t, c, key, 1)
			requireWaiting(t, done)
		}
		requireCount(t, l, 3)
		harness.Do(t, s.Addr, "DEL", key)
		publish("2")
		requireReleased(t, done, soon)
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
