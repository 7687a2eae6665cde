package fairlock_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// After an outage all heartbeats are overdue. Whichever comes first, and whenever the lock is
// released, the order is the same as before.
func TestTheOrderSurvivesAnOutage(t *testing.T) {
	for released := range 5 { // so many requests come before the release
		inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
			holder, line, late := w.ours(), []*waiter{}, w.ours()
			holder.mustAcquire(time.Hour)
			for range 6 {
				line = append(line, w.ours())
				line[len(line)-1].mustWait()
			}
			time.Sleep(2 * w.p.PositionTTL())
			for i, request := range []func(){
				func() { w.heartbeat(line[3], line[2]) },
				func() { line[1].mustWait() },
				func() { late.mustWait() },
				func() { w.heartbeat(line[4], line[0]) },
				func() { line[5].mustWait() },
			} {
				if i == released {
					holder.release()
				}
				request()
				time.Sleep(w.p.PositionTTL() / 20)
			}
			w.inOrder(append(line, late)...)
			for _, u := range append(line, late) {
				u.mustAcquire(lease)
				u.release()
			}
			w.nothingLeft()
		})
	}
}

// Waiters that are not heard after an outage are dropped when the others send their second
// heartbeats.
func TestTheDeadOfAnOutageAreDropped(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, dead, second := w.ours(), w.ours(), w.ours()
		holder.mustAcquire(lease)
		dead.mustWait()
		second.mustWait()
		time.Sleep(2 * w.p.PositionTTL())
		holder.release()
		second.mustOutlive(dead, w.p.PositionTTL()/3)
	})
}

// A queue of dead waiters does not keep out a single attempt, and disappears soon after the
// next release.
func TestAQueueOfTheDeadIsNoObstacle(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, once := w.ours(), w.ours()
		once.claim.Waits = false
		holder.mustAcquire(lease)
		w.ours().mustWait()
		w.ours().mustWait()
		time.Sleep(w.p.PositionTTL() - time.Millisecond)
		holder.release()
		acquired, _ := once.poll(lease)
		require.False(t, acquired, "they may be alive")
		time.Sleep(time.Millisecond)
		once.mustAcquire(lease)
		once.release()
		time.Sleep(w.p.PositionTTL() + time.Millisecond)
		w.nothingLeft()
	})
}

// A waiter of ours that Java evicts after its rank has expired, and after its death, does not hide a
// Java waiter from a single attempt.
func TestADeadWaiterWithoutARankHidesNobody(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, unranked, head, once := w.ours(), w.ours(), w.ours(), w.ours()
		patient, hidden := w.java(1), w.java(2)
		patient.wait = 10 * time.Hour
		once.claim.Waits = false
		holder.mustAcquire(lease)
		patient.mustWait()
		unranked.mustWait()
		time.Sleep(time.Hour)
		patient.mustAcquire(lease)
		require.Equal(t, []bool{true}, w.heartbeat(unranked))
		head.mustWait()
		time.Sleep(lease + 3*w.wait/2)
		hidden.mustWait()
		w.inOrder(head, hidden)
		once.mustWait()
		w.inOrder(hidden)
		hidden.mustAcquire(lease)
	})
}

// While the lock is held no waiter loses its queue position, however late its heartbeat is and
// whichever request comes meanwhile.
func TestNothingIsDroppedWhileTheLockIsHeld(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		for what, request := range map[string]func(holder, last *waiter){
			"attempt":   func(_, last *waiter) { last.mustWait() },
			"heartbeat": func(_, last *waiter) { w.heartbeat(last) },
			"confirm":   func(holder, last *waiter) { w.confirm(holder, nil, last) },
			"leave":     func(_, last *waiter) { w.ours().leave() },
			"release":   func(_, last *waiter) { require.Zero(t, w.release(w.ours().claim)) },
		} {
			w.s.FlushAll()
			holder, first, second, last := w.ours(), w.ours(), w.ours(), w.ours()
			holder.mustAcquire(time.Hour)
			for _, u := range []*waiter{first, second, last} {
				u.mustWait()
			}
			time.Sleep(3 * w.p.PositionTTL())
			request(holder, last)
			require.Equal(t, ownersOfAll([]*waiter{first, second, last}), w.queue(), what)
		}
	})
}

// Waiters that a Java client with a fast clock has evicted return in their order, whichever of
// them is heard first, and before the lock is given to another waiter.
func TestEvictedWaitersReturnInOrder(t *testing.T) {
	orders := [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}, {1, 3, 0, 2}}
	for _, order := range orders {
		inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
			holder := w.ours()
			holder.mustAcquire(10 * time.Hour)
			var line []*waiter
			for range 4 {
				line = append(line, w.ours())
				line[len(line)-1].mustWait()
			}
			slow, fast := w.java(1), w.java(2)
			slow.wait = 10 * time.Hour
			slow.mustWait()
			fast.ahead = 10*time.Hour + 30*time.Minute
			fast.wait = 10 * time.Hour
			fast.mustWait()
			w.inOrder(slow, fast)
			for i, n := range order {
				if i%2 == 0 {
					w.heartbeat(line[n])
				} else {
					line[n].mustWait()
				}
			}
			w.inOrder(append(line, slow, fast)...)
		})
	}
}

// Any request puts evicted waiters back, so that no other one acquires the lock before them.
func TestEvictedWaitersAreNotOvertaken(t *testing.T) {
	inVirtualTime(t, 5*time.Minute, func(t *testing.T, w *timeless) {
		holder, first, second, third := w.ours(), w.ours(), w.ours(), w.ours()
		fast := w.java(1)
		holder.mustAcquire(time.Hour)
		first.mustWait()
		second.mustWait()
		fast.ahead = 2 * time.Hour
		fast.mustWait()
		w.inOrder(fast)
		holder.release()
		third.mustWait()
		w.inOrder(first, second, fast, third)
		first.mustAcquire(lease)
	})
}
