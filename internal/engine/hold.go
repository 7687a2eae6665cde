package engine

import (
	"context"
	"time"

	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Hold is what a caller has of a claim. While the claim is held, the mutex of the claim guards the state of
// the hold and its other fields, except for claim and sent, which do not change.
type Hold struct {
	State
	claim *claim
	sent  time.Time     // when the request that succeeded was sent, or when it joined the claim without one
	ttl   time.Duration // the lease that it asked for
	own   *ownLease     // of a hold that may end before its claim, or nil
}

// requested reports whether a request for this hold, and no other one, has given the claim its lease.
func (h *Hold) requested() bool { return h == &h.claim.first }

// Name implements lock.Hold.
func (h *Hold) Name() string { return h.claim.lock.id.Name }

// Object implements Droppable.
func (h *Hold) Object() wire.Object { return h.claim.lock.Object() }

// Owner implements lock.Hold.
func (h *Hold) Owner() lock.Owner { return h.claim.ID }

// Token implements lock.Hold.
func (h *Hold) Token() int64 { return h.claim.token }

// Context implements lock.Hold.
func (h *Hold) Context() context.Context { return h.ContextOf(h) }

// Remaining implements lock.Hold.
func (h *Hold) Remaining() time.Duration {
	c := h.claim
	c.mu.Lock()
	defer c.mu.Unlock()
	if !h.Held() {
		return 0
	}
	return h.remainingLocked()
}

// remainingLocked is Remaining for a hold that is held.
func (h *Hold) remainingLocked() time.Duration {
	if h.own != nil {
		return min(h.own.Remaining(), h.claim.lease.Remaining())
	}
	return h.claim.lease.Remaining()
}

// Extend implements lock.Hold.
func (h *Hold) Extend(ctx context.Context, lease time.Duration) error {
	if err := h.current("extend"); err != nil {
		return err
	}

	c := h.claim
	c.keepFromHandOff()
	sent := time.Now()
	ok, err := c.lock.p.Extend(ctx, &c.Claim, lease)
	if err != nil {
		return c.lock.failed(ctx, "extend", sent, err)
	}
	if ok {
		h.extended(sent, lease)
	} else {
		c.Lost(lock.ReasonGone, nil)
	}
	return h.current("extend") // it may have been unlocked meanwhile
}

// extended notes that a request sent then gave the claim at least ttl, for the sake of h.
func (h *Hold) extended(sent time.Time, ttl time.Duration) {
	h.leases(func(l *watchdog.Lease) { l.Extended(sent, ttl) })
}

// fix makes the lease of the hold end ttl after sent, when a request was sent that gave
// the claim that much. It is not renewed any more.
func (h *Hold) fix(sent time.Time, ttl time.Duration) {
	c := h.claim
	c.lease.Extended(sent, ttl)
	c.mu.Lock()
	defer c.mu.Unlock()

	if h.Held() {
		h.Fixed = true
		h.ttl = ttl
		h.own = &ownLease{hold: h}
		h.endByItselfLocked(sent)
		c.alignLocked()
	}
}

// EndAt implements GroupHold.
func (h *Hold) EndAt(at time.Time) {
	h.claim.mu.Lock()
	defer h.claim.mu.Unlock()
	if h.Held() {
		h.own = &ownLease{hold: h, maxHold: time.Until(at)}
		h.endByItselfLocked(time.Time{})
	}
}

// leases calls f for the claim's lease, and the hold's own if it has one.
func (h *Hold) leases(f func(l *watchdog.Lease)) {
	h.claim.mu.Lock()
	own := h.own
	h.claim.mu.Unlock()
	f(&h.claim.lease)
	if own != nil {
		f(&own.Lease)
	}
}

// check ends the hold if its time is over and the watchdog has not come to it yet.
func (h *Hold) check() { h.leases((*watchdog.Lease).Check) }

// current returns nil if h is held now, and else why it is not.
func (h *Hold) current(op string) error {
	h.check()
	return h.Err(op, h.Object())
}

// ownLease is the lease of a hold that may end before its claim: a fixed lease, or a MaxHold.
type ownLease struct {
	watchdog.Lease
	hold    *Hold
	maxHold time.Duration
}

// Leased implements watchdog.Holder. The lease is not renewed.
func (*ownLease) Leased() watchdog.Subject { return watchdog.Subject{} }

// RenewalFailed implements watchdog.Holder.
func (*ownLease) RenewalFailed(error, time.Duration) {}

// Lost implements watchdog.Holder.
func (o *ownLease) Lost(reason lock.Reason, cause error) {
	h := o.hold
	c := h.claim
	c.mu.Lock()
	if !h.loseLocked(reason, cause) {
		c.mu.Unlock()
		return
	}

	last := c.dropLocked(h)
	if last {
		// The work under it may not have noticed yet: the lock is left to Unlock, or to the end
		// of the lease.
		c.state = claimGone
	}
	c.mu.Unlock()

	h.EndSpan(c.lock.s.Go)
	if last {
		c.lease.Forget()
		c.lock.e.Ended(c.lock.queue, c)
	}
}

// endByItselfLocked has the hold end at the end of its fixed lease, which a request sent then has given
// it, or after MaxHold from now.
func (h *Hold) endByItselfLocked(sent time.Time) {
	terms := watchdog.Terms{Sent: sent, TTL: h.ttl}
	if !h.Fixed {
		terms = watchdog.Terms{Sent: time.Now(), TTL: lock.MaxLease, MaxHold: h.own.maxHold}
	}
	h.claim.lock.s.Watchdog.Watch(&h.own.Lease, h.own, terms)
}

// loseLocked makes the hold lost, and reports whether it was held.
func (h *Hold) loseLocked(reason lock.Reason, cause error) bool {
	was := h.Lose(h.lostError(reason, cause))
	if was && !h.claim.owner.IsZero() {
		h.claim.lock.e.lost.add(h)
	}
	return was
}

func (h *Hold) lostError(reason lock.Reason, cause error) *lock.LostError {
	return &lock.LostError{Name: h.claim.lock.id.Name, Owner: h.claim.ID, Reason: reason, When: time.Now(), Err: cause}
}

// Break implements ContextHold. All holds of the claim are lost, as if the server had lost it.
func (h *Hold) Break(reason lock.Reason) bool {
	if h.current("") != nil {
		return false
	}

	h.claim.Lost(reason, nil)
	if h.Loss() == nil { // it was unlocked meanwhile
		return false
	}

	h.claim.releaseLost(context.Background())
	return true
}

// Conflicts implements ContextHold.
func (h *Hold) Conflicts(with LockID, owner lock.Owner) bool {
	c := h.claim
	return with == c.lock.ID() && (owner.IsZero() || owner != c.owner) && h.Held()
}

// Dropped implements Droppable.
func (h *Hold) Dropped() {
	c := h.claim
	if !c.owner.IsZero() && !c.lock.kind.HandleOnly {
		return // the owner can end it without the handle
	}

	h.Disown()
	if !h.StopRenewing() {
		return
	}

	s := c.lock.s
	s.Go(func(context.Context) { // a logger may block
		s.LogDropped("redlatch: a hold was dropped without Unlock; it is no longer renewed",
			"name", text.Safe(h.Name()), "kind", c.lock.kind.Name, "owner", h.Owner().String(), "acquired", h.Site.String())
	})
}
