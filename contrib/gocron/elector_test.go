package redlatchgocron_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	redlatchgocron "github.com/redlatch/redlatch/contrib/gocron"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/redlatchtest"
)

const boss = "boss"

func elector(t testing.TB, c *redlatch.Client, value string) *redlatchgocron.Elector {
	t.Helper()
	e, err := redlatchgocron.NewElector(t.Context(), c, boss, value)
	require.NoError(t, err)
	t.Cleanup(e.Close)
	return e
}

// leads waits until that is the leader.
func leads(t testing.TB, e *redlatchgocron.Elector) {
	t.Helper()
	harness.Eventually(t, soon, "the election is decided", func() bool { return e.IsLeader(t.Context()) == nil })
}

// follows waits until that is not the leader.
func follows(t testing.TB, e *redlatchgocron.Elector) {
	t.Helper()
	harness.Eventually(t, soon, "the end of the term", func() bool {
		return errors.Is(e.IsLeader(t.Context()), redlatchgocron.ErrNotLeader)
	})
}

// elected starts a machine that runs the job if its elector leads. One that does not lead has no tick,
// because its scheduler does not forget earlier occasions.
func elected(t testing.TB, e gocron.Elector) *machine {
	t.Helper()
	m := &machine{clock: clockwork.NewFakeClockAt(noon), ran: make(chan time.Time, 10)}
	var err error
	m.Scheduler, err = gocron.NewScheduler(gocron.WithClock(m.clock), gocron.WithDistributedElector(e))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Shutdown()) })
	m.job, err = m.NewJob(everyMinute(), gocron.NewTask(func() { m.ran <- m.clock.Now() }), gocron.WithName(job))
	require.NoError(t, err)
	m.Start()
	return m
}

// A term whose context is not that of the elector ends with the elector, and so do the contexts of its
// jobs.
func TestElectorWithAParent(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for _, end := range []func(*redlatchgocron.Elector){(*redlatchgocron.Elector).Close, func(*redlatchgocron.Elector) { cancel() }} {
			e, err := redlatchgocron.NewElector(ctx, harness.Client(t, s), boss, "a", lock.Parent(context.Background()))
			require.NoError(t, err)
			leads(t, e)
			running, done := e.Context(t.Context())
			defer done()
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				end(e)
			}()
			for _, over := range []<-chan struct{}{ended, running.Done()} {
				select {
				case <-over:
				case <-time.After(soon):
					require.FailNow(t, "the term goes on")
				}
			}
			follows(t, e)
			e.Close()
		}
	})
}

// Only the leader runs jobs. When it resigns another machine leads.
func TestOnlyTheLeaderRuns(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		a := elector(t, harness.Client(t, s), "a")
		leads(t, a)
		c := harness.Client(t, s)
		b := elector(t, c, "b")
		harness.Waits(t, 1, c)
		require.ErrorIs(t, b.IsLeader(t.Context()), redlatchgocron.ErrNotLeader)

		leader, follower := elected(t, a), elected(t, b)
		for range 3 {
			advance(t, follower.clock)
			leader.tick(t)
			leader.runs(t)
		}
		require.Empty(t, follower.ran)

		a.Close()
		a.Close()
		require.ErrorIs(t, a.IsLeader(t.Context()), redlatchgocron.ErrNotLeader)
		require.ErrorContains(t, a.IsLeader(t.Context()), "closed")
		leads(t, b)
		next, err := c.Election(boss).Leader(t.Context())
		require.NoError(t, err)
		require.Equal(t, "b", next.Value)
		leader.tick(t)
		advance(t, follower.clock)
		follower.runs(t)
		require.Empty(t, leader.ran)
	})
}

// A leader that loses the server stops leading, and the contexts of its jobs end, before another leads.
func TestLostTerm(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(time.Second))
		a, b := elector(t, c, "a"), harness.Client(t, s)
		leads(t, a)
		ctx, end := a.Context(t.Context())
		defer end()
		require.NoError(t, ctx.Err())
		next := elector(t, b, "b")
		harness.Waits(t, 1, b)
		g.Stall()
		elector(t, c, "late") // which does not ask the server
		leads(t, next)
		require.ErrorIs(t, a.IsLeader(t.Context()), redlatchgocron.ErrNotLeader)
		harness.Receive(t, soon, "the end of the job's context", ctx.Done())
		require.ErrorIs(t, context.Cause(ctx), lock.ErrLost)
		require.NoError(t, g.Open())
	})
}

// A process that closes its client leaves its place to another one.
func TestElectorOfAClosedClient(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		a, b := harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Second)), harness.Client(t, s)
		e := elector(t, a, "a")
		leads(t, e)
		next := elector(t, b, "b")
		harness.Waits(t, 1, b)

		a.Close()
		require.ErrorIs(t, e.IsLeader(t.Context()), redlatchgocron.ErrNotLeader)
		leads(t, next)
		harness.Eventually(t, soon, "the end of the candidacy", func() bool {
			return errors.Is(e.IsLeader(t.Context()), lock.ErrClosed)
		})
	})
}

func TestContextOfAJob(t *testing.T) {
	c := redlatchtest.New(t)
	e := elector(t, c, "")
	leads(t, e)
	cause := errors.New("over")
	parent, cancel := context.WithCancelCause(t.Context())
	ctx, end := e.Context(parent)
	defer end()
	cancel(cause)
	require.ErrorIs(t, context.Cause(ctx), cause)
	require.ErrorIs(t, e.IsLeader(parent), cause)

	ctx, end = e.Context(t.Context())
	require.NoError(t, ctx.Err())
	end()
	require.ErrorIs(t, ctx.Err(), context.Canceled)

	ctx, end = e.Context(t.Context())
	defer end()
	e.Close()
	harness.Receive(t, soon, "the end of the job's context", ctx.Done())
	ctx, end = e.Context(t.Context())
	defer end()
	require.ErrorIs(t, context.Cause(ctx), redlatchgocron.ErrNotLeader)
}

func TestInvalidElector(t *testing.T) {
	c := redlatchtest.New(t)
	var none context.Context
	for what, err := range map[string]error{
		"client":  only(redlatchgocron.NewElector(t.Context(), nil, boss, "")),
		"context": only(redlatchgocron.NewElector(none, c, boss, "")),
		"name":    only(redlatchgocron.NewElector(t.Context(), c, "", "")),
		"option":  only(redlatchgocron.NewElector(t.Context(), c, boss, "", nil)),
	} {
		require.ErrorIs(t, err, lock.ErrInvalid, what)
	}
	c.Close()
	_, err := redlatchgocron.NewElector(t.Context(), c, boss, "")
	require.ErrorIs(t, err, lock.ErrClosed)
}
