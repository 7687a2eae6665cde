package acquire

// register notes whether the server's queue has a waiter of the list, or need not have it. If
// not, an attempt has to register it.
func (w *waiter) register(done bool) {
	w.entry.count(w, -1)
	w.unregistered = !done
	w.entry.count(w, 1)
}

// count adds n to the number of unregistered waiters if w is one.
func (e *entry) count(w *waiter, n int32) {
	if w.unregistered {
		e.unregistered += n
	}
}

// wakeUnregistered makes the first unregistered waiter try.
func (e *entry) wakeUnregistered() {
	if e.unregistered == 0 || e.attempting {
		return
	}
	for w := e.first; w != nil; w = w.next {
		if w.unregistered {
			w.signal()
			return
		}
	}
}

// Displaced is called when a waiter may have lost its position in the server's queue, or may be the
// first there.
func (q *Queues) Displaced(key Key, a Acquirer) {
	s, e := q.lock(key)
	defer s.mu.Unlock()
	if e == nil {
		return
	}
	for w := e.first; w != nil; w = w.next {
		if w.req.Acquirer == a {
			if w.state == claimed {
				w.again = true // the attempt may have been too early
			}
			if w.state == waiting {
				w.register(false)
				w.signal()
			}
			return
		}
	}
}
