package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// table is a table in Markdown.
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

// none marks an unknown value.
const none = "–"

// number formats a number with n digits after the point and thousands separators.
func number(v float64, digits int) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return none
	}
	whole, rest, _ := strings.Cut(strconv.FormatFloat(math.Abs(v), 'f', digits, 64), ".")
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if rest != "" {
		whole += "." + rest
	}
	if v < 0 && strings.Trim(whole, "0.") != "" {
		whole = "-" + whole
	}
	return whole
}

// plural formats a number of things.
func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return number(float64(n), 0) + " " + what
}

// text formats a figure: its median, the least and the greatest value.
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

// ratio formats a ratio, which has no measure.
func ratio(f figure) string {
	if len(f) == 0 {
		return none
	}
	return number(f.median(), 2)
}
