package main

import (
	"context"
	"errors"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/jackc/pgx/v5/pgxpool"
	clientv3 "go.etcd.io/etcd/client/v3"

	etcdlock "github.com/redlatch/redlatch/contrib/etcd"
	pglock "github.com/redlatch/redlatch/contrib/postgres"
	zklock "github.com/redlatch/redlatch/contrib/zookeeper"
	"github.com/redlatch/redlatch/lock/driver"
)

// onStore is redlatch on another store: a client of a process, which all its goroutines share.
type onStore struct {
	client     *driver.Client
	disconnect func()
}

func (s onStore) close() {
	s.client.Close()
	s.disconnect()
}

func (s onStore) operation(_ context.Context, t task, name string) (operation, error) {
	if t.Kind != "lock" {
		return nil, unsupported(t)
	}
	return &ourPair{l: s.client.Lock(name)}, nil
}

func openEtcdlock(ctx context.Context, addrs []string) (service, error) {
	conn, err := clientv3.New(clientv3.Config{Endpoints: addrs, DialTimeout: 5 * time.Second})
	if err != nil {
		return nil, err
	}
	c, err := etcdlock.New(ctx, conn, etcdlock.WithTTL(lease))
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return onStore{c.Client, func() { _ = conn.Close() }}, nil
}

func openZklock(ctx context.Context, addrs []string) (service, error) {
	session := zklock.NewSession(nil)
	conn, _, err := zk.Connect(addrs, lease, zk.WithDialer(session.Dial), zk.WithLogger(silent{}))
	if err != nil {
		return nil, err
	}
	c, err := zklock.New(ctx, conn, session)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return onStore{c.Client, conn.Close}, nil
}

func openAdvisory(ctx context.Context, addrs []string) (service, error) {
	pool, err := pgxpool.New(ctx, addrs[0])
	if err != nil {
		return nil, err
	}
	c, err := pglock.NewAdvisory(ctx, pool, pglock.TTL(lease))
	if err != nil {
		pool.Close()
		return nil, err
	}
	return onStore{c.Client, pool.Close}, nil
}

func openRows(ctx context.Context, addrs []string) (service, error) {
	pool, err := pgxpool.New(ctx, addrs[0]+"&pool_max_conns=100")
	if err != nil {
		return nil, err
	}
	err = pglock.CreateTable(ctx, pool)
	var c *pglock.Table
	if err == nil {
		c, err = pglock.NewTable(ctx, pool, pglock.TTL(lease))
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return onStore{c.Client, pool.Close}, nil
}
