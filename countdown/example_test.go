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

// One process waits until the others are done.
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

// A waiter uses a deadline and then checks the results: a worker may have died or may
// not know whether it has counted.
func ExampleLatch_Wait() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	latch := client.CountDownLatch("import:42")
	if _, err := latch.TrySetCount(ctx, 2); err != nil {
		log.Fatal(err)
	}
	fmt.Println(done(ctx, latch)) // the other worker has died

	bounded, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if err := latch.Wait(bounded); errors.Is(err, context.DeadlineExceeded) {
		fmt.Println("redo the missing parts")
	}
	fmt.Println(latch.Delete(ctx))
	// Output:
	// <nil>
	// redo the missing parts
	// true <nil>
}

// A process works on while it waits.
func ExampleLatch_WaitChan() {
	client, stop := connect()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	latch := client.CountDownLatch("import:42")
	if _, err := latch.TrySetCountFor(ctx, 1, time.Hour); err != nil {
		log.Fatal(err)
	}
	jobs := make(chan string, 1)
	jobs <- "orders"

	imported := latch.WaitChan(ctx) // before the loop
	for {
		select {
		case job := <-jobs:
			fmt.Println("job:", job)
			if _, err := latch.CountDown(ctx); err != nil {
				log.Fatal(err)
			}
		case err := <-imported:
			fmt.Println("imported:", err)
			return
		}
	}
	// Output:
	// job: orders
	// imported: <nil>
}

// done reports that a part is done after its result has been stored.
func done(ctx context.Context, latch *countdown.Latch) error {
	_, err := latch.CountDown(ctx)
	if errors.Is(err, lock.ErrIndeterminate) {
		// Counted or not, the result is stored. The waiter checks the results when its
		// deadline passes.
		return nil
	}
	return err
}

// connect returns a client with a server for an example.
var connect = harness.Connect
