package fairlock_test

import "slices"

// The next methods are Redisson's. now is the time by the clock of its client.

func (m *model) javaEvict(l *lockModel, now int64) {
	for len(l.queue) > 0 {
		deadline, known := l.deadlines[l.queue[0]]
		if !known || deadline > now {
			return
		}
		if _, ours := l.alive[l.queue[0]]; ours {
			m.seen.See("evicted")
		}
		delete(l.deadlines, l.queue[0])
		l.queue = l.queue[1:]
		l.tidy()
	}
}

// javaAcquire returns nil, or how long to sleep.
func (m *model) javaAcquire(l *lockModel, owner string, lease, wait, now int64, waits bool) any {
	m.javaEvict(l, now)
	switch {
	case l.free() && (len(l.queue) == 0 || l.queue[0] == owner):
		if len(l.queue) > 0 {
			l.queue = l.queue[1:]
		}
		delete(l.deadlines, owner)
		for other := range l.deadlines {
			l.deadlines[other] -= wait
		}
		l.tidy()
		l.counts, l.ends[lockAt] = map[string]int{owner: 1}, m.now+lease
		return nil
	case l.counts[owner] > 0:
		l.counts[owner]++
		l.ends[lockAt] = m.now + lease
		return nil
	case !waits:
		return int64(1)
	}
	ttl := int64(-2)
	if !l.free() {
		ttl = -1
		if l.ends[lockAt] != never {
			ttl = m.ttl(l)
		}
	}
	if _, there := l.deadlines[owner]; there {
		return max(0, ttl)
	}
	if n := len(l.queue); n > 0 && l.queue[n-1] != owner {
		if deadline, known := l.deadlines[l.queue[n-1]]; known {
			ttl = deadline - now
		}
	}
	l.deadlines[owner] = ttl + wait + now
	l.queue = append(l.queue, owner)
	return ttl
}

// javaRelease returns 1 for free, 0 for still held, and nil for not held.
func (m *model) javaRelease(l *lockModel, owner string, lease, now int64) any {
	m.javaEvict(l, now)
	switch {
	case l.free():
	case l.counts[owner] == 0:
		return nil
	case l.counts[owner] > 1:
		l.counts[owner]--
		l.ends[lockAt] = m.now + lease
		return int64(0)
	}
	l.drop(lockAt)
	if len(l.queue) > 0 {
		m.publish(l)
	}
	return int64(1)
}

func (m *model) javaLeave(l *lockModel, owner string, wait int64) {
	if n := slices.Index(l.queue, owner); n >= 0 {
		for _, other := range l.queue[n+1:] {
			// ZINCRBY creates a missing member.
			l.deadlines[other] -= wait
		}
	}
	delete(l.deadlines, owner)
	l.queue = slices.DeleteFunc(l.queue, func(other string) bool { return other == owner })
	l.tidy()
}
