package semaphore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/redlatch/redlatch/internal/acquire"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

// The results of a release.
const (
	releaseTooMany = -1
	releaseAbsent  = 0
	releaseDone    = 1
)

// release releases permits and serves waiting requests of this process in the same round
// trip. It retries until patience runs out and then continues in the background.
func (p *pool) release(ctx context.Context, patience time.Duration, g grant, ifExists bool) (int64, error) {
	own := g.ids
	if !p.expirable() {
		own = []string{wire.Flag(ifExists)}
	}
	own = append([]string{strconv.Itoa(g.permits)}, own...)
	seq := p.slots.next()
	var reply []int64
	var outcome wire.Outcome
	var err error
	offered := p.queues().Offer(p.queueKey(), func(batch []*request) []acquire.Result {
		sentCount := p.sendCount(batch, g.permits)
		sent := time.Now() // of the first attempt: a later one may find the release done
		grants, args := p.encode(batch[:sentCount], sent, true)
		args = append(slices.Clip(own), args...)
		reply, outcome, err = p.retry(ctx, seq, patience, p.scripts.release, args)
		switch {
		case err == nil && reply[0] == releaseDone:
			p.s.Telemetry.HandedOver(ctx, p.telemetryLock(), int(reply[2]))
			return p.apply(batch, sentCount, sent, reply[2:])
		case err == nil:
			return make([]acquire.Result, len(batch)) // they make attempts of their own
		case outcome != wire.Refused:
			p.outcomeUnknown(batch[:sentCount])
			p.continueRelease(seq, args, grants)
		}
		return failed(len(batch), &acquire.Unavailable{Err: fmt.Errorf("redlatch: acquire permits of %q: %w", p.name, err)})
	})
	if !offered {
		_, args := p.encode(nil, time.Time{}, true)
		args = append(own, args...)
		reply, outcome, err = p.retry(ctx, seq, patience, p.scripts.release, args)
		if err != nil && outcome != wire.Refused {
			p.continueRelease(seq, args, nil)
		}
	}
	if err == nil || outcome == wire.Refused {
		p.slots.done(seq)
	}
	switch {
	case err != nil && outcome != wire.Refused:
		return 0, errors.Join(lock.ErrIndeterminate, err) // the background may still succeed
	case err != nil:
		return 0, err
	}
	if !offered && reply[0] == releaseDone && reply[1] == 0 {
		// The message had no receivers: waiters of this process must not depend on it.
		p.queues().Wake(p.queueKey())
	}
	return reply[0], nil
}

// continueRelease retries a release in the background. Permits that it acquires for
// waiters come too late and are released as well.
func (p *pool) continueRelease(seq *sequence, args []string, grants []grant) {
	p.background(func(ctx context.Context, patience time.Duration) {
		reply, _, err := p.retry(ctx, seq, patience, p.scripts.release, args)
		p.slots.done(seq)
		if err == nil && reply[0] == releaseDone && int(reply[2]) > 0 {
			p.giveBack(grants[:reply[2]])
		}
	})
}

// giveBack releases permits of requests that no longer wait, in the background. It does
// not create a semaphore that was deleted meanwhile.
func (p *pool) giveBack(grants []grant) {
	p.background(func(ctx context.Context, patience time.Duration) {
		for _, g := range grants {
			_, _ = p.release(ctx, patience, g, true)
		}
	})
}
