// Package redlatchcron runs the jobs of github.com/robfig/cron/v3 once, although several machines have
// them in their schedules.
//
//	jobs := cron.New()
//	id, err := redlatchcron.Add(jobs, "*/10 * * * *", client.Once("report"), writeReport)
//	...
//	jobs.Start()
//
// # Slots
//
// Each activation of a job is a slot of package once: the time at which it is due by the schedule. A
// machine whose clock is late has the same slot, only later, and finds the work done. The wrappers of
// cron do not know that time, so Add takes the place of Cron.AddJob.
//
// All machines must use the same schedule in the same time zone: see cron.WithLocation. A time that
// occurs twice when clocks are set back is two slots, and cron runs nothing at a time that is skipped when
// they are set forward. Schedules of the form "@every 5m" begin when a program starts, so machines
// disagree about them; Add rejects them. Use "*/5 * * * *" instead.
//
// The wrappers of cron.WithChain apply as usual, outside the slot. If cron.DelayIfStillRunning delays
// activations beyond the next one, they are one slot.
//
// # Running a job now
//
// The job of an entry runs in the slot of the last time at which it was due, and so does nothing if that has
// been done. Call the Once with a slot of its own instead, in an endpoint for example:
//
//	ran, err := work.Run(ctx, once.At(time.Now()), writeReport)
//
// # Failures
//
// The machines that wait for a run repeat it if the job returns an error or panics, or if its process
// dies: each at most once per slot. lock.Wait(0) in Lock leaves it at the first. A machine that cannot reach the
// server tries again until the job is due again, or lock.Wait is over; with lock.FailFast it does not.
package redlatchcron

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
)

// Option configures a job. nil is invalid.
type Option func(*job) error

// Context sets the parent of the contexts that the job gets. When it ends, machines stop to wait for the
// runs of others. The default is context.Background().
func Context(ctx context.Context) Option {
	return func(j *job) error {
		j.ctx = ctx
		return valid(ctx != nil, "Context: the context is nil")
	}
}

// Lock sets the options of the runs, such as lock.AtLeast, lock.MaxHold and lock.Wait.
func Lock(opts ...lock.Option) Option {
	return func(j *job) error {
		j.opts = opts
		_, err := lock.Resolve(opts...)
		return err
	}
}

// Logger sets the logger for errors of the job and of its runs. The default is slog.Default().
func Logger(logger *slog.Logger) Option {
	return func(j *job) error {
		j.logger = logger
		return valid(logger != nil, "Logger: the logger is nil")
	}
}

// Add adds a job with that schedule to c, and returns the id of its entry. fn is called once for each
// time at which the job is due, on one of the machines that have added a job with the same Once; its
// context ends when it may no longer run, as that of once.Run. Errors are logged, except that other
// machines keep the slot after lock.Wait.
//
// Client.Holds shows the caller of Add as the line that acquires the lock of a run.
//
// Add sends nothing. Its error matches lock.ErrInvalid, or lock.ErrClosed if the client is closed.
func Add(c *cron.Cron, spec string, work *once.Once, fn func(ctx context.Context) error, opts ...Option) (cron.EntryID, error) {
	j := &job{cron: c, work: work, fn: fn, ctx: context.Background(), logger: slog.Default(), site: lock.Site(1), added: make(chan struct{})}
	if err := j.configure(opts); err != nil {
		return 0, refused(err)
	}
	id, err := c.AddJob(spec, j)
	if err != nil {
		return 0, refused(fmt.Errorf("%w: the schedule of %q: %w", lock.ErrInvalid, work.Name(), err))
	}
	defer close(j.added)
	if _, ok := c.Entry(id).Schedule.(cron.ConstantDelaySchedule); ok {
		c.Remove(id)
		return 0, refused(fmt.Errorf("%w: the schedule of %q, %q, differs between machines", lock.ErrInvalid, work.Name(), spec))
	}
	j.id = id
	return id, nil
}

func valid(ok bool, reason string) error {
	if ok {
		return nil
	}
	return fmt.Errorf("%w: %s", lock.ErrInvalid, reason)
}

// job is a cron.Job.
type job struct {
	cron   *cron.Cron
	work   *once.Once
	fn     func(ctx context.Context) error
	ctx    context.Context
	opts   []lock.Option
	logger *slog.Logger
	site   lock.Option // the caller of Add

	added chan struct{} // closed when id is valid
	id    cron.EntryID
}

// refused returns the error of Add.
func refused(err error) error {
	return &lock.Error{Op: "configure", Kind: "adapter", Name: "cron", Err: err}
}

func (j *job) configure(opts []Option) error {
	switch {
	case j.cron == nil:
		return valid(false, "the cron is nil")
	case j.work == nil:
		return valid(false, "the Once is nil")
	case j.fn == nil:
		return valid(false, "the function is nil")
	}
	for _, opt := range opts {
		if opt == nil {
			return valid(false, "an option is nil")
		}
		if err := opt(j); err != nil {
			return err
		}
	}
	// The request of an ended context is not sent.
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := j.work.Done(ended, "x"); errors.Is(err, lock.ErrInvalid) || errors.Is(err, lock.ErrClosed) {
		return err
	}
	return nil
}

// Run implements cron.Job.
func (j *job) Run() {
	<-j.added
	entry := j.cron.Entry(j.id)
	if !entry.Valid() {
		return // it was removed
	}
	if entry.Prev.IsZero() {
		j.logger.ErrorContext(j.ctx, "redlatch: a job does not run before its first time: to run it now, call Once.Run with a slot of its own",
			"name", j.work.Name())
		return
	}
	slot := once.At(entry.Prev)
	ran, err := j.runIn(slot, entry.Next)
	if err != nil && (ran || !errors.Is(err, lock.ErrNotAcquired)) {
		j.logger.ErrorContext(j.ctx, "redlatch: a job has failed", "name", j.work.Name(), "slot", slot, "error", err)
	}
}

// runIn runs the job in its slot. A server that cannot be reached is tried again until the next time at which the
// job is due: otherwise all slots of an outage would run at its end.
func (j *job) runIn(slot string, next time.Time) (ran bool, err error) {
	const pause = time.Second
	o, err := lock.Resolve(j.opts...)
	if err != nil {
		return false, err
	}
	end := time.Now().Add(o.Wait)
	if o.Bounded && end.Before(next) {
		next = end
	}

	for {
		opts := append([]lock.Option{j.site, lock.FailFast()}, j.opts...)
		if o.Bounded {
			opts = append(opts, lock.Wait(max(0, time.Until(end))))
		}
		ran, err = j.work.Run(j.ctx, slot, j.fn, opts...)
		away := errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrIndeterminate)
		if ran || !away || o.FailFast || time.Until(next) < pause {
			return ran, err
		}
		select {
		case <-time.After(pause):
		case <-j.ctx.Done():
			return false, err
		}
	}
}
