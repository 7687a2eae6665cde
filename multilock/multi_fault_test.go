package multilock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
	"github.com/redlatch/redlatch/rlock"
)

// A caller that leaves while it holds members does not wait for a silent server to release them.
func TestMultiLeavesASilentServerAtOnce(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		theirs := multiMust(t, s.Client(t).Lock("b"))
		w := harness.StartLock(t, t.Context(), c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c")))
		synctest.Wait()
		require.True(t, s.Exists("a"))

		answers := make(chan struct{})
		s.Server().SetPreHook(func(*server.Peer, string, ...string) bool { <-answers; return false })
		began := time.Now()
		w.Leave()
		require.LessOrEqual(t, time.Since(began), 2*session.Grace)

		close(answers)
		require.NoError(t, theirs.Unlock(t.Context()))
		virtuallyEmpty(t, s)
	})
}

// The error of a refused request names the member, and the other members are released.
func TestMultiMemberRefused(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		for _, bad := range []string{"a", "b", "c"} {
			harness.Do(t, s.Addr, "SET", bad, "precious")
			for _, m := range []*multilock.Multi{
				c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c")),
				c.MultiLock(c.FencedLock("a"), c.Lock("b"), c.FencedLock("c")),
			} {
				for _, take := range []func(ctx context.Context, opts ...lock.Option) (lock.Hold, error){m.Lock, harness.Take(m, true)} {
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

func TestMultiWithoutPermission(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		as := func(user string) *redlatch.Client {
			c, err := redlatch.Open(t.Context(), "redis://"+user+":secret@"+s.Addr)
			require.NoError(t, err)
			t.Cleanup(c.Close)
			return c
		}
		users := []string{"partial"}
		harness.Do(t, s.Addr, "ACL", "SETUSER", "partial", "on", ">secret", "+@all", "allchannels", "~a", "~b")
		// A user that may set expiries for the first member only gets as far as the second. Before Redis 7.0
		// there are no such users.
		reply, err := testserver.Command(s.Addr, "ACL", "SETUSER", "halfway", "on", ">secret", "+@all", "-pexpire", "allkeys", "allchannels", "(+pexpire ~a)")
		require.NoError(t, err)
		if reply == "+OK" {
			users = append(users, "halfway")
		}
		for _, user := range users {
			c := as(user)
			m := c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c"))
			for _, take := range []func(ctx context.Context, opts ...lock.Option) (lock.Hold, error){m.Lock, harness.Take(m, true)} {
				_, err := take(t.Context())
				require.Error(t, err)
				require.NotErrorIs(t, err, lock.ErrNotAcquired)
				require.NotErrorIs(t, err, lock.ErrIndeterminate)
				require.Equal(t, ":0", harness.Do(t, s.Addr, "DBSIZE"))
			}
		}

		// A user that may not identify the server leaves a mark there, which all such users
		// share.
		harness.Do(t, s.Addr, "ACL", "SETUSER", "blind", "on", ">secret", "+@all", "allkeys", "allchannels", "-info")
		blind, same := as("blind"), as("blind")
		there := harness.Client(t, harness.Server(t, shared.Program))
		require.NoError(t, blind.MultiLock(blind.Lock("a"), there.Lock("a")).Do(t.Context(), multiNothing))
		require.NoError(t, blind.MultiLock(blind.Lock("a"), same.Lock("b")).Do(t.Context(), multiNothing))
		_, err = blind.MultiLock(blind.Lock("a"), same.Lock("a")).TryLock(t.Context())
		require.ErrorIs(t, err, lock.ErrInvalid)
		keys, err := testserver.Query(s.Addr, "KEYS", "*")
		require.NoError(t, err)
		require.Len(t, keys, 1)
		ttl := harness.PTTL(t, s.Addr, keys[0])
		require.Greater(t, ttl, time.Minute.Milliseconds())
		require.LessOrEqual(t, ttl, (2 * time.Minute).Milliseconds())
	})
}

// The servers are identified once in a while, not on every acquisition.
func TestMultiIdentifiesServersOnce(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, second := s.Client(t), s.Client(t)
		s.Reset()
		for range 3 {
			require.NoError(t, c.MultiLock(c.Lock("a"), c.FairLock("b")).Do(t.Context(), multiNothing))
		}
		require.Zero(t, s.Calls("info"), "one server")
		for range 3 {
			require.NoError(t, c.MultiLock(c.Lock("a"), second.Lock("b")).Do(t.Context(), multiNothing))
		}
		require.Equal(t, 2, s.Calls("info"))
	})
}

// A failure to identify a server in time is not cached: two locks of one server are recognized
// as soon as the server responds.
func TestServersAreIdentifiedAgain(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c1 := harness.Client(t, s)
		c2, g := harness.GatedClient(t, s)
		g.Stall()
		twice := c1.MultiLock(c1.Lock("a"), c2.Lock("a"))
		_, err := twice.Lock(t.Context(), lock.Wait(50*time.Millisecond))
		harness.NotAcquired(t, err)
		red := c1.RedLock([]lock.Locker{c1.Lock("b"), c2.Lock("b")}, multilock.Timeout(50*time.Millisecond))
		_, err = red.TryLock(t.Context())
		harness.NotAcquired(t, err)

		require.NoError(t, g.Open())
		harness.Eventually(t, 10*time.Second, "the server is identified again", func() bool {
			_, err := red.TryLock(t.Context())
			require.Error(t, err)
			return errors.Is(err, lock.ErrInvalid)
		})
		_, err = twice.Lock(t.Context(), lock.Wait(time.Minute))
		require.ErrorIs(t, err, lock.ErrInvalid)
		harness.NothingLeft(t, s.Addr)
	})
}

// The patience with a member grows until the waiters ahead have had their turns.
func TestMultiGetsItsTurn(t *testing.T) {
	const holders, turn = 6, 2500 * time.Millisecond
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c, other := s.Client(t), s.Client(t)
		ctx, stop := context.WithCancel(t.Context())
		var busy sync.WaitGroup
		defer busy.Wait()
		defer stop()
		for range holders {
			busy.Go(func() {
				for ctx.Err() == nil {
					_ = other.FairLock("busy").Do(ctx, func(context.Context) error { time.Sleep(turn); return nil })
				}
			})
		}
		synctest.Wait()

		// The first wait is of 10 s at most, the second of 20 s. The third is of 20 s at least, and
		// there are no more than six turns before it.
		h, err := c.MultiLock(c.RedLock([]lock.Locker{c.Lock("free")}), c.FairLock("busy")).Lock(t.Context(), lock.Wait(10*time.Second+20*time.Second+(holders+1)*turn))
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// Callers that disagree about the order of servers do not deadlock: a caller that has waited
// long releases its members. On one server it keeps them.
func TestMultiStartsOverWhereOrdersDiffer(t *testing.T) {
	const longest = 10 * time.Second // the wait for a member while others are held
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		second := virtualServer(t)
		c, same, there := s.Client(t), s.Client(t), second.Client(t)
		others := map[*harness.VirtualServer]*redlatch.Client{s: s.Client(t), second: second.Client(t)}
		require.NoError(t, c.MultiLock(c.Lock("a"), there.Lock("a")).Do(t.Context(), multiNothing))
		mark := func(s *harness.VirtualServer) string {
			mark, err := s.Get(wire.ServerMark)
			require.NoError(t, err)
			return mark
		}
		first, last, on, waitsOn := c, there, s, second
		if mark(second) < mark(s) {
			first, last, on, waitsOn = there, c, second, s
		}
		busy := []lock.Hold{multiMust(t, others[s].Lock("busy")), multiMust(t, others[waitsOn].Lock("late"))}

		var calls []*harness.Call[lock.Hold]
		for _, m := range []*multilock.Multi{
			c.MultiLock(c.Lock("a"), c.Lock("busy")),
			c.MultiLock(c.Lock("b"), same.Lock("busy")),
			c.MultiLock(c.RedLock([]lock.Locker{c.Lock("red")}), c.Lock("busy")),
			c.MultiLock(first.Lock("early"), last.Lock("late")),
		} {
			calls = append(calls, harness.StartLock(t, t.Context(), m))
		}
		began := time.Now()
		synctest.Wait()
		for _, held := range []bool{s.Exists("a"), s.Exists("b"), s.Exists("red"), on.Exists("early")} {
			require.True(t, held)
		}
		kept := func() (fields [][]string) {
			for _, name := range []string{"a", "b"} {
				of, err := s.HKeys(name)
				require.NoError(t, err)
				fields = append(fields, of)
			}
			return fields
		}
		before := kept()
		for _, l := range []*rlock.Lock{others[s].Lock("red"), others[on].Lock("early")} {
			h := multiMust(t, l, lock.Wait(3*longest+time.Second)) // the second may have started over already
			require.GreaterOrEqual(t, time.Since(began), longest/2)
			require.NoError(t, h.Unlock(t.Context()))
		}
		time.Sleep(time.Until(began.Add(longest + time.Second)))
		require.Equal(t, before, kept(), "they were acquired again")

		for _, h := range busy {
			require.NoError(t, h.Unlock(t.Context()))
		}
		for _, w := range calls {
			go func() {
				if assert.NoError(t, w.End()) {
					assert.NoError(t, w.Value.Unlock(context.Background()))
				}
			}()
		}
		virtuallyEmpty(t, s)
		virtuallyEmpty(t, second)
	})
}

// The pauses of a member panic while others are held. Nothing stays held.
func TestMultiOfAMemberWhoseBackoffPanics(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		h := multiMust(t, s.Client(t).Lock("b"))
		spin := c.SpinLock("b", func(int) time.Duration { panic("a bug") })
		m := c.MultiLock(c.Lock("a"), spin)
		require.PanicsWithValue(t, "a bug", func() { _, _ = m.Lock(t.Context()) })
		require.NoError(t, c.Lock("a").Do(t.Context(), multiNothing, lock.Wait(5*time.Second)))
		require.NoError(t, h.Unlock(t.Context()))
	})
}
