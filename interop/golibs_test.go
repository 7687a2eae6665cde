package interop

import (
	"context"
	"strconv"
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
	slack     = time.Second // on a busy machine
	long      = time.Hour   // of leases that must not matter
)

// workers are the tasks of this program as a separate process.
var workers = map[string]func(args []string) error{"hold": holdWorker, "queue": queueWorker, "contend": contendWorker}

func TestMain(m *testing.M) { harness.Main(m, workers) }

func TestGoLibrariesExcludeEachOther(t *testing.T) {
	eachPair(t, func(t *testing.T, _ *testserver.Server, first, second locker) {
		ctx := t.Context()
		for range 3 {
			h, err := first.try(ctx, long)
			require.NoError(t, err)
			_, err = second.try(ctx, long)
			require.Error(t, err)
			if second.name() == "redlatch" {
				require.ErrorIs(t, err, lock.ErrNotAcquired)
			}
			require.NoError(t, h.extend(ctx))
			require.NoError(t, h.unlock(ctx))
			h, err = second.try(ctx, long)
			require.NoError(t, err)
			require.NoError(t, h.unlock(ctx))
		}
	})
}

// The lease must not matter.
func TestWaiterAcquiresAfterUnlock(t *testing.T) {
	harness.Full(t)
	eachPair(t, func(t *testing.T, _ *testserver.Server, first, second locker) {
		h, err := first.try(t.Context(), long)
		require.NoError(t, err)
		var got time.Time
		waited := make(chan error, 1)
		go func() {
			h, err := second.lock(context.Background(), long)
			got = time.Now()
			if err == nil {
				err = h.unlock(context.Background())
			}
			waited <- err
		}()
		time.Sleep(3 * ourCap) // the pauses are the longest by then
		require.Empty(t, waited)
		began := time.Now()
		require.NoError(t, h.unlock(t.Context()))
		require.NoError(t, <-waited)
		require.Less(t, got.Sub(began), max(ourCap, syncCap)+slack)
	})
}

func TestWaiterAcquiresAfterExpiry(t *testing.T) {
	harness.Full(t)
	const lease = 600 * time.Millisecond
	eachPair(t, func(t *testing.T, _ *testserver.Server, first, second locker) {
		began := time.Now()
		h, err := first.try(t.Context(), lease)
		require.NoError(t, err)
		next, err := second.lock(t.Context(), long)
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(began), lease-5*time.Millisecond)
		require.Less(t, time.Since(began), lease+syncCap+slack)
		require.Error(t, h.unlock(t.Context()))
		require.NoError(t, next.unlock(t.Context()))
	})
}

// A lost hold neither releases nor extends the hold of another owner.
func TestLostHoldDoesNotAffectItsSuccessor(t *testing.T) {
	harness.Full(t)
	eachPair(t, func(t *testing.T, s *testserver.Server, first, second locker) {
		ctx := t.Context()
		h, err := first.try(ctx, time.Minute)
		require.NoError(t, err)
		harness.Do(t, s.Addr, "DEL", "orders")
		next, err := second.try(ctx, 30*time.Second)
		require.NoError(t, err)
		require.Error(t, h.extend(ctx))
		require.Error(t, h.unlock(ctx))
		require.LessOrEqual(t, harness.PTTL(t, s.Addr, "orders"), int64(30_000))
		require.Positive(t, harness.PTTL(t, s.Addr, "orders"))
		c := harness.Client(t, s)
		require.ErrorIs(t, c.PlainLock("orders").Unlock(lock.WithOwner(ctx, c.NewOwner())), lock.ErrNotHeld)
		require.NoError(t, next.extend(ctx))
		require.NoError(t, next.unlock(ctx))
	})
}

// Three plain locks acquired separately are the same as redsync with three pools.
func TestPlainLocksFormARedsyncMajority(t *testing.T) {
	harness.Full(t)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		ctx := t.Context()
		servers := []*testserver.Server{s, harness.Own(t, s.Program), harness.Own(t, s.Program)}
		var mine []ours
		pools := redsync.New(goredis.NewPool(conn(t, servers[0])), goredis.NewPool(conn(t, servers[1])), goredis.NewPool(conn(t, servers[2])))
		for _, s := range servers {
			mine = append(mine, ours{harness.Client(t, s)})
		}
		theirs := syncs{pools}
		for held := range len(servers) + 1 {
			var holds []heldAt
			for i := range held {
				h, err := mine[i].try(ctx, long)
				require.NoError(t, err)
				holds = append(holds, heldAt{h, servers[i]})
			}
			h, err := theirs.try(ctx, long)
			if held >= 2 {
				require.Error(t, err, "with %d of ours", held)
			} else {
				require.NoError(t, err, "with %d of ours", held)
				for i := held; i < len(mine); i++ {
					_, err := mine[i].try(ctx, long)
					require.ErrorIs(t, err, lock.ErrNotAcquired)
				}
				require.NoError(t, h.unlock(ctx))
			}
			for i, h := range holds {
				require.Positive(t, harness.PTTL(t, h.s.Addr, "orders"), "hold %d", i)
				require.NoError(t, h.unlock(ctx))
			}
			for _, s := range servers {
				harness.NothingLeft(t, s.Addr)
			}
		}
	})
}

// A Redlock of plain locks is compatible with redsync: each excludes the other, also by a
// majority, and they count together.
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
		mine, theirs := clients[0].RedLock(members...), syncs{redsync.New(pools...)}

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

		const each = 20
		var wg sync.WaitGroup
		var counter atomic.Int64 // not an atomic increment, so that a second holder loses a count
		count := func() { counter.Store(counter.Load() + 1) }
		wg.Go(func() {
			for range each {
				assert.NoError(t, mine.Do(ctx, func(context.Context) error { count(); return nil }))
			}
		})
		wg.Go(func() {
			for n := 0; n < each; {
				h, err := theirs.try(ctx, long)
				if err != nil {
					time.Sleep(time.Millisecond) // it has given up
					continue
				}
				count()
				n++
				assert.NoError(t, h.unlock(ctx))
				time.Sleep(time.Millisecond) // for clients that poll
			}
		})
		wg.Wait()
		require.EqualValues(t, 2*each, counter.Load())
		for _, s := range servers {
			harness.NothingLeft(t, s.Addr)
		}
	})
}

type heldAt struct {
	held
	s *testserver.Server
}

// crowd has goroutines of a client acquire the lock all the time and hold it, until the test
// ends or stop is called, which returns their number of holds.
func crowd(t *testing.T, c *redlatch.Client, goroutines int, work func()) (stop func() int) {
	t.Helper()
	var wg sync.WaitGroup
	var n atomic.Int64
	ctx, cancel := context.WithCancel(context.Background())
	for range goroutines {
		wg.Go(func() {
			for ctx.Err() == nil {
				assert.NoError(t, c.PlainLock("orders").Do(context.Background(), func(context.Context) error {
					work()
					n.Add(1)
					return nil
				}))
			}
		})
	}
	stop = func() int {
		cancel()
		wg.Wait()
		return int(n.Load())
	}
	t.Cleanup(func() { stop() })
	return stop
}

// redsync with its default options tries 32 times, in about 4.7 s, and then gives up. Our
// waiters that pass the lock on leave it open before that.
func TestContentionDoesNotStarvePollingClients(t *testing.T) {
	harness.Full(t)
	for _, m := range []struct {
		name    string
		clients int
		hold    time.Duration
	}{{"one process", 1, time.Millisecond}, {"one process, long holds", 1, 100 * time.Millisecond}, {"three processes", 3, 2 * time.Millisecond}} {
		t.Run(m.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				var stops []func() int
				for range m.clients {
					stops = append(stops, crowd(t, harness.Client(t, s), 16, func() { time.Sleep(m.hold) }))
				}
				began := time.Now()
				for _, theirs := range foreignLocks(t, s) {
					for range 2 {
						asked := time.Now()
						ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
						h, err := theirs.lock(ctx, 8*time.Second)
						require.NoError(t, err, theirs.name())
						t.Logf("%s acquired it after %v", theirs.name(), time.Since(asked))
						// Until the next time it is left open, and then one of its pauses.
						require.Less(t, time.Since(asked), openEvery+m.hold+openFor+slack)
						require.NoError(t, h.unlock(ctx))
						cancel()
						time.Sleep(openFor) // which may last from this time
					}
				}
				took, n := time.Since(began), 0
				for _, stop := range stops {
					n += stop()
				}
				t.Logf("%d holds of ours in %v", n, took)
				harness.NothingLeft(t, s.Addr)
			})
		})
	}
}

// A counter that only the lock protects. All three continue until both polling clients have
// incremented it often enough. At least one of them acquires the lock whenever we leave it
// open, and usually all do, because 0.3 s is ample time.
func TestMixedClientsIncrementACounterExactly(t *testing.T) {
	harness.Full(t)
	const (
		goroutines = 4 // of each
		often      = 12
		most       = 30 * time.Second
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		counter := conn(t, s)
		ctx := context.Background()
		require.NoError(t, counter.Set(ctx, "counter", 0, 0).Err())
		add := func() {
			n, err := counter.Get(ctx, "counter").Int()
			assert.NoError(t, err)
			assert.NoError(t, counter.Set(ctx, "counter", strconv.Itoa(n+1), 0).Err())
		}
		stop := crowd(t, harness.Client(t, s), goroutines, add)
		began := time.Now()
		var wg sync.WaitGroup
		var all atomic.Int64
		for _, theirs := range foreignLocks(t, s) {
			var mine atomic.Int64
			for range goroutines {
				wg.Go(func() {
					for mine.Load() < often && time.Since(began) < most {
						ctx, cancel := context.WithTimeout(ctx, most)
						h, err := theirs.lock(ctx, most)
						switch {
						case err == nil:
							add()
							mine.Add(1)
							all.Add(1)
							assert.NoError(t, h.unlock(ctx), theirs.name())
						case theirs.name() == "redsync": // the 32 tries are over, so it starts again
						default:
							assert.NoError(t, err, theirs.name())
						}
						cancel()
					}
					assert.GreaterOrEqual(t, mine.Load(), int64(often), "%s starved", theirs.name())
				})
			}
		}
		wg.Wait()
		took := time.Since(began)
		n := stop()
		t.Logf("in %v: %d of ours, %d of theirs", took, n, all.Load())
		require.Greater(t, n, 10*often)
		total, err := counter.Get(ctx, "counter").Int()
		require.NoError(t, err)
		require.Equal(t, n+int(all.Load()), total)
		require.NoError(t, counter.Del(ctx, "counter").Err())
		harness.NothingLeft(t, s.Addr)
	})
}

// The polling clients hold the lock for at most three quarters of the time, so each attempt of
// ours succeeds with a chance of at least a quarter. A hundred failures in a row are
// practically impossible.
func TestPollingClientsDoNotStarveUs(t *testing.T) {
	harness.Full(t)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		var passes atomic.Int64
		rs := syncs{redsync.New(goredis.NewPool(conn(t, s)))}
		for range 3 {
			wg.Go(func() {
				for ctx.Err() == nil {
					h, err := rs.lock(ctx, long)
					if err != nil {
						continue // it has given up
					}
					time.Sleep(10 * time.Millisecond)
					passes.Add(1)
					assert.NoError(t, h.unlock(context.Background()))
					time.Sleep(30 * time.Millisecond)
				}
			})
		}
		c := harness.Client(t, s)
		harness.Eventually(t, 5*time.Second, "both have started", func() bool { return passes.Load() > 3 })
		began := time.Now()
		const often = 20
		for range often {
			h, err := c.PlainLock("orders").Lock(t.Context(), lock.Wait(100*ourCap))
			if assert.NoError(t, err) {
				assert.NoError(t, h.Unlock(t.Context()))
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Logf("%d of ours and %d of theirs in %v", often, passes.Load(), time.Since(began))
		cancel()
		wg.Wait()
		harness.NothingLeft(t, s.Addr)
	})
}
