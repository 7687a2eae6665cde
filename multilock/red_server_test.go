package multilock_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/rlock"
)

const (
	redWatchdog = 2 * time.Second
	// redTimeout is the server timeout of tests with unavailable servers.
	redTimeout = 100 * time.Millisecond
	// redSlack allows for a busy machine.
	redSlack = multiSlack
)

// redClients returns a client of each server.
func redClients(t *testing.T, servers []*testserver.Server, opts ...redlatch.Option) []*redlatch.Client {
	t.Helper()
	clients := make([]*redlatch.Client, len(servers))
	for i, s := range servers {
		clients[i] = harness.Client(t, s, append([]redlatch.Option{redlatch.WithWatchdogTimeout(redWatchdog)}, opts...)...)
	}
	return clients
}

// redOf returns the Redlock of that name over plain members, with a timeout that allows for a
// busy machine.
func redOf(clients []*redlatch.Client, name string, opts ...multilock.Option) *multilock.Red {
	members := make([]lock.Locker, len(clients))
	for i, c := range clients {
		members[i] = c.Lock(name)
	}
	return clients[0].RedLock(members, append([]multilock.Option{multilock.Timeout(redWatchdog / 2)}, opts...)...)
}

// redExists returns the number of servers with the key.
func redExists(t *testing.T, servers []*testserver.Server, name string) (n int) {
	t.Helper()
	for _, s := range servers {
		if harness.Do(t, s.Addr, "EXISTS", name) == ":1" {
			n++
		}
	}
	return n
}

// redEventually waits until that many servers have the key.
func redEventually(t *testing.T, servers []*testserver.Server, name string, n int, d time.Duration) {
	t.Helper()
	harness.Eventually(t, d, fmt.Sprintf("on %d servers", n), func() bool { return redExists(t, servers, name) == n })
}

func redNothingStays(t *testing.T, servers []*testserver.Server) {
	t.Helper()
	for _, s := range servers {
		harness.NothingStays(t, s.Addr)
	}
}

// redEach runs a test on every program, with n servers of its own, which it may kill.
func redEach(t *testing.T, n int, test func(t *testing.T, servers []*testserver.Server)) {
	redEachOf(t, n, []string{""}, func(string) string { return "all" }, func(t *testing.T, servers []*testserver.Server, _ string) { test(t, servers) })
}

// redEachOf is redEach for each row of a table.
func redEachOf[R any](t *testing.T, n int, rows []R, name func(R) string, test func(t *testing.T, servers []*testserver.Server, row R)) {
	harness.EachOf(t, rows, name, func(t *testing.T, s *testserver.Server, row R) {
		servers := []*testserver.Server{s}
		for len(servers) < n {
			servers = append(servers, harness.Server(t, s.Program))
		}
		t.Cleanup(func() {
			for _, s := range servers {
				if s.Up() {
					continue
				}
				s.Resume()
				if _, err := testserver.Command(s.Addr, "PING"); err != nil {
					require.NoError(t, s.Restart())
				}
			}
		})
		test(t, servers, row)
	})
}

// Two processes contend for a lock. Both get it, and usually pass it on.
func TestRedContention(t *testing.T) {
	kinds := map[string]lockOf{"lock": plainLock, "fair": fairLock}
	redEachOf(t, 5, []string{"lock", "fair"}, strings.Clone, func(t *testing.T, servers []*testserver.Server, kind string) {
		const callers, rounds = 64, 1000
		var reds [2]*multilock.Red
		for i := range reds {
			var members []lock.Locker
			clients := redClients(t, servers, redlatch.WithTurn(time.Millisecond))
			for _, c := range clients {
				members = append(members, kinds[kind](c, "orders"))
			}
			reds[i] = clients[0].RedLock(members, multilock.Timeout(redWatchdog/2))
		}
		for _, s := range servers {
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		}
		var inside atomic.Int32
		var left atomic.Int64
		left.Store(rounds)
		var got [2]int // guarded by the lock
		var done sync.WaitGroup
		for i := range callers {
			done.Go(func() {
				for left.Add(-1) >= 0 {
					assert.NoError(t, reds[i%2].Do(t.Context(), func(context.Context) error {
						assert.EqualValues(t, 1, inside.Add(1))
						got[i%2]++
						inside.Add(-1)
						return nil
					}))
				}
			})
		}
		done.Wait()
		calls := harness.Commands(t, harness.Conn(t, servers[1].Addr))["evalsha"]
		t.Logf("%v of %d; %.1f scripts each", got, rounds, float64(calls)/rounds)
		require.Equal(t, rounds, got[0]+got[1])
		for i := range got { // a turn: one of them begins alone, and turns in vain become longer
			require.GreaterOrEqual(t, got[i], 4)
		}
		// Callers of one process do not all try at once, and usually pass the lock on.
		require.Less(t, calls, rounds)
		redNothingStays(t, servers)
	})
}

// TestRedSameServerTwice rejects members on the same server, however it is addressed.
func TestRedSameServerTwice(t *testing.T) {
	redEach(t, 2, func(t *testing.T, servers []*testserver.Server) {
		refused := func(red *multilock.Red) {
			t.Helper()
			for range 3 {
				_, err := red.Lock(t.Context())
				require.ErrorIs(t, err, lock.ErrInvalid)
				_, err = red.TryLock(t.Context())
				require.ErrorIs(t, err, lock.ErrInvalid)
			}
			for _, s := range servers {
				harness.Eventually(t, 5*time.Second, "the first attempts are undone", func() bool {
					return harness.Do(t, s.Addr, "EXISTS", "orders", "others") == ":0"
				})
			}
		}
		atDatabase := func(user, password string, db int) *redlatch.Client {
			c, err := redlatch.New(t.Context(), rueidis.ClientOption{
				InitAddress: []string{servers[0].Addr}, SelectDB: db, Username: user, Password: password,
			}, redlatch.WithoutStartupChecks())
			require.NoError(t, err)
			t.Cleanup(c.Close)
			return c
		}
		a, b := harness.Client(t, servers[0]), harness.Client(t, servers[1])
		refused(a.RedLock([]lock.Locker{a.Lock("orders"), a.Lock("others"), b.Lock("orders")}))
		for range harness.Size(2, 5) {
			second := harness.Client(t, servers[0])
			refused(b.RedLock([]lock.Locker{a.Lock("orders"), second.Lock("orders"), b.Lock("orders")}))
			refused(b.RedLock([]lock.Locker{b.Lock("orders"), second.Lock("others"), a.Lock("orders")}))
		}
		refused(a.RedLock([]lock.Locker{a.Lock("orders"), atDatabase("", "", 1).Lock("orders"), b.Lock("orders")}))

		// A user that may not read the run id leaves a mark, which identifies the server to
		// all such users.
		harness.Do(t, servers[0].Addr, "ACL", "SETUSER", "guest", "on", ">guest", "+@all", "-info", "~*", "&*")
		refused(b.RedLock([]lock.Locker{atDatabase("guest", "guest", 0).Lock("orders"), atDatabase("guest", "guest", 0).Lock("orders"), b.Lock("orders")}))
	})
}

// TestRedSameServerIdentifiedLate has a majority before the third server is identified, which
// is the same as the first.
func TestRedSameServerIdentifiedLate(t *testing.T) {
	redEach(t, 2, func(t *testing.T, servers []*testserver.Server) {
		a, b := harness.Client(t, servers[0]), harness.Client(t, servers[1])
		late, g := harness.GatedClient(t, servers[0])
		reached := g.Arm(harness.KeepReply, "INFO", 1)
		red := a.RedLock([]lock.Locker{a.Lock("orders"), b.Lock("orders"), late.Lock("others")}, multilock.Timeout(10*time.Second))
		w := harness.StartLock(t, t.Context(), red)
		harness.Reached(t, reached)
		redEventually(t, servers, "orders", 2, redSlack)
		require.NoError(t, g.Open())
		require.ErrorIs(t, w.End(), lock.ErrInvalid)
		redNothingStays(t, servers)
	})
}

// The end of a client costs one vote, and that of the first client, which renews the hold, the hold.
func TestRedClientsClosed(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		red := redlatch.RedLock("orders", clients, multilock.Timeout(redWatchdog/2))
		clients[2].Close()
		h, err := red.Lock(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))

		h, err = red.Lock(t.Context())
		require.NoError(t, err)
		clients[1].Close()
		<-h.Context().Done()
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		_, err = red.Lock(t.Context())
		require.ErrorIs(t, err, lock.ErrClosed)

		clients[0].Close()
		_, err = red.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrClosed)
		for _, s := range servers {
			harness.NothingLeft(t, s.Addr)
		}

		clients = redClients(t, servers)
		h, err = redlatch.RedLock("orders", clients, multilock.Timeout(redWatchdog/2)).Lock(t.Context())
		require.NoError(t, err)
		clients[0].Close()
		require.Equal(t, lock.ReasonClosed, multiLost(t, h, redSlack).Reason)
	})
}

// TestRedKinds acquires, renews, contends for and releases Redlocks over every kind of lock.
func TestRedKinds(t *testing.T) {
	kinds := map[string]lockOf{
		"lock": plainLock, "fenced": fencedLock, "spin": spinLock, "plain": keyLock, "fair": fairLock, "write": writeLock, "read": readLock,
	}
	redEachOf(t, 3, slices.Sorted(maps.Keys(kinds)), strings.Clone, func(t *testing.T, servers []*testserver.Server, name string) {
		of := func(c *redlatch.Client) lock.Locker { return kinds[name](c, "orders") }
		red := func(clients []*redlatch.Client) *multilock.Red {
			return clients[1].RedLock([]lock.Locker{of(clients[0]), of(clients[1]), of(clients[2])}, multilock.Timeout(redWatchdog/2))
		}
		clients := [][]*redlatch.Client{redClients(t, servers), redClients(t, servers)}
		mine, theirs := red(clients[0]), red(clients[1])
		h, err := mine.Lock(t.Context())
		require.NoError(t, err)
		redEventually(t, servers, "orders", 3, redSlack)
		time.Sleep(redWatchdog * 5 / 4) // longer than a lease
		require.NoError(t, h.Context().Err())
		harness.Do(t, servers[0].Addr, "DEL", "orders")
		redEventually(t, servers, "orders", 3, redWatchdog+redSlack)
		for _, red := range []*multilock.Red{mine, theirs} {
			w := harness.StartLock(t, t.Context(), red)
			if name == "read" {
				require.NoError(t, multiGot(t, w).Unlock(t.Context()))
				continue
			}
			_, err := red.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.True(t, w.Running())
			require.NoError(t, h.Unlock(t.Context()))
			h = multiGot(t, w)
		}
		require.NoError(t, h.Unlock(t.Context()))
		harness.Idle(t, slices.Concat(clients...)...) // a vote may be on its way, and draw a token
		for _, s := range servers {
			harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{orders}")
		}
		redNothingStays(t, servers)
	})
}

// An owner acquires the lock again, unless the options of its members forbid that.
func TestRedNamedOwner(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		owner := clients[0].NewOwner()
		ctx := lock.WithOwner(t.Context(), owner)
		red := redOf(clients, "orders")
		h, err := red.Lock(ctx)
		require.NoError(t, err)
		require.Equal(t, owner, lock.OwnerOf(h))
		h2, err := red.Lock(ctx)
		require.NoError(t, err)
		for _, h := range []lock.Hold{h, h2} {
			_, err = red.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.NoError(t, h.Unlock(ctx))
		}
		redEventually(t, servers, "orders", 0, redSlack)

		members := make([]lock.Locker, len(clients))
		for i, c := range clients {
			members[i] = c.Lock("orders", rlock.NonReentrant())
		}
		red = clients[0].RedLock(members, multilock.Timeout(redWatchdog/2))
		h, err = red.Lock(ctx)
		require.NoError(t, err)
		redEventually(t, servers, "orders", 3, redSlack)
		_, err = red.TryLock(ctx)
		require.ErrorIs(t, err, lock.ErrReentered)
		require.NoError(t, h.Unlock(t.Context()))
		redNothingStays(t, servers)
	})
}
