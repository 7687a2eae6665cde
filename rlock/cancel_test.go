package rlock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// TestCancelledAnywhereLeavesNothing cancels an acquisition at every point where
// it waits for something.
func TestCancelledAnywhereLeavesNothing(t *testing.T) {
	const soon = 2 * time.Second // well under any timeout of the connection
	points := []struct {
		name string
		held bool // by another client
		here bool // by the same client
		// at brings the acquisition, which is started by start, to its point.
		at            func(t *testing.T, g *harness.Gate, c *redlatch.Client, start func(), h lock.Hold)
		indeterminate bool // whether a request is under way
	}{
		{
			name: "first attempt, which succeeds", indeterminate: true,
			at: func(_ *testing.T, g *harness.Gate, _ *redlatch.Client, start func(), _ lock.Hold) {
				reached := g.Shut("EVALSHA", 1)
				start()
				<-reached
			},
		},
		{
			name: "first attempt, which fails", held: true, indeterminate: true,
			at: func(_ *testing.T, g *harness.Gate, _ *redlatch.Client, start func(), _ lock.Hold) {
				reached := g.Shut("EVALSHA", 1)
				start()
				<-reached
			},
		},
		{
			name: "subscription", held: true,
			at: func(_ *testing.T, g *harness.Gate, _ *redlatch.Client, start func(), _ lock.Hold) {
				reached := g.Shut("\r\nSUBSCRIBE", 1)
				start()
				<-reached
			},
		},
		{
			name: "second attempt, after the subscription", held: true, indeterminate: true,
			at: func(_ *testing.T, g *harness.Gate, _ *redlatch.Client, start func(), _ lock.Hold) {
				reached := g.Shut("EVALSHA", 2)
				start()
				<-reached
			},
		},
		{
			name: "wait for a message", held: true,
			at: func(t *testing.T, _ *harness.Gate, c *redlatch.Client, start func(), _ lock.Hold) {
				start()
				harness.Eventually(t, soon, "subscribed", func() bool { return c.PubSub().Subscribed == 1 })
			},
		},
		{
			name: "attempt after a message, which succeeds", held: true, indeterminate: true,
			at: func(t *testing.T, g *harness.Gate, c *redlatch.Client, start func(), h lock.Hold) {
				reached := g.Shut("EVALSHA", 3)
				start()
				harness.Eventually(t, soon, "subscribed", func() bool { return c.PubSub().Subscribed == 1 })
				require.NoError(t, h.Unlock(t.Context()))
				<-reached
			},
		},
		{
			name: "wait behind a holder of the same process", here: true,
			at: func(t *testing.T, _ *harness.Gate, c *redlatch.Client, start func(), _ lock.Hold) {
				start()
				harness.Eventually(t, soon, "listening", func() bool { return c.PubSub().Listeners == 1 })
			},
		},
		{
			name: "hand-off, or the release in its place", here: true,
			at: func(t *testing.T, g *harness.Gate, c *redlatch.Client, start func(), h lock.Hold) {
				start()
				harness.Eventually(t, soon, "subscribed", func() bool { return c.PubSub().Subscribed == 1 })
				reached := g.Shut("EVALSHA", 1)
				go func() { _ = h.Unlock(context.Background()) }()
				<-reached
			},
		},
	}
	for _, p := range points {
		t.Run(p.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				for _, named := range []bool{false, true} {
					for _, bounded := range []bool{false, true} {
						harness.Do(t, s.Addr, "FLUSHALL")
						c, g := harness.GatedClient(t, s)
						for _, name := range []string{"a", "b"} { // the scripts are known then
							ctx := lock.WithOwner(t.Context(), c.NewOwner())
							require.NoError(t, c.Lock(name).Do(ctx, func(context.Context) error { return nil }))
							require.NoError(t, c.Lock(name).Do(t.Context(), func(context.Context) error { return nil }))
						}
						harness.NothingLeft(t, s.Addr)
						holder := harness.Client(t, s)
						if p.here {
							holder = c
						}
						var h lock.Hold
						if p.held || p.here {
							h = mustLock(t, holder.Lock("orders"))
						}

						gone := errors.New("gone")
						ctx, cancel := context.WithCancelCause(t.Context())
						if named {
							ctx = lock.WithOwner(ctx, c.NewOwner())
						}
						var opts []lock.Option
						if bounded {
							opts = append(opts, lock.Wait(time.Minute))
						}
						result := make(chan error, 1)
						p.at(t, g, c, func() {
							go func() {
								_, err := c.Lock("orders").Lock(ctx, opts...)
								result <- err
							}()
						}, h)
						cancel(gone)
						select {
						case err := <-result:
							assert.ErrorIs(t, err, gone)
							assert.ErrorIs(t, err, lock.ErrNotAcquired)
							if p.indeterminate {
								assert.ErrorIs(t, err, lock.ErrIndeterminate)
							}
						case <-time.After(soon):
							require.Fail(t, "the call did not return")
						}
						g.Open()
						if h != nil {
							_ = h.Unlock(context.WithoutCancel(t.Context()))
						}
						harness.NothingLeft(t, s.Addr)
						harness.Eventually(t, soon, "nobody listens", func() bool { return c.PubSub().Listeners == 0 })
						// And the lock works as if nothing had been.
						require.NoError(t, c.Lock("orders").Do(t.Context(), func(context.Context) error { return nil }))
						holder.Close()
						c.Close()
					}
				}
			})
		})
	}
}
