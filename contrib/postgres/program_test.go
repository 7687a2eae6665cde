package pglock_test

import (
	"context"
	"errors"
	"log"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"

	pglock "github.com/redlatch/redlatch/contrib/postgres"
	"github.com/redlatch/redlatch/lock"
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

func onPostgreSQL(ctx context.Context, url string) {
	pool, err := pgxpool.New(ctx, url)
	check(err)
	defer pool.Close()
	client, err := pglock.NewAdvisory(ctx, pool) // or NewTable, for rows
	check(err)
	defer client.Close()
	check(run(ctx, client.Lock("orders")))
}

// The program of the guide has its lock to itself.
func TestProgram(t *testing.T) {
	t.Parallel()
	url := commonServer(t).url()
	shipped = 0
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() { onPostgreSQL(t.Context(), url) })
	}
	all.Wait()
	assert.Equal(t, 4, shipped)
}
