package interop

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/lock"
)

const (
	// watchdog is the watchdog timeout of processes that stop or die.
	watchdog = 3 * time.Second
	// exact is the tolerance of two readings of one clock in milliseconds.
	exact = 5 * time.Millisecond
)

// A holder that stops or dies excludes others until its lease expires and no longer, and it
// cannot affect the lock when it continues.
//
// The subtests mostly wait, so they run in parallel.
func TestLeasesEnd(t *testing.T) {
	harness.Full(t)
	everywhere(t, func(t *testing.T, p *env) {
		for _, part := range []struct {
			name string
			test func(t *testing.T, p *env)
		}{
			{"of Java that stops, and dies", javaDies},
			{"of Go that stops, and dies", goDies},
			{"without a release", unreleased},
			{"renewed with waiters", renewedWithWaiters},
			{"renewed with readers", renewedWithReaders},
		} {
			t.Run(part.name, func(t *testing.T) {
				t.Parallel()
				part.test(t, p)
			})
		}
	})
}

func javaDies(t *testing.T, p *env) {
	conn, kinds := p.conn(t), leased(p.version)
	j := spawnJVM(t, p.version)
	theirs := javaSide{j.client(t, p, "lockWatchdogTimeout: "+fmt.Sprint(watchdog.Milliseconds()))}
	t.Cleanup(func() { _ = j.cmd.Process.Signal(syscall.SIGCONT) }) // before it closes its client
	ours := goSide{c: p.ours(t)}
	take := func(prefix string) (all []view) {
		for _, kind := range kinds {
			lease := time.Duration(0)
			if kind == permits {
				lease = watchdog // without a lease, a permit of Redisson never expires
			}
			d := open(t, theirs, kind, prefix+kind)
			d.take(t, 1, 0, lease).gets(t, answers)
			all = append(all, d)
		}
		return all
	}

	name := "orders of " + t.Name() + ", stopped "
	held := take(name)
	require.NoError(t, j.cmd.Process.Signal(syscall.SIGSTOP))
	next := wait(t, ours, kinds, name)
	getIn(t, conn, next, 0, watchdog)
	require.NoError(t, j.cmd.Process.Signal(syscall.SIGCONT))
	for i, d := range held {
		require.ErrorIs(t, d.release(t, 1), lock.ErrNotHeld, kinds[i])
	}
	keep(t, conn, next)

	name = "orders of " + t.Name() + ", dead "
	held = take(name)
	// A redlatch reader outlives that of Java, because its timeout is not longer.
	shared := goSide{c: p.ours(t, redlatch.WithWatchdogTimeout(watchdog))}.lock("read", name+"shared")
	theirs.lock("read", name+"shared").take(t, 1, 0, 0).gets(t, answers)
	shared.take(t, 1, 0, 0).gets(t, answers)
	next = wait(t, ours, kinds, name)
	require.Len(t, held, len(next))
	first := map[string]int64{}
	for _, w := range next {
		first[w.kind] = see(t, conn, w.kind, w.name).until
	}
	harness.Eventually(t, watchdog, "all were renewed during the wait", func() bool {
		return !slices.ContainsFunc(next, func(w *waiting) bool {
			return w.kind != permits && see(t, conn, w.kind, w.name).until <= first[w.kind]+exact.Milliseconds()
		})
	})
	j.kill()
	getIn(t, conn, next, 0, watchdog)
	keep(t, conn, next)
	ours.lock("write", name+"shared").take(t, 1, 0, 0).fails(t, answers)
	require.NoError(t, shared.release(t, 1))
	ours.lock("write", name+"shared").take(t, 1, forever, 0).gets(t, slack)
}

func goDies(t *testing.T, p *env) {
	conn, kinds := p.conn(t), leased(p.version)
	theirs := javaSide{p.theirs(t, "lockWatchdogTimeout: "+fmt.Sprint(watchdog.Milliseconds()))}
	var locks [2][]string
	names := [2]string{"orders of " + t.Name() + ", stopped ", "orders of " + t.Name() + ", dead "}
	for i, name := range names {
		for _, kind := range kinds {
			locks[i] = append(locks[i], kind, name+kind)
		}
		open(t, theirs, permits, name+permits)
	}
	shared := theirs.lock("read", names[1]+"shared")
	shared.take(t, 1, 0, 0).gets(t, answers)
	stops, dies := spawnHolder(t, p, locks[0]...), spawnHolder(t, p, append(locks[1], "read", names[1]+"shared")...)

	stops.Signal(syscall.SIGSTOP)
	next, last := wait(t, theirs, patient(p, kinds), names[0]), wait(t, theirs, patient(p, kinds), names[1])
	getIn(t, conn, next, 0, watchdog)
	stops.Signal(syscall.SIGCONT)
	for range kinds {
		errs := stops.Line(answers)
		require.Contains(t, errs, lock.ErrLost.Error())
		require.Contains(t, errs, lock.ErrNotHeld.Error())
	}
	keep(t, conn, next)

	dies.Kill() // its locks have been renewed since Java waits
	getIn(t, conn, last, watchdog/3, watchdog)
	keep(t, conn, last)
	theirs.lock("write", names[1]+"shared").take(t, 1, 0, 0).fails(t, answers)
	require.NoError(t, shared.release(t, 1))
	// Before 4.4 Java has renewed the hold of the dead reader with its own.
	late := slack
	if p.version != newest {
		late += watchdog
	}
	theirs.lock("write", names[1]+"shared").take(t, 1, forever, 0).gets(t, late)
}

// The expiry of a lease sends no message, and the next waiter acquires the lock nevertheless.
// Later calls of the first holder have no effect.
func unreleased(t *testing.T, p *env) {
	const lease = time.Second
	conn, kinds := p.conn(t), leased(p.version)
	c, java := p.ours(t), javaSide{p.theirs(t)}
	type run struct {
		pair
		kind, name string
		held, next view
		until      int64
		e          *entry
	}
	var runs []*run
	for i, s := range []pair{
		{goSide{c, false}, java}, {java, goSide{c, false}},
		{goSide{c, true}, java}, {java, goSide{c, true}},
	} {
		those := kinds
		if _, waits := s.second.(javaSide); waits {
			those = patient(p, kinds)
		}
		for _, kind := range those {
			name := fmt.Sprint("orders of ", t.Name(), " ", i, " ", kind)
			r := &run{pair: s, kind: kind, name: name, held: open(t, s.first, kind, name), next: open(t, s.second, rival(kind), name)}
			began := time.Now()
			r.held.take(t, 1, 0, lease).gets(t, answers)
			r.until = see(t, conn, kind, name).until
			require.GreaterOrEqual(t, r.until, began.Add(lease-exact).UnixMilli(), kind)
			r.e = r.next.take(t, 1, forever, time.Minute)
			runs = append(runs, r)
		}
	}
	for _, r := range runs {
		what := fmt.Sprintf("%s: %v, then %v", r.kind, r.first, r.second)
		late := r.e.gets(t, lease+answers).Sub(time.UnixMilli(r.until))
		require.GreaterOrEqual(t, late, -exact, what)
		require.Less(t, late, slack, what)
	}
	for _, r := range runs {
		what := fmt.Sprintf("%s: %v, then %v", r.kind, r.first, r.second)
		err := r.held.release(t, 1)
		if _, is := r.first.(goSide); is && r.kind != permits {
			require.ErrorIs(t, err, lock.ErrLost, what) // this process knows of the loss
		} else {
			require.ErrorIs(t, err, lock.ErrNotHeld, what)
		}
		s := see(t, conn, r.kind, r.name)
		require.Greater(t, s.until-s.now, int64(40_000), what)
		require.NoError(t, r.next.release(t, 1), what)
		// The lock is free now. Redisson takes that for a release of a fair lock, and before
		// 3.44 of a read-write lock.
		err = r.held.release(t, 1)
		_, theirs := r.first.(javaSide)
		if theirs && (strings.HasSuffix(r.kind, "fair") || p.version == latchless && (r.kind == "read" || r.kind == "write")) {
			require.NoError(t, err, what)
		} else {
			require.ErrorIs(t, err, lock.ErrNotHeld, what)
		}
	}
}

// Each renewal sets the full lease, and nothing else changes it: neither waiters nor attempts.
func renewedWithWaiters(t *testing.T, p *env) {
	const lease = 1500 * time.Millisecond
	conn, kinds := p.conn(t), leased(p.version)
	leaseMS, off := lease.Milliseconds(), exact.Milliseconds()
	short, long := p.ours(t, redlatch.WithWatchdogTimeout(lease)), p.ours(t, redlatch.WithWatchdogTimeout(2*lease))
	type run struct {
		first, second, third side
		kind, name           string
		held, next, try      view
		e                    *entry
		last                 snapshot
		renewals             int
	}
	java := javaSide{p.theirs(t, fmt.Sprint("lockWatchdogTimeout: ", 2*leaseMS))}
	var runs []*run
	for i, s := range [][3]side{
		{goSide{short, false}, java, java},
		// An attempt of a client with a waiter does not ask the server.
		{javaSide{p.theirs(t, fmt.Sprint("lockWatchdogTimeout: ", leaseMS))}, goSide{long, false}, goSide{p.ours(t), true}},
	} {
		for _, kind := range kinds {
			if _, theirs := s[0].(javaSide); theirs && kind == permits {
				continue // Redisson does not renew them
			}
			r := &run{first: s[0], second: s[1], third: s[2], kind: kind, name: fmt.Sprint("orders of ", t.Name(), " ", i, " ", kind)}
			r.held, r.next, r.try = open(t, s[0], kind, r.name), open(t, s[1], rival(kind), r.name), open(t, s[2], rival(kind), r.name)
			r.held.take(t, 1, 0, 0).gets(t, answers)
			r.last = see(t, conn, kind, r.name)
			r.e = r.next.take(t, 1, forever, 0)
			runs = append(runs, r)
		}
	}
	for began, i := time.Now(), 0; time.Since(began) < 4*lease; i++ {
		for _, r := range runs {
			what := fmt.Sprintf("%s: %v with %v", r.kind, r.first, r.second)
			s := see(t, conn, r.kind, r.name)
			require.GreaterOrEqual(t, s.until, r.last.until-off, "%s: cut short", what)
			require.LessOrEqual(t, s.until, s.now+leaseMS+off, "%s: longer than its lease", what)
			if s.until > r.last.until+off {
				require.GreaterOrEqual(t, s.until, r.last.now+leaseMS-off, "%s: less than its lease", what)
				r.renewals++
			}
			r.last = s
			if i%10 == 0 {
				r.try.take(t, 2, 0, 0).fails(t, answers)
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	for _, r := range runs {
		what := fmt.Sprintf("%s: %v with %v", r.kind, r.first, r.second)
		require.GreaterOrEqual(t, r.renewals, 6, what) // 12 are due
		require.NoError(t, r.held.release(t, 1), what)
		r.e.gets(t, answers)
		require.NoError(t, r.next.release(t, 1), what)
	}
}

// sharedRead is a lock that a reader of each language holds, ours first here.
type sharedRead struct {
	what, name string
	first      int     // the side that leaves first
	fixed      [2]bool // the side whose lease is not renewed
	cuts       bool    // Java's renewals leave the lock less time than our reader has,
	cutsHold   bool    // and our reader no more
	sides      [2]side
	readers    [2]view
	writers    [2]view
	gone       [2]bool
	last       snapshot
	renewals   [2]int
}

// check reads the state of the lock and fails the test if a reader has lost time. left reports
// whether a reader has left since the last call.
func (r *sharedRead) check(t *testing.T, conn rueidis.Client, left bool) {
	t.Helper()
	off := exact.Milliseconds()
	s := see(t, conn, "read", r.name)
	var renewed [2]bool
	for i := 1; i >= 0; i-- { // an action of Java explains the time left for Go
		side, n := r.sides[i], 0
		for key, until := range s.holds {
			if !strings.Contains(key, side.id()) {
				continue
			}
			n++
			if until < r.last.holds[key]-off {
				require.True(t, i == 0 && r.cutsHold && (renewed[1] || left), "%s: the hold of %v was cut short", r.what, side)
			}
			renewed[i] = until > r.last.holds[key] // by very little, just after the acquisition
			if until > r.last.holds[key]+off {
				r.renewals[i]++
			}
			if i == 1 || !r.cuts || r.gone[1] {
				require.GreaterOrEqual(t, s.until, until-off, "%s: the lock ends before the hold of %v", r.what, side)
			}
		}
		require.Equal(t, !r.gone[i], n == 1, "%s: %d holds of %v", r.what, n, side)
	}
	if !left && s.until < r.last.until-off {
		require.True(t, r.cuts && renewed[1], "%s: the lock was cut short by %d ms", r.what, r.last.until-s.until)
	}
	r.last = s
}

// Readers of both languages share a lock. Each keeps its lease, whatever the other does:
// renew, renew for less, or leave. Only a renewal of Java sets the expiry of the whole lock
// without regard for others, which is corrected when that reader leaves. Before 4.4 it also
// sets the expiry of all holds, which is not corrected.
func renewedWithReaders(t *testing.T, p *env) {
	const (
		shorter = 1500 * time.Millisecond
		longer  = 3 * time.Second
	)
	conn, plain := p.conn(t), goSide{c: p.ours(t)}
	var all []*sharedRead
	for _, m := range []struct{ watchdogs, leases [2]time.Duration }{
		{watchdogs: [2]time.Duration{longer, shorter}},
		{watchdogs: [2]time.Duration{shorter, longer}},
		{watchdogs: [2]time.Duration{shorter, shorter}, leases: [2]time.Duration{time.Minute, 0}},
		{watchdogs: [2]time.Duration{shorter, shorter}, leases: [2]time.Duration{0, time.Minute}},
	} {
		c := p.ours(t, redlatch.WithWatchdogTimeout(m.watchdogs[0]))
		var java javaSide
		for first := range 2 {
			if first == 0 || p.version == before {
				// Of several read holds of one client, 3.52 renews one; for the others it
				// renews only the expiry of the lock.
				java = javaSide{p.theirs(t, fmt.Sprint("lockWatchdogTimeout: ", m.watchdogs[1].Milliseconds()))}
			}
			r := &sharedRead{
				what:  fmt.Sprintf("watchdogs %v, leases %v, %d leaves first", m.watchdogs, m.leases, first),
				name:  fmt.Sprint("orders of ", t.Name(), " ", len(all)),
				first: first,
				cuts:  m.leases[1] == 0 && max(m.watchdogs[0], m.leases[0]) > m.watchdogs[1],
				sides: [2]side{goSide{c, first == 0}, java},
			}
			r.cutsHold = r.cuts && p.version != newest
			if r.cutsHold && m.leases[0] != 0 {
				continue // nothing would be left of that lease
			}
			for i, s := range r.sides {
				r.readers[i] = s.lock("read", r.name)
				r.readers[i].take(t, 1, 0, m.leases[i]).gets(t, answers)
				r.fixed[i] = m.leases[i] != 0
			}
			r.writers = [2]view{plain.lock("write", r.name), java.lock("write", r.name)}
			r.last = see(t, conn, "read", r.name)
			all = append(all, r)
		}
	}
	watch := func(d time.Duration) {
		t.Helper()
		for began, i := time.Now(), 0; time.Since(began) < d; i++ {
			for _, r := range all {
				r.check(t, conn, false)
				if i%20 == 0 {
					r.writers[i/20%2].take(t, 2, 0, 0).fails(t, answers)
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	watch(2 * longer)
	for _, r := range all {
		for i, n := range r.renewals {
			if !r.fixed[i] {
				require.GreaterOrEqual(t, n, 3, "%s: %v", r.what, r.sides[i]) // 6 or 12 are due
			}
		}
		require.NoError(t, r.readers[r.first].release(t, 1), r.what)
		r.gone[r.first] = true
		r.check(t, conn, true)
	}
	watch(longer)
	for _, r := range all {
		other := 1 - r.first
		require.NoError(t, r.readers[other].release(t, 1), r.what)
		require.Zero(t, see(t, conn, "read", r.name).until, r.what)
		r.writers[other].take(t, 1, 0, 0).gets(t, answers)
		require.NoError(t, r.writers[other].release(t, 1), r.what)
	}
}
