package acquire

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"

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
	synctest.Test(t, func(t *testing.T) { // no time passes
		for processes := 2; processes <= 8; processes++ {
			o := play(processes, false, false, turns)
			for i, n := range o.shares {
				fair := turns * handOffs / processes
				assert.Greater(t, n, fair/2, "process %d of %d: %v", i, processes, o.shares)
				assert.Less(t, n, fair*2, "process %d of %d: %v", i, processes, o.shares)
			}
			assert.Zero(t, o.idle, "%d processes", processes)
			assert.Less(t, o.vain, turns>>(maxUnused-1), "%d processes", processes)
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

func TestYieldingInVainBecomesRare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := play(1, false, true, 100)
		assert.Equal(t, 100, o.idle)
		assert.Greater(t, o.shares[0], 90*handOffs<<maxUnused)
	})
}
