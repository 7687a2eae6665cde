package main

import (
	"cmp"
	"slices"
	"time"
)

// measure is a measured quantity.
type measure struct {
	title  string
	digits int  // after the point
	spread bool // also show the least and the greatest value
	zero   bool // 0 is a value; for other measures it means unknown
	of     func(m *measurement) float64
}

// The measures by key.
var measures = map[string]measure{
	"rate":     {title: "a second", spread: true, of: (*measurement).rate},
	"p50":      {title: "p50 µs", spread: true, of: quantile((*measurement).latency, 0.5)},
	"p99":      {title: "p99 µs", spread: true, of: quantile((*measurement).latency, 0.99)},
	"p99.9":    {title: "p99.9 µs", of: quantile((*measurement).latency, 0.999)},
	"commands": {title: "commands", digits: 2, of: func(m *measurement) float64 { return m.each(float64(m.Commands)) }},
	"allocs":   {title: "allocations", digits: 1, of: each(func(o *outcome) float64 { return float64(o.Allocs) })},
	"bytes":    {title: "bytes", of: each(func(o *outcome) float64 { return float64(o.Bytes) })},
	"jain":     {title: "Jain", digits: 3, of: func(m *measurement) float64 { return jain(m.shares()) }},
	"least":    {title: "least share", digits: 2, zero: true, of: func(m *measurement) float64 { return slices.Min(m.processShares()) }},
	"most":     {title: "greatest share", digits: 2, of: func(m *measurement) float64 { return slices.Max(m.processShares()) }},
	"own":      {title: "a second", of: ofSide((*measurement).own, (*measurement).rate)},
	"rivals":   {title: "rivals', a second", zero: true, of: ofSide((*measurement).rivals, (*measurement).rate)},
	"ratio":    {title: "of its own", digits: 2, spread: true, zero: true, of: func(m *measurement) float64 { return m.rivals().rate() / m.own().rate() }},
	"own99":    {title: "p99 µs", of: ofSide((*measurement).own, quantile((*measurement).latency, 0.99))},
	"rivals99": {title: "rivals', p99 µs", of: ofSide((*measurement).rivals, quantile((*measurement).latency, 0.99))},
	"wake50":   {title: "p50 µs", spread: true, of: quantile((*measurement).wake, 0.5)},
	"wake99":   {title: "p99 µs", spread: true, of: quantile((*measurement).wake, 0.99)},
	"wakes":    {title: "wake-ups a second", of: func(m *measurement) float64 { return float64(m.wake().n) / m.elapsed().Seconds() }},
	"last50":   {title: "the last, p50 µs", spread: true, of: quantile((*measurement).last, 0.5)},
	"queued":   {title: "queued", of: total(func(o *outcome) float64 { return float64(o.Queued) })},
	"overtook": {title: "overtook", zero: true, of: total(func(o *outcome) float64 { return float64(o.Overtook) })},
	"trips":    {title: "round trips", of: total(func(o *outcome) float64 { return float64(o.Trips) })},
	"heap":     {title: "heap B", of: total(func(o *outcome) float64 { return o.Heap })},
	"stacks":   {title: "stacks B", zero: true, of: total(func(o *outcome) float64 { return o.Stacks })},
	"memory":   {title: "heap and stacks B", of: total(func(o *outcome) float64 { return o.Heap + o.Stacks })},
	"resident": {title: "resident B", of: total(func(o *outcome) float64 { return o.Resident })},
	"threads":  {title: "goroutines", digits: 2, zero: true, of: total(func(o *outcome) float64 { return o.Goroutines })},
	"requests": {title: "requests a second", digits: 2, of: func(m *measurement) float64 { return float64(m.Commands) / m.elapsed().Seconds() }},
	"client":   {title: "client µs", digits: 1, of: each(func(o *outcome) float64 { return o.CPU.Seconds() * 1e6 })},
	"server":   {title: "server µs", digits: 1, of: func(m *measurement) float64 { return m.each(m.ServerCPU.Seconds() * 1e6) }},
	"scripts":  {title: "scripts µs", digits: 1, of: func(m *measurement) float64 { return m.each(m.Scripts.Seconds() * 1e6) }},
	"cpu":      {title: "process, % of a core", digits: 2, of: func(m *measurement) float64 { return m.share(m.cpu()) }},
	"load":     {title: "server, % of a core", digits: 2, of: func(m *measurement) float64 { return m.share(m.ServerCPU) }},
}

// total returns a function that sums up a quantity of the processes, and one that divides the
// sum by the operations.
func total(of func(o *outcome) float64) func(m *measurement) float64 {
	return func(m *measurement) float64 { return m.sum(of) }
}

func each(of func(o *outcome) float64) func(m *measurement) float64 {
	return func(m *measurement) float64 { return m.each(m.sum(of)) }
}

func (m *measurement) sum(of func(o *outcome) float64) (sum float64) {
	for _, o := range m.Outcomes {
		sum += of(o)
	}
	return sum
}

func (m *measurement) ops() int {
	return int(m.sum(func(o *outcome) float64 { return float64(o.ops()) }))
}

// each returns the quantity per operation.
func (m *measurement) each(total float64) float64 { return total / float64(max(m.ops(), 1)) }

// own and rivals return the outcomes of the first half of the processes, and of the second.
func (m *measurement) own() *measurement {
	return &measurement{Outcomes: m.Outcomes[:firstRival(len(m.Outcomes))]}
}
func (m *measurement) rivals() *measurement {
	return &measurement{Outcomes: m.Outcomes[firstRival(len(m.Outcomes)):]}
}

// firstRival returns the number of the first process that is a rival if there are any.
func firstRival(processes int) int { return (processes + 1) / 2 }

// ofSide returns a measure of a part of the processes.
func ofSide(side func(m *measurement) *measurement, of func(m *measurement) float64) func(m *measurement) float64 {
	return func(m *measurement) float64 { return of(side(m)) }
}

// rate returns the operations of all processes per second.
func (m *measurement) rate() float64 {
	return m.sum(func(o *outcome) float64 { return float64(o.ops()) / max(o.Elapsed.Seconds(), 1e-9) })
}

func (m *measurement) elapsed() (d time.Duration) {
	for _, o := range m.Outcomes {
		d = max(d, o.Elapsed)
	}
	return max(d, 1)
}

func (m *measurement) cpu() (d time.Duration) {
	for _, o := range m.Outcomes {
		d += o.CPU
	}
	return d
}

// share returns the share of the elapsed time for which a core was used, in percent.
func (m *measurement) share(used time.Duration) float64 {
	return 100 * float64(used) / float64(m.elapsed())
}

// shares returns the operations of each goroutine.
func (m *measurement) shares() (all []int) {
	for _, o := range m.Outcomes {
		all = append(all, o.Shares...)
	}
	return all
}

// processShares returns the operations of each process, relative to an equal share.
func (m *measurement) processShares() (shares []float64) {
	equal := float64(m.ops()) / float64(len(m.Outcomes))
	for _, o := range m.Outcomes {
		shares = append(shares, float64(o.ops())/equal)
	}
	return shares
}

func (m *measurement) latency() *histogram {
	return m.merged(func(o *outcome) *histogram { return &o.Latency })
}
func (m *measurement) last() *histogram {
	return m.merged(func(o *outcome) *histogram { return &o.Last })
}

func (m *measurement) merged(of func(o *outcome) *histogram) *histogram {
	var all histogram
	for _, o := range m.Outcomes {
		all.merge(of(o))
	}
	return &all
}

// wake returns the duration of each wake-up: those reported by the workers, and each change of
// the holder between processes.
func (m *measurement) wake() *histogram {
	type event struct {
		at        int64
		contender int
		gave      bool
	}
	all := m.merged(func(o *outcome) *histogram { return &o.Wake })
	var events []event
	for contender, o := range m.Outcomes {
		for _, at := range o.Got {
			events = append(events, event{at, contender, false})
		}
		for _, at := range o.Gave {
			events = append(events, event{at, contender, true})
		}
	}
	slices.SortFunc(events, func(a, b event) int { return cmp.Compare(a.at, b.at) })
	for i := 1; i < len(events); i++ {
		if last, e := events[i-1], events[i]; last.gave && !e.gave && last.contender != e.contender {
			all.add(time.Duration(e.at - last.at))
		}
	}
	return all
}

// quantile returns a function that computes a quantile, in µs.
func quantile(of func(m *measurement) *histogram, q float64) func(m *measurement) float64 {
	return func(m *measurement) float64 { return float64(of(m).quantile(q)) / float64(time.Microsecond) }
}

// jain returns Jain's fairness index: 1 if all shares are equal, 1/n if one has everything.
// See Jain, Chiu and Hawe, "A Quantitative Measure of Fairness and Discrimination", DEC TR-301
// (1984).
func jain(shares []int) float64 {
	var sum, squares float64
	for _, s := range shares {
		sum += float64(s)
		squares += float64(s) * float64(s)
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(shares)) * squares)
}
