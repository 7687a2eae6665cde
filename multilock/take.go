package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
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

var (
	// errRestart says that the acquisition has to start over.
	errRestart = fmt.Errorf("%w: members were released during the wait", lock.ErrNotAcquired)
	errWaited  = errors.New("redlatch: the wait is over")
)

func (m *Multi) acquire(ctx context.Context, o lock.Options, once bool) (_ *multiHold, err error) {
	if err := m.check(ctx); err != nil {
		return nil, err
	}
	a := acquisition{o: o, once: once}
	rounds := 0
	spanCtx, span := m.s.Telemetry.StartAcquire(ctx, m.info)
	defer func() { span.End(ctx, rounds, a.waited || errors.Is(err, lock.ErrNotAcquired), err) }()
	openCtx, cancel := context.WithCancelCause(spanCtx)
	defer cancel(nil)
	for _, s := range slices.Concat(m.sessions, []*session.Session{m.s}) { // keeps them open
		leave, open := s.Join(func() { cancel(lock.ErrClosed) })
		if !open {
			return nil, lock.ErrClosed
		}
		defer leave()
	}
	waitCtx := openCtx
	if o.Wait > 0 {
		var stop context.CancelFunc
		waitCtx, stop = context.WithTimeoutCause(openCtx, o.Wait, errWaited)
		defer stop()
	}
	for {
		rounds++
		err := m.take(waitCtx, &a)
		if err == nil && openCtx.Err() == nil {
			return m.begin(ctx, a.got), nil
		}
		undoErr := m.undo(ctx, a.got)
		if errors.Is(err, errRestart) && !once {
			a.waited = true
			select {
			case <-time.After(rand.N(maxPause)):
				continue
			case <-waitCtx.Done():
				err = nil
			}
		}
		switch cause := context.Cause(waitCtx); {
		case errors.Is(cause, lock.ErrClosed):
			err = cause
		case cause != nil && !errors.Is(err, lock.ErrNotAcquired) && !errors.Is(err, lock.ErrClosed):
			err = errors.Join(lock.ErrNotAcquired, cause, err)
		}
		return nil, errors.Join(err, undoErr)
	}
}

// undo releases the members that a failed acquisition holds.
func (m *Multi) undo(ctx context.Context, holds []locking.GroupHold) error {
	if len(holds) == 0 {
		return nil
	}
	done := make(chan error, 1)
	release := func(context.Context) {
		errs := locking.GiveBack(context.WithoutCancel(ctx), holds)
		done <- errors.Join(slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, lock.ErrLost) })...)
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

// acquisition is the state of an acquisition.
type acquisition struct {
	o       lock.Options
	once    bool
	waited  bool
	certain bool                // the order of the members; see inOrder
	got     []locking.GroupHold // in the current round
}

// take acquires all members. If it fails, those in a.got have to be released; the error is
// errRestart if another round may succeed.
func (m *Multi) take(ctx context.Context, a *acquisition) error {
	a.got = nil
	locks, certain, err := m.inOrder(ctx)
	if err != nil {
		return err
	}
	a.certain = certain
	for _, red := range m.reds {
		err := a.await(ctx, func(ctx context.Context) (locking.GroupHold, error) {
			return red.acquire(ctx, lock.Options{Lease: a.o.Lease}, a.once) // MaxHold counts from Align
		})
		if err != nil {
			return err
		}
	}
	for len(a.got) < len(m.members) {
		if err := a.takeNext(ctx, locks[len(a.got)-len(m.reds):]); err != nil {
			return err
		}
	}
	switch err := locking.Align(ctx, a.got, a.o); {
	case err != nil && !errors.Is(err, lock.ErrLost):
		return err
	case err != nil, slices.ContainsFunc(a.got, func(h locking.GroupHold) bool { return h.Remaining() == 0 }):
		return errRestart // lost, or expired during the wait for others
	}
	return nil
}

// takeNext acquires the first of the locks, or with one script as many as are free.
func (a *acquisition) takeNext(ctx context.Context, locks []*locking.Lock) error {
	if n := locking.Together(ctx, locks); n > 1 && ctx.Err() == nil {
		some, err := locking.TakeTogether(ctx, locks[:n], a.o, a.once)
		a.got = append(a.got, some...)
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
	return a.await(ctx, func(ctx context.Context) (locking.GroupHold, error) {
		h, err := locking.Take(ctx, locks[0], a.o, a.once)
		a.waited = a.waited || err == nil && h.Waited()
		return h, err
	})
}

// await acquires one member with take. If others are held and the order is not certain, it
// bounds the wait.
func (a *acquisition) await(ctx context.Context, take func(ctx context.Context) (locking.GroupHold, error)) error {
	if !a.once && !a.certain && len(a.got) > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, memberWait+rand.N(memberWait), errRestart)
		defer cancel()
	}
	h, err := take(ctx)
	if err == nil {
		a.got = append(a.got, h)
	}
	return err
}

// refused reports whether err is a reply of the server that it would repeat.
func refused(err error) bool {
	reply := (*rueidis.RedisError)(nil)
	return errors.As(err, &reply) && wire.OutcomeOf(reply) == wire.Refused
}

// servers are the servers of clients, as far as they are known.
type servers map[*session.Session]session.Server

// sort returns the locks in the order in which every Multi acquires them: by server, slot and
// key. Unknown servers come first.
func (known servers) sort(locks []*locking.Lock) []*locking.Lock {
	return slices.SortedStableFunc(slices.Values(locks), func(a, b *locking.Lock) int {
		at, bt := known[a.Session()], known[b.Session()]
		return cmp.Or(cmp.Compare(at.ID, bt.ID), cmp.Compare(at.Database, bt.Database),
			cmp.Compare(a.Slot(), b.Slot()), cmp.Compare(a.Key(), b.Key()))
	})
}

// same reports whether two locks are known to be the same.
func (known servers) same(a, b *locking.Lock) bool {
	server := known[a.Session()]
	return a.Key() == b.Key() && (a.Session() == b.Session() || server == known[b.Session()] && server.ID != "")
}

// checkDuplicates returns an error with that problem if two members are the same.
func checkDuplicates[M interface{ Name() string }](members []M, same func(a, b M) bool, problem string) error {
	for i, m := range members {
		if slices.ContainsFunc(members[:i], func(other M) bool { return same(m, other) }) {
			return fmt.Errorf("%w: %s %q (number %d)", lock.ErrInvalid, problem, m.Name(), i+1)
		}
	}
	return nil
}

// inOrder returns the locks in order, and whether that order is certain: then a caller may
// wait for one of them however long it holds others. It identifies the servers if there are
// several clients.
//
// It is certain for the locks of one server. The order of several depends on their identities,
// about which clients can disagree: one may not have noticed yet that a server was restarted,
// or may not be permitted to see its run id. A Redlock has several servers.
func (m *Multi) inOrder(ctx context.Context) (locks []*locking.Lock, certain bool, err error) {
	certain = len(m.reds) == 0
	if len(m.sessions) < 2 {
		return m.locks, certain, nil
	}
	answers := make([]session.Server, len(m.sessions))
	var pending sync.WaitGroup
	for i, s := range m.sessions {
		// The error is ignored: the rank of a server that does not respond matters little,
		// because its members cannot be acquired either.
		pending.Go(func() { answers[i], _ = s.Server(ctx) })
	}
	pending.Wait()
	known := make(servers)
	for i, s := range m.sessions {
		known[s] = answers[i]
		certain = certain && answers[i].ID != "" && answers[i] == answers[0]
	}
	locks = known.sort(m.locks)
	return locks, certain, checkDuplicates(locks, known.same, duplicate)
}
