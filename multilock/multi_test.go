package multilock_test

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/pubsub"
	"github.com/redlatch/redlatch/rlock"
)

func TestMultiAcquiresAllOrNone(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Server(t, s.Program)
		clients, all := multiOfAll(t, s, second)
		m := clients[0].MultiLock(multiLockers(all)...)
		for held, it := range all {
			theirs := multiMust(t, it.bar)
			_, err := m.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired, it.name)
			multiFree(t, all, held)
			_, err = m.Lock(t.Context(), lock.Wait(0))
			require.ErrorIs(t, err, lock.ErrNotAcquired, it.name)
			multiFree(t, all, held)
			begin := time.Now()
			_, err = m.Lock(t.Context(), lock.Wait(100*time.Millisecond))
			harness.NotAcquired(t, err) // the release of twelve may go on
			require.GreaterOrEqual(t, time.Since(begin), 100*time.Millisecond)
			require.Less(t, time.Since(begin), 3*time.Second) // the attempt also releases twelve
			multiFree(t, all, held)

			got := multiStart(t, m)
			multiWaits(t, clients...)
			require.Empty(t, got, it.name)
			require.NoError(t, theirs.Unlock(t.Context()))
			h := multiGot(t, got)
			for _, other := range all {
				_, err := other.bar.TryLock(t.Context())
				require.ErrorIs(t, err, lock.ErrNotAcquired, other.name)
			}
			require.NoError(t, h.Context().Err())
			require.NoError(t, h.Unlock(t.Context()))
			require.ErrorIs(t, context.Cause(h.Context()), context.Canceled)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
			require.Zero(t, h.Remaining())
			require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrNotHeld)
			h, err = m.TryLock(t.Context())
			require.NoError(t, err)
			require.NoError(t, h.Unlock(t.Context()))
		}
		multiEmpty(t, s, second)
	})
}

// A caller that holds the three locks excludes another until it releases them, on one server
// and on three.
func TestMultiOnOneServerAndOnThree(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		servers := []*testserver.Server{s, harness.Server(t, s.Program), harness.Server(t, s.Program)}
		for _, several := range []bool{false, true} {
			of := func() (members []lock.Locker, clients []*redlatch.Client) {
				for i, name := range []string{"a", "b", "c"} {
					if several || i == 0 {
						clients = append(clients, harness.Client(t, servers[i]))
					}
					members = append(members, clients[len(clients)-1].Lock(name))
				}
				return members, clients
			}
			mine, clients := of()
			theirs, others := of()
			slices.Reverse(theirs)
			m, l := clients[0].MultiLock(mine...), others[0].MultiLock(theirs...)
			h := multiMust(t, m, lock.Lease(10*time.Second))
			require.Equal(t, "a,b,c", h.Name())
			require.Zero(t, h.Owner())
			require.Zero(t, h.Token())
			for range 2 {
				_, err := l.TryLock(t.Context())
				require.ErrorIs(t, err, lock.ErrNotAcquired)
			}
			next := multiStart(t, l)
			multiWaits(t, others...)
			require.Empty(t, next)
			require.NoError(t, h.Unlock(t.Context()))
			require.NoError(t, multiGot(t, next).Unlock(t.Context()))
			for _, s := range servers {
				harness.NothingLeft(t, s.Addr)
			}
		}
	})
}

func TestMultiOfMultis(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		m := c.MultiLock(c.MultiLock(c.Lock("c"), c.Lock("a")), c.Lock("b"))
		require.Equal(t, "c,a,b", m.Name())
		h := multiMust(t, m)
		for _, name := range []string{"a", "b", "c"} {
			require.True(t, harness.IsLocked(t, c.Lock(name)))
		}
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, m.Do(t.Context(), func(ctx context.Context) error { return ctx.Err() }))
		harness.NothingLeft(t, s.Addr)
	})
}

// The order of two locks is the same for a client that sees a cluster of one node and for one that sees
// a single server: each waits for the first one before it takes the other.
func TestMultiHasOneOrderForAllClients(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster, err := testserver.StartCluster(shared.Program, 1, false, 15*time.Second)
		require.NoError(t, err)
		t.Cleanup(cluster.Stop)
		views := map[string]rueidis.ClientOption{"cluster": {}, "single server": {ForceSingleClient: true}}
		for view, opt := range views {
			opt.InitAddress = cluster.Addrs()
			c, err := redlatch.New(t.Context(), opt, redlatch.WithPubSubMode(pubsub.Plain))
			require.NoError(t, err)
			defer c.Close()
			first, second := c.Lock("a"), c.Lock("b") // their slots have the other order
			h := multiMust(t, first)
			waiter := harness.StartLock(t, t.Context(), c.MultiLock(second, first))
			multiWaits(t, c)
			require.False(t, harness.IsLocked(t, second), view)
			require.NoError(t, h.Unlock(t.Context()))
			require.NoError(t, waiter.Got().Unlock(t.Context()))
		}
	})
}

func TestMultiOfBadMembers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, same := harness.Client(t, s), harness.Client(t, s)
		apart := harness.Client(t, harness.Server(t, s.Program))
		mapped := harness.Client(t, s, redlatch.WithNameMapper(func(string) string { return "a" }))
		a := c.Lock("a")
		var noMulti *multilock.Multi
		var noLock *rlock.Lock
		for name, bad := range map[string]struct {
			members []lock.Locker
			says    string
		}{
			"none":                          {nil, "without members"},
			"nil":                           {[]lock.Locker{a, nil}, "member 2"},
			"a nil lock":                    {[]lock.Locker{noLock, a}, "member 1"},
			"a nil multi":                   {[]lock.Locker{a, noMulti}, "member 2"},
			"a multi of none":               {[]lock.Locker{a, c.MultiLock()}, "without members"},
			"a multi of nil":                {[]lock.Locker{a, c.MultiLock(nil)}, "nil"},
			"twice":                         {[]lock.Locker{a, c.Lock("b"), c.Lock("a")}, `duplicate member "a"`},
			"twice, of two kinds":           {[]lock.Locker{a, c.FairLock("a")}, `duplicate member "a"`},
			"both sides":                    {[]lock.Locker{c.RWLock("a").Read(), c.RWLock("a").Write()}, `duplicate member "a"`},
			"twice, in a multi":             {[]lock.Locker{a, c.MultiLock(c.Lock("a"))}, `duplicate member "a"`},
			"twice, through two clients":    {[]lock.Locker{a, same.Lock("a")}, `duplicate member "a"`},
			"twice, through a name mapper":  {[]lock.Locker{a, mapped.Lock("other")}, "duplicate member"},
			"a Redlock twice":               {[]lock.Locker{c.RedLock(a), a, c.RedLock(a)}, `duplicate member "a"`},
			"a member of a Redlock":         {[]lock.Locker{c.RedLock(c.Lock("b"), apart.Lock("b")), c.Lock("b")}, `duplicate member "b"`},
			"through another client":        {[]lock.Locker{c.RedLock(apart.Lock("b"), same.Lock("b")), c.Lock("b")}, `duplicate member "b"`},
			"Redlocks with a common member": {[]lock.Locker{c.RedLock(a), c.RedLock(a, apart.Lock("a"))}, `duplicate member "a"`},
			"an invalid Redlock":            {[]lock.Locker{a, c.RedLock()}, "without members"},
			"foreign":                       {[]lock.Locker{a, multiForeign{c.Lock("b")}}, "member 2"},
			"foreign, embeds a lock":        {[]lock.Locker{a, multiEmbeds{c.Lock("b")}}, "multiEmbeds"},
			"foreign, points to that":       {[]lock.Locker{&multiEmbeds{c.Lock("b")}, a}, "*multilock_test.multiEmbeds"},
			"a zero lock":                   {[]lock.Locker{a, &rlock.Lock{}}, "member 2"},
			"a bad name":                    {[]lock.Locker{a, c.Lock("")}, "name"},
			"a bad name, several in a slot": {[]lock.Locker{c.Lock(""), a, c.Lock("b")}, "name"},
		} {
			t.Run(name, func(t *testing.T) {
				m := c.MultiLock(bad.members...)
				_, err := m.Lock(t.Context())
				require.ErrorIs(t, err, lock.ErrInvalid)
				require.ErrorContains(t, err, bad.says)
				_, err = m.TryLock(t.Context())
				require.ErrorIs(t, err, lock.ErrInvalid)
				require.ErrorIs(t, m.Do(t.Context(), multiNothing), lock.ErrInvalid)
				harness.NothingLeft(t, s.Addr)
			})
		}
		for _, m := range []*multilock.Multi{c.MultiLock(), c.MultiLock(a, nil), c.MultiLock(a, c.Lock("a"))} {
			require.ErrorIs(t, m.Unlock(t.Context()), lock.ErrInvalid)
			_, err := m.IsHeldBy(t.Context(), c.NewOwner())
			require.ErrorIs(t, err, lock.ErrInvalid)
		}
		// The same name on different servers or databases is not the same lock.
		second := harness.Server(t, s.Program)
		third, err := redlatch.Open(t.Context(), s.URL()+"/3")
		require.NoError(t, err)
		defer third.Close()
		m := c.MultiLock(a, harness.Client(t, second).Lock("a"), third.Lock("a"))
		require.Equal(t, "a", m.Name())
		require.NoError(t, m.Do(t.Context(), multiNothing))
	})
}

func TestMultiWithBadArguments(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		m := c.MultiLock(c.Lock("a"), c.Lock("b"), other.Lock("c"))
		var none context.Context
		for _, lockIt := range []func(context.Context, ...lock.Option) (lock.Hold, error){m.Lock, m.TryLock} {
			_, err := lockIt(none)
			require.ErrorIs(t, err, lock.ErrInvalid)
			_, err = lockIt(t.Context(), lock.Lease(-1))
			require.ErrorIs(t, err, lock.ErrInvalid)
			_, err = lockIt(t.Context(), lock.MaxHold(-1))
			require.ErrorIs(t, err, lock.ErrInvalid)
			gone := errors.New("gone")
			ctx, cancel := context.WithCancelCause(t.Context())
			cancel(gone)
			_, err = lockIt(ctx)
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.ErrorIs(t, err, gone)
		}
		_, err := m.TryLock(t.Context(), lock.Wait(time.Second))
		require.ErrorIs(t, err, lock.ErrInvalid)
		require.ErrorIs(t, m.Do(t.Context(), nil), lock.ErrInvalid)
		require.ErrorIs(t, m.Unlock(none), lock.ErrInvalid)

		h := multiMust(t, m)
		require.ErrorIs(t, h.Unlock(none), lock.ErrInvalid)
		require.ErrorIs(t, h.Extend(none, time.Minute), lock.ErrInvalid)
		require.ErrorIs(t, h.Extend(t.Context(), 0), lock.ErrInvalid)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, h.Unlock(ended), "acquired members are released")
		harness.NothingLeft(t, s.Addr)

		other.Close() // of one member
		_, err = m.Lock(t.Context())
		require.ErrorIs(t, err, lock.ErrClosed)
		require.NoError(t, c.Lock("a").Do(t.Context(), multiNothing))
		c.Close()
		_, err = c.MultiLock(c.Lock("a")).Lock(t.Context())
		require.ErrorIs(t, err, lock.ErrClosed)
		_, err = c.MultiLock(c.Lock("a")).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrClosed)
	})
}

// Members are acquired in one order, whatever order is given: a waiter for one member holds
// all before it and none after it.
func TestMultiAcquiresInOneOrder(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Server(t, s.Program)
		c, other := harness.Client(t, s), harness.Client(t, s)
		here, there := harness.Client(t, second), harness.Client(t, second)
		type named struct {
			name    string
			l, bar  lock.Locker
			server  string
			unknown bool
		}
		all := []named{
			{"c", c.Lock("c"), other.Lock("c"), multiRunID(t, s), false},
			{"a", c.FencedLock("a"), other.FencedLock("a"), multiRunID(t, s), false},
			{"z", c.RedLock(c.Lock("z")), other.Lock("z"), "", true},
			{"b", c.Lock("b"), other.Lock("b"), multiRunID(t, s), false},
		}
		for _, several := range []bool{false, true} {
			if several {
				all = append(all, named{"b", here.Lock("b"), there.Lock("b"), multiRunID(t, second), false},
					named{"a", here.Lock("a"), there.Lock("a"), multiRunID(t, second), false})
			}
			order := slices.Clone(all)
			slices.SortFunc(order, func(a, b named) int {
				if a.unknown != b.unknown { // first
					if a.unknown {
						return -1
					}
					return 1
				}
				return cmp.Or(cmp.Compare(a.server, b.server), cmp.Compare(a.name, b.name))
			})
			for i, held := range order {
				theirs := multiMust(t, held.bar)
				var members []lock.Locker
				for _, n := range all {
					members = append(members, n.l)
				}
				slices.Reverse(all)
				done := make(chan error, 1)
				go func() { done <- c.MultiLock(members...).Do(context.Background(), multiNothing) }()
				free := func(n named) bool {
					h, err := n.bar.TryLock(t.Context())
					if err != nil {
						require.ErrorIs(t, err, lock.ErrNotAcquired)
						return false
					}
					require.NoError(t, h.Unlock(t.Context()))
					return true
				}
				multiWaits(t, c, here)
				for j, n := range order {
					if j != i {
						require.Equal(t, j > i, free(n), "%q of %q while %q is waited for", n.name, n.server, held.name)
					}
				}
				require.NoError(t, theirs.Unlock(t.Context()))
				require.NoError(t, <-done)
			}
		}
	})
}

// notAcquired fails the test unless the lock was not acquired, or the release of members was not
// confirmed before the end of the wait.
func notAcquired(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, lock.ErrIndeterminate) {
		require.ErrorContains(t, err, "release")
	} else {
		require.ErrorIs(t, err, lock.ErrNotAcquired)
	}
}

// Wait bounds the acquisition of all members together.
func TestMultiWaitBoundsAllMembers(t *testing.T) {
	const (
		wait  = 2 * time.Second
		slack = wait * 3 / 5 // otherwise it might have waited for two of them
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		first, second := multiMust(t, other.Lock("a")), multiMust(t, other.FairLock("b"))
		m := c.MultiLock(c.Lock("a"), c.FairLock("b"), c.Lock("c"))
		begin, done := time.Now(), make(chan error, 1)
		go func() {
			_, err := m.Lock(context.Background(), lock.Wait(wait))
			done <- err
		}()
		time.Sleep(wait * 2 / 3)
		require.NoError(t, first.Unlock(t.Context()))
		notAcquired(t, <-done)
		require.GreaterOrEqual(t, time.Since(begin), wait)
		require.Less(t, time.Since(begin), wait+slack)
		harness.Eventually(t, wait, "the others are released", func() bool { return !harness.IsLocked(t, c.Lock("a")) })

		ctx, cancel := context.WithTimeout(t.Context(), wait/4)
		defer cancel()
		begin = time.Now()
		_, err := m.Lock(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		notAcquired(t, err)
		require.Less(t, time.Since(begin), wait/4+slack)
		require.NoError(t, second.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// More locks than one script can acquire still act as one.
func TestMultiOfMany(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		var members []lock.Locker
		for i := range 250 { // more than two batches
			members = append(members, c.Lock(strings.Repeat("x", i+1)))
		}
		m := c.MultiLock(members...)
		h, err := m.TryLock(t.Context(), lock.Lease(time.Minute))
		require.NoError(t, err)
		require.Equal(t, ":250", harness.Do(t, s.Addr, "DBSIZE"))
		require.NoError(t, h.Extend(t.Context(), time.Hour))
		require.NoError(t, h.Unlock(t.Context()))
		theirs := multiMust(t, other.Lock(strings.Repeat("x", 240)))
		_, err = m.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"))
		require.NoError(t, theirs.Unlock(t.Context()))
		require.NoError(t, m.Do(t.Context(), multiNothing))
		harness.NothingLeft(t, s.Addr)
	})
}
