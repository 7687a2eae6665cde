package pubsub_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/pubsub"
)

// withRESP2 returns a client that uses RESP2.
func withRESP2(t *testing.T, s *testserver.Server) rueidis.Client {
	t.Helper()
	conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.Addr}, DisableCache: true, AlwaysRESP2: true})
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	return conn
}

func TestSyncIsOrderedWithMessages(t *testing.T) {
	testOrder := func(t *testing.T, conn rueidis.Client, sharded bool) {
		h := pubsub.New(conn, pubsub.Options{Sharded: sharded})
		defer h.Close()
		e := newRecorder()
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
		t.Run("RESP3", func(t *testing.T) { testOrder(t, harness.Conn(t, s.Addr), false) })
		t.Run("RESP2", func(t *testing.T) { testOrder(t, withRESP2(t, s), false) })
		t.Run("sharded", func(t *testing.T) {
			cluster := harness.Cluster(t, s.Program)
			testOrder(t, harness.Conn(t, cluster.Primaries[0].Addr), true)
		})
	})
}

func TestSyncNotifiesEachCaller(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s) // only the gate is used
		c.Close()
		conn := harness.Conn(t, g.Addr)
		h := pubsub.New(conn, pubsub.Options{KeepWarm: -1})
		defer h.Close()
		a, b := newRecorder(), newRecorder()
		subA, _ := h.Subscribe("ch", a)
		require.Equal(t, subscribed, a.next(t))
		subB, _ := h.Subscribe("ch", b)
		subA.Sync()
		require.Equal(t, caughtUp, a.next(t))

		// A call while an answer is pending gets the next answer, and repeated calls
		// share it.
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

		// A lost connection loses the answer.
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

		// A subscription closed while an answer is pending leaves no state.
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

func TestSyncBeforeConfirmation(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		s.Latency = time.Millisecond
		h := pubsub.New(s.Conn(t), pubsub.Options{})
		e := newRecorder()
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
