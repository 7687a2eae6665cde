// Fencing shows the limit of a lock: a holder pauses for longer than its lease, another takes
// over, and then the first one continues and writes. The storage rejects the write, because
// its token is older than one it has seen.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

// storage is the protected resource. It checks the token of each write itself: a holder cannot
// know that it is late, but the storage can.
type storage struct {
	guard rlock.Guard
	text  string
}

func (s *storage) write(token int64, text string) error {
	if err := s.guard.Check(token); err != nil {
		return err
	}
	s.text = text
	return nil
}

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server")
	flag.Parse()
	ctx := context.Background()
	client, err := redlatch.Open(ctx, *url)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	var file storage
	l := client.FencedLock("file")

	late, err := l.Lock(ctx, lock.Lease(100*time.Millisecond))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("the first holder has token %d and falls asleep\n", late.Token())

	next, err := l.Lock(ctx) // waits until the lease has expired
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("the second holder has token %d and writes: %v\n", next.Token(), file.write(next.Token(), "second"))

	// The first holder wakes up. It could check late.Context() and pause again right after, so
	// the storage decides.
	err = file.write(late.Token(), "first")
	fmt.Printf("the first holder writes: %v\n", err)
	if !errors.Is(err, rlock.ErrStaleToken) {
		log.Fatal("the stale write got through")
	}
	fmt.Printf("the file says %q; unlocking says: %v, %v\n", file.text, errors.Is(late.Unlock(ctx), lock.ErrLost), next.Unlock(ctx))
}
