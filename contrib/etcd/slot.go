package etcdlock

import (
	"strconv"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// slots are the keys that the claims of a session use. They are used again and again: etcd keeps each key that it ever had
// until the next compaction, and reads all keys of a range with each request for the range.
type slots map[string]*line

// line is the slots with the same prefix: a name and a kind of claims.
type line struct {
	free    []int
	next    int // the least that was never used
	used    int
	retired int
}

// slot is the n-th slot with a prefix.
type slot struct {
	prefix string
	n      int
}

// key returns the key of the slot of a session.
func (s slot) key(id clientv3.LeaseID) string {
	key := s.prefix + "-" + strconv.FormatInt(int64(id), 16)
	if s.n > 0 {
		key += "." + strconv.Itoa(s.n)
	}
	return key
}

// take returns a slot that no other claim has.
func (all slots) take(prefix string) slot {
	l := all[prefix]
	if l == nil {
		l = new(line)
		all[prefix] = l
	}
	l.used++
	if last := len(l.free) - 1; last >= 0 {
		n := l.free[last]
		l.free = l.free[:last]
		return slot{prefix, n}
	}
	l.next++
	return slot{prefix, l.next - 1}
}

// give has another claim take the slot. Nothing is kept of a prefix that no claim uses.
func (all slots) give(s slot) {
	l := all[s.prefix]
	l.used--
	l.free = append(l.free, s.n)
	if l.used == 0 && l.retired == 0 {
		delete(all, s.prefix)
	}
}

// retire has no claim take the slot any more: a member that was stopped may execute a request however late.
func (all slots) retire(s slot) {
	l := all[s.prefix]
	l.used--
	l.retired++
}
