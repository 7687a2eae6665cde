package main

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestFigures(t *testing.T) {
	assert.Zero(t, figure(nil).median())
	assert.Equal(t, 2.0, figure{3, 1, 2}.median())
	assert.Equal(t, 2.5, figure{4, 1, 3, 2}.median())
	f := figure{3, 1, 2}
	least, most := f.bounds()
	assert.Equal(t, []float64{1, 3}, []float64{least, most})
	assert.Equal(t, figure{3, 1, 2}, f, "the order of repetitions is kept")
}

func TestRatiosAreOfTheSameRepetition(t *testing.T) {
	// The machine was twice as fast in the second repetition.
	assert.Equal(t, figure{2, 2, 2}, figure{20, 40, 20}.over(figure{10, 20, 10}))
	assert.Equal(t, figure{2, 4}, figure{20, 40}.over(figure{10, 10, 10}), "the ratio of medians if one has failed")
	assert.Empty(t, figure{1}.over(nil))
	assert.Empty(t, figure(nil).over(figure{1}))
}

func TestJain(t *testing.T) {
	assert.InDelta(t, 1, jain([]int{5, 5, 5, 5}), 1e-9)
	assert.InDelta(t, 0.25, jain([]int{20, 0, 0, 0}), 1e-9)
	assert.Zero(t, jain(nil))
}

func TestMeasures(t *testing.T) {
	m := &measurement{Commands: 120, ServerCPU: 500 * time.Millisecond, Outcomes: []*outcome{
		{Elapsed: time.Second, Shares: []int{20, 10}, Allocs: 600, Bytes: 6000, CPU: 20 * time.Millisecond, Heap: 100, Stacks: 10, Goroutines: 2},
		{Elapsed: 2 * time.Second, Shares: []int{20, 10}, Allocs: 600, Bytes: 6000},
	}}
	for range 60 {
		m.Outcomes[0].Latency.add(10 * time.Microsecond)
	}
	for key, want := range map[string]float64{
		"rate": 45, "commands": 2, "allocs": 20, "bytes": 200, "least": 1, "most": 1,
		"cpu": 1, "load": 25, "client": 333.333333333, "server": 8333.333333333, "memory": 110, "heap": 100, "threads": 2, "requests": 60,
	} {
		assert.InDelta(t, want, measures[key].of(m), 1e-6, key)
	}
	assert.InEpsilon(t, 10, measures["p50"].of(m), 0.02)
	m.Outcomes[1].Shares = []int{90}
	assert.InDelta(t, 0.5, measures["least"].of(m), 1e-9)
	assert.InDelta(t, 1.5, measures["most"].of(m), 1e-9)
}

func TestOnlyWhatPassesBetweenProcessesIsAWakeUp(t *testing.T) {
	m := &measurement{Outcomes: []*outcome{
		{Got: []int64{0, 5_000}, Gave: []int64{4_000, 6_000}}, // it acquires it again at 5 µs
		{Got: []int64{9_000}, Gave: []int64{12_000}},
	}}
	h := m.wake()
	assert.EqualValues(t, 1, h.n)
	assert.InEpsilon(t, 3_000, float64(h.quantile(0.5)), 0.02)
}

func TestRowsKeepTheFirstFailure(t *testing.T) {
	var r row
	r.add(&measurement{Outcomes: []*outcome{{Elapsed: time.Second, Shares: []int{7}}}}, []string{"rate", "commands", "overtook"})
	r.add(&measurement{Outcomes: []*outcome{{Elapsed: time.Second, Failed: 3, Failure: "first"}}}, []string{"rate"})
	r.failed(errors.New("second"))
	assert.Equal(t, row{Figures: map[string]figure{"rate": {7}, "overtook": {0}}, Failed: 4, Failure: "first"}, r,
		"0 commands means unknown")
}

func TestARepetitionWithoutOperationsHasFailed(t *testing.T) {
	var r row
	r.add(&measurement{Outcomes: []*outcome{{Elapsed: time.Second}}}, []string{"rate"})
	assert.Equal(t, row{Failed: 1, Failure: "no operation in a repetition"}, r)
}

func TestFiveDigitsAreKept(t *testing.T) {
	assert.Equal(t, 123460.0, rounded(123456))
	assert.Equal(t, 0.0012346, rounded(0.00123456))
}

func TestOvertaken(t *testing.T) {
	assert.Zero(t, overtaken(nil))
	assert.Zero(t, overtaken([]int{0, 1, 2, 3}))
	assert.Equal(t, 1, overtaken([]int{0, 3, 1, 2}))
	assert.Equal(t, 3, overtaken([]int{3, 2, 1, 0}))
}
