package locking

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
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
	owner lock.Owner // that the caller named, or zero

	// Of the attempts. Others may make them too: mu is held.
	sent       time.Time // when the request that succeeded was sent
	token      int64
	attempts   int32
	receivers  int32 // how many subscribers have heard of its release
	joining    int32 // callers that are about to get a hold
	waited     bool
	mayHaveRun bool            // an attempt has an unknown outcome, and the id was kept
	undone     <-chan struct{} // of cleanUp, for the last attempt with an unknown outcome, or nil
	queued     bool            // it has a queue position on the server
	ready      bool            // only waiters of this process are before it in the server's queue
	position   *watchdog.Lease // of the queue position, which heartbeats keep, or nil
	joined     *claim          // the claim of the same owner that the caller gets a hold of instead

	lease watchdog.Lease

	mu        sync.Mutex // of all below, too
	state     claimState
	pinned    bool      // it is not passed on: its lease on the server may be longer, or a request refers to it
	holds     []*hold   // that are held, the latest last
	keepUntil time.Time // until when its release leaves the lock held
	one       [1]*hold
	cohort    *Cohort // if it is passed on as it is, or nil

	first hold // what most claims have only
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
func (l *Lock) newClaim(ctx context.Context, o lock.Options, member bool) *claim {
	c := &claim{lock: l}
	c.Key, c.Lease = l.key, o.Lease
	if o.Lease == 0 {
		c.Lease = l.s.WatchdogTimeout
	}
	c.owner, _ = lock.OwnerFrom(ctx)
	c.holds = c.one[:0]
	c.first = hold{claim: c, ttl: c.Lease, maxHold: o.MaxHold, fixed: o.Lease > 0 && !member, member: member}
	return c
}

// Join implements acquire.Acquirer.
func (c *claim) Join(h *claim) (acquire.Relation, error) {
	if c.owner != h.owner {
		return acquire.Unrelated, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.state != standing:
		return acquire.Unrelated, nil
	case c.lock.sameKind(h.lock) && c.lock.p.Traits().NonReentrant:
		return acquire.Unrelated, fmt.Errorf("%w: %q by owner %v", lock.ErrReentered, c.lock.name, c.owner)
	case c.lock.sameKind(h.lock):
		h.joining++
		c.joined = h
		return acquire.Joined, nil
	case h.lock.p.Traits().Shared:
		return acquire.Unrelated, fmt.Errorf("%w: %q by owner %v", lock.ErrUpgrade, c.lock.name, c.owner)
	default: // a writer that reads too
		// The attempt refers to the write claim, so that must not get another holder.
		h.pinned = true
		c.mu.Lock()
		c.Extra = &Extra{Writer: h.ID}
		c.mu.Unlock()
		return acquire.Beside, nil
	}
}

// stand makes the claim one that stands, and returns the first hold of it, whose context is a child
// of parent.
func (c *claim) stand(ctx, parent context.Context) (*hold, error) {
	h := &c.first
	h.Begin(c.lock.s.Telemetry.StartHold(parent, c.lock.described(), c.ID, "", c.token))
	c.lease.Key, c.lease.Owner = c.Key, c.ID.String()
	terms := watchdog.Terms{Sent: c.sent, TTL: c.Lease}
	if !h.fixed {
		terms.Renewer = c.lock.p.Renewer()
	}
	// In one step: a standing claim is a watched one.
	c.mu.Lock()
	c.pinned = c.pinned || h.member
	watched := c.lock.s.Watchdog.Watch(&c.lease, c, terms)
	lost := c.state == gone
	c.state = standing
	c.holds = append(c.holds, h)
	if h.fixed || h.maxHold > 0 {
		h.endsAlone(c.sent)
	}
	c.mu.Unlock()
	if !c.owner.IsZero() {
		c.lock.q.Admit(c.lock.queueKey(), c)
	}
	switch {
	case lost || c.cohort.Gone():
		c.Lost(lock.ReasonGone, nil)
		return nil, errGone
	case !watched:
		return nil, errors.Join(lock.ErrClosed, h.Unlock(ctx))
	case time.Since(c.sent) >= c.Lease:
		// This process slept through the lease.
		return nil, errors.Join(lock.ErrNotAcquired, h.undo(ctx))
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
	case ctx.Err() != nil && !h.member:
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
	c.mu.Lock()
	c.joining--
	if c.state != standing {
		c.mu.Unlock()
		span.End(nil)
		return nil, errGone
	}
	short := (h.fixed || c.renewalTTL() == 0) && h.ttl > c.lease.Remaining()
	h.Begin(parent, span)
	c.holds = append(c.holds, h)
	if h.fixed || h.maxHold > 0 {
		h.endsAlone(time.Now())
	}
	c.align()
	c.pinned = c.pinned || h.fixed
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
	for _, h := range c.holds {
		if !h.fixed {
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
	if i := slices.Index(c.holds, h); i >= 0 {
		c.holds = slices.Delete(c.holds, i, i+1)
	}
	if h.own != nil {
		h.own.Forget()
	}
	if len(c.holds) > 0 {
		c.align()
	}
	return len(c.holds) == 0 && c.joining == 0
}

// Lost implements watchdog.Holder.
func (c *claim) Lost(reason lock.Reason, cause error) {
	c.mu.Lock()
	before := c.state
	if before == requested || before == standing {
		c.state = gone
	}
	if before != standing { // stand reports it
		c.mu.Unlock()
		return
	}
	c.lease.Forget()
	holds := c.holds
	c.holds = nil
	for _, h := range holds {
		h.Lose(h.lostError(reason, cause))
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
	holds := slices.Clone(c.holds)
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
	return slices.Clone(c.holds)
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

// queued is the watchdog.Holder of the claim's queue position.
type queued claim

// Lost implements watchdog.Holder: the position is gone, or it is the first.
func (q *queued) Lost(lock.Reason, error) {
	c := (*claim)(q)
	c.mu.Lock()
	c.ready = false
	c.mu.Unlock()
	c.lock.q.Displaced(c.lock.queueKey(), c)
}

// RenewalFailed implements watchdog.Holder. If it goes on the position is lost, and the
// attempts that follow say why.
func (*queued) RenewalFailed(error, time.Duration) {}

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
	c.position = &watchdog.Lease{Key: c.Key, Owner: c.ID.String()}
	c.lock.s.Watchdog.Watch(c.position, (*queued)(c), watchdog.Terms{Sent: sent, TTL: p.PositionTTL(), Renewer: heartbeats, Quiet: true})
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
