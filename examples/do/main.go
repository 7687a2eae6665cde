// Do runs a function under a lock. The lock is renewed for as long as the
// function runs, and given back whatever happens in it.
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
		fmt.Println("writing the report; nobody else does")
		select {
		case <-time.After(100 * time.Millisecond): // the work
			return nil
		case <-ctx.Done(): // the lock was lost, or the caller gave up
			return context.Cause(ctx)
		}
	})
	if errors.Is(err, lock.ErrLost) {
		log.Fatal("somebody else may have written it too: ", err)
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("done")
}
