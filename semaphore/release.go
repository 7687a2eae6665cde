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
func (s *pool) release(ctx context.Context, patience time.Duration, g grant, ifExists bool) (int64, error) {
	seq := s.slots.next()
	own := append([]string{strconv.Itoa(g.permits), wire.Flag(ifExists)}, g.ids...)
	var reply []int64
	var err error
	send := func(batch []*request) []engine.Answer {
		sentCount := s.sendCount(batch, g.permits)
		sent := time.Now() // of the first attempt: a later one may find the release done
		grants, args := s.encode(batch[:sentCount], seq, sent, true)
		args = append(own, args...)
		var outcome wire.Outcome
		reply, outcome, err = s.retry(ctx, patience, seq, s.scripts.release, args)
		if err != nil && outcome != wire.Refused {
			err = ended(err, outcome)
			s.outcomeUnknown(batch[:sentCount], s.repeat(seq, s.scripts.release, always(args), func(reply []int64) {
				if len(reply) > 2 { // too late for the waiters
					s.giveBack(grants[:reply[2]])
				}
			}))
		} else {
			s.slots.done(seq)
		}
		if err != nil {
			return failed(batch, &engine.Unavailable{Err: err})
		}
		if reply[0] < releaseDone {
			return make([]engine.Answer, len(batch)) // they make attempts of their own
		}
		s.s.Telemetry.HandedOver(ctx, s.id, int(reply[2]))
		return s.apply(batch, sentCount, sent, reply[2:])
	}
	offered := s.queues.Offer(s.queueKey, func(all []engine.Acquirer) []engine.Answer { return send(engine.As[*request](all)) })
	if !offered {
		send(nil)
	}
	if err != nil {
		return 0, err
	}
	if !offered && reply[0] >= releaseDone {
		s.queues.Gave(s.queueKey, s.channel, int(reply[1]))
	}
	return reply[0], nil
}

// giveBack releases permits of requests that no longer wait, in the background. It does
// not create a semaphore that was deleted meanwhile.
func (s *pool) giveBack(grants []grant) {
	for _, g := range grants {
		s.s.CleanUp(retryTime, func(ctx context.Context) (time.Duration, error) {
			_, _ = s.release(ctx, 0, g, true)
			return -1, nil
		})
	}
}
