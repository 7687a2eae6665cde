package goredis_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/redis/go-redis/v9"

	"github.com/redlatch/redlatch/contrib/goredis"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

// start returns the URL of a new server, and a function that stops it.
func start() (url string, stop func()) {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	return server.URL(), server.Close
}

// A service configures go-redis, and its locks are on the same server.
func ExampleOpen() {
	url, stop := start()
	defer stop()
	ctx := context.Background()
	opt, err := redis.ParseURL(url + "/3")
	if err != nil {
		log.Fatal(err)
	}
	rdb := redis.NewClient(opt)
	defer rdb.Close()

	client, err := goredis.Open(ctx, opt)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	err = client.Lock("orders").Do(ctx, func(ctx context.Context) error {
		n, err := rdb.Exists(ctx, "orders").Result()
		fmt.Println("keys in database 3:", n)
		return err
	})
	fmt.Println(err)
	// Output:
	// keys in database 3: 1
	// <nil>
}

// A library that gets a client, not its options, uses OpenLike.
func ExampleOpenLike() {
	url, stop := start()
	defer stop()
	ctx := context.Background()
	opt, err := redis.ParseURL(url)
	if err != nil {
		log.Fatal(err)
	}
	var rdb redis.UniversalClient = redis.NewClient(opt)
	defer rdb.Close()

	client, err := goredis.OpenLike(ctx, rdb)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	fmt.Println(client.Ping(ctx))
	// Output: <nil>
}

// Options that redlatch cannot repeat are refused. A caller that knows that they do not matter to locks
// clears them in a copy.
func ExampleClientOption() {
	opt := &redis.Options{OnConnect: func(context.Context, *redis.Conn) error {
		fmt.Println("connected")
		return nil
	}}
	_, err := goredis.ClientOption(opt)
	fmt.Println(errors.Is(err, lock.ErrInvalid))

	forLocks := *opt
	forLocks.OnConnect = nil
	translated, err := goredis.ClientOption(&forLocks)
	fmt.Println(translated.InitAddress, err)
	// Output:
	// true
	// [localhost:6379] <nil>
}
