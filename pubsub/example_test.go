package pubsub_test

import (
	"context"
	"fmt"
	"log"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/pubsub"
	"github.com/redlatch/redlatch/redlatchtest"
)

// events forwards events to a Go channel without blocking.
type events chan pubsub.Event

func (e events) Notify(ev pubsub.Event) {
	select {
	case e <- ev:
	default:
	}
}

func ExampleHub() {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	opt, err := rueidis.ParseURL(server.URL())
	if err != nil {
		log.Fatal(err)
	}
	opt.DisableCache = true
	conn, err := rueidis.NewClient(opt)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()

	hub := pubsub.New(conn, pubsub.Options{})
	defer hub.Close()
	heard := make(events, 10)
	sub, confirmed := hub.Subscribe("news", heard)
	defer sub.Close()
	if !confirmed {
		fmt.Println("subscribed:", (<-heard).Subscribed)
	}
	ctx := context.Background()
	if err := conn.Do(ctx, conn.B().Publish().Channel("news").Message("hello").Build()).Error(); err != nil {
		log.Fatal(err)
	}
	fmt.Println((<-heard).Payload)
	// Output:
	// subscribed: true
	// hello
}
