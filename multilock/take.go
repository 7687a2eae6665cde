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
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// memberWait is the least time that a caller waits for a member while it holds others, if
	// their order is not certain. The longest is twice as long.
	memberWait = 5 * time.Second
	// maxPause is the longest pause before the acquisition starts over.
	maxPause = 50 * time.Millisecond
	// maxUndo bounds how long a failed acquisition waits for the release of its members.
	maxUndo = time.Second
)

// errRestart says that the acquisition has to start over.
var errRestart = errors.New("redlatch: members were released during the wait")

func (m *Multi) acquire(ctx context.Context, o lock.Options, once bool) (_ lock.Hold, err error) {
	if err := m.check(ctx); err != nil {
		return nil, err
	}
	a := acquisition{o: o, once: once}
	if o.Bounded && !once {
		a.deadline = time.Now().Add(o.Wait)
	}
	rounds := 0
	spanCtx, span := m.s.Telemetry.StartAcquire(ctx, m.info)
	// The holds of the members end with the group, and not with the caller's context.
	takeCtx, cancel := context.WithCancelCause(context.WithoutCancel(spanCtx))
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	defer func() {
		span.End(ctx, rounds, a.waited || errors.Is(err, lock.ErrNotAcquired), err)
		if err != nil {
			stop()
			cancel(err)
		}
	}()
	for _, s := range slices.Concat(m.sessions, []*session.Session{m.s}) { // keeps them open
		leave, open := s.Join(func() { cancel(lock.ErrClosed) })
		if !open {
			return nil, lock.ErrClosed
		}
		defer leave()
	}
	for {
		rounds++
		holds, err := m.take(takeCtx, &a)
		if err == nil && (!stop() || takeCtx.Err() != nil) {
			err = errors.Join(lock.ErrNotAcquired, cmp.Or(context.Cause(ctx), context.Cause(takeCtx)))
		}
		if err == nil {
			return m.begin(ctx, holds), nil
		}
		undoErr := m.undo(ctx, holds)
		if errors.Is(err, errRestart) {
			if a.once {
				err = lock.ErrNotAcquired
			} else if err = a.pause(takeCtx); err == nil {
				continue
			}
		}
		return nil, errors.Join(a.failure(takeCtx, err), undoErr)
	}
}

// undo releases the members that a failed acquisition holds.
func (m *Multi) undo(ctx context.Context, holds memberHolds) error {
	if len(holds.reds)+len(holds.locks) == 0 {
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
		done <- exceptLost(holds.release(context.WithoutCancel(ctx), locking.GiveBack))
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
	certain  bool // the order of the members; see inOrder
}

// over reports whether the wait is over.
func (a *acquisition) over() bool { return !a.deadline.IsZero() && !time.Now().Before(a.deadline) }

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
	case a.over():
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
	if a.over() {
		return lock.ErrNotAcquired
	}
	return nil
}

// take acquires all members. On failure it returns the holds that have to be released; the
// error is errRestart if another round may succeed.
func (m *Multi) take(ctx context.Context, a *acquisition) (got memberHolds, err error) {
	reqCtx, cancel := a.requestContext(ctx)
	defer cancel()
	var locks []*locking.Lock
	if locks, a.certain, err = m.inOrder(reqCtx); err != nil {
		return got, err
	}
	for _, red := range m.reds {
		err := a.await(ctx, got, func(o lock.Options) error {
			h, err := red.acquire(ctx, o, a.once)
			if err == nil {
				got.reds = append(got.reds, h)
			}
			return err
		})
		if err != nil {
			return got, err
		}
	}
	for len(got.locks) < len(locks) {
		if err := a.takeNext(ctx, &got, locks[len(got.locks):]); err != nil {
			return got, err
		}
	}
	errs := []error{locking.Align(reqCtx, got.locks, a.o)}
	if a.o.Lease > 0 {
		errs = append(errs, got.extendReds(reqCtx, a.o.Lease)...)
	}
	switch err := errors.Join(errs...); {
	case err != nil && !errors.Is(err, lock.ErrLost):
		return got, err
	case err != nil, got.remaining() == 0: // lost, or expired during the wait for others
		return got, errRestart
	}
	return got, nil
}

// takeNext acquires the first of the locks, or with one script as many as are free.
func (a *acquisition) takeNext(ctx context.Context, got *memberHolds, locks []*locking.Lock) error {
	if a.over() {
		return lock.ErrNotAcquired
	}
	if n := locking.Together(ctx, locks); n > 1 {
		some, err := locking.TakeTogether(ctx, locks[:n], a.left(), a.once)
		got.locks = append(got.locks, some...)
		switch {
		case len(some) == n, errors.Is(err, lock.ErrClosed), err != nil && ctx.Err() != nil:
			return err
		case a.once && err == nil:
			return lock.ErrNotAcquired
		case a.once && !refused(err):
			return err
		}
		// A separate attempt waits, or yields the error of the member that the server refused.
		locks = locks[len(some):]
		a.waited = !a.once
	}
	return a.await(ctx, *got, func(o lock.Options) error {
		h, err := locking.Take(ctx, locks[0], o, a.once)
		if err == nil {
			a.waited = a.waited || h.Waited()
			got.locks = append(got.locks, h)
		}
		return err
	})
}

// await acquires one member with take. If others are held and the order is not certain, it
// bounds the wait.
func (a *acquisition) await(ctx context.Context, got memberHolds, take func(o lock.Options) error) error {
	if a.over() {
		return lock.ErrNotAcquired
	}
	o, shortened := a.left(), false
	if !a.once && !a.certain && len(got.reds)+len(got.locks) > 0 {
		if patience := memberWait + rand.N(memberWait); !o.Bounded || o.Wait > patience {
			o.Wait, o.Bounded, shortened = patience, true, true
		}
	}
	err := take(o)
	if shortened && errors.Is(err, lock.ErrNotAcquired) && ctx.Err() == nil {
		return errRestart
	}
	return err
}

// refused reports whether err is a reply of the server that it would repeat.
func refused(err error) bool {
	reply := (*rueidis.RedisError)(nil)
	return errors.As(err, &reply) && wire.OutcomeOf(reply) == wire.Refused
}
