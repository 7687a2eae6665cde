package semaphore_test

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
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

// unknown is an id without a permit.
const unknown = "0123456789abcdef0123456789abcdef"

// callsOf returns calls of all methods that send requests, with valid arguments.
func callsOf(s *semaphore.Semaphore, e *semaphore.PermitSemaphore) map[string]func(ctx context.Context) error {
	nothing := func(context.Context) error { return nil }
	type ctx = context.Context
	return map[string]func(ctx) error{
		"Semaphore.TrySetPermits":    func(c ctx) error { return only(s.TrySetPermits(c, 1)) },
		"Semaphore.TrySetPermitsFor": func(c ctx) error { return only(s.TrySetPermitsFor(c, 1, time.Minute)) },
		"Semaphore.SetPermits":       func(c ctx) error { return s.SetPermits(c, 1) },
		"Semaphore.AddPermits":       func(c ctx) error { return s.AddPermits(c, 1) },
		"Semaphore.Available":        func(c ctx) error { return only(s.Available(c)) },
		"Semaphore.Stats":            func(c ctx) error { return only(s.Stats(c)) },
		"Semaphore.Exists":           func(c ctx) error { return only(s.Exists(c)) },
		"Semaphore.Delete":           func(c ctx) error { return only(s.Delete(c)) },
		"Semaphore.Do":               func(c ctx) error { return s.Do(c, nothing) },
		"Semaphore.Acquire":          func(c ctx) error { return s.Acquire(c, 1) },
		"Semaphore.TryAcquire":       func(c ctx) error { return s.TryAcquire(c, 1) },
		"Semaphore.Drain":            func(c ctx) error { return only(s.Drain(c)) },
		"Semaphore.Release":          func(c ctx) error { return s.Release(c, 1) },
		"Semaphore.ReleaseIfExists":  func(c ctx) error { return only(s.ReleaseIfExists(c, 1)) },

		"PermitSemaphore.TrySetPermits":   func(c ctx) error { return only(e.TrySetPermits(c, 1)) },
		"PermitSemaphore.SetPermits":      func(c ctx) error { return e.SetPermits(c, 1) },
		"PermitSemaphore.AddPermits":      func(c ctx) error { return e.AddPermits(c, 1) },
		"PermitSemaphore.Available":       func(c ctx) error { return only(e.Available(c)) },
		"PermitSemaphore.Stats":           func(c ctx) error { return only(e.Stats(c)) },
		"PermitSemaphore.Exists":          func(c ctx) error { return only(e.Exists(c)) },
		"PermitSemaphore.Delete":          func(c ctx) error { return only(e.Delete(c)) },
		"PermitSemaphore.Do":              func(c ctx) error { return e.Do(c, nothing) },
		"PermitSemaphore.Acquire":         func(c ctx) error { return only(e.Acquire(c, 1)) },
		"PermitSemaphore.AcquireN":        func(c ctx) error { return only(e.Acquire(c, 1)) },
		"PermitSemaphore.TryAcquire":      func(c ctx) error { return only(e.TryAcquire(c, 1)) },
		"PermitSemaphore.TryAcquireN":     func(c ctx) error { return only(e.TryAcquire(c, 1)) },
		"PermitSemaphore.LeaseTime":       func(c ctx) error { return only(e.TTL(c, unknown)) },
		"PermitSemaphore.UpdateLeaseTime": func(c ctx) error { return only(e.SetTTL(c, unknown, time.Minute)) },
		"PermitSemaphore.Release":         func(c ctx) error { return e.Release(c, unknown) },
		"PermitSemaphore.TryRelease":      func(c ctx) error { return only(e.TryRelease(c, unknown)) },
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
			if !slices.Contains([]string{"config", "info", "hello", "client", "ping"}, command) {
				require.Zero(t, n, command)
			}
		}
	}
}

// A call with a bad context, or of an object with a bad name, option or client, sends nothing.
func TestEveryCallChecksItsObject(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, closed := harness.Client(t, s), harness.Client(t, s)
		sem, e := closed.Semaphore("orders"), closed.PermitSemaphore("orders")
		closed.Close()
		var none context.Context
		type row struct {
			ctx  context.Context
			sem  *semaphore.Semaphore
			e    *semaphore.PermitSemaphore
			want error
		}
		rows := map[string]row{
			"no name":                    {t.Context(), c.Semaphore(""), c.PermitSemaphore(""), lock.ErrInvalid},
			"no context":                 {none, c.Semaphore("orders"), c.PermitSemaphore("orders"), lock.ErrInvalid},
			"closed client":              {t.Context(), sem, e, lock.ErrClosed},
			"created of a closed client": {t.Context(), closed.Semaphore("orders"), closed.PermitSemaphore("orders"), lock.ErrClosed},
		}
		for what, opt := range map[string]semaphore.Option{
			"size 0": semaphore.Permits(0), "negative size": semaphore.Permits(-1), "large size": semaphore.Permits(semaphore.MaxPermits + 1), "nil option": nil,
		} {
			rows[what] = row{t.Context(), c.Semaphore("orders", opt), c.PermitSemaphore("orders", opt), lock.ErrInvalid}
		}

		check := noRequests(t, s)
		for what, r := range rows {
			for name, call := range callsOf(r.sem, r.e) {
				require.ErrorIs(t, call(r.ctx), r.want, "%s with %s", name, what)
			}
		}
		check()
	})
}

// Under a context that has ended only releases take effect.
func TestCallsUnderAnEndedContext(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		sem, e := withPermits(t, plain{c.Semaphore("plain")}, 5), permitSemaphore(t, c, 5)
		p := take(t, e, 1)
		boom := errors.New("boom")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(boom)

		for name, call := range callsOf(sem.Semaphore, e) {
			err := call(ctx)
			if name == "PermitSemaphore.Release" {
				require.ErrorIs(t, err, lock.ErrNotHeld, name)
				continue
			}
			if strings.Contains(name, "Release") {
				require.NoError(t, err, name)
				continue
			}
			require.Error(t, err, name)
			require.NotErrorIs(t, err, lock.ErrIndeterminate, name)
			if strings.Contains(name, "Acquire") || strings.HasSuffix(name, ".Do") {
				require.ErrorIs(t, err, lock.ErrNotAcquired, name)
				require.ErrorIs(t, err, boom, name)
			}
		}

		require.Equal(t, 7, available(t, sem))
		require.Equal(t, counts{5, 4, 1}, countsOf(t, e))
		require.Error(t, p.Extend(ctx, time.Hour))
		require.NoError(t, p.Release(ctx))
		require.Equal(t, counts{5, 5, 0}, countsOf(t, e))
	})
}

// A call for 0 permits sends nothing.
func TestZeroPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, ctx := harness.Client(t, s), t.Context()
		sem, e := c.Semaphore("plain"), c.PermitSemaphore("orders")
		check := noRequests(t, s)
		there, err := sem.ReleaseIfExists(ctx, 0)
		released, err2 := e.TryRelease(ctx)
		require.False(t, there || released)
		require.NoError(t, errors.Join(sem.Acquire(ctx, 0, lock.Wait(10*time.Minute)), sem.TryAcquire(ctx, 0), sem.Release(ctx, 0), e.Release(ctx), err, err2))
		check()
	})
}

// Numbers out of range, and options of other kinds, are errors before a request is sent.
func TestInvalidArguments(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, ctx := harness.Client(t, s), t.Context()
		sem, e := c.Semaphore("plain"), c.PermitSemaphore("orders")
		check := noRequests(t, s)
		invalid := func(n any, errs ...error) {
			t.Helper()
			for i, err := range errs {
				require.ErrorIs(t, err, lock.ErrInvalid, "%v: call %d", n, i)
			}
		}

		outside := []int{math.MinInt}
		if strconv.IntSize == 64 {
			outside = append(outside, semaphore.MaxPermits+1, math.MaxInt)
		}
		for _, n := range outside {
			invalid(n, sem.AddPermits(ctx, n), e.AddPermits(ctx, n))
		}
		outside = append(outside, -1)
		for _, n := range outside {
			invalid(n, only(sem.TrySetPermits(ctx, n)), sem.SetPermits(ctx, n), only(sem.TrySetPermitsFor(ctx, n, time.Minute)),
				sem.Acquire(ctx, n), sem.TryAcquire(ctx, n), sem.Release(ctx, n), only(sem.ReleaseIfExists(ctx, n)),
				only(e.TrySetPermits(ctx, n)), e.SetPermits(ctx, n))
		}
		for _, n := range append(outside, 0, semaphore.MaxBatch+1) {
			invalid(n, only(e.Acquire(ctx, n)), only(e.TryAcquire(ctx, n)))
			require.ErrorContains(t, only(e.Acquire(ctx, n)), "must be from 1 to 10000")
		}
		for _, lease := range []time.Duration{0, -time.Second, time.Millisecond - 1, lock.MaxLease + 1} {
			invalid(lease, only(sem.TrySetPermitsFor(ctx, 1, lease)), only(e.SetTTL(ctx, unknown, lease)))
		}
		invalid("no expiry", only(sem.TrySetPermitsFor(ctx, 1, lock.NoExpiry)))
		invalid("nil option", sem.Acquire(ctx, 1, nil), only(e.Acquire(ctx, 1, nil)), only(e.TryAcquire(ctx, 1, nil)))
		invalid("negative wait", sem.Acquire(ctx, 1, lock.Wait(-1)), only(e.Acquire(ctx, 1, lock.Wait(-1))))
		invalid("MaxHold for ever", only(e.Acquire(ctx, 2, lock.MaxHold(time.Minute), semaphore.Forever())))
		check()
	})
}

func TestInvalidIDs(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		e, ctx := permitSemaphore(t, harness.Client(t, s), 2), t.Context()
		p := take(t, e, 1)
		many := make([]string, semaphore.MaxBatch+1)
		for i := range many {
			many[i] = hex.EncodeToString([]byte(fmt.Sprintf("permit %09d", i)))
		}
		upper := strings.ToUpper(p.ID())

		check := noRequests(t, s)
		invalid := func(ids ...string) {
			t.Helper()
			require.ErrorIs(t, e.Release(ctx, ids...), lock.ErrInvalid)
			require.ErrorIs(t, only(e.TryRelease(ctx, ids...)), lock.ErrInvalid)
		}
		for _, id := range []string{"", "1234", unknown[1:], unknown + "0", unknown + "00", "g" + unknown[1:], raw(t, unknown)} {
			invalid(id)
			invalid(p.ID(), id)
			invalid(id, p.ID())
			require.ErrorIs(t, only(e.TTL(ctx, id)), lock.ErrInvalid)
			require.ErrorIs(t, only(e.SetTTL(ctx, id, time.Minute)), lock.ErrInvalid)
		}
		invalid(p.ID(), unknown, unknown)
		invalid(p.ID(), upper) // ids are not case-sensitive
		invalid(many...)
		check()

		released, err := e.TryRelease(ctx, many[1:]...)
		require.NoError(t, err)
		require.False(t, released)
		require.Equal(t, counts{2, 1, 1}, countsOf(t, e))
		require.NoError(t, p.Context().Err())
		require.NoError(t, e.Release(ctx, upper))
		require.ErrorIs(t, p.Release(ctx), lock.ErrNotHeld)
	})
}

func TestTooManyPermits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, ctx := harness.Client(t, s), t.Context()
		sem := withPermits(t, plain{c.Semaphore("plain")}, semaphore.MaxPermits)
		for _, err := range []error{sem.Release(ctx, 1), only(sem.ReleaseIfExists(ctx, semaphore.MaxPermits)), sem.AddPermits(ctx, 1)} {
			require.ErrorIs(t, err, lock.ErrInvalid)
			require.Equal(t, semaphore.MaxPermits, available(t, sem))
		}
		mustAcquire(t, sem, 1)
		require.ErrorIs(t, sem.Release(ctx, 2), lock.ErrInvalid, "in the usual case")
		require.NoError(t, sem.Release(ctx, 1))
		require.NoError(t, sem.AddPermits(ctx, -semaphore.MaxPermits))
		require.NoError(t, sem.AddPermits(ctx, -semaphore.MaxPermits))
		require.ErrorIs(t, sem.AddPermits(ctx, -1), lock.ErrInvalid)
		require.Equal(t, -semaphore.MaxPermits, available(t, sem))

		e := c.PermitSemaphore("orders")
		require.NoError(t, e.SetPermits(ctx, semaphore.MaxPermits))
		require.ErrorIs(t, e.AddPermits(ctx, 1), lock.ErrInvalid)
		require.Equal(t, counts{semaphore.MaxPermits, semaphore.MaxPermits, 0}, countsOf(t, e))
	})
}

// A key that is not a semaphore stays unchanged. Its value may be a secret, or large.
func TestForeignValuesAreNotInErrors(t *testing.T) {
	values := map[string][]string{
		"a hash": {"HSET", "orders", "topsecret", "1"}, "a list": {"RPUSH", "orders", "1"}, "nothing": {"SET", "orders", ""},
		"no number": {"SET", "orders", "topsecret\x1b[2J"}, "a long text": {"SET", "orders", strings.Repeat("topsecret", 1<<17)},
	}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for what, set := range values {
			harness.Do(t, s.Addr, set...)
			before, err := testserver.Query(s.Addr, "DUMP", "orders")
			require.NoError(t, err)
			c := harness.Client(t, s)
			for name, call := range callsOf(c.Semaphore("orders"), c.PermitSemaphore("orders")) {
				err := call(t.Context())
				switch name {
				case "PermitSemaphore.LeaseTime": // which does not read this key
					require.ErrorIs(t, err, lock.ErrNotHeld, what)
					continue
				case "PermitSemaphore.UpdateLeaseTime":
					require.NoError(t, err, what)
					continue
				}
				require.ErrorContains(t, err, "the key has a value of another type", "%s of %s", name, what)
				for _, kind := range []error{lock.ErrUnavailable, lock.ErrNotAcquired, lock.ErrIndeterminate} {
					require.NotErrorIs(t, err, kind, "%s of %s", name, what)
				}
				require.NotContains(t, err.Error(), "topsecret", name)
				require.NotContains(t, err.Error(), "\x1b", name)
				require.Less(t, len(err.Error()), 1000, name)
			}
			after, err := testserver.Query(s.Addr, "DUMP", "orders")
			require.NoError(t, err)
			require.Equal(t, before, after, what)
			harness.Do(t, s.Addr, "DEL", "orders")
			harness.NothingStays(t, s.Addr)
			harness.Do(t, s.Addr, "FLUSHALL")
		}

		// The same applies to the set of acquired permits.
		c := harness.Client(t, s)
		e := permitSemaphore(t, c, 3)
		p := take(t, e, 1, lock.Lease(time.Hour))
		harness.Do(t, s.Addr, "SET", timeoutsKey("orders"), "precious")
		for name, call := range callsOf(c.Semaphore("plain"), e) {
			_, method, _ := strings.Cut(name, "PermitSemaphore.")
			switch method {
			case "", "TrySetPermits", "AddPermits", "Exists": // which do not read this key
			default:
				require.ErrorContains(t, call(t.Context()), "WRONGTYPE", name)
			}
		}
		var lost *lock.LostError
		require.ErrorAs(t, p.Release(t.Context()), &lost)
		require.Equal(t, lock.ReasonGone, lost.Reason)
		require.Equal(t, "$1", harness.Do(t, s.Addr, "GET", "orders"))
		require.Equal(t, "$8", harness.Do(t, s.Addr, "GET", timeoutsKey("orders")))
	})
}
