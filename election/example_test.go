package election_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
)

// A program leads until it is stopped, again whenever it is its turn.
func ExampleElection_Run() {
	client, stop := harness.Connect()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	err := client.Election("scheduler").Run(ctx, "host-7:8080", func(ctx context.Context, term *election.Term) error {
		fmt.Println("leads with token", term.Token())
		cancel() // as a signal would
		<-ctx.Done()
		return nil
	})
	fmt.Println("ended by its context:", errors.Is(err, context.Canceled))
	// Output:
	// leads with token 1
	// ended by its context: true
}

// An observer sees the current leader, and then each next one.
func ExampleElection_Observe() {
	client, stop := harness.Connect()
	defer stop()
	ctx := context.Background()
	e := client.Election("scheduler")
	term, err := e.Campaign(ctx, "host-7:8080")
	if err != nil {
		log.Fatal(err)
	}
	for leader, err := range e.Observe(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(leader.Value, leader.Token)
		if leader.Token == 2 {
			break
		}
		if err := term.Resign(ctx); err != nil {
			log.Fatal(err)
		}
		if term, err = e.Campaign(ctx, "host-8:8080"); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// host-7:8080 1
	// host-8:8080 2
}
