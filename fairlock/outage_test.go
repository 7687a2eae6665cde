package fairlock_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// quietly discards the logs of a client.
var quietly = redlatch.WithLogger(slog.New(slog.DiscardHandler))

// A fault that leaves the queue alone does not change its order. internal/contract tests
// for all kinds that all waiters acquire the lock in spite of faults.
func TestTheOrderSurvivesFaults(t *testing.T) {
	type fault struct {
		name    string
		happens func(t *testing.T, s *testserver.Server) // before each release
		mute    bool                                     // no message arrives
		closes  bool                                     // one of the clients is closed
		lasts   time.Duration                            // before the first release
	}
	faults := []fault{
		{
			name: "scripts forgotten", lasts: positionTTL, // heartbeats are sent all the same
			happens: func(t *testing.T, s *testserver.Server) { harness.Do(t, s.Addr, "SCRIPT", "FLUSH") },
		},
		{
			name: "connections cut",
			happens: func(t *testing.T, s *testserver.Server) {
				harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
				harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
			},
		},
		{name: "messages lost", mute: true},
		{name: "client closed", closes: true},
	}
	harness.EachOf(t, faults, func(f fault) string { return f.name }, func(t *testing.T, s *testserver.Server, f fault) {
		timeout := redlatch.WithWatchdogTimeout(processTimeout)
		h := mustLock(t, harness.Client(t, s, quietly, timeout).FairLock("orders"))
		var all []*redlatch.Client
		for range 3 {
			c, g := harness.GatedClient(t, s, quietly, timeout)
			if f.mute {
				g.Mute()
			}
			all = append(all, c)
		}
		var waiters []*caller
		for i := range harness.Size(6, 9) {
			ctx, c := context.Background(), all[i%len(all)]
			if i%2 == 0 {
				ctx = lock.WithOwner(ctx, c.NewOwner())
			}
			waiters = append(waiters, queue(t, ctx, s.Addr, c.FairLock("orders")))
		}
		if f.happens != nil {
			f.happens(t, s)
		}
		if f.closes {
			all[0].Close()
			var stay []*caller
			for i, w := range waiters {
				if i%len(all) == 0 {
					require.ErrorIs(t, w.End(), lock.ErrClosed)
				} else {
					stay = append(stay, w)
				}
			}
			waiters = stay
			require.Len(t, waiting(t, s.Addr, "orders"), len(waiters), "they have left when Close returns")
		}
		<-time.After(f.lasts)
		begin := time.Now()
		for i, w := range waiters {
			if f.happens != nil && i%3 == 0 {
				f.happens(t, s)
			}
			if err := h.Unlock(t.Context()); err != nil {
				require.ErrorIs(t, err, lock.ErrIndeterminate)
			}
			h = w.Got()
			for _, later := range waiters[i+1:] {
				require.True(t, later.Running(), "one has overtaken another")
			}
		}
		if err := h.Unlock(t.Context()); err != nil {
			require.ErrorIs(t, err, lock.ErrIndeterminate)
		}
		if f.mute { // each acquires the lock with its next heartbeat
			require.Less(t, time.Since(begin), time.Duration(len(waiters))*positionTTL/3+slack)
			for _, c := range all {
				require.Zero(t, c.PubSub().Messages)
			}
		}
		harness.Idle(t, all[1:]...)
		harness.NothingStays(t, s.Addr)
		harness.Do(t, s.Addr, "FLUSHALL")
	})
}

// The server does not answer for longer than a queue position lasts without a heartbeat. The
// waiters of several processes acquire the lock in their order, even if it is released at once.
func TestTheOrderSurvivesAStoppedServer(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s, timeout := harness.Own(t, shared.Program), redlatch.WithWatchdogTimeout(processTimeout)
		h := mustLock(t, harness.Client(t, s, quietly, timeout).FairLock("orders"), lock.Lease(time.Minute))
		var all []*redlatch.Client
		for range 3 {
			all = append(all, harness.Client(t, s, quietly, timeout))
		}
		var waiters []*caller
		for i := range 6 {
			waiters = append(waiters, queue(t, context.Background(), s.Addr, all[i%len(all)].FairLock("orders")))
		}
		s.Pause()
		<-time.After(2 * positionTTL)
		s.Resume()
		for i, w := range waiters {
			if err := h.Unlock(t.Context()); err != nil {
				require.ErrorIs(t, err, lock.ErrIndeterminate)
			}
			h = w.Got()
			for _, later := range waiters[i+1:] {
				require.True(t, later.Running(), "one has overtaken another")
			}
		}
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// One process has very many waiters. They acquire the lock in order, the process listens
// for the first of them alone, and an acquisition costs two commands.
func TestVeryManyWaitersOfOneProcess(t *testing.T) {
	waiters := harness.Size(100, 500)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		h := mustLock(t, harness.Client(t, s).FairLock("orders"))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		var had []string // protected by the lock alone
		var wg sync.WaitGroup
		channels := 0
		s.Pause() // until all have called
		for range waiters {
			wg.Go(func() {
				h, err := c.FairLock("orders").Lock(context.Background())
				if !assert.NoError(t, err) {
					return
				}
				had = append(had, h.Owner().String())
				channels = max(channels, c.PubSub().Channels)
				assert.NoError(t, h.Unlock(context.Background()))
			})
		}
		harness.Eventually(t, soon, "all have called", func() bool { return c.Stats().Waiting+c.Stats().Attempting == waiters })
		s.Resume()
		harness.Eventually(t, soon, "all wait", func() bool { return len(waiting(t, s.Addr, "orders")) == waiters })
		harness.Eventually(t, soon, "one listens", func() bool { return c.PubSub().Subscribed == 1 })
		require.Equal(t, 1, c.PubSub().Channels)
		entries := harness.Commands(t, conn)["evalsha"]
		t.Logf("%d scripts to enter the queue", entries)
		require.Less(t, entries, waiters/4, "they enter the queue in batches")
		want := waiting(t, s.Addr, "orders")
		before := harness.Commands(t, conn)["evalsha"]
		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		wg.Wait()
		took, sent := time.Since(begin), harness.Commands(t, conn)["evalsha"]-before
		t.Logf("%v and %.3f scripts for an acquisition, of waiters in the queue", took/time.Duration(waiters), float64(sent)/float64(waiters))
		require.Equal(t, processesOf(want), processesOf(had))
		require.LessOrEqual(t, channels, 1)
		// An answer is believed for 20 ms, in which a busy machine hands the lock over once.
		require.Less(t, sent, waiters/2+int(took/(20*time.Millisecond)), "a question covers several hand-offs")
		harness.NothingLeft(t, s.Addr)
	})
}

func TestAnAcquisitionInASaturatedProcessCostsTwoScripts(t *testing.T) {
	const goroutines = 20
	passes := harness.Size(20, 100)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		l := c.FairLock("orders")
		require.NoError(t, l.Do(t.Context(), nothing))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		begin := time.Now()
		var wg sync.WaitGroup
		for range goroutines {
			wg.Go(func() {
				for range passes {
					assert.NoError(t, l.Do(context.Background(), nothing))
				}
			})
		}
		wg.Wait()
		took, sent := time.Since(begin), harness.Commands(t, conn)
		n := goroutines * passes
		t.Logf("%v, %.3f scripts and %.3f subscriptions for an acquisition",
			took/time.Duration(n), float64(sent["evalsha"])/float64(n), float64(sent["subscribe"])/float64(n))
		require.LessOrEqual(t, sent["evalsha"], n*2+n/5)
		require.LessOrEqual(t, sent["subscribe"], n/5)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestVeryManyWaitersOfSeveralProcesses(t *testing.T) {
	const processes = 4
	each := harness.Size(50, 250)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newCrowd(t, s, processes, redlatch.DefaultWatchdogTimeout, redlatch.DefaultFairWaitTimeout)
		h := mustLock(t, harness.Client(t, s).FairLock("orders"))
		for i := range processes {
			c.send(i, order{times: each}.String())
		}
		harness.Eventually(t, 2*soon, "all wait", func() bool { return len(waiting(t, s.Addr, "orders")) == processes*each })
		want := waiting(t, s.Addr, "orders")
		harness.Eventually(t, soon, "each process listens", func() bool {
			return len(ask(t, s.Addr, "PUBSUB", "CHANNELS", "redisson_lock__channel:{orders}*")) == processes
		})
		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		harness.Eventually(t, 30*time.Second, "all have had it", func() bool { return c.length(logKey) == processes*each })
		t.Logf("%v for an acquisition", time.Since(begin)/time.Duration(processes*each))
		require.True(t, slices.Equal(processesOf(want), processesOf(c.list(logKey))), "in order")
		c.finish()
	})
}

// Waiters that come while an attempt of their process is under way enter the queue together, in
// the order in which they came, whether or not they have owners.
func TestWaitersWithOwnersAreNotOvertakenByABatch(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		h := mustLock(t, harness.Client(t, s, quietly).FairLock("orders"))
		c := harness.Client(t, s, quietly)
		require.NoError(t, c.FairLock("other").Do(t.Context(), nothing)) // and the server knows the scripts
		s.Pause()
		var waiters []*caller
		for i := range 9 {
			ctx := context.Background()
			if i%3 == 1 {
				ctx = lock.WithOwner(ctx, c.NewOwner())
			}
			waiters = append(waiters, harness.StartLock(t, ctx, c.FairLock("orders")))
			harness.Eventually(t, soon, "it waits, or makes the attempt", func() bool {
				stats := c.Stats()
				return stats.Waiting+stats.Attempting == i+1
			})
		}
		s.Resume()
		harness.Eventually(t, soon, "all are in the queue", func() bool { return len(waiting(t, s.Addr, "orders")) == len(waiters) })
		require.NoError(t, h.Unlock(t.Context()))
		harness.InOrder(t, waiters...)
	})
}

// A wait that has ended leaves nothing in the queue, whenever it ends: a single attempt that
// follows the next Unlock succeeds.
func TestAWaitThatEndedIsNoObstacle(t *testing.T) {
	rounds := harness.Size(40, 200)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		holders, waiting, trying := harness.Client(t, s), harness.Client(t, s), harness.Client(t, s)
		for round := range rounds {
			h := mustLock(t, holders.FairLock("orders"))
			var wg sync.WaitGroup
			var slow atomic.Bool // a wait ended before the server answered
			for n := range 1 + round%40 {
				wait := time.Duration(100+rand.IntN(3000*(1+n%2))) * time.Microsecond
				wg.Go(func() {
					began := time.Now()
					ctx, opts := context.Background(), []lock.Option{lock.Wait(wait)}
					if n%3 > 0 {
						var cancel context.CancelFunc
						ctx, cancel = context.WithTimeout(ctx, wait)
						defer cancel()
						opts = nil
					}
					_, err := waiting.FairLock("orders").Lock(ctx, opts...)
					// On a busy machine the server may be silent for a moment.
					over := errors.Is(err, lock.ErrNotAcquired) || errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate)
					assert.True(t, over, "%v", err)
					if time.Since(began) >= wait+session.Grace {
						slow.Store(true)
					}
				})
			}
			wg.Wait()
			require.NoError(t, h.Unlock(t.Context()))
			next, err := trying.FairLock("orders").TryLock(t.Context())
			if err != nil && slow.Load() {
				next, err = trying.FairLock("orders").Lock(t.Context())
			}
			require.NoError(t, err)
			require.NoError(t, next.Unlock(t.Context()))
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// A silent server delays the end of a wait by no more than a moment.
func TestASilentServerDoesNotHoldUpTheEndOfAWait(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		h := mustLock(t, harness.Client(t, s, quietly).FairLock("orders"), lock.Lease(time.Minute))
		c := harness.Client(t, s, quietly)
		w := queue(t, context.Background(), s.Addr, c.FairLock("orders"))
		s.Pause()
		began := time.Now()
		w.Cancel(nil)
		harness.NotAcquired(t, w.End()) // its second attempt may be under way
		require.Less(t, time.Since(began), time.Second)
		s.Resume()
		harness.Eventually(t, soon, "it has left", func() bool { return len(waiting(t, s.Addr, "orders")) == 0 })
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}
