package goredis_test

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/contrib/goredis"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

func TestMain(m *testing.M) {
	logging.Disable()
	harness.Main(m, nil)
}

const patience = 20 * time.Second

// open returns a redlatch client for options. The end of the test closes it.
func open[O goredis.Options](t *testing.T, opt O) *redlatch.Client {
	t.Helper()
	c, err := goredis.Open(t.Context(), opt)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// checkShared fails the test unless rdb sees the locks of c.
func checkShared(t *testing.T, c *redlatch.Client, rdb redis.UniversalClient) {
	t.Helper()
	ctx := t.Context()
	for _, name := range []string{"orders", "users", "stock"} { // of several nodes in a cluster
		exists := func() int64 {
			n, err := rdb.Exists(ctx, name).Result()
			require.NoError(t, err)
			return n
		}
		require.Zero(t, exists())
		h, err := c.Lock(name).Lock(ctx)
		require.NoError(t, err)
		require.Equal(t, int64(1), exists())
		owner, err := rdb.HKeys(ctx, name).Result()
		require.NoError(t, err)
		require.Equal(t, []string{lock.OwnerOf(h).String()}, owner)
		require.NoError(t, h.Unlock(ctx))
		require.Zero(t, exists())
	}
}

// checkStandalone checks the clients that Open and OpenLike return, for a go-redis client with these options.
func checkStandalone(t *testing.T, opt *redis.Options) {
	t.Helper()
	opt.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	rdb := redis.NewClient(opt)
	defer rdb.Close()
	checkShared(t, open(t, opt), rdb)
	like, err := goredis.OpenLike(t.Context(), rdb)
	require.NoError(t, err)
	defer like.Close()
	checkShared(t, like, rdb)
}

func TestStandalone(t *testing.T) {
	type row struct {
		name string
		set  func(t *testing.T, s *testserver.Server, opt *redis.Options)
	}
	harness.EachOf(t, []row{
		{"plain", func(*testing.T, *testserver.Server, *redis.Options) {}},
		{"database, RESP2, timeouts", func(_ *testing.T, _ *testserver.Server, opt *redis.Options) {
			opt.DB, opt.Protocol, opt.Network = 3, 2, "tcp4"
			opt.DialTimeout, opt.ReadTimeout, opt.WriteTimeout = time.Second, 2*time.Second, -1
			opt.ConnMaxLifetime = time.Hour
		}},
		{"dialer", func(t *testing.T, s *testserver.Server, opt *redis.Options) {
			opt.Addr = "elsewhere:1"
			opt.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				assert.Equal(t, "tcp", network)
				assert.Equal(t, "elsewhere:1", addr)
				_, ok := ctx.Deadline()
				assert.True(t, ok, "no DialTimeout")
				return new(net.Dialer).DialContext(ctx, network, s.Addr)
			}
		}},
	}, func(r row) string { return r.name }, func(t *testing.T, s *testserver.Server, row row) {
		opt := &redis.Options{Addr: s.Addr}
		row.set(t, s, opt)
		checkStandalone(t, opt)
		harness.NothingLeft(t, s.Addr)
	})
}

// The default user of the server may do nothing, so each client has to log in, also with the older protocol.
func TestUsers(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "alice", "on", ">secret", "~*", "&*", "+@all")
		harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "off")
		_, err := goredis.Open(t.Context(), &redis.Options{Addr: s.Addr})
		require.ErrorContains(t, err, "NOAUTH")
		for _, protocol := range []int{2, 3} {
			checkStandalone(t, &redis.Options{Addr: s.Addr, Username: "alice", Password: "secret", Protocol: protocol})
		}
	})
}

// Connections log in again with the credentials of a streaming provider, while they are in use.
func TestConnectionsLogInAgain(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "alice", "on", ">secret", "~*", "&*", "+@all")
		opt, err := goredis.ClientOption(&redis.Options{Addr: s.Addr, StreamingCredentialsProvider: streaming{}})
		require.NoError(t, err)
		ask := opt.AuthCredentialsFn
		opt.AuthCredentialsFn = func(c rueidis.AuthCredentialsContext) (rueidis.AuthCredentials, error) {
			got, err := ask(c)
			if !got.RefreshAfter.IsZero() {
				got.RefreshAfter = time.Now().Add(10 * time.Millisecond)
			}
			return got, err
		}
		c, err := redlatch.New(t.Context(), opt)
		require.NoError(t, err)
		defer c.Close()
		h, err := c.Lock("orders").Lock(t.Context())
		require.NoError(t, err)
		waiter := harness.StartLock(t, t.Context(), c.Lock("orders")) // and a subscriber
		conn := harness.Conn(t, s.Addr)
		harness.Eventually(t, patience, "many logins", func() bool { return harness.Commands(t, conn)["auth"] >= 30 })
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, waiter.Got().Unlock(t.Context()))
	})
}

func TestUnixSocket(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		dir, err := os.MkdirTemp("", "redlatch") // sockets need a short path
		require.NoError(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		socket := filepath.Join(dir, "s")
		harness.Own(t, shared.Program, "--unixsocket", socket)
		checkStandalone(t, &redis.Options{Addr: socket, DB: 2})
		checkStandalone(t, &redis.Options{Network: "unix", Addr: socket})
		opt, err := redis.ParseURL("unix://" + socket + "?db=1")
		require.NoError(t, err)
		checkStandalone(t, opt)
	})
}

func TestTLS(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		addr, pool := harness.TLS(t, shared.Program)
		conf := &tls.Config{RootCAs: pool}
		checkStandalone(t, &redis.Options{Addr: addr, TLSConfig: conf})
		checkStandalone(t, &redis.Options{Network: "tcp4", Addr: addr, TLSConfig: conf})
		_, err := goredis.Open(t.Context(), &redis.Options{Addr: addr, TLSConfig: &tls.Config{}})
		require.ErrorContains(t, err, "certificate")
	})
}

func TestCluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		nodes := harness.Cluster(t, shared.Program)
		opt := &redis.ClusterOptions{Addrs: nodes.Addrs(), ClusterStateReloadInterval: time.Minute, ReadOnly: true}
		c := open(t, opt)
		rdb := redis.NewClusterClient(opt)
		defer rdb.Close()
		checkShared(t, c, rdb)
		like, err := goredis.OpenLike(t.Context(), rdb)
		require.NoError(t, err)
		defer like.Close()
		checkShared(t, like, rdb)
		checkShared(t, open(t, opt), rdb) // go-redis has set its defaults in opt
		checkShared(t, open(t, &redis.UniversalOptions{Addrs: nodes.Addrs()[:1], IsClusterMode: true}), rdb)

		// A client of one node is not one of the cluster.
		single := open(t, &redis.Options{Addr: nodes.Primaries[0].Addr})
		var moved bool
		for _, name := range []string{"orders", "users", "stock"} {
			err := single.Lock(name).Do(t.Context(), func(context.Context) error { return nil }, lock.Wait(0))
			moved = moved || err != nil && strings.Contains(err.Error(), "MOVED")
		}
		require.True(t, moved)
	})
}

func TestSentinels(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		servers := harness.Sentinels(t, shared.Program, 1, 1)
		sentinel := servers.Sentinels[0].Addr
		harness.Do(t, sentinel, "ACL", "SETUSER", "bob", "on", ">word", "~*", "&*", "+@all")
		harness.Do(t, sentinel, "ACL", "SETUSER", "default", "off")
		opt := &redis.UniversalOptions{
			Addrs: []string{sentinel}, MasterName: "main", SentinelUsername: "bob", SentinelPassword: "word",
			DB: 2, ClientName: "shop",
		}
		rdb := redis.NewUniversalClient(opt)
		defer rdb.Close()
		checkShared(t, open(t, opt), rdb)
		checkShared(t, open(t, opt.Failover()), rdb)
		_, err := goredis.OpenLike(t.Context(), rdb)
		require.ErrorIs(t, err, lock.ErrInvalid)

		routed := *opt
		routed.RouteRandomly, routed.ReadOnly = true, true // reads only
		checkShared(t, open(t, &routed), rdb)
		opt.SentinelPassword = "wrong"
		_, err = goredis.Open(t.Context(), opt)
		require.Error(t, err)
	})
}

// The options of redlatch apply as well.
func TestOptionsOfRedlatch(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		prefix := redlatch.WithNameMapper(func(name string) string { return "app:" + name })
		opt := &redis.Options{Addr: s.Addr}
		c, err := goredis.Open(t.Context(), opt, prefix)
		require.NoError(t, err)
		defer c.Close()
		rdb := redis.NewClient(opt)
		defer rdb.Close()
		like, err := goredis.OpenLike(t.Context(), rdb, prefix)
		require.NoError(t, err)
		defer like.Close()
		for _, c := range []*redlatch.Client{c, like} {
			require.NoError(t, c.Lock("orders").Do(t.Context(), func(ctx context.Context) error {
				n, err := rdb.Exists(ctx, "app:orders").Result()
				require.Equal(t, int64(1), n)
				return err
			}))
		}
		_, err = goredis.Open(t.Context(), opt, redlatch.WithTurn(-1))
		require.ErrorIs(t, err, lock.ErrInvalid)
	})
}

// The type of the client may be one of the program's own.
func TestEmbeddedClient(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		type own struct{ *redis.Client }
		rdb := own{redis.NewClient(&redis.Options{Addr: s.Addr})}
		defer rdb.Close()
		c, err := goredis.OpenLike(t.Context(), rdb)
		require.NoError(t, err)
		defer c.Close()
		checkShared(t, c, rdb)
	})
}
