package system_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/probe"
)

func TestProbe(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		r, err := c.Probe(t.Context(), "orders", "{a}:b")
		require.NoError(t, err)
		require.Empty(t, r.Findings)
		require.Empty(t, log.String())
		require.Len(t, r.Nodes, 1)
		n := r.Nodes[0]
		assert.Equal(t, s.Addr, n.Addr)
		assert.Equal(t, s.Valkey(), n.Server == "valkey")
		assert.Regexp(t, `^\d+\.\d+\.\d+$`, n.Version)
		assert.Equal(t, "noeviction", n.EvictionPolicy)
		assert.Equal(t, harness.ChecksRights(t, s), n.RightsKnown)
		assert.False(t, n.Replica)
		assert.Less(t, n.ClockOffset.Abs(), time.Second)
		assert.Positive(t, n.RoundTrip)
		harness.NothingLeft(t, s.Addr)

		_, err = c.Probe(t.Context(), "")
		require.ErrorIs(t, err, lock.ErrInvalid)
		c.Close()
		_, err = c.Probe(t.Context())
		require.ErrorIs(t, err, lock.ErrClosed)
	})
}

func TestStartupChecks(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		checked := harness.ChecksRights(t, s)
		for _, tt := range []struct {
			name    string
			server  [][]string // commands to prepare the server
			options []redlatch.Option
			logged  string // "" for nothing
			missing []string
		}{
			{
				name:   "may evict",
				server: [][]string{{"CONFIG", "SET", "maxmemory", "1gb"}, {"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"}},
				logged: "may evict locks",
			},
			{
				name:    "may evict, checks disabled",
				server:  [][]string{{"CONFIG", "SET", "maxmemory", "1gb"}, {"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"}},
				options: []redlatch.Option{redlatch.WithoutStartupChecks()},
			},
			{
				name:   "a command is missing",
				server: [][]string{{"ACL", "SETUSER", "default", "-pexpire"}},
				logged: "may not PEXPIRE redlatch-startup-check",
				missing: []string{
					"PEXPIRE app:orders",
					"fair: PEXPIRE redisson_lock_queue:{app:orders}", "fair: PEXPIRE redisson_lock_timeout:{app:orders}",
					"fair: PEXPIRE redlatch_lock_alive:{app:orders}", "fair: PEXPIRE redlatch_lock_order:{app:orders}",
					"read-write: PEXPIRE {app:orders}:<client>:0:rwlock_timeout:1", "read-write: PEXPIRE redlatch_rwlock_writer:{app:orders}",
					"semaphore: PEXPIRE redlatch_sc_request:{app:orders}:<client>", "semaphore: PEXPIRE redlatch_sc_waiting:{app:orders}", "semaphore: PEXPIRE redlatch_sc_alive:{app:orders}",
					"semaphore: PEXPIRE {app:orders}:timeout", "plain: PEXPIRE app:orders",
					"once: PEXPIRE redlatch_once:{app:orders}:slot", "once: PEXPIRE redlatch_once_done:{app:orders}:slot",
					"rate limiter: PEXPIRE app:orders",
					"rate limiter: PEXPIRE {app:orders}:value", "rate limiter: PEXPIRE {app:orders}:value:<client>",
					"rate limiter: PEXPIRE {app:orders}:permits", "rate limiter: PEXPIRE {app:orders}:permits:<client>",
				},
			},
			{
				name:   "no channels",
				server: [][]string{{"ACL", "SETUSER", "default", "resetchannels"}},
				logged: "may not PUBLISH redisson_lock__channel:{redlatch-startup-check}, SUBSCRIBE redisson_lock__channel",
				missing: []string{
					"PUBLISH redisson_lock__channel:{app:orders}", "SUBSCRIBE redisson_lock__channel:{app:orders}",
					"fair: PUBLISH redisson_lock__channel:{app:orders}:<client>:0", "fair: SUBSCRIBE redisson_lock__channel:{app:orders}:<client>:0",
					"read-write: PUBLISH redisson_rwlock:{app:orders}", "read-write: SUBSCRIBE redisson_rwlock:{app:orders}",
					"semaphore: PUBLISH redisson_sc:{app:orders}", "semaphore: SUBSCRIBE redisson_sc:{app:orders}",
					"count-down latch: PUBLISH redisson_countdownlatch__channel__{app:orders}",
					"count-down latch: SUBSCRIBE redisson_countdownlatch__channel__{app:orders}",
					"plain: PUBLISH redlatch_plain__channel:{app:orders}", "plain: SUBSCRIBE redlatch_plain__channel:{app:orders}",
					"election: PUBLISH redlatch_election__channel:{app:orders}", "election: SUBSCRIBE redlatch_election__channel:{app:orders}",
					"once: PUBLISH redisson_lock__channel:redlatch_once:{app:orders}:slot",
					"once: SUBSCRIBE redisson_lock__channel:redlatch_once:{app:orders}:slot",
					"rate limiter: PUBLISH redlatch_rl__channel:{app:orders}", "rate limiter: SUBSCRIBE redlatch_rl__channel:{app:orders}",
				},
			},
			{
				// The startup checks do not cover other kinds.
				name:   "locks of package rlock only",
				server: [][]string{{"ACL", "SETUSER", "default", "-time", "-zadd", "-sadd"}},
				missing: []string{
					"fair: ZADD redisson_lock_timeout:{app:orders}", "fair: ZADD redlatch_lock_alive:{app:orders}", "fair: ZADD redlatch_lock_order:{app:orders}", "fair: TIME",
					"read-write: SADD redlatch_rwlock_writer:{app:orders}",
					"semaphore: ZADD redlatch_sc_waiting:{app:orders}", "semaphore: ZADD redlatch_sc_alive:{app:orders}",
					"semaphore: ZADD {app:orders}:timeout", "semaphore: TIME",
					"rate limiter: ZADD {app:orders}:permits", "rate limiter: ZADD {app:orders}:permits:<client>", "rate limiter: TIME",
					"group: TIME",
				},
			},
			{
				// The name used by the startup checks is not one of this user's.
				name: "own keys only",
				server: [][]string{{"ACL", "SETUSER", "default", "resetkeys", "resetchannels",
					"~app:*", "~{app:*", "~redisson_*:{app:*", "~redlatch_*:{app:*", "&redisson_*:{app:*", "&redlatch_*:{app:*", "&redisson_countdownlatch__channel__{app:*"}},
			},
			{
				name: "own keys with a prefix, without tokens",
				server: [][]string{{"ACL", "SETUSER", "default", "resetkeys",
					"~app:*", "~{app:*", "~redisson_lock_queue:*", "~redisson_lock_timeout:*", "~redlatch_*"}},
				options: []redlatch.Option{redlatch.WithNameMapper(func(name string) string { return "app:" + name })},
				logged:  "may not INCR redisson_lock_token:{app:redlatch-startup-check}",
				missing: []string{ // of app:app:orders
					"INCR redisson_lock_token:{app:app:orders}", "INCRBY redisson_lock_token:{app:app:orders}",
					"GET redisson_lock_token:{app:app:orders}", "DEL redisson_lock_token:{app:app:orders}",
				},
			},
			{
				name:    "no info",
				server:  [][]string{{"ACL", "SETUSER", "default", "-info", "-time"}},
				missing: []string{"fair: TIME", "semaphore: TIME", "rate limiter: TIME", "group: TIME"},
			},
			{
				name:   "almost no commands",
				server: [][]string{{"ACL", "SETUSER", "default", "-@all", "+ping", "+hello", "+acl", "+config"}},
				logged: "may not run scripts", missing: []string{"EVALSHA", "EVAL"},
			},
		} {
			t.Run(tt.name, func(t *testing.T) {
				for _, words := range tt.server {
					harness.Do(t, s.Addr, words...)
				}
				if !checked && !strings.Contains(tt.logged, "scripts") && tt.missing != nil {
					tt.logged, tt.missing = "", nil // what is not known is not reported
				}
				defer func() {
					harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "allcommands", "allkeys", "allchannels")
					harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0")
					harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory-policy", "noeviction")
				}()
				var log harness.Log
				c := harness.Client(t, s, append(tt.options, redlatch.WithLogger(log.Logger()))...)
				if tt.logged == "" {
					require.Empty(t, log.String())
				} else {
					require.Contains(t, log.String(), "startup check: ")
					require.Contains(t, log.String(), tt.logged)
					require.Contains(t, log.String(), "advice=")
				}
				r, err := c.Probe(t.Context(), "app:orders")
				require.NoError(t, err)
				var missing []string
				for _, f := range r.Findings {
					assert.Equal(t, s.Addr, f.Addr)
					assert.NotEmpty(t, f.Advice)
					assert.Contains(t, f.String(), f.Problem)
					kind := ""
					if f.Kind != "" {
						assert.Contains(t, f.Problem, "for "+f.Kind)
						kind = f.Kind + ": "
					}
					for _, right := range f.Missing {
						missing = append(missing, kind+strings.Replace(right.String(), c.ID(), "<client>", 1))
					}
				}
				assert.Equal(t, tt.missing, missing)
			})
		}
	})
}

// A renamed command is reported as unsupported, whether or not the server can check rights.
func TestProbeRenamedCommands(t *testing.T) {
	type renamed struct {
		command string
		logged  string // "" for nothing
		missing []string
	}
	harness.EachOf(t, []renamed{
		{"HLEN", "the server does not support HLEN redlatch-startup-check", []string{"HLEN orders", "once: HLEN redlatch_once:{orders}:slot"}},
		{"INCR", "the server does not support INCR redisson_lock_token:{redlatch-startup-check}", []string{"INCR redisson_lock_token:{orders}"}},
		{"ZMSCORE", "", []string{
			"fair: ZMSCORE redisson_lock_timeout:{orders}", "fair: ZMSCORE redlatch_lock_alive:{orders}",
		}},
		{"SPOP", "", nil}, // not used
		{"EVALSHA", "the server does not support EVALSHA", []string{"EVALSHA"}},
		{"EVAL", "the server does not support EVAL", []string{"EVAL"}},
	}, func(row renamed) string { return row.command }, func(t *testing.T, shared *testserver.Server, row renamed) {
		s := harness.Own(t, shared.Program, "--rename-command", row.command, "OTHER")
		var log harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		if row.logged == "" {
			require.Empty(t, log.String())
		} else {
			require.Contains(t, log.String(), "startup check: "+row.logged+`" `)
			require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		}

		r, err := c.Probe(t.Context(), "orders")
		require.NoError(t, err)
		var missing []string
		for _, f := range r.Findings {
			require.Equal(t, "use a server that has these commands and does not rename them", f.Advice)
			require.Empty(t, f.Rules)
			for _, right := range f.Missing {
				if f.Kind != "" {
					right.Command = f.Kind + ": " + right.Command
				}
				missing = append(missing, right.String())
			}
		}
		require.Equal(t, row.missing, missing)
	})
}

// The rules of the findings permit what is missing, and nothing that is permitted already.
func TestProbeRules(t *testing.T) {
	type row struct {
		name, denied string
		rules        map[string]string // by kind
	}
	harness.EachOf(t, []row{
		{"a command", "-zscore -publish", map[string]string{
			"":     "+publish",
			"fair": "+zscore +publish", "read-write": "+publish", "semaphore": "+zscore +publish",
			"count-down latch": "+publish", "plain": "+publish", "election": "+publish", "once": "+publish",
			"rate limiter": "+zscore +publish",
		}},
		{"keys", "resetkeys ~app:* ~redisson_* ~redlatch_*", map[string]string{
			"read-write": "~{app:orders}:*", "semaphore": "~{app:orders}:timeout",
			// two commands that are not used with another key
			"rate limiter": "~{app:orders}:value ~{app:orders}:value:* ~{app:orders}:permits +zremrangebyrank +zremrangebyscore ~{app:orders}:permits:*",
		}},
		{"keys of requests", "resetkeys ~app:* ~{app:* ~redisson_* ~redlatch_lock_* ~redlatch_rwlock_* ~redlatch_latch_round:{app:orders} ~redlatch_sc_*e:*", map[string]string{
			"semaphore":        "~redlatch_sc_request:{app:orders}:* ~redlatch_sc_request:{app:orders}:created ~redlatch_sc_waiting:{app:orders}",
			"count-down latch": "~redlatch_latch_round:{app:orders}:*",
			"election":         "~redlatch_election:{app:orders} +hincrby", // not used with another key
			"once":             "~redlatch_once:{app:orders}:* ~redlatch_once_done:{app:orders}:*",
			"rate limiter":     "~redlatch_rl_turn:{app:orders} ~redlatch_rl_reply:{app:orders}:*",
		}},
		{"all channels", "resetchannels", map[string]string{
			"":                 "+publish &redisson_lock__channel:{app:orders} +subscribe",
			"fair":             "+publish &redisson_lock__channel:{app:orders}:* +subscribe",
			"read-write":       "+publish &redisson_rwlock:{app:orders} +subscribe",
			"semaphore":        "+publish &redisson_sc:{app:orders} +subscribe",
			"count-down latch": "+publish &redisson_countdownlatch__channel__{app:orders} +subscribe",
			"plain":            "+publish &redlatch_plain__channel:{app:orders} +subscribe",
			"election":         "+publish &redlatch_election__channel:{app:orders} +subscribe",
			"once":             "+publish &redisson_lock__channel:redlatch_once:{app:orders}:* +subscribe",
			"rate limiter":     "+publish &redlatch_rl__channel:{app:orders} +subscribe",
		}},
		{"channels", "resetchannels &redisson_rwlock:* &redisson_sc:* &redisson_count* &redlatch_plain* &redlatch_election* &redlatch_rl*", map[string]string{
			"":     "&redisson_lock__channel:{app:orders}",
			"fair": "&redisson_lock__channel:{app:orders}:*",
			"once": "&redisson_lock__channel:redlatch_once:{app:orders}:*",
		}},
		{"writes", "resetkeys %R~app:* ~{app:* ~redisson_* ~redlatch_*", map[string]string{
			"": "~app:orders", "semaphore": "~app:orders", "count-down latch": "~app:orders +decrby", "plain": "~app:orders",
			"rate limiter": "~app:orders +hsetnx",
		}},
		{"a command with some keys", "-del (+del ~redisson_* ~redlatch_* ~{app:*)", map[string]string{
			"": "+del", "semaphore": "+del", "plain": "+del", "rate limiter": "+del",
		}},
		{"almost everything", "-@all +ping +hello +info +acl +config +client", map[string]string{"": "+evalsha +eval"}},
	}, func(row row) string { return row.name }, func(t *testing.T, shared *testserver.Server, row row) {
		s := harness.Own(t, shared.Program)
		if !harness.ChecksRights(t, s) {
			t.Skip("the server cannot check rights")
		}
		setUser := []string{"ACL", "SETUSER", "default"}
		harness.Do(t, s.Addr, append(setUser, strings.Fields(row.denied)...)...)
		c := harness.Client(t, s, redlatch.WithoutStartupChecks())
		r, err := c.Probe(t.Context(), "app:orders")
		require.NoError(t, err)
		rules := map[string]string{}
		for _, f := range r.Findings {
			rules[f.Kind] = strings.Join(f.Rules, " ")
		}
		require.Equal(t, row.rules, rules)

		for len(r.Findings) > 0 {
			require.NotEmpty(t, r.Findings[0].Rules)
			for _, f := range r.Findings {
				harness.Do(t, s.Addr, append(setUser, f.Rules...)...)
			}
			before := len(r.Findings[0].Missing)
			r, err = c.Probe(t.Context(), "app:orders")
			require.NoError(t, err)
			if len(r.Findings) > 0 {
				require.NotEqual(t, before, len(r.Findings[0].Missing), "no progress")
			}
		}
	})
}

// Client.Probe checks exactly the commands that the scripts use, and those that package once sends.
func TestProbeCoversScriptCommands(t *testing.T) {
	command := regexp.MustCompile(`(?:call|try)\('([A-Z]+)'|B\(\)\.([A-Z]\w+)\(|"([A-Z]+)", wire\.`)
	asked := askedOf(t)
	for _, kind := range []struct {
		scripts []string
		name    string
	}{
		{[]string{"rlock/[^p]*.lua", "internal/engine/*.lua"}, ""},
		{[]string{"rlock/plain_*.lua"}, probe.KindPlain},
		{[]string{"fairlock/*.lua"}, probe.KindFair},
		{[]string{"rwlock/*.lua"}, probe.KindReadWrite},
		{[]string{"semaphore/*.lua"}, probe.KindSemaphore},
		{[]string{"countdown/*.lua"}, probe.KindLatch},
		{[]string{"election/*.lua"}, probe.KindElection},
		{[]string{
			"once/once.go", "once/*.lua", "rlock/acquire.lua", "rlock/release.lua", "rlock/transfer.lua", "internal/engine/*.lua",
		}, probe.KindOnce},
		{[]string{"ratelimit/*.lua"}, probe.KindRate},
		{[]string{"grouplock/*.lua"}, probe.KindGroup},
	} {
		sent := map[string]bool{}
		for _, pattern := range kind.scripts {
			pattern = filepath.Join("../..", pattern)
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
		sent["HGET"] = sent["HGET"] || kind.name == "" // HoldCount sends it
		for name := range sent {
			assert.True(t, asked[kind.name][name] || asked[""][name], "%v: %s is not checked", kind.scripts, name)
		}
		for name := range asked[kind.name] {
			assert.True(t, sent[name], "%v: %s is checked but not used", kind.scripts, name)
		}
	}
}

// checksRights returns a server of its own whose scripts can ask what a user may do.
func checksRights(t *testing.T) *testserver.Server {
	t.Helper()
	for _, program := range harness.Programs(t) {
		if s := harness.Own(t, program); harness.ChecksRights(t, s) {
			return s
		}
	}
	t.Skip("no server checks rights")
	return nil
}

// askedOf returns the commands that a user lacks who may only run scripts, by kind. Scripts get the command
// that publishes as an argument.
func askedOf(t *testing.T) map[string]map[string]bool {
	t.Helper()
	s := checksRights(t)
	harness.Do(t, s.Addr, "ACL", "SETUSER", "default", "-@all", "+eval", "+evalsha", "+ping", "+hello", "+info", "+acl", "+config", "+client")
	r, err := harness.Client(t, s, redlatch.WithoutStartupChecks()).Probe(t.Context(), "orders")
	require.NoError(t, err)
	require.True(t, r.Nodes[0].RightsKnown)
	asked := map[string]map[string]bool{}
	for _, f := range r.Findings {
		asked[f.Kind] = map[string]bool{}
		for _, right := range f.Missing {
			if right.Command != "PUBLISH" && !strings.HasSuffix(right.Command, "SUBSCRIBE") {
				asked[f.Kind][right.Command] = true
			}
		}
	}
	return asked
}

// What a server says of itself, and how its clock and its distance compare.
func TestFindings(t *testing.T) {
	const timeout = time.Second // of the watchdog
	for _, tt := range []struct {
		name    string
		info    string
		ahead   time.Duration // of the server's clock
		latency time.Duration
		want    probe.Check // "" for nothing
	}{
		{name: "redis 6.2", info: "redis_version:6.2.14"},
		{name: "redis 8", info: "redis_version:8.4.0"},
		{name: "redis 6.0", info: "redis_version:6.0.16", want: probe.CheckVersion},
		{name: "valkey 7.2", info: "redis_version:7.2.4 server_name:valkey valkey_version:7.2.5"},
		{name: "valkey 10", info: "redis_version:7.2.4 server_name:valkey valkey_version:10.0.0"},
		{name: "another server", info: "redis_version:1.0.0 server_name:other"},
		{name: "no info", info: ""},
		{name: "an unknown version format", info: "redis_version:unstable"},
		{name: "evicts", info: "redis_version:7.0.0 maxmemory:1 maxmemory_policy:volatile-ttl role:master", want: probe.CheckEviction},
		{name: "does not evict", info: "redis_version:7.0.0 maxmemory:1 maxmemory_policy:noeviction role:master"},
		{name: "has no bound", info: "redis_version:7.0.0 maxmemory:0 maxmemory_policy:volatile-ttl role:master"},
		{name: "is a replica", info: "redis_version:7.0.0 maxmemory:1 maxmemory_policy:volatile-ttl role:slave"},
		{name: "clock ahead", ahead: 1100 * time.Millisecond, want: probe.CheckClock},
		{name: "clock behind", ahead: -1100 * time.Millisecond, want: probe.CheckClock},
		{name: "clock about right", ahead: 900 * time.Millisecond},
		{name: "clock offset too imprecise", ahead: 950 * time.Millisecond, latency: timeout / 7}, // of which it adds a half
		{name: "near", latency: timeout / 7},
		{name: "far", latency: timeout / 5, want: probe.CheckLatency}, // too far for renewals to be repeated
	} {
		t.Run(tt.name, func(t *testing.T) {
			harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
				s.Latency = tt.latency
				s.Server().SetPreHook(func(p *server.Peer, command string, _ ...string) bool {
					switch command {
					case "INFO":
						p.WriteBulk(strings.ReplaceAll(tt.info, " ", "\r\n"))
					case "TIME":
						now := time.Now().Add(tt.ahead).UnixMicro()
						p.WriteStrings([]string{fmt.Sprint(now / 1e6), fmt.Sprint(now % 1e6)})
					default:
						return false
					}
					return true
				})
				var log harness.Log
				c := s.Client(t, redlatch.WithLogger(log.Logger()), redlatch.WithWatchdogTimeout(timeout))
				require.Equal(t, tt.want != "", strings.Contains(log.String(), "check="+string(tt.want)), log.String())
				r, err := c.Probe(t.Context())
				require.NoError(t, err)
				var found []probe.Check
				for _, f := range r.Findings {
					found = append(found, f.Check)
					require.Equal(t, "memory:0", f.Addr)
				}
				if tt.want == "" {
					require.Empty(t, found)
				} else {
					require.Equal(t, []probe.Check{tt.want}, found)
				}
			})
		})
	}
}
