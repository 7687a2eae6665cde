package session

import (
	"context"
	"fmt"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// maxDrainPause bounds the pause between two looks at what the session still holds. Looking costs
// the holder of a lock nothing, unlike a signal at the end of each hold.
const maxDrainPause = 20 * time.Millisecond

// Stopping returns a channel that is closed when the session begins to shut down or to close: there
// are no acquisitions any more.
func (s *Session) Stopping() <-chan struct{} { return s.stopCtx.Done() }

// StopContext returns a context that ends when Stopping is closed.
func (s *Session) StopContext() context.Context { return s.stopCtx }

// Stopped returns lock.ErrClosed if Stopping is closed.
func (s *Session) Stopped() error {
	if s.stopCtx.Err() != nil {
		return lock.ErrClosed
	}
	return nil
}

// Shutdown ends all waits and refuses acquisitions, waits until nothing is held any more, and
// closes the session. If ctx ends first, or the session is closed meanwhile while something is held,
// it returns an error with the number of holds that are lost.
func (s *Session) Shutdown(ctx context.Context) error {
	if s.Err() != nil {
		s.Close() // it may be under way
		return nil
	}

	s.stop()
	least := time.Now().Add(lastCleanup)
	err := s.drain(ctx)
	if err != nil {
		// The requests under way have had all that time.
		s.shutBy.Store(&least)
		if s.Conns != nil {
			cut := time.AfterFunc(time.Until(least), s.Conns.Cut)
			defer cut.Stop()
		}
	}
	s.Close()
	if err == nil && s.left > 0 {
		err = lock.ErrClosed // by another call
	}
	if err != nil {
		return fmt.Errorf("redlatch: closed before everything was released (holds left: %d): %w", s.left, err)
	}

	return nil
}

// drain waits until the session is idle or closed. If ctx ends first it returns the cause.
func (s *Session) drain(ctx context.Context) error {
	for pause := time.Millisecond; !s.idle(); pause = min(2*pause, maxDrainPause) {
		select {
		case <-time.After(pause):
		case <-s.Done():
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}

	return nil
}

// idle reports whether a session that is stopping has nothing left to do. Acquisitions that were
// under way have become holds before these are counted, and releases are looked for afterwards.
func (s *Session) idle() bool {
	if !s.noCallers() || s.joined.Load() > 0 {
		return false
	}

	for h := range s.Holds() {
		if h.awaited() {
			return false
		}
	}

	return s.noCallers() && s.Running() == s.cleanups.resting()
}

// noCallers reports whether no call is between Enter and Leave.
func (s *Session) noCallers() bool {
	free := s.callers.TryLock()
	if free {
		s.callers.Unlock()
	}
	return free
}

// awaited reports whether Shutdown waits for the end of h.
func (h Hold) awaited() bool { return !h.Waiting && !h.Disowned }

// countHolds returns the number of holds that callers have and that Shutdown would wait for.
func (s *Session) countHolds() (n int) {
	for h := range s.Holds() {
		if h.awaited() && !h.Site.IsZero() {
			n++
		}
	}
	return n
}
