package rwlock_test

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/rwlock"
)

// world is the model of one read-write lock: what the server should have and reply. It
// says what the scripts do, one claim after the other, and not how. Times are in ms; at
// the end of its time a key has 0 ms left, and later it is gone.
type world struct {
	now     int64
	mode    string         // "" if the lock is free
	counts  map[string]int // by field
	until   int64          // when the lock expires
	keys    map[string]int64
	writers map[string]bool // that wait and keep new readers out
	kept    int64           // until when
	tickets map[string]ticket
	told    []string // messages
}

type ticket struct {
	state string
	until int64
}

func newWorld() *world {
	return &world{counts: map[string]int{}, keys: map[string]int64{}, writers: map[string]bool{}, tickets: map[string]ticket{}}
}

func (w *world) clone() *world {
	c := *w
	c.counts, c.keys, c.writers, c.tickets = maps.Clone(w.counts), maps.Clone(w.keys), maps.Clone(w.writers), maps.Clone(w.tickets)
	return &c
}

// pass lets time pass.
func (w *world) pass(ms int64) {
	w.now += ms
	if w.mode != "" && w.until < w.now {
		w.clear()
	}
	maps.DeleteFunc(w.keys, func(_ string, until int64) bool { return until < w.now })
	maps.DeleteFunc(w.tickets, func(_ string, t ticket) bool { return t.until < w.now })
	if w.kept < w.now {
		clear(w.writers)
	}
}

func (w *world) clear() {
	w.mode, w.until = "", 0
	clear(w.counts)
}

func (w *world) in(until int64) time.Duration { return time.Duration(until-w.now) * time.Millisecond }

func ms(d time.Duration) int64 { return d.Milliseconds() }
func itoa(n int) string        { return strconv.Itoa(n) }

func holdKeyOf(owner string, n int) string {
	return wire.ReadHoldTimeouts(key) + owner + ":rwlock_timeout:" + itoa(n)
}

func isWriter(field string) bool { return strings.HasSuffix(field, wire.WriteSuffix) }

// fieldOf is the field in the hash of a claim's owner.
func fieldOf(c *locking.Claim) string {
	if c.Kind == "write" {
		return wire.WriteOwner(c.Owner)
	}
	return c.Owner.String()
}

func (w *world) ticketOf(c *locking.Claim) string {
	if !c.Named() {
		return ""
	}
	return w.tickets[wire.UnlockLatch(key, c.Ticket)].state
}

func (w *world) setTicket(c *locking.Claim, state string, life time.Duration) {
	if c.Named() {
		w.tickets[wire.UnlockLatch(key, c.Ticket)] = ticket{state, w.now + ms(life)}
	}
}

// atLeast makes everything of a claim's owner last that long.
func (w *world) atLeast(c *locking.Claim, lease time.Duration) {
	until := w.now + ms(lease)
	w.until = max(w.until, until)
	if c.Kind == "read" {
		for n := range w.counts[fieldOf(c)] {
			k := holdKeyOf(c.Owner.String(), n+1)
			w.keys[k] = max(w.keys[k], until)
		}
	}
	if c.Named() {
		id := wire.UnlockLatch(key, c.Ticket)
		w.tickets[id] = ticket{"held", max(w.tickets[id].until, until)}
	}
}

// holds reports whether the claim itself is what its owner holds by, as far as the
// server can know.
func (w *world) holds(c *locking.Claim) bool {
	return w.counts[fieldOf(c)] > 0 && (!c.Named() || w.ticketOf(c) == "held")
}

func (w *world) acquire(c *locking.Claim) locking.Answer {
	reads, writes := w.counts[c.Owner.String()] > 0, w.counts[wire.WriteOwner(c.Owner)] > 0
	switch {
	case w.ticketOf(c) == "0" || w.ticketOf(c) == "1":
		return locking.Answer{FreeIn: unknownTime}
	case w.holds(c):
		w.atLeast(c, c.Lease)
		return locking.Answer{Acquired: true}
	case c.Kind == "read":
		if !reads && !writes {
			if w.mode == "write" {
				return locking.Answer{FreeIn: w.in(w.until)}
			}
			if len(w.writers) > 0 {
				return locking.Answer{FreeIn: w.in(w.kept)}
			}
		}
		w.admit(c)
	case reads && !writes:
		return locking.Answer{Upgrade: true}
	case w.mode != "" && !writes:
		a := locking.Answer{FreeIn: w.in(w.until)}
		if c.Waits && w.mode == "read" {
			w.writers[c.Owner.String()] = true
			w.kept = w.now + ms(rwlock.WriterLife)
			a.Placed, a.FreeIn = true, min(a.FreeIn, rwlock.WriterPause)
		}
		return a
	default:
		w.mode = "write"
		w.counts[fieldOf(c)]++
		w.until = max(w.until, w.now+ms(c.Lease))
		clear(w.writers)
	}
	w.setTicket(c, "held", c.Lease)
	return locking.Answer{Acquired: true}
}

// unknownTime is an answer's FreeIn where the server cannot tell.
const unknownTime = -time.Millisecond

// admit gives a reader one more hold.
func (w *world) admit(c *locking.Claim) {
	if w.mode == "" {
		w.mode = "read"
	}
	w.counts[fieldOf(c)]++
	until := w.now + ms(c.Lease)
	w.keys[holdKeyOf(c.Owner.String(), w.counts[fieldOf(c)])] = until
	w.until = max(w.until, until)
}

// longest is when the last read hold of any owner but one ends, 0 if none has time left.
func (w *world) longest(except string) (until int64) {
	for field, count := range w.counts {
		for n := range count {
			if field != except && !isWriter(field) {
				until = max(until, w.keys[holdKeyOf(field, n+1)])
			}
		}
	}
	if until <= w.now {
		return 0
	}
	return until
}

func (w *world) tell(payload string) locking.Released {
	w.told = append(w.told, payload)
	return locking.Released{State: locking.Free, Told: lockstep.Subscribers}
}

func (w *world) release(c *locking.Claim, undo bool) locking.Released {
	state := w.ticketOf(c)
	switch {
	case state == "0":
		w.leave(c)
		return stillHeld
	case state == "1":
		w.leave(c)
		return locking.Released{State: locking.Free}
	case c.Named() && !c.AnyHold && state != "held", w.counts[fieldOf(c)] == 0:
		if state == "held" {
			delete(w.tickets, wire.UnlockLatch(key, c.Ticket))
		}
		w.leave(c)
		return notHeld
	case !c.Named() && w.counts[fieldOf(c)] > 1:
		w.leave(c)
		return shared
	}
	r := w.end(c)
	switch {
	case undo:
		delete(w.tickets, wire.UnlockLatch(key, c.Ticket))
	case r.State == locking.Free:
		w.setTicket(c, "1", locking.LatchLife)
	default:
		w.setTicket(c, "0", locking.LatchLife)
	}
	return r
}

// end takes one hold from the owner of a claim.
func (w *world) end(c *locking.Claim) locking.Released {
	if c.Kind == "write" {
		return w.endWrite(c)
	}
	return w.endRead(c)
}

func (w *world) endWrite(c *locking.Claim) locking.Released {
	field := fieldOf(c)
	if w.counts[field]--; w.counts[field] > 0 {
		return stillHeld
	}
	delete(w.counts, field)
	w.mode, w.until = "read", w.longest("")
	if w.until == 0 {
		w.clear()
	}
	return w.tell("1")
}

// manyHolders is how many must stay for a release not to look at all of them.
const manyHolders = 4

func (w *world) endRead(c *locking.Claim) locking.Released {
	field := fieldOf(c)
	count := w.counts[field]
	// The key that is given up is the shortest that is enough for the hold.
	last := holdKeyOf(field, count)
	gone := last
	if t, ok := w.tickets[wire.UnlockLatch(key, c.Ticket)]; ok && !c.AnyHold {
		for n := count - 1; n > 0; n-- {
			k := holdKeyOf(field, n)
			if w.keys[k] >= t.until && (w.keys[gone] < t.until || w.keys[k] < w.keys[gone]) {
				gone = k
			}
		}
	}
	until := w.keys[gone]
	if w.keys[gone] = w.keys[last]; w.keys[gone] <= w.now {
		delete(w.keys, gone)
	}
	delete(w.keys, last)
	if w.counts[field]--; w.counts[field] == 0 {
		delete(w.counts, field)
	}
	switch {
	case w.mode == "write":
		return stillHeld
	case len(w.counts) >= manyHolders && until > 0 && until < w.until:
		return stillHeld // another is the longest
	case w.longest("") > 0:
		w.until = min(w.until, w.longest(""))
		return stillHeld
	}
	w.clear()
	return w.tell("0")
}

func (w *world) leave(c *locking.Claim) {
	if c.Kind == "write" && w.writers[c.Owner.String()] {
		delete(w.writers, c.Owner.String())
		if len(w.writers) == 0 {
			w.tell("1")
		}
	}
}

func (w *world) handOff(from *locking.Claim, to []*locking.Claim) locking.Passed {
	has := w.counts[fieldOf(from)]
	switch {
	case has > 1, has == 0 && w.counts[fieldOf(to[0])] == 0:
		return locking.Passed{}
	}
	for _, c := range to {
		if w.counts[fieldOf(c)] > 0 { // delivered before
			w.atLeast(c, c.Lease)
		}
	}
	if has == 0 {
		return passed
	}
	kind := from.Kind
	switch {
	case w.mode != kind, // writes still
		to[0].Kind == "write" && w.longest(fieldOf(from)) > 0, // others read
		kind == "read" && to[0].Kind == "read" && len(w.writers) > 0:
		return locking.Passed{Released: w.end(from)}
	case to[0].Kind == "write":
		delete(w.keys, holdKeyOf(from.Owner.String(), 1))
		w.clear()
		clear(w.writers)
		w.acquire(to[0])
		return passed
	case kind == "write":
		delete(w.counts, fieldOf(from))
		w.mode, w.until = "read", w.longest("")
		if len(w.writers) == 0 {
			w.tell("1")
		}
	}
	for _, c := range to {
		if w.counts[fieldOf(c)] == 0 {
			w.admit(c)
		}
	}
	if kind == "read" {
		w.end(from)
	}
	return passed
}

func (w *world) extend(c *locking.Claim, lease time.Duration) bool {
	if !w.holds(c) {
		return false
	}
	w.atLeast(c, lease)
	return true
}

func (w *world) force(kind string) bool {
	if w.mode != kind {
		return false
	}
	for field, count := range w.counts {
		for n := range count {
			delete(w.keys, holdKeyOf(field, n+1))
		}
	}
	w.clear()
	w.tell(map[string]string{"read": "0", "write": "1"}[kind])
	return true
}

func (w *world) isLocked(kind string) bool {
	return w.mode == kind || kind == "read" && w.mode == "write" && len(w.counts) > 1
}

// state is everything the server should have, and the messages since the last call.
func (w *world) state() (s lockstep.State) {
	if w.mode != "" {
		s.Put(key, "hash", w.until, append(lockstep.Pairs(w.counts), "mode", w.mode)...)
	}
	for k, until := range w.keys {
		s.Put(k, "string", until, "1")
	}
	s.Put(wire.WriterWaits(key), "set", w.kept, slices.Collect(maps.Keys(w.writers))...)
	for k, t := range w.tickets {
		s.Put(k, "string", t.until, t.state)
	}
	for _, message := range w.told {
		s.Told = append(s.Told, wire.RWChannel(key)+" "+message)
	}
	w.told = nil
	return s
}

// adopt makes the model what the server is.
func (w *world) adopt(s lockstep.State) {
	*w = world{now: w.now, counts: map[string]int{}, keys: map[string]int64{}, writers: map[string]bool{}, tickets: map[string]ticket{}}
	for name, k := range s.Keys {
		_, content, _ := strings.Cut(k.Is, " ")
		switch {
		case name == key:
			w.until = k.Ends
			for pair := range strings.FieldsSeq(content) {
				field, value, _ := strings.Cut(pair, "=")
				if field == "mode" {
					w.mode = value
				} else {
					w.counts[field], _ = strconv.Atoi(value)
				}
			}
		case name == wire.WriterWaits(key):
			w.kept = k.Ends
			for o := range strings.FieldsSeq(content) {
				w.writers[o] = true
			}
		case strings.Contains(name, ":rwlock_timeout:"):
			w.keys[name] = k.Ends
		default:
			w.tickets[name] = ticket{content, k.Ends}
		}
	}
}
