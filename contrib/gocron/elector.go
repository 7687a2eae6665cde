package redlatchgocron

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/go-co-op/gocron/v2"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/lock"
)

var _ gocron.Elector = (*Elector)(nil)

// ErrNotLeader is the error of IsLeader if this process does not lead.
var ErrNotLeader = errors.New("redlatch: not the leader")

var errClosed = errors.New("the elector is closed")

// Elector is a gocron.Elector that campaigns in the background, from NewElector to Close. It is safe
// for concurrent use, by several schedulers too.
//
// An Elector excludes no runs. A job that runs when its leader changes may run for the same occasion
// under the next leader, if the clock of that is late, and a job of the former leader goes on unless
// it heeds Context. Use a Locker where that matters.
type Elector struct {
	name   string
	cancel context.CancelCauseFunc
	term   atomic.Pointer[election.Term]
	ended  chan struct{} // closed when err is valid
	err    error
}

// NewElector becomes a candidate of the election with that name, until ctx ends or Close is called, and
// again after each term. Observers of the election read value, for example an address. The options are
// those of election.Campaign. The error matches lock.ErrInvalid or lock.ErrClosed; NewElector does not
// ask the server.
func NewElector(ctx context.Context, client *redlatch.Client, name, value string, opts ...lock.Option) (*Elector, error) {
	_, optErr := lock.Resolve(opts...)
	if err := cmp.Or(
		valid(client != nil, "NewElector: the client is nil"),
		valid(ctx != nil, "NewElector: the context is nil"),
		optErr,
	); err != nil {
		return nil, refused(err)
	}
	opts = append([]lock.Option{lock.Site(1)}, opts...)
	ctx, cancel := context.WithCancelCause(ctx)
	e := &Elector{name: name, cancel: cancel, ended: make(chan struct{})}
	candidacy := client.Election(name)
	if err := check(candidacy); err != nil {
		cancel(nil)
		return nil, err
	}
	go func() {
		defer close(e.ended)
		e.err = candidacy.Run(ctx, value, func(led context.Context, term *election.Term) error {
			e.term.Store(term)
			// With lock.Parent the context of the term is no child of ctx.
			select {
			case <-led.Done():
			case <-ctx.Done():
			}
			return nil
		}, opts...)
	}()
	return e, nil
}

// check returns the error of each request to the election, if any. It sends nothing, because the context
// of its own request has ended.
func check(e *election.Election) error {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := e.Leader(ended)
	if errors.Is(err, lock.ErrInvalid) || errors.Is(err, lock.ErrClosed) {
		return err
	}
	return nil
}

// IsLeader returns nil while it is certain, by the local monotonic clock, that no other process leads.
// Otherwise the error matches ErrNotLeader, and also the error of Election.Run if that has ended. If
// ctx has ended, the error matches its cause. IsLeader does not block.
func (e *Elector) IsLeader(ctx context.Context) error {
	if ctx.Err() != nil {
		return e.failed(context.Cause(ctx))
	}
	if term := e.term.Load(); term != nil && term.Remaining() > 0 {
		return nil
	}
	select {
	case <-e.ended:
		return e.failed(fmt.Errorf("%w: %w", ErrNotLeader, e.err))
	default:
		return e.failed(ErrNotLeader)
	}
}

func (e *Elector) failed(err error) error {
	return &lock.Error{Op: "read", Kind: "election", Name: e.name, Err: err}
}

// Context returns a child of ctx that also ends when the current term ends, and at once if this process
// does not lead. Its cause is the cause of the term's context, or matches ErrNotLeader. Call it when
// a job begins, and the function that it returns when the job ends.
func (e *Elector) Context(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	if err := e.IsLeader(ctx); err != nil {
		cancel(err)
		return ctx, func() {}
	}
	led := e.term.Load().Context()
	stop := context.AfterFunc(led, func() { cancel(context.Cause(led)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// Close resigns and ends the candidacy. It blocks until the server has answered, for 5 s at most.
// IsLeader then returns an error. A second call waits for the first.
func (e *Elector) Close() {
	e.cancel(errClosed)
	<-e.ended
}
