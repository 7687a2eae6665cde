// Transfer moves money between accounts of which any two may be wanted at once, in
// either order, by many goroutines. Each transfer holds both accounts or none, and
// nobody waits for ever for somebody who waits for it.
package main

import (
	"context"
	"fmt"
	"log"
	"math/rand/v2"
	"sync"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/examples/internal/demo"
	"github.com/redlatch/redlatch/rlock"
)

const (
	accounts  = 3
	each      = 100
	workers   = 8
	transfers = 25 // of each worker
)

// balances is what would be rows of a database. Who has an account's lock may change it.
var balances [accounts]int

func main() {
	ctx := context.Background()
	client, stop := demo.Client(ctx)
	defer stop()

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
	fmt.Printf("%d transfers between %d accounts, and %d is still there\n", workers*transfers, accounts, sum)
}

func transfer(ctx context.Context, client *redlatch.Client, from, to, amount int) error {
	both := client.MultiLock(account(client, from), account(client, to))
	return both.Do(ctx, func(ctx context.Context) error {
		if balances[from] < amount {
			return nil
		}
		balances[from] -= amount
		balances[to] += amount
		return ctx.Err() // it ends if one of the locks is lost
	})
}

// account returns the lock of an account. The names have a hash tag in common, so that in
// a cluster, too, one script takes two of them.
func account(client *redlatch.Client, n int) *rlock.Lock {
	return client.Lock(fmt.Sprintf("{accounts}:%d", n))
}
