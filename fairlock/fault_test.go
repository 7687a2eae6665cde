package fairlock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// keysOf are the keys of a lock and its queue.
func keysOf(name string) []string {
	return []string{name, wire.FairQueue(name), wire.FairTimeouts(name), wire.FairAlive(name)}
}

// named returns a claim that waits, of an owner that the caller named.
func (w *world) named(o lock.Owner) *locking.Claim {
	return &locking.Claim{Key: orders, Owner: o, Lease: lease, Waits: true, Ticket: wire.NewRequestID()}
}

func (w *world) place(c *locking.Claim) *watchdog.Lease {
	return &watchdog.Lease{Key: c.Key, Owner: c.Owner.String()}
}

// listen returns how often each channel of that pattern has had a message with the
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

// A release is told to who is first, on a channel of its own, and to nobody else.
func TestOnlyTheFirstIsTold(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		w := newWorld(t, s, 5*time.Minute)
		told := listen(t, s, wire.LockChannel(orders)+":*")
		holder, first, second := w.claim(), w.claim(), w.claim()
		require.True(t, w.acquire(holder).Acquired)
		w.acquire(first)
		w.acquire(second)
		want := map[string]int{}
		soon := func(c *locking.Claim) {
			t.Helper()
			want[w.p.Channel(c)]++
			harness.Eventually(t, 5*time.Second, "the first is told", func() bool { return told()[w.p.Channel(c)] > want[w.p.Channel(c)]-1 })
			require.Equal(t, want, told())
		}
		require.Equal(t, locking.Released{State: locking.Free, Told: 1}, w.release(holder))
		soon(first)
		require.NoError(t, w.p.Leave(t.Context(), first))
		soon(second)
		require.NoError(t, w.p.Leave(t.Context(), first))
		require.NoError(t, w.p.Leave(t.Context(), second))
		harness.NothingLeft(t, s.Addr)
		require.Equal(t, want, told())
	})
}

// The clock is that of the server: a place that nobody keeps is gone in time.
func TestPlacesAreKeptByTheClockOfTheServer(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const wait = 2 * time.Second
		w := newWorld(t, s, wait)
		require.Equal(t, wait, w.p.PlaceTime(), "not longer than the user wants")
		holder, ghost, second := w.claim(), w.claim(), w.claim()
		require.True(t, w.acquire(holder).Acquired)
		began := time.Now()
		w.acquire(ghost)
		w.acquire(second)
		w.release(holder)
		harness.Eventually(t, 20*time.Second, "the ghost is gone", func() bool {
			renewed := w.p.PlaceKeeper().Renew(t.Context(), [][]*watchdog.Lease{{w.place(second)}}, lease, false)[0]
			require.NoError(t, renewed.Err)
			a := w.acquire(second)
			require.True(t, renewed.Held[0] || a.Acquired, "kept, until it is its turn")
			require.False(t, a.Moved)
			return a.Acquired
		})
		require.GreaterOrEqual(t, time.Since(began), w.p.PlaceTime()-time.Millisecond)
		waiters, err := w.p.Queue(t.Context(), orders)
		require.NoError(t, err)
		require.Empty(t, waiters)
	})
}

func TestQueueTellsWhoWaits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		w := newWorld(t, s, 5*time.Minute)
		waiters, err := w.p.Queue(t.Context(), orders)
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
		waiters, err = w.p.Queue(t.Context(), orders)
		require.NoError(t, err)
		require.Len(t, waiters, 3)
		require.Equal(t, mine.Owner, waiters[0].Owner)
		require.WithinRange(t, waiters[0].Deadline, before.Add(w.p.PlaceTime()-time.Millisecond), time.Now().Add(w.p.PlaceTime()))
		require.Equal(t, []fairlock.Waiter{{Owner: java, Deadline: time.UnixMilli(deadline)}, {Deadline: time.UnixMilli(deadline)}}, waiters[1:])
	})
}

// A key of another type is an error of every operation, or no place, and is left as
// it is, as is all the rest.
func TestKeysOfAnotherType(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		w := newWorld(t, s, 5*time.Minute)
		ctx := t.Context()
		for broken, key := range keysOf(orders) {
			harness.Do(t, s.Addr, "FLUSHALL")
			holder, waiter, named := w.claim(), w.claim(), w.named(ownerOf(t, clientID, 77_777))
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
				{"acquire named", true, func() error { _, err := w.p.Acquire(ctx, named); return err }},
				{"acquire all", true, func() error {
					_, err := w.p.AcquireAll(ctx, []*locking.Claim{w.claim(), waiter})
					return err
				}},
				{"release", true, func() error { _, err := w.p.Release(ctx, holder, false); return err }},
				{"undo", true, func() error { _, err := w.p.Release(ctx, waiter, true); return err }},
				{"hand off", true, func() error { _, err := w.p.HandOff(ctx, holder, []*locking.Claim{waiter}); return err }},
				{"force", true, func() error { _, err := w.p.Force(ctx, orders); return err }},
				{"queue", !isLock, func() error { _, err := w.p.Queue(ctx, orders); return err }},
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

			// One bad queue does not fail the signs of life of the others.
			good := &locking.Claim{Key: "good", Owner: w.s.NewOwner(), Lease: lease, Waits: true}
			require.True(t, w.acquire(&locking.Claim{Key: "good", Owner: w.s.NewOwner(), Lease: lease}).Acquired)
			w.acquire(good)
			bad := []*watchdog.Lease{w.place(waiter), w.place(good), w.place(w.claim())}
			renewed := w.p.PlaceKeeper().Renew(ctx, [][]*watchdog.Lease{bad}, lease, false)[0]
			require.NoError(t, renewed.Err)
			require.Equal(t, []bool{isLock, true, false}, renewed.Held)
		}
	})
}

// as returns the protocol as a user has it who may do anything but what is given.
func (w *world) as(rules ...string) *fairlock.Protocol {
	harness.Do(w.t, w.addr, append([]string{"ACL", "SETUSER", "less", "reset", "on", ">secret", "+@all", "allkeys", "allchannels"}, rules...)...)
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{w.addr}, Username: "less", Password: "secret", DisableCache: true})
	require.NoError(w.t, err)
	w.t.Cleanup(conn.Close)
	return fairlock.NewProtocol(newSession(w.t, conn, 5*time.Minute))
}

// Who may not set an expiry must not take a lock for ever, nor leave the queue.
func TestExpiryForbidden(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		w := newWorld(t, harness.Own(t, shared.Program), 5*time.Minute)
		less := w.as("-pexpire")
		named := w.named(ownerOf(t, clientID, 77_777))
		for _, c := range []*locking.Claim{w.claim(), named} {
			_, err := less.Acquire(t.Context(), c)
			require.Error(t, err)
			require.Equal(t, ":0", harness.Do(t, w.addr, "DBSIZE"))
		}
		holder, waiter := w.claim(), w.claim()
		require.True(t, w.acquire(holder).Acquired)
		a, err := less.Acquire(t.Context(), waiter)
		require.NoError(t, err)
		require.True(t, a.Placed)
		w.release(holder)
		_, err = less.Acquire(t.Context(), waiter)
		require.Error(t, err)
		_, err = less.AcquireAll(t.Context(), []*locking.Claim{w.claim(), waiter})
		require.Error(t, err)
		waiters, err := w.p.Queue(t.Context(), orders)
		require.NoError(t, err)
		require.Len(t, waiters, 1, "the one that has waited, and no other")
		require.True(t, w.acquire(waiter).Acquired)
	})
}

// A place is made as a whole or not at all.
func TestQueueingForbidden(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		w := newWorld(t, harness.Own(t, shared.Program), 5*time.Minute)
		less := w.as("-zadd")
		require.True(t, w.acquire(w.claim()).Acquired)
		for _, c := range []*locking.Claim{w.claim(), w.named(ownerOf(t, clientID, 77_777))} {
			_, err := less.Acquire(t.Context(), c)
			require.Error(t, err)
			require.Equal(t, ":1", harness.Do(t, w.addr, "DBSIZE"))
		}
	})
}

// On a server out of memory nobody enters, and who is there can stay, leave, and
// release.
func TestOutOfMemory(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		w := newWorld(t, s, 5*time.Minute)
		ctx := t.Context()
		named, first, java, second := w.named(ownerOf(t, clientID, 77_777)), w.claim(), ownerOf(t, javaID, 7), w.claim()
		require.True(t, w.acquire(named).Acquired)
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
		renewed := w.p.PlaceKeeper().Renew(ctx, [][]*watchdog.Lease{{w.place(first), w.place(second)}}, lease, false)[0]
		require.NoError(t, renewed.Err)
		require.Equal(t, []bool{true, true}, renewed.Held)
		require.Equal(t, locking.Free, w.release(named).State)
		_, err = w.p.Acquire(ctx, first)
		require.ErrorContains(t, err, "OOM")
		require.NoError(t, w.p.Leave(ctx, first))
		_, err = w.p.Release(ctx, second, true)
		require.NoError(t, err)

		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0")
		waiters, err := w.p.Queue(ctx, orders)
		require.NoError(t, err)
		require.Len(t, waiters, 1)
		require.Equal(t, java, waiters[0].Owner)
	})
}

// All keys of a lock are of one slot, also of several in one batch, and how many
// were told is not known where other nodes may have told more.
func TestCluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: cluster.Addrs(), DisableCache: true})
		require.NoError(t, err)
		t.Cleanup(conn.Close)
		sess := newSession(t, conn, 5*time.Minute)
		w := &world{t, sess, fairlock.NewProtocol(sess), ""}
		claim := func(key string) *locking.Claim {
			c := w.claim()
			c.Key = key
			return c
		}
		var places []*watchdog.Lease
		for _, key := range []string{"{app}a", "{app}b"} {
			holder, first, named := claim(key), claim(key), w.named(w.s.NewOwner())
			named.Key = key
			require.True(t, w.acquire(holder).Acquired)
			w.acquire(first)
			w.acquire(named)
			require.Equal(t, locking.Released{State: locking.Free, Told: -1}, w.release(holder))
			require.True(t, w.acquire(first).Acquired)
			places = append(places, w.place(named), w.place(first))
		}
		for _, detour := range []bool{false, true} {
			renewed := w.p.PlaceKeeper().Renew(t.Context(), [][]*watchdog.Lease{places}, lease, detour)[0]
			require.NoError(t, renewed.Err)
			require.Equal(t, []bool{true, false, true, false}, renewed.Held)
		}
	})
}

// While a slot is being moved, and one script cannot reach all its locks, places are
// kept lock by lock.
func TestPlacesInASlotThatIsBeingMoved(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: cluster.Addrs(), DisableCache: true})
		require.NoError(t, err)
		t.Cleanup(conn.Close)
		sess := newSession(t, conn, 5*time.Minute)
		w := &world{t, sess, fairlock.NewProtocol(sess), ""}
		var places []*watchdog.Lease
		const moved, unmoved = "{app}a", "{app}b"
		for _, key := range []string{moved, unmoved} {
			holder, first := w.claim(), w.claim()
			holder.Key, first.Key = key, key
			require.True(t, w.acquire(holder).Acquired)
			w.acquire(first)
			places = append(places, w.place(first))
		}
		none := w.claim()
		none.Key = moved
		places = append(places, w.place(none))
		move, err := cluster.BeginMove(moved)
		require.NoError(t, err)
		for _, key := range keysOf(moved) {
			require.NoError(t, move.Migrate(key))
		}
		renewed := w.p.PlaceKeeper().Renew(t.Context(), [][]*watchdog.Lease{places}, lease, false)[0]
		require.NoError(t, renewed.Err)
		require.Equal(t, []bool{true, true, false}, renewed.Held)
		require.NoError(t, move.MigrateAll())
		require.NoError(t, move.Finish())
	})
}
