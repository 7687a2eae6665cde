package acquire

// Together makes one attempt for requests of different keys: in their order, for those before
// the first key that this process holds or waits for, or for all of them if they say Once. It
// calls try with their number, unless that is 0, and try returns a result for each, the
// acquired ones first. It returns the number of these; they are holders until Released.
func (q *Queues[A]) Together(reqs []Request[A], try func(n int) []Result) (acquired int) {
	entries := make([]*entry[A], 0, len(reqs))
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
	results := try(len(entries))
	for i, e := range entries {
		ok := results[i].Err == nil && results[i].Acquired
		if ok {
			acquired++
		}
		e.shard.mu.Lock()
		e.finish(&reqs[i], !reqs[i].Once, ok)
		e.shard.mu.Unlock()
	}
	return acquired
}
