package countdown_test

import (
	"context"
	"errors"
	"runtime/pprof"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// requireClosed fails unless a channel of WaitChan is or gets closed.
func requireClosed(t testing.TB, result <-chan error) {
	t.Helper()
	for range 3 { // every receive yields nil
		select {
		case err, more := <-result:
			require.NoError(t, err)
			require.False(t, more)
		case <-time.After(soon):
			require.FailNow(t, "the channel is not closed")
		}
	}
}

// requireOnce fails unless a channel of WaitChan delivers one error, which it returns.
func requireOnce(t testing.TB, result <-chan error) error {
	t.Helper()
	err := ended(t, result, soon)
	require.Error(t, err)
	requireWaiting(t, result)
	return err
}

func TestWaitChan(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.CountDownLatch(key)
		requireClosed(t, l.WaitChan(t.Context())) // it is open

		setCount(t, l, 1)
		gone := errors.New("gone")
		ctx, cancel := context.WithCancelCause(t.Context())
		all := []<-chan error{l.WaitChan(t.Context()), l.WaitChan(t.Context())}
		cancelled := l.WaitChan(ctx)
		waitForParked(t, c, key, 3)
		for _, result := range append(all, cancelled) {
			requireWaiting(t, result)
		}
		cancel(gone)
		err := requireOnce(t, cancelled)
		require.ErrorIs(t, err, gone)
		for _, kind := range []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate, lock.ErrClosed} {
			require.NotErrorIs(t, err, kind)
		}
		require.ErrorIs(t, requireOnce(t, l.WaitChan(ctx)), gone)
		waitForParked(t, c, key, 2)
		countDown(t, l, 0)
		for _, result := range all {
			requireClosed(t, result)
		}
		harness.Eventually(t, soon, "no listener remains", func() bool { return c.Stats().PubSub.Listeners == 0 && countdown.Latches(l) == 0 })

		harness.Do(t, s.Addr, "RPUSH", key, "1")
		require.ErrorContains(t, requireOnce(t, l.WaitChan(t.Context())), "WRONGTYPE")

		harness.Do(t, s.Addr, "DEL", key)
		setCount(t, l, 1)
		closed := l.WaitChan(context.Background())
		waitForParked(t, c, key, 1)
		c.Close()
		require.Len(t, closed, 1, "it ends before Close returns")
		require.ErrorIs(t, requireOnce(t, closed), lock.ErrClosed)
	})
}

// The latch opens, the context ends and the client is closed, all at once.
func TestWaitChanEndsOnce(t *testing.T) {
	const waiters = 20
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		other := harness.Client(t, s).CountDownLatch(key)
		for range harness.Size(10, 100) {
			c := harness.Client(t, s)
			l := c.CountDownLatch(key)
			setCount(t, other, 1)
			ctx, cancel := context.WithCancel(t.Context())
			var all []<-chan error
			for range waiters {
				all = append(all, l.WaitChan(ctx))
			}
			go c.Close()
			go cancel()
			countDown(t, other, 0)
			for _, result := range all {
				if err := ended(t, result, soon); err == nil {
					requireClosed(t, result)
				} else {
					require.True(t, errors.Is(err, context.Canceled) || errors.Is(err, lock.ErrClosed), err)
					requireWaiting(t, result)
				}
			}
			c.Close()
		}
	})
}

// However many wait, no goroutine waits for them.
func TestWaitChanNeedsNoGoroutine(t *testing.T) {
	const waiters = 500
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.CountDownLatch("many")
		setCount(t, l, 1)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		l.WaitChan(ctx)
		waitForParked(t, c, "many", 1)                                            // the client has its connections
		pprof.Do(ctx, pprof.Labels("test", t.Name()), func(ctx context.Context) { // goroutines inherit it
			for range waiters {
				l.WaitChan(ctx)
			}
		})
		waitForParked(t, c, "many", 1+waiters)
		harness.Eventually(t, soon, "no goroutine", func() bool { // one that has read may still be ending
			var all strings.Builder
			require.NoError(t, pprof.Lookup("goroutine").WriteTo(&all, 1))
			return !strings.Contains(all.String(), `"test":"`+t.Name()+`"`)
		})
	})
}
