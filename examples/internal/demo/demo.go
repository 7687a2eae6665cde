// Package demo gives the examples a client.
package demo

import (
	"context"
	"log"
	"os"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/redlatchtest"
)

// Client returns a client on the server at REDIS_URL, or on one that it starts,
// and what ends both. It ends the program if there is no server to be had.
func Client(ctx context.Context) (*redlatch.Client, func()) {
	url, stop := os.Getenv("REDIS_URL"), func() {}
	if url == "" {
		server, err := redlatchtest.Start()
		if err != nil {
			log.Fatal(err)
		}
		url, stop = server.URL(), server.Close
	}
	client, err := redlatch.Open(ctx, url)
	if err != nil {
		stop()
		log.Fatal(err)
	}
	return client, func() {
		client.Close()
		stop()
	}
}
