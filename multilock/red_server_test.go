package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
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
	// redTimeout is for how long a server that may be away is waited for, where that matters.
	redTimeout = 100 * time.Millisecond
	// redSlack is for what a busy machine needs.
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

// redOf returns the red lock of that name over plain members. It has patience with servers on
// a busy machine.
func redOf(clients []*redlatch.Client, name string) *multilock.Red {
	members := make([]lock.Locker, len(clients))
	for i, c := range clients {
		members[i] = c.Lock(name)
	}
	return clients[0].RedLock(members...).WithTimeout(redWatchdog / 2)
}

// redExists returns on how many servers there is something.
func redExists(t *testing.T, servers []*testserver.Server, name string) (n int) {
	t.Helper()
	for _, s := range servers {
		if harness.Do(t, s.Addr, "EXISTS", name) == ":1" {
			n++
		}
	}
	return n
}

// redEventually waits until there is something on so many servers.
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

// redEach runs a test on every program with n servers of their own, which it may kill.
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

// redFault is a way in which a server fails.
type redFault struct {
	name string
	// befall makes it fail and returns how it is healed.
	befall func(t *testing.T, s *testserver.Server, g *harness.Gate) (heal func())
	final  bool // it will not pass by itself
	one    bool // it is of one request
}

var redFaults = []redFault{
	{name: "killed", befall: func(t *testing.T, s *testserver.Server, _ *harness.Gate) func() {
		s.Kill()
		return func() { require.NoError(t, s.Restart()) }
	}},
	{name: "stopped", befall: func(_ *testing.T, s *testserver.Server, _ *harness.Gate) func() {
		s.Pause()
		return s.Resume
	}},
	{name: "silent", one: true, befall: redLose(harness.Silence)},
	{name: "reply lost", one: true, befall: redLose(harness.LoseReply)},
	{name: "refuses", final: true, befall: func(t *testing.T, s *testserver.Server, _ *harness.Gate) func() {
		harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "-evalsha", "-eval")
		return func() { harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "+@all") }
	}},
	{name: "wrong type", final: true, befall: func(t *testing.T, s *testserver.Server, _ *harness.Gate) func() {
		harness.Do(t, s.Addr, "SET", "orders", "something")
		return func() { harness.Do(t, s.Addr, "DEL", "orders") }
	}},
	{name: "taken", befall: func(t *testing.T, s *testserver.Server, _ *harness.Gate) func() {
		h, err := harness.Client(t, s).Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		return func() { require.NoError(t, h.Unlock(t.Context())) }
	}},
}

func redLose(fault harness.Fault) func(*testing.T, *testserver.Server, *harness.Gate) func() {
	return func(t *testing.T, _ *testserver.Server, g *harness.Gate) func() {
		g.Arm(fault, "EVALSHA", 1)
		return func() { require.NoError(t, g.Open()) }
	}
}

// TestRedServersFail has every way of failure befall one, two and three of five servers.
func TestRedServersFail(t *testing.T) {
	type row struct {
		redFault
		seed    uint64
		failing int
	}
	var rows []row
	for i, f := range redFaults {
		for failing := harness.Size(2, 1); failing <= 3; failing++ {
			rows = append(rows, row{f, uint64(i), failing})
		}
	}
	redEachOf(t, 5, rows, func(f row) string { return fmt.Sprint(f.failing, " ", f.name) }, func(t *testing.T, servers []*testserver.Server, f row) {
		rnd := rand.New(rand.NewPCG(f.seed, uint64(f.failing)))
		clients := make([]*redlatch.Client, len(servers))
		gates := make([]*harness.Gate, len(servers))
		for i, s := range servers {
			// The leases are longer than it is waited for that nothing is left.
			clients[i], gates[i] = harness.GatedClient(t, s)
		}
		red := redOf(clients, "orders").WithTimeout(redTimeout)
		require.NoError(t, red.Do(t.Context(), multiNothing))
		redEventually(t, servers, "orders", 0, redSlack)

		var heal []func()
		healed := func() {
			for _, heal := range heal {
				heal()
			}
			heal = nil
		}
		defer healed() // of a test that has failed
		for _, i := range rnd.Perm(len(servers))[:f.failing] {
			heal = append(heal, f.befall(t, servers[i], gates[i]))
		}
		if f.failing < 3 {
			for range 2 {
				began := time.Now()
				h, err := red.Lock(t.Context())
				require.NoError(t, err)
				require.Less(t, time.Since(began), redTimeout+redSlack)
				require.Positive(t, h.Remaining())
				began = time.Now()
				require.NoError(t, h.Unlock(t.Context()))
				require.Less(t, time.Since(began), redSlack)
			}
		} else {
			began := time.Now()
			_, err := red.TryLock(t.Context())
			require.Error(t, err)
			require.Equal(t, !f.final, errors.Is(err, lock.ErrNotAcquired), "%v", err)
			require.Less(t, time.Since(began), 2*redTimeout+redSlack)
			if !f.one {
				began = time.Now()
				_, err = red.Lock(t.Context(), lock.Wait(3*redTimeout))
				require.Error(t, err)
				require.Equal(t, !f.final, errors.Is(err, lock.ErrNotAcquired), "%v", err)
				require.Less(t, time.Since(began), 4*redTimeout+redSlack)
			}
		}
		healed()
		// A connection that is silent is given up after some seconds.
		harness.Eventually(t, 20*time.Second, "the lock works again", func() bool {
			h, err := red.TryLock(t.Context())
			return err == nil && assert.NoError(t, h.Unlock(t.Context()))
		})
		redNothingStays(t, servers)
	})
}

// TestRedSplitVotesPause has others hold three of five members, so that each round gets two
// and gives them back. It does not hear that and try again at once.
func TestRedSplitVotesPause(t *testing.T) {
	redEach(t, 5, func(t *testing.T, servers []*testserver.Server) {
		red := redOf(redClients(t, servers), "orders")
		for _, c := range redClients(t, servers)[2:] {
			h, err := c.Lock("orders").Lock(t.Context())
			require.NoError(t, err)
			defer func() { require.NoError(t, h.Unlock(t.Context())) }()
		}
		harness.Do(t, servers[0].Addr, "CONFIG", "RESETSTAT")
		_, err := red.Lock(t.Context(), lock.Wait(2*time.Second))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		calls := harness.Commands(t, harness.Conn(t, servers[0].Addr))
		t.Logf("%d attempts", calls["evalsha"]/2)
		require.Greater(t, calls["evalsha"], 2*5)
		// Pauses of 4 ms, 8 and so on in the mean, and from the eighth on of 250.
		require.Less(t, calls["evalsha"], 2*60)
	})
}

// TestRedHoldIsLost has a majority fail under a hold.
func TestRedHoldIsLost(t *testing.T) {
	redEach(t, 5, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		red := redOf(clients, "orders")
		lost := func(h lock.Hold, reason lock.Reason, within time.Duration) {
			t.Helper()
			require.Equal(t, reason, multiLost(t, h, within+redSlack).Reason)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}

		h, err := red.Lock(t.Context())
		require.NoError(t, err)
		redEventually(t, servers, "orders", 5, redSlack)
		for _, s := range servers[1:4] {
			harness.Do(t, s.Addr, "DEL", "orders")
		}
		lost(h, lock.ReasonGone, redWatchdog/3)
		redEventually(t, servers, "orders", 0, redSlack)

		// Found by Unlock, which waits for no more answers than say that a majority is free.
		h, err = red.Lock(t.Context(), lock.Lease(time.Minute))
		require.NoError(t, err)
		redEventually(t, servers, "orders", 5, redSlack)
		for _, s := range servers {
			harness.Do(t, s.Addr, "DEL", "orders")
		}
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		redEventually(t, servers, "orders", 0, redSlack)

		h, err = red.Lock(t.Context())
		require.NoError(t, err)
		redEventually(t, servers, "orders", 5, redSlack)
		for _, s := range servers[:3] {
			s.Pause()
		}
		lost(h, lock.ReasonExpired, redWatchdog)
		redEventually(t, servers[3:], "orders", 0, redSlack)
		for _, s := range servers[:3] {
			s.Resume()
		}
		redNothingStays(t, servers)

		// A lease, extended, on the servers.
		h, err = red.Lock(t.Context(), lock.Lease(redWatchdog))
		require.NoError(t, err)
		redEventually(t, servers, "orders", 5, redSlack)
		require.NoError(t, h.Extend(t.Context(), time.Minute))
		require.Greater(t, h.Remaining(), 58*time.Second)
		require.Less(t, h.Remaining(), 60*time.Second-600*time.Millisecond)
		for _, s := range servers {
			harness.Eventually(t, redSlack, "extended", func() bool { return harness.PTTL(t, s.Addr, "orders") > 58_000 })
		}
		require.NoError(t, h.Unlock(t.Context()))
		redNothingStays(t, servers)
	})
}

// TestRedUnlockWhileServersAreStopped returns at once, and what was left on them goes when
// they continue.
func TestRedUnlockWhileServersAreStopped(t *testing.T) {
	redEach(t, 5, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		h, err := redOf(clients, "orders").Lock(t.Context(), lock.Lease(time.Minute))
		require.NoError(t, err)
		redEventually(t, servers, "orders", 5, redSlack)
		for _, s := range servers[2:4] {
			s.Pause()
		}
		began := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.Less(t, time.Since(began), redSlack)
		clients[0].Close() // what is left to be done is the business of the others
		require.Less(t, time.Since(began), 2*redSlack)
		other, err := redOf(redClients(t, []*testserver.Server{servers[0], servers[1], servers[4]}), "orders").TryLock(t.Context())
		require.NoError(t, err)
		require.NoError(t, other.Unlock(t.Context()))
		for _, s := range servers[2:4] {
			s.Resume()
		}
		redEventually(t, servers, "orders", 0, 10*time.Second) // long before the lease is over
		redNothingStays(t, servers)
	})
}

// TestRedContention has two sets of clients in one process want a lock all the time.
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
		t.Logf("%d and %d of %d; scripts for each: %.1f", got[0].Load(), got[1].Load(), rounds,
			float64(calls["evalsha"])/rounds)
		for i := range got {
			require.GreaterOrEqual(t, got[i].Load(), int64(rounds/5))
		}
		// Callers of one process do not try all at once, and mostly pass it on.
		require.Less(t, calls["evalsha"], rounds)
		redNothingStays(t, servers)
	})
}

// TestRedSameServerTwice refuses members that are on one server, however they came there.
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
				harness.Eventually(t, 5*time.Second, "what the first attempts took is given back", func() bool {
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

		// Who may not ask for the run id leaves a mark, which tells the same where both see it.
		harness.Do(t, servers[0].Addr, "ACL", "SETUSER", "guest", "on", ">guest", "+@all", "-info", "~*", "&*")
		refused(b.RedLock(atDatabase("guest", "guest", 0).Lock("orders"), atDatabase("guest", "guest", 0).Lock("orders"), b.Lock("orders")))
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

		// Clients that are closed: a minority, a majority, the one that has made the lock.
		red := redOf(clients, "orders")
		clients[2].Close()
		h, err := red.Lock(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
		h, err = red.Lock(t.Context())
		require.NoError(t, err)
		clients[1].Close() // under the hold
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

// TestRedClientClosed closes the client that has made the lock under a hold: the work under
// it may go on for a moment, so the keys stay until Unlock or the end of their leases.
func TestRedClientClosed(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		for lease, unlock := range map[time.Duration]bool{time.Minute: true, 2 * redWatchdog: false} {
			clients := redClients(t, servers, redlatch.WithWatchdogTimeout(lease))
			h, err := redOf(clients, "orders").Lock(t.Context())
			require.NoError(t, err)
			redEventually(t, servers, "orders", 3, redSlack)
			harness.Idle(t, clients...) // the last answer has arrived, too
			clients[0].Close()
			require.ErrorIs(t, context.Cause(h.Context()), lock.ErrClosed)
			require.Equal(t, 3, redExists(t, servers, "orders"))
			if unlock {
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrClosed)
				redEventually(t, servers, "orders", 1, redSlack) // that of the client itself
				harness.Do(t, servers[0].Addr, "DEL", "orders")
			}
			redEventually(t, servers, "orders", 0, lease+redSlack)
			runtime.KeepAlive(h) // one that is dropped is given back
		}
	})
}

// TestRedClosedWhileAsking closes the client in a round that has got its member. The
// connection stays open until that is given back.
func TestRedClosedWhileAsking(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		red := redOf(clients, "orders").WithTimeout(5 * time.Second)
		require.NoError(t, red.Do(t.Context(), multiNothing))
		redEventually(t, servers, "orders", 0, redSlack)
		for _, s := range servers[1:] {
			s.Pause()
			defer s.Resume()
		}
		failed := make(chan error)
		go func() {
			_, err := red.Lock(context.Background(), lock.Lease(time.Hour))
			failed <- err
		}()
		redEventually(t, servers[:1], "orders", 1, redSlack)
		closed := make(chan struct{})
		go func() {
			clients[0].Close()
			close(closed)
		}()
		require.ErrorIs(t, <-failed, lock.ErrClosed)
		redEventually(t, servers[:1], "orders", 0, redSlack)
		<-closed
	})
}

// TestRedBehaviours is what Redisson's tests asked of its RedLock, with a server for each
// member where Redisson put several on one.
func TestRedBehaviours(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		others := redClients(t, servers)
		red := redOf(clients, "orders")

		// Ten at a time, five times each; with a wait and a lease, tried again on failure.
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

		// And it is forced open.
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

// redWrapped is a user's Locker that is one of ours, which nobody can see.
type redWrapped struct{ l lock.Locker }

func (w redWrapped) Name() string { return w.l.Name() }

func (w redWrapped) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return w.l.Lock(ctx, opts...)
}

func (w redWrapped) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return w.l.TryLock(ctx, opts...)
}

func (w redWrapped) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return w.l.Do(ctx, fn, opts...)
}

// TestRedKinds makes red locks of every kind of lock: taken, kept, excluded, given back.
func TestRedKinds(t *testing.T) {
	kinds := map[string]func(c *redlatch.Client) lock.Locker{
		"lock":   func(c *redlatch.Client) lock.Locker { return c.Lock("orders") },
		"fenced": func(c *redlatch.Client) lock.Locker { return c.FencedLock("orders") },
		"spin":   func(c *redlatch.Client) lock.Locker { return c.SpinLock("orders") },
		"plain":  func(c *redlatch.Client) lock.Locker { return c.PlainLock("orders") },
		"fair":   func(c *redlatch.Client) lock.Locker { return c.FairLock("orders") },
		"write":  func(c *redlatch.Client) lock.Locker { return c.RWLock("orders").Write() },
		"read":   func(c *redlatch.Client) lock.Locker { return c.RWLock("orders").Read() },
		"user's": func(c *redlatch.Client) lock.Locker { return redWrapped{c.Lock("orders")} },
	}
	redEachOf(t, 3, slices.Sorted(maps.Keys(kinds)), strings.Clone, func(t *testing.T, servers []*testserver.Server, name string) {
		of := kinds[name]
		red := func(clients []*redlatch.Client) *multilock.Red {
			return clients[1].RedLock(of(clients[0]), of(clients[1]), of(clients[2])).WithTimeout(redWatchdog / 2)
		}
		mine, theirs := red(redClients(t, servers)), red(redClients(t, servers))
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
		for _, s := range servers {
			harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{orders}")
		}
		redNothingStays(t, servers)
	})
}

// TestRedNamedOwner takes the lock again under the same owner.
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

// TestRedCancelledOnServers ends the context while requests are under way, to two of which
// every fault happens.
func TestRedCancelledOnServers(t *testing.T) {
	type row struct {
		harness.Fault
		n int
	}
	var rows []row
	for _, f := range harness.Faults {
		rows = append(rows, row{f, 1}, row{f, 2}) // the acquisition, and the release
	}
	redEachOf(t, 3, rows, func(r row) string { return fmt.Sprint(r.Fault, " ", r.n) }, func(t *testing.T, servers []*testserver.Server, r row) {
		clients := make([]*redlatch.Client, len(servers))
		gates := make([]*harness.Gate, len(servers))
		for i, s := range servers {
			clients[i], gates[i] = harness.GatedClient(t, s)
		}
		red := redOf(clients, "orders").WithTimeout(redTimeout)
		require.NoError(t, red.Do(t.Context(), multiNothing))
		redEventually(t, servers, "orders", 0, redSlack)
		reached := make([]<-chan struct{}, 2)
		for i := range reached {
			reached[i] = gates[i].Arm(r.Fault, "EVALSHA", r.n)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			h, err := red.Lock(ctx)
			if err == nil {
				err = h.Unlock(ctx)
			}
			ended <- err
		}()
		harness.Reached(t, reached[0])
		cancel()
		select {
		case <-ended: // with whatever it is
		case <-time.After(10 * time.Second):
			require.FailNow(t, "it goes on")
		}
		for _, g := range gates {
			require.NoError(t, g.Open())
		}
		redNothingStays(t, servers)
	})
}
