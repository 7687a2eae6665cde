package zklock_test

import (
	"context"
	"errors"
	"log"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/stretchr/testify/assert"

	zklock "github.com/redlatch/redlatch/contrib/zookeeper"
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

func onZooKeeper(ctx context.Context, servers []string) {
	session := zklock.NewSession(nil)
	conn, _, err := zk.Connect(servers, 10*time.Second, zk.WithDialer(session.Dial))
	check(err)
	defer conn.Close()
	client, err := zklock.New(ctx, conn, session)
	check(err)
	defer client.Close()
	check(run(ctx, client.Lock("orders")))
}

// The program of the guide has its lock to itself.
func TestProgram(t *testing.T) {
	t.Parallel()
	servers := zklock.Servers()
	shipped = 0
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() { onZooKeeper(t.Context(), servers) })
	}
	all.Wait()
	assert.Equal(t, 4, shipped)
}
