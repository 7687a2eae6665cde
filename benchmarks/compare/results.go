package main

import (
	"encoding/json"
	"os"
	"slices"
)

// results are the results of a comparison, from which the report is written.
type results struct {
	Date        string           `json:"date"`
	Repetitions int              `json:"repetitions"`
	Window      float64          `json:"window"` // in seconds: see scenarios
	Machine     machine          `json:"machine"`
	Versions    []version        `json:"versions"`
	Noise       noise            `json:"noise"`
	Scenarios   []scenarioResult `json:"scenarios"`
}

type scenarioResult struct {
	Number int          `json:"number"`
	Title  string       `json:"title"`
	About  string       `json:"about"`
	Cells  []cellResult `json:"cells"`
}

type cellResult struct {
	Name     string   `json:"name"`
	Size     int      `json:"size"` // see cell
	Measures []string `json:"measures"`
	Best     string   `json:"best"`
	Base     string   `json:"base,omitempty"`
	Rows     []*row   `json:"rows"`
}

// cells returns the cells of a scenario, and none if it was not measured.
func (r *results) cells(number int) []cellResult {
	for _, s := range r.Scenarios {
		if s.Number == number {
			return s.Cells
		}
	}
	return nil
}

// cell returns the cell of that name, or one without rows.
func (r *results) cell(number int, name string) cellResult {
	for _, c := range r.cells(number) {
		if c.Name == name {
			return c
		}
	}
	return cellResult{}
}

// figure returns the figure of a measure for a peer, and none if it was not measured.
func (c cellResult) figure(peer, measure string) figure {
	for _, r := range c.Rows {
		if r.Peer == peer {
			return r.Figures[measure]
		}
	}
	return nil
}

// first returns the best of the peers for which ask returns true, and "" if there is none. The
// floor is not a peer.
func (c cellResult) first(measure string, ask func(peer string) bool) (best string) {
	for _, r := range c.Rows {
		f := r.Figures[measure]
		if isFloor(r.Peer) || len(f) == 0 || !ask(r.Peer) {
			continue
		}
		if best == "" || better(measure, f.median(), c.figure(best, measure).median()) {
			best = r.Peer
		}
	}
	return best
}

// better reports whether one value of a measure is better than another.
func better(measure string, a, b float64) bool {
	if measure == "rate" {
		return a > b
	}
	return a < b
}

// peers returns all measured peers, in order of appearance.
func (r *results) peers() (all []string) {
	for _, s := range r.Scenarios {
		for _, c := range s.Cells {
			for _, row := range c.Rows {
				if !slices.Contains(all, row.Peer) {
					all = append(all, row.Peer)
				}
			}
		}
	}
	return all
}

func (r *results) write(file string) error {
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(compact(text), '\n'), 0o644)
}

// compact puts lists of numbers on one line.
func compact(text []byte) []byte {
	var out []byte
	list := false
	for i, b := range text {
		switch {
		case b == '[' && i+1 < len(text) && text[i+1] == '\n' && isNumbers(text[i+1:]):
			list = true
		case b == ']':
			list = false
		}
		if list && (b == '\n' || b == '\t') {
			continue
		}
		out = append(out, b)
	}
	return out
}

// isNumbers reports whether the first element of a list is a number.
func isNumbers(text []byte) bool {
	for _, b := range text {
		if b != '\n' && b != '\t' {
			return b == '-' || b >= '0' && b <= '9'
		}
	}
	return false
}

func read(file string) (*results, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	r := &results{}
	return r, json.Unmarshal(text, r)
}
