package wire

import (
	"context"
	"errors"
	"runtime"
	"sync"

	"github.com/redis/rueidis"
)

const (
	// manyInFlight is the number of requests in flight from which gathering includes the requests of
	// callers that cannot leave.
	manyInFlight = 20
	// maxBatches is the number of batches without a reply. A server that is far away gets larger batches
	// instead of more, and one that does not answer gets no more.
	maxBatches = 32
	// maxBatch is the most requests in a batch. rueidis sends large ones on connections of their own.
	maxBatch = 512
)

// gathering sends requests of many callers together, and lets each caller leave. rueidis would send the
// next request of the first caller that has got its reply alone. After the other goroutines that can run
// have run, the other callers have added theirs. One system call for all of them costs this process and
// the server half of the processor time. MaxFlushDelay of rueidis has a similar effect, but it delays
// each request for a time, also when only a few callers share the connection.
type gathering struct {
	p     *Prompt
	route *route
	room  chan struct{} // has an element for each batch without a reply

	mu   sync.Mutex
	next *batch // the batch that requests are added to, or nil

	requests, batches sync.Pool // that are not in use
}

// A batch is the context of its requests: it has an error as long as a caller has left that could
// still be spared its request. rueidis asks for that error when it has a connection, just before it
// sends. The context does not end, but looks as if it could, so that rueidis sends the next requests
// before the replies come.
type batch struct {
	unwatched
	g        *gathering
	commands []rueidis.Completed
	requests []*request
	sent     bool // guarded by g.mu
	one      [1]rueidis.RedisResult
}

type request struct {
	batch *batch
	left  bool // its caller has; guarded by gathering.mu
	reply rueidis.RedisResult
	done  chan struct{}
}

var (
	// errNotSent is for requests whose context has ended before they were sent.
	errNotSent = errors.New("redlatch: not sent in time")
	// errSilent is for those that were not sent because others have no reply.
	errSilent = errors.New("redlatch: not sent, because the server does not answer")
	// errLeft is the error of a batch of which a caller has left.
	errLeft = errors.New("redlatch: a caller has left")
)

// do makes a request together with others. Its caller leaves when ctx ends. The request is not sent
// after that.
func (g *gathering) do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	r, ok := g.requests.Get().(*request)
	if !ok {
		r = &request{done: make(chan struct{}, 1)}
	}
	g.mu.Lock()
	if g.next == nil || len(g.next.requests) == maxBatch {
		if g.next, ok = g.batches.Get().(*batch); !ok {
			g.next = &batch{unwatched: newUnwatched(context.Background()), g: g}
		}
		go g.send(g.next)
	}

	r.batch = g.next
	g.next.commands, g.next.requests = append(g.next.commands, cmd), append(g.next.requests, r)
	g.mu.Unlock()

	if ctx.Done() == nil {
		<-r.done // a select takes three times as long
	} else {
		select {
		case <-r.done:
		case <-ctx.Done():
			if err := g.leave(ctx, r); err != nil {
				return rueidis.NewErrorResult(err)
			}
		}
	}
	reply := r.reply
	r.reply = rueidis.RedisResult{}
	r.batch = nil
	g.requests.Put(r)
	return reply
}

// leave returns the error of a caller that leaves, or nil if there is a reply.
func (g *gathering) leave(ctx context.Context, r *request) error {
	g.mu.Lock()
	defer g.mu.Unlock()

	select {
	case <-r.done:
		return nil
	default:
	}

	r.left = true
	if r.batch.sent {
		return ctx.Err()
	}

	return g.route.heldBack(ctx)
}

// Err implements context.Context.
func (b *batch) Err() error {
	b.g.mu.Lock()
	defer b.g.mu.Unlock()

	if b.sent {
		return nil
	}

	for _, r := range b.requests {
		if r.left {
			return errLeft
		}
	}

	b.sent = true
	return nil
}

// send sends a batch when there is room, and the goroutines that could run meanwhile have added nothing
// more to it.
func (g *gathering) send(b *batch) {
	g.route.begin()
	g.room <- struct{}{}
	g.mu.Lock()
	for n := 0; n < len(b.requests); {
		n = len(b.requests)
		g.mu.Unlock()
		runtime.Gosched()
		g.mu.Lock()
	}

	if g.next == b {
		g.next = nil
	}
	g.mu.Unlock()

	err := g.exchange(b)
	<-g.room
	if err != nil {
		return // a connection that has failed may still read the commands
	}

	clear(b.commands)
	clear(b.requests)
	g.mu.Lock()
	b.commands = b.commands[:0]
	b.requests = b.requests[:0]
	b.sent = false
	b.one[0] = rueidis.RedisResult{}
	g.mu.Unlock()
	g.batches.Put(b)
}

// exchange makes the requests of a batch whose callers have not left, again if they were not sent.
func (g *gathering) exchange(b *batch) error {
	g.p.underWay.RLock()
	defer g.p.underWay.RUnlock()

	for {
		if g.withoutLeft(b); len(b.requests) == 0 {
			return nil
		}
		replies := g.p.replies(b)
		err := replies[len(replies)-1].NonRedisError()
		if err == errLeft {
			continue
		}
		g.route.note(err)
		if notSent(b, err) {
			continue
		}
		for i, reply := range replies {
			b.requests[i].reply = reply
			b.requests[i].done <- struct{}{}
		}
		return err
	}
}

// replies sends a batch and returns the replies. Most batches of few callers have one request.
func (p *Prompt) replies(b *batch) []rueidis.RedisResult {
	if len(b.commands) > 1 {
		return p.askAll(b, b.commands)
	}
	b.one[0] = p.ask(b, b.commands[0])
	return b.one[:]
}

// withoutLeft drops the requests of a batch, which is not sent, whose callers have left.
func (g *gathering) withoutLeft(b *batch) {
	g.mu.Lock()
	defer g.mu.Unlock()

	b.sent = false
	n := 0
	for i, r := range b.requests {
		if !r.left {
			b.commands[n] = b.commands[i]
			b.requests[n] = r
			n++
		}
	}

	b.commands = b.commands[:n]
	b.requests = b.requests[:n]
}
