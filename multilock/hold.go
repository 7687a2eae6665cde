package multilock

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/lock"
)

// holdState is the state of a hold on a group:
//
//	held ──end──▶ ended
//	  │             ▲
//	  └─lose─▶ lost ┘
type holdState struct {
	group *group
	owner lock.Owner
	site  callsite.Site
	span  *telemetry.Hold

	mu     sync.Mutex
	phase  phase
	lost   *lock.LostError
	ctx    context.Context // returned by Context
	cancel context.CancelCauseFunc
}

type phase uint8

const (
	_ phase = iota // not acquired yet
	held
	lost
	ended
)

// begin makes the hold held.
func (s *holdState) begin(ctx context.Context) {
	s.owner, _ = lock.OwnerFrom(ctx)
	s.site = callsite.Here(3, 3) // skips this begin, that of the hold, and acquire
	parent, span := s.group.s.Telemetry.StartHold(ctx, s.group.info, s.owner, 0)
	s.span = span
	s.ctx, s.cancel = context.WithCancelCause(parent)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.phase = held
}

// lose marks the hold as lost. It reports whether the hold was held.
func (s *holdState) lose(reason lock.Reason, cause error) bool {
	s.mu.Lock()
	if s.phase != held {
		s.mu.Unlock()
		return false
	}
	s.phase = lost
	s.lost = &lock.LostError{Name: s.group.info.Name, Owner: s.owner, Reason: reason, When: time.Now(), Err: cause}
	s.cancel(s.lost)
	s.mu.Unlock()
	// An exporter may block, and this may be the watchdog's goroutine.
	s.background(func(context.Context) { s.span.End(s.lost) })
	return true
}

// background calls f on its own goroutine, even while the client is closing.
func (s *holdState) background(f func(ctx context.Context)) {
	if !s.group.s.Go(f) {
		go f(context.Background())
	}
}

// end ends the hold for Unlock. It returns nil if the hold was held, and otherwise the
// error for Unlock to return.
func (s *holdState) end() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.phase {
	case held:
		s.phase = ended
		s.cancel(context.Canceled) // before another caller can acquire the lock
		return nil
	case lost:
		s.phase = ended
		return s.lost
	default:
		return fmt.Errorf("%w: Unlock %q", lock.ErrNotHeld, s.group.info.Name)
	}
}

// endSpans ends the spans of a release and of the hold. It returns err, the result of the
// release.
func (s *holdState) endSpans(err error, done func(error)) error {
	done(err)
	var lostErr *lock.LostError
	errors.As(err, &lostErr)
	s.span.End(lostErr)
	return err
}

// current returns nil while the hold is held, and otherwise the reason that it is not.
func (s *holdState) current(op string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.phase {
	case held:
		return nil
	case lost:
		return s.lost
	default:
		return fmt.Errorf("%w: %s %q", lock.ErrNotHeld, op, s.group.info.Name)
	}
}

// groupHold is a hold on a Multi or a Red.
type groupHold interface {
	state() *holdState
	remaining() time.Duration
	extend(ctx context.Context, lease time.Duration) error
	unlock(ctx context.Context) error
}

// handle is the hold that the caller gets. Nothing else refers to it, so a cleanup can
// detect that the caller dropped it.
type handle struct {
	hold    groupHold
	cleanup runtime.Cleanup
}

func newHandle(h groupHold) *handle {
	hd := &handle{hold: h}
	hd.cleanup = runtime.AddCleanup(hd, dropped, h)
	return hd
}

// dropped releases a hold whose handle was collected.
func dropped(h groupHold) {
	s := h.state()
	if s.current("") != nil {
		return
	}
	s.group.s.Logger.Error("redlatch: a hold was dropped without Unlock; releasing it",
		"name", s.group.info.Name, "kind", s.group.info.Kind, "acquired", s.site.String())
	s.background(func(ctx context.Context) { _ = h.unlock(ctx) }) // clients of members may still be open
}

func (hd *handle) Name() string             { return hd.hold.state().group.info.Name }
func (hd *handle) Owner() lock.Owner        { return hd.hold.state().owner }
func (hd *handle) Token() int64             { return 0 }
func (hd *handle) Context() context.Context { return hd.hold.state().ctx }

func (hd *handle) Remaining() time.Duration {
	d := hd.hold.remaining()
	runtime.KeepAlive(hd)
	return d
}

func (hd *handle) Extend(ctx context.Context, lease time.Duration) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	if err := lock.CheckLease(lease); err != nil {
		return err
	}
	err := hd.hold.extend(ctx, lease)
	runtime.KeepAlive(hd)
	return err
}

func (hd *handle) Unlock(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: the context is nil", lock.ErrInvalid)
	}
	hd.cleanup.Stop()
	err := hd.hold.unlock(ctx)
	runtime.KeepAlive(hd)
	return err
}
