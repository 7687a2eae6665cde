package engine

import "time"

const (
	// turnRounds is the least number of acquisitions in a turn: to a process that is far away, each may take longer
	// than a turn.
	turnRounds = 4
	// loopRounds is the turn of a process whose callers do not wait, such as a single goroutine in a loop:
	// it only competes with other processes.
	loopRounds = 2
	// loopGap is the longest time between a release and the next call of such a loop.
	loopGap = 2 * time.Millisecond
	// A process that nobody listens to takes turns of lonelyTurn at least.
	lonelyTurn = 25 * time.Millisecond

	// leastPause is how long a key that was left to others has to be free before the process tries again.
	// It is four times as long after each time that nobody has taken the key, because others may be far away, and
	// begins again after mostPause.
	leastPause = 5 * time.Millisecond
	pauses     = 3
	mostPause  = leastPause << (2 * (pauses - 1))
	// mostBehind bounds by how much longer than usual a turn lasts after the others have had more.
	mostBehind = 5 * time.Millisecond
	// mostOwed bounds how long a key is left to one other process, after a long hold.
	mostOwed = 500 * time.Millisecond
	// After a turn that was left to others in vain the next one lasts for rareTurn at least, and then four times
	// as long, up to 1.6 s. That bounds the wait of a process that comes later.
	rareTurn  = 25 * time.Millisecond
	maxUnused = 4

	// A key with pollers is left open for openFor every openEvery: that is longer than the
	// common libraries pause, and shorter than they wait. Nothing tells whether there are
	// any pollers.
	openEvery = 3 * time.Second
	openFor   = 300 * time.Millisecond
)

// turn shares a key between processes by time. The process that has released it would usually acquire it
// again: its goroutines run already, while other processes have to hear of the release first.
// So a process takes turns. When its turn is over it leaves the key to the others, for as long as it has had
// the key itself, times the number of the others, which the reply of PUBLISH tells. Until then it makes an attempt
// only if the key has been free for a pause.
//
// A turn may end early, because others are faster when no caller of this process waits for a moment. So that it is no
// advantage to be the fastest, what a process has had in several such turns counts as one, less what each of the others
// has had in between.
//
// PUBLISH also counts subscribers that do not wait. Each time that nobody has taken the key, the next turn is
// longer, and so is the pause.
type turn struct {
	since  time.Duration // since started: the first acquisition of this process in a row; 0: there is none
	rounds int32         // acquisitions in a row
	ahead  time.Duration // how much longer than each of the others this process had had it before that
	left   time.Duration // since started: the last release of this process, or the end of the time of the others
	others int32         // subscribers of other processes to the last release; negative: none, 0: unknown

	yielded time.Duration // since started: when the key was left to others; 0: it is not
	had     time.Duration // how long this process had had it
	used    bool          // another process has acquired it since
	echo    bool          // the message of the own release is still to come
	unused  uint8         // how often in a row the key was left in vain
	pause   uint8         // see freeFor
}

// pastTurn is the turn of a process that has nothing to do with a key for a moment.
type pastTurn struct {
	turn
	at time.Duration // since started
}

// started is what the times of waiters and entries count from: a time.Time is larger.
var started = time.Now()

// acquired notes an acquisition of this process.
func (t *turn) acquired() {
	if t.yielded != 0 {
		t.end()
	}
	if t.since == 0 {
		t.rounds = 0
		t.since = time.Since(started)
		theirs := (t.since - t.left) / time.Duration(max(t.others, 1))
		t.ahead = max(-mostBehind, t.ahead-theirs)
	}
	t.rounds++
}

// yieldIfOver leaves the key to others if the turn is over, and reports whether it does. A turn lasts for length, and for
// turnRounds acquisitions, at least, or for loopRounds if no caller of this process waits. It is called before the release is sent,
// because its message may arrive before its reply.
func (t *turn) yieldIfOver(length time.Duration, waited bool) bool {
	if !t.isOver(length, waited) {
		return false
	}

	t.yielded = time.Since(started)
	t.had = min(max(0, min(t.ahead, length))+t.yielded-t.since, mostOwed)
	t.ahead = 0
	t.since = 0
	t.used = false
	t.echo = true
	return true
}

func (t *turn) isOver(length time.Duration, waited bool) bool {
	if t.since == 0 || t.yielded != 0 {
		return false
	}

	if t.others < 0 {
		length = max(length, lonelyTurn)
	}
	if t.unused > 0 {
		length = max(length, rareTurn<<(2*(t.unused-1)))
	} else if !waited && t.others > 0 {
		return t.rounds >= loopRounds
	}
	return length == 0 || t.rounds >= turnRounds && max(0, t.ahead)+time.Since(started)-t.since >= length
}

// end ends the time of the others.
func (t *turn) end() {
	if t.used {
		t.unused = 0
	} else {
		t.unused = min(t.unused+1, maxUnused)
		t.pause = (t.pause + 1) % pauses
	}
	t.yielded = 0
	t.since = 0
	t.left = time.Since(started)
}

// freeFor returns how long the key has to be free.
func (t *turn) freeFor() time.Duration { return leastPause << (2 * t.pause) }

// owed returns how long the key is left to others from now on, if they take it.
func (t *turn) owed() time.Duration {
	return t.had*time.Duration(max(t.others, 1)) - (time.Since(started) - t.yielded)
}

// taken notes an attempt that has found the key taken: by another process, or, if requesters take a part of
// something, perhaps by this one.
func (t *turn) taken(counting bool) {
	if t.yielded == 0 {
		if !counting && t.since != 0 {
			t.ahead += max(0, t.left-t.since)
			t.since = 0
		}
		return
	}

	t.used = true
	if t.owed() <= 0 {
		t.end()
	}
}

// heardBy notes a release that so many subscribers have heard of, of which this process may be one. A
// negative number is unknown.
func (t *turn) heardBy(receivers int, subscribed bool) {
	t.left = time.Since(started)
	if subscribed {
		receivers--
	}
	t.others = int32(max(receivers, 0))
	if receivers == 0 {
		t.others = -1
	}
	if t.others > 0 && t.since == 0 && t.yielded == 0 {
		t.acquired()
	}
}

// heard notes a message, and returns how long the process waits before it tries, 0 if it tries at once,
// and less if its own release has sent the message.
func (t *turn) heard() (wait time.Duration) {
	if t.yielded == 0 {
		return 0
	}
	if t.echo {
		t.echo = false
		return -1
	}

	t.used = true
	if wait = min(t.owed(), t.freeFor()); wait <= 0 {
		t.end()
		return 0
	}
	return wait
}

// yieldsLocked reports whether a caller, which could make an attempt, leaves the key to others first. It does
// not if it would have no time left for an attempt.
func (e *entry) yieldsLocked(req *Request) bool {
	t := &e.turn
	if req.Once || req.Ordered || e.first != nil || e.attempting || len(e.holders) > 0 || t.others <= 0 || req.Acquirer.Channel() == "" {
		return false
	}
	const enough = 2 * mostPause
	if by, ok := req.Ctx.Deadline(); ok && time.Until(by) < enough {
		return false
	}
	if !req.Deadline.IsZero() && time.Until(req.Deadline) < enough {
		return false
	}

	if t.yieldIfOver(e.queues.cfg.Turn, false) {
		t.echo = false // this process does not listen yet
	}
	return t.yielded != 0
}

// waitsLocked reports whether this process leaves the key to others after a release that some may have heard,
// and has the head try after a pause.
func (e *entry) waitsLocked() bool {
	if e.turn.yielded == 0 {
		return false
	}
	if e.first == nil || e.attempting || e.turn.others < 0 {
		e.turn.yielded = 0
		return false
	}
	e.lookAtLocked(time.Now().Add(e.turn.freeFor()))
	return true
}

// opensLocked reports whether it is time to leave the key open to pollers that may wait beside the
// head.
func (e *entry) opensLocked() bool {
	if e.first == nil || e.first.req.LeftOpen == "" {
		return false
	}
	now := time.Since(started)
	if e.opened == 0 {
		e.opened = now - openFor
	}
	return now-e.opened >= openEvery
}

// leaveOpenLocked keeps this process from trying for a while.
func (e *entry) leaveOpenLocked() {
	e.opened = time.Since(started)
	e.turn.yielded = 0
	if e.first != nil {
		e.lookAtLocked(started.Add(e.opened + openFor))
	}
}

// isOpenLocked reports whether the key is left open.
func (e *entry) isOpenLocked() bool { return e.opened != 0 && time.Since(started)-e.opened < openFor }
