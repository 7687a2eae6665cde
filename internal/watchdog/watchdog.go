package watchdog

import (
	"context"
	"sync"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Config configures a Watchdog.
type Config struct {
	// Slot returns the slot of a key; one script can only access keys of one slot. nil
	// means that any keys can share a script.
	Slot func(key string) int
	// OnRenew is called after each batch that is not Quiet: with the shortest remaining
	// time in it, and with the error if it failed. It may be nil.
	OnRenew func(remaining time.Duration, err error)
}

// Watchdog renews leases and ends those that run out.
type Watchdog struct {
	cfg   Config
	wheel *Wheel
	due   map[renewal][]*Lease // only touched by the wheel's goroutine

	ctx    context.Context // for renewals
	cancel context.CancelFunc

	mu     sync.Mutex
	pools  [2]pool // for first attempts and for retries
	closed bool
	done   sync.WaitGroup
}

// New returns a watchdog that runs until Close.
func New(cfg Config) *Watchdog {
	wd := &Watchdog{cfg: cfg, due: make(map[renewal][]*Lease)}
	for i := range wd.pools {
		wd.pools[i].pending = make(map[renewal][]*Lease)
	}
	wd.ctx, wd.cancel = context.WithCancel(context.Background())
	wd.wheel = NewWheel(wd.dispatch)
	return wd
}

// Wheel returns the watchdog's wheel, for other timers.
func (wd *Watchdog) Wheel() *Wheel { return wd.wheel }

// Terms describe a lease to be watched.
type Terms struct {
	Sent    time.Time     // when the acquiring request was sent
	TTL     time.Duration // length; renewal is due after a third
	Renewer Renewer       // nil: not renewed
	MaxHold time.Duration // 0: no bound
	Quiet   bool          // not reported to OnRenew
}

// Watch starts watching l, which must not be watched yet. It reports false if the
// watchdog is closed; h is then never called.
func (wd *Watchdog) Watch(l *Lease, h Holder, terms Terms) bool {
	wd.mu.Lock()
	defer wd.mu.Unlock()

	if wd.closed {
		return false
	}

	l.mu.Lock()
	defer l.mu.Unlock()

	l.watchdog = wd
	l.holder = h
	l.renewer = terms.Renewer
	l.state = watched
	l.ttl = terms.TTL
	l.quiet = terms.Quiet
	l.far = IsFar(time.Since(terms.Sent), terms.TTL)
	l.deadline = l.certainUntil(terms.Sent, terms.TTL)
	l.renewAt = wd.renewalTime(terms.Sent, terms.TTL)
	if terms.MaxHold > 0 {
		l.end = wd.wheel.instant(terms.Sent.Add(terms.MaxHold))
	}
	l.scheduleLocked()
	return true
}

// renewalTime is a third into the lease, rounded down to one of 32 marks in that third,
// so that one script renews leases that were taken at nearly the same time.
func (wd *Watchdog) renewalTime(sent time.Time, ttl time.Duration) instant {
	grid := instant(ttl / 96)
	at := wd.wheel.instant(sent.Add(ttl / 3))
	if grid < instant(tick) {
		return at
	}
	return at - at%grid
}

// Close ends all leases still watched with lock.ReasonClosed and waits for renewals
// under way. It must not be called from a Holder or Renewer.
func (wd *Watchdog) Close() {
	wd.mu.Lock()
	wd.closed = true
	for i := range wd.pools {
		clear(wd.pools[i].pending)
	}
	wd.mu.Unlock()
	wd.cancel()
	for _, target := range wd.wheel.Stop() {
		if l, ok := target.(*Lease); ok {
			l.mu.Lock()
			live := l.liveLocked()
			if live {
				l.loseLocked(lock.ReasonClosed, nil)
			}
			l.mu.Unlock()
			if live {
				l.tell()
			}
		}
	}

	wd.done.Wait()
}
