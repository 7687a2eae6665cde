package engine

import (
	"cmp"
	"context"
	"runtime"
	"time"

	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// Droppable is what a Handle refers to. The contexts that it gets are not nil.
type Droppable interface {
	lock.Hold
	// Owner and Detach are what lock.OwnerOf and lock.Detach ask for.
	Owner() lock.Owner
	Detach(ctx context.Context, lease time.Duration) (id string, err error)
	// Held reports whether the hold is held.
	Held() bool
	// Dropped is called when the handle of a held hold was collected. It stops the renewal, so that the hold lasts
	// until its lease ends: work may go on under it. Finalizers run one after the other, so Dropped does not block; it logs
	// in the background that a renewed hold was dropped.
	Dropped()
	// Object returns what errors name.
	Object() wire.Object
}

// Handle is the lock.Hold that a caller gets. Nothing else refers to it, so that a handle that
// the caller has dropped is collected.
type Handle struct{ Droppable }

// NewHandle returns a handle of h that detects that it was dropped, until Unlock or Detach.
func NewHandle(h Droppable) *Handle {
	hd := new(Handle)
	hd.Refer(h)
	return hd
}

// Refer makes the zero Handle one that NewHandle returns. If it is a field it is the first one of an
// allocated struct, which the caller must not copy.
func (hd *Handle) Refer(h Droppable) {
	hd.Droppable = h
	runtime.SetFinalizer(hd, (*Handle).dropped) // a cleanup would be two more allocations
}

// KeepUntil has the Unlock of h, a hold of this module, leave the lock held until then. It is
// lock.AtLeast for a caller whose work may fail to begin after Lock: until it has begun, Unlock
// releases the lock. A zero time changes nothing. No other goroutine uses h meanwhile.
func KeepUntil(h lock.Hold, until time.Time) {
	if hd, ok := h.(*Handle); ok {
		hd.Droppable.(interface{ KeepUntil(until time.Time) }).KeepUntil(until)
	}
}

// disarm ends the detection.
func (hd *Handle) disarm() { runtime.SetFinalizer(hd, nil) }

func (hd *Handle) dropped() {
	if hd.Held() {
		hd.Dropped()
	}
}

// Remaining implements lock.Hold.
func (hd *Handle) Remaining() time.Duration {
	d := hd.Droppable.Remaining()
	runtime.KeepAlive(hd)
	return d
}

// Extend implements lock.Hold.
func (hd *Handle) Extend(ctx context.Context, lease time.Duration) error {
	if err := cmp.Or(session.CheckContext(ctx), session.CheckLease(lease)); err != nil {
		return hd.Object().Refused("extend", err)
	}

	err := hd.Droppable.Extend(ctx, lease)
	runtime.KeepAlive(hd)
	return err
}

// Unlock implements lock.Hold.
func (hd *Handle) Unlock(ctx context.Context) error {
	if err := session.CheckContext(ctx); err != nil {
		return hd.Object().Refused("release", err)
	}
	hd.disarm() // a finalizer delays the collection
	err := hd.Droppable.Unlock(ctx)
	runtime.KeepAlive(hd)
	return err
}

// Detach implements lock.Hold.
func (hd *Handle) Detach(ctx context.Context, lease time.Duration) (string, error) {
	if err := cmp.Or(session.CheckContext(ctx), session.CheckLease(lease)); err != nil {
		return "", hd.Object().Refused("detach", err)
	}

	id, err := hd.Droppable.Detach(ctx, lease)
	if !hd.Held() {
		hd.disarm()
	}
	runtime.KeepAlive(hd)
	return id, err
}
