package acquire

import (
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/telemetry"
)

// Pass makes the first waiter of key a holder in the place of from, its only holder, and
// reports whether it did. It calls give, with the mutex of the queue held, which reports
// whether that waiter can have what from has. If Pass reports false, the caller asks the
// server again, or releases the key and calls Released.
func (q *Queues) Pass(key Key, from Acquirer, give func(next Acquirer) bool) bool {
	s, e := q.lock(key)
	defer s.mu.Unlock()
	w := e.next(from)
	if w == nil {
		return false
	}
	// With a limit of 0 the process need not yield each time, but never passes the key on.
	if !w.req.Ordered && (e.yield.begin(q.cfg.HandOffs) || q.cfg.HandOffs == 0) || !give(w.req.Acquirer) {
		return false
	}
	e.yield.count()
	e.remove(w)
	w.state, w.handed = granted, true
	w.signal()
	e.holders[0] = w.req.Acquirer
	e.leave()
	return true
}

// Yield is called before a holder releases key without Pass: after enough acquisitions in a row it is the
// turn of other processes.
func (q *Queues) Yield(key Key, from Acquirer) {
	s, e := q.lock(key)
	defer s.mu.Unlock()
	if w := e.next(from); w != nil && !w.req.Ordered {
		e.yield.begin(q.cfg.HandOffs)
	}
}

// next returns the waiter that can have what from has, or nil. The mutex is held.
func (e *entry) next(from Acquirer) *waiter {
	if e == nil || len(e.holders) != 1 || e.holders[0] != from || e.yield.active {
		return nil
	}
	w := e.first
	if w == nil || w.state != waiting || w.unregistered || e.opens() {
		return nil
	}
	return w
}

// Waited reports whether a caller of this process waits for key.
func (q *Queues) Waited(key Key) bool {
	s, e := q.lock(key)
	defer s.mu.Unlock()
	return e != nil && e.first != nil
}

// Waiters returns up to maxGroup waiters of key that the server has in its queue, the first
// first.
func (q *Queues) Waiters(key Key) []Acquirer {
	s, e := q.lock(key)
	defer s.mu.Unlock()
	if e == nil {
		return nil
	}
	var waiters []Acquirer
	for w := e.first; w != nil && !w.unregistered && len(waiters) < maxGroup; w = w.next {
		waiters = append(waiters, w.req.Acquirer)
	}
	return waiters
}

// LeavesOpen reports whether it is time for a release that leaves the key open to pollers,
// with the payload LeftOpen.
func (q *Queues) LeavesOpen(key Key) bool {
	s, e := q.lock(key)
	defer s.mu.Unlock()
	return e != nil && e.opens()
}

// Offer lets try make an attempt for the waiters at the head of a queue, in the request that
// gives back a part of what they wait for. It reports false, without a call of try, if there
// are no waiters, an attempt is under way, or it is time to release for all processes. The
// requests of that key have Group and Untracked set.
func (q *Queues) Offer(key Key, try func(all []Acquirer) []Result) bool {
	s, e := q.lock(key)
	if e == nil || e.first == nil || e.attempting || int(e.yield.handOffs) >= q.cfg.HandOffs {
		if e != nil {
			e.yield.handOffs = 0
		}
		s.mu.Unlock()
		return false
	}
	e.yield.count()
	batch := e.claim(e.first)
	s.mu.Unlock()
	e.attempted(batch, try(acquirers(batch)), true)
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
	// LeftOpen is set if the key was left open to pollers.
	LeftOpen bool
}

// Released ends the hold of a, whether released or lost. If this process yields and others
// may wait, its waiters pause; otherwise its head tries at once if that can succeed.
func (q *Queues) Released(key Key, a Acquirer, how Release) {
	s, e := q.lock(key)
	defer s.mu.Unlock()
	if e == nil {
		return
	}
	if i := slices.Index(e.holders, a); i >= 0 {
		e.holders = slices.Delete(e.holders, i, i+1)
	}
	if how.LeftOpen {
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
