package redlatch_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

func TestProbeOfAServerThatIsAllRight(t *testing.T) {
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
		assert.Equal(t, s.Program, n.Server+"-server")
		assert.Regexp(t, `^\d+\.\d+\.\d+$`, n.Version)
		assert.Equal(t, "noeviction", n.EvictionPolicy)
		assert.True(t, n.RightsKnown)
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
		for _, tt := range []struct {
			name    string
			server  [][]string // what to do to the server
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
				name:    "may evict, and nobody wants to know",
				server:  [][]string{{"CONFIG", "SET", "maxmemory", "1gb"}, {"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"}},
				options: []redlatch.Option{redlatch.WithoutStartupChecks()},
			},
			{
				name:   "policy without a bound",
				server: [][]string{{"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"}},
			},
			{
				name:    "no scripts",
				server:  [][]string{{"ACL", "SETUSER", "default", "-@scripting"}},
				logged:  "may not run scripts",
				missing: []string{"EVALSHA", "EVAL"},
			},
			{
				name:    "a command is missing",
				server:  [][]string{{"ACL", "SETUSER", "default", "-pexpire"}},
				logged:  "may not PEXPIRE redlatch-startup-check",
				missing: []string{"PEXPIRE app:orders", "PEXPIRE redisson_unlock_latch:{app:orders}:id"},
			},
			{
				name:   "no channels",
				server: [][]string{{"ACL", "SETUSER", "default", "resetchannels"}},
				logged: "may not PUBLISH redisson_lock__channel:{redlatch-startup-check}",
				missing: []string{
					"PUBLISH redisson_lock__channel:{app:orders}", "SUBSCRIBE redisson_lock__channel:{app:orders}",
				},
			},
			{
				name:   "no channels, and not all commands",
				server: [][]string{{"ACL", "SETUSER", "default", "resetchannels", "-exists", "-hset"}},
				logged: "may not EXISTS redlatch-startup-check, HSET redlatch-startup-check, PUBLISH",
				missing: []string{
					"EXISTS app:orders", "HSET app:orders",
					"PUBLISH redisson_lock__channel:{app:orders}", "SUBSCRIBE redisson_lock__channel:{app:orders}",
				},
			},
			{
				// The name that is tried at startup is none of this user's.
				name:   "keys of its own",
				server: [][]string{{"ACL", "SETUSER", "default", "resetkeys", "resetchannels", "~app:*", "~redisson_*:{app:*", "&redisson_*:{app:*"}},
			},
			{
				name:    "keys of its own and a prefix, without the helper keys",
				server:  [][]string{{"ACL", "SETUSER", "default", "resetkeys", "~app:*"}},
				options: []redlatch.Option{redlatch.WithNameMapper(func(name string) string { return "app:" + name })},
				logged:  "may not GET redisson_unlock_latch:{app:redlatch-startup-check}:id",
				missing: []string{ // of app:app:orders
					"GET redisson_unlock_latch:{app:app:orders}:id", "SET redisson_unlock_latch:{app:app:orders}:id",
					"DEL redisson_unlock_latch:{app:app:orders}:id", "PTTL redisson_unlock_latch:{app:app:orders}:id",
					"PEXPIRE redisson_unlock_latch:{app:app:orders}:id", "INCR redisson_lock_token:{app:app:orders}",
					"GET redisson_lock_token:{app:app:orders}", "DEL redisson_lock_token:{app:app:orders}",
				},
			},
			{
				name:   "nothing to be asked",
				server: [][]string{{"ACL", "SETUSER", "default", "-info", "-time"}},
			},
			{
				name:   "nothing known",
				server: [][]string{{"ACL", "SETUSER", "default", "-@all", "+ping", "+hello", "+acl", "+config"}},
				logged: "may not run scripts", missing: []string{"EVALSHA", "EVAL"},
			},
		} {
			t.Run(tt.name, func(t *testing.T) {
				for _, words := range tt.server {
					harness.Do(t, s.Addr, words...)
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
					for _, right := range f.Missing {
						missing = append(missing, right.String())
					}
				}
				assert.Equal(t, tt.missing, missing)
			})
		}
	})
}
