package rwlock_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// A release beside very many readers does not look at all of them, cuts no other hold short,
// and never leaves the lock for much longer than its longest hold.
func TestReleaseBesideManyReaders(t *testing.T) {
	const readers, longest = 1000, 30 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := newLab(t, s)
		var claims []*engine.Claim
		for i := range readers { // as far apart as if they were renewed every third of their leases
			claims = append(claims, l.claim(l.read, longest-time.Duration(i)*longest/3/readers))
		}
		for some := range slices.Chunk(claims, 100) {
			answers, err := l.read.(engine.Grouped).AcquireAll(t.Context(), some)
			require.NoError(t, err)
			require.True(t, answers[0].Acquired)
		}
		release := func(c *engine.Claim) (lookups int) {
			t.Helper()
			before := harness.Commands(t, l.conn)["pttl"]
			released, err := l.read.Release(t.Context(), c)
			require.NoError(t, err)
			require.Equal(t, engine.StillHeld, released.State)
			return harness.Commands(t, l.conn)["pttl"] - before
		}
		// lasts checks the expiry of the lock, whose longest hold is that of c.
		lasts := func(c *engine.Claim) {
			t.Helper()
			const both = "return {redis.call('PTTL', KEYS[1]), redis.call('PTTL', KEYS[2])}"
			left, err := l.conn.Do(t.Context(), l.conn.B().Eval().Script(both).Numkeys(2).
				Key(holdKeyOf(c.ID.String(), 1), key).Build()).AsIntSlice()
			require.NoError(t, err)
			require.GreaterOrEqual(t, left[1], left[0]-5)
			require.LessOrEqual(t, left[1], left[0]*10/9+5)
		}
		lookups := 0
		for i, c := range claims[:20] { // each is the longest
			lookups += release(c)
			lasts(claims[i+1])
		}
		require.Less(t, lookups, 20*50+readers, "and hardly ever all")

		// One that lasted for longer than all others does not leave the lock for that long.
		long := l.claim(l.read, time.Hour)
		_, err := l.read.Acquire(t.Context(), long)
		require.NoError(t, err)
		release(long)
		lasts(claims[20])
	})
}
