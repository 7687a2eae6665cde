// Quorum holds a lock on a majority of three servers. It works without one of them, and fails
// without two.
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
		server, err := redlatchtest.Start() // stands for your own servers
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
		// Plain locks are compatible with other libraries.
		members = append(members, client.PlainLock("report"))
	}
	report := clients[0].RedLock(members)

	for gone := range servers {
		err := report.Do(ctx, func(context.Context) error {
			fmt.Printf("with %d of %d servers: locked\n", len(servers)-gone, len(servers))
			return nil
		}, lock.Wait(time.Second))
		if errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate) {
			fmt.Printf("with %d of %d servers: not acquired\n", len(servers)-gone, len(servers))
		} else if err != nil {
			log.Fatal(err)
		}
		servers[gone].Close()
	}
}
