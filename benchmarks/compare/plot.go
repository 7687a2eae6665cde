package main

import (
	"image/color"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

// chart is a plot: values of some peers at several positions. They are lines on a logarithmic
// axis, or bars.
type chart struct {
	scenario int
	file     string
	title    string
	y        string
	// positions are the positions: names, or numbers on another logarithmic axis if x is set.
	x         string
	positions []position
	lines     bool
	series    []series
}

type position struct {
	name string
	at   float64
}

// series are the values of a peer at the positions; 0 where it has none.
type series struct {
	name   string
	of     string // the peer, which determines the color
	values []float64
}

// charts returns the plots of the results.
func (r *results) charts() []chart {
	all := []chart{
		r.bySize(1, "throughput-uncontended.svg", "Uncontended", "rate"),
		r.byQuantile(1, "latency-uncontended.svg", plural(64, "goroutine")),
		r.bySize(2, "throughput-contended.svg", "One lock, one process", "rate"),
		r.byQuantile(2, "latency-contended.svg", plural(128, "goroutine")),
		r.byName(3, "throughput-processes.svg", "One lock, four processes", "operations a second", "rate"),
		r.wakeUps(),
		r.byName(5, "throughput-kinds.svg", "Other kinds", "operations a second", "rate"),
		r.costOfHolds(),
		r.byName(8, "throughput-redlock.svg", "RedLock", "operations a second", "rate"),
	}
	return slices.DeleteFunc(all, func(c chart) bool { return len(c.series) == 0 })
}

// bySize plots the throughput over the number of goroutines.
func (r *results) bySize(scenario int, file, title, measure string) chart {
	c := r.byName(scenario, file, title, "operations a second", measure)
	c.x, c.lines = "goroutines", true
	return c
}

// byName plots a measure in all cells that have it.
func (r *results) byName(scenario int, file, title, y, measure string) chart {
	c := chart{scenario: scenario, file: file, title: title, y: y}
	cells := slices.DeleteFunc(slices.Clone(r.cells(scenario)), func(c cellResult) bool { return !slices.Contains(c.Measures, measure) })
	for _, cell := range cells {
		c.positions = append(c.positions, position{cell.Name, float64(cell.Size)})
	}
	for _, peer := range r.peers() {
		s := series{name: peer, of: peer}
		for _, cell := range cells {
			s.values = append(s.values, cell.figure(peer, measure).median())
		}
		c.add(s)
	}
	return c
}

// byQuantile plots the latencies of one cell.
func (r *results) byQuantile(scenario int, file, name string) chart {
	cell := r.cell(scenario, name)
	return r.byMeasure(chart{scenario: scenario, file: file, title: "Latency with " + name}, cell, "p50", "p99", "p99.9")
}

func (r *results) wakeUps() chart {
	c := chart{scenario: 4, file: "wake-up.svg", title: "From unlock to the lock in another process"}
	return r.byMeasure(c, r.cell(4, "2 processes"), "wake50", "wake99")
}

// byMeasure plots several measures of one cell, in µs.
func (r *results) byMeasure(c chart, cell cellResult, keys ...string) chart {
	c.y, c.lines = "µs", true
	for _, key := range keys {
		name := strings.TrimSuffix(measures[key].title, " µs")
		c.positions = append(c.positions, position{name: name})
	}
	for _, row := range cell.Rows {
		s := series{name: row.Peer, of: row.Peer}
		for _, key := range keys {
			s.values = append(s.values, row.Figures[key].median())
		}
		c.add(s)
	}
	return c
}

// costOfHolds plots the processor time of processes and their servers over the number of
// locks.
func (r *results) costOfHolds() chart {
	c := r.byName(6, "cost-of-holds.svg", "Held locks that are renewed", "% of a core", "cpu")
	c.x, c.lines = "locks", true
	servers := r.byName(6, "", "", "", "server")
	for _, s := range servers.series {
		s.name += ", its server"
		c.add(s)
	}
	return c
}

// add adds a series unless it is empty.
func (c *chart) add(s series) {
	if slices.ContainsFunc(s.values, func(v float64) bool { return v > 0 }) {
		c.series = append(c.series, s)
	}
}

// colour returns the color of a peer, the same in all plots.
func colour(peer string) color.Color {
	switch peer {
	case us:
		return color.RGBA{R: 0xc0, A: 0xff}
	case "floor":
		return color.Gray{0x80}
	}
	colours := slices.Concat(plotutil.DarkColors, plotutil.SoftColors)
	i := slices.Index(slices.Concat(redisPeers, otherPeers), peer)
	return colours[max(i, 0)]
}

// draw writes the plot to a file.
func (c chart) draw(file string) error {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = c.title, c.x, c.y
	p.Title.Padding, p.Legend.Padding, p.Legend.Top = vg.Points(8), vg.Points(3), true
	p.Add(plotter.NewGrid())
	add := c.addBars
	if c.lines {
		add = c.addLine
	}
	for i, s := range c.series {
		if err := add(p, i, s); err != nil {
			return err
		}
	}
	c.scale(p)
	return p.Save(8*vg.Inch, 4.5*vg.Inch, file)
}

// scale sets up the axes, with room on the right for the legend.
func (c chart) scale(p *plot.Plot) {
	if c.lines {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		p.Y.Min, p.Y.Max = decades(p.Y.Min, p.Y.Max)
	} else {
		p.Y.Min = 0
	}
	if c.x != "" {
		var ticks []plot.Tick
		for _, position := range c.positions {
			ticks = append(ticks, plot.Tick{Value: position.at, Label: number(position.at, 0)})
		}
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.ConstantTicks(ticks)
		p.X.Max *= 4
		return
	}
	var names []string
	for _, position := range c.positions {
		names = append(names, position.name)
	}
	p.NominalX(names...)
	p.X.Min, p.X.Max = -0.5, 1.25*float64(len(names))-0.5
	if len(names) > 4 { // side by side they would not fit
		p.X.Tick.Label.Rotation, p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = 0.5, -1, -0.5
	}
}

func (c chart) addLine(p *plot.Plot, i int, s series) error {
	var at plotter.XYs
	for j, v := range s.values {
		if v <= 0 { // not representable on a logarithmic axis
			continue
		}
		x := float64(j)
		if c.x != "" {
			x = c.positions[j].at
		}
		at = append(at, plotter.XY{X: x, Y: v})
	}
	line, points, err := plotter.NewLinePoints(at)
	if err != nil {
		return err
	}
	line.Color, line.Width = colour(s.of), vg.Points(1.5)
	points.Color, points.Shape, points.Radius = colour(s.of), plotutil.Shape(i), vg.Points(3)
	if s.of == us {
		line.Width = vg.Points(3)
	}
	if s.name != s.of {
		line.Dashes = plotutil.Dashes(1)
	}
	p.Add(line, points)
	p.Legend.Add(s.name, line, points)
	return nil
}

func (c chart) addBars(p *plot.Plot, i int, s series) error {
	width := vg.Points(300 / float64(len(c.series)*len(c.positions)))
	bars, err := plotter.NewBarChart(plotter.Values(s.values), width)
	if err != nil {
		return err
	}
	bars.Color, bars.LineStyle.Width = colour(s.of), 0
	bars.Offset = width * vg.Length(float64(i)-float64(len(c.series)-1)/2)
	p.Add(bars)
	p.Legend.Add(s.name, bars)
	return nil
}

// decades widens a range to whole powers of ten.
func decades(least, most float64) (from, to float64) {
	return math.Pow(10, math.Floor(math.Log10(least))), math.Pow(10, math.Ceil(math.Log10(most)))
}
