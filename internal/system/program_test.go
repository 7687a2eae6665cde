package system_test

import (
	"context"
	"errors"
	"log"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

var shipped int

// ship is not safe for concurrent use.
func ship(context.Context) error { shipped++; return nil }

// run ships the orders, unless another process does.
func run(ctx context.Context, orders lock.Locker) error {
	err := orders.Do(ctx, ship, lock.Wait(5*time.Second))
	if errors.Is(err, lock.ErrNotAcquired) {
		return nil
	}
	return err
}

func check(err error) {
	if err != nil {
		log.Panic(err)
	}
}

func onRedis(ctx context.Context, url string) {
	client, err := redlatch.Open(ctx, url)
	check(err)
	defer client.Close()
	check(run(ctx, client.Lock("orders")))
}

// The program of the guide has its lock to itself. The modules of other stores have the same test.
func TestProgram(t *testing.T) {
	t.Parallel()
	s := redlatchtest.NewServer(t)
	shipped = 0
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() { onRedis(t.Context(), s.URL()) })
	}
	all.Wait()
	assert.Equal(t, 4, shipped)
}
