package countdown_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/countdown"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
)

const (
	safetyPoll = 5 * time.Second
	slack      = 2 * time.Second
)

const (
	readLua      = "read.lua"
	setLua       = "try_set_count.lua"
	countDownLua = "count_down.lua"
	deleteLua    = "delete.lua"
)

// script returns the files of a script.
func script(file string) []string {
	if file == readLua {
		return []string{file}
	}
	return []string{"count.lua", file}
}

// sha returns the hash of a script.
func sha(t testing.TB, file string) string { return harness.SHA(t, script(file)...) }

// warmUp loads the scripts, so that each request is one command.
func warmUp(t testing.TB, s *testserver.Server) {
	t.Helper()
	for _, file := range []string{readLua, setLua, countDownLua, deleteLua} {
		harness.Load(t, s.Addr, script(file)...)
	}
}

// java does what a Java client would do.
func java(t testing.TB, s *testserver.Server, do string, n int) {
	t.Helper()
	args := []string{do, "PUBLISH", wire.LatchChannel(key), strconv.Itoa(n)}
	require.NoError(t, javaScript.Exec(t.Context(), harness.Conn(t, s.Addr), []string{key}, args).Error())
}

// The outcome of a request is unknown to a caller that cancels it.
func TestCancelledInFlight(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		warmUp(t, s)
		c, g := harness.GatedClient(t, s)
		for what, file := range map[string]string{"TrySetCount": setLua, "CountDown": countDownLua, "Delete": deleteLua} {
			ctx, cancel := context.WithCancelCause(t.Context())
			done := make(chan error, 1)
			g.Keep(t, sha(t, file), 1, func() { go func() { done <- operations(c.CountDownLatch(key))[what](ctx) }() })
			gone := errors.New("gone")
			cancel(gone)

			err := ended(t, done, soon)
			require.ErrorIs(t, err, lock.ErrIndeterminate, what)
			require.ErrorIs(t, err, gone, what)
			require.ErrorContains(t, err, "may or may not have", what)
			require.NoError(t, g.Open())
		}
	})
}

// Close waits briefly for the reply to a request in flight.
func TestClosedInFlight(t *testing.T) {
	for _, answered := range []bool{false, true} {
		t.Run(map[bool]string{false: "no answer", true: "answered"}[answered], func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				warmUp(t, s)
				c, g := harness.GatedClient(t, s)
				done := make(chan error, 1)
				g.Keep(t, sha(t, countDownLua), 1, func() {
					go func() { _, err := c.CountDownLatch(key).CountDown(context.Background()); done <- err }()
				})
				closed := make(chan struct{})
				go func() { defer close(closed); c.Close() }()
				over, cancel := context.WithCancel(t.Context())
				cancel() // the server does not answer
				harness.Eventually(t, soon, "the client is closing", func() bool { return errors.Is(c.Ping(over), lock.ErrClosed) })
				if answered {
					require.NoError(t, g.Open())
					require.NoError(t, ended(t, done, soon))
				} else {
					err := ended(t, done, soon)
					require.ErrorIs(t, err, lock.ErrIndeterminate)
					require.ErrorIs(t, err, lock.ErrClosed)
					require.NoError(t, g.Open())
				}
				<-closed
			})
		})
	}
}

// All waiters that arrive during a read share the next one, and the one after a message.
func TestReadsAreShared(t *testing.T) {
	const waiters = 200
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		warmUp(t, s)
		c, g := harness.GatedClient(t, s)
		l, other := c.CountDownLatch(key), harness.Client(t, s).CountDownLatch(key)
		setCount(t, other, 1)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		reached := g.Arm(harness.KeepReply, sha(t, readLua), 1)
		all := []<-chan error{wait(t.Context(), l)}
		harness.Reached(t, reached)
		for range waiters - 1 {
			all = append(all, wait(t.Context(), l))
		}
		harness.Eventually(t, soon, "all waiters have joined", func() bool { return countdown.Unread(l) == waiters })
		require.NoError(t, g.Open())
		waitForParked(t, c, key, waiters)
		conn := harness.Conn(t, s.Addr)
		// Each read is a script: one for the first waiter, one for the others, and one
		// for the messages published before the subscription.
		require.LessOrEqual(t, harness.Commands(t, conn)["evalsha"], 4)
		require.LessOrEqual(t, harness.Commands(t, conn)["subscribe"], 4)

		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		countDown(t, other, 0)
		for _, done := range all {
			requireReleased(t, done, soon)
		}
		calls := harness.Commands(t, conn)
		require.Equal(t, 1, calls["publish"])
		// One that counts, a read, and another if the safety poll was due.
		require.LessOrEqual(t, calls["evalsha"], 3)
	})
}

func TestLostSubscriberConnections(t *testing.T) {
	const rounds = 5
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		warmUp(t, s)
		c, other := harness.Client(t, s), harness.Client(t, s).CountDownLatch(key)
		for i := range rounds {
			setCount(t, other, 1)
			done := wait(t.Context(), c.CountDownLatch(key))
			waitForParked(t, c, key, 1)
			// The message has no receiver.
			conn := harness.Conn(t, s.Addr)
			for _, resp := range conn.DoMulti(t.Context(),
				conn.B().Arbitrary("MULTI").Build(),
				conn.B().Arbitrary("CLIENT", "KILL", "TYPE", "pubsub").Build(),
				conn.B().Arbitrary("EVALSHA").Args(sha(t, countDownLua), "3").
					Keys(key, wire.LatchRound(key), countdown.CachedReply(key, strconv.Itoa(i))).
					Args("30000", "PUBLISH", wire.LatchChannel(key), "0", "1").Build(),
				conn.B().Arbitrary("EXEC").Build(),
			) {
				require.NoError(t, resp.Error())
			}
			requireReleased(t, done, soon)
			conn.Close()
		}
	})
}

// A wait outlasts an outage of the server. One that ends meanwhile has the server's error.
func TestServerLost(t *testing.T) {
	const timeout = 300 * time.Millisecond // of the watchdog
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		l := c.CountDownLatch(key)
		setCount(t, l, 1)
		before := wait(t.Context(), l)
		waitForParked(t, c, key, 1)
		s.Kill()
		meanwhile := wait(t.Context(), l)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		err := l.Wait(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, lock.ErrUnavailable)
		require.ErrorContains(t, err, "refused")
		require.Empty(t, before)
		require.Empty(t, meanwhile)

		require.NoError(t, s.Restart()) // without the count
		requireReleased(t, before, 2*safetyPoll)
		requireReleased(t, meanwhile, 2*safetyPoll)
	})
}

// A request that the server has refused temporarily is repeated.
func TestTemporaryRefusal(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		l := harness.Client(t, s).CountDownLatch(key)
		other := harness.Client(t, s).CountDownLatch(key)
		full := func(bytes string) { harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", bytes) }
		during := func(op func() error) {
			t.Helper()
			full("1")
			done := make(chan error, 1)
			go func() { done <- op() }()
			select {
			case err := <-done:
				require.FailNow(t, "not retried", "%v", err)
			case <-time.After(300 * time.Millisecond):
			}
			full("0")
			requireReleased(t, done, soon)
		}
		during(func() error { _, err := l.TrySetCount(context.Background(), 3); return err })
		requireCount(t, other, 3)
		during(func() error { _, err := l.CountDown(context.Background()); return err })
		requireCount(t, other, 2)

		full("1") // deleting needs no memory
		deleted, err := l.Delete(t.Context())
		require.NoError(t, err)
		require.True(t, deleted)
		full("0")
		requireCount(t, other, 0)
	})
}

// What the user of the server may not do is an error at once, and changes nothing.
func TestForbidden(t *testing.T) {
	all := []string{"TrySetCount", "TrySetCountFor", "CountDown", "CountDownN", "Delete", "Wait", "WaitChan"}
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		for _, tt := range []struct {
			name    string
			rules   []string
			refused []string
		}{
			{"no pttl", []string{"-pttl"}, []string{"Wait", "WaitChan"}},
			{"no round key", []string{"resetkeys", "~" + key}, all},
			{"no del", []string{"-del"}, []string{"CountDown", "CountDownN", "Delete"}},
		} {
			t.Run(tt.name, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				rules := []string{"ACL", "SETUSER", "app", "reset", "on", ">secret", "+@all", "allkeys", "allchannels"}
				harness.Do(t, s.Addr, append(rules, tt.rules...)...)
				c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}, Username: "app", Password: "secret"},
					redlatch.WithLogger(slog.New(slog.DiscardHandler)), redlatch.WithoutStartupChecks())
				require.NoError(t, err)
				defer c.Close()
				setCount(t, harness.Client(t, s).CountDownLatch(key), 1)
				before := dump(t, s)

				for _, what := range tt.refused {
					begin := time.Now()
					err := operations(c.CountDownLatch(key))[what](t.Context())
					var refusal *rueidis.RedisError
					require.ErrorAs(t, err, &refusal, what)
					require.NotErrorIs(t, err, lock.ErrIndeterminate, what)
					require.Less(t, time.Since(begin), soon, what)
					require.Equal(t, before, dump(t, s), what)
				}
			})
		}
	})
}

// A borrowed connection without timeouts does not block the client forever.
func TestBorrowedConnectionWithoutTimeout(t *testing.T) {
	const (
		replyTimeout = 3 * time.Second // of a request
		maxRetry     = time.Second     // pause before the next read
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		warmUp(t, s)
		g := harness.NewGate(t, s)
		conn, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{g.Addr}, DisableCache: true, ConnWriteTimeout: time.Hour, Dialer: net.Dialer{KeepAlive: -1},
			PipelineMultiplex: -1, // one connection
		})
		require.NoError(t, err)
		defer conn.Close()
		c, err := redlatch.Wrap(t.Context(), conn)
		require.NoError(t, err)
		defer c.Close()
		l, other := c.CountDownLatch(key), harness.Client(t, s).CountDownLatch(key)
		setCount(t, l, 2)

		reached := g.Arm(harness.KeepReply, sha(t, countDownLua), 1)
		begin := time.Now()
		_, err = l.CountDown(t.Context())
		require.ErrorIs(t, err, lock.ErrIndeterminate)
		require.NotErrorIs(t, err, lock.ErrClosed)
		require.Less(t, time.Since(begin), 2*replyTimeout+slack) // the cancellation has no reply either
		harness.Reached(t, reached)
		require.NoError(t, g.Open())
		requireCount(t, other, 1)

		// Nor does it keep a waiter from reading again.
		reached = g.Arm(harness.KeepReply, sha(t, readLua), 1)
		done := wait(t.Context(), l)
		harness.Reached(t, reached)
		direct := harness.Conn(t, s.Addr)
		before := harness.Commands(t, direct)["evalsha"]
		harness.Eventually(t, replyTimeout+maxRetry+slack, "the read times out and another begins", func() bool {
			return harness.Commands(t, direct)["evalsha"] > before
		})
		require.NoError(t, g.Open())
		waitForParked(t, c, key, 1)
		countDown(t, other, 0)
		requireReleased(t, done, soon)
	})
}
