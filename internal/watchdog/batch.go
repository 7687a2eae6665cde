package watchdog

import (
	"cmp"
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/redlatch/redlatch/lock"
)

const (
	// batchSize bounds the leases that one script renews. A script blocks the server
	// while it runs: a hundred keys take well under a millisecond.
	batchSize = 100
	// A wave is the leases of one Renew call: an oversized wave would be late as a whole. Its
	// size is the sum of their weights.
	// Where each slot needs a script of its own, maxSlotWave bounds the scripts, too.
	maxWave     = 5000
	maxSlotWave = 512
	// maxWorkers bounds the concurrent waves of a pool.
	maxWorkers = 8
	// maxRenewTimeout bounds one attempt, so that several fit within a lease even if
	// the server does not answer.
	maxRenewTimeout = 2 * time.Second
)

// Renewer extends leases of one kind on the server. It is comparable.
type Renewer interface {
	// Renew extends the lease of every subject of every batch to ttl from now. The keys of a batch
	// share a slot. Requests use a dedicated connection, which other commands cannot delay, and
	// which may have to be made first. With shared set they use the connection of all commands.
	// Retries use either in turn.
	Renew(ctx context.Context, batches [][]Subject, ttl time.Duration, shared bool) []Renewed
}

// Renewed is the outcome for one batch.
type Renewed struct {
	// Held reports for each lease whether its owner still holds it. A key of the wrong
	// type is not held.
	Held []bool
	// Err is set if the outcome of the whole batch is unknown, and Errs if the outcome of some leases
	// is: it has an error or nil for each.
	Err  error
	Errs []error
}

// ErrOf returns the error of the i-th lease, nil if Held has its outcome.
func (r Renewed) ErrOf(i int) error {
	if r.Err != nil || r.Errs == nil {
		return r.Err
	}
	return r.Errs[i]
}

// renewal describes how leases are renewed.
type renewal struct {
	renewer Renewer
	ttl     time.Duration
	quiet   bool
	pool    int32
	far     bool
	shared  bool
}

// pool holds pending renewals and counts the workers that send them. Retries have their
// own pool: a node that does not answer delays them, and must not delay the others.
type pool struct {
	pending map[renewal][]*Lease
	workers int
}

// dispatch has the leases that are due renewed. It runs on the wheel's goroutine after each
// wake-up.
func (wd *Watchdog) dispatch() {
	if len(wd.due) == 0 {
		return
	}

	wd.mu.Lock()
	defer wd.mu.Unlock()

	if wd.closed {
		return
	}

	for how, leases := range wd.due {
		p := &wd.pools[how.pool]
		p.pending[how] = append(p.pending[how], leases...)
		wd.startWorkerLocked(p)
	}

	clear(wd.due)
}

// startWorkerLocked adds a worker to a pool with pending renewals, unless it has enough. Workers
// exist only while renewals are pending.
func (wd *Watchdog) startWorkerLocked(p *pool) {
	if len(p.pending) > 0 && p.workers < maxWorkers {
		p.workers++
		wd.done.Go(func() { wd.work(p) })
	}
}

// work renews the pending leases of a pool in waves until none is left.
func (wd *Watchdog) work(p *pool) {
	size := maxWave
	if wd.cfg.Slot != nil {
		size = maxSlotWave
	}
	wd.mu.Lock()
	defer wd.mu.Unlock()

	for len(p.pending) > 0 {
		for how, leases := range p.pending {
			n := waveOf(leases, size)
			if p.pending[how] = leases[n:]; n == len(leases) {
				delete(p.pending, how)
			}
			wd.startWorkerLocked(p) // for the rest
			wd.mu.Unlock()
			wd.renew(how, leases[:n])
			wd.mu.Lock()
		}
	}

	p.workers--
}

// waveOf returns how many of the leases, from the first on, are a wave of that size: at least one.
func waveOf(leases []*Lease, size int) int {
	for n, l := range leases {
		if size -= max(1, int(l.Weight)); size < 0 {
			return max(n, 1)
		}
	}
	return len(leases)
}

// renew renews a wave in batches that share a slot.
func (wd *Watchdog) renew(how renewal, wave []*Lease) {
	type slotLeases struct {
		leases   []*Lease
		subjects []Subject
	}
	slots := make(map[int]slotLeases)
	for _, l := range wave {
		if !l.isRenewing() { // it was forgotten meanwhile
			continue
		}
		slot := 0
		subject := l.holder.Leased()
		if wd.cfg.Slot != nil {
			slot = wd.cfg.Slot(subject.Key)
		}
		of := slots[slot]
		slots[slot] = slotLeases{append(of.leases, l), append(of.subjects, subject)}
	}

	var batches [][]*Lease
	var subjects [][]Subject
	for _, of := range slots {
		batches = slices.AppendSeq(batches, slices.Chunk(of.leases, batchSize))
		subjects = slices.AppendSeq(subjects, slices.Chunk(of.subjects, batchSize))
	}
	if len(batches) == 0 {
		return
	}

	ctx, cancel := context.WithTimeout(wd.ctx, how.attemptTime(batches))
	defer cancel()

	sent := time.Now()
	results := how.renewer.Renew(ctx, subjects, how.ttl, how.shared)
	now := time.Now()
	for b, batch := range batches {
		r := results[b]
		least := time.Duration(math.MaxInt64) // remaining in this batch
		for i, l := range batch {
			err := r.ErrOf(i)
			least = min(least, wd.apply(l, sent, now, how.ttl, err, err == nil && r.Held[i]))
		}
		if wd.cfg.OnRenew != nil && !how.quiet {
			wd.cfg.OnRenew(least, cmp.Or(append(r.Errs, r.Err)...))
		}
	}
}

// attemptTime bounds an attempt. From a near server the reply takes a fraction of that, and the rest of the
// lease is for several more attempts. From a far one it takes no longer than the last reply, or else the third of the
// lease that has passed since then, and a quarter more for variation. Leases whose reply comes in time do not end
// because others in the wave have none.
func (how renewal) attemptTime(batches [][]*Lease) time.Duration {
	limit := how.ttl / 6
	if how.far {
		left := time.Duration(math.MaxInt64)
		for _, l := range slices.Concat(batches...) {
			left = min(left, l.untilDeadline())
		}
		age := max(how.ttl/3, how.ttl-left)
		limit = max(limit, min(age+age/4, left-tick))
	}

	return min(maxRenewTimeout, limit)
}

// IsFar reports whether an attempt to renew a lease to ttl is too short for a new connection, which takes
// several round trips, if a request on an open one took that long.
func IsFar(took, ttl time.Duration) bool { return took > min(maxRenewTimeout, ttl/6)/6 }

// apply records the outcome of a renewal and returns what was left of the lease.
func (wd *Watchdog) apply(l *Lease, sent, now time.Time, ttl time.Duration, err error, held bool) time.Duration {
	l.mu.Lock()
	left := time.Duration(l.deadline - wd.wheel.instant(now))
	renewed := l.state == renewing // otherwise it was forgotten or has ended meanwhile
	if renewed && err != nil {
		l.failures++
		l.lastErr = err
	}
	over := l.endIfOverLocked(now) // others may have seen that it had ended, or have taken the lock
	if !over && renewed {
		if err == nil && !held {
			l.loseLocked(lock.ReasonGone, nil)
			over = true
		} else {
			l.renewedLocked(sent, now, ttl, left, err)
		}
	}
	l.mu.Unlock()

	if over {
		l.tell()
	} else if renewed && err != nil {
		l.holder.RenewalFailed(err, left)
	}
	return left
}

// renewedLocked records the outcome of the renewal of a lease that goes on.
func (l *Lease) renewedLocked(sent, now time.Time, ttl, left time.Duration, err error) {
	wd := l.watchdog
	l.state = watched
	if err != nil {
		l.renewAt = wd.wheel.instant(now.Add(retryDelay(l.failures, left)))
	} else {
		l.failures = 0
		l.lastErr = nil
		if l.renewer != nil { // otherwise it was fixed meanwhile
			l.far = IsFar(now.Sub(sent), ttl)
			l.deadline = max(l.deadline, l.certainUntil(sent, ttl))
			l.renewAt = wd.renewalTime(sent, min(ttl, l.ttl)) // it may have been changed meanwhile
		}
	}
	l.scheduleLocked()
}

// retryDelay is the pause before a retry: it doubles from 100 ms to a second, is at
// most a quarter of the remaining lease, and half of it is random so that holders do
// not retry in step.
func retryDelay(failures int32, left time.Duration) time.Duration {
	delay := min(100*time.Millisecond<<min(failures-1, 4), time.Second, left/4)
	if delay < tick {
		return tick
	}
	return delay/2 + rand.N(delay/2)
}
