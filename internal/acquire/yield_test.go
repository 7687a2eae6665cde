package acquire

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
)

// play lets processes that always want the key share it for a number of turns. Of those that
// try, one gets it at random. receivers counts idlers too: subscribers that do not wait. It
// returns the hand-offs of each process, and how often the key lay idle until a timer.
func play(processes, idlers, turns int) (shares []int, idle int) {
	all := make([]yield, processes)
	shares = make([]int, processes)
	for holder := 0; turns > 0; turns-- {
		me := &all[holder]
		for !me.begin(handOffs) {
			me.count()
			shares[holder]++
		}
		var trying []int
		for i := range all {
			if !all[i].isEcho() && i != holder {
				trying = append(trying, i)
			}
		}
		switch {
		case processes+idlers == 1:
			me.end(false)
		case len(trying) == 0:
			idle++
			me.end(false)
		default:
			holder = trying[rand.N(len(trying))]
			for _, i := range trying {
				all[i].end(i != holder)
			}
		}
	}
	return shares, idle
}

func TestProcessesShareAKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // no time passes
		for processes := 2; processes <= 8; processes++ {
			shares, idle := play(processes, 0, 10_000)
			for i, n := range shares {
				fair := 10_000 * handOffs / processes
				assert.Greater(t, n, fair/2, "process %d of %d: %v", i, processes, shares)
				assert.Less(t, n, fair*2, "process %d of %d: %v", i, processes, shares)
			}
			assert.Zero(t, idle, "%d processes", processes)
		}
	})
}

func TestYieldingInVainBecomesRare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shares, idle := play(1, 3, 100)
		assert.Equal(t, 100, idle)
		assert.Greater(t, shares[0], 90*handOffs<<maxUnused)
	})
}
