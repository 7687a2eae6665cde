// Package watchdog renews and ends leases and runs timers. One goroutine with a hashed
// timer wheel serves all of them, so a hold or a waiter needs neither a goroutine nor a
// runtime timer.
package watchdog

import (
	"sync"
	"time"

	"github.com/redlatch/redlatch/lock"
)

const (
	// tick is the wheel's resolution: a timer fires at most one tick late and never
	// early.
	tick = 5 * time.Millisecond
	// slotCount is the number of ticks in one revolution of the wheel, about ten
	// seconds.
	slotCount = 2048
)

// Expirer is notified when its timer is due. Expire runs on the goroutine of the wheel
// and must not block.
type Expirer interface {
	Expire(now time.Time)
}

// Timer is an entry of a wheel, to be embedded in its target. The zero Timer is ready
// for use. A Timer belongs to one wheel at a time.
type Timer struct {
	next   *Timer
	at     **Timer // the pointer to it, of its slot or of the previous timer there; nil: not scheduled
	target Expirer
	due    int64 // in ticks since the wheel's start
}

// Wheel is a hashed timer wheel (Varghese and Lauck, "Hashed and Hierarchical Timing
// Wheels", SOSP 1987, scheme 6): the slot of a timer is its due tick modulo the number
// of slots, and earlier revolutions skip it. Insertion and removal are O(1).
type Wheel struct {
	start time.Time
	after func()        // called after each wake-up that fired timers; may be nil
	rearm chan struct{} // wakes run because its next wake-up has moved forward
	done  chan struct{}

	mu      sync.Mutex
	slots   [slotCount]*Timer // lists
	passed  int64             // last tick whose timers have fired
	wakeAt  int64             // tick until which run sleeps
	stopped bool
	expired []Expirer // reused by advance
}

// instant is a time relative to the wheel's start. A lease stores several, and a
// time.Time is three times as large.
type instant time.Duration

func (w *Wheel) instant(t time.Time) instant { return instant(t.Sub(w.start)) }

// NewWheel returns a wheel that runs until Stop. After each wake-up that fired timers
// it calls after, unless that is nil. after must not block.
func NewWheel(after func()) *Wheel {
	w := &Wheel{start: time.Now(), after: after, rearm: make(chan struct{}, 1), done: make(chan struct{})}
	go w.run()
	return w
}

// Schedule makes t fire at the given time, or at the next tick if that time has passed.
// It replaces an earlier schedule of t. On a stopped wheel t never fires.
func (w *Wheel) Schedule(t *Timer, at time.Time, target Expirer) {
	w.scheduleAt(t, w.instant(at), target)
}

func (w *Wheel) scheduleAt(t *Timer, at instant, target Expirer) {
	// The bound prevents an overflow.
	due := int64((min(time.Duration(at), lock.MaxLease) + tick - 1) / tick)
	w.mu.Lock()
	defer w.mu.Unlock()

	t.removeLocked()
	t.due = max(due, w.passed+1)
	t.target = target
	t.at = &w.slots[t.due%slotCount]
	t.next = *t.at
	if t.next != nil {
		t.next.at = &t.next
	}
	*t.at = t
	if t.due < w.wakeAt {
		w.wakeAt = t.due
		w.wake()
	}
}

// Cancel removes t from the wheel. A concurrent Expire may still be running when it
// returns, and must then be harmless.
func (w *Wheel) Cancel(t *Timer) {
	w.mu.Lock()
	t.removeLocked()
	w.mu.Unlock()
}

// removeLocked takes t off its list.
func (t *Timer) removeLocked() {
	if t.at == nil {
		return
	}
	*t.at = t.next
	if t.next != nil {
		t.next.at = t.at
	}
	t.next = nil
	t.at = nil
}

// Stop ends the wheel's goroutine, waits for it, and returns the targets of all timers. None
// fires afterwards. It must not be called from an Expire.
func (w *Wheel) Stop() (targets []Expirer) {
	w.mu.Lock()
	w.stopped = true
	w.mu.Unlock()
	w.wake()
	<-w.done
	w.mu.Lock()
	defer w.mu.Unlock()

	for i := range w.slots {
		for w.slots[i] != nil {
			targets = append(targets, w.slots[i].target)
			w.slots[i].removeLocked()
		}
	}

	return targets
}

func (w *Wheel) wake() {
	select {
	case w.rearm <- struct{}{}:
	default:
	}
}

func (w *Wheel) run() {
	defer close(w.done)

	timer := time.NewTimer(0)
	defer timer.Stop()

	for {
		w.mu.Lock()
		w.wakeAt = w.next()
		sleep := time.Until(w.start.Add(time.Duration(w.wakeAt) * tick))
		stopped := w.stopped
		w.mu.Unlock()
		if stopped {
			return
		}
		timer.Reset(sleep)
		select {
		case <-timer.C:
		case <-w.rearm:
		}
		w.advance(time.Now())
	}
}

// next returns the next tick whose slot holds a timer, of this revolution or a later one. If
// there is none, it returns the last tick of this revolution.
func (w *Wheel) next() int64 {
	at := w.passed + 1
	for at < w.passed+slotCount && w.slots[at%slotCount] == nil {
		at++
	}
	return at
}

// advance fires the timers that are due at now.
func (w *Wheel) advance(now time.Time) {
	current := int64(now.Sub(w.start) / tick)
	w.mu.Lock()

	// After a pause longer than a revolution, every slot is visited once.
	for at := max(w.passed+1, current-slotCount+1); at <= current; at++ {
		for t := w.slots[at%slotCount]; t != nil; {
			next := t.next
			if t.due <= current {
				t.removeLocked()
				w.expired = append(w.expired, t.target)
			}
			t = next
		}
	}

	w.passed = max(w.passed, current)
	w.mu.Unlock()

	for i, target := range w.expired {
		target.Expire(now)
		w.expired[i] = nil
	}
	if w.after != nil && len(w.expired) > 0 {
		w.after()
	}
	w.expired = w.expired[:0]
}
