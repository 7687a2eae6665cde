package main

import (
	"cmp"
	"fmt"
	"io"
	"time"
)

// plan is the extent of a comparison.
type plan struct {
	scenarios   []scenario
	window      time.Duration // of most of them
	repetitions int
	pulse       time.Duration // of each measurement of the floor
	// progress receives a line for each measurement.
	progress io.Writer
}

// alone is how many times as often a single goroutine is measured.
const alone = 2

// comparison is a run of a plan.
type comparison struct {
	plan
	services services
	crew     crew
	warm     bool // see warmUp
}

// compare runs a plan. Each repetition measures the peers of a cell in turn, starting with a
// different one, so that changes of the machine affect all peers. A peer that fails is not
// tried again in that cell; the report gives the reason.
func compare(p plan) (*results, error) {
	c := &comparison{plan: p}
	c.services.stopWhenInterrupted()
	defer c.services.stop()
	defer c.crew.keep(func(string) bool { return false })
	r := &results{Date: time.Now().Format(time.DateOnly), Repetitions: p.repetitions, Window: p.window.Seconds(), Machine: thisMachine()}
	before := processorTicks()
	r.Noise.Load = loadAverage()
	for _, s := range p.scenarios {
		if err := c.pulse(r); err != nil {
			return nil, err
		}
		c.crew.keep(s.has) // others would only disturb
		r.Scenarios = append(r.Scenarios, c.scenario(s))
	}
	if err := c.pulse(r); err != nil {
		return nil, err
	}
	r.Noise.Steal = rounded(processorTicks().stealSince(before))
	r.Versions = versions(&c.services)
	return r, nil
}

func (c *comparison) scenario(s scenario) scenarioResult {
	began := time.Now()
	result := scenarioResult{Number: s.number, Title: s.title, About: s.about}
	for _, cell := range s.cells {
		result.Cells = append(result.Cells, c.cell(s, cell))
	}
	fmt.Fprintf(c.progress, "%d. %s: %.0f s\n", s.number, s.title, time.Since(began).Seconds())
	return result
}

func (c *comparison) cell(s scenario, of cell) cellResult {
	result := cellResult{Name: of.name, Size: of.size, Measures: s.measures, Best: s.best, Base: s.base}
	if of.measures != nil {
		result.Measures, result.Best = of.measures, of.best
	}
	for _, peer := range of.peers {
		result.Rows = append(result.Rows, &row{Peer: peer})
	}
	repetitions := cmp.Or(of.times, c.repetitions)
	if of.alone {
		repetitions *= alone
	}
	out := make([]bool, len(of.peers))
	for i := range repetitions {
		for j := range of.peers {
			k := (i + j) % len(of.peers)
			if out[k] {
				continue
			}
			m, err := c.measure(of, of.peers[k])
			if err != nil {
				out[k] = true
				result.Rows[k].failed(err)
				fmt.Fprintf(c.progress, "%s, %s: %v\n", of.name, of.peers[k], err)
				continue
			}
			result.Rows[k].add(m, result.Measures)
		}
	}
	return result
}

func (c *comparison) measure(of cell, peer string) (*measurement, error) {
	t := of.taskOf(peer)
	c.warmUp(stores[t.Peer])
	var err error
	if t.Addrs, err = c.services.addrs(t.Peer, max(of.servers, 1)); err != nil {
		return nil, err
	}
	rival := t
	if of.rival != "" {
		rival.Peer, rival.Trip = of.rival, of.trip
	}
	return c.crew.run(t, rival, of.processes, c.services.look)
}

// warmUp has ZooKeeper's server work for some seconds before it is measured for the first time: it runs on a virtual
// machine, and the first peers would pay for its compiler.
func (c *comparison) warmUp(store string) {
	if store != "zookeeper" || c.warm {
		return
	}
	c.warm = true
	_, _ = c.measure(cell{ // a failure shows in the measurements as well
		processes: 1, task: task{Do: "repeat", Kind: "lock", Own: true, Goroutines: 64, For: 10 * time.Second},
	}, "zookeeper")
}

// pulse measures the floor. Its variation during a run is the noise.
func (c *comparison) pulse(r *results) error {
	m, err := c.measure(cell{
		processes: 1, task: task{Do: "repeat", Kind: "lock", Own: true, Goroutines: 1, For: c.plan.pulse},
	}, "floor")
	if err != nil {
		return err
	}
	r.Noise.Floor = append(r.Noise.Floor, rounded(m.rate()))
	return nil
}
