package main

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestNumbers(t *testing.T) {
	for want, got := range map[string]string{
		"0":         number(0, 0),
		"999":       number(999, 0),
		"1,000":     number(999.6, 0),
		"1,234,567": number(1234567, 0),
		"12,345.68": number(12345.678, 2),
		"-1.5":      number(-1.5, 1),
		"0.0":       number(-0.01, 1),
		none:        number(math.NaN(), 0),
		"1 lock":    plural(1, "lock"),
	} {
		assert.Equal(t, want, got)
	}
	assert.Equal(t, "10,000 locks", plural(10_000, "lock"))
}

func TestFiguresInTables(t *testing.T) {
	m := measure{spread: true}
	assert.Equal(t, "2 (1–3)", m.text(figure{1, 3, 2}))
	assert.Equal(t, "2", m.text(figure{2}), "a single value has no range")
	assert.Equal(t, none, m.text(nil))
	assert.Equal(t, "1.25", ratio(figure{1.25}))
	assert.Equal(t, none, ratio(nil))
}

func TestTables(t *testing.T) {
	table := newTable("peer", "a second")
	table.row("a|b", "1\n2")
	assert.Equal(t, "| peer | a second |\n|---|---:|\n| a\\|b | 1 2 |\n", table.String())
}
