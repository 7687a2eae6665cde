package fairlock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
)

// keysOf returns the keys of a lock and its queue.
func keysOf(name string) []string {
	return []string{name, wire.FairQueue(name), wire.FairTimeouts(name), wire.FairAlive(name), wire.FairOrder(name)}
}

func (w *world) position(c *engine.Claim) watchdog.Subject {
	return watchdog.Subject{Key: c.Key, Owner: c.ID.String()}
}

// listen counts the messages of each channel that matches the pattern. Each must have the
// right payload.
func listen(t *testing.T, s *testserver.Server, pattern string) func() map[string]int {
	conn := harness.Conn(t, s.Addr)
	messages := make(chan rueidis.PubSubMessage, 100)
	ready := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	hooked := rueidis.WithOnSubscriptionHook(ctx, func(rueidis.PubSubSubscription) { close(ready) })
	go func() {
		defer close(done)
		_ = conn.Receive(hooked, conn.B().Psubscribe().Pattern(pattern).Build(), func(m rueidis.PubSubMessage) { messages <- m })
	}()
	t.Cleanup(func() { cancel(); <-done })
	<-ready
	got := map[string]int{}
	return func() map[string]int {
		for {
			select {
			case m := <-messages:
				require.Equal(t, "0", m.Message)
				got[m.Channel]++
			default:
				return got
			}
		}
	}
}

// A release sends a message to the first waiter, on a channel of its own, and to no other.
func TestOnlyTheFirstGetsAMessage(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		w := newWorld(t, s, 5*time.Minute)
		messages := listen(t, s, wire.LockChannel(orders)+":*")
		holder, first, second := w.claim(), w.claim(), w.claim()
		require.True(t, w.acquire(holder).Acquired)
		w.acquire(first)
		w.acquire(second)
		want := map[string]int{}
		soon := func(c *engine.Claim) {
			t.Helper()
			channel := wire.FairChannel(c.Key, c.ID)
			want[channel]++
			harness.Eventually(t, 5*time.Second, "the first gets its message", func() bool { return messages()[channel] > want[channel]-1 })
			require.Equal(t, want, messages())
		}
		require.Equal(t, engine.Release{State: engine.Free, Receivers: 1}, w.release(holder))
		soon(first)
		require.NoError(t, w.p.Leave(t.Context(), first))
		soon(second)
		require.NoError(t, w.p.Leave(t.Context(), first))
		require.NoError(t, w.p.Leave(t.Context(), second))
		harness.NothingLeft(t, s.Addr)
		require.Equal(t, want, messages())
	})
}

// A queue position without heartbeats ends in time, by the server's clock.
func TestPositionsEndByTheClockOfTheServer(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const wait = 2 * time.Second
		w := newWorld(t, s, wait)
		require.Equal(t, wait, w.p.PositionTTL(), "not longer than the user wants")
		holder, dead, second := w.claim(), w.claim(), w.claim()
		require.True(t, w.acquire(holder).Acquired)
		began := time.Now()
		w.acquire(dead)
		w.acquire(second)
		w.release(holder)
		harness.Eventually(t, 20*time.Second, "the dead waiter is dropped", func() bool {
			renewed := w.p.HeartbeatRenewer().Renew(t.Context(), [][]watchdog.Subject{{w.position(second)}}, lease, false)[0]
			require.NoError(t, renewed.Err)
			a := w.acquire(second)
			require.True(t, renewed.Held[0] || a.Acquired, "in the queue until it acquires the lock")
			require.False(t, a.Requeued)
			return a.Acquired
		})
		require.GreaterOrEqual(t, time.Since(began), w.p.PositionTTL()-time.Millisecond)
		waiters, err := w.p.Queue(t.Context())
		require.NoError(t, err)
		require.Empty(t, waiters)
	})
}

func TestQueueReturnsTheWaiters(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		w := newWorld(t, s, 5*time.Minute)
		waiters, err := w.p.Queue(t.Context())
		require.NoError(t, err)
		require.Empty(t, waiters)
		require.True(t, w.acquire(w.claim()).Acquired)
		mine := w.claim()
		before := time.Now()
		w.acquire(mine)
		java := ownerOf(t, javaID, 7)
		deadline := before.Add(time.Hour).UnixMilli()
		for _, owner := range []string{java.String(), "somebody"} {
			harness.Do(t, s.Addr, "RPUSH", wire.FairQueue(orders), owner)
			harness.Do(t, s.Addr, "ZADD", wire.FairTimeouts(orders), fmt.Sprint(deadline), owner)
		}
		harness.Do(t, s.Addr, "RPUSH", wire.FairQueue(orders), "dead")
		harness.Do(t, s.Addr, "ZADD", wire.FairTimeouts(orders), "1", "dead")
		waiters, err = w.p.Queue(t.Context())
		require.NoError(t, err)
		require.Len(t, waiters, 3)
		require.Equal(t, mine.ID, waiters[0].Owner)
		require.WithinRange(t, waiters[0].Deadline, before.Add(w.p.PositionTTL()-time.Millisecond), time.Now().Add(w.p.PositionTTL()))
		require.Equal(t, []fairlock.Waiter{{Owner: java, Deadline: time.UnixMilli(deadline)}, {Deadline: time.UnixMilli(deadline)}}, waiters[1:])
	})
}

// If a key is of another type, an operation fails or finds an empty queue, and changes
// nothing.
func TestKeysOfAnotherType(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		w := newWorld(t, s, 5*time.Minute)
		ctx := t.Context()
		for broken, key := range keysOf(orders) {
			harness.Do(t, s.Addr, "FLUSHALL")
			holder, waiter := w.claim(), w.claim()
			require.True(t, w.acquire(holder).Acquired)
			w.acquire(waiter)
			harness.Do(t, s.Addr, "DEL", key)
			harness.Do(t, s.Addr, "SET", key, "mine")
			dumped := func() (all []string) {
				for _, key := range keysOf(orders) {
					all = append(all, harness.Do(t, s.Addr, "DUMP", key))
				}
				return all
			}
			before := dumped()
			isLock := broken == 0
			operations := []struct {
				name  string
				fails bool
				do    func() error
			}{
				{"acquire", true, func() error { _, err := w.p.Acquire(ctx, w.claim()); return err }},
				{"acquire again", true, func() error { _, err := w.p.Acquire(ctx, waiter); return err }},
				{"acquire all", true, func() error {
					_, err := w.p.AcquireAll(ctx, []*engine.Claim{w.claim(), waiter})
					return err
				}},
				{"release", true, func() error { _, err := w.p.Release(ctx, holder); return err }},
				{"release of a waiter", true, func() error { _, err := w.p.Release(ctx, waiter); return err }},
				{"confirm", true, func() error {
					_, err := fairlock.ConfirmClaim(ctx, w.p, holder, []string{waiter.ID.String()}, nil)
					return err
				}},
				{"force", true, func() error { _, err := w.p.Force(ctx); return err }},
				{"queue", !isLock, func() error { _, err := w.p.Queue(ctx); return err }},
				{"leave", !isLock, func() error { return w.p.Leave(ctx, w.claim()) }},
			}
			for _, op := range operations {
				err := op.do()
				if op.fails {
					require.ErrorContains(t, err, "WRONGTYPE", "%s with a broken %s", op.name, key)
				} else {
					require.NoError(t, err, "%s with a broken %s", op.name, key)
				}
				require.Equal(t, before, dumped(), "%s with a broken %s", op.name, key)
			}

			// One bad queue does not fail the heartbeats of the others.
			good := &engine.Claim{Key: "good", ID: w.s.NewOwner(), Lease: lease, Waits: true}
			require.True(t, w.acquire(&engine.Claim{Key: "good", ID: w.s.NewOwner(), Lease: lease}).Acquired)
			w.acquire(good)
			bad := []watchdog.Subject{w.position(waiter), w.position(good), w.position(w.claim())}
			renewed := w.p.HeartbeatRenewer().Renew(ctx, [][]watchdog.Subject{bad}, lease, false)[0]
			require.NoError(t, renewed.Err)
			require.Equal(t, []bool{isLock, true, false}, renewed.Held)
		}
	})
}

// as returns the protocol of a user with all rights except those that rules take away.
func (w *world) as(rules ...string) *fairlock.Protocol {
	harness.Do(w.t, w.addr, append([]string{"ACL", "SETUSER", "less", "reset", "on", ">secret", "+@all", "allkeys", "allchannels"}, rules...)...)
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{w.addr}, Username: "less", Password: "secret", DisableCache: true})
	require.NoError(w.t, err)
	w.t.Cleanup(conn.Close)
	return fairlock.NewProtocol(newSession(w.t, conn, 5*time.Minute), orders)
}

// A user who may not set an expiry does not acquire the lock for ever, and stays in the
// queue.
func TestExpiryForbidden(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		w := newWorld(t, harness.Own(t, shared.Program), 5*time.Minute)
		less := w.as("-pexpire")
		_, err := less.Acquire(t.Context(), w.claim())
		require.Error(t, err)
		require.Equal(t, ":0", harness.Do(t, w.addr, "DBSIZE"))
		holder, waiter := w.claim(), w.claim()
		require.True(t, w.acquire(holder).Acquired)
		a, err := less.Acquire(t.Context(), waiter)
		require.NoError(t, err)
		require.True(t, a.Queued)
		w.release(holder)
		_, err = less.Acquire(t.Context(), waiter)
		require.Error(t, err)
		_, err = less.AcquireAll(t.Context(), []*engine.Claim{w.claim(), waiter})
		require.Error(t, err)
		waiters, err := w.p.Queue(t.Context())
		require.NoError(t, err)
		require.Len(t, waiters, 1, "the one that waited before, and no other")
		require.True(t, w.acquire(waiter).Acquired)
	})
}

// A failed attempt leaves no part of a queue position.
func TestQueueingForbidden(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		w := newWorld(t, harness.Own(t, shared.Program), 5*time.Minute)
		less := w.as("-zadd")
		require.True(t, w.acquire(w.claim()).Acquired)
		_, err := less.Acquire(t.Context(), w.claim())
		require.Error(t, err)
		require.Equal(t, ":1", harness.Do(t, w.addr, "DBSIZE"))
	})
}

// On a server out of memory no waiter enters the queue, but those in it can stay and leave,
// and the holder can release.
func TestOutOfMemory(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		w := newWorld(t, s, 5*time.Minute)
		ctx := t.Context()
		holder, first, java, second := w.claim(), w.claim(), ownerOf(t, javaID, 7), w.claim()
		require.True(t, w.acquire(holder).Acquired)
		w.acquire(first)
		harness.Do(t, s.Addr, "RPUSH", wire.FairQueue(orders), java.String()) // and no deadline
		w.acquire(second)
		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory-policy", "noeviction")
		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "1")

		_, err := w.p.Acquire(ctx, w.claim())
		require.ErrorContains(t, err, "OOM")
		free := w.claim()
		free.Key = "free"
		_, err = w.p.Acquire(ctx, free)
		require.ErrorContains(t, err, "OOM")
		renewed := w.p.HeartbeatRenewer().Renew(ctx, [][]watchdog.Subject{{w.position(first), w.position(second)}}, lease, false)[0]
		require.NoError(t, renewed.Err)
		require.Equal(t, []bool{true, true}, renewed.Held)
		require.Equal(t, engine.Free, w.release(holder).State)
		_, err = w.p.Acquire(ctx, first)
		require.ErrorContains(t, err, "OOM")
		require.NoError(t, w.p.Leave(ctx, first))
		_, err = w.p.Release(ctx, second)
		require.NoError(t, err)

		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0")
		waiters, err := w.p.Queue(ctx)
		require.NoError(t, err)
		require.Len(t, waiters, 1)
		require.Equal(t, java, waiters[0].Owner)
	})
}

// All keys of a lock are in one slot, also of several locks in one batch, and the number of
// receivers is unknown, as other nodes may have more.
func TestCluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: cluster.Addrs(), DisableCache: true})
		require.NoError(t, err)
		t.Cleanup(conn.Close)
		sess := newSession(t, conn, 5*time.Minute)
		w := &world{t, sess, fairlock.NewProtocol(sess, orders), ""}
		claim := func(key string) *engine.Claim {
			c := w.claim()
			c.Key = key
			return c
		}
		var positions []watchdog.Subject
		for _, key := range []string{"{app}a", "{app}b"} {
			holder, first, second := claim(key), claim(key), claim(key)
			require.True(t, w.acquire(holder).Acquired)
			w.acquire(first)
			w.acquire(second)
			require.Equal(t, engine.Release{State: engine.Free, Receivers: -1}, w.release(holder))
			require.True(t, w.acquire(first).Acquired)
			positions = append(positions, w.position(second), w.position(first))
		}
		for _, shared := range []bool{false, true} {
			renewed := w.p.HeartbeatRenewer().Renew(t.Context(), [][]watchdog.Subject{positions}, lease, shared)[0]
			require.NoError(t, renewed.Err)
			require.Equal(t, []bool{true, false, true, false}, renewed.Held)
		}
	})
}

// While a slot is being moved the server refuses heartbeats. No waiter takes that for the loss of
// its position.
func TestHeartbeatsWhileASlotIsMoved(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: cluster.Addrs(), DisableCache: true})
		require.NoError(t, err)
		t.Cleanup(conn.Close)
		sess := newSession(t, conn, 5*time.Minute)
		w := &world{t, sess, fairlock.NewProtocol(sess, orders), ""}
		var positions []watchdog.Subject
		const moved, unmoved = "{app}a", "{app}b"
		for _, key := range []string{moved, unmoved} {
			holder, first := w.claim(), w.claim()
			holder.Key, first.Key = key, key
			require.True(t, w.acquire(holder).Acquired)
			w.acquire(first)
			positions = append(positions, w.position(first))
		}
		none := w.claim()
		none.Key = moved
		positions = append(positions, w.position(none))
		move, err := cluster.BeginMove(moved)
		require.NoError(t, err)
		for _, key := range keysOf(moved) {
			require.NoError(t, move.Migrate(key))
		}
		renewed := w.p.HeartbeatRenewer().Renew(t.Context(), [][]watchdog.Subject{positions}, lease, false)[0]
		require.True(t, wire.IsMoving(renewed.Err), renewed.Err)
		require.NoError(t, move.MigrateAll())
		require.NoError(t, move.Finish())
		renewed = w.p.HeartbeatRenewer().Renew(t.Context(), [][]watchdog.Subject{positions}, lease, false)[0]
		require.NoError(t, renewed.Err)
		require.Equal(t, []bool{true, true, false}, renewed.Held)
	})
}
