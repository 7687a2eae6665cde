package rlock_test

import (
	"context"
	"math"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/internal/wire"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/rlock"
)

const counter = "redisson_lock_token:{orders}"

// raise raises the tokens of a lock and returns its last token.
func raise(t *testing.T, l *rlock.Fenced, floor int64) int64 {
	t.Helper()
	last, err := l.RaiseTokens(t.Context(), floor)
	require.NoError(t, err)
	return last
}

// nextToken returns the token of the next acquisition.
func nextToken(t *testing.T, l *rlock.Fenced) int64 {
	t.Helper()
	h := mustLock(t, l)
	require.NoError(t, h.Unlock(t.Context()))
	return h.Token()
}

// After a server has lost its data, the tokens continue above those that a resource has seen.
func TestTokensContinueAfterDataLoss(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).FencedLock("orders")
		harness.Do(t, s.Addr, "SET", counter, "41")
		guard := rlock.NewGuard(nextToken(t, l))
		harness.Do(t, s.Addr, "FLUSHALL")
		require.ErrorIs(t, guard.Check(nextToken(t, l)), rlock.ErrStaleToken)

		require.Equal(t, guard.Highest(), raise(t, l, guard.Highest()))
		require.Equal(t, int64(-1), harness.PTTL(t, s.Addr, counter))
		token := nextToken(t, l)
		require.Equal(t, int64(43), token)
		require.NoError(t, guard.Check(token))
	})
}

func TestTokensAreNeverLowered(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l := harness.Client(t, s).FencedLock("orders")
		require.Zero(t, raise(t, l, 0))
		harness.NothingLeft(t, s.Addr)
		for _, step := range []struct{ floor, last int64 }{
			{7, 7}, {7, 7}, {6, 7}, {0, 7}, {8, 8},
			{1<<53 - 3, 1<<53 - 3}, {1<<53 - 4, 1<<53 - 3}, {1<<53 - 2, 1<<53 - 2}, {9, 1<<53 - 2},
		} {
			require.Equal(t, step.last, raise(t, l, step.floor), step)
			require.Equal(t, []string{strconv.FormatInt(step.last, 10)}, stored(t, s), step)
		}
		require.Equal(t, int64(wire.MaxToken), nextToken(t, l), "the last one")
	})
}

// Whoever holds the lock keeps its token, and the next one, of another process, has a higher one than the floor.
func TestTokensAreRaisedWhileTheLockIsHeld(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		l, far := harness.Client(t, s).FencedLock("orders"), harness.Client(t, s).FencedLock("orders")
		h := mustLock(t, l)
		require.Equal(t, int64(1000), raise(t, far, 1000))
		require.Equal(t, int64(1), h.Token())
		harness.NotAcquired(t, second(far.TryLock(t.Context())))
		require.NoError(t, h.Unlock(t.Context()))
		require.Equal(t, int64(1001), nextToken(t, far))
	})
}

// stored returns the reply to the command that reads the counter.
func stored(t *testing.T, s *testserver.Server) []string {
	t.Helper()
	reply, err := testserver.Query(s.Addr, "GET", counter)
	require.NoError(t, err)
	return reply
}

func second[T any](_ T, err error) error { return err }

// A process that passes the lock on has tokens in store for its waiters. It does without them when it learns
// that the counter was raised, with the next check.
func TestTokensInStoreAreDroppedWhenTheCounterIsRaised(t *testing.T) {
	const waiters = 6
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		c := harness.Client(t, s)
		l, far := c.FencedLock("orders"), harness.Client(t, s).FencedLock("orders")
		h := mustLock(t, l)
		holds := make(chan lock.Hold, waiters)
		for range waiters {
			go func() {
				h, err := l.Lock(context.Background())
				assert.NoError(t, err)
				holds <- h
			}()
		}
		harness.Waits(t, waiters, c)

		last := h.Token()
		for i := range waiters {
			if i == 2 {
				before := raise(t, far, 0)
				require.GreaterOrEqual(t, before, last+waiters-2, "tokens are in store")
				raise(t, far, 1000)
				last = 1000
			}
			// An answer older than that is not believed, so a check precedes the hand-off.
			time.Sleep(25 * time.Millisecond)
			require.NoError(t, h.Unlock(t.Context()))
			h = harness.Receive(t, soon, "the next hold", holds)
			require.Greater(t, h.Token(), last, i)
			last = h.Token()
		}
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// Tokens grow in the order of the holds, and those after a raise exceed its floor if no process can have some in store.
func TestTokensGrowWhileTheyAreRaised(t *testing.T) {
	const processes, callers, each, raises = 3, 3, 20, 40
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		var clients []*redlatch.Client
		for range processes {
			clients = append(clients, harness.Client(t, s))
		}
		var held int // guarded by the lock, as tokens is
		var tokens []int64
		var all sync.WaitGroup
		for i := range processes * callers {
			all.Go(func() {
				l := clients[i%processes].FencedLock("orders")
				for range each {
					h, err := l.Lock(context.Background())
					if !assert.NoError(t, err) {
						return
					}
					held++
					assert.Equal(t, 1, held)
					tokens = append(tokens, h.Token())
					held--
					assert.NoError(t, h.Unlock(context.Background()))
				}
			})
		}
		all.Go(func() {
			l := clients[0].FencedLock("orders")
			floor := int64(0)
			for range raises {
				last, err := l.RaiseTokens(context.Background(), floor)
				assert.NoError(t, err)
				assert.GreaterOrEqual(t, last, floor)
				floor = last + 5
			}
		})
		all.Wait()
		require.Len(t, tokens, processes*callers*each)
		for i := range tokens[1:] {
			require.Greater(t, tokens[i+1], tokens[i])
		}
		last := raise(t, clients[0].FencedLock("orders"), 0)
		require.GreaterOrEqual(t, last, int64(5*(raises-1)))
		require.Greater(t, nextToken(t, clients[1].FencedLock("orders")), last)
	})
}

func TestInvalidRaises(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		c := harness.Client(t, s)
		l := c.FencedLock("orders")
		for _, floor := range []int64{math.MinInt64, -1, 1<<53 - 1, 1 << 53, math.MaxInt64} {
			_, err := l.RaiseTokens(t.Context(), floor)
			require.ErrorIs(t, err, lock.ErrInvalid, floor)
			require.ErrorContains(t, err, strconv.FormatInt(floor, 10)+": must be from 0 to 9007199254740990")
		}
		var none context.Context
		require.ErrorIs(t, second(l.RaiseTokens(none, 1)), lock.ErrInvalid)
		require.ErrorIs(t, second(c.FencedLock("").RaiseTokens(t.Context(), 1)), lock.ErrInvalid)
		over, cancel := context.WithCancel(t.Context())
		cancel()
		err := second(l.RaiseTokens(over, 1))
		require.ErrorIs(t, err, lock.ErrUnavailable)
		require.ErrorIs(t, err, context.Canceled)
		harness.NothingLeft(t, s.Addr)

		// A counter that allows no further token stays as it is.
		for _, set := range [][]string{
			{"SET", counter, "9007199254740991"}, {"SET", counter, "9223372036854775807"}, {"SET", counter, "-1"},
			{"SET", counter, "x"}, {"SET", counter, "1.5"}, {"SET", counter, "007"}, {"RPUSH", counter, "x"},
		} {
			harness.Do(t, s.Addr, "DEL", counter)
			harness.Do(t, s.Addr, set...)
			before, err := testserver.Query(s.Addr, "DUMP", counter)
			require.NoError(t, err)
			began := time.Now()
			_, err = l.RaiseTokens(t.Context(), 1000)
			require.ErrorContains(t, err, "fencing counter", set)
			require.NotErrorIs(t, err, lock.ErrUnavailable)
			require.NotErrorIs(t, err, lock.ErrIndeterminate)
			require.Less(t, time.Since(began), soon/2, "it is not tried again")
			after, err := testserver.Query(s.Addr, "DUMP", counter)
			require.NoError(t, err)
			require.Equal(t, before, after)
		}

		c.Close()
		require.ErrorIs(t, second(l.RaiseTokens(t.Context(), 1)), lock.ErrClosed)
	})
}

// A raise without a reply is repeated, and has its effect once, however often it arrives.
func TestRaisesWithFaults(t *testing.T) {
	harness.EachOf(t, harness.Faults, harness.Fault.String, func(t *testing.T, s *testserver.Server, fault harness.Fault) {
		harness.WarmUp(t, s.Addr)
		harness.Do(t, s.Addr, "SET", counter, "10")
		c, g := harness.GatedClient(t, s)
		reached := g.Arm(fault, harness.SHA(t, "raise_tokens.lua"), 1)
		call := harness.Start(t, t.Context(), func(ctx context.Context) (int64, error) {
			return c.FencedLock("orders").RaiseTokens(ctx, 1000)
		})
		harness.Reached(t, reached)
		if fault == harness.KeepReply {
			require.NoError(t, g.Open())
		}
		if err := call.End(); err != nil { // the client finds out only shortly before it gives up
			require.Equal(t, harness.Silence, fault)
			require.ErrorIs(t, err, lock.ErrIndeterminate)
		} else {
			require.Equal(t, int64(1000), call.Value)
		}
		require.Equal(t, []string{"1000"}, stored(t, s))

		// What comes late changes nothing.
		harness.Do(t, s.Addr, "SET", counter, "2000")
		require.NoError(t, g.Open())
		require.Equal(t, int64(2000), raise(t, harness.Client(t, s).FencedLock("orders"), 0))
	})
}

// A caller that leaves while its request is under way does not know whether the counter was raised.
func TestACancelledRaiseIsIndeterminate(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		c, g := harness.GatedClient(t, s)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		g.Keep(t, harness.SHA(t, "raise_tokens.lua"), 1, func() {
			go func() { done <- second(c.FencedLock("orders").RaiseTokens(ctx, 1000)) }()
		})
		cancel()
		err := harness.Receive(t, soon, "the end of the call", done)
		require.ErrorIs(t, err, lock.ErrIndeterminate)
		require.ErrorIs(t, err, context.Canceled)
		require.NoError(t, g.Open())
		require.Equal(t, int64(1000), raise(t, harness.Client(t, s).FencedLock("orders"), 0))
	})
}

// What a server refuses after a request without a reply leaves open what that request has done.
func TestARaiseIsIndeterminateIfItsRepetitionIsRefused(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		harness.WarmUp(t, s.Addr)
		c, g := harness.GatedClient(t, s)
		next := harness.Server(t, s.Program)
		harness.Do(t, next.Addr, "RPUSH", counter, "x")
		done := make(chan error, 1)
		g.Keep(t, harness.SHA(t, "raise_tokens.lua"), 1, func() {
			go func() { done <- second(c.FencedLock("orders").RaiseTokens(context.Background(), 1000)) }()
		})
		g.Redirect(next)
		err := harness.Receive(t, soon, "the end of the call", done)
		require.ErrorIs(t, err, lock.ErrIndeterminate)
		require.ErrorContains(t, err, "fencing counter")
	})
}

// In a cluster the counter is in the slot of its lock.
func TestTokensAreRaisedInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		c := harness.ClientAt(t, harness.Cluster(t, shared.Program).Addrs())
		for _, name := range []string{"orders", "{shop}orders", "1", "2", "3", "4", "5"} {
			l := c.FencedLock(name)
			require.Equal(t, wire.Slot(name), wire.Slot(wire.FencingToken(name)))
			require.Equal(t, int64(1000), raise(t, l, 1000))
			require.Equal(t, int64(1001), nextToken(t, l))
		}
	})
}
