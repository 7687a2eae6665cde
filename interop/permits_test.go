package interop

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// pool is a semaphore of either kind as one side sees it.
type pool interface {
	set(t testing.TB, permits int) bool
	// take starts to acquire permits. Its wait and lease are those of a view. Permits of a
	// plain semaphore have no lease, and Redisson renews no others.
	take(t testing.TB, permits int, wait, lease time.Duration) *permitAttempt
	// give releases permits: those with the ids, if they have ids.
	give(t testing.TB, permits int, ids ...string) error
	free(t testing.TB) int
}

// permitAttempt is an attempt to acquire permits.
type permitAttempt struct {
	*entry
	ids  []string          // of the acquired permits, if they have ids
	held *semaphore.Permit // of Go, because a client releases permits without a reference
}

// pools are the kinds of semaphore.
var pools = []string{"semaphore", "permits"}

func poolOf(s side, kind, name string) pool {
	switch s := s.(type) {
	case goSide:
		if kind == "semaphore" {
			of := s.c.Semaphore(name)
			return goNumber{goPool{of}, of}
		}
		of := s.c.PermitSemaphore(name)
		return goPermits{goPool{of}, of}
	case javaSide:
		return &javaPool{s.c, s.c.object(kind, name), kind == "permits"}
	}
	panic("no side " + s.String())
}

// goPool is what both kinds of redlatch semaphore have in common.
type goPool struct {
	of interface {
		TrySetPermits(ctx context.Context, permits int) (bool, error)
		Available(ctx context.Context) (int, error)
	}
}

func (p goPool) set(t testing.TB, permits int) bool {
	t.Helper()
	set, err := p.of.TrySetPermits(context.Background(), permits)
	require.NoError(t, err)
	return set
}

func (p goPool) free(t testing.TB) int {
	t.Helper()
	n, err := p.of.Available(context.Background())
	require.NoError(t, err)
	return n
}

type goNumber struct {
	goPool
	s *semaphore.Semaphore
}

func (p goNumber) take(t testing.TB, permits int, wait, _ time.Duration) *permitAttempt {
	t.Helper()
	return &permitAttempt{entry: begun(t, context.Background(), func(ctx context.Context) error {
		if wait == 0 {
			return p.s.TryAcquire(ctx, permits)
		}
		return p.s.Acquire(ctx, permits, options(wait, 0)...)
	})}
}

func (p goNumber) give(t testing.TB, permits int, _ ...string) error {
	t.Helper()
	return p.s.Release(context.Background(), permits)
}

type goPermits struct {
	goPool
	e *semaphore.PermitSemaphore
}

func (p goPermits) take(t testing.TB, permits int, wait, lease time.Duration) *permitAttempt {
	t.Helper()
	tk := &permitAttempt{}
	tk.entry = begun(t, context.Background(), func(ctx context.Context) (err error) {
		acquire := p.e.AcquireN
		if wait == 0 {
			acquire = p.e.TryAcquireN
		}
		tk.held, err = acquire(ctx, permits, options(wait, lease)...)
		if err == nil {
			tk.ids = tk.held.IDs()
		}
		return err
	})
	return tk
}

func (p goPermits) give(t testing.TB, _ int, ids ...string) error {
	t.Helper()
	return p.e.Release(context.Background(), ids...)
}

type javaPool struct {
	c      *redisson
	object command
	ids    bool
}

func (p *javaPool) call(t testing.TB, method string, args ...any) *call {
	t.Helper()
	return p.c.of(t, p.object, method, args...)
}

func (p *javaPool) set(t testing.TB, permits int) bool {
	t.Helper()
	var set bool
	p.call(t, "trySetPermitsAsync", permits).must(t, &set)
	return set
}

func (p *javaPool) take(t testing.TB, permits int, wait, lease time.Duration) *permitAttempt {
	t.Helper()
	tk := &permitAttempt{}
	var c *call
	got := func(value json.RawMessage) bool { return string(value) != "false" } // the result of acquire is null
	switch {
	case !p.ids && wait == 0:
		c = p.call(t, "tryAcquireAsync", permits)
	case !p.ids && wait > 0:
		c = p.call(t, "tryAcquireAsync", permits, wait.Milliseconds(), ms)
	case !p.ids: // only the first asynchronous waiter hears of a release
		c = p.call(t, "acquire", permits)
	case permits == 1:
		got = func(value json.RawMessage) bool {
			var id *string
			require.NoError(t, json.Unmarshal(value, &id))
			if id != nil {
				tk.ids = []string{*id}
			}
			return id != nil
		}
		if wait >= 0 {
			c = p.call(t, "tryAcquireAsync", wait.Milliseconds(), inJava(lease), ms)
		} else {
			c = p.call(t, "acquire", inJava(lease), ms)
		}
	default:
		got = func(value json.RawMessage) bool {
			require.NoError(t, json.Unmarshal(value, &tk.ids))
			return len(tk.ids) > 0
		}
		if wait >= 0 {
			c = p.call(t, "tryAcquireAsync", permits, wait.Milliseconds(), inJava(lease), ms)
		} else {
			// In the oldest version a thread that waits for several permits hears of no
			// release.
			c = p.call(t, "acquireAsync", permits, inJava(lease), ms)
		}
	}
	tk.entry = c.entry(t, got)
	return tk
}

func (p *javaPool) give(t testing.TB, permits int, ids ...string) error {
	t.Helper()
	var n int
	switch {
	case !p.ids:
		p.call(t, "releaseAsync", permits).must(t, nil)
		return nil
	case len(ids) == 1:
		var given bool
		if p.call(t, "tryReleaseAsync", ids[0]).must(t, &given); given {
			n = 1
		}
	default:
		p.call(t, "tryReleaseAsync", ids).must(t, &n)
	}
	if n != len(ids) {
		return lock.ErrNotHeld
	}
	return nil
}

func (p *javaPool) free(t testing.TB) int {
	t.Helper()
	var n int
	p.call(t, "availablePermitsAsync").must(t, &n)
	return n
}

// eachOrder runs a test with Go first and Java second, and the other way round, for objects
// without owners.
func (p *env) eachOrder(t *testing.T, test func(t *testing.T, first, second side)) {
	t.Helper()
	java, ours := javaSide{p.theirs(t)}, goSide{p.ours(t), false}
	for _, s := range []pair{{ours, java}, {java, ours}} {
		t.Run(s.first.String()+", then "+s.second.String(), func(t *testing.T) {
			t.Parallel()
			test(t, s.first, s.second)
		})
	}
}

// eachPool runs a test for each kind of semaphore, with names as in eachKind.
func (p *env) eachPool(t *testing.T, test func(t *testing.T, kind, name string)) {
	t.Helper()
	for _, kind := range pools {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			test(t, kind, p.nameFor(t))
		})
	}
}

func TestSidesSharePermits(t *testing.T) {
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachOrder(t, func(t *testing.T, first, second side) {
			p.eachPool(t, func(t *testing.T, kind, name string) {
				mine, theirs := poolOf(first, kind, name), poolOf(second, kind, name)
				require.True(t, mine.set(t, 3))
				require.False(t, theirs.set(t, 5))
				two, one := mine.take(t, 2, 0, long), mine.take(t, 1, forever, long)
				two.gets(t, answers)
				one.gets(t, answers)
				for _, n := range []int{1, 2} {
					theirs.take(t, n, 0, long).fails(t, answers)
					began := time.Now()
					at := theirs.take(t, n, shortly, long).fails(t, answers)
					require.GreaterOrEqual(t, at.Sub(began), shortly-time.Millisecond)
				}
				// One side releases the permits of the other.
				require.NoError(t, theirs.give(t, 1, one.ids...))
				require.Equal(t, []int{1, 1}, []int{mine.free(t), theirs.free(t)})
				theirs.take(t, 2, shortly, long).fails(t, answers)
				require.NoError(t, theirs.give(t, 2, two.ids...))
				require.Equal(t, []int{3, 3}, []int{mine.free(t), theirs.free(t)})
				if kind == "semaphore" {
					return
				}
				for _, ids := range [][]string{one.ids, two.ids} { // which are free now
					require.ErrorIs(t, mine.give(t, len(ids), ids...), lock.ErrNotHeld)
					require.ErrorIs(t, theirs.give(t, len(ids), ids...), lock.ErrNotHeld)
				}
				if p.version == latchless {
					return // which releases those of a list that it finds
				}
				again := mine.take(t, 1, 0, long)
				again.gets(t, answers)
				require.ErrorIs(t, theirs.give(t, 2, append(again.ids, one.ids...)...), lock.ErrNotHeld)
				require.Equal(t, 2, mine.free(t), "a list is released completely or not at all")
			})
		})
	})
}

func TestPermitsWakeTheOtherSide(t *testing.T) {
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachOrder(t, func(t *testing.T, first, second side) {
			p.eachPool(t, func(t *testing.T, kind, name string) {
				for i, wanted := range [][]int{{1}, {1, 1, 1}, {3}} { // by each waiter
					// With its own name: Redisson misses messages when it subscribes again at
					// once.
					name := fmt.Sprint(name, " ", i)
					mine, theirs := poolOf(first, kind, name), poolOf(second, kind, name)
					n := 0
					for _, permits := range wanted {
						n += permits
					}
					require.True(t, mine.set(t, n))
					held := mine.take(t, n, 0, long)
					held.gets(t, answers)
					tried := p.watch(t, name)
					var waiting []*permitAttempt
					for _, permits := range wanted {
						waiting = append(waiting, theirs.take(t, permits, forever, long))
					}
					tried.asleep(t, second, len(waiting))
					began := time.Now()
					require.NoError(t, mine.give(t, n, held.ids...))
					for _, w := range waiting {
						promptly(t, began, w.gets(t, answers))
					}
					require.Zero(t, mine.free(t))
				}
			})
		})
	})
}

// latch is a count-down latch as one side sees it.
type latch interface {
	set(t testing.TB, count int) bool
	down(t testing.TB)
	count(t testing.TB) int
	wait(t testing.TB, wait time.Duration) *entry // without a limit if wait is negative
}

func latchOf(s side, name string) latch {
	switch s := s.(type) {
	case goSide:
		return goLatch{s.c.CountDownLatch(name)}
	case javaSide:
		return javaLatch{s.c, name}
	}
	panic("no side " + s.String())
}

type goLatch struct{ l *countdown.Latch }

func (l goLatch) set(t testing.TB, count int) bool {
	t.Helper()
	set, err := l.l.TrySetCount(context.Background(), count)
	require.NoError(t, err)
	return set
}

func (l goLatch) down(t testing.TB) {
	t.Helper()
	_, err := l.l.CountDown(context.Background())
	require.NoError(t, err)
}

func (l goLatch) count(t testing.TB) int {
	t.Helper()
	n, err := l.l.Count(context.Background())
	require.NoError(t, err)
	return n
}

func (l goLatch) wait(t testing.TB, wait time.Duration) *entry {
	t.Helper()
	ctx := context.Background()
	if wait >= 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, wait)
		t.Cleanup(stop)
	}
	return begun(t, ctx, l.l.Wait)
}

type javaLatch struct {
	c    *redisson
	name string
}

func (l javaLatch) call(t testing.TB, method string, args ...any) *call {
	t.Helper()
	return l.c.on(t, "latch", l.name, method, args...)
}

func (l javaLatch) set(t testing.TB, count int) bool {
	t.Helper()
	var set bool
	l.call(t, "trySetCountAsync", count).must(t, &set)
	return set
}

func (l javaLatch) down(t testing.TB) {
	t.Helper()
	l.call(t, "countDownAsync").must(t, nil)
}

func (l javaLatch) count(t testing.TB) int {
	t.Helper()
	var n int
	l.call(t, "getCountAsync").must(t, &n)
	return n
}

func (l javaLatch) wait(t testing.TB, wait time.Duration) *entry {
	t.Helper()
	c := func() *call { // in the oldest version only the first asynchronous waiter hears that the latch opened
		if wait < 0 {
			return l.call(t, "await")
		}
		return l.call(t, "await", wait.Milliseconds(), ms)
	}()
	return c.entry(t, func(value json.RawMessage) bool { return string(value) != "false" }) // null without a limit
}

func TestLatchWakesTheOtherSide(t *testing.T) {
	eachEnv(t, nil, func(t *testing.T, p *env) {
		p.eachOrder(t, func(t *testing.T, first, second side) {
			name := "orders of " + t.Name()
			mine, theirs := latchOf(first, name), latchOf(second, name)
			theirs.wait(t, forever).gets(t, answers) // it is open
			for range 2 {
				require.True(t, mine.set(t, 2))
				require.False(t, theirs.set(t, 5))
				began := time.Now()
				at := theirs.wait(t, shortly).fails(t, answers)
				require.GreaterOrEqual(t, at.Sub(began), shortly-time.Millisecond)
				waiting := []*entry{theirs.wait(t, forever), theirs.wait(t, forever), mine.wait(t, forever)}
				p.heard(t, p.cluster, wire.LatchChannel(name), 2)
				theirs.down(t)
				require.Equal(t, []int{1, 1}, []int{mine.count(t), theirs.count(t)})
				theirs.wait(t, shortly).fails(t, answers)
				for _, w := range waiting {
					require.False(t, w.ended(), "one is missing")
				}
				began = time.Now()
				mine.down(t)
				for _, w := range waiting {
					promptly(t, began, w.gets(t, answers))
				}
				require.Equal(t, []int{0, 0}, []int{mine.count(t), theirs.count(t)})
				mine, theirs = theirs, mine // and the next round the other way
			}
		})
	})
}
