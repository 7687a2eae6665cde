// Cron runs a job at regular times on one of several machines. All of them start it at the
// same time; the first to acquire the lock runs it, and the others skip it. The lock stays
// held for a while after the job, so a machine whose clock is late skips the job too.
//
//	go run ./examples/cron
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

const (
	period = 500 * time.Millisecond
	runs   = 3
	// keep is longer than the clocks of the machines differ, and shorter than period.
	keep = 300 * time.Millisecond
)

// results stands for the place where the job stores its result: a table, a bucket.
type results struct {
	mu   sync.Mutex
	last time.Time // the period of the last result
	n    int
}

// store runs the job for a period, unless it has a result. No lock prevents a second run with
// certainty: the record does.
func (r *results) store(due time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !due.After(r.last) {
		return false
	}
	r.last, r.n = due, r.n+1
	return true
}

// runOnce runs the job unless another machine runs it or has just run it.
func runOnce(ctx context.Context, client *redlatch.Client, machine string, due time.Time, r *results) error {
	// AtLeast keeps the lock after a failed job too: see docs/guides/recipes.md. MaxHold keeps
	// a job that hangs from blocking all later ones.
	hold, err := client.Lock("cron:report").TryLock(ctx, lock.AtLeast(keep), lock.MaxHold(time.Minute))
	if errors.Is(err, lock.ErrNotAcquired) {
		return nil
	}
	if err != nil {
		return err
	}
	if r.store(due) {
		fmt.Printf("%s wrote report %d\n", machine, r.n)
	}
	return hold.Unlock(ctx)
}

// machine runs the job at regular times.
func machine(ctx context.Context, url, name string, begin time.Time, r *results) error {
	client, err := redlatch.Open(ctx, url)
	if err != nil {
		return err
	}
	defer client.Close()
	for i := 1; i <= runs; i++ {
		due := begin.Add(time.Duration(i) * period)
		time.Sleep(time.Until(due))
		if err := runOnce(ctx, client, name, due, r); err != nil {
			log.Printf("%s: %v", name, err) // the next run may succeed
		}
	}
	return nil
}

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server")
	flag.Parse()
	var (
		r     results
		group sync.WaitGroup
		begin = time.Now()
	)
	for _, name := range []string{"machine A", "machine B", "machine C"} {
		group.Go(func() {
			if err := machine(context.Background(), *url, name, begin, &r); err != nil {
				log.Fatal(name, ": ", err)
			}
		})
	}
	group.Wait()
	fmt.Printf("%d runs, %d reports\n", runs, r.n)
}
