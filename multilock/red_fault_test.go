package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
)

// redFault is a way in which a server fails.
type redFault struct {
	name string
	// inject makes the server fail and returns a function that heals it.
	inject func(t *testing.T, s *testserver.Server, g *harness.Gate) (heal func())
	final  bool // it does not pass by itself
	one    bool // it affects one request
}

var redFaults = []redFault{
	{name: "killed", inject: func(t *testing.T, s *testserver.Server, _ *harness.Gate) func() {
		s.Kill()
		return func() { require.NoError(t, s.Restart()) }
	}},
	{name: "stopped", inject: func(_ *testing.T, s *testserver.Server, _ *harness.Gate) func() {
		s.Pause()
		return s.Resume
	}},
	{name: "silent", one: true, inject: redLose(harness.Silence)},
	{name: "reply lost", one: true, inject: redLose(harness.LoseReply)},
	{name: "refuses", final: true, inject: func(t *testing.T, s *testserver.Server, _ *harness.Gate) func() {
		harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "-evalsha", "-eval")
		return func() { harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "+@all") }
	}},
	{name: "wrong type", final: true, inject: func(t *testing.T, s *testserver.Server, _ *harness.Gate) func() {
		harness.Do(t, s.Addr, "SET", "orders", "something")
		return func() { harness.Do(t, s.Addr, "DEL", "orders") }
	}},
	{name: "taken", inject: func(t *testing.T, s *testserver.Server, _ *harness.Gate) func() {
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

// TestRedServersFail injects every fault into one, two and three of five servers.
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
			// The leases exceed the time limit of the check that nothing is left.
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
		defer healed() // after a failed test
		for _, i := range rnd.Perm(len(servers))[:f.failing] {
			heal = append(heal, f.inject(t, servers[i], gates[i]))
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
			failed := func(err error) {
				t.Helper()
				kinds := slices.DeleteFunc([]error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate},
					func(kind error) bool { return !errors.Is(err, kind) })
				require.Len(t, kinds, map[bool]int{false: 1}[f.final], "%v", err)
			}
			began := time.Now()
			_, err := red.TryLock(t.Context())
			require.Error(t, err)
			failed(err)
			require.Less(t, time.Since(began), 2*redTimeout+redSlack)
			if !f.one {
				began = time.Now()
				_, err = red.Lock(t.Context(), lock.Wait(3*redTimeout))
				require.Error(t, err)
				failed(err)
				require.Less(t, time.Since(began), 4*redTimeout+redSlack)
			}
		}
		healed()
		// A silent connection is closed after some seconds.
		harness.Eventually(t, 20*time.Second, "the lock works again", func() bool {
			h, err := red.TryLock(t.Context())
			return err == nil && assert.NoError(t, h.Unlock(t.Context()))
		})
		redNothingStays(t, servers)
	})
}

// slowMember is a member that answers late.
type slowMember struct {
	*engine.Lock
	late time.Duration
}

func (m slowMember) TryMember(ctx context.Context, lease time.Duration) (engine.MemberHold, error) {
	time.Sleep(m.late)
	return m.Lock.TryMember(ctx, lease)
}

// TestRedSplitVotesPause has others hold three of five members, so that each round acquires two and
// releases them, perhaps after it has ended. The waiter must not react to its own releases.
func TestRedSplitVotesPause(t *testing.T) {
	lates := []time.Duration{0, 5 * time.Millisecond}
	redEachOf(t, 5, lates, time.Duration.String, func(t *testing.T, servers []*testserver.Server, late time.Duration) {
		var members []multilock.RedMember
		for i, c := range redClients(t, servers) {
			m := slowMember{Lock: engine.Find(c.Lock("orders"))}
			if i < 2 {
				m.late = late
			}
			members = append(members, m)
		}
		red := multilock.NewRedOf(multilock.NewShared(engine.New(members[0].Session())), members).WithTimeout(redWatchdog / 2)
		for _, c := range redClients(t, servers)[2:] {
			h, err := c.Lock("orders").Lock(t.Context())
			require.NoError(t, err)
			defer func() { require.NoError(t, h.Unlock(t.Context())) }()
		}
		harness.Do(t, servers[0].Addr, "CONFIG", "RESETSTAT")
		_, err := red.Lock(t.Context(), lock.Wait(2*time.Second))
		harness.NotAcquired(t, err) // a round may be under way when the time is over
		calls := harness.Commands(t, harness.Conn(t, servers[0].Addr))
		t.Logf("%d attempts", calls["evalsha"]/2)
		require.Greater(t, calls["evalsha"], 2*5)
		// The mean pauses are 4 ms, 8 ms and so on, and 250 ms from the eighth on.
		require.Less(t, calls["evalsha"], 2*45)
	})
}

// TestRedHoldIsLost has a majority fail during a hold.
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

		// Unlock detects the loss. It waits only until a majority is known to be free.
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

		// Extend extends the leases on the servers.
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

// TestRedUnlockWhileServersAreStopped checks that Unlock returns at once and that the members
// are released when the servers continue.
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
		clients[0].Close() // the rest runs in the background
		require.Less(t, time.Since(began), 2*redSlack)
		other, err := redOf(redClients(t, []*testserver.Server{servers[0], servers[1], servers[4]}), "orders").TryLock(t.Context())
		require.NoError(t, err)
		require.NoError(t, other.Unlock(t.Context()))
		for _, s := range servers[2:4] {
			s.Resume()
		}
		redEventually(t, servers, "orders", 0, 10*time.Second) // long before the lease expires
		redNothingStays(t, servers)
	})
}

// The first acquisition meets a silent server. It waits for the identity of that server, but not so long
// that its context ends.
func TestRedFirstLockBesideASilentServer(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		red := redOf(redClients(t, servers, redlatch.WithWatchdogTimeout(time.Minute)), "orders").WithTimeout(10 * time.Second)
		servers[2].Pause()
		defer servers[2].Resume()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		h, err := red.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, ctx.Err())
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// TestRedClientClosed closes the client of the Redlock during a hold. The work may not have
// stopped yet, so the keys stay until Unlock or the end of their leases.
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
				redEventually(t, servers, "orders", 1, redSlack) // the member of that client
				harness.Do(t, servers[0].Addr, "DEL", "orders")
			}
			redEventually(t, servers, "orders", 0, lease+redSlack)
			runtime.KeepAlive(h) // a dropped hold is released
		}
	})
}

// TestRedClosedWhileAsking closes the client in a round that has acquired its member. The
// connection stays open until the member is released.
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

// TestRedCancelledOnServers cancels the context while requests are under way, and injects
// every fault into two servers.
func TestRedCancelledOnServers(t *testing.T) {
	type row struct {
		harness.Fault
		n int
	}
	var rows []row
	for _, f := range harness.Faults {
		rows = append(rows, row{f, 1}, row{f, 2}) // during the acquisition and during the release
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
		case <-ended: // any result is accepted
		case <-time.After(10 * time.Second):
			require.FailNow(t, "it does not return")
		}
		for _, g := range gates {
			require.NoError(t, g.Open())
		}
		redNothingStays(t, servers)
	})
}
