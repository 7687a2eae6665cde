package pglock_test

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	pglock "github.com/redlatch/redlatch/contrib/postgres"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// late is a client of a Table whose first connection can be delayed, and others not.
type late struct {
	*pglock.Table
	server *server
	proxy  *testserver.Proxy // of the first connection
	pid    int               // of its session
	conn   net.Conn
	broken atomic.Bool // there are no new connections
}

const poll = 200 * time.Millisecond

func newLate(t *testing.T) *late {
	t.Helper()
	c := &late{server: commonServer(t)}
	c.proxy = testserver.NewProxy(t, c.server.addr())
	config, err := pgxpool.ParseConfig(c.server.url() + "?sslmode=disable&pool_max_conns=4&default_query_exec_mode=exec")
	require.NoError(t, err)
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if c.broken.Load() {
			return nil, net.ErrClosed
		}
		var d net.Dialer
		if c.conn != nil {
			return d.DialContext(ctx, network, addr)
		}
		conn, err := d.DialContext(ctx, network, c.proxy.Addr)
		c.conn = conn
		return conn, err
	}
	config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false } // it would be late instead
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	c.Table = newTable(t, pool, pglock.Poll(poll))
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&c.pid))
	return c
}

// arrives waits until the server has carried out what the first connection has sent.
func (c *late) arrives(t *testing.T) {
	t.Helper()
	pool := newPool(t, c.server.addr())
	harness.Eventually(t, soon, "the session has ended", func() bool {
		var n int
		err := pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE pid = $1", c.pid).Scan(&n)
		return err == nil && n == 0
	})
}

// forgotten is after what time a client does not look any more for what a request has done that it has given up: no request is
// under way for longer than two seconds.
const forgotten = 3*time.Second + ttl/4 + pause

// A request that its caller has given up takes nothing, however late it is, and although the server was not told.
func TestLateRequest(t *testing.T) {
	giveUp := []lock.Option{lock.Wait(200 * time.Millisecond), lock.Lease(time.Hour)}

	t.Run("in the network", func(t *testing.T) {
		t.Parallel()
		c := newLate(t)
		const name = "late-in-network"
		require.NoError(t, acquire(t, c.Lock(name)).Unlock(t.Context()))
		c.proxy.Set(testserver.StallRequests)
		_, err := c.Lock(name).Lock(t.Context(), giveUp...)
		require.ErrorIs(t, err, lock.ErrIndeterminate)
		time.Sleep(forgotten)
		c.proxy.Set(testserver.Pass)
		c.arrives(t)
		require.Empty(t, left(t, c.server, name))
	})

	t.Run("for a new name", func(t *testing.T) {
		t.Parallel()
		c := newLate(t)
		_, err := newPool(t, c.server.addr()).Exec(t.Context(), "DELETE FROM redlatch_locks WHERE name = 'late-new'")
		require.NoError(t, err)
		c.proxy.Set(testserver.StallRequests)
		_, err = c.Lock("late-new").Lock(t.Context(), giveUp...)
		require.ErrorIs(t, err, lock.ErrIndeterminate)
		time.Sleep(forgotten)
		c.proxy.Set(testserver.Pass)
		c.arrives(t)
		require.Empty(t, left(t, c.server, "late-new"))
	})

	t.Run("behind a transaction", func(t *testing.T) {
		t.Parallel()
		c := newLate(t)
		const name = "late-behind-transaction"
		other := newTable(t, newPool(t, c.server.addr()))
		h := acquire(t, other.Lock(name))
		conn, err := pgx.Connect(t.Context(), c.server.url())
		require.NoError(t, err)
		defer conn.Close(context.Background())
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, other.Check(t.Context(), tx, h))
		require.NoError(t, h.Unlock(t.Context()))

		c.broken.Store(true) // the server is not asked to cancel
		_, err = c.Lock(name).Lock(t.Context(), giveUp...)
		require.ErrorIs(t, err, lock.ErrIndeterminate)
		time.Sleep(pause)
		c.broken.Store(false)
		time.Sleep(forgotten)
		require.NoError(t, tx.Commit(t.Context()))
		c.arrives(t)
		require.Empty(t, left(t, c.server, name))
	})

	t.Run("after a hold", func(t *testing.T) { // that another attempt of the same call has begun
		t.Parallel()
		c := newLate(t)
		const name = "late-after-hold"
		h := acquire(t, newTable(t, newPool(t, c.server.addr())).Lock(name))
		call := harness.StartLock(t, t.Context(), c.Lock(name), lock.Lease(time.Hour))
		harness.Eventually(t, soon, "it waits", func() bool { return !strings.HasSuffix(left(t, c.server, name)[0], "{}") })
		c.proxy.Set(testserver.StallRequests)
		require.NoError(t, h.Unlock(t.Context()))
		time.Sleep(2 * poll) // the next request is sent, as a rule
		_ = c.conn.Close()
		require.NoError(t, call.Got().Unlock(t.Context()))
		c.proxy.Set(testserver.Pass)
		c.arrives(t)
		harness.Eventually(t, ttl/12+pause, "what it has taken is removed", func() bool { return len(left(t, c.server, name)) == 0 })
	})
}

// One of many requests for a lock that were given up has taken it. It is removed with the others.
func TestManyLateRequests(t *testing.T) {
	t.Parallel()
	const ttl = time.Minute
	s := commonServer(t)
	p := testserver.NewProxy(t, s.addr())
	pool := oneRoundTrip(t, p.Addr)
	c, other := newTable(t, pool, pglock.TTL(ttl), pglock.Poll(poll)), newTable(t, newPool(t, s.addr()))
	var conns []*pgxpool.Conn
	for range pool.Config().MaxConns {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		conn.Release()
	}

	p.Set(testserver.StallRequests | testserver.Refuse) // the server is not asked to cancel
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var calls []*harness.Call[lock.Hold]
	for range conns {
		calls = append(calls, harness.Start(t, ctx, func(ctx context.Context) (lock.Hold, error) { return c.Lock("late-many").TryLock(ctx) }))
	}
	time.Sleep(poll) // they are sent, as a rule
	cancel()
	for _, call := range calls {
		require.ErrorIs(t, call.End(), lock.ErrIndeterminate)
	}
	p.Set(testserver.Pass)
	began := time.Now()
	require.NoError(t, acquire(t, other.Lock("late-many")).Unlock(t.Context()))
	require.Less(t, time.Since(began), ttl/24+pause)
}

// An acquisition whose reply was lost has its whole lease when a later attempt finds it.
func TestLeaseAfterLostReply(t *testing.T) {
	t.Parallel()
	const ttl = 6 * time.Second
	s := commonServer(t)
	p := testserver.NewProxy(t, s.addr())
	const name = "lease-after-lost-reply"
	for _, opts := range [][]lock.Option{nil, {lock.Lease(ttl)}} {
		c := newTable(t, oneRoundTrip(t, p.Addr), pglock.TTL(ttl), pglock.Poll(poll))
		h := acquire(t, newTable(t, newPool(t, s.addr())).Lock(name))
		call := harness.StartLock(t, t.Context(), c.Lock(name), opts...)
		harness.Eventually(t, soon, "it waits", func() bool { return !strings.HasSuffix(left(t, s, name)[0], "{}") })
		p.Set(testserver.Mute)
		require.NoError(t, h.Unlock(t.Context()))
		harness.Eventually(t, soon, "the server has it", func() bool {
			found := left(t, s, name)
			return len(found) == 1 && strings.HasSuffix(found[0], "{}")
		})
		p.Down()
		time.Sleep(ttl * 2 / 3)
		p.Set(testserver.Pass)
		h = call.Got()
		require.Greater(t, h.Remaining(), ttl/2)
		require.NoError(t, h.Unlock(t.Context()))
	}
}

// The row of a hold that could not be released is removed, also if only the server knows how long its lease is.
func TestExtendedLeaseIsRemoved(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	p := testserver.NewProxy(t, s.addr())
	c := newTable(t, oneRoundTrip(t, p.Addr), pglock.Poll(poll))
	const name = "extended-lease"
	h := acquire(t, c.Lock(name))
	p.Set(testserver.Mute)
	ctx, cancel := context.WithTimeout(t.Context(), poll)
	defer cancel()
	require.ErrorIs(t, h.Extend(ctx, time.Hour), lock.ErrIndeterminate)
	p.Down()
	require.Error(t, h.Unlock(ctx))
	time.Sleep(2 * ttl)
	require.Len(t, left(t, s, name), 1)
	p.Set(testserver.Pass)
	require.NoError(t, acquire(t, newTable(t, newPool(t, s.addr())).Lock(name)).Unlock(t.Context()))
}
