package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5"

	pglock "github.com/redlatch/redlatch/contrib/postgres"
	"github.com/redlatch/redlatch/lock"
)

// One process at a time sends the invoices.
func ExampleNewAdvisory() {
	ctx := context.Background()
	pool, stop := connect()
	defer stop()
	locks, err := pglock.NewAdvisory(ctx, pool)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	err = locks.Lock("invoices").Do(ctx, func(context.Context) error {
		fmt.Println("sent")
		return nil
	})
	fmt.Println(err)
	// Output:
	// sent
	// <nil>
}

// Readers share a lock.
func ExampleAdvisory_RWLock() {
	ctx := context.Background()
	pool, stop := connect()
	defer stop()
	locks, err := pglock.NewAdvisory(ctx, pool)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	prices := locks.RWLock("prices")
	var readers []lock.Hold
	for range 2 {
		h, err := prices.Read().Lock(ctx)
		if err != nil {
			log.Fatal(err)
		}
		readers = append(readers, h)
	}
	_, err = prices.Write().TryLock(ctx)
	fmt.Println(len(readers), "readers, and a writer has to wait:", errors.Is(err, lock.ErrNotAcquired))
	for _, h := range readers {
		_ = h.Unlock(ctx)
	}
	// Output:
	// 2 readers, and a writer has to wait: true
}

// A transaction commits only if its process still has the lock.
func ExampleTable_Check() {
	ctx := context.Background()
	pool, stop := connect()
	defer stop()
	if err := pglock.CreateTable(ctx, pool); err != nil {
		log.Fatal(err)
	}
	locks, err := pglock.NewTable(ctx, pool)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	pay := func(hold lock.Hold) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := locks.Check(ctx, tx, hold); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "SELECT 'UPDATE accounts ...'")
			return err
		})
	}

	hold, err := locks.Lock("account:7").Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(pay(hold))
	_ = hold.Unlock(ctx)
	fmt.Println("later:", errors.Is(pay(hold), lock.ErrLost))
	// Output:
	// <nil>
	// later: true
}
