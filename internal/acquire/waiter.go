package acquire

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// waiter is a caller that waits for a key. It is claimed while an attempt is made for it.
// Its states:
//
//	waiting ◀──▶ claimed ──▶ granted, or ended with err
//	   │             └─────▶ gone (it gave up meanwhile)
//	   └─▶ granted, ended, gone
type waiter struct {
	queues       *Queues
	entry        *entry
	next, prev   *waiter
	req          Request
	wake         chan struct{}
	timer        watchdog.Timer
	unsubscribe  func() // from its own channel; nil: not subscribed
	state        waiterState
	unregistered bool // it needs an attempt to get a position in the server's queue
	handed       bool // granted without an attempt
	beside       bool // it makes an attempt although others wait
	again        bool // the attempt that it is claimed for may have been too early
	over         bool // result is set
	tries        int32
	since        time.Duration // since started: when it began to wait
	failingSince time.Duration // since started: since when the server is Unavailable; 0: it is not
	err          error         // of the last attempt for it or a previous head, if that had no answer
	result       error         // of Acquire
}

type waiterState uint8

const (
	waiting waiterState = iota
	claimed
	granted
	ended
	gone
)

// waits notes that the caller begins to wait.
func (w *waiter) waits() {
	w.queues.cfg.OnWait()
	w.since = time.Since(started)
	if d := w.req.Deadline; !d.IsZero() {
		w.queues.cfg.Wheel.Schedule(&w.timer, d, w)
	}
}

// crowded returns an error that matches lock.ErrNotAcquired if too many others wait for req to wait
// too, and otherwise nil.
func (e *entry) crowded(req *Request) error {
	if req.MaxWaiters == 0 {
		return nil
	}
	n := 0
	for w := e.first; w != nil && n < req.MaxWaiters; w = w.next {
		n++
	}
	if n < req.MaxWaiters {
		return nil
	}
	return Crowded(n)
}

// Crowded is the error of a call that does not wait, because so many others do.
func Crowded(n int) error {
	return errors.Join(lock.ErrNotAcquired, fmt.Errorf("too many callers of this client wait already: %d (MaxWaiters)", n))
}

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

// join returns the relation of a request to the holders.
func (e *entry) join(req *Request) (relation Relation, err error) {
	if !req.Owned {
		return Unrelated, nil
	}
	for _, holder := range e.holders {
		r, err := req.Acquirer.Join(holder)
		if r == Joined || err != nil {
			return r, err
		}
		relation = max(relation, r)
	}
	return relation, nil
}

// Admit lets waiters of the same owner join a holder, as soon as it can be joined.
func (q *Queues) Admit(key Key, holder Acquirer) {
	s, e := q.lock(key)
	defer s.mu.Unlock()
	if e == nil || !slices.Contains(e.holders, holder) {
		return
	}
	for w := e.first; w != nil; {
		next := w.next
		if w.req.Owned && w.state == waiting {
			w.admit()
			w.signal()
		}
		w = next
	}
}

// admit lets a waiter join a holder of the same owner, or try once beside it, if there is one.
func (w *waiter) admit() {
	relation, err := w.entry.join(&w.req)
	switch {
	case err != nil:
		w.end(err)
	case relation == Joined:
		w.giveUp()
		w.state = granted
	case relation == Beside && !w.beside:
		w.beside = true
		w.register(false)
	}
}

// giveUp removes the waiter; if it is claimed, the end of the attempt does.
func (w *waiter) giveUp() {
	e := w.entry
	if w.state == claimed {
		w.state = gone
		return
	}
	wasHead := e.first == w
	w.state = gone
	e.remove(w)
	if w.unregistered {
		e.wakeUnregistered() // it may have been woken to try for a batch
	}
	if wasHead {
		if next := e.first; next != nil && next.err == nil && w.err != nil {
			next.err = wire.NotAsked(w.err) // the next waiter may leave at the same time
		}
		// The reason that woke this waiter is now for the next one.
		e.nudge(telemetry.Local)
	}
	e.leave()
}

// leave ends the wait for that reason, unless it ends otherwise meanwhile. It may release the mutex for
// a while.
func (w *waiter) leave(reason error) {
	w.linger()
	if w.state == granted || w.state == ended {
		return
	}
	w.result = errors.Join(reason, w.failure())
	w.giveUp()
}

// linger waits a moment for an attempt for several that is under way for w. It releases the mutex
// meanwhile.
func (w *waiter) linger() {
	if w.state != claimed {
		return
	}
	mu, limit, over := &w.entry.shard.mu, time.After(session.Grace), false
	for w.state == claimed && !over {
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
}

// failure returns the error of the last attempt of the waiter, or of the head for it, if that had
// no answer, or has none yet.
func (w *waiter) failure() error {
	if w.state == claimed {
		return errNoAnswer
	}
	if head := w.entry.first; w.err == nil && head != nil && head.err != nil {
		return wire.NotAsked(head.err)
	}
	return w.err
}

// errNoAnswer is for a wait of which an attempt has no answer, and that is not the last one or is
// under way for several.
var errNoAnswer = fmt.Errorf("%w: an attempt has no answer yet", lock.ErrIndeterminate)

// end ends the wait with an error.
func (w *waiter) end(err error) {
	w.giveUp()
	w.state, w.err, w.result = ended, err, err
}

// Expire implements watchdog's Target: the deadline of the wait has passed.
func (w *waiter) Expire(time.Time) { w.signal() }

func (w *waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// link makes b follow a in the list. nil stands for either end of it.
func (e *entry) link(a, b *waiter) {
	if a != nil {
		a.next = b
	} else {
		e.first = b
	}
	if b != nil {
		b.prev = a
	} else {
		e.last = a
	}
}

func (e *entry) pushBack(w *waiter) {
	e.count(w, 1)
	e.link(e.last, w)
	e.link(w, nil)
}

func (e *entry) pushFront(w *waiter) {
	e.count(w, 1)
	e.link(w, e.first)
	e.link(nil, w)
}

// remove removes w from the list for good, and ends its subscription.
func (e *entry) remove(w *waiter) {
	e.unlink(w)
	if w.unsubscribe != nil {
		w.unsubscribe()
	}
}

// unlink removes w from the list, and ends the subscription with the last waiter.
func (e *entry) unlink(w *waiter) {
	e.count(w, -1)
	e.link(w.prev, w.next)
	w.prev, w.next = nil, nil
	if e.first != nil {
		e.arm() // the next head is not woken
	}
	e.unsubscribeUnused()
}
