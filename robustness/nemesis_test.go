package robustness

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// nemesis injects faults into a round. The test's goroutine performs all actions; lasting
// faults are kept in a list until they are undone.
type nemesis struct {
	t       testing.TB
	rng     *rand.Rand
	server  *testserver.Server
	links   []*link // of each worker
	seed    uint64
	journal *journal
	only    string // the only fault, or ""
	prefer  string // a third of the faults, or ""
	spawn   func(worker int) *harness.Process
	restore func() error // after the server has lost its data

	workers []*harness.Process
	stopped []bool // by worker
	undo    []undo
	lasts   time.Duration // the latest fault
	log     []string      // the faults, with times
	begin   time.Time
}

type undo struct {
	at time.Time
	do func()
}

type fault struct {
	name     string
	do       func(*nemesis)
	harmless bool
}

// faults are the faults from which the nemesis chooses. Those that are harmless do not change the
// order in which others wait.
var faults = []fault{
	{"stop a worker", (*nemesis).stopWorker, false},
	{"kill workers", (*nemesis).killWorkers, true},
	{"kill workers", (*nemesis).killWorkers, true}, // most faults do not leave anything to others
	{"CLIENT KILL TYPE normal", func(n *nemesis) { n.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") }, false},
	{"CLIENT KILL TYPE pubsub", func(n *nemesis) { n.command("CLIENT", "KILL", "TYPE", "pubsub") }, true},
	{"CLIENT PAUSE WRITE", func(n *nemesis) { n.pause("WRITE") }, false},
	{"CLIENT PAUSE ALL", func(n *nemesis) { n.pause("ALL") }, false},
	{"SCRIPT FLUSH", func(n *nemesis) { n.command("SCRIPT", "FLUSH") }, true},
	{"cut a worker off", func(n *nemesis) { n.cut(n.one()) }, false},
	{"cut all off", func(n *nemesis) { n.cut(n.links) }, false},
	{"stall a worker", func(n *nemesis) { n.stall(n.one()) }, false},
	{"stall all", func(n *nemesis) { n.stall(n.links) }, false},
	{silenceWorker, func(n *nemesis) { n.silence(n.one()) }, false},
	{"slow network", (*nemesis).slow, false},
	{"lose replies to a worker", func(n *nemesis) { n.loseReplies(n.one()) }, false},
	{"lose replies to all", func(n *nemesis) { n.loseReplies(n.links) }, false},
	{"stray messages", (*nemesis).publish, true},
	{"DEL a lock", (*nemesis).deleteLock, false},
	{"DEL a lock and lose replies", func(n *nemesis) { n.deleteLock(); n.loseReplies(n.links) }, false},
	{"FLUSHALL", func(n *nemesis) { n.wipeAll(func() { n.command("FLUSHALL") }) }, false},
	{"restart the server empty", (*nemesis).restart, false},
}

// draw returns the decisions of a seed: first the number of faults in a round, at most most,
// then the generator for the rest.
// Half of the rounds of few kinds have no faults, and show promises that a fault would excuse.
func draw(seed uint64, most int) (faults int, rng *rand.Rand) {
	rng = rand.New(rand.NewPCG(seed, 0))
	if most > 0 {
		faults = 1 + rng.IntN(most)
	}
	if calm := rng.IntN(2) == 0; calm && focusOf(seed) != nil {
		faults = 0
	}
	return faults, rng
}

// distances are the round trips of clients on the same machine, in the same zone, region and continent.
var distances = []time.Duration{500 * time.Microsecond, 2 * time.Millisecond, 30 * time.Millisecond, 100 * time.Millisecond}

// distance returns the round trip of a worker in the round of a seed. Half of the workers are near.
func distance(seed uint64, worker int) time.Duration {
	rng := rand.New(rand.NewPCG(seed, uint64(worker)+1))
	if rng.IntN(2) == 0 {
		return 0
	}
	return distances[rng.IntN(len(distances))]
}

// run injects that many faults as time permits. All are undone when it returns, some time
// after until.
func (n *nemesis) run(until time.Time, count int) {
	n.begin = time.Now()
	n.stopped = make([]bool, len(n.workers))
	for range count {
		next := time.Now().Add(n.between(20*time.Millisecond, time.Second))
		if next.After(until) {
			break
		}
		n.wait(next)
		f := faults[n.rng.IntN(len(faults))]
		if n.prefer != "" && n.rng.IntN(3) == 0 {
			f = faults[slices.IndexFunc(faults, func(f fault) bool { return f.name == n.prefer })]
		}
		for n.only != "" && f.name != n.only {
			f = faults[n.rng.IntN(len(faults))]
		}
		n.note(f.name)
		at := clock()
		n.lasts = 0
		f.do(n)
		if !f.harmless {
			n.journal.write(event{What: disturbed, At: at, Until: clock() + int64(n.lasts)})
		}
	}
	n.wait(until)
	for len(n.undo) > 0 {
		n.wait(n.undo[0].at)
	}
}

// wait sleeps until at and undoes faults that are due.
func (n *nemesis) wait(at time.Time) {
	for len(n.undo) > 0 && !n.undo[0].at.After(at) {
		u := n.undo[0]
		n.undo = n.undo[1:]
		time.Sleep(time.Until(u.at))
		u.do()
	}
	time.Sleep(time.Until(at))
}

func (n *nemesis) note(what string) {
	n.log = append(n.log, fmt.Sprintf("%.2fs %s", time.Since(n.begin).Seconds(), what))
}

func (n *nemesis) between(from, to time.Duration) time.Duration {
	return from + time.Duration(n.rng.Int64N(int64(to-from)))
}

// spell returns the duration of a fault: longer than many fixed leases, or longer than any
// lease.
func (n *nemesis) spell() time.Duration {
	if n.rng.IntN(2) == 0 {
		return n.between(20*time.Millisecond, 200*time.Millisecond)
	}
	return watchdogTimeout + n.between(watchdogTimeout/10, watchdogTimeout/2)
}

// one returns the link of one worker.
func (n *nemesis) one() []*link {
	i := n.rng.IntN(len(n.links))
	return n.links[i : i+1]
}

func (n *nemesis) after(d time.Duration, do func()) {
	n.lasts = d
	n.undo = append(n.undo, undo{time.Now().Add(d), do})
	slices.SortFunc(n.undo, func(a, b undo) int { return cmp.Compare(a.at.UnixNano(), b.at.UnixNano()) })
}

func (n *nemesis) command(words ...string) { harness.Do(n.t, n.server.Addr, words...) }

func (n *nemesis) pause(mode string) {
	d := n.spell()
	n.command("CLIENT", "PAUSE", fmt.Sprint(d.Milliseconds()), mode)
	n.after(d, func() {}) // the server continues by itself
}

func (n *nemesis) stopWorker() {
	i, d := n.rng.IntN(len(n.workers)), n.spell()
	if n.stopped[i] {
		return
	}
	p := n.workers[i]
	n.stopped[i] = true
	p.Signal(syscall.SIGSTOP)
	n.after(d, func() {
		n.stopped[i] = false
		if n.workers[i] == p { // and not killed since
			p.Signal(syscall.SIGCONT)
		}
	})
}

// killWorkers kills one worker, or several at once. A worker has no call under way for much of its time.
func (n *nemesis) killWorkers() {
	victims := n.rng.Perm(len(n.workers))
	for _, i := range victims[:1+n.rng.IntN(len(victims))] {
		n.workers[i].Kill()
		n.workers[i] = n.spawn(i)
	}
}

func (n *nemesis) cut(links []*link) {
	for _, l := range links {
		l.cut()
	}
}

func (n *nemesis) stall(links []*link) {
	d := n.spell()
	if n.rng.IntN(10) == 0 {
		d = 12 * time.Second // longer than Unlock waits for an answer
	}
	for _, l := range links {
		l.stall()
		n.after(d, l.resume)
	}
}

const silenceWorker = "silence a worker"

// silence loses all data for longer than Unlock and Detach wait for an answer. What they have sent does
// not arrive late.
func (n *nemesis) silence(links []*link) {
	d := n.between(5500*time.Millisecond, 7*time.Second)
	for _, l := range links {
		l.silence(true)
		n.after(d, func() { l.silence(false) })
	}
}

// slow delays all data by less than many fixed leases.
func (n *nemesis) slow() {
	d := n.between(time.Millisecond, 15*time.Millisecond)
	for _, l := range n.links {
		l.slow(d)
	}
	n.after(n.spell(), func() {
		for _, l := range n.links {
			l.slow(0)
		}
	})
}

func (n *nemesis) loseReplies(links []*link) {
	for _, l := range links {
		l.loseReplies(1 + n.rng.IntN(4))
	}
}

// publish sends messages that announce a release to all waiters.
func (n *nemesis) publish() {
	for _, channel := range channels(n.seed) {
		n.command("PUBLISH", channel, fmt.Sprint(n.rng.IntN(2)))
	}
}

func (n *nemesis) deleteLock() {
	name := lockName(n.seed, deletable[n.rng.IntN(len(deletable))])
	n.wipe(name, func() { n.command("DEL", name) })
}

func (n *nemesis) restart() {
	n.wipeAll(func() {
		n.server.Kill()
		require.NoError(n.t, n.server.Restart())
	})
}

// wipeAll deletes everything.
func (n *nemesis) wipeAll(do func()) {
	n.wipe("", func() {
		do()
		require.NoError(n.t, n.restore())
	})
}

// wipe deletes a lock, or everything, and records that in the history.
func (n *nemesis) wipe(lock string, do func()) {
	at := clock()
	do()
	n.journal.write(event{What: wiped, At: at, Until: clock(), Lock: lock})
}
