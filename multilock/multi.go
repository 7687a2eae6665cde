package multilock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redlatch/redlatch/internal/locking"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// Multi is several locks acquired as one. Client.MultiLock creates it.
type Multi struct {
	group
	members  []lock.Locker
	reds     []*Red             // those of the members that are Redlocks, by name
	locks    []*locking.Lock    // the others, in order as far as it is known without asking
	sessions []*session.Session // of locks
}

// New returns a lock that holds all members. The members of a Multi replace it. Only the
// client calls New.
func New(s *session.Session, members ...lock.Locker) *Multi {
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
	for i, member := range m.members {
		red, _ := member.(*Red)
		if l := locking.Find(member); l != nil {
			m.locks = append(m.locks, l)
			if !slices.Contains(m.sessions, l.Session()) {
				m.sessions = append(m.sessions, l.Session())
			}
		} else if red != nil {
			m.reds = append(m.reds, red)
		} else {
			bad = cmp.Or(bad, badMember("multi", i, member))
			continue
		}
		names = append(names, member.Name())
	}
	slices.SortStableFunc(m.reds, func(a, b *Red) int { return cmp.Compare(a.Name(), b.Name()) })
	m.locks = servers(nil).sort(m.locks)
	m.group = newGroup(s, "multi", names)
	m.err = cmp.Or(bad, m.err, servers(nil).checkDuplicates(m.locks))
	for i, red := range m.reds {
		if slices.ContainsFunc(m.reds[:i], func(other *Red) bool { return other.queue == red.queue }) {
			m.err = cmp.Or(m.err, fmt.Errorf("%w: duplicate member %q", lock.ErrInvalid, red.Name()))
		}
	}
	return m
}

// Name returns the names of the members, separated by commas.
func (m *Multi) Name() string { return m.info.Name }

// Lock acquires all members, one after the other. It waits until it holds them all, ctx is
// done, or lock.Wait runs out. On failure it holds no member. See lock.Locker for its
// errors. If m has no members, a duplicate, or a member that is nil or a type of another
// module, the error matches lock.ErrInvalid.
//
// The leases of all members, and lock.MaxHold, count from the acquisition of the last one.
// Members that are a Red are acquired first, with the lease as given; if the wait for
// another member exceeds that lease, Lock acquires them again.
//
// When any member is lost, the hold's context ends. The other members are not renewed any
// more; they are held until Unlock, or until their leases end. The
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
		return fmt.Errorf("%w: Unlock %q: the context names no owner (see lock.WithOwner)", lock.ErrInvalid, m.info.Name)
	}
	for _, g := range slices.Backward(m.locks[0].Groups(owner)) {
		h := g.(*multiHold)
		if !slices.EqualFunc(h.m.locks, m.locks, servers(nil).same) || len(h.m.reds) > 0 {
			continue
		}
		if err := h.Unlock(ctx); !errors.Is(err, lock.ErrNotHeld) {
			return err
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

// memberHolds are the holds of the members of a Multi.
type memberHolds struct {
	reds  []*redHold
	locks []*locking.Hold
}

// release releases the members, those of locks with unlock.
func (h memberHolds) release(ctx context.Context, unlock func(context.Context, []*locking.Hold) error) error {
	errs := []error{unlock(ctx, h.locks)}
	for _, red := range slices.Backward(h.reds) {
		errs = append(errs, red.Unlock(ctx))
	}
	return errors.Join(errs...)
}

// extendReds extends the leases of the members that are Redlocks.
func (h memberHolds) extendReds(ctx context.Context, lease time.Duration) (errs []error) {
	for _, red := range h.reds {
		errs = append(errs, red.Extend(ctx, lease))
	}
	return errs
}

// stopRenewing leaves the members to the end of their leases.
func (h memberHolds) stopRenewing() {
	for _, red := range h.reds {
		red.lease.StopRenewing()
	}
	for _, l := range h.locks {
		l.StopRenewing()
	}
}

func (h memberHolds) remaining() time.Duration {
	least := lock.MaxLease
	for _, red := range h.reds {
		least = min(least, red.Remaining())
	}
	for _, l := range h.locks {
		least = min(least, l.Remaining())
	}
	return least
}

// multiHold is a hold on all members.
type multiHold struct {
	groupHold
	m     *Multi
	holds memberHolds
	stops []func() bool // detach the hold from its client and from holds of Redlocks
}

func (m *Multi) begin(ctx context.Context, holds memberHolds) lock.Hold {
	h := &multiHold{groupHold: groupHold{group: &m.group}, m: m, holds: holds}
	h.groupHold.begin(ctx)
	if !slices.Contains(m.sessions, m.s) { // otherwise a member reports that the client closes
		h.stops = append(h.stops, m.s.OnClose(func() {
			h.MemberEnded(&lock.LostError{Name: h.group.info.Name, Owner: h.owner, Reason: lock.ReasonClosed, When: time.Now()})
		}))
	}
	for _, red := range holds.reds {
		ctx := red.Context()
		h.stops = append(h.stops, context.AfterFunc(ctx, func() {
			if lost := (*lock.LostError)(nil); errors.As(context.Cause(ctx), &lost) {
				h.MemberEnded(lost)
			}
		}))
	}
	for _, member := range holds.locks {
		member.Watch(h, member.Name())
	}
	return newHandle(h)
}

// Dropped implements hold.Hold.
func (h *multiHold) Dropped() { h.dropped(h.Unlock) }

// MemberEnded implements hold.Group: a member was lost. The work under the hold may not have
// stopped yet, so the other members stay held until Unlock, or until their leases end.
func (h *multiHold) MemberEnded(cause *lock.LostError) {
	if h.lose(cause.Reason, cause) {
		h.background(func(context.Context) { h.holds.stopRenewing() })
	}
}

// Remaining implements lock.Hold.
func (h *multiHold) Remaining() time.Duration {
	if !h.Held() {
		return 0
	}
	return h.holds.remaining()
}

// Extend implements lock.Hold.
func (h *multiHold) Extend(ctx context.Context, lease time.Duration) error {
	if err := h.current("Extend"); err != nil {
		return err
	}
	errs := append(h.holds.extendReds(ctx, lease), locking.ExtendTogether(ctx, h.holds.locks, lease, true)...)
	err := errors.Join(errs...)
	if lost := (*lock.LostError)(nil); errors.As(err, &lost) {
		h.MemberEnded(lost)
	}
	return cmp.Or(h.current("Extend"), err)
}

// Unlock implements lock.Hold.
func (h *multiHold) Unlock(ctx context.Context) error {
	err := h.end()
	for _, member := range h.holds.locks {
		member.Unwatch()
	}
	for _, stop := range h.stops {
		stop()
	}
	if err != nil {
		if errors.Is(err, lock.ErrLost) {
			_ = h.holds.release(context.WithoutCancel(ctx), locking.UnlockTogether) // the members that are left
		}
		return err
	}
	ctx, released := h.StartRelease(ctx)
	return h.Released(released, h.holds.release(ctx, locking.UnlockTogether))
}
