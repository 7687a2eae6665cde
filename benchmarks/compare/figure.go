package main

import (
	"cmp"
	"errors"
	"slices"
	"strconv"
)

// figure has the value of a measure in each repetition, in order.
type figure []float64

// median returns 0 if there are no values.
func (f figure) median() float64 {
	if len(f) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(f))
	mid := len(sorted) / 2
	if len(sorted)%2 == 0 {
		return (sorted[mid-1] + sorted[mid]) / 2
	}
	return sorted[mid]
}

// bounds returns the least and the greatest value.
func (f figure) bounds() (least, most float64) {
	if len(f) == 0 {
		return 0, 0
	}
	return slices.Min(f), slices.Max(f)
}

// over returns the ratio of two figures. It pairs repetitions that both have, because
// disturbances of the machine affect both then.
func (f figure) over(base figure) figure {
	if len(f) == 0 || base.median() == 0 {
		return nil
	}
	var ratios figure
	for i, v := range f {
		by := base.median()
		if len(base) == len(f) && base[i] != 0 {
			by = base[i]
		}
		ratios = append(ratios, v/by)
	}
	return ratios
}

// row is the result of a peer in a cell.
type row struct {
	Peer    string            `json:"peer"`
	Figures map[string]figure `json:"figures,omitempty"`
	Failed  int               `json:"failed,omitempty"`
	Failure string            `json:"failure,omitempty"` // the first
}

// add adds a repetition. One without any operation counts as failed: omitting it would flatter
// the peer.
func (r *row) add(m *measurement, keys []string) {
	before := r.Failed
	for _, o := range m.Outcomes {
		r.Failed += o.Failed
		r.Failure = cmp.Or(r.Failure, o.Failure)
	}
	if m.ops() == 0 {
		if r.Failed == before {
			r.failed(errors.New("no operation in a repetition"))
		}
		return
	}
	if r.Figures == nil {
		r.Figures = map[string]figure{}
	}
	for _, key := range keys {
		if v := measures[key].of(m); v != 0 || measures[key].zero {
			r.Figures[key] = append(r.Figures[key], rounded(v))
		}
	}
}

// rounded keeps five digits: more would be noise and enlarge the file.
func rounded(v float64) float64 {
	v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 5, 64), 64)
	return v
}

// failed adds a failed repetition.
func (r *row) failed(err error) {
	r.Failed++
	r.Failure = cmp.Or(r.Failure, err.Error())
}
