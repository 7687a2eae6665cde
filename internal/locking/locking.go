package locking

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/queue"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Lock is a lock of some kind: a name and a protocol. It is immutable.
type Lock struct {
	s    *session.Session
	p    Protocol
	name string
	key  string
	err  error // of the name
}

// New returns the lock of that name. A bad name is an error of every operation.
func New(s *session.Session, p Protocol, name string) *Lock {
	l := Make(s, p, name)
	return &l
}

// Make is New for a lock that is part of something else.
func Make(s *session.Session, p Protocol, name string) Lock {
	l := Lock{s: s, p: p, name: name}
	l.key, l.err = s.Key(name, wire.CheckName)
	return l
}

// Name is lock.Locker's.
func (l *Lock) Name() string { return l.name }

// Key is the name as it stands on the server.
func (l *Lock) Key() string { return l.key }

// Check returns why no operation on the lock can work, or nil.
func (l *Lock) Check(ctx context.Context) error {
	if l.err != nil {
		return l.err
	}
	return l.s.Check(ctx)
}

// Lock is lock.Locker's.
func (l *Lock) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := lock.Resolve(opts...)
	if err != nil {
		return nil, err
	}
	h, err := l.acquire(ctx, o, o.Bounded && o.Wait == 0, false)
	if err != nil {
		return nil, err
	}
	return newHandle(h, callsite.Here(1, 2)), nil // who has called this, and the user
}

// TryLock is lock.Locker's.
func (l *Lock) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := TryOptions(opts)
	if err != nil {
		return nil, err
	}
	h, err := l.acquire(ctx, o, true, false)
	if err != nil {
		return nil, err
	}
	return newHandle(h, callsite.Here(1, 2)), nil
}

// TryOptions reads the options of a TryLock.
func TryOptions(opts []lock.Option) (lock.Options, error) {
	o, err := lock.Resolve(opts...)
	if err == nil && o.Bounded {
		err = fmt.Errorf("%w: Wait: TryLock does not wait", lock.ErrInvalid)
	}
	return o, err
}

// newHold returns a hold that is to be acquired. One that is part of another is renewed,
// whatever its lease.
func (l *Lock) newHold(ctx context.Context, o lock.Options, part bool) *hold {
	h := &hold{lock: l, maxHold: o.MaxHold, fixed: o.Lease > 0 && !part, part: part}
	traits := l.p.Traits()
	h.claim.Key, h.claim.Lease, h.claim.Kind, h.claim.Single = l.key, o.Lease, traits.Kind, traits.Single
	if o.Lease == 0 {
		h.claim.Lease = l.s.WatchdogTimeout
	}
	h.claim.Owner, h.named = lock.OwnerFrom(ctx)
	h.freshClaim()
	return h
}

func (l *Lock) acquire(ctx context.Context, o lock.Options, once, part bool) (*hold, error) {
	if err := l.Check(ctx); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, errors.Join(lock.ErrNotAcquired, context.Cause(ctx))
	}
	h := l.newHold(ctx, o, part)
	traits := l.p.Traits()
	mayHold := h.named && !traits.Ordered
	// Its first attempt may be out of turn: a place then would be before those whom
	// it has to wait for here, and might keep them out.
	h.claim.Waits = !once && !mayHold
	req := queue.Request{
		Key:       l.queueKey(),
		Acquirer:  h,
		Channel:   l.p.Channel(&h.claim),
		Once:      once,
		MayHold:   mayHold, // who is Ordered tries at once anyway
		NoHandOff: h.named,
		Eager:     traits.Eager,
		Shared:    traits.Shared,
		Group:     (traits.Group || traits.Ordered) && !h.named,
		Ordered:   traits.Ordered,
	}
	if req.Channel == "" || traits.Polled {
		req.Backoff = l.p.Backoff
	}
	if traits.Polled {
		req.LeftOpen = wire.PayloadLeftOpen
	}
	if o.Bounded && !once {
		h.deadline = time.Now().Add(o.Wait)
		req.Deadline = h.deadline
	}

	if !l.s.Enter() {
		return nil, lock.ErrClosed
	}
	defer l.s.Leave()
	spanCtx, span := l.s.Telemetry.StartAcquire(ctx, l.described())
	if l.s.Telemetry != nil { // a method value is an allocation
		req.OnWake = span.Woken
	}
	err := l.s.Queues.Acquire(spanCtx, req)
	if err == nil {
		err = h.begin(ctx)
	} else {
		h.retire()
	}
	attempts, waited := h.effort()
	span.End(ctx, attempts, waited || attempts == 0, err)
	if err != nil {
		return nil, err
	}
	return h, nil
}

// UnlockOwner gives back one hold of the owner that ctx names. It blocks like
// Hold.Unlock and returns the same errors; ErrInvalid if ctx names none.
func (l *Lock) UnlockOwner(ctx context.Context) error {
	if err := l.Check(ctx); err != nil {
		return err
	}
	o, ok := lock.OwnerFrom(ctx)
	if !ok {
		return fmt.Errorf("%w: Unlock %q: the context names no owner (see lock.WithOwner)", lock.ErrInvalid, l.name)
	}
	// A hold of this process ends with its renewal and its context.
	for _, a := range slices.Backward(l.s.Queues.Holders(l.queueKey())) {
		if h := a.(*hold); h.lock.sameKind(l) && h.isOf(o) {
			if err := h.unlock(ctx); !errors.Is(err, lock.ErrNotHeld) {
				return err
			}
		}
	}
	traits := l.p.Traits()
	c := Claim{
		Key: l.key, Kind: traits.Kind, Single: traits.Single, Owner: o, Lease: l.s.WatchdogTimeout,
		Ticket: wire.NewRequestID(), AnyHold: true,
	}
	released, err := l.release(context.WithoutCancel(ctx), &c, false)
	if err == nil && released.State == NotHeld {
		return fmt.Errorf("%w: %q by owner %v", lock.ErrNotHeld, l.name, o)
	}
	return err
}

// Force runs open, which opens the lock by force and reports whether anybody
// held it, and ends the holds of this process and kind that were there before.
func (l *Lock) Force(ctx context.Context, open func() (bool, error)) (bool, error) {
	if err := l.Check(ctx); err != nil {
		return false, err
	}
	before := l.s.Queues.Holders(l.queueKey())
	held, err := open()
	if err != nil {
		return false, fmt.Errorf("redlatch: force unlock %q: %w", l.name, err)
	}
	for _, a := range before {
		// If it was not opened, they may be holds of a writer who also reads.
		if h := a.(*hold); held && h.lock.sameKind(l) {
			h.Lost(lock.ReasonGone, nil)
		}
	}
	l.s.Queues.Wake(l.queueKey())
	return held, nil
}

// Replies of PTTL.
const (
	absent   = -2
	noExpiry = -1
)

// TTL returns after what time the lock will be free if nobody renews or releases
// it: 0 if it is free now, lock.NoExpiry if never.
func (l *Lock) TTL(ctx context.Context) (time.Duration, error) {
	if err := l.Check(ctx); err != nil {
		return 0, err
	}
	ttl, err := wire.Read(ctx, l.s.Client, "PTTL", l.key).AsInt64()
	switch {
	case err != nil:
		return 0, fmt.Errorf("redlatch: look at %q: %w", l.name, err)
	case ttl == absent:
		return 0, nil
	case ttl == noExpiry:
		return lock.NoExpiry, nil
	default:
		return max(time.Duration(ttl)*time.Millisecond, 1), nil // it is there
	}
}

// HoldCount returns how often owner holds the lock.
func (l *Lock) HoldCount(ctx context.Context, owner lock.Owner) (int, error) {
	return l.Count(ctx, owner, owner.String())
}

// Count returns the number in the field of the lock's hash that belongs to owner,
// 0 if there is none.
func (l *Lock) Count(ctx context.Context, owner lock.Owner, field string) (int, error) {
	if err := l.Check(ctx); err != nil {
		return 0, err
	}
	if owner.IsZero() {
		return 0, fmt.Errorf("%w: the zero owner holds nothing", lock.ErrInvalid)
	}
	n, err := wire.Read(ctx, l.s.Client, "HGET", l.key, field).AsInt64()
	if err != nil && !rueidis.IsRedisNil(err) {
		return 0, fmt.Errorf("redlatch: look at %q: %w", l.name, err)
	}
	return int(n), nil
}

func (l *Lock) described() telemetry.Lock {
	return telemetry.Lock{Kind: l.p.Traits().Kind, Name: l.name}
}

// sameKind reports whether other, of the same name, is of the same kind.
func (l *Lock) sameKind(other *Lock) bool { return l.p.Traits().Kind == other.p.Traits().Kind }

func (l *Lock) queueKey() queue.Key {
	return queue.Key{Kind: l.p.Traits().Queue, Name: l.key}
}

const (
	// unlockPatience is for how long a release is tried while the caller waits.
	unlockPatience = 5 * time.Second
	minReleaseWait = 20 * time.Millisecond
	maxReleaseWait = time.Second
)

// release gives a claim's hold back, again and again if the server does not
// answer: it can be repeated. With maybe set an earlier try may have done it. When
// it gives up it leaves the rest to the background, and the error matches
// ErrIndeterminate: even if no try has worked so far, one may at any time.
func (l *Lock) release(ctx context.Context, c *Claim, maybe bool) (Released, error) {
	began := time.Now()
	for pause := minReleaseWait; ; pause = min(2*pause, maxReleaseWait) {
		released, err := l.tryRelease(ctx, c)
		switch {
		case err == nil && released.State == Shared:
			// Somebody has used the owner of this claim as a name since. From
			// here on it is one.
			c.Ticket, c.AnyHold = wire.NewRequestID(), true
			continue
		case err == nil && released.State == NotHeld && maybe && (!c.Named() || c.Single):
			return Released{State: Free, Told: -1}, nil // a ticket would have told
		case err == nil:
			if !maybe { // else that try may arrive yet, and find the ticket
				l.forget(c)
			}
			return released, nil
		case l.s.Err() != nil:
			return Released{}, errors.Join(lock.ErrClosed, err)
		case wire.OutcomeOf(err) == wire.Refused:
			return Released{}, err
		}
		// A Single one of any hold has so far only been looked for.
		maybe = maybe || wire.OutcomeOf(err) == wire.Unknown && !(c.Single && c.AnyHold)
		if time.Since(began)+pause > unlockPatience {
			l.settle(*c, false)
			return Released{}, errors.Join(lock.ErrIndeterminate, err)
		}
		time.Sleep(pause)
	}
}

func (l *Lock) tryRelease(ctx context.Context, c *Claim) (Released, error) {
	ctx, cancel := l.s.Bounded(ctx)
	defer cancel()
	return l.p.Release(ctx, c, false)
}

// confirm reports whether the server has a claim. The claim lasts for its lease from then
// on.
func (l *Lock) confirm(ctx context.Context, c *Claim) (ok bool, err error) {
	err = Insist(l.s, func() (err error) {
		ctx, cancel := l.s.Bounded(ctx)
		defer cancel()
		ok, err = l.p.Extend(ctx, c, c.Lease)
		return err
	}, func(err error) bool { return wire.OutcomeOf(err) == wire.Refused })
	return ok, err
}

// Insist makes a request that can be repeated, again and again if it fails, for as long as a
// release is tried. An error that is final is returned at once.
func Insist(s *session.Session, request func() error, final func(error) bool) error {
	began := time.Now()
	for pause := minReleaseWait; ; pause = min(2*pause, maxReleaseWait) {
		err := request()
		switch {
		case err == nil || final(err):
			return err
		case s.Err() != nil:
			return errors.Join(lock.ErrClosed, err)
		case time.Since(began)+pause > unlockPatience:
			return errors.Join(lock.ErrIndeterminate, err)
		}
		time.Sleep(pause)
	}
}

// forget removes the ticket of a claim of which no request is on its way any
// more: there will be no repetition that needs it.
func (l *Lock) forget(c *Claim) {
	ticket := c.latch()
	if ticket == "" {
		return
	}
	l.s.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, unlockPatience)
		defer cancel()
		// A few tries: should all fail, the ticket expires by itself.
		for range 3 {
			err := l.s.Client.Do(wire.Shared(ctx), l.s.Client.B().Del().Key(ticket).Build()).Error()
			if err == nil || wire.OutcomeOf(err) == wire.Refused {
				return
			}
		}
	})
}

// leave gives up, in the background, the place on the server of a claim that does
// not wait any more, unless others have the same. It is tried for as long as
// somebody may wait for it.
func (l *Lock) leave(c Claim, shared func() bool) {
	places := l.p.(Placed)
	started := l.s.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, l.s.FairWait)
		defer cancel()
		for pause := minReleaseWait; !shared(); pause = min(2*pause, maxReleaseWait) {
			if err := places.Leave(ctx, &c); err == nil || wire.OutcomeOf(err) == wire.Refused {
				return
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
		}
	})
	if !started {
		l.closing(func(ctx context.Context) { _ = places.Leave(ctx, &c) })
	}
}

// closing runs one last request: the client is being closed, and waits for it.
func (l *Lock) closing(request func(ctx context.Context)) {
	ctx, cancel := context.WithTimeout(context.Background(), maxReleaseWait)
	defer cancel()
	request(ctx)
}

// settlePauses are the pauses before each further release of a claim that was
// not there: the request that takes it may still be on its way, on a connection
// that was given up.
var settlePauses = []time.Duration{50 * time.Millisecond, 250 * time.Millisecond, time.Second, 3 * time.Second}

// settleTime is longer than the pauses together: by then an abandoned claim is
// undone, unless the server does not answer.
const settleTime = 10 * time.Second

// settle sees to it, in the background, that a claim with an unknown outcome
// comes to nothing. It stops at the latest when the lease is over. undo is for
// an acquisition, which may even run after the release. It reports whether it does:
// not if the client is being closed.
func (l *Lock) settle(c Claim, undo bool) bool {
	return l.s.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, c.Lease)
		defer cancel()
		misses, pause := 0, minReleaseWait
		for {
			released, err := l.p.Release(ctx, &c, undo)
			switch {
			case err != nil && wire.OutcomeOf(err) == wire.Refused:
				return
			case err != nil:
				pause = min(2*pause, maxReleaseWait)
			case released.State == Shared:
				c.Ticket, c.AnyHold = wire.NewRequestID(), true
				continue
			case released.State != NotHeld, !undo, misses == len(settlePauses):
				return
			default:
				pause = settlePauses[misses]
				misses++
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
		}
	})
}
