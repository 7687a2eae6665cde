// Catalogue is read by many goroutines at a time and changed by one alone. A writer continues
// to read what it has written, with no other change in between: a downgrade, which requires a
// named owner.
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

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

// catalogue stands for shared data: a table, a file, a Redis key. Only the lock protects it.
type catalogue struct {
	client *redlatch.Client
	prices map[string]int
}

// read looks up a price, in parallel with others. It continues once all readers of the program
// are inside.
func (c *catalogue) read(ctx context.Context, all *sync.WaitGroup) error {
	return c.client.RWLock("catalogue").Read().Do(ctx, func(context.Context) error {
		_ = c.prices["lamp"]
		all.Done()
		all.Wait()
		return nil
	})
}

// update changes a price. Afterwards it reads while other readers may read and no writer may
// write.
func (c *catalogue) update(ctx context.Context, price int) (err error) {
	rw := c.client.RWLock("catalogue")
	ctx = lock.WithOwner(ctx, c.client.NewOwner())
	writing, err := rw.Write().Lock(ctx)
	if err != nil {
		return err
	}
	c.prices["lamp"] = price
	reading, err := rw.Read().Lock(ctx) // the same owner, so this does not wait
	if err != nil {
		return errors.Join(err, writing.Unlock(ctx))
	}
	defer func() { err = errors.Join(err, reading.Unlock(ctx)) }()
	if err := writing.Unlock(ctx); err != nil {
		return err
	}
	fmt.Printf("wrote %d, reads %d\n", price, c.prices["lamp"])
	return nil
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
	c := &catalogue{client: client, prices: map[string]int{"lamp": 20}}

	const readers = 10
	var all, wg sync.WaitGroup
	all.Add(readers)
	for range readers {
		wg.Go(func() {
			if err := c.read(ctx, &all); err != nil {
				log.Fatal(err)
			}
		})
	}
	wg.Wait()
	fmt.Printf("%d readers at the same time\n", readers)

	for _, price := range []int{25, 30} {
		wg.Go(func() {
			if err := c.update(ctx, price); err != nil {
				log.Fatal(err)
			}
		})
	}
	wg.Wait()
}
