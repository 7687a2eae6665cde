package countdown

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/pubsub"
)

// Whatever the order in which looks, subscriptions, answers and messages arrive: a waiter
// is not released while its round goes on, and is released once it can know that its
// round is over.
func TestNobodyIsReleasedEarlyNorForgotten(t *testing.T) {
	steps := 1_500_000
	if testing.Short() {
		steps = 300_000
	}
	lockstep.Test[gateStep]{
		Steps: steps, Length: 50, Kinds: gateKinds,
		Outcomes: []string{"over", "waits on", "waits for the next"},
		Start: func(int) lockstep.Begin[gateStep] {
			return func(seed uint64, seen lockstep.Seen) lockstep.Walk[gateStep] {
				return newPlay(seed, seen)
			}
		},
	}.Run(t)
}

var gateKinds = lockstep.Weights{
	{"wait", 8}, {"leave", 3}, {"set", 4}, {"count down", 8}, {"reset at once", 4}, {"delete", 4}, {"expire", 4},
	{"forget the round", 4}, {"lose the connection", 1}, {"time passes", 4}, {"arrive", 20},
}

// gateStep is a step, and the seed of its choices.
type gateStep struct {
	lockstep.Kind
	choices uint64
}

// play is a world around one gate. It knows of each waiter what should become of it.
type play struct {
	seed  uint64
	r     *rand.Rand // of the step
	gate  gate
	clock time.Time
	notes []string
	seen  lockstep.Seen

	// The server.
	java   bool // also sets and counts down
	count  int64
	round  string
	rounds int // how many have begun
	opened int // the step at which the latch was open last
	step   int

	// What is on its way.
	looking    lookState
	looked     sight
	failure    error
	subscribed bool // at the server
	asking     bool // a subscription is to reach the server
	syncing    bool // a sync is to reach the server
	line       []pubsub.Event
	strays     []pubsub.Event // messages that other nodes pass on, in any order
	wake       time.Time

	calm   bool // nothing is lost any more
	silent bool // the latch has opened without a message

	waiters []*expected
}

type lookState int

const (
	noLook lookState = iota
	sent
	answered
)

// expected is a waiter and what it should see.
type expected struct {
	*waiter
	name  int
	came  int   // the step
	first int   // the round of its first look that had an answer, 0 if there is none
	told  int   // the round of which a message is in line for it, settled as it was
	count int64 // what the last look that had an answer has seen
	due   bool  // the count was higher than that then
	over  bool
}

func newPlay(seed uint64, seen lockstep.Seen) *play {
	p := &play{seed: seed, clock: time.Unix(1_000_000, 0), java: seed%3 != 0, seen: seen}
	p.gate = gate{fx: p, ordered: seed%5 != 0, patience: 30 * time.Second, waiters: map[*waiter]struct{}{}}
	p.pass()
	return p
}

// must fails the walk unless ok.
func (p *play) must(ok bool, format string, args ...any) {
	if !ok {
		lockstep.Failf("%s\n%s", fmt.Sprintf(format, args...), strings.Join(p.notes, "\n"))
	}
}

// What the gate does.

func (p *play) look() {
	p.must(p.looking == noLook, "two looks at a time")
	p.looking = sent
}

func (p *play) subscribe() bool {
	p.must(!p.asking, "two subscriptions")
	if p.subscribed && p.r.IntN(2) == 0 { // kept warm; messages in line are heard
		return true
	}
	p.subscribed, p.line, p.asking = false, nil, true
	return false
}

func (p *play) unsubscribe() {
	p.asking, p.syncing = false, false
	p.line = slices.DeleteFunc(p.line, func(ev pubsub.Event) bool { return ev.Subscribed || ev.CaughtUp })
}

func (p *play) sync() {
	p.must(!p.syncing, "two syncs")
	if p.subscribed && !slices.ContainsFunc(p.line, func(ev pubsub.Event) bool { return ev.Subscribed }) {
		p.syncing = true
	} // else the subscription is the answer
}

func (p *play) wakeIn(d time.Duration) { p.wake = p.clock.Add(d) }
func (p *play) now() time.Time         { return p.clock }

// What others do.

func (p *play) publish(payload string) {
	if !p.gate.ordered {
		p.strays = append(p.strays, pubsub.Event{Payload: payload})
		return
	}
	if !p.subscribed {
		return
	}
	p.line = append(p.line, pubsub.Event{Payload: payload})
	if p.gate.standing {
		for _, w := range p.waiters {
			if w.stage == settled {
				w.told = p.rounds
			}
		}
	}
}

func (p *play) isOpen() { p.opened = p.step }

func (p *play) open() {
	if p.count > 0 {
		p.count = 0
		p.isOpen()
	}
}

func (p *play) set(java bool) {
	if p.count > 0 {
		return
	}
	p.silent = false
	p.rounds++
	p.count = 1 + p.r.Int64N(3)
	if !java {
		p.round = "round " + strconv.Itoa(p.rounds)
	}
	p.publish(payloadSet)
}

func (p *play) down(java bool) {
	if p.count == 0 {
		return
	}
	if p.count--; p.count == 0 {
		p.isOpen()
		p.publish(payloadOpen)
		if !java {
			p.round = ""
		}
	}
}

func (p *play) lose() {
	if !p.subscribed {
		return
	}
	p.line, p.syncing, p.subscribed = nil, false, false
	p.asking = p.gate.subscribed
	for _, w := range p.waiters {
		w.told = 0
	}
}

// Draw implements lockstep.Walk.
func (p *play) Draw(r *rand.Rand) gateStep { return gateStep{gateKinds.Draw(r), r.Uint64()} }

// Take implements lockstep.Walk.
func (p *play) Take(s gateStep) bool {
	p.r = rand.New(rand.NewPCG(s.choices, 0))
	byJava := p.java && p.r.IntN(2) == 0
	switch s.Kind {
	case "wait":
		w := &expected{waiter: &waiter{released: make(chan struct{})}, name: len(p.waiters), came: p.step}
		p.waiters = append(p.waiters, w)
		p.note("waiter ", w.name, " comes")
		p.gate.join(w.waiter)
	case "leave":
		var waiting []*expected
		for _, w := range p.waiters {
			if !w.over && w.stage != over {
				waiting = append(waiting, w)
			}
		}
		if len(waiting) == 0 {
			return false
		}
		w := waiting[p.r.IntN(len(waiting))]
		p.note("waiter ", w.name, " leaves")
		w.over = true
		p.gate.leave(w.waiter)
	case "set":
		p.note("set by Java: ", byJava)
		p.set(byJava)
	case "count down":
		p.note("count down by Java: ", byJava)
		p.down(byJava)
	case "reset at once":
		p.note("reset at once by Java: ", byJava)
		for p.count > 0 {
			p.down(byJava)
		}
		p.set(byJava)
	case "delete":
		p.note("delete")
		if p.count > 0 {
			p.open()
			p.round = ""
			p.publish(payloadSet)
		}
	case "expire":
		p.note("expire")
		p.silent = p.silent || p.count > 0
		p.open()
	case "forget the round":
		// A look could miss that only if it is an hour late.
		if !p.allLooked() {
			return false
		}
		p.note("the identity of the round expires")
		p.round = ""
	case "lose the connection":
		p.note("connection lost")
		p.lose()
	case "time passes":
		p.note("time passes")
		p.clock = p.clock.Add(time.Duration(p.r.IntN(3000)) * time.Millisecond)
	default:
		if !p.arrive() {
			return false
		}
	}
	p.pass()
	return true
}

// allLooked reports whether all waiters have seen the latest round.
func (p *play) allLooked() bool {
	for _, w := range p.waiters {
		if w.stage != over && (w.first == 0 || p.gate.last.round != p.round) {
			return false
		}
	}
	return p.looking == noLook
}

// arrive brings one thing to where it is going, and reports whether there was any.
func (p *play) arrive() bool {
	var can []func()
	add := func(is bool, do func()) {
		if is {
			can = append(can, do)
		}
	}
	add(p.looking == sent, func() {
		p.note("the server is looked at: ", p.count, " ", p.round)
		p.looking, p.looked, p.failure = answered, sight{p.count, -1, p.round}, nil
		if p.count == 0 {
			p.isOpen()
		}
		if !p.calm && p.r.IntN(10) == 0 {
			p.failure = errors.New("lost")
			return
		}
		for _, w := range p.waiters {
			switch w.stage {
			case fresh, over:
				continue
			case asked:
				w.first = p.rounds
			default:
				w.due = w.due || p.count > w.count
			}
			w.count = p.count
		}
	})
	add(p.looking == answered, func() {
		p.note("answer ", p.looked, " ", p.failure)
		p.looking = noLook
		if p.failure == nil {
			p.gate.saw(p.looked)
		} else {
			p.gate.failed(p.failure, true, minRetry)
		}
	})
	add(p.asking, func() {
		p.note("subscribed at the server")
		p.asking, p.subscribed = false, true
		p.line = append(p.line, pubsub.Event{Subscribed: true})
	})
	add(p.syncing, func() {
		p.note("sync at the server")
		p.syncing = false
		p.line = append(p.line, pubsub.Event{CaughtUp: true})
	})
	add(len(p.line) > 0, func() {
		ev := p.line[0]
		p.line = p.line[1:]
		p.hear(ev)
	})
	add(len(p.strays) > 0, func() {
		n := p.r.IntN(len(p.strays))
		ev := p.strays[n]
		p.strays = slices.Delete(p.strays, n, n+1)
		if p.r.IntN(4) > 0 {
			p.hear(ev)
		}
	})
	add(!p.wake.IsZero() && !p.clock.Before(p.wake), func() {
		p.note("timer")
		p.wake = time.Time{}
		p.gate.look()
	})
	if len(can) == 0 {
		return false
	}
	can[p.r.IntN(len(can))]()
	return true
}

func (p *play) hear(ev pubsub.Event) {
	if !p.gate.subscribed {
		return
	}
	p.note("heard ", fmt.Sprintf("%+v", ev))
	p.gate.heard(ev)
}

func (p *play) note(what ...any) { p.notes = append(p.notes, fmt.Sprint(what...)) }

// pass ends a step.
func (p *play) pass() {
	for _, w := range p.waiters {
		if w.stage == over && !w.over {
			w.over = true
			p.note("waiter ", w.name, " is released")
			p.must(w.err == nil, "waiter %d: %v", w.name, w.err)
			p.must(p.opened >= w.came, "waiter %d was released, and its round goes on", w.name)
		}
	}
	p.step++
	if p.count == 0 {
		p.isOpen()
	}
}

// End implements lockstep.Walk. It lets everything arrive. The safety poll, which comes
// then, is needed only if something was lost without a trace.
func (p *play) End() {
	p.r = rand.New(rand.NewPCG(p.seed, 0))
	p.calm = true
	for p.arrive() {
		p.pass()
	}
	for _, w := range p.waiters {
		if !w.over && p.gate.ordered && p.failure == nil {
			p.must(p.count > 0 || p.silent, "waiter %d would need the safety poll", w.name)
			p.must(w.stage == settled || p.silent, "waiter %d is not settled", w.name)
		}
	}
	for range 3 {
		p.clock = p.clock.Add(safetyPoll)
		for p.arrive() {
			p.pass()
		}
	}
	for _, w := range p.waiters {
		if w.over {
			p.seen.See("over")
			continue
		}
		p.must(p.count > 0, "waiter %d waits, and the latch is open", w.name)
		p.must(w.first != 0, "waiter %d has seen nothing", w.name)
		p.must(!w.due, "waiter %d has seen the count rise", w.name)
		p.must(!p.gate.ordered || w.stage == settled, "waiter %d is not settled", w.name)
		if w.first == p.rounds {
			p.seen.See("waits on")
			continue
		}
		// Java has begun another round, and the waiter was not settled.
		p.must(p.java, "waiter %d waits for round %d, and this is round %d", w.name, w.first, p.rounds)
		p.must(w.told == 0, "waiter %d was told", w.name)
		p.seen.See("waits for the next")
	}
	p.must(len(p.gate.waiters) > 0 || !p.gate.subscribed && p.gate.idle(), "the gate is not idle")
}
