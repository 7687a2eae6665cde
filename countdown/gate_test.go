package countdown

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/pubsub"
)

// play is a world around one gate in which everything on its way arrives when it
// likes: looks, subscriptions, answers and messages. Whatever the order, nobody may be
// released whose round goes on, and whoever can know that it is over has to be.
type play struct {
	t     *testing.T
	r     *rand.Rand
	gate  gate
	clock time.Time
	steps []string

	// The server.
	count  int64
	round  string
	rounds int // how many have begun
	opened int // the step at which the latch was open last
	step   int

	// What is on its way.
	looking    lookState
	seen       sight
	failure    error
	subscribed bool // at the server
	asking     bool // a subscription is to reach the server
	syncing    bool // so is a sync
	line       []pubsub.Event
	strays     []pubsub.Event // messages that other nodes pass on, in no order
	wake       time.Time

	calm   bool // nothing is lost any more
	silent bool // it has opened, and nobody was told

	waiters map[*waiter]*fate
}

type lookState int

const (
	noLook lookState = iota
	sent
	answered
)

// fate is what a waiter ought to see.
type fate struct {
	name  int
	came  int   // the step
	first int   // the round of its first look that had an answer, 0 if there is none
	told  int   // the round of which a message is in line for it, settled as it was
	count int64 // what the last look that had an answer has seen
	due   bool  // the count was higher than that then
	over  bool
}

func newPlay(t *testing.T, r *rand.Rand, ordered bool) *play {
	p := &play{t: t, r: r, clock: time.Unix(1_000_000, 0), waiters: map[*waiter]*fate{}}
	p.gate = gate{fx: p, ordered: ordered, patience: 30 * time.Second, waiters: map[*waiter]struct{}{}}
	p.pass()
	return p
}

// What the gate does.

func (p *play) look() {
	require.Equal(p.t, noLook, p.looking, "two looks at a time\n%v", p)
	p.looking = sent
}

func (p *play) subscribe() bool {
	require.False(p.t, p.asking, p)
	if p.subscribed && p.r.IntN(2) == 0 { // kept warm; what is in line is heard
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
	require.False(p.t, p.syncing, p)
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
		for w, f := range p.waiters {
			if w.stage == settled {
				f.told = p.rounds
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

func (p *play) zero(java bool) {
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
	for _, f := range p.waiters {
		f.told = 0
	}
}

// act takes a random step.
func (p *play) act(java bool) {
	byJava := java && p.r.IntN(2) == 0
	switch p.r.IntN(17) {
	case 0, 1:
		w := &waiter{released: make(chan struct{})}
		p.waiters[w] = &fate{name: len(p.waiters), came: p.step}
		p.note("waiter ", len(p.waiters)-1, " comes")
		p.gate.join(w)
	case 2:
		for w, f := range p.waiters {
			if !f.over && w.stage != over && p.r.IntN(4) == 0 {
				p.note("waiter ", f.name, " leaves")
				f.over = true
				p.gate.leave(w)
				break
			}
		}
	case 3:
		p.note("set ", byJava)
		p.set(byJava)
	case 4, 5:
		p.note("count down ", byJava)
		p.zero(byJava)
	case 6:
		p.note("reset at once ", byJava)
		for p.count > 0 {
			p.zero(byJava)
		}
		p.set(byJava)
	case 7:
		p.note("delete")
		if p.count > 0 {
			p.open()
			p.round = ""
			p.publish(payloadSet)
		}
	case 8:
		p.note("expire")
		p.silent = p.silent || p.count > 0
		p.open()
	case 9:
		// Only looks that are an hour late could miss it.
		if p.looked() {
			p.note("the identity of the round expires")
			p.round = ""
		}
	case 10:
		if p.r.IntN(4) == 0 {
			p.note("connection lost")
			p.lose()
		}
	case 11:
		p.note("time passes")
		p.clock = p.clock.Add(time.Duration(p.r.IntN(3000)) * time.Millisecond)
	default:
		p.arrive()
	}
}

// looked reports whether everybody has seen the latest round.
func (p *play) looked() bool {
	for w, f := range p.waiters {
		if w.stage != over && (f.first == 0 || p.gate.last.round != p.round) {
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
		p.looking, p.seen, p.failure = answered, sight{p.count, -1, p.round}, nil
		if p.count == 0 {
			p.isOpen()
		}
		if !p.calm && p.r.IntN(10) == 0 {
			p.failure = errors.New("lost")
			return
		}
		for w, f := range p.waiters {
			switch w.stage {
			case fresh, over:
				continue
			case asked:
				f.first = p.rounds
			default:
				f.due = f.due || p.count > f.count
			}
			f.count = p.count
		}
	})
	add(p.looking == answered, func() {
		p.note("answer ", p.seen, " ", p.failure)
		p.looking = noLook
		if p.failure == nil {
			p.gate.saw(p.seen)
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

func (p *play) note(what ...any) { p.steps = append(p.steps, fmt.Sprint(what...)) }

func (p *play) String() string { return strings.Join(p.steps, "\n") }

// pass ends a step.
func (p *play) pass() {
	for w, f := range p.waiters {
		if w.stage == over && !f.over {
			f.over = true
			p.note("waiter ", f.name, " is released")
			require.NoError(p.t, w.err, p)
			require.GreaterOrEqual(p.t, p.opened, f.came, "waiter %d was released, and its round goes on\n%v", f.name, p)
		}
	}
	p.step++
	if p.count == 0 {
		p.isOpen()
	}
}

// settleDown lets everything arrive. Unless something was lost without a trace nobody
// needs the safety poll then; afterwards that comes.
func (p *play) settleDown() {
	p.calm = true
	for p.arrive() {
		p.pass()
	}
	if p.gate.ordered && p.failure == nil {
		for w, f := range p.waiters {
			if !f.over {
				require.True(p.t, p.count > 0 || p.silent, "waiter %d would need the safety poll\n%v", f.name, p)
				require.True(p.t, w.stage == settled || p.silent, "waiter %d is not settled\n%v", f.name, p)
			}
		}
	}
	for range 3 {
		p.clock = p.clock.Add(safetyPoll)
		for p.arrive() {
			p.pass()
		}
	}
}

// TestNobodyIsReleasedEarlyNorForgotten plays with one gate. REDLATCH_MODEL_SEED
// repeats a run.
func TestNobodyIsReleasedEarlyNorForgotten(t *testing.T) {
	seed := rand.Uint64()
	if s := os.Getenv("REDLATCH_MODEL_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("REDLATCH_MODEL_SEED=%d", seed)
	const plays = 20_000
	seen := map[string]int{}
	for n := range uint64(plays) {
		java, ordered := n%2 == 0, n%5 != 0
		p := newPlay(t, rand.New(rand.NewPCG(seed, n)), ordered)
		for range 20 + p.r.IntN(100) {
			p.act(java)
			p.pass()
		}
		p.settleDown()
		for w, f := range p.waiters {
			if f.over {
				seen["over"]++
				continue
			}
			require.Positive(t, p.count, "waiter %d waits, and the latch is open\n%v", f.name, p)
			require.NotZero(t, f.first, p)
			require.False(t, f.due, "waiter %d has seen the count rise\n%v", f.name, p)
			if ordered {
				require.Equal(t, settled, w.stage, "waiter %d\n%v", f.name, p)
			}
			if f.first == p.rounds {
				seen["waits on"]++
				continue
			}
			// Java has begun another round, and it was not settled.
			require.True(t, java, "waiter %d waits for round %d, and this is round %d\n%v", f.name, f.first, p.rounds, p)
			require.Zero(t, f.told, "waiter %d was told\n%v", f.name, p)
			seen["waits for the next"]++
		}
		if len(p.gate.waiters) == 0 {
			require.False(t, p.gate.subscribed)
			require.True(t, p.gate.idle())
		}
	}
	t.Log(seen)
	for _, what := range slices.Sorted(maps.Keys(seen)) {
		require.Greater(t, seen[what], plays/100, what)
	}
}
