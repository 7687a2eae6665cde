package semaphore_test

// createMissing creates the semaphore with this total if it does not exist, unless that is 0, and
// reports whether it did. Acquired permits that have outlived a semaphore are among them.
func (w *world) createMissing(total int64) bool {
	if w.exists || total == 0 {
		return false
	}
	w.keepTaken()
	w.created = w.now + cacheTTL
	if w.failed = w.denied == "INCRBY"; !w.failed {
		w.change(total - int64(len(w.taken.scores)))
	}
	return !w.failed
}

// keepTaken keeps acquired permits that have outlived their semaphore from expiring with it.
func (w *world) keepTaken() {
	if !w.exists {
		w.taken.until = 0
	}
}

// resize sets the total number of permits.
func (w *world) resize(seq sequence, wanted int64) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	delta := wanted - w.total()
	if w.exists && delta == 0 {
		return w.cacheReply(seq, 0)
	}
	w.keepTaken()
	w.cacheReply(seq, 1)
	w.create(delta)
	if w.free > 0 {
		w.publish(wanted)
	}
	return []int64{1}
}

func (w *world) delete(seq sequence) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	w.queue.clear()
	w.heartbeats.clear()
	if !w.exists && len(w.taken.scores) == 0 {
		return w.cacheReply(seq, 0)
	}
	w.created = w.now + cacheTTL
	w.remove()
	w.taken.clear()
	return w.cacheReply(seq, 1)
}

// stats returns the numbers of free and acquired permits and of waiting clients.
func (w *world) stats() []int64 {
	waiting := int64(0)
	for _, until := range w.heartbeats.scores {
		if until > w.now {
			waiting++
		}
	}
	expired := int64(len(w.expired()))
	return []int64{w.free + expired, int64(len(w.taken.scores)) - expired, waiting}
}
