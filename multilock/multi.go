package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// Multi is several locks acquired as one. Client.MultiLock creates it.
type Multi struct {
	group
	known    []ranked           // the members, in order as far as it is known without asking
	sessions []*session.Session // the sessions of the members
}

// New returns a lock that holds all members. The members of a Multi replace it. Only the
// client calls New.
func New(s *session.Session, members ...lock.Locker) *Multi {
	var flat []lock.Locker
	var bad error
	for _, m := range members {
		if multi, ok := m.(*Multi); ok && multi != nil {
			flat, bad = append(flat, multi.members...), cmp.Or(bad, multi.err)
		} else {
			flat = append(flat, m)
		}
	}
	m := &Multi{group: newGroup(s, "multi", flat)}
	if m.err = cmp.Or(m.err, bad); m.err != nil {
		return m
	}
	m.known = m.rank(nil)
	m.err = checkDuplicates(m.known)
	for _, r := range m.known {
		if r.lock != nil && !slices.Contains(m.sessions, r.lock.Session()) {
			m.sessions = append(m.sessions, r.lock.Session())
		}
	}
	return m
}

// Name returns the names of the members, separated by commas.
func (m *Multi) Name() string { return m.info.Name }

// Lock acquires all members, one after the other. It waits until it holds them all, ctx is
// done, or lock.Wait runs out. On failure it holds no member. See lock.Locker for its
// errors. If m has no members, a nil member or a duplicate, the error matches
// lock.ErrInvalid.
//
// The leases of all members, and lock.MaxHold, count from the acquisition of the last one.
// Members that are a Red or a Locker of another module are acquired first, with the lease
// as given; if the wait for one of them exceeds that lease, Lock acquires them again.
//
// When any member is lost, the hold's context ends and the other members are released. The
// hold's Owner is the owner in ctx, or zero: each member has its own owner. The hold has no
// fencing token.
func (m *Multi) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := lock.Resolve(opts...)
	if err != nil {
		return nil, err
	}
	return m.acquire(ctx, o, o.Bounded && o.Wait == 0)
}

// TryLock makes one attempt for each member and does not wait. If a member is held by
// another owner, TryLock releases the others and returns an error that matches
// lock.ErrNotAcquired. See Lock.
func (m *Multi) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	o, err := locking.TryOptions(opts)
	if err != nil {
		return nil, err
	}
	return m.acquire(ctx, o, true)
}

// Do runs fn while it holds all members. See lock.Locker.
func (m *Multi) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, m, fn, opts...)
}

// namedHolds are the holds of a client whose callers named an owner. The zero value is
// ready for use.
type namedHolds struct {
	mu    sync.Mutex
	holds map[lock.Owner][]*multiHold
}

// of returns the holds of an owner, the latest last.
func (n *namedHolds) of(o lock.Owner) []*multiHold {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.holds[o])
}

func (n *namedHolds) add(h *multiHold) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.holds == nil {
		n.holds = make(map[lock.Owner][]*multiHold)
	}
	n.holds[h.owner] = append(n.holds[h.owner], h)
}

func (n *namedHolds) remove(h *multiHold) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.holds[h.owner] = slices.DeleteFunc(n.holds[h.owner], func(other *multiHold) bool { return other == h })
	if len(n.holds[h.owner]) == 0 {
		delete(n.holds, h.owner)
	}
}

// sameMembers reports whether m and other have the same members.
func (m *Multi) sameMembers(other *Multi) bool {
	return slices.EqualFunc(m.known, other.known, ranked.same)
}

// ownerAware is a Locker that records its owners: all of this module except Red.
type ownerAware interface {
	Unlock(ctx context.Context) error
	IsHeldBy(ctx context.Context, owner lock.Owner) (bool, error)
}

// Unlock releases one hold of each member for the owner in ctx (see lock.WithOwner), as
// the Unlock method of the member does, and joins the errors. It ends the latest hold that
// this owner has through a Multi of this client with the same members. If a member lacks
// such a method, the error matches lock.ErrUnsupported.
func (m *Multi) Unlock(ctx context.Context) error {
	if ctx != nil && m.err == nil {
		owner, _ := lock.OwnerFrom(ctx)
		for _, h := range slices.Backward(session.Of[namedHolds](m.s).of(owner)) {
			if !h.m.sameMembers(m) {
				continue
			}
			if err := h.unlock(ctx); !errors.Is(err, lock.ErrNotHeld) {
				return err
			}
		}
	}
	var errs []error
	err := m.eachOwnerAware(func(l ownerAware) bool {
		errs = append(errs, l.Unlock(ctx))
		return true
	})
	return errors.Join(append(errs, err)...)
}

// IsHeldBy reports whether owner holds all members. It blocks for one round trip for each
// member. If a member does not record its owners, the error matches lock.ErrUnsupported.
func (m *Multi) IsHeldBy(ctx context.Context, owner lock.Owner) (held bool, err error) {
	var failed error
	err = m.eachOwnerAware(func(l ownerAware) bool {
		held, failed = l.IsHeldBy(ctx, owner)
		return held && failed == nil
	})
	err = errors.Join(err, failed)
	return held && err == nil, err
}

// eachOwnerAware calls f for the members, the last one first, until f returns false.
func (m *Multi) eachOwnerAware(f func(l ownerAware) bool) error {
	if m.err != nil {
		return m.err
	}
	for _, member := range m.members {
		if _, ok := member.(ownerAware); !ok {
			return fmt.Errorf("%w: %q does not record its owners", lock.ErrUnsupported, member.Name())
		}
	}
	for _, member := range slices.Backward(m.members) {
		if !f(member.(ownerAware)) {
			break
		}
	}
	return nil
}

// multiHold is a hold on all members.
type multiHold struct {
	holdState
	m     *Multi
	holds []lock.Hold
	stops []func() bool // detach the hold from its client and from holds of other modules

	freed chan struct{} // closed once a lost hold has released its members
}

func (m *Multi) begin(ctx context.Context, holds []lock.Hold) lock.Hold {
	h := &multiHold{holdState: holdState{group: &m.group}, m: m, holds: holds, freed: make(chan struct{})}
	h.holdState.begin(ctx)
	if !h.owner.IsZero() {
		session.Of[namedHolds](m.s).add(h)
	}
	if !slices.Contains(m.sessions, m.s) { // otherwise a member reports that the client closes
		h.stops = append(h.stops, m.s.OnClose(func() {
			h.MemberEnded(&lock.LostError{Name: h.group.info.Name, Owner: h.owner, Reason: lock.ReasonClosed, When: time.Now()})
		}))
	}
	for _, member := range holds {
		if locking.Watch(member, h) {
			continue
		}
		memberCtx := member.Context()
		h.stops = append(h.stops, context.AfterFunc(memberCtx, func() {
			cause := &lock.LostError{Name: member.Name(), Owner: member.Owner(), Reason: lock.ReasonGone, When: time.Now()}
			errors.As(context.Cause(memberCtx), &cause)
			h.MemberEnded(cause)
		}))
	}
	return newHandle(h)
}

// forget removes an ended hold from those of its owner.
func (h *multiHold) forget() {
	if !h.owner.IsZero() {
		session.Of[namedHolds](h.m.s).remove(h)
	}
}

func (h *multiHold) state() *holdState { return &h.holdState }

// MemberEnded implements locking.Group: a member was lost.
func (h *multiHold) MemberEnded(cause *lock.LostError) {
	if !h.lose(cause.Reason, cause) {
		return
	}
	h.forget()
	h.background(func(context.Context) {
		defer close(h.freed)
		if cause.Reason == lock.ReasonMaxHold {
			return // the work may not have stopped yet, so Unlock releases the members
		}
		holds := h.holds
		if cause.Reason == lock.ReasonClosed { // a closed client leaves its members to their leases
			holds = locking.OfOpenClients(holds)
		}
		_ = locking.UnlockTogether(context.WithoutCancel(h.ctx), holds)
	})
}

func (h *multiHold) remaining() time.Duration {
	if h.current("") != nil {
		return 0
	}
	least := lock.MaxLease
	for _, member := range h.holds {
		least = min(least, member.Remaining())
	}
	return least
}

func (h *multiHold) extend(ctx context.Context, lease time.Duration) error {
	if err := h.current("Extend"); err != nil {
		return err
	}
	err := errors.Join(locking.ExtendTogether(ctx, h.holds, lease, true)...)
	if lost := (*lock.LostError)(nil); errors.As(err, &lost) {
		h.MemberEnded(lost)
	}
	return cmp.Or(h.current("Extend"), err)
}

func (h *multiHold) unlock(ctx context.Context) error {
	err := h.end()
	for _, member := range h.holds {
		locking.Unwatch(member)
	}
	for _, stop := range h.stops {
		stop()
	}
	if err != nil {
		if errors.Is(err, lock.ErrLost) {
			<-h.freed
			_ = locking.UnlockTogether(context.WithoutCancel(ctx), h.holds) // the members that are left
		}
		return err
	}
	h.forget()
	ctx, done := h.span.StartRelease(ctx)
	return h.endSpans(locking.UnlockTogether(context.WithoutCancel(ctx), h.holds), done)
}
