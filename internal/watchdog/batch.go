package watchdog

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/redlatch/redlatch/lock"
)

const (
	// batchSize bounds the leases that one script renews. A script blocks the server
	// while it runs: a hundred keys take well under a millisecond.
	batchSize = 100
	// maxWave bounds the batches of one Renew call, and maxWaveLeases the leases in
	// them: an oversized wave would be late as a whole.
	maxWave       = 512
	maxWaveLeases = 5000
	// maxWorkers bounds the concurrent waves of a pool.
	maxWorkers = 8
	// maxRenewTimeout bounds one attempt, so that several fit within a lease even if
	// the server does not answer.
	maxRenewTimeout = 2 * time.Second
)

// Renewer extends leases of one kind on the server. It is comparable.
type Renewer interface {
	// Renew extends every lease of every batch to ttl from now. The keys of a batch
	// share a slot. Requests use a dedicated connection, which other commands cannot delay.
	// With shared set, as for every other retry, they use the connection of all commands.
	Renew(ctx context.Context, batches [][]*Lease, ttl time.Duration, shared bool) []Renewed
}

// Renewed is the outcome for one batch.
type Renewed struct {
	// Held reports for each lease whether its owner still holds it. A key of the wrong
	// type is not held.
	Held []bool
	// Err is set if the outcome of the whole batch is unknown.
	Err error
}

// pool holds pending renewals and counts the workers that send them. Retries have their
// own pool: a node that does not answer delays them, and must not delay the others.
type pool struct {
	pending map[renewal][][]*Lease
	workers int
}

// renewal describes how a batch is renewed.
type renewal struct {
	renewer Renewer
	ttl     time.Duration
	quiet   bool
	shared  bool
}

// dispatch splits the leases that are due into batches of one renewal and slot. It runs
// on the wheel's goroutine after each wake-up.
func (wd *Watchdog) dispatch() {
	if len(wd.due) == 0 {
		return
	}
	type group struct {
		renewal
		slot int
		pool int
	}
	groups := make(map[group][]*Lease)
	for _, l := range wd.due {
		failures := l.failureCount()
		g := group{renewal: renewal{l.renewer, l.ttl, l.quiet, failures%2 == 1}}
		if wd.cfg.Slot != nil {
			g.slot = wd.cfg.Slot(l.Key)
		}
		if failures > 0 {
			g.pool = 1
		}
		groups[g] = append(groups[g], l)
	}
	clear(wd.due)
	wd.due = wd.due[:0]

	wd.mu.Lock()
	defer wd.mu.Unlock()
	if wd.closed {
		return
	}
	for g, leases := range groups {
		p := &wd.pools[g.pool]
		p.pending[g.renewal] = slices.AppendSeq(p.pending[g.renewal], slices.Chunk(leases, batchSize))
		for begun := 0; begun < len(leases) && p.workers < maxWorkers; begun += maxWaveLeases {
			p.workers++
			wd.done.Go(func() { wd.work(p) })
		}
	}
}

// work renews the pending batches of a pool in waves until none is left. Workers exist
// only while renewals are pending.
func (wd *Watchdog) work(p *pool) {
	for {
		how, wave := wd.next(p)
		if wave == nil {
			return
		}
		wd.renew(how, wave)
	}
}

func (wd *Watchdog) next(p *pool) (renewal, [][]*Lease) {
	wd.mu.Lock()
	defer wd.mu.Unlock()
	if !wd.closed {
		for how, batches := range p.pending {
			n := 0
			for leases := 0; n < min(maxWave, len(batches)) && leases < maxWaveLeases; n++ {
				leases += len(batches[n])
			}
			if n == len(batches) {
				delete(p.pending, how)
			} else {
				p.pending[how] = batches[n:]
			}
			return how, batches[:n]
		}
	}
	p.workers--
	return renewal{}, nil
}

func (wd *Watchdog) renew(how renewal, wave [][]*Lease) {
	live := make([][]*Lease, 0, len(wave))
	for _, batch := range wave {
		// Leases forgotten meanwhile are not renewed.
		batch = slices.DeleteFunc(batch, func(l *Lease) bool { return !l.isRenewing() })
		if len(batch) > 0 {
			live = append(live, batch)
		}
	}
	if len(live) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(wd.ctx, min(maxRenewTimeout, how.ttl/6))
	defer cancel()
	sent := time.Now()
	results := how.renewer.Renew(ctx, live, how.ttl, how.shared)
	now := time.Now()
	for b, batch := range live {
		r := results[b]
		var least time.Duration // remaining in this batch
		for i, l := range batch {
			left := wd.apply(l, sent, now, how.ttl, r.Err, r.Err == nil && r.Held[i])
			if i == 0 || left < least {
				least = left
			}
		}
		if wd.cfg.OnRenew != nil && !how.quiet {
			wd.cfg.OnRenew(least, r.Err)
		}
	}
}

// apply records the outcome of a renewal and returns what was left of the lease.
func (wd *Watchdog) apply(l *Lease, sent, now time.Time, ttl time.Duration, err error, held bool) time.Duration {
	l.mu.Lock()
	left := time.Duration(l.deadline - wd.wheel.instant(now))
	if err != nil && l.state == renewing {
		if l.failures == nil {
			l.failures = new(failures)
		}
		l.failures.count++
		l.failures.last = err
	}
	if reason, cause := l.overdue(now); reason != "" {
		// Others may have seen that it had ended, or have taken the lock.
		l.lose(reason, cause)
		return left
	}
	switch {
	case l.state != renewing: // forgotten or ended meanwhile
	case err != nil:
		l.state = watched
		l.renewAt = wd.wheel.instant(now.Add(retryDelay(l.failures.count, left)))
		l.schedule()
		h := l.holder
		l.mu.Unlock()
		h.RenewalFailed(err, left)
		return left
	case !held:
		l.lose(lock.ReasonGone, nil)
		return left
	default:
		l.state, l.failures = watched, nil
		if l.fixed { // during the renewal
			l.schedule()
			break
		}
		l.deadline = max(l.deadline, wd.wheel.instant(sent.Add(ttl)))
		l.renewAt = wd.renewalTime(sent, min(ttl, l.ttl)) // it may have been changed meanwhile
		l.schedule()
	}
	l.mu.Unlock()
	return left
}

// retryDelay is the pause before a retry: it doubles from 100 ms to a second, is at
// most a quarter of the remaining lease, and half of it is random so that holders do
// not retry in step.
func retryDelay(failures int, left time.Duration) time.Duration {
	delay := min(100*time.Millisecond<<min(failures-1, 4), time.Second, left/4)
	if delay < tick {
		return tick
	}
	return delay/2 + rand.N(delay/2)
}
