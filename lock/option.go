package lock

import (
	"fmt"
	"time"
)

// Option changes one acquisition. The zero Option is not valid.
type Option struct {
	kind optionKind
	d    time.Duration
}

type optionKind uint8

const (
	_ optionKind = iota
	optionLease
	optionWait
	optionMaxHold
)

// Lease takes the lock for d and no longer: it is not renewed, and the hold
// ends after d unless Unlock comes first. Without Lease the lock is renewed
// until Unlock. d is from a millisecond, the server's unit, to MaxLease. It is
// what Redisson calls leaseTime.
func Lease(d time.Duration) Option { return Option{optionLease, d} }

// Wait bounds how long Lock waits, without touching the life of the hold. With
// Wait(0) Lock makes one attempt, like TryLock. When d runs out the error
// matches ErrNotAcquired. d is not negative. It is what Redisson calls
// waitTime.
func Wait(d time.Duration) Option { return Option{optionWait, d} }

// MaxHold stops renewing after d: the hold then ends as lost, with the reason
// ReasonMaxHold, so that work that is stuck cannot keep a lock for ever. The
// lock itself becomes free at Unlock, or when its last lease is over. d is
// greater than zero. It excludes Lease, which is never renewed anyway.
func MaxHold(d time.Duration) Option { return Option{optionMaxHold, d} }

// Options is what a list of Option says, for those who implement a Locker.
type Options struct {
	Lease   time.Duration // 0: renewed until Unlock
	Wait    time.Duration // meaningful if Bounded
	Bounded bool          // whether Wait was given
	MaxHold time.Duration // 0: no bound
}

// Resolve reads opts; of two options of a kind the later one counts. It
// returns an error that matches ErrInvalid and names the option that is wrong.
func Resolve(opts ...Option) (Options, error) {
	o, err := ResolvePermit(opts...)
	if err == nil && o.Lease == NoExpiry {
		return Options{}, CheckLease(o.Lease)
	}
	return o, err
}

// ResolvePermit is Resolve for what may be held without end, as the permits of a
// semaphore may: there Lease(NoExpiry) is valid, and Options.Lease says so.
func ResolvePermit(opts ...Option) (Options, error) {
	var o Options
	for _, opt := range opts {
		switch opt.kind {
		case optionLease:
			if err := CheckLease(opt.d); err != nil && opt.d != NoExpiry {
				return Options{}, err
			}
			o.Lease = opt.d
		case optionWait:
			if opt.d < 0 {
				return Options{}, fmt.Errorf("%w: Wait(%v): a wait is not negative", ErrInvalid, opt.d)
			}
			o.Wait, o.Bounded = opt.d, true
		case optionMaxHold:
			if opt.d <= 0 {
				return Options{}, fmt.Errorf("%w: MaxHold(%v): must be greater than zero", ErrInvalid, opt.d)
			}
			o.MaxHold = opt.d
		default:
			return Options{}, fmt.Errorf("%w: the zero lock.Option", ErrInvalid)
		}
	}
	if o.Lease != 0 && o.MaxHold > 0 {
		return Options{}, fmt.Errorf("%w: MaxHold bounds the renewal of a hold, and one with a Lease is not renewed", ErrInvalid)
	}
	return o, nil
}

// MaxLease is the longest lease: far longer than any that makes sense, and
// short enough for the arithmetic of every clock involved.
const MaxLease = 100 * 365 * 24 * time.Hour

// CheckLease returns an error that matches ErrInvalid unless d is a lease the
// server can keep: from a millisecond to MaxLease.
func CheckLease(d time.Duration) error {
	if d < time.Millisecond || d > MaxLease {
		return fmt.Errorf("%w: lease %v: must be from a millisecond to %v", ErrInvalid, d, MaxLease)
	}
	return nil
}
