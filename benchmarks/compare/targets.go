package main

import (
	"fmt"
	"slices"
	"strings"
)

// target is a goal for redlatch.
type target struct {
	scenario int
	what     string
	atMost   bool // the limit is an upper one
	limit    float64
	readings []reading // all must be within the limit
}

// reading is a value and its text in the report.
type reading struct {
	text  string
	value float64
	known bool
}

func (t target) verdict() string {
	verdict := "not measured"
	for _, r := range t.readings {
		switch {
		case !r.known:
			return "not measured"
		case t.atMost && r.value > t.limit, !t.atMost && r.value < t.limit:
			return "**not met**"
		}
		verdict = "met"
	}
	return verdict
}

func (t target) reached() string {
	var all []string
	for _, r := range t.readings {
		if r.known {
			all = append(all, r.text)
		}
	}
	if len(all) == 0 {
		return none
	}
	return strings.Join(all, "; ")
}

const us = "redlatch"

// targets returns the goals and the values that redlatch reached in these results.
func (r *results) targets() []target {
	one, many := r.cell(1, plural(1, "goroutine")), r.cell(1, plural(64, "goroutine"))
	four := r.cell(3, "4 x 32 goroutines")
	waking := r.cell(4, "2 processes")
	fair := r.cell(5, "fair lock")
	most := r.cell(6, plural(100_000, "lock"))
	least := func(scenario int, what string, limit float64, readings ...reading) target {
		return target{scenario, what, false, limit, readings}
	}
	atMost := func(scenario int, what string, limit float64, readings ...reading) target {
		return target{scenario, what, true, limit, readings}
	}
	return []target{
		least(1, "0.95 of the floor's throughput with one goroutine", 0.95, one.against("floor", "rate")),
		least(1, "0.90 of the floor's throughput with 64 goroutines", 0.90, many.against("floor", "rate")),
		least(1, "no peer has a higher throughput", 1, ofEach(r.cells(1), cellResult.againstBest)...),
		atMost(1, "at most 10 allocations", 10, one.reads("allocs", 1)),
		atMost(1, "at most 1 KiB", 1024, one.reads("bytes", 0)),

		least(2, "3 times the throughput of the best peer with 128 goroutines", 3, r.cell(2, plural(128, "goroutine")).againstBest()),
		least(2, "3 times with 1 024", 3, r.cell(2, plural(1024, "goroutine")).againstBest()),
		least(2, "Jain's index at least 0.98", 0.98, ofEach(r.cells(2), func(c cellResult) reading { return c.reads("jain", 3) })...),
		atMost(2, "at most 1.2 commands", 1.2, ofEach(r.cells(2), func(c cellResult) reading { return c.reads("commands", 2) })...),

		least(3, "twice the throughput of the best peer", 2, four.againstBest()),
		atMost(3, "at most 4 commands", 4, four.reads("commands", 2)),
		least(3, "every process has at least 0.8 of an equal share", 0.8, four.reads("least", 2)),
		atMost(3, "and at most 1.2", 1.2, four.reads("most", 2)),

		atMost(4, "median at most 1.3 times the floor's", 1.3, waking.against("floor", "wake50")),
		atMost(4, "median not above Redisson's", 1, waking.against(redisson, "wake50")),

		least(5, "fair lock: 5 times the throughput of Redisson", 5, fair.against(redisson, "rate")),
		atMost(5, "fair lock: no waiter is overtaken", 0, r.cell(5, orderCell).reads("overtook", 0)),

		atMost(6, "100 000 holds: at most 10 % of a core", 10, most.reads("cpu", 2)),
		atMost(6, "100 000 holds: at most 1 KiB each", 1024, most.reads("memory", 0)),

		atMost(7, "at most 4 KiB for each waiter", 4096, ofEach(r.cells(7), func(c cellResult) reading { return c.reads("memory", 0) })...),

		least(8, "not slower than redsync with one goroutine", 1, r.redLocks(1)...),
		least(8, "3 times redsync's throughput with 16", 3, r.redLocks(16)...),
	}
}

// ofEach returns a reading of each cell.
func ofEach(cells []cellResult, of func(c cellResult) reading) (all []reading) {
	for _, c := range cells {
		all = append(all, of(c))
	}
	return all
}

// redLocks compares redlatch with redsync for that many goroutines.
func (r *results) redLocks(goroutines int) (all []reading) {
	for _, c := range r.cells(8) {
		if c.Size == goroutines {
			all = append(all, c.against("redsync", "rate"))
		}
	}
	return all
}

// reads returns the value of a measure for redlatch.
func (c cellResult) reads(measure string, digits int) reading {
	f := c.figure(us, measure)
	return reading{number(f.median(), digits), f.median(), len(f) > 0}
}

// against returns the value of a measure for redlatch, relative to a peer.
func (c cellResult) against(peer, measure string) reading {
	f := c.figure(us, measure).over(c.figure(peer, measure))
	return reading{fmt.Sprintf("%s of %s's", number(f.median(), 2), peer), f.median(), len(f) > 0}
}

// fairly is the least index of Jain at which a lock counts as shared equally.
const fairly = 0.9

// againstBest returns the throughput of redlatch relative to the best other peer. If that peer
// does not lock on Redis, or lets few goroutines dominate, the result also names the best one
// that does not.
func (c cellResult) againstBest() reading {
	best := c.first("rate", func(peer string) bool { return peer != us })
	if best == "" {
		return reading{}
	}
	read := c.against(best, "rate")
	named := []string{best}
	also := func(what string, ask func(peer string) bool) {
		peer := c.first("rate", func(peer string) bool { return peer != us && ask(peer) })
		if peer == "" || slices.Contains(named, peer) {
			return
		}
		named = append(named, peer)
		read.text += fmt.Sprintf(", %s: %s", what, c.against(peer, "rate").text)
	}
	also("on Redis", func(peer string) bool { return slices.Contains(redisPeers, peer) })
	also("among the fair", func(peer string) bool { return c.figure(peer, "jain").median() >= fairly })
	return read
}
