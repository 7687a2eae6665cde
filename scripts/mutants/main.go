// Command mutants tests the tests. It makes small random changes to the production code,
// one at a time, and checks that a test fails. A change that no test detects either does not
// change the behavior, or shows that a test is missing.
//
//	go run ./scripts/mutants                           100 mutants, of Go and Lua
//	go run ./scripts/mutants -n 20 -in '^rlock/'       20 of one package
//	go run ./scripts/mutants -o mutants.jsonl          continues an interrupted run
//	go run ./scripts/mutants -run rlock/lock.go:812:lt-le
//
// Each line of code is equally likely. A mutant is tried in a copy of the working tree. If
// it compiles, the tests of its own package run first, then those of internal/contract and
// of the root, and for an internal package those of the kinds that use it, with -short and
// without the race detector. The first failure kills the mutant, and so does a hang: tests
// may take three times as long as without a mutant, plus half a minute.
//
// For each mutant a line shows its position, the change, and the first test that failed.
// The surviving mutants are listed at the end.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// options are the flags.
type options struct {
	n        int
	seed     uint64
	ids      []string
	in       *regexp.Regexp
	list     bool
	timeout  time.Duration
	workers  int
	parallel int
	ledger   string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func parse(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("mutants", flag.ContinueOnError)
	flags.IntVar(&o.n, "n", 100, "number of mutants to draw")
	flags.Uint64Var(&o.seed, "seed", 0, "seed of the draw; 0: that of the last record of -o, or a random one")
	ids := flags.String("run", "", "ids of mutants to try instead of drawing, separated by commas")
	in := flags.String("in", "", "mutate only files that match this regular expression")
	flags.BoolVar(&o.list, "list", false, "print the mutants instead of trying them; some may not compile")
	flags.DurationVar(&o.timeout, "timeout", 5*time.Minute, "time limit for the tests of a package")
	flags.IntVar(&o.workers, "j", 2, "number of mutants to try at a time")
	flags.IntVar(&o.parallel, "parallel", 8, "-parallel of go test")
	flags.StringVar(&o.ledger, "o", "", "file to append results to; its mutants are not tried again")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *ids != "" {
		o.ids = strings.Split(*ids, ",")
	}
	var err error
	o.in, err = regexp.Compile(*in)
	return o, err
}

func run(ctx context.Context, args []string, out io.Writer) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	top, err := exec.CommandContext(ctx, "git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return fmt.Errorf("git rev-parse: %w", err)
	}
	root := strings.TrimSpace(string(top))
	all, err := find(root)
	if err != nil {
		return err
	}
	results, err := openLedger(o.ledger)
	if err != nil {
		return err
	}
	drawn, err := choose(all, &o, results.seed)
	if err != nil {
		return err
	}
	if o.ids == nil {
		fmt.Fprintf(out, "seed %d: %d of %d mutants\n", o.seed, min(o.n, len(drawn)), len(all))
	}
	if o.list {
		for _, m := range drawn[:min(o.n, len(drawn))] {
			src, err := os.ReadFile(filepath.Join(root, m.file))
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "%s:%d %s\n\t%s\n", m.file, m.line, m.id(), m.diff(src))
		}
		return nil
	}
	dir, err := os.MkdirTemp("", "redlatch-mutants-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	l := &lab{options: o, out: out, results: results, left: o.n, drawn: drawn, passes: map[string]time.Duration{}, used: map[string]map[string]bool{}}
	var trees []*tree
	for i := range o.workers {
		t, err := newTree(root, filepath.Join(dir, fmt.Sprint(i)))
		if err != nil {
			return err
		}
		trees = append(trees, t)
	}
	err = l.work(ctx, trees)
	l.summary()
	return err
}

// choose returns the mutants to be tried, more than enough of them, and sets their number and
// the seed.
func choose(all []mutant, o *options, seed uint64) ([]mutant, error) {
	if o.ids != nil {
		byID := map[string]mutant{}
		for _, m := range all {
			byID[m.id()] = m
		}
		var chosen []mutant
		for _, id := range o.ids {
			m, ok := byID[id]
			if !ok {
				return nil, fmt.Errorf("unknown mutant %s: has the file changed?", id)
			}
			chosen = append(chosen, m)
		}
		o.n = len(chosen)
		return chosen, nil
	}
	for o.seed == 0 {
		if o.seed = seed; o.seed == 0 {
			o.seed = uint64(rand.IntN(1_000_000))
		}
	}
	all = slices.DeleteFunc(all, func(m mutant) bool { return !o.in.MatchString(m.file) })
	return order(all, o.seed), nil
}

// lab tries mutants.
type lab struct {
	options
	results *ledger

	mu    sync.Mutex
	out   io.Writer
	drawn []mutant // to be tried
	left  int      // the number to try
	tried []record

	baseline sync.Mutex
	passes   map[string]time.Duration   // how long tests take without a mutant
	used     map[string]map[string]bool // what they use
}

// work has each tree try mutants until there are enough.
func (l *lab) work(ctx context.Context, trees []*tree) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make(chan error, len(trees))
	for _, t := range trees {
		go func() {
			var err error
			for m, ok := l.next(); ok && err == nil; m, ok = l.next() {
				err = l.one(ctx, t, m)
			}
			if err != nil {
				cancel()
			}
			errs <- err
		}()
	}
	var err error
	for range trees {
		if e := <-errs; e != nil && (err == nil || errors.Is(err, context.Canceled)) {
			err = e
		}
	}
	return err
}

// next draws a mutant. The mutant counts unless back returns it, so the first mutants of the
// order are always tried.
func (l *lab) next() (mutant, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left == 0 || len(l.drawn) == 0 {
		return mutant{}, false
	}
	m := l.drawn[0]
	l.drawn, l.left = l.drawn[1:], l.left-1
	return m, true
}

func (l *lab) back() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left++
}

// one tries a mutant, unless the ledger has it, and reports the result.
func (l *lab) one(ctx context.Context, t *tree, m mutant) error {
	r, known := l.results.has(m.id())
	if known && l.ids == nil {
		if r.Outcome == redrawn {
			l.back()
			return nil
		}
		l.report(m, r, " (before)")
		return nil
	}
	src, err := os.ReadFile(filepath.Join(t.root, m.file))
	if err != nil {
		return err
	}
	r = record{ID: m.id(), Seed: l.seed, Line: m.line, Diff: m.diff(src)}
	if err := l.try(ctx, t, m, src, &r); err != nil {
		return err
	}
	if err := l.results.add(r); err != nil {
		return err
	}
	if r.Outcome == redrawn && l.ids == nil {
		l.back()
		return nil
	}
	l.report(m, r, "")
	return nil
}

// try records the result of a mutant.
func (l *lab) try(ctx context.Context, t *tree, m mutant, src []byte, r *record) error {
	text := m.apply(src)
	compiles := false
	err := t.with(m.file, text, func() (err error) {
		compiles, err = t.compiles(ctx, m)
		return err
	})
	if err != nil || !compiles {
		r.Outcome = redrawn
		return err
	}
	lua := strings.HasSuffix(m.file, ".lua")
	pkgs := candidates(m.dir(), lua, func(pkg, dir string) bool { return l.uses(ctx, t, pkg)[dir] }, t.hasTests)
	r.Outcome = survived
	for _, pkg := range pkgs {
		limit, err := l.limit(ctx, t, pkg)
		if err != nil {
			return err
		}
		var f finding
		err = t.with(m.file, text, func() (err error) {
			f, err = t.test(ctx, pkg, l.parallel, limit)
			return err
		})
		if err != nil {
			return err
		}
		r.Seconds += f.took.Seconds()
		if f.failed {
			r.Outcome, r.By = killed, f.by
			return nil
		}
		r.Packages = append(r.Packages, pkg)
	}
	return nil
}

// limit returns the time limit for the tests of a package. They have to pass without a mutant
// first, in one of two attempts.
func (l *lab) limit(ctx context.Context, t *tree, pkg string) (time.Duration, error) {
	l.baseline.Lock()
	defer l.baseline.Unlock()
	took, known := l.passes[pkg]
	if !known {
		f, err := t.test(ctx, pkg, l.parallel, l.timeout)
		if err == nil && f.failed {
			l.print("without a mutant, %s fails: retrying\n", f.by)
			f, err = t.test(ctx, pkg, l.parallel, l.timeout)
		}
		if err != nil {
			return 0, err
		}
		if f.failed {
			return 0, fmt.Errorf("without a mutant, %s fails", f.by)
		}
		took = f.took
		l.passes[pkg] = took
		l.print("without a mutant, %s takes %.1f s\n", pkg, took.Seconds())
	}
	return min(3*took+30*time.Second, l.timeout), nil
}

// uses returns the packages that the tests of a package use, or nothing if that cannot be
// determined.
func (l *lab) uses(ctx context.Context, t *tree, pkg string) map[string]bool {
	l.baseline.Lock()
	defer l.baseline.Unlock()
	if l.used[pkg] == nil {
		used, err := t.uses(ctx, pkg)
		if err != nil {
			l.print("%v\n", err)
		}
		l.used[pkg] = used
	}
	return l.used[pkg]
}

func (l *lab) print(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.out, format, args...)
}

func (l *lab) report(m mutant, r record, more string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tried = append(l.tried, r)
	what := "SURVIVED"
	if r.Outcome != survived {
		what = string(r.Outcome)
	}
	if r.By != "" {
		what += " by " + r.By
	}
	fmt.Fprintf(l.out, "%3d  %s:%d  %s\n     %s\n     %s after %.1f s%s\n", len(l.tried), m.file, m.line, r.ID, r.Diff, what, r.Seconds, more)
}

// summary prints the counts of each package and the mutants that survived.
func (l *lab) summary() {
	type count struct{ killed, survived int }
	counts := map[string]*count{}
	var sum count
	var alive []record
	for _, r := range l.tried {
		file, _, _ := strings.Cut(r.ID, ":")
		dir := mutant{file: file}.dir()
		if counts[dir] == nil {
			counts[dir] = &count{}
		}
		switch r.Outcome {
		case killed:
			counts[dir].killed++
			sum.killed++
		case survived:
			counts[dir].survived++
			sum.survived++
			alive = append(alive, r)
		}
	}
	fmt.Fprintf(l.out, "\n%-20s %8s %9s\n", "package", "killed", "survived")
	for _, dir := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(l.out, "%-20s %8d %9d\n", dir, counts[dir].killed, counts[dir].survived)
	}
	fmt.Fprintf(l.out, "%-20s %8d %9d\n", "all", sum.killed, sum.survived)
	for _, r := range alive {
		fmt.Fprintf(l.out, "\nline %d  %s\n     %s\n", r.Line, r.ID, r.Diff)
	}
}
