package main

import (
	"context"
	"encoding/json"
	"maps"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// verified runs verify, which must have that status within its 30 s, and returns the checks by name.
func verified(t *testing.T, addr string, status int, args ...string) (verification, map[string]verdict) {
	t.Helper()
	began := time.Now()
	r := finishWithin(t, addr, 40*time.Second, append([]string{"verify", "--json"}, args...)...)
	require.Less(t, time.Since(began), 31*time.Second)
	var got verification
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &got), r.stderr)
	checks := map[string]verdict{}
	for i, c := range got.Checks {
		require.Equal(t, verifyChecks[i].name, c.Check)
		checks[c.Check] = c
	}
	require.Len(t, checks, len(verifyChecks))
	require.Equal(t, status, r.status, "%s\n%s", r.stdout, r.stderr)
	require.Empty(t, r.stderr)
	require.Empty(t, got.Left)
	return got, checks
}

// finishWithin is finish for a command that takes longer.
func finishWithin(t *testing.T, addr string, d time.Duration, args ...string) result {
	t.Helper()
	c := start(t, addr, args...)
	status := c.status(d)
	var stdout []string
	for line := range c.lines {
		stdout = append(stdout, line)
	}
	return result{status, strings.Join(stdout, "\n"), c.stderr.String()}
}

// requireResults fails the test unless the named checks have these results, and all others work. Hash
// tags need a cluster.
func requireResults(t *testing.T, checks map[string]verdict, want map[string]string) {
	t.Helper()
	got, all := map[string]string{}, map[string]string{}
	maps.Copy(all, want)
	for name, c := range checks {
		got[name] = c.Result
		if _, ok := all[name]; !ok {
			all[name] = resultWorks
		}
	}
	require.Equal(t, all, got, "%v", slices.Collect(maps.Values(checks)))
}

// requireNoKeys fails the test if a server has any key now: verify must not leave it to an expiry.
func requireNoKeys(t *testing.T, addrs ...string) {
	t.Helper()
	for _, addr := range addrs {
		keys, err := testserver.Query(addr, "KEYS", "*")
		require.NoError(t, err)
		require.Empty(t, keys)
	}
}

func TestVerify(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		got, checks := verified(t, s.Addr, 0)
		requireResults(t, checks, map[string]string{"hash tags": resultUnchecked})
		require.Regexp(t, `^(redis|valkey) \d+\.\d+\.\d+$`, got.Server)
		require.Equal(t, s.Valkey(), strings.HasPrefix(got.Server, "valkey"))
		require.Equal(t, "single server", got.Topology)
		require.Equal(t, "plain", got.PubSub)
		require.Positive(t, got.RoundTrip)
		require.Greater(t, checks["polling"].Seconds, 3.0, "the client was woken by a message")
		require.Less(t, checks["reconnection"].Seconds, 3.0, "the client has not noticed that it lost its connections")
		requireNoKeys(t, s.Addr)
	})
}

// The table has a line for each check, and no blanks at the ends.
func TestVerifyTable(t *testing.T) {
	var out strings.Builder
	require.NoError(t, (&verifyCommand{}).print(&out, verification{
		Server: "redis 7.0.15", Topology: "single server", PubSub: "plain", RoundTrip: 0.25, Seconds: 5.04,
		Checks: []verdict{
			{Check: "lock", Result: resultWorks}, {Check: "latch", Result: resultPolls, Detail: "no message came within 1s"},
			{Check: "election", Result: resultFails, Detail: "leader: NOPERM"},
		},
	}))
	require.Equal(t, `server      redis 7.0.15
topology    single server, plain pub/sub
round trip  0.25 ms
duration    5.0 s

CHECK             RESULT            DETAIL
lock              works
latch             works by polling  no message came within 1s
election          does not work     leader: NOPERM
`, out.String())
}

// Both kinds of pub/sub work in a cluster, and so do names of one slot.
func TestVerifyCluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		for _, mode := range harness.PubSubModes(t, cluster) {
			got, checks := verified(t, cluster.Addrs()[0], 0, "--pubsub", mode.String(), "--prefix", "app:")
			requireResults(t, checks, nil)
			require.Equal(t, mode.String(), got.PubSub)
			require.Equal(t, "cluster, 3 nodes", got.Topology)
			requireNoKeys(t, cluster.Addrs()...)
		}
	})
}

// documentedRights returns the rights in the documentation for names that begin with app:, with those
// of the rows of a table that begin with these words.
func documentedRights(t *testing.T, rows ...string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/operations/permissions.md")
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(text), "    ACL SETUSER app on >password ")
	rights, _, found := strings.Cut(rest, "\n\n")
	require.True(t, found)
	for _, row := range rows {
		_, rest, found := strings.Cut(string(text), "\n| "+row)
		require.True(t, found, row)
		line, _, _ := strings.Cut(rest, "\n")
		for _, quoted := range regexp.MustCompile("`[^`]+`").FindAllString(line, -1) {
			rights += " " + strings.Trim(quoted, "`")
		}
	}
	return rights
}

var kindRows = []string{
	"fair locks", "read-write locks", "group locks", "semaphores", "count-down latches", "rate limiters", "plain locks", "elections", "once-only work",
}

// The documented rights suffice. Without those of the startup checks only the server is unknown.
func TestVerifyRights(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		rights := documentedRights(t, append(slices.Clone(kindRows), "the startup checks")...)
		rows := []struct {
			rights string
			status int
			want   map[string]string
		}{
			{rights, 0, map[string]string{"hash tags": resultUnchecked}},
			{documentedRights(t, kindRows...) + " -info", 0, map[string]string{
				"hash tags": resultUnchecked, "eviction": resultUnchecked,
			}},
			// Keys that the user may not touch are not left behind.
			{strings.ReplaceAll(rights, "~redlatch_election:{app:*", ""), statusNo, map[string]string{
				"hash tags": resultUnchecked, "election": resultFails,
			}},
		}
		for _, row := range rows[:harness.Size(1, len(rows))] {
			_, checks := verified(t, s.Addr, row.status, "--url", restricted(t, s, row.rights), "--prefix", "app:")
			requireResults(t, checks, row.want)
			requireNoKeys(t, s.Addr)
		}
	})
}

// far returns the address of a proxy in front of a server, through which a round trip takes that much longer.
func far(t *testing.T, s *testserver.Server, roundTrip time.Duration) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var all sync.WaitGroup
	forward := func(from, to net.Conn) {
		defer to.Close()
		for b := make([]byte, 1<<14); ; {
			n, err := from.Read(b)
			if err != nil {
				return
			}
			time.Sleep(roundTrip / 2)
			_, _ = to.Write(b[:n])
		}
	}
	all.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", s.Addr)
			if !assert.NoError(t, err) {
				client.Close()
				return
			}
			all.Go(func() { forward(client, server) })
			all.Go(func() { forward(server, client) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		all.Wait() // redlatch has ended, and closed its connections
	})
	return l.Addr().String()
}

// The bounds grow with the round trip. Where the time is too short for a check, verify does not say that
// something fails.
func TestVerifyTooFar(t *testing.T) {
	harness.Full(t)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		_, checks := verified(t, far(t, s, 800*time.Millisecond), statusWarning)
		late := 0
		for name, c := range checks {
			require.NotEqual(t, resultFails, c.Result, "%s: %s", name, c.Detail)
			if strings.HasPrefix(c.Detail, "no time was left") {
				late++
			}
		}
		require.Positive(t, late)
		requireNoKeys(t, s.Addr)
	})
}

// Without messages everything works, and the table says that waiters poll. It warns of a server that evicts.
func TestVerifyWithoutMessages(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program, "--maxmemory", "1gb", "--maxmemory-policy", "volatile-lru")
		gate := harness.NewGate(t, s)
		gate.Mute()
		_, checks := verified(t, gate.Addr, statusWarning)
		want := map[string]string{"hash tags": resultUnchecked, "eviction": resultWarning}
		for _, name := range []string{
			"lock", "fenced lock", "plain lock", "fair lock", "read-write lock", "group lock", "semaphore", "permit semaphore", "rate limiter", "latch", "election",
			"once-only work", "MultiLock", "reconnection",
		} {
			want[name] = resultPolls
		}
		requireResults(t, checks, want)
		require.Contains(t, checks["lock"].Detail, "no message came")
		require.Contains(t, checks["eviction"].Detail, "set it to noeviction")
		requireNoKeys(t, s.Addr)
	})
}

// A server that lacks a command breaks only what needs it, and the table names the command.
func TestVerifyMissingCommand(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program, "--rename-command", "ZMSCORE", "")
		_, checks := verified(t, s.Addr, statusNo)
		requireResults(t, checks, map[string]string{
			"hash tags": resultUnchecked, "fair lock": resultFails, "election": resultFails,
			"MultiLock": checks["MultiLock"].Result, // one of its members is a fair lock, for which it may have to wait
		})
		require.Regexp(t, `^waiting: .*[Uu]nknown`, checks["fair lock"].Detail)
		requireNoKeys(t, s.Addr)
	})
}

// A server that forgets locks breaks all of them.
func TestVerifyForgetfulServer(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		conn := harness.Conn(t, s.Addr)
		end := every(2*time.Millisecond, func() {
			_ = conn.Do(context.Background(), conn.B().Flushall().Build()).Error()
		})
		_, checks := verified(t, s.Addr, statusNo)
		end()
		for _, name := range []string{"lock", "fenced lock", "fair lock", "read-write lock", "election", "MultiLock", "renewal", "reconnection"} {
			require.Equal(t, resultFails, checks[name].Result, name)
		}
	})
}

// A lock that a second client gets, or nobody gets after the release, is noticed.
func TestVerifyNoticesABrokenLock(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		free, held := harness.Client(t, s).Lock("free"), harness.Client(t, s).Lock("held")
		h, err := held.TryLock(t.Context())
		require.NoError(t, err)
		defer unlock(t, h)
		check := &trial{verifier: &verifier{}, ctx: t.Context(), name: "free"}
		require.ErrorIs(t, check.taken(free), errBoth)
		require.NoError(t, check.taken(held))
		require.ErrorIs(t, check.free(held), lock.ErrNotAcquired)
		require.NoError(t, check.free(free))
		ended := make(chan error, 1)
		ended <- nil
		require.ErrorIs(t, check.parked(harness.Client(t, s), ended), errBoth)
		require.ErrorContains(t, check.inTime("lease", time.Second, 900*time.Millisecond), "before its lease")
		require.ErrorContains(t, check.inTime("lease", time.Second, 4*time.Second), "later than its lease")
		require.NoError(t, check.inTime("lease", time.Second, time.Second))
	})
}

// A signal at any time leaves nothing behind.
func TestVerifyInterrupted(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := start(t, s.Addr, "verify")
		harness.Eventually(t, patience, "a key", func() bool { return harness.Do(t, s.Addr, "DBSIZE") != ":0" })
		c.signal(syscall.SIGTERM)
		require.Equal(t, statusSignal+int(syscall.SIGTERM), c.status(2*patience))
		require.Empty(t, c.stderr.String())
		requireNoKeys(t, s.Addr)
	})
}

// verify ends although the server does not answer any more, and names the keys that it could not delete.
func TestVerifyWithoutServer(t *testing.T) {
	harness.Full(t)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		gate := harness.NewGate(t, s)
		c := start(t, gate.Addr, "verify")
		harness.Eventually(t, patience, "a key", func() bool { return harness.Do(t, s.Addr, "DBSIZE") != ":0" })
		gate.Stall()
		require.Equal(t, statusFailed, c.status(40*time.Second))
		require.Contains(t, c.stderr.String(), "may be left: ")
		require.Contains(t, c.stderr.String(), "redlatch-verify-")
		require.NoError(t, gate.Open())
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

func TestVerifyFails(t *testing.T) {
	require.Equal(t, statusFailed, finish(t, unreachable, "verify").status)
	require.Equal(t, statusFailed, finish(t, unreachable, "verify", "--pubsub", "none").status)
}
