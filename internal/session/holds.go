package session

import (
	"iter"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
)

// Hold is what a client holds, or waits for.
type Hold struct {
	Kind, Name, Owner string
	Since             time.Time
	Remaining         time.Duration
	// Site is where the user's code acquires it. It is zero for a part of another hold, and for
	// one that no caller has yet, or any more.
	Site     callsite.Site
	Waiting  bool
	Disowned bool // no caller will end it
}

// Holds yields what callers of this client hold, and wait for. The body of a loop over it must not
// block, or use the session.
func (s *Session) Holds() iter.Seq[Hold] {
	return func(yield func(Hold) bool) {
		for _, holds := range s.holds {
			for h := range holds() {
				if !yield(h) {
					return
				}
			}
		}
	}
}
