package inspect

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// builder makes an object of a snapshot.
type builder struct {
	snapshot
	o Object
}

// object returns the object that the keys describe.
func (s snapshot) object(name, key string) Object {
	b := &builder{s, Object{Name: name, Key: key, At: s.now.UTC()}}
	if work, slot, ok := SlotOf(name); ok {
		b.o.Slot = &Slot{Work: work, Slot: slot}
		b.o.Kind = s.kindOfSlot()
	} else {
		b.o.Kind = s.kind()
	}
	b.o.Subscribers = s.subscribers(b.o.Kind)
	for _, k := range s.keys {
		b.o.Truncated = b.o.Truncated || k.size > most
	}
	main := s.keys[mainKey]
	if !main.isMissing() {
		b.o.Type, b.o.Expires = main.kind, lease(main.ttl)
	}
	switch b.o.Kind {
	case Lock, Fair, Fenced, Election:
		b.lock()
		b.queue()
	case Once:
		b.lock()
		b.done()
	case RWLock:
		b.readWrite()
	case Plain:
		b.plain()
	case Semaphore:
		b.permits()
	case Rate:
		b.limit()
	case Group:
		b.group()
	case Latch, Counter:
		n, _ := main.number()
		b.o.Count = &n
	}
	b.token()
	b.term()
	b.checkKeys()
	return b.o
}

// kind derives the kind from the keys.
func (s snapshot) kind() Kind {
	main := s.keys[mainKey]
	exists := func(key int) bool { return !s.keys[key].isMissing() }
	queued := exists(queueKey) || exists(timeoutsKey) || exists(aliveKey)
	_, isNumber := main.number()
	switch main.kind {
	case "hash":
		fields := main.pairs()
		mode, hasMode := fields["mode"]
		switch {
		case isRate(fields):
			return Rate
		case isGroup(fields):
			return Group
		case !isLock(fields) || hasMode && mode != "read" && mode != "write":
			return Other
		case hasMode:
			return RWLock
		case exists(termKey):
			return Election
		case queued:
			return Fair
		case exists(tokenKey):
			return Fenced
		}
		return Lock
	case "string":
		switch {
		case isNumber && exists(permitsKey):
			return Semaphore
		case isNumber && (exists(roundKey) || s.channels[latchChannel] > 0):
			return Latch
		case isNumber && (exists(waitingKey) || exists(createdKey) || s.channels[semaphoreChannel] > 0):
			return Semaphore
		case isNumber:
			return Counter
		}
		if _, err := lock.ParseOwner(main.text()); err == nil || main.ttl >= 0 && main.size <= 256 {
			return Plain
		}
		return Other
	case "none":
		for _, key := range telling {
			if exists(key) {
				return Kind(wire.Forms[roles[key]].Kinds[0])
			}
		}
		if s.channels[semaphoreChannel] > 0 {
			return Semaphore // that was not created
		}
		return None
	}
	return Other
}

// telling are the keys of which one tells the kind of an object without a main key. A created semaphore may
// have been deleted since.
var telling = []int{termKey, queueKey, tokenKey, writersKey, permitsKey, roundKey, waitingKey, createdKey, ratePermitsKey}

// kindOfSlot derives the kind from the keys of a slot.
func (s snapshot) kindOfSlot() Kind {
	main := s.keys[mainKey]
	if main.kind == "hash" && isLock(main.pairs()) {
		return Once
	}
	if !main.isMissing() {
		return Other
	}
	if s.keys[doneKey].isMissing() {
		return None
	}
	return Once
}

// isLock reports whether the fields are those of a lock: owners and numbers of holds, and perhaps a
// mode.
func isLock(fields map[string]string) bool {
	for owner, count := range fields {
		if owner == "mode" {
			continue
		}
		if _, err := lock.ParseOwner(strings.TrimSuffix(owner, wire.WriteSuffix)); err != nil {
			return false
		}
		if _, err := strconv.ParseInt(count, 10, 64); err != nil {
			return false
		}
	}
	return len(fields) > 0
}

// isRate reports whether the fields are those of a rate limiter.
func isRate(fields map[string]string) bool {
	for _, field := range []string{"rate", "interval", "type"} {
		if _, err := strconv.ParseInt(fields[field], 10, 64); err != nil {
			return false
		}
	}
	return true
}

// groupField matches the name of a field in the hash of a group: a value, and perhaps a property of its owner's lock.
var groupField = regexp.MustCompile(`\A([A-Za-z0-9+/]{22})(?::(.+):(expire_time|lock_count))?\z`)

// isGroup reports whether the fields belong to a group.
func isGroup(fields map[string]string) bool {
	for field := range fields {
		if !groupField.MatchString(field) {
			return false
		}
	}
	return len(fields) > 0
}

// group reads the owners of the values of a group. The lease of an owner ends with the first of its values. A value whose
// lease is over is free.
func (b *builder) group() {
	fields := b.keys[mainKey].pairs()
	holders := map[string]Holder{}
	for value, id := range fields {
		if strings.Contains(value, ":") {
			continue
		}
		left := b.until(fields[value+":"+id+":expire_time"])
		if left == nil || *left <= 0 {
			continue
		}
		h, known := holders[id]
		if !known {
			h = Holder{Owner: owner(id), Lease: left}
		}
		n, _ := strconv.ParseInt(fields[value+":"+id+":lock_count"], 10, 64)
		h.Values++
		h.Count = max(h.Count, n)
		if *left < *h.Lease {
			h.Lease = left
		}
		holders[id] = h
	}
	b.o.Holders = slices.Collect(maps.Values(holders))
	b.holds()
}

// limit reads the configuration of a rate limiter, and the permits that were acquired in the last interval.
func (b *builder) limit() {
	fields := b.keys[mainKey].pairs()
	rate, _ := strconv.ParseInt(fields["rate"], 10, 64)
	interval, _ := strconv.ParseInt(fields["interval"], 10, 64)
	per := wire.Duration(interval)
	b.o.Limit = &Limit{Rate: rate, Per: Millis(per), PerClient: fields["type"] == "1"}
	if b.o.Limit.PerClient {
		return
	}

	used := int64(0)
	for entry, at := range b.keys[ratePermitsKey].pairs() {
		left := b.until(at)
		if left == nil || len(entry) < 4 {
			continue
		}
		if *left += Millis(per); *left <= 0 {
			continue // it has expired
		}
		used += int64(binary.LittleEndian.Uint32([]byte(entry[len(entry)-4:])))
		if next := b.o.Limit.NextFree; next == nil || *left < *next {
			b.o.Limit.NextFree = left
		}
	}
	b.o.Limit.Used = &used
}

// owner describes the owner with that id.
func owner(id string) Owner {
	o := Owner{ID: id, Library: "other"}
	parsed, err := lock.ParseOwner(id)
	if err != nil {
		return o
	}
	client, number, _ := strings.Cut(parsed.String(), ":")
	o.Client = client
	o.Number, _ = strconv.ParseUint(number, 10, 64)
	// Redisson has random ids. Those of redlatch contain the time at which the client was created.
	switch u := uuid.MustParse(client); u.Version() {
	case 4:
		o.Library = "Redisson"
	case 7:
		o.Library = ownLibrary
		started := time.Unix(u.Time().UnixTime()).UTC()
		o.Started = &started
	}
	return o
}

// lease returns the time left, or nil if there is no expiry.
func lease(ttl time.Duration) *Millis {
	if ttl == noExpiry {
		return nil
	}
	return new(Millis(ttl))
}

// noExpiry is the reply to PTTL for a key that does not expire.
const noExpiry = -time.Millisecond

// found notes an anomaly.
func (b *builder) found(code, format string, args ...any) {
	b.o.Anomalies = append(b.o.Anomalies, Anomaly{code, fmt.Sprintf(format, args...)})
}

func (b *builder) lock() {
	main := b.keys[mainKey]
	for id, count := range main.pairs() {
		n, _ := strconv.ParseInt(count, 10, 64)
		b.o.Holders = append(b.o.Holders, Holder{Owner: owner(id), Count: n, Lease: lease(main.ttl)})
	}
	b.holds()
	if len(b.o.Holders) > 1 {
		b.found("several-holders", "The hash has %d holders, and the lock is exclusive.", len(b.o.Holders))
	}
}

// holds finishes the holders of a lock.
func (b *builder) holds() {
	slices.SortFunc(b.o.Holders, func(x, y Holder) int { return cmp.Compare(x.ID, y.ID) })
	b.o.Held = len(b.o.Holders) > 0
	if b.o.Held && b.keys[mainKey].ttl == noExpiry {
		b.found("no-expiry", "The lock has no expiry: it stays held if its holder dies.")
	}
}

func (b *builder) readWrite() {
	main := b.keys[mainKey]
	fields := main.pairs()
	for id, count := range fields {
		if id == "mode" {
			continue
		}
		h := Holder{Mode: "read", Lease: lease(b.readers[id])}
		h.Count, _ = strconv.ParseInt(count, 10, 64)
		if writer, ok := strings.CutSuffix(id, wire.WriteSuffix); ok {
			h = Holder{Mode: "write", Count: h.Count, Lease: lease(main.ttl)}
			id = writer
		} else if h.Lease != nil && *h.Lease <= 0 {
			b.found("expired-reader", "The read hold of %s is over, but other holds keep its field.", id)
		}
		h.Owner = owner(id)
		b.o.Holders = append(b.o.Holders, h)
	}
	b.holds()
	b.o.Waiting = b.keys[writersKey].size
}

func (b *builder) plain() {
	main := b.keys[mainKey]
	b.o.Holders = []Holder{{Owner: owner(main.text()), Lease: lease(main.ttl)}}
	b.holds()
}

// done reads the memory of a slot.
func (b *builder) done() {
	key := b.keys[doneKey]
	if key.kind != "string" {
		return
	}
	id, since := wire.ParseOnceDone(key.text())
	done := &Done{By: owner(id), Left: lease(key.ttl)}
	if !since.IsZero() {
		done.Since = new(since.UTC())
	}
	b.o.Slot.Done = done
	if done.Left == nil {
		b.found("no-expiry", "The memory of the slot has no expiry: its work never runs again.")
	}
	if b.keys[mainKey].isMissing() {
		b.o.Type, b.o.Expires = key.kind, done.Left
	}
}

// queue reads the queue of a fair lock.
func (b *builder) queue() {
	deadlines, alive := b.keys[timeoutsKey].pairs(), b.keys[aliveKey].pairs()
	var ids []string
	if b.keys[queueKey].kind == "list" {
		ids = b.keys[queueKey].elements
	}
	for i, id := range ids {
		w := Waiter{Owner: owner(id), Alive: b.until(alive[id]), Deadline: b.until(deadlines[id])}
		w.Listens = i < len(b.waiters) && b.waiters[i] > 0
		b.o.Queue = append(b.o.Queue, w)
		switch {
		case b.o.Truncated: // its deadline may not have been read
		case w.Deadline == nil:
			b.found("no-deadline", "Waiter %s has no deadline: clients of Redisson never drop it.", id)
		case w.Alive != nil && *w.Alive <= 0:
			b.found("dead-waiter", "Waiter %s has sent no heartbeat in time: the next request of a waiter drops it.", id)
		case w.Alive == nil && w.Deadline != nil && *w.Deadline <= 0:
			b.found("dead-waiter", "The deadline of waiter %s is over: the next request drops it.", id)
		case w.Alive == nil && !w.Listens:
			b.found("silent-waiter", "Waiter %s listens to no channel: it may be dead, and keeps its position until its deadline.", id)
		}
	}
	for id := range deadlines {
		if !b.o.Truncated && !slices.Contains(ids, id) {
			b.found("stray-deadline", "%s has a deadline, but is not in the queue.", id)
		}
	}
}

// until returns the time left until a score, in ms since 1970, or nil if there is none.
func (b *builder) until(score string) *Millis {
	ms, err := strconv.ParseFloat(score, 64)
	if err != nil {
		return nil
	}
	return new(Millis(time.Duration(math.Round(ms)-float64(b.now.UnixMilli())) * time.Millisecond))
}

func (b *builder) permits() {
	free, _ := b.keys[mainKey].number()
	numbers := &PermitNumbers{Free: free, Held: -1}
	b.o.Permits = numbers
	for _, score := range b.keys[waitingKey].pairs() {
		if left := b.until(score); left != nil && *left > 0 {
			b.o.Waiting++
		}
	}
	if !b.keys[permitsKey].isMissing() {
		b.holdersOfPermits()
	}
	if missing := b.keys[mainKey].isMissing(); missing && len(b.o.Holders) > 0 {
		b.found("no-number", "Permits are held, but the number of permits is gone: nobody acquires any.")
	} else if missing && b.o.Subscribers > 0 {
		b.found("no-number", "Connections listen, but the semaphore was not created, or was deleted: nobody acquires a permit.")
	}
	switch {
	case free >= 0:
	case numbers.Held < 0:
		b.found("negative", "The number of free permits is %d: it was reduced below the number of those held.", free)
	case numbers.Size() < 0: // else the size was reduced below the number of permits held
		b.found("negative", "The number of permits, free and held, is %d: no release frees one.", numbers.Size())
	}
}

// forever is the deadline of permits without a lease.
const forever = "922337203685477"

func (b *builder) holdersOfPermits() {
	permits := b.keys[permitsKey]
	held := permits.size
	ids := permits.pairs()
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		h := Holder{Owner: Owner{ID: hex.EncodeToString([]byte(id))}}
		if ids[id] != forever {
			h.Lease = b.until(ids[id])
		}
		if h.Lease != nil && *h.Lease <= 0 {
			held--
			b.o.Permits.Free++
			continue // the next request reclaims it
		}
		b.o.Holders = append(b.o.Holders, h)
	}
	b.o.Permits.Held, b.o.Held = held, held > 0
}

// token reads the last fencing token.
func (b *builder) token() {
	key := b.keys[tokenKey]
	if key.isMissing() {
		return
	}
	if n, ok := key.number(); ok {
		b.o.Token = &n
	} else {
		b.found("token", "The fencing token is no integer: acquisitions of the fenced lock fail.")
	}
}

// term reads the last term of an election.
func (b *builder) term() {
	fields := b.keys[termKey].pairs()
	if b.o.Kind != Election || len(fields) == 0 {
		return
	}
	n, err := strconv.ParseInt(fields["token"], 10, 64)
	if err != nil {
		b.found("token", "The token of the election's last term is no integer: no term begins.")
	}
	_, current := b.keys[mainKey].pairs()[fields["owner"]]
	b.o.Leader = &Term{Token: n, Value: fields["value"], Current: current}
}

// subscribers returns the number of connections that wait for a message about the object, beyond those
// of the queue of a fair lock.
func (s snapshot) subscribers(kind Kind) int {
	var of []int
	switch kind {
	case RWLock:
		of = s.channels[rwChannel : rwChannel+1]
	case Semaphore:
		of = s.channels[semaphoreChannel : semaphoreChannel+1]
	case Latch:
		of = s.channels[latchChannel : latchChannel+1]
	case Rate:
		of = s.channels[rateChannel : rateChannel+1]
	case Plain:
		of = s.channels[plainChannel : plainChannel+1]
	case Fair, Election:
		of = s.waiters
	case Group:
		of = s.channels[lockChannel : lockChannel+1]
	default:
		of = s.channels
	}
	sum := 0
	for _, n := range of {
		if n < 0 {
			return -1
		}
		sum += n
	}
	return sum
}

// checkKeys finds keys of wrong types, and keys of another kind of object.
func (b *builder) checkKeys() {
	keys := keysOf(b.o.Key)
	for i, k := range b.keys {
		if want := wire.Forms[roles[i]].Type; i != mainKey && !k.isMissing() && k.kind != want {
			b.found("wrong-type", "The key %s is a %s, not a %s: requests that use it fail.", keys[i], k.kind, want)
		}
	}
	if b.o.Kind == Other {
		b.found("wrong-type", "The key is a %s that is no object of redlatch: requests that use it fail.", b.keys[mainKey].kind)
	}
	for _, i := range telling {
		kinds := wire.Forms[roles[i]].Kinds
		if i == createdKey || b.keys[i].isMissing() || slices.Contains(kinds, string(b.o.Kind)) || b.o.Kind == Other {
			continue
		}
		b.found("mixed-kinds", "The key %s belongs to another kind of object of this name, %s.",
			keys[i], WithArticle(kinds[0]))
	}
}
