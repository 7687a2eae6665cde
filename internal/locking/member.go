package locking

import (
	"context"
	"reflect"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
)

// Member is embedded by every kind of lock so that Find sees what it stands on.
type Member struct{ of *Lock }

// Member returns what a kind of lock embeds.
func (l *Lock) Member() Member { return Member{l} }

func (m Member) self() *Lock { return m.of }

// Find returns what l stands on if it is a lock of this module. Of any other Locker
// nothing is known but what lock.Locker promises.
func Find(l lock.Locker) (*Lock, bool) {
	m, ok := l.(interface{ self() *Lock })
	if !ok {
		return nil, false
	}
	of := m.self()
	// A type of somebody else that embeds a lock may have a Lock of its own.
	return of, packageOf(l) == packageOf(of.p)
}

// packageOf returns where the type of v, or what it points to, is declared.
func packageOf(v any) string {
	t := reflect.TypeOf(v)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t.PkgPath()
}

// Session returns the session of the client that has made the lock.
func (l *Lock) Session() *session.Session { return l.s }

// Kind returns the kind of lock, as it stands in logs and telemetry.
func (l *Lock) Kind() string { return l.p.Traits().Kind }

// Channel is where the release of the lock is published, "" if that is not the same
// for all waiters.
func (l *Lock) Channel() string {
	if l.p.Traits().Ordered {
		return ""
	}
	return l.p.Channel(&Claim{Key: l.key})
}

// Shared reports whether several owners can hold the lock at once.
func (l *Lock) Shared() bool { return l.p.Traits().Shared }

// Take is Lock, or TryLock if once is set, for one of several locks that are taken as
// one: even with a lease the hold is renewed until Align, and MaxHold counts from
// there.
func Take(ctx context.Context, l *Lock, o lock.Options, once bool) (lock.Hold, error) {
	o.MaxHold = 0
	h, err := l.acquire(ctx, o, once, true)
	if err != nil {
		return nil, err
	}
	return memberHandle(h), nil
}

// memberHandle returns the handle of a hold that is part of another: it is for that one to be
// noticed when it is dropped.
func memberHandle(h *hold) lock.Hold { return &handle{h: h} }

// Waited reports whether others were in the way of a hold, as far as that is known.
func Waited(h lock.Hold) bool {
	hd, ok := h.(*handle)
	return ok && hd.h.claim.waited
}

// Receivers returns how many subscribers heard of the release of a hold that was unlocked, less
// than 0 if that is not known, or others may wait for it who do not hear of it.
func Receivers(h lock.Hold) int {
	hd, ok := h.(*handle)
	if !ok || hd.h.claim.lock.Channel() == "" || hd.h.claim.lock.p.Traits().HasPollers {
		return -1
	}
	return int(hd.h.claim.receivers)
}

// Group is what a hold is part of.
type Group interface {
	// MemberEnded is told that a part was lost, or unlocked by others. It must not block.
	MemberEnded(cause *lock.LostError)
}

// Watch has w told when h ends by itself, once. It reports false if h is no hold of this
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

// notifyGroup tells what h is part of that h has ended. The mutex of the claim is held.
func (h *hold) notifyGroup(lost *lock.LostError) {
	w := h.group
	if w == nil {
		return
	}
	h.group = nil
	if lost == nil { // somebody has unlocked it by its owner
		lost = h.lostError(lock.ReasonGone, nil)
	}
	w.MemberEnded(lost)
}
