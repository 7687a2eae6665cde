package locking

import (
	"context"
	"reflect"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// Member is embedded by every kind of lock, for Find.
type Member struct{ of *Lock }

// Member returns the Member for a kind of lock.
func (l *Lock) Member() Member { return Member{l} }

func (m Member) self() *Lock { return m.of }

// Find returns the Lock of l, if l is a lock of this module.
func Find(l lock.Locker) (*Lock, bool) {
	m, ok := l.(interface{ self() *Lock })
	if !ok {
		return nil, false
	}
	of := m.self()
	// A foreign type that embeds a lock may have its own Lock method.
	return of, packageOf(l) == packageOf(of.p)
}

// packageOf returns the package that declares the type of v, or of *v.
func packageOf(v any) string {
	t := reflect.TypeOf(v)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t.PkgPath()
}

// Session returns the session of the lock's client.
func (l *Lock) Session() *session.Session { return l.s }

// Kind returns the kind of lock, as in logs and telemetry.
func (l *Lock) Kind() string { return l.p.Traits().Kind }

// Channel returns the channel of releases, "" if waiters have channels of their own.
func (l *Lock) Channel() string {
	if l.p.Traits().Ordered {
		return ""
	}
	return l.p.Channel(&Claim{Key: l.key})
}

// Shared reports whether several owners can hold the lock at once.
func (l *Lock) Shared() bool { return l.p.Traits().Shared }

// Take is Lock, or TryLock if once is set, for a member of a group: even with a lease the
// hold is renewed until Align, and MaxHold counts from there.
func Take(ctx context.Context, l *Lock, o lock.Options, once bool) (lock.Hold, error) {
	o.MaxHold = 0
	h, err := l.acquire(ctx, o, once, true)
	if err != nil {
		return nil, err
	}
	return memberHandle(h), nil
}

// memberHandle returns the handle of a member's hold. The group detects that it was dropped.
func memberHandle(h *hold) lock.Hold { return &handle{h: h} }

// Waited reports whether the acquisition of a hold was contended, as far as that is known.
func Waited(h lock.Hold) bool {
	hd, ok := h.(*handle)
	return ok && hd.h.claim.waited
}

// Receivers returns the number of subscribers that received the release of a hold, negative
// if that is unknown or pollers may wait too.
func Receivers(h lock.Hold) int {
	hd, ok := h.(*handle)
	if !ok || hd.h.claim.lock.Channel() == "" || hd.h.claim.lock.p.Traits().HasPollers {
		return -1
	}
	return int(hd.h.claim.receivers)
}

// Group is told of the end of a member's hold.
type Group interface {
	// MemberEnded is called when a member was lost, or unlocked by its owner. It must not
	// block.
	MemberEnded(cause *lock.LostError)
}

// Watch calls w once when h ends without its group. It reports false if h is not of this
// module.
func Watch(h lock.Hold, w Group) bool {
	hd, ok := h.(*handle)
	if ok {
		hd.h.watch(w)
	}
	return ok
}

func (h *hold) watch(w Group) {
	h.claim.mu.Lock()
	defer h.claim.mu.Unlock()
	h.group = w
	if h.state != held {
		h.notifyGroup(h.lost)
	}
}

// Unwatch undoes Watch.
func Unwatch(h lock.Hold) {
	if hd, ok := h.(*handle); ok {
		hd.h.claim.mu.Lock()
		defer hd.h.claim.mu.Unlock()
		hd.h.group = nil
	}
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
