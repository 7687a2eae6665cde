package semaphore_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// outageTimeout is the watchdog timeout where a lease or a place has to end. The place
// time is a third of it, and signs of life are given three times as often.
const outageTimeout = 3 * time.Second

// eachKindOf runs a test for both kinds of semaphore on every server, which it may kill.
func eachKindOf(t *testing.T, test func(t *testing.T, s *testserver.Server, kind string)) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		for _, kind := range faultKinds {
			t.Run(kind, func(t *testing.T) { test(t, harness.Own(t, shared.Program), kind) })
		}
	})
}

// made returns a new semaphore in the hands of a client of its own.
func made(t testing.TB, s *testserver.Server, kind string, permits int, opts ...redlatch.Option) *taker {
	t.Helper()
	k := takerOf(harness.Client(t, s, append(opts, faultQuietly)...), s, kind, "pool")
	_, err := k.set(t.Context(), permits)
	require.NoError(t, err)
	return k
}

// waiters returns n waits for a permit each, of clients of their own, all in line.
func waiters(t testing.TB, s *testserver.Server, kind string, n int, opts ...redlatch.Option) (all []*taker, done []<-chan error) {
	t.Helper()
	for i := range n {
		k := takerOf(harness.Client(t, s, append(opts, faultQuietly)...), s, kind, "pool")
		all, done = append(all, k), append(done, k.start(context.Background(), 1))
		harness.Eventually(t, faultSoon, "it is in line", func() bool { return standsInLine(t, s.Addr, "pool") == fmt.Sprintf(":%d", i+1) })
	}
	return all, done
}

// cutAll ends all connections to a server.
func cutAll(t testing.TB, s *testserver.Server) {
	t.Helper()
	harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
	harness.Do(t, s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
}

// Whatever is done to the server while clients wait: each gets its permit, and the sum
// is what it was.
func TestTroubleWhileClientsWait(t *testing.T) {
	restart := func(t *testing.T, s *testserver.Server) {
		harness.Do(t, s.Addr, "SAVE")
		s.Kill()
		require.NoError(t, s.Restart())
	}
	tests := []struct {
		name  string
		does  func(t *testing.T, s *testserver.Server)
		again bool // also before each release
	}{
		{"scripts forgotten", func(t *testing.T, s *testserver.Server) { harness.Do(t, s.Addr, "SCRIPT", "FLUSH") }, true},
		{"connections cut", func(t *testing.T, s *testserver.Server) { cutAll(t, s) }, true},
		{"server restarted with its data", restart, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			eachKindOf(t, func(t *testing.T, s *testserver.Server, kind string) {
				const clients = 3
				first := made(t, s, kind, 1)
				require.NoError(t, first.try(t.Context(), 1))
				all, done := waiters(t, s, kind, clients)
				tt.does(t, s)
				all = append([]*taker{first}, all...)
				for i := range done {
					if i > 0 && tt.again {
						tt.does(t, s)
					}
					require.NoError(t, all[i].release(t.Context()))
					require.NoError(t, await(t, done[i]))
				}
				settled(t)
				requireExact(t, 1, all...)
				require.NoError(t, all[clients].release(t.Context()))
				requireExact(t, 1, all...)
			})
		})
	}
}

// The server loses everything: permits with a lease are lost and say so, and whoever
// waits has its own as soon as somebody makes the semaphore again.
func TestServerRestartedEmpty(t *testing.T) {
	eachKindOf(t, func(t *testing.T, s *testserver.Server, kind string) {
		first := made(t, s, kind, 1, redlatch.WithWatchdogTimeout(outageTimeout))
		require.NoError(t, first.try(t.Context(), 1))
		all, done := waiters(t, s, kind, 2)
		s.Kill()
		require.NoError(t, s.Restart())
		if first.expirable != nil {
			p := first.permits[0]
			select {
			case <-p.Context().Done():
			case <-time.After(outageTimeout + faultSlack):
				require.FailNow(t, "the permit does not end")
			}
			var lost *lock.LostError
			require.ErrorAs(t, context.Cause(p.Context()), &lost)
			require.Equal(t, p.ID(), lost.Permit)
			require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost)
		}
		first.forget()
		harness.Eventually(t, faultSoon, "it is made", func() bool {
			ok, err := first.set(t.Context(), 2)
			return err == nil && ok
		})
		for i := range done {
			require.NoError(t, await(t, done[i]))
		}
		settled(t)
		requireExact(t, 2, all...)
	})
}

// Subscriptions are confirmed and no message ever arrives: everybody is served all the
// same, with a sign of life or the next poll.
func TestAllMessagesAreLost(t *testing.T) {
	const clients = 3
	for _, tt := range []struct {
		timeout time.Duration // of the watchdog
		each    time.Duration // for which one waits for a permit that is free
	}{{outageTimeout, outageTimeout / 9}, {redlatch.DefaultWatchdogTimeout, 10 * time.Second / 3}} {
		t.Run(tt.timeout.String(), func(t *testing.T) {
			eachKindOf(t, func(t *testing.T, s *testserver.Server, kind string) {
				timeout := redlatch.WithWatchdogTimeout(tt.timeout)
				first := made(t, s, kind, 1, timeout)
				require.NoError(t, first.try(t.Context(), 1))
				all, done := []*taker{first}, []<-chan error{}
				for i := range clients {
					c, g := harness.GatedClient(t, s, timeout)
					g.Mute()
					k := takerOf(c, s, kind, "pool")
					all, done = append(all, k), append(done, k.start(context.Background(), 1))
					harness.Eventually(t, faultSoon, "it is in line", func() bool { return standsInLine(t, s.Addr, "pool") == fmt.Sprintf(":%d", i+1) })
				}
				began := time.Now()
				for i := range done {
					require.NoError(t, all[i].release(t.Context()))
					require.NoError(t, await(t, done[i]))
				}
				require.Less(t, time.Since(began), clients*tt.each+faultSlack)
				requireExact(t, 1, all...)
				require.NoError(t, all[clients].release(t.Context()))
			})
		})
	}
}

// For a while the server can be read only. Nothing is taken or given back, and nobody
// claims not to know.
func TestReadOnly(t *testing.T) {
	eachKindOf(t, func(t *testing.T, s *testserver.Server, kind string) {
		k := made(t, s, kind, 5)
		hurried := takerOf(harness.Client(t, s, redlatch.WithWatchdogTimeout(time.Second), faultQuietly), s, kind, "pool")
		require.NoError(t, k.try(t.Context(), 2))
		harness.Do(t, s.Addr, "REPLICAOF", "127.0.0.1", "1")
		defer harness.Do(t, s.Addr, "REPLICAOF", "NO", "ONE")
		err := hurried.try(t.Context(), 1)
		require.ErrorContains(t, err, "READONLY")
		for _, err := range []error{err, hurried.acquire(t.Context(), 1)} {
			require.ErrorContains(t, err, "READONLY")
			require.NotErrorIs(t, err, lock.ErrIndeterminate)
			require.NotErrorIs(t, err, lock.ErrNotAcquired)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		err = k.add(ctx, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, lock.ErrIndeterminate)
		released := make(chan error, 1)
		go func() { released <- k.release(context.Background()) }()
		waiter := hurried.start(t.Context(), 5)
		harness.Eventually(t, faultSoon, "it is tried", func() bool { return harness.GoroutinesIn("(*pool).callAs") > 0 })
		harness.Do(t, s.Addr, "REPLICAOF", "NO", "ONE")
		require.NoError(t, await(t, released))
		require.NoError(t, await(t, waiter))
		requireExact(t, 5, k, hurried)
		require.NoError(t, hurried.release(t.Context()))
	})
}

// Nobody listens where the server was, for longer than a release waits. Then it is done
// in the background; what it gets there for others of the process comes too late for them,
// who ask themselves.
func TestReleaseInAnOutage(t *testing.T) {
	const patience = 5 * time.Second
	eachKindOf(t, func(t *testing.T, s *testserver.Server, kind string) {
		c := harness.Client(t, s, faultQuietly)
		k, heir := takerOf(c, s, kind, "pool"), takerOf(c, s, kind, "pool")
		_, err := k.set(t.Context(), 1)
		require.NoError(t, err)
		require.NoError(t, k.try(t.Context(), 1))
		waiter := heir.start(t.Context(), 1)
		awaitPlace(t, s.Addr, "pool")
		harness.Do(t, s.Addr, "SAVE")
		s.Kill()
		harness.Eventually(t, faultSoon, "the client knows", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			err := k.try(ctx, 1)
			return err != nil && strings.Contains(err.Error(), "refused")
		})
		began := time.Now()
		require.ErrorIs(t, k.release(t.Context()), lock.ErrIndeterminate)
		require.Less(t, time.Since(began), patience+faultSlack)
		require.NoError(t, s.Restart())
		require.NoError(t, await(t, waiter))
		settled(t)
		requireExact(t, 1, k, heir)
		require.NoError(t, heir.release(t.Context()))
		requireExact(t, 1, k, heir)
	})
}

// The server stands still for longer than leases last.
func TestPauseLongerThanTheLease(t *testing.T) {
	const timeout = time.Second // of the watchdog
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		k := made(t, s, expirableKind, 2, redlatch.WithWatchdogTimeout(timeout))
		require.NoError(t, k.acquire(t.Context(), 1))
		require.NoError(t, k.acquire(t.Context(), 1, lock.Lease(timeout)))
		waiting, done := waiters(t, s, expirableKind, 1)
		harness.Do(t, s.Addr, "CLIENT", "PAUSE", "2500", "WRITE")
		for _, p := range k.permits {
			select {
			case <-p.Context().Done():
			case <-time.After(timeout + faultSlack):
				require.FailNow(t, "the permit does not end")
			}
			var lost *lock.LostError
			require.ErrorAs(t, context.Cause(p.Context()), &lost)
			require.Equal(t, lock.ReasonExpired, lost.Reason)
			require.ErrorIs(t, p.Release(t.Context()), lock.ErrLost)
		}
		require.NoError(t, await(t, done[0]))
		settled(t)
		harness.Eventually(t, faultSoon, "the sum is what it was", func() bool {
			free, err := k.expirable.Available(t.Context())
			require.NoError(t, err)
			taken, err := k.expirable.Acquired(t.Context())
			require.NoError(t, err)
			return free == 1 && taken == 1
		})
		runtime.KeepAlive(waiting) // a permit that is dropped is given back
	})
}

// churn has clients take and give back permits, some of which give up, while the server
// is troubled. In the end the sum is exact.
func churn(t *testing.T, s *testserver.Server, kind string, clients []*redlatch.Client, trouble func()) {
	t.Helper()
	const total, goroutines, rounds = 5, 4, 25
	name := "churn-" + kind
	first := takerOf(clients[0], s, kind, name)
	_, err := first.set(t.Context(), total)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	stop := make(chan struct{})
	var troubling, wg sync.WaitGroup
	troubling.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				trouble()
			}
		}
	})
	var mu sync.Mutex
	out, got := 0, 0
	for _, c := range clients {
		for range goroutines {
			wg.Go(func() {
				k := takerOf(c, s, kind, name)
				for range rounds {
					n := 1 + rand.N(total)
					ctx, cancel := ctx, context.CancelFunc(func() {})
					if rand.N(3) == 0 {
						ctx, cancel = context.WithTimeout(ctx, rand.N(20*time.Millisecond))
					}
					err := k.acquire(ctx, n)
					cancel()
					if err != nil {
						continue
					}
					mu.Lock()
					out, got = out+n, got+1
					assert.LessOrEqual(t, out, total, "permits in use")
					out -= n
					mu.Unlock()
					if err := k.release(context.Background()); err != nil {
						assert.ErrorIs(t, err, lock.ErrIndeterminate)
					}
				}
			})
		}
	}
	wg.Wait()
	close(stop)
	troubling.Wait()
	t.Logf("%d of %d acquisitions succeeded", got, len(clients)*goroutines*rounds)
	assert.Positive(t, got)
	assert.NoError(t, ctx.Err(), "a waiter hangs")
	settled(t)
	requireExact(t, total, first)
	// Who could not leave the line is out of it in time.
	harness.Eventually(t, 10*time.Second+faultSlack, "all can be had", func() bool { return first.try(t.Context(), total) == nil })
	require.NoError(t, first.release(t.Context()))
}

// Connections are killed all the time, of every kind.
func TestConnectionsKilledInALoop(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range faultKinds {
			var all []*redlatch.Client
			for range 3 {
				all = append(all, harness.Client(t, s, faultQuietly))
			}
			churn(t, s, kind, all, func() {
				_, _ = testserver.Command(s.Addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
				_, _ = testserver.Command(s.Addr, "CLIENT", "KILL", "TYPE", "pubsub")
			})
		}
	})
}

// A borrowed connection spreads requests over several, so that one can overtake another,
// or speaks the older protocol.
func TestBorrowedConnections(t *testing.T) {
	for _, tt := range []struct {
		name string
		opt  rueidis.ClientOption
	}{
		{"multiplexed", rueidis.ClientOption{PipelineMultiplex: 3}},
		{"RESP2", rueidis.ClientOption{AlwaysRESP2: true, DisableCache: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			harness.Each(t, func(t *testing.T, s *testserver.Server) {
				for _, kind := range faultKinds {
					var all []*redlatch.Client
					for range 2 {
						opt := tt.opt
						opt.InitAddress = []string{s.Addr}
						conn, err := rueidis.NewClient(opt)
						require.NoError(t, err)
						t.Cleanup(conn.Close)
						c, err := redlatch.Wrap(t.Context(), conn, faultQuietly)
						require.NoError(t, err)
						t.Cleanup(c.Close)
						all = append(all, c)
					}
					churn(t, s, kind, all, func() { _, _ = testserver.Command(s.Addr, "SCRIPT", "FLUSH") })
				}
			})
		})
	}
}

func workerClient(addr string) (*redlatch.Client, error) {
	return redlatch.New(context.Background(), rueidis.ClientOption{InitAddress: []string{addr}},
		redlatch.WithWatchdogTimeout(outageTimeout), faultQuietly)
}

// permitHolder takes permits, says so, and says how it lost them.
func permitHolder(args []string) error {
	c, err := workerClient(args[0])
	if err != nil {
		return err
	}
	ctx := context.Background()
	permits, err := c.PermitSemaphore("pool").AcquireN(ctx, 2)
	if err != nil {
		return err
	}
	fmt.Println("holding")
	for _, p := range permits {
		<-p.Context().Done()
		fmt.Println(context.Cause(p.Context()))
		fmt.Println(p.Release(ctx))
	}
	return nil
}

// permitWaiter waits for permits, gives them back, and says so.
func permitWaiter(args []string) error {
	c, err := workerClient(args[0])
	if err != nil {
		return err
	}
	k := takerOf(c, &testserver.Server{Addr: args[0]}, args[1], "pool")
	fmt.Println("waiting")
	if err := k.acquire(context.Background(), 2); err != nil {
		return err
	}
	if err := k.release(context.Background()); err != nil {
		return err
	}
	fmt.Println("done")
	c.Close()
	return nil
}

// A process with permits is stopped for longer than their lease: others have them, and
// it hears of that when it goes on.
func TestAHolderStoppedPastItsLease(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		k := made(t, s, expirableKind, 2)
		p := harness.Spawn(t, "permit holder", s.Addr)
		require.Equal(t, "holding", p.Line(30*time.Second))
		require.ErrorIs(t, k.acquire(t.Context(), 1, lock.Wait(outageTimeout+outageTimeout/2)), lock.ErrNotAcquired, "they are renewed")
		p.Signal(syscall.SIGSTOP)
		began := time.Now()
		require.NoError(t, k.acquire(t.Context(), 2))
		require.Less(t, time.Since(began), outageTimeout+faultSlack)
		p.Signal(syscall.SIGCONT)
		for range 4 {
			require.Contains(t, p.Line(faultSoon), lock.ErrLost.Error())
		}
		p.Ended(faultSoon)
		requireExact(t, 2, k)
		require.NoError(t, k.release(t.Context()))
		requireExact(t, 2, k)
	})
}

// The process whose request is first in line is stopped, or killed: others are served
// when its place time is over, and it is served when it goes on.
func TestTheFirstInLineIsStopped(t *testing.T) {
	const place = outageTimeout / 3
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		for _, kind := range faultKinds {
			for _, how := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
				harness.Do(t, s.Addr, "DEL", "pool")
				k := made(t, s, kind, 2)
				require.NoError(t, k.try(t.Context(), 2))
				p := harness.Spawn(t, "permit waiter", s.Addr, kind)
				require.Equal(t, "waiting", p.Line(30*time.Second))
				harness.Eventually(t, faultSoon, "it is in line", func() bool { return standsInLine(t, s.Addr, "pool") == ":1" })
				p.Signal(how)
				began := time.Now()
				require.NoError(t, k.release(t.Context()))
				require.NoError(t, k.acquire(t.Context(), 1))
				require.Less(t, time.Since(began), place+faultSlack)
				requireExact(t, 2, k)
				require.NoError(t, k.release(t.Context()))
				if how == syscall.SIGSTOP {
					p.Signal(syscall.SIGCONT)
					require.Equal(t, "done", p.Line(faultSoon))
					p.Ended(faultSoon)
				}
				requireExact(t, 2, k)
			}
		}
	})
}
