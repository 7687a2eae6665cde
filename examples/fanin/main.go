// Fanin splits a job into parts, which workers process, and continues when all are done. The
// workers could be other processes: they only need the name of the job.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

const parts = 4

// results has one entry for each part. Storing it twice is harmless.
var results sync.Map

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server")
	flag.Parse()
	ctx := context.Background()
	client, err := redlatch.Open(ctx, *url)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	latch := client.CountDownLatch("job:42")
	if _, err := latch.TrySetCount(ctx, parts); err != nil {
		log.Fatal(err)
	}
	var workers sync.WaitGroup
	for part := 1; part <= parts; part++ {
		workers.Go(func() { work(ctx, client, part) })
	}
	defer workers.Wait()

	// The wait needs a deadline: a worker that dies does not count down.
	bounded, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := latch.Wait(bounded); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		log.Fatal(err)
	}
	// The results show what was done, not the count.
	var line strings.Builder
	line.WriteString("all parts are done:")
	for part := 1; part <= parts; part++ {
		result, ok := results.Load(part)
		if !ok {
			log.Fatalf("part %d is missing", part)
		}
		fmt.Fprint(&line, " ", result)
	}
	fmt.Println(line.String())
}

func work(ctx context.Context, client *redlatch.Client, part int) {
	results.Store(part, part*part) // before the count-down
	left, err := client.CountDownLatch("job:42").CountDown(ctx)
	switch {
	case errors.Is(err, lock.ErrIndeterminate):
		// It may have counted. Counting again could end the wait before another part is done.
		// If it has not counted, the wait ends with its deadline, and the result is stored.
		fmt.Printf("part %d is done, and may have been counted\n", part)
	case err != nil:
		log.Fatal(err)
	default:
		fmt.Printf("part %d is done, %d left\n", part, left)
	}
}
