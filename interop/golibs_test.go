package interop

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	syncpool "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

const (
	ourCap  = 250 * time.Millisecond // of the pauses of our waiters
	syncCap = 250 * time.Millisecond // of those of redsync
	// openEvery is how long waiters of one of our processes pass a lock on among themselves,
	// and openFor how long they leave it open then.
	openEvery = 3 * time.Second
	openFor   = 300 * time.Millisecond
)

func TestMain(m *testing.M) { harness.Main(m, workers) }

// A hold whose lock was deleted neither releases nor extends the hold of another owner.
func TestGoLibrariesExcludeEachOther(t *testing.T) {
	eachPair(t, func(t *testing.T, s *testserver.Server, first, second locker) {
		ctx := t.Context()
		for _, deleted := range []bool{false, true} {
			h, err := first.try(ctx, time.Minute)
			require.NoError(t, err)
			_, err = second.try(ctx, long)
			require.Error(t, err)
			if second.name() == "redlatch" {
				require.ErrorIs(t, err, lock.ErrNotAcquired)
			}
			require.NoError(t, h.extend(ctx))

			if deleted {
				harness.Do(t, s.Addr, "DEL", "orders")
			} else {
				require.NoError(t, h.unlock(ctx))
			}
			next, err := second.try(ctx, 30*time.Second)
			require.NoError(t, err)
			require.Error(t, h.extend(ctx))
			require.Error(t, h.unlock(ctx))
			ttl := harness.PTTL(t, s.Addr, "orders")
			require.LessOrEqual(t, ttl, int64(30_000))
			require.Positive(t, ttl)
			require.NoError(t, next.extend(ctx))
			require.NoError(t, next.unlock(ctx))
		}
	})
}

// A waiter gets in after a release, whatever the lease, and when a lease is over.
func TestGoLibrariesWaitForEachOther(t *testing.T) {
	harness.Full(t)
	eachPair(t, func(t *testing.T, _ *testserver.Server, first, second locker) {
		for _, lease := range []time.Duration{long, 600 * time.Millisecond} {
			began := time.Now()
			h, err := first.try(t.Context(), lease)
			require.NoError(t, err)
			waiting := harness.Start(t, t.Context(), func(ctx context.Context) (held, error) { return second.lock(ctx, long) })
			until := began.Add(lease)
			if lease == long {
				time.Sleep(3 * ourCap) // the pauses are the longest by then
				require.True(t, waiting.Running())
				until = time.Now()
				require.NoError(t, h.unlock(t.Context()))
			}

			next := waiting.Got()
			require.GreaterOrEqual(t, waiting.At.Sub(until), -5*time.Millisecond)
			require.Less(t, waiting.At.Sub(until), max(ourCap, syncCap)+slack)
			if lease != long {
				require.Error(t, h.unlock(t.Context()))
			}
			require.NoError(t, next.unlock(t.Context()))
		}
	})
}

// A Redlock of plain locks and redsync with the same servers exclude each other, also by a majority.
func TestRedlockIsCompatibleWithRedsync(t *testing.T) {
	harness.Full(t)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		ctx := t.Context()
		servers := []*testserver.Server{s, harness.Own(t, s.Program), harness.Own(t, s.Program)}
		var (
			clients []*redlatch.Client
			members []lock.Locker
			pools   []syncpool.Pool
		)
		for _, s := range servers {
			c := harness.Client(t, s)
			clients, members = append(clients, c), append(members, c.PlainLock("orders"))
			pools = append(pools, goredis.NewPool(conn(t, s)))
		}
		mine, theirs := clients[0].RedLock(members), syncs{redsync.New(pools...)}

		h, err := mine.Lock(ctx)
		require.NoError(t, err)
		_, err = theirs.try(ctx, long)
		require.Error(t, err)
		harness.Do(t, servers[2].Addr, "DEL", "orders") // a majority is left
		_, err = theirs.try(ctx, long)
		require.Error(t, err)
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Unlock(ctx))
		harness.Idle(t, clients...) // all servers have replied, so the other acquires all

		their, err := theirs.try(ctx, long)
		require.NoError(t, err)
		_, err = mine.TryLock(ctx)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		harness.Do(t, servers[0].Addr, "DEL", "orders")
		_, err = mine.TryLock(ctx)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, their.unlock(ctx))

		for _, s := range servers {
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// redsync with its default options tries 32 times, in about 4.7 s, and then gives up. Our
// waiters that pass the lock on leave it open before that.
func TestContentionDoesNotStarvePollingClients(t *testing.T) {
	harness.Full(t)
	const goroutines = 16
	for _, m := range []struct {
		name    string
		clients int
		hold    time.Duration
	}{{"one process, long holds", 1, 100 * time.Millisecond}, {"three processes", 3, 2 * time.Millisecond}} {
		t.Run(m.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				var crowd sync.WaitGroup
				ctx, stop := context.WithCancel(t.Context())
				for range m.clients {
					l := harness.Client(t, s).PlainLock("orders")
					for range goroutines {
						crowd.Go(func() {
							for ctx.Err() == nil {
								assert.NoError(t, l.Do(context.Background(), func(context.Context) error { time.Sleep(m.hold); return nil }))
							}
						})
					}
				}
				t.Cleanup(crowd.Wait)
				t.Cleanup(stop)

				for _, theirs := range foreignLocks(t, s) {
					for range 2 {
						asked := time.Now()
						h, err := theirs.lock(t.Context(), 8*time.Second)
						require.NoError(t, err, theirs.name())
						// Until the next time it is left open, and then one of its pauses.
						require.Less(t, time.Since(asked), openEvery+m.hold+openFor+slack)
						require.NoError(t, h.unlock(t.Context()))
						time.Sleep(openFor) // which may last from this time
					}
				}
				stop()
				crowd.Wait()
				harness.NothingLeft(t, s.Addr)
			})
		})
	}
}

// During a rolling deployment, callers of redsync with its default options contend with as many of redlatch. They
// fail hardly more often than without redlatch, where one in two hundred does.
func TestARolloutLeavesOldCallersTheirLocks(t *testing.T) {
	harness.Full(t)
	const (
		hold  = 20 * time.Millisecond
		lasts = 30 * time.Second
		most  = 4 // percent; a process that leaves nothing to pollers lets more than half of theirs fail
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var all sync.WaitGroup
		defer all.Wait()
		for _, old := range []int{4, 8} {
			for _, fresh := range []int{0, 1, 2} { // processes of 8 callers
				name := fmt.Sprint(old, " beside ", 8*fresh)
				until := time.Now().Add(lasts)
				for range fresh {
					l := harness.Client(t, s).PlainLock(name)
					for range 8 {
						all.Go(func() {
							for time.Now().Before(until) {
								assert.NoError(t, l.Do(context.Background(), func(context.Context) error { time.Sleep(hold); return nil }))
							}
						})
					}
				}
				all.Go(func() {
					var callers sync.WaitGroup
					var got, failed atomic.Int32
					for range old {
						mutex := redsync.New(goredis.NewPool(conn(t, s))).NewMutex(name)
						callers.Go(func() {
							for time.Now().Before(until) {
								if mutex.Lock() != nil {
									failed.Add(1)
									continue
								}
								got.Add(1)
								time.Sleep(hold)
								_, err := mutex.Unlock()
								assert.NoError(t, err)
							}
						})
					}
					callers.Wait()
					t.Logf("%s: %d locks of redsync, and %d failed", name, got.Load(), failed.Load())
					assert.LessOrEqual(t, 100*failed.Load(), most*(got.Load()+failed.Load()), name)
				})
			}
		}
	})
}
