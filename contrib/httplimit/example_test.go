package httplimit_test

import (
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/redlatch/redlatch/contrib/httplimit"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/ratelimit"
)

// Each user may send two requests a minute, whichever process handles them.
func Example() {
	client, stop := harness.Connect()
	defer stop()
	limit, err := httplimit.New(httplimit.Config{
		Limiter: func(name string) *ratelimit.Limiter {
			return client.RateLimiter(name, ratelimit.Rate(2, time.Minute), ratelimit.KeepAlive(time.Hour))
		},
		Key: func(r *http.Request) string { return "api:" + r.Header.Get("User") },
	})
	if err != nil {
		log.Fatal(err)
	}
	api := limit(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, "hello") }))

	for range 3 {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("User", "gopher")
		w := httptest.NewRecorder()
		api.ServeHTTP(w, r)
		fmt.Print(w.Code, " ", w.Body)
	}
	// Output:
	// 200 hello
	// 200 hello
	// 429 too many requests
}
