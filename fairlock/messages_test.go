package fairlock_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// alternate passes the lock "orders" between two clients n times, each time to a waiter that came while
// the other held it. before is called before each release.
func alternate(t testing.TB, conn rueidis.Client, h lock.Hold, all []*redlatch.Client, n int, before func()) lock.Hold {
	t.Helper()
	for i := range n {
		c := all[(i+1)%len(all)]
		w := queue(t, context.Background(), conn, c)
		harness.Eventually(t, soon, "it sleeps", func() bool { return c.Stats().Attempting == 0 })
		before()
		require.NoError(t, h.Unlock(t.Context()))
		h = w.Got()
	}
	return h
}

func quiet() {}

// A lock that processes pass to each other costs five commands each time: a script to enqueue, a
// subscription and a script that follows it, a script to acquire, and one to release. Channels are
// unsubscribed together.
func TestPassingBetweenProcessesCostsFiveCommands(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const turns = 32
		all, conn := clients(t, s, 2, redlatch.WithWatchdogTimeout(time.Hour)), harness.Conn(t, s.Addr) // no heartbeats
		h := alternate(t, conn, mustLock(t, all[0].FairLock(orders)), all, 4, quiet)
		begin, before := time.Now(), harness.Commands(t, conn)
		h = alternate(t, conn, h, all, turns, quiet)
		after := harness.Commands(t, conn)
		sent := func(command string) int { return after[command] - before[command] }
		require.Greater(t, sent("evalsha"), 3*turns)
		require.Less(t, sent("evalsha"), 4*turns+turns/4)
		require.Equal(t, turns, sent("subscribe"))
		// Each client unsubscribes at most once a second.
		require.LessOrEqual(t, sent("unsubscribe"), turns/4+len(all)*int(time.Since(begin)/time.Second))
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// The connection of a subscriber may break before a waiter comes, or while it listens. The waiter
// acquires the lock without its heartbeat or poll.
func TestWaitersSurviveALostSubscription(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const turns = 6
		all, conn := clients(t, s, 2, quietly, redlatch.WithWatchdogTimeout(time.Hour)), harness.Conn(t, s.Addr)
		h := alternate(t, conn, mustLock(t, all[0].FairLock(orders)), all, 4, quiet)
		kill := func() { harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "pubsub") }
		begin := time.Now()
		h = alternate(t, conn, h, all, turns, kill)
		for range turns {
			kill()
			h = alternate(t, conn, h, all, 1, quiet)
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
		c, holder := harness.WithoutSubscribe(t, s, quietly).FairLock(orders), harness.Client(t, s).FairLock(orders)
		for range 2 {
			h := mustLock(t, holder, lock.Lease(lease))
			begin := time.Now()
			require.NoError(t, c.Do(t.Context(), nothing))
			require.Less(t, time.Since(begin), lease+slack)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
	})
}

// Clients that no longer wait soon unsubscribe from their channels.
func TestChannelsOfWaitersAreUnsubscribed(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		all := []*redlatch.Client{s.Client(t), s.Client(t)}
		h := mustLock(t, all[0].FairLock(orders))
		for i := range 4 {
			w := queues(t, s, context.Background(), all[(i+1)%2])
			require.NoError(t, h.Unlock(t.Context()))
			h = w.Got()
		}
		require.NoError(t, h.Unlock(t.Context()))
		channels := func() int {
			synctest.Wait()
			return len(s.PubSubChannels(wire.LockChannel(orders) + ":*"))
		}
		require.NotZero(t, channels())
		time.Sleep(2 * time.Second) // channels are unsubscribed together
		require.Zero(t, channels())
		for _, c := range all {
			require.Zero(t, c.Stats().PubSub.Channels)
		}
		s.NothingLeft(t)
	})
}
