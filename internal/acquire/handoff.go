package acquire

import (
	"slices"
	"time"
)

// Successors claims the waiters to which the only holder of key can pass it on: one, or
// several consecutive ones that can share it. It returns none if the key has to be released
// for all processes; passable tells whether it may be passed on at all. The caller then calls
// Grant or Return.
func (q *Queues) Successors(key Key, passable bool) []*Waiter {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		return nil
	}
	w := e.first
	if w == nil || len(e.holders) != 1 {
		return nil
	}
	// An attempt under way may acquire the key after its release, except where the server
	// keeps the queue and the attempt is not for this waiter.
	if e.attempting && !(w.req.Ordered && w.state == waiting) {
		return nil
	}
	if w.req.LeftOpen != "" {
		now := time.Now()
		if e.open == nil {
			e.open = &opening{last: now}
		}
		if e.leaves = now.Sub(e.open.last) >= openEvery; e.leaves {
			return nil
		}
	}
	if !w.req.Ordered {
		if !passable || w.req.NoHandOff || int(e.handOffs) >= q.cfg.HandOffs {
			e.turns.begin()
			return nil
		}
		e.handOffs++
	} else if !passable || w.req.NoHandOff {
		return nil
	}
	successors := []*Waiter{w}
	for other := w.next; w.req.Shared && other != nil && other.req.Group && len(successors) < maxGroup; other = other.next {
		successors = append(successors, other)
	}
	for _, successor := range successors {
		e.unlink(successor)
		successor.state = claimed
	}
	return successors
}

// Grant makes successors holders in the place of from, and returns those that have given up
// meanwhile. If all have, from is still a holder, and the key still has to be passed on or
// released.
func (q *Queues) Grant(successors []*Waiter, from Acquirer) (gave []Acquirer) {
	e := successors[0].entry
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	shared := false
	for _, w := range successors {
		if w.state == gone {
			gave = append(gave, w.req.Acquirer)
			e.leave()
			continue
		}
		e.holders = append(e.holders, w.req.Acquirer)
		w.state, w.handed = granted, true
		w.signal()
		shared = shared || w.req.Shared
	}
	if len(gave) == len(successors) {
		return gave
	}
	e.drop(from)
	if shared {
		e.nudge(Local)
	}
	e.leave()
	return gave
}

// Return puts successors back to the front after a failed hand-off, and returns those that have
// given up meanwhile. The caller calls Released next.
func (q *Queues) Return(successors []*Waiter) (gave []Acquirer) {
	e := successors[0].entry
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	for _, w := range slices.Backward(successors) {
		if w.state == gone {
			gave = append(gave, w.req.Acquirer)
			e.leave()
			continue
		}
		w.state = waiting
		e.pushFront(w)
	}
	switch {
	case e.first == nil:
	case e.first.req.Ordered:
		e.first.signal() // to subscribe
	default:
		e.nudge(Local) // a message may have arrived meanwhile
	}
	return gave
}

// Offer lets try make an attempt for the waiters at the head of a queue, in the request that
// gives back a part of what they wait for. It reports false, without a call of try, if there
// are no waiters, an attempt is under way, or it is time to release for all processes. The
// requests of that key are Grouped and Untracked.
func (q *Queues) Offer(key Key, try func(all []Acquirer) []Result) bool {
	s := q.shardOf(key)
	s.mu.Lock()
	e := s.entries[key]
	if e == nil || e.first == nil || e.attempting || int(e.handOffs) >= q.cfg.HandOffs {
		if e != nil {
			e.handOffs = 0
		}
		s.mu.Unlock()
		return false
	}
	e.handOffs++
	e.again, e.passed = false, false
	batch := e.batch(e.first)
	e.claim(batch)
	s.mu.Unlock()
	results := try(acquirers(batch))
	s.mu.Lock()
	left := e.attempted(batch, results, HandedOver)
	s.mu.Unlock()
	for _, a := range left {
		a.(Grouped).Abandon()
	}
	return true
}

// Release describes the end of a hold.
type Release struct {
	// Receivers is the number of subscribers, of all processes, that received the message,
	// negative if unknown.
	Receivers int
	// Kept is set if others still hold the key.
	Kept bool
	// Elsewhere is set if the server has passed it on to another process.
	Elsewhere bool
	// Yields is set if Turn was called before.
	Yields bool
}

// Released ends the hold of a, whether released or lost. If this process has used up its
// hand-offs and others may wait, its head yields; otherwise it tries at once if that can
// succeed.
func (q *Queues) Released(key Key, a Acquirer, how Release) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		return
	}
	e.drop(a)
	if e.leaves {
		e.leaves = false
		e.leaveOpen()
	}
	switch {
	case how.Kept:
		e.turns.yielding = false // there is no message to wait for
	case !how.Yields:
		e.handOffs = 0
	}
	switch {
	case how.Kept || e.first != nil && len(e.holders) > 0 && !e.first.req.TryWhileHeld:
		// There are other holders.
	case how.Elsewhere:
		e.turns.yielding = false
		if e.first != nil {
			e.first.signal() // to subscribe
		}
	case e.first != nil && !e.attempting && e.turns.released(how.Receivers):
		e.lookAt(time.Now().Add(e.turns.patience()))
	default:
		e.turns.yielding = false
		e.nudge(Local)
	}
	e.leave()
}
