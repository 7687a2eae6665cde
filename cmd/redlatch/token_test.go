package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

func TestTokenCommand(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).FencedLock("app:ledger")
		held := func() lock.Hold {
			h, err := l.TryLock(t.Context())
			require.NoError(t, err)
			return h
		}
		raise := func(floor string) string {
			return succeeds(t, s.Addr, "token", "raise", "--prefix", "app:", "ledger", floor)
		}
		require.Equal(t, "0\n", raise("0"))
		require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
		require.Equal(t, "1000\n", raise("1000"))
		require.Equal(t, "1000\n", raise("999"))
		require.Regexp(t, `(?m)^token +1000$`, succeeds(t, s.Addr, "inspect", "app:ledger"))

		h := held()
		require.Equal(t, int64(1001), h.Token())
		require.Equal(t, "2000\n", raise("2000"))
		harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{app:ledger}") // an ordinary lock, to the eye
		require.Equal(t, "9007199254740990\n", raise("9007199254740990"))
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, held().Unlock(t.Context()))
		fails(t, s.Addr, statusFailed, "fencing counter", "token", "raise", "app:ledger", "7")

		require.NoError(t, harness.Client(t, s).PermitSemaphore("slots").SetPermits(t.Context(), 2))
		fails(t, s.Addr, statusFailed, "slots is a semaphore, not a fenced lock", "token", "raise", "slots", "7")
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "redisson_lock_token:{slots}"))
	})
}
