package redlatch_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"maps"
	"net"
	"slices"
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
)

const (
	// longLease outlasts every failover in these tests.
	longLease = 15 * time.Second
	// killLease outlasts a failover that begins with a refused connection. Its first
	// renewal falls into the failover.
	killLease = 10 * time.Second
	// shortLease ends before a server that does not answer is replaced.
	shortLease = 2 * time.Second
	// soon bounds what neither an outage elsewhere nor a lost message may delay: the
	// safety poll is due after 5 s, and requests to a hanging server time out after 3
	// s.
	soon = 2500 * time.Millisecond
)

// outage takes a server down while its locks have holders and waiters, until a replica
// has taken over. lease outlasts that.
func (s service) outage(t *testing.T, lease time.Duration, down, up func(*testserver.Server)) {
	var l ledger
	victim := s.serving("any")
	require.NotNil(t, victim)
	holder, brief, mixed := s.open(t, lease), s.open(t, shortLease), s.open(t, 2*shortLease)
	waiting := s.open(t, longLease)

	kept := l.lock(t, holder, s.on(t, victim, "kept-", 10))
	lost := l.lock(t, brief, s.on(t, victim, "lost-", 5))
	// Renewed in batches with some whose renewal fails.
	others := l.lock(t, mixed, s.elsewhere(t, victim, "other-", 20))
	uncertain := l.lock(t, mixed, s.on(t, victim, "uncertain-", 3))
	released := l.lock(t, holder, s.on(t, victim, "released-", 3))
	names := namesOf(slices.Concat(lost, kept))
	waiters := l.wait(t, waiting, names)
	s.replicated(t, victim)

	stop := func() {}
	if s.partitioned {
		stop = l.handOvers(t, s, s.elsewhere(t, victim, "passed-", 12))
	}
	begin := time.Now()
	down(victim)
	var releasers sync.WaitGroup
	for _, h := range released { // released during the outage, and completed in the background
		releasers.Go(func() {
			if err := l.unlock(h); err != nil {
				assert.ErrorIs(t, err, lock.ErrIndeterminate)
			}
		})
	}
	s.takenOver(t, names[0], victim)
	replaced := time.Since(begin)
	for _, h := range lost {
		requireLost(t, longLease, h, lock.ReasonExpired)
	}
	first := requireServed(t, longLease, waiters[:len(lost)])
	t.Logf("another server after %v, the first waiter served after %v", replaced, first.Sub(begin))

	for _, h := range kept {
		harness.Eventually(t, lease, "a renewal", func() bool {
			return renewed(h, begin.Add(lease+time.Second)) || h.Context().Err() != nil
		})
		assert.NoError(t, context.Cause(h.Context()), h.Name())
	}
	stop()
	releasers.Wait()
	l.handOver(t, s, kept, waiters[len(lost):])
	for _, h := range others {
		assert.NoError(t, context.Cause(h.Context()), h.Name())
		assert.NoError(t, l.unlock(h))
	}
	for _, h := range uncertain {
		if err := l.unlock(h); err != nil {
			assert.ErrorIs(t, err, lock.ErrLost)
		}
	}
	up(victim)
	s.restored(t, &l)
}

func (s service) hangs(t *testing.T) {
	s.outage(t, longLease, (*testserver.Server).Pause, func(victim *testserver.Server) {
		victim.Resume()
		require.NoError(t, s.rejoin(victim))
	})
}

// keyLoss has a server replaced by one that lacks some locks.
func (s service) keyLoss(t *testing.T) {
	var l, excused ledger
	victim := s.serving("any")
	require.NotNil(t, victim)
	holder := s.open(t, longLease)
	kept := l.lock(t, holder, s.on(t, victim, "kept-", 3))
	s.replicated(t, victim)
	require.NoError(t, victim.CutReplicas())
	harness.Eventually(t, 10*time.Second, "no connected replica", func() bool {
		info, err := testserver.Info(victim.Addr, "replication")
		return err == nil && info["connected_slaves"] == "0"
	})
	forgotten := excused.lock(t, holder, s.on(t, victim, "forgotten-", 5))
	keptWaiters := l.wait(t, s.open(t, longLease), namesOf(kept))
	waiters := excused.wait(t, s.open(t, longLease), namesOf(forgotten))

	victim.Kill()
	s.takenOver(t, "any", victim)
	requireServed(t, longLease, waiters)
	for _, h := range forgotten {
		requireLost(t, longLease, h, lock.ReasonGone)
	}
	l.handOver(t, s, kept, keptWaiters)
	require.NoError(t, victim.Restart())
	require.NoError(t, s.rejoin(victim))
	s.restored(t, &l)
}

// All steps share one cluster because it takes time to form. The first outage alone is
// a smoke test: locks are renewed, passed on by message, and taken over by another
// node.
func TestClusterFailover(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.ReplicatedCluster(t, shared.Program)
		s := clusterService(t, cluster)
		t.Run("a primary is killed", func(t *testing.T) {
			s.outage(t, killLease, (*testserver.Server).Kill, func(old *testserver.Server) { require.NoError(t, old.Restart()) })
		})
		if testing.Short() {
			return
		}
		t.Run("locks of all slots", func(t *testing.T) { locksOfAllSlots(t, s) })
		t.Run("a slot moves", func(t *testing.T) { slotMoves(t, s, cluster) })
		t.Run("primary and replica swap roles", func(t *testing.T) { swapRoles(t, s) })
		t.Run("a primary hangs", func(t *testing.T) { s.hangs(t) })
		t.Run("a replica that lacks keys", func(t *testing.T) { s.keyLoss(t) })
		// A replica may keep such keys, which the following steps do not count.
		t.Run("a slot moves without its keys", func(t *testing.T) { slotIsLost(t, s, cluster) })
		t.Run("no node takes over", func(t *testing.T) { shardIsGone(t, s) })
	})
}

// A primary hangs for longer than a lease. The renewals that it does not answer delay
// none of the many others.
func TestHangingNodeLosesNoHoldElsewhere(t *testing.T) {
	harness.Full(t)
	const holds, timeout = 3000, 6 * time.Second
	harness.EachBusy(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		s := clusterService(t, cluster)
		victim := s.serving("any")
		require.NotNil(t, victim)
		c := s.open(t, timeout)
		of := map[*testserver.Server][]lock.Hold{}
		// Acquired in order, so that they are renewed together.
		for _, h := range takeAll(t, c, names(holds)) {
			at := s.serving(h.Name())
			of[at] = append(of[at], h)
		}
		hung := of[victim]
		delete(of, victim)
		others := slices.Concat(slices.Collect(maps.Values(of))...)
		require.Len(t, of, 2)

		victim.Pause()
		least := timeout
		for end := time.Now().Add(timeout * 3 / 2); time.Now().Before(end); <-time.After(timeout / 100) {
			for _, h := range others {
				least = min(least, h.Remaining())
			}
		}
		victim.Resume()
		t.Logf("of %d holds elsewhere the shortest had %v left", len(others), least)
		require.Positive(t, least, "a hold elsewhere was lost")
		for _, h := range hung {
			requireLost(t, timeout, h, lock.ReasonExpired)
		}
		unlockAll(t, others)
		for _, server := range cluster.Primaries {
			harness.NothingLeft(t, server.Addr)
		}
	})
}

func TestSentinelFailover(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := sentinelService(harness.Sentinels(t, shared.Program, 2, 3))
		t.Run("the primary is killed", func(t *testing.T) {
			s.outage(t, killLease, (*testserver.Server).Kill, func(old *testserver.Server) {
				require.NoError(t, old.Restart())
				if testing.Short() {
					require.NoError(t, s.rejoin(old))
				} else {
					requireUnused(t, s, old)
				}
			})
		})
		if testing.Short() {
			return
		}
		t.Run("the primary hangs", func(t *testing.T) { s.hangs(t) })
		t.Run("replicas that lack keys", func(t *testing.T) { s.keyLoss(t) })
	})
}

// requireUnused checks that a primary that returns empty is not used, neither before
// nor after it is a replica.
func requireUnused(t *testing.T, s service, old *testserver.Server) {
	var l ledger
	stop := l.handOvers(t, s, []string{"a", "b"})
	harness.Eventually(t, 30*time.Second, "the old primary is a replica", func() bool { return old.ReplicaOf() != "" })
	stop()
	assert.Empty(t, l.doubles)
	stats, err := testserver.Info(old.Addr, "commandstats")
	require.NoError(t, err)
	assert.NotEmpty(t, stats)
	for _, command := range []string{"eval", "evalsha"} {
		assert.NotContains(t, stats, "cmdstat_"+command, "used by a client")
	}
}

// locksOfAllSlots renews hundreds of locks on all primaries, and hands others over by
// message.
func locksOfAllSlots(t *testing.T, s service) {
	var l ledger
	const n = 300
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprint("spread-", i)
	}
	renewed := l.lock(t, s.open(t, shortLease), s.names(t, "renewed-", n, func(*testserver.Server) bool { return true }))
	holds := l.lock(t, s.open(t, longLease), names, lock.Lease(time.Hour))
	waiting := s.open(t, longLease)
	waiters := l.wait(t, waiting, names)
	connections := len(s.servers) / 2 // one to each primary
	if s.broadcasts {
		connections = 1
	}
	assert.Equal(t, connections, waiting.PubSub().Connections)
	l.handOver(t, s, holds, waiters)
	assert.GreaterOrEqual(t, waiting.PubSub().Messages, uint64(n))
	requireRenewed(t, shortLease, renewed...)
	for _, h := range renewed {
		assert.NoError(t, l.unlock(h))
	}
	s.restored(t, &l)
}

// slotMoves moves a slot with all its keys. For longer than a lease, some keys are on
// either side.
func slotMoves(t *testing.T, s service, cluster *testserver.Cluster) {
	var l ledger
	var renewed, handedOver []string
	for i := range 300 {
		renewed = append(renewed, fmt.Sprint("{moving}-", i))
	}
	for i := range 20 {
		handedOver = append(handedOver, fmt.Sprint("{moving}-passed-", i))
	}
	holds := l.lock(t, s.open(t, shortLease), renewed)
	toHandOver := l.lock(t, s.open(t, longLease), handedOver)
	waiters := l.wait(t, s.open(t, longLease), handedOver)
	var stops []func()
	for range 2 {
		c := s.open(t, shortLease)
		for range 2 {
			stops = append(stops, background(t, func(int) { assert.NoError(t, l.use(c, "{moving}-busy")) }))
		}
	}
	move, err := cluster.BeginMove(renewed[0])
	require.NoError(t, err)
	for _, name := range slices.Concat(renewed[:len(renewed)/2], handedOver[:len(handedOver)/2]) {
		require.NoError(t, move.Migrate(name))
	}
	requireRenewed(t, shortLease, holds...)
	require.NoError(t, move.MigrateAll())
	require.NoError(t, move.Finish())
	for _, stop := range stops {
		stop()
	}
	l.handOver(t, s, toHandOver, waiters)
	for _, h := range holds {
		assert.NoError(t, l.unlock(h))
	}
	s.restored(t, &l)
}

// slotIsLost moves a slot without its keys.
func slotIsLost(t *testing.T, s service, cluster *testserver.Cluster) {
	var l, excused ledger
	names := []string{"{lost}-0", "{lost}-1", "{lost}-2"}
	holds := excused.lock(t, s.open(t, 2*shortLease), names)
	waiters := excused.wait(t, s.open(t, longLease), names)
	move, err := cluster.BeginMove(names[0])
	require.NoError(t, err)
	require.NoError(t, move.Finish())
	for _, h := range holds {
		requireLost(t, 2*shortLease, h, lock.ReasonGone)
	}
	requireServed(t, 2*soon+time.Second, waiters)
	s.restored(t, &l)
}

// swapRoles promotes a replica, as before an upgrade: nothing is lost.
func swapRoles(t *testing.T, s service) {
	var l ledger
	old := s.serving("any")
	holds := l.lock(t, s.open(t, longLease), s.on(t, old, "kept-", 10))
	waiters := l.wait(t, s.open(t, longLease), namesOf(holds))
	for _, server := range s.servers {
		if server.ReplicaOf() == old.Addr {
			harness.Do(t, server.Addr, "CLUSTER", "FAILOVER")
		}
	}
	s.takenOver(t, "any", old)
	harness.Eventually(t, 30*time.Second, "both have their new role", s.healthy)
	l.handOver(t, s, holds, waiters)
	s.restored(t, &l)
}

// shardIsGone loses a primary and its replica for good: the others keep working.
func shardIsGone(t *testing.T, s service) {
	var l ledger
	const lease = 2 * shortLease
	victim := s.serving("any")
	c := s.open(t, lease)
	lost := l.lock(t, c, s.on(t, victim, "lost-", 30))
	others := l.lock(t, c, s.elsewhere(t, victim, "other-", 30))
	waiters := l.wait(t, s.open(t, lease), namesOf(lost[:3]))
	stop := l.handOvers(t, s, s.elsewhere(t, victim, "passed-", 12))
	for _, server := range s.servers {
		if server.ReplicaOf() == victim.Addr {
			server.Kill()
		}
	}
	begin := time.Now()
	victim.Kill()
	for range 10 {
		s.open(t, lease).Close()
	}
	for _, w := range waiters {
		select {
		case <-w.done:
			require.Error(t, w.err)
			assert.NotErrorIs(t, w.err, lock.ErrNotAcquired)
			assert.NotErrorIs(t, w.err, lock.ErrIndeterminate, "nothing could be sent")
			assert.GreaterOrEqual(t, w.served.Sub(begin), lease)
		case <-time.After(longLease):
			require.FailNow(t, "the waiter hangs")
		}
	}
	for _, h := range lost {
		requireLost(t, longLease, h, lock.ReasonExpired)
	}
	stop()
	for _, h := range others {
		assert.NoError(t, context.Cause(h.Context()), h.Name())
		assert.NoError(t, l.unlock(h))
	}
	assert.Empty(t, l.doubles)
}

// The primary becomes a replica, and the address leads to its successor, as behind a DNS name or a virtual
// address. The old primary stays up. Holds are renewed on the successor, waiters hear of releases there,
// and calls succeed.
func TestFailoverBehindOneAddress(t *testing.T) {
	harness.EachAlone(t, func(t *testing.T, shared *testserver.Server) {
		old, next := harness.Own(t, shared.Program), harness.Own(t, shared.Program)
		var addr atomic.Pointer[string]
		addr.Store(&old.Addr)
		open := func() *redlatch.Client {
			c, err := redlatch.New(t.Context(), rueidis.ClientOption{
				InitAddress: []string{"redis.example:6379"}, ForceSingleClient: true,
				DialCtxFn: func(ctx context.Context, _ string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
					return d.DialContext(ctx, "tcp", *addr.Load())
				},
			}, redlatch.WithWatchdogTimeout(longLease))
			require.NoError(t, err)
			t.Cleanup(c.Close)
			return c
		}
		c, other := open(), open()
		follow := func(replica, primary *testserver.Server) {
			host, port, err := net.SplitHostPort(primary.Addr)
			require.NoError(t, err)
			harness.Do(t, primary.Addr, "CONFIG", "SET", "repl-diskless-sync-delay", "0")
			harness.Do(t, replica.Addr, "REPLICAOF", host, port)
			harness.Eventually(t, longLease, "it replicates", func() bool { return replica.ReplicaOf() == primary.Addr })
		}
		follow(next, old)
		h, err := c.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		waited := make(chan error, 1)
		go func() { waited <- other.Lock("orders").Do(t.Context(), func(context.Context) error { return nil }) }()
		harness.Waits(t, 1, other)
		harness.Eventually(t, soon, "it is replicated", func() bool { return harness.Do(t, next.Addr, "EXISTS", "orders") == ":1" })

		harness.Do(t, next.Addr, "REPLICAOF", "NO", "ONE")
		follow(old, next)
		addr.Store(&next.Addr)
		began := time.Now()
		nothing := func(context.Context) error { return nil }
		harness.Eventually(t, 2*soon, "calls succeed", func() bool { return c.Lock("others").Do(t.Context(), nothing) == nil })
		require.Less(t, time.Since(began), longLease/3, "before a renewal")
		time.Sleep(time.Until(began.Add(2 * longLease / 3))) // the hold is renewed
		require.Greater(t, h.Remaining(), longLease/2)
		require.NoError(t, h.Unlock(t.Context()))
		select {
		case err := <-waited:
			require.NoError(t, err)
		case <-time.After(soon):
			t.Fatal("the waiter did not hear of the release")
		}
	})
}
