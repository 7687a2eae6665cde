package wire

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"
)

// Prompt is a rueidis.Client whose Do and DoMulti return when their context ends. Those of
// rueidis do not while they connect, or while too many requests are in flight.
//
// A caller whose context cannot end waits in rueidis. So does one whose request is alone, if the
// server has just answered: its connection heeds the context (see Link). All others leave their
// requests to another goroutine. A request is not sent after its caller has left; if it was sent
// before, it lasts until the server answers or rueidis gives up the connection. While a server
// does not answer, few requests are sent to it. Commands on dedicated connections are left to
// rueidis.
//
// A reply that says that the server is a replica has all connections made anew, because their address
// may lead to another server by now. They are closed when no request is under way, so that the outcome of
// none becomes unknown.
type Prompt struct {
	rueidis.Client
	link      *Link // nil for a borrowed client
	gathering gathering
	single    bool // there is one route
	routes    []route
	queues    []chan struct{} // have room for the requests on goroutines of their own
	pipelined context.Context
	underWay  sync.RWMutex // read-locked by requests on shared connections
}

// route is what is known of the server that has a range of slots.
type route struct {
	answered atomic.Int64 // when the last answer came, since started; 0 after a failure
	asked    atomic.Int64 // when the first request since the last answer began; 0 if there is none
	inFlight atomic.Int32 // requests whose callers wait in rueidis
}

const (
	// fresh is the age up to which an answer shows that the connection works.
	fresh = 20 * time.Millisecond
	// quiet is how long requests have no answer from a server that does not answer.
	quiet = 200 * time.Millisecond
	// maxApart is the number of requests on goroutines of their own. With the batches, it is less
	// than what a connection takes, by default 1024.
	maxApart = 256
	// In a cluster a route is a range of slots, since a range mostly belongs to one node.
	clusterRoutes = 256
	clusterQueues = 16
)

var started = time.Now()

// NotSent reports whether a request under ctx has failed with err only because ctx ended before it
// was sent.
func NotSent(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(err, errNotSent)
}

// NewPrompt returns a Prompt that uses c. link informs its connections, or is nil.
func NewPrompt(c rueidis.Client, link *Link) *Prompt {
	routes := 1
	queues := 1
	if c.Mode() == rueidis.ClientModeCluster {
		routes = clusterRoutes
		queues = clusterQueues
	}
	p := &Prompt{Client: c, link: link, routes: make([]route, routes), queues: make([]chan struct{}, queues)}
	p.single = routes == 1
	p.pipelined = newUnwatched(context.Background())
	p.gathering.p = p
	p.gathering.route = &p.routes[0]
	p.gathering.room = make(chan struct{}, maxBatches)
	for i := range p.queues {
		p.queues[i] = make(chan struct{}, maxApart)
	}
	return p
}

// Answers reports whether the server has just answered. For a cluster it reports false, because
// each node may or may not.
func (p *Prompt) Answers() bool { return p.single && p.routes[0].answers() }

// answers reports whether the last answer is fresh.
func (r *route) answers() bool {
	last := r.answered.Load()
	return last != 0 && time.Since(started)-time.Duration(last) < fresh
}

// begin notes that a request begins.
func (r *route) begin() {
	if r.asked.Load() == 0 {
		r.asked.CompareAndSwap(0, int64(time.Since(started)))
	}
}

// note notes the result of a request. An error is not a reply of the server.
func (r *route) note(err error) {
	if err == nil {
		r.answered.Store(int64(time.Since(started)))
		r.asked.Store(0)
	} else {
		r.answered.Store(0)
	}
}

// tooLate returns the error of a request whose context has ended before it was sent.
func tooLate(ctx context.Context) error { return fmt.Errorf("%w: %w", errNotSent, ctx.Err()) }

// heldBack returns the error of a request that was not sent before ctx ended.
func (r *route) heldBack(ctx context.Context) error {
	if asked := r.asked.Load(); asked == 0 || time.Since(started)-time.Duration(asked) < quiet {
		return tooLate(ctx)
	}
	return fmt.Errorf("%w: %w", errSilent, ctx.Err())
}

// Do implements rueidis.Client.
func (p *Prompt) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	if cmd.IsBlock() {
		return p.ask(ctx, cmd)
	}
	if ctx.Err() != nil {
		return rueidis.NewErrorResult(tooLate(ctx))
	}

	r, queue := p.of(cmd)
	if ctx.Done() == nil {
		defer r.inFlight.Add(-1)
		if n := r.inFlight.Add(1); p.single && n >= manyInFlight {
			return p.gathering.do(ctx, cmd)
		}
		p.underWay.RLock()
		defer p.underWay.RUnlock()
		return p.send(ctx, p.link.enter(ctx, ctx), cmd, r)
	}

	if reply, ok := p.sendAlone(ctx, cmd, r); ok {
		return reply
	}
	if p.single && !p.link.free() {
		return p.gathering.do(ctx, cmd)
	}

	return p.doApart(ctx, cmd, r, queue)
}

// doApart sends a command on a goroutine of its own.
func (p *Prompt) doApart(ctx context.Context, cmd rueidis.Completed, r *route, queue chan struct{}) rueidis.RedisResult {
	mayBeAlone := p.link.free()
	reply, err := apart(ctx, r, queue, func(request context.Context) rueidis.RedisResult {
		p.underWay.RLock()
		defer p.underWay.RUnlock()
		return p.send(request, p.link.enter(request, ctx), cmd, r)
	})
	if err != nil {
		if mayBeAlone && err == ctx.Err() { // its connection is given up now
			err = errors.Join(err, errGivenUp)
		}
		return rueidis.NewErrorResult(err)
	}

	return reply
}

// sendAlone sends a command if nothing can keep its caller: it is alone, on a connection that works.
func (p *Prompt) sendAlone(ctx context.Context, cmd rueidis.Completed, r *route) (reply rueidis.RedisResult, ok bool) {
	if !r.answers() || !p.underWay.TryRLock() {
		return reply, false
	}
	defer p.underWay.RUnlock()

	alone := p.link.enter(ctx, ctx)
	if alone == nil {
		return reply, false
	}

	return p.send(ctx, alone, cmd, r), true
}

// send sends a command with the context alone, or with ctx if alone is nil.
func (p *Prompt) send(ctx context.Context, alone *Alone, cmd rueidis.Completed, r *route) (reply rueidis.RedisResult) {
	if alone != nil {
		ctx = alone
	} else if p.link != nil && ctx.Done() == nil && p.link.Contended.Load() {
		ctx = p.pipelined
	}
	r.begin()
	for {
		if reply = p.ask(ctx, cmd); !notSent(ctx, reply.NonRedisError()) {
			break
		}
	}

	if alone != nil {
		caller := alone.Caller
		reply = p.link.leave(alone, reply)
		if reply.NonRedisError() == context.DeadlineExceeded && caller.Err() == nil { // it is the deadline of alone
			reply = rueidis.NewErrorResult(os.ErrDeadlineExceeded)
		}
	}

	r.note(reply.NonRedisError())
	return reply
}

// sendAll sends commands together.
func (p *Prompt) sendAll(ctx context.Context, cmds []rueidis.Completed, r *route) (replies []rueidis.RedisResult) {
	p.underWay.RLock()
	defer p.underWay.RUnlock()

	for {
		replies = p.askAll(ctx, cmds)
		if err := replies[len(cmds)-1].NonRedisError(); !notSent(ctx, err) {
			r.note(err)
			return replies
		}
	}
}

// ask is Do of the underlying client.
func (p *Prompt) ask(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	reply := p.Client.Do(ctx, cmd)
	p.redialIfReplica(reply)
	return reply
}

// askAll is DoMulti of the underlying client.
func (p *Prompt) askAll(ctx context.Context, cmds []rueidis.Completed) []rueidis.RedisResult {
	replies := p.Client.DoMulti(ctx, cmds...)
	for _, reply := range replies {
		p.redialIfReplica(reply)
	}
	return replies
}

// redialIfReplica has all connections made anew if a reply says that the server is a replica.
func (p *Prompt) redialIfReplica(reply rueidis.RedisResult) {
	if p.link == nil {
		return
	}
	if err := reply.Error(); err == nil || meaningOf(err) != replica || !p.link.mayRedial() {
		return
	}

	go func() {
		p.underWay.Lock()
		defer p.underWay.Unlock()
		p.link.redial()
	}()
}

// DoMulti implements rueidis.Client. All commands belong to one route.
func (p *Prompt) DoMulti(ctx context.Context, cmds ...rueidis.Completed) []rueidis.RedisResult {
	if len(cmds) == 0 || cmds[0].IsBlock() {
		return p.askAll(ctx, cmds)
	}

	r, queue := p.of(cmds[0])
	if ctx.Done() == nil {
		return p.sendAll(ctx, cmds, r)
	}

	replies, err := apart(ctx, r, queue, func(ctx context.Context) []rueidis.RedisResult {
		return p.sendAll(ctx, cmds, r)
	})
	if err != nil {
		replies = all(err, len(cmds))
	}
	return replies
}

// of returns the route of a command, and the queue of its requests on goroutines of their own.
func (p *Prompt) of(cmd rueidis.Completed) (*route, chan struct{}) {
	slot := int(cmd.Slot()) % slots // some commands have none
	return &p.routes[slot*len(p.routes)/slots], p.queues[slot*len(p.queues)/slots]
}

// apart makes a request on a goroutine of its own, when queue has room, and leaves it when ctx
// ends.
func apart[T any](ctx context.Context, r *route, queue chan struct{}, request func(ctx context.Context) T) (reply T, err error) {
	if ctx.Err() != nil {
		return reply, tooLate(ctx)
	}

	r.begin()
	select {
	case queue <- struct{}{}:
	case <-ctx.Done():
		return reply, r.heldBack(ctx)
	}

	done := make(chan T, 1)
	go func() {
		defer func() { <-queue }()
		done <- request(newUnwatched(ctx))
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

func newUnwatched(ctx context.Context) unwatched { return unwatched{ctx, make(chan struct{})} }

func (u unwatched) Done() <-chan struct{} { return u.never }

func (unwatched) Deadline() (time.Time, bool) { return time.Time{}, false }
