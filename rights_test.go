package redlatch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
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
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

// documentedRights returns the words of the first ACL SETUSER in the documentation
// after that text, with the additions of the table rows that begin with the others.
func documentedRights(t *testing.T, after string, rows ...string) []string {
	t.Helper()
	text, err := os.ReadFile("docs/operations/permissions.md")
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
	"fair locks", "read-write locks", "semaphores", "count-down latches", "plain locks", "elections", "once-only work",
}

// checkEverything uses everything that needs a right. conn has all rights.
func checkEverything(t *testing.T, conn rueidis.Client, c, other *redlatch.Client) {
	t.Helper()
	checkLock(t, c, "app:orders")
	require.NoError(t, c.FencedLock("app:fenced").Do(t.Context(), nothing))
	named := lock.WithOwner(t.Context(), c.NewOwner())
	require.NoError(t, c.FencedLock("app:named").Do(named, nothing))
	h, err := c.Lock("app:orders").Lock(t.Context())
	require.NoError(t, err)
	count, err := c.Lock("app:orders").HoldCount(t.Context(), h.Owner())
	require.NoError(t, err)
	require.Equal(t, 1, count)
	require.NoError(t, h.Extend(t.Context(), time.Minute))
	h = moved(t, c.Lock("app:orders"), h)
	forced, err := c.Lock("app:orders").ForceUnlock(t.Context())
	require.NoError(t, err)
	require.True(t, forced)
	require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
	_, err = c.FencedLock("app:fenced").ResetTokens(t.Context())
	require.NoError(t, err)

	// The lease is too long to matter, so a message wakes the waiter.
	h, err = other.Lock("app:theirs").Lock(t.Context(), lock.Lease(time.Hour))
	require.NoError(t, err)
	waiter := make(chan error, 1)
	go func() { waiter <- c.Lock("app:theirs").Do(context.Background(), nothing) }()
	waitForListeners(t, c, 1)
	before := c.PubSub().Messages
	require.NoError(t, h.Unlock(t.Context()))
	require.NoError(t, <-waiter)
	require.Greater(t, c.PubSub().Messages, before)
	_, err = c.Lock("elsewhere").TryLock(t.Context())
	require.ErrorContains(t, err, "NOPERM")

	checkFairLock(t, c, other)
	checkRWLock(t, c, other)
	checkSemaphores(t, conn, c, other)
	checkLatch(t, c, other)
	checkPlainLock(t, c, other)
	checkElection(t, c, other)
	checkOnce(t, c, other)
}

// checkElection uses everything of an election that needs a right.
func checkElection(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	e, theirs := c.Election("app:scheduler"), other.Election("app:scheduler")
	first, err := theirs.Campaign(ctx, "theirs", lock.Lease(time.Hour))
	require.NoError(t, err)
	leader, err := e.Leader(ctx)
	require.NoError(t, err)
	require.Equal(t, "theirs", leader.Value)
	campaign := harness.Start(t, ctx, func(ctx context.Context) (*election.Term, error) { return e.Campaign(ctx, "ours") })
	waitForListeners(t, c, 1)
	before := c.PubSub().Messages
	require.NoError(t, first.Resign(ctx))
	term := campaign.Got()
	require.Greater(t, c.PubSub().Messages, before)
	require.NoError(t, term.Extend(ctx, time.Minute))
	observed := 0
	for leader, err := range e.Observe(ctx) {
		require.NoError(t, err)
		if observed++; observed == 2 {
			require.Equal(t, "next", leader.Value)
			break
		}
		require.Equal(t, "ours", leader.Value)
		waitForListeners(t, c, 1)
		before = c.PubSub().Messages
		require.NoError(t, term.Resign(ctx))
		term, err = e.Campaign(ctx, "next")
		require.NoError(t, err)
	}
	harness.Eventually(t, 5*time.Second, "a message", func() bool { return c.PubSub().Messages > before })
	require.NoError(t, term.Resign(ctx))
	term, err = e.Campaign(ctx, "", lock.AtLeast(time.Minute))
	require.NoError(t, err)
	require.NoError(t, term.Resign(ctx))
	_, err = c.Election("elsewhere").Leader(ctx)
	require.ErrorContains(t, err, "NOPERM")
}

// checkOnce uses everything of a Once that needs a right.
func checkOnce(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	job, theirs := c.Once("app:report"), other.Once("app:report")
	runs, finish := make(chan struct{}), make(chan struct{})
	first := harness.Start(t, ctx, func(ctx context.Context) (bool, error) {
		return theirs.Run(ctx, "1", func(context.Context) error {
			close(runs)
			<-finish
			return nil
		})
	})
	<-runs
	second := harness.Start(t, ctx, func(ctx context.Context) (bool, error) { return job.Run(ctx, "1", nothing) })
	waitForListeners(t, c, 1)
	before := c.PubSub().Messages
	close(finish)
	require.True(t, first.Got())
	require.False(t, second.Got())
	require.Greater(t, c.PubSub().Messages, before)
	had, err := job.Forget(ctx, "1")
	require.NoError(t, err)
	require.True(t, had)

	fails := errors.New("fails")
	ran, err := job.Run(ctx, "2", func(context.Context) error { return fails })
	require.Equal(t, fails, err)
	require.True(t, ran)
	ran, err = job.Run(ctx, "2", nothing, lock.AtLeast(time.Minute))
	require.NoError(t, err)
	require.True(t, ran)
	done, err := job.Done(ctx, "2")
	require.NoError(t, err)
	require.True(t, done)
	_, err = c.Once("elsewhere").Run(ctx, "1", nothing)
	require.ErrorContains(t, err, "NOPERM")
}

// checkPlainLock uses everything of a plain lock that needs a right.
func checkPlainLock(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	l, theirs := c.PlainLock("app:plain"), other.PlainLock("app:plain")
	h, err := theirs.Lock(ctx, lock.Lease(time.Hour))
	require.NoError(t, err)
	waiter := make(chan error, 1)
	go func() { waiter <- l.Do(context.Background(), nothing) }()
	waitForListeners(t, c, 1)
	before := c.PubSub().Messages
	require.NoError(t, h.Unlock(ctx))
	require.NoError(t, <-waiter)
	harness.Eventually(t, 5*time.Second, "a message", func() bool { return c.PubSub().Messages > before })

	h, err = l.Lock(ctx)
	require.NoError(t, err)
	go func() { waiter <- l.Do(context.Background(), nothing) }()
	waitForListeners(t, c, 1)
	require.NoError(t, h.Unlock(ctx)) // hands it off
	require.NoError(t, <-waiter)

	named := lock.WithOwner(ctx, c.NewOwner())
	h, err = l.Lock(named)
	require.NoError(t, err)
	require.NoError(t, h.Extend(ctx, time.Minute))
	require.NoError(t, moved(t, l, h).Unlock(ctx))
	_, err = l.Lock(ctx)
	require.NoError(t, err)
	forced, err := l.ForceUnlock(ctx)
	require.NoError(t, err)
	require.True(t, forced)
	_, err = c.PlainLock("elsewhere").TryLock(ctx)
	require.ErrorContains(t, err, "NOPERM")
}

type adopter interface {
	lock.Locker
	Adopt(ctx context.Context, id string, opts ...lock.Option) (lock.Hold, error)
}

// moved detaches a hold of l and adopts it.
func moved(t *testing.T, l adopter, h lock.Hold) lock.Hold {
	t.Helper()
	id, err := h.Detach(t.Context(), time.Minute)
	require.NoError(t, err)
	h, err = l.Adopt(t.Context(), id)
	require.NoError(t, err)
	return h
}

// checkSemaphores uses everything of both semaphores that needs a right.
func checkSemaphores(t *testing.T, conn rueidis.Client, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	s, e := c.Semaphore("app:semaphore"), c.PermitSemaphore("app:permits")
	for _, try := range []func(context.Context, int) (bool, error){s.TrySetPermits, e.TrySetPermits} {
		set, err := try(ctx, 2)
		require.NoError(t, err)
		require.True(t, set)
	}
	require.NoError(t, s.AddPermits(ctx, 1))
	n, err := s.Drain(ctx)
	require.NoError(t, err)
	require.Equal(t, 3, n)

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
	exists, err := s.ReleaseIfExists(ctx, 3)
	require.NoError(t, err)
	require.True(t, exists)
	n, err = s.Available(ctx)
	require.NoError(t, err)
	require.Equal(t, 3, n)

	require.NoError(t, e.SetPermits(ctx, 3))
	require.NoError(t, e.AddPermits(ctx, 1))
	p, err := e.Acquire(ctx, lock.Lease(time.Hour))
	require.NoError(t, err)
	require.NoError(t, p.Extend(ctx, 2*time.Hour))
	id, err := p.Detach(ctx, time.Hour)
	require.NoError(t, err)
	p, err = e.Adopt(ctx, id)
	require.NoError(t, err)
	updated, err := e.UpdateLeaseTime(ctx, p.ID(), time.Minute)
	require.NoError(t, err)
	require.True(t, updated)
	_, err = e.LeaseTime(ctx, p.ID())
	require.NoError(t, err)
	waiting := make(chan error, 1)
	go func() {
		p, err := e.AcquireN(ctx, 4, lock.Lease(200*time.Millisecond))
		if err == nil {
			<-p.Context().Done()
		}
		waiting <- err
	}()
	waitForListeners(t, c, 1)
	require.NoError(t, p.Release(ctx))
	require.NoError(t, <-waiting)
	stats, err := e.Stats(ctx)
	require.NoError(t, err)
	require.Equal(t, 4, stats.Total)
	all, err := e.AcquireN(ctx, 4) // reclaims expired permits
	require.NoError(t, err)
	require.NoError(t, all.Release(ctx))
	checkCreation(t, conn, c)
}

// checkCreation lets requests create semaphores, one of which has permits, and deletes them.
func checkCreation(t *testing.T, conn rueidis.Client, c *redlatch.Client) {
	t.Helper()
	ctx, size := t.Context(), semaphore.Permits(2)
	s, e := c.Semaphore("app:created", size), c.PermitSemaphore("app:created permits", size)
	require.NoError(t, s.TryAcquire(ctx, 1))
	_, err := s.Stats(ctx)
	require.NoError(t, err)
	require.NoError(t, s.SetPermits(ctx, 1))
	p, err := e.Acquire(ctx)
	require.NoError(t, err)
	require.NoError(t, conn.Do(ctx, conn.B().Del().Key("app:created permits").Build()).Error())
	require.NoError(t, e.Do(ctx, func(context.Context) error { return nil }))
	require.NoError(t, p.Release(ctx))
	for _, del := range []func(context.Context) (bool, error){s.Delete, e.Delete} {
		deleted, err := del(ctx)
		require.NoError(t, err)
		require.True(t, deleted)
	}
}

// checkLatch uses everything of a count-down latch that needs a right.
func checkLatch(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	l, theirs := c.CountDownLatch("app:import"), other.CountDownLatch("app:import")
	set, err := l.TrySetCount(t.Context(), 2)
	require.NoError(t, err)
	require.True(t, set)
	n, err := l.Count(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, n)
	before := c.PubSub().Messages
	waiter := make(chan error, 1)
	go func() { waiter <- l.Wait(context.Background()) }()
	waitForListeners(t, c, 1)
	n, err = l.CountDown(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, n)
	_, err = theirs.CountDown(t.Context())
	require.NoError(t, err)
	require.NoError(t, <-waiter)
	harness.Eventually(t, 5*time.Second, "a message", func() bool { return c.PubSub().Messages > before })
	_, err = l.TrySetCount(t.Context(), 1)
	require.NoError(t, err)
	deleted, err := l.Delete(t.Context())
	require.NoError(t, err)
	require.True(t, deleted)
	_, err = c.CountDownLatch("elsewhere").Count(t.Context())
	require.ErrorContains(t, err, "NOPERM")
}

// waitForListeners waits until that many waiters are subscribed.
func waitForListeners(t *testing.T, c *redlatch.Client, waiters int) {
	t.Helper()
	harness.Eventually(t, 5*time.Second, "subscribed", func() bool {
		s := c.PubSub()
		return s.Listeners == waiters && s.Subscribed == s.Channels
	})
}

// checkFairLock uses everything of a fair lock that needs a right.
func checkFairLock(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	l := c.FairLock("app:fair")
	h, err := other.FairLock("app:fair").Lock(ctx, lock.Lease(time.Hour))
	require.NoError(t, err)
	served := make(chan int, 3)
	var wg sync.WaitGroup
	for i := range cap(served) {
		wg.Go(func() {
			assert.NoError(t, l.Do(ctx, func(context.Context) error { served <- i; return nil }))
		})
		harness.Eventually(t, 5*time.Second, "a queue position", func() bool {
			queue, err := l.Queue(ctx)
			require.NoError(t, err)
			return len(queue) == i+1
		})
	}
	_, err = l.Lock(ctx, lock.Wait(500*time.Millisecond)) // gives up its queue position
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	_, err = l.TryLock(ctx)
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	waitForListeners(t, c, 1)
	before := c.PubSub().Messages
	require.NoError(t, h.Unlock(ctx))
	wg.Wait()
	for i := range cap(served) {
		require.Equal(t, i, <-served)
	}
	require.Greater(t, c.PubSub().Messages, before)

	named := lock.WithOwner(ctx, c.NewOwner())
	require.NoError(t, l.Do(named, func(ctx context.Context) error { return l.Do(ctx, nothing) }))
	h, err = l.Lock(ctx)
	require.NoError(t, err)
	require.NoError(t, h.Extend(ctx, time.Minute))
	h = moved(t, l, h)
	forced, err := l.ForceUnlock(ctx)
	require.NoError(t, err)
	require.True(t, forced)
	require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
}

// checkRWLock uses everything of a read-write lock that needs a right.
func checkRWLock(t *testing.T, c, other *redlatch.Client) {
	t.Helper()
	ctx := t.Context()
	rw, theirs := c.RWLock("app:rw"), other.RWLock("app:rw")
	h, err := theirs.Write().Lock(ctx, lock.Lease(time.Hour))
	require.NoError(t, err)
	waiter := make(chan error, 1)
	go func() { waiter <- rw.Read().Do(ctx, nothing) }()
	waitForListeners(t, c, 1)
	before := c.PubSub().Messages
	require.NoError(t, h.Unlock(ctx))
	require.NoError(t, <-waiter)
	require.Greater(t, c.PubSub().Messages, before)

	h, err = theirs.Read().Lock(ctx)
	require.NoError(t, err)
	_, err = rw.Write().Lock(ctx, lock.Wait(500*time.Millisecond)) // blocks readers while it waits
	require.ErrorIs(t, err, lock.ErrNotAcquired)
	go func() { waiter <- rw.Write().Do(ctx, nothing) }()
	waitForListeners(t, c, 1)
	require.NoError(t, h.Unlock(ctx))
	require.NoError(t, <-waiter)

	named := lock.WithOwner(ctx, c.NewOwner())
	h, err = rw.Write().Lock(named)
	require.NoError(t, err)
	require.NoError(t, rw.Read().Do(named, func(ctx context.Context) error {
		require.NoError(t, h.Unlock(ctx))
		reading, err := rw.Read().IsLocked(ctx)
		require.NoError(t, err)
		require.True(t, reading)
		return nil
	}))
	for _, side := range []interface {
		adopter
		ForceUnlock(ctx context.Context) (bool, error)
	}{rw.Read(), rw.Write()} {
		h, err := side.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, h.Extend(ctx, time.Minute))
		h = moved(t, side, h)
		forced, err := side.ForceUnlock(ctx)
		require.NoError(t, err)
		require.True(t, forced)
		require.ErrorIs(t, h.Unlock(ctx), lock.ErrLost)
	}
}

func TestDocumentedRights(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, documentedRights(t, "## ACL rules", "the startup checks")...)
		var log harness.Log
		opt, err := redlatch.ParseURL("redis://app:password@" + s.Addr)
		require.NoError(t, err)
		c, err := redlatch.New(t.Context(), opt, redlatch.WithLogger(log.Logger()))
		require.NoError(t, err)
		defer c.Close()
		r, err := c.Probe(t.Context(), "app:orders")
		require.NoError(t, err)
		var kinds []string
		for _, f := range r.Findings {
			kinds = append(kinds, f.Kind)
		}
		if harness.ChecksRights(t, s) {
			require.Equal(t, []string{
				redlatch.KindFair, redlatch.KindReadWrite, redlatch.KindSemaphore, redlatch.KindLatch, redlatch.KindPlain,
				redlatch.KindElection, redlatch.KindOnce,
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
		} {
			t.Run(strings.Join(tt.rows, ", "), func(t *testing.T) {
				harness.Do(t, s.Addr, documentedRights(t, "## ACL rules", tt.rows...)...)
				opt, err := redlatch.ParseURL("redis://app:password@" + s.Addr)
				require.NoError(t, err)
				c, err := redlatch.New(t.Context(), opt, redlatch.WithoutStartupChecks())
				require.NoError(t, err)
				defer c.Close()
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
		c, err := redlatch.New(t.Context(), opt, redlatch.WithLogger(log.Logger()))
		require.NoError(t, err)
		defer c.Close()
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

func TestSubscribeForbidden(t *testing.T) {
	const (
		locks, waiters = 5, 3
		lease          = 700 * time.Millisecond
	)
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		var log harness.Log
		c := harness.WithoutSubscribe(t, s, redlatch.WithLogger(log.Logger()))
		holder := harness.Client(t, s)
		for round := range 2 {
			var holds []lock.Hold
			var wg sync.WaitGroup
			for i := range locks {
				name := fmt.Sprint("orders ", i)
				h, err := holder.Lock(name).Lock(t.Context(), lock.Lease(lease))
				require.NoError(t, err)
				holds = append(holds, h)
				for range waiters {
					wg.Go(func() { assert.NoError(t, c.Lock(name).Do(context.Background(), nothing)) })
				}
			}
			begin := time.Now()
			wg.Wait()
			// The lease ends before any safety poll.
			require.Less(t, time.Since(begin), lease+slack, "round %d", round)
			for _, h := range holds {
				require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			}
		}
		require.Zero(t, c.PubSub().Subscribed)
		require.Equal(t, 1, strings.Count(log.String(), "subscription refused"), log.String())
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		harness.NothingLeft(t, s.Addr)
	})
}
