package rlock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// TestEveryWayToLoseAHold ends holds early in every way there is, and checks that
// each of them says so, and why.
func TestEveryWayToLoseAHold(t *testing.T) {
	const (
		lease   = time.Second     // where it is fixed
		timeout = 2 * time.Second // of the watchdog
	)
	type scene struct {
		*testing.T
		s        *testserver.Server
		c, other *redlatch.Client // the holder's, and another
	}
	// What happens returns how to undo it, or nil.
	onEach := func(do func(a scene, h lock.Hold) (undo func())) func(scene, []lock.Hold) func() {
		return func(a scene, holds []lock.Hold) func() {
			var undo []func()
			for _, h := range holds {
				undo = append(undo, do(a, h))
			}
			return func() {
				for _, f := range undo {
					if f != nil {
						f()
					}
				}
			}
		}
	}
	ways := []struct {
		name           string
		opts           []lock.Option
		renewed, fixed lock.Reason // "": it does not happen to such holds
		cause          bool        // whether it is known why a hold could not be renewed
		happens        func(a scene, holds []lock.Hold) (undo func())
	}{
		{
			name: "lease over", fixed: lock.ReasonExpired,
		},
		{
			name: "held for too long", opts: []lock.Option{lock.MaxHold(lease / 2)}, renewed: lock.ReasonMaxHold,
		},
		{
			name: "client closed", renewed: lock.ReasonClosed, fixed: lock.ReasonClosed,
			happens: func(a scene, _ []lock.Hold) func() {
				a.c.Close()
				return nil
			},
		},
		{
			name: "server killed", renewed: lock.ReasonExpired, fixed: lock.ReasonExpired, cause: true,
			happens: func(a scene, _ []lock.Hold) func() {
				a.s.Kill()
				return func() { require.NoError(a, a.s.Restart()) }
			},
		},
		{
			name: "server stopped", renewed: lock.ReasonExpired, fixed: lock.ReasonExpired, cause: true,
			happens: func(a scene, _ []lock.Hold) func() {
				a.s.Pause()
				return a.s.Resume
			},
		},
		{
			name: "server restarted empty", renewed: lock.ReasonGone, fixed: lock.ReasonExpired,
			happens: func(a scene, _ []lock.Hold) func() {
				a.s.Kill()
				require.NoError(a, a.s.Restart())
				return nil
			},
		},
		{
			name: "key deleted", renewed: lock.ReasonGone, fixed: lock.ReasonExpired,
			happens: onEach(func(a scene, h lock.Hold) func() {
				harness.Do(a, a.s.Addr, "DEL", h.Name())
				return nil
			}),
		},
		{
			name: "key of another type", renewed: lock.ReasonGone, fixed: lock.ReasonExpired,
			happens: onEach(func(a scene, h lock.Hold) func() {
				harness.Do(a, a.s.Addr, "SET", h.Name(), "precious")
				return func() { require.Equal(a, ":1", harness.Do(a, a.s.Addr, "DEL", h.Name())) }
			}),
		},
		{
			name: "taken by another after it had expired", renewed: lock.ReasonGone, fixed: lock.ReasonExpired,
			happens: onEach(func(a scene, h lock.Hold) func() {
				harness.Do(a, a.s.Addr, "PEXPIRE", h.Name(), "1")
				theirs := mustLock(a.T, a.other.Lock(h.Name()))
				return func() {
					require.Equal(a, 1, harness.HoldCount(a.T, a.other.Lock(h.Name()), theirs.Owner()))
					require.NoError(a, theirs.Context().Err())
					require.NoError(a, theirs.Unlock(a.Context()))
				}
			}),
		},
		{
			name: "forced open here", renewed: lock.ReasonGone, fixed: lock.ReasonGone,
			happens: onEach(func(a scene, h lock.Hold) func() {
				_, err := a.c.Lock(h.Name()).ForceUnlock(a.Context())
				require.NoError(a, err)
				return nil
			}),
		},
		{
			name: "forced open elsewhere", renewed: lock.ReasonGone, fixed: lock.ReasonExpired,
			happens: onEach(func(a scene, h lock.Hold) func() {
				_, err := a.other.Lock(h.Name()).ForceUnlock(a.Context())
				require.NoError(a, err)
				return nil
			}),
		},
		{
			name: "unlocked by owner elsewhere", renewed: lock.ReasonGone, fixed: lock.ReasonExpired,
			happens: onEach(func(a scene, h lock.Hold) func() {
				require.NoError(a, a.other.Lock(h.Name()).Unlock(lock.WithOwner(a.Context(), h.Owner())))
				return nil
			}),
		},
	}
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		for _, way := range ways {
			t.Run(way.name, func(t *testing.T) {
				a := scene{T: t, s: s, other: harness.Client(t, s)}
				a.c = harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
				var holds []lock.Hold
				var want []lock.Reason
				for _, named := range []bool{false, true} {
					ctx := t.Context()
					if named {
						ctx = lock.WithOwner(ctx, a.c.NewOwner())
					}
					for _, k := range []struct {
						reason lock.Reason
						opts   []lock.Option
					}{{way.renewed, way.opts}, {way.fixed, []lock.Option{lock.Lease(lease)}}} {
						if k.reason == "" {
							continue
						}
						h, err := a.c.Lock(fmt.Sprint("orders ", len(holds))).Lock(ctx, k.opts...)
						require.NoError(t, err)
						require.NoError(t, h.Context().Err())
						holds, want = append(holds, h), append(want, k.reason)
					}
				}
				var undo func()
				if way.happens != nil {
					undo = way.happens(a, holds)
				}
				for i, h := range holds {
					select {
					case <-h.Context().Done():
					case <-time.After(timeout + time.Second):
						require.FailNow(t, "the hold does not end", h.Name())
					}
					require.Zero(t, h.Remaining())
					var lost *lock.LostError
					require.ErrorAs(t, context.Cause(h.Context()), &lost)
					require.ErrorIs(t, lost, lock.ErrLost)
					require.Equal(t, want[i], lost.Reason)
					require.Equal(t, h.Name(), lost.Name)
					require.Equal(t, h.Owner(), lost.Owner)
					require.WithinDuration(t, time.Now(), lost.When, timeout+time.Second)
					require.Equal(t, lost.Reason == lock.ReasonClosed, lost.Is(lock.ErrClosed))
					renewed := way.renewed != "" && (way.fixed == "" || i%2 == 0)
					if renewed && way.cause {
						require.Error(t, lost.Err)
					} else {
						require.NoError(t, lost.Err)
					}
					require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
					require.Equal(t, error(lost), h.Unlock(t.Context()))
					require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
				}
				if undo != nil {
					undo()
				}
				harness.Eventually(t, 10*time.Second, "the server answers", func() bool { return a.other.Ping(t.Context()) == nil })
				for _, h := range holds {
					require.NoError(t, a.other.Lock(h.Name()).Do(t.Context(), nothing))
				}
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}
