package interop

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// env is where Go and Java meet: servers and a version of Redisson.
type env struct {
	version string // of Redisson
	servers []*testserver.Server
	cluster bool
	codec   string // of clients of Redisson, if it is not the default
	j       *jvm
}

// at returns the env of those servers: one, or the nodes of a cluster.
func at(t testing.TB, version string, servers ...*testserver.Server) *env {
	t.Helper()
	p := &env{version: version, servers: servers, cluster: len(servers) > 1, j: shared(t, version)}
	if servers[0].Valkey() {
		p.codec = "org.redisson.client.codec.StringCodec"
	}
	return p
}

// eachEnv runs a test with every version of Redisson on every server program. The servers are empty.
func eachEnv(t *testing.T, test func(t *testing.T, p *env)) {
	t.Helper()
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, version := range versions() {
			t.Run("Redisson "+version, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				test(t, at(t, version, s))
			})
		}
	})
}

// onCluster runs a test of the second tier on a cluster of redis-server, if tests run on one.
func onCluster(t *testing.T, test func(t *testing.T, nodes []*testserver.Server)) {
	t.Helper()
	for _, program := range harness.Programs(t) {
		if strings.HasPrefix(program, testserver.Redis) && !testing.Short() {
			t.Run("cluster", func(t *testing.T) { test(t, harness.Cluster(t, program).Primaries) })
			return
		}
	}
}

// addrs returns the addresses of the servers.
func (p *env) addrs() []string {
	var addrs []string
	for _, s := range p.servers {
		addrs = append(addrs, s.Addr)
	}
	return addrs
}

// config returns the configuration of a client of Redisson, with additional lines.
func (p *env) config(more []string) string {
	var b strings.Builder
	b.WriteString("threads: 4\nnettyThreads: 4\n")
	if p.codec != "" {
		fmt.Fprintf(&b, "codec: !<%s> {}\n", p.codec)
	}
	var mode []string
	for _, line := range more {
		if strings.HasPrefix(line, " ") {
			mode = append(mode, line)
		} else {
			b.WriteString(line + "\n")
		}
	}
	if p.cluster {
		b.WriteString("clusterServersConfig:\n  nodeAddresses:\n")
		for _, addr := range p.addrs() {
			fmt.Fprintf(&b, "  - \"redis://%s\"\n", addr)
		}
		b.WriteString("  masterConnectionMinimumIdleSize: 1\n  slaveConnectionMinimumIdleSize: 1\n")
	} else {
		fmt.Fprintf(&b, "singleServerConfig:\n  address: \"redis://%s\"\n  connectionMinimumIdleSize: 1\n", p.addrs()[0])
	}
	for _, line := range mode {
		b.WriteString(line + "\n")
	}
	return b.String()
}

// ours returns a client of redlatch, which is closed when the test ends.
func (p *env) ours(t testing.TB, opts ...redlatch.Option) *redlatch.Client {
	t.Helper()
	return harness.ClientAt(t, p.addrs(), opts...)
}

// theirs returns a client of Redisson with additional lines of YAML in its configuration,
// those for the servers indented. It is shut down when the test ends.
func (p *env) theirs(t testing.TB, lines ...string) *redisson {
	t.Helper()
	return p.j.client(t, p, lines...)
}

// conn returns a bare connection, which is closed when the test ends.
func (p *env) conn(t testing.TB) rueidis.Client {
	t.Helper()
	return harness.ConnAt(t, p.addrs())
}

// do sends a command about a key and returns its reply.
func do(t testing.TB, conn rueidis.Client, words ...string) rueidis.RedisResult {
	t.Helper()
	return conn.Do(context.Background(), conn.B().Arbitrary(words[0]).Keys(words[1]).Args(words[2:]...).Build())
}
