package system_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
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
	"github.com/redlatch/redlatch/pubsub"
)

// rueidis resends read-only commands until the context ends.
func TestBorrowedConnectionWithRetries(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.Addr}, DisableCache: true})
		require.NoError(t, err)
		defer conn.Close()
		c, err := redlatch.Wrap(t.Context(), conn)
		require.NoError(t, err)
		defer c.Close()
		checkLock(t, c, "orders")
		s.Kill()
		calls := harness.Start(t, t.Context(), func(context.Context) (any, error) {
			ctx := context.Background() // which does not end
			for _, err := range []error{
				c.Ping(ctx),
				second(c.Lock("orders").IsLocked(ctx)),
				second(c.Lock("orders").TTL(ctx)),
				second(c.Lock("orders").HoldCount(ctx, c.NewOwner())),
				second(c.Lock("orders").ForceUnlock(ctx)),
				second(c.Lock("orders").TryLock(ctx)),
			} {
				assert.Error(t, err)
			}
			return nil, nil
		})
		require.NoError(t, calls.EndWithin(20*time.Second))
	})
}

// Replacing connections all the time loses nothing.
func TestShortLivedConnections(t *testing.T) {
	const lifetime, timeout = 150 * time.Millisecond, 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		connections := func() int {
			stats, err := testserver.Info(s.Addr, "stats")
			require.NoError(t, err)
			n, err := strconv.Atoi(stats["total_connections_received"])
			require.NoError(t, err)
			return n
		}
		c := connect(t, rueidis.ClientOption{InitAddress: []string{s.Addr}, ConnLifetime: lifetime}, redlatch.WithWatchdogTimeout(timeout))
		h := mustLock(t, c.Lock("held"))
		checkLock(t, c, "orders") // opens every kind of connection
		before := connections()
		begin := time.Now()
		for replaced, checks := 0, 1; replaced < 5 || !renewed(h, begin.Add(2*timeout)); checks++ {
			checkLock(t, c, "orders")
			replaced = connections() - before - checks // each check is a connection
			require.Less(t, time.Since(begin), patience, "connections are not replaced")
		}
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// Renewals do not queue behind other commands, whose connection is stuck for longer
// than the lease.
func TestRenewalsBypassOtherCommands(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		g := harness.NewGate(t, s)
		c := connect(t, rueidis.ClientOption{
			// The test sends the only PING, and the connection has no timeout.
			InitAddress: []string{g.Addr}, ConnWriteTimeout: time.Minute, Dialer: net.Dialer{KeepAlive: -1},
		}, redlatch.WithWatchdogTimeout(timeout))
		t.Cleanup(func() { _ = g.Open() })
		h := mustLock(t, c.Lock("orders"))
		reached := g.Arm(harness.KeepReply, "PING", 1)
		answered := make(chan error, 1)
		go func() { answered <- c.Ping(context.Background()) }()
		<-reached
		stuck := time.Now()
		harness.Eventually(t, 3*timeout, "repeated renewals", func() bool {
			return time.Now().Add(h.Remaining()).After(stuck.Add(timeout*5/2)) || h.Context().Err() != nil
		})
		require.NoError(t, context.Cause(h.Context()))
		require.Error(t, <-answered, "the connection of other commands was not stuck")
		require.NoError(t, g.Open())
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// A server at its client limit sends an error before the first command. A call whose
// context has ended by then closes the new connection unused.
func TestServerSendsErrorFirst(t *testing.T) {
	full := listen(t, func(conn net.Conn) {
		_, _ = conn.Write([]byte("-ERR max number of clients reached\r\n"))
		conn.Close()
	})
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var leave atomic.Pointer[context.CancelFunc] // cancels the current call while the server is full
		var dials atomic.Int32
		c := connect(t, rueidis.ClientOption{
			InitAddress: []string{s.Addr},
			DialCtxFn: func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
				if leave := leave.Load(); leave != nil {
					defer (*leave)()
					dials.Add(1)
					addr = full
				}
				return d.DialContext(ctx, "tcp", addr)
			},
		})
		ping := func() error {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			leave.Store(&cancel)
			return c.Ping(ctx)
		}
		require.NoError(t, ping())
		harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
		harness.Eventually(t, time.Minute, "many connections were dropped", func() bool {
			require.True(t, ping() != nil || dials.Load() == 0)
			return dials.Load() >= 100
		})
		leave.Store(nil)
		checkLock(t, c, "orders")
	})
}

func TestUnixSocket(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		dir, err := os.MkdirTemp("", "redlatch") // a short path: sockets allow about 100 characters
		require.NoError(t, err)
		defer os.RemoveAll(dir)
		socket := filepath.Join(dir, "s")
		harness.Own(t, shared.Program, "--unixsocket", socket)
		c, err := redlatch.Open(t.Context(), "unix://"+socket)
		require.NoError(t, err)
		defer c.Close()
		checkLock(t, c, "orders")
	})
}

func TestTLS(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		addr, pool := harness.TLS(t, shared.Program)
		opt, err := redlatch.ParseURL("rediss://" + addr)
		require.NoError(t, err)
		opt.TLSConfig.RootCAs = pool
		checkLock(t, connect(t, opt), "orders")
		_, err = redlatch.Open(t.Context(), "rediss://"+addr) // the certificate is not trusted
		require.ErrorContains(t, err, "certificate")
	})
}

func TestSentinel(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		servers := harness.Sentinels(t, shared.Program, 1, 1)
		c, err := redlatch.Open(t.Context(), servers.URL())
		require.NoError(t, err)
		defer c.Close()
		checkLock(t, c, "orders")

		for _, server := range servers.Servers {
			rights := documentedRights(t, "## ACL rules", append(slices.Clone(kindRows), "servers that sentinels watch")...)
			harness.Do(t, server.Addr, rights...)
		}
		sentinel := servers.Sentinels[0].Addr
		harness.Do(t, sentinel, documentedRights(t, "On sentinels")...)
		url := strings.Replace(servers.URL(), "//", "//app:password@", 1) + "&sentinel_username=app&sentinel_password=password"
		restricted, err := redlatch.Open(t.Context(), url)
		require.NoError(t, err)
		defer restricted.Close()
		checkEverything(t, harness.Conn(t, servers.Servers[0].Addr), restricted, c)

		// The rights suffice to follow a failover, and for nothing else.
		user, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{sentinel}, Username: "app", Password: "password", ForceSingleClient: true, DisableCache: true,
		})
		require.NoError(t, err)
		defer user.Close()
		for _, command := range [][]string{{"SET", "main", "quorum", "1"}, {"REMOVE", "main"}, {"FAILOVER", "main"}} {
			err := user.Do(t.Context(), user.B().Arbitrary("SENTINEL").Args(command...).Build()).Error()
			require.ErrorContains(t, err, "NOPERM", "%v", command)
		}
		before := servers.Primary()
		harness.Do(t, sentinel, "SENTINEL", "FAILOVER", "main")
		harness.Eventually(t, 30*time.Second, "another primary", func() bool {
			now := servers.Primary()
			return now != nil && now != before
		})
		harness.Eventually(t, 30*time.Second, "a lock on the new primary", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			return restricted.Lock("app:orders").Do(ctx, nothing) == nil
		})
	})
}

// Sharded subscriptions have a connection to each primary; plain ones share one.
func TestCluster(t *testing.T) {
	harness.Full(t)
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		modes := harness.PubSubModes(t, cluster)
		if modes[0] == pubsub.Plain {
			_, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: cluster.Addrs()}, redlatch.WithPubSubMode(pubsub.Sharded))
			require.ErrorIs(t, err, lock.ErrUnsupported)
		}
		for _, mode := range append(modes, pubsub.Auto) {
			t.Run(mode.String(), func(t *testing.T) {
				c := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				other := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				for i := range 12 { // enough names for every primary to own some
					h := mustLock(t, c.Lock(fmt.Sprint("orders-", i)), lock.Lease(time.Hour))
					waiter := harness.StartLock(t, t.Context(), other.Lock(h.Name()))
					harness.Eventually(t, 10*time.Second, "subscribed", func() bool { return other.Stats().PubSub.Subscribed == i+1 })
					begin := time.Now()
					require.NoError(t, h.Unlock(t.Context()))
					require.NoError(t, waiter.Got().Unlock(t.Context()))
					require.Less(t, time.Since(begin), slack, "woken by the safety poll")
				}
				want := len(cluster.Primaries)
				if mode == pubsub.Plain || modes[0] == pubsub.Plain {
					want = 1
				}
				require.Equal(t, want, other.Stats().PubSub.Connections)
			})
		}
	})
}

// observed counts how often rueidis leaves its synchronous mode on a connection: it then removes the
// deadline.
type observed struct {
	net.Conn
	pipelined *atomic.Int32
}

func (o observed) SetDeadline(t time.Time) error {
	if t.IsZero() {
		o.pipelined.Add(1)
	}
	return o.Conn.SetDeadline(t)
}

// Opening a client, and a single caller whose context cannot end, use the synchronous mode of rueidis,
// whose requests take half of the processor time. Callers that wait do not.
func TestSingleCallersAreSynchronous(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var pipelined atomic.Int32
		c := connect(t, rueidis.ClientOption{
			InitAddress: []string{s.Addr},
			DialCtxFn: func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
				conn, err := d.DialContext(ctx, "tcp", addr)
				return observed{conn, &pipelined}, err
			},
		})
		for range 5 {
			require.NoError(t, c.Lock("free").Do(context.Background(), nothing))
		}
		require.Zero(t, pipelined.Load())

		h := mustLock(t, harness.Client(t, s).Lock("taken"), lock.Lease(2*time.Second))
		require.NoError(t, c.SpinLock("taken").Do(context.Background(), nothing)) // without a connection for messages
		require.NotZero(t, pipelined.Load(), h)
	})
}
