// Package once runs work once although several machines start it, such as a cron job that every
// machine has in its schedule.
//
//	job := client.Once("report")
//	ran, err := job.Run(ctx, once.At(due), func(ctx context.Context) error {
//		return writeReport(ctx, due)
//	})
//
// # Slots
//
// A slot is one occasion to do the work: usually the time at which it is due, as all machines know
// it. The first machine runs the work, under a lock. The others wait for it. If it succeeds, that is
// remembered on the server for a day (see Remember), and they return. If it fails, or its process
// dies, the next of them runs the work. A machine whose clock is late has the same slot, only later,
// so it finds the work done, however quickly that was.
//
// Use the time from the schedule, not the current one, which differs between machines. Where only the
// current time is known, round it to what the schedule is made of: for a job that is due at whole
// minutes, once.At(time.Now().Round(time.Minute)).
//
// Different slots do not exclude each other: the run of 12:00 may still go on when the run of 13:00
// begins. If they must not overlap, hold a lock of the job's own during the work.
//
// # Durations
//
// The options of Run bound the time for which a run occupies its slot. lock.AtLeast(d) keeps it for d
// at least: a run that fails sooner is repeated when d is over, and one that succeeds is remembered for
// d even if Remember is shorter.
// lock.MaxHold(d) ends the context of work that takes longer than d, and leaves the slot to others.
// Without it the lock of a run is renewed for as long as its process lives; after the death of a
// process the slot is free when the lease is over, 30 s later by default (see
// redlatch.WithWatchdogTimeout). lock.Wait(0) does not wait for another machine's run.
//
// # Exactly once
//
// No lock can run work exactly once. A process can die after the work and before that is
// remembered, and one that is paused for longer than its lease may go on when another has begun. Make
// the effect of the work idempotent, or write it in a transaction together with the slot.
package once

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/rueidis"

	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

//go:embed lua/*.lua
var luaFiles embed.FS

var markDoneScript = wire.LoadScript(luaFiles, "mark_done")

// DefaultRemember is how long the server remembers success without Remember.
const DefaultRemember = 24 * time.Hour

// Option configures a Once. nil is invalid.
type Option func(*Once) error

// Remember sets how long the server remembers that the work of a slot has succeeded; the default is
// DefaultRemember, a day. d must be from a millisecond to lock.MaxLease. It must be longer than the clocks of
// the machines differ, together with the time for which one may be late otherwise.
func Remember(d time.Duration) Option {
	return func(o *Once) error {
		if d < time.Millisecond || d > lock.MaxLease {
			return fmt.Errorf("once.Remember(%v): must be from a millisecond to %v", d, lock.MaxLease)
		}
		o.remember = d
		return nil
	}
}

// At returns the slot of work that is due at t. Equal times in different time zones are the same slot.
func At(t time.Time) string { return t.UTC().Format("20060102T150405.999999999Z") }

// Once is work that is to run once for each slot. Client.Once returns it. It is immutable and safe for
// concurrent use.
type Once struct {
	e        *engine.Engine
	s        *session.Session // of e
	name     string
	key      string
	remember time.Duration
	err      error // the name or an option is invalid
}

// New returns the Once of that name. Client.Once calls it.
func New(e *engine.Engine, name string, opts ...Option) *Once {
	s := e.Session
	o := &Once{e: e, s: s, name: name, remember: DefaultRemember}
	o.key, o.err = s.Key(name, s.CheckName)
	o.err = cmp.Or(o.err, session.Configure(o, opts))
	return o
}

// Name returns the name that was passed to the client.
func (o *Once) Name() string { return o.name }

// Run runs fn unless the work of the slot has been done, and reports whether it ran fn. The context of
// fn ends if the lock is lost, or after lock.MaxHold. If another process runs the work, Run
// blocks until that has succeeded, and returns false, or has failed, and runs fn.
//
// An error with false is an error of Done or of Locker.Lock: lock.ErrNotAcquired for example if lock.Wait
// ran out or ctx ended while another process ran the work. An error with true is the error of fn,
// unchanged; the next caller then runs the work again. If fn has succeeded and that could not be
// stored, the work may run again, and the error matches lock.ErrIndeterminate or lock.ErrClosed, or is
// the refusal of the server. Run tries to store it until the lease is over, for 5 s at least, but no
// longer than 5 s after the end of ctx. If the lock could not be released, or was lost while fn ran,
// the error is a *lock.DoError; success is remembered nevertheless.
//
// If fn panics or calls runtime.Goexit, the work counts as failed, and the panic continues. The
// options have the same meaning as for Locker.Lock.
func (o *Once) Run(ctx context.Context, slot string, fn func(ctx context.Context) error, opts ...lock.Option) (ran bool, err error) {
	settings, optErr := engine.Resolve(false, opts)
	if fn == nil {
		optErr = fmt.Errorf("%w: the function is nil", lock.ErrInvalid)
	}
	if err := cmp.Or(o.check(ctx, slot), optErr); err != nil {
		return false, o.object().Refused("run", err)
	}
	until := time.Now().Add(settings.Wait) // the end of the wait, for a server that cannot be asked too
	if !settings.Bounded {
		until = time.Now().Add(lock.MaxLease)
	}
	asks := until
	if settings.FailFast || settings.Bounded && settings.Wait == 0 {
		asks = time.Time{} // once
	}
	if done, err := o.doneBy(ctx, slot, asks); done || err != nil {
		return false, err
	}
	if settings.Bounded {
		opts = append(slices.Clip(opts), lock.Wait(max(0, time.Until(until))))
	}

	// A slot is kept only if its work may run again, which is not known before the work ends.
	opts = append(slices.Clip(opts), lock.AtLeast(0))
	hold, err := rlock.NewAt(o.e, o.name, wire.OnceRun(o.key, slot)).Lock(ctx, opts...)
	if errors.Is(err, lock.ErrNotAcquired) {
		if done, doneErr := o.Done(ctx, slot); done && doneErr == nil {
			return false, nil // another process has just finished
		}
	}
	if err != nil {
		return false, err
	}

	keepUntil := engine.KeptUntil(settings)
	done := false

	// Deferred, so that a panic or Goexit in fn continues after it.
	defer func() {
		if endErr := end(ctx, hold, keepUntil, ran && !done); endErr != nil && ran {
			err = &lock.DoError{Func: err, Unlock: endErr}
		}
	}()
	if done, err = o.doneBy(ctx, slot, time.Now().Add(hold.Remaining())); done || err != nil {
		return false, err
	}

	ran = true
	if err = fn(hold.Context()); err != nil {
		return true, err
	}

	err = o.succeeded(ctx, slot, hold, keepUntil)
	done = err == nil
	return true, err
}

// end ends the hold of a run. With keep set, the slot stays occupied until then.
func end(ctx context.Context, hold lock.Hold, until time.Time, keep bool) error {
	if rest := time.Until(until); keep && rest >= time.Millisecond {
		_, err := lock.Detach(ctx, hold, rest)
		return err
	}
	return hold.Unlock(ctx)
}

// succeeded stores that the work of the slot has been done. It can be repeated, and tries even if ctx
// is done. It is remembered until then at least.
func (o *Once) succeeded(ctx context.Context, slot string, hold lock.Hold, until time.Time) error {
	if !o.s.Stay() {
		return o.object().Refused("mark done", fmt.Errorf("%w: the work is not remembered", lock.ErrClosed))
	}
	defer o.s.Leave()

	began := time.Now()
	limit := max(hold.Remaining(), engine.UnlockTimeout)
	longer, cancel := session.LingerFor(ctx, engine.UnlockTimeout, limit)
	defer cancel()

	unknown := false // an attempt without an answer may have stored it
	err := o.s.Retry(longer, began.Add(limit), func(ctx context.Context) error {
		set := o.s.Client.B().Set().Key(wire.OnceDone(o.key, slot)).Value(wire.OnceDoneValue(lock.OwnerOf(hold), time.Now())).
			Px(max(o.remember, time.Until(until))).Build()
		err := o.s.Client.Do(wire.Shared(ctx), set).Error()
		unknown = unknown || err != nil && !wire.IsRefused(err)
		return err
	}, wire.IsRefused)
	if err != nil && unknown {
		err = errors.Join(lock.ErrIndeterminate, err)
	}
	return o.object().Failed(ctx, "mark done", began, err)
}

// Done reports whether the work of the slot has been done, as far as the server remembers. It blocks
// for one round trip. The error matches lock.ErrUnavailable, lock.ErrClosed or lock.ErrInvalid, or is a
// refusal of the server.
func (o *Once) Done(ctx context.Context, slot string) (bool, error) {
	if err := o.check(ctx, slot); err != nil {
		return false, o.object().Refused("read", err)
	}

	return o.doneBy(ctx, slot, time.Time{})
}

// doneBy is Done for a slot that was checked. It asks a server that cannot be asked again until then, or once
// if until is zero.
func (o *Once) doneBy(ctx context.Context, slot string, until time.Time) (done bool, err error) {
	began := time.Now()
	err = o.s.Retry(ctx, until, func(ctx context.Context) error {
		// Not EXISTS: a lock with the name of this key would keep the work from ever running.
		err := wire.Read(ctx, o.s.Client, "GET", wire.OnceDone(o.key, slot)).Error()
		done = err == nil
		if rueidis.IsRedisNil(err) {
			return nil
		}
		return err
	}, wire.IsRefused)
	return done, o.object().ReadFailed(ctx, "read", began, err)
}

// MarkDone makes the slot done although Run did not run its work here, for example because someone has done
// it by hand, and reports whether it was not done before. The server remembers it for as long as it remembers
// success (see Remember), and never for less time than before. MarkDone does not affect a run in progress; others that
// wait for that run find the work done when it ends. It blocks for one round trip. The error matches
// lock.ErrUnavailable, lock.ErrIndeterminate, lock.ErrClosed or lock.ErrInvalid, or is a refusal of the
// server.
func (o *Once) MarkDone(ctx context.Context, slot string) (bool, error) {
	if err := o.check(ctx, slot); err != nil {
		return false, o.object().Refused("mark done", err)
	}

	began := time.Now()
	value := wire.OnceDoneValue(o.s.NewOwner(), began)
	marked, err := wire.Bool(markDoneScript.Exec(ctx, o.s.Client, []string{wire.OnceDone(o.key, slot)},
		[]string{value, wire.Millis(o.remember)}))
	return marked, o.object().Failed(ctx, "mark done", began, err)
}

// Forget removes the memory of the slot, so that its work can run again, and reports whether there was
// any. It does not affect a run in progress. It blocks for one round trip. The error matches
// lock.ErrUnavailable, lock.ErrIndeterminate, lock.ErrClosed or lock.ErrInvalid, or is a refusal of the
// server.
func (o *Once) Forget(ctx context.Context, slot string) (bool, error) {
	if err := o.check(ctx, slot); err != nil {
		return false, o.object().Refused("forget", err)
	}

	began := time.Now()
	del := o.s.Client.B().Del().Key(wire.OnceDone(o.key, slot)).Build()
	had, err := wire.Bool(o.s.Client.Do(wire.Shared(ctx), del))
	return had, o.object().Failed(ctx, "forget", began, err)
}

// object returns what errors name.
func (o *Once) object() wire.Object { return wire.Object{Kind: "once", Name: o.name} }

// check returns an error if no operation on the slot can succeed.
func (o *Once) check(ctx context.Context, slot string) error {
	if err := cmp.Or(o.err, o.s.Check(ctx)); err != nil {
		return err
	}
	if slot == "" {
		return fmt.Errorf("%w: the slot is empty", lock.ErrInvalid)
	}
	return nil
}
