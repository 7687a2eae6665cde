package election

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	// safetyPoll bounds the delay that a lost message causes.
	safetyPoll = 5 * time.Second

	// minRetry and maxRetry bound the pause after a failed read.
	minRetry = 100 * time.Millisecond
	maxRetry = time.Second
)

// Observe returns an iterator over the leaders, which begins with the current one. If there is none
// it waits for the next. It may skip a leader that is replaced soon, but always arrives at the current
// one, within 5 s if a message is lost. It does not report that a term has ended before the next
// begins.
//
// The iteration blocks between leaders, and while the server does not answer. It ends with an error: when ctx ends
// with its cause, wrapped, which also matches lock.ErrUnavailable if the server did not answer then;
// lock.ErrClosed if the client is closed; a refusal of the server; or lock.ErrInvalid. Each iteration makes one
// request for each new leader, and one every 5 s. It needs no goroutine.
func (e *Election) Observe(ctx context.Context) iter.Seq2[Leader, error] {
	return func(yield func(Leader, error) bool) {
		if err := e.check(ctx); err != nil {
			yield(Leader{}, e.object().Refused("observe", err))
			return
		}
		o := &observer{e: e, began: time.Now(), wake: make(chan struct{}, 1)}
		unsubscribe, _ := e.s.Subscribe(wire.ElectionChannel(e.key), o)
		defer unsubscribe()
		defer e.s.Watchdog.Wheel().Cancel(&o.timer)
		for {
			leader, err := o.next(ctx)
			if !yield(leader, err) || err != nil {
				return
			}
		}
	}
}

// observer is an iteration over the leaders of an election.
type observer struct {
	e     *Election
	began time.Time
	last  Leader
	wake  chan struct{} // has room for one
	timer watchdog.Timer
}

// Notify implements hub.Listener. A message only says that the leader may have changed, and so
// does a subscription that begins.
func (o *observer) Notify(hub.Event) {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// Expire implements watchdog.Expirer.
func (o *observer) Expire(time.Time) { o.Notify(hub.Event{}) }

// next waits for another leader than the last.
func (o *observer) next(ctx context.Context) (Leader, error) {
	var outage error // of the last read
	for {
		leader, err := o.e.read(ctx)
		pause := safetyPoll
		if err == nil && leader != o.last {
			o.last = leader
			return leader, nil
		}

		if err == nil || err == ErrNoLeader {
			outage = nil
		} else {
			if ctx.Err() != nil {
				return Leader{}, o.ended(ctx, outage)
			}
			outage = err
			if wire.IsRefused(err) {
				return Leader{}, o.ended(ctx, outage)
			}
			pause = minRetry + rand.N(maxRetry-minRetry)
		}

		o.e.s.Watchdog.Wheel().Schedule(&o.timer, time.Now().Add(pause), o)
		select {
		case <-o.wake:
		case <-ctx.Done():
			return Leader{}, o.ended(ctx, outage)
		case <-o.e.s.Stopping():
			return Leader{}, o.ended(ctx, outage)
		}
	}
}

// ended returns the error of an iteration that ends. err is the error of the last read. Without it the
// end of ctx is an error of no kind, because nothing has failed.
func (o *observer) ended(ctx context.Context, err error) error {
	closed := o.e.s.Stopped()
	if err == nil && closed == nil {
		return o.e.object().Ended(ctx, "observe", o.began)
	}
	return o.e.object().ReadFailed(ctx, "observe", o.began, errors.Join(closed, err))
}

// parseTerm returns the leader of a term as leader.lua replies.
func parseTerm(term []string) (Leader, error) {
	if len(term) != 3 {
		return Leader{}, fmt.Errorf("redlatch: the server's reply has %d elements, not 3", len(term))
	}

	owner, err := lock.ParseOwner(term[0])
	if err != nil {
		return Leader{}, err
	}

	token, err := strconv.ParseInt(term[1], 10, 64)
	if err != nil || token < 1 || token > wire.MaxToken {
		return Leader{}, errors.New("redlatch: the token of the term is not a number from 1 to 2^53-1")
	}

	return Leader{Value: term[2], Token: token, Owner: owner}, nil
}
