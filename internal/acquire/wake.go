package acquire

import (
	"time"

	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/pubsub"
)

// wantsChannel reports whether the head should subscribe. Where the server keeps the queue,
// there are no messages while this process holds the key.
func (e *entry) wantsChannel() bool {
	req := &e.first.req
	if req.Ordered {
		return e.first.unsubscribe == nil && len(e.holders) == 0 && !e.first.unregistered
	}
	return e.unsubscribe == nil && req.Acquirer.Channel() != ""
}

// subscribe subscribes for the head. The hub does not call back from here.
func (e *entry) subscribe() {
	req := &e.first.req
	if req.Ordered {
		e.first.unsubscribe = e.queues.cfg.SubscribeOwn(req.Acquirer.Channel(), e.first)
		return
	}

	var confirmed bool
	e.unsubscribe, confirmed = e.queues.cfg.Subscribe(req.Acquirer.Channel(), e)
	if confirmed && (len(e.holders) == 0 || req.TryWhileHeld) {
		// A message may have been published since the last attempt.
		e.mark(telemetry.Subscribed)
	}
}

// unsubscribeUnused ends a subscription without a waiter.
func (e *entry) unsubscribeUnused() {
	if e.unsubscribe != nil && e.first == nil {
		e.unsubscribe()
		e.unsubscribe = nil
	}
}

// busy schedules the next attempt after one that found the key taken.
func (e *entry) busy(v Verdict) {
	pause := safetyPoll
	if v.FreeIn >= 0 {
		pause = min(pause, v.FreeIn)
	}
	if v.poll > 0 && len(e.holders) == 0 { // else the release is local
		pause = min(pause, v.poll)
	}
	at := time.Now().Add(pause)
	if e.outage && (!e.polls() || e.poll.at.Before(at)) {
		return // unregistered waiters try before
	}
	e.lookAt(at)
}

// lookAt schedules an attempt of the head.
func (e *entry) lookAt(at time.Time) {
	if e.poll == nil {
		e.poll = &poll{}
	}
	e.poll.at = at
	e.queues.cfg.Wheel.Schedule(&e.poll.timer, at, e)
}

// polls reports whether an attempt of the head is scheduled.
func (e *entry) polls() bool { return e.poll != nil && !e.poll.at.IsZero() }

// arm makes sure that the head makes another attempt.
func (e *entry) arm() {
	if !e.polls() {
		e.lookAt(time.Now().Add(safetyPoll))
	}
}

// Expire implements watchdog.Expirer. It locks the mutex.
func (e *entry) Expire(now time.Time) {
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	if !e.polls() || now.Before(e.poll.at) {
		return
	}
	e.poll.at, e.outage = time.Time{}, false
	e.nudge(telemetry.Timer)
	e.wakeUnregistered()
}

// Notify implements pubsub.Listener, for the own channel of a waiter. It locks the mutex.
func (w *waiter) Notify(ev pubsub.Event) {
	cause := telemetry.Message
	if ev.Subscribed {
		cause = telemetry.Subscribed
	}

	e := w.entry
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	if w.state > claimed {
		return // its wait is over, and the entry may be in use for another key
	}
	if w.state == claimed {
		// The attempt may have been too early. A reason for the head would not do: with the reply
		// another waiter can become the head.
		w.again = true
		return
	}
	if w == e.first {
		e.nudge(cause)
		return
	}

	// The head is another one on the server, or a message may be lost.
	w.register(false)
	w.signal()
}

// Notify implements pubsub.Listener, for the channel of all waiters. It locks the mutex.
func (e *entry) Notify(ev pubsub.Event) {
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()
	switch {
	case ev.Subscribed:
		e.nudge(telemetry.Subscribed)
	case e.first != nil && e.first.req.LeftOpen != "" && ev.Payload == e.first.req.LeftOpen:
		e.leaveOpen()
	default:
		switch r := e.yield.heard(); {
		case r == ignore:
		case r == pause && !e.attempting:
			e.lookAt(time.Now().Add(courtesy))
		default:
			e.nudge(telemetry.Message)
		}
	}
}

// mark records a reason for an attempt.
func (e *entry) mark(c telemetry.Cause) {
	if e.cause == 0 {
		e.cause = c
	}
}

// nudge makes the head try, later if the key is left open.
func (e *entry) nudge(c telemetry.Cause) {
	if e.attempting || e.first != nil {
		e.mark(c)
	}
	switch {
	case e.first == nil:
	case e.isOpen():
		e.lookAt(started.Add(e.opened + openFor))
	default:
		e.first.signal()
	}
}

// Wake makes the head of a queue try.
func (q *Queues) Wake(key Key) {
	s, e := q.lock(key)
	defer s.mu.Unlock()
	if e != nil {
		e.nudge(telemetry.Local)
	}
}
