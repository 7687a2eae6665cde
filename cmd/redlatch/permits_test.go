package main

import (
	"context"
	"strings"
	"testing"

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
		waiting := harness.Start(t, t.Context(), func(ctx context.Context) (*semaphore.Permit, error) { return slots.Acquire(ctx) })
		require.Equal(t, "2\n", succeeds(t, s.Addr, "permits", "set", "slots", "2"))
		first := waiting.Got()
		second, err := slots.Acquire(t.Context())
		require.NoError(t, err)

		require.Equal(t, "5\n", succeeds(t, s.Addr, "permits", "set", "slots", "5"))
		stats, err := slots.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, semaphore.PermitStats{Total: 5, Free: 3, Taken: 2}, stats)

		require.Equal(t, "2\n", succeeds(t, s.Addr, "permits", "drain", "slots"))
		_, err = slots.TryAcquire(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		succeeds(t, s.Addr, "permits", "set", "slots", "2")

		unknown := strings.Repeat("0", 32)
		fails(t, s.Addr, statusNo, "not held", "permits", "release", "slots", first.ID(), unknown)
		require.Equal(t, "2\n", succeeds(t, s.Addr, "permits", "release", "slots", first.ID(), second.ID()))
		stats, err = slots.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, semaphore.PermitStats{Total: 2, Free: 2}, stats)
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
	})
}

// A semaphore whose permits have ids is not mistaken for one of the other kind.
func TestPermitsKind(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		slots := harness.Client(t, s).PermitSemaphore("slots", semaphore.Permits(3))
		_, err := slots.Acquire(t.Context(), semaphore.Forever()) // also if the garbage collector finds it
		require.NoError(t, err)
		for _, args := range []string{"set --plain slots 8", "drain --plain slots", "release --plain slots"} {
			fails(t, s.Addr, statusFailed, "omit --plain", append([]string{"permits"}, strings.Fields(args)...)...)
		}
		stats, err := slots.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, semaphore.PermitStats{Total: 3, Free: 2, Taken: 1}, stats)
	})
}
