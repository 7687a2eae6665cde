package multilock_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

// multiSlack allows for a busy machine.
const multiSlack = 2500 * time.Millisecond

func multiNothing(context.Context) error { return nil }

// multiWaits waits until a Multi waits for a member of one of these clients and is subscribed
// to its channel.
func multiWaits(t *testing.T, clients ...*redlatch.Client) {
	t.Helper()
	harness.Eventually(t, 10*time.Second, "the lock is waited for", func() bool {
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

// multiForeign is a Locker of another module.
type multiForeign struct{ lock.Locker }

// multiEmbeds is a Locker of another module that embeds a lock of this one.
type multiEmbeds struct{ *multiEmbedded }

type multiEmbedded = rlock.Lock

// multiRunID returns the identity of a server.
func multiRunID(t *testing.T, s *testserver.Server) string {
	t.Helper()
	info, err := testserver.Info(s.Addr, "server")
	require.NoError(t, err)
	return info["run_id"]
}

// multiKind is a kind of member and a lock that excludes it.
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
		name: "redlock", of: func(c *redlatch.Client, name string) lock.Locker { return c.RedLock(c.Lock(name)) },
		bar: multiLock,
	},
}

// multiMember is a member and the same lock of another client.
type multiMember struct {
	name string
	l    lock.Locker
	bar  lock.Locker
	addr string
}

// multiOfAll returns members of every kind, some of a second client and some on a second
// server, and their clients. The first client creates the Multi.
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

// multiStart acquires a lock in the background.
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

// multiGot returns the hold that was acquired.
func multiGot(t *testing.T, got <-chan lock.Hold) lock.Hold {
	t.Helper()
	select {
	case h := <-got:
		require.NotNil(t, h)
		return h
	case <-time.After(4 * time.Second): // a waiter polls after 5 s
		require.FailNow(t, "the next waiter does not acquire it")
		return nil
	}
}

// multiLost returns the loss of a hold, which must happen within d.
func multiLost(t *testing.T, h lock.Hold, d time.Duration) *lock.LostError {
	t.Helper()
	select {
	case <-h.Context().Done():
	case <-time.After(d):
		require.FailNow(t, "the hold is not lost")
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

// multiFree fails the test unless all members except one are free.
func multiFree(t *testing.T, all []multiMember, but int) {
	t.Helper()
	for i, m := range all {
		if i == but {
			continue
		}
		// A release whose reply was lost may still be under way.
		h, err := m.bar.Lock(t.Context(), lock.Wait(2*time.Second))
		require.NoError(t, err, m.name)
		require.NoError(t, h.Unlock(t.Context()))
	}
}

// multiFields returns the fields of a lock's hash, which are its owners.
func multiFields(t *testing.T, addr, name string) []string {
	t.Helper()
	fields, err := testserver.Query(addr, "HKEYS", name)
	require.NoError(t, err)
	return fields
}

func multiEmpty(t *testing.T, servers ...*testserver.Server) {
	t.Helper()
	for _, s := range servers {
		tokens, err := testserver.Query(s.Addr, "KEYS", "redisson_lock_token:*") // fencing counters stay
		require.NoError(t, err)
		for _, key := range tokens {
			harness.Do(t, s.Addr, "DEL", key)
		}
		harness.NothingLeft(t, s.Addr)
	}
}
