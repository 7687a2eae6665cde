package system_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

// safetyPoll is the longest pause of a waiter that receives no message.
const safetyPoll = 5 * time.Second

// How many requests the waiters of a process make while nothing happens.
func TestIdleWaiterRequests(t *testing.T) {
	const (
		wait, startup = 2 * time.Minute, 10 * time.Second
		tick          = 5 * time.Millisecond // the greatest delay of a timer
	)
	type of func(c *redlatch.Client) lock.Locker
	for name, k := range map[string]struct {
		every  time.Duration
		wanted of
		held   of // nil: wanted
	}{
		"lock":   {every: safetyPoll, wanted: func(c *redlatch.Client) lock.Locker { return c.Lock("orders") }},
		"fenced": {every: safetyPoll, wanted: func(c *redlatch.Client) lock.Locker { return c.FencedLock("orders") }},
		"spin":   {every: 128 * time.Millisecond, wanted: func(c *redlatch.Client) lock.Locker { return c.SpinLock("orders") }},
		"plain":  {every: 250 * time.Millisecond, wanted: func(c *redlatch.Client) lock.Locker { return c.PlainLock("orders") }},
		// Two heartbeats per attempt keep the queue position.
		"fair":  {every: safetyPoll / 3, wanted: func(c *redlatch.Client) lock.Locker { return c.FairLock("orders") }},
		"write": {every: safetyPoll, wanted: func(c *redlatch.Client) lock.Locker { return c.RWLock("orders").Write() }},
		// It blocks new readers.
		"write behind a reader": {
			every:  2 * time.Second,
			wanted: func(c *redlatch.Client) lock.Locker { return c.RWLock("orders").Write() },
			held:   func(c *redlatch.Client) lock.Locker { return c.RWLock("orders").Read() },
		},
		"multi": {every: safetyPoll, wanted: func(c *redlatch.Client) lock.Locker { return c.MultiLock(c.Lock("orders"), c.Lock("invoices")) }},
	} {
		t.Run(name, func(t *testing.T) {
			harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
				timeout := redlatch.WithWatchdogTimeout(time.Minute)
				if k.held == nil {
					k.held = k.wanted
				}
				h := mustLock(t, k.held(s.Client(t, timeout)), lock.Lease(time.Hour))
				wanted := k.wanted(s.Client(t, timeout))
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

				attempts := float64(wait-startup-time.Second) / float64(k.every)
				assert.InDelta(t, attempts, s.Calls("evalsha"), 1+attempts/40)
				assert.Zero(t, s.Calls("subscribe")+s.Calls("publish")+s.Calls("eval"))
				waiters.Wait()
				require.NoError(t, h.Unlock(t.Context()))
				s.Del("redisson_lock_token:{orders}") // outlives a fenced lock
				s.NothingLeft(t)
			})
		})
	}
}

// Two processes always want a plain lock. It is left open in good time to clients of other libraries, which
// poll and hear nothing.
func TestAPlainLockIsLeftOpenToThoseWhoPoll(t *testing.T) {
	const every, pause, held = 3 * time.Second, 200 * time.Millisecond, 10 * time.Millisecond
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		s.Latency = time.Millisecond
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		var callers sync.WaitGroup
		for range 2 {
			c := s.Client(t)
			for range 4 {
				callers.Go(func() {
					for ctx.Err() == nil {
						assert.NoError(t, c.PlainLock("orders").Do(t.Context(), func(context.Context) error {
							time.Sleep(held)
							return nil
						}))
					}
				})
			}
		}

		conn := s.Conn(t)
		for range 5 {
			asked := time.Now()
			set := conn.B().Set().Key("orders").Value("another's").Nx().Build().Pin()
			for rueidis.IsRedisNil(conn.Do(t.Context(), set).Error()) {
				time.Sleep(pause)
			}
			require.Less(t, time.Since(asked), every+2*pause+held)
			time.Sleep(held)
			require.True(t, s.Del("orders"))
		}
		stop()
		callers.Wait()
		s.NothingLeft(t)
	})
}
