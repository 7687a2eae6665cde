package redlatch

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Client.Probe checks exactly the commands that the scripts use, and those that package once sends.
func TestProbeCoversScriptCommands(t *testing.T) {
	command := regexp.MustCompile(`(?:call|try)\('([A-Z]+)'|B\(\)\.([A-Z]\w+)\(|"([A-Z]+)", wire\.`)
	ofAll := map[string]bool{}
	uses := usesOf("orders", "", false, false)
	for _, kind := range []struct {
		scripts []string
		name    string
	}{
		{[]string{"rlock/[^p]*.lua", "internal/engine/*.lua"}, ""},
		{[]string{"rlock/plain_*.lua"}, KindPlain},
		{[]string{"fairlock/*.lua"}, KindFair},
		{[]string{"rwlock/*.lua"}, KindReadWrite},
		{[]string{"semaphore/*.lua"}, KindSemaphore},
		{[]string{"countdown/*.lua"}, KindLatch},
		{[]string{"election/*.lua"}, KindElection},
		{[]string{"once/once.go", "rlock/acquire.lua", "rlock/release.lua", "rlock/transfer.lua", "internal/engine/*.lua"}, KindOnce},
	} {
		sent, asked := map[string]bool{}, map[string]bool{}
		for _, pattern := range kind.scripts {
			files, err := filepath.Glob(pattern)
			require.NoError(t, err)
			more, err := filepath.Glob(filepath.Join(filepath.Dir(pattern), "lua", filepath.Base(pattern)))
			require.NoError(t, err)
			files = append(files, more...)
			require.NotEmpty(t, files)
			for _, file := range files {
				source, err := os.ReadFile(file)
				require.NoError(t, err)
				for _, m := range command.FindAllSubmatch(source, -1) {
					sent[strings.ToUpper(string(bytes.Join(m[1:], nil)))] = true
				}
			}
		}
		for _, u := range uses {
			// Scripts get the command that publishes as an argument.
			if u.kind == kind.name && !regexp.MustCompile("PING|PUBLISH|SUBSCRIBE").MatchString(u.Command) {
				asked[u.Command] = true
			}
		}
		sent["HGET"] = sent["HGET"] || kind.name == "" // HoldCount sends it
		for name := range sent {
			assert.True(t, asked[name] || ofAll[name], "%v: %s is not checked", kind.scripts, name)
		}
		for name := range asked {
			if kind.name == "" {
				ofAll[name] = true
			}
			assert.True(t, sent[name] || strings.HasPrefix(name, "EVAL"), "%v: %s is checked but not used", kind.scripts, name)
		}
	}
}

func TestFindings(t *testing.T) {
	for _, tt := range []struct {
		name   string
		info   string
		change func(*Node)
		want   Check // "" for nothing
	}{
		{name: "redis 6.2", info: "redis_version:6.2.14"},
		{name: "redis 8", info: "redis_version:8.4.0"},
		{name: "redis 6.0", info: "redis_version:6.0.16", want: CheckVersion},
		{name: "valkey 7.2", info: "redis_version:7.2.4 server_name:valkey valkey_version:7.2.5"},
		{name: "valkey 10", info: "redis_version:7.2.4 server_name:valkey valkey_version:10.0.0"},
		{name: "another server", info: "redis_version:1.0.0 server_name:other"},
		{name: "no info", info: ""},
		{name: "an unknown version format", info: "redis_version:unstable"},
		{name: "evicts", info: "redis_version:7.0.0 maxmemory:1 maxmemory_policy:volatile-ttl role:master", want: CheckEviction},
		{name: "does not evict", info: "redis_version:7.0.0 maxmemory:1 maxmemory_policy:noeviction role:master"},
		{name: "has no bound", info: "redis_version:7.0.0 maxmemory:0 maxmemory_policy:volatile-ttl role:master"},
		{name: "is a replica", info: "redis_version:7.0.0 maxmemory:1 maxmemory_policy:volatile-ttl role:slave"},
		{name: "clock ahead", change: func(n *Node) { n.ClockOffset = 1100 * time.Millisecond }, want: CheckClock},
		{name: "clock behind", change: func(n *Node) { n.ClockOffset = -1100 * time.Millisecond }, want: CheckClock},
		{name: "clock about right", change: func(n *Node) { n.ClockOffset = 900 * time.Millisecond }},
		{name: "clock offset too imprecise", change: func(n *Node) { n.ClockOffset, n.RoundTrip = 1100*time.Millisecond, time.Second }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := Node{Addr: "addr"}
			n.readInfo(strings.ReplaceAll(tt.info, " ", "\r\n"))
			if tt.change != nil {
				tt.change(&n)
			}
			found := n.findings()
			if tt.want == "" {
				require.Empty(t, found)
				return
			}
			require.Len(t, found, 1)
			require.Equal(t, tt.want, found[0].Check)
			require.Equal(t, "addr", found[0].Addr)
		})
	}
}
