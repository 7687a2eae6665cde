package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// table is one of Markdown.
type table struct{ strings.Builder }

func newTable(titles ...string) *table {
	t := &table{}
	t.row(titles...)
	fmt.Fprintln(t, "|---"+strings.Repeat("|---:", len(titles)-1)+"|")
	return t
}

func (t *table) row(cells ...string) {
	for i, c := range cells {
		cells[i] = strings.NewReplacer("|", `\|`, "\n", " ").Replace(c)
	}
	fmt.Fprintln(t, "| "+strings.Join(cells, " | ")+" |")
}

// none stands for what is not known.
const none = "–"

// number writes a number with so many digits after the point and its thousands apart.
func number(v float64, digits int) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return none
	}
	whole, rest, _ := strings.Cut(strconv.FormatFloat(math.Abs(v), 'f', digits, 64), ".")
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + " " + whole[i:]
	}
	if rest != "" {
		whole += "." + rest
	}
	if v < 0 && strings.Trim(whole, "0. ") != "" {
		whole = "-" + whole
	}
	return whole
}

// plural writes how many there are of something.
func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return number(float64(n), 0) + " " + what
}

// text writes a figure: its median, and from the least to the greatest.
func (m measure) text(f figure) string {
	if len(f) == 0 {
		return none
	}
	s := number(f.median(), m.digits)
	if least, most := f.bounds(); m.spread && len(f) > 1 {
		s += " (" + number(least, m.digits) + "–" + number(most, m.digits) + ")"
	}
	return s
}

// ratio writes a ratio, which has none of its own measure.
func ratio(f figure) string {
	if len(f) == 0 {
		return none
	}
	return number(f.median(), 2)
}
