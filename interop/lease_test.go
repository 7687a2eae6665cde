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
)

// permits are the leased permits of a semaphore with one permit, as a kind of lock.
const permits = "permits"

// leased are the kinds of a version of Redisson whose holds expire.
func leased(version string) []string {
	var all []string
	for _, kind := range append([]string{permits}, kinds...) {
		if has(version, kind) {
			all = append(all, kind)
		}
	}
	return all
}

// open returns a lock of any leased kind as that side sees it.
func open(t *testing.T, s side, kind, name string) view {
	t.Helper()
	if kind != permits {
		return s.lock(kind, name)
	}
	p := poolOf(s, kind, name)
	p.set(t, 1)
	return &permitView{pool: p}
}

// permitView is the only permit of a semaphore. A permit of Redisson without a lease never
// expires.
type permitView struct {
	view // other methods are not used
	pool pool
	got  *permitAttempt
}

func (d *permitView) take(t testing.TB, _ uint64, wait, lease time.Duration) *entry {
	t.Helper()
	d.got = d.pool.take(t, 1, wait, lease)
	return d.got.entry
}

func (d *permitView) release(t testing.TB, _ uint64) error {
	t.Helper()
	return d.pool.give(t, 1, d.got.ids...)
}

// holdWorker acquires locks and holds them until it is killed. Its arguments are the addresses
// of the servers, its watchdog timeout, and then kinds and names in turn. It prints "holds"
// and the kind of each lock. If it was stopped, it releases them all when it continues, and
// prints the errors.
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
			release, err := hold(c, other, args[i], args[i+1])
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
	select {} // it holds the locks until it is killed
}

// hold acquires a lock, waiting for it. It is released twice: permits by another client the
// second time, which knows only the id.
func hold(c, other *redlatch.Client, kind, name string) (release func() []error, err error) {
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
	h, err := goLock(c, kind, name).Lock(ctx)
	if err != nil {
		return nil, err
	}
	return func() []error {
		return []error{h.Unlock(ctx), h.Unlock(ctx)}
	}, nil
}

// spawnHolder starts a redlatch process and waits until it holds the locks.
func spawnHolder(t *testing.T, p *env, locks ...string) *harness.Process {
	t.Helper()
	w := harness.Spawn(t, "hold", append([]string{strings.Join(p.addrs(), ","), watchdog.String()}, locks...)...)
	for range len(locks) / 2 {
		require.Contains(t, w.Line(answers), "holds ")
	}
	return w
}

// snapshot is the state of a lock on a server. Times are in ms since 1970.
type snapshot struct {
	now   int64
	until int64            // the expiry of the lock; 0 if it does not exist
	holds map[string]int64 // the expiries of the keys of read holds, or of permits
}

const snapshotScript = `
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

// see reads the state of a lock.
func see(t testing.TB, conn rueidis.Client, kind, name string) snapshot {
	t.Helper()
	key := name
	if kind == permits {
		key = "{" + name + "}:timeout"
	}
	var reply []string
	for len(reply) == 0 {
		var err error
		reply, err = conn.Do(context.Background(), conn.B().Eval().Script(snapshotScript).Numkeys(1).Key(key).Build()).AsStrSlice()
		require.NoError(t, err)
	}
	number := func(s string) int64 {
		var n int64
		_, err := fmt.Sscan(s, &n)
		require.NoError(t, err)
		return n
	}
	s := snapshot{now: number(reply[0]), holds: map[string]int64{}}
	if len(reply) > 1 {
		s.until = number(reply[1])
	}
	for i := 2; i < len(reply); i += 2 {
		s.holds[reply[i]] = number(reply[i+1])
	}
	return s
}

// waiting is a lock that one side holds and the other waits for.
type waiting struct {
	kind, name string
	of         view   // the waiting side
	e          *entry // its attempt
}

// patient are the kinds whose waiters in Java try again when a lease expires. A waiter of
// Redisson before 3.32 for a fair lock tries when the lease that it saw first should have
// expired. If the lease was extended by then, even by a millisecond, it relies on messages,
// which dead holders do not send.
func patient(p *env, kinds []string) []string {
	if p.version != latchless {
		return kinds
	}
	return slices.DeleteFunc(slices.Clone(kinds), func(kind string) bool { return kind == "fair" })
}

// wait starts to wait for locks of those kinds, whose names begin with prefix.
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

// getIn fails the test unless each waiter acquires its lock when the current lease of the
// holder expires, neither earlier nor much later. That lease is at least least and at most
// most.
func getIn(t *testing.T, conn rueidis.Client, all []*waiting, least, most time.Duration) {
	t.Helper()
	ends := map[*waiting]snapshot{}
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
		require.GreaterOrEqual(t, late, -exact, "%s: before the lease expired", w.kind)
		require.Less(t, late, slack, "%s: long after the lease expired", w.kind)
	}
}

// keep fails the test unless the waiters that acquired a lock still have their minute, and
// releases them.
func keep(t *testing.T, conn rueidis.Client, all []*waiting) {
	t.Helper()
	for _, w := range all {
		s := see(t, conn, w.kind, w.name)
		require.Greater(t, s.until-s.now, int64(40_000), "%s: the next hold was cut short", w.kind)
		require.NoError(t, w.of.release(t, 7), w.kind)
	}
}
