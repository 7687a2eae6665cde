package watchdog

import (
	"sync"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Holder is notified of changes of its lease until Forget. Its methods run on a
// goroutine of the watchdog and must not block.
type Holder interface {
	// Lost is called when the lease has ended. Check may call it too, on the caller's
	// goroutine, at the same time as the watchdog or before it: only the first call counts.
	Lost(reason lock.Reason, cause error)
	// RenewalFailed is called after a failed renewal, which is retried, with the
	// remaining time of the lease. The call may come just after Forget.
	RenewalFailed(err error, left time.Duration)
	// Leased returns what the lease is for. It does not change while the lease is watched.
	Leased() Subject
}

// Subject is what a lease is for: an owner holds a key.
type Subject struct {
	Key   string
	Owner string
	// Holder is the holder if its renewer needs that.
	Holder Holder
}

// Lease is the period for which an owner holds a key, to be embedded in a Holder. Its
// states:
//
//	        Watch              due            Renew: held
//	(zero) ─────▶ watched ──────────▶ renewing ─────▶ watched
//	                 │                   │
//	                 │ local deadline    │ local deadline, or Renew: not held    ▶ lost
//	                 │ Forget            │ Forget                                ▶ ended
//
// Forget also ends a lost lease. A lost or ended lease is never renewed. While it is lost
// the watchdog may not have come to tell the holder yet, so Check does.
type Lease struct {
	// Weight is the cost of a renewal, in renewals of an ordinary lease; 0 means 1.
	Weight uint16
	// Exact is set if its lengths are less than the server has by more than Margin.
	Exact bool

	mu       sync.Mutex
	state    leaseState
	quiet    bool
	far      bool // see IsFar
	timer    Timer
	watchdog *Watchdog
	holder   Holder
	renewer  Renewer       // nil: not renewed, or not any more
	ttl      time.Duration // length after a renewal
	deadline instant       // end of certain ownership; see Margin
	renewAt  instant
	end      instant     // from MaxHold; zero: none
	failures int32       // consecutive failed renewals
	lastErr  error       // of the last of them; of a lost lease, the cause
	reason   lock.Reason // of a lost lease
}

type leaseState uint8

const (
	_ leaseState = iota
	watched
	renewing
	lost
	ended
)

// liveLocked reports whether the lease is watched and has not ended.
func (l *Lease) liveLocked() bool { return l.state == watched || l.state == renewing }

// Margin is how much earlier than the server a client ends a lease of length ttl. The clock of the server
// may be faster by a thousandth, which is twice what NTP corrects, and the timer that ends the lease fires
// a moment late. A very short lease is not used up by that.
func Margin(ttl time.Duration) time.Duration { return min(ttl/1000+time.Millisecond, ttl/10) }

// Certain returns for how long after a request was sent the lease of length ttl that it took is certain.
func Certain(ttl time.Duration) time.Duration { return ttl - Margin(ttl) }

// certainUntil returns when the lease ends if a request sent then gave it ttl.
func (l *Lease) certainUntil(sent time.Time, ttl time.Duration) instant {
	if !l.Exact {
		ttl = Certain(ttl)
	}
	return l.watchdog.wheel.instant(sent.Add(ttl))
}

// change changes a lease that is live.
func (l *Lease) change(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.liveLocked() {
		f()
		l.scheduleLocked()
	}
}

// Forget stops watching: no further renewal begins, and the holder is not notified any
// more, unless the lease was lost already. Call it before sending a release.
func (l *Lease) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.liveLocked() {
		l.watchdog.wheel.Cancel(&l.timer)
	}
	if l.watchdog != nil {
		l.state = ended
	}
}

// Remaining returns the time for which ownership is certain, 0 if it is not.
func (l *Lease) Remaining() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.liveLocked() {
		return 0
	}
	return max(0, time.Duration(l.overLocked()-l.watchdog.wheel.instant(time.Now())))
}

// untilDeadline returns the time for which ownership is certain, regardless of a MaxHold.
func (l *Lease) untilDeadline() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Duration(l.deadline - l.watchdog.wheel.instant(time.Now()))
}

// overLocked returns when the lease ends unless it is extended.
func (l *Lease) overLocked() instant {
	if l.end != 0 {
		return min(l.deadline, l.end)
	}
	return l.deadline
}

// Check ends the lease if it has run out and the wheel has not noticed yet. If the lease is
// lost, the holder has been told when Check returns.
func (l *Lease) Check() {
	l.mu.Lock()
	l.endIfOverLocked(time.Now())
	isLost := l.state == lost
	l.mu.Unlock()
	if isLost {
		l.tell()
	}
}

// Extended records that a request sent at sent has extended the lease to at least ttl.
// It has no effect on an ended lease.
func (l *Lease) Extended(sent time.Time, ttl time.Duration) {
	l.Check()
	l.change(func() { l.deadline = max(l.deadline, l.certainUntil(sent, ttl)) })
}

// Fix makes the lease end ttl after sent and stops its renewal.
func (l *Lease) Fix(sent time.Time, ttl time.Duration) {
	l.Check()
	l.change(func() { l.renewer, l.deadline = nil, l.certainUntil(sent, ttl) })
}

// Renew has the lease renewed from now on, by renewer and to ttl.
func (l *Lease) Renew(renewer Renewer, ttl time.Duration) {
	l.change(func() {
		if l.renewer == nil || l.ttl != ttl {
			l.renewer = renewer
			l.ttl = ttl
			l.renewAt = min(l.deadline-instant(ttl*2/3), l.watchdog.wheel.instant(time.Now().Add(ttl/3)))
		}
	})
}

// StopRenewing leaves the lease to its end, and reports whether it was renewed.
func (l *Lease) StopRenewing() (renewed bool) {
	l.change(func() { renewed, l.renewer = l.renewer != nil, nil })
	return renewed
}

// EndAt ends the lease at the given time regardless of renewals: a MaxHold that was
// unknown at Watch.
func (l *Lease) EndAt(at time.Time) { l.change(func() { l.end = l.watchdog.wheel.instant(at) }) }

// Expire is called by the wheel.
func (l *Lease) Expire(now time.Time) {
	l.mu.Lock()
	over := l.endIfOverLocked(now)
	if l.liveLocked() {
		if l.renewsLocked() && l.watchdog.wheel.instant(now) >= l.renewAt {
			l.state = renewing
			// A far server gets the request on the shared, open connection, a near one on the renewal connection.
			how := renewal{l.renewer, l.ttl, l.quiet, min(l.failures, 1), l.far, (l.failures%2 == 1) != l.far}
			l.watchdog.due[how] = append(l.watchdog.due[how], l)
		}
		l.scheduleLocked()
	}
	l.mu.Unlock()
	if over {
		l.tell()
	}
}

// renewsLocked reports whether the lease is renewed when due.
func (l *Lease) renewsLocked() bool { return l.state == watched && l.renewer != nil }

// scheduleLocked sets the timer to the lease's next event.
//
// The wheel may be a tick late, and the end of a lease must not be: others may hold the key then. So the
// wheel fires at the tick before, and a timer of the runtime measures the rest.
func (l *Lease) scheduleLocked() {
	wheel := l.watchdog.wheel
	over := l.overLocked()
	if left := over - wheel.instant(time.Now()); left < instant(tick) {
		time.AfterFunc(time.Duration(left), l.endIfOver)
	}
	at := over - over%instant(tick)
	if l.renewsLocked() {
		at = min(at, l.renewAt)
	}
	wheel.scheduleAt(&l.timer, at, l)
}

// endIfOver ends the lease unless it was extended.
func (l *Lease) endIfOver() {
	l.mu.Lock()
	over := l.endIfOverLocked(time.Now())
	l.mu.Unlock()
	if over {
		l.tell()
	}
}

// endIfOverLocked makes a live lease lost if its time is over by now, and reports whether it has. Then
// tell follows, without the mutex.
func (l *Lease) endIfOverLocked(now time.Time) bool {
	if !l.liveLocked() {
		return false
	}

	at := l.watchdog.wheel.instant(now)
	if l.end != 0 && at >= l.end {
		l.loseLocked(lock.ReasonMaxHold, nil)
		return true
	}
	if at >= l.deadline {
		l.loseLocked(lock.ReasonExpired, l.lastErr)
		return true
	}

	return false
}

// loseLocked makes the lease lost. Then tell follows, without the mutex.
func (l *Lease) loseLocked(reason lock.Reason, cause error) {
	l.state = lost
	l.reason = reason
	l.lastErr = cause
	l.watchdog.wheel.Cancel(&l.timer)
}

// tell tells the holder that the lease is lost. What it reads does not change any more.
func (l *Lease) tell() { l.holder.Lost(l.reason, l.lastErr) }

func (l *Lease) isRenewing() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == renewing
}
