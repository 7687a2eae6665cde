package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	etcdlock "github.com/redlatch/redlatch/contrib/etcd"
	"github.com/redlatch/redlatch/lock"
)

// One process at a time ships. Its context ends if it loses the lock.
func Example() { //nolint:testableexamples // it needs etcd
	etcd, err := clientv3.New(clientv3.Config{
		Endpoints:            []string{"localhost:2379"},
		DialKeepAliveTime:    5 * time.Second, // for members that hang
		DialKeepAliveTimeout: 2 * time.Second,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer etcd.Close()
	ctx := context.Background()
	locks, err := etcdlock.New(ctx, etcd)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	err = locks.Lock("orders").Do(ctx, func(ctx context.Context) error {
		fmt.Println("shipping exclusively")
		return ctx.Err()
	}, lock.Wait(5*time.Second))
	if errors.Is(err, lock.ErrNotAcquired) {
		fmt.Println("another process ships")
	} else if err != nil {
		log.Fatal(err)
	}
}

// A write to etcd that is made only if the lock is held at that moment.
func ExampleClient_IsOwner() { //nolint:testableexamples // it needs etcd
	etcd, err := clientv3.NewFromURL("http://localhost:2379")
	if err != nil {
		log.Fatal(err)
	}
	defer etcd.Close()
	ctx := context.Background()
	locks, err := etcdlock.New(ctx, etcd)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	h, err := locks.Lock("orders/7").Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer h.Unlock(ctx)
	resp, err := etcd.Txn(ctx).If(locks.IsOwner(h)).Then(clientv3.OpPut("state/orders/7", "shipped")).Commit()
	if err != nil {
		log.Fatal(err)
	}
	if !resp.Succeeded {
		fmt.Println("the lock was lost:", context.Cause(h.Context()))
	}
}
