package harness

import (
	"context"
	"log"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/redlatchtest"
)

// Connect returns a client on a new server, for an example, and a function that stops both.
func Connect() (client *redlatch.Client, stop func()) {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	client, err = redlatch.Open(context.Background(), server.URL())
	if err != nil {
		log.Fatal(err)
	}
	return client, func() {
		client.Close()
		server.Close()
	}
}
