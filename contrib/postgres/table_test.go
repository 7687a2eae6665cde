package pglock_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	pglock "github.com/redlatch/redlatch/contrib/postgres"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// A transaction that has checked its hold keeps others out until it ends, although the lease is over.
func TestCheck(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	pool := newPool(t, s.addr())
	c, other := newTable(t, pool), newTable(t, newPool(t, s.addr()))

	for _, unlocks := range []bool{true, false} {
		name := fmt.Sprintf("check-%t", unlocks)
		var h lock.Hold
		if unlocks {
			h = acquire(t, c.Lock(name))
		} else {
			h = acquire(t, c.Lock(name), lock.Lease(300*time.Millisecond))
		}
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }() // after a failure
		require.NoError(t, c.Check(t.Context(), tx, h))
		if unlocks {
			time.Sleep(ttl + ttl/2) // it is renewed beside the transaction
			require.NoError(t, h.Unlock(t.Context()))
		} else {
			lost(t, h, 300*time.Millisecond)
		}

		waiting := harness.StartLock(t, t.Context(), other.Lock(name))
		time.Sleep(pause)
		require.True(t, waiting.Running(), "another one has the lock of a transaction")
		require.NoError(t, tx.Commit(t.Context()))
		require.NoError(t, waiting.End())
		require.Greater(t, waiting.Value.Token(), h.Token())

		err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return c.Check(t.Context(), tx, h) })
		require.ErrorIs(t, err, lock.ErrLost)
		err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return other.Check(t.Context(), tx, waiting.Value) })
		require.NoError(t, err)
		require.NoError(t, waiting.Value.Unlock(t.Context()))
		err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return other.Check(t.Context(), tx, waiting.Value) })
		require.ErrorIs(t, err, lock.ErrLost)
	}
	require.ErrorIs(t, c.Check(t.Context(), nil, nil), lock.ErrInvalid)
}

// Processes that create the table at the same time do not disturb each other, and its name may be any.
func TestCreateTable(t *testing.T) {
	t.Parallel()
	pool := newPool(t, commonServer(t).addr())
	_, err := pool.Exec(t.Context(), `DROP TABLE IF EXISTS "Locks of ""us"""; DROP SCHEMA IF EXISTS apart CASCADE; CREATE SCHEMA apart`)
	require.NoError(t, err)
	for _, named := range [][]string{{"Locks of \"us\""}, {"apart", "locks"}} {
		var all sync.WaitGroup
		errs := make([]error, 6)
		for i := range errs {
			all.Go(func() { errs[i] = pglock.CreateTable(t.Context(), pool, pglock.Named(named...)) })
		}
		all.Wait()
		for _, err := range errs {
			require.NoError(t, err)
		}
		c := newTable(t, pool, pglock.Named(named...))
		require.NoError(t, acquire(t, c.Lock("a")).Unlock(t.Context()))
	}
}

// Prune deletes what nobody has had for long, and tokens go on rising.
func TestPrune(t *testing.T) {
	t.Parallel()
	pool := newPool(t, commonServer(t).addr())
	require.NoError(t, pglock.CreateTable(t.Context(), pool, pglock.Named("pruned")))
	c := newTable(t, pool, pglock.Named("pruned"))
	h := acquire(t, c.Lock("a"))
	token := h.Token()
	require.NoError(t, h.Unlock(t.Context()))
	held := acquire(t, c.Lock("b"))

	_, err := c.Prune(t.Context(), time.Second)
	require.ErrorIs(t, err, lock.ErrInvalid)
	n, err := c.Prune(t.Context(), time.Minute)
	require.NoError(t, err)
	require.Zero(t, n)
	_, err = pool.Exec(t.Context(), "UPDATE pruned SET until = until - interval '1 hour' WHERE owner IS NULL")
	require.NoError(t, err)
	n, err = c.Prune(t.Context(), time.Minute)
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	h = acquire(t, c.Lock("a"))
	require.Greater(t, h.Token(), token)
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, held.Unlock(t.Context()))
}

// Clients get a lock in the order in which they came, and one that has died in the queue holds up the others once.
func TestQueue(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	pool := newPool(t, s.addr())
	h := acquire(t, newTable(t, pool).Lock("queue"))
	_, err := pool.Exec(t.Context(), "UPDATE redlatch_locks SET queue = '{dead}' WHERE name = 'queue'")
	require.NoError(t, err)
	var calls []*harness.Call[lock.Hold]
	for i := range 4 {
		calls = append(calls, harness.StartLock(t, t.Context(), newTable(t, pool).Lock("queue")))
		harness.Eventually(t, soon, "it is in the queue", func() bool {
			var n int
			err := pool.QueryRow(t.Context(), "SELECT cardinality(queue) FROM redlatch_locks WHERE name = 'queue'").Scan(&n)
			return err == nil && n == i+2
		})
	}
	began := time.Now()
	require.NoError(t, h.Unlock(t.Context()))
	for i, c := range calls {
		require.NoError(t, c.End())
		for _, later := range calls[i+1:] {
			require.True(t, later.Running())
		}
		require.NoError(t, c.Value.Unlock(t.Context()))
	}
	require.Less(t, time.Since(began), ttl+2*time.Second+pause)
}

// The hold of a row that was taken away by hand is lost.
func TestGone(t *testing.T) {
	t.Parallel()
	pool := newPool(t, commonServer(t).addr())
	c := newTable(t, pool)
	h := acquire(t, c.Lock("gone"))
	_, err := pool.Exec(context.Background(), "UPDATE redlatch_locks SET owner = NULL WHERE name = 'gone'")
	require.NoError(t, err)
	require.Equal(t, lock.ReasonGone, lost(t, h, ttl).Reason)
	remove := func() {
		_, err = pool.Exec(context.Background(), "DELETE FROM redlatch_locks WHERE name = 'gone'")
		require.NoError(t, err)
	}
	h = acquire(t, c.Lock("gone"))
	remove()
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)

	for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Minute)}} {
		h = acquire(t, c.Lock("gone"), opts...)
		remove()
		require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
		lost(t, h, 0)
	}
	require.NoError(t, acquire(t, c.Lock("gone")).Unlock(t.Context()))
}

// A client ends a lease before the server, whose clock may be faster.
func TestLeaseOnServer(t *testing.T) {
	t.Parallel()
	pool := newPool(t, commonServer(t).addr())
	c := newTable(t, pool, pglock.TTL(time.Hour))
	ahead := func(h lock.Hold, by time.Duration) {
		harness.Eventually(t, time.Second, "the server has it for longer", func() bool { // unless the answer takes long
			remaining := h.Remaining()
			var seconds float64
			err := pool.QueryRow(t.Context(), `SELECT extract(epoch FROM until - clock_timestamp())::float8
				FROM redlatch_locks WHERE name = $1`, h.Name()).Scan(&seconds)
			return err == nil && seconds > (remaining+by).Seconds()
		})
	}
	h := acquire(t, c.Lock("on-server"))
	ahead(h, time.Hour/2000)
	require.NoError(t, h.Extend(t.Context(), 2*time.Hour))
	ahead(h, time.Hour/2000)
	require.NoError(t, h.Unlock(t.Context()))
	for lease, by := range map[time.Duration]time.Duration{2 * time.Hour: time.Hour / 1000, 3 * time.Second: 8 * time.Millisecond} {
		h = acquire(t, c.Lock("on-server"), lock.Lease(lease))
		ahead(h, by)
		require.NoError(t, h.Unlock(t.Context()))
	}
}

// Calls wait for a connection of the pool.
func TestPoolExhausted(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), commonServer(t).url()+"?pool_max_conns=1")
	require.NoError(t, err)
	defer pool.Close()
	c := newTable(t, pool)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = c.Lock("exhausted").TryLock(t.Context())
	require.ErrorIs(t, err, lock.ErrUnavailable)
	_, err = c.Lock("exhausted").Lock(t.Context(), lock.Wait(100*time.Millisecond))
	require.ErrorIs(t, err, lock.ErrUnavailable)
	waiting := harness.StartLock(t, t.Context(), c.Lock("exhausted"))
	conn.Release()
	require.NoError(t, waiting.End())
	require.NoError(t, waiting.Value.Unlock(t.Context()))
}

// A table in which Check would keep nobody out is refused.
func TestTokenIsUnique(t *testing.T) {
	t.Parallel()
	pool := newPool(t, commonServer(t).addr())
	require.NoError(t, pglock.CreateTable(t.Context(), pool))
	_, err := pool.Exec(t.Context(), `DROP TABLE IF EXISTS other;
		CREATE TABLE other (LIKE redlatch_locks INCLUDING DEFAULTS INCLUDING IDENTITY); ALTER TABLE other ADD PRIMARY KEY (name)`)
	require.NoError(t, err)
	_, err = pglock.NewTable(t.Context(), pool, pglock.Named("other"))
	require.ErrorIs(t, err, lock.ErrUnsupported)
	_, err = pool.Exec(t.Context(), "CREATE UNIQUE INDEX ON other (token)")
	require.NoError(t, err)
	c := newTable(t, pool, pglock.Named("other"))
	require.NoError(t, acquire(t, c.Lock("a")).Unlock(t.Context()))
}

// Close frees what is held with a lease, too, and what AtLeast keeps.
func TestCloseFreesLeases(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	c, other := newTable(t, newPool(t, s.addr())), newTable(t, newPool(t, s.addr()))
	acquire(t, c.Lock("close-lease"), lock.Lease(time.Hour))
	kept := acquire(t, c.Lock("close-kept"), lock.Lease(time.Hour), lock.AtLeast(time.Hour))
	require.NoError(t, kept.Unlock(t.Context()))
	c.Close()
	for _, name := range []string{"close-lease", "close-kept"} {
		h, err := other.Lock(name).TryLock(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
	}
}
