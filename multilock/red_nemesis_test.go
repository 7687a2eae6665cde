package multilock_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/harness"
)

// redxNemesis makes servers fail, at most two at once. A server that is back counts as
// unavailable for one more lease: one renewal detects the missing member and another acquires
// it.
type redxNemesis struct {
	w       *redxWorld
	recover time.Duration
	lease   time.Duration
	end     time.Time

	mu   sync.Mutex
	away map[int]bool
	log  []string
	errs []error
}

// redxFaults are the faults it chooses from. Each returns a function that undoes it.
var redxFaults = []struct {
	name  string
	wipes bool // it must last longer than any lease
	wreck func(w *redxWorld, s, process int) (undo func() error)
}{
	{"kill", true, func(w *redxWorld, s, _ int) func() error {
		w.servers[s].Kill()
		return w.servers[s].Restart
	}},
	{"stop", false, func(w *redxWorld, s, _ int) func() error {
		w.servers[s].Pause()
		return func() error { w.servers[s].Resume(); return nil }
	}},
	{"cut off", false, func(w *redxWorld, s, _ int) func() error {
		return redxCut(w.gates, s)
	}},
	{"cut one process off", false, func(w *redxWorld, s, process int) func() error {
		return redxCut(w.gates[process:process+1], s)
	}},
}

func redxCut(gates [][]*harness.Gate, s int) func() error {
	for _, set := range gates {
		set[s].Stall()
	}
	return func() (err error) {
		for _, set := range gates {
			err = errors.Join(err, set[s].Open())
		}
		return err
	}
}

// run injects faults until the end.
func (n *redxNemesis) run() {
	n.away = map[int]bool{}
	began := time.Now()
	var both sync.WaitGroup
	for slot := range 2 {
		both.Go(func() {
			rng := rand.New(rand.NewPCG(n.w.seed, uint64(1000+slot)))
			for {
				time.Sleep(redxBetween(rng, 0, n.lease/4))
				f := redxFaults[rng.IntN(len(redxFaults))]
				lasts := redxBetween(rng, n.lease/10, n.lease/3)
				if f.wipes || rng.IntN(3) == 0 {
					lasts = redxBetween(rng, n.lease+n.lease/10, n.lease+n.lease/2)
				}
				s, process := rng.IntN(redxServers), rng.IntN(redxProcesses)
				if time.Now().Add(lasts + n.recover).After(n.end) {
					return
				}
				n.mu.Lock()
				for n.away[s] {
					s = (s + 1) % redxServers
				}
				n.away[s] = true
				n.log = append(n.log, fmt.Sprintf("%.2fs %s %d/%d %.2fs", time.Since(began).Seconds(), f.name, s, process, lasts.Seconds()))
				n.mu.Unlock()
				undo := f.wreck(n.w, s, process)
				time.Sleep(lasts)
				err := undo()
				time.Sleep(n.recover)
				n.mu.Lock()
				n.away[s] = false
				if err != nil {
					n.errs = append(n.errs, err)
				}
				n.mu.Unlock()
			}
		})
	}
	both.Wait()
}
