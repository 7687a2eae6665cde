package semaphore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// grant is what a request asks for and gets.
type grant struct {
	permits int
	// Only of a permit semaphore.
	ids   []string
	lease time.Duration
}

// forever is the lease of a permit that never expires.
const forever = 2 * lock.MaxLease

func leaseArg(lease time.Duration) string {
	if lease == forever {
		return "forever"
	}
	return wire.Millis(lease)
}

// request is a caller's request for permits, across all of its attempts.
type request struct {
	pool  *pool
	began time.Time
	once  bool
	site  callsite.Site

	mu       sync.Mutex // attempts run on the goroutines of other waiters, too
	grant    grant
	served   bool
	sent     time.Time // when the attempt was sent that served the request
	attempts int
	late     int // attempts whose confirmation came when the lease was over
	waited   bool
	missing  bool            // the last answer was that there is no semaphore
	queued   bool            // this client is in the wait queue because of this request
	over     bool            // it no longer waits
	undone   <-chan struct{} // closed when the last attempt with an unknown outcome is undone, or nil
}

// acquire gets what g asks for. The caller holds the session open with Enter.
func (s *pool) acquire(ctx context.Context, g grant, o lock.Options, once bool) (*request, error) {
	if ctx.Err() != nil {
		return nil, s.failed(ctx, "acquire", time.Now(), lock.ErrNotAcquired)
	}

	r := &request{pool: s, began: time.Now(), site: callsite.Of(o.Site), grant: g, once: once}
	spanCtx, span := s.s.Telemetry.StartAcquire(ctx, s.id)
	req := engine.Request{
		Waiting: engine.Waiting{Shareable: true, Shared: true, Group: true, Counting: true},
		Key:     s.queueKey, Acquirer: r, Once: once, Site: r.site, Span: span,
	}
	req.SetWait(&o, r.began)

	err := s.queues.Acquire(spanCtx, &req)
	overdue := err == nil && r.isLate(r.sent) // this process was suspended until the lease was over
	if errors.Is(err, ErrNotFound) {
		if s.s.Err() != nil {
			err = lock.ErrClosed
		} else if ctx.Err() != nil {
			err = lock.ErrNotAcquired
		} else {
			err = ErrNotFound
		}
	} else if err != nil {
		err = r.leave(ctx, err)
	} else if s.s.Err() != nil {
		r.Abandon()
		err = lock.ErrClosed
	} else if ctx.Err() != nil || overdue { // served while the caller was leaving
		err = lock.ErrNotAcquired
		if overdue {
			err = engine.Late(1, false, r.grant.lease, r.sent)
		}
		err = errors.Join(err, s.s.Undo(ctx, patience, func() error {
			_, err := s.release(context.WithoutCancel(ctx), patience, r.grant, true)
			return err
		}))
	}

	r.mu.Lock()
	defer r.mu.Unlock()

	if r.missing && errors.Is(err, lock.ErrNotAcquired) {
		err = errors.Join(err, errMissing)
	}
	if err == ErrNotFound {
		err = &lock.Error{
			Op: "acquire", Kind: s.id.Kind, Name: s.id.Name, Waited: time.Since(r.began),
			Err: fmt.Errorf("%w; %s", ErrNotFound, creation),
		}
	} else {
		err = s.failed(ctx, "acquire", r.began, err)
	}
	span.End(ctx, r.attempts, r.waited || r.attempts == 0, err)
	return r, err
}

// Channel implements engine.Acquirer.
func (r *request) Channel() string { return r.pool.channel }

// Try implements engine.Acquirer.
func (r *request) Try(ctx context.Context) (engine.Answer, error) {
	answer := r.pool.attempt(ctx, []*request{r}, 1, !r.once)[0]
	return answer, answer.Err
}

// isLate reports whether the lease has ended before the reply arrived to an attempt sent at that time.
func (r *request) isLate(sent time.Time) bool {
	return r.pool.leased() && time.Since(sent) >= watchdog.Certain(r.grant.lease)
}

// TryAll implements engine.Acquirer.
func (r *request) TryAll(ctx context.Context, all []engine.Acquirer) []engine.Answer {
	batch := engine.As[*request](all)
	// The attempt outlives a closing client, so that its permits can be released.
	return r.pool.attempt(context.WithoutCancel(ctx), batch, r.pool.sendCount(batch, math.MaxInt), true)
}

// Join implements engine.Acquirer.
func (r *request) Join(engine.Acquirer) (engine.Relation, error) { return engine.Conflict, nil }

// Describe implements engine.Acquirer.
func (r *request) Describe() session.Hold {
	return session.Hold{Kind: r.pool.id.Kind, Name: r.pool.id.Name}
}

// Holds implements engine.Acquirer. A request is no holder.
func (r *request) Holds() iter.Seq[session.Hold] { return func(func(session.Hold) bool) {} }

// Abandon implements engine.Acquirer.
func (r *request) Abandon() {
	r.leaveQueue()
	r.mu.Lock()
	served := r.served
	g := r.grant
	r.mu.Unlock()
	if served {
		r.pool.giveBack([]grant{g})
	}
}

// minSend is the number of requests that a release sends along, if as many wait: other
// clients may have released permits, too.
const minSend = 8

// sendCount returns how many requests of a batch, from the first on, are sent when so
// many permits are free. They include one more than those permits suffice for, because
// only a request that is not served learns when to retry. Several requests together want
// at most MaxBatch leased permits.
func (s *pool) sendCount(batch []*request, free int) int {
	permits := 0
	for n, r := range batch {
		permits += r.grant.permits // immutable
		if s.leased() && permits > MaxBatch && n > 0 {
			return n
		}
		if permits > free && n+1 >= minSend {
			return n + 1
		}
	}

	return len(batch)
}

// attempt sends the first requests of a batch once. waits reports whether the requests
// wait behind one another afterwards.
func (s *pool) attempt(ctx context.Context, batch []*request, sentCount int, waits bool) []engine.Answer {
	seq := s.slots.next()
	sent := time.Now()
	grants, args := s.encode(batch[:sentCount], seq, sent, waits)
	reply, err := s.exec(ctx, s.scripts.acquire, seq, args)
	if err == nil {
		s.slots.done(seq)
		return s.apply(batch, sentCount, sent, reply)
	}

	outcome := wire.OutcomeOf(err)
	if outcome == wire.Unknown {
		s.outcomeUnknown(batch[:sentCount], s.undo(seq, grants))
	} else {
		s.slots.done(seq)
	}
	if s.s.Err() != nil {
		err = errors.Join(lock.ErrClosed, err)
	} else if outcome != wire.Refused {
		err = &engine.Unavailable{Err: wire.Classify(err)}
	}
	return failed(batch, err)
}

func failed(batch []*request, err error) []engine.Answer {
	return slices.Repeat([]engine.Answer{{Err: err}}, len(batch))
}

// encode returns the grants and the script arguments of a batch, which is sent with seq.
func (s *pool) encode(batch []*request, seq *sequence, sent time.Time, waits bool) ([]grant, []string) {
	me := ""
	size := s.size
	if waits {
		me = s.s.ID
	}
	seq.batch = len(batch)
	for _, r := range batch { // they may be of other objects with this name
		size = cmp.Or(size, r.pool.size)
		seq.idle = cmp.Or(seq.idle, r.pool.idle)
	}

	grants := make([]grant, len(batch))
	args := append(make([]string, 0, 5+4*len(batch)), me, bargingMillis, s.heartbeat,
		strconv.Itoa(size), strconv.Itoa(len(batch)))
	for i, r := range batch {
		r.mu.Lock()
		if s.leased() && r.grant.ids == nil {
			r.grant.ids = newIDs(r.grant.permits)
		}
		g := r.grant
		r.mu.Unlock()

		grants[i] = g
		args = append(args, strconv.Itoa(g.permits), strconv.FormatInt(sent.Sub(r.began).Milliseconds(), 10))
		if s.leased() {
			args = append(args, leaseArg(g.lease))
		}
	}

	for _, g := range grants {
		args = append(args, g.ids...)
	}
	return grants, args
}

// apply applies the server's reply to a batch of which the first sentCount requests were
// sent. reply is the number of requests served, when to retry, whether this client is in the
// wait queue or there is no semaphore and, if known, the most permits that a request can get.
// If all requests that were sent were served, or the next one fails, the others retry at once.
func (s *pool) apply(batch []*request, sentCount int, sent time.Time, reply []int64) []engine.Answer {
	served := int(reply[0])
	retryIn := wire.Duration(reply[1])
	queued := reply[2] == 1
	missing := reply[2] == -1
	most := MaxPermits
	if len(reply) > 3 {
		most = int(reply[3])
	}
	results := make([]engine.Answer, len(batch))
	var late []grant
	for i, r := range batch {
		r.mu.Lock()
		r.missing = missing
		if i < sentCount {
			r.attempts++
		}
		switch {
		case i < served && r.isLate(sent):
			late = append(late, r.grant)
			r.grant.ids = nil
			r.late++
			results[i].Err = engine.Late(r.late, !r.once, r.grant.lease, sent)
		case i < served:
			r.missing = false
			r.served = true
			r.sent = sent
			r.queued = false
			results[i].Acquired = true
		case r.grant.permits > most:
			r.queued = false
			results[i].Err = fmt.Errorf("%w: %d permits: the semaphore has %d", lock.ErrInvalid, r.grant.permits, most)
		case missing && r.once:
			results[i].Err = ErrNotFound
		case served == sentCount || batch[served].grant.permits > most:
			r.waited = true
		default:
			r.waited = true
			r.queued = queued && i == served
			results[i].FreeIn = s.nextAttemptLocked(retryIn, r, sent)
		}
		r.mu.Unlock()
	}

	s.giveBack(late)
	if missing && sentCount > 0 && !batch[0].once {
		s.warnMissing()
	}
	return results
}

// nextAttemptLocked returns the time after which a request retries without a message, if an
// attempt sent at that time did not serve it. The mutex of the request is locked.
func (s *pool) nextAttemptLocked(retryIn time.Duration, r *request, sent time.Time) time.Duration {
	pause := time.Duration(-1)
	if r.queued {
		pause = s.heartbeatTimeout() / 3 // each attempt is a heartbeat
	} else if sent.Sub(r.began) < bargingTime { // a later one is not queued if there is no semaphore
		pause = max(0, bargingTime-time.Since(r.began)) // then it may join the wait queue
	}
	if retryIn >= 0 && (pause < 0 || retryIn < pause) {
		pause = retryIn
	}
	return pause
}

// outcomeUnknown prepares a batch for its next attempt when the last one got no reply.
// That attempt is undone, so the next one uses new ids. If it has put this client into
// the wait queue, the first request accounts for the position. undone is closed when the server has
// answered what undoes it.
func (s *pool) outcomeUnknown(batch []*request, undone <-chan struct{}) {
	for i, r := range batch {
		r.mu.Lock()
		r.attempts++
		r.grant.ids = nil
		r.undone = undone
		if i == 0 && !r.once && time.Since(r.began) >= bargingTime {
			r.queued = true
		}
		r.mu.Unlock()
	}
}

// undo undoes an acquisition whose outcome is unknown, in the background. The result is closed
// when the server has done it.
func (s *pool) undo(seq *sequence, grants []grant) (undone <-chan struct{}) {
	var args []string
	for _, g := range grants {
		if s.leased() {
			args = append(args, g.ids...)
		} else {
			args = append(args, strconv.Itoa(g.permits))
		}
	}

	return s.repeat(seq, s.scripts.undo, always(args), func([]int64) {})
}

// leave is leaveQueue for a wait under ctx that has failed with err. A caller that gets the result has
// left the wait queue, if the server answers soon: others may try at once.
func (r *request) leave(ctx context.Context, err error) error {
	left := r.leaveQueue()
	r.mu.Lock()
	undone := r.undone
	r.mu.Unlock()
	if session.Await(left, undone) {
		err = wire.Undone(ctx, err)
	}
	return err
}

// leaveQueue removes this client from the wait queue, in the background, if it is there
// because of a request that no longer waits. The result is closed when it is removed; nil if it
// was not there.
//
// All requests of this client share a position. The next one gets its own in the same request: in
// between, a younger one of another client would overtake it.
func (r *request) leaveQueue() (left <-chan struct{}) {
	r.mu.Lock()
	queued := r.queued
	r.queued = false
	r.over = true
	r.mu.Unlock()
	if !queued {
		return nil
	}

	p := r.pool
	next := p.inheritor()
	args := func() []string {
		args := []string{p.s.ID}
		if next != nil {
			args = append(args, strconv.FormatInt(time.Since(next.began).Milliseconds(), 10), wire.Millis(p.heartbeatTimeout()))
		}
		next = nil // a repetition comes late, when another request may have the position
		return args
	}
	return p.repeat(p.slots.next(), leaveScript, args, func([]int64) { p.queues.Wake(p.queueKey) })
}

// inheritor returns the request to which the position of this client in the wait queue goes, or nil if
// the first one that waits has not waited for long.
func (s *pool) inheritor() *request {
	for _, next := range engine.As[*request](s.queues.Waiters(s.queueKey)) {
		next.mu.Lock()
		waits := !next.over && !next.served
		inherits := waits && time.Since(next.began) >= bargingTime
		next.queued = next.queued || inherits
		next.mu.Unlock()
		if inherits {
			return next
		}
		if waits {
			return nil
		}
	}

	return nil
}
