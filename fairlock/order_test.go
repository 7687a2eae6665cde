package fairlock_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
)

// The tests of this file say what happens to waiters that are not heard in time, and to those that Java
// has evicted, in virtual time. TestLockstep shows it for all other orders of requests.

func inVirtualTime(t *testing.T, test func(t *testing.T, w *world)) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) { test(t, worldOn(t, s.Conn(t))) })
}

// After an outage all heartbeats are overdue. Whichever comes first, and whenever the lock is
// released, the order is the same as before.
func TestTheOrderSurvivesAnOutage(t *testing.T) {
	for released := range 5 { // so many requests come before the release
		inVirtualTime(t, func(t *testing.T, w *world) {
			holder, line := w.held(orders, 6)
			late := w.claim()
			time.Sleep(2 * w.p.PositionTTL())
			for i, request := range []func(){
				func() { w.heartbeat(line[3], line[2]) },
				func() { w.acquire(line[1]) },
				func() { w.acquire(late) },
				func() { w.heartbeat(line[4], line[0]) },
				func() { w.acquire(line[5]) },
			} {
				if i == released {
					w.release(holder)
				}
				request()
				time.Sleep(w.p.PositionTTL() / 20)
			}

			line = append(line, late)
			require.Equal(t, ids(line...), w.queue())
			for _, c := range line {
				require.True(t, w.acquire(c).Acquired)
				w.release(c)
			}
		})
	}
}

// A waiter is dropped as soon as its heartbeat does not count any more; after an outage in which all are
// silent, when the others send their second heartbeats.
func TestADeadWaiterIsDroppedSoon(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		ttl := w.p.PositionTTL()
		for _, outage := range []time.Duration{0, 2 * ttl} {
			holder, line := w.held(orders, 2)
			dead, second := line[0], line[1]
			time.Sleep(outage)
			rest := ttl / 3
			if outage == 0 {
				time.Sleep(time.Second)
				require.Equal(t, []bool{true}, w.heartbeat(second))
				rest = ttl - time.Second
			}
			w.release(holder)
			require.Negative(t, w.acquire(second).FreeIn, "it is not the head")

			time.Sleep(rest - time.Millisecond)
			require.Equal(t, ids(dead, second), w.queue())
			time.Sleep(time.Millisecond)
			require.Equal(t, []bool{false}, w.heartbeat(second), "it can acquire the lock")
			require.True(t, w.acquire(second).Acquired)
			w.release(second)
			require.Empty(t, w.queue())
		}
	})
}

// A queue of dead waiters does not keep out a single attempt.
func TestAQueueOfTheDeadIsNoObstacle(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		holder, _ := w.held(orders, 2)
		once := w.claim()
		once.Waits = false
		time.Sleep(w.p.PositionTTL() - time.Millisecond)
		w.release(holder)
		require.False(t, w.acquire(once).Acquired, "they may be alive")

		time.Sleep(time.Millisecond)
		require.True(t, w.acquire(once).Acquired)
		w.release(once)
		time.Sleep(w.p.PositionTTL() + time.Millisecond)
		require.Empty(t, w.queue())
	})
}

// evict has a Java client with a fast clock evict all waiters of redlatch. It is the only waiter then.
func (w *world) evict() (java string) {
	w.t.Helper()
	fast := newJava(w.t, w.s.Client, 1, fairWait)
	fast.ahead = 2 * time.Hour
	require.False(w.t, fast.acquire())
	require.Equal(w.t, []string{fast.owner}, w.queue())
	return fast.owner
}

// Waiters that Java has evicted return in their order, whichever of them is heard first.
func TestEvictedWaitersReturnInOrder(t *testing.T) {
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}, {1, 3, 0, 2}} {
		inVirtualTime(t, func(t *testing.T, w *world) {
			_, line := w.held(orders, 4)
			java := w.evict()
			for i, n := range order {
				if i%2 == 0 {
					w.heartbeat(line[n])
				} else {
					w.acquire(line[n])
				}
			}
			require.Equal(t, append(ids(line...), java), w.queue())
		})
	}
}

// Any request puts evicted waiters back, so that no other one acquires the lock before them.
func TestEvictedWaitersAreNotOvertaken(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, w *world) {
		holder, line := w.held(orders, 2)
		java := w.evict()
		w.release(holder)
		late := w.claim()
		require.False(t, w.acquire(late).Acquired)
		require.Equal(t, append(ids(line...), java, late.ID.String()), w.queue())
		require.True(t, w.acquire(line[0]).Acquired)
	})
}
