package multilock

import (
	"context"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/hold"
	"github.com/redlatch/redlatch/lock"
)

// groupHold is the common part of the holds on a Multi and a Red.
type groupHold struct {
	hold.State
	group *group
	owner lock.Owner
}

// begin makes the hold held.
func (h *groupHold) begin(ctx context.Context) {
	h.owner, _ = lock.OwnerFrom(ctx)
	h.Site = callsite.Here(3, 3) // skips this method, its caller begin, and acquire
	h.Begin(h.group.s.Telemetry.StartHold(ctx, h.group.info, h.owner, 0))
}

// lose marks the hold as lost. It reports whether the hold was held.
func (h *groupHold) lose(reason lock.Reason, cause error) bool {
	lost := h.Lose(&lock.LostError{Name: h.Name(), Owner: h.owner, Reason: reason, When: time.Now(), Err: cause})
	if lost {
		h.EndSpan(h.background)
	}
	return lost
}

// background calls f on its own goroutine, even while the client is closing.
func (h *groupHold) background(f func(ctx context.Context)) bool {
	if !h.group.s.Go(f) {
		go f(context.Background())
	}
	return true
}

// end ends the hold for Unlock. It returns nil if the hold was held, and otherwise the
// error for Unlock to return.
func (h *groupHold) end() error { return h.End("Unlock", h.Name()) }

// current returns nil while the hold is held, and otherwise the reason that it is not.
func (h *groupHold) current(op string) error { return h.Err(op, h.Name()) }

// dropped logs that the handle was collected, and calls unlock.
func (h *groupHold) dropped(unlock func(ctx context.Context) error) {
	h.background(func(ctx context.Context) { // clients of members may still be open
		h.group.s.Logger.Error("redlatch: a hold was dropped without Unlock; releasing it",
			"name", h.Name(), "kind", h.group.info.Kind, "acquired", h.Site.String())
		_ = unlock(ctx)
	})
}

// Name implements lock.Hold.
func (h *groupHold) Name() string { return h.group.info.Name }

// Owner implements lock.Hold.
func (h *groupHold) Owner() lock.Owner { return h.owner }

// Token implements lock.Hold.
func (h *groupHold) Token() int64 { return 0 }

func newHandle(h hold.Hold) lock.Hold {
	hd := &hold.Handle{Hold: h}
	hd.Arm()
	return hd
}
