package interop

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
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
	// watchdog is the watchdog timeout of those who stop or die.
	watchdog = 3 * time.Second
	// exact is by how much two readings of one clock in milliseconds may differ.
	exact = 5 * time.Millisecond
)

// permits are the expirable permits of a semaphore that has one, as a kind of lock.
const permits = "permits"

// leased are the kinds that a version of Redisson has and that come back by themselves.
func leased(version string) []string {
	var all []string
	for _, kind := range append([]string{permits}, kinds...) {
		if has(version, kind) {
			all = append(all, kind)
		}
	}
	return all
}

// open returns a lock of any kind that is leased, as that side sees it.
func open(t *testing.T, s side, kind, name string) door {
	t.Helper()
	if kind != permits {
		return s.lock(kind, name)
	}
	p := poolOf(s, kind, name)
	p.set(t, 1)
	return &permitDoor{pool: p}
}

// permitDoor is the only permit of a semaphore. One of Redisson's without a lease never
// comes back.
type permitDoor struct {
	door // the rest is not asked for
	pool pool
	got  *taking
}

func (d *permitDoor) take(t testing.TB, _ uint64, wait, lease time.Duration) *entry {
	t.Helper()
	d.got = d.pool.take(t, 1, wait, lease)
	return d.got.entry
}

func (d *permitDoor) release(t testing.TB, _ uint64) error {
	t.Helper()
	return d.pool.give(t, 1, d.got.ids...)
}

// holdWorker takes locks, and holds them until it is killed. Its arguments are where
// the servers are, its watchdog timeout, and then in turn kinds and names. It prints "holds" and the kind of each that it has. If it was stopped it
// releases them all when it goes on, at once, and prints the errors.
func holdWorker(args []string) error {
	timeout, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	at := rueidis.ClientOption{InitAddress: strings.Split(args[0], ",")}
	c, err := redlatch.New(context.Background(), at, redlatch.WithWatchdogTimeout(timeout))
	if err != nil {
		return err
	}
	other, err := redlatch.New(context.Background(), at)
	if err != nil {
		return err
	}
	goesOn := make(chan os.Signal, 1)
	signal.Notify(goesOn, syscall.SIGCONT)
	stopped := make(chan struct{})
	go func() {
		<-goesOn
		close(stopped)
	}()
	var wg sync.WaitGroup
	for i := 2; i < len(args); i += 2 {
		wg.Go(func() {
			release, err := hold(c, other, args[i], args[i+1], uint64(i))
			if err != nil {
				fmt.Fprintln(os.Stderr, args[i], err)
				return
			}
			fmt.Println("holds", args[i])
			<-stopped
			fmt.Println(args[i], release())
		})
	}
	wg.Wait()
	select {} // what it holds, it holds until it is killed
}

// hold takes a lock, waiting for it. Two clients release it: the one that has it, and
// another that knows nothing about it but its owner, so that it has to ask the server.
func hold(c, other *redlatch.Client, kind, name string, thread uint64) (release func() []error, err error) {
	ctx := context.Background()
	if kind == permits {
		p, err := c.PermitSemaphore(name).Acquire(ctx)
		if err != nil {
			return nil, err
		}
		return func() []error {
			return []error{p.Release(ctx), other.PermitSemaphore(name).Release(ctx, p.ID())}
		}, nil
	}
	owner, err := lock.NewOwner(c.ID(), thread)
	if err != nil {
		return nil, err
	}
	ctx = lock.WithOwner(ctx, owner)
	h, err := goLock(c, kind, name).Lock(ctx)
	if err != nil {
		return nil, err
	}
	return func() []error {
		return []error{h.Unlock(ctx), goLock(other, kind, name).Unlock(ctx)}
	}, nil
}

// spawnHolder starts a process of ours that takes locks, and waits until it has them.
func spawnHolder(t *testing.T, p *place, locks ...string) *harness.Process {
	t.Helper()
	w := harness.Spawn(t, "hold", append([]string{strings.Join(p.addrs(), ","), watchdog.String()}, locks...)...)
	for range len(locks) / 2 {
		require.Contains(t, w.Line(answers), "holds ")
	}
	return w
}

// sight is what a server has of a lock at one time. Times are in ms since 1970.
type sight struct {
	now   int64
	until int64            // when the lock expires; 0 if it is not there
	holds map[string]int64 // when the keys of read holds do; permits, likewise
}

const sightScript = `
	local function clock()
		local time = redis.call('TIME')
		return time[1] * 1000 + math.floor(time[2] / 1000)
	end
	local now = clock()
	if redis.call('TYPE', KEYS[1]).ok == 'zset' then
		return {tostring(now), redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')[2]}
	end
	local reply = {tostring(now)}
	local ttl = redis.call('PTTL', KEYS[1])
	reply[2] = ttl > 0 and tostring(now + ttl) or '0'
	if redis.call('HGET', KEYS[1], 'mode') == 'read' then
		local fields = redis.call('HGETALL', KEYS[1])
		for i = 1, #fields, 2 do
			for n = 1, tonumber(fields[i + 1]) or 0 do
				local key = '{' .. KEYS[1] .. '}:' .. fields[i] .. ':rwlock_timeout:' .. n
				reply[#reply + 1] = key
				reply[#reply + 1] = tostring(now + redis.call('PTTL', key))
			end
		end
	end
	-- On some servers the clock goes on while a script runs: look again.
	return clock() == now and reply or {}`

// see looks at a lock.
func see(t testing.TB, conn rueidis.Client, kind, name string) sight {
	t.Helper()
	key := name
	if kind == permits {
		key = "{" + name + "}:timeout"
	}
	var reply []string
	for len(reply) == 0 {
		var err error
		reply, err = conn.Do(context.Background(), conn.B().Eval().Script(sightScript).Numkeys(1).Key(key).Build()).AsStrSlice()
		require.NoError(t, err)
	}
	number := func(s string) int64 {
		var n int64
		_, err := fmt.Sscan(s, &n)
		require.NoError(t, err)
		return n
	}
	s := sight{now: number(reply[0]), holds: map[string]int64{}}
	if len(reply) > 1 {
		s.until = number(reply[1])
	}
	for i := 2; i < len(reply); i += 2 {
		s.holds[reply[i]] = number(reply[i+1])
	}
	return s
}

// waiting is a lock that one side waits for while the other one has it.
type waiting struct {
	kind, name string
	of         door   // the side that waits
	e          *entry // its attempt
}

// patient are those of the kinds whose waiters in Java look again when a lease is over. A
// waiter for a fair lock of Redisson before 3.32 looks when the lease that it saw first
// should be over, and if it is not, by a renewal or by a millisecond, it hears of nothing
// but a message from then on, which those who died do not send.
func patient(p *place, kinds []string) []string {
	if p.version != latchless {
		return kinds
	}
	return slices.DeleteFunc(slices.Clone(kinds), func(kind string) bool { return kind == "fair" })
}

// wait begins to wait for locks of those kinds, whose names begin with prefix.
func wait(t *testing.T, s side, kinds []string, prefix string) []*waiting {
	t.Helper()
	var all []*waiting
	for _, kind := range kinds {
		w := &waiting{kind: kind, name: prefix + kind, of: open(t, s, rival(kind), prefix+kind)}
		w.e = w.of.take(t, 7, forever, time.Minute)
		all = append(all, w)
	}
	return all
}

// getIn fails the test unless each of those who wait gets in when the lease is over
// that the one before has now, neither earlier nor much later. It has one of at most
// most, and at least least.
func getIn(t *testing.T, conn rueidis.Client, all []*waiting, least, most time.Duration) {
	t.Helper()
	ends := map[*waiting]sight{}
	for _, w := range all {
		ends[w] = see(t, conn, w.kind, w.name)
	}
	for _, w := range all {
		s := ends[w]
		left := time.Duration(s.until-s.now) * time.Millisecond
		require.LessOrEqual(t, left, most+exact, w.kind)
		require.GreaterOrEqual(t, left, least, w.kind)
		at := w.e.gets(t, most+answers)
		late := at.Sub(time.UnixMilli(s.until))
		require.GreaterOrEqual(t, late, -exact, "%s: before the lease was over", w.kind)
		require.Less(t, late, slack, "%s: long after the lease was over", w.kind)
	}
}

// keep fails the test unless those who got in have their minute still, and give it
// back.
func keep(t *testing.T, conn rueidis.Client, all []*waiting) {
	t.Helper()
	for _, w := range all {
		s := see(t, conn, w.kind, w.name)
		require.Greater(t, s.until-s.now, int64(40_000), "%s: the hold of the next one was cut short", w.kind)
		require.NoError(t, w.of.release(t, 7), w.kind)
	}
}

// Who stops or dies without a word keeps the others out until its lease is over and
// no longer, and has nothing to say about the lock when it goes on.
//
// The parts need time and little else, so they run side by side.
func TestLeasesEnd(t *testing.T) {
	harness.Full(t)
	everywhere(t, func(t *testing.T, p *place) {
		for _, part := range []struct {
			name string
			test func(t *testing.T, p *place)
		}{
			{"of Java that stops, and dies", javaDies},
			{"of Go that stops, and dies", goDies},
			{"without a release", unreleased},
			{"renewed beside waiters", renewedBesideWaiters},
			{"renewed beside readers", renewedBesideReaders},
		} {
			t.Run(part.name, func(t *testing.T) {
				t.Parallel()
				part.test(t, p)
			})
		}
	})
}

func javaDies(t *testing.T, p *place) {
	conn, kinds := p.conn(t), leased(p.version)
	j := spawnJVM(t, p.version)
	theirs := javaSide{j.client(t, p, "lockWatchdogTimeout: "+fmt.Sprint(watchdog.Milliseconds()))}
	t.Cleanup(func() { _ = j.cmd.Process.Signal(syscall.SIGCONT) }) // it is to close its client
	ours := goSide{c: p.ours(t)}
	take := func(prefix string) (all []door) {
		for _, kind := range kinds {
			lease := time.Duration(0)
			if kind == permits {
				lease = watchdog // without one, Redisson's never comes back
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
	// A reader of ours beside that of Java outlives it: its timeout is not longer.
	beside := goSide{c: p.ours(t, redlatch.WithWatchdogTimeout(watchdog))}.lock("read", name+"beside")
	theirs.lock("read", name+"beside").take(t, 1, 0, 0).gets(t, answers)
	beside.take(t, 1, 0, 0).gets(t, answers)
	next = wait(t, ours, kinds, name)
	require.Len(t, held, len(next))
	first := map[string]int64{}
	for _, w := range next {
		first[w.kind] = see(t, conn, w.kind, w.name).until
	}
	harness.Eventually(t, watchdog, "all have been renewed since others wait", func() bool {
		return !slices.ContainsFunc(next, func(w *waiting) bool {
			return w.kind != permits && see(t, conn, w.kind, w.name).until <= first[w.kind]+exact.Milliseconds()
		})
	})
	j.kill()
	getIn(t, conn, next, 0, watchdog)
	keep(t, conn, next)
	ours.lock("write", name+"beside").take(t, 1, 0, 0).fails(t, answers)
	require.NoError(t, beside.release(t, 1))
	ours.lock("write", name+"beside").take(t, 1, forever, 0).gets(t, slack)
}

func goDies(t *testing.T, p *place) {
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
	beside := theirs.lock("read", names[1]+"beside")
	beside.take(t, 1, 0, 0).gets(t, answers)
	stops, dies := spawnHolder(t, p, locks[0]...), spawnHolder(t, p, append(locks[1], "read", names[1]+"beside")...)

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
	theirs.lock("write", names[1]+"beside").take(t, 1, 0, 0).fails(t, answers)
	require.NoError(t, beside.release(t, 1))
	// Before 4.4 Java has renewed the hold of the dead reader with its own.
	late := slack
	if p.version != newest {
		late += watchdog
	}
	theirs.lock("write", names[1]+"beside").take(t, 1, forever, 0).gets(t, late)
}

// Nobody says that a lease is over: the next one gets in all the same. What the first
// one says later counts for nothing.
func unreleased(t *testing.T, p *place) {
	const lease = time.Second
	conn, kinds := p.conn(t), leased(p.version)
	c, java := p.ours(t), javaSide{p.theirs(t)}
	type run struct {
		pair
		kind, name string
		held, next door
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
		if ours, is := r.first.(goSide); is && !ours.named && r.kind != permits {
			require.ErrorIs(t, err, lock.ErrLost, what) // it is released by the hold, which knows
		} else {
			require.ErrorIs(t, err, lock.ErrNotHeld, what)
		}
		s := see(t, conn, r.kind, r.name)
		require.Greater(t, s.until-s.now, int64(40_000), what)
		require.NoError(t, r.next.release(t, 1), what)
		// Nobody has it now. Redisson takes that for a release of a fair lock, and
		// before 3.44 of a read-write lock.
		err = r.held.release(t, 1)
		_, theirs := r.first.(javaSide)
		if theirs && (strings.HasSuffix(r.kind, "fair") || p.version == latchless && (r.kind == "read" || r.kind == "write")) {
			require.NoError(t, err, what)
		} else {
			require.ErrorIs(t, err, lock.ErrNotHeld, what)
		}
	}
}

// A lock that is renewed has its lease anew at each renewal, and nothing else changes
// its time: neither those who wait for it nor those who try.
func renewedBesideWaiters(t *testing.T, p *place) {
	const lease = 1500 * time.Millisecond
	conn, kinds := p.conn(t), leased(p.version)
	leaseMS, off := lease.Milliseconds(), exact.Milliseconds()
	short, long := p.ours(t, redlatch.WithWatchdogTimeout(lease)), p.ours(t, redlatch.WithWatchdogTimeout(2*lease))
	type run struct {
		first, second, third side
		kind, name           string
		held, next, try      door
		e                    *entry
		last                 sight
		renewals             int
	}
	java := javaSide{p.theirs(t, fmt.Sprint("lockWatchdogTimeout: ", 2*leaseMS))}
	var runs []*run
	for i, s := range [][3]side{
		{goSide{short, false}, java, java},
		// A try of a client that waits does not ask the server.
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
			what := fmt.Sprintf("%s: %v, beside %v", r.kind, r.first, r.second)
			s := see(t, conn, r.kind, r.name)
			require.GreaterOrEqual(t, s.until, r.last.until-off, "%s: cut short", what)
			require.LessOrEqual(t, s.until, s.now+leaseMS+off, "%s: more than its lease", what)
			if s.until > r.last.until+off {
				require.GreaterOrEqual(t, s.until, r.last.now+leaseMS-off, "%s: not all of its lease", what)
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
		what := fmt.Sprintf("%s: %v, beside %v", r.kind, r.first, r.second)
		require.GreaterOrEqual(t, r.renewals, 6, what) // 12 are due
		require.NoError(t, r.held.release(t, 1), what)
		r.e.gets(t, answers)
		require.NoError(t, r.next.release(t, 1), what)
	}
}

// together is a lock that a reader of each language has, Go's first here.
type together struct {
	what, name string
	first      int     // who leaves first
	fixed      [2]bool // whose lease is not renewed
	cuts       bool    // Java's renewals leave the lock less time than our reader has,
	cutsHold   bool    // and our reader no more
	sides      [2]side
	readers    [2]door
	writers    [2]door
	gone       [2]bool
	last       sight
	renewals   [2]int
}

// check looks at the lock, and fails the test if a reader has lost time that it had.
// left is whether one has left since the last time.
func (r *together) check(t *testing.T, conn rueidis.Client, left bool) {
	t.Helper()
	off := exact.Milliseconds()
	s := see(t, conn, "read", r.name)
	var renewed [2]bool
	for i := 1; i >= 0; i-- { // what Java has done explains what is left for Go
		side, n := r.sides[i], 0
		for key, until := range s.holds {
			if !strings.Contains(key, side.id()) {
				continue
			}
			n++
			if until < r.last.holds[key]-off {
				require.True(t, i == 0 && r.cutsHold && (renewed[1] || left), "%s: the hold of %v was cut short", r.what, side)
			}
			renewed[i] = until > r.last.holds[key] // if only by a little, just after it was taken
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

// Readers of both languages have a lock together. Each has its time, whatever the
// other does: renew, for less than that, and leave. Only a renewal of Java's sets the
// expiry of the whole lock with no regard for others; when that reader leaves, it is
// made good. Before 4.4 it sets that of all holds, too, and that is not.
func renewedBesideReaders(t *testing.T, p *place) {
	const (
		shorter = 1500 * time.Millisecond
		longer  = 3 * time.Second
	)
	conn, plain := p.conn(t), goSide{c: p.ours(t)}
	var all []*together
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
				// Of several read holds of one client, 3.52 renews one; of the others only
				// the lock, with its expiry.
				java = javaSide{p.theirs(t, fmt.Sprint("lockWatchdogTimeout: ", m.watchdogs[1].Milliseconds()))}
			}
			r := &together{
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
			r.writers = [2]door{plain.lock("write", r.name), java.lock("write", r.name)}
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
