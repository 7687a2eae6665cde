package engine

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// outcome is what play has seen: the hand-offs of each process, those of the slow processes
// together, how often the key lay idle until a timer, and how often for courtesy in vain.
type outcome struct {
	shares           []int
	slow, idle, vain int
}

// play lets processes that always want the key share it for a number of turns, with slow
// processes, which have it once if no other tries. Of the others that try, one gets it at
// random. There may be subscribers that do not wait.
func play(processes int, slow, subscribers bool, turns int) (o outcome) {
	all := make([]yield, processes)
	o.shares = make([]int, processes)
	for holder := 0; turns > 0; turns-- {
		me := &all[holder]
		for !me.begin(handOffs) {
			me.count()
			o.shares[holder]++
			time.Sleep(time.Millisecond)
		}
		var trying, pausing []int
		message := func() {
			for i := range all {
				switch all[i].heard() {
				case pause:
					pausing = append(pausing, i)
				case try:
					trying = append(trying, i)
				}
			}
		}
		if processes == 1 && !slow && !subscribers {
			me.end(false)
			continue
		}
		message()
		for slow && len(trying) == 0 {
			o.slow++
			message()
		}
		switch {
		case len(trying) == 0 && len(pausing) > 0:
			o.vain++
			trying = pausing
		case len(trying) == 0:
			o.idle++
			me.end(false)
			continue
		}
		holder = trying[rand.N(len(trying))]
		for _, i := range trying {
			all[i].end(i != holder)
		}
	}
	return o
}

func TestProcessesShareAKey(t *testing.T) {
	const turns = 10_000
	synctest.Test(t, func(t *testing.T) {
		for processes := 2; processes <= 8; processes++ {
			o := play(processes, false, false, turns)
			for i, n := range o.shares {
				fair := turns * handOffs / processes
				assert.Greater(t, n, fair/2, "process %d of %d: %v", i, processes, o.shares)
				assert.Less(t, n, fair*2, "process %d of %d: %v", i, processes, o.shares)
			}
			assert.Zero(t, o.idle, "%d processes", processes)
			assert.Less(t, o.vain, turns>>(maxVain-1), "%d processes", processes)
		}
	})
}

// A process that reacts slower than all others has its turns too.
func TestSlowProcessesHaveTheirTurns(t *testing.T) {
	const turns = 10_000
	synctest.Test(t, func(t *testing.T) {
		for processes := 1; processes <= 2; processes++ {
			o := play(processes, true, false, turns)
			assert.GreaterOrEqual(t, o.slow, turns/2, "%d processes", processes)
		}
	})
}

// SameOwner subscribers that do not wait, a process loses little time by yielding, however long it holds the
// key. Another process waits for a bounded time.
func TestYieldingInVainBecomesRare(t *testing.T) {
	for _, held := range []time.Duration{10 * time.Microsecond, time.Millisecond, 5 * time.Millisecond, 40 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			var y yield
			turn := func() (streak time.Duration) {
				began := time.Now()
				for !y.begin(handOffs) {
					y.count()
					time.Sleep(held)
				}
				streak = time.Since(began)
				time.Sleep(yieldFor)
				y.end(false)
				return streak
			}
			assert.Equal(t, handOffs*held, turn(), "the first")
			for range maxUnused {
				turn()
			}
			longest := rareYield << (2 * (maxUnused - 1))
			for range 10 {
				streak := turn()
				assert.LessOrEqual(t, streak, longest+held)
				assert.Less(t, float64(yieldFor), 0.02*float64(streak), "held for %v: yields after %v", held, streak)
			}
		})
	}
}
