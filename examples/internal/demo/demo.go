// Package demo provides a server and a client for the examples.
package demo

import (
	"context"
	"log"
	"os"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/redlatchtest"
)

// Server returns the URL of the server at REDIS_URL, or of a server that it starts, and a
// function that stops it.
func Server() (url string, stop func(), err error) {
	if url := os.Getenv("REDIS_URL"); url != "" {
		return url, func() {}, nil
	}
	server, err := redlatchtest.Start()
	if err != nil {
		return "", nil, err
	}
	return server.URL(), server.Close, nil
}

// Client returns a client of that server and a function that stops both. It ends the program
// if no server can be started.
func Client(ctx context.Context) (*redlatch.Client, func()) {
	url, stop, err := Server()
	if err != nil {
		log.Fatal(err)
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
