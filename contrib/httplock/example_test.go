package httplock_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/redlatch/redlatch/contrib/httplock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// Each order is shipped by one request at a time, whichever process handles it.
func Example() {
	client, stop := harness.Connect()
	defer stop()
	serialize, err := httplock.New(httplock.Config{
		Locker: func(name string) lock.Locker { return client.Lock(name) },
		Key:    func(r *http.Request) string { return "order:" + r.PathValue("id") },
	})
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("POST /orders/{id}/shipment", serialize(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, "shipped")
	})))
	post := func() {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/orders/7/shipment", nil))
		fmt.Print(w.Code, " ", w.Body)
	}

	post()
	_ = client.Lock("order:7").Do(context.Background(), func(context.Context) error { // as another process does
		post()
		return nil
	})
	// Output:
	// 200 shipped
	// 409 another request for this resource is in progress
}

// The handler passes the fencing token of its lock to the database, which refuses those of earlier
// holders.
func ExampleHoldFrom() {
	client, stop := harness.Connect()
	defer stop()
	serialize, err := httplock.New(httplock.Config{
		Locker: func(name string) lock.Locker { return client.FencedLock(name) },
		Key:    func(*http.Request) string { return "account" },
	})
	if err != nil {
		log.Fatal(err)
	}
	handler := serialize(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if h, ok := httplock.HoldFrom(r.Context()); ok {
			fmt.Println("UPDATE accounts ... WHERE token <=", h.Token())
		}
	}))
	for range 2 {
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", nil))
	}
	// Output:
	// UPDATE accounts ... WHERE token <= 1
	// UPDATE accounts ... WHERE token <= 2
}
