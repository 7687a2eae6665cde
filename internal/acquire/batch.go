package acquire

import "github.com/redlatch/redlatch/internal/telemetry"

// Together makes one attempt for requests of different keys: in their order, for those before
// the first key that this process holds or waits for, or for all of them if they say Once. It
// calls try with their number, unless that is 0, and try returns a result for each, the
// acquired ones first. It returns the number of these; they are holders until Released.
func (q *Queues[A]) Together(reqs []Request[A], try func(n int) []Result) (acquired int) {
	entries := make([]*entry[A], 0, len(reqs))
	for i := range reqs {
		req := &reqs[i]
		s := q.shardOf(req.Key)
		s.mu.Lock()
		e := s.enter(q, req.Key)
		free := req.Once || e.idle(req)
		switch {
		case !free:
			e.leave()
		case !req.Once:
			e.begin()
		}
		s.mu.Unlock()
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
		req, r := &reqs[i], results[i]
		e.shard.mu.Lock()
		if !req.Once {
			e.attempting = false
		}
		if r.Err == nil && r.Acquired {
			acquired++
			e.joined(req)
			e.enlist(req)
		} else {
			if !req.Once {
				e.nudge(telemetry.Local) // callers that came meanwhile have waited for this attempt
			}
			e.leave()
		}
		e.shard.mu.Unlock()
	}
	return acquired
}
