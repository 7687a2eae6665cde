package fairlock_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
)

// Two goroutines of one client lock again and again, and another client does so now and then. Whatever a
// message meets on its way to a waiter, it reaches that waiter: without one a heartbeat would wake the
// waiter after a second or more.
func TestNoWakeUpIsLost(t *testing.T) {
	harness.Full(t)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const wait = time.Second // far more than a round trip, and far less than the 3.3 s between heartbeats
		all := clients(t, s, 2)
		var longest atomic.Int64
		var callers sync.WaitGroup
		end := time.Now().Add(10 * time.Second)
		for i, pause := range []time.Duration{0, 0, 3 * time.Millisecond} {
			l := all[i/2].FairLock("orders")
			callers.Go(func() {
				for time.Now().Before(end) {
					began := time.Now()
					h, err := l.Lock(t.Context())
					if !assert.NoError(t, err) {
						return
					}
					longest.Store(max(longest.Load(), int64(time.Since(began)))) // under the lock
					assert.NoError(t, h.Unlock(t.Context()))
					time.Sleep(pause)
				}
			})
		}
		callers.Wait()
		require.Less(t, time.Duration(longest.Load()), wait)
		harness.NothingLeft(t, s.Addr)
	})
}
