package locking

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/lock"
)

// claim is what the client has on the server, or asks it for: one field of a hash, under an
// id that no other claim has had. Callers have holds of it: one, or several if an owner
// named by the callers re-enters. Its states:
//
//	requested ──stand──▶ standing ──last Unlock──▶ released
//	                        │
//	                        └──Lost──▶ gone, and all of its holds are lost
type claim struct {
	Claim
	lock  *Lock
	owner lock.Owner // that the caller named, or zero; it does not change

	// mu guards the rest. Others than its caller may make its attempts.
	mu        sync.Mutex
	state     claimState
	queued    bool  // it has a queue position on the server
	ready     bool  // only waiters of this process are before it in the server's queue
	pinned    bool  // it is not passed on: its lease on the server may be longer, or a request refers to it
	forever   bool  // what keeps the lock from it has no expiry
	late      int   // attempts whose confirmation came when the lease was over
	receivers int32 // how many subscribers have heard of its release; negative if that is unknown
	token     int64
	cohort    *Cohort         // if it is passed on as it is, or nil
	position  *position       // the queue position, if heartbeats keep it, or nil
	undone    <-chan struct{} // of cleanUp, for the last attempt with an unknown outcome, or nil
	keepUntil time.Time       // until when its release leaves the lock held

	// An owner can have several holds of a claim.
	owned   []*hold // the current holds of a named owner, the latest last
	joining int     // callers that are about to get a hold
	joined  *claim  // the claim of the same owner that the caller gets a hold of instead

	lease watchdog.Lease
	first hold // the only hold unless the owner re-enters
}

type claimState uint8

const (
	requested claimState = iota
	standing
	released
	gone
)

// newClaim returns a claim that is to be requested, without an id, and the hold that its
// caller gets. A member of a group is renewed, whatever its lease.
func (l *Lock) newClaim(ctx context.Context, o *lock.Options, member bool) *claim {
	c := new(claim)
	c.begin(ctx, l, o, member)
	return c
}

// begin makes the zero claim what newClaim returns.
func (c *claim) begin(ctx context.Context, l *Lock, o *lock.Options, member bool) {
	c.lock, c.receivers = l, -1
	c.owner, _ = lock.OwnerFrom(ctx)
	c.Key, c.Lease = l.key, o.Lease
	if o.Lease == 0 {
		c.Lease = l.s.WatchdogTimeout
	}
	h := &c.first
	h.claim, h.ttl, h.Fixed, h.Member = c, c.Lease, o.Lease > 0 && !member, member
	if h.Fixed || o.MaxHold > 0 {
		h.own = &alone{hold: h, maxHold: o.MaxHold}
	}
}

// holds returns the holds that are held, the latest last. Without a named owner that is the first
// at most. c.mu is held.
func (c *claim) holds() []*hold {
	if !c.owner.IsZero() {
		return c.owned
	}
	if c.state == standing {
		return []*hold{&c.first}
	}
	return nil
}

// add adds a hold. c.mu is held.
func (c *claim) add(h *hold) {
	if !c.owner.IsZero() {
		c.owned = append(c.owned, h)
	}
}

// pin keeps the claim from being passed on.
func (c *claim) pin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pinned = true
}

// Leased implements watchdog.Holder.
func (c *claim) Leased() watchdog.Subject { return watchdog.Subject{Key: c.Key, Owner: c.ID.String()} }

// Join implements acquire.Acquirer.
func (c *claim) Join(holder acquire.Acquirer) (acquire.Relation, error) {
	h, owner := holder.(*claim), c.owner
	if h.owner != owner {
		return acquire.Unrelated, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.state != standing:
		return acquire.Unrelated, nil
	case c.lock.sameKind(h.lock) && c.lock.traits.NonReentrant:
		return acquire.Unrelated, fmt.Errorf("%w: %q by owner %v", lock.ErrReentered, c.lock.name, owner)
	case c.lock.sameKind(h.lock):
		h.joining++
		c.mu.Lock()
		c.joined = h
		c.mu.Unlock()
		return acquire.Joined, nil
	case h.lock.traits.Shared:
		return acquire.Unrelated, fmt.Errorf("%w: %q by owner %v", lock.ErrUpgrade, c.lock.name, owner)
	default: // a writer that reads too
		// The attempt refers to the write claim, so that must not get another holder.
		h.pinned = true
		c.mu.Lock()
		c.Writer = h.ID
		c.mu.Unlock()
		return acquire.Beside, nil
	}
}

// stand makes the claim one that stands, and returns the first hold of it, whose context is a child
// of parent.
func (c *claim) stand(ctx, parent context.Context) (*hold, error) {
	h := &c.first
	h.Begin(c.lock.s.Telemetry.StartHold(parent, c.lock.described(), c.ID, "", c.token))
	sent := h.sent
	terms := watchdog.Terms{Sent: sent, TTL: c.Lease}
	if !h.Fixed {
		terms.Renewer = c.lock.p.Renewer()
	}
	// In one step: a standing claim is a watched one.
	c.mu.Lock()
	c.pinned = c.pinned || h.Member
	watched := c.lock.s.Watchdog.Watch(&c.lease, c, terms)
	lost := c.state == gone
	c.state = standing
	c.add(h)
	if h.own != nil {
		h.endsAlone(sent)
	}
	c.mu.Unlock()
	if !c.owner.IsZero() {
		c.lock.q.Admit(c.lock.queueKey(), c)
	}
	switch {
	case lost || c.cohort.Gone():
		c.Lost(lock.ReasonGone, nil)
		session.Of[lostHolds](c.lock.s).remove(h) // no caller has had it
		return nil, errGone
	case !watched:
		return nil, errors.Join(lock.ErrClosed, h.Unlock(ctx))
	case time.Since(sent) >= watchdog.Certain(c.Lease):
		// This process slept through the lease.
		return nil, errors.Join(acquire.Late(1, false, c.Lease, sent), h.undo(ctx))
	}
	return h.checked(ctx)
}

// undo unlocks a hold that its caller does not get, in the background if that takes long.
func (h *hold) undo(ctx context.Context) error {
	return h.claim.lock.s.Undo(ctx, Patience, func() error { return h.Unlock(ctx) })
}

// checked returns a hold just made, unless its caller has left or the client is being
// closed. A member's group releases it then.
func (h *hold) checked(ctx context.Context) (*hold, error) {
	switch {
	case h.claim.lock.s.Err() != nil: // Close waits for this
		return nil, errors.Join(lock.ErrClosed, h.Unlock(ctx))
	case ctx.Err() != nil && !h.Member:
		return nil, errors.Join(lock.ErrNotAcquired, h.undo(ctx))
	}
	return h, nil
}

// errGone is returned if a claim of another hold cannot be shared or taken over. The caller
// requests one of its own.
var errGone = errors.New("the claim is gone")

// reenter returns another hold of a claim that stands, for the caller of from. It sends
// a request only if the hold is to last for longer than the claim is known to. The error
// is errGone if the claim does not stand any more.
func (c *claim) reenter(ctx, parent context.Context, from *claim) (*hold, error) {
	h := &from.first
	h.claim = c
	parent, span := c.lock.s.Telemetry.StartHold(parent, c.lock.described(), c.ID, "", c.token)
	c.lease.Check() // its time may be over, and the watchdog late
	now := time.Now()
	c.mu.Lock()
	c.joining--
	if c.state != standing {
		c.mu.Unlock()
		span.End(nil)
		return nil, errGone
	}
	short := (h.Fixed || c.renewalTTL() == 0) && h.ttl > c.lease.Remaining()
	h.sent = now // not the claim's, which may be long ago
	h.Begin(parent, span)
	c.add(h)
	if h.own != nil {
		h.endsAlone(now)
	}
	c.align()
	c.pinned = c.pinned || h.Fixed || h.Member // a group may fix its lease later
	c.mu.Unlock()
	if short {
		if err := c.lengthen(ctx, h.ttl); err != nil {
			_ = h.undo(ctx)
			return nil, err
		}
	}
	return h.checked(ctx)
}

// lengthen has the server keep the claim for at least ttl. It returns errGone if the server
// does not have it; its holds are lost then.
func (c *claim) lengthen(ctx context.Context, ttl time.Duration) error {
	sent := time.Now()
	reqCtx, cancel := c.lock.s.Bounded(ctx)
	defer cancel()
	ok, err := c.lock.p.Extend(reqCtx, &c.Claim, ttl)
	switch {
	case err != nil:
		return err
	case !ok:
		c.Lost(lock.ReasonGone, nil)
		return errGone
	}
	c.lease.Extended(sent, ttl)
	return nil
}

// renewalTTL returns the lease to which the holds need the claim to be renewed, or 0. c.mu is
// held.
func (c *claim) renewalTTL() (ttl time.Duration) {
	for _, h := range c.holds() {
		if !h.Fixed {
			ttl = max(ttl, h.ttl)
		}
	}
	return ttl
}

// align has the lease renewed for as long as a hold needs that. c.mu is held.
func (c *claim) align() {
	if ttl := c.renewalTTL(); ttl > 0 {
		c.lease.Renew(c.lock.p.Renewer(), ttl)
	} else {
		c.lease.StopRenewing()
	}
}

// drop takes a hold that has ended off the claim, and reports whether it was the last.
// c.mu is held.
func (c *claim) drop(h *hold) (last bool) {
	if h.own != nil {
		h.own.Forget()
	}
	if c.owner.IsZero() {
		return true
	}

	if i := slices.Index(c.owned, h); i >= 0 {
		c.owned = slices.Delete(c.owned, i, i+1)
	}
	if len(c.owned) > 0 {
		c.align()
	}
	return len(c.owned) == 0 && c.joining == 0
}

// Lost implements watchdog.Holder.
func (c *claim) Lost(reason lock.Reason, cause error) {
	c.mu.Lock()
	before, holds := c.state, c.holds()
	if before == requested || before == standing {
		c.state = gone
	}
	if before != standing { // stand reports it
		c.mu.Unlock()
		return
	}
	c.lease.Forget()
	c.owned = nil
	for _, h := range holds {
		h.lose(reason, cause)
		if h.own != nil {
			h.own.Forget()
		}
	}
	c.mu.Unlock()
	c.lock.q.Released(c.lock.queueKey(), c, acquire.Release{})
	// Not here: this may be the watchdog's goroutine, and an exporter may block.
	for _, h := range holds {
		h.EndSpan(c.lock.s.Go)
	}
}

// RenewalFailed implements watchdog.Holder.
func (c *claim) RenewalFailed(err error, left time.Duration) {
	c.mu.Lock()
	holds := slices.Clone(c.holds())
	c.mu.Unlock()
	for _, h := range holds {
		h.RenewalFailed(err, left)
	}
}

// standsAs reports whether the claim stands under that id.
func (c *claim) standsAs(id lock.Owner) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state == standing && c.ID == id
}

// heldBy returns the holds of an owner that the callers named, the latest last.
func (c *claim) heldBy(owner lock.Owner) []*hold {
	if c.owner != owner {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.holds())
}

// freshID gives the claim an id that no request has used.
func (c *claim) freshID() { c.ID, c.ready = c.lock.s.NewOwner(), false }

// needsID gives the claim an id before its first request, which re-entry does not make.
func (c *claim) needsID() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ID.IsZero() {
		c.freshID()
	}
}

// position is a queue position that heartbeats keep.
type position struct {
	watchdog.Lease
	claim *claim
	id    lock.Owner // with which it was taken
}

// Leased implements watchdog.Holder.
func (p *position) Leased() watchdog.Subject {
	return watchdog.Subject{Key: p.claim.Key, Owner: p.id.String()}
}

// Lost implements watchdog.Holder: the position is gone, or it is the first.
func (p *position) Lost(lock.Reason, error) {
	c := p.claim
	c.mu.Lock()
	c.ready = false
	c.mu.Unlock()
	c.lock.q.Displaced(c.lock.queueKey(), c)
}

// RenewalFailed implements watchdog.Holder. If it goes on the position is lost, and the
// attempts that follow say why.
func (*position) RenewalFailed(error, time.Duration) {}

// keepPosition notes that the claim has a queue position, as of a request sent then. c.mu
// is held.
func (c *claim) keepPosition(sent time.Time) {
	c.forgetPosition()
	c.queued = true
	p := c.lock.p.(Positioned)
	heartbeats := p.HeartbeatRenewer()
	if heartbeats == nil {
		return
	}
	kept := &position{claim: c, id: c.ID}
	c.position = kept
	c.lock.s.Watchdog.Watch(&kept.Lease, kept, watchdog.Terms{Sent: sent, TTL: p.PositionTTL(), Renewer: heartbeats, Quiet: true})
}

// forgetPosition is called when the claim has no queue position any more, or soon will
// not. c.mu is held.
func (c *claim) forgetPosition() {
	if c.position != nil {
		c.position.Forget()
		c.position = nil
	}
	c.queued = false
}
