package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// restricted returns the URL of a user with these rights, on a server of the test.
func restricted(t *testing.T, s *testserver.Server, rights string) string {
	t.Helper()
	harness.Do(t, s.Addr, append([]string{"ACL", "SETUSER", "app", "reset", "on", ">secret"}, strings.Fields(rights)...)...)
	return "redis://app:secret@" + s.Addr
}

// apply runs the ACL commands of a checklist.
func apply(t *testing.T, s *testserver.Server, checklist string) {
	t.Helper()
	for line := range strings.Lines(checklist) {
		if words := strings.Fields(line); words[0] == "ACL" {
			harness.Do(t, s.Addr, words...)
		}
	}
}

// rightsChecked skips the test if the server cannot check rights.
func rightsChecked(t *testing.T, s *testserver.Server) {
	t.Helper()
	if !harness.ChecksRights(t, s) {
		t.Skip("the server cannot check rights")
	}
}

// The missing rights of a check are printed with the rule that grants them.
func TestProbe(t *testing.T) {
	type row struct{ name, rights, check, rules string }
	harness.EachOf(t, []row{
		{"a key", "+@all allchannels ~app:* ~{app:* ~redisson_* ~redlatch_[^e]*", "missing  elections ", "~redlatch_election:{app:orders} +hincrby"},
		{"a channel", "+@all allkeys &redisson_[^s]* &redlatch_*", "missing  semaphores ", "&redisson_sc:{app:orders}"},
		{"the clock", "+@all -time allkeys allchannels", "unknown  clock ", "+time"},
		{"almost everything", "-@all +ping +hello", "missing  scripts ", "+evalsha +eval"},
	}, func(r row) string { return r.name }, func(t *testing.T, shared *testserver.Server, r row) {
		s := harness.Own(t, shared.Program)
		rightsChecked(t, s)
		got := finish(t, s.Addr, "probe", "--url", restricted(t, s, r.rights), "app:orders")
		require.Equal(t, statusNo, got.status, got.stderr)
		_, rest, found := strings.Cut(got.stdout, r.check)
		require.True(t, found, got.stdout)
		require.Equal(t, "ACL SETUSER app "+r.rules, strings.TrimSpace(strings.Split(rest, "\n")[1]))
	})
}

// An asterisk yields rules for all names with a beginning.
func TestProbePattern(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		rightsChecked(t, s)
		url := restricted(t, s, "+@all")
		for range 2 {
			apply(t, s, finish(t, s.Addr, "probe", "--url", url, "app:*").stdout)
		}
		for _, name := range []string{"app:orders", "app:other"} {
			succeeds(t, s.Addr, "probe", "--url", url, name)
		}
		require.Equal(t, statusNo, finish(t, s.Addr, "probe", "--url", url, "orders").status)
		require.Equal(t, statusNo, finish(t, s.Addr, "probe", "--url", url, "app:other", "orders").status)
	})
}

// The rules for any name can be pasted into a session of redis-cli.
func TestProbeStrangeNames(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		rightsChecked(t, s)
		for _, name := range []string{`"quoted"`, "it's", "a b", "line\nbreak", "\x1b[31m\v\x7f", `back\slash?`} {
			url := restricted(t, s, "+@all")
			for range 2 {
				lines := finish(t, s.Addr, "probe", "--kind", "lock", "--url", url, name).stdout
				require.NotRegexp(t, `ACL SETUSER .*["']`, lines)
				require.NotRegexp(t, `[^\n[:print:]µ]`, lines)
				apply(t, s, lines)
			}
			succeeds(t, s.Addr, "probe", "--kind", "lock", "--url", url, name)
		}
	})
}

func TestProbeKindsAndFormats(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		rightsChecked(t, s)
		url := restricted(t, s, "+@all -zscore allkeys allchannels")
		require.Equal(t, statusNo, finish(t, s.Addr, "probe", "--url", url, "a").status)
		text := succeeds(t, s.Addr, "probe", "--url", url, "--kind", "lock,latch", "a")
		require.Regexp(t, `^`+s.Addr+`
  ok       version           (redis|valkey) \d+\.\d+\.\d+
  ok       eviction          noeviction
  ok       clock             \S+ off
  ok       locks
  ok       latches
$`, text)
		harness.NothingLeft(t, s.Addr)

		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "1gb")
		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
		r := finish(t, s.Addr, "probe", "--url", url, "--kind", "latch,fair", "--json", "a")
		require.Equal(t, statusNo, r.status)
		require.Empty(t, r.stderr)
		var got struct{ Nodes []checklist }
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &got))
		require.Len(t, got.Nodes, 1)
		require.Equal(t, s.Addr, got.Nodes[0].Addr)
		require.Equal(t, s.Valkey(), got.Nodes[0].Server == "valkey")
		states := map[string]string{}
		for _, c := range got.Nodes[0].Checks {
			states[c.Check] = c.State
			if c.Check == "fair locks" {
				require.Equal(t, "ACL SETUSER app +zscore", c.ACL)
				require.Contains(t, c.Missing, "ZSCORE redisson_lock_timeout:{a}")
			}
		}
		require.Equal(t, map[string]string{
			"version": "ok", "clock": "ok", "eviction": "wrong", "fair locks": "missing", "latches": "ok",
		}, states)
		r = finish(t, s.Addr, "probe", "a")
		require.Equal(t, statusNo, r.status)
		require.Contains(t, r.stdout, "set maxmemory-policy to noeviction")
	})
}

// A server that lacks a command is told from one that cannot check rights.
func TestProbeRenamedCommand(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program, "--rename-command", "HLEN", "OTHER")
		r := finish(t, s.Addr, "probe", "--kind", "lock,latch", "a")
		require.Equal(t, statusNo, r.status, r.stderr)
		_, checks, _ := strings.Cut(r.stdout, " off\n")
		want := `  missing  locks             HLEN a
           use a server that has these commands and does not rename them
  ok       latches
`
		if !harness.ChecksRights(t, s) {
			const doubt = "the server cannot check rights\n"
			want = strings.Replace("  unknown  locks             "+doubt+want, "ok       latches\n", "unknown  latches           "+doubt, 1)
			succeeds(t, s.Addr, "probe", "--kind", "latch", "a")
		}
		require.Equal(t, want, checks)
	})
}

// Each node of a cluster has a checklist.
func TestProbeCluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		harness.Full(t)
		cluster := harness.Cluster(t, shared.Program)
		text := succeeds(t, cluster.Addrs()[0], "probe", "orders")
		for _, addr := range cluster.Addrs() {
			require.Contains(t, text, addr+"\n  ok ")
		}
	})
}
