//go:build linux

package etcdlock_test

import (
	"context"
	"errors"
	"log"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	clientv3 "go.etcd.io/etcd/client/v3"

	etcdlock "github.com/redlatch/redlatch/contrib/etcd"
	"github.com/redlatch/redlatch/lock"
)

var shipped int

// ship is not safe for concurrent use.
func ship(context.Context) error { shipped++; return nil }

// run ships the orders, unless another process does.
func run(ctx context.Context, orders lock.Locker) error {
	err := orders.Do(ctx, ship, lock.Wait(5*time.Second))
	if errors.Is(err, lock.ErrNotAcquired) {
		return nil
	}
	return err
}

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}

func onEtcd(ctx context.Context, url string) {
	etcd, err := clientv3.NewFromURL(url)
	check(err)
	defer etcd.Close()
	client, err := etcdlock.New(ctx, etcd)
	check(err)
	defer client.Close()
	check(run(ctx, client.Lock("orders")))
}

// The program of the guide has its lock to itself.
func TestProgram(t *testing.T) {
	t.Parallel()
	url := "http://" + shared(t)
	shipped = 0
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() { onEtcd(t.Context(), url) })
	}
	all.Wait()
	assert.Equal(t, 4, shipped)
}
