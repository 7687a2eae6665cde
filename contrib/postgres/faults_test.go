package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	pglock "github.com/redlatch/redlatch/contrib/postgres"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// workers are the processes that tests start.
var workers = map[string]func(args []string) error{"holder": holder}

// holder acquires a lock and holds it until it is killed.
func holder(args []string) error {
	kind := args[0]
	addr := args[1]
	name := args[2]
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url(addr))
	if err != nil {
		return err
	}
	var c *driver.Client
	if kind == advisory.name {
		a, err := pglock.NewAdvisory(ctx, pool, pglock.TTL(ttl))
		if err != nil {
			return err
		}
		c = a.Client
	} else {
		t, err := pglock.NewTable(ctx, pool, pglock.TTL(ttl))
		if err != nil {
			return err
		}
		c = t.Client
	}
	if _, err := c.Lock(name).Lock(ctx); err != nil {
		return err
	}
	fmt.Println("held")
	select {}
}

// Others get the lock of a process that was killed: of a session at once, and of a table when the lease is over.
func TestKilled(t *testing.T) {
	each(t, func(t *testing.T, k kind, s *server) {
		c := k.make(t, newPool(t, s.addr()))
		p := harness.Spawn(t, "holder", k.name, s.addr(), "killed-"+k.name)
		require.Equal(t, "held", p.Line(soon))
		waiting := harness.StartLock(t, t.Context(), c.Lock("killed-"+k.name))
		time.Sleep(ttl + ttl/4) // it is kept
		require.True(t, waiting.Running())
		p.Kill()
		within := ttl
		if k.name == advisory.name {
			within = 0
		}
		require.NoError(t, waiting.EndWithin(within+pause))
		require.NoError(t, waiting.Value.Unlock(t.Context()))
	})
}

// The holds of a session that the server ends are lost before others have the locks.
func TestTerminated(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	pool := newPool(t, s.addr())
	c, other := advisory.make(t, pool), advisory.make(t, pool)
	for i := range harness.Size(8, 30) {
		h := acquire(t, c.Lock("terminated"))
		waiting := harness.StartLock(t, t.Context(), other.Lock("terminated"))
		harness.Eventually(t, soon, "the other one waits", func() bool {
			return len(left(t, s, "terminated")) == 2
		})
		key := uint64(pglock.Key("terminated"))
		_, err := pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_locks
			WHERE locktype = 'advisory' AND granted AND classid = $1::bigint::oid AND objid = $2::bigint::oid`,
			int64(key>>32), int64(key&(1<<32-1)))
		require.NoError(t, err)
		loss := lost(t, h, 0)
		require.Equal(t, lock.ReasonGone, loss.Reason)
		require.ErrorContains(t, loss, "terminating connection")
		require.NoError(t, waiting.End())
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		require.NoError(t, waiting.Value.Unlock(t.Context()), "%d", i)
	}
}

// After a crash of the server sessions are gone, and the rows of a table are not.
func TestRestarted(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	pool := newPool(t, s.addr())
	session, other := advisory.make(t, pool, pglock.TTL(30*time.Second)), advisory.make(t, pool)
	rows, others := newTable(t, pool, pglock.TTL(30*time.Second)), newTable(t, pool)
	ofSession, ofTable := acquire(t, session.Lock("restarted")), acquire(t, rows.Lock("restarted"))
	waits := harness.StartLock(t, t.Context(), other.Lock("restarted"))
	token := ofTable.Token()

	s.stop(syscall.SIGQUIT)
	require.Equal(t, lock.ReasonGone, lost(t, ofSession, 0).Reason)
	_, err := session.Lock("restarted").Lock(t.Context(), lock.FailFast())
	require.ErrorIs(t, err, lock.ErrUnavailable)
	require.NoError(t, s.start())
	require.NoError(t, waits.End())
	require.NoError(t, waits.Value.Unlock(t.Context()))
	require.NoError(t, acquire(t, session.Lock("restarted")).Unlock(t.Context()))

	require.NoError(t, ofTable.Context().Err())
	harness.Eventually(t, soon, "the table answers", func() bool {
		_, err = others.Lock("restarted").TryLock(t.Context())
		return errors.Is(err, lock.ErrNotAcquired)
	})
	harness.Eventually(t, soon, "the hold is extended", func() bool { return ofTable.Extend(t.Context(), time.Minute) == nil })
	require.NoError(t, ofTable.Unlock(t.Context()))
	next := acquire(t, others.Lock("restarted"))
	require.Greater(t, next.Token(), token)
	require.NoError(t, next.Unlock(t.Context()))
}

// A server that stops for longer than the TTL has ended all holds, and goes on.
func TestStopped(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			s := ownServer(t)
			pool := newPool(t, s.addr())
			c, other := k.make(t, pool), k.make(t, newPool(t, s.addr()))
			h := acquire(t, c.Lock("stopped"))
			waiting := harness.StartLock(t, t.Context(), other.Lock("stopped"))
			time.Sleep(100 * time.Millisecond)

			s.freeze(true)
			defer s.freeze(false)
			began := time.Now()
			require.Equal(t, lock.ReasonExpired, lost(t, h, ttl).Reason)
			assert.Greater(t, time.Since(began), ttl/3, "it ends without a reason")
			began = time.Now()
			_, err := c.Lock("stopped-new").Lock(t.Context(), lock.Wait(300*time.Millisecond))
			require.Error(t, err)
			assert.True(t, errors.Is(err, lock.ErrIndeterminate) || errors.Is(err, lock.ErrUnavailable), "%v", err)
			assert.Less(t, time.Since(began), 300*time.Millisecond+pause)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			require.True(t, waiting.Running())
			time.Sleep(ttl / 2)

			s.freeze(false)
			require.NoError(t, waiting.End())
			require.NoError(t, waiting.Value.Unlock(t.Context()))
			require.NoError(t, acquire(t, c.Lock("stopped")).Unlock(t.Context()))
			harness.Eventually(t, soon, "nothing is left", func() bool {
				return len(left(t, s, "stopped"))+len(left(t, s, "stopped-new")) == 0
			})
		})
	}
}

// What an acquisition whose reply was lost has taken is found by the next attempt of the call, or removed.
func TestLostReply(t *testing.T) {
	each(t, func(t *testing.T, k kind, s *server) {
		p := testserver.NewProxy(t, s.addr())
		c := k.make(t, oneRoundTrip(t, p.Addr), pglock.TTL(time.Minute))
		other := k.make(t, newPool(t, s.addr()))
		require.NoError(t, acquire(t, c.Lock("before")).Unlock(t.Context()))
		for _, leaves := range []bool{false, true} {
			name := fmt.Sprintf("lost-reply-%s-%t", k.name, leaves)
			p.Set(testserver.Mute)
			ctx, cancel := context.WithCancel(t.Context())
			call := harness.StartLock(t, ctx, c.Lock(name))
			harness.Eventually(t, soon, "the server has it", func() bool { return len(left(t, s, name)) == 1 })
			if leaves {
				cancel()
				require.ErrorIs(t, call.End(), lock.ErrIndeterminate)
			}
			p.Down()
			p.Set(testserver.Pass)
			if leaves {
				require.NoError(t, acquire(t, other.Lock(name)).Unlock(t.Context()))
			} else {
				require.NoError(t, call.EndWithin(soon))
				require.NoError(t, call.Value.Unlock(t.Context()))
			}
			cancel()
			harness.Eventually(t, soon, "nothing is left", func() bool { return len(left(t, s, name)) == 0 })
		}
	})
}

// oneRoundTrip returns a pool whose connections send a statement at once: the server carries it out although no reply comes.
func oneRoundTrip(t testing.TB, addr string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url(addr)+"?default_query_exec_mode=exec")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// A standby takes no locks. A client whose server becomes one waits until there is a primary again.
func TestStandby(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	pool := newPool(t, s.addr())
	sessions, rows := advisory.make(t, pool, pglock.TTL(time.Minute)), newTable(t, pool, pglock.TTL(time.Minute))
	h := acquire(t, rows.Lock("standby"))
	restart := func() {
		s.stop(syscall.SIGINT)
		require.NoError(t, s.start())
		pool.Reset()
	}
	require.NoError(t, os.WriteFile(filepath.Join(s.data(), "standby.signal"), nil, 0o644))
	restart()

	_, err := pglock.NewAdvisory(t.Context(), pool)
	require.ErrorIs(t, err, lock.ErrUnavailable)
	require.ErrorContains(t, err, "standby")
	_, err = pglock.NewTable(t.Context(), pool)
	require.ErrorIs(t, err, lock.ErrUnavailable)
	require.ErrorContains(t, err, "standby")
	var waiting []*harness.Call[lock.Hold]
	for _, c := range []*driver.Client{sessions, rows.Client} {
		harness.Eventually(t, soon, "the standby refuses", func() bool {
			_, err = c.Lock("standby-other").TryLock(t.Context())
			return strings.Contains(err.Error(), "standby") || strings.Contains(err.Error(), "25006")
		})
		require.ErrorIs(t, err, lock.ErrUnavailable)
		waiting = append(waiting, harness.StartLock(t, t.Context(), c.Lock("standby-other")))
	}
	require.NoError(t, h.Context().Err())

	require.NoError(t, os.Remove(filepath.Join(s.data(), "standby.signal")))
	restart()
	for _, w := range waiting {
		require.NoError(t, w.End())
		require.NoError(t, w.Value.Unlock(t.Context()))
	}
	harness.Eventually(t, soon, "the hold is extended", func() bool { return h.Extend(t.Context(), time.Minute) == nil })
	require.NoError(t, h.Unlock(t.Context()))
}

// The time limits of an operator end neither a wait nor a hold, and transactions of any isolation level take locks.
func TestLimits(t *testing.T) {
	each(t, func(t *testing.T, k kind, s *server) {
		limits := "?statement_timeout=300&lock_timeout=300&idle_session_timeout=300&idle_in_transaction_session_timeout=300" +
			"&default_transaction_isolation=serializable"
		newPool := func() *pgxpool.Pool {
			pool, err := pgxpool.New(t.Context(), s.url()+limits)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			return pool
		}
		c, other := k.make(t, newPool()), k.make(t, newPool())
		h := acquire(t, c.Lock("limits-"+k.name))
		waiting := harness.StartLock(t, t.Context(), other.Lock("limits-"+k.name))
		time.Sleep(ttl + ttl/4)
		require.NoError(t, context.Cause(h.Context()))
		require.True(t, waiting.Running())
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, waiting.End())
		require.NoError(t, waiting.Value.Unlock(t.Context()))

		var callers sync.WaitGroup
		for i := range 6 {
			callers.Go(func() {
				for range 10 {
					l := []*driver.Client{c, other}[i%2].Lock("limits-" + k.name)
					err := l.Do(t.Context(), func(context.Context) error { return nil })
					assert.NoError(t, err)
					h, err := l.TryLock(t.Context())
					if err == nil {
						assert.NoError(t, h.Unlock(t.Context()))
					} else if !errors.Is(err, lock.ErrNotAcquired) { // it was rolled back because of others, or its connection had ended
						assert.True(t, errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate), "%v", err)
					}
				}
			})
		}
		callers.Wait()
	})
}

// A call that does not wait for the server fails with that, although it was refused before because others have the lock.
func TestSilentAfterRefusal(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	p := testserver.NewProxy(t, s.addr())
	c := advisory.make(t, newPool(t, p.Addr), pglock.TTL(time.Minute), pglock.MaxConns(1))
	h := acquire(t, advisory.make(t, newPool(t, s.addr())).Lock("silent-after-refusal"))
	waiting := harness.StartLock(t, t.Context(), c.Lock("silent-after-refusal"), lock.FailFast())
	time.Sleep(pause) // it is refused, as a rule, and asks again
	require.True(t, waiting.Running())
	p.Set(testserver.Stall)
	require.ErrorIs(t, waiting.End(), lock.ErrIndeterminate)
	p.Set(testserver.Pass)
	require.NoError(t, h.Unlock(t.Context()))
}

// A client that cannot listen for releases tries again, in pauses that grow.
func TestListenerPauses(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	config, err := pgxpool.ParseConfig(s.url() + "?sslmode=disable")
	require.NoError(t, err)
	var attempts atomic.Int32
	config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		attempts.Add(1)
		return nil, net.ErrClosed
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	newTable(t, newPool(t, s.addr()), pglock.ListenOn(pool))
	began := time.Now()
	harness.Eventually(t, soon, "it tries again", func() bool { return attempts.Load() == 4 }) // after 250, 500 and 1000 ms
	require.Greater(t, time.Since(began), 1500*time.Millisecond)
}

// A client waits although the server has no more connections for it.
func TestTooManyConnections(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	admin := newPool(t, s.addr())
	_, err := admin.Exec(t.Context(), "DROP ROLE IF EXISTS few; CREATE ROLE few LOGIN CONNECTION LIMIT 1")
	require.NoError(t, err)
	pool, err := pgxpool.New(t.Context(), strings.Replace(s.url(), "postgres@", "few@", 1))
	require.NoError(t, err)
	defer pool.Close()
	c, other := advisory.make(t, pool), advisory.make(t, admin)
	h := acquire(t, other.Lock("few"))
	_, err = pglock.NewAdvisory(t.Context(), pool)
	require.ErrorIs(t, err, lock.ErrUnavailable)
	require.ErrorContains(t, err, "too many connections")
	waiting := harness.StartLock(t, t.Context(), c.Lock("few"))
	_, err = c.Lock("few").Lock(t.Context(), lock.Wait(100*time.Millisecond))
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, waiting.End())
	require.NoError(t, waiting.Value.Unlock(t.Context()))
}

// A lock that the server does not unlock is released with its session.
func TestUnlockRefused(t *testing.T) {
	t.Parallel()
	s := ownServer(t)
	admin := newPool(t, s.addr())
	_, err := admin.Exec(t.Context(), "CREATE ROLE somebody LOGIN")
	require.NoError(t, err)
	pool, err := pgxpool.New(t.Context(), strings.Replace(s.url(), "postgres@", "somebody@", 1))
	require.NoError(t, err)
	defer pool.Close()
	c, other := advisory.make(t, pool, pglock.TTL(time.Minute)), advisory.make(t, admin)
	h := acquire(t, c.Lock("refused"))
	waiting := harness.StartLock(t, t.Context(), other.Lock("refused"))
	_, err = admin.Exec(t.Context(), "REVOKE EXECUTE ON FUNCTION pg_advisory_unlock(bigint) FROM PUBLIC")
	require.NoError(t, err)
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrIndeterminate)
	require.NoError(t, waiting.End())
	require.NoError(t, waiting.Value.Unlock(t.Context()))
}
