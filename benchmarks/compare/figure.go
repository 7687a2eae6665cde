package main

import (
	"cmp"
	"errors"
	"slices"
	"strconv"
)

// figure is what a measure was in each repetition, in their order.
type figure []float64

// median is 0 if there is none.
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

// bounds returns the least and the greatest.
func (f figure) bounds() (least, most float64) {
	if len(f) == 0 {
		return 0, 0
	}
	return slices.Min(f), slices.Max(f)
}

// over returns the ratio of two figures. Repetitions are compared one by one where both
// have them: what disturbs the machine for a while disturbs both then.
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

// row is what a peer has come to in a cell.
type row struct {
	Peer    string            `json:"peer"`
	Figures map[string]figure `json:"figures,omitempty"`
	Failed  int               `json:"failed,omitempty"`
	Failure string            `json:"failure,omitempty"` // the first
}

// add adds a repetition. One without any operation has failed, too: leaving it out would
// make the peer better than it is.
func (r *row) add(m *measurement, keys []string) {
	before := r.Failed
	for _, o := range m.Outcomes {
		r.Failed += o.Failed
		r.Failure = cmp.Or(r.Failure, o.Failure)
	}
	if m.ops() == 0 {
		if r.Failed == before {
			r.failed(errors.New("nothing was done in a repetition"))
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

// rounded keeps five digits: more would be noise, and make the file big.
func rounded(v float64) float64 {
	v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 5, 64), 64)
	return v
}

// failed adds a repetition that did not come about.
func (r *row) failed(err error) {
	r.Failed++
	r.Failure = cmp.Or(r.Failure, err.Error())
}
