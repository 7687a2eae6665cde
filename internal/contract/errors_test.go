package contract_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/redlatch/redlatch"
	"github.com/redlatch/redlatch/internal/harness"
	"github.com/redlatch/redlatch/internal/session"
	"github.com/redlatch/redlatch/internal/testserver"
	"github.com/redlatch/redlatch/lock"
	"github.com/redlatch/redlatch/multilock"
)

// failure is what an error must say: its kind, or nil for a refusal of the server, and the end of
// the caller's context, or nil if that has not ended.
type failure struct{ kind, ended error }

// failureKinds are the kinds of which an error matches one at most.
var failureKinds = []error{lock.ErrNotAcquired, lock.ErrUnavailable, lock.ErrIndeterminate}

// check fails the test unless err says that, of the object of that name, in one line.
func (f failure) check(t testing.TB, err error, name string) {
	t.Helper()
	require.Error(t, err)
	for _, kind := range failureKinds {
		require.Equal(t, kind == f.kind, errors.Is(err, kind), "%v: %v", kind, err)
	}
	for _, ended := range []error{context.DeadlineExceeded, context.Canceled} {
		require.Equal(t, ended == f.ended, errors.Is(err, ended), "%v: %v", ended, err)
	}
	if f.ended == nil {
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	}
	require.NotContains(t, err.Error(), "\n")
	require.Contains(t, err.Error(), name)
	var call *lock.Error
	require.ErrorAs(t, err, &call)
	require.Equal(t, call.Waited > 0, strings.Contains(err.Error(), "(waited "), "%v", err)
	require.Equal(t, 1, strings.Count(err.Error(), "redlatch: "), "%v", err)
	if f.kind != nil {
		require.True(t, strings.HasPrefix(err.Error(), f.kind.Error()+": "), "%v", err)
	}
}

// curtly returns a client that does not wait for a reply for long, and waits out no trouble.
func curtly(t testing.TB, addr string) *redlatch.Client {
	t.Helper()
	c, err := redlatch.New(t.Context(), rueidis.ClientOption{
		InitAddress: []string{addr}, ConnWriteTimeout: time.Second,
		Dialer: net.Dialer{Timeout: time.Second, KeepAlive: 200 * time.Millisecond},
	}, quiet)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// fails makes every kind of attempt to acquire an object, which have to fail like that. Only the first
// of them has a connection to a silent server. What waits for the next one is not sent.
func fails(t *testing.T, l lock.Locker, kind error) {
	const wait = 200 * time.Millisecond
	first := true
	for name, run := range map[string]func() (context.Context, error){
		"TryLock": func() (context.Context, error) { return t.Context(), only(l.TryLock(t.Context())) },
		"Wait(0)": func() (context.Context, error) { return t.Context(), only(l.Lock(t.Context(), lock.Wait(0))) },
		"Wait":    func() (context.Context, error) { return t.Context(), only(l.Lock(t.Context(), lock.Wait(wait))) },
		"deadline": func() (context.Context, error) {
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			t.Cleanup(cancel)
			return ctx, only(l.Lock(ctx))
		},
		"canceled": func() (context.Context, error) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(wait, cancel)
			return ctx, only(l.Lock(ctx))
		},
	} {
		t.Log(name) // in a bubble there are no subtests
		ctx, err := run()
		// The wait may end during an attempt to connect, whose outcome is unknown.
		for again := 5; again > 0 && kind == lock.ErrUnavailable && errors.Is(err, lock.ErrIndeterminate); again-- {
			ctx, err = run()
		}
		expected := kind
		if !first && kind == lock.ErrIndeterminate && errors.Is(err, lock.ErrUnavailable) {
			require.ErrorContains(t, err, "not sent")
			expected = lock.ErrUnavailable
		}
		first = false
		failure{expected, ctx.Err()}.check(t, err, l.Name()) // the first attempt may end it before ctx does
	}
}

// reads makes the calls that change nothing on the server, which has to be unavailable.
func (k kind) reads(t *testing.T, c *redlatch.Client) {
	for name, call := range looks(k.of(c, k.name), c.NewOwner()) {
		t.Run(name, func(t *testing.T) {
			failure{lock.ErrUnavailable, nil}.check(t, call(t.Context()), k.name)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if err := call(ctx); ctx.Err() != nil { // it may fail before
				failure{lock.ErrUnavailable, context.DeadlineExceeded}.check(t, err, k.name)
			}
		})
	}
}

// acquired is for choose: a latch is waited for, but not acquired.
func acquired(k kind) bool { return k.name != "latch" && !k.memory }

// The call waits a moment for the server's answer, and
// only without one the outcome is unknown.
func TestErrorsOfAWaitThatEndsDuringAnAttempt(t *testing.T) {
	eachVirtually(t, acquired, func(t *testing.T, s *harness.VirtualServer, k kind) {
		for _, latency := range []time.Duration{session.Grace / 5, 3 * session.Grace} {
			s.Latency = latency
			step := latency / time.Duration(harness.Size(3, 8))
			c := s.Client(t)
			require.NoError(t, k.of(c, "orders").Do(t.Context(), nothing)) // the scripts are loaded
			h := mustLock(t, t.Context(), k.rival(s.Client(t), "orders"))
			kinds := map[error]int{}
			for wait := time.Millisecond; wait < 6*latency; wait += step {
				began := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), wait)
				_, err := k.of(c, "orders").Lock(ctx)
				cancel()
				require.LessOrEqual(t, time.Since(began), wait+2*session.Grace)
				kind := lock.ErrNotAcquired
				if latency > session.Grace && errors.Is(err, lock.ErrIndeterminate) {
					kind = lock.ErrIndeterminate
				}
				failure{kind, context.DeadlineExceeded}.check(t, err, "orders")
				kinds[kind]++
			}
			require.NotZero(t, kinds[lock.ErrNotAcquired])
			require.Equal(t, latency > session.Grace, kinds[lock.ErrIndeterminate] > 0)
			require.NoError(t, h.Unlock(t.Context()))
			for wait := time.Millisecond; wait < latency; wait += step {
				ctx, cancel := context.WithTimeout(t.Context(), wait)
				_, err := k.of(c, "orders").Lock(ctx)
				cancel()
				kind := lock.ErrNotAcquired
				if latency > session.Grace {
					kind = lock.ErrIndeterminate
				}
				failure{kind, context.DeadlineExceeded}.check(t, err, "orders")
				time.Sleep(time.Second) // what it has left is gone
				require.NoError(t, k.of(c, "orders").Do(t.Context(), nothing, lock.Wait(0)))
			}
		}
	})
}

// A caller whose wait has ended has left the server's queue: others may try at once.
func TestAWaitThatEndedIsNoObstacle(t *testing.T) {
	eachVirtually(t, acquired, func(t *testing.T, s *harness.VirtualServer, k kind) {
		others := s.Client(t)
		s.Latency = session.Grace / 5 // a script may have to be loaded
		c, step := s.Client(t), time.Duration(harness.Size(19, 7))*time.Millisecond
		for wait := 10 * time.Millisecond; wait < 300*time.Millisecond; wait += step {
			h := mustLock(t, t.Context(), k.rival(others, "orders"))
			_, err := k.of(c, "orders").Lock(t.Context(), lock.Wait(wait))
			failure{lock.ErrNotAcquired, nil}.check(t, err, "orders")
			require.NoError(t, h.Unlock(t.Context()))
			require.NoError(t, k.rival(others, "orders").Do(t.Context(), nothing, lock.Wait(0)), "after %v", wait)
		}
	})
}

// inTrouble runs a test for all kinds at the same time. Each calls begin, and the trouble begins when all
// have, and over, when it ends.
func inTrouble(t *testing.T, trouble, end func(), test func(t *testing.T, k kind, begin, over func())) {
	begun, ended := barrierOf(len(kinds), trouble), barrierOf(len(kinds), end)
	var all sync.WaitGroup
	for _, k := range kinds {
		all.Go(func() {
			t.Run(k.name, func(t *testing.T) { test(t, k, begun.join(t), ended.join(t)) })
		})
	}
	all.Wait()
}

// Nothing can be sent, except that a release continues in the background until the server is back, with its data
// or empty. Then all who wait get in.
func TestErrorsOfAServerThatIsDown(t *testing.T) {
	const trust = 20 * time.Millisecond // in the server's last answer
	harness.EachOf(t, []bool{true, false}, func(saved bool) string { return fmt.Sprint("saved=", saved) }, func(t *testing.T, shared *testserver.Server, saved bool) {
		s := harness.Own(t, shared.Program)
		kill := func() {
			// Until then a hold would be passed on without a question, to a waiter that unlocks too.
			time.Sleep(trust)
			if saved {
				harness.Do(t, s.Addr, "SAVE")
			}
			s.Kill()
		}
		restart := func() { assert.NoError(t, s.Restart()) }
		inTrouble(t, kill, restart, func(t *testing.T, k kind, begin, over func()) {
			c, held := curtly(t, s.Addr), k.name+" held"
			k.prepare(t, s.Addr, held)
			holds := []lock.Hold{mustLock(t, t.Context(), k.of(c, held), k.long()...)}
			var waiters []<-chan error
			for _, roles := range k.roles() {
				waiting := harness.Client(t, s, quiet)
				k.prepare(t, s.Addr, roles.name+" wanted")
				holds = append(holds, mustLock(t, t.Context(), roles.held(c, roles.name+" wanted"), k.long()...))
				waiters = append(waiters, k.waits(t, roles.waits(waiting, roles.name+" wanted"), waiting))
			}
			begin()
			harness.Eventually(t, soon, "the client knows", func() bool {
				err := c.Ping(t.Context())
				return err != nil && strings.Contains(err.Error(), "refused")
			})
			k.reads(t, c)
			if k.name == "latch" { // whose count is never taken down twice
				failure{lock.ErrUnavailable, nil}.check(t, holds[0].Unlock(t.Context()), held)
				over()
				require.NoError(t, holds[1].Unlock(t.Context()))
			} else {
				fails(t, k.of(c, k.name), lock.ErrUnavailable)
				if k.leased {
					failure{lock.ErrUnavailable, nil}.check(t, holds[0].Extend(t.Context(), 2*time.Hour), held)
				}
				for _, h := range holds {
					began := time.Now()
					failure{lock.ErrIndeterminate, nil}.check(t, h.Unlock(t.Context()), h.Name())
					require.Less(t, time.Since(began), unlockTime+busy)
				}
				over()
			}
			for i, roles := range k.roles() {
				k.prepare(t, s.Addr, roles.name+" wanted")
				require.NoError(t, ends(t, waiters[i], 2*soon))
			}
			harness.Idle(t, c)
		})
	})
}

// Requests are sent, and nothing comes back.
func TestErrorsOfAServerThatIsSilent(t *testing.T) {
	harness.Each(t, func(t *testing.T, s *testserver.Server) {
		inTrouble(t, s.Pause, s.Resume, func(t *testing.T, k kind, begin, over func()) {
			held, extended := k.name+" held", k.name+" extended"
			k.prepare(t, s.Addr, k.name, held, extended)
			// Each has a connection that the silence has not broken yet.
			holder, extender, reader, c := curtly(t, s.Addr), curtly(t, s.Addr), curtly(t, s.Addr), curtly(t, s.Addr)
			h := mustLock(t, t.Context(), k.of(holder, held), k.long()...)
			other := mustLock(t, t.Context(), k.of(extender, extended), k.long()...)
			begin()
			unlocked := async(func() error { return h.Unlock(t.Context()) })
			if k.name != "latch" {
				fails(t, k.of(c, k.name), lock.ErrIndeterminate)
			}
			if k.leased {
				failure{lock.ErrIndeterminate, nil}.check(t, other.Extend(t.Context(), 2*time.Hour), extended)
			}
			k.reads(t, reader)
			failure{lock.ErrIndeterminate, nil}.check(t, ends(t, unlocked, 2*soon), held)
			over()
		})
	})
}

// What another attempt may not get is temporary, and all others are the server's own words. Where the server
// rejects all writes, Unlock, Release and Detach say so after a second, and not that their outcome is
// unknown. When it takes writes again, the lock becomes free.
func TestErrorsOfAServerThatRefuses(t *testing.T) {
	type row struct {
		says          string
		kind          error
		before, after string
		ends          bool // also what releases
	}
	rows := []row{
		{"READONLY", lock.ErrUnavailable, "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", true},
		{"NOREPLICAS", nil, "CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0", true},
		{"NOPERM", nil, "ACL SETUSER default -eval -evalsha", "ACL SETUSER default +@all", false},
		{"OOM", nil, "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", false},
	}
	harness.EachOf(t, rows, func(r row) string { return r.says }, func(t *testing.T, shared *testserver.Server, tt row) {
		s := harness.Own(t, shared.Program)
		c := curtly(t, s.Addr)
		ends := make(map[string]func() error)
		for _, k := range kinds {
			k.prepare(t, s.Addr, k.name, k.name+" held", k.name+" detached")
			if !tt.ends || k.name == "latch" { // which has no Unlock
				continue
			}
			held := mustLock(t, t.Context(), k.of(c, k.name+" held"))
			ends[k.name+" held"] = func() error { return held.Unlock(t.Context()) }
			if !detachable(k) {
				continue
			}
			detached := mustLock(t, t.Context(), k.of(c, k.name+" detached"))
			ends[k.name+" detached"] = func() error {
				id, err := lock.Detach(t.Context(), detached, 10*time.Millisecond)
				assert.NotEmpty(t, id, "it may happen yet")
				return err
			}
		}

		harness.Do(t, s.Addr, strings.Fields(tt.before)...)
		for _, k := range kinds {
			err := only(k.of(c, k.name).TryLock(t.Context()))
			failure{tt.kind, nil}.check(t, err, k.name)
			require.ErrorContains(t, err, tt.says)
		}
		var all sync.WaitGroup
		for name, end := range ends {
			all.Go(func() {
				began := time.Now()
				err := end()
				assert.Less(t, time.Since(began), unlockTime, name)
				assert.NotErrorIs(t, err, lock.ErrIndeterminate, name)
				assert.Equal(t, tt.kind != nil, errors.Is(err, lock.ErrUnavailable), "%v", err)
				assert.ErrorContains(t, err, tt.says, name)
			})
		}
		all.Wait()
		harness.Do(t, s.Addr, strings.Fields(tt.after)...)

		for _, k := range kinds {
			for _, name := range []string{k.name, k.name + " held", k.name + " detached"} {
				require.NoError(t, k.rival(c, name).Do(t.Context(), nothing, lock.Wait(soon)), name)
			}
		}
	})
}

// The error names the member that others hold.
func TestErrorsOfMultiLocks(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		h := mustLock(t, t.Context(), s.Client(t).Lock("b"))
		for _, m := range []lock.Locker{
			c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c")), // in one script
			c.MultiLock(c.Lock("a"), c.FencedLock("b"), c.FairLock("c")),
			c.MultiLock(c.RedLock([]lock.Locker{c.Lock("b")}), c.Lock("a")),
		} {
			for _, wait := range []time.Duration{0, 50 * time.Millisecond} {
				_, err := m.Lock(t.Context(), lock.Wait(wait))
				failure{lock.ErrNotAcquired, nil}.check(t, err, m.Name())
				require.Regexp(t, `"b".* held by others`, err.Error())
			}
		}
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// The error counts the servers by answer.
func TestErrorsOfRedLocks(t *testing.T) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		c := harness.Client(t, shared)
		var servers []*testserver.Server
		var members []lock.Locker
		for range 3 {
			s := harness.Own(t, shared.Program)
			servers = append(servers, s)
			members = append(members, curtly(t, s.Addr).Lock("orders"))
		}
		red := c.RedLock(members, multilock.Timeout(600*time.Millisecond))
		require.NoError(t, red.Do(t.Context(), nothing)) // the servers are identified
		check := func(kind error, says string) {
			t.Helper()
			_, err := red.TryLock(t.Context())
			failure{kind, nil}.check(t, err, "orders")
			require.Regexp(t, says, err.Error())
		}
		theirs := mustLock(t, t.Context(), harness.Client(t, servers[0]).Lock("orders"))
		other := mustLock(t, t.Context(), harness.Client(t, servers[1]).Lock("orders"))
		check(lock.ErrNotAcquired, `[23] of 3 servers: 2 held by others`)
		require.NoError(t, other.Unlock(t.Context()))
		servers[2].Pause() // perhaps before it has answered the release of its vote, so that nothing more is sent to it
		check(lock.ErrNotAcquired, `2 of 3 servers: 1 held by others, 1 (silent|not reached) \(server 3: `)
		require.NoError(t, theirs.Unlock(t.Context()))
		servers[1].Pause()
		check(lock.ErrIndeterminate, `2 of 3 servers: (2|1 not reached, 1) silent \(server 2: `)
		servers[1].Kill()
		servers[2].Kill()
		harness.Eventually(t, soon, "the clients know", func() bool {
			_, err := red.TryLock(t.Context())
			return !errors.Is(err, lock.ErrIndeterminate)
		})
		harness.Eventually(t, soon, "no vote of the last attempt is left", func() bool {
			return c.Stats().Background == 0 && harness.Do(t, servers[0].Addr, "EXISTS", "orders") == ":0"
		})
		check(lock.ErrUnavailable, `[23] of 3 servers: 2 not reached.* \(server 2: `)
	})
}
