// Package httplimit is a net/http middleware that limits the rate of requests by a key, such as the
// name of a user, across all processes of a service.
//
//	limit, err := httplimit.New(httplimit.Config{
//		Limiter: func(name string) *ratelimit.Limiter {
//			return client.RateLimiter(name, ratelimit.Rate(100, time.Minute), ratelimit.KeepAlive(time.Hour))
//		},
//		Key: func(r *http.Request) string { return "api:" + user(r) },
//	})
//	...
//	mux.Handle("/api/", limit(api))
//
// # Responses
//
// A request that is over the rate does not reach the handler:
//
//	400 Bad Request        the key is longer than MaxKey, or empty although RequireKey is set
//	429 Too Many Requests  the rate is used up; Retry-After says when the permits of the request are due
//	500                    the server refuses, or the key is no valid name: the program or the server
//	                       has to be corrected
//
// Every response to a request with a key that was decided has the header fields RateLimit-Policy and RateLimit of the IETF
// draft "RateLimit header fields for HTTP" (draft-ietf-httpapi-ratelimit-headers-10):
//
//	RateLimit-Policy: "default";q=100;w=60
//	RateLimit: "default";r=99
//	RateLimit: "default";r=0;t=12
//
// q is the rate, w its interval in seconds, r the number of permits that are left, and t, of a 429, the number of seconds until the
// request can be repeated.
//
// If the server of the limits is down, or its reply is lost, requests are served without a limit, unless
// Config.FailClosed is set. They are then refused like this:
//
//	503 Service Unavailable  Retry-After says when to come back
//
// The cause goes to Config.OnError. Config.Refuse replaces all these responses.
//
// # Keys that clients choose
//
// Put a literal prefix in front of what a client chooses, as in the example above: without one a client can
// name any object of the application. Each key is a limiter on the server, so give its option
// ratelimit.Rate a ratelimit.KeepAlive of about the time after which most users have left, but not less than the interval.
package httplimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
)

// Config configures the middleware. Limiter and Key are required.
type Config struct {
	// Limiter returns the limiter of that name, usually with the option ratelimit.Rate. It is called for each
	// request.
	Limiter func(name string) *ratelimit.Limiter

	// Key returns the name of the limiter for a request; requests with an equal name share its rate. A request whose
	// name is "" is served without a limit, unless RequireKey is set.
	Key func(r *http.Request) string

	// Cost returns the number of permits that a request takes. A request that costs 0 takes none. If Cost is nil, each
	// takes 1.
	Cost func(r *http.Request) int

	// MaxKey is the length in bytes of the longest name. 0 means 512. A request with a longer one is refused,
	// with an error that matches ErrKey.
	MaxKey int

	// RequireKey refuses requests whose name is "", with an error that matches ErrKey.
	RequireKey bool

	// Timeout bounds the decision. 0 means 1 s. A request that has no decision by then is served as if the server of
	// the limits were down.
	Timeout time.Duration

	// FailClosed refuses requests while the server of the limits does not answer, instead of serving them all.
	FailClosed bool

	// RetryAfter is the Retry-After of a 503, rounded up to seconds. 0 means 5 s.
	RetryAfter time.Duration

	// Policy is the name of the rate in the header fields. "" means "default". It may have letters, digits, and
	// the characters _-.*:
	Policy string

	// Refuse writes the response of a request that is not served. err matches ErrKey, lock.ErrNotAcquired if
	// the rate is used up, or is an error of ratelimit.Limiter.Take. The header fields are set already. If
	// Refuse is nil, the response is as in the documentation of the package.
	Refuse func(w http.ResponseWriter, r *http.Request, err error)

	// OnError is called with each error of the limits, except those that match ErrKey or lock.ErrNotAcquired, also if the
	// request is served. If OnError is nil, the errors are logged with slog.Default().
	OnError func(r *http.Request, err error)
}

const (
	defaultRetryAfter = 5 * time.Second
	defaultTimeout    = time.Second
	defaultMaxKey     = 512
	defaultPolicy     = "default"
)

// ErrKey is the error for a request whose key is empty or too long.
var ErrKey = errors.New("httplimit: the key of the request is empty or too long")

// New returns a middleware. If the configuration is invalid, the error matches lock.ErrInvalid. New sends
// nothing.
func New(c Config) (func(next http.Handler) http.Handler, error) {
	if c.Limiter == nil {
		return nil, invalid("Limiter is nil")
	}
	if c.Key == nil {
		return nil, invalid("Key is nil")
	}
	if c.Timeout < 0 || c.RetryAfter < 0 || c.MaxKey < 0 {
		return nil, invalid("Timeout, RetryAfter or MaxKey is negative")
	}
	for _, char := range c.Policy {
		if !isPolicy(char) {
			return nil, invalid("Policy has a character that it may not have: %q", char)
		}
	}

	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.RetryAfter == 0 {
		c.RetryAfter = defaultRetryAfter
	}
	if c.MaxKey == 0 {
		c.MaxKey = defaultMaxKey
	}
	if c.Policy == "" {
		c.Policy = defaultPolicy
	}
	if c.Cost == nil {
		c.Cost = func(*http.Request) int { return 1 }
	}
	if c.Refuse == nil {
		c.Refuse = c.refuse
	}
	if c.OnError == nil {
		c.OnError = logError
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { c.serve(w, r, next) })
	}, nil
}

func isPolicy(char rune) bool {
	return 'a' <= char && char <= 'z' || 'A' <= char && char <= 'Z' || '0' <= char && char <= '9' ||
		char == '_' || char == '-' || char == '.' || char == '*' || char == ':'
}

func invalid(format string, args ...any) error {
	return &lock.Error{
		Op: "configure", Kind: "adapter", Name: "httplimit",
		Err: fmt.Errorf("%w: %s", lock.ErrInvalid, fmt.Sprintf(format, args...)),
	}
}

func (c Config) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	name := c.Key(r)
	if name == "" && c.RequireKey || len(name) > c.MaxKey {
		c.Refuse(w, r, ErrKey)
		return
	}
	if name == "" {
		next.ServeHTTP(w, r)
		return
	}

	result, err := c.take(r, name)
	if result.Rate > 0 {
		c.describe(w.Header(), result)
	}
	if err == nil && (result.Taken || result.Rate == 0) {
		next.ServeHTTP(w, r)
		return
	}
	if err == nil {
		c.Refuse(w, r, lock.ErrNotAcquired)
		return
	}

	c.OnError(r, err)
	down := errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate)
	if down && !c.FailClosed && r.Context().Err() == nil {
		next.ServeHTTP(w, r)
		return
	}
	c.Refuse(w, r, err)
}

// take takes the permits of a request. Without an answer in time, the error matches lock.ErrUnavailable or
// lock.ErrIndeterminate.
func (c Config) take(r *http.Request, name string) (ratelimit.Result, error) {
	ctx, cancel := context.WithTimeout(r.Context(), c.Timeout)
	defer cancel()
	result, err := c.Limiter(name).Take(ctx, c.Cost(r))
	if errors.Is(err, lock.ErrNotAcquired) { // the time was over before the answer came
		err = errors.Join(lock.ErrUnavailable, err)
	}
	return result, err
}

// describe sets the header fields. An interval is at least a second there.
func (c Config) describe(h http.Header, result ratelimit.Result) {
	h.Set("RateLimit-Policy", fmt.Sprintf("%q;q=%d;w=%d", c.Policy, result.Rate, seconds(result.Per)))
	if result.Taken {
		h.Set("RateLimit", fmt.Sprintf("%q;r=%d", c.Policy, result.Free))
		return
	}
	h.Set("RateLimit", fmt.Sprintf("%q;r=%d;t=%d", c.Policy, result.Free, seconds(result.RetryAfter)))
	h.Set("Retry-After", strconv.FormatInt(seconds(result.RetryAfter), 10))
}

// seconds rounds up.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

func (c Config) refuse(w http.ResponseWriter, _ *http.Request, err error) {
	if err == ErrKey {
		http.Error(w, "the name of the client is missing or too long", http.StatusBadRequest)
	} else if err == lock.ErrNotAcquired {
		http.Error(w, "too many requests", http.StatusTooManyRequests)
	} else if errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate) || errors.Is(err, lock.ErrClosed) {
		w.Header().Set("Retry-After", strconv.FormatInt(seconds(c.RetryAfter), 10))
		http.Error(w, "limits are unavailable", http.StatusServiceUnavailable)
	} else {
		http.Error(w, "internal error", http.StatusInternalServerError)
	}
}

func logError(r *http.Request, err error) {
	slog.ErrorContext(r.Context(), "httplimit", "error", err, "method", r.Method, "path", r.URL.Path)
}
