// Quorum holds a lock on a majority of three servers, and goes on when one of them is
// gone. With two of them gone there is no lock to be had.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

func main() {
	ctx := context.Background()
	var (
		servers []*redlatchtest.Server
		clients []*redlatch.Client
		members []lock.Locker
	)
	for range 3 {
		server, err := redlatchtest.Start() // in place of servers of yours
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
		// The lock that other libraries know, too.
		members = append(members, client.PlainLock("report"))
	}
	report := clients[0].RedLock(members...)

	for gone := range servers {
		err := report.Do(ctx, func(context.Context) error {
			fmt.Printf("with %d of %d servers: locked\n", len(servers)-gone, len(servers))
			return nil
		}, lock.Wait(time.Second))
		if errors.Is(err, lock.ErrNotAcquired) {
			fmt.Printf("with %d of %d servers: not acquired\n", len(servers)-gone, len(servers))
		} else if err != nil {
			log.Fatal(err)
		}
		servers[gone].Close()
	}
}
