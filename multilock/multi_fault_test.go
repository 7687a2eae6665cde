package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
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
)

// multiWarmUp makes a server know all scripts that locks are taken and released with.
func multiWarmUp(t *testing.T, s *testserver.Server) {
	t.Helper()
	c := harness.Client(t, s)
	several := multiMust(t, c.MultiLock(c.Lock("warm"), c.Lock("up")))
	require.NoError(t, several.Extend(t.Context(), time.Minute))
	require.NoError(t, several.Unlock(t.Context()))
	require.NoError(t, c.Lock("warm").Do(t.Context(), multiNothing))
	require.NoError(t, c.FencedLock("warm").Do(t.Context(), multiNothing))
	h := multiMust(t, c.Lock("warm"))
	require.NoError(t, h.Extend(t.Context(), time.Minute))
	require.NoError(t, h.Unlock(t.Context()))
	multiEmpty(t, s)
	c.Close()
}

// multiSleeps returns when a waiter of a client has subscribed and makes no attempt.
func multiSleeps(t *testing.T, c *redlatch.Client) {
	t.Helper()
	harness.Eventually(t, 10*time.Second, "it sleeps", func() bool {
		return c.PubSub().Subscribed > 0 && harness.Waiting(1, c)
	})
}

func TestMultiIsOneScript(t *testing.T) {
	ones := map[string]int{"evalsha": 1}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		multiWarmUp(t, s)
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		scripts := func(do func()) map[string]int {
			harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
			do()
			calls := harness.Commands(t, conn)
			for name := range calls {
				if !strings.HasPrefix(name, "eval") {
					delete(calls, name)
				}
			}
			return calls
		}
		m := c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c"))
		for _, take := range []func(ctx context.Context, opts ...lock.Option) (lock.Hold, error){m.Lock, m.TryLock} {
			for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Minute)}, {lock.MaxHold(time.Hour)}} {
				var h lock.Hold
				var err error
				sent := scripts(func() { h, err = take(t.Context(), opts...) })
				require.NoError(t, err)
				require.Equal(t, ones, sent, "to take them")
				for _, name := range []string{"a", "b", "c"} {
					require.Positive(t, harness.PTTL(t, s.Addr, name))
				}
				sent = scripts(func() { err = h.Extend(t.Context(), time.Hour) })
				require.NoError(t, err)
				require.Equal(t, ones, sent, "to extend them")
				sent = scripts(func() { err = h.Unlock(t.Context()) })
				require.NoError(t, err)
				require.Equal(t, ones, sent, "to release them")
			}
		}
		theirs := multiMust(t, harness.Client(t, s).Lock("c"))
		var err error
		sent := scripts(func() { _, err = m.TryLock(t.Context()) })
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.Equal(t, ones, sent, "to find that one is taken")
		require.NoError(t, theirs.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

func TestMultiInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		c, other := harness.ClientAt(t, cluster.Addrs()), harness.ClientAt(t, cluster.Addrs())
		scripts := func() (n int) {
			for _, node := range cluster.Primaries {
				stats, err := testserver.Info(node.Addr, "commandstats")
				require.NoError(t, err)
				var calls int
				if _, err := fmt.Sscanf(stats["cmdstat_evalsha"], "calls=%d,", &calls); err == nil {
					n += calls
				}
			}
			return n
		}
		reset := func() {
			for _, node := range cluster.Primaries {
				harness.Do(t, node.Addr, "CONFIG", "RESETSTAT")
			}
		}
		tagged := c.MultiLock(c.Lock("{order-7}:c"), c.Lock("{order-7}:b"), c.Lock("{order-7}:a"))
		require.NoError(t, tagged.Do(t.Context(), multiNothing)) // makes the scripts known
		reset()
		h := multiMust(t, tagged)
		require.Equal(t, 1, scripts())
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, 2, scripts())

		var names []string
		for i := range 9 {
			names = append(names, fmt.Sprint("name-", i))
		}
		names = append(names, "{order-7}:a", "{order-7}:b")
		of := func(c *redlatch.Client) (members []lock.Locker) {
			for _, name := range names {
				members = append(members, c.Lock(name))
			}
			return members
		}
		m := c.MultiLock(of(c)...)
		h = multiMust(t, m, lock.Lease(time.Minute))
		for _, l := range of(other) {
			_, err := l.TryLock(t.Context())
			require.ErrorIs(t, err, lock.ErrNotAcquired)
		}
		require.NoError(t, h.Extend(t.Context(), time.Hour))
		next := make(chan error, 1)
		go func() { next <- other.MultiLock(of(other)...).Do(context.Background(), multiNothing) }()
		multiSleeps(t, other)
		require.NoError(t, h.Unlock(t.Context()))
		require.NoError(t, <-next)
		theirs := multiMust(t, other.Lock(names[3]))
		_, err := m.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, theirs.Unlock(t.Context()))
		// Members through two clients of the same cluster are known to be one.
		_, err = c.MultiLock(c.Lock("a"), other.Lock("a")).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrInvalid)
		for _, node := range cluster.Primaries {
			harness.NothingLeft(t, node.Addr)
		}
	})
}

// Whichever member is lost, and however, the hold ends, says so, and gives the others back.
func TestMultiIsLostWithAnyMember(t *testing.T) {
	const timeout = 1500 * time.Millisecond // of the watchdog
	type way struct {
		name string
		soon bool // at once, and not with the next renewal
		lose func(t *testing.T, s *testserver.Server, c, other *redlatch.Client, owner lock.Owner)
	}
	ways := []way{
		{"deleted", false, func(t *testing.T, s *testserver.Server, _, _ *redlatch.Client, _ lock.Owner) {
			harness.Do(t, s.Addr, "DEL", "b")
		}},
		{"of another type", false, func(t *testing.T, s *testserver.Server, _, _ *redlatch.Client, _ lock.Owner) {
			harness.Do(t, s.Addr, "SET", "b", "precious", "PX", "2500")
		}},
		{"forced open here", true, func(t *testing.T, _ *testserver.Server, c, _ *redlatch.Client, _ lock.Owner) {
			_, err := c.Lock("b").ForceUnlock(t.Context())
			require.NoError(t, err)
		}},
		{"forced open elsewhere", false, func(t *testing.T, _ *testserver.Server, _, other *redlatch.Client, _ lock.Owner) {
			_, err := other.Lock("b").ForceUnlock(t.Context())
			require.NoError(t, err)
		}},
		{"unlocked by its owner here", true, func(t *testing.T, _ *testserver.Server, c, _ *redlatch.Client, o lock.Owner) {
			require.NoError(t, c.Lock("b").Unlock(lock.WithOwner(t.Context(), o)))
		}},
	}
	harness.EachOf(t, ways, func(w way) string { return w.name }, func(t *testing.T, s *testserver.Server, w way) {
		for _, named := range []bool{false, true} {
			if !named && strings.HasPrefix(w.name, "unlocked") {
				continue // nobody knows the owner
			}
			c, other := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout)), harness.Client(t, s)
			if w.soon {
				c = harness.Client(t, s) // the next renewal is far
			}
			owner := c.NewOwner()
			ctx := t.Context()
			if named {
				ctx = lock.WithOwner(ctx, owner)
			}
			h, err := c.MultiLock(c.Lock("a"), c.Lock("b"), c.FencedLock("c")).Lock(ctx)
			require.NoError(t, err)
			w.lose(t, s, c, other, owner)
			lost := multiLost(t, h, timeout/3+multiSlack)
			require.Equal(t, "a,b,c", lost.Name)
			require.Equal(t, lock.ReasonGone, lost.Reason)
			require.Equal(t, h.Owner(), lost.Owner)
			member, ok := lost.Err.(*lock.LostError)
			require.True(t, ok, "it does not say which member: %v", lost.Err)
			require.Equal(t, "b", member.Name)
			require.ErrorIs(t, h.Extend(t.Context(), time.Minute), lock.ErrLost)
			// The others are given back without Unlock.
			for _, l := range []lock.Locker{other.Lock("a"), other.FencedLock("c")} {
				require.NoError(t, l.Do(t.Context(), multiNothing, lock.Wait(multiSlack)))
			}
			require.Equal(t, error(lost), h.Unlock(t.Context()))
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrNotHeld)
			multiEmpty(t, s)
		}
	})
}

// Extend finds out, too; and Unlock, when nobody has noticed before.
func TestMultiFindsALossWhenItAsks(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		m := c.MultiLock(c.Lock("a"), c.Lock("b"), c.FencedLock("c"))
		for _, lost := range []string{"a", "b", "c"} {
			h := multiMust(t, m)
			harness.Do(t, s.Addr, "DEL", lost)
			err := h.Extend(t.Context(), time.Minute)
			require.ErrorIs(t, err, lock.ErrLost)
			require.ErrorContains(t, err, fmt.Sprintf("%q", lost))
			require.ErrorIs(t, h.Context().Err(), context.Canceled)
			require.Equal(t, context.Cause(h.Context()), h.Unlock(t.Context()))

			h = multiMust(t, m)
			harness.Do(t, s.Addr, "DEL", lost)
			err = h.Unlock(t.Context())
			require.ErrorIs(t, err, lock.ErrLost)
			require.ErrorContains(t, err, fmt.Sprintf("%q", lost))
			multiEmpty(t, s)
		}
		// What is there now is not b; the others are given back, and not lost.
		several := c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c"))
		h := multiMust(t, several)
		harness.Do(t, s.Addr, "SET", "b", "precious")
		err := h.Unlock(t.Context())
		require.ErrorContains(t, err, `lock lost: "b"`)
		require.NotContains(t, err.Error(), `lost: "a"`)
		require.NotContains(t, err.Error(), `lost: "c"`)
		require.Equal(t, ":1", harness.Do(t, s.Addr, "DEL", "b"))
		harness.NothingLeft(t, s.Addr)
		// By the time Unlock says that it was lost, the others are free.
		for range harness.Size(10, 50) {
			h := multiMust(t, several)
			_, err := c.Lock("b").ForceUnlock(t.Context())
			require.NoError(t, err)
			<-h.Context().Done()
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
		}

		h = multiMust(t, m)
		harness.Do(t, s.Addr, "FLUSHALL")
		err = h.Unlock(t.Context())
		for _, name := range []string{"a", "b", "c"} {
			require.ErrorContains(t, err, fmt.Sprintf("lock lost: %q", name))
		}
	})
}

func TestMultiWhoseServerIsKilled(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Own(t, s.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		there := harness.Client(t, second, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s)
		h := multiMust(t, c.MultiLock(c.Lock("a"), there.Lock("b"), c.Lock("c")))
		second.Kill()
		lost := multiLost(t, h, timeout+multiSlack)
		require.Equal(t, lock.ReasonExpired, lost.Reason)
		require.ErrorContains(t, lost.Err, `"b"`)
		require.NoError(t, other.Lock("a").Do(t.Context(), multiNothing, lock.Wait(multiSlack)))
		require.NoError(t, other.Lock("c").Do(t.Context(), multiNothing, lock.Wait(multiSlack)))
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		// What is left of the whole is had by nobody meanwhile.
		_, err := c.MultiLock(c.Lock("a"), there.Lock("b"), c.Lock("c")).TryLock(t.Context())
		require.Error(t, err)
		require.NotErrorIs(t, err, lock.ErrNotAcquired)
		harness.NothingLeft(t, s.Addr)
	})
}

// A server is killed while a member is waited for and others are held, which are given
// back: where they are on that server too there is nothing left of it.
func TestMultiWhoseServerIsKilledInTheMiddle(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Own(t, s.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		there := harness.Client(t, second, redlatch.WithWatchdogTimeout(timeout))
		theirs := multiMust(t, harness.Client(t, second, redlatch.WithWatchdogTimeout(time.Minute)).Lock("b"))
		done := make(chan error, 1)
		go func() {
			done <- c.MultiLock(c.Lock("a"), there.Lock("b"), c.Lock("c"), there.Lock("a")).Do(context.Background(), multiNothing)
		}()
		multiSleeps(t, there)
		second.Kill()
		select {
		// A waiter looks every 5 s, and is patient with the server for its timeout then.
		case err := <-done:
			require.Error(t, err)
			require.ErrorContains(t, err, "acquire")
		case <-time.After(12 * time.Second):
			require.FailNow(t, "it waits for ever")
		}
		harness.NothingLeft(t, s.Addr)
		require.NoError(t, second.Restart())
		require.Error(t, theirs.Unlock(t.Context()))
		require.NoError(t, c.MultiLock(c.Lock("a"), there.Lock("b")).Do(t.Context(), multiNothing, lock.Wait(5*time.Second)))
	})
}

func TestMultiWhoseClientIsClosed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const members = 200 // which do not end all in one moment
		for round := range harness.Size(4, 20) {
			mine := round > 0
			harness.Do(t, s.Addr, "FLUSHALL")
			c, second := harness.Client(t, s), harness.Client(t, s)
			all := []lock.Locker{second.Lock("of the second client")}
			for i := range members {
				all = append(all, c.Lock(fmt.Sprint(i)))
			}
			h := multiMust(t, c.MultiLock(all...))
			if mine {
				c.Close()
			} else {
				second.Close()
			}
			require.ErrorIs(t, multiLost(t, h, 5*time.Second), lock.ErrClosed)
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
			// The closed client leaves what it has to the leases, and the other nothing.
			left := ":1"
			if mine {
				left = fmt.Sprint(":", members)
			}
			require.Equal(t, left, harness.Do(t, s.Addr, "DBSIZE"))
			c.Close()
			second.Close()
		}
	})
}

// Whoever closes a client of an acquisition ends it, and nothing of it stays.
func TestMultiWhoseClientIsClosedWhileItWaits(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		other := harness.Client(t, s)
		theirs := multiMust(t, other.Lock("c"))
		for range harness.Size(2, 10) {
			for which := range 3 {
				clients := []*redlatch.Client{harness.Client(t, s), harness.Client(t, s), harness.Client(t, s)}
				m := clients[0].MultiLock(clients[1].Lock("a"), clients[0].FencedLock("b"), clients[1].Lock("aa"), clients[2].Lock("c"))
				done := make(chan error, 1)
				go func() {
					_, err := m.Lock(context.Background())
					done <- err
				}()
				multiSleeps(t, clients[2])
				clients[which].Close()
				select {
				case err := <-done:
					require.ErrorIs(t, err, lock.ErrClosed)
				case <-time.After(5 * time.Second):
					require.FailNow(t, "it waits for ever")
				}
				harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{b}")
				require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"))
				for _, c := range clients {
					c.Close()
				}
			}
		}
		require.NoError(t, theirs.Unlock(t.Context()))
	})
}

// A hold of a named owner, which this client finds by that, can be dropped all the same.
func TestMultiThatWasDropped(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var log harness.Log
		c := harness.Client(t, s, redlatch.WithLogger(log.Logger()))
		m := c.MultiLock(c.Lock("a"), c.Lock("b"), c.FencedLock("c"))
		func() {
			h, err := m.Lock(lock.WithOwner(t.Context(), c.NewOwner()))
			require.NoError(t, err)
			runtime.GC()
			require.Positive(t, h.Remaining())
		}()
		harness.Eventually(t, 10*time.Second, "everything is free", func() bool {
			runtime.GC()
			return !harness.IsLocked(t, c.Lock("a")) && !harness.IsLocked(t, c.Lock("b")) && !harness.IsLocked(t, c.FencedLock("c"))
		})
		require.Equal(t, 1, strings.Count(log.String(), "dropped without Unlock"), log.String())
		require.Contains(t, log.String(), "name=a,b,c")
		require.Zero(t, multilock.NamedHolds(m))
		multiEmpty(t, s)
	})
}

// Whoever gives up does not wait for a server that is silent: neither for what was asked
// nor until what was taken is given back.
func TestMultiGivesUpInTimeOnASilentServer(t *testing.T) {
	const (
		wait  = 2 * time.Second
		slack = 1800 * time.Millisecond // less than the wait, which is not to be doubled
		back  = time.Second             // for how long the release is waited for
	)
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c, second, other := harness.Client(t, s), harness.Client(t, s), harness.Client(t, s)
		multiWarmUp(t, s)
		m := c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c"))
		theirs := multiMust(t, other.Lock("b"))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := m.Lock(ctx)
			done <- err
		}()
		multiSleeps(t, c)
		s.Pause()
		defer s.Resume()
		begin := time.Now()
		cancel()
		require.ErrorIs(t, <-done, lock.ErrNotAcquired)
		require.Less(t, time.Since(begin), back+slack)

		// Nothing is taken yet.
		for _, m := range []lock.Locker{c.MultiLock(c.Lock("d"), c.Lock("e")), c.MultiLock(c.Lock("f"), second.Lock("g"))} {
			s.Resume() // a connection that is silent for 5 s is made anew, and that takes its time
			require.NoError(t, errors.Join(c.Ping(t.Context()), second.Ping(t.Context())))
			s.Pause()
			begin = time.Now()
			_, err := m.Lock(t.Context(), lock.Wait(wait))
			require.ErrorIs(t, err, lock.ErrNotAcquired)
			require.GreaterOrEqual(t, time.Since(begin), wait)
			require.Less(t, time.Since(begin), wait+slack)
		}
		s.Resume()
		require.NoError(t, theirs.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// A refusal of the server is an error that says of which member it is, and leaves
// nothing of the others.
func TestMultiOfAMemberThatIsRefused(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		names := []string{"a", "b", "c"}
		var plain, mixed []lock.Locker
		for i, name := range names {
			plain, mixed = append(plain, c.Lock(name)), append(mixed, c.Lock(name))
			if i%2 == 0 {
				mixed[i] = c.FencedLock(name)
			}
		}
		for _, bad := range names {
			harness.Do(t, s.Addr, "SET", bad, "precious")
			for _, m := range []lock.Locker{c.MultiLock(plain...), c.MultiLock(mixed...)} {
				for _, take := range []func(ctx context.Context, opts ...lock.Option) (lock.Hold, error){m.Lock, m.TryLock} {
					_, err := take(t.Context())
					require.ErrorContains(t, err, "WRONGTYPE")
					require.ErrorContains(t, err, fmt.Sprintf("acquire %q", bad))
					require.NotErrorIs(t, err, lock.ErrNotAcquired)
					require.NotErrorIs(t, err, lock.ErrIndeterminate)
					harness.Do(t, s.Addr, "DEL", "redisson_lock_token:{a}", "redisson_lock_token:{c}")
					require.Equal(t, ":1", harness.Do(t, s.Addr, "DBSIZE"))
				}
			}
			harness.Do(t, s.Addr, "DEL", bad)
		}
	})
}

func TestMultiWithoutTheRight(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "timeless", "on", ">secret", "+@all", "allkeys", "allchannels", "-pexpire")
		harness.Do(t, s.Addr, "ACL", "SETUSER", "mute", "on", ">secret", "+@all", "allkeys", "resetchannels")
		harness.Do(t, s.Addr, "ACL", "SETUSER", "blind", "on", ">secret", "+@all", "allkeys", "allchannels", "-info")
		harness.Do(t, s.Addr, "ACL", "SETUSER", "partial", "on", ">secret", "+@all", "allchannels", "~a", "~b")
		as := func(user string) *redlatch.Client {
			c, err := redlatch.Open(t.Context(), "redis://"+user+":secret@"+s.Addr)
			require.NoError(t, err)
			t.Cleanup(c.Close)
			return c
		}
		of := func(c *redlatch.Client) []lock.Locker { return []lock.Locker{c.Lock("a"), c.Lock("b"), c.Lock("c")} }
		// Who may set an expiry for the first alone gets to the second.
		harness.Do(t, s.Addr, "ACL", "SETUSER", "halfway", "on", ">secret", "+@all", "-pexpire", "allkeys", "allchannels", "(+pexpire ~a)")
		for _, user := range []string{"timeless", "partial", "halfway"} {
			c := as(user)
			m := c.MultiLock(of(c)...)
			for _, take := range []func(ctx context.Context, opts ...lock.Option) (lock.Hold, error){m.Lock, m.TryLock} {
				_, err := take(t.Context())
				require.Error(t, err)
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
				require.NotErrorIs(t, err, lock.ErrIndeterminate)
				require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
			}
		}
		c := as("mute")
		require.NoError(t, c.MultiLock(of(c)...).Do(t.Context(), multiNothing))

		// Who may not ask a server who it is leaves a mark there, which is the same for all
		// who may not.
		blind, same := as("blind"), as("blind")
		there := harness.Client(t, harness.Own(t, shared.Program))
		require.NoError(t, blind.MultiLock(blind.Lock("a"), there.Lock("a")).Do(t.Context(), multiNothing))
		m := blind.MultiLock(blind.Lock("a"), same.Lock("b"))
		require.NoError(t, m.Do(t.Context(), multiNothing))
		_, err := blind.MultiLock(blind.Lock("a"), same.Lock("a")).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrInvalid)
		keys, err := testserver.Query(s.Addr, "KEYS", "*")
		require.NoError(t, err)
		require.Len(t, keys, 1)
		ttl := harness.PTTL(t, s.Addr, keys[0])
		require.Greater(t, ttl, time.Minute.Milliseconds())
		require.LessOrEqual(t, ttl, (2 * time.Minute).Milliseconds())
	})
}

// What was taken may be gone when the last member is: then it is taken anew, or, where
// that was the only attempt, not acquired.
func TestMultiThatLostAMemberBeforeItHadAll(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Minute)}} {
			for _, once := range []bool{false, true} {
				c, g := harness.GatedClient(t, s)
				multiWarmUp(t, s)
				m := c.MultiLock(c.FencedLock("a"), c.FencedLock("b"))
				reached := g.Arm(harness.KeepReply, harness.SHA(t, "../rlock/acquire.lua"), 2)
				var h lock.Hold
				done := make(chan error, 1)
				go func() {
					var err error
					if once {
						h, err = m.TryLock(context.Background(), opts...)
					} else {
						h, err = m.Lock(context.Background(), opts...)
					}
					done <- err
				}()
				<-reached
				harness.Do(t, s.Addr, "DEL", "a")
				require.NoError(t, g.Open())
				err := <-done
				switch {
				case len(opts) == 0: // it is found by the next renewal
					require.NoError(t, err)
					require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
				case once:
					require.ErrorIs(t, err, lock.ErrNotAcquired)
				default:
					require.NoError(t, err)
					require.True(t, harness.IsLocked(t, c.FencedLock("a")))
					require.NoError(t, h.Unlock(t.Context()))
				}
				multiEmpty(t, s)
				c.Close()
			}
		}
	})
}

// One that was found lost while another was waited for is taken anew, too.
func TestMultiThatLostAMemberWhileItWaited(t *testing.T) {
	const timeout = 2 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s, redlatch.WithWatchdogTimeout(timeout))
		other := harness.Client(t, s)
		for _, opts := range [][]lock.Option{nil, {lock.Lease(time.Minute)}} {
			theirs := multiMust(t, other.Lock("c"))
			got := multiStart(t, c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c")), opts...)
			multiSleeps(t, c)
			harness.Do(t, s.Addr, "DEL", "a")
			if opts == nil { // else it is found in the end
				renewals := g.Scripts() // from now on
				harness.Eventually(t, timeout+multiSlack, "a renewal has been answered, and another has begun", func() bool {
					return g.Scripts() >= renewals+2
				})
			}
			require.NoError(t, theirs.Unlock(t.Context()))
			h := multiGot(t, got)
			require.NoError(t, h.Context().Err())
			for _, name := range []string{"a", "b", "c"} {
				require.True(t, harness.IsLocked(t, other.Lock(name)), name)
			}
			require.NoError(t, h.Unlock(t.Context()))
			harness.NothingLeft(t, s.Addr)
		}
	})
}

// Servers are asked who they are now and then, not every time.
func TestMultiAsksServersOnce(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, second, conn := harness.Client(t, s), harness.Client(t, s), harness.Conn(t, s.Addr)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		for range 3 {
			require.NoError(t, c.MultiLock(c.Lock("a"), c.FairLock("b")).Do(t.Context(), multiNothing))
		}
		require.Zero(t, harness.Commands(t, conn)["info"], "there is only one")
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		for range 3 {
			require.NoError(t, c.MultiLock(c.Lock("a"), second.Lock("b")).Do(t.Context(), multiNothing))
		}
		require.Equal(t, 2, harness.Commands(t, conn)["info"])
	})
}

// A waiter for one member is not passed by those of its process who take several.
func TestMultiDoesNotPassAWaiterOfOneMember(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		m := c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c"))
		const workers = 8
		stop := make(chan struct{})
		var wg sync.WaitGroup
		var taken atomic.Int64
		for range workers {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					assert.NoError(t, m.Do(context.Background(), multiNothing))
					taken.Add(1)
				}
			})
		}
		for range harness.Size(10, 50) {
			for _, name := range []string{"a", "b", "c"} {
				before := taken.Load()
				require.NoError(t, c.Lock(name).Do(t.Context(), multiNothing, lock.Wait(10*time.Second)))
				// Those who came before it, and while its last attempt was under way.
				require.LessOrEqual(t, taken.Load()-before, int64(3*workers), name)
			}
		}
		close(stop)
		wg.Wait()
		harness.NothingLeft(t, s.Addr)
	})
}

// Where the order is not the same for two, neither waits for ever.
func TestMultiStandsBackWhereOrdersDiffer(t *testing.T) {
	const longest = 10 * time.Second // that a member is waited for while others are held
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s)
		b := multiMust(t, other.Lock("b"))
		done := make(chan error, 1)
		begin := time.Now()
		go func() {
			done <- c.MultiLock(c.Lock("a"), c.Lock("b")).Do(context.Background(), multiNothing)
		}()
		multiSleeps(t, c)
		require.True(t, harness.IsLocked(t, other.Lock("a")))
		a, err := other.Lock("a").Lock(t.Context(), lock.Wait(longest+2*time.Second))
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(begin), longest/2)
		require.NoError(t, a.Unlock(t.Context()))
		require.NoError(t, b.Unlock(t.Context()))
		require.NoError(t, <-done)
		harness.NothingLeft(t, s.Addr)
	})
}

// At MaxHold the context ends, and who still works has the locks to itself until Unlock, or
// until their leases are over.
func TestMultiMaxHoldLeavesItsLocksToUnlock(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		names := []string{"a", "b", "c"}
		h, err := c.MultiLock(c.Lock("a"), c.Lock("b"), c.FairLock("c")).Lock(t.Context(), lock.MaxHold(200*time.Millisecond))
		require.NoError(t, err)
		require.Equal(t, lock.ReasonMaxHold, multiLost(t, h, multiSlack).Reason)
		other := harness.Client(t, s)
		for _, name := range names {
			_, err := other.Lock(name).Lock(t.Context(), lock.Wait(200*time.Millisecond))
			require.ErrorIs(t, err, lock.ErrNotAcquired, name)
		}
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		harness.NothingLeft(t, s.Addr)
	})
}

// A hold is of the client that has made it, also where its members are of others.
func TestMultiEndsWithTheClientThatMadeIt(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		maker, c := harness.Client(t, s), harness.Client(t, s, redlatch.WithWatchdogTimeout(3*time.Second))
		h, err := maker.MultiLock(c.Lock("a"), c.Lock("b")).Lock(t.Context())
		require.NoError(t, err)
		maker.Close()
		require.ErrorIs(t, multiLost(t, h, 5*time.Second), lock.ErrClosed)
		require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		harness.NothingLeft(t, s.Addr)
	})
}

// Who could not ask a server in time who it is does not take that for an answer: two locks
// of one server are found to be one as soon as it answers.
func TestServersAreAskedAgain(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		g := harness.NewGate(t, s)
		c1, c2 := harness.Client(t, s), harness.ClientAt(t, []string{g.Addr})
		g.Stall()
		twice := c1.MultiLock(c1.Lock("a"), c2.Lock("a"))
		_, err := twice.Lock(t.Context(), lock.Wait(50*time.Millisecond))
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		red := c1.RedLock(c1.Lock("b"), c2.Lock("b")).WithTimeout(50 * time.Millisecond)
		_, err = red.TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrNotAcquired)
		require.NoError(t, g.Open())
		harness.Eventually(t, 10*time.Second, "the server is asked again", func() bool {
			h, err := red.TryLock(t.Context())
			require.False(t, err == nil, "%v", h)
			return errors.Is(err, lock.ErrInvalid)
		})
		_, err = twice.Lock(t.Context(), lock.Wait(time.Minute))
		require.ErrorIs(t, err, lock.ErrInvalid)
		harness.NothingLeft(t, s.Addr)
	})
}

// A server that has never answered is not waited for either.
func TestRedDoesNotWaitToLearnWhoIsSilent(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		silent := harness.NewGate(t, harness.Server(t, s.Program))
		c := harness.Client(t, s)
		members := []lock.Locker{
			c.Lock("a"),
			harness.Client(t, harness.Server(t, s.Program)).Lock("a"),
			harness.ClientAt(t, []string{silent.Addr}).Lock("a"),
		}
		silent.Stall()
		began := time.Now()
		h, err := c.RedLock(members...).WithTimeout(5 * time.Second).Lock(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
		require.Less(t, time.Since(began), 3*time.Second)
		require.NoError(t, silent.Open())
	})
}
