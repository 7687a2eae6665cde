package rlock

import (
	"errors"
	"math"
	"math/rand/v2"
	"time"
)

// Backoff returns the pause of a waiter for a spin lock or a plain lock after its n-th
// attempt, counted from 1, if that attempt fails. It is called before the attempt, and may be
// called concurrently. A panic ends the wait and leaves nothing on the server.
type Backoff func(n int) time.Duration

// WithBackoff sets the pauses of a spin lock, or the longest pauses of a plain lock, whose
// waiters are also woken by messages. It is not an option of other locks, and b must not be nil.
func WithBackoff(b Backoff) Option {
	return func(s *settings) error {
		if b == nil {
			return errors.New("rlock.WithBackoff(nil)")
		}
		if s.backoff == nil {
			return errors.New("rlock.WithBackoff is for SpinLock and PlainLock")
		}
		s.backoff = b
		return nil
	}
}

// ExponentialBackoff pauses for initial, then multiplier times longer after each further
// attempt, up to limit. It adds up to a millisecond per failed attempt at random, so that
// waiters drift apart. It is the algorithm of Redisson's spin lock, whose defaults are 1 ms,
// 128 ms and 2. An initial pause or a limit below a millisecond counts as a millisecond, a
// multiplier below 1 as 1.
func ExponentialBackoff(initial, limit time.Duration, multiplier float64) Backoff {
	initial = max(initial, time.Millisecond)
	limit = max(limit, time.Millisecond)
	multiplier = max(multiplier, 1)
	return func(n int) time.Duration {
		pause := float64(initial) * math.Pow(multiplier, float64(n-1))
		if pause >= float64(limit) {
			return limit
		}
		return min(limit, time.Duration(pause)+rand.N(time.Duration(n))*time.Millisecond)
	}
}

// ConstantBackoff pauses for d after every attempt, and for at least a millisecond.
func ConstantBackoff(d time.Duration) Backoff {
	d = max(d, time.Millisecond)
	return func(int) time.Duration { return d }
}
