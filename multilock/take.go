package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// memberWait is the least time that a caller waits for a member while it holds others.
	// The longest is twice as long.
	memberWait = 5 * time.Second
	// maxPause is the longest pause before the acquisition starts over.
	maxPause = 50 * time.Millisecond
	// maxUndo bounds how long a failed acquisition waits for the release of its members.
	maxUndo = time.Second
)

// errRestart says that the acquisition has to start over.
var errRestart = errors.New("redlatch: members were released during the wait")

func (m *Multi) acquire(ctx context.Context, o lock.Options, once bool) (lock.Hold, error) {
	if err := m.check(ctx); err != nil {
		return nil, err
	}
	a := acquisition{o: o, once: once}
	if o.Bounded && !once {
		a.deadline = time.Now().Add(o.Wait)
	}
	spanCtx, span := m.s.Telemetry.StartAcquire(ctx, m.info)
	// The holds of the members end with the group, and not with the caller's context.
	takeCtx, cancel := context.WithCancelCause(context.WithoutCancel(spanCtx))
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	h, rounds, err := m.acquireUnder(ctx, takeCtx, cancel, &a, stop)
	span.End(ctx, rounds, a.waited || errors.Is(err, lock.ErrNotAcquired), err)
	if err != nil {
		stop()
		cancel(err)
		return nil, err
	}
	return h, nil
}

// acquireUnder acquires the members under takeCtx and keeps the connections of their
// clients open meanwhile. It calls cancel if one of these clients is closed. stop
// detaches takeCtx from ctx.
func (m *Multi) acquireUnder(ctx, takeCtx context.Context, cancel context.CancelCauseFunc, a *acquisition, stop func() bool) (h lock.Hold, rounds int, err error) {
	clients := m.sessions
	if !slices.Contains(clients, m.s) {
		clients = append(slices.Clone(clients), m.s)
	}
	for _, s := range clients {
		leave, open := s.Join(func() { cancel(lock.ErrClosed) })
		if !open {
			return nil, 0, lock.ErrClosed
		}
		defer leave()
	}
	for rounds = 1; ; rounds++ {
		holds, err := m.take(takeCtx, a)
		if err == nil && (!stop() || takeCtx.Err() != nil) {
			err = errors.Join(lock.ErrNotAcquired, cmp.Or(context.Cause(ctx), context.Cause(takeCtx)))
		}
		if err == nil {
			return m.begin(ctx, holds), rounds, nil
		}
		undoErr := m.undo(ctx, holds)
		if errors.Is(err, errRestart) {
			if a.once {
				err = lock.ErrNotAcquired
			} else if err = a.pause(takeCtx); err == nil {
				continue
			}
		}
		return nil, rounds, errors.Join(a.failure(takeCtx, err), undoErr)
	}
}

// undo releases the members that a failed acquisition holds.
func (m *Multi) undo(ctx context.Context, holds []lock.Hold) error {
	if len(holds) == 0 {
		return nil
	}
	var leaves []func()
	for _, s := range m.sessions { // the release may outlast the acquisition
		if leave, open := s.Join(func() {}); open {
			leaves = append(leaves, leave)
		}
	}
	done := make(chan error, 1)
	release := func(context.Context) {
		done <- exceptLost(locking.GiveBack(context.WithoutCancel(ctx), holds))
		for _, leave := range leaves {
			leave()
		}
	}
	if !m.s.Go(release) { // the client is closing and waits for this call
		release(ctx)
	}
	select {
	case err := <-done:
		return err
	case <-time.After(maxUndo):
		return fmt.Errorf("%w: release %q", lock.ErrIndeterminate, m.info.Name)
	}
}

// acquisition is the state that the rounds of one acquisition share.
type acquisition struct {
	o        lock.Options
	once     bool
	deadline time.Time
	waited   bool
}

// left returns the options for the next member.
func (a *acquisition) left() lock.Options {
	o := a.o
	if !a.deadline.IsZero() {
		o.Wait = max(0, time.Until(a.deadline))
	}
	return o
}

// requestContext returns a context for requests that must not outlast the wait.
func (a *acquisition) requestContext(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.deadline.IsZero() {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, a.deadline)
}

// failure returns the error of a failed acquisition. If a request failed because the wait
// was over, the error matches lock.ErrNotAcquired.
func (a *acquisition) failure(ctx context.Context, err error) error {
	switch {
	case errors.Is(context.Cause(ctx), lock.ErrClosed):
		return lock.ErrClosed
	case errors.Is(err, lock.ErrNotAcquired), errors.Is(err, lock.ErrClosed):
		return err
	case ctx.Err() != nil:
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx), err)
	case !a.deadline.IsZero() && !time.Now().Before(a.deadline):
		return errors.Join(lock.ErrNotAcquired, err)
	default:
		return err
	}
}

// pause sleeps before the next round. It returns an error if the wait is over.
func (a *acquisition) pause(ctx context.Context) error {
	a.waited = true
	pause := rand.N(maxPause)
	if !a.deadline.IsZero() {
		pause = min(pause, time.Until(a.deadline))
	}
	select {
	case <-time.After(pause):
	case <-ctx.Done():
		return errors.Join(lock.ErrNotAcquired, context.Cause(ctx))
	}
	if !a.deadline.IsZero() && !time.Now().Before(a.deadline) {
		return lock.ErrNotAcquired
	}
	return nil
}

// take acquires all members. On failure it returns the holds that have to be released; the
// error is errRestart if another round may succeed.
func (m *Multi) take(ctx context.Context, a *acquisition) ([]lock.Hold, error) {
	reqCtx, cancel := a.requestContext(ctx)
	defer cancel()
	all, err := m.inOrder(reqCtx)
	if err != nil {
		return nil, err
	}
	var holds []lock.Hold
	for len(holds) < len(all) {
		if a.once {
			holds, err = tryNext(ctx, holds, all[len(holds):], a)
		} else {
			holds, err = waitNext(ctx, holds, all[len(holds):], a)
		}
		if err != nil {
			return holds, err
		}
	}
	if err := locking.Align(reqCtx, holds, a.o); err != nil {
		if errors.Is(err, lock.ErrLost) {
			err = errRestart
		}
		return holds, err
	}
	for _, h := range holds {
		if h.Remaining() == 0 { // expired during the wait for others
			return holds, errRestart
		}
	}
	return holds, nil
}

// tryNext makes one attempt for the first of the next members, or for a batch of them.
func tryNext(ctx context.Context, holds []lock.Hold, next []ranked, a *acquisition) ([]lock.Hold, error) {
	if locks := batch(ctx, next); locks != nil {
		got, err := locking.TakeTogether(ctx, locks, a.o, true)
		if err == nil && len(got) < len(locks) {
			err = lock.ErrNotAcquired
		}
		if !refused(err) {
			return append(holds, got...), err
		}
		// A separate attempt yields the error of the member that the server refused.
	}
	h, err := next[0].take(ctx, a.o, true)
	if err != nil {
		return holds, err
	}
	return append(holds, h), nil
}

// refused reports whether err is a reply of the server that it would repeat.
func refused(err error) bool {
	reply := (*rueidis.RedisError)(nil)
	return errors.As(err, &reply) && wire.OutcomeOf(reply) == wire.Refused
}

// waitNext acquires as many of the next members as are free, or waits for the first.
func waitNext(ctx context.Context, holds []lock.Hold, next []ranked, a *acquisition) ([]lock.Hold, error) {
	o := a.left()
	if o.Bounded && o.Wait == 0 {
		return holds, lock.ErrNotAcquired
	}
	if locks := batch(ctx, next); locks != nil {
		got, err := locking.TakeTogether(ctx, locks, o, false)
		holds, next = append(holds, got...), next[len(got):]
		if len(got) == len(locks) || errors.Is(err, lock.ErrClosed) || err != nil && ctx.Err() != nil {
			return holds, err
		}
		a.waited = true
		if o = a.left(); o.Bounded && o.Wait == 0 {
			return holds, errors.Join(lock.ErrNotAcquired, err)
		}
	}
	shortened := false
	if len(holds) > 0 {
		if patience := memberWait + rand.N(memberWait); !o.Bounded || o.Wait > patience {
			o.Wait, o.Bounded, shortened = patience, true, true
		}
	}
	h, err := next[0].take(ctx, o, false)
	switch {
	case err == nil:
		a.waited = a.waited || locking.Waited(h)
		return append(holds, h), nil
	case shortened && errors.Is(err, lock.ErrNotAcquired) && ctx.Err() == nil:
		return holds, errRestart
	default:
		return holds, err
	}
}

// take acquires one member.
func (r ranked) take(ctx context.Context, o lock.Options, once bool) (lock.Hold, error) {
	if r.lock != nil {
		return locking.Take(ctx, r.lock, o, once)
	}
	var opts []lock.Option
	if o.Lease > 0 {
		opts = append(opts, lock.Lease(o.Lease))
	}
	if o.MaxHold > 0 {
		opts = append(opts, lock.MaxHold(o.MaxHold))
	}
	if once {
		return r.member.TryLock(ctx, opts...)
	}
	if o.Bounded {
		opts = append(opts, lock.Wait(o.Wait))
	}
	return r.member.Lock(ctx, opts...)
}
