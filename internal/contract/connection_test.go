package contract_test

import (
	"context"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
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

// What one caller's deadline does to the connection must not fail the calls of others behind it.
func TestADeadlineFailsNobodyElse(t *testing.T) {
	const others = 8 // of each kind
	name := func(borrowed bool) string { return fmt.Sprint("borrowed=", borrowed) }
	harness.EachOf(t, []bool{false, true}, name, func(t *testing.T, s *testserver.Server, borrowed bool) {
		c := harness.Client(t, s, quiet)
		if borrowed {
			_, c = borrow(t, s, rueidis.ClientOption{DisableCache: true, PipelineMultiplex: -1}, quiet)
		}
		names := []string{"short"}
		for i := range others {
			names = append(names, fmt.Sprint("other ", i))
		}
		do := func(k kind, name string, opts ...lock.Option) <-chan error {
			return async(func() error { return k.of(c, k.name+name).Do(context.Background(), nothing, opts...) })
		}
		for _, k := range choose(leased) {
			for _, name := range names {
				k.prepare(t, s.Addr, k.name+name)
			}
			require.NoError(t, ends(t, do(k, "short"), soon)) // has the scripts loaded
		}
		var short, long []<-chan error
		harness.Do(t, s.Addr, "CLIENT", "PAUSE", "60000", "WRITE")
		defer func() { harness.Do(t, s.Addr, "CLIENT", "UNPAUSE") }()

		for _, k := range choose(leased) {
			short = append(short, do(k, "short", lock.Wait(200*time.Millisecond)))
		}
		harness.Eventually(t, soon, "they are under way", func() bool {
			return c.Stats().Attempting >= len(short) || slices.ContainsFunc(short, func(w <-chan error) bool { return len(w) > 0 })
		})
		for _, k := range choose(leased) {
			for _, name := range names[1:] {
				long = append(long, do(k, name))
			}
		}
		for _, w := range short {
			harness.NotAcquired(t, ends(t, w, soon))
		}
		harness.Do(t, s.Addr, "CLIENT", "UNPAUSE")

		for _, w := range long {
			require.NoError(t, ends(t, w, soon))
		}
		harness.Idle(t, c)
		for _, k := range choose(leased) {
			for _, name := range names {
				k.unmake(t, s.Addr, k.name+name)
			}
		}
		harness.NothingStays(t, s.Addr)
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
			return stats.Waiting+stats.Attempting == len(waiters) && c.Stats().PubSub.Listeners > 0
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

const (
	// callTime is the time that the callers of TestDeadlines have. busy is what a machine that
	// runs other tests may add; the driver would wait for 3 s.
	callTime = 300 * time.Millisecond
	busy     = 1500 * time.Millisecond
	// requestTime bounds a request without a reply.
	requestTime = 3 * time.Second
	// unlockTime bounds Unlock, whatever its context.
	unlockTime = 5 * time.Second
)

// endIn makes all calls at once, each with a context that ends after callTime, and fails the
// test unless each returns an error within d.
func (cs calls) endIn(t *testing.T, d time.Duration, check func(name string, err error)) {
	t.Helper()
	var all sync.WaitGroup
	for name, call := range cs {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), callTime)
			defer cancel()
			begin := time.Now()
			err := call(ctx)
			assert.Less(t, time.Since(begin), d+busy, "%s: %v", name, err)
			check(name, err)
		})
	}
	all.Wait()
}

// deadlineCalls returns calls on objects of kind k, which no other phase uses: the bounded ones
// return when their context ends, unlocks within unlockTime.
func deadlineCalls(t *testing.T, c *redlatch.Client, k kind, addr, phase string) (bounded, unlocks calls) {
	held, free, forced, ended := k.name+phase+" held", k.name+phase, k.name+phase+" forced", k.name+phase+" ended"
	k.prepare(t, addr, held, free, forced, ended)
	h, u := mustLock(t, t.Context(), k.of(c, held)), mustLock(t, t.Context(), k.of(c, ended))
	t.Cleanup(func() { _ = h.Unlock(context.Background()) })
	bounded = looks(k.of(c, free), c.NewOwner())
	if k.name == "latch" { // what it has as a lock does not keep to a context
		l := c.CountDownLatch(held)
		bounded["TrySetCount"] = func(ctx context.Context) error { return only(c.CountDownLatch(free).TrySetCount(ctx, 1)) }
		bounded["Wait"] = l.Wait
		bounded["CountDown"] = func(ctx context.Context) error { return only(l.CountDown(ctx)) }
		bounded["Delete"] = func(ctx context.Context) error { return only(l.Delete(ctx)) }
		return bounded, nil
	}
	bounded["Lock"] = func(ctx context.Context) error { return only(k.of(c, free).Lock(ctx)) }
	bounded["Lock with Wait"] = func(context.Context) error {
		return only(k.of(c, free).Lock(context.Background(), lock.Wait(callTime)))
	}
	bounded["TryLock"] = func(ctx context.Context) error { return only(k.of(c, free).TryLock(ctx)) }
	bounded["Lock of a held"] = func(ctx context.Context) error { return only(k.rival(c, held).Lock(ctx)) }
	if k.leased {
		bounded["Extend"] = func(ctx context.Context) error { return h.Extend(ctx, time.Minute) }
	}
	if k.owned {
		f := mustLock(t, t.Context(), k.of(c, forced))
		t.Cleanup(func() { _ = f.Unlock(context.Background()) })
		bounded["ForceUnlock"] = func(ctx context.Context) error { return only(k.lock(c, forced).ForceUnlock(ctx)) }
	}
	switch k.name {
	case "semaphore":
		bounded["TrySetPermits"] = func(ctx context.Context) error { return only(c.Semaphore(free).TrySetPermits(ctx, 1)) }
		bounded["AddPermits"] = func(ctx context.Context) error { return c.Semaphore(forced).AddPermits(ctx, 1) }
		bounded["Drain"] = func(ctx context.Context) error { return only(c.Semaphore(forced).Drain(ctx)) }
	case "permit semaphore":
		id := h.(permitHold).ID()
		bounded["LeaseTime"] = func(ctx context.Context) error { return only(c.PermitSemaphore(held).TTL(ctx, id)) }
		bounded["UpdateLeaseTime"] = func(ctx context.Context) error {
			return only(c.PermitSemaphore(held).SetTTL(ctx, id, time.Minute))
		}
	}
	return bounded, calls{"Unlock": u.Unlock}
}

// unlockOfWaited returns Unlock of an object of kind k that somebody waits for: it has a question first.
func unlockOfWaited(t *testing.T, c *redlatch.Client, k kind, phase string) func(context.Context) error {
	w := mustLock(t, t.Context(), k.of(c, k.name+phase+" waited for"))
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	go func() { _ = k.rival(c, k.name+phase+" waited for").Do(ctx, nothing) }()
	return w.Unlock
}

// endInTime stops s, for a moment and for so long that its connections are given up. Every call on
// objects of those kinds, whose names have tag, returns soon after its context has ended, Unlock
// within 5 s, and what they may have acquired is free when s is back. So do the others, and meanwhile
// runs while s is stopped.
func endInTime(t *testing.T, s *testserver.Server, c *redlatch.Client, chosen []kind, tag string, others calls, meanwhile func()) {
	phases := []string{" at once" + tag, " later" + tag}
	bounded, unlocks := make(map[string]calls), make(map[string]calls)
	waiters := 0
	for _, phase := range phases {
		bounded[phase], unlocks[phase] = maps.Clone(others), calls{}
		for _, k := range chosen {
			b, u := deadlineCalls(t, c, k, s.Addr, phase)
			for name, call := range b {
				bounded[phase][name+" of "+k.name+phase] = call
			}
			for name, call := range u {
				unlocks[phase][name+" of "+k.name+phase] = call
			}
			if k.owned && !k.polls {
				unlocks[phase]["Unlock with a waiter of "+k.name+phase] = unlockOfWaited(t, c, k, phase)
				waiters++
			}
		}
	}
	harness.Waits(t, waiters, c)
	resume := sync.OnceFunc(s.Resume)
	defer resume()
	s.Pause()
	stopped := time.Now()
	var unlocking sync.WaitGroup
	defer unlocking.Wait()
	for _, phase := range phases {
		unlocking.Go(func() {
			unlocks[phase].endIn(t, unlockTime, func(name string, err error) {
				assert.ErrorIs(t, err, lock.ErrIndeterminate, name)
			})
		})
		bounded[phase].endIn(t, callTime, func(name string, err error) {
			if assert.Error(t, err, name) {
				assert.NotErrorIs(t, err, lock.ErrLost, name)
			}
		})
		meanwhile()
		time.Sleep(time.Until(stopped.Add(5 * time.Second))) // the connections are given up
	}
	unlocking.Wait()
	resume()
	harness.Idle(t, c)
	for _, phase := range phases {
		for _, k := range chosen {
			if k.name != "latch" && k.free == "" { // a count or permits may have been set
				for _, name := range []string{k.name + phase, k.name + phase + " ended"} {
					require.NoError(t, k.rival(c, name).Do(t.Context(), nothing, lock.Wait(soon)), name)
				}
			}
		}
	}
}

func TestDeadlines(t *testing.T) {
	type row struct {
		name   string
		client func(t *testing.T, s *testserver.Server) *redlatch.Client
	}
	rows := []row{
		{"New", func(t *testing.T, s *testserver.Server) *redlatch.Client { return harness.Client(t, s, quiet) }},
		{"Wrap", func(t *testing.T, s *testserver.Server) *redlatch.Client {
			_, c := borrow(t, s, rueidis.ClientOption{ConnWriteTimeout: 2 * time.Second}, quiet) // 10 s by default
			return c
		}},
	}
	harness.EachOf(t, rows, func(r row) string { return r.name }, func(t *testing.T, s *testserver.Server, r row) {
		c := r.client(t, s)
		conn := harness.Conn(t, s.Addr)
		endInTime(t, s, c, kinds, "", calls{
			"Ping": c.Ping,
			"New": func(ctx context.Context) error {
				return only(redlatch.New(ctx, rueidis.ClientOption{InitAddress: []string{s.Addr}}, quiet))
			},
			"Wrap": func(ctx context.Context) error { return only(redlatch.Wrap(ctx, conn, quiet)) },
		}, func() {})
	})
}

// A borrowed connection may wait for a reply for an hour. A call that makes a request, or a read that makes it
// twice, returns long before, also if its context does not end.
func TestRequestsOnABorrowedConnectionEnd(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		g := harness.NewGate(t, s)
		conn, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{g.Addr}, DisableCache: true, ConnWriteTimeout: time.Hour})
		require.NoError(t, err)
		t.Cleanup(conn.Close)
		c, err := redlatch.Wrap(t.Context(), conn, quiet)
		require.NoError(t, err)
		t.Cleanup(c.Close)

		requests := calls{"Ping": c.Ping}
		for _, k := range choose(acquired) {
			once, _ := deadlineCalls(t, c, k, s.Addr, " borrowed")
			delete(once, "Lock")
			delete(once, "Lock of a held")
			for name, call := range once {
				requests[name+" of "+k.name] = call
			}
		}
		g.Stall()
		var all sync.WaitGroup
		for name, call := range requests {
			all.Go(func() {
				began := time.Now()
				assert.Error(t, call(context.Background()), name)
				assert.Less(t, time.Since(began), 2*requestTime+busy, name)
			})
		}
		all.Wait()
		require.NoError(t, g.Open())
		harness.Idle(t, c)
	})
}

// One node of a cluster is stopped. Calls on objects of the other nodes take no longer than before.
func TestDeadlinesInACluster(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		cluster := harness.Cluster(t, shared.Program)
		c := harness.ClientAt(t, cluster.Addrs(), quiet)
		stopped, running := cluster.Owner("b"), cluster.Owner("c")
		require.NotEqual(t, stopped, running)
		tagged := choose(acquired) // the name of a latch has no braces
		for _, k := range tagged {
			k.prepare(t, running.Addr, k.name+"{c}")
		}
		endInTime(t, stopped, c, tagged, "{b}", calls{}, func() {
			for _, k := range tagged {
				began := time.Now()
				require.NoError(t, k.of(c, k.name+"{c}").Do(t.Context(), nothing, lock.Wait(soon)), k.name)
				require.Less(t, time.Since(began), 2*time.Second, k.name) // the driver waits for the stopped node for 3 s
			}
		})
	})
}

// noticing is the context of a caller that leaves when it looks whether it has left.
type noticing struct {
	context.Context
	leaves atomic.Bool
	leave  func()
}

func (l *noticing) Err() error {
	if l.leaves.Load() {
		l.leave()
	}
	return l.Context.Err()
}

// A caller leaves, and the server is stopped, just when the caller gets the lock. Its call does
// not wait for the release.
func TestACallerLeavesWhenItGetsTheLock(t *testing.T) {
	noticed := func(k kind) bool { return acquired(k) && k.name != "multi" }
	eachKind(t, noticed, func(t *testing.T, s *testserver.Server, k kind) {
		c := harness.Client(t, s, quiet)
		h := mustLock(t, t.Context(), k.rival(c, "orders"))
		ctx, cancel := context.WithCancel(t.Context())
		caller := &noticing{Context: ctx}
		var left time.Time
		resume := sync.OnceFunc(s.Resume)
		defer resume()
		caller.leave = sync.OnceFunc(func() {
			s.Pause()
			left = time.Now()
			cancel()
		})
		call := async(func() error {
			h, err := k.of(c, "orders").Lock(caller)
			if err == nil {
				return h.Unlock(context.Background())
			}
			return err
		})
		harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(1, c) })
		caller.leaves.Store(true)
		unlocked := async(func() error { return h.Unlock(context.Background()) })
		err := ends(t, call, soon)
		require.Less(t, time.Since(left), busy)
		harness.NotAcquired(t, err)
		require.ErrorIs(t, err, context.Canceled)
		resume()
		_ = ends(t, unlocked, 2*soon)
		require.NoError(t, k.rival(c, "orders").Do(t.Context(), nothing, lock.Wait(soon)))
		harness.Idle(t, c)
	})
}

// Callers leave a stopped server, and then the client is closed. Few goroutines are left while
// the server is silent, and none soon after Close, although the server does not come back.
func TestCallersOfASilentServerLeaveFewGoroutines(t *testing.T) {
	const callers, few = 500, 100 // few: 32 batches, 16 cleanups, and the goroutines of the client and of rueidis
	harness.EachAlone(t, func(t *testing.T, s *testserver.Server) {
		before := runtime.NumGoroutine()
		c := harness.Client(t, s, quiet)
		s.Pause()
		defer s.Resume()
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
				defer cancel()
				assert.Error(t, only(c.Lock("orders").TryLock(ctx)))
			})
		}
		all.Wait()
		harness.Eventually(t, 2*time.Second, "few goroutines are left", func() bool { return runtime.NumGoroutine() < before+few })
		c.Close()
		harness.Eventually(t, soon, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= before })
	})
}

// A lease that is over before its confirmation comes is an error that says so, after a few attempts.
func TestALeaseShorterThanARoundTrip(t *testing.T) {
	const latency = 20 * time.Millisecond
	eachVirtually(t, leased, func(t *testing.T, s *harness.VirtualServer, k kind) {
		s.Latency = latency
		c := s.Client(t)
		// The first acquisition loads the scripts. A Redlock also asks for the identity of the server.
		require.NoError(t, k.of(c, "orders").Do(t.Context(), nothing, lock.Lease(time.Minute)))
		lengths := []lock.Option{lock.Lease(latency), lock.Lease(latency / 2)}
		if k.name == "multi" { // whose three members take two requests
			lengths = append(lengths, lock.Lease(3*latency/2), lock.Lease(2*latency))
		}
		for _, length := range lengths {
			for what, call := range map[string]func() (lock.Hold, error){
				"Lock": func() (lock.Hold, error) {
					return k.of(c, "orders").Lock(t.Context(), length, lock.Wait(4*time.Second))
				},
				"TryLock": func() (lock.Hold, error) { return k.of(c, "orders").TryLock(t.Context(), length.(lock.HoldOption)) },
			} {
				s.Reset()
				began := time.Now()
				err := ends(t, async(func() error { return only(call()) }), time.Minute)
				require.ErrorContains(t, err, "was over before its confirmation came", "%s %v", what, length)
				harness.NotAcquired(t, err)
				require.Less(t, time.Since(began), 2*time.Second, what)
				require.Less(t, s.Calls("evalsha"), 40, what)
				time.Sleep(time.Minute)
			}
		}
		if k.name != "election" { // a term begins with another request
			h := mustLock(t, t.Context(), k.of(c, "orders"), lock.MaxHold(latency/2))
			<-h.Context().Done()
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrLost)
		}
		require.NoError(t, k.of(c, "orders").Do(t.Context(), nothing, lock.Lease(10*latency)))
	})
}

// Many callers with different names, and time for some round trips, call a healthy server that is far away.
// All of their calls succeed, and so do those that release.
func TestBurstsOfCallsToAFarServer(t *testing.T) {
	rows := []struct {
		callers       int
		latency, time time.Duration // one way
	}{
		{1000, 50 * time.Millisecond, time.Second},
		{5000, 2500 * time.Microsecond, 500 * time.Millisecond},
	}
	if testing.Short() {
		rows = rows[:1]
	}
	for _, row := range rows {
		harness.VirtualAlone(t, func(t *testing.T, s *harness.VirtualServer) {
			s.Latency = row.latency
			c := s.Client(t)
			require.NoError(t, c.Lock("first").Do(t.Context(), nothing))
			time.Sleep(time.Minute) // the last answer is old
			var all sync.WaitGroup
			for i := range row.callers {
				all.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), row.time)
					defer cancel()
					h, err := c.Lock(fmt.Sprint("orders ", i)).Lock(ctx)
					if assert.NoError(t, err) {
						assert.NoError(t, h.Unlock(t.Context()))
					}
				})
			}
			all.Wait()
		})
	}
}
