package engine

import (
	"context"
	"log/slog"
	"sync"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/lock"
)

// LockID identifies a lock in this process: by its client, and by its queue.
type LockID struct {
	Client string
	Key    Key
}

// ContextHold is a hold that its context leads to.
type ContextHold interface {
	// Conflicts reports whether an acquisition of that lock by owner, which may be zero, waits for
	// the end of the hold. It does not unless the hold is held.
	Conflicts(with LockID, owner lock.Owner) bool
	// Break ends the hold as lost, for a test, and releases what the hold has. It blocks like
	// Unlock, which returns the loss afterwards. It reports whether the hold was held.
	Break(reason lock.Reason) bool
}

// nested is a value of the context of a hold.
type nested struct {
	hold  ContextHold
	site  *callsite.Site
	outer *nested // of the context that the hold was acquired with, or nil
}

type nestedKey struct{}

// ContextOf is Context for the hold that embeds s, so that Nested and From find it.
func (s *State) ContextOf(h ContextHold) context.Context {
	s.mu.Lock()
	if s.cancel == nil {
		outer, _ := s.ctx.Value(nestedKey{}).(*nested)
		s.ctx = context.WithValue(s.ctx, nestedKey{}, &nested{h, &s.Site, outer})
	}
	s.mu.Unlock()
	return s.Context()
}

// From returns the hold that ctx comes from, the innermost if there are several, or nil.
func From(ctx context.Context) ContextHold {
	if n, _ := ctx.Value(nestedKey{}).(*nested); n != nil {
		return n.hold
	}
	return nil
}

// WarnNested is Nested.Warn for the locks of a client.
func (e *Engine) WarnNested(ctx context.Context, l telemetry.Lock, locks ...LockID) {
	e.nested.Warn(ctx, e.Session.Logger, l, locks...)
}

// Nested are the pairs of call sites, of a hold and of a call under it, that a client has warned of. The zero Nested is
// ready for use.
type Nested struct{ warned sync.Map }

// Warn logs a warning if ctx comes from a hold that blocks an acquisition of l, which
// consists of those locks: the acquisition waits for its own caller. It logs once for each
// pair of call sites.
func (w *Nested) Warn(ctx context.Context, log *slog.Logger, l telemetry.Lock, locks ...LockID) {
	n, _ := ctx.Value(nestedKey{}).(*nested)
	if n == nil {
		return
	}

	owner, _ := lock.OwnerFrom(ctx)
	for ; n != nil; n = n.outer {
		for _, id := range locks {
			if n.hold.Conflicts(id, owner) {
				w.warn(log, n, l, callsite.Here())
				return
			}
		}
	}
}

func (w *Nested) warn(log *slog.Logger, n *nested, l telemetry.Lock, called callsite.Site) {
	if _, before := w.warned.LoadOrStore([2]callsite.Site{*n.site, called}, true); !before {
		log.Warn("redlatch: Lock was called under a hold on the same lock, and may wait for itself; lock.WithOwner permits re-entry",
			"name", text.Safe(l.Name), "kind", l.Kind, "held", n.site.String(), "called", called.String())
	}
}
