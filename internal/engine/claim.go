package engine

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// claim is what the client has on the server, or asks it for: one field of a hash, under an
// id that no other claim has had. Callers have holds of it: one, or several if an owner
// named by the callers re-enters. Its states:
//
//	requested ──hold──▶ held ──last Unlock──▶ released
//	    │                │
//	    │                ├──Lost──▶ gone, and all of its holds are lost
//	    │                └──the last hold ends by itself──▶ gone
//	    └──Lost, as by ForceUnlock──▶ gone, and hold returns errGone
type claim struct {
	Claim
	lock  *Lock
	owner lock.Owner // that the caller named, or zero; it does not change

	// mu guards the rest except for the lease. While the claim is requested it also guards the fields of Claim,
	// because another goroutine may make attempts on the caller's behalf.
	mu         sync.Mutex
	state      claimState
	waited     bool // an attempt did not succeed
	mayHaveRun bool // an attempt with this id has an unknown outcome, and the id was kept
	attempts   int32
	queued     bool  // it has a queue position on the server
	ready      bool  // only waiters of this process are before it in the server's queue
	noHandOff  bool  // it is not passed on: its lease may be longer than a waiter wants, a group has it, or a request refers to it
	forever    bool  // what keeps the lock from it has no expiry
	late       int   // attempts whose confirmation came when the lease was over
	receivers  int32 // how many subscribers have heard of its release; negative if that is unknown
	token      int64
	cohort     *Cohort         // if it is passed on as it is, or nil
	position   *position       // the queue position, if heartbeats keep it, or nil
	undone     <-chan struct{} // of releaseUnknown, for the last attempt with an unknown outcome, or nil
	keepUntil  time.Time       // until when its release leaves the lock held

	// An owner can have several holds of a claim.
	owned   []*Hold // the current holds of a named owner, the latest last
	joining int     // callers that are about to get a hold
	joined  *claim  // the claim of the same owner that the caller gets a hold of instead

	lease watchdog.Lease
	first Hold // the only hold unless the owner re-enters
}

type claimState uint8

const (
	claimRequested claimState = iota
	claimHeld
	claimReleased
	claimGone
)

// errGone is returned if a claim ended before its caller had a hold of it, as by ForceUnlock, or if one of another
// hold cannot be shared or taken over. A caller that may wait requests one of its own.
var errGone = fmt.Errorf("%w: it was opened by force meanwhile", lock.ErrNotAcquired)

// init makes the zero claim one that is to be requested, with the hold that its caller gets. A member of a group is
// renewed, whatever its lease.
func (c *claim) init(ctx context.Context, l *Lock, o *lock.Options, member bool) {
	c.lock = l
	c.receivers = -1
	c.owner, _ = lock.OwnerFrom(ctx)
	c.Key = l.key
	c.freshID()
	c.Lease = o.Lease
	if o.Lease == 0 {
		c.Lease = l.s.WatchdogTimeout
	}

	h := &c.first
	h.claim = c
	h.ttl = c.Lease
	h.Fixed = o.Lease > 0 && !member
	h.Member = member
	if h.Fixed || o.MaxHold > 0 {
		h.own = &ownLease{hold: h, maxHold: o.MaxHold}
	}
}

// freshID gives the claim an id that no request has used.
func (c *claim) freshID() { c.ID, c.ready = c.lock.s.NewOwner(), false }

// holdsLocked returns the holds that are held, the latest last. Without a named owner that is the first
// at most.
func (c *claim) holdsLocked() []*Hold {
	if !c.owner.IsZero() {
		return c.owned
	}
	if c.state == claimHeld {
		return []*Hold{&c.first}
	}
	return nil
}

// addLocked adds a hold.
func (c *claim) addLocked(h *Hold) {
	if !c.owner.IsZero() {
		c.owned = append(c.owned, h)
	}
}

// dropLocked takes a hold that has ended off the claim, and reports whether it was the last.
func (c *claim) dropLocked(h *Hold) (last bool) {
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
		c.alignLocked()
	}
	return len(c.owned) == 0 && c.joining == 0
}

// keepFromHandOff keeps the claim from being passed on.
func (c *claim) keepFromHandOff() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.noHandOff = true
}

// Channel implements Acquirer.
func (c *claim) Channel() string { return c.lock.p.Channel(&c.Claim) }

// Describe implements Acquirer.
func (c *claim) Describe() session.Hold {
	c.mu.Lock()
	defer c.mu.Unlock()
	return session.Hold{Kind: c.lock.kind.Name, Name: c.lock.id.Name, Owner: c.ID.String()}
}

// Holds implements Acquirer.
func (c *claim) Holds() iter.Seq[session.Hold] {
	return func(yield func(session.Hold) bool) {
		described := c.Describe()
		c.mu.Lock()
		defer c.mu.Unlock()
		holds := c.holdsLocked()
		for _, h := range holds {
			listed := described
			listed.Remaining = h.remainingLocked()
			if !yield(h.Listed(listed)) {
				return
			}
		}
		if len(holds) == 0 {
			yield(session.Hold{})
		}
	}
}

// Join implements Acquirer.
func (c *claim) Join(holder Acquirer) (Relation, error) {
	h := holder.(*claim)
	owner := c.owner
	if h.owner != owner {
		return Conflict, nil
	}

	h.mu.Lock()
	defer h.mu.Unlock()

	if h.state != claimHeld {
		return Conflict, nil
	}

	if c.lock.sameKind(h.lock) {
		if c.lock.kind.NonReentrant {
			return Conflict, fmt.Errorf("%w: by owner %v", lock.ErrReentered, owner)
		}
		h.joining++
		c.mu.Lock()
		c.joined = h
		c.mu.Unlock()
		return Reentrant, nil
	}

	if h.lock.kind.Shared {
		return Conflict, fmt.Errorf("%w: by owner %v", lock.ErrUpgrade, owner)
	}

	// A writer that reads too. The attempt refers to the write claim, so that must not get another holder.
	h.noHandOff = true
	c.mu.Lock()
	c.Writer = h.ID
	c.mu.Unlock()
	return SameOwner, nil
}

// TryAll implements Acquirer.
func (c *claim) TryAll(ctx context.Context, all []Acquirer) []Answer {
	if err := c.lock.s.Stopped(); err != nil {
		return slices.Repeat([]Answer{{Err: err}}, len(all))
	}

	// Close does not cut this request short: attempted releases what it acquires for callers that have left.
	ctx = context.WithoutCancel(ctx)
	results := make([]Answer, len(all))
	claims := make([]*Claim, len(all))
	for i, a := range all {
		claims[i] = &a.(*claim).Claim
	}
	sent := time.Now()
	answers, err := c.lock.kind.Grouped.AcquireAll(ctx, claims)
	if err != nil {
		answers = make([]Answer, len(claims))
	}
	for i, a := range all {
		results[i], results[i].Err = a.(*claim).answered(sent, answers[i], err)
	}
	return results
}

// noteForeverLocked notes whether what keeps the lock has no expiry, which is logged once.
func (c *claim) noteForeverLocked(is bool) {
	c.forever = is
	if l := c.lock; is && l.s.Warnings.First(l.id) {
		l.s.Go(func(context.Context) { // a logger may block
			l.s.Logger.Warn("redlatch: Lock finds a key without an expiry, which only a deletion frees; it may not be a lock",
				"name", text.Safe(l.id.Name), "kind", l.kind.Name, "key", text.Safe(l.key))
		})
	}
}

// errForever is a part of the error of a wait for a key without an expiry.
var errForever = errors.New("the key has no expiry: a deletion frees it, and it may not be a lock")

// failedLocked turns the error of an attempt into what it means for the wait.
func (c *claim) failedLocked(err error) error {
	if c.lock.s.Err() != nil {
		c.mayHaveRun = c.mayHaveRun || wire.IsUnknown(err) // and cancel releases it
		return errors.Join(lock.ErrClosed, err)
	}

	outcome := wire.OutcomeOf(err)
	if outcome == wire.Refused {
		return err
	}
	if outcome == wire.Unknown {
		// A claim that may have a queue position keeps its id, and with it the position: the next attempt
		// finds out, and its release is repeated in case the request arrives after it.
		if c.lock.kind.Ordered {
			c.mayHaveRun = true
		} else {
			c.releaseUnknownLocked()
		}
	}

	return &Unavailable{Err: wire.Classify(err)}
}

// releaseUnknownLocked has the claim released in the background, whatever became of it, and goes on
// under another id.
func (c *claim) releaseUnknownLocked() {
	c.undone = c.lock.releaseUnknown(c.Claim, true)
	c.freshID()
}

// Abandon implements Acquirer.
func (c *claim) Abandon() {
	c.mu.Lock()
	c.forgetPositionLocked()
	asked := c.Claim
	joined := c.joined
	c.mu.Unlock()

	if joined != nil {
		joined.unjoin()
	}
	c.lock.releaseUnknown(asked, true)
}

// cancel removes what a wait that is over may have left on the server. The result is closed when it is
// gone, and nil if there is nothing.
func (c *claim) cancel() (undone <-chan struct{}) {
	c.mu.Lock()
	queued := c.queued
	mayHaveRun := c.mayHaveRun
	claim := c.Claim
	undone = c.undone
	c.forgetPositionLocked()
	c.mu.Unlock()

	if mayHaveRun {
		return c.lock.releaseUnknown(claim, true)
	}
	if queued {
		return c.lock.leaveQueue(claim)
	}

	return undone
}

// cancelUnder is cancel for a wait under ctx that has failed with err. A caller that gets the result has
// left the server's queue, if the server answers soon: others may try at once.
func (c *claim) cancelUnder(ctx context.Context, err error) error {
	if session.Await(c.cancel()) {
		err = wire.Undone(ctx, err)
	}
	return err
}

// reenter returns another hold of a claim that is held, for the caller of from. It sends
// a request only if the hold is to last for longer than the claim is known to. The error
// is errGone if the claim is not held any more.
func (c *claim) reenter(ctx, parent context.Context, from *claim) (*Hold, error) {
	h := &from.first
	h.claim = c
	started := false
	defer func() {
		if !started { // an exporter has panicked
			c.unjoin()
		}
	}()
	parent, span := c.lock.s.Telemetry.StartHold(parent, c.lock.id, c.ID, "", c.token)
	started = true

	c.lease.Check() // its time may be over, and the watchdog late
	now := time.Now()

	c.mu.Lock()
	c.joining--
	if c.state != claimHeld {
		c.mu.Unlock()
		span.End(nil)
		return nil, errGone
	}

	short := (h.Fixed || c.renewalTTLLocked() == 0) && h.ttl > c.lease.Remaining()
	h.sent = now // not the claim's, which may be long ago
	h.Begin(parent, span)
	c.addLocked(h)
	if h.own != nil {
		h.endByItselfLocked(now)
	}
	c.alignLocked()
	c.noHandOff = c.noHandOff || h.Fixed || h.Member // a group may fix its lease later
	c.mu.Unlock()

	if short {
		if err := c.lengthen(ctx, h.ttl); err != nil {
			_ = h.undo(ctx)
			return nil, err
		}
	}

	return h.returned(ctx)
}

// unjoin takes back what Join has promised to a caller that gets no hold, and releases the claim if it was kept for
// that caller only.
func (c *claim) unjoin() {
	c.mu.Lock()
	c.joining--
	last := c.state == claimHeld && len(c.owned) == 0 && c.joining == 0
	if last {
		c.state = claimReleased
		c.lease.Forget()
	}
	c.mu.Unlock()

	if last {
		c.lock.s.Go(func(ctx context.Context) { _ = c.end(ctx, time.Now().Add(UnlockTimeout), false) })
	}
}

// lengthen has the server keep the claim for at least ttl. It returns errGone if the server
// does not have it; its holds are lost then.
func (c *claim) lengthen(ctx context.Context, ttl time.Duration) error {
	sent := time.Now()
	ok, err := c.lock.p.Extend(ctx, &c.Claim, ttl)
	if err != nil {
		return err
	}
	if !ok {
		c.Lost(lock.ReasonGone, nil)
		return errGone
	}

	c.lease.Extended(sent, ttl)
	return nil
}

// renewalTTLLocked returns the lease to which the holds need the claim to be renewed, or 0.
func (c *claim) renewalTTLLocked() (ttl time.Duration) {
	for _, h := range c.holdsLocked() {
		if !h.Fixed {
			ttl = max(ttl, h.ttl)
		}
	}
	return ttl
}

// alignLocked has the lease renewed for as long as a hold needs that.
func (c *claim) alignLocked() {
	if ttl := c.renewalTTLLocked(); ttl > 0 {
		c.lease.Renew(c.lock.p.Renewer(), ttl)
	} else {
		c.lease.StopRenewing()
	}
}

// Leased implements watchdog.Holder.
func (c *claim) Leased() watchdog.Subject {
	return watchdog.Subject{Key: c.Key, Owner: c.ID.String() + c.lock.kind.Renewed}
}

// Lost implements watchdog.Holder.
func (c *claim) Lost(reason lock.Reason, cause error) {
	c.mu.Lock()
	before := c.state
	holds := c.holdsLocked()
	if before == claimRequested || before == claimHeld {
		c.state = claimGone
	}
	if before != claimHeld { // claim.hold notices it
		c.mu.Unlock()
		return
	}

	c.lease.Forget()
	c.owned = nil
	for _, h := range holds {
		h.loseLocked(reason, cause)
		if h.own != nil {
			h.own.Forget()
		}
	}
	c.mu.Unlock()

	c.lock.e.Ended(c.lock.queue, c)

	// Not here: this may be the watchdog's goroutine, and an exporter may block.
	for _, h := range holds {
		h.EndSpan(c.lock.s.Go)
	}
}

// RenewalFailed implements watchdog.Holder.
func (c *claim) RenewalFailed(err error, left time.Duration) {
	c.mu.Lock()
	holds := slices.Clone(c.holdsLocked())
	c.mu.Unlock()
	for _, h := range holds {
		h.RenewalFailed(err, left)
	}
}

// holdsAs reports whether the claim is held under that id.
func (c *claim) holdsAs(id lock.Owner) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state == claimHeld && c.ID == id
}

// heldBy returns the holds of an owner that the callers named, the latest last.
func (c *claim) heldBy(owner lock.Owner) []*Hold {
	if c.owner != owner {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.holdsLocked())
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
	c.lock.e.Displaced(c.lock.queue, c)
}

// RenewalFailed implements watchdog.Holder. If it goes on the position is lost, and the
// attempts that follow say why.
func (*position) RenewalFailed(error, time.Duration) {}

// keepPositionLocked notes that the claim has a queue position, as of a request sent then.
func (c *claim) keepPositionLocked(sent time.Time) {
	c.forgetPositionLocked()
	c.queued = true
	p := c.lock.kind.Positions
	heartbeats := p.HeartbeatRenewer()
	if heartbeats == nil {
		return
	}

	kept := &position{claim: c, id: c.ID}
	c.position = kept
	c.lock.s.Watchdog.Watch(&kept.Lease, kept, watchdog.Terms{Sent: sent, TTL: p.PositionTTL(), Renewer: heartbeats, Quiet: true})
}

// forgetPositionLocked is called when the claim has no queue position any more, or soon will not.
func (c *claim) forgetPositionLocked() {
	if c.position != nil {
		c.position.Forget()
		c.position = nil
	}
	c.queued = false
}
