package redlatchtest_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
	"github.com/redlatch/redlatch/semaphore"
)

// In a test, use New or NewServer. Start is for programs.
func ExampleStart() {
	server, err := redlatchtest.Start()
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	client, err := redlatch.Open(context.Background(), server.URL())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	fmt.Println(client.Ping(context.Background()))
	// Output: <nil>
}

// shipping is the code under test: a handler that packs an order while it holds a lock.
type shipping struct {
	orders lock.Locker
	pack   func(ctx context.Context) error
}

func (s shipping) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	err := s.orders.Do(r.Context(), s.pack, lock.Wait(0))
	switch {
	case errors.Is(err, lock.ErrNotAcquired):
		http.Error(w, "the order is being shipped", http.StatusConflict)
	case errors.Is(err, lock.ErrLost):
		http.Error(w, "check the order", http.StatusInternalServerError)
	case err != nil:
		http.Error(w, "try again later", http.StatusServiceUnavailable)
	}
}

// ship sends a request to the handler and returns the status of its response.
func ship(s shipping) int {
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/ship", nil))
	return w.Code
}

// The handler answers 409 while another process holds the lock, and 503 while there is no server.
func ExampleLocker() {
	orders := redlatchtest.NewLocker("orders")
	handler := shipping{orders, func(context.Context) error { return nil }}

	release := orders.HoldElsewhere()
	fmt.Println(ship(handler))
	release()

	orders.FailLock(lock.ErrUnavailable)
	fmt.Println(ship(handler))
	fmt.Println(ship(handler))
	// Output:
	// 409
	// 503
	// 200
}

// The lock is lost while the handler works. The same call loses a lock of a client.
func ExampleLose() {
	t := &example{} // the *testing.T of your test
	orders := redlatchtest.NewLocker("orders")
	fmt.Println(ship(shipping{orders, func(ctx context.Context) error {
		redlatchtest.Lose(t, ctx, lock.ReasonExpired)
		fmt.Println(context.Cause(ctx) != nil, "- the work stops")
		return ctx.Err()
	}}))
	redlatchtest.AssertFree(t, orders)
	// Output:
	// true - the work stops
	// 500
}

// encode is the code under test: it encodes a video if the machines have a permit left.
func encode(ctx context.Context, encoders *semaphore.PermitSemaphore) string {
	err := encoders.Do(ctx, func(context.Context) error { return nil }, lock.Wait(0))
	if errors.Is(err, lock.ErrNotAcquired) {
		return "all machines are busy"
	}
	return fmt.Sprint("encoded, ", err)
}

// Another process has the only permit, and then releases it.
func ExampleNewEmbedded() {
	t := &example{} // the *testing.T of your test
	defer t.end()
	server := redlatchtest.NewEmbedded(t)
	client, elsewhere := redlatchtest.NewClient(t, server), redlatchtest.NewClient(t, server)

	ctx := context.Background()
	permit, err := elsewhere.PermitSemaphore("encoders", semaphore.Permits(1)).Acquire(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	encoders := client.PermitSemaphore("encoders", semaphore.Permits(1))
	fmt.Println(encode(ctx, encoders))
	if err := permit.Release(ctx); err != nil {
		t.Fatal(err)
	}
	fmt.Println(encode(ctx, encoders))
	// Output:
	// all machines are busy
	// encoded, <nil>
}

// The work of a slot is not repeated after another process has done it, and is after a failure.
func ExampleNewEmbedded_once() {
	t := &example{} // the *testing.T of your test
	defer t.end()
	server := redlatchtest.NewEmbedded(t)
	client, elsewhere := redlatchtest.NewClient(t, server), redlatchtest.NewClient(t, server)

	ctx := context.Background()
	if _, err := elsewhere.Once("report").MarkDone(ctx, "monday"); err != nil {
		t.Fatal(err)
	}
	report := func(context.Context) error { return errors.New("no data yet") } // the code under test
	for _, slot := range []string{"monday", "tuesday", "tuesday"} {
		ran, err := client.Once("report").Run(ctx, slot, report)
		fmt.Println(slot, ran, err)
	}
	// Output:
	// monday false <nil>
	// tuesday true no data yet
	// tuesday true no data yet
}

// Any client of Redis can use the server beside redlatch: NewServer(t).URL() is its address.
func ExampleNewServer() {
	t := &example{} // the *testing.T of your test
	defer t.end()
	server := redlatchtest.NewServer(t)
	client := redlatchtest.NewClient(t, server)

	options, err := rueidis.ParseURL(server.URL()) // or of go-redis: redis.ParseURL
	if err != nil {
		t.Fatal(err)
	}
	cache, err := rueidis.NewClient(options)
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()

	fmt.Println(client.Lock("orders").Do(context.Background(), func(ctx context.Context) error {
		return cache.Do(ctx, cache.B().Set().Key("order:7").Value("packed").Build()).Error()
	}))
	// Output: <nil>
}

// example stands for a *testing.T, which examples do not have.
type example struct {
	recorder
	cleanups []func()
}

func (e *example) Cleanup(f func()) { e.cleanups = append(e.cleanups, f) }

func (*example) Fatal(args ...any) { log.Fatal(args...) }

func (e *example) end() {
	for _, f := range slices.Backward(e.cleanups) {
		f()
	}
}
