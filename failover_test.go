package redlatch_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// longLease outlives every failover here.
	longLease = 15 * time.Second
	// killLease outlives one that begins with a refused connection, and is renewed
	// for the first time in the middle of it.
	killLease = 10 * time.Second
	// shortLease ends before a server that does not answer is replaced.
	shortLease = 2 * time.Second
	// soon is the bound on what neither an outage elsewhere nor a lost message
	// may delay: the safety poll is due after 5 s, the answer of a server that
	// hangs is given up after 3 s.
	soon = 2500 * time.Millisecond
)

// service is a cluster, or what sentinels watch, to the tests of both.
type service struct {
	urls    []string
	servers []*testserver.Server
	// serving returns the server that answers for a name, nil if none does.
	serving func(name string) *testserver.Server
	// whole reports whether everything is up and in step.
	whole func() bool
	// rejoin makes a server that was away a replica.
	rejoin func(*testserver.Server) error
	// numsub is PUBSUB's subcommand that counts subscribers.
	numsub string
	// parts is set if there are names that another server serves.
	parts bool
}

func clusterService(c *testserver.Cluster) service {
	s := service{servers: c.Nodes(), serving: c.Owner, whole: c.Whole, numsub: "SHARDNUMSUB", parts: true}
	s.rejoin = func(*testserver.Server) error { return nil } // it knows its place
	for _, addr := range c.Addrs() {
		s.urls = append(s.urls, "redis://"+addr)
	}
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
		urls: []string{s.URL()}, servers: s.Servers, serving: serving, whole: s.Whole, rejoin: s.Rejoin, numsub: "NUMSUB",
	}
}

// open returns a client of that watchdog timeout.
func (s service) open(t *testing.T, timeout time.Duration) *redlatch.Client {
	t.Helper()
	opt, err := redlatch.ParseURL(s.urls...)
	require.NoError(t, err)
	c, err := redlatch.New(t.Context(), opt, redlatch.WithWatchdogTimeout(timeout), redlatch.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.Zero(t, c.PubSub().Listeners, "a waiter has left its subscription")
		c.Close()
	})
	return c
}

// on returns n names that a server serves.
func (s service) on(t *testing.T, server *testserver.Server, prefix string, n int) []string {
	t.Helper()
	return s.names(t, prefix, n, func(at *testserver.Server) bool { return at == server })
}

// elsewhere returns n names that other servers serve, or none if there are no
// others.
func (s service) elsewhere(t *testing.T, server *testserver.Server, prefix string, n int) []string {
	t.Helper()
	if !s.parts {
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

// heard reports whether somebody hears of the releases of a name: the server
// that has it tells its own subscribers and those of its replicas.
func (s service) heard(name string) bool {
	at := s.serving(name)
	for _, server := range s.servers {
		if at == nil || server != at && (!server.Up() || server.ReplicaOf() != at.Addr) {
			continue
		}
		reply, err := testserver.Query(server.Addr, "PUBSUB", s.numsub, wire.LockChannel(name))
		if err == nil && reply[1] != "0" {
			return true
		}
	}
	return false
}

// replicated waits until the replicas of a server have what it has.
func (s service) replicated(t *testing.T, server *testserver.Server) {
	t.Helper()
	harness.Eventually(t, 10*time.Second, "the replicas have everything", func() bool {
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

// restored waits until everything is in order again, and checks that nothing is
// left and nobody has held anything twice.
func (s service) restored(t *testing.T, l *ledger) {
	t.Helper()
	harness.Eventually(t, 30*time.Second, "everything is up and in step", s.whole)
	for _, server := range s.servers {
		if server.ReplicaOf() == "" {
			harness.NothingLeft(t, server.Addr)
		}
	}
	assert.Empty(t, l.doubles, "held twice")
}

// takenOver waits until another server serves what victim did.
func (s service) takenOver(t *testing.T, name string, victim *testserver.Server) {
	t.Helper()
	harness.Eventually(t, 30*time.Second, "another server takes over", func() bool {
		by := s.serving(name)
		return by != nil && by != victim
	})
}

// ledger sees who holds what, as they say themselves.
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

// waiter is somebody who waits for one lock and gives it back at once.
type waiter struct {
	name   string
	done   chan struct{}
	err    error
	served time.Time
}

// wait starts a waiter for each name and returns once they are subscribed. The
// client has no other subscriptions.
func (l *ledger) wait(t *testing.T, c *redlatch.Client, names []string) []*waiter {
	t.Helper()
	waiters := make([]*waiter, len(names))
	for i, name := range names {
		w := &waiter{name: name, done: make(chan struct{})}
		waiters[i] = w
		go func() {
			defer close(w.done)
			w.err = l.use(c, name)
			w.served = time.Now()
		}()
	}
	harness.Eventually(t, 20*time.Second, "all waiters are subscribed, and look no more", func() bool {
		return c.PubSub().Subscribed == len(names) && harness.Waiting(len(names), c)
	})
	return waiters
}

// served waits until all waiters have had their lock and returns when the first
// of them had.
func served(t *testing.T, within time.Duration, waiters []*waiter) (first time.Time) {
	t.Helper()
	timeout := time.After(within)
	for _, w := range waiters {
		select {
		case <-w.done:
			assert.NoError(t, w.err, w.name)
			if first.IsZero() || w.served.Before(first) {
				first = w.served
			}
		case <-timeout:
			require.FailNow(t, "the waiter for "+w.name+" is not served within "+within.String())
		}
	}
	return first
}

// pass hands every lock over to its waiter, who hears of it by message: no lease
// ends meanwhile, and no poll is due.
func (l *ledger) pass(t *testing.T, s service, holds []lock.Hold, waiters []*waiter) {
	t.Helper()
	harness.Eventually(t, longLease, "all waiters are subscribed where their locks are", func() bool {
		for _, w := range waiters {
			if !s.heard(w.name) {
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
	served(t, soon, waiters)
}

// background runs f again and again until the returned function is called, or
// the test ends, and that waits for it.
func background(t *testing.T, f func(n int)) (stop func()) {
	stopped := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stopped:
				return
			default:
				f(n)
			}
		}
	})
	stop = sync.OnceFunc(func() {
		close(stopped)
		running.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// handOvers hands fresh locks over from one client to another until it is
// stopped. None takes as long as if an outage elsewhere disturbed it.
func (l *ledger) handOvers(t *testing.T, s service, names []string) (stop func()) {
	from, to := s.open(t, longLease), s.open(t, longLease)
	var count int
	var slowest time.Duration
	end := background(t, func(n int) {
		name := fmt.Sprintf("{%s}-%d", names[n%len(names)], n)
		begin := time.Now()
		h, err := from.Lock(name).Lock(context.Background(), lock.Lease(time.Hour))
		if !assert.NoError(t, err) {
			return
		}
		l.took(h)
		done := make(chan error, 1)
		go func() { done <- l.use(to, name) }()
		for !s.heard(name) && time.Since(begin) < 2*soon {
			<-time.After(20 * time.Millisecond) // it asks many nodes
		}
		assert.NoError(t, l.unlock(h))
		assert.NoError(t, <-done)
		count, slowest = n+1, max(slowest, time.Since(begin))
	})
	return func() {
		end()
		t.Logf("%d hand-overs meanwhile, the slowest in %v", count, slowest)
		assert.Positive(t, count)
		assert.Less(t, slowest, soon)
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

// isLost checks that a hold ends within a time, and why.
func isLost(t *testing.T, within time.Duration, h lock.Hold, reason lock.Reason) {
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
		assert.Error(t, lost.Err, "what kept the lease from being renewed")
	}
	assert.Zero(t, h.Remaining())
	assert.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
}

// outage takes a server down while locks on it are held and waited for, until
// its replica has taken over, which lease outlives.
func (s service) outage(t *testing.T, lease time.Duration, down, up func(*testserver.Server)) {
	var l ledger
	victim := s.serving("any")
	require.NotNil(t, victim)
	holder, brief, mixed := s.open(t, lease), s.open(t, shortLease), s.open(t, 2*shortLease)
	waiting := s.open(t, longLease)

	kept := l.lock(t, holder, s.on(t, victim, "kept-", 10))
	lost := l.lock(t, brief, s.on(t, victim, "lost-", 5))
	// Renewed together with some that cannot be.
	others := l.lock(t, mixed, s.elsewhere(t, victim, "other-", 20))
	doubtful := l.lock(t, mixed, s.on(t, victim, "doubtful-", 3))
	given := l.lock(t, holder, s.on(t, victim, "given-", 3))
	names := namesOf(slices.Concat(lost, kept))
	waiters := l.wait(t, waiting, names)
	s.replicated(t, victim)

	stop := func() {}
	if s.parts {
		stop = l.handOvers(t, s, s.elsewhere(t, victim, "passed-", 12))
	}
	begin := time.Now()
	down(victim)
	var givers sync.WaitGroup
	for _, h := range given { // back in the middle of it, which ends in the background
		givers.Go(func() {
			if err := l.unlock(h); err != nil {
				assert.ErrorIs(t, err, lock.ErrIndeterminate)
			}
		})
	}
	s.takenOver(t, names[0], victim)
	replaced := time.Since(begin)
	for _, h := range lost {
		isLost(t, longLease, h, lock.ReasonExpired)
	}
	first := served(t, longLease, waiters[:len(lost)])
	t.Logf("another server after %v, the first waiter served after %v", replaced, first.Sub(begin))

	for _, h := range kept {
		harness.Eventually(t, lease, "a renewal has come through", func() bool {
			return renewed(h, begin.Add(lease+time.Second)) || h.Context().Err() != nil
		})
		assert.NoError(t, context.Cause(h.Context()), h.Name())
	}
	stop()
	givers.Wait()
	l.pass(t, s, kept, waiters[len(lost):])
	for _, h := range others {
		assert.NoError(t, context.Cause(h.Context()), h.Name())
		assert.NoError(t, l.unlock(h))
	}
	for _, h := range doubtful {
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

// amnesia has a server replaced by one that has not heard of some locks.
func (s service) amnesia(t *testing.T) {
	var l, excused ledger
	victim := s.serving("any")
	require.NotNil(t, victim)
	holder := s.open(t, longLease)
	kept := l.lock(t, holder, s.on(t, victim, "kept-", 3))
	s.replicated(t, victim)
	require.NoError(t, victim.CutReplicas())
	harness.Eventually(t, 10*time.Second, "no replica is connected", func() bool {
		info, err := testserver.Info(victim.Addr, "replication")
		return err == nil && info["connected_slaves"] == "0"
	})
	forgotten := excused.lock(t, holder, s.on(t, victim, "forgotten-", 5))
	keptWaiters := l.wait(t, s.open(t, longLease), namesOf(kept))
	waiters := excused.wait(t, s.open(t, longLease), namesOf(forgotten))

	victim.Kill()
	s.takenOver(t, "any", victim)
	served(t, longLease, waiters)
	for _, h := range forgotten {
		isLost(t, longLease, h, lock.ReasonGone)
	}
	l.pass(t, s, kept, keptWaiters)
	require.NoError(t, victim.Restart())
	require.NoError(t, s.rejoin(victim))
	s.restored(t, &l)
}

func namesOf(holds []lock.Hold) []string {
	names := make([]string, len(holds))
	for i, h := range holds {
		names[i] = h.Name()
	}
	return names
}

// One cluster goes through it all: it takes its time to form. The first outage alone is a
// smoke test: locks are renewed, passed on by message, and taken over by another node.
func TestClusterFailover(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.ReplicatedCluster(t, shared.Program)
		s := clusterService(cluster)
		t.Run("a primary is killed", func(t *testing.T) {
			s.outage(t, killLease, (*testserver.Server).Kill, func(old *testserver.Server) { require.NoError(t, old.Restart()) })
		})
		if testing.Short() {
			return
		}
		t.Run("locks of all slots", func(t *testing.T) { locksOfAllSlots(t, s) })
		t.Run("a slot moves", func(t *testing.T) { slotMoves(t, s, cluster) })
		t.Run("primary and replica change places", func(t *testing.T) { changePlaces(t, s) })
		t.Run("a primary hangs", func(t *testing.T) { s.hangs(t) })
		t.Run("a replica that lacks keys", func(t *testing.T) { s.amnesia(t) })
		// A replica may keep such keys: what follows does not count them.
		t.Run("a slot moves without its keys", func(t *testing.T) { slotIsLost(t, s, cluster) })
		t.Run("nobody takes over", func(t *testing.T) { shardIsGone(t, s) })
	})
}

// A primary hangs for longer than a lease. The renewals that it does not answer
// hold up none of the others, of which there are many.
func TestANodeThatHangsCostsNoHoldElsewhere(t *testing.T) {
	harness.Full(t)
	const holds, timeout = 3000, 6 * time.Second
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		s := clusterService(cluster)
		victim := s.serving("any")
		require.NotNil(t, victim)
		c := s.open(t, timeout)
		of := map[*testserver.Server][]lock.Hold{}
		// Taken in turn, and so renewed together.
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
		t.Logf("of %d holds elsewhere one had %v left, none less", len(others), least)
		require.Positive(t, least, "a hold elsewhere was lost")
		for _, h := range hung {
			isLost(t, timeout, h, lock.ReasonExpired)
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
					returns(t, s, old)
				}
			})
		})
		if testing.Short() {
			return
		}
		t.Run("the primary hangs", func(t *testing.T) { s.hangs(t) })
		t.Run("replicas that lack keys", func(t *testing.T) { s.amnesia(t) })
	})
}

// returns checks that a primary that comes back, with nothing in it, is not used
// until it is a replica, nor then.
func returns(t *testing.T, s service, old *testserver.Server) {
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

// Hundreds of locks, on all primaries: handed over by message, and renewed.
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
	assert.Equal(t, 3, waiting.PubSub().Connections)
	l.pass(t, s, holds, waiters)
	assert.GreaterOrEqual(t, waiting.PubSub().Messages, uint64(n))
	areRenewed(t, shortLease, renewed...)
	for _, h := range renewed {
		assert.NoError(t, l.unlock(h))
	}
	s.restored(t, &l)
}

// slotMoves moves a slot with all its keys, and lets it take longer than a lease
// while some keys are on either side.
func slotMoves(t *testing.T, s service, cluster *testserver.Cluster) {
	var l ledger
	var renewed, passed []string
	for i := range 300 {
		renewed = append(renewed, fmt.Sprint("{moving}-", i))
	}
	for i := range 20 {
		passed = append(passed, fmt.Sprint("{moving}-passed-", i))
	}
	holds := l.lock(t, s.open(t, shortLease), renewed)
	toPass := l.lock(t, s.open(t, longLease), passed)
	waiters := l.wait(t, s.open(t, longLease), passed)
	var stops []func()
	for range 2 {
		c := s.open(t, shortLease)
		for range 2 {
			stops = append(stops, background(t, func(int) { assert.NoError(t, l.use(c, "{moving}-busy")) }))
		}
	}
	move, err := cluster.BeginMove(renewed[0])
	require.NoError(t, err)
	for _, name := range slices.Concat(renewed[:len(renewed)/2], passed[:len(passed)/2]) {
		require.NoError(t, move.Migrate(name))
	}
	areRenewed(t, shortLease, holds...)
	require.NoError(t, move.MigrateAll())
	require.NoError(t, move.Finish())
	for _, stop := range stops {
		stop()
	}
	l.pass(t, s, toPass, waiters)
	for _, h := range holds {
		assert.NoError(t, l.unlock(h))
	}
	s.restored(t, &l)
}

// slotIsLost moves a slot and leaves its keys behind.
func slotIsLost(t *testing.T, s service, cluster *testserver.Cluster) {
	var l, excused ledger
	names := []string{"{lost}-0", "{lost}-1", "{lost}-2"}
	holds := excused.lock(t, s.open(t, 2*shortLease), names)
	waiters := excused.wait(t, s.open(t, longLease), names)
	move, err := cluster.BeginMove(names[0])
	require.NoError(t, err)
	require.NoError(t, move.Finish())
	for _, h := range holds {
		isLost(t, 2*shortLease, h, lock.ReasonGone)
	}
	served(t, 2*soon+time.Second, waiters)
	s.restored(t, &l)
}

// changePlaces makes a replica the primary, as before an upgrade: nothing is
// lost.
func changePlaces(t *testing.T, s service) {
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
	harness.Eventually(t, 30*time.Second, "both know their new place", s.whole)
	l.pass(t, s, holds, waiters)
	s.restored(t, &l)
}

// shardIsGone loses a primary with its replica, for good: the rest goes on.
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
		isLost(t, longLease, h, lock.ReasonExpired)
	}
	stop()
	for _, h := range others {
		assert.NoError(t, context.Cause(h.Context()), h.Name())
		assert.NoError(t, l.unlock(h))
	}
	assert.Empty(t, l.doubles)
}
