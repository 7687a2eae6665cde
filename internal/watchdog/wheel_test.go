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

type target struct {
	Timer
	mu    sync.Mutex
	fired []time.Time
}

func (p *target) Expire(now time.Time) {
	p.mu.Lock()
	p.fired = append(p.fired, now)
	p.mu.Unlock()
}

func (p *target) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.fired)
}

func TestWheelFiresAtMostOneTickLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWheel(nil)
		defer w.Stop()
		begin := time.Now()
		const revolution = slotCount * tick
		targets := map[*target]time.Duration{}
		for _, d := range []time.Duration{0, 1, tick - 1, tick, tick + 1, time.Second, revolution - tick, revolution, revolution + 1, 3*revolution + 7*tick, time.Hour} {
			p := &target{}
			targets[p] = d
			w.Schedule(&p.Timer, begin.Add(d), p)
		}
		for range 500 {
			p, d := &target{}, rand.N(2*time.Minute)
			targets[p] = d
			w.Schedule(&p.Timer, begin.Add(d), p)
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		for p, d := range targets {
			require.Len(t, p.fired, 1, "timer of %v", d)
			late := p.fired[0].Sub(begin) - d
			assert.GreaterOrEqual(t, late, time.Duration(0), "timer of %v", d)
			assert.LessOrEqual(t, late, tick, "timer of %v", d)
		}
	})
}

func TestWheelCancelsAndReschedules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWheel(nil)
		defer w.Stop()
		var cancelled, moved target
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

func TestWheelWakesForEarlierTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWheel(nil)
		defer w.Stop()
		var later, sooner target
		w.Schedule(&later.Timer, time.Now().Add(9*time.Second), &later)
		synctest.Wait() // the wheel sleeps until then
		w.Schedule(&sooner.Timer, time.Now().Add(time.Second), &sooner)
		time.Sleep(time.Second + tick)
		synctest.Wait()
		assert.Equal(t, 1, sooner.count())
		assert.Zero(t, later.count())
	})
}

func TestWheelCatchesUpAfterPause(t *testing.T) {
	// After a pause of the process the goroutine has missed all ticks in between. The
	// test calls advance as run would.
	w := &Wheel{start: time.Now(), rearm: make(chan struct{}, 1)}
	targets := make([]target, 5000)
	for i := range targets {
		w.Schedule(&targets[i].Timer, w.start.Add(time.Duration(i)*10*time.Millisecond), &targets[i])
	}
	var far target
	w.Schedule(&far.Timer, w.start.Add(time.Hour), &far)
	w.advance(w.start.Add(time.Minute))
	for i := range targets {
		require.Equal(t, 1, targets[i].count(), "timer %d", i)
	}
	assert.Zero(t, far.count())
}

func TestStoppedWheelFiresNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWheel(nil)
		var before, after target
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
