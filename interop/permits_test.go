package interop

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// pool is a semaphore of either kind as one side sees it.
type pool struct {
	set  func(permits int) bool
	free func() int
	// take starts to acquire permits. Its wait and lease are those of a view. Permits of a
	// plain semaphore have no lease, and Redisson renews no others.
	take func(permits int, wait, lease time.Duration) *permitAttempt
	// give releases permits: those with the ids, if they have ids.
	give func(permits int, ids ...string) error
}

// permitAttempt is an attempt to acquire permits.
type permitAttempt struct {
	*entry
	ids  []string          // of the acquired permits, if they have ids
	held *semaphore.Permit // of Go, because a client releases permits without a reference
}

// pools are the kinds of semaphore.
var pools = []string{"semaphore", "permits"}

func poolOf(t testing.TB, s side, kind, name string) pool {
	t.Helper()
	if java, is := s.(javaSide); is {
		return javaPool(t, java.c, kind, name)
	}
	ctx, c := context.Background(), s.(goSide).c
	numbers, permits := c.Semaphore(name), c.PermitSemaphore(name)
	var of interface {
		TrySetPermits(ctx context.Context, permits int) (bool, error)
		Available(ctx context.Context) (int, error)
	} = permits
	if kind == "semaphore" {
		of = numbers
	}
	p := pool{
		set: func(permits int) bool {
			set, err := of.TrySetPermits(ctx, permits)
			require.NoError(t, err)
			return set
		},
		free: func() int {
			n, err := of.Available(ctx)
			require.NoError(t, err)
			return n
		},
		take: func(n int, wait, lease time.Duration) *permitAttempt {
			tk := &permitAttempt{}
			tk.entry = begun(t, ctx, func(ctx context.Context) (err error) {
				if wait == 0 {
					tk.held, err = permits.TryAcquire(ctx, n, harness.HoldOptions(options(wait, lease))...)
				} else {
					tk.held, err = permits.Acquire(ctx, n, options(wait, lease)...)
				}
				if err == nil {
					tk.ids = tk.held.IDs()
				}
				return err
			})
			return tk
		},
		give: func(_ int, ids ...string) error { return permits.Release(ctx, ids...) },
	}
	if kind == "semaphore" {
		p.take = func(n int, wait, _ time.Duration) *permitAttempt {
			return &permitAttempt{entry: begun(t, ctx, func(ctx context.Context) error {
				if wait == 0 {
					return numbers.TryAcquire(ctx, n)
				}
				if wait < 0 {
					return numbers.Acquire(ctx, n)
				}
				return numbers.Acquire(ctx, n, lock.Wait(wait))
			})}
		}
		p.give = func(n int, _ ...string) error { return numbers.Release(ctx, n) }
	}
	return p
}

func javaPool(t testing.TB, c *redisson, kind, name string) pool {
	call := func(method string, args ...any) *call { return c.on(t, kind, name, method, args...) }
	p := pool{
		set:  func(permits int) (set bool) { call("trySetPermitsAsync", permits).must(t, &set); return set },
		free: func() (n int) { call("availablePermitsAsync").must(t, &n); return n },
	}
	if kind == "semaphore" {
		p.take = func(permits int, wait, _ time.Duration) *permitAttempt {
			method, args := "tryAcquireAsync", []any{permits, wait.Milliseconds(), ms}
			if wait == 0 {
				args = args[:1]
			} else if wait < 0 {
				method, args = "acquire", args[:1] // only the first asynchronous waiter hears of a release
			}
			// The result of acquire is null.
			return &permitAttempt{entry: call(method, args...).entry(t, func(value json.RawMessage) bool { return string(value) != "false" })}
		}
		p.give = func(permits int, _ ...string) error {
			call("releaseAsync", permits).must(t, nil)
			return nil
		}
		return p
	}
	p.take = func(permits int, wait, lease time.Duration) *permitAttempt {
		tk := &permitAttempt{}
		method, args := "tryAcquireAsync", []any{permits, wait.Milliseconds(), inJava(lease), ms}
		if wait < 0 {
			// In the oldest version a thread that waits for several permits hears of no release.
			method, args = "acquireAsync", slices.Delete(args, 1, 2)
		}
		got := func(value json.RawMessage) bool {
			require.NoError(t, json.Unmarshal(value, &tk.ids))
			return len(tk.ids) > 0
		}
		if permits == 1 {
			args, method = args[1:], strings.Replace(method, "acquireAsync", "acquire", 1)
			got = func(value json.RawMessage) bool {
				var id *string
				require.NoError(t, json.Unmarshal(value, &id))
				if id != nil {
					tk.ids = []string{*id}
				}
				return id != nil
			}
		}
		tk.entry = call(method, args...).entry(t, got)
		return tk
	}
	p.give = func(_ int, ids ...string) error {
		n := 0
		if len(ids) == 1 {
			var given bool
			if call("tryReleaseAsync", ids[0]).must(t, &given); given {
				n = 1
			}
		} else {
			call("tryReleaseAsync", ids).must(t, &n)
		}
		if n != len(ids) {
			return lock.ErrNotHeld
		}
		return nil
	}
	return p
}

// eachPool runs a test for each kind of semaphore, with names as in eachKind.
func (p *env) eachPool(t *testing.T, test func(t *testing.T, kind, name string)) {
	t.Helper()
	for _, kind := range pools {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			test(t, kind, "orders of "+t.Name())
		})
	}
}

// eachOrder runs a test with Go first and Java second, and the other way round, for objects
// without owners.
func (p *env) eachOrder(t *testing.T, test func(t *testing.T, first, second side)) {
	t.Helper()
	java, ours := javaSide{p.theirs(t)}, goSide{p.ours(t), false}
	for _, s := range [][2]side{{ours, java}, {java, ours}} {
		t.Run(fmt.Sprint(s[0], ", then ", s[1]), func(t *testing.T) {
			t.Parallel()
			test(t, s[0], s[1])
		})
	}
}

func TestSidesSharePermits(t *testing.T) {
	eachEnv(t, func(t *testing.T, p *env) {
		p.eachOrder(t, func(t *testing.T, first, second side) {
			p.eachPool(t, func(t *testing.T, kind, name string) {
				mine, theirs := poolOf(t, first, kind, name), poolOf(t, second, kind, name)
				require.True(t, mine.set(3))
				require.False(t, theirs.set(5))
				two, one := mine.take(2, 0, long), mine.take(1, forever, long)
				two.gets(t, answers)
				one.gets(t, answers)
				for _, n := range []int{1, 2} {
					theirs.take(n, 0, long).fails(t, answers)
					theirs.take(n, shortly, long).failsAfter(t, shortly)
				}
				// One side releases the permits of the other.
				require.NoError(t, theirs.give(1, one.ids...))
				require.Equal(t, []int{1, 1}, []int{mine.free(), theirs.free()})
				theirs.take(2, shortly, long).fails(t, answers)
				require.NoError(t, theirs.give(2, two.ids...))
				require.Equal(t, []int{3, 3}, []int{mine.free(), theirs.free()})
				if kind == "semaphore" {
					return
				}
				for _, ids := range [][]string{one.ids, two.ids} { // which are free now
					require.ErrorIs(t, mine.give(len(ids), ids...), lock.ErrNotHeld)
					require.ErrorIs(t, theirs.give(len(ids), ids...), lock.ErrNotHeld)
				}
				if p.version == latchless {
					return // which releases those of a list that it finds
				}
				again := mine.take(1, 0, long)
				again.gets(t, answers)
				require.ErrorIs(t, theirs.give(2, append(again.ids, one.ids...)...), lock.ErrNotHeld)
				require.Equal(t, 2, mine.free(), "a list is released completely or not at all")
			})
		})
	})
}

func TestPermitsWakeTheOtherSide(t *testing.T) {
	eachEnv(t, func(t *testing.T, p *env) {
		p.eachOrder(t, func(t *testing.T, first, second side) {
			p.eachPool(t, func(t *testing.T, kind, name string) {
				for i, wanted := range [][]int{{1}, {1, 1, 1}, {3}} { // by each waiter
					// With its own name: Redisson misses messages when it subscribes again at
					// once.
					name := fmt.Sprint(name, " ", i)
					mine, theirs := poolOf(t, first, kind, name), poolOf(t, second, kind, name)
					n := 0
					for _, permits := range wanted {
						n += permits
					}
					require.True(t, mine.set(n))
					held := mine.take(n, 0, long)
					held.gets(t, answers)
					tried := p.watch(t, name)
					var waiting []*permitAttempt
					for _, permits := range wanted {
						waiting = append(waiting, theirs.take(permits, forever, long))
					}
					tried.asleep(t, second, len(waiting))
					began := time.Now()
					require.NoError(t, mine.give(n, held.ids...))
					for _, w := range waiting {
						w.promptly(t, began)
					}
					require.Zero(t, mine.free())
				}
			})
		})
	})
}

// A semaphore that expires when redlatch does not use it keeps its permits and its bytes beside Redisson, whose uses
// leave the lifetime, and whose permits without a lease keep it for ever.
func TestIdleTTLBesideJava(t *testing.T) {
	eachEnv(t, func(t *testing.T, p *env) {
		p.eachPool(t, func(t *testing.T, kind, name string) {
			opts := []semaphore.Option{semaphore.Permits(3), semaphore.IdleTTL(time.Hour)}
			c, conn := p.ours(t), p.conn(t)
			use := func(ctx context.Context, fn func(context.Context) error) error {
				return c.Semaphore(name, opts...).Do(ctx, fn)
			}
			keys := []string{name}
			if kind == "permits" {
				use = func(ctx context.Context, fn func(context.Context) error) error {
					return c.PermitSemaphore(name, opts...).Do(ctx, fn)
				}
				keys = append(keys, wire.PermitTimeouts(name))
			}
			ours := func() {
				t.Helper()
				require.NoError(t, use(t.Context(), func(context.Context) error { return nil }))
			}
			requireTTL := func(least, most int64) {
				t.Helper()
				for _, key := range keys {
					ttl, err := do(t, conn, "PTTL", key).AsInt64()
					require.NoError(t, err)
					if ttl != -2 {
						require.True(t, least <= ttl && ttl <= most, "%s expires after %d ms", key, ttl)
					}
				}
			}
			const hour, minute = 3_600_000, 60_000
			full := func() { requireTTL(hour, hour+hour/10) }
			ours()
			full()

			java := p.theirs(t)
			theirs := javaPool(t, java, kind, name)
			held := theirs.take(1, 0, long)
			held.gets(t, answers)
			full()
			require.Equal(t, 2, theirs.free())
			for _, key := range keys {
				require.NoError(t, do(t, conn, "PEXPIRE", key, "60000").Error())
			}
			require.NoError(t, theirs.give(1, held.ids...))
			held = theirs.take(2, 0, long)
			held.gets(t, answers)
			requireTTL(1, minute)
			ours()
			full()
			require.NoError(t, theirs.give(2, held.ids...))

			// addPermits drops the lifetime of the number, until the next use.
			java.on(t, kind, name, "addPermitsAsync", 1).must(t, nil)
			requireTTL(-1, hour+hour/10)
			ours()
			full()
			require.Equal(t, 4, theirs.free())
			if kind == "semaphore" {
				return
			}
			forever := theirs.take(1, 0, 0)
			forever.gets(t, answers)
			ours()
			requireTTL(-1, -1)
			require.NoError(t, theirs.give(1, forever.ids...))
			ours()
			full()
			require.Equal(t, 4, theirs.free())
		})
	})
}

// latch is a count-down latch as one side sees it.
type latch struct {
	set   func(count int) bool
	down  func()
	count func() int
	wait  func(wait time.Duration) *entry // without a limit if wait is negative
}

func latchOf(t testing.TB, s side, name string) latch {
	t.Helper()
	if java, is := s.(javaSide); is {
		call := func(method string, value any, args ...any) {
			java.c.on(t, "latch", name, method, args...).must(t, value)
		}
		return latch{
			set:   func(count int) (set bool) { call("trySetCountAsync", &set, count); return set },
			down:  func() { call("countDownAsync", nil) },
			count: func() (n int) { call("getCountAsync", &n); return n },
			wait: func(wait time.Duration) *entry {
				// In the oldest version only the first asynchronous waiter hears that the latch opened.
				args := []any{wait.Milliseconds(), ms}
				if wait < 0 {
					args = nil
				}
				c := java.c.on(t, "latch", name, "await", args...)
				return c.entry(t, func(value json.RawMessage) bool { return string(value) != "false" }) // null without a limit
			},
		}
	}
	ctx, l := context.Background(), s.(goSide).c.CountDownLatch(name)
	return latch{
		set: func(count int) bool {
			set, err := l.TrySetCount(ctx, count)
			require.NoError(t, err)
			return set
		},
		down: func() {
			_, err := l.CountDown(ctx)
			require.NoError(t, err)
		},
		count: func() int {
			n, err := l.Count(ctx)
			require.NoError(t, err)
			return n
		},
		wait: func(wait time.Duration) *entry {
			ctx := ctx
			if wait >= 0 {
				var stop context.CancelFunc
				ctx, stop = context.WithTimeout(ctx, wait)
				t.Cleanup(stop)
			}
			return begun(t, ctx, l.Wait)
		},
	}
}

func TestLatchWakesTheOtherSide(t *testing.T) {
	eachEnv(t, func(t *testing.T, p *env) {
		p.eachOrder(t, func(t *testing.T, first, second side) {
			name := "orders of " + t.Name()
			mine, theirs := latchOf(t, first, name), latchOf(t, second, name)
			theirs.wait(forever).gets(t, answers) // it is open
			for range 2 {
				require.True(t, mine.set(2))
				require.False(t, theirs.set(5))
				theirs.wait(shortly).failsAfter(t, shortly)
				waiting := []*entry{theirs.wait(forever), theirs.wait(forever), mine.wait(forever)}
				p.heard(t, false, wire.LatchChannel(name), 2)
				theirs.down()
				require.Equal(t, []int{1, 1}, []int{mine.count(), theirs.count()})
				theirs.wait(shortly).fails(t, answers)
				for _, w := range waiting {
					require.False(t, w.ended(), "one is missing")
				}
				began := time.Now()
				mine.down()
				for _, w := range waiting {
					w.promptly(t, began)
				}
				require.Equal(t, []int{0, 0}, []int{mine.count(), theirs.count()})
				mine, theirs = theirs, mine // and the next round the other way
			}
		})
	})
}
