//go:build linux

package pglock_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	pglock "github.com/redlatch/redlatch/contrib/postgres"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

var faults = flag.Duration("faults", 0, "how long TestHistory disturbs the locks; 0: 10 s with -short, and 40 s without")

func init() { workers["contender"] = contender }

// clock reads the monotonic clock that all processes of the machine share.
func clock() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err)
	}
	return time.Duration(now.Nano())
}

// period is a time in which a holder was certain of its lock.
type period struct {
	Begin, End time.Duration // by clock
	Token      int64
	Lost       lock.Reason // 0 if Unlock has released the lock
	Unknown    bool        // Unlock could not tell
}

// journal is what a contender has to say.
type journal struct {
	Periods []period
	Failed  int // calls of Lock
	Stale   int // transactions that Check has refused
}

// ways are how contenders connect.
var ways = []struct {
	name   string
	kind   kind
	pooler bool
	opts   []pglock.Option
}{
	{"advisory", advisory, false, nil},
	{"advisory-polls", advisory, false, []pglock.Option{pglock.MaxConns(1)}},
	{"advisory", advisory, false, nil},
	{"table-pooler", table, true, []pglock.Option{pglock.Poll(20 * time.Millisecond)}},
	{"table-polls", table, false, []pglock.Option{pglock.Poll(20 * time.Millisecond)}},
	{"table-listens", table, false, nil},
}

// Whatever happens to servers, connections and processes, holds of a table never overlap, their tokens grow, and no transaction
// with Check commits under a lock that another one has had since. Holds of sessions overlap only while the end of a session is on
// its way to a client. Faults do not coincide: a session that is ended while its client is cut off is lost without notice.
func TestHistory(t *testing.T) {
	t.Parallel()
	length := *faults
	if length == 0 {
		length = time.Duration(harness.Size(10, 40)) * time.Second
	}
	s := ownServer(t)
	pooler := startPooler(t, s)
	dir := t.TempDir()
	db, err := pgx.Connect(t.Context(), s.url())
	require.NoError(t, err)
	_, err = db.Exec(t.Context(), "CREATE TABLE written (id bigint GENERATED ALWAYS AS IDENTITY, token bigint)")
	require.NoError(t, err)
	require.NoError(t, db.Close(t.Context()))
	require.NoError(t, pglock.CreateTable(t.Context(), newPool(t, s.addr())))

	var all []party
	for i, way := range ways {
		addr := s.addr()
		if way.pooler {
			addr = pooler.addr()
		}
		p := testserver.NewProxy(t, addr)
		process := harness.Spawn(t, "contender", fmt.Sprint(i), p.Addr, length.String(), journalOf(dir, i))
		all = append(all, party{kind: way.kind, proxy: p, process: process})
	}
	for i := range all {
		all[i].id = all[i].process.Line(soon)
	}

	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	for ctx.Err() == nil {
		disturb(ctx, t, s, pooler, victims(t, s, all))
		sleep(ctx, rand.N(time.Second))
	}
	periods := make(map[string][]period)
	for i, p := range all {
		p.process.Ended(3 * soon)
		var j journal
		data, err := os.ReadFile(journalOf(dir, i))
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(data, &j))
		t.Logf("%s: %d holds, %d calls have failed, %d transactions were refused", ways[i].name, len(j.Periods), j.Failed, j.Stale)
		periods[p.kind.name] = append(periods[p.kind.name], j.Periods...)
	}

	pool := newPool(t, s.addr())
	for _, k := range kinds {
		verify(t, k, periods[k.name])
		require.NoError(t, acquire(t, k.make(t, pool).Lock("history")).Unlock(t.Context()))
	}
	// The places in the queue of those that are gone went when somebody had the lock.
	harness.Eventually(t, soon, "nothing is left", func() bool { return len(left(t, s, "history")) == 0 })
	var writes, unordered int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE token < before)
		FROM (SELECT token, lag(token) OVER (ORDER BY id) AS before FROM written) AS w`).Scan(&writes, &unordered))
	t.Logf("%d transactions have committed", writes)
	require.Zero(t, unordered, "an old holder has written")
}

// party is a contender, and what is between it and the server. Its owners, and the names of its sessions, begin with its id.
type party struct {
	kind    kind
	id      string
	proxy   *testserver.Proxy
	process *harness.Process
}

// victims returns a party of each kind, which is often the one that has the lock.
func victims(t *testing.T, s *server, all []party) (chosen []party) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.url())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	for _, k := range kinds {
		query := "SELECT coalesce(owner, '') FROM redlatch_locks"
		if k.name == advisory.name {
			query = "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted"
		}
		var owner string
		if err := conn.QueryRow(t.Context(), query).Scan(&owner); !errors.Is(err, pgx.ErrNoRows) {
			require.NoError(t, err)
		}
		all := slices.DeleteFunc(slices.Clone(all), func(p party) bool { return p.kind.name != k.name })
		i := slices.IndexFunc(all, func(p party) bool { return strings.HasPrefix(owner, p.id) })
		if i < 0 || rand.N(4) == 0 {
			i = rand.N(len(all))
		}
		chosen = append(chosen, all[i])
	}
	return chosen
}

func journalOf(dir string, i int) string { return filepath.Join(dir, fmt.Sprint(i)) }

// verify fails the test if holds overlap.
func verify(t *testing.T, k kind, holds []period) {
	t.Helper()
	require.NotEmpty(t, holds)
	slices.SortFunc(holds, func(a, b period) int { return cmp.Compare(a.Begin, b.Begin) })
	lost := make(map[lock.Reason]int)
	var unknown, overlaps int
	var most time.Duration
	var token int64
	var before period // the one that ends last
	for _, h := range holds {
		lost[h.Lost]++
		if h.Unknown {
			unknown++
		}
		if overlap := before.End - h.Begin; overlap > 0 {
			overlaps++
			most = max(most, overlap)
			ended := k.name == advisory.name && (before.Lost == lock.ReasonGone || before.Unknown)
			if !ended || overlap > 2*pause {
				t.Errorf("%s: two hold the lock for %v: %+v, %+v", k.name, overlap, before, h)
			}
		}
		if k.name == table.name && h.Token <= token {
			t.Errorf("token %d follows %d", h.Token, token)
		}
		token = h.Token
		if h.End > before.End {
			before = h
		}
	}
	t.Logf("%s: %d holds, %d of them lost when the time was over and %d before, of %d it is not known; "+
		"%d overlap while they are lost, for %v at most", k.name, len(holds), lost[lock.ReasonExpired], lost[lock.ReasonGone], unknown, overlaps, most)
}

// disturb has something fail for a while: the server, the pooler, or the victims and what is between them and the server.
func disturb(ctx context.Context, t *testing.T, s *server, pooler *pooler, victims []party) {
	outage := ttl/2 + rand.N(2*ttl)
	each := func(do func(p party)) {
		for _, p := range victims {
			do(p)
		}
	}
	switch rand.N(12) {
	case 0:
		s.stop(syscall.SIGQUIT)
		require.NoError(t, s.start())
	case 1:
		s.stop(syscall.SIGINT)
		require.NoError(t, s.start())
	case 2:
		s.freeze(true)
		sleep(ctx, outage)
		s.freeze(false)
	case 3:
		pooler.stop()
		sleep(ctx, rand.N(outage))
		pooler.start(t)
	case 4, 5:
		terminate(t, s, victims)
	case 6:
		each(func(p party) { p.proxy.Down() }) // as two ends hear of it
		sleep(ctx, rand.N(200*time.Millisecond))
	case 7:
		each(func(p party) { p.proxy.Set(testserver.Mute) })
		sleep(ctx, rand.N(outage))
		each(func(p party) { p.proxy.Down() })
	case 8, 9:
		each(func(p party) { p.proxy.Set(testserver.Stall) })
		sleep(ctx, outage)
		if rand.N(2) == 0 {
			each(func(p party) { p.proxy.Down() })
		}
	case 10, 11:
		each(func(p party) { p.process.Signal(syscall.SIGSTOP) })
		sleep(ctx, outage)
		each(func(p party) { p.process.Signal(syscall.SIGCONT) })
	}
	each(func(p party) { p.proxy.Set(testserver.Pass) })
}

// terminate ends some sessions of the victims, or of others.
func terminate(t *testing.T, s *server, victims []party) {
	var names []string
	for _, p := range victims {
		names = append(names, p.id)
	}
	conn, err := pgx.Connect(t.Context(), s.url())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
		ORDER BY application_name = ANY ($2) DESC, random() LIMIT $1`, 1+rand.N(6), names)
	require.NoError(t, err)
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// contender acquires the lock again and again, and writes under it.
func contender(args []string) error {
	var i int
	if _, err := fmt.Sscan(args[0], &i); err != nil {
		return err
	}
	length, err := time.ParseDuration(args[2])
	if err != nil {
		return err
	}
	name := fmt.Sprintf("contender-%d", i)
	parameters := "?pool_max_conns=8&application_name=" + name
	if ways[i].pooler {
		parameters += "&default_query_exec_mode=exec"
	}
	pool, err := pgxpool.New(context.Background(), url(args[1])+parameters)
	if err != nil {
		return err
	}
	defer pool.Close()

	var c contention
	opts := append([]pglock.Option{pglock.TTL(ttl)}, ways[i].opts...)
	if ways[i].kind.name == advisory.name {
		a, err := pglock.NewAdvisory(context.Background(), pool, opts...)
		if err != nil {
			return err
		}
		defer a.Close()
		c.lock = a.Lock("history")
	} else {
		t, err := pglock.NewTable(context.Background(), pool, opts...)
		if err != nil {
			return err
		}
		defer t.Close()
		c.lock = t.Lock("history")
		name = t.ID()
		c.write = func(ctx context.Context, h lock.Hold) error { return write(ctx, pool, t, h) }
	}

	fmt.Println(name)
	ctx, cancel := context.WithTimeout(context.Background(), length)
	defer cancel()
	var callers sync.WaitGroup
	for range 2 {
		callers.Go(func() {
			for ctx.Err() == nil {
				c.hold(ctx)
			}
		})
	}
	callers.Wait()
	data, err := json.Marshal(c.journal)
	if err != nil {
		return err
	}
	return errors.Join(c.err, os.WriteFile(args[3], data, 0o644))
}

// contention is what the callers of a contender share.
type contention struct {
	lock  lock.Locker
	write func(ctx context.Context, h lock.Hold) error // nil if there is nothing to write

	mu sync.Mutex
	journal
	err error // that no fault explains
}

// hold acquires the lock once, and writes under it, sometimes after its loss.
func (c *contention) hold(ctx context.Context) {
	h, err := c.lock.Lock(ctx, lock.Wait(2*ttl), lock.Parent(context.Background()))
	if err != nil {
		c.mu.Lock()
		c.Failed++
		c.explainLocked(err, lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate)
		c.mu.Unlock()
		sleep(ctx, rand.N(20*time.Millisecond))
		return
	}

	p := period{Begin: clock(), Token: h.Token()}
	certain := false
	work := rand.N(20 * time.Millisecond)
	if rand.N(4) == 0 {
		work = rand.N(3 * ttl)
	}
	for began := time.Now(); time.Since(began) < work && ctx.Err() == nil; time.Sleep(time.Millisecond) {
		now := clock()
		if h.Remaining() == 0 || h.Context().Err() != nil {
			break
		}
		certain = true
		p.End = now
	}
	stale := false
	if c.write != nil {
		if rand.N(20) == 0 { // it does not notice the loss
			sleep(ctx, rand.N(2*ttl))
		}
		writing, cancel := context.WithTimeout(context.Background(), 4*ttl)
		stale = errors.Is(c.write(writing, h), lock.ErrLost)
		cancel()
	}

	err = h.Unlock(context.Background())
	var loss *lock.LostError
	if errors.As(err, &loss) {
		p.Lost = loss.Reason
	}
	p.Unknown = err != nil && loss == nil
	c.mu.Lock()
	defer c.mu.Unlock()
	if certain {
		c.Periods = append(c.Periods, p)
	}
	if stale {
		c.Stale++
	}
	c.explainLocked(err, lock.ErrLost, lock.ErrUnavailable, lock.ErrIndeterminate)
}

// explainLocked notes an error that matches none of these.
func (c *contention) explainLocked(err error, of ...error) {
	if err != nil && !slices.ContainsFunc(of, func(target error) bool { return errors.Is(err, target) }) {
		c.err = errors.Join(c.err, err)
	}
}

// write writes in a transaction with Check.
func write(ctx context.Context, pool *pgxpool.Pool, t *pglock.Table, h lock.Hold) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := t.Check(ctx, tx, h); err != nil {
			return err
		}
		if rand.N(5) == 0 {
			sleep(ctx, rand.N(ttl))
		}
		_, err := tx.Exec(ctx, "INSERT INTO written (token) VALUES ($1)", h.Token())
		return err
	})
}
