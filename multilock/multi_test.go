package multilock_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
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
		c, same, there := harness.Client(t, s), harness.Client(t, s), harness.Client(t, second)
		other := harness.Client(t, s)
		all := slices.Concat(
			multiMembers("", c, other, len(multiKinds)),
			multiMembers("second client's ", same, other, 2),
			multiMembers("second server's ", there, harness.Client(t, second), 3),
		)
		m := c.MultiLock(multiLockers(all)...)
		for held, it := range all {
			theirs := multiMust(t, it.bar)
			othersAreFree := func() {
				t.Helper()
				for i, member := range all {
					if i != held { // a release whose reply was lost may still be under way
						require.NoError(t, member.bar.Do(t.Context(), multiNothing, lock.Wait(2*time.Second)), member.name)
					}
				}
			}
			_, err := m.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired, it.name)
			othersAreFree()
			_, err = m.Lock(t.Context(), lock.Wait(100*time.Millisecond))
			harness.NotAcquired(t, err) // the release of twelve may go on
			othersAreFree()

			w := harness.StartLock(t, t.Context(), m)
			multiWaits(t, c, same, there)
			require.True(t, w.Running(), it.name)
			require.NoError(t, theirs.Unlock(t.Context()))
			h := multiGot(t, w)
			for _, member := range all {
				_, err := member.bar.TryLock(t.Context())
				require.ErrorIs(t, err, lock.ErrNotAcquired, member.name)
			}
			require.NoError(t, h.Context().Err())
			require.Zero(t, lock.OwnerOf(h))
			require.NoError(t, h.Unlock(t.Context()))
		}
		multiEmpty(t, s, second)
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
		second := harness.Server(t, s.Program)
		apart := harness.Client(t, second)
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
			"a Redlock twice":               {[]lock.Locker{c.RedLock([]lock.Locker{a}), a, c.RedLock([]lock.Locker{a})}, `duplicate member "a"`},
			"a member of a Redlock":         {[]lock.Locker{c.RedLock([]lock.Locker{c.Lock("b"), apart.Lock("b")}), c.Lock("b")}, `duplicate member "b"`},
			"through another client":        {[]lock.Locker{c.RedLock([]lock.Locker{apart.Lock("b"), same.Lock("b")}), c.Lock("b")}, `duplicate member "b"`},
			"Redlocks with a common member": {[]lock.Locker{c.RedLock([]lock.Locker{a}), c.RedLock([]lock.Locker{a, apart.Lock("a")})}, `duplicate member "a"`},
			"an invalid Redlock":            {[]lock.Locker{a, c.RedLock(nil)}, "without members"},
			"foreign":                       {[]lock.Locker{a, multiForeign{c.Lock("b")}}, "member 2"},
			"foreign, embeds a lock":        {[]lock.Locker{a, multiEmbeds{c.Lock("b")}}, "multiEmbeds"},
			"foreign, points to that":       {[]lock.Locker{&multiEmbeds{c.Lock("b")}, a}, "*multilock_test.multiEmbeds"},
			"a zero lock":                   {[]lock.Locker{a, &rlock.Lock{}}, "member 2"},
			"a bad name":                    {[]lock.Locker{a, c.Lock("")}, "name"},
			"a bad name, several in a slot": {[]lock.Locker{c.Lock(""), a, c.Lock("b")}, "name"},
		} {
			m := c.MultiLock(bad.members...)
			_, err := m.Lock(t.Context())
			require.ErrorIs(t, err, lock.ErrInvalid, name)
			require.ErrorContains(t, err, bad.says, name)
			_, err = m.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrInvalid, name)
			require.ErrorIs(t, m.Do(t.Context(), multiNothing), lock.ErrInvalid, name)
			harness.NothingLeft(t, s.Addr)
		}
		for _, m := range []*multilock.Multi{c.MultiLock(), c.MultiLock(a, nil), c.MultiLock(a, c.Lock("a"))} {
			require.ErrorIs(t, m.UnlockOwner(t.Context()), lock.ErrInvalid)
		}

		// The same name on different servers or databases is not the same lock.
		third, err := redlatch.Open(t.Context(), s.URL()+"/3")
		require.NoError(t, err)
		defer third.Close()
		m := c.MultiLock(a, apart.Lock("a"), third.Lock("a"))
		require.Equal(t, "a", m.Name())
		require.NoError(t, m.Do(t.Context(), multiNothing))
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
			name, server string // no server: it is first
			l, bar       lock.Locker
		}
		one, two := multiRunID(t, s), multiRunID(t, second)
		all := []named{
			{"c", one, c.Lock("c"), other.Lock("c")},
			{"a", one, c.FencedLock("a"), other.FencedLock("a")},
			{"z", "", c.RedLock([]lock.Locker{c.Lock("z")}), other.Lock("z")},
			{"b", one, c.Lock("b"), other.Lock("b")},
		}
		for _, more := range [][]named{nil, {{"b", two, here.Lock("b"), there.Lock("b")}, {"a", two, here.Lock("a"), there.Lock("a")}}} {
			all = append(all, more...)
			order := slices.SortedFunc(slices.Values(all), func(a, b named) int {
				return cmp.Or(cmp.Compare(a.server, b.server), cmp.Compare(a.name, b.name))
			})
			for i, held := range order {
				theirs := multiMust(t, held.bar)
				var members []lock.Locker
				for _, n := range all {
					members = append(members, n.l)
				}
				slices.Reverse(all)
				w := harness.StartLock(t, t.Context(), c.MultiLock(members...))
				multiWaits(t, c, here)

				for j, n := range order {
					if j == i {
						continue
					}
					err := n.bar.Do(t.Context(), multiNothing, lock.Wait(0))
					require.Equal(t, j > i, err == nil, "%q of %q while %q is waited for: %v", n.name, n.server, held.name, err)
				}
				require.NoError(t, theirs.Unlock(t.Context()))
				require.NoError(t, w.Got().Unlock(t.Context()))
			}
		}
	})
}

// Callers that name the same locks in any order, on one server or on three, exclude each other and do not
// deadlock: two that block each other would be idle for 5 s.
func TestMultiContendersInAnyOrder(t *testing.T) {
	const callers, rounds = 12, 20
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		servers := []*testserver.Server{s, harness.Server(t, s.Program), harness.Server(t, s.Program)}
		for _, n := range []int{1, 3} {
			var inside atomic.Int32
			counter := 0
			began := time.Now()
			var all sync.WaitGroup
			for range 3 {
				var clients []*redlatch.Client
				for _, s := range servers[:n] {
					clients = append(clients, harness.Client(t, s))
				}
				for range callers / 3 {
					all.Go(func() {
						for range rounds {
							var members []lock.Locker
							for _, i := range rand.Perm(3) {
								members = append(members, clients[i%n].Lock(fmt.Sprint(i)))
							}
							assert.NoError(t, clients[0].MultiLock(members...).Do(t.Context(), func(context.Context) error {
								assert.EqualValues(t, 1, inside.Add(1))
								counter++
								inside.Add(-1)
								return nil
							}))
						}
					})
				}
			}
			all.Wait()
			require.Equal(t, callers*rounds, counter)
			require.Less(t, time.Since(began), 20*time.Second)
		}
		multiEmpty(t, servers...)
	})
}

// Wait bounds the acquisition of all members together.
func TestMultiWaitBoundsAllMembers(t *testing.T) {
	const wait, slack = 2 * time.Second, 100 * time.Millisecond
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, other := s.Client(t), s.Client(t)
		first, second := multiMust(t, other.Lock("a")), multiMust(t, other.FairLock("b"))
		m := c.MultiLock(c.Lock("a"), c.FairLock("b"), c.Lock("c"))

		began := time.Now()
		w := harness.StartLock(t, t.Context(), m, lock.Wait(wait))
		time.Sleep(wait * 2 / 3)
		require.NoError(t, first.Unlock(t.Context()))
		require.ErrorIs(t, w.End(), lock.ErrNotAcquired)
		require.WithinRange(t, time.Now(), began.Add(wait), began.Add(wait+slack))
		require.False(t, s.Exists("a"))

		began = time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		_, err := m.Lock(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.WithinRange(t, time.Now(), began.Add(wait), began.Add(wait+slack))
		require.NoError(t, second.Unlock(t.Context()))
		virtuallyEmpty(t, s)
	})
}

// The members of a Multi that is a member are acquired with the others.
func TestMultiIsOneScript(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		m := c.MultiLock(c.MultiLock(c.Lock("c"), c.Lock("a")), c.Lock("b"))
		require.Equal(t, "c,a,b", m.Name())
		h := multiMust(t, m) // has the scripts loaded
		require.Equal(t, []string{"a", "b", "c"}, s.Keys())
		require.NoError(t, h.Extend(t.Context(), time.Minute))
		require.NoError(t, h.Unlock(t.Context()))
		isOne := func(what string) {
			t.Helper()
			require.Equal(t, 1, s.Calls("evalsha"), what)
			require.Zero(t, s.Calls("eval"), what)
			s.Reset()
		}

		s.Reset()
		for _, take := range []func(ctx context.Context, opts ...lock.Option) (lock.Hold, error){m.Lock, harness.Take(m, true)} {
			for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Minute)}, {lock.MaxHold(time.Hour)}} {
				h, err := take(t.Context(), opts...)
				require.NoError(t, err)
				isOne("acquire")
				require.NoError(t, h.Extend(t.Context(), time.Hour))
				isOne("extend")
				require.NoError(t, h.Unlock(t.Context()))
				isOne("release")
			}
		}
		theirs := multiMust(t, s.Client(t).Lock("c"))
		s.Reset()
		_, err := m.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		isOne("failed attempt")
		require.NoError(t, theirs.Unlock(t.Context()))
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
		harness.NothingLeft(t, s.Addr)
	})
}

// Members of one slot are one script. Members of two clients of one cluster are found to be the same lock.
func TestMultiInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		c, other := harness.ClientAt(t, cluster.Addrs()), harness.ClientAt(t, cluster.Addrs())
		tagged := c.MultiLock(c.Lock("{order-7}:c"), c.Lock("{order-7}:b"), c.Lock("{order-7}:a"))
		require.NoError(t, tagged.Do(t.Context(), multiNothing)) // has the scripts loaded
		owner := cluster.Owner("{order-7}").Addr
		harness.Do(t, owner, "CONFIG", "RESETSTAT")
		require.NoError(t, tagged.Do(t.Context(), multiNothing))
		require.Equal(t, 2, harness.Commands(t, harness.Conn(t, owner))["evalsha"])

		_, err := c.MultiLock(c.Lock("a"), other.Lock("a")).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrInvalid)
		for _, node := range cluster.Primaries {
			harness.NothingLeft(t, node.Addr)
		}
	})
}
