package redlatchtest_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

// In a test, use New. Start is for programs and for several clients.
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

// example stands for a *testing.T, which examples do not have.
type example struct{ recorder }
