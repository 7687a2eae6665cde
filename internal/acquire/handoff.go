package acquire

import (
	"time"

	"github.com/redlatch/redlatch/internal/telemetry"
)

// Pass makes the first waiter of key a holder in the place of from, its only holder, and
// reports whether it did. It calls give, with the mutex of the queue held, which reports
// whether that waiter can have what from has. If Pass reports false, the caller asks the
// server again, or releases the key and calls Released.
func (q *Queues[A]) Pass(key Key, from A, give func(next A) bool) bool {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil || len(e.holders) != 1 || e.holders[0] != from || e.leaves || e.yield.active {
		return false
	}
	w := e.first
	if w == nil || w.state != waiting || w.registration != registered {
		return false
	}
	if w.req.LeftOpen != "" && e.opens() {
		e.leaves = true
		return false
	}
	if !w.req.Ordered && e.yield.begin(q.cfg.HandOffs) || !give(w.req.Acquirer) {
		return false
	}
	e.yield.count()
	e.unlink(w)
	w.state, w.handed = granted, true
	w.signal()
	e.holders[0] = w.req.Acquirer
	e.leave()
	return true
}

// Waited reports whether a caller of this process waits for key.
func (q *Queues[A]) Waited(key Key) bool {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	return e != nil && e.first != nil
}

// Waiters returns up to maxGroup waiters of key that the server has in its queue, the first
// first.
func (q *Queues[A]) Waiters(key Key) []A {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		return nil
	}
	var waiters []A
	for w := e.first; w != nil && w.registration == registered && len(waiters) < maxGroup; w = w.next {
		waiters = append(waiters, w.req.Acquirer)
	}
	return waiters
}

// LeavesOpen reports whether the coming release leaves the key open to pollers, with the
// payload LeftOpen.
func (q *Queues[A]) LeavesOpen(key Key) bool {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	return e != nil && e.leaves
}

// Offer lets try make an attempt for the waiters at the head of a queue, in the request that
// gives back a part of what they wait for. It reports false, without a call of try, if there
// are no waiters, an attempt is under way, or it is time to release for all processes. The
// requests of that key have Group and Untracked set.
func (q *Queues[A]) Offer(key Key, try func(all []A) []Result) bool {
	s := q.shardOf(key)
	s.mu.Lock()
	e := s.entries[key]
	if e == nil || e.first == nil || e.attempting || int(e.yield.handOffs) >= q.cfg.HandOffs {
		if e != nil {
			e.yield.handOffs = 0
		}
		s.mu.Unlock()
		return false
	}
	e.yield.count()
	e.again = false
	batch := e.batch(e.first)
	e.claim(batch)
	s.mu.Unlock()
	results := try(acquirers(batch))
	s.mu.Lock()
	left := e.attempted(batch, results, telemetry.HandedOver)
	s.mu.Unlock()
	for _, a := range left {
		a.Abandon()
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
	// Elsewhere is set if a waiter of another process comes next.
	Elsewhere bool
}

// Released ends the hold of a, whether released or lost. If this process yields and others
// may wait, its waiters pause; otherwise its head tries at once if that can succeed.
func (q *Queues[A]) Released(key Key, a A, how Release) {
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
	if e.first == nil {
		e.yield.handOffs = 0
	} else if !e.yield.active {
		e.yield.count()
	}
	switch {
	case how.Kept || e.first != nil && len(e.holders) > 0 && !e.first.req.TryWhileHeld:
		e.yield.active = false // there are other holders, and no message to wait for
	case how.Elsewhere:
		if e.first != nil {
			e.first.signal() // to subscribe
		}
	case e.first != nil && !e.attempting && e.yield.active && how.Receivers != 0 && how.Receivers != 1:
		e.lookAt(time.Now().Add(yieldFor))
	default:
		e.yield.end(false)
		e.nudge(telemetry.Local)
	}
	e.leave()
}
