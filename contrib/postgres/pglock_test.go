package pglock_test

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	pglock "github.com/redlatch/redlatch/contrib/postgres"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
	"github.com/redlatch/redlatch/lock/locktest"
)

func TestMain(m *testing.M) { harness.Main(m, workers) }

// ttl is the TTL of clients whose tests wait for its end.
const ttl = 2 * time.Second

// kind is one of the two kinds of clients.
type kind struct {
	name string
	make func(t testing.TB, pool *pgxpool.Pool, opts ...pglock.Option) *driver.Client
}

var (
	advisory = kind{"advisory", func(t testing.TB, pool *pgxpool.Pool, opts ...pglock.Option) *driver.Client {
		t.Helper()
		c, err := pglock.NewAdvisory(t.Context(), pool, append([]pglock.Option{pglock.TTL(ttl)}, opts...)...)
		require.NoError(t, err)
		t.Cleanup(c.Close)
		return c.Client
	}}
	table = kind{"table", func(t testing.TB, pool *pgxpool.Pool, opts ...pglock.Option) *driver.Client {
		t.Helper()
		return newTable(t, pool, opts...).Client
	}}
	kinds = []kind{advisory, table}
)

func newTable(t testing.TB, pool *pgxpool.Pool, opts ...pglock.Option) *pglock.Table {
	t.Helper()
	require.NoError(t, pglock.CreateTable(t.Context(), pool))
	c, err := pglock.NewTable(t.Context(), pool, append([]pglock.Option{pglock.TTL(ttl)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// each runs a test for both kinds, on a server that all tests share.
func each(t *testing.T, test func(t *testing.T, k kind, s *server)) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			test(t, k, commonServer(t))
		})
	}
}

// acquire acquires a lock soon.
func acquire(t testing.TB, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(t.Context(), append([]lock.Option{lock.Wait(soon)}, opts...)...)
	require.NoError(t, err)
	return h
}

// lost waits for the loss of a hold, and returns it.
func lost(t testing.TB, h lock.Hold, within time.Duration) *lock.LostError {
	t.Helper()
	harness.Receive(t, within+pause, "the loss of a hold", h.Context().Done())
	var loss *lock.LostError
	require.ErrorAs(t, context.Cause(h.Context()), &loss)
	assert.Zero(t, h.Remaining())
	return loss
}

// client is what locktest needs of a client, behind a proxy of its own.
type client struct {
	*driver.Client
	proxy *testserver.Proxy
}

func (c client) Lock(name string) lock.Locker { return c.Client.Lock(name) }

// suite returns the suite for a kind of clients that connect to that address.
func suite(k kind, s *server, addr string, opts ...pglock.Option) locktest.Suite {
	return locktest.Suite{
		NewClient: func(t testing.TB) locktest.Client {
			p := testserver.NewProxy(t, addr)
			return client{k.make(t, newPool(t, p.Addr), opts...), p}
		},
		Kind: "postgres", Reentrant: true, Leased: true, Extends: true, AtLeast: true, Closes: true, Expires: true,
		Fenced: strings.HasPrefix(k.name, "table"),
		Settle: 300 * time.Millisecond, Expiry: ttl + ttl/2,
		CutOff: cutOff((*testserver.Proxy).Down),
		Open:   func(t testing.TB, name string) { open(t, s, name) },
		Left:   func(t testing.TB, name string) []string { return left(t, s, name) },
	}
}

func cutOff(fault func(*testserver.Proxy)) func(t testing.TB, c locktest.Client) (restore func()) {
	return func(_ testing.TB, c locktest.Client) (restore func()) {
		p := c.(client).proxy
		fault(p)
		return func() { p.Set(testserver.Pass) }
	}
}

func stall(p *testserver.Proxy) { p.Set(testserver.Stall) }

// left returns what the server has of a lock: sessions that have it or wait for it, its owner, and its queue.
func left(t testing.TB, s *server, name string) (found []string) {
	t.Helper()
	conn, err := pgx.Connect(context.Background(), s.url())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	queries := []string{"SELECT 'session ' || pid || ' ' || granted " + sessions(name)}
	if hasTable(t, conn) {
		queries = append(queries, fmt.Sprintf(
			"SELECT coalesce(owner, '') || queue::text FROM redlatch_locks WHERE name = %s AND (owner IS NOT NULL OR queue <> '{}')", quote(name)))
	}
	for _, query := range queries {
		rows, err := conn.Query(context.Background(), query)
		require.NoError(t, err)
		rowsLeft, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		found = append(found, rowsLeft...)
	}
	return found
}

// open ends the session that has a lock, or takes it from its owner.
func open(t testing.TB, s *server, name string) {
	t.Helper()
	conn, err := pgx.Connect(context.Background(), s.url())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(context.Background(), "SELECT pg_terminate_backend(pid) "+sessions(name))
	require.NoError(t, err)
	if hasTable(t, conn) {
		_, err = conn.Exec(context.Background(), "UPDATE redlatch_locks SET owner = NULL WHERE name = "+quote(name))
		require.NoError(t, err)
	}
}

func hasTable(t testing.TB, conn *pgx.Conn) (has bool) {
	t.Helper()
	require.NoError(t, conn.QueryRow(context.Background(), "SELECT to_regclass('redlatch_locks') IS NOT NULL").Scan(&has))
	return has
}

// sessions are those that have a lock or wait for it.
func sessions(name string) string {
	key := uint64(pglock.Key(name))
	return fmt.Sprintf("FROM pg_locks WHERE locktype = 'advisory' AND classid = %d AND objid = %d", key>>32, uint32(key))
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// Both kinds keep the contract of package lock.
func TestConformance(t *testing.T) {
	s := commonServer(t)
	run := func(name string, s locktest.Suite) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locktest.Run(t, s)
		})
	}

	plain := suite(advisory, s, s.addr())
	plain.RWLock = func(c locktest.Client, name string) (read, write lock.Locker) {
		l := c.(client).RWLock(name)
		return l.Read(), l.Write()
	}
	run("advisory", plain)

	run("table", suite(table, s, s.addr()))
	if testing.Short() {
		return
	}

	// The readers of a read-write lock.
	readers := suite(kind{"advisory", advisory.make}, s, s.addr())
	readers.NewClient = func(t testing.TB) locktest.Client {
		p := testserver.NewProxy(t, s.addr())
		return reader{client{advisory.make(t, newPool(t, p.Addr)), p}}
	}
	readers.Rival = func(c locktest.Client, name string) lock.Locker { return c.(reader).RWLock(name).Write() }
	readers.CutOff = func(t testing.TB, c locktest.Client) func() {
		return cutOff((*testserver.Proxy).Down)(t, c.(reader).client)
	}
	readers.AtLeast = false
	run("advisory-readers", readers)

	// The server hears nothing of a client that is silent behind a proxy, until the proxy closes the connection.
	silent := suite(advisory, s, s.addr())
	silent.CutOff = cutOff(stall)
	silent.Expires = false
	run("advisory-silent", silent)

	// A session for all, so that waiters ask again.
	run("advisory-polls", polling(suite(advisory, s, s.addr(), pglock.MaxConns(1))))

	lease := suite(table, s, s.addr())
	lease.CutOff = cutOff(stall)
	run("table-silent", lease)
	run("table-polls", polling(suite(table, s, s.addr(), pglock.Poll(20*time.Millisecond))))
	run("table-pooler", polling(suite(table, s, startPooler(t, s).addr(), pglock.Poll(20*time.Millisecond))))
	run("table-pooler-listens", polling(suite(table, s, startPooler(t, s).addr(), pglock.ListenOn(newPool(t, s.addr())))))
}

// polling is for waiters that ask again, or through a pooler.
func polling(s locktest.Suite) locktest.Suite {
	s.Settle = 600 * time.Millisecond
	return s
}

// reader is a client whose locks are read locks.
type reader struct{ client }

func (c reader) Lock(name string) lock.Locker { return c.RWLock(name).Read() }

// Invalid options are errors of the call.
func TestOptions(t *testing.T) {
	t.Parallel()
	pool := newPool(t, commonServer(t).addr())
	require.NoError(t, pglock.CreateTable(t.Context(), pool))
	for i, bad := range [][]pglock.Option{
		{nil}, {pglock.TTL(0)}, {pglock.TTL(time.Millisecond)}, {pglock.TTL(25 * time.Hour)}, {pglock.MaxConns(0)}, {pglock.Keys(nil)},
		{pglock.Named("locks")}, {pglock.ListenOn(pool)}, {pglock.Poll(time.Second)},
	} {
		_, err := pglock.NewAdvisory(t.Context(), pool, bad...)
		require.ErrorIs(t, err, lock.ErrInvalid, "%d", i)
	}
	for i, bad := range [][]pglock.Option{
		{nil}, {pglock.TTL(-1)}, {pglock.MaxConns(2)}, {pglock.Keys(pglock.Key)}, {pglock.Named()}, {pglock.Named("")}, {pglock.Named("a", "b", "c")},
		{pglock.Named("a\x00")}, {pglock.Named(strings.Repeat("x", 64))}, {pglock.ListenOn(nil)}, {pglock.Poll(0)},
		{pglock.Poll(time.Second), pglock.ListenOn(pool)},
	} {
		_, err := pglock.NewTable(t.Context(), pool, bad...)
		require.ErrorIs(t, err, lock.ErrInvalid, "%d", i)
		require.ErrorIs(t, pglock.CreateTable(t.Context(), pool, bad...), lock.ErrInvalid, "%d", i)
	}
	_, err := pglock.NewAdvisory(t.Context(), nil)
	require.ErrorIs(t, err, lock.ErrInvalid)
	_, err = pglock.NewTable(t.Context(), nil)
	require.ErrorIs(t, err, lock.ErrInvalid)

	var failed *lock.Error
	require.ErrorAs(t, err, &failed)
	assert.Equal(t, "connect", failed.Op)
}

// Names that the server cannot have are invalid.
func TestNames(t *testing.T) {
	each(t, func(t *testing.T, k kind, s *server) {
		c := k.make(t, newPool(t, s.addr()))
		for _, name := range []string{"", "a\x00b", "\xff", strings.Repeat("x", 513)} {
			_, err := c.Lock(name).TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrInvalid, "%q", name)
		}
		require.NoError(t, acquire(t, c.Lock(strings.Repeat("ü", 256))).Unlock(t.Context()))
	})
}

// What a kind does not have is not supported.
func TestUnsupported(t *testing.T) {
	each(t, func(t *testing.T, k kind, s *server) {
		c := k.make(t, newPool(t, s.addr()))
		_, err := c.Semaphore("s", 2).Lock(t.Context())
		require.ErrorIs(t, err, lock.ErrUnsupported)
		if k.name == table.name {
			_, err := c.RWLock("rw").Read().Lock(t.Context())
			require.ErrorIs(t, err, lock.ErrUnsupported)
			require.NoError(t, acquire(t, c.RWLock("rw").Write()).Unlock(t.Context()))
		}
	})
}

// Sessions are not used through a pooler.
func TestPooler(t *testing.T) {
	t.Parallel()
	pool := newPool(t, startPooler(t, commonServer(t)).addr())
	_, err := pglock.NewAdvisory(t.Context(), pool)
	require.ErrorIs(t, err, lock.ErrUnsupported)
	require.ErrorContains(t, err, "pooler")
}

// A server that is not there is unavailable, and a table that is missing is an error that says so.
func TestConnect(t *testing.T) {
	t.Parallel()
	port, err := freePort()
	require.NoError(t, err)
	nowhere := newPool(t, fmt.Sprintf("127.0.0.1:%d", port))
	_, err = pglock.NewAdvisory(t.Context(), nowhere)
	require.ErrorIs(t, err, lock.ErrUnavailable)
	_, err = pglock.NewTable(t.Context(), nowhere)
	require.ErrorIs(t, err, lock.ErrUnavailable)
	require.ErrorIs(t, pglock.CreateTable(t.Context(), nowhere), lock.ErrUnavailable)

	pool := newPool(t, commonServer(t).addr())
	_, err = pglock.NewTable(t.Context(), pool, pglock.Named("missing"))
	require.ErrorContains(t, err, "CreateTable")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = pglock.NewAdvisory(ended, pool)
	require.ErrorIs(t, err, context.Canceled)
	_, err = pglock.NewTable(ended, pool)
	require.ErrorIs(t, err, context.Canceled)
}

// Commits that a crash may undo are not enough.
func TestAsynchronousCommit(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	require.NoError(t, pglock.CreateTable(t.Context(), newPool(t, s.addr())))
	pool, err := pgxpool.New(t.Context(), s.url()+"?synchronous_commit=off")
	require.NoError(t, err)
	defer pool.Close()
	_, err = pglock.NewTable(t.Context(), pool)
	require.ErrorIs(t, err, lock.ErrUnsupported)
}

// The lock of a name is the advisory lock of its key, which a program can take by hand.
func TestByHand(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	pool := newPool(t, s.addr())
	c := advisory.make(t, pool, pglock.Keys(func(name string) int64 { return int64(len(name)) + 1_000_000 }))
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()

	h := acquire(t, c.Lock("seven-7"))
	var granted bool
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_try_advisory_lock(1000007)").Scan(&granted))
	require.False(t, granted)
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_try_advisory_lock(1000007)").Scan(&granted))
	require.True(t, granted)

	waiting := harness.StartLock(t, t.Context(), c.Lock("seven-8"))
	time.Sleep(50 * time.Millisecond) // so that it waits, as a rule
	require.True(t, waiting.Running())
	_, err = conn.Exec(t.Context(), "SELECT pg_advisory_unlock(1000007)")
	require.NoError(t, err)
	require.NoError(t, waiting.End())
	require.NoError(t, waiting.Value.Unlock(t.Context()))

	_, err = c.Lock("abc").TryLock(t.Context())
	require.NoError(t, err)
	_, err = c.Lock("xyz").TryLock(t.Context()) // has the same key
	require.ErrorIs(t, err, lock.ErrNotAcquired)
}

// The number of connections is bounded.
func TestMaxConns(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	pool := newPool(t, s.addr())
	holder := advisory.make(t, pool)
	c := advisory.make(t, pool, pglock.MaxConns(3))
	var holds []lock.Hold
	var waiting []*harness.Call[lock.Hold]
	for i := range 6 {
		name := fmt.Sprintf("max-conns-%d", i)
		holds = append(holds, acquire(t, holder.Lock(name)))
		waiting = append(waiting, harness.StartLock(t, t.Context(), c.Lock(name)))
	}
	time.Sleep(100 * time.Millisecond)
	for _, h := range holds {
		require.NoError(t, h.Unlock(t.Context()))
	}
	for _, w := range waiting {
		require.NoError(t, w.End())
		require.NoError(t, w.Value.Unlock(t.Context()))
	}
}

// An attempt behind a waiter of the same client finds the lock taken at once, also if the waiter has not tried first.
func TestTryBehindWaiter(t *testing.T) {
	each(t, func(t *testing.T, k kind, s *server) {
		pool := newPool(t, s.addr())
		c, other := k.make(t, pool), k.make(t, pool)
		for range 3 { // after the first, there is an idle session to wait on
			h := acquire(t, other.Lock("behind-"+k.name))
			require.LessOrEqual(t, h.Remaining(), ttl)
			waiting := harness.StartLock(t, t.Context(), c.Lock("behind-"+k.name))
			harness.Eventually(t, soon, "it waits", func() bool { return len(c.Holds()) == 1 })
			began := time.Now()
			_, err := c.Lock("behind-" + k.name).TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.Less(t, time.Since(began), 2*pause)
			require.NoError(t, h.Unlock(t.Context()))
			require.NoError(t, waiting.End())
			require.LessOrEqual(t, waiting.Value.Remaining(), ttl)
			require.NoError(t, waiting.Value.Unlock(t.Context()))
		}
	})
}

// The server keeps the session of a silent client for longer than the client keeps its holds, and does not end it otherwise.
func TestSettings(t *testing.T) {
	t.Parallel()
	s := commonServer(t)
	pool := newPool(t, s.addr())
	conn, err := pgx.Connect(t.Context(), s.url()+"?statement_timeout=1000&lock_timeout=1000&idle_session_timeout=1000")
	require.NoError(t, err)
	defer conn.Close(context.Background())
	for _, ttl := range []time.Duration{time.Second, 2500 * time.Millisecond, 15 * time.Second, time.Hour} {
		require.NoError(t, pglock.Configure(t.Context(), pool, ttl, conn))
		setting := func(name string) time.Duration {
			var value, unit string
			require.NoError(t, conn.QueryRow(t.Context(), "SELECT setting, coalesce(unit, '') FROM pg_settings WHERE name = $1", name).Scan(&value, &unit))
			d, err := time.ParseDuration(value + cmp.Or(unit, "ns"))
			require.NoError(t, err, name)
			return d
		}
		for _, name := range []string{"statement_timeout", "lock_timeout", "idle_session_timeout"} {
			require.Zero(t, setting(name), name)
		}
		patience := setting("tcp_user_timeout")
		require.Equal(t, ttl+ttl/4, patience)
		require.Equal(t, ttl/4, setting("client_connection_check_interval"))
		probes := setting("tcp_keepalives_idle") + setting("tcp_keepalives_interval")*setting("tcp_keepalives_count")
		require.GreaterOrEqual(t, probes, patience)
		require.LessOrEqual(t, probes, ttl+ttl/2+2*time.Second)
	}
}
