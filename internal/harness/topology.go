package harness

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/pubsub"
)

// Cluster returns a cluster of three primaries that only this test uses. The node timeout is long: with
// a short one, a busy machine would disconnect nodes, and lose the pub/sub messages between them.
func Cluster(t testing.TB, program string) *testserver.Cluster {
	t.Helper()
	return startCluster(t, program, false, 15*time.Second)
}

// ReplicatedCluster returns a cluster of three primaries with a replica each that only this test uses.
// The node timeout is as short as a busy machine allows.
func ReplicatedCluster(t testing.TB, program string) *testserver.Cluster {
	t.Helper()
	return startCluster(t, program, true, 2*time.Second)
}

func startCluster(t testing.TB, program string, replicas bool, nodeTimeout time.Duration) *testserver.Cluster {
	t.Helper()
	c, err := testserver.StartCluster(program, 3, replicas, nodeTimeout)
	require.NoError(t, err)
	t.Cleanup(c.Stop)
	return c
}

// PubSubModes returns the kinds of pub/sub that the nodes of a cluster have. The first is the one that
// pubsub.Auto selects: sharded, which Redis has from 7.0, or else plain.
func PubSubModes(t testing.TB, c *testserver.Cluster) []pubsub.Mode {
	t.Helper()
	reply, err := testserver.Command(c.Primaries[0].Addr, "PUBSUB", "SHARDNUMSUB")
	require.NoError(t, err)
	if strings.HasPrefix(reply, "-") {
		return []pubsub.Mode{pubsub.Plain}
	}
	return []pubsub.Mode{pubsub.Sharded, pubsub.Plain}
}

// Sentinels returns a primary with replicas and sentinels that only this test uses.
func Sentinels(t testing.TB, program string, replicas, sentinels int) *testserver.Sentinels {
	t.Helper()
	s, err := testserver.StartSentinels(program, replicas, sentinels)
	require.NoError(t, err)
	t.Cleanup(s.Stop)
	return s
}
