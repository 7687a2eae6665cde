package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/go-zookeeper/zk"
	"github.com/jackc/pgx/v5"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

// Locks of other services. Each contender for a lock has its own owner there: a session of etcd, a node
// of ZooKeeper, a connection to a database. etcd and ZooKeeper write waiters and holders to
// disk before they reply; the databases keep locks in memory only.

type etcd struct {
	c        *clientv3.Client
	sessions []*concurrency.Session
}

func openEtcd(_ context.Context, addrs []string) (service, error) {
	c, err := clientv3.New(clientv3.Config{Endpoints: addrs, DialTimeout: 5 * time.Second})
	if err != nil {
		return nil, err
	}
	return &etcd{c: c}, nil
}

func (s *etcd) close() {
	var wg sync.WaitGroup
	for _, session := range s.sessions {
		wg.Go(func() { _ = session.Close() })
	}
	wg.Wait()
	_ = s.c.Close()
}

func (s *etcd) operation(ctx context.Context, t task, name string) (operation, error) {
	if t.Kind != "lock" {
		return nil, unsupported(t)
	}
	if len(s.sessions) == 0 || !t.Own {
		session, err := concurrency.NewSession(s.c, concurrency.WithTTL(int(lease/time.Second)), concurrency.WithContext(ctx))
		if err != nil {
			return nil, err
		}
		s.sessions = append(s.sessions, session)
	}
	return etcdPair{concurrency.NewMutex(s.sessions[len(s.sessions)-1], "/"+name)}, nil
}

type etcdPair struct{ m *concurrency.Mutex }

func (p etcdPair) acquire(ctx context.Context) error { return p.m.Lock(ctx) }
func (p etcdPair) release(ctx context.Context) error { return p.m.Unlock(ctx) }

type zookeeper struct{ conn *zk.Conn }

func openZookeeper(_ context.Context, addrs []string) (service, error) {
	conn, _, err := zk.Connect(addrs, lease, zk.WithLogger(silent{}))
	if err != nil {
		return nil, err
	}
	return zookeeper{conn}, nil
}

type silent struct{}

func (silent) Printf(string, ...any) {}

func (s zookeeper) close() { s.conn.Close() }

func (s zookeeper) operation(_ context.Context, t task, name string) (operation, error) {
	if t.Kind != "lock" {
		return nil, unsupported(t)
	}
	return &zookeeperPair{l: zk.NewLock(s.conn, "/"+name, zk.WorldACL(zk.PermAll))}, nil
}

// zookeeperPair abandons a wait that cannot be canceled, because locks of this library take no
// context. A late lock is released.
type zookeeperPair struct {
	l interface {
		Lock() error
		Unlock() error
	}
	late chan struct{} // closed when the abandoned call ends
}

func (p *zookeeperPair) acquire(ctx context.Context) error {
	if ctx.Done() == nil {
		return p.l.Lock()
	}
	if p.late != nil {
		select {
		case <-p.late:
			p.late = nil
		case <-ctx.Done():
			return fmt.Errorf("an abandoned call still waits: %w", ctx.Err())
		}
	}
	got := make(chan error, 1)
	go func() { got <- p.l.Lock() }()
	select {
	case err := <-got:
		return err
	case <-ctx.Done():
	}
	late := make(chan struct{})
	p.late = late
	go func() {
		defer close(late)
		if <-got == nil {
			_ = p.l.Unlock()
		}
	}()
	return ctx.Err()
}

func (p *zookeeperPair) release(context.Context) error { return p.l.Unlock() }

// settle blocks until an abandoned call has ended.
func (p *zookeeperPair) settle() {
	if p.late != nil {
		<-p.late
	}
}

type postgres struct {
	addr  string
	conns []*pgx.Conn
}

func openPostgres(_ context.Context, addrs []string) (service, error) {
	return &postgres{addr: addrs[0]}, nil
}

func (s *postgres) close() {
	for _, conn := range s.conns {
		_ = conn.Close(context.Background())
	}
}

func (s *postgres) operation(ctx context.Context, t task, name string) (operation, error) {
	if t.Kind != "lock" {
		return nil, unsupported(t)
	}
	conn, err := pgx.Connect(ctx, s.addr)
	if err != nil {
		return nil, err
	}
	s.conns = append(s.conns, conn)
	return postgresPair{conn, name}, nil
}

type postgresPair struct {
	conn *pgx.Conn
	name string
}

func (p postgresPair) acquire(ctx context.Context) error {
	_, err := p.conn.Exec(ctx, "SELECT pg_advisory_lock(hashtextextended($1, 0))", p.name)
	return err
}

func (p postgresPair) release(ctx context.Context) error {
	var gave bool
	err := p.conn.QueryRow(ctx, "SELECT pg_advisory_unlock(hashtextextended($1, 0))", p.name).Scan(&gave)
	if err == nil && !gave {
		err = errors.New("pg_advisory_unlock: not held")
	}
	return err
}

type mariadb struct{ db *sql.DB }

func openMariaDB(_ context.Context, addrs []string) (service, error) {
	cfg, err := mysql.ParseDSN(addrs[0])
	if err != nil {
		return nil, err
	}
	cfg.Logger = silent{}
	c, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, err
	}
	return mariadb{sql.OpenDB(c)}, nil
}

func (silent) Print(...any) {}

func (s mariadb) close() { _ = s.db.Close() }

// operation prepares its statements, which otherwise take three round trips each.
func (s mariadb) operation(ctx context.Context, t task, name string) (operation, error) {
	if t.Kind != "lock" {
		return nil, unsupported(t)
	}
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	p := mariadbPair{name: name}
	if p.get, err = conn.PrepareContext(ctx, "SELECT GET_LOCK(?, ?)"); err != nil {
		return nil, err
	}
	p.give, err = conn.PrepareContext(ctx, "SELECT RELEASE_LOCK(?)")
	return p, err
}

type mariadbPair struct {
	get, give *sql.Stmt
	name      string
}

// acquire waits for as long as the lease of the other peers, because the statement needs a
// limit.
func (p mariadbPair) acquire(ctx context.Context) error {
	return succeeded("GET_LOCK", p.get.QueryRowContext(ctx, p.name, lease.Seconds()))
}

func (p mariadbPair) release(ctx context.Context) error {
	return succeeded("RELEASE_LOCK", p.give.QueryRowContext(ctx, p.name))
}

// succeeded checks the result of a locking function of MariaDB: 1, or 0 or NULL on failure.
func succeeded(function string, row *sql.Row) error {
	var result sql.NullInt64
	if err := row.Scan(&result); err != nil {
		return err
	}
	if result.Int64 != 1 {
		return fmt.Errorf("%s returned %d, valid %t", function, result.Int64, result.Valid)
	}
	return nil
}
