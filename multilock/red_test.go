package multilock_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/rlock"
)

// TestRedCancelled cancels the context at every point of a round.
func TestRedCancelled(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		gone := errors.New("gone")
		for _, answers := range [][]redAnswer{
			{redYes, redSlowYes, redLateYes},
			{redYes, redSlowYes, redSlowErr},
			{redLateYes, redLateYes, redLateYes},
			{redYes, redTaken, redHangs},
			{redTaken, redTaken, redTaken},
		} {
			for after := range 45 {
				for _, once := range []bool{false, true} {
					fakes := w.fakes(answers...)
					red := w.red(fakes)
					ctx, cancel := context.WithCancelCause(t.Context())
					began := time.Now()
					time.AfterFunc(time.Duration(after)*time.Millisecond+time.Microsecond, func() { cancel(gone) })
					take := harness.Take(red, once)
					h, err := take(ctx)
					ended := ctx.Err() != nil
					switch {
					case err == nil:
						require.False(t, ended)
						require.NoError(t, h.Unlock(ctx))
					case once && !ended:
						harness.NotAcquired(t, err)
					default:
						harness.NotAcquired(t, err)
						require.ErrorIs(t, err, gone, "%v after %d", answers, after)
						late := time.Since(began) - time.Duration(after)*time.Millisecond - time.Microsecond
						require.LessOrEqual(t, late, 2*session.Grace) // for answers, and for the release
					}
					cancel(nil)
					w.drain(fakes, answers, after)
				}
			}
		}
	})
}

// TestRedClientCloses closes the client at every point of a round and during a hold.
func TestRedClientCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &redWorld{t: t, log: &harness.Log{}}
		for _, answers := range [][]redAnswer{
			{redYes, redSlowYes, redLateYes},
			{redTaken, redTaken, redTaken},
			{redHangs, redHangs, redYes},
		} {
			for after := range 45 {
				for _, once := range []bool{false, true} {
					w.s = redSession(w.log, rueidis.ClientModeStandalone)
					fakes := w.fakes(answers...)
					red := w.red(fakes)
					time.AfterFunc(time.Duration(after)*time.Millisecond+time.Microsecond, w.s.Close)
					take := harness.Take(red, once)
					h, err := take(t.Context())
					closed := w.s.Stopped() != nil
					switch {
					case err == nil:
						<-h.Context().Done()
						require.ErrorIs(t, context.Cause(h.Context()), lock.ErrClosed)
						require.Equal(t, 2, fakes[0].held()+fakes[1].held(), "until Unlock: the work may go on")
						require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrClosed)
					case closed:
						require.ErrorIs(t, err, lock.ErrClosed, "%v after %d", answers, after)
					default:
						require.ErrorIs(t, err, lock.ErrNotAcquired)
					}
					w.s.Close()
					w.drain(fakes, answers, after)
					_, err = red.TryLock(t.Context())
					require.ErrorIs(t, err, lock.ErrClosed)
				}
			}
		}
	})
}

func TestRedInvalidMembers(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		a, b, c := s.Client(t), virtualServer(t).Client(t), virtualServer(t).Client(t)
		of := func(members ...lock.Locker) *multilock.Red { return a.RedLock(members) }
		named := func(clients ...*redlatch.Client) *multilock.Red { return redlatch.RedLock("orders", clients) }
		var none *rlock.Lock
		good := func(opts ...multilock.Option) *multilock.Red {
			return a.RedLock([]lock.Locker{a.Lock("orders"), b.Lock("orders"), c.Lock("orders")}, opts...)
		}
		for what, bad := range map[string]struct {
			red  *multilock.Red
			says string
		}{
			"none":             {of(), "without members"},
			"no clients":       {named(), "without members"},
			"nil":              {of(a.Lock("orders"), nil, c.Lock("orders")), "member 2"},
			"typed nil":        {of(a.Lock("orders"), none, c.Lock("orders")), "member 2"},
			"nil clients":      {named(nil, nil), "member 1"},
			"first is nil":     {named(nil, a, b), "member 1"},
			"last is nil":      {named(a, b, nil), "member 3"},
			"zero":             {of(a.Lock("orders"), &rlock.Lock{}), "member 2"},
			"twice":            {of(a.Lock("orders"), b.Lock("orders"), a.Lock("orders")), `"orders" (number 3)`},
			"client twice":     {named(a, b, a), `"orders" (number 3)`},
			"a Multi":          {of(a.Lock("orders"), b.MultiLock(b.Lock("orders"))), "member 2"},
			"a Red":            {of(a.Lock("orders"), b.RedLock([]lock.Locker{b.Lock("orders")})), "member 2"},
			"foreign":          {of(a.Lock("orders"), multiForeign{b.Lock("orders")}), "member 2"},
			"embeds":           {of(a.Lock("orders"), multiEmbeds{b.Lock("orders")}), "member 2"},
			"points to it":     {of(a.Lock("orders"), &multiEmbeds{b.Lock("orders")}), "member 2"},
			"a bad name":       {of(a.Lock("orders"), b.Lock(""), c.Lock("orders")), "name"},
			"no name":          {redlatch.RedLock("", []*redlatch.Client{a, b}), "name"},
			"timeout 0":        {good(multilock.Timeout(0)), "Timeout"},
			"timeout -1":       {good(multilock.Timeout(-1)), "Timeout"},
			"restart delay 0":  {good(multilock.RestartDelay(0)), "RestartDelay"},
			"absent -1":        {good(multilock.Absent(-1)), "Absent"},
			"nil option":       {good(nil), "nil option"},
			"fails both times": {a.RedLock(nil, multilock.Timeout(0)), "Timeout"},
		} {
			_ = bad.red.Name()
			_, err := bad.red.Lock(t.Context())
			require.ErrorIs(t, err, lock.ErrInvalid, what)
			require.ErrorContains(t, err, bad.says, what)
			_, err = bad.red.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrInvalid, what)
			require.ErrorIs(t, bad.red.Do(t.Context(), multiNothing), lock.ErrInvalid, what)
			_, err = a.MultiLock(bad.red, a.Lock("stock")).TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrInvalid, what)
		}
		for _, lease := range []time.Duration{time.Millisecond, 2 * time.Millisecond, 2020 * time.Microsecond} { // which drift uses up
			_, err := good().Lock(t.Context(), lock.Lease(lease))
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		require.False(t, s.Exists("orders") || s.Exists("stock"))
		require.Equal(t, "orders,others", of(a.Lock("orders"), b.Lock("others"), c.Lock("orders")).Name())
	})
}

func TestRedEvenNumberIsLoggedOnce(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for n := range 7 {
			for range 3 {
				_, err := w.red(w.fakes(slices.Repeat([]redAnswer{redTaken}, n+1)...)).TryLock(t.Context())
				require.ErrorIs(t, err, lock.ErrNotAcquired)
			}
		}
		require.Equal(t, 3, strings.Count(w.log.String(), "even number"))
	})
}

// Servers without a member count for the majority.
func TestRedWithAbsentServers(t *testing.T) {
	redRun(t, func(t *testing.T, w *redWorld) {
		for _, c := range []struct {
			answers []redAnswer
			absent  int
			want    error
		}{
			{[]redAnswer{redYes, redYes}, 1, nil},
			{[]redAnswer{redYes, redTaken}, 1, lock.ErrNotAcquired},
			{[]redAnswer{redYes, redYes, redTaken}, 0, nil},
			{[]redAnswer{redYes, redYes, redTaken}, 2, lock.ErrNotAcquired},
			{[]redAnswer{redYes, redYes, redYes}, 2, nil},
			{[]redAnswer{redYes, redYes, redYes, redTaken}, 3, lock.ErrNotAcquired},
			{[]redAnswer{redYes, redYes}, 2, lock.ErrUnavailable},
			{[]redAnswer{redYes}, -1, lock.ErrInvalid},
		} {
			h, err := w.red(w.fakes(c.answers...), multilock.Absent(c.absent)).TryLock(t.Context())
			require.ErrorIs(t, err, c.want, "%v and %d", c.answers, c.absent)
			if err == nil {
				require.NoError(t, h.Unlock(t.Context()))
			}
		}
		require.NotContains(t, w.log.String(), "even number", "of all servers")
	})
}
