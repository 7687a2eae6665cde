package watchdog

import (
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

type probe struct {
	Timer
	mu    sync.Mutex
	fired []time.Time
}

func (p *probe) Expire(now time.Time) {
	p.mu.Lock()
	p.fired = append(p.fired, now)
	p.mu.Unlock()
}

func (p *probe) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.fired)
}

func TestWheelFiresNeverEarlyAndAtMostOneTickLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWheel(nil)
		defer w.Stop()
		begin := time.Now()
		const turn = slotCount * tick
		probes := map[*probe]time.Duration{}
		for _, d := range []time.Duration{0, 1, tick - 1, tick, tick + 1, time.Second, turn - tick, turn, turn + 1, 3*turn + 7*tick, time.Hour} {
			p := &probe{}
			probes[p] = d
			w.Schedule(&p.Timer, begin.Add(d), p)
		}
		for range 500 {
			p, d := &probe{}, rand.N(2*time.Minute)
			probes[p] = d
			w.Schedule(&p.Timer, begin.Add(d), p)
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		for p, d := range probes {
			require.Len(t, p.fired, 1, "timer of %v", d)
			late := p.fired[0].Sub(begin) - d
			assert.GreaterOrEqual(t, late, time.Duration(0), "timer of %v", d)
			assert.LessOrEqual(t, late, tick, "timer of %v", d)
		}
	})
}

func TestWheelForgetsCancelledAndMovedTimers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWheel(nil)
		defer w.Stop()
		var cancelled, moved probe
		w.Schedule(&cancelled.Timer, time.Now().Add(time.Second), &cancelled)
		w.Schedule(&moved.Timer, time.Now().Add(time.Second), &moved)
		w.Schedule(&moved.Timer, time.Now().Add(time.Minute), &moved)
		w.Cancel(&cancelled.Timer)
		w.Cancel(&cancelled.Timer)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		assert.Zero(t, cancelled.count())
		assert.Zero(t, moved.count())
		time.Sleep(31 * time.Second)
		synctest.Wait()
		assert.Zero(t, cancelled.count())
		assert.Equal(t, 1, moved.count())
	})
}

func TestWheelWakesForATimerBeforeTheOneItSleepsFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWheel(nil)
		defer w.Stop()
		var later, sooner probe
		w.Schedule(&later.Timer, time.Now().Add(9*time.Second), &later)
		synctest.Wait() // the wheel now sleeps until then
		w.Schedule(&sooner.Timer, time.Now().Add(time.Second), &sooner)
		time.Sleep(time.Second + tick)
		synctest.Wait()
		assert.Equal(t, 1, sooner.count())
		assert.Zero(t, later.count())
	})
}

func TestWheelCatchesUpAfterAPauseOfManyTurns(t *testing.T) {
	// A stopped process: the goroutine sees none of the ticks in between. Only
	// advance is driven here, as run would after the pause.
	w := &Wheel{start: time.Now(), wakeAt: never, rearm: make(chan struct{}, 1)}
	for i := range w.slots {
		w.slots[i].next, w.slots[i].prev = &w.slots[i], &w.slots[i]
	}
	probes := make([]probe, 5000)
	for i := range probes {
		w.Schedule(&probes[i].Timer, w.start.Add(time.Duration(i)*10*time.Millisecond), &probes[i])
	}
	var far probe
	w.Schedule(&far.Timer, w.start.Add(time.Hour), &far)
	w.advance(w.start.Add(time.Minute))
	for i := range probes {
		require.Equal(t, 1, probes[i].count(), "timer %d", i)
	}
	assert.Zero(t, far.count())
}

func TestStoppedWheelFiresNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWheel(nil)
		var before, after probe
		w.Schedule(&before.Timer, time.Now().Add(time.Second), &before)
		w.Stop()
		w.Stop()
		w.Schedule(&after.Timer, time.Now(), &after)
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Zero(t, before.count())
		assert.Zero(t, after.count())
	})
}
