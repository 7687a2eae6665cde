// Package harness contains what the tests of several packages share: real servers, worker processes
// of the test program, and checks for leaks.
package harness

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/testserver"
)

var (
	finallyMu sync.Mutex
	finally   []func()
)

// Finally registers f to run after all tests of the package, in reverse order of registration.
func Finally(f func()) {
	finallyMu.Lock()
	defer finallyMu.Unlock()
	finally = append(finally, f)
}

// Main is the TestMain of a package that uses this one. It runs a worker if the process was started
// by Spawn; otherwise it runs the tests, and fails if they leak a goroutine.
func Main(m *testing.M, workers map[string]func(args []string) error) {
	flag.Parse()
	runWorker(workers)
	code := m.Run()
	for _, f := range slices.Backward(finally) {
		f()
	}
	servers.stop()
	if code == 0 {
		if err := leaked(); err != nil {
			fmt.Fprintln(os.Stderr, "goroutines left behind:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// leaked returns an error if goroutines do not end. It waits, because some of rueidis sleep for a
// second before they notice that their client is closed.
func leaked() (err error) {
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
		if err = goleak.Find(); err == nil {
			return nil
		}
	}
	return err
}

// Own returns a server that only this test uses, and that it may kill.
func Own(t testing.TB, program string, args ...string) *testserver.Server {
	t.Helper()
	s, err := testserver.Start(program, args...)
	require.NoError(t, err)
	t.Cleanup(s.Stop)
	return s
}

// Do sends one command on a new connection and returns the first line of its reply, which must not
// be an error.
func Do(t testing.TB, addr string, words ...string) string {
	t.Helper()
	reply, err := testserver.Command(addr, words...)
	require.NoError(t, err, "%v", words)
	require.False(t, strings.HasPrefix(reply, "-"), "%v: %s", words, reply)
	return reply
}

// ChecksRights reports whether scripts can ask a server what its user may do.
func ChecksRights(t testing.TB, s *testserver.Server) bool {
	t.Helper()
	return Do(t, s.Addr, "EVAL", "return redis.acl_check_cmd and 1 or 0", "0") == ":1"
}

// Client returns a client on a server. The end of the test closes it.
func Client(t testing.TB, s *testserver.Server, opts ...redlatch.Option) *redlatch.Client {
	t.Helper()
	return ClientAt(t, []string{s.Addr}, opts...)
}

// ClientAt is Client for the nodes of a cluster.
func ClientAt(t testing.TB, addrs []string, opts ...redlatch.Option) *redlatch.Client {
	t.Helper()
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: addrs}, opts...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// WithoutSubscribe is Client for a user of the server s that must not subscribe.
func WithoutSubscribe(t testing.TB, s *testserver.Server, opts ...redlatch.Option) *redlatch.Client {
	t.Helper()
	Do(t, s.Addr, "ACL", "SETUSER", "mute", "on", ">secret", "allkeys", "allchannels", "+@all", "-subscribe")
	opt, err := redlatch.ParseURL("redis://mute:secret@" + s.Addr)
	require.NoError(t, err)
	c, err := redlatch.New(t.Context(), opt, append(opts, redlatch.WithoutStartupChecks())...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// Conn returns a rueidis client on a server. The end of the test closes it.
func Conn(t testing.TB, addr string) rueidis.Client {
	t.Helper()
	return ConnAt(t, []string{addr})
}

// ConnAt is Conn for the nodes of a cluster.
func ConnAt(t testing.TB, addrs []string) rueidis.Client {
	t.Helper()
	opt := rueidis.ClientOption{InitAddress: addrs, DisableCache: true}

	// Without a limit, a command never ends while two nodes redirect to each other.
	opt.ClusterOption.MaxMovedRedirections = 16
	conn, err := rueidis.NewClient(opt)
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return conn
}

// PTTL returns the reply to the PTTL command.
func PTTL(t testing.TB, addr, key string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(strings.TrimPrefix(Do(t, addr, "PTTL", key), ":"), 10, 64)
	require.NoError(t, err)
	return n
}

// Eventually fails the test unless cond becomes true within d. It is for events of other processes
// and servers.
func Eventually(t testing.TB, d time.Duration, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(d); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			require.FailNow(t, "not within "+d.String()+": "+what)
		}
	}
}

// Answers waits until the server replies to PING with the prefix.
func Answers(t testing.TB, s *testserver.Server, prefix string) {
	t.Helper()
	Eventually(t, 10*time.Second, "the server answers "+prefix, func() bool {
		reply, err := testserver.Command(s.Addr, "PING")
		return err == nil && strings.HasPrefix(reply, prefix)
	})
}

// NothingLeft fails the test unless the server is empty soon, after the cached replies of releases
// have expired.
func NothingLeft(t testing.TB, addr string) {
	t.Helper()
	empty := false
	for deadline := time.Now().Add(20 * time.Second); !empty && time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		empty = Do(t, addr, "DBSIZE") == ":0"
	}
	if !empty {
		keys, err := testserver.Query(addr, "KEYS", "*")
		require.NoError(t, err)
		require.Empty(t, keys, "leftover keys")
	}
}

// NothingStays fails the test unless the server soon has no keys except cached replies with an
// expiry.
func NothingStays(t testing.TB, addr string) {
	t.Helper()
	conn := Conn(t, addr)
	Eventually(t, 10*time.Second, "no leftover keys", func() bool {
		keys, err := conn.Do(context.Background(), conn.B().Keys().Pattern("*").Build()).AsStrSlice()
		require.NoError(t, err)
		for _, key := range keys {
			cached := strings.HasPrefix(key, "redisson_unlock_latch:") || strings.HasPrefix(key, "redlatch_sc_request")
			if !cached || PTTL(t, addr, key) == -1 {
				return false
			}
		}
		return true
	})
}

// Commands returns the number of calls of each command, by its name in lower case, since CONFIG
// RESETSTAT. Calls of subcommands are added up, because Redis 6.2 counts them together.
func Commands(t testing.TB, conn rueidis.Client) map[string]int {
	t.Helper()
	info, err := conn.Do(context.Background(), conn.B().Info().Section("commandstats").Build()).ToString()
	require.NoError(t, err)
	calls := map[string]int{}
	for line := range strings.Lines(info) {
		name, rest, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		if !ok {
			continue
		}
		digits, _, _ := strings.Cut(rest, ",")
		n, err := strconv.Atoi(digits)
		require.NoError(t, err)
		command, _, _ := strings.Cut(name, "|")
		calls[command] += n
	}
	return calls
}
