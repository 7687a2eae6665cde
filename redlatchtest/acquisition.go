package redlatchtest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// acquisition is a call that waits for a Locker, and then its hold.
type acquisition struct {
	engine.State
	locker  *Locker
	owner   lock.Owner      // that the call named, or zero
	parent  context.Context // of the context of the hold
	options lock.Options
	granted chan struct{} // closed when claim is set

	elsewhere bool // it is of HoldElsewhere

	// The mutex of the locker guards these.
	claim *claim
	ends  time.Time   // when the hold is lost, or zero
	sure  time.Time   // the latest time of Extend, or the end of a fixed lease
	timer *time.Timer // for ends, or nil
}

func (l *Locker) newAcquisition(ctx context.Context, o lock.Options) *acquisition {
	owner, _ := lock.OwnerFrom(ctx)
	return &acquisition{locker: l, owner: owner, parent: engine.HoldParent(ctx, o), options: o, granted: make(chan struct{})}
}

// begin makes a a hold of c. The mutex of the locker is held, also for lose and drop.
func (a *acquisition) begin(c *claim) {
	a.claim = c
	c.holds = append(c.holds, a)
	a.Begin(a.parent, nil)
	if d := max(a.options.Lease, a.options.MaxHold); d > 0 {
		a.ends = time.Now().Add(d)
		a.timer = time.AfterFunc(d, a.locker.tick)
	}
	if a.options.Lease > 0 {
		a.sure = a.ends
	}
	close(a.granted)
}

func (a *acquisition) lose(reason lock.Reason) {
	a.State.Lose(&lock.LostError{Name: a.locker.name, Owner: a.claim.id, Reason: reason, When: time.Now()})
}

// drop takes an ended hold off its claim, and reports whether it was the last.
func (a *acquisition) drop() (last bool) {
	if a.timer != nil {
		a.timer.Stop()
	}
	if end := a.leased(); end.After(a.claim.lease) {
		a.claim.lease = end
	}
	if i := slices.Index(a.claim.holds, a); i >= 0 {
		a.claim.holds = slices.Delete(a.claim.holds, i, i+1)
	}
	return len(a.claim.holds) == 0
}

// leased returns the end of the lease that a, which ends, has on the server. A lease there never gets
// shorter, whatever other holds the claim has.
func (a *acquisition) leased() time.Time {
	if a.options.Lease > 0 {
		return a.sure
	}

	end := time.Now()
	if !a.ends.IsZero() && a.ends.Before(end) { // the timer may be late
		end = a.ends
	}

	if end = end.Add(lastLease); a.sure.After(end) {
		end = a.sure
	}
	return end
}

// Name implements lock.Hold.
func (a *acquisition) Name() string { return a.locker.name }

// Object implements engine.Droppable.
func (a *acquisition) Object() wire.Object { return a.locker.object() }

// Owner implements lock.Hold.
func (a *acquisition) Owner() lock.Owner { return a.claim.id }

// Token implements lock.Hold.
func (a *acquisition) Token() int64 { return a.claim.token }

// Context implements lock.Hold.
func (a *acquisition) Context() context.Context { return a.ContextOf(a) }

// Remaining implements lock.Hold. A hold without a fixed lease is as if it was renewed just now.
func (a *acquisition) Remaining() time.Duration {
	a.locker.enter()
	defer a.locker.mu.Unlock()

	if !a.Held() {
		return 0
	}

	left := max(redlatch.DefaultWatchdogTimeout, time.Until(a.sure))
	if !a.ends.IsZero() {
		left = min(left, time.Until(a.ends))
	}
	return left
}

// Extend implements lock.Hold.
func (a *acquisition) Extend(ctx context.Context, lease time.Duration) error {
	a.locker.enter()
	defer a.locker.mu.Unlock()

	if err := a.Err("extend", a.Object()); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return a.Object().Failed(ctx, "extend", time.Now(), lock.ErrUnavailable)
	}
	if until := time.Now().Add(lease); until.After(a.sure) {
		a.sure = until
		if a.options.Lease > 0 {
			a.ends = until
			a.timer.Reset(lease)
		}
	}

	return nil
}

// Detach implements lock.Hold. No other process can adopt the lock.
func (a *acquisition) Detach(context.Context, time.Duration) (string, error) {
	return "", a.Object().Refused("detach", fmt.Errorf("%w: the lock is in memory", lock.ErrUnsupported))
}

// Unlock implements lock.Hold.
func (a *acquisition) Unlock(context.Context) error {
	a.locker.enter()
	defer a.locker.mu.Unlock()
	if err := a.locker.end(a); err != nil {
		return err
	}
	return a.locker.failed("release", next(&a.locker.unlockErrs))
}

// Dropped implements engine.Droppable. Handles of a Locker do not call it.
func (a *acquisition) Dropped() {}

// Conflicts implements engine.ContextHold.
func (a *acquisition) Conflicts(engine.LockID, lock.Owner) bool { return false }

// Break implements engine.ContextHold.
func (a *acquisition) Break(reason lock.Reason) bool {
	a.locker.enter()
	defer a.locker.mu.Unlock()
	if !a.Held() {
		return false
	}
	a.locker.loseAll(reason)
	return true
}
