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
	fmt.Println("held", n, "times, as one on the server:", outer.Owner() == inner.Owner())
	fmt.Println(inner.Unlock(ctx), outer.Unlock(ctx))
	// Output:
	// held 2 times, as one on the server: true
	// <nil> <nil>
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
