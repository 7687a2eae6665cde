package engine

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// State is the state of a hold, to be embedded in it:
//
//	(zero) ──Begin──▶ held ──End──▶ ended
//	                   │              ▲
//	                   └─Lose─▶ lost ─┘ (End returns the loss)
//
// Its methods are safe for concurrent use. If several holds change together, the caller
// holds a mutex of its own meanwhile. The mutex of a State is locked after all others,
// except for the mutex of its group.
type State struct {
	Site callsite.Site // where the hold was acquired; set by Given

	// Fixed is set if the hold is not renewed, and Member if it is one of several that are taken as
	// one. The embedding type guards them.
	Fixed, Member bool

	phase    phase
	disowned bool
	mu       sync.Mutex
	since    time.Time               // of Given
	ctx      context.Context         // the parent of the hold's context until cancel is set
	cancel   context.CancelCauseFunc // set by the first call of Context
	span     *telemetry.Hold         // nil if nobody reads it
	lost     *lock.LostError         // the loss, or nil
	group    Group                   // of Watch, or nil
}

type phase uint8

const (
	_ phase = iota // not acquired yet
	phaseHeld
	phaseLost
	phaseEnded
)

// Group is several holds acquired as one.
type Group interface {
	// MemberEnded is called when a member was lost, or unlocked by its owner. It must not
	// block, or use the member.
	MemberEnded(cause *lock.LostError)
}

// Begin makes the hold held. parent is the parent of its context.
func (s *State) Begin(parent context.Context, span *telemetry.Hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.phase = phaseHeld
	s.ctx = parent
	s.span = span
}

// Span returns the span of the hold.
func (s *State) Span() *telemetry.Hold {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.span
}

// Given notes that a caller gets the hold, and where it is. Without it the hold is a part of another.
func (s *State) Given(to callsite.Site) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Site = to
	s.since = time.Now()
}

// Disown notes that no caller will end the hold, so that the shutdown of the client does not wait for
// that.
func (s *State) Disown() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disowned = true
}

// Listed returns l with what the state knows of the hold. If the hold is not held, it is about to be,
// or is being released: then the result is the zero value.
func (s *State) Listed(l session.Hold) session.Hold {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.phase != phaseHeld {
		return session.Hold{}
	}

	l.Disowned = s.disowned
	if !s.since.IsZero() {
		l.Site = s.Site
		l.Since = s.since
	}
	return l
}

// Lose makes the hold lost. It reports whether the hold was held; the caller must then call
// EndSpan.
func (s *State) Lose(loss *lock.LostError) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.phase != phaseHeld {
		return false
	}
	s.phase = phaseLost
	s.lost = loss
	s.finishLocked(loss, loss.Name)
	return true
}

// EndSpan ends the span of a lost hold. An exporter may block and the caller may be the
// watchdog, so it runs in the background. background reports false if it runs nothing any
// more.
func (s *State) EndSpan(background func(f func(context.Context)) bool) {
	s.mu.Lock()
	span := s.span
	loss := s.lost
	s.mu.Unlock()
	end := func(context.Context) { span.End(loss) }
	if span != nil && !background(end) {
		end(context.Background())
	}
}

// End ends the hold for op, the release of what errors name. It returns nil if the hold
// was held; the caller must then call StartRelease. Otherwise it returns the loss, once, or
// an error that matches lock.ErrNotHeld.
func (s *State) End(op string, of wire.Object) error {
	s.mu.Lock()
	defer s.mu.Unlock()

	err := s.errLocked(op, of)
	switch s.phase {
	case phaseHeld:
		s.phase = phaseEnded
		s.finishLocked(context.Canceled, of.Name) // before another caller can acquire the lock
	case phaseLost:
		s.phase = phaseEnded
	}

	return err
}

// StartRelease begins the span of the release of a hold that End has ended. It returns the
// context for the requests, which ctx does not cancel. released is for Released.
func (s *State) StartRelease(ctx context.Context) (reqCtx context.Context, released func(error)) {
	ctx, released = s.Span().StartRelease(ctx)
	if ctx.Done() != nil { // else it is an allocation for nothing
		ctx = context.WithoutCancel(ctx)
	}
	return ctx, released
}

// Released ends the spans of the release and of the hold. It returns err, the result of the
// release.
func (s *State) Released(released func(error), err error) error {
	released(err)
	span := s.Span()
	if err == nil {
		span.End(nil)
		return nil
	}

	var loss *lock.LostError
	errors.As(err, &loss)
	span.End(loss)
	return err
}

// finishLocked cancels the context and notifies the group.
func (s *State) finishLocked(cause error, name string) {
	if s.cancel != nil {
		s.cancel(cause)
	}
	s.notifyGroupLocked(name)
}

func (s *State) notifyGroupLocked(name string) {
	if s.group == nil {
		return
	}
	loss := s.lost
	if loss == nil { // unlocked by its owner
		loss = &lock.LostError{Name: name, Reason: lock.ReasonGone, When: time.Now()}
	}
	s.group.MemberEnded(loss)
}

// Watch calls g once when the hold of that name ends, now if it has ended. A nil g undoes it.
func (s *State) Watch(g Group, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.group = g
	if s.phase != phaseHeld {
		s.notifyGroupLocked(name)
	}
}

// Group returns the group of Watch, or nil.
func (s *State) Group() Group {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.group
}

// Held reports whether the hold is held.
func (s *State) Held() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.phase == phaseHeld
}

// Loss returns the loss of the hold, or nil. End does not change it.
func (s *State) Loss() *lock.LostError {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// Err returns nil if the hold is held, its loss until End has returned it, and otherwise an
// error of op that matches lock.ErrNotHeld.
func (s *State) Err(op string, of wire.Object) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.errLocked(op, of)
}

func (s *State) errLocked(op string, of wire.Object) error {
	switch s.phase {
	case phaseHeld:
		return nil
	case phaseLost:
		return of.Refused(op, s.lost)
	default:
		return of.Refused(op, lock.ErrNotHeld)
	}
}

// Context implements lock.Hold. Most short critical sections never call it, so the first
// call creates the context.
func (s *State) Context() context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.cancel != nil {
		return s.ctx
	}

	s.ctx, s.cancel = context.WithCancelCause(s.ctx)
	if s.lost != nil {
		s.cancel(s.lost)
	} else if s.phase == phaseEnded {
		s.cancel(context.Canceled)
	}
	return s.ctx
}

// RenewalFailed implements a method of watchdog.Holder.
func (s *State) RenewalFailed(err error, left time.Duration) { s.Span().RenewalFailed(err, left) }
