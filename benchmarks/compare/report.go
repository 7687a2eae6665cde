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

// text returns the report in Markdown.
func (r *results) text(charts []chart) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# redlatch and other libraries\n\n"+
		"Written by `make bench` on %s: do not edit. All peers ran on one machine, one after the other, in a different order in\n"+
		"each repetition, against servers on the same machine. They use their default settings, except leases of 30 s, pools of\n"+
		"100 connections, unlimited retries, and no logs. redislock has no default way to wait: it retries every 100 ms, as in its\n"+
		"documentation. rueidislock has one key (`KeyMajority` 1), `NoLoopTracking`, and `TryNextAfter` 1 s, without which a late\n"+
		"reply makes it wait forever. The virtual machines of Redisson and Curator use the serial collector and are warmed up for\n"+
		"5 to 10 s for each kind of object; that of ZooKeeper's server is warmed up for 10 s.\n\n"+
		"- Figures are medians of %s, and of %d for a single goroutine, with the least and the greatest value in brackets.\n"+
		"  Most measurements took %s s; sections 6, 7, 10 and 13 were measured once. Ratios are medians of the ratios of the repetitions.\n"+
		"  `%s` contains all values.\n"+
		"- An operation is an acquisition and its release. Unless stated otherwise, times cover both.\n"+
		"- Commands are those that clients sent to the servers, except a `DEL` that Redisson sends after each release of a lock:\n"+
		"  servers count it together with those of scripts. Those on etcd are messages, and those on ZooKeeper packets. Client and server are the processor times of both, per\n"+
		"  operation, and scripts is the part of the server's that it spends on scripts. Allocations and bytes are those of the whole process; Java's are unknown. Unknown values are shown as \"%s\".\n"+
		"- Acquisitions and releases use contexts that can be canceled, as in an HTTP handler, unless the name says otherwise.\n\n",
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
	fmt.Fprintf(b, "## Targets\n\nThe best peer is the best of all peers measured there, on any server and however unfair. If it differs,\n"+
		"the best peer on Redis and the best with a Jain's index of at least %.1f follow.\n\n", fairly)
	t := newTable("target", "reached", "")
	for _, of := range r.targets() {
		t.row(fmt.Sprintf("%d: %s", of.scenario, of.what), of.reached(), of.verdict())
	}
	fmt.Fprintf(b, "%s\n", t)
}

// writeFirsts names the best peer in each situation and how redlatch compares.
func (r *results) writeFirsts(b *strings.Builder) {
	fmt.Fprintf(b, "## Ranking\n\n")
	t := newTable("situation", "measure", "best peer", "its value", "redlatch")
	for _, s := range r.Scenarios {
		for _, c := range s.Cells {
			first := c.first(c.Best, func(string) bool { return true })
			if len(c.Rows) < 2 || first == "" {
				continue // no other peer to compare with
			}
			m := measures[c.Best]
			short := measure{digits: m.digits}
			t.row(fmt.Sprintf("%d: %s", s.Number, c.Name), m.title, first, short.text(c.figure(first, c.Best)), short.text(c.figure(us, c.Best)))
		}
	}
	fmt.Fprintf(b, "%s\n", t)
}

// write writes the table of a cell, and the failures of peers in it.
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

// firstLine returns the part of an error that fits into a report.
func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return strings.ReplaceAll(line, "`", "'")
}

func (r *results) writeNoise(b *strings.Builder) {
	least, most := r.Noise.Floor.bounds()
	fmt.Fprintf(b, "## Noise\n\n"+
		"The floor with one goroutine, before each scenario and at the end, reached %s to %s operations a second, with a\n"+
		"median of %s: smaller differences are not significant. The host of the machine took %s%% of its time. The load\n"+
		"average before was %s.\n",
		number(least, 0), number(most, 0), number(r.Noise.Floor.median(), 0), number(r.Noise.Steal, 1), number(r.Noise.Load, 2))
}
