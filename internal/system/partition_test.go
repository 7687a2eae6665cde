package system_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// partition is a primary whose side of the network can be cut off from its replica, the sentinels and most clients.
type partition struct {
	*testserver.Sentinels
	primary, replica *testserver.Server
	in, out          *testserver.Proxy // in front of the primary, and of a sentinel: for the other side

	near, far *redlatch.Client // on the side of the primary, and on the other side
}

// newPartition returns a network that is whole. Holds have that lease.
func newPartition(t *testing.T, program string, lease time.Duration) *partition {
	t.Helper()
	s := harness.Sentinels(t, program, 1, 3)
	p := &partition{Sentinels: s, primary: s.Servers[0], replica: s.Servers[1]}
	p.in = testserver.NewProxy(t, p.primary.Addr)
	p.out = testserver.NewProxy(t, s.Sentinels[0].Addr)

	host, port, err := net.SplitHostPort(p.in.Addr)
	require.NoError(t, err)
	harness.Do(t, p.replica.Addr, "REPLICAOF", host, port)
	for _, sentinel := range s.Sentinels {
		harness.Do(t, sentinel.Addr, "SENTINEL", "REMOVE", "main")
		harness.Do(t, sentinel.Addr, "SENTINEL", "MONITOR", "main", host, port, "2")
		harness.Do(t, sentinel.Addr, "SENTINEL", "SET", "main", "down-after-milliseconds", "2000")
		harness.Do(t, sentinel.Addr, "SENTINEL", "SET", "main", "failover-timeout", "5000")
	}
	want := fmt.Sprintf("status=ok,address=%s,slaves=1,sentinels=3", p.in.Addr)
	harness.Eventually(t, 30*time.Second, "the sentinels know all servers", func() bool {
		for _, sentinel := range s.Sentinels {
			info, err := testserver.Info(sentinel.Addr, "sentinel")
			if err != nil || !strings.HasSuffix(info["master0"], want) {
				return false
			}
		}
		return p.replica.ReplicaOf() == p.in.Addr
	})

	p.far = open(t, s, lease, func(addr string) string { return addr })
	p.near = open(t, s, lease, func(addr string) string {
		switch addr {
		case p.in.Addr:
			return p.primary.Addr
		case p.replica.Addr: // when it is the primary
			return addr
		default:
			return p.out.Addr
		}
	})
	return p
}

// set cuts the side of the primary off, or makes the network whole.
func (p *partition) set(faults testserver.Fault) {
	p.in.Set(faults)
	p.out.Set(faults)
}

// open returns a client of the sentinels, which connects to what route returns for an address.
func open(t *testing.T, s *testserver.Sentinels, lease time.Duration, route func(addr string) string) *redlatch.Client {
	t.Helper()
	opt, err := redlatch.ParseURL(s.URL())
	require.NoError(t, err)
	opt.DialCtxFn = func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
		return d.DialContext(ctx, "tcp", route(addr))
	}
	c, err := redlatch.New(t.Context(), opt, redlatch.WithWatchdogTimeout(lease), redlatch.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// replicated waits until the replica has what the primary has.
func (p *partition) replicated(t *testing.T) {
	t.Helper()
	harness.Eventually(t, soon, "the replica has it", func() bool {
		info, err := testserver.Info(p.replica.Addr, "replication")
		main, err2 := testserver.Info(p.primary.Addr, "replication")
		return err == nil && err2 == nil && info["slave_repl_offset"] == main["master_repl_offset"]
	})
}

// A primary that is cut off goes on to serve its side, and the other side gets another primary. So two have the lock until
// the network is whole again, and only the tokens tell which of them is late.
func TestPrimaryOnTheSmallerSide(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		if testing.Short() {
			t.Skip("a failover takes several seconds")
		}
		p := newPartition(t, shared.Program, 2*shortLease)
		h, err := p.near.FencedLock("orders").Lock(t.Context())
		require.NoError(t, err)
		p.replicated(t)
		waiting := harness.StartLock(t, t.Context(), p.far.FencedLock("orders"))

		p.set(testserver.Stall)
		later := waiting.Got()
		require.NoError(t, context.Cause(h.Context()), "the old primary renews it")
		assert.Greater(t, later.Token(), h.Token())
		for _, c := range []*redlatch.Client{p.near, p.far} {
			_, err = c.Lock("granted by both").TryLock(t.Context())
			require.NoError(t, err)
		}

		p.set(testserver.Pass)
		requireLost(t, 30*time.Second, h, lock.ReasonGone)
		p.goesOn(t, later)
	})
}

// A primary that needs a replica does not renew what it has granted while it is cut off, and grants nothing.
func TestPrimaryThatNeedsAReplica(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		if testing.Short() {
			t.Skip("a failover takes several seconds")
		}
		const (
			lease = 2 * shortLease
			lag   = 3 * time.Second // a replica answers each second, if the machine is not busy
		)
		p := newPartition(t, shared.Program, lease)
		harness.Do(t, p.primary.Addr, "CONFIG", "SET", "min-replicas-max-lag", fmt.Sprint(int(lag.Seconds())))
		harness.Do(t, p.primary.Addr, "CONFIG", "SET", "min-replicas-to-write", "1")
		h, err := p.near.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		p.replicated(t)
		waiting := harness.StartLock(t, t.Context(), p.far.Lock("orders"))

		p.set(testserver.Stall)
		requireLost(t, lag+time.Second+lease+soon, h, lock.ReasonExpired)
		var loss *lock.LostError
		require.ErrorAs(t, context.Cause(h.Context()), &loss)
		require.ErrorContains(t, loss.Err, "NOREPLICAS")
		_, err = p.near.Lock("refused").TryLock(t.Context())
		require.ErrorContains(t, err, "NOREPLICAS")
		later := waiting.Got()

		p.set(testserver.Pass)
		p.goesOn(t, later)
	})
}

// goesOn checks that all use the new primary when the network is whole: a hold of the far side has stayed, and the near side
// acquires after it.
func (p *partition) goesOn(t *testing.T, h lock.Hold) {
	t.Helper()
	waiting := harness.StartLock(t, t.Context(), p.near.FencedLock(h.Name()))
	harness.Eventually(t, 30*time.Second, "the old primary is a replica", func() bool { return p.primary.ReplicaOf() == p.replica.Addr })
	assert.True(t, waiting.Running())
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, waiting.Got().Unlock(t.Context()))
}

// A client notices that its connections to the sentinels are dead, also if it hears nothing of their end, as when a
// firewall has forgotten them. So it follows a failover, and can be closed.
func TestSilentSentinels(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		if testing.Short() {
			t.Skip("a failover takes several seconds")
		}
		s := harness.Sentinels(t, shared.Program, 1, 3)
		proxies := make(map[string]*testserver.Proxy)
		for _, sentinel := range s.Sentinels {
			proxies[sentinel.Addr] = testserver.NewProxy(t, sentinel.Addr)
		}
		c := open(t, s, longLease, func(addr string) string {
			if proxy := proxies[addr]; proxy != nil {
				return proxy.Addr
			}
			return addr
		})

		for _, proxy := range proxies {
			proxy.Set(testserver.Mute)
			proxy.Set(testserver.Pass)
		}
		old := s.Primary()
		old.Kill()
		harness.Eventually(t, 30*time.Second, "there is another primary", func() bool { return s.Primary() != old })
		const found = 15 * time.Second // after a PING without an answer, and the next check of the sentinels
		_, err := c.Lock("after").Lock(t.Context(), lock.Wait(found))
		require.NoError(t, err)

		for _, proxy := range proxies {
			proxy.Set(testserver.Stall)
		}
		began := time.Now()
		c.Close()
		assert.Less(t, time.Since(began), found)
	})
}
