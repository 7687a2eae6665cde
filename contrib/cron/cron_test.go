package redlatchcron_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/robfig/cron/v3"
	"github.com/stretchr/testify/require"

	redlatchcron "github.com/redlatch/redlatch/contrib/cron"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

const hourly = "0 * * * *"

// errWork is the error of work that itself needs a lock, and is logged although it matches that.
var errWork = fmt.Errorf("the work failed: %w", lock.ErrNotAcquired)

// runs records when the work ran.
type runs struct {
	mu   sync.Mutex
	all  []time.Time
	fail int // how many runs fail
}

func (r *runs) work(context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, time.Now())
	if r.fail > 0 {
		r.fail--
		return errWork
	}
	return nil
}

// times returns when the work ran.
func (r *runs) times() []time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all)
}

func (r *runs) count() int { return len(r.times()) }

// machine starts a cron with a job, late by that time.
func machine(t testing.TB, o *once.Once, late time.Duration, fn func(context.Context) error, opts ...redlatchcron.Option) *cron.Cron {
	t.Helper()
	c := cron.New(cron.WithLocation(time.UTC), cron.WithChain(func(j cron.Job) cron.Job {
		return cron.FuncJob(func() {
			time.Sleep(late)
			j.Run()
		})
	}))
	_, err := redlatchcron.Add(c, hourly, o, fn, opts...)
	require.NoError(t, err)
	c.Start()
	t.Cleanup(func() { <-c.Stop().Done() })
	return c
}

// Machines whose clocks differ run each job once, however short it is.
func TestClocks(t *testing.T) {
	const hours = 48
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		var r runs
		for _, late := range []time.Duration{0, time.Second, 20 * time.Minute, 90 * time.Minute} {
			machine(t, s.Client(t).Once("report"), late, r.work)
		}
		time.Sleep(hours * time.Hour)
		time.Sleep(90 * time.Minute)
		synctest.Wait()
		require.Contains(t, []int{hours + 1, hours + 2}, r.count())
		for _, at := range r.times() {
			require.Zero(t, at.Sub(at.Truncate(time.Hour)), "the first machine runs it when it is due")
		}
		ran, err := s.Client(t).Once("report").Done(t.Context(), once.At(r.times()[hours]))
		require.NoError(t, err)
		require.True(t, ran, "the slot is the time at which it is due")
	})
}

// The hold of a run shows the line that has added the job.
func TestSite(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		var sites []string
		machine(t, c.Once("report"), 0, func(context.Context) error {
			for _, h := range c.Holds() {
				sites = append(sites, h.Site)
			}
			return nil
		})
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Len(t, sites, 1)
		require.Regexp(t, `/cron_test\.machine \(\S+/cron_test\.go:\d+\)$`, sites[0])
	})
}

// The next machine repeats work that has failed.
func TestFailure(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		var log bytes.Buffer
		logger := redlatchcron.Logger(slog.New(slog.NewTextHandler(&log, nil)))
		r := runs{fail: 1}
		machine(t, s.Client(t).Once("report"), 0, r.work, logger)
		machine(t, s.Client(t).Once("report"), time.Second, r.work, logger)
		machine(t, s.Client(t).Once("report"), time.Minute, r.work, logger)
		time.Sleep(time.Hour + 2*time.Minute)
		synctest.Wait()
		require.Equal(t, 2, r.count())
		require.Equal(t, time.Second, r.times()[1].Sub(r.times()[0]))
		synctest.Wait()
		require.Contains(t, log.String(), errWork.Error())
		require.Contains(t, log.String(), "name=report slot="+once.At(r.times()[0]))
		require.Equal(t, 1, bytes.Count(log.Bytes(), []byte("\n")))
	})
}

func TestDefaultLogger(t *testing.T) { // not parallel
	var log bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(before)
	harness.VirtualAlone(t, func(t *testing.T, s *harness.VirtualServer) {
		r := runs{fail: 1}
		machine(t, s.Client(t).Once("report"), 0, r.work)
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Contains(t, log.String(), errWork.Error())
	})
}

// A job can be added to a cron that runs.
func TestRunningCron(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := cron.New(cron.WithLocation(time.UTC))
		c.Start()
		var r runs
		_, err := redlatchcron.Add(c, hourly, s.Client(t).Once("report"), r.work)
		require.NoError(t, err)
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Equal(t, 1, r.count())
		<-c.Stop().Done()
	})
}

// A machine waits for a run of another, and with lock.Wait(0) it does not.
func TestWait(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		var log bytes.Buffer
		r := runs{}
		machine(t, s.Client(t).Once("report"), 0, func(context.Context) error {
			time.Sleep(time.Minute)
			return errWork
		})
		machine(t, s.Client(t).Once("report"), time.Second, r.work,
			redlatchcron.Lock(lock.Wait(0)), redlatchcron.Logger(slog.New(slog.NewTextHandler(&log, nil))))
		time.Sleep(time.Hour + 2*time.Minute)
		require.Zero(t, r.count())
		synctest.Wait()
		require.Empty(t, log.String())
		machine(t, s.Client(t).Once("report"), time.Second, r.work)
		time.Sleep(time.Hour)
		require.Equal(t, 1, r.count())
		require.Equal(t, time.Minute, r.times()[0].Sub(r.times()[0].Truncate(time.Hour)))
	})
}

// The end of the context ends the waits, and the work.
func TestContext(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("over")
		var r runs
		first := machine(t, s.Client(t).Once("report"), 0, func(ctx context.Context) error {
			<-ctx.Done()
			return context.Cause(ctx)
		}, redlatchcron.Context(ctx), redlatchcron.Logger(slog.New(slog.DiscardHandler)))
		second := machine(t, s.Client(t).Once("report"), time.Second, r.work, redlatchcron.Context(ctx),
			redlatchcron.Logger(slog.New(slog.DiscardHandler)))
		time.Sleep(time.Hour + time.Minute)
		cancel(cause)
		<-first.Stop().Done()
		<-second.Stop().Done()
		require.Zero(t, r.count())
	})
}

// A job that is due while the server is away runs when it is back, unless the job is due again by then.
func TestOutage(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		var away atomic.Bool
		s.Server().SetPreHook(func(p *server.Peer, _ string, _ ...string) bool {
			if away.Load() {
				p.WriteError("LOADING it is not ready")
			}
			return away.Load()
		})
		var r runs
		machine(t, s.Client(t).Once("report"), 0, r.work, redlatchcron.Logger(slog.New(slog.DiscardHandler)))
		time.Sleep(time.Until(time.Now().Truncate(time.Hour).Add(90 * time.Minute)))
		r.all = nil

		for _, outage := range []time.Duration{time.Hour, 2 * time.Hour} {
			away.Store(true)
			time.Sleep(outage)
			require.Empty(t, r.times())
			away.Store(false)
			time.Sleep(2 * time.Second)
			require.Equal(t, 1, r.count(), "one slot for an outage of %v", outage)
			r.all = nil
		}
	})
}

// Nothing runs for a job that was removed, or with a client that is closed.
func TestNoRun(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		var log bytes.Buffer
		var r runs
		c := machine(t, s.Client(t).Once("report"), time.Second, r.work, redlatchcron.Logger(slog.New(slog.NewTextHandler(&log, nil))))
		time.Sleep(time.Hour - time.Duration(time.Now().Minute())*time.Minute - time.Duration(time.Now().Second())*time.Second)
		c.Remove(c.Entries()[0].ID) // after the activation, before the run
		time.Sleep(time.Minute)
		require.Zero(t, r.count())
		synctest.Wait()
		require.Empty(t, log.String())

		c = machine(t, s.Client(t).Once("report"), 0, r.work, redlatchcron.Logger(slog.New(slog.NewTextHandler(&log, nil))))
		c.Entries()[0].WrappedJob.Run() // by hand
		require.Zero(t, r.count())
		require.Contains(t, log.String(), "Once.Run")
		<-c.Stop().Done()

		client := s.Client(t)
		machine(t, client.Once("report"), 0, r.work, redlatchcron.Logger(slog.New(slog.NewTextHandler(&log, nil))))
		client.Close()
		time.Sleep(time.Hour)
		require.Zero(t, r.count())
		synctest.Wait()
		require.Contains(t, log.String(), lock.ErrClosed.Error())
	})
}

func TestInvalid(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		client := s.Client(t)
		o := client.Once("report")
		synctest.Wait()
		checks := s.Calls("exists") // of the startup check
		c := cron.New()
		var r runs
		var none context.Context
		add := func(c *cron.Cron, spec string, o *once.Once, fn func(context.Context) error, opts ...redlatchcron.Option) error {
			_, err := redlatchcron.Add(c, spec, o, fn, opts...)
			return err
		}
		for what, err := range map[string]error{
			"cron":     add(nil, hourly, o, r.work),
			"once":     add(c, hourly, nil, r.work),
			"function": add(c, hourly, o, nil),
			"name":     add(c, hourly, client.Once(""), r.work),
			"memory":   add(c, hourly, client.Once("report", once.Remember(-1)), r.work),
			"schedule": add(c, "whenever", o, r.work),
			"every":    add(c, "@every 1h", o, r.work),
			"option":   add(c, hourly, o, r.work, nil),
			"context":  add(c, hourly, o, r.work, redlatchcron.Context(none)),
			"logger":   add(c, hourly, o, r.work, redlatchcron.Logger(nil)),
			"lock":     add(c, hourly, o, r.work, redlatchcron.Lock(nil)),
		} {
			require.ErrorIs(t, err, lock.ErrInvalid, what)
		}
		client.Close()
		require.ErrorIs(t, add(c, hourly, o, r.work), lock.ErrClosed)
		require.Empty(t, c.Entries())
		require.Equal(t, checks, s.Calls("exists"), "Add sends nothing")
		s.NothingLeft(t)
	})
}
