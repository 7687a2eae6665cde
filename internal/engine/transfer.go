package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// KeepUntil has the last Unlock of the hold's claim leave the lock held until then. A zero time
// changes nothing.
func (h *Hold) KeepUntil(until time.Time) {
	if until.IsZero() {
		return
	}

	c := h.claim
	c.mu.Lock()
	defer c.mu.Unlock()

	c.noHandOff = true
	if until.After(c.keepUntil) {
		c.keepUntil = until
	}
}

// kept returns until when the lock has to stay held, if that is later than now.
func (c *claim) kept() (until time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	until = c.keepUntil
	return until, time.Until(until) >= time.Millisecond
}

// endsAlone reports whether the release of the claim does more than that: it leaves the lock held, or answers for
// the holds that have passed the claim on.
func (c *claim) endsAlone() bool {
	_, kept := c.kept()
	c.mu.Lock()
	defer c.mu.Unlock()
	return kept || c.cohort != nil
}

// transferTo ends the claim in this process, and leaves the lock to another claim, which no hold has,
// until then. A new id makes a renewal that is under way ineffective. If the server does not answer,
// the request is repeated in the background, and leaves the lock to it until unanswered at most.
func (c *claim) transferTo(ctx context.Context, by time.Time, to lock.Owner, until, unanswered time.Time) error {
	l := c.lock
	found := Missing
	transfer := func(ctx context.Context) (err error) {
		found, err = l.p.Transfer(ctx, &c.Claim, to, max(time.Until(until), time.Millisecond))
		return err
	}
	mayHaveRun, err := l.repeat(ctx, by, transfer)
	if GoesOn(err) {
		if unanswered.Before(until) {
			until = unanswered
		}
		l.s.CleanUp(c.Lease, func(ctx context.Context) (time.Duration, error) { return -1, transfer(ctx) })
	}

	c.repeatRelease()
	if l.kind.Positions != nil {
		passed, _ := c.cohort.pending()
		for _, waiter := range passed {
			l.leaveQueue(Claim{Key: c.Key, ID: waiter})
		}
	}

	l.e.Ended(l.queue, c)

	state := Free
	if err == nil && found == Missing {
		state = NotHeld
		if mayHaveRun { // what an earlier try has left may have expired
			err = errNoReply
		}
	}

	return c.releaseError(Release{State: state}, err)
}

// Detach implements lock.Hold.
func (h *Hold) Detach(ctx context.Context, lease time.Duration) (string, error) {
	c := h.claim
	until := time.Now().Add(lease)
	e, err := h.startUnlock(ctx, detach)
	if err != nil {
		h.releaseAfterLoss(ctx, err)
		return "", err
	}

	if kept, ok := c.kept(); ok && kept.After(until) {
		until = kept
	}
	to := c.lock.s.NewOwner()

	// Adopt may have looked in vain by the time that a late request leaves the lock to nobody, so that
	// must not last longer than the hold would have.
	err = e.done(c.cohort.Release(e.by, func(by time.Time) error { return c.transferTo(e.ctx, by, to, until, e.over) }))
	if err != nil && !GoesOn(err) && !errors.Is(err, lock.ErrClosed) {
		return "", err
	}

	return detachedID(to, c.token), err
}

// detachedID returns the id of a detached hold with that token. It differs from an owner, so that
// nobody adopts what others hold.
func detachedID(owner lock.Owner, token int64) string {
	return owner.String() + tokenSeparator + strconv.FormatInt(token, 10)
}

const tokenSeparator = "#"

func parseDetachedID(id string) (owner lock.Owner, token int64, err error) {
	claim, number, _ := strings.Cut(id, tokenSeparator)
	owner, err = lock.ParseOwner(claim)
	if err == nil {
		token, err = strconv.ParseInt(number, 10, 64)
	}
	if err != nil || token < 0 {
		return lock.Owner{}, 0, fmt.Errorf("%w: %q is not the id of a detached hold", lock.ErrInvalid, id)
	}

	return owner, token, nil
}

// Adopt returns a hold on what Detach has left under that id.
func (l *Lock) Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (lock.Hold, error) {
	o, err := Resolve(l.kind.Shared, opts)
	from, token, idErr := parseDetachedID(id)
	if err := cmp.Or(err, idErr, l.Check(ctx)); err != nil {
		return nil, l.Object().Refused("adopt", err)
	}

	began := time.Now()
	if ctx.Err() != nil {
		return nil, l.failed(ctx, "adopt", began, lock.ErrUnavailable)
	}
	if !l.s.Enter() {
		return nil, l.Object().Refused("adopt", lock.ErrClosed)
	}
	defer l.s.Leave()

	c := new(claim)
	c.init(ctx, l, &o, false)
	c.token = token
	err = lock.ErrNotHeld
	req := Request{Waiting: l.kind.Waiting, Key: l.queue, Acquirer: c, Once: true}
	l.e.Together([]Request{req}, func(int) (acquired int) {
		var found Transferred
		if found, err = c.adopt(ctx, from); err == nil && found == Missing {
			err = errNotDetached
		}
		if err != nil {
			return 0
		}
		return 1
	})
	if err != nil {
		return nil, l.failed(ctx, "adopt", began, err)
	}

	// The lock is adopted, even if ctx has ended meanwhile.
	h, err := c.hold(context.WithoutCancel(ctx), HoldParent(ctx, o))
	if err == errGone {
		err = errNotDetached
	}
	if err != nil {
		return nil, l.failed(ctx, "adopt", began, err)
	}

	h.KeepUntil(KeptUntil(o))
	h.Given(callsite.Of(o.Site))
	return NewHandle(h), nil
}

// errNotDetached is for an id under which Adopt finds nothing.
var errNotDetached = fmt.Errorf("%w: no detached hold has this id", lock.ErrNotHeld)

// adopt has the claim take over what another one has. A request without an answer is repeated until
// ctx ends, and then undone, so that the other claim can be adopted again.
func (c *claim) adopt(ctx context.Context, from lock.Owner) (found Transferred, err error) {
	l := c.lock
	mayHaveRun := false
	detached := c.Claim
	detached.ID = from
	err = l.s.Retry(ctx, time.Now().Add(UnlockTimeout), func(ctx context.Context) (err error) {
		if !mayHaveRun { // else it may find what an earlier try has adopted, with the lease from then
			c.first.sent = time.Now()
		}
		found, err = l.p.Transfer(ctx, &detached, c.ID, c.Lease)
		mayHaveRun = mayHaveRun || wire.IsUnknown(err)
		return err
	}, wire.IsRefused)
	if !mayHaveRun || err == nil && found != Missing {
		return found, err
	}
	if err == nil { // what an earlier try has adopted may have expired
		return Missing, errNoReply
	}

	l.undo(c.Lease, 0, func(ctx context.Context) (bool, error) {
		left := time.Until(c.first.sent.Add(c.Lease))
		back, err := l.p.Transfer(ctx, &c.Claim, from, max(left, time.Millisecond))
		return back == Moved, err // else a late request may move it yet
	})
	return Missing, errors.Join(lock.ErrIndeterminate, err)
}
