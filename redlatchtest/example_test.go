package redlatchtest_test

import (
	"context"
	"fmt"
	"log"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/redlatchtest"
)

// In a test, use New. Start is for programs and for several clients.
func ExampleStart() {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	client, err := redlatch.Open(context.Background(), server.URL())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	fmt.Println(client.Ping(context.Background()))
	// Output: <nil>
}
