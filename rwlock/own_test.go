package rwlock_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// Two goroutines of a writer read at the same time.
func TestAWriterReadsInTwoGoroutines(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		harness.WarmUp(t, s.Addr)
		ctx := named(t, c)
		w := mustLockAs(t, ctx, writing(c, "orders"))
		type result struct {
			h   lock.Hold
			err error
		}
		first := make(chan result, 1)
		read := func(to chan result) {
			h, err := reading(c, "orders").Lock(ctx)
			to <- result{h, err}
		}
		g.Keep(t, harness.SHA(t, "acquire_read.lua"), 1, func() { go read(first) })
		second := make(chan result, 1)
		go read(second)
		time.Sleep(100 * time.Millisecond)
		require.NoError(t, g.Open())
		a, b := harness.Receive(t, soon, "a", first), harness.Receive(t, soon, "b", second)
		require.NoError(t, a.err)
		require.NoError(t, b.err)
		unlock(t, w)
		unlock(t, a.h)
		require.True(t, harness.IsLocked(t, reading(c, "orders")))
		unlock(t, b.h)
		harness.NothingLeft(t, s.Addr)
	})
}

// The attempt of a writer to read, or the release of what it has read, has an unknown outcome, and is
// undone. It reads again.
func TestAnUndoneReadOfAWriterLeavesTheNext(t *testing.T) {
	const acquire, release = "acquire_read.lua", "release_read.lua"
	harness.EachOf(t, []string{acquire, release}, strings.Clone, func(t *testing.T, s *testserver.Server, op string) {
		c, g := harness.GatedClient(t, s)
		harness.WarmUp(t, s.Addr)
		ctx := named(t, c)
		w := mustLockAs(t, ctx, writing(c, "orders"))
		if op == acquire {
			g.During(t, harness.LoseRequest, harness.SHA(t, op), func() {
				_, err := reading(c, "orders").Lock(ctx, lock.FailFast())
				require.ErrorIs(t, err, lock.ErrIndeterminate)
			})
		} else {
			r := mustLockAs(t, ctx, reading(c, "orders"))
			var err error
			g.During(t, harness.DelayRequest, harness.SHA(t, op), func() { err = r.Unlock(ctx) })
			require.NoError(t, err)
		}
		r := mustLockAs(t, ctx, reading(c, "orders"))
		require.NoError(t, g.Open())
		time.Sleep(2 * time.Second)
		require.NoError(t, context.Cause(r.Context()))
		require.Equal(t, "1", fields(t, s)[lock.OwnerOf(r).String()])
		unlock(t, r)
		unlock(t, w)
		harness.NothingLeft(t, s.Addr)
	})
}
