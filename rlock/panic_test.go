package rlock_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// The caller recovers from a panic of its Backoff, and the name is usable at once.
func TestPanicInBackoff(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		for _, at := range []int{1, 3} {
			backoff := func(n int) time.Duration {
				if n == at {
					panic("boom")
				}
				return time.Millisecond
			}
			for _, l := range []lock.Locker{c.SpinLock("spin", backoff), c.PlainLock("plain", backoff)} {
				theirs := other.SpinLock("spin").Lock
				if l.Name() == "plain" {
					theirs = other.PlainLock("plain").Lock
				}
				held, err := theirs(t.Context())
				require.NoError(t, err)
				require.PanicsWithValue(t, "boom", func() { _, _ = l.Lock(context.Background()) })
				require.NoError(t, held.Unlock(t.Context()))
				again := lock.Locker(c.SpinLock("spin"))
				if l.Name() == "plain" {
					again = c.PlainLock("plain")
				}
				require.NoError(t, again.Do(t.Context(), func(context.Context) error { return nil }, lock.Wait(soon)))
			}
		}
		harness.Idle(t, c)
		harness.NothingLeft(t, s.Addr)
	})
}
