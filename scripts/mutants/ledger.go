package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"os"
	"sync"
)

// A record is the result of a mutant, as a line of the ledger.
type record struct {
	ID       string   `json:"id"`
	Seed     uint64   `json:"seed,omitempty"`
	Line     int      `json:"line"`
	Diff     string   `json:"diff"`
	Outcome  outcome  `json:"outcome"`
	By       string   `json:"by,omitempty"` // the test that detected it
	Seconds  float64  `json:"seconds"`
	Packages []string `json:"packages,omitempty"` // packages whose tests did not detect it
}

type outcome string

const (
	killed   outcome = "killed"
	survived outcome = "survived"
	redrawn  outcome = "does not compile"
)

// ledger is a file with a line of JSON for each mutant. Without a name there is none.
type ledger struct {
	mu   sync.Mutex
	file *os.File
	done map[string]record
	seed uint64 // of the last record that was drawn; 0 if there is none
}

func openLedger(name string) (*ledger, error) {
	l := &ledger{done: map[string]record{}}
	if name == "" {
		return l, nil
	}
	file, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	l.file = file
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, errors.Join(err, file.Close())
		}
		l.done[r.ID] = r
		l.seed = cmp.Or(r.Seed, l.seed)
	}
	return l, lines.Err()
}

// has returns the earlier result of a mutant.
func (l *ledger) has(id string) (record, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, ok := l.done[id]
	return r, ok
}

func (l *ledger) add(r record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done[r.ID] = r
	if l.file == nil {
		return nil
	}
	lines := json.NewEncoder(l.file)
	lines.SetEscapeHTML(false)
	return lines.Encode(r)
}
