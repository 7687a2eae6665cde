package acquire

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// play lets processes that always want the key share it, all in a bad world:
// the first of those who try gets it, always in the same order. receivers counts
// subscribers that want nothing too. It returns the turns each process had and
// how often the key lay idle until a timer.
func play(processes, idlers, rounds int) (shares []int, idle int) {
	all := make([]turns, processes)
	shares = make([]int, processes)
	holder := 0
	for range rounds {
		shares[holder]++
		me := &all[holder]
		me.begin()
		next := -1
		for i := range all {
			if all[i].letPass() || i == holder {
				continue
			}
			got := next < 0
			if got {
				next = i
			}
			all[i].attempted(false, got)
		}
		if !me.released(processes + idlers) {
			me.yielding = false
			if next < 0 {
				next = holder
			}
		}
		if next < 0 {
			idle++
			for i := range all {
				if all[i].yielding && (next < 0 || all[i].patience() < all[next].patience()) {
					next = i
				}
			}
			all[next].attempted(true, true)
		}
		holder = next
	}
	return shares, idle
}

func TestProcessesTakeTurns(t *testing.T) {
	for processes := 2; processes <= 8; processes++ {
		shares, idle := play(processes, 0, 10_000)
		for i, n := range shares {
			assert.InDelta(t, 10_000/processes, n, 100, "process %d of %d: %v", i, processes, shares)
		}
		assert.Zero(t, idle, "%d processes", processes)
	}
}

func TestStandingBackForNobodyStopsSoon(t *testing.T) {
	for _, tt := range []struct{ processes, idlers int }{{1, 1}, {1, 5}, {2, 2}, {3, 1}, {3, 10}} {
		shares, idle := play(tt.processes, tt.idlers, 10_000)
		assert.Less(t, idle, 500, "%+v: %v", tt, shares)
		for i, n := range shares {
			assert.Greater(t, n, 10_000/tt.processes/2, "process %d of %+v: %v", i, tt, shares)
		}
	}
}
