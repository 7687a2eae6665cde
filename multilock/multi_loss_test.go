package multilock_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

// The loss of any member, for any reason, ends the hold with an error and releases the other
// members.
func TestMultiIsLostWithAnyMember(t *testing.T) {
	const timeout = 1500 * time.Millisecond // of the watchdog
	type way struct {
		name string
		soon bool // at once instead of at the next renewal
		lose func(t *testing.T, s *testserver.Server, c, other *redlatch.Client, owner lock.Owner)
	}
	ways := []way{
		{"deleted", false, func(t *testing.T, s *testserver.Server, _, _ *redlatch.Client, _ lock.Owner) {
			harness.Do(t, s.Addr, "DEL", "b")
		}},
		{"wrong type", false, func(t *testing.T, s *testserver.Server, _, _ *redlatch.Client, _ lock.Owner) {
			harness.Do(t, s.Addr, "SET", "b", "precious", "PX", "2500")
		}},
		{"forced open here", true, func(t *testing.T, _ *testserver.Server, c, _ *redlatch.Client, _ lock.Owner) {
			_, err := c.Lock("b").ForceUnlock(t.Context())
			require.NoError(t, err)
		}},
		{"forced open elsewhere", false, func(t *testing.T, _ *testserver.Server, _, other *redlatch.Client, _ lock.Owner) {
			_, err := other.Lock("b").ForceUnlock(t.Context())
			require.NoError(t, err)
		}},
		{"unlocked by its owner here", true, func(t *testing.T, _ *testserver.Server, c, _ *redlatch.Client, o lock.Owner) {
			require.NoError(t, c.Lock("b").Unlock(lock.WithOwner(t.Context(), o)))
		}},
	}
	harness.EachOf(t, ways, func(w way) string { return w.name }, func(t *testing.T, s *testserver.Server, w way) {
		for _, named := range []bool{false, true} {
			if !named && strings.HasPrefix(w.name, "unlocked") {
				continue // the owner is unknown
			}
			c, other := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), harness.Client(t, s)
			if w.soon {
				c = harness.Client(t, s) // the next renewal is far off
			}
			owner := c.NewOwner()
			ctx := t.Context()
			if named {
				ctx = lock.WithOwner(ctx, owner)
			}
			h, err := c.MultiLock(c.Lock("a"), c.Lock("b"), c.FencedLock("c")).Lock(ctx)
			require.NoError(t, err)
			w.lose(t, s, c, other, owner)
			lost := multiLost(t, h, timeout/3+multiSlack)
			require.Equal(t, "a,b,c", lost.Name)
			require.Equal(t, lock.ReasonGone, lost.Reason)
			require.Equal(t, h.Owner(), lost.Owner)
			member, ok := lost.Err.(*lock.LostError)
			require.True(t, ok, "the error does not name the member: %v", lost.Err)
			require.Equal(t, "b", member.Name)
			require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
			// The other members are held until Unlock, or the end of their leases.
			free := func() {
				for _, l := range []lock.Locker{other.Lock("a"), other.FencedLock("c")} {
					require.NoError(t, l.Do(t.Context(), multiNothing, lock.Wait(timeout+multiSlack)))
				}
			}
			_, err = other.Lock("a").TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			if !w.soon {
				free()
			}
			require.Equal(t, error(lost), h.Unlock(t.Context()))
			free()
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
			multiEmpty(t, s)
		}
	})
}

// A member that is a Redlock is no exception.
func TestMultiIsLostWithARedlock(t *testing.T) {
	const timeout = 1500 * time.Millisecond // of the watchdog
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), harness.Client(t, s)
		m := c.MultiLock(c.Lock("a"), c.RedLock(c.Lock("r")))
		h := multiMust(t, m)
		harness.Do(t, s.Addr, "DEL", "r")
		require.Equal(t, lock.ReasonGone, multiLost(t, h, timeout/3+multiSlack).Reason)
		require.NoError(t, other.Lock("a").Do(t.Context(), multiNothing, lock.Wait(timeout+multiSlack)))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

		h = multiMust(t, m)
		harness.Do(t, s.Addr, "DEL", "r")
		require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		harness.NothingStays(t, s.Addr)
	})
}

// Extend and Unlock detect a loss that was not noticed before.
func TestMultiExtendAndUnlockDetectALoss(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		m := c.MultiLock(c.Lock("a"), c.Lock("b"), c.FencedLock("c"))
		for _, lost := range []string{"a", "b", "c"} {
			h := multiMust(t, m)
			harness.Do(t, s.Addr, "DEL", lost)
			err := h.Extend(t.Context(), time.Minute)
			require.ErrorIs(t, err, lock.ErrLost)
			require.ErrorContains(t, err, fmt.Sprintf("%q", lost))
			require.ErrorIs(t, h.Context().Err(), context.Canceled)
			require.Equal(t, context.Cause(h.Context()), h.Unlock(t.Context()))

			h = multiMust(t, m)
			harness.Do(t, s.Addr, "DEL", lost)
			err = h.Unlock(t.Context())
			require.ErrorIs(t, err, lock.ErrLost)
			require.ErrorContains(t, err, fmt.Sprintf("%q", lost))
			multiEmpty(t, s)
		}
		// The key of b has another type now; the other members are released and not lost.
		several := c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c"))
		h := multiMust(t, several)
		harness.Do(t, s.Addr, "SET", "b", "precious")
		err := h.Unlock(t.Context())
		require.ErrorContains(t, err, `lock lost: "b"`)
		require.NotContains(t, err.Error(), `lost: "a"`)
		require.NotContains(t, err.Error(), `lost: "c"`)
		require.Equal(t, ":1", harness.Do(t, s.Addr, "DEL", "b"))
		harness.NothingLeft(t, s.Addr)
		// The other members are free when Unlock reports the loss.
		for range harness.Size(10, 50) {
			h := multiMust(t, several)
			_, err := c.Lock("b").ForceUnlock(t.Context())
			require.NoError(t, err)
			<-h.Context().Done()
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
		}

		h = multiMust(t, m)
		harness.Do(t, s.Addr, "FLUSHALL")
		err = h.Unlock(t.Context())
		for _, name := range []string{"a", "b", "c"} {
			require.ErrorContains(t, err, fmt.Sprintf("lock lost: %q", name))
		}
	})
}

func TestMultiServerKilled(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Own(t, s.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		there := harness.Client(t, second, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s)
		h := multiMust(t, c.MultiLock(c.Lock("a"), there.Lock("b"), c.Lock("c")))
		second.Kill()
		lost := multiLost(t, h, timeout+multiSlack)
		require.Equal(t, lock.ReasonExpired, lost.Reason)
		require.ErrorContains(t, lost.Err, `"b"`)
		require.NoError(t, other.Lock("a").Do(t.Context(), multiNothing, lock.Wait(multiSlack)))
		require.NoError(t, other.Lock("c").Do(t.Context(), multiNothing, lock.Wait(multiSlack)))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		// A TryLock that fails releases the members that are available.
		_, err := c.MultiLock(c.Lock("a"), there.Lock("b"), c.Lock("c")).TryLock(t.Context())
		require.Error(t, err)
		require.NotErrorIs(t, err, lock.ErrNotAcquired)
		harness.NothingLeft(t, s.Addr)
	})
}

// A server is killed during the wait for a member. The members held so far are released,
// except those on that server.
func TestMultiServerKilledDuringAcquisition(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Own(t, s.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		there := harness.Client(t, second, redlatch.WithWatchdogTimeout(timeout))
		theirs := multiMust(t, harness.Client(t, second, redlatch.WithWatchdogTimeout(time.Minute)).Lock("b"))
		done := make(chan error, 1)
		go func() {
			done <- c.MultiLock(c.Lock("a"), there.Lock("b"), c.Lock("c"), there.Lock("a")).Do(context.Background(), multiNothing)
		}()
		multiSleeps(t, there)
		second.Kill()
		select {
		// A waiter tries every 5 s, and then allows the server its timeout.
		case err := <-done:
			require.Error(t, err)
			require.ErrorContains(t, err, "acquire")
		case <-time.After(12 * time.Second):
			require.FailNow(t, "Lock does not return")
		}
		harness.NothingLeft(t, s.Addr)
		require.NoError(t, second.Restart())
		require.Error(t, theirs.Unlock(t.Context()))
		require.NoError(t, c.MultiLock(c.Lock("a"), there.Lock("b")).Do(t.Context(), multiNothing, lock.Wait(5*time.Second)))
	})
}

func TestMultiClientClosed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const members = 200 // enough that they do not all end at once
		for round := range harness.Size(4, 20) {
			mine := round > 0
			harness.Do(t, s.Addr, "FLUSHALL")
			c, second := harness.Client(t, s), harness.Client(t, s)
			all := []lock.Locker{second.Lock("of the second client")}
			for i := range members {
				all = append(all, c.Lock(fmt.Sprint(i)))
			}
			h := multiMust(t, c.MultiLock(all...))
			if mine {
				c.Close()
			} else {
				second.Close()
			}
			require.ErrorIs(t, multiLost(t, h, 5*time.Second), lock.ErrClosed)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			// The closed client leaves its members to their leases; the other client releases
			// its own.
			left := ":1"
			if mine {
				left = fmt.Sprint(":", members)
			}
			require.Equal(t, left, harness.Do(t, s.Addr, "DBSIZE"))
			c.Close()
			second.Close()
		}
	})
}

// Closing any client ends an acquisition, which leaves nothing behind.
func TestMultiClientClosedDuringAcquisition(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		other := harness.Client(t, s)
		theirs := multiMust(t, other.Lock("c"))
		for range harness.Size(2, 10) {
			for which := range 3 {
				clients := []*redlatch.Client{harness.Client(t, s), harness.Client(t, s), harness.Client(t, s)}
				m := clients[0].MultiLock(clients[1].Lock("a"), clients[0].FencedLock("b"), clients[1].Lock("aa"), clients[2].Lock("c"))
				done := make(chan error, 1)
				go func() {
					_, err := m.Lock(context.Background())
					done <- err
				}()
				multiSleeps(t, clients[2])
				clients[which].Close()
				select {
				case err := <-done:
					require.ErrorIs(t, err, lock.ErrClosed)
				case <-time.After(5 * time.Second):
					require.FailNow(t, "Lock does not return")
				}

				// Lock waits only a moment for the release, and for its last attempt, which may yet draw a token.
				var left []string
				t.Cleanup(func() {
					if t.Failed() {
						t.Logf("client %d was closed, left are %q", which, left)
					}
				})
				harness.Eventually(t, 5*time.Second, "nothing else is left", func() bool {
					harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{b}")
					var err error
					left, err = testserver.Query(s.Addr, "KEYS", "*")
					require.NoError(t, err)
					return len(left) == 1
				})
				for _, c := range clients {
					c.Close()
				}
			}
		}
		require.NoError(t, theirs.Unlock(t.Context()))
	})
}

// slowRelease delays the first request of each release, as a busy machine does.
type slowRelease struct{ sdktrace.SpanProcessor }

func (slowRelease) OnStart(_ context.Context, span sdktrace.ReadWriteSpan) {
	if span.Name() == "redlatch.release" {
		time.Sleep(100 * time.Millisecond)
	}
}

func (slowRelease) OnEnd(sdktrace.ReadOnlySpan) {}

// A client is closed while an acquisition, which has a member of that client, is busy elsewhere. Close waits
// until the member is released.
func TestMultiClientOfMemberClosedDuringAcquisition(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		slow := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(slowRelease{}))
		first, second := harness.Client(t, s), harness.Client(t, s, redlatch.WithTracerProvider(slow))
		busy, proceed := make(chan struct{}), make(chan struct{})
		last := first.SpinLock("b", rlock.WithBackoff(func(int) time.Duration {
			close(busy)
			<-proceed
			return time.Millisecond
		}))
		done := make(chan error, 1)
		go func() {
			_, err := first.MultiLock(second.Lock("a"), last).Lock(context.Background())
			done <- err
		}()
		<-busy
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			second.Close()
		}()
		harness.Eventually(t, 5*time.Second, "the client is closing", func() bool { return second.Ping(t.Context()) != nil })
		close(proceed)
		require.ErrorIs(t, <-done, lock.ErrClosed)
		<-closed
		harness.NothingLeft(t, s.Addr)
	})
}

// The client can find the hold, which must not keep its handle from being collected.
func TestMultiDropped(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		m := c.MultiLock(c.Lock("a"), c.Lock("b"), c.FencedLock("c"))
		func() {
			h, err := m.Lock(t.Context())
			require.NoError(t, err)
			runtime.GC()
			require.Positive(t, h.Remaining())
		}()
		harness.Eventually(t, 10*time.Second, "the lock is free", func() bool {
			runtime.GC()
			return !harness.IsLocked(t, c.Lock("a")) && !harness.IsLocked(t, c.Lock("b")) && !harness.IsLocked(t, c.FencedLock("c"))
		})
		require.Equal(t, 1, strings.Count(log.String(), "dropped without Unlock"), log.String())
		require.Contains(t, log.String(), "name=a,b,c")
		multiEmpty(t, s)
	})
}

// A member may be lost before the last one is acquired. Lock then starts over, and TryLock
// fails.
func TestMultiMemberLostBeforeTheLastIsAcquired(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Minute)}} {
			for _, once := range []bool{false, true} {
				c, g := harness.GatedClient(t, s)
				multiWarmUp(t, s)
				m := c.MultiLock(c.FencedLock("a"), c.FencedLock("b"))
				reached := g.Arm(harness.KeepReply, harness.SHA(t, "../rlock/acquire.lua"), 2)
				var h lock.Hold
				done := make(chan error, 1)
				go func() {
					var err error
					if once {
						h, err = m.TryLock(context.Background(), opts...)
					} else {
						h, err = m.Lock(context.Background(), opts...)
					}
					done <- err
				}()
				<-reached
				harness.Do(t, s.Addr, "DEL", "a")
				require.NoError(t, g.Open())
				err := <-done
				switch {
				case len(opts) == 0: // the next renewal finds it
					require.NoError(t, err)
					require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
				case once:
					require.ErrorIs(t, err, lock.ErrNotAcquired)
				default:
					require.NoError(t, err)
					require.True(t, harness.IsLocked(t, c.FencedLock("a")))
					require.NoError(t, h.Unlock(t.Context()))
				}
				multiEmpty(t, s)
				c.Close()
			}
		}
	})
}

// A member that is found lost during the wait for another is acquired again.
func TestMultiMemberLostDuringTheWait(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s)
		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Minute)}} {
			theirs := multiMust(t, other.Lock("c"))
			got := multiStart(t, c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c")), opts...)
			multiSleeps(t, c)
			harness.Do(t, s.Addr, "DEL", "a")
			if opts == nil { // otherwise the loss is found at the end
				renewals := g.Scripts() // from now on
				harness.Eventually(t, timeout+multiSlack, "one renewal has been answered and another has begun", func() bool {
					return g.Scripts() >= renewals+2
				})
			}
			require.NoError(t, theirs.Unlock(t.Context()))
			h := multiGot(t, got)
			require.NoError(t, h.Context().Err())
			for _, name := range []string{"a", "b", "c"} {
				require.True(t, harness.IsLocked(t, other.Lock(name)), name)
			}
			require.NoError(t, h.Unlock(t.Context()))
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// At MaxHold the context ends, and the members stay locked until Unlock or the end of their
// leases.
func TestMultiMaxHoldLeavesItsLocksToUnlock(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		names := []string{"a", "b", "c"}
		h, err := c.MultiLock(c.Lock("a"), c.Lock("b"), c.FairLock("c")).Lock(t.Context(), lock.MaxHold(200*time.Millisecond))
		require.NoError(t, err)
		require.Equal(t, lock.ReasonMaxHold, multiLost(t, h, multiSlack).Reason)
		other := harness.Client(t, s)
		for _, name := range names {
			_, err := other.Lock(name).Lock(t.Context(), lock.Wait(200*time.Millisecond))
			require.ErrorIs(t, err, lock.ErrNotAcquired, name)
		}
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		harness.NothingLeft(t, s.Addr)
	})
}

// A hold belongs to the client that created it, even if its members are of other clients.
func TestMultiEndsWithTheClientThatMadeIt(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		maker, c := harness.Client(t, s), harness.Client(t, s, redlatch.WithWatchdogTimeout(3*time.Second))
		h, err := maker.MultiLock(c.Lock("a"), c.Lock("b")).Lock(t.Context())
		require.NoError(t, err)
		maker.Close()
		require.ErrorIs(t, multiLost(t, h, 5*time.Second), lock.ErrClosed)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		harness.NothingLeft(t, s.Addr)
	})
}
