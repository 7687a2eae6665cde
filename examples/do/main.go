// Do runs a function under a lock. The lock is renewed while the function runs and released in
// any case.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/redlatch/redlatch/examples/internal/demo"
	"github.com/redlatch/redlatch/lock"
)

func main() {
	ctx := context.Background()
	client, stop := demo.Client(ctx)
	defer stop()

	err := client.Lock("report:2026-11").Do(ctx, func(ctx context.Context) error {
		fmt.Println("writing the report exclusively")
		select {
		case <-time.After(100 * time.Millisecond): // the work
			return nil
		case <-ctx.Done(): // the lock was lost, or the caller canceled
			return context.Cause(ctx)
		}
	})
	if errors.Is(err, lock.ErrLost) {
		log.Fatal("another process may have written it too: ", err)
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("done")
}
