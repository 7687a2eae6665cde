package election_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

const (
	minPause = time.Second
	maxPause = 30 * time.Second
)

// run calls Run in the background.
func run(t testing.TB, ctx context.Context, c *redlatch.Client, fn func(ctx context.Context, term *election.Term) error, opts ...lock.Option,
) *harness.Call[struct{}] {
	t.Helper()
	return harness.Start(t, ctx, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, c.Election(name).Run(ctx, "value", fn, opts...)
	})
}

func untilDone(ctx context.Context, _ *election.Term) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestRun(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s, redlatch.WithWatchdogTimeout(3*time.Second)), harness.Client(t, s)
		terms := make(chan *election.Term)
		r := run(t, t.Context(), c, func(ctx context.Context, term *election.Term) error {
			terms <- term
			return untilDone(ctx, term)
		})
		term := harness.Receive(t, soon, "a term", terms)
		require.Equal(t, "value", term.Value())
		leads(t, other, term)

		// It is deposed, and campaigns again.
		between := stand(t, other, "", lock.Lease(2*time.Second))
		harness.Waits(t, 1, other)
		_, err := c.FairLock(name).ForceUnlock(t.Context())
		require.NoError(t, err)
		require.NoError(t, between.End())
		harness.Do(t, s.Addr, "SCRIPT", "FLUSH")
		again := harness.Receive(t, 2*soon, "another term", terms)
		require.Equal(t, term.Token()+2, again.Token())
		leads(t, other, again)

		cause := errors.New("over")
		r.Cancel(cause)
		require.ErrorIs(t, r.EndWithin(soon), cause)
		nobodyLeads(t, other)
		onlyTokensLeft(t, s)
	})
}

// After its work Run pauses, and longer after each failure, but not after a long term.
func TestPausesOfRun(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		var log bytes.Buffer
		c := s.Client(t, redlatch.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		fails := errors.New("work failed")
		pauses, results := make(chan time.Duration), make(chan error)
		ended := time.Now()
		r := run(t, t.Context(), c, func(context.Context, *election.Term) error {
			pauses <- time.Since(ended)
			defer func() { ended = time.Now() }()
			return <-results
		})
		<-pauses
		next := func(result error, longest time.Duration) {
			t.Helper()
			results <- result
			pause := <-pauses
			require.GreaterOrEqual(t, pause, longest/2)
			require.LessOrEqual(t, pause, longest)
		}
		for pause := minPause; pause < 4*maxPause; pause *= 2 {
			next(fails, min(pause, maxPause))
		}
		require.Contains(t, log.String(), fails.Error())
		log.Reset()
		next(nil, minPause)
		require.Empty(t, log.String())
		for range 3 {
			time.Sleep(maxPause + time.Second) // a long term
			next(fails, minPause)
		}
		log.Reset()
		r.Cancel(errors.New("over"))
		results <- context.Canceled
		require.ErrorContains(t, r.End(), "over")
		require.Empty(t, log.String())
	})
}

// A term that ends by its options is no failure, whether the work returns that or not. The pauses do
// not grow.
func TestRunWithTermsThatEnd(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		for _, length := range []lock.Option{lock.Lease(10 * time.Second), lock.MaxHold(10 * time.Second)} {
			for what, result := range map[string]func(ctx context.Context) error{
				"nil": func(context.Context) error { return nil }, "the cause": context.Cause, "the end": context.Context.Err,
			} {
				var log bytes.Buffer
				c := s.Client(t, redlatch.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
				ctx, cancel := context.WithCancel(t.Context())
				terms, ended := 0, time.Now()
				err := c.Election("e").Run(ctx, "", func(ctx context.Context, _ *election.Term) error {
					if terms++; terms > 1 {
						require.LessOrEqual(t, time.Since(ended), minPause, what)
					}
					if terms == 6 {
						cancel()
						return nil
					}
					<-ctx.Done()
					ended = time.Now()
					return result(ctx)
				}, length, lock.Parent(t.Context()))
				require.ErrorIs(t, err, context.Canceled)
				require.Empty(t, log.String(), what)
			}
		}
	})
}

// A term that is lost counts as a failure, and the work ends before the next begins.
func TestRunWaitsForItsWork(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Second)), harness.Client(t, s)
		begun, finish := make(chan *election.Term), make(chan struct{})
		r := run(t, t.Context(), c, func(ctx context.Context, term *election.Term) error {
			begun <- term
			<-finish
			return nil
		})
		term := harness.Receive(t, soon, "a term", begun)
		_, err := c.FairLock(name).ForceUnlock(t.Context())
		require.NoError(t, err)
		harness.Receive(t, soon, "the end of the term", term.Context().Done())
		resign(t, campaign(t, other, "")) // nobody waits
		finish <- struct{}{}
		harness.Receive(t, soon, "another term", begun)
		r.Cancel(nil)
		require.True(t, r.Running())
		finish <- struct{}{}
		require.ErrorIs(t, r.EndWithin(soon), context.Canceled)
	})
}

func TestRunAndPanic(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		require.PanicsWithValue(t, "work", func() {
			_ = c.Election(name).Run(t.Context(), "", func(context.Context, *election.Term) error { panic("work") })
		})
		nobodyLeads(t, c)
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_ = c.Election(name).Run(t.Context(), "", func(context.Context, *election.Term) error { runtime.Goexit(); return nil })
		}()
		harness.Receive(t, soon, "the end of the goroutine", gone)
		nobodyLeads(t, c)
		onlyTokensLeft(t, s)
	})
}

// Run ends early only if it could never lead again. An error of the work is none of these.
func TestRunEndsEarly(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		owner := lock.WithOwner(t.Context(), c.NewOwner())
		term, err := c.Election(name).Campaign(owner, "")
		require.NoError(t, err)
		require.ErrorIs(t, run(t, owner, c, untilDone).EndWithin(soon), lock.ErrReentered)
		resign(t, term)

		begun := make(chan struct{}, 3)
		r := run(t, t.Context(), c, func(context.Context, *election.Term) error {
			begun <- struct{}{}
			return lock.ErrInvalid
		})
		harness.Receive(t, soon, "a term", begun)
		harness.Receive(t, soon, "another term", begun)
		c.Close()
		require.ErrorIs(t, r.EndWithin(soon), lock.ErrClosed)
	})
}
