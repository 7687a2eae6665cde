package interop

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
)

// takes acquires a lock and describes the result.
func (r *recorder) takes(d view, thread uint64, wait, lease time.Duration) string {
	r.t.Helper()
	return r.outcome(d.take(r.t, thread, wait, lease))
}

func (r *recorder) outcome(e *entry) string {
	r.t.Helper()
	got, _, err := e.outcome(r.t, answers)
	switch {
	case errors.Is(err, lock.ErrNotHeld), errors.Is(err, lock.ErrReentered):
		return "refused: it has it already"
	case errors.Is(err, lock.ErrUpgrade):
		return "refused: it would wait for itself"
	}
	require.NoError(r.t, err)
	if !got {
		return "refused"
	}
	return "acquired"
}

// gives releases a lock and describes the result.
func (r *recorder) gives(d view, thread uint64) string {
	r.t.Helper()
	var held lock.Hold
	if g, ours := d.(*goView); ours {
		held = g.latest(thread) // which knows whether it was lost, even for a named owner
	}
	var err error
	if held != nil {
		err = held.Unlock(context.Background())
	} else {
		err = d.release(r.t, thread)
	}
	switch {
	case errors.Is(err, lock.ErrLost):
		return "lost"
	case errors.Is(err, lock.ErrNotHeld):
		return "not held"
	}
	require.NoError(r.t, err)
	return "released"
}

// takesStep, givesStep and forceStep are the common steps.
func (r *recorder) takesStep(what string, d view, thread uint64, wait, lease time.Duration) {
	r.t.Helper()
	r.step(what, func() string { return r.takes(d, thread, wait, lease) })
}

func (r *recorder) givesStep(what string, d view, thread uint64) {
	r.t.Helper()
	r.step(what, func() string { return r.gives(d, thread) })
}

func (r *recorder) forceStep(what string, d view) {
	r.t.Helper()
	r.step(what, func() string { return fmt.Sprint(d.force(r.t)) })
}

// waitsStep starts to wait for a lock.
func (r *recorder) waitsStep(what string, d view, thread uint64, wait, lease time.Duration, until ...func() bool) *entry {
	r.t.Helper()
	var e *entry
	tried := r.p.watch(r.t, traceName)
	r.waiting = thread
	r.step(what, func() string {
		e = d.take(r.t, thread, wait, lease)
		return "waits"
	}, append(until, r.parked)...)
	r.waiting = 0
	if _, java := r.side.(javaSide); java {
		tried.asleep(r.t, r.side, 1)
	}
	return e
}

// passesStep releases a lock that has a waiter.
func (r *recorder) passesStep(what string, d view, thread uint64, to *entry, until ...func() bool) {
	r.t.Helper()
	r.step(what, func() string { return r.gives(d, thread) + "; next: " + r.outcome(to) }, until...)
}

// exclusive records a lock with threads, which may re-enter.
func exclusive(kind string) scenario {
	return scenario{title: "threads", run: func(r *recorder) {
		d := r.lock(kind)
		r.takesStep("1 locks", d, 1, forever, 0)
		r.takesStep("2 tries", d, 2, 0, 0)
		r.givesStep("2 unlocks", d, 2)
		if strings.HasPrefix(kind, "non-reentrant") {
			r.takesStep("1 locks again", d, 1, forever, 0)
		} else {
			r.takesStep("1 locks again, for 10 min", d, 1, forever, tenMinutes)
			r.takesStep("1 locks again, for 1 min", d, 1, forever, minute)
			r.givesStep("1 unlocks one of three", d, 1)
			r.givesStep("1 unlocks one of two", d, 1)
		}
		r.givesStep("1 unlocks", d, 1)
		r.givesStep("1 unlocks what nobody has", d, 1)
		r.takesStep("1 locks for 1 min", d, 1, forever, minute)
		fair := strings.HasSuffix(kind, "fair")
		queued := func(n int64) []func() bool {
			if fair {
				return []func() bool{r.queued(n)}
			}
			return nil
		}
		two := r.waitsStep("2 waits", d, 2, forever, 0, queued(1)...)
		r.passesStep("1 unlocks, 2 gets it", d, 1, two)
		r.forceStep("unlock by force", d)
		r.forceStep("unlock by force, again", d)
		r.step("3 locks for a moment, which passes", func() string { return r.takes(d, 3, forever, moment) }, r.gone(traceName))
		r.givesStep("3 unlocks what is over", d, 3)
		if kind != "fair" {
			return // the queue of the other kind is the same
		}
		_, ours := r.side.(goSide)
		r.takesStep("1 locks for 10 min", d, 1, forever, tenMinutes)
		two = r.waitsStep("2 waits in line", d, 2, forever, minute, r.queued(1))
		three := r.waitsStep("3 waits in line", d, 3, forever, minute, r.queued(2))
		r.step("4 waits for a moment in vain", func() string { return r.takes(d, 4, 2*moment, 0) }, r.queued(2))
		r.takesStep("5 tries behind them", d, 5, 0, 0)
		r.loose = ours
		r.step("unlock by force, 2 gets it", func() string { return fmt.Sprint(d.force(r.t)) + "; next: " + r.outcome(two) }, r.queued(1))
		r.passesStep("2 unlocks, 3 gets it", d, 2, three, r.queued(0))
		r.givesStep("3 unlocks", d, 3)
		r.loose = false
		r.takesStep("1 locks for 9.9 s", d, 1, forever, 9900*time.Millisecond)
		two = r.waitsStep("2 waits for 6 s", d, 2, 6*time.Second, 0, r.queued(1))
		three = r.waitsStep("3 waits behind it", d, 3, forever, 0, r.queued(2))
		r.loose = ours
		r.step("2 gives up", func() string { return r.outcome(two) }, r.queued(1))
		r.passesStep("1 unlocks, 3 gets it", d, 1, three, r.queued(0))
		r.givesStep("3 unlocks at last", d, 3)
	}}
}

// anonymous records a lock whose owners hold it once.
func anonymous(kind string) scenario {
	return scenario{title: "one owner each", fresh: true, run: func(r *recorder) {
		d, other := r.lock(kind), r.lock(rival(kind))
		r.takesStep("1 locks", d, 1, forever, 0)
		r.takesStep("2 tries", other, 2, 0, 0)
		r.givesStep("1 unlocks", d, 1)
		r.takesStep("1 locks for 1 min", d, 1, forever, minute)
		var waits []func() bool
		if strings.HasSuffix(kind, "fair") {
			waits = append(waits, r.queued(1))
		}
		if _, ours := r.side.(goSide); ours && kind == "read" {
			waits = append(waits, r.waitingWriter)
		}
		two := r.waitsStep("2 waits", other, 2, forever, minute, waits...)
		r.passesStep("1 unlocks, 2 gets it", d, 1, two)
		r.givesStep("2 unlocks", other, 2)
		r.step("3 locks for a moment, which passes", func() string { return r.takes(d, 3, forever, moment) }, r.gone(traceName))
		r.givesStep("3 unlocks what is over", d, 3)
	}}
}

// readers records readers and a waiting writer.
var readers = scenario{title: "threads", run: func(r *recorder) {
	read, write := r.lock("read"), r.lock("write")
	r.givesStep("1 gives back what nobody has", read, 1)
	r.takesStep("1 reads", read, 1, forever, 0)
	r.takesStep("2 reads for 10 min", read, 2, forever, tenMinutes)
	r.takesStep("1 reads again, for 1 min", read, 1, forever, minute)
	r.takesStep("1 tries to write", write, 1, 0, 0)
	r.takesStep("3 tries to write", write, 3, 0, 0)
	r.givesStep("3 gives back what it has not", read, 3)
	r.givesStep("2 gives back", read, 2)
	r.givesStep("1 gives back one of two", read, 1)
	var waits []func() bool
	if _, ours := r.side.(goSide); ours {
		waits = append(waits, r.waitingWriter)
	}
	three := r.waitsStep("3 waits to write", write, 3, forever, 0, waits...)
	r.passesStep("1 gives back, 3 writes", read, 1, three)
	r.givesStep("3 gives back", write, 3)
	r.takesStep("1 reads for 1 min", read, 1, forever, minute)
	r.forceStep("unlock of the writer by force", write)
	r.forceStep("unlock of readers by force", read)
	r.step("4 reads for a moment, which passes", func() string { return r.takes(read, 4, forever, moment) }, r.gone(traceName))
	r.givesStep("4 gives back what is over", read, 4)
}}

// writers records a writer that also reads.
var writers = scenario{title: "a writer that reads", run: func(r *recorder) {
	read, write := r.lock("read"), r.lock("write")
	r.takesStep("1 writes for 10 min", write, 1, forever, tenMinutes)
	r.takesStep("1 reads for 1 min", read, 1, forever, minute)
	r.takesStep("1 reads once more, for 1 min", read, 1, forever, minute)
	r.takesStep("2 tries to read", read, 2, 0, 0)
	r.givesStep("1 gives one of two read holds back", read, 1)
	r.givesStep("1 gives the write hold back and goes on reading", write, 1)
	r.givesStep("1 gives the last back", read, 1)
}}
