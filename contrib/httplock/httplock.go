// Package httplock is a net/http middleware that serializes requests by a key, such as the number
// of an order: while a request with that key is handled, no other process handles one.
//
//	serialize, err := httplock.New(httplock.Config{
//		Locker: func(name string) lock.Locker { return client.Lock(name) },
//		Key:    func(r *http.Request) string { return "order:" + r.PathValue("id") },
//		Wait:   500 * time.Millisecond,
//	})
//	...
//	mux.Handle("POST /orders/{id}/shipment", serialize(shipOrder))
//
// # Responses
//
// A request that does not get its lock does not reach the handler, so the client may repeat it:
//
//	400 Bad Request          the key is longer than MaxKey, or empty although RequireKey is set
//	409 Conflict             another request has the key, and Wait is over; or too many wait
//	                         (lock.MaxWaiters)
//	503 Service Unavailable  the server of the locks is down, or its reply was lost
//	                         (lock.ErrIndeterminate), or the redlatch client is closed; Retry-After
//	                         says when to come back
//	500                      the server refuses, or the key is no valid name of a lock: the
//	                         program or the server has to be corrected
//
// A lost reply is no 504, after which a client must not repeat a POST: whether the request has acquired the
// lock is unknown, but the handler has not run, and the lock is released in the background.
//
// The cause goes to Config.OnError, except that of a 400 and a 409, which are part of normal operation.
// Config.Refuse replaces these responses.
//
// # Keys that clients choose
//
// Put a literal prefix in front of what a client chooses, as in the example above: without one a client
// can name any lock of the application, and keys that belong to other objects. The names of a fenced lock
// should be few, or come from a table of the application: each leaves a counter on the server for ever.
//
// # The handler
//
// Its request has the context of the hold, which ends when the client disconnects, or Config.Grace later,
// and when the lock is lost; context.Cause tells which (see lock.LostError). The handler should then stop
// and answer 5xx: another request with the key may have begun. HoldFrom returns the hold, for its fencing
// token. The ResponseWriter is the server's own, so Flush, Hijack and http.ResponseController work.
//
// The lock is released when the handler returns or panics. A handler that hijacks the connection, or
// starts a goroutine, loses the lock with its return, even if that work goes on. The server sends a
// short response after the handler, so a client that has the response can send its next request
// without a conflict.
//
// http.TimeoutHandler belongs outside of this middleware. Inside, it answers for the handler, which goes on
// without the lock.
//
// # Clients that leave
//
// A request stops waiting when its client disconnects, and leaves no lock. An HTTP/1 server notices
// that only when the body of the request has been read. A request with an unread body waits until
// Wait is over or it has the lock. A middleware before this one can read the body; then, however, an
// upload that gets 409 has been sent in vain.
//
// The work of a handler ends with its client, too, unless Config.Grace lets it finish. A handler that was
// left runs under its lock like any other, and its client, which has no response, should find out what
// became of its request before it repeats it: by a key of idempotency, or by a GET.
//
// http.Server.WriteTimeout should exceed Wait, the longest handler and 5 s: while the server of the locks does not
// answer, the release takes that long.
//
// # Shutdown
//
// A program calls http.Server.Shutdown first and Client.Shutdown second. The first ends no context of a
// request. It waits for all handlers of HTTP/1, but not for handlers of HTTP/2 whose clients have left; the
// second waits for these, because they have their locks. Each gets a context that lasts longer than
// Config.Grace. http.Server.Close disconnects all clients, so that handlers have Config.Grace left, and
// Client.Close ends their contexts at once.
package httplock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Config configures the middleware. Locker and Key are required.
type Config struct {
	// Locker returns the lock of that name, of any kind. It is called for each request.
	Locker func(name string) lock.Locker

	// Key returns the name of the lock for a request; requests with an equal name exclude each
	// other. A request whose name is "" is handled without a lock, unless RequireKey is set. Parts of
	// the name that the client chooses should be checked: in a cluster, some names with braces are not
	// valid.
	Key func(r *http.Request) string

	// MaxKey is the length in bytes of the longest name. 0 means 512. A request with a longer one is
	// refused, with an error that matches ErrKey.
	MaxKey int

	// RequireKey refuses requests whose name is "", with an error that matches ErrKey.
	RequireKey bool

	// Wait is how long a request waits for the lock. 0 means not at all.
	Wait time.Duration

	// Grace is how long a handler may go on after its client has disconnected, or the context of its request
	// has ended otherwise. 0 means not at all. With a Grace the context of the handler has the values of the
	// context of the request, but no deadline, and ends when Grace is over, with the same cause. It still ends
	// at once when the lock is lost. A request that waits for its lock has no Grace. To bound the time
	// under the lock as a whole, set lock.MaxHold in Options.
	Grace time.Duration

	// Options are further options of each acquisition, such as lock.MaxHold and
	// lock.MaxWaiters. lock.Wait and lock.Parent are not valid here.
	Options []lock.Option

	// RetryAfter is the Retry-After of a 503, rounded up to seconds. 0 means 5 s.
	RetryAfter time.Duration

	// Refuse writes the response of a request that has not got its lock. err matches ErrKey, or is
	// that of lock.Locker.Lock. If Refuse is nil, the response is as in the documentation of the package.
	Refuse func(w http.ResponseWriter, r *http.Request, err error)

	// OnError is called with each error of the locks, except those that match ErrKey or
	// lock.ErrNotAcquired: of an acquisition before Refuse, of a release after the handler. If a
	// release reports lock.ErrLost, the handler may have run at the same time as another one. If
	// OnError is nil, the errors are logged with slog.Default().
	OnError func(r *http.Request, err error)
}

const (
	defaultRetryAfter = 5 * time.Second
	defaultMaxKey     = 512
)

// ErrKey is the error for a request whose key is empty or too long.
var ErrKey = errors.New("httplock: the key of the request is empty or too long")

// New returns a middleware. If the configuration is invalid, the error matches lock.ErrInvalid.
// New sends nothing. Client.Holds shows its caller as the line that acquires the locks.
func New(c Config) (func(next http.Handler) http.Handler, error) {
	o, err := lock.Resolve(c.Options...)
	switch {
	case err != nil:
		return nil, refused(fmt.Errorf("%w (Options)", err))
	case c.Locker == nil:
		return nil, invalid("Locker is nil")
	case c.Key == nil:
		return nil, invalid("Key is nil")
	case c.Wait < 0:
		return nil, invalid("Wait is negative")
	case c.RetryAfter < 0:
		return nil, invalid("RetryAfter is negative")
	case c.MaxKey < 0:
		return nil, invalid("MaxKey is negative")
	case c.Grace < 0:
		return nil, invalid("Grace is negative")
	case o.Bounded:
		return nil, invalid("Options: lock.Wait: set Config.Wait instead")
	case o.Parent != nil:
		return nil, invalid("Options: lock.Parent: the context of the request is the parent of the hold's; set Config.Grace for work that outlasts its client")
	}
	if c.RetryAfter == 0 {
		c.RetryAfter = defaultRetryAfter
	}
	if c.MaxKey == 0 {
		c.MaxKey = defaultMaxKey
	}
	if c.Refuse == nil {
		c.Refuse = c.refuse
	}
	if c.OnError == nil {
		c.OnError = logError
	}
	c.Options = append([]lock.Option{lock.Wait(c.Wait), lock.FailFast(), lock.Site(1)}, c.Options...)
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { c.serve(w, r, next) })
	}, nil
}

func invalid(what string) error { return refused(fmt.Errorf("%w: %s", lock.ErrInvalid, what)) }

func refused(err error) error {
	return &lock.Error{Op: "configure", Kind: "adapter", Name: "httplock", Err: err}
}

func (c Config) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	switch name := c.Key(r); {
	case name == "" && c.RequireKey, len(name) > c.MaxKey:
		c.Refuse(w, r, ErrKey)
	case name == "":
		next.ServeHTTP(w, r)
	default:
		c.serveWith(c.Locker(name), w, r, next)
	}
}

// serveWith serves a request under a lock.
func (c Config) serveWith(l lock.Locker, w http.ResponseWriter, r *http.Request, next http.Handler) {
	opts := c.Options
	if c.Grace > 0 {
		parent, cancel := outlasting(r.Context(), c.Grace)
		defer cancel()
		opts = append(slices.Clip(opts), lock.Parent(parent))
	}
	h, err := l.Lock(r.Context(), opts...)
	if err != nil {
		if !errors.Is(err, lock.ErrNotAcquired) {
			c.OnError(r, err)
		}
		c.Refuse(w, r, err)
		return
	}
	held := r.WithContext(context.WithValue(h.Context(), holdKey{}, h))
	defer func() {
		// The server removes the temporary files of its own request only.
		if r.MultipartForm == nil {
			r.MultipartForm = held.MultipartForm
		}
		// A handler may have ended the hold itself, with Unlock or Detach.
		if err := h.Unlock(r.Context()); err != nil && !errors.Is(err, lock.ErrNotHeld) {
			c.OnError(r, err)
		}
	}()
	next.ServeHTTP(w, held)
}

// outlasting returns a context with the values of ctx that ends that long after ctx, with the cause of ctx, or
// when cancel is called.
func outlasting(ctx context.Context, grace time.Duration) (_ context.Context, cancel func()) {
	longer, end := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-timer.C:
			end(context.Cause(ctx))
		case <-longer.Done():
		}
	})
	return longer, func() {
		stop()
		end(nil)
	}
}

func (c Config) refuse(w http.ResponseWriter, _ *http.Request, err error) {
	switch {
	case err == ErrKey:
		http.Error(w, "the name of the resource is missing or too long", http.StatusBadRequest)
	case errors.Is(err, lock.ErrNotAcquired):
		http.Error(w, "another request for this resource is in progress", http.StatusConflict)
	case errors.Is(err, lock.ErrUnavailable), errors.Is(err, lock.ErrIndeterminate), errors.Is(err, lock.ErrClosed):
		seconds := (c.RetryAfter-1)/time.Second + 1
		w.Header().Set("Retry-After", strconv.FormatInt(int64(seconds), 10))
		http.Error(w, "locks are unavailable", http.StatusServiceUnavailable)
	default:
		http.Error(w, "internal error", http.StatusInternalServerError)
	}
}

func logError(r *http.Request, err error) {
	slog.ErrorContext(r.Context(), "httplock", "error", err, "method", r.Method, "path", r.URL.Path)
}

type holdKey struct{}

// HoldFrom returns the hold under which a request is handled, for a handler, and whether there is one.
// ctx is the context of the request or a child of it. The middleware releases the hold. Of a fenced
// lock, Hold.Token is the fencing token.
func HoldFrom(ctx context.Context) (lock.Hold, bool) {
	h, ok := ctx.Value(holdKey{}).(lock.Hold)
	return h, ok
}
