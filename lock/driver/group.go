package driver

import (
	"context"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/lock"
)

// grouped is a lock as a group of locks sees it: an engine.StoreLock.
type grouped struct{ *object }

// ID implements engine.StoreLock.
func (g grouped) ID() engine.LockID { return g.lockID() }

// Check implements engine.StoreLock.
func (g grouped) Check() error { return g.err }

// Shared implements engine.StoreLock.
func (g grouped) Shared() bool { return g.shared }

// Take implements engine.StoreLock.
func (g grouped) Take(ctx context.Context, o lock.Options, once bool) (engine.GroupHold, bool, error) {
	o = lock.Options{Lease: o.Lease, FailFast: o.FailFast, Site: o.Site}
	w := &call{l: g.object, ctx: ctx, options: o, once: once, member: true}
	w.owner, _ = lock.OwnerFrom(ctx)
	h, err := w.acquire()
	if err != nil {
		return nil, false, err
	}
	return h, w.attempts > 1, nil
}

// Join implements engine.StoreLock.
func (g grouped) Join(onClose func()) (leave func(), open bool) {
	if !g.c.enter() {
		return nil, false
	}
	stop := context.AfterFunc(g.c.stopCtx, onClose)
	return func() {
		stop()
		g.c.leave()
	}, true
}

// One implements engine.AnyHold: no other hold can be extended or released by the same request.
func (h *hold) One() *engine.Hold { return nil }

// Acquired implements engine.GroupHold.
func (h *hold) Acquired() time.Time { return h.begun }

// EndAt implements engine.GroupHold.
func (h *hold) EndAt(at time.Time) {
	certain := h.claim.granted.Until()
	h.l.c.mu.Lock()
	defer h.l.c.mu.Unlock()
	if h.ends.IsZero() || at.Before(h.ends) {
		h.ends = at
	}
	h.claim.scheduleLocked(certain)
}

// StopRenewing implements engine.GroupHold. The driver keeps the claim, so it is the client that ends the hold.
func (h *hold) StopRenewing() bool {
	certain := h.claim.granted.Until()
	h.l.c.mu.Lock()
	defer h.l.c.mu.Unlock()

	renewed := !h.Fixed && h.Held()
	h.Fixed = true
	if h.ends.IsZero() || h.ends.After(certain) {
		h.ends = certain
	}
	h.claim.scheduleLocked(certain)
	return renewed
}
