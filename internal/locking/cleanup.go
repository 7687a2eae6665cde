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
// acquisition may run after it. While the client is closing it blocks for one request.
func (l *Lock) cleanUp(c Claim, again bool) {
	misses, pause := 0, minReleaseWait
	l.s.CleanUp(c.Lease, func(ctx context.Context) time.Duration {
		freed, err := l.p.Release(ctx, &c)
		switch {
		case err != nil && wire.OutcomeOf(err) == wire.Refused:
			return -1
		case err != nil:
			pause = min(2*pause, maxReleaseWait)
			return pause
		case freed.State != NotHeld, !again, misses == len(cleanupPauses):
			return -1
		}
		misses++
		return cleanupPauses[misses-1]
	})
}

// leave removes the queue position of a claim that no longer waits, in the background. It is
// retried for as long as the position may block others.
func (l *Lock) leave(c Claim) {
	pause := minReleaseWait
	l.s.CleanUp(l.s.FairWait, func(ctx context.Context) time.Duration {
		if err := l.p.(Positioned).Leave(ctx, &c); err == nil || wire.OutcomeOf(err) == wire.Refused {
			return -1
		}
		pause = min(2*pause, maxReleaseWait)
		return pause
	})
}
