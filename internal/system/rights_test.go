package system_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/election"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/once"
	"github.com/redlatch/redlatch/probe"
	"github.com/redlatch/redlatch/ratelimit"
	"github.com/redlatch/redlatch/semaphore"
)

// documentedRights returns the words of the first ACL SETUSER in the documentation
// after that text, with the additions of the table rows that begin with the others.
func documentedRights(t *testing.T, after string, rows ...string) []string {
	t.Helper()
	text, err := os.ReadFile("../../docs/operations/permissions.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(text), after)
	require.True(t, found, after)
	_, rest, found = strings.Cut(rest, "    ACL SETUSER ")
	require.True(t, found)
	block, _, _ := strings.Cut(rest, "\n\n")
	words := append([]string{"ACL", "SETUSER"}, strings.Fields(block)...)
	for _, row := range rows {
		_, rest, found := strings.Cut(string(text), "| "+row)
		require.True(t, found, row)
		line, _, _ := strings.Cut(rest, "\n")
		for i, quoted := range strings.Split(line, "`") {
			if i%2 == 1 {
				words = append(words, strings.Fields(quoted)...)
			}
		}
	}
	return words
}

// kindRows are the rows of the kinds of objects.
var kindRows = []string{
	"fair locks", "read-write locks", "semaphores", "count-down latches", "plain locks", "elections", "once-only work", "rate limiters",
	"group locks",
}

// wakes fails the test unless a message wakes a caller of c when others release. No lease may help.
func wakes(t *testing.T, c *redlatch.Client, release func() error, wait func(ctx context.Context) error) {
	t.Helper()
	woken := make(chan error, 1)
	go func() { woken <- wait(context.Background()) }()
	waitForListeners(t, c, 1)
	before := c.Stats().PubSub.Messages
	require.NoError(t, release())
	require.NoError(t, <-woken)
	harness.Eventually(t, 5*time.Second, "a message", func() bool { return c.Stats().PubSub.Messages > before })
}

// returns fails the test unless a call returns that, and no error.
func returns[T any](t *testing.T, want T) func(got T, err error) {
	t.Helper()
	return func(got T, err error) {
		t.Helper()
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
}

// waitForListeners waits until that many waiters are subscribed.
func waitForListeners(t *testing.T, c *redlatch.Client, waiters int) {
	t.Helper()
	harness.Eventually(t, 5*time.Second, "subscribed", func() bool {
		s := c.Stats().PubSub
		return s.Listeners == waiters && s.Subscribed == s.Channels
	})
}

// checkEverything uses everything that needs a right. conn has all rights.
func checkEverything(t *testing.T, conn rueidis.Client, c, other *redlatch.Client) {
	t.Helper()
	checkLock(t, c, "app:orders")
	checkLocker(t, c, c.Lock("app:orders"), c.Lock("app:orders"), other.Lock("app:orders"))
	checkLocker(t, c, c.FencedLock("app:fenced"), c.FencedLock("app:fenced"), other.FencedLock("app:fenced"))
	returns(t, int64(1000))(c.FencedLock("app:fenced").RaiseTokens(t.Context(), 1000))
	returns(t, true)(c.FencedLock("app:fenced").ResetTokens(t.Context()))
	require.ErrorContains(t, second(c.Lock("elsewhere").TryLock(t.Context())), "NOPERM")
	checkFairLock(t, c, other)
	checkRWLock(t, c, other)
	checkSemaphores(t, conn, c, other)
	checkLatch(t, c, other)
	checkPlainLock(t, c, other)
	checkElection(t, c, other)
	checkOnce(t, c, other)
	checkRate(t, c, other)
	checkGroup(t, c, other)
}

// movable is a lock whose holds can move to another process.
type movable interface {
	harness.Lock
	Adopt(ctx context.Context, id string, opts ...lock.HoldOption) (lock.Hold, error)
}

// checkLocker uses everything that most locks have and that needs a right. rival, of the same client, and
// theirs exclude l.
func checkLocker(t *testing.T, c *redlatch.Client, l, rival, theirs movable) {
	t.Helper()
	ctx := t.Context()
	h := mustLock(t, theirs, lock.Lease(time.Hour))
	wakes(t, c, func() error { return h.Unlock(ctx) }, func(ctx context.Context) error { return l.Do(ctx, nothing) })

	h = mustLock(t, rival)
	waiter := harness.StartLock(t, ctx, l)
	harness.Waits(t, 1, c)
	require.NoError(t, h.Unlock(ctx)) // hands it off, if it can
	require.NoError(t, waiter.Got().Unlock(ctx))

	h, err := l.Lock(lock.WithOwner(ctx, c.NewOwner()))
	require.NoError(t, err)
	require.Equal(t, 1, harness.HoldCount(t, l, lock.OwnerOf(h)))
	require.True(t, harness.IsLocked(t, l))
	require.NoError(t, second(l.TTL(ctx)))
	require.NoError(t, h.Extend(ctx, time.Minute))
	id, err := lock.Detach(ctx, h, time.Minute)
	require.NoError(t, err)
	h, err = l.Adopt(ctx, id)
	require.NoError(t, err)
	returns(t, true)(l.ForceUnlock(ctx))
	require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
}

// What follows uses everything of a kind that needs a right.

func checkPlainLock(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	checkLocker(t, c, c.PlainLock("app:plain"), c.PlainLock("app:plain"), other.PlainLock("app:plain"))
	require.ErrorContains(t, second(c.PlainLock("elsewhere").TryLock(t.Context())), "NOPERM")
}

func checkGroup(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	const group = "app:group"
	checkLocker(t, c, c.GroupLock(group, "a", "b"), c.GroupLock(group, "b", "a"), other.GroupLock(group, "b", "c"))
	require.ErrorContains(t, second(c.GroupLock("elsewhere", "a").TryLock(t.Context())), "NOPERM")
}

func checkFairLock(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	l, ctx := c.FairLock("app:fair"), t.Context()
	checkLocker(t, c, l, l, other.FairLock("app:fair"))

	h := mustLock(t, other.FairLock("app:fair"), lock.Lease(time.Hour))
	var waiters []*harness.Call[lock.Hold]
	for i := range 3 {
		waiters = append(waiters, harness.StartLock(t, ctx, l))
		harness.Eventually(t, 5*time.Second, "a queue position", func() bool {
			queue, err := l.Queue(ctx)
			require.NoError(t, err)
			return len(queue) == i+1
		})
	}
	require.ErrorIs(t, second(l.Lock(ctx, lock.Wait(500*time.Millisecond))), lock.ErrNotAcquired) // gives up its queue position
	require.ErrorIs(t, second(l.TryLock(ctx)), lock.ErrNotAcquired)
	require.NoError(t, h.Unlock(ctx))
	harness.InOrder(t, waiters...)
}

func checkRWLock(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	rw, theirs := c.RWLock("app:rw"), other.RWLock("app:rw")
	checkLocker(t, c, rw.Read(), rw.Write(), theirs.Write())
	checkLocker(t, c, rw.Write(), rw.Write(), theirs.Read())

	h := mustLock(t, theirs.Read())
	// It blocks readers while it waits.
	require.ErrorIs(t, second(rw.Write().Lock(ctx, lock.Wait(500*time.Millisecond))), lock.ErrNotAcquired)
	require.NoError(t, h.Unlock(ctx))
	named := lock.WithOwner(ctx, c.NewOwner())
	h, err := rw.Write().Lock(named)
	require.NoError(t, err)
	require.NoError(t, rw.Read().Do(named, func(ctx context.Context) error {
		require.NoError(t, h.Unlock(ctx))
		require.True(t, harness.IsLocked(t, rw.Read()))
		return nil
	}))
}

func checkElection(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx, e := t.Context(), c.Election("app:scheduler")
	campaign := func(e *election.Election, value string, opts ...lock.Option) *election.Term {
		t.Helper()
		term, err := e.Campaign(ctx, value, opts...)
		require.NoError(t, err)
		return term
	}
	theirs := campaign(other.Election("app:scheduler"), "theirs", lock.Lease(time.Hour))
	leader, err := e.Leader(ctx)
	require.NoError(t, err)
	require.Equal(t, "theirs", leader.Value)
	var term *election.Term
	wakes(t, c, func() error { return theirs.Resign(ctx) }, func(context.Context) (err error) {
		term, err = e.Campaign(ctx, "ours")
		return err
	})
	require.NoError(t, term.Extend(ctx, time.Minute))

	wakes(t, c, func() error {
		require.NoError(t, term.Resign(ctx))
		term = campaign(e, "next")
		return nil
	}, func(ctx context.Context) error {
		for leader, err := range e.Observe(ctx) {
			if err != nil || leader.Value == "next" {
				return err
			}
		}
		return errors.New("the next leader was not observed")
	})
	require.NoError(t, term.Resign(ctx))
	require.NoError(t, campaign(e, "", lock.AtLeast(time.Minute)).Resign(ctx))
	require.ErrorContains(t, second(c.Election("elsewhere").Leader(ctx)), "NOPERM")
}

func checkOnce(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx, job := t.Context(), c.Once("app:report")
	runs, finish := make(chan struct{}), make(chan struct{})
	first := harness.Start(t, ctx, func(ctx context.Context) (bool, error) {
		return other.Once("app:report").Run(ctx, "1", func(context.Context) error {
			close(runs)
			<-finish
			return nil
		})
	})
	<-runs
	wakes(t, c, func() error { close(finish); return nil }, func(ctx context.Context) error {
		ran, err := job.Run(ctx, "1", nothing)
		assert.False(t, ran)
		return err
	})
	require.True(t, first.Got())
	returns(t, true)(job.Forget(ctx, "1"))

	fails := errors.New("fails")
	require.Equal(t, fails, second(job.Run(ctx, "2", func(context.Context) error { return fails })))
	returns(t, true)(job.Run(ctx, "2", nothing, lock.AtLeast(time.Minute)))
	returns(t, true)(job.Done(ctx, "2"))
	returns(t, false)(c.Once("app:report", once.Remember(48*time.Hour)).MarkDone(ctx, "2"))
	returns(t, true)(job.MarkDone(ctx, "3"))
	require.ErrorContains(t, second(c.Once("elsewhere").Run(ctx, "1", nothing)), "NOPERM")
}

func checkLatch(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx, l, theirs := t.Context(), c.CountDownLatch("app:import"), other.CountDownLatch("app:import")
	returns(t, true)(l.TrySetCount(ctx, 2))
	returns(t, 2)(l.Count(ctx))
	require.NoError(t, second(l.CountDown(ctx)))
	wakes(t, c, func() error { return second(theirs.CountDown(ctx)) }, l.Wait)
	require.NoError(t, second(l.TrySetCount(ctx, 1)))
	returns(t, true)(l.Delete(ctx))
	require.ErrorContains(t, second(c.CountDownLatch("elsewhere").Count(ctx)), "NOPERM")
}

func checkRate(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx, l, theirs := t.Context(), c.RateLimiter("app:mails"), other.RateLimiter("app:mails")
	rate := ratelimit.Config{Rate: 2, Per: time.Hour}
	returns(t, true)(l.TrySetRate(ctx, rate))
	require.NoError(t, second(l.Config(ctx)))
	require.NoError(t, l.TryAcquire(ctx, 2))
	returns(t, 0)(l.Available(ctx))
	wakes(t, c, func() error { return second(theirs.Release(ctx, 1)) }, func(ctx context.Context) error { return l.Acquire(ctx, 1) })
	left := harness.Start(t, ctx, func(ctx context.Context) (any, error) { return nil, l.Acquire(ctx, 1) })
	harness.Waits(t, 1, c)
	left.Leave()
	returns(t, 1)(l.Release(ctx, 1))

	rate.Per, rate.KeepAlive = time.Millisecond, time.Hour
	require.NoError(t, l.SetRate(ctx, rate))
	for range 3 {
		require.NoError(t, l.Acquire(ctx, 2))
	}
	require.NoError(t, l.SetRate(ctx, ratelimit.Config{Rate: 2, Per: time.Hour, PerClient: true}))
	require.NoError(t, l.TryAcquire(ctx, 1))
	returns(t, true)(l.Delete(ctx))
	require.NoError(t, c.RateLimiter("app:created", ratelimit.Rate(1, time.Hour)).TryAcquire(ctx, 1))
	require.ErrorContains(t, second(c.RateLimiter("elsewhere").Config(ctx)), "NOPERM")
}

func checkSemaphores(t *testing.T, conn rueidis.Client, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	s, e := c.Semaphore("app:semaphore"), c.PermitSemaphore("app:permits")
	for _, try := range []func(context.Context, int) (bool, error){s.TrySetPermits, e.TrySetPermits} {
		returns(t, true)(try(ctx, 2))
	}
	require.NoError(t, s.AddPermits(ctx, 1))
	returns(t, 3)(s.Drain(ctx))

	// A message wakes a waiter, with and without a queue position. A waiter that gives
	// up makes way for the next.
	for range 2 {
		waitCtx, leave := context.WithCancel(ctx)
		left, served := make(chan error, 1), make(chan error, 1)
		go func() { left <- s.Acquire(waitCtx, 3) }()
		harness.Waits(t, 1, c)
		go func() { served <- s.Acquire(ctx, 3) }()
		harness.Waits(t, 2, c)
		waitForListeners(t, c, 1)
		harness.Eventually(t, 5*time.Second, "a queue position", func() bool {
			n, err := conn.Do(ctx, conn.B().Zcard().Key(wire.SemaphoreWaiting("app:semaphore")).Build()).AsInt64()
			require.NoError(t, err)
			return n > 0
		})
		leave()
		harness.NotAcquired(t, <-left)
		require.NoError(t, other.Semaphore("app:semaphore").Release(ctx, 3))
		require.NoError(t, <-served)
	}
	returns(t, true)(s.ReleaseIfExists(ctx, 3))
	returns(t, 3)(s.Available(ctx))

	require.NoError(t, e.SetPermits(ctx, 3))
	require.NoError(t, e.AddPermits(ctx, 1))
	p, err := e.Acquire(ctx, 1, lock.Lease(time.Hour))
	require.NoError(t, err)
	require.NoError(t, p.Extend(ctx, 2*time.Hour))
	id, err := p.Detach(ctx, time.Hour)
	require.NoError(t, err)
	p, err = e.Adopt(ctx, id)
	require.NoError(t, err)
	returns(t, true)(e.SetTTL(ctx, p.ID(), time.Minute))
	require.NoError(t, second(e.TTL(ctx, p.ID())))
	expired := harness.Start(t, ctx, func(ctx context.Context) (*semaphore.Permit, error) {
		return e.Acquire(ctx, 4, lock.Lease(200*time.Millisecond))
	})
	waitForListeners(t, c, 1)
	require.NoError(t, p.Release(ctx))
	<-expired.Got().Context().Done()
	stats, err := e.Stats(ctx)
	require.NoError(t, err)
	require.Equal(t, 4, stats.Total)
	all, err := e.Acquire(ctx, 4) // reclaims expired permits
	require.NoError(t, err)
	require.NoError(t, all.Release(ctx))

	// Requests create semaphores, one of which has permits, and delete them.
	size := semaphore.Permits(2)
	s, e = c.Semaphore("app:created", size), c.PermitSemaphore("app:created permits", size)
	require.NoError(t, s.TryAcquire(ctx, 1))
	require.NoError(t, second(s.Stats(ctx)))
	require.NoError(t, s.SetPermits(ctx, 1))
	p, err = e.Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, conn.Do(ctx, conn.B().Del().Key("app:created permits").Build()).Error())
	require.NoError(t, e.Do(ctx, nothing))
	require.NoError(t, p.Release(ctx))
	for _, del := range []func(context.Context) (bool, error){s.Delete, e.Delete} {
		returns(t, true)(del(ctx))
	}

	// With IdleTTL no right may be missing: without one the semaphore would stay for ever.
	idle := semaphore.IdleTTL(time.Hour)
	s, e = c.Semaphore("app:idle", size, idle), c.PermitSemaphore("app:idle permits", size, idle)
	require.NoError(t, s.TryAcquire(ctx, 1))
	expires := func(key string) bool {
		ttl, err := conn.Do(ctx, conn.B().Pttl().Key(key).Build()).AsInt64()
		require.NoError(t, err)
		return ttl > 0
	}
	require.True(t, expires("app:idle"))
	require.NoError(t, s.Release(ctx, 1))
	p, err = e.Acquire(ctx, 1, semaphore.Forever())
	require.NoError(t, err)
	require.False(t, expires("app:idle permits"))
	require.NoError(t, p.Release(ctx))
	require.True(t, expires("app:idle permits"))
}

func TestDocumentedRights(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, documentedRights(t, "## ACL rules", "the startup checks")...)
		var log harness.Log
		opt, err := redlatch.ParseURL("redis://app:password@" + s.Addr)
		require.NoError(t, err)
		c := connect(t, opt, redlatch.WithLogger(log.Logger()))
		r, err := c.Probe(t.Context(), "app:orders")
		require.NoError(t, err)
		var kinds []string
		for _, f := range r.Findings {
			kinds = append(kinds, f.Kind)
		}
		if harness.ChecksRights(t, s) {
			require.Equal(t, []string{
				probe.KindFair, probe.KindReadWrite, probe.KindSemaphore, probe.KindLatch, probe.KindPlain,
				probe.KindElection, probe.KindOnce, probe.KindRate, // group locks need no more than the startup checks
			}, kinds)
		}
		harness.Do(t, s.Addr, documentedRights(t, "## ACL rules", kindRows...)...)
		checkEverything(t, harness.Conn(t, s.Addr), c, harness.Client(t, s))
		r, err = c.Probe(t.Context(), "app:orders")
		require.NoError(t, err)
		require.Empty(t, r.Findings)
		require.Empty(t, log.String())
		_, err = redlatch.Open(t.Context(), "redis://app:wrong@"+s.Addr)
		require.ErrorContains(t, err, "WRONGPASS")
		require.ErrorIs(t, err, lock.ErrUnavailable)

		_, err = redlatch.Open(t.Context(), "redis://app:password@"+s.Addr+"/1")
		require.ErrorContains(t, err, "NOPERM")
		harness.Do(t, s.Addr, documentedRights(t, "## ACL rules", "a database other than 0 (`redis://host/1`)")...)
		other, err := redlatch.Open(t.Context(), "redis://app:password@"+s.Addr+"/1")
		require.NoError(t, err)
		defer other.Close()
		checkLock(t, other, "app:orders")
	})
}

// The rights of a kind suffice without those of other kinds.
func TestDocumentedRightsOfEachKind(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		conn, other := harness.Conn(t, s.Addr), harness.Client(t, s)
		for _, tt := range []struct {
			rows  []string
			check func(t *testing.T, c, other *redlatch.Client)
		}{
			{[]string{"fair locks"}, checkFairLock},
			{[]string{"read-write locks"}, checkRWLock},
			{[]string{"semaphores"}, func(t *testing.T, c, other *redlatch.Client) { checkSemaphores(t, conn, c, other) }},
			{[]string{"count-down latches"}, checkLatch},
			{[]string{"plain locks"}, checkPlainLock},
			{[]string{"fair locks", "elections"}, checkElection},
			{[]string{"once-only work"}, checkOnce},
			{[]string{"rate limiters"}, checkRate},
			{[]string{"group locks"}, checkGroup},
		} {
			t.Run(strings.Join(tt.rows, ", "), func(t *testing.T) {
				harness.Do(t, s.Addr, documentedRights(t, "## ACL rules", tt.rows...)...)
				opt, err := redlatch.ParseURL("redis://app:password@" + s.Addr)
				require.NoError(t, err)
				c := connect(t, opt, redlatch.WithoutStartupChecks())
				tt.check(t, c, other)
			})
		}
	})
}

func TestDocumentedRightsInCluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		var addrs []string
		for _, p := range cluster.Primaries {
			rights := documentedRights(t, "## ACL rules", append(slices.Clone(kindRows), "a cluster", "the startup checks")...)
			if !harness.ChecksRights(t, p) { // Redis before 7.0, without sharded pub/sub
				rights = slices.DeleteFunc(rights, func(word string) bool {
					return slices.Contains([]string{"+spublish", "+ssubscribe", "+sunsubscribe"}, word)
				})
			}
			harness.Do(t, p.Addr, rights...)
			addrs = append(addrs, p.Addr)
		}
		var log harness.Log
		opt := rueidis.ClientOption{InitAddress: addrs, Username: "app", Password: "password"}
		c := connect(t, opt, redlatch.WithLogger(log.Logger()))
		checkEverything(t, harness.ConnAt(t, addrs), c, harness.ClientAt(t, addrs))
		r, err := c.Probe(t.Context(), "app:orders")
		require.NoError(t, err)
		require.Empty(t, r.Findings)
		require.Len(t, r.Nodes, len(addrs))
		for i, n := range r.Nodes {
			require.Equal(t, harness.ChecksRights(t, cluster.Primaries[i]), n.RightsKnown, n.Addr)
		}
		require.Empty(t, log.String())
	})
}

// Who may not subscribe looks when the lease of the holder is over, and the log says so once.
func TestSubscribeForbidden(t *testing.T) {
	const lease = 700 * time.Millisecond // which ends before any safety poll
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		var log harness.Log
		c := harness.WithoutSubscribe(t, s, redlatch.WithLogger(log.Logger()))
		holder := harness.Client(t, s)
		for i := range 4 {
			theirs := mustLock(t, holder.Lock(fmt.Sprint("orders ", i%2)), lock.Lease(lease))
			begin := time.Now()
			require.NoError(t, c.Lock(theirs.Name()).Do(t.Context(), nothing))
			require.Less(t, time.Since(begin), lease+slack)
			require.ErrorIs(t, theirs.Unlock(t.Context()), lock.ErrLost)
		}
		require.Zero(t, c.Stats().PubSub.Subscribed)
		require.Equal(t, 1, strings.Count(log.String(), "subscription refused"), log.String())
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		harness.NothingLeft(t, s.Addr)
	})
}
