package session

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

const (
	// maxCleanups bounds how many cleanups are pending. Beyond that the oldest is dropped:
	// what it would remove expires.
	maxCleanups = 10_000
	// cleanupsAtOnce bounds how many run at the same time.
	cleanupsAtOnce = 16
	// lastCleanup bounds how long Close waits for those that are still pending.
	lastCleanup = time.Second

	// MinPause and MaxPause bound the pauses between attempts of a request that is repeated.
	MinPause = 20 * time.Millisecond
	MaxPause = time.Second
)

// Retry makes a request that can be repeated, again and again until it succeeds, its error is
// final, ctx is done, or another attempt would begin after patience. If the session closes, one
// more attempt follows. The error is that of the last attempt and the reason to stop.
func (s *Session) Retry(ctx context.Context, patience time.Duration, request func(ctx context.Context) error,
	final func(error) bool) error {
	began := time.Now()
	for pause := MinPause; ; pause = min(2*pause, MaxPause) {
		closed := s.Err()
		attempt, cancel := s.Bounded(ctx)
		err := request(attempt)
		cancel()
		switch {
		case err == nil || final(err):
			return err
		case closed != nil:
			return errors.Join(closed, err)
		case time.Since(began)+pause > patience:
			return err
		}
		select {
		case <-time.After(pause):
		case <-s.Done():
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// Cleanup removes what a request with an unknown outcome may have left. It makes one request
// and returns the pause before the next, or a negative number if it is done.
type Cleanup func(ctx context.Context) time.Duration

// cleanups are the pending cleanups of a session. One goroutine starts them when they are due.
type cleanups struct {
	mu      sync.Mutex
	pending []pendingCleanup
	running int           // cleanups under way
	started bool          // the goroutine runs
	wake    chan struct{} // has room for one
}

type pendingCleanup struct {
	run        Cleanup
	due, until time.Time
}

// CleanUp runs c in the background, at once and then after the pauses that it returns, for
// d at most. When the session closes, each pending cleanup runs once more. If the session
// is closed already, c runs once before CleanUp returns.
func (s *Session) CleanUp(d time.Duration, c Cleanup) {
	now := time.Now()
	if !s.cleanups.add(s, pendingCleanup{c, now, now.Add(d)}) {
		ctx, cancel := context.WithTimeout(context.Background(), lastCleanup)
		defer cancel()
		c(ctx)
	}
}

// add makes p pending. It reports false if the session is closed.
func (cs *cleanups) add(s *Session, p pendingCleanup) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if !cs.started {
		cs.wake = make(chan struct{}, 1)
		if cs.started = s.Go(func(ctx context.Context) { cs.loop(ctx, s) }); !cs.started {
			return false
		}
	}
	if len(cs.pending) == maxCleanups {
		cs.pending = slices.Delete(cs.pending, 0, 1)
	}
	cs.pending = append(cs.pending, p)
	cs.signal()
	return true
}

func (cs *cleanups) signal() {
	select {
	case cs.wake <- struct{}{}:
	default:
	}
}

// loop runs the cleanups until none is left.
func (cs *cleanups) loop(ctx context.Context, s *Session) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	closing := ctx.Done()
	for {
		cs.mu.Lock()
		if ctx.Err() != nil && cs.running == 0 || len(cs.pending)+cs.running == 0 {
			rest := cs.pending
			cs.pending, cs.started = nil, false
			cs.mu.Unlock()
			runOnce(rest)
			return
		}
		if ctx.Err() == nil {
			timer.Reset(cs.start(ctx, s))
		}
		cs.mu.Unlock()
		select {
		case <-cs.wake:
		case <-timer.C:
		case <-closing:
			closing = nil
		}
	}
}

// start starts cleanups that are due, and returns how long it takes until the next one is.
// cs.mu is held.
func (cs *cleanups) start(ctx context.Context, s *Session) (next time.Duration) {
	now := time.Now()
	next = time.Hour
	cs.pending = slices.DeleteFunc(cs.pending, func(p pendingCleanup) bool {
		if wait := p.due.Sub(now); wait > 0 || cs.running == cleanupsAtOnce {
			next = min(next, max(wait, 0))
			return false
		}
		cs.running++
		go cs.run(ctx, s, p)
		return true
	})
	if cs.running == cleanupsAtOnce {
		return time.Hour // the end of one of them is the next event
	}
	return next
}

func (cs *cleanups) run(ctx context.Context, s *Session, p pendingCleanup) {
	ctx, cancel := context.WithDeadline(ctx, p.until)
	defer cancel()
	reqCtx, end := s.Bounded(ctx)
	pause := p.run(reqCtx)
	end()
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.running--
	if p.due = time.Now().Add(pause); pause >= 0 && p.due.Before(p.until) {
		cs.pending = append(cs.pending, p)
	}
	cs.signal()
}

// runOnce runs cleanups that are still pending when the session closes.
func runOnce(rest []pendingCleanup) {
	ctx, cancel := context.WithTimeout(context.Background(), lastCleanup)
	defer cancel()
	var done sync.WaitGroup
	defer done.Wait()
	for batch := range slices.Chunk(rest, max(1, (len(rest)+cleanupsAtOnce-1)/cleanupsAtOnce)) {
		done.Go(func() {
			for _, p := range batch {
				p.run(ctx)
			}
		})
	}
}
