package wire

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"
)

// Prompt is a rueidis.Client whose Do and DoMulti return when their context ends. Those of
// rueidis do not while they connect, or while too many requests are in flight.
//
// A caller waits in rueidis itself only if the server has just answered, or if its context
// cannot end. Otherwise the request is made on a goroutine of its own, which the caller leaves
// when its context ends. Such a request is not sent after its caller has left; if it was sent
// before, it lasts until the server answers or rueidis gives up the connection. Few may do so at
// a time, and the others wait. Commands on dedicated connections are left to rueidis.
type Prompt struct {
	rueidis.Client
	link      *Link // nil for a borrowed client
	gathering gathering
	routes    []route
	queues    []chan struct{} // have room for the requests on goroutines of their own
	pipelined context.Context // never ends, but looks as if it could: rueidis sends the next request before the reply comes
}

// route is what is known of the server that has a range of slots.
type route struct {
	answered atomic.Int64 // when the last answer came, since started; 0 after a failure
	inFlight atomic.Int32 // requests whose callers wait in rueidis
}

const (
	// fresh is the age up to which an answer shows that the connection works, and alive up to
	// which it shows that the server does.
	fresh = 20 * time.Millisecond
	alive = 200 * time.Millisecond
	// maxInFlight is less than the number of requests that a connection takes, by default 1024.
	maxInFlight = 512
	// maxApart is the number of requests on goroutines of their own.
	maxApart = 32
	// In a cluster a route is a range of slots, since a range mostly belongs to one node.
	clusterRoutes = 256
	clusterQueues = 16
)

var started = time.Now()

var (
	// errNotSent is for requests whose context has ended before they were sent.
	errNotSent = errors.New("redlatch: not sent in time")
	// errSilent is for those that were not sent because others have no reply.
	errSilent = errors.New("redlatch: not sent, because the server does not answer")
)

// NotSent reports whether a request under ctx has failed with err only because ctx ended before it
// was sent.
func NotSent(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(err, errNotSent)
}

// NewPrompt returns a Prompt that uses c. link informs its connections, or is nil.
func NewPrompt(c rueidis.Client, link *Link) *Prompt {
	routes, queues := 1, 1
	if c.Mode() == rueidis.ClientModeCluster {
		routes, queues = clusterRoutes, clusterQueues
	}
	p := &Prompt{Client: c, link: link, routes: make([]route, routes), queues: make([]chan struct{}, queues)}
	p.pipelined = unwatched{context.Background(), make(chan struct{})}
	p.gathering.client, p.gathering.ctx = c, p.pipelined
	for i := range p.queues {
		p.queues[i] = make(chan struct{}, maxApart)
	}
	return p
}

// Answers reports whether the server has just answered. For a cluster it reports false, because
// each node may or may not.
func (p *Prompt) Answers() bool { return len(p.routes) == 1 && p.routes[0].answers(fresh) }

// answers reports whether the last answer is no older than age.
func (r *route) answers(age time.Duration) bool {
	last := r.answered.Load()
	return last != 0 && time.Since(started)-time.Duration(last) < age
}

// note notes the result of a request. An error is not a reply of the server.
func (r *route) note(err error) {
	if err == nil {
		r.answered.Store(int64(time.Since(started)))
	} else {
		r.answered.Store(0)
	}
}

// Do implements rueidis.Client.
func (p *Prompt) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	if cmd.IsBlock() {
		return p.Client.Do(ctx, cmd)
	}
	r, queue := p.of(cmd)
	if r.direct(ctx) {
		defer r.inFlight.Add(-1)
		if len(p.routes) == 1 && r.inFlight.Load() >= manyInFlight {
			reply := p.gathering.do(ctx, cmd)
			r.note(reply.NonRedisError())
			return reply
		}
		return p.send(ctx, ctx, cmd, r)
	}
	return p.doApart(ctx, cmd, r, queue)
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
	for {
		if reply = p.Client.Do(ctx, cmd); !notSent(ctx, reply.NonRedisError()) {
			break
		}
	}
	if alone != nil {
		reply = p.link.leave(alone, reply)
	}
	if reply.NonRedisError() == context.DeadlineExceeded && caller.Err() == nil { // that of a request that was alone
		reply = rueidis.NewErrorResult(os.ErrDeadlineExceeded)
	}
	r.note(reply.NonRedisError())
	return reply
}

// sendAll sends commands together.
func (p *Prompt) sendAll(ctx context.Context, cmds []rueidis.Completed, r *route) (replies []rueidis.RedisResult) {
	for {
		replies = p.Client.DoMulti(ctx, cmds...)
		if err := replies[len(cmds)-1].NonRedisError(); !notSent(ctx, err) {
			r.note(err)
			return replies
		}
	}
}

func (p *Prompt) doApart(ctx context.Context, cmd rueidis.Completed, r *route, queue chan struct{}) rueidis.RedisResult {
	mayBeAlone := p.link != nil && !p.link.Contended.Load()
	reply, err := apart(ctx, r, queue, func(request context.Context) rueidis.RedisResult {
		return p.send(request, ctx, cmd, r)
	})
	if err != nil {
		if mayBeAlone && err == ctx.Err() { // its connection is given up now
			err = errors.Join(err, errGivenUp)
		}
		return rueidis.NewErrorResult(err)
	}
	return reply
}

// DoMulti implements rueidis.Client. All commands belong to one route.
func (p *Prompt) DoMulti(ctx context.Context, cmds ...rueidis.Completed) []rueidis.RedisResult {
	if len(cmds) == 0 || cmds[0].IsBlock() {
		return p.Client.DoMulti(ctx, cmds...)
	}
	n := len(cmds)
	r, queue := p.of(cmds[0])
	if r.direct(ctx) {
		defer r.inFlight.Add(-1)
		return p.sendAll(ctx, cmds, r)
	}
	replies, err := apart(ctx, r, queue, func(ctx context.Context) []rueidis.RedisResult {
		return p.sendAll(ctx, cmds, r)
	})
	if err != nil {
		replies = make([]rueidis.RedisResult, n)
		for i := range replies {
			replies[i] = rueidis.NewErrorResult(err)
		}
	}
	return replies
}

// of returns the route of a command, and the queue of its requests on goroutines of their own.
func (p *Prompt) of(cmd rueidis.Completed) (*route, chan struct{}) {
	slot := int(cmd.Slot()) % slots // some commands have none
	return &p.routes[slot*len(p.routes)/slots], p.queues[slot*len(p.queues)/slots]
}

// direct reports whether a request can be made by its caller, and counts it if so.
func (r *route) direct(ctx context.Context) bool {
	if n := r.inFlight.Add(1); ctx.Done() == nil || n <= maxInFlight && r.answers(fresh) && ctx.Err() == nil {
		return true
	}
	r.inFlight.Add(-1)
	return false
}

// apart makes a request on a goroutine of its own, when queue has room, and leaves it when ctx
// ends.
func apart[T any](ctx context.Context, r *route, queue chan struct{}, request func(ctx context.Context) T) (reply T, err error) {
	if ctx.Err() != nil {
		return reply, fmt.Errorf("%w: %w", errNotSent, ctx.Err())
	}
	select {
	case queue <- struct{}{}:
	case <-ctx.Done():
		if r.answers(alive) {
			return reply, fmt.Errorf("%w: %w", errNotSent, ctx.Err())
		}
		return reply, fmt.Errorf("%w: %w", errSilent, ctx.Err())
	}
	done := make(chan T, 1)
	go func() {
		defer func() { <-queue }()
		done <- request(unwatched{ctx, make(chan struct{})})
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
