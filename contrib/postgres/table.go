package pglock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/lock/driver"
)

// Table makes locks that are rows of a table, with a lease and a fencing token. NewTable creates it. The read side of an
// RWLock, and Semaphore, are not supported.
type Table struct {
	*driver.Client
	d *table
}

// NewTable returns a client whose requests use the connections of pool, which may go through a pooler. It blocks until it
// has seen that the table is there or ctx ends, for 5 s at most.
//
// The error matches lock.ErrInvalid for an invalid option, lock.ErrUnavailable if the server cannot be reached or is a
// standby, and lock.ErrUnsupported if synchronous_commit is off: after a crash the server would not know the latest holder.
// If there is no such table it is the server's error; CreateTable creates one.
func NewTable(ctx context.Context, pool *pgxpool.Pool, opts ...Option) (*Table, error) {
	c, err := resolve(tableKind, pool, opts)
	if err != nil {
		return nil, configured(ctx, tableStore, err)
	}

	d := newTable(pool, c)
	if err := d.verify(ctx); err != nil {
		d.cancel()
		return nil, configured(ctx, tableStore, err)
	}
	d.start()
	return &Table{driver.NewClient(d, c.client...), d}, nil
}

// CreateTable creates the table, unless it exists. Only Named counts among the options. It blocks until the server has
// answered or ctx ends.
func CreateTable(ctx context.Context, pool *pgxpool.Pool, opts ...Option) error {
	c, err := resolve(tableKind, pool, opts)
	if err != nil {
		return configured(ctx, tableStore, err)
	}

	d := newTable(pool, c)
	defer d.cancel()
	d.pooled = true // it is not known
	for range 3 {   // two processes that create it at the same time disturb each other
		_, err = d.run(ctx, d.sql.create)
		pg := serverError(err)
		if pg == nil || !slices.Contains([]string{codeUniqueness, codeTableExists, codeTypeExists}, pg.Code) {
			break
		}
	}
	if err != nil {
		return configured(ctx, tableStore, err)
	}
	return nil
}

// Check makes the rest of a transaction safe against a loss of the lock that nobody has noticed yet: it returns nil if h has
// the lock, and until tx ends no other client can acquire it. So a process that was paused, or cut off, cannot commit what
// it has begun under a lock that another one has. It blocks for one round trip, and the transaction should be short: a client
// that acquires the lock after the end of h waits for it.
//
// The error matches lock.ErrLost if h does not have the lock, and otherwise it is the error of the library, for example that
// a transaction of isolation level REPEATABLE READ or SERIALIZABLE has to be repeated: Check should be its first statement.
// The transaction has to be rolled back. h has to be a hold of a Table with the same table.
func (t *Table) Check(ctx context.Context, tx pgx.Tx, h lock.Hold) error {
	refuse := func(err error) error {
		name := ""
		if h != nil {
			name = h.Name()
		}
		return &lock.Error{Op: "check token", Kind: tableStore, Name: name, Err: err}
	}
	if h == nil || tx == nil {
		return refuse(invalid("the hold or the transaction is nil"))
	}

	owner := lock.OwnerOf(h)
	found, err := tx.Exec(ctx, t.d.sql.check, t.d.args(h.Name(), owner.String(), h.Token())...)
	if err != nil {
		return refuse(err)
	}
	if found.RowsAffected() == 0 {
		return refuse(&lock.LostError{Name: h.Name(), Owner: owner, Reason: lock.ReasonGone, When: time.Now()})
	}
	return nil
}

// Prune deletes the rows of locks that nobody has had for that long, at least a minute, and returns their number. The tokens
// of these locks go on rising. It reads the whole table, and blocks until the server has answered or ctx ends.
func (t *Table) Prune(ctx context.Context, unused time.Duration) (int64, error) {
	refuse := func(err error) (int64, error) {
		return 0, &lock.Error{Op: "delete", Kind: tableStore, Name: t.d.name, Err: err}
	}
	if unused < time.Minute {
		return refuse(invalid("unused for %v: must be at least a minute", unused))
	}
	deleted, err := t.d.run(ctx, t.d.sql.prune, unused.Seconds())
	if err != nil {
		return refuse(err)
	}
	return deleted.RowsAffected(), nil
}

const tableStore = "postgres-table"

// table is the driver of a Table.
type table struct {
	config
	pool   *pgxpool.Pool
	name   string
	sql    statements
	pooled bool
	grace  time.Duration
	gates  gates[string]

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu       sync.Mutex
	claims   map[*tableClaim]struct{} // those that are granted
	left     map[request]leftover     // what is to be removed
	waiters  map[string]chan struct{} // by owner: woken by its turn
	listener *session                 // nil if none is connected
	kick     chan struct{}            // has what is left removed
	clock    serverClock
}

// serverClock is what the latest answer has shown of the clock of the server. The mutex of the table guards it.
type serverClock struct {
	now  float64   // in seconds
	read time.Time // when the answer came, so that the server is a little ahead of this
}

func (d *table) heardClock(now float64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.clock = serverClock{now, time.Now()}
}

// onServer returns a time by the clock of the server.
func (d *table) onServer(t time.Time) float64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.clock.now + t.Sub(d.clock.read).Seconds()
}

// request identifies a claim, or a place in a queue.
type request struct{ name, owner string }

// margin is how much earlier than the server the client ends a lease: the clock of the server may be faster by a thousandth,
// which is twice what NTP corrects, and the timer that ends the hold fires a moment late.
func margin(lease time.Duration) time.Duration { return lease/1000 + 10*time.Millisecond }

// seconds returns the seconds of a lease for the server.
func seconds(lease time.Duration) float64 { return (lease + margin(lease)).Seconds() }

func newTable(pool *pgxpool.Pool, c config) *table {
	d := &table{
		config: c, pool: pool, name: c.table.Sanitize(),
		claims: make(map[*tableClaim]struct{}), left: make(map[request]leftover), waiters: make(map[string]chan struct{}),
		kick: make(chan struct{}, 1),
	}
	d.sql = newStatements(c.table)
	// The first in the queue has its poll, and some time for the request.
	d.grace = max(time.Second, 2*c.poll+500*time.Millisecond)
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d
}

// args returns the arguments of a statement. Behind a pooler statements are not prepared.
func (d *table) args(args ...any) []any {
	if d.pooled {
		return append([]any{pgx.QueryExecModeExec}, args...)
	}
	return args
}

// run runs a statement that may take long.
func (d *table) run(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	conn, err := d.pool.Acquire(ctx)
	if err != nil {
		return pgconn.CommandTag{}, notSent(err)
	}
	defer conn.Release()
	tag, err := conn.Exec(ctx, sql, d.args(args...)...)
	if err != nil {
		return tag, failed(err)
	}
	return tag, nil
}

// exec runs a statement without a result.
func (d *table) exec(ctx context.Context, sql string, args ...any) error {
	return d.query(ctx, sql, func(pgx.Rows) error { return nil }, args...)
}

// query runs a statement, and calls row for each row. It blocks until there is a connection, and then for patience at most.
func (d *table) query(ctx context.Context, sql string, row func(pgx.Rows) error, args ...any) error {
	return d.queryBy(ctx, sql, row, func(time.Time) []any { return args })
}

// queryBy is query with arguments that are made when there is a connection, and know when the client gives up.
func (d *table) queryBy(ctx context.Context, sql string, row func(pgx.Rows) error, args func(deadline time.Time) []any) error {
	conn, err := d.pool.Acquire(ctx)
	if err != nil {
		return notSent(err)
	}
	defer conn.Release()

	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	deadline, _ := ctx.Deadline()
	rows, err := conn.Query(ctx, sql, d.args(args(deadline)...)...)
	if err != nil {
		return failed(err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := row(rows); err != nil {
			return storeError{err}
		}
	}
	if err := rows.Err(); err != nil {
		return failed(err)
	}
	return nil
}

// verify looks at the server and at the table.
func (d *table) verify(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	conn, err := d.pool.Acquire(ctx)
	if err != nil {
		return notSent(err)
	}
	defer conn.Release()

	var pid int64
	var standby bool
	var commit string
	var now float64
	err = conn.QueryRow(ctx, `SELECT pg_backend_pid()::bigint, pg_is_in_recovery(), current_setting('synchronous_commit'),
		extract(epoch FROM clock_timestamp())::float8`, pgx.QueryExecModeExec).Scan(&pid, &standby, &commit, &now)
	if err != nil {
		return refused(err)
	}
	d.heardClock(now)
	d.pooled = pid != int64(conn.Conn().PgConn().PID())
	if standby {
		return unavailable(errors.New("the server is a standby"))
	}
	if commit == "off" {
		return fmt.Errorf("%w: synchronous_commit is off", lock.ErrUnsupported)
	}

	_, err = conn.Exec(ctx, d.sql.verify, pgx.QueryExecModeExec)
	if pg := serverError(err); pg != nil && pg.Code == codeNoTable {
		return fmt.Errorf("the table is missing (see CreateTable): %w", refused(err))
	}
	if err != nil {
		return refused(err)
	}
	var unique bool
	if err := conn.QueryRow(ctx, d.sql.unique, pgx.QueryExecModeExec, d.name).Scan(&unique); err != nil {
		return refused(err)
	}
	if !unique {
		return fmt.Errorf("%w: the column token of the table has no unique index (see CreateTable)", lock.ErrUnsupported)
	}
	return nil
}

func (d *table) start() {
	d.work.Go(d.tend)
	direct := cmp.Or(d.listen, d.pool)
	if !d.polling && (d.listen != nil || !d.pooled) {
		d.work.Go(func() { d.listenFor(dialer{direct, d.ttl}) })
	}
}

// Store implements driver.Driver.
func (d *table) Store() string { return tableStore }

// CheckName implements driver.Driver.
func (d *table) CheckName(name string) error { return checkText("the name", name, maxName) }

// Acquire implements driver.Driver.
func (d *table) Acquire(ctx context.Context, r driver.Request) (driver.Claim, error) {
	if r.Permits > 0 || r.Shared {
		return nil, fmt.Errorf("%w: a row has one holder; Advisory has read-write locks", lock.ErrUnsupported)
	}

	c := &tableClaim{
		d: d, request: request{r.Name, r.Owner.String()}, lost: r.Lost, lease: cmp.Or(r.Lease, d.ttl), renewed: r.Lease == 0,
		failFast: r.FailFast,
	}
	if r.Try {
		if err := d.takeOnce(ctx, c); err != nil {
			d.giveUp(c)
			return nil, err
		}
		return c, nil
	}

	g, e := d.gates.enter(ctx, r.Name, false, urgency{failFast: r.FailFast})
	if e.err != nil {
		return nil, e.err
	}
	c.gate = g
	if err := d.take(ctx, c); err != nil {
		d.giveUp(c)
		g.leave(nil)
		return nil, err
	}
	return c, nil
}

// take asks for the lock until the claim has it.
func (d *table) take(ctx context.Context, c *tableClaim) error {
	woken := make(chan struct{}, 1)
	d.mu.Lock()
	d.waiters[c.owner] = woken
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		delete(d.waiters, c.owner)
		d.mu.Unlock()
	}()

	for {
		err := d.takeOnce(ctx, c)
		if errors.Is(err, lock.ErrNotAcquired) && c.place == 0 && ctx.Err() == nil {
			// A release after the next attempt sees it in the queue.
			if err = d.enqueue(ctx, c); err == nil {
				err = d.takeOnce(ctx, c)
			}
		}
		if err == nil {
			c.gate.heard(nil)
			return nil
		}

		refused := errors.Is(err, lock.ErrNotAcquired)
		if refused {
			c.gate.heard(nil)
		} else if temporary(err) {
			c.gate.heard(err)
		}
		if !refused && (c.failFast || !temporary(err)) {
			return err
		}

		timer := time.NewTimer(d.pause(c, refused))
		select {
		case <-woken:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
		timer.Stop()
	}
}

// safetyPoll bounds the time for which a lost notification goes unnoticed.
const safetyPoll = 5 * time.Second

// pause returns the time until the next attempt, unless a notification comes before.
func (d *table) pause(c *tableClaim, refused bool) time.Duration {
	if !refused {
		return retryPause
	}
	d.mu.Lock()
	listens := d.listener != nil
	d.mu.Unlock()

	pause := d.poll
	if listens {
		pause = safetyPoll
	}
	free := c.freeIn
	if free <= 0 { // it is the turn of other clients, which may be dead
		free += time.Duration(max(1, c.place-1)) * d.grace
	}
	return max(minPoll, min(pause, free+time.Millisecond))
}

// errLate means that the server has ignored a request whose deadline was over by its clock, which the client may know badly.
var errLate = unavailable(errors.New("the request came late"))

// takeOnce makes one attempt. The error matches lock.ErrNotAcquired if others have the lock or are first.
func (d *table) takeOnce(ctx context.Context, c *tableClaim) error {
	err := d.ask(ctx, c)
	if err == errLate { // the answer has shown the clock
		err = d.ask(ctx, c)
	}
	return err
}

func (d *table) ask(ctx context.Context, c *tableClaim) error {
	var sent time.Time
	var deadline float64
	var granted, had, late bool
	bounded, cancel := bound(ctx, c.failFast)
	defer cancel()
	err := d.queryBy(bounded, d.sql.take, func(row pgx.Rows) error {
		var free, now float64
		if err := row.Scan(&c.token, &granted, &had, &free, &c.place, &now); err != nil {
			return err
		}
		c.freeIn = time.Duration(free * float64(time.Second))
		late = now >= deadline && c.freeIn <= 0
		d.heardClock(now)
		return nil
	}, func(gaveUp time.Time) []any {
		sent = time.Now()
		deadline = d.onServer(gaveUp)
		c.gaveUp = gaveUp
		c.asks(c.lease, gaveUp)
		return []any{c.name, c.owner, seconds(c.lease), d.grace.Seconds(), deadline}
	})
	if err == nil && !granted && had && c.freeIn > 0 {
		// The reply to an earlier attempt was lost, and not much of that lease may be left.
		sent = time.Now()
		granted, err = c.extend(bounded, c.lease)
	}

	if err != nil {
		return c.cutShort(ctx, err)
	}
	if !granted && late {
		return errLate
	}
	if !granted {
		c.refused = true
		return lock.ErrNotAcquired
	}
	c.until = sent.Add(c.lease)
	d.mu.Lock()
	d.claims[c] = struct{}{}
	d.mu.Unlock()
	return nil
}

// enqueue takes a place in the queue.
func (d *table) enqueue(ctx context.Context, c *tableClaim) error {
	bounded, cancel := bound(ctx, c.failFast)
	defer cancel()
	c.queued = true
	err := d.queryBy(bounded, d.sql.enqueue, func(pgx.Rows) error { return nil }, func(gaveUp time.Time) []any {
		c.gaveUp = gaveUp
		return []any{c.name, c.owner, d.onServer(gaveUp)}
	})
	if err != nil {
		return c.cutShort(ctx, err)
	}
	return nil
}
