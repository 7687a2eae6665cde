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
	"github.com/redlatch/redlatch/lock"
)

func TestMain(m *testing.M) { harness.Main(m, workers) }

const (
	clientID = "0b8b3c1e-8c5a-4f1e-9b1a-2f6d3f0a7c11"
	javaID   = "5d1f7a52-31c4-4c1b-8f0e-7f2a9f4f3d02"
	orders   = "orders"
	lease    = 30 * time.Second
)

// newSession returns a session on a connection.
func newSession(t testing.TB, conn rueidis.Client, wait time.Duration) *session.Session {
	s := session.New(session.Config{
		Client: conn, ID: clientID, WatchdogTimeout: lease, FairWait: wait,
		MapName: func(name string) string { return name }, Logger: slog.New(slog.DiscardHandler),
	})
	t.Cleanup(s.Close)
	return s
}

// world is a protocol on a server of its own.
type world struct {
	t    testing.TB
	s    *session.Session
	p    *fairlock.Protocol
	addr string
}

func newWorld(t testing.TB, s *testserver.Server, wait time.Duration, opts ...fairlock.Option) *world {
	sess := newSession(t, harness.Conn(t, s.Addr), wait)
	return &world{t, sess, fairlock.NewProtocol(sess, orders, opts...), s.Addr}
}

func ownerOf(t testing.TB, id string, number int) lock.Owner {
	o, err := lock.NewOwner(id, uint64(number))
	require.NoError(t, err)
	return o
}

// claim returns a new claim that waits.
func (w *world) claim() *engine.Claim {
	return &engine.Claim{Key: orders, ID: w.s.NewOwner(), Lease: lease, Waits: true}
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

func (w *world) release(c *engine.Claim) engine.Release {
	w.t.Helper()
	r, err := w.of(c).Release(w.t.Context(), c)
	require.NoError(w.t, err)
	return r
}

func TestFirstComeFirstServed(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		w := newWorld(t, s, 5*time.Minute)
		a, b, c := w.claim(), w.claim(), w.claim()
		require.True(t, w.acquire(a).Acquired)
		for _, waiter := range []*engine.Claim{b, c} {
			answer := w.acquire(waiter)
			require.True(t, answer.Queued && answer.Requeued, "%+v", answer)
			require.Equal(t, waiter == b, answer.FreeIn > lease-5*time.Second, "%+v", answer)
			answer = w.acquire(waiter)
			require.True(t, answer.Queued && !answer.Requeued, "%+v", answer)
		}
		require.Equal(t, engine.Free, w.release(a).State)
		require.False(t, w.acquire(c).Acquired)
		require.True(t, w.acquire(b).Acquired)
		require.Equal(t, engine.Free, w.release(b).State)
		once := w.claim()
		once.Waits = false
		answer := w.acquire(once)
		require.False(t, answer.Acquired || answer.Queued, "the lock is free but has a waiter")
		require.True(t, w.acquire(c).Acquired)
		require.Equal(t, engine.Free, w.release(c).State)
		require.Equal(t, engine.NotHeld, w.release(c).State)
		harness.NothingLeft(t, s.Addr)
	})
}
