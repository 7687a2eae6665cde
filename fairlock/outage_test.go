package fairlock_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// quietly is for clients whose logs are of no interest.
var quietly = redlatch.WithLogger(slog.New(slog.DiscardHandler))

// lineUp queues n waiters of several clients in turn.
func lineUp(t testing.TB, addr string, all []*redlatch.Client, n int) (line []*caller) {
	t.Helper()
	for i := range n {
		line = append(line, queue(t, context.Background(), addr, all[i%len(all)].FairLock("orders")))
	}
	return line
}

func TestScriptsForgottenInMidQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := clients(t, s, 3, redlatch.WithWatchdogTimeout(processTimeout))
		h := mustLock(t, all[0].FairLock("orders"))
		line := lineUp(t, s.Addr, all, 9)
		harness.Do(t, s.Addr, "SCRIPT", "FLUSH")
		<-time.After(placeTime) // signs of life are given all the same
		require.NoError(t, h.Unlock(t.Context()))
		for _, w := range line {
			harness.Do(t, s.Addr, "SCRIPT", "FLUSH")
			inOrder(t, w)
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// Nobody loses the place with the connection.
func TestConnectionsCutInMidQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := clients(t, s, 3, quietly, redlatch.WithWatchdogTimeout(ambiguityTimeout))
		h := mustLock(t, all[0].FairLock("orders"))
		line := lineUp(t, s.Addr, all, 9)
		cut := func() {
			harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
			harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
		}
		cut()
		require.NoError(t, h.Unlock(t.Context()))
		for i, w := range line {
			h := w.acquired()
			if i%3 == 0 {
				cut()
			}
			for _, later := range line[i+1:] {
				require.True(t, later.waiting())
			}
			if err := h.Unlock(t.Context()); err != nil {
				require.ErrorIs(t, err, lock.ErrIndeterminate)
			}
		}
		harness.NothingLeft(t, s.Addr)
	})
}

// The server loses everything, the queue too: all get in, one at a time.
func TestServerRestartedEmptyInMidQueue(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		all := clients(t, s, 3, quietly, redlatch.WithWatchdogTimeout(processTimeout))
		h := mustLock(t, all[0].FairLock("orders"))
		line := lineUp(t, s.Addr, all, 9)
		s.Kill()
		require.NoError(t, s.Restart())
		begin := time.Now()
		var inside atomic.Int32
		var wg sync.WaitGroup
		for _, w := range line {
			wg.Go(func() {
				h := w.acquired()
				assert.Equal(t, int32(1), inside.Add(1))
				<-time.After(5 * time.Millisecond)
				inside.Add(-1)
				assert.NoError(t, h.Unlock(context.Background()))
			})
		}
		wg.Wait()
		// Nobody has a place until it gives a sign of life, or connects again.
		require.Less(t, time.Since(begin), 9*placeTime/3+2*slack)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		harness.NothingLeft(t, s.Addr)
	})
}

// Subscriptions are confirmed and no message ever arrives: everybody gets in all the
// same, with a sign of life, or with the next poll.
func TestAllMessagesAreLost(t *testing.T) {
	const poll = 5 * time.Second
	for _, m := range []struct {
		name    string
		timeout time.Duration // of the watchdog
		waiters int
		each    time.Duration // for which one waits for the lock that is free
	}{
		{"short timeout", processTimeout, 8, placeTime / 3},
		{"long timeout", redlatch.DefaultWatchdogTimeout, 2, poll},
	} {
		t.Run(m.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				timeout := redlatch.WithWatchdogTimeout(m.timeout)
				h := mustLock(t, harness.Client(t, s, timeout).FairLock("orders"))
				var all []*redlatch.Client
				for range 2 {
					c, g := harness.GatedClient(t, s, timeout)
					g.Mute()
					all = append(all, c)
				}
				var line []*caller
				for i := range m.waiters {
					enter := queue
					if i < len(all) {
						enter = asleep
					}
					line = append(line, enter(t, context.Background(), s.Addr, all[i%2].FairLock("orders")))
				}
				begin := time.Now()
				require.NoError(t, h.Unlock(t.Context()))
				inOrder(t, line...)
				t.Logf("%v for %d", time.Since(begin), m.waiters)
				require.Less(t, time.Since(begin), time.Duration(m.waiters)*m.each+slack)
				for _, c := range all {
					require.Zero(t, c.PubSub().Messages)
				}
				harness.NothingLeft(t, s.Addr)
			})
		})
	}
}

// Waiters of a client that is closed hear of it, and leave.
func TestCloseWithWaiters(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, named := range []bool{false, true} {
			c, other := harness.Client(t, s), harness.Client(t, s)
			h := mustLock(t, other.FairLock("orders"))
			var theirs []*caller
			var ours []*caller
			for range 4 {
				ctx := context.Background()
				if named {
					ctx = lock.WithOwner(ctx, c.NewOwner())
				}
				theirs = append(theirs, queue(t, ctx, s.Addr, c.FairLock("orders")))
				ours = append(ours, queue(t, context.Background(), s.Addr, other.FairLock("orders")))
			}
			begin := time.Now()
			c.Close()
			for _, w := range theirs {
				require.ErrorIs(t, w.end(), lock.ErrClosed)
				require.NotErrorIs(t, w.err, lock.ErrNotAcquired)
			}
			require.Less(t, time.Since(begin), 5*time.Second)
			require.Len(t, line(t, s.Addr, "orders"), len(ours), "they have left when Close returns")
			require.NoError(t, h.Unlock(t.Context()))
			inOrder(t, ours...)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

func TestCloseDuringAcquisitionsLeavesNoPlace(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h := mustLock(t, harness.Client(t, s).FairLock("orders"))
		for i := range 40 {
			c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}}, quietly)
			require.NoError(t, err)
			ctx := context.Background()
			if i%2 == 0 {
				ctx = lock.WithOwner(ctx, c.NewOwner())
			}
			w := start(t, ctx, c.FairLock("orders"))
			<-time.After(time.Duration(i/2%10) * 200 * time.Microsecond)
			c.Close()
			require.ErrorIs(t, w.end(), lock.ErrClosed)
			require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"), "but for the lock itself")
		}
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// holdWorker takes the lock, says so, and says how it lost it.
func holdWorker(args []string) error {
	timeout, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	c, err := redlatch.New(context.Background(), rueidis.ClientOption{InitAddress: []string{args[0]}}, redlatch.WithWatchdogTimeout(timeout))
	if err != nil {
		return err
	}
	h, err := c.FairLock("orders").Lock(context.Background())
	if err != nil {
		return err
	}
	fmt.Println("holding")
	<-h.Context().Done()
	fmt.Println(context.Cause(h.Context()))
	fmt.Println(h.Unlock(context.Background()))
	return nil
}

// The holder is stopped for longer than its lease, or killed.
func TestAHolderStoppedPastItsLease(t *testing.T) {
	const timeout = time.Second // of the watchdog
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, how := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
			p := harness.Spawn(t, "hold", s.Addr, timeout.String())
			require.Equal(t, "holding", p.Line(30*time.Second))
			all := clients(t, s, 2)
			line := lineUp(t, s.Addr, all, 4)
			<-time.After(timeout) // it is renewed past its first lease
			require.True(t, line[0].waiting())
			p.Signal(how)
			begin := time.Now()
			h := line[0].acquired()
			require.Less(t, line[0].at.Sub(begin), timeout+slack)
			if how == syscall.SIGSTOP {
				p.Signal(syscall.SIGCONT)
				require.Contains(t, p.Line(soon), lock.ErrLost.Error())
				require.Contains(t, p.Line(soon), lock.ErrLost.Error())
				require.Equal(t, 1, harness.HoldCount(t, all[0].FairLock("orders"), h.Owner()))
			}
			require.NoError(t, h.Unlock(t.Context()))
			inOrder(t, line[1:]...)
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// Connections are killed all the time, of every kind. Calls may fail, and say so;
// nobody holds together with another, no waiter hangs, and nothing is left.
func TestConnectionsKilledInALoop(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const n, goroutines, rounds = 3, 3, 5
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		stop := make(chan struct{})
		var killer, wg sync.WaitGroup
		all := clients(t, s, n, quietly)
		killer.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(30 * time.Millisecond):
					_, _ = testserver.Command(s.Addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
					_, _ = testserver.Command(s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
				}
			}
		})
		var inside, held atomic.Int32
		for _, c := range all {
			for g := range goroutines {
				wg.Go(func() {
					for range rounds {
						ctx := ctx
						if g == 0 {
							ctx = lock.WithOwner(ctx, c.NewOwner())
						}
						h, err := c.FairLock("orders").Lock(ctx)
						if err != nil {
							assert.NoError(t, ctx.Err(), "a waiter hangs")
							continue
						}
						assert.Equal(t, int32(1), inside.Add(1))
						held.Add(1)
						inside.Add(-1)
						if err := h.Unlock(ctx); err != nil {
							assert.ErrorIs(t, err, lock.ErrIndeterminate)
						}
					}
				})
			}
		}
		wg.Wait()
		close(stop)
		killer.Wait()
		t.Logf("%d of %d acquisitions succeeded", held.Load(), n*goroutines*rounds)
		assert.Positive(t, held.Load())
		// Places that nobody keeps may be left to their time, and to who comes next.
		harness.Eventually(t, 2*soon, "the lock can be had", func() bool {
			return all[0].FairLock("orders").Do(t.Context(), nothing, lock.Wait(time.Second)) == nil
		})
		harness.NothingStays(t, s.Addr)
	})
}

// One process has very many waiters: they get in in their order, the process listens
// for the first of them alone, and an acquisition costs two commands.
func TestVeryManyWaitersOfOneProcess(t *testing.T) {
	const waiters = 500
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		h := mustLock(t, harness.Client(t, s).FairLock("orders"))
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		var had []string // protected by the lock alone
		var wg sync.WaitGroup
		channels := 0
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
		harness.Eventually(t, soon, "all wait", func() bool { return len(line(t, s.Addr, "orders")) == waiters })
		harness.Eventually(t, soon, "one listens", func() bool { return c.PubSub().Subscribed == 1 })
		require.Equal(t, 1, c.PubSub().Channels)
		require.Less(t, harness.Commands(t, conn)["evalsha"], waiters/4, "they queue together")
		want := line(t, s.Addr, "orders")
		before := harness.Commands(t, conn)["evalsha"]
		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		wg.Wait()
		sent := harness.Commands(t, conn)["evalsha"] - before
		t.Logf("%v and %.3f scripts for an acquisition, of waiters that have their place", time.Since(begin)/waiters, float64(sent)/waiters)
		require.Equal(t, want, had)
		require.LessOrEqual(t, channels, 1)
		require.Less(t, sent, waiters+waiters/10) // a hand-off each; signs of life
		harness.NothingLeft(t, s.Addr)
	})
}

func TestAnAcquisitionInASaturatedProcessCostsTwoScripts(t *testing.T) {
	const goroutines, passes = 20, 100
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

// The same of several processes.
func TestVeryManyWaitersOfSeveralProcesses(t *testing.T) {
	const processes, each = 4, 250
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := newCrowd(t, s, processes, redlatch.DefaultWatchdogTimeout, redlatch.DefaultFairWaitTimeout)
		h := mustLock(t, harness.Client(t, s).FairLock("orders"))
		for i := range processes {
			c.tell(i, order{times: each}.String())
		}
		harness.Eventually(t, 2*soon, "all wait", func() bool { return len(line(t, s.Addr, "orders")) == processes*each })
		want := line(t, s.Addr, "orders")
		harness.Eventually(t, soon, "each process listens", func() bool {
			return len(ask(t, s.Addr, "PUBSUB", "CHANNELS", "redisson_lock__channel:{orders}*")) == processes
		})
		begin := time.Now()
		require.NoError(t, h.Unlock(t.Context()))
		harness.Eventually(t, 30*time.Second, "all have had it", func() bool { return c.length(logKey) == processes*each })
		t.Logf("%v for an acquisition", time.Since(begin)/(processes*each))
		require.True(t, slices.Equal(want, c.list(logKey)), "in order")
		c.finish()
	})
}
