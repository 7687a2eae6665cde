package contract_test

import (
	"context"
	"fmt"
	"maps"
	"runtime"
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

const (
	// callTime is the time that the callers of TestDeadlines have. busy is what a machine that
	// runs other tests may add; the driver would wait for 3 s.
	callTime = 300 * time.Millisecond
	busy     = 1500 * time.Millisecond
	// unlockTime bounds Unlock, whatever its context.
	unlockTime = 5 * time.Second
)

// calls are calls by name.
type calls map[string]func(ctx context.Context) error

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
	bounded = calls{
		"Lock": func(ctx context.Context) error { return only(k.of(c, free).Lock(ctx)) },
		"Lock with Wait": func(context.Context) error {
			return only(k.of(c, free).Lock(context.Background(), lock.Wait(callTime)))
		},
		"TryLock":        func(ctx context.Context) error { return only(k.of(c, free).TryLock(ctx)) },
		"Lock of a held": func(ctx context.Context) error { return only(k.rival(c, held).Lock(ctx)) },
	}
	if k.leased {
		bounded["Extend"] = func(ctx context.Context) error { return h.Extend(ctx, time.Minute) }
	}
	if k.owned {
		f := mustLock(t, t.Context(), k.of(c, forced))
		t.Cleanup(func() { _ = f.Unlock(context.Background()) })
		l, owner := k.lock(c, free), c.NewOwner()
		bounded["IsLocked"] = func(ctx context.Context) error { return only(l.IsLocked(ctx)) }
		bounded["IsHeldBy"] = func(ctx context.Context) error { return only(l.IsHeldBy(ctx, owner)) }
		bounded["HoldCount"] = func(ctx context.Context) error { return only(l.HoldCount(ctx, owner)) }
		bounded["TTL"] = func(ctx context.Context) error { return only(l.TTL(ctx)) }
		bounded["ForceUnlock"] = func(ctx context.Context) error { return only(k.lock(c, forced).ForceUnlock(ctx)) }
	}
	unlocks = calls{"Unlock": u.Unlock}
	switch k.name {
	case "semaphore":
		bounded["Available"] = func(ctx context.Context) error { return only(c.Semaphore(free).Available(ctx)) }
		bounded["TrySetPermits"] = func(ctx context.Context) error { return only(c.Semaphore(free).TrySetPermits(ctx, 1)) }
		bounded["AddPermits"] = func(ctx context.Context) error { return c.Semaphore(forced).AddPermits(ctx, 1) }
		bounded["Drain"] = func(ctx context.Context) error { return only(c.Semaphore(forced).Drain(ctx)) }
	case "permit semaphore":
		id := h.(permitHold).ID()
		bounded["Available"] = func(ctx context.Context) error { return only(c.PermitSemaphore(free).Available(ctx)) }
		bounded["LeaseTime"] = func(ctx context.Context) error { return only(c.PermitSemaphore(held).LeaseTime(ctx, id)) }
		bounded["UpdateLeaseTime"] = func(ctx context.Context) error {
			return only(c.PermitSemaphore(held).UpdateLeaseTime(ctx, id, time.Minute))
		}
	case "latch": // what it has as a lock does not keep to a context
		l := c.CountDownLatch(held)
		bounded = calls{
			"TrySetCount": func(ctx context.Context) error { return only(c.CountDownLatch(free).TrySetCount(ctx, 1)) },
			"Count":       func(ctx context.Context) error { return only(l.Count(ctx)) },
			"Wait":        l.Wait,
			"CountDown":   func(ctx context.Context) error { return only(l.CountDown(ctx)) },
			"Delete":      func(ctx context.Context) error { return only(l.Delete(ctx)) },
		}
		return bounded, nil
	}
	return bounded, unlocks
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

// Calls on objects of all kinds begin at once, just after the server has stopped, when the client still
// takes a single caller for alone. Each returns when its context ends, whichever of them was alone and
// whichever has to connect again.
func TestCallsThatBeginAtOnceEndWithTheirContexts(t *testing.T) {
	rounds := 5
	if testing.Short() {
		rounds = 2
	}
	harness.EachAlone(t, func(t *testing.T, s *testserver.Server) {
		for i := range rounds {
			c := harness.Client(t, s, quiet)
			all := make(calls)
			for _, k := range kinds {
				phase := fmt.Sprintf(" %s %d", t.Name(), i)
				bounded, _ := deadlineCalls(t, c, k, s.Addr, phase)
				for name, call := range bounded {
					all[name+" of "+k.name] = call
				}
			}
			s.Pause()
			all.endIn(t, callTime, func(name string, err error) { assert.Error(t, err, name) })
			s.Resume()
			harness.Idle(t, c)
		}
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
		harness.Eventually(t, time.Second, "few goroutines are left", func() bool { return runtime.NumGoroutine() < before+few })
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
				"TryLock": func() (lock.Hold, error) { return k.of(c, "orders").TryLock(t.Context(), length) },
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

// One caller leaves while the server stalls. Those behind it on its connection lose nothing.
func TestACallerThatLeavesFailsNobodyElse(t *testing.T) {
	const others, leaves, stall = 100, 150 * time.Millisecond, 400 * time.Millisecond
	harness.EachAlone(t, func(t *testing.T, s *testserver.Server) {
		c, g := harness.GatedClient(t, s, quiet)
		require.NoError(t, c.Lock("warm").Do(t.Context(), nothing))
		g.Stall()
		first := async(func() error {
			ctx, cancel := context.WithTimeout(context.Background(), leaves)
			defer cancel()
			return only(c.Lock("first").TryLock(ctx))
		})
		harness.Eventually(t, soon, "it is under way", func() bool { return c.Stats().Attempting == 1 })
		var all sync.WaitGroup
		for i := range others {
			all.Go(func() {
				assert.NoError(t, c.Lock(fmt.Sprint("other ", i)).Do(context.Background(), nothing))
			})
		}
		time.AfterFunc(stall, func() { _ = g.Open() })
		require.Error(t, ends(t, first, soon))
		all.Wait()
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
