package robustness

import (
	"fmt"
	"slices"
	"strings"

	"github.com/anishathalye/porcupine"
)

// operation is one step of a lock's history. See the package documentation.
type operation struct {
	step    step
	claim   string
	owner   string // of acquire
	shared  bool   // of acquire: beside other shared holds
	limit   int    // of acquire: at most so many holds at a time; 0: any number
	token   int64  // of acquire; 0 if the lock issues none
	promise bool   // of acquire: whether exclusion is promised from here on
	counter bool   // of wipe: whether it removed the fencing counter

	explained bool // of gone: whether a wipe or the end of the lease explains it
}

type step string

const (
	acquire step = "acquire"
	end     step = "end"
	wipe    step = "wipe"
	isGone  step = "gone"
)

// held is a hold in the model.
type held struct {
	claim, owner string
	shared       bool
}

// state is the state of a lock in the model. It is immutable.
type state struct {
	holds  []held // sorted by claim; empty: the lock is free
	token  int64
	tokens string // owner of the last token
}

func (s state) String() string {
	if len(s.holds) == 0 {
		return fmt.Sprintf("free, token %d", s.token)
	}
	var names []string
	for _, h := range s.holds {
		names = append(names, h.claim+" by "+h.owner)
	}
	return fmt.Sprintf("%s, token %d", strings.Join(names, " + "), s.token)
}

func (o operation) String() string {
	switch o.step {
	case acquire:
		s := fmt.Sprintf("%s: acquire by %s", o.claim, o.owner)
		if o.token > 0 {
			s += fmt.Sprintf(", token %d", o.token)
		}
		if !o.promise {
			s += ", not promised"
		}
		return s
	case wipe:
		return "wipe"
	default:
		return fmt.Sprintf("%s: %s", o.claim, o.step)
	}
}

// next returns the state after o, and whether o is legal.
func (s state) next(o operation) (bool, state) {
	at, found := slices.BinarySearchFunc(s.holds, o.claim, func(h held, claim string) int {
		return strings.Compare(h.claim, claim)
	})
	switch o.step {
	case acquire:
		if o.limit > 0 && len(s.holds) == o.limit {
			return false, s
		}
		for _, h := range s.holds {
			if h.owner != o.owner && !(h.shared && o.shared) {
				return false, s
			}
		}
		if o.token > 0 {
			if o.token < s.token || o.token == s.token && o.owner != s.tokens { // re-entry shares a token
				return false, s
			}
			s.token, s.tokens = o.token, o.owner
		}
		if o.promise {
			s.holds = slices.Insert(slices.Clone(s.holds), at, held{o.claim, o.owner, o.shared})
		}
	case end:
		if found {
			s.holds = slices.Delete(slices.Clone(s.holds), at, at+1)
		}
	case wipe:
		s.holds = nil
		if o.counter {
			s.token, s.tokens = 0, ""
		}
	case isGone:
		return o.explained, s
	}
	return true, s
}

var model = porcupine.Model{
	Init: func() any { return state{} },
	Step: func(s, input, _ any) (bool, any) { return s.(state).next(input.(operation)) },
	Equal: func(a, b any) bool {
		x, y := a.(state), b.(state)
		return x.token == y.token && x.tokens == y.tokens && slices.Equal(x.holds, y.holds)
	},
	DescribeOperation: func(input, _ any) string { return input.(operation).String() },
	DescribeState:     func(s any) string { return s.(state).String() },
}
