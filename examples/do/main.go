// Do runs a function under a lock. The lock is renewed while the function runs and released in
// any case.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server")
	flag.Parse()
	ctx := context.Background()
	client, err := redlatch.Open(ctx, *url)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	err = client.Lock("report:2026-11").Do(ctx, func(ctx context.Context) error {
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
