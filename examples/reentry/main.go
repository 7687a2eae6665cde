// Reentry acquires a lock again further down the call stack. The owner in the context makes
// all calls under it one logical thread.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"log"
	"os"

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

	ctx = lock.WithOwner(ctx, client.NewOwner())
	if err := transfer(ctx, client); err != nil {
		log.Fatal(err)
	}
}

// transfer holds the account while it books twice.
func transfer(ctx context.Context, client *redlatch.Client) error {
	return client.Lock("account:7").Do(ctx, func(ctx context.Context) error {
		if err := book(ctx, client, -100); err != nil {
			return err
		}
		return book(ctx, client, +40)
	})
}

// book needs the account as well, whether or not its caller holds it.
func book(ctx context.Context, client *redlatch.Client, amount int) error {
	l := client.Lock("account:7")
	return l.Do(ctx, func(ctx context.Context) error {
		owner, _ := lock.OwnerFrom(ctx)
		holds, err := l.HoldCount(ctx, owner)
		if err != nil {
			return err
		}
		fmt.Printf("booking %+d, holding the account %d times\n", amount, holds)
		return nil
	})
}
