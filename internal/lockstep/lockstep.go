// Package lockstep compares an implementation with a model. Both take the same random steps and
// must agree after each. Sequences of steps are drawn from seeds, and a sequence that fails is
// shrunk to the steps that matter. A test also fails if an expected outcome did not occur. Its
// length is a number of steps, not a duration.
//
// REDLATCH_LOCKSTEP_SEED sets the seed of the first sequence, REDLATCH_LOCKSTEP_STEPS the number
// of steps.
package lockstep

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Step is one step of a sequence: a struct with a Kind and the random parameters of the step. It
// must be valid in any state, because shrinking removes other steps.
type Step interface{ kind() string }

// Kind is a kind of step.
type Kind string

func (k Kind) kind() string { return string(k) }

// Walk is the implementation and the model during one sequence. It fails by Check, Failf or a
// panic.
type Walk[S Step] interface {
	// Draw returns the next step. It may depend on the model.
	Draw(r *rand.Rand) S
	// Take takes a step on both sides and compares them. It reports whether the step was
	// possible.
	Take(S) bool
	// End is called after the last step.
	End()
}

// mismatch is the panic value of a walk that fails.
type mismatch struct{ error }

// Failf fails the walk: the two sides differ, or a guarantee is violated.
func Failf(format string, args ...any) { panic(mismatch{fmt.Errorf(format, args...)}) }

// Check fails the walk if err is not nil.
func Check(err error) {
	if err != nil {
		panic(mismatch{err})
	}
}

// Request sends a request, and can be called again. It returns the replies of the server and of
// the model.
type Request func() (got, want any, err error)

// Send sends the request and compares the replies.
func (r Request) Send() {
	reply, want, err := r()
	Check(err)
	if got, want := fmt.Sprintf("%+v", reply), fmt.Sprintf("%+v", want); got != want {
		Failf("the server replies %s, want %s", got, want)
	}
}

// Test is a lockstep test.
type Test[S Step] struct {
	Steps  int // in all sequences
	Length int // of a sequence
	// Kinds are the kinds of steps. Each must occur.
	Kinds Weights
	// Outcomes are further outcomes that must occur.
	Outcomes []string
	// Start is called once for every worker. Each worker runs one sequence at a time.
	Start func(worker int) Begin[S]
}

// Begin begins a sequence. The walk counts outcomes other than its steps in seen.
type Begin[S Step] func(seed uint64, seen Seen) Walk[S]

const (
	workers = 3
	// Every expected outcome occurs at least this often among so many steps.
	often, among = 2, 10_000
	maxTries     = 2_000 // of shrinking
)

// Size returns the number of steps of a test that needs a server: full in a long run, at most
// 10,000 under -short, and a few under -short -race, because the first tier of tests runs them
// without -race as well.
func Size(full int) int {
	switch {
	case !testing.Short():
		return full
	case race:
		return min(full, 300)
	default:
		return min(full, 10_000)
	}
}

// Seen counts outcomes.
type Seen map[string]int

// See counts an outcome.
func (s Seen) See(what ...any) { s[strings.TrimSpace(fmt.Sprintln(what...))]++ }

func (s Seen) add(other Seen) {
	for what, n := range other {
		s[what] += n
	}
}

// Weights are the relative frequencies of the kinds of steps.
type Weights []struct {
	Kind   Kind
	Weight int
}

// Draw returns a random kind.
func (w Weights) Draw(r *rand.Rand) Kind {
	total := 0
	for _, k := range w {
		total += k.Weight
	}
	n := r.IntN(total)
	for _, k := range w {
		if n -= k.Weight; n < 0 {
			return k.Kind
		}
	}
	panic("unreachable")
}

// Only returns the kinds for which pass returns true.
func (w Weights) Only(pass func(Kind) bool) (some Weights) {
	for _, k := range w {
		if pass(k.Kind) {
			some = append(some, k)
		}
	}
	return some
}

// Run runs the test.
func (x Test[S]) Run(t testing.TB) {
	t.Helper()
	first, steps := x.settings(t)
	t.Logf("%d steps, REDLATCH_LOCKSTEP_SEED=%d", steps, first)
	seen, failed := x.play(first, steps)
	missing := x.missing(seen, steps)

	// Chance may withhold a rare outcome for a while. One that does not come in ten times the steps is
	// out of reach.
	for n := 1; failed == nil && len(missing) > 0 && n < 10; n++ {
		var more Seen
		more, failed = x.play(first+uint64(n*x.sequences(steps)), steps)
		seen.add(more)
		missing = x.missing(seen, steps)
	}
	if failed != nil {
		t.Fatal(failed)
	}
	t.Logf("seen: %v", seen)
	if len(missing) > 0 {
		t.Fatalf("seen less than %d times in ten times %d steps: %v", often, steps, strings.Join(missing, ", "))
	}
}

// sequences returns the number of sequences that have this number of steps.
func (x Test[S]) sequences(steps int) int { return max(1, steps/x.Length) }

func (x Test[S]) settings(t testing.TB) (seed uint64, steps int) {
	seed, steps = rand.Uint64N(1_000_000_000), x.Steps
	var err, err2 error
	if s := os.Getenv("REDLATCH_LOCKSTEP_SEED"); s != "" {
		seed, err = strconv.ParseUint(s, 10, 64)
	}
	if s := os.Getenv("REDLATCH_LOCKSTEP_STEPS"); s != "" {
		steps, err2 = strconv.Atoi(s)
	}
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	return seed, steps
}

// missing returns the outcomes that were not seen often enough in this number of steps.
func (x Test[S]) missing(seen Seen, steps int) (missing []string) {
	want := slices.Clone(x.Outcomes)
	for _, k := range x.Kinds {
		want = append(want, k.Kind.kind())
	}
	for _, what := range want {
		if seen[what] < often*steps/among {
			missing = append(missing, fmt.Sprintf("%q (%d)", what, seen[what]))
		}
	}
	return missing
}

// failure is a sequence that fails.
type failure[S Step] struct {
	seed  uint64
	drawn int
	steps []S
	err   error
}

func (f *failure[S]) String() string {
	var list strings.Builder
	for i, s := range f.steps {
		fmt.Fprintf(&list, "%4d  %+v\n", i, s)
	}
	return fmt.Sprintf("REDLATCH_LOCKSTEP_SEED=%d fails after these steps, shrunk from %d:\n%s%v", f.seed, f.drawn, &list, f.err)
}

// play runs sequences of consecutive seeds. It returns the outcomes, or the first sequence that
// fails.
func (x Test[S]) play(first uint64, steps int) (Seen, *failure[S]) {
	var (
		mu     sync.Mutex
		seen   = Seen{}
		next   = first
		end    = first + uint64(x.sequences(steps))
		failed *failure[S]
		shrink func()
		done   sync.WaitGroup
	)
	for worker := range workers {
		begin := x.Start(worker)
		done.Go(func() {
			for {
				mu.Lock()
				seed := next
				next++
				stop := failed != nil || seed >= end
				mu.Unlock()
				if stop {
					return
				}
				mine := Seen{}
				f := x.random(begin, seed, mine)
				mu.Lock()
				seen.add(mine)
				if f != nil && (failed == nil || f.seed < failed.seed) {
					failed, shrink = f, func() { f.shrink(begin) }
				}
				mu.Unlock()
			}
		})
	}
	done.Wait()
	if failed != nil {
		shrink()
	}
	return seen, failed
}

// random runs the sequence of a seed and returns its failure, nil if there is none.
func (x Test[S]) random(begin Begin[S], seed uint64, seen Seen) *failure[S] {
	r := rand.New(rand.NewPCG(seed, seed))
	var steps []S
	_, err := begin.take(seed, seen, x.Length, func(walk Walk[S], n int) S {
		steps = append(steps, walk.Draw(r))
		return steps[n]
	})
	if err == nil {
		return nil
	}
	return &failure[S]{seed, len(steps), steps, err}
}

// take runs a sequence of n steps. It returns the number of steps taken and the error.
func (begin Begin[S]) take(seed uint64, seen Seen, n int, step func(walk Walk[S], n int) S) (taken int, err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case mismatch:
			err = p.error
		default:
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	walk := begin(seed, seen)
	for taken < n {
		s := step(walk, taken)
		taken++
		if walk.Take(s) {
			seen.See(s.kind())
		}
	}
	walk.End()
	return taken, nil
}

// shrink removes steps as long as the rest still fails, fewer and fewer at a time.
func (f *failure[S]) shrink(begin Begin[S]) {
	fails := func(steps []S) bool {
		taken, err := begin.take(f.seed, Seen{}, len(steps), func(_ Walk[S], n int) S { return steps[n] })
		if err != nil {
			f.steps, f.err = steps[:taken], err
		}
		return err != nil
	}
	if !fails(f.steps) {
		f.err = fmt.Errorf("only once, not when repeated: %w", f.err)
		return
	}
	tries := 0
	for size := len(f.steps) / 2; size > 0 && tries < maxTries; {
		before := len(f.steps)
		for at := 0; at < len(f.steps) && tries < maxTries; tries++ {
			rest := slices.Delete(slices.Clone(f.steps), at, min(at+size, len(f.steps)))
			if !fails(rest) {
				at += size
			}
		}
		if len(f.steps) == before || size > 1 {
			size /= 2
		}
	}
}
