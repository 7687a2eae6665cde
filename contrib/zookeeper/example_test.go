package zklock_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/go-zookeeper/zk"

	zklock "github.com/redlatch/redlatch/contrib/zookeeper"
	"github.com/redlatch/redlatch/lock"
)

// connect opens a connection whose session a Session observes. The other options are the program's.
func connect() (*zk.Conn, *zklock.Session) {
	session := zklock.NewSession(nil)
	conn, _, err := zk.Connect(zklock.Servers(), 10*time.Second, zk.WithDialer(session.Dial), zk.WithLogInfo(false))
	if err != nil {
		log.Fatal(err)
	}
	return conn, session
}

func Example() {
	ctx := context.Background()
	conn, session := connect()
	defer conn.Close()
	client, err := zklock.New(ctx, conn, session)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	err = client.Lock("orders").Do(ctx, func(ctx context.Context) error {
		fmt.Println("one process at a time")
		return ctx.Err()
	}, lock.Wait(5*time.Second))
	fmt.Println(err)
	// Output:
	// one process at a time
	// <nil>
}

// The resource refuses the tokens of earlier holders.
func ExampleClient() {
	ctx := context.Background()
	conn, session := connect()
	defer conn.Close()
	client, err := zklock.New(ctx, conn, session, zklock.WithPrefix("/billing"))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	var last int64
	write := func(token int64) {
		fmt.Println("accepted:", token >= last)
		last = max(last, token)
	}
	var first int64
	for range 2 {
		h, err := client.Lock("invoices").Lock(ctx)
		if err != nil {
			log.Fatal(err)
		}
		write(h.Token())
		if first == 0 {
			first = h.Token()
		}
		if err := h.Unlock(ctx); err != nil {
			log.Fatal(err)
		}
	}
	write(first) // of a process that was paused
	// Output:
	// accepted: true
	// accepted: true
	// accepted: false
}
