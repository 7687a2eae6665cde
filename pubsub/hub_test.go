package pubsub_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/pubsub"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

// ear is a listener that keeps what it hears.
type ear chan pubsub.Event

func newEar() ear { return make(ear, 10_000) }

func (e ear) Notify(ev pubsub.Event) { e <- ev }

func (e ear) next(t *testing.T) pubsub.Event {
	t.Helper()
	select {
	case ev := <-e:
		return ev
	case <-time.After(10 * time.Second):
		require.FailNow(t, "nothing is heard")
		return pubsub.Event{}
	}
}

var (
	subscribed = pubsub.Event{Subscribed: true}
	caughtUp   = pubsub.Event{CaughtUp: true}
	message    = func(payload string) pubsub.Event { return pubsub.Event{Payload: payload} }
)

func newHub(t *testing.T, s *testserver.Server, opts pubsub.Options) (*pubsub.Hub, rueidis.Client) {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	h := pubsub.New(conn, opts)
	t.Cleanup(h.Close)
	return h, conn
}

func numsub(t *testing.T, conn rueidis.Client, channel string) int64 {
	t.Helper()
	counts, err := conn.Do(t.Context(), conn.B().PubsubNumsub().Channel(channel).Build()).AsIntMap()
	require.NoError(t, err)
	return counts[channel]
}

func TestListenersShareASubscription(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h, conn := newHub(t, s, pubsub.Options{})
		a, b, c := newEar(), newEar(), newEar()
		subA, confirmed := h.Subscribe("ch", a)
		require.False(t, confirmed)
		require.Equal(t, subscribed, a.next(t))
		subB, confirmed := h.Subscribe("ch", b)
		require.True(t, confirmed)
		subC, _ := h.Subscribe("other", c)
		require.Equal(t, subscribed, c.next(t))

		require.Equal(t, int64(1), numsub(t, conn, "ch"))
		harness.Do(t, s.Addr, "PUBLISH", "ch", "7")
		require.Equal(t, message("7"), a.next(t))
		require.Equal(t, message("7"), b.next(t))

		subA.Close()
		subA.Close()
		harness.Do(t, s.Addr, "PUBLISH", "ch", "8")
		require.Equal(t, message("8"), b.next(t))
		assert.Empty(t, a)
		assert.Empty(t, c)
		require.Equal(t, pubsub.Stats{Listeners: 2, Channels: 2, Subscribed: 2, Connections: 1, Messages: 2}, h.Stats())
		subB.Close()
		subC.Close()
	})
}

func TestAChannelStaysWarmForAWhile(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		const warm, moment = pubsub.DefaultKeepWarm, 100 * time.Millisecond
		h := pubsub.New(s.Conn(t), pubsub.Options{})
		t.Cleanup(h.Close)
		isSubscribed := func() bool {
			synctest.Wait()
			return s.PubSubNumSub("ch")["ch"] == 1
		}
		e := newEar()
		sub, _ := h.Subscribe("ch", e)
		require.Equal(t, subscribed, e.next(t))
		sub.Close()
		time.Sleep(warm - moment)
		require.True(t, isSubscribed())
		sub, confirmed := h.Subscribe("ch", e)
		require.True(t, confirmed)
		time.Sleep(time.Hour) // in use: it does not cool down
		require.True(t, isSubscribed())
		sub.Close()
		time.Sleep(warm - moment)
		require.True(t, isSubscribed())
		time.Sleep(2 * moment)
		require.False(t, isSubscribed())
		require.Zero(t, h.Stats().Channels)
		sub, confirmed = h.Subscribe("ch", e)
		require.False(t, confirmed)
		require.Equal(t, subscribed, e.next(t))
		sub.Close()
	})
}

func TestWithoutWarmthSubscribingAndLeavingAlternate(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h, conn := newHub(t, s, pubsub.Options{KeepWarm: -1})
		for range 200 {
			e := newEar()
			sub, confirmed := h.Subscribe("ch", e)
			if !confirmed {
				require.Equal(t, subscribed, e.next(t))
			}
			sub.Close()
		}
		harness.Eventually(t, 5*time.Second, "unsubscribed", func() bool {
			return numsub(t, conn, "ch") == 0 && h.Stats().Channels == 0
		})
	})
}

func TestEveryReconnectTellsEveryListener(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const channels = 600 // more than fit one pipeline
		var reconnects sync.WaitGroup
		reconnects.Add(2)
		h, _ := newHub(t, s, pubsub.Options{OnReconnect: reconnects.Done})
		ears := make([]ear, channels)
		for i := range ears {
			ears[i] = newEar()
			sub, _ := h.Subscribe(fmt.Sprint("ch", i), ears[i])
			defer sub.Close()
		}
		for range 2 {
			for _, e := range ears {
				require.Equal(t, subscribed, e.next(t))
			}
			harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
		}
		for _, e := range ears {
			require.Equal(t, subscribed, e.next(t))
		}
		reconnects.Wait()
		harness.Do(t, s.Addr, "PUBLISH", "ch599", "1")
		require.Equal(t, message("1"), ears[599].next(t))
		require.Equal(t, uint64(2), h.Stats().Reconnects)
	})
}

func TestAServerThatComesBackIsFound(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		h, _ := newHub(t, s, pubsub.Options{})
		e, late := newEar(), newEar()
		sub, _ := h.Subscribe("ch", e)
		require.Equal(t, subscribed, e.next(t))
		s.Kill()
		subLate, _ := h.Subscribe("late", late)
		harness.Eventually(t, 5*time.Second, "the loss is noticed", func() bool { return h.Stats().Connections == 0 })
		require.NoError(t, s.Restart())
		require.Equal(t, subscribed, e.next(t))
		require.Equal(t, subscribed, late.next(t))
		sub.Close()
		subLate.Close()
	})
}

func TestAServerThatWasNeverThere(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		var dials atomic.Int32
		conn, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{s.Addr}, DisableCache: true,
			DialCtxFn: func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
				dials.Add(1)
				return d.DialContext(ctx, "tcp", addr)
			},
		})
		require.NoError(t, err)
		defer conn.Close()
		h := pubsub.New(conn, pubsub.Options{})
		defer h.Close()
		s.Kill()
		before := dials.Load()
		left, stays := newEar(), newEar()
		sub, confirmed := h.Subscribe("left", left)
		require.False(t, confirmed)
		_, confirmed = h.Subscribe("stays", stays)
		require.False(t, confirmed)
		harness.Eventually(t, 10*time.Second, "the hub tries again and again", func() bool { return dials.Load() >= before+3 })
		require.Zero(t, h.Stats().Subscribed)
		require.Empty(t, stays)
		sub.Close()
		require.NoError(t, s.Restart())
		require.Equal(t, subscribed, stays.next(t))
		require.Empty(t, left)
	})
}

func TestARefusedSubscriptionIsLoggedOnceAndTheOthersWork(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "app", "on", ">secret", "+@all", "allkeys", "resetchannels", "&allowed*")
		conn, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{s.Addr}, Username: "app", Password: "secret", DisableCache: true,
		})
		require.NoError(t, err)
		defer conn.Close()
		var log harness.Log
		h := pubsub.New(conn, pubsub.Options{Logger: log.Logger()})
		defer h.Close()
		ok, refused := newEar(), newEar()
		for i := range 5 {
			h.Subscribe(fmt.Sprint("forbidden", i), refused)
			h.Subscribe(fmt.Sprint("allowed", i), ok)
		}
		for range 5 {
			require.Equal(t, subscribed, ok.next(t))
		}
		harness.Eventually(t, 5*time.Second, "all refused", func() bool { return h.Refused() == 5 })
		require.Empty(t, refused)
		require.Contains(t, log.String(), "refuses")
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
	})
}

// A server that is busy with a script refuses to end a subscription, too.
func TestAChannelIsLeftWhileTheServerIsBusy(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program, "--lua-time-limit", "10")
		h, conn := newHub(t, s, pubsub.Options{KeepWarm: -1})
		left, stays := newEar(), newEar()
		sub, _ := h.Subscribe("left", left)
		h.Subscribe("stays", stays)
		require.Equal(t, subscribed, left.next(t))
		require.Equal(t, subscribed, stays.next(t))
		go func() { _, _ = testserver.Command(s.Addr, "EVAL", "while true do end", "0") }()
		harness.Answers(t, s, "-BUSY")
		sub.Close()
		harness.Eventually(t, 5*time.Second, "the refusal is heard", func() bool { return h.Stats().Reconnects > 0 || h.Stats().Subscribed < 2 })
		harness.Do(t, s.Addr, "SCRIPT", "KILL")
		harness.Answers(t, s, "+PONG")
		harness.Eventually(t, 10*time.Second, "unsubscribed", func() bool { return numsub(t, conn, "left") == 0 })
		require.Equal(t, subscribed, stays.next(t))
		require.Empty(t, left)
	})
}

func TestAServerThatIsBusyIsAskedAgainSoon(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program, "--lua-time-limit", "50")
		var log harness.Log
		h, conn := newHub(t, s, pubsub.Options{Logger: log.Logger()})
		e := newEar()
		h.Subscribe("first", e) // the connection is there
		require.Equal(t, subscribed, e.next(t))
		script := make(chan error, 1)
		go func() {
			script <- conn.Do(context.Background(), conn.B().Eval().Script("while true do end").Numkeys(0).Build()).Error()
		}()
		harness.Answers(t, s, "-BUSY")
		h.Subscribe("second", e)
		harness.Eventually(t, 5*time.Second, "refused", func() bool { return h.Refused() == 1 })
		harness.Do(t, s.Addr, "SCRIPT", "KILL")
		require.Error(t, <-script)
		require.Equal(t, subscribed, e.next(t))
		require.Empty(t, log.String())
	})
}

func TestAClosedHubIsSilent(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h, conn := newHub(t, s, pubsub.Options{})
		e := newEar()
		sub, _ := h.Subscribe("ch", e)
		require.Equal(t, subscribed, e.next(t))
		h.Close()
		h.Close()
		harness.Eventually(t, 5*time.Second, "unsubscribed", func() bool { return numsub(t, conn, "ch") == 0 })
		sub.Close()
		sub, confirmed := h.Subscribe("ch", e)
		require.False(t, confirmed)
		sub.Close()
		require.Empty(t, e)
	})
}

// TestChurn subscribes and leaves from many goroutines while connections are
// killed: afterwards everybody hears, and nothing is left.
func TestChurn(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h, conn := newHub(t, s, pubsub.Options{KeepWarm: time.Millisecond})
		stop, cancel := context.WithCancel(t.Context())
		var killer, wg sync.WaitGroup
		killer.Go(func() {
			for stop.Err() == nil {
				_, _ = testserver.Command(s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
				<-time.After(20 * time.Millisecond)
			}
		})
		for g := range 8 {
			wg.Go(func() {
				for i := range 100 {
					e := newEar()
					sub, confirmed := h.Subscribe(fmt.Sprint("ch", (g+i)%5), e)
					if i%3 == 0 && !confirmed {
						assert.Equal(t, subscribed, e.next(t))
					}
					sub.Close()
				}
			})
		}
		wg.Wait()
		cancel()
		killer.Wait()
		e := newEar()
		sub, confirmed := h.Subscribe("ch1", e)
		if !confirmed {
			require.Equal(t, subscribed, e.next(t))
		}
		sub.Close()
		harness.Eventually(t, 10*time.Second, "nothing is subscribed", func() bool {
			st := h.Stats()
			return st.Listeners == 0 && st.Channels == 0 && numsub(t, conn, "ch1") == 0
		})
	})
}

func TestShardedChannelsFollowTheirSlots(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{cluster.Primaries[0].Addr}, DisableCache: true})
		require.NoError(t, err)
		defer conn.Close()
		h := pubsub.New(conn, pubsub.Options{Sharded: true})
		defer h.Close()
		ears := map[string]ear{}
		for i := range 30 {
			name := fmt.Sprint("ch", i)
			ears[name] = newEar()
			h.Subscribe(name, ears[name])
		}
		for _, e := range ears {
			require.Equal(t, subscribed, e.next(t))
		}
		require.Equal(t, 3, h.Stats().Connections)
		publish := func(name string) error {
			return conn.Do(t.Context(), conn.B().Spublish().Channel(name).Message("1").Build()).Error()
		}
		for name, e := range ears {
			require.NoError(t, publish(name))
			require.Equal(t, message("1"), e.next(t))
		}

		// A slot moves: its listeners are told, and hear again at its new home.
		require.NoError(t, cluster.MoveSlotOf("ch7"))
		require.Equal(t, subscribed, ears["ch7"].next(t))
		require.NoError(t, publish("ch7"))
		require.Equal(t, message("1"), ears["ch7"].next(t))
	})
}

// The hub asks all nodes of a cluster where the slots are, and rueidis connects to
// each under the context of who needs it first: whoever else needs that node then
// must not be cut short because another node has answered.
func TestTheFirstAnswerEndsNoOtherConnection(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		fast, slow := cluster.Primaries[0].Addr, cluster.Primaries[1].Addr
		dialled, release := make(chan context.Context, 10), make(chan struct{})
		conn, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{fast}, DisableCache: true,
			DialCtxFn: func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
				if addr == slow {
					dialled <- ctx
					select {
					case <-release:
					case <-ctx.Done():
					}
				}
				return d.DialContext(ctx, "tcp", addr)
			},
		})
		require.NoError(t, err)
		defer conn.Close()
		name := ""
		for i := 0; name == ""; i++ {
			if k := fmt.Sprint("ch", i); cluster.Owner(k).Addr == fast {
				name = k
			}
		}
		h := pubsub.New(conn, pubsub.Options{Sharded: true})
		defer h.Close()
		e := newEar()
		h.Subscribe(name, e)
		dial := <-dialled
		require.Equal(t, subscribed, e.next(t))
		require.NoError(t, dial.Err())
		close(release)
	})
}

// withRESP2 returns a connection that speaks the old protocol.
func withRESP2(t *testing.T, s *testserver.Server) rueidis.Client {
	t.Helper()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.Addr}, DisableCache: true, AlwaysRESP2: true})
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return conn
}

func TestSyncStandsInLineWithTheMessages(t *testing.T) {
	inLine := func(t *testing.T, conn rueidis.Client, sharded bool) {
		h := pubsub.New(conn, pubsub.Options{Sharded: sharded})
		defer h.Close()
		e := newEar()
		sub, _ := h.Subscribe("ch", e)
		require.Equal(t, subscribed, e.next(t))
		for round := range 50 {
			for i := range 20 {
				publish := conn.B().Publish().Channel("ch").Message(fmt.Sprint(i)).Build()
				if sharded {
					publish = conn.B().Spublish().Channel("ch").Message(fmt.Sprint(i)).Build()
				}
				require.NoError(t, conn.Do(t.Context(), publish).Error())
			}
			sub.Sync()
			for i := range 20 {
				require.Equal(t, message(fmt.Sprint(i)), e.next(t), "round %d", round)
			}
			require.Equal(t, caughtUp, e.next(t))
		}
		sub.Close()
		require.Empty(t, e)
	}
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		t.Run("RESP3", func(t *testing.T) { inLine(t, harness.Conn(t, s.Addr), false) })
		t.Run("RESP2", func(t *testing.T) { inLine(t, withRESP2(t, s), false) })
		t.Run("sharded", func(t *testing.T) {
			cluster := harness.Cluster(t, s.Program)
			inLine(t, harness.Conn(t, cluster.Primaries[0].Addr), true)
		})
	})
}

func TestSyncAnswersWhoHasAsked(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s) // for its gate
		c.Close()
		conn := harness.Conn(t, g.Addr)
		h := pubsub.New(conn, pubsub.Options{KeepWarm: -1})
		defer h.Close()
		a, b := newEar(), newEar()
		subA, _ := h.Subscribe("ch", a)
		require.Equal(t, subscribed, a.next(t))
		subB, _ := h.Subscribe("ch", b)
		subA.Sync()
		require.Equal(t, caughtUp, a.next(t))

		// Who calls while an answer is on the way gets the next one, and who calls again
		// gets that alone.
		reached := g.Arm(harness.KeepReply, "\r\nSUBSCRIBE", 1)
		subA.Sync()
		<-reached
		subA.Sync()
		subB.Sync()
		require.NoError(t, g.Open())
		require.Equal(t, caughtUp, a.next(t))
		require.Equal(t, caughtUp, b.next(t))
		harness.Do(t, s.Addr, "PUBLISH", "ch", "7")
		require.Equal(t, message("7"), a.next(t))
		require.Equal(t, message("7"), b.next(t))

		// A connection that is lost takes the answer with it.
		reached = g.Arm(harness.LoseReply, "\r\nSUBSCRIBE", 1)
		subA.Sync()
		<-reached
		require.Equal(t, subscribed, a.next(t))
		require.Equal(t, subscribed, b.next(t))
		subB.Sync()
		require.Equal(t, caughtUp, b.next(t))
		subA.Sync()
		require.Equal(t, caughtUp, a.next(t))
		harness.Do(t, s.Addr, "PUBLISH", "ch", "8")
		require.Equal(t, message("8"), a.next(t))
		require.Equal(t, message("8"), b.next(t))

		// One who leaves meanwhile leaves nothing.
		reached = g.Arm(harness.KeepReply, "\r\nSUBSCRIBE", 1)
		subA.Sync()
		<-reached
		subA.Close()
		subB.Close()
		subA.Sync()
		require.NoError(t, g.Open())
		harness.Eventually(t, 5*time.Second, "unsubscribed", func() bool {
			return numsub(t, harness.Conn(t, s.Addr), "ch") == 0 && h.Stats().Channels == 0
		})
		sub, _ := h.Subscribe("ch", b)
		require.Equal(t, subscribed, b.next(t))
		sub.Sync()
		require.Equal(t, caughtUp, b.next(t))
		require.Empty(t, a)
		require.Empty(t, b)
	})
}

func TestSyncWithoutASubscriptionIsAnsweredByIt(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		s.Latency = time.Millisecond
		h := pubsub.New(s.Conn(t), pubsub.Options{})
		e := newEar()
		sub, _ := h.Subscribe("ch", e)
		sub.Sync() // not confirmed yet
		require.Equal(t, subscribed, e.next(t))
		sub.Sync()
		require.Equal(t, caughtUp, e.next(t))
		h.Close()
		sub.Sync()
		late, _ := h.Subscribe("ch", e)
		late.Sync()
		time.Sleep(time.Minute)
		require.Empty(t, e)
	})
}

// What a connection hears that has lost the channel is in no order with what the next
// one hears.
func TestAMessageOfALostConnectionIsNotHeard(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h, _ := newHub(t, s, pubsub.Options{})
		e := newEar()
		sub, _ := h.Subscribe("ch", e)
		require.Equal(t, subscribed, e.next(t))
		h.HeardElsewhere("ch", "late")
		harness.Do(t, s.Addr, "PUBLISH", "ch", "7")
		require.Equal(t, message("7"), e.next(t))
		sub.Close()
	})
}
