package main

import (
	"encoding/json"
	"testing"
	"time"
)

func TestHistogram(t *testing.T) {
	var h histogram
	for d := range 10_000 {
		h.add(time.Duration(d) * time.Microsecond)
	}
	for _, q := range []float64{0.01, 0.5, 0.99, 0.999} {
		want := time.Duration(q*10_000) * time.Microsecond
		if got := h.quantile(q); got > want || float64(got) < 0.98*float64(want) {
			t.Errorf("quantile %v is %v, not %v", q, got, want)
		}
	}
	for _, d := range []time.Duration{0, 1, 63, 64, 127, 128, 129, 1000, time.Second, time.Minute} {
		low, next := lowest(bucketOf(d)), lowest(bucketOf(d)+1)
		if d < low || d >= next {
			t.Errorf("%v is in the bucket from %v to %v", d, low, next)
		}
	}
	text, err := json.Marshal(&h)
	var again histogram
	if err != nil || json.Unmarshal(text, &again) != nil || again != h {
		t.Error("JSON changes it")
	}
}
