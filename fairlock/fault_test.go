package fairlock_test

import (
	"testing"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

// If a key is of another type, an operation fails or finds an empty queue, and changes
// nothing. One bad queue does not fail the heartbeats of the others.
func TestKeysOfAnotherType(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		w := newWorld(t, s)
		ctx := t.Context()
		for broken, key := range keysOf(orders) {
			isLock := broken == 0
			harness.Do(t, s.Addr, "FLUSHALL")
			holder, waiters := w.held(orders, 1)
			waiter := waiters[0]
			harness.Do(t, s.Addr, "DEL", key)
			harness.Do(t, s.Addr, "SET", key, "mine")
			before := w.dump()
			for _, op := range []struct {
				name  string
				fails bool
				do    func() error
			}{
				{"acquire", true, func() error { _, err := w.p.Acquire(ctx, w.claim()); return err }},
				{"acquire again", true, func() error { _, err := w.p.Acquire(ctx, waiter); return err }},
				{"acquire all", true, func() error { _, err := w.p.AcquireAll(ctx, []*engine.Claim{w.claim(), waiter}); return err }},
				{"release", true, func() error { _, err := w.p.Release(ctx, holder); return err }},
				{"release of a waiter", true, func() error { _, err := w.p.Release(ctx, waiter); return err }},
				{"confirm", true, func() error { _, err := fairlock.ConfirmClaim(ctx, w.p, holder, ids(waiter), nil); return err }},
				{"force", true, func() error { _, err := w.p.Force(ctx); return err }},
				{"queue", !isLock, func() error { _, err := w.p.Queue(ctx); return err }},
				{"leave", !isLock, func() error { return w.p.Leave(ctx, w.claim()) }},
			} {
				if err := op.do(); op.fails {
					require.ErrorContains(t, err, "WRONGTYPE", "%s with a broken %s", op.name, key)
				} else {
					require.NoError(t, err, "%s with a broken %s", op.name, key)
				}
				require.Equal(t, before, w.dump(), "%s with a broken %s", op.name, key)
			}

			_, good := w.held("good", 1)
			require.Equal(t, []bool{isLock, true, false}, w.heartbeat(waiter, good[0], w.claim()))
		}
	})
}

// An attempt that fails for want of a right acquires nothing, leaves no part of a queue position, and
// takes nobody's.
func TestAnAttemptThatFailsChangesNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		w := newWorld(t, harness.Own(t, shared.Program))
		without := func(right string) *fairlock.Protocol {
			harness.Do(t, w.addr, "ACL", "SETUSER", right, "on", ">secret", "+@all", "allkeys", "allchannels", "-"+right)
			conn, err := rueidis.NewClient(rueidis.ClientOption{
				InitAddress: []string{w.addr}, Username: right, Password: "secret", DisableCache: true,
			})
			require.NoError(t, err)
			t.Cleanup(conn.Close)
			return worldOn(t, conn).p
		}
		noLease, noPosition := without("pexpire"), without("zadd")

		_, err := noLease.Acquire(t.Context(), w.claim())
		require.Error(t, err)
		require.Equal(t, ":0", harness.Do(t, w.addr, "DBSIZE"))
		holder, _ := w.held(orders, 0)
		_, err = noPosition.Acquire(t.Context(), w.claim())
		require.Error(t, err)
		require.Equal(t, ":1", harness.Do(t, w.addr, "DBSIZE"))

		waiter := w.claim()
		a, err := noLease.Acquire(t.Context(), waiter)
		require.NoError(t, err)
		require.True(t, a.Queued)
		w.release(holder)
		_, err = noLease.Acquire(t.Context(), waiter)
		require.Error(t, err)
		_, err = noLease.AcquireAll(t.Context(), []*engine.Claim{w.claim(), waiter})
		require.Error(t, err)
		require.Equal(t, ids(waiter), w.queue(), "the one that waited before, and no other")
		require.True(t, w.acquire(waiter).Acquired)
	})
}

// On a server out of memory no waiter enters the queue, but those in it can stay and leave,
// and the holder can release.
func TestOutOfMemory(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		w := newWorld(t, s)
		ctx := t.Context()
		const java = javaID + ":7"
		holder, waiters := w.held(orders, 1)
		harness.Do(t, s.Addr, "RPUSH", wire.FairQueue(orders), java) // and no deadline
		waiters = append(waiters, w.claim())
		w.acquire(waiters[1])
		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "1")

		for _, c := range []*engine.Claim{w.claim(), w.claimOf("free")} {
			_, err := w.of(c).Acquire(ctx, c)
			require.ErrorContains(t, err, "OOM")
		}
		require.Equal(t, []bool{true, true}, w.heartbeat(waiters...))
		require.Equal(t, engine.Free, w.release(holder).State)
		_, err := w.p.Acquire(ctx, waiters[0])
		require.ErrorContains(t, err, "OOM")
		require.NoError(t, w.p.Leave(ctx, waiters[0]))
		w.release(waiters[1])

		harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0")
		require.Equal(t, []string{java}, w.queue())
	})
}

// While a slot is being moved the server refuses heartbeats. No waiter takes that for the loss of
// its position.
func TestHeartbeatsWhileASlotIsMoved(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		w := worldOn(t, harness.ConnAt(t, cluster.Addrs()))
		const moved, unmoved = "{app}a", "{app}b"
		_, first := w.held(moved, 1)
		_, second := w.held(unmoved, 1)
		waiters := []*engine.Claim{first[0], second[0], w.claimOf(moved)}
		move, err := cluster.BeginMove(moved)
		require.NoError(t, err)
		for _, key := range keysOf(moved) {
			require.NoError(t, move.Migrate(key))
		}
		renewed := w.renew(waiters...)
		require.True(t, wire.IsMoving(renewed.Err), renewed.Err)

		require.NoError(t, move.MigrateAll())
		require.NoError(t, move.Finish())
		require.Equal(t, []bool{true, true, false}, w.heartbeat(waiters...))
	})
}
