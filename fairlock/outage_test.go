package fairlock_test

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// quietly discards the logs of a client.
var quietly = redlatch.WithLogger(slog.New(slog.DiscardHandler))

const (
	shortTimeout = 4500 * time.Millisecond // of the watchdog
	// positionTTL is how long a dead waiter keeps its queue position. The waiters behind it
	// learn of its end from their next heartbeat.
	positionTTL = shortTimeout / 3
	deadFor     = positionTTL + positionTTL/3
)

var briefly = redlatch.WithWatchdogTimeout(shortTimeout)

// A fault that leaves the queue alone does not change its order. internal/contract tests
// for all kinds that all waiters acquire the lock in spite of faults.
func TestTheOrderSurvivesFaults(t *testing.T) {
	type fault struct {
		name    string
		first   func(s *testserver.Server)               // before the first release
		happens func(t *testing.T, s *testserver.Server) // before each third release
		mute    bool                                     // no message arrives
		closes  bool                                     // one of the clients is closed
	}
	faults := []fault{
		{
			name:    "scripts forgotten",
			first:   func(*testserver.Server) { <-time.After(positionTTL) }, // heartbeats are sent all the same
			happens: func(t *testing.T, s *testserver.Server) { harness.Do(t, s.Addr, "SCRIPT", "FLUSH") },
		},
		{
			name: "connections cut",
			happens: func(t *testing.T, s *testserver.Server) {
				harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
				harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
			},
		},
		{
			name: "server stopped", // for longer than a position lasts without a heartbeat
			first: func(s *testserver.Server) {
				s.Pause()
				<-time.After(2 * positionTTL)
				s.Resume()
			},
		},
		{name: "messages lost", mute: true},
		{name: "client closed", closes: true},
	}
	harness.EachOf(t, faults, func(f fault) string { return f.name }, func(t *testing.T, shared *testserver.Server, f fault) {
		s := harness.Own(t, shared.Program)
		conn := harness.Conn(t, s.Addr)
		h := mustLock(t, harness.Client(t, s, quietly, briefly).FairLock(orders), lock.Lease(time.Minute))
		var all []*redlatch.Client
		for range 3 {
			c, g := harness.GatedClient(t, s, quietly, briefly)
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
			waiters = append(waiters, queue(t, ctx, conn, c))
		}
		if f.happens != nil {
			f.happens(t, s)
		}
		if f.first != nil {
			f.first(s)
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
			owners, err := waiting(conn, orders)
			require.NoError(t, err)
			require.Len(t, owners, len(waiters), "they have left when Close returns")
		}

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
				require.Zero(t, c.Stats().PubSub.Messages)
			}
		}
		harness.Idle(t, all[1:]...)
		harness.NothingStays(t, s.Addr)
	})
}

// Processes die at the head of the queue, in its middle and at its tail. The other
// waiters keep their order. A dead head delays them until its queue position ends.
func TestKilledProcessesLoseTheirPositions(t *testing.T) {
	const head, first, middle, second, tail = 0, 1, 2, 3, 4 // processes
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		conn := harness.Conn(t, s.Addr)
		var all []*redlatch.Client
		var gates []*harness.Gate // a client behind one that is stalled is dead to the server
		for range 5 {
			c, g := harness.GatedClient(t, s, quietly, briefly)
			all, gates = append(all, c), append(gates, g)
		}
		l := harness.Client(t, s, briefly).FairLock(orders)
		h := mustLock(t, l)
		var survivors []*caller
		for _, p := range []int{head, head, first, middle, second, middle, first, head, second, tail, tail} {
			w := queue(t, context.Background(), conn, all[p])
			if p == first || p == second {
				survivors = append(survivors, w)
			}
		}
		gates[head].Stall()
		gates[tail].Stall()
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, survivors[0].EndWithin(deadFor+slack))
		gates[middle].Stall()
		require.NoError(t, survivors[0].Value.Unlock(t.Context()))
		require.NoError(t, survivors[1].EndWithin(deadFor+slack))
		for i, w := range survivors[1:] {
			require.NoError(t, w.EndWithin(slack))
			for _, later := range survivors[i+2:] {
				require.True(t, later.Running())
			}
			require.NoError(t, w.Value.Unlock(t.Context()))
		}

		// Only the dead are left in the queue.
		require.NoError(t, l.Do(t.Context(), nothing, lock.Wait(deadFor+slack)))
		harness.NothingLeft(t, s.Addr)
	})
}

// The queue of dead waiters expires even if no other client comes.
func TestTheQueueOfTheDeadExpires(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s, quietly, redlatch.WithFairWaitTimeout(2*time.Second))
		h := mustLock(t, harness.Client(t, s).FairLock(orders), lock.Lease(4*time.Second))
		conn := harness.Conn(t, s.Addr)
		queue(t, context.Background(), conn, c)
		queue(t, context.Background(), conn, c)
		g.Stall()
		isWaiting(t, conn, 2)
		harness.NothingLeft(t, s.Addr)
		runtime.KeepAlive(h) // and not released: that would read the queue
	})
}

// A process that was stopped for longer than positionTTL enters the queue again, at the
// end, when it continues.
func TestAStoppedProcessQueuesAgain(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		conn := harness.Conn(t, s.Addr)
		stopped, g := harness.GatedClient(t, s, quietly, briefly)
		holder, second := harness.Client(t, s, briefly), harness.Client(t, s, briefly)
		h := mustLock(t, holder.FairLock(orders))
		w1 := queue(t, t.Context(), conn, stopped)
		scripts := harness.Commands(t, conn)["evalsha"]
		w2 := queue(t, t.Context(), conn, second)
		harness.Eventually(t, soon, "it sleeps", func() bool {
			return harness.Commands(t, conn)["evalsha"] >= scripts+2 && second.Stats().Attempting == 0
		})
		g.Stall()
		begin := time.Now()
		before := harness.Commands(t, conn)
		require.NoError(t, h.Unlock(t.Context()))
		h2 := w2.Got()
		after, took, counted := harness.Commands(t, conn), w2.At.Sub(begin), time.Since(begin)
		require.Less(t, took, deadFor+slack)
		require.GreaterOrEqual(t, took, positionTTL/3) // the last heartbeat may have been a while ago
		// A release, perhaps a renewal of the hold before it, a heartbeat every third of positionTTL, and an
		// attempt after each: the head may have changed.
		asked := after["evalsha"] + after["eval"] - before["evalsha"] - before["eval"]
		t.Logf("acquired after %v, with %d scripts", took, asked)
		require.LessOrEqual(t, asked, 2+2*(1+int(counted/(positionTTL/3))))

		w3 := queue(t, t.Context(), conn, holder)
		require.NoError(t, g.Open())
		require.Equal(t, w3.Owner, isWaiting(t, conn, 2)[0], "the other has entered the queue again")
		require.True(t, w1.Running())
		require.NoError(t, h2.Unlock(t.Context()))
		harness.InOrder(t, w3, w1)
		harness.NothingLeft(t, s.Addr)
	})
}

// One process has very many waiters. It listens for the first of them alone, and a question to the
// server covers several acquisitions.
func TestVeryManyWaitersOfOneProcess(t *testing.T) {
	waiters := harness.Size(100, 500)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		h := mustLock(t, harness.Client(t, s).FairLock(orders))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		had, channels := 0, 0 // protected by the lock alone
		var wg sync.WaitGroup
		s.Pause() // until all have called
		for range waiters {
			wg.Go(func() {
				h, err := c.FairLock(orders).Lock(context.Background())
				if !assert.NoError(t, err) {
					return
				}
				had++
				channels = max(channels, c.Stats().PubSub.Channels)
				assert.NoError(t, h.Unlock(context.Background()))
			})
		}
		harness.Eventually(t, soon, "all have called", func() bool { return c.Stats().Waiting+c.Stats().Attempting == waiters })
		s.Resume()
		isWaiting(t, conn, waiters)
		harness.Eventually(t, soon, "one listens", func() bool { return c.Stats().PubSub.Subscribed == 1 })
		require.Equal(t, 1, c.Stats().PubSub.Channels)
		entries := harness.Commands(t, conn)["evalsha"]
		t.Logf("%d scripts to enter the queue", entries)
		require.Less(t, entries, waiters/4, "they enter the queue in batches")

		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		wg.Wait()
		took, sent := time.Since(begin), harness.Commands(t, conn)["evalsha"]-entries
		t.Logf("%v and %.3f scripts for an acquisition, of waiters in the queue", took/time.Duration(waiters), float64(sent)/float64(waiters))
		require.Equal(t, waiters, had)
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
		l, conn := harness.Client(t, s).FairLock(orders), harness.Conn(t, s.Addr)
		require.NoError(t, l.Do(t.Context(), nothing))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		var wg sync.WaitGroup
		for range goroutines {
			wg.Go(func() {
				for range passes {
					assert.NoError(t, l.Do(context.Background(), nothing))
				}
			})
		}
		wg.Wait()
		sent, n := harness.Commands(t, conn), goroutines*passes
		require.LessOrEqual(t, sent["evalsha"], n*2+n/5)
		require.LessOrEqual(t, sent["subscribe"], n/5)
		harness.NothingLeft(t, s.Addr)
	})
}

// Waiters that come while an attempt of their process is under way enter the queue together, in
// the order in which they came, whether or not they have owners.
func TestWaitersWithOwnersAreNotOvertakenByABatch(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		h := mustLock(t, harness.Client(t, s, quietly).FairLock(orders))
		c := harness.Client(t, s, quietly)
		require.NoError(t, c.FairLock("other").Do(t.Context(), nothing)) // and the server knows the scripts
		s.Pause()
		var waiters []*caller
		for i := range 9 {
			ctx := context.Background()
			if i%3 == 1 {
				ctx = lock.WithOwner(ctx, c.NewOwner())
			}
			waiters = append(waiters, harness.StartLock(t, ctx, c.FairLock(orders)))
			harness.Eventually(t, soon, "it waits, or makes the attempt", func() bool {
				stats := c.Stats()
				return stats.Waiting+stats.Attempting == i+1
			})
		}
		s.Resume()
		isWaiting(t, harness.Conn(t, s.Addr), len(waiters))
		require.NoError(t, h.Unlock(t.Context()))
		harness.InOrder(t, waiters...)
	})
}
