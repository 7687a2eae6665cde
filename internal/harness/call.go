package harness

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

// callTimeout is when a call that should end counts as one that hangs.
const callTimeout = 30 * time.Second

// Call is a call that runs in the background. Its context ends with the test at the latest.
type Call[T any] struct {
	t     testing.TB
	Owner string // that waits in the server's queue, if the test knows it

	Cancel context.CancelCauseFunc
	Begun  time.Time
	Ended  chan struct{} // closed after the fields below are set
	Value  T
	Err    error
	At     time.Time // when it returned
}

// Start calls f.
func Start[T any](t testing.TB, ctx context.Context, f func(ctx context.Context) (T, error)) *Call[T] {
	c := &Call[T]{t: t, Begun: time.Now(), Ended: make(chan struct{})}
	ctx, c.Cancel = context.WithCancelCause(ctx)
	go func() {
		defer close(c.Ended)
		c.Value, c.Err = f(ctx)
		c.At = time.Now()
	}()
	t.Cleanup(func() { c.Cancel(nil) })
	return c
}

// StartLock calls Lock.
func StartLock(t testing.TB, ctx context.Context, l lock.Locker, opts ...lock.Option) *Call[lock.Hold] {
	return Start(t, ctx, func(ctx context.Context) (lock.Hold, error) { return l.Lock(ctx, opts...) })
}

// End returns the error of the call when it has ended.
func (c *Call[T]) End() error {
	c.t.Helper()
	return c.EndWithin(callTimeout)
}

// EndWithin is End for a call that must not last longer than d.
func (c *Call[T]) EndWithin(d time.Duration) error {
	c.t.Helper()
	Receive(c.t, d, "the end of a call", c.Ended)
	return c.Err
}

// Got returns the value of the call when it has succeeded.
func (c *Call[T]) Got() T {
	c.t.Helper()
	require.NoError(c.t, c.End())
	return c.Value
}

// Running reports whether the call has not returned.
func (c *Call[T]) Running() bool {
	select {
	case <-c.Ended:
		return false
	default:
		return true
	}
}

// Leave cancels an attempt to acquire.
func (c *Call[T]) Leave() {
	c.t.Helper()
	left := errors.New("left")
	c.Cancel(left)
	require.ErrorIs(c.t, c.End(), lock.ErrNotAcquired)
	require.ErrorIs(c.t, c.Err, left)
}

// InOrder fails the test unless the calls acquire one after the other. It unlocks the hold
// of each before it waits for the next.
func InOrder(t testing.TB, calls ...*Call[lock.Hold]) {
	t.Helper()
	for i, c := range calls {
		h := c.Got()
		for _, later := range calls[i+1:] {
			require.True(t, later.Running(), "one has overtaken another")
		}
		if c.Owner != "" {
			require.Equal(t, c.Owner, h.Owner().String())
		}
		require.NoError(t, h.Unlock(context.Background()))
	}
}
