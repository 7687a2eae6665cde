// Boundedwait bounds its wait: it tries to acquire a lock twice, the second time with a longer
// wait.
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
	l := client.Lock("printer")

	busy, err := l.Lock(ctx, lock.Lease(time.Second)) // a print job of one second
	if err != nil {
		log.Fatal(err)
	}

	if _, err := l.TryLock(ctx); errors.Is(err, lock.ErrNotAcquired) {
		fmt.Println("the printer is busy; waiting for a moment")
	}
	// Wait bounds only the wait. A deadline on ctx would also end the hold.
	h, err := l.Lock(ctx, lock.Wait(100*time.Millisecond))
	if errors.Is(err, lock.ErrNotAcquired) {
		fmt.Println("still busy; waiting longer")
		h, err = l.Lock(ctx, lock.Wait(5*time.Second))
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("printing")
	if err := h.Unlock(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println("the first job:", busy.Unlock(ctx)) // lock.ErrLost: its lease is over
}
