package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/cmd/redlatch/internal/inspect"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// inspect and doctor show the process of a holder of redlatch. Of a client of Redisson, and of one whose
// connections have a name of their own, they show no more than the id.
func TestProcessesOfHolders(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		_, self, _ := wire.ParseConnectionName(wire.ConnectionName(c.ID()))
		mustLock(t, c.Lock("orders"), lock.Lease(time.Hour))
		named, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}, ClientName: "shop"})
		require.NoError(t, err)
		t.Cleanup(named.Close)
		mustLock(t, named.Lock("jobs"), lock.Lease(time.Hour))
		harness.Do(t, s.Addr, "HSET", "legacy", "6ba7b810-9dad-41d1-80b4-00c04fd430c8:47", "1")
		waits := harness.StartLock(t, t.Context(), c.FairLock("orders"))
		harness.Eventually(t, patience, "it waits", func() bool {
			queue, err := c.FairLock("orders").Queue(t.Context())
			return err == nil && len(queue) == 1
		})

		text := succeeds(t, s.Addr, "inspect", "orders", "jobs", "legacy")
		process := fmt.Sprintf("process %d@%s at 127.0.0.1:", self.PID, self.Host)
		require.Equal(t, 2, strings.Count(text, process), "of the holder and the waiter: %s", text)
		require.Equal(t, 1, strings.Count(text, "no named connection"), text)
		require.NotContains(t, text, "unknown")

		var objects []inspect.Object
		for d := json.NewDecoder(strings.NewReader(succeeds(t, s.Addr, "inspect", "--json", "orders", "jobs", "legacy"))); d.More(); {
			var o inspect.Object
			require.NoError(t, d.Decode(&o))
			require.Empty(t, o.Unidentified)
			objects = append(objects, o)
		}
		require.NotNil(t, objects[0].Holders[0].Connection)
		require.Equal(t, self, objects[0].Holders[0].Connection.Process)
		require.NotNil(t, objects[0].Queue[0].Connection)
		require.Nil(t, objects[1].Holders[0].Connection)
		require.Nil(t, objects[2].Holders[0].Connection)

		process = fmt.Sprintf("That is process %d on host %s, connected from 127.0.0.1:", self.PID, self.Host)
		const unnamed = "No connection has the name of that client"
		text = succeeds(t, s.Addr, "doctor", "--watch", "1ms", "orders")
		require.Equal(t, 2, strings.Count(text, process), text)
		require.Contains(t, succeeds(t, s.Addr, "doctor", "--watch", "1ms", "jobs"), unnamed)
		text = finish(t, s.Addr, "doctor", "legacy").stdout
		require.NotContains(t, text, "process")
		require.NotContains(t, text, unnamed)

		harness.Do(t, s.Addr, "DEL", "orders")
		require.NoError(t, waits.Got().Unlock(t.Context()))
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// A user who may not read CLIENT LIST sees everything else, and is told once.
func TestUserWithoutClientList(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "reader", "on", ">secret", "~*", "&*", "+@all", "-client")
		c := harness.Client(t, s)
		h := mustLock(t, c.Lock("orders"), lock.Lease(time.Hour))
		mustLock(t, c.Lock("jobs"), lock.Lease(time.Hour))
		url := "redis://reader:secret@" + s.Addr
		const told = "The processes of some clients are unknown: NOPERM"
		for _, args := range [][]string{{"inspect", "orders", "jobs"}, {"doctor", "--watch", "1ms", "orders"}} {
			text := succeeds(t, s.Addr, append(args, "--url", url)...)
			require.Equal(t, 1, strings.Count(text, told), text)
			require.Contains(t, text, lock.OwnerOf(h).String())
			require.NotContains(t, text, "named connection")
			require.NotContains(t, text, "No connection")
		}
		var o inspect.Object
		require.NoError(t, json.Unmarshal([]byte(succeeds(t, s.Addr, "inspect", "--json", "--url", url, "orders")), &o))
		require.Contains(t, o.Unidentified, "NOPERM")
		require.Equal(t, lock.OwnerOf(h).String(), o.Holders[0].ID)

		from := samplerOf(t, s, "*")
		conn, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{s.Addr}, Username: "reader", Password: "secret", DisableCache: true,
		})
		require.NoError(t, err)
		defer conn.Close()
		from.reader = &inspect.Reader{Conn: conn}
		_, rows := take(t, from)
		require.Len(t, rows, 2)
		require.Contains(t, rows["orders"].Unidentified, "NOPERM")
	})
}

// top knows the processes of all holders from one CLIENT LIST for each refresh.
func TestSamplesShowProcesses(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		for i := range 5 {
			mustLock(t, harness.Client(t, s).Lock(fmt.Sprint("orders:", i)))
		}
		from, conn := samplerOf(t, s, "*"), harness.Conn(t, s.Addr)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		_, rows := take(t, from)
		require.Len(t, rows, 5)
		for _, r := range rows {
			_, self, _ := wire.ParseConnectionName(wire.ConnectionName(r.Holders[0].Client))
			require.Equal(t, fmt.Sprintf("%d@%s", self.PID, self.Host), firstProcess(r))
		}
		require.Equal(t, 1, harness.Commands(t, conn)["client"])
	})
}
