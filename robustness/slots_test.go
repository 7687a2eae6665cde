package robustness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
)

const (
	schedulers = 8 // processes with a schedule of the same work
	// slotEvery is the time between two slots.
	slotEvery = 100 * time.Millisecond
	// skew is the most by which two clocks differ.
	skew = 2 * time.Second
	// slotKind is the kind of a run in the journal. Its lock is the slot.
	slotKind = "slot"
)

// errWork is the error of work that failed.
var errWork = errors.New("the work failed")

func slotsOf(c *redlatch.Client, seed uint64) *once.Once {
	return c.Once(lockName(seed, "once"), once.Remember(time.Hour))
}

// schedule is the worker that runs the work of each slot when it is due by the clock of the worker.
func schedule(w *worker, seed uint64, number uint64, until int64) {
	rng := rand.New(rand.NewPCG(seed, number))
	ahead := time.Duration(rng.Int64N(int64(skew))) - skew/2
	jobs := slotsOf(w.client, seed)
	var runs sync.WaitGroup
	now := func() time.Time { return time.Now().Add(ahead) }
	for due := now().Truncate(slotEvery).Add(slotEvery); clock() < until; due = due.Add(slotEvery) {
		time.Sleep(due.Sub(now()))
		p := player{worker: w, rng: rand.New(rand.NewPCG(rng.Uint64(), 0)), kind: slotKind, long: 15}
		runs.Go(func() { p.run(jobs, once.At(due)) })
	}
	runs.Wait()
}

// run calls Run for a slot.
func (p *player) run(jobs *once.Once, slot string) {
	wait := p.between(0, 1500*time.Millisecond)
	opts := []lock.Option{lock.Wait(wait)}
	switch n := p.rng.IntN(100); {
	case n < 20:
		opts = append(opts, lock.Lease(p.between(5*time.Millisecond, 60*time.Millisecond)))
	case n < 30:
		opts = append(opts, lock.AtLeast(p.between(5*time.Millisecond, 50*time.Millisecond)))
	}
	claim := fmt.Sprintf("%s#%d", p.id, p.claims.Add(1))
	p.journal.write(event{What: locking, At: clock(), Claim: claim, Lock: slot, Kind: p.kind, Wait: wait})
	ran, err := false, error(nil)
	func() {
		defer func() {
			if e := recover(); e != nil {
				ran, err = true, errWork
			}
		}()
		ran, err = jobs.Run(context.Background(), slot, func(ctx context.Context) error { return p.work(ctx, claim) }, opts...)
	}()
	e := event{What: unlocked, Claim: claim, Outcome: fine}
	if err != nil {
		e.Err = err.Error()
	}
	var both *lock.DoError
	var lost *lock.LostError
	errors.As(err, &lost)
	switch {
	case !ran && err == nil:
		e.What, e.Outcome = notLocked, skipped
	case !ran:
		e.What, e.Outcome = notLocked, outcomeOfLock(err)
	case err != nil:
		e.Outcome = outcomeOfUnlock(err, lost)
		e.Remembered = errors.As(err, &both) && both.Func == nil
	default:
		e.Remembered = true
	}
	if lost != nil {
		e.Lost = clock() - int64(time.Since(lost.When))
	}
	e.At = clock()
	p.journal.write(e)
}

// work is the work of a slot. It fails, panics, or goes on without its lock at times.
func (p *player) work(ctx context.Context, claim string) error {
	p.journal.write(event{What: locked, At: clock(), Claim: claim})
	h := taken{Hold: engine.From(ctx).(lock.Hold), claim: claim}
	p.hold(h)
	if !p.look(h) {
		p.journal.write(event{What: over, At: clock(), Claim: claim})
	}
	e := event{What: unlocking, At: clock(), Claim: claim, Outcome: fine}
	n := p.rng.IntN(100)
	if n < 30 {
		e.Outcome = failed
	}
	p.journal.write(e)
	switch {
	case n < 5:
		panic(errWork)
	case n < 30:
		return errWork
	default:
		return nil
	}
}

// runSlots runs a round of schedules and returns its history.
func (r *round) runSlots(t *testing.T) *history {
	h := r.history(t, r.disturb(t, "schedule", func() error { return nil }))
	c, err := connect(t.Context(), r.server.Addr)
	require.NoError(t, err)
	defer c.Close()
	jobs := slotsOf(c, r.seed)
	for _, slot := range h.locks() {
		ctx, cancel := context.WithTimeout(t.Context(), 10*watchdogTimeout)
		if _, err := jobs.Run(ctx, slot, func(context.Context) error { return nil }); err != nil {
			h.atEnd = append(h.atEnd, fmt.Sprintf("%s does not run at the end: %v", slot, err))
		}
		cancel()
		if done, err := jobs.Done(t.Context(), slot); err != nil || !done {
			h.atEnd = append(h.atEnd, fmt.Sprintf("%s is not done at the end: %v", slot, err))
		}
		_, err := jobs.Forget(t.Context(), slot)
		require.NoError(t, err)
	}
	return h
}

// slotWrongs returns the runs of a slot after it was done, and the reports that it was done before.
func (h *history) slotWrongs(slot string) (wrongs []string) {
	var runs []*claim
	for _, c := range h.claims {
		if c.kind == slotKind && c.locks[0] == slot {
			runs = append(runs, c)
		}
	}
	for _, c := range runs {
		if c.failure != "" && c.unlocking > 0 {
			wrongs = append(wrongs, fmt.Sprintf("%s: Run returned false (%s) and has run the work", c.id, c.failure))
		}
		if c.failure == skipped && !slices.ContainsFunc(runs, func(s *claim) bool {
			return s.worked && s.unlocking < c.returned
		}) {
			wrongs = append(wrongs, fmt.Sprintf("%s: %s was done before its work had succeeded", c.id, slot))
		}
		if c.acquired() && c.certain > 0 {
			if s := h.doneBefore(c, runs); s != nil {
				wrongs = append(wrongs, fmt.Sprintf("%s: %s ran after %s had succeeded", c.id, slot, s.id))
			}
		}
	}
	return wrongs
}

// doneBefore returns a run that had succeeded before c asked, and of which the server still knows. A
// run that has lost its lock may succeed when another has asked already.
func (h *history) doneBefore(c *claim, runs []*claim) *claim {
	for _, s := range runs {
		asked := c.returned
		if s.release != fine {
			asked = c.called
		}
		forgotten := slices.ContainsFunc(h.wipesOf(c.locks...), func(w event) bool {
			return s.unlocking < w.Until && w.At < c.returned
		})
		if s.remembered && s.unlocked < asked && !forgotten {
			return s
		}
	}
	return nil
}

// addRuns counts the events of a round of schedules.
func (s totals) addRuns(h *history) {
	s["fault"] += h.faults
	s["wipe"] += len(h.wipes)
	s["slot"] += len(h.locks())
	ran := map[string]bool{}
	for _, c := range h.claims {
		if c.acquired() {
			s["run"]++
			if ran[c.locks[0]] {
				s["slot that ran again"]++
			}
			ran[c.locks[0]] = true
		}
		if c.returned == 0 || c.acquired() && c.unlocked == 0 {
			s["call cut short by a kill"]++
		}
		if c.remembered {
			s["success"]++
		} else if c.release == failed {
			s["work that failed"]++
		}
		if c.release == expired || c.release == gone {
			s["run that lost its lock"]++
		}
		if o := cmp.Or(c.failure, c.release); o != "" {
			s[string(o)]++
		}
	}
}

// runsWanted returns the events that a run of that length contains.
func runsWanted(runFor time.Duration) map[string]int {
	wanted := map[string]int{"run": 1}
	if runFor >= smoke {
		maps.Copy(wanted, map[string]int{"fault": 1, string(skipped): 1, "slot that ran again": 1, "success": 1, "work that failed": 1})
	}
	if runFor >= longRun {
		maps.Copy(wanted, map[string]int{"run that lost its lock": 1, "call cut short by a kill": 1, "wipe": 1})
	}
	return wanted
}
