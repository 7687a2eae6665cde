package acquire

// Together makes one attempt for requests of different keys: in their order, for those before
// the first key that this process holds or waits for, or for all of them if they say Once. It
// calls try with their number, unless that is 0, and try returns how many of them have acquired,
// from the first on. It returns the same number; these are holders until Released.
func (q *Queues) Together(reqs []Request, try func(n int) (acquired int)) (acquired int) {
	entries := make([]*entry, 0, 4) // more are rare, and take an allocation
	for i := range reqs {
		req := &reqs[i]
		e := q.enter(&req.Key)
		free := e.begin(req) || req.Once
		if !free {
			e.leave()
		}
		e.shard.mu.Unlock()
		if !free {
			break
		}
		entries = append(entries, e)
	}
	if len(entries) == 0 {
		return 0
	}
	acquired = try(len(entries))
	for i, e := range entries {
		e.shard.mu.Lock()
		e.finish(&reqs[i], !reqs[i].Once, i < acquired)
		e.shard.mu.Unlock()
	}
	return acquired
}
