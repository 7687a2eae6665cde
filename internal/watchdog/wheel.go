// Package watchdog renews and ends leases and runs timers. One goroutine with a hashed
// timer wheel serves all of them, so a hold or a waiter needs neither a goroutine nor a
// runtime timer.
package watchdog

import (
	"math/bits"
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
	next, prev *Timer
	target     Expirer
	due        int64 // in ticks since the wheel's start
	slot       int32
	scheduled  bool
}

// Wheel is a hashed timer wheel (Varghese and Lauck, "Hashed and Hierarchical Timing
// Wheels", SOSP 1987, scheme 6): the slot of a timer is its due tick modulo the number
// of slots, and earlier revolutions skip it. Insertion and removal are O(1).
type Wheel struct {
	start time.Time
	after func()        // called after each wake-up that fired timers; may be nil
	rearm chan struct{} // wakes run because its next wake-up has moved forward
	stop  chan struct{}
	done  chan struct{}

	mu       sync.Mutex
	slots    [slotCount]Timer // list heads
	occupied [slotCount / 64]uint64
	passed   int64 // last tick whose timers have fired
	wakeAt   int64 // tick until which run sleeps
	stopped  bool
	expired  []Expirer // reused by advance
}

// instant is a time relative to the wheel's start. A lease stores several, and a
// time.Time is three times as large.
type instant time.Duration

func (w *Wheel) instant(t time.Time) instant { return instant(t.Sub(w.start)) }

// never is a tick that is never reached.
const never = int64(1) << 62

// NewWheel returns a wheel that runs until Stop. After each wake-up that fired timers
// it calls after, unless that is nil. after must not block.
func NewWheel(after func()) *Wheel {
	w := &Wheel{
		start:  time.Now(),
		after:  after,
		rearm:  make(chan struct{}, 1),
		stop:   make(chan struct{}),
		done:   make(chan struct{}),
		wakeAt: never,
	}
	for i := range w.slots {
		head := &w.slots[i]
		head.next, head.prev = head, head
	}
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
	w.remove(t)
	due = max(due, w.passed+1)
	t.due, t.slot, t.target, t.scheduled = due, int32(due%slotCount), target, true
	head := &w.slots[t.slot]
	t.prev, t.next = head.prev, head
	head.prev.next, head.prev = t, t
	w.occupied[t.slot/64] |= 1 << (t.slot % 64)
	if due < w.wakeAt && !w.stopped {
		w.wakeAt = due
		select {
		case w.rearm <- struct{}{}:
		default:
		}
	}
}

// Cancel removes t from the wheel. A concurrent Expire may still be running when it
// returns, and must then be harmless.
func (w *Wheel) Cancel(t *Timer) {
	w.mu.Lock()
	w.remove(t)
	w.mu.Unlock()
}

func (w *Wheel) remove(t *Timer) {
	if !t.scheduled {
		return
	}
	t.prev.next, t.next.prev = t.next, t.prev
	t.next, t.prev, t.scheduled = nil, nil, false
	if head := &w.slots[t.slot]; head.next == head {
		w.occupied[t.slot/64] &^= 1 << (t.slot % 64)
	}
}

// Stop ends the wheel's goroutine and waits for it. No timer fires afterwards. It must
// not be called from an Expire.
func (w *Wheel) Stop() {
	w.mu.Lock()
	if !w.stopped {
		w.stopped = true
		close(w.stop)
	}
	w.mu.Unlock()
	<-w.done
}

func (w *Wheel) run() {
	defer close(w.done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		w.mu.Lock()
		w.wakeAt = w.nextOccupied()
		sleep := time.Hour
		if w.wakeAt != never {
			sleep = time.Until(w.start.Add(time.Duration(w.wakeAt) * tick))
		}
		w.mu.Unlock()

		timer.Reset(sleep)
		select {
		case <-timer.C:
		case <-w.rearm:
		case <-w.stop:
			return
		}
		w.advance(time.Now())
	}
}

// nextOccupied returns the next tick whose slot holds a timer, of this revolution or a
// later one, or never.
func (w *Wheel) nextOccupied() int64 {
	from := (w.passed + 1) % slotCount
	for i := range int64(len(w.occupied) + 1) {
		word := (from/64 + i) % int64(len(w.occupied))
		set := w.occupied[word]
		if i == 0 {
			set &= ^uint64(0) << (from % 64)
		}
		if set != 0 {
			slot := word*64 + int64(bits.TrailingZeros64(set))
			return w.passed + 1 + (slot-from+slotCount)%slotCount
		}
	}
	return never
}

// advance fires the timers that are due at now.
func (w *Wheel) advance(now time.Time) {
	current := int64(now.Sub(w.start) / tick)
	w.mu.Lock()
	// After a pause longer than a revolution, every slot is visited once.
	for at := max(w.passed+1, current-slotCount+1); at <= current; at++ {
		slot := at % slotCount
		if w.occupied[slot/64]&(1<<(slot%64)) == 0 {
			continue
		}
		head := &w.slots[slot]
		for t := head.next; t != head; {
			next := t.next
			if t.due <= current {
				w.remove(t)
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

// drain empties a stopped wheel and returns the targets of its timers.
func (w *Wheel) drain() []Expirer {
	w.mu.Lock()
	defer w.mu.Unlock()
	var targets []Expirer
	for i := range w.slots {
		for head := &w.slots[i]; head.next != head; {
			targets = append(targets, head.next.target)
			w.remove(head.next)
		}
	}
	return targets
}
