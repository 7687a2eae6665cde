package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
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

// redGated returns a Redlock that was used before, and the gates in front of its servers. Its leases exceed
// the time limit of the check that nothing is left.
func redGated(t *testing.T, servers []*testserver.Server, opts ...multilock.Option) (*multilock.Red, []*harness.Gate) {
	t.Helper()
	clients := make([]*redlatch.Client, len(servers))
	gates := make([]*harness.Gate, len(servers))
	for i, s := range servers {
		clients[i], gates[i] = harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(time.Minute))
	}
	red := redOf(clients, "orders", opts...)
	require.NoError(t, red.Do(t.Context(), multiNothing))
	redEventually(t, servers, "orders", 0, redSlack)
	return red, gates
}

// redKinds returns how many kinds an error has: others hold the lock, servers are unavailable, or the outcome is
// unknown.
func redKinds(err error) (n int) {
	for _, kind := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate} {
		if errors.Is(err, kind) {
			n++
		}
	}
	return n
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
		perServer := redTimeout
		if f.final {
			// The error says why the servers refuse only if their answers count, also of a busy machine.
			perServer = redSlack
		}
		red, gates := redGated(t, servers, multilock.Timeout(perServer))
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
				require.Equal(t, map[bool]int{false: 1}[f.final], redKinds(err), "%v", err)
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

// Others hold all members, or three of five, so that each round acquires two and releases them, perhaps after it
// has ended. The pauses of the waiter grow, and it does not react to its own releases.
func TestRedSplitVotesPause(t *testing.T) {
	for _, row := range []struct {
		held     int
		late     time.Duration // of the answers of the first two
		requests int           // of a round, to the first
	}{{5, 0, 1}, {3, 0, 2}, {3, 5 * time.Millisecond, 4}} { // a late vote is given back, and that is repeated
		t.Run(fmt.Sprint(row.held, " held, late by ", row.late), func(t *testing.T) {
			harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
				var clients []*redlatch.Client
				for i := range 5 {
					on := s
					if i > 0 {
						on = virtualServer(t)
					}
					if i < 2 {
						on.Latency = row.late
					}
					clients = append(clients, on.Client(t))
					if i >= 5-row.held {
						multiMust(t, on.Client(t).Lock("orders"), lock.Lease(time.Hour))
					}
				}
				red := redOf(clients, "orders")
				_, err := red.TryLock(t.Context()) // has the scripts loaded, and the servers identified
				require.ErrorIs(t, err, lock.ErrNotAcquired)
				time.Sleep(time.Second)

				s.Reset()
				_, err = red.Lock(t.Context(), lock.Wait(2*time.Second))
				harness.NotAcquired(t, err)
				time.Sleep(100 * time.Millisecond) // a round may be under way when the time is over
				// The mean pauses are 4 ms, 8 ms and so on, and 250 ms from the eighth on.
				require.Greater(t, s.Calls("evalsha"), 5*row.requests)
				require.Less(t, s.Calls("evalsha"), 45*row.requests)
			})
		})
	}
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
// that its context ends. The next one does not wait.
func TestRedFirstLockBesideASilentServer(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		red := redOf(redClients(t, servers, redlatch.WithWatchdogTimeout(time.Minute)), "orders", multilock.Timeout(10*time.Second))
		servers[2].Pause()
		defer servers[2].Resume()
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		defer cancel()
		h, err := red.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, ctx.Err())
		require.NoError(t, h.Unlock(t.Context()))

		began := time.Now()
		h, err = red.Lock(t.Context())
		require.NoError(t, err)
		require.Less(t, time.Since(began), 3*time.Second)
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// TestRedClosedWhileAsking closes the client in a round that has acquired its member. The
// connection stays open until the member is released.
func TestRedClosedWhileAsking(t *testing.T) {
	redEach(t, 3, func(t *testing.T, servers []*testserver.Server) {
		clients := redClients(t, servers)
		red := redOf(clients, "orders", multilock.Timeout(5*time.Second))
		require.NoError(t, red.Do(t.Context(), multiNothing))
		redEventually(t, servers, "orders", 0, redSlack)
		for _, s := range servers[1:] {
			s.Pause()
			defer s.Resume()
		}
		w := harness.StartLock(t, t.Context(), red, lock.Lease(time.Hour))
		redEventually(t, servers[:1], "orders", 1, redSlack)
		closed := make(chan struct{})
		go func() {
			clients[0].Close()
			close(closed)
		}()
		require.ErrorIs(t, w.End(), lock.ErrClosed)
		redEventually(t, servers[:1], "orders", 0, redSlack)
		<-closed
	})
}

// TestRedLateVotes has the request for the third of three members go wrong in every way, while the
// others decide: they are granted and released, or other callers hold them. The call returns before it
// knows of the third vote, which a server may have given by then. No vote stays.
func TestRedLateVotes(t *testing.T) {
	type row struct {
		harness.Fault
		refused bool
	}
	var rows []row
	for _, f := range harness.Faults {
		rows = append(rows, row{f, false}, row{f, true})
	}
	name := func(r row) string { return fmt.Sprint(r.Fault, map[bool]string{true: ", refused"}[r.refused]) }
	redEachOf(t, 3, rows, name, func(t *testing.T, servers []*testserver.Server, r row) {
		red, gates := redGated(t, servers, multilock.Timeout(20*time.Second)) // nothing waits for that long
		var others []lock.Hold
		if r.refused {
			for _, c := range redClients(t, servers[:2]) {
				others = append(others, multiMust(t, c.Lock("orders")))
			}
		}

		reached := gates[2].Arm(r.Fault, "EVALSHA", 1)
		began := time.Now()
		h, err := red.TryLock(t.Context())
		if r.refused {
			require.ErrorIs(t, err, lock.ErrNotAcquired)
		} else {
			require.NoError(t, errors.Join(err, h.Unlock(t.Context())))
		}
		require.Less(t, time.Since(began), redSlack)
		harness.Reached(t, reached)
		if r.Fault == harness.KeepReply {
			require.Equal(t, 1, redExists(t, servers[2:], "orders"), "the vote that no reply tells of")
		}
		require.NoError(t, gates[2].Open())
		for _, h := range others {
			require.NoError(t, h.Unlock(t.Context()))
		}
		redNothingStays(t, servers)
	})
}
