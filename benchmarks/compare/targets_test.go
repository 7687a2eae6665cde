package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestVerdicts(t *testing.T) {
	known := func(v float64) reading { return reading{text: "it", value: v, known: true} }
	for _, c := range []struct {
		atMost   bool
		readings []reading
		want     string
	}{
		{false, []reading{known(1), known(2)}, "met"},
		{false, []reading{known(2), known(0.9)}, "**not met**"},
		{true, []reading{known(1), known(0)}, "met"},
		{true, []reading{known(1.1)}, "**not met**"},
		{false, []reading{known(2), {}}, "not measured"},
		{false, nil, "not measured"},
	} {
		assert.Equal(t, c.want, target{atMost: c.atMost, limit: 1, readings: c.readings}.verdict())
	}
}

// A verdict counts the digits that are printed.
func TestReadingsAreRounded(t *testing.T) {
	assert.Equal(t, reading{"384", 384, true}, figure{384.4}.printed(0))
	assert.Equal(t, reading{"0.98", 0.98, true}, figure{0.9751}.printed(2))
	assert.False(t, figure{}.printed(0).known)
}

// contendedBy returns results of one cell of scenario 2 with the throughputs of some peers.
func contendedBy(rates map[string]float64) *results {
	c := cellResult{Name: plural(128, "goroutine"), Measures: []string{"rate"}, Best: "rate", Base: us}
	for _, peer := range append([]string{"floor"}, append(redisPeers, otherPeers...)...) {
		if rate, ok := rates[peer]; ok {
			c.Rows = append(c.Rows, &row{Peer: peer, Figures: map[string]figure{"rate": {rate}}})
		}
	}
	return &results{Scenarios: []scenarioResult{{Number: 2, Title: "Contended", Cells: []cellResult{c}}}}
}

func (r *results) target(what string) target {
	for _, t := range r.targets() {
		if strings.Contains(t.what, what) {
			return t
		}
	}
	return target{}
}

func TestTheBestPeerIsNamed(t *testing.T) {
	const what = "the best peer with 128 goroutines"
	of := contendedBy(map[string]float64{"floor": 1000, us: 100, "redsync": 10, redisson: 12.5}).target(what)
	assert.Equal(t, "8.00 of redisson's", of.reached())
	assert.Equal(t, "met", of.verdict())

	of = contendedBy(map[string]float64{us: 100, redisson: 25, "postgres": 200}).target(what)
	assert.Equal(t, "0.50 of postgres's, on Redis: 4.00 of redisson's", of.reached())
	assert.Equal(t, "**not met**", of.verdict())

	r := contendedBy(map[string]float64{us: 100, "redislock": 200, redisson: 25})
	r.Scenarios[0].Cells[0].Rows[1].Figures["jain"] = figure{0.1}
	r.Scenarios[0].Cells[0].Rows[2].Figures["jain"] = figure{0.95}
	assert.Equal(t, "0.50 of redislock's, among the fair: 4.00 of redisson's", r.target(what).reached())

	of = contendedBy(map[string]float64{us: 100}).target(what)
	assert.Equal(t, none, of.reached())
	assert.Equal(t, "not measured", of.verdict())
}

func TestNothingIsReachedWithoutFigures(t *testing.T) {
	for _, of := range (&results{}).targets() {
		assert.Equal(t, "not measured", of.verdict(), of.what)
	}
}

// A target for an unknown cell or measure would never be measured.
func TestTargetsNameWhatIsMeasured(t *testing.T) {
	r := &results{}
	for _, s := range scenarios(1) {
		result := scenarioResult{Number: s.number}
		for _, c := range s.cells {
			of := cellResult{Name: c.name, Size: c.size, Measures: s.measures}
			if c.measures != nil {
				of.Measures = c.measures
			}
			for _, peer := range c.peers {
				r := &row{Peer: peer, Figures: map[string]figure{}}
				for _, key := range of.Measures {
					r.Figures[key] = figure{1}
				}
				of.Rows = append(of.Rows, r)
			}
			result.Cells = append(result.Cells, of)
		}
		r.Scenarios = append(r.Scenarios, result)
	}
	for _, of := range r.targets() {
		assert.NotEqual(t, "not measured", of.verdict(), of.what)
	}
}
