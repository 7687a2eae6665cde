package semaphore_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
)

// A heartbeat that is never overdue counts like a late one: the waiters behind it do not poll, and pass it.
func TestAHeartbeatWithoutEndIsBounded(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		ends := []string{"inf", "1e300", "9e15"}
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		for _, end := range ends {
			withPermits(t, of(c, end), 1)
			harness.Do(t, s.Addr, "ZADD", queueKey(end), "1", "nobody")
			harness.Do(t, s.Addr, "ZADD", heartbeatKey(end), end, "nobody")
		}
		before := harness.Commands(t, conn)["evalsha"]
		var waiters []*waiter
		for _, end := range ends {
			waiters = append(waiters, start(t, of(c, end), 1))
		}
		for i, w := range waiters {
			require.NoError(t, w.EndWithin(heartbeatTimeout+slack), ends[i])
		}
		// One attempt at once, one after 100 ms, and one for each third of the timeout, which messages and
		// the end of the heartbeat can double.
		require.LessOrEqual(t, harness.Commands(t, conn)["evalsha"]-before, len(ends)*2*(2+3))
	})
}

// A request removes 1,000 dead clients from the wait queue, and the next goes on.
func TestManyDeadClients(t *testing.T) {
	eachKind(t, func(t *testing.T, s *testserver.Server, of semaphoreOf) {
		c, conn := harness.Client(t, s), harness.Conn(t, s.Addr)
		sem := withPermits(t, of(c, "orders"), 1)
		harness.Do(t, s.Addr, "EVAL", `for i = 1, ARGV[1] do redis.call('ZADD', KEYS[1], i, 'dead ' .. i) end`,
			"1", queueKey("orders"), "20000")
		before := harness.Commands(t, conn)
		require.Error(t, only(sem.tryAcquire(t.Context(), 1)), "others may be before it")
		after := harness.Commands(t, conn)
		// Two commands for each client, and those that the script begins with.
		require.LessOrEqual(t, after["zrem"]-before["zrem"], 2*1000+10)
		require.NoError(t, start(t, sem, 1).EndWithin(slack))
		require.Equal(t, ":0", harness.Do(t, s.Addr, "EXISTS", queueKey("orders")))
	})
}

// What is not the reply to a request of this client is no reply, however long it is.
func TestAForeignReplyIsRefused(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		require.NoError(t, harness.Client(t, s).Semaphore("orders").AddPermits(t.Context(), 1))
		for _, entry := range []string{"1 1 1" + strings.Repeat(" 1", 500_000), "x", ""} {
			c := harness.Client(t, s)
			harness.Do(t, s.Addr, "HSET", wire.SemaphoreRequests("orders", c.ID()), "1", entry)
			require.ErrorContains(t, c.Semaphore("orders").TryAcquire(t.Context(), 1), "not an entry of redlatch")
		}
	})
}
