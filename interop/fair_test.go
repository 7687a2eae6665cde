package interop

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/wire"
)

// fairWait is the fair wait timeout of both languages, unless it is the default.
const fairWait = 3 * time.Second

// fairQueue is the queue of a fair lock on the server.
type fairQueue struct {
	conn rueidis.Client
	name string
}

// all returns the owners in the queue, in order.
func (q fairQueue) all(t testing.TB) []string {
	t.Helper()
	owners, err := do(t, q.conn, "LRANGE", wire.FairQueue(q.name), "0", "-1").AsStrSlice()
	require.NoError(t, err)
	return owners
}

// joined waits until the queue has n owners, the last of that client, and returns the last.
func (q fairQueue) joined(t testing.TB, n int, client string) string {
	t.Helper()
	var owners []string
	harness.Eventually(t, answers, fmt.Sprintf("%d wait", n), func() bool {
		owners = q.all(t)
		return len(owners) == n
	})
	require.True(t, strings.HasPrefix(owners[n-1], client), "%v, want %s", owners, client)
	return owners[n-1]
}

// score returns when that owner loses its queue position: by its deadline or by its heartbeat,
// depending on key.
func (q fairQueue) score(t testing.TB, key, owner string) time.Time {
	t.Helper()
	score, err := do(t, q.conn, "ZSCORE", key, owner).AsFloat64()
	require.NoError(t, err)
	return time.UnixMilli(int64(score))
}

// waiter is a waiter in the queue.
type waiter struct {
	view
	s      side
	thread uint64
	e      *entry
	owner  string
	ghost  bool // the wait is over
}

// join starts a wait of a side and returns when the waiter is in the queue.
func (q fairQueue) join(t *testing.T, s side, kind string, wait time.Duration) *waiter {
	t.Helper()
	n := len(q.all(t)) + 1
	w := &waiter{view: s.lock(kind, q.name), s: s, thread: uint64(100 + n)}
	w.e = w.take(t, w.thread, wait, time.Minute)
	w.owner = q.joined(t, n, s.id())
	return w
}

// served fails the test unless these are the waiters of the queue and acquire the lock in this
// order, each after the release of the one before.
func (q fairQueue) served(t *testing.T, all []*waiter) {
	t.Helper()
	for i, w := range all {
		if w.ghost {
			continue
		}
		w.e.gets(t, answers)
		behind := []string{}
		for _, next := range all[i+1:] {
			behind = append(behind, next.owner)
		}
		queue := append([]string{}, q.all(t)...)
		if _, ours := w.s.(goSide); ours && len(queue) > 0 && queue[0] == w.owner {
			queue = queue[1:] // it has the lock from a caller of its process, and leaves the queue soon
		}
		require.Equal(t, behind, queue, "behind %d, %v", i, w.s)
		require.NoError(t, w.release(t, w.thread), "%d: %v", i, w.s)
	}
}

// fairKinds are the kinds of fair lock of a version of Redisson.
func fairKinds(version string) []string {
	if has(version, "non-reentrant fair") {
		return []string{"fair", "non-reentrant fair"}
	}
	return []string{"fair"}
}

// Waiters of both languages share one queue, whatever the language of the holder.
func TestFairOrderAcrossLanguages(t *testing.T) {
	harness.Full(t)
	everywhere(t, func(t *testing.T, p *env) {
		c := p.ours(t)
		ours, named, java := goSide{c, false}, goSide{c, true}, javaSide{p.theirs(t)}
		conn := p.conn(t)
		for _, kind := range fairKinds(p.version) {
			for _, first := range []side{ours, named, java} {
				q := fairQueue{conn, fmt.Sprint("orders of ", t.Name(), kind, first)}
				held := first.lock(kind, q.name)
				held.take(t, 1, 0, 0).gets(t, answers)
				var all []*waiter
				for _, s := range []side{java, ours, java, named, java, java, ours, ours, java, named} {
					all = append(all, q.join(t, s, kind, forever))
				}
				require.NoError(t, held.release(t, 1))
				q.served(t, all)
			}
		}
	})
}

// A waiter that leaves gives up its queue position, and the others keep theirs. Only a
// cancelled future in Java keeps its position, acquires the lock in its turn and releases it
// at once.
func TestFairWaitersLeave(t *testing.T) {
	harness.Full(t)
	everywhere(t, func(t *testing.T, p *env) {
		c := p.ours(t)
		ours, named, java := goSide{c, false}, goSide{c, true}, javaSide{p.theirs(t)}
		for i, first := range []side{ours, java} {
			q := fairQueue{p.conn(t), fmt.Sprint("orders of ", t.Name(), i)}
			held := first.lock("fair", q.name)
			held.take(t, 1, 0, 0).gets(t, answers)
			const soon = 2 * time.Second // enough for all to join
			type departure int
			const (
				stays departure = iota
				gives           // canceled when the waiter leaves
				cancelled
			)
			var all, gone []*waiter
			var departures []departure
			for _, w := range []struct {
				side
				departure
			}{
				{ours, stays}, {java, stays}, {java, gives}, {java, cancelled}, {ours, cancelled}, {named, gives},
				{java, stays}, {named, cancelled}, {named, stays}, {java, gives}, {java, stays},
			} {
				wait := forever
				if w.departure == gives {
					wait = soon
				}
				joined := q.join(t, w.side, "fair", wait)
				joined.ghost = w.departure == cancelled && w.side == java
				if w.departure == stays || joined.ghost {
					all = append(all, joined)
				}
				if w.departure != stays {
					gone, departures = append(gone, joined), append(departures, w.departure)
				}
			}
			for i, w := range gone {
				if departures[i] == gives {
					w.e.fails(t, soon+answers)
					continue
				}
				w.e.cancel()
				_, _, err := w.e.outcome(t, answers)
				require.ErrorIs(t, err, errCancelled)
			}
			harness.Eventually(t, answers, "waiters that leave are removed", func() bool { return len(q.all(t)) == len(all) })
			require.NoError(t, held.release(t, 1))
			q.served(t, all)
		}
	})
}

// queueWorker waits in the queues of fair locks until it is killed. Its arguments are the
// addresses of the servers and the names.
func queueWorker(args []string) error {
	c, err := redlatch.New(context.Background(), rueidis.ClientOption{InitAddress: strings.Split(args[0], ",")},
		redlatch.WithWatchdogTimeout(watchdog), redlatch.WithFairWaitTimeout(fairWait))
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, name := range args[1:] {
		wg.Go(func() {
			_, err := c.FairLock(name).Lock(context.Background())
			fmt.Println("acquired the lock", err)
		})
	}
	wg.Wait()
	return nil
}

// A dead waiter at the head of the queue delays the others, in either language. A dead
// waiter of Java is dropped at its deadline: the rest of the lease when it joined, plus its
// fairLockWaitTimeout for every position up to its own. A dead redlatch waiter is dropped when
// its last heartbeat is too old, if other redlatch clients wait or use the lock; among waiters of
// Java only, also at the deadline of a waiter of Java that joined at that heartbeat.
//
// The others proceed in order. With the defaults that takes five minutes, and 10 s. In Redisson
// before 3.46 the five minutes cannot be set, so none of its waiters dies here.
func TestFairWaitersDie(t *testing.T) {
	harness.Full(t)
	everywhere(t, func(t *testing.T, p *env) {
		const lease = 10 * time.Second // for all to join
		var settings []string
		if p.version != latchless {
			settings = append(settings, fmt.Sprint("fairLockWaitTimeout: ", fairWait.Milliseconds()))
		}
		c, conn := p.ours(t, redlatch.WithFairWaitTimeout(fairWait)), p.conn(t)
		ours, named, java := goSide{c, false}, goSide{c, true}, javaSide{p.theirs(t, settings...)}
		type run struct {
			fairQueue
			what   string
			ours   bool // which waiter dies
			signs  bool // by its heartbeat instead of its deadline
			behind []side
			held   view
			owner  string
			all    []*waiter
			ends   time.Time
		}
		var names []string
		runs := []*run{
			{what: "Go before Java", ours: true, behind: []side{java, java}},
			{what: "Go before Go", ours: true, signs: true, behind: []side{named, ours, named}},
			{what: "Go before both", ours: true, signs: true, behind: []side{java, ours, java}},
			{what: "Go before both, ours first", ours: true, signs: true, behind: []side{named, java, ours}},
		}
		var j *jvm
		var dead side
		if p.version != latchless {
			j = spawnJVM(t, p.version)
			dead = javaSide{j.client(t, p, settings...)}
			runs = append(runs, []*run{
				{what: "Java before Java", behind: []side{java, java}},
				{what: "Java before Go", behind: []side{ours, named, ours}},
				{what: "Java before both", behind: []side{java, named, java, ours}},
			}...)
		}
		for _, r := range runs {
			r.fairQueue = fairQueue{conn, "orders of " + t.Name() + ", " + r.what}
			r.held = ours.lock("fair", r.name)
			if r.ours && !r.signs {
				r.held = java.lock("fair", r.name) // our release may come when the heartbeat does not count anymore
			}
			r.held.take(t, 1, 0, lease).gets(t, answers)
			if r.ours {
				names = append(names, r.name)
			}
		}
		w := harness.Spawn(t, "queue", append([]string{strings.Join(p.addrs(), ",")}, names...)...)
		for _, r := range runs {
			if r.ours {
				r.owner = r.joined(t, 1, "")
			} else {
				r.owner = r.join(t, dead, "fair", forever).owner
			}
			for _, s := range r.behind {
				r.all = append(r.all, r.join(t, s, "fair", forever))
			}
		}
		if j != nil {
			j.kill()
		}
		w.Kill()
		for _, r := range runs {
			key, most := wire.FairTimeouts(r.name), lease+fairWait
			if r.signs {
				key, most = wire.FairAlive(r.name), watchdog/3
			}
			r.ends = r.score(t, key, r.owner)
			require.Less(t, time.Until(r.ends), most+exact, r.what)
			require.NoError(t, r.held.release(t, 1), r.what)
		}
		for _, r := range runs {
			at := r.all[0].e.gets(t, lease+2*fairWait+answers)
			late := at.Sub(r.ends)
			require.GreaterOrEqual(t, late, -exact, r.what)
			require.Less(t, late, fairWait/3+slack, r.what) // the next heartbeat
			require.NoError(t, r.all[0].release(t, r.all[0].thread), r.what)
			r.served(t, r.all[1:])
		}
	})
}
