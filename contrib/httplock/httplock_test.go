package httplock_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/contrib/httplock"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

const (
	patience = 20 * time.Second
	timeout  = 3 * time.Second // of the watchdog, in tests that lose locks
)

// locks returns the plain locks of a client.
func locks(c *redlatch.Client) func(string) lock.Locker {
	return func(name string) lock.Locker { return c.Lock(name) }
}

// byPath is the key of a request for /orders/7: "orders/7".
func byPath(r *http.Request) string { return strings.TrimPrefix(r.URL.Path, "/") }

// wrap returns the handler behind the middleware. Key defaults to byPath, and OnError to one that fails the test.
func wrap(t *testing.T, c httplock.Config, handler http.HandlerFunc) http.Handler {
	t.Helper()
	if c.Key == nil {
		c.Key = byPath
	}
	if c.OnError == nil {
		c.OnError = func(_ *http.Request, err error) { assert.NoError(t, err, "OnError") }
	}
	m, err := httplock.New(c)
	require.NoError(t, err)
	return m(handler)
}

// start runs an HTTP server until the end of the test.
func start(t *testing.T, h http.Handler) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // panics of handlers
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// get sends a request and returns its response, without the body.
func get(s *httptest.Server, path string) (*http.Response, error) {
	resp, err := s.Client().Get(s.URL + path)
	if err == nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	return resp, err
}

func requireStatus(t *testing.T, want int, s *httptest.Server, path string) *http.Response {
	t.Helper()
	resp, err := get(s, path)
	require.NoError(t, err)
	require.Equal(t, want, resp.StatusCode)
	return resp
}

// background sends a request in the background, whose status its call returns.
func background(t *testing.T, s *httptest.Server, path string) *harness.Call[int] {
	return harness.Start(t, t.Context(), func(context.Context) (int, error) {
		resp, err := get(s, path)
		if err != nil {
			return 0, err
		}
		return resp.StatusCode, nil
	})
}

// post sends an order in the background. A canceled call disconnects.
func post(t *testing.T, s *httptest.Server, body string) *harness.Call[any] {
	return harness.Start(t, t.Context(), func(ctx context.Context) (any, error) {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/orders/1", strings.NewReader(body))
		if err != nil {
			return nil, err
		}
		resp, err := s.Client().Do(r)
		if err == nil {
			resp.Body.Close()
		}
		return nil, err
	})
}

// gate is a handler that reports each request, and handles it until Open.
type gate struct {
	entered chan *http.Request
	open    chan struct{}
	ended   <-chan struct{} // when the test ends: the server waits for its handlers
	once    sync.Once
}

func newGate(t *testing.T) *gate {
	return &gate{entered: make(chan *http.Request, 100), open: make(chan struct{}), ended: t.Context().Done()}
}

func (g *gate) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	g.entered <- r
	select {
	case <-g.open:
	case <-g.ended:
	}
}

func (g *gate) Open() { g.once.Do(func() { close(g.open) }) }

func (g *gate) Entered(t *testing.T) *http.Request {
	t.Helper()
	return harness.Receive(t, patience, "a request at the handler", g.entered)
}

// Without Wait, a request whose key another one has gets 409. Other keys are independent, and a request without
// a key needs no lock.
func TestConflict(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		g := newGate(t)
		c := harness.Client(t, s)
		server := start(t, wrap(t, httplock.Config{Locker: locks(c)}, g.ServeHTTP))
		first := background(t, server, "/orders/1")
		_, ok := httplock.HoldFrom(g.Entered(t).Context())
		require.True(t, ok)
		require.Len(t, c.Holds(), 1)
		require.Regexp(t, `/httplock_test\.wrap \(\S+/httplock_test\.go:\d+\)$`, c.Holds()[0].Site, "the caller of New")
		resp := requireStatus(t, http.StatusConflict, server, "/orders/1")
		require.Empty(t, resp.Header.Get("Retry-After"))
		second := background(t, server, "/orders/2")
		_, ok = httplock.HoldFrom(g.Entered(t).Context())
		require.True(t, ok)
		unlocked := background(t, server, "/")
		_, ok = httplock.HoldFrom(g.Entered(t).Context())
		require.False(t, ok)
		require.Empty(t, g.entered)
		g.Open()
		require.Equal(t, http.StatusOK, first.Got())
		require.Equal(t, http.StatusOK, second.Got())
		require.Equal(t, http.StatusOK, unlocked.Got())
		requireStatus(t, http.StatusOK, server, "/orders/1")
		harness.NothingLeft(t, s.Addr)
	})
}

// A waiting request is handled when the one before it has ended. Options are those of each acquisition.
func TestWaitAndOptions(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		g, c := newGate(t), harness.Client(t, s)
		server := start(t, wrap(t, httplock.Config{
			Locker: locks(c), Wait: patience, Options: []lock.Option{lock.MaxWaiters(1)},
		}, g.ServeHTTP))
		first := background(t, server, "/orders/1")
		g.Entered(t)
		second := background(t, server, "/orders/1")
		harness.Waits(t, 1, c)
		requireStatus(t, http.StatusConflict, server, "/orders/1") // a second waiter
		require.True(t, second.Running())
		g.Open()
		require.Equal(t, http.StatusOK, first.Got())
		require.Equal(t, http.StatusOK, second.Got())
		harness.NothingLeft(t, s.Addr)
	})
}

func TestWaitIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		orders := redlatchtest.NewLocker("orders")
		release := orders.HoldElsewhere()
		h := wrap(t, httplock.Config{
			Locker: func(string) lock.Locker { return orders }, Wait: 500 * time.Millisecond,
		}, func(http.ResponseWriter, *http.Request) {})
		w, begun := httptest.NewRecorder(), time.Now()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/orders", nil))
		require.Equal(t, http.StatusConflict, w.Code)
		require.Equal(t, 500*time.Millisecond, time.Since(begun))

		time.AfterFunc(499*time.Millisecond, release)
		w = httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/orders", nil))
		require.Equal(t, http.StatusOK, w.Code)
		redlatchtest.AssertFree(t, orders)
	})
}

// A request whose client disconnects stops waiting, while the lock is still held, and leaves nothing. An HTTP/1
// server notices the disconnection when the body has been read.
func TestClientLeavesWhileWaiting(t *testing.T) {
	readBody := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			assert.NoError(t, err)
			r.Body = io.NopCloser(bytes.NewReader(body))
			next.ServeHTTP(w, r)
		})
	}
	type row struct {
		name       string
		http2      bool
		body       string
		middleware func(http.Handler) http.Handler
	}
	harness.EachOf(t, []row{
		{name: "HTTP1 without body"}, {name: "HTTP1 body read before", body: "order", middleware: readBody},
		{name: "HTTP2", http2: true, body: "order"},
	}, func(r row) string { return r.name }, func(t *testing.T, s *testserver.Server, row row) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		refused := make(chan error, 1)
		h := wrap(t, httplock.Config{
			Locker: locks(c), Wait: time.Hour,
			Refuse: func(_ http.ResponseWriter, _ *http.Request, err error) { refused <- err },
		}, func(http.ResponseWriter, *http.Request) { assert.Fail(t, "the handler has run") })
		if row.middleware != nil {
			h = row.middleware(h)
		}
		server := httptest.NewUnstartedServer(h)
		server.EnableHTTP2 = row.http2
		server.StartTLS()
		defer server.Close()

		held, err := other.Lock("orders/1").Lock(t.Context())
		require.NoError(t, err)
		left := post(t, server, row.body)
		harness.Waits(t, 1, c)
		left.Cancel(nil)
		require.ErrorIs(t, left.End(), context.Canceled)
		err = harness.Receive(t, patience, "the end of the wait", refused)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		harness.Waits(t, 0, c)
		require.NoError(t, held.Unlock(t.Context()))
		harness.Idle(t, c, other)
		harness.NothingLeft(t, s.Addr)
	})
}

// An HTTP/1 server that has not read the body does not notice that the client has left: the request gets the
// lock, and releases it.
func TestClientLeavesWithUnreadBody(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		handled := make(chan struct{})
		server := start(t, wrap(t, httplock.Config{Locker: locks(c), Wait: time.Hour},
			func(http.ResponseWriter, *http.Request) { close(handled) }))
		held, err := other.Lock("orders/1").Lock(t.Context())
		require.NoError(t, err)
		left := post(t, server, "order")
		harness.Waits(t, 1, c)
		left.Cancel(nil)
		require.ErrorIs(t, left.End(), context.Canceled)
		require.NoError(t, held.Unlock(t.Context()))
		harness.Receive(t, patience, "the handler", handled)
		harness.Idle(t, c, other)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestClientLeavesTheHandler(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		g := newGate(t)
		server := start(t, wrap(t, httplock.Config{Locker: locks(harness.Client(t, s))}, g.ServeHTTP))
		left := post(t, server, "")
		ctx := g.Entered(t).Context()
		require.NoError(t, ctx.Err())
		left.Cancel(nil)
		require.ErrorIs(t, left.End(), context.Canceled)
		harness.Receive(t, patience, "the end of the context", ctx.Done())
		require.Equal(t, context.Canceled, context.Cause(ctx))
		requireStatus(t, http.StatusConflict, server, "/orders/1") // the handler still has the lock
		g.Open()
		harness.NothingLeft(t, s.Addr)
	})
}

// With a Grace, a handler whose client has left goes on under its lock.
func TestHandlerOutlastsItsClient(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		g := newGate(t)
		requests := make(chan context.Context, 10)
		h := wrap(t, httplock.Config{Locker: locks(harness.Client(t, s)), Grace: time.Hour}, g.ServeHTTP)
		server := start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			requests <- r.Context()
			h.ServeHTTP(w, r)
		}))
		left := post(t, server, "")
		ctx := g.Entered(t).Context()
		left.Cancel(nil)
		require.ErrorIs(t, left.End(), context.Canceled)
		harness.Receive(t, patience, "the end of the request", (<-requests).Done())
		require.NoError(t, ctx.Err())
		requireStatus(t, http.StatusConflict, server, "/orders/1")
		g.Open()
		harness.Receive(t, patience, "the end of the context", ctx.Done())
		harness.NothingLeft(t, s.Addr)
	})
}

// The Grace begins when the request ends. The context of the handler has the values of the request's, and
// ends early when the lock is lost.
func TestGrace(t *testing.T) {
	const grace, work = time.Minute, time.Hour
	type key struct{}
	left := errors.New("the client has left")
	for name, row := range map[string]struct {
		lose  bool
		lasts time.Duration // how long the handler works, if its context does not end before
		want  time.Duration // how long after the departure of its client it returns
		cause error
	}{
		"over":     {lasts: work, want: grace, cause: left},
		"lost":     {lose: true, lasts: work, cause: lock.ErrLost},
		"finished": {lasts: grace / 2, want: grace / 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				orders := redlatchtest.NewLocker("orders")
				request, leave := context.WithCancelCause(context.WithValue(t.Context(), key{}, "value"))
				deadline, cancel := context.WithTimeout(request, 2*work)
				defer cancel()
				var failure error
				h := wrap(t, httplock.Config{
					Locker: func(string) lock.Locker { return orders }, Grace: grace,
					OnError: func(_ *http.Request, err error) { failure = err },
				}, func(_ http.ResponseWriter, r *http.Request) {
					ctx := r.Context()
					require.Equal(t, "value", ctx.Value(key{}))
					_, bounded := ctx.Deadline()
					require.False(t, bounded)

					time.Sleep(work) // with a client that stays
					require.NoError(t, ctx.Err())
					leave(left)
					began := time.Now()
					if row.lose {
						redlatchtest.Lose(t, ctx, lock.ReasonGone)
					}
					select {
					case <-ctx.Done():
						require.ErrorIs(t, context.Cause(ctx), row.cause)
					case <-time.After(row.lasts):
						require.NoError(t, row.cause)
					}
					require.Equal(t, row.want, time.Since(began))
				})
				h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/orders", nil).WithContext(deadline))
				require.Equal(t, row.lose, errors.Is(failure, lock.ErrLost), "%v", failure)
				redlatchtest.AssertFree(t, orders)
			})
		})
	}
}

// A request that waits for its lock ends with its client.
func TestWaitHasNoGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		orders := redlatchtest.NewLocker("orders")
		defer orders.HoldElsewhere()()
		ctx, leave := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, leave)
		h := wrap(t, httplock.Config{
			Locker: func(string) lock.Locker { return orders }, Wait: time.Hour, Grace: time.Hour,
		}, func(http.ResponseWriter, *http.Request) { assert.Fail(t, "the handler has run") })
		began := time.Now()
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/orders", nil).WithContext(ctx))
		require.Equal(t, time.Second, time.Since(began))
	})
}

func TestUnlocksWhateverTheHandlerDoes(t *testing.T) {
	hijack := func(w http.ResponseWriter) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if assert.NoError(t, err) {
			conn.Close()
		}
	}
	type row struct {
		name    string
		handler http.HandlerFunc
	}
	harness.EachOf(t, []row{
		{"panic", func(http.ResponseWriter, *http.Request) { panic("boom") }},
		{"ErrAbortHandler", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }},
		{"hijack", func(w http.ResponseWriter, _ *http.Request) { hijack(w) }},
		{"hijack and panic", func(w http.ResponseWriter, _ *http.Request) { hijack(w); panic("boom") }},
		{"flush and panic", func(w http.ResponseWriter, _ *http.Request) {
			assert.NoError(t, http.NewResponseController(w).Flush())
			panic("boom")
		}},
	}, func(r row) string { return r.name }, func(t *testing.T, s *testserver.Server, row row) {
		var locked atomic.Bool
		server := start(t, wrap(t, httplock.Config{Locker: locks(harness.Client(t, s))}, func(w http.ResponseWriter, r *http.Request) {
			locked.Store(harness.Do(t, s.Addr, "EXISTS", "orders/1") == ":1")
			row.handler(w, r)
		}))
		for range 2 {
			_, err := get(server, "/orders/1")
			if row.name != "flush and panic" {
				require.Error(t, err)
			}
			require.True(t, locked.Load())
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// A panic continues to the middlewares outside.
func TestPanicContinues(t *testing.T) {
	orders := redlatchtest.NewLocker("orders")
	h := wrap(t, httplock.Config{Locker: func(string) lock.Locker { return orders }},
		func(http.ResponseWriter, *http.Request) { panic("boom") })
	require.PanicsWithValue(t, "boom", func() {
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/orders", nil))
	})
	redlatchtest.AssertFree(t, orders)
}

// The context of the handler ends when the lock is lost, and the release reports it.
func TestLostLock(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), harness.Client(t, s)
		g, failures := newGate(t), make(chan error, 10)
		server := start(t, wrap(t, httplock.Config{
			Locker: locks(c), OnError: func(_ *http.Request, err error) { failures <- err },
		}, g.ServeHTTP))
		first := background(t, server, "/orders/1")
		ctx := g.Entered(t).Context()
		forced, err := other.Lock("orders/1").ForceUnlock(t.Context())
		require.NoError(t, err)
		require.True(t, forced)
		harness.Receive(t, patience, "the loss", ctx.Done())
		var lost *lock.LostError
		require.ErrorAs(t, context.Cause(ctx), &lost)
		require.Equal(t, lock.ReasonGone, lost.Reason)
		require.Empty(t, failures)
		g.Open()
		require.Equal(t, http.StatusOK, first.Got()) // the handler has not looked at its context
		require.ErrorIs(t, harness.Receive(t, patience, "the error of the release", failures), lock.ErrLost)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestResponses(t *testing.T) {
	refusal := errors.New("NOPERM")
	for _, test := range []struct {
		err        error
		status     int
		config     time.Duration // RetryAfter
		retryAfter string
	}{
		{lock.ErrNotAcquired, http.StatusConflict, 0, ""},
		{lock.ErrUnavailable, http.StatusServiceUnavailable, 0, "5"},
		{lock.ErrIndeterminate, http.StatusServiceUnavailable, time.Second + 1, "2"},
		{lock.ErrClosed, http.StatusServiceUnavailable, time.Second, "1"},
		{lock.ErrInvalid, http.StatusInternalServerError, 0, ""},
		{lock.ErrUnsupported, http.StatusInternalServerError, 0, ""},
		{refusal, http.StatusInternalServerError, 0, ""},
	} {
		for _, custom := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/custom=%v", test.err, custom), func(t *testing.T) {
				orders := redlatchtest.NewLocker("orders")
				orders.FailLock(fmt.Errorf("secret: %w", test.err))
				var reported []error
				c := httplock.Config{
					Locker:     func(string) lock.Locker { return orders },
					RetryAfter: test.config,
					OnError:    func(_ *http.Request, err error) { reported = append(reported, err) },
				}
				if custom {
					c.Refuse = func(w http.ResponseWriter, r *http.Request, err error) {
						assert.Equal(t, "/orders", r.URL.Path)
						assert.ErrorIs(t, err, test.err)
						w.WriteHeader(http.StatusTeapot)
					}
				}
				h := wrap(t, c, func(http.ResponseWriter, *http.Request) { assert.Fail(t, "the handler has run") })
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/orders", nil))
				if custom {
					require.Equal(t, http.StatusTeapot, w.Code)
				} else {
					require.Equal(t, test.status, w.Code)
					require.Equal(t, test.retryAfter, w.Header().Get("Retry-After"))
				}
				require.NotContains(t, w.Body.String(), "secret")
				require.Equal(t, test.err != lock.ErrNotAcquired, len(reported) == 1)
			})
		}
	}
}

// By default errors are logged.
func TestKeysThatClientsChoose(t *testing.T) {
	locker := func(string) lock.Locker { return redlatchtest.NewLocker("one") }
	for _, row := range []struct {
		config httplock.Config
		path   string
		want   int
	}{
		{httplock.Config{}, "/" + strings.Repeat("x", 512), http.StatusOK},
		{httplock.Config{}, "/" + strings.Repeat("x", 513), http.StatusBadRequest},
		{httplock.Config{MaxKey: 3}, "/xxx", http.StatusOK},
		{httplock.Config{MaxKey: 3}, "/xxxx", http.StatusBadRequest},
		{httplock.Config{}, "/", http.StatusOK},
		{httplock.Config{RequireKey: true}, "/", http.StatusBadRequest},
		{httplock.Config{RequireKey: true}, "/x", http.StatusOK},
	} {
		row.config.Locker = locker
		s := start(t, wrap(t, row.config, func(http.ResponseWriter, *http.Request) {}))
		resp, err := get(s, row.path)
		require.NoError(t, err)
		require.Equal(t, row.want, resp.StatusCode, "%+v %.10s", row.config, row.path)
	}
	refused := make(chan error, 1)
	c := httplock.Config{Locker: locker, RequireKey: true, Refuse: func(_ http.ResponseWriter, _ *http.Request, err error) { refused <- err }}
	_, err := get(start(t, wrap(t, c, func(http.ResponseWriter, *http.Request) {})), "/")
	require.NoError(t, err)
	require.ErrorIs(t, <-refused, httplock.ErrKey)
}

func TestErrorsAreLogged(t *testing.T) {
	var out bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&out, nil)))
	defer slog.SetDefault(before)
	orders := redlatchtest.NewLocker("orders")
	m, err := httplock.New(httplock.Config{Locker: func(string) lock.Locker { return orders }, Key: byPath})
	require.NoError(t, err)
	h := m(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	orders.FailUnlock(lock.ErrIndeterminate)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/orders/1", nil))
	require.Equal(t, http.StatusOK, w.Code)
	require.Contains(t, out.String(), lock.ErrIndeterminate.Error())
	require.Contains(t, out.String(), "method=POST path=/orders/1")

	out.Reset()
	release := orders.HoldElsewhere()
	defer release()
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/orders/1", nil))
	require.Empty(t, out.String(), "a conflict")
}

func TestInvalidConfig(t *testing.T) {
	locker := func(name string) lock.Locker { return redlatchtest.NewLocker(name) }
	for want, c := range map[string]httplock.Config{
		"Locker is nil":          {Key: byPath},
		"Key is nil":             {Locker: locker},
		"Wait is negative":       {Locker: locker, Key: byPath, Wait: -1},
		"Grace is negative":      {Locker: locker, Key: byPath, Grace: -1},
		"MaxKey is negative":     {Locker: locker, Key: byPath, MaxKey: -1},
		"RetryAfter is negative": {Locker: locker, Key: byPath, RetryAfter: -1},
		"lock.Wait":              {Locker: locker, Key: byPath, Options: []lock.Option{lock.Wait(0)}},
		"lock.Parent":            {Locker: locker, Key: byPath, Options: []lock.Option{lock.Parent(t.Context())}},
		"lease":                  {Locker: locker, Key: byPath, Options: []lock.Option{lock.Lease(0)}},
		"a nil option":           {Locker: locker, Key: byPath, Options: []lock.Option{nil}},
	} {
		m, err := httplock.New(c)
		require.Nil(t, m)
		require.ErrorIs(t, err, lock.ErrInvalid)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, `configure "httplock": `)
	}
}

// A handler may leave the lock to another process.
func TestHandlerDetaches(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ids := make(chan string, 1)
		server := start(t, wrap(t, httplock.Config{Locker: locks(c)}, func(_ http.ResponseWriter, r *http.Request) {
			h, _ := httplock.HoldFrom(r.Context())
			id, err := lock.Detach(r.Context(), h, time.Minute)
			assert.NoError(t, err)
			ids <- id
		}))
		requireStatus(t, http.StatusOK, server, "/orders/1")
		requireStatus(t, http.StatusConflict, server, "/orders/1")
		h, err := harness.Client(t, s).Lock("orders/1").Adopt(t.Context(), <-ids)
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// The server removes the temporary files of a form that the handler has parsed.
func TestTemporaryFilesAreRemoved(t *testing.T) {
	orders := redlatchtest.NewLocker("orders")
	files := make(chan string, 1)
	server := start(t, wrap(t, httplock.Config{Locker: func(string) lock.Locker { return orders }},
		func(_ http.ResponseWriter, r *http.Request) {
			assert.NoError(t, r.ParseMultipartForm(1))
			f, err := r.MultipartForm.File["scan"][0].Open()
			if assert.NoError(t, err) {
				files <- f.(*os.File).Name()
				f.Close()
			}
		}))
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	part, err := form.CreateFormFile("scan", "scan.png")
	require.NoError(t, err)
	_, err = part.Write(make([]byte, 20<<20)) // more than is kept in memory
	require.NoError(t, err)
	require.NoError(t, form.Close())
	resp, err := server.Client().Post(server.URL+"/orders", form.FormDataContentType(), &body)
	require.NoError(t, err)
	resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	file := <-files
	harness.Eventually(t, patience, "the file is removed", func() bool {
		_, err := os.Stat(file)
		return errors.Is(err, os.ErrNotExist)
	})
}
