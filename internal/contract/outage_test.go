package contract_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
)

// roles are who holds an object and who waits for it.
type roles struct {
	name        string
	held, waits lockOf
	rival       bool // a rival waits
}

// roles returns the combinations in which somebody has to wait.
func (k kind) roles() []roles {
	all := []roles{{k.name, k.of, k.rival, true}}
	if k.shared {
		all = append(all, roles{k.name + " behind a rival", k.rival, k.of, false})
	}
	return all
}

// Subscriptions are confirmed and no message ever arrives: every waiter gets in all the
// same, when the lease it waits for would be over, or when it looks without a reason.
func TestAllMessagesAreLost(t *testing.T) {
	const clients = 2
	eachVirtually(t, all, func(t *testing.T, s *harness.VirtualServer, k kind) {
		s.Server().SetPreHook(func(p *server.Peer, command string, _ ...string) bool {
			lost := command == "PUBLISH"
			if lost {
				p.WriteInt(clients)
			}
			return lost
		})
		for _, timeout := range []time.Duration{time.Second, redlatch.DefaultWatchdogTimeout} {
			for _, roles := range k.roles() {
				poll := cmp.Or(k.poll, safetyPoll)
				if k.leased {
					poll = min(poll, timeout)
				}
				each := 10
				if k.name == "latch" { // whose waiters let one in, all of them, each time
					each = 1
				}
				r := &room{k: k}
				option := redlatch.WithWatchdogTimeout(timeout)
				h := mustLock(t, t.Context(), roles.held(s.Client(t, option), "orders"))
				var all []*redlatch.Client
				done := make(chan error, clients*each)
				for range clients {
					c := s.Client(t, option)
					all = append(all, c)
					for range each {
						go func() { done <- r.pass(t, roles.waits(c, "orders"), roles.rival) }()
					}
					harness.Eventually(t, soon, "all wait", func() bool { return k.waiting(each, c) })
				}
				begin := time.Now()
				require.NoError(t, h.Unlock(t.Context()))
				first := poll
				if k.shared && roles.rival {
					first = min(poll, signPoll)
				}
				require.NoError(t, ends(t, done, first+100*time.Millisecond))
				for range cap(done) - 1 {
					require.NoError(t, ends(t, done, clients*poll+100*time.Millisecond-time.Since(begin)))
				}
				for _, c := range all {
					require.Zero(t, c.PubSub().Messages)
					c.Close()
				}
			}
		}
	})
}

// TestTheNetworkLosesAllMessages is TestAllMessagesAreLost on a real server, where
// the time that it takes is not exact.
func TestTheNetworkLosesAllMessages(t *testing.T) {
	const clients = 2
	each := harness.Size(1, 3)
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		holder := harness.Client(t, s)
		together(t, s, all, func(t *testing.T, k kind) {
			h := mustLock(t, t.Context(), k.of(holder, k.name))
			r := &room{k: k}
			done := make(chan error, clients*each)
			var all []*redlatch.Client
			for range clients {
				c, g := harness.GatedClient(t, s)
				g.Mute()
				all = append(all, c)
				for range each {
					go func() { done <- r.pass(t, k.rival(c, k.name), true) }()
				}
				harness.Eventually(t, soon, "all wait", func() bool { return k.waiting(each, c) })
			}
			require.NoError(t, h.Unlock(t.Context()))
			deadline := time.Now().Add(time.Duration(cap(done))*safetyPoll + soon)
			for range cap(done) {
				require.NoError(t, ends(t, done, time.Until(deadline)))
			}
			for _, c := range all {
				require.Zero(t, c.PubSub().Messages)
			}
		})
	})
}

// killConnections kills all connections to a server again and again, of every kind, and
// counts how often it did.
func killConnections(addr string) (kills *atomic.Int32, stop func()) {
	kills = new(atomic.Int32)
	ctx, cancel := context.WithCancel(context.Background())
	var killer sync.WaitGroup
	killer.Go(func() {
		for ctx.Err() == nil {
			<-time.After(15 * time.Millisecond)
			_, _ = testserver.Command(addr, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
			_, _ = testserver.Command(addr, "CLIENT", "KILL", "TYPE", "pubsub")
			kills.Add(1)
		}
	})
	return kills, func() {
		cancel()
		killer.Wait()
	}
}

// Calls may fail while connections are killed all the time, and say so. Nobody holds
// together with another, no waiter hangs, and nothing is left.
func TestConnectionsKilledInALoop(t *testing.T) {
	lasting := acquired // nobody takes back the count of a latch
	eachKind(t, lasting, func(t *testing.T, s *testserver.Server, k kind) {
		clients, goroutines, enough := harness.Size(2, 4), harness.Size(3, 4), int32(harness.Size(10, 100))
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		var all []*redlatch.Client
		for range clients {
			all = append(all, harness.Client(t, s, quiet))
		}
		kills, stop := killConnections(s.Addr)
		r := &room{k: k}
		var calls atomic.Int32
		var wg sync.WaitGroup
		for _, c := range all {
			for g := range goroutines {
				wg.Go(func() {
					for i := 0; kills.Load() < enough; i++ {
						calls.Add(1)
						ctx := ctx
						if g == 0 && k.owned {
							ctx = lock.WithOwner(ctx, c.NewOwner())
						}
						rival, l := k.shared && (g+i)%3 == 0, k.of(c, "orders")
						if rival {
							l = k.rival(c, "orders")
						}
						h, err := l.Lock(ctx)
						if err != nil {
							assert.NoError(t, ctx.Err(), "a waiter hangs")
							for _, wrong := range []error{lock.ErrNotHeld, lock.ErrLost, lock.ErrInvalid, lock.ErrClosed, lock.ErrReentered} {
								assert.NotErrorIs(t, err, wrong)
							}
							continue
						}
						r.enter(t, rival)
						if err := h.Unlock(ctx); err != nil {
							assert.ErrorIs(t, err, lock.ErrIndeterminate)
						}
					}
				})
			}
		}
		wg.Wait()
		stop()
		t.Logf("%d of %d acquisitions succeeded", r.entries.Load(), calls.Load())
		require.Positive(t, r.entries.Load())
		harness.Idle(t, all...)
		// A place in a line that nobody keeps is left to its time.
		require.NoError(t, k.rival(harness.Client(t, s), "orders").Do(t.Context(), nothing, lock.Wait(4*soon)))
	})
}

// The server forgets all scripts before every request, also while others wait.
func TestScriptFlush(t *testing.T) {
	eachKind(t, all, func(t *testing.T, s *testserver.Server, k kind) {
		flush := func() { harness.Do(t, s.Addr, "SCRIPT", "FLUSH") }
		c, other := harness.Client(t, s), harness.Client(t, s)
		for _, ctx := range k.owners(t, c) {
			for _, roles := range k.roles() {
				flush()
				h := mustLock(t, ctx, roles.held(c, "orders"))
				flush()
				if k.leased {
					require.NoError(t, h.Extend(t.Context(), time.Minute))
				}
				var waiters []<-chan error
				r := &room{k: k}
				for _, waiting := range []*redlatch.Client{c, other} {
					flush()
					for range 2 {
						waiters = append(waiters, async(func() error { return r.pass(t, roles.waits(waiting, "orders"), roles.rival) }))
					}
					harness.Eventually(t, soon, "they wait", func() bool { return k.waiting(2, waiting) })
				}
				flush()
				require.NoError(t, h.Unlock(t.Context()))
				for _, w := range waiters {
					flush()
					require.NoError(t, ends(t, w, soon))
				}
			}
		}
	})
}

// A server is killed while others wait, and comes back, empty or with its data.
func TestWaitersSurviveARestart(t *testing.T) {
	const bound = 20 * time.Second
	harness.EachOf(t, []bool{false, true}, func(saved bool) string { return fmt.Sprint("saved=", saved) }, func(t *testing.T, shared *testserver.Server, saved bool) {
		s := harness.Own(t, shared.Program)
		holder := harness.Client(t, s, quiet)
		restarted := barrierOf(len(kinds), func() {
			if saved {
				harness.Do(t, s.Addr, "SAVE")
			}
			s.Kill()
			assert.NoError(t, s.Restart())
		})
		together(t, s, all, func(t *testing.T, k kind) {
			restart := restarted.join(t)
			clients := []*redlatch.Client{harness.Client(t, s, quiet), harness.Client(t, s, quiet)}
			type scene struct {
				name    string
				h       lock.Hold
				r       *room
				waiters []<-chan error
			}
			var scenes []scene
			begun := 0
			for _, roles := range k.roles() {
				if roles.name != k.name {
					k.prepare(t, s.Addr, roles.name)
				}
				a := scene{name: roles.name, r: &room{k: k}}
				a.h = mustLock(t, t.Context(), roles.held(holder, roles.name), k.long()...)
				for range 2 {
					begun++
					for _, c := range clients {
						a.waiters = append(a.waiters, async(func() error { return a.r.pass(t, roles.waits(c, roles.name), roles.rival) }))
					}
				}
				scenes = append(scenes, a)
			}
			for _, c := range clients {
				harness.Eventually(t, soon, "all wait", func() bool { return k.waiting(begun, c) })
			}
			if saved {
				for _, a := range scenes { // the holders are inside
					a.r.inside.Add(writer)
				}
			}
			restart()
			began := time.Now()
			for _, a := range scenes {
				if !saved {
					k.prepare(t, s.Addr, a.name)
					continue
				}
				harness.Eventually(t, soon, "the holder is connected", func() bool { return holder.Ping(t.Context()) == nil })
				require.Empty(t, a.waiters[0])
				a.r.inside.Add(-writer)
				require.NoError(t, a.h.Unlock(t.Context()))
			}
			for _, a := range scenes {
				for _, w := range a.waiters {
					require.NoError(t, ends(t, w, bound-time.Since(began)))
				}
				if !saved && k.leased {
					require.ErrorIs(t, a.h.Unlock(t.Context()), lock.ErrLost)
				}
			}
			harness.Idle(t, clients...)
		})
	})
}

// Nobody listens where the server was, for longer than a release tries. It is then done in
// the background.
func TestReleaseInAnOutage(t *testing.T) {
	const (
		patience = 5 * time.Second
		slack    = 3 * time.Second
		trust    = 20 * time.Millisecond // in the server's last answer
	)
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		wanted := acquired // the count of a latch is never taken down twice
		rows := len(choose(wanted))
		killed := barrierOf(rows, func() {
			harness.Do(t, s.Addr, "SAVE")
			s.Kill()
		})
		restarted := barrierOf(rows, func() { assert.NoError(t, s.Restart()) })
		together(t, s, wanted, func(t *testing.T, k kind) {
			kill, restart := killed.join(t), restarted.join(t)
			c := harness.Client(t, s, quiet)
			h := mustLock(t, t.Context(), k.of(c, k.name))
			acquired := time.Now()
			waiter := k.waits(t, k.rival(c, k.name), c)
			kill()
			harness.Eventually(t, soon, "the client knows", func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				defer cancel()
				err := c.Ping(ctx)
				return err != nil && strings.Contains(err.Error(), "refused")
			})
			// Until then it would be passed on without a question, to a waiter that unlocks too.
			time.Sleep(time.Until(acquired.Add(trust)))
			begin := time.Now()
			require.ErrorIs(t, h.Unlock(t.Context()), lock.ErrIndeterminate)
			// Since somebody waits, releases may share their requests, one after the other.
			require.Less(t, time.Since(begin), 3*patience+slack)
			restart()
			require.NoError(t, ends(t, waiter, 2*soon))
			harness.Idle(t, c)
		})
	})
}

// trouble is a server that does not serve for a while.
type trouble struct {
	name string
	args []string // of the server
	// begin brings it about and returns what ends it, or waits for its end.
	begin  func(t testing.TB, s *testserver.Server) (end func())
	silent bool // the server does not answer at all
	renews bool // renewals get through
}

// paused is a server on which CLIENT PAUSE stops commands of a kind, for longer than the
// shortest lease of the test.
func paused(kind string) trouble {
	const pause = "7000"
	return trouble{
		name: "client pause " + kind, silent: true,
		begin: func(t testing.TB, s *testserver.Server) func() {
			harness.Do(t, s.Addr, "CLIENT", "PAUSE", pause, kind)
			return func() { harness.Do(t, s.Addr, "EVAL", "return redis.call('DEL', 'none')", "1", "none") }
		},
	}
}

var troubles = []trouble{
	paused("WRITE"),
	paused("ALL"),
	{
		name: "busy",
		begin: func(t testing.TB, s *testserver.Server) func() {
			harness.Do(t, s.Addr, "CONFIG", "SET", "lua-time-limit", "10")
			go func() { _, _ = testserver.Command(s.Addr, "EVAL", "while true do end", "0") }()
			harness.Answers(t, s, "-BUSY")
			return func() { harness.Do(t, s.Addr, "SCRIPT", "KILL") }
		},
	},
	{
		name: "loading",
		// The delay for each key is in microseconds. The server answers after each 2 MB; it loads 40.
		args: []string{"--key-load-delay", "150000", "--rdbcompression", "no"},
		begin: func(t testing.TB, s *testserver.Server) func() {
			const keys = "40"
			harness.Do(t, s.Addr, "EVAL", "for i = 1, ARGV[1] do redis.call('SETRANGE', 'filler:' .. i, 999999, 'x') end", "0", keys)
			harness.Do(t, s.Addr, "SAVE")
			s.Kill()
			require.NoError(t, s.Restart())
			harness.Answers(t, s, "-LOADING")
			return func() {
				harness.Answers(t, s, "+PONG")
				harness.Do(t, s.Addr, "EVAL", "for i = 1, ARGV[1] do redis.call('DEL', 'filler:' .. i) end", "0", keys)
			}
		},
	},
	{
		name: "no more clients",
		begin: func(t testing.TB, s *testserver.Server) func() {
			// One connection stays, and takes the only place.
			conn, release := harness.Conn(t, s.Addr).Dedicate()
			do := func(words ...string) {
				require.NoError(t, conn.Do(context.Background(), conn.B().Arbitrary(words...).Build()).Error())
			}
			do("CONFIG", "SET", "maxclients", "1")
			do("CLIENT", "KILL", "TYPE", "pubsub")
			do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
			return func() {
				do("CONFIG", "SET", "maxclients", "1000")
				release()
			}
		},
	},
	{
		name: "read only",
		begin: func(t testing.TB, s *testserver.Server) func() {
			harness.Do(t, s.Addr, "REPLICAOF", "127.0.0.1", "1")
			return func() { harness.Do(t, s.Addr, "REPLICAOF", "NO", "ONE") }
		},
	},
	{
		name: "out of memory", renews: true,
		begin: func(t testing.TB, s *testserver.Server) func() {
			harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "1")
			return func() { harness.Do(t, s.Addr, "CONFIG", "SET", "maxmemory", "0") }
		},
	},
}

// Holders keep what they can renew in time and hear of what they cannot; waiters ride the
// trouble out for as long as their watchdog timeout, and no longer; and afterwards
// everything works.
func TestServerInTrouble(t *testing.T) {
	const (
		// Timeouts of the watchdog: trouble lasts for longer than the first ones and
		// less than the last.
		impatient, short, long = time.Second, 4 * time.Second, 15 * time.Second
		// lead is for how long a lease lasts that is over soon after the trouble has
		// begun, and well before it ends.
		lead = 2500 * time.Millisecond
		// retryPause is the longest pause of a waiter between two attempts that fail.
		retryPause = time.Second
		slack      = 5 * time.Second
	)
	type row struct {
		trouble
		k kind
	}
	var rows []row
	for i, tr := range troubles {
		for j, k := range choose(leased) {
			// A short run has each trouble and each kind at least once.
			if !testing.Short() || j%len(troubles) == i {
				rows = append(rows, row{tr, k})
			}
		}
	}
	harness.EachOf(t, rows, func(m row) string { return m.name + "/" + m.k.name }, func(t *testing.T, shared *testserver.Server, m row) {
		k, s := m.k, harness.Own(t, shared.Program, m.args...)
		names := []string{"lost", "kept", "given back", "free soon", "new"}
		k.prepare(t, s.Addr, names...)
		client := func(timeout time.Duration) *redlatch.Client {
			return harness.Client(t, s, redlatch.WithWatchdogTimeout(timeout), quiet)
		}
		brief, lasting, waiting, hurried := client(short), client(long), client(long), client(impatient)
		curt, err := redlatch.New(t.Context(), rueidis.ClientOption{
			InitAddress: []string{s.Addr}, ConnWriteTimeout: time.Second, Dialer: net.Dialer{KeepAlive: 200 * time.Millisecond},
		}, quiet)
		require.NoError(t, err)
		t.Cleanup(curt.Close)

		lost, kept := mustLock(t, t.Context(), k.of(brief, "lost")), mustLock(t, t.Context(), k.of(lasting, "kept"))
		back := mustLock(t, t.Context(), k.of(lasting, "given back"))
		behind := func(c *redlatch.Client, name string) <-chan error {
			others := c.Stats()
			done := async(func() error { return k.rival(c, name).Do(context.Background(), nothing) })
			harness.Eventually(t, soon, "it waits", func() bool { return k.waiting(others.Waiting+others.Attempting+1, c) })
			return done
		}
		waiters := map[string]<-chan error{
			"behind a holder that is lost":        behind(waiting, "lost"),
			"behind a holder that goes on":        behind(waiting, "kept"),
			"behind a holder of the same process": behind(lasting, "kept"),
		}
		free := mustLock(t, t.Context(), k.of(brief, "free soon"), lock.Lease(lead))
		waiters["of a lock whose lease is over"] = async(func() error { return k.rival(waiting, "free soon").Do(context.Background(), nothing) })
		gone, gaveUp := make(chan error, 1), time.Time{}
		go func() {
			err := k.rival(hurried, "free soon").Do(context.Background(), nothing)
			gaveUp = time.Now()
			gone <- err
		}()
		harness.Eventually(t, soon, "they wait", func() bool { return k.waiting(1, hurried) && k.waiting(3, waiting) })
		lease, looks := time.Now().Add(lost.Remaining()), time.Now().Add(free.Remaining())
		begin := time.Now()
		end := m.begin(t, s)
		if now := time.Now(); now.After(looks) {
			looks = now
		}
		released := async(func() error { return back.Unlock(context.Background()) })

		_, err = k.of(curt, "new").TryLock(t.Context())
		require.Error(t, err)
		failed := func(err error) {
			t.Helper()
			require.Error(t, err)
			require.NotErrorIs(t, err, lock.ErrNotAcquired)
		}
		failed(err)
		if m.renews {
			harness.Eventually(t, 2*short, "the lease is renewed", func() bool {
				return time.Now().Add(lost.Remaining()).After(lease.Add(short / 4))
			})
		} else {
			select {
			case <-lost.Context().Done():
			case <-time.After(short + slack):
				require.FailNow(t, "the hold does not end")
			}
			var lostErr *lock.LostError
			require.ErrorAs(t, context.Cause(lost.Context()), &lostErr)
			require.Equal(t, lock.ReasonExpired, lostErr.Reason)
			require.Error(t, lostErr.Err)
		}
		if !m.silent {
			err := ends(t, gone, time.Until(looks)+impatient+retryPause+slack)
			if k.name != "permit semaphore" || !m.renews { // a permit that has expired takes no memory
				failed(err)
				require.GreaterOrEqual(t, gaveUp.Sub(begin), impatient)
			}
		}
		select { // before the trouble ends
		case <-free.Context().Done():
		case <-time.After(lead + slack):
			require.FailNow(t, "the lease is not over")
		}
		end()

		if err := lost.Unlock(t.Context()); m.renews {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, lock.ErrLost)
		}
		require.ErrorIs(t, free.Unlock(t.Context()), lock.ErrLost)
		if err := ends(t, released, soon); err != nil { // nobody knows how long the trouble took
			require.True(t, errors.Is(err, lock.ErrIndeterminate) || errors.Is(err, lock.ErrUnavailable), "%v", err)
		}
		harness.Eventually(t, 2*soon, "it is free", func() bool { // the first connection may still be from the trouble
			return k.rival(waiting, "given back").Do(t.Context(), nothing, lock.Wait(soon)) == nil
		})
		harness.Eventually(t, long, "the other lease is renewed", func() bool { return kept.Remaining() > long*9/10 })
		if k.owned {
			require.Equal(t, 1, harness.HoldCount(t, k.lock(waiting, "kept"), kept.Owner()))
		}
		require.NoError(t, kept.Unlock(t.Context()))
		for name, done := range waiters {
			require.NoError(t, ends(t, done, soon), name)
		}
		if m.silent {
			// The only answer took too long, for the request or for the lease.
			if err := ends(t, gone, soon); err != nil && !strings.Contains(err.Error(), "before its confirmation") {
				require.ErrorIs(t, err, lock.ErrIndeterminate)
			}
		}
		for _, c := range []*redlatch.Client{brief, lasting, waiting, hurried, curt} {
			// With a lease that is not over before a busy machine confirms it.
			require.NoError(t, k.of(c, "new").Do(t.Context(), nothing, lock.Lease(time.Minute)))
		}
		k.unmake(t, s.Addr, names...)
		harness.NothingStays(t, s.Addr)
	})
}

// Somebody deletes the key of a lock by hand, or puts something else there, while others
// wait. No message tells them.
func TestWaitersOfAKeyThatIsMeddledWith(t *testing.T) {
	const timeout = 2 * time.Second // of the watchdog
	eachVirtually(t, owned, func(t *testing.T, s *harness.VirtualServer, k kind) {
		for _, precious := range []bool{false, true} {
			for _, here := range []bool{false, true} {
				name := fmt.Sprintf("precious %v here %v", precious, here)
				c := s.Client(t, redlatch.WithWatchdogTimeout(timeout))
				// The holder hears of it at its next renewal, and tells the waiters of its
				// process. Others look when its lease would be over.
				holder, bound := c, timeout/3
				if !here {
					holder, bound = s.Client(t, redlatch.WithWatchdogTimeout(timeout)), timeout
				}
				h := mustLock(t, t.Context(), k.of(holder, name))
				var waiters []<-chan error
				for range 2 {
					waiters = append(waiters, async(func() error { return k.rival(c, name).Do(context.Background(), nothing) }))
				}
				harness.Eventually(t, soon, "both wait", func() bool { return k.waiting(2, c) })
				require.True(t, s.Del(name))
				if precious {
					_, err := s.RPush(name, "value")
					require.NoError(t, err)
				}
				deadline := time.Now().Add(bound + 100*time.Millisecond)
				for _, w := range waiters {
					err := ends(t, w, time.Until(deadline))
					if !precious {
						require.NoError(t, err, name)
					} else {
						require.ErrorContains(t, err, "WRONGTYPE", name)
						require.NotErrorIs(t, err, lock.ErrNotAcquired)
					}
				}
				time.Sleep(time.Until(deadline)) // a renewal is due
				var lost *lock.LostError
				require.ErrorAs(t, context.Cause(h.Context()), &lost)
				require.Equal(t, lock.ReasonGone, lost.Reason)
				require.Equal(t, error(lost), h.Unlock(t.Context()))
				if precious {
					require.True(t, s.Del(name))
				}
				require.NoError(t, k.rival(c, name).Do(t.Context(), nothing))
			}
		}
	})
}
