package acquire

import (
	"time"
)

const (
	// yieldFor is how long a process that yields waits for a sign that another process
	// holds the key or held it.
	yieldFor = 20 * time.Millisecond
	// maxDoubt bounds how rarely yielding is tried after it was in vain.
	maxDoubt = 64

	// A key with pollers is left open for openFor every openEvery: that is longer than the
	// common libraries pause, and shorter than they wait. Nothing tells whether there are
	// any pollers.
	openEvery = 3 * time.Second
	openFor   = 300 * time.Millisecond
)

// Turn is called before a release that cannot be passed on. The next waiter of this process may
// acquire at once, as after a hand-off, but only so many consecutive times.
func (q *Queues) Turn(key Key) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil && e.first != nil {
		if e.handOffs++; int(e.handOffs) >= q.cfg.HandOffs {
			e.handOffs = 0
			e.turns.begin()
		}
	}
}

// LeavesOpen reports whether the coming release leaves the key open to pollers, with the
// payload LeftOpen.
func (q *Queues) LeavesOpen(key Key) bool {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	return e != nil && e.leaves
}

// opening is the schedule by which a key is left open to pollers.
type opening struct {
	last  time.Time // the last time, or when the schedule began
	until time.Time // no attempt is made in this process before
}

// leaveOpen keeps this process from trying for a while. The mutex is held.
func (e *entry) leaveOpen() {
	now := time.Now()
	e.open = &opening{last: now, until: now.Add(openFor)}
	e.turns.yielding = false
	if e.first != nil {
		e.lookAt(e.open.until)
	}
}

// isOpen reports whether the key is left open. The mutex is held.
func (e *entry) isOpen() bool { return e.open != nil && time.Now().Before(e.open.until) }

// turns shares a key between processes. Without it the process that has just
// released the key would usually take it again: its goroutines run already,
// while those of the others have to be woken; and of these the same one would
// always hear the message first. So a process that has used up its hand-offs
// stands back: it lets the message of its own release pass, and then the
// releases of the others, one fewer than there are of them, so that each has
// its turn before it tries again.
//
// How many others there are is what PUBLISH returns, and that is too many:
// some are subscribed and not waiting. Standing back for them leaves the key
// idle until a timer ends it. Therefore the number of releases to let pass
// grows by one at a time and shrinks by one when it was too high, and growth
// becomes slower each time; and if nobody comes at all, standing back is left
// out for a while.
type turns struct {
	yielding bool
	echo     bool  // the message of the own release is still to come
	pass     int32 // how many further releases to let pass

	sitOut int32 // what pass starts at
	streak int32 // turns that went well since sitOut has changed
	calm   int32 // how many it takes for sitOut to grow
	lonely int32 // how often to leave standing back out when it was in vain; doubles
	skip   int32 // how often it still is to be left out
}

// begin is called before the release that ends this process's turn is sent: its
// message may arrive before its reply.
func (t *turns) begin() {
	if t.skip > 0 {
		t.skip--
		return
	}
	t.yielding, t.echo, t.pass = true, true, 0
}

// released is called after that release, with the number of subscribers receivers,
// and reports whether to stand back now.
func (t *turns) released(receivers int) bool {
	if !t.yielding || receivers == 0 || receivers == 1 {
		return false
	}
	if others := receivers - 1; int(t.sitOut) < others-1 && t.streak >= t.calm {
		t.sitOut, t.streak = t.sitOut+1, 0
	}
	t.pass = t.sitOut
	return true
}

// letPass is called for every message and reports whether it is for others.
func (t *turns) letPass() bool {
	switch {
	case !t.yielding:
		return false
	case t.echo:
		t.echo = false
		return true
	case t.pass > 0:
		t.pass--
		return true
	}
	t.yielding = false
	t.streak++
	t.lonely = 0
	return false
}

// patience is how long to wait for a sign of others. Who lets more others pass
// gives up sooner: when the key lies idle, it is more likely the one that waits
// for too many.
func (t *turns) patience() time.Duration {
	return yieldFor / time.Duration(1+t.sitOut)
}

// attempted is called after an attempt, with whether the timer caused it.
func (t *turns) attempted(byTimer, acquired bool) {
	if !t.yielding {
		return
	}
	t.echo = false
	switch {
	case !acquired:
		// Somebody has come: go on letting pass what there is to let pass.
		return
	case !byTimer:
	case t.sitOut > 0:
		t.sitOut, t.streak, t.calm = t.sitOut-1, 0, min(max(4, 2*t.calm), maxDoubt)
	default:
		t.lonely = min(max(1, 2*t.lonely), maxDoubt)
		t.skip = t.lonely
	}
	t.yielding = false
}
