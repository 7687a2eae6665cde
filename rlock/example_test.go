package rlock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

// The resource rejects a token that is older than one it has seen.
func ExampleGuard() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	l := client.FencedLock("file")
	var guard rlock.Guard // beside the resource, not beside the lock

	late, err := l.Lock(ctx, lock.Lease(time.Second))
	if err != nil {
		log.Fatal(err)
	}
	next, err := l.Lock(ctx) // when the lease of the first is over
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(next.Token(), guard.Check(next.Token()))
	fmt.Println(late.Token(), errors.Is(guard.Check(late.Token()), rlock.ErrStaleToken))
	fmt.Println(next.Unlock(ctx))
	// Output:
	// 2 <nil>
	// 1 true
	// <nil>
}

func ExampleNonReentrant() {
	client, stop := connect()
	defer stop()
	ctx := lock.WithOwner(context.Background(), client.NewOwner())
	l := client.Lock("orders", rlock.NonReentrant())
	err := l.Do(ctx, func(ctx context.Context) error {
		_, err := l.Lock(ctx)
		return err
	})
	fmt.Println(errors.Is(err, lock.ErrReentered))
	// Output: true
}

func ExampleConstantBackoff() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	l := client.SpinLock("counter", rlock.ConstantBackoff(5*time.Millisecond))
	fmt.Println(l.Do(ctx, func(context.Context) error { return nil }))
	// Output: <nil>
}

// Programs that use redsync, redislock or SET NX on the same key are kept out.
func ExamplePlain() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	l := client.PlainLock("orders")
	h, err := l.Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	_, err = l.TryLock(ctx)
	fmt.Println(errors.Is(err, lock.ErrNotAcquired))
	fmt.Println(h.Unlock(ctx))
	// Output:
	// true
	// <nil>
}

// connect returns a client on a server for an example.
var connect = harness.Connect
