// Package hold is the life of a hold: of a lock, of a permit of a semaphore, or of several
// locks acquired as one.
package hold

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redlatch/redlatch/internal/callsite"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/telemetry"
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
// except for that of its group.
type State struct {
	Site callsite.Site // where the hold was acquired; set by Given

	// Fixed is set if the hold is not renewed, and Member if it is one of several that are taken as
	// one. They are the embedding type's.
	Fixed, Member bool

	phase    phase
	disowned bool
	mu       sync.Mutex
	since    int64           // Unix time in nanoseconds of Given
	ctx      context.Context // the parent of the hold's context until cancel is set
	release  unending        // the context of the release
	rare     *Rare           // what few holds have, or nil
}

// Rare is what few holds have.
type Rare struct {
	span   *telemetry.Hold
	lost   *lock.LostError
	cancel context.CancelCauseFunc // set by the first call of Context
	group  Group
}

type phase uint8

const (
	_ phase = iota // not acquired yet
	held
	lost
	ended
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
	s.phase, s.ctx = held, parent
	if span != nil {
		s.more().span = span
	}
}

// Reserve gives a hold that is not held yet room for what few holds have, so that Watch need not
// allocate it.
func (s *State) Reserve(r *Rare) { s.rare = r }

// more returns what few holds have, to be changed. s.mu is held.
func (s *State) more() *Rare {
	if s.rare == nil {
		s.rare = &Rare{}
	}
	return s.rare
}

// known returns what few holds have, to be read. s.mu is held.
func (s *State) known() Rare {
	if s.rare == nil {
		return Rare{}
	}
	return *s.rare
}

// Span returns the span of the hold.
func (s *State) Span() *telemetry.Hold {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known().span
}

// Given notes that a caller gets the hold, and where it is. Without it the hold is a part of another.
func (s *State) Given(to callsite.Site) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Site, s.since = to, time.Now().UnixNano()
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
	if s.phase != held {
		return session.Hold{}
	}
	l.Disowned = s.disowned
	if s.since != 0 {
		l.Site, l.Since = s.Site, time.Unix(0, s.since)
	}
	return l
}

// Lose makes the hold lost. It reports whether the hold was held; the caller must then call
// EndSpan.
func (s *State) Lose(loss *lock.LostError) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.phase != held {
		return false
	}
	s.phase, s.more().lost = lost, loss
	s.finish(loss, loss.Name)
	return true
}

// EndSpan ends the span of a lost hold. An exporter may block and the caller may be the
// watchdog, so it runs in the background. background reports false if it runs nothing any
// more.
func (s *State) EndSpan(background func(f func(context.Context)) bool) {
	s.mu.Lock()
	has := s.known()
	s.mu.Unlock()
	end := func(context.Context) { has.span.End(has.lost) }
	if has.span != nil && !background(end) {
		end(context.Background())
	}
}

// End ends the hold for op, the release of the lock of that name. It returns nil if the hold
// was held; the caller must then call StartRelease. Otherwise it returns the loss, once, or
// an error that matches lock.ErrNotHeld.
func (s *State) End(op, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.err(op, name)
	switch s.phase {
	case held:
		s.phase = ended
		s.finish(context.Canceled, name) // before another caller can acquire the lock
	case lost:
		s.phase = ended
	}
	return err
}

// StartRelease begins the span of the release of a hold that End has ended. It returns the
// context for the requests, which ctx does not cancel. released is for Released.
func (s *State) StartRelease(ctx context.Context) (reqCtx context.Context, released func(error)) {
	ctx, released = s.Span().StartRelease(ctx)
	if ctx.Done() != nil {
		s.release.Context = ctx // a hold is released once
		ctx = &s.release
	}
	return ctx, released
}

// unending is context.WithoutCancel without an allocation.
type unending struct{ context.Context }

func (*unending) Deadline() (time.Time, bool) { return time.Time{}, false }
func (*unending) Done() <-chan struct{}       { return nil }
func (*unending) Err() error                  { return nil }

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

// finish cancels the context and notifies the group. s.mu is held.
func (s *State) finish(cause error, name string) {
	if s.rare == nil {
		return
	}
	if s.rare.cancel != nil {
		s.rare.cancel(cause)
	}
	s.notifyGroup(name)
}

func (s *State) notifyGroup(name string) {
	has := s.known()
	if has.group == nil {
		return
	}
	loss := has.lost
	if loss == nil { // unlocked by its owner
		loss = &lock.LostError{Name: name, Reason: lock.ReasonGone, When: time.Now()}
	}
	has.group.MemberEnded(loss)
}

// Watch calls g once when the hold of that name ends, now if it has ended. A nil g undoes it.
func (s *State) Watch(g Group, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.more().group = g
	if s.phase != held {
		s.notifyGroup(name)
	}
}

// Group returns the group of Watch, or nil.
func (s *State) Group() Group {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known().group
}

// Held reports whether the hold is held.
func (s *State) Held() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.phase == held
}

// Loss returns the loss of the hold, or nil. End does not change it.
func (s *State) Loss() *lock.LostError {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known().lost
}

// Err returns nil if the hold is held, its loss until End has returned it, and otherwise an
// error of op that matches lock.ErrNotHeld.
func (s *State) Err(op, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err(op, name)
}

func (s *State) err(op, name string) error {
	switch s.phase {
	case held:
		return nil
	case lost:
		return s.rare.lost
	default:
		return fmt.Errorf("%w: %s %q", lock.ErrNotHeld, op, name)
	}
}

// Context implements lock.Hold. Most short critical sections never call it, so the first
// call creates the context.
func (s *State) Context() context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known().cancel != nil {
		return s.ctx
	}
	has := s.more()
	s.ctx, has.cancel = context.WithCancelCause(s.ctx)
	switch {
	case has.lost != nil:
		has.cancel(has.lost)
	case s.phase == ended:
		has.cancel(context.Canceled)
	}
	return s.ctx
}

// RenewalFailed is that of a watchdog.Holder.
func (s *State) RenewalFailed(err error, left time.Duration) { s.Span().RenewalFailed(err, left) }
