package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/construct"
	"github.com/redlatch/redlatch/internal/hold"
	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

func init() { construct.Provide(newMulti) }

// Multi is several locks acquired as one. Client.MultiLock creates it.
type Multi struct {
	group
	members  []lock.Locker
	reds     []*Red             // those of the members that are Redlocks, by name
	locks    []*locking.Lock    // the others, in order as far as it is known without asking
	sessions []*session.Session // of locks
}

// newMulti returns a lock that holds all members. The members of a Multi replace it.
func newMulti(s *session.Session, members ...lock.Locker) *Multi {
	m := &Multi{}
	var bad error
	for _, member := range members {
		if multi, ok := member.(*Multi); ok && multi != nil {
			m.members, bad = append(m.members, multi.members...), cmp.Or(bad, multi.err)
		} else {
			m.members = append(m.members, member)
		}
	}
	var names []string
	var on []hold.On
	for i, member := range m.members {
		if red, _ := member.(*Red); red != nil {
			m.reds, on = append(m.reds, red), append(on, red.on...)
		} else if l, err := find("multi", i, member); err != nil {
			bad = cmp.Or(bad, err)
			continue
		} else {
			m.locks, on = append(m.locks, l), append(on, l.On())
			if !slices.Contains(m.sessions, l.Session()) {
				m.sessions = append(m.sessions, l.Session())
			}
		}
		names = append(names, member.Name())
	}
	slices.SortStableFunc(m.reds, func(a, b *Red) int { return cmp.Compare(a.Name(), b.Name()) })
	m.locks = servers(nil).sort(m.locks)
	bad = cmp.Or(bad, checkDuplicates(m.locks, servers(nil).same, duplicate),
		checkDuplicates(m.reds, func(a, b *Red) bool { return a.key == b.key }, duplicate))
	m.group = newGroup(s, "multi", names, on, bad)
	m.reads = slices.ContainsFunc(m.locks, func(l *locking.Lock) bool { return l.Traits().Shared }) ||
		slices.ContainsFunc(m.reds, func(r *Red) bool { return r.reads })
	return m
}

// Name returns the names of the members, separated by commas.
func (m *Multi) Name() string { return m.info.Name }

// Lock acquires all members, one after the other. It waits until it holds them all, ctx is
// done, or lock.Wait runs out. On failure it holds no member. See lock.Locker for its
// errors. lock.MaxWaiters is not a valid option. If m has no members, a duplicate, or a member that is nil or a type of another
// module, the error matches lock.ErrInvalid.
//
// The leases of all members, and lock.MaxHold, count from the acquisition of the last one.
// Members that are a Red are acquired first, with the lease as given; if the wait for
// another member exceeds that lease, Lock acquires them again.
//
// When any member is lost, the hold's context ends. The other members are not renewed any
// more; they are held until Unlock, or until their leases end. The hold's Owner is the owner
// in ctx, or zero: each member has its own owner. The hold has no fencing token.
func (m *Multi) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return open(ctx, &m.group, opts, false, m.acquire)
}

// TryLock makes one attempt for each member and does not wait. If a member is held by
// another owner, TryLock releases the others and returns an error that matches
// lock.ErrNotAcquired. See Lock.
func (m *Multi) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return open(ctx, &m.group, opts, true, m.acquire)
}

// Do runs fn while it holds all members. See lock.Locker.
func (m *Multi) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, m, fn, opts...)
}

// checkOwner returns an error if the members do not record their owners.
func (m *Multi) checkOwner() error {
	if m.err == nil && len(m.reds) > 0 {
		return fmt.Errorf("%w: the Redlock %q does not record its owners", lock.ErrUnsupported, m.reds[0].Name())
	}
	return m.err
}

// Unlock ends the latest hold that the owner in ctx (see lock.WithOwner) has in this process
// through a Multi with the same members. It blocks like Hold.Unlock. The error matches
// lock.ErrInvalid if ctx has no owner, lock.ErrNotHeld if the owner has no such hold, and
// lock.ErrUnsupported if a member is a Red. Other errors are those of Hold.Unlock.
func (m *Multi) Unlock(ctx context.Context) error {
	if err := cmp.Or(m.checkOwner(), m.s.Check(ctx)); err != nil {
		return err
	}
	owner, ok := lock.OwnerFrom(ctx)
	if !ok {
		return locking.ErrNoOwner(m.info.Name)
	}
	for _, g := range slices.Backward(m.locks[0].Groups(owner)) {
		if h := g.(*multiHold); len(h.m.reds) == 0 && slices.EqualFunc(h.m.locks, m.locks, servers(nil).same) {
			if err := h.Unlock(ctx); !errors.Is(err, lock.ErrNotHeld) {
				return err
			}
		}
	}
	return fmt.Errorf("%w: %q by owner %v", lock.ErrNotHeld, m.info.Name, owner)
}

// IsHeldBy reports whether owner holds all members. It blocks for one round trip for each
// member. If a member is a Red, the error matches lock.ErrUnsupported.
func (m *Multi) IsHeldBy(ctx context.Context, owner lock.Owner) (held bool, err error) {
	if err := m.checkOwner(); err != nil {
		return false, err
	}
	for _, member := range slices.Backward(m.members) {
		l := member.(interface {
			IsHeldBy(ctx context.Context, owner lock.Owner) (bool, error)
		})
		if held, err = l.IsHeldBy(ctx, owner); err != nil || !held {
			return false, err
		}
	}
	return true, nil
}

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

func (m *Multi) acquire(ctx context.Context, o lock.Options, once bool) (_ *multiHold, err error) {
	if err := m.check(ctx); err != nil {
		return nil, err
	}
	if o.MaxWaiters > 0 {
		return nil, fmt.Errorf("%w: MaxWaiters: the members of a multi-lock have their own waiters", lock.ErrInvalid)
	}
	a := acquisition{o: o, once: once}
	rounds, began := 0, time.Now()
	spanCtx, span := m.s.Telemetry.StartAcquire(ctx, m.info)
	defer func() {
		err = m.failed(ctx, "acquire", began, err)
		span.End(ctx, rounds, a.waited || errors.Is(err, lock.ErrNotAcquired), err)
	}()
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
		waitCtx, stop = context.WithTimeoutCause(openCtx, o.Wait, lock.ErrNotAcquired)
		defer stop()
	}
	for {
		rounds++
		err := m.take(waitCtx, &a)
		if err == nil && openCtx.Err() == nil {
			return m.begin(ctx, o, a.got), nil
		}
		undoErr := m.undo(waitCtx, a.got)
		if errors.Is(err, errRestart) && !once {
			a.waited = true
			a.restarts++
			select {
			case <-time.After(rand.N(maxPause)):
				continue
			case <-waitCtx.Done():
			}
		}
		switch cause := context.Cause(waitCtx); {
		case errors.Is(cause, lock.ErrClosed):
			err = cause
		case cause != nil, errors.Is(err, errRestart):
			err = errors.Join(lock.ErrNotAcquired, err)
		}
		return nil, errors.Join(err, undoErr)
	}
}

// undo releases the members that a failed acquisition holds.
func (m *Multi) undo(ctx context.Context, holds []locking.GroupHold) error {
	err := m.s.Undo(ctx, maxUndo, func() error {
		errs := locking.GiveBack(context.WithoutCancel(ctx), holds)
		return errors.Join(slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, lock.ErrLost) })...)
	})
	if err == lock.ErrIndeterminate { // it goes on
		err = fmt.Errorf("%w: release %q", err, m.info.Name)
	}
	return err
}

// acquisition is the state of an acquisition.
type acquisition struct {
	o       lock.Options
	once    bool
	waited  bool
	certain bool                // the order of the members; see inOrder
	got     []locking.GroupHold // in the current round
	// restarts counts the rounds that ended because a wait took too long, or a member was lost.
	restarts int
}

// take acquires all members. If it fails, those in a.got have to be released; the error is
// errRestart if another round may succeed.
func (m *Multi) take(ctx context.Context, a *acquisition) error {
	a.got = nil
	locks, err := m.inOrder(ctx, a)
	if err != nil {
		return err
	}
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
		case a.once && !wire.IsRefused(err):
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

// multiHold is a hold on all members.
type multiHold struct {
	groupHold
	m     *Multi
	holds []locking.GroupHold
	stop  func() bool // detaches the hold from its client
}

func (m *Multi) begin(ctx context.Context, o lock.Options, holds []locking.GroupHold) *multiHold {
	owner, _ := lock.OwnerFrom(ctx)
	h := &multiHold{groupHold: groupHold{group: &m.group, owner: owner, fixed: o.Lease > 0}, m: m, holds: holds}
	h.groupHold.begin(o.HoldParent(ctx))
	session.Of[multis](m.s).Store(h, nil)
	h.stop = m.s.OnClose(func() { h.end(h.loss(lock.ReasonClosed, nil)) })
	for _, member := range holds {
		member.Watch(h, member.Name())
	}
	return h
}

// multis are the holds of one client. Their members may belong to other clients.
type multis struct{ sync.Map }

// Holds yields them. Those that are lost are only waited for as members.
func (m *multis) Holds() iter.Seq[session.Hold] {
	return func(yield func(session.Hold) bool) {
		for key := range m.Range {
			h := key.(*multiHold)
			listed := h.described()
			listed.Remaining = h.Remaining()
			if listed = h.Listed(listed); !listed.Site.IsZero() && !yield(listed) {
				return
			}
		}
	}
}

// Context implements lock.Hold.
func (h *multiHold) Context() context.Context { return h.ContextOf(h) }

// Dropped implements hold.Hold.
func (h *multiHold) Dropped() {
	h.dropped(h.Unlock, func() {
		for _, member := range h.holds {
			member.Disown()
		}
	})
}

// MemberEnded implements hold.Group: a member was lost. The work under the hold may not have
// stopped yet, so the other members stay held until Unlock, or until their leases end.
func (h *multiHold) MemberEnded(cause *lock.LostError) {
	if h.end(cause) {
		h.forget()
	}
}

// end ends the hold as lost, and reports whether it was held.
func (h *multiHold) end(cause *lock.LostError) bool {
	lost := h.lose(cause.Reason, cause)
	if lost {
		h.background(func(context.Context) {
			for _, member := range h.holds {
				member.StopRenewing()
			}
		})
	}
	return lost
}

// forget removes the hold from its client.
func (h *multiHold) forget() {
	session.Of[multis](h.m.s).Delete(h)
	h.stop()
}

// Break implements hold.Outer.
func (h *multiHold) Break(reason lock.Reason) bool {
	if !h.lose(reason, nil) {
		return false
	}
	h.forget()
	_ = locking.UnlockTogether(context.Background(), h.holds)
	return true
}

// Remaining implements lock.Hold.
func (h *multiHold) Remaining() time.Duration {
	if !h.Held() {
		return 0
	}
	least := lock.MaxLease
	for _, member := range h.holds {
		least = min(least, member.Remaining())
	}
	return least
}

// Extend implements lock.Hold.
func (h *multiHold) Extend(ctx context.Context, lease time.Duration) error {
	if err := h.Err("Extend", h.Name()); err != nil {
		return err
	}
	errs, began := make([]error, len(h.holds)), time.Now()
	locking.ExtendTogether(ctx, h.holds, lease, true, func(i int, err error) { errs[i] = err })
	err := errors.Join(errs...)
	if lost := (*lock.LostError)(nil); errors.As(err, &lost) {
		h.MemberEnded(lost)
	}
	return cmp.Or(h.Err("Extend", h.Name()), h.m.failed(ctx, "extend", began, err))
}

// Unlock implements lock.Hold.
func (h *multiHold) Unlock(ctx context.Context) error {
	err := h.End("Unlock", h.Name())
	for _, member := range h.holds {
		member.Watch(nil, "")
		member.KeepUntil(h.keepUntil)
	}
	h.forget()
	if err != nil {
		if errors.Is(err, lock.ErrLost) {
			_ = locking.UnlockTogether(context.WithoutCancel(ctx), h.holds) // the members that are left
		}
		return err
	}
	ctx, released := h.StartRelease(ctx)
	began := time.Now()
	err = errors.Join(locking.UnlockTogether(ctx, h.holds)...)
	return h.Released(released, h.m.failed(ctx, "unlock", began, err))
}
