package semaphore_test

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// call is a method that sends a request, with valid arguments.
type call[S any] struct {
	name string
	do   func(ctx context.Context, s S) error
	// sends reports that the method sends its request even if the context is done.
	sends bool
}

var semaphoreCalls = []call[*semaphore.Semaphore]{
	{name: "TrySetPermits", do: func(ctx context.Context, s *semaphore.Semaphore) error { return only(s.TrySetPermits(ctx, 1)) }},
	{name: "TrySetPermitsFor", do: func(ctx context.Context, s *semaphore.Semaphore) error {
		return only(s.TrySetPermitsFor(ctx, 1, time.Minute))
	}},
	{name: "SetPermits", do: func(ctx context.Context, s *semaphore.Semaphore) error { return s.SetPermits(ctx, 1) }},
	{name: "Stats", do: func(ctx context.Context, s *semaphore.Semaphore) error { return only(s.Stats(ctx)) }},
	{name: "Exists", do: func(ctx context.Context, s *semaphore.Semaphore) error { return only(s.Exists(ctx)) }},
	{name: "Delete", do: func(ctx context.Context, s *semaphore.Semaphore) error { return only(s.Delete(ctx)) }},
	{name: "Do", do: func(ctx context.Context, s *semaphore.Semaphore) error { return s.Do(ctx, nothing) }},
	{name: "AddPermits", do: func(ctx context.Context, s *semaphore.Semaphore) error { return s.AddPermits(ctx, 1) }},
	{name: "Available", do: func(ctx context.Context, s *semaphore.Semaphore) error { return only(s.Available(ctx)) }},
	{name: "Acquire", do: func(ctx context.Context, s *semaphore.Semaphore) error { return s.Acquire(ctx, 1) }},
	{name: "TryAcquire", do: func(ctx context.Context, s *semaphore.Semaphore) error { return s.TryAcquire(ctx, 1) }},
	{name: "Drain", do: func(ctx context.Context, s *semaphore.Semaphore) error { return only(s.Drain(ctx)) }},
	{name: "Release", sends: true, do: func(ctx context.Context, s *semaphore.Semaphore) error { return s.Release(ctx, 1) }},
	{name: "ReleaseIfExists", sends: true, do: func(ctx context.Context, s *semaphore.Semaphore) error {
		return only(s.ReleaseIfExists(ctx, 1))
	}},
}

// nothing is a function for Do.
func nothing(context.Context) error { return nil }

var permitCalls = []call[*semaphore.PermitSemaphore]{
	{name: "TrySetPermits", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.TrySetPermits(ctx, 1)) }},
	{name: "SetPermits", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return e.SetPermits(ctx, 1) }},
	{name: "AddPermits", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return e.AddPermits(ctx, 1) }},
	{name: "Available", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.Available(ctx)) }},
	{name: "Stats", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.Stats(ctx)) }},
	{name: "Exists", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.Exists(ctx)) }},
	{name: "Delete", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.Delete(ctx)) }},
	{name: "Do", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return e.Do(ctx, nothing) }},
	{name: "Acquire", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.Acquire(ctx)) }},
	{name: "AcquireN", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.AcquireN(ctx, 1)) }},
	{name: "TryAcquire", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.TryAcquire(ctx)) }},
	{name: "TryAcquireN", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.TryAcquireN(ctx, 1)) }},
	{name: "LeaseTime", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.LeaseTime(ctx, unknown)) }},
	{name: "UpdateLeaseTime", do: func(ctx context.Context, e *semaphore.PermitSemaphore) error {
		return only(e.UpdateLeaseTime(ctx, unknown, time.Minute))
	}},
	{name: "Release", sends: true, do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return e.Release(ctx, unknown) }},
	{name: "TryRelease", sends: true, do: func(ctx context.Context, e *semaphore.PermitSemaphore) error { return only(e.TryRelease(ctx, unknown)) }},
}

// eachCall makes every call on both kinds and passes its error to check.
func eachCall(ctx context.Context, sem *semaphore.Semaphore, e *semaphore.PermitSemaphore, check func(what string, sends bool, err error)) {
	for _, c := range semaphoreCalls {
		check("Semaphore."+c.name, c.sends, c.do(ctx, sem))
	}
	for _, c := range permitCalls {
		check("PermitSemaphore."+c.name, c.sends, c.do(ctx, e))
	}
}

// noRequests returns a function that fails the test if a client has sent a request since.
func noRequests(t *testing.T, s *testserver.Server) (check func()) {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
	return func() {
		t.Helper()
		for command, n := range harness.Commands(t, conn) {
			switch command {
			case "config", "info", "hello", "client", "ping":
			default:
				require.Zero(t, n, command)
			}
		}
	}
}

// Names with braces that a cluster could not keep are tested with those of all kinds.
func TestEmptyName(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		check := noRequests(t, s)
		eachCall(t.Context(), c.Semaphore(""), c.PermitSemaphore(""), func(what string, _ bool, err error) {
			require.ErrorIs(t, err, lock.ErrInvalid, what)
		})
		check()
	})
}

func TestNilContext(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		p := take(t, permitSemaphore(t, s, 1), 1)[0]
		check := noRequests(t, s)
		var none context.Context
		eachCall(none, c.Semaphore("orders"), c.PermitSemaphore("orders"), func(what string, _ bool, err error) {
			require.ErrorIs(t, err, lock.ErrInvalid, what)
		})
		require.ErrorIs(t, p.Release(none), lock.ErrInvalid)
		require.ErrorIs(t, p.Extend(none, time.Minute), lock.ErrInvalid)
		check()
		require.NoError(t, p.Context().Err())
		require.NoError(t, p.Release(t.Context()))
	})
}

func TestClosedClient(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		sem, e := c.Semaphore("plain"), c.PermitSemaphore("orders")
		c.Close()
		check := noRequests(t, s)
		for _, late := range []bool{false, true} {
			if late { // created after Close
				sem, e = c.Semaphore("plain"), c.PermitSemaphore("orders")
			}
			eachCall(t.Context(), sem, e, func(what string, _ bool, err error) {
				require.ErrorIs(t, err, lock.ErrClosed, what)
			})
		}
		check()
	})
}

func TestCanceledContext(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		sem := withPermits(t, plain{c.Semaphore("plain")}, 5)
		e := permitSemaphore(t, s, 5)
		p := take(t, e, 1)[0]
		boom := errors.New("boom")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(boom)
		eachCall(ctx, sem.Semaphore, e, func(what string, sends bool, err error) {
			switch {
			case !sends:
				require.Error(t, err, what)
				if strings.Contains(what, "Acquire") || strings.HasSuffix(what, ".Do") {
					require.ErrorIs(t, err, lock.ErrNotAcquired, what)
					require.ErrorIs(t, err, boom, what)
				}
				require.NotErrorIs(t, err, lock.ErrIndeterminate, what)
			case what == "PermitSemaphore.Release":
				require.ErrorIs(t, err, lock.ErrNotHeld, what)
			default:
				require.NoError(t, err, what)
			}
		})
		require.Equal(t, 7, available(t, sem), "only the two releases took effect")
		require.Equal(t, counts{5, 4, 1}, countsOf(t, e))
		require.Error(t, p.Extend(ctx, time.Hour))
		require.NoError(t, p.Release(ctx))
		require.Equal(t, counts{5, 5, 0}, countsOf(t, e))
	})
}

// A call for 0 permits sends nothing.
func TestZeroPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		sem, e := c.Semaphore("plain"), c.PermitSemaphore("orders")
		ctx := t.Context()
		check := noRequests(t, s)
		require.NoError(t, sem.Acquire(ctx, 0))
		require.NoError(t, sem.Acquire(ctx, 0, lock.Wait(10*time.Minute)))
		require.NoError(t, sem.TryAcquire(ctx, 0))
		require.NoError(t, sem.Release(ctx, 0))
		there, err := sem.ReleaseIfExists(ctx, 0)
		require.NoError(t, err)
		require.False(t, there)
		require.NoError(t, e.Release(ctx))
		released, err := e.TryRelease(ctx)
		require.NoError(t, err)
		require.False(t, released)
		check()
		require.Zero(t, available(t, sem))
		require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
	})
}

func TestInvalidNumbers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		sem, e := c.Semaphore("plain"), c.PermitSemaphore("orders")
		ctx := t.Context()
		check := noRequests(t, s)
		invalid := func(err error) {
			t.Helper()
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		tooMany := []int{-1, math.MinInt}
		if strconv.IntSize == 64 {
			tooMany = append(tooMany, semaphore.MaxPermits+1, math.MaxInt)
		}
		for _, n := range tooMany {
			_, err := sem.TrySetPermits(ctx, n)
			invalid(err)
			invalid(sem.SetPermits(ctx, n))
			_, err = sem.TrySetPermitsFor(ctx, n, time.Minute)
			invalid(err)
			invalid(sem.Acquire(ctx, n))
			invalid(sem.TryAcquire(ctx, n))
			invalid(sem.Release(ctx, n))
			_, err = sem.ReleaseIfExists(ctx, n)
			invalid(err)
			_, err = e.TrySetPermits(ctx, n)
			invalid(err)
			invalid(e.SetPermits(ctx, n))
			if n != -1 {
				invalid(sem.AddPermits(ctx, n))
				invalid(e.AddPermits(ctx, n))
			}
		}
		for _, n := range append(tooMany, 0, semaphore.MaxBatch+1) {
			_, err := e.AcquireN(ctx, n)
			invalid(err)
			require.ErrorContains(t, err, "must be from 1 to 10000")
			_, err = e.TryAcquireN(ctx, n)
			invalid(err)
		}
		for _, ttl := range []time.Duration{0, -1, time.Millisecond - 1, lock.MaxLease + 1, lock.NoExpiry} {
			_, err := sem.TrySetPermitsFor(ctx, 1, ttl)
			invalid(err)
			if ttl != lock.NoExpiry {
				_, err = e.UpdateLeaseTime(ctx, unknown, ttl)
				invalid(err)
			}
		}
		check()
	})
}

func TestInvalidOptions(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		sem, e := c.Semaphore("plain"), c.PermitSemaphore("orders")
		ctx := t.Context()
		check := noRequests(t, s)
		bad := map[string][]lock.Option{
			"zero option": {{}}, "no lease": {lock.Lease(0)}, "lease too short": {lock.Lease(time.Millisecond - 1)},
			"lease too long": {lock.Lease(lock.MaxLease + 1)}, "negative wait": {lock.Wait(-1)}, "no MaxHold": {lock.MaxHold(0)},
			"MaxHold with a lease": {lock.MaxHold(time.Minute), lock.Lease(time.Hour)}, "MaxHold for ever": {lock.MaxHold(time.Minute), semaphore.Forever()},
		}
		for what, opts := range bad {
			require.ErrorIs(t, sem.Acquire(ctx, 1, opts...), lock.ErrInvalid, what)
			_, err := e.Acquire(ctx, opts...)
			require.ErrorIs(t, err, lock.ErrInvalid, what)
			_, err = e.AcquireN(ctx, 2, opts...)
			require.ErrorIs(t, err, lock.ErrInvalid, what)
			_, err = e.TryAcquire(ctx, opts...)
			require.ErrorIs(t, err, lock.ErrInvalid, what)
			_, err = e.TryAcquireN(ctx, 0, opts...)
			require.ErrorIs(t, err, lock.ErrInvalid, what)
		}
		for what, opt := range map[string]lock.Option{
			"lease": lock.Lease(time.Minute), "MaxHold": lock.MaxHold(time.Minute), "for ever": semaphore.Forever(),
			"parent": lock.Parent(context.Background()), "at least": lock.AtLeast(time.Minute),
		} {
			require.ErrorIs(t, sem.Acquire(ctx, 1, opt), lock.ErrInvalid, what)
		}
		for _, wait := range []time.Duration{0, time.Minute} {
			_, err := e.TryAcquire(ctx, lock.Wait(wait))
			require.ErrorIs(t, err, lock.ErrInvalid)
			_, err = e.TryAcquireN(ctx, 2, lock.Wait(wait))
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		check()

		p := take(t, permitSemaphore(t, s, 1), 1)[0]
		for _, lease := range []time.Duration{0, -time.Second, time.Millisecond - 1, lock.MaxLease + 1, lock.NoExpiry} {
			require.ErrorIs(t, p.Extend(ctx, lease), lock.ErrInvalid)
		}
		require.NoError(t, p.Context().Err())
	})
}

func TestInvalidIDs(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e := permitSemaphore(t, s, 2)
		p := take(t, e, 1)[0]
		ctx := t.Context()
		check := noRequests(t, s)
		invalid := func(ids ...string) {
			t.Helper()
			require.ErrorIs(t, e.Release(ctx, ids...), lock.ErrInvalid)
			released, err := e.TryRelease(ctx, ids...)
			require.ErrorIs(t, err, lock.ErrInvalid)
			require.False(t, released)
		}
		for _, id := range []string{"", "1234", unknown[1:], unknown + "0", unknown + "00", "g" + unknown[1:], raw(t, unknown)} {
			invalid(id)
			invalid(p.ID(), id)
			invalid(id, p.ID())
			_, err := e.LeaseTime(ctx, id)
			require.ErrorIs(t, err, lock.ErrInvalid)
			_, err = e.UpdateLeaseTime(ctx, id, time.Minute)
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		invalid(p.ID(), p.ID())
		invalid(p.ID(), unknown, unknown)
		many := make([]string, semaphore.MaxBatch+1)
		for i := range many {
			many[i] = hex.EncodeToString([]byte(fmt.Sprintf("permit %09d", i)))
		}
		invalid(many...)
		check()
		released, err := e.TryRelease(ctx, many[1:]...)
		require.NoError(t, err)
		require.False(t, released)
		require.Equal(t, counts{2, 1, 1}, countsOf(t, e))
		require.NoError(t, p.Context().Err())

		// Ids are not case-sensitive.
		upper := fmt.Sprintf("%X", raw(t, p.ID()))
		invalid(p.ID(), upper)
		require.NoError(t, e.Release(ctx, upper))
		require.ErrorIs(t, p.Release(ctx), lock.ErrNotHeld)
	})
}

func TestTooManyPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := t.Context()
		sem := withPermits(t, plain{c.Semaphore("plain")}, semaphore.MaxPermits)
		unchanged := func(n int, err error) {
			t.Helper()
			require.ErrorIs(t, err, lock.ErrInvalid)
			require.Equal(t, n, available(t, sem))
		}
		unchanged(semaphore.MaxPermits, sem.Release(ctx, 1))
		_, err := sem.ReleaseIfExists(ctx, semaphore.MaxPermits)
		unchanged(semaphore.MaxPermits, err)
		unchanged(semaphore.MaxPermits, sem.AddPermits(ctx, 1))
		mustAcquire(t, sem, 1)
		unchanged(semaphore.MaxPermits-1, sem.Release(ctx, 2))
		require.NoError(t, sem.Release(ctx, 1))
		require.NoError(t, sem.AddPermits(ctx, -semaphore.MaxPermits))
		require.NoError(t, sem.AddPermits(ctx, -semaphore.MaxPermits))
		unchanged(-semaphore.MaxPermits, sem.AddPermits(ctx, -1))
		require.NoError(t, sem.Release(ctx, semaphore.MaxPermits))
		require.Zero(t, available(t, sem))

		e := c.PermitSemaphore("orders")
		require.NoError(t, e.SetPermits(ctx, semaphore.MaxPermits))
		require.ErrorIs(t, e.AddPermits(ctx, 1), lock.ErrInvalid)
		require.Equal(t, counts{semaphore.MaxPermits, semaphore.MaxPermits, 0}, countsOf(t, e))
	})
}

// A key that is not a semaphore stays unchanged.
func TestForeignKeys(t *testing.T) {
	keys := map[string][]string{
		"another type": {"HSET", "orders", "a", "1"},
		"a list":       {"RPUSH", "orders", "1"},
		"no number":    {"SET", "orders", "precious"},
		"nothing":      {"SET", "orders", ""},
	}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for what, make := range keys {
			t.Run(what, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				harness.Do(t, s.Addr, make...)
				before, err := testserver.Query(s.Addr, "DUMP", "orders")
				require.NoError(t, err)
				c := harness.Client(t, s)
				eachCall(t.Context(), c.Semaphore("orders"), c.PermitSemaphore("orders"), func(name string, _ bool, err error) {
					switch name {
					case "PermitSemaphore.LeaseTime":
						require.ErrorIs(t, err, lock.ErrNotHeld, name)
					case "PermitSemaphore.UpdateLeaseTime":
						require.NoError(t, err, name) // the permit is not acquired
					default:
						require.ErrorContains(t, err, "the key has a value of another type", name)
						require.NotErrorIs(t, err, lock.ErrUnavailable, name)
						require.NotErrorIs(t, err, lock.ErrNotAcquired, name)
						require.NotErrorIs(t, err, lock.ErrIndeterminate, name)
					}
				})
				after, err := testserver.Query(s.Addr, "DUMP", "orders")
				require.NoError(t, err)
				require.Equal(t, before, after)
				harness.Do(t, s.Addr, "DEL", "orders")
				harness.NothingStays(t, s.Addr)
			})
		}
		t.Run("the set of permits", func(t *testing.T) {
			harness.Do(t, s.Addr, "FLUSHALL")
			e := permitSemaphore(t, s, 3)
			p := take(t, e, 1, lock.Lease(time.Hour))[0]
			harness.Do(t, s.Addr, "SET", timeoutsKey("orders"), "precious")
			for _, c := range permitCalls {
				if c.name == "TrySetPermits" || c.name == "AddPermits" || c.name == "Exists" {
					continue // it does not read this key
				}
				require.ErrorContains(t, c.do(t.Context(), e), "WRONGTYPE", c.name)
			}
			var lost *lock.LostError
			require.ErrorAs(t, p.Release(t.Context()), &lost)
			require.Equal(t, lock.ReasonGone, lost.Reason)
			require.Equal(t, "$1", harness.Do(t, s.Addr, "GET", "orders"))
			require.Equal(t, "$8", harness.Do(t, s.Addr, "GET", timeoutsKey("orders")))
		})
	})
}

// A value that is not a semaphore's may be a secret, or large.
func TestForeignValuesAreNotInErrors(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c := harness.Client(t, s)
		for _, value := range []string{"topsecret", strings.Repeat("x", 1<<20), "12\x1b[2J"} {
			harness.Do(t, s.Addr, "SET", "orders", value)
			for what, call := range map[string]func() error{
				"Available": func() error { return only(of(c, "orders").Available(t.Context())) },
				"Acquire":   func() error { _, err := of(c, "orders").acquire(t.Context(), 1); return err },
				"Add":       func() error { return of(c, "orders").AddPermits(t.Context(), 1) },
			} {
				err := call()
				require.Error(t, err, what)
				require.NotContains(t, err.Error(), "topsecret", what)
				require.NotContains(t, err.Error(), "\x1b", what)
				require.Less(t, len(err.Error()), 1000, what)
			}
		}
	})
}
