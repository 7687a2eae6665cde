package robustness

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// claim is the record of one acquisition.
type claim struct {
	id     string
	kind   string
	locks  []string
	owner  string // known before the call returns if the owner is named
	named  bool
	token  int64
	wait   time.Duration
	lease  time.Duration // 0: it is renewed
	max    bool          // it has a MaxHold
	rtt    time.Duration
	adopts string // the id of the detached hold that it is to be on

	// Times; 0 if it did not happen.
	called, returned    int64 // of Lock
	queued              int64 // it had a queue position by then
	certain             int64 // the latest known end of certain ownership
	unlocking, unlocked int64
	lost                int64

	failure outcome // of Lock
	release outcome // of Unlock
	err     string
	silent  bool
	over    bool   // Unlock was called after certain ownership
	leaving bool   // Detach was called, at the time of unlocking
	left    string // the id that Detach returned
	brief   string // how the hold was shorter than its lease

	worked     bool // the work of a slot succeeded
	remembered bool // and this is stored
}

// history is everything that happened in a round.
type history struct {
	claims       []*claim // ordered by call
	latchCalls   []*latchCall
	rateCalls    []*rateCall // ordered by call
	oversized    []event
	wipes        []event
	ended        map[string]bool // workers that were not killed
	disturbances []event         // faults that may change the order of waiters
	busy         []event         // times at which the machine was late
	faults       int             // caused by the nemesis
	atEnd        []string        // what was wrong at the end
	lateness     []time.Duration // of contexts that ended with their lease, against timers
}

func newHistory(events []event) *history {
	h := &history{ended: map[string]bool{}}
	claims := map[string]*claim{}
	calls, rateCalls := map[string]*latchCall{}, map[string]*rateCall{}
	for _, e := range events {
		switch e.What {
		case oversized:
			h.oversized = append(h.oversized, e)
			continue
		case ended:
			h.ended[e.Claim] = true
			continue
		case counting:
			calls[e.Claim] = &latchCall{id: e.Claim, latch: e.Lock, step: step(e.Kind), called: e.At}
			h.latchCalls = append(h.latchCalls, calls[e.Claim])
			continue
		case counted:
			c := calls[e.Claim]
			c.returned, c.left, c.outcome, c.err = e.At, e.Left, e.Outcome, e.Err
			continue
		case asking:
			rateCalls[e.Claim] = &rateCall{id: e.Claim, permits: e.Left, wait: e.Wait, called: e.At}
			h.rateCalls = append(h.rateCalls, rateCalls[e.Claim])
			continue
		case answered:
			c := rateCalls[e.Claim]
			c.returned, c.outcome, c.err = e.At, e.Outcome, e.Err
			continue
		}
		c := claims[e.Claim]
		if c == nil {
			c = &claim{id: e.Claim}
			claims[e.Claim] = c
		}
		switch e.What {
		case locking:
			c.kind, c.locks, c.called, c.wait, c.lease = e.Kind, strings.Split(e.Lock, ","), e.At, e.Wait, e.Lease
			c.owner, c.named, c.max, c.adopts, c.rtt = e.Owner, e.Named, e.MaxHold, e.ID, e.RTT
		case queued:
			c.queued = e.At
		case over:
			c.over = true
		case disturbed:
			h.disturbances = append(h.disturbances, e)
		case busy:
			h.busy = append(h.busy, e)
		case locked:
			c.returned, c.token = e.At, e.Token
			if !c.named {
				c.owner = c.id
			}
		case notLocked:
			c.returned, c.failure, c.err = e.At, e.Outcome, e.Err
		case seen:
			c.certain = max(c.certain, e.Until)
		case silent:
			c.silent = true
		case brief:
			c.brief = e.Err
		case late:
			h.lateness = append(h.lateness, time.Duration(e.At-e.Until))
		case leaving:
			c.unlocking, c.leaving = e.At, true
		case left:
			c.left = e.ID
		case unlocking:
			c.unlocking, c.worked = e.At, e.Outcome == fine
		case unlocked:
			c.unlocked, c.release, c.lost, c.err, c.remembered = e.At, e.Outcome, e.Lost, e.Err, e.Remembered
		case wiped:
			h.wipes = append(h.wipes, e)
		}
	}
	for _, c := range claims {
		if c.called > 0 {
			h.claims = append(h.claims, c)
		}
	}
	slices.SortFunc(h.claims, func(a, b *claim) int { return cmp.Compare(a.called, b.called) })
	slices.SortFunc(h.rateCalls, func(a, b *rateCall) int { return cmp.Compare(a.called, b.called) })
	return h
}

// acquired reports whether the claim is known to have acquired the lock.
func (c *claim) acquired() bool { return c.returned > 0 && c.failure == "" }

// worker returns the id of the process.
func (c *claim) worker() string {
	id, _, _ := strings.Cut(c.id, "#")
	return id
}

// locks returns the names of the locks, sorted.
func (h *history) locks() []string {
	names := map[string]bool{}
	for _, c := range h.claims {
		for _, name := range c.locks {
			names[name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// partition returns the operations on one lock.
func (h *history) partition(lock string) []porcupine.Operation {
	var ops []porcupine.Operation
	clients := map[string]int{}
	add := func(client string, o operation, call, ret int64) {
		id, ok := clients[client]
		if !ok {
			id = len(clients)
			clients[client] = id
		}
		ops = append(ops, porcupine.Operation{ClientId: id, Input: o, Call: call, Return: ret})
	}
	for _, w := range h.wipesOf(lock) {
		add("nemesis", operation{step: wipe, counter: w.Lock == ""}, w.At, w.Until)
	}
	since := map[string]int64{} // the first appearance of each owner, on any lock
	for _, c := range h.claims {
		if since[c.owner] == 0 {
			since[c.owner] = c.called
		}
		if !slices.Contains(c.locks, lock) || !c.acquired() {
			continue
		}
		wipes := h.wipesOf(c.locks...)
		if c.named && slices.ContainsFunc(wipes, func(w event) bool { return w.Until > since[c.owner] && w.At < c.returned }) {
			continue
		}
		promise := c.certain > 0 && !slices.ContainsFunc(wipes, func(w event) bool {
			return h.reaches(w, c) && w.At < c.returned && c.returned < w.Until+int64(trust)
		})
		k := kindOf(c.kind)
		if k.forever && slices.ContainsFunc(wipes, func(w event) bool { return w.At < c.returned }) {
			continue // those who acquired permits before the wipe may have released them since
		}
		add(c.worker(), operation{
			step: acquire, claim: c.id, owner: c.owner, token: c.token, promise: promise, shared: k.shared, limit: k.limit,
		}, c.called, c.returned)
		if !promise {
			continue
		}
		ends := c.certain
		if c.unlocking > 0 {
			ends = min(ends, c.unlocking)
		}
		add(c.worker(), operation{step: end, claim: c.id}, ends, ends)
		if c.release == gone {
			explained := c.certain <= c.lost || slices.ContainsFunc(wipes, func(w event) bool {
				return h.reaches(w, c) && w.At < c.lost
			})
			add(c.worker(), operation{step: isGone, claim: c.id, explained: explained}, c.lost, c.lost)
		}
	}
	return ops
}

// reaches reports whether a wipe may have removed what a call acquired, because the call began before the end
// of the wipe, or because its process has passed on what it held at that time.
func (h *history) reaches(w event, c *claim) bool {
	return c.called < w.Until || c.returned < w.Until+int64(trust) && slices.ContainsFunc(h.claims, func(o *claim) bool {
		return o.worker() == c.worker() && o.acquired() && o.called < w.Until && (o.unlocking == 0 || o.unlocking > w.At) &&
			slices.Equal(o.locks, c.locks)
	})
}

// wipesOf returns the wipes of any of the locks.
func (h *history) wipesOf(locks ...string) (wipes []event) {
	for _, w := range h.wipes {
		if w.Lock == "" || slices.Contains(locks, w.Lock) {
			wipes = append(wipes, w)
		}
	}
	return wipes
}

// wipedUnnoticed reports whether Unlock returned nil for a hold of a lock that was deleted after
// Lock and before Unlock. Re-entry has other holds that answer for it, and a deleted semaphore
// gets its permits all the same.
func (h *history) wipedUnnoticed(c *claim) bool {
	return c.release == fine && !c.named && !kindOf(c.kind).forever &&
		slices.ContainsFunc(h.wipesOf(c.locks...), func(w event) bool { return c.returned < w.At && w.Until < c.unlocking })
}

const (
	// trust is the time after a wipe in which a process may pass on a claim that the server
	// has lost, with slack.
	trust = 200 * time.Millisecond
	// checkTimeout is far longer than it takes to check the history of one lock in a round.
	checkTimeout = 20 * time.Second
	// lockSlack is the time that Lock may need beyond its Wait: a lost reply (3 s), passing on
	// a late grant (3 s), its release (8 s), and the time for which its process is stopped.
	lockSlack = 20 * time.Second
)

// check returns the violations of a history and writes visualizations to dir. It spends at
// most timeout on each lock.
func (h *history) check(dir string, timeout time.Duration) (wrongs []string) {
	wrongs = append(slices.Clone(h.atEnd), h.rateWrongs()...)
	for _, c := range h.claims {
		switch {
		case c.returned > 0 && time.Duration(c.returned-c.called) > c.wait+lockSlack:
			wrongs = append(wrongs, fmt.Sprintf("%s: Lock with a Wait of %v took %v", c.id, c.wait, time.Duration(c.returned-c.called)))
		case c.failure == wrong || c.release == wrong || c.release == maxHold && !c.max:
			wrongs = append(wrongs, fmt.Sprintf("%s: unexpected error: %s", c.id, c.err))
		case c.brief != "" && len(h.wipesOf(c.locks...)) == 0:
			wrongs = append(wrongs, c.id+": "+c.brief)
		case h.reentryRefused(c):
			wrongs = append(wrongs, fmt.Sprintf("%s: refused, though its owner held %s: %s", c.id, c.locks, c.err))
		case h.lostWhileLeft(c):
			wrongs = append(wrongs, c.id+": a detached hold was not found")
		case c.silent:
			wrongs = append(wrongs, c.id+": the lease expired and the hold's context did not end")
		case c.over && c.release == fine:
			wrongs = append(wrongs, c.id+": the lease expired and Unlock returned nil")
		case h.wipedUnnoticed(c):
			wrongs = append(wrongs, c.id+": the lock was deleted and Unlock returned nil")
		}
	}
	for _, c := range h.latchCalls {
		if c.outcome == wrong {
			wrongs = append(wrongs, fmt.Sprintf("%s: unexpected error: %s", c.id, c.err))
		}
	}
	for _, e := range h.oversized {
		if e.Outcome == wrong || e.Outcome == refused && !h.disturbed(e.At, e.Until) {
			wrongs = append(wrongs, fmt.Sprintf("a request for %d of %d permits: %s", permits+1, permits, e.Err))
		}
	}
	for _, lock := range h.locks() {
		wrongs = append(wrongs, h.checkModel(model, lock, h.partition(lock), dir, timeout)...)
		if isFair(lock) {
			overtaken, _ := h.overtaken(lock)
			wrongs = append(wrongs, overtaken...)
		}
		if hasQueue(lock) {
			wrongs = append(wrongs, h.idle(lock)...)
		}
		wrongs = append(wrongs, h.slotWrongs(lock)...)
	}
	if median := h.medianLateness(); median > mostLateness {
		wrongs = append(wrongs, fmt.Sprintf("half of %d contexts ended %v late or more", len(h.lateness), median))
	}
	for _, latch := range h.latches() {
		wrongs = append(wrongs, h.checkModel(latchModel, latch, h.latchOperations(latch), dir, timeout)...)
	}
	return wrongs
}

// isFair reports whether the waiters of a lock acquire it in order.
func isFair(lock string) bool { return isOneOf(lock, "fair", "queue", "election", "turns") }

// hasQueue reports whether holds on a lock are on no other lock, and exclude each other.
func hasQueue(lock string) bool {
	return isOneOf(lock, "plain", "fenced", "queue", "election", "turns")
}

// isOneOf reports whether a lock has one of these kinds.
func isOneOf(lock string, kinds ...string) bool {
	kind, _, _ := strings.Cut(lock, "-")
	return slices.Contains(kinds, kind)
}

// ends returns when the promise of an acquisition ends.
func (c *claim) ends() int64 {
	if c.unlocking > 0 {
		return min(c.certain, c.unlocking)
	}
	return c.certain
}

// reentryRefused reports whether a call found that others have the locks, although its owner was certain
// to hold each of them during the whole call.
func (h *history) reentryRefused(c *claim) bool {
	took := c.returned - c.called
	if c.failure != refused || !c.named || c.wait > 0 && took >= int64(c.wait) || c.lease > 0 && took > int64(c.lease/2) ||
		strings.Contains(c.err, context.Canceled.Error()) || h.disturbed(c.called, c.returned) {
		return false
	}
	for _, lock := range c.locks {
		if !slices.ContainsFunc(h.claims, func(o *claim) bool {
			return o.owner == c.owner && o.acquired() && o.returned < c.called && o.ends() > c.returned && slices.Contains(o.locks, lock)
		}) {
			return false
		}
	}
	return true
}

// lostWhileLeft reports whether Adopt has not found a hold that Detach has left.
func (h *history) lostWhileLeft(c *claim) bool {
	if c.failure != nowhere || slices.ContainsFunc(h.claims, func(other *claim) bool { // that may have adopted it before
		return other.adopts == c.adopts && other != c && other.failure != nowhere
	}) {
		return false
	}
	return slices.ContainsFunc(h.claims, func(o *claim) bool {
		return o.left == c.adopts && o.release == fine && !slices.ContainsFunc(h.wipesOf(c.locks...), func(w event) bool {
			return o.called < w.Until && w.At < c.returned
		})
	})
}

// mayHaveLeft reports whether a process may have detached a hold whose id is unknown.
func (h *history) mayHaveLeft() bool {
	return slices.ContainsFunc(h.claims, func(c *claim) bool { return c.leaving && c.unlocked == 0 })
}

// notAdopted returns the ids of detached holds that nobody has adopted, nor missed.
func (h *history) notAdopted() (ids []string) {
	for _, c := range h.claims {
		if c.left != "" && !slices.ContainsFunc(h.claims, func(a *claim) bool {
			return a.adopts == c.left && (a.acquired() || a.failure == nowhere)
		}) {
			ids = append(ids, c.left)
		}
	}
	return ids
}

const (
	// mostIdle is how long a lock that waiters of this machine want may be free. Messages wake them; the
	// polls that follow lost messages come later.
	mostIdle = 500 * time.Millisecond
	// mostLateness bounds the median lateness of contexts, which is far less than the lease of a lock ends
	// later on the server, and enoughLate is the number of them that have a median.
	mostLateness = time.Millisecond
	enoughLate   = 15
)

// mayHaveHeld reports whether one of these claims may have had the lock between two times, although its
// caller has left: the request was answered after that, and is undone.
func mayHaveHeld(claims []*claim, from, to int64) bool {
	return slices.ContainsFunc(claims, func(c *claim) bool {
		return (c.failure == unknown || c.failure == failed) && c.called < to && from < c.returned+int64(mostIdle)
	})
}

// medianLateness returns 0 if there are too few contexts.
func (h *history) medianLateness() time.Duration {
	if len(h.lateness) < enoughLate {
		return 0
	}
	return slices.Sorted(slices.Values(h.lateness))[len(h.lateness)/2]
}

// idle returns the waiters that have waited for long while nobody had the lock. The check passes over
// rounds with faults, which delay or lose messages, or leave the lock to a process that has died, and
// over times at which the machine was busy.
func (h *history) idle(lock string) (wrongs []string) {
	if h.faults > 0 || len(h.wipes) > 0 {
		return nil
	}
	var holders, all []*claim // in the order in which they have acquired the lock
	for _, c := range h.claims {
		if c.locks[0] != lock || strings.HasPrefix(c.id, lastWorker) {
			continue
		}
		all = append(all, c)
		if c.acquired() {
			holders = append(holders, c)
		}
	}
	slices.SortFunc(holders, func(a, b *claim) int { return cmp.Compare(a.returned, b.returned) })
	free := int64(0) // since when
	for _, next := range holders {
		if free > 0 {
			for _, w := range all {
				from, to := max(w.called, free), min(w.returned, next.returned)
				if idle := time.Duration(to - from); idle > mostIdle && !h.disturbed(from, to) && !mayHaveHeld(all, from, to) {
					wrongs = append(wrongs, fmt.Sprintf("%s: waited while nobody had %s for %v", w.id, lock, idle))
				}
			}
		}
		until := next.unlocked
		if next.release != fine {
			until = max(until, next.unlocking, next.certain)
		}
		free = max(free, until)
	}
	return wrongs
}

// latches returns the names of the latches, sorted.
func (h *history) latches() []string {
	names := map[string]bool{}
	for _, c := range h.latchCalls {
		names[c.latch] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// checkModel compares the history of a lock or a latch with a model.
func (h *history) checkModel(
	model porcupine.Model, name string, ops []porcupine.Operation, dir string, timeout time.Duration,
) (wrongs []string) {
	verdict := porcupine.CheckOperationsTimeout(model, ops, timeout)
	if verdict == porcupine.Ok {
		return nil
	}
	w := fmt.Sprintf("the history of %s (%d operations) is %s", name, len(ops), verdict)
	_, info := porcupine.CheckOperationsVerbose(model, ops, timeout)
	path := filepath.Join(dir, name+".html")
	if err := porcupine.VisualizePath(model, info, path); err != nil {
		w += ": " + err.Error()
	} else {
		w += ": see " + path
	}
	return append(wrongs, w)
}

// totals are the numbers of events in several rounds.
type totals map[string]int

// missing returns the wanted events that there were fewer of, sorted.
func (s totals) missing(wanted map[string]int) (names []string) {
	for name, n := range wanted {
		if s[name] < n {
			names = append(names, fmt.Sprintf("%s (%d of %d)", name, s[name], n))
		}
	}
	slices.Sort(names)
	return names
}

// addHolds counts the events of a round's workers. It ignores what the test does after them.
func (s totals) addHolds(h *history) {
	s["fault"] += h.faults
	s["wipe"] += len(h.wipes)
	s["context that ended with its lease"] += len(h.lateness)
	for _, lock := range h.locks() {
		if isFair(lock) {
			_, pairs := h.overtaken(lock)
			s["waiter of a fair lock before another"] += pairs
		}
	}
	for _, c := range h.latchCalls {
		if c.outcome == fine {
			s["call of a latch: "+string(c.step)]++
		}
	}
	holding := map[string]bool{}
	for _, c := range h.claims {
		if strings.HasPrefix(c.id, lastWorker) {
			continue
		}
		s["call"]++
		if c.acquired() {
			s["hold"]++
			s["hold of kind "+c.kind]++
			if holding[c.owner] {
				s["re-entry"]++
			}
			holding[c.owner] = true
			if c.adopts != "" {
				s["adopted hold"]++
			}
		}
		if c.returned == 0 || c.acquired() && c.unlocked == 0 {
			s["call cut short by a kill"]++
		}
		if o := cmp.Or(c.failure, c.release); o != "" {
			s[string(o)]++
		}
	}
}

// holdsWanted returns the events that a run of that length contains. A single round need only contain a
// hold, because it may repeat another.
func holdsWanted(runFor time.Duration) map[string]int {
	wanted := map[string]int{"hold": 1}
	if runFor >= smoke {
		wanted["fault"] = 1
		for _, k := range kinds {
			wanted["hold of kind "+k.name] = enough
		}
		for _, s := range []step{countDown, await} {
			wanted["call of a latch: "+string(s)] = enough
		}
	}
	if runFor >= longRun {
		for _, name := range []string{"re-entry", "adopted hold", string(maxHold), string(expired), string(gone), "call cut short by a kill", "wipe",
			"waiter of a fair lock before another"} {
			wanted[name] = 1
		}
		wanted["context that ended with its lease"] = enoughLate
	}
	return wanted
}
