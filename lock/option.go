package lock

import (
	"context"
	"fmt"
	"runtime"
	"time"
)

// Option configures one acquisition: it is a [HoldOption] or a [WaitOption]. Calls that wait for the lock accept both. Only
// the functions of this package and of package semaphore make options.
type Option interface{ set(o *Options) error }

// HoldOption configures what a call acquires. Calls that do not wait, such as TryLock and Adopt, accept no other options.
type HoldOption interface {
	Option
	ofHold()
}

// WaitOption configures the wait of a call. The permits of a semaphore without ids, which have no lease, have no
// other options.
type WaitOption interface {
	Option
	ofWait()
}

// Options is the result of a list of options, for implementations of Locker and for adapters that check what they are given.
type Options struct {
	Lease    time.Duration // 0: renewed until Unlock; NoExpiry: see semaphore.Forever
	Wait     time.Duration // valid if Bounded
	Bounded  bool          // Wait was given
	FailFast bool
	MaxHold  time.Duration   // 0: unbounded
	Parent   context.Context // nil: the context of the call
	AtLeast  time.Duration   // 0: Unlock releases the lock at once

	MaxWaiters int     // 0: unbounded
	Site       uintptr // a program counter of runtime.Callers; 0: the line of the call
}

// Resolve evaluates opts; the last option of a kind wins. It returns an error that
// matches ErrInvalid and names the invalid option.
func Resolve[O Option](opts ...O) (Options, error) {
	if len(opts) == 0 {
		return Options{}, nil // without the allocation that the options below take
	}

	var o Options
	for _, opt := range opts {
		if any(opt) == nil {
			return Options{}, invalid("a nil option")
		}
		if err := opt.set(&o); err != nil {
			return Options{}, err
		}
	}

	if o.Lease != 0 && o.MaxHold > 0 {
		return Options{}, invalid("MaxHold excludes Lease: a hold with a Lease is not renewed")
	}
	if limit := max(o.Lease, o.MaxHold); limit > 0 && o.AtLeast > limit {
		return Options{}, invalid("AtLeast(%v) exceeds Lease or MaxHold, %v", o.AtLeast, limit)
	}

	return o, nil
}

type (
	lease      time.Duration
	maxHold    time.Duration
	atLeast    time.Duration
	parent     struct{ ctx context.Context }
	site       uintptr
	wait       time.Duration
	maxWaiters int
	failFast   struct{}
)

func (lease) ofHold()      {}
func (maxHold) ofHold()    {}
func (atLeast) ofHold()    {}
func (parent) ofHold()     {}
func (site) ofHold()       {}
func (wait) ofWait()       {}
func (maxWaiters) ofWait() {}
func (failFast) ofWait()   {}

// Lease sets a fixed lease: the lock is not renewed, and the hold ends after d unless
// Unlock comes first. Without Lease the lock is renewed until Unlock. d must be from a
// millisecond, the server's unit, to MaxLease, and exceed a few round trips. Redisson calls it leaseTime.
func Lease(d time.Duration) HoldOption { return lease(d) }

func (d lease) set(o *Options) error {
	if d := time.Duration(d); (d < time.Millisecond || d > MaxLease) && d != NoExpiry {
		return invalid("lease %v: must be from a millisecond to %v", d, MaxLease)
	}
	o.Lease = time.Duration(d)
	return nil
}

// MaxHold stops the renewal after d. The hold then ends as lost, with ReasonMaxHold, so
// that stuck work cannot keep a lock forever. The lock itself becomes free at Unlock or
// when its last lease ends. Without MaxHold the lock is renewed until Unlock. d must be
// greater than zero. MaxHold excludes Lease, which is not renewed.
func MaxHold(d time.Duration) HoldOption { return maxHold(d) }

func (d maxHold) set(o *Options) error {
	if d <= 0 {
		return invalid("MaxHold(%v): must be greater than zero", time.Duration(d))
	}
	o.MaxHold = time.Duration(d)
	return nil
}

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
func AtLeast(d time.Duration) HoldOption { return atLeast(d) }

func (d atLeast) set(o *Options) error {
	if d := time.Duration(d); d != 0 && (d < time.Millisecond || d > MaxLease) {
		return invalid("AtLeast(%v): must be 0, or from a millisecond to %v", d, MaxLease)
	}
	o.AtLeast = time.Duration(d)
	return nil
}

// Parent makes the hold's context a child of ctx instead of the context of the call, which
// then bounds the wait only. So a signal can end the waits for a lock while the work under it
// finishes:
//
//	wait, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
//	defer stop()
//	err := l.Do(wait, work, lock.Parent(ctx)) // ends early if it waits, and not if it works
//
// The values of the hold's context, such as a trace and an owner, come from ctx. The end
// of ctx does not release the lock. ctx must not be nil.
func Parent(ctx context.Context) HoldOption { return parent{ctx} }

func (p parent) set(o *Options) error {
	if p.ctx == nil {
		return invalid("Parent(nil)")
	}
	o.Parent = p.ctx
	return nil
}

// Site has redlatch.Client.Holds and logs show another line of the program than the call that acquires. It is for
// adapters, which make that call on a goroutine of a framework. As in runtime.Caller, a skip of 0 is the line that
// calls Site, and 1 is the call of the function with that line: an adapter's constructor calls Site(1) and keeps the
// option. skip must not be negative. With a skip beyond the outermost caller Site has no effect.
func Site(skip int) HoldOption {
	if skip < 0 {
		return site(badSkip)
	}
	const own = 2 // runtime.Callers and Site
	var pc [1]uintptr
	runtime.Callers(own+skip, pc[:])
	return site(pc[0])
}

// badSkip is the site of a negative skip.
const badSkip = ^uintptr(0)

func (s site) set(o *Options) error {
	if s == site(badSkip) {
		return invalid("Site: skip must not be negative")
	}
	o.Site = uintptr(s)
	return nil
}

// Wait bounds the wait of Lock, for the lock and for a server that cannot be reached, but not the hold. Without
// Wait only the context bounds it; FailFast does not wait for a server.
// With Wait(0) Lock makes one attempt, like TryLock. When d runs out the error matches
// ErrNotAcquired. d must not be negative. Redisson calls it waitTime.
func Wait(d time.Duration) WaitOption { return wait(d) }

func (d wait) set(o *Options) error {
	if d < 0 {
		return invalid("Wait(%v): must not be negative", time.Duration(d))
	}
	o.Wait = time.Duration(d)
	o.Bounded = true
	return nil
}

// MaxWaiters makes Lock fail instead of wait if n callers of this client already wait for the
// same lock, so that callers do not pile up behind a slow holder. The error then matches
// ErrNotAcquired. A call that does not have to wait is not affected, and neither is the re-entry
// of an owner. The two sides of a read-write lock count together, and so do all requests for
// permits of a semaphore. n must be at least 1: TryLock does not wait at all. MaxWaiters is not a
// valid option of a multi-lock, whose members have their own waiters.
func MaxWaiters(n int) WaitOption { return maxWaiters(n) }

func (n maxWaiters) set(o *Options) error {
	if n < 1 {
		return invalid("MaxWaiters(%d): must be at least 1; TryLock does not wait", int(n))
	}
	o.MaxWaiters = int(n)
	return nil
}

// FailFast makes Lock fail if the server cannot be reached, instead of waiting for it as for the lock. The error
// then matches ErrUnavailable, or ErrIndeterminate if a request was sent. It is for callers with a caller of their
// own, such as HTTP handlers.
func FailFast() WaitOption { return failFast{} }

func (failFast) set(o *Options) error {
	o.FailFast = true
	return nil
}

// invalid returns an error that matches ErrInvalid.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}

// MaxLease is the longest lease. It is far longer than useful, and safe for the
// arithmetic of all clocks involved.
const MaxLease = 100 * 365 * 24 * time.Hour
