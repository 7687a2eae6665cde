package countdown_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// One waits until the others are done.
func ExampleLatch() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	parts := []string{"customers", "orders", "invoices"}

	latch := client.CountDownLatch("import:42")
	set, err := latch.TrySetCount(ctx, len(parts))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("set:", set)
	for range parts {
		go func() { // or a process elsewhere
			if _, err := client.CountDownLatch("import:42").CountDown(ctx); err != nil {
				log.Fatal(err)
			}
		}()
	}
	fmt.Println(latch.Wait(ctx))
	fmt.Println(latch.Count(ctx))
	// Output:
	// set: true
	// <nil>
	// 0 <nil>
}

// Whoever waits has a deadline, and looks at the results: a worker may have died, or
// not know whether it has counted.
func ExampleLatch_Wait() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	latch := client.CountDownLatch("import:42")
	if _, err := latch.TrySetCount(ctx, 2); err != nil {
		log.Fatal(err)
	}
	fmt.Println(done(ctx, latch)) // the other one has died

	bounded, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if err := latch.Wait(bounded); errors.Is(err, context.DeadlineExceeded) {
		fmt.Println("what is missing is done again")
	}
	fmt.Println(latch.Delete(ctx))
	// Output:
	// <nil>
	// what is missing is done again
	// true <nil>
}

// done tells that a part is done, whose result has been stored.
func done(ctx context.Context, latch *countdown.Latch) error {
	_, err := latch.CountDown(ctx)
	if errors.Is(err, lock.ErrIndeterminate) {
		// Counted or not: the result is there, and whoever waits looks at the results
		// when its deadline has passed.
		return nil
	}
	return err
}

// connect returns a client on a server for an example.
var connect = harness.Connect
