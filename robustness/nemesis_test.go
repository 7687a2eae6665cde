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
	spawn   func(worker int) *harness.Process

	workers []*harness.Process
	stopped []bool // by worker
	undo    []undo
	log     []string // the faults, with times
	begin   time.Time
}

type undo struct {
	at time.Time
	do func()
}

// faults are the faults from which the nemesis chooses.
var faults = []struct {
	name string
	do   func(*nemesis)
}{
	{"stop a worker", (*nemesis).stopWorker},
	{"kill a worker", (*nemesis).killWorker},
	{"CLIENT KILL TYPE normal", func(n *nemesis) { n.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") }},
	{"CLIENT KILL TYPE pubsub", func(n *nemesis) { n.command("CLIENT", "KILL", "TYPE", "pubsub") }},
	{"CLIENT PAUSE WRITE", func(n *nemesis) { n.pause("WRITE") }},
	{"CLIENT PAUSE ALL", func(n *nemesis) { n.pause("ALL") }},
	{"SCRIPT FLUSH", func(n *nemesis) { n.command("SCRIPT", "FLUSH") }},
	{"cut a worker off", func(n *nemesis) { i := n.rng.IntN(len(n.links)); n.cut(n.links[i : i+1]) }},
	{"cut all off", func(n *nemesis) { n.cut(n.links) }},
	{"stall a worker", func(n *nemesis) { i := n.rng.IntN(len(n.links)); n.stall(n.links[i : i+1]) }},
	{"stall all", func(n *nemesis) { n.stall(n.links) }},
	{"DEL a lock", (*nemesis).deleteLock},
	{"FLUSHALL", func(n *nemesis) { n.wipe("", func() { n.command("FLUSHALL") }) }},
	{"restart the server empty", (*nemesis).restart},
}

// draw returns the decisions of a seed: first the number of faults in a round, at most most,
// then the generator for the rest.
func draw(seed uint64, most int) (faults int, rng *rand.Rand) {
	rng = rand.New(rand.NewPCG(seed, 0))
	return rng.IntN(most + 1), rng
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
		n.note(f.name)
		f.do(n)
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

func (n *nemesis) after(d time.Duration, do func()) {
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

func (n *nemesis) killWorker() {
	i := n.rng.IntN(len(n.workers))
	n.workers[i].Kill()
	n.workers[i] = n.spawn(i)
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

func (n *nemesis) deleteLock() {
	name := lockName(n.seed, kinds[n.rng.IntN(len(kinds))].name)
	n.wipe(name, func() { n.command("DEL", name) })
}

func (n *nemesis) restart() {
	n.wipe("", func() {
		n.server.Kill()
		require.NoError(n.t, n.server.Restart())
	})
}

// wipe deletes a lock, or everything, and records that in the history.
func (n *nemesis) wipe(lock string, do func()) {
	at := clock()
	do()
	n.journal.write(event{What: wiped, At: at, Until: clock(), Lock: lock})
}
