package queue

import "time"

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

// released is called after that release, with the number of subscribers told,
// and reports whether to stand back now.
func (t *turns) released(told int) bool {
	if !t.yielding || told == 0 || told == 1 {
		return false
	}
	if others := told - 1; int(t.sitOut) < others-1 && t.streak >= t.calm {
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
