package session

import (
	"container/heap"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// maxCleanups bounds how many cleanups are pending. Beyond that the first is dropped, of those that
	// have run if there are some: what it would remove expires.
	maxCleanups = 10_000
	// fewCleanups bounds how many run at the same time while the server does not answer, and cleanupsAtOnce
	// while it does. The connection sends their requests together, so they keep up with thousands of callers a
	// second that leave a server 100 ms away.
	fewCleanups    = 16
	cleanupsAtOnce = 512
	// maxWaiting bounds how many workers wait for a cleanup to be due.
	maxWaiting = 16
	// lastCleanup bounds the requests that are made once more because the session closes. It is also the least time
	// that Shutdown leaves to them.
	lastCleanup = time.Second

	// MinPause and maxPause bound the pauses between attempts of a request that is repeated.
	MinPause = 20 * time.Millisecond
	maxPause = time.Second

	// leastAttempt is the least time for an attempt that follows another one. One without time for an answer
	// would make the outcome unknown that the others have made known.
	leastAttempt = 200 * time.Millisecond
)

// LongestReply is the longest that a request may take.
const LongestReply = 4 * time.Second

// Retry makes a request that can be repeated, again and again until it succeeds, its error is
// final, ctx is done, or the time is by. If by is zero, it makes one attempt. When the session
// closes, Retry makes one more attempt. It returns the error of the last one, joined with the
// reason to stop.
func (s *Session) Retry(ctx context.Context, by time.Time, request func(ctx context.Context) error,
	final func(error) bool) error {
	for pause := MinPause; ; pause = min(2*pause, maxPause) {
		closed := s.Err()
		end := by
		if closed != nil {
			if last := s.lastRunEnds(); by.IsZero() || last.Before(by) {
				end = last
			}
		}
		attempt, cancel := s.boundedBy(ctx, end)
		err := request(attempt)
		cancel()
		if err == nil || final(err) {
			return err
		}
		if closed != nil {
			return errors.Join(closed, err)
		}
		if time.Until(by) < pause+leastAttempt {
			return err
		}
		select {
		case <-time.After(pause):
		case <-s.Done():
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return errors.Join(s.Err(), err)
		}
	}
}

// turnedAway is how long RetryWrite goes on if the server rejects all writes.
const turnedAway = time.Second

// RetryWrite is Retry, but gives up sooner if the server has rejected every attempt because it rejects all
// writes. It reports whether the server has.
func (s *Session) RetryWrite(ctx context.Context, by time.Time, request func(ctx context.Context) error,
	final func(error) bool) (rejected bool, err error) {
	began := time.Now()
	rejected = true
	err = s.Retry(ctx, by, func(ctx context.Context) error {
		err := request(ctx)
		rejected = rejected && wire.IsTurnedAway(err)
		return err
	}, func(err error) bool { return final(err) || rejected && time.Since(began) >= turnedAway })
	return rejected, err
}

// boundedBy returns the context of a request that has to end by then, unless that is zero. It is ctx if the
// timeout of requests is sure to end the request in time.
func (s *Session) boundedBy(ctx context.Context, by time.Time) (context.Context, context.CancelFunc) {
	if by.IsZero() || time.Until(by) > LongestReply && s.client.Answers() {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, by)
}

// Grace is how long a call waits after its context has ended for something that is about to
// happen. Three such waits in a row take less than 50 ms.
const Grace = 15 * time.Millisecond

// Await waits a moment until all channels are closed that are not nil, and reports whether they are.
func Await(all ...<-chan struct{}) bool {
	var limit <-chan time.Time
	for _, done := range all {
		if done == nil {
			continue
		}
		if limit == nil {
			limit = time.After(Grace)
		}
		select {
		case <-done:
		case <-limit:
			return false
		}
	}

	return true
}

// Linger returns a context that ends a moment after ctx, but after d at the latest.
func Linger(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return LingerFor(ctx, Grace, d)
}

// LingerFor returns a context that ends by the time of grace after ctx, but after d at the latest.
func LingerFor(ctx context.Context, grace, d time.Duration) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithTimeout(context.WithoutCancel(ctx), d)
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(grace, cancel) })
	return longer, func() {
		stop()
		cancel()
	}
}

// Undo runs f, which undoes what a call has done that fails, in the background. The call waits
// for that for d, or for a moment after ctx has ended. If the session closes, f runs before Undo
// returns. It returns the error of f, and lock.ErrIndeterminate if f goes on.
func (s *Session) Undo(ctx context.Context, d time.Duration, f func() error) error {
	done := make(chan error, 1)
	if !s.Go(func(context.Context) { done <- f() }) { // the client is closing and waits for this call
		return f()
	}
	limit, cancel := Linger(ctx, d)
	defer cancel()

	select {
	case err := <-done:
		return err
	case <-limit.Done():
		return lock.ErrIndeterminate
	}
}

// Cleanup removes what a request with an unknown outcome may have left. It makes one request,
// and returns the pause before the next one, negative if there is none. After an error the
// session repeats it, with growing pauses, unless the server refused it.
type Cleanup func(ctx context.Context) (pause time.Duration, err error)

// cleanups are the pending cleanups of a session. Workers run them when they are due, those first that
// may never have run.
type cleanups struct {
	mu      sync.Mutex
	first   pendingCleanups // that may never have run
	again   pendingCleanups // that are repeated in case a request arrives late
	workers int
	extra   int           // how many workers there may be beyond fewCleanups
	waiting int           // of the workers, for a cleanup to be due
	wake    chan struct{} // has room for one
	closeBy time.Time     // for the last runs
}

type pendingCleanup struct {
	run        Cleanup
	due, until time.Time
	retryAfter time.Duration // an error
	ran        bool          // without an error
	done       chan struct{} // of CleanUp; nil when it is closed
}

// pendingCleanups are a heap: the first is due first.
type pendingCleanups []*pendingCleanup

func (ps pendingCleanups) Len() int           { return len(ps) }
func (ps pendingCleanups) Less(i, j int) bool { return ps[i].due.Before(ps[j].due) }
func (ps pendingCleanups) Swap(i, j int)      { ps[i], ps[j] = ps[j], ps[i] }
func (ps *pendingCleanups) Push(p any)        { *ps = append(*ps, p.(*pendingCleanup)) }

func (ps *pendingCleanups) Pop() any {
	last := len(*ps) - 1
	p := (*ps)[last]
	(*ps)[last] = nil
	*ps = (*ps)[:last]
	return p
}

// resting returns the number of workers that only wait for the repetition of cleanups that have run,
// and -1 if a cleanup has not run.
func (cs *cleanups) resting() int {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if len(cs.first) > 0 {
		return -1
	}
	return cs.waiting
}

// CleanUp runs c in the background, at once and then after the pauses, for d at most. When the
// session closes, each pending cleanup runs once more. If the session is closed already, c runs
// once before CleanUp returns. The result is closed after the last run without an error; after the first
// one if the server runs requests in their order, because c then overtakes no request sent before.
func (s *Session) CleanUp(d time.Duration, c Cleanup) (done <-chan struct{}) {
	now := time.Now()
	p := &pendingCleanup{run: c, due: now, until: now.Add(d), retryAfter: MinPause, done: make(chan struct{})}
	done = p.done
	cs := &s.cleanups
	cs.mu.Lock()
	cs.hireLocked(s)
	closed := cs.workers == 0
	if !closed {
		cs.addLocked(p)
	}
	cs.mu.Unlock()
	if closed {
		ctx, cancel := context.WithDeadline(context.Background(), s.lastRunEnds())
		defer cancel()
		_, _ = p.exec(ctx, s)
	}

	return done
}

// exec runs p once, and returns the pause before the next run, negative if there is none.
func (p *pendingCleanup) exec(ctx context.Context, s *Session) (pause time.Duration, err error) {
	pause, err = p.run(ctx)
	if err != nil && !wire.IsRefused(err) {
		p.retryAfter = min(2*p.retryAfter, maxPause)
		pause = p.retryAfter
	}
	p.ran = err == nil

	if p.ran && p.done != nil && (pause < 0 || s.Ordered) {
		close(p.done)
		p.done = nil
	}
	return pause, err
}

// lastRunEnds returns when the requests of a session that closes now have to end. A Shutdown that was not in time
// leaves them none.
func (s *Session) lastRunEnds() time.Time {
	end := time.Now().Add(lastCleanup)
	if by := s.shutBy.Load(); by != nil && by.Before(end) {
		end = *by
	}
	return end
}

// hireLocked adds a worker unless there are enough.
func (cs *cleanups) hireLocked(s *Session) {
	if cs.workers < fewCleanups+cs.extra && s.Go(func(ctx context.Context) { cs.work(ctx, s) }) {
		cs.workers++
	}
}

// addLocked makes p pending.
func (cs *cleanups) addLocked(p *pendingCleanup) {
	if cs.pendingLocked() == maxCleanups {
		dropped := &cs.first
		if len(cs.again) > 0 {
			dropped = &cs.again
		}
		heap.Pop(dropped)
	}

	if p.ran {
		heap.Push(&cs.again, p)
	} else {
		heap.Push(&cs.first, p)
	}
	cs.signal()
}

// pendingLocked returns the number of pending cleanups.
func (cs *cleanups) pendingLocked() int { return len(cs.first) + len(cs.again) }

// nextLocked returns the heap whose first cleanup is next.
func (cs *cleanups) nextLocked(now time.Time) *pendingCleanups {
	if len(cs.again) == 0 || len(cs.first) > 0 && (!cs.first[0].due.After(now) || cs.first[0].due.Before(cs.again[0].due)) {
		return &cs.first
	}
	return &cs.again
}

// signal wakes a worker that waits.
func (cs *cleanups) signal() {
	select {
	case cs.wake <- struct{}{}:
	default:
	}
}

// work runs cleanups when they are due, until none is left for this worker. When the session
// closes, all are due.
func (cs *cleanups) work(ctx context.Context, s *Session) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	defer func() { cs.workers-- }()

	for cs.pendingLocked() > 0 {
		next := cs.nextLocked(time.Now())
		p := (*next)[0]
		runCtx := ctx
		until := p.until
		closing := ctx.Err() != nil
		if closing {
			if cs.closeBy.IsZero() {
				cs.closeBy = s.lastRunEnds()
			}
			runCtx = context.Background()
			until = cs.closeBy
		} else if wait := time.Until(p.due); wait > 0 {
			if cs.waiting == min(cs.pendingLocked(), maxWaiting) {
				return
			}
			cs.waiting++
			cs.mu.Unlock()
			select {
			case <-cs.wake:
			case <-time.After(wait):
			case <-ctx.Done():
			}
			cs.mu.Lock()
			cs.waiting--
			continue
		}
		heap.Pop(next)
		if cs.waiting == 0 && cs.pendingLocked() > 0 { // the next one needs another worker
			cs.hireLocked(s)
		}
		cs.signal()
		cs.mu.Unlock()
		runCtx, cancel := context.WithDeadline(runCtx, until)
		pause, err := p.exec(runCtx, s)
		cancel()
		cs.mu.Lock()

		// A server that answers gets twice as many at once after each round trip. One that does not is
		// left with few.
		if err == nil || wire.IsRefused(err) {
			cs.extra = min(cs.extra+1, cleanupsAtOnce-fewCleanups)
		} else {
			cs.extra = 0
		}
		if p.due = time.Now().Add(pause); pause >= 0 && p.due.Before(p.until) && !closing {
			cs.addLocked(p)
		}
	}
}
