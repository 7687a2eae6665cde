// Cron runs a job at regular times on one of several machines. All of them start it, each by its own
// clock. The first runs it, and the others wait until it has succeeded. If it fails, the next machine
// repeats it. After a signal no job begins, and one that has begun ends.
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
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
)

const (
	period = 500 * time.Millisecond
	runs   = 3
)

// machines are the names of the machines, with the time by which the clock of each is late.
var machines = map[string]time.Duration{
	"machine A": 0, "machine B": 20 * time.Millisecond, "machine C": 200 * time.Millisecond,
}

// results stands for the place where the job stores its result: a table, a bucket.
type results struct {
	mu     sync.Mutex
	stored map[time.Time]bool // by the time at which the report was due
	failed bool
}

var errFull = errors.New("the disk is full")

// store stores the report that was due at that time, unless it is there. No lock prevents a second run
// with certainty: the record does. The second report fails at first.
func (r *results) store(machine string, due time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.stored) == 1 && !r.failed {
		r.failed = true
		return errFull
	}
	if !r.stored[due] {
		r.stored[due] = true
		fmt.Printf("%s wrote report %d\n", machine, len(r.stored))
	}
	return nil
}

// machine runs the job at regular times, until ctx ends.
func machine(ctx context.Context, url, name string, late time.Duration, begin time.Time, r *results) error {
	client, err := redlatch.Open(ctx, url)
	if err != nil {
		return err
	}
	defer client.Close()
	job := client.Once("report")
	work := context.WithoutCancel(ctx) // a signal ends a wait, but no work
	for i := 1; i <= runs; i++ {
		due := begin.Add(time.Duration(i) * period)
		select {
		case <-time.After(time.Until(due.Add(late))):
		case <-ctx.Done():
			return nil
		}
		// MaxHold keeps a job that hangs from blocking the others that wait.
		_, err := job.Run(ctx, once.At(due), func(context.Context) error { return r.store(name, due) },
			lock.Parent(work), lock.MaxHold(time.Minute))
		if err != nil && ctx.Err() == nil {
			log.Printf("%s: %v", name, err) // another machine, or the next run, may succeed
		}
	}
	return nil
}

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	var (
		r     = results{stored: map[time.Time]bool{}}
		group sync.WaitGroup
		begin = time.Now().Truncate(period) // all machines know the times at which the job is due
	)
	for name, late := range machines {
		group.Go(func() {
			if err := machine(ctx, *url, name, late, begin, &r); err != nil && ctx.Err() == nil {
				log.Fatal(name, ": ", err)
			}
		})
	}
	group.Wait()
	fmt.Printf("%d runs, %d reports\n", runs, len(r.stored))
}
