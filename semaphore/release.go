package semaphore

import (
	"context"
	"strconv"
	"time"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/wire"
)

// The results of a release.
const (
	releaseTooMany = -1
	releaseAbsent  = 0
	releaseDone    = 1
	releasePartly  = 2 // some of the permits were not acquired
)

// release releases permits and serves waiting requests of this process in the same round trip, if
// there are any. It retries until patience runs out and then continues in the background. With
// ifExists set it does not create a semaphore without leases, and of permits with ids it releases
// those that are acquired; otherwise all or none.
func (p *pool) release(ctx context.Context, patience time.Duration, g grant, ifExists bool) (int64, error) {
	seq := p.slots.next()
	own := append([]string{strconv.Itoa(g.permits), wire.Flag(ifExists)}, g.ids...)
	var reply []int64
	var err error
	send := func(batch []*request) []engine.Answer {
		sentCount := p.sendCount(batch, g.permits)
		seq.batch = sentCount
		seq.idle = idleOf(batch[:sentCount])
		sent := time.Now() // of the first attempt: a later one may find the release done
		grants, args := p.encode(batch[:sentCount], sent, true)
		args = append(own, args...)
		var outcome wire.Outcome
		reply, outcome, err = p.retry(ctx, patience, seq, p.scripts.release, args)
		if err != nil && outcome != wire.Refused {
			err = ended(err, outcome)
			p.outcomeUnknown(batch[:sentCount], p.repeat(seq, p.scripts.release, always(args), func(reply []int64) {
				if len(reply) > 2 { // too late for the waiters
					p.giveBack(grants[:reply[2]])
				}
			}))
		} else {
			p.slots.done(seq)
		}
		if err != nil {
			return failed(batch, &engine.Unavailable{Err: err})
		}
		if reply[0] < releaseDone {
			return make([]engine.Answer, len(batch)) // they make attempts of their own
		}
		p.s.Telemetry.HandedOver(ctx, p.id, int(reply[2]))
		return p.apply(batch, sentCount, sent, reply[2:])
	}
	offered := p.queues.Offer(p.queueKey, func(all []engine.Acquirer) []engine.Answer { return send(engine.As[*request](all)) })
	if !offered {
		send(nil)
	}
	if err != nil {
		return 0, err
	}
	if !offered && reply[0] >= releaseDone {
		p.queues.Gave(p.queueKey, p.channel, int(reply[1]))
	}
	return reply[0], nil
}

// giveBack releases permits of requests that no longer wait, in the background. It does
// not create a semaphore that was deleted meanwhile.
func (p *pool) giveBack(grants []grant) {
	for _, g := range grants {
		p.s.CleanUp(retryTime, func(ctx context.Context) (time.Duration, error) {
			_, _ = p.release(ctx, 0, g, true)
			return -1, nil
		})
	}
}
