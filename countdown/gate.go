package countdown

import (
	"time"

	"github.com/redlatch/redlatch/pubsub"
)

// sight is what a look at the server has found.
type sight struct {
	count int64         // 0: the latch is open
	ttl   time.Duration // of the count; less than 0 if it has none
	round string        // identity of the round; "" if it is not known
}

// another reports whether now shows a later round than before. A round's identity is
// written when its count is set and at no other time, so one that was not there before
// is of a round that began since; and in one round the count only comes down.
func (before sight) another(now sight) bool {
	return now.round != "" && now.round != before.round || now.count > before.count
}

// stage is how far a waiter has come.
type stage uint8

const (
	// fresh: no look has begun since it came.
	fresh stage = iota
	// asked: no look has had an answer yet; the one under way, or the next, is its first.
	asked
	// closed: it has seen the latch closed. A message may be older than that.
	closed
	// syncing: its order against the messages is being asked for.
	syncing
	// settled: whatever message comes was published after it has seen the latch closed,
	// and so ends its round.
	settled
	// over: it does not wait any more.
	over
)

// waiter is one call of Wait.
type waiter struct {
	stage    stage
	released chan struct{} // closed when it is over, unless it has left
	err      error         // why, if the latch did not open
	looks    int
	troubled time.Time // since when the server is not available
	trouble  error     // the error of the last look, if it had no answer
}

// effects are what a gate does to the world. They do not call it back.
type effects interface {
	look()                      // ends with saw or failed
	subscribe() (standing bool) // confirmed already
	unsubscribe()
	sync()
	wakeIn(d time.Duration) // replaces the time set before
	now() time.Time
}

// gate is what the waiters of one latch share: a subscription, a timer, and the looks
// at the server, one at a time. It decides when a waiter may go; what that takes is
// done by its effects. A mutex of its owner guards it.
//
// A waiter goes when a look that began after it came finds the latch open. That alone
// would not do: a latch that is set again at once is found closed. So it goes also when
// a look finds another round than the one it has seen, and, once it is settled, with
// any message: nobody publishes while a round goes on.
type gate struct {
	fx       effects
	ordered  bool // whether the order of messages can be asked for
	patience time.Duration

	waiters map[*waiter]struct{}
	looking bool
	again   bool  // something has happened since the look began
	last    sight // what the last look that had an answer has seen

	subscribed bool
	standing   bool // the subscription was confirmed
	inSync     bool // the answer to a sync is on the way
}

const (
	// safetyPoll bounds how long a message that was lost can go unnoticed.
	safetyPoll = 5 * time.Second

	minRetry = 100 * time.Millisecond
	maxRetry = time.Second
)

func (g *gate) join(w *waiter) {
	g.waiters[w] = struct{}{}
	g.look()
}

// leave takes out a waiter that has given up, or is about to be told that it is over.
func (g *gate) leave(w *waiter) {
	w.stage = over
	delete(g.waiters, w)
	if len(g.waiters) == 0 && g.subscribed {
		g.fx.unsubscribe()
		g.subscribed, g.standing, g.inSync = false, false, false
	}
}

func (g *gate) release(w *waiter, err error) {
	g.leave(w)
	w.err = err
	close(w.released)
}

// idle reports whether nobody needs the gate.
func (g *gate) idle() bool { return len(g.waiters) == 0 && !g.looking }

// look has the server looked at now, or when the look under way has ended: that one
// may be too old.
func (g *gate) look() {
	if g.looking {
		g.again = true
		return
	}
	if len(g.waiters) == 0 {
		return
	}
	g.looking, g.again = true, false
	g.each(fresh, func(w *waiter) { w.stage = asked })
	g.fx.look()
}

// saw is called when a look has an answer.
func (g *gate) saw(s sight) {
	another := g.last.another(s)
	g.last = s
	for w := range g.waiters {
		if w.stage == fresh {
			continue
		}
		w.looks++
		w.troubled, w.trouble = time.Time{}, nil
		if s.count == 0 || w.stage != asked && another {
			g.release(w, nil)
			continue
		}
		if w.stage == asked {
			w.stage = closed
		}
	}
	pause := safetyPoll
	if s.ttl >= 0 {
		pause = min(pause, s.ttl+time.Millisecond)
	}
	g.looked(pause)
}

// failed is called when a look has ended with an error, after which nothing is known.
// If passing is set it is tried again after a pause, for as long as a waiter has
// patience.
func (g *gate) failed(err error, passing bool, pause time.Duration) {
	now := g.fx.now()
	for w := range g.waiters {
		if w.stage == fresh {
			continue
		}
		w.looks++
		w.trouble = err
		if w.troubled.IsZero() {
			w.troubled = now
		}
		if !passing || now.Sub(w.troubled) >= g.patience {
			g.release(w, err)
		}
	}
	g.looked(pause)
}

// looked is called after every look.
func (g *gate) looked(pause time.Duration) {
	g.looking = false
	if len(g.waiters) == 0 {
		return
	}
	if !g.subscribed {
		g.subscribed = true
		g.standing = g.fx.subscribe()
		// A message may have passed before anybody listened.
		g.again = g.again || g.standing
	}
	g.fx.wakeIn(pause)
	if g.again {
		g.look()
	}
	g.settle()
}

// settle asks for the order of messages where somebody needs it.
func (g *gate) settle() {
	if !g.ordered || !g.standing || g.inSync {
		return
	}
	g.each(closed, func(w *waiter) { w.stage, g.inSync = syncing, true })
	if g.inSync {
		g.fx.sync()
	}
}

// heard is called with what the subscription brings, until it is ended.
func (g *gate) heard(ev pubsub.Event) {
	switch {
	case ev.Subscribed:
		// Messages may have been missed, and the answer to a sync does not come.
		g.standing, g.inSync = true, false
		g.each(syncing, func(w *waiter) { w.stage = closed })
		g.look()
		g.settle()
	case ev.CaughtUp:
		g.inSync = false
		g.each(syncing, func(w *waiter) { w.stage = settled })
		g.settle()
	default:
		if ev.Payload == payloadOpen || ev.Payload == payloadSet {
			g.each(settled, func(w *waiter) { g.release(w, nil) })
		}
		g.look()
	}
}

// each calls f for all waiters of a stage.
func (g *gate) each(s stage, f func(w *waiter)) {
	for w := range g.waiters {
		if w.stage == s {
			f(w)
		}
	}
}
