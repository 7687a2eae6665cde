package main

import (
	"bytes"
	"cmp"
	"fmt"
	"image/color"
	"math"
	"os"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/text"
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

// charts returns the plots of the results. A title is the message of its chart.
func (r *results) charts() []chart {
	quick := r.cell(1, plural(64, "goroutine"))
	contended, processes := r.cell(2, plural(128, "goroutine")), r.cell(3, "4 x 32 goroutines")
	ratio := func(f figure) string { return number(f.median(), 1) }
	all := []chart{
		r.bySize(1, "throughput-uncontended.svg", fmt.Sprintf("Uncontended: %s of the throughput of two bare scripts",
			number(quick.figure(us, "rate").over(quick.figure("floor", "rate")).median(), 2)), "rate"),
		r.byQuantile(quick, 1, "latency-uncontended.svg", "Uncontended: half of the pairs take less than %s µs", "p50"),
		r.bySize(2, "throughput-contended.svg", fmt.Sprintf("One lock: %s times the throughput of the next library",
			ratio(contended.aboveNext())), "rate"),
		r.byQuantile(contended, 2, "latency-contended.svg", "One lock: 99.9%% of the pairs take less than %s µs", "p99.9"),
		r.byName(3, "throughput-processes.svg", fmt.Sprintf("Four processes: %s times the throughput of the next library", ratio(processes.aboveNext())),
			"operations a second", "rate"),
		r.wakeUps(),
		r.byName(5, "throughput-kinds.svg", fmt.Sprintf("Other kinds: at least %s times the throughput of Redisson", ratio(r.leastAbove(5))),
			"operations a second", "rate"),
		r.costOfHolds(),
		r.byName(8, "throughput-redlock.svg", fmt.Sprintf("Redlock: %s times the throughput of redsync",
			ratio(r.cell(8, redLockCell(3, 16)).figure(us, "rate").over(r.cell(8, redLockCell(3, 16)).figure("redsync", "rate")))),
			"operations a second", "rate"),
	}
	return slices.DeleteFunc(all, func(c chart) bool { return len(c.series) == 0 })
}

// aboveNext returns the throughput of redlatch relative to the best other peer.
func (c cellResult) aboveNext() figure {
	next := c.first("rate", func(peer string) bool { return !isOurs(peer) })
	return c.figure(us, "rate").over(c.figure(next, "rate"))
}

// leastAbove returns the least throughput relative to the best other peer in the cells of a scenario.
func (r *results) leastAbove(scenario int) (least figure) {
	for _, c := range r.cells(scenario) {
		if f := c.aboveNext(); len(f) > 0 && (least == nil || f.median() < least.median()) {
			least = f
		}
	}
	return least
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
		if _, ok := variants[peer]; ok {
			continue // the table has them
		}
		s := series{name: peer, of: peer}
		for _, cell := range cells {
			s.values = append(s.values, cell.figure(peer, measure).median())
		}
		c.add(s)
	}
	return c
}

// byQuantile plots the latencies of one cell. The title contains that measure of redlatch.
func (r *results) byQuantile(cell cellResult, scenario int, file, title, measure string) chart {
	title = fmt.Sprintf(title, number(cell.figure(us, measure).median(), 0))
	return r.byMeasure(chart{scenario: scenario, file: file, title: title}, cell, "p50", "p99", "p99.9")
}

func (r *results) wakeUps() chart {
	cell := r.cell(4, "2 processes")
	return r.byMeasure(chart{
		scenario: 4, file: "wake-up.svg",
		title: fmt.Sprintf("Wake-up: half of the waiters get the lock within %s µs", number(cell.figure(us, "wake50").median(), 0)),
	}, cell, "wake50", "wake99")
}

// byMeasure plots several measures of one cell, in µs.
func (r *results) byMeasure(c chart, cell cellResult, keys ...string) chart {
	c.y, c.lines = "µs", true
	for _, key := range keys {
		name := strings.TrimSuffix(measures[key].title, " µs")
		c.positions = append(c.positions, position{name: name})
	}
	for _, row := range cell.Rows {
		if _, ok := variants[row.Peer]; ok {
			continue
		}
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
	most := r.cell(6, plural(100_000, "lock"))
	c := r.byName(6, "cost-of-holds.svg", fmt.Sprintf("100,000 held locks take %s%% of a core", number(most.figure(us, "cpu").median(), 1)),
		"% of a core", "cpu")
	c.x, c.lines = "locks", true
	servers := r.byName(6, "", "", "", "load")
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

// colors can be distinguished by color-blind readers. Most are those of Okabe and Ito, "Color
// Universal Design" (2008).
var colors = map[string]color.Color{
	us:            color.RGBA{0xd5, 0x5e, 0x00, 0xff},
	"floor":       color.Gray{0x80},
	"redsync":     color.RGBA{0x00, 0x72, 0xb2, 0xff},
	"redislock":   color.RGBA{0x00, 0x9e, 0x73, 0xff},
	"rueidislock": color.RGBA{0xcc, 0x79, 0xa7, 0xff},
	redisson:      color.RGBA{0xe6, 0x9f, 0x00, 0xff},
	"etcd":        color.RGBA{0x56, 0xb4, 0xe9, 0xff},
	"zookeeper":   color.RGBA{0x6b, 0x4c, 0x2a, 0xff},
	curator:       color.RGBA{0x99, 0x99, 0x33, 0xff},
	"postgres":    color.Black,
	"mariadb":     color.Gray{0xa8},
}

// A chart has the width of a narrow window. It is white, because an image cannot know whether its
// page is dark.
const (
	chartWidth = 600 * vg.Inch / 96
	lineHeight = 375 * vg.Inch / 96 // of a chart with lines
	barWidth   = 12 * vg.Inch / 72
)

func (c chart) height() vg.Length {
	if c.lines {
		return lineHeight
	}
	return 80*vg.Inch/96 + vg.Length(len(c.positions))*(vg.Length(len(c.series))*barWidth+8*vg.Inch/72)
}

// draw writes the plot to a file.
func (c chart) draw(file string) error {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = c.title, c.x, c.y
	if !c.lines {
		p.X.Label.Text, p.Y.Label.Text = c.y, ""
	}
	p.Title.Padding = vg.Points(8)
	for _, style := range []*text.Style{
		&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label,
	} {
		style.Font.Variant = "Sans"
	}
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
	if c.lines {
		if err := c.label(p); err != nil {
			return err
		}
	}
	drawing, err := p.WriterTo(chartWidth, c.height(), "svg")
	if err != nil {
		return err
	}
	var svg bytes.Buffer
	if _, err := drawing.WriteTo(&svg); err != nil {
		return err
	}
	// Few machines have the font whose metrics were used. These have the same.
	fonts := []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;")
	return os.WriteFile(file, bytes.ReplaceAll(svg.Bytes(), []byte("font-family:Liberation Sans;"), fonts), 0o644)
}

// scale sets up the axes, with room for labels on the right.
func (c chart) scale(p *plot.Plot) {
	var names []string
	for _, position := range c.positions {
		names = append(names, position.name)
	}
	if !c.lines {
		slices.Reverse(names)
		p.NominalY(names...)
		p.Y.Tick.Label.Font.Size = vg.Points(9)
		p.Y.Padding = vg.Points(16) // for fonts that are wider
		p.Y.Min, p.Y.Max = -0.5, float64(len(names))-0.5
		p.X.Min = 0
		p.X.Max *= 1.4
		p.X.Tick.Marker = plot.TickerFunc(func(least, most float64) []plot.Tick { return numbered(plot.DefaultTicks{}.Ticks(least, most)) })
		return
	}
	p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.TickerFunc(decadeTicks)
	p.Y.Min, p.Y.Max = decades(p.Y.Min, p.Y.Max)
	if c.x == "" {
		p.NominalX(names...)
		p.X.Min, p.X.Max = -0.2, 1.4*float64(len(names)-1)
		return
	}
	var ticks []plot.Tick
	for _, position := range c.positions {
		ticks = append(ticks, plot.Tick{Value: position.at, Label: number(position.at, 0)})
	}
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.ConstantTicks(ticks)
	p.X.Max = p.X.Min * math.Pow(p.X.Max/p.X.Min, 1.4)
}

// decadeTicks returns a tick for each power of ten.
func decadeTicks(least, most float64) (ticks []plot.Tick) {
	for v := least; v <= most*1.001; v *= 10 {
		ticks = append(ticks, plot.Tick{Value: v})
	}
	return numbered(ticks)
}

// numbered labels the ticks that are labeled, or all if none is, with separators.
func numbered(ticks []plot.Tick) []plot.Tick {
	all := !slices.ContainsFunc(ticks, func(t plot.Tick) bool { return t.Label != "" })
	for i, t := range ticks {
		if all || t.Label != "" {
			ticks[i].Label = number(t.Value, max(0, -int(math.Floor(math.Log10(max(t.Value, 1e-9))))))
		}
		if t.Value == 0 {
			ticks[i].Label = "0"
		}
	}
	return ticks
}

// points returns the values of a series that a logarithmic axis can show.
func (c chart) points(s series) (at plotter.XYs) {
	for j, v := range s.values {
		if v <= 0 {
			continue
		}
		x := float64(j)
		if c.x != "" {
			x = c.positions[j].at
		}
		at = append(at, plotter.XY{X: x, Y: v})
	}
	return at
}

func (c chart) addLine(p *plot.Plot, i int, s series) error {
	line, points, err := plotter.NewLinePoints(c.points(s))
	if err != nil {
		return err
	}
	line.Color, line.Width = colors[s.of], vg.Points(1.5)
	points.Color, points.Shape, points.Radius = colors[s.of], plotutil.Shape(i), vg.Points(3)
	if s.of == us {
		line.Width = vg.Points(3)
	}
	if s.name != s.of {
		line.Dashes = plotutil.Dashes(1)
	}
	p.Add(line, points)
	return nil
}

// label writes the name of each series beside the end of its line.
func (c chart) label(p *plot.Plot) error {
	const gap = 0.062 // of the axis, for a line of text
	var at plotter.XYs
	var names []string
	var heights []float64
	span := math.Log10(p.Y.Max / p.Y.Min)
	for _, s := range c.series {
		points := c.points(s)
		end := points[len(points)-1]
		at, names = append(at, end), append(names, s.name)
		heights = append(heights, math.Log10(end.Y/p.Y.Min)/span)
	}
	for i, height := range spread(heights, gap) {
		at[i].Y = p.Y.Min * math.Pow(10, height*span)
	}
	labels, err := plotter.NewLabels(plotter.XYLabels{XYs: at, Labels: names})
	if err != nil {
		return err
	}
	labels.Offset.X = vg.Points(7)
	for i, s := range c.series {
		style := &labels.TextStyle[i]
		style.Color, style.Font.Variant, style.Font.Size, style.YAlign = colors[s.of], "Sans", vg.Points(10), text.YCenter
	}
	p.Add(labels)
	return nil
}

// spread returns heights near the given ones, at least gap apart.
func spread(heights []float64, gap float64) []float64 {
	order := make([]int, len(heights))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(heights[a], heights[b]) })
	moved := slices.Clone(heights)
	for close := true; close; {
		close = false
		for i := 1; i < len(order); i++ {
			low, high := &moved[order[i-1]], &moved[order[i]]
			if lack := gap - (*high - *low); lack > 1e-6 {
				*low, *high, close = *low-lack/2, *high+lack/2, true
			}
		}
	}
	return moved
}

// addBars adds the bars of a series, each with the name and the value beside it.
func (c chart) addBars(p *plot.Plot, i int, s series) error {
	values, names := make(plotter.Values, len(s.values)), make([]string, len(s.values))
	at := make(plotter.XYs, len(s.values))
	for j, v := range s.values {
		row := len(s.values) - 1 - j // from the top
		values[row], at[row] = v, plotter.XY{X: v, Y: float64(row)}
		if v > 0 {
			names[row] = s.name + " " + number(v, 0)
		}
	}
	bars, err := plotter.NewBarChart(values, barWidth)
	if err != nil {
		return err
	}
	bars.Horizontal, bars.Color, bars.LineStyle.Width = true, colors[s.of], 0
	bars.Offset = barWidth * vg.Length(float64(len(c.series)-1)/2-float64(i))
	labels, err := plotter.NewLabels(plotter.XYLabels{XYs: at, Labels: names})
	if err != nil {
		return err
	}
	labels.Offset = vg.Point{X: vg.Points(4), Y: bars.Offset}
	for j := range labels.TextStyle {
		style := &labels.TextStyle[j]
		style.Color, style.Font.Variant, style.Font.Size, style.YAlign = color.Black, "Sans", vg.Points(9), text.YCenter
	}
	p.Add(bars, labels)
	return nil
}

// decades widens a range to whole powers of ten.
func decades(least, most float64) (from, to float64) {
	return math.Pow(10, math.Floor(math.Log10(least))), math.Pow(10, math.Ceil(math.Log10(most)))
}
