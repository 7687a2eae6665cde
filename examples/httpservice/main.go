// Httpservice is an HTTP service that ships each order once at a time, with any number of
// instances. It answers 409 while another request ships the order, and 503 while the server
// of the locks is unavailable. After a signal it finishes the requests that it has.
//
//	go run ./examples/httpservice -addr localhost:8080
//	curl -i -X POST localhost:8080/orders/7/shipment
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
)

const (
	patience = 300 * time.Millisecond // how long a request waits for the lock
	workTime = time.Second
	grace    = 10 * time.Second // how long the service waits for its requests at the end
)

type service struct{ client *redlatch.Client }

func (s service) shipOrder(w http.ResponseWriter, r *http.Request) {
	order := r.PathValue("id")
	err := s.client.Lock("order:"+order).Do(r.Context(), ship, lock.Wait(patience))
	var after *lock.DoError
	if errors.As(err, &after) { // the work has run, and Unlock has failed
		log.Printf("order %s: %v", order, err)
		if err = after.Func; errors.Is(after.Unlock, lock.ErrLost) {
			http.Error(w, "check the order", http.StatusInternalServerError)
			return
		} // else the lock becomes free when its lease ends
	}
	switch {
	case err == nil:
		fmt.Fprintf(w, "order %s is shipped\n", order)
	case r.Context().Err() != nil:
		// The client has left.
	case errors.Is(err, lock.ErrNotAcquired):
		http.Error(w, "another request is shipping this order", http.StatusConflict)
	case errors.Is(err, lock.ErrUnavailable), errors.Is(err, lock.ErrIndeterminate), errors.Is(err, lock.ErrClosed):
		w.Header().Set("Retry-After", "5")
		http.Error(w, "locks are unavailable", http.StatusServiceUnavailable)
	default: // the work failed
		log.Printf("order %s: %v", order, err)
		http.Error(w, "internal error", http.StatusInternalServerError)
	}
}

// ship is the work. It ends if the lock is lost or the client of the request leaves.
func ship(ctx context.Context) error {
	select {
	case <-time.After(workTime):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func run(ctx context.Context, url, addr string) error {
	client, err := redlatch.Open(ctx, url)
	if err != nil {
		return err
	}
	defer client.Close()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders/{id}/shipment", service{client}.shipOrder)
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	fmt.Println("listening on", listener.Addr())
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	fmt.Println("shutting down")
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	return server.Shutdown(ctx) // the client closes when no request is left
}

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("REDIS_URL"), "redis://localhost:6379"), "address of the server of the locks")
	addr := flag.String("addr", "localhost:8080", "address to listen on")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := run(ctx, *url, *addr); err != nil {
		log.Fatal(err)
	}
}
