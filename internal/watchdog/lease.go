package watchdog

import (
	"sync"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Holder is notified of changes of its lease until Forget. Its methods run on a
// goroutine of the watchdog and must not block.
type Holder interface {
	// Lost is called at most once, when the lease has ended. Check may call it on the
	// caller's goroutine.
	Lost(reason lock.Reason, cause error)
	// RenewalFailed is called after a failed renewal, which is retried, with the
	// remaining time of the lease. The call may come just after Forget.
	RenewalFailed(err error, left time.Duration)
}

// Lease is the period for which an owner holds a key, to be embedded in a Holder. Its
// states:
//
//	        Watch              due            Renew: held
//	(zero) ─────▶ watched ──────────▶ renewing ─────▶ watched
//	                 │                   │
//	                 │ Forget            │ Forget               ▶ ended
//	                 │ local deadline    │ local deadline, or Renew: not held
//
// ended is final: an ended lease is never renewed.
type Lease struct {
	Key   string
	Owner string

	timer Timer

	mu       sync.Mutex
	watchdog *Watchdog
	holder   Holder
	renewer  Renewer // nil: not renewed
	state    leaseState
	fixed    bool // not renewed any more
	quiet    bool
	ttl      time.Duration // length after a renewal
	deadline instant       // end of certain ownership
	renewAt  instant
	end      instant   // from MaxHold; zero: none
	failures *failures // nil unless the last renewal failed
}

// failures describes consecutive failed renewals.
type failures struct {
	count int // consecutive
	last  error
}

type leaseState uint8

const (
	_ leaseState = iota
	watched
	renewing
	ended
)

// Forget stops watching: no further renewal begins, and the holder is not notified any
// more, unless Lost has been called already. Call it before sending a release.
func (l *Lease) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == watched || l.state == renewing {
		l.state = ended
		l.watchdog.wheel.Cancel(&l.timer)
	}
}

// Holder returns the holder that was passed to Watch.
func (l *Lease) Holder() Holder {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holder
}

// Remaining returns the time for which ownership is certain, 0 if it is not.
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
	return max(0, time.Duration(until-l.watchdog.wheel.instant(time.Now())))
}

// Check ends the lease if it has run out and the wheel has not noticed yet.
func (l *Lease) Check() {
	l.mu.Lock()
	if reason, cause := l.overdue(time.Now()); reason != "" {
		l.lose(reason, cause)
		return
	}
	l.mu.Unlock()
}

// Extended records that a request sent at sent has extended the lease to at least ttl.
// It has no effect on an ended lease.
func (l *Lease) Extended(sent time.Time, ttl time.Duration) {
	l.Check()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != watched && l.state != renewing {
		return
	}
	if until := l.watchdog.wheel.instant(sent.Add(ttl)); until > l.deadline {
		l.deadline = until
		l.schedule()
	}
}

// Fix makes the lease end ttl after sent and stops its renewal.
func (l *Lease) Fix(sent time.Time, ttl time.Duration) {
	l.Check()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == watched || l.state == renewing {
		l.fixed, l.deadline = true, l.watchdog.wheel.instant(sent.Add(ttl))
		l.schedule()
	}
}

// Separate moves the end that the lease has by itself, that of MaxHold or else that of a
// lease that is not renewed, to a lease of its own, which is watched for h and not renewed.
func (l *Lease) Separate(h Holder) *Lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	own := &Lease{watchdog: l.watchdog, holder: h, state: ended, deadline: l.deadline, end: l.end}
	if l.state != watched && l.state != renewing {
		return own
	}
	own.state = watched
	if l.renewer != nil && !l.fixed {
		own.deadline = l.end
	}
	l.end = 0
	own.schedule()
	l.schedule()
	return own
}

// Renew has the lease renewed from now on, by renewer and to ttl.
func (l *Lease) Renew(renewer Renewer, ttl time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	live := l.state == watched || l.state == renewing
	if !live || l.renewer != nil && !l.fixed && l.ttl == ttl {
		return
	}
	l.renewer, l.fixed, l.ttl = renewer, false, ttl
	l.renewAt = min(l.deadline-instant(ttl*2/3), l.watchdog.wheel.instant(time.Now().Add(ttl/3)))
	l.schedule()
}

// StopRenewing leaves the lease to its end.
func (l *Lease) StopRenewing() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == watched || l.state == renewing {
		l.fixed = true
		l.schedule()
	}
}

// EndAt ends the lease at the given time regardless of renewals: a MaxHold that was
// unknown at Watch.
func (l *Lease) EndAt(at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == watched || l.state == renewing {
		l.end = l.watchdog.wheel.instant(at)
		l.schedule()
	}
}

// Expire is called by the wheel.
func (l *Lease) Expire(now time.Time) {
	l.mu.Lock()
	if reason, cause := l.overdue(now); reason != "" {
		l.lose(reason, cause)
		return
	}
	defer l.mu.Unlock()
	if l.state != watched && l.state != renewing {
		return
	}
	if l.renews() && l.watchdog.wheel.instant(now) >= l.renewAt {
		l.state = renewing
		l.watchdog.due = append(l.watchdog.due, l)
	}
	l.schedule()
}

// overdue returns the reason for which a lease that has not ended should end by now, ""
// if there is none. l.mu is held.
func (l *Lease) overdue(now time.Time) (lock.Reason, error) {
	if l.state != watched && l.state != renewing {
		return "", nil
	}
	at := l.watchdog.wheel.instant(now)
	switch {
	case l.end != 0 && at >= l.end:
		return lock.ReasonMaxHold, nil
	case at < l.deadline:
		return "", nil
	case l.failures != nil:
		return lock.ReasonExpired, l.failures.last
	default:
		return lock.ReasonExpired, nil
	}
}

// Renewed reports whether the watchdog renews the lease.
func (l *Lease) Renewed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.renewer != nil && !l.fixed
}

// renews reports whether the lease is renewed when due. l.mu is held.
func (l *Lease) renews() bool { return l.state == watched && l.renewer != nil && !l.fixed }

// schedule sets the timer to the lease's next event. l.mu is held.
func (l *Lease) schedule() {
	at := l.deadline
	if l.renews() {
		at = min(at, l.renewAt)
	}
	if l.end != 0 {
		at = min(at, l.end)
	}
	l.watchdog.wheel.scheduleAt(&l.timer, at, l)
}

// lose ends the lease and notifies the holder. l.mu is held, and released.
func (l *Lease) lose(reason lock.Reason, cause error) {
	l.state = ended
	l.watchdog.wheel.Cancel(&l.timer)
	h := l.holder
	l.mu.Unlock()
	h.Lost(reason, cause)
}

func (l *Lease) isRenewing() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == renewing
}

// failureCount returns the number of consecutive failed renewals.
func (l *Lease) failureCount() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failures == nil {
		return 0
	}
	return l.failures.count
}
