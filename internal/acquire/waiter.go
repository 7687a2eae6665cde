package acquire

import (
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/watchdog"
)

// Waiter is a caller that waits for a key. It is claimed while an attempt is made for it or
// the key is being passed on to it. Its states:
//
//	waiting ◀──▶ claimed ──▶ granted, or ended with err
//	   │             └─────▶ gone (it gave up meanwhile)
//	   └─▶ granted, ended, gone
type Waiter struct {
	entry        *entry
	next, prev   *Waiter
	req          Request
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

func newWaiter(e *entry, req *Request) *Waiter {
	return &Waiter{entry: e, req: *req, wake: make(chan struct{}, 1)} // a copy: most requests never wait
}

// Acquirer returns the acquirer of the request.
func (w *Waiter) Acquirer() Acquirer { return w.req.Acquirer }

// Join returns the relation of a Joiner to the holders of key.
func (q *Queues) Join(key Key, j Joiner) (Relation, error) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil {
		return e.relation(j)
	}
	return Unrelated, nil
}

// join returns the relation of a request to the holders. The mutex is held.
func (e *entry) join(req *Request) (Relation, error) {
	if !req.Owned {
		return Unrelated, nil
	}
	return e.relation(req.Acquirer.(Joiner))
}

func (e *entry) relation(j Joiner) (relation Relation, err error) {
	for _, holder := range e.holders {
		r, err := j.Join(holder)
		if r == Joined || err != nil {
			return r, err
		}
		relation = max(relation, r)
	}
	return relation, nil
}

// Admit lets waiters of the same owner join a holder, as soon as it can be joined.
func (q *Queues) Admit(key Key, holder Acquirer) {
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
func (w *Waiter) admit() {
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
func (w *Waiter) giveUp() {
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
		e.nudge(Local)
	}
	e.leave()
}

// end ends the wait with an error. The mutex is held.
func (w *Waiter) end(err error) {
	w.giveUp()
	w.state, w.err = ended, err
}

// Expire implements watchdog's Target: the deadline of the wait has passed.
func (w *Waiter) Expire(time.Time) { w.signal() }

func (w *Waiter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (e *entry) pushBack(w *Waiter) {
	e.count(w, 1)
	w.prev, w.next = e.last, nil
	if e.last != nil {
		e.last.next = w
	} else {
		e.first = w
	}
	e.last = w
}

func (e *entry) pushFront(w *Waiter) {
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
func (e *entry) unlink(w *Waiter) {
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

// Next returns the acquirer at the head of a queue, or nil.
func (q *Queues) Next(key Key) Acquirer {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil && e.first != nil {
		return e.first.req.Acquirer
	}
	return nil
}
