package engine_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/lock"
)

// fake is a hold without a lock.
type fake struct {
	engine.State
	lock.Hold
	name     string
	dropped  chan<- string
	extended time.Duration
}

func newFake(name string, dropped chan<- string) *fake {
	f := &fake{name: name, dropped: dropped}
	f.Begin(context.Background(), nil)
	return f
}

func (f *fake) Dropped()                     { f.dropped <- f.name }
func (f *fake) Context() context.Context     { return f.State.Context() }
func (f *fake) Remaining() time.Duration     { return f.extended }
func (f *fake) Unlock(context.Context) error { return f.End("Unlock", f.name) }
func (f *fake) Extend(_ context.Context, lease time.Duration) error {
	f.extended = lease
	return nil
}

// A handle that is collected is reported if its hold is held.
func TestDroppedHandles(t *testing.T) {
	dropped := make(chan string, 10)
	drop := func(name string, use func(hd *engine.Handle)) {
		hd := &engine.Handle{Droppable: newFake(name, dropped)}
		if name != "unarmed" {
			hd = engine.NewHandle(hd.Droppable)
		}
		use(hd)
	}
	drop("unarmed", func(*engine.Handle) {})
	drop("unlocked", func(hd *engine.Handle) { require.NoError(t, hd.Unlock(t.Context())) })
	drop("lost", func(hd *engine.Handle) { hd.Droppable.(*fake).Lose(newLoss()) })
	drop("in use", func(hd *engine.Handle) { t.Cleanup(func() { runtime.KeepAlive(hd) }) })
	for _, last := range []string{"armed", "armed later"} { // in collections of their own
		drop(last, func(hd *engine.Handle) { _ = hd.Context() })
		require.Eventually(t, func() bool {
			runtime.GC()
			return len(dropped) > 0
		}, 10*time.Second, time.Millisecond, last)
		require.Equal(t, last, <-dropped)
	}
	require.Empty(t, dropped)
}

func TestHandleChecksArguments(t *testing.T) {
	f := newFake(name, nil)
	hd := &engine.Handle{Droppable: f}
	var none context.Context
	require.ErrorIs(t, hd.Unlock(none), lock.ErrInvalid)
	require.ErrorIs(t, hd.Extend(none, time.Second), lock.ErrInvalid)
	require.ErrorIs(t, hd.Extend(t.Context(), 0), lock.ErrInvalid)
	require.True(t, f.Held())
	require.Zero(t, f.extended)
	require.NoError(t, hd.Extend(t.Context(), time.Minute))
	require.Equal(t, time.Minute, hd.Remaining())
	require.NoError(t, hd.Unlock(t.Context()))
	require.False(t, f.Held())
	require.ErrorIs(t, hd.Unlock(t.Context()), lock.ErrNotHeld)
}

// The requests of a release go on when the context of Unlock ends, and have its values.
func TestReleaseOutlivesItsContext(t *testing.T) {
	type key struct{}
	ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "value"), time.Hour)
	states := make([]engine.State, 200)
	var next int
	require.Zero(t, testing.AllocsPerRun(100, func() {
		s := &states[next]
		next++
		s.Begin(ctx, nil)
		if s.End("Unlock", name) != nil {
			t.Fail()
		}
		_, _ = s.StartRelease(ctx)
	}))
	s := &states[next]
	s.Begin(ctx, nil)
	require.NoError(t, s.End("Unlock", name))
	released, _ := s.StartRelease(ctx)
	cancel()
	require.NoError(t, released.Err())
	require.Nil(t, released.Done())
	_, limited := released.Deadline()
	require.False(t, limited)
	require.Equal(t, "value", released.Value(key{}))
	require.ErrorIs(t, s.Context().Err(), context.Canceled)
}
