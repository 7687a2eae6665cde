package hub_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"strconv"
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
	"github.com/redlatch/redlatch/internal/hub"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/pubsub"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

// recorder is a listener that records its events.
type recorder chan hub.Event

func newRecorder() recorder { return make(recorder, 10_000) }

func (e recorder) Notify(ev hub.Event) { e <- ev }

func (e recorder) next(t *testing.T) hub.Event {
	t.Helper()
	select {
	case ev := <-e:
		return ev
	case <-time.After(10 * time.Second):
		require.FailNow(t, "no event")
		return hub.Event{}
	}
}

var (
	subscribed = hub.Event{Subscribed: true}
	message    = func(payload string) hub.Event { return hub.Event{Payload: payload} }
)

func newHub(t *testing.T, s *testserver.Server, opts hub.Options) (*hub.Hub, rueidis.Client) {
	t.Helper()
	conn := harness.Conn(t, s.Addr)
	h := hub.New(conn, opts)
	t.Cleanup(h.Close)
	return h, conn
}

func numsub(t *testing.T, conn rueidis.Client, channel string) int64 {
	t.Helper()
	counts, err := conn.Do(t.Context(), conn.B().PubsubNumsub().Channel(channel).Build()).AsIntMap()
	require.NoError(t, err)
	return counts[channel]
}

func TestListenersShareSubscription(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h, conn := newHub(t, s, hub.Options{})
		a, b, c := newRecorder(), newRecorder(), newRecorder()
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

func TestChannelStaysWarm(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		const warm, moment = hub.DefaultKeepWarm, 100 * time.Millisecond
		h := hub.New(s.Conn(t), hub.Options{})
		t.Cleanup(h.Close)
		isSubscribed := func() bool {
			synctest.Wait()
			return s.PubSubNumSub("ch")["ch"] == 1
		}
		e := newRecorder()
		sub, _ := h.Subscribe("ch", e)
		require.Equal(t, subscribed, e.next(t))
		sub.Close()
		time.Sleep(warm - moment)
		require.True(t, isSubscribed())
		sub, confirmed := h.Subscribe("ch", e)
		require.True(t, confirmed)
		time.Sleep(time.Hour) // in use: it stays subscribed
		require.True(t, isSubscribed())
		sub.Close()
		time.Sleep(warm - moment)
		require.True(t, isSubscribed())
		time.Sleep(2*moment + time.Second)
		require.False(t, isSubscribed())
		require.Zero(t, h.Stats().Channels)
		sub, confirmed = h.Subscribe("ch", e)
		require.False(t, confirmed)
		require.Equal(t, subscribed, e.next(t))
		sub.Close()
	})
}

// Channels are unsubscribed together: when there are many, or a second after the first.
func TestChannelsAreUnsubscribedTogether(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		const many = 128
		h := hub.New(s.Conn(t), hub.Options{})
		t.Cleanup(h.Close)
		e := newRecorder()
		subscribe := func(name string) *hub.Subscription {
			sub, _ := h.Subscribe(name, e)
			require.Equal(t, subscribed, e.next(t))
			return sub
		}
		onServer := func() int {
			synctest.Wait()
			return len(s.PubSubChannels(""))
		}
		var subs []*hub.Subscription
		for i := range many + 2 {
			subs = append(subs, subscribe(strconv.Itoa(i)))
		}
		for _, sub := range subs[:many-1] {
			sub.Discard()
		}
		require.Equal(t, many+2, onServer())
		subs[many].Discard()
		require.Equal(t, 2, onServer())
		require.Equal(t, 2, h.Stats().Channels)

		subs[many-1].Discard()
		subs[many+1].Discard()
		time.Sleep(time.Second - time.Millisecond)
		require.Equal(t, 2, onServer())
		again, confirmed := h.Subscribe(strconv.Itoa(many-1), e)
		require.True(t, confirmed)
		time.Sleep(2 * time.Millisecond)
		require.Equal(t, 1, onServer())
		time.Sleep(time.Hour)
		require.Equal(t, 1, onServer())
		again.Discard()
	})
}

func TestReconnectNotifiesEveryListener(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const channels = 600 // more than one pipeline holds
		var reconnects sync.WaitGroup
		reconnects.Add(2)
		h, _ := newHub(t, s, hub.Options{OnReconnect: reconnects.Done})
		recorders := make([]recorder, channels)
		for i := range recorders {
			recorders[i] = newRecorder()
			sub, _ := h.Subscribe(fmt.Sprint("ch", i), recorders[i])
			defer sub.Close()
		}
		for range 2 {
			for _, e := range recorders {
				require.Equal(t, subscribed, e.next(t))
			}
			harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
		}
		for _, e := range recorders {
			require.Equal(t, subscribed, e.next(t))
		}
		reconnects.Wait()
		harness.Do(t, s.Addr, "PUBLISH", "ch599", "1")
		require.Equal(t, message("1"), recorders[599].next(t))
		require.Equal(t, uint64(2), h.Stats().Reconnects)
	})
}

// Channels are subscribed when the server is back: those that were before, and those that are new.
func TestReconnectAfterServerRestart(t *testing.T) {
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
		h := hub.New(conn, hub.Options{})
		defer h.Close()
		was, left, stays := newRecorder(), newRecorder(), newRecorder()
		h.Subscribe("was", was)
		require.Equal(t, subscribed, was.next(t))

		s.Kill()
		before := dials.Load()
		sub, confirmed := h.Subscribe("left", left)
		require.False(t, confirmed)
		_, confirmed = h.Subscribe("stays", stays)
		require.False(t, confirmed)
		harness.Eventually(t, 10*time.Second, "the hub keeps dialing", func() bool { return dials.Load() >= before+3 })
		require.Zero(t, h.Stats().Subscribed)
		require.Empty(t, stays)

		sub.Close()
		require.NoError(t, s.Restart())
		require.Equal(t, subscribed, was.next(t))
		require.Equal(t, subscribed, stays.next(t))
		require.Empty(t, left)
	})
}

func TestRefusedSubscriptionIsLoggedOnce(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "app", "on", ">secret", "+@all", "allkeys", "resetchannels", "&allowed*")
		conn, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{s.Addr}, Username: "app", Password: "secret", DisableCache: true,
		})
		require.NoError(t, err)
		defer conn.Close()
		var log harness.Log
		h := hub.New(conn, hub.Options{Logger: log.Logger()})
		defer h.Close()
		ok, refused := newRecorder(), newRecorder()
		for i := range 5 {
			h.Subscribe(fmt.Sprint("forbidden", i), refused)
			h.Subscribe(fmt.Sprint("allowed", i), ok)
		}
		for range 5 {
			require.Equal(t, subscribed, ok.next(t))
		}
		harness.Eventually(t, 5*time.Second, "all refused", func() bool { return h.Stats().Refused == 5 })
		require.Empty(t, refused)
		require.Contains(t, log.String(), "refused")
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
	})
}

// The application uses all connections of the pool from which the subscriber connection comes. That is logged
// once, and the subscription follows when one is free.
func TestExhaustedPoolIsLoggedOnce(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.Addr}, BlockingPoolSize: 1, DisableCache: true})
		require.NoError(t, err)
		defer conn.Close()
		inUse, release := conn.Dedicate()
		require.NoError(t, inUse.Do(t.Context(), inUse.B().Ping().Build()).Error())
		var log harness.Log
		h := hub.New(conn, hub.Options{Logger: log.Logger()})
		defer h.Close()
		waiter := newRecorder()
		h.Subscribe("orders", waiter)
		harness.Eventually(t, 10*time.Second, "the wait for a connection is logged", func() bool {
			return strings.Contains(log.String(), "BlockingPoolSize")
		})
		require.Empty(t, waiter)
		release()
		require.Equal(t, subscribed, waiter.next(t))
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
	})
}

// Channels of one slot share a SUBSCRIBE. If the server denies that, each has one of its own.
func TestChannelsOfASlotAreSubscribedTogether(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		harness.Do(t, s.Addr, "ACL", "SETUSER", "app", "on", ">secret", "+@all", "allkeys", "resetchannels", "&*:allowed*")
		connects := make(chan struct{})
		var waits atomic.Bool // whether further connections wait for that
		conn, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{s.Addr}, Username: "app", Password: "secret", DisableCache: true,
			DialCtxFn: func(ctx context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
				if waits.Load() {
					<-connects
				}
				return d.DialContext(ctx, "tcp", addr)
			},
		})
		require.NoError(t, err)
		defer conn.Close()
		waits.Store(true)
		var log harness.Log
		h := hub.New(conn, hub.Options{Logger: log.Logger()})
		defer h.Close()
		subscribe := func(n int, suffixes ...string) recorder {
			e := newRecorder()
			for i := range n {
				for _, suffix := range suffixes {
					h.Subscribe(fmt.Sprintf("{ch}:%s%d", suffix, i), e)
				}
			}
			return e
		}
		e := subscribe(8, "allowed")
		close(connects)
		for range 8 {
			require.Equal(t, subscribed, e.next(t))
		}
		require.Equal(t, 1, harness.Commands(t, conn)["subscribe"], "all have waited for the connection")
		for i := range 8 {
			channel := fmt.Sprint("{ch}:allowed", i)
			require.Equal(t, int64(1), numsub(t, conn, channel))
			harness.Do(t, s.Addr, "PUBLISH", channel, "7")
			require.Equal(t, message("7"), e.next(t))
		}
		require.Empty(t, log.String())

		e = subscribe(3, "allowed too ", "forbidden")
		for range 3 {
			require.Equal(t, subscribed, e.next(t))
		}
		harness.Eventually(t, 5*time.Second, "the others are refused", func() bool { return h.Stats().Refused == 3 })
		require.Empty(t, e)
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
	})
}

// A server that is busy with a script also refuses UNSUBSCRIBE.
func TestUnsubscribeWhileServerIsBusy(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program, "--lua-time-limit", "10")
		h, conn := newHub(t, s, hub.Options{KeepWarm: -1})
		left, stays := newRecorder(), newRecorder()
		sub, _ := h.Subscribe("left", left)
		h.Subscribe("stays", stays)
		require.Equal(t, subscribed, left.next(t))
		require.Equal(t, subscribed, stays.next(t))
		go func() { _, _ = testserver.Command(s.Addr, "EVAL", "while true do end", "0") }()
		harness.Answers(t, s, "-BUSY")
		sub.Close()
		harness.Eventually(t, 5*time.Second, "the connection is dropped", func() bool { return h.Stats().Reconnects > 0 || h.Stats().Subscribed < 2 })
		harness.Do(t, s.Addr, "SCRIPT", "KILL")
		harness.Answers(t, s, "+PONG")
		harness.Eventually(t, 10*time.Second, "unsubscribed", func() bool { return numsub(t, conn, "left") == 0 })
		require.Equal(t, subscribed, stays.next(t))
		require.Empty(t, left)
	})
}

// A replica without its primary answers UNSUBSCRIBE, but not the PING that rueidis sends with it.
func TestUnsubscribeFromReplicaWithoutPrimary(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program, "--replica-serve-stale-data", "no")
		h, conn := newHub(t, s, hub.Options{KeepWarm: -1})
		left, stays := newRecorder(), newRecorder()
		sub, _ := h.Subscribe("left", left)
		h.Subscribe("stays", stays)
		require.Equal(t, subscribed, left.next(t))
		require.Equal(t, subscribed, stays.next(t))
		harness.Do(t, s.Addr, "REPLICAOF", "127.0.0.1", "1")
		sub.Close()
		harness.Eventually(t, 10*time.Second, "unsubscribed", func() bool { return numsub(t, conn, "left") == 0 })
		h.Subscribe("late", stays) // rueidis would take its confirmation for the missing answer
		require.Equal(t, subscribed, stays.next(t))
		harness.Do(t, s.Addr, "REPLICAOF", "NO", "ONE")
		harness.Eventually(t, 10*time.Second, "all are subscribed", func() bool { return h.Stats().Subscribed == 2 })
		require.EqualValues(t, 1, numsub(t, conn, "stays"))
		require.Empty(t, left)
	})
}

func TestSubscribeWhileServerIsBusy(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program, "--lua-time-limit", "50")
		var log harness.Log
		h, conn := newHub(t, s, hub.Options{Logger: log.Logger()})
		e := newRecorder()
		h.Subscribe("first", e) // opens the connection
		require.Equal(t, subscribed, e.next(t))
		script := make(chan error, 1)
		go func() {
			script <- conn.Do(context.Background(), conn.B().Eval().Script("while true do end").Numkeys(0).Build()).Error()
		}()
		harness.Answers(t, s, "-BUSY")
		h.Subscribe("second", e)
		harness.Eventually(t, 5*time.Second, "refused", func() bool { return h.Stats().Refused == 1 })
		harness.Do(t, s.Addr, "SCRIPT", "KILL")
		require.Error(t, <-script)
		require.Equal(t, subscribed, e.next(t))
		require.Empty(t, log.String())
	})
}

func TestClosedHubDeliversNothing(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h, conn := newHub(t, s, hub.Options{})
		e := newRecorder()
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

// TestChurn subscribes and unsubscribes from many goroutines while connections are
// killed. Afterwards subscribing works, and no subscription remains.
func TestChurn(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		h, conn := newHub(t, s, hub.Options{KeepWarm: time.Millisecond})
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
					e := newRecorder()
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
		e := newRecorder()
		sub, confirmed := h.Subscribe("ch1", e)
		if !confirmed {
			require.Equal(t, subscribed, e.next(t))
		}
		sub.Close()
		harness.Eventually(t, 10*time.Second, "no subscription remains", func() bool {
			st := h.Stats()
			return st.Listeners == 0 && st.Channels == 0 && numsub(t, conn, "ch1") == 0
		})
	})
}

// Sharded channels are subscribed at the primary of their slot, also after that has moved. Plain ones
// share a connection to any node, and the messages of all nodes reach it.
func TestShardedChannelsFollowSlots(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		for _, mode := range harness.PubSubModes(t, cluster) {
			t.Run(mode.String(), func(t *testing.T) { channelsOfCluster(t, cluster, mode == pubsub.Sharded) })
		}
	})
}

func channelsOfCluster(t *testing.T, cluster *testserver.Cluster, sharded bool) {
	conn := harness.ConnAt(t, []string{cluster.Primaries[0].Addr})
	h := hub.New(conn, hub.Options{Sharded: sharded})
	defer h.Close()
	recorders := map[string]recorder{}
	for i := range 30 {
		name := fmt.Sprint("ch", i)
		recorders[name] = newRecorder()
		h.Subscribe(name, recorders[name])
	}
	for _, e := range recorders {
		require.Equal(t, subscribed, e.next(t))
	}
	publish, connections := "PUBLISH", 1
	if sharded {
		publish, connections = "SPUBLISH", 3
	}
	require.Equal(t, connections, h.Stats().Connections)
	receives := func(name string, e recorder) {
		t.Helper()
		harness.Do(t, cluster.Owner(name).Addr, publish, name, "1")
		require.Equal(t, message("1"), e.next(t))
	}
	for name, e := range recorders {
		receives(name, e)
	}

	together := newRecorder()
	for _, name := range []string{"{ch7}:1", "{ch7}:2", "{ch8}:1", "{ch8}:2", "{ch9}:1"} {
		h.Subscribe(name, together)
	}
	for range 5 {
		require.Equal(t, subscribed, together.next(t))
	}
	receives("{ch8}:2", together)

	// The listeners of a moved slot are notified and subscribed at the new node.
	require.NoError(t, cluster.MoveSlotOf("ch7"))
	if sharded {
		require.Equal(t, subscribed, recorders["ch7"].next(t))
		for range 2 {
			require.Equal(t, subscribed, together.next(t))
		}
	}
	receives("{ch7}:2", together)
	receives("ch7", recorders["ch7"])
}

// The hub asks all nodes of a cluster for the slots, and rueidis dials each node with
// the context of the first request for it. Other requests may wait for that dial, so an
// answer from another node must not cancel it.
func TestTopologyRefreshCancelsNoOtherDial(t *testing.T) {
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
		h := hub.New(conn, hub.Options{Sharded: true})
		defer h.Close()
		e := newRecorder()
		h.Subscribe(name, e)
		dial := <-dialled
		// A server without sharded pub/sub is asked for the slots too, and refuses the subscription.
		harness.Eventually(t, 10*time.Second, "the hub uses the answer", func() bool { return len(e) > 0 || h.Stats().Refused > 0 })
		require.NoError(t, dial.Err())
		close(release)
	})
}
