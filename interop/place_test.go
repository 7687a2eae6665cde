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

// place is where Go and Java meet: servers and a version of Redisson.
type place struct {
	version string // of Redisson
	servers []*testserver.Server
	cluster bool
	codec   string // of clients of Redisson, if it is not the default
	j       *jvm
}

// at returns the place of those servers: one, or the nodes of a cluster.
func at(t testing.TB, version string, servers ...*testserver.Server) *place {
	t.Helper()
	p := &place{version: version, servers: servers, cluster: len(servers) > 1, j: shared(t, version)}
	if servers[0].Program == testserver.Valkey {
		p.codec = "org.redisson.client.codec.StringCodec"
	}
	return p
}

// eachServer runs a test for every server program, and in the second tier for a cluster
// of redis-server, empty.
func eachServer(t *testing.T, test func(t *testing.T, servers []*testserver.Server)) {
	t.Helper()
	harness.Each(t, func(t *testing.T, s *testserver.Server) { test(t, []*testserver.Server{s}) })
	if clustered() {
		t.Run("cluster", func(t *testing.T) { test(t, cluster(t)) })
	}
}

// clustered reports whether tests run on a cluster, too: in the second tier, where they
// run on redis-server.
func clustered() bool { return !testing.Short() && onRedis() }

func onRedis() bool {
	named := os.Getenv("REDLATCH_SERVERS")
	return named == "" || strings.Contains(named, testserver.Redis)
}

// ofRedis begins a test of the second tier whose servers are of redis-server, whatever
// others run on.
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

// eachPlace runs a test on all servers, each with every one of those versions of
// Redisson, or all. The servers are empty.
func eachPlace(t *testing.T, of []string, test func(t *testing.T, p *place)) {
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

// everywhere runs a test with all versions of Redisson on redis-server, side by side,
// and with the newest elsewhere. It is for tests that take long.
func everywhere(t *testing.T, test func(t *testing.T, p *place)) {
	t.Helper()
	eachServer(t, func(t *testing.T, servers []*testserver.Server) {
		of := []string{newest}
		if len(servers) == 1 && servers[0].Program == testserver.Redis {
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

// clusters are those that no test has. Starting one takes longer than many a test.
var clusters struct {
	mu   sync.Mutex
	idle []*testserver.Cluster
}

// cluster returns the nodes of a cluster of redis-server, empty, that only this test uses
// and must leave as it was.
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
		c, err = testserver.StartCluster(testserver.Redis, 3, false, 15*time.Second)
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

// addrs are where clients find the servers.
func (p *place) addrs() []string {
	var addrs []string
	for _, s := range p.servers {
		addrs = append(addrs, s.Addr)
	}
	return addrs
}

// config is the config of a client of Redisson there, with more lines.
func (p *place) config(more []string) string {
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

// ours returns a client of redlatch there, closed when the test ends.
func (p *place) ours(t testing.TB, opts ...redlatch.Option) *redlatch.Client {
	t.Helper()
	return harness.ClientAt(t, p.addrs(), opts...)
}

// theirs returns a client of Redisson there, with lines of YAML in its config, those
// for the servers indented; it is shut down when the test ends.
func (p *place) theirs(t testing.TB, lines ...string) *redisson {
	t.Helper()
	return p.j.client(t, p, lines...)
}

// conn returns a bare connection, closed when the test ends.
func (p *place) conn(t testing.TB) rueidis.Client {
	t.Helper()
	return harness.ConnAt(t, p.addrs())
}

// do sends a command about a key and returns its reply.
func do(t testing.TB, conn rueidis.Client, words ...string) rueidis.RedisResult {
	t.Helper()
	return conn.Do(context.Background(), conn.B().Arbitrary(words[0]).Keys(words[1]).Args(words[2:]...).Build())
}
