package locking

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/queue"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// hold is the state of one acquisition, from the first attempt on:
//
//	acquiring ──begin──▶ held ──Unlock──▶ ended
//	                      │                 ▲
//	                      └─Lost──▶ lost ───┘ (Unlock reports the loss)
//
// The caller has a *handle, which nothing here points to, so that one that is
// dropped can be noticed.
type hold struct {
	lock    *Lock
	claim   Claim
	maxHold time.Duration

	// Of the acquisition, and not changed while the caller has it.
	deadline time.Time // of Wait
	sent     time.Time // when the request that succeeded was sent
	token    int64
	site     callsite.Site
	attempts int32
	told     int32 // how many have heard of its release
	waited   bool
	named    bool
	fixed    bool // not renewed
	part     bool // of several that are taken as one

	tainted bool       // an attempt has an unknown outcome, and the claim was kept
	placed  bool       // the claim has a place on the server
	place   *place     // to be kept there, or nil
	left    *time.Time // when a claim was abandoned last, or nil

	lease watchdog.Lease

	mu sync.Mutex // of all above while acquiring: others may try for it too

	passed    bool // another has the claim now
	shown     bool // the caller knows the owner
	stretched bool // the lease was extended
	state     holdState
	relay     *Relay     // of the claim, if it is passed on as it is
	formerly  lock.Owner // the owner that is shown once another has it

	lost   *lock.LostError
	parent context.Context // Context is a child of it, made when asked for
	ctx    context.Context // what Context returns
	cancel context.CancelCauseFunc
	span   *telemetry.Hold
	whole  Whole // what it is part of, if anything
}

type holdState uint8

const (
	acquiring holdState = iota
	held
	lost
	ended
)

// freshClaim gives the claim an identity that no earlier request has used.
func (h *hold) freshClaim() {
	if h.named {
		h.claim.Ticket = wire.NewRequestID()
	} else {
		h.claim.Owner = h.lock.s.NewOwner()
	}
}

// Try implements queue.Acquirer.
func (h *hold) Try(ctx context.Context) (queue.Verdict, error) {
	if err := h.lock.s.Err(); err != nil {
		return queue.Verdict{}, err
	}
	if !h.deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, h.deadline)
		defer cancel()
	}
	sent := time.Now()
	a, err := h.lock.p.Acquire(ctx, &h.claim)
	return h.answered(sent, a, err)
}

// TryAll implements queue.Grouped.
func (h *hold) TryAll(ctx context.Context, all []queue.Acquirer) []queue.Result {
	results := make([]queue.Result, len(all))
	err := h.lock.s.Err()
	if err != nil {
		for i := range results {
			results[i].Err = err
		}
		return results
	}
	// Those who close the client leave it to this request to give back what it gets.
	ctx, cancel := h.lock.s.Bounded(context.WithoutCancel(ctx))
	defer cancel()
	claims := make([]*Claim, len(all))
	for i, a := range all {
		claims[i] = &a.(*hold).claim
	}
	sent := time.Now()
	answers, err := h.lock.p.(Grouped).AcquireAll(ctx, claims)
	if err != nil {
		answers = make([]Answer, len(all))
	}
	for i, a := range all {
		results[i].Verdict, results[i].Err = a.(*hold).answered(sent, answers[i], err)
	}
	return results
}

// answered says what the outcome of an attempt means for the wait.
func (h *hold) answered(sent time.Time, a Answer, err error) (queue.Verdict, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.attempts++
	switch {
	case err != nil:
		return queue.Verdict{}, h.failed(err)
	case a.Reentered && h.left != nil && time.Since(*h.left) < settleTime:
		// What holds may be the claim that was abandoned, on its way out.
		return queue.Verdict{FreeIn: minReleaseWait}, nil
	case a.Reentered:
		return queue.Verdict{}, fmt.Errorf("%w: %q by owner %v", lock.ErrReentered, h.lock.name, h.claim.Owner)
	case a.Upgrade:
		return queue.Verdict{}, fmt.Errorf("%w: %q by owner %v", lock.ErrUpgrade, h.lock.name, h.claim.Owner)
	case !a.Acquired:
		h.waited, h.left, h.claim.Waits = true, nil, true
		if a.Placed {
			h.keepPlace(sent)
		}
		return queue.Verdict{FreeIn: a.FreeIn, Moved: a.Moved}, nil
	case time.Since(sent) < h.claim.Lease:
		h.acquired(sent, a)
		return queue.Verdict{Acquired: true}, nil
	case h.lock.p.Traits().Ordered:
		h.tainted = true // and retire gives it back
		return queue.Verdict{}, fmt.Errorf("%w: %q: the lease was over before its confirmation came", lock.ErrNotAcquired, h.lock.name)
	default:
		// The lease was over before its confirmation came.
		h.abandon()
		return queue.Verdict{FreeIn: 0}, nil
	}
}

// acquired notes the success of a request. h.mu is held.
func (h *hold) acquired(sent time.Time, a Answer) {
	h.sent, h.token = sent, a.Token
	h.forgetPlace()
}

// failed turns the error of an attempt into what it means for the wait. h.mu is
// held.
func (h *hold) failed(err error) error {
	if h.lock.s.Err() != nil {
		h.tainted = h.tainted || wire.OutcomeOf(err) == wire.Unknown // and retire gives it back
		return errors.Join(lock.ErrClosed, err)
	}
	switch wire.OutcomeOf(err) {
	case wire.Refused:
		return fmt.Errorf("redlatch: acquire %q: %w", h.lock.name, err)
	case wire.Passing:
		return &queue.Unavailable{Err: fmt.Errorf("redlatch: acquire %q: %w", h.lock.name, err)}
	default:
		h.doubt()
		return &queue.Unavailable{Err: fmt.Errorf("%w: acquire %q: %w", lock.ErrIndeterminate, h.lock.name, err)}
	}
}

// doubt is called when nothing is known of a request for the claim. An unnamed
// one that may have a place on the server keeps it: the next attempt finds out,
// and what else has become of the request is seen to when the claim is done with.
// h.mu is held.
func (h *hold) doubt() {
	ordered := h.lock.p.Traits().Ordered
	if ordered && !h.named {
		h.tainted = true
		return
	}
	if ordered && h.claim.Waits {
		h.placed = true // perhaps: under this owner, which stays
	}
	h.abandon()
}

// abandon gives up the claim as it stands, whatever became of it on the server,
// and goes on under a new one. h.mu is held.
func (h *hold) abandon() {
	now := time.Now()
	h.left = &now
	h.lock.settle(h.claim, true)
	h.freshClaim()
}

// Abandon implements queue.Grouped.
func (h *hold) Abandon() {
	h.mu.Lock()
	h.forgetPlace()
	claim := h.claim
	h.mu.Unlock()
	h.giveBack(claim)
}

// giveBack undoes a claim of which nothing is known, in the background, or with one
// request if the client is being closed.
func (h *hold) giveBack(c Claim) {
	if !h.lock.settle(c, true) {
		h.lock.closing(func(ctx context.Context) { _, _ = h.lock.p.Release(ctx, &c, true) })
	}
}

// retire gives back what a wait that has failed may have left on the server.
func (h *hold) retire() {
	h.mu.Lock()
	placed, tainted, claim := h.placed, h.tainted, h.claim
	h.forgetPlace()
	h.mu.Unlock()
	switch {
	case tainted:
		h.giveBack(claim)
	case placed:
		h.lock.leave(claim, h.sharesPlace)
	}
}

// sharesPlace reports whether the place of the claim is that of another waiter of
// this process too: a named owner has one, however often it waits.
func (h *hold) sharesPlace() bool {
	return h.named && h.lock.s.Queues.Waits(h.lock.queueKey(), func(a queue.Acquirer) bool {
		other := a.(*hold)
		return other != h && other.named && other.claim.Owner == h.claim.Owner && other.lock.sameKind(h.lock)
	})
}

// effort returns how many attempts there were and whether others were in the way.
func (h *hold) effort() (attempts int, waited bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return int(h.attempts), h.waited
}

// place is the place of a waiter on the server, for as long as it shows signs of
// life.
type place struct {
	h     *hold
	lease watchdog.Lease
}

// Lost implements watchdog.Holder: the place is gone, or it is the waiter's turn.
func (p *place) Lost(lock.Reason, error) { p.h.lock.s.Queues.Displaced(p.h.lock.queueKey(), p.h) }

// RenewalFailed implements watchdog.Holder. There is nobody to tell: if it goes on
// the place is lost, and the attempts that follow say why.
func (p *place) RenewalFailed(error, time.Duration) {}

// keepPlace notes that the claim has a place on the server, as of a request sent
// then. h.mu is held.
func (h *hold) keepPlace(sent time.Time) {
	h.forgetPlace()
	h.placed = true
	places := h.lock.p.(Placed)
	keeper := places.PlaceKeeper()
	if keeper == nil {
		return
	}
	h.place = &place{h: h}
	h.place.lease.Key, h.place.lease.Owner = h.claim.Key, h.claim.Owner.String()
	h.lock.s.Watchdog.Watch(&h.place.lease, h.place, watchdog.Terms{Sent: sent, TTL: places.PlaceTime(), Renewer: keeper, Quiet: true})
}

// forgetPlace is called when the claim has no place any more, or soon will not.
// h.mu is held.
func (h *hold) forgetPlace() {
	if h.place != nil {
		h.place.lease.Forget()
		h.place = nil
	}
	h.placed = false
}

// shed puts the hold of a tainted claim under a fresh owner. The old one has to be
// released again and again, for what may still be under way, and the caller could
// come to know it and use it as a name.
func (h *hold) shed(ctx context.Context) error {
	old, fresh := h.claim, h.claim
	fresh.Owner = h.lock.s.NewOwner()
	reqCtx, cancel := h.lock.s.Bounded(context.WithoutCancel(ctx))
	defer cancel()
	ok, err := h.lock.p.(Renamer).Rename(reqCtx, &old, &fresh)
	h.lock.settle(old, true)
	if err == nil && ok {
		h.claim, h.tainted = fresh, false
		return nil
	}
	h.lock.s.Queues.Released(h.lock.queueKey(), h, queue.Release{})
	if err == nil {
		return fmt.Errorf("%w: %q was lost before Lock could return", lock.ErrNotAcquired, h.lock.name)
	}
	h.lock.settle(fresh, true)
	return fmt.Errorf("%w: acquire %q: %w", lock.ErrIndeterminate, h.lock.name, err)
}

// begin makes a hold of an acquisition that the queue says has succeeded.
func (h *hold) begin(ctx context.Context) error {
	if h.tainted {
		if err := h.shed(ctx); err != nil {
			return err
		}
	}
	h.parent, h.span = h.lock.s.Telemetry.StartHold(ctx, h.lock.described(), h.claim.Owner, h.token)
	h.lease.Key, h.lease.Owner = h.claim.Key, h.claim.Holder()
	h.lease.Ticket = h.claim.latch()
	if h.relay != nil && h.maxHold > 0 {
		h.maxHold += time.Since(h.sent) // it counts from when it was passed on
	}
	terms := watchdog.Terms{Sent: h.sent, TTL: h.claim.Lease, MaxHold: h.maxHold}
	if !h.fixed {
		terms.Renewer = h.lock.p.Renewer()
	}
	// In one step: whoever finds this hold by its owner finds it watched, or not
	// yet held.
	h.mu.Lock()
	watched := h.lock.s.Watchdog.Watch(&h.lease, h, terms)
	h.state = held
	h.mu.Unlock()
	if h.relay.Gone() {
		h.Lost(lock.ReasonGone, nil)
	}
	switch {
	case !watched || h.lock.s.Err() != nil: // the client is being closed, and waits for this
		return errors.Join(lock.ErrClosed, h.unlock(ctx))
	case ctx.Err() != nil:
		// Handed over in the moment the caller left.
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx), h.unlock(ctx))
	case time.Since(h.sent) >= h.claim.Lease:
		// This process slept through the lease.
		return errors.Join(lock.ErrNotAcquired, h.unlock(ctx))
	}
	return nil
}

// isOf reports whether h is held now, by that owner.
func (h *hold) isOf(o lock.Owner) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state == held && h.claim.Owner == o
}

// Lost implements watchdog.Holder.
func (h *hold) Lost(reason lock.Reason, cause error) {
	h.mu.Lock()
	if h.state != held {
		h.mu.Unlock()
		return
	}
	h.state = lost
	h.lease.Forget()
	h.lost = h.lostError(reason, cause)
	h.endContext(h.lost)
	lostErr := h.lost
	h.mu.Unlock()
	h.lock.s.Queues.Released(h.lock.queueKey(), h, queue.Release{})
	// Not here: this may be the watchdog's goroutine, and an exporter may block.
	if !h.lock.s.Go(func(context.Context) { h.span.End(lostErr) }) {
		h.span.End(lostErr)
	}
}

// RenewalFailed implements watchdog.Holder.
func (h *hold) RenewalFailed(err error, left time.Duration) { h.span.RenewalFailed(err, left) }

func (h *hold) lostError(reason lock.Reason, cause error) *lock.LostError {
	return &lock.LostError{Name: h.lock.name, Owner: h.claim.Owner, Reason: reason, When: time.Now(), Err: cause}
}

// endContext ends the hold's context. h.mu is held.
func (h *hold) endContext(lost *lock.LostError) {
	if h.cancel != nil {
		h.cancel(endCause(lost))
	}
	h.tellWhole(lost)
}

func endCause(lost *lock.LostError) error {
	if lost == nil {
		return context.Canceled
	}
	return lost
}

// context returns what Hold.Context promises. It is made when first asked for:
// most short critical sections never do.
func (h *hold) context() context.Context {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ctx == nil {
		h.ctx, h.cancel = context.WithCancelCause(h.parent)
		if h.state != held {
			h.cancel(endCause(h.lost))
		}
	}
	return h.ctx
}

// current returns nil if h is held now, and else why it is not.
func (h *hold) current(op string) error {
	h.lease.Check()
	h.mu.Lock()
	defer h.mu.Unlock()
	switch h.state {
	case held:
		return nil
	case lost:
		return h.lost
	default:
		return fmt.Errorf("%w: %s %q", lock.ErrNotHeld, op, h.lock.name)
	}
}

func (h *hold) extend(ctx context.Context, lease time.Duration) error {
	if err := lock.CheckLease(lease); err != nil {
		return err
	}
	h.lease.Check()
	if !h.stretch() {
		return h.current("Extend")
	}
	sent := time.Now()
	ok, err := h.lock.p.Extend(ctx, &h.claim, lease)
	if err != nil {
		return fmt.Errorf("redlatch: extend %q: %w", h.lock.name, err)
	}
	if ok {
		h.lease.Extended(sent, lease)
	} else {
		h.Lost(lock.ReasonGone, nil)
	}
	return h.current("Extend") // it may have been unlocked meanwhile
}

// stretch notes that the lease is the hold's own from here on, and reports whether it is
// held.
func (h *hold) stretch() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stretched = h.stretched || h.state == held
	return h.state == held
}

func (h *hold) unlock(ctx context.Context) error {
	e, err := h.startUnlock(ctx)
	if err != nil {
		return err
	}
	key := h.lock.queueKey()
	if h.relay != nil && h.lock.s.Queues.Next(key) == nil {
		h.relay.Await() // whoever passed it on is about to be back
	}
	for {
		heirs := h.lock.s.Queues.Successors(key, !h.named)
		if !h.relays(heirs) {
			return e.done(h.finish(e.ctx, heirs))
		}
		leg := h.relay.Join()
		if h.passOn(e.ctx, heirs) {
			return e.done(h.confirm(e.ctx, leg))
		}
	}
}

// relays reports whether the heirs can go on with the claim as it is: they want the same,
// and nobody out there knows its owner as that of this hold. From then on nobody will.
func (h *hold) relays(heirs []*queue.Waiter) bool {
	if len(heirs) != 1 || !h.lock.p.Traits().Relayed || !h.plain() {
		return false
	}
	if heir := heirs[0].Acquirer().(*hold); !heir.plain() {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.shown || h.stretched {
		return false
	}
	if h.relay == nil {
		h.relay = NewRelay(h.sent)
	}
	_, h.passed = h.relay.Trusted()
	return h.passed
}

// plain reports whether the hold has nothing of its own but its lease, which is renewed.
func (h *hold) plain() bool { return !h.named && !h.fixed && !h.part }

// passOn makes the heir the holder of the claim as it is. It reports false if it has left.
func (h *hold) passOn(ctx context.Context, heirs []*queue.Waiter) bool {
	heir := heirs[0].Acquirer().(*hold)
	confirmed, _ := h.relay.Trusted()
	heir.mu.Lock()
	heir.claim.Owner, heir.relay = h.claim.Owner, h.relay
	heir.acquired(confirmed, Answer{})
	heir.mu.Unlock()
	if len(h.lock.s.Queues.Grant(heirs, h)) == 0 {
		h.span.HandOff(ctx)
		return true
	}
	h.mu.Lock()
	h.passed = false
	h.mu.Unlock()
	return false
}

// owner returns who has the claim. Whoever has asked may use it as a name: the claim is
// passed on by the server from then on, to an owner of its own. And who asks only after it
// was passed on as it is must not learn the name of another.
func (h *hold) owner() lock.Owner {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.passed && h.formerly.IsZero() {
		h.formerly = h.lock.s.NewOwner()
	}
	if !h.formerly.IsZero() {
		return h.formerly
	}
	h.shown = true
	return h.claim.Owner
}

// confirm asks whether the claim was there when it was passed on. If not, whoever has it
// now has lost it too.
func (h *hold) confirm(ctx context.Context, leg *Leg) error {
	err := h.relay.Confirm(leg, func() error {
		ok, err := h.lock.confirm(ctx, &h.claim)
		if ok {
			return nil
		}
		return h.releaseError(Released{State: NotHeld}, err)
	})
	lost := (*lock.LostError)(nil)
	if !errors.As(err, &lost) {
		return err
	}
	for _, a := range h.lock.s.Queues.Holders(h.lock.queueKey()) {
		if other := a.(*hold); other.isOf(h.claim.Owner) {
			other.Lost(lock.ReasonGone, nil)
		}
	}
	mine := *lost
	mine.Owner = h.owner()
	return &mine
}

// finish is release for the last who has the claim.
func (h *hold) finish(ctx context.Context, heirs []*queue.Waiter) error {
	return h.relay.Finish(func() error { return h.release(ctx, heirs, false) })
}

// free releases the claim, and tells nobody in this process.
func (h *hold) free(ctx context.Context) error {
	return h.releaseError(h.lock.release(ctx, &h.claim, false))
}

// end ends the hold here, which leaves its release, or returns why there is none.
func (h *hold) end() error {
	// A named owner may have taken the lock again the moment this lease was over:
	// what the server has then is not this hold's to release.
	h.lease.Check()
	h.mu.Lock()
	switch h.state {
	case held:
		h.state = ended
		h.endContext(nil) // before anybody else can have the lock
		h.mu.Unlock()
		h.lease.Forget()
		return nil
	case lost:
		h.state = ended
		err := h.lost
		h.mu.Unlock()
		// Should the server still keep it.
		h.lock.s.Go(func(ctx context.Context) { _ = h.relay.Finish(func() error { return h.free(ctx) }) })
		return err
	default:
		h.mu.Unlock()
		return fmt.Errorf("%w: Unlock %q", lock.ErrNotHeld, h.lock.name)
	}
}

// release passes the lock on to the next waiters of this process, the heirs, or frees
// it if there are none. With maybe set an earlier request may have freed it. What it
// returns is about this hold alone.
func (h *hold) release(ctx context.Context, heirs []*queue.Waiter, maybe bool) error {
	key := h.lock.queueKey()
	from := h // who holds the lock on the server, and is done with it
	passedOn := false
	for heirs != nil {
		to := make([]*Claim, len(heirs))
		for i, w := range heirs {
			to[i] = &w.Acquirer().(*hold).claim
		}
		sent := time.Now()
		reqCtx, cancel := h.lock.s.Bounded(ctx)
		passed, err := from.lock.p.HandOff(reqCtx, &from.claim, to)
		cancel()
		if err == nil && passed.Acquired {
			if from = h.passTo(ctx, heirs, sent, passed.Answer); from == nil {
				return nil
			}
			// To others, in the name of one who has left.
			heirs = h.lock.s.Queues.Successors(key, !from.named)
			continue
		}
		lost := err != nil && wire.OutcomeOf(err) == wire.Unknown
		if lost {
			passedOn = true // perhaps
			for _, w := range heirs {
				w.Acquirer().(*hold).doubted()
			}
		}
		for _, left := range h.lock.s.Queues.Return(heirs) {
			if lost {
				left.(*hold).Abandon()
			}
		}
		if err == nil && passed.State != NotHeld {
			h.lock.s.Queues.Released(key, h, queue.Release{
				Told: passed.Told, Kept: passed.State == StillHeld, Elsewhere: h.lock.p.Traits().Ordered,
			})
			return nil
		}
		break
	}

	if h.lock.p.Traits().Polled {
		from.claim.LeftOpen = h.lock.s.Queues.LeavesOpen(key)
	}
	released, err := from.lock.release(ctx, &from.claim, maybe)
	h.told = int32(released.Told)
	h.lock.s.Queues.Released(key, h, queue.Release{Told: released.Told, Kept: released.State == StillHeld})
	if from != h || passedOn && err == nil {
		return nil // what became of the lock after this hold is not its business
	}
	return h.releaseError(released, err)
}

// releaseError returns what a release that found that, or failed, says of the hold.
func (h *hold) releaseError(released Released, err error) error {
	switch {
	case err == nil && released.State == NotHeld:
		return h.lostError(lock.ReasonGone, nil)
	case wire.IsWrongType(err):
		return h.lostError(lock.ReasonGone, err) // whatever is there now is not this lock
	case err != nil:
		return fmt.Errorf("redlatch: unlock %q: %w", h.lock.name, err)
	}
	return nil
}

// passTo makes the heirs holders of what the server has passed on to them. It
// returns one who has left in whose name it is to be passed on or released, or
// nil.
func (h *hold) passTo(ctx context.Context, heirs []*queue.Waiter, sent time.Time, a Answer) *hold {
	for _, w := range heirs {
		w.Acquirer().(*hold).inherit(sent, a)
	}
	h.span.HandOff(ctx)
	gave := h.lock.s.Queues.Grant(heirs, h)
	if len(gave) == 1 && len(heirs) == 1 {
		return gave[0].(*hold)
	}
	for _, left := range gave {
		left.(*hold).Abandon()
	}
	if len(gave) == len(heirs) {
		h.lock.s.Queues.Released(h.lock.queueKey(), h, queue.Release{Kept: true})
	}
	return nil
}

// inherit notes that a hand-off to the claim has succeeded.
func (h *hold) inherit(sent time.Time, a Answer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.acquired(sent, a)
}

// doubted is doubt for a claim that somebody else has made a request for.
func (h *hold) doubted() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.doubt()
}

// handle is what the caller holds.
type handle struct{ h *hold }

func newHandle(h *hold, site callsite.Site) *handle {
	h.site = site
	hd := &handle{h: h}
	runtime.SetFinalizer(hd, (*handle).dropped) // a cleanup would be two more allocations
	return hd
}

// givenBack is called when the hold is unlocked: it will not be dropped.
func (hd *handle) givenBack() { runtime.SetFinalizer(hd, nil) }

// dropped runs when nobody refers to the handle any more. The finalizers of a process
// wait for each other, so it leaves what may block to others.
func (hd *handle) dropped() {
	h := hd.h
	h.mu.Lock()
	state := h.state
	h.mu.Unlock()
	if state != held {
		return
	}
	h.lock.s.Go(func(ctx context.Context) {
		h.lock.s.Logger.Error("redlatch: a hold was dropped without Unlock; releasing it",
			"name", h.lock.name, "kind", h.lock.p.Traits().Kind, "owner", h.owner().String(), "acquired", h.site.String())
		_ = h.unlock(ctx)
	})
}

func (hd *handle) Name() string             { return hd.h.lock.name }
func (hd *handle) Owner() lock.Owner        { return hd.h.owner() }
func (hd *handle) Token() int64             { return hd.h.token }
func (hd *handle) Context() context.Context { return hd.h.context() }

func (hd *handle) Remaining() time.Duration {
	d := hd.h.lease.Remaining()
	runtime.KeepAlive(hd)
	return d
}

func (hd *handle) Extend(ctx context.Context, lease time.Duration) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	err := hd.h.extend(ctx, lease)
	runtime.KeepAlive(hd)
	return err
}

func (hd *handle) Unlock(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	hd.givenBack()
	err := hd.h.unlock(ctx)
	runtime.KeepAlive(hd)
	return err
}
