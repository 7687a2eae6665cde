package lockstep

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

var letters = Weights{{"a", 4}, {"b", 4}, {"c", 4}, {"d", 4}, {"never", 0}}

// word is a walk without a server. Each step appends a letter.
type word struct {
	seed uint64
	is   string
	seen Seen
	test func(word string)
	keep func(word) // called at the end
}

func (w *word) Draw(r *rand.Rand) Kind { return letters.Draw(r) }

func (w *word) Take(letter Kind) bool {
	if letter == "d" {
		return false
	}
	w.is += string(letter)
	w.seen.See("length", len(w.is))
	w.test(w.is)
	return true
}

func (w *word) End() { w.keep(*w) }

// words returns a test of sequences of 20 steps and the words that it makes, by seed.
func words(test func(word string)) (x Test[Kind], was map[uint64]string) {
	var mu sync.Mutex
	was = map[uint64]string{}
	keep := func(w word) {
		mu.Lock()
		defer mu.Unlock()
		was[w.seed] = w.is
	}
	return Test[Kind]{
		Steps: 2_000, Length: 20, Kinds: letters[:3],
		Start: func(int) Begin[Kind] {
			return func(seed uint64, seen Seen) Walk[Kind] {
				return &word{seed: seed, seen: seen, test: test, keep: keep}
			}
		},
	}, was
}

func right(string) {}

// subsequence reports whether the letters of part are in s, in that order.
func subsequence(part, s string) bool {
	for i := 0; i < len(s) && part != ""; i++ {
		if s[i] == part[0] {
			part = part[1:]
		}
	}
	return part == ""
}

func TestShrink(t *testing.T) {
	for name, tt := range map[string]struct {
		test  func(word string)
		steps []Kind
	}{
		"some letters in order": {func(word string) {
			if subsequence("abcca", word) {
				Failf("wrong")
			}
		}, []Kind{"a", "b", "c", "c", "a"}},
		"a number of letters": {func(word string) {
			if len(word) == 9 {
				Check(errors.New("wrong"))
			}
		}, nil},
		"a panic": {func(word string) {
			if subsequence("cab", word) {
				panic("wrong")
			}
		}, []Kind{"c", "a", "b"}},
	} {
		t.Run(name, func(t *testing.T) {
			x, _ := words(tt.test)
			_, f := x.play(7, x.Steps)
			require.NotNil(t, f)
			require.ErrorContains(t, f.err, "wrong")
			if tt.steps == nil {
				require.Len(t, f.steps, 9)
			} else {
				require.Equal(t, tt.steps, f.steps)
			}
			require.Contains(t, f.String(), fmt.Sprintf("REDLATCH_LOCKSTEP_SEED=%d ", f.seed))

			// The seed reproduces the failure, and no earlier seed fails.
			_, again := x.play(f.seed, x.Length)
			require.Equal(t, f.seed, again.seed)
			require.Equal(t, f.steps, again.steps)
			_, before := x.play(7, int(f.seed-7)*x.Length)
			if f.seed > 7 {
				require.Nil(t, before)
			}
		})
	}
}

func TestUnrepeatableFailure(t *testing.T) {
	var once sync.Once
	x, _ := words(func(word string) {
		if len(word) == 5 {
			once.Do(func() { Failf("wrong") })
		}
	})
	_, f := x.play(1, x.Steps)
	require.ErrorContains(t, f.err, "only once")
	require.GreaterOrEqual(t, len(f.steps), 5)
}

func TestSeedIsReproducible(t *testing.T) {
	x, first := words(right)
	seen, f := x.play(100, x.Steps)
	require.Nil(t, f)
	require.Len(t, first, 100)
	require.Equal(t, 100, seen["length 1"], "all steps are taken")
	require.NotEqual(t, first[100], first[101])

	x, again := words(right)
	x.play(100, x.Steps)
	require.Equal(t, first, again)

	x, later := words(right)
	t.Setenv("REDLATCH_LOCKSTEP_SEED", "150")
	t.Setenv("REDLATCH_LOCKSTEP_STEPS", "60")
	x.Run(t)
	require.Equal(t, map[uint64]string{150: first[150], 151: first[151], 152: first[152]}, later)
}

// recorder records failures without ending the test.
type recorder struct {
	testing.TB
	failed string
}

func (r *recorder) Helper()                           {}
func (r *recorder) Logf(string, ...any)               {}
func (r *recorder) Fatal(args ...any)                 { r.failed += fmt.Sprint(args...) }
func (r *recorder) Fatalf(format string, args ...any) { r.Fatal(fmt.Sprintf(format, args...)) }

func TestMissingOutcomeFails(t *testing.T) {
	for want, change := range map[string]func(*Test[Kind]){
		"":                func(x *Test[Kind]) { x.Outcomes = []string{"length 10"} },
		`"length 21" (0)`: func(x *Test[Kind]) { x.Outcomes = []string{"length 21"} },
		`"d" (0)`:         func(x *Test[Kind]) { x.Kinds = letters[:4] }, // its steps are not possible
		`"never" (0)`:     func(x *Test[Kind]) { x.Kinds = letters },
		"wrong": func(x *Test[Kind]) {
			*x, _ = words(func(string) { Failf("wrong") })
			x.Steps = 20_000
		},
	} {
		x, _ := words(right)
		x.Steps = 20_000
		change(&x)
		r := &recorder{TB: t}
		x.Run(r)
		require.Contains(t, r.failed, want)
		require.Equal(t, want == "", r.failed == "", r.failed)
	}

	// An outcome that is rare by chance is waited for.
	x, _ := words(right)
	x.Steps, x.Outcomes = 20_000, []string{"late"}
	begin := x.Start(0)
	x.Start = func(int) Begin[Kind] {
		return func(seed uint64, seen Seen) Walk[Kind] {
			if seed >= 3_000 {
				seen.See("late")
			}
			return begin(seed, seen)
		}
	}
	t.Setenv("REDLATCH_LOCKSTEP_SEED", "1")
	x.Run(t)

	// A short run need not see everything.
	x, _ = words(right)
	x.Kinds = letters
	require.Empty(t, x.missing(Seen{"a": 9}, 1_000))
	require.Equal(t, []string{`"b" (1)`}, x.missing(Seen{"a": 2, "b": 1, "c": 2, "d": 2, "never": 2}, 10_000))
}

func TestWeights(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	drawn := map[Kind]int{}
	for range 8_000 {
		drawn[Weights{{"rare", 1}, {"no", 0}, {"often", 7}}.Draw(r)]++
	}
	require.Len(t, drawn, 2)
	require.InDelta(t, 1_000, drawn["rare"], 200)
	require.Equal(t, Weights{{"b", 4}}, letters.Only(func(kind Kind) bool { return kind == "b" }))
}
