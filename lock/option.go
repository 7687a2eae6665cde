package lock

import (
	"context"
	"fmt"
	"runtime"
	"time"
)

// Option configures one acquisition. The zero Option is invalid.
type Option struct {
	kind   optionKind
	d      time.Duration
	parent context.Context
	n      int // a number, or a program counter
}

type optionKind uint8

const (
	_ optionKind = iota
	optionLease
	optionWait
	optionMaxHold
	optionParent
	optionAtLeast
	optionMaxWaiters
	optionFailFast
	optionSite
)

// Lease sets a fixed lease: the lock is not renewed, and the hold ends after d unless
// Unlock comes first. Without Lease the lock is renewed until Unlock. d must be from a
// millisecond, the server's unit, to MaxLease, and exceed a few round trips. Redisson calls it leaseTime.
func Lease(d time.Duration) Option { return Option{kind: optionLease, d: d} }

// Wait bounds the wait of Lock, for the lock and for a server that cannot be reached, but not the hold. Without
// Wait only the context bounds it; FailFast does not wait for a server.
// With Wait(0) Lock makes one attempt, like TryLock. When d runs out the error matches
// ErrNotAcquired. d must not be negative. Redisson calls it waitTime.
func Wait(d time.Duration) Option { return Option{kind: optionWait, d: d} }

// MaxHold stops the renewal after d. The hold then ends as lost, with ReasonMaxHold, so
// that stuck work cannot keep a lock forever. The lock itself becomes free at Unlock or
// when its last lease ends. Without MaxHold the lock is renewed until Unlock. d must be
// greater than zero. MaxHold excludes Lease, which is not renewed.
func MaxHold(d time.Duration) Option { return Option{kind: optionMaxHold, d: d} }

// Parent makes the hold's context a child of parent instead of the context of the call, which
// then bounds the wait only. So a signal can end the waits for a lock while the work under it
// finishes:
//
//	wait, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
//	defer stop()
//	err := l.Do(wait, work, lock.Parent(ctx)) // ends early if it waits, and not if it works
//
// The values of the hold's context, such as a trace and an owner, come from parent. The end
// of parent does not release the lock. parent must not be nil.
func Parent(parent context.Context) Option { return Option{kind: optionParent, parent: parent} }

// AtLeast keeps the lock for d after Lock returns, even if Unlock comes earlier: Unlock then ends
// the hold and leaves the lock held for the rest of d, instead of releasing it. It takes no additional
// request. It is for work that is to run once per interval although the clocks of the machines
// differ: a machine that starts a little later finds the lock held. d must be longer than the clocks
// differ and shorter than the interval.
//
// Unlock keeps the lock whether the work has succeeded or not. For a job that another machine is to
// repeat after a failure, use package once.
//
// AtLeast applies to Unlock only. If the process dies, or the client is closed before Unlock, the lock
// becomes free when its lease ends. A hold that Adopt returns has options of its own.
//
// d must be 0, which is the default, or from a millisecond to MaxLease, and not exceed Lease or
// MaxHold. Read locks and the permits of semaphores have no such option.
func AtLeast(d time.Duration) Option { return Option{kind: optionAtLeast, d: d} }

// MaxWaiters makes Lock fail instead of wait if n callers of this client already wait for the
// same lock, so that callers do not pile up behind a slow holder. The error then matches
// ErrNotAcquired. A call that does not have to wait is not affected, and neither is the re-entry
// of an owner. The two sides of a read-write lock count together, and so do all requests for
// permits of a semaphore. n must be at least 1: TryLock does not wait at all. MaxWaiters is not a
// valid option of TryLock, nor of a multi-lock, whose members have their own waiters.
func MaxWaiters(n int) Option { return Option{kind: optionMaxWaiters, n: n} }

// FailFast makes Lock fail if the server cannot be reached, instead of waiting for it as for the lock. The error
// then matches ErrUnavailable, or ErrIndeterminate if a request was sent. It is for callers with a caller of their
// own, such as HTTP handlers. TryLock never waits, so FailFast is not a valid option there.
func FailFast() Option { return Option{kind: optionFailFast} }

// Site has redlatch.Client.Holds and logs show another line of the program than the call that acquires. It is for
// adapters, which make that call on a goroutine of a framework. As in runtime.Caller, a skip of 0 is the line that
// calls Site, and 1 is the call of the function with that line: an adapter's constructor calls Site(1) and keeps the
// option. skip must not be negative. With a skip beyond the outermost caller Site has no effect.
func Site(skip int) Option {
	if skip < 0 {
		return Option{kind: optionSite, n: -1}
	}
	const own = 2 // runtime.Callers and Site
	var pc [1]uintptr
	runtime.Callers(own+skip, pc[:])
	return Option{kind: optionSite, n: int(pc[0])}
}

// Options is the result of a list of options, for implementations of Locker.
type Options struct {
	Lease    time.Duration // 0: renewed until Unlock
	Wait     time.Duration // valid if Bounded
	Bounded  bool          // Wait was given
	FailFast bool
	MaxHold  time.Duration   // 0: unbounded
	Parent   context.Context // nil: the context of the call; see HoldParent
	AtLeast  time.Duration   // 0: Unlock releases the lock at once

	MaxWaiters int     // 0: unbounded
	Site       uintptr // a program counter of runtime.Callers; 0: that of the call
}

// HoldParent returns the parent of the hold's context, for a call with ctx.
func (o Options) HoldParent(ctx context.Context) context.Context {
	if o.Parent != nil {
		return o.Parent
	}
	return ctx
}

// KeepUntil returns until when AtLeast keeps a lock acquired now, and the zero time without it.
func (o Options) KeepUntil() time.Time {
	if o.AtLeast == 0 {
		return time.Time{}
	}
	return time.Now().Add(o.AtLeast)
}

// Resolve evaluates opts; the last option of a kind wins. It returns an error that
// matches ErrInvalid and names the invalid option.
func Resolve(opts ...Option) (o Options, err error) {
	err = o.resolve(opts)
	if err == nil && o.Lease == NoExpiry {
		err = invalid("a lease without end (semaphore.Forever) is for permits of a PermitSemaphore")
	}
	if err != nil {
		o = Options{}
	}
	return o, err
}

// ResolvePermit is Resolve for the permits of a semaphore, which may be held without
// expiry: Lease(NoExpiry) is valid and sets Options.Lease to NoExpiry.
func ResolvePermit(opts ...Option) (o Options, err error) {
	err = o.resolve(opts)
	if err == nil && o.AtLeast > 0 {
		err = invalid("AtLeast: a permit has no least time")
	}
	if err != nil {
		o = Options{}
	}
	return o, err
}

// resolve sets what opts say.
func (o *Options) resolve(opts []Option) error {
	for i := range opts {
		if err := o.set(&opts[i]); err != nil {
			return err
		}
	}

	if o.Lease != 0 && o.MaxHold > 0 {
		return invalid("MaxHold excludes Lease: a hold with a Lease is not renewed")
	}
	if limit := max(o.Lease, o.MaxHold); limit > 0 && o.AtLeast > limit {
		return invalid("AtLeast(%v) exceeds Lease or MaxHold, %v", o.AtLeast, limit)
	}

	return nil
}

// set sets what an option says.
func (o *Options) set(opt *Option) error {
	switch opt.kind {
	case optionLease:
		if err := CheckLease(opt.d); err != nil && opt.d != NoExpiry {
			return err
		}
		o.Lease = opt.d
	case optionWait:
		if opt.d < 0 {
			return invalid("Wait(%v): must not be negative", opt.d)
		}
		o.Wait = opt.d
		o.Bounded = true
	case optionMaxHold:
		if opt.d <= 0 {
			return invalid("MaxHold(%v): must be greater than zero", opt.d)
		}
		o.MaxHold = opt.d
	case optionParent:
		if opt.parent == nil {
			return invalid("Parent(nil)")
		}
		o.Parent = opt.parent
	case optionAtLeast:
		if opt.d != 0 && CheckLease(opt.d) != nil {
			return invalid("AtLeast(%v): must be 0, or from a millisecond to %v", opt.d, MaxLease)
		}
		o.AtLeast = opt.d
	case optionMaxWaiters:
		if opt.n < 1 {
			return invalid("MaxWaiters(%d): must be at least 1; TryLock does not wait", opt.n)
		}
		o.MaxWaiters = opt.n
	case optionFailFast:
		o.FailFast = true
	case optionSite:
		if opt.n < 0 {
			return invalid("Site: skip must not be negative")
		}
		o.Site = uintptr(opt.n)
	default:
		return invalid("the zero lock.Option")
	}

	return nil
}

// invalid returns an error that matches ErrInvalid.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}

// MaxLease is the longest lease. It is far longer than useful, and safe for the
// arithmetic of all clocks involved.
const MaxLease = 100 * 365 * 24 * time.Hour

// CheckLease returns an error that matches ErrInvalid unless d is a lease the server
// can keep: from a millisecond to MaxLease.
func CheckLease(d time.Duration) error {
	if d < time.Millisecond || d > MaxLease {
		return fmt.Errorf("%w: lease %v: must be from a millisecond to %v", ErrInvalid, d, MaxLease)
	}
	return nil
}
