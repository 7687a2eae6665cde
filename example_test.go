package redlatch_test

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

func Example() {
	server, err := redlatchtest.Start() // instead of your server
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()

	ctx := context.Background()
	client, err := redlatch.Open(ctx, server.URL())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	err = client.Lock("orders").Do(ctx, func(ctx context.Context) error {
		fmt.Println("shipping exclusively")
		return ctx.Err() // ctx ends if the lock is lost
	})
	fmt.Println(err)
	// Output:
	// shipping exclusively
	// <nil>
}

func ExampleOpen_options() {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()

	ctx := context.Background()
	client, err := redlatch.Open(ctx, server.URL(),
		redlatch.WithWatchdogTimeout(10*time.Second), // lease of a dead process's locks
		redlatch.WithNameMapper(func(name string) string { return "shop:" + name }),
	)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	fmt.Println(client.Ping(ctx))
	// Output: <nil>
}

func ExampleNew() {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()

	ctx := context.Background()
	opt, err := redlatch.ParseURL(server.URL())
	if err != nil {
		log.Fatal(err)
	}
	opt.ClientName = "shop"
	client, err := redlatch.New(ctx, opt)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	fmt.Println(client.Ping(ctx))
	// Output: <nil>
}

func ExampleClient_Lock() {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	ctx := context.Background()
	client, err := redlatch.Open(ctx, server.URL())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	h, err := client.Lock("orders").Lock(ctx, lock.Wait(time.Second), lock.Lease(time.Minute))
	if err != nil {
		log.Fatal(err)
	}
	_, err = client.Lock("orders").TryLock(ctx)
	fmt.Println("taken:", errors.Is(err, lock.ErrNotAcquired))
	fmt.Println("certain for nearly a minute:", h.Remaining() > 50*time.Second)
	fmt.Println(h.Unlock(ctx))
	// Output:
	// taken: true
	// certain for nearly a minute: true
	// <nil>
}
