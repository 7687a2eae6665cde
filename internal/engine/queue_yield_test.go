package engine

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// Processes always want a key, and one that reacts slower than all others has it if no other tries.
func TestSlowProcessesHaveTheirTurns(t *testing.T) {
	const turns = 10_000
	synctest.Test(t, func(t *testing.T) {
		for processes := 1; processes <= 2; processes++ {
			all := make([]yield, processes)
			holder, slow := 0, 0
			for range turns {
				for !all[holder].begin(handOffs) {
					all[holder].count()
					time.Sleep(time.Millisecond)
				}
				var trying []int
				for message := 0; len(trying) == 0; message++ {
					if message > 0 {
						slow++
					}
					for i := range all {
						if all[i].heard() == try {
							trying = append(trying, i)
						}
					}
				}
				holder = trying[rand.N(len(trying))]
				for _, i := range trying {
					all[i].end(i != holder)
				}
			}
			assert.GreaterOrEqual(t, slow, turns/2, "%d processes", processes)
		}
	})
}

// Beside subscribers that do not wait, a process loses little time by yielding, however long it holds the
// key. Another process waits for a bounded time.
func TestYieldingInVainBecomesRare(t *testing.T) {
	for _, held := range []time.Duration{100 * time.Microsecond, time.Millisecond, 5 * time.Millisecond, 40 * time.Millisecond} {
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
