package rlock

import (
	"math"
	"math/rand/v2"
	"time"
)

// Backoff gives the pause of a waiter for a spin lock or a plain lock after its n-th
// failed attempt, n counting from 1. It may be called concurrently.
type Backoff func(n int) time.Duration

// WithBackoff sets the pauses of a spin lock, or those at most of a plain lock, whose
// waiters are woken by messages too. Other locks do not pause.
func WithBackoff(b Backoff) Option {
	return func(p *protocol) {
		if b != nil {
			p.backoff = b
		}
	}
}

// ExponentialBackoff pauses for initial, then multiplier times longer after
// each further attempt, but no longer than limit. Up to a millisecond per failed
// attempt is added at random so that waiters drift apart. It is the arithmetic
// of Redisson's spin lock, whose defaults are 1 ms, 128 ms and 2. Values that
// make no sense are raised: the initial pause and the limit to a millisecond,
// the multiplier to 1.
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

// ConstantBackoff pauses for d after every attempt, a millisecond at least.
func ConstantBackoff(d time.Duration) Backoff {
	d = max(d, time.Millisecond)
	return func(int) time.Duration { return d }
}
