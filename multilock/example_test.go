package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

// Two callers acquire the same two locks in different orders without a deadlock.
func ExampleMulti() {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	ctx := context.Background()
	client, err := redlatch.Open(ctx, server.URL())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	stock, invoice := client.Lock("{order:7}:stock"), client.Lock("{order:7}:invoice")
	done := make(chan error)
	shipped := 0
	ship := func(ctx context.Context) error {
		shipped++
		return ctx.Err() // it ends if either lock is lost
	}
	go func() { done <- client.MultiLock(stock, invoice).Do(ctx, ship) }()
	go func() { done <- client.MultiLock(invoice, stock).Do(ctx, ship) }()
	fmt.Println(<-done, <-done, shipped)

	// All or none.
	h, err := invoice.Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	_, err = client.MultiLock(stock, invoice).TryLock(ctx)
	fmt.Println(errors.Is(err, lock.ErrNotAcquired))
	locked, err := stock.IsLocked(ctx)
	fmt.Println(locked, err)
	fmt.Println(h.Unlock(ctx))
	// Output:
	// <nil> <nil> 2
	// true
	// false <nil>
	// <nil>
}

// A lock on a majority of three servers remains available when one of them is down.
func ExampleRed() {
	ctx := context.Background()
	var (
		servers []*redlatchtest.Server
		clients []*redlatch.Client
	)
	for range 3 {
		server, err := redlatchtest.Start()
		if err != nil {
			log.Fatal(err)
		}
		defer server.Close()
		client, err := redlatch.Open(ctx, server.URL())
		if err != nil {
			log.Fatal(err)
		}
		defer client.Close()
		servers, clients = append(servers, server), append(clients, client)
	}
	report := redlatch.RedLock("report", clients)

	servers[2].Close()
	h, err := report.Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(h.Name(), h.Remaining() > 0)
	_, err = report.TryLock(ctx)
	fmt.Println(errors.Is(err, lock.ErrNotAcquired))
	fmt.Println(h.Unlock(ctx))
	// Output:
	// report true
	// true
	// <nil>
}
