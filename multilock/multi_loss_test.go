package multilock_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// The loss of any member, for any reason, ends the hold with an error that names the member. The others are
// held until Unlock, or the end of their leases.
func TestMultiIsLostWithAnyMember(t *testing.T) {
	const timeout = 30 * time.Second // of the watchdog
	for name, lose := range map[string]func(t *testing.T, s *harness.VirtualServer, c *redlatch.Client, o lock.Owner){
		"deleted": func(t *testing.T, s *harness.VirtualServer, _ *redlatch.Client, _ lock.Owner) {
			require.True(t, s.Del("b"))
		},
		"forced open here": func(t *testing.T, _ *harness.VirtualServer, c *redlatch.Client, _ lock.Owner) {
			_, err := c.Lock("b").ForceUnlock(t.Context())
			require.NoError(t, err)
		},
		"forced open elsewhere": func(t *testing.T, s *harness.VirtualServer, _ *redlatch.Client, _ lock.Owner) {
			_, err := s.Client(t).Lock("b").ForceUnlock(t.Context())
			require.NoError(t, err)
		},
		"unlocked by its owner": func(t *testing.T, _ *harness.VirtualServer, c *redlatch.Client, o lock.Owner) {
			require.NoError(t, c.Lock("b").UnlockOwner(lock.WithOwner(t.Context(), o)))
		},
	} {
		for _, unlocked := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", unlocked ", unlocked), func(t *testing.T) {
				harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
					c, other := s.Client(t, redlatch.WithWatchdogTimeout(timeout)), s.Client(t)
					owner := c.NewOwner()
					ctx := lock.WithOwner(t.Context(), owner)
					h, err := c.MultiLock(c.Lock("a"), c.Lock("b"), c.FencedLock("c")).Lock(ctx)
					require.NoError(t, err)
					lose(t, s, c, owner)

					lost := multiLost(t, h, timeout/3+time.Second)
					require.Equal(t, "a,b,c", lost.Name)
					require.Equal(t, lock.ReasonGone, lost.Reason)
					require.Equal(t, owner, lost.Owner)
					var member *lock.LostError
					require.ErrorAs(t, lost.Err, &member)
					require.Equal(t, "b", member.Name)
					require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
					for _, l := range []lock.Locker{other.Lock("a"), other.FencedLock("c")} {
						_, err := l.TryLock(t.Context())
						require.ErrorIs(t, err, lock.ErrNotAcquired)
					}

					wait := timeout + time.Second
					if unlocked {
						require.ErrorIs(t, h.Unlock(t.Context()), lost)
						require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
						wait = 0
					}
					for _, l := range []lock.Locker{other.Lock("a"), other.FencedLock("c")} {
						require.NoError(t, l.Do(t.Context(), multiNothing, lock.Wait(wait)))
					}
					virtuallyEmpty(t, s)
				})
			})
		}
	}
}

// A member that is a Redlock is no exception.
func TestMultiIsLostWithARedlock(t *testing.T) {
	const timeout = 3 * time.Second // of the watchdog
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, other := s.Client(t, redlatch.WithWatchdogTimeout(timeout)), s.Client(t)
		m := c.MultiLock(c.Lock("a"), c.RedLock([]lock.Locker{c.Lock("r")}))
		h := multiMust(t, m)
		require.True(t, s.Del("r"))
		require.Equal(t, lock.ReasonGone, multiLost(t, h, timeout/3+time.Second).Reason)
		require.NoError(t, other.Lock("a").Do(t.Context(), multiNothing, lock.Wait(timeout)))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

		h = multiMust(t, m)
		require.True(t, s.Del("r"))
		require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		virtuallyEmpty(t, s)
	})
}

// Extend and Unlock detect a loss that was not noticed before.
func TestMultiExtendAndUnlockDetectALoss(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		mixed, several := c.MultiLock(c.Lock("a"), c.Lock("b"), c.FencedLock("c")), c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c"))
		for _, lost := range []string{"a", "b", "c"} {
			h := multiMust(t, mixed)
			harness.Do(t, s.Addr, "DEL", lost)
			err := h.Extend(t.Context(), time.Minute)
			require.ErrorIs(t, err, lock.ErrLost)
			require.ErrorContains(t, err, fmt.Sprintf("%q", lost))
			require.ErrorIs(t, h.Unlock(t.Context()), context.Cause(h.Context()))

			h = multiMust(t, mixed)
			harness.Do(t, s.Addr, "DEL", lost)
			err = h.Unlock(t.Context())
			require.ErrorIs(t, err, lock.ErrLost)
			require.ErrorContains(t, err, fmt.Sprintf("%q", lost))
			multiEmpty(t, s)
		}

		// The key of b has another type now; the other members are released and not lost.
		h := multiMust(t, several)
		harness.Do(t, s.Addr, "SET", "b", "precious")
		err := h.Unlock(t.Context())
		require.ErrorContains(t, err, `"b" (owner `)
		require.NotContains(t, err.Error(), `"a" (owner `)
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

		h = multiMust(t, mixed)
		harness.Do(t, s.Addr, "FLUSHALL")
		err = h.Unlock(t.Context())
		for _, name := range []string{"a", "b", "c"} {
			require.ErrorContains(t, err, fmt.Sprintf("lock lost: %q", name))
		}
	})
}

// A hold ends with the client that made it, and with that of any member. The closed client leaves its members
// to their leases; other clients release their own.
func TestMultiEndsWithItsClients(t *testing.T) {
	const members = 200 // enough that they do not all end at once
	type row struct {
		closed string
		left   int
	}
	rows := []row{{"maker", 0}, {"client of one", 1}, {"client of most", members}}
	harness.EachOf(t, rows, func(r row) string { return r.closed }, func(t *testing.T, s *testserver.Server, r row) {
		for range harness.Size(1, 10) {
			harness.Do(t, s.Addr, "FLUSHALL")
			clients := map[string]*redlatch.Client{}
			for _, row := range rows {
				clients[row.closed] = harness.Client(t, s)
			}
			all := []lock.Locker{clients["client of one"].Lock("one")}
			for i := range members {
				all = append(all, clients["client of most"].Lock(fmt.Sprint(i)))
			}
			m := clients["maker"].MultiLock(all...)
			h := multiMust(t, m)
			clients[r.closed].Close()

			require.ErrorIs(t, multiLost(t, h, 5*time.Second), lock.ErrClosed)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			require.Equal(t, fmt.Sprint(":", r.left), harness.Do(t, s.Addr, "DBSIZE"))
			_, err := m.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrClosed)
			require.Equal(t, fmt.Sprint(":", r.left), harness.Do(t, s.Addr, "DBSIZE"))
			for _, c := range clients {
				c.Close()
			}
		}
	})
}

// Closing any client ends an acquisition, which leaves nothing behind.
func TestMultiClientClosedDuringAcquisition(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		theirs := multiMust(t, harness.Client(t, s).Lock("c"))
		for range harness.Size(2, 10) {
			for which := range 3 {
				clients := []*redlatch.Client{harness.Client(t, s), harness.Client(t, s), harness.Client(t, s)}
				m := clients[0].MultiLock(clients[1].Lock("a"), clients[0].FencedLock("b"), clients[1].Lock("aa"), clients[2].Lock("c"))
				w := harness.StartLock(t, t.Context(), m)
				multiWaits(t, clients[2])
				clients[which].Close()
				require.ErrorIs(t, w.EndWithin(5*time.Second), lock.ErrClosed)

				// Lock waits only a moment for the release, and for its last attempt, which may yet draw a token.
				harness.Eventually(t, 5*time.Second, "nothing else is left", func() bool {
					harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{b}")
					return harness.Do(t, s.Addr, "DBSIZE") == ":1"
				})
				for _, c := range clients {
					c.Close()
				}
			}
		}
		require.NoError(t, theirs.Unlock(t.Context()))
	})
}

// A client is closed while an acquisition, which has a member of that client, is busy elsewhere. Close waits
// until the member is released.
func TestMultiClientOfMemberClosedDuringAcquisition(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		first := s.Client(t)
		s.Latency = 100 * time.Millisecond // what has not arrived is lost with its connection
		second := s.Client(t)
		proceed := make(chan struct{})
		last := first.SpinLock("b", func(int) time.Duration {
			<-proceed
			return time.Millisecond
		})
		w := harness.StartLock(t, t.Context(), first.MultiLock(second.Lock("a"), last))
		time.Sleep(time.Second)
		require.True(t, s.Exists("a"))

		closed := make(chan struct{})
		go func() {
			second.Close()
			close(closed)
		}()
		synctest.Wait()
		close(proceed)
		require.ErrorIs(t, w.End(), lock.ErrClosed)
		<-closed
		require.False(t, s.Exists("a"))
		virtuallyEmpty(t, s)
	})
}

// A member may be lost before the last one is acquired. Lock then starts over, and TryLock
// fails.
func TestMultiMemberLostBeforeTheLastIsAcquired(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, once := range []bool{false, true} {
			c, g := harness.GatedClient(t, s)
			m := c.MultiLock(c.FencedLock("a"), c.FencedLock("b"))
			require.NoError(t, m.Do(t.Context(), multiNothing)) // has the scripts loaded
			take := harness.Take(m, once)
			var w *harness.Call[lock.Hold]
			g.Keep(t, harness.SHA(t, "../rlock/acquire.lua"), 2, func() {
				w = harness.Start(t, t.Context(), func(ctx context.Context) (lock.Hold, error) { return take(ctx, lock.Lease(time.Minute)) })
			})
			harness.Do(t, s.Addr, "DEL", "a")
			require.NoError(t, g.Open())
			if once {
				require.ErrorIs(t, w.End(), lock.ErrNotAcquired)
			} else {
				h := w.Got()
				require.True(t, harness.IsLocked(t, c.FencedLock("a")))
				require.NoError(t, h.Unlock(t.Context()))
			}
			multiEmpty(t, s)
		}
	})
}

// A member that is lost during the wait for another is acquired again.
func TestMultiMemberLostDuringTheWait(t *testing.T) {
	const timeout = 3 * time.Second // of the watchdog
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, other := s.Client(t, redlatch.WithWatchdogTimeout(timeout)), s.Client(t)
		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Minute)}} {
			theirs := multiMust(t, other.Lock("c"))
			w := harness.StartLock(t, t.Context(), c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c")), opts...)
			synctest.Wait()
			require.True(t, s.Del("a"))
			time.Sleep(2 * timeout / 3) // a renewal finds it
			require.NoError(t, theirs.Unlock(t.Context()))
			h := w.Got()
			require.NoError(t, h.Context().Err())
			for _, name := range []string{"a", "b", "c"} {
				require.True(t, s.Exists(name), name)
			}
			require.NoError(t, h.Unlock(t.Context()))
		}
		virtuallyEmpty(t, s)
	})
}
