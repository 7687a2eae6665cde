package hold

import (
	"context"
	"sync"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/lock"
)

// On identifies a lock in this process.
type On struct{ Client, Kind, Key string }

// Outer is a hold that its context leads to.
type Outer interface {
	// Blocks reports whether an acquisition of that lock by owner, which may be zero, waits for
	// the end of the hold. It does not unless the hold is held.
	Blocks(on On, owner lock.Owner) bool
	// Break ends the hold as lost, for a test, and releases what the hold has. It blocks like
	// Unlock, which returns the loss afterwards. It reports whether the hold was held.
	Break(reason lock.Reason) bool
}

// nested is a value of the context of a hold.
type nested struct {
	hold  Outer
	site  *callsite.Site
	outer *nested // of the context that the hold was acquired with, or nil
}

type nestedKey struct{}

// ContextOf is Context for the hold that embeds s, so that WarnNested and From find it.
func (s *State) ContextOf(h Outer) context.Context {
	s.mu.Lock()
	if s.cancel == nil {
		outer, _ := s.ctx.Value(nestedKey{}).(*nested)
		s.ctx = context.WithValue(s.ctx, nestedKey{}, &nested{h, &s.Site, outer})
	}
	s.mu.Unlock()
	return s.Context()
}

// From returns the hold that ctx comes from, the innermost if there are several, or nil.
func From(ctx context.Context) Outer {
	if n, _ := ctx.Value(nestedKey{}).(*nested); n != nil {
		return n.hold
	}
	return nil
}

// WarnNested logs a warning if ctx comes from a hold that blocks an acquisition of one of
// those locks, which are l: the acquisition waits for its own caller. It logs once for each
// pair of call sites.
func WarnNested(ctx context.Context, s *session.Session, l telemetry.Lock, locks ...On) {
	n, _ := ctx.Value(nestedKey{}).(*nested)
	if n == nil {
		return
	}
	owner, _ := lock.OwnerFrom(ctx)
	for ; n != nil; n = n.outer {
		for _, on := range locks {
			if n.hold.Blocks(on, owner) {
				n.warn(s, l, callsite.Here())
				return
			}
		}
	}
}

func (n *nested) warn(s *session.Session, l telemetry.Lock, called callsite.Site) {
	type warned struct{ sync.Map }
	if _, before := session.Of[warned](s).LoadOrStore([2]callsite.Site{*n.site, called}, true); !before {
		s.Logger.Warn("redlatch: Lock was called under a hold on the same lock, and may wait for itself; lock.WithOwner permits re-entry",
			"name", text.Safe(l.Name), "kind", l.Kind, "held", n.site.String(), "called", called.String())
	}
}
