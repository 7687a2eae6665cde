package interop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// does makes a call in either language. Java's null and lock.ErrNotAcquired are the same
// result.
func (r *recorder) does(what, kind, method string, args []any, null string, ours func(ctx context.Context) (any, error), until ...func() bool) {
	r.t.Helper()
	r.step(what, func() string {
		if j, is := r.side.(javaSide); is {
			a, err := j.c.on(r.t, kind, traceName, method, args...).within(r.t, answers)
			if err != nil {
				return "error"
			}
			var value any
			require.NoError(r.t, json.Unmarshal(a.Value, &value))
			if list, is := value.([]any); is && len(list) == 0 {
				value = nil
			}
			if value == nil {
				return null
			}
			return r.text(fmt.Sprint(value))
		}
		value, err := ours(r.t.Context())
		if errors.Is(err, lock.ErrNotAcquired) {
			return null
		}
		if err != nil {
			return "error"
		}
		if value == nil {
			return "done"
		}
		return r.text(fmt.Sprint(value))
	}, until...)
}

// by changes the servers without either side.
func (r *recorder) by(words ...string) {
	r.t.Helper()
	require.NoError(r.t, do(r.t, r.conn, words...).Error())
}

func args(a ...any) []any { return a }

// none is for calls without a result.
func none(err error) (any, error) { return nil, err }

var counting = scenario{title: "permits", run: func(r *recorder) {
	does := func(what, method string, a []any, ours func(ctx context.Context, s *semaphore.Semaphore) (any, error), until ...func() bool) {
		r.t.Helper()
		r.does(what, "semaphore", method, a, "done", func(ctx context.Context) (any, error) {
			return ours(ctx, r.side.(goSide).c.Semaphore(traceName))
		}, until...)
	}
	try := func(what string, n int) {
		r.t.Helper()
		does(what, "tryAcquireAsync", args(n), func(ctx context.Context, s *semaphore.Semaphore) (any, error) {
			err := s.TryAcquire(ctx, n)
			if errors.Is(err, lock.ErrNotAcquired) || errors.Is(err, semaphore.ErrNotFound) {
				return false, nil
			}
			return true, err
		})
	}
	set := func(what string, n int) {
		r.t.Helper()
		does(what, "trySetPermitsAsync", args(n), func(ctx context.Context, s *semaphore.Semaphore) (any, error) { return s.TrySetPermits(ctx, n) })
	}
	release := func(what string, n int) {
		r.t.Helper()
		does(what, "releaseAsync", args(n), func(ctx context.Context, s *semaphore.Semaphore) (any, error) { return none(s.Release(ctx, n)) })
	}
	add := func(what string, n int) {
		r.t.Helper()
		does(what, "addPermitsAsync", args(n), func(ctx context.Context, s *semaphore.Semaphore) (any, error) { return none(s.AddPermits(ctx, n)) })
	}
	drain := func(what string) {
		r.t.Helper()
		does(what, "drainPermitsAsync", nil, func(ctx context.Context, s *semaphore.Semaphore) (any, error) { return s.Drain(ctx) })
	}
	available := func(what string) {
		r.t.Helper()
		does(what, "availablePermitsAsync", nil, func(ctx context.Context, s *semaphore.Semaphore) (any, error) { return s.Available(ctx) })
	}
	try("a permit of none", 1)
	set("5 are set", 5)
	set("7 are set again", 7)
	try("3 are taken", 3)
	try("3 are not to be had", 3)
	var enters func() bool // once
	r.step("somebody waits for 3", func() string {
		if j, is := r.side.(javaSide); is {
			c := j.c.on(r.t, "semaphore", traceName, "acquireAsync", 3)
			enters = func() bool { c.must(r.t, nil); return true }
			return "waits"
		}
		e := begun(r.t, context.Background(), func(ctx context.Context) error {
			return r.side.(goSide).c.Semaphore(traceName).Acquire(ctx, 3)
		})
		enters = func() bool { e.gets(r.t, answers); return true }
		return "waits"
	}, r.parked, func() bool {
		_, java := r.side.(javaSide)
		return java || !r.gone("redlatch_sc_alive:{"+traceName+"}")()
	})
	does("1 is released, who waits gets 3", "releaseAsync", args(1), func(ctx context.Context, s *semaphore.Semaphore) (any, error) {
		return none(s.Release(ctx, 1))
	}, sync.OnceValue(func() bool { return enters() }))
	release("2 are released", 2)
	available("how many there are")
	add("2 are added", 2)
	drain("all are taken")
	release("1 is released", 1)
	r.by("PEXPIRE", traceName, "60000")
	try("1 is taken of what expires", 1)
	release("2 are released of what expires", 2)
	add("1 is added to what expires", 1)
	r.by("PEXPIRE", traceName, "60000")
	drain("all are taken of what expires")
	add("2 are taken away", -2)
	release("1 is released and none is free", 1)
	drain("a negative number is taken")
	r.by("DEL", traceName)
	release("1 is released that nobody has set", 1)
}}

var expiring = scenario{title: "permits", run: func(r *recorder) {
	var ids []string // in the order of acquisition
	does := func(what, method string, a []any, null string, ours func(ctx context.Context, e *semaphore.PermitSemaphore) (any, error), until ...func() bool) {
		r.t.Helper()
		r.does(what, "permits", method, a, null, func(ctx context.Context) (any, error) {
			return ours(ctx, r.side.(goSide).c.PermitSemaphore(traceName))
		}, until...)
	}
	// acquire acquires permits. A lease of 0 is renewed if the kind allows that; -1 never
	// ends.
	acquire := func(what string, n int, lease time.Duration, until ...func() bool) {
		r.t.Helper()
		r.step(what, func() string {
			var got []string
			if j, is := r.side.(javaSide); is {
				leaseMS := max(lease.Milliseconds(), 0)
				if lease <= 0 {
					leaseMS = -1
				}
				var value []string
				if n > 1 {
					j.c.on(r.t, "permits", traceName, "tryAcquireAsync", n, 0, leaseMS, ms).must(r.t, &value)
				} else {
					var id *string
					j.c.on(r.t, "permits", traceName, "tryAcquireAsync", 0, leaseMS, ms).must(r.t, &id)
					if id != nil {
						value = append(value, *id)
					}
				}
				got = value
			} else {
				var opts []lock.Option
				if lease == -1 {
					opts = append(opts, semaphore.Forever())
				} else if lease != 0 {
					opts = append(opts, lock.Lease(lease))
				}
				p, err := r.side.(goSide).c.PermitSemaphore(traceName).TryAcquireN(r.t.Context(), n, opts...)
				switch {
				case err == nil:
					got = p.IDs()
				case !errors.Is(err, lock.ErrNotAcquired):
					require.ErrorIs(r.t, err, semaphore.ErrNotFound)
				}
				// The call is abandoned without a release.
				r.t.Cleanup(func() { _ = p })
			}
			if len(got) == 0 {
				return "refused"
			}
			ids = append(ids, got...)
			return r.text(fmt.Sprint(got))
		}, until...)
	}
	release := func(what string, of ...string) {
		r.t.Helper()
		if len(of) == 1 {
			does(what, "tryReleaseAsync", args(of[0]), "done", func(ctx context.Context, e *semaphore.PermitSemaphore) (any, error) { return e.TryRelease(ctx, of...) })
			return
		}
		r.step(what, func() string {
			if j, is := r.side.(javaSide); is {
				var n int
				j.c.on(r.t, "permits", traceName, "tryReleaseAsync", of).must(r.t, &n)
				return fmt.Sprint(n == len(of))
			}
			ok, err := r.side.(goSide).c.PermitSemaphore(traceName).TryRelease(r.t.Context(), of...)
			require.NoError(r.t, err)
			return fmt.Sprint(ok)
		})
	}
	lease := func(what, id string) {
		r.t.Helper()
		does(what, "updateLeaseTimeAsync", args(id, tenMinutes.Milliseconds(), ms), "done", func(ctx context.Context, e *semaphore.PermitSemaphore) (any, error) {
			return e.UpdateLeaseTime(ctx, id, tenMinutes)
		})
	}
	set := func(what string, n int) {
		r.t.Helper()
		does(what, "setPermitsAsync", args(n), "done", func(ctx context.Context, e *semaphore.PermitSemaphore) (any, error) {
			return none(e.SetPermits(ctx, n))
		})
	}
	trySet := func(what string, n int) {
		r.t.Helper()
		does(what, "trySetPermitsAsync", args(n), "done", func(ctx context.Context, e *semaphore.PermitSemaphore) (any, error) { return e.TrySetPermits(ctx, n) })
	}
	add := func(what string, n int) {
		r.t.Helper()
		does(what, "addPermitsAsync", args(n), "done", func(ctx context.Context, e *semaphore.PermitSemaphore) (any, error) {
			return none(e.AddPermits(ctx, n))
		})
	}
	count := func(what, method string, ours func(e *semaphore.PermitSemaphore, ctx context.Context) (int, error)) {
		r.t.Helper()
		does(what, method, nil, "done", func(ctx context.Context, e *semaphore.PermitSemaphore) (any, error) { return ours(e, ctx) })
	}
	// over is a condition: the first of the permits has expired.
	over := func() bool {
		scores, err := do(r.t, r.conn, "ZRANGE", "{"+traceName+"}:timeout", "0", "0", "WITHSCORES").AsZScores()
		return err == nil && len(scores) == 1 && int64(scores[0].Score) < time.Now().UnixMilli()
	}
	acquire("a permit of none", 1, minute)
	trySet("5 are set", 5)
	trySet("7 are set again", 7)
	acquire("1 is taken for 1 min", 1, minute)
	acquire("1 is taken for ever", 1, -1)
	acquire("2 are taken for 1 min", 2, minute)
	acquire("1 is taken without a lease", 1, 0)
	acquire("no more are to be had", 1, minute)
	lease("one is to last for 10 min", ids[0])
	count("how many are free", "availablePermitsAsync", (*semaphore.PermitSemaphore).Available)
	count("how many are taken", "acquiredPermitsAsync", func(e *semaphore.PermitSemaphore, ctx context.Context) (int, error) {
		stats, err := e.Stats(ctx)
		return stats.Taken, err
	})
	count("how many there are", "getPermitsAsync", func(e *semaphore.PermitSemaphore, ctx context.Context) (int, error) {
		stats, err := e.Stats(ctx)
		return stats.Total, err
	})
	release("1 is released", ids[0])
	release("1 is released again", ids[0])
	release("2 are released, one of which is not taken", ids[0], ids[1])
	release("2 are released", ids[2], ids[3])
	set("there are to be 7", 7)
	set("there are to be 7 already", 7)
	add("2 are added", 2)
	add("1 is taken away", -1)
	acquire("1 is taken for a moment, which passes", 1, moment, over)
	acquire("1 is taken where one is over", 1, minute)
	acquire("1 is taken for a moment, which passes too", 1, moment, over)
	count("how many are free where one is over", "availablePermitsAsync", (*semaphore.PermitSemaphore).Available)
	acquire("1 is taken where one was over", 1, minute)
	acquire("1 is taken for a moment, to be released", 1, moment, over)
	release("what is over is released", ids[len(ids)-1])
	acquire("another 1 is taken where one was over", 1, minute)
	acquire("1 is taken for a moment, to last longer", 1, moment, over)
	lease("what is over is to last", ids[len(ids)-1])
	acquire("the last 1 is taken where one was over", 1, minute)
	r.by("PEXPIRE", traceName, "60000")
	acquire("1 is taken for 10 min of what expires", 1, tenMinutes)
	set("there are to be 3 of what expires", 3)
	r.by("DEL", traceName)
	r.by("DEL", "{"+traceName+"}:timeout")
	trySet("3 are set", 3)
	r.by("PEXPIRE", traceName, "60000")
	acquire("the first is taken for 10 min of what expires", 1, tenMinutes)
}}

var rounds = scenario{title: "rounds", run: func(r *recorder) {
	set := func(what string, n int) {
		r.t.Helper()
		r.does(what, "latch", "trySetCountAsync", args(n), "done", func(ctx context.Context) (any, error) {
			return r.side.(goSide).c.CountDownLatch(traceName).TrySetCount(ctx, n)
		})
	}
	down := func(what string) {
		r.t.Helper()
		r.does(what, "latch", "countDownAsync", nil, "done", func(ctx context.Context) (any, error) {
			_, err := r.side.(goSide).c.CountDownLatch(traceName).CountDown(ctx)
			return none(err)
		})
	}
	remove := func(what string) {
		r.t.Helper()
		r.does(what, "latch", "deleteAsync", nil, "done", func(ctx context.Context) (any, error) {
			return r.side.(goSide).c.CountDownLatch(traceName).Delete(ctx)
		})
	}
	down("counted down where there is no count")
	set("2 are set", 2)
	set("3 are set again", 3)
	r.does("how many are left", "latch", "getCountAsync", nil, "done", func(ctx context.Context) (any, error) {
		return r.side.(goSide).c.CountDownLatch(traceName).Count(ctx)
	})
	down("counted down")
	down("counted down to zero")
	set("1 is set", 1)
	remove("deleted")
	remove("deleted again")
	r.by("SET", traceName, "0")
	set("2 are set where a zero is stored", 2)
}}
