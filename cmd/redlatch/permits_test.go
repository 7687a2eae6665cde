package main

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

func TestPermitsCommand(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		fails(t, s.Addr, statusNo, "no semaphore slots", "permits", "drain", "slots")
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "slots"))

		slots := harness.Client(t, s).PermitSemaphore("slots")
		waiting := harness.Start(t, t.Context(), func(ctx context.Context) (*semaphore.Permit, error) { return slots.Acquire(ctx, 1) })
		require.Equal(t, "2\n", succeeds(t, s.Addr, "permits", "set", "slots", "2"))
		first := waiting.Got()
		second, err := slots.Acquire(t.Context(), 1)
		require.NoError(t, err)

		require.Equal(t, "5\n", succeeds(t, s.Addr, "permits", "set", "slots", "5"))
		stats, err := slots.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, semaphore.PermitStats{Total: 5, Available: 3, Taken: 2}, stats)

		require.Equal(t, "2\n", succeeds(t, s.Addr, "permits", "drain", "slots"))
		_, err = slots.TryAcquire(t.Context(), 1)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		succeeds(t, s.Addr, "permits", "set", "slots", "2")

		unknown := strings.Repeat("0", 32)
		fails(t, s.Addr, statusNo, "not held", "permits", "release", "slots", first.ID(), unknown)
		require.Equal(t, "2\n", succeeds(t, s.Addr, "permits", "release", "slots", first.ID(), second.ID()))
		stats, err = slots.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, semaphore.PermitStats{Total: 2, Available: 2}, stats)
		fails(t, s.Addr, statusNo, "not held", "permits", "release", "slots", first.ID())
	})
}

func TestPlainPermitsCommand(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		fails(t, s.Addr, statusNo, "no semaphore slots", "permits", "drain", "--plain", "slots")
		fails(t, s.Addr, statusNo, "no semaphore slots", "permits", "release", "--plain", "slots")
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "slots"))

		slots := harness.Client(t, s).Semaphore("slots")
		free := func() int {
			n, err := slots.Available(t.Context())
			require.NoError(t, err)
			return n
		}
		require.Equal(t, "3\n", succeeds(t, s.Addr, "permits", "set", "--plain", "slots", "3"))
		require.NoError(t, slots.Acquire(t.Context(), 1))
		require.Equal(t, "2\n", succeeds(t, s.Addr, "permits", "drain", "--plain", "slots"))
		require.Zero(t, free())
		require.Equal(t, "2\n", succeeds(t, s.Addr, "permits", "release", "--plain", "slots", "2"))
		require.Equal(t, "1\n", succeeds(t, s.Addr, "permits", "release", "--plain", "slots"))
		require.Equal(t, 3, free())
		require.Equal(t, "8\n", succeeds(t, s.Addr, "permits", "set", "--plain", "slots", "8"))
		require.Equal(t, 8, free())
		require.Equal(t, "0\n", succeeds(t, s.Addr, "permits", "release", "--plain", "slots", "0"))
		require.Equal(t, 8, free())

		// What drain prints can be released, however much it is.
		succeeds(t, s.Addr, "permits", "set", "--plain", "slots", "20001")
		require.Equal(t, "20001\n", succeeds(t, s.Addr, "permits", "drain", "--plain", "slots"))
		require.Equal(t, "20001\n", succeeds(t, s.Addr, "permits", "release", "--plain", "slots", "20001"))
		require.Equal(t, 20001, free())
	})
}

// A pattern stands for all semaphores that match it, after a look at them.
func TestPermitsOfMany(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		_, err := c.PermitSemaphore("tenant-1", semaphore.Permits(3)).Acquire(t.Context(), 1, lock.Lease(time.Hour))
		require.NoError(t, err)
		require.NoError(t, c.Semaphore("tenant-3", semaphore.Permits(3)).Acquire(t.Context(), 1))
		_, err = c.Lock("tenant-lock").Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err)
		for _, name := range []string{"tenant-2", "other", "a*b"} {
			harness.Do(t, s.Addr, "SET", name, "3")
		}
		harness.Do(t, s.Addr, "SET", "tenant-page", "text", "PX", "60000")
		free := func() []string {
			reply, err := testserver.Query(s.Addr, "MGET", "tenant-1", "tenant-2", "tenant-3", "other", "a*b")
			require.NoError(t, err)
			return reply
		}

		before := free()
		r := finish(t, s.Addr, "permits", "set", "tenant-*", "5")
		require.Equal(t, statusFailed, r.status)
		require.Contains(t, r.stderr, "3 names would get 5 permits")
		require.Equal(t, `NAME KIND STATE EXPIRES WAITERS HOLDER
tenant-1 semaphore 2 free, 1 held - - PERMIT
tenant-2 counter 3 - - ?
tenant-3 semaphore 2 free - - ?
`, maskedScreen(r.stdout))
		require.Equal(t, before, free())
		require.Equal(t, "tenant-1 5\ntenant-2 5\ntenant-3 5\n", succeeds(t, s.Addr, "permits", "set", "--force", "tenant-*", "5"))
		require.Equal(t, []string{"4", "5", "5", "3", "3"}, free())
		require.Equal(t, "tenant-2 6\ntenant-3 6\n", succeeds(t, s.Addr, "permits", "set", "--plain", "--force", "tenant-*", "6"))
		require.Equal(t, "a*b 7\n", succeeds(t, s.Addr, "permits", "set", "--force", `a\*b`, "7"))
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "tenant-*"))
		fails(t, s.Addr, statusNo, "no semaphore matches nobody*", "permits", "set", "--force", "nobody*", "5")
		fails(t, s.Addr, statusFailed, `pattern "[*"`, "permits", "set", "--force", "[*", "5")
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// A semaphore or a lock is not mistaken for a latch, nor a latch for a semaphore.
func TestPermitsAndLatchesOfOtherKinds(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		client := harness.Client(t, s)
		_, err := client.Lock("lock").Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err)
		_, err = client.PermitSemaphore("ids", semaphore.Permits(3)).Acquire(t.Context(), 1, lock.Lease(time.Hour))
		require.NoError(t, err)
		succeeds(t, s.Addr, "latch", "set", "latch", "3")
		succeeds(t, s.Addr, "permits", "set", "--plain", "plain", "5")
		harness.Do(t, s.Addr, "SET", "page", "text")
		before := values(t, s)

		permits := []string{"permits set NAME 4", "permits drain NAME", "permits release NAME " + strings.Repeat("0", 32)}
		plain := []string{"permits set --plain NAME 4", "permits drain --plain NAME", "permits release --plain NAME"}
		latches := []string{"latch set NAME 4", "latch down NAME", "latch wait NAME", "latch delete NAME"}
		for _, row := range []struct {
			name, text string
			commands   []string
		}{
			{"latch", "latch is a count-down latch, not a semaphore", slices.Concat(permits, plain)},
			{"lock", "lock is a lock, not a semaphore", slices.Concat(permits, plain)},
			{"page", "page is a string with other contents, not a semaphore", slices.Concat(permits, plain)},
			{"ids", "ids is a semaphore whose permits have ids, not a semaphore for --plain", plain},
			{"ids", "ids is a semaphore whose permits have ids, not a latch", latches},
			{"plain", "plain is a semaphore, not a latch", latches},
			{"lock", "lock is a lock, not a latch", latches},
		} {
			for _, command := range row.commands {
				fails(t, s.Addr, statusFailed, row.text, strings.Fields(strings.ReplaceAll(command, "NAME", row.name))...)
			}
			require.Equal(t, before, values(t, s), row.name)
		}

		harness.Do(t, s.Addr, "SET", "number", "3") // of Redisson, for example
		require.Equal(t, "2\n", succeeds(t, s.Addr, "latch", "down", "number"))
		harness.Do(t, s.Addr, "SET", "digits", "3")
		require.Equal(t, "3\n", succeeds(t, s.Addr, "permits", "drain", "--plain", "digits"))
	})
}

// values returns what the strings are.
func values(t *testing.T, s *testserver.Server) (all []string) {
	for _, name := range []string{"latch", "plain", "ids", "page"} {
		all = append(all, harness.Do(t, s.Addr, "GET", name))
	}
	return append(all, harness.Do(t, s.Addr, "EXISTS", "lock"))
}

// The check of the kind needs no rights that the change does not need.
func TestLatchWithFewRights(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.Do(t, s.Addr, "ACL", "SETUSER", "few", "on", "nopass", "resetkeys", "~x", "~redlatch_latch_*", "allchannels", "+@all", "-keys")
		addr := "few:pass@" + s.Addr
		require.Equal(t, "3\n", succeeds(t, addr, "latch", "set", "x", "3"))
		require.Equal(t, "2\n", succeeds(t, addr, "latch", "down", "x"))
	})
}
