package harness

import (
	"net"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/testserver"
)

// Cluster returns a cluster of three primaries that only this test uses.
func Cluster(t testing.TB, program string) *testserver.Cluster {
	t.Helper()
	c, err := testserver.StartCluster(program, 3)
	require.NoError(t, err)
	t.Cleanup(c.Stop)
	return c
}

// Sentinel runs a sentinel with a configuration file, which it may rewrite, and
// returns its address.
func Sentinel(t testing.TB, program, conf string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	_, port, _ := net.SplitHostPort(addr)
	require.NoError(t, l.Close())
	cmd := exec.Command(program, conf, "--sentinel", "--port", port, "--bind", "127.0.0.1")
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	Eventually(t, 20*time.Second, "the sentinel answers", func() bool {
		reply, err := testserver.Command(addr, "PING")
		return err == nil && reply == "+PONG"
	})
	return addr
}
