package locking

import (
	"context"
	"reflect"
	"time"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Member is embedded by every kind of lock, for Find.
type Member struct{ of *Lock }

// Member returns the Member for a kind of lock.
func (l *Lock) Member() Member { return Member{l} }

func (m Member) self() *Lock { return m.of }

// Find returns the Lock of l, or nil if l is nil or not a lock of this module. The type of l
// must be declared beside its protocol: a foreign type that embeds a lock also has self, and
// may have its own Lock method, which its embedded lock would bypass.
func Find(l lock.Locker) *Lock {
	m, ok := l.(interface{ self() *Lock })
	if v := reflect.ValueOf(l); !ok || v.Kind() != reflect.Pointer || v.IsNil() {
		return nil
	}
	of := m.self()
	if of == nil || reflect.TypeOf(l).Elem().PkgPath() != reflect.TypeOf(of.p).Elem().PkgPath() {
		return nil
	}
	return of
}

// Session returns the session of the lock's client.
func (l *Lock) Session() *session.Session { return l.s }

// Traits returns the traits of the kind of lock.
func (l *Lock) Traits() Traits { return l.p.Traits() }

// Channel returns the channel of releases, "" if waiters have channels of their own.
func (l *Lock) Channel() string {
	if l.p.Traits().Ordered {
		return ""
	}
	return l.p.Channel(&Claim{Key: l.key})
}

// Slot returns the cluster slot of the lock, 0 without a cluster.
func (l *Lock) Slot() int {
	if !l.s.Cluster() {
		return 0
	}
	return wire.Slot(l.key)
}

// Hold is the hold of a member. The group detects that it was dropped.
type Hold = hold

// Take is Lock, or TryLock if once is set, for a member of a Multi: even with a lease the
// hold is renewed until Align, and MaxHold counts from there.
func Take(ctx context.Context, l *Lock, o lock.Options, once bool) (*Hold, error) {
	o.MaxHold = 0
	return l.acquire(ctx, o, once, true)
}

// TryMember is TryLock for a member of a Redlock, which renews the hold itself.
func (l *Lock) TryMember(ctx context.Context, lease time.Duration) (*Hold, error) {
	return l.acquire(ctx, lock.Options{Lease: lease}, true, false)
}

// Unlock is lock.Hold's.
func (h *hold) Unlock(ctx context.Context) error { return h.unlock(ctx) }

// Remaining is lock.Hold's.
func (h *hold) Remaining() time.Duration { return h.remaining() }

// Waited reports whether the acquisition was contended, as far as that is known.
func (h *hold) Waited() bool { return h.claim.waited }

// Receivers returns the number of subscribers that received the release, negative if that
// is unknown or pollers may wait too.
func (h *hold) Receivers() int {
	if l := h.claim.lock; l.Channel() == "" || l.p.Traits().HasPollers {
		return -1
	}
	return int(h.claim.receivers)
}

// Group is told of the end of a member's hold.
type Group interface {
	// MemberEnded is called when a member was lost, or unlocked by its owner. It must not
	// block.
	MemberEnded(cause *lock.LostError)
}

// Groups returns the groups through which owner holds the lock, the latest last.
func (l *Lock) Groups(owner lock.Owner) (groups []Group) {
	for _, h := range l.heldBy(owner) {
		h.claim.mu.Lock()
		if h.group != nil {
			groups = append(groups, h.group)
		}
		h.claim.mu.Unlock()
	}
	return groups
}

// Watch calls w once when h ends without its group.
func (h *hold) Watch(w Group) {
	h.claim.mu.Lock()
	defer h.claim.mu.Unlock()
	h.group = w
	if h.state != held {
		h.notifyGroup(h.lost)
	}
}

// Unwatch undoes Watch.
func (h *hold) Unwatch() {
	h.claim.mu.Lock()
	defer h.claim.mu.Unlock()
	h.group = nil
}

// notifyGroup notifies the group of h that h has ended. The mutex of the claim is held.
func (h *hold) notifyGroup(lost *lock.LostError) {
	w := h.group
	if w == nil {
		return
	}
	h.group = nil
	if lost == nil { // unlocked by its owner
		lost = h.lostError(lock.ReasonGone, nil)
	}
	w.MemberEnded(lost)
}
