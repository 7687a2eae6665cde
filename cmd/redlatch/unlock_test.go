package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// unlock opens a lock of each kind, and wakes the waiters of that kind.
func TestUnlock(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		holder, waiter := harness.Client(t, s), harness.Client(t, s)
		for _, kind := range kinds {
			for _, flags := range [][]string{nil, {"--kind", kind}} {
				of := &lockCommand{kind: kind}
				args := append([]string{"unlock", "--force", "job"}, flags...)
				hold, err := of.one(holder, "job").Lock(t.Context(), lock.Lease(time.Hour))
				require.NoError(t, err)
				if kind == "read" { // does not exclude another one
					of.kind = "write"
				}
				waiting := harness.StartLock(t, t.Context(), of.one(waiter, "job"))
				harness.Waits(t, 1, waiter)
				before := waiter.Stats().PubSub.Messages

				fails(t, s.Addr, statusFailed, "--force", "unlock", "job")
				require.True(t, waiting.Running())
				require.Equal(t, "job was held and is open now\n", succeeds(t, s.Addr, args...), args)
				if kind != "spin" { // polls
					harness.Eventually(t, patience, "a message", func() bool { return waiter.Stats().PubSub.Messages > before })
				}
				require.NoError(t, waiting.Got().Unlock(t.Context()))
				require.ErrorIs(t, hold.Unlock(t.Context()), lock.ErrLost)
				require.Equal(t, "job was not held\n", succeeds(t, s.Addr, args...), args)
				harness.Do(t, s.Addr, "FLUSHALL") // the token
			}
		}
	})
}

// unlock deletes no key that is not a lock.
func TestUnlockOther(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		client := harness.Client(t, s)
		for kind, name := range map[string]string{"read": "readers", "lock": "lock", "plain": "plain"} {
			_, err := (&lockCommand{kind: kind}).one(client, name).Lock(t.Context(), lock.Lease(time.Hour))
			require.NoError(t, err)
		}
		require.NoError(t, client.Semaphore("slots").SetPermits(t.Context(), 3))
		_, err := client.PermitSemaphore("ids", semaphore.Permits(3)).Acquire(t.Context(), 1, lock.Lease(time.Hour))
		require.NoError(t, err)
		_, err = client.CountDownLatch("latch").TrySetCount(t.Context(), 3)
		require.NoError(t, err)
		harness.Do(t, s.Addr, "RPUSH", "list", "1")
		harness.Do(t, s.Addr, "HSET", "user", "mode", "read", "name", "Ann")
		harness.Do(t, s.Addr, "HSET", "settings", "mode", "dark")
		harness.Do(t, s.Addr, "SET", "redsync", "cmFuZG9t", "PX", "3600000")
		harness.Do(t, s.Addr, "SET", "page", "text")
		harness.Do(t, s.Addr, "SET", "count", "17")
		for _, row := range []struct{ text, name, kind string }{
			{"a list with other contents", "list", ""},
			{"a list with other contents", "list", "lock"},
			{"a hash with other contents", "user", ""},
			{"a hash with other contents", "user", "read"},
			{"a hash with other contents", "user", "lock"},
			{"a hash with other contents", "settings", ""},
			{"a string with other contents", "page", ""},
			{"not a lock, but a number", "count", ""},
			{"not a lock, but a number", "count", "plain"},
			{"add --kind plain", "redsync", ""},
			{"add --kind plain", "redsync", "lock"},
			{"of kind read, not fair", "readers", "fair"},
			{"of kind read, not plain", "readers", "plain"},
			{"of kind lock, not write", "lock", "write"},
			{"of kind plain, not spin", "plain", "spin"},
			{"not a lock, but a semaphore", "slots", "plain"},
			{"not a lock, but a semaphore whose permits have ids", "ids", "plain"},
			{"not a lock, but a count-down latch", "latch", "plain"},
			{"not a lock, but a hash", "user", "plain"},
		} {
			args := []string{"unlock", "--force", row.name}
			if row.kind != "" {
				args = append(args, "--kind", row.kind)
			}
			fails(t, s.Addr, statusFailed, row.text, args...)
			require.Equal(t, ":1", harness.Do(t, s.Addr, "EXISTS", row.name), args)
		}
		require.Equal(t, "readers was not held\n", succeeds(t, s.Addr, "unlock", "--force", "--kind", "write", "readers"))
		require.Equal(t, ":1", harness.Do(t, s.Addr, "EXISTS", "readers"))
		require.Equal(t, "redsync was held and is open now\n", succeeds(t, s.Addr, "unlock", "--force", "--kind", "plain", "redsync"))
	})
}
