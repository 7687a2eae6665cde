package engine

import (
	"context"
	"reflect"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
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
	if !ok || isNil(l) {
		return nil
	}

	of := m.self()
	if of == nil || packageOf(l) != packageOf(of.p) {
		return nil
	}

	return of
}

// StoreLock is a lock on another store, as a group sees it.
type StoreLock interface {
	Name() string
	// ID identifies the lock in this process.
	ID() LockID
	// Check returns why no operation on the lock can work, or nil.
	Check() error
	// Shared reports whether several callers can hold it at once, as readers.
	Shared() bool
	// Take is Lock, or TryLock if once is set, for a member of a group, from whose last member MaxHold counts. It
	// reports whether the call had to wait.
	Take(ctx context.Context, o lock.Options, once bool) (h GroupHold, waited bool, err error)
	// Join is session.Session's, for the client of the lock.
	Join(onClose func()) (leave func(), open bool)
}

// StoreMember is embedded by locks on other stores, for FindStore.
type StoreMember struct{ of StoreLock }

// NewStoreMember returns the StoreMember for a lock.
func NewStoreMember(l StoreLock) StoreMember { return StoreMember{l} }

func (m StoreMember) self() StoreLock { return m.of }

// FindStore is Find for a lock on another store.
func FindStore(l lock.Locker) StoreLock {
	m, ok := l.(interface{ self() StoreLock })
	if !ok || isNil(l) {
		return nil
	}

	of := m.self()
	if of == nil || packageOf(l) != packageOf(of) {
		return nil
	}

	return of
}

func isNil(l lock.Locker) bool {
	v := reflect.ValueOf(l)
	return v.Kind() != reflect.Pointer || v.IsNil()
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

// Kind describes the lock.
func (l *Lock) Kind() *Kind { return &l.kind }

// Channel returns the channel of releases, "" if waiters have channels of their own.
func (l *Lock) Channel() string {
	if l.kind.Ordered {
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

// AnyHold is a hold on one lock or on several.
type AnyHold interface {
	Droppable
	// One returns the hold itself if it is on one lock, and otherwise nil.
	One() *Hold
	// Disown is State.Disown.
	Disown()
	// KeepUntil has Unlock leave the lock held until then, unless that is zero.
	KeepUntil(until time.Time)
}

// GroupHold is the hold of a member of a group: a *Hold, or the hold of a Redlock. The group detects
// that it was dropped.
type GroupHold interface {
	AnyHold
	// Acquired returns when the request that succeeded was sent, or when the hold joined others of its
	// owner without a request.
	Acquired() time.Time
	// EndAt ends the hold at that time, whatever is renewed until then.
	EndAt(at time.Time)
	// StopRenewing leaves the hold to the end of its lease, and reports whether it was renewed.
	StopRenewing() bool
	// Watch is State.Watch.
	Watch(g Group, name string)
}

// Take is Lock, or TryLock if once is set, for a member of a Multi: even with a lease the
// hold is renewed until Align, and MaxHold counts from there.
func Take(ctx context.Context, l *Lock, o lock.Options, once bool) (*Hold, error) {
	o.MaxHold = 0
	o.Parent = nil
	o.AtLeast = 0
	return l.acquire(ctx, &call{site: callsite.Of(o.Site), opts: o, once: once, member: true})
}

// MemberHold is the hold of a member of a Redlock, which renews it itself.
type MemberHold interface {
	AnyHold
	// Receivers returns the number of subscribers that received the release, negative if that
	// is unknown, another hold of the owner goes on, or pollers may wait too.
	Receivers() int
}

// TryMember is TryLock for a member of a Redlock.
func (l *Lock) TryMember(ctx context.Context, lease time.Duration) (MemberHold, error) {
	return l.acquire(ctx, &call{opts: lock.Options{Lease: lease}, once: true})
}

// One implements AnyHold.
func (h *Hold) One() *Hold { return h }

// Acquired implements GroupHold.
func (h *Hold) Acquired() time.Time { return h.sent }

// StopRenewing implements GroupHold.
func (h *Hold) StopRenewing() bool {
	c := h.claim
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.Fixed || !h.Held() {
		return false
	}

	h.Fixed = true
	c.alignLocked()
	return true
}

// Waited reports whether the acquisition was contended, as far as that is known.
func (h *Hold) Waited() bool { return h.claim.waited }

// Receivers implements MemberHold.
func (h *Hold) Receivers() int {
	c := h.claim
	if c.lock.kind.Ordered || c.lock.kind.LeftOpen != "" || c.lock.p.Channel(&c.Claim) == "" {
		return -1
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return int(c.receivers)
}

// Groups returns the groups through which owner holds the lock, or held it until it was lost. The
// latest is the last.
func (l *Lock) Groups(owner lock.Owner) (groups []Group) {
	for _, h := range l.takenBy(owner) {
		if g := h.Group(); g != nil {
			groups = append(groups, g)
		}
	}
	return groups
}
