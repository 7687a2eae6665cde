package fairlock_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// soon is enough for a few round trips on a busy machine.
	soon = 10 * time.Second
	// slack is how late timers may be on a busy machine.
	slack = 2500 * time.Millisecond
)

func nothing(context.Context) error { return nil }

func mustLock(t testing.TB, l *fairlock.Lock, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(context.Background(), opts...)
	require.NoError(t, err)
	return h
}

// clients returns n clients on one server.
func clients(t testing.TB, s *testserver.Server, n int, opts ...redlatch.Option) []*redlatch.Client {
	all := make([]*redlatch.Client, n)
	for i := range all {
		all[i] = harness.Client(t, s, opts...)
	}
	return all
}

// waiting returns the owners in the queue of a lock on the server.
func waiting(conn rueidis.Client, name string) ([]string, error) {
	return conn.Do(context.Background(), conn.B().Lrange().Key(wire.FairQueue(name)).Start(0).Stop(-1).Build()).AsStrSlice()
}

// caller is a call of Lock in the background.
type caller = harness.Call[lock.Hold]

// queue has a client call Lock, and returns when the caller is at the end of the queue, or its call has
// ended. The lock "orders" is held when it calls, and no other caller comes meanwhile.
func queue(t testing.TB, ctx context.Context, conn rueidis.Client, c *redlatch.Client) *caller {
	t.Helper()
	before, err := waiting(conn, orders)
	require.NoError(t, err)
	w := harness.StartLock(t, ctx, c.FairLock(orders))
	harness.Eventually(t, soon, "it is in the queue", func() bool {
		owners, err := waiting(conn, orders)
		require.NoError(t, err)
		if n := len(owners); n > 0 && !slices.Contains(before, owners[n-1]) {
			w.Owner = owners[n-1]
			return true
		}
		return !w.Running()
	})
	return w
}

// isWaiting fails the test unless n waiters are in the queue soon, and returns them.
func isWaiting(t testing.TB, conn rueidis.Client, n int) (owners []string) {
	t.Helper()
	harness.Eventually(t, 2*soon, "all are in the queue", func() bool {
		var err error
		owners, err = waiting(conn, orders)
		require.NoError(t, err)
		return len(owners) == n
	})
	return owners
}

// A single attempt never enters the queue, and fails while the queue has waiters.
func TestTryLockNeverQueuesNorOvertakes(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		all := []*redlatch.Client{s.Client(t), s.Client(t)}
		h := mustLock(t, all[0].FairLock(orders))
		refused := func() {
			t.Helper()
			s.Reset()
			for _, c := range all {
				for _, ctx := range []context.Context{t.Context(), lock.WithOwner(t.Context(), c.NewOwner())} {
					_, err := c.FairLock(orders).TryLock(ctx)
					require.ErrorIs(t, err, lock.ErrNotAcquired)
					_, err = c.FairLock(orders).Lock(ctx, lock.Wait(0))
					require.ErrorIs(t, err, lock.ErrNotAcquired)
				}
			}
			require.Zero(t, s.Calls("rpush"), "not even for a moment")
		}
		refused()

		java := newJava(t, s.Conn(t), 1, fairWait)
		require.False(t, java.acquire())
		require.NoError(t, h.Unlock(t.Context()))
		refused() // the lock is free, but its first waiter has not taken it yet
		require.Equal(t, []string{java.owner}, owners(s))
	})
}

// The waiters leave the queue of a key that is no lock any more.
func TestAKeyBecomesTheWrongType(t *testing.T) {
	eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, all []*redlatch.Client) {
		h := mustLock(t, all[0].FairLock(orders))
		var line []*caller
		for _, c := range all {
			line = append(line, queues(t, s, t.Context(), c))
		}
		s.Del(orders)
		require.NoError(t, s.Set(orders, "precious"))
		for _, w := range line {
			require.ErrorContains(t, w.End(), "WRONGTYPE")
		}
		<-h.Context().Done()
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		time.Sleep(time.Second) // for requests in the background
		require.Equal(t, []string{orders}, s.Keys())
		s.Del(orders)
	})
}

// The order of arrival is the order of holds across processes, while waiters come, hold and
// leave all the time.
func TestProcessesHaveTheLockInTheOrderOfTheirArrival(t *testing.T) {
	const most = 32 // waiters at a time
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all, arrivals := clients(t, s, harness.Size(4, 8)), harness.Size(200, 1200)
		conn, seed := harness.Conn(t, s.Addr), uint64(time.Now().UnixNano())
		t.Log("seed", seed)
		random := rand.New(rand.NewPCG(seed, 0))
		h := mustLock(t, harness.Client(t, s).FairLock(orders))
		var mu sync.Mutex
		var had []int
		var callers sync.WaitGroup
		places := make(chan struct{}, most)
		for i := range arrivals {
			if i == most {
				require.NoError(t, h.Unlock(t.Context()))
			}
			places <- struct{}{}
			ctx, cancel := t.Context(), context.CancelFunc(func() {})
			if random.IntN(8) == 0 {
				ctx, cancel = context.WithTimeout(t.Context(), time.Duration(random.Int64N(int64(100*time.Millisecond))))
			}
			hold := time.Duration(random.Int64N(int64(2 * time.Millisecond)))
			w := queue(t, ctx, conn, all[random.IntN(len(all))])
			callers.Go(func() {
				defer func() { cancel(); <-places }()
				<-w.Ended
				if w.Err != nil {
					assert.ErrorIs(t, w.Err, context.DeadlineExceeded)
					return
				}
				mu.Lock()
				had = append(had, i)
				mu.Unlock()
				time.Sleep(hold)
				assert.NoError(t, w.Value.Unlock(context.Background()))
			})
		}
		callers.Wait()
		require.True(t, slices.IsSorted(had), "%v", had)
		require.GreaterOrEqual(t, len(had), arrivals*3/4)
		require.Less(t, len(had), arrivals, "some leave")
		harness.NothingLeft(t, s.Addr)
	})
}
