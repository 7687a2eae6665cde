package fairlock_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/fairlock"
	"github.com/redlatch/redlatch/internal/engine"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/watchdog"
	"github.com/redlatch/redlatch/internal/wire"
)

func TestMain(m *testing.M) { harness.Main(m, nil) }

const (
	clientID = "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11"
	javaID   = "5d1f7a52-31c4-4c1b-8f0e-7f2a9f4f3d02"
	orders   = "orders"
	lease    = 30 * time.Second
	fairWait = 5 * time.Minute
)

// keysOf returns the keys of a lock and its queue.
func keysOf(name string) []string {
	return []string{name, wire.FairQueue(name), wire.FairTimeouts(name), wire.FairAlive(name), wire.FairOrder(name)}
}

// newSession returns a session on a connection.
func newSession(t testing.TB, conn rueidis.Client, wait time.Duration) *session.Session {
	s := session.New(session.Config{
		Client: conn, ID: clientID, WatchdogTimeout: lease, FairWait: wait,
		MapName: func(name string) string { return name }, Logger: slog.New(slog.DiscardHandler),
	})
	t.Cleanup(s.Close)
	return s
}

// world is a protocol on a server.
type world struct {
	t    testing.TB
	s    *session.Session
	p    *fairlock.Protocol
	addr string
}

func newWorld(t testing.TB, s *testserver.Server) *world {
	w := worldOn(t, harness.Conn(t, s.Addr))
	w.addr = s.Addr
	return w
}

// worldOn returns a world without an address.
func worldOn(t testing.TB, conn rueidis.Client) *world {
	sess := newSession(t, conn, fairWait)
	return &world{t: t, s: sess, p: fairlock.NewProtocol(sess, orders)}
}

// claim returns a new claim that waits.
func (w *world) claim() *engine.Claim { return w.claimOf(orders) }

func (w *world) claimOf(key string) *engine.Claim {
	return &engine.Claim{Key: key, ID: w.s.NewOwner(), Lease: lease, Waits: true}
}

// of returns the protocol of the lock of a claim.
func (w *world) of(c *engine.Claim) *fairlock.Protocol {
	if c.Key == orders {
		return w.p
	}
	return fairlock.NewProtocol(w.s, c.Key)
}

func (w *world) acquire(c *engine.Claim) engine.Answer {
	w.t.Helper()
	a, err := w.of(c).Acquire(w.t.Context(), c)
	require.NoError(w.t, err)
	return a
}

// held returns the claim of a holder of a lock, and those of n waiters in its queue.
func (w *world) held(key string, n int) (holder *engine.Claim, waiters []*engine.Claim) {
	w.t.Helper()
	holder = w.claimOf(key)
	require.True(w.t, w.acquire(holder).Acquired)
	for range n {
		waiters = append(waiters, w.claimOf(key))
		require.True(w.t, w.acquire(waiters[len(waiters)-1]).Requeued)
	}
	return holder, waiters
}

func (w *world) release(c *engine.Claim) engine.Release {
	w.t.Helper()
	r, err := w.of(c).Release(w.t.Context(), c)
	require.NoError(w.t, err)
	return r
}

// renew sends heartbeats of waiters.
func (w *world) renew(of ...*engine.Claim) watchdog.Renewed {
	w.t.Helper()
	var positions []watchdog.Subject
	for _, c := range of {
		positions = append(positions, watchdog.Subject{Key: c.Key, Owner: c.ID.String()})
	}
	return w.p.HeartbeatRenewer().Renew(w.t.Context(), [][]watchdog.Subject{positions}, lease, false)[0]
}

// heartbeat is renew, and reports which of the waiters must keep waiting.
func (w *world) heartbeat(of ...*engine.Claim) []bool {
	w.t.Helper()
	renewed := w.renew(of...)
	require.NoError(w.t, renewed.Err)
	return renewed.Held
}

// queue returns the owners in the queue.
func (w *world) queue() []string {
	w.t.Helper()
	owners, err := waiting(w.s.Client, orders)
	require.NoError(w.t, err)
	return owners
}

func ids(claims ...*engine.Claim) (owners []string) {
	for _, c := range claims {
		owners = append(owners, c.ID.String())
	}
	return owners
}

// dump returns the values of all keys of the lock.
func (w *world) dump() (all []string) {
	w.t.Helper()
	for _, name := range keysOf(orders) {
		value, err := testserver.Query(w.addr, "DUMP", name)
		require.NoError(w.t, err)
		all = append(all, value...)
	}
	return all
}
