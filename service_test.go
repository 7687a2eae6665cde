package redlatch_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
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
	"github.com/redlatch/redlatch/pubsub"
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

// restored waits until the service is healthy, and checks that no keys are left and
// that no lock had two holders.
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
	name   string
	done   chan struct{}
	err    error
	served time.Time
}

// wait starts a waiter for each name and returns once they are subscribed. The client
// must have no other subscriptions.
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
	harness.Eventually(t, 20*time.Second, "all waiters are subscribed and idle", func() bool {
		return c.PubSub().Subscribed == len(names) && harness.Waiting(len(names), c)
	})
	return waiters
}

// requireServed waits until all waiters have had their lock and returns the time of the
// first.
func requireServed(t *testing.T, within time.Duration, waiters []*waiter) (first time.Time) {
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

// handOver releases every lock to its waiter, which a message must wake: no lease ends
// in time, and no poll is due.
func (l *ledger) handOver(t *testing.T, s service, holds []lock.Hold, waiters []*waiter) {
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

// background runs f repeatedly until the returned function is called or the test ends.
// stop waits for it.
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

// handOvers repeatedly passes new locks from one client to another until it is stopped.
// No hand-over may be delayed by an outage elsewhere, unless the waiters may listen there.
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
		for !s.hasSubscriber(name) && time.Since(begin) < 2*soon {
			<-time.After(20 * time.Millisecond) // hasSubscriber queries many nodes
		}
		assert.NoError(t, l.unlock(h))
		assert.NoError(t, <-done)
		count, slowest = n+1, max(slowest, time.Since(begin))
	})
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
