package main

import (
	"fmt"
	"slices"
	"strconv"
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

// reading is a value, as it is printed, and its text in the report.
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

// printed returns the reading of a figure. More digits would be noise: the figures of a process include
// what its runtime does meanwhile.
func (f figure) printed(digits int) reading {
	v, _ := strconv.ParseFloat(strconv.FormatFloat(f.median(), 'f', digits, 64), 64)
	return reading{number(v, digits), v, len(f) > 0}
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
		least(1, "0.95 of the floor with one goroutine and `context.Background()`", 0.95, one.ofFloor(ourBackground, wrappedBackground)...),
		least(1, "0.85 of the floor with one goroutine and contexts that can be canceled", 0.85, one.ofFloor(us, wrapped)...),
		least(1, "0.92 of the floor with 64 goroutines", 0.92, many.ofFloor(us, wrapped, ourBackground, wrappedBackground)...),
		least(1, "0.95 of the fastest library on Redis with one goroutine", 0.95, one.againstRedis()),
		atMost(1, "at most 9 allocations", 9, one.reads("allocs", 1)),
		atMost(1, "at most 1,100 bytes", 1100, one.reads("bytes", 0)),
		least(1, "0.9 of the recipe of another store with one goroutine", 0.9, one.ofRecipes("rate")...),
		least(1, "and with 64", 0.9, many.ofRecipes("rate")...),
		atMost(1, "a multi-lock of three names costs at most 1.3 times as much with one goroutine and with 64", 1.3,
			one.costOf(ofThree), many.costOf(ofThree)),

		least(2, "8 times the throughput of the best peer with 128 goroutines", 8, r.cell(2, plural(128, "goroutine")).againstBest()),
		least(2, "8 times with 1,024", 8, r.cell(2, plural(1024, "goroutine")).againstBest()),
		least(2, "0.9 of the recipe of another store with 16", 0.9, r.cell(2, plural(16, "goroutine")).ofRecipes("rate")...),
		least(2, "and with 128", 0.9, r.cell(2, plural(128, "goroutine")).ofRecipes("rate")...),
		least(2, "Jain's index at least 0.98", 0.98, ofEach(r.cells(2), func(c cellResult) reading { return c.reads("jain", 3) })...),

		least(3, "4 times the throughput of the best peer", 4, four.againstBest()),
		least(3, "0.9 of the recipe of another store", 0.9, four.ofRecipes("rate")...),
		least(3, "Jain's index at least 0.98", 0.98, four.reads("jain", 3)),
		least(3, "every process has at least 0.8 of an equal share", 0.8, four.reads("least", 2)),
		atMost(3, "and at most 1.2", 1.2, four.reads("most", 2)),

		atMost(4, "median not above Redisson's", 1, waking.against(redisson, "wake50")),
		atMost(4, "at most 5.1 commands", 5.1, waking.reads("commands", 2)),
		atMost(4, "fair lock: at most 5.1 commands", 5.1, r.cell(4, fairWaking).reads("commands", 2)),
		atMost(4, "other stores: median at most 1.1 of the recipe's", 1.1, r.cell(4, storeWaking).ofRecipes("wake50")...),

		least(5, "fair lock: 10 times the throughput of Redisson", 10, fair.against(redisson, "rate")),
		least(5, "fair lock: 5 times with four processes", 5, r.cell(5, fairProcesses).against(redisson, "rate")),
		atMost(5, "fair lock: no waiter is overtaken", 0, r.cell(5, orderCell).reads("overtook", 0)),
		atMost(5, "semaphore: at most 2.5 times the time of Redisson's scripts", 2.5, r.cell(5, semaphoreCell).against(redisson, "scripts")),
		atMost(5, "semaphore: at most 24 allocations", 24, r.cell(5, semaphoreCell).reads("allocs", 1)),
		least(5, "semaphore: 0.7 of the lock's throughput", 0.7, r.cell(5, semaphoreCell).relativeTo(many)),
		atMost(5, "permit semaphore: at most twice the time of Redisson's scripts", 2, r.cell(5, permitCell).against(redisson, "scripts")),
		atMost(5, "permit semaphore: at most 30 allocations", 30, r.cell(5, permitCell).reads("allocs", 1)),
		least(5, "permit semaphore: 0.7 of the lock's throughput", 0.7, r.cell(5, permitCell).relativeTo(many)),
		atMost(5, "latch: 99% of 1,000 waiters in four processes return within 10 ms", 10_000, r.cell(5, latchCell).reads("wake99", 0)),

		atMost(6, "100,000 holds: at most 10% of a core", 10, most.reads("cpu", 2)),
		atMost(6, "100,000 holds: at most 900 bytes each", 900, most.reads("memory", 0)),

		atMost(7, "at most 6.5 KiB for each waiter for one lock", 6656, r.cell(7, waitersOfOne).reads("memory", 0)),
		atMost(7, "at most 11 KiB for each waiter for a lock of its own", 11264, r.cell(7, waitersOfEach).reads("memory", 0)),

		least(8, "not slower than redsync with one goroutine", 1, r.redLocks(1)...),
		least(8, "4 times the throughput of redsync with 3 servers and 16 goroutines", 4,
			r.cell(8, redLockCell(3, 16)).against("redsync", "rate")),

		least(9, "0.98 of the throughput without a limit", 0.98,
			r.cell(9, sharedCell).against(noLimit, "rate"), r.cell(9, subscribed).against(noLimit, "rate")),

		atMost(10, "at most 3 round trips more than the floor", 3, r.cell(10, startCell).above("floor", "trips")),
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
	return c.figure(us, measure).printed(digits)
}

// against returns the value of a measure for redlatch, relative to a peer.
func (c cellResult) against(peer, measure string) reading {
	read := c.figure(us, measure).over(c.figure(peer, measure)).printed(2)
	read.text += fmt.Sprintf(" of %s's", peer)
	return read
}

// recipes are what redlatch on a store is compared with there: the recipe of the store or of its client.
var recipes = []struct{ ours, theirs string }{{onEtcd, "etcd"}, {onZookeeper, "zookeeper"}, {onZookeeper, curator}, {onAdvisory, "postgres"}}

// ofRecipes compares redlatch on other stores with the recipes that the cell has.
func (c cellResult) ofRecipes(measure string) (all []reading) {
	for _, of := range recipes {
		if !slices.ContainsFunc(c.Rows, func(r *row) bool { return r.Peer == of.theirs }) {
			continue
		}
		read := c.figure(of.ours, measure).over(c.figure(of.theirs, measure)).printed(2)
		read.text += fmt.Sprintf(" of %s's", of.theirs)
		all = append(all, read)
	}
	return all
}

// ofFloor compares redlatch, or its variants, with the faster of the two floors.
func (c cellResult) ofFloor(ours ...string) (all []reading) {
	base := c.figure("floor", "rate")
	if other := c.figure(floorBackground, "rate"); other.median() > base.median() {
		base = other
	}
	for _, peer := range ours {
		read := c.figure(peer, "rate").over(base).printed(2)
		read.text = peer + ": " + read.text
		all = append(all, read)
	}
	return all
}

// costOf returns the throughput relative to that of a variant: how much more the variant costs.
func (c cellResult) costOf(variant string) reading {
	return c.figure(us, "rate").over(c.figure(variant, "rate")).printed(2)
}

// above returns how much the value of a measure for redlatch exceeds that for a peer.
func (c cellResult) above(peer, measure string) reading {
	ours, theirs := c.figure(us, measure), c.figure(peer, measure)
	v := ours.median() - theirs.median()
	return reading{number(v, 0), v, len(ours) > 0 && len(theirs) > 0}
}

// relativeTo returns the throughput relative to that in another cell.
func (c cellResult) relativeTo(other cellResult) reading {
	return c.figure(us, "rate").over(other.figure(us, "rate")).printed(2)
}

// againstRedis returns the throughput of redlatch relative to the best other peer on Redis.
func (c cellResult) againstRedis() reading {
	best := c.first("rate", func(peer string) bool { return !isOurs(peer) && slices.Contains(redisPeers, peer) })
	if best == "" {
		return reading{}
	}
	return c.against(best, "rate")
}

// fairly is the least index of Jain at which a lock counts as shared equally.
const fairly = 0.9

// againstBest returns the throughput of redlatch relative to the best other peer. If that peer
// does not lock on Redis, or lets few goroutines dominate, the result also names the best one
// that does not.
func (c cellResult) againstBest() reading {
	best := c.first("rate", func(peer string) bool { return !isOurs(peer) })
	if best == "" {
		return reading{}
	}
	read := c.against(best, "rate")
	named := []string{best}
	also := func(what string, ask func(peer string) bool) {
		peer := c.first("rate", func(peer string) bool { return !isOurs(peer) && ask(peer) })
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
