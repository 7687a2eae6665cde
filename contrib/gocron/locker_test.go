package redlatchgocron_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/google/uuid"
	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	redlatchgocron "github.com/redlatch/redlatch/contrib/gocron"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
	"github.com/redlatch/redlatch/redlatchtest"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

const (
	// job is the name of the job of most tests.
	job = "report"
	// key is the name of its lock.
	key = "gocron:" + job
	// soon bounds what takes no time of its own.
	soon = 10 * time.Second
)

// everyMinute returns a definition of its own for each scheduler, because it has state.
func everyMinute() gocron.JobDefinition { return gocron.CronJob("TZ=UTC * * * * *", false) }

func locker(t testing.TB, c *redlatch.Client, opts ...redlatchgocron.Option) *redlatchgocron.Locker {
	t.Helper()
	l, err := redlatchgocron.NewLocker(c, time.Minute, opts...)
	require.NoError(t, err)
	return l
}

// machine is a scheduler with a clock of its own. Each run of its job, and each one that is skipped,
// sends to a channel.
type machine struct {
	gocron.Scheduler
	job     gocron.Job
	clock   *clockwork.FakeClock
	ran     chan time.Time
	skipped chan error
}

// start starts a machine whose clock shows now. work is called in each run.
func start(t testing.TB, c *redlatch.Client, now time.Time, work func() error, opts ...gocron.JobOption) *machine {
	t.Helper()
	m := &machine{clock: clockwork.NewFakeClockAt(now), ran: make(chan time.Time, 10), skipped: make(chan error, 10)}
	var err error
	m.Scheduler, err = gocron.NewScheduler(gocron.WithClock(m.clock),
		gocron.WithDistributedLocker(locker(t, c, redlatchgocron.Clock(m.clock.Now))))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Shutdown()) })
	m.job, err = m.NewJob(everyMinute(), gocron.NewTask(func() error {
		m.ran <- m.clock.Now()
		return work()
	}), append(opts, gocron.WithName(job), gocron.WithEventListeners(
		gocron.AfterLockError(func(_ uuid.UUID, _ string, err error) { m.skipped <- err }),
		gocron.AfterJobRunsWithPanic(func(uuid.UUID, string, any) {})))...)
	require.NoError(t, err)
	m.Start()
	return m
}

// tick moves the clock of the machine to the next minute, when the scheduler has planned its run and has
// forgotten earlier ones.
func (m *machine) tick(t testing.TB) {
	t.Helper()
	harness.Eventually(t, soon, "the next run is planned", func() bool {
		next, err := m.job.NextRun()
		require.NoError(t, err)
		return next.After(m.clock.Now())
	})
	advance(t, m.clock)
}

// advance moves a clock to the next minute when the timer of its scheduler is set.
func advance(t testing.TB, clock *clockwork.FakeClock) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	require.NoError(t, clock.BlockUntilContext(ctx, 1), "the timer of the scheduler")
	clock.Advance(clock.Now().Truncate(time.Minute).Add(time.Minute).Sub(clock.Now()))
}

func (m *machine) runs(t testing.TB) {
	t.Helper()
	select {
	case <-m.ran:
	case err := <-m.skipped:
		require.NoError(t, err)
	case <-time.After(soon):
		require.FailNow(t, "the job does not run")
	}
}

func (m *machine) skips(t testing.TB, kind error) {
	t.Helper()
	select {
	case err := <-m.skipped:
		require.ErrorIs(t, err, kind)
	case <-m.ran:
		require.FailNow(t, "the job has run")
	case <-time.After(soon):
		require.FailNow(t, "the job is not skipped")
	}
}

func done() error { return nil }

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// One of two machines runs each occasion, although the other comes after the job has ended.
func TestOncePerOccasion(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		a, b := start(t, c, noon, done), start(t, harness.Client(t, s), noon.Add(time.Second), done)
		for i := range 6 {
			first, second := a, b
			if i%2 == 1 {
				first, second = b, a
			}
			first.tick(t)
			first.runs(t)
			remembered(t, c, first.clock.Now())
			second.tick(t)
			second.skips(t, lock.ErrNotAcquired)
		}
	})
}

// remembered waits until the run of a minute is remembered.
func remembered(t testing.TB, c *redlatch.Client, minute time.Time) {
	t.Helper()
	harness.Eventually(t, soon, "the run is remembered", func() bool {
		ok, err := c.Once(key).Done(t.Context(), once.At(minute))
		require.NoError(t, err)
		return ok
	})
}

// A job that fails or panics counts as run, as the documentation says.
func TestFailedRunIsNotRepeated(t *testing.T) {
	for what, work := range map[string]func() error{
		"error": func() error { return errors.New("failed") },
		"panic": func() error { panic("failed") },
	} {
		t.Run(what, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				c := harness.Client(t, s)
				a, b := start(t, c, noon, work), start(t, harness.Client(t, s), noon, work)
				a.tick(t)
				a.runs(t)
				remembered(t, c, a.clock.Now())
				b.tick(t)
				b.skips(t, lock.ErrNotAcquired)
				b.tick(t)
				b.runs(t)
			})
		})
	}
}

// The runs of two occasions do not overlap, and a run that is refused because of that is not remembered.
func TestRunsDoNotOverlap(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		goOn := make(chan struct{})
		a := start(t, c, noon, func() error { <-goOn; return nil })
		b := start(t, harness.Client(t, s), noon, done)
		a.tick(t)
		a.runs(t)
		b.tick(t)
		b.skips(t, lock.ErrNotAcquired)
		b.tick(t)
		b.skips(t, lock.ErrNotAcquired)
		close(goOn)
		remembered(t, c, noon.Add(time.Minute))
		ok, err := c.Once(key).Done(t.Context(), once.At(b.clock.Now()))
		require.NoError(t, err)
		require.False(t, ok)
		a.tick(t)
		a.runs(t)
	})
}

// The holds of a Locker and of an Elector show the lines that have made these.
func TestSites(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		run, err := locker(t, c).Lock(t.Context(), job)
		require.NoError(t, err)
		leads(t, elector(t, c, "a"))
		all := c.Holds()
		require.Len(t, all, 3) // the slot, the job and the term
		for _, h := range all {
			require.Regexp(t, `/gocron_test\.(locker|elector) \(\S+_test\.go:\d+\)$`, h.Site)
		}
		require.NoError(t, run.Unlock(t.Context()))
	})
}

// Without the server no machine runs the job.
func TestServerDown(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s)
		a, b := start(t, c, noon, done), start(t, harness.Client(t, s), noon, done)
		a.tick(t)
		a.runs(t)
		remembered(t, c, a.clock.Now())
		s.Kill()
		for _, m := range []*machine{a, b} {
			m.tick(t)
			m.skips(t, lock.ErrUnavailable)
		}
		require.NoError(t, s.Restart())
		harness.Eventually(t, soon, "the client is connected again", func() bool { return c.Ping(t.Context()) == nil })
		a.tick(t)
		a.runs(t)
	})
}

// skewed is the clock of a machine in virtual time.
type skewed struct {
	clockwork.Clock
	by time.Duration
}

func (c skewed) Now() time.Time { return c.Clock.Now().Add(c.by) }

// Machines whose clocks differ, by more than the interval of the job too, run each occasion once.
func TestClocksDiffer(t *testing.T) {
	const minutes = 60
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		var mu sync.Mutex
		runs, machines := map[time.Time]int{}, map[time.Duration]int{}
		var schedulers []gocron.Scheduler
		for _, by := range []time.Duration{0, 7 * time.Second, -40 * time.Second, -150 * time.Second} {
			clock := skewed{clockwork.NewRealClock(), by}
			scheduler, err := gocron.NewScheduler(gocron.WithClock(clock),
				gocron.WithDistributedLocker(locker(t, s.Client(t), redlatchgocron.Clock(clock.Now))))
			require.NoError(t, err)
			_, err = scheduler.NewJob(everyMinute(), gocron.NewTask(func() {
				mu.Lock()
				defer mu.Unlock()
				runs[clock.Now().Round(time.Minute)]++
				machines[by]++
			}), gocron.WithName(job))
			require.NoError(t, err)
			scheduler.Start()
			schedulers = append(schedulers, scheduler)
		}
		time.Sleep(minutes*time.Minute + time.Second)
		for _, scheduler := range schedulers {
			require.NoError(t, scheduler.Shutdown())
		}
		require.GreaterOrEqual(t, len(runs), minutes)
		for minute, n := range runs {
			require.Equal(t, 1, n, minute)
		}
		require.Equal(t, minutes, machines[7*time.Second]-machines[0], "the first clock runs all but its first minutes: %v", machines)
	})
}

// The context of a run ends with its locks. That it was lost is logged, because gocron drops it.
func TestLostRun(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		log := new(harness.Log)
		c := s.Client(t)
		l := locker(t, c, redlatchgocron.Logger(log.Logger()), redlatchgocron.MaxHold(time.Hour))
		scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(l))
		require.NoError(t, err)
		causes := make(chan error, 1)
		_, err = scheduler.NewJob(everyMinute(), gocron.NewTask(func(ctx context.Context) {
			held := l.Context(ctx)
			require.NotEqual(t, ctx, held)
			<-held.Done()
			require.NoError(t, ctx.Err())
			causes <- context.Cause(held)
		}), gocron.WithName(job))
		require.NoError(t, err)
		scheduler.Start()

		time.Sleep(90 * time.Second)
		_, err = c.Lock(key).ForceUnlock(t.Context())
		require.NoError(t, err)
		require.ErrorIs(t, <-causes, lock.ErrLost)
		synctest.Wait()
		require.Contains(t, log.String(), "the end of a job's run has failed")
		require.Contains(t, log.String(), string(lock.ReasonGone))

		began := time.Now()
		var lost *lock.LostError
		require.ErrorAs(t, <-causes, &lost)
		require.Equal(t, lock.ReasonMaxHold, lost.Reason)
		require.InDelta(t, time.Hour, time.Since(began), float64(2*time.Minute))

		require.NoError(t, scheduler.Shutdown())
		require.Equal(t, t.Context(), l.Context(t.Context()), "no run")
	})
}

func TestDefaultLogger(t *testing.T) { // not parallel
	log, before := new(harness.Log), slog.Default()
	slog.SetDefault(log.Logger())
	defer slog.SetDefault(before)
	c := redlatchtest.New(t)
	run, err := locker(t, c).Lock(t.Context(), job)
	require.NoError(t, err)
	c.Close()
	require.ErrorIs(t, run.Unlock(t.Context()), lock.ErrClosed)
	require.Contains(t, log.String(), "the end of a job's run has failed")
}

// The end of a job's context ends no lock before Unlock.
func TestCancelledJob(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := locker(t, c, redlatchgocron.Clock(func() time.Time { return noon }))
		ctx, cancel := context.WithCancel(t.Context())
		run, err := l.Lock(ctx, job)
		require.NoError(t, err)
		held := l.Context(ctx)
		cancel()
		require.ErrorIs(t, held.Err(), context.Canceled)
		require.True(t, harness.IsLocked(t, c.Lock(key)))
		require.NoError(t, run.Unlock(ctx))
		require.NoError(t, run.Unlock(ctx), "a second call")
		remembered(t, c, noon)
		require.False(t, harness.IsLocked(t, c.Lock(key)))
		_, err = l.Lock(t.Context(), job)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorContains(t, err, "has been run")
		_, err = l.Lock(ctx, job+"2")
		require.ErrorIs(t, err, context.Canceled)
	})
}

// A run that has lost its lock may end after the next run of the job, which has the same context, begins.
func TestContextOfTheNextRun(t *testing.T) {
	l := locker(t, redlatchtest.New(t))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first, err := l.Lock(ctx, job)
	require.NoError(t, err)
	next, err := l.Lock(ctx, job+"2") // as if it were the same job
	require.NoError(t, err)
	held := l.Context(ctx)
	require.NoError(t, first.Unlock(ctx))
	require.Equal(t, held, l.Context(ctx))
	require.NoError(t, held.Err())
	require.NoError(t, next.Unlock(ctx))
	require.Equal(t, ctx, l.Context(ctx))
}

// A machine that starts a job less than half a slot early or late has the slot of the others.
func TestSlotOfAnEarlyStart(t *testing.T) {
	now := noon
	l := locker(t, redlatchtest.New(t), redlatchgocron.Clock(func() time.Time { return now }))
	run, err := l.Lock(t.Context(), job)
	require.NoError(t, err)
	require.NoError(t, run.Unlock(t.Context()))
	for _, by := range []time.Duration{-30*time.Second + 1, 30*time.Second - 1} {
		now = noon.Add(by)
		_, err = l.Lock(t.Context(), job)
		require.ErrorIs(t, err, lock.ErrNotAcquired, by)
	}
	now = noon.Add(30 * time.Second)
	run, err = l.Lock(t.Context(), job)
	require.NoError(t, err)
	require.NoError(t, run.Unlock(t.Context()))
}

func TestRemember(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		l := locker(t, s.Client(t), redlatchgocron.Remember(time.Hour), redlatchgocron.Clock(func() time.Time { return noon }))
		for range 2 {
			run, err := l.Lock(t.Context(), job)
			require.NoError(t, err)
			require.NoError(t, run.Unlock(t.Context()))
			time.Sleep(time.Hour - time.Second)
			_, err = l.Lock(t.Context(), job)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			time.Sleep(time.Second)
		}
	})
}

func TestInvalidLocker(t *testing.T) {
	c := redlatchtest.New(t)
	for what, err := range map[string]error{
		"client":   only(redlatchgocron.NewLocker(nil, time.Minute)),
		"every":    only(redlatchgocron.NewLocker(c, 0)),
		"negative": only(redlatchgocron.NewLocker(c, -time.Minute)),
		"option":   only(redlatchgocron.NewLocker(c, time.Minute, nil)),
		"Remember": only(redlatchgocron.NewLocker(c, time.Minute, redlatchgocron.Remember(0))),
		"MaxHold":  only(redlatchgocron.NewLocker(c, time.Minute, redlatchgocron.MaxHold(0))),
		"Clock":    only(redlatchgocron.NewLocker(c, time.Minute, redlatchgocron.Clock(nil))),
		"Logger":   only(redlatchgocron.NewLocker(c, time.Minute, redlatchgocron.Logger(nil))),
	} {
		require.ErrorIs(t, err, lock.ErrInvalid, what)
	}
	l := locker(t, c)
	var none context.Context
	_, err := l.Lock(none, job)
	require.ErrorIs(t, err, lock.ErrInvalid)
	c.Close()
	_, err = l.Lock(t.Context(), job)
	require.ErrorIs(t, err, lock.ErrClosed)
}

// only returns the error of two results.
func only(_ any, err error) error { return err }
