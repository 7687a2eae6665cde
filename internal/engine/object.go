package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Lock is a lock of some kind: a name and a protocol. It is immutable.
type Lock struct {
	e     *Engine
	s     *session.Session // of e
	p     Protocol
	kind  Kind           // of p
	id    telemetry.Lock // its kind and name
	key   string
	queue Key   // of the callers that wait for it
	err   error // of the name or an option
}

// NewLock returns the lock of that name. A bad name, or else err, is an error of every operation.
func NewLock(e *Engine, p Protocol, name string, err error) Lock {
	key, nameErr := e.Session.Key(name, e.Session.CheckName)
	return NewLockAt(e, p, name, key, cmp.Or(nameErr, err))
}

// NewLockAt is NewLock for a lock with that key, whatever its name.
func NewLockAt(e *Engine, p Protocol, name, key string, err error) Lock {
	l := Lock{e: e, s: e.Session, p: p, kind: p.Kind(), key: key, err: err}
	l.kind.Group = l.kind.Grouped != nil
	l.id = telemetry.Lock{Kind: l.kind.Name, Name: name}
	l.queue = Key{Kind: l.kind.Queue, Name: key}
	return l
}

// Name is lock.Locker's.
func (l *Lock) Name() string { return l.id.Name }

// Key returns the key on the server.
func (l *Lock) Key() string { return l.key }

// Check returns why no operation on the lock can work, or nil.
func (l *Lock) Check(ctx context.Context) error {
	return cmp.Or(l.err, l.s.Check(ctx))
}

// Refuses returns the error of a call for op that Check rules out, or nil.
func (l *Lock) Refuses(ctx context.Context, op string) error {
	return l.Object().Refused(op, l.Check(ctx))
}

// Object returns what the errors of the lock name.
func (l *Lock) Object() wire.Object { return wire.Object(l.id) }

// Resolve is lock.Resolve for a lock, with an error for the options that it does not have. reads is set for a read
// lock, and for a group with one. A read lock has no AtLeast: each reader would leave a field in the hash.
func Resolve[O lock.Option](reads bool, opts []O) (lock.Options, error) {
	o, err := lock.Resolve(opts...)
	if err == nil && o.AtLeast > 0 && reads {
		err = fmt.Errorf("%w: AtLeast: a read lock has no least time", lock.ErrInvalid)
	}
	if err == nil && o.Lease == lock.NoExpiry {
		err = fmt.Errorf("%w: a lease without end (semaphore.Forever) is for permits of a PermitSemaphore", lock.ErrInvalid)
	}
	return o, err
}

// HoldParent returns the parent of the context of a hold that a call with ctx acquires.
func HoldParent(ctx context.Context, o lock.Options) context.Context {
	if o.Parent != nil {
		return o.Parent
	}
	return ctx
}

// KeptUntil returns until when AtLeast keeps a lock acquired now, and the zero time without it.
func KeptUntil(o lock.Options) time.Time {
	if o.AtLeast == 0 {
		return time.Time{}
	}
	return time.Now().Add(o.AtLeast)
}

// UnlockOwner ends the latest hold that the owner of ctx has in this process, or has lost. It blocks
// like Hold.Unlock and returns the same errors; ErrInvalid if ctx names no owner,
// ErrNotHeld if that has no hold here.
func (l *Lock) UnlockOwner(ctx context.Context) error {
	if err := l.Refuses(ctx, "release"); err != nil {
		return err
	}

	o, ok := lock.OwnerFrom(ctx)
	if !ok {
		return l.Object().Refused("release", ErrNoOwner)
	}

	for _, h := range slices.Backward(l.takenBy(o)) {
		if err := h.Unlock(ctx); !errors.Is(err, lock.ErrNotHeld) {
			return err
		}
	}

	return l.Object().Refused("release", NotHeldBy(o))
}

// ErrNoOwner is for an Unlock by owner whose context names no owner.
var ErrNoOwner = fmt.Errorf("%w: the context names no owner (see lock.WithOwner)", lock.ErrInvalid)

// NotHeldBy is for an Unlock by an owner that has no hold.
func NotHeldBy(o lock.Owner) error { return fmt.Errorf("%w: by owner %v", lock.ErrNotHeld, o) }

// Do is lock.Do of an object, which the error of a call without a function names.
func Do(ctx context.Context, of wire.Object, l lock.Locker, fn func(ctx context.Context) error, opts ...lock.Option) error {
	if fn == nil {
		return of.Refused("acquire", fmt.Errorf("%w: the function is nil", lock.ErrInvalid))
	}
	return lock.Do(ctx, l, fn, opts...)
}

// holders returns the claims that this process holds, also on locks that exclude this one.
func (l *Lock) holders() []*claim { return As[*claim](l.e.Holders(l.queue)) }

// heldBy returns the holds that an owner has in this process, the latest last.
func (l *Lock) heldBy(o lock.Owner) (held []*Hold) {
	for _, c := range l.holders() {
		if c.lock.sameKind(l) {
			held = append(held, c.heldBy(o)...)
		}
	}
	return held
}

// takenBy returns the holds that an owner has in this process, and those that it has lost without
// having heard of it from Unlock. The latest is the last.
func (l *Lock) takenBy(o lock.Owner) []*Hold {
	taken := append(l.heldBy(o), l.e.lost.of(l, o)...) // in this order: a hold may be lost meanwhile
	slices.SortStableFunc(taken, func(a, b *Hold) int { return a.sent.Compare(b.sent) })
	return taken
}

// maxLost bounds the lost holds that a client remembers.
const maxLost = 1000

// lostHolds are the holds that the owners named by the callers of one client have lost, the latest
// last, until Unlock returns the loss. An owner that uses UnlockOwner need not keep its holds.
type lostHolds struct {
	mu  sync.Mutex
	all []*Hold
}

// add adds a hold, and forgets the oldest one if there are too many.
func (l *lostHolds) add(h *Hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.all) == maxLost {
		l.all = slices.Delete(l.all, 0, 1)
	}
	l.all = append(l.all, h)
}

// remove removes a hold, if it is there.
func (l *lostHolds) remove(h *Hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.all, h); i >= 0 {
		l.all = slices.Delete(l.all, i, i+1)
	}
}

// of returns the holds on a lock that owner has lost.
func (l *lostHolds) of(on *Lock, owner lock.Owner) (lost []*Hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.all { // without the mutexes of their claims, which are locked before l.mu
		if of := h.claim.lock; of.queue == on.queue && of.sameKind(on) && h.claim.owner == owner {
			lost = append(lost, h)
		}
	}
	return lost
}

// Force runs open, which opens the lock by force and reports whether it was held, and ends
// the holds of this process and kind that it has opened.
func (l *Lock) Force(ctx context.Context, open func() (bool, error)) (bool, error) {
	if err := l.Refuses(ctx, "force unlock"); err != nil {
		return false, err
	}

	before := l.holders()
	began := time.Now()
	held, err := open()
	if err != nil {
		return false, l.failed(ctx, "force unlock", began, err)
	}
	if held {
		for _, c := range l.holders() {
			if !c.lock.sameKind(l) { // a writer may read too
				continue
			}
			if slices.Contains(before, c) {
				c.Lost(lock.ReasonGone, nil)
				continue
			}
			// It was granted meanwhile, before the lock was opened or after.
			if err := c.lengthen(ctx, max(c.lease.Remaining(), time.Millisecond)); err != nil && err != errGone {
				return true, l.failed(ctx, "force unlock", began, err)
			}
		}
	}

	l.e.Wake(l.queue)
	return held, nil
}

// TTL returns the time after which the lock becomes free if it is neither renewed nor
// released: 0 if it is free now, lock.NoExpiry if never.
func (l *Lock) TTL(ctx context.Context) (time.Duration, error) {
	if err := l.Refuses(ctx, "read"); err != nil {
		return 0, err
	}

	began := time.Now()
	ttl, err := wire.Number(wire.Read(ctx, l.s.Client, "PTTL", l.key), wire.Times)
	if err != nil {
		return 0, l.Object().ReadFailed(ctx, "read", began, err)
	}
	if ttl == -2 { // there is no key
		return 0, nil
	}
	if ttl == -1 {
		return lock.NoExpiry, nil
	}
	return max(wire.Duration(ttl), 1), nil // it is there
}

// HoldCount returns how many holds owner has: in this process, or else what read finds on the
// server.
func (l *Lock) HoldCount(ctx context.Context, owner lock.Owner, read func() (int64, error)) (int, error) {
	if err := l.Refuses(ctx, "read"); err != nil {
		return 0, err
	}
	if owner.IsZero() {
		return 0, l.Object().Refused("read", fmt.Errorf("%w: the zero owner holds nothing", lock.ErrInvalid))
	}

	local := 0
	for _, h := range l.heldBy(owner) {
		if h.current("") == nil {
			local++
		}
	}

	if local > 0 {
		return local, nil
	}

	began := time.Now()
	n, err := read()
	if err != nil && !rueidis.IsRedisNil(err) {
		return 0, l.Object().ReadFailed(ctx, "read", began, err)
	}

	return int(n), nil
}

// HashCount is HoldCount for a lock that is a hash with a field for each owner.
func (l *Lock) HashCount(ctx context.Context, owner lock.Owner, field string) (int, error) {
	return l.HoldCount(ctx, owner, func() (int64, error) { return wire.Read(ctx, l.s.Client, "HGET", l.key, field).AsInt64() })
}

// failed returns the error of a call for op that began then.
func (l *Lock) failed(ctx context.Context, op string, began time.Time, err error) error {
	return l.Object().Failed(ctx, op, began, err)
}

// sameKind reports whether other, of the same name, is of the same kind.
func (l *Lock) sameKind(other *Lock) bool { return l.kind.Name == other.kind.Name }

// ID identifies the lock. Locks of kinds that exclude each other have the same identity.
func (l *Lock) ID() LockID { return LockID{Client: l.s.ID, Key: l.queue} }
