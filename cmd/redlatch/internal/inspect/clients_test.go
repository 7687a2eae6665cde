package inspect

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

// Lines of CLIENT LIST become the oldest connection of each client, and the last request on any of them.
func TestConnectionsOfClients(t *testing.T) {
	const a, b = "01a2126d-e2db-7cbb-8e45-9cad624060ae", "01a2126d-e2db-7eb0-ab7a-3ca345b0a88d"
	all := clients{known: map[string]Connection{}}
	for _, line := range []string{
		"id=1 addr=10.0.0.1:1 laddr=h:6379 fd=8 name=redlatch:" + a + ":web-3:4711 age=7 idle=2 flags=N cmd=ping user=app\n",
		"id=2 addr=10.0.0.1:2 name=redlatch:" + a + ":web-3:4711 age=90 idle=5\n",
		"id=3 addr=10.0.0.1:3 name=redlatch:" + a + ":web-3:4711 age=8 idle=9\n",
		"id=4 addr=10.0.0.2:1 name=redlatch:" + b + "::1 age=0 idle=0\n",
		"id=5 addr=10.0.0.3:1 name=orders age=1 idle=1\n",
		"id=6 addr=10.0.0.3:2 name= age=1 idle=1\n",
		"\n", "txt:redlatch",
	} {
		all.add(line)
	}
	require.Equal(t, map[string]Connection{
		a: {Process: wire.Process{Host: "web-3", PID: 4711}, Address: "10.0.0.1:2", Age: Millis(90 * time.Second), Idle: Millis(2 * time.Second)},
		b: {Process: wire.Process{PID: 1}, Address: "10.0.0.2:1"},
	}, all.known)
}

// The list is read once for all objects, only for clients of redlatch, and not again if that would be often
// for its size. An owner that is new meanwhile is not taken for one without a connection.
func TestIdentifyReadsTheListSeldom(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		r, conn := readerOf(t, s.Addr), harness.Conn(t, s.Addr)
		lists := func() int { return harness.Commands(t, conn)["client"] }
		harness.Do(t, s.Addr, "HSET", "legacy", java, "1")
		hold := func(name string) {
			h, err := harness.Client(t, s).Lock(name).Lock(t.Context())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, h.Unlock(context.Background())) })
		}
		identify := func(names ...string) []Object {
			objects, err := r.ReadAll(t.Context(), names)
			require.NoError(t, err)
			r.Identify(t.Context(), objects)
			return objects
		}

		before := lists()
		identify("legacy", "free")
		require.Equal(t, before, lists())
		hold("a")
		hold("b")
		before = lists()
		for _, o := range identify("a", "b", "legacy") {
			require.Equal(t, o.Name != "legacy", o.Holders[0].Connection != nil, o.Name)
			require.Empty(t, o.Unidentified)
		}
		require.Equal(t, before+1, lists())

		r.clients.until = time.Now().Add(time.Hour)
		hold("c")
		before = lists()
		objects := identify("a", "c")
		require.Equal(t, before, lists())
		require.NotNil(t, objects[0].Holders[0].Connection)
		require.Empty(t, objects[0].Unidentified)
		require.Contains(t, objects[1].Unidentified, "too large")
		r.clients.until = time.Now()
		require.NotNil(t, identify("c")[0].Holders[0].Connection)
	})
}
