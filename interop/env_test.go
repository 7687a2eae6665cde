package interop

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

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

// eachServer runs a test for every server program, and in the second tier for a cluster of
// redis-server. The servers are empty.
func eachServer(t *testing.T, test func(t *testing.T, servers []*testserver.Server)) {
	t.Helper()
	harness.Each(t, func(t *testing.T, s *testserver.Server) { test(t, []*testserver.Server{s}) })
	if clustered() {
		t.Run("cluster", func(t *testing.T) { test(t, cluster(t)) })
	}
}

// clustered reports whether tests also run on a cluster: in the second tier, if they run on
// redis-server.
func clustered() bool { return !testing.Short() && onRedis() }

func onRedis() bool {
	named := os.Getenv("REDLATCH_SERVERS")
	return named == "" || strings.Contains(named, testserver.Redis)
}

// redisProgram returns the first Redis among the servers of this run.
func redisProgram(t testing.TB) string {
	t.Helper()
	for _, program := range harness.Programs(t) {
		if strings.HasPrefix(program, testserver.Redis) {
			return program
		}
	}
	return testserver.Redis
}

// ofRedis starts a test of the second tier whose servers run redis-server, whatever others
// run.
func ofRedis(t *testing.T) {
	t.Helper()
	harness.Full(t)
	if !onRedis() {
		t.Skip("its servers are of " + testserver.Redis)
	}
	t.Parallel()
}

func flush(t testing.TB, servers []*testserver.Server) {
	t.Helper()
	for _, s := range servers {
		harness.Do(t, s.Addr, "FLUSHALL")
	}
}

// eachEnv runs a test on all servers, each with every one of those versions of Redisson, or
// with all if there are none. The servers are empty.
func eachEnv(t *testing.T, of []string, test func(t *testing.T, p *env)) {
	t.Helper()
	if of == nil {
		of = versions()
	}
	eachServer(t, func(t *testing.T, servers []*testserver.Server) {
		for _, version := range of {
			t.Run("Redisson "+version, func(t *testing.T) {
				flush(t, servers)
				test(t, at(t, version, servers...))
			})
		}
	})
}

// everywhere runs a slow test with all versions of Redisson on redis-server, in parallel, and
// with the newest on other servers.
func everywhere(t *testing.T, test func(t *testing.T, p *env)) {
	t.Helper()
	eachServer(t, func(t *testing.T, servers []*testserver.Server) {
		of := []string{newest}
		if len(servers) == 1 && !servers[0].Valkey() {
			of = versions()
		}
		for _, version := range of {
			p := at(t, version, servers...)
			t.Run("Redisson "+version, func(t *testing.T) {
				t.Parallel()
				test(t, p)
			})
		}
	})
}

// clusters are the unused clusters. Starting one takes longer than many tests.
var clusters struct {
	mu   sync.Mutex
	idle []*testserver.Cluster
}

// cluster returns the nodes of an empty cluster of redis-server for the exclusive use of this
// test, which must leave it unchanged.
func cluster(t testing.TB) []*testserver.Server {
	t.Helper()
	var c *testserver.Cluster
	clusters.mu.Lock()
	if last := len(clusters.idle) - 1; last >= 0 {
		c, clusters.idle = clusters.idle[last], clusters.idle[:last]
	}
	clusters.mu.Unlock()
	if c == nil {
		var err error
		c, err = testserver.StartCluster(redisProgram(t), 3, false, 15*time.Second)
		require.NoError(t, err)
		harness.Finally(c.Stop)
	}
	t.Cleanup(func() {
		clusters.mu.Lock()
		defer clusters.mu.Unlock()
		clusters.idle = append(clusters.idle, c)
	})
	flush(t, c.Primaries)
	return c.Primaries
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
