package countdown

import (
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
)

// snapshot is the state of a latch as one read has found it.
type snapshot struct {
	count int64         // 0: the latch is open
	ttl   time.Duration // of the count; negative if it has none
	round string        // round id; "" if unknown
}

// precedes reports whether now shows a later round than s. A round id is written only
// when the count is set, so an id that was missing before belongs to a later round.
// Within a round the count only decreases.
func (s snapshot) precedes(now snapshot) bool {
	return now.round != "" && now.round != s.round || now.count > s.count
}

// stage is the progress of a waiter.
type stage uint8

const (
	// stageNew: no read has begun since it joined.
	stageNew stage = iota
	// stageReading: no read has succeeded yet; the current one, or the next, is its
	// first.
	stageReading
	// stageClosed: the last successful read was for this waiter too, and found the latch
	// closed.
	stageClosed
	// stageDone: it no longer waits.
	stageDone
)

// waiter is one call of Wait or WaitChan.
type waiter struct {
	stage   stage
	opened  bool // its round has ended
	reads   int
	lastErr error  // of the last read, if it failed
	end     func() // ends the wait; called once, by effects

	// For a list of the waiters.
	name  string
	since time.Time
	site  callsite.Site
}

// effects are the side effects of waiters. They do not call back.
type effects interface {
	read() // ends with onSnapshot or onError
	subscribe() (confirmed bool)
	unsubscribe()
	setTimer(d time.Duration) // replaces the previous timer
	left(w *waiter)           // w is stageDone
}

// waiters are the waiters of one latch. They share a subscription, a timer, and one
// read at a time. waiters decides when each is released; effects performs the I/O. The
// mutex of its registry guards it.
//
// A waiter is released when a read that began after it joined finds the latch open or,
// because a latch may be reset at once, a later round than the waiter's own. A message
// only causes a read: anyone may publish.
type waiters struct {
	fx effects

	set        map[*waiter]struct{}
	reading    bool
	readAgain  bool     // something has happened since the read began
	last       snapshot // of the last successful read
	subscribed bool
}

const (
	// safetyPoll bounds the delay that a lost message causes.
	safetyPoll = 5 * time.Second

	minRetry = 100 * time.Millisecond
	maxRetry = time.Second
)

func (ws *waiters) join(w *waiter) {
	ws.set[w] = struct{}{}
	ws.read()
}

// giveUp removes a waiter, unless it has left.
func (ws *waiters) giveUp(w *waiter) {
	if w.stage != stageDone {
		ws.leave(w)
	}
}

// leave removes a waiter: it has given up, or its round has ended, or reads keep failing.
func (ws *waiters) leave(w *waiter) {
	w.stage = stageDone
	delete(ws.set, w)
	if len(ws.set) == 0 && ws.subscribed {
		ws.fx.unsubscribe()
		ws.subscribed = false
	}
	ws.fx.left(w)
}

// idle reports whether the value can be discarded.
func (ws *waiters) idle() bool { return len(ws.set) == 0 && !ws.reading }

// read starts a read. If one is under way, which may be too old, another follows it.
func (ws *waiters) read() {
	if ws.reading {
		ws.readAgain = true
		return
	}
	if len(ws.set) == 0 {
		return
	}

	ws.reading = true
	ws.readAgain = false
	for w := range ws.set {
		if w.stage == stageNew {
			w.stage = stageReading
		}
	}

	ws.fx.read()
}

// onSnapshot handles a successful read.
func (ws *waiters) onSnapshot(s snapshot) {
	laterRound := ws.last.precedes(s)
	ws.last = s
	for w := range ws.set {
		if w.stage == stageNew {
			continue
		}
		w.reads++
		w.lastErr = nil
		if s.count == 0 || w.stage == stageClosed && laterRound {
			w.opened = true
			ws.leave(w)
			continue
		}
		w.stage = stageClosed
	}

	pause := safetyPoll
	if s.ttl >= 0 {
		pause = min(pause, s.ttl+time.Millisecond)
	}
	ws.afterRead(pause)
}

// onError handles a failed read. After a temporary error the read is repeated after a
// pause.
func (ws *waiters) onError(err error, temporary bool, pause time.Duration) {
	for w := range ws.set {
		if w.stage == stageNew {
			continue
		}
		w.reads++
		w.lastErr = err
		if !temporary {
			ws.leave(w)
		}
	}

	ws.afterRead(pause)
}

// afterRead runs after every read.
func (ws *waiters) afterRead(pause time.Duration) {
	ws.reading = false
	if len(ws.set) == 0 {
		return
	}
	if !ws.subscribed {
		ws.subscribed = true

		// A message may have been missed before the subscription. Its confirmation, if
		// it is still to come, causes another read.
		ws.readAgain = ws.fx.subscribe() || ws.readAgain
	}

	ws.fx.setTimer(pause)
	if ws.readAgain {
		ws.read()
	}
}
