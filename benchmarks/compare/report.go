package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// The files of a report.
const (
	figuresFile = "figures.json"
	reportFile  = "README.md"
)

// writeReport writes the text and the plots of results to a directory.
func (r *results) writeReport(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	charts := r.charts()
	for _, c := range charts {
		if err := c.draw(filepath.Join(dir, c.file)); err != nil {
			return fmt.Errorf("%s: %w", c.file, err)
		}
	}
	return os.WriteFile(filepath.Join(dir, reportFile), []byte(r.text(charts)), 0o644)
}

// text is the report in Markdown.
func (r *results) text(charts []chart) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# redlatch beside others\n\n"+
		"Written by `make bench` on %s: do not edit it. All peers ran on one machine, one after the other, beginning with\n"+
		"another one in each repetition, against servers on the same machine. They have the settings they come with, but leases of 30 s,\n"+
		"pools of 100 connections where there are pools, as many tries as it takes, and no logs. redislock has no way of its own to\n"+
		"wait: it tries every 100 ms, as its documentation has it. rueidislock has one key (`KeyMajority` 1), `NoLoopTracking`, and\n"+
		"`TryNextAfter` 1 s, without which a late reply makes it wait for ever. Redisson's virtual machine has the serial collector and\n"+
		"is warmed up for 5 to 10 s a kind of object; ZooKeeper's server, which is one too, only as all the others are.\n\n"+
		"- Figures are medians of %s, and of %d where one goroutine is alone, with the least and the greatest in brackets.\n"+
		"  Most measurements took %s s; sections 6 and 7 were measured once. Ratios are medians of those of the repetitions.\n"+
		"  `%s` has them all.\n"+
		"- An operation is an acquisition and its release. Times are of both together, where nothing else is said.\n"+
		"- Commands are what clients sent to the servers, but for a `DEL` that Redisson sends after each release of a lock:\n"+
		"  servers count it together with those of scripts. Allocations and bytes are those of the whole process; Java's are not\n"+
		"  known. What is not known is \"%s\".\n\n",
		r.Date, plural(r.Repetitions, "repetition"), alone*r.Repetitions, number(r.Window, 1), figuresFile, none)
	r.writeMachine(&b)
	r.writeTargets(&b)
	r.writeFirsts(&b)
	for _, s := range r.Scenarios {
		fmt.Fprintf(&b, "## %d. %s\n\n%s\n\n", s.Number, s.Title, s.About)
		for _, c := range charts {
			if c.scenario == s.Number {
				fmt.Fprintf(&b, "![%s](%s)\n\n", c.title, c.file)
			}
		}
		for _, c := range s.Cells {
			c.write(&b)
		}
	}
	r.writeNoise(&b)
	return strings.TrimRight(b.String(), "\n") + "\n"
}

func (r *results) writeMachine(b *strings.Builder) {
	fmt.Fprintf(b, "%s, %s, %s, %.1f GB of memory.\n\n", r.Machine.CPU, plural(r.Machine.Cores, "core"), r.Machine.Kernel, r.Machine.MemoryGB)
	t := newTable("what", "version")
	for _, v := range r.Versions {
		t.row(v.Name, v.Version)
	}
	fmt.Fprintf(b, "%s\n", t)
}

func (r *results) writeTargets(b *strings.Builder) {
	fmt.Fprintf(b, "## Targets\n\nA best peer is the best of all that were measured there, of whatever server and however unfair. The\n"+
		"best on Redis, and of those with a Jain's index of %.1f or more, stand beside it.\n\n", fairly)
	t := newTable("target", "reached", "")
	for _, of := range r.targets() {
		t.row(fmt.Sprintf("%d: %s", of.scenario, of.what), of.reached(), of.verdict())
	}
	fmt.Fprintf(b, "%s\n", t)
}

// writeFirsts tells who was best in each situation, and how far redlatch was from that.
func (r *results) writeFirsts(b *strings.Builder) {
	fmt.Fprintf(b, "## Who was first\n\n")
	t := newTable("situation", "by", "first", "it had", "redlatch had")
	for _, s := range r.Scenarios {
		for _, c := range s.Cells {
			first := c.first(c.Best, func(string) bool { return true })
			if len(c.Rows) < 2 || first == "" {
				continue // there is no one to be compared with
			}
			m := measures[c.Best]
			short := measure{digits: m.digits}
			t.row(fmt.Sprintf("%d: %s", s.Number, c.Name), m.title, first, short.text(c.figure(first, c.Best)), short.text(c.figure(us, c.Best)))
		}
	}
	fmt.Fprintf(b, "%s\n", t)
}

// write writes the table of a cell, and why peers failed in it.
func (c cellResult) write(b *strings.Builder) {
	titles := []string{"peer"}
	compared := c.Base != "" && len(c.Rows) > 1
	if compared {
		titles = append(titles, measures[c.Best].title+", of "+c.Base+"'s")
	}
	for _, key := range c.Measures {
		titles = append(titles, measures[key].title)
	}
	t := newTable(append(titles, "failed")...)
	var failures []string
	for _, r := range c.Rows {
		cells := []string{r.Peer}
		if compared {
			base := c.figure(c.Base, c.Best)
			cells = append(cells, ratio(r.Figures[c.Best].over(base)))
		}
		for _, key := range c.Measures {
			cells = append(cells, measures[key].text(r.Figures[key]))
		}
		t.row(append(cells, number(float64(r.Failed), 0))...)
		if r.Failure != "" {
			failures = append(failures, fmt.Sprintf("%s failed: `%s`.", r.Peer, firstLine(r.Failure)))
		}
	}
	fmt.Fprintf(b, "### %s\n\n%s\n", c.Name, t)
	for _, f := range failures {
		fmt.Fprintf(b, "%s\n\n", f)
	}
}

// firstLine is the part of an error that a report has room for.
func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return strings.ReplaceAll(line, "`", "'")
}

func (r *results) writeNoise(b *strings.Builder) {
	least, most := r.Noise.Floor.bounds()
	fmt.Fprintf(b, "## Noise\n\n"+
		"The floor with one goroutine, before each scenario and at the end, had from %s to %s operations a second, and %s in\n"+
		"the median: differences smaller than that say nothing. The host of the machine took %s %% of its time. The load\n"+
		"average before was %s.\n",
		number(least, 0), number(most, 0), number(r.Noise.Floor.median(), 0), number(r.Noise.Steal, 1), number(r.Noise.Load, 2))
}
