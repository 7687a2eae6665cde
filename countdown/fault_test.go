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
	lookLua      = "look.lua"
	setLua       = "try_set_count.lua"
	countDownLua = "count_down.lua"
	deleteLua    = "delete.lua"
)

// script returns the files of a script.
func script(file string) []string {
	if file == lookLua {
		return []string{file}
	}
	return []string{"count.lua", file}
}

// sha returns the name that servers have for a script.
func sha(t testing.TB, file string) string { return harness.SHA(t, script(file)...) }

// warmUp makes a server know the scripts, so that a request is one command.
func warmUp(t testing.TB, s *testserver.Server) {
	t.Helper()
	for _, file := range []string{lookLua, setLua, countDownLua, deleteLua} {
		harness.Load(t, s.Addr, script(file)...)
	}
}

// reach waits for a gate.
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

// A caller who leaves while a request is under way does not know what became of it.
func TestCancelledInFlight(t *testing.T) {
	gone := errors.New("gone")
	files := map[string]string{"TrySetCount": setLua, "CountDown": countDownLua, "CountDownN": countDownLua, "Delete": deleteLua}
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

// A request that is under way when the client is closed has a moment to be answered.
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
				harness.Eventually(t, soon, "the client is being closed", func() bool { return errors.Is(c.Ping(over), lock.ErrClosed) })
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

// Who comes while the server is being looked at shares the next look with all others
// who come meanwhile.
func TestLooksAreShared(t *testing.T) {
	const waiters = 200
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		warmUp(t, s)
		c, g := harness.GatedClient(t, s)
		l, other := c.CountDownLatch(key), harness.Client(t, s).CountDownLatch(key)
		setCount(t, other, 1)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		reached := g.Arm(harness.KeepReply, sha(t, lookLua), 1)
		all := []<-chan error{wait(t.Context(), l)}
		reach(t, reached)
		for range waiters - 1 {
			all = append(all, wait(t.Context(), l))
		}
		harness.Eventually(t, soon, "all are there", func() bool { return countdown.Fresh(l) == waiters })
		require.NoError(t, g.Open())
		settled(t, c, key, waiters)
		conn := harness.Conn(t, s.Addr)
		// Each look is a script; a look for the first, for the others, and for what was
		// published before the subscription.
		require.LessOrEqual(t, harness.Commands(t, conn)["evalsha"], 4)
		require.LessOrEqual(t, harness.Commands(t, conn)["subscribe"], 4)
		countDown(t, other, 0)
		for _, done := range all {
			released(t, done, soon)
		}
	})
}

// Who was released does not wait again because the latch is set again, whoever does it
// and however soon.
func TestAResetReleasesWhoWaited(t *testing.T) {
	const waiters, rounds = 5, 40
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s).CountDownLatch(key)
		l := c.CountDownLatch(key)
		for _, how := range []struct {
			name  string
			reset func()
		}{
			{"by Java, at once", func() { java(t, s, "reset", 2) }},
			{"by Java, to more", func() { java(t, s, "reset", 3) }},
			{"by Java, to less", func() { java(t, s, "reset", 1) }},
			{"deleted by Java, and set", func() { java(t, s, "delete", 0); java(t, s, "set", 2) }},
			{"counted down, and set", func() {
				_, err := other.CountDownN(t.Context(), 10)
				require.NoError(t, err)
				setCount(t, other, 2)
			}},
			{"deleted, and set", func() {
				_, err := other.Delete(t.Context())
				require.NoError(t, err)
				setCount(t, other, 2)
			}},
		} {
			t.Run(how.name, func(t *testing.T) {
				harness.Do(t, s.Addr, "FLUSHALL")
				setCount(t, other, 2)
				for range rounds {
					var all []<-chan error
					for range waiters {
						all = append(all, wait(t.Context(), l))
					}
					settled(t, c, key, waiters)
					begin := time.Now()
					how.reset()
					for _, done := range all {
						released(t, done, soon)
					}
					require.Less(t, time.Since(begin), soon, "released by the safety poll")
				}
			})
		}
	})
}

// Waiters come whenever they like while ours set the latch again at once.
func TestWaitersOfEveryRoundAreReleased(t *testing.T) {
	const waiters, rounds = 8, 300
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, other := harness.Client(t, s), harness.Client(t, s).CountDownLatch(key)
		l := c.CountDownLatch(key)
		setCount(t, other, 2)
		ctx, cancel := context.WithCancel(t.Context())
		type turn struct {
			n   int
			err error
		}
		turns := make(chan turn, waiters)
		for range waiters {
			go func() {
				n := 0
				for ctx.Err() == nil {
					if err := l.Wait(ctx); err != nil && ctx.Err() == nil {
						turns <- turn{n, err}
						return
					}
					n++
				}
				turns <- turn{n, nil}
			}()
		}
		for range rounds {
			countDown(t, other, 1)
			countDown(t, other, 0)
			setCount(t, other, 2)
		}
		_, err := other.Delete(t.Context())
		require.NoError(t, err)
		harness.Eventually(t, safetyPoll+slack, "everybody goes on", func() bool { return countdown.Settled(l) == 0 })
		cancel()
		for range waiters {
			turn := <-turns
			require.NoError(t, turn.err)
			require.Positive(t, turn.n)
		}
	})
}

// No message arrives: the next look finds that the round is over, also if another has
// begun, as long as there is something to tell it by.
func TestAllMessagesAreLost(t *testing.T) {
	for _, tt := range []struct {
		name  string
		first func(t *testing.T, s *testserver.Server, l *countdown.Latch)
		over  func(t *testing.T, s *testserver.Server, l *countdown.Latch)
	}{
		{
			"counted down", func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { setCount(t, l, 1) },
			func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { countDown(t, l, 0) },
		},
		{
			"deleted", func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { setCount(t, l, 1) },
			func(t *testing.T, _ *testserver.Server, l *countdown.Latch) {
				_, err := l.Delete(t.Context())
				require.NoError(t, err)
			},
		},
		{
			"counted down and set again", func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { setCount(t, l, 1) },
			func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { countDown(t, l, 0); setCount(t, l, 1) },
		},
		{
			"counted down by Java and set again", func(t *testing.T, s *testserver.Server, _ *countdown.Latch) { java(t, s, "set", 1) },
			func(t *testing.T, s *testserver.Server, l *countdown.Latch) { java(t, s, "down", 0); setCount(t, l, 1) },
		},
		{
			"set again after the identity of the round has expired", func(t *testing.T, s *testserver.Server, l *countdown.Latch) {
				setCount(t, l, 1)
				harness.Do(t, s.Addr, "DEL", wire.LatchRound(key))
			},
			func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { countDown(t, l, 0); setCount(t, l, 1) },
		},
		{
			"set by Java to more", func(t *testing.T, _ *testserver.Server, l *countdown.Latch) { setCount(t, l, 1) },
			func(t *testing.T, s *testserver.Server, _ *countdown.Latch) { java(t, s, "reset", 2) },
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, shared *testserver.Server) {
				t.Parallel()
				s := harness.Own(t, shared.Program)
				c, g := harness.GatedClient(t, s)
				g.Mute()
				other := harness.Client(t, s).CountDownLatch(key)
				tt.first(t, s, other)
				done := wait(t.Context(), c.CountDownLatch(key))
				settled(t, c, key, 1)
				tt.over(t, s, other)
				released(t, done, safetyPoll+slack)
				require.Zero(t, c.PubSub().Messages)
			})
		})
	}
}

// A message that says something else makes waiters look, and releases nobody.
func TestAMessageThatMeansNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		warmUp(t, s)
		c := harness.Client(t, s)
		l := c.CountDownLatch(key)
		setCount(t, l, 1)
		done := wait(t.Context(), l)
		settled(t, c, key, 1)
		harness.Do(t, s.Addr, "CONFIG", "RESETSTAT")
		conn := harness.Conn(t, s.Addr)
		harness.Do(t, s.Addr, "PUBLISH", wire.LatchChannel(key), "2")
		harness.Eventually(t, soon, "it looks", func() bool { return harness.Commands(t, conn)["evalsha"] == 1 })
		waits(t, done)
		harness.Do(t, s.Addr, "DEL", key)
		harness.Do(t, s.Addr, "PUBLISH", wire.LatchChannel(key), "2")
		released(t, done, soon)
	})
}

func TestTheKeyIsReplacedWhileWaiting(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.CountDownLatch(key)
		for _, words := range [][]string{{"RPUSH", key, "1"}, {"SET", key, "one"}} {
			setCount(t, l, 1)
			done := wait(t.Context(), l)
			settled(t, c, key, 1)
			harness.Do(t, s.Addr, "DEL", key)
			harness.Do(t, s.Addr, words...)
			harness.Do(t, s.Addr, "PUBLISH", wire.LatchChannel(key), "2")
			require.Error(t, ended(t, done, soon))
			harness.Do(t, s.Addr, "DEL", key)
		}
	})
}

// What is under the name of a round's identity and is none makes no difference.
func TestAnIdentityThatIsNone(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.CountDownLatch(key)
		java(t, s, "set", 2)
		harness.Do(t, s.Addr, "RPUSH", wire.LatchRound(key), "1")
		done := wait(t.Context(), l)
		settled(t, c, key, 1)
		set, err := l.TrySetCount(t.Context(), 3)
		require.NoError(t, err)
		require.False(t, set)
		countDown(t, l, 1)
		countDown(t, l, 0)
		released(t, done, soon)
		harness.NothingLeft(t, s.Addr)
	})
}

func TestConnectionsCut(t *testing.T) {
	const rounds = 20
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		warmUp(t, s)
		c, other := harness.Client(t, s), harness.Client(t, s).CountDownLatch(key)
		for range rounds {
			setCount(t, other, 1)
			done := wait(t.Context(), c.CountDownLatch(key))
			settled(t, c, key, 1)
			// The message finds nobody.
			conn := harness.Conn(t, s.Addr)
			for _, resp := range conn.DoMulti(t.Context(),
				conn.B().Arbitrary("MULTI").Build(),
				conn.B().Arbitrary("CLIENT", "KILL", "TYPE", "pubsub").Build(),
				conn.B().Arbitrary("EVALSHA").Args(sha(t, countDownLua), "2").Keys(key, wire.LatchRound(key)).
					Args("1", "PUBLISH", wire.LatchChannel(key), "0").Build(),
				conn.B().Arbitrary("EXEC").Build(),
			) {
				require.NoError(t, resp.Error())
			}
			released(t, done, soon)
			conn.Close()
		}
	})
}

// A server that does not come back ends a wait when the patience is over.
func TestServerGoneForGood(t *testing.T) {
	const timeout = time.Second
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		c := harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout))
		l := c.CountDownLatch(key)
		setCount(t, l, 1)
		done := wait(t.Context(), l)
		settled(t, c, key, 1)
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
		// Whoever gives up before is told why it has waited.
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		err = l.Wait(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "refused")
	})
}

// A server that cannot serve at the moment has done nothing, and is asked again.
func TestARefusalThatPasses(t *testing.T) {
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
				require.FailNow(t, "it was not tried again", "%v", err)
			case <-time.After(300 * time.Millisecond):
			}
			full("0")
			released(t, done, soon)
		}
		during(func() error { _, err := l.TrySetCount(context.Background(), 3); return err })
		requireCount(t, other, 3)
		during(func() error { _, err := l.CountDown(context.Background()); return err })
		requireCount(t, other, 2)

		full("1")
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := l.CountDown(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "OOM")
		require.NotErrorIs(t, err, lock.ErrIndeterminate)
		begin := time.Now()
		_, err = l.CountDown(t.Context())
		require.ErrorContains(t, err, "OOM")
		require.NotErrorIs(t, err, lock.ErrIndeterminate)
		require.Less(t, time.Since(begin), 5*time.Second+slack)
		// The end needs no memory.
		deleted, err := l.Delete(t.Context())
		require.NoError(t, err)
		require.True(t, deleted)
		full("0")
		requireCount(t, other, 0)
	})
}

// A request that cannot be sent is sent when the server is back.
func TestCountingDownOnAServerThatComesBack(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		l := harness.Client(t, s).CountDownLatch(key)
		setCount(t, l, 2)
		harness.Do(t, s.Addr, "SAVE")
		s.Kill()
		harness.Eventually(t, soon, "the loss is noticed", func() bool {
			_, err := l.Count(context.Background())
			return err != nil && wire.OutcomeOf(err) == wire.Passing
		})
		done := make(chan error, 1)
		go func() { _, err := l.CountDown(context.Background()); done <- err }()
		select {
		case err := <-done:
			require.FailNow(t, "it was not tried again", "%v", err)
		case <-time.After(200 * time.Millisecond):
		}
		require.NoError(t, s.Restart())
		released(t, done, 10*time.Second)
		requireCount(t, l, 1)
	})
}

func TestForbidden(t *testing.T) {
	all := []string{"TrySetCount", "CountDown", "CountDownN", "Delete", "Wait"}
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		for _, tt := range []struct {
			name    string
			rules   []string
			refused []string // of all that it works, if more slowly, where it is empty
		}{
			{"nothing to be published", []string{"-publish"}, nil},
			{"nothing to be heard", []string{"-subscribe"}, nil},
			{"no channel", []string{"resetchannels"}, nil},
			{"no look", []string{"-pttl"}, []string{"Wait"}},
			{"no scripts", []string{"-@scripting"}, all},
			{"no round", []string{"resetkeys", "~" + key}, all},
			{"no end", []string{"-del"}, []string{"CountDown", "CountDownN", "Delete"}},
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
				harness.Eventually(t, soon, "it waits", func() bool { return countdown.Gates(l) == 1 && countdown.Fresh(l) == 0 })
				waits(t, done)
				countDown(t, l, 0)
				released(t, done, safetyPoll+slack)
				harness.NothingLeft(t, s.Addr)
			})
		}
	})
}

// A connection that is lent to the client, and waits for ever, does not make it wait so.
func TestALentConnectionIsNotWaitedForForEver(t *testing.T) {
	const (
		replyTimeout = 3 * time.Second // at most, of what the client asks
		maxRetry     = time.Second     // before it asks again
	)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		warmUp(t, s)
		g := harness.NewGate(t, s)
		conn, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{g.Addr}, DisableCache: true, ConnWriteTimeout: time.Hour, Dialer: net.Dialer{KeepAlive: -1},
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
		require.Less(t, time.Since(begin), replyTimeout+slack)
		reach(t, reached)
		require.NoError(t, g.Open())
		requireCount(t, other, 1)

		// Nor does it keep a waiter from looking again.
		reached = g.Arm(harness.KeepReply, sha(t, lookLua), 1)
		done := wait(t.Context(), l)
		reach(t, reached)
		direct := harness.Conn(t, s.Addr)
		before := harness.Commands(t, direct)["evalsha"]
		harness.Eventually(t, replyTimeout+maxRetry+slack, "the look is given up, and there is another", func() bool {
			return harness.Commands(t, direct)["evalsha"] > before
		})
		require.NoError(t, g.Open())
		settled(t, c, key, 1)
		countDown(t, other, 0)
		released(t, done, soon)
	})
}

// With sharded pub/sub a message comes from the node that has the key, and in order.
// With plain pub/sub it may be passed on by another, so it makes waiters look.
func TestClusterKnowsTheOrderOfMessagesOnlyWhereThereIsOne(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		for _, mode := range []pubsub.Mode{pubsub.Sharded, pubsub.Plain} {
			t.Run(mode.String(), func(t *testing.T) {
				c := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode))
				other := harness.ClientAt(t, cluster.Addrs(), redlatch.WithPubSubMode(mode)).CountDownLatch(key)
				l := c.CountDownLatch(key)
				setCount(t, other, 1)
				done := wait(t.Context(), l)
				if mode == pubsub.Sharded {
					settled(t, c, key, 1)
				} else {
					harness.Eventually(t, soon, "it listens", func() bool { return c.PubSub().Subscribed == 1 })
					harness.Eventually(t, soon, "it has looked", func() bool { return countdown.Fresh(l) == 0 && c.Stats().Background == 0 })
					require.Zero(t, countdown.Settled(l))
				}
				countDown(t, other, 0)
				released(t, done, soon)
			})
		}
	})
}
