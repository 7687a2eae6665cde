package multilock_test

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/redlatch/redlatch/rlock"
)

// multiSleeps waits until a waiter of a client has subscribed and makes no attempt.
func multiSleeps(t *testing.T, c *redlatch.Client) {
	t.Helper()
	harness.Eventually(t, 10*time.Second, "the waiter sleeps", func() bool {
		return c.PubSub().Subscribed > 0 && harness.Waiting(1, c)
	})
}

// A failed acquisition does not wait for a silent server, neither for the reply to its request
// nor for the release.
func TestMultiGivesUpInTimeOnASilentServer(t *testing.T) {
	const (
		wait  = 2 * time.Second
		slack = 1800 * time.Millisecond // less than the wait, which must not double
		leave = 700 * time.Millisecond  // less than the limit of the release while the caller waits
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
		harness.NotAcquired(t, <-done)
		require.Less(t, time.Since(begin), leave)

		// Nothing has been acquired yet.
		for _, m := range []lock.Locker{c.MultiLock(c.Lock("d"), c.Lock("e")), c.MultiLock(c.Lock("f"), second.Lock("g"))} {
			s.Resume() // a connection that is silent for 5 s is replaced, which takes time
			require.NoError(t, errors.Join(c.Ping(t.Context()), second.Ping(t.Context())))
			s.Pause()
			begin = time.Now()
			_, err := m.Lock(t.Context(), lock.Wait(wait))
			harness.NotAcquired(t, err)
			require.GreaterOrEqual(t, time.Since(begin), wait)
			require.Less(t, time.Since(begin), wait+slack)
		}
		s.Resume()
		require.NoError(t, theirs.Unlock(t.Context()))
		harness.NothingLeft(t, s.Addr)
	})
}

// The error of a refused request names the member, and the other members are released.
func TestMultiMemberRefused(t *testing.T) {
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

func TestMultiWithoutPermission(t *testing.T) {
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
		users := []string{"timeless", "partial"}
		// A user that may set expiries for the first member only gets as far as the second. Before Redis 7.0
		// there are no such users.
		reply, err := testserver.Command(s.Addr, "ACL", "SETUSER", "halfway", "on", ">secret", "+@all", "-pexpire", "allkeys", "allchannels", "(+pexpire ~a)")
		require.NoError(t, err)
		if reply == "+OK" {
			users = append(users, "halfway")
		}
		for _, user := range users {
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

		// A user that may not identify the server leaves a mark there, which all such users
		// share.
		blind, same := as("blind"), as("blind")
		there := harness.Client(t, harness.Own(t, shared.Program))
		require.NoError(t, blind.MultiLock(blind.Lock("a"), there.Lock("a")).Do(t.Context(), multiNothing))
		m := blind.MultiLock(blind.Lock("a"), same.Lock("b"))
		require.NoError(t, m.Do(t.Context(), multiNothing))
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
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, second, conn := harness.Client(t, s), harness.Client(t, s), harness.Conn(t, s.Addr)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		for range 3 {
			require.NoError(t, c.MultiLock(c.Lock("a"), c.FairLock("b")).Do(t.Context(), multiNothing))
		}
		require.Zero(t, harness.Commands(t, conn)["info"], "one server")
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		for range 3 {
			require.NoError(t, c.MultiLock(c.Lock("a"), second.Lock("b")).Do(t.Context(), multiNothing))
		}
		require.Equal(t, 2, harness.Commands(t, conn)["info"])
	})
}

// An acquisition of several locks does not overtake a local waiter for one of them.
func TestMultiDoesNotOvertakeAWaiterOfOneMember(t *testing.T) {
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
				// The waiters that came before it or during its last attempt.
				require.LessOrEqual(t, taken.Load()-before, int64(3*workers), name)
			}
		}
		close(stop)
		wg.Wait()
		harness.NothingLeft(t, s.Addr)
	})
}

// The patience with a member on another server grows until the waiters ahead have had their turns.
func TestMultiOfTwoServersGetsItsTurn(t *testing.T) {
	harness.Full(t)
	const holders, turn = 6, 2500 * time.Millisecond
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Server(t, s.Program)
		first, last := harness.Client(t, s), harness.Client(t, second)
		if multiRunID(t, second) < multiRunID(t, s) {
			first, last = last, first
		}
		ctx, stop := context.WithCancel(t.Context())
		var busy sync.WaitGroup
		for range holders {
			busy.Go(func() {
				for ctx.Err() == nil {
					_ = last.FairLock("busy").Do(ctx, func(context.Context) error {
						time.Sleep(turn) // this is the length of the work
						return nil
					})
				}
			})
		}
		harness.Waits(t, holders-1, last)
		// The first wait is of 10 s at most, the second of 20 s. The third is of 20 s at least, and
		// there are no more than six turns before it.
		h, err := first.MultiLock(first.Lock("free"), last.FairLock("busy")).Lock(t.Context(), lock.Wait(10*time.Second+20*time.Second+holders*turn+multiSlack))
		stop()
		require.NoError(t, err)
		require.NoError(t, h.Unlock(t.Context()))
		busy.Wait()
	})
}

// Callers that disagree about the order of servers do not deadlock: a caller that has waited
// long releases its members. On one server it keeps them.
func TestMultiStartsOverWhereOrdersDiffer(t *testing.T) {
	const longest = 10 * time.Second // the wait for a member while others are held
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		second := harness.Server(t, s.Program)
		c, same, other := harness.Client(t, s), harness.Client(t, s), harness.Client(t, s)
		there, others := harness.Client(t, second), harness.Client(t, second)
		first, last := c, others
		if multiRunID(t, second) < multiRunID(t, s) {
			first, last = there, other
		}
		lastToo := map[*redlatch.Client]*redlatch.Client{other: c, others: there}[last]
		busy := []lock.Hold{multiMust(t, other.Lock("busy")), multiMust(t, last.Lock("late"))}
		var got []<-chan lock.Hold
		for _, m := range []*multilock.Multi{
			c.MultiLock(c.Lock("a"), c.Lock("busy")),
			c.MultiLock(c.Lock("b"), same.Lock("busy")),
			c.MultiLock(c.RedLock(c.Lock("red")), c.Lock("busy")),
			c.MultiLock(first.Lock("early"), lastToo.Lock("late")),
		} {
			got = append(got, multiStart(t, m))
		}
		begin := time.Now()
		held := func(l *rlock.Lock) func() bool { return func() bool { return harness.IsLocked(t, l) } }
		early := first.Lock("early")
		for _, l := range []*rlock.Lock{c.Lock("a"), c.Lock("b"), c.Lock("red"), early} {
			harness.Eventually(t, longest/2, l.Name()+" is held", held(l))
		}
		kept := func() [][]string { return [][]string{multiFields(t, s.Addr, "a"), multiFields(t, s.Addr, "b")} }
		before := kept()
		for _, l := range []*rlock.Lock{other.Lock("red"), early} {
			h := multiMust(t, l, lock.Wait(3*longest+2*time.Second)) // the second may have started over already
			require.GreaterOrEqual(t, time.Since(begin), longest/2-time.Second)
			require.NoError(t, h.Unlock(t.Context()))
		}
		time.Sleep(time.Until(begin.Add(longest + time.Second)))
		require.Equal(t, before, kept(), "they were acquired again")
		for _, h := range busy {
			require.NoError(t, h.Unlock(t.Context()))
		}
		var done sync.WaitGroup
		for _, got := range got {
			done.Go(func() { assert.NoError(t, (<-got).Unlock(context.Background())) })
		}
		done.Wait()
		harness.NothingLeft(t, s.Addr)
	})
}

// A failure to identify a server in time is not cached: two locks of one server are recognized
// as soon as the server responds.
func TestServersAreIdentifiedAgain(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		g := harness.NewGate(t, s)
		c1, c2 := harness.Client(t, s), harness.ClientAt(t, []string{g.Addr})
		g.Stall()
		twice := c1.MultiLock(c1.Lock("a"), c2.Lock("a"))
		_, err := twice.Lock(t.Context(), lock.Wait(50*time.Millisecond))
		harness.NotAcquired(t, err)
		red := c1.RedLock(c1.Lock("b"), c2.Lock("b")).WithTimeout(50 * time.Millisecond)
		_, err = red.TryLock(t.Context())
		harness.NotAcquired(t, err)
		require.NoError(t, g.Open())
		harness.Eventually(t, 10*time.Second, "the server is identified again", func() bool {
			h, err := red.TryLock(t.Context())
			require.False(t, err == nil, "%v", h)
			return errors.Is(err, lock.ErrInvalid)
		})
		_, err = twice.Lock(t.Context(), lock.Wait(time.Minute))
		require.ErrorIs(t, err, lock.ErrInvalid)
		harness.NothingLeft(t, s.Addr)
	})
}

// A majority waits once for a server that has never responded, for the server timeout.
func TestRedWaitsOnceToIdentifySilentServers(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		silent := harness.NewGate(t, harness.Server(t, s.Program))
		c := harness.Client(t, s)
		red := c.RedLock(
			c.Lock("a"),
			harness.Client(t, harness.Server(t, s.Program)).Lock("a"),
			harness.ClientAt(t, []string{silent.Addr}).Lock("a"),
		)
		silent.Stall()
		for _, timeout := range []time.Duration{200 * time.Millisecond, 5 * time.Second} {
			began := time.Now()
			h, err := red.WithTimeout(timeout).Lock(t.Context())
			require.NoError(t, err)
			require.NoError(t, h.Unlock(t.Context()))
			require.Less(t, time.Since(began), 3*time.Second)
		}
		require.NoError(t, silent.Open())
	})
}

// The pauses of a member panic while others are held. Nothing stays held.
func TestMultiOfAMemberWhoseBackoffPanics(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		h, err := harness.Client(t, s).Lock("b").Lock(t.Context())
		require.NoError(t, err)
		spin := c.SpinLock("b", rlock.WithBackoff(func(int) time.Duration { panic("a bug") }))
		m := c.MultiLock(c.Lock("a"), spin)
		require.PanicsWithValue(t, "a bug", func() { _, _ = m.Lock(t.Context()) })
		require.NoError(t, c.Lock("a").Do(t.Context(), func(context.Context) error { return nil }, lock.Wait(5*time.Second)))
		require.NoError(t, h.Unlock(t.Context()))
	})
}
