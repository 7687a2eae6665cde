package lock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

// All acquisitions under a context with an owner act as one logical thread.
func ExampleWithOwner() {
	client, stop := connect()
	defer stop()
	l := client.Lock("account")

	owner := client.NewOwner()
	ctx := lock.WithOwner(context.Background(), owner)
	outer, err := l.Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	inner, err := l.Lock(ctx) // does not wait for itself
	if err != nil {
		log.Fatal(err)
	}
	n, _ := l.HoldCount(ctx, owner)
	fmt.Println("held", n, "times, as one on the server:", lock.OwnerOf(outer) == lock.OwnerOf(inner))
	fmt.Println(inner.Unlock(ctx), outer.Unlock(ctx))
	// Output:
	// held 2 times, as one on the server: true
	// <nil> <nil>
}

// An error tells which of two nested locks has failed, and whether it is that of a lock at all.
func ExampleError() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	order, stock := client.Lock("order:7"), client.FairLock("stock")

	ship := func() {
		err := order.Do(ctx, func(ctx context.Context) error {
			return stock.Do(ctx, func(context.Context) error {
				return errors.New("no box is large enough")
			}, lock.Wait(0))
		}, lock.Wait(0))

		var failed *lock.Error
		if errors.As(err, &failed) {
			fmt.Printf("%s %s %q: %t\n", failed.Op, failed.Kind, failed.Name, errors.Is(err, lock.ErrNotAcquired))
		} else {
			fmt.Println("the work:", err)
		}
	}

	for _, held := range []lock.Locker{order, stock} {
		h, err := held.Lock(ctx)
		if err != nil {
			log.Fatal(err)
		}
		ship()
		if err := h.Unlock(ctx); err != nil {
			log.Fatal(err)
		}
	}
	ship()
	// Output:
	// acquire lock "order:7": true
	// acquire fair "stock": true
	// the work: no box is large enough
}

// The context of a hold ends when the lock is lost.
func ExampleLostError() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()

	h, err := client.Lock("orders").Lock(ctx, lock.Lease(50*time.Millisecond))
	if err != nil {
		log.Fatal(err)
	}
	<-h.Context().Done()
	var lost *lock.LostError
	if errors.As(context.Cause(h.Context()), &lost) {
		fmt.Println(lost.Name, "-", lost.Reason)
	}
	fmt.Println("Unlock reports it too:", errors.Is(h.Unlock(ctx), lock.ErrLost))
	// Output:
	// orders - lease expired
	// Unlock reports it too: true
}

// connect returns a client with a server for an example.
func connect() (*redlatch.Client, func()) {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	client, err := redlatch.Open(context.Background(), server.URL())
	if err != nil {
		log.Fatal(err)
	}
	return client, func() {
		client.Close()
		server.Close()
	}
}
