package wire

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"
)

const (
	// manyInFlight is the number of requests in flight from which on those of callers that cannot leave
	// are gathered too.
	manyInFlight = 20
	// maxBatch is the most requests in a batch.
	maxBatch = 512
)

// gathering sends requests of many callers together, and lets each caller leave. rueidis would send the
// next request of the first caller that has got its reply alone. After the other goroutines that can run
// have run, the other callers have added theirs. One system call for all of them costs this process and
// the server half of the processor time. MaxFlushDelay of rueidis has a similar effect, but it delays
// each request for a time, also when only a few callers share the connection.
type gathering struct {
	client rueidis.Client
	ctx    context.Context // of all batches; it does not end
	route  *route
	room   chan struct{} // for what has no reply

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
	state atomic.Int32
	held  chan struct{} // has to be received from when the request is over, unless it is nil
}

// The states of a gatheredRequest.
const (
	unsent int32 = iota
	sent
	abandoned // by its caller
)

// do makes a request together with others. Its caller leaves when ctx ends; the request is not sent
// after that.
func (g *gathering) do(ctx context.Context, cmd rueidis.Completed, held chan struct{}) rueidis.RedisResult {
	r, ok := g.requests.Get().(*gatheredRequest)
	if !ok {
		r = &gatheredRequest{done: make(chan struct{}, 1)}
	}
	r.held = held
	r.state.Store(unsent)
	g.mu.Lock()
	if g.next == nil || len(g.next.requests) == maxBatch {
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
			if r.state.Swap(abandoned) == unsent {
				why := errNotSent
				if g.route.silent() {
					why = errHeld
				}
				return rueidis.NewErrorResult(fmt.Errorf("%w: %w", why, ctx.Err()))
			}
			return rueidis.NewErrorResult(ctx.Err())
		}
	}
	reply := r.reply
	r.reply = rueidis.RedisResult{}
	g.requests.Put(r)
	return reply
}

// send sends a batch when there is room, and the goroutines that could run meanwhile have added nothing
// more to it.
func (g *gathering) send(batch *gathered) {
	g.room <- struct{}{}
	g.mu.Lock()
	for n := 0; n < len(batch.requests); {
		n = len(batch.requests)
		g.mu.Unlock()
		runtime.Gosched()
		g.mu.Lock()
	}
	if g.next == batch {
		g.next = nil
	}
	g.mu.Unlock()

	answered := g.exchange(batch)
	<-g.room
	if !answered {
		return // a connection that has failed may still read the commands
	}
	clear(batch.commands)
	clear(batch.requests)
	batch.commands, batch.requests = batch.commands[:0], batch.requests[:0]
	g.batches.Put(batch)
}

// exchange makes the requests of a batch whose callers have not left, again if they were not sent. It reports
// whether the server has answered.
func (g *gathering) exchange(batch *gathered) (answered bool) {
	commands := batch.commands[:0]
	for range mostTries {
		requests := batch.requests[:0]
		for i, r := range batch.requests {
			if r.state.CompareAndSwap(unsent, sent) || r.state.Load() == sent {
				commands, requests = append(commands, batch.commands[i]), append(requests, r)
			} else {
				g.over(r)
			}
		}
		clear(batch.requests[len(requests):])
		batch.commands, batch.requests = commands, requests
		if len(commands) == 0 {
			return true
		}

		began := time.Since(started)
		replies := g.client.DoMulti(g.ctx, commands...)
		err := replies[len(replies)-1].NonRedisError()
		g.route.note(began, err)
		if notSent(g.ctx, err) {
			commands = nil // the connection that has failed may still read them
			continue
		}
		for i, reply := range replies {
			requests[i].reply = reply
			g.over(requests[i])
			requests[i].done <- struct{}{}
		}
		return err == nil
	}
	for _, r := range batch.requests {
		r.reply = rueidis.NewErrorResult(errHeld)
		g.over(r)
		r.done <- struct{}{}
	}
	return false
}

// over notes the end of a request.
func (g *gathering) over(r *gatheredRequest) {
	g.route.inFlight.Add(-1)
	if r.held != nil {
		<-r.held
	}
}
