package multilock_test

import (
	"context"
	"errors"
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
func redOf(clients []*redlatch.Client, name string) *multilock.Red {
	members := make([]lock.Locker, len(clients))
	for i, c := range clients {
		members[i] = c.Lock(name)
	}
	return clients[0].RedLock(members...).WithTimeout(redWatchdog / 2)
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

// TestRedContention has two sets of clients in one process contend for a lock.
func TestRedContention(t *testing.T) {
	redEach(t, 5, func(t *testing.T, servers []*testserver.Server) {
		const callers, rounds = 64, 400
		reds := []*multilock.Red{redOf(redClients(t, servers), "orders"), redOf(redClients(t, servers), "orders")}
		for _, s := range servers {
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		}
		var inside atomic.Int32
		var got [2]atomic.Int64
		counter, left := 0, atomic.Int64{}
		left.Store(rounds)
		var done sync.WaitGroup
		for i := range callers {
			done.Go(func() {
				for left.Add(-1) >= 0 {
					h, err := reds[i%2].Lock(context.Background())
					if !assert.NoError(t, err) {
						return
					}
					assert.EqualValues(t, 1, inside.Add(1))
					counter++
					got[i%2].Add(1)
					inside.Add(-1)
					assert.NoError(t, h.Unlock(context.Background()))
				}
			})
		}
		done.Wait()
		require.Equal(t, rounds, counter)
		calls := harness.Commands(t, harness.Conn(t, servers[1].Addr))
		t.Logf("%d and %d of %d; %.1f scripts each", got[0].Load(), got[1].Load(), rounds,
			float64(calls["evalsha"])/rounds)
		for i := range got { // one of them begins alone
			require.GreaterOrEqual(t, got[i].Load(), int64(rounds/10))
		}
		// Callers of one process do not all try at once, and usually pass the lock on.
		require.Less(t, calls["evalsha"], rounds)
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
		refused(a.RedLock(a.Lock("orders"), a.Lock("others"), b.Lock("orders")))
		for range harness.Size(2, 5) {
			second := harness.Client(t, servers[0])
			refused(b.RedLock(a.Lock("orders"), second.Lock("orders"), b.Lock("orders")))
			refused(b.RedLock(b.Lock("orders"), second.Lock("others"), a.Lock("orders")))
		}
		refused(a.RedLock(a.Lock("orders"), atDatabase("", "", 1).Lock("orders"), b.Lock("orders")))

		// A user that may not read the run id leaves a mark, which identifies the server to
		// all such users.
		harness.Do(t, servers[0].Addr, "ACL", "SETUSER", "guest", "on", ">guest", "+@all", "-info", "~*", "&*")
		refused(b.RedLock(atDatabase("guest", "guest", 0).Lock("orders"), atDatabase("guest", "guest", 0).Lock("orders"), b.Lock("orders")))
	})
}

// TestRedSameServerIdentifiedLate has a majority before the third server is identified, which
// is the same as the first.
func TestRedSameServerIdentifiedLate(t *testing.T) {
	redEach(t, 2, func(t *testing.T, servers []*testserver.Server) {
		a, b := harness.Client(t, servers[0]), harness.Client(t, servers[1])
		late, g := harness.GatedClient(t, servers[0])
		reached := g.Arm(harness.KeepReply, "INFO", 1)
		red := a.RedLock(a.Lock("orders"), b.Lock("orders"), late.Lock("others")).WithTimeout(10 * time.Second)
		failed := make(chan error, 1)
		go func() {
			_, err := red.Lock(context.Background())
			failed <- err
		}()
		harness.Reached(t, reached)
		redEventually(t, servers, "orders", 2, redSlack)
		require.NoError(t, g.Open())
		require.ErrorIs(t, <-failed, lock.ErrInvalid)
		redNothingStays(t, servers)
	})
}

func TestRedBadMembers(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		members := func(names ...string) []lock.Locker {
			var all []lock.Locker
			for i, name := range names {
				all = append(all, clients[i].Lock(name))
			}
			return all
		}
		_, err := clients[0].RedLock(members("orders", "", "orders")...).Lock(t.Context())
		require.ErrorIs(t, err, lock.ErrInvalid)

		// Closed clients: of a minority, of a majority, and of the Redlock.
		red := redOf(clients, "orders")
		clients[2].Close()
		h, err := red.Lock(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
		h, err = red.Lock(t.Context())
		require.NoError(t, err)
		clients[1].Close() // during the hold
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
	})
}

// TestRedBehaviours covers what Redisson's tests expect of its RedLock, with a server for each
// member.
func TestRedBehaviours(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		others := redClients(t, servers)
		red := redOf(clients, "orders")

		// Ten at a time, five times each, with a wait and a lease; failures are retried.
		for _, opts := range [][]lock.Option{{lock.Lease(2 * time.Second)}, {lock.Lease(time.Minute)}, {lock.Lease(2 * time.Second), lock.Wait(4 * time.Second)}} {
			var done sync.WaitGroup
			counter := 0
			for i := range 10 {
				mine := red
				if i%2 == 1 {
					mine = redOf(others, "orders")
				}
				done.Go(func() {
					for range 5 {
						var h lock.Hold
						err := lock.ErrNotAcquired
						for errors.Is(err, lock.ErrNotAcquired) {
							h, err = mine.Lock(context.Background(), opts...)
						}
						if !assert.NoError(t, err) {
							return
						}
						before := counter
						time.Sleep(time.Millisecond)
						counter = before + 1
						assert.NoError(t, h.Unlock(context.Background()))
					}
				})
			}
			done.Wait()
			require.Equal(t, 50, counter)
		}

		// Two of three are held elsewhere.
		h1, err := others[0].Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		h2, err := others[1].Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		_, err = red.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, h2.Unlock(t.Context()))

		// One of three.
		h, err := red.Lock(t.Context(), lock.Wait(time.Second/2), lock.Lease(5*time.Second))
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))

		// The lock is forced open.
		forced, err := clients[0].Lock("orders").ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
		require.NoError(t, red.Do(t.Context(), multiNothing))
		_ = h1.Unlock(t.Context())

		// A server is down.
		servers[0].Kill()
		h, err = red.Lock(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
		redNothingStays(t, servers[1:])
	})
}

// TestRedKinds acquires, renews, contends for and releases Redlocks over every kind of lock.
func TestRedKinds(t *testing.T) {
	kinds := map[string]func(c *redlatch.Client) lock.Locker{
		"lock":   func(c *redlatch.Client) lock.Locker { return c.Lock("orders") },
		"fenced": func(c *redlatch.Client) lock.Locker { return c.FencedLock("orders") },
		"spin":   func(c *redlatch.Client) lock.Locker { return c.SpinLock("orders") },
		"plain":  func(c *redlatch.Client) lock.Locker { return c.PlainLock("orders") },
		"fair":   func(c *redlatch.Client) lock.Locker { return c.FairLock("orders") },
		"write":  func(c *redlatch.Client) lock.Locker { return c.RWLock("orders").Write() },
		"read":   func(c *redlatch.Client) lock.Locker { return c.RWLock("orders").Read() },
	}
	redEachOf(t, 3, slices.Sorted(maps.Keys(kinds)), strings.Clone, func(t *testing.T, servers []*testserver.Server, name string) {
		of := kinds[name]
		red := func(clients []*redlatch.Client) *multilock.Red {
			return clients[1].RedLock(of(clients[0]), of(clients[1]), of(clients[2])).WithTimeout(redWatchdog / 2)
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
			got := multiStart(t, red)
			if name != "read" {
				_, err := red.TryLock(t.Context())
				require.ErrorIs(t, err, lock.ErrNotAcquired)
				require.Empty(t, got)
				require.NoError(t, h.Unlock(t.Context()))
				h = multiGot(t, got)
				continue
			}
			require.NoError(t, multiGot(t, got).Unlock(t.Context()))
		}
		require.NoError(t, h.Unlock(t.Context()))
		harness.Idle(t, slices.Concat(clients...)...) // a vote may be on its way, and draw a token
		for _, s := range servers {
			harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{orders}")
		}
		redNothingStays(t, servers)
	})
}

// TestRedNamedOwner acquires the lock again under the same owner.
func TestRedNamedOwner(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		red := redOf(clients, "orders")
		owner := clients[0].NewOwner()
		ctx := lock.WithOwner(t.Context(), owner)
		h, err := red.Lock(ctx)
		require.NoError(t, err)
		require.Equal(t, owner, h.Owner())
		h2, err := red.Lock(ctx)
		require.NoError(t, err)
		_, err = red.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, h.Unlock(ctx))
		_, err = red.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, h2.Unlock(ctx))
		redEventually(t, servers, "orders", 0, redSlack)
		redNothingStays(t, servers)
	})
}
