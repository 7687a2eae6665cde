package semaphore_test

import "slices"

// mostOf returns the most permits that a request can get, of this number in all.
func mostOf(total int64) int64 {
	if total <= 0 {
		return maxPermits
	}
	return total
}

// expired returns the expired permits that are still in the set.
func (w *world) expired() (ids []string) {
	for id, at := range w.taken.scores {
		if at <= w.now {
			ids = append(ids, id)
		}
	}
	return ids
}

func (w *world) sweep() {
	w.change(w.taken.drop(w.expired()...))
}

func (w *world) held(id string) bool { return w.taken.scores[id] > w.now }

func (w *world) deadline(lease int64) int64 {
	if lease == 0 {
		return noExpiry
	}
	return w.now + lease + 1
}

// grant adds the permits of requests.
func (w *world) grant(requests []request) {
	for _, request := range requests {
		for _, id := range request.ids {
			w.taken.scores[id] = w.deadline(request.lease)
		}
	}
	if len(requests) > 0 {
		w.bind()
	}
}

// bind limits the life of the acquired permits to that of the semaphore.
func (w *world) bind() {
	if w.idle == 0 && len(w.taken.scores) > 0 && w.until > w.now {
		w.taken.until = w.until
	}
}

// retryIn returns the ms after which a retry may succeed.
func (w *world) retryIn(g result, b batch) int64 {
	retryIn := g.retryIn
	if !w.exists || g.n == int64(len(b.requests)) {
		return retryIn
	}
	for _, at := range w.taken.scores {
		if left := max(0, at-w.now); at < noExpiry && (retryIn < 0 || left < retryIn) {
			retryIn = left
		}
	}
	return retryIn
}

func (w *world) permitAcquire(seq sequence, b batch) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	created := w.createMissing(b.size)
	if w.failed {
		return nil
	}
	had := w.free
	if w.exists {
		if len(w.expired()) > 0 && w.denied == "INCRBY" {
			w.failed = true
			return nil
		}
		w.sweep()
	}
	most := int64(maxPermits)
	if w.exists {
		most = mostOf(w.total())
	}
	g := w.serve(b, w.free, w.exists, most)
	if g.n > 0 {
		w.bind()
		if w.refused(seq) {
			return nil
		}
		w.change(-g.taken)
		w.grant(b.requests[:g.n])
	}
	w.cacheReply(seq, g.n, g.retryIn, g.queued, most)
	if w.exists && (created || g.left || w.free+g.taken > had) {
		w.publish(w.free)
	}
	return []int64{g.n, w.retryIn(g, b), g.queued, most}
}

func (w *world) permitUndo(seq sequence, ids []string) []int64 {
	before, duplicate := w.last(seq)
	if duplicate && (len(before) == 0 || before[0] < 0) {
		return []int64{0}
	}
	w.cacheReply(seq, -1)
	n := w.taken.drop(ids...)
	if n > 0 && w.exists {
		w.change(n)
		w.publish(w.free)
	}
	return []int64{n}
}

func (w *world) permitRelease(seq sequence, all []string, ifExists bool, b batch) []int64 {
	if reply, duplicate := w.cached(seq); duplicate {
		return reply
	}
	ids, done := slices.DeleteFunc(slices.Clone(all), func(id string) bool { return !w.held(id) }), int64(1)
	switch {
	case len(ids) == 0 || len(ids) < len(all) && !ifExists:
		return w.cacheReply(seq, 0)
	case len(ids) < len(all):
		done = 2
	}
	w.createMissing(b.size)
	n, most := int64(len(ids)), mostOf(w.total())
	g := w.serve(b, w.free+n, true, most)
	w.cacheReply(seq, done, 0, g.n, 0, g.queued, most)
	if g.n > 0 {
		w.bind()
	}
	w.taken.drop(ids...)
	w.change(n - g.taken)
	w.grant(b.requests[:g.n])
	payload := w.free
	if payload > 0 && n > 1 && g.n == 0 {
		payload = n
	}
	retryIn := int64(0)
	if g.n < int64(len(b.requests)) {
		retryIn = w.retryIn(g, b)
	}
	return []int64{done, w.publish(payload), g.n, retryIn, g.queued, most}
}

func (w *world) permitLeft(id string) []int64 {
	switch at := w.taken.scores[id]; {
	case !w.held(id):
		return []int64{-2}
	case at == noExpiry:
		return []int64{-1}
	default:
		return []int64{at - w.now - 1}
	}
}

func (w *world) permitExtend(ids []string, lease int64, least bool) []int64 {
	if slices.ContainsFunc(ids, func(id string) bool { return !w.held(id) }) {
		return []int64{0}
	}
	for _, id := range ids {
		if at := w.deadline(lease); !least || at > w.taken.scores[id] {
			w.taken.scores[id] = at
		}
	}
	return []int64{1}
}

func (w *world) permitRenew(ids []string, lease int64) (held []int64) {
	for _, id := range ids {
		held = append(held, w.permitExtend([]string{id}, lease, true)...)
	}
	return held
}

// The operations of Redisson.

func (w *world) javaPublish(n int64) { w.messages = append(w.messages, n) }

func (w *world) javaAcquire(n int64) []int64 {
	if !w.exists || w.free < n {
		return []int64{0}
	}
	w.change(-n)
	return []int64{1}
}

func (w *world) javaRelease(n int64) []int64 {
	w.change(n)
	w.javaPublish(w.free)
	return []int64{1}
}

func (w *world) javaDrain() []int64 {
	if !w.exists {
		return []int64{0}
	}
	n := w.free
	w.free, w.until = 0, 0
	return []int64{n}
}

func (w *world) javaAdd(n int64, delta bool) []int64 {
	w.change(n)
	w.until = 0
	if !delta {
		w.javaPublish(w.free)
	} else if n > 0 {
		w.javaPublish(n)
	}
	return []int64{1}
}

// javaSweep frees at most max permits that have expired by the clock of a client.
func (w *world) javaSweep(now int64, max int) {
	var ids []string
	for _, id := range w.taken.order() {
		if w.taken.scores[id] <= now && len(ids) < max {
			ids = append(ids, id)
		}
	}
	if len(ids) > 0 {
		w.change(w.taken.drop(ids...))
		if w.free > 0 {
			w.javaPublish(w.free)
		}
	}
}

func (w *world) javaPermitAcquire(now, deadline int64, ids []string) []int64 {
	w.javaSweep(now, len(ids))
	if !w.exists || w.free < int64(len(ids)) {
		return []int64{0}
	}
	w.change(-int64(len(ids)))
	for _, id := range ids {
		w.taken.scores[id] = deadline
	}
	if w.until > w.now {
		w.taken.until = w.until
	}
	return []int64{1}
}

func (w *world) javaPermitRelease(now int64, id string) []int64 {
	if !w.taken.has(id) {
		return []int64{0}
	}
	at := w.taken.scores[id]
	w.taken.drop(id)
	w.javaRelease(1)
	if at > now {
		return []int64{1}
	}
	return []int64{0}
}

func (w *world) javaPermitSweep(now int64) []int64 {
	w.javaSweep(now, len(w.taken.scores))
	return []int64{w.free}
}
