package acquire

import (
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
)

// waiter is a caller that waits for a key. It is claimed while an attempt is made for it.
// Its states:
//
//	waiting ◀──▶ claimed ──▶ granted, or ended with err
//	   │             └─────▶ gone (it gave up meanwhile)
//	   └─▶ granted, ended, gone
type waiter[A Acquirer[A]] struct {
	entry        *entry[A]
	next, prev   *waiter[A]
	req          Request[A]
	wake         chan struct{}
	timer        watchdog.Timer
	state        waiterState
	registration registration
	handed       bool // granted without an attempt
	beside       bool // it makes an attempt although others wait
	tries        int
	failingSince time.Time // since when the server is Unavailable
	err          error     // of the last attempt, if it had no answer
}

type waiterState uint8

const (
	waiting waiterState = iota
	claimed
	granted
	ended
	gone
)

func newWaiter[A Acquirer[A]](e *entry[A], req *Request[A]) *waiter[A] {
	return &waiter[A]{entry: e, req: *req, wake: make(chan struct{}, 1)} // a copy: most requests never wait
}

// Join returns the relation of a to the holders of key.
func (q *Queues[A]) Join(key Key, a A) (Relation, error) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil {
		return e.relation(a)
	}
	return Unrelated, nil
}

// join returns the relation of a request to the holders. The mutex is held.
func (e *entry[A]) join(req *Request[A]) (Relation, error) {
	if !req.Owned {
		return Unrelated, nil
	}
	return e.relation(req.Acquirer)
}

func (e *entry[A]) relation(a A) (relation Relation, err error) {
	for _, holder := range e.holders {
		r, err := a.Join(holder)
		if r == Joined || err != nil {
			return r, err
		}
		relation = max(relation, r)
	}
	return relation, nil
}

// Admit lets waiters of the same owner join a holder, as soon as it can be joined.
func (q *Queues[A]) Admit(key Key, holder A) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil || !slices.Contains(e.holders, holder) {
		return
	}
	for w := e.first; w != nil; {
		next := w.next
		if w.req.Owned && w.state == waiting {
			w.admit()
		}
		w = next
	}
}

// admit lets a waiter join a holder of the same owner, if there is one. The mutex is held.
func (w *waiter[A]) admit() {
	relation, err := w.entry.join(&w.req)
	switch {
	case err != nil:
		w.end(err)
	case relation == Joined:
		w.giveUp()
		w.state = granted
	case relation == Beside && !w.beside:
		w.beside = true
		w.setRegistration(unregistered)
	}
	w.signal()
}

// giveUp removes the waiter; if it is claimed, the end of the attempt does. The mutex is held.
func (w *waiter[A]) giveUp() {
	e := w.entry
	if w.state == claimed {
		w.state = gone
		return
	}
	wasHead := e.first == w
	w.state = gone
	e.unlink(w)
	if w.registration == unregistered {
		e.wakeUnregistered() // it may have been woken to try for a batch
	}
	if wasHead {
		// The reason that woke this waiter is now for the next one.
		e.nudge(telemetry.Local)
	}
	e.leave()
}

// end ends the wait with an error. The mutex is held.
func (w *waiter[A]) end(err error) {
	w.giveUp()
	w.state, w.err = ended, err
}

// Expire implements watchdog's Target: the deadline of the wait has passed.
func (w *waiter[A]) Expire(time.Time) { w.signal() }

func (w *waiter[A]) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (e *entry[A]) pushBack(w *waiter[A]) {
	e.count(w, 1)
	w.prev, w.next = e.last, nil
	if e.last != nil {
		e.last.next = w
	} else {
		e.first = w
	}
	e.last = w
}

func (e *entry[A]) pushFront(w *waiter[A]) {
	e.count(w, 1)
	w.prev, w.next = nil, e.first
	if e.first != nil {
		e.first.prev = w
	} else {
		e.last = w
	}
	e.first = w
	e.unsubscribeUnused()
}

// unlink removes w from the list, and ends the subscription with the last waiter. The mutex
// is held.
func (e *entry[A]) unlink(w *waiter[A]) {
	e.count(w, -1)
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		e.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		e.last = w.prev
	}
	w.next, w.prev = nil, nil
	if e.first != nil {
		e.arm() // the next head is not woken
	}
	e.unsubscribeUnused()
}
