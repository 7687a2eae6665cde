package contract_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

func TestEveryKindInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		of := func(name string) string { return cluster.Owner(name).Addr }
		modes := harness.PubSubModes(t, cluster)
		for _, mode := range modes[:harness.Size(1, len(modes))] {
			t.Run(mode.String(), func(t *testing.T) {
				here := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				there := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				for _, k := range kinds {
					for i := range harness.Size(2, 6) { // in the end enough names for every primary to have some
						for _, roles := range k.roles() {
							name := fmt.Sprint(roles.name, "-", i)
							k.prepare(t, of(name), name)
							wokenByMessage(t, k, cluster, there, name, roles.held(here, name), roles.waits(there, name), k.owners(t, here))
							k.unmake(t, of(name), name)
						}
					}
				}
			})
		}
		t.Run("names", func(t *testing.T) {
			c := harness.ClientAt(t, cluster.Addrs())
			for _, k := range kinds {
				for _, name := range unslotted {
					require.ErrorIs(t, only(k.of(c, name).TryLock(t.Context())), lock.ErrInvalid, "%s %s", k.name, name)
				}
			}
			require.ErrorIs(t, only(c.Probe(t.Context(), unslotted[0])), lock.ErrInvalid)
		})
		t.Run("renewed", func(t *testing.T) {
			const timeout = 6 * time.Second // a busy machine has that much time to spare
			c := harness.ClientAt(t, cluster.Addrs(), redlatch.WithWatchdogTimeout(timeout))
			var holds []lock.Hold
			var undo []func()
			for _, k := range choose(leased) {
				for i := range harness.Size(2, 10) {
					name := fmt.Sprint("renewed ", k.name, " ", i)
					k.prepare(t, of(name), name)
					undo = append(undo, func() { k.unmake(t, of(name), name) })
					holds = append(holds, k.holdAll(t, c, []string{name})...)
				}
			}
			<-time.After(timeout + timeout/2)
			isReleased(t, holds)
			for _, f := range undo {
				f()
			}
		})
		onlyRequestsLeft(t, cluster, "*")
	})
}

// wokenByMessage has a waiter there get what is released here. The lease is no help.
func wokenByMessage(t *testing.T, k kind, cluster *testserver.Cluster, there *redlatch.Client, name string, ours, theirs lock.Locker,
	owners map[string]context.Context) {
	t.Helper()
	hasChannel := func() bool {
		return slices.ContainsFunc(cluster.Addrs(), func(addr string) bool {
			return slices.ContainsFunc([]string{"CHANNELS", "SHARDCHANNELS"}, func(kind string) bool {
				channels, err := testserver.Command(addr, "PUBSUB", kind, "*"+name+"*")
				require.NoError(t, err)
				return channels != "*0" && !strings.HasPrefix(channels, "-") // before 7.0 no channel is sharded
			})
		})
	}
	for what, ctx := range owners {
		h := mustLock(t, ctx, ours, k.long()...)
		isTaken(t, theirs)
		waiterCtx := context.Background()
		if what == "named" {
			waiterCtx = lock.WithOwner(waiterCtx, there.NewOwner())
		}
		before := there.PubSub()
		waited := async(func() error { return theirs.Do(waiterCtx, nothing) })
		harness.Eventually(t, soon, "the waiter listens", func() bool {
			return k.waiting(1, there) && (k.polls || hasChannel())
		})
		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, ends(t, waited, soon))
		if !k.polls {
			require.Less(t, time.Since(begin), 3*time.Second, "woken by the safety poll")
			// Who polls beside messages may have been quicker than this one.
			harness.Eventually(t, soon, "the message", func() bool { return there.PubSub().Messages > before.Messages })
		}
	}
}
