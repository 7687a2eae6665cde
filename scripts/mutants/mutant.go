package main

import (
	"bytes"
	"cmp"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// A mutant is one small change of the production code: a replaced text.
type mutant struct {
	file        string // relative to the root, with slashes
	offset, end int    // of the text that is replaced
	operator    string
	text        string // the replacement
	line        int    // from 1
}

// id names a mutant. It is stable while the file does not change before it.
func (m mutant) id() string { return fmt.Sprintf("%s:%d:%s", m.file, m.offset, m.operator) }

// dir is the package of the file.
func (m mutant) dir() string { return strings.TrimSuffix(path.Dir(m.file), "/lua") }

// apply returns the source with the change.
func (m mutant) apply(src []byte) []byte {
	return slices.Concat(src[:m.offset], []byte(m.text), src[m.end:])
}

// diff shows the change in one line: the first of the changed lines, before and after.
func (m mutant) diff(src []byte) string {
	begin := bytes.LastIndexByte(src[:m.offset], '\n') + 1
	firstLine := func(s []byte) string {
		line, rest, more := bytes.Cut(s, []byte("\n"))
		text := strings.TrimSpace(string(line))
		if more && len(rest) > 0 {
			text += " ..."
		}
		return text
	}
	end := m.end
	if i := bytes.IndexByte(src[end:], '\n'); i >= 0 {
		end += i
	}
	after := m.apply(src[:end])
	return firstLine(src[begin:end]) + "  =>  " + cmp.Or(firstLine(after[begin:]), "(nothing)")
}

// production are the packages whose code is mutated.
var production = []string{
	".", "countdown", "election", "fairlock", "grouplock", "lock", "lock/driver", "multilock", "once", "probe", "pubsub", "ratelimit", "rlock", "rwlock", "semaphore",
	"internal/callsite", "internal/engine", "internal/hub", "internal/session", "internal/telemetry", "internal/text", "internal/watchdog",
	"internal/wire",
}

// find returns all mutants of the production code below root, in a fixed order.
func find(root string) (all []mutant, err error) {
	for _, dir := range production {
		files, err := fs.Glob(os.DirFS(root), path.Join(dir, "*"))
		if err != nil {
			return nil, err
		}
		scripts, err := fs.Glob(os.DirFS(root), path.Join(dir, "lua", "*"))
		if err != nil {
			return nil, err
		}
		for _, file := range slices.Concat(files, scripts) {
			of := mutantsOf(file)
			if of == nil {
				continue
			}
			src, err := os.ReadFile(filepath.Join(root, file))
			if err != nil {
				return nil, err
			}
			some, err := of(file, src)
			if err != nil {
				return nil, err
			}
			slices.SortFunc(some, func(a, b mutant) int {
				return cmp.Or(cmp.Compare(a.offset, b.offset), cmp.Compare(a.operator, b.operator))
			})
			all = append(all, some...)
		}
	}
	return all, nil
}

// mutantsOf returns the function that finds the mutants of a file, or nil for a file that is
// not production code.
func mutantsOf(file string) func(file string, src []byte) ([]mutant, error) {
	switch {
	case strings.HasSuffix(file, "_test.go"), path.Base(file) == "doc.go":
		return nil
	case strings.HasSuffix(file, ".go"):
		return goMutants
	case strings.HasSuffix(file, ".lua"):
		return luaMutants
	}
	return nil
}

// order returns the mutants in the order of the draw. Each line with code is equally likely,
// and so is each mutant of a line. No mutant is drawn twice.
func order(all []mutant, seed uint64) []mutant {
	type line struct {
		file string
		line int
	}
	var lines []line
	byLine := map[line][]mutant{}
	for _, m := range all {
		at := line{m.file, m.line}
		if byLine[at] == nil {
			lines = append(lines, at)
		}
		byLine[at] = append(byLine[at], m)
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	drawn := make([]mutant, 0, len(all))
	for len(lines) > 0 {
		i := rng.IntN(len(lines))
		at := lines[i]
		of := byLine[at]
		k := rng.IntN(len(of))
		drawn = append(drawn, of[k])
		if byLine[at] = slices.Delete(of, k, k+1); len(byLine[at]) == 0 {
			lines = slices.Delete(lines, i, i+1)
		}
	}
	return drawn
}
