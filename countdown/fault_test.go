package countdown_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
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
	"github.com/redlatch/redlatch/pubsub"
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

// reach waits until a gate is reached.
func reach(t testing.TB, reached <-chan struct{}) {
	t.Helper()
	select {
	case <-reached:
	case <-time.After(10 * time.Second):
		require.FailNow(t, "the request was not sent")
	}
}

// java does what a Java client would do.
func java(t testing.TB, s *testserver.Server, do string, n int) int64 {
	t.Helper()
	script, err := os.ReadFile("testdata/java.lua")
	require.NoError(t, err)
	conn := harness.Conn(t, s.Addr)
	defer conn.Close()
	reply, err := wire.NewScript(string(script)).Exec(context.Background(), conn, []string{key},
		[]string{do, "PUBLISH", wire.LatchChannel(key), strconv.Itoa(n)}).AsInt64()
	require.NoError(t, err)
	return reply
}

// The outcome of a request is unknown to a caller that cancels it.
func TestCancelledInFlight(t *testing.T) {
	gone := errors.New("gone")
	files := map[string]string{"TrySetCount": setLua, "TrySetCountFor": setLua, "CountDown": countDownLua, "CountDownN": countDownLua, "Delete": deleteLua}
	for what, file := range files {
		t.Run(what, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				warmUp(t, s)
				c, g := harness.GatedClient(t, s)
				ctx, cancel := context.WithCancelCause(t.Context())
				reached := g.Arm(harness.KeepReply, sha(t, file), 1)
				done := make(chan error, 1)
				go func() { done <- operations(c.CountDownLatch(key))[what](ctx) }()
				reach(t, reached)
				cancel(gone)
				err := ended(t, done, soon)
				require.ErrorIs(t, err, lock.ErrIndeterminate)
				require.ErrorIs(t, err, gone)
				require.ErrorContains(t, err, "may or may not have")
			})
		})
	}
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

// All waiters that arrive during a read share the next one.
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
		reach(t, reached)
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
		countDown(t, other, 0)
		for _, done := range all {
			requireReleased(t, done, soon)
		}
	})
}

func TestLostSubscriberConnections(t *testing.T) {
	const rounds = 20
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

// A wait on a lost server ends after the watchdog timeout.
func TestServerLost(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		l := c.CountDownLatch(key)
		setCount(t, l, 1)
		done := wait(t.Context(), l)
		waitForParked(t, c, key, 1)
		bounded, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		s.Kill()
		begin := time.Now()
		late := wait(bounded, l)
		err := ended(t, late, timeout+10*time.Second)
		require.GreaterOrEqual(t, time.Since(begin), timeout)
		require.Error(t, err)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.Error(t, ended(t, done, safetyPoll+timeout+10*time.Second))
		// A wait that ends earlier includes the server's error.
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		err = l.Wait(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "refused")
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

		full("1")
		var err error
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			_, err = l.CountDown(ctx)
			cancel()
			if !errors.Is(err, lock.ErrIndeterminate) { // else an attempt was under way when ctx ended
				break
			}
		}
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "OOM")
		require.NotErrorIs(t, err, lock.ErrIndeterminate)
		begin := time.Now()
		_, err = l.CountDown(t.Context())
		require.ErrorContains(t, err, "OOM")
		require.NotErrorIs(t, err, lock.ErrIndeterminate)
		require.Less(t, time.Since(begin), 5*time.Second+slack)
		// Deleting needs no memory.
		deleted, err := l.Delete(t.Context())
		require.NoError(t, err)
		require.True(t, deleted)
		full("0")
		requireCount(t, other, 0)
	})
}

// A request that could not be sent is sent after the server's restart.
func TestCountDownAfterServerRestart(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		l := harness.Client(t, s).CountDownLatch(key)
		setCount(t, l, 2)
		harness.Do(t, s.Addr, "SAVE")
		s.Kill()
		harness.Eventually(t, soon, "the connection is lost", func() bool {
			_, err := l.Count(context.Background())
			return err != nil && wire.OutcomeOf(err) == wire.Passing
		})
		done := make(chan error, 1)
		go func() { _, err := l.CountDown(context.Background()); done <- err }()
		select {
		case err := <-done:
			require.FailNow(t, "not retried", "%v", err)
		case <-time.After(200 * time.Millisecond):
		}
		require.NoError(t, s.Restart())
		requireReleased(t, done, 10*time.Second)
		requireCount(t, l, 1)
	})
}

func TestForbidden(t *testing.T) {
	all := []string{"TrySetCount", "TrySetCountFor", "CountDown", "CountDownN", "Delete", "Wait", "WaitChan"}
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		for _, tt := range []struct {
			name    string
			rules   []string
			refused []string // failing operations; if empty, all work, if more slowly
		}{
			{"no publish", []string{"-publish"}, nil},
			{"no subscribe", []string{"-subscribe"}, nil},
			{"no channels", []string{"resetchannels"}, nil},
			{"no pttl", []string{"-pttl"}, []string{"Wait", "WaitChan"}},
			{"no scripts", []string{"-@scripting"}, all},
			{"no round key", []string{"resetkeys", "~" + key}, all},
			{"no del", []string{"-del"}, []string{"CountDown", "CountDownN", "Delete"}},
		} {
			t.Run(tt.name, func(t *testing.T) {
				t.Parallel()
				s := harness.Own(t, shared.Program)
				harness.Do(t, s.Addr, append([]string{"ACL", "SETUSER", "app", "on", ">secret", "+@all", "allkeys", "allchannels"}, tt.rules...)...)
				c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}, Username: "app", Password: "secret"},
					redlatch.WithLogger(slog.New(slog.DiscardHandler)), redlatch.WithoutStartupChecks())
				require.NoError(t, err)
				defer c.Close()
				l := c.CountDownLatch(key)
				if len(tt.refused) > 0 {
					setCount(t, harness.Client(t, s).CountDownLatch(key), 1)
					before := dump(t, s)
					for _, what := range tt.refused {
						begin := time.Now()
						err := operations(l)[what](t.Context())
						var refusal *rueidis.RedisError
						require.ErrorAs(t, err, &refusal, what)
						require.NotErrorIs(t, err, lock.ErrIndeterminate, what)
						require.Less(t, time.Since(begin), soon, what)
						require.Equal(t, before, dump(t, s), what)
					}
					return
				}
				setCount(t, l, 2)
				countDown(t, l, 1)
				done := wait(t.Context(), l)
				harness.Eventually(t, soon, "it waits without reading", func() bool { return countdown.Latches(l) == 1 && countdown.Unread(l) == 0 })
				requireWaiting(t, done)
				countDown(t, l, 0)
				requireReleased(t, done, safetyPoll+slack)
				nothingLeft(t, s)
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
		reach(t, reached)
		require.NoError(t, g.Open())
		requireCount(t, other, 1)

		// Nor does it keep a waiter from reading again.
		reached = g.Arm(harness.KeepReply, sha(t, readLua), 1)
		done := wait(t.Context(), l)
		reach(t, reached)
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

func TestClusterMessages(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		for _, mode := range harness.PubSubModes(t, cluster) {
			t.Run(mode.String(), func(t *testing.T) {
				c := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				other := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				for _, name := range []string{key, "{app}:import"} {
					if mode == pubsub.Sharded && name != key { // the channel has another slot
						for what, op := range operations(c.CountDownLatch(name)) {
							require.ErrorIs(t, op(t.Context()), lock.ErrInvalid, what)
						}
						continue
					}
					setCount(t, other.CountDownLatch(name), 1)
					done := wait(t.Context(), c.CountDownLatch(name))
					waitForParked(t, c, name, 1)
					countDown(t, other.CountDownLatch(name), 0)
					requireReleased(t, done, soon)
				}
			})
		}
	})
}
