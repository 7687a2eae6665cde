package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// Pauses between attempts while the server is unavailable.
	minRetry = 100 * time.Millisecond
	maxRetry = time.Second

	// maxGroup is the largest batch: it bounds the time for which a script blocks the server.
	maxGroup = 100
)

// waiter is a caller that waits for a key. Its states, of which trying means that an attempt is made for it:
//
//	waiting ◀──▶ trying ──▶ granted, or failed with err
//	   │             └─────▶ departed (it gave up meanwhile)
//	   └─▶ granted, failed, departed
type waiter struct {
	queues       *Queues
	entry        *entry
	next, prev   *waiter
	req          Request
	wake         chan struct{}
	timer        watchdog.Timer
	unsubscribe  func() // from its own channel; nil: not subscribed
	state        waiterState
	unregistered bool // it has to make an attempt wherever it is in the list: to get a position on the server, or beside a hold of its owner
	handed       bool // granted without an attempt
	beside       bool // it makes an attempt although others wait
	again        bool // the attempt that is made for it may have been too early
	over         bool // result is set
	tries        int32
	since        time.Duration // since started: when it began to wait
	err          error         // of the last attempt for it or a previous head, if that had no answer
	result       error         // of Acquire
}

type waiterState uint8

const (
	waiting waiterState = iota
	trying
	granted
	failed
	departed
)

// waiterLocked returns a waiter for a caller that begins to wait.
func (e *entry) waiterLocked(req *Request) *waiter {
	cfg := &e.queues.cfg
	cfg.OnWait()
	w := &waiter{queues: e.queues, entry: e, req: *req, wake: make(chan struct{}, 1), since: time.Since(started)}
	if !req.Deadline.IsZero() {
		cfg.Wheel.Schedule(&w.timer, req.Deadline, w)
	}
	return w
}

// wait blocks until the wait is over, and returns its result.
func (w *waiter) wait() error {
	for !w.step() {
		select {
		case <-w.wake:
		case <-w.req.Ctx.Done():
		}
	}
	return w.result
}

// step does what there is to do for w, until it has to wait or its wait is over, and reports whether the
// wait is over.
func (w *waiter) step() (over bool) {
	over = true // if user code panics, too
	defer func() {
		if over {
			w.finish()
		}
	}()

	e := w.entry
	for {
		e.shard.mu.Lock()
		if w.state > trying { // granted, failed or departed
			e.shard.mu.Unlock()
			if w.handed {
				w.req.Span.Woken(telemetry.HandedOver)
			}
			w.over = true
			return true
		}

		if err := w.queues.over(&w.req); err != nil {
			e.shard.mu.Unlock()
			w.endWait(err)
			continue
		}

		due := w.state == waiting && w.dueLocked()
		if w.state == waiting && !due && e.first == w {
			e.subscribeLocked()
			due = w.dueLocked() // a message may have been published since the last attempt
			if !due {
				e.armLocked()
			}
		}
		e.shard.mu.Unlock()
		if !due {
			return false
		}
		w.attempt()
	}
}

// over returns the reason to stop waiting, or nil.
func (q *Queues) over(req *Request) error {
	if q.cfg.Open.Err() != nil {
		return lock.ErrClosed
	}
	if d := req.Deadline; req.Ctx.Err() != nil || !d.IsZero() && !time.Now().Before(d) {
		return lock.ErrNotAcquired
	}
	return nil
}

// finish ends the wait, also if user code has panicked.
func (w *waiter) finish() {
	if !w.req.Deadline.IsZero() {
		w.queues.cfg.Wheel.Cancel(&w.timer)
	}
	if !w.over {
		w.abort()
	}
}

// abort removes a waiter whose Span or Backoff has panicked.
func (w *waiter) abort() {
	e := w.entry
	e.shard.mu.Lock()
	wasGranted := w.state == granted
	if !wasGranted {
		w.giveUpLocked()
	}
	holds := wasGranted && slices.Contains(e.holders, w.req.Acquirer) // else it counts, or has joined a holder
	e.shard.mu.Unlock()

	if holds {
		w.queues.Ended(w.req.Key, w.req.Acquirer)
	}
	if wasGranted {
		w.req.Acquirer.Abandon()
	}
}

// dueLocked reports whether w should make an attempt now.
func (w *waiter) dueLocked() bool {
	e := w.entry
	return !e.attempting && (w.unregistered && !e.outage || e.first == w && e.cause != 0 && !e.isOpenLocked())
}

// attempt makes an attempt for w and, in one request, for others. The waiters keep their places.
func (w *waiter) attempt() {
	e := w.entry
	mu := &e.shard.mu

	mu.Lock()
	cause := telemetry.Cause(0)
	n := int(w.tries) + 1
	if e.first == w {
		cause = e.cause
	}
	mu.Unlock()

	// User code, while w only waits: a panic leaves nothing to undo but the wait.
	if cause != 0 {
		w.req.Span.Woken(cause)
	}
	pause := w.req.pause(n)

	mu.Lock()
	if w.state != waiting || !w.dueLocked() {
		mu.Unlock()
		return
	}

	batch := e.startAttemptLocked(w)
	mu.Unlock()

	if len(batch) == 1 {
		answer, err := w.req.try(pause)
		answer.Err = err
		e.attempted(batch, []Answer{answer}, false)
		return
	}

	// In the background, because w may leave before the others have their results.
	if !w.queues.cfg.Go(func(ctx context.Context) {
		e.attempted(batch, w.req.Acquirer.TryAll(ctx, acquirers(batch)), false)
	}) {
		runtime.Gosched() // every wait is about to be ended
		e.attempted(batch, make([]Answer, len(batch)), false)
	}
}

// startAttemptLocked begins an attempt of w and returns the waiters that it is for.
func (e *entry) startAttemptLocked(w *waiter) []*waiter {
	batch := e.batchLocked(w)
	if slices.Contains(batch, e.first) {
		e.cause = 0
		e.turn.echo = false
	}
	e.attempting = true
	for _, w := range batch {
		w.state = trying
		w.again = false
		w.tries++
	}
	return batch
}

// batchLocked returns the waiters for which w makes an attempt, in their order.
func (e *entry) batchLocked(w *waiter) []*waiter {
	if !w.req.Group {
		return []*waiter{w}
	}

	if !w.req.Ordered {
		n := 0
		for next := w; next != nil && next.req.Group && n < maxGroup; next = next.next {
			n++
		}
		batch := make([]*waiter, 0, n)
		for ; len(batch) < n; w = w.next {
			batch = append(batch, w)
		}
		return batch
	}

	// The head, if it has a reason, and new waiters, which are at the end.
	var batch []*waiter
	for other, n := e.last, e.unregistered; other != e.first && n > 0; other = other.prev {
		if other.unregistered {
			n--
			if other.req.Group {
				batch = append(batch, other)
			}
		}
	}

	if e.first.req.Group && (e.cause != 0 || e.first.unregistered) {
		batch = append(batch, e.first)
	}
	slices.Reverse(batch)
	return batch[:min(len(batch), maxGroup)]
}

func acquirers(batch []*waiter) []Acquirer {
	all := make([]Acquirer, len(batch))
	for i, w := range batch {
		all[i] = w.req.Acquirer
	}
	return all
}

// attempted applies the answers to an attempt. With handed set it was made for what a caller of this
// process gave back.
func (e *entry) attempted(batch []*waiter, answers []Answer, handed bool) {
	e.shard.mu.Lock()
	e.refs++ // the last waiter may leave the entry
	e.attempting = false
	acquired := false
	shared := false
	busy := false
	var left []Acquirer // its waiters have left meanwhile
	for i, w := range batch {
		a := &answers[i]
		busy = busy || !handed && a.Err == nil && !a.unsent
		if w.state == departed {
			left = append(left, w.req.Acquirer)
			e.removeLocked(w)
			e.unrefLocked()
		} else if w.takeLocked(*a) {
			acquired = true
			shared = shared || w.req.Shared
			w.handed = handed
		}
	}

	if acquired {
		e.turn.acquired()
		if req := &batch[0].req; !req.Shareable && !req.Ordered {
			e.cause = 0 // a message that came meanwhile was about a release before
		}
	} else if busy && len(e.holders) == 0 {
		e.turn.taken(batch[0].req.Counting)
	}

	if head := e.first; head != nil {
		i := slices.Index(batch, head)
		if i >= 0 && answers[i].Err == nil {
			e.busyLocked(answers[i])
		} else if i < 0 && shared {
			e.nudgeLocked(telemetry.Local)
		} else if e.cause != 0 {
			head.signal()
		}
	}

	e.wakeUnregisteredLocked()
	e.unrefLocked()
	e.shard.mu.Unlock()

	for _, a := range left {
		a.Abandon()
	}
}

// takeLocked applies the answer to an attempt and reports whether it acquired.
func (w *waiter) takeLocked(a Answer) bool {
	e := w.entry
	w.state = waiting
	switch {
	case a.Err != nil:
		w.failedLocked(a.Err)
	case a.Acquired:
		e.removeLocked(w)
		e.enlistLocked(&w.req)
		w.state = granted
	case a.unsent:
	default:
		w.err = nil
		w.registerLocked(!w.again)
		if a.Requeued {
			e.unlinkLocked(w)
			e.pushBackLocked(w)
			e.first.signal() // to subscribe, if it is another now
		}
		w.admitLocked()
	}

	w.signal()
	return w.state == granted
}

// queueLocked makes a caller wait whose first attempt had that outcome. inTurn is set if startFirstLocked
// preceded it.
func (e *entry) queueLocked(w *waiter, inTurn bool, answer Answer, err error) {
	if inTurn {
		e.attempting = false
		e.pushFrontLocked(w)
	} else {
		e.pushBackLocked(w)
	}

	if err != nil {
		w.failedLocked(err)
	} else if e.first == w {
		if !answer.unsent {
			e.turn.taken(w.req.Counting)
		}
		e.busyLocked(answer)
	}
	e.wakeUnregisteredLocked()
	w.admitLocked() // an owner that has acquired meanwhile
}

// failedLocked applies the error of an attempt.
func (w *waiter) failedLocked(err error) {
	e := w.entry
	isOver := w.req.ends(err)
	if u := (*Unavailable)(nil); errors.As(err, &u) {
		err = u.Err
	}
	if isOver {
		w.endLocked(err)
		return
	}

	pause := minRetry + rand.N(maxRetry-minRetry)
	if w.err == nil && errors.Is(err, lock.ErrIndeterminate) {
		pause = 0 // the connection may have been lost while it was idle
	}
	if errors.Is(w.err, lock.ErrIndeterminate) { // that request still has no answer
		err = errors.Join(errNoAnswer, err)
	}
	w.err = err

	for other := e.first; other != nil; {
		next := other.next
		if other.req.FailFast && other.state == waiting && other != w {
			other.endLocked(wire.NotAsked(w.err))
			other.signal()
		}
		other = next
	}

	if w.req.Ordered || w.beside {
		w.registerLocked(false)
	}
	e.outage = true
	e.lookAtLocked(time.Now().Add(pause))
}

// Admit lets waiters of the same owner join a holder, as soon as it can be joined.
func (q *Queues) Admit(key Key, holder Acquirer) {
	q.with(key, func(e *entry) {
		if !slices.Contains(e.holders, holder) {
			return
		}
		for w := e.first; w != nil; {
			next := w.next
			if w.req.Owned && w.state == waiting {
				w.admitLocked()
				w.signal()
			}
			w = next
		}
	})
}

// admitLocked lets a waiter join a holder of the same owner, or try once beside it, if there is one.
func (w *waiter) admitLocked() {
	relation, err := w.entry.relationLocked(&w.req)
	if err != nil {
		w.endLocked(err)
	} else if relation == Reentrant {
		w.giveUpLocked()
		w.state = granted
	} else if relation == SameOwner && !w.beside {
		w.beside = true
		w.registerLocked(false)
	}
}

// endWait ends the wait for that reason, unless it ends otherwise meanwhile.
func (w *waiter) endWait(reason error) {
	mu := &w.entry.shard.mu
	mu.Lock()
	defer mu.Unlock()

	// With the answer to an attempt for several that is under way for w, the caller knows more.
	var limit <-chan time.Time
	for over := false; w.state == trying && !over; {
		if limit == nil {
			limit = time.After(session.Grace)
		}
		mu.Unlock()
		select {
		case <-w.wake:
		case <-limit:
			over = true
		case <-w.queues.cfg.Open.Done():
			over = true
		}
		mu.Lock()
	}
	if w.state == granted || w.state == failed {
		return
	}

	w.result = errors.Join(reason, w.failureLocked())
	w.giveUpLocked()
}

// giveUpLocked removes the waiter; while an attempt is made for it, the end of that does.
func (w *waiter) giveUpLocked() {
	e := w.entry
	if w.state == trying {
		w.state = departed
		return
	}

	wasHead := e.first == w
	w.state = departed
	e.removeLocked(w)
	if w.unregistered {
		e.wakeUnregisteredLocked() // it may have been woken to try for a batch
	}
	if wasHead {
		if next := e.first; next != nil && next.err == nil && w.err != nil {
			next.err = wire.NotAsked(w.err) // the next waiter may leave at the same time
		}

		// The reason that woke this waiter is now for the next one.
		e.nudgeLocked(telemetry.Local)
	}

	e.unrefLocked()
}

// endLocked ends the wait with an error.
func (w *waiter) endLocked(err error) {
	w.giveUpLocked()
	w.state = failed
	w.err = err
	w.result = err
}

// failureLocked returns the error of the last attempt of the waiter, or of the head for it, if that had
// no answer, or has none yet.
func (w *waiter) failureLocked() error {
	if w.state == trying {
		return errNoAnswer
	}
	if head := w.entry.first; w.err == nil && head != nil && head.err != nil {
		return wire.NotAsked(head.err)
	}
	return w.err
}

// errNoAnswer is for a wait of which an attempt has no answer, and that is not the last one or is under
// way for several.
var errNoAnswer = fmt.Errorf("%w: an attempt has no answer yet", lock.ErrIndeterminate)

// maxLate is how many attempts of one call may be confirmed too late: a pause of the process ends, and a
// lease that is shorter than a round trip never suffices.
const maxLate = 3

// ErrLate matches the errors of Late.
var ErrLate = errors.New("the confirmation came too late")

// Late returns the error of a call whose hold, requested then and for that long, was over before its
// confirmation came. It returns nil if the call should try again: it waits, and that has happened n times.
func Late(n int, waits bool, length time.Duration, sent time.Time) error {
	if waits && n < maxLate {
		return nil
	}
	return errors.Join(lock.ErrNotAcquired, late{fmt.Errorf(
		"a hold of %v was over before its confirmation came, after %v", length, time.Since(sent).Round(time.Microsecond))})
}

// late is an error that matches ErrLate.
type late struct{ error }

func (late) Is(err error) bool { return err == ErrLate }

// Expire implements watchdog.Expirer: the deadline of the wait has passed.
func (w *waiter) Expire(time.Time) { w.signal() }

func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}
