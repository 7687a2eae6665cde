package system_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
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
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
)

const (
	// longLease outlasts every failover in these tests.
	longLease = 15 * time.Second
	// killLease outlasts a failover that begins with a refused connection. Its first
	// renewal falls into the failover.
	killLease = 10 * time.Second
	// shortLease ends before a server that does not answer is replaced.
	shortLease = 2 * time.Second
	// soon bounds what neither an outage elsewhere nor a lost message may delay: the safety
	// poll is due after 5 s, and requests to a hanging server time out after 3 s.
	soon = 2500 * time.Millisecond
)

// service is a cluster or a set of servers watched by sentinels.
type service struct {
	url     string
	servers []*testserver.Server
	// serving returns the server that serves a name, nil if none does.
	serving func(name string) *testserver.Server
	// healthy reports whether everything is up and in sync.
	healthy func() bool
	// rejoin makes a returning server a replica.
	rejoin func(*testserver.Server) error
	// numsub is the subcommand of PUBSUB that counts subscribers.
	numsub string
	// partitioned is set if other servers serve some of the names.
	partitioned bool
	// broadcasts is set if messages about a name reach the subscribers of all servers. Otherwise they
	// reach those of the server of the name and of its replicas.
	broadcasts bool
}

func clusterService(t *testing.T, c *testserver.Cluster) service {
	t.Helper()
	s := service{servers: c.Nodes(), serving: c.Owner, healthy: c.Healthy, numsub: "SHARDNUMSUB", partitioned: true}
	if harness.PubSubModes(t, c)[0] == pubsub.Plain {
		s.numsub, s.broadcasts = "NUMSUB", true
	}
	s.rejoin = func(*testserver.Server) error { return nil } // a cluster node rejoins by itself
	s.url = "redis://" + c.Addrs()[0] + "?addr=" + strings.Join(c.Addrs()[1:], "&addr=")
	return s
}

func sentinelService(s *testserver.Sentinels) service {
	serving := func(string) *testserver.Server {
		primary := s.Primary()
		if primary == nil || !primary.Up() {
			return nil
		}
		if info, err := testserver.Info(primary.Addr, "replication"); err != nil || info["role"] != "master" {
			return nil
		}
		return primary
	}
	return service{
		url: s.URL(), servers: s.Servers, serving: serving, healthy: s.Healthy, rejoin: s.Rejoin, numsub: "NUMSUB",
	}
}

// open returns a client with that watchdog timeout.
func (s service) open(t *testing.T, timeout time.Duration) *redlatch.Client {
	t.Helper()
	c, err := redlatch.Open(t.Context(), s.url, redlatch.WithWatchdogTimeout(timeout), redlatch.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.Zero(t, c.Stats().PubSub.Listeners, "a waiter has left its subscription")
		c.Close()
	})
	return c
}

// on returns n names that a server serves.
func (s service) on(t *testing.T, server *testserver.Server, prefix string, n int) []string {
	t.Helper()
	return s.names(t, prefix, n, func(at *testserver.Server) bool { return at == server })
}

// elsewhere returns n names that other servers serve, none if there are no others.
func (s service) elsewhere(t *testing.T, server *testserver.Server, prefix string, n int) []string {
	t.Helper()
	if !s.partitioned {
		return nil
	}
	return s.names(t, prefix, n, func(at *testserver.Server) bool { return at != server })
}

func (s service) names(t *testing.T, prefix string, n int, want func(at *testserver.Server) bool) []string {
	t.Helper()
	var names []string
	for i := 0; len(names) < n; i++ {
		name := fmt.Sprint(prefix, i)
		at := s.serving(name)
		require.NotNil(t, at, name)
		if want(at) {
			names = append(names, name)
		}
	}
	return names
}

// hasSubscriber reports whether releases of a name have a subscriber.
func (s service) hasSubscriber(name string) bool {
	at := s.serving(name)
	if at == nil {
		return false
	}
	for _, server := range s.servers {
		if server != at && (!server.Up() || !s.broadcasts && server.ReplicaOf() != at.Addr) {
			continue
		}
		reply, err := testserver.Query(server.Addr, "PUBSUB", s.numsub, wire.LockChannel(name))
		if err == nil && reply[1] != "0" {
			return true
		}
	}
	return false
}

// replicated waits until the replicas of a server have all of its keys.
func (s service) replicated(t *testing.T, server *testserver.Server) {
	t.Helper()
	harness.Eventually(t, 10*time.Second, "the replicas have all keys", func() bool {
		replicas := 0
		for _, r := range s.servers {
			if r.ReplicaOf() != server.Addr {
				continue
			}
			if harness.Do(t, r.Addr, "DBSIZE") != harness.Do(t, server.Addr, "DBSIZE") {
				return false
			}
			replicas++
		}
		return replicas > 0
	})
}

// restored waits until the service is healthy, and checks that no keys are left and no lock had two holders.
func (s service) restored(t *testing.T, l *ledger) {
	t.Helper()
	harness.Eventually(t, 30*time.Second, "a healthy service", s.healthy)
	for _, server := range s.servers {
		if server.ReplicaOf() == "" {
			harness.NothingLeft(t, server.Addr)
		}
	}
	assert.Empty(t, l.doubles, "held twice")
}

// takenOver waits until another server has taken over from victim.
func (s service) takenOver(t *testing.T, name string, victim *testserver.Server) {
	t.Helper()
	harness.Eventually(t, 30*time.Second, "another server takes over", func() bool {
		by := s.serving(name)
		return by != nil && by != victim
	})
}

// ledger records the holders of locks as they report themselves.
type ledger struct {
	mu      sync.Mutex
	holds   map[string]lock.Hold
	doubles []string
}

func (l *ledger) took(h lock.Hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if other := l.holds[h.Name()]; other != nil && other.Remaining() > 0 {
		l.doubles = append(l.doubles, h.Name())
	}
	if l.holds == nil {
		l.holds = make(map[string]lock.Hold)
	}
	l.holds[h.Name()] = h
}

// unlock ends a hold, in the ledger first.
func (l *ledger) unlock(h lock.Hold) error {
	l.mu.Lock()
	if l.holds[h.Name()] == h {
		delete(l.holds, h.Name())
	}
	l.mu.Unlock()
	return h.Unlock(context.Background())
}

func (l *ledger) lock(t *testing.T, c *redlatch.Client, names []string, opts ...lock.Option) []lock.Hold {
	t.Helper()
	holds := make([]lock.Hold, len(names))
	for i, name := range names {
		var err error
		holds[i], err = c.Lock(name).Lock(t.Context(), opts...)
		require.NoError(t, err)
		l.took(holds[i])
	}
	return holds
}

// waiter is a caller that waits for one lock and releases it at once.
type waiter struct {
	name string
	*harness.Call[any]
}

// wait starts a waiter for each name and returns once they are subscribed. The client
// must have no other subscriptions.
func (l *ledger) wait(t *testing.T, c *redlatch.Client, names []string) (waiters []waiter) {
	t.Helper()
	for _, name := range names {
		waiters = append(waiters, waiter{name, harness.Start(t, t.Context(), func(context.Context) (any, error) {
			return nil, l.use(c, name)
		})})
	}
	harness.Eventually(t, 20*time.Second, "all waiters are subscribed and idle", func() bool {
		return c.Stats().PubSub.Subscribed == len(names) && harness.Waiting(len(names), c)
	})
	return waiters
}

// requireServed waits until all waiters have had their lock.
func requireServed(t *testing.T, within time.Duration, waiters []waiter) {
	t.Helper()
	end := time.Now().Add(within)
	for _, w := range waiters {
		require.NoError(t, w.EndWithin(max(time.Until(end), time.Millisecond)), w.name)
	}
}

// handOver releases every lock to its waiter, which a message must wake: no lease ends
// in time, and no poll is due.
func (l *ledger) handOver(t *testing.T, s service, holds []lock.Hold, waiters []waiter) {
	t.Helper()
	harness.Eventually(t, longLease, "all waiters are subscribed at the servers of their locks", func() bool {
		for _, w := range waiters {
			if !s.hasSubscriber(w.name) {
				return false
			}
		}
		return true
	})
	var wg sync.WaitGroup
	for _, h := range holds {
		wg.Go(func() { assert.NoError(t, l.unlock(h)) })
	}
	wg.Wait()
	requireServed(t, soon, waiters)
}

// handOvers repeatedly passes new locks from one client to another until it is stopped.
// No hand-over may be delayed by an outage elsewhere, unless the waiters may listen there.
func (l *ledger) handOvers(t *testing.T, s service, names []string) (stop func()) {
	from, to := s.open(t, longLease), s.open(t, longLease)
	var count int
	var slowest time.Duration
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		for ; ctx.Err() == nil; count++ {
			name := fmt.Sprintf("{%s}-%d", names[count%len(names)], count)
			begin := time.Now()
			h, err := from.Lock(name).Lock(context.Background(), lock.Lease(time.Hour))
			if !assert.NoError(t, err) {
				return
			}
			l.took(h)
			done := make(chan error, 1)
			go func() { done <- l.use(to, name) }()
			for !s.hasSubscriber(name) && time.Since(begin) < 2*soon {
				<-time.After(20 * time.Millisecond) // hasSubscriber queries many nodes
			}
			assert.NoError(t, l.unlock(h))
			assert.NoError(t, <-done)
			slowest = max(slowest, time.Since(begin))
		}
	})
	end := func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(end)
	return func() {
		end()
		t.Logf("%d hand-overs meanwhile, the slowest in %v", count, slowest)
		assert.Positive(t, count)
		most := soon
		if s.broadcasts {
			most += safetyPoll
		}
		assert.Less(t, slowest, most)
	}
}

// use locks and unlocks.
func (l *ledger) use(c *redlatch.Client, name string) error {
	h, err := c.Lock(name).Lock(context.Background())
	if err != nil {
		return err
	}
	l.took(h)
	return l.unlock(h)
}

// requireLost checks that a hold is lost within a time for the given reason.
func requireLost(t *testing.T, within time.Duration, h lock.Hold, reason lock.Reason) {
	t.Helper()
	select {
	case <-h.Context().Done():
	case <-time.After(within):
		require.FailNow(t, h.Name()+" is not lost")
	}
	var lost *lock.LostError
	require.ErrorAs(t, context.Cause(h.Context()), &lost)
	assert.Equal(t, reason, lost.Reason, h.Name())
	if reason == lock.ReasonExpired {
		assert.Error(t, lost.Err, "the error that prevented the renewal")
	}
	assert.Zero(t, h.Remaining())
	assert.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
}

func namesOf(holds []lock.Hold) []string {
	names := make([]string, len(holds))
	for i, h := range holds {
		names[i] = h.Name()
	}
	return names
}

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
	for _, h := range lost {
		requireLost(t, longLease, h, lock.ReasonExpired)
	}
	requireServed(t, longLease, waiters[:len(lost)])
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
		t.Run("primary and replica swap roles", func(t *testing.T) { swapRoles(t, s) })
		t.Run("a primary hangs", func(t *testing.T) { s.hangs(t) })
		t.Run("a replica that lacks keys", func(t *testing.T) { s.keyLoss(t) })
		// A replica may keep such keys, which the following steps do not count.
		t.Run("a slot moves without its keys", func(t *testing.T) { slotIsLost(t, s, cluster) })
		t.Run("no node takes over", func(t *testing.T) { shardIsGone(t, s) })
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
	waiting := s.open(t, lease)
	waiters := l.wait(t, waiting, namesOf(lost[:3]))
	stop := l.handOvers(t, s, s.elsewhere(t, victim, "passed-", 12))
	for _, server := range s.servers {
		if server.ReplicaOf() == victim.Addr {
			server.Kill()
		}
	}
	victim.Kill()
	for range 10 {
		s.open(t, lease).Close()
	}
	for _, h := range lost {
		requireLost(t, longLease, h, lock.ReasonExpired)
	}
	for _, w := range waiters {
		require.True(t, w.Running(), "it waits for the shard, too")
	}
	waiting.Close()
	for _, w := range waiters {
		err := w.End()
		assert.ErrorIs(t, err, lock.ErrClosed)
		assert.NotErrorIs(t, err, lock.ErrIndeterminate, "nothing could be sent")
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
			return connect(t, rueidis.ClientOption{
				InitAddress: []string{"redis.example:6379"}, ForceSingleClient: true,
				DialCtxFn: func(ctx context.Context, _ string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
					return d.DialContext(ctx, "tcp", *addr.Load())
				},
			}, redlatch.WithWatchdogTimeout(longLease))
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
		h := mustLock(t, c.Lock("orders"))
		waiter := harness.StartLock(t, t.Context(), other.Lock("orders"))
		harness.Waits(t, 1, other)
		harness.Eventually(t, soon, "it is replicated", func() bool { return harness.Do(t, next.Addr, "EXISTS", "orders") == ":1" })

		harness.Do(t, next.Addr, "REPLICAOF", "NO", "ONE")
		follow(old, next)
		addr.Store(&next.Addr)
		began := time.Now()
		harness.Eventually(t, 2*soon, "calls succeed", func() bool { return c.Lock("others").Do(t.Context(), nothing) == nil })
		require.Less(t, time.Since(began), longLease/3, "before a renewal")
		time.Sleep(time.Until(began.Add(2 * longLease / 3))) // the hold is renewed
		require.Greater(t, h.Remaining(), longLease/2)
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, waiter.EndWithin(soon), "the waiter did not hear of the release")
		require.NoError(t, waiter.Got().Unlock(t.Context()))
	})
}
