package multilock_test

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/rlock"
)

// multiSlack is for what a busy machine needs.
const multiSlack = 2500 * time.Millisecond

func multiNothing(context.Context) error { return nil }

// multiWaits returns when a multi lock waits for one of its members, which are of these
// clients, and will hear when that is released.
func multiWaits(t *testing.T, clients ...*redlatch.Client) {
	t.Helper()
	harness.Eventually(t, 10*time.Second, "it waits", func() bool {
		for _, c := range clients {
			if hub := c.PubSub(); hub.Subscribed < hub.Channels {
				return false
			}
		}
		return harness.Waiting(1, clients...)
	})
}

func multiMust(t *testing.T, l lock.Locker, opts ...lock.Option) lock.Hold {
	t.Helper()
	h, err := l.Lock(t.Context(), opts...)
	require.NoError(t, err)
	return h
}

// multiForeign is somebody else's Locker, of which nothing is known.
type multiForeign struct{ l lock.Locker }

func (f multiForeign) Name() string { return f.l.Name() }

func (f multiForeign) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	h, err := f.l.Lock(ctx, opts...)
	if err != nil {
		return nil, err
	}
	return multiForeignHold{h}, nil
}

func (f multiForeign) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	h, err := f.l.TryLock(ctx, opts...)
	if err != nil {
		return nil, err
	}
	return multiForeignHold{h}, nil
}

func (f multiForeign) Do(ctx context.Context, fn func(ctx context.Context) error, opts ...lock.Option) error {
	return lock.Do(ctx, f, fn, opts...)
}

type multiForeignHold struct{ lock.Hold }

// multiCounted is a lock that counts how often it is taken.
type multiCounted struct {
	*multiCountedLock
	taken *atomic.Int32
}

type multiCountedLock = rlock.Lock

func (c multiCounted) Lock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	c.taken.Add(1)
	return c.multiCountedLock.Lock(ctx, opts...)
}

func (c multiCounted) TryLock(ctx context.Context, opts ...lock.Option) (lock.Hold, error) {
	c.taken.Add(1)
	return c.multiCountedLock.TryLock(ctx, opts...)
}

// multiKind is a kind of member, and what keeps it out.
type multiKind struct {
	name    string
	of, bar func(c *redlatch.Client, name string) lock.Locker
}

func multiLock(c *redlatch.Client, name string) lock.Locker { return c.Lock(name) }

var multiKinds = []multiKind{
	{name: "lock", of: multiLock},
	{name: "lock too", of: multiLock},
	{name: "fenced", of: func(c *redlatch.Client, name string) lock.Locker { return c.FencedLock(name) }},
	{name: "spin", of: func(c *redlatch.Client, name string) lock.Locker { return c.SpinLock(name) }},
	{name: "fair", of: func(c *redlatch.Client, name string) lock.Locker { return c.FairLock(name) }},
	{name: "write", of: func(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Write() }},
	{
		name: "read", of: func(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Read() },
		bar: func(c *redlatch.Client, name string) lock.Locker { return c.RWLock(name).Write() },
	},
	{
		name: "foreign", of: func(c *redlatch.Client, name string) lock.Locker { return multiForeign{c.Lock(name)} },
		bar: multiLock,
	},
}

// multiMember is a member, and the same lock for another client.
type multiMember struct {
	name string
	l    lock.Locker
	bar  lock.Locker
	addr string
}

// multiOfAll returns members of every kind, some of a second client, and some on a
// second server, and the clients that they are of. The first makes the multi lock.
func multiOfAll(t *testing.T, s, second *testserver.Server, opts ...redlatch.Option) (clients []*redlatch.Client, all []multiMember) {
	t.Helper()
	of := func(c, other *redlatch.Client, addr, where string, kinds []multiKind) {
		clients = append(clients, c)
		for _, k := range kinds {
			name, bar := where+k.name, k.bar
			if bar == nil {
				bar = k.of
			}
			all = append(all, multiMember{name, k.of(c, name), bar(other, name), addr})
		}
	}
	of(harness.Client(t, s, opts...), harness.Client(t, s, opts...), s.Addr, "", multiKinds)
	of(harness.Client(t, s, opts...), harness.Client(t, s), s.Addr, "second client's ", multiKinds[:2])
	of(harness.Client(t, second, opts...), harness.Client(t, second), second.Addr, "second server's ", multiKinds[:3])
	return clients, all
}

// multiStart takes a lock in the background.
func multiStart(t *testing.T, l lock.Locker, opts ...lock.Option) <-chan lock.Hold {
	t.Helper()
	got := make(chan lock.Hold, 1)
	go func() {
		h, err := l.Lock(context.Background(), opts...)
		assert.NoError(t, err)
		got <- h
	}()
	return got
}

// multiGot returns the hold that comes.
func multiGot(t *testing.T, got <-chan lock.Hold) lock.Hold {
	t.Helper()
	select {
	case h := <-got:
		require.NotNil(t, h)
		return h
	case <-time.After(4 * time.Second): // a waiter looks by itself after 5 s
		require.FailNow(t, "the next one does not get it")
		return nil
	}
}

// multiLost returns how a hold was lost, which has to happen within d.
func multiLost(t *testing.T, h lock.Hold, d time.Duration) *lock.LostError {
	t.Helper()
	select {
	case <-h.Context().Done():
	case <-time.After(d):
		require.FailNow(t, "the hold does not end")
	}
	lost, ok := context.Cause(h.Context()).(*lock.LostError)
	require.True(t, ok)
	require.Zero(t, h.Remaining())
	return lost
}

func multiLockers(all []multiMember) (members []lock.Locker) {
	for _, m := range all {
		members = append(members, m.l)
	}
	return members
}

// multiFree fails the test unless all members but one can be had at once.
func multiFree(t *testing.T, all []multiMember, but int) {
	t.Helper()
	for i, m := range all {
		if i == but {
			continue
		}
		// A release without an answer to the caller may still be under way.
		h, err := m.bar.Lock(t.Context(), lock.Wait(2*time.Second))
		require.NoError(t, err, m.name)
		require.NoError(t, h.Unlock(t.Context()))
	}
}

// multiFields returns what is in the hash of a lock, whose owners are.
func multiFields(t *testing.T, addr, name string) []string {
	t.Helper()
	fields, err := testserver.Query(addr, "HKEYS", name)
	require.NoError(t, err)
	return fields
}

func multiEmpty(t *testing.T, servers ...*testserver.Server) {
	t.Helper()
	for _, s := range servers {
		tokens, err := testserver.Query(s.Addr, "KEYS", "redisson_lock_token:*") // which stay
		require.NoError(t, err)
		for _, key := range tokens {
			harness.Do(t, s.Addr, "DEL", key)
		}
		harness.NothingLeft(t, s.Addr)
	}
}

func TestMultiTakesAllOrNone(t *testing.T) {
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
			require.ErrorIs(t, err, lock.ErrNotAcquired, it.name)
			require.GreaterOrEqual(t, time.Since(begin), 100*time.Millisecond)
			require.Less(t, time.Since(begin), 3*time.Second) // it gives back twelve, too
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

// The holder of three locks lets somebody else have them after a while, and nobody
// meanwhile; on one server and on three.
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

func TestMultiOfANamedOwner(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		m := c.MultiLock(c.Lock("a"), c.FencedLock("b"), c.FairLock("c"), c.RWLock("d").Write())
		mine := c.NewOwner()
		ctx := lock.WithOwner(t.Context(), mine)
		isHeldBy := func(o lock.Owner) bool {
			held, err := m.IsHeldBy(t.Context(), o)
			require.NoError(t, err)
			return held
		}
		require.False(t, isHeldBy(mine))
		first, err := m.Lock(ctx, lock.Lease(10*time.Second))
		require.NoError(t, err)
		require.Equal(t, mine, first.Owner())
		require.True(t, isHeldBy(mine))
		require.False(t, isHeldBy(c.NewOwner()))
		again, err := m.TryLock(ctx)
		require.NoError(t, err)
		require.NoError(t, again.Unlock(t.Context()))
		require.True(t, isHeldBy(mine))
		require.NoError(t, first.Unlock(t.Context()))
		require.False(t, isHeldBy(mine))

		// By its owner, from elsewhere: those that are held by it in part too.
		h, err := m.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, other.Lock("a").Unlock(ctx))
		require.False(t, isHeldBy(mine))
		err = m.Unlock(ctx)
		require.ErrorIs(t, err, lock.ErrLost)
		require.ErrorContains(t, err, `"a"`)
		for _, l := range []lock.Locker{other.FencedLock("b"), other.FairLock("c"), other.RWLock("d").Write()} {
			require.NoError(t, l.Do(t.Context(), multiNothing, lock.Wait(2*time.Second)), l.Name())
		}
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)

		h, err = m.Lock(ctx)
		require.NoError(t, err)
		require.NoError(t, m.Unlock(ctx))
		require.False(t, isHeldBy(mine))
		select { // and the hold knows, since it is of this client
		case <-h.Context().Done():
		case <-time.After(5 * time.Second):
			require.FailNow(t, "the hold goes on")
		}
		require.ErrorIs(t, context.Cause(h.Context()), context.Canceled)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
		require.ErrorIs(t, m.Unlock(ctx), lock.ErrNotHeld)
		require.ErrorIs(t, m.Unlock(t.Context()), lock.ErrInvalid)

		// The latest of several, of one with the same members; made anew, in another order.
		first, err = m.Lock(ctx)
		require.NoError(t, err)
		part, err := c.MultiLock(c.Lock("a"), c.FencedLock("b")).Lock(ctx)
		require.NoError(t, err)
		last, err := c.MultiLock(c.RWLock("d").Write(), c.FairLock("c"), c.FencedLock("b"), c.Lock("a")).Lock(ctx)
		require.NoError(t, err)
		for _, h := range []lock.Hold{last, first} {
			require.NoError(t, h.Context().Err())
			require.NoError(t, m.Unlock(ctx))
			require.ErrorIs(t, context.Cause(h.Context()), context.Canceled)
		}
		require.NoError(t, part.Context().Err())
		require.NoError(t, part.Unlock(t.Context()))
		require.Zero(t, multilock.NamedHolds(m), "of holds that have ended")
		_, err = m.IsHeldBy(t.Context(), lock.Owner{})
		require.ErrorIs(t, err, lock.ErrInvalid)

		unknown := c.MultiLock(c.Lock("a"), multiForeign{c.Lock("z")})
		require.ErrorIs(t, unknown.Unlock(ctx), lock.ErrUnsupported)
		_, err = unknown.IsHeldBy(t.Context(), mine)
		require.ErrorIs(t, err, lock.ErrUnsupported)
		multiEmpty(t, s)
	})
}

// The locks that one script takes count the holds of an owner like any other.
func TestMultiOfANamedOwnerIsCounted(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		all := []*rlock.Lock{c.Lock("a"), c.Lock("b"), c.Lock("c")}
		m := c.MultiLock(all[0], all[1], all[2])
		owner := c.NewOwner()
		ctx := lock.WithOwner(t.Context(), owner)
		counts := func(want int) {
			for _, l := range all {
				require.Equal(t, want, harness.HoldCount(t, l, owner))
			}
		}
		first, err := m.Lock(ctx, lock.Lease(time.Minute))
		require.NoError(t, err)
		counts(1)
		again, err := m.TryLock(ctx)
		require.NoError(t, err)
		counts(2)
		require.NoError(t, first.Extend(t.Context(), time.Hour))
		require.NoError(t, first.Unlock(t.Context()))
		counts(1)
		require.NoError(t, again.Unlock(t.Context()))
		counts(0)
		harness.NothingStays(t, s.Addr)
	})
}

// Whoever unlocks by the owner of a member that was not named, or re-enters it, has made a
// name of it: the release of several leaves that member its other hold.
func TestMultiOfAMemberWhoseOwnerIsUsedAlsoByName(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		h := multiMust(t, c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c")))
		owner, err := lock.ParseOwner(multiFields(t, s.Addr, "b")[0])
		require.NoError(t, err)
		again, err := other.Lock("b").Lock(lock.WithOwner(t.Context(), owner))
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
		require.False(t, harness.IsLocked(t, c.Lock("a")))
		require.False(t, harness.IsLocked(t, c.Lock("c")))
		require.Equal(t, 1, harness.HoldCount(t, c.Lock("b"), owner))
		require.NoError(t, again.Unlock(t.Context()))
		harness.NothingStays(t, s.Addr)
	})
}

// An upgrade, or a re-entry that is not allowed, is an error and no wait, and costs the
// owner none of what it has.
func TestMultiOfAnOwnerThatMayNot(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		ctx := lock.WithOwner(t.Context(), c.NewOwner())
		rw := c.RWLock("b")
		reads, err := rw.Read().Lock(ctx)
		require.NoError(t, err)
		_, err = c.MultiLock(c.Lock("a"), rw.Write(), c.Lock("c")).Lock(ctx)
		require.ErrorIs(t, err, lock.ErrUpgrade)
		first, err := c.Lock("n", rlock.NonReentrant()).Lock(ctx)
		require.NoError(t, err)
		_, err = c.MultiLock(c.Lock("a"), c.Lock("n", rlock.NonReentrant())).Lock(ctx)
		require.ErrorIs(t, err, lock.ErrReentered)
		require.False(t, harness.IsLocked(t, c.Lock("a")))
		require.NoError(t, first.Unlock(t.Context()))
		require.NoError(t, reads.Unlock(t.Context()))
		harness.NothingStays(t, s.Addr)
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

func TestMultiOfBadMembers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, same := harness.Client(t, s), harness.Client(t, s)
		mapped := harness.Client(t, s, redlatch.WithNameMapper(func(string) string { return "a" }))
		a := c.Lock("a")
		foreign := multiForeign{c.Lock("z")}
		var noMulti *multilock.Multi
		var noLock *rlock.Lock
		for name, bad := range map[string]struct {
			members []lock.Locker
			says    string
		}{
			"none":                              {nil, "no locks"},
			"nil":                               {[]lock.Locker{a, nil}, "number 2"},
			"a nil lock":                        {[]lock.Locker{noLock, a}, "number 1"},
			"a nil multi":                       {[]lock.Locker{a, noMulti}, "number 2"},
			"a multi of none":                   {[]lock.Locker{a, c.MultiLock()}, "no locks"},
			"a multi of nil":                    {[]lock.Locker{a, c.MultiLock(nil)}, "nil"},
			"twice":                             {[]lock.Locker{a, c.Lock("b"), c.Lock("a")}, `"a" is there twice`},
			"twice, of two kinds":               {[]lock.Locker{a, c.FairLock("a")}, `"a" is there twice`},
			"both sides":                        {[]lock.Locker{c.RWLock("a").Read(), c.RWLock("a").Write()}, `"a" is there twice`},
			"twice, in a multi":                 {[]lock.Locker{a, c.MultiLock(c.Lock("a"))}, `"a" is there twice`},
			"twice, through two clients":        {[]lock.Locker{a, same.Lock("a")}, `"a" is there twice`},
			"twice, through a name mapper":      {[]lock.Locker{a, mapped.Lock("other")}, "is there twice"},
			"twice, of somebody else":           {[]lock.Locker{foreign, a, foreign}, `"z" is there twice`},
			"a bad name":                        {[]lock.Locker{a, c.Lock("")}, "name"},
			"a name that spreads over slots":    {[]lock.Locker{a, c.Lock("a}b")}, "a}b"},
			"a bad name, and several on a slot": {[]lock.Locker{c.Lock("a}b"), a, c.Lock("b")}, "a}b"},
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
		// One name twice is one lock only on one server and in one database.
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
		require.NoError(t, h.Unlock(ended), "what was taken is given back in any case")
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

// Whatever the order given, members are taken in one: who waits for one of them has
// those before, and none of those behind.
func TestMultiTakesInOneOrder(t *testing.T) {
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
		runID := func(s *testserver.Server) string {
			info, err := testserver.Info(s.Addr, "server")
			require.NoError(t, err)
			return info["run_id"]
		}
		all := []named{
			{"c", c.Lock("c"), other.Lock("c"), runID(s), false},
			{"a", c.FencedLock("a"), other.FencedLock("a"), runID(s), false},
			{"z", multiForeign{c.Lock("z")}, other.Lock("z"), "", true},
			{"b", c.Lock("b"), other.Lock("b"), runID(s), false},
		}
		for _, several := range []bool{false, true} {
			if several {
				all = append(all, named{"b", here.Lock("b"), there.Lock("b"), runID(second), false},
					named{"a", here.Lock("a"), there.Lock("a"), runID(second), false})
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

// What somebody's own type does when it is locked is done, also if it embeds a lock.
func TestMultiOfALockWithMethodsOfItsOwn(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		var taken atomic.Int32
		m := c.MultiLock(c.Lock("a"), multiCounted{c.Lock("b"), &taken}, &multiCounted{c.Lock("c"), &taken})
		require.NoError(t, m.Do(t.Context(), multiNothing))
		require.Equal(t, int32(2), taken.Load())
		h, err := m.TryLock(t.Context(), lock.Lease(time.Minute))
		require.NoError(t, err)
		require.Equal(t, int32(4), taken.Load())
		require.NoError(t, h.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// A lease counts from when the last member was taken, for all members, however long that
// took, and none is renewed after.
func TestMultiLeaseCountsFromTheLast(t *testing.T) {
	const lease = 2 * time.Second
	name := func(name string) string { return name }
	harness.EachOf(t, []string{"lock", "lock too", "fair", "read", "second server's lock"}, name, func(t *testing.T, s *testserver.Server, name string) {
		second := harness.Server(t, s.Program)
		// Another watchdog timeout than the lease: it is the lease that counts.
		clients, all := multiOfAll(t, s, second, redlatch.WithWatchdogTimeout(time.Minute))
		// What is foreign is not renewed while it waits.
		all = slices.DeleteFunc(all, func(m multiMember) bool { return m.name == "foreign" })
		held := all[slices.IndexFunc(all, func(m multiMember) bool { return m.name == name })]
		theirs := multiMust(t, held.bar)
		got := multiStart(t, clients[0].MultiLock(multiLockers(all)...), lock.Lease(lease))
		multiWaits(t, clients...)
		before := make(map[string][]string)
		for _, m := range all {
			if fields := multiFields(t, m.addr, m.name); m.name != held.name && len(fields) > 0 {
				before[m.name] = fields
			}
		}
		time.Sleep(lease * 5 / 4) // longer than the lease of those that are taken already
		require.Empty(t, got)
		begin := time.Now()
		require.NoError(t, theirs.Unlock(t.Context()))
		h := multiGot(t, got)
		taken, left := time.Now(), h.Remaining()
		for _, m := range all {
			if fields := before[m.name]; fields != nil {
				require.Equal(t, fields, multiFields(t, m.addr, m.name), "%s was taken anew", m.name)
			}
		}
		require.LessOrEqual(t, left, lease)
		require.Greater(t, left, lease-time.Since(begin)-time.Millisecond, "it counts from before")
		certain := func() {
			for _, m := range all {
				longest := lease - time.Since(taken)
				ttl := time.Duration(harness.PTTL(t, m.addr, m.name)) * time.Millisecond
				if h.Remaining() > 0 {
					require.LessOrEqual(t, ttl, longest+time.Millisecond, "%s is renewed", m.name)
					require.GreaterOrEqual(t, ttl, h.Remaining()-time.Millisecond, "%s is less certain than the hold", m.name)
				}
			}
		}
		certain()
		time.Sleep(lease / 2) // some renewal is due by then, if there is one
		certain()
		require.Equal(t, lock.ReasonExpired, multiLost(t, h, lease+multiSlack).Reason)
		require.GreaterOrEqual(t, time.Since(begin), lease)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		multiFree(t, all, -1)
		multiEmpty(t, s, second)
	})
}

// Nor is a hold over at once because a member of which little is known took long.
func TestMultiLeaseAfterAWaitForAForeignMember(t *testing.T) {
	const lease = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		theirs := multiMust(t, other.Lock("z"))
		var taken atomic.Int32
		got := multiStart(t, c.MultiLock(c.FencedLock("a"), multiForeign{multiCounted{c.Lock("z"), &taken}}, c.Lock("b")), lock.Lease(lease))
		time.Sleep(lease * 5 / 4)
		require.NoError(t, theirs.Unlock(t.Context()))
		h := multiGot(t, got)
		require.Equal(t, int32(1), taken.Load(), "it was begun anew")
		require.Positive(t, h.Remaining())
		require.NoError(t, h.Unlock(t.Context()))
		multiEmpty(t, s)
	})
}

func TestMultiMaxHoldCountsFromTheLast(t *testing.T) {
	const most = 600 * time.Millisecond
	name := func(name string) string { return name }
	harness.EachOf(t, []string{"a", "c", "d"}, name, func(t *testing.T, s *testserver.Server, held string) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		theirs := multiMust(t, other.Lock(held))
		got := multiStart(t, c.MultiLock(c.FencedLock("a"), c.Lock("b"), c.Lock("c"), c.FencedLock("d")), lock.MaxHold(most))
		multiWaits(t, c)
		var before [2][]string
		for i, name := range []string{"a", "b"} {
			before[i] = multiFields(t, s.Addr, name)
		}
		time.Sleep(most * 5 / 4)
		begin := time.Now()
		require.NoError(t, theirs.Unlock(t.Context()))
		h := multiGot(t, got)
		for i, name := range []string{"a", "b"} {
			if held != "a" {
				require.Equal(t, before[i], multiFields(t, s.Addr, name), "%s was taken anew", name)
			}
		}
		left := h.Remaining()
		require.LessOrEqual(t, left, most)
		require.Greater(t, left, most-time.Since(begin)-time.Millisecond)
		require.Equal(t, lock.ReasonMaxHold, multiLost(t, h, most+multiSlack).Reason)
		require.GreaterOrEqual(t, time.Since(begin), most)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		multiEmpty(t, s)
	})
}

func TestMultiIsRenewed(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Server(t, s.Program)
		clients, all := multiOfAll(t, s, second, redlatch.WithWatchdogTimeout(timeout))
		h := multiMust(t, clients[0].MultiLock(multiLockers(all)...))
		time.Sleep(timeout * 5 / 4)
		require.NoError(t, context.Cause(h.Context()))
		for _, m := range all {
			_, err := m.bar.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired, m.name)
		}
		require.NoError(t, h.Extend(t.Context(), time.Minute))
		require.Greater(t, h.Remaining(), 50*time.Second)
		for _, m := range all {
			require.Greater(t, harness.PTTL(t, m.addr, m.name), (50 * time.Second).Milliseconds(), m.name)
		}
		require.NoError(t, h.Unlock(t.Context()))
		multiEmpty(t, s, second)
	})
}

// Remaining is the least of all members: two clients have different timeouts.
func TestMultiRemainingIsTheLeast(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Hour))
		brief := harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Minute))
		for _, members := range [][]lock.Locker{{c.Lock("a"), brief.Lock("b")}, {brief.Lock("a"), c.Lock("b")}} {
			h := multiMust(t, c.MultiLock(members...))
			require.LessOrEqual(t, h.Remaining(), time.Minute)
			require.Greater(t, h.Remaining(), 50*time.Second)
			require.NoError(t, h.Extend(t.Context(), 5*time.Minute))
			require.LessOrEqual(t, h.Remaining(), 5*time.Minute)
			require.Greater(t, h.Remaining(), 4*time.Minute)
			require.NoError(t, h.Unlock(t.Context()))
		}
	})
}

// Wait is for all members together.
func TestMultiWaitIsOne(t *testing.T) {
	const (
		wait  = 2 * time.Second
		slack = wait * 3 / 5 // or it might have waited for two of them
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
		require.ErrorIs(t, <-done, lock.ErrNotAcquired)
		require.GreaterOrEqual(t, time.Since(begin), wait)
		require.Less(t, time.Since(begin), wait+slack)
		require.False(t, harness.IsLocked(t, c.Lock("a")))

		ctx, cancel := context.WithTimeout(t.Context(), wait/4)
		defer cancel()
		begin = time.Now()
		_, err := m.Lock(ctx)
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Less(t, time.Since(begin), wait/4+slack)
		require.NoError(t, second.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// More locks than one script takes are one all the same.
func TestMultiOfMany(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		var members []lock.Locker
		for i := range 250 { // more than twice as many as one script takes
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
