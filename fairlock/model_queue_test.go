package fairlock_test

import (
	"cmp"
	"slices"

	"github.com/redlatch/redlatch/internal/lockstep"
	"github.com/redlatch/redlatch/internal/wire"
)

// begin is called before each script of ours.
func (m *model) begin(l *lockModel) {
	l.head, l.changed, l.freed = l.first(), false, false
	l.intact = len(l.queue) == len(l.deadlines)
	l.silent = false
	l.patient = -l.order[""] > m.now
}

// next returns the waiter that the lock is for, "" if there is none.
func (l *lockModel) next() string {
	if l.silent {
		return ""
	}
	return l.first()
}

// first returns the head of the queue, "" if there is none.
func (l *lockModel) first() string {
	if len(l.queue) == 0 {
		return ""
	}
	return l.queue[0]
}

// queued reports whether a waiter is in the queue. One that is has a deadline, unless a fault
// has deleted it.
func (l *lockModel) queued(owner string) bool {
	if l.intact {
		_, is := l.deadlines[owner]
		return is
	}
	return slices.Contains(l.queue, owner)
}

// dies returns when a waiter counts as dead, if that is known.
func (l *lockModel) dies(owner string) (at int64, known bool) {
	if at, ours := l.alive[owner]; ours {
		return at, true
	}
	at, known = l.deadlines[owner]
	return at, known
}

// refresh brings the queue up to date, in a request of live waiters.
func (m *model) refresh(l *lockModel, live ...string) {
	back := m.evicted(l, live)
	m.listen(l, live)
	m.restore(l, back)
	m.purge(l)
}

// listen is told the waiters of a request.
func (m *model) listen(l *lockModel, live []string) {
	l.silent = len(l.alive) > 0 && len(l.ranked()) >= len(l.deadlines)
	for _, dies := range l.alive {
		l.silent = l.silent && dies <= m.now
	}
	late := l.silent
	for _, owner := range live {
		at, ours := l.alive[owner]
		late = late || ours && at <= m.now
	}
	if late && len(live) > 0 {
		m.seen.See("patient")
		l.order[""] = -(m.now + m.positionTTL/4)
		l.silent, l.patient, l.changed = false, true, true
	}
}

// purge removes dead waiters from the head, if the lock is free.
func (m *model) purge(l *lockModel) {
	for ; len(l.queue) > 0; l.queue = l.queue[1:] {
		first := l.queue[0]
		at, known := l.dies(first)
		if !known {
			l.deadlines[first] = m.now + m.wait
		}
		if !l.free() || l.silent || l.patient || !known || at > m.now {
			break
		}
		m.seen.See("dead purged")
		delete(l.deadlines, first)
		delete(l.alive, first)
		delete(l.order, first)
		l.tidy() // before a deadline is added: the key would be a new one
	}
	l.tidy()
}

// renew records heartbeats of waiters. After a fault a waiter can be in the queue twice: then its
// last position near the head counts, because a later deadline does no harm.
func (m *model) renew(l *lockModel, owners ...string) {
	ranks := map[string]int{}
	for i, owner := range l.queue[:min(8, len(l.queue))] {
		ranks[owner] = i + 1
	}
	for _, owner := range owners {
		rank, near := ranks[owner]
		if !near {
			rank = len(l.queue) + 1
			if slices.Contains(l.queue, owner) {
				m.seen.See("far from the head")
			}
		}
		l.alive[owner] = m.now + m.positionTTL
		l.deadlines[owner] = m.now + m.ttl(l) + int64(rank)*m.wait
		l.changed = true
	}
}

// ranked returns our waiters in the order in which they came.
func (l *lockModel) ranked() (owners []string) {
	for owner := range l.order {
		if owner != "" {
			owners = append(owners, owner)
		}
	}
	slices.SortFunc(owners, func(a, b string) int { return cmp.Compare(l.order[a], l.order[b]) })
	return owners
}

// evicted returns live waiters that were evicted: those of a request, and the first others. It
// forgets dead ones.
func (m *model) evicted(l *lockModel, live []string) (back []string) {
	add := func(owner string) bool {
		at, known := l.dies(owner)
		if !known || at <= m.now {
			return false
		}
		if !slices.Contains(back, owner) {
			back = append(back, owner)
		}
		return true
	}
	for _, owner := range live {
		if !l.queued(owner) {
			add(owner)
		}
	}
	const some = 16
	for forgotten := some; forgotten == some; {
		forgotten = 0
		first := l.ranked()
		for _, owner := range first[:min(some, len(first))] {
			if l.queued(owner) {
				break
			}
			if !add(owner) {
				m.seen.See("forgotten")
				forgotten++
				delete(l.order, owner)
				delete(l.alive, owner)
			}
		}
	}
	l.tidy()
	return back
}

// restore puts them back. After a fault they can be in the queue as well, and are in it twice
// then.
func (m *model) restore(l *lockModel, back []string) {
	if len(back) == 0 {
		return
	}
	m.seen.See("restored")
	var last int64
	for _, owner := range back {
		last = max(last, l.order[owner])
	}
	for len(l.queue) > 0 && l.order[l.queue[0]] > 0 && l.order[l.queue[0]] < last {
		back = append(back, l.queue[0])
		l.queue = l.queue[1:]
		m.seen.See("restored before another")
	}
	l.tidy()
	slices.SortFunc(back, func(a, b string) int {
		return cmp.Or(cmp.Compare(l.order[a], l.order[b]), cmp.Compare(a, b))
	})
	for i, owner := range slices.Backward(back) { // the first position of a waiter counts
		l.deadlines[owner] = m.now + m.ttl(l) + int64(i+1)*m.wait
	}
	l.queue = append(back, l.queue...)
	l.changed = true
}

// leave removes waiters.
func (l *lockModel) leave(owners ...string) {
	before := len(l.deadlines)
	for _, owner := range owners {
		delete(l.alive, owner)
		delete(l.deadlines, owner)
		delete(l.order, owner)
	}
	if len(l.deadlines) < before || !l.intact {
		for _, owner := range owners {
			if n := slices.Index(l.queue, owner); n >= 0 {
				l.queue = slices.Delete(l.queue, n, n+1)
			}
		}
	}
	l.tidy()
}

// end is called after each script of ours that may change the queue. A new head that need not
// wait for long gets a message. end returns the number of receivers.
func (m *model) end(l *lockModel) int {
	if len(l.queue) == 0 {
		l.drop(deadlinesAt)
		l.drop(aliveAt)
		l.drop(orderAt)
		return 0
	}
	if len(l.alive) == 0 {
		l.drop(orderAt)
	}
	switch ends := l.ends[queueAt]; {
	case l.silent && l.free():
		if ends != never && ends-m.now > m.positionTTL {
			m.expire(l, m.positionTTL)
		}
	case l.changed || len(l.alive) == 0:
		m.expire(l, int64(len(l.queue)+1)*m.wait+m.ttl(l))
	}
	newHead := l.freed || l.head != "" && l.head != l.queue[0]
	if newHead && (l.free() || l.ends[lockAt] != never && m.ttl(l) < 5_000) {
		m.publish(l)
		return lockstep.Subscribers
	}
	return 0
}

// expire gives the keys of the queue an expiry, but not to those that have a Java waiter.
func (m *model) expire(l *lockModel, ttl int64) {
	ends := m.now + ttl
	l.ends[queueAt], l.ends[deadlinesAt], l.ends[aliveAt], l.ends[orderAt] = never, never, ends, ends
	if len(l.deadlines) == len(l.alive) {
		l.ends[queueAt], l.ends[deadlinesAt] = ends, ends
	}
	l.tidy()
}

// publish sends the message that the lock is free to the head of the queue.
func (m *model) publish(l *lockModel) {
	m.seen.See("published")
	m.published = append(m.published, wire.LockChannel(l.name)+":"+l.queue[0]+" "+wire.PayloadUnlocked)
}
