package locking

import (
	"context"
	"time"

	"github.com/redlatch/redlatch/internal/wire"
)

// settlePauses are the pauses before each further release of a claim that was
// not there: the request that takes it may still be on its way, on a connection
// that was given up.
var cleanupPauses = []time.Duration{50 * time.Millisecond, 250 * time.Millisecond, time.Second, 3 * time.Second}

// cleanUp sees to it, in the background, that a claim with an unknown outcome comes to
// nothing. It stops at the latest when the lease is over. With again set an acquisition may
// even run after the release. It reports false if the client is closing.
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

// undo settles a claim of which nothing is known, with one request if the client is
// closing.
func (l *Lock) undo(c Claim) {
	if !l.cleanUp(c, true) {
		l.closing(func(ctx context.Context) { _, _ = l.p.Release(ctx, &c) })
	}
}

// leave gives up, in the background, the queue position of a claim that does not wait any
// more. It is tried for as long as others may wait for that.
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
