package harness

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

// callTimeout is the time after which a call counts as hanging.
const callTimeout = 30 * time.Second

// Call is a background call. The end of the test cancels its context.
type Call[T any] struct {
	t     testing.TB
	Owner string // owner in the server's queue, if the test knows it

	Cancel context.CancelCauseFunc
	Begun  time.Time
	Ended  chan struct{} // closed when the fields below are valid
	Value  T
	Err    error
	At     time.Time // when the call returned
}

// Start calls f in the background.
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

// StartLock calls Lock in the background.
func StartLock(t testing.TB, ctx context.Context, l lock.Locker, opts ...lock.Option) *Call[lock.Hold] {
	return Start(t, ctx, func(ctx context.Context) (lock.Hold, error) { return l.Lock(ctx, opts...) })
}

// End waits for the end of the call and returns its error.
func (c *Call[T]) End() error {
	c.t.Helper()
	return c.EndWithin(callTimeout)
}

// EndWithin is End for a call that must end within d.
func (c *Call[T]) EndWithin(d time.Duration) error {
	c.t.Helper()
	Receive(c.t, d, "the end of a call", c.Ended)
	return c.Err
}

// Got waits for the end of the call, which must succeed, and returns its value.
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

// Leave cancels a call that waits for a lock.
func (c *Call[T]) Leave() {
	c.t.Helper()
	left := errors.New("left")
	c.Cancel(left)
	NotAcquired(c.t, c.End())
	require.ErrorIs(c.t, c.Err, left)
}

// NotAcquired fails the test unless err is that of a wait that has ended: others hold the lock, or
// an attempt was in flight.
func NotAcquired(t testing.TB, err error) {
	t.Helper()
	require.NotEqual(t, errors.Is(err, lock.ErrNotAcquired), errors.Is(err, lock.ErrIndeterminate), "%v", err)
	require.NotErrorIs(t, err, lock.ErrUnavailable)
}

// InOrder fails the test unless the calls acquire the lock in this order. It unlocks each hold
// before it waits for the next call.
func InOrder(t testing.TB, calls ...*Call[lock.Hold]) {
	t.Helper()
	for i, c := range calls {
		h := c.Got()
		for _, later := range calls[i+1:] {
			require.True(t, later.Running(), "a later call has overtaken")
		}
		require.NoError(t, h.Unlock(context.Background()))
	}
}
