package countdown

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/pubsub"
)

// registry holds the waiters of one client, by key.
type registry struct {
	mu      sync.Mutex
	entries map[string]*latchIO
}

// latchIO is the waiters of one latch with their effects. The registry's mutex guards
// it.
type latchIO struct {
	waiters
	reg     *registry
	s       *session.Session
	key     string
	sub     *subscription
	timer   watchdog.Timer
	timerAt time.Time // when the timer fires; zero if it is not set
}

// subscription identifies one subscription of a latchIO. Events of an earlier one are
// ignored.
type subscription struct {
	*pubsub.Subscription
	d *latchIO
}

// readTimeout bounds one read, whatever the connection does.
const readTimeout = 3 * time.Second

// join adds w to the waiters of a latch.
func (r *registry) join(s *session.Session, key string, w *waiter) *latchIO {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := r.entries[key]
	if d == nil {
		d = &latchIO{reg: r, s: s, key: key}
		d.waiters = waiters{fx: d, set: make(map[*waiter]struct{}), maxOutage: s.WatchdogTimeout}
		if r.entries == nil {
			r.entries = make(map[string]*latchIO)
		}
		r.entries[key] = d
	}
	d.waiters.join(w)
	return d
}

// leave removes w unless it was released, and reports whether it was.
func (d *latchIO) leave(w *waiter) (released bool) {
	d.update(func() {
		released = w.stage == stageDone
		if !released {
			d.waiters.leave(w)
		}
	})
	return released
}

// update runs f with the mutex held, and discards d when it has become idle.
func (d *latchIO) update(f func()) {
	d.reg.mu.Lock()
	defer d.reg.mu.Unlock()
	f()
	if d.idle() && d.reg.entries[d.key] == d {
		delete(d.reg.entries, d.key)
		d.s.Watchdog.Wheel().Cancel(&d.timer)
	}
}

// read implements effects. It is not bound to the context of any waiter.
func (d *latchIO) read() {
	d.s.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, readTimeout)
		defer cancel()
		s, err := read(ctx, d.s.Client, d.key)
		d.update(func() {
			if err == nil {
				d.onSnapshot(s)
			} else {
				d.onError(err, temporary(err), minRetry+rand.N(maxRetry-minRetry))
			}
		})
	})
}

// subscribe implements effects.
func (d *latchIO) subscribe() (confirmed bool) {
	d.sub = &subscription{d: d}
	d.sub.Subscription, confirmed = d.s.Hub.Subscribe(wire.LatchChannel(d.key), d.sub)
	return confirmed
}

// unsubscribe implements effects.
func (d *latchIO) unsubscribe() {
	d.sub.Close()
	d.sub = nil
}

// setTimer implements effects.
func (d *latchIO) setTimer(pause time.Duration) {
	d.timerAt = d.now().Add(pause)
	d.s.Watchdog.Wheel().Schedule(&d.timer, d.timerAt, d)
}

// now implements effects.
func (d *latchIO) now() time.Time { return time.Now() }

// Expire is called by the wheel.
func (d *latchIO) Expire(now time.Time) {
	d.update(func() {
		if !now.Before(d.timerAt) { // otherwise the timer was set again
			d.waiters.read()
		}
	})
}

// Notify is called by the hub for every message, and when the server has confirmed the
// subscription: messages may have been missed before.
func (s *subscription) Notify(pubsub.Event) {
	s.d.update(func() {
		if s.d.sub == s {
			s.d.waiters.read()
		}
	})
}
