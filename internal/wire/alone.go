package wire

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"
)

// Link is what a client tells the connections that it has made of its requests.
//
// A connection of rueidis begins in a synchronous mode, in which callers write their requests and
// read the replies themselves. Two goroutines take over, for good, when two requests overlap, or
// at the first context that can be canceled and has no deadline. That suits many callers; for a
// single one each request then takes twice the processor time. So a request that is alone gets a
// context with a deadline, at which the connection would time out anyway. rueidis does not heed the
// end of such a context, so the connection does (see Alone).
type Link struct {
	// Contended is set when a caller begins to wait for another: requests that clean up must not queue
	// behind one that has no reply. It is also set when a connection was given up, so that callers that
	// leave a slow server cost one connection and not many. From then on connections do not stay in the
	// synchronous mode.
	Contended atomic.Bool

	timeout  time.Duration
	alone    atomic.Pointer[Alone]
	deadline atomic.Int64 // of alone, in Unix nanoseconds

	mu       sync.Mutex
	open     map[Conn]struct{}
	redialed time.Time // when they were last closed
}

// Conn is a connection of a Link.
type Conn interface {
	// GiveUp closes the connection. Its requests fail with err.
	GiveUp(err error)
}

// Opened notes that there is a connection. Closed must be called when it is closed.
func (l *Link) Opened(c Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = make(map[Conn]struct{})
	}
	l.open[c] = struct{}{}
}

// Closed notes that a connection is closed.
func (l *Link) Closed(c Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, c)
}

// redialPause is the least time between two calls of redial that close connections.
const redialPause = time.Second

// mayRedial reports whether the connections may be closed again, and notes that they are.
func (l *Link) mayRedial() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.redialed) < redialPause {
		return false
	}
	l.redialed = time.Now()
	return true
}

// redial closes all connections, so that they are made anew.
func (l *Link) redial() {
	l.mu.Lock()
	conns := slices.Collect(maps.Keys(l.open))
	l.mu.Unlock()
	for _, c := range conns {
		c.GiveUp(errGivenUp)
	}
}

// NewLink returns the link of connections that wait for a reply for as long as timeout.
func NewLink(timeout time.Duration) *Link { return &Link{timeout: timeout} }

// Alone returns the request that is alone, if deadline is its own, and otherwise nil. Deadlines
// identify requests, because a connection learns nothing else of them.
func (l *Link) Alone(deadline time.Time) *Alone {
	if deadline.IsZero() || l.deadline.Load() != deadline.UnixNano() {
		return nil
	}
	return l.alone.Load()
}

// Alone is the context of a request that has found no other such request under way. If rueidis is
// in its synchronous mode, the connection of the request has to end it when the caller's context
// ends, and then calls GiveUp. Otherwise rueidis heeds the context.
type Alone struct {
	context.Context
	Caller   context.Context
	deadline time.Time
	givenUp  bool
	kept     bool // a goroutine may still refer to it
}

// Deadline implements context.Context.
func (a *Alone) Deadline() (time.Time, bool) { return a.deadline, true }

// Err implements context.Context.
func (a *Alone) Err() error {
	if a.givenUp {
		return errGivenUp
	}
	return a.Context.Err()
}

type aloneKey struct{}

// Value implements context.Context.
func (a *Alone) Value(key any) any {
	if key == (aloneKey{}) {
		return a
	}
	return a.Context.Value(key)
}

// Keep notes that goroutines may refer to ctx when the request is over, because it has to dial.
func Keep(ctx context.Context) {
	if a, ok := ctx.Value(aloneKey{}).(*Alone); ok {
		a.kept = true
	}
}

// GiveUp notes that the connection is given up before there is a reply, and returns the error for
// that.
func (a *Alone) GiveUp() error {
	a.givenUp = true
	return errGivenUp
}

// errGivenUp is of a connection that was given up. The request that was alone may run, and another one
// may overtake it. All others on a shared connection that rueidis returns the same error for were not
// sent: they waited for that request, or found the connection closed.
var errGivenUp = errors.New("redlatch: gave up the connection that waited for the reply")

// notSent reports whether a request under ctx that has failed with err was not sent, and has to be made
// again.
func notSent(ctx context.Context, err error) bool {
	return err != nil && errors.Is(err, errGivenUp) && ctx.Err() == nil
}

var aloneContexts = sync.Pool{New: func() any { return new(Alone) }}

// free reports whether a request may be alone.
func (l *Link) free() bool { return l != nil && !l.Contended.Load() && l.alone.Load() == nil }

// enter returns the context of a request under ctx, for a caller with that context. It returns nil if
// the request is not alone. leave must be called after the request.
func (l *Link) enter(ctx, caller context.Context) *Alone {
	if !l.free() {
		return nil
	}

	a := aloneContexts.Get().(*Alone)

	// One nanosecond less than a deadline of rueidis for another connection at the same time.
	*a = Alone{Context: ctx, Caller: caller, deadline: time.Now().Add(l.timeout - time.Nanosecond)}
	if !l.alone.CompareAndSwap(nil, a) {
		return nil
	}

	l.deadline.Store(a.deadline.UnixNano())
	return a
}

// leave ends a request that is alone. It returns the reply, or why there is none.
func (l *Link) leave(a *Alone, reply rueidis.RedisResult) rueidis.RedisResult {
	l.deadline.Store(0)
	l.alone.Store(nil)
	err := reply.NonRedisError()
	if err == nil && !a.kept {
		*a = Alone{}
		aloneContexts.Put(a)
	} else if a.givenUp {
		l.Contended.Store(true)
		return rueidis.NewErrorResult(errors.Join(a.Caller.Err(), errGivenUp))
	}
	return reply
}
