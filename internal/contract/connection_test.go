package contract_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// borrow returns a connection and a client that borrows it.
func borrow(t *testing.T, s *testserver.Server, opt rueidis.ClientOption, opts ...redlatch.Option) (rueidis.Client, *redlatch.Client) {
	t.Helper()
	opt.InitAddress = []string{s.Addr}
	conn, err := rueidis.NewClient(opt)
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	c, err := redlatch.Wrap(context.Background(), conn, opts...) // no context so far that could end
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return conn, c
}

// A borrowed connection spreads requests over several, so that one can overtake another,
// or speaks the older protocol. It stays open when the client is closed.
func TestBorrowedConnections(t *testing.T) {
	type row struct {
		name string
		opt  rueidis.ClientOption
	}
	rows := []row{
		{"multiplexed", rueidis.ClientOption{PipelineMultiplex: 3}},
		{"RESP2", rueidis.ClientOption{AlwaysRESP2: true, DisableCache: true}},
	}
	harness.EachOf(t, rows, func(m row) string { return m.name }, func(t *testing.T, s *testserver.Server, m row) {
		var conns []rueidis.Client
		var clients []*redlatch.Client
		for range 2 {
			conn, c := borrow(t, s, m.opt, quiet)
			conns, clients = append(conns, conn), append(clients, c)
		}
		together(t, s, all, func(t *testing.T, k kind) {
			const goroutines = 3
			passes := harness.Size(3, 25)
			r := &room{k: k}
			var calls []<-chan error
			for _, c := range clients {
				for range goroutines {
					calls = append(calls, async(func() error {
						for range passes {
							if err := r.pass(t, k.of(c, k.name), false); err != nil {
								return err
							}
						}
						return nil
					}))
				}
			}
			for _, call := range calls {
				harness.Do(t, s.Addr, "SCRIPT", "FLUSH")
				require.NoError(t, ends(t, call, time.Minute))
			}
			require.Equal(t, len(calls)*passes, int(r.entries.Load()))
		})
		harness.Idle(t, clients...)
		for i, c := range clients {
			c.Close()
			require.NoError(t, conns[i].Do(t.Context(), conns[i].B().Ping().Build()).Error())
		}
	})
}

// What one caller's deadline does to the connection must not fail another's call.
func TestADeadlineFailsNobodyElse(t *testing.T) {
	eachKind(t, leased, func(t *testing.T, s *testserver.Server, k kind) {
		k.prepare(t, s.Addr, "warm", "a")
		_, c := borrow(t, s, rueidis.ClientOption{DisableCache: true, PipelineMultiplex: -1}, quiet)
		ctx := context.Background()
		require.NoError(t, k.of(c, "warm").Do(ctx, nothing))
		harness.Do(t, s.Addr, "CLIENT", "PAUSE", "60000", "WRITE")
		defer func() { harness.Do(t, s.Addr, "CLIENT", "UNPAUSE") }()
		short := async(func() error { return only(k.of(c, "a").Lock(ctx, lock.Wait(100*time.Millisecond))) })
		harness.Eventually(t, soon, "the first call is under way", func() bool { return c.Stats().Attempting > 0 })
		others := c.Stats().Attempting
		other := async(func() error { return k.of(c, "orders").Do(ctx, nothing) })
		harness.Eventually(t, soon, "the other call is under way", func() bool { return len(short) > 0 || c.Stats().Attempting > others })
		harness.NotAcquired(t, ends(t, short, soon))
		harness.Do(t, s.Addr, "CLIENT", "UNPAUSE")
		require.NoError(t, ends(t, other, soon))
		harness.Idle(t, c)
		k.unmake(t, s.Addr, "warm", "a")
	})
}

// All connections that a borrowed pool has for blocking commands are in use: holds are
// renewed all the same, and Close does not wait for those who want to subscribe.
func TestCloseAndRenewalWithAnExhaustedPool(t *testing.T) {
	const timeout = 5 * time.Second
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		conn, c := borrow(t, s, rueidis.ClientOption{DisableCache: true, BlockingPoolSize: 1}, redlatch.WithWatchdogTimeout(timeout), quiet)
		var mine, theirs []lock.Hold
		other := harness.Client(t, s)
		for _, k := range choose(leased) {
			k.prepare(t, s.Addr, "my "+k.name, "their "+k.name)
			mine = append(mine, mustLock(t, t.Context(), k.of(c, "my "+k.name)))
			theirs = append(theirs, mustLock(t, t.Context(), k.of(other, "their "+k.name)))
		}
		blocked := async(func() error {
			return conn.Do(context.Background(), conn.B().Blpop().Key("never").Timeout(0).Build()).Error()
		})
		harness.Eventually(t, soon, "the pool is exhausted", func() bool {
			info, err := conn.Do(t.Context(), conn.B().Info().Section("clients").Build()).ToString()
			return err == nil && strings.Contains(info, "blocked_clients:1")
		})
		<-time.After(timeout + timeout/2)
		for _, h := range mine {
			require.NoError(t, context.Cause(h.Context()), h.Name())
			require.NoError(t, h.Unlock(t.Context()))
		}
		var waiters []<-chan error
		for _, k := range choose(leased) {
			waiters = append(waiters, async(func() error { return only(k.rival(c, "their "+k.name).Lock(t.Context())) }))
		}
		harness.Eventually(t, soon, "they want to subscribe", func() bool {
			stats := c.Stats()
			return stats.Waiting+stats.Attempting == len(waiters) && c.PubSub().Listeners > 0
		})
		closed := async(func() error { c.Close(); return nil })
		require.NoError(t, ends(t, closed, soon))
		for _, w := range waiters {
			require.ErrorIs(t, ends(t, w, soon), lock.ErrClosed)
		}
		harness.Do(t, s.Addr, "RPUSH", "never", "ever")
		require.NoError(t, ends(t, blocked, soon))
		for _, h := range theirs {
			require.NoError(t, h.Unlock(t.Context()))
		}
		for _, k := range choose(leased) {
			k.unmake(t, s.Addr, "my "+k.name, "their "+k.name)
		}
		harness.NothingStays(t, s.Addr)
	})
}

// panicking is a connection whose hook panics in the next request after it was armed.
type panicking struct {
	rueidis.Client
	armed *atomic.Bool
}

func (p panicking) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	if p.armed.CompareAndSwap(true, false) {
		panic("a bug")
	}
	return p.Client.Do(ctx, cmd)
}

func (p panicking) DoMulti(ctx context.Context, cmds ...rueidis.Completed) []rueidis.RedisResult {
	if p.armed.CompareAndSwap(true, false) {
		panic("a bug")
	}
	return p.Client.DoMulti(ctx, cmds...)
}

// A hook of the connection panics in the request of a caller, with a context that can end or not. The call
// fails, and the name can be locked afterwards.
func TestAHookThatPanics(t *testing.T) {
	single := func(k kind) bool { return acquired(k) && k.name != "red" } // which needs only a majority
	eachKind(t, single, func(t *testing.T, s *testserver.Server, k kind) {
		var armed atomic.Bool
		c, err := redlatch.Wrap(t.Context(), panicking{harness.Conn(t, s.Addr), &armed}, quiet)
		require.NoError(t, err)
		t.Cleanup(c.Close)
		k.prepare(t, s.Addr, "orders")
		for _, ctx := range []context.Context{t.Context(), context.Background()} {
			armed.Store(true)
			_, err := k.of(c, "orders").TryLock(ctx)
			failure{lock.ErrIndeterminate, nil}.check(t, err, "orders")
			require.ErrorContains(t, err, "a bug")
			require.NoError(t, k.of(c, "orders").Do(ctx, nothing, lock.Wait(soon)))
		}
		if k.polls {
			return
		}
		h := mustLock(t, t.Context(), k.rival(c, "orders"))
		waiter := async(func() error { return k.of(c, "orders").Do(t.Context(), nothing) })
		harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(1, c) })
		armed.Store(true)
		err = h.Unlock(t.Context()) // repeated, or done by the request of the waiter
		require.NoError(t, err)
		require.NoError(t, ends(t, waiter, 2*soon))
		harness.Idle(t, c)
	})
}
