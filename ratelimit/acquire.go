package ratelimit

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// turnGrace is how long a client keeps its turn if it does not come when its permits are due.
	turnGrace = 500 * time.Millisecond
	// shortWait is the longest wait for permits without a subscription: there is little to hear meanwhile.
	shortWait = time.Second
	// soonest is how much later than the timer of this package the queue tries by itself. Its ticks are
	// long for a short interval.
	soonest = 20 * time.Millisecond
	// maxRates is the number of limiters whose rates a client remembers.
	maxRates = 10_000
	// leastPause is the shortest pause between attempts in microseconds, whatever the server says.
	leastPause = 100
)

var graceMillis = wire.Millis(turnGrace)

// Shared is what the limiters of one client share.
type Shared struct {
	e *engine.Engine

	mu     sync.Mutex
	timers map[engine.Key]*time.Timer // of the next attempts
	rates  map[engine.Key]int64       // that the server had last
}

// NewShared returns what the limiters of a client share. There is one for each engine.
func NewShared(e *engine.Engine) *Shared {
	return &Shared{e: e, timers: make(map[engine.Key]*time.Timer), rates: make(map[engine.Key]int64)}
}

// rate returns the last rate of a limiter as an argument of the script.
func (all *Shared) rate(key engine.Key) string {
	all.mu.Lock()
	defer all.mu.Unlock()

	if rate := all.rates[key]; rate > 0 {
		return strconv.FormatInt(rate, 10)
	}
	return ""
}

// setRate remembers the rate of a limiter. Of many, some are forgotten, which costs a count.
func (all *Shared) setRate(key engine.Key, rate int64) {
	all.mu.Lock()
	defer all.mu.Unlock()

	if len(all.rates) >= maxRates {
		clear(all.rates)
	}
	all.rates[key] = rate
}

// wakeIn has the first waiter of a queue try after d.
func (all *Shared) wakeIn(key engine.Key, d time.Duration) {
	all.mu.Lock()
	defer all.mu.Unlock()

	if old := all.timers[key]; old != nil {
		old.Stop()
	}
	var timer *time.Timer
	timer = time.AfterFunc(d, func() {
		all.mu.Lock()
		current := all.timers[key] == timer
		if current {
			delete(all.timers, key)
		}
		all.mu.Unlock()
		if current {
			all.e.Wake(key)
		}
	})
	all.timers[key] = timer
}

// Result is what Take returns.
type Result struct {
	// Taken is set if the permits were acquired.
	Taken bool
	// Rate and Per are the rate on the server.
	Rate int
	Per  time.Duration
	// Free is the number of permits that are left, 0 or more.
	Free int
	// RetryAfter is the time after which the permits are due, if nobody else acquires them. It is 0 if
	// Taken is set.
	RetryAfter time.Duration
}

// request is a caller's request for permits, across all of its attempts.
type request struct {
	l     *Limiter
	n     int
	entry string // on the server
	began time.Time
	once  bool
	site  callsite.Site

	mu         sync.Mutex // attempts run on the goroutines of other waiters, too
	mayHaveRun bool
	served     bool
	attempts   int
	waited     bool
	hasTurn    bool // this client has the turn because of this request
	result     Result
}

// newEntry returns the entry of a new request for n permits: struct.pack('Bc0I', 16, id, n) on the usual server.
func newEntry(n int) string {
	id := uuid.New()
	entry := append(make([]byte, 0, 1+len(id)+4), byte(len(id)))
	entry = append(entry, id[:]...)
	return string(binary.LittleEndian.AppendUint32(entry, uint32(n)))
}

// Acquire acquires n permits, all at once. It waits until they are due, ctx is done, or lock.Wait runs out. The error
// matches lock.ErrInvalid if n is more than the rate, and ErrNotFound if there is no limiter, also if either comes true during the wait. For 0
// permits it returns nil and sends nothing. Otherwise it has the errors of lock.Locker.Lock: after an error it
// has acquired no permits, or gives them back in the background.
//
// Permits come back by themselves, an interval after they were acquired.
func (l *Limiter) Acquire(ctx context.Context, n int, opts ...lock.WaitOption) error {
	o, err := lock.Resolve(opts...)
	if err != nil {
		return l.object().Refused("acquire", err)
	}

	_, err = l.acquire(ctx, n, o, o.Bounded && o.Wait == 0)
	return err
}

// TryAcquire makes one attempt to acquire n permits, which blocks for one round trip. If too few are free, or a
// waiter of another process is next, the error matches lock.ErrNotAcquired. Otherwise it is like Acquire.
func (l *Limiter) TryAcquire(ctx context.Context, n int) error {
	_, err := l.acquire(ctx, n, lock.Options{}, true)
	return err
}

// Take is TryAcquire for callers that tell others when to come again, such as an HTTP server. That the
// permits are not free is no error. For 0 permits it returns a zero Result.
func (l *Limiter) Take(ctx context.Context, n int) (Result, error) {
	r, err := l.acquire(ctx, n, lock.Options{}, true)
	if r == nil {
		return Result{}, err
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	if errors.Is(err, lock.ErrNotAcquired) && r.result.Rate > 0 && ctx.Err() == nil {
		return r.result, nil
	}
	return r.result, err
}

// Do acquires a permit like Acquire, and runs fn under ctx. It returns the error of Acquire, or the error of fn,
// unchanged. If fn is nil, the error matches lock.ErrInvalid.
func (l *Limiter) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.WaitOption) error {
	if fn == nil {
		return l.object().Refused("acquire", fmt.Errorf("%w: the function is nil", lock.ErrInvalid))
	}
	if err := l.Acquire(ctx, 1, opts...); err != nil {
		return err
	}
	return fn(ctx)
}

// acquire acquires n permits. It returns no request if it sends nothing.
func (l *Limiter) acquire(ctx context.Context, n int, o lock.Options, once bool) (*request, error) {
	if err := cmp.Or(l.check(ctx), checkCount(n, 0)); err != nil || n == 0 {
		return nil, l.object().Refused("acquire", err)
	}
	began := time.Now()
	if ctx.Err() != nil {
		return nil, l.object().Failed(ctx, "acquire", began, lock.ErrNotAcquired)
	}
	if !l.s.Enter() {
		return nil, l.object().Refused("acquire", lock.ErrClosed)
	}
	defer l.s.Leave()

	r := &request{l: l, n: n, entry: newEntry(n), began: began, once: once, site: callsite.Of(o.Site)}
	spanCtx, span := l.s.Telemetry.StartAcquire(ctx, l.id)
	req := engine.Request{
		Waiting: engine.Waiting{Shareable: true, Shared: true, Group: true, Counting: true},
		Key:     l.queue, Acquirer: r, Once: once, Site: r.site, Span: span,
	}
	req.SetWait(&o, began)

	err := l.all.e.Acquire(spanCtx, &req)
	if err == nil && l.s.Err() != nil {
		err = lock.ErrClosed
	} else if err == nil && ctx.Err() != nil { // served while the caller was leaving
		err = lock.ErrNotAcquired
	}
	err = r.end(ctx, err)

	r.mu.Lock()
	defer r.mu.Unlock()
	span.End(ctx, r.attempts, r.waited || r.attempts == 0, err)
	return r, err
}

// end returns the error of a call that ends with err, and undoes what the request has done unless that is nil.
func (r *request) end(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}

	undone := r.undo()
	if errors.Is(err, ErrNotFound) {
		return r.l.notFound("acquire", r.began)
	}
	if undone != nil && session.Await(undone) {
		err = wire.Undone(ctx, err)
	}
	return r.l.object().Failed(ctx, "acquire", r.began, err)
}

// Channel implements engine.Acquirer.
func (r *request) Channel() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.result.RetryAfter < shortWait {
		return ""
	}
	return r.l.channel
}

// Try implements engine.Acquirer.
func (r *request) Try(ctx context.Context) (engine.Answer, error) {
	answer := r.l.attempt(ctx, []*request{r})[0]
	return answer, answer.Err
}

// TryAll implements engine.Acquirer.
func (r *request) TryAll(ctx context.Context, all []engine.Acquirer) []engine.Answer {
	// The attempt outlives a closing client, so that what it acquires can be given back.
	return r.l.attempt(context.WithoutCancel(ctx), engine.As[*request](all))
}

// Join implements engine.Acquirer.
func (r *request) Join(engine.Acquirer) (engine.Relation, error) { return engine.Conflict, nil }

// Describe implements engine.Acquirer.
func (r *request) Describe() session.Hold { return session.Hold{Kind: kind, Name: r.l.id.Name} }

// Holds implements engine.Acquirer. A request is no holder.
func (r *request) Holds() iter.Seq[session.Hold] { return func(func(session.Hold) bool) {} }

// Abandon implements engine.Acquirer.
func (r *request) Abandon() { r.undo() }

// attempt sends a batch of requests once.
func (l *Limiter) attempt(ctx context.Context, batch []*request) []engine.Answer {
	reply, err := l.decode(acquireScript.Exec(ctx, l.s.Client, l.keys, l.encode(batch)), len(batch))
	if err == nil && len(reply) == 1 {
		return failed(batch, ErrNotFound)
	}
	if err == nil {
		return l.apply(batch, reply)
	}

	outcome := wire.OutcomeOf(err)
	for _, r := range batch {
		r.mu.Lock()
		r.attempts++
		r.mayHaveRun = r.mayHaveRun || outcome == wire.Unknown
		r.mu.Unlock()
	}
	if l.s.Err() != nil {
		err = errors.Join(lock.ErrClosed, err)
	} else if outcome != wire.Refused {
		err = &engine.Unavailable{Err: wire.Classify(err)}
	}
	return failed(batch, err)
}

func failed(batch []*request, err error) []engine.Answer {
	return slices.Repeat([]engine.Answer{{Err: err}}, len(batch))
}

// encode returns the script arguments of a batch.
func (l *Limiter) encode(batch []*request) []string {
	me := l.s.ID
	if batch[0].once {
		me = ""
	}
	config := l.config
	for _, r := range batch { // they may be of other objects with this name
		if config.Rate == 0 {
			config = r.l.config
		}
	}

	now := time.Now()
	args := append(make([]string, 0, 8+4*len(batch)), me, graceMillis)
	args = append(append(args, config.args()...), strconv.Itoa(len(batch)))
	for _, r := range batch {
		r.mu.Lock()
		again := r.mayHaveRun
		r.mu.Unlock()
		args = append(args, strconv.Itoa(r.n), strconv.FormatInt(now.Sub(r.began).Milliseconds(), 10), r.entry, wire.Flag(again))
	}

	return append(args, l.all.rate(l.queue))
}

// decode decodes the reply to a batch of that many requests: one number if there is no limiter, otherwise five.
func (l *Limiter) decode(reply rueidis.RedisResult, batch int) ([]int64, error) {
	parts, err := wire.List(reply, 1, 5)
	if err != nil {
		return nil, err
	}

	numbers, err := wire.NumbersIn(parts, wire.Any)
	if err != nil {
		return nil, err
	}
	if len(numbers) == 1 && numbers[0] == -1 {
		return numbers, nil
	}
	if len(numbers) != 5 || numbers[0] < 0 || numbers[0] > int64(batch) {
		return nil, wire.ErrReply
	}

	return numbers, nil
}

// apply applies the server's reply to a batch: the number of requests served, the microseconds until the next attempt, the
// free permits, the rate and the interval. If the next request fails, the others retry at once.
func (l *Limiter) apply(batch []*request, reply []int64) []engine.Answer {
	served := int(reply[0])
	rate := reply[3]
	l.all.setRate(l.queue, rate)
	retryIn := time.Duration(max(leastPause, min(reply[1], lock.MaxLease.Microseconds()))) * time.Microsecond
	tooMany := served < len(batch) && int64(batch[served].n) > rate

	answers := make([]engine.Answer, len(batch))
	for i, r := range batch {
		r.mu.Lock()
		r.attempts++
		r.mayHaveRun = false
		r.hasTurn = false
		r.result = Result{Taken: i < served, Rate: int(rate), Per: wire.Duration(reply[4]), Free: int(max(reply[2], 0))}
		if i < served {
			r.served = true
			answers[i].Acquired = true
		} else if int64(r.n) > rate {
			answers[i].Err = fmt.Errorf("%w: %d permits: the rate is %d", lock.ErrInvalid, r.n, rate)
		} else {
			r.waited = true
			r.hasTurn = i == served && !r.once
			r.result.RetryAfter = retryIn
			answers[i].FreeIn = retryIn + soonest
		}
		r.mu.Unlock()
	}

	if served < len(batch) && !tooMany && !batch[served].once && retryIn < patience {
		l.all.wakeIn(l.queue, retryIn)
	}
	return answers
}

// undo gives back, in the background, what a request has acquired whose caller does not use it, or may have acquired,
// and its turn unless another request of this client waits: that one takes the turn over with its next attempt. The result
// is closed when the server has done it; nil if there is nothing to do.
func (r *request) undo() (undone <-chan struct{}) {
	r.mu.Lock()
	took := r.served || r.mayHaveRun
	hadTurn := r.hasTurn || r.mayHaveRun && !r.once // a request without a reply may have brought it
	r.served = false
	r.mayHaveRun = false
	r.hasTurn = false
	r.mu.Unlock()

	l := r.l
	if took {
		undone = l.repeat(undoScript, l.keys, r.entry, strconv.Itoa(r.n))
	}
	if hadTurn && len(l.all.e.Waiters(l.queue)) == 0 {
		left := l.repeat(leaveScript, []string{wire.RateTurn(l.key)}, l.s.ID)
		if undone == nil {
			undone = left
		}
	}
	return undone
}

// repeat runs a script in the background until it has run. The result is closed then.
func (l *Limiter) repeat(script *wire.Script, keys []string, args ...string) <-chan struct{} {
	args = append([]string{l.s.Publish, l.channel}, args...)
	return l.s.CleanUp(undoTime, func(ctx context.Context) (time.Duration, error) {
		return -1, script.Exec(ctx, l.s.Client, keys, args).Error()
	})
}
