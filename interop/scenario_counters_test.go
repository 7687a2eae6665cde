package interop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/semaphore"
)

// op is a call of a method in either language.
type op[O any] struct {
	method string // of Redisson
	args   []any
	ours   func(ctx context.Context, o O) (any, error)
}

// does makes a call as a step. Java's null, no result, and lock.ErrNotAcquired are the same.
func does[O any](r *recorder, kind string, of func(c *redlatch.Client) O, what string, o op[O], until ...func() bool) {
	r.t.Helper()
	r.step(what, func() string {
		var value any
		var err error
		if j, is := r.side.(javaSide); is {
			var a answer
			if a, err = j.c.on(r.t, kind, traceName, o.method, o.args...).within(r.t, answers); err == nil {
				require.NoError(r.t, json.Unmarshal(a.Value, &value))
			}
		} else {
			value, err = o.ours(r.t.Context(), of(r.side.(goSide).c))
		}
		list, _ := value.([]any)
		switch {
		case err != nil && !errors.Is(err, lock.ErrNotAcquired):
			return "error"
		case err != nil, value == nil, list != nil && len(list) == 0:
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
	type of = *semaphore.Semaphore
	does := func(what string, o op[of], until ...func() bool) {
		r.t.Helper()
		does(r, "semaphore", func(c *redlatch.Client) of { return c.Semaphore(traceName) }, what, o, until...)
	}
	try := func(n int) op[of] {
		return op[of]{"tryAcquireAsync", args(n), func(ctx context.Context, s of) (any, error) {
			err := s.TryAcquire(ctx, n)
			if errors.Is(err, lock.ErrNotAcquired) || errors.Is(err, semaphore.ErrNotFound) {
				return false, nil
			}
			return true, err
		}}
	}
	set := func(n int) op[of] {
		return op[of]{"trySetPermitsAsync", args(n), func(ctx context.Context, s of) (any, error) { return s.TrySetPermits(ctx, n) }}
	}
	release := func(n int) op[of] {
		return op[of]{"releaseAsync", args(n), func(ctx context.Context, s of) (any, error) { return none(s.Release(ctx, n)) }}
	}
	add := func(n int) op[of] {
		return op[of]{"addPermitsAsync", args(n), func(ctx context.Context, s of) (any, error) { return none(s.AddPermits(ctx, n)) }}
	}
	drain := op[of]{"drainPermitsAsync", nil, func(ctx context.Context, s of) (any, error) { return s.Drain(ctx) }}
	available := op[of]{"availablePermitsAsync", nil, func(ctx context.Context, s of) (any, error) { return s.Available(ctx) }}
	does("a permit of none", try(1))
	does("5 are set", set(5))
	does("7 are set again", set(7))
	does("3 are taken", try(3))
	does("3 are not to be had", try(3))
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
	does("1 is released, who waits gets 3", release(1), sync.OnceValue(func() bool { return enters() }))
	does("2 are released", release(2))
	does("how many there are", available)
	does("2 are added", add(2))
	does("all are taken", drain)
	does("1 is released", release(1))
	r.by("PEXPIRE", traceName, "60000")
	does("1 is taken of what expires", try(1))
	does("2 are released of what expires", release(2))
	does("1 is added to what expires", add(1))
	r.by("PEXPIRE", traceName, "60000")
	does("all are taken of what expires", drain)
	does("2 are taken away", add(-2))
	does("1 is released and none is free", release(1))
	does("a negative number is taken", drain)
	r.by("DEL", traceName)
	does("1 is released that nobody has set", release(1))
}}

var expiring = scenario{title: "permits", run: func(r *recorder) {
	type of = *semaphore.PermitSemaphore
	var ids []string // in the order of acquisition
	does := func(what string, o op[of], until ...func() bool) {
		r.t.Helper()
		does(r, "permits", func(c *redlatch.Client) of { return c.PermitSemaphore(traceName) }, what, o, until...)
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
				var opts []lock.HoldOption
				if lease == -1 {
					opts = append(opts, semaphore.Forever())
				} else if lease != 0 {
					opts = append(opts, lock.Lease(lease))
				}
				p, err := r.side.(goSide).c.PermitSemaphore(traceName).TryAcquire(r.t.Context(), n, opts...)
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
	release := func(what string, some ...string) {
		r.t.Helper()
		if len(some) == 1 {
			does(what, op[of]{"tryReleaseAsync", args(some[0]), func(ctx context.Context, e of) (any, error) { return e.TryRelease(ctx, some...) }})
			return
		}
		r.step(what, func() string {
			if j, is := r.side.(javaSide); is {
				var n int
				j.c.on(r.t, "permits", traceName, "tryReleaseAsync", some).must(r.t, &n)
				return fmt.Sprint(n == len(some))
			}
			ok, err := r.side.(goSide).c.PermitSemaphore(traceName).TryRelease(r.t.Context(), some...)
			require.NoError(r.t, err)
			return fmt.Sprint(ok)
		})
	}
	lease := func(id string) op[of] {
		return op[of]{"updateLeaseTimeAsync", args(id, tenMinutes.Milliseconds(), ms), func(ctx context.Context, e of) (any, error) {
			return e.SetTTL(ctx, id, tenMinutes)
		}}
	}
	set := func(n int) op[of] {
		return op[of]{"setPermitsAsync", args(n), func(ctx context.Context, e of) (any, error) { return none(e.SetPermits(ctx, n)) }}
	}
	trySet := func(n int) op[of] {
		return op[of]{"trySetPermitsAsync", args(n), func(ctx context.Context, e of) (any, error) { return e.TrySetPermits(ctx, n) }}
	}
	add := func(n int) op[of] {
		return op[of]{"addPermitsAsync", args(n), func(ctx context.Context, e of) (any, error) { return none(e.AddPermits(ctx, n)) }}
	}
	free := op[of]{"availablePermitsAsync", nil, func(ctx context.Context, e of) (any, error) { return e.Available(ctx) }}
	count := func(method string, pick func(stats semaphore.PermitStats) int) op[of] {
		return op[of]{method, nil, func(ctx context.Context, e of) (any, error) {
			stats, err := e.Stats(ctx)
			return pick(stats), err
		}}
	}
	// over is a condition: the first of the permits has expired.
	over := func() bool {
		scores, err := do(r.t, r.conn, "ZRANGE", "{"+traceName+"}:timeout", "0", "0", "WITHSCORES").AsZScores()
		return err == nil && len(scores) == 1 && int64(scores[0].Score) < time.Now().UnixMilli()
	}
	acquire("a permit of none", 1, minute)
	does("5 are set", trySet(5))
	does("7 are set again", trySet(7))
	acquire("1 is taken for 1 min", 1, minute)
	acquire("1 is taken for ever", 1, -1)
	acquire("2 are taken for 1 min", 2, minute)
	acquire("1 is taken without a lease", 1, 0)
	acquire("no more are to be had", 1, minute)
	does("one is to last for 10 min", lease(ids[0]))
	does("how many are free", free)
	does("how many are taken", count("acquiredPermitsAsync", func(stats semaphore.PermitStats) int { return stats.Taken }))
	does("how many there are", count("getPermitsAsync", func(stats semaphore.PermitStats) int { return stats.Total }))
	release("1 is released", ids[0])
	release("1 is released again", ids[0])
	release("2 are released, one of which is not taken", ids[0], ids[1])
	release("2 are released", ids[2], ids[3])
	does("there are to be 7", set(7))
	does("there are to be 7 already", set(7))
	does("2 are added", add(2))
	does("1 is taken away", add(-1))
	acquire("1 is taken for a moment, which passes", 1, moment, over)
	acquire("1 is taken where one is over", 1, minute)
	acquire("1 is taken for a moment, which passes too", 1, moment, over)
	does("how many are free where one is over", free)
	acquire("1 is taken where one was over", 1, minute)
	acquire("1 is taken for a moment, to be released", 1, moment, over)
	release("what is over is released", ids[len(ids)-1])
	acquire("another 1 is taken where one was over", 1, minute)
	acquire("1 is taken for a moment, to last longer", 1, moment, over)
	does("what is over is to last", lease(ids[len(ids)-1]))
	acquire("the last 1 is taken where one was over", 1, minute)
	r.by("PEXPIRE", traceName, "60000")
	acquire("1 is taken for 10 min of what expires", 1, tenMinutes)
	does("there are to be 3 of what expires", set(3))
	r.by("DEL", traceName)
	r.by("DEL", "{"+traceName+"}:timeout")
	does("3 are set", trySet(3))
	r.by("PEXPIRE", traceName, "60000")
	acquire("the first is taken for 10 min of what expires", 1, tenMinutes)
}}

var rounds = scenario{title: "rounds", run: func(r *recorder) {
	type of = *countdown.Latch
	does := func(what string, o op[of]) {
		r.t.Helper()
		does(r, "latch", func(c *redlatch.Client) of { return c.CountDownLatch(traceName) }, what, o)
	}
	set := func(n int) op[of] {
		return op[of]{"trySetCountAsync", args(n), func(ctx context.Context, l of) (any, error) { return l.TrySetCount(ctx, n) }}
	}
	down := op[of]{"countDownAsync", nil, func(ctx context.Context, l of) (any, error) {
		_, err := l.CountDown(ctx)
		return none(err)
	}}
	remove := op[of]{"deleteAsync", nil, func(ctx context.Context, l of) (any, error) { return l.Delete(ctx) }}
	does("counted down where there is no count", down)
	does("2 are set", set(2))
	does("3 are set again", set(3))
	does("how many are left", op[of]{"getCountAsync", nil, func(ctx context.Context, l of) (any, error) { return l.Count(ctx) }})
	does("counted down", down)
	does("counted down to zero", down)
	does("1 is set", set(1))
	does("deleted", remove)
	does("deleted again", remove)
	r.by("SET", traceName, "0")
	does("2 are set where a zero is stored", set(2))
}}

var limiting = scenario{title: "permits", run: func(r *recorder) {
	type of = *ratelimit.Limiter
	does := func(what string, o op[of], until ...func() bool) {
		r.t.Helper()
		does(r, "rate", func(c *redlatch.Client) of { return c.RateLimiter(traceName) }, what, o, until...)
	}
	try := func(n int) op[of] {
		return op[of]{"tryAcquireAsync", args(n), func(ctx context.Context, l of) (any, error) {
			err := l.TryAcquire(ctx, n)
			if errors.Is(err, lock.ErrNotAcquired) {
				return false, nil
			}
			return true, err
		}}
	}
	trySet := func(c ratelimit.Config) op[of] {
		return op[of]{"trySetRateAsync", rateArgs(c), func(ctx context.Context, l of) (any, error) { return l.TrySetRate(ctx, c) }}
	}
	set := func(c ratelimit.Config) op[of] {
		return op[of]{"setRateAsync", rateArgs(c), func(ctx context.Context, l of) (any, error) { return none(l.SetRate(ctx, c)) }}
	}
	free := op[of]{"availablePermitsAsync", nil, func(ctx context.Context, l of) (any, error) { return l.Available(ctx) }}
	release := func(n int) op[of] {
		return op[of]{"releaseAsync", args(n), func(ctx context.Context, l of) (any, error) {
			_, err := l.Release(ctx, n)
			return none(err)
		}}
	}
	remove := op[of]{"deleteAsync", nil, func(ctx context.Context, l of) (any, error) { return l.Delete(ctx) }}
	// past is a condition: the oldest acquisition was made that long ago.
	past := func(d time.Duration) func() bool {
		return func() bool {
			scores, err := do(r.t, r.conn, "ZRANGE", wire.RatePermits(traceName), "0", "0", "WITHSCORES").AsZScores()
			return err == nil && len(scores) == 1 && int64(scores[0].Score) < time.Now().Add(-d).UnixMilli()
		}
	}
	per := func(n int, d time.Duration) ratelimit.Config { return ratelimit.Config{Rate: n, Per: d} }
	does("a permit of none", try(1))
	does("how many are free of none", free)
	does("5 are set for an hour", trySet(per(5, time.Hour)))
	does("7 are set again", trySet(per(7, time.Hour)))
	does("how many are free of all", free)
	does("3 are taken", try(3))
	does("1 is taken", try(1))
	does("how many are free", free)
	does("2 are not to be had", try(2))
	does("6 are not to be had ever", try(6))
	does("9 are set anew", set(per(9, time.Hour)))
	does("1 is taken of the new rate", try(1))
	does("deleted", remove)
	does("deleted again", remove)
	keep := per(5, time.Minute)
	keep.KeepAlive = tenMinutes
	does("5 are set, to last for 10 min", trySet(keep))
	does("1 is taken of what lasts", try(1))
	r.by("DEL", traceName, wire.RateValue(traceName), wire.RatePermits(traceName))
	does("5 are set for a moment", trySet(per(5, moment)))
	does("3 are taken for a moment, which passes", try(3), past(moment))
	does("how many are free where 3 are over", free)
	does("4 are taken where 3 were over, for a moment, which passes", try(4), past(moment))
	does("5 are taken where 4 are over", try(5))
	r.by("DEL", traceName, wire.RateValue(traceName), wire.RatePermits(traceName))
	does("5 are set for a while", trySet(per(5, while)))
	does("4 are taken for a while", try(4))
	var enters func() bool // once
	r.step("somebody waits for 5", func() string {
		if j, is := r.side.(javaSide); is {
			c := j.c.on(r.t, "rate", traceName, "acquireAsync", 5)
			enters = func() bool { c.must(r.t, nil); return true }
			return "waits"
		}
		e := begun(r.t, context.Background(), func(ctx context.Context) error {
			return r.side.(goSide).c.RateLimiter(traceName).Acquire(ctx, 5)
		})
		enters = func() bool { e.gets(r.t, answers); return true }
		return "waits"
	}, func() bool {
		_, java := r.side.(javaSide)
		return java || !r.gone(wire.RateTurn(traceName))()
	})
	r.step("who waits gets 5", func() string { return "done" }, sync.OnceValue(func() bool { return enters() }))
	r.by("DEL", traceName, wire.RateValue(traceName), wire.RatePermits(traceName))
	does("5 are set of what expires", trySet(per(5, time.Hour)))
	r.by("PEXPIRE", traceName, "60000")
	does("1 is taken of what expires", try(1))
	does("2 are set for an hour and each client", set(ratelimit.Config{Rate: 2, Per: time.Hour, PerClient: true}))
	does("1 is taken by a client", try(1))
	does("how many are free of this client", free)
	does("2 are not to be had by this client", try(2))
	does("deleted for this client", remove)
	r.by("DEL", wire.RateValue(traceName), wire.RatePermits(traceName)) // which Redisson has left
	does("5 are set, to be released", trySet(per(5, time.Hour)))
	does("3 are taken, to be released", try(3))
	does("2 are released", release(2))
	does("1 is taken of what was released", try(1))
	does("9 are released, more than were taken", release(9))
}}
