package rwlock_test

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/rwlock"
)

// world is the model of one read-write lock: what the server should have and reply. It
// describes the effects of the scripts, one claim after the other. Times are in ms. When its
// time ends a key has 0 ms left; later it is gone.
type world struct {
	now     int64
	mode    string         // "" if the lock is free
	counts  map[string]int // by field; above 1 only for Java
	until   int64          // when the lock expires
	keys    map[string]int64
	writers map[string]bool // that wait and block new readers
	kept    int64           // until when
	sent    []string        // messages
}

func newWorld() *world {
	return &world{counts: map[string]int{}, keys: map[string]int64{}, writers: map[string]bool{}}
}

func (w *world) clone() *world {
	c := *w
	c.counts, c.keys, c.writers = maps.Clone(w.counts), maps.Clone(w.keys), maps.Clone(w.writers)
	return &c
}

// pass lets time pass.
func (w *world) pass(ms int64) {
	w.now += ms
	if w.mode != "" && w.until < w.now {
		w.clear()
	}
	maps.DeleteFunc(w.keys, func(_ string, until int64) bool { return until < w.now })
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

// holdKeyOf returns the key of an owner's n-th read hold. The owner may be one of Java's.
func holdKeyOf(owner string, n int) string {
	return wire.ReadHoldTimeouts(key) + owner + ":rwlock_timeout:" + itoa(n)
}

func isWriter(field string) bool { return strings.HasSuffix(field, wire.WriteSuffix) }

// fieldOf returns the field of a claim in the hash.
func fieldOf(c *engine.Claim) string {
	if kindOf(c) == "write" {
		return wire.WriteOwner(c.ID)
	}
	return c.ID.String()
}

func (w *world) holds(c *engine.Claim) bool { return w.counts[fieldOf(c)] > 0 }

func (w *world) acquire(c *engine.Claim) engine.Answer {
	writes := !c.Writer.IsZero() && w.counts[wire.WriteOwner(c.Writer)] > 0
	switch {
	case w.extend(c, c.Lease): // delivered before
	case kindOf(c) == "read" && !writes && w.mode == "write":
		return engine.Answer{FreeIn: w.in(w.until)}
	case kindOf(c) == "read" && !writes && len(w.writers) > 0:
		return engine.Answer{FreeIn: w.in(w.kept)}
	case kindOf(c) == "read":
		w.admit(c)
	case w.mode != "":
		a := engine.Answer{FreeIn: w.in(w.until)}
		if c.Waits && w.mode == "read" {
			w.writers[c.ID.String()] = true
			w.kept = w.now + ms(rwlock.WriterLife)
			a.Queued, a.FreeIn = true, min(a.FreeIn, rwlock.WriterPause)
		}
		return a
	default:
		w.write(c)
	}
	return engine.Answer{Acquired: true}
}

// admit lets a reader in.
func (w *world) admit(c *engine.Claim) {
	if w.mode == "" {
		w.mode = "read"
	}
	w.counts[fieldOf(c)] = 1
	until := w.now + ms(c.Lease)
	w.keys[holdKeyOf(c.ID.String(), 1)] = until
	w.until = max(w.until, until)
}

// write gives a lock that is free to a writer.
func (w *world) write(c *engine.Claim) {
	w.mode = "write"
	w.counts[fieldOf(c)] = 1
	w.until = w.now + ms(c.Lease)
	clear(w.writers)
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

func (w *world) publish(payload string) engine.Release {
	w.sent = append(w.sent, payload)
	return engine.Release{State: engine.Free, Receivers: lockstep.Subscribers}
}

func (w *world) release(c *engine.Claim) engine.Release {
	switch {
	case !w.holds(c):
		w.leave(c)
		return notHeld
	case kindOf(c) == "write":
		return w.endWrite(c)
	default:
		return w.endRead(c)
	}
}

func (w *world) endWrite(c *engine.Claim) engine.Release {
	delete(w.counts, fieldOf(c))
	w.mode, w.until = "read", w.longest("")
	if w.until == 0 {
		w.clear()
	}
	return w.publish("1")
}

// manyHolders is the number of remaining holders from which a release does not look at all of
// them.
const manyHolders = 4

func (w *world) endRead(c *engine.Claim) engine.Release {
	k := holdKeyOf(c.ID.String(), 1)
	until := w.keys[k]
	delete(w.keys, k)
	delete(w.counts, fieldOf(c))
	switch {
	case w.mode == "write":
		return stillHeld
	case len(w.counts) >= manyHolders && until > 0 && until < w.until:
		return stillHeld // another hold is the longest
	case w.longest("") > 0:
		w.until = min(w.until, w.longest(""))
		return stillHeld
	}
	w.clear()
	return w.publish("0")
}

func (w *world) leave(c *engine.Claim) {
	if kindOf(c) == "write" && w.writers[c.ID.String()] {
		delete(w.writers, c.ID.String())
		if len(w.writers) == 0 {
			w.publish("1")
		}
	}
}

// extend makes a claim, and with it the lock, last at least that long, and reports whether the
// claim stands.
func (w *world) extend(c *engine.Claim, lease time.Duration) bool {
	if !w.holds(c) {
		return false
	}
	until := w.now + ms(lease)
	w.until = max(w.until, until)
	if kindOf(c) == "read" {
		k := holdKeyOf(c.ID.String(), 1)
		w.keys[k] = max(w.keys[k], until)
	}
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
	w.publish(map[string]string{"read": "0", "write": "1"}[kind])
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
	for _, message := range w.sent {
		s.Told = append(s.Told, wire.RWChannel(key)+" "+message)
	}
	w.sent = nil
	return s
}

// adopt makes the model what the server is.
func (w *world) adopt(s lockstep.State) {
	now := w.now
	*w = *newWorld()
	w.now = now
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
		default:
			w.keys[name] = k.Ends
		}
	}
}
