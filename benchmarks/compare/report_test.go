package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestReport(t *testing.T) {
	r := contendedBy(map[string]float64{us: 100, redisson: 125, "etcd": 10})
	r.Scenarios[0].Cells[0].Rows[2].failed(os.ErrDeadlineExceeded)
	text := r.text(r.charts())
	assert.Contains(t, text, "| 2: 128 goroutines | a second | redisson | 125 | 100 |", "ranking")
	assert.Contains(t, text, "| etcd | 0.10 | 10 | 1 |")
	assert.Contains(t, text, "etcd failed: `i/o timeout`.")
	assert.Contains(t, text, "](throughput-contended.svg)")
}

func TestResultsComeBackFromTheirFile(t *testing.T) {
	r := contendedBy(map[string]float64{us: 100, "etcd": 10})
	r.Noise.Floor = figure{1, 2.5, -3}
	file := filepath.Join(t.TempDir(), figuresFile)
	require.NoError(t, r.write(file))
	again, err := read(file)
	require.NoError(t, err)
	assert.Equal(t, r, again)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Contains(t, string(text), "[1,2.5,-3]", "each figure is on one line")
}

func TestPlots(t *testing.T) {
	r := contendedBy(map[string]float64{us: 100, "etcd": 10})
	charts := r.charts()
	require.Len(t, charts, 1, "peers without figures are omitted")
	charts[0].series[1].values = append(charts[0].series[1].values, 0) // not on a logarithmic axis
	charts[0].positions = append(charts[0].positions, position{"1,024 goroutines", 1024})
	charts[0].positions[0].at = 128
	file := filepath.Join(t.TempDir(), charts[0].file)
	require.NoError(t, charts[0].draw(file))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, want := range []string{"<svg", ">redlatch<", ">etcd<", ">128<"} {
		assert.Contains(t, string(text), want)
	}
	from, to := decades(12, 340)
	assert.Equal(t, []float64{10, 1000}, []float64{from, to})
}
