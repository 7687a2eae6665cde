package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The name of a connection has only characters that CLIENT SETNAME accepts, and tells the process whatever
// the name of the host.
func TestConnectionNames(t *testing.T) {
	const client = "01a2126d-e2db-7cbb-8e45-9cad624060ae"
	for host, want := range map[string]string{
		"web-3": "web-3", "": "", "fe80::1": "fe80::1", "my host\n": "my?host?", "büro\x7f": "b?ro?",
	} {
		name := connectionName(client, Process{host, 4711})
		require.Equal(t, "redlatch:"+client+":"+want+":4711", name)
		got, p, ok := ParseConnectionName(name)
		require.True(t, ok)
		require.Equal(t, client, got)
		require.Equal(t, Process{want, 4711}, p)
	}
	for _, name := range []string{
		"", "orders", "redlatch", "redlatch:", "redlatch:" + client, "redlatch:" + client + ":4711", "redlatch:x:web-3:4711",
		"redlatch:" + client + ":web-3:", "redlatch:" + client + ":web-3:-1", "redlatch:" + client + ":web-3:x",
	} {
		_, _, ok := ParseConnectionName(name)
		require.False(t, ok, name)
	}
}
