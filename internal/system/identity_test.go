package system_test

import (
	"strings"
	"testing"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// All connections of a client, that of its subscriptions included, have the name of its process, or that of
// the URL. The documented rights suffice, and a server where a name takes another right gets none.
func TestConnectionsAreNamed(t *testing.T) {
	const byDefault = "the process"
	for _, tt := range []struct {
		name, parameters, want string
		server                 []string
	}{
		{name: "default", want: byDefault},
		{name: "name of the URL", parameters: "?client_name=orders", want: "orders"},
		{name: "RESP2", parameters: "?protocol=2"},
		{name: "without HELLO", server: []string{"--rename-command", "HELLO", "OTHER"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, shared *testserver.Server) {
				s := harness.Own(t, shared.Program, tt.server...)
				harness.Do(t, s.Addr, documentedRights(t, "## ACL rules")...)
				c, err := redlatch.Open(t.Context(), "redis://app:password@"+s.Addr+tt.parameters, redlatch.WithoutStartupChecks())
				require.NoError(t, err)
				defer c.Close()
				h := mustLock(t, harness.ClientAt(t, []string{s.Addr}).Lock("app:orders"), lock.Lease(patience))
				waiter := harness.StartLock(t, t.Context(), c.Lock("app:orders"))
				waitForListeners(t, c, 1)

				want := tt.want
				if want == byDefault {
					want = wire.ConnectionName(c.ID())
				}
				ours, subscribed := 0, false
				for line := range strings.Lines(clientList(t, s.Addr)) {
					if !strings.Contains(line, " user=app ") {
						continue
					}
					ours++
					subscribed = subscribed || strings.Contains(line, " sub=1 ")
					require.Contains(t, line, " name="+want+" ")
				}
				require.Greater(t, ours, 1)
				require.True(t, subscribed)
				require.NoError(t, h.Unlock(t.Context()))
				require.NoError(t, waiter.Got().Unlock(t.Context()))
			})
		})
	}
}

// A user of RESP2 who loses the right to name connections can still make them.
func TestNamesCostNoConnection(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, append(documentedRights(t, "## ACL rules"), "+client|setname")...)
		opt, err := redlatch.ParseURL("redis://app:password@" + s.Addr + "?protocol=2")
		require.NoError(t, err)
		c := connect(t, opt, redlatch.WithoutStartupChecks())
		checkLock(t, c, "app:orders")
		harness.Do(t, s.Addr, "ACL", "SETUSER", "app", "-client")
		harness.Do(t, s.Addr, "CLIENT", "KILL", "USER", "app")
		harness.Eventually(t, patience, "it connects again", func() bool { return c.Ping(t.Context()) == nil })
		checkLock(t, c, "app:orders")
	})
}

// In a cluster, the connections to each node have the name.
func TestConnectionsToNodesAreNamed(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		c := harness.ClientAt(t, cluster.Addrs())
		for _, name := range []string{"{a}", "{b}", "{c}", "{d}", "{e}", "{f}", "{g}", "{h}"} {
			require.NoError(t, c.Lock(name).Do(t.Context(), nothing))
		}
		for _, p := range cluster.Primaries {
			require.Contains(t, clientList(t, p.Addr), " name="+wire.ConnectionName(c.ID())+" ")
		}
	})
}

func clientList(t *testing.T, addr string) string {
	t.Helper()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}, ForceSingleClient: true, DisableCache: true})
	require.NoError(t, err)
	defer conn.Close()
	list, err := conn.Do(t.Context(), conn.B().ClientList().Build()).ToString()
	require.NoError(t, err)
	return list
}
