package robustness

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// takeAll acquires and releases every lock, and ends every latch. It returns those that are stuck
// after the faults, as h has them.
func (r *round) takeAll(t *testing.T, c *redlatch.Client, h *history) (wrongs []string) {
	j, err := openJournal(filepath.Join(r.dir, lastWorker+journalExt))
	require.NoError(t, err)
	defer j.close()
	w := &worker{id: lastWorker, client: c, journal: j}
	wait := 15 * watchdogTimeout // longer than any lease
	if h.mayHaveLeft() {
		wait += detachTime
	}
	works := func(what string, err error) bool {
		if err != nil {
			wrongs = append(wrongs, fmt.Sprintf("%s does not work at the end: %v", what, err))
		}
		return err == nil
	}
	for i, k := range kinds {
		if k.forever {
			continue
		}
		p := player{worker: w, kind: k.name, locks: strings.Join(locksOf(r.seed, i), ",")}
		l := k.of(c, r.seed)
		if k.detach {
			for _, id := range h.notAdopted() {
				if adopted, err := p.adopt(l, id); err == nil {
					p.unlock(adopted)
				}
			}
		}
		h, err := p.acquire(t.Context(), l, l.Lock, wait, []lock.Option{lock.Wait(wait)})
		if works(k.name, err) {
			p.unlock(h)
		}
	}
	for name, n := range map[string]int{"permits": permits, "turns": 1} {
		e := c.PermitSemaphore(lockName(r.seed, name))
		all, err := e.Acquire(t.Context(), n, lock.Wait(wait))
		if works(e.Name(), err) {
			works(e.Name(), all.Release(t.Context()))
		}
		if stats, err := e.Stats(t.Context()); works(e.Name(), err) && stats.Total != n {
			wrongs = append(wrongs, fmt.Sprintf("%s: %d permits at the end, not %d", e.Name(), stats.Total, n))
		}
	}
	for i := range latches {
		p := player{worker: w}
		l := c.CountDownLatch(latchName(r.seed, i))
		p.useLatch(l, readCount, l.Count)
		if left, err := l.Count(t.Context()); works(l.Name(), err) && left > 0 {
			_, err = l.CountDownN(t.Context(), left)
			works(l.Name(), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		works(l.Name(), l.Wait(ctx))
		cancel()
	}
	return wrongs
}

// countPermits checks the number of free permits at the end of a round without wipes: what was
// acquired and not released is missing, and nothing else. Requests with an unknown outcome may
// have had an effect or not, and so may those that a process was to undo when it was killed, or
// closed its client before the server answered.
func (h *history) countPermits(t *testing.T, c *redlatch.Client, seed uint64) (wrongs []string) {
	name := lockName(seed, "counting")
	if len(h.wipesOf(name)) > 0 {
		return nil
	}
	most, least := permits, permits
	for _, c := range h.claims {
		switch {
		case c.kind != "counting":
		case c.acquired() && c.unlocking == 0: // its process was killed
			most, least = most-1, least-1
		case c.acquired() && c.release == fine:
		case c.failure == refused && h.ended[c.worker()] && !h.disturbed(c.called, c.returned):
		default:
			least--
		}
	}
	free := 0
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		var err error
		free, err = c.Semaphore(name).Available(t.Context())
		require.NoError(t, err)
		if least <= free && free <= most {
			return nil
		}
	}
	return []string{fmt.Sprintf("%s: %d permits are free at the end, not %d to %d", name, free, least, most)}
}

// clear deletes what objects leave on the server. Of the keys that only redlatch knows, each must
// expire, except the tokens of elections.
func (r *round) clear(t *testing.T) {
	conn := harness.Conn(t, r.server.Addr)
	var names []string
	for _, name := range []string{"fenced", "election", "permits", "counting", "owned2", "turns"} {
		names = append(names, lockName(r.seed, name))
	}
	for i := range latches {
		names = append(names, latchName(r.seed, i))
	}
	for _, name := range names {
		keys, err := conn.Do(t.Context(), conn.B().Keys().Pattern("*"+name+"*").Build()).AsStrSlice()
		require.NoError(t, err)
		for _, key := range keys {
			if strings.HasPrefix(key, "redlatch_") && key != wire.ElectionTerm(name) {
				require.NotEqual(t, int64(-1), harness.PTTL(t, r.server.Addr, key), key)
			}
			harness.Do(t, r.server.Addr, "DEL", key)
		}
	}
}
