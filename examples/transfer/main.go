// Transfer moves money between accounts. Many goroutines need any two of them, in either
// order. Each transfer holds both accounts or none, without deadlocks.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"sync"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/rlock"
)

const (
	accounts  = 3
	each      = 100
	workers   = 8
	transfers = 25 // of each worker
)

// balances stands for rows of a database. The lock of an account protects its balance.
var balances [accounts]int

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server")
	flag.Parse()
	ctx := context.Background()
	client, err := redlatch.Open(ctx, *url)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	for i := range balances {
		balances[i] = each
	}
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for range transfers {
				from := rand.N(accounts)
				to := (from + 1 + rand.N(accounts-1)) % accounts
				if err := transfer(ctx, client, from, to, 1+rand.N(10)); err != nil {
					log.Fatal(err)
				}
			}
		})
	}
	all.Wait()

	sum := 0
	for _, balance := range balances {
		sum += balance
	}
	fmt.Printf("%d transfers between %d accounts, total %d\n", workers*transfers, accounts, sum)
}

func transfer(ctx context.Context, client *redlatch.Client, from, to, amount int) error {
	both := client.MultiLock(account(client, from), account(client, to))
	return both.Do(ctx, func(ctx context.Context) error {
		if balances[from] < amount {
			return nil
		}
		balances[from] -= amount
		balances[to] += amount
		return ctx.Err() // ends if one of the locks is lost
	})
}

// account returns the lock of an account. The names share a hash tag, so one script can
// acquire two of them, even in a cluster.
func account(client *redlatch.Client, n int) *rlock.Lock {
	return client.Lock(fmt.Sprintf("{accounts}:%d", n))
}
