package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// Multi is several locks acquired as one. Client.MultiLock creates it.
type Multi struct {
	group
	members  []lock.Locker
	reds     []*Red             // the members that are Redlocks, by name
	stores   []engine.StoreLock // the members on other stores, by store and name
	locks    []*engine.Lock     // the others, in order as far as it is known without asking
	sessions []*session.Session // of locks
}

// New returns a lock that holds all members. Client.MultiLock calls it. A member that is a Multi counts as its members.
func New(all *Shared, members ...lock.Locker) *Multi {
	m := &Multi{}
	var bad error
	for _, member := range members {
		if multi, ok := member.(*Multi); ok && multi != nil {
			m.members = append(m.members, multi.members...)
			bad = cmp.Or(bad, multi.err)
		} else {
			m.members = append(m.members, member)
		}
	}

	var names []string
	var on []engine.LockID
	for i, member := range m.members {
		if red, _ := member.(*Red); red != nil {
			m.reds = append(m.reds, red)
			on = append(on, red.on...)
		} else if l := engine.FindStore(member); l != nil {
			m.stores = append(m.stores, l)
			on = append(on, l.ID())
			bad = cmp.Or(bad, l.Check())
		} else if l, err := find("multi", i, member); err != nil {
			bad = cmp.Or(bad, err)
			if l == nil {
				continue
			}
		} else {
			m.locks = append(m.locks, l)
			on = append(on, l.ID())
			if !slices.Contains(m.sessions, l.Session()) {
				m.sessions = append(m.sessions, l.Session())
			}
		}
		names = append(names, member.Name())
	}

	slices.SortStableFunc(m.reds, func(a, b *Red) int { return cmp.Compare(a.Name(), b.Name()) })
	slices.SortStableFunc(m.stores, func(a, b engine.StoreLock) int {
		return cmp.Or(cmp.Compare(a.ID().Key.Kind, b.ID().Key.Kind), cmp.Compare(a.Name(), b.Name()))
	})
	m.locks = servers(nil).sort(m.locks)
	bad = cmp.Or(bad, m.checkMembers(nil))
	m.group = newGroup(all, "multi", names, on, bad)
	m.reads = slices.ContainsFunc(m.locks, func(l *engine.Lock) bool { return l.Kind().Shared }) ||
		slices.ContainsFunc(m.reds, func(r *Red) bool { return r.reads }) ||
		slices.ContainsFunc(m.stores, engine.StoreLock.Shared)
	return m
}

// local reports whether all members that are locks belong to the client of m.
func (m *Multi) local() bool { return len(m.sessions) == 1 && m.sessions[0] == m.s }

// Name returns the names of the members, separated by commas.
func (m *Multi) Name() string { return m.info.Name }

// Lock acquires all members, one after the other. It waits until it holds them all, ctx is
// done, or lock.Wait runs out. On failure it holds no member. See lock.Locker for its
// errors. lock.MaxWaiters is not a valid option. If m has no members, a duplicate, or a member that is nil or a type of another
// module, the error matches lock.ErrInvalid.
//
// The leases of all members, and lock.MaxHold, count from the acquisition of the last one.
// Members that are a Red or on another store are acquired first, with the lease as given; if the wait for
// another member exceeds that lease, Lock acquires them again.
//
// When any member is lost, the hold's context ends. The other members are not renewed any
// more; they are held until Unlock, or until their leases end. lock.OwnerOf returns the owner
// in ctx, or the zero Owner: each member has its own owner. The hold has no fencing token.
func (m *Multi) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	return open(ctx, &m.group, opts, false, m.acquire)
}

// TryLock makes one attempt for each member and does not wait. If a member is held by
// another owner, TryLock releases the others and returns an error that matches
// lock.ErrNotAcquired. See Lock.
func (m *Multi) TryLock(ctx context.Context, opts ...lock.HoldOption) (lock.Hold, error) {
	return open(ctx, &m.group, opts, true, m.acquire)
}

// Do runs fn while it holds all members. See lock.Locker.
func (m *Multi) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return engine.Do(ctx, m.object(), m, fn, opts...)
}

// checkOwner returns why no call for an owner can work, or nil: the members may not record their owners.
func (m *Multi) checkOwner() error {
	if m.err == nil && len(m.reds) > 0 {
		return fmt.Errorf("%w: the Redlock %q does not record its owners", lock.ErrUnsupported, m.reds[0].Name())
	}
	if m.err == nil && len(m.stores) > 0 {
		return fmt.Errorf("%w: the lock %q is on another store", lock.ErrUnsupported, m.stores[0].Name())
	}
	return m.err
}

// onlyLocks reports whether all members are locks on one server each.
func (m *Multi) onlyLocks() bool { return len(m.locks) == len(m.members) }

// UnlockOwner ends the latest hold that the owner in ctx (see lock.WithOwner) has in this process
// through a Multi with the same members. It blocks like Hold.Unlock. The error matches
// lock.ErrInvalid if ctx has no owner, lock.ErrNotHeld if the owner has no such hold, and
// lock.ErrUnsupported if a member is a Red or on another store. Other errors are the errors of Hold.Unlock. A lost hold
// counts as held until Unlock or UnlockOwner has returned its loss.
func (m *Multi) UnlockOwner(ctx context.Context) error {
	if err := cmp.Or(m.checkOwner(), m.s.Check(ctx)); err != nil {
		return m.object().Refused("release", err)
	}

	owner, ok := lock.OwnerFrom(ctx)
	if !ok {
		return m.object().Refused("release", engine.ErrNoOwner)
	}

	for _, g := range slices.Backward(m.locks[0].Groups(owner)) {
		if h := g.(*multiHold); h.m.onlyLocks() && h.m.sameLocks(m) {
			if err := h.Unlock(ctx); !errors.Is(err, lock.ErrNotHeld) {
				return err
			}
		}
	}

	return m.object().Refused("release", engine.NotHeldBy(owner))
}

// sameLocks reports whether m and other have the same locks, in any order.
func (m *Multi) sameLocks(other *Multi) bool {
	missing := func(l *engine.Lock) bool {
		return !slices.ContainsFunc(other.locks, func(o *engine.Lock) bool { return servers(nil).same(l, o) })
	}
	return len(m.locks) == len(other.locks) && !slices.ContainsFunc(m.locks, missing)
}

// multiHold is a hold on all members.
type multiHold struct {
	groupHold
	m     *Multi
	holds []engine.GroupHold
	stop  func() bool // detaches the hold from its client, or nil
}

// begin returns the hold of a caller that has all members.
func (m *Multi) begin(ctx context.Context, o lock.Options, holds []engine.GroupHold) *multiHold {
	owner, _ := lock.OwnerFrom(ctx)
	h := &multiHold{groupHold: groupHold{group: &m.group, owner: owner, fixed: o.Lease > 0}, m: m, holds: holds}
	h.groupHold.begin(ctx, o)
	m.all.add(h)
	if !m.local() { // otherwise the members end with the client
		h.stop = m.s.OnClose(func() { h.end(h.loss(lock.ReasonClosed, nil)) })
	}
	for _, member := range holds {
		member.Watch(h, member.Name())
	}
	return h
}

// Shared is what the groups of one client share: the holds on a Multi. Their members may belong to other
// clients.
type Shared struct {
	e     *engine.Engine
	even  session.Warnings // even numbers of servers
	mu    sync.Mutex
	holds map[*multiHold]struct{}
}

// NewShared returns what the groups of a client share. There is one for each engine.
func NewShared(e *engine.Engine) *Shared {
	all := &Shared{e: e, holds: make(map[*multiHold]struct{})}
	e.Session.List(all.list)
	return all
}

func (all *Shared) add(h *multiHold) {
	all.mu.Lock()
	defer all.mu.Unlock()
	all.holds[h] = struct{}{}
}

func (all *Shared) remove(h *multiHold) {
	all.mu.Lock()
	defer all.mu.Unlock()
	delete(all.holds, h)
}

// list yields the holds. Those that are lost are only waited for as members.
func (all *Shared) list() iter.Seq[session.Hold] {
	return func(yield func(session.Hold) bool) {
		all.mu.Lock()
		holds := slices.Collect(maps.Keys(all.holds))
		all.mu.Unlock()
		for _, h := range holds {
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

// Dropped implements engine.Droppable.
func (h *multiHold) Dropped() {
	if !h.owner.IsZero() && h.m.onlyLocks() {
		return // the owner can end it without the handle
	}
	h.dropped()
	for _, member := range h.holds {
		member.Disown()
		member.StopRenewing()
	}
}

// MemberEnded implements engine.Group: a member was lost. The work under the hold may not have
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
	h.m.all.remove(h)
	if h.stop != nil {
		h.stop()
	}
}

// Break implements engine.ContextHold.
func (h *multiHold) Break(reason lock.Reason) bool {
	if !h.lose(reason, nil) {
		return false
	}
	h.forget()
	for _, member := range h.holds {
		member.(engine.ContextHold).Break(reason)
	}
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
	if err := h.Err("extend", h.Object()); err != nil {
		return err
	}

	errs := make([]error, len(h.holds))
	began := time.Now()
	engine.ExtendTogether(ctx, h.holds, lease, true, func(i int, err error) { errs[i] = err })
	err := errors.Join(errs...)
	if lost := (*lock.LostError)(nil); errors.As(err, &lost) {
		h.MemberEnded(lost)
	}
	return cmp.Or(h.Err("extend", h.Object()), h.m.failed(ctx, "extend", began, err))
}

// Unlock implements lock.Hold.
func (h *multiHold) Unlock(ctx context.Context) error {
	err := h.End("release", h.Object())
	for _, member := range h.holds {
		member.Watch(nil, "")
		member.KeepUntil(h.keepUntil)
	}
	h.forget()
	if err != nil {
		if errors.Is(err, lock.ErrLost) {
			_ = engine.UnlockTogether(context.WithoutCancel(ctx), h.holds) // the members that are left
		}
		return err
	}

	ctx, released := h.StartRelease(ctx)
	began := time.Now()
	err = errors.Join(engine.UnlockTogether(ctx, h.holds)...)
	return h.Released(released, h.m.failed(ctx, "release", began, err))
}
