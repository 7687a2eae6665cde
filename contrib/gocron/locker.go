// Package redlatchgocron runs the jobs of github.com/go-co-op/gocron/v2 on one of several machines.
//
//	locker, err := redlatchgocron.NewLocker(client, time.Minute)
//	...
//	scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(locker))
//
// With a [Locker] each run of a job goes to the machine that is first. With an [Elector] all runs go to
// the leader. gocron ignores the locker of a scheduler that has an elector.
//
// # Why a Locker has slots
//
// gocron asks for a lock before each run, with nothing but the name of the job, and releases it after
// the run. If that is all, a machine whose clock is late finds the lock free after a short job, and runs
// it again. A Locker therefore locks the job for one occasion, a slot of package once, and remembers
// on the server that it has been run. The slot is the time by the machine's own clock, rounded to what the
// schedule is made of. A machine starts a job when its own clock shows the scheduled time, so it
// arrives at the same slot as the others, however wrong that clock is. One that was suspended at that time
// starts late, and may arrive at the next slot. A lock that is merely kept for a while works only if the
// clocks differ by less than that, and by less than the interval of the job.
//
// # Failures
//
// A run is remembered when it ends, whether the job has succeeded or not: gocron does not tell a Locker.
// So another machine does not repeat a job that has returned an error or panicked. If the process dies
// during a run, nothing is remembered, and a machine that comes later than the lease runs the job;
// the others have skipped it.
//
// If the server cannot be asked, Lock returns an error, and gocron skips the run on this machine. The event
// listener gocron.AfterLockError receives these errors. Those that match lock.ErrNotAcquired are
// normal: another machine runs the job, or has run it.
package redlatchgocron

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
)

var _ gocron.Locker = (*Locker)(nil)

// Option configures a Locker. nil is invalid.
type Option func(*Locker) error

// Remember sets how long the server remembers a run, as once.Remember does; the default is a day. It
// must be longer than the clocks of the machines differ.
func Remember(d time.Duration) Option {
	return func(l *Locker) error {
		l.once = append(l.once, once.Remember(d))
		return valid(d >= time.Millisecond && d <= lock.MaxLease, "Remember: must be from a millisecond to lock.MaxLease")
	}
}

// MaxHold ends the lock of a run after d, so that a job that hangs does not prevent later runs.
// The job itself ends only if it heeds Locker.Context.
func MaxHold(d time.Duration) Option {
	return func(l *Locker) error {
		l.lock = append(l.lock, lock.MaxHold(d))
		_, err := lock.Resolve(l.lock...)
		return err
	}
}

// Clock sets the clock of slots, for schedulers with gocron.WithClock. The default is time.Now.
func Clock(now func() time.Time) Option {
	return func(l *Locker) error {
		l.now = now
		return valid(now != nil, "Clock: the function is nil")
	}
}

// Logger sets the logger for errors of Unlock, which gocron drops: a run that could not be remembered,
// and a lock that was lost during a run. The default is slog.Default.
func Logger(logger *slog.Logger) Option {
	return func(l *Locker) error {
		l.logger = logger
		return valid(logger != nil, "Logger: the logger is nil")
	}
}

func valid(ok bool, reason string) error {
	if ok {
		return nil
	}
	return fmt.Errorf("%w: %s", lock.ErrInvalid, reason)
}

// refused returns the error of a call that makes a Locker or an Elector.
func refused(err error) error {
	return &lock.Error{Op: "configure", Kind: "adapter", Name: "gocron", Err: err}
}

// Locker is a gocron.Locker that lets each job run once per slot, and no two runs of a job overlap. It
// is safe for concurrent use, by several schedulers too.
type Locker struct {
	client *redlatch.Client
	every  time.Duration
	once   []once.Option
	lock   []lock.Option
	now    func() time.Time
	logger *slog.Logger

	mu   sync.Mutex
	runs map[context.Context]*run // by the context of the job
}

// NewLocker returns a Locker whose slots are the times that are rounded to every: time.Minute for crontabs
// without seconds. All scheduled times must be multiples of it in UTC, so an hour is wrong where
// the time zone differs by half an hour. A machine must start a job less than half of it late. Jobs
// that run more often than that need a shorter one, and a Locker of their own, see
// gocron.WithDistributedJobLocker: a job runs once per slot at most, and Job.RunNow counts.
//
// A gocron.DurationJob starts at different times on each machine, unless gocron.WithStartAt gives them
// the same multiple of the duration.
//
// The machines know a job by its name. Set it with gocron.WithName: the default is the name of the
// function, which other versions of a program may give to another function. Two jobs of one name are
// one job. The keys on the server begin with "gocron:" and the name.
func NewLocker(client *redlatch.Client, every time.Duration, opts ...Option) (*Locker, error) {
	l := &Locker{
		client: client, every: every, lock: []lock.Option{lock.Wait(0), lock.Site(1)},
		now: time.Now, logger: slog.Default(), runs: map[context.Context]*run{},
	}
	err := cmp.Or(
		valid(client != nil, "NewLocker: the client is nil"),
		valid(every > 0, "NewLocker: slots need a positive duration"),
	)
	for _, opt := range opts {
		if err == nil {
			err = valid(opt != nil, "NewLocker: an option is nil")
		}
		if err == nil {
			err = opt(l)
		}
	}
	if err != nil {
		return nil, refused(err)
	}
	return l, nil
}

// Lock begins the run of the job in the current slot. It does not wait for other machines, because
// gocron plans the next run when it returns. The error matches lock.ErrNotAcquired if the
// slot has been run, or the job runs elsewhere; others are those of once.Run.
func (l *Locker) Lock(ctx context.Context, name string) (gocron.Lock, error) {
	r := &run{l: l, ctx: ctx, name: "gocron:" + name, release: make(chan struct{}), ended: make(chan struct{})}
	r.slot = once.At(l.now().Round(l.every))
	locked := make(chan struct{})
	go r.do(locked)
	select {
	case <-locked:
		return r, nil
	case <-r.ended:
		return nil, r.err
	}
}

// Context returns the context of the run that gocron has started with ctx, the job's first argument. It
// is a child of ctx that also ends when the lock of the run is lost, or MaxHold is over. Call it when the
// job begins. If there is no such run, it returns ctx.
func (l *Locker) Context(ctx context.Context) context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.runs[ctx]; r != nil {
		return r.held
	}
	return ctx
}

// run is one run of a job, from Lock to Unlock.
type run struct {
	l       *Locker
	ctx     context.Context // of the job
	held    context.Context // a child of ctx, valid while the locks are held
	name    string
	slot    string
	unlock  sync.Once
	release chan struct{} // closed by Unlock
	ended   chan struct{} // closed when err is valid
	err     error
}

// do holds the locks of the run until Unlock. It closes locked when it has them.
func (r *run) do(locked chan<- struct{}) {
	defer close(r.ended)
	ran, err := r.l.client.Once(r.name, r.l.once...).Run(r.ctx, r.slot, func(ctx context.Context) error {
		// Runs of different slots exclude each other here.
		return r.l.client.Lock(r.name).Do(ctx, func(ctx context.Context) error {
			r.register(ctx)
			close(locked)
			<-r.release
			return nil
		}, r.l.lock...)
	}, r.l.lock...)
	if !ran && err == nil {
		err = &lock.Error{
			Op: "acquire", Kind: "once", Name: r.name, Err: fmt.Errorf("%w: it has been run for %s", lock.ErrNotAcquired, r.slot),
		}
	}
	r.err = err
}

// register makes the context of the run known to Locker.Context.
func (r *run) register(held context.Context) {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	r.held = held
	r.l.runs[r.ctx] = r
}

// Unlock ends the run and remembers it. The error is that of once.Run, and is logged.
func (r *run) Unlock(context.Context) error {
	r.unlock.Do(func() {
		r.l.mu.Lock()
		if r.l.runs[r.ctx] == r {
			delete(r.l.runs, r.ctx)
		}
		r.l.mu.Unlock()
		close(r.release)
		<-r.ended
		if r.err != nil {
			r.l.logger.Warn("redlatch: the end of a job's run has failed", "name", r.name, "slot", r.slot, "error", r.err)
		}
	})
	return r.err
}
