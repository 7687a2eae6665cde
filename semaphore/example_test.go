package semaphore_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
	"github.com/redlatch/redlatch/semaphore"
)

// Two machines process the same jobs with at most three concurrent workers in total.
func ExamplePermitSemaphore() {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	ctx := context.Background()

	const limit, machines, jobs = 3, 2, 10
	var running, most, done atomic.Int32
	work := func(ctx context.Context) error {
		most.Store(max(most.Load(), running.Add(1)))
		defer running.Add(-1)
		time.Sleep(5 * time.Millisecond)
		done.Add(1)
		return context.Cause(ctx) // canceled if the permit is lost
	}

	var all sync.WaitGroup
	for range machines {
		client, err := redlatch.Open(ctx, server.URL())
		if err != nil {
			log.Fatal(err)
		}
		defer client.Close()
		workers := client.PermitSemaphore("workers", semaphore.Permits(limit))
		for range jobs {
			all.Go(func() {
				if err := workers.Do(ctx, work); err != nil {
					log.Fatal(err)
				}
			})
		}
	}
	all.Wait()
	fmt.Println(done.Load(), "jobs, never more than the limit at once:", most.Load() <= limit)
	// Output: 20 jobs, never more than the limit at once: true
}

// Any process that knows the id of a permit can release it.
func ExamplePermitSemaphore_Release() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	seats := client.PermitSemaphore("seats", semaphore.Permits(2))

	seat, err := seats.Acquire(ctx, 1, lock.Lease(time.Hour)) // booked for an hour
	if err != nil {
		log.Fatal(err)
	}
	free, err := seats.Available(ctx)
	fmt.Println(free, err)

	// Later, in another process.
	fmt.Println(seats.Release(ctx, seat.ID()))
	free, err = seats.Available(ctx)
	fmt.Println(free, err)
	fmt.Println(errors.Is(seats.Release(ctx, seat.ID()), lock.ErrNotHeld))
	// Output:
	// 1 <nil>
	// <nil>
	// 2 <nil>
	// true
}

func ExampleSemaphore() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	memory := client.Semaphore("memory", semaphore.Permits(1024)) // in MB, for all processes

	if err := memory.Acquire(ctx, 700, lock.Wait(time.Minute)); err != nil {
		log.Fatal(err)
	}
	fmt.Println(errors.Is(memory.TryAcquire(ctx, 700), lock.ErrNotAcquired))
	fmt.Println(memory.Release(ctx, 700))
	fmt.Println(memory.TryAcquire(ctx, 700))
	free, err := memory.Available(ctx)
	fmt.Println(free, err)
	// Output:
	// true
	// <nil>
	// <nil>
	// 324 <nil>
}

var connect = harness.Connect
