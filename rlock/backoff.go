package rlock

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/redlatch/redlatch/lock"
)

// Backoff returns the pause of a waiter for a spin lock, or the longest pause of a waiter for a plain lock, which messages
// wake too, after its n-th attempt, counted from 1, if that attempt fails. It is called before the attempt, and may be
// called concurrently. A panic ends the wait and leaves nothing on the server.
type Backoff func(n int) time.Duration

// lastOf returns the last of the backoffs that a caller has given, or standard if there is none. A nil Backoff is an
// error of the lock.
func lastOf(backoff []Backoff, standard Backoff) (Backoff, error) {
	last := standard
	for _, b := range backoff {
		if b == nil {
			return standard, fmt.Errorf("%w: the backoff is nil", lock.ErrInvalid)
		}
		last = b
	}
	return last, nil
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
		return min(limit, time.Duration(pause)+time.Duration(rand.N(n))*time.Millisecond)
	}
}

// ConstantBackoff pauses for d after every attempt, and for at least a millisecond.
func ConstantBackoff(d time.Duration) Backoff {
	d = max(d, time.Millisecond)
	return func(int) time.Duration { return d }
}
