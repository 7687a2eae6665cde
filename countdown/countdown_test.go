package countdown_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

const (
	// key is the name of the latch in most tests.
	key = "import"
	// soon is well below the safety poll.
	soon = 3 * time.Second
)

func setCount(t testing.TB, l *countdown.Latch, n int) {
	t.Helper()
	set, err := l.TrySetCount(context.Background(), n)
	require.NoError(t, err)
	require.True(t, set)
}

func countDown(t testing.TB, l *countdown.Latch, left int) {
	t.Helper()
	got, err := l.CountDown(context.Background())
	require.NoError(t, err)
	require.Equal(t, left, got)
}

func requireCount(t testing.TB, l *countdown.Latch, want int) {
	t.Helper()
	got, err := l.Count(context.Background())
	require.NoError(t, err)
	require.Equal(t, want, got)
}

// wait calls Wait in the background.
func wait(ctx context.Context, l *countdown.Latch) <-chan error {
	done := make(chan error, 1)
	go func() { done <- l.Wait(ctx) }()
	return done
}

// requireReleased fails unless a wait ends without an error within d.
func requireReleased(t testing.TB, done <-chan error, d time.Duration) {
	t.Helper()
	require.NoError(t, ended(t, done, d))
}

func ended(t testing.TB, done <-chan error, d time.Duration) error {
	t.Helper()
	return harness.Receive(t, d, "the end of the wait", done)
}

func requireWaiting(t testing.TB, done <-chan error) {
	t.Helper()
	select {
	case err := <-done:
		require.FailNow(t, "the wait has ended", "%v", err)
	default:
	}
}

// waitForParked returns once that many waiters of a client need only a message.
func waitForParked(t testing.TB, c *redlatch.Client, name string, waiters int) {
	t.Helper()
	harness.Eventually(t, 10*time.Second, "the waiters are parked", func() bool {
		hub := c.Stats().PubSub
		return hub.Subscribed == hub.Channels && countdown.Parked(c.CountDownLatch(name)) == waiters
	})
}

// nothingLeft fails the test unless the server has no keys except cached replies with an
// expiry.
func nothingLeft(t testing.TB, s *testserver.Server) {
	t.Helper()
	keys, err := testserver.Query(s.Addr, "KEYS", "*")
	require.NoError(t, err)
	for _, k := range keys {
		require.True(t, strings.HasPrefix(k, countdown.CachedReply(key, "")), k)
		require.NotEqualValues(t, -1, harness.PTTL(t, s.Addr, k), k)
	}
}

func TestCountToZero(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).CountDownLatch(key)
		for _, n := range []int{3, 10, countdown.MaxCount} { // rounds
			setCount(t, l, n)
			requireCount(t, l, n)
			for _, again := range []int{0, 3} {
				set, err := l.TrySetCount(t.Context(), again)
				require.NoError(t, err)
				require.False(t, set)
			}
			countDown(t, l, n-1)
			requireCount(t, l, n-1)
			left, err := l.CountDownN(t.Context(), n-2)
			require.NoError(t, err)
			require.Equal(t, 1, left)
			left, err = l.CountDownN(t.Context(), math.MaxInt) // more than there is
			require.NoError(t, err)
			require.Zero(t, left)
			nothingLeft(t, s)
		}
	})
}

func TestLatchWithoutCountIsOpen(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).CountDownLatch(key)
		isOpen := func() {
			t.Helper()
			requireCount(t, l, 0)
			require.NoError(t, l.Wait(t.Context()))
			countDown(t, l, 0)
			deleted, err := l.Delete(t.Context())
			require.NoError(t, err)
			require.False(t, deleted)
			setCount(t, l, 0)
			set, err := l.TrySetCountFor(t.Context(), 0, time.Hour)
			require.NoError(t, err)
			require.True(t, set)
			nothingLeft(t, s)
		}
		isOpen()
		setCount(t, l, 1)
		countDown(t, l, 0)
		isOpen()
		// As Redisson may leave it.
		harness.Do(t, s.Addr, "SET", key, "0")
		requireCount(t, l, 0)
		require.NoError(t, l.Wait(t.Context()))
		setCount(t, l, 2)
		requireCount(t, l, 2)
	})
}

func TestWrongType(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.CountDownLatch(key)
		for _, words := range [][]string{
			{"RPUSH", key, "1"}, {"SET", key, "1.5"}, {"SET", key, "007"}, {"SET", key, ""}, {"SET", key, "-0"},
			{"SET", key, "+1"}, {"SET", key, "0x10"}, {"SET", key, " 1"}, {"SET", key, "99999999999999999999"},
		} {
			t.Run(fmt.Sprint(words), func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				harness.Do(t, s.Addr, words...)
				before := dump(t, s)
				ops := operations(l)
				if words[2] == "99999999999999999999" { // these operations accept it
					delete(ops, "TrySetCount")
					delete(ops, "TrySetCountFor")
					delete(ops, "Delete")
				}
				for what, op := range ops {
					err := op(t.Context())
					require.Error(t, err, what)
					require.NotErrorIs(t, err, lock.ErrIndeterminate, what)
				}
				require.Equal(t, before, dump(t, s))
			})
		}
	})
}

// operations are all operations that query the server.
func operations(l *countdown.Latch) map[string]func(ctx context.Context) error {
	return map[string]func(ctx context.Context) error{
		"TrySetCount":    func(ctx context.Context) error { _, err := l.TrySetCount(ctx, 1); return err },
		"TrySetCountFor": func(ctx context.Context) error { _, err := l.TrySetCountFor(ctx, 1, time.Minute); return err },
		"CountDown":      func(ctx context.Context) error { _, err := l.CountDown(ctx); return err },
		"CountDownN":     func(ctx context.Context) error { _, err := l.CountDownN(ctx, 2); return err },
		"Count":          func(ctx context.Context) error { _, err := l.Count(ctx); return err },
		"Delete":         func(ctx context.Context) error { _, err := l.Delete(ctx); return err },
		"Wait":           l.Wait,
		"WaitChan":       func(ctx context.Context) error { return <-l.WaitChan(ctx) },
	}
}

// dump returns everything on the server.
func dump(t testing.TB, s *testserver.Server) []string {
	t.Helper()
	keys, err := testserver.Query(s.Addr, "KEYS", "*")
	require.NoError(t, err)
	var all []string
	for _, k := range keys {
		value, err := testserver.Query(s.Addr, "DUMP", k)
		require.NoError(t, err)
		all = append(all, fmt.Sprint(k, value))
	}
	return all
}

func TestInvalidArguments(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		for what, op := range operations(c.CountDownLatch("")) {
			require.ErrorIs(t, op(t.Context()), lock.ErrInvalid, what)
		}
		l := c.CountDownLatch(key)
		require.Equal(t, key, l.Name())
		for what, op := range operations(l) {
			require.ErrorIs(t, op(nil), lock.ErrInvalid, what)
		}
		ctx := t.Context()
		_, err := l.TrySetCount(ctx, -1)
		require.ErrorIs(t, err, lock.ErrInvalid)
		_, err = l.TrySetCount(ctx, countdown.MaxCount+1)
		require.ErrorIs(t, err, lock.ErrInvalid)
		_, err = l.TrySetCountFor(ctx, -1, time.Minute)
		require.ErrorIs(t, err, lock.ErrInvalid)
		for _, ttl := range []time.Duration{0, -1, time.Millisecond - 1, lock.MaxLease + 1} {
			for _, n := range []int{0, 1} {
				_, err = l.TrySetCountFor(ctx, n, ttl)
				require.ErrorIs(t, err, lock.ErrInvalid)
			}
		}
		for _, n := range []int{0, -1, math.MinInt} {
			_, err = l.CountDownN(ctx, n)
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		for what, op := range operations(l) {
			err := op(cancelled)
			require.ErrorIs(t, err, context.Canceled, what)
			require.NotErrorIs(t, err, lock.ErrIndeterminate, what)
		}
		c.Close()
		for what, op := range operations(l) {
			require.ErrorIs(t, op(ctx), lock.ErrClosed, what)
		}
		nothingLeft(t, s)
	})
}

// A latch shares no key and no channel with one whose name differs only by braces.
func TestNamesWithBraces(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		const braced = "{" + key + "}"
		setCount(t, other.CountDownLatch(key), 1)
		setCount(t, other.CountDownLatch(braced), 1)
		waits, ends := wait(t.Context(), c.CountDownLatch(key)), wait(t.Context(), c.CountDownLatch(braced))
		waitForParked(t, c, key, 1)
		waitForParked(t, c, braced, 1)

		countDown(t, other.CountDownLatch(braced), 0)
		requireReleased(t, ends, soon)

		// Another round of that latch is no other round of this one.
		setCount(t, other.CountDownLatch(braced), 1)
		harness.Do(t, s.Addr, "PUBLISH", wire.LatchChannel(key), "0")
		waitForParked(t, c, key, 1)
		requireWaiting(t, waits)
		countDown(t, other.CountDownLatch(key), 0)
		requireReleased(t, waits, soon)
	})
}
