package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// memberWait is the least time that a caller waits for a member while it holds others, if
	// their order is not certain. The longest is twice as long. Both double with each round, up
	// to maxDoublings times: a member may have more waiters than that leaves time for.
	memberWait   = 5 * time.Second
	maxDoublings = 6
	// maxPause is the longest pause before the acquisition starts over.
	maxPause = 50 * time.Millisecond
	// maxUndo bounds how long a failed acquisition waits for the release of its members while
	// its wait is not over.
	maxUndo = time.Second
)

// errRestart has the acquisition start over.
var errRestart = errors.New("held by others; meanwhile the other members were released")

// errBlocked is returned by an attempt that ends at a member that others hold.
var errBlocked = errors.New("held by others")

func (m *Multi) acquire(ctx context.Context, o lock.Options, once bool) (_ *multiHold, err error) {
	if err := m.check(ctx); err != nil {
		return nil, err
	}
	if o.MaxWaiters > 0 {
		return nil, m.object().Refused("acquire",
			fmt.Errorf("%w: MaxWaiters: the members of a multi-lock have their own waiters", lock.ErrInvalid))
	}

	a := acquisition{o: o, once: once, began: time.Now()}
	a.round = a.began
	spanCtx, span := m.s.Telemetry.StartAcquire(ctx, m.info)
	defer func() {
		err = m.failed(ctx, "acquire", a.began, err)
		span.End(ctx, 1+a.restarts, a.waited || a.restarts > 0 || errors.Is(err, lock.ErrNotAcquired), err)
	}()
	err = m.takeFree(spanCtx, &a)
	if err == nil && spanCtx.Err() == nil {
		return m.begin(ctx, o, a.got), nil
	}

	panicked := true // in a Backoff of a member
	defer func() {
		if panicked {
			_ = m.undo(spanCtx, a.got)
		}
	}()
	h, err := m.wait(ctx, spanCtx, &a, err)
	panicked = false
	return h, err
}

// takeFree acquires all members with one script if they are of the client of m, in one slot, and
// free. In any other case wait goes on.
func (m *Multi) takeFree(ctx context.Context, a *acquisition) error {
	if n := len(m.members); n == 1 || !m.onlyLocks() || !m.local() || engine.Together(ctx, m.locks) < n {
		return errBlocked
	}

	ctx, cancel := a.bounded(ctx)
	defer cancel()

	if err := a.takeTogether(ctx, m.locks); err != nil {
		return err
	}

	return a.align(ctx)
}

// wait acquires the members after takeFree has returned err.
func (m *Multi) wait(ctx, spanCtx context.Context, a *acquisition, err error) (*multiHold, error) {
	openCtx, cancel := context.WithCancelCause(spanCtx)
	defer cancel(nil)

	for _, client := range m.clients() { // keeps them open
		leave, open := client.Join(func() { cancel(lock.ErrClosed) })
		if !open {
			return nil, errors.Join(lock.ErrClosed, m.undo(spanCtx, a.got))
		}
		defer leave()
	}
	waitCtx, stop := a.bounded(openCtx)
	defer stop()

	for {
		if err == errBlocked {
			err = m.take(waitCtx, a)
		}
		if err == nil && openCtx.Err() == nil {
			return m.begin(ctx, a.o, a.got), nil
		}
		undoErr := m.undo(waitCtx, a.got)
		a.got = nil
		if errors.Is(err, errRestart) && !a.once {
			a.waited = false
			a.restarts++
			select {
			case <-time.After(rand.N(maxPause)):
				err = errBlocked
				continue
			case <-waitCtx.Done():
			}
		}
		cause := context.Cause(waitCtx)
		if errors.Is(cause, lock.ErrClosed) {
			err = cause
		} else if cause != nil || errors.Is(err, errRestart) {
			err = errors.Join(lock.ErrNotAcquired, err)
		}
		return nil, errors.Join(err, undoErr)
	}
}

// clients returns the clients of the members, and the client of m.
func (m *Multi) clients() (all []interface {
	Join(onClose func()) (leave func(), open bool)
}) {
	all = append(all, m.s)
	for _, s := range m.sessions {
		all = append(all, s)
	}
	for _, l := range m.stores {
		all = append(all, l)
	}
	return all
}

// undo releases the members that a failed acquisition holds.
func (m *Multi) undo(ctx context.Context, holds []engine.GroupHold) error {
	release := func() error {
		errs := engine.GiveBack(context.WithoutCancel(ctx), holds)
		return errors.Join(slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, lock.ErrLost) })...)
	}

	// Not errors.Is: the context of the caller may have ended with a lost hold of another client that was closed.
	if context.Cause(ctx) == lock.ErrClosed { // the client of a member is closing and waits for this call
		return release()
	}
	err := m.s.Undo(ctx, maxUndo, release)
	if err == lock.ErrIndeterminate { // it goes on
		err = fmt.Errorf("%w: release %q", err, m.info.Name)
	}
	return err
}

// acquisition is the state of an acquisition.
type acquisition struct {
	o       lock.Options
	once    bool
	began   time.Time
	round   time.Time          // when the current round began
	waited  bool               // in the current round
	blocked bool               // others hold the next member
	certain bool               // the order of the members; see inOrder
	got     []engine.GroupHold // in the current round
	// restarts counts the rounds that ended because a wait took too long, or a member was lost.
	restarts int
	late     int // rounds whose lease was over before the last member was acquired, though none had to be waited for
}

// bounded returns ctx for a request, or a wait, that ends when the wait of the caller does.
func (a *acquisition) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.o.Wait == 0 {
		return ctx, func() {}
	}
	return context.WithDeadlineCause(ctx, a.began.Add(a.o.Wait), lock.ErrNotAcquired)
}

// take acquires the members that takeFree has not. If it fails, those in a.got have to be released;
// the error is errRestart if another round may succeed.
func (m *Multi) take(ctx context.Context, a *acquisition) error {
	a.round = time.Now()
	locks, known := m.inOrder(ctx, a)
	for _, red := range m.reds {
		err := a.await(ctx, func(ctx context.Context) (engine.GroupHold, error) {
			h, err := red.acquire(ctx, lock.Options{Lease: a.o.Lease}, a.once) // MaxHold counts from Align
			a.waited = a.waited || err == nil && h.rounds > 1
			return h, err
		})
		if err != nil {
			return err
		}
		for _, member := range red.members { // a round has identified those that answer
			known[member.Session()] = member.Session().KnownServer()
		}
	}

	for _, l := range m.stores {
		err := a.await(ctx, func(ctx context.Context) (engine.GroupHold, error) {
			h, waited, err := l.Take(ctx, a.o, a.once)
			a.waited = a.waited || waited
			return h, err
		})
		if err != nil {
			return err
		}
	}

	if known != nil {
		if err := m.checkMembers(known); err != nil {
			return err
		}
	}
	for len(a.got) < len(m.members) {
		if err := a.takeNext(ctx, locks[len(a.got)-len(m.reds)-len(m.stores):]); err != nil {
			return err
		}
	}

	return a.align(ctx)
}

// align makes the leases of all members count from the acquisition of the last one.
func (a *acquisition) align(ctx context.Context) error {
	err := engine.Align(ctx, a.got, a.o)
	if err != nil && !errors.Is(err, lock.ErrLost) {
		return err
	}
	if err != nil || slices.ContainsFunc(a.got, func(h engine.GroupHold) bool { return h.Remaining() == 0 }) {
		// Lost, or expired during the wait for others.
		if length := cmp.Or(a.o.Lease, a.o.MaxHold); length > 0 && !a.waited {
			a.late++
			return cmp.Or(engine.Late(a.late, !a.once, length, a.round), errRestart)
		}
		return errRestart
	}

	return nil
}

// takeNext acquires the first of the locks, or with one script as many as are free.
func (a *acquisition) takeNext(ctx context.Context, locks []*engine.Lock) error {
	if n := engine.Together(ctx, locks); n > 1 && !a.blocked && ctx.Err() == nil {
		before := len(a.got)
		if err := a.takeTogether(ctx, locks[:n]); err != errBlocked {
			return err
		}
		locks = locks[len(a.got)-before:]
	}

	a.blocked = false
	return a.await(ctx, func(ctx context.Context) (engine.GroupHold, error) {
		h, err := engine.Take(ctx, locks[0], a.o, a.once)
		a.waited = a.waited || err == nil && h.Waited()
		return h, err
	})
}

// takeTogether acquires the locks with one script. The error is errBlocked if one of them is not
// free: a separate attempt for the first of those waits, or yields the error of the member that the
// server refused.
func (a *acquisition) takeTogether(ctx context.Context, locks []*engine.Lock) error {
	some, err := engine.TakeTogether(ctx, locks, a.o, a.once)
	if a.got == nil {
		a.got = some
	} else {
		a.got = append(a.got, some...)
	}
	if len(some) == len(locks) || errors.Is(err, lock.ErrClosed) || err != nil && ctx.Err() != nil {
		return err
	}
	if a.once && err != nil && !wire.IsRefused(err) {
		return err
	}

	a.waited = !a.once
	a.blocked = true
	return errBlocked
}

// await acquires one member with take. If others are held and the order is not certain, it
// bounds the wait.
func (a *acquisition) await(ctx context.Context, take func(ctx context.Context) (engine.GroupHold, error)) error {
	if !a.once && !a.certain && len(a.got) > 0 {
		var cancel context.CancelFunc
		least := memberWait << min(a.restarts, maxDoublings)
		ctx, cancel = context.WithTimeoutCause(ctx, least+rand.N(least), errRestart)
		defer cancel()
	}

	h, err := take(ctx)
	if err == nil {
		a.got = append(a.got, h)
	}
	return err
}
