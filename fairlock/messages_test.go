package fairlock_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// alternate passes the lock "orders" between clients n times, each time to a waiter that came while
// another client held it. before is called before each release.
func alternate(t testing.TB, s *testserver.Server, h lock.Hold, all []*redlatch.Client, n int, before func(i int)) lock.Hold {
	t.Helper()
	for i := range n {
		w := queue(t, context.Background(), s.Addr, all[(i+1)%len(all)].FairLock("orders"))
		harness.Eventually(t, soon, "it sleeps", func() bool { return all[(i+1)%len(all)].Stats().Attempting == 0 })
		before(i)
		require.NoError(t, h.Unlock(t.Context()))
		h = w.Got()
	}
	return h
}

func quiet(int) {}

// A lock that processes pass to each other costs five commands each time: a script to enqueue, a
// subscription and a script that follows it, a script to acquire, and one to release. Channels are
// unsubscribed together.
func TestPassingBetweenProcessesCostsFiveCommands(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const turns = 32
		all := clients(t, s, 2, redlatch.WithWatchdogTimeout(time.Hour)) // no heartbeats
		h := alternate(t, s, mustLock(t, all[0].FairLock("orders")), all, 4, quiet)
		conn := harness.Conn(t, s.Addr)
		defer conn.Close()
		before := harness.Commands(t, conn)
		h = alternate(t, s, h, all, turns, quiet)
		after := harness.Commands(t, conn)
		sent := func(command string) int { return after[command] - before[command] }
		require.Greater(t, sent("evalsha"), 3*turns)
		require.Less(t, sent("evalsha"), 4*turns+turns/4)
		require.Equal(t, turns, sent("subscribe"))
		require.LessOrEqual(t, sent("unsubscribe"), turns/4)
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// A wait subscribes to one channel, and a lock without waits to none.
func TestAWaitSubscribesToOneChannel(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := clients(t, s, 2)
		h := mustLock(t, all[0].FairLock("orders"))
		require.Zero(t, all[0].PubSub().Channels)
		w := asleep(t, context.Background(), s.Addr, all[1])
		require.Equal(t, 1, all[1].PubSub().Channels)
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, w.Got().Unlock(t.Context()))
	})
}

// The connection of a subscriber may break before a waiter comes, or while it listens. The waiter
// acquires the lock without its heartbeat or poll.
func TestWaitersSurviveALostSubscription(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const turns = 6
		all := clients(t, s, 2, quietly, redlatch.WithWatchdogTimeout(time.Hour))
		h := alternate(t, s, mustLock(t, all[0].FairLock("orders")), all, 4, quiet)
		kill := func() { harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "pubsub") }
		begin := time.Now()
		h = alternate(t, s, h, all, turns, func(int) { kill() })
		for range turns {
			kill()
			h = alternate(t, s, h, all, 1, quiet)
			all[0], all[1] = all[1], all[0]
		}
		require.Less(t, time.Since(begin), 2*turns*time.Second+slack)
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// A user without the right to subscribe waits until the lease ends, again and again.
func TestWaitersThatMayNotSubscribe(t *testing.T) {
	const lease = 500 * time.Millisecond
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		var log harness.Log
		c := harness.WithoutSubscribe(t, s, redlatch.WithLogger(log.Logger()))
		holder := harness.Client(t, s).FairLock("orders")
		for range 4 {
			h := mustLock(t, holder, lock.Lease(lease))
			begin := time.Now()
			require.NoError(t, mustLock(t, c.FairLock("orders")).Unlock(t.Context()))
			require.Less(t, time.Since(begin), lease+slack)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
		require.Zero(t, c.PubSub().Subscribed)
		require.NotContains(t, log.String(), "lost")
	})
}

func TestNothingIsSubscribedAfterClose(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		all := clients(t, s, 2)
		h := mustLock(t, all[0].FairLock("orders"))
		w := asleep(t, context.Background(), s.Addr, all[1])
		channels := func() int { return len(ask(t, s.Addr, "PUBSUB", "CHANNELS", wire.LockChannel("orders")+":*")) }
		require.Equal(t, 1, channels())
		all[1].Close()
		require.ErrorIs(t, w.EndWithin(soon), lock.ErrClosed)
		harness.Eventually(t, soon, "no channel is subscribed", func() bool { return channels() == 0 })
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// Clients that no longer wait soon unsubscribe from their channels.
func TestChannelsOfWaitersAreUnsubscribed(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		all := []*redlatch.Client{s.Client(t), s.Client(t)}
		h := mustLock(t, all[0].FairLock("orders"))
		for i := range 4 {
			w := queues(t, s, context.Background(), all[(i+1)%2])
			require.NoError(t, h.Unlock(t.Context()))
			h = w.Got()
		}
		require.NoError(t, h.Unlock(t.Context()))
		channels := func() int {
			synctest.Wait()
			return len(s.PubSubChannels(wire.LockChannel("orders") + ":*"))
		}
		require.NotZero(t, channels())
		time.Sleep(2 * time.Second) // channels are unsubscribed together
		require.Zero(t, channels())
		for _, c := range all {
			require.Zero(t, c.PubSub().Channels)
		}
		s.NothingLeft(t)
	})
}

// In a cluster the channels of a lock have one slot, and sharded and plain pub/sub serve them.
func TestMessagesInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		for _, mode := range harness.PubSubModes(t, cluster) {
			var all []*redlatch.Client
			for range 2 {
				all = append(all, harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode)))
			}
			name := "orders of " + mode.String()
			h := mustLock(t, all[0].FairLock(name))
			begin := time.Now()
			for i := range 12 {
				c := all[(i+1)%2]
				w := harness.StartLock(t, context.Background(), c.FairLock(name))
				harness.Eventually(t, soon, "it waits", func() bool { return c.Stats() == redlatch.Stats{Waiting: 1} })
				require.NoError(t, h.Unlock(t.Context()))
				h = w.Got()
			}
			require.Less(t, time.Since(begin), 12*time.Second+slack, "no message is lost") // heartbeats come after 3.3 s
			require.NoError(t, h.Unlock(t.Context()))
			for _, c := range all {
				require.Equal(t, 1, c.PubSub().Connections)
			}
		}
	})
}
