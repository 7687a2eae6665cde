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

// fairWait is the fair wait timeout of both languages, where it is not the default.
const fairWait = 3 * time.Second

// line is the queue of a fair lock, as the server has it.
type line struct {
	conn rueidis.Client
	name string
}

// all are the owners in the line, the first first.
func (l line) all(t testing.TB) []string {
	t.Helper()
	owners, err := do(t, l.conn, "LRANGE", wire.FairQueue(l.name), "0", "-1").AsStrSlice()
	require.NoError(t, err)
	return owners
}

// joined waits until the line has n owners, the last of that client, and returns that
// one.
func (l line) joined(t testing.TB, n int, client string) string {
	t.Helper()
	var owners []string
	harness.Eventually(t, answers, fmt.Sprintf("%d wait", n), func() bool {
		owners = l.all(t)
		return len(owners) == n
	})
	require.True(t, strings.HasPrefix(owners[n-1], client), "%v, and not %s", owners, client)
	return owners[n-1]
}

// score is when that owner loses its place: by its deadline or by its signs of life,
// which have keys of their own.
func (l line) score(t testing.TB, key, owner string) time.Time {
	t.Helper()
	score, err := do(t, l.conn, "ZSCORE", key, owner).AsFloat64()
	require.NoError(t, err)
	return time.UnixMilli(int64(score))
}

// waiter is one in the line.
type waiter struct {
	door
	s      side
	thread uint64
	e      *entry
	owner  string
	ghost  bool // nobody waits there any more
}

// join has a side wait for the lock, and waits until it stands in the line.
func (l line) join(t *testing.T, s side, kind string, wait time.Duration) *waiter {
	t.Helper()
	n := len(l.all(t)) + 1
	w := &waiter{door: s.lock(kind, l.name), s: s, thread: uint64(100 + n)}
	w.e = w.take(t, w.thread, wait, time.Minute)
	w.owner = l.joined(t, n, s.id())
	return w
}

// served fails the test unless these are the line and get the lock in this order, each
// when the one before has released it.
func (l line) served(t *testing.T, all []*waiter) {
	t.Helper()
	for i, w := range all {
		if w.ghost {
			continue
		}
		w.e.gets(t, answers)
		var behind []string
		for _, next := range all[i+1:] {
			behind = append(behind, next.owner)
		}
		require.Equal(t, behind, append([]string(nil), l.all(t)...), "behind %d, %v", i, w.s)
		require.NoError(t, w.release(t, w.thread), "%d: %v", i, w.s)
	}
}

// fairKinds are the kinds of fair lock that a version of Redisson has.
func fairKinds(version string) []string {
	if has(version, "non-reentrant fair") {
		return []string{"fair", "non-reentrant fair"}
	}
	return []string{"fair"}
}

// Waiters of both languages stand in one line, whoever has the lock.
func TestOneAfterTheOther(t *testing.T) {
	harness.Full(t)
	everywhere(t, func(t *testing.T, p *place) {
		c := p.ours(t)
		ours, named, java := goSide{c, false}, goSide{c, true}, javaSide{p.theirs(t)}
		conn := p.conn(t)
		for _, kind := range fairKinds(p.version) {
			for _, first := range []side{ours, named, java} {
				l := line{conn, fmt.Sprint("orders of ", t.Name(), kind, first)}
				held := first.lock(kind, l.name)
				held.take(t, 1, 0, 0).gets(t, answers)
				var all []*waiter
				for _, s := range []side{java, ours, java, named, java, java, ours, ours, java, named} {
					all = append(all, l.join(t, s, kind, forever))
				}
				require.NoError(t, held.release(t, 1))
				l.served(t, all)
			}
		}
	})
}

// Who leaves the line gives its place up, and those who stay keep theirs. Only a future
// of Java's that is cancelled leaves its place where it is, to take the lock in its turn
// and give it back at once.
func TestSomeLeaveTheLine(t *testing.T) {
	harness.Full(t)
	everywhere(t, func(t *testing.T, p *place) {
		c := p.ours(t)
		ours, named, java := goSide{c, false}, goSide{c, true}, javaSide{p.theirs(t)}
		for i, first := range []side{ours, java} {
			l := line{p.conn(t), fmt.Sprint("orders of ", t.Name(), i)}
			held := first.lock("fair", l.name)
			held.take(t, 1, 0, 0).gets(t, answers)
			const soon = 2 * time.Second // enough for all to join
			type fate int
			const (
				stays fate = iota
				gives      // up, when its time is over
				cancelled
			)
			var all, gone []*waiter
			var fates []fate
			for _, w := range []struct {
				side
				fate
			}{
				{ours, stays}, {java, stays}, {java, gives}, {java, cancelled}, {ours, cancelled}, {named, gives},
				{java, stays}, {named, cancelled}, {named, stays}, {java, gives}, {java, stays},
			} {
				wait := forever
				if w.fate == gives {
					wait = soon
				}
				joined := l.join(t, w.side, "fair", wait)
				joined.ghost = w.fate == cancelled && w.side == java
				if w.fate == stays || joined.ghost {
					all = append(all, joined)
				}
				if w.fate != stays {
					gone, fates = append(gone, joined), append(fates, w.fate)
				}
			}
			for i, w := range gone {
				if fates[i] == gives {
					w.e.fails(t, soon+answers)
					continue
				}
				w.e.cancel()
				_, _, err := w.e.outcome(t, answers)
				require.ErrorIs(t, err, errCancelled)
			}
			harness.Eventually(t, answers, "those who leave are gone", func() bool { return len(l.all(t)) == len(all) })
			require.NoError(t, held.release(t, 1))
			l.served(t, all)
		}
	})
}

// lineWorker waits in the lines of fair locks, until it is killed. Its arguments are
// where the servers are, and the names.
func lineWorker(args []string) error {
	c, err := redlatch.New(context.Background(), rueidis.ClientOption{InitAddress: strings.Split(args[0], ",")},
		redlatch.WithWatchdogTimeout(watchdog), redlatch.WithFairWaitTimeout(fairWait))
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for _, name := range args[1:] {
		wg.Go(func() {
			_, err := c.FairLock(name).Lock(context.Background())
			fmt.Println("had its turn", err)
		})
	}
	wg.Wait()
	return nil
}

// A waiter that is dead at the head of the line holds up those behind it, in either
// language, until
//   - a dead one of Java's: its deadline, which is what the lease had left when it came,
//     and its fairLockWaitTimeout for every place up to its own;
//   - a dead one of ours: its place time after its last sign of life where one of ours
//     waits too, or uses the lock; else, for Java among itself, also the deadline, which
//     is what that of a waiter of Java's would be that came at the last sign of life.
//
// The others go on in their order. With the defaults that is five minutes, and 10 s.
// Redisson before 3.46 has no such setting, and five minutes: there nobody of Java's dies.
func TestSomeDieInTheLine(t *testing.T) {
	harness.Full(t)
	everywhere(t, func(t *testing.T, p *place) {
		const lease = 10 * time.Second // in which all have to join
		var settings []string
		if p.version != latchless {
			settings = append(settings, fmt.Sprint("fairLockWaitTimeout: ", fairWait.Milliseconds()))
		}
		c, conn := p.ours(t, redlatch.WithFairWaitTimeout(fairWait)), p.conn(t)
		ours, named, java := goSide{c, false}, goSide{c, true}, javaSide{p.theirs(t, settings...)}
		type run struct {
			line
			what   string
			ours   bool // who dies
			signs  bool // go by its signs of life, and not by its deadline
			behind []side
			held   door
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
			r.line = line{conn, "orders of " + t.Name() + ", " + r.what}
			r.held = ours.lock("fair", r.name)
			r.held.take(t, 1, 0, lease).gets(t, answers)
			if r.ours {
				names = append(names, r.name)
			}
		}
		w := harness.Spawn(t, "line", append([]string{strings.Join(p.addrs(), ",")}, names...)...)
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
			require.Less(t, late, slack, r.what)
			require.NoError(t, r.all[0].release(t, r.all[0].thread), r.what)
			r.served(t, r.all[1:])
		}
	})
}
