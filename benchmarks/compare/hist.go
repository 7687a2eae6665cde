package main

import (
	"encoding/json"
	"math/bits"
	"time"
)

// histogram counts durations in buckets that are at most 1.6 % wide. The zero value is empty.
// Counting does not allocate.
type histogram struct {
	counts [buckets]uint32
	n      uint64
}

const (
	subBits = 6 // buckets for each power of two
	buckets = (42 - subBits) << subBits
)

func bucketOf(d time.Duration) int {
	v := uint64(max(d, 0))
	shift := max(bits.Len64(v)-subBits-1, 0)
	return min(shift<<subBits+int(v>>shift), buckets-1)
}

// lowest returns the shortest duration of a bucket.
func lowest(bucket int) time.Duration {
	if bucket < 2<<subBits {
		return time.Duration(bucket)
	}
	shift := bucket>>subBits - 1
	return time.Duration(bucket-shift<<subBits) << shift
}

func (h *histogram) add(d time.Duration) {
	h.counts[bucketOf(d)]++
	h.n++
}

func (h *histogram) merge(other *histogram) {
	for i, n := range other.counts {
		h.counts[i] += n
	}
	h.n += other.n
}

// quantile returns a duration that a share q of all durations does not exceed, and 0 if there
// are none.
func (h *histogram) quantile(q float64) time.Duration {
	left := uint64(q * float64(h.n))
	for i, n := range h.counts {
		if uint64(n) > left {
			return lowest(i)
		}
		left -= uint64(n)
	}
	return 0
}

// MarshalJSON writes the buckets that are not empty.
func (h *histogram) MarshalJSON() ([]byte, error) {
	some := map[int]uint32{}
	for i, n := range h.counts {
		if n > 0 {
			some[i] = n
		}
	}
	return json.Marshal(some)
}

// UnmarshalJSON reads the output of MarshalJSON.
func (h *histogram) UnmarshalJSON(b []byte) error {
	var some map[int]uint32
	if err := json.Unmarshal(b, &some); err != nil {
		return err
	}
	*h = histogram{}
	for i, n := range some {
		h.counts[i], h.n = n, h.n+uint64(n)
	}
	return nil
}
