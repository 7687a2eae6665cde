package multilock_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

// multiSlack allows for a busy machine.
const multiSlack = 2500 * time.Millisecond

func multiNothing(context.Context) error { return nil }

// multiWaits waits until a Multi waits for a member of one of these clients and is subscribed
// to its channel.
func multiWaits(t *testing.T, clients ...*redlatch.Client) {
	t.Helper()
	harness.Eventually(t, 10*time.Second, "the lock is waited for", func() bool {
		for _, c := range clients {
			if hub := c.Stats().PubSub; hub.Subscribed < hub.Channels {
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

// multiGot returns the hold of a waiter that gets in before it polls.
func multiGot(t *testing.T, w *harness.Call[lock.Hold]) lock.Hold {
	t.Helper()
	require.NoError(t, w.EndWithin(4*time.Second))
	return w.Value
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

type lockOf = func(c *redlatch.Client, name string) lock.Locker

func plainLock(c *redlatch.Client, name string) lock.Locker  { return c.Lock(name) }
func keyLock(c *redlatch.Client, name string) lock.Locker    { return c.PlainLock(name) }
func fencedLock(c *redlatch.Client, name string) lock.Locker { return c.FencedLock(name) }
func fairLock(c *redlatch.Client, name string) lock.Locker   { return c.FairLock(name) }
func spinLock(c *redlatch.Client, name string) lock.Locker   { return c.SpinLock(name) }
func readLock(c *redlatch.Client, name string) lock.Locker   { return c.RWLock(name).Read() }
func writeLock(c *redlatch.Client, name string) lock.Locker  { return c.RWLock(name).Write() }

// multiKinds are the kinds of members, and what excludes each.
var multiKinds = []struct {
	name    string
	of, bar lockOf
}{
	{"lock", plainLock, plainLock},
	{"lock too", plainLock, plainLock},
	{"fenced", fencedLock, fencedLock},
	{"spin", spinLock, spinLock},
	{"fair", fairLock, fairLock},
	{"write", writeLock, writeLock},
	{"read", readLock, writeLock},
	{"redlock", func(c *redlatch.Client, name string) lock.Locker { return c.RedLock([]lock.Locker{c.Lock(name)}) }, plainLock},
}

// multiMember is a member, and a lock of another client that excludes it.
type multiMember struct {
	name   string
	l, bar lock.Locker
}

// multiMembers returns members of the first n kinds, whose names begin like that.
func multiMembers(begin string, c, other *redlatch.Client, n int) (all []multiMember) {
	for _, k := range multiKinds[:n] {
		all = append(all, multiMember{begin + k.name, k.of(c, begin+k.name), k.bar(other, begin+k.name)})
	}
	return all
}

func multiLockers(all []multiMember) (members []lock.Locker) {
	for _, m := range all {
		members = append(members, m.l)
	}
	return members
}

// multiLost returns the loss of a hold, which must happen within d.
func multiLost(t *testing.T, h lock.Hold, d time.Duration) *lock.LostError {
	t.Helper()
	harness.Receive(t, d, "the loss of the hold", h.Context().Done())
	lost, ok := context.Cause(h.Context()).(*lock.LostError)
	require.True(t, ok)
	require.Zero(t, h.Remaining())
	return lost
}

// multiEmpty fails the test unless the servers are empty, but for fencing counters.
func multiEmpty(t *testing.T, servers ...*testserver.Server) {
	t.Helper()
	for _, s := range servers {
		tokens, err := testserver.Query(s.Addr, "KEYS", "redisson_lock_token:*")
		require.NoError(t, err)
		if len(tokens) > 0 {
			harness.Do(t, s.Addr, slices.Insert(tokens, 0, "DEL")...)
		}
		harness.NothingLeft(t, s.Addr)
	}
}

// virtuallyEmpty is multiEmpty for a server in virtual time, when what expires has expired.
func virtuallyEmpty(t *testing.T, s *harness.VirtualServer) {
	t.Helper()
	time.Sleep(5 * time.Minute)
	for _, key := range s.Keys() {
		require.Contains(t, key, "redisson_lock_token:")
	}
}

// virtualServer returns another server in the bubble of a test.
func virtualServer(t *testing.T) *harness.VirtualServer {
	t.Helper()
	s := &harness.VirtualServer{Miniredis: miniredis.NewMiniRedis()}
	conn, err := s.Dial() // starts it without a listener
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	t.Cleanup(s.Close)
	s.ClockTTL(true)
	return s
}
