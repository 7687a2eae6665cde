package contract_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2/server"
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
					require.Zero(t, c.Stats().PubSub.Messages)
					c.Close()
				}
			}
		}
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
// trouble out, unless they do not wait for a server; and afterwards everything works.
func TestServerInTrouble(t *testing.T) {
	const (
		// Timeouts of the watchdog: trouble lasts for longer than the first one and
		// less than the last.
		short, long = 4 * time.Second, 15 * time.Second
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
			if drawn(i+j, len(troubles)) { // each trouble and each kind at least once
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
		brief, lasting, waiting, hurried, curt := client(short), client(long), client(long), client(long), curtly(t, s.Addr)
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
		gone := async(func() error { return k.rival(hurried, "free soon").Do(context.Background(), nothing, lock.FailFast()) })
		harness.Eventually(t, soon, "they wait", func() bool { return k.waiting(1, hurried) && k.waiting(3, waiting) })
		lease, looks := time.Now().Add(lost.Remaining()), time.Now().Add(free.Remaining())

		end := m.begin(t, s)
		if now := time.Now(); now.After(looks) {
			looks = now
		}
		released := async(func() error { return back.Unlock(context.Background()) })
		failed := func(err error) {
			t.Helper()
			require.Error(t, err)
			require.NotErrorIs(t, err, lock.ErrNotAcquired)
		}
		failed(only(k.of(curt, "new").TryLock(t.Context())))
		ended := func(h lock.Hold, d time.Duration) { harness.Receive(t, d, "the end of a hold", h.Context().Done()) }
		if m.renews {
			harness.Eventually(t, 2*short, "the lease is renewed", func() bool {
				return time.Now().Add(lost.Remaining()).After(lease.Add(short / 4))
			})
		} else {
			ended(lost, short+slack)
			var loss *lock.LostError
			require.ErrorAs(t, context.Cause(lost.Context()), &loss)
			require.Equal(t, lock.ReasonExpired, loss.Reason)
			require.Error(t, loss.Err)
		}
		if !m.silent {
			err := ends(t, gone, time.Until(looks)+retryPause+slack)
			if k.name != "permit semaphore" || !m.renews { // a permit that has expired takes no memory
				failed(err)
			}
		}
		ended(free, lead+slack) // before the trouble ends
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
			require.Equal(t, 1, harness.HoldCount(t, k.lock(waiting, "kept"), lock.OwnerOf(kept)))
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
				require.ErrorIs(t, h.Unlock(t.Context()), lost)
				if precious {
					require.True(t, s.Del(name))
				}
				require.NoError(t, k.rival(c, name).Do(t.Context(), nothing))
			}
		}
	})
}
