package locking

import (
	"context"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
)

// cleanupPauses are the pauses before further releases of a claim that was not found: its
// acquisition may still be on its way, on a connection that was given up.
var cleanupPauses = []time.Duration{50 * time.Millisecond, 250 * time.Millisecond, time.Second, 3 * time.Second}

// cleanUp releases a claim with an unknown outcome in the background, until its lease ends at
// the latest. With again set it goes on after a release that found nothing, because an
// acquisition may run after it. It reports false if the client is closing.
func (l *Lock) cleanUp(c Claim, again bool) bool {
	return l.s.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, c.Lease)
		defer cancel()
		misses, pause := 0, minReleaseWait
		for {
			freed, err := l.p.Release(ctx, &c)
			switch {
			case err != nil && wire.OutcomeOf(err) == wire.Refused:
				return
			case err != nil:
				pause = min(2*pause, maxReleaseWait)
			case freed.State != NotHeld, !again, misses == len(cleanupPauses):
				return
			default:
				pause = cleanupPauses[misses]
				misses++
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
		}
	})
}

// undo cleans up after a claim that may stand, with one request if the client is closing.
func (l *Lock) undo(c Claim) {
	if !l.cleanUp(c, true) {
		l.closing(func(ctx context.Context) { _, _ = l.p.Release(ctx, &c) })
	}
}

// leave removes the queue position of a claim that no longer waits, in the background. It is
// retried for as long as the position may block others.
func (l *Lock) leave(c Claim) {
	p := l.p.(Positioned)
	started := l.s.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, l.s.FairWait)
		defer cancel()
		for pause := minReleaseWait; ; pause = min(2*pause, maxReleaseWait) {
			if err := p.Leave(ctx, &c); err == nil || wire.OutcomeOf(err) == wire.Refused {
				return
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
		}
	})
	if !started {
		l.closing(func(ctx context.Context) { _ = p.Leave(ctx, &c) })
	}
}

// closing runs one last request, which Close waits for.
func (l *Lock) closing(request func(ctx context.Context)) {
	ctx, cancel := context.WithTimeout(context.Background(), maxReleaseWait)
	defer cancel()
	request(ctx)
}
