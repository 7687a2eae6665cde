package httplimit_test

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/contrib/httplimit"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

// limiters returns the limiters of a client, with 2 requests per hour each.
func limiters(c *redlatch.Client) func(string) *ratelimit.Limiter {
	return func(name string) *ratelimit.Limiter { return c.RateLimiter(name, ratelimit.Rate(2, time.Hour)) }
}

// wrap returns a handler behind the middleware. Key defaults to the path, and OnError to one that fails the test.
func wrap(t *testing.T, c httplimit.Config) http.Handler {
	t.Helper()
	if c.Key == nil {
		c.Key = func(r *http.Request) string { return strings.TrimPrefix(r.URL.Path, "/") }
	}
	if c.OnError == nil {
		c.OnError = func(_ *http.Request, err error) { assert.NoError(t, err, "OnError") }
	}
	m, err := httplimit.New(c)
	require.NoError(t, err)
	return m(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
}

// get returns the response to a request.
func get(t *testing.T, h http.Handler, path string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	return w
}

// Requests over the rate of their key get 429, in all processes, with the header fields.
func TestLimit(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		one := wrap(t, httplimit.Config{Limiter: limiters(harness.Client(t, s))})
		two := wrap(t, httplimit.Config{Limiter: limiters(harness.Client(t, s)), Policy: "per-user"})
		w := get(t, one, "/a")
		require.Equal(t, http.StatusNoContent, w.Code)
		require.Equal(t, `"default";q=2;w=3600`, w.Header().Get("RateLimit-Policy"))
		require.Equal(t, `"default";r=1`, w.Header().Get("RateLimit"))
		require.Empty(t, w.Header().Get("Retry-After"))
		w = get(t, two, "/a")
		require.Equal(t, http.StatusNoContent, w.Code)
		require.Equal(t, `"per-user";r=0`, w.Header().Get("RateLimit"))
		for range 2 {
			w = get(t, one, "/a")
			require.Equal(t, http.StatusTooManyRequests, w.Code)
			after, err := strconv.Atoi(w.Header().Get("Retry-After"))
			require.NoError(t, err)
			require.InDelta(t, 3600, after, 60)
			require.Equal(t, `"default";r=0;t=`+strconv.Itoa(after), w.Header().Get("RateLimit"))
		}
		require.Equal(t, http.StatusNoContent, get(t, one, "/b").Code)
	})
}

func TestKeys(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h := wrap(t, httplimit.Config{Limiter: limiters(harness.Client(t, s)), MaxKey: 5})
		for range 3 {
			w := get(t, h, "/")
			require.Equal(t, http.StatusNoContent, w.Code)
			require.Empty(t, w.Header())
		}
		require.Equal(t, http.StatusBadRequest, get(t, h, "/123456").Code)
		h = wrap(t, httplimit.Config{Limiter: limiters(harness.Client(t, s)), RequireKey: true})
		require.Equal(t, http.StatusBadRequest, get(t, h, "/").Code)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestCost(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		cost := 0
		var failure error
		h := wrap(t, httplimit.Config{
			Limiter: limiters(harness.Client(t, s)), Cost: func(*http.Request) int { return cost },
			OnError: func(_ *http.Request, err error) { failure = err },
		})
		require.Equal(t, http.StatusNoContent, get(t, h, "/a").Code)
		cost = 2
		require.Equal(t, http.StatusNoContent, get(t, h, "/a").Code)
		require.Equal(t, http.StatusTooManyRequests, get(t, h, "/a").Code)
		require.NoError(t, failure)
		cost = 3 // which is never served
		require.Equal(t, http.StatusInternalServerError, get(t, h, "/a").Code)
		require.ErrorIs(t, failure, lock.ErrInvalid)
	})
}

// Without the server, requests are served or refused, as configured.
func TestServerDown(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		var failure error
		config := httplimit.Config{
			Limiter: limiters(c), Timeout: 100 * time.Millisecond, RetryAfter: 1500 * time.Millisecond,
			OnError: func(_ *http.Request, err error) { failure = err },
		}
		open := wrap(t, config)
		config.FailClosed = true
		closed := wrap(t, config)
		g.Stall()
		for range 3 {
			failure = nil
			require.Equal(t, http.StatusNoContent, get(t, open, "/a").Code)
			require.Error(t, failure)
		}
		w := get(t, closed, "/a")
		require.Equal(t, http.StatusServiceUnavailable, w.Code)
		require.Equal(t, "2", w.Header().Get("Retry-After"))
		require.NoError(t, g.Open())
		c.Close()
		w = get(t, open, "/a")
		require.Equal(t, http.StatusServiceUnavailable, w.Code)
		require.ErrorIs(t, failure, lock.ErrClosed)
	})
}

func TestRefuse(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var refused error
		h := wrap(t, httplimit.Config{
			Limiter: limiters(harness.Client(t, s)),
			Refuse: func(w http.ResponseWriter, _ *http.Request, err error) {
				refused = err
				w.WriteHeader(http.StatusTeapot)
			},
		})
		get(t, h, "/a")
		get(t, h, "/a")
		require.NoError(t, refused)
		w := get(t, h, "/a")
		require.Equal(t, http.StatusTeapot, w.Code)
		require.ErrorIs(t, refused, lock.ErrNotAcquired)
		require.NotEmpty(t, w.Header().Get("Retry-After"))
	})
}

func TestInvalidConfig(t *testing.T) {
	limiter := func(string) *ratelimit.Limiter { return nil }
	key := func(*http.Request) string { return "" }
	for what, c := range map[string]httplimit.Config{
		"no limiter":  {Key: key},
		"no key":      {Limiter: limiter},
		"timeout":     {Limiter: limiter, Key: key, Timeout: -1},
		"retry after": {Limiter: limiter, Key: key, RetryAfter: -1},
		"max key":     {Limiter: limiter, Key: key, MaxKey: -1},
		"policy":      {Limiter: limiter, Key: key, Policy: `a"b`},
	} {
		_, err := httplimit.New(c)
		require.ErrorIs(t, err, lock.ErrInvalid, what)
		var e *lock.Error
		require.ErrorAs(t, err, &e, what)
		require.Equal(t, "httplimit", e.Name)
	}
}
