package wire

import (
	"context"
	"runtime"
	"sync"

	"github.com/redis/rueidis"
)

// manyInFlight is the number of requests in flight from which on they are gathered.
const manyInFlight = 20

// gathering sends requests of many callers together. rueidis would send the next request of the first
// caller that has got its reply alone. After the other goroutines that can run have run, the other
// callers have added theirs. One system call for all of them costs this process and the server half of
// the processor time. MaxFlushDelay of rueidis has a similar effect, but it delays each request for a
// time, also when only a few callers share the connection.
type gathering struct {
	client rueidis.Client
	ctx    context.Context // of all batches; it does not end

	mu   sync.Mutex
	next *gathered // the batch that requests are added to, or nil

	requests, batches sync.Pool // that are not in use
}

// gathered is a batch of requests.
type gathered struct {
	commands []rueidis.Completed
	requests []*gatheredRequest
}

type gatheredRequest struct {
	reply rueidis.RedisResult
	done  chan struct{}
}

// do makes a request together with others. Its caller leaves when ctx ends; the request is sent
// nevertheless.
func (g *gathering) do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	r, ok := g.requests.Get().(*gatheredRequest)
	if !ok {
		r = &gatheredRequest{done: make(chan struct{}, 1)}
	}
	g.mu.Lock()
	if g.next == nil {
		if g.next, ok = g.batches.Get().(*gathered); !ok {
			g.next = new(gathered)
		}
		go g.send(g.next)
	}
	g.next.commands, g.next.requests = append(g.next.commands, cmd), append(g.next.requests, r)
	g.mu.Unlock()
	if ctx.Done() == nil {
		<-r.done // a select takes three times as long
	} else {
		select {
		case <-r.done:
		case <-ctx.Done():
			return rueidis.NewErrorResult(ctx.Err())
		}
	}
	reply := r.reply
	r.reply = rueidis.RedisResult{}
	g.requests.Put(r)
	return reply
}

// send sends a batch when the goroutines that could run meanwhile have added nothing more to it.
func (g *gathering) send(batch *gathered) {
	g.mu.Lock()
	for n := 0; n < len(batch.requests); {
		n = len(batch.requests)
		g.mu.Unlock()
		runtime.Gosched()
		g.mu.Lock()
	}
	g.next = nil
	g.mu.Unlock()
	replies := g.client.DoMulti(g.ctx, batch.commands...)
	for i, reply := range replies {
		batch.requests[i].reply = reply
		batch.requests[i].done <- struct{}{}
	}
	if replies[len(replies)-1].NonRedisError() != nil {
		return // a connection that has failed may still read the commands
	}
	clear(batch.commands)
	clear(batch.requests)
	batch.commands, batch.requests = batch.commands[:0], batch.requests[:0]
	g.batches.Put(batch)
}
