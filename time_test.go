package redlatch_test

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// These tests run in virtual time, where counts are exact.

// safetyPoll is the longest pause of a waiter that receives no message.
const safetyPoll = 5 * time.Second

// tick is the greatest delay of a timer.
const tick = 5 * time.Millisecond

func writer(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Write() }

// timedKinds are kinds of locks.
var timedKinds = []struct {
	name string
	of   func(c *redlatch.Client, name string) lock.Locker
	// rival returns a lock that excludes the first; nil means of.
	rival func(c *redlatch.Client, name string) lock.Locker
	// every is the interval of the attempts of a process while nothing happens.
	every time.Duration
}{
	{name: "lock", every: safetyPoll, of: func(c *redlatch.Client, name string) lock.Locker { return c.Lock(name) }},
	{name: "fenced", every: safetyPoll, of: func(c *redlatch.Client, name string) lock.Locker { return c.FencedLock(name) }},
	{name: "spin", every: 128 * time.Millisecond, of: func(c *redlatch.Client, name string) lock.Locker { return c.SpinLock(name) }},
	{name: "plain", every: 250 * time.Millisecond, of: func(c *redlatch.Client, name string) lock.Locker { return c.PlainLock(name) }},
	// Two heartbeats per attempt keep the queue position.
	{name: "fair", every: safetyPoll / 3, of: func(c *redlatch.Client, name string) lock.Locker { return c.FairLock(name) }},
	// The waiter is a writer, which blocks new readers.
	{name: "read", every: 2 * time.Second, of: func(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Read() }, rival: writer},
	{name: "write", every: safetyPoll, of: writer},
	{name: "multi", every: safetyPoll, of: func(c *redlatch.Client, name string) lock.Locker {
		return c.MultiLock(c.Lock(name), c.Lock(name+", too"))
	}},
}

// eachTimed runs a test for each kind, with locks of two clients.
func eachTimed(t *testing.T, opt redlatch.Option, test func(t *testing.T, s *harness.VirtualServer, held, wanted lock.Locker, every time.Duration)) {
	for _, k := range timedKinds {
		if k.rival == nil {
			k.rival = k.of
		}
		t.Run(k.name, func(t *testing.T) {
			harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
				held, wanted := k.of(s.Client(t, opt), "orders"), k.rival(s.Client(t, opt), "orders")
				test(t, s, held, wanted, k.every)
				s.Del("redisson_lock_token:{orders}") // outlives a fenced lock
				s.NothingLeft(t)
			})
		})
	}
}

func TestIdleWaiterRequests(t *testing.T) {
	const wait, startup = 2 * time.Minute, 10 * time.Second
	eachTimed(t, redlatch.WithWatchdogTimeout(time.Minute), func(t *testing.T, s *harness.VirtualServer, held, wanted lock.Locker, every time.Duration) {
		h, err := held.Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err)
		var waiters sync.WaitGroup
		for range 8 {
			waiters.Go(func() {
				begin := time.Now()
				_, err := wanted.Lock(t.Context(), lock.Wait(wait))
				assert.ErrorIs(t, err, lock.ErrNotAcquired)
				assert.InDelta(t, wait, time.Since(begin), float64(2*tick))
			})
		}
		time.Sleep(startup)
		s.Reset()
		time.Sleep(wait - startup - time.Second)
		synctest.Wait()
		attempts := float64(wait-startup-time.Second) / float64(every)
		assert.InDelta(t, attempts, s.Calls("evalsha"), 1+attempts/40)
		assert.Zero(t, s.Calls("subscribe")+s.Calls("publish")+s.Calls("eval"))
		waiters.Wait()
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// Deleting keys by hand publishes nothing.
func TestWaiterNoticesDeletedKeys(t *testing.T) {
	eachTimed(t, redlatch.WithWatchdogTimeout(time.Minute), func(t *testing.T, s *harness.VirtualServer, held, wanted lock.Locker, _ time.Duration) {
		h, err := held.Lock(t.Context(), lock.Lease(time.Hour))
		require.NoError(t, err)
		waiter := make(chan error, 1)
		go func() { waiter <- wanted.Do(t.Context(), nothing) }()
		time.Sleep(time.Minute + time.Second)
		require.Empty(t, waiter)
		s.FlushAll()
		begin := time.Now()
		require.NoError(t, <-waiter)
		require.LessOrEqual(t, time.Since(begin), safetyPoll+2*tick)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	})
}

func TestHoldIsRenewedAfterThirdOfLease(t *testing.T) {
	// Not a multiple of a third of the lease: a renewal may be in flight when one is
	// due.
	const timeout, watched = 30 * time.Second, 10*time.Minute + 5*time.Second
	eachTimed(t, redlatch.WithWatchdogTimeout(timeout), func(t *testing.T, s *harness.VirtualServer, held, wanted lock.Locker, _ time.Duration) {
		for range 2 { // the watchdog is idle in between
			h, err := held.Lock(t.Context())
			require.NoError(t, err)
			s.Reset()
			for range watched / time.Second {
				time.Sleep(time.Second)
				for what, left := range map[string]time.Duration{"the client": h.Remaining(), "the server": s.TTL("orders")} {
					require.GreaterOrEqual(t, left, timeout*2/3-timeout/500-2*tick, what)
					require.LessOrEqual(t, left, timeout, what)
				}
			}
			require.InDelta(t, watched/(timeout/3), s.Calls("evalsha"), 2)
			_, err = wanted.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.NoError(t, h.Unlock(t.Context()))
			s.Reset()
			time.Sleep(time.Hour)
			require.Zero(t, s.Calls("evalsha"), "renewed after the release")
		}
	})
}

// Holds need no goroutines.
func TestHoldsAreRenewedInBatches(t *testing.T) {
	const holds, batch, timeout, rounds = 500, 100, 30 * time.Second, 6
	harness.VirtualAlone(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		require.NoError(t, c.Lock("warm").Do(t.Context(), nothing))
		goroutines := runtime.NumGoroutine()
		all := takeAll(t, c, names(holds))
		time.Sleep(timeout/3 + time.Second) // loads the script
		s.Reset()
		time.Sleep(timeout / 3 * rounds)
		synctest.Wait()
		require.InDelta(t, rounds*holds/batch, s.Calls("evalsha"), rounds)
		require.Equal(t, rounds*holds, s.Calls("hexists"))
		require.LessOrEqual(t, runtime.NumGoroutine(), goroutines+few)
		unlockAll(t, all)
		s.NothingLeft(t)
	})
}
