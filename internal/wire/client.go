package wire

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"
)

// Client is a rueidis.Client whose Do and DoMulti return when their context ends. Those of rueidis do
// not while they connect, or while too many requests are in flight.
//
// A caller whose context cannot end waits in rueidis. All others wait for another goroutine, which sends
// the requests that have come meanwhile together. A request is not sent after its caller has left; if it
// was sent before, it lasts until the server answers or rueidis gives up the connection. A timeout bounds each
// request, if the timeouts of the connection may be long. Commands on dedicated connections are left to rueidis.
//
// A reply that says that the server is a replica has all connections made anew, because their address
// may lead to another server by now. They are closed when no request is under way, so that the outcome of
// none becomes unknown.
type Client struct {
	rueidis.Client
	conns    *Conns        // nil for a borrowed client
	timeout  time.Duration // of a request; 0: none
	queues   []queue
	underWay sync.RWMutex // read-locked by requests on shared connections
	never    chan struct{}
}

const (
	// fresh is the age up to which an answer shows that the connection works.
	fresh = 20 * time.Millisecond
	// quiet is how long requests have no answer from a server that does not answer.
	quiet = 200 * time.Millisecond
	// maxBatches is the number of batches without a reply. A server that is far away gets larger batches
	// instead of more, and one that does not answer gets no more.
	maxBatches = 32
	// maxBatch is the most commands in a batch. rueidis sends large ones on connections of their own.
	maxBatch = 512
	// maxGathers is how often a batch waits for the goroutines that can run, because some of them leave before
	// it is sent, and come again.
	maxGathers = 8
	// In a cluster each queue has a range of slots, which mostly belongs to one node, and sends each
	// request on its own: in one pipeline, a slot without a server fails all requests.
	clusterQueues  = 16
	clusterBatches = 256
)

var started = time.Now()

var (
	// errNotSent is for requests whose context has ended before they were sent.
	errNotSent = errors.New("redlatch: not sent in time")
	// errSilent is for those that were not sent because others have no reply.
	errSilent = errors.New("redlatch: not sent, because the server does not answer")
	// errLeft is the error of a batch of which a caller has left.
	errLeft = errors.New("redlatch: a caller has left")
)

// unanswered is the error of a request whose caller has left after it was sent and before its reply came. The
// server may be well: the caller's time may have been too short.
type unanswered struct {
	after time.Duration // from when it was sent until the caller left
	ended error         // of the caller's context
}

func (u *unanswered) Error() string { return u.when() + ": " + u.ended.Error() }

// when is the message without the error of the context.
func (u *unanswered) when() string {
	return fmt.Sprintf("the wait ended %v after the request was sent, before the answer", u.after.Round(100*time.Microsecond))
}

func (u *unanswered) Unwrap() error { return u.ended }

// NotSent reports whether a request under ctx has failed with err only because ctx ended before it
// was sent.
func NotSent(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(err, errNotSent)
}

// NewClient returns a Client that uses c. conns are its connections, or nil. timeout bounds each request, unless
// it is 0.
func NewClient(c rueidis.Client, conns *Conns, timeout time.Duration) *Client {
	client := &Client{Client: c, conns: conns, timeout: timeout, never: make(chan struct{})}
	if c.Mode() == rueidis.ClientModeCluster {
		client.queues = make([]queue, clusterQueues)
		for i := range client.queues {
			client.queues[i].init(client, 1, clusterBatches)
		}
	} else {
		client.queues = make([]queue, 1)
		client.queues[0].init(client, maxBatch, maxBatches)
	}
	return client
}

// Answers reports whether the server has just answered. For a cluster it reports false, because
// each node may or may not.
func (c *Client) Answers() bool { return len(c.queues) == 1 && c.queues[0].answers() }

// Do implements rueidis.Client.
func (c *Client) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	if cmd.IsBlock() {
		reply := c.Client.Do(ctx, cmd)
		c.redialIfReplica(reply)
		return reply
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	if ctx.Done() == nil {
		return c.queueOf(cmd).doNow(ctx, cmd)
	}

	r := &request{done: make(chan struct{})}
	r.one[0] = cmd
	r.cmds = r.one[:]
	return c.queueOf(cmd).do(ctx, r)[0]
}

// DoMulti implements rueidis.Client. In a cluster all commands belong to one node.
func (c *Client) DoMulti(ctx context.Context, cmds ...rueidis.Completed) []rueidis.RedisResult {
	if len(cmds) == 0 || cmds[0].IsBlock() {
		replies := c.Client.DoMulti(ctx, cmds...)
		c.redialIfReplica(replies...)
		return replies
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	return c.queueOf(cmds[0]).do(ctx, &request{cmds: cmds, done: make(chan struct{})})
}

// bounded returns the context of one request.
func (c *Client) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if c.timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.timeout)
}

func (c *Client) queueOf(cmd rueidis.Completed) *queue {
	slot := int(cmd.Slot()) % slots // some commands have none
	return &c.queues[slot*len(c.queues)/slots]
}

// redialIfReplica has all connections made anew if a reply says that the server is a replica.
func (c *Client) redialIfReplica(replies ...rueidis.RedisResult) {
	for _, reply := range replies {
		if c.conns == nil || reply.Error() == nil || meaningOf(reply.Error()) != replica || !c.conns.mayRedial() {
			continue
		}
		go func() {
			c.underWay.Lock()
			defer c.underWay.Unlock()
			c.conns.redial()
		}()
	}
}

// A queue has the requests to a server, or to a range of slots of a cluster.
//
// They are sent in batches. rueidis would send the next request of the first caller that has got its
// reply alone; after the other goroutines that can run have run, the other callers have added theirs. One
// system call for all of them costs this process and the server half of the processor time. MaxFlushDelay
// of rueidis has a similar effect, but it delays each request for a time, also when only a few callers
// share the connection.
type queue struct {
	c        *Client
	maxBatch int
	room     chan struct{} // has an element for each batch without a reply

	answered atomic.Int64 // when the last answer came, since started; 0 after a failure
	asked    atomic.Int64 // when the first request since the last answer began; 0 if there is none

	mu   sync.Mutex
	next *batch // the batch that requests are added to, or nil
}

// A batch is the context of its requests: it has an error as long as a caller has left that could
// still be spared its request. rueidis asks for that error when it has a connection, just before it
// sends. Its values come from the first request.
type batch struct {
	pipelined
	q        *queue
	requests []*request
	commands int           // of the requests
	sent     time.Duration // when, since started; 0 before. Guarded by q.mu
	one      [1]*request
}

type request struct {
	cmds    []rueidis.Completed
	batch   *batch
	left    bool // its caller has; guarded by queue.mu
	replies []rueidis.RedisResult
	done    chan struct{} // closed when there are replies
	one     [1]rueidis.Completed
}

// pipelined is a context that does not end, but looks as if it could: rueidis then sends the next
// requests before the replies come.
type pipelined struct {
	context.Context
	never chan struct{}
}

func (p pipelined) Done() <-chan struct{} { return p.never }

func (pipelined) Deadline() (time.Time, bool) { return time.Time{}, false }

func (q *queue) init(c *Client, maxBatch, maxBatches int) {
	q.c = c
	q.maxBatch = maxBatch
	q.room = make(chan struct{}, maxBatches)
}

// answers reports whether the last answer is fresh.
func (q *queue) answers() bool {
	last := q.answered.Load()
	return last != 0 && time.Since(started)-time.Duration(last) < fresh
}

// begin notes that a request begins, and returns the time if it is the first since the last answer.
func (q *queue) begin() (first int64) {
	if q.asked.Load() != 0 {
		return 0
	}
	first = int64(time.Since(started))
	if !q.asked.CompareAndSwap(0, first) {
		return 0
	}
	return first
}

// forget notes that requests of which the first began then were not sent, so the server owes them no answer. For
// requests that began meanwhile, the time without an answer counts from the next one.
func (q *queue) forget(first int64) {
	if first != 0 {
		q.asked.CompareAndSwap(first, 0)
	}
}

// note notes the result of a request. An error is not a reply of the server.
func (q *queue) note(err error) {
	if err == nil {
		q.answered.Store(int64(time.Since(started)))
		q.asked.Store(0)
	} else {
		q.answered.Store(0)
	}
}

// notSent returns the error of a request that was not sent before ctx ended.
func (q *queue) notSent(ctx context.Context) error {
	if asked := q.asked.Load(); asked == 0 || time.Since(started)-time.Duration(asked) < quiet {
		return fmt.Errorf("%w: %w", errNotSent, ctx.Err())
	}
	return fmt.Errorf("%w: %w", errSilent, ctx.Err())
}

// doNow makes a request of a caller that cannot leave.
func (q *queue) doNow(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	q.c.underWay.RLock()
	defer q.c.underWay.RUnlock()

	// Until two requests overlap, rueidis has callers write and read themselves, which suits one caller.
	// Requests that clean up must not queue behind one that has no reply.
	if q.c.conns != nil && q.c.conns.Contended.Load() {
		ctx = pipelined{ctx, q.c.never}
	}

	q.begin()
	for {
		reply := q.c.Client.Do(ctx, cmd)
		q.c.redialIfReplica(reply)
		if err := reply.NonRedisError(); !errors.Is(err, errRedialed) {
			q.note(err)
			return reply
		}
		keep(cmd)
	}
}

// keep keeps rueidis from recycling commands that are sent once more: it may still be about to write them to the
// connection that it has given up.
func keep(cmds ...rueidis.Completed) {
	for _, cmd := range cmds {
		cmd.Pin()
	}
}

// do makes a request together with others. Its caller leaves when ctx ends.
func (q *queue) do(ctx context.Context, r *request) []rueidis.RedisResult {
	if ctx.Err() != nil {
		return all(fmt.Errorf("%w: %w", errNotSent, ctx.Err()), len(r.cmds))
	}

	q.add(ctx, r)

	select {
	case <-r.done:
		return r.replies
	case <-ctx.Done():
	}

	q.mu.Lock()
	defer q.mu.Unlock()

	select {
	case <-r.done:
		return r.replies
	default:
	}

	r.left = true
	if sent := r.batch.sent; sent != 0 {
		return all(&unanswered{time.Since(started) - sent, ctx.Err()}, len(r.cmds))
	}
	return all(q.notSent(ctx), len(r.cmds))
}

// add adds a request to the next batch.
func (q *queue) add(ctx context.Context, r *request) {
	q.mu.Lock()
	defer q.mu.Unlock()

	if q.next == nil || q.next.commands+len(r.cmds) > q.maxBatch {
		q.next = &batch{pipelined: pipelined{ctx, q.c.never}, q: q}
		q.next.requests = q.next.one[:0]
		go q.sendBatch(q.next)
	}

	r.batch = q.next
	q.next.requests = append(q.next.requests, r)
	q.next.commands += len(r.cmds)
}

// sendBatch sends a batch when there is room, and the goroutines that could run meanwhile have added
// nothing more to it.
func (q *queue) sendBatch(b *batch) {
	first := q.begin()
	q.room <- struct{}{}
	defer func() { <-q.room }()

	before := 0
	for range maxGathers {
		n := b.size()
		if n == before {
			break
		}
		before = n
		runtime.Gosched()
	}
	q.mu.Lock()
	if q.next == b {
		q.next = nil
	}
	q.mu.Unlock()

	q.c.underWay.RLock()
	defer q.c.underWay.RUnlock()

	for {
		cmds := b.unsent()
		if len(cmds) == 0 {
			q.forget(first)
			return
		}

		var replies []rueidis.RedisResult
		if len(cmds) == 1 {
			replies = []rueidis.RedisResult{q.c.Client.Do(b, cmds[0])}
		} else {
			replies = q.c.Client.DoMulti(b, cmds...)
		}
		q.c.redialIfReplica(replies...)
		err := replies[len(cmds)-1].NonRedisError()
		if err == errLeft || errors.Is(err, errRedialed) {
			keep(cmds...)
			continue
		}

		q.note(err)
		for _, r := range b.requests {
			n := len(r.cmds)
			r.replies = replies[:n:n]
			replies = replies[n:]
			close(r.done)
		}
		return
	}
}

func (b *batch) size() int {
	b.q.mu.Lock()
	defer b.q.mu.Unlock()
	return len(b.requests)
}

// unsent drops the requests of a batch, which is not sent, whose callers have left, and returns the
// commands of the others.
func (b *batch) unsent() (cmds []rueidis.Completed) {
	b.q.mu.Lock()
	defer b.q.mu.Unlock()

	b.sent = 0
	b.requests = slices.DeleteFunc(b.requests, func(r *request) bool { return r.left })
	if len(b.requests) == 1 {
		return b.requests[0].cmds
	}
	for _, r := range b.requests {
		cmds = append(cmds, r.cmds...)
	}
	return cmds
}

// Err implements context.Context.
func (b *batch) Err() error {
	b.q.mu.Lock()
	defer b.q.mu.Unlock()

	if b.sent != 0 {
		return nil
	}

	for _, r := range b.requests {
		if r.left {
			return errLeft
		}
	}

	b.sent = time.Since(started)
	return nil
}
