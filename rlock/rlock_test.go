package rlock_test

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

func mustLock(t *testing.T, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(t.Context(), opts...)
	require.NoError(t, err)
	return h
}

func TestFencingTokens(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.FencedLock("orders")
		var want int64
		check := func(h lock.Hold, err error) lock.Hold {
			t.Helper()
			require.NoError(t, err)
			want++
			require.Equal(t, want, h.Token())
			return h
		}
		h := check(l.Lock(t.Context(), lock.Lease(10*time.Second)))
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, want, h.Token())
		h = check(l.TryLock(t.Context()))
		require.NoError(t, h.Unlock(t.Context()))

		// Re-entry draws no token: the holds of an owner share theirs.
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		h1 := check(l.Lock(ctx))
		h2, err := l.Lock(ctx)
		require.NoError(t, err)
		require.Equal(t, h1.Token(), h2.Token())
		require.NoError(t, h2.Unlock(ctx))
		require.NoError(t, h1.Unlock(ctx))

		// Being handed over counts too.
		h = check(l.Lock(t.Context()))
		next := harness.StartLock(t, t.Context(), l)
		harness.Waits(t, 1, c)
		require.NoError(t, h.Unlock(t.Context()))
		h = next.Got()
		require.Greater(t, h.Token(), want)
		want = h.Token()
		require.NoError(t, h.Unlock(t.Context()))
		require.NotEqual(t, "$-1", harness.Do(t, s.Addr, "GET", "redisson_lock_token:{orders}"))
		require.Equal(t, int64(-1), harness.PTTL(t, s.Addr, "redisson_lock_token:{orders}"))
		require.Zero(t, mustLock(t, c.Lock("plain")).Token())

		h = check(l.Lock(t.Context()))
		reset, err := l.ResetTokens(t.Context())
		require.NoError(t, err)
		require.False(t, reset, "of a lock that is held")
		require.NoError(t, h.Unlock(t.Context()))
		reset, err = l.ResetTokens(t.Context())
		require.NoError(t, err)
		require.True(t, reset)
		want = 0
		check(l.TryLock(t.Context()))
	})
}

func TestGuard(t *testing.T) {
	var g rlock.Guard
	require.NoError(t, g.Check(3))
	require.NoError(t, g.Check(3))
	require.ErrorIs(t, g.Check(2), rlock.ErrStaleToken)
	require.NoError(t, g.Check(7))
	require.ErrorIs(t, g.Check(6), rlock.ErrStaleToken)
	require.ErrorIs(t, g.Check(0), lock.ErrInvalid)
	require.ErrorIs(t, g.Check(-1), lock.ErrInvalid)
	require.Equal(t, int64(7), g.Highest())
	require.ErrorIs(t, rlock.NewGuard(g.Highest()).Check(6), rlock.ErrStaleToken)
}

func TestBackoff(t *testing.T) {
	exponential := rlock.ExponentialBackoff(10*time.Millisecond, 100*time.Millisecond, 3)
	for range 100 {
		for i, bounds := range [][2]time.Duration{{10, 10}, {30, 31}, {90, 92}, {100, 100}, {100, 100}, {100, 100}} {
			pause := exponential(i + 1)
			require.GreaterOrEqual(t, pause, bounds[0]*time.Millisecond)
			require.LessOrEqual(t, pause, bounds[1]*time.Millisecond)
			require.Equal(t, 30*time.Millisecond, rlock.ConstantBackoff(30*time.Millisecond)(i+1))
		}
	}
	require.Equal(t, 100*time.Millisecond, exponential(1_000_000))
	require.Equal(t, time.Millisecond, rlock.ExponentialBackoff(-1, -1, -1)(5))
	require.Equal(t, time.Millisecond, rlock.ConstantBackoff(0)(1))
}

// asleep waits until n attempts were made since the server's statistics were reset, and
// the clients have none to make.
func asleep(t *testing.T, s *testserver.Server, n int, clients ...*redlatch.Client) {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	defer conn.Close()
	harness.Eventually(t, soon, fmt.Sprintf("%d attempts, and then quiet", n), func() bool {
		return harness.Commands(t, conn)["evalsha"] >= n && harness.Stats(clients...).Attempting == 0
	})
}

// A token is at least 1 and a number that every reader of JSON knows exactly. A counter that would give another
// one grants nothing, and stays as it is.
func TestACounterOutOfRangeTakesNothing(t *testing.T) {
	eachOwner(t, func(t *testing.T, s *testserver.Server, owner func(*redlatch.Client) context.Context) {
		c := harness.Client(t, s)
		for _, set := range [][]string{
			{"SET", counter, "9007199254740991"}, {"SET", counter, "9007199254740992"}, {"SET", counter, "9223372036854775807"},
			{"SET", counter, "-1000"}, {"SET", counter, "-1"},
			{"SET", counter, "x"}, {"SET", counter, "1.5"}, {"SET", counter, "007"}, {"RPUSH", counter, "x"},
		} {
			harness.Do(t, s.Addr, "DEL", counter)
			harness.Do(t, s.Addr, set...)
			before, err := testserver.Query(s.Addr, "DUMP", counter)
			require.NoError(t, err)
			for name, acquire := range map[string]func() (lock.Hold, error){
				"TryLock": func() (lock.Hold, error) { return c.FencedLock("orders").TryLock(owner(c)) },
				"Lock":    func() (lock.Hold, error) { return c.FencedLock("orders").Lock(owner(c), lock.Wait(soon)) },
			} {
				began := time.Now()
				_, err := acquire()
				require.ErrorContains(t, err, "fencing counter", "%s %v", name, set)
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
				require.NotErrorIs(t, err, lock.ErrUnavailable)
				require.NotErrorIs(t, err, lock.ErrIndeterminate)
				require.Less(t, time.Since(began), soon/2, "it is not tried again")
				require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"))
				after, err := testserver.Query(s.Addr, "DUMP", counter)
				require.NoError(t, err)
				require.Equal(t, before, after)
			}
		}
		for _, last := range []string{"9007199254740990", "0"} {
			harness.Do(t, s.Addr, "SET", counter, last)
			h, err := c.FencedLock("orders").TryLock(owner(c))
			require.NoError(t, err)
			require.Equal(t, last, strconv.FormatInt(h.Token()-1, 10))
			require.NoError(t, h.Unlock(t.Context()))
		}
	})
}

// The callers of a process get the last tokens in turn, and then errors.
func TestTheLastTokensAreNotRepeated(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		harness.Do(t, s.Addr, "SET", "redisson_lock_token:{orders}", "9007199254740986")
		first := mustLock(t, c.FencedLock("orders"))
		const callers = 8
		tokens, errs := []int64{first.Token()}, make(chan error, callers)
		for range callers {
			go func() {
				h, err := c.FencedLock("orders").Lock(context.Background())
				if err == nil {
					tokens = append(tokens, h.Token())
					err = h.Unlock(context.Background())
				}
				errs <- err
			}()
		}
		harness.Waits(t, callers, c)
		require.NoError(t, first.Unlock(t.Context()))
		refused := 0
		for range callers {
			if err := harness.Receive(t, soon, "the end of a call", errs); err != nil {
				require.ErrorContains(t, err, "fencing counter")
				refused++
			}
		}
		require.Equal(t, callers+1-len(tokens), refused)
		require.Greater(t, len(tokens), 1)
		for i, token := range tokens {
			require.Less(t, token, int64(1)<<53)
			require.True(t, i == 0 || token > tokens[i-1], "%v", tokens)
		}
	})
}
