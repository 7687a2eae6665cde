package harness

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/testserver"
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

// Sentinels returns a primary with replicas and sentinels that only this test uses.
func Sentinels(t testing.TB, program string, replicas, sentinels int) *testserver.Sentinels {
	t.Helper()
	s, err := testserver.StartSentinels(program, replicas, sentinels)
	require.NoError(t, err)
	t.Cleanup(s.Stop)
	return s
}
