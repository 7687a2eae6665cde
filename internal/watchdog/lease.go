package watchdog

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/lock"
)

const (
	// batchSize is how many leases one script renews at most. A script blocks
	// the server while it runs: a hundred keys take it well under a millisecond.
	batchSize = 100
	// maxWave is how many batches are sent together at most, and maxWaveLeases
	// how many leases are in them: a wave that is too much for its time is late
	// as a whole.
	maxWave       = 512
	maxWaveLeases = 5000
	// maxWorkers is how many waves of a lane are under way at once at most.
	maxWorkers = 8
	// maxRenewTimeout bounds one try, so that there is time for several within
	// a lease even when the server does not answer.
	maxRenewTimeout = 2 * time.Second
)

// Holder is told what becomes of its lease, until Forget, on a goroutine of the
// watchdog. Its methods must not block.
type Holder interface {
	// Lost is called once at most, when the lease has ended; also on the goroutine
	// of who calls Check.
	Lost(reason lock.Reason, cause error)
	// RenewalFailed is called when a renewal has failed, with what is left of the
	// lease. It is tried again. The call may come just after Forget.
	RenewalFailed(err error, left time.Duration)
}

// Renewer extends leases of one kind on the server. It is comparable.
type Renewer interface {
	// Renew gives every lease of every batch ttl from now. The keys of a batch
	// are of one slot. detour is set for every second try after a failure: it
	// should go another way, if there is one.
	Renew(ctx context.Context, batches [][]*Lease, ttl time.Duration, detour bool) []Renewed
}

// Renewed is what became of a batch.
type Renewed struct {
	// Held says for each lease whether its owner still has it. A key of the
	// wrong type is a lease its owner does not have.
	Held []bool
	// Err is set if the outcome of the whole batch is not known.
	Err error
}

// Lease is the time for which somebody owns something on the server, to be
// embedded in that somebody. Its states:
//
//	        Watch                 due            Renew says yes
//	(zero) ─────▶ watched ─────────────▶ renewing ─────▶ watched
//	                 │                      │
//	                 │ Forget               │ Forget        ▶ over
//	                 │ local deadline       │ local deadline, or Renew says no
//
// Over is final: nothing renews a lease that has been over.
type Lease struct {
	Key    string
	Owner  string
	Ticket string // a key that lives as long as the lease; "" if there is none

	timer Timer

	mu       sync.Mutex
	dog      *Dog
	holder   Holder
	renewer  Renewer // nil: it ends with its time
	state    leaseState
	fixed    bool // so that it ends, though there is a renewer
	quiet    bool
	ttl      time.Duration // what a renewal gives it
	deadline instant       // until when ownership is certain
	renewAt  instant
	end      instant  // of MaxHold; zero: none
	trouble  *trouble // nil if the last renewal has succeeded, or there was none
}

// trouble is what renewals that fail leave behind.
type trouble struct {
	failures int // in a row
	last     error
}

type leaseState uint8

const (
	_ leaseState = iota
	watched
	renewing
	over
)

// Config is what a Dog needs to know.
type Config struct {
	// Slot tells which keys one script can touch; nil where any can.
	Slot func(key string) int
	// OnRenew is called after each confirmed batch with what was left of the
	// lease that had least, and after each that failed with the error, but not for
	// leases that are Quiet. It may be nil.
	OnRenew func(remaining time.Duration, err error)
}

// Dog watches leases: it renews those that want it and ends those whose time
// is over.
type Dog struct {
	cfg   Config
	wheel *Wheel
	due   []*Lease // only touched by the wheel's goroutine

	ctx    context.Context // of the renewals
	cancel context.CancelFunc

	mu     sync.Mutex
	lanes  [2]lane // for leases as they fall due, and for those that failed
	closed bool
	done   sync.WaitGroup
}

// lane is renewals that share workers. Those that have failed have their own:
// a node that does not answer holds them up, and must not hold up the rest.
type lane struct {
	pending map[way][][]*Lease
	workers int
}

// way is how a batch is renewed.
type way struct {
	renewer Renewer
	ttl     time.Duration
	quiet   bool
	detour  bool
}

// NewDog returns a watchdog that runs until Close.
func NewDog(cfg Config) *Dog {
	d := &Dog{cfg: cfg}
	for i := range d.lanes {
		d.lanes[i] = lane{pending: make(map[way][][]*Lease)}
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.wheel = NewWheel(d.dispatch)
	return d
}

// Wheel returns the wheel that the leases hang on, for others to share.
func (d *Dog) Wheel() *Wheel { return d.wheel }

// Terms are the conditions under which a lease is watched.
type Terms struct {
	Sent    time.Time     // when the request that took it was sent
	TTL     time.Duration // its length, after a third of which renewal is due
	Renewer Renewer       // nil: it ends with TTL
	MaxHold time.Duration // 0: no bound
	Quiet   bool          // OnRenew is not to hear of it
}

// Watch begins to watch l, which nobody watches yet. It reports false if the
// watchdog is closed, in which case h hears nothing.
func (d *Dog) Watch(l *Lease, h Holder, terms Terms) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dog, l.holder, l.renewer, l.state = d, h, terms.Renewer, watched
	l.ttl, l.quiet = terms.TTL, terms.Quiet
	l.deadline = d.wheel.instant(terms.Sent.Add(terms.TTL))
	l.renewAt = d.renewalTime(terms.Sent, terms.TTL)
	if terms.MaxHold > 0 {
		l.end = d.wheel.instant(terms.Sent.Add(terms.MaxHold))
	}
	l.schedule()
	return true
}

// renewalTime is a third into the lease, moved forward to the next of 32 marks
// in that third: leases that were taken at nearly the same time are renewed by
// one script.
func (d *Dog) renewalTime(sent time.Time, ttl time.Duration) instant {
	grid := instant(ttl / 96)
	at := d.wheel.instant(sent.Add(ttl / 3))
	if grid < instant(tick) {
		return at
	}
	return at - at%grid
}

// Forget ends the watch: no renewal is begun any more, and its holder hears no
// more of it, unless Lost has been called already. It is called before a
// release is sent.
func (l *Lease) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == watched || l.state == renewing {
		l.state = over
		l.dog.wheel.Cancel(&l.timer)
	}
}

// Holder returns who was given to Watch.
func (l *Lease) Holder() Holder {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holder
}

// Remaining returns for how long ownership is still certain, 0 if it is not.
func (l *Lease) Remaining() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != watched && l.state != renewing {
		return 0
	}
	until := l.deadline
	if l.end != 0 {
		until = min(until, l.end)
	}
	return max(0, time.Duration(until-l.dog.wheel.instant(time.Now())))
}

// Check ends the lease if its time is over and the wheel has not come to it yet.
func (l *Lease) Check() {
	l.mu.Lock()
	if reason, cause := l.overdue(time.Now()); reason != "" {
		l.finish(reason, cause)
		return
	}
	l.mu.Unlock()
}

// Extended notes that a request sent at sent gave the lease at least ttl, unless
// it is over by now.
func (l *Lease) Extended(sent time.Time, ttl time.Duration) {
	l.Check()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != watched && l.state != renewing {
		return
	}
	if until := l.dog.wheel.instant(sent.Add(ttl)); until > l.deadline {
		l.deadline = until
		l.schedule()
	}
}

// Fix makes the lease end ttl after sent, whatever it was before. It is not renewed
// any more.
func (l *Lease) Fix(sent time.Time, ttl time.Duration) {
	l.Check()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == watched || l.state == renewing {
		l.fixed, l.deadline = true, l.dog.wheel.instant(sent.Add(ttl))
		l.schedule()
	}
}

// EndAt ends the lease at that time, whatever is renewed until then: it is a MaxHold
// that was not known to Watch.
func (l *Lease) EndAt(at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == watched || l.state == renewing {
		l.end = l.dog.wheel.instant(at)
		l.schedule()
	}
}

// Expire is called by the wheel.
func (l *Lease) Expire(now time.Time) {
	l.mu.Lock()
	if reason, cause := l.overdue(now); reason != "" {
		l.finish(reason, cause)
		return
	}
	defer l.mu.Unlock()
	if l.state != watched && l.state != renewing {
		return
	}
	if l.renews() && l.dog.wheel.instant(now) >= l.renewAt {
		l.state = renewing
		l.dog.due = append(l.dog.due, l)
	}
	l.schedule()
}

// overdue returns how a lease that is not over yet should be by now, "" if it
// should not. l.mu is held.
func (l *Lease) overdue(now time.Time) (lock.Reason, error) {
	if l.state != watched && l.state != renewing {
		return "", nil
	}
	at := l.dog.wheel.instant(now)
	switch {
	case l.end != 0 && at >= l.end:
		return lock.ReasonMaxHold, nil
	case at < l.deadline:
		return "", nil
	case l.trouble != nil:
		return lock.ReasonExpired, l.trouble.last
	default:
		return lock.ReasonExpired, nil
	}
}

// Renewed reports whether the lease is one that is renewed.
func (l *Lease) Renewed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.renewer != nil && !l.fixed
}

// renews reports whether the lease is to be renewed when it is time. l.mu is held.
func (l *Lease) renews() bool { return l.state == watched && l.renewer != nil && !l.fixed }

// schedule puts the lease on the wheel for the next thing that happens to it.
// l.mu is held.
func (l *Lease) schedule() {
	at := l.deadline
	if l.renews() {
		at = min(at, l.renewAt)
	}
	if l.end != 0 {
		at = min(at, l.end)
	}
	l.dog.wheel.scheduleAt(&l.timer, at, l)
}

// finish ends the lease as lost. l.mu is held, and released.
func (l *Lease) finish(reason lock.Reason, cause error) {
	l.state = over
	l.dog.wheel.Cancel(&l.timer)
	h := l.holder
	l.mu.Unlock()
	h.Lost(reason, cause)
}

// dispatch runs on the wheel's goroutine after each of its wake-ups: it cuts
// what has become due into batches of one kind and slot.
func (d *Dog) dispatch() {
	if len(d.due) == 0 {
		return
	}
	type group struct {
		way
		slot int
		lane int
	}
	groups := make(map[group][]*Lease)
	for _, l := range d.due {
		failures := l.failed()
		g := group{way: way{l.renewer, l.ttl, l.quiet, failures%2 == 1}}
		if d.cfg.Slot != nil {
			g.slot = d.cfg.Slot(l.Key)
		}
		if failures > 0 {
			g.lane = 1
		}
		groups[g] = append(groups[g], l)
	}
	clear(d.due)
	d.due = d.due[:0]

	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	for g, leases := range groups {
		la := &d.lanes[g.lane]
		la.pending[g.way] = slices.AppendSeq(la.pending[g.way], slices.Chunk(leases, batchSize))
		for begun := 0; begun < len(leases) && la.workers < maxWorkers; begun += maxWaveLeases {
			la.workers++
			d.done.Go(func() { d.work(la) })
		}
	}
}

// work renews what is pending in a lane, all of it together, until nothing is.
// Workers live only while there is something to renew.
func (d *Dog) work(la *lane) {
	for {
		by, wave := d.next(la)
		if wave == nil {
			return
		}
		d.renew(by, wave)
	}
}

func (d *Dog) next(la *lane) (way, [][]*Lease) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		for by, batches := range la.pending {
			n := 0
			for leases := 0; n < min(maxWave, len(batches)) && leases < maxWaveLeases; n++ {
				leases += len(batches[n])
			}
			if n == len(batches) {
				delete(la.pending, by)
			} else {
				la.pending[by] = batches[n:]
			}
			return by, batches[:n]
		}
	}
	la.workers--
	return way{}, nil
}

func (d *Dog) renew(by way, wave [][]*Lease) {
	live := make([][]*Lease, 0, len(wave))
	for _, batch := range wave {
		// What was forgotten while it was pending is not renewed any more.
		batch = slices.DeleteFunc(batch, func(l *Lease) bool { return !l.isRenewing() })
		if len(batch) > 0 {
			live = append(live, batch)
		}
	}
	if len(live) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(d.ctx, min(maxRenewTimeout, by.ttl/6))
	defer cancel()
	sent := time.Now()
	results := by.renewer.Renew(ctx, live, by.ttl, by.detour)
	now := time.Now()
	for b, batch := range live {
		r := results[b]
		var least time.Duration // that was left in this batch
		for i, l := range batch {
			left := d.settle(l, sent, now, r.Err, r.Err == nil && r.Held[i])
			if i == 0 || left < least {
				least = left
			}
		}
		if d.cfg.OnRenew != nil && !by.quiet {
			d.cfg.OnRenew(least, r.Err)
		}
	}
}

// settle notes the outcome of a renewal and returns what was left of the lease.
func (d *Dog) settle(l *Lease, sent, now time.Time, err error, held bool) time.Duration {
	l.mu.Lock()
	left := time.Duration(l.deadline - d.wheel.instant(now))
	if err != nil && l.state == renewing {
		if l.trouble == nil {
			l.trouble = new(trouble)
		}
		l.trouble.failures++
		l.trouble.last = err
	}
	if reason, cause := l.overdue(now); reason != "" {
		// Somebody may have seen that it is over, or have had the lock.
		l.finish(reason, cause)
		return left
	}
	switch {
	case l.state != renewing: // forgotten or expired meanwhile
	case err != nil:
		l.state = watched
		l.renewAt = d.wheel.instant(now.Add(retryDelay(l.trouble.failures, left)))
		l.schedule()
		h := l.holder
		l.mu.Unlock()
		h.RenewalFailed(err, left)
		return left
	case !held:
		l.finish(lock.ReasonGone, nil)
		return left
	default:
		l.state, l.trouble = watched, nil
		if l.fixed { // meanwhile
			l.schedule()
			break
		}
		l.deadline = max(l.deadline, d.wheel.instant(sent.Add(l.ttl)))
		l.renewAt = d.renewalTime(sent, l.ttl)
		l.schedule()
	}
	l.mu.Unlock()
	return left
}

func (l *Lease) isRenewing() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == renewing
}

// failed returns how often in a row its renewal has failed.
func (l *Lease) failed() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.trouble == nil {
		return 0
	}
	return l.trouble.failures
}

// retryDelay spreads the tries after a failure: doubling from 100 ms to a
// second, at most a quarter of what is left of the lease, with half of it
// random so that many holders do not come back together.
func retryDelay(failures int, left time.Duration) time.Duration {
	d := min(100*time.Millisecond<<min(failures-1, 4), time.Second, left/4)
	if d < tick {
		return tick
	}
	return d/2 + rand.N(d/2)
}

// Close stops everything, tells the holders of all leases still watched that
// they are lost because the client is closed, and waits for renewals under way.
// It must not be called from a Holder or Renewer.
func (d *Dog) Close() {
	d.mu.Lock()
	closed := d.closed
	d.closed = true
	d.mu.Unlock()
	d.cancel()
	d.wheel.Stop()
	if !closed {
		for _, target := range d.wheel.drain() {
			if l, ok := target.(*Lease); ok {
				l.mu.Lock()
				if l.state == watched || l.state == renewing {
					l.finish(lock.ReasonClosed, nil)
				} else {
					l.mu.Unlock()
				}
			}
		}
	}
	d.done.Wait()
}
