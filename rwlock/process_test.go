package rwlock_test

import (
	"context"
	"fmt"
	"time"

	"github.com/redlatch/redlatch"
)

var workers = map[string]func(args []string) error{
	"wait to write": waitWorker,
}

// waitWorker waits for the write lock, for ever, and says when it does.
func waitWorker(args []string) error {
	ctx := context.Background()
	c, err := redlatch.Open(ctx, "redis://"+args[0])
	if err != nil {
		return err
	}
	go func() {
		for c.PubSub().Subscribed == 0 {
			time.Sleep(time.Millisecond)
		}
		fmt.Println("waiting")
	}()
	_, err = c.RWLock("orders").Write().Lock(ctx)
	return err
}
