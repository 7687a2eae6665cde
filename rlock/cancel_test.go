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
	"github.com/redlatch/redlatch/rlock"
)

// TestCancelledAnywhereLeavesNothing cancels an acquisition at every point where
// it waits for something.
func TestCancelledAnywhereLeavesNothing(t *testing.T) {
	const soon = 2 * time.Second // well under any timeout of the connection
	points := []struct {
		name string
		held bool // by another client
		here bool // by the same client
		// at brings the acquisition, which is started by start, to its point. asleep
		// waits until it has made n attempts and sleeps.
		at            func(t *testing.T, g *harness.Gate, start func(), asleep func(n int), h lock.Hold)
		indeterminate bool // whether a request is under way
	}{
		{
			name: "first attempt, which succeeds", indeterminate: true,
			at: func(_ *testing.T, g *harness.Gate, start func(), _ func(int), _ lock.Hold) {
				reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
				start()
				<-reached
			},
		},
		{
			name: "first attempt, which fails", held: true, indeterminate: true,
			at: func(_ *testing.T, g *harness.Gate, start func(), _ func(int), _ lock.Hold) {
				reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
				start()
				<-reached
			},
		},
		{
			name: "subscription", held: true,
			at: func(_ *testing.T, g *harness.Gate, start func(), _ func(int), _ lock.Hold) {
				reached := g.Arm(harness.KeepReply, "\r\nSUBSCRIBE", 1)
				start()
				<-reached
			},
		},
		{
			name: "second attempt, after the subscription", held: true, indeterminate: true,
			at: func(_ *testing.T, g *harness.Gate, start func(), _ func(int), _ lock.Hold) {
				reached := g.Arm(harness.KeepReply, "EVALSHA", 2)
				start()
				<-reached
			},
		},
		{
			name: "wait for a message", held: true,
			at: func(_ *testing.T, _ *harness.Gate, start func(), asleep func(int), _ lock.Hold) {
				start()
				asleep(2)
			},
		},
		{
			name: "attempt after a message, which succeeds", held: true, indeterminate: true,
			at: func(t *testing.T, g *harness.Gate, start func(), asleep func(int), h lock.Hold) {
				start()
				asleep(2)
				reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
				require.NoError(t, h.Unlock(t.Context()))
				<-reached
			},
		},
		{
			name: "wait behind a holder of the same process", here: true,
			at: func(_ *testing.T, _ *harness.Gate, start func(), asleep func(int), _ lock.Hold) {
				start()
				asleep(1) // the one after the subscription
			},
		},
		{
			name: "hand-off, or the release in its place", here: true,
			at: func(_ *testing.T, g *harness.Gate, start func(), asleep func(int), h lock.Hold) {
				start()
				asleep(1)
				_ = h.Owner() // who is known is not passed on without the server
				reached := g.Arm(harness.KeepReply, "EVALSHA", 1)
				go func() { _ = h.Unlock(context.Background()) }()
				<-reached
			},
		},
	}
	type lockOf = func(*redlatch.Client) harness.Lock
	kinds := []lockOf{
		func(c *redlatch.Client) harness.Lock { return c.Lock("orders") },
		func(c *redlatch.Client) harness.Lock { // which does not poll meanwhile
			return c.PlainLock("orders", rlock.WithBackoff(rlock.ConstantBackoff(time.Minute)))
		},
	}
	type variant struct {
		of             lockOf
		named, bounded bool
	}
	var variants []variant
	for _, of := range kinds {
		for _, named := range []bool{false, true} {
			variants = append(variants, variant{of, named, false}, variant{of, named, true})
		}
	}
	for _, p := range points {
		t.Run(p.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				for _, v := range variants {
					named, bounded := v.named, v.bounded
					harness.Do(t, s.Addr, "FLUSHALL")
					c, g := harness.GatedClient(t, s)
					harness.WarmUp(t, s.Addr)
					holder := harness.Client(t, s)
					if p.here {
						holder = c
					}
					var h lock.Hold
					if p.held || p.here {
						h = mustLock(t, v.of(holder))
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
					start := func() {
						harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
						go func() {
							_, err := v.of(c).Lock(ctx, opts...)
							result <- err
						}()
					}
					p.at(t, g, start, func(n int) {
						if p.here && named {
							n++ // its owner might hold the lock already: it asks at once
						}
						asleep(t, s, n)
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
					require.NoError(t, g.Open())
					if h != nil {
						_ = h.Unlock(context.WithoutCancel(t.Context()))
					}
					harness.NothingLeft(t, s.Addr)
					harness.Eventually(t, soon, "nobody listens", func() bool { return c.PubSub().Listeners == 0 })
					// And the lock works as if nothing had been.
					require.NoError(t, v.of(c).Do(t.Context(), func(context.Context) error { return nil }))
					holder.Close()
					c.Close()
				}
			})
		})
	}
}
