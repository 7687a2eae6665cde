package countdown

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redlatch/redlatch/internal/lockstep"
)

// In any order of reads, subscriptions, replies and messages, a waiter is not released
// before its round ends, and is released once it can know that the round has ended.
func TestWaitersAreReleasedExactlyAtRoundEnd(t *testing.T) {
	steps := 1_500_000
	if testing.Short() {
		steps = 300_000
	}
	lockstep.Test[modelStep]{
		Steps: steps, Length: 50, Kinds: modelKinds,
		Outcomes: []string{"released", "same round", "next round"},
		Start: func(int) lockstep.Begin[modelStep] {
			return func(seed uint64, seen lockstep.Seen) lockstep.Walk[modelStep] {
				return newModel(seed, seen)
			}
		},
	}.Run(t)
}

var modelKinds = lockstep.Weights{
	{"wait", 8}, {"leave", 3}, {"set", 4}, {"count down", 8}, {"reset", 4}, {"delete", 4}, {"expire", 4},
	{"expire the round id", 4}, {"disconnect", 1}, {"advance the clock", 4}, {"deliver", 20},
}

// modelStep is a step and the seed of its choices.
type modelStep struct {
	lockstep.Kind
	choices uint64
}

// model simulates the server and the network around one value of waiters. It knows the
// expected result of each waiter.
type model struct {
	seed    uint64
	r       *rand.Rand // of the step
	waiters waiters
	clock   time.Time
	notes   []string
	seen    lockstep.Seen

	// The server.
	java     bool // Java also sets and counts down
	lossy    bool // messages may be lost, or arrive in another order
	count    int64
	round    int // whose id the server has, 0 if none
	rounds   int // started so far
	lastOpen int // the last step at which the latch was open
	step     int

	// In flight.
	reading     readState
	result      snapshot
	readErr     error
	subscribed  bool     // on the server
	subscribing bool     // a SUBSCRIBE is in flight
	queue       []string // confirmations and messages
	timerAt     time.Time

	faultless bool // no more faults
	silent    bool // the latch has opened without a message

	expected []*modelWaiter
}

// Events of the subscription.
const (
	confirmation = "confirmation"
	message      = "message"
)

type readState int

const (
	noRead readState = iota
	sent
	answered
)

// modelWaiter is a waiter and what it should see.
type modelWaiter struct {
	*waiter
	name       int
	joined     int   // step
	firstRound int   // round of its first successful read, 0 if none
	count      int64 // of its last successful read
	missedRise bool  // a later read found a higher count
	left       bool
	ended      bool
}

func newModel(seed uint64, seen lockstep.Seen) *model {
	p := &model{seed: seed, clock: time.Unix(1_000_000, 0), java: seed%3 != 0, lossy: seed%5 == 0, seen: seen}
	p.waiters = waiters{fx: p, set: map[*waiter]struct{}{}}
	p.endStep()
	return p
}

// must fails the walk unless ok.
func (p *model) must(ok bool, format string, args ...any) {
	if !ok {
		lockstep.Failf("%s\n%s", fmt.Sprintf(format, args...), strings.Join(p.notes, "\n"))
	}
}

// Effects.

func (p *model) read() {
	p.must(p.reading == noRead, "two concurrent reads")
	p.reading = sent
}

func (p *model) subscribe() bool {
	p.must(!p.subscribing, "two subscriptions")
	if p.subscribed && p.r.IntN(2) == 0 { // kept warm; queued messages are delivered
		return true
	}
	p.subscribed, p.queue, p.subscribing = false, nil, true
	return false
}

func (p *model) unsubscribe() {
	p.subscribing = false
	p.queue = slices.DeleteFunc(p.queue, func(event string) bool { return event == confirmation })
}

func (p *model) setTimer(d time.Duration) { p.timerAt = p.clock.Add(d) }

func (p *model) left(w *waiter) {
	at := slices.IndexFunc(p.expected, func(m *modelWaiter) bool { return m.waiter == w })
	p.must(!p.expected[at].left, "waiter %d leaves twice", at)
	p.expected[at].left = true
}

// Other processes.

func (p *model) publish() {
	if p.subscribed {
		p.queue = append(p.queue, message)
	}
}

func (p *model) markOpen() { p.lastOpen = p.step }

func (p *model) end() {
	if p.count > 0 {
		p.count = 0
		p.markOpen()
	}
}

func (p *model) set(java bool) {
	if p.count > 0 {
		return
	}
	p.silent = false
	p.rounds++
	p.count = 1 + p.r.Int64N(3)
	if !java {
		p.round = p.rounds
	}
	p.publish()
}

func (p *model) down(java bool) {
	if p.count == 0 {
		return
	}
	if p.count--; p.count == 0 {
		p.markOpen()
		p.publish()
		if !java {
			p.round = 0
		}
	}
}

func (p *model) disconnect() {
	if !p.subscribed {
		return
	}
	p.queue, p.subscribed = nil, false
	p.subscribing = p.waiters.subscribed
}

// Draw implements lockstep.Walk.
func (p *model) Draw(r *rand.Rand) modelStep { return modelStep{modelKinds.Draw(r), r.Uint64()} }

// Take implements lockstep.Walk.
func (p *model) Take(s modelStep) bool {
	p.r = rand.New(rand.NewPCG(s.choices, 0))
	byJava := p.java && p.r.IntN(2) == 0
	switch s.Kind {
	case "wait":
		w := &modelWaiter{waiter: &waiter{}, name: len(p.expected), joined: p.step}
		p.expected = append(p.expected, w)
		p.note("waiter ", w.name, " joins")
		p.waiters.join(w.waiter)
	case "leave":
		var waiting []*modelWaiter
		for _, w := range p.expected {
			if !w.ended && w.stage != stageDone {
				waiting = append(waiting, w)
			}
		}
		if len(waiting) == 0 {
			return false
		}
		w := waiting[p.r.IntN(len(waiting))]
		p.note("waiter ", w.name, " leaves")
		w.ended = true
		p.waiters.giveUp(w.waiter)
		p.must(w.left, "waiter %d has not left", w.name)
		p.waiters.giveUp(w.waiter) // again, as for the end of both a context and a client
	case "set":
		p.note("set by Java: ", byJava)
		p.set(byJava)
	case "count down":
		p.note("count down by Java: ", byJava)
		p.down(byJava)
	case "reset":
		p.note("reset by Java: ", byJava)
		for p.count > 0 {
			p.down(byJava)
		}
		p.set(byJava)
	case "delete":
		p.note("delete")
		if p.count > 0 {
			p.end()
			p.round = 0
			p.publish()
		}
	case "expire":
		p.note("expire")
		p.silent = p.silent || p.count > 0
		p.end()
	case "expire the round id":
		// Only a read that is an hour late could miss that.
		if !p.allRead() {
			return false
		}
		p.note("the round id expires")
		p.round = 0
	case "disconnect":
		p.note("disconnect")
		p.disconnect()
	case "advance the clock":
		p.note("advance the clock")
		p.clock = p.clock.Add(time.Duration(p.r.IntN(3000)) * time.Millisecond)
	default:
		if !p.deliver() {
			return false
		}
	}
	p.endStep()
	return true
}

// allRead reports whether all waiters have seen the latest round.
func (p *model) allRead() bool {
	for _, w := range p.expected {
		if w.stage != stageDone && (w.firstRound == 0 || p.waiters.last.round != p.id()) {
			return false
		}
	}
	return p.reading == noRead
}

// deliver completes one random pending step, and reports whether there was any.
func (p *model) deliver() bool {
	var can []func()
	add := func(is bool, do func()) {
		if is {
			can = append(can, do)
		}
	}
	add(p.reading == sent, func() {
		p.note("read on the server: ", p.count, " ", p.round)
		p.reading, p.result, p.readErr = answered, snapshot{p.count, -1, p.id()}, nil
		if p.count == 0 {
			p.markOpen()
		}
		if !p.faultless && p.r.IntN(10) == 0 {
			p.readErr = errors.New("lost")
			return
		}
		for _, w := range p.expected {
			switch w.stage {
			case stageNew, stageDone:
				continue
			case stageReading:
				w.firstRound = p.rounds
			default:
				w.missedRise = w.missedRise || p.count > w.count
			}
			w.count = p.count
		}
	})
	add(p.reading == answered, func() {
		p.note("reply ", p.result, " ", p.readErr)
		p.reading = noRead
		if p.readErr == nil {
			p.waiters.onSnapshot(p.result)
		} else {
			p.waiters.onError(p.readErr, true, minRetry)
		}
	})
	add(p.subscribing, func() {
		p.note("subscribed on the server")
		p.subscribing, p.subscribed = false, true
		p.queue = append(p.queue, confirmation)
	})
	add(len(p.queue) > 0, func() {
		n := 0
		if p.lossy {
			n = p.r.IntN(len(p.queue))
		}
		event := p.queue[n]
		p.queue = slices.Delete(p.queue, n, n+1)
		if lost := p.lossy && event == message && p.r.IntN(4) == 0; !lost && p.waiters.subscribed {
			p.note("event ", event)
			p.waiters.read()
		}
	})
	add(!p.timerAt.IsZero() && !p.clock.Before(p.timerAt), func() {
		p.note("timer")
		p.timerAt = time.Time{}
		p.waiters.read()
	})
	if len(can) == 0 {
		return false
	}
	can[p.r.IntN(len(can))]()
	return true
}

// id is the round id that the server has.
func (p *model) id() string {
	if p.round == 0 {
		return ""
	}
	return fmt.Sprint("round ", p.round)
}

func (p *model) note(what ...any) { p.notes = append(p.notes, fmt.Sprint(what...)) }

// endStep checks the invariants after a step.
func (p *model) endStep() {
	for _, w := range p.expected {
		if w.stage == stageDone && !w.ended {
			w.ended = true
			p.note("waiter ", w.name, " is released")
			p.must(w.opened && w.left, "waiter %d: %v", w.name, w.lastErr)
			p.must(p.lastOpen >= w.joined, "waiter %d was released during its round", w.name)
		}
	}
	p.step++
	if p.count == 0 {
		p.markOpen()
	}
}

// End implements lockstep.Walk. It delivers everything in flight, then triggers the
// safety poll, which only silent losses should need.
func (p *model) End() {
	p.r = rand.New(rand.NewPCG(p.seed, 0))
	p.faultless = true
	for p.deliver() {
		p.endStep()
	}
	for _, w := range p.expected {
		if !w.ended && !p.lossy && p.readErr == nil {
			p.must(p.silent || p.count > 0 && p.round <= w.firstRound, "waiter %d needs the safety poll", w.name)
		}
	}
	for range 3 {
		p.clock = p.clock.Add(safetyPoll)
		for p.deliver() {
			p.endStep()
		}
	}
	for _, w := range p.expected {
		if w.ended {
			p.seen.See("released")
			continue
		}
		p.must(p.count > 0, "waiter %d waits for an open latch", w.name)
		p.must(w.firstRound != 0, "waiter %d has not read the latch", w.name)
		p.must(!w.missedRise, "waiter %d has seen the count increase", w.name)
		if w.firstRound == p.rounds {
			p.seen.See("same round")
			continue
		}
		// Java has begun this round, and the server no longer shows the end of the other.
		p.must(p.round <= w.firstRound, "waiter %d waits for round %d, and this is round %d", w.name, w.firstRound, p.round)
		p.must(p.java, "waiter %d has missed the end of round %d", w.name, w.firstRound)
		p.seen.See("next round")
	}
	p.must(len(p.waiters.set) > 0 || !p.waiters.subscribed && p.waiters.idle(), "not idle")
}
