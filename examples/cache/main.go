// Cache rebuilds an expensive value once, however many processes find it missing at the same
// time: check, acquire the lock, check again, build.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

// cache stands for shared data: a table, a file, a Redis key.
type cache struct {
	value  atomic.Pointer[string]
	builds atomic.Int32
}

func (c *cache) get(ctx context.Context, client *redlatch.Client) (string, error) {
	if v := c.value.Load(); v != nil {
		return *v, nil
	}
	// A lease is enough here: if the build takes longer, the value is built twice, which costs
	// time but is harmless.
	err := client.Lock("cache:catalogue").Do(ctx, func(ctx context.Context) error {
		if c.value.Load() != nil {
			return nil // built by another caller during the wait
		}
		v := c.build()
		c.value.Store(&v)
		return nil
	}, lock.Lease(10*time.Second), lock.Wait(30*time.Second))
	if err != nil {
		return "", err
	}
	return *c.value.Load(), nil
}

func (c *cache) build() string {
	time.Sleep(200 * time.Millisecond)
	return fmt.Sprintf("catalogue, build %d", c.builds.Add(1))
}

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server")
	flag.Parse()
	ctx := context.Background()
	client, err := redlatch.Open(ctx, *url)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	var c cache
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := c.get(ctx, client); err != nil {
				log.Fatal(err)
			}
		})
	}
	wg.Wait()
	fmt.Printf("20 requests, built %d time(s): %s\n", c.builds.Load(), *c.value.Load())
}
