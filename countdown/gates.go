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

// gates are those of one client, by key.
type gates struct {
	mu   sync.Mutex
	open map[string]*door
}

// door is a gate with what it does to the world. The mutex of gates guards it.
type door struct {
	gate
	all   *gates
	s     *session.Session
	key   string
	sub   *subscription
	timer watchdog.Timer
	wake  time.Time // what the timer is set to; zero if it is not
}

// subscription is one of a door, which may have had others: what they bring is
// nothing to it.
type subscription struct {
	*pubsub.Subscription
	d *door
}

// lookTimeout bounds one look at the server, whatever the connection does.
const lookTimeout = 3 * time.Second

// join makes w a waiter for the latch of that key.
func (a *gates) join(s *session.Session, key string, w *waiter) *door {
	a.mu.Lock()
	defer a.mu.Unlock()
	d := a.open[key]
	if d == nil {
		d = &door{all: a, s: s, key: key}
		d.gate = gate{
			fx: d, waiters: make(map[*waiter]struct{}), patience: s.WatchdogTimeout, ordered: inOrder(s),
		}
		if a.open == nil {
			a.open = make(map[string]*door)
		}
		a.open[key] = d
	}
	d.gate.join(w)
	return d
}

// inOrder reports whether messages come from the server that has the keys, and so in
// an order with what it answers.
func inOrder(s *session.Session) bool {
	return s.Sharded || !s.Cluster() && len(s.Client.Nodes()) == 1
}

// leave ends w's wait if it is not over yet, and returns whether it is.
func (d *door) leave(w *waiter) (released bool) {
	d.do(func() {
		released = w.stage == over
		if !released {
			d.gate.leave(w)
		}
	})
	return released
}

// do runs f with the mutex held, and drops the door if nobody needs it any more.
func (d *door) do(f func()) {
	d.all.mu.Lock()
	defer d.all.mu.Unlock()
	f()
	if d.idle() && d.all.open[d.key] == d {
		delete(d.all.open, d.key)
		d.s.Dog.Wheel().Cancel(&d.timer)
	}
}

// look implements effects. It is nobody's in particular: who leaves does not end it.
func (d *door) look() {
	d.s.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, lookTimeout)
		defer cancel()
		s, err := look(ctx, d.s.Client, d.key)
		d.do(func() {
			if err == nil {
				d.saw(s)
			} else {
				d.failed(err, mayPass(err), minRetry+rand.N(maxRetry-minRetry))
			}
		})
	})
}

// subscribe implements effects.
func (d *door) subscribe() (standing bool) {
	d.sub = &subscription{d: d}
	d.sub.Subscription, standing = d.s.Hub.Subscribe(wire.LatchChannel(d.key), d.sub)
	return standing
}

// unsubscribe implements effects.
func (d *door) unsubscribe() {
	d.sub.Close()
	d.sub = nil
}

// sync implements effects.
func (d *door) sync() { d.sub.Sync() }

// wakeIn implements effects.
func (d *door) wakeIn(pause time.Duration) {
	d.wake = d.now().Add(pause)
	d.s.Dog.Wheel().Schedule(&d.timer, d.wake, d)
}

// now implements effects.
func (d *door) now() time.Time { return time.Now() }

// Expire is called by the wheel.
func (d *door) Expire(now time.Time) {
	d.do(func() {
		if !now.Before(d.wake) { // else it was set anew meanwhile
			d.gate.look()
		}
	})
}

// Notify is called by the hub.
func (s *subscription) Notify(ev pubsub.Event) {
	s.d.do(func() {
		if s.d.sub == s {
			s.d.heard(ev)
		}
	})
}
