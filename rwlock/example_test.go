package rwlock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rwlock"
)

// Readers share the lock, a writer has it alone.
func ExampleRWLock() {
	client, stop := connect()
	defer stop()
	ctx := context.Background()
	rw := client.RWLock("catalogue")

	first, err := rw.Read().Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	second, err := rw.Read().Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	_, err = rw.Write().Lock(ctx, lock.Wait(time.Second))
	fmt.Println("not acquired while two read:", errors.Is(err, lock.ErrNotAcquired))
	fmt.Println(first.Unlock(ctx), second.Unlock(ctx))

	err = rw.Write().Do(ctx, func(ctx context.Context) error {
		_, err := rw.Read().TryLock(ctx)
		fmt.Println("not acquired while one writes:", errors.Is(err, lock.ErrNotAcquired))
		return nil
	})
	fmt.Println(err)
	// Output:
	// not acquired while two read: true
	// <nil> <nil>
	// not acquired while one writes: true
	// <nil>
}

// A writer that goes on reading lets other readers in, and no writer in between.
func ExampleRWLock_downgrade() {
	client, stop := connect()
	defer stop()
	// Both holds are of one owner.
	ctx := lock.WithOwner(context.Background(), client.NewOwner())
	rw := client.RWLock("catalogue")

	write, err := rw.Write().Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	read, err := rw.Read().Lock(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("both:", locked(rw))
	fmt.Println(write.Unlock(ctx))
	fmt.Println("reads on:", locked(rw))
	fmt.Println(read.Unlock(ctx))
	fmt.Println("done:", locked(rw))
	// Output:
	// both: true true
	// <nil>
	// reads on: true false
	// <nil>
	// done: false false
}

// locked reports whether there are readers and whether there is a writer.
func locked(rw *rwlock.RWLock) string {
	reads, err := rw.Read().IsLocked(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	writes, err := rw.Write().IsLocked(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	return fmt.Sprint(reads, " ", writes)
}

// connect returns a client on a server for an example.
var connect = harness.Connect
