package engine

import (
	"time"

	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/internal/telemetry"
)

// safetyPoll bounds the time for which a lost message or a key deleted by hand goes unnoticed. An idle
// queue costs one attempt in that time.
const safetyPoll = 5 * time.Second

// subscribeLocked subscribes for the head, unless that is done or there is nothing to hear. The hub does not
// call back from here.
func (e *entry) subscribeLocked() {
	head := e.first
	if head.req.Ordered {
		// Where the server keeps the queue, there are no messages while this process holds the key.
		if head.unsubscribe == nil && len(e.holders) == 0 && !head.unregistered {
			head.unsubscribe = e.queues.cfg.SubscribeOwn(head.req.Acquirer.Channel(), head)
		}
		return
	}

	if e.unsubscribe != nil {
		return
	}
	channel := head.req.Acquirer.Channel()
	if channel == "" {
		return
	}

	var confirmed bool
	e.unsubscribe, confirmed = e.queues.cfg.Subscribe(channel, e)
	if confirmed && e.turn.yielded == 0 && (len(e.holders) == 0 || head.req.Shareable) {
		// A message may have been published since the last attempt.
		e.markLocked(telemetry.Subscribed)
	}
}

// unsubscribeUnusedLocked ends a subscription without a waiter.
func (e *entry) unsubscribeUnusedLocked() {
	if e.unsubscribe != nil && e.first == nil {
		e.unsubscribe()
		e.unsubscribe = nil
	}
}

// busyLocked schedules the next attempt after one that found the key taken.
func (e *entry) busyLocked(a Answer) {
	pause := safetyPoll
	if a.FreeIn >= 0 {
		pause = min(pause, a.FreeIn)
	}
	if a.poll > 0 && len(e.holders) == 0 { // else the release is local
		pause = min(pause, a.poll)
	}

	at := time.Now().Add(pause)
	if e.outage && e.tryAt.Before(at) {
		return // unregistered waiters try before
	}

	e.lookAtLocked(at)
}

// lookAtLocked schedules an attempt of the head.
func (e *entry) lookAtLocked(at time.Time) {
	e.tryAt = at
	e.queues.cfg.Wheel.Schedule(&e.timer, at, e)
}

// armLocked makes sure that the head makes another attempt.
func (e *entry) armLocked() {
	if e.tryAt.IsZero() {
		e.lookAtLocked(time.Now().Add(safetyPoll))
	}
}

// Expire implements watchdog.Expirer: it is time for the scheduled attempt.
func (e *entry) Expire(now time.Time) {
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()

	if e.tryAt.IsZero() || now.Before(e.tryAt) {
		return
	}

	e.tryAt = time.Time{}
	e.outage = false
	e.nudgeLocked(telemetry.Timer)
	e.wakeUnregisteredLocked()
}

// Notify implements hub.Listener, for the own channel of a waiter.
func (w *waiter) Notify(ev hub.Event) {
	cause := telemetry.Message
	if ev.Subscribed {
		cause = telemetry.Subscribed
	}

	e := w.entry
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()

	if w.state > trying {
		return // its wait is over, and the entry may be in use for another key
	}
	if w.state == trying {
		// The attempt may have been too early. A reason for the head would not do: with the reply
		// another waiter can become the head.
		w.again = true
		return
	}

	if w == e.first {
		e.nudgeLocked(cause)
		return
	}

	// The head is another one on the server, or a message may be lost.
	w.registerLocked(false)
	w.signal()
}

// Notify implements hub.Listener, for the channel of all waiters.
func (e *entry) Notify(ev hub.Event) {
	e.shard.mu.Lock()
	defer e.shard.mu.Unlock()

	if ev.Subscribed {
		if e.turn.yielded == 0 {
			e.nudgeLocked(telemetry.Subscribed)
		}
		return
	}
	if e.first != nil && e.first.req.LeftOpen != "" && ev.Payload == e.first.req.LeftOpen {
		e.leaveOpenLocked()
		return
	}

	wait := e.turn.heard()
	if wait == 0 || wait > 0 && e.attempting {
		e.nudgeLocked(telemetry.Message)
	} else if wait > 0 {
		e.lookAtLocked(time.Now().Add(wait))
	}
}

// markLocked records a reason for an attempt.
func (e *entry) markLocked(c telemetry.Cause) {
	if e.cause == 0 {
		e.cause = c
	}
}

// nudgeLocked makes the head try, later if the key is left open.
func (e *entry) nudgeLocked(c telemetry.Cause) {
	if e.attempting || e.first != nil {
		e.markLocked(c)
	}
	if e.first == nil {
		return
	}

	if e.isOpenLocked() {
		e.lookAtLocked(started.Add(e.opened + openFor))
	} else {
		e.first.signal()
	}
}

// Wake makes the head of a queue try.
func (q *Queues) Wake(key Key) {
	q.with(key, func(e *entry) { e.nudgeLocked(telemetry.Local) })
}
