// Fair serves waiters in order of arrival: three workers request the printer one after the
// other and acquire it in that order. The server keeps the queue for all processes.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"github.com/redlatch/redlatch"
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

	printer := client.FairLock("printer")
	hold, err := printer.Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	var wg sync.WaitGroup
	for worker := 1; worker <= 3; worker++ {
		wg.Go(func() {
			if err := work(ctx, client, worker); err != nil {
				log.Fatal(err)
			}
		})
		if err := waiting(ctx, client, worker); err != nil {
			log.Fatal(err)
		}
		fmt.Printf("worker %d is in the queue\n", worker)
	}
	if err := hold.Unlock(ctx); err != nil {
		log.Fatal(err)
	}
	wg.Wait()
}

func work(ctx context.Context, client *redlatch.Client, worker int) error {
	return client.FairLock("printer").Do(ctx, func(ctx context.Context) error {
		fmt.Printf("worker %d prints\n", worker)
		return ctx.Err() // ctx ends if the lock is lost
	})
}

// waiting waits until n callers are in the queue.
func waiting(ctx context.Context, client *redlatch.Client, workers int) error {
	for {
		queue, err := client.FairLock("printer").Queue(ctx)
		if err != nil || len(queue) >= workers {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}
