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

func multiNothing(context.Context) error { return nil }

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
// second server.
func multiOfAll(t *testing.T, s, second *testserver.Server, opts ...redlatch.Option) (c *redlatch.Client, all []multiMember) {
	t.Helper()
	c = harness.Client(t, s, opts...)
	of := func(c, other *redlatch.Client, addr, where string, kinds []multiKind) {
		for _, k := range kinds {
			name, bar := where+k.name, k.bar
			if bar == nil {
				bar = k.of
			}
			all = append(all, multiMember{name, k.of(c, name), bar(other, name), addr})
		}
	}
	of(c, harness.Client(t, s, opts...), s.Addr, "", multiKinds)
	of(harness.Client(t, s, opts...), harness.Client(t, s), s.Addr, "second client's ", multiKinds[:2])
	of(harness.Client(t, second, opts...), harness.Client(t, second), second.Addr, "second server's ", multiKinds[:3])
	return c, all
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
		second := harness.Own(t, s.Program)
		c, all := multiOfAll(t, s, second)
		m := c.MultiLock(multiLockers(all)...)
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

			got := make(chan lock.Hold, 1)
			go func() {
				h, err := m.Lock(context.Background())
				assert.NoError(t, err)
				got <- h
			}()
			select {
			case <-got:
				require.FailNow(t, "it has what somebody else holds", it.name)
			case <-time.After(50 * time.Millisecond):
			}
			require.NoError(t, theirs.Unlock(t.Context()))
			h := <-got
			require.NotNil(t, h)
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
		servers := []*testserver.Server{s, harness.Own(t, s.Program), harness.Own(t, s.Program)}
		for _, several := range []bool{false, true} {
			of := func() (members []lock.Locker, c *redlatch.Client) {
				c = harness.Client(t, s)
				for i, name := range []string{"a", "b", "c"} {
					if several {
						c = harness.Client(t, servers[i])
					}
					members = append(members, c.Lock(name))
				}
				return members, c
			}
			mine, c := of()
			theirs, other := of()
			slices.Reverse(theirs)
			m, l := c.MultiLock(mine...), other.MultiLock(theirs...)
			h := multiMust(t, m, lock.Lease(10*time.Second))
			require.Equal(t, "a,b,c", h.Name())
			require.Zero(t, h.Owner())
			require.Zero(t, h.Token())
			for range 2 {
				_, err := l.TryLock(t.Context())
				require.ErrorIs(t, err, lock.ErrNotAcquired)
			}
			next := make(chan error, 1)
			go func() { next <- l.Do(context.Background(), multiNothing) }()
			select {
			case <-next:
				require.FailNow(t, "it has what somebody else holds")
			case <-time.After(200 * time.Millisecond):
			}
			require.NoError(t, h.Unlock(t.Context()))
			select {
			case err := <-next:
				require.NoError(t, err)
			case <-time.After(2 * time.Second): // and does not have to look by itself, every 5 s
				require.FailNow(t, "the next one does not get it")
			}
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
		second := harness.Own(t, s.Program)
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
		second := harness.Own(t, s.Program)
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
				if i > 0 {
					harness.Eventually(t, 2*time.Second, "the one before is taken", func() bool { return !free(order[i-1]) })
				} else {
					<-time.After(50 * time.Millisecond)
				}
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
	const (
		lease = 800 * time.Millisecond
		slack = lease / 4
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Own(t, s.Program)
		// Another watchdog timeout than the lease: it is the lease that counts.
		c, all := multiOfAll(t, s, second, redlatch.WithWatchdogTimeout(time.Minute))
		// What is foreign is not renewed while it waits.
		all = slices.DeleteFunc(all, func(m multiMember) bool { return m.name == "foreign" })
		for _, held := range all {
			switch held.name {
			case "lock too", "lock", "fair", "read", "second server's lock":
			default:
				continue // for the sake of time
			}
			theirs := multiMust(t, held.bar)
			got := make(chan lock.Hold, 1)
			go func() {
				h, err := c.MultiLock(multiLockers(all)...).Lock(context.Background(), lock.Lease(lease))
				assert.NoError(t, err)
				got <- h
			}()
			// Longer than the lease of those that are taken already.
			<-time.After(lease / 4)
			before := make(map[string][]string)
			for _, m := range all {
				if fields := multiFields(t, m.addr, m.name); m.name != held.name && len(fields) > 0 {
					before[m.name] = fields
				}
			}
			select {
			case <-got:
				require.FailNow(t, "it has what somebody else holds", held.name)
			case <-time.After(lease * 5 / 4):
			}
			begin := time.Now()
			require.NoError(t, theirs.Unlock(t.Context()))
			h := <-got
			require.NotNil(t, h)
			left := h.Remaining()
			for _, m := range all {
				if fields := before[m.name]; fields != nil {
					require.Equal(t, fields, multiFields(t, m.addr, m.name), "%s was taken anew", m.name)
				}
			}
			require.LessOrEqual(t, left, lease)
			require.Greater(t, left, lease-time.Since(begin)-time.Millisecond, "it counts from before")
			certain := func() {
				for _, m := range all {
					ttl := time.Duration(harness.PTTL(t, m.addr, m.name)) * time.Millisecond
					require.LessOrEqual(t, ttl, lease-time.Since(begin)+slack, "%s is renewed", m.name)
					require.GreaterOrEqual(t, ttl, h.Remaining()-time.Millisecond, "%s is less certain than the hold", m.name)
				}
			}
			certain()
			<-time.After(lease / 2) // some renewal is due by then, if there is one
			certain()
			select {
			case <-h.Context().Done():
			case <-time.After(lease):
				require.FailNow(t, "the lease goes on")
			}
			require.GreaterOrEqual(t, time.Since(begin), lease)
			var lost *lock.LostError
			require.ErrorAs(t, context.Cause(h.Context()), &lost)
			require.Equal(t, lock.ReasonExpired, lost.Reason)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			multiFree(t, all, -1)
		}
		multiEmpty(t, s, second)
	})
}

// Nor is a hold over at once because a member of which little is known took long.
func TestMultiLeaseAfterAWaitForAForeignMember(t *testing.T) {
	const lease = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		theirs := multiMust(t, other.Lock("z"))
		got := make(chan lock.Hold, 1)
		begin := time.Now()
		go func() {
			h, err := c.MultiLock(c.FencedLock("a"), multiForeign{c.Lock("z")}, c.Lock("b")).Lock(context.Background(), lock.Lease(lease))
			assert.NoError(t, err)
			got <- h
		}()
		<-time.After(lease * 3 / 2)
		require.NoError(t, theirs.Unlock(t.Context()))
		h := <-got
		require.NotNil(t, h)
		require.Less(t, time.Since(begin), 2*lease, "it was begun anew")
		require.Greater(t, h.Remaining(), lease/2)
		require.NoError(t, h.Unlock(t.Context()))
		multiEmpty(t, s)
	})
}

func TestMultiMaxHoldCountsFromTheLast(t *testing.T) {
	const most = 600 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		early := []string{"a", "b"}
		for _, held := range []string{"a", "c", "d"} {
			theirs := multiMust(t, other.Lock(held))
			got := make(chan lock.Hold, 1)
			go func() {
				h, err := c.MultiLock(c.FencedLock("a"), c.Lock("b"), c.Lock("c"), c.FencedLock("d")).Lock(context.Background(), lock.MaxHold(most))
				assert.NoError(t, err)
				got <- h
			}()
			<-time.After(most / 4)
			var before [][]string
			for _, name := range early {
				before = append(before, multiFields(t, s.Addr, name))
			}
			<-time.After(most * 5 / 4)
			begin := time.Now()
			require.NoError(t, theirs.Unlock(t.Context()))
			h := <-got
			require.NotNil(t, h)
			for i, name := range early {
				if held != "a" {
					require.Equal(t, before[i], multiFields(t, s.Addr, name), "%s was taken anew", name)
				}
			}
			require.LessOrEqual(t, h.Remaining(), most)
			require.Greater(t, h.Remaining(), most-time.Since(begin)-time.Millisecond)
			select {
			case <-h.Context().Done():
			case <-time.After(2 * most):
				require.FailNow(t, "it is held for longer")
			}
			require.GreaterOrEqual(t, time.Since(begin), most)
			var lost *lock.LostError
			require.ErrorAs(t, context.Cause(h.Context()), &lost)
			require.Equal(t, lock.ReasonMaxHold, lost.Reason)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
		multiEmpty(t, s)
	})
}

func TestMultiIsRenewed(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Own(t, s.Program)
		c, all := multiOfAll(t, s, second, redlatch.WithWatchdogTimeout(timeout))
		h := multiMust(t, c.MultiLock(multiLockers(all)...))
		select {
		case <-h.Context().Done():
			require.FailNow(t, "lost", context.Cause(h.Context()))
		case <-time.After(timeout * 5 / 2):
		}
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
		wait  = time.Second
		slack = wait / 2
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
		<-time.After(wait * 2 / 3)
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

// The hold's context is a child of the caller's, whose end does not release anything.
func TestMultiContext(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		type secret struct{}
		gone := errors.New("gone")
		ctx, cancel := context.WithCancelCause(context.WithValue(t.Context(), secret{}, "value"))
		h, err := c.MultiLock(c.Lock("a"), c.FencedLock("b")).Lock(ctx)
		require.NoError(t, err)
		require.Equal(t, "value", h.Context().Value(secret{}))
		require.Same(t, h.Context(), h.Context())
		cancel(gone)
		require.ErrorIs(t, context.Cause(h.Context()), gone)
		<-time.After(100 * time.Millisecond) // for those who hear of it
		require.Positive(t, h.Remaining())
		_, err = c.MultiLock(c.Lock("b")).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, h.Unlock(ctx))
		multiEmpty(t, s)
	})
}

// Do gives everything back however its function ends.
func TestMultiDo(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		m := c.MultiLock(c.Lock("a"), c.Lock("b"))
		failed := errors.New("failed")
		require.ErrorIs(t, m.Do(t.Context(), func(context.Context) error { return failed }), failed)
		require.PanicsWithValue(t, "oh", func() { _ = m.Do(t.Context(), func(context.Context) error { panic("oh") }) })
		harness.NothingLeft(t, s.Addr)
	})
}

// More locks than one script takes are one all the same.
func TestMultiOfMany(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		var members []lock.Locker
		for i := range 250 {
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
