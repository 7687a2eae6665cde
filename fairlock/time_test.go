package fairlock_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// The tests of this file are about deadlines, in virtual time.

// grain is how late a client may be at most.
const grain = 20 * time.Millisecond

// eachVirtually runs a test with one client and with several.
func eachVirtually(t *testing.T, test func(t *testing.T, s *harness.VirtualServer, all []*redlatch.Client), opts ...redlatch.Option) {
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprint(n, " clients"), func(t *testing.T) {
			harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
				var all []*redlatch.Client
				for range n {
					all = append(all, s.Client(t, opts...))
				}
				test(t, s, all)
				s.NothingLeft(t)
			})
		})
	}
}

// owners returns the queue of the lock "orders" on the server.
func owners(s *harness.VirtualServer) []string {
	owners, _ := s.List(wire.FairQueue(orders)) // which fails if there is none
	return owners
}

// queues makes a client wait for the lock "orders", at the end of the queue.
func queues(t *testing.T, s *harness.VirtualServer, ctx context.Context, c *redlatch.Client, opts ...lock.Option) *caller {
	t.Helper()
	before := len(owners(s))
	w := harness.StartLock(t, ctx, c.FairLock(orders), opts...)
	synctest.Wait()
	queue := owners(s)
	require.Len(t, queue, before+1)
	w.Owner = queue[before]
	return w
}

func ownersOf(line []*caller) (owners []string) {
	for _, w := range line {
		owners = append(owners, w.Owner)
	}
	return owners
}

// The holders never unlock. Each waiter acquires the lock when the lease before it ends,
// in order. One waiter has left before.
func TestLeasesRunOutOneAfterTheOther(t *testing.T) {
	const waiters, first, lease = 6, 500 * time.Millisecond, 200 * time.Millisecond
	for _, gone := range []int{0, 2} {
		eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, all []*redlatch.Client) {
			var line []*caller
			begin := time.Now()
			holder := mustLock(t, all[0].FairLock(orders), lock.Lease(first))
			for i := range waiters {
				line = append(line, queues(t, s, t.Context(), all[i%len(all)], lock.Lease(lease)))
			}
			line[gone].Leave()
			line = slices.Delete(line, gone, gone+1)
			for i, w := range line {
				require.Equal(t, w.Owner, lock.OwnerOf(w.Got()).String())
				require.InDelta(t, first+time.Duration(i)*lease, w.At.Sub(begin), float64(time.Duration(i+1)*grain))
			}
			runtime.KeepAlive(line)
			require.ErrorIs(t, holder.Unlock(t.Context()), lock.ErrLost)
		})
	}
}

// A waiter with a short wait leaves when that is over. No other waiter loses its queue
// position, in our order or by Redisson's deadlines.
func TestWaitsOfDifferentLengthsSideBySide(t *testing.T) {
	const short, long = 300 * time.Millisecond, 2 * time.Minute
	eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, all []*redlatch.Client) {
		h := mustLock(t, all[0].FairLock(orders))
		var stay, leave []*caller
		begin := time.Now()
		for i := range 9 {
			c := all[i%len(all)]
			if i%2 == 0 {
				stay = append(stay, queues(t, s, t.Context(), c, lock.Wait(long)))
			} else {
				leave = append(leave, queues(t, s, t.Context(), c, lock.Wait(short)))
			}
		}
		for _, w := range leave {
			harness.NotAcquired(t, w.End())
			require.InDelta(t, short, w.At.Sub(begin), float64(grain))
		}
		time.Sleep(long - time.Minute)
		synctest.Wait()
		require.Equal(t, ownersOf(stay), owners(s))
		// No deadline is in the past for a Java client.
		for _, w := range stay {
			require.True(t, w.Running())
			deadline, err := s.ZScore(wire.FairTimeouts(orders), w.Owner)
			require.NoError(t, err)
			require.Greater(t, int64(deadline), time.Now().Add(time.Minute).UnixMilli())
		}
		require.NoError(t, h.Unlock(t.Context()))
		harness.InOrder(t, stay...)
	})
}

// Queue returns the waiters in order. A heartbeat keeps a position for a third of the watchdog timeout,
// or for the fair wait timeout if that is less, and is sent every third of that.
func TestQueue(t *testing.T) {
	const ttl = 3 * time.Second
	for _, opt := range []redlatch.Option{redlatch.WithWatchdogTimeout(3 * ttl), redlatch.WithFairWaitTimeout(ttl)} {
		eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, all []*redlatch.Client) {
			l := all[0].FairLock(orders)
			queued := func(want ...*caller) {
				t.Helper()
				waiters, err := l.Queue(t.Context())
				require.NoError(t, err)
				var owners []string
				for _, w := range waiters {
					owners = append(owners, w.Owner.String())
					require.WithinRange(t, w.Deadline, time.Now().Add(ttl-ttl/3-grain), time.Now().Add(ttl))
				}
				require.Equal(t, ownersOf(want), owners)
			}
			queued()
			require.Empty(t, s.Keys())
			h := mustLock(t, l)
			queued()
			var line []*caller
			for i := range 5 {
				c, ctx := all[i%len(all)], t.Context()
				if i == 3 {
					ctx = lock.WithOwner(ctx, c.NewOwner())
				}
				line = append(line, queues(t, s, ctx, c))
			}
			queued(line...)

			line[1].Leave()
			synctest.Wait()
			line = slices.Delete(line, 1, 2)
			for range 10 { // much longer than one heartbeat keeps a position
				queued(line...)
				time.Sleep(ttl / 3)
			}
			require.NoError(t, h.Unlock(t.Context()))
			harness.InOrder(t, line...)
		}, opt)
	}
}

// Java's waiters have a deadline, waiters that have lost their position are left out, and
// an owner in another format is the zero Owner.
func TestQueueWithOthersInIt(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		l := c.FairLock(orders)
		java, err := lock.ParseOwner(javaID + ":42")
		require.NoError(t, err)
		later := time.Now().Add(5 * time.Minute)
		for _, w := range []struct {
			owner string
			dies  time.Time
		}{{"dead", time.Now()}, {java.String(), later}, {"somebody", later}} {
			_, err := s.ZAdd(wire.FairTimeouts(orders), float64(w.dies.UnixMilli()), w.owner)
			require.NoError(t, err)
			_, err = s.Push(wire.FairQueue(orders), w.owner)
			require.NoError(t, err)
		}
		queued, err := l.Queue(t.Context())
		require.NoError(t, err)
		at := time.UnixMilli(later.UnixMilli())
		require.Equal(t, []fairlock.Waiter{{Owner: java, Deadline: at}, {Deadline: at}}, queued)
		require.Len(t, owners(s), 3, "it changes nothing")

		var none context.Context
		_, err = l.Queue(none)
		require.ErrorIs(t, err, lock.ErrInvalid)
		c.Close()
		_, err = l.Queue(t.Context())
		require.ErrorIs(t, err, lock.ErrClosed)
	})
}

// A Java client that died at the head delays the others until their first heartbeat after its
// deadline and no longer. They do not poll without a pause meanwhile.
func TestADeadJavaWaiterDelaysTheOthersUntilItsDeadline(t *testing.T) {
	const wait = 90 * time.Second
	eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, all []*redlatch.Client) {
		c := all[0]
		h := mustLock(t, c.FairLock(orders), lock.Lease(500*time.Millisecond))
		dead := newJava(t, s.Conn(t), 1, wait)
		require.False(t, dead.acquire())
		var line []*caller
		for _, c := range all {
			line = append(line, queues(t, s, t.Context(), c))
		}
		queued, err := c.FairLock(orders).Queue(t.Context())
		require.NoError(t, err)
		require.Len(t, queued, 1+len(line))
		require.Equal(t, dead.owner, queued[0].Owner.String())
		deadline := queued[0].Deadline
		require.NoError(t, h.Unlock(t.Context()))
		synctest.Wait()
		s.Reset()
		time.Sleep(time.Until(deadline) - time.Millisecond)
		synctest.Wait()
		for _, w := range line {
			require.True(t, w.Running())
		}
		// A heartbeat of each client every third of its position's TTL, and a poll of its
		// first waiter every 5 s.
		most := int(wait/(10*time.Second/3)+wait/(5*time.Second)) + 2
		require.LessOrEqual(t, s.Calls("evalsha"), len(all)*most)
		line[0].Got()
		require.Less(t, line[0].At.Sub(deadline), 10*time.Second/3+grain, "its next heartbeat")
		harness.InOrder(t, line...)
	})
}

// A Java client subtracts its wait from all deadlines when it acquires the lock. Our
// waiters survive that.
func TestAJavaAcquirerEvictsNobody(t *testing.T) {
	const fairWait, timeout = 5 * time.Second, 4500 * time.Millisecond
	eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, all []*redlatch.Client) {
		h := mustLock(t, all[0].FairLock(orders), lock.Lease(time.Minute))
		first, second, last := newJava(t, s.Conn(t), 1, fairWait), newJava(t, s.Conn(t), 2, fairWait), newJava(t, s.Conn(t), 3, fairWait)
		require.False(t, first.acquire())
		require.False(t, second.acquire())
		var ours []*caller
		for i := range 4 {
			ours = append(ours, queues(t, s, t.Context(), all[i%len(all)]))
		}
		require.False(t, last.acquire())
		want := owners(s)
		require.Len(t, want, 7)
		require.NoError(t, h.Unlock(t.Context()))
		for i, j := range []*java{first, second} {
			require.True(t, j.acquire())
			for range 4 { // the lock is held for a while, and heartbeats are sent
				require.False(t, last.acquire()) // and evicts waiters with a deadline in the past
				require.Equal(t, want[i+1:], owners(s))
				time.Sleep(timeout / 9)
			}
			j.release()
		}
		for i, w := range ours {
			h := w.Got()
			require.False(t, last.acquire())
			synctest.Wait() // it leaves the queue after it has got the lock
			require.Equal(t, want[i+3:], owners(s))
			require.NoError(t, h.Unlock(t.Context()))
		}
		require.True(t, last.acquire())
		last.release()
	}, redlatch.WithFairWaitTimeout(fairWait), redlatch.WithWatchdogTimeout(timeout))
}

// A Java client with a longer wait pushes the deadlines of our waiters into the past and
// evicts them. With their next heartbeat they are back at the head, in their order.
func TestEvictedWaitersComeBack(t *testing.T) {
	const fairWait, timeout = 5 * time.Second, 4500 * time.Millisecond
	const interval = timeout / 9 // of heartbeats
	eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, all []*redlatch.Client) {
		h := mustLock(t, s.Client(t).FairLock(orders))
		first, evictor := newJava(t, s.Conn(t), 1, time.Hour), newJava(t, s.Conn(t), 2, fairWait)
		require.False(t, first.acquire())
		var ours []*caller
		for i := range 4 {
			ours = append(ours, queues(t, s, t.Context(), all[i%len(all)]))
			time.Sleep(interval / 5) // so they send their heartbeats one after the other
		}
		require.NoError(t, h.Unlock(t.Context()))
		require.True(t, first.acquire())
		require.Equal(t, ownersOf(ours), owners(s))
		require.False(t, evictor.acquire())
		require.Equal(t, []string{evictor.owner}, owners(s), "all of them are evicted")
		time.Sleep(interval)
		synctest.Wait()
		back := owners(s)
		require.Equal(t, append(ownersOf(ours), evictor.owner), back)
		first.release()
		harness.InOrder(t, ours...)
		require.True(t, evictor.acquire())
		evictor.release()
	}, redlatch.WithFairWaitTimeout(fairWait), redlatch.WithWatchdogTimeout(timeout))
}
