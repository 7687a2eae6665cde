package election

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/redlatch/redlatch/internal/text"
	"github.com/redlatch/redlatch/lock"
)

// The pauses of Run double from minPause to maxPause, and each is shortened at random by half at most.
const (
	minPause = time.Second
	maxPause = 30 * time.Second
)

// Run campaigns with that value, again and again, and calls fn whenever it leads, with the context
// of the term. When fn returns, Run resigns and then pauses, so that other candidates lead
// meanwhile. The pause is about a second. It doubles with each error, of fn or of Campaign, up to
// half a minute, until a term has lasted for longer than that. Run logs these errors and continues. It
// is no error that a term ends by lock.Lease or lock.MaxHold, nor that fn returns that as its error.
//
// fn must return when its context ends: Run waits for that before it campaigns again, so fn never
// runs twice at a time in one call of Run. If fn panics or calls runtime.Goexit, Run resigns, and
// the panic continues.
//
// Run blocks until ctx ends, and then returns its cause, wrapped. It returns early only with an error that
// matches lock.ErrClosed, lock.ErrInvalid, lock.ErrReentered or lock.ErrUnsupported. The options are
// the options of Campaign.
func (e *Election) Run(ctx context.Context, value string, fn func(ctx context.Context, term *Term) error, opts ...lock.Option) error {
	if err := e.check(ctx); err != nil {
		return e.object().Refused("run", err)
	}
	if fn == nil {
		return e.object().Refused("run", fmt.Errorf("%w: the function is nil", lock.ErrInvalid))
	}
	began := time.Now()

	o, _ := lock.Resolve(opts...) // Campaign returns the error
	for pause := minPause; ; {
		term, err := e.Campaign(ctx, value, opts...)
		if isFinal(err) && ctx.Err() == nil {
			return err
		}
		if err == nil {
			began := time.Now()
			err = serve(ctx, term, o.Lease > 0, fn)
			if err == nil || time.Since(began) > maxPause {
				pause = minPause
			}
		}
		if err != nil && !isEnd(ctx, err) {
			e.s.Logger.Warn("redlatch: an attempt to lead has failed", "name", text.Safe(e.Name()), "error", err)
		}
		select {
		case <-time.After(pause - rand.N(pause/2)):
		case <-ctx.Done():
		case <-e.s.Stopping():
		}
		if ctx.Err() != nil {
			return e.object().Ended(ctx, "run", began)
		}
		if e.s.Stopped() != nil {
			return e.object().Failed(ctx, "run", began, lock.ErrClosed)
		}
		if err != nil {
			pause = min(2*pause, maxPause)
		}
	}
}

// isFinal reports whether an error of Campaign would come again.
func isFinal(err error) bool {
	for _, final := range []error{lock.ErrClosed, lock.ErrInvalid, lock.ErrReentered, lock.ErrUnsupported} {
		if errors.Is(err, final) {
			return true
		}
	}
	return false
}

// isEnd reports whether ctx has ended and err says so.
func isEnd(ctx context.Context, err error) bool {
	return ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx)))
}

// serve runs fn and resigns. With fixed set the term is meant to end with its lease.
func serve(ctx context.Context, term *Term, fixed bool, fn func(ctx context.Context, term *Term) error) (err error) {
	// Deferred, so that a panic or Goexit in fn continues after it.
	defer func() {
		resignErr := term.Resign(ctx)
		var loss *lock.LostError
		if errors.As(resignErr, &loss) && (loss.Reason == lock.ReasonMaxHold || fixed && loss.Reason == lock.ReasonExpired) {
			resignErr = nil
			if err != nil && isEnd(term.Context(), err) {
				err = nil
			}
		}
		if resignErr != nil {
			err = &lock.DoError{Func: err, Unlock: resignErr}
		}
	}()
	return fn(term.Context(), term)
}
