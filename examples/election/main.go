// Election runs a scheduler on one of several machines. Every process is a candidate: one leads, and
// all of them know which. After a signal the leader ends its step and resigns, and the next candidate
// leads at once. If a leader is killed, the next one leads when the lease is over.
//
//	go run ./examples/election -name A
//	go run ./examples/election -name B
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/election"
)

const interval = 200 * time.Millisecond // of the scheduler's steps

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server")
	name := flag.String("name", fmt.Sprint("process ", os.Getpid()), "what the other processes see, for example an address")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := run(ctx, *url, *name); err != nil {
		log.Fatal(*name, ": ", err)
	}
}

// run is a candidate until ctx ends.
func run(ctx context.Context, url, name string) error {
	client, err := redlatch.Open(ctx, url)
	if err != nil {
		return err
	}
	defer client.Close()
	e := client.Election("scheduler")
	go watch(ctx, e, name)
	err = e.Run(ctx, name, func(ctx context.Context, term *election.Term) error {
		fmt.Printf("%s leads, token %d\n", name, term.Token())
		schedule(ctx, term.Token())
		fmt.Printf("%s ends its term\n", name)
		return nil
	})
	if ctx.Err() != nil {
		return nil // the signal
	}
	return err
}

// schedule works until the term is over. A step that has begun ends: it passes the token on, with which
// the resource can reject a step that comes too late (see examples/fencing).
func schedule(ctx context.Context, token int64) {
	steps := time.NewTicker(interval)
	defer steps.Stop()
	for ctx.Err() == nil {
		step(token)
		select {
		case <-steps.C:
		case <-ctx.Done():
		}
	}
}

// step stands for the work of the leader.
func step(token int64) { _ = token }

// watch prints each leader, where a service would send it the requests that only the leader serves.
func watch(ctx context.Context, e *election.Election, name string) {
	for ctx.Err() == nil {
		for leader, err := range e.Observe(ctx) {
			if err != nil {
				break // the signal, or the server has been away for long
			}
			fmt.Printf("%s sees that %s leads\n", name, leader.Value)
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}
