package contract_test

import (
	"context"
	"errors"
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
	require.Contains(t, err.Error(), "(waited ")
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
func (k kind) fails(t *testing.T, c *redlatch.Client, object string, kind error) {
	const wait = 200 * time.Millisecond
	l := k.of(c, object)
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
		failure{expected, ctx.Err()}.check(t, err, object) // the first attempt may end it before ctx does
	}
}

// reads makes the calls that change nothing on the server, which has to be unavailable.
func (k kind) reads(t *testing.T, c *redlatch.Client) {
	calls := map[string]func(ctx context.Context) error{}
	if k.owned {
		l := k.lock(c, k.name)
		calls["HoldCount"] = func(ctx context.Context) error { return only(l.HoldCount(ctx, c.NewOwner())) }
		calls["IsLocked"] = func(ctx context.Context) error { return only(c.Lock(k.name).IsLocked(ctx)) }
		calls["TTL"] = func(ctx context.Context) error { return only(c.Lock(k.name).TTL(ctx)) }
	}
	switch k.name {
	case "permit semaphore":
		calls["Available"] = func(ctx context.Context) error { return only(c.PermitSemaphore(k.name).Available(ctx)) }
	case "semaphore":
		calls["Available"] = func(ctx context.Context) error { return only(c.Semaphore(k.name).Available(ctx)) }
	case "election":
		calls["Leader"] = func(ctx context.Context) error { return only(c.Election(k.name).Leader(ctx)) }
	case "latch":
		calls["Count"] = func(ctx context.Context) error { return only(c.CountDownLatch(k.name).Count(ctx)) }
	}
	for name, call := range calls {
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

// TestErrorsOfAnObjectThatIsHeld: others hold it.
func TestErrorsOfAnObjectThatIsHeld(t *testing.T) {
	eachVirtually(t, andInMemory(acquired), func(t *testing.T, s *harness.VirtualServer, k kind) {
		h := mustLock(t, t.Context(), k.rival(s.Client(t), "orders"))
		c := s.Client(t)
		k.fails(t, c, "orders", lock.ErrNotAcquired)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := k.of(c, "orders").Lock(ctx)
		failure{lock.ErrNotAcquired, context.Canceled}.check(t, err, "orders")
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// TestErrorsOfAWaitThatEndsDuringAnAttempt: the call waits a moment for the server's answer, and
// only without one the outcome is unknown.
func TestErrorsOfAWaitThatEndsDuringAnAttempt(t *testing.T) {
	eachVirtually(t, acquired, func(t *testing.T, s *harness.VirtualServer, k kind) {
		for _, latency := range []time.Duration{session.Grace / 5, 3 * session.Grace} {
			s.Latency = latency
			c := s.Client(t)
			require.NoError(t, k.of(c, "orders").Do(t.Context(), nothing)) // the scripts are loaded
			h := mustLock(t, t.Context(), k.rival(s.Client(t), "orders"))
			kinds := map[error]int{}
			for wait := time.Millisecond; wait < 6*latency; wait += latency / 8 {
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
			for wait := time.Millisecond; wait < latency; wait += latency / 8 {
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
		c := s.Client(t)
		for wait := 10 * time.Millisecond; wait < 300*time.Millisecond; wait += 7 * time.Millisecond {
			h := mustLock(t, t.Context(), k.rival(others, "orders"))
			_, err := k.of(c, "orders").Lock(t.Context(), lock.Wait(wait))
			failure{lock.ErrNotAcquired, nil}.check(t, err, "orders")
			require.NoError(t, h.Unlock(t.Context()))
			require.NoError(t, k.rival(others, "orders").Do(t.Context(), nothing, lock.Wait(0)), "after %v", wait)
		}
	})
}

// inTrouble runs a test for all kinds at the same time. Each calls begin, and the trouble begins
// when all have.
func inTrouble(
	t *testing.T, trouble func(s *testserver.Server), test func(t *testing.T, s *testserver.Server, k kind, begin func()),
) {
	harness.Each(t, func(t *testing.T, shared *testserver.Server) {
		s := harness.Own(t, shared.Program)
		begun := barrierOf(len(kinds), func() { trouble(s) })
		var wg sync.WaitGroup
		for _, k := range kinds {
			wg.Go(func() {
				t.Run(k.name, func(t *testing.T) { test(t, s, k, begun.join(t)) })
			})
		}
		wg.Wait()
		s.Resume()
	})
}

// TestErrorsOfAServerThatIsDown: nothing can be sent, except that a release continues in the
// background.
func TestErrorsOfAServerThatIsDown(t *testing.T) {
	inTrouble(t, (*testserver.Server).Kill, func(t *testing.T, s *testserver.Server, k kind, begin func()) {
		c, held := curtly(t, s.Addr), k.name+" held"
		k.prepare(t, s.Addr, held)
		h := mustLock(t, t.Context(), k.of(c, held), k.long()...)
		begin()
		harness.Eventually(t, soon, "the client knows", func() bool {
			err := c.Ping(t.Context())
			return err != nil && strings.Contains(err.Error(), "refused")
		})
		k.reads(t, c)
		if k.name == "latch" {
			failure{lock.ErrUnavailable, nil}.check(t, h.Unlock(t.Context()), held)
			return
		}
		k.fails(t, c, k.name, lock.ErrUnavailable)
		if k.leased {
			failure{lock.ErrUnavailable, nil}.check(t, h.Extend(t.Context(), 2*time.Hour), held)
		}
		failure{lock.ErrIndeterminate, nil}.check(t, h.Unlock(t.Context()), held)
	})
}

// TestErrorsOfAServerThatIsSilent: requests are sent, and nothing comes back.
func TestErrorsOfAServerThatIsSilent(t *testing.T) {
	inTrouble(t, (*testserver.Server).Pause, func(t *testing.T, s *testserver.Server, k kind, begin func()) {
		held, extended := k.name+" held", k.name+" extended"
		k.prepare(t, s.Addr, k.name, held, extended)
		// Each has a connection that the silence has not broken yet.
		holder, extender, reader, c := curtly(t, s.Addr), curtly(t, s.Addr), curtly(t, s.Addr), curtly(t, s.Addr)
		h := mustLock(t, t.Context(), k.of(holder, held), k.long()...)
		other := mustLock(t, t.Context(), k.of(extender, extended), k.long()...)
		begin()
		unlocked := async(func() error { return h.Unlock(t.Context()) })
		if k.name != "latch" {
			k.fails(t, c, k.name, lock.ErrIndeterminate)
		}
		if k.leased {
			failure{lock.ErrIndeterminate, nil}.check(t, other.Extend(t.Context(), 2*time.Hour), extended)
		}
		k.reads(t, reader)
		failure{lock.ErrIndeterminate, nil}.check(t, ends(t, unlocked, 2*soon), held)
	})
}

// TestErrorsOfAServerThatRefuses: those that another attempt may not get are temporary, and all
// others are the server's own words.
func TestErrorsOfAServerThatRefuses(t *testing.T) {
	rows := []struct {
		name, says    string
		kind          error
		before, after string
	}{
		{"wrong type", "another type", nil, "EVAL redis.call('DEL',KEYS[1])redis.call('SADD',KEYS[1],1) 1 orders", "DEL orders"},
		{"no number", "another type", nil, "SET orders precious", "DEL orders"},
		{"read only", "READONLY", lock.ErrUnavailable, "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"},
		{"no right", "NOPERM", nil, "ACL SETUSER default -eval -evalsha", "ACL SETUSER default +@all"},
		{"full", "OOM", nil, "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"},
	}
	harness.EachOf(t, kinds, func(k kind) string { return k.name }, func(t *testing.T, shared *testserver.Server, k kind) {
		s := harness.Own(t, shared.Program)
		for _, tt := range rows {
			if tt.name == "no number" && k.free == "" && k.name != "latch" {
				continue
			}
			t.Run(tt.name, func(t *testing.T) {
				c := curtly(t, s.Addr)
				k.prepare(t, s.Addr, "orders")
				harness.Do(t, s.Addr, strings.Fields(tt.before)...)
				_, err := k.of(c, "orders").TryLock(t.Context())
				failure{tt.kind, nil}.check(t, err, "orders")
				require.ErrorContains(t, err, tt.says)
				harness.Do(t, s.Addr, strings.Fields(tt.after)...)
			})
		}
	})
}

// A server rejects all writes. Unlock, Release and Detach say so after a second, and not that their outcome is
// unknown. When the server takes writes again, the lock becomes free.
func TestUnlockWhileTheServerRejectsWrites(t *testing.T) {
	type row struct {
		says          string
		kind          error
		before, after string
	}
	rows := []row{
		{"READONLY", lock.ErrUnavailable, "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"},
		{"NOREPLICAS", nil, "CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"},
	}
	chosen := choose(func(k kind) bool { return !k.memory && k.name != "latch" }) // which has no Unlock
	harness.EachOf(t, rows, func(r row) string { return r.says }, func(t *testing.T, shared *testserver.Server, tt row) {
		s := harness.Own(t, shared.Program)
		c := curtly(t, s.Addr)
		var all sync.WaitGroup
		ends := make(map[string]func() error)
		for _, k := range chosen {
			k.prepare(t, s.Addr, k.name, k.name+" detached")
			unlocked := mustLock(t, t.Context(), k.of(c, k.name))
			ends[k.name] = func() error { return unlocked.Unlock(t.Context()) }
			if !detachable(k) {
				continue
			}
			detached := mustLock(t, t.Context(), k.of(c, k.name+" detached"))
			ends[k.name+" detached"] = func() error {
				id, err := detached.Detach(t.Context(), 10*time.Millisecond)
				assert.NotEmpty(t, id, "it may happen yet")
				return err
			}
		}
		harness.Do(t, s.Addr, strings.Fields(tt.before)...)
		for name, end := range ends {
			all.Go(func() {
				began := time.Now()
				err := end()
				assert.Less(t, time.Since(began), 2*time.Second+busy, name)
				assert.NotErrorIs(t, err, lock.ErrIndeterminate, name)
				assert.Equal(t, tt.kind != nil, errors.Is(err, lock.ErrUnavailable), "%v", err)
				assert.ErrorContains(t, err, tt.says, name)
			})
		}
		all.Wait()
		harness.Do(t, s.Addr, strings.Fields(tt.after)...)
		for _, k := range chosen {
			require.NoError(t, k.rival(c, k.name).Do(t.Context(), nothing, lock.Wait(soon)), k.name)
			require.NoError(t, k.rival(c, k.name+" detached").Do(t.Context(), nothing, lock.Wait(soon)), k.name)
		}
	})
}

// TestErrorsOfMultiLocks: the error names the member that others hold.
func TestErrorsOfMultiLocks(t *testing.T) {
	harness.Virtual(t, func(t *testing.T, s *harness.VirtualServer) {
		c := s.Client(t)
		h := mustLock(t, t.Context(), s.Client(t).Lock("b"))
		for _, m := range []lock.Locker{
			c.MultiLock(c.Lock("a"), c.Lock("b"), c.Lock("c")), // in one script
			c.MultiLock(c.Lock("a"), c.FencedLock("b"), c.FairLock("c")),
			c.MultiLock(c.RedLock(c.Lock("b")), c.Lock("a")),
		} {
			for _, wait := range []time.Duration{0, 50 * time.Millisecond} {
				_, err := m.Lock(t.Context(), lock.Wait(wait))
				failure{lock.ErrNotAcquired, nil}.check(t, err, m.Name())
				require.Regexp(t, `\): .*"b".* held by others`, err.Error())
			}
		}
		require.NoError(t, h.Unlock(t.Context()))
	})
}

// TestErrorsOfRedLocks: the error counts the servers by answer.
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
		red := c.RedLock(members...).WithTimeout(200 * time.Millisecond)
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
