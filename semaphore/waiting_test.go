package semaphore_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/semaphore"
)

const (
	// bargingTime is how long younger requests may barge past a request.
	bargingTime = 100 * time.Millisecond
	// heartbeatTimeout is how long a dead client stays in the wait queue.
	heartbeatTimeout = 3 * time.Second
	// heartbeat is the heartbeat interval.
	heartbeat = heartbeatTimeout / 3
)

// waiter is a background call of Acquire.
type waiter = harness.Call[acquired]

func start(t testing.TB, sem anySemaphore, n int, opts ...lock.WaitOption) *waiter {
	return harness.Start(t, context.Background(), func(ctx context.Context) (acquired, error) { return sem.acquire(ctx, n, opts...) })
}

// startBehind is start for a semaphore of client c. It returns when the call waits, behind
// earlier calls of this client.
func startBehind(t testing.TB, c *redlatch.Client, sem anySemaphore, n int, opts ...lock.WaitOption) *waiter {
	t.Helper()
	before := c.Stats()
	w := start(t, sem, n, opts...)
	harness.Waits(t, before.Waiting+before.Attempting+1, c)
	return w
}

// startQueued is start. It returns when c is in the wait queue, behind others.
func startQueued(t testing.TB, addr string, c *redlatch.Client, sem anySemaphore, n int, others ...*redlatch.Client) *waiter {
	t.Helper()
	w := start(t, sem, n)
	requireQueue(t, addr, "orders", append(others, c)...)
	return w
}

// queue returns the ids of the clients in the wait queue of a semaphore.
func queue(t testing.TB, addr, name string) string {
	t.Helper()
	ids, err := testserver.Query(addr, "ZRANGE", queueKey(name), "0", "-1")
	require.NoError(t, err)
	return strings.Join(ids, " ")
}

// requireQueue returns when the wait queue of a semaphore consists of these clients.
func requireQueue(t testing.TB, addr, name string, clients ...*redlatch.Client) {
	t.Helper()
	var want []string
	for _, c := range clients {
		want = append(want, c.ID())
	}
	// Well before a position times out.
	harness.Eventually(t, slack, "the wait queue", func() bool {
		// The server drops connections if there are too many at once.
		time.Sleep(5 * time.Millisecond)
		return queue(t, addr, name) == strings.Join(want, " ")
	})
}

// requireMessages fails the test unless a client receives n messages from f. Heartbeats are
// too frequent for the time alone to show the reason of an attempt.
func requireMessages(t testing.TB, c *redlatch.Client, n uint64, f func()) {
	t.Helper()
	harness.Eventually(t, soon, "the subscription", func() bool {
		hub := c.Stats().PubSub
		return hub.Channels > 0 && hub.Subscribed == hub.Channels
	})
	before := c.Stats().PubSub.Messages
	f()
	harness.Eventually(t, soon, "messages", func() bool { return c.Stats().PubSub.Messages >= before+n })
}

func TestFirstComeFirstServed(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits = 10
		c := harness.Client(t, s)
		sem := withPermits(t, of(c, "orders"), permits)
		held, rest := mustAcquire(t, sem, 1), mustAcquire(t, sem, permits-1)
		one := startBehind(t, c, sem, 1)
		all := startBehind(t, c, of(c, "orders"), permits)
		late := startBehind(t, c, sem, 1)

		held.release(t)
		first := one.Got()
		rest.release(t)
		require.Equal(t, permits-1, available(t, sem))
		harness.Waits(t, 2, c) // the request for all permits, and the one behind it
		require.True(t, all.Running() && late.Running())
		first.release(t)
		big := all.Got()
		require.True(t, late.Running())
		big.release(t)
		late.Got().release(t)
		require.Equal(t, permits, available(t, sem))
	})
}

// The size and number of requests for a release do not depend on the number of waiters. It serves the
// next waiter of the same process in the same request.
func TestReleaseSizeIsIndependentOfWaiters(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const waiters, releases = 100, 10
		loadScripts(t, s.Addr)
		// At the end of a turn a waiter would make an attempt of its own.
		c := harness.Client(t, s, redlatch.WithTurn(time.Minute))
		sem := withPermits(t, of(c, "orders"), 1)
		held := mustAcquire(t, sem, 1)
		got := make(chan acquired, waiters)
		for range waiters {
			go func() {
				if a, err := sem.acquire(t.Context(), 1); err == nil {
					got <- a
				}
			}()
		}
		requireQueue(t, s.Addr, "orders", c)
		harness.Waits(t, waiters, c)
		time.Sleep(bargingTime) // a younger one that becomes the first makes an attempt when it is as old
		bytes := func() int {
			info, err := testserver.Info(s.Addr, "stats")
			require.NoError(t, err)
			n, err := strconv.Atoi(info["total_net_input_bytes"])
			require.NoError(t, err)
			return n
		}
		conn, begin, least := harness.Conn(t, s.Addr), time.Now(), math.MaxInt
		scripts := harness.Commands(t, conn)["evalsha"]
		for range releases {
			before := bytes()
			held.release(t)
			held = <-got
			least = min(least, bytes()-before) // a heartbeat adds some
		}
		require.LessOrEqual(t, harness.Commands(t, conn)["evalsha"]-scripts, releases+2+int(time.Since(begin)/heartbeat))
		require.Less(t, least, 1500)
		held.release(t)
		for range waiters - releases {
			(<-got).release(t)
		}
		require.Equal(t, 1, available(t, sem))
	})
}

// Requests that exceed MaxBatch together are sent one after the other.
func TestLargeBatchIsSplit(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		const each, waiters = semaphore.MaxBatch/2 + 1, 2
		loadScripts(t, s.Addr)
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		e, other := withPermits(t, permitSem{c.PermitSemaphore("orders")}, 0), harness.Client(t, s).PermitSemaphore("orders")
		var all []*waiter
		for range waiters {
			all = append(all, startBehind(t, c, e, each))
		}
		scripts := harness.Commands(t, conn)["evalsha"]
		require.NoError(t, other.AddPermits(t.Context(), waiters*each))
		for _, w := range all {
			defer w.Got().release(t)
		}
		require.Greater(t, harness.Commands(t, conn)["evalsha"]-scripts, waiters) // and AddPermits
	})
}

// The expiry sends no message. A release of the own process that does not suffice may precede
// it.
func TestNextExpiryWakesWaiter(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		const lease = 300 * time.Millisecond // well before any heartbeat
		c := s.Client(t)
		e := permitSemaphore(t, s.Client(t), 4)
		take(t, e, 1, semaphore.Forever())
		take(t, e, 1, lock.Lease(time.Hour))
		for _, wanted := range []int{1, 2} {
			other := take(t, c.PermitSemaphore("orders"), 1)
			begin := time.Now()
			take(t, e, 1, lock.Lease(lease))
			w := start(t, permitSem{c.PermitSemaphore("orders")}, wanted)
			time.Sleep(lease / 2)
			if wanted == 2 {
				require.NoError(t, other.Release(t.Context()))
			}
			w.Got().release(t)
			require.InDelta(t, lease, w.At.Sub(begin), float64(10*time.Millisecond), "%d permits", wanted)
			if wanted == 1 {
				require.NoError(t, other.Release(t.Context()))
			}
		}
	})
}

// A release whose message nobody hears wakes the waiters of its process, which do not have to poll.
func TestWithoutMessages(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		harness.Do(t, s.Addr, "ACL", "SETUSER", "quiet", "on", ">secret", "~*", "+@all", "resetchannels")
		defer harness.Do(t, s.Addr, "ACL", "DELUSER", "quiet")
		c, err := redlatch.New(t.Context(), rueidis.ClientOption{InitAddress: []string{s.Addr}, Username: "quiet", Password: "secret"},
			redlatch.WithTurn(0), redlatch.WithLogger(slog.New(slog.DiscardHandler)))
		require.NoError(t, err)
		defer c.Close()
		sem := withPermits(t, of(c, "orders"), 1)
		held := mustAcquire(t, sem, 1)
		const times = 5
		var took time.Duration
		for range times {
			w := startQueued(t, s.Addr, c, sem, 1)
			begin := time.Now()
			held.release(t)
			held = w.Got()
			took += w.At.Sub(begin)
		}
		require.Less(t, took, times*heartbeat/2)
		held.release(t)
	})
}

// Close waits for a release without a reply.
func TestCloseWaitsForReleases(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c, g := harness.GatedClient(t, s)
		sem, script := withPermits(t, of(c, "orders"), 2), "release"
		if _, leased := sem.(permitSem); leased {
			script = "permit_release"
		}
		held := mustAcquire(t, sem, 2)
		released, closed := make(chan error, 1), make(chan struct{})
		g.Keep(t, load(t, s.Addr, script), 1, func() { go func() { released <- sem.giveBack(context.Background(), held) }() })
		go func() {
			c.Close()
			close(closed)
		}()
		ended, cancel := context.WithCancel(t.Context())
		cancel() // so that Ping sends nothing
		harness.Eventually(t, soon, "the client is closing", func() bool { return errors.Is(c.Ping(ended), lock.ErrClosed) })
		select {
		case <-closed:
			require.FailNow(t, "Close did not wait")
		default:
		}

		require.NoError(t, g.Open())
		harness.Receive(t, soon, "the end of Close", closed)
		require.NoError(t, harness.Receive(t, soon, "the end of the release", released))
		require.Equal(t, 2, available(t, of(harness.Client(t, s), "orders")))
	})
}

// Permits of a waiter that was served after it had left are released, unless the semaphore was
// deleted meanwhile: the release would create it again.
func TestGiveBackDoesNotCreateSemaphore(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s)
		acquire := load(t, s.Addr, "acquire")
		mine, other := plain{c.Semaphore("orders")}, withPermits(t, plain{harness.Client(t, s).Semaphore("orders")}, 0)
		waiters := []*waiter{startQueued(t, s.Addr, c, mine, 1), startBehind(t, c, mine, 1)}
		g.Keep(t, acquire, 1, func() { require.NoError(t, other.Release(t.Context(), 2)) })
		for _, w := range waiters {
			w.Leave()
		}
		harness.Do(t, s.Addr, "DEL", "orders")
		require.NoError(t, g.Open())
		harness.Idle(t, c)
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", "orders"))
	})
}

// A request of another process does not barge past a request that has waited for 100 ms, even
// if enough permits for it are free.
func TestYoungRequestsDoNotBarge(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits = 10
		old, young := harness.Client(t, s), harness.Client(t, s)
		holder := withPermits(t, of(harness.Client(t, s), "orders"), permits)
		held := mustAcquire(t, holder, 1)

		all := start(t, of(old, "orders"), permits)
		early, err := of(young, "orders").tryAcquire(t.Context(), 1)
		if time.Since(all.Begun) < bargingTime {
			require.NoError(t, err, "until then any request may be served")
		}
		if err == nil {
			early.release(t)
		}
		requireQueue(t, s.Addr, "orders", old)
		require.GreaterOrEqual(t, time.Since(all.Begun), bargingTime)

		require.Equal(t, permits-1, available(t, holder))
		for _, sem := range []anySemaphore{of(young, "orders"), holder, of(old, "orders")} {
			require.ErrorIs(t, only(sem.tryAcquire(t.Context(), 1)), lock.ErrNotAcquired)
			require.ErrorIs(t, only(sem.acquire(t.Context(), 1, lock.Wait(0))), lock.ErrNotAcquired)
		}
		one := startQueued(t, s.Addr, young, of(young, "orders"), 1, old)
		held.release(t)
		got := all.Got()
		require.True(t, one.Running())
		requireMessages(t, young, 1, func() { got.release(t) })
		one.Got().release(t)
		requireQueue(t, s.Addr, "orders")
		require.Equal(t, permits, available(t, holder))
	})
}

// A request for all permits is served despite an endless series of requests for one or two, and never
// together with one of them.
func TestLargeRequestDoesNotStarve(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		const permits, small = 4, 3
		big := withPermits(t, of(harness.Client(t, s), "orders"), permits)
		var used atomic.Int32
		use := func(sem anySemaphore, n int32) error {
			held, err := sem.acquire(t.Context(), int(n))
			if err != nil {
				return err
			}
			assert.LessOrEqual(t, used.Add(n), int32(permits))
			time.Sleep(5 * time.Millisecond)
			used.Add(-n)
			return sem.giveBack(context.Background(), held)
		}
		var over atomic.Bool
		ended := make(chan error, small*permits)
		for range small {
			sem := of(harness.Client(t, s), "orders")
			for g := range permits {
				go func() {
					var err error
					for err == nil && !over.Load() {
						err = use(sem, int32(1+g%2))
					}
					ended <- err
				}()
			}
		}
		for range 5 {
			begin := time.Now()
			require.NoError(t, use(big, permits))
			require.Less(t, time.Since(begin), bargingTime+slack)
		}
		over.Store(true)
		for range small * permits {
			require.NoError(t, harness.Receive(t, soon, "the end of a caller", ended))
		}
		require.Equal(t, permits, available(t, big))
	})
}

// A client in the wait queue whose heartbeat is overdue is removed.
func TestDeadClientLosesQueuePosition(t *testing.T) {
	eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, of semaphoreOf) {
		sem := withPermits(t, of(s.Client(t), "orders"), 2)
		now := time.Now()
		for key, since := range map[string]time.Time{queueKey("orders"): now.Add(-time.Minute), heartbeatKey("orders"): now.Add(heartbeatTimeout)} {
			_, err := s.ZAdd(key, float64(since.UnixMilli()), "5d1f7a52-31c4-4c1b-8f0e-7f2a9f4f3d02")
			require.NoError(t, err)
		}
		require.ErrorIs(t, only(sem.tryAcquire(t.Context(), 1)), lock.ErrNotAcquired)
		got := mustAcquire(t, sem, 1)
		require.InDelta(t, heartbeatTimeout, time.Since(now), float64(bargingTime))
		mustAcquire(t, sem, 1)
		got.release(t)
		require.False(t, s.Exists(queueKey("orders")) || s.Exists(heartbeatKey("orders")))
	})
}

// Heartbeats keep the keys of the wait queue, which expire soon after the last one.
func TestWaitQueueExpires(t *testing.T) {
	eachVirtually(t, func(t *testing.T, s *harness.VirtualServer, of semaphoreOf) {
		held := mustAcquire(t, withPermits(t, of(s.Client(t), "orders"), 1), 1)
		w := start(t, of(s.Client(t), "orders"), 1)
		time.Sleep(2 * bargingTime)
		for range 100 {
			for _, key := range []string{queueKey("orders"), heartbeatKey("orders")} {
				require.Greater(t, s.TTL(key), heartbeatTimeout/2)
				require.LessOrEqual(t, s.TTL(key), heartbeatTimeout)
			}
			time.Sleep(heartbeatTimeout / 7)
		}
		held.release(t)
		w.Got().release(t)
	})
}

// A queue position belongs to the client. When the waiter it was for leaves, the next waiter of that
// client has its own as soon as the first one has left it: before a client that came later, and behind one that came
// earlier.
func TestNextWaiterIsNotOvertaken(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		holder := withPermits(t, of(harness.Client(t, s), "orders"), 2)
		held := mustAcquire(t, holder, 2) // so leaving publishes nothing
		leave := load(t, s.Addr, "leave")
		for _, nextIsOlder := range []bool{true, false, true, false} {
			c, g := harness.GatedClient(t, s)
			other := harness.Client(t, s)
			first := startQueued(t, s.Addr, c, of(c, "orders"), 2)
			var next, theirs *waiter
			want := other.ID() + " " + c.ID()
			if nextIsOlder {
				next = startBehind(t, c, of(c, "orders"), 2)
				time.Sleep(2 * bargingTime)
				want = c.ID() + " " + other.ID()
			}
			theirs = startQueued(t, s.Addr, other, of(other, "orders"), 2, c)
			if !nextIsOlder {
				next = startBehind(t, c, of(c, "orders"), 2)
				time.Sleep(2 * bargingTime)
			}

			left := g.Arm(harness.KeepReply, leave, 1)
			first.Leave()
			harness.Reached(t, left)
			require.Equal(t, want, queue(t, s.Addr, "orders"))

			require.NoError(t, g.Open())
			next.Leave()
			requireQueue(t, s.Addr, "orders", other)
			theirs.Leave()
			requireQueue(t, s.Addr, "orders")
		}
		held.release(t)
	})
}

// A next waiter that has not waited for long joins the wait queue when it has, also if an attempt was
// sent before and is answered after that.
func TestYoungWaiterJoinsWaitQueueInTime(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		loadScripts(t, s.Addr)
		c, g := harness.GatedClient(t, s)
		mine, holder := of(c, "orders"), withPermits(t, of(harness.Client(t, s), "orders"), 2)
		held, rest := mustAcquire(t, holder, 1), mustAcquire(t, holder, 1)
		position := func() string {
			position, err := testserver.Query(s.Addr, "ZRANGE", queueKey("orders"), "0", "0", "WITHSCORES")
			require.NoError(t, err)
			return strings.Join(position, " ")
		}
		leaving := startQueued(t, s.Addr, c, mine, 1)
		for range 3 {
			before, next := position(), startBehind(t, c, mine, 1)
			leaving.Leave()
			// Well before its next heartbeat.
			harness.Eventually(t, slack, "the next waiter is queued", func() bool { return position() != "" && position() != before })
			harness.Waits(t, 1, c)
			leaving = next
		}

		// Both kinds send such an attempt with the script of their own.
		script := "acquire"
		if _, leased := mine.(permitSem); leased {
			script = "permit_acquire"
		}
		var next *waiter
		g.Keep(t, load(t, s.Addr, script), 1, func() {
			next = startBehind(t, c, mine, 1)
			held.release(t)
		})
		sent := time.Since(next.Begun)
		<-time.After(3 * bargingTime / 2)
		if sent < bargingTime { // else the attempt itself has made it join
			require.Empty(t, queue(t, s.Addr, "orders"))
		}
		require.NoError(t, g.Open())
		served := leaving.Got()
		harness.Eventually(t, time.Second, "the next waiter is queued", func() bool { return queue(t, s.Addr, "orders") == c.ID() })
		rest.release(t)
		next.Got().release(t)
		served.release(t)
	})
}

// A request for more permits than the semaphore has fails at once and delays no other, also if
// the total shrinks while it waits.
func TestOversizedRequestBlocksNobody(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		here, elsewhere := harness.Client(t, s), harness.Client(t, s)
		e, mine := withPermits(t, permitSem{elsewhere.PermitSemaphore("orders")}, 3), permitSem{here.PermitSemaphore("orders")}
		fails := func(w *waiter) {
			t.Helper()
			require.ErrorIs(t, w.End(), lock.ErrInvalid)
		}
		began := time.Now()
		fails(start(t, mine, 5))
		require.ErrorIs(t, only(mine.TryAcquire(t.Context(), 4)), lock.ErrInvalid)
		require.Less(t, time.Since(began), slack)

		for _, c := range []*redlatch.Client{here, elsewhere} {
			held := mustAcquire(t, e, 2)
			large := startQueued(t, s.Addr, here, mine, 3)
			small := startBehind(t, c, permitSem{c.PermitSemaphore("orders")}, 1)
			fails(start(t, mine, 7))
			require.NoError(t, e.SetPermits(t.Context(), 2))
			fails(large)
			held.release(t)
			small.Got().release(t)
			requireQueue(t, s.Addr, "orders")
			require.NoError(t, e.SetPermits(t.Context(), 3))
		}

		// Without any permit nobody can be blocked, and requests wait.
		require.NoError(t, e.SetPermits(t.Context(), 0))
		large := startQueued(t, s.Addr, elsewhere, e, 5)
		small := startQueued(t, s.Addr, here, mine, 1, elsewhere)
		require.NoError(t, e.SetPermits(t.Context(), 3))
		fails(large)
		small.Got().release(t)
	})
}
