package contract_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/pubsub"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/redlatchtest"
	"github.com/redlatch/redlatch/rlock"
	"github.com/redlatch/redlatch/semaphore"
)

// publicCall is a call of a method, with what its errors have to say.
type publicCall struct {
	kind, name string
	method     string
	ops        string // separated by |
	run        func(ctx context.Context) error
}

// check fails the test unless err is a *lock.Error of the call that matches the cause, or any cause if that
// is nil.
func (p publicCall) check(t *testing.T, err, cause error) {
	t.Helper()
	what := p.kind + " " + p.method
	var e *lock.Error
	if !assert.ErrorAs(t, err, &e, what) {
		return
	}
	assert.Same(t, e, err, "%s: it is wrapped", what)
	assert.Contains(t, strings.Split(p.ops, "|"), e.Op, what)
	assert.Equal(t, p.kind, e.Kind, what)
	assert.Equal(t, p.name, e.Name, what)
	if cause != nil {
		assert.ErrorIs(t, err, cause, what)
	}
	assert.Regexp(t, `^redlatch: [^\n]+$`, err.Error(), what)
	if _, lost := e.Err.(*lock.LostError); lost {
		assert.Equal(t, e.Err.Error(), err.Error(), "a loss says all there is to say")
		return
	}
	assert.Equal(t, 1, strings.Count(err.Error(), "redlatch: "), err.Error())
	assert.Regexp(t, regexp.QuoteMeta(e.Op), err.Error(), what)
	assert.Equal(t, e.Waited > 0, strings.Contains(err.Error(), "(waited "), err.Error())
}

// anID is an id of a permit, detachedLock and detachedPermit are ids of what nobody has detached.
var (
	anID           = strings.Repeat("0a", 16)
	detachedLock   = somebody + "#0"
	detachedPermit = anID + "#1"
)

// publicCalls are the calls of all objects of that name, and of the client.
func publicCalls(c *redlatch.Client, name string) (all []publicCall) {
	const minute = time.Minute
	owner := c.NewOwner()
	add := func(kind, method, ops string, run func(ctx context.Context) error) {
		all = append(all, publicCall{kind, name, method, ops, run})
	}
	locker := func(kind string, l lock.Locker) {
		add(kind, "Lock", "acquire", func(ctx context.Context) error { return only(l.Lock(ctx, lock.Wait(minute))) })
		add(kind, "TryLock", "acquire", func(ctx context.Context) error { return only(l.TryLock(ctx)) })
		add(kind, "Do", "acquire", func(ctx context.Context) error { return l.Do(ctx, nothing, lock.FailFast()) })
	}
	named := func(ctx context.Context) context.Context {
		if ctx == nil {
			return nil
		}
		return lock.WithOwner(ctx, owner)
	}

	for kind, l := range map[string]harness.Lock{
		"lock": c.Lock(name), "fenced": c.FencedLock(name), "spin": c.SpinLock(name), "plain": c.PlainLock(name),
		"fair": c.FairLock(name), "read": c.RWLock(name).Read(), "write": c.RWLock(name).Write(),
		"group": c.GroupLock(name, "a", "b"),
	} {
		locker(kind, l)
		add(kind, "UnlockOwner", "release", func(ctx context.Context) error { return l.UnlockOwner(named(ctx)) })
		add(kind, "ForceUnlock", "force unlock", func(ctx context.Context) error { return only(l.ForceUnlock(ctx)) })
		add(kind, "Adopt", "adopt", func(ctx context.Context) error {
			return only(l.(interface {
				Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (lock.Hold, error)
			}).Adopt(ctx, detachedLock))
		})
		for method, look := range looks(l, owner) {
			add(kind, method, "read", look)
		}
	}
	fenced := c.FencedLock(name)
	add("fenced", "RaiseTokens", "raise tokens", func(ctx context.Context) error { return only(fenced.RaiseTokens(ctx, 7)) })
	add("fenced", "ResetTokens", "reset tokens", func(ctx context.Context) error { return only(fenced.ResetTokens(ctx)) })
	add("fair", "Queue", "read", func(ctx context.Context) error { return only(c.FairLock(name).Queue(ctx)) })

	multi := c.MultiLock(c.Lock(name))
	locker("multi", multi)
	locker("red", c.RedLock([]lock.Locker{c.Lock(name)}))
	add("multi", "UnlockOwner", "release", func(ctx context.Context) error { return multi.UnlockOwner(named(ctx)) })

	permits := c.PermitSemaphore(name, semaphore.Permits(1))
	for method, run := range (calls{
		"Acquire":    func(ctx context.Context) error { return only(permits.Acquire(ctx, 1, lock.Wait(minute))) },
		"TryAcquire": func(ctx context.Context) error { return only(permits.TryAcquire(ctx, 1)) },
		"Do":         func(ctx context.Context) error { return permits.Do(ctx, nothing, lock.FailFast()) },
	}) {
		add("permit-semaphore", method, "acquire", run)
	}
	numbers := c.Semaphore(name, semaphore.Permits(1))
	for method, run := range (calls{
		"Acquire":    func(ctx context.Context) error { return numbers.Acquire(ctx, 1, lock.Wait(minute)) },
		"TryAcquire": func(ctx context.Context) error { return numbers.TryAcquire(ctx, 1) },
		"Do":         func(ctx context.Context) error { return numbers.Do(ctx, nothing, lock.FailFast()) },
	}) {
		add("semaphore", method, "acquire", run)
	}
	add("permit-semaphore", "Release", "release", func(ctx context.Context) error { return permits.Release(ctx, anID) })
	add("permit-semaphore", "TryRelease", "release", func(ctx context.Context) error { return only(permits.TryRelease(ctx, anID)) })
	add("permit-semaphore", "Adopt", "adopt", func(ctx context.Context) error { return only(permits.Adopt(ctx, detachedPermit)) })
	add("permit-semaphore", "TTL", "read", func(ctx context.Context) error { return only(permits.TTL(ctx, anID)) })
	add("permit-semaphore", "SetTTL", "change lease", func(ctx context.Context) error {
		return only(permits.SetTTL(ctx, anID, minute))
	})
	add("permit-semaphore", "Stats", "read", func(ctx context.Context) error { return only(permits.Stats(ctx)) })
	add("semaphore", "Stats", "read", func(ctx context.Context) error { return only(numbers.Stats(ctx)) })
	add("semaphore", "Release", "release", func(ctx context.Context) error { return numbers.Release(ctx, 1) })
	add("semaphore", "ReleaseIfExists", "release", func(ctx context.Context) error { return only(numbers.ReleaseIfExists(ctx, 1)) })
	add("semaphore", "Drain", "drain", func(ctx context.Context) error { return only(numbers.Drain(ctx)) })
	add("semaphore", "TrySetPermitsFor", "set permits", func(ctx context.Context) error {
		return only(numbers.TrySetPermitsFor(ctx, 1, minute))
	})
	for kind, s := range map[string]interface {
		TrySetPermits(ctx context.Context, permits int) (bool, error)
		SetPermits(ctx context.Context, permits int) error
		AddPermits(ctx context.Context, delta int) error
		Available(ctx context.Context) (int, error)
		Exists(ctx context.Context) (bool, error)
		Delete(ctx context.Context) (bool, error)
	}{"semaphore": numbers, "permit-semaphore": permits} {
		add(kind, "TrySetPermits", "set permits", func(ctx context.Context) error { return only(s.TrySetPermits(ctx, 1)) })
		add(kind, "SetPermits", "set permits", func(ctx context.Context) error { return s.SetPermits(ctx, 1) })
		add(kind, "AddPermits", "add permits", func(ctx context.Context) error { return s.AddPermits(ctx, 1) })
		add(kind, "AddPermits(0)", "add permits", func(ctx context.Context) error { return s.AddPermits(ctx, 0) })
		add(kind, "Available", "read", func(ctx context.Context) error { return only(s.Available(ctx)) })
		add(kind, "Exists", "read", func(ctx context.Context) error { return only(s.Exists(ctx)) })
		add(kind, "Delete", "delete", func(ctx context.Context) error { return only(s.Delete(ctx)) })
	}

	latch := c.CountDownLatch(name)
	add("latch", "TrySetCount", "set count", func(ctx context.Context) error { return only(latch.TrySetCount(ctx, 1)) })
	add("latch", "TrySetCountFor", "set count", func(ctx context.Context) error { return only(latch.TrySetCountFor(ctx, 1, minute)) })
	add("latch", "CountDown", "count down", func(ctx context.Context) error { return only(latch.CountDown(ctx)) })
	add("latch", "Count", "read", func(ctx context.Context) error { return only(latch.Count(ctx)) })
	add("latch", "Delete", "delete", func(ctx context.Context) error { return only(latch.Delete(ctx)) })
	add("latch", "Wait", "wait", latch.Wait)
	add("latch", "WaitChan", "wait", func(ctx context.Context) error { return <-latch.WaitChan(ctx) })

	rate := c.RateLimiter(name, ratelimit.Rate(100, minute))
	config := ratelimit.Config{Rate: 100, Per: minute}
	add("rate-limiter", "TrySetRate", "set rate", func(ctx context.Context) error { return only(rate.TrySetRate(ctx, config)) })
	add("rate-limiter", "SetRate", "set rate", func(ctx context.Context) error { return rate.SetRate(ctx, config) })
	add("rate-limiter", "Acquire", "acquire", func(ctx context.Context) error { return rate.Acquire(ctx, 1) })
	add("rate-limiter", "TryAcquire", "acquire", func(ctx context.Context) error { return rate.TryAcquire(ctx, 1) })
	add("rate-limiter", "Take", "acquire", func(ctx context.Context) error { return only(rate.Take(ctx, 1)) })
	add("rate-limiter", "Do", "acquire", func(ctx context.Context) error { return rate.Do(ctx, nothing) })
	add("rate-limiter", "Release", "release", func(ctx context.Context) error { return only(rate.Release(ctx, 1)) })
	add("rate-limiter", "Config", "read", func(ctx context.Context) error { return only(rate.Config(ctx)) })
	add("rate-limiter", "Available", "read", func(ctx context.Context) error { return only(rate.Available(ctx)) })
	add("rate-limiter", "Delete", "delete", func(ctx context.Context) error { return only(rate.Delete(ctx)) })

	vote := c.Election(name)
	add("election", "Campaign", "acquire|campaign", func(ctx context.Context) error { return only(vote.Campaign(ctx, "", lock.FailFast())) })
	add("election", "Leader", "read", func(ctx context.Context) error { return only(vote.Leader(ctx)) })
	add("election", "Run", "run", func(ctx context.Context) error {
		return vote.Run(ctx, "", func(context.Context, *election.Term) error { return nil })
	})
	add("election", "Observe", "observe", func(ctx context.Context) (err error) {
		for _, err = range vote.Observe(ctx) {
		}
		return err
	})

	work := c.Once(name)
	add("once", "Run", "run|read|acquire", func(ctx context.Context) error { return only(work.Run(ctx, "today", nothing)) })
	add("once", "Done", "read", func(ctx context.Context) error { return only(work.Done(ctx, "today")) })
	add("once", "MarkDone", "mark done", func(ctx context.Context) error { return only(work.MarkDone(ctx, "today")) })
	add("once", "Forget", "forget", func(ctx context.Context) error { return only(work.Forget(ctx, "today")) })
	return all
}

// fail makes the calls at once, each with a context of its own, and has check see their errors.
func fail(calls []publicCall, context func() context.Context, check func(p publicCall, err error)) {
	var pending sync.WaitGroup
	for _, p := range calls {
		pending.Go(func() { check(p, p.run(context())) })
	}
	pending.Wait()
}

// Every call that fails says which call of which object has failed.
func TestErrorsNameTheirCall(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c, gone := curtly(t, s.Addr), curtly(t, s.Addr)
		gone.Close()
		must := func(cause error) func(p publicCall, err error) {
			return func(p publicCall, err error) { p.check(t, err, cause) }
		}

		fail(publicCalls(c, ""), t.Context, must(lock.ErrInvalid))
		fail(publicCalls(c, "orders"), func() context.Context { return nil }, must(lock.ErrInvalid))
		fail(publicCalls(gone, "orders"), t.Context, must(lock.ErrClosed))

		boom := errors.New("boom")
		ended := func() context.Context {
			ctx, cancel := context.WithCancelCause(t.Context())
			cancel(boom)
			return ctx
		}
		fail(publicCalls(c, "orders"), ended, func(p publicCall, err error) {
			// What ends something tries even then, and there is nothing that could fail otherwise.
			if strings.HasPrefix(p.ops, "release") || p.method == "AddPermits(0)" {
				if err != nil {
					p.check(t, err, nil)
				}
				return
			}
			p.check(t, err, boom)
		})

		harness.Do(t, s.Addr, "FLUSHALL")
		harness.Do(t, s.Addr, "LPUSH", "orders", "x")
		briefly := func() context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			t.Cleanup(cancel)
			return ctx
		}
		refused := map[string]bool{}
		var mu sync.Mutex
		fail(publicCalls(c, "orders"), briefly, func(p publicCall, err error) {
			if err != nil {
				p.check(t, err, nil)
				mu.Lock()
				defer mu.Unlock()
				refused[p.kind] = refused[p.kind] || errors.As(err, new(*rueidis.RedisError))
			}
		})
		for _, kind := range []string{
			"lock", "fenced", "spin", "plain", "fair", "read", "write", "multi", "red", "permit-semaphore", "semaphore", "latch", "election",
			"rate-limiter",
		} {
			assert.True(t, refused[kind], kind)
		}

		s.Kill()
		fail(publicCalls(c, "orders"), briefly, func(p publicCall, err error) {
			if p.method == "AddPermits(0)" {
				assert.NoError(t, err)
				return
			}
			p.check(t, err, nil)
		})
	})
}

// Bad options and arguments are errors of the call, or of the object that has them.
func TestErrorsOfBadArgumentsNameTheirCall(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := t.Context()
		memory := redlatchtest.NewLocker("orders")
		lockers := map[string]lock.Locker{
			"lock": c.Lock("orders"), "fenced": c.FencedLock("orders"), "spin": c.SpinLock("orders"), "plain": c.PlainLock("orders"),
			"fair": c.FairLock("orders"), "read": c.RWLock("orders").Read(), "write": c.RWLock("orders").Write(),
			"multi": c.MultiLock(c.Lock("orders")), "red": c.RedLock([]lock.Locker{c.Lock("orders")}),
		}
		check := func(kind, method, op string, err error) {
			t.Helper()
			publicCall{kind: kind, name: "orders", method: method, ops: op}.check(t, err, lock.ErrInvalid)
		}
		for kind, l := range lockers {
			check(kind, "Lock", "acquire", only(l.Lock(ctx, lock.Wait(-1))))
			check(kind, "TryLock", "acquire", only(l.TryLock(ctx, lock.MaxHold(0))))
			check(kind, "Do", "acquire", l.Do(ctx, nothing, lock.Lease(1)))
			check(kind, "Do(nil)", "acquire", l.Do(ctx, nil))
			if l, ok := l.(harness.Lock); ok {
				check(kind, "UnlockOwner", "release", l.UnlockOwner(ctx))
				check(kind, "HoldCount", "read", only(l.HoldCount(ctx, lock.Owner{})))
			}
		}
		check("lock", "in memory", "acquire", only(memory.TryLock(ctx, lock.Lease(0))))
		check("lock", "in memory, Do(nil)", "acquire", memory.Do(ctx, nil))
		check("", "lock.Do(nil)", "acquire", lock.Do(ctx, memory, nil))
		check("multi", "MaxWaiters", "acquire", only(c.MultiLock(c.Lock("orders")).Lock(ctx, lock.MaxWaiters(1))))
		check("red", "lease", "acquire", only(c.RedLock([]lock.Locker{c.Lock("orders")}).TryLock(ctx, lock.Lease(time.Millisecond))))
		check("lock", "option of the object", "acquire", only(c.Lock("orders", nil).TryLock(ctx)))
		check("multi", "option of a member", "acquire", only(c.MultiLock(c.Lock("orders", nil)).TryLock(ctx)))
		check("red", "option of a member", "acquire", only(c.RedLock([]lock.Locker{c.Lock("orders", nil)}).TryLock(ctx)))
		check("fair", "Adopt", "adopt", only(c.FairLock("orders").Adopt(ctx, "x")))
		check("fenced", "RaiseTokens", "raise tokens", only(c.FencedLock("orders").RaiseTokens(ctx, -1)))

		permits, numbers := c.PermitSemaphore("orders"), c.Semaphore("orders", semaphore.IdleTTL(time.Hour))
		check("permit-semaphore", "Acquire", "acquire", only(permits.Acquire(ctx, 1, lock.AtLeast(time.Hour))))
		check("permit-semaphore", "TryAcquire", "acquire", only(permits.TryAcquire(ctx, 0)))
		check("permit-semaphore", "Do(nil)", "acquire", permits.Do(ctx, nil))
		check("permit-semaphore", "Release", "release", permits.Release(ctx, "x"))
		check("permit-semaphore", "Release twice", "release", permits.Release(ctx, anID, anID))
		check("permit-semaphore", "TTL", "read", only(permits.TTL(ctx, "x")))
		check("permit-semaphore", "SetTTL", "change lease", only(permits.SetTTL(ctx, anID, 0)))
		check("permit-semaphore", "Adopt", "adopt", only(permits.Adopt(ctx, "x")))
		check("permit-semaphore", "SetPermits", "set permits", permits.SetPermits(ctx, -1))
		check("permit-semaphore", "option of the object", "read", only(c.PermitSemaphore("orders", semaphore.Permits(0)).Stats(ctx)))
		check("semaphore", "Acquire", "acquire", numbers.Acquire(ctx, 1, lock.Wait(-1)))
		check("semaphore", "TryAcquire", "acquire", numbers.TryAcquire(ctx, -1))
		check("semaphore", "Do(nil)", "acquire", numbers.Do(ctx, nil))
		check("semaphore", "TrySetPermitsFor", "set permits", only(numbers.TrySetPermitsFor(ctx, 1, time.Hour)))
		check("latch", "TrySetCount", "set count", only(c.CountDownLatch("orders").TrySetCount(ctx, -1)))
		check("latch", "TrySetCountFor", "set count", only(c.CountDownLatch("orders").TrySetCountFor(ctx, 1, 0)))
		check("latch", "CountDownN", "count down", only(c.CountDownLatch("orders").CountDownN(ctx, 0)))
		rate := c.RateLimiter("orders")
		check("rate-limiter", "TrySetRate", "set rate", only(rate.TrySetRate(ctx, ratelimit.Config{})))
		check("rate-limiter", "SetRate", "set rate", rate.SetRate(ctx, ratelimit.Config{}))
		check("rate-limiter", "Acquire", "acquire", rate.Acquire(ctx, 1, lock.Wait(-1)))
		check("rate-limiter", "TryAcquire", "acquire", rate.TryAcquire(ctx, -1))
		check("rate-limiter", "Do(nil)", "acquire", rate.Do(ctx, nil))
		check("rate-limiter", "Release", "release", only(rate.Release(ctx, -1)))
		check("rate-limiter", "option of the object", "read", only(c.RateLimiter("orders", ratelimit.Rate(0, 0)).Available(ctx)))
		check("election", "Campaign", "campaign", only(c.Election("orders").Campaign(ctx, "", lock.Wait(-1))))
		check("election", "Run", "run", c.Election("orders").Run(ctx, "", nil))
		check("once", "Run", "run", only(c.Once("orders").Run(ctx, "today", nil)))
		check("once", "Run", "run", only(c.Once("orders").Run(ctx, "today", nothing, lock.Wait(-1))))
		check("once", "Done", "read", only(c.Once("orders").Done(ctx, "")))

		var none context.Context
		for _, tt := range []struct {
			kind, name, op string
			err, cause     error
		}{
			{"client", "", "connect", only(redlatch.Open(ctx, "redis:")), lock.ErrInvalid},
			{"client", "", "connect", only(redlatch.New(ctx, rueidis.ClientOption{})), lock.ErrInvalid},
			{"client", "", "connect", only(redlatch.Open(ctx, s.URL(), redlatch.WithWatchdogTimeout(0))), lock.ErrInvalid},
			{"client", "", "connect", only(redlatch.Open(ctx, s.URL(), redlatch.WithPubSubMode(pubsub.Sharded))), lock.ErrInvalid},
			{"client", "", "connect", only(redlatch.Wrap(ctx, nil)), lock.ErrInvalid},
			{"client", "127.0.0.1:1", "connect", only(redlatch.Open(ctx, "redis://127.0.0.1:1")), lock.ErrUnavailable},
			{"client", "", "probe", only(c.Probe(ctx, "")), lock.ErrInvalid},
			{"client", "", "shut down", c.Shutdown(none), lock.ErrInvalid},
			{"guard", "", "check token", rlock.NewGuard(7).Check(0), lock.ErrInvalid},
			{"guard", "", "check token", rlock.NewGuard(7).Check(6), rlock.ErrStaleToken},
			{"owner", "x", "parse", only(lock.ParseOwner("x")), lock.ErrInvalid},
			{"owner", "x", "parse", only(lock.NewOwner("x", 1)), lock.ErrInvalid},
			{"semaphore", "none", "acquire", c.Semaphore("none").TryAcquire(ctx, 1), semaphore.ErrNotFound},
			{"election", "none", "read", only(c.Election("none").Leader(ctx)), election.ErrNoLeader},
		} {
			publicCall{kind: tt.kind, name: tt.name, method: tt.op, ops: tt.op}.check(t, tt.err, tt.cause)
		}
	})
}

// errorKind is the Kind of errors.
func (k kind) errorKind() string {
	if k.memory {
		return "lock"
	}
	return strings.ReplaceAll(strings.ReplaceAll(strings.TrimPrefix(k.name, "non-reentrant "), "non-reentrant", "lock"), " ", "-")
}

// The methods of a hold name the lock, while it is held, when it is lost, and afterwards.
func TestErrorsOfHoldsNameTheirCall(t *testing.T) {
	eachKind(t, andInMemory(leased), func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s)
		l := k.of(c, "orders")
		ctx := t.Context()
		var none context.Context
		check := func(op string, err, cause error) {
			t.Helper()
			publicCall{kind: k.errorKind(), name: l.Name(), method: op, ops: op}.check(t, err, cause)
		}

		h := mustLock(t, ctx, l)
		check("extend", h.Extend(ctx, 0), lock.ErrInvalid)
		check("extend", h.Extend(none, time.Hour), lock.ErrInvalid)
		election := k.name == "election" // whose terms have no Detach
		if !election {
			check("detach", only(lock.Detach(ctx, h, 0)), lock.ErrInvalid)
		}
		check("release", h.Unlock(none), lock.ErrInvalid)
		if !k.shared { // else the rival has another kind
			check("acquire", only(k.rival(c, "orders").TryLock(ctx)), lock.ErrNotAcquired)
		}
		require.NoError(t, h.Unlock(ctx))
		check("release", h.Unlock(ctx), lock.ErrNotHeld)
		check("extend", h.Extend(ctx, time.Hour), lock.ErrNotHeld)
		if detachable(k) {
			check("detach", only(lock.Detach(ctx, h, time.Hour)), lock.ErrNotHeld)
		} else if !election {
			check("detach", only(lock.Detach(ctx, h, time.Hour)), lock.ErrUnsupported)
		}

		h = mustLock(t, ctx, l)
		k.forgotten(t, s.Addr, h.Context())
		check("release", h.Unlock(ctx), lock.ErrLost)
	})
}

// A caller tells the error of the inner lock from that of the outer one.
func TestErrorsOfNestedLocks(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		theirs := mustLock(t, t.Context(), s.Client(t).FairLock("stock"))
		nested := func(ctx context.Context) error {
			return fmt.Errorf("ship: %w", c.FairLock("stock").Do(ctx, nothing, lock.Wait(time.Second)))
		}

		err := c.Lock("orders").Do(t.Context(), nested)
		var e *lock.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, lock.Error{Op: "acquire", Kind: "fair", Name: "stock", Waited: time.Second, Err: e.Err}, *e)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, theirs.Unlock(t.Context()))

		// The outer lock is lost while the function waits for the inner one.
		theirs = mustLock(t, t.Context(), s.Client(t).FairLock("stock"))
		err = c.Lock("orders").Do(t.Context(), func(ctx context.Context) error {
			redlatchtest.Lose(t, ctx, lock.ReasonGone)
			return nested(ctx)
		})
		var both *lock.DoError
		require.ErrorAs(t, err, &both)
		require.ErrorAs(t, both.Func, &e)
		require.Equal(t, "stock", e.Name)
		require.ErrorAs(t, both.Unlock, &e)
		require.Equal(t, lock.Error{Op: "release", Kind: "lock", Name: "orders", Err: e.Err}, *e)
		require.ErrorIs(t, e, lock.ErrLost)
		require.NoError(t, theirs.Unlock(t.Context()))
	})
}
