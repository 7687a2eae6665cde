package wire

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"
)

// Prompt is a rueidis.Client whose Do and DoMulti return when their context ends. Those of
// rueidis do not while they connect, or while too many requests are in flight.
//
// A caller whose context cannot end makes its request itself. All others leave their requests to
// another goroutine and wait for it or for the end of their context, so that nothing can keep them. There
// is one exception, for the sake of single callers: a request that is alone (see Link). A request is not
// sent after its caller has left; if it was sent before, it lasts until the server answers or rueidis
// gives up the connection.
//
// While a server is silent, few more requests are sent to it, since it would run them all when nobody
// waits for them any more. Commands on dedicated connections are left to rueidis.
type Prompt struct {
	rueidis.Client
	link      *Link // nil for a borrowed client
	gathering gathering
	single    bool // there is one route
	routes    []route
	queues    []chan struct{} // have room for requests to a silent server
	pipelined context.Context // never ends, but looks as if it could: rueidis sends the next request before the reply comes
}

// route is what is known of the server that has a range of slots. Times count from started.
type route struct {
	answered  atomic.Int64 // when the last answer came; 0 after a failure
	since     atomic.Int64 // there are requests in flight, or one has failed
	roundTrip atomic.Int64 // a mean of the last ones
	inFlight  atomic.Int32 // requests without a reply, also those whose callers have left
}

const (
	// fresh is the age up to which an answer shows that the connection works.
	fresh = 20 * time.Millisecond
	// A server is silent if requests have no answer for longer than quiet, and than that many round
	// trips.
	quiet           = 200 * time.Millisecond
	quietRoundTrips = 4
	// maxInFlight is less than the number of requests and batches that a connection takes, 1024.
	maxInFlight = 512
	// maxHeld is the number of requests to a silent server.
	maxHeld = 32
	// mostTries bounds how often a request that was not sent is made again.
	mostTries = 10
	// In a cluster a route is a range of slots, since a range mostly belongs to one node.
	clusterRoutes = 256
	clusterQueues = 16
)

var started = time.Now()

var (
	// errNotSent is for requests whose context had ended before.
	errNotSent = errors.New("redlatch: not sent in time")
	// errHeld is for those that were held back until then, because others have no reply.
	errHeld = errors.New("redlatch: not sent, because the server does not answer")
)

// NotSent reports whether a request under ctx has failed with err only because ctx had ended before.
func NotSent(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(err, errNotSent)
}

// NewPrompt returns a Prompt that uses c. link informs its connections, or is nil.
func NewPrompt(c rueidis.Client, link *Link) *Prompt {
	routes, queues := 1, 1
	if c.Mode() == rueidis.ClientModeCluster {
		routes, queues = clusterRoutes, clusterQueues
	}
	p := &Prompt{
		Client: c, link: link, single: routes == 1,
		routes: make([]route, routes), queues: make([]chan struct{}, queues),
	}
	p.pipelined = unwatched{context.Background(), make(chan struct{})}
	p.gathering.client, p.gathering.ctx = c, p.pipelined
	p.gathering.route, p.gathering.room = &p.routes[0], make(chan struct{}, maxInFlight)
	for i := range p.queues {
		p.queues[i] = make(chan struct{}, maxHeld)
	}
	return p
}

// Answers reports whether the server has just answered. For a cluster it reports false, because
// each node may or may not.
func (p *Prompt) Answers() bool { return p.single && p.routes[0].answers() }

// answers reports whether the last answer is a fresh one.
func (r *route) answers() bool {
	last := r.answered.Load()
	return last != 0 && time.Since(started)-time.Duration(last) < fresh
}

// begin counts a request, and returns how many are in flight.
func (r *route) begin() int32 {
	n := r.inFlight.Add(1)
	if n == 1 {
		r.since.Store(int64(time.Since(started)))
	}
	return n
}

// note notes the result of a request that was sent then. An error is not a reply of the server.
func (r *route) note(began time.Duration, err error) {
	now := time.Since(started)
	switch {
	case err == context.Canceled || err == context.DeadlineExceeded: // which says nothing of the server
	case err != nil:
		r.answered.Store(0)
		r.since.Store(int64(now))
	default:
		r.answered.Store(int64(now))
		took, mean := int64(now-began), r.roundTrip.Load()
		if mean > 0 {
			took = mean + (took-mean)/8
		}
		r.roundTrip.Store(took) // another one may get lost
	}
}

// silent reports whether the server has not answered for long although there are requests in flight.
func (r *route) silent() bool {
	if r.inFlight.Load() == 0 {
		return false
	}
	last := time.Duration(max(r.answered.Load(), r.since.Load()))
	return time.Since(started)-last > max(quiet, quietRoundTrips*time.Duration(r.roundTrip.Load()))
}

// admit waits while the server is silent, until few requests are under way to it, or ctx ends. The
// result has to be received from when the request is over, unless it is nil.
func (r *route) admit(ctx context.Context, queue chan struct{}) (held chan struct{}, err error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%w: %w", errNotSent, ctx.Err())
	}
	if !r.silent() {
		return nil, nil
	}
	select {
	case queue <- struct{}{}:
		return queue, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: %w", errHeld, ctx.Err())
	}
}

// Do implements rueidis.Client.
func (p *Prompt) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	if cmd.IsBlock() {
		return p.Client.Do(ctx, cmd)
	}
	r, queue := p.of(cmd)
	if ctx.Done() == nil {
		if n := r.begin(); p.single && n >= manyInFlight {
			return p.gathering.do(ctx, cmd, nil)
		}
		defer r.inFlight.Add(-1)
		return p.send(ctx, ctx, cmd, r)
	}

	lone := p.link.lone()
	if lone && p.single && r.answers() && ctx.Err() == nil && p.link.stay(ctx) {
		r.begin()
		defer r.inFlight.Add(-1)
		defer p.link.left()
		return p.send(ctx, ctx, cmd, r)
	}

	held, err := r.admit(ctx, queue)
	if err != nil {
		return rueidis.NewErrorResult(err)
	}
	r.begin()
	if p.single && !lone {
		return p.gathering.do(ctx, cmd, held)
	}
	reply, err := apart(ctx, r, held, func(request context.Context) rueidis.RedisResult {
		return p.send(request, ctx, cmd, r)
	})
	if err != nil {
		if lone { // its connection is given up now
			err = errors.Join(err, errGivenUp)
		}
		return rueidis.NewErrorResult(err)
	}
	return reply
}

// send sends a command, for a caller with that context.
func (p *Prompt) send(ctx, caller context.Context, cmd rueidis.Completed, r *route) (reply rueidis.RedisResult) {
	alone := p.link.enter(ctx, caller)
	switch {
	case alone != nil:
		ctx = alone
	case p.link != nil && ctx.Done() == nil && p.link.Contended.Load():
		ctx = p.pipelined
	}
	began := time.Since(started)
	for range mostTries {
		if reply = p.Client.Do(ctx, cmd); !notSent(ctx, reply.NonRedisError()) {
			break
		}
	}
	if alone != nil {
		reply = p.link.leave(alone, reply)
	}
	switch err := reply.NonRedisError(); {
	case notSent(caller, err):
		reply = rueidis.NewErrorResult(errHeld)
	case err == context.DeadlineExceeded && caller.Err() == nil: // the deadline of a request that was alone
		reply = rueidis.NewErrorResult(os.ErrDeadlineExceeded)
	}
	r.note(began, reply.NonRedisError())
	return reply
}

// sendAll sends commands together.
func (p *Prompt) sendAll(ctx context.Context, cmds []rueidis.Completed, r *route) (replies []rueidis.RedisResult) {
	if p.single {
		p.gathering.room <- struct{}{}
		defer func() { <-p.gathering.room }()
	}
	began := time.Since(started)
	for range mostTries {
		replies = p.Client.DoMulti(ctx, cmds...)
		err := replies[len(cmds)-1].NonRedisError()
		r.note(began, err)
		if !notSent(ctx, err) {
			return replies
		}
	}
	return all(errHeld, len(cmds))
}

// all returns the replies of n commands that have failed with err.
func all(err error, n int) []rueidis.RedisResult {
	return slices.Repeat([]rueidis.RedisResult{rueidis.NewErrorResult(err)}, n)
}

// DoMulti implements rueidis.Client. All commands belong to one route.
func (p *Prompt) DoMulti(ctx context.Context, cmds ...rueidis.Completed) []rueidis.RedisResult {
	if len(cmds) == 0 || cmds[0].IsBlock() {
		return p.Client.DoMulti(ctx, cmds...)
	}
	n := len(cmds)
	r, queue := p.of(cmds[0])
	if ctx.Done() == nil {
		r.begin()
		defer r.inFlight.Add(-1)
		return p.sendAll(ctx, cmds, r)
	}
	held, err := r.admit(ctx, queue)
	if err != nil {
		return all(err, n)
	}
	r.begin()
	replies, err := apart(ctx, r, held, func(ctx context.Context) []rueidis.RedisResult {
		return p.sendAll(ctx, cmds, r)
	})
	if err != nil {
		return all(err, n)
	}
	return replies
}

// of returns the route of a command, and the queue of its requests to a silent server.
func (p *Prompt) of(cmd rueidis.Completed) (*route, chan struct{}) {
	slot := int(cmd.Slot()) % slots // some commands have none
	return &p.routes[slot*len(p.routes)/slots], p.queues[slot*len(p.queues)/slots]
}

// apart makes a request, which r.begin has counted, on a goroutine of its own, and leaves it when ctx
// ends.
func apart[T any](ctx context.Context, r *route, held chan struct{}, request func(ctx context.Context) T) (reply T, err error) {
	done := make(chan T, 1)
	go func() {
		reply := request(unwatched{ctx, make(chan struct{})})
		r.inFlight.Add(-1)
		if held != nil {
			<-held
		}
		done <- reply
	}()
	select {
	case reply = <-done:
		return reply, nil
	case <-ctx.Done():
		return reply, ctx.Err()
	}
}

// unwatched is the context of a request that its caller may leave. rueidis does not send a
// request whose context has ended, but waits for the reply of one that it has sent. It sends the
// next request meanwhile, because the context looks as if it could end.
type unwatched struct {
	context.Context
	never chan struct{}
}

func (u unwatched) Done() <-chan struct{} { return u.never }

func (unwatched) Deadline() (time.Time, bool) { return time.Time{}, false }
