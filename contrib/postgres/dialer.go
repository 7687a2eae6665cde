package pglock

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/redlatch/redlatch/lock"
)

// dialer makes sessions.
type dialer struct {
	pool *pgxpool.Pool
	ttl  time.Duration
}

// connect connects a session and has setUp, which makes a request, prepare the connection. The error matches
// lock.ErrUnsupported behind a pooler. onNotify may be nil.
func (d dialer) connect(
	ctx context.Context, setUp func(context.Context, *pgx.Conn) error, onEnd func(*session, error), onNotify func(string),
) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	conn, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}

	err = d.configure(ctx, conn)
	sent := time.Now()
	if err == nil {
		err = setUp(ctx, conn)
	}
	if err == nil {
		err = conn.PgConn().SyncConn(ctx)
	}
	var hijacked *pgconn.HijackedConn
	if err == nil {
		hijacked, err = conn.PgConn().Hijack()
	}
	if err != nil {
		closing, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		_ = conn.Close(closing)
		return nil, refused(err)
	}

	raw := hijacked.Conn
	if wrapped, ok := raw.(*tls.Conn); ok {
		raw = wrapped.NetConn()
	}
	d.keepAlive(raw)
	_ = hijacked.Conn.SetDeadline(time.Time{})
	s := &session{
		conn: hijacked.Conn, raw: raw, front: hijacked.Frontend, pid: hijacked.PID, ttl: d.ttl, onEnd: onEnd, onNotify: onNotify,
		reader: make(chan struct{}, 1), read: make(chan struct{}), sent: sent,
		claims: make(map[*advisoryClaim]struct{}),
	}
	s.confirmed.Store(&sent)
	s.reader <- struct{}{}
	go s.watch()
	return s, nil
}

const (
	connectTimeout = 5 * time.Second
	closeTimeout   = time.Second
	writeTimeout   = time.Second // the buffers of a connection have room for more than ten thousand requests
)

// dial connects like the pool.
func (d dialer) dial(ctx context.Context) (*pgx.Conn, error) {
	c := d.pool.Config()
	if c.BeforeConnect != nil {
		if err := c.BeforeConnect(ctx, c.ConnConfig); err != nil {
			return nil, unavailable(err)
		}
	}
	conn, err := pgx.ConnectConfig(ctx, c.ConnConfig)
	if err != nil {
		return nil, unavailable(err)
	}
	if c.AfterConnect == nil {
		return conn, nil
	}
	if err := c.AfterConnect(ctx, conn); err != nil {
		_ = conn.Close(ctx)
		return nil, unavailable(err)
	}
	return conn, nil
}

// configure prepares a session that lasts: it has no time limits of its own, and the server ends it after silence.
func (d dialer) configure(ctx context.Context, conn *pgx.Conn) error {
	// The server waits a quarter longer than the client, whose holds have ended by then.
	patience := d.ttl + d.ttl/4
	idle := max(time.Second, (d.ttl / 3).Truncate(time.Second))
	interval := max(time.Second, (d.ttl / 10).Truncate(time.Second))
	probes := (patience-idle+interval-1)/interval + 1
	settings := map[string]time.Duration{
		"statement_timeout": 0, "lock_timeout": 0, "idle_session_timeout": 0, "transaction_timeout": 0,
		"tcp_user_timeout":        patience / time.Millisecond,
		"tcp_keepalives_idle":     idle / time.Second,
		"tcp_keepalives_interval": interval / time.Second,
		"tcp_keepalives_count":    probes,
	}
	var names, values []string
	for name, value := range settings {
		names = append(names, name)
		values = append(values, strconv.FormatInt(int64(value), 10))
	}

	// A pooler may run the next statement in another session, so nothing here is prepared.
	var pid uint32
	var standby bool
	err := conn.QueryRow(ctx, `SELECT pg_backend_pid()::bigint, pg_is_in_recovery()`, pgx.QueryExecModeExec).Scan(&pid, &standby)
	if err != nil {
		return err
	}
	if pid != conn.PgConn().PID() {
		return fmt.Errorf("%w: there is a pooler between the client and the server: sessions need a direct connection", lock.ErrUnsupported)
	}
	if standby {
		return unavailable(errors.New("the server is a standby"))
	}

	// Settings that an older server does not have are left out.
	_, err = conn.Exec(ctx, `SELECT set_config(s.name, v.value, false)
		FROM unnest($1::text[], $2::text[]) AS v(name, value) JOIN pg_settings s ON s.name = v.name`,
		pgx.QueryExecModeExec, names, values)
	if err != nil {
		return err
	}

	// Not every operating system of a server has it.
	_, err = conn.Exec(ctx, `SELECT set_config(name, $1::text, false) FROM pg_settings WHERE name = 'client_connection_check_interval'`,
		pgx.QueryExecModeExec, strconv.FormatInt((d.ttl/4).Milliseconds(), 10))
	if pg := serverError(err); pg != nil && !ends(pg) {
		return nil
	}
	return err
}

// keepAlive has the connection fail if the host of the server is silent. A session that waits is not asked otherwise.
func (d dialer) keepAlive(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: d.ttl / 3, Interval: max(time.Second, d.ttl/6), Count: 4})
	}
}
