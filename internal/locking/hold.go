package locking

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	holds "github.com/redlatch/redlatch/internal/hold"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

// hold is what a caller has of a claim. Its state changes while the mutex of the claim is
// held, which guards the other fields.
type hold struct {
	holds.State
	claim *claim
	sent  time.Time     // when the request that succeeded was sent, or when it joined the claim without one
	ttl   time.Duration // the lease that it asked for
	own   *alone        // of a hold that may end before its claim, or nil
}

// requested reports whether a request for this hold, and no other one, has given the claim its lease.
func (h *hold) requested() bool { return h == &h.claim.first }

// alone is the lease of a hold that may end before its claim.
type alone struct {
	watchdog.Lease
	hold    *hold
	maxHold time.Duration
}

// Leased implements watchdog.Holder. The lease is not renewed.
func (*alone) Leased() watchdog.Subject { return watchdog.Subject{} }

// Lost implements watchdog.Holder.
func (a *alone) Lost(reason lock.Reason, cause error) {
	h := a.hold
	c := h.claim
	c.mu.Lock()
	if !h.lose(reason, cause) {
		c.mu.Unlock()
		return
	}
	last := c.drop(h)
	if last {
		// The work under it may not have noticed yet: the lock is left to Unlock, or to the end
		// of the lease.
		c.state = gone
	}
	c.mu.Unlock()
	h.EndSpan(c.lock.s.Go)
	if last {
		c.lease.Forget()
		c.lock.q.Released(c.lock.queueKey(), c, acquire.Release{})
	}
}

// RenewalFailed implements watchdog.Holder.
func (*alone) RenewalFailed(error, time.Duration) {}

// endsAlone has the hold end by itself, at the end of its fixed lease, which a request sent
// then has given it, or after MaxHold from now. The mutex of the claim is held.
func (h *hold) endsAlone(sent time.Time) {
	terms := watchdog.Terms{Sent: sent, TTL: h.ttl}
	if d := h.own.maxHold; !h.Fixed {
		terms = watchdog.Terms{Sent: time.Now(), TTL: lock.MaxLease, MaxHold: d}
	}
	h.claim.lock.s.Watchdog.Watch(&h.own.Lease, h.own, terms)
}

// lose makes the hold lost, and reports whether it was held. The mutex of the claim is held.
func (h *hold) lose(reason lock.Reason, cause error) bool {
	was := h.Lose(h.lostError(reason, cause))
	if was && !h.claim.owner.IsZero() {
		session.Of[lostHolds](h.claim.lock.s).add(h)
	}
	return was
}

func (h *hold) lostError(reason lock.Reason, cause error) *lock.LostError {
	return &lock.LostError{Name: h.claim.lock.name, Owner: h.claim.ID, Reason: reason, When: time.Now(), Err: cause}
}

// leases calls f for the claim's lease, and the hold's own if it has one.
func (h *hold) leases(f func(l *watchdog.Lease)) {
	h.claim.mu.Lock()
	own := h.own
	h.claim.mu.Unlock()
	f(&h.claim.lease)
	if own != nil {
		f(&own.Lease)
	}
}

// check ends the hold if its time is over and the watchdog has not come to it yet.
func (h *hold) check() { h.leases((*watchdog.Lease).Check) }

// current returns nil if h is held now, and else why it is not.
func (h *hold) current(op string) error {
	h.check()
	return h.Err(op, h.Name())
}

// Context implements lock.Hold.
func (h *hold) Context() context.Context { return h.ContextOf(h) }

// Break implements holds.Outer. All holds of the claim are lost, as if the server had lost it.
func (h *hold) Break(reason lock.Reason) bool {
	if h.current("") != nil {
		return false
	}
	h.claim.Lost(reason, nil)
	if h.Loss() == nil { // it was unlocked meanwhile
		return false
	}
	h.claim.freeLost(context.Background())
	return true
}

// Blocks implements holds.Outer.
func (h *hold) Blocks(on holds.On, owner lock.Owner) bool {
	c := h.claim
	return on == c.lock.On() && (owner.IsZero() || owner != c.owner) && h.Held()
}

// Remaining implements lock.Hold.
func (h *hold) Remaining() time.Duration {
	c := h.claim
	c.mu.Lock()
	defer c.mu.Unlock()
	if !h.Held() {
		return 0
	}
	return h.remaining()
}

// remaining is Remaining for a hold that is held. The mutex of the claim is held.
func (h *hold) remaining() time.Duration {
	if h.own != nil {
		return min(h.own.Remaining(), h.claim.lease.Remaining())
	}
	return h.claim.lease.Remaining()
}

// Extend implements lock.Hold.
func (h *hold) Extend(ctx context.Context, lease time.Duration) error {
	if err := h.current("Extend"); err != nil {
		return err
	}
	c := h.claim
	c.pin()
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
	return h.current("Extend") // it may have been unlocked meanwhile
}

// extended notes that a request sent then gave the claim at least ttl, for the sake of h.
func (h *hold) extended(sent time.Time, ttl time.Duration) {
	h.leases(func(l *watchdog.Lease) { l.Extended(sent, ttl) })
}

// fix makes the lease of the hold end ttl after sent, when a request was sent that gave
// the claim that much. It is not renewed any more.
func (h *hold) fix(sent time.Time, ttl time.Duration) {
	c := h.claim
	c.lease.Extended(sent, ttl)
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.Held() {
		h.Fixed, h.ttl, h.own = true, ttl, &alone{hold: h}
		h.endsAlone(sent)
		c.align()
	}
}

// EndAt implements GroupHold.
func (h *hold) EndAt(at time.Time) {
	h.claim.mu.Lock()
	defer h.claim.mu.Unlock()
	if h.Held() {
		h.own = &alone{hold: h, maxHold: time.Until(at)}
		h.endsAlone(time.Time{})
	}
}

// Unlock implements lock.Hold.
func (h *hold) Unlock(ctx context.Context) error {
	e, err := h.startUnlock(ctx, false)
	if err != nil {
		h.freeLost(ctx, err)
		return err
	}
	if e.last {
		err = h.claim.release(e.ctx, e.by, h)
	}
	return e.done(err)
}

// done ends the release, with that result.
func (e ending) done(err error) error {
	return e.Released(e.released, e.claim.lock.failed(e.ctx, "unlock", e.began, err))
}

// ending is a hold that is being unlocked.
type ending struct {
	*hold
	last     bool // hold of its claim, which is to be released
	began    time.Time
	ctx      context.Context // of its requests
	by       time.Time       // when Unlock has to return
	released func(error)     // ends the span of the release
	over     time.Time       // when the lease of the claim ends that it leaves
}

// startUnlock ends a hold, or returns why there is nothing to end. With alone set it is an error
// that the claim has other holds.
func (h *hold) startUnlock(ctx context.Context, alone bool) (ending, error) {
	h.check()
	c, last, over := h.claim, false, time.Time{}
	c.mu.Lock()
	if alone && h.Held() && (len(c.holds()) > 1 || c.joining > 0) {
		c.mu.Unlock()
		return ending{}, fmt.Errorf("%w: Detach %q: the owner has other holds", lock.ErrInvalid, h.Name())
	}
	began := time.Now()
	err := h.End("Unlock", h.Name())
	if err == nil {
		if last = c.drop(h); last {
			left := c.lease.Remaining()
			over = began.Add(left)
			c.Lease = max(c.Lease, left) // for as long the server may have it
			c.state = released
			c.lease.Forget()
		}
	} else {
		session.Of[lostHolds](c.lock.s).remove(h)
	}
	c.mu.Unlock()
	if err != nil {
		return ending{}, err
	}
	ctx, end := h.StartRelease(ctx)
	return ending{h, last, began, ctx, began.Add(Patience), end, over}, nil
}

// freeLost releases what the server may still have of a lost hold, of which Unlock has returned that loss.
func (h *hold) freeLost(ctx context.Context, err error) {
	var loss *lock.LostError
	if !errors.As(err, &loss) {
		return
	}
	c := h.claim
	c.mu.Lock()
	left := c.state == gone && !time.Now().Before(c.keepUntil)
	c.mu.Unlock()
	switch {
	case !left || c.lock.s.Err() != nil:
	case loss.Reason == lock.ReasonMaxHold: // the server has it for sure, and most likely answers
		c.freeLost(context.WithoutCancel(ctx))
	default:
		c.lock.s.Go(c.freeLost)
	}
}

// Dropped implements holds.Hold.
func (h *hold) Dropped() {
	if !h.claim.owner.IsZero() && !h.claim.lock.traits.NoOwnerUnlock {
		return // the owner can end it without the handle
	}
	h.claim.mu.Lock()
	fixed := h.Fixed
	h.claim.mu.Unlock()
	if fixed {
		h.Disown() // work may depend on it until its lease ends
		return
	}
	s := h.claim.lock.s
	s.Go(func(ctx context.Context) {
		s.LogDropped("redlatch: a hold was dropped without Unlock; releasing it",
			"name", text.Safe(h.Name()), "kind", h.claim.lock.traits.Kind, "owner", h.Owner().String(), "acquired", h.Site.String())
		_ = h.Unlock(ctx)
	})
}

// Name implements lock.Hold.
func (h *hold) Name() string { return h.claim.lock.name }

// Owner implements lock.Hold.
func (h *hold) Owner() lock.Owner { return h.claim.ID }

// Token implements lock.Hold.
func (h *hold) Token() int64 { return h.claim.token }
