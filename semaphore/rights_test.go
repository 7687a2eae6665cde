package semaphore_test

import (
	"context"
	"encoding/hex"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// party is a client of the semaphore "orders", and what it has acquired.
type party struct {
	sem anySemaphore
	acquired
}

// acquire makes one attempt to acquire n permits, or waits if there are options.
func (p *party) acquire(ctx context.Context, n int, opts ...lock.WaitOption) error {
	a, err := p.sem.acquire(ctx, n, append([]lock.WaitOption{lock.Wait(0)}, opts...)...)
	if err == nil {
		p.n, p.ids, p.permits = p.n+a.n, append(p.ids, a.ids...), append(p.permits, a.permits...)
	}
	return err
}

// release releases everything in one request, through the semaphore of any client.
func (p *party) release(ctx context.Context, through anySemaphore) error {
	err := through.giveBack(ctx, p.acquired)
	if err == nil {
		p.acquired = acquired{}
	}
	return err
}

// rightsTest is a semaphore with a client that lacks a right, and one that has all.
type rightsTest struct {
	*testing.T
	addr        string
	less, admin party
	sized       anySemaphore // of the client that lacks a right, with 7 permits if a request creates it
	total       int
	expired     bool // expired permits may still be in the set
}

func (x *rightsTest) do(words ...string) string { return harness.Do(x, x.addr, words...) }

// take acquires permits for the client with all rights.
func (x *rightsTest) take(n int) { require.NoError(x, x.admin.acquire(x.Context(), n)) }

// waits has the client that lacks a right wait for permits, until then has run and for a moment at most. The
// client is in the wait queue by then, or has failed.
func (x *rightsTest) waits(then func()) {
	waits := harness.Start(x, x.Context(), func(ctx context.Context) (any, error) {
		return nil, x.less.acquire(ctx, 2, lock.Wait(400*time.Millisecond))
	})
	harness.Eventually(x, soon, "the client is queued or has failed", func() bool {
		return !waits.Running() || x.do("ZCARD", queueKey("orders")) == ":1"
	})
	then()
	_ = waits.End()
}

// check compares the permits on the server with those of the clients.
func (x *rightsTest) check() {
	x.Helper()
	keys, err := testserver.Query(x.addr, "KEYS", "redlatch_sc_*")
	require.NoError(x, err)
	for _, key := range keys {
		require.NotEqual(x, int64(-1), harness.PTTL(x, x.addr, key), "%s does not expire", key)
	}
	value, err := testserver.Query(x.addr, "GET", "orders")
	require.NoError(x, err)
	free, _ := strconv.Atoi(value[0]) // "" without a semaphore
	if _, leased := x.less.sem.(permitSem); !leased {
		require.Equal(x, x.total, free+x.less.n+x.admin.n)
		return
	}
	taken, err := testserver.Query(x.addr, "ZRANGE", timeoutsKey("orders"), "0", "-1")
	require.NoError(x, err)
	for i, id := range taken {
		taken[i] = hex.EncodeToString([]byte(id))
	}
	require.Equal(x, x.total, free+len(taken))
	if ids := slices.Concat(x.less.ids, x.admin.ids); x.expired {
		require.Subset(x, taken, ids)
	} else {
		require.ElementsMatch(x, ids, taken)
	}
}

// rightsOperation is something that the client that lacks a right does with a semaphore of 10 permits.
type rightsOperation struct {
	name  string
	run   func(x *rightsTest)
	kind  string // "" for both
	alone bool   // it has requests that may be served alone
}

var rightsOperations = []rightsOperation{
	{name: "acquire", alone: true, run: func(x *rightsTest) {
		_ = x.less.acquire(x.Context(), 1)
		_ = x.less.acquire(x.Context(), 3)
	}},
	{name: "acquire from a semaphore that expires", run: func(x *rightsTest) {
		x.do("PEXPIRE", "orders", "60000")
		_ = x.less.acquire(x.Context(), 3)
		_ = x.less.acquire(x.Context(), 2)
	}},
	{name: "acquire past a dead client", alone: true, run: func(x *rightsTest) {
		for _, key := range []string{queueKey("orders"), heartbeatKey("orders")} {
			x.do("ZADD", key, "1", "dead")
			x.do("PEXPIRE", key, "60000")
		}
		_ = x.less.acquire(x.Context(), 3)
	}},
	{name: "acquire expired permits", kind: "permit semaphore", run: func(x *rightsTest) {
		x.take(x.total)
		for _, id := range x.admin.ids {
			x.do("ZADD", timeoutsKey("orders"), "XX", "1", raw(x, id))
		}
		x.admin.acquired, x.expired = acquired{}, true
		for range 3 {
			_ = x.less.acquire(x.Context(), 3)
		}
	}},
	{name: "wait", run: func(x *rightsTest) {
		x.take(x.total)
		x.waits(func() { require.NoError(x, x.admin.release(x.Context(), x.admin.sem)) })
	}},
	{name: "release to local waiters", run: func(x *rightsTest) {
		x.do("PEXPIRE", "orders", "60000")
		x.take(x.total)
		x.waits(func() { _ = x.admin.release(x.Context(), x.less.sem) })
	}},
	{name: "release", alone: true, run: func(x *rightsTest) {
		for _, n := range []int{1, 4} {
			x.take(n)
			_ = x.admin.release(x.Context(), x.less.sem)
		}
	}},
	{name: "adopt", kind: "permit semaphore", run: func(x *rightsTest) {
		p := take(x, x.admin.sem.(permitSem).PermitSemaphore, 3)
		x.do("PEXPIRE", "orders", "60000")
		id, err := p.Detach(x.Context(), time.Minute)
		require.NoError(x, err)
		p, err = x.less.sem.(permitSem).Adopt(x.Context(), id)
		if err != nil {
			p, err = x.admin.sem.(permitSem).Adopt(x.Context(), id)
			require.NoError(x, err)
		}
		x.admin.ids = p.IDs()
	}},
	// A right that is withdrawn between the acquisition and its undo may lose permits.
	{name: "undo", run: func(x *rightsTest) {
		x.do("CLIENT", "PAUSE", "30000", "WRITE")
		attempt := harness.Start(x, x.Context(), func(ctx context.Context) (any, error) { return nil, x.less.acquire(ctx, 3) })
		harness.Eventually(x, soon, "the request is in progress", func() bool {
			clients, err := testserver.Query(x.addr, "CLIENT", "LIST")
			return err == nil && strings.Contains(strings.Join(clients, ""), "flags=b")
		})
		attempt.Cancel(nil)
		require.ErrorIs(x, attempt.End(), lock.ErrIndeterminate)
		x.do("CLIENT", "UNPAUSE")
	}},
	{name: "create with TrySetPermits", run: func(x *rightsTest) {
		x.do("DEL", "orders")
		x.total = 0
		if made, _ := x.less.sem.TrySetPermits(x.Context(), 7); made {
			x.total = 7
		}
	}},
	{name: "add", run: func(x *rightsTest) {
		for _, n := range []int{5, -3} {
			if err := x.less.sem.AddPermits(x.Context(), n); err == nil {
				x.total += n
			}
		}
	}},
	{name: "set", run: func(x *rightsTest) {
		x.take(4)
		if err := x.less.sem.SetPermits(x.Context(), 6); err == nil {
			x.total = 6
			if _, leased := x.less.sem.(permitSem); !leased {
				x.total += 4
			}
		}
	}},
	{name: "create with an acquisition", run: func(x *rightsTest) { x.creates(0, func() { _ = x.less.acquire(x.Context(), 3) }) }},
	{name: "create for permits that are left", kind: "permit semaphore", run: func(x *rightsTest) {
		x.creates(2, func() { _ = x.less.acquire(x.Context(), 3) })
	}},
	{name: "create with a release", run: func(x *rightsTest) {
		x.creates(2, func() { _ = x.admin.release(x.Context(), x.less.sem) })
	}},
	{name: "delete", run: func(x *rightsTest) {
		x.take(3)
		if deleted, _ := x.less.sem.Delete(x.Context()); deleted {
			x.admin.acquired, x.total = acquired{}, 0
		}
	}},
	{name: "drain", kind: "semaphore", run: func(x *rightsTest) {
		n, _ := x.less.sem.(plain).Drain(x.Context())
		x.total -= n
	}},
}

// creates deletes the number of free permits, of which left are acquired, and runs what creates it again.
func (x *rightsTest) creates(left int, create func()) {
	if left > 0 {
		x.take(left)
	}
	x.do("DEL", "orders")
	x.less.sem, x.total = x.sized, left
	create()
	if x.do("EXISTS", "orders") == ":1" {
		x.total = 7
	}
}

// No missing right loses or adds permits: a call that fails has changed nothing.
func TestMissingRightLosesNoPermits(t *testing.T) {
	rights := []string{
		"get", "set", "del", "exists", "incrby", "decrby", "hget", "hset", "hdel", "pttl", "pexpire", "time", "publish", "subscribe",
		"persist", "zadd", "zrem", "zscore", "zrange", "zrangebyscore", "zcard", "zcount",
	}
	harness.EachOf(t, rights, func(right string) string { return right }, func(t *testing.T, s *testserver.Server, right string) {
		admin, less := harness.Client(t, s, quiet), without(t, s, s.Addr, right)
		test := func(t *testing.T, k kind, op rightsOperation, warm bool, opts ...semaphore.Option) {
			harness.Do(t, s.Addr, "FLUSHALL")
			x := &rightsTest{
				T: t, addr: s.Addr, total: 10, less: party{sem: k.of(less, "orders", opts...)}, admin: party{sem: k.of(admin, "orders")},
				sized: k.of(less, "orders", append(opts, semaphore.Permits(7))...),
			}
			withPermits(t, x.admin.sem, x.total)
			if warm { // the client sends the scripts for the usual case first
				x.do("ACL", "SETUSER", "less", "+"+right)
				for range 2 {
					require.NoError(t, x.less.acquire(t.Context(), 1))
					require.NoError(t, x.less.release(t.Context(), x.less.sem))
				}
				x.do("ACL", "SETUSER", "less", "-"+right)
			}
			op.run(x)
			harness.Idle(t, less, admin)
			x.check()
		}
		for _, k := range kinds {
			for _, op := range rightsOperations {
				if op.kind != "" && op.kind != k.name {
					continue
				}
				t.Run(k.name+"/"+op.name, func(t *testing.T) { test(t, k, op, false) })
				if slices.Contains([]string{"pttl", "pexpire", "persist", "zrange", "time"}, right) {
					t.Run(k.name+"/"+op.name+", IdleTTL", func(t *testing.T) { test(t, k, op, op.alone, semaphore.IdleTTL(time.Hour)) })
				}
				if op.alone {
					t.Run(k.name+"/"+op.name+", warm", func(t *testing.T) { test(t, k, op, true) })
				}
			}
		}
	})
}

var quiet = redlatch.WithLogger(slog.New(slog.DiscardHandler))

// without returns a client at that address whose user lacks one right.
func without(t *testing.T, s *testserver.Server, addr, right string) *redlatch.Client {
	t.Helper()
	harness.Do(t, s.Addr, "ACL", "SETUSER", "less", "reset", "on", ">secret", "+@all", "allkeys", "allchannels", "-"+right)
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{addr}, Username: "less", Password: "secret"}, quiet)
	require.NoError(t, err)
	t.Cleanup(func() {
		c.Close()
		harness.Do(t, s.Addr, "ACL", "DELUSER", "less")
	})
	return c
}

// A release is refused and the reply is lost. The retry is refused as well.
func TestLostRefusalIsNotSuccess(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		x := &rightsTest{T: t, addr: s.Addr, total: 2, admin: party{sem: withPermits(t, of(harness.Client(t, s), "orders"), 2)}}
		x.take(2)
		g := harness.NewGate(t, s)
		c := without(t, s, g.Addr, "incrby")
		x.less.sem = of(c, "orders")
		script := "release"
		if _, leased := x.less.sem.(permitSem); leased {
			script = "permit_release"
		}
		reached := g.Arm(harness.LoseReply, load(t, s.Addr, script), 1)
		require.Error(t, x.admin.release(t.Context(), x.less.sem))
		harness.Reached(t, reached)
		c.Close() // ends the retries
		x.check()
	})
}
