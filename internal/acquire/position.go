package acquire

// registration is the state of an Ordered waiter in the server's queue.
type registration uint8

const (
	registered         registration = iota // the server has it, or need not have it
	unregistered                           // an attempt has to register it
	registrationFailed                     // that attempt has failed
)

// setRegistration changes the registration of a waiter in the list. The mutex is held.
func (w *waiter[A]) setRegistration(r registration) {
	w.entry.count(w, -1)
	w.registration = r
	w.entry.count(w, 1)
}

// count adds n to the counter of the registration of w. The mutex is held.
func (e *entry[A]) count(w *waiter[A], n int32) {
	switch w.registration {
	case unregistered:
		e.unregistered += n
	case registrationFailed:
		e.unavailable += n
	}
}

// wakeUnregistered makes the first unregistered waiter try. The mutex is held.
func (e *entry[A]) wakeUnregistered() {
	if e.unregistered == 0 || e.attempting {
		return
	}
	for w := e.first; w != nil; w = w.next {
		if w.registration == unregistered {
			w.signal()
			return
		}
	}
}

// Displaced is called when a waiter may have lost its position in the server's queue.
func (q *Queues[A]) Displaced(key Key, a A) {
	s := q.shardOf(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		return
	}
	for w := e.first; w != nil; w = w.next {
		if w.req.Acquirer == a {
			if w.state == waiting {
				w.setRegistration(unregistered)
				w.signal()
			}
			return
		}
	}
}
