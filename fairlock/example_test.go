package fairlock_test

import (
	"context"
	"fmt"
	"log"
	"sync"
	"time"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// Waiters acquire the lock in the order of their arrival.
func ExampleLock() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	l := client.FairLock("orders")

	hold, err := l.Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	var waiters sync.WaitGroup
	for i, name := range []string{"first", "second", "third"} {
		waiters.Go(func() {
			err := l.Do(ctx, func(context.Context) error {
				fmt.Println(name)
				return nil
			})
			if err != nil {
				log.Fatal(err)
			}
		})
		wait(l, i+1)
	}
	if err := hold.Unlock(ctx); err != nil {
		log.Fatal(err)
	}
	waiters.Wait()
	// Output:
	// first
	// second
	// third
}

func ExampleLock_Queue() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	l := client.FairLock("orders")

	hold, err := l.Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- l.Do(ctx, func(context.Context) error { return nil }) }()
	wait(l, 1)
	queue, err := l.Queue(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, waiter := range queue {
		fmt.Println(waiter.Owner != lock.OwnerOf(hold), time.Until(waiter.Deadline) > 0)
	}
	fmt.Println(hold.Unlock(ctx), <-done)
	// Output:
	// true true
	// <nil> <nil>
}

// wait blocks until the lock has n waiters.
func wait(l *fairlock.Lock, n int) {
	for {
		queue, err := l.Queue(context.Background())
		if err != nil {
			log.Fatal(err)
		}
		if len(queue) == n {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// connect returns a client on a server for an example.
var connect = harness.Connect
