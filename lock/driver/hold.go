package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// claim is what the client has on the store, or asks it for, under an id that no other claim has. Callers have holds of
// it: one, or several if an owner named by the callers re-enters.
//
//	requested ──begin──▶ held ──last hold ends──▶ (kept: AtLeast, MaxHold) ──▶ ended
//	    └──────────lose────┴─────────lose────────────────┴───────────────────▶ ended
//
// The mutex of the client guards all fields but l, owner, by and settled, which do not change. The id and granted do not
// change once a caller has a hold.
type claim struct {
	l       *object
	owner   lock.Owner // that the callers named, or zero
	id      lock.Owner
	by      *call         // that requests it
	settled chan struct{} // closed when the request has its result
	granted Claim         // nil while it is requested
	ended   bool
	timer   watchdog.Timer // for the next end of a hold or of the claim

	holds     []*hold   // that are held, the latest last
	keep      time.Time // until when lock.AtLeast keeps it, or zero
	releaseAt time.Time // of a claim without holds: when it is released
}

// settle notes that the request has its result: other calls of the owner share the claim, or request their own.
func (cl *claim) settle() {
	cl.l.c.mu.Lock()
	defer cl.l.c.mu.Unlock()
	if len(cl.holds) == 0 {
		cl.disownLocked()
	}
	close(cl.settled)
}

// disownLocked has the owner request another claim from now on.
func (cl *claim) disownLocked() {
	if of := (ownedKey{cl.l.key(), cl.owner}); cl.l.c.owned[of] == cl {
		delete(cl.l.c.owned, of)
	}
}

// renew gives the claim another id, and returns it.
func (cl *claim) renew() lock.Owner {
	cl.l.c.mu.Lock()
	defer cl.l.c.mu.Unlock()
	cl.id = cl.l.c.NewOwner()
	return cl.id
}

// begin makes the claim, which the store has granted to that call, one that is held, and returns its first hold. A claim
// that the caller does not get is released in the background.
func (cl *claim) begin(w *call, granted Claim) (h *hold, err error) {
	defer func() {
		if h == nil { // or an exporter has panicked
			cl.abandon()
		}
	}()
	cl.l.c.mu.Lock()
	cl.granted = granted
	cl.l.c.mu.Unlock()

	if !time.Now().Before(granted.Until()) {
		return nil, errGone
	}
	if w.ctx.Err() != nil {
		return nil, lock.ErrNotAcquired
	}
	return cl.hold(w)
}

// abandon releases a claim that no caller has a hold of.
func (cl *claim) abandon() {
	c := cl.l.c
	c.mu.Lock()
	release := cl.endLocked()
	c.mu.Unlock()
	if release {
		cl.releaseLater()
	}
}

// hold returns another hold of the claim for a call. The error is errGone if the claim has ended, or its other holds.
func (cl *claim) hold(w *call) (*hold, error) {
	c := cl.l.c
	c.mu.Lock()
	is := cl.by == w || len(cl.holds) > 0
	c.mu.Unlock()
	if !is {
		return nil, errGone
	}

	h := &hold{l: w.l, claim: cl}
	parent, span := c.tel.StartHold(engine.HoldParent(w.ctx, w.options), w.l.id, cl.id, "", cl.granted.Token())
	certain := cl.granted.Until()
	c.mu.Lock()
	if c.closed || cl.ended || cl.by != w && len(cl.holds) == 0 {
		c.mu.Unlock()
		span.End(nil)
		return nil, cmp.Or(closedError(c.ctx), errGone)
	}

	h.begun = time.Now()
	h.Fixed = w.options.Lease > 0
	if d := max(w.options.Lease, w.options.MaxHold); d > 0 {
		h.ends = h.begun.Add(d)
	}
	h.keepLocked(engine.KeptUntil(w.options))
	h.Begin(parent, span)
	h.Given(w.site)
	cl.holds = append(cl.holds, h)
	c.claims[cl] = struct{}{}
	cl.scheduleLocked(certain)
	c.mu.Unlock()
	return h, nil
}

// early is more than the wheel of the client is late.
const early = 10 * time.Millisecond

// scheduleLocked has the claim checked when the first of its holds ends, or the claim, which is certain until then.
func (cl *claim) scheduleLocked(certain time.Time) {
	wheel := cl.l.c.wheel
	wheel.Cancel(&cl.timer)
	if cl.ended {
		return
	}

	next := certain
	if len(cl.holds) == 0 {
		next = cl.releaseAt
	}
	for _, h := range cl.holds {
		if !h.ends.IsZero() && h.ends.Before(next) {
			next = h.ends
		}
	}

	if left := time.Until(next); left > early {
		wheel.Schedule(&cl.timer, next.Add(-early), cl)
	} else {
		time.AfterFunc(left, cl.check) // the end of a hold must not be late: others may get the lock then
	}
}

// Expire implements watchdog.Expirer. The driver may block it for a moment.
func (cl *claim) Expire(time.Time) { cl.check() }

// check ends what is over, and releases the claim in the background if no hold is left.
func (cl *claim) check() {
	c := cl.l.c
	c.mu.Lock()
	_, begun := c.claims[cl]
	c.mu.Unlock()
	if !begun { // or it has ended
		return
	}

	certain := cl.granted.Until()
	c.mu.Lock()
	lost, over := cl.checkLocked(time.Now(), certain)
	release := over && cl.endLocked()
	cl.scheduleLocked(certain)
	c.mu.Unlock()

	for _, h := range lost {
		h.EndSpan(c.background)
	}
	if release {
		cl.releaseLater()
	}
}

// checkLocked ends the holds that are over, and reports whether the claim is.
func (cl *claim) checkLocked(now, certain time.Time) (lost []*hold, over bool) {
	if cl.ended {
		return nil, false
	}
	if len(cl.holds) > 0 && !now.Before(certain) {
		return cl.loseLocked(lock.ReasonExpired, nil), true
	}

	for _, h := range slices.Clone(cl.holds) {
		if h.ends.IsZero() || now.Before(h.ends) {
			continue
		}
		reason := lock.ReasonMaxHold
		if h.Fixed {
			reason = lock.ReasonExpired
		}
		h.loseLocked(reason, nil)
		lost = append(lost, h)
		if last := cl.dropLocked(h); last {
			cl.releaseAt = cl.keep
		}
		if !h.Fixed && len(cl.holds) == 0 && certain.After(cl.keep) {
			cl.releaseAt = certain // the work under it may not have noticed yet: the lock is left to Unlock until then
		}
	}

	return lost, len(cl.holds) == 0 && !now.Before(cl.releaseAt)
}

// lose ends the claim, which the store does not have any more. It reports whether the claim had not ended.
func (cl *claim) lose(reason lock.Reason, err error) (ended bool) {
	c := cl.l.c
	c.mu.Lock()
	lost := cl.loseLocked(reason, err)
	ended = cl.endLocked()
	c.mu.Unlock()
	for _, h := range lost {
		h.EndSpan(c.background)
	}
	return ended
}

// loseLocked ends all holds as lost, and returns them.
func (cl *claim) loseLocked(reason lock.Reason, err error) (lost []*hold) {
	if cl.ended {
		return nil
	}
	lost = cl.holds
	cl.holds = nil
	for _, h := range lost {
		h.loseLocked(reason, err)
	}
	return lost
}

// endLocked ends the claim: no caller has a hold of it, or gets one. It reports whether the claim had not ended.
func (cl *claim) endLocked() bool {
	if cl.ended {
		return false
	}
	cl.ended = true
	cl.l.c.wheel.Cancel(&cl.timer)
	delete(cl.l.c.claims, cl)
	cl.disownLocked()
	return true
}

// dropLocked takes a hold that has ended off the claim, and reports whether it was the last.
func (cl *claim) dropLocked(h *hold) (last bool) {
	if i := slices.Index(cl.holds, h); i >= 0 {
		cl.holds = slices.Delete(cl.holds, i, i+1)
	}
	if len(cl.holds) > 0 {
		return false
	}
	cl.disownLocked()
	return true
}

// release releases the claim. It blocks for engine.UnlockTimeout at most; the driver does the rest in the background.
func (cl *claim) release(ctx context.Context) error {
	ctx, cancel := cl.l.c.bound(ctx)
	defer cancel()
	err := cl.granted.Release(ctx)
	if errors.Is(err, lock.ErrLost) {
		return err
	}
	return orClosed(cl.l.c.ctx, err)
}

// releaseLater releases the claim in the background, unless the client is closed: the driver does it then.
func (cl *claim) releaseLater() {
	cl.l.c.background(func(ctx context.Context) { _ = cl.release(ctx) })
}

// hold is what a caller has of a claim. The mutex of the client guards ends.
type hold struct {
	engine.State
	l     *object // with which it was acquired
	claim *claim
	begun time.Time
	ends  time.Time // when it is lost, or zero
}

// Name implements lock.Hold.
func (h *hold) Name() string { return h.l.id.Name }

// Object implements engine.Droppable.
func (h *hold) Object() wire.Object { return h.l.info() }

// Owner returns the id under which the store has the claim.
func (h *hold) Owner() lock.Owner { return h.claim.id }

// Token implements lock.Hold.
func (h *hold) Token() int64 { return h.claim.granted.Token() }

// Context implements lock.Hold.
func (h *hold) Context() context.Context { return h.ContextOf(h) }

// awaited reports whether Shutdown waits for the end of the hold.
func (h *hold) awaited() bool {
	listed := h.Listed(session.Hold{})
	return !listed.Site.IsZero() && !listed.Disowned
}

// Remaining implements lock.Hold.
func (h *hold) Remaining() time.Duration {
	over := h.claim.granted.Until()
	h.l.c.mu.Lock()
	if !h.ends.IsZero() && h.ends.Before(over) {
		over = h.ends
	}
	h.l.c.mu.Unlock()

	if !h.Held() {
		return 0
	}
	return max(0, time.Until(over))
}

// Extend implements lock.Hold.
func (h *hold) Extend(ctx context.Context, lease time.Duration) error {
	h.claim.check()
	if err := h.Err("extend", h.Object()); err != nil {
		return err
	}

	c := h.l.c
	sent := time.Now()
	bounded, cancel := until(ctx, c.ctx)
	defer cancel()
	err := h.claim.granted.Extend(bounded, lease)
	if errors.Is(err, lock.ErrLost) {
		if h.claim.lose(lock.ReasonGone, nil) {
			h.claim.releaseLater() // what the driver may still know of it
		}
	} else if err != nil {
		return h.Object().StoreFailed(ctx, "extend", sent, orClosed(c.ctx, err))
	}

	certain := h.claim.granted.Until()
	c.mu.Lock()
	if ends := sent.Add(lease); h.Fixed && ends.After(h.ends) {
		h.ends = ends
		h.claim.scheduleLocked(certain)
	}
	c.mu.Unlock()
	return h.Err("extend", h.Object()) // it may have been unlocked meanwhile
}

// Detach implements engine.Droppable.
func (h *hold) Detach(context.Context, time.Duration) (string, error) {
	return "", h.Object().Refused("detach", fmt.Errorf("%w: the store keeps a lock for its client", lock.ErrUnsupported))
}

// KeepUntil has Unlock leave the lock held until then, unless that is zero.
func (h *hold) KeepUntil(until time.Time) {
	h.l.c.mu.Lock()
	defer h.l.c.mu.Unlock()
	h.keepLocked(until)
}

func (h *hold) keepLocked(until time.Time) {
	if until.After(h.claim.keep) {
		h.claim.keep = until
	}
}

// Unlock implements lock.Hold.
func (h *hold) Unlock(ctx context.Context) error {
	h.claim.check()
	entered := h.l.c.enter()
	if entered {
		defer h.l.c.leave()
	}

	release, err := h.end()
	if err != nil {
		if release {
			_ = h.claim.release(ctx)
		}
		return err
	}

	defer func() {
		if release { // an exporter has panicked
			h.claim.releaseLater()
		}
	}()
	ctx, released := h.StartRelease(ctx)
	began := time.Now()
	if release {
		err = h.claim.release(ctx)
		release = false
	}
	if errors.Is(err, lock.ErrLost) {
		err = h.lostError(lock.ReasonGone, nil)
	}
	return h.Released(released, h.Object().StoreFailed(ctx, "release", began, err))
}

// end ends the hold, or returns why there is nothing to end, and reports whether the claim is to be released.
func (h *hold) end() (release bool, err error) {
	c := h.l.c
	cl := h.claim
	c.mu.Lock()
	defer c.mu.Unlock()

	if err := h.End("release", h.Object()); err != nil {
		c.lost = slices.DeleteFunc(c.lost, func(other *hold) bool { return other == h })
		// A MaxHold has left the claim to this call.
		maxHeld := errors.Is(err, lock.ErrLost) && len(cl.holds) == 0 && !time.Now().Before(cl.keep)
		return maxHeld && cl.endLocked(), err
	}

	if last := cl.dropLocked(h); !last {
		return false, nil
	}
	if time.Now().Before(cl.keep) {
		cl.releaseAt = cl.keep
		cl.scheduleLocked(cl.keep)
		return false, nil
	}
	return cl.endLocked(), nil
}

// loseLocked makes the hold lost.
func (h *hold) loseLocked(reason lock.Reason, err error) {
	c := h.l.c
	if !h.Lose(h.lostError(reason, err)) || h.claim.owner.IsZero() {
		return
	}
	if len(c.lost) == maxLost {
		c.lost = slices.Delete(c.lost, 0, 1)
	}
	c.lost = append(c.lost, h)
}

func (h *hold) lostError(reason lock.Reason, err error) *lock.LostError {
	return &lock.LostError{Name: h.l.id.Name, Owner: h.claim.id, Reason: reason, When: time.Now(), Err: err}
}

// Dropped implements engine.Droppable.
func (h *hold) Dropped() {
	c := h.l.c
	if !h.claim.owner.IsZero() {
		return // the owner can end it without the handle
	}

	h.Disown()
	if !h.StopRenewing() {
		return
	}

	c.background(func(context.Context) { // a logger may block
		c.dropped.Log(c.log, "redlatch: a hold was dropped without Unlock; it is released when its lease ends",
			"name", text.Safe(h.Name()), "kind", h.l.id.Kind, "owner", h.Owner().String(), "acquired", h.Site.String())
	})
}

// Conflicts implements engine.ContextHold. Permits do not exclude each other.
func (h *hold) Conflicts(with engine.LockID, owner lock.Owner) bool {
	return h.l.permits == 0 && with == h.l.lockID() && (owner.IsZero() || owner != h.claim.owner) && h.Held()
}

// Break implements engine.ContextHold. All holds of the claim are lost, and the claim is released.
func (h *hold) Break(reason lock.Reason) bool {
	cl := h.claim
	cl.check()
	c := h.l.c
	c.mu.Lock()
	lost := cl.loseLocked(reason, nil)
	ended := cl.endLocked()
	c.mu.Unlock()

	for _, h := range lost {
		h.EndSpan(c.background)
	}
	if ended {
		_ = cl.release(context.Background())
	}
	return ended && h.Loss() != nil
}
